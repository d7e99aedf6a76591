"""Layouts with everything that is known of them before their stages are cut: pieces, and rates per parameter on the rank.

What depends on few columns is kept once per distinct combination (`pieces` by `factor`, `states` by `state`) and worked out when it
is first asked for, so that rows which lose by their work alone never cost more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..search_spaces.groups import groups
from ..search_spaces.layout import SCHEDULES, Floats, Ints, LayoutTable, Problem
from ..search_spaces.row_keys import distinct_rows, sorted_rows
from .lending import lends, lent_share
from .loads import Cuts, Loads, Prefix, chunk_loads, depths, saved_by_turns, span_loads
from .memory import StaticRates, transient_bytes
from .network import Network
from .pieces import Pieces
from .profile import Profile
from .sharding import ZERO1
from .stage_classes import StageClasses
from .states import Pair, States

INTERLEAVED = SCHEDULES.index("interleaved")


@dataclass(frozen=True)
class Combinations:
    """Distinct combinations of what pieces depend on, one row of `table` each; `alone`: every row has figures of its own."""

    problem: Problem
    network: Network
    profile: Profile
    table: LayoutTable
    pieces: Pieces
    alone: bool = False

    @cached_property
    def transient_bytes(self) -> Floats:
        """The largest short-lived block of a stage that does not compute the loss."""
        return transient_bytes(self.pieces, self.table, self.problem.stack, last=False)

    @cached_property
    def last_transient_bytes(self) -> Floats:
        """The same of the stage that does."""
        return transient_bytes(self.pieces, self.table, self.problem.stack, last=True)


class Rows:
    """The rows of a table; `factor` maps each to its place in `pieces`. All figures are (n,), or pairs of them.

    Pairs are for dense and for expert weights, their `*_s` seconds per parameter on the rank.
    """

    def __init__(self, of: Combinations, table: LayoutTable, factor: Ints, picked: npt.NDArray[np.intp] | None = None) -> None:
        self._of = of
        self._all, self._picked = table, picked
        self._columns: dict[str, npt.NDArray[Any]] = {}  # picked one by one, when they are asked for
        self.pieces = of.pieces
        self.factor = factor

    def __len__(self) -> int:
        return len(self.factor)

    @cached_property
    def table(self) -> LayoutTable:
        """The layouts themselves."""
        return self._all if self._picked is None else self._all.take(self._picked)

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column of the table, without the others."""
        if name not in self._columns:
            column = getattr(self._all, name)
            self._columns[name] = column if self._picked is None else column[self._picked]
        return self._columns[name]

    def take(self, rows: npt.NDArray[np.intp]) -> Rows:
        """The given rows; pieces and states stay shared, and what is known of the rows stays known."""
        picked = rows if self._picked is None else self._picked[rows]
        found = Rows(self._of, self._all, self.factor[rows], picked)
        if "_states" in self.__dict__:
            states, place = self._states
            found.__dict__["_states"] = states, place[rows]
        for name in ("p2p_s", "stalled_s"):
            if name in self.__dict__:
                found.__dict__[name] = getattr(self, name)[rows]
        return found

    def spread(self, table: LayoutTable, rows: npt.NDArray[np.intp]) -> Rows:
        """Other layouts, each of the same pieces as the row of this table that is given for it."""
        return Rows(self._of, table, self.factor[rows])

    def without_p2p(self) -> Rows:
        """The same rows on a network whose stages talk for free."""
        found = self.take(np.arange(len(self)))
        found.__dict__["p2p_s"] = np.zeros(len(self))
        return found

    @property
    def problem(self) -> Problem:
        """What the layouts are priced for."""
        return self._of.problem

    @property
    def second_embedding(self) -> bool:
        """Whether the last chunk keeps a copy of the embedding, where it lies on another stage."""
        return self._of.problem.model.tied_embeddings or "mtp" in self.pieces.blocks

    def known(self) -> Rows:
        """The same rows with their states and messages worked out, which rows taken from them then share."""
        _ = self._states, self.p2p_s, self.stalled_s
        return self

    @property
    def lent(self) -> Floats:
        """Share of a stage's activations that may lie on its partner's device, (n,)."""
        share = self.column("activation_offload")
        return np.asarray(share if lends(self.problem) else np.zeros(len(self)))

    @property
    def lent_shares(self) -> Floats:
        """What of it each stage lends, (n, pp), of rows that share pp, vpp and schedule."""
        pp, vpp, schedule = self.shape
        return lent_share(pp, self.column("num_microbatches")[:, None], np.arange(pp), self.lent[:, None], schedule, vpp)

    @cached_property
    def prefix(self) -> Prefix:
        """Running sums over the blocks, from which any cut is priced."""
        used, place = np.unique(self.factor, return_inverse=True)
        return Prefix.of(self.pieces, used).gathered(place, self.depth)

    @cached_property
    def shape(self) -> tuple[int, int, str]:
        """pp, vpp and schedule of rows that share them."""
        pp, vpp, code = (int(self.column(name)[0]) for name in ("pp", "vpp", "schedule"))
        return pp, vpp, SCHEDULES[code]

    @cached_property
    def depth(self) -> Ints:
        """Layers of every chunk that are redone."""
        return depths(self.column("recompute_mode"), self.column("recompute_layers"))

    @property
    def redone(self) -> Ints:
        """Layers of each chunk that are redone, (n, pp·vpp) where splits tell chunks apart, else (n, 1); rows share pp and vpp."""
        splits = self._all.splits
        if not splits:
            return self.depth[:, None]
        used, place = np.unique(self.column("split"), return_inverse=True)
        told = [splits[split].redone if split >= 0 else () for split in used.tolist()]
        if not any(told):
            return self.depth[:, None]
        chunks = max(map(len, told))
        own = np.array([each or (0,) * chunks for each in told], dtype=np.int64)[place]
        return np.where(np.array([bool(each) for each in told])[place, None], own, self.depth[:, None])

    @cached_property
    def work_s(self) -> Floats:
        """Forward and backward seconds of the whole model per micro-batch without recompute."""
        return self.pieces.work_s[self.factor]

    @cached_property
    def again_s(self) -> Floats:
        """Seconds to redo what the row's choice redoes in all layers, per micro-batch."""
        return self.pieces.again_s[self.factor]

    @property
    def work_columns(self) -> list[Ints]:
        """What the work of a pipeline depends on, whatever states are kept."""
        states, place = self._states
        return [self.factor, self.column("num_microbatches"), self.column("recompute_layers"), states.chain[place]]

    def alike(self) -> Iterator[Alike]:
        """The rows by split, schedule and whether micro-batches are left over, and in them what is shared."""
        table, state = self.table, self._states[1]
        shape = [table.split, table.schedule, table.leaves_over.astype(np.int64)]
        order, begin = sorted_rows([*shape, *self.work_columns])
        works, each = order[begin], np.diff(begin, append=len(order))
        first = sorted_rows([column[works] for column in shape])[1]
        for some in starmap(slice, pairwise([*first.tolist(), len(works)])):
            work = np.repeat(np.arange(len(works[some])), each[some])
            members = order[begin[some.start] :][: len(work)]
            kinds, kind = distinct_rows([state[members]])
            yield Alike(members, works[some], work, members[kinds], kind)

    def total_s(self, pp: int | Ints) -> Floats:
        """Work with what is redone on pp stages (one pp, or one per row)."""
        return np.asarray(self.work_s + self.nominal_recompute_s(pp, pp))

    def nominal_recompute_s(self, pp: int | Ints, stages: int | Ints) -> Floats:
        """Recompute seconds of the first `stages` of pp stages, at block depth K their mean: K blocks each; (n,), or
        (n, stages) for several stages of one pp.

        The mean keeps fill and drain of a stage independent of how the stages before were cut; its own steady work is exact.
        """
        depth, blocks = self.depth, len(self.pieces.blocks)
        share = np.where(depth >= blocks, 1.0, np.minimum(depth * pp / blocks, 1.0))
        whole = share * self.again_s / pp
        return np.asarray(whole[:, None] * stages if np.ndim(stages) > np.ndim(pp) else whole * stages)

    def chunks(self, cuts: Cuts) -> Loads:
        """Loads of the chunks between `cuts` (n, chunks+1), or (1, chunks+1) for all; (n, chunks)."""
        return chunk_loads(self.pieces, self.factor, self.redone, cuts)

    def class_chunks(self, classes: StageClasses) -> Loads:
        """Loads of one chunk of each class; (n, classes)."""
        return span_loads(self.pieces, self.factor, self.depth[:, None], *classes.spans)

    def class_stages(self, classes: StageClasses, chunks: Loads) -> Loads:
        """Loads of one stage of each class, from those of chunks of each class; (n, classes)."""
        return chunks if classes.split.vpp == 1 else self._stages(chunks.pick(classes.held), classes.first)

    def first_chunks(self, cuts: Cuts) -> Loads:
        """Loads of the chunks that the first of several stages holds between `cuts` (n, pp·vpp+1); (n, vpp)."""
        pp, vpp, _ = self.shape
        end = cuts[:, -1:]  # the last chunk is that of the head alone, and left out
        start, stop = (np.concatenate([each, end], axis=1) for each in (cuts[:, :-1:pp], cuts[:, 1::pp]))
        return span_loads(self.pieces, self.factor, self.depth[:, None], start, stop, vpp).pick(np.arange(vpp))

    def first_stage(self, chunks: Loads) -> Loads:
        """Loads of the first stage, from those of its chunks; (n, 1)."""
        return chunks if self.shape[1] == 1 else self._stages(chunks, np.zeros(1, dtype=np.int64))

    def _stages(self, held: Loads, stages: Ints) -> Loads:
        """Loads of interleaved stages (k,) from those of the chunks that they hold (n, vpp·k); (n, k)."""
        pp, vpp, _ = self.shape
        saved = saved_by_turns(held.saved_bytes, self.column("num_microbatches"), pp, vpp, stages)
        return replace(held.folded(len(stages)), saved_bytes=saved)

    @cached_property
    def _states(self) -> tuple[States, Ints]:
        """What ranks keep and exchange, once per distinct combination, and each row's place among those."""
        of = self._of
        first, place = (np.arange(len(self)),) * 2 if of.alone else distinct_rows(States.columns(self.table))
        weights = (each[self.factor[first]] for each in of.pieces.rank_weights)
        return States(of.problem, of.network, of.profile, self.table.take(first), *weights), place

    @cached_property
    def rates(self) -> StaticRates:
        """Bytes that one parameter on the rank costs."""
        states, place = self._states
        return states.rates.take(place)

    @cached_property
    def gradient_s(self) -> Pair:
        """To reduce gradients once per step."""
        return self._pair("gradient_s")

    @cached_property
    def parameter_s(self) -> Pair:
        """To gather weights once per step."""
        return self._pair("parameter_s")

    @cached_property
    def optimizer_s(self) -> Pair:
        """To step the states that lie on the device."""
        return self._pair("optimizer_s")

    @cached_property
    def offload_s(self) -> Pair:
        """To step those that lie on the host."""
        return self._pair("offload_s")

    @property
    def bucket_tails_s(self) -> tuple[Pair, Pair]:
        """The last bucket of gradients, of the framework's own size and of that which the stack names."""
        return self._pair("own_gradient_tail_s"), self._pair("gradient_tail_s")

    @property
    def bucket_heads_s(self) -> tuple[Pair, Pair]:
        """The first bucket of weights, likewise."""
        return self._pair("own_parameter_head_s"), self._pair("parameter_head_s")

    @property
    def offloaded_bytes(self) -> Pair:
        """What of their states leaves the device in a step."""
        return self._pair("offloaded_bytes")

    @cached_property
    def communicator_bytes(self) -> Floats:
        """Buffers of the communicators that a rank belongs to."""
        states, place = self._states
        return states.communicator_bytes[place]

    @cached_property
    def p2p_s(self) -> Floats:
        """One activation to the next stage, exposed part only: what the interleaved schedule hides is the stack's.

        A message that holds up both of its stages is no edge between their passes: it is in `stalled_s`.
        """
        stack = self._of.problem.stack
        if stack.blocking_p2p:
            return np.zeros(len(self))
        whole_s = self._message_s
        return np.where(self.column("schedule") == INTERLEAVED, whole_s * (1.0 - stack.overlap.pp_interleaved), whole_s)

    @property
    def _message_s(self) -> Floats:
        """One activation to the next stage."""
        stack, network = self._of.problem.stack, self._of.network
        message_bytes = self.pieces.layer_input_bytes[self.factor]
        once_s = self._edge_s(message_bytes)
        apart = (self.column("sequence_parallel") == 0) & (self.column("tp") > 1)
        if stack.scattered_p2p and apart.any():  # each TP rank a share, gathered where it arrives (arXiv 2104.04473, 4.1)
            share_s = self._edge_s(message_bytes / self.column("tp"))
            gather_s = network.all_gather_s(network.crossing(groups(self.table, "tp")), message_bytes)
            once_s = np.where(apart, share_s + gather_s, once_s)
        return np.where(self.column("pp") > 1, once_s, 0.0)

    def _edge_s(self, message_bytes: Floats) -> Floats:
        """A message from stage to stage, whichever levels lie between them."""
        states, place = self._states
        interleaved, vpp = self.column("schedule") == INTERLEAVED, self.column("vpp")
        wraps = np.where(interleaved, 1.0 - 1.0 / vpp, 0.0)  # vpp − 1 for every vpp passes through the stages
        return self._of.network.chain_s(states.edges[:, place], message_bytes, wraps)

    @property
    def hidden_gradients(self) -> Floats:
        """Share of the traffic of gradients, once per step, that can hide behind the last backward passes."""
        overlap = self._of.problem.stack.overlap
        return np.where(self.column("sharding") == ZERO1, overlap.dp_gradients * overlap.zero1_gradients, overlap.dp_gradients)

    @cached_property
    def stalled_s(self) -> Floats:
        """Seconds of a step for which messages between stages keep a stage from its passes."""
        return self._blocked_s + self._wrapped_s

    @property
    def _blocked_s(self) -> Floats:
        """Of them where sender and receiver do nothing else: the first and the last stage, which also hold embedding and head, send
        one message and receive one per micro-batch. All ranks of a stage send at once, as in a collective, and share its links.
        """
        stack, (states, place) = self.problem.stack, self._states
        if not stack.blocking_p2p:
            return np.zeros(len(self))
        away = states.outermost[place] > self._of.network.supernode
        reached = np.where(away, stack.scale_out_efficiency.value, stack.scale_up_efficiency.value)
        messages = 2.0 * (self.column("num_microbatches") + self.column("pp") - 1.0)
        return np.asarray(messages * self._message_s / reached)

    @property
    def _wrapped_s(self) -> Floats:
        """Of them where plain data parallelism wraps the stages of a pipeline and more supernodes than are free of stalls.

        Some stacks then lose one stall for each message that a stage receives or sends, forward and backward.
        """
        stack, network = self.problem.stack, self._of.network
        stall_s = stack.message_stall_s.value
        if not stall_s or self.problem.devices <= stack.stall_free_supernodes * network.sizes[network.supernode]:
            return np.zeros(len(self))
        pp = self.column("pp")
        hit = (pp > 1) & (self.column("dp") > 1) & (self.column("sharding") == 0)
        return np.where(hit, stall_s * np.where(pp > 2, 4.0, 2.0) * self.column("num_microbatches"), 0.0)

    @property
    def transient_bytes(self) -> Floats:
        """The largest short-lived block of a stage that does not compute the loss."""
        return self._of.transient_bytes[self.factor]

    @property
    def last_transient_bytes(self) -> Floats:
        """The same of the stage that does."""
        return self._of.last_transient_bytes[self.factor]

    @property
    def least_transient_bytes(self) -> Floats:
        """The short-lived block that any stage has, whichever holds the loss."""
        return np.minimum(self.transient_bytes, self.last_transient_bytes)

    def _pair(self, name: str) -> Pair:
        states, place = self._states
        dense, expert = getattr(states, name)
        return dense[place], expert[place]


@dataclass(frozen=True)
class Alike:
    """Rows of one split and schedule, those of like work side by side; `work` (rising) and `kind` lead each to its place among
    `works` and `kinds`: rows that stand for all that do the same work, and that keep and exchange the same states.
    """

    members: npt.NDArray[np.intp]
    works: npt.NDArray[np.intp]
    work: Ints
    kinds: npt.NDArray[np.intp]
    kind: Ints


def grouped(columns: Sequence[Ints]) -> Iterator[npt.NDArray[np.intp]]:
    """Rows that agree in all columns, group by group."""
    order, begin = sorted_rows(columns)
    yield from np.split(order, begin[1:]) if len(order) else ()

"""Layouts with everything that is known of them before their stages are cut: pieces, and rates per parameter on the rank.

What depends on few columns is kept once per distinct combination (`pieces` by `factor`, `states` by `state`) and worked out when it
is first asked for, so that rows which lose by their work alone never cost more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..search_spaces.groups import groups
from ..search_spaces.layout import SCHEDULES, Floats, Ints, LayoutTable, Problem, distinct_rows, row_keys
from .loads import Cuts, Loads, Prefix, chunk_loads, depths
from .memory import StaticRates, transient_bytes
from .network import Network
from .pieces import Pieces
from .profile import Profile
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
        return transient_bytes(self.pieces, self.table, self.problem.stack.footprint, last=False)

    @cached_property
    def last_transient_bytes(self) -> Floats:
        """The same of the stage that does."""
        return transient_bytes(self.pieces, self.table, self.problem.stack.footprint, last=True)

    @cached_property
    def largest_s(self) -> Floats:
        """Forward and backward seconds of the largest block."""
        return np.asarray(np.max([self.pieces.pieces[name].work_s for name in self.pieces.names], axis=0))


class Rows:
    """The rows of a table; `factor` maps each to its place in `pieces`. All figures are (n,), or pairs of them.

    Pairs are for dense and for expert weights, their `*_s` seconds per parameter on the rank.
    """

    def __init__(self, of: Combinations, table: LayoutTable, factor: Ints, picked: npt.NDArray[np.intp] | None = None) -> None:
        self._of = of
        self._all, self._picked = table, picked  # columns are picked one by one, when they are asked for
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
        column: npt.NDArray[Any] = getattr(self._all, name)
        return column if self._picked is None else column[self._picked]

    def take(self, rows: npt.NDArray[np.intp]) -> Rows:
        """The given rows; pieces and states stay shared, and what is known of the rows stays known."""
        picked = rows if self._picked is None else self._picked[rows]
        found = Rows(self._of, self._all, self.factor[rows], picked)
        if "_states" in self.__dict__:
            states, place = self._states
            found.__dict__["_states"] = states, place[rows]
        if "p2p_s" in self.__dict__:
            found.__dict__["p2p_s"] = self.p2p_s[rows]
        return found

    def spread(self, table: LayoutTable, rows: npt.NDArray[np.intp]) -> Rows:
        """Other layouts, each of the same pieces as the row of this table that is given for it."""
        return Rows(self._of, table, self.factor[rows])

    def without_p2p(self) -> Rows:
        """The same rows on a network whose stages talk for free."""
        found = self.take(np.arange(len(self)))
        found.__dict__["p2p_s"] = np.zeros(len(self))
        return found

    def known(self) -> Rows:
        """The same rows with their states and messages worked out, which rows taken from them then share."""
        _ = self._states, self.p2p_s
        return self

    @cached_property
    def prefix(self) -> Prefix:
        """Running sums over the blocks, from which any cut is priced."""
        used, place = np.unique(self.factor, return_inverse=True)
        return Prefix.of(self.pieces, used, self._of.problem.model.tied_embeddings).gathered(place, self.depth)

    @property
    def shape(self) -> tuple[int, int, str]:
        """pp, vpp and schedule of rows that share them."""
        first = slice(0, 1) if self._picked is None else self._picked[:1]
        pp, vpp, code = (int(getattr(self._all, name)[first][0]) for name in ("pp", "vpp", "schedule"))
        return pp, vpp, SCHEDULES[code]

    @cached_property
    def depth(self) -> Ints:
        """Layers of every chunk that are redone."""
        return depths(self.column("recompute_mode"), self.column("recompute_layers"))

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
        return [self.factor, self.column("num_microbatches"), self.column("recompute_layers"), states.outermost[place]]

    @property
    def kinds(self) -> tuple[npt.NDArray[np.intp], Ints]:
        """First rows of the distinct states that ranks keep and exchange, and each row's place among them."""
        return distinct_rows([self._states[1]])

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
        return chunk_loads(self.pieces, self.factor, self.depth, cuts, self._of.problem.model.tied_embeddings)

    def before(self, cuts: Cuts) -> tuple[Floats, Floats]:
        """Forward and backward seconds of the stages before each of those between `cuts` (n or 1, pp+1), (n, pp) each."""
        pp = cuts.shape[1] - 1
        whole = self.depth >= len(self.pieces.blocks)
        forward = np.zeros((len(self), pp))
        backward = np.where(whole[:, None], 0.0, self.nominal_recompute_s(pp, np.arange(pp)))
        for name in self.pieces.names:
            piece, count = self.pieces.pieces[name], self.pieces.running[name][cuts[:, :-1]].astype(np.float64)
            forward += count * piece.once_s[self.factor][:, None]
            backward += count * (piece.back_s[self.factor] + np.where(whole, piece.again_s[self.factor], 0.0))[:, None]
        embedding = self.pieces.pieces["embedding"]
        forward[:, 1:] += embedding.once_s[self.factor][:, None]
        backward[:, 1:] += embedding.back_s[self.factor][:, None]
        return forward, backward

    @cached_property
    def largest_s(self) -> Floats:
        """Forward and backward seconds of the largest block."""
        return self._of.largest_s[self.factor]

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

    @cached_property
    def communicator_bytes(self) -> Floats:
        """Buffers of the communicators that a rank belongs to."""
        states, place = self._states
        return states.communicator_bytes[place]

    @cached_property
    def p2p_s(self) -> Floats:
        """One activation to the next stage, exposed part only: what the interleaved schedule hides is the stack's."""
        stack, network = self._of.problem.stack, self._of.network
        message_bytes = self.pieces.layer_input_bytes[self.factor]
        states, place = self._states
        at = states.outermost[place]
        once_s = network.p2p_s(at, message_bytes)
        whole = self.column("sequence_parallel") > 0
        if stack.scattered_p2p and not whole.all():  # each TP rank a share, gathered where it arrives (arXiv 2104.04473, 4.1)
            share_s = network.p2p_s(at, message_bytes / self.column("tp"))
            gather_s = network.all_gather_s(network.crossing(groups(self.table, "tp")), message_bytes)
            once_s = np.where(whole, once_s, share_s + gather_s)
        piped = np.where(self.column("pp") > 1, once_s, 0.0)
        return np.where(self.column("schedule") == INTERLEAVED, piped * (1.0 - stack.overlap.pp_interleaved), piped)

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


def grouped(columns: Sequence[Ints], within: Sequence[Ints] = ()) -> Iterator[npt.NDArray[np.intp]]:
    """Rows that agree in all columns, group by group; in a group those that agree in the columns `within` lie together."""
    key = row_keys(columns)
    order = _sorted(row_keys(within)) if within else np.arange(len(key))
    order = order[_sorted(key[order])]
    if len(order):
        yield from np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def runs(columns: Sequence[Ints]) -> tuple[npt.NDArray[np.intp], Ints]:
    """First rows of the runs of neighbours that agree in all columns, and each row's run."""
    new = np.zeros(len(columns[0]), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new), np.cumsum(new) - 1


def _sorted(key: Ints) -> npt.NDArray[np.intp]:
    """The order that sorts the numbers and leaves equal ones as they lie; small ones in passes over their digits."""
    return np.argsort(key.astype(np.uint16) if key.max(initial=0) < 1 << 16 else key, kind="stable")

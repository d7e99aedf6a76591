"""Step time and memory of many layouts at once: pieces, stages, pipeline, data parallelism, optimizer.

A stage is priced from what it holds (`Loads`) and where it stands; everything about a row that does not depend on where its
stages are cut is a rate in `Rows`. The same functions serve a table with fixed splits, the exact partition of a survivor, and
the bound, since all of them broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from ..search_spaces.groups import inner_strides
from ..search_spaces.layout import FULL_UNIFORM, Bools, Floats, Ints, LayoutTable, Problem
from ..search_spaces.quantities import usable_bytes
from ..search_spaces.row_keys import distinct_rows, varying
from .known_wholes import KnownWholes, known_wholes
from .layers import LayerModel
from .lending import lends, most_lent, with_partners
from .loads import Cuts, Loads, picked, recompute_depths, taken
from .network import Network
from .pieces import PIECE_COLUMNS, WHOLE_COLUMNS, Pieces, Wholes
from .pipeline import in_flight, stage_ends_s, stage_paths_s
from .profile import Profile, load_profile
from .row_pieces import resident_share
from .rows import Alike, Combinations, Rows, grouped
from .schedules import loss_stages
from .sharding import ZERO2
from .split_passes import by_replay, held_bytes, pass_times, pipeline_ends_s, stage_loads
from .stage_classes import StageClasses
from .stage_times import Flow, Kept, StageTimes, behind_s, highest, in_line_s, late_s, left_s
from .states import Pair

CELLS_PER_BLOCK = 1 << 14
"""Works times stages that are priced together: what is known of them, and of the rows that share them, stays in the cache."""
FSDP_COLUMNS = ("sharding", "hsdp", "dp", "pp", "rank_order")
"""What the gathering of weights within a pass depends on."""


@dataclass(frozen=True)
class Prices:
    """Predicted figures of n layouts; `critical_stage` is the one whose gradients are reduced last."""

    step_time_s: Floats
    peak_bytes: Floats
    fits: Bools  # on the devices and, where states are offloaded, on their hosts
    critical_stage: Ints
    fullest_stage: Ints

    @classmethod
    def joined(cls, each: Sequence[Prices], members: Sequence[npt.NDArray[np.intp]]) -> Prices:
        """One table's, from those of some of its rows each. To gather them takes half as long as to scatter them."""
        if not each:
            none, nowhere = np.zeros(0), np.zeros(0, dtype=np.int64)
            return cls(none, none, none > 0, nowhere, nowhere)
        order = np.concatenate(members)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cls(*(np.concatenate([getattr(one, name) for one in each])[place] for name in cls.__dataclass_fields__))


class CostModel:
    """Prices layouts of one problem. `profile` defaults to the accelerator's own.

    `problem` is kept with its stack as that runs on the accelerator: its documented figures, overlaid by the profile's.
    """

    def __init__(self, problem: Problem, profile: Profile | None = None) -> None:
        accelerator = problem.cluster.accelerator.priced_as
        self.profile = profile or load_profile(accelerator)
        stack = problem.stack.with_figures(self.profile.stack_figures(problem.stack, accelerator))
        self.problem = problem = problem.model_copy(update={"stack": stack})
        reached = stack.scale_up_efficiency.value, stack.scale_out_share(problem.devices)
        kernels = stack.flex_backend, stack.exchange_sms
        self.network = Network(problem.cluster, self.profile, problem.allocated_sizes, *reached, *kernels)
        self.layers = LayerModel(problem, self.profile, self.network)
        self.blocks = self.layers.blocks

    @cached_property
    def _known(self) -> KnownWholes:
        return known_wholes(self.problem, self.profile)

    @property
    def usable_bytes(self) -> float:
        """Device memory that a plan may fill: capacity − context − margin."""
        return usable_bytes(self.problem)

    @property
    def host_limit_bytes(self) -> float:
        """Memory of the host, or of the supernode's pool, that what one device offloads may fill."""
        return self.problem.cluster.tier(self.problem.workload.offload_to).memory_bytes_per_device.value

    def host_bytes(self, rows: Rows, load: Loads) -> Floats:
        """Host memory that stages fill with offloaded optimizer states, per device; shaped like the loads."""
        return _held(rows.rates.host, load)

    def _moved_bytes(self, rows: Rows, load: Loads, stages: Ints) -> Floats:
        """The same of the activations in flight that are offloaded, of stages (k,), (n, k)."""
        held, _ = self._in_flight(rows, stages)
        return np.asarray(load.saved_bytes * held * _across(moved_share(rows)))

    def away_bytes(self, rows: Rows, load: Loads) -> Floats:
        """All that stages offload, per device: states, and activations in flight; (n, pp), or (1, 1) where nothing leaves."""
        away = self.host_bytes(rows, load) if rows.column("optimizer_offload").any() else np.zeros((1, 1))
        if rows.column("activation_offload").any() and not lends(self.problem):
            away = away + self._moved_bytes(rows, load, np.arange(rows.shape[0]))
        return away

    def rows(self, table: LayoutTable) -> Rows:
        """The rows of a table, from which everything about them that does not depend on where their stages are cut follows."""
        first, factor = self._factor_rows(table)
        distinct = table.take(first)
        return Rows(self._combinations(distinct), table, factor)

    def _combinations(self, table: LayoutTable) -> Combinations:
        return Combinations(self.problem, self.network, self.profile, table, self.pieces(table))

    def pieces(self, table: LayoutTable) -> Pieces:
        """Costs of every piece for each row."""
        return self.layers.pieces(table, *self._wholes(table))

    def _wholes(self, table: LayoutTable) -> tuple[Wholes, Ints]:
        """What pieces cost before recompute and sharding, and the place of each row's; combinations of WHOLE_COLUMNS that were met
        before are not priced again.
        """
        piped = (table.pp > 1) & self.problem.stack.slower_in_pipelines  # a layer costs more in a pipeline
        columns = [*(getattr(table, name) for name in WHOLE_COLUMNS), piped, *inner_strides(table)]
        first, member = distinct_rows(columns)
        each = np.stack([column[first].astype(np.int64) for column in columns], axis=1)
        keys = each.view(f"V{each.itemsize * each.shape[1]}").ravel().tolist()
        wholes, place = self._known.of(keys, lambda new: self.layers.wholes(table.take(first[new])))
        return wholes, place[member]

    def price(self, table: LayoutTable, closed_form: bool = False) -> Prices:
        """Step time and peak memory of every row, whose `split` must name one of the table's splits.

        `closed_form` times schedules that are priced by replay from below instead (interleaved ones).
        """
        return self.price_rows(self.rows(table), closed_form)

    def price_each(self, table: LayoutTable, models: Sequence[CostModel]) -> Prices:
        """The same of every row by a model of its own, of models that differ from this one in how tokens are routed alone."""
        one = [np.array([row]) for row in range(len(table))]
        each = (model._wholes(table.take(row)) for model, row in zip(models, one, strict=True))
        wholes, place = reduce(Wholes.joined, (whole.take(place) for whole, place in each)), np.arange(len(table))
        pieces = self.layers.pieces(table, wholes, place)
        return self.price_rows(Rows(Combinations(self.problem, self.network, self.profile, table, pieces), table, place))

    def price_rows(self, rows: Rows, closed_form: bool = False) -> Prices:
        """The same for rows that are at hand."""
        splits, split = rows.table.splits, rows.column("split")
        members: list[npt.NDArray[np.intp]] = []
        found: list[Prices] = []
        for group in rows.alike():
            classes = StageClasses.of(splits[int(split[group.members[0]])], self.blocks)
            for some, priced in self._price_group(rows, group, classes, closed_form):
                members.append(group.members[some])
                found.append(priced)
        return Prices.joined(found, members)

    def price_cuts(self, rows: Rows, cuts: Cuts, closed_form: bool = False) -> Prices:
        """Step time and peak memory of rows that share pp, vpp and schedule, cut at `cuts` (n, pp·vpp+1), or alike at (1, ·)."""
        cuts = np.ascontiguousarray(np.broadcast_to(cuts, (len(rows), cuts.shape[1])))
        told = np.concatenate([cuts, rows.redone], axis=1)
        works, work = distinct_rows([*rows.work_columns, *varying(told)])  # those that do the same share their pipeline
        flow = self.flow(rows.take(works), cuts[works], closed_form).take(work)
        return self.price_flow(rows, flow)

    def price_flow(self, rows: Rows, flow: Flow) -> Prices:
        """The same of rows whose pipeline is known."""
        away = self.away_bytes(rows, flow.load)
        times = self.around_pipeline(rows, flow)
        after_s = times.after_s.max(axis=1) + rows.stalled_s
        return self._prices(times.done_s, after_s, self.stage_bytes(rows, flow.load), away.max(axis=1))

    def _price_group(self, rows: Rows, group: Alike, classes: StageClasses, closed_form: bool) -> Iterator[tuple[slice, Prices]]:
        """Rows that share split and schedule, some of them after the others."""
        if by_replay(rows.take(group.works)) or classes.split.redone or rows.lent[group.members].any():
            yield slice(len(group.members)), self.price_cuts(rows.take(group.members), classes.cuts)
        else:
            yield from self._price_alike(rows, group, classes, closed_form)

    def _price_alike(self, rows: Rows, group: Alike, classes: StageClasses, closed_form: bool) -> Iterator[tuple[slice, Prices]]:
        """The same for rows that share split and schedule, some of them after the others.

        Those that do the same work share their pipeline, and those that keep the same states what is done for them: each is
        worked out once, by class of stages where it depends on what they hold, so that only sums are as many as rows and stages.
        """
        keeping = rows.take(group.kinds)
        chunks = keeping.class_chunks(classes).pick(classes.held)
        load = chunks.folded(len(classes.first))
        kept, states = self.kept(keeping, load, chunks), self._state_bytes(keeping, load)
        offloaded, moved = (keeping.column(f"{name}_offload").any() for name in ("optimizer", "activation"))
        host = self.host_bytes(keeping, load) if offloaded or moved else None
        gradients = in_line_s(kept.gradients_s, kept.turns)
        parameters = None if kept.parameters_s is None else in_line_s(kept.parameters_s, kept.turns)
        step = max(1, CELLS_PER_BLOCK // len(classes.runs))
        for first in range(0, len(group.works), step):
            working = rows.take(group.works[first : first + step])
            flow = self._class_flow(working, classes, closed_form)
            held, last = self._in_flight(working, classes.first)
            used = self._working_bytes(working, flow.load.saved_bytes * held, last)
            some = slice(*np.searchsorted(group.work, [first, first + step]).tolist())
            work, kind = group.work[some] - first, group.kind[some]
            done = taken(flow.end_s, work)
            done += taken(kept.exposed_gradients_s, kind)
            done += left_s(taken(gradients, kind), taken(behind_s(flow.backward_s, kept.turns), work), kept.turns)
            after = taken(kept.stepped_s, kind)
            if parameters is not None:
                hidden = behind_s(flow.forward_s, kept.turns, flow.lead_s)
                after += left_s(taken(parameters, kind), taken(hidden, work), kept.turns)
            peak = taken(used, work)
            peak += taken(states, kind)
            away = np.zeros((1, 1)) if host is None else taken(host, kind)
            if moved:
                away += taken(self._moved_bytes(working, flow.load, classes.first), work)
            after_s = after.max(axis=1)
            if self.problem.stack.stalls:
                after_s += rows.take(group.members[some]).stalled_s
            yield some, self._prices(done, after_s, peak, away.max(axis=1), classes.first)

    def _class_flow(self, rows: Rows, classes: StageClasses, closed_form: bool) -> Flow:
        """Of rows of one split the pipeline as `flow` has it, at the first stage of every class, (n, classes).

        No other stage of a class ends later, hides less of the weights that it gathers, or has more micro-batches in flight.
        """
        (pp, vpp, schedule), m = rows.shape, rows.column("num_microbatches")
        chunks = rows.class_chunks(classes)
        load, passes = rows.class_stages(classes, chunks), chunks.pick(classes.held)
        if vpp == 1:
            lengths, each = classes.run_lengths, load.pick(classes.runs)
            ends = stage_ends_s(schedule, pp, vpp, each.forward_s, each.backward_s, rows.p2p_s, m, lengths, closed_form)
            lead, ends = picked(_before(each.forward_s * lengths), classes.first_runs), picked(ends, classes.first_runs)
        else:
            whole = chunks.pick(classes.chunk)
            ends = stage_ends_s(schedule, pp, vpp, whole.forward_s, whole.backward_s, rows.p2p_s, m, closed_form=closed_form)
            lead, ends = picked(_before(whole.forward_s[:, :pp]), classes.first), picked(ends, classes.first)
        return Flow(chunks, load, ends, *self._free_s(rows, lead, passes.forward_s, passes.backward_s))

    def _prices(
        self, done_s: Floats, after_s: Floats, peak_bytes: Floats, host_bytes: Floats | float, stages: Ints | None = None
    ) -> Prices:
        """From figures of all stages, or of the given ones, (n, stages), and of what comes after, (n,)."""
        (done, critical), (peak, fullest) = highest(done_s), highest(peak_bytes)
        step_s = done + after_s + self.problem.stack.step_overhead_s.value
        fits = (peak <= self.usable_bytes) & (host_bytes <= self.host_limit_bytes)
        if stages is not None:
            critical, fullest = stages[critical], stages[fullest]
        return Prices(step_s, peak, fits, critical, fullest)

    def flow(self, rows: Rows, cuts: Cuts, closed_form: bool = False) -> Flow:
        """What the stages of rows that share pp, vpp and schedule hold, and when they end, (n, pp)."""
        (pp, vpp, schedule), chunks, m = rows.shape, rows.chunks(cuts), rows.column("num_microbatches")
        load = self._cut_loads(rows, cuts, chunks)
        if by_replay(rows):
            ends = pipeline_ends_s(rows, pass_times(self.layers, rows, cuts, chunks))
        else:
            ends = stage_ends_s(schedule, pp, vpp, chunks.forward_s, chunks.backward_s, rows.p2p_s, m, closed_form=closed_form)
        passes = self._passes(rows, chunks, load)
        lead = _before(passes.forward_s[:, :pp])
        return Flow(chunks, load, ends, *self._free_s(rows, lead, passes.forward_s, passes.backward_s))

    def first_flow(self, rows: Rows, cuts: Cuts, end_s: Floats) -> Flow:
        """The same of the first of several stages alone, whose chunks run one by one, (n, 1), given when it ends, (n,)."""
        chunks = rows.first_chunks(cuts)
        free_s = self._free_s(rows, np.zeros((len(rows), 1)), chunks.forward_s, chunks.backward_s)
        return Flow(chunks, rows.first_stage(chunks), end_s[:, None], *free_s)

    def least_step_s(self, rows: Rows, flow: Flow) -> Floats:
        """Steps of rows of which the first stage is known, from below, (n,): what comes after all is the mean stage's at least."""
        times, pp = self.around_pipeline(rows, flow), rows.shape[0]
        dense, expert = (whole[rows.factor, None] / pp for whole in rows.pieces.rank_weights)
        none = np.zeros_like(dense)
        mean_s = self.kept(rows, Loads(none, none, dense, expert, none)).stepped_s
        after_s = np.maximum(times.after_s, mean_s)[:, 0] + rows.stalled_s
        return np.asarray(times.done_s[:, 0] + after_s + self.problem.stack.step_overhead_s.value)

    def _cut_loads(self, rows: Rows, cuts: Cuts, chunks: Loads) -> Loads:
        """What the stages hold, with all activations that they keep where their schedule is replayed, (n, pp)."""
        load = stage_loads(rows, chunks)
        return replace(load, saved_bytes=held_bytes(self.layers, rows, cuts, chunks)) if by_replay(rows) else load

    def cut_bytes(self, rows: Rows, cuts: Cuts) -> Floats:
        """Peak bytes of every stage (n, pp) of rows that share pp, vpp and schedule, cut at `cuts`; nothing is timed."""
        return self.stage_bytes(rows, self.cut_loads(rows, cuts))

    def cut_loads(self, rows: Rows, cuts: Cuts) -> Loads:
        """What every stage of such rows holds, with all activations that it keeps where their schedule is replayed, (n, pp)."""
        return self._cut_loads(rows, cuts, rows.chunks(cuts))

    def run_flow(self, rows: Rows, chunks: Loads) -> Flow:
        """The pipeline of 1F1B rows of one pp at the first stage of every run of equal ones, (n, runs), given all stages (n, pp).

        No other stage of a run ends later or hides less of the weights that it gathers. Rows of fewer runs than others end in some
        that stand for no stage: they hold what another does, and never end.
        """
        (pp, vpp, schedule), n = rows.shape, len(rows)
        begins = np.ones((n, pp), dtype=bool)
        begins[:, 1:] = np.any([each[:, 1:] != each[:, :-1] for each in chunks.columns], axis=0)
        first = np.argsort(~begins, axis=1, kind="stable")[:, : int(begins.sum(axis=1).max(initial=1))]
        there = np.take_along_axis(begins, first, axis=1)
        begin = np.where(there, first, pp)
        lengths = np.diff(begin, axis=1, append=pp)
        forward, backward, dense, expert, saved = (np.take_along_axis(each, first, axis=1) for each in chunks.columns)
        load = Loads(forward, backward, dense, expert, saved, chunks.experts)
        ends = stage_ends_s(
            schedule, pp, vpp, load.forward_s, load.backward_s, rows.p2p_s, rows.column("num_microbatches"), lengths
        )
        lead = np.take_along_axis(_before(chunks.forward_s), first, axis=1)
        return Flow(load, load, ends, *self._free_s(rows, lead, load.forward_s, load.backward_s))

    def _passes(self, rows: Rows, chunks: Loads, load: Loads) -> Loads:
        """What passes are told apart by: chunks, or the stages that hold them where chunks of a stage run in pairs or backwards."""
        return load if by_replay(rows) else chunks

    def _free_s(self, rows: Rows, lead_s: Floats, forward_s: Floats, backward_s: Floats) -> tuple[Floats, Floats, Floats]:
        """Of passes before a stage, forward and backward, the seconds in which adapters are free for data-parallel traffic.

        Where the layers' own messages leave the supernode, those of data parallelism do too: both go through the same adapters.
        """
        shares = rows.pieces.unused_shares
        forward, backward = (_across(share[rows.factor], np.ndim(forward_s) - 1) for share in shares)
        return lead_s * forward, forward_s * forward, backward_s * backward

    def least_stage_time_s(
        self,
        rows: Rows,
        load: Loads,
        kept: Kept,
        before: tuple[Floats, Floats],
        total_s: Floats,
        after_s: Floats,
        stage: int | Ints,
    ) -> Floats:
        """Step that one stage of 1F1B asks for by its own two cuts, whatever the others are; arguments broadcast, rows first.

        `before` are forward and backward seconds of the stages before it, `total_s` seconds of all, and `after_s` what some stage
        does once all are done, at least; `kept` is what this one does for its states, which depends on the load alone. Its paths
        pass its last backward (`stage_paths_s`): gradients that are reduced before the stages before it end theirs add nothing.
        """
        extra = load.dense.ndim - 1
        pp, m, p2p = rows.shape[0], _across(rows.column("num_microbatches"), extra), _across(rows.p2p_s, extra)
        before_f, before_b = before
        path = stage_paths_s(before_f + before_b, load.forward_s, load.backward_s, total_s, stage, pp, m, p2p)
        lead_s, forward_s, backward_s = self._free_s(rows, before_f, load.forward_s, load.backward_s)
        late = np.maximum(kept.reduced_s(backward_s) - before_b - stage * p2p, 0.0)
        mine = kept.stepped_s
        if kept.parameters_s is not None:
            mine = mine + late_s(kept.parameters_s, forward_s, kept.turns, lead_s)
        return np.asarray(path + late + np.maximum(mine, after_s))

    def around_pipeline(self, rows: Rows, flow: Flow) -> StageTimes:
        """Adds data-parallel traffic, optimizer and offload to when stages end.

        Gradients are reduced once per step and can hide behind the last backward of the stage; parameters are gathered behind the
        first forwards up to it.
        """
        return self.kept(rows, flow.load, self._passes(rows, flow.chunks, flow.load)).beside(flow)

    def kept(self, rows: Rows, load: Loads, chunks: Loads | None = None) -> Kept:
        """What stages do for the states that they keep; `chunks` where they hold several that are told apart."""
        overlap, passing, (pp, vpp, _) = self.problem.stack.overlap, chunks or load, rows.shape
        turns = (pp, 1 if passing is load else vpp)
        unslowed = self.layers.unslowed
        late = _across(rows.hidden_gradients * unslowed, load.dense.ndim - 1)
        exposed_s, gradients_s = _held(rows.gradient_s, load) * (1.0 - late), _held(rows.gradient_s, passing) * late
        gathered_s = parameters_s = offload_s = None
        if rows.column("sharding").any():
            hides = overlap.dp_parameters * unslowed
            gathered_s, parameters_s = _held(rows.parameter_s, load) * (1.0 - hides), _held(rows.parameter_s, passing) * hides
        ends = self.exposed_ends_s(rows)
        if ends is not None:
            exposed_s, gradients_s = exposed_s + _held(ends[0], load), gradients_s - _held(ends[0], passing)
            if gathered_s is not None and parameters_s is not None:
                gathered_s, parameters_s = gathered_s + _held(ends[1], load), parameters_s - _held(ends[1], passing)
        if rows.column("optimizer_offload").any():
            offload_s = _held(rows.offload_s, load)
        return Kept(turns, exposed_s, gradients_s, gathered_s, parameters_s, _held(rows.optimizer_s, load), offload_s)

    def exposed_ends_s(self, rows: Rows) -> tuple[Pair, Pair] | None:
        """What the last bucket of gradients and the first of weights expose beyond the framework's own, seconds per parameter.

        None where buckets are the framework's own.
        """
        if self.problem.stack.gradient_bucket is None:
            return None
        unslowed = self.layers.unslowed
        hidden = rows.hidden_gradients * unslowed, np.full(len(rows), self.problem.stack.overlap.dp_parameters * unslowed)
        tails, heads = rows.bucket_tails_s, rows.bucket_heads_s
        return _exposed(*tails, rows.gradient_s, hidden[0]), _exposed(*heads, rows.parameter_s, hidden[1])

    def stage_bytes(self, rows: Rows, load: Loads, stages: Ints | None = None) -> Floats:
        """Peak bytes of every stage (n, pp), for rows that share pp, vpp and schedule; or of some that lend nothing, (n, k)."""
        return self._working_bytes(rows, *self._active_bytes(rows, load, stages)) + self._state_bytes(rows, load)

    def _active_bytes(self, rows: Rows, load: Loads, stages: Ints | None = None) -> tuple[Floats, Bools]:
        """Activations of the micro-batches in flight on the devices of every stage, its partner's that they hold among them,
        (n, pp), and which stages compute the loss, (1, pp).
        """
        held, last = self._in_flight(rows, np.arange(rows.shape[0]) if stages is None else stages)
        active = load.saved_bytes * held
        return with_partners(active, rows.lent_shares) if rows.lent.any() else active, last

    def _working_bytes(self, rows: Rows, active_bytes: Floats, last: Bools) -> Floats:
        """Of them the activations of the micro-batches in flight and the largest transient."""
        return np.asarray(active_bytes + np.where(last.T, rows.last_transient_bytes, rows.transient_bytes).T)

    def _state_bytes(self, rows: Rows, load: Loads) -> Floats:
        """Of them weights, gradients and optimizer states, and the buffers of communicators."""
        extra = load.dense.ndim - 1
        states = _held((rows.rates.total(0), rows.rates.total(1)), load)
        return np.asarray(states + _across(rows.communicator_bytes, extra))

    def stage_peaks(self, rows: Rows, load: Loads) -> Floats:
        """The same by term (terms, n, pp), in the order of MEMORY_TERMS."""
        return self.peaks_at(rows, load, *self._active_bytes(rows, load))

    def _in_flight(self, rows: Rows, stages: Ints) -> tuple[Floats, Bools]:
        """Micro-batches that stages (k,) keep at their peak, in whole stages, (n, k), and which stages compute the loss, (1, k)."""
        pp, vpp, schedule = rows.shape
        if by_replay(rows):  # their loads count every micro-batch that is held
            return np.ones((len(rows), len(stages))), loss_stages(schedule, pp, vpp)[None, stages]
        held = in_flight(schedule, pp, vpp, rows.column("num_microbatches"), stages[:, None]).T / vpp
        return held, stages[None, :] == pp - 1

    def peaks_at(self, rows: Rows, load: Loads, active_bytes: Floats, last: npt.NDArray[np.bool_]) -> Floats:
        """Peak bytes by term of stages with so many bytes of activations; `last` marks those that compute the loss."""
        extra = load.dense.ndim - 1
        transient = np.where(last, _across(rows.last_transient_bytes, extra), _across(rows.transient_bytes, extra))
        buffers = _across(rows.communicator_bytes, extra) + np.zeros_like(load.dense)
        return np.stack(
            [
                _held(rows.rates.weights, load),
                _held(rows.rates.gradients, load),
                _held(rows.rates.optimizer, load),
                active_bytes + np.zeros_like(load.dense),
                transient + np.zeros_like(load.dense),
                buffers,
            ]
        )

    def _factor_rows(self, table: LayoutTable) -> tuple[npt.NDArray[np.intp], Ints]:
        """First rows of the distinct combinations of what pieces depend on, and each row's place among them."""
        piped = (table.pp > 1) & self.problem.stack.slower_in_pipelines
        uniform = np.where(table.recompute_mode == FULL_UNIFORM, table.recompute_layers, 0)
        sharded = table.sharding >= ZERO2
        partly = recompute_depths(table) < len(self.blocks)
        leaves = most_lent(table) if lends(self.problem) else table.activation_offload
        moved = [leaves, partly] if table.activation_offload.any() else []
        fsdp = [np.where(sharded, getattr(table, name), 0) for name in FSDP_COLUMNS] if sharded.any() else []
        of_piece = [getattr(table, name) for name in PIECE_COLUMNS]
        return distinct_rows([*of_piece, *inner_strides(table), uniform, piped, *moved, *fsdp])


def moved_share(rows: Rows) -> Floats:
    """Bytes of activations that leave the device over those that stay, (n,)."""
    share = rows.column("activation_offload")
    return np.asarray(share / resident_share(share))


def same_shape(table: LayoutTable, depth: bool = False) -> Iterator[npt.NDArray[np.intp]]:
    """Rows that share pp, vpp and schedule, and whether micro-batches are left over (with `depth`, the recompute depth too), and
    are priced together, group by group.
    """
    shape = [table.pp, table.vpp, table.schedule, table.leaves_over.astype(np.int64)]
    return grouped([*shape, *([recompute_depths(table)] if depth else [])])


def _held(rates: tuple[Floats, Floats], load: Loads) -> Floats:
    """Figures per dense and per expert parameter (n,) times what stages hold of them; shaped like the loads."""
    extra = load.dense.ndim - 1
    found = _across(rates[0], extra) * load.dense
    return found + _across(rates[1], extra) * load.expert if load.experts else found


def _exposed(own_s: Pair, told_s: Pair, whole_s: Pair, hidden: Floats) -> Pair:
    """What a bucket at an end shows beyond one of the framework's own; no more than would hide.

    What shows in all is no less than the bucket, except where the stack's measured share shows less of the framework's own already.
    """
    shown = [whole * (1.0 - hidden) for whole in whole_s]
    each = zip(own_s, told_s, whole_s, shown, strict=True)
    dense, expert = (np.clip(told - own, np.minimum(told - seen, 0.0), whole * hidden) for own, told, whole, seen in each)
    return dense, expert


def _before(passes_s: Floats) -> Floats:
    """Seconds of the stages before each, (n, stages)."""
    found = np.zeros_like(passes_s)
    for stage in range(1, found.shape[1]):
        np.add(found[:, stage - 1], passes_s[:, stage - 1], out=found[:, stage])
    return found


def _across(column: npt.NDArray[np.generic], extra: int = 1) -> Floats:
    """A column (n,) with `extra` trailing axes, to broadcast against stages."""
    return np.asarray(column).reshape(len(column), *([1] * extra))

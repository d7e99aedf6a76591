"""Step time and memory of many layouts at once: pieces, stages, pipeline, data parallelism, optimizer.

A stage is priced from what it holds (`Loads`) and where it stands; everything about a row that does not depend on where its
stages are cut is a rate in `Rows`. The same functions serve a table with fixed splits, the exact partition of a survivor, and
the bound, since all of them broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import FULL_UNIFORM, Bools, Floats, Ints, LayoutTable, Problem, distinct_rows
from ..search_spaces.quantities import usable_bytes
from .layers import LayerModel
from .loads import Cuts, Loads, recompute_depths
from .network import Network
from .pieces import PIECE_COLUMNS, WHOLE_COLUMNS, Pieces, Wholes
from .pipeline import in_flight, paths_s, stage_paths_s
from .profile import Profile, load_profile
from .rows import Combinations, Rows, grouped, runs
from .states import ZERO2

ROWS_PER_BLOCK = 8192
"""Rows that are priced together: what is known of their stages stays in the cache."""
FSDP_COLUMNS = ("sharding", "hsdp", "dp", "pp", "rank_order")
"""What the gathering of weights within a pass depends on."""


@dataclass(frozen=True)
class Prices:
    """Predicted figures of n layouts; `critical_stage` is where the step's longest path spends its steady state."""

    step_time_s: Floats
    peak_bytes: Floats
    fits: Bools  # on the devices and, where states are offloaded, on their hosts
    critical_stage: Ints
    fullest_stage: Ints


@dataclass(frozen=True)
class StageTimes:
    """Times of stages, broadcast like their loads: the pipeline path through each, and what each adds after or before it."""

    path_s: Floats
    dp_s: Floats
    optimizer_s: Floats
    offload_s: Floats | None  # nothing is offloaded

    @property
    def total_s(self) -> Floats:
        found = self.path_s + self.dp_s + self.optimizer_s
        return np.asarray(found if self.offload_s is None else found + self.offload_s)


@dataclass(frozen=True)
class Flow:
    """The pipeline of some rows, (n, pp): what chunks and stages hold, the longest path through each stage, and the seconds of
    one forward and one backward pass up to its end, behind which messages can hide.
    """

    chunks: Loads
    load: Loads
    path_s: Floats
    forward_s: Floats
    backward_s: Floats


@dataclass(frozen=True)
class Kept:
    """What stages do for the states that they keep, shaped like their loads: data-parallel traffic that stays exposed, traffic of
    gradients and of parameters that hides as far as there are passes to hide it, optimizer, and offload if there is any.
    """

    exposed_s: Floats
    gradients_s: Floats
    parameters_s: Floats | None  # without sharding nothing is gathered
    optimizer_s: Floats
    offload_s: Floats | None

    def beside(self, flow: Flow) -> StageTimes:
        """The times of stages with that pipeline: what does not hide behind its passes is exposed."""
        dp_s = self.exposed_s + np.maximum(self.gradients_s - flow.backward_s, 0.0)
        if self.parameters_s is not None:
            dp_s = dp_s + np.maximum(self.parameters_s - flow.forward_s, 0.0)
        return StageTimes(flow.path_s, dp_s, self.optimizer_s, self.offload_s)

    @property
    def always_s(self) -> Floats:
        """What is added to the pipeline's path whatever is hidden."""
        found = self.exposed_s + self.optimizer_s
        return found if self.offload_s is None else found + self.offload_s


class CostModel:
    """Prices layouts of one problem. `profile` defaults to the accelerator's own.

    `problem` is kept with its stack as that runs on the accelerator: its documented figures, overlaid by the profile's.
    """

    def __init__(self, problem: Problem, profile: Profile | None = None) -> None:
        accelerator = problem.cluster.accelerator.name
        self.profile = profile or load_profile(accelerator)
        stack = problem.stack.with_figures(self.profile.stack_figures(problem.stack, accelerator))
        self.problem = problem = problem.model_copy(update={"stack": stack})
        reached = stack.scale_up_efficiency.value, stack.scale_out_share(problem.devices)
        self.network = Network(problem.cluster, self.profile, problem.devices, *reached, stack.rails)
        self.layers = LayerModel(problem, self.profile, self.network)
        self.blocks = self.layers.blocks
        self._wholes: Wholes | None = None
        self._known: dict[tuple[int, ...], int] = {}

    @property
    def usable_bytes(self) -> float:
        """Device memory that a plan may fill: capacity − context − margin."""
        return usable_bytes(self.problem)

    @property
    def host_limit_bytes(self) -> float:
        """Host memory that one device's offloaded states may fill."""
        return self.problem.cluster.host_link.memory_bytes_per_device.value

    def host_bytes(self, rows: Rows, load: Loads) -> Floats:
        """Host memory that stages fill with offloaded optimizer states, per device; shaped like the loads."""
        return _held(rows.rates.host, load)

    def rows(self, table: LayoutTable) -> Rows:
        """The rows of a table, from which everything about them that does not depend on where their stages are cut follows."""
        first, factor = self._factor_rows(table)
        distinct = table.take(first)
        return Rows(self._combinations(distinct), table, factor)

    def _combinations(self, table: LayoutTable) -> Combinations:
        return Combinations(self.problem, self.network, self.profile, table, self.pieces(table))

    def pieces(self, table: LayoutTable) -> Pieces:
        """Costs of every piece for each row; combinations of WHOLE_COLUMNS that were met before are not priced again."""
        piped = (table.pp > 1) & (self.problem.stack.host_floor_pipeline_s.value > 0)  # a layer costs more in a pipeline
        columns = [*(getattr(table, name) for name in WHOLE_COLUMNS), piped]
        first, member = distinct_rows(columns)
        keys = list(zip(*(column[first].tolist() for column in columns), strict=True))
        new = np.array([row for row, key in enumerate(keys) if key not in self._known], dtype=np.intp)
        if len(new):
            added = self.layers.wholes(table.take(first[new]))
            self._wholes = added if self._wholes is None else Wholes.joined(self._wholes, added)
            self._known |= {keys[row]: len(self._known) + order for order, row in enumerate(new.tolist())}
        place = np.array([self._known[key] for key in keys], dtype=np.int64)[member]
        return self.layers.pieces(table, self._wholes, place)

    def price(self, table: LayoutTable, closed_form: bool = False) -> Prices:
        """Step time and peak memory of every row, whose `split` must name one of the table's splits.

        `closed_form` times schedules that are priced by replay from below instead.
        """
        return self.price_rows(self.rows(table), closed_form)

    def price_rows(self, rows: Rows, closed_form: bool = False) -> Prices:
        """The same for rows that are at hand."""
        table, n = rows.known().table, len(rows)
        found = Prices(np.empty(n), np.empty(n), np.zeros(n, dtype=bool), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64))
        for group in grouped([table.split, table.schedule], within=rows.work_columns):
            cuts = np.array([table.splits[int(table.split[group[0]])].cuts])
            for begin in range(0, len(group), ROWS_PER_BLOCK):
                members = group[begin : begin + ROWS_PER_BLOCK]
                priced = self._price_alike(rows.take(members), cuts, closed_form)
                for name in Prices.__dataclass_fields__:
                    getattr(found, name)[members] = getattr(priced, name)
        return found

    def price_cuts(self, rows: Rows, cuts: Cuts, closed_form: bool = False) -> Prices:
        """Step time and peak memory of rows that share pp, vpp and schedule, cut at `cuts` (n, pp·vpp+1), or alike at (1, ·)."""
        flow = self.flow(rows, cuts, closed_form)
        host = self.host_bytes(rows, flow.load).max(axis=1) if rows.column("optimizer_offload").any() else 0.0
        return self._prices(self.around_pipeline(rows, flow).total_s, self.stage_bytes(rows, flow.load), host)

    def _price_alike(self, rows: Rows, cuts: Cuts, closed_form: bool) -> Prices:
        """The same for rows that are cut alike, at (1, ·).

        Those that do the same work share their pipeline, and those that keep the same states what is done for them: each is
        worked out once, so that only their sums are as many as the rows.
        """
        (works, work), (kinds, kind) = runs(rows.work_columns), rows.kinds  # like works lie together (`price_rows`)
        working, keeping = rows.take(works), rows.take(kinds)
        flow, load = self.flow(working, cuts, closed_form), keeping.chunks(cuts).folded(rows.shape[0])
        kept = self.kept(keeping, load)

        def of_work(values: Floats) -> Floats:
            return np.take(values, work, axis=0)

        def of_kind(values: Floats) -> Floats:
            return np.take(values, kind, axis=0)

        total = of_work(flow.path_s) + of_kind(kept.always_s)
        total += np.maximum(of_kind(kept.gradients_s) - of_work(flow.backward_s), 0.0)
        if kept.parameters_s is not None:
            total += np.maximum(of_kind(kept.parameters_s) - of_work(flow.forward_s), 0.0)
        peak = of_work(self._working_bytes(working, flow.load)) + of_kind(self._state_bytes(keeping, load))
        offloaded = keeping.column("optimizer_offload").any()
        return self._prices(total, peak, of_kind(self.host_bytes(keeping, load).max(axis=1)) if offloaded else 0.0)

    def _prices(self, total_s: Floats, peak_bytes: Floats, host_bytes: Floats | float) -> Prices:
        each, critical, fullest = np.arange(len(total_s)), total_s.argmax(axis=1), peak_bytes.argmax(axis=1)
        step_s, peak = total_s[each, critical] + self.problem.stack.step_overhead_s.value, peak_bytes[each, fullest]
        fits = (peak <= self.usable_bytes) & (host_bytes <= self.host_limit_bytes)
        return Prices(step_s, peak, fits, critical, fullest)

    def flow(self, rows: Rows, cuts: Cuts, closed_form: bool = False) -> Flow:
        """What the stages of rows that share pp, vpp and schedule hold, and the pipeline paths through them, (n, pp)."""
        (pp, vpp, schedule), chunks, m = rows.shape, rows.chunks(cuts), rows.column("num_microbatches")
        load = chunks.folded(pp)
        if schedule == "1f1b":
            before_f, before_b = rows.before(cuts)
            path = self._path_s(rows, load, before_f + before_b, rows.total_s(pp)[:, None], np.arange(pp))
        else:
            before_f, before_b = (np.cumsum(work, axis=1) - work for work in (load.forward_s, load.backward_s))
            path = paths_s(schedule, pp, vpp, chunks.forward_s, chunks.backward_s, rows.p2p_s, m, closed_form)
        return Flow(chunks, load, path, before_f + load.forward_s, before_b + load.backward_s)

    def stage_time_at(
        self, rows: Rows, load: Loads, kept: Kept, before_f: Floats, before_b: Floats, total_s: Floats, stage: int
    ) -> Floats:
        """Time of one stage of a pipeline without chunks, by its own two cuts; arguments broadcast, rows first.

        `kept` is what the stage does for its states; it depends on the load alone.
        """
        path = self._path_s(rows, load, before_f + before_b, total_s, stage)
        flow = Flow(load, load, path, before_f + load.forward_s, before_b + load.backward_s)
        return kept.beside(flow).total_s

    def _path_s(self, rows: Rows, load: Loads, before_s: Floats, total_s: Floats, stage: int | Ints) -> Floats:
        extra = load.dense.ndim - 1
        pp, m, p2p = rows.shape[0], _across(rows.column("num_microbatches"), extra), _across(rows.p2p_s, extra)
        return stage_paths_s(before_s, load.forward_s, load.backward_s, total_s, stage, pp, m, p2p)

    def around_pipeline(self, rows: Rows, flow: Flow) -> StageTimes:
        """Adds to each stage's path its data-parallel traffic, optimizer and offload.

        Gradients are reduced once per step and can hide behind the last backward of the stage and of those before it;
        parameters are gathered behind the first forward likewise.
        """
        return self.kept(rows, flow.load).beside(flow)

    def kept(self, rows: Rows, load: Loads) -> Kept:
        """What stages do for the states that they keep."""
        overlap = self.problem.stack.overlap
        gradients_s = _held(rows.gradient_s, load)
        exposed_s, gradients_s = gradients_s * (1.0 - overlap.dp_gradients), gradients_s * overlap.dp_gradients
        parameters_s = offload_s = None
        if rows.column("sharding").any():
            gathers_s = _held(rows.parameter_s, load)
            exposed_s = exposed_s + gathers_s * (1.0 - overlap.dp_parameters)
            parameters_s = gathers_s * overlap.dp_parameters
        if rows.column("optimizer_offload").any():
            offload_s = _held(rows.offload_s, load)
        return Kept(exposed_s, gradients_s, parameters_s, _held(rows.optimizer_s, load), offload_s)

    def stage_bytes(self, rows: Rows, load: Loads) -> Floats:
        """Peak bytes of every stage (n, pp), for rows that share pp, vpp and schedule."""
        return self._working_bytes(rows, load) + self._state_bytes(rows, load)

    def _working_bytes(self, rows: Rows, load: Loads) -> Floats:
        """Of them the activations in flight and the largest transient."""
        held, last = self._in_flight(rows)
        at_loss, each = _across(rows.last_transient_bytes), _across(rows.transient_bytes)
        return np.asarray(load.saved_bytes * held + np.where(last, at_loss, each))

    def _state_bytes(self, rows: Rows, load: Loads) -> Floats:
        """Of them weights, gradients and optimizer states, and the buffers of communicators."""
        extra = load.dense.ndim - 1
        states = _held((rows.rates.total(0), rows.rates.total(1)), load)
        return np.asarray(states + _across(rows.communicator_bytes, extra))

    def stage_peaks(self, rows: Rows, load: Loads) -> Floats:
        """The same by term (terms, n, pp), in the order of MEMORY_TERMS."""
        return self.peaks_at(rows, load, *self._in_flight(rows))

    def _in_flight(self, rows: Rows) -> tuple[Floats, Bools]:
        """Micro-batches that every stage keeps at its peak (n, pp), in whole stages, and which stages compute the loss."""
        pp, vpp, schedule = rows.shape
        stages = np.arange(pp)[None, :]
        return in_flight(schedule, pp, vpp, _across(rows.column("num_microbatches")), stages) / vpp, stages == pp - 1

    def peaks_at(self, rows: Rows, load: Loads, in_flight: Floats, last: npt.NDArray[np.bool_]) -> Floats:
        """Peak bytes by term of stages with `in_flight` micro-batches; `last` marks those that compute the loss."""
        extra = load.dense.ndim - 1
        transient = np.where(last, _across(rows.last_transient_bytes, extra), _across(rows.transient_bytes, extra))
        buffers = _across(rows.communicator_bytes, extra) + np.zeros_like(load.dense)
        return np.stack(
            [
                _held(rows.rates.weights, load),
                _held(rows.rates.gradients, load),
                _held(rows.rates.optimizer, load),
                load.saved_bytes * in_flight,
                transient + np.zeros_like(load.dense),
                buffers,
            ]
        )

    def _factor_rows(self, table: LayoutTable) -> tuple[npt.NDArray[np.intp], Ints]:
        """First rows of the distinct combinations of what pieces depend on, and each row's place among them."""
        piped = (table.pp > 1) & (self.problem.stack.host_floor_pipeline_s.value > 0)
        uniform = np.where(table.recompute_mode == FULL_UNIFORM, table.recompute_layers, 0)
        sharded = table.sharding >= ZERO2
        fsdp = [np.where(sharded, getattr(table, name), 0) for name in FSDP_COLUMNS] if sharded.any() else []
        return distinct_rows([*(getattr(table, name) for name in PIECE_COLUMNS), uniform, piped, *fsdp])


def same_shape(table: LayoutTable, depth: bool = False) -> Iterator[npt.NDArray[np.intp]]:
    """Rows that share pp, vpp and schedule (with `depth`, the recompute depth too) and are priced together, group by group."""
    return grouped([table.pp, table.vpp, table.schedule, *([recompute_depths(table)] if depth else [])])


def _held(rates: tuple[Floats, Floats], load: Loads) -> Floats:
    """Figures per dense and per expert parameter (n,) times what stages hold of them; shaped like the loads."""
    extra = load.dense.ndim - 1
    found = _across(rates[0], extra) * load.dense
    return found + _across(rates[1], extra) * load.expert if load.experts else found


def _across(column: npt.NDArray[np.generic], extra: int = 1) -> Floats:
    """A column (n,) with `extra` trailing axes, to broadcast against stages."""
    return np.asarray(column).reshape(len(column), *([1] * extra))

"""Step time and memory of many layouts at once: pieces, stages, pipeline, data parallelism, optimizer.

A stage is priced from what it holds (`Loads`) and where it stands; everything about a row that does not depend on where its
stages are cut is a rate in `Rows`. The same functions serve a table with fixed splits, the exact partition of a survivor, and
the bound, since all of them broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..search_spaces.groups import Groups, groups
from ..search_spaces.layout import (
    FULL_UNIFORM,
    SCHEDULES,
    SHARDINGS,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    Problem,
    row_keys,
)
from ..search_spaces.quantities import usable_bytes
from .layers import PIECE_COLUMNS, LayerModel, Pieces, shard_group
from .loads import Cuts, Loads, Prefix, recompute_depths
from .memory import StaticRates, communicator_count, static_rates, transient_bytes
from .network import Network
from .operators import BF16, FP32
from .pipeline import in_flight, paths_s, stage_paths_s
from .profile import Profile, load_profile

INTERLEAVED = SCHEDULES.index("interleaved")
ZERO1, ZERO2 = SHARDINGS.index("zero1"), SHARDINGS.index("zero2")
FSDP_COLUMNS = ("sharding", "hsdp", "dp", "pp", "rank_order")


@dataclass(frozen=True)
class Rows:
    """Rows of a table with everything that is known before stages are cut; columns (n,), `factor` maps rows to `pieces`.

    `*_s` pairs are seconds per parameter on the rank, for dense and for expert weights.
    """

    table: LayoutTable
    pieces: Pieces
    factor: Ints
    rates: StaticRates
    gradient_s: tuple[Floats, Floats]
    parameter_s: tuple[Floats, Floats]
    optimizer_s: tuple[Floats, Floats]
    offload_s: tuple[Floats, Floats]
    p2p_s: Floats
    transient_bytes: Floats
    last_transient_bytes: Floats
    communicator_bytes: Floats
    sums: Prefix  # of the factor rows

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: npt.NDArray[np.intp]) -> Rows:
        """The given rows; factor rows stay shared."""

        def pick(pair: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
            return pair[0][rows], pair[1][rows]

        rates = StaticRates(*(pick(getattr(self.rates, name)) for name in StaticRates.__dataclass_fields__))
        return Rows(
            self.table.take(rows),
            self.pieces,
            self.factor[rows],
            rates,
            pick(self.gradient_s),
            pick(self.parameter_s),
            pick(self.optimizer_s),
            pick(self.offload_s),
            self.p2p_s[rows],
            self.transient_bytes[rows],
            self.last_transient_bytes[rows],
            self.communicator_bytes[rows],
            self.sums,
        )

    def without_p2p(self) -> Rows:
        """The same rows on a network whose stages talk for free."""
        return replace(self, p2p_s=np.zeros_like(self.p2p_s))

    @property
    def least_transient_bytes(self) -> Floats:
        """The short-lived block that any stage has, whichever holds the loss, (n,)."""
        return np.minimum(self.transient_bytes, self.last_transient_bytes)

    @cached_property
    def prefix(self) -> Prefix:
        """Running sums over the blocks, from which any cut is priced."""
        return self.sums.gathered(self.factor, recompute_depths(self.table))


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
    offload_s: Floats

    @property
    def total_s(self) -> Floats:
        return np.asarray(self.path_s + self.dp_s + self.optimizer_s + self.offload_s)


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
        extra = load.dense.ndim - 1
        dense, expert = (_across(rate, extra) for rate in rows.rates.host)
        return np.asarray(dense * load.dense + expert * load.expert)

    def sums(self, table: LayoutTable) -> tuple[Prefix, Ints]:
        """Running sums of the distinct factor rows, and each row's place among them: what its work alone takes, cheaply."""
        factor_rows, factor = self._factor_rows(table)
        distinct = table.take(factor_rows)
        tied = self.problem.model.tied_embeddings
        return Prefix.of(self.layers.pieces(distinct), recompute_depths(distinct), tied), factor

    def rows(self, table: LayoutTable) -> Rows:
        """Everything about the rows that does not depend on where their stages are cut."""
        factor_rows, factor = self._factor_rows(table)
        pieces = self.layers.pieces(table.take(factor_rows))
        dense, expert = self._rank_weights(pieces, factor)
        gradient, parameter = self._data_parallel_rates(table, dense, expert)
        optimizer, offload = self._optimizer_rates(table)
        footprint = self.problem.stack.footprint
        transient = [transient_bytes(pieces, table.take(factor_rows), footprint, last)[factor] for last in (False, True)]
        return Rows(
            table=table,
            pieces=pieces,
            factor=factor,
            rates=static_rates(self.problem, table),
            gradient_s=gradient,
            parameter_s=parameter,
            optimizer_s=optimizer,
            offload_s=offload,
            p2p_s=self._p2p_s(table, pieces.layer_input_bytes[factor]),
            transient_bytes=transient[0],
            last_transient_bytes=transient[1],
            communicator_bytes=communicator_count(table) * self.problem.cluster.communicator_bytes.value,
            sums=Prefix.of(pieces, recompute_depths(table.take(factor_rows)), self.problem.model.tied_embeddings),
        )

    def price(self, table: LayoutTable, closed_form: bool = False) -> Prices:
        """Step time and peak memory of every row, whose `split` must name one of the table's splits.

        `closed_form` times schedules that are priced by replay from below instead.
        """
        return self.price_rows(self.rows(table), closed_form)

    def price_rows(self, rows: Rows, closed_form: bool = False) -> Prices:
        """The same for rows that are at hand."""
        table, n = rows.table, len(rows)
        found = Prices(np.empty(n), np.empty(n), np.zeros(n, dtype=bool), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64))
        for members in same_shape(table):
            part = rows.take(members)
            distinct, which = np.unique(part.table.split, return_inverse=True)
            cuts = np.array([table.splits[int(index)].cuts for index in distinct])[which]
            priced = self.price_cuts(part, cuts, closed_form)
            for name in Prices.__dataclass_fields__:
                getattr(found, name)[members] = getattr(priced, name)
        return found

    def price_cuts(self, rows: Rows, cuts: Cuts, closed_form: bool = False) -> Prices:
        """Step time and peak memory of rows that share pp, vpp and schedule, cut at `cuts` (n, pp·vpp+1)."""
        chunks = rows.prefix.chunks(cuts)
        total = self.stage_times(rows, cuts, chunks, closed_form).total_s
        peak = self.stage_peaks(rows, chunks).sum(axis=0)
        step_s = total.max(axis=1) + self.problem.stack.step_overhead_s.value
        host = self.host_bytes(rows, chunks.folded(int(rows.table.pp[0]))).max(axis=1)
        fits = (peak.max(axis=1) <= self.usable_bytes) & (host <= self.host_limit_bytes)
        return Prices(step_s, peak.max(axis=1), fits, total.argmax(axis=1), peak.argmax(axis=1))

    def stage_times(self, rows: Rows, cuts: Cuts, chunks: Loads, closed_form: bool = False) -> StageTimes:
        """Times of every stage (n, pp) for rows that share pp, vpp and schedule; `chunks` are the loads between `cuts`."""
        pp, vpp = int(rows.table.pp[0]), int(rows.table.vpp[0])
        schedule, m = SCHEDULES[int(rows.table.schedule[0])], rows.table.num_microbatches
        whole = chunks.folded(pp)
        if schedule == "1f1b":
            before_f, before_b = rows.prefix.before(cuts, pp)
            total = rows.prefix.total_s(pp)[:, None]
            path = self._path_s(rows, whole, before_f + before_b, total, np.arange(pp))
        else:
            before_f, before_b = (np.cumsum(work, axis=1) - work for work in (whole.forward_s, whole.backward_s))
            path = paths_s(schedule, pp, vpp, chunks.forward_s, chunks.backward_s, rows.p2p_s, m, closed_form)
        return self.around_pipeline(rows, whole, path, before_f, before_b)

    def stage_time_at(self, rows: Rows, load: Loads, before_f: Floats, before_b: Floats, total_s: Floats, stage: int) -> Floats:
        """Time of one stage of a pipeline without chunks, by its own two cuts; arguments broadcast, rows first."""
        path = self._path_s(rows, load, before_f + before_b, total_s, stage)
        return self.around_pipeline(rows, load, path, before_f, before_b).total_s

    def _path_s(self, rows: Rows, load: Loads, before_s: Floats, total_s: Floats, stage: int | Ints) -> Floats:
        extra = load.dense.ndim - 1
        pp, m, p2p = int(rows.table.pp[0]), _across(rows.table.num_microbatches, extra), _across(rows.p2p_s, extra)
        return stage_paths_s(before_s, load.forward_s, load.backward_s, total_s, stage, pp, m, p2p)

    def around_pipeline(self, rows: Rows, load: Loads, path_s: Floats, before_f: Floats, before_b: Floats) -> StageTimes:
        """Adds to each stage's path its data-parallel traffic, optimizer and offload.

        Gradients are reduced once per step and can hide behind the last backward of the stage and of those before it (`before_b`);
        parameters are gathered behind the first forward likewise.
        """
        overlap = self.problem.stack.overlap

        def cost(pair: tuple[Floats, Floats]) -> Floats:
            extra = load.dense.ndim - 1
            return _across(pair[0], extra) * load.dense + _across(pair[1], extra) * load.expert

        gradients, parameters = cost(rows.gradient_s), cost(rows.parameter_s)
        dp_s = gradients - np.minimum(gradients * overlap.dp_gradients, load.backward_s + before_b)
        dp_s = dp_s + parameters - np.minimum(parameters * overlap.dp_parameters, load.forward_s + before_f)
        return StageTimes(path_s, dp_s, cost(rows.optimizer_s), cost(rows.offload_s))

    def stage_peaks(self, rows: Rows, chunks: Loads) -> Floats:
        """Peak bytes of every stage by term (terms, n, pp), in the order of MEMORY_TERMS, for rows that share pp, vpp and
        schedule.
        """
        pp, vpp, schedule = int(rows.table.pp[0]), int(rows.table.vpp[0]), SCHEDULES[int(rows.table.schedule[0])]
        stages, load = np.arange(pp)[None, :], chunks.folded(pp)
        held = in_flight(schedule, pp, vpp, _across(rows.table.num_microbatches), stages) / vpp
        return self.peaks_at(rows, load, held, stages == pp - 1)

    def peaks_at(self, rows: Rows, load: Loads, in_flight: Floats, last: npt.NDArray[np.bool_]) -> Floats:
        """Peak bytes by term of stages with `in_flight` micro-batches; `last` marks those that compute the loss."""
        extra = load.dense.ndim - 1

        def cost(pair: tuple[Floats, Floats]) -> Floats:
            return _across(pair[0], extra) * load.dense + _across(pair[1], extra) * load.expert

        transient = np.where(last, _across(rows.last_transient_bytes, extra), _across(rows.transient_bytes, extra))
        buffers = _across(rows.communicator_bytes, extra) + np.zeros_like(load.dense)
        return np.stack(
            [
                cost(rows.rates.weights),
                cost(rows.rates.gradients),
                cost(rows.rates.optimizer),
                load.saved_bytes * in_flight,
                transient + np.zeros_like(load.dense),
                buffers,
            ]
        )

    def _factor_rows(self, table: LayoutTable) -> tuple[npt.NDArray[np.intp], Ints]:
        """First rows of the distinct factor combinations, and each row's place among them."""
        return _distinct(table, self.problem.stack.host_floor_pipeline_s.value > 0)

    def _rank_weights(self, pieces: Pieces, factor: Ints) -> tuple[Floats, Floats]:
        names = (*pieces.blocks, "embedding", "head")
        dense = np.sum([pieces.pieces[name].dense_weights for name in names], axis=0)[factor]
        expert = np.sum([pieces.pieces[name].expert_weights for name in names], axis=0)[factor]
        return dense, expert

    def _data_parallel_rates(
        self, table: LayoutTable, dense: Floats, expert: Floats
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Seconds per parameter to reduce gradients and to gather weights once per step, at the size of a mean stage.

        ZeRO-1 scatters gradients (or all-reduces them, as the stack does) and gathers weights, ZeRO-2 gathers weights, without
        sharding gradients are all-reduced; what ZeRO-2 and up send per micro-batch the pieces carry. HSDP all-reduces dense
        gradients between its shards once more.
        """
        stack = self.problem.stack
        gradient_bytes = stack.sent_gradient_bytes
        gradients, parameters = [], []
        for weights, group in ((dense, shard_group(table)), (expert, groups(table, "edp"))):
            mean = np.maximum(weights / table.pp, 1.0)
            at = self.network.crossing(group)
            scatter = self.network.reduce_scatter_s(at, gradient_bytes * mean)
            reduce = self.network.all_reduce_s(at, gradient_bytes * mean)
            gather = self.network.all_gather_s(at, BF16 * mean)
            replicas = self._replica_reduce_s(table, gradient_bytes * mean) if weights is dense else np.zeros(len(table))
            sharded = scatter if stack.zero1_reduction == "reduce_scatter" else reduce
            once = np.where(table.sharding == ZERO1, sharded, np.where(table.sharding == 0, reduce, replicas))
            gradients.append(once / mean)
            gathers = (table.sharding == ZERO1) | (table.sharding == ZERO2)
            parameters.append(np.where(gathers, gather, 0.0) / mean)
        return (gradients[0], gradients[1]), (parameters[0], parameters[1])

    def _replica_reduce_s(self, table: LayoutTable, gradient_bytes: Floats) -> Floats:
        """HSDP: all-reduce of one shard's gradients between the copies of the shard group; 0 where there is one copy."""
        group = shard_group(table)
        copies = np.maximum(table.cp * table.dp // group.size, 1)
        at = self.network.crossing(Groups(copies, group.stride * group.size))
        return np.where(copies > 1, self.network.all_reduce_s(at, gradient_bytes / group.size), 0.0)

    def _optimizer_rates(self, table: LayoutTable) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Seconds per parameter of the optimizer: every state read and written once, gradient read, weight written.

        An offloaded fraction that is stepped on the host sends its gradients there in FP32, has its states updated at the rate of
        the host's memory and brings its weights back; one stepped on the device brings its states in and takes them out again.
        Part of the copies hides behind the stepping of other pieces; the stepping itself does not.
        """
        stack, cluster = self.problem.stack, self.problem.cluster
        memory = cluster.accelerator.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value
        touched = 2.0 * stack.optimizer_bytes + stack.gradient_bytes + BF16
        host = cluster.host_link
        if stack.offloaded_step == "host":
            copied, stepped_s = FP32 + BF16, touched / host.memory_bandwidth_bytes_per_s.value
        else:
            copied, stepped_s = 2.0 * stack.optimizer_bytes, touched / memory
        offloaded_s = copied / host.bandwidth_bytes_per_s.value * (1.0 - stack.overlap.offload) + stepped_s
        here, away = [], []
        for shards in (shard_group(table).size, table.edp):
            share = np.where(table.sharding >= ZERO1, 1.0 / shards, 1.0)
            here.append(share * touched * (1.0 - table.optimizer_offload) / memory)
            away.append(share * table.optimizer_offload * offloaded_s)
        return (here[0], here[1]), (away[0], away[1])

    def _p2p_s(self, table: LayoutTable, hidden_bytes: Floats) -> Floats:
        """One activation to the next stage, exposed part only: what the interleaved schedule hides is the stack's."""
        at = self.network.crossing(groups(table, "pp")).outermost
        once_s = self.network.p2p_s(at, hidden_bytes)
        if self.problem.stack.scattered_p2p:  # each TP rank a share, gathered where it arrives (arXiv 2104.04473, section 4.1)
            share_s = self.network.p2p_s(at, hidden_bytes / table.tp)
            gather_s = self.network.all_gather_s(self.network.crossing(groups(table, "tp")), hidden_bytes)
            once_s = np.where(table.sequence_parallel > 0, once_s, share_s + gather_s)
        whole = np.where(table.pp > 1, once_s, 0.0)
        return np.where(table.schedule == INTERLEAVED, whole * (1.0 - self.problem.stack.overlap.pp_interleaved), whole)


def same_shape(table: LayoutTable, depth: bool = False) -> Iterator[npt.NDArray[np.intp]]:
    """Rows that share pp, vpp and schedule (with `depth`, the recompute depth too) and are priced together, group by group."""
    return _grouped([table.pp, table.vpp, table.schedule, *([recompute_depths(table)] if depth else [])])


def _grouped(columns: list[Ints]) -> Iterator[npt.NDArray[np.intp]]:
    key = row_keys(columns)
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[order])) + 1
    yield from np.split(order, ends)


def _distinct(table: LayoutTable, piped: bool) -> tuple[npt.NDArray[np.intp], Ints]:
    """First rows of the distinct factor combinations, and each row's place among them.

    `piped`: whether a layer costs more in a pipeline.
    """
    columns = [getattr(table, name) for name in PIECE_COLUMNS]
    full = np.where(table.recompute_mode == FULL_UNIFORM, table.recompute_layers, 0)
    sharded = table.sharding >= ZERO2
    pipeline = (table.pp > 1).astype(np.int64) * piped
    columns += [full, pipeline, *(np.where(sharded, getattr(table, name), 0) for name in FSDP_COLUMNS)]
    key = row_keys(columns)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def _across(column: npt.NDArray[np.generic], extra: int = 1) -> Floats:
    """A column (n,) with `extra` trailing axes, to broadcast against stages."""
    return np.asarray(column).reshape(len(column), *([1] * extra))

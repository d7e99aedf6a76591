"""What no partition of a layout can beat: admissible lower bounds on step time and on the fullest stage's memory.

Bounds evaluate the cost model's own expressions: a row's bound takes its exact work per micro-batch and lets the pipeline be
cut anywhere; a frame's takes the least work over micro-batches and cp types, with nothing recomputed and everything beside the
pipeline hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cost_models.memory import static_rates
from ..cost_models.pieces import EP
from ..cost_models.pipeline import admissible_s, bound_s, in_flight
from ..cost_models.rows import Rows
from ..cost_models.schedules import DUALPIPE, INTERLEAVED, PAIRED, SPLIT
from ..cost_models.split_passes import busiest_s, by_replay, slowed_in_pairs
from ..cost_models.states import States
from ..cost_models.step import CostModel, same_shape
from ..search_spaces.choices import FRAME, PRICED_CP_TYPES
from ..search_spaces.enumeration import Frames, Space
from ..search_spaces.groups import INNERMOST
from ..search_spaces.layout import CP_TYPES, NONE, SCHEDULES, SHARDINGS, Bools, Floats, Ints, LayoutTable
from ..search_spaces.row_keys import distinct_rows
from .family_prices import paths_s
from .stages import cut_rules, roomy_family

ONE_F_ONE_B = SCHEDULES.index("1f1b")
ZERO2 = SHARDINGS.index("zero2")
ROWS_PER_BLOCK = 1024
"""Rows whose chunks are worked out together: they stay in the cache."""


def row_bounds_s(model: CostModel, rows: Rows, after: Floats) -> Floats:
    """Step time that no partition of the row's blocks can beat, (n,); `after` is `least_after`."""
    return _bounds_s(model, rows, rows.p2p_s, after)


def work_bounds_s(model: CostModel, rows: Rows) -> Floats:
    """The same from the work alone, with free messages between stages and nothing after the pipeline: weaker, and cheap, (n,)."""
    free = np.zeros(len(rows))
    return _bounds_s(model, rows, free, free)


def _bounds_s(model: CostModel, rows: Rows, p2p_s: Floats, after: Floats) -> Floats:
    table, whole = rows.table, rows.depth >= len(model.blocks)
    # A block depth redoes fewer layers when stages are cut unevenly, down to one stage's worth: count none.
    work, largest_s = rows.work_s + np.where(whole, rows.again_s, 0.0), _fullest_s(rows, whole)
    bound = np.empty(len(table))
    for code in np.unique(table.schedule).tolist():
        members = np.nonzero(table.schedule == code)[0]
        pp, m, w, extra = table.pp[members], table.num_microbatches[members], work[members], after[members]
        if SCHEDULES[code] in SPLIT:
            bound[members] = (m + extra) * (w - _paired_s(SCHEDULES[code], rows.take(members))) / pp
            continue
        # What is redone ahead of its gradient is on no path through all chunks.
        passed = rows.work_s[members] if model.problem.stack.recompute_ahead else w
        paths = bound_s(SCHEDULES[code], pp, table.vpp[members], passed, largest_s[members], p2p_s[members], m)
        steady = np.where(m > pp, w + (m - 1 + extra) * w / pp, 0.0) if code == ONE_F_ONE_B else (m + extra) * w / pp
        bound[members] = np.maximum(paths, steady)
    return bound + model.problem.stack.step_overhead_s.value


def _fullest_s(rows: Rows, whole: Bools) -> Floats:
    """Work per micro-batch that some stage does at least, (n,): of every kind of blocks one holds their mean number, rounded up.

    `whole` (n,): all that is recomputed is.
    """
    found = np.zeros(len(rows))
    for name in rows.pieces.names:
        piece = rows.pieces.pieces[name]
        each = piece.work_s[rows.factor] + np.where(whole, piece.again_s[rows.factor], 0.0)
        np.maximum(found, -(-rows.pieces.counts[name] // rows.table.pp) * each, out=found)
    return found


def _paired_s(schedule: str, rows: Rows) -> Floats:
    """Seconds that pairs of passes can save of a micro-batch by hiding its exchanges of tokens, (n,)."""
    found = np.zeros(len(rows))
    for name in (*rows.pieces.names, "embedding", "head") if schedule in PAIRED else ():
        piece, count = rows.pieces.pieces[name], rows.pieces.counts[name]
        found += count * (piece.forward_s[EP] + piece.backward_s[EP] + piece.recompute_s[EP])[rows.factor]
    return (1.0 - slowed_in_pairs(rows.problem)) * found


def _least_held(schedule: str, pp: int, vpp: int, num_microbatches: Ints) -> Floats:
    """Micro-batches that stages keep in flight at their peak, at least, (n, pp): of split passes one of one chunk.

    Interleaved stages keep fewest of their last chunk, in which a stage may hold all its layers: pp at the first backward, or as
    many as have come by then.
    """
    m, stage = num_microbatches[:, None], np.arange(pp)[None, :]
    if schedule in SPLIT:
        return np.full((len(num_microbatches), pp), 0.5 if schedule == DUALPIPE else 1.0 / vpp)
    if schedule == INTERLEAVED:
        return np.asarray(np.minimum(np.minimum(m, pp), 2 * (pp - 1 - stage) + 1), dtype=np.float64)
    return _held(schedule, pp, vpp, num_microbatches)


def _held(schedule: str, pp: int, vpp: int, num_microbatches: Ints) -> Floats:
    """Micro-batches that stages keep in flight at their peak, in whole stages, (n, pp); of passes that are not split."""
    return np.asarray(in_flight(schedule, pp, vpp, num_microbatches[:, None], np.arange(pp)[None, :]) / vpp)


def ruled_bounds_s(model: CostModel, rows: Rows) -> Floats:
    """Step time from below of rows under every way to cut them that the search looks at (`cut_family`), (n,), with nothing beside
    their passes: the paths of equal work in closed form, and of the ways that count layers those through one stage.
    """
    bound = np.empty(len(rows))
    for members in same_shape(rows.table):
        for begin in range(0, len(members), ROWS_PER_BLOCK):
            some = members[begin : begin + ROWS_PER_BLOCK]
            part = rows.take(some)
            (pp, vpp, schedule), m = part.shape, part.column("num_microbatches")
            if by_replay(part):
                family = roomy_family(model, part)
                bound[some] = np.min([busiest_s(part, family[:, way]) for way in range(family.shape[1])], axis=0)
                continue
            ruled, counted = cut_rules(model, part)
            load = part.chunks(ruled)
            bound[some] = admissible_s(schedule, pp, vpp, load.forward_s, load.backward_s, 0.0, m)
            if len(counted):
                bound[some] = np.minimum(bound[some], paths_s(part, counted[None]).min(axis=1))
    return bound + model.problem.stack.step_overhead_s.value


def least_after(model: CostModel, rows: Rows) -> Floats:
    """Seconds that a stage spends once the pipeline has ended per second of its work per micro-batch, at least, (n,).

    Optimizer, offload and the gathering of weights that no compute can hide are linear in what a stage holds, so whatever its
    blocks are, it pays at least r = min_j e_j / x_j of its work x_s. In the induction of `bound_s` r adds to the micro-batches.
    Gradients are left out: those of later stages are reduced while earlier ones still run.
    """
    share = 1.0 - model.problem.stack.overlap.dp_parameters
    gathered, ends = [share * each for each in rows.parameter_s], model.exposed_ends_s(rows)
    if ends is not None:
        gathered = [np.maximum(each + first, 0.0) for each, first in zip(gathered, ends[1], strict=True)]
    rates = [gathered[i] + rows.optimizer_s[i] + rows.offload_s[i] for i in (0, 1)]
    least = np.full(len(rows), np.inf)
    for name in (*rows.pieces.names, "embedding", "head"):
        piece = rows.pieces.pieces[name]
        work = (piece.work_s + piece.again_s)[rows.factor]
        cost = rates[0] * piece.dense_weights[rows.factor] + rates[1] * piece.expert_weights[rows.factor]
        least = np.minimum(least, cost / work)
    return least


def most_work_s(rows: Rows, after: Floats, limit_s: Floats) -> Floats:
    """Most work per micro-batch that any stage of a 1F1B row can do if the row's step is to stay under its limit, (n,).

    Path (D) through the fullest stage s, of work x: T ≥ 2W − P + (m−1−w)·x + r·x with P ≤ (s+1)·x before its end, whatever s is
    T ≥ 2W + (m−1−pp+r)·x. A block depth is left out of W. No limit where m ≤ pp.
    """
    pp, m = rows.table.pp, rows.table.num_microbatches
    whole = rows.work_s + np.where(rows.depth < len(rows.pieces.blocks), 0.0, rows.again_s)
    turns = m - 1 - pp + after
    room = limit_s - 2.0 * whole
    bounded = (m > pp) & (turns > 0)
    return np.where(bounded, np.maximum(room, 0.0) / np.maximum(turns, 1e-9), np.inf) * (1.0 + 1e-9)


def row_bounds_bytes(model: CostModel, rows: Rows) -> Floats:
    """Bytes that the fullest stage holds under any partition, (n,).

    For weights μ over stages, max_s M_s ≥ Σ_s μ_s M_s ≥ Σ_j min_s μ_s (a_j + n_s r_j): block j costs static bytes a_j and r_j per
    micro-batch in flight. μ_s ∝ 1/(A + n_s R) makes it tight for equal blocks. Block depths keep what a recomputed layer keeps.
    """
    return _bytes_at_least(model, rows, (rows.rates.total(0), rows.rates.total(1)))


def mean_bytes(model: CostModel, rows: Rows) -> Floats:
    """Bytes that stages of equal shares of all pieces hold in the mean, and the short-lived block that any has, (n,)."""
    static, active, counts = _piece_bytes(model, rows, (rows.rates.total(0), rows.rates.total(1)))
    held = np.empty(len(rows))
    for members in same_shape(rows.table):
        (pp, vpp, schedule), m = rows.take(members[:1]).shape, rows.column("num_microbatches")[members]
        flight = _least_held if schedule in SPLIT else _held
        held[members] = flight(schedule, pp, vpp, m).mean(axis=1)
    return (static @ counts + held * (active @ counts)) / rows.table.pp + rows.least_transient_bytes + rows.communicator_bytes


def work_bounds_bytes(model: CostModel, rows: Rows, sharings: Mapping[str, npt.NDArray[Any]]) -> Floats:
    """The same under the leanest of some choices of sharding and offload, (n,): what any layout of the row's work holds."""
    first, place = distinct_rows(States.columns(rows.table))
    table = rows.table.take(first)
    dense, expert = np.full(len(first), np.inf), np.full(len(first), np.inf)
    for sharding, hsdp, offload in _shardings(sharings):
        # Shards within a pass belong to the work; between passes every row may have any.
        apart = (table.sharding >= ZERO2) | (sharding >= ZERO2)
        mine = (table.sharding == sharding) & (table.hsdp == hsdp)
        same = np.full(len(first), sharding), np.full(len(first), hsdp), np.full(len(first), offload)
        rates = static_rates(model.problem, replace(table, sharding=same[0], hsdp=same[1], optimizer_offload=same[2]))
        for least, which in ((dense, 0), (expert, 1)):
            np.minimum(least, np.where(~apart | mine, rates.total(which), np.inf), out=least)
    return _bytes_at_least(model, rows, (dense[place], expert[place]))


def _shardings(sharings: Mapping[str, npt.NDArray[Any]]) -> set[tuple[int, int, float]]:
    columns = (sharings[name].tolist() for name in ("sharding", "hsdp", "optimizer_offload"))
    return set(zip(*columns, strict=True))


def _bytes_at_least(model: CostModel, rows: Rows, rates: tuple[Floats, Floats]) -> Floats:
    """Bytes of the fullest stage at least, with `rates` bytes of states per dense and per expert parameter, (n,)."""
    static, active, counts = _piece_bytes(model, rows, rates)
    least = np.empty(len(rows))
    for members in same_shape(rows.table):
        pp, vpp, schedule = rows.take(members[:1]).shape
        m, most = rows.column("num_microbatches")[members], rows.lent[members]
        flight = _least_held(schedule, pp, vpp, m)
        if most.any():  # what a stage lends is not counted where it then lies
            flight = np.minimum.accumulate(flight * (1.0 - rows.take(members).lent_shares), axis=1)
        a, r = static[members], active[members]
        whole_a, whole_r = (a @ counts)[:, None], (r @ counts)[:, None]
        mu = 1.0 / np.maximum(whole_a + flight * whole_r, 1.0)
        mu /= mu.sum(axis=1, keepdims=True)
        ends = [0, pp - 1]  # micro-batches in flight fall along the pipeline, and each term rises or falls with them throughout
        mu, flight = mu[:, ends], flight[:, ends]
        total = np.zeros(len(members))
        for piece, count in enumerate(counts):
            each = mu * (a[:, piece, None] + flight * r[:, piece, None])
            total += count * each.min(axis=1)
        least[members] = total
    return least + rows.least_transient_bytes + rows.communicator_bytes


def _piece_bytes(model: CostModel, rows: Rows, rates: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """Static bytes and least saved bytes per micro-batch of every distinct piece, (n, pieces), and how many there are of each."""
    names = (*rows.pieces.names, "embedding", "head")
    found = [rows.pieces.pieces[name] for name in names]
    dense = np.stack([piece.dense_weights for piece in found], axis=1)[rows.factor]
    expert = np.stack([piece.expert_weights for piece in found], axis=1)[rows.factor]
    saved = np.stack([piece.saved_bytes for piece in found], axis=1)[rows.factor]
    kept = np.stack([piece.recomputed_bytes for piece in found], axis=1)[rows.factor]
    none = (rows.table.recompute_mode == NONE)[:, None]
    static = dense * rates[0][:, None] + expert * rates[1][:, None]
    counts = np.array([rows.pieces.counts[name] for name in names], dtype=np.float64)
    return static, np.where(none, saved, np.minimum(saved, kept)), counts


def frame_bounds(model: CostModel, space: Space) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Step time that no layout of a frame can beat, and whether its states alone can fit, both (frames,)."""
    frames = space.frames
    unique, member = _distinct(frames, ("tp", "cp", "ep", "etp"))
    least = np.full(len(frames), np.inf)
    sequences = model.problem.workload.global_batch // frames.dp
    offered = _offered(space)
    if not offered:  # no way through the batch, as where a stack has none of the schedules that are asked for
        return least, np.zeros(len(frames), dtype=bool)
    micro_batches = sorted({micro_batch for _, micro_batch in offered})
    paired = next((SCHEDULES[code] for code, _ in offered if SCHEDULES[code] in PAIRED), "")
    work, kinds, dense, expert = _least_work(model, space, unique, np.array(micro_batches, dtype=np.int64), paired)
    for (code, micro_batch), rows in offered.items():
        place, pp, m, schedule = micro_batches.index(micro_batch), frames.pp[rows], sequences[rows] // micro_batch, SCHEDULES[code]
        work_s = work[place, member[rows]]
        fullest_s = np.max([-(-count // pp) * each_s[place, member[rows]] for count, each_s in kinds], axis=0)
        bound = m * work_s / pp if schedule in SPLIT else bound_s(schedule, pp, 1, work_s, fullest_s, 0.0, m)
        least[rows] = np.minimum(least[rows], bound)
    fits = _least_states(model, space, dense[member], expert[member]) <= model.usable_bytes
    return least + model.problem.stack.step_overhead_s.value, fits


def _offered(space: Space) -> dict[tuple[int, int], npt.NDArray[np.intp]]:
    """The frames that may have each schedule with each micro-batch, by the code of the one and the size of the other."""
    lists = space.pipeline_lists
    codes, code = np.unique(lists.table["schedule"], return_inverse=True)
    sizes, size = np.unique(lists.table["micro_batch"], return_inverse=True)
    first, member = distinct_rows([lists.start, lists.count])
    found = np.zeros((len(first), len(codes), len(sizes)), dtype=bool)
    for row, (start, count) in enumerate(zip(lists.start[first].tolist(), lists.count[first].tolist(), strict=True)):
        choice = lists.choice[start : start + count]
        found[row, code[choice], size[choice]] = True
    return {(int(a), int(b)): np.nonzero(found[:, i, j][member])[0] for i, a in enumerate(codes) for j, b in enumerate(sizes)}


def _least_work(
    model: CostModel, space: Space, frames: Frames, micro_batches: Ints, paired: str
) -> tuple[Floats, list[tuple[int, Floats]], Floats, Floats]:
    """Least seconds of a micro-batch over cp types, forward and backward, (micro-batches, frames); how many blocks there are of
    every kind, with those of one; and weights on a rank of one stage, dense and expert, (frames,). What pairs of a `paired`
    schedule hide is left out.
    """
    offered = [name for name in model.problem.stack.cp_types if name in PRICED_CP_TYPES]
    cp_types = [CP_TYPES.index(name) for name in model.problem.workload.fix.get("cp_type", offered)]
    tables = [_plain_table(space, frames, size, code) for size in micro_batches.tolist() for code in cp_types]
    rows = model.rows(LayoutTable.concatenate(tables))
    shape = len(micro_batches), len(cp_types), len(frames)
    work_s = (rows.work_s - _paired_s(paired, rows)).reshape(shape).min(axis=1)
    pieces = ((rows.pieces.counts[name], rows.pieces.pieces[name]) for name in rows.pieces.names)
    kinds = [(count, piece.work_s[rows.factor].reshape(shape).min(axis=1)) for count, piece in pieces]
    dense, expert = (weights[rows.factor[: len(frames)]] for weights in rows.pieces.rank_weights)
    return work_s, kinds, dense, expert


def _least_states(model: CostModel, space: Space, dense: Floats, expert: Floats) -> Floats:
    """Bytes of weights, gradients and optimizer on the mean stage under the leanest sharding and offload on offer, (frames,)."""
    frames, sharing = space.frames, space.pipeline_lists.table | space.sharing_lists.table
    least = np.full(len(frames), np.inf)
    for sharding, hsdp, offload in _shardings(sharing):
        table = _plain_table(space, frames, 1, 0, sharding, hsdp, offload)
        rates = static_rates(model.problem, table)
        least = np.minimum(least, (dense * rates.total(0) + expert * rates.total(1)) / frames.pp)
    return least


def _plain_table(
    space: Space,
    frames: Frames,
    micro_batch: int,
    cp_type: int,
    sharding: int = SHARDINGS.index("none"),
    hsdp: int = 0,
    offload: float = 0.0,
) -> LayoutTable:
    """One row per frame: nothing recomputed, whole batch in one micro-batch count that no bound reads, and groups where the flags'
    rank orders put them, or further in than any of more orders does.
    """
    n = len(frames)

    def same(value: int) -> Ints:
        return np.full(n, value, dtype=np.int64)

    return LayoutTable(
        **{name: getattr(frames, name) for name in FRAME},
        vpp=same(1),
        micro_batch=same(micro_batch),
        num_microbatches=same(1),
        sequence_parallel=space.sequence_parallel(frames.tp, frames.cp),
        cp_type=same(cp_type),
        schedule=same(ONE_F_ONE_B),
        sharding=same(sharding),
        hsdp=same(hsdp),
        recompute_mode=same(0),
        recompute_modules=same(0),
        recompute_layers=same(0),
        optimizer_offload=np.full(n, offload),
        activation_offload=np.zeros(n),
        rank_order=same(INNERMOST if space.choices.places_freely else 0),
        split=same(-1),
    )


def _distinct(frames: Frames, names: tuple[str, ...]) -> tuple[Frames, Ints]:
    first, member = distinct_rows([getattr(frames, name) for name in names])
    return frames.take(first), member

"""What no partition of a layout can beat: admissible lower bounds on step time and on the fullest stage's memory.

Bounds evaluate the cost model's own expressions: a row's bound takes its exact work per micro-batch and lets the pipeline be
cut anywhere; a frame's takes the least work over micro-batches and cp types, with nothing recomputed and everything beside the
pipeline hidden.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Prefix, recompute_depths
from ..cost_models.memory import static_rates
from ..cost_models.pipeline import bound_s, in_flight
from ..cost_models.step import CostModel, Rows, same_shape
from ..search_spaces.enumeration import FRAME, PRICED_CP_TYPES, Frames, Space
from ..search_spaces.layout import CP_TYPES, NONE, SCHEDULES, SHARDINGS, Floats, Ints, LayoutTable, row_keys

ONE_F_ONE_B = SCHEDULES.index("1f1b")


def row_bounds_s(model: CostModel, rows: Rows, after: Floats) -> Floats:
    """Step time that no partition of the row's blocks can beat, (n,); `after` is `least_after`."""
    return _bounds_s(model, rows.table, rows.sums, rows.factor, rows.p2p_s, after)


def work_bounds_s(model: CostModel, table: LayoutTable) -> Floats:
    """The same from the work alone, with free messages between stages and nothing after the pipeline: weaker, and cheap, (n,)."""
    sums, factor = model.sums(table)
    free = np.zeros(len(table))
    return _bounds_s(model, table, sums, factor, free, free)


def _bounds_s(model: CostModel, table: LayoutTable, sums: Prefix, factor: Ints, p2p_s: Floats, after: Floats) -> Floats:
    depth = recompute_depths(table)
    # A block depth redoes fewer layers when stages are cut unevenly, down to one stage's worth: count none.
    again = np.where(depth >= sums.blocks, sums.recompute_s[factor, -1], 0.0)
    work = sums.work_s[factor] + again
    largest = np.diff(sums.forward_s + sums.backward_s, axis=1).max(axis=1)[factor]
    bound = np.empty(len(table))
    for members in same_shape(table):
        first = int(members[0])
        schedule, pp, vpp = SCHEDULES[int(table.schedule[first])], int(table.pp[first]), int(table.vpp[first])
        m, w = table.num_microbatches[members], work[members]
        paths = bound_s(schedule, pp, vpp, w, largest[members], p2p_s[members], m)
        if schedule == "1f1b":
            extended = np.where(m > pp, w + (m - 1 + after[members]) * w / pp, 0.0)
        else:
            extended = (m + after[members]) * w / pp
        bound[members] = np.maximum(paths, extended)
    return bound + model.problem.stack.step_overhead_s.value


def least_after(model: CostModel, rows: Rows) -> Floats:
    """Seconds that a stage spends after (or before) its pipeline per second of its work per micro-batch, at least, (n,).

    Optimizer, offload and the data-parallel traffic that no compute can hide are linear in what a stage holds, so whatever its
    blocks are, it pays at least r = min_j e_j / x_j of its work x_s. In the induction of `bound_s` r adds to the micro-batches.
    """
    overlap = model.problem.stack.overlap
    shares = ((rows.gradient_s, 1.0 - overlap.dp_gradients), (rows.parameter_s, 1.0 - overlap.dp_parameters))
    rates = [sum(share * pair[i] for pair, share in (*shares, (rows.optimizer_s, 1.0), (rows.offload_s, 1.0))) for i in (0, 1)]
    least = np.full(len(rows), np.inf)
    for name in (*rows.pieces.names, "embedding", "head"):
        piece = rows.pieces.pieces[name]
        work = (piece.forward_s + piece.backward_s + piece.recompute_s).sum(axis=0)[rows.factor]
        cost = rates[0] * piece.dense_weights[rows.factor] + rates[1] * piece.expert_weights[rows.factor]
        least = np.minimum(least, cost / work)
    return least


def most_work_s(rows: Rows, after: Floats, limit_s: Floats) -> Floats:
    """Most work per micro-batch that any stage of a 1F1B row can do if the row's stage time is to stay under its limit, (n,).

    Path (D) through the fullest stage s, of work x: T ≥ 2W − P + (m−1−w)·x + r·x with P ≤ (s+1)·x before its end, whatever s is
    T ≥ 2W + (m−1−pp+r)·x. At block depth P counts recompute at its mean, up to pp−1 stages' worth. No limit where m ≤ pp+1.
    """
    pp, m, prefix = rows.table.pp, rows.table.num_microbatches, rows.prefix
    mean = np.where(prefix.depth < prefix.blocks, prefix.nominal_recompute_s(pp, pp - 1), 0.0)
    turns = m - 1 - pp + after
    room = limit_s - 2.0 * prefix.total_s(pp) + mean
    return np.where(turns > 0, np.maximum(room, 0.0) / np.maximum(turns, 1e-9), np.inf) * (1.0 + 1e-9)


def row_bounds_bytes(model: CostModel, rows: Rows) -> Floats:
    """Bytes that the fullest stage holds under any partition, (n,).

    For weights μ over stages, max_s M_s ≥ Σ_s μ_s M_s ≥ Σ_j min_s μ_s (a_j + n_s r_j): block j costs static bytes a_j and r_j per
    micro-batch in flight. μ_s ∝ 1/(A + n_s R) makes it tight for equal blocks. Block depths keep what a recomputed layer keeps.
    """
    static, active, counts = _piece_bytes(model, rows)
    least = np.empty(len(rows))
    for members in same_shape(rows.table):
        t = rows.table.take(members)
        schedule, pp, vpp = SCHEDULES[int(t.schedule[0])], int(t.pp[0]), int(t.vpp[0])
        flight = in_flight(schedule, pp, vpp, t.num_microbatches[:, None], np.arange(pp)[None, :]) / vpp
        a, r = static[members], active[members]
        whole_a, whole_r = (a @ counts)[:, None], (r @ counts)[:, None]
        mu = 1.0 / np.maximum(whole_a + flight * whole_r, 1.0)
        mu /= mu.sum(axis=1, keepdims=True)
        total = np.zeros(len(members))
        for piece, count in enumerate(counts):
            each = mu * (a[:, piece, None] + flight * r[:, piece, None])
            total += count * each.min(axis=1)
        least[members] = total
    return least + rows.least_transient_bytes + rows.communicator_bytes


def _piece_bytes(model: CostModel, rows: Rows) -> tuple[Floats, Floats, Floats]:
    """Static bytes and least saved bytes per micro-batch of every distinct piece, (n, pieces), and how many there are of each."""
    names = (*rows.pieces.names, "embedding", "head")
    found = [rows.pieces.pieces[name] for name in names]
    dense = np.stack([piece.dense_weights for piece in found], axis=1)[rows.factor]
    expert = np.stack([piece.expert_weights for piece in found], axis=1)[rows.factor]
    saved = np.stack([piece.saved_bytes for piece in found], axis=1)[rows.factor]
    kept = np.stack([piece.recomputed_bytes for piece in found], axis=1)[rows.factor]
    none = (rows.table.recompute_mode == NONE)[:, None]
    static = dense * rows.rates.total(0)[:, None] + expert * rows.rates.total(1)[:, None]
    counts = np.array([(*model.blocks, "embedding", "head").count(name) for name in names], dtype=np.float64)
    return static, np.where(none, saved, np.minimum(saved, kept)), counts


def frame_bounds(model: CostModel, space: Space) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Step time that no layout of a frame can beat, and whether its states alone can fit, both (frames,)."""
    frames = space.frames
    unique, member = _distinct(frames, ("tp", "cp", "ep", "etp"))
    least = np.full(len(frames), np.inf)
    sequences = model.problem.workload.global_batch // frames.dp
    micro_batches = np.unique(space.pipeline_lists.table["micro_batch"])
    schedules = [SCHEDULES[int(code)] for code in np.unique(space.pipeline_lists.table["schedule"])]
    dense = expert = np.zeros(len(unique))
    for micro_batch in micro_batches:
        forward, backward, dense, expert = _least_work(model, space, unique, int(micro_batch))
        m = sequences // int(micro_batch)
        runs = (sequences % int(micro_batch) == 0) & (m > 0)
        work = (forward + backward)[member]
        for pp in np.unique(frames.pp).tolist():
            rows = np.nonzero(runs & (frames.pp == pp))[0]
            for schedule in schedules:
                bound = bound_s(schedule, pp, 1, work[rows], 0.0, 0.0, m[rows])
                least[rows] = np.minimum(least[rows], bound)
    fits = _least_states(model, space, dense[member], expert[member]) <= model.usable_bytes
    return least + model.problem.stack.step_overhead_s.value, fits


def _least_work(model: CostModel, space: Space, frames: Frames, micro_batch: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Least forward and backward seconds of a micro-batch over cp types, and weights on a rank, for distinct frames."""
    found = []
    offered = [name for name in model.problem.stack.cp_types if name in PRICED_CP_TYPES]
    for cp_type in model.problem.workload.fix.get("cp_type", offered):
        rows = model.rows(_plain_table(space, frames, micro_batch, CP_TYPES.index(cp_type)))
        prefix = rows.sums.gathered(rows.factor, recompute_depths(rows.table))
        ends = (prefix.embedding, prefix.head)
        forward = prefix.forward_s[:, -1] + sum(end.forward_s for end in ends)
        backward = prefix.backward_s[:, -1] + sum(end.backward_s for end in ends)
        found.append((forward, backward, prefix.dense[:, -1] + sum(end.dense for end in ends), prefix.expert[:, -1]))
    pick = np.argmin([forward + backward for forward, backward, _, _ in found], axis=0)
    each = np.arange(len(frames))
    forward, backward = (np.array([work[i] for work in found])[pick, each] for i in (0, 1))
    return forward, backward, found[0][2], found[0][3]


def _least_states(model: CostModel, space: Space, dense: Floats, expert: Floats) -> Floats:
    """Bytes of weights, gradients and optimizer on the mean stage under the leanest sharding and offload on offer, (frames,)."""
    frames, sharing = space.frames, space.pipeline_lists.table | space.sharing_lists.table
    least = np.full(len(frames), np.inf)
    choices = {
        (int(s), int(h), float(o))
        for s, h, o in zip(sharing["sharding"], sharing["hsdp"], sharing["optimizer_offload"], strict=True)
    }
    for sharding, hsdp, offload in choices:
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
    """One row per frame: nothing recomputed, whole batch in one micro-batch count that no bound reads."""
    n = len(frames)

    def same(value: int) -> Ints:
        return np.full(n, value, dtype=np.int64)

    return LayoutTable(
        **{name: getattr(frames, name) for name in FRAME},
        vpp=same(1),
        micro_batch=same(micro_batch),
        num_microbatches=same(1),
        sequence_parallel=space.sequence_parallel(frames.tp),
        cp_type=same(cp_type),
        schedule=same(ONE_F_ONE_B),
        sharding=same(sharding),
        hsdp=same(hsdp),
        recompute_mode=same(0),
        recompute_modules=same(0),
        recompute_layers=same(0),
        optimizer_offload=np.full(n, offload),
        activation_offload=np.zeros(n),
        rank_order=same(0),
        split=same(-1),
    )


def _distinct(frames: Frames, names: tuple[str, ...]) -> tuple[Frames, Ints]:
    key = row_keys([getattr(frames, name) for name in names])
    _, first, member = np.unique(key, return_index=True, return_inverse=True)
    return frames.take(first), np.asarray(member)

"""What schedules that split or pair their passes ask of a layout beyond its loads: the times of weight gradients, the messages that
hide in pairs, and what stages hold until weight gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..search_spaces.layout import FULL_BLOCK, Floats, Ints, Problem
from .layers import LayerModel
from .loads import TURNS_TOLD, Cuts, Loads, saved_by_turns
from .operation import BF16, Factors, Operator
from .pieces import DP, ENDS, EP
from .pipeline import held_by_chunk, in_flight
from .replay import reduced, stage_ends_s
from .rows import Rows
from .schedules import INTERLEAVED, PAIRED, SPLIT, Schedule, stage_chunks, stage_share, usual_schedule
from .sharding import ZERO2, ZERO3
from .timeline import Work

GEMMS = ("gemm", "grouped_gemm")


def slowed_in_pairs(problem: Problem) -> float:
    """Share of the compute that a pair of passes loses beside its exchange of tokens: the multiprocessors on which that runs (20 of
    an H800's 132, arXiv 2412.19437, 3.5.1), or by what traffic slows the cluster's kernels; on engines of its own nothing.
    """
    cluster, device = problem.cluster, problem.cluster.accelerator
    if all(level.offload_engine for level in cluster.levels):
        return 0.0
    taken = problem.stack.exchange_sms / device.multiprocessors.value if device.multiprocessors else 0.0
    return max(min(taken, 1.0), cluster.lost_beside_communication)


def by_replay(rows: Rows) -> bool:
    """Whether rows that share pp, vpp and schedule, and whether micro-batches are left over, are priced by a replay: passes are
    split or paired, groups are not pp, or recompute does not wait for gradients.
    """
    pp, _, schedule = rows.shape
    if schedule != INTERLEAVED:
        return schedule in SPLIT
    in_groups = rows.problem.stack.microbatch_group not in (0, pp) or bool(rows.table.leaves_over.any())
    return in_groups or recomputes_ahead(rows)


def recomputes_ahead(rows: Rows) -> bool:
    """Whether chunks redo their layer before its gradient comes: interleaved ones of a single layer, where the stack does so."""
    pp, vpp, schedule = rows.shape
    return rows.problem.stack.recompute_ahead and schedule == INTERLEAVED and pp * vpp == len(rows.pieces.blocks)


def stage_loads(rows: Rows, chunks: Loads) -> Loads:
    """Chunks (n, pp·vpp) put together to the stages that hold them, (n, pp), with the work of a mean micro-batch.

    A stage that holds both ends of the model needs no second embedding for its head or for MTP (arXiv 2412.19437, 3.2.1).
    """
    pp, vpp, schedule = rows.shape
    place, share = stage_chunks(schedule, pp, vpp), stage_share(schedule)
    forward, backward, dense, expert, saved = (each[:, place].sum(axis=1) for each in chunks.columns)
    if rows.second_embedding and pp > 1:
        both_ends = (place == 0).any(axis=0) & (place == pp * vpp - 1).any(axis=0)
        dense = dense - both_ends * rows.pieces.pieces["embedding"].dense_weights[rows.factor][:, None]
    if schedule == INTERLEAVED and not by_replay(rows):
        saved = saved_by_turns(chunks.saved_bytes, rows.column("num_microbatches"), pp, vpp, np.arange(pp))
    return Loads(share * forward, share * backward, dense, expert, saved, chunks.experts)


@dataclass(frozen=True)
class PassFigures:
    """What passes of one piece are made of, (n,): of a backward the weight gradients, EP messages that a pair can hide, and of a
    layer that is redone what comes on top; `again_s` is all that is redone, `kept_bytes` what weight gradients need.
    """

    weight_s: Floats
    sent_s: Floats
    returned_s: Floats
    resent_s: Floats
    again_s: Floats
    kept_bytes: Floats


def pass_figures(layers: LayerModel, rows: Rows, name: str) -> PassFigures:
    """The figures of one piece for each row."""
    piece, row = rows.pieces.pieces[name], rows.factor
    again = 0.0 if name in ENDS else 1.0
    return PassFigures(
        _weight_s(layers, name, rows),
        piece.forward_s[EP][row],
        piece.backward_s[EP][row],
        again * piece.recompute_s[EP][row],
        again * piece.again_s[row],
        _kept_bytes(layers, name, rows),
    )


def pass_times(layers: LayerModel, rows: Rows, cuts: Cuts, chunks: Loads) -> Work:
    """What the passes of every chunk take, (pp·vpp, n): weight gradients apart, and the EP messages that a pair can hide."""
    weight = over_chunks(rows, cuts, {name: _weight_s(layers, name, rows) for name in _names(rows)})
    sent, returned = _exchange_s(rows, cuts)
    whole = rows.column("recompute_mode") == FULL_BLOCK
    early = (recompute_s(rows, cuts) * whole[:, None]).T if recomputes_ahead(rows) else None
    split, slowed = np.minimum(weight, chunks.backward_s).T, slowed_in_pairs(rows.problem)
    return Work(chunks.forward_s.T, chunks.backward_s.T, split, (sent.T, returned.T), early, slowed)


def _exchange_s(rows: Rows, cuts: Cuts) -> tuple[Floats, Floats]:
    """EP messages of every chunk's forward and backward pass, (n, pp·vpp) seconds each."""
    pieces, at = rows.pieces.pieces, rows.factor
    forward = over_chunks(rows, cuts, {name: pieces[name].forward_s[EP][at] for name in _names(rows)})
    backward = over_chunks(rows, cuts, {name: pieces[name].backward_s[EP][at] for name in _names(rows)})
    again = over_chunks(rows, cuts, {name: pieces[name].recompute_s[EP][at] for name in rows.pieces.names}, rows.redone)
    return forward, backward + again


def busiest_s(rows: Rows, cuts: Cuts) -> Floats:
    """What the stage that works longest works in a step, at least, (n,) seconds: all that pairs can hide is left out."""
    pp, vpp, schedule = rows.shape
    load = stage_loads(rows, rows.chunks(cuts))
    each = load.forward_s + load.backward_s
    if schedule in PAIRED:
        place, (sent, returned) = stage_chunks(schedule, pp, vpp), _exchange_s(rows, cuts)
        hides = stage_share(schedule) * (1.0 - slowed_in_pairs(rows.problem))
        each = each - hides * (sent + returned)[:, place].sum(axis=1)
    return np.asarray(rows.column("num_microbatches") * each.max(axis=1))


def pipeline_ends_s(rows: Rows, work: Work) -> Floats:
    """When every stage has done its last pass, (n, pp) seconds, for rows that share pp, vpp and schedule."""
    pp, vpp, schedule = rows.shape
    stack = rows.problem.stack
    m, splits, group = rows.column("num_microbatches"), stack.split_backward, stack.microbatch_group
    return stage_ends_s(schedule, pp, vpp, work, rows.p2p_s, m, splits, group).T


def held_bytes(layers: LayerModel, rows: Rows, cuts: Cuts, chunks: Loads) -> Floats:
    """Activations that every stage holds at its fullest, (n, pp): whole ones until a backward pass, and what weight gradients need
    until these.
    """
    pp, vpp, schedule = rows.shape
    kept, place = kept_bytes(layers, rows, cuts), stage_chunks(schedule, pp, vpp)
    found = np.empty((len(rows), pp))
    group = rows.problem.stack.microbatch_group
    counts = np.array([reduced(schedule, pp, m, group) for m in rows.column("num_microbatches").tolist()])
    for count, size in np.unique(counts, axis=0).tolist():
        mine = (counts == (count, size)).all(axis=1)
        for stage, held in enumerate(_moments(rows, count, size)):
            each = np.concatenate([chunks.saved_bytes[mine][:, place[:, stage]], kept[mine][:, place[:, stage]]], axis=1)
            found[mine, stage] = (each @ held.T).max(axis=1)
    return found


def held_moments(rows: Rows) -> tuple[Ints, ...]:
    """Of every stage of one row the micro-batches that it keeps of each of its chunks, and where its schedule is replayed what it
    keeps of each for weight gradients, at the moments when it may be at its fullest, (moments, columns).
    """
    (pp, vpp, schedule), m = rows.shape, int(rows.column("num_microbatches")[0])
    if by_replay(rows):
        return _moments(rows, *reduced(schedule, pp, m, rows.problem.stack.microbatch_group))
    if schedule == INTERLEAVED:
        return tuple(held_by_chunk(pp, vpp, min(m, TURNS_TOLD * pp), stage) for stage in range(pp))
    return tuple(np.reshape(in_flight(schedule, pp, vpp, m, stage), (1, 1)) for stage in range(pp))


def _moments(rows: Rows, num_microbatches: int, group: int) -> tuple[Ints, ...]:
    """The same of replayed schedules, `Schedule.held` of every stage."""
    pp, vpp, schedule = rows.shape
    return _usual_moments(schedule, pp, vpp, num_microbatches, rows.problem.stack.split_backward, group)


@lru_cache(maxsize=512)
def _usual_moments(name: str, pp: int, vpp: int, num_microbatches: int, split_backward: bool, group: int) -> tuple[Ints, ...]:
    order = usual_schedule(name, pp, vpp, num_microbatches, split_backward, group)
    return tuple(order.held(stage) for stage in range(pp))


def kept_bytes(layers: LayerModel, rows: Rows, cuts: Cuts) -> Floats:
    """What every chunk keeps of a micro-batch from its input's gradient to its weights', (n, pp·vpp)."""
    return over_chunks(rows, cuts, {name: _kept_bytes(layers, name, rows) for name in _names(rows)})


def recompute_s(rows: Rows, cuts: Cuts) -> Floats:
    """What of every chunk's backward pass is recompute, (n, pp·vpp) seconds."""
    pieces = rows.pieces.pieces
    return over_chunks(rows, cuts, {name: pieces[name].again_s[rows.factor] for name in rows.pieces.names}, rows.redone)


def hidden_s(order: Schedule, work: Work, stage: int) -> float:
    """Seconds that the pairs of a stage take less than their passes would one after the other; `work` of one row."""
    beside = np.flatnonzero(order.paired[stage])
    forward, backward = order.chunk[stage][beside - 1], order.chunk[stage][beside]
    saved = (work.forward_s[f] + work.backward_s[b] - work.of_pair(f, b) for f, b in zip(forward, backward, strict=True))
    return float(sum(saved))


def _names(rows: Rows) -> tuple[str, ...]:
    return (*rows.pieces.names, "embedding", "head")


def over_chunks(rows: Rows, cuts: Cuts, each: Mapping[str, Floats], depth: Ints | None = None) -> Floats:
    """Figures per piece (n,) summed over what every chunk holds, (n, chunks); with `depth` (n, chunks or 1) over that many first
    layers of each.
    """
    start, stop = cuts[:, :-1], cuts[:, 1:]
    if depth is not None:
        stop = np.minimum(start + np.minimum(depth, len(rows.pieces.blocks)), stop)
    total = np.zeros((len(rows), start.shape[1]))
    for name in rows.pieces.names:
        running = rows.pieces.running[name]
        total += (running[stop] - running[start]) * each[name][:, None]
    for name, chunk in (("embedding", 0), ("head", -1)):
        if name in each:
            total[:, chunk] += each[name]
    return total


def _weight_s(layers: LayerModel, name: str, rows: Rows) -> Floats:
    """Seconds of a piece's weight gradients, to add them up, and under FSDP to scatter them, (n,)."""
    piece, sharding = rows.pieces.pieces[name], rows.column("sharding")
    added = layers.accumulation_s((piece.dense_weights + piece.expert_weights)[rows.factor])
    sent, gathered = rows.problem.stack.sent_gradient_bytes, rows.problem.stack.gathered_weight_bytes
    scattered = np.where(sharding == ZERO2, 1.0, np.where(sharding >= ZERO3, sent / (sent + gathered), 0.0))  # the rest gathers
    sends = scattered * piece.backward_s[DP][rows.factor]
    return np.asarray(_over_gemms(layers, name, rows, lambda op, f: layers.kernels.wgrad_s(op)) + added + sends)


def _kept_bytes(layers: LayerModel, name: str, rows: Rows) -> Floats:
    """What a piece keeps from its input's gradient to its weights', (n,): inputs and outputs' gradients of all GEMMs, 32·s·b·h for
    a plain layer (2401.10241, section 2.3).

    Under SP as the paper's own code does, and MindSpeed's: of an input that TP gathers the rank's share, gathered once more for the
    weights; of a row-parallel output the gradient as it came, whole. So TP by t with SP leaves 4 + 28/t. Transformer Engine keeps
    gathered inputs too.
    """

    def kept(op: Operator, f: Factors) -> Floats:
        shared = any(m.dimension == "tp" and m.collective == "all_gather" and np.any(m.forward) for m in op.messages)
        width = BF16 if op.high_precision else f.linear_bytes
        return np.asarray(op.groups * op.m * (width * op.k / (f.sp if shared else 1.0) + BF16 * op.n))

    return _over_gemms(layers, name, rows, kept)


def _over_gemms(layers: LayerModel, name: str, rows: Rows, figure: Callable[[Operator, Factors], Floats]) -> Floats:
    factors = layers.factors(rows.table)
    return np.asarray(sum((figure(op, factors) for op in layers.operators(name, factors) if op.kind in GEMMS), factors.zeros))

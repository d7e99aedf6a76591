"""Everything that is said about a few layouts: where the time goes, what each stage holds, what crosses which level, MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Floats, Ints, Layout, LayoutTable
from .layers import LayerModel
from .loads import Cuts, Loads, piece_counts, recompute_depths
from .memory import GIB
from .operators import Factors, Operator
from .pieces import COMPONENTS, COMPUTE, CP, DP, ENDS, EP, HOST, OFFLOAD, TP
from .rows import Rows
from .schedules import stage_chunks, stage_share, usual_schedule
from .split_passes import by_replay, hidden_s, pass_times
from .stage_times import Flow
from .states import Pair
from .step import CostModel
from .timeline import Work
from .traffic import OFFLOAD as OFFLOADED
from .traffic import layers_redone, lent_bytes, offloaded_bytes, sent_bytes

MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations", "transient", "communicators")


@dataclass(frozen=True)
class Detail:
    """Figures of one layout: seconds, bytes per stage and term, GiB per level and dimension."""

    step_time_s: float
    critical_stage: int
    breakdown_s: dict[str, float]
    stage_bytes: tuple[dict[str, float], ...]
    traffic_gib: dict[str, dict[str, float]]
    offloaded_gib: float  # that a used device sends to the host or the pool per step, mean over devices
    cross_supernode_share: float
    passes: Work  # seconds per chunk
    p2p_s: float
    pipeline_s: float  # from the first forward to the last backward
    reduced_s: Floats  # (pp,) gradient traffic of each stage that its last backward does not hide
    after_s: float  # what follows once all gradients are reduced, the step's overhead included
    model_flops: float
    model_flops_full_attention: float
    executed_flops: float


def detail(model: CostModel, layout: Layout) -> Detail:
    """Prices one layout whose stages are given: its step by component, memory by stage and term, traffic by level, FLOPs."""
    table = LayoutTable.from_layouts([layout])
    split = table.splits[0]
    rows, cuts = model.rows(table), np.array([split.cuts])
    flow = model.flow(rows, cuts)
    chunks, times = flow.chunks, model.around_pipeline(rows, flow)
    stalled_s = float(rows.stalled_s[0])
    overhead = model.problem.stack.step_overhead_s.value + stalled_s
    m = float(layout.num_microbatches)
    reduced, after = int(times.done_s[0].argmax()), int(times.after_s[0].argmax())  # the last to reduce, and the longest after that
    end = times.end_s[0, reduced]
    # Its end is looked at from the fullest of the stages that have all ended by then.
    work = (flow.load.forward_s + flow.load.backward_s)[0]
    stage = reduced + int(work[reduced:].argmax())
    passes, hidden_s = _passes(model, rows, cuts, flow, stage)
    busy = _stage_components(model, table, stage_chunks(layout.schedule, split.pp, split.vpp)[:, stage])
    forward, backward, recompute = (stage_share(layout.schedule) * part for part in busy)
    steady = m * float(forward.sum() + backward.sum() + recompute.sum()) - hidden_s
    still = min(end, model.flow(rows.without_p2p(), cuts).end_s[0, reduced])
    every = m * (forward + backward + recompute)
    breakdown = {
        "forward": m * forward[COMPUTE],
        "backward": m * backward[COMPUTE],
        "recompute": m * recompute[COMPUTE],
        "tp": every[TP],
        "cp": every[CP],
        "ep": every[EP] - hidden_s,
        "pp": end - still + stalled_s,
        "dp": every[DP] + times.reduced_s[0, reduced] + times.gathered_s[0, after],
        "bubble": still - steady,
        "optimizer": times.optimizer_s[0, after],
        "offload": every[OFFLOAD] + (0.0 if times.offload_s is None else times.offload_s[0, after]),
        "host": every[HOST] + overhead - stalled_s,
    }
    peaks = model.stage_peaks(rows, flow.load)[:, 0, :]
    redone, weights = layers_redone(model, rows, cuts), (np.array([chunks.dense.sum()]), np.array([chunks.expert.sum()]))
    traffic = _traffic(model, rows, redone, weights, chunks)
    offloaded = float(offloaded_bytes(model, rows, redone, *weights)[0])
    batch, flops = model.problem.workload.global_batch, model_flops(model.layers)
    return Detail(
        step_time_s=float(times.total_s[0]) + overhead,
        critical_stage=stage,
        breakdown_s={name: float(value) for name, value in breakdown.items()},
        stage_bytes=tuple(dict(zip(MEMORY_TERMS, map(float, column), strict=True)) for column in peaks.T),
        traffic_gib=traffic,
        offloaded_gib=offloaded / GIB,
        cross_supernode_share=_cross_supernode_share(model, traffic),
        passes=passes,
        p2p_s=float(rows.p2p_s[0]),
        pipeline_s=float(times.end_s[0, 0]),
        reduced_s=times.reduced_s[0],
        after_s=float(times.after_s[0, after]) + overhead,
        model_flops=flops[0] * batch,
        model_flops_full_attention=flops[1] * batch,
        executed_flops=(flops[0] + _recomputed_flops(model, table)) * batch,
    )


def _cross_supernode_share(model: CostModel, traffic: Mapping[str, Mapping[str, float]]) -> float:
    """Of what goes between devices, the share that leaves a supernode."""
    pooled = {OFFLOADED} if model.problem.workload.offload_to == "pool" else set()
    between = [{name: size for name, size in traffic[level.name].items() if name not in pooled} for level in model.network.levels]
    sent = np.array([sum(each.values()) for each in between])
    return float(sent[model.network.supernode + 1 :].sum() / sent.sum()) if sent.sum() else 0.0


def model_flops(layers: LayerModel) -> tuple[float, float]:
    """Model FLOPs of one sequence, three times forward: with causal attention halved, and with it counted whole.

    GEMMs and attention of every layer, MTP and LM head in; recompute and the embedding look-up out (Megatron's convention).
    """
    totals = np.zeros(2)
    for name, count in _piece_totals(layers).items():
        for op in _whole_operators(layers, name):
            totals += count * 3.0 * np.array([op.forward_flops[0], op.forward_full_flops[0]])
    return float(totals[0]), float(totals[1])


def _piece_totals(layers: LayerModel) -> dict[str, int]:
    names = (*layers.blocks, "embedding", "head")
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _whole_operators(layers: LayerModel, name: str) -> list[Operator]:
    """Operators of a piece for one sequence on one device with perfect balance."""
    one = np.ones(1)
    f = Factors(one, one, one, one, one, np.zeros(1), np.zeros(1, dtype=np.int64), float(layers.problem.workload.seq_len))
    return layers.operators_unpadded(name, f)


def _recomputed_flops(model: CostModel, table: LayoutTable) -> float:
    """Forward FLOPs of one sequence that are executed again."""
    names = (*dict.fromkeys(model.blocks), *ENDS)
    again = piece_counts(names, model.blocks, table.splits[0], int(recompute_depths(table)[0]))[1].sum(axis=1)
    again[-len(ENDS) :] = float(model.problem.stack.recomputed_ends)
    mode, modules = int(table.recompute_mode[0]), int(table.recompute_modules[0])
    total = 0.0
    for name, count in zip(names, again, strict=True):
        for op in _whole_operators(model.layers, name):
            redone = mode in (FULL_BLOCK, FULL_UNIFORM) or (mode == SELECTIVE and name not in ENDS and op.modules & modules)
            total += count * float(op.forward_flops[0]) if redone else 0.0
    return total


def _passes(model: CostModel, rows: Rows, cuts: Cuts, flow: Flow, stage: int) -> tuple[Work, float]:
    """What the passes of one row take per chunk, and what a stage saves in a step where they run in pairs."""
    pp, vpp, schedule = rows.shape
    if not by_replay(rows):
        return Work(flow.chunks.forward_s[0], flow.chunks.backward_s[0]), 0.0
    work = pass_times(model.layers, rows, cuts, flow.chunks).row(0)
    m, stack = int(rows.column("num_microbatches")[0]), rows.problem.stack
    return work, hidden_s(usual_schedule(schedule, pp, vpp, m, stack.split_backward, stack.microbatch_group), work, stage)


def _stage_components(model: CostModel, table: LayoutTable, held_chunks: Ints) -> tuple[Floats, Floats, Floats]:
    """Forward, backward and recompute seconds of a stage per micro-batch, by component, (components,)."""
    pieces = model.pieces(table)
    names = (*pieces.names, "embedding", "head")
    counts, again = piece_counts(names, model.blocks, table.splits[0], int(recompute_depths(table)[0]))
    held, redone = counts[:, held_chunks].sum(axis=1), again[:, held_chunks].sum(axis=1)
    zeros = np.zeros(len(COMPONENTS))
    forward, backward, recompute = zeros.copy(), zeros.copy(), zeros.copy()
    for name, count, repeated in zip(names, held, redone, strict=True):
        piece = pieces.pieces[name]
        forward += count * piece.forward_s[:, 0]
        backward += count * piece.backward_s[:, 0]
        recompute += repeated * piece.recompute_s[:, 0]
    return forward, backward, recompute


def _traffic(
    model: CostModel, rows: Rows, redone: Mapping[str, Floats], weights: Pair, chunks: Loads
) -> dict[str, dict[str, float]]:
    """GiB that a used device sends one way per step (mean over devices), by level and dimension.

    `weights`: dense and expert parameters on one rank of every stage, summed, (1,) each; `chunks`: what these hold, (1, pp·vpp).
    """
    levels = [level.name for level in model.network.levels]
    found: dict[str, dict[str, float]] = {level: {} for level in levels}
    lent = [(OFFLOADED, lent_bytes(model, rows, chunks)[:, None])] if rows.lent.any() else []
    for dimension, sent in chain(sent_bytes(model, rows, redone, *weights), lent):
        for level, amount in zip(levels, sent[:, 0], strict=True):
            if amount > 0:
                found[level][dimension] = found[level].get(dimension, 0.0) + float(amount) / GIB
    return found

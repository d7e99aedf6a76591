"""Everything that is said about a few layouts: where the time goes, what each stage holds, what crosses which level, MFU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Floats, Layout, LayoutTable
from .layers import COMPONENTS, COMPUTE, CP, DP, EP, HOST, TP, LayerModel
from .loads import Cuts, piece_counts, recompute_depths
from .memory import GIB
from .operators import Factors, Operator
from .rows import Rows
from .step import CostModel
from .traffic import layers_redone, sent_bytes

MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations", "transient", "communicators")


@dataclass(frozen=True)
class Detail:
    """Figures of one layout: seconds, bytes per stage and term, GiB per level and dimension."""

    step_time_s: float
    critical_stage: int
    breakdown_s: dict[str, float]
    stage_bytes: tuple[dict[str, float], ...]
    traffic_gib: dict[str, dict[str, float]]
    cross_supernode_share: float
    chunk_forward_s: Floats
    chunk_backward_s: Floats
    p2p_s: float
    longest_path_s: float  # of the pipeline alone, in closed form
    beside_pipeline_s: float  # what the stage that has most of it adds once the pipeline has run dry, and the step's overhead
    model_flops: float
    model_flops_full_attention: float
    executed_flops: float


def detail(model: CostModel, layout: Layout) -> Detail:
    """Prices one layout whose stages are given, with every figure of design section 2."""
    table = LayoutTable.from_layouts([layout])
    split = table.splits[0]
    rows, cuts = model.rows(table), np.array([split.cuts])
    flow = model.flow(rows, cuts)
    chunks, times = flow.chunks, model.around_pipeline(rows, flow)
    stage = int(times.total_s[0].argmax())
    overhead = model.problem.stack.step_overhead_s.value
    m = float(layout.num_microbatches)
    busy = _stage_components(model, table, stage, split.pp)
    steady = m * sum(part.sum() for part in busy)
    path = times.path_s[0, stage]
    # Without p2p another stage of an interleaved schedule may set the pace, and this one's path be drawn up to it.
    still = min(path, model.flow(rows.without_p2p(), cuts).path_s[0, stage])
    forward, backward, recompute = busy
    every = m * (forward + backward + recompute)
    breakdown = {
        "forward": m * forward[COMPUTE],
        "backward": m * backward[COMPUTE],
        "recompute": m * recompute[COMPUTE],
        "tp": every[TP],
        "cp": every[CP],
        "ep": every[EP],
        "pp": path - still,
        "dp": every[DP] + times.dp_s[0, stage],
        "bubble": still - steady,
        "optimizer": times.optimizer_s[0, stage],
        "offload": 0.0 if times.offload_s is None else times.offload_s[0, stage],
        "host": every[HOST] + overhead,
    }
    peaks = model.stage_peaks(rows, flow.load)[:, 0, :]
    traffic = _traffic(model, rows, cuts, (float(chunks.dense.sum()), float(chunks.expert.sum())))
    supernode = model.network.supernode
    sent = np.array([sum(traffic[level.name].values()) for level in model.network.levels])
    flops = model_flops(model.layers)
    return Detail(
        step_time_s=float(times.total_s[0, stage]) + overhead,
        critical_stage=stage,
        breakdown_s={name: float(value) for name, value in breakdown.items()},
        stage_bytes=tuple(dict(zip(MEMORY_TERMS, map(float, column), strict=True)) for column in peaks.T),
        traffic_gib=traffic,
        cross_supernode_share=float(sent[supernode + 1 :].sum() / sent.sum()) if sent.sum() else 0.0,
        chunk_forward_s=chunks.forward_s[0],
        chunk_backward_s=chunks.backward_s[0],
        p2p_s=float(rows.p2p_s[0]),
        longest_path_s=float(times.path_s[0].max()),
        beside_pipeline_s=float((times.total_s - times.path_s)[0].max()) + overhead,
        model_flops=flops[0] * model.problem.workload.global_batch,
        model_flops_full_attention=flops[1] * model.problem.workload.global_batch,
        executed_flops=(flops[0] + _recomputed_flops(model, table)) * model.problem.workload.global_batch,
    )


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
    names = (*dict.fromkeys(model.blocks), "embedding", "head")
    again = piece_counts(names, model.blocks, table.splits[0], int(recompute_depths(table)[0]))[1].sum(axis=1)
    mode, modules = int(table.recompute_mode[0]), int(table.recompute_modules[0])
    total = 0.0
    for name, count in zip(names, again, strict=True):
        for op in _whole_operators(model.layers, name):
            redone = mode in (FULL_BLOCK, FULL_UNIFORM) or (mode == SELECTIVE and op.modules & modules)
            total += count * float(op.forward_flops[0]) if redone else 0.0
    return total


def _stage_components(model: CostModel, table: LayoutTable, stage: int, pp: int) -> tuple[Floats, Floats, Floats]:
    """Forward, backward and recompute seconds of a stage per micro-batch, by component, (components,)."""
    pieces = model.pieces(table)
    names = (*pieces.names, "embedding", "head")
    counts, again = piece_counts(names, model.blocks, table.splits[0], int(recompute_depths(table)[0]))
    held, redone = counts[:, stage::pp].sum(axis=1), again[:, stage::pp].sum(axis=1)
    zeros = np.zeros(len(COMPONENTS))
    forward, backward, recompute = zeros.copy(), zeros.copy(), zeros.copy()
    for name, count, repeated in zip(names, held, redone, strict=True):
        piece = pieces.pieces[name]
        forward += count * piece.forward_s[:, 0]
        backward += count * piece.backward_s[:, 0]
        recompute += repeated * piece.recompute_s[:, 0]
    return forward, backward, recompute


def _traffic(model: CostModel, rows: Rows, cuts: Cuts, weights: tuple[float, float]) -> dict[str, dict[str, float]]:
    """GiB that a used device sends one way per step (mean over devices), by level and dimension.

    `weights`: dense and expert parameters on one rank of every stage, summed.
    """
    levels = [level.name for level in model.network.levels]
    found: dict[str, dict[str, float]] = {level: {} for level in levels}
    dense, expert = (np.full(1, total) for total in weights)
    for dimension, sent in sent_bytes(model, rows, layers_redone(model, rows.table, cuts), dense, expert):
        for level, amount in zip(levels, sent[:, 0], strict=True):
            if amount > 0:
                found[level][dimension] = found[level].get(dimension, 0.0) + float(amount) / GIB
    return found

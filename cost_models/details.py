"""Everything that is said about a few layouts: where the time goes, what each stage holds, what crosses which level, MFU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..search_spaces.groups import Groups, groups
from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, SHARDINGS, Floats, Layout, LayoutTable
from .layers import COMPONENTS, COMPUTE, CP, DP, EP, HOST, TP, LayerModel, shard_group
from .loads import piece_counts, recompute_depths
from .memory import GIB
from .operators import BF16, Factors, Operator
from .step import CostModel

MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations", "transient", "communicators")
ZERO1, ZERO3, HSDP = SHARDINGS.index("zero1"), SHARDINGS.index("zero3"), SHARDINGS.index("hsdp")


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
    path_s: float
    model_flops: float
    model_flops_full_attention: float
    executed_flops: float


def detail(model: CostModel, layout: Layout) -> Detail:
    """Prices one layout whose stages are given, with every figure of design section 2."""
    table = LayoutTable.from_layouts([layout])
    split = table.splits[0]
    rows, cuts = model.rows(table), np.array([split.cuts])
    chunks = rows.prefix.chunks(cuts)
    times = model.stage_times(rows, cuts, chunks)
    stage = int(times.total_s[0].argmax())
    overhead = model.problem.stack.step_overhead_s.value
    m = float(layout.num_microbatches)
    busy = _stage_components(model, table, stage, split.pp)
    steady = m * sum(part.sum() for part in busy)
    path = times.path_s[0, stage]
    # Without p2p another stage of an interleaved schedule may set the pace, and this one's path be drawn up to it.
    still = min(path, model.stage_times(rows.without_p2p(), cuts, chunks).path_s[0, stage])
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
        "offload": times.offload_s[0, stage],
        "host": every[HOST] + overhead,
    }
    peaks = model.stage_peaks(rows, chunks)[:, 0, :]
    traffic = _traffic(model, table, (float(chunks.dense.sum()), float(chunks.expert.sum())))
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
        path_s=float(path),
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
    pieces = model.layers.pieces(table)
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


def _traffic(model: CostModel, table: LayoutTable, weights: tuple[float, float]) -> dict[str, dict[str, float]]:
    """GiB that a used device sends one way per step (mean over devices), by level and dimension.

    `weights`: dense and expert parameters on one rank of every stage, summed.
    """
    levels = [level.name for level in model.network.levels]
    found: dict[str, dict[str, float]] = {level: {} for level in levels}
    every = (*_layer_traffic(model, table), *_data_traffic(model, table, weights), _pipeline_traffic(model, table))
    for dimension, sent in every:
        for level, amount in zip(levels, sent, strict=True):
            if amount > 0:
                found[level][dimension] = found[level].get(dimension, 0.0) + float(amount) / GIB
    return found


def _layer_traffic(model: CostModel, table: LayoutTable) -> Iterator[tuple[str, Floats]]:
    names = (*dict.fromkeys(model.blocks), "embedding", "head")
    counts, again = piece_counts(names, model.blocks, table.splits[0], int(recompute_depths(table)[0]))
    mode, modules = int(table.recompute_mode[0]), int(table.recompute_modules[0])
    each = float(table.num_microbatches[0]) / float(table.pp[0])
    for name, held, redone in zip(names, counts.sum(axis=1), again.sum(axis=1), strict=True):
        for sent in model.layers.sent(name, table):
            repeats = mode in (FULL_BLOCK, FULL_UNIFORM) or (mode == SELECTIVE and sent.modules & modules)
            passes = held * (sent.forward[0] + sent.backward[0]) + (redone * sent.forward[0] if repeats else 0.0)
            yield sent.dimension, sent.level_bytes[:, 0] * passes * each


def _data_traffic(model: CostModel, table: LayoutTable, weights: tuple[float, float]) -> Iterator[tuple[str, Floats]]:
    """Gradients and weights of the mean stage; ZeRO-2 scatters and ZeRO-3 gathers per micro-batch, HSDP reduces between shards."""
    sharding, pp = int(table.sharding[0]), float(table.pp[0])
    gradient_bytes = float(model.problem.stack.gradient_bytes)
    times = float(table.num_microbatches[0]) if sharding > ZERO1 else 1.0
    for dimension, group, total in (("dp", shard_group(table), weights[0]), ("edp", groups(table, "edp"), weights[1])):
        mean = np.full(1, total / pp)
        at = model.network.crossing(group)
        reductions = (2.0 if sharding == 0 else 1.0) * times * gradient_bytes
        gathers = BF16 * (2.0 * times if sharding >= ZERO3 else float(sharding > 0))
        yield dimension, model.network.ring_bytes(at, mean)[:, 0] * (reductions + gathers)
        copies = table.cp * table.dp // group.size
        if sharding == HSDP and dimension == "dp" and copies[0] > 1:
            between = model.network.crossing(Groups(copies, group.stride * group.size))
            yield dimension, 2.0 * gradient_bytes * model.network.ring_bytes(between, mean / group.size)[:, 0]


def _pipeline_traffic(model: CostModel, table: LayoutTable) -> tuple[str, Floats]:
    """Activations forward and gradients back over every boundary between chunks, spread over the stages."""
    pp, vpp, m = int(table.pp[0]), int(table.vpp[0]), float(table.num_microbatches[0])
    at = model.network.crossing(groups(table, "pp"))
    units = pp / at.members[:, 0]
    below = np.concatenate([[float(pp)], units[:-1]])
    boundaries = (below - units) * vpp
    boundaries[int(at.outermost[0])] += vpp - 1 if pp > 1 else 0  # from the last stage back to the first
    message = model.layers.pieces(table).layer_input_bytes[0]
    return "pp", 2.0 * m * message * boundaries / pp

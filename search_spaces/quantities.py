"""What the rules read: the constants of a problem, the integer columns of its layouts, and how both are called in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from .cluster import ClusterSpec
from .expressions import Column, Expression, Quotient, Words, common_factor, evaluate, names_in, product
from .groups import Sizes, untiled
from .layout import (
    ALL_LAYERS,
    COLUMNS,
    CP_TYPES,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SHARDINGS,
    Floats,
    Ints,
    LayoutTable,
    Problem,
    Split,
)
from .model import Attention, CompressedAttention, DenseMlp, LatentAttention, LinearAttention, Mamba2, ModelSpec, MoeMlp
from .stack import ANY_CHUNKS, Stack

MIB, GIB = 1 << 20, 1 << 30
PER_MILLE = 1000
EVEN, FIRST_LAST, LAYER_LIST, FREE = range(4)
"""How free a split is, by the least free of the stacks' split forms that can express it."""

GEMM_MULTIPLE = {"bf16": 1, "fp16": 1, "fp8": 16, "fp4": 32}
"""Elements to which a quantised GEMM's dimensions must be aligned (Megatron-LM megatron/core/fp8_utils.py)."""

DERIVED: dict[str, Expression] = {
    "devices_used": product("tp", "cp", "pp", "dp"),
    "edp": Quotient(product("tp", "cp", "dp"), product("etp", "ep")),
}
"""Columns that follow from others."""


def usable_bytes(problem: Problem) -> float:
    """Device memory that a layout may fill, in whole MiB: capacity − context − margin − reserve."""
    kept = problem.workload.memory_margin.fraction * free_bytes(problem.cluster) + problem.workload.reserved_gib * GIB
    return math.floor((free_bytes(problem.cluster) - kept) / MIB) * float(MIB)


def free_bytes(cluster: ClusterSpec) -> float:
    """Device memory that the driver's and the framework's context leaves."""
    return cluster.accelerator.memory_bytes.value - cluster.context_bytes.value


def whole_mib(peak_bytes: Floats | float) -> Ints:
    """Bytes rounded up to whole MiB: the one rounding that every reading of the memory rule shares."""
    return np.asarray(np.ceil(np.asarray(peak_bytes, dtype=np.float64) / MIB) * MIB, dtype=np.int64)


def constants(problem: Problem) -> dict[str, int]:
    """The problem's figures that rules read, flags as 0 or 1. A count of 0 (no such part in the model) is divided by everything."""
    workload = problem.workload
    return {
        "devices": problem.devices,
        "global_batch": workload.global_batch,
        "seq_len": workload.seq_len,
        "gemm_multiple": GEMM_MULTIPLE[workload.precision],
        "usable_bytes": int(usable_bytes(problem)),
        **cluster_constants(problem.cluster, problem.allocated_sizes),
        **model_constants(problem.model),
        **stack_constants(problem.stack),
        **lending_constants(workload.offload_to),
        "most_chunks": most_chunks(problem.model, problem.stack),
    }


def cluster_constants(cluster: ClusterSpec, sizes: Sizes) -> dict[str, int]:
    """What rules read of a cluster with so many devices in use in one unit of each level (`Problem.allocated_sizes`).

    A unit counts as what groups that tile it must divide: of units that do not tile those outside, the common divisor.
    """
    whole = [math.gcd(size, *outer) for size, outer in zip(sizes[:-1], untiled(sizes), strict=True)]
    return {
        "supernode": sizes[cluster.supernode_place],
        "supernode_size": cluster.levels[cluster.supernode_place].size or sizes[-1],
        **{f"unit_{level.name}": unit for level, unit in zip(cluster.levels, (*whole, sizes[-1]), strict=True)},
    }


def columns(
    problem: Problem, table: LayoutTable | Mapping[str, Column], peak_bytes: Floats | float | None = None
) -> dict[str, Column]:
    """Every column that rules read, by name: (n,) arrays of the table, those that follow from them, and the constants as ints.

    `table` may hold some columns only; `peak_bytes` (n,) is the peak of each row's fullest stage, where it is known.
    """
    given: dict[str, Column] = _table_columns(problem, table) if isinstance(table, LayoutTable) else dict(table)
    known = {**constants(problem), **given}
    known |= {name: evaluate(e, known) for name, e in DERIVED.items() if name not in known and names_in(e) <= known.keys()}
    if peak_bytes is not None:
        known["peak_bytes"] = whole_mib(peak_bytes)
    return known


def most_chunks(model: ModelSpec, stack: Stack) -> int:
    """Chunks that can each hold a layer, or the embedding, or the loss or MTP layers alone where the stack can be told so.

    Layers that the first stage must hold besides its first are no other chunk's.
    MTP layers and a bare loss behind them are counted once: the two are not told apart on every pp and vpp (`Cutting`). Nor is
    the last chunk counted where two chunks a stage need a layer in it.
    """
    return fillable_chunks(len(model.layer_kinds), stack) - max(0, led_layers(model, stack) - 1)


def fillable_chunks(layers: int, stack: Stack) -> int:
    """Chunks that so many decoder layers, embedding and loss fill."""
    return layers + stack.bare_ends + stack.bare_last(2)


def led_layers(model: ModelSpec, stack: Stack) -> int:
    """Layers at the front that the first of several stages must hold, 0 where nothing is asked.

    MindSpeed-LLM refuses a first stage of dense layers alone (first_k_dense_replace against num_layers over pipeline stages).
    """
    moe = [isinstance(model.kinds[name].mlp, MoeMlp) for name in model.layer_kinds]
    return moe.index(True) + 1 if stack.framework == "mindspeed-llm" and any(moe) and not moe[0] else 0


def model_constants(model: ModelSpec) -> dict[str, int]:
    """What rules read of a model."""
    names = [*model.layer_kinds, *([model.mtp.kind] if model.mtp else [])]
    kinds = [model.kinds[name] for name in dict.fromkeys(names)]
    mixers = [kind.mixer for kind in kinds]
    moes = [kind.mlp for kind in kinds if isinstance(kind.mlp, MoeMlp)]
    linear = [mixer for mixer in mixers if isinstance(mixer, LinearAttention)]
    mamba = [mixer for mixer in mixers if isinstance(mixer, Mamba2)]
    kv_heads = [mixer.kv_heads for mixer in mixers if isinstance(mixer, Attention)]
    softmax = [mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention | CompressedAttention)]
    indexed = [mixer for mixer in mixers if isinstance(mixer, LatentAttention | CompressedAttention) and mixer.indexer_heads]
    layers, mtp = len(model.layer_kinds), model.mtp.layers if model.mtp else 0
    return {
        "layers": layers,
        "mtp_layers": mtp,
        "blocks": layers + mtp,
        "heads": common_factor(mixer.heads for mixer in softmax),
        "kv_heads": common_factor(kv_heads),
        "kv_heads_multiple": math.lcm(*kv_heads) if kv_heads else 0,
        "linear_heads": common_factor([m.heads for m in mamba] + [h for m in linear for h in (m.key_heads, m.value_heads)]),
        "state_groups": common_factor(mixer.groups for mixer in mamba),
        "mlp_width": common_factor(kind.mlp.width for kind in kinds if isinstance(kind.mlp, DenseMlp)),
        "experts": common_factor(mlp.experts for mlp in moes),
        "expert_width": common_factor(mlp.width for mlp in moes),
        "expert_bias": int(any(mlp.bias for mlp in moes)),
        "shared_width": common_factor(mlp.shared_width for mlp in moes),
        "indexer": int(bool(indexed)),
        "compressed": int(any(isinstance(mixer, CompressedAttention) for mixer in mixers)),
        "windows": int(any(isinstance(mixer, Attention) and mixer.window and not mixer.chunked for mixer in mixers)),
        "sinks": int(any(isinstance(mixer, Attention) and mixer.sinks for mixer in mixers)),
        "mla": int(any(isinstance(mixer, LatentAttention) for mixer in mixers)),
        "tied": int(model.tied_embeddings),
    }


def stack_constants(stack: Stack) -> dict[str, int]:
    """What rules read of a stack."""
    return {
        "kv_replication": int(stack.kv_replication),
        "expert_tensor_parallel": int(stack.expert_tensor_parallel),
        "experts_across_tp": int(stack.experts_across_tp),
        "microbatch_group": stack.microbatch_group,
        "sets_group": int(stack.sets_microbatch_group),
        "optimizer_can_offload": int(stack.optimizer_offload),
        "activations_can_offload": int(stack.activation_offload),
        "recompute_block": int(stack.recompute_block),
        "recompute_by_chunk": int(stack.recompute_by_chunk),
        "splits_first_last": int(stack.sets_ends_apart),
        "splits_list": int("layer_list" in stack.split_forms),
        "splits_free": int(not ANY_CHUNKS.isdisjoint(stack.split_forms)),
    }


def lending_constants(offload_to: str) -> dict[str, int]:
    """What rules read of where activations go; other stages' devices take them whatever the stack's own offload can do."""
    return {"lends": 1, "activations_can_offload": 1} if offload_to == "peers" else {"lends": 0}


def _table_columns(problem: Problem, table: LayoutTable) -> dict[str, Column]:
    model = problem.model
    layers, blocks = len(model.layer_kinds), len(model.layer_kinds) + (model.mtp.layers if model.mtp else 0)
    known: dict[str, Column] = {name: getattr(table, name) for name in COLUMNS if not name.endswith("_offload")}
    for name in ("optimizer_offload", "activation_offload"):
        known[f"{name}_per_mille"] = np.rint(getattr(table, name) * PER_MILLE).astype(np.int64)
    # A row without a split of its own is cut by the optimizer, which places every block and asks only what the stack can say.
    known["placed_blocks"] = _gathered(table.split, [split.cuts[-1] for split in table.splits], blocks)
    known["split_form"] = _gathered(table.split, [split_form(split, layers) for split in table.splits], EVEN)
    known["depths_apart"] = _gathered(table.split, [int(bool(split.redone)) for split in table.splits], 0)
    if "layout" in problem.stack.split_forms:  # a layout string may leave chunks of a given split empty
        filled = most_chunks(model, problem.stack)
        known["most_chunks"] = _gathered(table.split, [max(filled, split.pp * split.vpp) for split in table.splits], filled)
    return known


def _gathered(rows: Ints, values: Sequence[int], otherwise: int) -> Ints:
    return np.array([*values, otherwise], dtype=np.int64)[rows]  # row −1 takes the last


def split_form(split: Split, layers: int) -> int:
    """The least free form that expresses a split: EVEN, FIRST_LAST, LAYER_LIST or FREE. MTP layers belong to the last chunk."""
    cuts = [min(cut, layers) for cut in split.cuts]
    counts = [b - a for a, b in pairwise(cuts)]
    if split.cuts[-2] > layers:
        return FREE
    if len(set(counts)) == 1:
        return EVEN
    stages = [counts[stage :: split.pp] for stage in range(split.pp)]
    level = all(len(set(stage)) == 1 and stage[0] > 0 for stage in stages)
    if level and split.pp > 1 and len({stage[0] for stage in stages[1:-1]}) <= 1:
        return FIRST_LAST
    return LAYER_LIST if split.vpp == 1 and min(counts) > 0 else FREE


def _coded(*names: str) -> Callable[[int], str]:
    return lambda code: names[code]


def _modules(mask: int) -> str:
    return "+".join(name for bit, name in enumerate(RECOMPUTE_MODULES) if mask >> bit & 1) or "none"


def _share(per_mille: int) -> str:
    return f"{per_mille / PER_MILLE:g}"


WORDS = Words(
    phrases={
        "devices": "the {} devices",
        "global_batch": "the global batch {}",
        "seq_len": "the sequence length {}",
        "gemm_multiple": "{} elements",
        "supernode": "the {} devices in use per supernode",
        "supernode_size": "the {} devices of a supernode",
        "usable_bytes": "the usable {}",
        "layers": "the {} decoder layers",
        "mtp_layers": "the {} MTP layers",
        "blocks": "the {} layers (MTP included)",
        "most_chunks": "the {} chunks that its layers, embedding and loss can fill",
        "heads": "the {} attention heads",
        "kv_heads": "the {} KV heads",
        "kv_heads_multiple": "the {} KV heads",
        "linear_heads": "the {} linear-attention heads",
        "state_groups": "the {} state-space groups",
        "mlp_width": "the feed-forward width {}",
        "experts": "the {} experts",
        "expert_width": "the expert width {}",
        "shared_width": "the shared-expert width {}",
        "microbatch_group": "the group of {} micro-batches",
        **{
            name: name
            for name in (
                *("indexer", "compressed", "windows", "sinks", "mla", "tied"),
                *("kv_replication", "expert_tensor_parallel", "recompute_block", "recompute_by_chunk", "experts_across_tp"),
                *("sets_group", "optimizer_can_offload", "splits_first_last", "splits_list", "splits_free", "lends"),
            )
        },
    },
    codes={
        "cp_type": _coded(*CP_TYPES),
        "schedule": _coded(*SCHEDULES),
        "sharding": _coded(*SHARDINGS),
        "rank_order": _coded(*RANK_ORDERS),
        "recompute_mode": _coded("none", "selective", "full:block", "full:uniform"),
        "sequence_parallel": _coded("off", "on"),
        "depths_apart": _coded("one", "several"),
        "split_form": _coded("even", "first_last", "layer_list", "layout"),
        "recompute_modules": _modules,
        "recompute_layers": lambda depth: "all" if depth >= ALL_LAYERS else str(depth),
        "optimizer_offload_per_mille": _share,
        "activation_offload_per_mille": _share,
        "peak_bytes": lambda size: f"{size / 2**30:.1f} GiB",
        "usable_bytes": lambda size: f"{size / 2**30:.1f} GiB",
    },
    settings={
        ("experts", False): "in a dense model",
        ("experts", True): "in a mixture of experts",
        ("kv_replication", False): "where KV heads are not replicated",
        ("expert_tensor_parallel", False): "where experts have no tensor parallelism of their own",
        ("optimizer_can_offload", False): "in a stack without optimizer offload",
        ("lends", True): "where activations go to other stages' devices",
        ("recompute_block", False): "in a stack without block recompute",
        ("experts_across_tp", False): "where experts are spread over replicas alone",
        ("recompute_by_chunk", False): "in a stack that redoes as many layers in every chunk",
        ("splits_free", False): "in a stack that cannot cut stages freely",
        ("tied", True): "with tied embeddings",
        ("indexer", True): "with sparse attention",
        ("compressed", True): "with compressed attention",
        ("windows", True): "with sliding windows",
        ("sinks", True): "with attention sinks",
        ("mla", False): "without latent attention",
        ("mtp_layers", True): "with MTP layers",
        ("shared_width", False): "without shared experts",
    },
    columns={
        "sharding": "optimizer_sharding",
        "recompute_mode": "recompute",
        "recompute_modules": "recompute modules",
        "recompute_layers": "recompute layers",
        "depths_apart": "recompute depths",
        "optimizer_offload_per_mille": "optimizer offload",
        "activation_offload_per_mille": "activations offload",
        "peak_bytes": "peak memory",
        "placed_blocks": "layers placed",
        "microbatch_group": "the group",
        "split_form": "split form",
        "devices_used": "tp·cp·pp·dp",
    },
)
"""How columns and constants are called in sentences; `words_for` adds the levels of a cluster."""


def words_for(problem: Problem) -> Words:
    """The words with the network levels of a problem's cluster."""
    units = {f"unit_{level.name}": f"the {{}} devices of one {level.name}" for level in problem.cluster.levels}
    return Words({**WORDS.phrases, **units}, WORDS.codes, WORDS.settings, WORDS.columns)

"""Layout and recompute as the whole Megatron family reads them, and what all of it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from ...cost_models.schedules import group_size
from ...search_spaces.layout import FLAG_RANK_ORDERS, FULL_BLOCK, FULL_UNIFORM, NONE, SELECTIVE, Recompute
from ...search_spaces.model import LatentAttention
from .knobs import Settings
from .megatron_model import Architecture, MegatronRequest
from .splits import layer_count

# --- what cannot be exported -------------------------------------------------------------------------------------------------


def family_problems(asked: MegatronRequest) -> Iterator[str]:
    """What the Megatron family refuses, or would understand as something else, whatever the framework."""
    layout, model = asked.layout, asked.architecture
    if model.attention.heads % layout.tp:
        yield f"tp {layout.tp} does not divide {model.attention.heads} heads"
    if asked.speaks.core >= (0, 16):
        if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
            yield f"tp {layout.tp} is neither a multiple nor a divisor of {model.kv_heads} KV heads"
    elif model.kv_heads % layout.tp:
        tp = _divisor(model, layout.tp)
        yield f"tp {layout.tp} does not divide {model.kv_heads} KV heads, which {asked.speaks} asks for; tp {tp} would"
    if model.moe and layout.tp > 1 and not layout.sequence_parallel:
        yield f"tp {layout.tp} with experts needs sequence_parallel, which is off"
    if model.moe and model.moe.experts % layout.ep:
        yield f"ep {layout.ep} does not divide {model.moe.experts} experts"
    if model.moe and model.moe.bias and layout.etp > 1:
        yield f"experts with biases need etp 1; it is {layout.etp}"
    if layout.vpp > 1 and layout.schedule == "interleaved":
        yield from _ungrouped(layout.pp, layout.num_microbatches, _told_group(asked))
    if (layout.vpp > 1) != (layout.schedule == "interleaved") and layout.schedule in ("1f1b", "interleaved"):
        yield f"schedule {layout.schedule} with vpp {layout.vpp}: interleaved is the schedule of more than one chunk per stage"
    if layout.cp > 1 and layout.cp_type == "a2a+p2p" and cp_hierarchy(asked) is None:
        yield f"cp_type a2a+p2p: no part of cp {layout.cp} divides the {model.kv_heads} KV heads of {layout.tp} TP ranks"
    if asked.pipelines_inside_replicas and model.moe and layout.edp != layout.dp:
        yield f"rank order {layout.rank_order} needs edp = dp; edp is {layout.edp} and dp is {layout.dp}"
    if layout.rank_order not in FLAG_RANK_ORDERS:
        yield (
            f"rank order {layout.rank_order}: flags say {' or '.join(FLAG_RANK_ORDERS)} only; export to groups, or call "
            f"megatron.core's initialize_model_parallel(order={layout.rank_order!r})"
        )
    if uneven := _uneven_units(asked):
        yield f"recompute {asked.recompute}: units of {uneven[0]} layers do not divide a chunk of {uneven[1]}"
    if asked.offload[0] and layout.optimizer_sharding != "zero1":
        yield f"optimizer offload needs optimizer_sharding zero1; it is {layout.optimizer_sharding}"


def _uneven_units(asked: MegatronRequest) -> tuple[int, int] | None:
    """(layers of a checkpoint, layers of a chunk) where uniform recompute leaves some over."""
    if asked.recompute is None or asked.recompute.mode != FULL_UNIFORM:
        return None
    depth, chunks = asked.recompute.layers, [chunk for stage in asked.layout.stages for chunk in stage.chunks]
    return next(((depth, layer_count(chunk)) for chunk in chunks if layer_count(chunk) % depth), None)


def _told_group(asked: MegatronRequest) -> int:
    """Micro-batches in the groups that a job is told to run interleaved chunks in; 0 where it is not told."""
    layout, stack = asked.layout, asked.stack
    if layout.schedule != "interleaved" or not stack.sets_microbatch_group:
        return stack.microbatch_group if layout.schedule == "interleaved" else 0
    return group_size(layout.schedule, layout.pp, layout.num_microbatches, stack.microbatch_group) or stack.microbatch_group


def _ungrouped(pp: int, micro_batches: int, group: int) -> Iterator[str]:
    """What Megatron-Core refuses of micro-batches in groups, of pp where the stack asks for none."""
    if micro_batches < pp:
        yield f"interleaving needs as many micro-batches as pp {pp} or more; there are {micro_batches}"
    elif not group and micro_batches % pp:
        yield f"interleaving needs micro-batches in multiples of pp {pp}; there are {micro_batches}"
    elif group and not (pp <= group <= micro_batches and (micro_batches % group == 0 or micro_batches % group >= pp)):
        asks = f"from pp {pp} to the {micro_batches} that there are, with none or at least {pp} left over"
        yield f"groups of {group} micro-batches: interleaving needs {asks}"


def _divisor(model: Architecture, most: int) -> int:
    return max(tp for tp in range(1, most + 1) if model.kv_heads % tp == 0 and model.attention.heads % tp == 0)


# --- settings ----------------------------------------------------------------------------------------------------------------


def degree_settings(asked: MegatronRequest) -> Settings:
    """Degrees, batch and rank order. ETP is always written: left out, it becomes TP."""
    layout = asked.layout
    dense_inside = asked.pipelines_inside_replicas and asked.architecture.moe is None
    return [
        *(asked.speaks.set(name, getattr(layout, name)) for name in ("tp", "pp", "cp", "ep")),
        # without experts, what keeps both grids' pipelines equal in this order
        asked.speaks.set("etp", layout.tp * layout.cp if dense_inside else layout.etp),
        *asked.speaks.sets(
            sequence_parallel=layout.sequence_parallel and layout.tp > 1,
            rank_order_pp_inside_dp=asked.pipelines_inside_replicas,
            microbatch_group=_told_group(asked) or None,
        ),
        asked.speaks.set("micro_batch", layout.micro_batch),
        asked.speaks.set("global_batch", asked.problem.workload.global_batch),
    ]


def context_settings(asked: MegatronRequest) -> Settings:
    """How attention is cut over the ranks of CP."""
    layout, put = asked.layout, asked.speaks.set
    if layout.cp == 1:
        return []
    chosen = [put("cp_type", layout.cp_type)]
    degrees = cp_hierarchy(asked)
    if layout.cp_type == "a2a+p2p" and degrees:
        inner_only = asked.speaks.has("cp_all_to_all")
        chosen.append(put("cp_all_to_all", degrees[0]) if inner_only else put("cp_hierarchy", *degrees))
    if "p2p" in layout.cp_type and asked.overlaps("cp") and asked.speaks.has("overlap_cp"):
        chosen.append(put("overlap_cp"))
    return chosen


def tp_overlap_settings(asked: MegatronRequest) -> Settings:
    """TP collectives beside the GEMMs, which needs SP."""
    wanted = asked.overlaps("tp") and asked.layout.tp > 1 and asked.layout.sequence_parallel
    return asked.speaks.sets(overlap_tp=wanted)


def overlap_settings(asked: MegatronRequest, gradients: str = "dp_gradients", parameters: str = "dp_parameters") -> Settings:
    """Data-parallel traffic beside compute, in buckets of the stack's size: gradients, and with sharded states the parameters'
    gathering too.
    """
    if not asked.overlaps(gradients):
        return []
    gathered = asked.layout.optimizer_sharding != "none" and asked.overlaps(parameters)
    return asked.speaks.sets(overlap_gradients=True, overlap_parameters=gathered, gradient_bucket=asked.stack.gradient_bucket)


def optimizer_precision_settings(asked: MegatronRequest) -> Settings:
    """Type of the gradient buffer and of Adam's moments, as the stack was priced."""
    chosen = [asked.speaks.set("gradients_fp32" if asked.stack.gradient_bytes == 4 else "gradients_bf16")]
    halved = asked.stack.optimizer_bytes == 8.0
    if halved:
        chosen += [asked.speaks.set("first_moment", "bf16"), asked.speaks.set("second_moment", "bf16")]
    if halved or (asked.speaks.has("optimizer_offload_fraction") and asked.offload[0]):
        chosen.append(asked.speaks.set("precise_optimizer"))
    return chosen


def recompute_settings(asked: MegatronRequest) -> Settings:
    """Recompute as one setting for all chunks; the request has seen to it that there is one."""
    recompute = asked.recompute
    if recompute is None or recompute.mode == NONE:
        return []
    if recompute.mode == SELECTIVE:
        return [asked.speaks.set("recompute", "selective"), asked.speaks.set("recompute_modules", *recompute.module_names)]
    return full_recompute_settings(asked, recompute)


def full_recompute_settings(asked: MegatronRequest, recompute: Recompute, always_block: bool = False) -> Settings:
    """Whole layers: the first K of each chunk, or all of them with a checkpoint every K.

    All layers of a block are written as uniform 1, which Megatron also applies to MTP layers, unless `always_block`.
    """
    layout = asked.layout
    chunks = [layer_count(chunk) for stage in layout.stages for chunk in stage.chunks]
    fullest = max(chunks, default=-(-asked.spec.num_layers // (layout.pp * layout.vpp)))
    if recompute.mode == FULL_BLOCK and (always_block or recompute.layers < fullest):
        method, depth = "block", min(recompute.layers, fullest)
    else:
        method, depth = "uniform", 1 if recompute.mode == FULL_BLOCK else recompute.layers
    return asked.speaks.sets(recompute="full", recompute_method=method, recompute_layers=depth)


def cp_hierarchy(asked: MegatronRequest) -> tuple[int, int] | None:
    """(all-to-all degree, ring degree) of CP type a2a+p2p, or None.

    The all-to-all is the largest that the KV heads of a TP rank allow, inside a server if any fits there.
    """
    layout, model = asked.layout, asked.architecture
    latent = isinstance(model.attention, LatentAttention)
    heads = model.attention.heads // layout.tp if latent else max(1, model.kv_heads // layout.tp)
    inner = [a for a in range(2, layout.cp) if layout.cp % a == 0 and heads % a == 0]
    local = [a for a in inner if a * layout.tp <= asked.per_server]
    return (max(local or inner), layout.cp // max(local or inner)) if inner else None

"""What Megatron-LM and Megatron-Bridge share beyond the family: GPUs, Transformer Engine, and Megatron's own FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import SELECTIVE
from ...search_spaces.stack import Footprint
from .knobs import Settings
from .megatron_family import Family, Groups
from .megatron_model import MegatronRequest, attention_settings, router_settings, size_settings
from .megatron_parallel import (
    context_settings,
    degree_settings,
    overlap_settings,
    recompute_settings,
    tp_overlap_settings,
)
from .megatron_rotary import scaled_positions, scaling_settings
from .splits import first_last, megatron_layout


def problems(asked: MegatronRequest) -> Iterator[str]:
    """What neither can run."""
    layout, model, stack = asked.layout, asked.architecture, asked.stack
    accelerator = asked.problem.cluster.accelerator
    if accelerator.vendor not in ("nvidia", "amd"):
        yield f"{asked.speaks.title} runs on GPUs, not on {accelerator.name}"
    if layout.schedule not in ("1f1b", "interleaved"):
        yield f"schedule {layout.schedule}: it has 1f1b and interleaved"
    if asked.pipelines_inside_replicas and fsdp(asked):
        yield f"rank order {layout.rank_order} does not go with optimizer_sharding {layout.optimizer_sharding}"
    if model.moe and model.all_biases != model.moe.router_linear_bias:
        yield "the router has a bias exactly if all linear layers have one"
    share = asked.offload[1]
    layers = share * asked.spec.num_layers
    if share and (layout.pp > 1 or layout.recompute != "none" or layers != int(layers) or share == 1):
        yield f"offload {layout.offload}: activations of whole layers go to the host, not of all, with pp 1 and no recompute"
    if model.sparse and layout.cp > 1 and (layout.cp_type != "allgather" or asked.speaks.core < (0, 19)):
        yield f"sparse attention with cp {layout.cp} and cp_type {layout.cp_type}: it has cp 1, and allgather from 0.19 on"
    if asked.spec.mtp and layout.cp > 1 and asked.speaks.core < (0, 14):
        yield f"MTP layers with cp {layout.cp}: it trains them so from 0.14 on; plan with cp=1"
    if asked.shard and (layout.dp * layout.cp) % asked.shard:
        yield f"optimizer_sharding {layout.optimizer_sharding}: {asked.shard} does not divide dp·cp = {layout.dp * layout.cp}"
    if stack.optimizer_bytes not in (8.0, 12.0):
        yield (
            f"the stack keeps {stack.optimizer_bytes:g} bytes of optimizer state per weight; it has 12 (fp32) and 8 (bf16 moments)"
        )


def environment(asked: MegatronRequest) -> dict[str, str | None]:
    """Environment variables that the layout needs; None stands for one that must not be set.

    CUDA_DEVICE_MAX_CONNECTIONS: TP and CP want 1 before Blackwell, FSDP refuses 1, EP overlap wants many queues.
    """
    split = asked.layout.tp * asked.layout.cp > 1
    if fsdp(asked):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    if asked.overlaps("ep") and ep_overlap_obstacle(asked) is None:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32" if asked.blackwell or not split else "1"}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if split and not asked.blackwell else {}


def notes(asked: MegatronRequest) -> Iterator[str]:
    """What a reader should know of what was and was not set."""
    if asked.overlaps("ep") and asked.layout.ep > 1 and (obstacle := ep_overlap_obstacle(asked)):
        name = asked.speaks.set("overlap_ep").name if asked.speaks.has("overlap_ep") else "the overlap of EP traffic"
        yield f"the prediction hides part of the EP traffic, but {name} is left off: {obstacle}"
    for setting in context_settings(asked):
        if len(setting.values) == 2:
            yield f"CP {asked.layout.cp} runs as all-to-all over {setting.values[0]} and ring over {setting.values[1]}"


def family(framework: str, groups: Callable[[MegatronRequest], Groups]) -> Family:
    """A member that runs on GPUs."""
    fixed = {"tokenizer_type": "HuggingFaceTokenizer", "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return Family(framework, problems, groups, notes, environment, fixed)


def fsdp(asked: MegatronRequest) -> bool:
    """Whether gradients or weights are sharded too, which Megatron-FSDP does."""
    return asked.layout.optimizer_sharding not in ("none", "zero1")


# --- settings ----------------------------------------------------------------------------------------------------------------


def model_settings(asked: MegatronRequest) -> Settings:
    """The architecture."""
    return [
        *size_settings(asked, asked.spec.num_layers, scaled_positions(asked)),
        *attention_settings(asked),
        *scaling_settings(asked),
        *_mixed_attention(asked),
        *_moe(asked),
    ]


def parallel_settings(asked: MegatronRequest) -> Settings:
    """Grid, stages, CP and the dispatch of tokens."""
    return [
        *degree_settings(asked),
        *_stages(asked),
        *context_settings(asked),
        *_dispatch(asked),
        *tp_overlap_settings(asked),
    ]


def sharding_settings(asked: MegatronRequest) -> Settings:
    """The distributed optimizer or Megatron-FSDP, and what overlaps with it."""
    layout, put = asked.layout, asked.speaks.set
    if layout.optimizer_sharding == "none":
        return overlap_settings(asked)
    chosen = [put("zero1")]
    if not fsdp(asked):
        return [*chosen, *overlap_settings(asked)]
    chosen += [
        put("fsdp"),
        put("fsdp_strategy", "zero3" if asked.shard else layout.optimizer_sharding),
        put("checkpoint_format", "fsdp_dtensor"),
        put("unfused_accumulation"),
    ]
    if asked.shard and asked.shard < layout.dp * layout.cp:
        chosen += [put("fsdp_copies", layout.dp * layout.cp // asked.shard), put("fsdp_outer", "no_shard")]
    return [*chosen, *overlap_settings(asked, "fsdp", "fsdp")]


def memory_settings(asked: MegatronRequest) -> Settings:
    """Recompute and offload."""
    optimizer, activations = asked.offload
    chosen = recompute_settings(asked)
    if optimizer:
        chosen += [asked.speaks.set("optimizer_offload"), asked.speaks.set("optimizer_offload_fraction", optimizer)]
        chosen += asked.speaks.sets(overlap_optimizer_offload=asked.overlaps("offload"))
    if activations:
        chosen += asked.speaks.sets(activation_offload=asked.speaks.has("activation_offload"))
        chosen.append(asked.speaks.set("activation_offload_layers", int(activations * asked.spec.num_layers)))
    return chosen


def precision_settings(asked: MegatronRequest) -> Settings:
    """Types of the GEMMs. FP8 takes the recipe that is usual on the accelerator and at the version."""
    put, precision = asked.speaks.set, asked.precision
    if precision == "fp16":
        return [put("fp16")]
    chosen = [put("bf16")]
    if precision == "fp4":
        chosen.append(put("fp4", "e2m1"))
    if precision == "fp8":
        recipe = "mxfp8" if asked.blackwell else "blockwise" if asked.speaks.core >= (0, 13) else "tensorwise"
        form = "hybrid" if recipe == "tensorwise" else "e4m3"
        chosen += [put("fp8", form)] if asked.speaks.has("fp8") else []
        chosen.append(put("fp8_recipe", recipe))
    return chosen


def kernel_settings(asked: MegatronRequest) -> Settings:
    """Fused kernels as the stack was priced; what a framework fuses by itself needs no word."""
    speaks = asked.speaks
    rotary = not asked.spec.learned_positions
    chosen = [speaks.set("attention_kernel", "unfused")] if asked.stack.attention_kernel == "unfused" else []
    if asked.stack.fused_kernels:
        own = ["fused_activation", "fused_dropout", *(["fused_rope"] if rotary and not asked.architecture.sparse else [])]
        chosen += [speaks.set(name) for name in own if speaks.has(name)]
        unfused = [speaks.set("unfused_rope")] if asked.architecture.sparse else []  # DSA refuses the fused kernel
        over_logits = asked.stack.footprint.logit_bytes < Footprint().logit_bytes  # by Transformer Engine, not Megatron-Core
        kernel = speaks.sets(loss_kernel="te") if over_logits and speaks.has("loss_kernel") else []
        return [*chosen, *unfused, speaks.set("fused_cross_entropy"), *kernel]
    names = ["unfused_dropout", "unfused_softmax", "unfused_swiglu", "unfused_gelu", *(["unfused_rope"] if rotary else [])]
    return [*chosen, *(speaks.set(name) for name in names if speaks.has(name))]


def ep_overlap_obstacle(asked: MegatronRequest) -> str | None:
    """Why overlap_moe_expert_parallel_comm cannot be on, or None (Megatron-Core's own conditions)."""
    layout, mtp = asked.layout, asked.spec.mtp
    if layout.ep == 1:
        return "ep is 1"
    if layout.pp > 1 and layout.vpp == 1:
        return "it needs interleaved stages when pp is more than 1"
    if asked.stack.moe_dispatcher == "allgather":
        return "it needs the alltoall or flex dispatcher"
    recompute = asked.recompute
    if recompute and (recompute.mode > SELECTIVE or "moe" in recompute.module_names):
        return "it does not go with recompute of whole layers or of the experts"
    if mtp and (mtp.layers > 1 or layout.pp == 1):
        return "it takes one MTP layer at most, and that with pp more than 1"
    return None


def _mixed_attention(asked: MegatronRequest) -> Settings:
    """Sliding windows, linear attention on some layers, and DeepSeek's sparse indexer."""
    model, put = asked.architecture, asked.speaks.set
    mixed: Settings = []
    if window := getattr(model.attention, "window", None):
        mixed.append(put("window", window - 1))  # keys behind a query, beside its own
        mixed += [] if all(model.windowed) else [put("window_pattern", model.windowed)]
    if model.linear:
        mixed += asked.speaks.sets(
            attention_variant="gated_delta_net",
            linear_pattern=model.is_linear,
            linear_conv=model.linear.conv_kernel,
            linear_key_head_dim=model.linear.key_head_dim,
            linear_value_head_dim=model.linear.value_head_dim,
            linear_key_heads=model.linear.key_heads,
            linear_value_heads=model.linear.value_heads,
        )
    if model.sparse:
        sizes = ("indexer_heads", "indexer_head_dim", "indexer_topk")
        mixed += [put("attention_variant", "dsa"), *(put(name, getattr(model.attention, name)) for name in sizes)]
    return mixed


def _moe(asked: MegatronRequest) -> Settings:
    model = asked.architecture
    mtp = asked.speaks.sets(mtp=asked.spec.mtp.layers if asked.spec.mtp else None)
    if model.moe is None:
        return mtp
    return [*router_settings(model.moe, asked.speaks), asked.speaks.set("moe_pattern", model.is_moe), *mtp]


def _stages(asked: MegatronRequest) -> Settings:
    """The even split needs no words; then first and last stage, as every version has them; the layout string says the rest."""
    layout, speaks = asked.layout, asked.speaks
    overlap: Settings = []
    if layout.vpp > 1 and not asked.overlaps("pp_interleaved"):
        overlap = [speaks.set("no_pp_overlap")]
    elif layout.vpp > 1 and speaks.has("pp_overlap"):
        overlap = [speaks.set("pp_overlap"), speaks.set("pp_unbatched")]  # Megatron-Core takes one of the two
    chunks: Settings = [speaks.set("vpp", layout.vpp)] if layout.vpp > 1 else []
    if layout.pp == 1 or asked.is_even:
        return [*chunks, *overlap]
    if speaks.has("layout"):
        return [speaks.set("layout", megatron_layout(layout.stages)), *overlap]
    ends = first_last(asked.counts, layout.pp)
    if ends is None or not asked.mtp_with_loss:
        raise Infeasible(
            f"{speaks} can only set the first and the last of {layout.pp} stages apart, and stages of "
            f"{', '.join(map(str, asked.counts))} layers are not so; {speaks.framework} 0.13 has layout strings"
        )
    last = [speaks.set("last_stage_layers", ends[1])] if layout.pp > 2 else []  # 0.12 divides what both leave by pp − 2
    return [speaks.set("first_stage_layers", ends[0]), *last, *chunks, *overlap]


def _dispatch(asked: MegatronRequest) -> Settings:
    speaks, kind = asked.speaks, asked.stack.moe_dispatcher
    if asked.architecture.moe is None:
        return []
    chosen = [speaks.set("dispatcher", kind)]
    if kind == "flex":
        backend = asked.stack.flex_backend or "deepep"
        chosen.append(speaks.set("deepep_alone") if speaks.has("deepep_alone") else speaks.set("flex_backend", backend))
    overlapped = asked.overlaps("ep") and asked.layout.ep > 1 and ep_overlap_obstacle(asked) is None
    return [*chosen, *speaks.sets(permute_fusion=asked.stack.fused_kernels, overlap_ep=overlapped)]

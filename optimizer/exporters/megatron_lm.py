"""A plan as a launch script of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator

from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import SELECTIVE, Layout, Problem, parse_offload, parse_sharding
from ..result import Plan
from .knobs import Dialect, dialect
from .launch import Script, launch_script
from .megatron_model import Architecture, Flags, architecture, attention_flags, pattern, router_flags, size_flags
from .megatron_parallel import (
    NO_DROPOUT,
    cp_hierarchy,
    degree_flags,
    is_even,
    model_notes,
    mtp_with_loss,
    one_recompute,
    optimizer_precision_flags,
    overlaps,
    pipelines_inside_replicas,
    recompute_flags,
    refuse,
    shared_problems,
    tp_overlap_flags,
    training_variables,
)
from .splits import first_last, layer_counts, megatron_layout

FRAMEWORK = "megatron-lm"
FILE = "megatron-lm.sh"


def flags(plan: Plan, version: str | None = None) -> list[tuple[str, ...]]:
    """Every option that the plan decides, with its values, as one list; Infeasible says what Megatron-LM cannot express."""
    return [flag for group in flag_groups(plan, version).values() for flag in group]


def flag_groups(plan: Plan, version: str | None = None) -> dict[str, Flags]:
    """The options of `flags` by what they set: the model, the parallel layout, memory, precision."""
    speaks = dialect(FRAMEWORK, version)
    problem, layout = plan.problem, plan.plan.layout
    model = architecture(problem.model)
    refuse(plan, speaks, [*shared_problems(problem, layout, model, speaks), *_problems(problem, layout, model, speaks)])
    fused = problem.stack.fused_kernels
    return {
        "MODEL_ARGS": [
            ("--use-mcore-models",),
            *size_flags(model, problem, layout, speaks, problem.model.num_layers),
            *attention_flags(model, speaks),
            *_mixed_attention_flags(model, speaks),
            *_moe_flags(model, speaks),
        ],
        "PARALLEL_ARGS": [
            *degree_flags(problem, layout, model, speaks),
            *_stage_flags(problem, layout, speaks),
            *_context_flags(problem, layout, model, speaks),
            *_dispatch_flags(problem, layout, model, speaks),
            *(tp_overlap_flags(problem, layout, speaks)),
        ],
        "MEMORY_ARGS": [
            *_sharding_flags(problem, layout, speaks),
            *optimizer_precision_flags(problem, layout, speaks),
            *recompute_flags(problem, layout, speaks),
            *_offload_flags(problem, layout, speaks),
        ],
        "PRECISION_ARGS": [
            *_precision_flags(problem, speaks),
            *_kernel_flags(model, fused, problem.stack.attention_kernel, speaks),
        ],
    }


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """megatron-lm.sh, a complete launch script; Infeasible as for `flags`."""
    speaks = dialect(FRAMEWORK, version)
    groups = flag_groups(plan, version)
    variables, open_flags = training_variables(plan)
    script = Script(
        framework=f"Megatron-LM {speaks}".replace(f"{FRAMEWORK} ", ""),
        home="MEGATRON_PATH",
        environment=environment(plan),
        variables=variables,
        flags={**groups, "FRAMEWORK_ARGS": [("--tokenizer-type", "HuggingFaceTokenizer"), *NO_DROPOUT]},
        open_flags=[*open_flags, ("--tokenizer-model", "TOKENIZER_PATH")],
        notes=[*model_notes(plan), *_notes(plan, groups)],
    )
    return {FILE: launch_script(plan, script)}


def environment(plan: Plan) -> dict[str, str | None]:
    """Environment variables that the layout needs; None stands for one that must not be set.

    CUDA_DEVICE_MAX_CONNECTIONS: TP and CP want 1 before Blackwell, FSDP refuses 1, EP overlap wants many queues.
    """
    problem, layout = plan.problem, plan.plan.layout
    if _fsdp(layout):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    if overlaps(problem, layout, "ep") and ep_overlap_obstacle(problem, layout) is None:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32" if blackwell(problem) or layout.tp * layout.cp == 1 else "1"}
    if layout.tp * layout.cp > 1 and not blackwell(problem):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}


def blackwell(problem: Problem) -> bool:
    """Whether the accelerator is an NVIDIA one with FP4, that is Blackwell or later."""
    return problem.cluster.accelerator.vendor == "nvidia" and "fp4" in problem.cluster.accelerator.peak_flops


def _problems(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Iterator[str]:
    if problem.cluster.accelerator.vendor not in ("nvidia", "amd"):
        yield f"Megatron-LM runs on GPUs, not on {problem.cluster.accelerator.name}"
    if layout.schedule not in ("1f1b", "interleaved"):
        yield f"schedule {layout.schedule}: it has 1f1b and interleaved"
    if pipelines_inside_replicas(layout) and model.moe and layout.edp != layout.dp:
        yield f"rank order {layout.rank_order} needs edp = dp; edp is {layout.edp} and dp is {layout.dp}"
    if pipelines_inside_replicas(layout) and _fsdp(layout):
        yield f"rank order {layout.rank_order} does not go with optimizer_sharding {layout.optimizer_sharding}"
    if model.moe and model.all_biases != model.moe.router_linear_bias:
        yield "the router has a bias exactly if all linear layers have one"
    optimizer, activations = parse_offload(layout.offload)
    layers = activations * problem.model.num_layers
    if activations and (layout.pp > 1 or layout.recompute != "none" or layers != int(layers) or activations == 1):
        yield f"offload {layout.offload}: activations of whole layers go to the host, not of all, with pp 1 and no recompute"
    if optimizer and layout.optimizer_sharding != "zero1":
        yield f"optimizer offload needs optimizer_sharding zero1; it is {layout.optimizer_sharding}"
    if layout.cp > 1 and layout.cp_type == "a2a+p2p" and cp_hierarchy(problem, layout, model) is None:
        yield f"cp_type a2a+p2p: no part of cp {layout.cp} divides the {model.kv_heads} KV heads of {layout.tp} TP ranks"
    if model.sparse and layout.cp > 1 and (layout.cp_type != "allgather" or speaks.version < (0, 19)):
        yield f"sparse attention with cp {layout.cp} and cp_type {layout.cp_type}: it has cp 1, and allgather from 0.19 on"
    shard = parse_sharding(layout.optimizer_sharding)[1]
    if shard and (layout.dp * layout.cp) % shard:
        yield f"optimizer_sharding {layout.optimizer_sharding}: {shard} does not divide dp·cp = {layout.dp * layout.cp}"
    if problem.stack.optimizer_bytes not in (8.0, 12.0):
        yield (
            f"the stack keeps {problem.stack.optimizer_bytes:g} bytes of optimizer state per weight; it has 12 (fp32) and "
            "8 (bf16 moments)"
        )


# --- flags of Megatron-LM alone ----------------------------------------------------------------------------------------------


def _mixed_attention_flags(model: Architecture, speaks: Dialect) -> Flags:
    """Sliding windows, linear attention on some layers, and DeepSeek's sparse indexer."""
    mixed: Flags = []
    window = getattr(model.attention, "window", None)
    if window:
        mixed.append(speaks.flag("window", f"({window - 1},0)"))  # keys behind a query, beside its own
        if not all(model.windowed):
            mixed.append(speaks.flag("window_pattern", pattern(model.windowed)))
    if model.linear:
        mixed += [
            speaks.flag("attention_variant", "gated_delta_net"),
            speaks.flag("linear_pattern", pattern(model.is_linear)),
            speaks.flag("linear_conv", model.linear.conv_kernel),
            speaks.flag("linear_key_head_dim", model.linear.key_head_dim),
            speaks.flag("linear_value_head_dim", model.linear.value_head_dim),
            speaks.flag("linear_key_heads", model.linear.key_heads),
            speaks.flag("linear_value_heads", model.linear.value_heads),
        ]
    if model.sparse:
        mixed.append(speaks.flag("attention_variant", "dsa"))
        mixed += [
            speaks.flag(name, getattr(model.attention, name)) for name in ("indexer_heads", "indexer_head_dim", "indexer_topk")
        ]
    return mixed


def _moe_flags(model: Architecture, speaks: Dialect) -> Flags:
    mtp = [speaks.flag("mtp", model.spec.mtp.layers)] if model.spec.mtp else []
    if model.moe is None:
        return mtp
    return [*router_flags(model.moe, speaks), speaks.flag("moe_pattern", pattern(model.is_moe)), *mtp]


def _stage_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    """The even split needs no words; then first and last stage, as every version has them; the layout string says the rest."""
    overlap: Flags = []
    if layout.vpp > 1 and not overlaps(problem, layout, "pp_interleaved"):
        overlap = [speaks.flag("no_pp_overlap")]
    chunks: Flags = [speaks.flag("vpp", layout.vpp)] if layout.vpp > 1 else []
    if layout.pp == 1 or is_even(problem, layout):
        return [*chunks, *overlap]
    if speaks.has("layout"):
        return [speaks.flag("layout", megatron_layout(layout.stages)), *overlap]
    ends = first_last(layer_counts(layout.stages), layout.pp)
    if ends is None or not mtp_with_loss(problem, layout.stages, layout.schedule):
        raise Infeasible(
            f"{speaks} can only set the first and the last of {layout.pp} stages apart, and stages of "
            f"{', '.join(map(str, layer_counts(layout.stages)))} layers are not so; {speaks.framework} 0.13 has layout strings"
        )
    return [speaks.flag("first_stage_layers", ends[0]), speaks.flag("last_stage_layers", ends[1]), *chunks, *overlap]


def _context_flags(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Flags:
    if layout.cp == 1:
        return []
    chosen = [speaks.flag("cp_type", layout.cp_type)]
    degrees = cp_hierarchy(problem, layout, model)
    if layout.cp_type == "a2a+p2p" and degrees:
        chosen.append(speaks.flag("cp_hierarchy", *degrees))
    return chosen


def _dispatch_flags(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Flags:
    if model.moe is None:
        return []
    kind = problem.stack.moe_dispatcher
    chosen = [speaks.flag("dispatcher", kind)]
    if kind == "flex":
        name = speaks.flag("deepep")[0]
        chosen.append((name,) if name == "--moe-enable-deepep" else (name, "deepep"))
    if problem.stack.fused_kernels:
        chosen.append(speaks.flag("permute_fusion"))
    if overlaps(problem, layout, "ep") and layout.ep > 1 and ep_overlap_obstacle(problem, layout) is None:
        chosen.append(speaks.flag("overlap_ep"))
    return chosen


def ep_overlap_obstacle(problem: Problem, layout: Layout) -> str | None:
    """Why --overlap-moe-expert-parallel-comm cannot be on, or None (Megatron-Core's own conditions)."""
    if layout.ep == 1:
        return "ep is 1"
    if layout.pp > 1 and layout.vpp == 1:
        return "it needs interleaved stages when pp is more than 1"
    if problem.stack.moe_dispatcher == "allgather":
        return "it needs the alltoall or flex dispatcher"
    recompute = one_recompute(layout)
    if recompute and (recompute.mode > SELECTIVE or "moe" in recompute.module_names):
        return "it does not go with recompute of whole layers or of the experts"
    if problem.model.mtp and (problem.model.mtp.layers > 1 or layout.pp == 1):
        return "it takes one MTP layer at most, and that with pp more than 1"
    return None


def _sharding_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    shard = parse_sharding(layout.optimizer_sharding)[1]
    if layout.optimizer_sharding == "none":
        return [speaks.flag("overlap_gradients")] if overlaps(problem, layout, "dp_gradients") else []
    chosen: Flags = [speaks.flag("zero1")]
    if _fsdp(layout):
        strategy = "zero3" if shard else layout.optimizer_sharding
        chosen += [
            speaks.flag("fsdp"),
            speaks.flag("fsdp_strategy", strategy),
            speaks.flag("checkpoint_format", "fsdp_dtensor"),
            ("--no-gradient-accumulation-fusion",),
        ]
        if shard and shard < layout.dp * layout.cp:
            chosen += [
                speaks.flag("fsdp_copies", layout.dp * layout.cp // shard),
                speaks.flag("fsdp_outer", "no_shard"),
            ]
    gradients, parameters = ("fsdp", "fsdp") if _fsdp(layout) else ("dp_gradients", "dp_parameters")
    if overlaps(problem, layout, gradients):
        chosen.append(speaks.flag("overlap_gradients"))
        if overlaps(problem, layout, parameters):
            chosen.append(speaks.flag("overlap_parameters"))
    return chosen


def _offload_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    optimizer, activations = parse_offload(layout.offload)
    chosen: Flags = []
    if optimizer:
        chosen += [speaks.flag("optimizer_offload"), speaks.flag("optimizer_offload_fraction", f"{optimizer:g}")]
        if overlaps(problem, layout, "offload"):
            chosen.append(speaks.flag("overlap_optimizer_offload"))
    if activations:
        chosen.append(speaks.flag("activation_offload_layers", int(activations * problem.model.num_layers)))
    return chosen


def _precision_flags(problem: Problem, speaks: Dialect) -> Flags:
    precision = problem.workload.precision
    if precision == "fp16":
        return [speaks.flag("fp16")]
    chosen = [speaks.flag("bf16")]
    if precision == "fp4":
        chosen.append(speaks.flag("fp4", "e2m1"))
    if precision == "fp8" and blackwell(problem):
        chosen += [speaks.flag("fp8", "e4m3"), speaks.flag("fp8_recipe", "mxfp8")]
    elif precision == "fp8" and speaks.version >= (0, 13):
        chosen += [speaks.flag("fp8", "e4m3"), speaks.flag("fp8_recipe", "blockwise")]
    elif precision == "fp8":
        chosen += [speaks.flag("fp8", "hybrid"), speaks.flag("fp8_recipe", "tensorwise")]
    return chosen


def _kernel_flags(model: Architecture, fused: bool, attention: str, speaks: Dialect) -> Flags:
    chosen: Flags = [speaks.flag("attention_kernel", "unfused")] if attention == "unfused" else []
    if fused:
        unfused = [speaks.flag("unfused_rope")] if model.sparse else []  # DSA refuses the fused kernel
        return [*chosen, *unfused, speaks.flag("fused_cross_entropy")]
    names = ["unfused_dropout", "unfused_softmax", "unfused_swiglu", "unfused_gelu"]
    if not model.spec.learned_positions:
        names.append("unfused_rope")
    return [*chosen, *(speaks.flag(name) for name in names)]


def _notes(plan: Plan, groups: dict[str, Flags]) -> Iterator[str]:
    problem, layout = plan.problem, plan.plan.layout
    if ("--multi-latent-attention",) in groups["MODEL_ARGS"]:
        yield "latent attention turns positions by YaRN unless --rope-type says otherwise; give the model's scaling factors"
    if overlaps(problem, layout, "ep") and layout.ep > 1:
        obstacle = ep_overlap_obstacle(problem, layout)
        if obstacle:
            yield f"the prediction hides part of the EP traffic, but --overlap-moe-expert-parallel-comm is left off: {obstacle}"
    for flag in groups["PARALLEL_ARGS"]:
        if flag[0] == "--hierarchical-context-parallel-sizes":
            yield f"CP {layout.cp} runs as all-to-all over {flag[1]} and ring over {flag[2]}"


def _fsdp(layout: Layout) -> bool:
    return layout.optimizer_sharding not in ("none", "zero1")

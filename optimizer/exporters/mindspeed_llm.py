"""A plan as a launch script of MindSpeed-LLM on Ascend (its Megatron backend, on core_v0.12.1)."""

from __future__ import annotations

from collections.abc import Iterator

from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import (
    FULL_BLOCK,
    FULL_UNIFORM,
    SELECTIVE,
    Layout,
    Problem,
    parse_offload,
)
from ...search_spaces.model import Attention, LatentAttention
from ..result import Plan
from .knobs import Dialect, dialect
from .launch import Script, launch_script
from .megatron_model import Architecture, Flags, architecture, attention_flags, router_flags, size_flags
from .megatron_parallel import (
    NO_DROPOUT,
    cp_hierarchy,
    degree_flags,
    full_recompute_flags,
    is_even,
    model_notes,
    mtp_with_loss,
    one_recompute,
    optimizer_precision_flags,
    overlaps,
    pipelines_inside_replicas,
    refuse,
    shared_problems,
    tp_overlap_flags,
    training_variables,
)
from .splits import layer_counts, layer_list, megatron_layout, noop_layers, padded_ids

FRAMEWORK = "mindspeed-llm"
FILE = "mindspeed-llm.sh"
SPECS = "mindspeed_llm.tasks.models.spec"

ENVIRONMENT: dict[str, str | None] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CPU_AFFINITY_CONF": "1",
    "TASK_QUEUE_ENABLE": "2",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "3600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "STREAMS_PER_DEVICE": "32",
}
"""As in the project's own scripts for the Atlas A3."""

SELECTIVE_FLAGS = {"layernorm": "recompute_norm", "moe_act": "recompute_activation", "mla_up_proj": "recompute_mla"}


def flags(plan: Plan, version: str | None = None) -> list[tuple[str, ...]]:
    """Every option that the plan decides, with its values, as one list; Infeasible says what MindSpeed-LLM cannot express."""
    return [flag for group in flag_groups(plan, version).values() for flag in group]


def flag_groups(plan: Plan, version: str | None = None) -> dict[str, Flags]:
    """The options of `flags` by what they set: the model, the parallel layout, memory, precision."""
    speaks = dialect(FRAMEWORK, version)
    problem, layout = plan.problem, plan.plan.layout
    model = architecture(problem.model)
    refuse(plan, speaks, [*shared_problems(problem, layout, model, speaks), *_problems(problem, layout, model)])
    layers, ids, stages = _stage_flags(problem, layout, model, speaks)
    return {
        "MODEL_ARGS": [
            ("--use-mcore-models",),
            *_implementation_flags(problem, model, speaks),
            *size_flags(model, problem, layout, speaks, layers),
            *attention_flags(model, speaks),
            *_mixed_attention_flags(model, speaks),
            *_moe_flags(model, layout, ids, layers, speaks),
        ],
        "PARALLEL_ARGS": [
            *degree_flags(problem, layout, model, speaks),
            *stages,
            *_context_flags(problem, layout, model, speaks),
            *_dispatch_flags(problem, layout, model, speaks),
            *([] if model.moe else tp_overlap_flags(problem, layout, speaks)),
        ],
        "MEMORY_ARGS": [
            *_sharding_flags(problem, layout, speaks),
            *optimizer_precision_flags(problem, layout, speaks),
            *_recompute_flags(problem, layout, speaks),
            *([speaks.flag("optimizer_offload")] if parse_offload(layout.offload)[0] else []),
        ],
        "PRECISION_ARGS": [*_precision_flags(problem, speaks), *_kernel_flags(problem, model, speaks)],
    }


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """mindspeed-llm.sh, a complete launch script; Infeasible as for `flags`."""
    speaks = dialect(FRAMEWORK, version)
    groups = flag_groups(plan, version)
    variables, open_flags = training_variables(plan)
    script = Script(
        framework=f"MindSpeed-LLM {speaks}".replace(f"{FRAMEWORK} ", ""),
        home="MINDSPEED_LLM_PATH",
        environment=ENVIRONMENT,
        variables=variables,
        flags={
            **groups,
            "FRAMEWORK_ARGS": [
                ("--tokenizer-type", "PretrainedFromHF"),
                ("--ckpt-format", "torch"),
                ("--distributed-backend", "nccl"),
                *NO_DROPOUT,
            ],
        },
        open_flags=[*open_flags, ("--tokenizer-name-or-path", "TOKENIZER_PATH")],
        notes=[*model_notes(plan), *_notes(plan)],
    )
    return {FILE: launch_script(plan, script)}


# --- what cannot be exported -------------------------------------------------------------------------------------------------


def _problems(problem: Problem, layout: Layout, model: Architecture) -> Iterator[str]:
    stack = problem.stack
    if problem.cluster.accelerator.vendor != "huawei":
        yield f"MindSpeed-LLM runs on Ascend, not on {problem.cluster.accelerator.name}"
    if layout.schedule not in ("1f1b", "interleaved", "dualpipev"):
        yield f"schedule {layout.schedule}: it has 1f1b, interleaved and dualpipev"
    if layout.optimizer_sharding not in ("none", "zero1"):
        yield f"optimizer_sharding {layout.optimizer_sharding}: its Megatron backend has none and zero1"
    if stack.optimizer_bytes != 12.0:
        yield f"the stack keeps {stack.optimizer_bytes:g} bytes of optimizer state per weight; it has 12 (fp32)"
    if problem.workload.precision == "fp4":
        yield "precision fp4: it has bf16, fp16 and fp8"
    optimizer, activations = parse_offload(layout.offload)
    if optimizer not in (0.0, 1.0):
        yield f"offload {layout.offload}: --swap-optimizer moves all optimizer states or none"
    if optimizer and layout.optimizer_sharding != "zero1":
        yield f"optimizer offload needs optimizer_sharding zero1; it is {layout.optimizer_sharding}"
    if activations:
        yield f"offload {layout.offload}: no option moves a share of all activations to the host"
    if layout.cp > 1 and layout.cp_type == "a2a+p2p" and cp_hierarchy(problem, layout, model) is None:
        yield f"cp_type a2a+p2p: no part of cp {layout.cp} divides the {model.kv_heads} KV heads of {layout.tp} TP ranks"
    if pipelines_inside_replicas(layout) and model.moe and layout.edp != layout.dp:
        yield f"rank order {layout.rank_order} needs edp = dp; edp is {layout.edp} and dp is {layout.dp}"
    yield from _model_problems(problem, layout, model)
    if layout.schedule == "dualpipev":
        yield from _dualpipe_problems(problem, layout)


def _model_problems(problem: Problem, layout: Layout, model: Architecture) -> Iterator[str]:
    if model.sparse and layout.cp > 1 and layout.cp_type not in ("a2a", "allgather"):
        yield f"sparse attention with cp_type {layout.cp_type}: it has a2a and allgather"
    if model.linear:
        yield "linear attention, which it has only as single models arrange it"
    if any(model.windowed) and not all(model.windowed):
        yield "some layers have a window and some have not; --sliding-window holds for all"
    if any(model.windowed) and layout.cp > 1:
        yield f"a sliding window does not go with cp {layout.cp}"
    if model.moe and model.moe.router_linear_bias:
        yield "its router has no bias"
    recompute = one_recompute(layout)
    if recompute and recompute.mode == SELECTIVE:
        unknown = [name for name in recompute.module_names if name not in (*SELECTIVE_FLAGS, "core_attn")]
        if unknown:
            yield f"recompute {recompute}: it has core_attn, {', '.join(SELECTIVE_FLAGS)}, but not {' or '.join(unknown)}"


def _dualpipe_problems(problem: Problem, layout: Layout) -> Iterator[str]:
    """MindSpeed docs/zh/features/dualpipev.md, and the feature's own checks."""
    if layout.pp == 1 or layout.cp > 1 or problem.model.tied_embeddings:
        yield f"dualpipev needs pp more than 1 (it is {layout.pp}), cp 1 (it is {layout.cp}) and untied embeddings"
    if layout.num_microbatches < 2 * layout.pp:
        yield f"dualpipev needs at least 2·pp = {2 * layout.pp} micro-batches; there are {layout.num_microbatches}"
    if not layout.stages and problem.model.num_layers % (2 * layout.pp):
        yield f"dualpipev cuts {problem.model.num_layers} layers into 2·pp = {2 * layout.pp} chunks; the layout lists no stages"


# --- flags -------------------------------------------------------------------------------------------------------------------


def _stage_flags(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> tuple[int, tuple[int, ...], Flags]:
    """(layers as the framework counts them, id of each real layer among these, flags).

    An even split needs no words. Otherwise plain stages of a uniform model are listed; anything else is padded with no-ops to an
    even split; and what has no even form, such as an empty chunk, needs the layout string of 26.1.
    """
    layers, real = problem.model.num_layers, tuple(range(problem.model.num_layers))
    schedule: Flags = [speaks.flag("schedule", "dualpipev")] if layout.schedule == "dualpipev" else []
    interleaved = layout.vpp > 1 and not schedule
    if interleaved and not overlaps(problem, layout, "pp_interleaved"):
        schedule.append(speaks.flag("no_pp_overlap"))
    if layout.pp == 1 or is_even(problem, layout):
        chunks = [speaks.flag("vpp_layers", layers // (layout.pp * layout.vpp))] if interleaved else []
        return layers, real, [*chunks, *schedule]
    counts = layer_counts(layout.stages, layout.schedule)
    if min(counts) < 1 or not mtp_with_loss(problem, layout.stages, layout.schedule):
        return layers, real, [_layout_flag(layout, speaks), *schedule]
    if layout.schedule == "1f1b" and not _leading_dense(model) and problem.model.mtp is None:
        return layers, real, [speaks.flag("layer_list", layer_list(counts)), *schedule]
    padded, noops = noop_layers(counts)
    chunks = [speaks.flag("vpp_layers", max(counts))] if interleaved else []
    return padded, padded_ids(counts), [speaks.flag("noop_layers", ",".join(map(str, noops))), *chunks, *schedule]


def _layout_flag(layout: Layout, speaks: Dialect) -> tuple[str, ...]:
    if layout.schedule == "dualpipev" or not speaks.has("layout"):
        raise Infeasible(
            f"{speaks} cannot cut the model so: with schedule {layout.schedule} it needs a layer in every chunk and the MTP layers "
            "beside the loss; MindSpeed-LLM 26.1 takes other splits as a layout string, without dualpipev"
        )
    return speaks.flag("layout", megatron_layout(layout.stages))


def _implementation_flags(problem: Problem, model: Architecture, speaks: Dialect) -> Flags:
    """The modules a layer is made of: the local ones, of Transformer Engine's kind for FP8, and the spec of special attention."""
    chosen = [speaks.flag("implementation", "transformer_engine" if problem.workload.precision == "fp8" else "local")]
    if isinstance(model.attention, LatentAttention):
        chosen.append(speaks.flag("layer_spec", f"{SPECS}.deepseek_spec", "layer_spec"))
    elif model.attention.qk_norm == "head":
        chosen.append(speaks.flag("layer_spec", f"{SPECS}.qwen3_spec", "layer_spec"))
    return chosen


def _mixed_attention_flags(model: Architecture, speaks: Dialect) -> Flags:
    if isinstance(model.attention, Attention):
        return [speaks.flag("window", model.attention.window)] if model.attention.window else []
    if not model.attention.indexer_heads:
        return []
    sizes = ("indexer_heads", "indexer_head_dim", "indexer_topk")
    return [speaks.flag("indexer"), *(speaks.flag(name, getattr(model.attention, name)) for name in sizes)]


def _moe_flags(model: Architecture, layout: Layout, ids: tuple[int, ...], layers: int, speaks: Dialect) -> Flags:
    mtp = [speaks.flag("mtp", model.spec.mtp.layers)] if model.spec.mtp else []
    if model.moe is None:
        return mtp
    first, every = _moe_rule(model, layout, ids, layers)
    return [*router_flags(model.moe, speaks), speaks.flag("dense_first", first), speaks.flag("moe_pattern", every), *mtp]


def _moe_rule(model: Architecture, layout: Layout, ids: tuple[int, ...], layers: int) -> tuple[int, int]:
    """(F, n): layer ids from F on that n divides are MoE, the others dense; ids count the no-ops in. (-1, -1) is MoE everywhere.

    Infeasible if no such pair gives the model's pattern, or if a whole first stage would be dense, which MindSpeed-LLM refuses.
    """
    if all(model.is_moe):
        return -1, -1
    first = ids[model.is_moe.index(True)]
    layer = list(zip(ids, model.is_moe, strict=True))
    every = next((n for n in range(1, layers + 1) if all((i >= first and i % n == 0) == moe for i, moe in layer)), None)
    if every is None or first == 0:
        raise Infeasible(
            f"mindspeed-llm cannot express which layers of {model.spec.name} are MoE: it knows a number of dense layers at the "
            "front and then every n-th layer, as the split numbers them"
        )
    if layout.pp > 1 and first >= layers // layout.pp:
        raise Infeasible(
            f"mindspeed-llm refuses a first stage of dense layers only: {first} dense layers come first and a stage has "
            f"{layers // layout.pp}; fewer stages would do"
        )
    return first, every


def _leading_dense(model: Architecture) -> bool:
    return model.moe is not None and not all(model.is_moe)


def _context_flags(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Flags:
    if layout.cp == 1:
        return []
    chosen = [speaks.flag("cp_type", layout.cp_type)]
    degrees = cp_hierarchy(problem, layout, model)
    if layout.cp_type == "a2a+p2p" and degrees:
        chosen.append(speaks.flag("cp_hierarchy", degrees[0]))
    if "p2p" in layout.cp_type and overlaps(problem, layout, "cp"):
        chosen.append(speaks.flag("overlap_cp"))
    return chosen


def _dispatch_flags(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Flags:
    """EP overlap is --moe-fb-overlap with DualPipeV and --moe-alltoall-overlap-comm without."""
    if model.moe is None:
        return []
    if problem.stack.moe_dispatcher == "flex":
        raise Infeasible(f"{speaks} has no flex dispatcher; alltoall and allgather are what it has")
    chosen = [speaks.flag("dispatcher", problem.stack.moe_dispatcher)]
    if problem.stack.fused_kernels:
        chosen.append(speaks.flag("permute_fusion"))
    if not overlaps(problem, layout, "ep") or layout.ep == 1 or problem.stack.moe_dispatcher != "alltoall":
        return chosen
    if layout.schedule == "dualpipev":
        return [*chosen, speaks.flag("overlap_ep_dualpipe")] if layout.etp == 1 else chosen
    return [*chosen, speaks.flag("overlap_permutation"), speaks.flag("overlap_ep")]


def _sharding_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    """DualPipeV excludes the overlap of gradient reduction, and with it that of the parameters' gathering."""
    chosen = [speaks.flag("zero1")] if layout.optimizer_sharding == "zero1" else []
    if overlaps(problem, layout, "dp_gradients") and layout.schedule != "dualpipev":
        chosen.append(speaks.flag("overlap_gradients"))
        if layout.optimizer_sharding == "zero1" and overlaps(problem, layout, "dp_parameters"):
            chosen.append(speaks.flag("overlap_parameters"))
    return chosen


def _recompute_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    recompute = one_recompute(layout)
    if recompute and recompute.mode in (FULL_BLOCK, FULL_UNIFORM):
        return full_recompute_flags(recompute, problem, layout, speaks, always_block=True)
    names = recompute.module_names if recompute and recompute.mode == SELECTIVE else ()
    core = [speaks.flag("recompute", "selective")] if "core_attn" in names else []
    return [*core, *(speaks.flag(SELECTIVE_FLAGS[name]) for name in names if name in SELECTIVE_FLAGS)]


def _precision_flags(problem: Problem, speaks: Dialect) -> Flags:
    if problem.workload.precision == "fp16":
        return [speaks.flag("fp16")]
    if problem.workload.precision == "fp8":
        return [speaks.flag("bf16"), speaks.flag("fp8", "e4m3"), speaks.flag("fp8_recipe", "mxfp8")]
    return [speaks.flag("bf16")]


def _kernel_flags(problem: Problem, model: Architecture, speaks: Dialect) -> Flags:
    chosen: Flags = [speaks.flag("attention_kernel")] if problem.stack.attention_kernel == "flash" else []
    if problem.stack.fused_kernels:
        names = {
            "fused_swiglu": all(part.gated for part in (model.dense, model.moe) if part),
            "fused_norm": model.spec.norm == "rms",
            "fused_rope": not model.spec.learned_positions,
        }
        chosen += [speaks.flag(name) for name, present in names.items() if present]
    return [*chosen, ("--gemm-gradient-accumulation-fusion",) if model.moe else ("--no-gradient-accumulation-fusion",)]


def _notes(plan: Plan) -> Iterator[str]:
    problem, layout = plan.problem, plan.plan.layout
    model = architecture(problem.model)
    yield "load the CANN environment (set_env.sh) first"
    if model.moe and model.moe.score_function == "softmax":
        yield "give --norm-topk-prob if the model normalises the weights of the chosen experts"
    if overlaps(problem, layout, "dp_gradients") and layout.schedule == "dualpipev":
        yield "the prediction hides gradient reduction, which DualPipeV does not allow"
    if overlaps(problem, layout, "tp") and model.moe:
        yield "the prediction hides TP traffic, for which experts leave no option"

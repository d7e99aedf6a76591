"""A plan as a launch script of MindSpeed-LLM on Ascend (its Megatron backend, on core_v0.12.1)."""

from __future__ import annotations

from collections.abc import Iterator

from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE
from ...search_spaces.model import Attention, LatentAttention
from ..result import Plan
from .knobs import Setting, Settings
from .megatron_family import Family, Groups, options, script_files
from .megatron_model import MegatronRequest, attention_settings, router_settings, size_settings
from .megatron_parallel import (
    context_settings,
    degree_settings,
    full_recompute_settings,
    optimizer_precision_settings,
    overlap_settings,
    tp_overlap_settings,
)
from .megatron_rotary import scaled_positions, scaling_settings
from .megatron_spellings import SELECTIVE_FLAGS
from .splits import layer_list, megatron_layout, noop_layers, padded_ids

FRAMEWORK = "mindspeed-llm"
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


def flags(plan: Plan, version: str | None = None) -> list[tuple[str, ...]]:
    """Every option that the plan decides, with its values, as one list; Infeasible says what MindSpeed-LLM cannot express."""
    return options(FAMILY, plan, version)


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """mindspeed-llm.sh, a complete launch script; Infeasible as for `flags`."""
    return script_files(FAMILY, plan, version, "MINDSPEED_LLM_PATH")


def _groups(asked: MegatronRequest) -> Groups:
    layers, ids, stages = _stages(asked)
    return {
        "MODEL_ARGS": [
            asked.speaks.set("mcore_models"),
            *_implementation(asked),
            *size_settings(asked, layers, scaled_positions(asked)),
            *attention_settings(asked),
            *scaling_settings(asked),
            *_mixed_attention(asked),
            *_moe(asked, ids, layers),
        ],
        "PARALLEL_ARGS": [
            *degree_settings(asked),
            *stages,
            *context_settings(asked),
            *_dispatch(asked),
            *([] if asked.architecture.moe else tp_overlap_settings(asked)),
        ],
        "MEMORY_ARGS": [
            *_sharding(asked),
            *optimizer_precision_settings(asked),
            *_recompute(asked),
            *asked.speaks.sets(optimizer_offload=asked.offload[0] > 0),
        ],
        "PRECISION_ARGS": [*_precision(asked), *_kernels(asked)],
    }


# --- what cannot be exported -------------------------------------------------------------------------------------------------


def _problems(asked: MegatronRequest) -> Iterator[str]:
    problem, layout, stack = asked.problem, asked.layout, asked.stack
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
    optimizer, activations = asked.offload
    if optimizer not in (0.0, 1.0):
        yield f"offload {layout.offload}: --swap-optimizer moves all optimizer states or none"
    if activations:
        yield f"offload {layout.offload}: no option moves a share of all activations to the host"
    yield from _model_problems(asked)
    if layout.schedule == "dualpipev":
        yield from _dualpipe_problems(asked)


def _model_problems(asked: MegatronRequest) -> Iterator[str]:
    layout, model, recompute = asked.layout, asked.architecture, asked.recompute
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
    if recompute and recompute.mode == SELECTIVE:
        unknown = [name for name in recompute.module_names if name not in (*SELECTIVE_FLAGS, "core_attn")]
        if unknown:
            yield f"recompute {recompute}: it has core_attn, {', '.join(SELECTIVE_FLAGS)}, but not {' or '.join(unknown)}"


def _dualpipe_problems(asked: MegatronRequest) -> Iterator[str]:
    """MindSpeed docs/zh/features/dualpipev.md, and the feature's own checks."""
    layout, spec = asked.layout, asked.spec
    if layout.pp == 1 or layout.cp > 1 or spec.tied_embeddings:
        yield f"dualpipev needs pp more than 1 (it is {layout.pp}), cp 1 (it is {layout.cp}) and untied embeddings"
    if layout.num_microbatches < 2 * layout.pp:
        yield f"dualpipev needs at least 2·pp = {2 * layout.pp} micro-batches; there are {layout.num_microbatches}"
    if not layout.stages and spec.num_layers % (2 * layout.pp):
        yield f"dualpipev cuts {spec.num_layers} layers into 2·pp = {2 * layout.pp} chunks; the layout lists no stages"


# --- settings ----------------------------------------------------------------------------------------------------------------


def _stages(asked: MegatronRequest) -> tuple[int, tuple[int, ...], Settings]:
    """(layers as the framework counts them, id of each real layer among these, settings).

    An even split needs no words. Otherwise plain stages of a uniform model are listed; anything else is padded with no-ops to an
    even split; and what has no even form, such as an empty chunk, needs the layout string of 26.1.
    """
    layout, put, layers = asked.layout, asked.speaks.set, asked.spec.num_layers
    real, counts = tuple(range(layers)), asked.counts
    schedule: Settings = [put("schedule", "dualpipev")] if layout.schedule == "dualpipev" else []
    interleaved = layout.vpp > 1 and not schedule
    if interleaved and not asked.overlaps("pp_interleaved"):
        schedule.append(put("no_pp_overlap"))
    if layout.pp == 1 or asked.is_even:
        chunks = [put("vpp_layers", layers // (layout.pp * layout.vpp))] if interleaved else []
        return layers, real, [*chunks, *schedule]
    if min(counts) < 1 or not asked.mtp_with_loss:
        return layers, real, [_layout_string(asked), *schedule]
    if layout.schedule == "1f1b" and not _leading_dense(asked) and asked.spec.mtp is None:
        return layers, real, [put("layer_list", layer_list(counts)), *schedule]
    padded, noops = noop_layers(counts)
    chunks = [put("vpp_layers", max(counts))] if interleaved else []
    return padded, padded_ids(counts), [put("noop_layers", ",".join(map(str, noops))), *chunks, *schedule]


def _layout_string(asked: MegatronRequest) -> Setting:
    if asked.layout.schedule == "dualpipev" or not asked.speaks.has("layout"):
        raise Infeasible(
            f"{asked.speaks} cannot cut the model so: with schedule {asked.layout.schedule} it needs a layer in every chunk and "
            "the MTP layers beside the loss; MindSpeed-LLM 26.1 takes other splits as a layout string, without dualpipev"
        )
    return asked.speaks.set("layout", megatron_layout(asked.layout.stages))


def _implementation(asked: MegatronRequest) -> Settings:
    """The modules a layer is made of: the local ones, of Transformer Engine's kind for FP8, and the spec of special attention."""
    mixer, put = asked.architecture.attention, asked.speaks.set
    chosen = [put("implementation", "transformer_engine" if asked.precision == "fp8" else "local")]
    if isinstance(mixer, LatentAttention):
        chosen.append(put("layer_spec", f"{SPECS}.deepseek_spec", "layer_spec"))
    elif mixer.qk_norm == "head":
        chosen.append(put("layer_spec", f"{SPECS}.qwen3_spec", "layer_spec"))
    return chosen


def _mixed_attention(asked: MegatronRequest) -> Settings:
    mixer, put = asked.architecture.attention, asked.speaks.set
    if isinstance(mixer, Attention):
        return [put("window", mixer.window)] if mixer.window else []
    if not mixer.indexer_heads:
        return []
    sizes = ("indexer_heads", "indexer_head_dim", "indexer_topk")
    return [put("indexer"), *(put(name, getattr(mixer, name)) for name in sizes)]


def _moe(asked: MegatronRequest, ids: tuple[int, ...], layers: int) -> Settings:
    moe = asked.architecture.moe
    mtp = asked.speaks.sets(mtp=asked.spec.mtp.layers if asked.spec.mtp else None)
    if moe is None:
        return mtp
    first, every = _moe_rule(asked, ids, layers)
    return [
        *router_settings(moe, asked.speaks),
        # routers of its own kinds need the word; Megatron's do without it, and one of them would lose a scaling factor by it
        *asked.speaks.sets(
            topk_normalised=moe.normalized_top_k and moe.score_function == "softmax" and moe.routed_scaling_factor == 1.0
        ),
        asked.speaks.set("dense_first", first),
        asked.speaks.set("moe_pattern", every),
        *mtp,
    ]


def _moe_rule(asked: MegatronRequest, ids: tuple[int, ...], layers: int) -> tuple[int, int]:
    """(F, n): layer ids from F on that n divides are MoE, the others dense; ids count the no-ops in. (-1, -1) is MoE everywhere.

    Infeasible if no such pair gives the model's pattern, or if a whole first stage would be dense, which MindSpeed-LLM refuses.
    """
    layout, model = asked.layout, asked.architecture
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


def _leading_dense(asked: MegatronRequest) -> bool:
    return asked.architecture.moe is not None and not all(asked.architecture.is_moe)


def _dispatch(asked: MegatronRequest) -> Settings:
    """EP overlap is --moe-fb-overlap with DualPipeV and --moe-alltoall-overlap-comm without."""
    layout, speaks, kind = asked.layout, asked.speaks, asked.stack.moe_dispatcher
    if asked.architecture.moe is None:
        return []
    if kind == "flex":
        raise Infeasible(f"{speaks} has no flex dispatcher; alltoall and allgather are what it has")
    chosen = [speaks.set("dispatcher", kind), *speaks.sets(permute_fusion=asked.stack.fused_kernels)]
    if not asked.overlaps("ep") or layout.ep == 1 or kind != "alltoall":
        return chosen
    if layout.schedule == "dualpipev":
        return [*chosen, *speaks.sets(overlap_ep_dualpipe=layout.etp == 1)]
    return [*chosen, speaks.set("overlap_permutation"), speaks.set("overlap_ep")]


def _sharding(asked: MegatronRequest) -> Settings:
    """DualPipeV excludes the overlap of gradient reduction, and with it that of the parameters' gathering."""
    overlap = [] if asked.layout.schedule == "dualpipev" else overlap_settings(asked)
    return [*asked.speaks.sets(zero1=asked.layout.optimizer_sharding == "zero1"), *overlap]


def _recompute(asked: MegatronRequest) -> Settings:
    recompute = asked.recompute
    if recompute and recompute.mode in (FULL_BLOCK, FULL_UNIFORM):
        ahead = asked.stack.recompute_ahead and asked.layout.schedule == "interleaved" and set(asked.counts) == {1}
        return [*full_recompute_settings(asked, recompute, always_block=True), *asked.speaks.sets(recompute_ahead=ahead)]
    names = recompute.module_names if recompute and recompute.mode == SELECTIVE else ()
    core = [asked.speaks.set("recompute", "selective")] if "core_attn" in names else []
    return [*core, *(asked.speaks.set(SELECTIVE_FLAGS[name]) for name in names if name in SELECTIVE_FLAGS)]


def _precision(asked: MegatronRequest) -> Settings:
    put = asked.speaks.set
    if asked.precision == "fp16":
        return [put("fp16")]
    quantised = [put("fp8", "e4m3"), put("fp8_recipe", "mxfp8")] if asked.precision == "fp8" else []
    return [put("bf16"), *quantised]


def _kernels(asked: MegatronRequest) -> Settings:
    speaks, fused = asked.speaks, asked.stack.fused_kernels
    return [
        *([speaks.set("attention_kernel")] if asked.stack.attention_kernel == "flash" else []),
        *speaks.sets(
            fused_swiglu=fused and asked.architecture.gated,
            fused_norm=fused and asked.spec.norm == "rms",
            fused_rope=fused and not asked.spec.learned_positions,
        ),
        speaks.set("fused_accumulation" if asked.architecture.moe else "unfused_accumulation"),
    ]


def _notes(asked: MegatronRequest) -> Iterator[str]:
    moe = asked.architecture.moe
    yield "load the CANN environment (set_env.sh) first"
    if asked.overlaps("dp_gradients") and asked.layout.schedule == "dualpipev":
        yield "the prediction hides gradient reduction, which DualPipeV does not allow"
    if asked.overlaps("tp") and moe:
        yield "the prediction hides TP traffic, for which experts leave no option"


FAMILY = Family(
    framework=FRAMEWORK,
    problems=_problems,
    groups=_groups,
    notes=_notes,
    environment=lambda _: ENVIRONMENT,
    fixed={
        "tokenizer_type": "PretrainedFromHF",
        "checkpoint_format": "torch",
        "backend": "nccl",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
)

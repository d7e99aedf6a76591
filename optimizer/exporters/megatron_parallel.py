"""Layout, recompute and training variables as Megatron-LM and MindSpeed-LLM both read them, and what both refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...search_spaces.layout import (
    FULL_BLOCK,
    NONE,
    SELECTIVE,
    Chunk,
    Layout,
    Problem,
    Recompute,
    Stage,
    parse_offload,
)
from ...search_spaces.model import LatentAttention
from ..ranks import devices_per_server
from ..result import Plan
from .knobs import Dialect
from .launch import Variable
from .megatron_model import Architecture, Flags, refusal
from .splits import layer_count, layer_counts, virtual_chunks

NO_DROPOUT: Flags = [("--attention-dropout", "0.0"), ("--hidden-dropout", "0.0")]
"""Megatron's defaults are 0.1, which no plan is priced for."""

# --- what cannot be exported -------------------------------------------------------------------------------------------------


def refuse(plan: Plan, speaks: Dialect, problems: Sequence[str]) -> None:
    """Infeasible with all problems at once, if there are any."""
    if problems:
        raise refusal(f"{speaks} cannot run the plan for {plan.problem.model.name}", problems)


def shared_problems(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Iterator[str]:
    """What the Megatron family refuses, or would understand as something else, whatever the framework."""
    workload = problem.workload
    if workload.global_batch != layout.micro_batch * layout.num_microbatches * layout.dp:
        yield (
            f"micro_batch {layout.micro_batch} × num_microbatches {layout.num_microbatches} × dp {layout.dp} is not the global "
            f"batch of {workload.global_batch}"
        )
    if layout.etp * layout.ep * layout.edp * layout.pp != layout.devices:
        yield f"etp·ep·edp·pp is {layout.etp * layout.ep * layout.edp * layout.pp}, tp·cp·pp·dp is {layout.devices}"
    if model.attention.heads % layout.tp:
        yield f"tp {layout.tp} does not divide {model.attention.heads} heads"
    if speaks.framework != "megatron-lm" or speaks.version < (0, 16):
        if model.kv_heads % layout.tp:
            tp = _divisor(model, layout)
            yield f"tp {layout.tp} does not divide {model.kv_heads} KV heads, which {speaks} asks for; tp {tp} would"
    elif model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        yield f"tp {layout.tp} is neither a multiple nor a divisor of {model.kv_heads} KV heads"
    if model.moe and layout.tp > 1 and not layout.sequence_parallel:
        yield f"tp {layout.tp} with experts needs sequence_parallel, which is off"
    if model.moe and model.moe.experts % layout.ep:
        yield f"ep {layout.ep} does not divide {model.moe.experts} experts"
    if model.moe is None and (layout.ep > 1 or layout.etp > 1):
        yield f"ep {layout.ep} and etp {layout.etp} on a model without experts"
    if model.moe and model.moe.bias and layout.etp > 1:
        yield f"experts with biases need etp 1; it is {layout.etp}"
    if layout.vpp > 1 and layout.schedule == "interleaved" and layout.num_microbatches % layout.pp:
        yield f"interleaving needs micro-batches in multiples of pp {layout.pp}; there are {layout.num_microbatches}"
    if (layout.vpp > 1) != (layout.schedule == "interleaved") and layout.schedule in ("1f1b", "interleaved"):
        yield f"schedule {layout.schedule} with vpp {layout.vpp}: interleaved is the schedule of more than one chunk per stage"
    if layout.pp > 1 and not layout.stages and problem.model.num_layers % (layout.pp * layout.vpp):
        yield f"{problem.model.num_layers} layers over pp·vpp = {layout.pp * layout.vpp} chunks, and the layout lists no stages"
    if layout.devices % devices_per_server(problem.cluster, layout.devices):
        yield f"{layout.devices} devices do not fill whole servers, and every server runs as many processes as the others"
    if one_recompute(layout) is None:
        yield "recompute differs between stages in a way that one depth for all chunks does not give"
    if layout.stages:
        yield from _stage_problems(problem, layout)


def _stage_problems(problem: Problem, layout: Layout) -> Iterator[str]:
    """The frameworks are told how many layers a chunk has, not which: the stages must list them in order and leave none out."""
    try:
        chunks = virtual_chunks(layout.stages, layout.schedule)
    except ValueError as error:
        yield str(error)
        return
    listed = [layer for chunk in chunks if chunk.layers for layer in range(chunk.layers[0], chunk.layers[1] + 1)]
    if listed != list(range(problem.model.num_layers)):
        yield f"stages list {len(listed)} layers; they must be the {problem.model.num_layers} of {problem.model.name}, in order"
    mtp = problem.model.mtp.layers if problem.model.mtp else 0
    if sum(chunk.mtp for chunk in chunks) != mtp:
        yield f"stages list {sum(chunk.mtp for chunk in chunks)} MTP layers; {problem.model.name} has {mtp}"
    if [chunk.embedding for chunk in chunks] != [True] + [False] * (len(chunks) - 1):
        yield "the embedding belongs to the first chunk"
    if [chunk.loss for chunk in chunks] != [False] * (len(chunks) - 1) + [True]:
        yield "the loss belongs to the last chunk"


def _divisor(model: Architecture, layout: Layout) -> int:
    return max(tp for tp in range(1, layout.tp + 1) if model.kv_heads % tp == 0 and model.attention.heads % tp == 0)


# --- flags -------------------------------------------------------------------------------------------------------------------


def degree_flags(problem: Problem, layout: Layout, model: Architecture, speaks: Dialect) -> Flags:
    """Degrees, batch and rank order. ETP is always written: left out, it becomes TP."""
    etp = layout.etp
    if pipelines_inside_replicas(layout) and model.moe is None:
        etp = layout.tp * layout.cp  # a model without experts: what keeps both grids' pipelines equal in this order
    degrees: Flags = [
        speaks.flag("tp", layout.tp),
        speaks.flag("pp", layout.pp),
        speaks.flag("cp", layout.cp),
        speaks.flag("ep", layout.ep),
        speaks.flag("etp", etp),
    ]
    if layout.sequence_parallel and layout.tp > 1:
        degrees.append(speaks.flag("sequence_parallel"))
    if pipelines_inside_replicas(layout):
        degrees.append(speaks.flag("rank_order_pp_inside_dp"))
    return [
        *degrees,
        speaks.flag("micro_batch", layout.micro_batch),
        speaks.flag("global_batch", problem.workload.global_batch),
    ]


def tp_overlap_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    """TP collectives beside the GEMMs, which needs SP."""
    wanted = overlaps(problem, layout, "tp") and layout.tp > 1 and layout.sequence_parallel
    return [speaks.flag("overlap_tp")] if wanted else []


def optimizer_precision_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    """Type of the gradient buffer and of Adam's moments, as the stack was priced."""
    chosen = [speaks.flag("gradients_fp32" if problem.stack.gradient_bytes == 4 else "gradients_bf16")]
    if problem.stack.optimizer_bytes == 8.0:
        chosen += [speaks.flag("first_moment", "bf16"), speaks.flag("second_moment", "bf16")]
    if problem.stack.optimizer_bytes == 8.0 or (speaks.framework == "megatron-lm" and parse_offload(layout.offload)[0]):
        chosen.append(speaks.flag("precise_optimizer"))
    return chosen


def recompute_flags(problem: Problem, layout: Layout, speaks: Dialect) -> Flags:
    """Recompute as one setting for all chunks; `one_recompute` has seen to it that there is one."""
    recompute = one_recompute(layout)
    if recompute is None or recompute.mode == NONE:
        return []
    if recompute.mode == SELECTIVE:
        words = [speaks.flag("recompute_modules", name)[1] for name in recompute.module_names]
        return [speaks.flag("recompute", "selective"), (speaks.flag("recompute_modules")[0], *words)]
    return full_recompute_flags(recompute, problem, layout, speaks)


def full_recompute_flags(
    recompute: Recompute, problem: Problem, layout: Layout, speaks: Dialect, always_block: bool = False
) -> Flags:
    """Whole layers: the first K of each chunk, or all of them with a checkpoint every K.

    All layers of a block are written as uniform 1, which Megatron also applies to MTP layers, unless `always_block`.
    """
    chunks = [layer_count(chunk) for stage in layout.stages for chunk in stage.chunks]
    fullest = max(chunks, default=-(-problem.model.num_layers // (layout.pp * layout.vpp)))
    if recompute.mode == FULL_BLOCK and (always_block or recompute.layers < fullest):
        method, depth = "block", min(recompute.layers, fullest)
    else:
        method, depth = "uniform", 1 if recompute.mode == FULL_BLOCK else recompute.layers
    return [
        speaks.flag("recompute", "full"),
        speaks.flag("recompute_method", method),
        speaks.flag("recompute_layers", depth),
    ]


def one_recompute(layout: Layout) -> Recompute | None:
    """The single setting that gives every chunk the recompute it was planned with, or None.

    Chunks may differ in depth as far as one K allows: min(K, layers) is a chunk's depth.
    """
    chunks = [chunk for stage in layout.stages for chunk in stage.chunks if chunk.layers]
    if not chunks:
        return Recompute.parse(layout.recompute)
    planned = {chunk.recompute: Recompute.parse(chunk.recompute) for chunk in chunks}
    if len(planned) == 1:
        return next(iter(planned.values()))
    if any(recompute.mode not in (NONE, FULL_BLOCK) for recompute in planned.values()):
        return None
    depths = [min(planned[chunk.recompute].layers, layer_count(chunk)) for chunk in chunks]
    deepest = max(depths)
    same = all(depth == min(deepest, layer_count(chunk)) for depth, chunk in zip(depths, chunks, strict=True))
    return Recompute(FULL_BLOCK, 0, deepest) if same else None


def overlaps(problem: Problem, layout: Layout, kind: str) -> bool:
    """Whether the plan counts on hiding this traffic: the layout's own figure, or else the stack's."""
    share = layout.overlap.get(kind, getattr(problem.stack.overlap, kind))
    return bool(share > 0)


def is_even(problem: Problem, layout: Layout) -> bool:
    """Whether every chunk holds as many decoder layers, and MTP layers sit with the loss, as the frameworks do by themselves."""
    if not layout.stages:
        return True
    return len(set(layer_counts(layout.stages, layout.schedule))) == 1 and mtp_with_loss(problem, layout.stages, layout.schedule)


def mtp_with_loss(problem: Problem, stages: Sequence[Stage], schedule: str) -> bool:
    """Whether all MTP layers are in the chunk of the loss."""
    chunks: tuple[Chunk, ...] = virtual_chunks(stages, schedule)
    return chunks[-1].mtp == sum(chunk.mtp for chunk in chunks) == (problem.model.mtp.layers if problem.model.mtp else 0)


def cp_hierarchy(problem: Problem, layout: Layout, model: Architecture) -> tuple[int, int] | None:
    """(all-to-all degree, ring degree) of CP type a2a+p2p, or None.

    The all-to-all is the largest that the KV heads of a TP rank allow, inside a server if any fits there.
    """
    heads = model.attention.heads if isinstance(model.attention, LatentAttention) else max(1, model.kv_heads // layout.tp)
    heads = heads // layout.tp if isinstance(model.attention, LatentAttention) else heads
    inner = [a for a in range(2, layout.cp) if layout.cp % a == 0 and heads % a == 0]
    local = [a for a in inner if a * layout.tp <= devices_per_server(problem.cluster, layout.devices)]
    return (max(local or inner), layout.cp // max(local or inner)) if inner else None


def pipelines_inside_replicas(layout: Layout) -> bool:
    """Whether pipelines vary faster than data-parallel replicas among the ranks."""
    return layout.rank_order == "tp-cp-ep-pp-dp"


# --- what the plan leaves open -----------------------------------------------------------------------------------------------


def training_variables(plan: Plan) -> tuple[list[Variable], list[tuple[str, str]]]:
    """What the plan leaves open, and the options that carry it."""
    model = plan.problem.model
    variables = [
        Variable("DATA_SPLIT", "parts for training, validation and test", "100,0,0"),
        Variable("DATA_PATH", "prefix of the tokenised data"),
        Variable("TOKENIZER_PATH", "folder of the Hugging Face tokenizer"),
        Variable("CHECKPOINT_DIR", "where checkpoints are read and written"),
        Variable("TRAIN_ITERS", "number of steps"),
        Variable("LR", "peak learning rate"),
        Variable("NORM_EPSILON", "epsilon of the model's norms"),
        Variable("SAVE_INTERVAL", "steps between checkpoints", "500"),
    ]
    options = [
        ("--data-path", "DATA_PATH"),
        ("--split", "DATA_SPLIT"),
        ("--save", "CHECKPOINT_DIR"),
        ("--load", "CHECKPOINT_DIR"),
        ("--train-iters", "TRAIN_ITERS"),
        ("--lr", "LR"),
        ("--norm-epsilon", "NORM_EPSILON"),
        ("--save-interval", "SAVE_INTERVAL"),
    ]
    if not model.learned_positions:
        variables.append(Variable("ROTARY_BASE", "theta of the rotary embedding"))
        options.append(("--rotary-base", "ROTARY_BASE"))
    if model.is_moe:
        variables.append(Variable("MOE_LOAD_BALANCING", "aux_loss, seq_aux_loss or none"))
        variables.append(Variable("MOE_AUX_LOSS_COEFF", "weight of the balancing loss"))
        options += [
            ("--moe-router-load-balancing-type", "MOE_LOAD_BALANCING"),
            ("--moe-aux-loss-coeff", "MOE_AUX_LOSS_COEFF"),
        ]
    return variables, options


def model_notes(plan: Plan) -> list[str]:
    """What a ModelSpec does not record, and the script therefore takes for granted."""
    gated = any(getattr(plan.problem.model.kinds[name].mlp, "gated", False) for name in plan.problem.model.layer_kinds)
    notes = [
        f"the MLP's activation is taken to be {'SwiGLU' if gated else 'GELU'} and dropout to be off; rope scaling, initialisation "
        "and the optimizer's settings are the framework's defaults unless given as arguments"
    ]
    if plan.problem.workload.precision == "fp8":
        notes.append("the plan prices FP8 GEMMs; the scaling recipe is the usual one of this accelerator")
    return notes

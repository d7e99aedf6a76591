"""Options of the Megatron family that need others beside them, or exclude them."""

from __future__ import annotations

from collections.abc import Iterator

from ...search_spaces.rulebook.terms import ARGUMENTS
from ...search_spaces.rulebook.terms import CONFIG as TRANSFORMER
from .dialects import TABLED, Words
from .job import Finding
from .options import Knobs

NEEDS = (
    ("C085", "tp_extends_ep", ("overlap_permutation",), ("mindspeed-llm",)),
    ("C085", "tp_extends_ep", ("grouped_gemm",), ("mindspeed-llm",)),
    ("C110", "reuse_fp32", ("bf16",), ("mindspeed-llm",)),
    ("C105", "optimizer_offload", ("precise_optimizer",), ("megatron-lm",)),
    ("C106", "overlap_parameters", ("zero1", "fsdp"), ("megatron-lm", "mindspeed-llm")),
    ("C106", "overlap_parameters", ("overlap_gradients",), ("megatron-lm", "mindspeed-llm")),
    ("C130", "overlap_tp", ("sequence_parallel",), ("megatron-lm", "mindspeed-llm")),
    ("C107", "torch_fsdp", ("untied",), ("megatron-lm",)),
    ("C107", "torch_fsdp", ("unfused_accumulation",), ("megatron-lm",)),
    ("C121", "fp8_parameters", ("fp8", "torch_fsdp"), ("megatron-lm",)),  # which gathers BF16 all the same under the latter
    ("C121", "fp8_parameters", ("zero1", "fsdp", "torch_fsdp"), ("megatron-lm",)),
)
"""Rule, knob, the knobs of which it needs one beside it, and the frameworks that refuse it without."""


def lacking(knobs: Knobs, framework: str) -> Iterator[Finding]:
    """Options without those that they need."""
    speaks = Words(framework) if framework in TABLED else None
    for rule, knob, needed, frameworks in NEEDS:
        if speaks is not None and framework in frameworks and knobs.has(knob) and not any(map(knobs.has, needed)):
            wanted = " or ".join(speaks.flag(name)[0] for name in needed if speaks.has(name))
            yield Finding(rule, f"{knobs.names[knob]} needs {wanted} beside it.", "the framework refuses it without", ARGUMENTS)


DUALPIPEV = "MindSpeed mindspeed/features_manager/pipeline_parallel/dualpipev_feature.py"
CORE = ("megatron-lm", "megatron-bridge")
FAMILY = (*CORE, "mindspeed-llm")
COUNTED = ("count_embedding", "count_loss")
EXCLUDES = (
    (
        "C085",
        "tp_extends_ep",
        ("--moe-fb-overlap", "--moe-expert-capacity-factor"),
        FAMILY,
        "MindSpeed mindspeed/features_manager/moe",
    ),
    ("C110", "reuse_fp32", ("--swap-optimizer",), FAMILY, "MindSpeed mindspeed/features_manager/memory"),
    ("C107", "torch_fsdp", ("--use-distributed-optimizer", "--fp16"), FAMILY, ARGUMENTS),
    ("C121", "fp8", ("--fp4-format",), FAMILY, ARGUMENTS),
    ("C063", "layout", ("first_stage_layers", "last_stage_layers", *COUNTED), CORE, TRANSFORMER),
    ("C062", "first_stage_layers", COUNTED, CORE, TRANSFORMER),
    ("C062", "last_stage_layers", COUNTED, CORE, TRANSFORMER),
    ("C074", "schedule", ("overlap_gradients", "vpp_layers", "swap_attention"), ("mindspeed-llm",), DUALPIPEV),
    ("C021", "mla", ("grouped_query",), ("megatron-lm",), ARGUMENTS),
    ("C025", "mla", ("interleaved_rotary",), ("megatron-lm",), TRANSFORMER),
)
"""Rule, knob, knobs or options that are refused beside it, the frameworks that refuse them, and where."""


def excluded(knobs: Knobs, framework: str) -> Iterator[Finding]:
    """Options beside others that exclude them."""
    given = given_options(knobs)
    for rule, knob, others, frameworks, source in EXCLUDES:
        if not knobs.has(knob) or framework not in frameworks:
            continue
        said = f"{knobs.names[knob]} {knobs.text(knob)}" if knob == "schedule" else knobs.names[knob]
        for each in (knobs.names.get(other, other) for other in others if other in given or knobs.has(other)):
            sentence = f"{said} does not go with {each}; leave one of them out."
            yield Finding(rule, sentence, "the framework refuses both together", source)


def dense_stage(knobs: Knobs, pp: int) -> Iterator[Finding]:
    """Leading dense layers that fill a stage as MindSpeed-LLM counts its layers: evenly, no-ops included, whatever a list says."""
    layers, first = knobs.whole("layers"), knobs.whole("dense_first", -1)
    if not layers or not first or first < 1 or pp == 1 or first < layers // pp:
        return
    sentence = f"{knobs.names['dense_first']} {first} is not less than the {layers // pp} of {layers} layers a stage on pp = {pp}"
    remedy = f"fewer stages, or no-op layers up to {knobs.names['layers']} {(first + 1) * pp} in place of a list, would be"
    source = "MindSpeed-LLM mindspeed_llm/features_manager/transformer/transformer_block.py"
    yield Finding("C073", f"{sentence}; {remedy}.", "no stage may hold dense layers alone", source)


def given_options(knobs: Knobs) -> set[str]:
    """Names of all options that are given, known or not."""
    return {*knobs.names.values(), *(text.split()[0] for text in knobs.unknown)}


APART = ("--moe-fb-overlap", "--optimize-send-recv-comm", "--adaptive-memory-optimization", "--pipeline-model-parallel-layout")
"""Options that exclude recompute apart from backward passes."""
EXCLUDED = {
    "recompute_in_bubbles": (*APART, "--recompute-in-advance", "--swap-attention", "--no-overlap-p2p-communication"),
    "recompute_ahead": APART,
}
"""MindSpeed's ways to take recompute out of the backward passes, and the options that exclude each."""


def apart_from_backward(knobs: Knobs, degrees: dict[str, int]) -> Iterator[Finding]:
    """What MindSpeed asks of recompute that is scheduled apart from the backward passes."""
    options = given_options(knobs)
    depth, chunk = knobs.whole("recompute_layers", 0), knobs.whole("vpp_layers")
    for knob in filter(knobs.has, EXCLUDED):
        asked = [f"does not go with {option}" for option in EXCLUDED[knob] if option in options]
        if degrees["pp"] == 1 or chunk is None:
            asked.append("needs pp > 1 and --num-layers-per-virtual-pipeline-stage")
        if knob == "recompute_in_bubbles" and depth and depth != chunk:
            asked.append(f"chooses what to redo: leave --recompute-num-layers {depth} out")
        if knob == "recompute_ahead" and (not depth or knobs.text("recompute_method") == "uniform"):
            asked.append("needs --recompute-method block and --recompute-num-layers")
        source = "MindSpeed mindspeed/features_manager/pipeline_parallel/ripipe_schedules_feature.py"
        for each in asked:
            yield Finding("C076", f"{knobs.names[knob]} {each}.", "recompute becomes a pass of its own", source)

"""A job of the Megatron family from what its options set: layout, batch, stages, memory, with the framework's defaults."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from difflib import get_close_matches

from ...search_spaces.errors import InputError
from ...search_spaces.layout import CP_TYPES, RECOMPUTE_MODULES
from ...search_spaces.libraries import mindspeed_llm
from ...search_spaces.rulebook.terms import ARGUMENTS
from ...search_spaces.rulebook.terms import CONFIG as TRANSFORMER
from ..exporters.megatron_spellings import SELECTIVE_FLAGS
from .dialects import Words, knobs_of
from .job import Finding, Job
from .megatron_combinations import apart_from_backward, dense_stage, excluded, lacking
from .megatron_contradictions import contradictions, undefaulted
from .megatron_model import Described, describe
from .megatron_stack import exposed, gathers_fp8, stack_changes
from .megatron_stages import chunks_of, other_chunks, split_of
from .options import Knobs
from .shell import reason_of, shown, unresolved

DEGREES = ("tp", "cp", "pp", "ep", "micro_batch")
SHARDING_BY_STRATEGY = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
OTHER_CP_TYPES = {
    "all_gather": "allgather",
    "adaptive_cp_algo": "p2p",
    "hybrid_adaptive_cp_algo": "a2a+p2p",
    "mamba_cp_algo": "p2p",
}
"""Words of the family for kinds of CP, and of those that no price is for the nearest."""


def job_of(knobs: Knobs, framework: str, form: str, devices: int | None) -> Job:
    """The job that some options describe. InputError for a value that no framework reads; rules that it breaks are findings."""
    model = describe(knobs)
    degrees, assumptions = _degrees(knobs, model, Words(framework))
    findings: list[Finding] = []
    degrees["vpp"] = chunks_of(knobs, model, degrees["pp"], framework, findings)
    if knobs.text("schedule") == "dualpipev":
        degrees["vpp"] = 2  # the schedule's own: the two ends of a V on every stage
    split, listed = split_of(knobs, degrees, model, findings)
    if listed is not None:
        findings += other_chunks(knobs, listed, framework)
        degrees["vpp"] = listed
    schedule = _schedule(knobs, degrees)
    findings += [*_vocabulary(knobs, degrees["tp"], framework), *apart_from_backward(knobs, degrees), *excluded(knobs, framework)]
    findings += dense_stage(knobs, degrees["pp"]) if framework == "mindspeed-llm" else ()
    findings += contradictions(knobs, degrees, model.sizes.get("experts", 0), framework)
    missing = [*lacking(knobs, framework), *undefaulted(knobs, framework)]
    (findings if knobs.parsed and not knobs.holds_more else knobs.told).extend(missing)
    sharding, said = _sharding(knobs, degrees, devices)
    assumptions += [*said, *_assumed(knobs, model, framework), *model.assumptions]
    return Job(
        format=form,
        framework=framework,
        degrees=degrees,
        choices={
            "sequence_parallel": "true" if _sequence_parallel(knobs, degrees, framework) else "false",
            "cp_type": _cp_type(knobs, framework, degrees["cp"], findings),
            "schedule": schedule,
            "optimizer_sharding": sharding,
            "recompute": _recompute(knobs, model, framework, findings),
            "offload": _offload(knobs, model),
            "rank_order": "tp-cp-ep-pp-dp" if knobs.has("rank_order_pp_inside_dp") else "tp-cp-ep-dp-pp",
        },
        exposed=tuple(exposed(knobs)),
        devices=devices,
        global_batch=knobs.whole("global_batch"),
        seq_len=knobs.whole("seq_len"),
        precision=_precision(knobs, findings),
        model=model.model,
        with_vocabulary=model.with_vocabulary,
        sizes=model.sizes,
        split=split,
        stack="megatron-fsdp" if sharding.partition(":")[0] in ("zero2", "zero3", "hsdp") and framework == "megatron-lm" else None,
        stack_changes=stack_changes(knobs, framework),
        written={
            knob: _as_written(knobs.names[knob], values, framework) for knob, values in knobs.values.items() if knob in knobs.names
        },
        findings=tuple(findings),
        doubts=model.doubts,
        advice=tuple(knobs.told),
        assumptions=tuple(assumptions),
        unknown=tuple(knobs.unknown),
        unresolved=tuple(knobs.unresolved),
    )


def _as_written(name: str, values: tuple[str, ...], framework: str) -> str:
    """An option with its values as a shell takes it, or an override."""
    if framework == "megatron-bridge":
        return f"{name}={shlex.quote(' '.join(values)) if values else 'true'}"
    return " ".join((name, *(shlex.quote(shown(value)) for value in values)))


def _degrees(knobs: Knobs, model: Described, speaks: Words) -> tuple[dict[str, int], list[str]]:
    """tp, cp, pp, ep, etp and micro-batch; etp that is not given is tp, as Megatron has it."""
    given = {name: knobs.whole(name) for name in (*DEGREES, "etp")}
    _refuse_unset(knobs)
    degrees = {name: given[name] or 1 for name in DEGREES}
    moe = model.sizes.get("experts", 0) > 0 or (degrees["ep"] > 1 and "experts" not in model.sizes)
    left_out = (name for name in TOLD if given[name] is None)
    said = [f"{name} 1: Megatron's default, as {speaks.flag(name)[0]} is not given" for name in left_out]
    if given["etp"] is None and moe and degrees["tp"] > 1:
        said.append(f"etp {degrees['tp']}: left out, {speaks.flag('etp')[0]} is tp, not 1")
    degrees["etp"] = (given["etp"] or degrees["tp"]) if moe else 1
    if moe and knobs.has(EXTENDS):
        said = [*(each for each in said if not each.startswith("etp ")), *_extended(knobs, degrees)]
    return degrees, said


EXTENDS = "tp_extends_ep"


def _extended(knobs: Knobs, degrees: dict[str, int]) -> Iterator[str]:
    """Spreads experts over the TP ranks too, in place of cutting each (mindspeed/features_manager/moe/tp_extend_ep.py)."""
    option, dispatcher = knobs.names[EXTENDS], knobs.text("dispatcher")
    if dispatcher != "alltoall_seq":
        yield f"{option} does nothing: it works with --moe-token-dispatcher-type alltoall_seq alone; etp is {degrees['etp']}"
        return
    degrees["ep"], degrees["etp"] = degrees["ep"] * degrees["tp"], 1
    if degrees["tp"] > 1:
        yield f"ep {degrees['ep']}, etp 1: {option} spreads experts over {degrees['tp']} TP ranks as well"


def _refuse_unset(knobs: Knobs) -> None:
    """A degree that is given but has no value in the file cannot be taken for its default."""
    for knob in (*DEGREES, "etp", "vpp", "vpp_layers", "layout"):
        if knobs.has(knob) and knobs.text(knob) is None:
            written = " ".join((knobs.names[knob], *knobs.values[knob]))
            name = next((each for each in unresolved(written) if each.isidentifier() or each.isdigit()), None)
            way = f"; give it, as with --set {name}=8" if name else f": {reason_of(written)}"
            raise InputError(f"{knobs.where}: {shown(written)} has no value in the file{way}")


TOLD = ("tp", "pp", "micro_batch")
"""Degrees of which it is told that they are taken for 1."""


def _vocabulary(knobs: Knobs, tp: int, framework: str) -> Iterator[Finding]:
    """A vocabulary whose padded size is given is not padded again, nor is the model's own that Megatron-Bridge is given."""
    own = framework == "megatron-bridge"  # its training loop unsets should_pad_vocab where a size is given
    size = knobs.whole("vocab" if own else "padded_vocab")
    if size is None or size % tp == 0:
        return
    unit = (knobs.whole("vocab_divisor") or 1) * tp
    yield Finding(
        "C023",
        f"tp = {tp} does not divide the {'' if own else 'padded '}vocabulary {size}; {-(-size // unit) * unit} would.",
        "embedding and head are cut over TP ranks",
        "Megatron-Bridge src/megatron/bridge/training/setup.py" if own else "Megatron-LM megatron/training/vocab_utils.py",
    )


def _schedule(knobs: Knobs, degrees: dict[str, int]) -> str:
    if knobs.text("schedule") == "dualpipev":
        return "dualpipev"
    return "interleaved" if degrees["vpp"] > 1 else "1f1b"


def _sequence_parallel(knobs: Knobs, degrees: dict[str, int], framework: str) -> bool:
    """Megatron-LM turns SP off at tp 1, with a warning; Megatron-Core itself, and so Megatron-Bridge, refuses it."""
    wanted = knobs.has("sequence_parallel")
    if wanted and degrees["tp"] == 1 and framework != "megatron-bridge":
        sentence = "--sequence-parallel is given with tp = 1: the framework turns it off, as there is no TP group to shard over."
        knobs.told.append(Finding("C040", sentence, "", ARGUMENTS))
        return False
    return wanted


def _cp_type(knobs: Knobs, framework: str, cp: int, findings: list[Finding]) -> str:
    """The first layer's kind of CP; a job that names one of no framework is judged as with the default, a ring."""
    kinds = [OTHER_CP_TYPES.get(word, word) for word in (knobs.text("cp_type") or "p2p").split()]
    if not (wrong := [kind for kind in kinds if kind not in CP_TYPES]):
        return kinds[0]
    option = knobs.names["cp_type"]
    _, ours = knobs_of(framework).get(option.lstrip("-"), ("", {}))
    theirs = {our: their for their, our in ours.items()}
    sentence = f"{option} {wrong[0]} is not one of {', '.join(theirs.get(kind, kind) for kind in CP_TYPES)}."
    (findings if cp > 1 else knobs.told).append(Finding("C046", sentence, "attention has no such exchange", ARGUMENTS))
    return "p2p"


def _sharding(knobs: Knobs, degrees: dict[str, int], devices: int | None) -> tuple[str, list[str]]:
    if knobs.has("torch_fsdp"):
        return "zero3", []
    if knobs.has("fsdp"):
        strategy = {"zero2": "optim_grads", "zero3": "optim_grads_params"}.get(text := knobs.text("fsdp_strategy") or "", text)
        said = [] if strategy else ["optimizer_sharding zero3: the default of --data-parallel-sharding-strategy"]
        # a word that is none of these is the parser's to refuse (`option_words`)
        sharding = SHARDING_BY_STRATEGY.get(strategy or "", SHARDING_BY_STRATEGY["optim_grads_params"])
        copies = knobs.whole("fsdp_copies") or 1
        shard = (devices or 0) // (degrees["tp"] * degrees["pp"])
        if copies > 1 and shard and shard % copies == 0:
            sharding = f"hsdp:{shard // copies}"
        return sharding, said
    return ("zero1" if knobs.has("zero1") else "none"), []


def _recompute(knobs: Knobs, model: Described, framework: str, findings: list[Finding]) -> str:
    granularity = "selective" if knobs.has("recompute_activations") else knobs.text("recompute")
    method, depth = knobs.text("recompute_method"), knobs.whole("recompute_layers", 0)
    if framework == "mindspeed-llm" and granularity != "full":
        dense = model.sizes.get("experts") == 0
        modules = [module for module, knob in SELECTIVE_FLAGS.items() if knobs.has(knob) and not (dense and module == "moe_act")]
        modules += ["core_attn"] if granularity == "selective" else []
        return f"selective:{'+'.join(modules)}" if modules else "none"
    if granularity == "full":
        if method not in ("uniform", "block") or depth is None:
            missing = "--recompute-method uniform or block" if method not in ("uniform", "block") else "--recompute-num-layers"
            findings.append(Finding("C100", f"full recompute needs {missing}.", "Megatron-Core asks for both", ARGUMENTS))
            return "full"
        if depth == 0 and method == "uniform":
            findings.append(
                Finding("C100", "--recompute-num-layers 0 with --recompute-method uniform.", "a unit has layers", ARGUMENTS)
            )
        if depth == 0:
            return "none"
        return "full" if (method, depth) == ("uniform", 1) else f"full:{method}:{depth}"
    if granularity == "selective":
        if method is not None or depth is not None:
            given = "--recompute-method" if method is not None else "--recompute-num-layers"
            sentence = f"selective recompute takes no {given}; leave it out, or give --recompute-granularity full."
            findings.append(Finding("C100", sentence, "only full recompute is counted in layers", ARGUMENTS))
        words = (knobs.text("recompute_modules") or "core_attn").split()
        known = [word for word in words if word in RECOMPUTE_MODULES]
        for word in (word for word in words if word not in RECOMPUTE_MODULES):
            known_words = ", ".join(get_close_matches(word, RECOMPUTE_MODULES, 1) or RECOMPUTE_MODULES)
            sentence = f"--recompute-modules {word} is no module that recomputes; {known_words} would do."
            findings.append(Finding("C101", sentence, "modules go by name", TRANSFORMER))
        return f"selective:{'+'.join(known)}" if known else "none"
    return "none"


def _offload(knobs: Knobs, model: Described) -> str:
    parts = []
    if knobs.has("optimizer_offload"):
        text = knobs.text("optimizer_offload_fraction") or "1"
        if not re.fullmatch(r"(0(\.\d{0,9})?|1(\.0{0,9})?|\.\d{1,9})", text):
            raise InputError(f"{knobs.where}: --optimizer-offload-fraction {text!r} must be a number from 0 to 1")
        parts += [f"optimizer:{float(text):g}"] if float(text) else []
    layers = knobs.whole("activation_offload_layers", 0)
    if layers and model.sizes.get("layers"):
        parts.append(f"activations:{min(1.0, layers / model.sizes['layers']):g}")
    return "+".join(parts) or "none"


def _precision(knobs: Knobs, findings: list[Finding]) -> str | None:
    for knob, precision in (("fp4", "fp4"), ("fp8", "fp8")):
        if knobs.has(knob):
            return precision
    if knobs.has("bf16") and knobs.has("fp16"):
        findings.append(Finding("C121", "--bf16 and --fp16 are both given; give one.", "they exclude each other", ARGUMENTS))
    return "bf16" if knobs.has("bf16") else "fp16" if knobs.has("fp16") else None


def _assumed(knobs: Knobs, model: Described, framework: str) -> Iterator[str]:
    if not (knobs.has("bf16") or knobs.has("fp16")):
        yield "bf16: neither --bf16 nor --fp16 is given; Megatron would train in fp32, which is not priced"
    if knobs.has("experts") and not knobs.has("dispatcher") and framework != "megatron-bridge":
        yield "the allgather dispatcher: Megatron's default of --moe-token-dispatcher-type"
    if not knobs.has("zero1") and not knobs.has("fsdp") and not knobs.has("torch_fsdp"):
        yield "optimizer states are not sharded: --use-distributed-optimizer is not given"
    if not knobs.has("overlap_gradients"):
        yield "gradient reduction is not overlapped: --overlap-grad-reduce is not given"
    if knobs.has("recompute_in_bubbles"):
        yield "--recompute-in-bubble is not priced: stages keep what pp·vpp passes of chunks save and redo others in bubbles"
    if knobs.has("swap_attention"):
        yield f"{knobs.names['swap_attention']} is priced as if it were not given: attention's activations stay on the device"
    if knobs.has("reuse_fp32"):
        saved = f"{mindspeed_llm().shared_weight_bytes.value:g} bytes per parameter less of optimizer states, sharded as these are"
        yield f"{knobs.names['reuse_fp32']}: FP32 weights share memory with BF16 ones, {saved}"
    if gathers_fp8(knobs, framework):
        option = knobs.names["fp8_parameters"]
        yield f"{option}: all weights are gathered in a byte each; with a copy for the backward pass they take as much as in BF16"
    if knobs.has("recompute_ahead"):
        yield "recompute comes before the gradient where chunks hold one layer; the last layer's is priced, though it is left out"
    if framework == "mindspeed-llm" and not knobs.has("attention_kernel"):
        yield "attention is not fused: --use-flash-attn is not given"
    if framework == "mindspeed-llm" and knobs.has("recompute_activation") and model.sizes.get("experts") == 0:
        option = knobs.names["recompute_activation"]
        yield f"{option} is priced as if it were not given: only experts' activation functions are priced as computed anew"

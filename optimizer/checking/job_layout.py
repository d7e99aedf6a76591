"""A job completed into a layout: what the caller gives, the model, the software, and the stages that the framework would cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.documents import to_record
from ...search_spaces.errors import InputError
from ...search_spaces.inputs import framework_stack, load_model, load_stack
from ...search_spaces.layout import DEGREES, FULL_BLOCK, Layout, Recompute, Split
from ...search_spaces.model import ModelSpec
from ...search_spaces.stack import Stack
from ...search_spaces.vocabulary import V_SHAPED
from ...search_spaces.workload import Precision
from ..readers import Finding, Job, SplitWish
from ..readers.splits import cut, even_counts

MTP_BY_OPTION, MTP_OPTION = ("megatron-lm", "mindspeed-llm", "verl"), "--mtp-num-layers"
"""Formats in which MTP layers of a model are built only where an option asks for them (megatron/training/arguments.py)."""
PRECISIONS: tuple[str, ...] = get_args(Precision)


def in_known_words(job: Job) -> Job:
    """The job without the choices and the precision that no layout has: each is a finding, and judged as if it were not given."""
    wrong = {column: said for column, word in job.choices.items() if (said := _refused(column, word))}
    choices = {column: word for column, word in job.choices.items() if column not in wrong}
    precision = job.precision if job.precision in PRECISIONS else None
    if job.precision is not None and precision is None:
        wrong["precision"] = f"precision {job.precision[:40]!r} is not one of {', '.join(PRECISIONS)}."
    if not wrong:
        return job
    findings = (Finding("P015", said, "a layout knows no other word") for said in wrong.values())
    said = f"{', '.join(wrong)}: judged as if not given"
    return replace(
        job,
        choices=choices,
        precision=precision,
        findings=(*job.findings, *findings),
        assumptions=(*job.assumptions, said),
    )


def _refused(column: str, word: str) -> str:
    """Why a layout cannot have a word, as a sentence; nothing where it can."""
    try:
        Layout.model_validate({"sequence_parallel": False, column: word})
    except ValidationError as error:
        return f"{error.errors()[0]['ctx']['error']}."
    return ""


def filled(job: Job, devices: int | None, batch: int | None, seq_len: int | None, precision: str | None, vocab: int | None) -> Job:
    """The job with what the caller gives, which comes before what the configuration says; differences are told."""
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"precision {precision[:40]!r} is not one of {', '.join(PRECISIONS)}")
    told: list[Finding] = []
    changed: dict[str, Any] = {}
    given: dict[str, Any] = {
        "devices": devices,
        "global_batch": batch,
        "seq_len": seq_len,
        "precision": precision,
        "vocab_size": vocab,
    }
    for name, value in given.items():
        own = getattr(job, name)
        if value is None:
            continue
        if name != "precision" and int(value) < 1:
            raise InputError(f"{name} {value}: must be at least 1")
        changed[name] = value
        if own is not None and own != value:
            told.append(Finding("given", f"{name} {value} is given in place of the configuration's {own}."))
    return replace(job, **changed, advice=(*job.advice, *told))


def with_recipe(job: Job, model: ModelSpec | None) -> tuple[Job, tuple[str, ...]]:
    """(the job, what is not judged of it): where the layers do not divide evenly, its recipe cuts stages in a way of its own."""
    if job.recipe is None or model is None or not job.split.even:
        return job, ()
    pp, vpp = job.degrees.get("pp", 1), job.degrees.get("vpp", 1)
    if even_counts(model.num_layers, pp, vpp) is not None:
        return job, ()
    said = f"stages cut by the planner: the {model.num_layers} layers do not divide evenly, and recipe {job.recipe} may cut its own"
    open_rule = f"C060 needs the stages that recipe {job.recipe} cuts (give model.pipeline_model_parallel_layout)"
    return replace(job, split=SplitWish(free=True), assumptions=(*job.assumptions, said)), (open_rule,)


def model_of(job: Job, given: str | Path | ModelSpec | None) -> ModelSpec | None:
    """The model that is given, or the configuration's own, with the vocabulary that is given where it says none."""
    if given is not None:
        return load_model(given)
    if job.model is not None:
        return job.model
    if job.with_vocabulary is not None and job.vocab_size is not None and job.model_name is None:
        return job.with_vocabulary(job.vocab_size)
    return load_model(job.model_name) if job.model_name is not None else None


def with_asked_mtp(job: Job, model: ModelSpec | None) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """(the model, what is said of it) with the MTP layers that options ask for: without any Megatron builds none."""
    if model is None or model.mtp is None or job.format not in MTP_BY_OPTION:
        return model, ()
    asked = job.sizes.get("mtp_layers", 0)
    if asked == model.mtp.layers or any(MTP_OPTION in each for each in job.unresolved):
        return model, ()
    own = model.model_copy(update={"mtp": model.mtp.model_copy(update={"layers": asked}) if asked else None})
    given = f"{MTP_OPTION} is {asked}" if asked else f"{MTP_OPTION} is not given"
    return own, (f"{asked or 'no'} MTP layers, where {model.name} has {model.mtp.layers}: {given}",)


def stack_of(
    job: Job, cluster: ClusterSpec | None, given: str | Path | Stack | None, framework: str | None, framework_version: str | None
) -> Stack | None:
    """The software: what is given, else the framework that the format is written for, with what the configuration changes of it."""
    if given is not None:
        chosen: Stack | None = load_stack(given)
    elif framework is not None or framework_version is not None:
        named = framework or job.framework
        if named is None:
            raise InputError(f"framework-version: {framework_version} needs a framework beside it")
        chosen = framework_stack(named, framework_version)
    elif job.stack is not None:
        chosen = load_stack(job.stack)
    elif job.problem is not None:
        chosen = job.problem.stack
    elif job.framework is not None:
        chosen = framework_stack(job.framework)
    elif cluster is not None:
        chosen = load_stack(cluster.default_stack)
    else:
        chosen = None
    return _changed(chosen, job.stack_changes) if chosen is not None else None


def _changed(stack: Stack, changes: Mapping[str, Any]) -> Stack:
    """The stack with fields that a configuration sets; of its overlap and footprint with those figures."""
    parts = {name: getattr(stack, name).model_copy(update=changes.get(name, {})) for name in ("overlap", "footprint")}
    return stack.model_copy(update={**changes, **parts})


def laid_out(job: Job, model: ModelSpec | None, stack: Stack | None) -> tuple[Layout, int | None, Split | None, list[Finding]]:
    """(layout, its dp if that can be told, the stages that the framework cuts, what is wrong with them)."""
    degrees = {name: value for name, value in job.degrees.items() if name not in ("dp", "num_microbatches", "edp")}
    dp = job.degrees.get("dp", _following(job, degrees))
    choices = {**_usual(job, degrees.get("vpp", 1), stack), **job.choices}
    stage = degrees.get("tp", 1) * degrees.get("cp", 1)
    experts = degrees.get("ep", 1) * degrees.get("etp", 1)
    each = degrees.get("micro_batch", 1) * (dp or 1)
    layers = model.num_layers if model else job.sizes.get("layers")
    mtp = (model.mtp.layers if model.mtp else 0) if model else job.sizes.get("mtp_layers", 0)
    split: Split | None = None
    wrong: list[Finding] = []
    if layers is not None:
        found = cut(job.split, layers, mtp, degrees.get("pp", 1), degrees.get("vpp", 1), choices["schedule"] in V_SHAPED)
        split, wrong = (found, []) if isinstance(found, Split) else (None, [found] if found else [])
    data = {
        **degrees,
        **choices,
        "dp": dp or 1,
        "edp": max(1, stage * (dp or 1) // experts),
        "num_microbatches": max(1, (job.global_batch or each) // each),
        "overlap": dict.fromkeys(job.exposed, 0.0),
    }
    layout = to_record(Layout, data, f"{job.format} layout")
    if split is not None and layers is not None:
        if len(job.redone) == len(split.counts):
            split = replace(split, redone=tuple(min(pair) for pair in zip(job.redone, split.counts, strict=True)))
        layout = layout.model_copy(update={"recompute": _plain_recompute(layout.recompute, split)})
        layout = layout.model_copy(update={"stages": split.stages(layers, layout.recompute)})
    return layout, dp, split, wrong


def _following(job: Job, degrees: Mapping[str, int]) -> int | None:
    """What tp·cp·pp leave of the devices; None where it is not whole."""
    each = degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("pp", 1)
    return job.devices // each if job.devices is not None and job.devices % each == 0 else None


def _usual(job: Job, vpp: int, stack: Stack | None) -> dict[str, str]:
    """Choices of a format that does not name them."""
    usual = {"schedule": "interleaved" if vpp > 1 else "1f1b", "optimizer_sharding": "zero1", "cp_type": "p2p"}
    if stack is None:
        return usual
    offered = {"schedule": stack.schedules, "optimizer_sharding": stack.optimizer_shardings, "cp_type": stack.cp_types}
    return {name: value if value in offered[name] else offered[name][0] for name, value in usual.items()}


def _plain_recompute(recompute: str, split: Split) -> str:
    """ "full" for a block that is as deep as the fullest chunk."""
    choice = Recompute.parse(recompute)
    whole = choice.mode == FULL_BLOCK and choice.layers >= max(split.counts)
    return "full" if whole else recompute


def given_of(job: Job, layout: Layout, dp: int | None) -> dict[str, int | str]:
    """The layout as far as it is known."""
    found: dict[str, int | str] = {}
    for name in DEGREES:
        follows = name in ("dp", "num_microbatches") and dp is None
        unknown = name == "micro_batch" and name not in job.degrees
        batch = name == "num_microbatches" and (job.global_batch is None or "micro_batch" not in job.degrees)
        if not (follows or unknown or batch):
            found[name] = getattr(layout, name)
    chosen = {
        name: getattr(layout, name) for name in ("cp_type", "schedule", "optimizer_sharding", "recompute", "offload", "rank_order")
    }
    return {**found, "sequence_parallel": "on" if layout.sequence_parallel else "off", **chosen} if job.choices else found

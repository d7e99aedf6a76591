"""A job and all that it is judged by: its model, cluster and stack, its layout, and the rules that bind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.inputs import stands_in
from ...search_spaces.layout import Layout, Split
from ...search_spaces.model import ModelSpec
from ...search_spaces.stack import Stack
from ..readers import Finding, Job, read_job
from .job_layout import laid_out, model_of, stack_of, with_asked_mtp, with_recipe
from .known import Known, known_of
from .legality import left_to_recipe

NARROW = ("fp8", "fp4")
"""Formats of GEMMs that only some devices have; those lack them whose description has no rate for them."""


@dataclass(frozen=True)
class Subject:
    """A job with what it is judged by, None for what is not known.

    `cut_wrong`: why stages cannot be cut as it says; `left_open`: what its recipe may settle; `said`: what it takes for granted.
    """

    job: Job
    model: ModelSpec | None
    cluster: ClusterSpec | None
    stack: Stack | None
    layout: Layout
    dp: int | None
    split: Split | None
    known: Known
    cut_wrong: tuple[Finding, ...]
    left_open: tuple[str, ...]
    said: tuple[str, ...]

    @property
    def without_units(self) -> bool:
        """Whether its devices have no units for the narrow format that its GEMMs are in."""
        return (
            self.cluster is not None
            and self.job.precision in NARROW
            and self.job.precision not in self.cluster.accelerator.peak_flops
        )

    @property
    def beyond_device(self) -> Iterator[Finding]:
        """Formats of GEMMs that its devices lack."""
        if self.cluster is None:
            return
        device, recipe = self.cluster.accelerator, self.job.written.get("fp8_recipe", "")
        if self.without_units:
            sentence = f"{self.job.precision} does not run on {device.name}, which has {', '.join(device.peak_flops)}."
            yield Finding("C122", sentence, "its matrix units have no such format", "TransformerEngine transformer_engine/pytorch")
        elif self.job.precision == "fp8" and recipe.endswith("mxfp8") and device.vendor == "nvidia" and not device.blackwell:
            sentence = f"{recipe} needs Blackwell or later, {device.name} is older; blockwise or tensorwise would do."
            source = "TransformerEngine transformer_engine/pytorch: check_mxfp8_support"
            yield Finding("C122", sentence, "older matrix units do not scale blocks of 32", source)

    @property
    def mtp_layers(self) -> int:
        if self.model is None:
            return self.job.sizes.get("mtp_layers", 0)
        return self.model.mtp.layers if self.model.mtp else 0


def subject_of(
    job: Job,
    model: str | Path | ModelSpec | None,
    cluster: ClusterSpec | None,
    stack: str | Path | Stack | None,
    framework: str | None,
    framework_version: str | None,
) -> Subject:
    """The job with what is given for it, before what it says itself."""
    machine = cluster or (job.problem.cluster if job.problem else None)
    spec, said_of_mtp = with_asked_mtp(job, model_of(job, model))
    software = stack_of(job, machine, stack, framework, framework_version)
    if software is not None and software.framework == job.format:
        job = replace(job, version=software.version)
    job, left_open = with_recipe(job, spec)
    said_of_version = stands_in(software, framework_version) if software is not None else ()
    layout, dp, split, cut_wrong = laid_out(job, spec, software)
    known, unsettled = _settled(known_of(job, layout, dp, split, spec, software, machine), job, bool(left_open))
    said = (*job.assumptions, *said_of_mtp, *said_of_version)
    return Subject(job, spec, machine, software, layout, dp, split, known, tuple(cut_wrong), (*left_open, *unsettled), said)


def _settled(known: Known, job: Job, stages_open: bool) -> tuple[Known, tuple[str, ...]]:
    """Without the rules that the job's recipe may still meet, and what each of those needs."""
    known = replace(known, rules=tuple(rule for rule in known.rules if not stages_open or rule.id != "C060"))
    unsettled = left_to_recipe(known, job)
    known = replace(known, rules=tuple(rule for rule in known.rules if rule.id not in unsettled))
    return known, tuple(f"{rule} needs {', '.join(names)}, which recipe {job.recipe} may set" for rule, names in unsettled.items())


def on_ascend(
    job: Job, machine: ClusterSpec | None, config: str | Path, devices: int | None, variables: Mapping[str, str] | None
) -> Job:
    """A job of Megatron-LM as what runs its script there reads it: Megatron-LM itself runs on GPUs. ms-swift runs on both."""
    if machine is None or machine.accelerator.vendor != "huawei" or job.stack is not None:
        return job
    said = f"run by MindSpeed-LLM: Megatron-LM itself does not run on {machine.accelerator.name}"
    again = read_job(config, form="mindspeed-llm", devices=devices, variables=variables)
    return replace(again, assumptions=(said, *again.assumptions))

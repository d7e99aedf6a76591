"""Predicted beside measured: prices runs as `evaluate` prices a layout, and says how far off that is.

Errors are fractions: |predicted/measured − 1|; bias is the median of log(predicted/measured). Ranks of ties are averaged.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..search_spaces.layout import Floats, LayoutTable
from ..search_spaces.quantities import free_bytes
from .details import MEMORY_TERMS, model_flops
from .memory import GIB, runs_out, verdict
from .profile import Interval, Profile, load_profile
from .run_exclusions import exclusions
from .run_layouts import Job, job_of
from .run_models import Shape, read_shapes
from .run_statistics import POOLS, Statistics, slices, statistics
from .runs import MEASURED, Run, Unpriceable, meaning, read_runs
from .step import CostModel, Rows, same_shape

COMMUNICATORS = MEMORY_TERMS.index("communicators")
HARDWARE_FACTOR = 4.0 / 3.0  # FLOPs of hardware over model where every layer is recomputed: four passes for three


@dataclass(frozen=True)
class Outcome:
    """One row, predicted beside measured; None where the source or the model does not say.

    `predicted_peak_gib` is the figure that the source measured (the first stage's for some), `fullest_gib` that of the fullest
    stage, on which `predicted_oom` rests. Baselines: `documented_s` is the step time with the stack's documented figures, none of
    them fitted, `constant_mfu_s` that of a constant MFU.
    """

    run: Run
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    predicted_peak_gib: float | None = None
    measured_peak_gib: float | None = None
    fullest_gib: float | None = None
    predicted_oom: bool | None = None
    memory_verdict: str | None = None
    skipped: str | None = None
    excluded: tuple[str, ...] = ()
    job: Job | None = None
    mfu_time_s: float | None = None  # step time at an MFU of 1
    constant_mfu_s: float | None = None
    documented_s: float | None = None
    interval: Interval | None = None  # of the step time, as a plan would state it

    def to_json(self) -> dict[str, Any]:
        """The keys of `validate --json`."""
        return {
            "id": self.run.id,
            "split": self.run.split,
            "predicted_step_time_s": self.predicted_step_time_s,
            "measured_step_time_s": self.measured_step_time_s,
            "predicted_peak_gib": self.predicted_peak_gib,
            "measured_peak_gib": self.measured_peak_gib,
            "predicted_oom": self.predicted_oom,
            "memory_verdict": self.memory_verdict,
            "status": self.run.status,
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class Cell:
    """Statistics of one family's rows on one accelerator: a slice of them ("counted", "everything", a stack, …) of one split."""

    family: str
    accelerator: str
    slice: str
    split: str
    statistics: Statistics


@dataclass(frozen=True)
class Validation:
    """All rows in the order of the file, and what they add up to."""

    outcomes: tuple[Outcome, ...]
    cells: tuple[Cell, ...]

    def skipped(self, family: str) -> dict[str, int]:
        """Reasons why rows of a family were not priced, and how many."""
        return dict(Counter(o.skipped for o in self.outcomes if o.run.family == family and o.skipped).most_common())

    def excluded(self, family: str) -> dict[str, int]:
        """Rules under which priced rows of a family are not counted, and how many."""
        return dict(Counter(rule for o in self.outcomes if o.run.family == family for rule in o.excluded).most_common())

    def pools(self) -> list[tuple[str, str, Statistics]]:
        """Statistics of families that share hardware and kind of model: (pool, split, statistics)."""
        found = []
        for pool in POOLS:
            members = [o for o in self.outcomes if pool.holds(o)]
            for split in dict.fromkeys(o.run.split for o in members):
                found.append((pool.name, split, statistics([o for o in members if o.run.split == split])))
        return found

    def coverage(self) -> list[tuple[str, str, int, int]]:
        """How many counted rows lie inside their stated interval, of how many: (pool, split, inside, rows)."""
        found = []
        for name, members in [
            ("all rows", list(self.outcomes)),
            *((p.name, [o for o in self.outcomes if p.holds(o)]) for p in POOLS),
        ]:
            for split in ("fit", "test"):
                inside = [
                    o.interval.low <= o.measured_step_time_s / o.predicted_step_time_s <= o.interval.high
                    for o in members
                    if o.run.split == split and not o.excluded and o.interval and o.predicted_step_time_s and o.measured_step_time_s
                ]
                if inside:
                    found.append((name, split, sum(inside), len(inside)))
        return found

    def worst(self, of_each: int) -> list[Outcome]:
        """Of every family, the counted rows whose step time is predicted worst, by the ratio of the two."""

        def off(outcome: Outcome) -> float:
            return abs(math.log((outcome.predicted_step_time_s or 1.0) / (outcome.measured_step_time_s or 1.0)))

        timed = [o for o in self.outcomes if not o.excluded and o.predicted_step_time_s and o.measured_step_time_s]
        ranked = sorted(timed, key=off, reverse=True)
        return [o for family in self.families for o in [r for r in ranked if r.run.family == family][:of_each]]

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(outcome.run.family for outcome in self.outcomes))

    def to_json(self) -> str:
        """The document of `validate --json`."""
        families: dict[str, Any] = {}
        for family in self.families:
            accelerators: dict[str, Any] = {}
            for cell in self.cells:
                if cell.family == family:
                    accelerators.setdefault(cell.accelerator, {}).setdefault(cell.slice, {})[cell.split] = cell.statistics.to_json()
            families[family] = {"accelerators": accelerators, "skipped": self.skipped(family), "excluded": self.excluded(family)}
        return json.dumps({"rows": [o.to_json() for o in self.outcomes], "families": families}, allow_nan=False, ensure_ascii=False)


Progress = Callable[[float], None]


def validate(path: Path, profile: str | None = None, progress: Progress | None = None) -> Validation:
    """Prices every row of a CSV of measured runs; shapes come from models.json beside it.

    `profile` is a YAML laid over each accelerator's own curves; `progress` is told the share of rows done. InputError for a file
    that is not a table of runs.
    """
    runs = read_runs(path)
    return summarize(outcomes_of(runs, read_shapes(path.parent / "models.json"), profile, progress))


def outcomes_of(
    runs: Sequence[Run], shapes: Mapping[str, Shape], profile: str | None = None, progress: Progress | None = None
) -> list[Outcome]:
    """Every run priced, or with the reason why not, in order."""
    found, batches = _jobs(runs, shapes)
    waiting = total = sum(len(places) for places in batches.values())
    for places in batches.values():
        for place, outcome in zip(places, _priced([found[place] for place in places], profile), strict=True):
            found[place] = outcome
        waiting -= len(places)
        if progress is not None:
            progress(1.0 - waiting / total)
    return _with_constant_mfu(found)


def measured_of(runs: Sequence[Run], shapes: Mapping[str, Shape]) -> list[Outcome]:
    """Every run with its job and what was measured, or with the reason why it cannot be priced, in order; no prices."""
    found, batches = _jobs(runs, shapes)
    for places in batches.values():
        job = found[places[0]].job
        assert job is not None
        layers = CostModel(job.problem, profile_of(job.curves, job.gemm_curve, None)).layers
        flops = tuple(each * job.problem.workload.global_batch for each in model_flops(layers))
        for place in places:
            seconds = _measured_step_s(found[place].job or job, (flops[0], flops[1]))
            found[place] = replace(found[place], measured_step_time_s=seconds)
    return found


def _jobs(runs: Sequence[Run], shapes: Mapping[str, Shape]) -> tuple[list[Outcome], dict[tuple[object, ...], list[int]]]:
    """Runs as jobs, unpriced, and the places of those that share a problem."""
    found: list[Outcome] = []
    batches: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        try:
            for column in MEASURED:
                run.measure(column)
            job = job_of(run, shapes)
            found.append(Outcome(run, job=job, excluded=exclusions(job), measured_peak_gib=run.measure("measured_peak_mem_gib")))
            batches[problem_key(job)].append(place)
        except Unpriceable as reason:
            found.append(Outcome(run, skipped=str(reason), measured_step_time_s=_printed_step_s(run)))
    return found, batches


def summarize(outcomes: Sequence[Outcome]) -> Validation:
    """Statistics per family, accelerator, slice and split."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.run.family, outcome.run.accelerator].append(outcome)
    cells = [
        Cell(family, accelerator, name, split, statistics([o for o in members if o.run.split == split]))
        for (family, accelerator), every in rows.items()
        for name, members in slices(every)
        for split in dict.fromkeys(o.run.split for o in members)
    ]
    return Validation(tuple(outcomes), tuple(cells))


def problem_key(job: Job) -> tuple[object, ...]:
    """What jobs that are priced together share. Models, clusters and stacks are kept objects: their identity stands for them."""
    problem = job.problem
    return (
        *(id(part) for part in (problem.model, problem.cluster, problem.stack)),
        problem.devices,
        problem.workload.model_dump_json(),
        job.curves,
        job.gemm_curve,
    )


@cache
def profile_of(accelerator: str, gemm_curve: str, path: str | None, fits: bool = True) -> Profile:
    """A profile whose FP8 curve is that of the run's recipe, where it has one."""
    profile = load_profile(accelerator, path, fits)
    if gemm_curve != "fp8_tensor" or gemm_curve not in profile.gemm:
        return profile
    return profile.model_copy(update={"gemm": {**profile.gemm, "fp8": profile.gemm[gemm_curve]}})


def _priced(outcomes: Sequence[Outcome], path: str | None) -> list[Outcome]:
    """Outcomes that share a problem, priced in one table."""
    jobs = [outcome.job for outcome in outcomes if outcome.job is not None]
    problem = jobs[0].problem
    curves, table = profile_of(jobs[0].curves, jobs[0].gemm_curve, path), LayoutTable.from_layouts([job.layout for job in jobs])
    model = CostModel(problem, curves)
    rows = model.rows(table)
    step_s = model.price_rows(rows).step_time_s
    documented_s = CostModel(problem, curves.model_copy(update={"stacks": {}, "pooled": {}})).price(table).step_time_s
    flops = tuple(each * problem.workload.global_batch for each in model_flops(model.layers))
    free = free_bytes(problem.cluster) / GIB
    interval = curves.interval(problem.stack.name, problem.cluster.accelerator.name, problem.model.is_moe)
    found = []
    for place, (outcome, job, stages) in enumerate(zip(outcomes, jobs, _stage_peaks_gib(model, rows), strict=True)):
        fullest = float(stages.sum(axis=0).max())
        found.append(
            replace(
                outcome,
                predicted_step_time_s=float(step_s[place]),
                documented_s=float(documented_s[place]),
                interval=interval,
                measured_step_time_s=_measured_step_s(job, (flops[0], flops[1])),
                predicted_peak_gib=_as_measured_gib(job, stages),
                fullest_gib=fullest,
                predicted_oom=runs_out(problem, fullest * GIB),
                memory_verdict=verdict(fullest, free),
                mfu_time_s=flops[0] / (problem.devices * problem.cluster.accelerator.peak_flops[problem.workload.precision].value),
            )
        )
    return found


def _stage_peaks_gib(model: CostModel, rows: Rows) -> list[Floats]:
    """Peak of every stage by term (terms, pp) of every row."""
    found: list[Floats] = [np.zeros(0)] * len(rows)
    for members in same_shape(rows.table):
        part = rows.take(members)
        cuts = np.array([part.table.splits[int(index)].cuts for index in part.table.split])
        peaks = model.stage_peaks(part, part.prefix.chunks(cuts)) / GIB
        for place, row in enumerate(members):
            found[row] = peaks[:, place]
    return found


def _as_measured_gib(job: Job, stages: Floats) -> float:
    """The figure that the source measured, from bytes by term and stage (terms, pp).

    NCCL and HCCL take their buffers from the device themselves: the framework's allocator does not count them.
    """
    how, where = job.memory.split()
    buffers = stages[COMMUNICATORS]
    peaks = stages.sum(axis=0) - buffers
    if how != "allocated":
        peaks = peaks * job.problem.stack.reserved_over_allocated.value
    if how == "device":
        peaks = peaks + buffers + job.problem.cluster.context_bytes.value / GIB
    return float(peaks[0] if where == "first" else peaks.max())


def _printed_step_s(run: Run) -> float | None:
    """Step time as printed, for rows that cannot be priced."""
    try:
        return run.measure("measured_step_time_s")
    except Unpriceable:
        return None


def _measured_step_s(job: Job, flops: tuple[float, float]) -> float | None:
    """Step time as printed, or from tokens/s, or from TFLOP/s or MFU by the family's own FLOP formula; None where none is usable.

    `flops`: model FLOPs of one step with causal attention halved, and counted whole.
    """
    run, problem = job.run, job.problem
    if run.status != "ok":
        return None
    try:
        if seconds := run.number("measured_step_time_s"):
            return seconds
        tokens = problem.workload.global_batch * problem.workload.seq_len
        if speed := run.number("measured_tokens_per_s_per_device"):
            return tokens / (speed * problem.devices)
        rate = (run.number("measured_tflops_per_device") or 0.0) * 1e12
        if not rate:
            peak = problem.cluster.accelerator.peak_flops[problem.workload.precision].value
            rate = (run.number("measured_mfu") or 0.0) * peak
        if not rate:
            return None
        words = meaning("flops", run.text("flops_convention") or run.family).split()
    except Unpriceable:
        return None
    counted = flops[1] if words[0] == "whole" else flops[0]
    recomputed = HARDWARE_FACTOR if "hardware" in words and job.layout.recompute.startswith("full") else 1.0
    return counted * recomputed / (rate * problem.devices)


def _with_constant_mfu(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Adds the baseline: the median MFU of the family's fit rows on the accelerator at the precision, for every row alike."""
    seen: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for o in outcomes:
        if o.run.split == "fit" and not o.excluded and o.mfu_time_s and o.measured_step_time_s:
            seen[_mfu_key(o)].append(o.mfu_time_s / o.measured_step_time_s)
    medians = {key: float(np.median(values)) for key, values in seen.items()}
    return [
        replace(o, constant_mfu_s=o.mfu_time_s / medians[_mfu_key(o)]) if o.mfu_time_s and _mfu_key(o) in medians else o
        for o in outcomes
    ]


def _mfu_key(outcome: Outcome) -> tuple[str, str, str]:
    precision = outcome.job.problem.workload.precision if outcome.job else ""
    return outcome.run.family, outcome.run.accelerator, precision

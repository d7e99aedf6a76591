"""Predicted beside measured: prices runs as `evaluate` prices a layout, and says how far off that is.

Errors are fractions: |predicted/measured − 1|; bias is the median of log(predicted/measured). Ranks of ties are averaged.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..search_spaces.errors import InputError
from ..search_spaces.layout import Floats, LayoutTable
from ..search_spaces.quantities import free_bytes
from .details import model_flops
from .memory import GIB, runs_out, verdict
from .profile import Interval, Profile, load_profile
from .rows import Rows
from .run_clusters import device_of, placed
from .run_exclusions import BEYOND_PEAK, REASONS, REPEATED, exclusions
from .run_files import read_runs
from .run_layouts import Job, job_of, with_one_stack_each
from .run_measures import as_measured_gib, implied_mfu, odd_figures, peak_gib, printed_step_s, refuse_unmeasured, step_time_s
from .run_models import Shape, read_shapes
from .run_statistics import POOLS, Ended, Statistics, ended, median_interval, slices, statistics
from .runs import Run, Unpriceable
from .step import CostModel, same_shape

UNREADABLE = (InputError, ValueError, ArithmeticError)
"""What a row's figures can lead to that is no fault of the other rows; Unpriceable is among them."""


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
    notes: tuple[str, ...] = ()  # what was assumed of the row, or is odd about it: "what: which"

    @property
    def why_not_counted(self) -> str | None:
        """Why no statistic rests on the row; None where one does."""
        if self.skipped or self.excluded:
            return self.skipped or "; ".join(f"{rule}: {REASONS[rule]}" for rule in self.excluded)
        if self.measured_step_time_s or self.run.status in ("ok", "oom"):
            return None
        return f"nothing to compare with: status {self.run.status}"

    @property
    def interval_s(self) -> list[float] | None:
        """Low and high of the step time in seconds."""
        if self.interval is None or self.predicted_step_time_s is None:
            return None
        return [self.predicted_step_time_s * self.interval.low, self.predicted_step_time_s * self.interval.high]

    def to_json(self) -> dict[str, Any]:
        """The keys of `validate --json`; stack and accelerator are the catalog's, None where the row was not priced."""
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
            "counted": self.why_not_counted is None,
            "why_not_counted": self.why_not_counted,
            "stack": self.job.problem.stack.name if self.job else None,
            "accelerator": self.job.problem.cluster.accelerator.name if self.job else None,
            "interval": self.interval_s,
            "notes": list(self.notes),
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

    def ended(self) -> list[tuple[str, Ended]]:
        """Of every family whose rows say whether they ran, how well that was told, whatever else they are: (family, verdicts)."""
        found = [(family, ended([o for o in self.outcomes if o.run.family == family])) for family in self.families]
        return [(family, verdicts) for family, verdicts in found if verdicts.rows]

    def pools(self) -> list[tuple[str, str, Statistics, tuple[float, float] | None]]:
        """Statistics of families that share hardware and kind of model, and their median's interval: (pool, split, …)."""
        found = []
        for pool in POOLS:
            members = [o for o in self.outcomes if pool.holds(o)]
            for split in dict.fromkeys(o.run.split for o in members):
                part = [o for o in members if o.run.split == split]
                found.append((pool.name, split, statistics(part), median_interval(part)))
        return found

    def coverage(self) -> list[tuple[str, str, int, int, float]]:
        """Counted rows inside their stated interval, of how many, and its median reach: (pool, split, inside, rows, high − 1)."""
        found = []
        for name, members in [
            ("all rows", list(self.outcomes)),
            *((p.name, [o for o in self.outcomes if p.holds(o)]) for p in POOLS),
        ]:
            for split in ("fit", "test"):
                stated = [
                    (o.interval, o.measured_step_time_s / o.predicted_step_time_s)
                    for o in members
                    if o.run.split == split and not o.excluded and o.interval and o.predicted_step_time_s and o.measured_step_time_s
                ]
                if stated:
                    inside = sum(interval.low <= ratio <= interval.high for interval, ratio in stated)
                    width = float(np.median([interval.high - 1.0 for interval, _ in stated]))
                    found.append((name, split, inside, len(stated), width))
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
        verdicts = dict(self.ended())
        for family in self.families:
            accelerators: dict[str, Any] = {}
            for cell in self.cells:
                if cell.family == family:
                    accelerators.setdefault(cell.accelerator, {}).setdefault(cell.slice, {})[cell.split] = cell.statistics.to_json()
            families[family] = {
                "accelerators": accelerators,
                "out_of_memory": asdict(verdicts[family]) if family in verdicts else None,
                "skipped": self.skipped(family),
                "excluded": self.excluded(family),
            }
        return json.dumps({"rows": [o.to_json() for o in self.outcomes], "families": families}, allow_nan=False, ensure_ascii=False)


Progress = Callable[[float], None]


def validate(path: Path, profile: str | None = None, progress: Progress | None = None, cluster: str | None = None) -> Validation:
    """Prices every row of a CSV of measured runs; shapes come from models.json beside it.

    `profile` is a YAML laid over each accelerator's own curves; `progress` is told the share of rows done; `cluster` is where rows
    ran that name no cluster. InputError for a file that is not a table of runs.
    """
    runs = placed(read_runs(path, located=cluster is not None), path.parent, cluster)
    runs = runs if profile is None else with_one_stack_each(runs)  # as a site learns them
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
        try:
            flops = _flops(CostModel(job.problem, profile_of(job.accelerator, job.gemm_curve, None)))
            timed = [_with_measured(found[place], flops) for place in places]
        except UNREADABLE as error:
            timed = [_refused(found[place], _reason(error)) for place in places]
        for place, outcome in zip(places, timed, strict=True):
            found[place] = outcome
    return found


def _jobs(runs: Sequence[Run], shapes: Mapping[str, Shape]) -> tuple[list[Outcome], dict[tuple[object, ...], list[int]]]:
    """Runs as jobs, unpriced, and the places of those that share a problem."""
    found: list[Outcome] = []
    batches: dict[tuple[object, ...], list[int]] = defaultdict(list)
    first: dict[str, Run] = {}
    for place, run in enumerate(runs):
        twin = first.setdefault(run.id, run)
        again = () if twin is run else ("id is given to more than one row",)
        notes = (*run.notes, *odd_figures(run), *again)
        try:
            refuse_unmeasured(run)
            job = job_of(run, shapes)
            rules = (*exclusions(job), *([REPEATED] if again and run.cells == twin.cells else []))
            peak, of_peak = peak_gib(job)
            said = (*notes, *job.notes, *of_peak)
            found.append(Outcome(run, job=job, excluded=rules, measured_peak_gib=peak, notes=said))
            batches[problem_key(job)].append(place)
        except UNREADABLE as error:
            found.append(Outcome(run, skipped=_reason(error), measured_step_time_s=printed_step_s(run), notes=notes))
    return found, batches


def _flops(model: CostModel) -> tuple[float, float]:
    """Model FLOPs of a step, with causal attention halved and whole."""
    halved, whole = model_flops(model.layers)
    batch = model.problem.workload.global_batch
    return halved * batch, whole * batch


def _with_measured(outcome: Outcome, flops: tuple[float, float]) -> Outcome:
    """The outcome with what its run took, and whether a device can be as fast."""
    job = outcome.job
    assert job is not None
    seconds, notes = step_time_s(job, flops)
    mfu, odd = implied_mfu(job, seconds or 1.0, flops[0])
    beyond = seconds is not None and mfu > 1.0
    return replace(
        outcome,
        measured_step_time_s=seconds,
        mfu_time_s=mfu * (seconds or 1.0),
        excluded=(*outcome.excluded, *([BEYOND_PEAK] if beyond else [])),
        notes=(*outcome.notes, *notes, *(odd if seconds else ())),
    )


def summarize(outcomes: Sequence[Outcome]) -> Validation:
    """Statistics per family, accelerator (in the commonest spelling), slice and split."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.run.family, device_of(outcome.run)].append(outcome)
    cells = [
        Cell(family, _spelling(every), name, split, statistics([o for o in members if o.run.split == split]))
        for (family, _), every in rows.items()
        for name, members in slices(every)
        for split in dict.fromkeys(o.run.split for o in members)
    ]
    return Validation(tuple(outcomes), tuple(cells))


def _spelling(outcomes: Sequence[Outcome]) -> str:
    """The accelerator as most of the rows write it that have the same one."""
    words = Counter(o.run.text("accelerator") or device_of(o.run) for o in outcomes)
    return words.most_common(1)[0][0]


def problem_key(job: Job) -> tuple[object, ...]:
    """What jobs that are priced together share. Models, clusters and stacks are kept objects: their identity stands for them."""
    problem = job.problem
    return (
        *(id(part) for part in (problem.model, problem.cluster, problem.stack)),
        problem.devices,
        problem.workload.model_dump_json(),
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
    """Outcomes that share a problem, priced in one table; where that fails each alone, so that no row takes others with it."""
    first = outcomes[0].job
    assert first is not None
    curves = profile_of(first.accelerator, first.gemm_curve, path)
    try:
        priced = _with_prices(outcomes, CostModel(first.problem, curves), curves)
    except (*UNREADABLE, MemoryError) as error:
        if len(outcomes) > 1:
            return [one for outcome in outcomes for one in _priced([outcome], path)]
        return [_refused(outcomes[0], _reason(error))]
    return [each if _finite(each) else _refused(each, "sizes beyond what can be priced") for each in priced]


def _reason(error: Exception) -> str:
    """Why a row is not priced: the reason as it was found, or what its figures led to."""
    return str(error) if isinstance(error, (Unpriceable, InputError)) else f"cannot be priced: {error or type(error).__name__}"


def _refused(outcome: Outcome, reason: str) -> Outcome:
    return Outcome(outcome.run, skipped=reason, measured_step_time_s=printed_step_s(outcome.run), notes=outcome.notes)


def _finite(outcome: Outcome) -> bool:
    figures = (outcome.predicted_step_time_s, outcome.documented_s, outcome.predicted_peak_gib, outcome.fullest_gib)
    return all(figure is not None and math.isfinite(figure) and figure > 0 for figure in figures)


def _with_prices(outcomes: Sequence[Outcome], model: CostModel, curves: Profile) -> list[Outcome]:
    """The outcomes, whose problem the model has, with what was measured and what is predicted."""
    jobs = [outcome.job for outcome in outcomes if outcome.job is not None]
    problem, table = jobs[0].problem, LayoutTable.from_layouts([job.layout for job in jobs])
    rows = model.rows(table)
    step_s = model.price_rows(rows).step_time_s
    documented_s = CostModel(problem, curves.model_copy(update={"stacks": {}, "pooled": {}})).price(table).step_time_s
    flops, free = _flops(model), free_bytes(problem.cluster) / GIB
    found = []
    for place, (outcome, job, stages) in enumerate(zip(outcomes, jobs, _stage_peaks_gib(model, rows), strict=True)):
        fullest = float(stages.sum(axis=0).max())
        found.append(
            replace(
                _with_measured(outcome, flops),
                predicted_step_time_s=float(step_s[place]),
                documented_s=float(documented_s[place]),
                interval=_interval(job, curves),
                predicted_peak_gib=as_measured_gib(job, stages),
                fullest_gib=fullest,
                predicted_oom=runs_out(problem, fullest * GIB),
                memory_verdict=verdict(fullest, free),
            )
        )
    return found


def _interval(job: Job, curves: Profile) -> Interval:
    """Of the run's stack; where that is guessed, of stacks that nobody measured, unless a profile was learnt under that guess."""
    asked = (job.problem.stack.name, job.accelerator, job.problem.model.is_moe)
    stated = curves.interval(*asked)
    if job.stack_told or stated != profile_of(job.accelerator, job.gemm_curve, None).interval(*asked):
        return stated
    return curves.unmeasured_interval(*asked)


def _stage_peaks_gib(model: CostModel, rows: Rows) -> list[Floats]:
    """Peak of every stage by term (terms, pp) of every row."""
    found: list[Floats] = [np.zeros(0)] * len(rows)
    for members in same_shape(rows.table):
        part = rows.take(members)
        cuts = np.array([part.table.splits[int(index)].cuts for index in part.table.split])
        peaks = model.stage_peaks(part, model.flow(part, cuts).load) / GIB
        for place, row in enumerate(members):
            found[row] = peaks[:, place]
    return found


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
    return outcome.run.family, device_of(outcome.run), precision

"""Measured runs with pipelines, predicted by the schedule and by the simplest formula for its bubble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

from paraplan.cost_models.details import Detail, detail
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.schedules import stage_chunks
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.validation import Outcome, outcomes_of, profile_of
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown

FAMILIES = ("korthikanti", "bridge-studies", "mcore-moe", "megatron-bridge")
SHOWN_WHOLE = ("korthikanti", "bridge-studies", "mcore-moe")
"""Families whose every row is shown."""


@dataclass(frozen=True)
class Compared:
    """A run's step: measured, by the schedule, by (p−1)/(v·m) of the mean stage and of the longest."""

    outcome: Outcome
    measured_s: float
    schedule_s: float
    mean_s: float
    longest_s: float

    def error(self, predicted_s: float) -> float:
        return predicted_s / self.measured_s - 1.0


Predicted = Callable[[Compared], float]
WAYS: dict[str, Predicted] = {
    "schedule": lambda one: one.schedule_s,
    "formula, mean stage": lambda one: one.mean_s,
    "formula, longest stage": lambda one: one.longest_s,
}


def measured_bubbles(path: Path) -> str:
    """The section on measured runs; `path` is the table of runs, its models.json beside it."""
    runs = [run for run in read_runs(path) if run.family in FAMILIES]
    found = [one for outcome in outcomes_of(runs, read_shapes(path.parent / "models.json")) if (one := _compared(outcome))]
    rows = [_row(one) for one in found if one.outcome.run.family in SHOWN_WHOLE]
    return f"""## Measured runs

Rows of the table of measured runs that have a pipeline and a step time that counts. schedule: the step as it is priced. formula:
m·t·(1 + (p − 1)/(v·m)) with the same stage times, gradients and optimizer after it, where t is the mean or the longest stage's
forward and backward of a micro-batch. Some rows are among those that the stack's figures were fitted to (`fit`), with the schedule:
that favours it; `test` rows are not.

{markdown(("run", "split", "p", "v", "m", "measured", *WAYS), rows)}

Median and largest error |predicted/measured − 1|, and the median of log(predicted/measured) behind them:

{markdown(("rows of", "rows", *WAYS), _summary(found))}

{_conclusion(found)}
"""


def _compared(outcome: Outcome) -> Compared | None:
    """The run with all predictions; None where it has no pipeline, no step or does not count."""
    job, measured, predicted = outcome.job, outcome.measured_step_time_s, outcome.predicted_step_time_s
    if job is None or outcome.why_not_counted or not measured or not predicted or job.layout.pp == 1:
        return None
    found = detail(CostModel(job.problem, profile_of(job.accelerator, job.gemm_curve, None)), job.layout)
    layout, stages = job.layout, _stage_s(outcome, found)
    slots = layout.num_microbatches + (layout.pp - 1) / layout.vpp
    after = float(found.reduced_s.max()) + found.after_s
    mean, longest = sum(stages) / len(stages), max(stages)
    return Compared(outcome, measured, predicted, slots * mean + after, slots * longest + after)


def _stage_s(outcome: Outcome, found: Detail) -> list[float]:
    """Forward and backward of one micro-batch on every stage."""
    assert outcome.job is not None
    layout, work = outcome.job.layout, found.passes.forward_s + found.passes.backward_s
    return [float(each) for each in work[stage_chunks(layout.schedule, layout.pp, layout.vpp)].sum(axis=0)]


def _row(one: Compared) -> tuple[str, ...]:
    run = one.outcome.run
    assert one.outcome.job is not None
    layout = one.outcome.job.layout
    degrees = (str(layout.pp), str(layout.vpp), str(layout.num_microbatches))
    errors = (wording.signed(wording.percent(one.error(way(one)))) for way in WAYS.values())
    return (run.id, run.split, *degrees, wording.seconds(one.measured_s), *errors)


def _groups(found: Sequence[Compared]) -> dict[str, list[Compared]]:
    def few(one: Compared) -> bool:
        assert one.outcome.job is not None
        layout = one.outcome.job.layout
        return layout.num_microbatches < 4 * layout.pp

    split = {name: [one for one in found if one.outcome.run.split == name] for name in ("fit", "test")}
    families = {name: [one for one in found if one.outcome.run.family == name] for name in FAMILIES}
    interleaved = [one for one in found if one.outcome.job and one.outcome.job.layout.vpp > 1]
    return {
        **families,
        "all": list(found),
        **{f"all, {name}": rows for name, rows in split.items()},
        "interleaved": interleaved,
        "fewer than 4 micro-batches a stage": [one for one in found if few(one)],
    }


def _summary(found: Sequence[Compared]) -> list[tuple[str, ...]]:
    lines = []
    for name, rows in _groups(found).items():
        if rows:
            lines.append((name, str(len(rows)), *(_errors(rows, way) for way in WAYS.values())))
    return lines


def _errors(rows: Sequence[Compared], way: Predicted) -> str:
    errors = [abs(one.error(way(one))) for one in rows]
    bias = median(log(way(one) / one.measured_s) for one in rows)
    return f"{median(errors):.1%}, {max(errors):.0%}, {bias:+.2f}"


def _conclusion(found: Sequence[Compared]) -> str:
    """Which way is nearest, over all rows and the test rows, and where it matters."""
    said = []
    for name, rows in _groups(found).items():
        if name in ("all", "all, test", "fewer than 4 micro-batches a stage") and rows:
            middle = {way: median(abs(one.error(predict(one))) for one in rows) for way, predict in WAYS.items()}
            said.append(f"{name}: nearest is {min(middle, key=lambda way: middle[way])}")
    off = median(abs(one.error(one.schedule_s)) for one in found)
    parts = []
    for way in ("mean_s", "longest_s"):
        apart = [abs(log(getattr(one, way) / one.schedule_s)) for one in found]
        hidden = "less" if median(apart) < off else "more"
        parts.append(
            f"with the {way.removesuffix('_s')} stage it differs from the schedule by {median(apart):.1%} in the median and "
            f"{max(apart):.1%} at most, {hidden} than the schedule is off from what was measured ({off:.1%})"
        )
    return (
        f"By median error, {'; '.join(said)}. Of the formula: {'; '.join(parts)}. What it misses is that stages are not "
        "equal; told the longest one it misses little on runs whose micro-batches are many and whose stages were balanced by hand. "
        "It cannot say how to balance them, and has no word for messages between stages."
    )

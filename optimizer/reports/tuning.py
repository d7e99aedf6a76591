"""A tuning study as a person reads it: the next layout to run, runs beside their predictions, what they taught, whether to stop."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import to_json
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...cost_models.memory import GIB
from ...search_spaces.layout import RANK_ORDERS, Layout
from ...search_spaces.quantities import MIB, free_bytes
from ..result import Plan
from ..tune import CALIBRATED_FROM, LEAST_TO_STOP, STOP, Lessons, Standing
from ..tuning_study import Proposal, Subject
from . import wording
from .calibration import figure_lines

INDENT = (0, 0, 0, 2)
DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")
USUAL = {"recompute": "none", "optimizer_sharding": "zero1", "offload": "none", "rank_order": RANK_ORDERS[0]}
NAMES = {"optimizer_sharding": "sharding", "rank_order": "order"}


def layout_words(layout: Layout) -> str:
    """The layout in one line, without what is usual."""
    degrees = [f"{name} {getattr(layout, name)}" for name in DEGREES if getattr(layout, name) > 1]
    micro = f"micro-batch {layout.micro_batch} × {layout.num_microbatches:,}"
    choices = [
        f"{NAMES.get(name, name)} {getattr(layout, name)}" for name, usual in USUAL.items() if getattr(layout, name) != usual
    ]
    schedule = [] if layout.schedule in ("1f1b", "interleaved") else [layout.schedule]
    cp_type = [f"cp type {layout.cp_type}"] if layout.cp > 1 else []
    return " · ".join([*degrees, micro, *schedule, *cp_type, *choices])


def render_proposal(study: str, storage: str, proposal: Proposal, plan: Plan, console: Console) -> None:
    """The next layout to run, what is predicted, and how to take the result back."""
    priced, problem = plan.plan, plan.problem
    low, high = priced.step_time_interval_s
    _title(
        console,
        f"Trial {proposal.number} of {study}: {problem.model.name} on {problem.devices:,} × {problem.cluster.accelerator.name}",
    )
    _say(console, layout_words(proposal.layout))
    expected = f"predicted: {wording.seconds(priced.step_time_s)} a step"
    if proposal.gain is not None:
        model = wording.seconds(priced.step_time_s)
        expected = f"expected after the runs so far: {wording.seconds(proposal.predicted_s)} a step; by the model alone {model}"
    _say(
        console,
        f"{expected} ({wording.interval(low, high)}), peak "
        f"{wording.gib(priced.memory.peak_gib)} of {wording.gib(free_bytes(problem.cluster) / GIB)} free ({priced.memory.verdict})",
    )
    why = "the fastest predicted that was not proposed before"
    if proposal.gain is not None:
        gain = wording.percent(proposal.gain)
        why = f"largest expected improvement: {gain} of the best so far, counting a slower run as none"
    _say(console, f"why: {why}")
    name, place = shlex.quote(study), shlex.quote(storage)
    _say(
        console,
        f"then: paraplan tune tell --study {name} --storage {place} --trial {proposal.number} --step-time S | --oom | --failed",
    )


def render_standing(study: str, found: Standing, console: Console) -> None:
    """Best so far, all proposals, what was learnt, and whether to stop."""
    problem = found.subject.problem
    _title(console, f"{study}: {problem.model.name} on {problem.devices:,} × {problem.cluster.accelerator.name}")
    if found.best is not None and found.best.measured_s:
        _say(console, f"best so far: trial {found.best.number}, {wording.seconds(found.best.measured_s)} a step")
        _say(console, layout_words(found.best.layout))
    render_list(found.proposals, console)
    _title(console, "Learnt")
    for line in lessons_lines(found.subject, found.lessons):
        _say(console, line)
    _say(console, advice(found))


def render_list(proposals: Sequence[Proposal], console: Console) -> None:
    """All proposals: what was predicted beside what came of them."""
    if not proposals:
        _say(console, "no proposals yet")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("trial", "predicted", "measured", "peak / run, GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for one in proposals:
        table.add_row(str(one.number), wording.seconds(one.predicted_s), _outcome(one), _peak(one), layout_words(one.layout))
    _print(console, Padding(table, (1, 0, 0, 2)))


def told(subject: Subject, proposal: Proposal, lessons: Lessons) -> list[str]:
    """What a result says beside its prediction, and what all results have taught by now."""
    head = f"trial {proposal.number}: {_outcome(proposal)}, predicted {wording.seconds(proposal.predicted_s)}"
    if proposal.measured_s:
        head += f" ({wording.change(proposal.measured_s / proposal.predicted_s - 1.0)})"
    return [head, *(f"  {line}" for line in lessons_lines(subject, lessons))]


def lessons_lines(subject: Subject, lessons: Lessons) -> list[str]:
    """Figures that moved, the correction of peaks, and the limit of memory, in sentences."""
    found = lessons.calibration
    lines = []
    if found is not None:
        lines += [f"{name}: {before} → {after} ({interval})" for name, before, after, interval, _ in figure_lines(found)]
        lines.append(
            f"in {wording.count(found.rows, 'run')} the median is off by {wording.percent(found.before.median)} before and "
            f"{wording.percent(found.after.median)} after"
        )
        if found.rows < CALIBRATED_FROM:
            lines.append(f"proposals rest on these figures from {CALIBRATED_FROM} runs on")
    if lessons.peak_factor != 1.0:
        lines.append(f"peaks are {wording.times(lessons.peak_factor)} those predicted")
    if lessons.limit_bytes < lessons.out_bytes <= lessons.limit_bytes + MIB:
        lines.append(f"a predicted peak of {wording.gib(lessons.out_bytes / GIB)} ran out of memory: layouts below it are proposed")
    else:
        lines.append(f"layouts are proposed up to a predicted peak of {wording.gib(lessons.limit_bytes / GIB)}")
    return lines


def advice(found: Standing) -> str:
    """Whether another run is worth it."""
    if found.gain is None:
        return "no result yet: tell one, and the next proposal follows from it"
    running = sum(one.state == "running" for one in found.proposals)
    waiting = f"; {wording.count(running, 'run')} not told yet" if running else ""
    gain = f"the next run is expected to gain {wording.percent(found.gain)}"
    if found.enough:
        return f"stop: {gain}, less than repeats of a run differ by ({wording.percent(STOP)}){waiting}"
    if found.gain < STOP:
        return f"go on: {gain}, but fewer than {LEAST_TO_STOP} results say little{waiting}"
    return f"go on: {gain}{waiting}"


def proposal_json(proposal: Proposal, plan: Plan) -> str:
    return _json(
        {"trial": proposal.number, "layout_words": layout_words(proposal.layout), **plan.model_dump(mode="json", exclude_none=True)}
    )


def list_json(proposals: Sequence[Proposal]) -> str:
    return _json({"trials": [asdict_of(one) for one in proposals]})


def told_json(subject: Subject, proposal: Proposal, lessons: Lessons) -> str:
    return _json({"trial": asdict_of(proposal), "learnt": _lessons(lessons)})


def standing_json(found: Standing) -> str:
    return _json(
        {
            "best": None if found.best is None else asdict_of(found.best),
            "trials": [asdict_of(one) for one in found.proposals],
            "learnt": _lessons(found.lessons),
            "expected_gain": found.gain,
            "stop": found.enough,
        }
    )


def asdict_of(proposal: Proposal) -> dict[str, Any]:
    """A proposal as JSON has it."""
    return {**asdict(proposal), "layout": proposal.layout.model_dump(mode="json")}


def _lessons(lessons: Lessons) -> dict[str, Any]:
    fits = lessons.calibration.fits if lessons.calibration else ()
    figures = {fit.name: {"before": fit.prior, "value": fit.value, "low": fit.low, "high": fit.high} for fit in fits}
    return {"figures": figures, "peak_factor": lessons.peak_factor, "limit_gib": lessons.limit_bytes / GIB}


def _json(document: dict[str, Any]) -> str:
    return to_json(document, indent=2, inf_nan_mode="null").decode()


def _outcome(one: Proposal) -> str:
    return wording.seconds(one.measured_s) if one.measured_s else one.state


def _peak(one: Proposal) -> str:
    measured = f" / {wording.amount(one.measured_gib)}" if one.measured_gib else ""
    return f"{wording.amount(one.predicted_gib)}{measured}"


def _title(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold", markup=False, highlight=False)


def _say(console: Console, text: str) -> None:
    _print(console, Padding(Text(text), INDENT))


def _print(console: Console, what: RenderableType) -> None:
    """Prints without the blanks that rich fills lines up with."""
    with console.capture() as captured:
        console.print(what, highlight=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

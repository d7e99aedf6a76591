"""timeline and report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...search_spaces.errors import Infeasible, InputError
from ..streams import Meter
from .answers import Answer, at_least_one, wanted
from .options import AsJson, Profile, Quiet, whole

if TYPE_CHECKING:
    from ...search_spaces.layout import Layout
    from ..result import Memory
    from ..step_timeline import StepTimeline

TRACE = ".json"
KINDS = (TRACE, ".svg", ".png", ".html")
PAGES = (".html", ".svg", ".txt")
TOLD_APART = 1e-9  # relative difference of step times from which a document was priced with other figures


def timeline_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.json, or what evaluate --json printed.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Trace (.json) or picture: .svg, .png, .html."),
    ] = None,
    alternative: Annotated[
        int | None, typer.Option("--alternative", parser=whole, metavar="N", help="The plan's N-th alternative, from 1.")
    ] = None,
    profile: Profile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Show one step pass by pass: every stage's passes, messages, waiting and memory over time."""
    wanted(out, as_json)
    kind = TRACE if out is None else out.suffix.lower()
    if kind not in KINDS:
        raise InputError(f"{out}: ends in {kind!r}; give a name that ends in {', '.join(KINDS)}")
    if alternative is not None:
        at_least_one("--alternative", alternative)
    from ..evaluation import evaluate
    from ..step_timeline import step_timeline
    from ..writing import spare_inputs, write_file
    from .documents import read_priced

    spare_inputs({"--out": out}, (plan_file, profile))
    problem, told = read_priced(plan_file, alternative or 0)
    if not told.layout.stages:
        raise InputError(f"{plan_file}: its layout has no stages; price it with evaluate --json, and name what that printed")
    _refuse_odd_grids(told.layout, problem.devices, plan_file)
    try:
        step = step_timeline(problem, told.layout, profile)
        priced, _ = evaluate(problem, told.layout, profile=profile, replayed=False)
    except Infeasible as error:
        raise InputError(f"{plan_file}: {' '.join(error.reasons)}") from error
    except ValueError as error:
        raise InputError(f"{plan_file}: {error}") from error
    with Meter(shown=not (quiet or as_json)) as meter:
        document = _document(kind, step, priced.memory, meter)
        trace = document if kind == TRACE or not as_json else _document(TRACE, step, priced.memory, meter)
    if out is not None:
        write_file(out, document)
    if as_json:
        return Answer(lambda: print(trace, end=""))
    notes = [f"wrote {out}: a step of {step.step_s:.4g} s on {step.layout.pp} stages"]
    before = told.simulated_step_time_s
    if before is not None and abs(step.step_s / before - 1.0) > TOLD_APART:
        notes.append(
            f"{plan_file}: says {before:.6g} s event by event, now {step.step_s:.6g} s: its layout is drawn as it is priced now, "
            "by other figures, by another version, or edited since"
        )
    return Answer(lambda: None, () if quiet else tuple(notes))


def report_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by plan --out or plan --json.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="A page with pictures (.html), .svg or .txt."),
    ],
    profile: Profile = None,
    quiet: Quiet = False,
) -> Answer:
    """Write a plan down to read and to pass on: all that plan prints, with its stages and pictures."""
    kind = out.suffix.lower()
    if kind not in PAGES:
        raise InputError(f"{out}: ends in {out.suffix!r}; give a name that ends in {', '.join(PAGES)}")
    from ..reports.plan_page import plan_page, plan_picture, plan_text
    from ..step_timeline import step_timeline
    from ..writing import spare_inputs, write_file
    from .documents import read_plan

    spare_inputs({"--out": out}, (plan_file, profile))
    found = read_plan(plan_file)
    if kind == ".svg":
        document = plan_picture(found)
    else:
        try:
            step = step_timeline(found.problem, found.plan.layout, profile)
        except ValueError as error:
            raise InputError(f"{plan_file}: {error}") from error
        document = plan_page(found, step) if kind == ".html" else plan_text(found, step)
    write_file(out, document)
    return Answer(lambda: None, () if quiet else (f"wrote {out}",))


def _refuse_odd_grids(layout: Layout, devices: int, plan_file: Path) -> None:
    """InputError for a layout, edited by hand, whose two grids are not the same devices, or are more than there are."""
    experts = layout.etp * layout.ep * layout.edp * layout.pp
    if layout.devices > devices:
        raise InputError(f"{plan_file}: tp·cp·pp·dp = {layout.devices} is more than the {devices} devices; name a plan as written")
    if layout.devices != experts:
        said = f"tp·cp·pp·dp is {layout.devices} devices but etp·ep·edp·pp is {experts}; both grids use the same ones"
        raise InputError(f"{plan_file}: {said}; name a plan as it was written")


def _document(kind: str, step: StepTimeline, memory: Memory, meter: Meter) -> str | bytes:
    """What is written: only the kind that is asked for is loaded."""
    if kind == TRACE:
        from ..reports.trace import chrome_trace

        return chrome_trace(step, lambda share: meter("writing the trace", share))
    if kind == ".html":
        from ..reports.pipeline_page import pipeline_page

        return pipeline_page(step, memory)
    from ..reports.canvas import png, svg
    from ..reports.pipeline_picture import pipeline_picture

    scene = pipeline_picture(step)
    return svg(scene) if kind == ".svg" else png(scene)

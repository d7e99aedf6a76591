"""timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...search_spaces.errors import InputError
from ..streams import Meter
from .answers import Answer, at_least_one
from .options import Profile, Quiet, whole

if TYPE_CHECKING:
    from ..result import Memory
    from ..step_timeline import StepTimeline

KINDS = (".json", ".svg", ".png", ".html")
TOLD_APART = 1e-9  # relative difference of step times from which a document was priced with other figures


def timeline_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.json, or what evaluate --json printed.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="A trace for Perfetto (.json), or a picture (.svg, .png, .html)."),
    ],
    alternative: Annotated[
        int | None, typer.Option("--alternative", parser=whole, metavar="N", help="The plan's N-th alternative, from 1.")
    ] = None,
    profile: Profile = None,
    quiet: Quiet = False,
) -> Answer:
    """Show one step pass by pass: every stage's passes, messages, waiting and memory over time."""
    kind = out.suffix.lower()
    if kind not in KINDS:
        raise InputError(f"{out}: ends in {out.suffix!r}; give a name that ends in {', '.join(KINDS)}")
    if alternative is not None:
        at_least_one("--alternative", alternative)
    from ..step_timeline import step_timeline
    from ..writing import write_file
    from .documents import read_priced

    problem, told = read_priced(plan_file, alternative or 0)
    if not told.layout.stages:
        raise InputError(f"{plan_file}: its layout has no stages; price it with evaluate --json, and name what that printed")
    try:
        step = step_timeline(problem, told.layout, profile)
    except ValueError as error:
        raise InputError(f"{plan_file}: {error}") from error
    with Meter(shown=not quiet) as meter:
        document = _document(kind, step, told.memory, meter)
    write_file(out, document)
    notes = [f"wrote {out}: a step of {step.step_s:.4g} s on {step.layout.pp} stages"]
    before = told.simulated_step_time_s
    if before is not None and abs(step.step_s / before - 1.0) > TOLD_APART:
        notes.append(
            f"{plan_file}: says {before:.6g} s event by event, now {step.step_s:.6g} s: by other figures or another version"
        )
    return Answer(lambda: None, () if quiet else tuple(notes))


def _document(kind: str, step: StepTimeline, memory: Memory, meter: Meter) -> str | bytes:
    """What is written: only the kind that is asked for is loaded."""
    if kind == ".json":
        from ..reports.trace import chrome_trace

        return chrome_trace(step, lambda share: meter("writing the trace", share))
    if kind == ".html":
        from ..reports.pipeline_page import pipeline_page

        return pipeline_page(step, memory)
    from ..reports.canvas import png, svg
    from ..reports.pipeline_picture import pipeline_picture

    scene = pipeline_picture(step)
    return svg(scene) if kind == ".svg" else png(scene)

"""The step time over the imbalance of the experts, as a section and by itself."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from ..supernode_result import StepAt
from . import wording
from .drawing import DOUBT, GOOD, LABEL, bar, grid, print_sections, section, width_of

BAR_CELLS = 20


def render_steps(steps: Sequence[StepAt], console: Console) -> None:
    """Prints the step time over the imbalance alone."""
    print_sections(console, [steps_section(steps)], width_of(console))


def steps_section(steps: Sequence[StepAt]) -> RenderableType:
    """The step time over the imbalance, with the measured ones named."""
    table = grid("right", "right", "left", "left", "left")
    table.add_row(*(Text(head, style=LABEL) for head in ("imbalance", "step", "", "memory", "")))
    longest = max(step.step_time_s for step in steps)
    for step in steps:
        style = {"today": DOUBT, "placed": GOOD}.get(step.of, "")
        cells = BAR_CELLS * step.step_time_s / longest
        table.add_row(
            Text(f"{step.imbalance:.3f}", style=style),
            Text(wording.seconds(step.step_time_s), style=style),
            Text(bar(cells), style=style or LABEL),
            Text(step.memory_verdict, style="" if step.memory_verdict == "fits" else DOUBT),
            Text(step.of, style=style),
        )
    by = {step.of: step for step in steps}
    body: list[RenderableType] = [table]
    if "today" in by and "placed" in by:
        body.append(Text(_saved_words(by["today"], by["placed"])))
    return section("Step time", *body, note=Text("if the fullest rank receives so many times the mean", style=LABEL))


def _saved_words(today: StepAt, placed: StepAt) -> str:
    """What placing the experts saves of a step, and whether either runs."""
    shorter, more = 1.0 - placed.step_time_s / today.step_time_s, today.step_time_s / placed.step_time_s - 1.0
    saved = f"Placing the experts shortens the step by {wording.percent(shorter)} ({wording.percent(more)} more tokens a second)"
    runs = {"fits": "", "unsure": "may run out of memory", "oom": "runs out of memory"}
    if today.memory_verdict == placed.memory_verdict != "fits":
        return f"{saved}, if it ran: either way it {runs[placed.memory_verdict]}."
    said = [
        f"{when} it {runs[at.memory_verdict]}" for when, at in (("today", today), ("placed", placed)) if runs[at.memory_verdict]
    ]
    return f"{saved}{', if both ran: ' if said else ''}{', '.join(said)}."

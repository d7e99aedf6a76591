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
    table = grid("right", "right", "left", "left")
    table.add_row(*(Text(head, style=LABEL) for head in ("imbalance", "step", "", "")))
    longest = max(step.step_time_s for step in steps)
    for step in steps:
        style = {"today": DOUBT, "placed": GOOD}.get(step.of, "")
        cells = BAR_CELLS * step.step_time_s / longest
        table.add_row(
            Text(f"{step.imbalance:.3f}", style=style),
            Text(wording.seconds(step.step_time_s), style=style),
            Text(bar(cells), style=style or LABEL),
            Text(step.of, style=style),
        )
    by = {step.of: step.step_time_s for step in steps}
    body: list[RenderableType] = [table]
    if "today" in by and "placed" in by:
        saved = by["today"] / by["placed"] - 1.0
        body.append(
            Text(
                f"Placing the experts shortens the step by {wording.percent(1.0 - by['placed'] / by['today'])} "
                f"({wording.percent(saved)} more tokens a second)."
            )
        )
    return section("Step time", *body, note=Text("if the fullest rank receives so many times the mean", style=LABEL))

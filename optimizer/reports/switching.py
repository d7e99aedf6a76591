"""What a running job gains by another layout, as it is drawn at a terminal."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

from ..result import Plan, Switch
from . import wording
from .drawing import BAD, GOOD, LABEL, print_sections, section, width_of
from .waterfall import layout_lines


def render_switch(plan: Plan, found: Switch, name: str, console: Console) -> None:
    """Prints the layout of the job, what its checkpoint reaches, and the plan, with what lies between."""
    note = Text("illegal or too large here", style=BAD) if found.broken else Text("legal and fits", style=GOOD)
    body: list[RenderableType] = [Text(f"· {sentence}") for sentence in found.broken]
    rows = (("now", found.current), ("as it loads", found.reachable), ("the plan", plan.plan))
    body += [layout_lines(plan.problem, rows), *(Text(sentence) for sentence in _sentences(found))]
    body.append(Text(f"Assumed: {found.assumption}.", style=LABEL))
    print_sections(console, [section(f"From {name}", *body, note=note)], width_of(console))


def _sentences(found: Switch) -> list[str]:
    """What each of the two takes."""
    said = [*([found.lies] if found.lies else []), *(f"{clash}." for clash in found.ruled_out)]
    if found.reachable is None:
        said.append("Nothing that the checkpoint loads into as it is is legal and fits.")
    elif found.to_reach:
        said.append(f"Without resharding: restart with {', '.join(found.to_reach)}.")
    else:
        said.append("Without resharding nothing is faster than what runs now.")
    if not found.to_reshard:
        return [*said, "The plan itself loads the checkpoint as it is."]
    further = "" if found.further_gain is None else f" and is {_further(found.further_gain)} than without"
    return [*said, f"The plan needs the checkpoint resharded ({', '.join(found.to_reshard)}){further}."]


def _further(share: float) -> str:
    return f"{wording.percent(abs(share))} {'faster' if share >= 0 else 'slower'}"

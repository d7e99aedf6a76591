"""Why this plan, as it is drawn at a terminal: beside the best layout with other choices, and what each of its choices buys."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

from ..result import PricedLayout
from ..why import Ablation, Ablations, WhyNot
from . import wording
from .comparison import MOST_LOSSES
from .drawing import BAD, DOUBT, GOOD, LABEL, STRONG, WIDE, bar, grid, print_sections, section, width_of
from .waterfall import FRAME, beside, falls, layout_lines, style_of

SAME = 1e-9  # relative difference of step times below which two layouts are equally fast
NOT_FOUND = "not found"  # a search that ran out of time proves nothing
STATUS_STYLES = {"fits": GOOD, "does not fit": BAD, "not legal": BAD, NOT_FOUND: DOUBT}
BAR_CELLS, WIDE_BAR_CELLS = 10, 30


def render_why_not(found: WhyNot, asked: str, console: Console) -> None:
    """Prints why the plan and not the best layout with what was asked."""
    width = width_of(console)
    problem, best = found.problem, found.best
    reasons = [Text(f"· {reason}") for reason in best.reasons]
    note = Text(best.status, style=STATUS_STYLES[best.status])
    sections: list[RenderableType] = [_title(found), section(f"Not {asked}", Text(_verdict(found)), *reasons, note=note)]
    if best.layout is not None and found.waterfall is not None:
        name = "with it" if best.status == "fits" else "fastest"
        sections.append(layout_lines(problem, (("plan", found.plan), (name, best.layout))))
        sections += [*falls(found.plan, best.layout, found.waterfall, width), beside(problem, found.plan, best.layout)]
    print_sections(console, sections, width)


def render_ablations(found: Ablations, console: Console) -> None:
    """Prints what each choice of the plan buys."""
    width = width_of(console)
    buys = section("What each choice buys", _table(found, width), note=Text("the best layout without it", style=LABEL))
    sooner = [one.instead for one in found.ablations if one.slower is not None and one.slower < -SAME]
    told = [one for one in found.ablations if one.without.reasons]
    impossible = [_reason(one) for one in told if one.without.status != NOT_FOUND]
    unknown = [_reason(one) for one in told if one.without.status == NOT_FOUND]
    sections: list[RenderableType] = [_title(found), _plan_line(found.plan), buys]
    sections += [Text(f"Faster, and so outside what the plan's search looked at: {', '.join(sooner)}.")] if sooner else []
    sections += [section("Impossible", *impossible)] if impossible else []
    sections += [section("Not found in the time limit", *unknown)] if unknown else []
    left = found.unsearched
    sections += [Text(f"Interrupted, {len(left)} not searched: {', '.join(left)}.", style=DOUBT)] if left else []
    print_sections(console, sections, width)


def _title(found: WhyNot | Ablations) -> RenderableType:
    problem = found.problem
    return Text(f"{problem.model.name} on {problem.devices:,} × {problem.cluster.accelerator.name}", style=STRONG)


def _verdict(found: WhyNot) -> str:
    """One sentence that answers the question."""
    best, slower = found.best, found.slower
    if best.status == "not legal":
        return "No layout with it is legal."
    if best.status == "not found":
        return "No answer within the time limit."
    if best.status == "does not fit":
        return "It is legal, but no layout with it fits."
    hedge = "" if best.proved else ", as far as the time limit let it be searched"
    if slower is None or abs(slower) < SAME:
        return f"Nothing is lost: the best layout with it is as fast as the plan{hedge}."
    share = wording.percent(abs(slower))
    idle = best.layout.devices_idle if best.layout is not None else 0
    with_idle = f", with {idle:,} of {found.problem.devices:,} devices idle" if idle > found.plan.devices_idle else ""
    return f"It is legal and fits; the best layout with it is {share} {'slower' if slower > 0 else 'faster'}{with_idle}{hedge}."


def _plan_line(plan: PricedLayout) -> Text:
    layout = plan.layout
    frame = "   ".join(f"{name.replace('micro_batch', 'mb')} {getattr(layout, name)}" for name in FRAME)
    return Text(f"{frame}   step {wording.seconds(plan.step_time_s)}")


def _table(found: Ablations, width: int) -> RenderableType:
    """A line for every choice: what stands in its place, what the step loses, and which terms lose it."""
    if not found.ablations:
        return Text("nothing: the plan is the plainest layout there is", style=LABEL)
    cells = WIDE_BAR_CELLS if width >= WIDE else BAR_CELLS
    longest = max((abs(one.seconds) for one in found.ablations if one.seconds is not None), default=0.0)
    table = grid("left", "right", "right", "left", "wrap")
    table.add_row(*(Text(head, style=LABEL) for head in ("with", "step", "slower", "", "loses, and for what")))
    for one in sorted(found.ablations, key=lambda one: -_weight(one)):
        if one.seconds is None or one.slower is None:
            status = Text(one.without.status, style=STATUS_STYLES[one.without.status])
            table.add_row(Text(one.instead), Text(wording.NONE), Text(wording.NONE), Text(), status)
            continue
        step = wording.seconds(found.plan.step_time_s + one.seconds)
        same = abs(one.seconds) < SAME * found.plan.step_time_s
        drawn = Text() if same or one.seconds < 0.0 else Text(bar(abs(one.seconds) / longest * cells), style=style_of(one.seconds))
        slower = "as fast" if same else wording.change(one.slower)
        table.add_row(Text(one.instead), Text(step), Text(slower), drawn, _trade(one))
    return table


def _weight(one: Ablation) -> float:
    """What cannot be done without comes first."""
    return float("inf") if one.seconds is None else one.seconds


def _trade(one: Ablation) -> Text:
    text = Text(", ".join(one.gives_up[:MOST_LOSSES]))
    if one.gains:
        text.append("; " if text else "").append(f"for {one.gains[0]}", style=GOOD)
    if not one.without.proved:
        text.append(" (not proved)", style=DOUBT)
    return text


def _reason(one: Ablation) -> Text:
    return Text.assemble((one.instead, STRONG), ": ", " ".join(one.without.reasons))

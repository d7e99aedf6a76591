"""The way from one layout to another, drawn at a terminal: by term of the step and by decision, memory and traffic beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ...search_spaces.layout import Problem
from ..result import PricedLayout
from ..waterfall import Bar, Compared, Waterfall
from . import wording
from .comparison import beyond_supernode
from .drawing import BAD, DOUBT, EIGHTHS, GOOD, INDENT, LABEL, STRONG, grid, print_sections, section, width_of

FOLDED = 0.01
"""Bars below this share of the longest are shown together."""
MARGIN = 0.1
"""Part of the way between the smallest and the largest sum that is drawn below the smallest, so that no bar starts at the edge."""
LONGEST_VALUE = 22
MANY = 6
"""Columns of a frame beyond which a table of layouts is set closer."""
ENDS = ("from", "to")
FRAME = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch")


@dataclass(frozen=True)
class Line:
    """One bar of a waterfall: its label, the cells between label and bar, and the seconds that it adds."""

    label: str
    cells: tuple[str, ...]
    seconds: float


def render_compared(found: Compared, names: tuple[str, str], console: Console) -> None:
    """Prints the way from one layout to the other."""
    width = width_of(console)
    problem = found.problem
    title = Text(f"{problem.model.name} on {problem.devices:,} × {problem.cluster.accelerator.name}", style=STRONG)
    broken = zip(ENDS, (found.first_broken, found.second_broken), strict=True)
    lines = [Text.assemble((f"{end}: ", LABEL), sentence) for end, sentences in broken for sentence in sentences]
    refused = [section("Illegal or too large", *lines)] if lines else []
    ways = grid("left", "wrap")
    for end, name in zip(ENDS, names, strict=True):
        ways.add_row(Text(end, style=LABEL), Text(name))
    ends = layout_lines(problem, ((ENDS[0], found.first), (ENDS[1], found.second)))
    between = falls(found.first, found.second, found.waterfall, width)
    rest = beside(problem, found.first, found.second)
    print_sections(console, [Group(title, ways, Text(), ends), *refused, *between, rest], width)


def layout_lines(
    problem: Problem, rows: Sequence[tuple[str, PricedLayout | None]], start: Mapping[str, int | str] | None = None
) -> RenderableType:
    """Layouts line by line: frame, step, memory and what leaves the supernode, all beside the first; None is a line of dashes.

    Of the frame the degrees of the grid, and what differs between the lines or from `start`, a layout that has none.
    """
    frames = [{name: getattr(one.layout, name) for name in FRAME} for _, one in rows if one is not None]
    compared = [*frames, start or {}]
    columns = [name for name in FRAME if name in FRAME[:4] or len({each[name] for each in compared if name in each}) > 1]
    table = grid("left", *["right"] * len(columns), *["right"] * 4, "left", gap=1 if len(columns) > MANY else 2)
    heads = [*(name.replace("micro_batch", "mb") for name in columns), "step", "", "peak", "outside"]
    table.add_row(*(Text(head, style=LABEL) for head in ("", *heads, "")))
    first = rows[0][1]
    for name, one in rows:
        if one is None:
            table.add_row(Text(name, style=STRONG), *[Text(wording.NONE)] * len(heads), Text())
            continue
        frame = [str(getattr(one.layout, column)) for column in columns]
        change = "" if first is None or one is first else wording.change(one.step_time_s / first.step_time_s - 1.0)
        outside = wording.gib(beyond_supernode(problem, one))
        figures = [wording.seconds(one.step_time_s), change, wording.gib(one.memory.peak_gib), outside]
        verdict = {"fits": "", "unsure": "unsure", "oom": "oom"}[one.memory.verdict]
        table.add_row(Text(name, style=STRONG), *map(Text, (*frame, *figures)), Text(verdict, style=DOUBT))
    return table


def falls(first: PricedLayout, second: PricedLayout, found: Waterfall, width: int) -> Iterable[RenderableType]:
    """Both waterfalls as sections."""
    change = found.difference_s / first.step_time_s
    slower = Text(f"{signed_seconds(found.difference_s)}, {wording.change(change)}", style=style_of(change))
    yield section("By term", *_drawn(_term_lines(found.terms), first, second, (), width), note=slower)
    if not found.decisions:
        return
    lines = [Line(one.column, (_change(one.first, one.second), _signed_gib(one.peak_gib)), one.seconds) for one in found.decisions]
    body = _drawn(lines, first, second, ("", "peak"), width)
    between = wording.count(found.between, "layout")
    unusable = f", {found.unusable:,} of them illegal or too large to run" if found.unusable else ""
    yield section("By decision", *body, Text(f"{found.averaged}; {between} priced in between{unusable}", style=LABEL))


def beside(problem: Problem, first: PricedLayout, second: PricedLayout) -> RenderableType:
    """What changes in memory, by term of the fullest stage, and in traffic, by level and dimension, in GiB."""
    table = grid("left", "wrap")
    terms = (max(one.memory.stages, key=lambda stage: stage.peak_gib).terms_gib for one in (first, second))
    table.add_row(Text("memory", style=LABEL), Text(_changes(*terms)))
    for level in problem.cluster.levels:
        sent = (one.traffic_gib.get(level.name, {}) for one in (first, second))
        table.add_row(Text(level.name, style=LABEL), Text(_changes(*sent)))
    note = Text("GiB of the fullest stage, and per device, step and level", style=LABEL)
    return section("Memory and traffic", table, note=note)


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """«weights 8.9 → 4.5, optimizer 13.4», every name that either has."""
    pairs = {name: (wording.amount(before.get(name, 0.0)), wording.amount(after.get(name, 0.0))) for name in (*before, *after)}
    shown = {name: pair for name, pair in pairs.items() if pair != ("0", "0")}
    return (
        ", ".join(f"{name} {old}" if old == new else f"{name} {old} → {new}" for name, (old, new) in shown.items()) or wording.NONE
    )


def signed_seconds(value: float) -> str:
    return wording.signed(wording.seconds(value))


def style_of(change: float) -> str:
    """Slower is bad."""
    return BAD if change > 0 else GOOD


def _term_lines(terms: Sequence[Bar]) -> list[Line]:
    """Largest first, what hardly counts in one line."""
    ordered = sorted(terms, key=lambda bar: -abs(bar.seconds))
    least = FOLDED * abs(ordered[0].seconds) if ordered else 0.0
    shown = [Line(bar.term, (), bar.seconds) for bar in ordered if abs(bar.seconds) > least]
    rest = sum(bar.seconds for bar in ordered if 0 < abs(bar.seconds) <= least)
    return [*shown, *([Line("rest", (), rest)] if rest else [])]


def _drawn(
    lines: Sequence[Line], first: PricedLayout, second: PricedLayout, heads: tuple[str, ...], width: int
) -> list[RenderableType]:
    """The lines between both steps, each bar starting where the one before ended."""
    sums = [first.step_time_s]
    for line in lines:
        sums.append(sums[-1] + line.seconds)
    labels = max(len(text) for text in ("from", *(line.label for line in lines)))
    cells = [
        max((len(text) for text in texts), default=0) + 2 for texts in zip(heads, *(line.cells for line in lines), strict=False)
    ]
    room = max(10, width - INDENT - labels - 2 - 13 - sum(cells) - 2)
    low, high = min(sums), max(sums)
    low = max(0.0, low - MARGIN * (high - low or high))
    scale = room / (high - low)
    table = grid("left", *["left"] * len(heads), "right", "left")
    if any(heads):
        table.add_row(*(Text(head, style=LABEL) for head in ("", *heads, "", "")))

    def row(label: str, texts: tuple[str, ...], said: str, start: float, end: float, style: str) -> None:
        begin, stop = sorted((round((start - low) * scale), round((end - low) * scale)))
        begin = min(begin, room - 1)
        drawn = Text(" " * begin + EIGHTHS[-1] * max(1, stop - begin), style=style)
        table.add_row(Text(label), *map(Text, texts), Text(said), drawn)

    none = ("",) * len(heads)
    row("from", none, wording.seconds(first.step_time_s, 4), low, first.step_time_s, LABEL)
    for line, start, end in zip(lines, sums, sums[1:], strict=False):
        row(line.label, line.cells or none, signed_seconds(line.seconds), start, end, style_of(line.seconds))
    row("to", none, wording.seconds(second.step_time_s, 4), low, second.step_time_s, LABEL)
    return [table]


def _change(first: str, second: str) -> str:
    """«4 → 8»; of long values what is added and dropped, or each cut."""
    before, after = (value.removeprefix("selective:").split("+") for value in (first, second))
    if len(before) > 1 and len(after) > 1:
        added, dropped = ([name for name in one if name not in other] for one, other in ((after, before), (before, after)))
        return " ".join([*(f"+{name}" for name in added), *(f"{wording.MINUS}{name}" for name in dropped)])[:LONGEST_VALUE]
    return f"{_short('+'.join(before))} → {_short('+'.join(after))}"


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE // 2 else value[: LONGEST_VALUE // 2 - 1] + "…"


def _signed_gib(value: float) -> str:
    return wording.signed(wording.gib(value)) if value else wording.NONE

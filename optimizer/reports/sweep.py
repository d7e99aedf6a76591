"""A sweep at the terminal: a line a point, the best of every model, and why points have no plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from ..sweeps.grid import AXES
from ..sweeps.point import PLANNED
from ..sweeps.table import EFFICIENCIES, Row
from . import wording
from .drawing import BAD, INDENT, LABEL, STRONG, grid, print_sections, section, width_of

DEGREES = ("tp", "cp", "pp", "dp", "ep", "vpp")
SHORT = {"global_batch": "batch", "seq_len": "seq"} | dict(zip(EFFICIENCIES, ("fixed batch", "batch grows"), strict=True))
SCALING = (
    "fixed batch: a device's speed over that on the fewest devices planned; batch grows: the same where the batch grows with the "
    "devices"
)
FEW_REASONS = 8
FULL_WIDTH, USUAL_WIDTH = 110, 80
GAP, LEAST_LAYOUT = 2, 22
"""Columns between columns, and of the layout at least where names stand beside it."""


def render_sweep(rows: Sequence[Row], left: int, where: str, console: Console) -> None:
    """What is done; `left` points are not, `where` is the store."""
    width = width_of(console)
    planned = [row for row in rows if row["status"] in PLANNED]
    parts = [wording.count(len(rows), "point"), f"{len(planned):,} planned", *_others(rows)]
    title = Text(" · ".join([*parts, *([f"{left:,} not done"] if left else [])]), style=LABEL)
    if not rows:
        print_sections(console, [section(where, Text("no points"), note=title)], width)
        return
    scaled = [Text(SCALING, style=LABEL)] if any(row.get(name) is not None for row in rows for name in EFFICIENCIES) else []
    sections: list[RenderableType] = [section(where, *_table(rows, width), *scaled, note=title)]
    unplanned = [row for row in rows if row["reason"]]
    if unplanned:
        sections.append(section("Without a plan", *_reasons(unplanned)))
    print_sections(console, sections, width)


def _others(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row["status"] for row in rows if row["status"] not in PLANNED)
    return [f"{count:,} {status}" for status, count in counts.items()]


def _table(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Axes that do not vary are left out; where lines are too short for names, these stand above the lines that share them."""
    options = sorted({name for row in rows for name in row if name.startswith("option ")})
    axes = [name for name in (*AXES, *options) if len({str(row.get(name)) for row in rows}) > 1] or ["model"]
    wide = width >= FULL_WIDTH
    named = [name for name in axes if name in {"model", "cluster", "precision", *options}]
    counted = [name for name in axes if name not in named]
    scales = _scales(rows, 2 if wide else int(width >= USUAL_WIDTH))
    told = ("step", *(["tokens/s/device"] if wide else []), "MFU", *(SHORT[name] for name in scales), "layout")
    heads = [*(SHORT.get(name, name) for name in counted), *told]
    names = [[_cell(row.get(name)) for name in named] for row in rows]
    figures = [[*(_cell(row.get(name)) for name in counted), *_result(row, wide, scales)] for row in rows]
    sizes = _sizes([[Text(head) for head in heads], *figures])[:-1]
    titles = [Text(SHORT.get(name, name.removeprefix("option ")), style=LABEL) for name in named]
    labels = [Text(head, style=LABEL) for head in heads]
    if sum(size + GAP for size in (*_sizes([titles, *names]), *sizes)) + LEAST_LAYOUT + INDENT <= width:
        lines = [[*titles, *labels], *([*name, *figure] for name, figure in zip(names, figures, strict=True))]
        return [_lines(lines, len(named))]
    found: list[RenderableType] = [_lines([labels], 0, sizes)]
    groups = defaultdict[str, list[list[Text]]](list)
    for name, figure in zip(names, figures, strict=True):
        groups[" · ".join(map(str, name))].append(figure)
    for words, group in groups.items():
        found += [Text(words, style=STRONG)] if words else []
        found.append(_lines(group, 0, sizes))
    return found


def _scales(rows: Sequence[Row], most: int) -> list[str]:
    """Up to so many of the efficiencies, of fewer the one that more rows have."""
    held = {name: sum(row.get(name) is not None for row in rows) for name in EFFICIENCIES}
    kept = sorted((name for name in held if held[name]), key=lambda name: -held[name])[:most]
    return [name for name in EFFICIENCIES if name in kept]


def _lines(lines: Sequence[Sequence[Text]], names: int, sizes: Sequence[int] = ()) -> RenderableType:
    """A table whose first columns are names and whose last one may wrap; the others are at least so wide."""
    table = grid(*("left" for _ in range(names)), *("right" for _ in range(len(lines[0]) - names - 1)), "wrap", gap=GAP)
    for column, size in zip(table.columns, sizes, strict=False):
        column.min_width = size
    for line in lines:
        table.add_row(*line)
    return table


def _sizes(lines: Sequence[Sequence[Text]]) -> list[int]:
    """Columns that the longest cell of each column takes."""
    return [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]


def _result(row: Row, wide: bool, scales: Sequence[str]) -> list[Text]:
    if row["status"] not in PLANNED:
        return [*(Text("–") for _ in range(2 + wide + len(scales))), Text(row["status"], style=BAD)]
    rate = [Text(f"{row['tokens_per_s_per_device']:,.0f}")] if wide else []
    layout = " ".join(f"{name}{row[name]}" for name in DEGREES if row[name] > 1) or "one device"
    more = [row[name] for name in ("recompute", "offload") if row[name] not in (None, "none")] if wide else []
    stopped = "" if row["status"] == "optimal" else f" (within {row['gap']:.0%})"
    shares = [Text("–" if row.get(name) is None else f"{row[name]:.0%}") for name in scales]
    step, mfu = Text(wording.seconds(row["step_time_s"])), Text(f"{row['mfu']:.1%}")
    return [step, *rate, mfu, *shares, Text(" ".join([layout, *more]) + stopped)]


def _reasons(rows: Sequence[Row]) -> list[RenderableType]:
    """Why rows have no plan, the commonest reasons first, each with what its rows have in common that others do not."""
    table, (told, rest) = grid("right", "wrap"), commonest(rows, rows)
    for count, reason, whose in told:
        table.add_row(Text(f"{count:,} ×", style=LABEL), Text(reason))
        table.add_row(Text(), Text(whose, style=LABEL))
    return [table, *([Text(f"and {rest:,} more reasons: --show status!=optimal --csv FILE", style=LABEL)] if rest > 0 else [])]


def commonest(rows: Sequence[Row], every: Sequence[Row]) -> tuple[list[tuple[int, str, str]], int]:
    """The commonest reasons of rows: how many have it, the reason, and which of `every` those are; and how many more reasons."""
    reasons = Counter(row["reason"] for row in rows)
    told = [
        (count, reason, _whose([row for row in rows if row["reason"] == reason], every))
        for reason, count in reasons.most_common(FEW_REASONS)
    ]
    return told, max(0, len(reasons) - FEW_REASONS)


def _whose(rows: Sequence[Row], every: Sequence[Row]) -> str:
    """The axes and options that tell some rows from the rest, in the one way or the few in which they have them."""
    options = sorted({name for row in every for name in row if name.startswith("option ")})
    told = []
    for name in (*AXES, *options):
        values = list(dict.fromkeys(str(_cell(row.get(name))) for row in rows))
        if len(values) < len({str(_cell(row.get(name))) for row in every}):
            told.append(f"{SHORT.get(name, name.removeprefix('option '))} {', '.join(values)}")
    return " · ".join(told)


def _cell(value: Any) -> Text:
    return Text("–" if value is None else f"{value:,}" if isinstance(value, int) else str(value))

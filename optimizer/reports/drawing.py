"""What all reports at the terminal are drawn from: sections, tables without lines, bars, and the colours of what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

NARROW, WIDE, WIDEST = 60, 132, 168
INDENT = 2
LABEL, STRONG, GOOD, DOUBT, BAD = "dim", "bold", "green", "yellow", "red"
LEAST_WORDS = 16
"""Columns in which words still wrap well."""
EIGHTHS = "▏▎▍▌▋▊▉█"
HELD = "\ue000"
"""Stands, until it is printed, for a blank at which no line may break: rich breaks at every kind of blank."""
BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|[mµn]?s|min|h|days?|[kMGT]i?B|[GT]B/s|TFLOP/s)(?![\w/]))")
"""The blank between a figure and its unit."""


def width_of(console: Console) -> int:
    """Columns to draw in."""
    return max(NARROW, min(console.width, WIDEST))


def print_sections(console: Console, sections: Iterable[RenderableType], width: int) -> None:
    """Prints the sections with a blank line after each; rich fills lines up with blanks, which are taken off again.

    A table that needs more columns than there are gets them, and the terminal breaks its lines: pressed in, it would lose digits.
    """
    for each in sections:
        hold_units(each)
        needed = max(width, least_width(each))
        console.width = max(console.width, needed)
        with console.capture() as captured:
            console.print(each, width=needed, highlight=False)
        lines = [line.rstrip() for line in captured.get().replace(HELD, " ").splitlines()]
        console.file.write("\n".join([*lines, "", ""]))


def hold_units(part: RenderableType) -> None:
    """Keeps every figure of a part on one line with its unit."""
    if isinstance(part, Text):
        part.plain = BEFORE_UNIT.sub(HELD, part.plain)
    elif isinstance(part, Padding):
        hold_units(part.renderable)
    elif isinstance(part, Group | Table):
        inside = part.renderables if isinstance(part, Group) else [cell for column in part.columns for cell in column.cells]
        for each in inside:
            hold_units(each)


def least_width(part: RenderableType) -> int:
    """Columns that the tables of a part need so that only what is free to wrap is broken."""
    if isinstance(part, Group):
        return max(map(least_width, part.renderables), default=0)
    if isinstance(part, Padding):
        return part.left + least_width(part.renderable)
    if not isinstance(part, Table):
        return 0
    gaps = sum(part.padding[1] for _ in part.columns[1:])
    return gaps + sum(max((_cell_width(cell, column) for cell in column.cells), default=0) for column in part.columns)


def _cell_width(cell: RenderableType, column: Column) -> int:
    if not isinstance(cell, Text):
        return least_width(cell)
    return cell.cell_len if column.no_wrap else min(cell.cell_len, LEAST_WORDS)


def section(title: str, *body: RenderableType, note: Text | None = None) -> Group:
    """A title, a note beside it, and what stands below, indented."""
    heading = Text(title, style=STRONG)
    if note is not None:
        heading.append("  ").append_text(note)
    return Group(heading, *(Padding(part, (0, 0, 0, INDENT)) for part in body))


def grid(*justify: str, gap: int = 2) -> Table:
    """A table without lines; a column is justified "left" or "right", or "wrap": left and free to wrap."""
    table = Table.grid(padding=(0, gap, 0, 0))
    for side in justify:
        table.add_column(justify="right" if side == "right" else "left", no_wrap=side != "wrap", overflow="fold")
    return table


def bullets(sentences: Iterable[str | Text]) -> Table:
    """Sentences below each other, each with a dot before it."""
    table = grid("left", "wrap", gap=1)
    for sentence in sentences:
        table.add_row(Text("·", style=LABEL), Text(sentence) if isinstance(sentence, str) else sentence)
    return table


def bar(cells: float) -> str:
    """A bar so many cells long, to an eighth of a cell, never empty."""
    eighths = max(1, round(8 * cells))
    return EIGHTHS[-1] * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")

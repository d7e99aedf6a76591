"""What all reports at the terminal are drawn from: sections, tables without lines, bars, and the colours of what they say."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROW, WIDE, WIDEST = 60, 132, 168
INDENT = 2
LABEL, STRONG, GOOD, DOUBT, BAD = "dim", "bold", "green", "yellow", "red"
EIGHTHS = "▏▎▍▌▋▊▉█"


def width_of(console: Console) -> int:
    """Columns to draw in."""
    return max(NARROW, min(console.width, WIDEST))


def print_sections(console: Console, sections: Iterable[RenderableType], width: int) -> None:
    """Prints the sections with a blank line after each; rich fills lines up with blanks, which are taken off again."""
    for each in sections:
        with console.capture() as captured:
            console.print(each, width=width, highlight=False)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        console.file.write("\n".join([*lines, "", ""]))


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


def bar(cells: float) -> str:
    """A bar so many cells long, to an eighth of a cell, never empty."""
    eighths = max(1, round(8 * cells))
    return EIGHTHS[-1] * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")

"""The stages of a pipeline, a line each: what they hold and do, how long they wait, and what fills their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from ..result import Memory, StageMemory, StageWork
from . import wording
from .drawing import BAD, LABEL, STRONG, WIDE, grid, print_sections, section, width_of

STATES = ("weights", "gradients", "optimizer")
OTHER = ("transient", "communicators")


def table_cells(stages: Sequence[StageWork], memory: Memory, apart: bool) -> Iterator[tuple[str, ...]]:
    """Headings, then a row for each run of stages that look alike; states are told `apart` or in one sum."""
    states = STATES if apart else ("states",)
    yield "stage", "layers", "forward", "backward", "held", "waits", *states, "activations" if apart else "activ.", "other", "peak"
    rows = ((one.stage, _cells(one, held, apart)) for one, held in zip(stages, memory.stages, strict=True))
    for cells, run in groupby(rows, lambda row: row[1]):
        yield wording.ranges([stage for stage, _ in run]), *cells


def _cells(one: StageWork, held: StageMemory, apart: bool) -> tuple[str, ...]:
    terms = held.terms_gib
    states = [terms[name] for name in STATES]
    return (
        str(one.layers),
        wording.seconds(one.forward_s),
        wording.seconds(one.backward_s),
        f"{one.in_flight:.3g}",
        f"{100 * one.idle_share:.0f} %",
        *(wording.amount(value) for value in (states if apart else [sum(states)])),
        wording.amount(terms["activations"]),
        wording.amount(sum(terms[name] for name in OTHER)),
        wording.amount(held.peak_gib),
    )


def render_stages(stages: Sequence[StageWork], memory: Memory, console: Console) -> None:
    """Prints the table of stages."""
    width = width_of(console)
    rows = list(table_cells(stages, memory, width >= WIDE))
    table = grid("left", *["right"] * (len(rows[0]) - 1), gap=2 if width >= WIDE else 1)
    fullest = wording.amount(memory.peak_gib)
    for number, row in enumerate(rows):
        over = memory.peak_gib > memory.usable_gib and row[-1] == fullest
        styles = [LABEL if number == 0 else ""] * (len(row) - 1) + [LABEL if number == 0 else BAD if over else STRONG]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(row, styles, strict=True)))
    note = "per micro-batch; held: micro-batches in flight; memory in GiB"
    note += "" if width >= WIDE else f", by term from {WIDE} columns on"
    print_sections(console, [section("Stages", table, note=Text(note, style=LABEL))], width)

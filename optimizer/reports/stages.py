"""The stages of a pipeline, a line each: what they hold and do, how long they wait, and what fills their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from ...cost_models.schedules import FORWARD, stage_chunks
from ...search_spaces.layout import Stage
from ..result import Memory
from ..step_timeline import StepTimeline
from . import wording
from .drawing import BAD, LABEL, STRONG, WIDE, grid, print_sections, section, width_of

STATES = ("weights", "gradients", "optimizer")
OTHER = ("transient", "communicators")


@dataclass(frozen=True)
class StageFigures:
    """One stage: its decoder and MTP layers, seconds of forward and of backward passes per micro-batch, micro-batches that it holds
    activations of at its fullest (a chunk of several counts as a part), the share of the pipeline that it waits, and its memory.
    """

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    held: float
    waits: float
    peak_gib: float
    terms_gib: dict[str, float]


def stage_figures(step: StepTimeline, memory: Memory) -> tuple[StageFigures, ...]:
    """The figures of every stage; a pass beside another counts as if it ran alone."""
    line, layout, order = step.pipeline, step.layout, step.pipeline.schedule
    chunks = stage_chunks(order.name, order.pp, order.vpp)
    found = []
    for stage, told in enumerate(memory.stages):
        mine = line.stage == stage
        forward, backward = mine & (line.kind == FORWARD), mine & (line.kind != FORWARD)
        seconds = [
            sum(float(line.work.of(kind, chunk)) for kind, chunk in zip(line.kind[these], line.chunk[these], strict=True))
            for these in (forward, backward)
        ]
        found.append(
            StageFigures(
                stage=stage,
                layers=_layers(layout.stages, chunks[:, stage].tolist(), order.name == "dualpipe", stage),
                forward_s=seconds[0] / layout.num_microbatches,
                backward_s=seconds[1] / layout.num_microbatches,
                held=float(line.in_flight[stage]) / len(chunks),
                waits=float(step.idle_share[stage]),
                peak_gib=told.peak_gib,
                terms_gib=told.terms_gib,
            )
        )
    return tuple(found)


def _layers(stages: Sequence[Stage], chunks: Sequence[int], doubled: bool, stage: int) -> int:
    """Layers of a stage; DualPipe's stages hold those of their mirror image too."""
    holders = chunks if doubled else [stage]
    held = [chunk for holder in holders for chunk in stages[holder].chunks]
    return sum((chunk.layers[1] - chunk.layers[0] + 1 if chunk.layers else 0) + chunk.mtp for chunk in held)


def table_cells(figures: Sequence[StageFigures], apart: bool) -> Iterator[tuple[str, ...]]:
    """Headings, then a row for each run of stages that look alike; states are told `apart` or in one sum."""
    states = STATES if apart else ("states",)
    yield "stage", "layers", "forward", "backward", "held", "waits", *states, "activations" if apart else "activ.", "other", "peak"
    for cells, run in groupby(figures, lambda one: _cells(one, apart)):
        yield wording.ranges([one.stage for one in run]), *cells


def _cells(one: StageFigures, apart: bool) -> tuple[str, ...]:
    terms = one.terms_gib
    states = [terms[name] for name in STATES]
    return (
        str(one.layers),
        wording.seconds(one.forward_s),
        wording.seconds(one.backward_s),
        f"{one.held:.3g}",
        f"{100 * one.waits:.0f} %",
        *(wording.amount(value) for value in (states if apart else [sum(states)])),
        wording.amount(terms["activations"]),
        wording.amount(sum(terms[name] for name in OTHER)),
        wording.amount(one.peak_gib),
    )


def render_stages(step: StepTimeline, memory: Memory, console: Console) -> None:
    """Prints the table of stages."""
    width = width_of(console)
    rows = list(table_cells(stage_figures(step, memory), width >= WIDE))
    table = grid("left", *["right"] * (len(rows[0]) - 1), gap=2 if width >= WIDE else 1)
    fullest = wording.amount(memory.peak_gib)
    for number, row in enumerate(rows):
        over = memory.peak_gib > memory.usable_gib and row[-1] == fullest
        styles = [LABEL if number == 0 else ""] * (len(row) - 1) + [LABEL if number == 0 else BAD if over else STRONG]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(row, styles, strict=True)))
    note = "per micro-batch; held: micro-batches in flight; memory in GiB"
    note += "" if width >= WIDE else f", by term from {WIDE} columns on"
    print_sections(console, [section("Stages", table, note=Text(note, style=LABEL))], width)

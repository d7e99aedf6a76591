"""Boxes, lines and labels on a page, written as SVG by hand or as PNG by matplotlib. Lengths are pixels, y grows downwards."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from ...search_spaces.errors import InputError

FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
PNG_DPI = 144
POINTS_PER_PIXEL = 0.72  # a page is drawn at 100 pixels an inch


@dataclass(frozen=True)
class Box:
    """A filled rectangle; `hint` is shown where a reader points at it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Label:
    """Text whose baseline begins, is centred or ends at (x, y)."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = "#222222"
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass
class Scene:
    """A page and what is drawn on it, from back to front."""

    width: float
    height: float
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


def text_width(text: str, size: float) -> float:
    """About how wide a label is."""
    return 0.6 * size * len(text)


def svg(scene: Scene) -> str:
    """The page as one SVG document that needs nothing else."""
    shapes = [*map(_svg_box, scene.boxes), *map(_svg_line, scene.lines), *map(_svg_label, scene.labels)]
    size = f'width="{scene.width:g}" height="{scene.height:g}" viewBox="0 0 {scene.width:g} {scene.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
    page = f'<rect width="{scene.width:g}" height="{scene.height:g}" fill="#ffffff"/>'
    return "\n".join([head, page, *shapes, "</svg>"]) + "\n"


def _svg_box(box: Box) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{max(box.width, 0.0):.2f}" height="{box.height:.2f}" fill="{box.fill}"'
    return f"<rect {place}><title>{escape(box.hint)}</title></rect>" if box.hint else f"<rect {place}/>"


def _svg_line(line: Line) -> str:
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in line.points)
    dashes = ' stroke-dasharray="4 3"' if line.dashed else ""
    return f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="{line.width:g}"{dashes}/>'


def _svg_label(label: Label) -> str:
    weight = ' font-weight="bold"' if label.bold else ""
    place = f'x="{label.x:.2f}" y="{label.y:.2f}" font-size="{label.size:g}" fill="{label.colour}" text-anchor="{label.anchor}"'
    return f'<text {place}{weight} pointer-events="none">{escape(label.text)}</text>'


def png(scene: Scene) -> bytes:
    """The page as a PNG file; InputError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("PNG pictures need matplotlib: pip install paraplan[plots], or write .svg or .html") from error
    figure = Figure(figsize=(scene.width / 100, scene.height / 100), dpi=PNG_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    corners = [[(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)] for b in scene.boxes]
    axes.add_collection(PolyCollection(corners, facecolors=[box.fill for box in scene.boxes], edgecolors="none"))
    for line in scene.lines:
        style = (0, (4, 3)) if line.dashed else "solid"
        axes.plot(*zip(*line.points, strict=True), color=line.colour, linewidth=line.width * POINTS_PER_PIXEL, linestyle=style)
    for label in scene.labels:
        axes.text(
            *(label.x, label.y, label.text),
            fontsize=label.size * POINTS_PER_PIXEL,
            color=label.colour,
            ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
            va="baseline",
            weight="bold" if label.bold else "normal",
            parse_math=False,
        )
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()

"""Pictures as rectangles and lines of text: drawn as SVG, as a page that holds one, or by matplotlib as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, FAINT, PAPER = "#1f2933", "#66727f", "#ffffff"
MARKS = {"inside": "#bcd9c6", "across": "#f3c59a"}
"""Colours of what stays in its place and of what leaves it."""


@dataclass(frozen=True)
class Rect:
    """A rectangle; `title` shows on hover, `classes` let a page colour it otherwise, `kind` says what it stands for."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    radius: float = 0.0
    title: str = ""
    kind: str = ""
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """A line of text with its baseline at y; `classes` let a page hide it."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = INK
    anchor: str = "start"
    bold: bool = False
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """What is drawn, in order, on paper of width × height pixels."""

    width: float
    height: float
    shapes: tuple[Rect | Text, ...]
    label: str


def svg(scene: Scene) -> str:
    """The scene as an SVG document; every text is escaped."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_element(scene)}\n'


def page(scene: Scene, choices: Mapping[str, str], chosen: str, colours: Sequence[str], name: str) -> str:
    """A page that holds the scene and works without a network or scripts: one of `choices` (key → label) colours it.

    Under key k a shape of class k-i has colour i of `colours`, and texts of class `only` show if they are of class only-k.
    """
    buttons = "\n".join(
        f'<input type="radio" name="by" id="by-{escape(key)}"{" checked" if key == chosen else ""}>'
        f'<label for="by-{escape(key)}">{escape(label)}</label>'
        for key, label in choices.items()
    )
    rules = [f"#by-{key}:checked ~ figure .{key}-{i} {{ fill: {c} }}" for key in choices for i, c in enumerate(colours)]
    rules += [f"#by-{key}:checked ~ figure .{key}-{mark} {{ fill: {c} }}" for key in choices for mark, c in MARKS.items()]
    rules += [f"#by-{key}:checked ~ figure .only-{key} {{ display: inline }}" for key in choices]
    style = "\n".join(
        [
            f"body {{ font-family: {FONT}; color: {INK}; margin: 16px }}",
            "figure { margin: 12px 0 0 } svg { max-width: 100%; height: auto }",
            "input { position: absolute; opacity: 0 }",
            "label { display: inline-block; padding: 4px 12px; margin-right: 6px; border: 1px solid #c3ccd5; border-radius: 4px }",
            "label { cursor: pointer } input:checked + label { background: #1f2933; color: #fff }",
            "input:focus-visible + label { outline: 2px solid #4e79a7 }",
            ".device:hover, .tile:hover { stroke: #1f2933; stroke-width: 1.5 } .only { display: none }",
            *rules,
        ]
    )
    legend = f"<span>{escape(name)}</span>\n" if choices else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(scene.label)}</title>\n'
        f"<style>\n{style}\n</style>\n</head>\n<body>\n{legend}{buttons}\n<figure>\n{_element(scene)}\n</figure>\n</body>\n</html>\n"
    )


def png(scene: Scene, scale: float = 2.0) -> bytes:
    """The scene as a PNG. ImportError without matplotlib, which is in the extra `plots`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    inch = 72.0
    with mpl.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(scene.width / inch, scene.height / inch), dpi=inch * scale, facecolor=PAPER)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        axes.axis("off")
        for shape in scene.shapes:
            if isinstance(shape, Rect):
                edge = shape.stroke or "none"
                corner = (shape.x, shape.y)
                axes.add_patch(Rectangle(corner, shape.width, shape.height, facecolor=shape.fill, edgecolor=edge, linewidth=0.8))
            else:
                align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
                weight = "bold" if shape.bold else "normal"
                said = shape.text.replace("$", r"\$")  # matplotlib would set it as a formula
                size = shape.size * 0.88  # its DejaVu runs wider than what browsers take
                axes.text(shape.x, shape.y, said, fontsize=size, color=shape.fill, ha=align, va="baseline", weight=weight)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def _element(scene: Scene) -> str:
    size = f'width="{scene.width:g}" height="{scene.height:g}" viewBox="0 0 {scene.width:g} {scene.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{escape(FONT)}" role="img">'
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(scene.label)}</title>", paper, *map(_shape, scene.shapes), "</svg>"])


def _shape(shape: Rect | Text) -> str:
    if isinstance(shape, Text):
        own = _class(("only", *shape.classes) if shape.classes else ())
        weight = ' font-weight="bold"' if shape.bold else ""
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        at = f'x="{shape.x:.6g}" y="{shape.y:.6g}" font-size="{shape.size:.3g}" fill="{shape.fill}"'
        return f"<text {at}{anchor}{weight}{own}>{escape(shape.text)}</text>"
    at = f'x="{shape.x:.6g}" y="{shape.y:.6g}" width="{shape.width:.4g}" height="{shape.height:.4g}"'
    own = _class((shape.kind, *shape.classes) if shape.kind else shape.classes)
    rest = (f' stroke="{shape.stroke}"' if shape.stroke else "") + (f' rx="{shape.radius:g}"' if shape.radius else "")
    if not shape.title:
        return f'<rect {at} fill="{shape.fill}"{rest}{own}/>'
    return f'<rect {at} fill="{shape.fill}"{rest}{own}><title>{escape(shape.title)}</title></rect>'


def _class(names: tuple[str, ...]) -> str:
    return f' class="{escape(" ".join(names))}"' if names else ""

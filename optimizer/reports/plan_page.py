"""A whole plan on paper: what the terminal shows, as a page with both pictures, as a picture, or as text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape

from rich.console import Console
from rich.text import Text

from ..result import Plan
from ..stage_work import stage_work
from ..step_timeline import StepTimeline
from .canvas import svg
from .html_page import html_page
from .pipeline_picture import pipeline_picture
from .stages import render_stages
from .terminal import render
from .topology import draw

PAGE_COLUMNS, TEXT_COLUMNS = 120, 80
STYLE = """pre { font: 13px/1.35 'DejaVu Sans Mono', Menlo, Consolas, monospace; overflow-x: auto; }
nav a { margin-right: 1.2em; }
h2 { font-size: 16px; margin-top: 2em; border-top: 1px solid #e4e4e4; padding-top: 1em; }
"""


def plan_page(plan: Plan, step: StepTimeline) -> str:
    """The plan as one HTML document that a browser opens without a network; `step` is the plan's, replayed."""
    devices = plan.plan.devices_used + plan.plan.devices_idle
    title = f"{plan.problem.model.name} on {devices:,} × {plan.problem.cluster.accelerator.name}"
    free = () if plan.devices_left is None else plan.devices_left.told
    picture = _inline(str(draw(plan.problem, plan.plan, "svg", free)))
    parts = (
        ("plan", "The plan", f"<pre>{_coloured(_printed(plan, PAGE_COLUMNS))}</pre>"),
        ("stages", "Its stages", f"<pre>{_coloured(_stages(plan, step, PAGE_COLUMNS))}</pre>"),
        ("timeline", "One step", f'<div class="picture">{svg(pipeline_picture(step))}</div>'),
        ("topology", "Where groups sit", f'<div class="picture">{picture}</div>'),
    )
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in parts)
    sections = "\n".join(f'<h2 id="{name}">{heading}</h2>\n{body}' for name, heading, body in parts)
    return html_page(title, STYLE, f"<h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{sections}")


def plan_picture(plan: Plan) -> str:
    """What the terminal shows, as an SVG."""
    recorder = _recorder(TEXT_COLUMNS)
    recorder.print(Text.from_ansi(_printed(plan, TEXT_COLUMNS)))
    return recorder.export_svg(title="paraplan")


def plan_text(plan: Plan, step: StepTimeline) -> str:
    """The same as plain text, with its stages."""
    ansi = _printed(plan, TEXT_COLUMNS) + _stages(plan, step, TEXT_COLUMNS)
    return "\n".join(line.rstrip() for line in Text.from_ansi(ansi).plain.splitlines()) + "\n"


def _printed(plan: Plan, columns: int) -> str:
    return _ansi(columns, lambda console: render(plan, console))


def _stages(plan: Plan, step: StepTimeline, columns: int) -> str:
    return _ansi(columns, lambda console: render_stages(stage_work(step), plan.plan.memory, console))


def _ansi(columns: int, show: Callable[[Console], None]) -> str:
    """What is shown on a terminal of so many columns, colours included."""
    printed = io.StringIO()
    show(Console(width=columns, file=printed, force_terminal=True, color_system="truecolor"))
    return printed.getvalue()


def _coloured(ansi: str) -> str:
    """The same as HTML."""
    recorder = _recorder(PAGE_COLUMNS)
    recorder.print(Text.from_ansi(ansi))
    return recorder.export_html(inline_styles=True, code_format="{code}")


def _recorder(columns: int) -> Console:
    return Console(record=True, width=columns, file=io.StringIO(), color_system="truecolor", force_terminal=True)


def _inline(picture: str) -> str:
    """An SVG file as a part of a page."""
    return re.sub(r"^<\?xml[^>]*>\s*", "", picture)

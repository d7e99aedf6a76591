"""The picture of a step as a page that a browser opens without a network: the drawing, and a table of its stages."""

from __future__ import annotations

from html import escape

from ..result import Memory
from ..stage_work import stage_work
from ..step_timeline import StepTimeline
from .canvas import svg
from .html_page import html_page
from .pipeline_picture import pipeline_picture
from .stages import table_cells

STYLE = """.picture rect:hover { stroke: #000; }
table { border-collapse: collapse; margin-top: 1em; font-size: 13px; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #e4e4e4; }
th { color: #666; font-weight: normal; }
p { color: #666; font-size: 13px; max-width: 70em; }
"""
READING = (
    "Point at a pass to read what it is and how long it takes. In the table, seconds are per micro-batch, “held” is how many "
    "micro-batches a stage keeps activations of at its fullest, “waits” the share of the pipeline's time that it does nothing, and "
    "memory is GiB per device."
)


def pipeline_page(step: StepTimeline, memory: Memory) -> str:
    """The page as one HTML document."""
    head, *rows_of = table_cells(stage_work(step), memory, apart=True)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows_of)
    title = f"{step.problem.model.name}: one step, {step.layout.schedule}, pp {step.layout.pp}"
    body = f"""<div class="picture">
{svg(pipeline_picture(step))}</div>
<table>
<tr>{"".join(f"<th>{escape(cell)}</th>" for cell in head)}</tr>
{rows}
</table>
<p>{escape(READING)}</p>"""
    return html_page(title, STYLE, body)

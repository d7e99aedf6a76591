"""A sweep as one page that a browser opens without a network: strategies, curves and fronts by plotly, with filters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from ..sweeps.grid import AXES
from ..sweeps.series import (
    STRATEGIES,
    batches,
    in_batch,
    is_planned,
    layout_words,
    phase_axes,
    strategy,
    values_of,
    varying,
    words_of,
)
from ..sweeps.table import Row
from ..sweeps.trades import Trade
from . import wording
from .html_page import html_page
from .sweep_look import COLOURS, MEASURES, PLOTLY_MARKS, SERIES, darker, ink, short_count

KNOBS = ("optimizer_sharding", "recompute", "offload")
FILTERS = {"model": "model", "cluster": "cluster", "devices": "devices", "seq_len": "tokens per sequence", "precision": "precision"}
READING = (
    "Every point is a plan of its own. Point at a cell or a mark to read its layout; choose above what is shown. A cell's colour "
    "is what the best layout divides beside the batch; its words are the degrees above 1 and the MFU."
)
FRONTS = (
    "A line joins the points of a cluster that no other of its points beats in both speed and cost; what is beaten is faint. "
    "Devices of different clusters cost different money: compare shapes, or multiply by a price."
)
TRADES = (
    "Layouts of one point that no other of its layouts beats in all of its aims, here in the first two; point at one to read it."
)


def sweep_page(rows: Sequence[Row], title: str, traded: Sequence[Trade] = ()) -> str:
    """The page as one HTML document with plotly in it."""
    from plotly.offline import get_plotlyjs

    here = Path(__file__).parent
    style, script = ((here / f"sweep_page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    shown = {**_data(rows), "trades": [asdict(trade) for trade in traded]}
    data = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    sections = "\n".join(
        f'<h2>{escape(head)}</h2>\n<p>{escape(words)}</p>\n{more}<div class="panels" id="{name}"></div>\n<p id="{name}-more"></p>'
        for name, head, words, more in (
            ("strategies", "Which strategy wins", READING, '<div id="key"></div>\n'),
            ("curves", "Curves", "A line for each cluster.", ""),
            ("fronts", "What speed costs", FRONTS, ""),
            *([("trades", "Fronts of several aims", TRADES, "")] if traded else []),
        )
    )
    body = f"""<h1>{escape(title)}</h1>
<p id="count"></p>
<div id="filters"></div>
{sections}
<script>const SWEEP = {data};</script>
<script>
{script}</script>"""
    return html_page(title, style, body, script=get_plotlyjs())


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page's script draws from: plain values, ordered as they are shown."""
    across, upwards = phase_axes(rows)
    options = sorted({name for row in rows for name in row if name.startswith("option ")})
    apart = [name for name in varying(rows, (*AXES, *options)) if name != "global_batch"]
    shared = batches(rows)
    axes = [_axis(rows, name) for name in apart]
    if len(shared) > 1:
        words = [batch.words for batch in shared]
        axes.append({"name": "batch", "words": "global batch", "values": words, "labels": words})
    shown = dict.fromkeys((across, upwards))
    return {
        "points": [
            {
                **_point(row),
                **{name: row.get(name) for name in dict.fromkeys((*apart, *shown, "cluster"))},
                "batch": [batch.words for batch in shared if in_batch(row, batch)],
            }
            for row in rows
        ],
        "axes": axes,
        "across": across,
        "upwards": upwards,
        "implied": ["devices"] if across == "cluster" else [],
        "orders": {name: values_of(rows, name) for name in shown},
        "ticks": {name: {str(value): _tick(name, value) for value in values_of(rows, name)} for name in shown},
        "names": {name: FILTERS[name] for name in shown},
        "strategies": list(STRATEGIES),
        "colours": COLOURS,
        "measures": {name: words for name, (words, _) in MEASURES.items()},
        "clusters": [
            {"name": name, "colour": colour, "text": darker(colour), "mark": mark}
            for name, colour, mark in zip(dict.fromkeys(row["cluster"] for row in rows), cycle(SERIES), cycle(PLOTLY_MARKS))
        ],
    }


def _axis(rows: Sequence[Row], name: str) -> dict[str, Any]:
    values = values_of(rows, name) if name in AXES else list(dict.fromkeys(row.get(name) for row in rows))
    return {"name": name, "words": FILTERS.get(name, name), "values": values, "labels": [words_of(name, value) for value in values]}


def _tick(name: str, value: Any) -> str:
    return short_count(value) if name in ("devices", "seq_len") else words_of(name, value)


def _point(row: Row) -> dict[str, Any]:
    """What a point shows: its words, its colour and its figures; no figures where it has no plan."""
    asked = f"<b>{escape(row['model'])}</b> on {row['devices']:,} × {escape(row['cluster'])}"
    asked += f"<br>{row['global_batch']:,} × {row['seq_len']:,} tokens a step, {escape(row['precision'])}"
    if not is_planned(row):
        reason = wrapped(escape(row["reason"] or ""))
        return {"strategy": None, "cell": "no plan", "hover": f"{asked}<br><b>{row['status']}</b>: {reason}"}
    name = strategy(row)
    degrees = " ".join(f"{part}{row[part]}" for part in ("tp", "cp", "pp", "ep") if row[part] > 1) or "data only"
    kept = [f"{part.replace('_', ' ')} {row[part]}" for part in KNOBS if row[part] not in (None, "none")]
    lines = (
        asked,
        f"<b>{layout_words(row)} micro-batch {row['micro_batch']}</b>",
        *([wrapped(escape(", ".join(kept)))] if kept else []),
        f"step {wording.seconds(row['step_time_s'])}, MFU {100 * row['mfu']:.1f} %",
        f"{row['tokens_per_s_per_device']:,.0f} tokens/s per device",
        f"peak {wording.gib(row['peak_gib'])} of {wording.gib(row['usable_gib'])}",
        f"{100 * row['cross_supernode_share']:.0f} % of traffic across supernodes",
        *([f"{row['devices_idle']:,} devices idle"] if row["devices_idle"] else []),
    )  # fmt: skip
    return {
        "strategy": name,
        "ink": ink(name),
        "cell": f"{_two_lines(degrees)}<br>{100 * row['mfu']:.0f} %",
        "hover": "<br>".join(lines),
        "speed": row["tokens_per_s"],
        "measures": {measure: read(row) for measure, (_, read) in MEASURES.items()},
    }


def _two_lines(degrees: str) -> str:
    words = degrees.split(" ")
    return f"{' '.join(words[:2])}<br>{' '.join(words[2:])}" if len(words) > 2 else degrees


def wrapped(text: str, width: int = 56) -> str:
    """Lines of a hover, which does not break them itself."""
    import textwrap

    return "<br>".join(textwrap.wrap(text, width, max_lines=10, placeholder=" …"))

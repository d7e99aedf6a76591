"""A sweep at the terminal: a line a point, the best of every model, and why points have no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from ..sweeps.grid import AXES
from ..sweeps.point import PLANNED
from ..sweeps.table import Row
from . import wording
from .drawing import BAD, LABEL, grid, print_sections, section, width_of

DEGREES = ("tp", "cp", "pp", "dp", "ep", "vpp")
SHORT = {"global_batch": "batch", "seq_len": "seq"}
FEW_REASONS = 8
FULL_WIDTH = 110


def render_sweep(rows: Sequence[Row], left: int, where: str, console: Console) -> None:
    """What is done; `left` points are not, `where` is the store."""
    width = width_of(console)
    planned = [row for row in rows if row["status"] in PLANNED]
    parts = [wording.count(len(rows), "point"), f"{len(planned):,} planned", *_others(rows)]
    title = Text(" · ".join([*parts, *([f"{left:,} not done"] if left else [])]), style=LABEL)
    if not rows:
        print_sections(console, [section(where, Text("no points"), note=title)], width)
        return
    sections: list[RenderableType] = [section(where, _table(rows, width), note=title)]
    reasons = Counter(row["reason"] for row in rows if row["reason"])
    if reasons:
        sections.append(section("Without a plan", *_reasons(reasons)))
    print_sections(console, sections, width)


def _others(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row["status"] for row in rows if row["status"] not in PLANNED)
    return [f"{count:,} {status}" for status, count in counts.items()]


def _table(rows: Sequence[Row], width: int) -> RenderableType:
    """Axes that do not vary stand in the caption above, not in every line."""
    options = sorted({name for row in rows for name in row if name.startswith("option ")})
    axes = [name for name in (*AXES, *options) if len({str(row.get(name)) for row in rows}) > 1] or ["model"]
    wide = width >= FULL_WIDTH
    text = {"model", "cluster", "precision", *options}
    figures = ("step", "tokens/s/device", "MFU") if wide else ("step", "MFU")
    table = grid(*("wrap" if name in text else "right" for name in axes), *("right" for _ in figures), "wrap")
    heads = [*(SHORT.get(name, name.removeprefix("option ")) for name in axes), *figures, "layout"]
    table.add_row(*(Text(head, style=LABEL) for head in heads))
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in axes), *_result(row, wide))
    return table


def _result(row: Row, wide: bool) -> list[Text]:
    if row["status"] not in PLANNED:
        return [Text("–"), *([Text("–")] if wide else []), Text("–"), Text(row["status"], style=BAD)]
    rate = [Text(f"{row['tokens_per_s_per_device']:,.0f}")] if wide else []
    layout = " ".join(f"{name}{row[name]}" for name in DEGREES if row[name] > 1) or "one device"
    more = [row[name] for name in ("recompute", "offload") if row[name] not in (None, "none")] if wide else []
    stopped = "" if row["status"] == "optimal" else f" (within {row['gap']:.0%})"
    return [Text(wording.seconds(row["step_time_s"])), *rate, Text(f"{row['mfu']:.1%}"), Text(" ".join([layout, *more]) + stopped)]


def _reasons(reasons: Counter[str]) -> list[RenderableType]:
    table = grid("right", "wrap")
    for reason, count in reasons.most_common(FEW_REASONS):
        table.add_row(Text(f"{count:,} ×", style=LABEL), Text(reason))
    rest = len(reasons) - FEW_REASONS
    return [table, *([Text(f"and {rest:,} more reasons: --show status!=optimal --csv FILE", style=LABEL)] if rest > 0 else [])]


def _cell(value: Any) -> Text:
    return Text("–" if value is None else f"{value:,}" if isinstance(value, int) else str(value))

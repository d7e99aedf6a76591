"""Pictures of a sweep as PNG and SVG, drawn by matplotlib (the extra `plots`): where which strategy wins, curves, and fronts."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...search_spaces.errors import InputError
from ..sweeps.series import (
    STRATEGIES,
    device_hours,
    front,
    is_planned,
    panels,
    phase_axes,
    strategy,
    values_of,
    words_of,
)
from ..sweeps.table import Row
from ..sweeps.trades import Trade
from .sweep_look import COLOURS, MARKS, MEASURES, NO_PLAN, SERIES, darker, ink, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
MOST_PANELS = 16
FAINT = "#6b7280"
CELL_INCHES = (0.82, 0.52)
LETTERS_PER_CELL = 11
SMALL, NORMAL = 6.5, 8.5
MOST_TICKS = 7
MOST_NAMED = 8
EDGE: dict[str, Any] = {"edgecolor": "#8a8f98", "linewidth": 0.4}
EMPTY: dict[str, Any] = {"facecolor": NO_PLAN, "edgecolor": "#c4c8cf", "linewidth": 0, "hatch": "////"}
CURVES = ("step time", "MFU")
DPI = 110
LEAST_RATIO = 3.0
"""Of the ends of a logarithmic axis, so that differences of a per cent look like it."""
STEEP = 0.2
"""Slope of a front as it is drawn from which on it would cross a label over its point."""
LEAST_GAP = 0.088
"""Between names at the ends of lines, as a share of the panel's height."""

ROUND = ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8), (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))

Panels = dict[str, list[Row]]


def pictures(rows: Sequence[Row], traded: Sequence[Trade] = ()) -> dict[str, bytes]:
    """Files by name: strategies, curves, fronts and aims, each as .png and .svg; those that have too little to show are left out.

    InputError where nothing has a plan.
    """
    import matplotlib as mpl

    if not any(is_planned(row) for row in rows):
        raise InputError("--plot: no point has a plan, so there is nothing to draw; --show tells why")
    drawn = {"strategies": strategies(rows), "curves": curves(rows), "fronts": fronts(rows), "aims": aims(traded)}
    found: dict[str, bytes] = {}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paraplan", "font.family": "DejaVu Sans"}):
        for name, figure in drawn.items():
            if figure is not None:
                found[f"{name}.png"] = _saved(figure, "png")
                found[f"{name}.svg"] = _saved(figure, "svg")
    return found


def _saved(figure: Figure, kind: str) -> bytes:
    held = io.BytesIO()
    about = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    figure.savefig(held, format=kind, dpi=DPI, metadata=about)
    return held.getvalue()


# --- which strategy wins where -----------------------------------------------------------------------------------------------


def strategies(rows: Sequence[Row]) -> Figure:
    """A phase diagram: devices across, models (or what else varies) upwards; colour and words say what the best layout divides."""
    across, upwards = phase_axes(rows)
    shown = _first(panels(rows, across, upwards))
    ys, own = values_of(rows, upwards), [values_of(held, across) for held in shown.values()]
    alike = len(set(map(len, own))) == 1  # clusters of one peak have other counts each, but as many
    most = max(map(len, own)) if alike else len(values_of(rows, across))
    columns = min(len(shown), max(1, min(COLUMNS, 22 // most)))
    lines = -(-len(shown) // columns)
    width = columns * (most * CELL_INCHES[0] + 0.35) + 1.1
    height = lines * (len(ys) * CELL_INCHES[1] + 0.75) + 0.75
    figure = _figure(max(width, 7.6), height)
    for place, (title, held) in enumerate(shown.items()):
        axes, xs = figure.add_subplot(lines, columns, place + 1), own[place] if alike else values_of(rows, across)
        axes.set_title(_folded(title, len(xs)), fontsize=NORMAL + 0.5, loc="left")
        cells = {(row[across], row[upwards]): row for row in held}
        for x, y in ((x, y) for x in range(len(xs)) for y in range(len(ys))):
            _cell(axes, x, y, cells.get((xs[x], ys[y])))
        axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
        axes.set_xticks(
            range(len(xs)), [_cell_tick(across, x, rows) for x in xs], fontsize=NORMAL if across != "cluster" else SMALL
        )
        first = place % columns == 0
        axes.set_yticks(range(len(ys)), [_tick(upwards, y) for y in ys] if first else [], fontsize=NORMAL)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    _below(figure, _axis_name(across), panels(rows, across, upwards), shown)
    _key(figure, rows)
    return figure


def _folded(title: str, cells: float) -> str:
    """A title over so many cells: broken between its parts, and within one that is wider than they are."""
    import textwrap

    width = max(12, round(LETTERS_PER_CELL * cells))
    lines: list[str] = []
    for part in title.split(" · "):
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and len(longer) <= width:
            lines[-1] = longer
        else:
            lines += textwrap.wrap(part, width) or [""]
    return "\n".join(lines)


def _cell(axes: Axes, x: int, y: int, row: Row | None) -> None:
    from matplotlib.patches import Rectangle

    if row is None:
        return
    if not is_planned(row):
        axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, **EMPTY))
        axes.text(x, y, _why_not(row), ha="center", va="center", fontsize=SMALL, color=FAINT, backgroundcolor=NO_PLAN)
        return
    name = strategy(row)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=COLOURS[name], **EDGE))
    words = _two_lines([f"{part}{row[part]}" for part in ("tp", "cp", "pp", "ep") if row[part] > 1]) or "data only"
    axes.text(x, y + 0.10, words, ha="center", va="center", fontsize=SMALL, color=ink(name), linespacing=1.0)
    axes.text(x, y - 0.34, f"{100 * row['mfu']:.0f} % MFU", ha="center", va="center", fontsize=SMALL - 1, color=ink(name))


def _two_lines(words: Sequence[str]) -> str:
    half = 2 if len(words) > 2 else len(words)
    return "\n".join(" ".join(part) for part in (words[:half], words[half:]) if part)


def _why_not(row: Row) -> str:
    return {"infeasible": "no layout\nfits", "bad input": "cannot\nbe asked"}.get(row["status"], str(row["status"]))


def _key(figure: Figure, rows: Sequence[Row]) -> None:
    """Colours of the strategies that occur, in words."""
    from matplotlib.patches import Patch

    there = {strategy(row) for row in rows if is_planned(row)}
    named = [name for name in STRATEGIES if name in there]
    handles = [Patch(facecolor=COLOURS[name], label=name, **EDGE) for name in named]
    if any(not is_planned(row) for row in rows):
        handles.append(Patch(label="no plan", **EMPTY))
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), 9), fontsize=NORMAL, frameon=False,
        title="What the best layout divides beside the batch", title_fontsize=NORMAL, handlelength=1.4, columnspacing=1.2,
    )  # fmt: skip


# --- curves ------------------------------------------------------------------------------------------------------------------


def curves(rows: Sequence[Row]) -> Figure | None:
    """Step time and MFU over devices (or what else varies), a line for each cluster; None where nothing varies."""
    across, _ = phase_axes(rows)
    if across == "cluster" or len(values_of(rows, across)) < 2:
        return None
    shown = _first({title: held for title, held in panels(rows, across, "cluster").items() if _is_line(held, across)})
    if not shown:
        return None
    columns = min(COLUMNS, len(shown))
    blocks = -(-len(shown) // columns)
    figure = _figure(3.3 * columns + 0.5, (1.95 * len(CURVES) + 0.3) * blocks + 0.4)
    series = _series(rows)
    for place, (title, held) in enumerate(shown.items()):
        block, column = divmod(place, columns)
        for turn, measure in enumerate(CURVES):
            axes = figure.add_subplot(blocks * len(CURVES), columns, (block * len(CURVES) + turn) * columns + column + 1)
            if turn == 0:
                axes.set_title(_folded(title or held[0]["model"], 3.0 / CELL_INCHES[0]), fontsize=NORMAL + 0.5, loc="left")
            _curve(axes, held, across, measure, series)
            if column == 0:
                axes.set_ylabel(f"{measure}\n{MEASURES[measure][0]}", fontsize=NORMAL, color=FAINT)
    _below(figure, _axis_name(across), panels(rows, across, "cluster"), shown)
    return figure


def _is_line(rows: Sequence[Row], across: str) -> bool:
    return len({row[across] for row in rows if is_planned(row)}) > 1


def _series(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Colour and mark of every cluster."""
    names = dict.fromkeys(row["cluster"] for row in rows)
    return {name: (SERIES[place % len(SERIES)], MARKS[place % len(MARKS)]) for place, name in enumerate(names)}


def _curve(axes: Axes, rows: Sequence[Row], across: str, measure: str, series: dict[str, tuple[str, str]]) -> None:
    read = MEASURES[measure][1]
    log = measure != "MFU"
    ends: list[tuple[str, float]] = []
    for name, (colour, mark) in series.items():
        points = sorted((row[across], read(row)) for row in rows if row["cluster"] == name and is_planned(row))
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=4, linewidth=1.3)
            ends.append((name, points[-1][1]))
    xs = values_of(rows, across)
    axes.set_xscale("log", base=2)
    named = xs[:: -(-len(xs) // MOST_TICKS)]
    axes.set_xticks(named, [_tick(across, x) for x in named], fontsize=NORMAL - 1.5)
    axes.minorticks_off()
    if log:
        _logarithmic(axes)
    else:
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.tick_params(labelsize=NORMAL - 1.5)
    axes.grid(True, color="#eceef1", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    _name_ends(axes, ends, max(xs), {name: colour for name, (colour, _) in series.items()}, log)


def _logarithmic(axes: Axes, name: str = "y", words: Callable[[float, float], str] = lambda value, _: f"{value:,.10g}") -> None:
    """An axis whose ends differ by LEAST_RATIO at least, with as many round values named as have room."""
    from matplotlib.ticker import FixedLocator, NullFormatter

    scaled, limits = (axes.set_yscale, axes.set_ylim) if name == "y" else (axes.set_xscale, axes.set_xlim)
    scaled("log")
    low, high = limits()
    more = max(1.12, math.sqrt(LEAST_RATIO * low / high))
    low, high = low / more, high * more
    limits(low, high)
    axis = axes.yaxis if name == "y" else axes.xaxis
    axis.set_major_locator(FixedLocator(_round_values(low, high, MOST_TICKS if name == "y" else MOST_TICKS - 2)))
    axis.set_major_formatter(words)
    axis.set_minor_formatter(NullFormatter())


def _round_values(low: float, high: float, most: int) -> list[float]:
    """Round values between the ends of a logarithmic axis, wherever it begins: the finest series of which it has room for."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ROUND:
        found = [step * 10.0**n for n in decades for step in steps if low <= step * 10.0**n <= high]
        if len(found) <= most:
            return found
    return found


def _name_ends(axes: Axes, ends: Sequence[tuple[str, float]], right: float, colours: dict[str, str], log: bool) -> None:
    """Names of lines beside their ends, moved apart where they would lie on each other."""
    if len(ends) < 2 and len(colours) < 2:
        return
    low, high = axes.get_ylim()
    scale: Callable[[float], float] = math.log if log else float
    share = {name: (scale(value) - scale(low)) / (scale(high) - scale(low)) for name, value in ends}
    order = sorted(share, key=lambda name: share[name])
    places = [share[name] for name in order]
    for _ in range(60):
        for a, b in pairwise(range(len(places))):
            if (short := LEAST_GAP - (places[b] - places[a])) > 0:
                places[a] -= short / 2
                places[b] += short / 2
    for name, place in zip(order, places, strict=True):
        axes.annotate(
            name, (1.0, place), xycoords="axes fraction", xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=SMALL, color=darker(colours[name]), annotation_clip=False,
        )  # fmt: skip


# --- fronts ------------------------------------------------------------------------------------------------------------------


def fronts(rows: Sequence[Row]) -> Figure | None:
    """What speed costs: tokens per second of the job against device-hours per million tokens, a front for each cluster."""
    apart = panels(rows, "devices", "cluster")
    shown = _first({title: some for title, some in apart.items() if len({r["tokens_per_s"] for r in some if is_planned(r)}) > 1})
    if not shown:
        return None
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    figure = _figure(3.5 * columns + 0.5, 2.9 * lines + 0.5)
    series = _series(rows)
    for place, (title, some) in enumerate(shown.items()):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set_title(_folded(title or some[0]["model"], 3.0 / CELL_INCHES[0]), fontsize=NORMAL + 0.5, loc="left")
        ends, drawn = [], []
        for name, (colour, mark) in series.items():
            own = [row for row in some if row["cluster"] == name and is_planned(row)]
            if own:
                drawn.append((_draw_front(axes, own, colour, mark), colour))
                ends.append((name, device_hours(drawn[-1][0][-1])))
        _logarithmic(axes)
        _logarithmic(axes, "x", lambda value, _: f"{value / 1e6:,.10g}M")
        for best, colour in drawn:
            _name_points(axes, best, darker(colour))
        axes.minorticks_off()
        axes.tick_params(labelsize=NORMAL - 1.5)
        axes.grid(True, color="#eceef1", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        _name_ends(axes, ends, 1.0, {name: colour for name, (colour, _) in series.items()}, True)
    _below(figure, "tokens per second of the whole job (right is faster)", apart, shown)
    figure.supylabel("device-hours per million tokens (down is cheaper)", fontsize=NORMAL + 0.5, color=FAINT)
    return figure


def _draw_front(axes: Axes, rows: Sequence[Row], colour: str, mark: str) -> list[Row]:
    """All points, those that another beats faint; those of the front."""
    best = front(rows, device_hours, lambda row: float(row["tokens_per_s"]))
    axes.plot(
        [row["tokens_per_s"] for row in rows], [device_hours(row) for row in rows],
        linestyle="none", marker=mark, markersize=3.5, color=colour, alpha=0.25,
    )  # fmt: skip
    axes.plot(
        [row["tokens_per_s"] for row in best], [device_hours(row) for row in best],
        color=colour, marker=mark, markersize=4.5, linewidth=1.3,
    )  # fmt: skip
    return best


def _name_points(axes: Axes, best: Sequence[Row], colour: str) -> None:
    """Devices of every point of a front over it; left of it where the front climbs: from there no line comes."""
    places = [(row["tokens_per_s"], device_hours(row)) for row in best]
    drawn = axes.transData.transform(places)
    climbs = any(after[1] - here[1] > STEEP * (after[0] - here[0]) for here, after in pairwise(drawn))
    for row, place in zip(best, places, strict=True):
        axes.annotate(
            f"{row['devices']:,}", place, xytext=(-2 if climbs else 0, 5), textcoords="offset points",
            fontsize=SMALL - 1, ha="right" if climbs else "center", color=colour,
        )  # fmt: skip


def aims(traded: Sequence[Trade]) -> Figure | None:
    """The fronts of points that were planned for several aims, in the first two; None where there is none."""
    if not traded:
        return None
    columns = min(COLUMNS, len(traded))
    lines = -(-min(len(traded), MOST_PANELS) // columns)
    figure = _figure(3.7 * columns + 0.3, 2.9 * lines + 0.3)
    for place, trade in enumerate(traded[:MOST_PANELS]):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set_title(trade.title.replace(", ", "\n", 1), fontsize=NORMAL, loc="left")
        axes.plot([one.x for one in trade.points], [one.y for one in trade.points], color=SERIES[1], marker="o", markersize=4)
        for one in trade.points:
            if one.marks:
                axes.annotate(
                    ", ".join(one.marks), (one.x, one.y), xytext=(5, 4), textcoords="offset points", fontsize=SMALL, color=FAINT
                )
        axes.set_xlabel(trade.x_name, fontsize=NORMAL, color=FAINT)
        axes.set_ylabel(trade.y_name, fontsize=NORMAL, color=FAINT)
        axes.margins(0.12)
        axes.tick_params(labelsize=NORMAL - 1.5)
        axes.grid(True, color="#eceef1", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# --- shared ------------------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _first(found: Panels) -> Panels:
    """As many panels as a page takes, of those that have a plan to show."""
    return dict([(title, rows) for title, rows in found.items() if any(map(is_planned, rows))][:MOST_PANELS])


def _below(figure: Figure, axis: str, every: Panels, shown: Panels) -> None:
    """What goes across, and which panels have too little to show, or no room."""
    import textwrap

    left = [title or rows[0]["model"] for title, rows in every.items() if title not in shown]
    named = ", ".join(left[:MOST_NAMED]) + (f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else "")
    words = textwrap.wrap(f"not drawn: {named}", round(figure.get_figwidth() * 15)) if left else []
    figure.supxlabel("\n".join([axis, *words]), fontsize=NORMAL + 0.5, color=FAINT)


def _tick(axis: str, value: Any) -> str:
    return short_count(value) if axis in ("devices", "seq_len") else words_of(axis, value)


def _cell_tick(axis: str, value: Any, rows: Sequence[Row]) -> str:
    """The same; a cluster with its devices, in lines that a cell is wide enough for."""
    if axis != "cluster":
        return _tick(axis, value)
    devices = next(row["devices"] for row in rows if row["cluster"] == value)
    return f"{value.replace('-', chr(10), 1)}\n{devices:,}"


def _axis_name(axis: str) -> str:
    return {"devices": "devices", "seq_len": "tokens per sequence"}.get(axis, axis)

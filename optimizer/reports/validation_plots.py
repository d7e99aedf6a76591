"""Plots of predictions beside measured runs, as PNG files. They need matplotlib (pip install paraplan[plots])."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cost_models.memory import GIB
from ...cost_models.run_clusters import device_of
from ...cost_models.run_statistics import SMALLEST_GROUP, ranked_within, regret
from ...cost_models.validation import Outcome, Validation
from ...search_spaces.errors import InputError
from ...search_spaces.quantities import free_bytes
from ...search_spaces.workload import MEMORY_BAND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"fit": "#8fa8c8", "test": "#c2410c"}
OURS, BASELINE = "#1d4ed8", "#9ca3af"
COLUMNS = 5
FACTORS = ("num_accelerators", "tp", "pp", "cp", "ep", "micro_batch", "num_microbatches", "seq_len", "hidden_size")
FEW = 5  # rows that a box needs
STATUSES = ("ok", "oom")


def write_plots(validation: Validation, directory: Path) -> list[Path]:
    """Writes the four plots and returns their paths; InputError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install paraplan[plots]") from error
    matplotlib.use("Agg")
    drawn = {
        "predicted-vs-measured.png": predicted_vs_measured,
        "error-by-factor.png": error_by_factor,
        "memory.png": memory,
        "regret.png": regrets,
    }
    paths = []
    for name, draw in drawn.items():
        figure = draw(validation)
        figure.savefig(directory / name, dpi=80, metadata={"Software": None})
        paths.append(directory / name)
    return paths


def predicted_vs_measured(validation: Validation) -> Figure:
    """Step time per family, logarithmic, with a band of ±10 %."""
    families = {name: _timed(validation, name) for name in validation.families}
    return _grid(
        {f"{name} ({len(rows)})": rows for name, rows in families.items() if rows},
        lambda axes, rows: _scatter(axes, rows, lambda o: (o.measured_step_time_s, o.predicted_step_time_s)),
        "measured step time, s",
        "predicted step time, s",
    )


def error_by_factor(validation: Validation) -> Figure:
    """log(predicted/measured) over the factors of a layout, families' own bias taken off: what is left has a slope if an
    ingredient is missing.
    """
    rows = [o for name in validation.families for o in _timed(validation, name)]
    bias = _biases(rows)
    values = {name.replace("_", " "): _boxes(rows, name, bias) for name in FACTORS}
    return _grid(values, _draw_boxes, "factor's value", "log(predicted/measured) − family's median")


def memory(validation: Validation) -> Figure:
    """Peak memory per family, and runs that fitted and that ran out by their predicted peak over the device's free memory."""
    peaks: dict[str, list[Outcome]] = {}
    for name in validation.families:
        rows = [o for o in validation.outcomes if o.run.family == name and o.predicted_peak_gib and o.measured_peak_gib]
        if len(rows) >= FEW:
            peaks[f"{name} ({len(rows)})"] = rows
    ends: dict[str, list[Outcome]] = {}
    for name in validation.families:
        rows = [o for o in validation.outcomes if o.run.family == name and o.predicted_oom is not None and o.run.status in STATUSES]
        if sum(1 for o in rows if o.run.status == "oom") >= FEW:
            ends[f"{name}: {len(rows)} that ran or ran out"] = rows

    def draw(axes: Axes, panel: tuple[bool, list[Outcome]]) -> None:
        if panel[0]:
            _draw_ends(axes, panel[1])
        else:
            _scatter(axes, panel[1], lambda o: (o.measured_peak_gib, o.predicted_peak_gib))

    shown = {name: (False, rows) for name, rows in peaks.items()} | {name: (True, rows) for name, rows in ends.items()}
    return _grid(shown, draw, "measured peak, GiB (bars: predicted peak over free memory)", "predicted peak, GiB (bars: runs)")


def regrets(validation: Validation) -> Figure:
    """Regret of our pick in every group, sorted, beside a pick at random (what a constant MFU does)."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    found: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for name in validation.families:
        for o in _timed(validation, name):
            found[ranked_within(o)].append(o)
    for key, members in found.items():
        if key and len(members) >= SMALLEST_GROUP:
            groups[key[0]].append(_regret_pair(members))
    return _grid(
        {f"{name} ({len(pairs)} groups)": sorted(pairs) for name, pairs in groups.items()}, _draw_regrets, "group", "regret, %"
    )


def _timed(validation: Validation, family: str) -> list[Outcome]:
    return [
        o
        for o in validation.outcomes
        if o.run.family == family and not o.excluded and o.predicted_step_time_s and o.measured_step_time_s
    ]


def _log_ratio(outcome: Outcome) -> float:
    return math.log((outcome.predicted_step_time_s or 1.0) / (outcome.measured_step_time_s or 1.0))


def _stack(outcome: Outcome) -> tuple[str, str]:
    return (outcome.job.problem.stack.name if outcome.job else "", device_of(outcome.run))


def _biases(rows: Sequence[Outcome]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for o in rows:
        found[_stack(o)].append(_log_ratio(o))
    return {key: sorted(values)[len(values) // 2] for key, values in found.items()}


def _factor(outcome: Outcome, name: str) -> int:
    assert outcome.job is not None
    problem, layout = outcome.job.problem, outcome.job.layout
    known = {"num_accelerators": problem.devices, "seq_len": problem.workload.seq_len, "hidden_size": problem.model.hidden_size}
    value = known.get(name) or int(getattr(layout, name))
    return 1 << round(math.log2(value))


def _boxes(rows: Sequence[Outcome], name: str, bias: dict[tuple[str, str], float]) -> dict[int, list[float]]:
    """Errors by the factor's value, put together by powers of two."""
    found: dict[int, list[float]] = defaultdict(list)
    for o in rows:
        found[_factor(o, name)].append(_log_ratio(o) - bias[_stack(o)])
    return {value: errors for value, errors in sorted(found.items()) if len(errors) >= FEW}


def _regret_pair(members: Sequence[Outcome]) -> tuple[float, float]:
    import numpy as np

    measured = np.array([o.measured_step_time_s for o in members], dtype=np.float64)
    ours = regret(np.array([o.predicted_step_time_s for o in members], dtype=np.float64), measured)
    return ours, float(measured.mean() / measured.min() - 1.0)


def _grid(panels: dict[str, Any], draw: Callable[[Axes, Any], None], x: str, y: str) -> Figure:
    """Small multiples, one panel per entry."""
    from matplotlib.figure import Figure

    columns = min(COLUMNS, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.0 * columns + 0.6, 2.7 * rows + 0.7), layout="constrained")
    for place, (name, data) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.set_title(name, fontsize=9)
        axes.tick_params(which="both", labelsize=7)
        draw(axes, data)
    figure.supxlabel(x, fontsize=9)
    figure.supylabel(y, fontsize=9)
    return figure


def _scatter(axes: Axes, rows: Sequence[Outcome], pair: Callable[[Outcome], tuple[float | None, float | None]]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    points = [(*pair(o), o.run.split) for o in rows]
    ends = [value for x, y, _ in points for value in (x, y) if value]
    low, high = min(ends) * 0.8, max(ends) * 1.25
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#e5e7eb", zorder=0)
    axes.plot([low, high], [low, high], color="black", linewidth=0.6, zorder=1)
    for split, colour in COLOURS.items():
        chosen = [(x, y) for x, y, where in points if where == split]
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            axes.scatter(xs, ys, s=6, color=colour, alpha=0.7, label=split, linewidths=0)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high / low > 8 else (1.0, 2.0, 3.0, 5.0, 7.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=6, frameon=False, loc="upper left")


def _draw_boxes(axes: Axes, found: dict[int, list[float]]) -> None:
    axes.axhline(0.0, color="black", linewidth=0.6)
    if found:
        axes.boxplot(list(found.values()), showfliers=False, whis=(10, 90), widths=0.6, medianprops={"color": COLOURS["test"]})
        axes.set_xticks(range(1, len(found) + 1), [f"{value}\n{len(errors)}" for value, errors in found.items()], fontsize=6)
    axes.set_ylim(-1.2, 0.8)


def _draw_ends(axes: Axes, rows: Sequence[Outcome]) -> None:
    """Runs by predicted peak over free memory, in steps of 5 %; grey: the band of doubt, line: the boolean's limit."""
    bins = [0.05 * step for step in range(51)]
    axes.axvspan(1.0 - MEMORY_BAND, 1.0 + MEMORY_BAND, color="#e5e7eb", zorder=0)
    for status, colour in (("ok", OURS), ("oom", COLOURS["test"])):
        shares = [min(_share_of_free(o), bins[-1] - 0.01) for o in rows if o.run.status == status]
        axes.hist(shares, bins=bins, color=colour, alpha=0.6, label=f"{status} ({len(shares)})")
    limits = {o.job.problem.stack.reserved_over_allocated.value for o in rows if o.job is not None}
    for reserved in limits:
        axes.axvline(1.0 / reserved, color="black", linewidth=0.8)
    axes.legend(fontsize=6, frameon=False)


def _share_of_free(outcome: Outcome) -> float:
    assert outcome.job is not None
    return (outcome.fullest_gib or 0.0) * GIB / free_bytes(outcome.job.problem.cluster)


def _draw_regrets(axes: Axes, pairs: Sequence[tuple[float, float]]) -> None:
    places = range(len(pairs))
    axes.scatter(places, [100 * random for _, random in pairs], s=8, color=BASELINE, label="at random")
    axes.scatter(places, [100 * ours for ours, _ in pairs], s=10, color=OURS, label="ours")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_yticks([0, 5, 10, 30, 100, 300, 1000], ["0", "5", "10", "30", "100", "300", "1000"])
    axes.set_ylim(bottom=-1)
    axes.legend(fontsize=6, frameon=False, loc="upper left")

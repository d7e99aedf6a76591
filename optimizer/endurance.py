"""What failures make of a priced layout: how often it fails, what it saves, and what share of its time trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost_models.checkpoint import Failures, saved_bytes, state_bytes
from ..cost_models.memory import GIB
from ..cost_models.recovery import Saved
from ..cost_models.reliability import SECONDS_PER_DAY, daly_interval_s, failure_rates, young_interval_s
from ..cost_models.step import CostModel
from ..search_spaces.cluster import ClusterSpec, Figure
from ..search_spaces.figure_words import assumed
from ..search_spaces.layout import LayoutTable, Problem
from .result import Goodput, Line, PricedLayout

GIGABYTE, TERABYTE = 1e9, 1e12
TIERS = {"host": "its host's memory", "pool": "the supernode's pool"}


def goodput_of(failures: Failures, priced: PricedLayout, fastest: PricedLayout | None = None) -> Goodput:
    """Goodput of a layout whose stages are given, beside the fastest one's where that is another."""
    problem, saved = failures.problem, saved_of(failures.problem, priced)
    found = failures.endured(priced.devices_used, saved)
    save, mtbf, stretch = float(found.save_s), float(found.mtbf_s), float(found.stretch)
    other = None if fastest is None or fastest.layout == priced.layout else goodput_of(failures, fastest).effective_step_s
    return Goodput(
        goodput=1.0 / stretch,
        effective_step_s=priced.step_time_s * stretch,
        fastest_effective_s=other,
        mtbf_s=mtbf,
        failures_per_day=SECONDS_PER_DAY / mtbf,
        tier=failures.recovery.tier,
        saved_gib=float(saved.resident) / GIB,
        checkpoint_tb=state_bytes(problem) / TERABYTE,
        save_s=save,
        drain_s=float(found.drain_s),
        back_s=float(found.back_s),
        interval_s=float(found.interval_s),
        young_interval_s=young_interval_s(save, mtbf),
        daly_interval_s=daly_interval_s(save, mtbf),
        assumptions=tuple(assumed((f"{problem.cluster.name} {name}", figure) for name, figure in failures.recovery.told)),
    )


def furthest(failures: Failures, layouts: Sequence[PricedLayout]) -> tuple[PricedLayout, Goodput]:
    """Of layouts, the fastest first, the one whose step is shortest with failures, and its goodput."""
    effective_s = [goodput_of(failures, layout).effective_step_s for layout in layouts]
    best = layouts[int(np.argmin(effective_s))]
    return best, goodput_of(failures, best, layouts[0])


def stretch_ends(failures: Failures, priced: PricedLayout) -> tuple[float, float]:
    """Expected time over training time with every figure of failures at the end of its interval that does least harm, and most."""
    problem, saved = failures.problem, saved_of(failures.problem, priced)
    ends = [problem.model_copy(update={"cluster": _at_end(problem.cluster, harm)}) for harm in (False, True)]
    found = [Failures.of(end) for end in ends]
    least, most = (1.0 if each is None else float(each.stretch(priced.devices_used, saved)) for each in found)
    return least, most


def failure_lines(failures: Failures, priced: PricedLayout) -> tuple[Line, ...]:
    """From bytes and rates to goodput, a line a step: the save, its drain, what every kind of failure costs, the interval."""
    problem, recovery, devices = failures.problem, failures.recovery, priced.devices_used
    saved = saved_of(problem, priced)
    found, per_s = failures.endured(devices, saved), failure_rates(problem.cluster, devices)
    daily = " + ".join(f"{float(rate) * SECONDS_PER_DAY:.3g} a day of a {_unit(kind)}" for kind, rate in per_s.items())
    sent = f"{_gigabytes(saved.resident)} of the fullest device / {_rate(recovery.copy_bytes_per_s)} to {TIERS[recovery.tier]}"
    drained = f"{state_bytes(problem) / TERABYTE:.3g} TB / ({devices:,} devices · {_rate(recovery.store_bytes_per_s)} to storage)"
    return (
        _seconds("save", sent, found.save_s),
        _seconds("drain", drained, found.drain_s),
        _seconds("M", f"86400 / ({daily})", found.mtbf_s),
        *(line for kind in per_s for line in _lines_of(failures, kind, saved, devices)),
        _seconds("T", "the work between saves that loses least, no less than a drain takes", found.interval_s),
        Line(
            name="goodput",
            expression=f"T / (M · e^({float(found.failure_s):.4g}/M) · (e^((T + save)/M) − 1))",
            value=1.0 / float(found.stretch),
            unit="",
        ),
    )


def _lines_of(failures: Failures, kind: str, saved: Saved, devices: int) -> tuple[Line, ...]:
    """What one kind of failure costs: reading the states back from where they stand, and coming back."""
    recovery, whole = failures.recovery, state_bytes(failures.problem)
    read, lost = recovery.read_s(kind, whole, saved, devices), float(recovery.lost_share(kind, devices))
    local = f"{_gigabytes(saved.held)} / {_rate(recovery.copy_bytes_per_s)} from {TIERS[recovery.tier]}"
    nearest = local if lost == 0.0 else f"the longer of {local} and {lost:.3g} · drain, for the copies lost with the unit"
    whence = nearest if recovery.reads_copies(kind, whole, saved, devices) else "all from storage, as long as drain"
    spread = f"{_gigabytes(saved.held)} / {_rate(recovery.spread_bytes_per_s)} from device to device"
    exposed = recovery.exposed_s(kind, whole, saved, devices)
    counts = "; a save counts once it has drained" if float(exposed) else "; a save counts at once"
    return (
        _seconds("read", f"{whence}: after a {_unit(kind)} failed", read),
        _seconds("back", f"restart {recovery.restart_s:g} + read + {spread}{counts}", recovery.back_s(kind, whole, saved, devices)),
    )


def saved_of(problem: Problem, priced: PricedLayout) -> Saved:
    """Bytes that the fullest device saves: in its memory, and with what it keeps at its host."""
    model = CostModel(problem)
    table = LayoutTable.from_layouts([priced.layout])
    saved = saved_bytes(model.rows(table), np.array([table.splits[0].cuts]))
    return Saved(np.asarray(saved.resident)[0], np.asarray(saved.held)[0])


def _at_end(cluster: ClusterSpec, harm: bool) -> ClusterSpec:
    """Rates of failure and restarts at one end of their intervals, the storage at the other."""
    assert cluster.storage is not None  # its failures are known
    failures = cluster.failures.model_copy(
        update={name: _end(figure, harm) for name, figure in cluster.failures if figure is not None}
    )
    bandwidth = _end(cluster.storage.bandwidth_bytes_per_s, not harm)
    return cluster.model_copy(
        update={"failures": failures, "storage": cluster.storage.model_copy(update={"bandwidth_bytes_per_s": bandwidth})}
    )


def _end(figure: Figure, high: bool) -> Figure:
    end = figure.high if high else figure.low
    return figure if end is None else figure.model_copy(update={"value": end})


def _seconds(name: str, expression: str, value: object) -> Line:
    return Line(name=name, expression=expression, value=float(np.asarray(value)), unit="s")


def _unit(kind: str) -> str:
    return kind.removesuffix("_per_year")


def _gigabytes(value: object) -> str:
    return f"{float(np.asarray(value)) / GIGABYTE:.3g} GB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGABYTE:.3g} GB/s"

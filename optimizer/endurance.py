"""What failures make of a priced layout: how often it fails, what it saves, and what share of its time trains."""

from __future__ import annotations

import numpy as np

from ..cost_models.checkpoint import Failures, saved_bytes, state_bytes
from ..cost_models.memory import GIB
from ..cost_models.reliability import (
    SECONDS_PER_DAY,
    daly_interval_s,
    failures_per_s,
    kept_interval_s,
    time_over_work,
    young_interval_s,
)
from ..cost_models.step import CostModel
from ..search_spaces.inputs import assumed
from ..search_spaces.layout import LayoutTable, Problem
from .result import Goodput, PricedLayout

TERABYTE = 1e12


def goodput_of(failures: Failures, priced: PricedLayout, fastest: PricedLayout | None = None) -> Goodput:
    """Goodput of a layout whose stages are given, beside the fastest one's where that is another."""
    problem, recovery = failures.problem, failures.recovery
    devices, whole = priced.devices_used, state_bytes(problem)
    rate = failures_per_s(problem.cluster, devices)
    assert rate is not None  # Failures.of has seen one
    resident, held = saved_of(problem, priced)
    save, drain = float(recovery.save_s(resident)), float(recovery.drain_s(whole, devices))
    back = float(recovery.back_s(whole, held, devices))
    share = 1.0 / float(time_over_work(save, drain, back, 1.0 / rate))
    other = None if fastest is None or fastest.layout == priced.layout else goodput_of(failures, fastest).effective_step_s
    return Goodput(
        goodput=share,
        effective_step_s=priced.step_time_s / share,
        fastest_effective_s=other,
        mtbf_s=1.0 / rate,
        failures_per_day=SECONDS_PER_DAY * rate,
        saved_gib=resident / GIB,
        checkpoint_tb=whole / TERABYTE,
        save_s=save,
        drain_s=drain,
        back_s=back,
        interval_s=float(kept_interval_s(save, drain, 1.0 / rate)),
        young_interval_s=young_interval_s(save, 1.0 / rate),
        daly_interval_s=daly_interval_s(save, 1.0 / rate),
        assumptions=tuple(assumed((f"{problem.cluster.name} {name}", figure) for name, figure in recovery.told)),
    )


def saved_of(problem: Problem, priced: PricedLayout) -> tuple[float, float]:
    """Bytes that the fullest device saves: in its memory, and with what it keeps at its host."""
    model = CostModel(problem)
    table = LayoutTable.from_layouts([priced.layout])
    saved = saved_bytes(model.rows(table), np.array([table.splits[0].cuts]))
    return float(saved.resident[0]), float(saved.held[0])

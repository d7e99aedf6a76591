"""What a prediction rests on, each figure with its interval, and the scenarios in which a plan is tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.step import CostModel
from ..search_spaces.cluster import Figure
from ..search_spaces.layout import Floats
from ..search_spaces.stack import CALIBRATED
from .changes import Change, faster_compute, faster_level, faster_memory, latency_groups, slower_levels
from .incumbent import Setting

DRAWS = 32
IMBALANCE_SPREAD = 2.0
"""The excess of the fullest device's tokens over the mean has no published interval: it is tried halved and doubled."""


@dataclass(frozen=True)
class Uncertain:
    """A figure in doubt: `change` sets it to a value between `low` and `high`."""

    name: str
    value: float
    low: float
    high: float
    change: Change


@dataclass(frozen=True)
class Scenario:
    """A setting with some figures moved, and which."""

    name: str
    setting: Setting


def uncertain(setting: Setting) -> list[Uncertain]:
    """Figures of stack, cluster and workload whose interval is wider than a point, in that order.

    A stack's efficiency without an interval of its own takes that of the step times it was calibrated to. What all layouts of a
    problem share (the calibration interval itself) moves no regret.
    """
    problem = setting.problem
    stack = CostModel(problem, setting.profile).problem.stack
    idle = () if problem.model.is_moe else ("host_floor_moe_s",)
    found = [_of_stack(name, _bounds(getattr(stack, name))) for name in CALIBRATED if name not in idle]
    if not _wide(found[0]):
        known = setting.profile.interval(stack.name, problem.cluster.accelerator.priced_as, problem.model.is_moe)
        efficiency = stack.efficiency.value
        found[0] = _of_stack("efficiency", (efficiency, efficiency / known.high, efficiency / known.low))
    found += list(_of_cluster(setting))
    if problem.model.is_moe:
        excess = problem.workload.expert_imbalance - 1.0
        low, high = 1.0 + excess / IMBALANCE_SPREAD, 1.0 + excess * IMBALANCE_SPREAD
        found.append(Uncertain("expert imbalance", 1.0 + excess, low, high, _imbalanced))
    return [each for each in found if _wide(each)]


def scenarios(setting: Setting, draws: int = DRAWS, seed: int = 0) -> list[Scenario]:
    """Nominal, every uncertain figure at its low and at its high, and joint draws of all by Latin hypercube.

    Draws are uniform in the logarithm where the low is above 0, else in the value.
    """
    doubts = uncertain(setting)
    found = [Scenario("nominal", setting)]
    for doubt in doubts:
        for said, value in (("low", doubt.low), ("high", doubt.high)):
            if value != doubt.value:
                found.append(Scenario(f"{doubt.name} {said}", doubt.change(setting, value)))
    for index, row in enumerate(_latin_hypercube(draws, len(doubts), seed)) if doubts else ():
        drawn = setting
        for doubt, place in zip(doubts, row, strict=True):
            drawn = doubt.change(drawn, _between(doubt, float(place)))
        found.append(Scenario(f"draw {index + 1}", drawn))
    return found


def _latin_hypercube(draws: int, dimensions: int, seed: int) -> Floats:
    """Places in (0, 1), one of every `draws`-th in each dimension, (draws, dimensions) (McKay et al. 1979)."""
    rng = np.random.default_rng(seed)
    cells = np.stack([rng.permutation(draws) for _ in range(dimensions)], axis=1)
    return np.asarray((cells + rng.random((draws, dimensions))) / draws)


def _between(doubt: Uncertain, place: float) -> float:
    if doubt.low > 0:
        return float(doubt.low * (doubt.high / doubt.low) ** place)
    return doubt.low + (doubt.high - doubt.low) * place


def _wide(doubt: Uncertain) -> bool:
    return doubt.high > doubt.low


def _bounds(figure: Figure) -> tuple[float, float, float]:
    """Value, low and high of a figure; one without an interval is its own."""
    value = figure.value
    return value, value if figure.low is None else figure.low, value if figure.high is None else figure.high


def _of_stack(name: str, bounds: tuple[float, float, float]) -> Uncertain:
    """A figure of the stack, set where the profile lays it over the documented one."""
    return Uncertain(name.removesuffix("_s").replace("_", " "), *bounds, lambda setting, value: _with_stack(setting, name, value))


def _with_stack(setting: Setting, name: str, value: float) -> Setting:
    problem, profile = setting.problem, setting.profile
    stack, accelerator = problem.stack, problem.cluster.accelerator.priced_as
    figure = Figure(value=value, source="a scenario", grade="given")
    figures = {**profile.stack_figures(stack, accelerator), name: figure}
    stacks = {**profile.stacks, stack.name: {**profile.stacks.get(stack.name, {}), accelerator: figures}}
    return replace(setting, profile=profile.model_copy(update={"stacks": stacks}))


def _of_cluster(setting: Setting) -> Iterator[Uncertain]:
    """Rates and latencies of the device and of the levels that the job spans."""
    cluster = setting.problem.cluster
    device = cluster.accelerator
    yield _factor("compute", device.peak_flops[setting.problem.workload.precision], faster_compute)
    yield _factor("memory bandwidth", device.memory_bandwidth_bytes_per_s, faster_memory)
    for index, level in enumerate(cluster.levels):
        yield _factor(f"{level.name} bandwidth", level.bandwidth_bytes_per_s, faster_level(index))
    for group in latency_groups(setting, range(len(cluster.levels))):
        name = ", ".join(cluster.levels[index].name for index in group)
        yield _added(f"{name} latency", [cluster.levels[index].latency_s for index in group], slower_levels(group))


def _factor(name: str, figure: Figure, change: Change) -> Uncertain:
    """A figure that `change` multiplies, as factors on its value."""
    value, low, high = _bounds(figure)
    return Uncertain(name, 1.0, low / value, high / value, change)


def _added(name: str, figures: Sequence[Figure], change: Change) -> Uncertain:
    """Figures that `change` adds to together, as the widest differences from their values."""
    bounds = [_bounds(figure) for figure in figures]
    low, high = min(low - value for value, low, _ in bounds), max(high - value for value, _, high in bounds)
    return Uncertain(name, 0.0, low, high, change)


def _imbalanced(setting: Setting, value: float) -> Setting:
    workload = setting.problem.workload.model_copy(update={"expert_imbalance": value})
    return replace(setting, problem=setting.problem.model_copy(update={"workload": workload}))

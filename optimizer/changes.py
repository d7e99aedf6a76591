"""A setting with one of its figures changed: memory, rates, bandwidths, latencies, devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..cost_models.profile import CollectiveCurve, Fitted
from ..search_spaces.cluster import Figure, Level
from .incumbent import Setting

SHORTEST_HOP_S = 1e-12
"""A curve's hop of 0 would stand for one that was not measured."""
Change = Callable[[Setting, float], Setting]
"""A setting and an amount → the setting with its figure changed by that amount."""


def more_memory(setting: Setting, bytes_more: float) -> Setting:
    """Devices with so many bytes more (or less) memory, a planner's margin on which stays its share."""
    accelerator = setting.problem.cluster.accelerator
    return _with_accelerator(setting, memory_bytes=moved(accelerator.memory_bytes, accelerator.memory_bytes.value + bytes_more))


def faster_compute(setting: Setting, factor: float) -> Setting:
    """Every precision's dense rate times a factor."""
    rates = setting.problem.cluster.accelerator.peak_flops
    return _with_accelerator(setting, peak_flops={name: moved(rate, rate.value * factor) for name, rate in rates.items()})


def faster_memory(setting: Setting, factor: float) -> Setting:
    """The memory bandwidth of devices times a factor."""
    rate = setting.problem.cluster.accelerator.memory_bandwidth_bytes_per_s
    return _with_accelerator(setting, memory_bandwidth_bytes_per_s=moved(rate, rate.value * factor))


def faster_level(index: int) -> Change:
    """Change of one level's bandwidth by a factor."""

    def change(setting: Setting, factor: float) -> Setting:
        rate = setting.problem.cluster.levels[index].bandwidth_bytes_per_s
        return with_level(setting, index, bandwidth_bytes_per_s=moved(rate, rate.value * factor))

    return change


def slower_levels(indexes: Sequence[int]) -> Change:
    """Change of the latency of some levels by seconds, never below 0; hops that were measured as a whole change with it."""

    def change(setting: Setting, seconds: float) -> Setting:
        for index in indexes:
            latency = setting.problem.cluster.levels[index].latency_s
            setting = with_level(setting, index, latency_s=moved(latency, max(latency.value + seconds, 0.0)))
        levels = setting.problem.cluster.levels
        collectives = dict(setting.profile.collectives)
        for section in {levels[index].efficiency_profile for index in indexes}:
            collectives[section] = {name: _later(curve, seconds) for name, curve in collectives[section].items()}
        return replace(setting, profile=setting.profile.model_copy(update={"collectives": collectives}))

    return change


def latency_groups(setting: Setting, indexes: Sequence[int]) -> list[tuple[int, ...]]:
    """Levels whose latencies change together: those that share curves with a measured hop, and every other by itself."""
    groups: dict[object, list[int]] = {}
    for index in indexes:
        section = setting.problem.cluster.levels[index].efficiency_profile
        measured = any(curve.hop_latency_s is not None for curve in setting.profile.collectives[section].values())
        groups.setdefault(section if measured else index, []).append(index)
    return [tuple(group) for group in groups.values()]


def more_devices(setting: Setting, count: float) -> Setting:
    """So many devices more (or less)."""
    return replace(setting, problem=setting.problem.model_copy(update={"devices": setting.problem.devices + round(count)}))


def moved(figure: Figure, value: float) -> Figure:
    """The figure at another value, its interval and source left behind."""
    return Figure(value=value, source=f"changed from {figure.value:.4g}: {figure.source}", grade="given")


def with_level(setting: Setting, index: int, **figures: Figure) -> Setting:
    """The setting with figures of one level replaced."""
    cluster = setting.problem.cluster
    levels: list[Level] = list(cluster.levels)
    levels[index] = levels[index].model_copy(update=figures)
    return _with_cluster(setting, levels=tuple(levels))


def _with_accelerator(setting: Setting, **figures: object) -> Setting:
    return _with_cluster(setting, accelerator=setting.problem.cluster.accelerator.model_copy(update=figures))


def _with_cluster(setting: Setting, **changed: object) -> Setting:
    cluster = setting.problem.cluster.model_copy(update=changed)
    return replace(setting, problem=setting.problem.model_copy(update={"cluster": cluster}))


def _later(curve: CollectiveCurve, seconds: float) -> CollectiveCurve:
    hop = curve.hop_latency_s
    if hop is None:
        return curve
    value = max(hop.value + seconds, SHORTEST_HOP_S)
    return curve.model_copy(update={"hop_latency_s": Fitted(value=value, low=value, high=value, source=hop.source)})

"""Planning for what is left of a cluster: which of its devices to leave idle, and what that beats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_models.profile import Profile
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.degraded import after_loss, device_counts, supernode_counts
from ..search_spaces.layout import Problem
from .deadline import Deadline
from .incumbent import Setting
from .result import Plan, PricedLayout
from .rule_prices import faster
from .search import Candidate
from .supernode_result import DevicesLeft, LeftOption


@dataclass(frozen=True)
class Left:
    """Devices free in each supernode; how many the job had before; the cluster without its slow device, where one is slow."""

    free: tuple[int, ...]
    whole: int | None = None
    unslowed: ClusterSpec | None = None

    @property
    def devices(self) -> int:
        return sum(self.free)


def ways(problem: Problem, left: Left) -> Iterator[tuple[str, Problem]]:
    """Counts of devices that the job may go on with, in words: with what is free, and where one is slow without that one."""
    slow = "" if left.unslowed is None else ", waiting for the slow one"
    for count, cluster in device_counts(problem.cluster, left.free):
        yield _words(cluster, count) + slow, _on(problem, count, cluster)
    if left.unslowed is not None:
        rest = after_loss(problem.cluster, left.free, "1 device")
        for count, cluster in device_counts(left.unslowed, rest):
            yield f"{_words(cluster, count)}, without the slow one", _on(problem, count, cluster)


def chosen(
    problem: Problem,
    profile: Profile,
    left: Left,
    deadline: Deadline,
    progress: Callable[[float], None] | None = None,
) -> tuple[Problem, tuple[LeftOption, ...], LeftOption | None]:
    """The problem whose best step is shortest, what was compared, its own first, and the job without any loss."""
    options = list(ways(problem, left))
    found, best_s, best = [], np.inf, options[0][1]
    for tried, (words, option) in enumerate(options):
        fastest = faster(Setting(option, profile), np.inf, deadline.share_s(2 * (len(options) - tried) + 1), progress).best
        found.append(_option(words, option, left.devices, fastest))
        if fastest and fastest[0].step_time_s < best_s:
            best_s, best = fastest[0].step_time_s, option
    fastest_first = sorted(found, key=lambda option: np.inf if option.step_time_s is None else option.step_time_s)
    return best, tuple(fastest_first), _whole(problem, profile, left, deadline, progress)


def with_left(plan: Plan, left: Left, options: Sequence[LeftOption], whole: LeftOption | None) -> Plan:
    """The plan with its per-device figures over all devices that the job has, and what the idle ones are idle for."""
    best = _over(plan.plan, left.devices)
    said = DevicesLeft(
        free=left.free,
        devices=left.devices,
        used=best.devices_used,
        idle=best.devices_idle,
        options=tuple(options),
        whole=whole,
    )
    others = tuple(_over(other, left.devices) for other in plan.alternatives)
    return plan.model_copy(update={"plan": best, "alternatives": others, "devices_left": said})


def _over(priced: PricedLayout, devices: int) -> PricedLayout:
    """Figures per device of all `devices`, those that no layout was planned for among them."""
    share = (priced.devices_used + priced.devices_idle) / devices
    names = ("tokens_per_s_per_device", "model_tflops_per_device", "mfu", "mfu_full_attention", "hfu")
    scaled = {name: getattr(priced, name) * share for name in names}
    return priced.model_copy(update={**scaled, "devices_idle": devices - priced.devices_used})


def _whole(
    problem: Problem, profile: Profile, left: Left, deadline: Deadline, progress: Callable[[float], None] | None
) -> LeftOption | None:
    if left.whole is None and left.unslowed is None:
        return None
    devices = left.whole or left.devices
    spared = _on(problem, devices, left.unslowed or problem.cluster)
    fastest = faster(Setting(spared, profile), np.inf, deadline.share_s(2), progress).best
    return _option(f"all {devices:,}, a spare in place", spared, devices, fastest)


def _option(words: str, problem: Problem, devices: int, fastest: Sequence[Candidate]) -> LeftOption:
    """An option with its fastest layout, of which there may be none; `devices` are all that the job has."""
    known = LeftOption(words=words, devices=problem.devices, per_supernode=supernode_counts(problem.cluster, problem.devices)[0])
    if not fastest:
        return known
    layout = fastest[0].layout.model_copy(update={"stages": ()})
    figures = {"devices_used": layout.devices, "devices_idle": devices - layout.devices}
    return known.model_copy(update={**figures, "step_time_s": fastest[0].step_time_s, "layout": layout})


def _words(cluster: ClusterSpec, devices: int) -> str:
    each = supernode_counts(cluster, devices)
    last = f", {each[-1]:,} in the last" if each[-1] != each[0] else ""
    return (
        f"{devices:,} as {each[0]:,} in each of {len(each):,} supernodes{last}"
        if len(each) > 1
        else f"{devices:,} in one supernode"
    )


def _on(problem: Problem, devices: int, cluster: ClusterSpec) -> Problem:
    return problem.model_copy(update={"devices": devices, "cluster": cluster})

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
from .slow_device import slow_place
from .supernode_result import DevicesLeft, LeftOption, SlowPlace


@dataclass(frozen=True)
class Left:
    """Devices free in each supernode; how many the job had before; the cluster without its slow device, where one is slow."""

    free: tuple[int, ...]
    whole: int | None = None
    unslowed: ClusterSpec | None = None

    @property
    def devices(self) -> int:
        return sum(self.free)


@dataclass(frozen=True)
class Way:
    """A count of devices that the job may go on with, in words; `spared` is the same without its slow device where it has one."""

    words: str
    problem: Problem
    spared: Problem | None = None


def ways(problem: Problem, left: Left) -> Iterator[Way]:
    """What the job may go on with: what is free, and where one device is slow also what is free without that one."""
    for count, cluster in device_counts(problem.cluster, left.free):
        way = Way(_words(cluster, count), _on(problem, count, cluster))
        if left.unslowed is not None:
            whole = cluster.model_copy(update={"accelerator": left.unslowed.accelerator})
            way = Way(f"{way.words}, waiting for the slow one", way.problem, _on(problem, count, whole))
        yield way
    if left.unslowed is not None:
        rest = after_loss(problem.cluster, left.free, "1 device")
        for count, cluster in device_counts(left.unslowed, rest):
            yield Way(f"{_words(cluster, count)}, without the slow one", _on(problem, count, cluster))


def chosen(
    problem: Problem,
    profile: Profile,
    left: Left,
    deadline: Deadline,
    progress: Callable[[float], None] | None = None,
) -> tuple[Problem, tuple[LeftOption, ...], LeftOption | None]:
    """The problem whose best step is shortest, what was compared, its own first, and the job without any loss."""
    options = list(ways(problem, left))
    found, best_s, best = [], np.inf, options[0].problem
    for tried, way in enumerate(options):
        fastest = faster(Setting(way.problem, profile), np.inf, deadline.share_s(2 * (len(options) - tried) + 1), progress).best
        option = _option(way.words, way.problem, left.devices, fastest)
        if fastest and way.spared is not None:
            place = slow_place(way.problem, way.spared, profile, fastest[0].layout)
            option = option.model_copy(update={"slow": place, "step_time_s": place.step_time_s})
        found.append(option)
        if option.step_time_s is not None and option.step_time_s < best_s:
            best_s, best = option.step_time_s, way.problem
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
    told = (*plan.assumptions, *_if_all_were_slow(said.slow))
    return plan.model_copy(update={"plan": best, "alternatives": others, "devices_left": said, "assumptions": told})


def _if_all_were_slow(place: SlowPlace | None) -> Iterator[str]:
    """What the figures of a plan with a slow device are of."""
    if place is not None:
        yield (
            "the figures of plan and alternatives are of every device as slow as the slow one, which no place of it exceeds; with "
            f"it in stage {place.stage}, as advised, the step is {place.step_time_s:.3g} s"
        )


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

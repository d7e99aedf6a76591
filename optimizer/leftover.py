"""Planning for what is left of a cluster: which of its devices to leave idle, and what that beats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_models.profile import Profile
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.degraded import (
    DEVICE,
    after_loss,
    check_free,
    device_counts,
    parse_free,
    parse_slow,
    slow_levels,
    slowed,
    supernode_counts,
)
from ..search_spaces.errors import InputError
from ..search_spaces.inputs import check_devices, load_cluster
from ..search_spaces.layout import Layout, Problem
from .deadline import Deadline
from .incumbent import Setting
from .result import RATES, Plan, PricedLayout
from .rule_prices import faster
from .search import Candidate
from .slow_device import slow_place
from .supernode_result import DevicesLeft, LeftOption, SlowPlace


@dataclass(frozen=True)
class Left:
    """Devices free in each supernode; how many the job had before; the cluster without its slow device, where one is slow: then the
    problem's own has every device as slow as that one.

    `open`: nothing is lost, and nobody said how many each supernode has: how the devices lie is the plan's to choose. `said` is
    what else a plan assumes of the cluster's state, in sentences.
    """

    free: tuple[int, ...]
    whole: int | None = None
    unslowed: ClusterSpec | None = None
    open: bool = False
    said: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return sum(self.free)


def as_allocated(problem: Problem) -> Left:
    """All devices of a problem, of which nobody said how they lie."""
    return Left(supernode_counts(problem.cluster, problem.devices), open=True)


def what_is_left(
    cluster: str, devices: int | None, free: str | None, lost: Sequence[str], slow: Sequence[str]
) -> tuple[ClusterSpec, int, Left]:
    """The cluster as it runs now, the devices that the job had, and what is left of them: all, lying as may be, unless said.

    InputError for what is missing, contradicts itself or leaves nothing.
    """
    machine, slower = load_cluster(cluster), parse_slow(slow)
    if free is None and devices is None:
        raise InputError("devices: say how many with --devices, or what each supernode has with --free")
    counts = parse_free(free) if free is not None else ()
    total = devices if devices is not None else sum(counts)
    check_devices(machine, total)
    if counts and sum(counts) != total:
        raise InputError(f"free: {sum(counts)} devices in all, where --devices says {total}; leave one of the two out")
    counts = counts or supernode_counts(machine, total)
    check_free(machine, counts)
    for loss in lost:
        counts = after_loss(machine, counts, loss)
    running = slowed(machine, slower)
    unslowed = slowed(machine, {name: share for name, share in slower.items() if name != DEVICE}) if DEVICE in slower else None
    given = free is not None or bool(lost) or unslowed is not None
    return running, total, Left(counts, total if lost else None, unslowed, not given, slow_levels(slower))


@dataclass(frozen=True)
class Way:
    """A count of devices that the job may go on with, in words; `slow` is the same with every device as slow as one of it is."""

    words: str
    problem: Problem
    slow: Problem | None = None


def ways(problem: Problem, left: Left) -> Iterator[Way]:
    """What the job may go on with: what is free, and where one device is slow also what is free without that one."""
    for count, cluster in device_counts(problem.cluster, left.free):
        words, asked = words_of(cluster, count), on(problem, count, cluster)
        if left.unslowed is None:
            yield Way(words, asked)
        else:
            whole = cluster.model_copy(update={"accelerator": left.unslowed.accelerator})
            yield Way(f"{words}, waiting for the slow one", on(problem, count, whole), asked)
    if left.unslowed is not None:
        rest = after_loss(problem.cluster, left.free, "1 device")
        for count, cluster in device_counts(left.unslowed, rest):
            yield Way(f"{words_of(cluster, count)}, without the slow one", on(problem, count, cluster))


@dataclass(frozen=True)
class Chosen:
    """The way whose best step is shortest, what was compared, its own first, and the job without any loss.

    `waiting` is the best layout, with its stages, of a way that waits for a slow device.
    """

    way: Way
    options: tuple[LeftOption, ...]
    whole: LeftOption | None
    waiting: Layout | None = None


def chosen(
    problem: Problem,
    profile: Profile,
    left: Left,
    deadline: Deadline,
    progress: Callable[[float], None] | None = None,
) -> Chosen:
    """Searches every way to go on.

    Where one waits for a slow device, layouts are looked for with none and with every device slow: the one device lies between.
    """
    options = list(ways(problem, left))
    found: list[tuple[Way, LeftOption, Layout | None]] = []
    for tried, way in enumerate(options):
        parts = 2 * (len(options) - tried) + 2
        asked = [way.problem] if way.slow is None else [way.problem, way.slow]
        fastest = [faster(Setting(of, profile), np.inf, deadline.share_s(parts), progress).best[:1] for of in asked]
        option, layout = option_of(way.words, way.problem, left.devices, fastest[0]), None
        if way.slow is not None and (layouts := [candidate.layout for best in fastest for candidate in best]):
            places = [slow_place(way.slow, way.problem, profile, each) for each in layouts]
            place, layout = min(zip(places, layouts, strict=True), key=lambda pair: pair[0].step_time_s)
            option = option.model_copy(update={"slow": place, "step_time_s": place.step_time_s})
        found.append((way, option, layout))
    found.sort(key=lambda each: np.inf if each[1].step_time_s is None else each[1].step_time_s)
    way, _, layout = found[0]
    whole = _whole(problem, profile, left, deadline, progress)
    compared = tuple(option for _, option, _ in found)
    if compared[0].layout is not None and left.unslowed is None:
        most = max((way.problem for way in options), key=lambda asked: asked.devices)
        compared += fuller(Setting(most, profile), compared, left.devices, deadline, progress)
    return Chosen(way, compared, whole, layout)


def with_left(plan: Plan, left: Left, options: Sequence[LeftOption], whole: LeftOption | None, place: SlowPlace | None) -> Plan:
    """The plan with its per-device figures over all devices that the job has, and what the idle ones are idle for.

    `place` is where the plan waits for a slow device, if it does.
    """
    if left.open and len(options) < 2:
        return plan
    best = _over(plan.plan, left.devices)
    if left.open or place is not None:  # other cuts, or another layout for the slow device, may have come out since
        layout = best.layout.model_copy(update={"stages": ()})
        first = {"step_time_s": best.step_time_s, "layout": layout, "slow": place}
        options = (options[0].model_copy(update=first), *options[1:])
    said = DevicesLeft(
        free=left.free,
        devices=left.devices,
        used=best.devices_used,
        idle=best.devices_idle,
        options=tuple(options),
        whole=whole,
        open=left.open,
    )
    others = tuple(_over(other, left.devices) for other in plan.alternatives)
    space = f"{plan.certificate.space}; devices: {'; '.join(option.words for option in options)}"
    certificate = plan.certificate.model_copy(update={"space": space if left.open else plan.certificate.space})
    return plan.model_copy(
        update={
            "plan": best,
            "alternatives": others,
            "devices_left": said,
            "certificate": certificate,
            "assumptions": (*plan.assumptions, *_to_be_granted(left, options)),
        }
    )


def _to_be_granted(left: Left, options: Sequence[LeftOption]) -> Iterator[str]:
    """What a scheduler has to do for the plan's spread where filling one supernode after another does not give it."""

    def supernodes(option: LeftOption) -> tuple[int, int]:
        """How many it fills, and how many have as many devices as that."""
        return -(-option.devices // option.per_supernode), sum(count >= option.per_supernode for count in left.free)

    best = options[0]
    needed, able = supernodes(best)
    if not left.open or able >= needed:
        return
    filled = [option for option in options[1:] if option.step_time_s is not None and supernodes(option)[0] <= supernodes(option)[1]]
    least = min(filled, key=lambda option: option.step_time_s or np.inf, default=None)
    step = "" if least is None else f"; {least.words} takes {least.step_time_s:.3g} s a step"
    yield (
        f"the scheduler grants {best.per_supernode} devices in each of {needed} supernodes: filled one after another, {able} have "
        f"that many{step}"
    )


def _over(priced: PricedLayout, devices: int) -> PricedLayout:
    """Figures per device of all `devices`, those that no layout was planned for among them."""
    share = (priced.devices_used + priced.devices_idle) / devices
    scaled = {name: getattr(priced, name) * share for name in RATES}
    return priced.model_copy(update={**scaled, "devices_idle": devices - priced.devices_used})


def fuller(
    setting: Setting, options: Sequence[LeftOption], devices: int, deadline: Deadline, progress: Callable[[float], None] | None
) -> tuple[LeftOption, ...]:
    """The fastest layout that uses more devices than the first option's, if no option has one: what leaving them idle beats.

    `devices` are all that the job has. None too where there was no time to look.
    """
    used, problem = options[0].devices_used or 0, setting.problem
    if used >= problem.devices or any((option.devices_used or 0) > used for option in options):
        return ()
    forbidden = (*problem.workload.forbid, f"tp*cp*pp*dp <= {used}")
    more = problem.model_copy(update={"workload": problem.workload.model_copy(update={"forbid": forbidden})})
    found = faster(Setting(more, setting.profile), np.inf, deadline.share_s(2), progress)
    if not found.best and not found.complete:
        return ()
    option = option_of(f"with more than {used:,} used", problem, devices, found.best)
    return (option.model_copy(update={"least_used": used + 1}),)


def _whole(
    problem: Problem, profile: Profile, left: Left, deadline: Deadline, progress: Callable[[float], None] | None
) -> LeftOption | None:
    if left.whole is None and left.unslowed is None:
        return None
    devices = left.whole or left.devices
    spared = on(problem, devices, left.unslowed or problem.cluster)
    fastest = faster(Setting(spared, profile), np.inf, deadline.share_s(2), progress).best
    return option_of(f"all {devices:,}, a spare in place", spared, devices, fastest)


def option_of(words: str, problem: Problem, devices: int, fastest: Sequence[Candidate], beaten: bool = False) -> LeftOption:
    """An option with its fastest layout, of which there may be none; `devices` are all that the job has.

    `beaten`: only what is faster than another option was looked for, so that none says no more than that.
    """
    each = supernode_counts(problem.cluster, problem.devices)[0]
    known = LeftOption(words=words, devices=problem.devices, per_supernode=each, beaten=beaten and not fastest)
    if not fastest:
        return known
    layout = fastest[0].layout.model_copy(update={"stages": ()})
    figures = {"devices_used": layout.devices, "devices_idle": devices - layout.devices}
    return known.model_copy(update={**figures, "step_time_s": fastest[0].step_time_s, "layout": layout})


def words_of(cluster: ClusterSpec, devices: int) -> str:
    """«513 as 72 in each of 7 supernodes, 9 in another»."""
    each = supernode_counts(cluster, devices)
    if len(each) == 1:
        return f"{devices:,} in one supernode"
    whole = len(each) - (each[-1] != each[0])
    many = f"{each[0]:,} in each of {whole:,} supernodes" if whole > 1 else f"{each[0]:,} in one supernode"
    return f"{devices:,} as {many}{f', {each[-1]:,} in another' if whole < len(each) else ''}"


def on(problem: Problem, devices: int, cluster: ClusterSpec) -> Problem:
    """The problem on other devices of another cluster."""
    return problem.model_copy(update={"devices": devices, "cluster": cluster})

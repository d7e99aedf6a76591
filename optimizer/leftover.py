"""Planning for what is left of a cluster: which of its devices to leave idle, and what that beats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.profile import Profile
from ..cost_models.step import CostModel
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.degraded import (
    DEVICE,
    after_loss,
    check_free,
    device_counts,
    parse_free,
    parse_slow,
    rounded_counts,
    slow_levels,
    slowed,
    spreads,
    supernode_counts,
)
from ..search_spaces.errors import InputError
from ..search_spaces.inputs import check_devices, load_cluster
from ..search_spaces.layout import Layout, Problem
from .deadline import Deadline
from .found import Candidate, Found
from .incumbent import Setting
from .recutting import settled
from .result import RATES, Plan, PricedLayout
from .rule_prices import faster
from .slow_device import slow_place
from .supernode_result import DevicesLeft, LeftOption, SlowPlace

Share = tuple[int, int | None]
"""Devices in all, and in each supernode but a last with the rest; None: as they are allocated."""


@dataclass(frozen=True)
class Left:
    """Devices free in each supernode; how many the job had before; the cluster without its slow device, where one is slow: then the
    problem's own has every device as slow as that one.

    `before`: what each supernode had free before any loss, where that was said. `open`: nothing is lost, and nobody said how many
    each supernode has: how the devices lie is the plan's to choose. `said` is what else a plan assumes of the cluster's state, in
    sentences.
    """

    free: tuple[int, ...]
    whole: int | None = None
    unslowed: ClusterSpec | None = None
    open: bool = False
    said: tuple[str, ...] = ()
    before: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return sum(self.free)


def as_allocated(problem: Problem) -> Left:
    """All devices of a problem, of which nobody said how they lie."""
    return Left(supernode_counts(problem.cluster, problem.devices, problem.per_supernode), open=True)


def what_is_left(
    cluster: str, devices: int | None, free: str | None, lost: Sequence[str], slow: Sequence[str]
) -> tuple[ClusterSpec, int, Left]:
    """The cluster as it runs now, the devices that the job had, and what is left of them: all, lying as may be, unless said.

    InputError for what is missing, contradicts itself or leaves nothing.
    """
    machine, slower = load_cluster(cluster), parse_slow(slow)
    if free is None and devices is None:
        raise InputError("devices: say how many with --devices, or what each supernode has with --free")
    counts = before = parse_free(free) if free is not None else ()
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
    return running, total, Left(counts, total if lost else None, unslowed, not given, slow_levels(slower), before)


@dataclass(frozen=True)
class Way:
    """A count of devices that the job may go on with, in words; `slow` is the same with every device as slow as one of it is."""

    words: str
    problem: Problem
    slow: Problem | None = None


def ways(problem: Problem, left: Left) -> Iterator[Way]:
    """What the job may go on with: what is free, and where one device is slow also what is free without that one."""
    for asked in (on(problem, *each) for each in device_counts(problem.cluster, left.free)):
        if left.unslowed is None:
            yield Way(words_of(asked), asked)
        else:
            yield Way(f"{words_of(asked)}, waiting for the slow one", _unslowed(asked, left), asked)
    if left.unslowed is not None:
        yield from without_slow(problem, left, device_counts)


def without_slow(problem: Problem, left: Left, shares: Callable[[ClusterSpec, Sequence[int]], Sequence[Share]]) -> Iterator[Way]:
    """What is free, in such shares, but for the slow device where one is."""
    free, said = left.free, ""
    if left.unslowed is not None:
        free, said = after_loss(problem.cluster, free, "1 device"), ", without the slow one"
    for asked in (on(_unslowed(problem, left), *each) for each in shares(problem.cluster, free)):
        yield Way(f"{words_of(asked)}{said}", asked)


def _unslowed(problem: Problem, left: Left) -> Problem:
    """The problem without a slow device."""
    return problem if left.unslowed is None else problem.model_copy(update={"cluster": left.unslowed})


@dataclass(frozen=True)
class Chosen:
    """The way whose best step is shortest, what was compared, its own first, and the job without any loss.

    `found` is what the search of the way found, `searched` what those of all did; `waiting` is the best layout, with its stages, of
    a way that waits for a slow device.
    """

    way: Way
    options: tuple[LeftOption, ...]
    whole: LeftOption | None
    found: Found
    searched: tuple[Found, ...]
    waiting: Layout | None = None


def chosen(
    problem: Problem,
    profile: Profile,
    left: Left,
    deadline: Deadline,
    progress: Callable[[float], None] | None = None,
) -> Chosen:
    """Searches every way to go on, and rounded shares for anything faster.

    Where one waits for a slow device, layouts are looked for with none and with every device slow: the one device lies between.
    """
    options = list(ways(problem, left))
    found = [
        (way, *_tried(way, profile, left.devices, np.inf, deadline, 2 * (len(options) - tried) + 2, progress))
        for tried, way in enumerate(options)
    ]  # where one device is slow no step is below that of none
    found.sort(key=lambda each: np.inf if each[1].step_time_s is None else each[1].step_time_s)
    searched = [each for _, _, each, _ in found]
    rounded, more = _faster_rounded(problem, profile, left, found[0][1].step_time_s, deadline, progress)
    found, searched = [*rounded, *found], [*searched, *more]
    way, _, own, layout = found[0]
    whole = _whole(problem, profile, left, deadline, progress)
    compared = tuple(option for _, option, _, _ in found)
    if compared[0].layout is not None:
        rounded_ways = without_slow(problem, left, rounded_counts)
        compared += fuller([*options, *rounded_ways], profile, compared, left.devices, deadline, progress)
    return Chosen(way, compared, whole, own, tuple(searched), layout)


def _tried(
    way: Way,
    profile: Profile,
    devices: int,
    ceiling_s: float,
    deadline: Deadline,
    parts: int,
    progress: Callable[[float], None] | None,
    explained: bool = True,
) -> tuple[LeftOption, Found, Layout | None]:
    """A way searched for what is faster than a ceiling; what was found with no device slow, and the layout that waits for one.

    `explained`: where nothing is legal, what clashes is asked of CP-SAT.
    """
    asked = [way.problem] if way.slow is None else [way.problem, way.slow]
    both = [faster(Setting(of, profile), ceiling_s, deadline.share_s(parts), progress) for of in asked]
    complete, legal = all(each.complete for each in both), both[0].counts.legal > 0 or not explained
    option = option_of(way.words, way.problem, devices, both[0].best, complete=complete, legal=legal)
    layouts = [candidate.layout for each in both for candidate in each.best]
    if way.slow is None or not layouts:
        return option, both[0], None
    places = [slow_place(way.slow, way.problem, profile, each) for each in layouts]
    place, layout = min(zip(places, layouts, strict=True), key=lambda pair: pair[0].step_time_s)
    return option.model_copy(update={"slow": place, "step_time_s": place.step_time_s}), both[0], layout


def _faster_rounded(
    problem: Problem,
    profile: Profile,
    left: Left,
    step_s: float | None,
    deadline: Deadline,
    progress: Callable[[float], None] | None,
) -> tuple[list[tuple[Way, LeftOption, Found, None]], list[Found]]:
    """The ways in rounded shares that are faster than `step_s` and what was found before, fastest first, and what all searches
    found.
    """
    asked = list(without_slow(problem, left, rounded_counts))
    faster_ones: list[tuple[Way, LeftOption, Found, None]] = []
    searched: list[Found] = []
    for tried, way in enumerate(asked):
        ceiling_s = np.inf if step_s is None else step_s
        found = faster(Setting(way.problem, profile), ceiling_s, deadline.share_s(2 * (len(asked) - tried) + 2), progress)
        searched.append(found)
        if found.best:
            option = option_of(way.words, way.problem, left.devices, found.best, complete=found.complete)
            faster_ones.insert(0, (way, option, found, None))
            step_s = option.step_time_s
    return faster_ones, searched


def with_left(plan: Plan, left: Left, options: Sequence[LeftOption], whole: LeftOption | None, place: SlowPlace | None) -> Plan:
    """The plan with its per-device figures over all devices that the job has, and what the idle ones are idle for.

    `place` is where the plan waits for a slow device, if it does.
    """
    if left.open and len(options) < 2:
        return plan
    best = over(plan.plan, left.devices)
    # Other cuts, another layout for the slow device or one that was not come to before may have come out since.
    layout = best.layout.model_copy(update={"stages": ()})
    used = {"devices_used": best.devices_used, "devices_idle": best.devices_idle}
    first = {"step_time_s": best.step_time_s, "layout": layout, "slow": place, **used}
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
    others = tuple(over(other, left.devices) for other in plan.alternatives)
    lying = "; ".join(option.words for option in options if not option.least_used)
    rounded = "" if left.open else "; or in those shares rounded down to servers or powers of two"
    space = f"{plan.certificate.space}; devices: {lying}{rounded}{'; in no other shares' * said.in_part}"
    certificate = plan.certificate.model_copy(update={"space": space})
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

    def granted(option: LeftOption) -> bool:
        """Whether it lies within what supernodes have as they are allocated."""
        needs = option.in_supernodes
        return len(needs) <= len(left.free) and all(need <= there for need, there in zip(needs, left.free, strict=False))

    best = options[0]
    if not left.open or granted(best):
        return
    usual = [option for option in options[1:] if option.step_time_s is not None and granted(option)]
    least = min(usual, key=lambda option: option.step_time_s or np.inf, default=None)
    step = f", not {_as_lies(left.free)}" if least is None else f": with {least.words} a step takes {least.step_time_s:.3g} s"
    yield f"the scheduler grants {best.words}{step}"


def over(priced: PricedLayout, devices: int) -> PricedLayout:
    """Figures per device of all `devices`, those that no layout was planned for among them."""
    share = (priced.devices_used + priced.devices_idle) / devices
    scaled = {name: getattr(priced, name) * share for name in RATES}
    return priced.model_copy(update={**scaled, "devices_idle": devices - priced.devices_used})


def fuller(
    lying: Sequence[Way],
    profile: Profile,
    options: Sequence[LeftOption],
    devices: int,
    deadline: Deadline,
    progress: Callable[[float], None] | None,
) -> tuple[LeftOption, ...]:
    """The fastest layout that uses more devices than the first option's, unless an option is one: what leaving them idle beats.

    It is looked for on every way; `devices` are all that the job has. None too where there was no time to look.
    """
    used = options[0].devices_used or 0
    wide = [_using_more(way, used) for way in lying if way.problem.devices > used]
    known = [option.step_time_s for option in options if (option.devices_used or 0) > used and option.step_time_s is not None]
    best, step_s, complete, legal = None, min(known, default=np.inf), True, False
    for tried, way in enumerate(wide):
        option, found, _ = _tried(way, profile, devices, step_s, deadline, len(wide) - tried + 1, progress, explained=False)
        complete, legal = complete and option.complete, legal or found.counts.legal > 0
        if option.step_time_s is not None and option.step_time_s < step_s:
            best, step_s = option, option.step_time_s
    if not wide or (best is None and (known or not complete)):
        return ()
    best = best or option_of("", wide[0].problem, devices, (), legal=legal)
    said = {"words": f"with more than {used:,} used", "least_used": used + 1, "complete": complete}
    return (best.model_copy(update=said),)


def _using_more(way: Way, used: int) -> Way:
    """The way with what uses no more than so many devices forbidden."""

    def more(problem: Problem) -> Problem:
        forbidden = (*problem.workload.forbid, f"tp*cp*pp*dp <= {used}")
        return problem.model_copy(update={"workload": problem.workload.model_copy(update={"forbid": forbidden})})

    return replace(way, problem=more(way.problem), slow=None if way.slow is None else more(way.slow))


def _whole(
    problem: Problem, profile: Profile, left: Left, deadline: Deadline, progress: Callable[[float], None] | None
) -> LeftOption | None:
    """The job without any loss, on the fastest spread of its devices; None where it has none."""
    if left.whole is None and left.unslowed is None:
        return None
    devices, healthy = left.whole or left.devices, _unslowed(problem, left)
    either = (device_counts, rounded_counts)
    free = [way for ways_of in either for way in ways_of(healthy.cluster, left.before)] if left.before else []
    lying = free or spreads(healthy.cluster, devices)
    best, whole, complete = healthy, None, True
    for tried, asked in enumerate(on(healthy, *each) for each in lying):
        so_far_s = whole.best[0].step_time_s if whole else np.inf
        found = faster(Setting(asked, profile), so_far_s, deadline.share_s(len(lying) - tried + 1), progress)
        complete = complete and found.complete
        best, whole = (asked, found) if found.best else (best, whole)
    fastest = settled(CostModel(best, profile), whole, deadline, bounded=False).best if whole else ()  # as the plan's own is
    option = option_of(f"all {devices:,}, a spare in place", best, devices, fastest, complete=complete)
    return option.model_copy(update={"devices": devices})


def option_of(
    words: str,
    problem: Problem,
    devices: int,
    fastest: Sequence[Candidate],
    beaten: bool = False,
    complete: bool = True,
    legal: bool = True,
) -> LeftOption:
    """An option with its fastest layout, of which there may be none; `devices` are all that the job has.

    `beaten`: only what is faster than another option was looked for, so that none says no more than that. `complete`: it was
    searched to the end. `legal`: something is.
    """
    each = supernode_counts(problem.cluster, problem.devices, problem.per_supernode)[0]
    none_faster = beaten and not fastest
    known = LeftOption(words=words, devices=problem.devices, per_supernode=each, beaten=none_faster, complete=complete)
    if not (fastest or legal) and complete:
        from .explain import clashing  # its solver takes a while to import

        return known.model_copy(update={"forbidden": clashing(problem)})
    if not fastest:
        return known
    layout = fastest[0].layout.model_copy(update={"stages": ()})
    figures = {"devices_used": layout.devices, "devices_idle": devices - layout.devices}
    return known.model_copy(update={**figures, "step_time_s": fastest[0].step_time_s, "layout": layout})


def words_of(problem: Problem) -> str:
    """«513 as 72 in each of 7 supernodes, 9 in another»."""
    return _as_lies(supernode_counts(problem.cluster, problem.devices, problem.per_supernode))


def _as_lies(each: Sequence[int]) -> str:
    """Devices in supernodes, all but the last as many, in words."""
    devices = sum(each)
    if len(each) == 1:
        return f"{devices:,} in one supernode"
    whole = len(each) - (each[-1] != each[0])
    many = f"{each[0]:,} in each of {whole:,} supernodes" if whole > 1 else f"{each[0]:,} in one supernode"
    return f"{devices:,} as {many}{f', {each[-1]:,} in another' if whole < len(each) else ''}"


def on(problem: Problem, devices: int, per_supernode: int | None) -> Problem:
    """The problem on other devices, or on as many that lie otherwise."""
    return problem.model_copy(update={"devices": devices, "per_supernode": per_supernode})


def lies_as(problem: Problem, planned: Problem | None) -> tuple[str, ...]:
    """How the devices lie, in a sentence, where that is not as they are allocated, or not as a plan has them in its own way."""
    if problem.allocated_sizes != problem.cluster.allocated_sizes(problem.devices):
        return (f"the layout lies as planned: {words_of(problem)}",)
    if (
        planned is None
        or planned.per_supernode is None
        or planned.per_supernode == problem.allocated_sizes[problem.cluster.supernode_place]
    ):
        return ()
    return (f"the layout lies as allocated, not as planned: {words_of(problem)}",)

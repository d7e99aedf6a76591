"""Counts of devices that a training run is tried on, and the search for the least that is done in time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cost_models.reliability import SECONDS_PER_DAY, server_size, supernode_size
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.degraded import LARGE_TILES
from ..search_spaces.errors import Infeasible
from ..search_spaces.inputs import MOST_DEVICES
from .training_run import Run, Tried, at_target, by_hand, in_time, in_words, least_devices, per_token, whole

STEPS = (8, 9, 10, 12, 15)
"""Units that are tried, times powers of two: counts that batches and layers divide by, at most a quarter apart."""
FURTHEST = 2.0
"""Factor by which the next count may be larger: one that is far too large takes long to plan."""
MOST_PLANS = 24
MORE = 1.25
"""Counts with which every device would have to do so many times what it does at any count tried are not tried."""
APART = 0.03
"""Share by which counts that are tried one after another differ at least: nearer ones are found between them."""
NEAR = 0.01
"""Share of a count by which the one below it may be off: steps are not known any better."""
MOST_SURE = 4  # plans of larger counts, to find one that is in time at the late end of what is uncertain
LAYOUTS = 4  # of a count, the fastest ones: of these the one that gets furthest with failures is taken
NO_GAIN = 3  # larger jobs in a row that are no faster than the fastest before the batch is taken to be the limit
Progress = Callable[[str, float], None]


def counts(cluster: ClusterSpec) -> tuple[int, ...]:
    """Counts of devices to try first, at most a quarter apart from 8 servers on: whole servers, and whole supernodes.

    Both, since a supernode of 72 gives counts that batches rarely divide by, and 32 racks of 64 are as good a job as 30 of 72.
    """
    most = min(cluster.max_devices or MOST_DEVICES, MOST_DEVICES)
    smooth = {*range(1, 8), *(step << power for step in STEPS for power in range(24))}
    units = {unit_of(cluster), supernode_size(cluster)}
    return tuple(sorted({unit * number for unit in units for number in smooth if unit * number <= most}))


def likely(cluster: ClusterSpec, least: int, below: int) -> list[int]:
    """Counts from `least` to less than `below`: those of `counts`, and equal shares of every supernode that groups of powers of two
    tile, as 64 of 72; of those that are not APART the one that the larger power of two divides.
    """
    size = supernode_size(cluster)
    shares = {size // tile * tile for tile in LARGE_TILES} - {0}
    every = {*counts(cluster), *(count for share in shares for count in range(-(-least // share) * share, below, share))}
    found: list[int] = []
    for count in sorted(count for count in every if least <= count < below):
        if not found or count >= found[-1] * (1.0 + APART):
            found.append(count)
        elif count & -count > found[-1] & -found[-1]:
            found[-1] = count
    return found


def unit_of(cluster: ClusterSpec) -> int:
    """Devices of what a job is made of at the least: a server, or a supernode that is smaller."""
    return min(supernode_size(cluster), server_size(cluster))


@dataclass
class Trials:
    """Counts of a run that were planned, each once."""

    run: Run
    progress: Progress | None
    tried: dict[int, Tried] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unit, self.ladder = unit_of(self.run.cluster), counts(self.run.cluster)

    def at(self, devices: int) -> Tried:
        if devices not in self.tried:
            self.tried[devices] = whole(self.run, devices)
            if self.progress is not None:
                self.progress(f"{devices:,} devices", min(len(self.tried) / MOST_PLANS, 1.0))
        return self.tried[devices]

    def in_time(self, devices: int) -> bool:
        return in_time(self.run, self.at(devices))

    def look_closer(self, devices: int) -> None:
        """Has a count's layout chosen by what failures make of it, where they are known."""
        if self.at(devices).goodput is not None:
            self.tried[devices] = whole(self.run, devices, LAYOUTS)

    def without_idle(self, devices: int) -> int:
        """Of a count in time what its plan uses, as long as a plan of only that is in time."""
        used = self.at(devices).plan
        needed = devices if used is None else -(-used.devices_used // self.unit) * self.unit
        return self.without_idle(needed) if needed < devices and self.in_time(needed) else devices

    def least_in_time(self, ended: BaseException) -> int:
        """The least count tried that is in time; where none is, what `ended` the trials, or Infeasible with what was tried."""
        if not self.tried:
            raise ended
        enough = min((count for count, one in self.tried.items() if in_time(self.run, one)), default=None)
        if enough is None:
            told = (f"{count:,} devices: {one.reason or f'{one.days:.3g} days'}" for count, one in sorted(self.tried.items()))
            raise Infeasible("interrupted before a count in time was found", tuple(told))
        return enough

    def short(self, enough: int) -> int | None:
        """The largest count tried that is too slow and less than one in time."""
        return max((count for count, one in self.tried.items() if count < enough and not in_time(self.run, one)), default=None)

    def least(self) -> int:
        """Whole units with which the run were in time if a device did MORE times what it did in any plan, or worked at its peak."""
        done = [one.plan.devices_used * one.days for one in self.tried.values() if one.plan is not None and one.days is not None]
        wanted = max(least_devices(self.run), min(done) / MORE / self.run.days)
        return max(math.ceil(wanted / self.unit), 1) * self.unit


def first_in_time(trials: Trials, target_mfu: float | None) -> int:
    """A count of the ladder that is in time, come to from below."""
    run, ladder = trials.run, trials.ladder
    place = min(bisect.bisect_left(ladder, least_devices(run)), len(ladder) - 1)
    fastest, stale = math.inf, 0
    for _ in range(MOST_PLANS):
        found = trials.at(ladder[place])
        if in_time(run, found):
            return found.devices
        if found.days is not None:
            stale = 0 if found.days < fastest * (1.0 - 1e-3) else stale + 1
            fastest = min(fastest, found.days)
        mostly_idle = found.plan is not None and found.plan.devices_idle > found.plan.devices_used
        if place == len(ladder) - 1 or stale >= NO_GAIN or mostly_idle:
            break
        wanted = found.devices * (FURTHEST if found.days is None else min(found.days / run.days, FURTHEST))
        place = min(max(place + 1, bisect.bisect_left(ladder, wanted)), len(ladder) - 1)
    at_the_end = place == len(ladder) - 1 and stale < NO_GAIN
    reasons = _limit(run, found, fastest, target_mfu) if at_the_end else _why(run, found, fastest)
    raise Infeasible(f"no count of {run.cluster.name} does {run.tokens:.3g} tokens in {run.days:g} days", reasons)


def fewer(trials: Trials, least: int, enough: int) -> int:
    """The least of the likely counts that is in time, where that is less than one that is known to be."""
    enough = trials.without_idle(enough)
    found = next((count for count in likely(trials.run.cluster, least, enough) if trials.in_time(count)), enough)
    return trials.without_idle(found)


def narrowed(trials: Trials, least: int, enough: int) -> int:
    """The least count that is in time, whole units being halved from the largest below it that is too slow, down to NEAR."""
    unit = trials.unit
    for _ in range(MOST_PLANS):
        short = max(trials.short(enough) or 0, least - unit)
        if enough - short <= max(unit, NEAR * enough):
            break
        middle = max((short + enough) // 2 // unit * unit, short + unit)
        enough = trials.without_idle(middle) if trials.in_time(middle) else enough
    return enough


def look_for_sure(trials: Trials, enough: int) -> None:
    """Tries larger counts until one is in time at the late end of what is uncertain, or adding devices does not help."""
    run, ladder, found, before = trials.run, trials.ladder, trials.at(enough), math.inf
    for _ in range(MOST_SURE):
        high = math.inf if found.days_interval is None else found.days_interval[1]
        larger = bisect.bisect_left(ladder, found.devices * min(high / run.days, FURTHEST))
        if high <= run.days or high >= before or larger == len(ladder):
            return
        found, before = trials.at(ladder[larger]), high


def _limit(run: Run, last: Tried, fastest: float, target_mfu: float | None) -> tuple[str, ...]:
    """What it would take beyond the cluster's or the planner's largest job, what that one can do, and the arithmetic."""
    most = run.cluster.max_devices
    why = f"{run.cluster.name} has no more" if most is not None and most <= MOST_DEVICES else "no larger job is planned"
    largest = f"{last.devices:,} devices, the most that were tried since {why}"
    targeted = () if target_mfu is None else tuple(in_words([at_target(run, target_mfu)]))
    if last.days is None:
        peak = run.cluster.accelerator.peak_flops[run.precision].value
        least = f"by the arithmetic 6·N·D takes at least {least_devices(run):,.0f} devices, were each at its peak"
        return (f"with {largest}: {last.reason}", least, *by_hand(run, peak, "of a device at its peak"), *targeted)
    needed, seen = last.devices * last.days / run.days, run.tokens * run.days / last.days
    rate = per_token(run) * run.tokens / (last.devices * last.days * SECONDS_PER_DAY)
    return (
        f"about {needed:,.0f} devices would, were they as efficient as {largest}",
        f"those take {last.days:.3g} days, failures included, or see {seen:.3g} tokens in {run.days:g} days",
        *by_hand(run, rate, "of a device in the largest job that was tried"),
        *targeted,
        *(_why(run, last, fastest)[1:] if last.days > fastest else ()),
    )


def _why(run: Run, last: Tried, fastest: float) -> tuple[str, ...]:
    if math.isinf(fastest):
        return (f"{last.devices:,} devices: {last.reason}",)
    return (
        f"the fastest takes {fastest:.3g} days; up to {last.devices:,} devices were tried",
        f"a batch of {run.global_batch:,} sequences keeps only so many devices busy: a larger one, or more days, would help",
    )

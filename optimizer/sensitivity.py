"""What the best step time would be on slightly other hardware, and how far hardware may change before another layout wins.

Every figure is a search of the changed problem, not a difference of one layout's terms. The winner, priced there, is what the
search has to beat, which leaves little to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..cost_models.memory import GIB
from ..search_spaces.layout import Layout
from .changes import (
    Change,
    faster_compute,
    faster_level,
    faster_memory,
    latency_groups,
    more_devices,
    more_memory,
    slower_levels,
)
from .found import Candidate
from .incumbent import Setting, fastest, re_cut, same_choice
from .interrupts import stoppable
from .pareto import device_unit
from .result import Sensitivity, Threshold, WhatIf

MEMORY_RANGE_GIB = 16.0
RATE_RANGE = (0.25, 4.0)
"""Factors to which rates are changed; latencies go from none to the larger one."""
MICROSECOND = 1e-6
DIGITS = 1e-3
"""Relative width at which a threshold is known: three significant digits."""
FASTER = 1e-6  # share by which another layout must be faster to be the winner
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Knob:
    """Something that can be changed: by `step` in the table and, where its thresholds are looked for, from `nominal` to `ends`."""

    name: str
    unit: str
    change: Change
    step: float
    said: str
    nominal: float = 1.0
    ends: tuple[float, ...] = ()


def sensitivity(setting: Setting, winner: Layout, step_time_s: float, progress: Progress | None = None) -> Sensitivity:
    """The table and the thresholds of a planned setting, whose best layout takes `step_time_s`.

    An interrupt or the setting's deadline ends it with what is answered by then.
    """
    knobs = list(_knobs(setting))
    directions = sum(len(knob.ends) for knob in knobs)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / (len(knobs) + directions))

    table: list[WhatIf] = []
    thresholds: list[Threshold] = []
    with stoppable():  # what is answered stands
        for knob in knobs:
            table.append(_what_if(setting, winner, step_time_s, knob))
            tick()
        for knob in knobs:
            for end in knob.ends:
                thresholds.append(threshold(setting, winner, knob, end))
                tick()
    return Sensitivity(table=tuple(table), thresholds=tuple(thresholds), unanswered=len(knobs) + directions - done)


def threshold(setting: Setting, winner: Layout, knob: Knob, end: float) -> Threshold:
    """Where on the way from the knob's nominal value to `end` another layout becomes the winner.

    A layout that wins at some value is compared with the winner alone, which places the change between the two cheaply; just
    before that place the search is asked again, until it finds none that is faster. Only what it answers counts. Of times that are
    linear in what is turned (latencies, reciprocals of rates) the least is concave, so that who is fastest at two values is so
    between them; what hides behind other work is not linear, and a layout could win in the middle alone: it is looked for there.
    """
    inside = knob.nominal
    places = (end, _middle(knob, inside, end))
    found_at = ((value, _rival(setting, winner, knob, value)) for value in places)
    outside, rival = next(((value, found) for value, found in found_at if found is not None), (end, None))
    if rival is None:
        return Threshold(name=knob.name, unit=knob.unit, end=end)
    while not _close(knob, inside, outside):
        inside_pair, outside = _crossing(setting, winner, rival.layout, knob, inside, outside)
        found = _rival(setting, winner, knob, inside_pair)
        if found is None:
            inside = inside_pair
        else:
            rival, outside = found, inside_pair
    return Threshold(
        name=knob.name,
        unit=knob.unit,
        end=end,
        holds_to=inside,
        changes_at=outside,
        layout=rival.layout if np.isfinite(rival.step_time_s) else None,
    )


def _knobs(setting: Setting) -> Iterator[Knob]:
    """In the order of the table."""
    cluster, devices = setting.problem.cluster, setting.problem.devices
    memory = (-MEMORY_RANGE_GIB, MEMORY_RANGE_GIB)
    yield Knob("memory", "GiB", lambda s, gib: more_memory(s, gib * GIB), 1.0, "+1 GiB of memory", 0.0, memory)
    yield Knob("compute", "×", faster_compute, 1.1, "+10 % compute", 1.0, RATE_RANGE)
    yield Knob("memory bandwidth", "×", faster_memory, 1.1, "+10 % memory bandwidth", 1.0, RATE_RANGE)
    inside = [1, *(size for size in setting.problem.allocated_sizes)]
    used = [i for i, (below, size) in enumerate(pairwise(inside)) if size > below]
    for i in used:
        name = cluster.levels[i].name
        yield Knob(f"{name} bandwidth", "×", faster_level(i), 1.1, f"+10 % {name} bandwidth", 1.0, RATE_RANGE)
    for group in latency_groups(setting, used):
        name = ", ".join(cluster.levels[i].name for i in group)
        latency_us = max(cluster.levels[i].latency_s.value for i in group) / MICROSECOND
        ends = (-latency_us, latency_us * (RATE_RANGE[1] - 1.0)) if latency_us else ()
        yield Knob(f"{name} latency", "µs", _microseconds(group), -1.0, f"−1 µs {name} latency", 0.0, ends)
    unit = device_unit(cluster, devices)
    if cluster.max_devices is None or devices + unit <= cluster.max_devices:
        yield Knob("devices", "devices", more_devices, unit, f"+{unit} devices")
    if devices > unit:
        yield Knob("devices", "devices", more_devices, -unit, f"−{unit} devices")


def _microseconds(group: Sequence[int]) -> Change:
    """Change of the latency of some levels by microseconds."""
    change = slower_levels(group)
    return lambda setting, more: change(setting, more * MICROSECOND)


def _what_if(setting: Setting, winner: Layout, step_time_s: float, knob: Knob) -> WhatIf:
    """The best step of the changed setting. A layout for so many devices is legal on more, not on fewer."""
    changed = knob.change(setting, knob.step)
    carries = changed.problem.devices == setting.problem.devices
    best = fastest(changed, [winner] if carries else [])
    if best is None:
        return WhatIf(change=knob.said)
    return WhatIf(
        change=knob.said,
        step_time_s=best.step_time_s,
        difference=best.step_time_s / step_time_s - 1.0,
        same_layout=same_choice(best.layout, winner),
        layout=best.layout,
    )


def _rival(setting: Setting, winner: Layout, knob: Knob, value: float) -> Candidate | None:
    """The fastest layout at some value of the knob if the winner is slower there; None if not.

    Where nothing fits any more it is the winner itself, with infinite time.
    """
    changed = knob.change(setting, value)
    own = re_cut(changed, winner)
    best = fastest(changed, [winner])
    if best is None:
        return own
    if same_choice(best.layout, winner):
        return None
    return best if best.step_time_s < own.step_time_s * (1.0 - FASTER) else None


def _crossing(setting: Setting, winner: Layout, rival: Layout, knob: Knob, inside: float, outside: float) -> tuple[float, float]:
    """Values between which the rival becomes faster than the winner, by bisecting those two layouts' own prices."""
    while not _close(knob, inside, outside):
        setting.deadline.check()
        middle = _middle(knob, inside, outside)
        changed = knob.change(setting, middle)
        theirs, own = (re_cut(changed, layout).step_time_s for layout in (rival, winner))
        if not np.isfinite(own) or theirs < own * (1.0 - FASTER):
            outside = middle
        else:
            inside = middle
    return inside, outside


def _middle(knob: Knob, first: float, second: float) -> float:
    """Factors are halved by their logarithm."""
    return float(np.sqrt(first * second)) if knob.unit == "×" else (first + second) / 2.0


def _close(knob: Knob, first: float, second: float) -> bool:
    """Whether two values agree to three digits of what the knob turns; amounts that are added, of their whole range."""
    scale = max(abs(first), abs(second)) if knob.unit == "×" else max(map(abs, knob.ends))
    return abs(first - second) <= DIGITS * scale

"""What limits cost: the plan's step beside the best without its topology rule, and beside other reserves of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from ..cost_models.memory import GIB
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import Layout, LayoutTable, Problem
from ..search_spaces.rules import violations
from .deadline import Deadline
from .found import Candidate, Found
from .incumbent import Setting
from .interrupts import stoppable
from .recutting import Recut, settled
from .search import Search, unsearched
from .stages import EQUAL
from .supernode_result import InsideCost, LeftOption, ReservePrice

RESERVE_STEP_GIB = 1.0
MOST_CHANGES = 12
"""Reserves that are looked at for where the step changes: each lies beyond what a layout found with the last one leaves."""
CHANGE = 1e-3
"""Share of a step by which another has to differ for a reserve to be told as where it changes."""
MIB = float(2**20)
FIRST_SHARE = 0.75
"""Of the time for a plan and its rule's price, what the plan's own search gets."""
DEFAULT_INSIDE = {"supernode": ("tp", "ep?")}
"""What heavy, frequent traffic keeps to unless the user says otherwise: TP inside, EP inside where it fits."""


def with_inside(problem: Problem, inside: Mapping[str, tuple[str, ...]]) -> Problem:
    """The problem with other topology rules of the user's; "supernode" becomes the cluster's own name of it."""
    named = {problem.cluster.level_name(level): dimensions for level, dimensions in inside.items()}
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"inside": named})})


def rule_words(problem: Problem) -> str:
    """«supernode:tp,ep where it fits»."""
    return "; ".join(
        f"{level}:{','.join(name.replace('?', ' where it fits') for name in names)}"
        for level, names in sorted(problem.workload.inside.items())
    )


def keeps(problem: Problem, layout: Layout) -> bool:
    """Whether a layout meets the user's topology rules."""
    return not any(broken.rule.startswith("inside ") for broken in violations(problem, layout))


@dataclass(frozen=True)
class Answer:
    """What was found for a problem with its limits, on whichever spread of its devices is fastest; `limit_s` was the time for it.

    `options` are the spreads that were compared, its own first; `cuts` what is proved of the best layout's.
    """

    problem: Problem
    found: Found
    limit_s: float | None = None
    options: tuple[LeftOption, ...] = ()
    cuts: Recut | None = None


def ruled(problem: Problem, answered: Callable[[Problem, float], Answer], by_default: bool) -> tuple[Answer, InsideCost | None]:
    """The best layouts that keep groups inside levels as the problem or the default says, and what that costs.

    `answered` finds the best of a problem in a share of the time for one. What is found with a rule and without it is found in the
    same way, so that each is what a command with and without the rule would print. The default rule is searched without at first:
    mostly the best keep to it anyway.
    """
    limited = bool(problem.workload.inside)
    first = answered(problem, FIRST_SHARE if limited or by_default else 1.0)
    if not first.found.best or not (limited or by_default):
        return first, None
    if limited:
        free = _again(answered, with_inside(problem, {}))
        return first, None if free is None else _cost(first, free, given=True)
    kept = with_inside(first.problem, DEFAULT_INSIDE)
    if all(keeps(kept, candidate.layout) for candidate in first.found.best):
        return first, _cost(replace(first, problem=kept), first, given=False)
    again = _again(answered, with_inside(problem, DEFAULT_INSIDE))
    if again is not None and again.found.best:
        return again, _cost(again, first, given=False)
    cost = _cost(replace(first, problem=kept), first, given=False)
    return first, cost.model_copy(update={"kept": False, "proved": again is not None and again.found.complete})


def _again(answered: Callable[[Problem, float], Answer], problem: Problem) -> Answer | None:
    """The answer to another problem beside one that stands; None where an interrupt came before it."""
    with stoppable():
        return answered(problem, 1.0)
    return None


def _cost(kept: Answer, without: Answer, given: bool) -> InsideCost:
    """What the rule of one answer costs beside another without it; what keeps the rule may be the best without it too."""
    best = kept.found.best[0]
    free = min((best, *without.found.best[:1]), key=lambda candidate: candidate.step_time_s)
    slower = best.step_time_s / free.step_time_s - 1.0
    return InsideCost(
        rule=rule_words(kept.problem),
        given=given,
        step_time_s=best.step_time_s,
        step_time_without_s=free.step_time_s,
        slower=slower,
        without=free.layout.model_copy(update={"stages": ()}) if slower > 0 else None,
        proved=kept.found.complete and without.found.complete,
    )


def reserve_price(
    setting: Setting, plan: Candidate, deadline: Deadline, complete: bool, progress: Callable[[float], None] | None = None
) -> ReservePrice:
    """What reserved memory costs: the best step without it, with a GiB less and a GiB more, and between which reserves it is the
    plan's; `complete`: that was proved.
    """
    asked, step_s = _Reserves(setting, deadline, progress), plan.step_time_s
    reserved = asked.reserved_gib
    step_gib = min(RESERVE_STEP_GIB, reserved)
    unreserved = asked.best(0.0, step_s)
    since_gib, before_s = asked.last_change(step_s)
    until_gib, after_s = asked.next_change(plan)
    less, more = asked.best(reserved - step_gib, step_s), asked.best(reserved + step_gib, np.inf)
    less_s, more_s = less.step_time_s if less else step_s, more.step_time_s if more else None
    return ReservePrice(
        reserved_gib=reserved,
        step_gib=step_gib,
        step_time_s=step_s,
        unreserved_s=unreserved.step_time_s if unreserved else step_s,
        since_gib=since_gib,
        before_s=before_s,
        until_gib=until_gib,
        after_s=after_s,
        less_s=less_s,
        more_s=more_s,
        price_s_per_gib=(step_s - less_s) / step_gib,
        next_s_per_gib=None if more_s is None else (more_s - step_s) / step_gib,
        proved=complete and asked.complete,
    )


@dataclass
class _Reserves:
    """A problem searched with other reserves of memory, each as a plan of it would be; `complete`: all were searched to the end."""

    setting: Setting
    deadline: Deadline
    progress: Callable[[float], None] | None = None
    complete: bool = True

    @property
    def reserved_gib(self) -> float:
        return self.setting.problem.workload.reserved_gib

    def best(self, gib: float, ceiling_s: float) -> Candidate | None:
        """The best layout with so much reserved, if it is faster than the ceiling; none once a search was cut short."""
        if not self.complete:
            return None
        other = Setting(with_reserve(self.setting.problem, gib), self.setting.profile)
        found = faster(other, ceiling_s, self.deadline.share_s(3), self.progress)
        self.complete = found.complete
        if not found.best:
            return None
        moved = settled(other.model(), found, self.deadline, bounded=False)
        self.complete = self.complete and moved.whole
        return moved.best[0]

    def last_change(self, step_s: float) -> tuple[float, float | None]:
        """The least reserve from which on nothing is faster than `step_s` by a CHANGE, in GiB, and the step with less, if any."""
        gib, width, found, before_s = self.reserved_gib, RESERVE_STEP_GIB, None, None
        step_s *= 1.0 - CHANGE
        while found is None and gib > 0:
            gib, width = max(self.reserved_gib - width, 0.0), 2.0 * width
            found = self.best(gib, step_s)
        for _ in range(MOST_CHANGES):
            if found is None or gib >= self.reserved_gib:
                return min(gib, self.reserved_gib) if before_s else 0.0, before_s
            gib, before_s = self._beyond(found.layout), found.step_time_s
            found = self.best(gib, step_s) if gib < self.reserved_gib else None
        self.complete = False
        return gib, before_s

    def next_change(self, plan: Candidate) -> tuple[float, float | None]:
        """The least reserve with which all are slower than the plan by a CHANGE, in GiB, and their step: none if nothing fits."""
        gib, layout = self.reserved_gib, plan.layout
        for _ in range(MOST_CHANGES):
            gib = max(gib, self._beyond(layout))
            found = self.best(gib, np.inf)
            if found is None or found.step_time_s > plan.step_time_s * (1.0 + CHANGE):
                return gib, found.step_time_s if found else None
            layout = found.layout
        self.complete = False
        return gib, plan.step_time_s

    def _beyond(self, layout: Layout) -> float:
        """The least reserve, by whole MiB, with which a layout with its stages does not fit, in GiB."""
        model = self.setting.model()
        peak = float(model.price(LayoutTable.from_layouts([layout])).peak_bytes[0])
        return self.reserved_gib + (floor((model.usable_bytes - peak) / MIB) + 1) * MIB / GIB


def with_reserve(problem: Problem, gib: float) -> Problem:
    """The problem with another reserve of every device's memory."""
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"reserved_gib": gib})})


def faster(setting: Setting, ceiling_s: float, limit_s: float | None, progress: Callable[[float], None] | None = None) -> Found:
    """The best layout of a setting that is faster than the ceiling, within a time limit; Ctrl-C ends it like the limit does."""
    space, model = Space(setting.problem), setting.model()
    with stoppable():
        return Search(space, model, 1, limit_s, ceiling_s * (1.0 - EQUAL)).run(progress)
    return unsearched(space, model)

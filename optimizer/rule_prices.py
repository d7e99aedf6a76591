"""What limits cost: the plan's step beside the best without its topology rule, and beside other reserves of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..cost_models.step import CostModel
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import Layout, Problem
from ..search_spaces.rules import violations
from .deadline import Deadline
from .engines import Task, solve
from .incumbent import Setting
from .search import Candidate, Found, Search
from .stages import EQUAL
from .supernode_result import InsideCost, ReservePrice

RESERVE_STEP_GIB = 1.0
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
class Asked:
    """How a search is run: engine, number of frames, and who hears of it."""

    engine: str
    top: int
    progress: Callable[[float], None] | None = None


@dataclass(frozen=True)
class Ruled:
    """What was found for a problem, its default rule among its limits where that had to be said; `cost` is the rule's.

    `limit_s` is the search's part of a time limit.
    """

    problem: Problem
    found: Found
    cost: InsideCost | None = None
    limit_s: float | None = None


def ruled_search(setting: Setting, asked: Asked, by_default: bool, deadline: Deadline, others: int) -> Ruled:
    """The best layouts that keep groups inside levels as the problem or the default says, and what that costs.

    A rule of the problem's own is searched with, then without it for anything faster. The default one is searched without at first:
    mostly the best keep to it anyway. A time limit is divided with `others` searches that are still to come.
    """
    problem, limited = setting.problem, bool(setting.problem.workload.inside)
    limit_s = deadline.share_s(1 + others)
    if limit_s is not None and (limited or by_default):
        limit_s *= FIRST_SHARE
    found = solve(asked.engine, Task(Space(problem), setting.model(), asked.top, limit_s, asked.progress))
    if not found.best or not (limited or by_default):
        return Ruled(problem, found, limit_s=limit_s)
    best = found.best[0]
    if limited:
        bare = Setting(with_inside(problem, {}), setting.profile)
        free = faster(bare, best.step_time_s, deadline.share_s(1 + others), asked.progress)
        faster_one = free.best[0] if free.best else best
        return Ruled(problem, found, _cost(problem, best, faster_one, True, found.complete and free.complete))
    ruled = with_inside(problem, DEFAULT_INSIDE)
    if all(keeps(ruled, candidate.layout) for candidate in found.best):
        return Ruled(problem, found, _cost(ruled, best, best, False, found.complete))
    model = CostModel(ruled, setting.profile)
    again = solve(asked.engine, Task(Space(ruled), model, asked.top, deadline.share_s(1 + others), asked.progress))
    if not again.best:
        return Ruled(problem, found, _cost(ruled, best, best, False, again.complete).model_copy(update={"kept": False}))
    return Ruled(ruled, again, _cost(ruled, again.best[0], best, False, found.complete and again.complete))


def _cost(ruled: Problem, kept: Candidate, free: Candidate, given: bool, proved: bool) -> InsideCost:
    slower = kept.step_time_s / free.step_time_s - 1.0
    return InsideCost(
        rule=rule_words(ruled),
        given=given,
        step_time_s=kept.step_time_s,
        step_time_without_s=free.step_time_s,
        slower=slower,
        without=free.layout.model_copy(update={"stages": ()}) if slower > 0 else None,
        proved=proved,
    )


def with_step(cost: InsideCost, step_time_s: float) -> InsideCost:
    """The same once the layout that keeps the rule is cut anew; where that is the best without the rule too, of both."""
    if cost.without is not None:
        return cost
    return cost.model_copy(update={"step_time_s": step_time_s, "step_time_without_s": step_time_s})


def reserve_price(
    setting: Setting, step_s: float, deadline: Deadline, complete: bool, progress: Callable[[float], None] | None = None
) -> ReservePrice:
    """What reserved memory costs: the best step with a GiB less and a GiB more of it; `complete`: the step given is proved."""
    reserved = setting.problem.workload.reserved_gib
    step_gib = min(RESERVE_STEP_GIB, reserved)

    def best(gib: float, ceiling_s: float, parts: int) -> tuple[float | None, bool]:
        other = Setting(with_reserve(setting.problem, gib), setting.profile)
        found = faster(other, ceiling_s, deadline.share_s(parts), progress)
        return found.best[0].step_time_s if found.best else None, found.complete

    shorter_s, less_done = best(reserved - step_gib, step_s, 2)
    more_s, more_done = best(reserved + step_gib, np.inf, 1)
    less_s = step_s if shorter_s is None else shorter_s
    return ReservePrice(
        reserved_gib=reserved,
        step_gib=step_gib,
        step_time_s=step_s,
        less_s=less_s,
        more_s=more_s,
        price_s_per_gib=(step_s - less_s) / step_gib,
        next_s_per_gib=None if more_s is None else (more_s - step_s) / step_gib,
        proved=complete and less_done and more_done,
    )


def with_reserve(problem: Problem, gib: float) -> Problem:
    """The problem with another reserve of every device's memory."""
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"reserved_gib": gib})})


def faster(setting: Setting, ceiling_s: float, limit_s: float | None, progress: Callable[[float], None] | None = None) -> Found:
    """The best layout of a setting that is faster than the ceiling, within a time limit; Ctrl-C ends it like the limit does."""
    search = Search(Space(setting.problem), setting.model(), 1, limit_s, ceiling_s * (1.0 - EQUAL))
    try:
        return search.run(progress)
    except KeyboardInterrupt:
        return search.end(False, 0.0)

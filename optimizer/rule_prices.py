"""What limits cost: the plan's step beside the best without its topology rule, and beside other reserves of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.enumeration import Space
from ..search_spaces.layout import Layout, Problem
from ..search_spaces.rules import violations
from .deadline import Deadline
from .incumbent import Setting
from .recutting import Recut
from .search import Found, Search
from .stages import EQUAL
from .supernode_result import InsideCost, LeftOption, ReservePrice

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
        return first, _cost(first, answered(with_inside(problem, {}), 1.0), given=True)
    kept = with_inside(first.problem, DEFAULT_INSIDE)
    if all(keeps(kept, candidate.layout) for candidate in first.found.best):
        return first, _cost(replace(first, problem=kept), first, given=False)
    again = answered(with_inside(problem, DEFAULT_INSIDE), 1.0)
    if again.found.best:
        return again, _cost(again, first, given=False)
    cost = _cost(replace(first, problem=kept), first, given=False)
    return first, cost.model_copy(update={"kept": False, "proved": again.found.complete})


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

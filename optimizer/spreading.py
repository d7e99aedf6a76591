"""How a plain count of devices lies on its supernodes, and how many of them are left idle: other spreads than filling supernodes.

The search prices layouts on the fewest supernodes, filled as they are allocated. Groups that do not tile those straddle them; with
less of each in use they may not. Every other spread is searched for anything faster than what is found so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..search_spaces.degraded import spreads
from ..search_spaces.layout import Problem
from .deadline import Deadline
from .found import Found, over_all
from .incumbent import Setting
from .known_best import KnownBest
from .leftover import Way, fuller, on, option_of, words_of
from .rule_prices import Answer, faster
from .stages import EQUAL


def spread_out(
    setting: Setting,
    answer: Answer,
    finished: Callable[[Problem, Found], Answer],
    deadline: Deadline,
    progress: Callable[[float], None] | None = None,
    known: KnownBest | None = None,
) -> Answer:
    """The answer with the shortest step on any spread of the setting's devices, given the one for them as they are allocated.

    `finished` answers a problem as that was answered, given its fastest layout; `known` are layouts found before. The answer is
    complete only if all spreads were searched to the end; its bounds hold for all of them, those too of which an interrupt left no
    more than to look at their frames.
    """
    problem, best = setting.problem, answer
    ways = [on(problem, *each) for each in spreads(problem.cluster, problem.devices)]
    first, legal = answer.found, answer.found.counts.legal > 0
    options = [option_of(words_of(problem), problem, problem.devices, first.best, complete=first.complete, legal=legal)]
    searched = [answer.found]
    for tried, other in enumerate(ways[1:], start=1):
        limit_s = deadline.share_s(len(ways) - tried + 1)
        found = _faster_than(Setting(other, setting.profile), _step_s(best), limit_s, progress, known)
        searched.append(found)
        again = finished(other, found) if found.best else answer
        best_there = again.found.best if found.best else ()
        known_of = {"beaten": True, "complete": found.complete, "legal": found.counts.legal > 0}
        option = option_of(words_of(other), other, problem.devices, best_there, **known_of)
        faster_one = _step_s(again) < _step_s(best)
        best, options = (again, [option, *options]) if faster_one else (best, [*options, option])
    if not best.found.best:
        return best
    more = fuller([Way(words_of(way), way) for way in ways], setting.profile, options, problem.devices, deadline, progress)
    return replace(best, found=over_all(best.found, searched), options=(*options, *more))


def _faster_than(
    setting: Setting, step_s: float, limit_s: float | None, progress: Callable[[float], None] | None, known: KnownBest | None
) -> Found:
    """The fastest layout below a step; sought at once below what layouts known of this spread take, if nothing limits the time."""
    if known is None or limit_s is not None:
        return faster(setting, step_s, limit_s, progress)
    expected_s = known.expected_s(setting.model(), setting.problem, 1)
    found = faster(setting, min(step_s, expected_s), limit_s, progress)
    if found.complete and not found.best and expected_s < step_s:
        found = faster(setting, step_s, limit_s, progress)
    known.remember(setting.problem, [candidate.layout for candidate in found.best])
    return found


def _step_s(answer: Answer) -> float:
    """What another step has to be below to be shorter than the best; infinite without one."""
    return answer.found.best[0].step_time_s * (1.0 - EQUAL) if answer.found.best else np.inf

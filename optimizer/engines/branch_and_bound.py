"""Branch and bound: the search of `search`, as an engine.

Schedules whose cuts are bettered after the search (`recutting`) and those that keep theirs are searched one after the other: a
layout of the first kind is then not left out for one of the second that it may yet overtake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from ...cost_models.schedules import SPLIT
from ...search_spaces.enumeration import Space
from ..found import Counts, Found
from ..interrupts import stoppable
from ..search import Search, unsearched
from .task import Task


def solve(task: Task) -> Found:
    """The best layouts and their proof, of several kinds of schedules the best of each frame and kind; a search that is stopped
    returns what it has.
    """
    found: Found | None = None
    for space in _by_kind(task.space):
        left_s = None if task.time_limit_s is None else max(task.time_limit_s - (found.seconds if found else 0.0), 0.0)
        found = _searched(space, task, left_s) if found is None else _joined(found, _beside(space, task, left_s))
    return found or Found()


def _beside(space: Space, task: Task, limit_s: float | None) -> Found:
    """The search of one more space; what was found in others stands where an interrupt ends it."""
    with stoppable():
        return _searched(space, task, limit_s)
    return unsearched(space, task.model)


def _searched(space: Space, task: Task, limit_s: float | None) -> Found:
    """The search of one space: below what layouts known from other batches take here, or where that is too little, of all."""
    if task.known is None or limit_s is not None:
        return Search(space, task.model, task.top, limit_s).run(task.progress)
    ceiling_s = task.known.expected_s(task.model, space.problem, task.top)
    found = Search(space, task.model, task.top, ceiling_s=ceiling_s).run(task.progress)
    if found.complete and len(found.best) < task.top and np.isfinite(ceiling_s):
        found = Search(space, task.model, task.top).run(task.progress)
    task.known.remember(space.problem, [candidate.layout for candidate in found.best])
    return found


def _by_kind(space: Space) -> Iterator[Space]:
    """The space, or its parts by whether schedules split their passes."""
    names = space.problem.workload.fix.get("schedule", ())
    kinds = [tuple(name for name in names if (name in SPLIT) == split) for split in (False, True)]
    if not all(kinds):
        yield space
        return
    for kind in kinds:
        workload = space.problem.workload.model_copy(update={"fix": {**space.problem.workload.fix, "schedule": kind}})
        yield Space(space.problem.model_copy(update={"workload": workload}))


def _joined(first: Found, other: Found) -> Found:
    """What two searches of spaces that share nothing found."""
    counts = Counts(*(getattr(first.counts, each.name) + getattr(other.counts, each.name) for each in fields(Counts)))
    return replace(
        first,
        best=sorted((*first.best, *other.best), key=lambda candidate: candidate.step_time_s),
        counts=counts,
        lower_bound_s=min(first.lower_bound_s, other.lower_bound_s),
        any_cuts_bound_s=min(first.any_cuts_bound_s, other.any_cuts_bound_s),
        frames_bound_s=min(first.frames_bound_s, other.frames_bound_s),
        complete=first.complete and other.complete,
        seconds=first.seconds + other.seconds,
        frames=max(first.frames, other.frames),
    )

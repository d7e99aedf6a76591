"""Branch and bound: the search of `search`, as an engine."""

from __future__ import annotations

from ..search import Found, Search
from .task import Task


def solve(task: Task) -> Found:
    """The best layouts and their proof; a search that is stopped returns what it has."""
    return Search(task.space, task.model, task.top, task.time_limit_s).run(task.progress)

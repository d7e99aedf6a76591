"""The engines: ways to search one space with one cost model, each of which returns the same Found.

`auto` is branch and bound, which needs the least time for all problems of results/engines.md together. CP-SAT proves the same
optimum by another route; Optuna samples, and says how far from the bound it may be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .task import Task

if TYPE_CHECKING:
    from ..found import Found

__all__ = ["ENGINES", "Task", "solve"]

ENGINES = {"auto": "branch_and_bound", "bnb": "branch_and_bound", "cp-sat": "benders", "optuna": "sampling"}
"""By name, the module of this package whose `solve(task)` searches; imported when it is asked for."""


def solve(name: str, task: Task) -> Found:
    """What the engine finds. KeyError: there is no engine of this name."""
    found: Found = import_module(f".{ENGINES[name]}", __name__).solve(task)
    return found

"""How the best layout is found and handed over: plan(problem) → Plan, evaluate(problem, layout), exporters, reports, the
command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..search_spaces.errors import Infeasible, InputError
    from ..search_spaces.inputs import build_problem
    from .planner import evaluate, plan
    from .result import Certificate, Memory, Plan, PricedLayout, StageMemory

__all__ = [
    "Certificate",
    "Infeasible",
    "InputError",
    "Memory",
    "Plan",
    "PricedLayout",
    "StageMemory",
    "build_problem",
    "evaluate",
    "plan",
]

_HOME = {
    "plan": ".planner",
    "evaluate": ".planner",
    "build_problem": "..search_spaces.inputs",
    "InputError": "..search_spaces.errors",
    "Infeasible": "..search_spaces.errors",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is asked for: the command line answers --help without numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME.get(name, ".result"), __name__), name)

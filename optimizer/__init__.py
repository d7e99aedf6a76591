"""How the best layout is found and handed over: plan(problem) → Plan, evaluate(problem, layout), why_not and ablation of a choice,
check of an existing job, compare_layouts, switch from a running job; exporters, reports, the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..search_spaces.errors import Infeasible, InputError
    from ..search_spaces.inputs import build_problem
    from .checked import Checked
    from .checker import check
    from .planner import evaluate, plan
    from .result import (
        Certificate,
        FrontCertificate,
        FrontPoint,
        Memory,
        Plan,
        PricedLayout,
        Refined,
        Robust,
        Sensitivity,
        StageMemory,
        Switch,
    )
    from .study import Refine
    from .switching import switch
    from .waterfall import compare_layouts
    from .why import ablation, why_not

__all__ = [
    "Certificate",
    "Checked",
    "FrontCertificate",
    "FrontPoint",
    "Infeasible",
    "InputError",
    "Memory",
    "Plan",
    "PricedLayout",
    "Refine",
    "Refined",
    "Robust",
    "Sensitivity",
    "StageMemory",
    "Switch",
    "ablation",
    "build_problem",
    "check",
    "compare_layouts",
    "evaluate",
    "plan",
    "switch",
    "why_not",
]

_HOME = {
    "check": ".checker",
    "Checked": ".checked",
    "plan": ".planner",
    "evaluate": ".planner",
    "compare_layouts": ".waterfall",
    "why_not": ".why",
    "ablation": ".why",
    "switch": ".switching",
    "Refine": ".study",
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

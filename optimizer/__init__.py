"""How the best layout is found and handed over: plan(problem) → Plan, evaluate(problem, layout), why_not and ablation of a choice,
check of an existing job, compare_layouts, switch from a running job, place_experts; sweep of many problems, size of a run, compare
of clusters; exporters, reports, the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..search_spaces.errors import Infeasible, InputError
    from ..search_spaces.inputs import build_problem
    from .checking.checked import Checked
    from .checking.checker import check
    from .comparing import compare
    from .evaluation import evaluate
    from .expert_loads import ExpertLoads, read_loads
    from .expert_placement import ExpertPlacement, place_experts
    from .planner import plan
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
    from .sizing import size
    from .study import Refine
    from .sweeps.sweeper import sweep
    from .switching import switch
    from .waterfall import compare_layouts
    from .why import ablation, why_not

__all__ = [
    "Certificate",
    "Checked",
    "ExpertLoads",
    "ExpertPlacement",
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
    "compare",
    "compare_layouts",
    "evaluate",
    "place_experts",
    "plan",
    "read_loads",
    "size",
    "sweep",
    "switch",
    "why_not",
]

_HOME = {
    "check": ".checking.checker",
    "Checked": ".checking.checked",
    "plan": ".planner",
    "evaluate": ".evaluation",
    "compare": ".comparing",
    "compare_layouts": ".waterfall",
    "size": ".sizing",
    "sweep": ".sweeps.sweeper",
    "why_not": ".why",
    "ablation": ".why",
    "switch": ".switching",
    "Refine": ".study",
    "place_experts": ".expert_placement",
    "ExpertPlacement": ".expert_placement",
    "ExpertLoads": ".expert_loads",
    "read_loads": ".expert_loads",
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

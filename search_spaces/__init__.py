"""What may be chosen: models, clusters, stacks, workloads, layouts and the rules of their legality. No seconds, no search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Accelerator, ClusterSpec, Level
    from .enumeration import Space
    from .errors import Infeasible, InputError
    from .inputs import build_problem, catalog_names, load_cluster, load_model, load_stack
    from .layout import Layout, LayoutTable, Problem, Split
    from .model import ModelSpec
    from .rules import RULES, Rule, violations
    from .stack import Stack
    from .workload import Workload

_HOME = {
    "Accelerator": "cluster",
    "ClusterSpec": "cluster",
    "Level": "cluster",
    "Space": "enumeration",
    "Infeasible": "errors",
    "InputError": "errors",
    "build_problem": "inputs",
    "catalog_names": "inputs",
    "load_cluster": "inputs",
    "load_model": "inputs",
    "load_stack": "inputs",
    "Layout": "layout",
    "LayoutTable": "layout",
    "Problem": "layout",
    "Split": "layout",
    "ModelSpec": "model",
    "RULES": "rules",
    "Rule": "rules",
    "violations": "rules",
    "Stack": "stack",
    "Workload": "workload",
}

__all__ = [
    "RULES",
    "Accelerator",
    "ClusterSpec",
    "Infeasible",
    "InputError",
    "Layout",
    "LayoutTable",
    "Level",
    "ModelSpec",
    "Problem",
    "Rule",
    "Space",
    "Split",
    "Stack",
    "Workload",
    "build_problem",
    "catalog_names",
    "load_cluster",
    "load_model",
    "load_stack",
    "violations",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is asked for, so that reading one input does not load them all."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)

"""What a choice costs: operators, kernels, collectives, pipeline, memory, put together for many layouts at once. No search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .details import Detail, detail
    from .profile import Profile, load_profile
    from .step import CostModel, Prices
    from .timeline import Timeline, simulate

__all__ = ["CostModel", "Detail", "Prices", "Profile", "Timeline", "detail", "load_profile", "simulate"]

_HOME = {
    "CostModel": "step",
    "Prices": "step",
    "Profile": "profile",
    "load_profile": "profile",
    "Timeline": "timeline",
    "simulate": "timeline",
    "Detail": "details",
    "detail": "details",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)

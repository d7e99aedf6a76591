"""Fronts of the points that were planned for several aims: what each layout of a front gives up for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .store import Store
from .table import documents

DEGREES = ("tp", "cp", "pp", "dp", "ep", "vpp")


@dataclass(frozen=True)
class Traded:
    """One layout of a front: its figures of both aims, its layout in words, and what it is the extreme of."""

    x: float
    y: float
    words: str
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Trade:
    """The front of one point in its first two aims, by the first of them; names hold the units."""

    title: str
    x_name: str
    y_name: str
    points: tuple[Traded, ...]


def trades(store: Store, keys: Sequence[str]) -> list[Trade]:
    """One for every point whose plan has a front of at least two layouts and aims."""
    found = []
    for point, outcome in documents(store, keys):
        if outcome.document is None or "," not in point.options.get("objective", ""):
            continue
        document = outcome.plan_json()
        front, proof = document.get("front") or [], document.get("front_certificate") or {}
        if len(front) > 1 and len(proof["aims"]) > 1:
            title = f"{point.model} on {point.devices:,} × {point.cluster}, batch {point.global_batch:,}, {point.precision}"
            found.append(_trade(title, front, proof))
    return found


def _trade(title: str, front: Sequence[dict[str, Any]], proof: dict[str, Any]) -> Trade:
    x, y = proof["aims"][:2]
    points = [Traded(one["aims"][x], one["aims"][y], _words(one["layout"]), tuple(one["marks"])) for one in front]
    x_name, y_name = (f"{name}, {proof['units'][name]}" if proof["units"].get(name) else name for name in (x, y))
    return Trade(title, x_name, y_name, tuple(sorted(points, key=lambda one: one.x)))


def _words(layout: dict[str, Any]) -> str:
    degrees = " ".join(f"{name} {layout[name]}" for name in DEGREES if layout[name] > 1)
    kept = f"recompute {layout['recompute']}, offload {layout['offload']}"
    return f"{degrees or 'one device'} micro-batch {layout['micro_batch']}, {kept}"

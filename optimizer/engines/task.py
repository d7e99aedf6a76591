"""What every engine is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...cost_models.step import CostModel
    from ...search_spaces.enumeration import Space
    from ..known_best import KnownBest


@dataclass(frozen=True)
class Task:
    """One search: the `top` best frames of a space under a cost model, within a time limit; `progress` hears the share done.

    `known` are layouts that were best for other problems: an engine may start from them, and tells them its own.
    """

    space: Space
    model: CostModel
    top: int = 5
    time_limit_s: float | None = None
    progress: Callable[[float], None] | None = None
    known: KnownBest | None = None

"""How pictures of sweeps look: colours that are told apart by everybody and in print, marks of series, and names of measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...search_spaces.errors import InputError
from ..sweeps.series import STRATEGIES, device_hours

COLOURS = dict(
    zip(STRATEGIES, ("#f7efb8", "#b9e3ec", "#efb84a", "#76b3dc", "#d0771f", "#3f79b5", "#8c3a10", "#14315f"), strict=True)
)
"""The more is divided, the darker: each is eight or more of lightness (L*) from the next, blue and yellow taking turns, which
colour-blind eyes tell apart too.
"""
WHITE_FROM = STRATEGIES.index("tp ep")
"""From this strategy on, words on its colour are white."""
NO_PLAN = "#ffffff"
SERIES = ("#111111", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a8a")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
PLOTLY_MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")
"""Series differ by both, so that neither has to be seen."""

MEASURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "step time": ("seconds per step", lambda row: float(row["step_time_s"])),
    "MFU": ("% of the dense peak", lambda row: 100.0 * float(row["mfu"])),
    "tokens per device": ("tokens/s per device", lambda row: float(row["tokens_per_s_per_device"])),
    "cost": ("device-hours per million tokens", device_hours),
}


def ink(strategy: str) -> str:
    """The colour of words on a strategy's colour."""
    return "#ffffff" if STRATEGIES.index(strategy) >= WHITE_FROM else "#111111"


def darker(colour: str) -> str:
    """A series' colour, two thirds as light, to be read as text."""
    return "#" + "".join(f"{round(0.66 * int(colour[n : n + 2], 16)):02x}" for n in (1, 3, 5))


def short_count(value: float) -> str:
    """1K for 1,024, 64 for 64, 1,536 for 1,536, 1M for 2²⁰."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= size and value % size == 0:
            return f"{value // size:,.0f}{letter}"
    return f"{value:,.0f}"


def require_plots() -> None:
    """InputError where what draws is not installed: before a sweep rather than after it."""
    from importlib.util import find_spec

    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise InputError(f"--plot: {' and '.join(missing)} not installed; pip install 'paraplan[plots]', or leave the option out")

"""Physical figures in words, as the assumptions of a plan name them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .cluster import Figure

Unit = tuple[str, float]
"""A unit and its size."""

UNITS: tuple[tuple[str, tuple[Unit, ...]], ...] = (
    (r"bytes_per_s$", (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6))),
    (r"bytes(_per_device)?$", (("GiB", 2.0**30), ("MiB", 2.0**20))),
    (r"_s$", (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))),
    (r"peak_flops", (("PFLOP/s", 1e15), ("TFLOP/s", 1e12))),
)
"""By the end of a figure's name, the units that it is read in, largest first."""


def assumed(figures: Iterable[tuple[str, Figure]]) -> Iterable[str]:
    """Named figures that nobody measured or published: each assumed one with its source, the user's own in one sentence."""
    given = []
    for where, figure in figures:
        if figure.grade == "assumed":
            low, high = figure.low or 0.0, figure.high or 0.0  # an assumed figure has both
            unit, size = unit_of(where, high)
            yield f"{where} = {short(figure.value / size)}{unit} ({short(low / size)} to {short(high / size)}): {figure.source}"
        elif figure.grade == "given":
            unit, size = unit_of(where, figure.value)
            given.append(f"{where} = {short(figure.value / size)}{unit}")
    if given:
        yield f"taken as given, from your files: {', '.join(given)}"


def unit_of(name: str, value: float) -> Unit:
    """The unit, with a blank before it, in which a figure of this name and size is best read, and its size; blank for a number."""
    units = next((units for ending, units in UNITS if re.search(ending, name)), ())
    unit, size = next(((unit, size) for unit, size in units if value >= size), units[-1] if units else ("", 1.0))
    return (f" {unit}" if unit else "", size)


def short(value: float) -> str:
    """Three digits, never in exponent form for what is as large as figures are: 0.0123, 12.3, 1,230."""
    return f"{float(f'{value:.3g}'):,.10g}"

"""How figures are written for people: three significant digits, a unit, and the true minus sign."""

from __future__ import annotations

import math
from collections.abc import Sequence

MINUS = "−"
NONE = "—"
SMALLEST_SHARE = 0.001
SI = (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def significant(value: float, digits: int = 3) -> str:
    """The number to `digits` significant digits, never in exponent form: 0.0123, 1.23, 12.3, 1,230."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value).replace("-", MINUS)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    if rounded and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        decimals -= 1  # 9.996 became 10.00, which has one digit too many
    return f"{rounded:,.{max(0, decimals)}f}".replace("-", MINUS)


def seconds(value: float, digits: int = 3) -> str:
    """A duration in the unit that keeps it readable: 12.3 s, 45.6 ms, 7.89 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= 0.9995 * size:
            return f"{significant(value / size, digits)} {unit}"
    return f"{significant(value / 1e-6, digits)} µs" if value else "0 s"


def interval(low: float, high: float) -> str:
    """A range of durations in the unit of its upper end, written once: 11.1–13.8 s."""
    unit, size = ("s", 1.0) if high >= 0.9995 else ("ms", 1e-3)
    return f"{significant(low / size)}–{significant(high / size)} {unit}"


def amount(value: float) -> str:
    """GiB without the unit, to a tenth where that is more than three digits are worth: 0.04, 7.3, 61.2, 1,230."""
    if value == 0:
        return "0"
    if abs(value) < 0.05:
        return "<0.05" if value > 0 else f">{MINUS}0.05"
    return f"{value:.1f}".replace("-", MINUS) if abs(value) < 100 else significant(value)


def gib(value: float) -> str:
    """Memory or traffic: 61.2 GiB."""
    return f"{amount(value)} GiB"


def percent(share: float) -> str:
    """A share of one: 43.2 %, 3.1 %, <0.1 %."""
    if 0 < share < SMALLEST_SHARE:
        return "<0.1 %"
    return f"{100 * share:.1f} %".replace("-", MINUS)


def signed(text: str) -> str:
    """The same figure with its sign in front, plus included."""
    return text if text.startswith((MINUS, "<", ">")) else f"+{text}"


def change(share: float) -> str:
    """By which share of one something is more or less: +3.1 %, −0.4 %, ±0 %."""
    return "±0 %" if abs(share) < 0.5 * SMALLEST_SHARE else f"{100 * share:+.1f} %".replace("-", MINUS)


def told_apart(noise: float) -> str:
    """How well predictions tell two layouts of one problem apart, as the beginning of a sentence."""
    return f"Predictions of two layouts of one problem are commonly off by {percent(noise)} against each other"


def times(ratio: float) -> str:
    """A factor: 2.1×, 14×."""
    return f"{significant(ratio, 2)}×"


def large(value: float) -> str:
    """A large number with its suffix: 671B, 10T, 1.8T."""
    suffix, size = next(((name, size) for name, size in SI if value >= 0.9995 * size), ("", 1.0))
    text = significant(value / size)
    return (text.rstrip("0").rstrip(".") if "." in text else text) + suffix


def count(number: int, noun: str) -> str:
    """A whole number with its noun: 1 layout, 71,076 layouts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Increasing whole numbers with their runs folded: 0, 3–5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)

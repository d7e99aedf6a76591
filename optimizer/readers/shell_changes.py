"""What a shell makes of a variable's value where it is put in: a beginning or an end cut off, a piece replaced or taken, case."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

LONGEST, MOST_STARS = 4000, 3
"""Characters of a value, and * of a pattern, that are matched."""
CUTS = ("##", "#", "%%", "%")
REPLACES = ("//", "/#", "/%", "/")
CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
CHANGES = (*CUTS, *REPLACES, *CASES, ":")
"""Operators, of those that begin alike the longer first; : takes a piece by place and length."""


def changed(values: Sequence[str], operator: str, operand: Sequence[str]) -> list[str] | None:
    """The words of a value with an operator done to each; None for what no shell does, or more than anybody means.

    `operand` is the pattern, of a replacement with what takes its place.
    """
    pattern = operand[0].replace("[^", "[!") if operand else ""
    if pattern.count("*") > MOST_STARS or any(len(value) > LONGEST for value in values):
        return None
    if operator in CUTS:
        return [_cut(value, operator, pattern) for value in values]
    if operator in REPLACES:
        return [_replaced(value, operator, pattern, operand[1] if len(operand) > 1 else "") for value in values]
    return None if pattern else [CASES[operator](value) for value in values]


def piece(values: Sequence[str], first: int, length: int | None, whole: bool) -> list[str]:
    """Characters of a text, or words of a `whole` array, from a place on; both count from the end where they are negative."""
    held: Sequence[str] = values if whole else " ".join(values)
    start = max(first + len(held), 0) if first < 0 else first
    end = len(held) if length is None else length + len(held) if length < 0 else start + length
    taken = held[start:end]
    return list(taken) if whole else [str(taken)]


def _cut(value: str, operator: str, pattern: str) -> str:
    """Without the shortest, or of a doubled operator the longest, beginning (#) or end (%) that matches."""
    places = range(len(value) + 1)
    ascending = (operator[0] == "#") == (len(operator) == 1)
    for at in places if ascending else reversed(places):
        matched, rest = (value[:at], value[at:]) if operator[0] == "#" else (value[at:], value[:at])
        if fnmatchcase(matched, pattern):
            return rest
    return value


def _replaced(value: str, operator: str, pattern: str, by: str) -> str:
    """With the first match replaced, every one (//), or one at the beginning (/#) or the end (/%)."""
    ends = {"/#": r"\A{}", "/%": r"{}\Z"}.get(operator, "{}")
    found = re.compile(ends.format(f"(?:{_expression(pattern)})"), re.DOTALL)
    return found.sub(lambda _: by, value, count=0 if operator == "//" else 1) if pattern else value


def _expression(pattern: str) -> str:
    """A shell's pattern as a regular expression."""
    pieces = re.findall(r"\[!?\]?[^\]]*\]|\\.|.", pattern, re.DOTALL)
    return "".join(map(_matching, pieces))


def _matching(piece: str) -> str:
    if piece in ("*", "?"):
        return {"*": ".*", "?": "."}[piece]
    if len(piece) > 1 and piece[0] == "[":
        inside = piece[1:-1]
        members = re.sub(r"([\\\[^])", r"\\\1", inside.removeprefix("!"))
        return f"[{'^' if inside[0] == '!' else ''}{members}]"
    return re.escape(piece[-1])

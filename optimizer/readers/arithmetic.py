"""Whole-number arithmetic as shells write it in `$((…))`: + − × ÷ %, brackets and names. Nothing is evaluated as code."""

from __future__ import annotations

import re
from collections.abc import Callable

TOKEN = re.compile(r"\s*(?:(\d{1,18})|([A-Za-z_]\w*)|(\*\*|[-+*/%()]))")
MOST_TOKENS = 200
LARGEST = 10**18


def arithmetic(text: str, value_of: Callable[[str], str | None]) -> int | None:
    """The value of an expression; None where it is not one, names what has no number, or leaves the range."""
    words: list[str] = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match or len(words) > MOST_TOKENS:
            return None
        words.append(match.group(1) or match.group(2) or match.group(3))
        at = match.end()
    try:
        value, rest = _sum(words, value_of)
    except (ValueError, ZeroDivisionError, IndexError, RecursionError):
        return None
    return value if not rest and abs(value) < LARGEST else None


Words = list[str]


def _sum(words: Words, value_of: Callable[[str], str | None]) -> tuple[int, Words]:
    value, words = _product(words, value_of)
    while words[:1] in (["+"], ["-"]):
        other, rest = _product(words[1:], value_of)
        value, words = (value + other if words[0] == "+" else value - other), rest
    return value, words


def _product(words: Words, value_of: Callable[[str], str | None]) -> tuple[int, Words]:
    value, words = _unit(words, value_of)
    while words[:1] in (["*"], ["/"], ["%"]):
        other, rest = _unit(words[1:], value_of)
        quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1) if words[0] != "*" else 0
        value = {"*": value * other, "/": quotient, "%": value - quotient * other}[words[0]]
        words = rest
        if abs(value) > LARGEST:
            raise ValueError("out of range")
    return value, words


def _unit(words: Words, value_of: Callable[[str], str | None]) -> tuple[int, Words]:
    head, rest = words[0], words[1:]
    if head == "(":
        value, rest = _sum(rest, value_of)
        if rest[:1] != [")"]:
            raise ValueError("a bracket is not closed")
        return value, rest[1:]
    if head in ("-", "+"):
        value, rest = _unit(rest, value_of)
        return (-value if head == "-" else value), rest
    if head.isdigit():
        return int(head), rest
    given = value_of(head)
    if given is None or not re.fullmatch(r"\d{1,18}", given.strip()):
        raise ValueError(f"{head} has no number")
    return int(given), rest

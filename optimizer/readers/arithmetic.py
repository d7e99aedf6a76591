"""Whole-number arithmetic as shells write it in `$((…))`: C's operators, brackets, ?: and names. Nothing is evaluated as code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

TOKEN = re.compile(r"\s*(?:(\d{1,18})|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>&^|?:!~]))")
MOST_TOKENS = 200
LARGEST = 10**18
MOST_BITS = 60

Words = list[str]
ValueOf = Callable[[str], str | None]


def arithmetic(text: str, value_of: ValueOf) -> int | None:
    """The value of an expression; None where it is not one, names what has no number, divides by zero or leaves the range."""
    try:
        return _evaluated(text, value_of)
    except (ValueError, ZeroDivisionError, IndexError, RecursionError):
        return None


def divides_by_zero(text: str, value_of: ValueOf) -> bool:
    """Whether an expression has no value for that reason."""
    try:
        _evaluated(text, value_of)
    except ZeroDivisionError:
        return True
    except (ValueError, IndexError, RecursionError):
        return False
    return False


def _evaluated(text: str, value_of: ValueOf) -> int:
    words: Words = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match or len(words) > MOST_TOKENS:
            raise ValueError("no expression")
        words.append(match.group(1) or match.group(2) or match.group(3))
        at = match.end()
    value, rest = _choice(words, value_of)
    if rest:
        raise ValueError(f"{rest[0]} is not expected")
    return value


def _divided(value: int, other: int) -> int:
    """The quotient towards zero, as C has it."""
    return abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)


def _shifted(value: int, bits: int) -> int:
    if not 0 <= bits <= MOST_BITS:
        raise ValueError("out of range")
    return value << bits


def _power(value: int, exponent: int) -> int:
    if not 0 <= exponent <= MOST_BITS:
        raise ValueError("out of range")
    return int(value**exponent)


OPERATORS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda one, other: int(bool(one or other))},
    {"&&": lambda one, other: int(bool(one and other))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt},
    {"<<": _shifted, ">>": lambda value, bits: value >> min(abs(bits), MOST_BITS)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divided, "%": lambda value, other: value - _divided(value, other) * other},
)
"""Operators of two sides, from those that bind least."""


def _choice(words: Words, value_of: ValueOf) -> tuple[int, Words]:
    value, words = _binary(words, value_of, 0)
    if words[:1] != ["?"]:
        return value, words
    met, words = _choice(words[1:], value_of)
    if words[:1] != [":"]:
        raise ValueError("a ? has no :")
    otherwise, words = _choice(words[1:], value_of)
    return (met if value else otherwise), words


def _binary(words: Words, value_of: ValueOf, level: int) -> tuple[int, Words]:
    if level == len(OPERATORS):
        return _raised(words, value_of)
    value, words = _binary(words, value_of, level + 1)
    while words and words[0] in OPERATORS[level]:
        other, rest = _binary(words[1:], value_of, level + 1)
        value, words = int(OPERATORS[level][words[0]](value, other)), rest
        if abs(value) >= LARGEST:
            raise ValueError("out of range")
    return value, words


def _raised(words: Words, value_of: ValueOf) -> tuple[int, Words]:
    value, words = _unit(words, value_of)
    if words[:1] != ["**"]:
        return value, words
    exponent, words = _raised(words[1:], value_of)
    return _power(value, exponent), words


def _unit(words: Words, value_of: ValueOf) -> tuple[int, Words]:
    head, rest = words[0], words[1:]
    if head == "(":
        value, rest = _choice(rest, value_of)
        if rest[:1] != [")"]:
            raise ValueError("a bracket is not closed")
        return value, rest[1:]
    if head in SIGNS:
        value, rest = _unit(rest, value_of)
        return SIGNS[head](value), rest
    if head.isdigit():
        return int(head), rest
    given = value_of(head)
    if given is None or not re.fullmatch(r"-?\d{1,18}", given.strip()):
        raise ValueError(f"{head} has no number")
    return int(given), rest


SIGNS: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": lambda value: int(not value),
}

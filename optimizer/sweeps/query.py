"""What --show asks of a store: conditions on the columns of its table, with commas between; nothing is ever evaluated.

    model=moe:*,devices>=1024,status=optimal,cluster=hgx-h100|gb200-nvl72

A comparison has a column, one of = != < <= > >=, and a value: a number for the columns that hold numbers, else text, in which *
stands for anything. Several values with | between mean any of them (after !=: none of them).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...search_spaces.documents import did_you_mean
from ...search_spaces.errors import InputError
from .grid import AXES
from .table import TEXT, Row

ORDERS: dict[str, Callable[[Any, Any], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
SAME, OTHER = "=", "!="
MOST_LISTED = 20


@dataclass(frozen=True)
class Condition:
    """One comparison; a row without the column meets none."""

    column: str
    sign: str
    values: tuple[str | float, ...]

    def met(self, row: Row) -> bool:
        value = row.get(self.column)
        if value is None:
            return False
        if self.sign in ORDERS:
            return ORDERS[self.sign](value, self.values[0])
        return any(_same(value, one) for one in self.values) == (self.sign == SAME)


def parse_query(text: str, columns: Sequence[str]) -> tuple[Condition, ...]:
    """The conditions of a query, none for an empty one. InputError names what is wrong and what would be right."""
    return tuple(_condition(part.strip(), columns) for part in text.split(",") if part.strip())


def select(rows: Sequence[tuple[str, Row]], conditions: Sequence[Condition]) -> list[tuple[str, Row]]:
    """The rows, with their keys, that meet every condition."""
    return [(key, row) for key, row in rows if all(condition.met(row) for condition in conditions)]


def check_values(conditions: Sequence[Condition], rows: Sequence[Row]) -> None:
    """InputError where no row has a value that a condition names of what is asked of a point; it names those that there are."""
    for condition in conditions:
        asked = condition.column in AXES or condition.column.startswith("option ")
        if not rows or not asked or condition.sign in ORDERS:
            continue
        stored = list(dict.fromkeys(row[condition.column] for row in rows if row.get(condition.column) is not None))
        for wanted in condition.values:
            if not any(_same(value, wanted) for value in stored):
                raise InputError(_nowhere(condition.column.removeprefix("option "), wanted, stored))


def _nowhere(name: str, wanted: str | float, stored: Sequence[Any]) -> str:
    word = wanted.strip() if isinstance(wanted, str) else f"{wanted:g}"
    listed = ", ".join(map(str, stored[:MOST_LISTED])) + f" and {len(stored) - MOST_LISTED:,} more" * (len(stored) > MOST_LISTED)
    near = did_you_mean(word, tuple(map(str, stored))) if isinstance(wanted, str) else ""
    said = f"--show: no point that is stored has {name} {word}{near or f'; there is {listed}'}"
    return f"{said}; commas stand between conditions" if re.search(r"[;<>=&]", word) else said


def _condition(text: str, columns: Sequence[str]) -> Condition:
    plain = text.replace("≤", "<=").replace("≥", ">=").replace("≠", "!=").replace("==", "=")
    found = re.fullmatch(r"([A-Za-z_ -]+?)\s*(<=|>=|!=|=|<|>)\s*(.+)", plain)
    if found is None:
        raise InputError(f"--show: {text!r} is not a condition such as devices>=1024 or model=moe:*")
    word, sign, given = found[1].strip(), found[2], found[3].strip()
    column = _column(word, columns)
    if sign in ORDERS and _is_text(column):
        raise InputError(f"--show: {text!r} orders {column}, which is text; use = or !=")
    if sign in ORDERS and "|" in given:
        raise InputError(f"--show: {text!r} gives {sign} several values; give one")
    values = tuple(given.split("|")) if _is_text(column) else tuple(_number(value, text) for value in given.split("|"))
    return Condition(column, sign, values)


def _column(word: str, columns: Sequence[str]) -> str:
    name = word.lower().replace("-", "_")
    for known in (name, f"option {name}", name.replace("option_", "option ")):
        if known in columns:
            return known
    listed = did_you_mean(name, columns) or f"; there is {', '.join(columns)}"
    raise InputError(f"--show: {word!r} is not a column{listed}")


def _is_text(column: str) -> bool:
    return column in TEXT or column.startswith("option ")


def _number(value: str, whole: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise InputError(f"--show: {value.strip()!r} in {whole!r} is not a number") from error


def _same(value: Any, wanted: str | float) -> bool:
    return fnmatchcase(str(value), wanted.strip()) if isinstance(wanted, str) else bool(value == wanted)

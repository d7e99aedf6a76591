"""Expressions over named integer columns, their values, and how columns are called in sentences.

An expression is a column name, a whole number, a product of those, a whole quotient or its remainder; all are at least 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

import numpy as np
import numpy.typing as npt

Column = int | npt.NDArray[np.int64]
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Product:
    """Product of columns and whole numbers."""

    factors: tuple[str | int, ...]


@dataclass(frozen=True)
class Quotient:
    """How many whole times the denominator goes into the numerator, at least 1."""

    numerator: Expression
    denominator: Expression


@dataclass(frozen=True)
class Remainder:
    """What is left of a value after whole moduli; the modulus is at least 1."""

    value: Expression
    modulus: Expression


Expression = str | int | Product | Quotient | Remainder


def product(*factors: str | int) -> Product:
    return Product(factors)


def evaluate(expression: Expression, columns: Columns) -> Any:
    """Value of an expression: an int where all its columns are ints, else an array (n,)."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return columns[expression]
    if isinstance(expression, Product):
        return prod(evaluate(factor, columns) for factor in expression.factors)
    if isinstance(expression, Remainder):
        return evaluate(expression.value, columns) % evaluate(expression.modulus, columns)
    quotient = evaluate(expression.numerator, columns) // evaluate(expression.denominator, columns)
    return max(1, quotient) if isinstance(quotient, int) else np.maximum(1, quotient)


def names_in(expression: Expression) -> frozenset[str]:
    """Columns that an expression reads."""
    if isinstance(expression, str):
        return frozenset((expression,))
    if isinstance(expression, Product):
        return frozenset(factor for factor in expression.factors if isinstance(factor, str))
    if isinstance(expression, Quotient):
        return names_in(expression.numerator) | names_in(expression.denominator)
    if isinstance(expression, Remainder):
        return names_in(expression.value) | names_in(expression.modulus)
    return frozenset()


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a positive number, in ascending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(dict.fromkeys([*low, *(number // d for d in reversed(low))]))


def common_factor(numbers: Iterable[int]) -> int:
    """Greatest common divisor; 0, which everything divides, where there are none."""
    return gcd(*numbers)


@dataclass(frozen=True)
class Words:
    """How columns are called: `phrases` for a problem's constants ("the {} attention heads"), `codes` for coded columns,
    `settings` for a constant as the circumstance of a rule, by whether it is positive ("in a dense model"), `columns` for those
    that users know by another name."""

    phrases: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, Callable[[int], str]] = field(default_factory=dict)
    settings: Mapping[tuple[str, bool], str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)

    def constant(self, names: Iterable[str]) -> bool:
        return all(name in self.phrases for name in names)

    def value(self, name: str, number: int) -> str:
        return self.codes[name](number) if name in self.codes else str(number)

    def term(self, expression: Expression, values: Mapping[str, int]) -> str:
        """`tp = 16`, `the 24 attention heads`, `tp·cp = 8`; just the name where the value is not known."""
        if isinstance(expression, int):
            return str(expression)
        if isinstance(expression, str) and expression in self.phrases and expression in values:
            return self.phrases[expression].format(self.value(expression, values[expression]))
        name = self.name(expression)
        if not all(column in values for column in names_in(expression)):
            return name
        number = int(evaluate(expression, values))
        return f"{name} = {self.value(expression, number) if isinstance(expression, str) else number}"

    def name(self, expression: Expression) -> str:
        if isinstance(expression, Product):
            return "·".join(self.name(factor) for factor in expression.factors)
        if isinstance(expression, Quotient):
            return f"⌊{self.name(expression.numerator)} / {self.name(expression.denominator)}⌋"
        if isinstance(expression, Remainder):
            return f"{self.name(expression.value)} mod {self.name(expression.modulus)}"
        return self.columns.get(expression, expression) if isinstance(expression, str) else str(expression)

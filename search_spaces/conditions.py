"""Conditions over named integer columns: the primitives that every legality rule is built from.

A condition has three readings, which the tests hold to each other: `mask` (numpy, over whole columns), `literal` (a CP-SAT Boolean
equivalent to it) and words (`requirement` in general, `failure` for one layout with both clashing values and what would work).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from .expressions import Columns, Expression, Product, Words, divisors, evaluate, names_in

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from .encoding import Encoder

Truth = bool | npt.NDArray[np.bool_]
Operator = Literal["<=", "<", ">=", ">", "==", "!="]
MANY = 16
"""Values beyond which a sentence lists the first two and how many there are."""


@dataclass(frozen=True)
class Failure:
    """Why a condition does not hold: `clause` names the clashing values, `values` of the expression `of` would make it hold.

    `named`: what `of` is called where the clause has another number in that place.
    """

    clause: str
    of: Expression | None = None
    values: tuple[int, ...] = ()
    named: str = ""

    @property
    def remedy(self) -> str:
        """`8 or 12 would`; nothing where no value is known that would do."""
        listed = " or ".join(map(str, self.values))
        return (f"{self.named} = {listed} would do" if self.named else f"{listed} would") if listed else ""

    def __str__(self) -> str:
        return f"{self.clause}; {self.remedy}" if self.remedy else self.clause


class Condition(Protocol):
    """What every primitive can do."""

    def names(self) -> frozenset[str]:
        """Columns it reads."""

    def mask(self, columns: Columns) -> Truth:
        """Where it holds: (n,) over columns, or one bool where all columns are ints."""

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        """The CP-SAT Boolean equivalent to it."""

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        """What it asks for, in general; `values` are the problem's constants."""

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        """What makes it hold for these values, as the circumstance of a rule."""

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        """Why it does not hold for these values."""


@dataclass(frozen=True)
class Divides:
    """a divides b. 0 divides 0 alone."""

    a: Expression
    b: Expression

    def names(self) -> frozenset[str]:
        return names_in(self.a) | names_in(self.b)

    def mask(self, columns: Columns) -> Truth:
        a, b = evaluate(self.a, columns), evaluate(self.b, columns)
        if isinstance(a, int):
            remainder = b % a if a else b
            return remainder == 0 if isinstance(remainder, int) else np.asarray(remainder == 0)
        return np.asarray(b % a == 0) if a.min(initial=1) > 0 else np.where(a == 0, b == 0, b % np.maximum(a, 1) == 0)

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        a, b = encoder.value(self.a), encoder.value(self.b)
        if isinstance(b, int):
            return b == 0 or encoder.within(a, encoder.among(divisors(b)))
        if isinstance(a, int) and not a:
            return encoder.within(b, encoder.among([0]))
        return encoder.within(encoder.remainder(b, a), encoder.among([0]))

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        return f"{words.term(self.a, values)} divides {words.term(self.b, values)}"

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return _with(words, values, self.a, self.b)

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        a, b = int(evaluate(self.a, values)), int(evaluate(self.b, values))
        if words.constant(names_in(self.a)):
            clause = f"{words.term(self.b, values)} is not a multiple of {words.term(self.a, values)}"
            return _remedied(clause, self.b, words, (b // a * a, b // a * a + a) if a else ())
        clause = f"{words.term(self.a, values)} does not divide {words.term(self.b, values)}"
        if isinstance(self.b, str) and self.b not in words.phrases:
            return _remedied(clause, self.b, words, (b // a * a, b // a * a + a), named=True)
        return self._divided(clause, words, values, a, b)

    def _divided(self, clause: str, words: Words, values: Mapping[str, int], a: int, b: int) -> Failure:
        """With the nearest values that would divide b, of the one column of a product that can vary, or of the whole."""
        free = [name for name in sorted(names_in(self.a)) if name not in words.phrases]
        if isinstance(self.a, Product) and len(free) == 1 and self.a.factors.count(free[0]) == 1:
            rest = a // values[free[0]]
            if b % rest:
                return Failure(clause)
            return _remedied(clause, free[0], words, nearest_two(values[free[0]], divisors(b // rest)), named=True)
        return _remedied(clause, self.a, words, nearest_two(a, divisors(b)))


@dataclass(frozen=True)
class Compare:
    """a and b stand in the given order."""

    a: Expression
    operator: Operator
    b: Expression

    def names(self) -> frozenset[str]:
        return names_in(self.a) | names_in(self.b)

    def mask(self, columns: Columns) -> Truth:
        truth = _COMPARE[self.operator](evaluate(self.a, columns), evaluate(self.b, columns))
        return truth if isinstance(truth, bool) else np.asarray(truth)

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        a, b = encoder.value(self.a), encoder.value(self.b)
        if isinstance(b, int):
            return encoder.within(a, encoder.ordered(self.operator, b))
        if isinstance(a, int):
            return encoder.within(b, encoder.ordered(_MIRRORED[self.operator], a))
        literal = encoder.model.new_bool_var("")
        encoder.model.add(_COMPARE[self.operator](a, b)).only_enforce_if(literal)
        encoder.model.add(_COMPARE[_OPPOSITE[self.operator]](a, b)).only_enforce_if(~literal)
        return literal

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        return f"{words.term(self.a, values)} {_SIGN[self.operator]} {self._right(words, values)}"

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return _with(words, values, self.a, self.b)

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        return Failure(f"{words.term(self.a, values)} {_BROKEN[self.operator]} {self._right(words, values)}")

    def _right(self, words: Words, values: Mapping[str, int]) -> str:
        if isinstance(self.b, int) and isinstance(self.a, str):
            return words.value(self.a, self.b)
        return words.term(self.b, values)


@dataclass(frozen=True)
class OneOf:
    """a has one of the values."""

    a: Expression
    values: tuple[int, ...]

    def names(self) -> frozenset[str]:
        return names_in(self.a)

    def mask(self, columns: Columns) -> Truth:
        a = evaluate(self.a, columns)
        if isinstance(a, int):
            return a in self.values
        if len(self.values) > MANY:
            return np.isin(a, self.values)
        return np.asarray(np.logical_or.reduce([a == value for value in self.values]))

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        return encoder.within(encoder.value(self.a), encoder.among(sorted(self.values)))

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        verb = "=" if len(self.values) == 1 else "is one of"
        return f"{words.term(self.a, {})} {verb} {self._listed(words)}"

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return _with(words, values, self.a)

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        verb = "is not" if len(self.values) == 1 else "is not one of"
        return Failure(f"{words.term(self.a, values)} {verb} {self._listed(words)}")

    def _listed(self, words: Words) -> str:
        shown = self.values if len(self.values) <= MANY else self.values[:2]
        said = [words.value(self.a, v) if isinstance(self.a, str) else str(v) for v in shown]
        return ", ".join([*said, *([f"… ({len(self.values)} in all)"] if len(shown) < len(self.values) else [])])


@dataclass(frozen=True)
class Lacks:
    """None of the given bits is set in a column that is a bit mask."""

    a: str
    bits: int

    def names(self) -> frozenset[str]:
        return frozenset((self.a,))

    def mask(self, columns: Columns) -> Truth:
        masked = columns[self.a] & self.bits
        return masked == 0 if isinstance(masked, int) else np.asarray(masked == 0)

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        a = encoder.value(self.a)
        highest = a if isinstance(a, int) else encoder.domain(a).max()
        return encoder.within(a, encoder.among(v for v in range(highest + 1) if not v & self.bits))

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        return f"{self.a} has no {words.value(self.a, self.bits)}"

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return _with(words, values, self.a)

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        return Failure(f"{words.term(self.a, values)} includes {words.value(self.a, values[self.a] & self.bits)}")


@dataclass(frozen=True)
class AnyOf:
    """At least one of the conditions holds."""

    conditions: tuple[Condition, ...]

    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(condition.names() for condition in self.conditions))

    def mask(self, columns: Columns) -> Truth:
        return _joined(np.logical_or, [condition.mask(columns) for condition in self.conditions])

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        literals = [encoder.literal(condition) for condition in self.conditions]
        if any(literal is True for literal in literals):
            return True
        return encoder.disjunction([literal for literal in literals if literal is not False])

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        open_ones = [c for c in self.conditions if known(c, values) is not False] or self.conditions
        return " or ".join(c.requirement(words, values) for c in open_ones)

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return next(c.holding(words, values) for c in self.conditions if c.mask(values))

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        constants = {name: value for name, value in values.items() if name in words.phrases}
        open_ones = [c for c in self.conditions if known(c, constants) is not False] or self.conditions
        failures = [c.failure(words, values) for c in open_ones]
        mended = next((failure for failure in failures if failure.values), failures[0])
        *others, last = (failure.clause for failure in failures)
        return replace(mended, clause=f"{', '.join(others)} and {last}" if others else last)


@dataclass(frozen=True)
class AllOf:
    """All the conditions hold."""

    conditions: tuple[Condition, ...]

    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(condition.names() for condition in self.conditions))

    def mask(self, columns: Columns) -> Truth:
        return _joined(np.logical_and, [condition.mask(columns) for condition in self.conditions])

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        return encoder.negated(encoder.literal(AnyOf(tuple(negation(condition) for condition in self.conditions))))

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        open_ones = [c for c in self.conditions if known(c, values) is not True] or self.conditions
        said = [(c.requirement(words, values), isinstance(c, AnyOf) and len(open_ones) > 1) for c in open_ones]
        return " and ".join(f"({text})" if either else text for text, either in said)

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        parts = [part for part in dict.fromkeys(c.holding(words, values) for c in self.conditions) if part]
        columns = " and ".join(part.removeprefix(_WITH) for part in parts if part.startswith(_WITH))
        return " ".join([*(part for part in parts if not part.startswith(_WITH)), *([_WITH + columns] if columns else [])])

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        return next(c.failure(words, values) for c in self.conditions if not c.mask(values))


@dataclass(frozen=True)
class Not:
    """The condition does not hold."""

    condition: Condition

    def names(self) -> frozenset[str]:
        return self.condition.names()

    def mask(self, columns: Columns) -> Truth:
        truth = self.condition.mask(columns)
        return not truth if isinstance(truth, bool) else np.logical_not(truth)

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        return encoder.negated(encoder.literal(self.condition))

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        return f"not ({self.condition.requirement(words, values)})"

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return self.condition.holding(words, values)

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        return Failure(f"{self.condition.holding(words, values).removeprefix(_WITH)} is not allowed")


@dataclass(frozen=True)
class Implies:
    """Where the premise holds, the conclusion does."""

    premise: Condition
    conclusion: Condition

    def names(self) -> frozenset[str]:
        return self.premise.names() | self.conclusion.names()

    def mask(self, columns: Columns) -> Truth:
        premise = self.premise.mask(columns)
        if premise is False:
            return True
        return _joined(np.logical_or, [Not(self.premise).mask(columns), self.conclusion.mask(columns)])

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        idle = negation(self.premise)
        return encoder.literal(idle) is True or encoder.literal(AnyOf((idle, self.conclusion)))

    def requirement(self, words: Words, values: Mapping[str, int]) -> str:
        conclusion = self.conclusion.requirement(words, values)
        if known(self.premise, values) is True:
            return ", ".join(part for part in (self.premise.holding(words, values), conclusion) if part)
        return f"if {self.premise.requirement(words, values)}, {conclusion}"

    def holding(self, words: Words, values: Mapping[str, int]) -> str:
        return (self.conclusion if self.conclusion.mask(values) else self.premise).holding(words, values)

    def failure(self, words: Words, values: Mapping[str, int]) -> Failure:
        failure, setting = self.conclusion.failure(words, values), self.premise.holding(words, values)
        return replace(failure, clause=f"{setting}, {failure.clause}") if setting else failure


def divides(a: Expression, b: Expression) -> Divides:
    return Divides(a, b)


def at_most(a: Expression, b: Expression) -> Compare:
    return Compare(a, "<=", b)


def at_least(a: Expression, b: Expression) -> Compare:
    return Compare(a, ">=", b)


def more_than(a: Expression, b: Expression) -> Compare:
    return Compare(a, ">", b)


def equal(a: Expression, b: Expression) -> Compare:
    return Compare(a, "==", b)


def one_of(a: Expression, values: Sequence[int]) -> OneOf:
    return OneOf(a, tuple(values))


def lacks(a: str, bits: int) -> Lacks:
    """None of these bits is set in column `a`, a bit mask."""
    return Lacks(a, bits)


def any_of(*conditions: Condition) -> AnyOf:
    return AnyOf(conditions)


def all_of(*conditions: Condition) -> AllOf:
    return AllOf(conditions)


def implies(premise: Condition, conclusion: Condition) -> Implies:
    return Implies(premise, conclusion)


def negation(condition: Condition) -> Condition:
    """The opposite; of an opposite the condition itself."""
    return condition.condition if isinstance(condition, Not) else Not(condition)


def known(condition: Condition, constants: Mapping[str, int]) -> bool | None:
    """Whether the constants alone decide a condition: True, False, or None where its other columns matter."""
    if condition.names() <= constants.keys():
        return bool(condition.mask(constants))
    if isinstance(condition, Divides) and names_in(condition.b) <= constants.keys() and evaluate(condition.b, constants) == 0:
        return True
    if isinstance(condition, Not):
        inner = known(condition.condition, constants)
        return None if inner is None else not inner
    if isinstance(condition, Implies):
        return known(any_of(negation(condition.premise), condition.conclusion), constants)
    if isinstance(condition, AnyOf | AllOf):
        deciding = isinstance(condition, AnyOf)
        parts = [known(part, constants) for part in condition.conditions]
        if deciding in parts:
            return deciding
        return None if None in parts else not deciding
    return None


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<=": lambda a, b: a <= b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
_WITH = "with "
_OPPOSITE: dict[str, Operator] = {"<=": ">", "<": ">=", ">=": "<", ">": "<=", "==": "!=", "!=": "=="}
_MIRRORED: dict[str, Operator] = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "==", "!=": "!="}
_SIGN = {"<=": "≤", "<": "<", ">=": "≥", ">": ">", "==": "=", "!=": "≠"}
_BROKEN = {
    "<=": "is more than",
    "<": "is not less than",
    ">=": "is less than",
    ">": "is not more than",
    "==": "is not",
    "!=": "must not be",
}


def _joined(join: np.ufunc, truths: Sequence[Truth]) -> Truth:
    joined: Any = truths[0]
    for truth in truths[1:]:
        joined = join(joined, truth)
    return bool(joined) if all(isinstance(truth, bool) for truth in truths) else np.asarray(joined)


def _with(words: Words, values: Mapping[str, int], *expressions: Expression) -> str:
    """The circumstances of a rule: `with cp = 4`; a constant as its setting ("in a dense model")."""
    names = frozenset[str]().union(*(names_in(expression) for expression in expressions))
    if words.constant(names):
        settings = [words.settings.get((name, values[name] > 0), "") for name in sorted(names)]
        return " ".join(setting for setting in settings if setting)
    terms = [words.term(e, values) for e in expressions if not words.constant(names_in(e))]
    return _WITH + " and ".join(terms)


def nearest_two(value: int, legal: Iterable[int]) -> tuple[int, ...]:
    """The two legal values closest to a value, the smaller one where two are as close."""
    return tuple(sorted(sorted(legal, key=lambda other: (abs(other - value), other))[:2]))


def _remedied(clause: str, of: Expression, words: Words, values: Sequence[int], named: bool = False) -> Failure:
    """A failure with the values that would do; without them for the problem's own figures, which a layout cannot change."""
    if words.constant(names_in(of)):
        return Failure(clause)
    return Failure(clause, of, tuple(value for value in values if value > 0), words.name(of) if named else "")

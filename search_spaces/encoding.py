"""A CP-SAT model under construction: variables for columns, products and quotients, and the literals of conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ortools.sat.python import cp_model

from .expressions import Expression, Product, Quotient, Remainder

LARGEST = 1 << 50
"""Values of products stop here, far above any product that a legal layout has, to stay inside 64 bits."""
LISTED_VALUES = 20_000
"""Domains of products are listed value by value up to this many pairs, and kept as a range beyond."""
ZERO = cp_model.Domain(0, 0)


class Encodable(Protocol):
    """What an encoder asks of a condition."""

    def literal(self, encoder: Encoder) -> cp_model.LiteralT:
        """The Boolean equivalent to it."""


class Encoder:
    """A CP-SAT model under construction: a variable per column, one shared variable per product, quotient and condition.

    Everything but the columns is a function of them, so a model has one solution per assignment of its columns.
    """

    def __init__(self, model: cp_model.CpModel, constants: Mapping[str, int], derived: Mapping[str, Expression]) -> None:
        self.model = model
        self.constants = constants
        self.derived = derived
        self.columns: dict[str, cp_model.IntVar] = {}
        self._domains: dict[int, cp_model.Domain] = {}
        self._values: dict[object, cp_model.IntVar | int] = {}
        self._literals: dict[Encodable, cp_model.LiteralT] = {}

    def column(self, name: str, values: Iterable[int]) -> cp_model.IntVar:
        """A new column that may take any of the values."""
        self.columns[name] = self._variable(cp_model.Domain.from_values(sorted(set(values))), name)
        return self.columns[name]

    def value(self, expression: Expression) -> cp_model.IntVar | int:
        """The variable that equals an expression, or its number where constants decide it. KeyError: an unknown column."""
        if isinstance(expression, int):
            return expression
        if expression not in self._values:
            self._values[expression] = self._build(expression)
        return self._values[expression]

    def literal(self, condition: Encodable) -> cp_model.LiteralT:
        """The Boolean that is true exactly where the condition holds."""
        if condition not in self._literals:
            self._literals[condition] = condition.literal(self)
        return self._literals[condition]

    def domain(self, variable: cp_model.IntVar) -> cp_model.Domain:
        return self._domains[variable.index]

    def within(self, value: cp_model.IntVar | int, allowed: cp_model.Domain) -> cp_model.LiteralT:
        """The Boolean that is true exactly where the value lies in the domain."""
        if isinstance(value, int):
            return bool(allowed.contains(value))
        inside = self.domain(value).intersection_with(allowed)
        outside = self.domain(value).intersection_with(allowed.complement())
        if inside.is_empty() or outside.is_empty():
            return bool(outside.is_empty())
        literal = self.model.new_bool_var("")
        self.model.add_linear_expression_in_domain(value, inside).only_enforce_if(literal)
        self.model.add_linear_expression_in_domain(value, outside).only_enforce_if(~literal)
        return literal

    @staticmethod
    def among(values: Iterable[int]) -> cp_model.Domain:
        """These numbers and no others."""
        return cp_model.Domain.from_values(list(values))

    @staticmethod
    def ordered(operator: str, b: int) -> cp_model.Domain:
        """Numbers that stand in the given order to b."""
        if operator in ("==", "!="):
            point = cp_model.Domain(b, b)
            return point if operator == "==" else point.complement()
        if operator in ("<=", "<"):
            return cp_model.Domain(-LARGEST, b if operator == "<=" else b - 1)
        return cp_model.Domain(b if operator == ">=" else b + 1, max(LARGEST, b + 1))

    @staticmethod
    def negated(literal: cp_model.LiteralT) -> cp_model.LiteralT:
        return not literal if isinstance(literal, bool) else ~literal

    def disjunction(self, literals: Sequence[cp_model.LiteralT]) -> cp_model.LiteralT:
        """Whether any of them holds."""
        if len(literals) < 2:
            return literals[0] if literals else False
        either = self.model.new_bool_var("")
        self.model.add_bool_or(literals).only_enforce_if(either)
        for literal in literals:
            self.model.add_implication(literal, either)
        return either

    def remainder(self, value: cp_model.IntVar, modulus: cp_model.IntVar | int) -> cp_model.IntVar:
        """What is left of a value after whole moduli; all of it where the modulus is 0."""
        largest = self._range(modulus).max()
        if isinstance(modulus, int) or self.domain(modulus).min() > 0:
            variable = self._variable(cp_model.Domain(0, largest - 1))
            self.model.add_modulo_equality(variable, value, modulus)
            return variable
        # modulus 0 stands for one that is larger than every value
        beyond = self._variable(cp_model.Domain(1, max(largest, self.domain(value).max() + 1)))
        zero = self.within(modulus, ZERO)
        self.model.add(beyond == modulus).only_enforce_if(self.negated(zero))
        self.model.add(beyond == self.domain(value).max() + 1).only_enforce_if(zero)
        return self.remainder(value, beyond)

    def _variable(self, domain: cp_model.Domain, name: str = "") -> cp_model.IntVar:
        variable = self.model.new_int_var_from_domain(domain, name)
        self._domains[variable.index] = domain
        return variable

    def _build(self, expression: str | Product | Quotient | Remainder) -> cp_model.IntVar | int:
        if isinstance(expression, str):
            if expression in self.constants:
                return self.constants[expression]
            return self.columns[expression] if expression in self.columns else self.value(self.derived[expression])
        if isinstance(expression, Quotient):
            return self._quotient(self.value(expression.numerator), self.value(expression.denominator))
        if isinstance(expression, Remainder):
            value, modulus = self.value(expression.value), self.value(expression.modulus)
            if isinstance(value, int):
                return value % modulus if isinstance(modulus, int) else self.remainder(self._variable(self._range(value)), modulus)
            return self.remainder(value, modulus)
        total: cp_model.IntVar | int = 1
        for factor in expression.factors:
            total = self._times(total, self.value(factor))
        return total

    def _times(self, a: cp_model.IntVar | int, b: cp_model.IntVar | int) -> cp_model.IntVar | int:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if isinstance(a, int) and a == 1:
            return b
        key = ("times", *(x if isinstance(x, int) else x.name or ("variable", x.index) for x in (a, b)))
        if key not in self._values:
            variable = self._variable(_products(self._range(a), self._range(b)))
            self.model.add_multiplication_equality(variable, [a, b])
            self._values[key] = variable
        return self._values[key]

    def _quotient(self, a: cp_model.IntVar | int, b: cp_model.IntVar | int) -> cp_model.IntVar | int:
        if isinstance(a, int) and isinstance(b, int):
            return max(1, a // b)
        largest = self._range(a).max() // self._range(b).min()
        floor, whole = self._variable(cp_model.Domain(0, largest)), self._variable(cp_model.Domain(1, max(1, largest)))
        self.model.add_division_equality(floor, a, b)
        self.model.add_max_equality(whole, [floor, 1])
        return whole

    def _range(self, value: cp_model.IntVar | int) -> cp_model.Domain:
        return cp_model.Domain(value, value) if isinstance(value, int) else self.domain(value)


def _products(a: cp_model.Domain, b: cp_model.Domain) -> cp_model.Domain:
    if a.size() * b.size() > LISTED_VALUES:
        return cp_model.Domain(min(a.min() * b.min(), LARGEST), min(a.max() * b.max(), LARGEST))
    values = {x * y for x in _listed(a) for y in _listed(b)}
    return cp_model.Domain.from_values([value for value in values if value <= LARGEST])


def _listed(domain: cp_model.Domain) -> list[int]:
    bounds = domain.flattened_intervals()
    return [v for low, high in zip(bounds[::2], bounds[1::2], strict=True) for v in range(low, high + 1)]

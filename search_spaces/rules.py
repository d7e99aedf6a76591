"""The rules that bind a problem, and what they say of its layouts: masks over columns and sentences about one layout."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from .conditions import known
from .errors import InputError
from .expressions import Column, Words
from .layout import Bools, Layout, LayoutTable, Problem
from .limits import stack_rules, user_rules
from .quantities import columns, constants, words_for
from .rulebook import RULES, Frameworks, Rule, Scope

__all__ = [
    "RULES",
    "Frameworks",
    "Rule",
    "Violation",
    "columns",
    "constants",
    "legal_mask",
    "rules_for",
    "rules_over",
    "violations",
]


@dataclass(frozen=True)
class Violation:
    """A rule that a layout breaks, in a sentence with the values that clash."""

    rule: str
    sentence: str
    source: str
    reason: str
    scope: str


def rules_for(problem: Problem) -> tuple[Rule, ...]:
    """The rules that bind this problem: its framework's, its stack's and its user's included, those that cannot fail left out.

    InputError if a limit of the workload names what does not exist.
    """
    figures = constants(problem)
    bound = [rule for rule in RULES if not isinstance(rule.scope, Frameworks) or rule.scope.bind(problem.stack)]
    rules = (*bound, *stack_rules(problem.stack), *user_rules(problem))
    return tuple(rule for rule in rules if known(rule.condition, figures) is not True)


def rules_over(rules: Iterable[Rule], names: Container[str]) -> tuple[Rule, ...]:
    """The rules that can be judged when only these columns (constants among them) are known."""
    return tuple(rule for rule in rules if all(name in names for name in rule.names))


def legal_mask(problem: Problem, table: LayoutTable | Mapping[str, Column], rules: Iterable[Rule] | None = None) -> Bools:
    """Which rows break no rule, (n,). Rules that read a column which is not there (peak_bytes, say) are left for later."""
    given = columns(problem, table)
    size = np.broadcast_shapes(*(np.shape(column) for column in given.values()))
    mask = np.ones(size, dtype=bool)
    for rule in rules_over(rules_for(problem) if rules is None else rules, given):
        mask &= rule.condition.mask(given)
    return mask


def violations(problem: Problem, layout: Layout, peak_bytes: float | None = None) -> list[Violation]:
    """Every rule that a layout breaks; memory is judged where its peak is given. InputError if its stages do not follow on."""
    try:
        table = LayoutTable.from_layouts([layout])
    except ValueError as error:
        raise InputError(f"layout: {error}") from error
    given = columns(problem, table, peak_bytes)
    values = {name: int(np.ravel(column)[0]) for name, column in given.items()}
    words = words_for(problem)
    broken = [rule for rule in rules_over(rules_for(problem), values) if not rule.condition.mask(values)]
    return [Violation(rule.id, _sentence(rule, words, values), rule.source, rule.reason, scope_name(rule.scope)) for rule in broken]


def _sentence(rule: Rule, words: Words, values: Mapping[str, int]) -> str:
    failure = rule.condition.failure(words, values)
    return f"{failure.clause}: {rule.reason}." if rule.scope == "user" else f"{failure}."


def scope_name(scope: Scope) -> str:
    """`arithmetic`, `megatron-lm, megatron-bridge <0.16`, …"""
    return scope if isinstance(scope, str) else " ".join(part for part in (", ".join(scope.names), scope.versions) if part)

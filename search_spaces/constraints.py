"""The rules as a CP-SAT model: one integer variable per column, and every rule as a constraint that can be switched off.

CP-SAT decides and proves here; it does not list. `optimizer` solves what this module builds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from .conditions import AllOf, AnyOf, Compare, Condition, Implies, Not, OneOf
from .encoding import Encoder
from .expressions import Expression, divisors, evaluate, names_in
from .layout import (
    ALL_LAYERS,
    CP_TYPES,
    DEGREES,
    FULL_UNIFORM,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SHARDINGS,
    Floats,
    Ints,
    LayoutTable,
    Problem,
)
from .quantities import DERIVED, EVEN, FREE, PER_MILLE, columns, constants, whole_mib
from .rulebook import Rule

SMALL_DEGREES = 16
"""Degrees up to here are candidates whether or not anything divides by them, so that a rule has something to forbid."""


@dataclass(frozen=True)
class PeakTable:
    """Memory as a function of some columns: `rows` holds the values of `over` and then the peak in bytes, whole MiB, (n, k+1)."""

    over: tuple[str, ...]
    rows: Ints

    @classmethod
    def least(cls, problem: Problem, table: LayoutTable, peak_bytes: Floats, over: tuple[str, ...]) -> PeakTable:
        """The least peak of each distinct combination of `over` among the rows of a table; `peak_bytes` (n,)."""
        given = columns(problem, table)
        keys = np.stack([np.broadcast_to(np.asarray(given[name]), len(table)) for name in over], axis=1)
        combos, place = np.unique(keys, axis=0, return_inverse=True)
        least = np.full(len(combos), np.iinfo(np.int64).max)
        np.minimum.at(least, place.ravel(), whole_mib(peak_bytes))
        return cls(over, np.column_stack([combos, least]))


@dataclass(frozen=True)
class RuleModel:
    """A CP-SAT model of some rules: `columns` are its variables, `guards` the literals that switch each rule on (by rule id)."""

    model: cp_model.CpModel
    columns: dict[str, cp_model.IntVar]
    guards: dict[str, cp_model.IntVar]
    encoder: Encoder

    def value(self, expression: Expression) -> cp_model.IntVar | int:
        """The variable of an expression over the columns, to optimise or to read."""
        return self.encoder.value(expression)


def build_model(
    problem: Problem,
    rules: Iterable[Rule],
    domains: Mapping[str, Iterable[int]],
    peaks: PeakTable | None = None,
    guarded: bool = False,
) -> RuleModel:
    """The model of the columns in `domains` under the rules.

    Rules hold outright, or with `guarded` wherever their guard is true. The memory rule needs `peaks`; combinations that the table
    does not list do not fit. KeyError: a rule reads a column without a domain (`rules_over` picks those that do not).
    """
    model = cp_model.CpModel()
    encoder = Encoder(model, constants(problem), DERIVED)
    for name, values in domains.items():
        encoder.column(name, values)
    if peaks is not None:
        encoder.column("peak_bytes", (int(peak) for peak in peaks.rows[:, -1]))
    guards: dict[str, cp_model.IntVar] = {}
    for rule in rules:
        guard: cp_model.IntVar | None = model.new_bool_var(rule.id) if guarded else None
        _require(model, encoder.literal(rule.condition), guard)
        if rule.scope == "memory" and peaks is not None:
            _tabulate(model, encoder, peaks, guard)
        if guard is not None:
            guards[rule.id] = guard
    return RuleModel(model, dict(encoder.columns), guards, encoder)


def candidate_domains(problem: Problem, rules: Iterable[Rule]) -> dict[str, tuple[int, ...]]:
    """Values of every column that a legal layout can have, with small degrees and every number that a limit names, legal or not.

    Wide enough that a problem without a layout in these domains has none: degrees divide what the arithmetic rules say they must.
    """
    c = constants(problem)
    devices = problem.devices
    small = range(1, min(devices, SMALL_DEGREES) + 1)
    batch = divisors(c["global_batch"])
    named = _named_values(rule.condition for rule in rules if rule.scope == "user")

    def degrees(*numbers: int) -> set[int]:
        return {*small, *(d for number in numbers if number for d in divisors(number) if d <= devices)}

    depths = (0, 1, ALL_LAYERS)
    found: dict[str, Iterable[int]] = {
        "tp": degrees(c["heads"], c["linear_heads"], c["mlp_width"] if not (c["heads"] or c["linear_heads"]) else 0),
        "cp": degrees(c["seq_len"]),
        "pp": range(1, min(devices, c["blocks"] + 1) + 1),
        "dp": degrees(c["global_batch"]),
        "ep": degrees(c["experts"]),
        "etp": degrees(c["expert_width"]),
        "vpp": range(1, c["blocks"] + 1),
        "micro_batch": batch,
        "num_microbatches": {*batch, *small},
        "sequence_parallel": (0, 1),
        "cp_type": range(len(CP_TYPES)),
        "schedule": range(len(SCHEDULES)),
        "sharding": range(len(SHARDINGS)),
        "hsdp": {0, *degrees(c["global_batch"], c["experts"], devices)} if "hsdp" in problem.stack.optimizer_shardings else (0,),
        "recompute_mode": range(FULL_UNIFORM + 1),
        "recompute_modules": range(1 << len(RECOMPUTE_MODULES)),
        "recompute_layers": depths,
        "optimizer_offload_per_mille": (0, PER_MILLE),
        "activation_offload_per_mille": (0, PER_MILLE),
        "rank_order": range(len(RANK_ORDERS)),
        "split_form": range(EVEN, FREE + 1),
        "placed_blocks": (c["blocks"],),
        "depths_apart": (0,),
    }
    return {name: tuple(sorted({*values, *named.get(name, ())})) for name, values in found.items()}


def _require(model: cp_model.CpModel, literal: cp_model.LiteralT, guard: cp_model.IntVar | None) -> None:
    if guard is None:
        model.add_bool_and([literal])
    else:
        model.add_implication(guard, literal)


def _tabulate(model: cp_model.CpModel, encoder: Encoder, peaks: PeakTable, guard: cp_model.IntVar | None) -> None:
    variables = [encoder.columns[name] for name in (*peaks.over, "peak_bytes")]
    table = model.add_allowed_assignments(variables, peaks.rows.tolist())
    if guard is not None:
        table.only_enforce_if(guard)


def _named_values(conditions: Iterable[Condition]) -> dict[str, set[int]]:
    """Numbers that conditions compare a lone column with, and the neighbours of a degree, by column."""
    named: dict[str, set[int]] = {}
    for leaf in (leaf for condition in conditions for leaf in _leaves(condition)):
        if isinstance(leaf, OneOf) and isinstance(leaf.a, str):
            named.setdefault(leaf.a, set()).update(leaf.values)
        elif isinstance(leaf, Compare) and isinstance(leaf.a, str) and not names_in(leaf.b):
            value = int(evaluate(leaf.b, {}))
            around = (value - 1, value, value + 1) if leaf.a in DEGREES else (value,)
            named.setdefault(leaf.a, set()).update(v for v in around if v > 0 or leaf.a not in DEGREES)
    return named


def _leaves(condition: Condition) -> Sequence[Condition]:
    if isinstance(condition, AnyOf | AllOf):
        return [leaf for part in condition.conditions for leaf in _leaves(part)]
    if isinstance(condition, Not):
        return _leaves(condition.condition)
    if isinstance(condition, Implies):
        return [*_leaves(condition.premise), *_leaves(condition.conclusion)]
    return [condition]

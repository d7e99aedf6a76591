"""A few experts on a few ranks, decided by CP-SAT in one model: copies, ranks, routing groups, and what crosses supernodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from ..search_spaces.layout import Floats, Ints
from .expert_packing import UNITS
from .solving import deterministic_solver

DETERMINISTIC_LIMIT = 20.0
"""CP-SAT's deterministic seconds for each of the two aims."""


@dataclass(frozen=True)
class Site:
    """Where experts may go: the supernode of every EP rank, (D,) and counted from 0, and how tokens are routed.

    `redundant` copies are made beyond one of each expert. A token goes to `top_k` experts of `groups_topk` of the `groups`.
    """

    supernodes: Ints
    top_k: int
    redundant: int = 0
    groups: int = 1
    groups_topk: int = 1

    @property
    def ranks(self) -> int:
        return len(self.supernodes)

    @property
    def spans(self) -> Ints:
        """EP ranks in every supernode, (S,)."""
        return np.bincount(self.supernodes)

    @property
    def units(self) -> int:
        """Supernodes, or blocks of them, that routing groups are dealt to whole; 1 where groups are not kept together.

        Kept together are groups that come out whole: the same number in each of supernodes of equal size, or each spread over the
        same number of them, with as many redundant copies in each.
        """
        count = len(self.spans)
        even = len(set(self.spans.tolist())) == 1
        units = min(count, self.groups)
        whole = max(count, self.groups) % units == 0 and self.redundant % units == 0
        return units if even and whole else 1

    @property
    def unit_of_rank(self) -> Ints:
        """The unit of every EP rank, (D,)."""
        return self.supernodes * self.units // len(self.spans)


@dataclass(frozen=True)
class Decided:
    """The expert in every slot, rank by rank, (P,), and a proven lower bound of the fullest rank's load."""

    slots: Ints
    bound: float


def decide(loads: Floats, site: Site, pairs: Floats | None, tolerance: float) -> Decided | None:
    """The slots with the least load on the fullest rank and, of those within `tolerance` of it, the fewest pairs apart.

    `loads` are the experts', (E,); a copy takes an equal part of its expert's load, and copies of one sit on different ranks.
    `pairs` counts tokens that two experts share, (E, E); it is left out of account where there are copies. None if CP-SAT finds
    nothing in its time.
    """
    model, takes, fullest, unit = _model(loads, site)
    solver = _solver()
    model.minimize(fullest)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    bound = (solver.best_objective_bound - len(loads) - site.redundant) * unit
    slots = _slots(solver, takes)
    if pairs is None or site.redundant or len(site.spans) == 1:
        return Decided(slots, bound)
    model.add(fullest <= int(solver.objective_value * (1.0 + tolerance)))
    for variable in (taken for row in takes for taken in row):
        model.add_hint(variable, solver.boolean_value(variable))
    _fewest_apart(model, takes, site, pairs)
    again = _solver()
    found = again.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Decided(_slots(again, takes) if found else slots, bound)


Takes = list[list[cp_model.IntVar]]


def _model(loads: Floats, site: Site) -> tuple[cp_model.CpModel, Takes, cp_model.IntVar, float]:
    """Experts × ranks: whether a copy of the expert sits there; and the load of the fullest rank in whole units."""
    model = cp_model.CpModel()
    experts, ranks = len(loads), site.ranks
    unit = float(loads.sum()) / UNITS
    slots = (experts + site.redundant) // ranks
    takes = [[model.new_bool_var("") for _ in range(ranks)] for _ in range(experts)]
    fullest = model.new_int_var(0, 2 * UNITS, "")
    parts: list[list[cp_model.LinearExprT]] = [[] for _ in range(ranks)]
    for expert, row in enumerate(takes):
        counts = [model.new_bool_var("") for _ in range(min(ranks, 1 + site.redundant))]
        model.add_exactly_one(counts)
        model.add(sum(row) == sum((index + 1) * count for index, count in enumerate(counts)))
        for index, count in enumerate(counts):
            part = round(float(loads[expert]) / (index + 1) / unit)
            for rank, taken in enumerate(row):
                both = model.new_bool_var("")
                model.add_bool_or(both, ~taken, ~count)
                parts[rank].append(part * both)
    for rank in range(ranks):
        model.add(sum(row[rank] for row in takes) == slots)
        model.add(sum(parts[rank]) <= fullest)
    _keep_groups(model, takes, site)
    return model, takes, fullest, unit


def _keep_groups(model: cp_model.CpModel, takes: Takes, site: Site) -> None:
    """Every routing group in one unit, as many in each."""
    if site.units == 1:
        return
    size = len(takes) // site.groups
    homes = [[model.new_bool_var("") for _ in range(site.units)] for _ in range(site.groups)]
    for home in homes:
        model.add_exactly_one(home)
    for index in range(site.units):
        model.add(sum(home[index] for home in homes) == site.groups // site.units)
    for expert, row in enumerate(takes):
        for rank, taken in enumerate(row):
            model.add_implication(taken, homes[expert // size][site.unit_of_rank[rank]])


def _fewest_apart(model: cp_model.CpModel, takes: Takes, site: Site, pairs: Floats) -> None:
    """Makes the tokens least that two experts share across supernodes."""
    at = [[sum(row[rank] for rank in np.flatnonzero(site.supernodes == s)) for s in range(len(site.spans))] for row in takes]
    unit = max(float(pairs.max()), 1e-300) / 1_000_000
    apart = []
    for first, second in zip(*np.nonzero(np.triu(pairs, 1)), strict=True):
        split = model.new_bool_var("")
        for s in range(len(site.spans)):
            model.add(at[first][s] - at[second][s] <= split)
        apart.append(round(float(pairs[first, second]) / unit) * split)
    model.minimize(sum(apart))


def _slots(solver: cp_model.CpSolver, takes: Takes) -> Ints:
    return np.array(
        [expert for rank in range(len(takes[0])) for expert, row in enumerate(takes) if solver.boolean_value(row[rank])]
    )


def _solver() -> cp_model.CpSolver:
    return deterministic_solver(DETERMINISTIC_LIMIT)

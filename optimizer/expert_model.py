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
REARRANGING_LIMIT, NEAR_ENOUGH = 3.0, 2e-3
"""CP-SAT's deterministic seconds for a unit's copies and places at once, and the gap at which that ends."""
HEAVY = 0.3
"""Share of a rank's mean load from which an expert may have any number of copies in a unit that is rearranged; others have two."""


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
    asked = _Asked.of(loads, site, np.full(len(loads), min(site.ranks, 1 + site.redundant)))
    solver = deterministic_solver(DETERMINISTIC_LIMIT)
    asked.model.minimize(asked.fullest)
    status = solver.solve(asked.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    bound = (solver.best_objective_bound - len(loads) - site.redundant) * asked.unit
    slots = asked.slots(solver)
    if pairs is None or site.redundant or len(site.spans) == 1:
        return Decided(slots, bound)
    asked.model.add(asked.fullest <= int(solver.objective_value * (1.0 + tolerance)))
    asked.start_from(slots)
    _fewest_apart(asked.model, asked.takes, site, pairs)
    again = deterministic_solver(DETERMINISTIC_LIMIT)
    found = again.solve(asked.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Decided(asked.slots(again) if found else slots, bound)


def rearranged(loads: Floats, ranks: int, slots: Ints) -> Ints:
    """Slots of one unit, (P,), as CP-SAT improves them by other numbers of copies and other places at once, in a short time."""
    redundant = len(slots) - len(loads)
    most = np.where(loads > HEAVY * loads.sum() / ranks, min(ranks, 1 + redundant), min(ranks, 1 + redundant, 2))
    most = np.maximum(most, np.bincount(slots, minlength=len(loads)))
    asked = _Asked.of(loads, Site(np.zeros(ranks, dtype=np.int64), 1, redundant), most)
    asked.start_from(slots)
    asked.model.minimize(asked.fullest)
    solver = deterministic_solver(REARRANGING_LIMIT)
    solver.parameters.relative_gap_limit = NEAR_ENOUGH
    found = solver.solve(asked.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return asked.slots(solver) if found else slots


@dataclass(frozen=True)
class _Asked:
    """A model, for every expert, number of copies and rank: whether one of so many copies sits there; the fullest rank's load.

    Loads are in whole units of `unit`.
    """

    model: cp_model.CpModel
    parts: list[list[list[cp_model.IntVar]]]
    fullest: cp_model.IntVar
    unit: float

    @classmethod
    def of(cls, loads: Floats, site: Site, most: Ints) -> _Asked:
        """With 1 to `most` copies, (E,), of every expert."""
        model, unit = cp_model.CpModel(), float(loads.sum()) / UNITS
        parts = [[[model.new_bool_var("") for _ in range(site.ranks)] for _ in range(limit)] for limit in most.tolist()]
        fullest = model.new_int_var(0, 2 * UNITS, "")
        for expert in parts:
            chosen = [model.new_bool_var("") for _ in expert]
            model.add_exactly_one(chosen)
            for copies, (row, count) in enumerate(zip(expert, chosen, strict=True), start=1):
                model.add(sum(row) == copies * count)
            for of_rank in zip(*expert, strict=True):
                model.add_at_most_one(of_rank)
        share = [
            round(load / copies / unit) for load, limit in zip(loads, most.tolist(), strict=True) for copies in range(1, limit + 1)
        ]
        for rank in range(site.ranks):
            held = [row[rank] for expert in parts for row in expert]
            model.add(sum(held) == (len(loads) + site.redundant) // site.ranks)
            model.add(cp_model.LinearExpr.weighted_sum(held, share) <= fullest)
        asked = cls(model, parts, fullest, unit)
        _keep_groups(model, asked.takes, site)
        return asked

    @property
    def takes(self) -> Takes:
        """Whether an expert, one row each, has a copy on a rank."""
        return [[sum(of_rank) for of_rank in zip(*expert, strict=True)] for expert in self.parts]

    def start_from(self, slots: Ints) -> None:
        """Gives CP-SAT a placement to start from."""
        ranks = len(self.parts[0][0])
        held = np.zeros((len(self.parts), ranks), dtype=bool)
        held[slots, np.repeat(np.arange(ranks), len(slots) // ranks)] = True
        for expert, on in zip(self.parts, held, strict=True):
            for copies, row in enumerate(expert, start=1):
                for taken, here in zip(row, on.tolist(), strict=True):
                    self.model.add_hint(taken, here and copies == on.sum())

    def slots(self, solver: cp_model.CpSolver) -> Ints:
        """The expert in every slot, rank by rank."""
        ranks = range(len(self.parts[0][0]))
        held = np.array([[any(solver.boolean_value(row[rank]) for row in expert) for expert in self.parts] for rank in ranks])
        return np.nonzero(held)[1]


Takes = list[list[cp_model.LinearExprT]]


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
            model.add(taken <= homes[expert // size][site.unit_of_rank[rank]])


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

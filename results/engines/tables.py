"""CP-SAT with the whole objective as a table: every legal layout of a small space priced, the cheapest found by the solver.

What the engines of the product are compared with; it grows with the space, which is why it is not one of them.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.engines.benders import whole_ns
from paraplan.optimizer.engines.refinement import refined
from paraplan.search_spaces.choices import FRAME
from paraplan.search_spaces.constraints import build_model
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.quantities import DERIVED, columns, constants
from paraplan.search_spaces.rules import rules_over

LARGEST = 2000
"""Layouts beyond which a space is not tabulated."""
INNER = ("micro_batch", "num_microbatches", "vpp", "schedule", "recompute_mode", "recompute_modules", "recompute_layers")
SHARED = ("cp_type", "sharding", "hsdp", "optimizer_offload_per_mille", "activation_offload_per_mille", "rank_order")


class TooLargeError(ValueError):
    """A space with more layouts than are tabulated."""


def solve_tables(space: Space, model: CostModel) -> float:
    """The least step time in seconds, proved optimal by CP-SAT to the nanosecond; infinite where nothing fits. TooLargeError."""
    if space.listed > LARGEST:
        raise TooLargeError(f"{space.listed:,} layouts are more than the {LARGEST:,} that are tabulated")
    table, _ = space.layouts(np.arange(len(space.frames)))
    step_s = refined(model, model.rows(table)).step_time_s
    fits = np.flatnonzero(np.isfinite(step_s))
    if not len(fits):
        return float("inf")
    given = columns(space.problem, table)
    names = (*FRAME, *INNER, *SHARED, "sequence_parallel")
    values = {name: np.broadcast_to(np.asarray(given[name]), len(table))[fits].astype(np.int64) for name in names}
    rules = rules_over((r for r in space.rules if r.scope != "memory"), {*constants(space.problem), *names, *DERIVED})
    built = build_model(space.problem, rules, {name: np.unique(column).tolist() for name, column in values.items()})
    place = built.model.new_int_var(0, len(fits) - 1, "place")
    for name, column in values.items():
        built.model.add_element(place, column.tolist(), built.columns[name])
    nanoseconds = whole_ns(step_s[fits])
    time_ns = built.model.new_int_var(int(nanoseconds.min()), int(nanoseconds.max()), "step_time_ns")
    built.model.add_element(place, nanoseconds.tolist(), time_ns)
    built.model.minimize(time_ns)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(built.model)
    if status != cp_model.OPTIMAL:
        raise ValueError(f"CP-SAT ended with {solver.status_name(status)} on a table of {len(fits)} layouts")
    return float(step_s[fits][solver.value(place)])

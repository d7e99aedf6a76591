"""How CP-SAT is asked everywhere: the same answer every time, and ended by an interrupt at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..search_spaces.cutting import Cutting

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from .cp_sat import Solver


def deterministic_solver(seconds: float) -> Solver:
    """One worker, one seed, and `seconds` of deterministic time.

    CP-SAT's own handler of SIGINT would leave the signal's default behind: the next interrupt would end the process without a word.
    """
    from .cp_sat import Solver

    solver = Solver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.catch_sigint_signal = False
    return solver


def keep_legal(model: cp_model.CpModel, cuts: Sequence[Any], cutting: Cutting) -> None:
    """Lets cuts (chunks+1), from 0 to all blocks, be legal ones only."""
    from ortools.sat.python import cp_model

    for chunk, least in enumerate(cutting.least.tolist()):
        model.add(cuts[chunk + 1] - cuts[chunk] >= least)
    for chunk in cutting.held_back:
        allowed = np.flatnonzero(cutting.begins(chunk)).tolist()
        model.add_linear_expression_in_domain(cuts[chunk], cp_model.Domain.from_values(allowed))

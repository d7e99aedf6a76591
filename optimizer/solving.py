"""How CP-SAT is asked everywhere: the same answer every time, and interrupts left to Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def deterministic_solver(seconds: float) -> cp_model.CpSolver:
    """One worker, one seed, and `seconds` of deterministic time.

    CP-SAT's own handler of SIGINT would leave the signal's default behind: the next interrupt would end the process without a word.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.catch_sigint_signal = False
    return solver

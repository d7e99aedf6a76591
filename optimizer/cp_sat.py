"""CP-SAT's solver, which an interrupt ends at once."""

from __future__ import annotations

import threading
from typing import Any

from ortools.sat.python import cp_model

LOOK_S = 0.05
"""Seconds after which a solve that an interrupt stops is told so again: it may not have begun."""


class Solver(cp_model.CpSolver):
    """CP-SAT in a thread of its own: Python sees to signals between two instructions of the main thread, which would else be in C++
    until the solve ends.
    """

    def solve(self, model: cp_model.CpModel, *_: Any) -> cp_model.CpSolverStatus:
        """The solve's status; KeyboardInterrupt ends it. What it raises is raised here."""
        if threading.current_thread() is not threading.main_thread():
            return super().solve(model)
        ended: list[cp_model.CpSolverStatus | Exception] = []
        thread = threading.Thread(target=lambda: ended.append(self._solved(model)))
        thread.start()
        try:
            thread.join()
        except KeyboardInterrupt:
            while thread.is_alive():
                self.stop_search()
                thread.join(LOOK_S)
            raise
        (status,) = ended
        if isinstance(status, Exception):
            raise status
        return status

    def _solved(self, model: cp_model.CpModel) -> cp_model.CpSolverStatus | Exception:
        try:
            return super().solve(model)
        except Exception as error:
            return error

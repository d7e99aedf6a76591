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
        done = threading.Event()

        def solved() -> None:
            ended.append(self._solved(model))
            done.set()

        threading.Thread(target=solved).start()
        try:
            done.wait()  # not join, which an interrupt makes believe that the thread has ended
        except KeyboardInterrupt:
            while not done.is_set():
                self.stop_search()
                done.wait(LOOK_S)
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

"""Logic-based Benders decomposition: CP-SAT chooses frames by their bounds, exact pricing of those frames answers with cuts.

The master holds the rules, the user's among them, as their CP-SAT reading over every column of a layout, and a table of frames with
their bounds in whole nanoseconds, rounded down so that they stay admissible. It names the legal frame of the least bound. The
subproblem scores all layouts of that frame and of the next few exactly; their optima take the place of their bounds, and since they
are kept beside it, the master need not look at those frames again. Once nothing it still holds has a bound below the worst that is
kept, that is the proof.

CP-SAT orders the table by rank of bound: the same optimum as over nanoseconds, and many times faster, since the ranks of a table
have no gaps. Presolve of a table grows faster than its rows, so it is given out in windows, those of the least bounds first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from ...search_spaces.choices import FRAME
from ...search_spaces.constraints import RuleModel, build_model, candidate_domains
from ...search_spaces.enumeration import Space
from ...search_spaces.layout import Floats, Ints
from ...search_spaces.quantities import DERIVED, constants
from ...search_spaces.rules import rules_over
from ..found import Found
from ..interrupts import raised, stoppable
from ..search import Search
from ..solving import deterministic_solver
from .task import Task

WINDOW = 1024  # frames that the master holds at once
FRAMES_PER_ROUND = 32
ROWS_PER_ROUND = 200_000
DETERMINISTIC_LIMIT = 60.0
"""CP-SAT's deterministic seconds for one decision of the master."""
LONGEST_S = 1e9
"""Bounds stop here, where nanoseconds still are whole numbers that CP-SAT can hold."""

Places = npt.NDArray[np.intp]


def solve(task: Task) -> Found:
    """The best layouts, proved by the master; a search that is stopped returns what it has, with the master's bound."""
    return prove(task, Search(task.space, task.model, task.top, task.time_limit_s))


def prove(task: Task, search: Search) -> Found:
    """The same with a search of the caller's as the subproblem."""
    with raised():
        order, bound = search.begin()
        rounds = _Rounds(task, search, order, whole_ns(bound))
    complete = False
    with stoppable() as ended:
        complete = rounds.run()
    if ended.by is not None and not search.best:
        raise ended.by
    return search.end(complete, rounds.least_bound_ns / 1e9)


def whole_ns(seconds: Floats) -> Ints:
    """Seconds in whole nanoseconds, rounded down; they stop at LONGEST_S, which keeps them admissible, (n,)."""
    return np.asarray(np.floor(np.minimum(seconds, LONGEST_S) * 1e9), dtype=np.int64)


class _Rounds:
    """Rounds of master and subproblem over the windows of a table of frames, `order` by rising bound."""

    def __init__(self, task: Task, search: Search, order: Places, bound_ns: Ints) -> None:
        self._task, self._search = task, search
        self._order, self._bound_ns = order, bound_ns[order]
        self._open = np.ones(len(order), dtype=bool)

    @property
    def least_bound_ns(self) -> float:
        """The least bound of a frame that has not been scored; infinite if all have."""
        return float(self._bound_ns[self._open].min(initial=np.iinfo(np.int64).max)) if self._open.any() else np.inf

    def run(self) -> bool:
        """Whether it is proved that no frame is left that could be among the best."""
        for begin in range(0, len(self._order), WINDOW):
            if self._bound_ns[begin] >= self._limit_ns:
                return True
            if not self._exhausted(slice(begin, min(begin + WINDOW, len(self._order)))):
                return False
        return True

    @property
    def _limit_ns(self) -> float:
        return self._search.limit_s * 1e9

    def _exhausted(self, window: slice) -> bool:
        """Whether the master proves that no frame of the window is left that could be among the best."""
        master = _Master(self._task.space, self._order[window])
        while (chosen := master.choose(self._below(window), self._search.seconds_left)) is not None:
            self._score(self._next(window.start + chosen, window.stop))
            if self._search.out_of_time:
                return False
        return master.proved

    def _below(self, window: slice) -> Ints:
        """Ranks in the window of frames that are not scored and whose bound lies below the limit."""
        return np.flatnonzero(self._open[window] & (self._bound_ns[window] < self._limit_ns))

    def _next(self, chosen: int, stop: int) -> Places:
        """Places in the table of the chosen frame and of those that follow it, as many as are scored at once."""
        ahead = chosen + np.flatnonzero(self._open[chosen:stop])[:FRAMES_PER_ROUND]
        rows = np.cumsum(self._task.space.layouts_per_frame[self._order[ahead]])
        room = ROWS_PER_ROUND if np.isfinite(self._search.limit_s) else ROWS_PER_ROUND // 8
        ahead = ahead[: max(1, int(np.searchsorted(rows, room, side="right")))]
        return ahead[self._bound_ns[ahead] < self._limit_ns]

    def _score(self, places: Places) -> None:
        self._search.score_frames(self._order[places])
        if self._search.out_of_time:
            return  # some of their layouts may not have been looked at
        self._open[places] = False
        if self._task.progress is not None:
            below = self._open & (self._bound_ns < self._limit_ns)
            self._task.progress(1.0 - below.mean())


class _Master:
    """The rules and a window of frames as one CP-SAT model, whose optimum is the legal frame of the least bound."""

    def __init__(self, space: Space, frames: Places) -> None:
        self._built = _rules_and_frames(space, frames)
        self._rank = self._built.model.new_int_var(0, len(frames) - 1, "rank")
        columns = [getattr(space.frames, name)[frames] for name in FRAME]
        table = np.column_stack([*columns, np.arange(len(frames))])
        self._built.model.add_allowed_assignments([*(self._built.columns[name] for name in FRAME), self._rank], table.tolist())
        self._built.model.minimize(self._rank)
        self.proved = False

    def choose(self, ranks: Ints, seconds: float) -> int | None:
        """The least of these ranks that the rules allow; none if that is impossible (`proved`) or takes too long.

        ValueError: the master refuses frames that the enumeration holds legal.
        """
        if not len(ranks):
            self.proved = True
            return None
        # The cuts of the round: each keeps less than the one before.
        self._built.model.add_linear_expression_in_domain(self._rank, cp_model.Domain.from_values(ranks.tolist()))
        solver = _solver(seconds)
        status = solver.solve(self._built.model)
        if status == cp_model.INFEASIBLE:
            raise ValueError(f"the CP-SAT reading of the rules refuses {len(ranks)} frames that their masks allow")
        if status == cp_model.MODEL_INVALID:
            raise ValueError(self._built.model.validate())
        return solver.value(self._rank) if status == cp_model.OPTIMAL else None


def _rules_and_frames(space: Space, frames: Places) -> RuleModel:
    """The rules over every column of a layout, memory aside; frame columns may take what the window's frames do."""
    rules = [rule for rule in space.rules if rule.scope != "memory"]
    domains = candidate_domains(space.problem, rules)
    domains |= {name: tuple(np.unique(getattr(space.frames, name)[frames]).tolist()) for name in FRAME}
    known = {*constants(space.problem), *domains, *DERIVED}
    return build_model(space.problem, rules_over(rules, known), domains)


def _solver(seconds: float) -> cp_model.CpSolver:
    solver = deterministic_solver(DETERMINISTIC_LIMIT)
    # The table decides nearly everything: probing it and relaxing it to a linear programme cost more than they save.
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.linearization_level = 0
    if np.isfinite(seconds):
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    return solver

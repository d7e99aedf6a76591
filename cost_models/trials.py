"""Runs of one stack on one accelerator, priced again and again with other figures of the stack: many points in one table.

A run's table is small, so pricing it takes as long as it takes to walk through the model's operators. That walk is made once
for all points that are to be tried together: the table is repeated for every point, and the stack's figures become columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..search_spaces.cluster import Figure
from ..search_spaces.layout import Floats, Ints, LayoutTable, Problem
from ..search_spaces.stack import CALIBRATED, FLOORS
from .pieces import Pieces
from .profile import Profile
from .rows import Combinations, Rows
from .step import CostModel, same_shape
from .validation import Outcome, problem_key, profile_of

MOST_ROWS = 4096
"""Rows of one table: beyond that the arithmetic costs more than the walk, and columns leave the cache."""


class TrialModel(CostModel):
    """Prices a table whose rows have figures of their own: those of the stack hold columns (n,)."""

    def step_time_s(self, table: LayoutTable) -> Floats:
        """Step times in seconds, (n,)."""
        rows = self.rows(table)
        overhead = np.broadcast_to(self.problem.stack.step_overhead_s.value, len(table))
        found = np.empty(len(table))
        for members in same_shape(table):
            part = rows.take(members)
            cuts = np.array([table.splits[int(index)].cuts for index in part.table.split])
            found[members] = self.around_pipeline(part, self.flow(part, cuts)).total_s + part.stalled_s + overhead[members]
        return found

    def rows(self, table: LayoutTable) -> Rows:
        """The rows with everything worked out: what is taken from them later has no columns of its own to read."""
        return super().rows(table).known()

    def _factor_rows(self, table: LayoutTable) -> tuple[npt.NDArray[np.intp], Ints]:
        """Rows that differ in their figures alone differ: none are put together."""
        every = np.arange(len(table))
        return every, every

    def _combinations(self, table: LayoutTable) -> Combinations:
        return Combinations(self.problem, self.network, self.profile, table, self.pieces(table), alone=True)

    def pieces(self, table: LayoutTable) -> Pieces:
        """Costs of every piece for each row."""
        return self.layers.pieces(table, self.layers.wholes(table, shared=False), np.arange(len(table)))


class Priced:
    """Runs of one stack on one accelerator and what they took.

    `figures` are the stack's own, from which trials start; those named in `pooled` come from other stacks and accelerators.
    """

    def __init__(self, outcomes: Sequence[Outcome], path: str | None, shipped: bool = True) -> None:
        batches: dict[tuple[object, ...], list[int]] = defaultdict(list)
        jobs = [outcome.job for outcome in outcomes if outcome.job is not None]
        for place, job in enumerate(jobs):
            batches[problem_key(job)].append(place)
        self.measured = np.array([outcome.measured_step_time_s for outcome in outcomes], dtype=np.float64)
        self.weights = repeat_weights(outcomes)
        self.batches: list[tuple[Problem, Profile, LayoutTable, list[int]]] = []
        self.pooled: set[str] = set()
        for places in batches.values():
            job = jobs[places[0]]
            accelerator = job.accelerator
            curves = profile_of(accelerator, job.gemm_curve, path, shipped)
            self.pooled |= curves.pooled_figures(job.problem.stack, accelerator).keys()
            stack = job.problem.stack.with_figures(curves.stack_figures(job.problem.stack, accelerator))
            problem = job.problem.model_copy(update={"stack": stack})
            table = LayoutTable.from_layouts([jobs[place].layout for place in places])
            self.batches.append((problem, curves.model_copy(update={"stacks": {}, "pooled": {}}), table, places))
        # Floors of runs under CUDA graphs are 0: the stack's own are those of the others.
        self.figures = {name: max(getattr(b[0].stack, name).value for b in self.batches) for name in CALIBRATED}

    def predict(self, values: Mapping[str, float]) -> Floats:
        """Step times in seconds, (n,), with some of the stack's figures replaced."""
        return np.asarray(self.predict_all(list(values), np.array([list(values.values())]))[0])

    def predict_all(self, names: Sequence[str], points: Floats) -> Floats:
        """Step times (points, n) with the named figures at each of the points (points, names)."""
        found = np.empty((len(points), len(self.measured)))
        for problem, profile, table, places in self.batches:
            share = max(1, MOST_ROWS // len(table))
            for first in range(0, len(points), share):
                part = slice(first, first + share)
                found[part, places] = _priced(problem, profile, table, names, points[part])
        return found


def _priced(problem: Problem, profile: Profile, table: LayoutTable, names: Sequence[str], points: Floats) -> Floats:
    """Step times (points, rows) of one problem's table."""
    stack = problem.stack
    free = [place for place, name in enumerate(names) if not (stack.cuda_graphs and name in FLOORS)]
    columns = {names[place]: np.repeat(points[:, place], len(table)) for place in free}
    figures = {name: Figure.model_construct(value=column, source="on trial", grade="measured") for name, column in columns.items()}
    model = TrialModel(problem.model_copy(update={"stack": stack.model_copy(update=figures)}), profile)
    repeated = table.take(np.tile(np.arange(len(table)), len(points)))
    return np.asarray(model.step_time_s(repeated).reshape(len(points), len(table)))


def repeat_weights(outcomes: Sequence[Outcome]) -> Floats:
    """1/k for each of k runs of one problem and layout: repeats are one observation, not several."""
    keys = [(problem_key(o.job), o.job.layout.model_dump_json()) if o.job else None for o in outcomes]
    counts: dict[object, int] = defaultdict(int)
    for key in keys:
        counts[key] += 1
    return np.array([1.0 / counts[key] for key in keys])

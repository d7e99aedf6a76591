"""The best of a search and what is near it, cut again until nothing of it is faster: few walk, the others try what these found.

Layouts of as many chunks are cut much alike, whatever else they choose. Of each shape one for every recompute, which decides what
room there is, goes downhill by its price, and where that ends is tried on all that share the shape; those that this brings close to
the best then go on from there themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Cuts
from ..cost_models.step import CostModel
from ..search_spaces.choices import FRAME
from ..search_spaces.layout import Layout, LayoutTable
from ..search_spaces.row_keys import distinct_rows
from .bounds import least_after, row_bounds_s
from .found import Candidate, Found
from .kept_near import NEAR
from .stages import EQUAL, partitioned_exactly
from .walks import Walk, cut_freely, fitting_s, with_split

CLOSE = 0.002
"""By how much of the step a layout may be slower than the best, under cuts of another of its shape, to go on from there."""
OTHERWISE = 0.02
"""The same of the first that redoes as it does, from the cuts that the search gave it: they leave other room."""
LEEWAY = 0.01
"""By how much of the best step a way downhill may be expected to end above it and go on: some get faster late."""
WALKS = 24
"""Layouts at most that go downhill for being near the best."""


class NearBest:
    """The best layouts of a search and those near them, with the best cuts that are known of each."""

    def __init__(self, model: CostModel, found: Found) -> None:
        candidates, reported = [*found.best, *found.near], len(found.best)
        self._model = model
        self._layouts = [candidate.layout for candidate in candidates]
        self._rows = model.rows(LayoutTable.from_layouts(self._layouts))
        table = self._rows.table
        self._told = [table.splits[split] for split in table.split.tolist()]
        self._cuts = [split.cuts for split in self._told]
        self._frame = [tuple(getattr(layout, name) for name in FRAME) for layout in self._layouts]
        self._frames = len(set(self._frame[:reported]))
        self._told_s = np.array([candidate.step_time_s for candidate in candidates])  # of those near from below
        self._step_s = np.where(np.arange(len(candidates)) < reported, self._told_s, np.inf)
        self._least_s = row_bounds_s(model, self._rows, least_after(model, self._rows))
        free = np.array([cut_freely(model, layout) for layout in self._layouts])
        self._movable = free & ~partitioned_exactly(model.problem, table)
        self._waits = self._movable.copy()  # those that did not go downhill from their best cuts yet
        shape = [table.pp, table.vpp, table.schedule]
        redone = [table.recompute_mode, table.recompute_modules, table.recompute_layers]
        self._shape, self._kind = distinct_rows(shape)[1], distinct_rows([*shape, *redone])[1]
        self._priced = np.zeros(self._shape.max() + 1, dtype=bool)  # shapes of which all are priced as they are told to be cut
        self._met = np.zeros(self._kind.max() + 1, dtype=bool)  # those of a shape that redo alike, of which one went

    def moved(self) -> Iterator[list[Candidate]]:
        """The fastest layout of each of the best frames, fastest first, with ever better cuts."""
        self._walk(int(self._step_s.argmin()))
        yield self.best
        for _ in range(WALKS):
            if (now := self._next) is None:
                break
            self._walk(now, float(self._step_s.min()))
            yield self.best
        for place in self._reported:
            self._walk(place)
            yield self.best

    @property
    def best(self) -> list[Candidate]:
        """The fastest layout of each of as many frames as the search found, fastest first."""
        return [Candidate(float(self._step_s[place]), self._layout(place)) for place in self._reported]

    @property
    def _reported(self) -> list[int]:
        first: dict[tuple[int, ...], int] = {}
        for place in np.argsort(self._step_s, kind="stable").tolist():
            first.setdefault(self._frame[place], place)
        return list(first.values())[: self._frames]

    def _layout(self, place: int) -> Layout:
        told, layout = self._told[place], self._layouts[place]
        return layout if self._cuts[place] == told.cuts else with_split(self._model, layout, replace(told, cuts=self._cuts[place]))

    @property
    def _next(self) -> int | None:
        """The most promising of those that may come below the best: the first that redoes so, or close with cuts of others."""
        best_s = self._step_s.min()
        close_s = self._step_s / (1.0 + np.where(self._met[self._kind], CLOSE, OTHERWISE))
        promised_s = np.where(self._priced[self._shape], close_s, self._told_s / (1.0 + NEAR))
        promised_s[~self._waits | (self._least_s >= best_s)] = np.inf
        place = int(promised_s.argmin())
        return place if promised_s[place] < best_s else None

    def _walk(self, place: int, goal_s: float = np.inf) -> None:
        """Lets a layout go downhill as far as the goal is in reach, and the others of its shape try where that ends."""
        if not self._waits[place]:
            return
        self._waits[place] = False
        walk = Walk(self._model, self._rows.take(np.array([place])))
        alike = np.nonzero((self._shape == self._shape[place]) & self._movable)[0]
        if not self._priced[self._shape[place]]:
            self._priced[self._shape[place]] = True
            near = alike[np.isinf(self._step_s[alike])]  # what they take is known from below
            self._try(near, np.array([self._cuts[other] for other in near.tolist()]))
        start = self._cuts[place], float(self._step_s[place])
        if not self._met[self._kind[place]]:
            self._met[self._kind[place]] = True
            start = min(walk.starts().items(), key=lambda way: way[1])
        if start[1] <= goal_s * (1.0 + NEAR):
            cuts, step_s = walk.end(start, goal_s * (1.0 + LEEWAY))
            self._waits[place] = step_s > self._step_s[place]  # cuts of others are better: it may go on from there
            self._keep(place, cuts, step_s)
            self._try(alike[alike != place], np.tile(cuts, (len(alike) - 1, 1)))

    def _try(self, places: npt.NDArray[np.intp], cuts: Cuts) -> None:
        """Cuts layouts of one shape at `cuts` (n, chunks+1) where that is faster, if any cuts may bring them to the best."""
        hopeful = np.nonzero(self._least_s[places] < self._step_s.min())[0]
        if len(hopeful):
            step_s = fitting_s(self._model.price_cuts(self._rows.take(places[hopeful]), cuts[hopeful]))
            for place, seconds, own in zip(places[hopeful].tolist(), step_s.tolist(), cuts[hopeful].tolist(), strict=True):
                self._waits[place] |= self._keep(place, tuple(own), seconds)

    def _keep(self, place: int, cuts: tuple[int, ...], step_s: float) -> bool:
        """Keeps a layout's cuts if they are faster than its best, and tells."""
        better = bool(step_s < self._step_s[place] * (1.0 - EQUAL))
        if better:
            self._step_s[place], self._cuts[place] = step_s, cuts
        return better

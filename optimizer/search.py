"""Branch and bound: frames by their bound, their layouts by a tighter one, survivors cut into stages exactly.

Every legal layout ends in one of three counts: cut by the bound (it cannot beat what is found), cut by memory (no partition of it
fits), or scored (its best partition was worked out and priced).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..cost_models.step import CostModel, Rows, same_shape
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import Bools, Floats, Layout, LayoutTable, Split
from .bounds import frame_bounds, least_after, most_work_s, row_bounds_bytes, row_bounds_s, work_bounds_s
from .stages import balanced_cuts, best_partitions, default_cuts, partitioned_exactly, reachable

ROWS_PER_BATCH = 200_000
ROWS_PER_WAVE = 1024
FIRST_WAVE = 64
REPLAYED_ROWS = 16  # rows of one group that are replayed before the limit is looked at again
EQUAL = 1e-9  # relative difference of step times below which two layouts count as equally fast


@dataclass
class Counts:
    """How many layouts met which end; `open` were never looked at because the search was stopped."""

    legal: int = 0
    scored: int = 0
    cut_by_bound: int = 0
    cut_by_memory: int = 0


@dataclass(frozen=True)
class Candidate:
    """One scored layout: its step time, its row and its cuts."""

    step_time_s: float
    layout: Layout


@dataclass(frozen=True)
class _Wave:
    """Some rows that are scored together: their frames, and the least work after the pipeline per work in it (`bounds`)."""

    rows: Rows
    frame: npt.NDArray[np.intp]
    after: Floats

    def take(self, members: npt.NDArray[np.intp]) -> _Wave:
        return _Wave(self.rows.take(members), self.frame[members], self.after[members])


@dataclass
class Found:
    """Best layouts by frame, best first; what was proved on the way."""

    best: list[Candidate] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    lower_bound_s: float = np.inf
    complete: bool = True
    seconds: float = 0.0
    frames: int = 0


class Search:
    """One search over a problem's space with a cost model; `top` best frames are kept."""

    def __init__(self, space: Space, model: CostModel, top: int = 5, time_limit_s: float | None = None) -> None:
        self.space = space
        self.model = model
        self.top = top
        self.found = Found()
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._best: dict[int, Candidate] = {}
        self._frame_limit_s = np.empty(0)

    def run(self, progress: Callable[[float], None] | None = None) -> Found:
        """Searches until every layout is scored or cut, or the time limit passes; Ctrl-C ends it like the limit does."""
        begun = time.monotonic()
        found, space = self.found, self.space
        per_frame = space.layouts_per_frame
        found.frames, found.counts.legal = len(space.frames), int(per_frame.sum())
        self._frame_limit_s = np.full(len(space.frames), np.inf)
        bound, fits = frame_bounds(self.model, space)
        found.counts.cut_by_memory += int(per_frame[~fits].sum())
        order = np.argsort(bound, kind="stable")
        order = order[fits[order] & (per_frame[order] > 0)]
        done = 0
        try:
            while done < len(order) and bound[order[done]] < self.limit_s:
                batch = self._next_batch(order, done, per_frame, bound)
                if not self._out_of_time:
                    self._expand(order[batch])
                if self._out_of_time:
                    found.complete = False
                    break
                done = batch.stop
                if progress is not None:
                    progress(done / len(order))
        except KeyboardInterrupt:
            found.complete = False
            if not self._best:
                raise
        found.counts.cut_by_bound = found.counts.legal - found.counts.scored - found.counts.cut_by_memory
        found.best = sorted(self._best.values(), key=lambda c: c.step_time_s)[: self.top]
        best_s = found.best[0].step_time_s if found.best else np.inf
        found.lower_bound_s = best_s if found.complete else float(bound[order[done:]].min(initial=best_s))
        found.seconds = time.monotonic() - begun
        return found

    @property
    def _out_of_time(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    @property
    def limit_s(self) -> float:
        """Step time that a layout of a new frame has to beat to be kept."""
        times = sorted(candidate.step_time_s for candidate in self._best.values())
        return times[self.top - 1] if len(times) >= self.top else np.inf

    def _limits_s(self, frame: npt.NDArray[np.intp]) -> Floats:
        """Step time that a layout has to beat, by its frame: the frame's own best, or the worst that is kept, (n,)."""
        return np.minimum(self._frame_limit_s[frame], self.limit_s)

    def _next_batch(self, order: npt.NDArray[np.intp], done: int, per_frame: npt.NDArray[np.int64], bound: Floats) -> slice:
        """Frames to expand together: few while nothing is known, then as many as fit in a batch and may still win."""
        budget = ROWS_PER_BATCH if len(self._best) >= self.top else ROWS_PER_BATCH // 8
        sizes = np.cumsum(per_frame[order[done : done + 4096]])
        count = max(1, int(np.searchsorted(sizes, budget, side="right")))
        hopeful = int((bound[order[done : done + count]] < self.limit_s).sum())
        return slice(done, done + max(1, min(count, hopeful)))

    def _expand(self, frames: npt.NDArray[np.intp]) -> None:
        """Bounds all layouts of some frames and scores those that can still win, most promising first."""
        table, member = self.space.layouts(frames)
        frame = frames[member]
        if np.isfinite(self.limit_s):  # most layouts lose by their work alone, which is cheap to know
            hopeful = work_bounds_s(self.model, table) < self._limits_s(frame)
            table, frame = table.take(hopeful), frame[hopeful]
            if not len(table):
                return
        rows = self.model.rows(table)
        after = least_after(self.model, rows)
        bound = row_bounds_s(self.model, rows, after)
        fits = row_bounds_bytes(self.model, rows) <= self.model.usable_bytes
        self.found.counts.cut_by_memory += int((~fits).sum())
        left = np.nonzero(fits)[0]
        left = left[np.argsort(bound[left], kind="stable")]
        exact = partitioned_exactly(self.model.problem, table)

        def score(some: npt.NDArray[np.intp]) -> None:
            if self._out_of_time:
                return
            some = some[bound[some] < self._limits_s(frame[some])]
            if len(some):
                self._score(_Wave(rows.take(some), frame[some], after[some]), exact[some])

        if not np.isfinite(self.limit_s):  # a few of all kinds, so that the many that follow have a limit to beat
            score(left[:FIRST_WAVE])
            left = left[FIRST_WAVE:]
        score(left[~exact[left]])
        left = left[exact[left]]
        for begin in range(0, len(left), ROWS_PER_WAVE):
            score(left[begin : begin + ROWS_PER_WAVE])

    def _score(self, wave: _Wave, exact: Bools) -> None:
        """Cuts the rows into stages, prices them and keeps the best of each frame; `exact` marks those to be partitioned."""
        table = wave.rows.table
        members = np.nonzero(exact)[0]
        if np.isinf(self.limit_s):
            for group in _groups(table, members, depth=False):
                self._seed(wave.take(group))
        for group in _groups(table, self._reaching(wave, members), depth=True):
            self._partition(wave.take(group))
        self._replay(wave.take(np.nonzero(~exact)[0]))

    def _seed(self, part: _Wave) -> None:
        """Prices balanced cuts, so that the exact recursion has a limit to stay under."""
        cuts = balanced_cuts(self.model, part.rows, int(part.rows.table.pp[0]))
        priced = self.model.price_cuts(part.rows, cuts)
        for row in np.nonzero(priced.fits)[0]:
            self._keep(part, int(row), cuts[row], float(priced.step_time_s[row]))

    def _reaching(self, wave: _Wave, members: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Those of the 1F1B rows whose blocks can be dealt to stages within memory and within their limit's work."""
        part = wave.take(members)
        usable = self.model.usable_bytes
        fits = reachable(self.model, part.rows, np.full(len(part.rows), np.inf), usable)
        self.found.counts.cut_by_memory += int((~fits).sum())
        work_s = most_work_s(part.rows, part.after, self._limits_s(part.frame) - self._overhead_s)
        return members[fits & reachable(self.model, part.rows, work_s, usable)]

    def _partition(self, part: _Wave) -> None:
        """Best partition of each row, kept where it beats its limit."""
        # A row that set its own limit (`_seed`) is scored like any other: rounding must not leave it out.
        limits_s = self._limits_s(part.frame) * (1.0 + EQUAL) - self._overhead_s
        best = best_partitions(self.model, part.rows, limits_s, self.model.usable_bytes)
        scored = np.nonzero(np.isfinite(best.time_s))[0]
        self.found.counts.scored += len(scored)
        self.found.counts.cut_by_memory += int((~np.isfinite(best.time_s) & ~np.isfinite(limits_s)).sum())
        for row in scored:
            self._keep(part, int(row), best.cuts[row], float(best.time_s[row]) + self._overhead_s)

    def _replay(self, wave: _Wave) -> None:
        """Rows whose cuts follow from a rule: priced from below first, replayed only while that can still win."""
        below, cuts = np.full(len(wave.rows), np.inf), np.empty(len(wave.rows), dtype=object)
        for members in _groups(wave.rows.table, np.arange(len(wave.rows)), depth=False):
            for begin in range(0, len(members), ROWS_PER_WAVE):
                some = members[begin : begin + ROWS_PER_WAVE]
                part = wave.rows.take(some)
                each = default_cuts(self.model, part)
                priced = self.model.price_cuts(part, each, closed_form=True)
                fits = priced.fits
                self.found.counts.cut_by_memory += int((~fits).sum())
                below[some] = np.where(fits, priced.step_time_s, np.inf)
                for row, row_cuts in zip(some[fits], each[fits], strict=True):
                    cuts[row] = row_cuts
        order = np.argsort(below, kind="stable")
        while len(order):
            order = order[below[order] < np.minimum(self._limits_s(wave.frame[order]), np.finfo(float).max)]
            now, order = order[:REPLAYED_ROWS], order[REPLAYED_ROWS:]
            for members in _groups(wave.rows.table, now, depth=False):
                now_cut, chosen = wave.take(members), np.stack(list(cuts[members]))
                step_s = self.model.price_cuts(now_cut.rows, chosen).step_time_s
                self.found.counts.scored += len(members)
                for row, seconds in enumerate(step_s):
                    self._keep(now_cut, row, chosen[row], float(seconds))

    @property
    def _overhead_s(self) -> float:
        return self.model.problem.stack.step_overhead_s.value

    def _keep(self, part: _Wave, row: int, cuts: npt.NDArray[np.int64], step_time_s: float) -> None:
        frame, table = int(part.frame[row]), part.rows.table
        if self._frame_limit_s[frame] <= step_time_s * (1.0 + EQUAL):
            return
        num_layers = self.model.problem.model.num_layers
        split = Split(int(table.pp[row]), int(table.vpp[row]), tuple(int(c) for c in cuts))
        layout = table.layout(row, num_layers)
        stages = split.stages(num_layers, layout.recompute)
        self._frame_limit_s[frame] = step_time_s
        self._best[frame] = Candidate(step_time_s, layout.model_copy(update={"stages": stages}))


def _groups(table: LayoutTable, members: npt.NDArray[np.intp], depth: bool) -> Iterator[npt.NDArray[np.intp]]:
    """Members that share pp, vpp and schedule (and the recompute depth)."""
    if len(members):
        yield from (members[group] for group in same_shape(table.take(members), depth))

"""Branch and bound: frames by their bound, their works by a tighter one, layouts by one tighter still, survivors cut into stages
exactly.

A work stands for all layouts whose micro-batches cost the same: most of them fall together, by its time or by the memory that the
leanest of them needs, without ever being listed. Every legal layout ends in one of three counts: cut by the bound (it cannot beat
what is found), cut by memory (no partition of it fits), or scored (its best partition was worked out and priced).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Cuts
from ..cost_models.rows import Rows
from ..cost_models.split_passes import by_replay
from ..cost_models.step import CostModel
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import Bools, Floats
from .bounds import (
    frame_bounds,
    least_after,
    most_work_s,
    row_bounds_bytes,
    row_bounds_s,
    ruled_bounds_s,
    work_bounds_bytes,
    work_bounds_s,
)
from .family_prices import fitting_family_s
from .found import Candidate, Found, Kept
from .interrupts import check, raised, stoppable
from .kept_near import NEAR, KeptNear
from .reach import reachable
from .search_rows import Batch, Wave, Ways, same_shaped
from .squeezing import Tight
from .stages import EQUAL, Partition, cut_family, least_partitions, partitioned_exactly, refined

ROWS_PER_BATCH, ROWS_AT_MOST = 300_000, 800_000
"""Layouts of the frames whose works are bounded together, at first, and once these have set a limit that seldom falls: then what a
batch costs whatever it holds is spread over more.
"""
WORKS_SAMPLED = 1 << 13
"""Works of a batch, evenly spaced from the best bound to the worst, that are scored before the others: those that a rule cuts have
to be cut for a bound that tells them apart, which the limit that the sample sets spares most of the others.
"""
WORKS_PER_WAVE = 2048
ROWS_PER_WAVE = 1024
WAVE_AT_FIRST, WAVE_BELOW = 64, 512
"""Works, and layouts, that are taken up before the limit is looked at again; the first waves are small, and double: what they find
spares the later ones most. Where a limit is known from the begin they are of many, which cost little more together than a few do.
"""
FRAMES_LOOKED_AT, WORKS_LOOKED_AT = 256, (1 << 9, 1 << 13)
"""Frames from the whole order, and works of theirs, a few and then more, among which a layout that fits is looked for first where
any will do.
"""
ROW_WORK = 256
"""What cutting a layout into stages or replaying it costs, in works that are bounded."""
REPLAYED_ROWS = REFINED_ROWS = 16  # rows that are replayed, or cut exactly, before the limit is looked at again


class Search:
    """One search over a problem's space with a cost model; `top` best frames are kept, of layouts faster than `ceiling_s`.

    It ends once `time_limit_s` is over, or work worth `work_limit` works that are bounded is done: the one depends on the machine,
    the other does not.
    """

    def __init__(
        self,
        space: Space,
        model: CostModel,
        top: int = 5,
        time_limit_s: float | None = None,
        ceiling_s: float = np.inf,
        work_limit: float = np.inf,
    ) -> None:
        self.space = space
        self.model = model
        self.top = top
        self.found = Found()
        self._begun = time.monotonic()
        self._deadline = np.inf if time_limit_s is None else self._begun + time_limit_s
        self._work, self._work_limit = 0, work_limit
        self._best: dict[int, Kept] = {}
        self._ceiling_s = ceiling_s
        self._frame_limit_s = np.full(len(space.frames), ceiling_s)
        self._works_per_wave = self._rows_per_wave = WAVE_AT_FIRST if np.isinf(ceiling_s) else WAVE_BELOW
        self._near = KeptNear()
        self._any_cuts_s = np.inf
        self._tight = Tight(model, lambda: self.seconds_left < 0.0)
        self._looked = False
        self._any_will_do = False

    def run(self, progress: Callable[[float], None] | None = None) -> Found:
        """Searches until every layout is scored or cut, or the time limit passes; Ctrl-C ends it like the limit does."""
        found, per_frame = self.found, self.space.layouts_per_frame
        with raised():
            order, bound = self.begin()
        done = 0
        with stoppable() as ended:
            for batch in self._batches(order, per_frame, bound):
                self._score_works(batch)
                if self.out_of_time:
                    break
                done = batch.end
                if progress is not None:
                    progress(done / len(order))
            found.complete = done == len(order) or bool(bound[order[done]] >= self.limit_s)
        if ended.by is not None:
            found.complete = False
            if not self._best:
                raise ended.by
        return self.end(found.complete, float(bound[order[done:]].min(initial=np.inf)))

    def finds_any(self) -> bool:
        """Whether any layout is legal and fits, as far as the time limit lets it look: a search that its first find ends.

        1F1B keeps the fewest micro-batches and shows at once which of its rows memory leaves room for: some of these come first.
        """
        self._any_will_do = True
        order, bound = self.begin()
        for most in WORKS_LOOKED_AT:
            if not self._best:
                self._score_roomy(_spread(order), most)
        batches = self._batches(order, self.space.layouts_per_frame, bound)
        while not self._best and (batch := next(batches, None)) is not None:
            self._score_works(batch)
        self._squeeze()
        return bool(self._best)

    def _score_roomy(self, frames: npt.NDArray[np.intp], most: int) -> None:
        """Scores 1F1B layouts of some works of some frames that memory has room for until one fits."""
        works = self.space.works(frames)
        exact = np.nonzero(partitioned_exactly(self.model.problem, works.table))[0]
        works = works.take(exact[:: 1 + len(exact) // most])
        table, of_work = self.space.layouts_of(works)
        rows, frame = self.model.rows(works.table).spread(table, of_work), frames[works.frame][of_work]
        fits = np.nonzero(row_bounds_bytes(self.model, rows) <= self.model.usable_bytes)[0]
        wave = Wave(rows.take(fits), frame[fits], np.zeros(len(fits)))
        roomy = wave.take(self._reaching(wave))
        for first in range(0, len(roomy.frame), REFINED_ROWS):
            if self._best or self.out_of_time:
                break
            self._looked = True
            self._score(roomy.take(np.arange(first, min(first + REFINED_ROWS, len(roomy.frame)))))

    def begin(self) -> tuple[npt.NDArray[np.intp], Floats]:
        """Counts the space and cuts what cannot fit: the frames that are left by rising bound, and every frame's bound."""
        found, per_frame = self.found, self.space.layouts_per_frame
        found.frames, found.counts.legal = len(self.space.frames), self.space.legal
        bound, fits = frame_bounds(self.model, self.space)
        found.counts.cut_by_memory += int(self.space.legal_per_frame[~fits].sum())
        order = np.argsort(bound, kind="stable")
        order = order[fits[order] & (per_frame[order] > 0)]
        found.frames_bound_s = float(bound[order].min(initial=np.inf))
        return order, bound

    def end(self, complete: bool, open_bound_s: float) -> Found:
        """What was found; `open_bound_s` is the least bound of what was not looked at."""
        found, counts = self.found, self.found.counts
        squeezed = self._squeeze()
        complete = complete and (bool(self._best) or not self._tight.cut_short)
        counts.cut_by_bound = counts.legal - counts.scored - counts.cut_by_memory
        found.best, found.complete = self.best, complete
        best_s = found.best[0].step_time_s if found.best else np.inf
        found.lower_bound_s = best_s if complete else min(best_s, open_bound_s)
        found.any_cuts_bound_s = min(found.lower_bound_s, self._any_cuts_s)
        if squeezed:  # none fits under the cuts that the space has: not all that may fit were cut otherwise
            found.lower_bound_s = found.any_cuts_bound_s
        num_layers = self.model.problem.model.num_layers
        found.near = [each.candidate(num_layers) for each in self._near.nearest(self.limit_s, self._frame_limit_s)]
        found.seconds = time.monotonic() - self._begun
        return found

    def score_frames(self, frames: npt.NDArray[np.intp]) -> None:
        """Scores or cuts every layout of some frames, exactly as a search does; `found.counts` and `best` then hold them."""
        self._score_works(self._promising(frames, 0))

    @property
    def best(self) -> list[Candidate]:
        """The best layouts so far, one of a frame, best first."""
        kept = sorted(self._best.values(), key=lambda kept: kept.step_time_s)[: self.top]
        return [each.candidate(self.model.problem.model.num_layers) for each in kept]

    @property
    def out_of_time(self) -> bool:
        """Whether the time or the work is over, a first look at the most promising layouts apart: however short, that is taken.

        KeyboardInterrupt where an interrupt came and was lost.
        """
        check()
        return self._looked and (self.seconds_left < 0 or self._work > self._work_limit)

    @property
    def _late(self) -> bool:
        """Whether the time is over and something is found: then not even the first look is finished, where a replay takes long."""
        check()
        return bool(self._best) and self.seconds_left < 0

    @property
    def seconds_left(self) -> float:
        """Until the time limit; infinite without one."""
        return self._deadline - time.monotonic()

    @property
    def limit_s(self) -> float:
        """Step time that a layout of a new frame has to beat to be kept; none does where any will do and one is found."""
        if self._any_will_do and self._best:
            return -np.inf
        times = sorted(kept.step_time_s for kept in self._best.values())
        return min(times[self.top - 1], self._ceiling_s) if len(times) >= self.top else self._ceiling_s

    def _limits_s(self, frame: npt.NDArray[np.intp]) -> Floats:
        """Step time that a layout has to beat, by its frame: the frame's own best, or the worst that is kept, (n,)."""
        return np.asarray(np.minimum(self._frame_limit_s[frame], self.limit_s))

    def _batches(self, order: npt.NDArray[np.intp], per_frame: npt.NDArray[np.int64], bound: Floats) -> Iterator[Batch]:
        """The frames in their order, as many together as fit in a batch and may still win; ends where none can."""
        begin, size = 0, ROWS_PER_BATCH
        while begin < len(order) and bound[order[begin]] < self.limit_s and not self.out_of_time:
            sizes = np.cumsum(per_frame[order[begin : begin + 4096]])
            count = max(1, int(np.searchsorted(sizes, size, side="right")))
            hopeful = int((bound[order[begin : begin + count]] < self.limit_s).sum())
            end = begin + max(1, min(count, hopeful))
            yield self._promising(order[begin:end], end)
            begin, size = end, ROWS_AT_MOST

    def _promising(self, frames: npt.NDArray[np.intp], end: int) -> Batch:
        """The works of some frames that can still win and may fit, best bound first; the rest is cut and counted."""
        works = self.space.works(frames)
        self._work += len(works.frame)
        frame = frames[works.frame]
        rows = self.model.rows(works.table)
        bound = work_bounds_s(self.model, rows)
        left = np.nonzero(bound < self._limits_s(frame))[0]
        fits = work_bounds_bytes(self.model, rows.take(left), self.space.sharings) <= self.model.usable_bytes
        self.found.counts.cut_by_memory += int(works.stands_for[left[~fits]].sum())
        left = left[fits]
        left = left[np.argsort(bound[left], kind="stable")]
        return Batch(works, rows, frame, bound, bound, end).take(left)

    def _score_works(self, batch: Batch) -> None:
        """Scores the layouts of a batch that can still win: of a sample of its works first, which spares most of the others."""
        count = len(batch.bound)
        sampled = np.zeros(count, dtype=bool)
        sampled[:: count // WORKS_SAMPLED if count > 4 * WORKS_SAMPLED else 1] = True
        for some in (np.nonzero(sampled)[0], np.nonzero(~sampled)[0]):
            if not self.out_of_time:
                self._score_hopeful(self._hopeful(self._winning(batch.take(some))))
        self._looked = True

    def _hopeful(self, batch: Batch) -> Batch:
        """Those of the works that can still win in one of the ways they are cut, where not exactly, best bound first."""
        ruled = np.nonzero(~partitioned_exactly(self.model.problem, batch.works.table))[0]
        bound = batch.bound.copy()
        bound[ruled] = np.maximum(bound[ruled], ruled_bounds_s(self.model, batch.rows.take(ruled)) / (1.0 + NEAR))
        left = self._winning(replace(batch, bound=bound))
        return left.take(np.argsort(left.bound, kind="stable"))

    def _winning(self, batch: Batch) -> Batch:
        """Those of the works that can still win; what the others would do under other cuts stays open."""
        wins = batch.bound < self._limits_s(batch.frame)
        self._leave_open(batch.any_cuts_bound[~wins])
        return batch.take(np.nonzero(wins)[0])

    def _score_hopeful(self, left: Batch) -> None:
        """Scores the layouts of some works, the most promising first."""
        while len(left.bound) and not self.out_of_time:
            left = self._winning(left)
            now, left = left.take(slice(0, self._works_per_wave)), left.take(slice(self._works_per_wave, None))
            self._score_best_first(*self._layouts_of(now))
            self._looked = True
            self._works_per_wave = min(2 * self._works_per_wave, WORKS_PER_WAVE)

    def _layouts_of(self, batch: Batch) -> tuple[Rows, npt.NDArray[np.intp]]:
        """Every layout of the works, and its frame."""
        table, of_work = self.space.layouts_of(batch.works)
        return batch.rows.spread(table, of_work), batch.frame[of_work]

    def _score_best_first(self, rows: Rows, frame: npt.NDArray[np.intp]) -> None:
        """Bounds some rows with all that is known of them, and scores those that can still win."""
        self._work += len(frame)
        after = least_after(self.model, rows)
        bound = row_bounds_s(self.model, rows, after)
        left = np.nonzero(bound < self._limits_s(frame))[0]
        left = left[np.argsort(bound[left], kind="stable")]
        rows, frame, after, bound = rows.take(left), frame[left], after[left], bound[left]
        fits = row_bounds_bytes(self.model, rows) <= self.model.usable_bytes
        self._cut_by_memory(rows, ~fits)
        exact = partitioned_exactly(self.model.problem, rows.table)
        ruled, some = np.nonzero(fits & ~exact)[0], np.nonzero(fits & exact)[0]
        self._leave_open(bound[fits & (~exact | (rows.lent > 0))])  # what a partner lends is taken to be as its own
        self._replay(Wave(rows, frame, after).take(ruled), bound[ruled])
        while len(some) and not self.out_of_time:
            now, some = some[: self._rows_per_wave], some[self._rows_per_wave :]
            now = now[bound[now] < self._limits_s(frame[now])]
            self._score(Wave(rows, frame, after).take(now))
            self._rows_per_wave = min(2 * self._rows_per_wave, ROWS_PER_WAVE)

    def _score(self, wave: Wave) -> None:
        """Cuts 1F1B rows into stages, prices them and keeps the best of each frame."""
        self._work += ROW_WORK * len(wave.frame)
        groups = same_shaped(wave.rows.known().table, self._reaching(wave), depth=True)
        self._refine([self._least(wave.take(group)) for group in groups])

    def _reaching(self, wave: Wave) -> npt.NDArray[np.intp]:
        """Those of the rows whose blocks can be dealt to stages within memory and within their limit's work.

        A row without a limit that they cannot be dealt to is cut by memory.
        """
        limits_s = self._limits_s(wave.frame)
        work_s = most_work_s(wave.rows, wave.after, limits_s - self._overhead_s)
        fits = reachable(self.model, wave.rows, work_s, self.model.usable_bytes)
        self._cut_by_memory(wave.rows, ~fits & np.isinf(limits_s))
        return np.nonzero(fits)[0]

    def _least(self, part: Wave) -> tuple[Wave, Partition]:
        """Those of the rows that some partition keeps under their limit for all that single stages ask, and that partition."""
        limits_s = self._partition_limits_s(part.frame)
        least = least_partitions(self.model, part.rows, limits_s, self.model.usable_bytes)
        found = np.isfinite(least.time_s)
        self._cut_by_memory(part.rows, ~found & ~np.isfinite(limits_s))
        return part.take(np.nonzero(found)[0]), least.take(np.nonzero(found)[0])

    def _refine(self, waiting: list[tuple[Wave, Partition]]) -> None:
        """Best partition of each row, kept where it beats its limit: first those of which the least is asked."""
        sizes = [len(least.time_s) for _, least in waiting]
        group, row = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(0), *(np.arange(size) for size in sizes)])
        asked_s = np.concatenate([np.empty(0), *(least.time_s for _, least in waiting)])
        frame = np.concatenate([np.empty(0, dtype=np.intp), *(part.frame for part, _ in waiting)])
        order = np.argsort(asked_s, kind="stable")
        while len(order):
            order = order[asked_s[order] <= self._partition_limits_s(frame[order])]
            now, order = order[:REFINED_ROWS], order[REFINED_ROWS:]
            for which in np.unique(group[now]).tolist():
                members = row[now[group[now] == which]]
                part, least = waiting[which][0].take(members), waiting[which][1].take(members)
                limits_s = self._partition_limits_s(part.frame)
                best = refined(self.model, part.rows, least, limits_s, self.model.usable_bytes)
                self.found.counts.scored += int(np.isfinite(best.time_s).sum())
                self._leave_open(least.time_s + self._overhead_s)
                self._cut_by_memory(part.rows, ~np.isfinite(best.time_s) & ~np.isfinite(limits_s))
                self._keep(part, best.cuts, best.time_s + self._overhead_s)

    def _leave_open(self, bound: Floats) -> None:
        """Notes what no cuts can beat of rows of which only some were looked at."""
        self._any_cuts_s = min(self._any_cuts_s, float(bound.min(initial=np.inf)))

    def _partition_limits_s(self, frame: npt.NDArray[np.intp]) -> Floats:
        """Limits of partitions, whose times are without the step's overhead, (n,).

        A row that set its own limit is scored like any other: rounding must not leave it out.
        """
        return self._limits_s(frame) * (1.0 + EQUAL) - self._overhead_s

    def _replay(self, wave: Wave, bound: Floats) -> None:
        """Rows that are not cut exactly, with what no cuts of theirs beat: priced from below first, replayed only while that can
        still win.
        """
        ways = self._priced_below(wave.rows.known(), wave.after)
        below = ways.below_s.min(axis=1)
        self._cut_tight(wave, bound, np.isinf(below))
        self._near.note(wave, bound, ways, self.limit_s)
        order = np.argsort(below, kind="stable")
        while len(order):
            limits_s = self._limits_s(wave.frame[order]) * (1.0 + EQUAL)  # a row that set its own limit is scored like any other
            order = order[below[order] < np.minimum(limits_s, np.finfo(float).max)]
            now, order = order[:REPLAYED_ROWS], order[REPLAYED_ROWS:]
            for some in same_shaped(wave.rows.table, now, depth=False):
                self._replay_some(wave.take(some), bound[some], ways.take(some))
            if self._late:
                break

    def _priced_below(self, rows: Rows, after: Floats) -> Ways:
        """Every row's ways to be cut, with their step times from below, infinite where they do not fit."""
        found = Ways(np.full((len(rows), 1), np.inf), np.empty(len(rows), dtype=object))
        for members in same_shaped(rows.table, np.arange(len(rows)), depth=False):
            for begin in range(0, len(members), ROWS_PER_WAVE):
                some = members[begin : begin + ROWS_PER_WAVE]
                part = rows.take(some)
                family = cut_family(self.model, part)
                if by_replay(part):  # these have no closed form, and their memory is read off the replay too
                    least_s = np.maximum(ruled_bounds_s(self.model, part), row_bounds_s(self.model, part, after[some]))
                    below_s = np.broadcast_to(least_s[:, None], family.shape[:2])
                else:
                    below_s = fitting_family_s(self.model, part, family, self.limit_s * (1.0 + NEAR))
                found = found.with_rows(some, below_s, family)
        return found

    def _replay_some(self, part: Wave, bound: Floats, ways: Ways) -> None:
        """Prices rows of one shape under those of their ways that can still win, counts them, and keeps the best of each frame."""
        limits_s = self._limits_s(part.frame) * (1.0 + EQUAL)
        row, way = np.nonzero(ways.below_s < np.minimum(limits_s, np.finfo(float).max)[:, None])
        if not len(row):
            return
        self._work += ROW_WORK * len(row)
        cuts = np.stack([ways.cuts[each][which] for each, which in zip(row, way, strict=True)])
        priced = self.model.price_cuts(part.rows.take(row), cuts)
        step_time_s = np.full(ways.below_s.shape, np.inf)
        step_time_s[row, way] = np.where(priced.fits, priced.step_time_s, np.inf)
        best = step_time_s.argmin(axis=1)
        best_s = step_time_s[np.arange(len(best)), best]
        fits, tried = np.isfinite(best_s), np.bincount(row, minlength=len(best)) == np.isfinite(ways.below_s).sum(axis=1)
        self.found.counts.scored += int(fits.sum())
        self._cut_tight(part, bound, tried & ~fits)
        self._keep(part, np.stack([cuts[which] for cuts, which in zip(ways.cuts, best, strict=True)]), best_s)

    def _cut_by_memory(self, rows: Rows, cut: Bools) -> None:
        """Counts rows of which no partition fits, with every setting of their overlap switches."""
        if cut.any():
            self.found.counts.cut_by_memory += int(self.space.variants(rows.table.take(cut)).sum())

    def _cut_tight(self, wave: Wave, bound: Floats, cut: Bools) -> None:
        """Counts rows that fit under no cuts that are looked at, and sets those apart that may under others."""
        self._cut_by_memory(wave.rows, cut)
        some = np.nonzero(cut & (bound < self._limits_s(wave.frame)))[0]
        if len(some):
            self._tight.add(wave.rows.take(some), wave.frame[some], bound[some])

    def _squeeze(self) -> bool:
        """Cuts rows that are set apart so that they fit, where they may still win, and tells whether no others do.

        Beside others they are near the best: which of these are the fastest shows when both are cut anew.
        """
        alone = not self._best
        for part in self._tight.squeezed(self._limits_s):
            wave, each = Wave(part.rows, part.frame, np.zeros(len(part.frame))), np.empty(len(part.frame), dtype=object)
            each[:] = list(part.cuts[:, None])
            ways = Ways(part.step_s[:, None], each)
            self.found.counts.cut_by_memory -= int(self.space.variants(part.rows.table).sum())
            if alone:
                self._replay_some(wave, part.bound, ways)
            self._near.note(wave, part.bound, ways, self.limit_s)
            if self.out_of_time:
                break
        return alone and bool(self._best)

    @property
    def _overhead_s(self) -> float:
        return self.model.problem.stack.step_overhead_s.value

    def _keep(self, part: Wave, cuts: Cuts, step_time_s: Floats) -> None:
        """Keeps the best row of each frame where it beats the frame's own; infinite times stand for rows that do not fit."""
        better = np.nonzero(step_time_s * (1.0 + EQUAL) < self._frame_limit_s[part.frame])[0]
        better = better[np.argsort(step_time_s[better], kind="stable")]
        _, first = np.unique(part.frame[better], return_index=True)
        for row in better[first].tolist():
            frame, seconds = int(part.frame[row]), float(step_time_s[row])
            self._frame_limit_s[frame] = seconds
            self._best[frame] = part.kept(row, cuts[row], seconds)


def unsearched(space: Space, model: CostModel) -> Found:
    """What is known of a space whose search an interrupt ended before it found anything: the bounds of its frames, and where that
    is interrupted too nothing.
    """
    search = Search(space, model)
    with stoppable():
        search.begin()
    search.end(False, search.found.frames_bound_s)
    return search.found


def _spread(order: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Some frames of an order, the closer together the earlier they come, all of a short one."""
    if len(order) <= FRAMES_LOOKED_AT:
        return order
    return order[np.unique((np.linspace(0.0, 1.0, FRAMES_LOOKED_AT) ** 2 * (len(order) - 1)).astype(np.int64))]

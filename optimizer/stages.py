"""Layers to stages: the exact contiguous partition of a layout's blocks, under every stage's memory.

What a stage asks of the step at least (`stage_paths_s` and what stands around it) depends on its own two cuts only, once the total
work is known; so does its peak memory. The partition of which the largest of these is least is then a min–max path through (stage,
cut), found exactly by dynamic programming for many rows at once. The step itself couples all stages (`one_f_one_b`): partitions are
priced from there on. Interleaved chunks lie apart; the fastest of a family of cuts is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cost_models.lending import held_in_flight
from ..cost_models.loads import Cuts, Loads
from ..cost_models.pieces import Pieces
from ..cost_models.rows import Rows
from ..cost_models.schedules import INTERLEAVED, MIRRORED
from ..cost_models.stage_times import Kept
from ..cost_models.step import CostModel, moved_share
from ..search_spaces.cutting import Cutting
from ..search_spaces.layout import SCHEDULES, Bools, Floats, Ints, LayoutTable, Problem
from ..search_spaces.quantities import led_layers
from .families import end_cuts, layer_cuts
from .family_prices import price_family
from .known_cuts import KnownCuts
from .mirrored import fitting_cuts, mirrored_cuts

EQUAL = 1e-9
"""Relative difference of step times below which two layouts count as equally fast."""
ROUNDING = 1e-12
"""Relative slack of a test that only tells what cannot be."""
CELLS_AT_ONCE = 1 << 15
"""Values of one array of stages, cuts and lengths that are worked on together: enough to spare calls, few enough for the cache."""


@dataclass(frozen=True)
class Partition:
    """Partition of each row: cuts (n, pp+1), its step without fixed overhead (inf where none fits) and its peak bytes, (n,)."""

    cuts: Cuts
    time_s: Floats
    peak_bytes: Floats

    def take(self, rows: npt.NDArray[np.intp]) -> Partition:
        return Partition(self.cuts[rows], self.time_s[rows], self.peak_bytes[rows])

    def replaced(self, rows: npt.NDArray[np.intp], by: Partition) -> Partition:
        """With other partitions of some rows."""
        cuts, time_s, peak_bytes = self.cuts.copy(), self.time_s.copy(), self.peak_bytes.copy()
        cuts[rows], time_s[rows], peak_bytes[rows] = by.cuts, by.time_s, by.peak_bytes
        return Partition(cuts, time_s, peak_bytes)

    def with_faster(self, other: Partition) -> Partition:
        """Each row's faster one."""
        rows = np.nonzero(other.time_s < self.time_s * (1.0 - EQUAL))[0]
        return self.replaced(rows, other.take(rows))


def best_partitions(model: CostModel, rows: Rows, limit_s: Floats, ceiling_bytes: float) -> Partition:
    """Partitions of 1F1B rows that share pp and recompute depth: the faster of `least_partitions` and the balanced one, and from
    there one cut at a time moved by one block to where that is fastest, as long as it helps.

    Rows that cannot stay under their `limit_s` (n,), or of which no stage may pass `ceiling_bytes`, come back with infinite time.
    What comes back does not depend on the limit.
    """
    least = least_partitions(model, rows, limit_s, ceiling_bytes)
    left = np.nonzero(np.isfinite(least.time_s))[0]
    if not len(left):
        return least
    return least.replaced(left, refined(model, rows.take(left), least.take(left), limit_s[left], ceiling_bytes))


def refined(model: CostModel, rows: Rows, least: Partition, limit_s: Floats, ceiling_bytes: float) -> Partition:
    """The second half of `best_partitions`: what `least_partitions` leads to."""
    start = _priced(model, rows, least.cuts, ceiling_bytes)
    balanced = _priced(model, rows, balanced_cuts(model, rows, least.cuts.shape[1] - 1), ceiling_bytes)
    best = _descended(model, rows, start.with_faster(balanced), ceiling_bytes)
    under = best.time_s <= limit_s
    return Partition(best.cuts, np.where(under, best.time_s, np.inf), np.where(under, best.peak_bytes, np.inf))


def _descended(model: CostModel, rows: Rows, start: Partition, ceiling_bytes: float) -> Partition:
    """The partitions that single moves of cuts lead to; each round takes every row's best move."""
    pp = start.cuts.shape[1] - 1
    cutting = cutting_of(model, pp, 1)
    inner = np.arange(1, pp)
    moves = np.zeros((2 * len(inner), pp + 1), dtype=np.int64)
    moves[np.arange(len(moves)), np.tile(inner, 2)] = np.repeat([-1, 1], len(inner))
    best, going = start, np.arange(len(rows) if len(inner) else 0)
    while len(going):
        tried = (best.cuts[going][:, None, :] + moves).reshape(-1, pp + 1)
        owner = np.repeat(going, len(moves))
        legal = cutting.legal(tried)
        tried, owner = tried[legal], owner[legal]
        if len(owner):
            hopeful = _least_s(model, rows.take(owner), tried) < best.time_s[owner]
            tried, owner = tried[hopeful], owner[hopeful]
        if not len(owner):
            break
        priced = _priced(model, rows.take(owner), tried, ceiling_bytes)
        better = np.nonzero(priced.time_s < best.time_s[owner] * (1.0 - EQUAL))[0]
        better = better[np.argsort(priced.time_s[better], kind="stable")]
        going, first = np.unique(owner[better], return_index=True)
        best = best.replaced(going, priced.take(better[first]))
    return best


def _least_s(model: CostModel, rows: Rows, cuts: Cuts) -> Floats:
    """What the stage that asks most asks of the step at these cuts, (n,): never above the step, and cheap."""
    load, pp = rows.chunks(cuts), cuts.shape[1] - 1
    before = tuple(np.cumsum(each, axis=1) - each for each in (load.forward_s, load.backward_s))
    total_s = (load.forward_s + load.backward_s).sum(axis=1, keepdims=True)
    kept = model.kept(rows, load)
    after_s = kept.stepped_s.max(axis=1, keepdims=True)
    each_s = model.least_stage_time_s(rows, load, kept, (before[0], before[1]), total_s, after_s, np.arange(pp))
    return np.asarray(each_s.max(axis=1))


def _priced(model: CostModel, rows: Rows, cuts: Cuts, ceiling_bytes: float) -> Partition:
    """The rows at these cuts; infinite time where a stage passes the ceiling or its host's memory."""
    chunks = rows.chunks(cuts)
    peak = model.stage_bytes(rows, chunks).max(axis=1)
    fits = (peak <= ceiling_bytes) & (model.away_bytes(rows, chunks).max(axis=1) <= model.host_limit_bytes)
    time_s = model.around_pipeline(rows, model.run_flow(rows, chunks)).total_s
    return Partition(cuts, np.where(fits, time_s, np.inf), peak)


def least_partitions(model: CostModel, rows: Rows, limit_s: Floats, ceiling_bytes: float) -> Partition:
    """Partitions of which the stage that asks most of the step asks least; `time_s` is what it asks, below the step's price.

    Stages that ask for more than the row's `limit_s` (n,) or whose peak passes `ceiling_bytes` are left out, so a row that cannot
    stay under its limit comes back with infinite time. Work grows with rows × blocks × the longest stage that can still win.
    """
    pp, blocks, n = int(rows.table.pp[0]), len(model.blocks), len(rows)
    least_blocks = cutting_of(model, pp, 1).least
    longest = min(_longest_stage(rows, limit_s), blocks - int(least_blocks.sum()) + 1)
    best = np.full((n, blocks + 1), np.inf)
    best[:, 0] = -np.inf
    came, peak_at = np.zeros((pp, n, blocks + 1), dtype=np.int64), np.zeros((pp, n, blocks + 1))
    for stage, (first, time_s, peak) in enumerate(_Stages(model, rows, pp, longest).each(limit_s, ceiling_bytes)):
        best, came[stage], peak_at[stage] = _relax(best, first, time_s, peak, int(least_blocks[stage]))
        best[:, : max(0, blocks - (pp - 1 - stage) * longest)] = np.inf  # what is left is too much for the stages that follow
        if not np.isfinite(best).any():
            return Partition(np.full((n, pp + 1), blocks), np.full(n, np.inf), np.full(n, np.inf))
    cuts, peak_bytes, each = np.full((n, pp + 1), blocks), np.zeros(n), np.arange(n)
    for stage in reversed(range(pp)):
        end = cuts[:, stage + 1]
        peak_bytes = np.maximum(peak_bytes, peak_at[stage][each, end])
        cuts[:, stage] = end - came[stage][each, end]
    found = np.isfinite(best[:, blocks])
    return Partition(cuts, best[:, blocks], np.where(found, peak_bytes, np.inf))


def balanced_cuts(model: CostModel, rows: Rows, chunks: int, weights: tuple[float, ...] = ()) -> Cuts:
    """Cuts (n, chunks+1) nearest to equal work per chunk, or to work by `weights` of mean 1, embedding and head in, recompute out,
    within what is legal.
    """
    pp, _, _ = rows.shape
    cutting, blocks = cutting_of(model, pp, chunks // pp), rows.pieces.blocks
    used, place = np.unique(rows.factor, return_inverse=True)
    each = [rows.pieces.pieces[name].work_s[used] for name in (*rows.pieces.names, "embedding", "head")]
    work_s = np.stack(each, axis=1)
    weights = weights or (1.0,) * chunks
    return _KNOWN.of((cutting, blocks, weights), work_s, lambda new: _balanced(rows.pieces, work_s[new], cutting, weights))[place]


_KNOWN = KnownCuts()


def _balanced(pieces: Pieces, each_s: Floats, cutting: Cutting, weights: tuple[float, ...]) -> Cuts:
    """The same of rows (n, pieces) of what a layer of each kind, the embedding and the head work."""
    embedding_s, head_s = each_s[:, -2], each_s[:, -1]
    layers_s = (pieces.running[name] * each_s[:, [kind]] for kind, name in enumerate(pieces.names))
    work_s = np.asarray(embedding_s[:, None] + sum(layers_s))
    return _cut_at(work_s, (work_s[:, -1] + head_s)[:, None] * np.cumsum(weights)[:-1] / cutting.chunks, cutting)


def _cut_at(work_s: Floats, goal_s: Floats, cutting: Cutting) -> Cuts:
    """Legal cuts (n, chunks+1) nearest to where the work until each block comes to `goal_s` (n, chunks−1)."""
    chunks, ends = cutting.chunks, np.zeros((len(work_s), 1), dtype=np.int64)
    cuts = np.concatenate([ends, _nearest(work_s, goal_s), ends + cutting.blocks], axis=1)
    held = np.cumsum(cutting.least) - cutting.least  # every chunk keeps what it must hold, and leaves as much for each that follows
    first = np.array([cutting.earliest(chunk) for chunk in range(chunks)])
    wanted = np.maximum.accumulate(np.maximum(cuts[:, :-1], first) - held, axis=1) + held
    cuts[:, 1:-2] = np.minimum(wanted, cutting.latest)[:, 1:-1]
    if chunks > 1:
        after = np.maximum(np.maximum(cuts[:, -2], first[-1]), cuts[:, -3] + cutting.least[-2])
        cuts[:, -2] = np.maximum(np.minimum(after, cutting.latest[-1]), cuts[:, -3])
    if chunks > 1:  # the last one begins before the MTP layers, or behind them
        between = ~cutting.begins(chunks - 1)[cuts[:, -2]]
        before = cuts[:, -3] + cutting.least[-2] <= cutting.last_start
        cuts[:, -2] = np.where(between, np.where(before, cutting.last_start, cutting.blocks), cuts[:, -2])
    return cuts


def _nearest(values: Floats, goal: Floats) -> Ints:
    """Where each row's rising values (n, values) come nearest to each of its goals (n, goals), the first of equals."""
    row = np.arange(len(values))[:, None]
    flat = (values / values[:, -1:] + 2 * row).ravel()  # rows one after the other: one search does for all
    place = flat.searchsorted((goal / values[:, -1:] + 2 * row).ravel()).reshape(goal.shape) - values.shape[1] * row
    around = np.clip(place[:, None, :] + np.arange(-2, 2)[:, None], 0, values.shape[1] - 1)
    distance = np.abs(values[row[:, :, None], around] - goal[:, None, :])
    return np.asarray(np.take_along_axis(around, distance.argmin(axis=1)[:, None], axis=1)[:, 0])


def even_cuts(blocks: int, mtp: int, chunks: int) -> Cuts:
    """The split of a framework that cannot be told one: equal decoder layers per chunk, MTP with the last."""
    layers = blocks - mtp
    cuts = np.arange(chunks + 1) * (layers // chunks)
    cuts[-1] = blocks
    return cuts


def cut_family(model: CostModel, rows: Rows) -> Cuts:
    """The ways to cut rows of one shape that the search looks at where it does not cut exactly, (n, ways, pp·vpp+1): `cut_rules`,
    and where stages hold mirror images `mirrored_cuts` that fit.
    """
    (pp, vpp, schedule), family = rows.shape, roomy_family(model, rows)
    if schedule in MIRRORED and model.problem.stack.cuts_freely(vpp):
        family[:, 1] = fitting_cuts(model, rows, cutting_of(model, pp, vpp), family[:, 0], family[:, 1])
    return family


def roomy_family(model: CostModel, rows: Rows) -> Cuts:
    """The same where memory does not matter: none of these cuts is slower than that in its place."""
    (pp, vpp, schedule), (ruled, counted) = rows.shape, cut_rules(model, rows)
    if schedule in MIRRORED and model.problem.stack.cuts_freely(vpp):
        return np.stack([ruled, mirrored_cuts(rows, cutting_of(model, pp, vpp), ruled)], axis=1)
    return np.concatenate([ruled[:, None], np.broadcast_to(counted, (len(rows), *counted.shape))], axis=1)


def cut_rules(model: CostModel, rows: Rows) -> tuple[Cuts, Cuts]:
    """The same as the first way of each row, (n, pp·vpp+1), and those that are all rows', (ways−1, pp·vpp+1).

    One way for stacks that cannot be told any: equal chunks; all `end_cuts` for those that are told of the first and last stage;
    else that of equal work, and for interleaved chunks `layer_cuts`.
    """
    pp, vpp, schedule = rows.shape
    none, stack = np.empty((0, pp * vpp + 1), dtype=np.int64), model.problem.stack
    if not stack.cuts_freely(vpp):
        even = even_cuts(len(model.blocks), model.layers.heads - 1, pp * vpp)[None]
        ends = end_cuts(cutting_of(model, pp, vpp)) if stack.sets_ends_apart and schedule not in MIRRORED else none
        first, *_ = ways = ends if len(ends) else even
        return np.tile(first, (len(rows), 1)), np.asarray(ways[1:])
    return balanced_cuts(model, rows, pp * vpp), layer_cuts(cutting_of(model, pp, vpp)) if schedule == INTERLEAVED else none


def default_cuts(model: CostModel, rows: Rows, ceilings_bytes: Sequence[float] = ()) -> Cuts:
    """Cuts that the search would give rows of one shape, (n, pp·vpp+1); 1F1B rows share their recompute depth.

    The fastest of `cut_family`, of 1F1B `best_partitions`, that stay below the first of the ceilings that any does: without
    ceilings what devices have for interleaved chunks, and no limit for 1F1B.
    """
    if not partitioned_exactly(model.problem, rows.table).all():
        return _fastest_of(model, rows, cut_family(model, rows), ceilings_bytes or (model.usable_bytes,))
    unlimited = np.full(len(rows), np.inf)
    found = best_partitions(model, rows, unlimited, np.inf).cuts
    for ceiling in reversed(ceilings_bytes):
        under = best_partitions(model, rows, unlimited, ceiling)
        found = np.where(np.isfinite(under.time_s)[:, None], under.cuts, found)
    return found


def _fastest_of(model: CostModel, rows: Rows, family: Cuts, ceilings_bytes: Sequence[float]) -> Cuts:
    """The fastest cuts of every row's family (n, ways, ·) that stay below the first of the ceilings that any does, (n, ·).

    What the paths in closed form show to be slower is not replayed.
    """
    n, ways, _ = family.shape
    if ways == 1:
        return family[:, 0]
    priced = price_family(model, rows, family)
    over = ((priced.peak_bytes[:, None] > np.array(ceilings_bytes)).sum(axis=1) + ~priced.fits).reshape(n, ways)
    below = np.where(over == over.min(axis=1, keepdims=True), priced.step_time_s.reshape(n, ways), np.inf)
    order, each = np.argsort(below, axis=1, kind="stable"), np.arange(n)
    best_s, chosen = np.full(n, np.inf), order[:, 0].copy()
    for way in order.T:
        hopeful = np.nonzero(below[each, way] < best_s)[0]
        if not len(hopeful):
            break
        step_s = model.price_cuts(rows.take(hopeful), family[hopeful, way[hopeful]]).step_time_s
        better = step_s < best_s[hopeful] * (1.0 - EQUAL)
        best_s[hopeful[better]], chosen[hopeful[better]] = step_s[better], way[hopeful[better]]
    return np.asarray(family[each, chosen])


def partitioned_exactly(problem: Problem, table: LayoutTable) -> Bools:
    """Which rows are cut by `best_partitions`, (n,): plain 1F1B on stacks that can be told where to cut."""
    free = problem.stack.cuts_freely(1)
    return np.asarray((table.schedule == SCHEDULES.index("1f1b")) & free)


def cutting_of(model: CostModel, pp: int, vpp: int) -> Cutting:
    """Where a model's blocks may be cut."""
    problem, layers = model.problem, model.problem.model.num_layers
    return Cutting.of(problem.stack, layers, len(model.blocks) - layers, pp, vpp, led_layers(problem.model, problem.stack))


class _Stages:
    """Times and peaks of every stage a row could have: first cut c and length l, (n, starts, longest+1).

    What a stage holds is the same wherever it stands but for embedding and head, so that those in the middle are worked out
    several at once, as many as fill the cache; and only for cuts that leave something for every other stage, none too much.
    """

    def __init__(self, model: CostModel, rows: Rows, pp: int, longest: int) -> None:
        self._model, self._rows, self._pp = model, rows, pp
        self._micro_batches = rows.table.num_microbatches[:, None, None, None]
        self._longest, self._cutting = longest, cutting_of(model, pp, 1)
        self._lent = rows.lent[:, None, None, None]
        moves = rows.column("activation_offload").any() and not self._lent.any()
        self._moved = moved_share(rows)[:, None, None, None] if moves else None
        blocks, stage = rows.prefix.blocks, np.arange(pp)
        self._stop = np.minimum(np.arange(blocks + 1)[:, None] + np.arange(longest + 1), blocks)
        depth = int(rows.prefix.depth[0])
        self._depth = depth if depth < blocks else 0  # 0 where the work of other stages does not hang on their cuts
        self._after_all_s = self._mean_after_s()
        self._least_again_s = np.diff(rows.prefix.recompute_s, axis=1).min(axis=1)[:, None, None, None]
        held = np.cumsum(self._cutting.least) - self._cutting.least
        self._first = np.clip(np.maximum(held, blocks - (pp - stage) * longest), 0, blocks)
        self._behind = np.maximum(np.minimum(self._cutting.latest, stage * longest) + 1, self._first)

    def each(self, limit_s: Floats, ceiling_bytes: float) -> Iterator[tuple[int, Floats, Floats]]:
        """Stage by stage its first start, from there the least time (`CostModel.least_stage_time_s`) and the peak bytes; infinite
        time beyond the limits.
        """
        last = self._pp - 1
        for some in [slice(0, 1), slice(1, last), slice(last, self._pp)] if last else [slice(0, 1)]:
            stages = np.arange(self._pp)[some]
            if len(stages):
                first, grid = int(self._first[some].min()), self._grid(int(stages[0]), self._starts(stages))
            while len(stages):
                at_once = max(1, CELLS_AT_ONCE // max(1, len(self._rows) * len(self._starts(stages[:1])) * self._stop.shape[1]))
                now, stages = stages[:at_once], stages[at_once:]
                starts = self._starts(now)
                held = slice(starts[0] - first, starts[0] - first + len(starts)) if len(starts) else slice(0, 0)
                time_s, peak = self._at(now, starts, grid.of(held))
                time_s = np.where((peak <= ceiling_bytes) & (time_s <= limit_s[:, None, None, None]), time_s, np.inf)
                for place, stage in enumerate(now.tolist()):
                    time_s[:, place, ~self._cutting.begins(stage)[starts]] = np.inf
                    yield int(starts[0]) if len(starts) else 0, time_s[:, place], peak[:, place]

    def _starts(self, stages: Ints) -> Ints:
        """The cuts that some of these stages can begin at."""
        return np.arange(self._first[stages].min(), self._behind[stages].max())

    def _at(self, stages: Ints, starts: Ints, grid: _Grid) -> tuple[Floats, Floats]:
        """Least times and peak bytes of stages (k,) that hold alike for every (c, l), (n, k, starts, longest+1)."""
        prefix, stage, load = self._rows.prefix, stages[:, None, None], grid.load
        before = prefix.before_grid(int(stages[0]), np.zeros(len(self._rows)))
        before_f, before_b = (each[:, None, starts] for each in before)
        total_s = self._rows.total_s(self._pp)[:, None, None, None]
        if self._depth:
            before_b = before_b + self._redone_s(stage, starts[:, None])
            total_s = before_f + before_b + load.forward_s + load.backward_s + self._after_s(stage, self._stop[starts])
        beside = before_f, before_b
        time_s = self._model.least_stage_time_s(self._rows, load, grid.kept, beside, total_s, self._after_all_s, stage)
        saved = load.saved_bytes * held_in_flight(self._pp, self._micro_batches, stage, self._lent)
        if self._moved is not None:
            time_s = np.where(grid.host + saved * self._moved <= self._model.host_limit_bytes, time_s, np.inf)
        return time_s, grid.fixed + saved

    def _mean_after_s(self) -> Floats:
        """What follows the gradients on the mean stage, whatever is hidden, (n, 1, 1, 1): it is linear in what stages hold."""
        prefix, none = self._rows.prefix, np.zeros((len(self._rows), 1, 1, 1))
        dense = (prefix.dense[:, -1] + prefix.embedding.dense + prefix.head.dense)[:, None, None, None] / self._pp
        mean = Loads(none, none, dense, prefix.expert[:, -1:, None, None] / self._pp, none)
        return self._model.kept(self._rows, mean).stepped_s

    def _after_s(self, stage: Ints, stop: Ints) -> Floats:
        """Work of the stages behind those (k, 1, 1) that `stop` at (c, l), at least, (n, k, c, l)."""
        if stage[-1] == self._pp - 1:
            return np.zeros(1)
        prefix = self._rows.prefix
        left = (prefix.forward_s + prefix.backward_s)[:, -1:] - (prefix.forward_s + prefix.backward_s)
        left = left + (prefix.head.forward_s + prefix.head.backward_s)[:, None]
        return np.asarray(left[:, None, stop] + self._redone_s(self._pp - 1 - stage, prefix.blocks - stop))

    def _redone_s(self, stages: Ints, blocks: Ints) -> Floats:
        """Recompute of so many blocks (c, l) on so many other stages (k, 1, 1) at block depth K, at least, (n, k, c, l).

        Each stage redoes its first K: it has one at least, if it is not a bare end, and one may hold all the others.
        """
        most = np.where(stages > 0, self._depth + np.maximum(stages - 1 - any(self._cutting.bare), 0), 0)
        return np.asarray(self._least_again_s * np.minimum(blocks, most))

    def _grid(self, stage: int, starts: Ints) -> _Grid:
        load = self._rows.prefix.grid(stage, self._pp, self._longest, starts).across()
        fixed = self._model.peaks_at(self._rows, load, np.zeros(1), np.asarray(stage == self._pp - 1)).sum(axis=0)
        host = self._model.host_bytes(self._rows, load)
        fixed = np.where(host <= self._model.host_limit_bytes, fixed, np.inf)
        return _Grid(load, fixed, host, self._model.kept(self._rows, load))


@dataclass(frozen=True)
class _Grid:
    """What a stage holds for every (c, l), its peak bytes but for activations, its states on the host, and what it does for states,
    (n, 1, c, l).
    """

    load: Loads
    fixed: Floats
    host: Floats
    kept: Kept

    def of(self, starts: slice) -> _Grid:
        """The same for some of the cuts."""
        return _Grid(self.load.begun(starts), self.fixed[:, :, starts], self.host[:, :, starts], self.kept.begun(starts))


def _relax(best: Floats, first: int, time_s: Floats, peak: Floats, shortest: int) -> tuple[Floats, Ints, Floats]:
    """One stage of the min–max recursion: best[c'] = min over l of max(best[c'−l], time[c'−l, l]); also l and the stage's peak.

    `time_s` and `peak` (n, starts, lengths) are of cuts from `first` on.
    """
    (n, width), (_, starts, lengths) = best.shape, time_s.shape
    value = np.full((n, width), np.inf)
    length, held = np.zeros((n, width), dtype=np.int64), np.zeros((n, width))
    for l in range(shortest, min(lengths, width - first)):  # noqa: E741  (l is the stage's length, as in the recursion)
        count = min(starts, width - first - l)
        start, end = slice(first, first + count), slice(first + l, first + l + count)
        candidate = np.maximum(best[:, start], time_s[:, :count, l])
        better = candidate < value[:, end]
        np.copyto(value[:, end], candidate, where=better)
        np.copyto(length[:, end], l, where=better)
        np.copyto(held[:, end], peak[:, :count, l], where=better)
    return value, length, held


def _longest_stage(rows: Rows, limit_s: Floats) -> int:
    """Most blocks that a stage can hold and stay within the limit for any row; all when there is no limit."""
    blocks = rows.prefix.blocks
    work = (rows.prefix.forward_s + rows.prefix.backward_s) * rows.table.num_microbatches[:, None]
    for length in range(1, blocks):
        if ((work[:, length + 1 :] - work[:, : -length - 1]).min(axis=1) > limit_s).all():
            return length
    return blocks

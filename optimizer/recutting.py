"""A layout's chunks cut again: downhill by its price, and what no other way to cut them could beat, by cutting planes.

The search cuts chunks by the fastest of a family and redoes as many layers in each, so that its proof covers all layouts alike;
the best that it finds are then cut here as well as can be. Where a stack is told how many layers each chunk redoes, stages that
keep few micro-batches in flight redo fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.lending import is_lent
from ..cost_models.rows import Rows
from ..cost_models.schedules import WHOLE
from ..cost_models.split_passes import by_replay
from ..cost_models.step import CostModel
from ..search_spaces.layout import FULL_BLOCK, NONE, Layout, LayoutTable, Problem, Recompute, Split
from ..search_spaces.rules import violations
from .bounds import least_after, row_bounds_s
from .chunk_costs import chunking_of, counts_of
from .chunks import Chunks, best_chunks
from .deadline import Deadline
from .found import Candidate, Found
from .interrupts import stoppable
from .near_best import NearBest
from .stages import EQUAL, least_partitions, partitioned_exactly
from .walks import Walk, cut_freely, ends, fitting_s, split_of, with_split

PROOF_SECONDS = 0.1
"""Deterministic seconds that CP-SAT may look for better ways to cut a plan's layout, and to bound them, all calls together."""
DEPTH_SECONDS = 0.5
"""The same for the depths of its chunks, of all layouts that are kept together, where each chunk has its own."""
SETTLED = 1e-4
"""Share of the step that other cuts may gain at most where no pairs of moves are tried any more."""
TIGHTENED = 3
"""Times that CP-SAT is given less memory where what it found turns out to need more than it counted."""
DEPTHS_CHANGED = 64
"""Times at most that a chunk's depth of recompute is made less where that is faster and fits."""


@dataclass(frozen=True)
class Recut:
    """A layout with its best known cuts, its step, and the step that no cuts of it can beat."""

    layout: Layout
    step_time_s: float
    bound_s: float
    rounds: int

    @property
    def gap(self) -> float:
        """How much shorter the step could be with other cuts, at most, as a share of the bound."""
        return self.step_time_s / self.bound_s - 1.0


def proved(model: CostModel, layout: Layout, seconds: float = PROOF_SECONDS, bounded: bool = True) -> Recut:
    """The layout with the best cuts that CP-SAT finds in `seconds` of its time, at least as good as its own, and a bound.

    Where `redoes_by_chunk` holds, cuts and bound are over every chunk's depth of recompute too. Unless `bounded` no time goes into
    the bound of those.
    """
    rows = model.rows(LayoutTable.from_layouts([layout]))
    least_s = float(row_bounds_s(model, rows, least_after(model, rows))[0])
    if redoes_by_chunk(model.problem, layout):
        best, bound_s, rounds = _proved_by_chunk(model, layout, rows, seconds, bounded)
    else:
        best, bound_s, rounds = _proved_cuts(model, rows, seconds)
    if not np.isfinite(best.step_s):  # nothing fits: the layout stays as it is, and so does its price
        own_s = float(model.price_rows(rows).step_time_s[0])
        return Recut(layout, own_s, min(own_s, least_s), rounds)
    least_s = max(least_s, bound_s + model.problem.stack.step_overhead_s.value)
    return Recut(with_split(model, layout, best.split), best.step_s, min(best.step_s, least_s), rounds)


def _proved_cuts(model: CostModel, rows: Rows, seconds: float) -> tuple[_Priced, float, int]:
    """The best cuts of a layout that redoes alike in all its chunks, what no cuts can beat, and CP-SAT's rounds.

    Of 1F1B the least that the stage which asks most can ask is known exactly, however large the model.
    """
    ways = [replace(split_of(rows), cuts=cuts) for cuts, _ in ends(model, rows)]
    chunking = chunking_of(model, rows)
    found = best_chunks(chunking, [counts_of(chunking, way) for way in ways], seconds=seconds)
    tried = [ways[-1]] if found is None else [ways[-1], replace(ways[-1], cuts=found.cuts)]
    best = min(_priced(model, rows, tried), key=lambda one: one.step_s)
    exact = partitioned_exactly(model.problem, rows.table).all()
    asked_s = least_partitions(model, rows, np.full(len(rows), np.inf), model.usable_bytes).time_s[0] if exact else 0.0
    bound_s, rounds = (0.0, 0) if found is None else (found.bound_s, found.rounds)
    bound_s = max(bound_s, float(asked_s))
    open_s = best.step_s - model.problem.stack.step_overhead_s.value - bound_s
    if np.isfinite(best.step_s) and open_s > SETTLED * best.step_s and not (exact or by_replay(rows)):
        cuts, step_s = Walk(model, rows).wandered((best.split.cuts, best.step_s))
        best = replace(best, split=replace(best.split, cuts=cuts), step_s=step_s)
    return best, bound_s, rounds


def _proved_by_chunk(model: CostModel, layout: Layout, rows: Rows, seconds: float, bounded: bool) -> tuple[_Priced, float, int]:
    """The same with every chunk's own depth of recompute, which is then made less wherever memory leaves room.

    If it is to be bounded, half of the time is for the search, the rest for the bound.
    """
    extremes = [layout.model_copy(update={"recompute": depth}) for depth in ("full", "none")]
    whole, bare = (model.rows(LayoutTable.from_layouts([each])) for each in extremes)
    own, depth = split_of(rows), int(rows.depth[0])
    split, *ways = (_redoing(replace(own, cuts=cuts), depth) for cuts in (own.cuts, *(cuts for cuts, _ in ends(model, rows))))
    chunking = chunking_of(model, whole, leading=True)
    starts = [counts_of(chunking, way) for way in ways]
    unredone = [replace(each, redone=(0,) * len(each.redone)) for each in (split, ways[-1])]
    priced, rounds, left_s = _priced_by_chunk(model, whole, bare, [split, ways[-1], *unredone]), 0, seconds / (1.0 + bounded)
    for _ in range(1 + TIGHTENED):  # a stage may hold more of its early chunks than CP-SAT counts
        found = best_chunks(chunking, starts, seconds=left_s) if left_s > 0.0 else None
        if found is None:
            break
        (last,) = _priced_by_chunk(model, whole, bare, [_split_of(split, found)])
        priced, rounds, left_s = [*priced, last], rounds + found.rounds, left_s - found.seconds
        if last.over_bytes <= 0.0:
            break
        chunking = replace(chunking, limit_bytes=chunking.limit_bytes - last.over_bytes)
    best = _shallow(model, whole, bare, min(priced, key=lambda one: one.step_s))
    if not bounded:
        return best, 0.0, rounds
    roomy = chunking_of(model, whole, leading=True, beside=bare)
    bound = best_chunks(roomy, [counts_of(roomy, best.split)], seconds=seconds / 2.0 + max(left_s, 0.0))
    return best, 0.0 if bound is None else bound.bound_s, rounds


def _redoing(split: Split, depth: int) -> Split:
    """A split whose chunks are told how many layers they redo: as it says, or up to a depth."""
    return replace(split, redone=split.redone or tuple(min(depth, held) for held in split.counts))


def _shallow(model: CostModel, whole: Rows, bare: Rows, best: _Priced) -> _Priced:
    """The split that changes of one chunk's depth lead to from the best so far: one layer less is redone, half as many, or none."""
    for _ in range(DEPTHS_CHANGED if np.isfinite(best.step_s) else 0):
        near = _priced_by_chunk(model, whole, bare, _shallower(best.split))
        nearest = min(near, key=lambda one: one.step_s, default=best)
        if not nearest.step_s < best.step_s * (1.0 - EQUAL):
            break
        best = nearest
    return best


def _shallower(split: Split) -> list[Split]:
    """The splits in which one chunk redoes less."""
    found = []
    for chunk, depth in enumerate(split.redone):
        for less in sorted({depth - 1, depth // 2, 0}) if depth else ():
            found.append(replace(split, redone=(*split.redone[:chunk], less, *split.redone[chunk + 1 :])))
    return found


def redoes_by_chunk(problem: Problem, layout: Layout) -> bool:
    """Whether each chunk of a layout may redo layers to a depth of its own: its stack is told so, and nobody fixes recompute."""
    whole = layout.schedule in WHOLE and Recompute.parse(layout.recompute).mode in (NONE, FULL_BLOCK)
    return problem.stack.recompute_by_chunk and whole and not is_lent(problem, layout) and "recompute" not in problem.workload.fix


@dataclass(frozen=True)
class Settled:
    """The best layouts of a search, cut again, the best of each frame, fastest first, and what is proved of the fastest's cuts.

    `whole`: neither the deadline nor an interrupt left any of them out.
    """

    best: list[Candidate]
    cuts: Recut | None
    whole: bool


def settled(model: CostModel, found: Found, deadline: Deadline, bounded: bool = True) -> Settled:
    """The best layouts of a search, and those near them, with better cuts where there are any; an interrupt leaves what it finds.

    Nothing is proved where there is one way to cut the fastest, no time left, or nobody asks for it (`bounded`).
    """
    best, cuts, whole = found.best, None, False
    with stoppable() as ended:
        for better in _bettered(model, found, deadline):
            best = better
        whole = not deadline.passed
        if bounded and whole:
            best, cuts = _proved_first(model, best)
    return Settled(best, cuts, whole and not ended.stopped)


def _bettered(model: CostModel, found: Found, deadline: Deadline) -> Iterator[list[Candidate]]:
    """The best layouts of a search with ever better cuts, until the deadline has passed."""
    best, moved = found.best, NearBest(model, found).moved()
    while not deadline.passed and (better := next(moved, None)) is not None:
        best = better
        yield best
    if deadline.passed:
        return
    for place, candidate in enumerate(best if model.problem.stack.recompute_by_chunk else ()):
        best = [*best[:place], _redone_by_chunk(model, candidate, deadline, DEPTH_SECONDS / len(best)), *best[place + 1 :]]
        yield sorted(best, key=lambda candidate: candidate.step_time_s)


def _redone_by_chunk(model: CostModel, candidate: Candidate, deadline: Deadline, seconds: float) -> Candidate:
    """A layout that redoes anything with every chunk's own depth, where that is faster and legal; CP-SAT may look for `seconds`."""
    layout = candidate.layout
    free = cut_freely(model, layout) and redoes_by_chunk(model.problem, layout)
    if deadline.passed or layout.recompute == "none" or not free:
        return candidate
    found = proved(model, layout, seconds, bounded=False)
    better = found.step_time_s < candidate.step_time_s * (1.0 - EQUAL)
    return Candidate(found.step_time_s, found.layout) if better and not violations(model.problem, found.layout) else candidate


def _proved_first(model: CostModel, found: list[Candidate]) -> tuple[list[Candidate], Recut | None]:
    """The layouts with the first as CP-SAT cuts it, where there are several ways to, and its bound.

    None where stages lend each other memory, which couples their limits.
    """
    first = found[0]
    if not cut_freely(model, first.layout) or is_lent(model.problem, first.layout):
        return found, None
    proof = proved(model, first.layout)
    if proof.step_time_s < first.step_time_s * (1.0 - EQUAL):
        found = [replace(first, step_time_s=proof.step_time_s, layout=proof.layout), *found[1:]]
    return found, proof


@dataclass(frozen=True)
class _Priced:
    """A split of one row, its step, infinite where it does not fit, and by how much it does not."""

    split: Split
    step_s: float
    over_bytes: float


def _priced(model: CostModel, rows: Rows, splits: Sequence[Split]) -> list[_Priced]:
    """Splits of one row, priced together."""
    if not splits:
        return []
    first = np.zeros(len(splits), dtype=np.intp)
    table = rows.table.take(first).with_splits(np.arange(len(splits)), tuple(splits))
    priced = model.price_cuts(rows.spread(table, first), np.array([split.cuts for split in splits]))
    steps = fitting_s(priced).tolist()
    return list(map(_Priced, splits, steps, (priced.peak_bytes - model.usable_bytes).tolist()))


def _priced_by_chunk(model: CostModel, whole: Rows, bare: Rows, splits: Sequence[Split]) -> list[_Priced]:
    """Splits whose chunks redo layers to their own depths; `whole` is the row that redoes all, `bare` the one that redoes none and
    holds nothing for it.
    """
    redoing = [split for split in splits if any(split.redone)]
    others = _priced(model, bare, [replace(split, redone=()) for split in splits if not any(split.redone)])
    zeros = [replace(one, split=replace(one.split, redone=(0,) * len(one.split.counts))) for one in others]
    return [*zeros, *_priced(model, whole, redoing)]


def _split_of(split: Split, found: Chunks) -> Split:
    """The split that CP-SAT found in place of another."""
    return replace(split, cuts=found.cuts, redone=tuple(found.counts[:, 1].sum(axis=0).tolist()) if split.redone else ())

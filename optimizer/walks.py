"""Downhill from one layout's cuts: single moves of blocks from chunk to chunk, as long as one makes the step shorter."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import numpy as np

from ..cost_models.rows import Rows
from ..cost_models.split_passes import busiest_s, by_replay
from ..cost_models.step import CostModel, Prices
from ..search_spaces.layout import ALL_LAYERS, FULL_BLOCK, Floats, Ints, Layout, LayoutTable, Recompute, Split
from .chunks import moves, walked
from .stages import ROUNDING, cut_family, cutting_of, partitioned_exactly

BATCHES, DRAWN = 8, 2500
"""Batches of pairs of moves that are drawn where single ones lead no further, and pairs in each."""
BETTER = 1e-6
"""Relative difference from which on a pair of moves makes the step shorter."""

Way = tuple[tuple[int, ...], float]
"""Where chunks are cut, and the step then; infinite where they do not fit."""


def downhill(model: CostModel, layout: Layout) -> tuple[float, Layout]:
    """The step of a layout with the cuts that single moves of blocks lead to from its own, and the layout with these.

    It stays as it is where its stack cannot be told others, where it does not fit, and for 1F1B, which is cut so from the first.
    """
    rows = model.rows(LayoutTable.from_layouts([layout]))
    own = split_of(rows)
    walks = cut_freely(model, layout) and not partitioned_exactly(model.problem, rows.table).all()
    best, step_s = ends(model, rows)[-1] if walks else (own.cuts, np.inf)
    if best == own.cuts:
        return float(model.price_rows(rows).step_time_s[0]), layout
    return step_s, with_split(model, layout, replace(own, cuts=best))


def ends(model: CostModel, rows: Rows) -> list[Way]:
    """Where single moves of blocks lead one row's cuts, fastest last: from the fastest of its own and of the search's that fits,
    and from those of equal work. Its own alone where none fits.
    """
    walk, own = Walk(model, rows), split_of(rows).cuts
    equal, begin_s = walk.equal, walk.starts({walk.equal})
    begun = sorted({min(begin_s, key=begin_s.__getitem__), equal})
    found = [walk.end((start, begin_s[start])) for start in begun]
    return sorted(found, key=lambda way: -way[1]) if any(np.isfinite(step_s) for _, step_s in found) else [(own, begin_s[own])]


class Walk:
    """One row's way downhill."""

    def __init__(self, model: CostModel, rows: Rows) -> None:
        self._model, self._rows = model, rows
        self._family = [tuple(cuts) for cuts in cut_family(model, rows)[0].tolist()]

    @property
    def equal(self) -> tuple[int, ...]:
        """The cuts of equal work."""
        return self._family[0]

    def starts(self, others: Set[tuple[int, ...]] = frozenset()) -> dict[tuple[int, ...], float]:
        """The steps of those of its own cuts and of the search's that may be the fastest by what they take at least, and of some
        `others` of these.
        """
        starts = list(dict.fromkeys([split_of(self._rows).cuts, *self._family]))
        least_s = self._below(np.array(starts), np.inf)
        first = int(least_s.argmin())
        known = {starts[first]: float(self._price(np.array([starts[first]]))[0])}
        left = [way for way, least in zip(starts, least_s.tolist(), strict=True) if least <= known[starts[first]] or way in others]
        left = [way for way in left if way not in known]
        known |= dict(zip(left, self._price(np.array(left)).tolist() if left else [], strict=True))
        return {way: known[way] for way in starts if way in known}

    def end(self, start: Way, goal_s: float = np.inf) -> Way:
        """Where single moves lead from a way to cut, as far as `goal_s`, which they are to come below, is in reach."""
        pp, vpp, _ = self._rows.shape
        return walked(cutting_of(self._model, pp, vpp), *start, self._price, self._below, goal_s=goal_s)[-1]

    def wandered(self, start: Way) -> Way:
        """Where pairs of moves drawn at random, and single ones from there, lead to from cuts that no single one makes faster."""
        (pp, vpp, _), drawn, way = self._rows.shape, np.random.default_rng(0), start
        cutting, (moved, _) = cutting_of(self._model, pp, vpp), moves(pp * vpp)
        for _ in range(BATCHES):
            limit_s = way[1] * (1.0 - BETTER)
            tried = np.array(way[0]) + moved[drawn.integers(len(moved), size=(2, DRAWN))].sum(axis=0)
            tried = tried[cutting.legal(tried)]
            hopeful = tried[self._below(tried, limit_s) < limit_s] if len(tried) else tried
            steps_s = self._price(hopeful) if len(hopeful) else np.array([np.inf])
            if steps_s.min() < limit_s:
                best = int(steps_s.argmin())
                way = self.end((tuple(hopeful[best].tolist()), float(steps_s[best])))
        return way

    def _price(self, cuts: Ints, closed_form: bool = False) -> Floats:
        many = self._rows.take(np.zeros(len(cuts), dtype=np.intp))  # no two of these share their pipeline
        return fitting_s(self._model.price_flow(many, self._model.flow(many, cuts, closed_form)))

    def _below(self, cuts: Ints, limit_s: float) -> Floats:
        """What the row takes at least, the nearer the less it is above the limit."""
        overhead_s = self._model.problem.stack.step_overhead_s.value
        if by_replay(self._rows):
            return busiest_s(self._rows.take(np.zeros(len(cuts), dtype=np.intp)), cuts) + overhead_s
        least_s = _fullest_s(self._rows, cuts) + overhead_s
        hopeful = least_s < limit_s  # mostly few: one block more on a stage that is full already is too much
        if hopeful.any():
            least_s[hopeful] = self._price(cuts[hopeful], closed_form=True)
        return least_s


def split_of(rows: Rows) -> Split:
    """How the first row is cut."""
    return rows.table.splits[int(rows.table.split[0])]


def fitting_s(priced: Prices) -> Floats:
    """Steps, infinite where they do not fit."""
    return np.where(priced.fits, priced.step_time_s, np.inf)


def _fullest_s(row: Rows, cuts: Ints) -> Floats:
    """What the stage that works longest works in a step under cuts (n, chunks+1) of one row, a little less for rounding, (n,)
    seconds.
    """
    (pp, vpp, _), pieces, at = row.shape, row.pieces, row.factor[0]
    kinds = [(pieces.pieces[name], pieces.running[name]) for name in pieces.names]
    work_s = np.sum([(piece.once_s + piece.back_s)[at] * running for piece, running in kinds], axis=0)
    again_s = np.sum([piece.again_s[at] * running for piece, running in kinds], axis=0)
    start, stop = cuts[:, :-1], cuts[:, 1:]
    each = work_s[stop] - work_s[start] + again_s[np.minimum(start + row.redone[0], stop)] - again_s[start]
    for name, chunk in (("embedding", 0), ("head", -1)):
        each[:, chunk] += (pieces.pieces[name].once_s + pieces.pieces[name].back_s)[at]
    stages = each.reshape(len(cuts), vpp, pp).sum(axis=1)
    return np.asarray(row.column("num_microbatches")[0] * stages.max(axis=1, initial=0.0) * (1.0 - ROUNDING))


def cut_freely(model: CostModel, layout: Layout) -> bool:
    """Whether there are several ways to cut a layout."""
    return layout.pp > 1 and model.problem.stack.cuts_freely(layout.vpp)


def with_split(model: CostModel, layout: Layout, split: Split) -> Layout:
    """The layout with its stages cut so; depths that one says for all chunks are said so."""
    recompute, layers = layout.recompute, model.problem.model.num_layers
    if split.redone:
        deepest = max(split.redone)
        alike = all(depth == min(deepest, held) for depth, held in zip(split.redone, split.counts, strict=True))
        whole = all(depth == held for depth, held in zip(split.redone, split.counts, strict=True))
        recompute = str(Recompute(FULL_BLOCK, 0, ALL_LAYERS if whole else deepest)) if deepest else "none"
        split = replace(split, redone=()) if alike else split
    return layout.model_copy(update={"recompute": recompute, "stages": split.stages(layers, recompute)})

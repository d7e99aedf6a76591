"""Layers to stages: the exact contiguous partition of a layout's blocks, under every stage's memory.

A stage's price (`stage_paths_s` and what stands around it) depends on its own two cuts only, once the total work is known; so does
its peak memory. The best partition is then a min–max path through (stage, cut), found exactly by dynamic programming for many
rows at once. Interleaved chunks couple (a stage's chunks lie apart); they are cut where the work is balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Cuts, Loads
from ..cost_models.pipeline import in_flight
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel, Kept
from ..search_spaces.layout import SCHEDULES, Bools, Floats, Ints, LayoutTable, Problem, distinct_rows


@dataclass(frozen=True)
class Partition:
    """Best partition of each row: cuts (n, pp+1), its step's stage time (inf where no partition fits) and peak bytes, (n,)."""

    cuts: Cuts
    time_s: Floats
    peak_bytes: Floats


def best_partitions(model: CostModel, rows: Rows, limit_s: Floats, ceiling_bytes: float) -> Partition:
    """Exact partitions of 1F1B rows that share pp and recompute depth.

    Stages whose time passes the row's `limit_s` (n,) or whose peak passes `ceiling_bytes` are left out, so a row that cannot stay
    under its limit comes back with infinite time. Work grows with rows × blocks × the longest stage that can still win.
    """
    pp, blocks, n = int(rows.table.pp[0]), len(model.blocks), len(rows)
    stages = _Stages(model, rows, pp, _longest_stage(rows, limit_s))
    best = np.full((n, blocks + 1), np.inf)
    best[:, 0] = -np.inf
    came, peak_at = np.zeros((pp, n, blocks + 1), dtype=np.int64), np.zeros((pp, n, blocks + 1))
    for stage in range(pp):
        time_s, peak = stages.at(stage)
        time_s = np.where((peak <= ceiling_bytes) & (time_s <= limit_s[:, None, None]), time_s, np.inf)
        if stage == pp - 1:
            time_s[:, last_start(model) + 1 :] = np.inf
        best, came[stage], peak_at[stage] = _relax(best, time_s, peak, 1 if pp <= blocks else 0)
    cuts, peak_bytes, each = np.full((n, pp + 1), blocks), np.zeros(n), np.arange(n)
    for stage in reversed(range(pp)):
        end = cuts[:, stage + 1]
        peak_bytes = np.maximum(peak_bytes, peak_at[stage][each, end])
        cuts[:, stage] = end - came[stage][each, end]
    found = np.isfinite(best[:, blocks])
    return Partition(cuts, best[:, blocks], np.where(found, peak_bytes, np.inf))


def reachable(model: CostModel, rows: Rows, most_work_s: Floats, ceiling_bytes: float) -> Bools:
    """Whether stages that work at most `most_work_s` (n,) per micro-batch and fill at most `ceiling_bytes` can hold all
    blocks, (n,).

    For 1F1B rows of any pp. Both limits hold for every part of a stage that meets them, so taking as many blocks as
    possible, stage after stage, reaches the end if anything does. No partition of a row that is not reachable needs a look.
    Work counts recompute only where it is of all layers: at block depth K a stage that begins later redoes other ones.
    """
    pp, blocks = rows.table.pp, len(model.blocks)
    filling = _Filling(model, rows, most_work_s, ceiling_bytes)
    start, length, found = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    going = np.arange(len(rows))
    for stage in range(int(pp.max(initial=0))):
        ending = going[pp[going] == stage + 1]
        found[ending] = filling.fits(ending, stage, start[ending], np.full(len(ending), blocks))
        going = going[pp[going] > stage + 1]
        going = going[filling.fits(going, stage, start[going], start[going])]
        end = filling.furthest(going, stage, start[going], length[going])
        length[going], start[going] = end - start[going], end
    return found


class _Filling:
    """Whether a stage of some 1F1B rows can hold the blocks from `start` to `end`: what it can, it can with fewer."""

    def __init__(self, model: CostModel, rows: Rows, most_work_s: Floats, ceiling_bytes: float) -> None:
        prefix, rates = rows.prefix, rows.rates
        self._rows, self._prefix = rows, prefix
        self._depth, whole = np.minimum(prefix.depth, prefix.blocks), (prefix.depth >= prefix.blocks)[:, None]
        self._work = prefix.forward_s + prefix.backward_s + np.where(whole, prefix.recompute_s, 0.0)
        self._static = prefix.dense * rates.total(0)[:, None] + prefix.expert * rates.total(1)[:, None]
        self._host = prefix.dense * rates.host[0][:, None] + prefix.expert * rates.host[1][:, None]
        self._hosted = bool(self._host.any())
        self._host_limit = model.host_limit_bytes
        self._most_work_s = most_work_s
        self._room = ceiling_bytes - rows.communicator_bytes - rows.least_transient_bytes

    def fits(self, which: npt.NDArray[np.intp], stage: int, start: Ints, end: Ints) -> Bools:
        """Whether the blocks of the rows `which` (k,) stay within work, the device's memory and the host's, (k,)."""
        prefix, table = self._prefix, self._rows.table
        held = np.minimum(table.num_microbatches[which], table.pp[which] - stage)
        again = np.minimum(start + self._depth[which], end)

        def between(values: Floats, first: Ints, last: Ints) -> Floats:
            return np.asarray(values[which, last] - values[which, first])

        seconds = between(self._work, start, end)
        kept = between(prefix.recomputed_bytes, start, again) + between(prefix.saved_bytes, again, end)
        fixed = between(self._static, start, end)
        for piece, here in ((prefix.embedding, stage == 0), (prefix.head, table.pp[which] == stage + 1)):
            if np.any(here):
                seconds = seconds + np.where(here, piece.forward_s[which] + piece.backward_s[which], 0.0)
                kept = kept + np.where(here, piece.saved_bytes[which], 0.0)
                fixed = fixed + np.where(here, piece.dense[which] * self._rows.rates.total(0)[which], 0.0)
        fits = (seconds <= self._most_work_s[which]) & (fixed + kept * held <= self._room[which])
        return fits & (between(self._host, start, end) <= self._host_limit) if self._hosted else fits

    def furthest(self, which: npt.NDArray[np.intp], stage: int, start: Ints, length: Ints) -> Ints:
        """The last end that fits, (k,), for rows whose empty stage does.

        Stages are alike, so `length` blocks, those of the stage before, are tried first; then it is bisected.
        """
        low, high = start, np.full(len(start), self._prefix.blocks)
        middle = np.clip(start + length, low, high)
        while (low < high).any():
            fits = self.fits(which, stage, start, middle)
            low, high = np.where(fits, np.maximum(middle, low), low), np.where(fits, high, np.maximum(middle - 1, low))
            middle = np.where(fits & (middle == start + length), np.minimum(middle + 1, high), (low + high + 1) // 2)
        return low


def balanced_cuts(model: CostModel, rows: Rows, chunks: int) -> Cuts:
    """Cuts (n, chunks+1) nearest to equal work per chunk, embedding and head in, recompute out; every chunk has a block."""
    pieces, blocks, last = rows.pieces, len(model.blocks), last_start(model)
    used, place = np.unique(rows.factor, return_inverse=True)
    ends = [pieces.pieces[name].work_s[used] for name in ("embedding", "head")]
    first, member = distinct_rows([*(pieces.pieces[name].work_s[used] for name in pieces.names), *ends])
    used, ends = used[first], [end[first] for end in ends]
    work = ends[0][:, None] + sum(pieces.running[name] * pieces.pieces[name].work_s[used][:, None] for name in pieces.names)
    goal = (work[:, -1] + ends[1])[:, None] * np.arange(1, chunks) / chunks
    nearest = np.abs(work[:, None, :] - goal[:, :, None]).argmin(axis=2)
    cuts = np.concatenate([np.zeros((len(used), 1), dtype=np.int64), nearest, np.full((len(used), 1), blocks)], axis=1)
    for k in range(1, chunks):  # every chunk keeps a block, and leaves one for each that follows
        room = last - (chunks - 1 - k)
        cuts[:, k] = np.maximum(np.minimum(np.maximum(cuts[:, k], cuts[:, k - 1] + 1), room), cuts[:, k - 1])
    return np.asarray(cuts[member][place])


def even_cuts(blocks: int, mtp: int, chunks: int) -> Cuts:
    """The split of a framework that cannot be told one: equal decoder layers per chunk, MTP with the last."""
    layers = blocks - mtp
    cuts = np.arange(chunks + 1) * (layers // chunks)
    cuts[-1] = blocks
    return cuts


def default_cuts(model: CostModel, rows: Rows, ceilings_bytes: Sequence[float] = ()) -> Cuts:
    """Cuts that the search would give rows of one shape, (n, pp·vpp+1); 1F1B rows share their recompute depth.

    Those of 1F1B are the fastest under the first of the ceilings that they can stay below, else the fastest of all.
    """
    pp, vpp = int(rows.table.pp[0]), int(rows.table.vpp[0])
    if not model.problem.stack.cuts_freely(vpp):
        return np.tile(even_cuts(len(model.blocks), model.layers.heads - 1, pp * vpp), (len(rows), 1))
    if not partitioned_exactly(model.problem, rows.table).all():
        return balanced_cuts(model, rows, pp * vpp)
    unlimited = np.full(len(rows), np.inf)
    found = best_partitions(model, rows, unlimited, np.inf).cuts
    for ceiling in reversed(ceilings_bytes):
        under = best_partitions(model, rows, unlimited, ceiling)
        found = np.where(np.isfinite(under.time_s)[:, None], under.cuts, found)
    return found


def partitioned_exactly(problem: Problem, table: LayoutTable) -> Bools:
    """Which rows get their best partition by the exact recursion, (n,): plain 1F1B on stacks that can be told where to cut."""
    free = problem.stack.cuts_freely(1)
    return np.asarray((table.schedule == SCHEDULES.index("1f1b")) & free)


def last_start(model: CostModel) -> int:
    """The last block that the last chunk may begin at: MTP layers share it, alone only where a layout string can say so."""
    layers = model.problem.model.num_layers
    alone = len(model.blocks) > layers and "layout" in model.problem.stack.split_forms
    return layers if alone else layers - 1


class _Stages:
    """Times and peaks of every stage a row could have: first cut c and length l, (n, blocks+1, longest+1).

    What a stage holds is the same wherever it stands but for embedding and head, so the grids of a middle stage are kept.
    """

    def __init__(self, model: CostModel, rows: Rows, pp: int, longest: int) -> None:
        self._model, self._rows, self._pp, self._longest = model, rows, pp, longest
        self._total_s = rows.total_s(pp)[:, None, None]
        self._micro_batches = rows.table.num_microbatches[:, None, None]
        self._kept: dict[tuple[bool, bool], tuple[Loads, Floats, Kept]] = {}

    def at(self, stage: int) -> tuple[Floats, Floats]:
        """Time and peak bytes of the stage for every (c, l)."""
        first, last = stage == 0, stage == self._pp - 1
        load, fixed, kept = self._kept.get((first, last)) or self._grid(stage)
        nominal_s = self._rows.nominal_recompute_s(self._pp, stage)
        before_f, before_b = self._rows.prefix.before_grid(stage, nominal_s)
        time_s = self._model.stage_time_at(self._rows, load, kept, before_f, before_b, self._total_s, stage)
        held = in_flight("1f1b", self._pp, 1, self._micro_batches, stage)
        return time_s, fixed + load.saved_bytes * held

    def _grid(self, stage: int) -> tuple[Loads, Floats, Kept]:
        first, last = stage == 0, stage == self._pp - 1
        load = self._rows.prefix.grid(stage, self._pp, self._longest)
        fixed = self._model.peaks_at(self._rows, load, np.zeros(1), np.asarray(last)).sum(axis=0)
        fixed = np.where(self._model.host_bytes(self._rows, load) <= self._model.host_limit_bytes, fixed, np.inf)
        self._kept[first, last] = load, fixed, self._model.kept(self._rows, load)
        return self._kept[first, last]


def _relax(best: Floats, time_s: Floats, peak: Floats, shortest: int) -> tuple[Floats, Ints, Floats]:
    """One stage of the min–max recursion: best[c'] = min over l of max(best[c'−l], time[c'−l, l]); also l and the stage's peak."""
    n, width, lengths = time_s.shape
    value = np.full((n, width), np.inf)
    length, held = np.zeros((n, width), dtype=np.int64), np.zeros((n, width))
    for l in range(shortest, min(lengths, width)):  # noqa: E741  (l is the stage's length, as in the recursion)
        start, end = slice(0, width - l), slice(l, width)
        candidate = np.maximum(best[:, start], time_s[:, start, l])
        better = candidate < value[:, end]
        np.copyto(value[:, end], candidate, where=better)
        np.copyto(length[:, end], l, where=better)
        np.copyto(held[:, end], peak[:, start, l], where=better)
    return value, length, held


def _longest_stage(rows: Rows, limit_s: Floats) -> int:
    """Most blocks that a stage can hold and stay within the limit for any row; all when there is no limit."""
    blocks = rows.prefix.blocks
    work = (rows.prefix.forward_s + rows.prefix.backward_s) * rows.table.num_microbatches[:, None]
    for length in range(1, blocks):
        if ((work[:, length + 1 :] - work[:, : -length - 1]).min(axis=1) > limit_s).all():
            return length
    return blocks

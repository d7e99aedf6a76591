"""Which rows' stages can hold all blocks at all, under limits of work and memory: told before any partition is looked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cost_models.lending import own_in_flight
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel
from ..search_spaces.layout import Bools, Floats, Ints
from .stages import EQUAL, ROUNDING


def reachable(model: CostModel, rows: Rows, most_work_s: Floats, ceiling_bytes: float) -> Bools:
    """Whether stages that work at most `most_work_s` (n,) per micro-batch and fill at most `ceiling_bytes` can hold all
    blocks, (n,).

    For 1F1B rows of any pp. Both limits hold for every part of a stage that meets them, so taking as many blocks as
    possible, stage after stage, reaches the end if anything does. No partition of a row that is not reachable needs a look.
    Work counts recompute only where it is of all layers: at block depth K a stage that begins later redoes other ones.
    """
    hopeful = np.nonzero(_hold_commonest(model, rows, most_work_s, ceiling_bytes))[0]
    order = hopeful[np.argsort(-rows.table.pp[hopeful], kind="stable")]  # rows that still go on are then the first ones
    filling = _Filling(model, rows.take(order), most_work_s[order], ceiling_bytes)
    pp, blocks = filling.pp, len(model.blocks)
    going = len(order)
    start, length, found = np.zeros(going, dtype=np.int64), np.ones(going, dtype=np.int64), np.ones(going, dtype=bool)
    for stage in range(int(pp.max(initial=0))):
        end = filling.furthest(stage, start[:going], length[:going])
        found[:going] &= end >= start[:going]
        length[:going], start[:going] = np.maximum(end - start[:going], 0), np.maximum(end, start[:going])
        going = int(np.searchsorted(-pp, -stage - 1))
    back = np.zeros(len(rows), dtype=bool)
    back[order] = found & (start >= blocks)
    return back


def _hold_commonest(model: CostModel, rows: Rows, most_work_s: Floats, ceiling_bytes: float) -> Bools:
    """Whether the stages of rows have room for the blocks of the commonest kind alone, (n,): a quick part of `reachable`."""
    name, count = Counter(model.blocks).most_common(1)[0]
    piece, at, depth = rows.pieces.pieces[name], rows.factor, rows.depth
    whole = depth >= len(model.blocks)
    work = piece.work_s[at] + np.where(whole, piece.again_s[at], 0.0)
    saved, kept = piece.saved_bytes[at], piece.recomputed_bytes[at]
    saved = np.where(whole, kept, np.where(depth > 0, np.minimum(saved, kept), saved))
    static = piece.dense_weights[at] * rows.rates.total(0) + piece.expert_weights[at] * rows.rates.total(1)
    room = ceiling_bytes - rows.communicator_bytes - rows.least_transient_bytes
    pp, stages = rows.table.pp[:, None], np.arange(rows.table.pp.max(initial=0))
    held = own_in_flight(pp, rows.table.num_microbatches[:, None], np.minimum(stages, pp - 1), rows.lent[:, None])
    most = np.minimum(room[:, None] / (static[:, None] + saved[:, None] * held), (most_work_s / work)[:, None])
    each = np.maximum(np.floor(most * (1.0 + EQUAL)), 0.0)
    return np.asarray(np.where(stages < pp, each, 0.0).sum(axis=1) >= count)


class _Filling:
    """How far a stage of some 1F1B rows can go; what it can hold, it can with fewer blocks."""

    def __init__(self, model: CostModel, rows: Rows, most_work_s: Floats, ceiling_bytes: float) -> None:
        prefix, rates, table = rows.prefix, rows.rates, rows.table
        self.pp, self._micro_batches, self._lent = table.pp, table.num_microbatches, rows.lent
        self._prefix, self._rate = prefix, rates.total(0)
        self._depth, whole = np.minimum(prefix.depth, prefix.blocks), (prefix.depth >= prefix.blocks)[:, None]
        self._partly = bool(((prefix.depth > 0) & ~whole[:, 0]).any())
        self._work = prefix.forward_s + prefix.backward_s + np.where(whole, prefix.recompute_s, 0.0)
        self._saved = np.where(whole, prefix.recomputed_bytes, prefix.saved_bytes)
        self._static = prefix.dense * self._rate[:, None] + prefix.expert * rates.total(1)[:, None]
        self._host = prefix.dense * rates.host[0][:, None] + prefix.expert * rates.host[1][:, None]
        self._hosted = bool(self._host.any())
        self._host_limit = model.host_limit_bytes
        self._most_work_s = most_work_s
        self._room = (ceiling_bytes - rows.communicator_bytes - rows.least_transient_bytes) * (1.0 + ROUNDING)

    def furthest(self, stage: int, start: Ints, length: Ints) -> Ints:
        """The last end that fits a stage of the first rows that begins at `start` (k,); below it where not even an empty one fits.

        Stages are alike, so `length` blocks, those of the stage before, are tried first.
        """
        blocks, k = self._prefix.blocks, len(start)
        held = own_in_flight(self.pp[:k], self._micro_batches[:k], stage, self._lent[:k])
        seconds, room = self._most_work_s[:k], self._room[:k]
        for piece, here in ((self._prefix.embedding, stage == 0), (self._prefix.head, self.pp[:k] == stage + 1)):
            if np.any(here):
                seconds = seconds - np.where(here, piece.forward_s[:k] + piece.backward_s[:k], 0.0)
                room = room - np.where(here, piece.dense[:k] * self._rate[:k] + piece.saved_bytes[:k] * held, 0.0)
        limits = start, held, seconds, room
        tried = np.minimum(start + length, blocks)
        fits = self._fits(np.arange(k), limits, np.stack([tried, np.minimum(tried + 1, blocks)]))
        left = np.nonzero(~fits[0] | (fits[1] & (tried < blocks)))[0]
        if len(left):
            ends = np.arange(blocks + 1)[:, None]
            fits = self._fits(left, tuple(each[left] for each in limits), ends)
            tried[left] = np.where(fits & (ends >= start[left]), ends, -1).max(axis=0)
        return np.asarray(tried)

    def _fits(self, rows: npt.NDArray[np.intp], limits: tuple[npt.NDArray[Any], ...], end: Ints) -> Bools:
        """Whether stages of some rows (k,) stay within work, the device's memory and the host's up to `end` (ends, k or 1)."""
        start, held, seconds, room = limits
        row = rows * (self._prefix.blocks + 1)
        begin, at = row + start, row + end

        def between(values: Floats, first: Ints = begin, last: Ints = at) -> Floats:
            return np.asarray(values.take(last) - values.take(first))

        if self._partly:
            again = np.minimum(begin + self._depth[rows], at)
            kept = between(self._prefix.recomputed_bytes, last=again) + between(self._prefix.saved_bytes, first=again)
        else:
            kept = between(self._saved)
        fits = (between(self._work) <= seconds) & (between(self._static) + kept * held <= room)
        return np.asarray(fits & (between(self._host) <= self._host_limit) if self._hosted else fits)

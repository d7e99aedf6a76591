"""Cuts for schedules whose stages hold a chunk and its mirror image: the stage that works longest works as little as can be.

A stage's two chunks are cut together, from the ends of the model to its middle, each cut at most REACH blocks from where equal work
would put it: a shortest path through pairs of cuts, exact within that reach. Of the cuts under which the fullest stage does as
little, those are taken whose chunks are most alike.
"""

from __future__ import annotations

import numpy as np

from ..cost_models.layers import EP
from ..cost_models.loads import Cuts
from ..cost_models.rows import Rows
from ..cost_models.schedules import PAIRED
from ..cost_models.split_passes import slowed_in_pairs
from ..cost_models.timeline import Work
from ..search_spaces.cutting import Cutting
from ..search_spaces.layout import Bools, Floats, Ints
from .known_cuts import KnownCuts

REACH = 2
"""Blocks by which a cut may lie off equal work: more changed no plan that was looked at."""
AT_ONCE = 64
"""Rows whose pairs of cuts are worked out together: they stay in the cache."""
EQUAL = 1e-9  # relative difference below which two stages work equally long

_KNOWN = KnownCuts()


def mirrored_cuts(rows: Rows, cutting: Cutting, balanced: Cuts) -> Cuts:
    """Cuts of rows of one shape (n, chunks+1), given those of equal work; these where none within reach is legal."""
    pieces, (_, _, schedule) = rows.pieces, rows.shape
    seconds = np.stack([_seconds(rows, name) for name in (*pieces.names, "embedding", "head")], axis=1)
    columns = np.concatenate([seconds.reshape(len(rows), -1), balanced], axis=1)

    def cut(new: Ints) -> Cuts:
        parts = [new[begin : begin + AT_ONCE] for begin in range(0, len(new), AT_ONCE)]
        return np.concatenate([_Mirrored(rows, cutting, balanced[part], seconds[part]).cuts() for part in parts])

    return _KNOWN.of((cutting, pieces.blocks, schedule, slowed_in_pairs(rows.problem)), columns, cut)


def _seconds(rows: Rows, name: str) -> Floats:
    """What one piece takes of a micro-batch, (n, 4): forward, backward with what is redone of all layers, and where passes are
    paired the exchange of tokens in either.
    """
    piece, at, (_, _, schedule) = rows.pieces.pieces[name], rows.factor, rows.shape
    again = (rows.depth >= len(rows.pieces.blocks)) & (name in rows.pieces.names)
    backward = piece.back_s[at] + again * piece.again_s[at]
    returned = piece.backward_s[EP][at] + again * piece.recompute_s[EP][at]
    paired = float(schedule in PAIRED)
    return np.stack([piece.once_s[at], backward, paired * piece.forward_s[EP][at], paired * returned], axis=1)


class _Mirrored:
    """Pairs of cuts of some rows; chunk s and chunk −1−s lie on one stage, and pairs are numbered from the ends inwards."""

    def __init__(self, rows: Rows, cutting: Cutting, balanced: Cuts, seconds: Floats) -> None:
        self._cutting, self._balanced, self._pairs = cutting, balanced, cutting.chunks // 2
        counts = np.stack([rows.pieces.running[name] for name in rows.pieces.names], axis=1)  # (blocks+1, kinds)
        self._running = np.einsum("ck,nkt->nct", counts, seconds[:, :-2])
        self._ends = seconds[:, -2:]
        self._paired, self._slowed = rows.shape[2] in PAIRED, slowed_in_pairs(rows.problem)
        self._each = [self._pair(pair) for pair in range(self._pairs)]

    def cuts(self) -> Cuts:
        """The best cuts of every row."""
        most = np.zeros_like(self._each[0][0][:, :, :, 0, 0])
        for work, _ in self._each:
            most = np.maximum(most[..., None, None], work).min(axis=(1, 2))
        limit = np.diagonal(most, axis1=1, axis2=2).min(axis=1) * (1.0 + EQUAL)
        uneven, came = np.zeros_like(self._each[0][0][:, :, :, 0, 0]), []
        for work, squares in self._each:
            allowed = np.where(work <= limit[:, None, None, None, None], squares, np.inf)
            total = (uneven[..., None, None] + allowed).reshape(len(limit), -1, *work.shape[3:])
            came.append(total.argmin(axis=1))
            uneven = np.take_along_axis(total, came[-1][:, None], axis=1)[:, 0]
        middle = np.diagonal(uneven, axis1=1, axis2=2).argmin(axis=1)
        return np.where(np.isfinite(limit)[:, None], self._traced(middle, came), self._balanced)

    def _traced(self, middle: Ints, came: list[Ints]) -> Cuts:
        """The cuts on the way back from the middle one, told as a place among those within reach."""
        cuts, row, chunks = self._balanced.copy(), np.arange(len(middle)), self._cutting.chunks
        first = last = middle
        for pair in reversed(range(self._pairs)):
            cuts[row, pair + 1] = self._near(pair + 1)[row, first]
            cuts[row, chunks - 1 - pair] = self._near(chunks - 1 - pair)[row, last]
            width = self._near(chunks - pair).shape[1]
            first, last = np.divmod(came[pair][row, first, last], width)
        return cuts

    def _near(self, cut: int) -> Ints:
        """Where a cut may lie, (n, places): the first and the last of all at the ends."""
        inner = 0 < cut < self._cutting.chunks
        reach = np.arange(-REACH, REACH + 1) if inner else np.zeros(1, dtype=np.int64)
        return np.asarray(np.clip(self._balanced[:, cut, None] + reach, 0, self._cutting.blocks))

    def _pair(self, pair: int) -> tuple[Floats, Floats]:
        """What a stage works per micro-batch and the squares of its chunks' work, for the places of its four cuts: those outside,
        of the first chunk and of the last, then those inside, (n, places, places, places, places); infinite where not legal.
        """
        (first_s, first_legal), (last_s, last_legal) = self._chunk(pair), self._chunk(self._cutting.chunks - 1 - pair)
        last_s, last_legal = last_s.swapaxes(1, 2), last_legal.swapaxes(1, 2)  # its end lies outside
        one, other = first_s[:, :, None, :, None], last_s[:, None, :, None, :]
        legal = first_legal[:, :, None, :, None] & last_legal[:, None, :, None, :]
        work = self._together(one, other) + self._together(other, one) if self._paired else (one + other)[..., :2].sum(axis=-1)
        squares = one[..., :2].sum(axis=-1) ** 2 + other[..., :2].sum(axis=-1) ** 2
        return np.where(legal, work, np.inf), squares

    def _together(self, first: Floats, second: Floats) -> Floats:
        """The forward of a chunk beside the backward of another."""
        forward, backward, sent, returned = first[..., 0], second[..., 1], first[..., 2], second[..., 3]
        return Work(forward[None], backward[None], exchange_s=(sent[None], returned[None]), slowed=self._slowed).of_pair(0, 0)

    def _chunk(self, chunk: int) -> tuple[Floats, Bools]:
        """What a chunk takes from every begin to every end, (n, begins, ends, 4), and whether that is legal."""
        begin, end, row = self._near(chunk), self._near(chunk + 1), np.arange(len(self._balanced))[:, None]
        seconds = self._running[row, end][:, None, :] - self._running[row, begin][:, :, None]
        for place, name in ((0, 0), (self._cutting.chunks - 1, 1)):
            if chunk == place:
                seconds = seconds + self._ends[:, name, None, None, :]
        legal = (end[:, None, :] - begin[:, :, None] >= self._cutting.least[chunk]) & self._cutting.begins(chunk)[begin][:, :, None]
        return seconds, legal

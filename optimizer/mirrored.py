"""Cuts for schedules whose stages hold a chunk and its mirror image: the stage that works longest works as little as can be.

A stage's two chunks are cut together, from the ends of the model to its middle, each cut at most REACH blocks from where equal work
would put it: a shortest path through pairs of cuts, exact within that reach. Of the cuts under which the fullest stage does as
little, those are taken whose chunks are most alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost_models.loads import Cuts
from ..cost_models.pieces import EP
from ..cost_models.rows import Rows
from ..cost_models.schedules import PAIRED, stage_chunks
from ..cost_models.split_passes import held_moments, pass_figures, slowed_in_pairs
from ..cost_models.step import CostModel
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
    pieces, (_, _, schedule), seconds = rows.pieces, rows.shape, _all_seconds(rows)
    columns = np.concatenate([seconds.reshape(len(rows), -1), balanced], axis=1)

    def cut(new: Ints) -> Cuts:
        parts = [new[begin : begin + AT_ONCE] for begin in range(0, len(new), AT_ONCE)]
        return np.concatenate([_Mirrored(rows, cutting, balanced[part], seconds[part]).cuts() for part in parts])

    return _KNOWN.of((cutting, pieces.blocks, schedule, slowed_in_pairs(rows.problem)), columns, cut)


def fitting_cuts(model: CostModel, rows: Rows, cutting: Cutting, balanced: Cuts, mirrored: Cuts) -> Cuts:
    """The `mirrored` cuts of rows of one shape, and for those whose stages do not fit under them such as fit, where there are any
    within reach.
    """
    over = np.flatnonzero(model.cut_bytes(rows, mirrored).max(axis=1) > model.usable_bytes)
    found, m = mirrored.copy(), rows.column("num_microbatches")
    for count in np.unique(m[over]).tolist():
        some = over[m[over] == count]
        for part in (some[begin : begin + AT_ONCE] for begin in range(0, len(some), AT_ONCE)):
            few = rows.take(part)
            search = _Mirrored(few, cutting, balanced[part], _all_seconds(few), _Room.of(model, few))
            found[part] = np.where(search.found[:, None], search.cuts(), found[part])
    return found


def _all_seconds(rows: Rows) -> Floats:
    """What every kind of layer takes, then the ends, (n, kinds+2, 4)."""
    return np.stack([_seconds(rows, name) for name in (*rows.pieces.names, "embedding", "head")], axis=1)


@dataclass(frozen=True, eq=False)
class _Room:
    """What stages may hold, (n, pairs) bytes, and what layers of each kind and the ends keep, (n, kinds+2, 4): states, activations
    as they are, or redone, and what is left for weight gradients. `held` says how many of these a stage of each pair keeps at once,
    (moments, 4): whole activations of its first chunk and of its last, then what is left of either.
    """

    free_bytes: Floats
    each_bytes: Floats
    held: tuple[Ints, ...]
    redone: Ints

    @classmethod
    def of(cls, model: CostModel, rows: Rows) -> _Room:
        (pp, vpp, schedule), names, at = rows.shape, rows.pieces.names, rows.factor
        place, chunks, moments = stage_chunks(schedule, pp, vpp), pp * vpp, held_moments(rows)
        free = model.usable_bytes - rows.communicator_bytes[:, None] - np.repeat(rows.transient_bytes[:, None], chunks // 2, axis=1)
        free[:, 0] += rows.transient_bytes - rows.last_transient_bytes  # the stages of the first pair hold both ends
        held = []
        for pair in range(chunks // 2):
            stages = np.flatnonzero((place == pair).any(axis=0))
            turned = [
                moments[s] if place[0, s] == pair else moments[s].reshape(-1, 2, 2)[:, :, ::-1].reshape(-1, 4) for s in stages
            ]
            held.append(np.concatenate(turned))
        each = []
        for name in (*names, "embedding", "head"):
            piece = rows.pieces.pieces[name]
            states = piece.dense_weights[at] * rows.rates.total(0) + piece.expert_weights[at] * rows.rates.total(1)
            saved, again = piece.saved_bytes[at], piece.recomputed_bytes[at]
            each.append(
                np.stack(
                    [states, saved, again if name in names else saved, pass_figures(model.layers, rows, name).kept_bytes], axis=1
                )
            )
        return cls(free, np.stack(each, axis=1), tuple(held), np.minimum(rows.depth, len(rows.pieces.blocks)))

    def holds(self, pair: int, one: Floats, other: Floats) -> Bools:
        """Whether stages hold their first chunk and their last, which keep (…, 3) states, activations and what is left."""
        most = np.full(np.broadcast_shapes(one.shape, other.shape)[:-1], -np.inf)
        for whole, whole_other, left, left_other in self.held[pair].tolist():
            active = whole * one[..., 1] + left * one[..., 2] + whole_other * other[..., 1] + left_other * other[..., 2]
            np.maximum(most, active, out=most)
        return np.asarray(one[..., 0] + other[..., 0] + most <= self.free_bytes[:, pair, None, None, None, None])


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

    def __init__(self, rows: Rows, cutting: Cutting, balanced: Cuts, seconds: Floats, room: _Room | None = None) -> None:
        self._cutting, self._balanced, self._pairs, self._room = cutting, balanced, cutting.chunks // 2, room
        self._counts = np.stack([rows.pieces.running[name] for name in rows.pieces.names], axis=1)  # (blocks+1, kinds)
        self._running = np.einsum("ck,nkt->nct", self._counts, seconds[:, :-2])
        self._ends = seconds[:, -2:]
        self._paired, self._slowed = rows.shape[2] in PAIRED, slowed_in_pairs(rows.problem)
        self._each = [self._pair(pair) for pair in range(self._pairs)]
        most = np.zeros_like(self._each[0][0][:, :, :, 0, 0])
        for work, _ in self._each:
            most = np.maximum(most[..., None, None], work).min(axis=(1, 2))
        self._limit = np.diagonal(most, axis1=1, axis2=2).min(axis=1) * (1.0 + EQUAL)

    @property
    def found(self) -> Bools:
        """Whether any cuts within reach are legal and hold what they must, (n,)."""
        return np.asarray(np.isfinite(self._limit))

    def cuts(self) -> Cuts:
        """The best cuts of every row."""
        limit = self._limit
        uneven, came = np.zeros_like(self._each[0][0][:, :, :, 0, 0]), []
        for work, squares in self._each:
            allowed = np.where(work <= limit[:, None, None, None, None], squares, np.inf)
            total = (uneven[..., None, None] + allowed).reshape(len(limit), -1, *work.shape[3:])
            came.append(total.argmin(axis=1))
            uneven = np.take_along_axis(total, came[-1][:, None], axis=1)[:, 0]
        middle = np.diagonal(uneven, axis1=1, axis2=2).argmin(axis=1)
        return np.asarray(np.where(self.found[:, None], self._traced(middle, came), self._balanced))

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
        if self._room is not None:
            kept, last = self._kept(self._room, pair), self._kept(self._room, self._cutting.chunks - 1 - pair).swapaxes(1, 2)
            legal = legal & self._room.holds(pair, kept[:, :, None, :, None], last[:, None, :, None, :])
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

    def _kept(self, room: _Room, chunk: int) -> Floats:
        """What a chunk keeps from every begin to every end, (n, begins, ends, 3): states, activations, and what is left for weight
        gradients.
        """
        begin, end = self._near(chunk)[:, :, None], self._near(chunk + 1)[:, None, :]
        until = np.minimum(begin + room.redone[:, None, None], np.maximum(begin, end))
        held, redone = self._counts[end] - self._counts[begin], self._counts[until] - self._counts[begin]
        layers = room.each_bytes[:, :-2]
        states, left = (np.einsum("nbek,nk->nbe", held, layers[..., column]) for column in (0, 3))
        saved = np.einsum("nbek,nk->nbe", held - redone, layers[..., 1]) + np.einsum("nbek,nk->nbe", redone, layers[..., 2])
        kept = np.stack([states, saved, left], axis=-1)
        for place, name in ((0, -2), (self._cutting.chunks - 1, -1)):
            if chunk == place:
                kept = kept + room.each_bytes[:, name, [0, 1, 3]][:, None, None]
        return kept

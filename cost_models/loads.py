"""What stages hold, from running sums over the model's blocks: any contiguous cut is a difference of two of them.

Arrays are (n, stages), rows first, and lie stage by stage in memory where there are many rows: what is done along the few stages
then runs over whole columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import ALL_LAYERS, FULL_BLOCK, NONE, Floats, Ints, LayoutTable, Split
from .pieces import Pieces
from .pipeline import held_by_chunk, in_flight
from .timeline import INTERLEAVED

Cuts = npt.NDArray[np.int64]
TURNS_TOLD = 3
"""Times pp micro-batches after which an interleaved stage holds nothing that it did not hold before."""


@dataclass(frozen=True)
class Loads:
    """What stages (or chunks) hold and do per micro-batch; arrays broadcast together, rows first.

    Seconds of forward and of backward (recompute included), parameters on the rank, saved activation bytes.
    """

    forward_s: Floats
    backward_s: Floats
    dense: Floats
    expert: Floats
    saved_bytes: Floats
    experts: bool = True  # whether the model has any

    @property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        return self.forward_s, self.backward_s, self.dense, self.expert, self.saved_bytes

    def take(self, rows: Ints) -> Loads:
        """Those of the given rows."""
        forward, backward, dense, expert, saved = (taken(each, rows) for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def pick(self, spans: Ints) -> Loads:
        """The given columns."""
        if np.array_equal(spans, np.arange(self.dense.shape[1])):
            return self
        forward, backward, dense, expert, saved = (picked(each, spans) for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def across(self) -> Loads:
        """With an axis after the rows, along which what they hold is the same."""
        forward, backward, dense, expert, saved = (each[:, None] for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def begun(self, starts: slice) -> Loads:
        """Of stages (n, k, starts, lengths) those that begin at some of the cuts."""
        forward, backward, dense, expert, saved = (each[:, :, starts] for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def folded(self, pp: int) -> Loads:
        """Chunks of a stage put together: (n, pp·vpp) → (n, pp)."""
        if self.dense.shape[1] == pp:
            return self
        forward, backward, dense, expert, saved = (each.reshape(len(each), -1, pp).sum(axis=1) for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)


def taken(values: Floats, rows: Ints) -> Floats:
    """The given rows of an array, stage by stage in memory."""
    last = values.ndim - 1
    return values.transpose(*range(1, last + 1), 0).take(rows, axis=last).transpose(last, *range(last))


def picked(values: Floats, stages: Ints) -> Floats:
    """The given stages of an array (n, stages), stage by stage in memory."""
    return values.T[stages].T


@dataclass(frozen=True)
class End:
    """What the embedding or the head adds to the stage that holds it, (n,)."""

    forward_s: Floats
    backward_s: Floats
    dense: Floats
    saved_bytes: Floats


@dataclass(frozen=True)
class Prefix:
    """Running sums of n rows over the blocks, (n, blocks+1); `backward_s` leaves recompute out.

    `depth` (n,) is how many layers of every chunk are under recompute. `copied` (n,) are the weights of the embedding of which
    another stage keeps a copy: that of the block `copied_for`, or the last where it is none.
    """

    forward_s: Floats
    backward_s: Floats
    recompute_s: Floats
    dense: Floats
    expert: Floats
    saved_bytes: Floats
    recomputed_bytes: Floats
    embedding: End
    head: End
    copied: Floats
    depth: Ints
    copied_for: int | None = None

    @classmethod
    def of(cls, pieces: Pieces, rows: npt.NDArray[np.intp]) -> Prefix:
        """Sums of the given rows of `pieces`, whose depth is left open."""
        order = np.array([pieces.names.index(name) for name in pieces.blocks])

        def run(name: str) -> Floats:
            values = [getattr(pieces.pieces[piece], name)[..., rows] for piece in pieces.names]
            each = np.stack([v.sum(axis=0) if v.ndim == 2 else v for v in values], axis=1)[:, order]
            return np.asarray(np.concatenate([np.zeros((len(each), 1)), np.cumsum(each, axis=1)], axis=1))

        def end(name: str) -> End:
            piece = pieces.pieces[name]
            forward_s, backward_s = (each[:, rows].sum(axis=0) for each in (piece.forward_s, piece.backward_s))
            return End(forward_s, backward_s, piece.dense_weights[rows], piece.saved_bytes[rows])

        return cls(
            run("forward_s"),
            run("backward_s"),
            run("recompute_s"),
            run("dense_weights"),
            run("expert_weights"),
            run("saved_bytes"),
            run("recomputed_bytes"),
            end("embedding"),
            end("head"),
            pieces.copied_weights[rows],
            np.zeros(len(rows), dtype=np.int64),
            pieces.copied_for,
        )

    def gathered(self, factor: Ints, depth: Ints) -> Prefix:
        """Sums of rows that stand for the given factor rows."""
        sums = (getattr(self, name)[factor] for name in list(Prefix.__dataclass_fields__)[:7])
        ends = (End(*(getattr(end, name)[factor] for name in End.__dataclass_fields__)) for end in (self.embedding, self.head))
        return Prefix(*sums, *ends, self.copied[factor], depth, self.copied_for)  # type: ignore[call-arg]

    @property
    def blocks(self) -> int:
        return int(self.forward_s.shape[1]) - 1

    def grid(self, stage: int, pp: int, longest: int, starts: Ints) -> Loads:
        """Loads of a stage that begins at a cut c of `starts` and holds l blocks, (n, c, longest+1); rows share their depth.

        Stages that would reach beyond the last block end with it.
        """
        depth = min(int(self.depth[0]), self.blocks)
        start = starts[:, None]
        stop = np.minimum(start + np.arange(longest + 1), self.blocks)
        again = np.minimum(start + depth, stop)

        def between(values: Floats, first: Cuts, last: Cuts) -> Floats:
            return np.asarray(values[:, last] - values[:, first])

        loads = Loads(
            between(self.forward_s, start, stop),
            between(self.backward_s, start, stop) + between(self.recompute_s, start, again),
            between(self.dense, start, stop),
            between(self.expert, start, stop),
            between(self.saved_bytes, again, stop) + between(self.recomputed_bytes, start, again),
        )
        ends = [end for end, here in ((self.embedding, stage == 0), (self.head, stage == pp - 1)) if here]
        for name in End.__dataclass_fields__:
            for end in ends:
                getattr(loads, name)[...] += getattr(end, name)[:, None, None]
        if pp > 1 and self.copied_for is not None:
            loads.dense[...] += self.copied[:, None, None] * ((start <= self.copied_for) & (self.copied_for < stop))
        elif pp > 1 and stage == pp - 1:
            loads.dense[...] += self.copied[:, None, None]
        return loads

    def before_grid(self, stage: int, nominal_recompute_s: Floats) -> tuple[Floats, Floats]:
        """Forward and backward seconds of the stages before a stage that begins at cut c, (n, blocks+1, 1) each.

        Where not all layers are redone, the stages before redo `nominal_recompute_s` (n,) whatever their cuts.
        """
        whole = int(self.depth[0]) >= self.blocks
        recompute = self.recompute_s if whole else nominal_recompute_s[:, None]
        begun = 1.0 if stage else 0.0
        forward = self.forward_s + begun * self.embedding.forward_s[:, None]
        backward = self.backward_s + recompute + begun * self.embedding.backward_s[:, None]
        return forward[:, :, None], backward[:, :, None]


def chunk_loads(pieces: Pieces, factor: Ints, depth: Ints, cuts: Cuts) -> Loads:
    """Loads of the chunks between `cuts` (n, chunks+1), or (1, chunks+1) for cuts that all rows share; (n, chunks).

    `factor` (n,) is each row's place in `pieces`, `depth` (n, chunks or 1) how many layers of every chunk it redoes. The embedding
    is in the first chunk, the head in the last, a copy of the embedding beside the head that is tied to it or MTP layers that read
    it.
    """
    return span_loads(pieces, factor, depth, cuts[:, :-1], cuts[:, 1:], cuts.shape[1] - 2)


def span_loads(pieces: Pieces, factor: Ints, depth: Ints, start: Cuts, stop: Cuts, last: int) -> Loads:
    """The same of some chunks, from `start` to before `stop`, (n or 1, spans) both, with the first and, at `last`, the last."""
    first, end, experts = start.T, stop.T, any(piece.expert_weights.any() for piece in pieces.pieces.values())
    again = np.minimum(first + np.minimum(depth.T, len(pieces.blocks)), end) if depth.any() else first
    shape = (len(first), len(factor))
    forward, backward, dense, expert, saved = (np.zeros(shape) for _ in range(5))
    for name in pieces.names:
        piece, running = pieces.pieces[name], pieces.running[name].astype(np.float64)
        held = running[end] - running[first]
        terms = [(forward, held, piece.once_s), (backward, held, piece.back_s)]
        terms += [(dense, held, piece.dense_weights), (saved, held, piece.saved_bytes)]
        if experts:
            terms.append((expert, held, piece.expert_weights))
        if again is not first:
            redone = running[again] - running[first]
            terms.append((backward, redone, piece.again_s))
            terms.append((saved, redone, piece.recomputed_bytes - piece.saved_bytes))
        for total, count, values in terms:
            total += count * values[factor]
    for name, span in (("embedding", 0), ("head", last)):
        piece = pieces.pieces[name]
        forward[span] += piece.once_s[factor]
        backward[span] += piece.back_s[factor]
        dense[span] += piece.dense_weights[factor]
        saved[span] += piece.saved_bytes[factor]
    if last > 0 and pieces.copied_for is not None:
        dense += pieces.copied_weights[factor] * ((first <= pieces.copied_for) & (pieces.copied_for < end))
    elif last > 0:
        dense[last] += pieces.copied_weights[factor]
    return Loads(forward.T, backward.T, dense.T, expert.T, saved.T, experts)


def saved_by_turns(saved_bytes: Floats, num_microbatches: Ints, pp: int, vpp: int, stages: Ints) -> Floats:
    """Saved bytes per micro-batch, for `in_flight` of them, of interleaved stages (k,) from their chunks' (n, vpp·k); (n, k).

    At its fullest a stage holds more micro-batches of its early chunks than of its late ones: these are what it is charged for.
    """
    saved = np.ascontiguousarray(saved_bytes.T).reshape(vpp, len(stages), -1)
    found = np.empty(saved.shape[1:])
    few = np.minimum(num_microbatches, TURNS_TOLD * pp)
    for count in np.unique(few).tolist():
        rows = np.flatnonzero(few == count)
        mine = np.take(saved, rows, axis=-1)
        for place, stage in enumerate(stages.tolist()):
            held = held_by_chunk(pp, vpp, count, stage)
            share = vpp / float(in_flight(INTERLEAVED, pp, vpp, count, stage))
            found[place, rows] = (held @ mine[:, place]).max(axis=0) * share
    return np.asarray(found.T)


def recompute_depths(table: LayoutTable) -> Ints:
    """Layers of every chunk that are under recompute, (n,): all for selective, uniform and plain full, K for block depth K."""
    return depths(table.recompute_mode, table.recompute_layers)


def depths(mode: Ints, layers: Ints) -> Ints:
    """The same from the two columns that say it."""
    return np.where(mode == NONE, 0, np.where(mode == FULL_BLOCK, layers, ALL_LAYERS))


def piece_counts(names: tuple[str, ...], blocks: tuple[str, ...], split: Split, depth: int) -> tuple[Floats, Floats]:
    """How many of each piece a chunk holds, and how many of those are under recompute; both (pieces, pp·vpp)."""
    chunks = split.pp * split.vpp
    counts, again = np.zeros((len(names), chunks)), np.zeros((len(names), chunks))
    for chunk, (first, end) in enumerate(zip(split.cuts, split.cuts[1:], strict=False)):
        for position, block in enumerate(blocks[first:end]):
            counts[names.index(block), chunk] += 1
            again[names.index(block), chunk] += position < (split.redone[chunk] if split.redone else depth)
    counts[names.index("embedding"), 0] = 1
    counts[names.index("head"), chunks - 1] = 1
    return counts, again

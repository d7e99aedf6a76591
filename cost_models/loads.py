"""What stages hold, from running sums over the model's blocks: any contiguous cut is a difference of two of them."""

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
        forward, backward, dense, expert, saved = (each[rows] for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def pick(self, spans: Ints) -> Loads:
        """The given columns."""
        forward, backward, dense, expert, saved = (np.take(each, spans, axis=1) for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def across(self) -> Loads:
        """With an axis after the rows, along which what they hold is the same."""
        forward, backward, dense, expert, saved = (each[:, None] for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)

    def folded(self, pp: int) -> Loads:
        """Chunks of a stage put together: (n, pp·vpp) → (n, pp)."""
        if self.dense.shape[1] == pp:
            return self
        forward, backward, dense, expert, saved = (each.reshape(len(each), -1, pp).sum(axis=1) for each in self.columns)
        return Loads(forward, backward, dense, expert, saved, self.experts)


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
    the last stage keeps a copy: as a tied head, or for the look-ups of MTP layers.
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
        )

    def gathered(self, factor: Ints, depth: Ints) -> Prefix:
        """Sums of rows that stand for the given factor rows."""
        sums = (getattr(self, name)[factor] for name in list(Prefix.__dataclass_fields__)[:7])
        ends = (End(*(getattr(end, name)[factor] for name in End.__dataclass_fields__)) for end in (self.embedding, self.head))
        return Prefix(*sums, *ends, self.copied[factor], depth)  # type: ignore[call-arg]

    @property
    def blocks(self) -> int:
        return int(self.forward_s.shape[1]) - 1

    def grid(self, stage: int, pp: int, longest: int) -> Loads:
        """Loads of a stage that begins at cut c and holds l blocks, (n, blocks+1, longest+1), for rows that share their depth.

        Stages that would reach beyond the last block end with it.
        """
        depth = min(int(self.depth[0]), self.blocks)
        start = np.arange(self.blocks + 1)[:, None]
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
        if pp > 1 and stage == pp - 1:
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

    `factor` and `depth` (n,) are each row's place in `pieces` and how many layers of every chunk it redoes. The embedding is in
    the first chunk, the head in the last, with a copy of the embedding where it is tied to it or MTP layers look it up.
    """
    return span_loads(pieces, factor, depth, cuts[:, :-1], cuts[:, 1:], cuts.shape[1] - 2)


def span_loads(pieces: Pieces, factor: Ints, depth: Ints, start: Cuts, stop: Cuts, last: int) -> Loads:
    """The same of some chunks, from `start` to before `stop`, (n or 1, spans) both, with the first and, at `last`, the last."""
    again = np.minimum(start + np.minimum(depth, len(pieces.blocks))[:, None], stop) if depth.any() else start
    shape = (len(factor), start.shape[1])
    experts = any(piece.expert_weights.any() for piece in pieces.pieces.values())
    found = Loads(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape), experts)
    for name in pieces.names:
        piece, running = pieces.pieces[name], pieces.running[name]
        held = (running[stop] - running[start]).astype(np.float64)
        terms = [(found.forward_s, held, piece.once_s), (found.backward_s, held, piece.back_s)]
        terms += [(found.dense, held, piece.dense_weights), (found.saved_bytes, held, piece.saved_bytes)]
        if found.experts:
            terms.append((found.expert, held, piece.expert_weights))
        if again is not start:
            redone = (running[again] - running[start]).astype(np.float64)
            terms.append((found.backward_s, redone, piece.again_s))
            terms.append((found.saved_bytes, redone, piece.recomputed_bytes - piece.saved_bytes))
        for total, count, values in terms:
            total += count * values[factor][:, None]
    for name, span in (("embedding", 0), ("head", last)):
        piece = pieces.pieces[name]
        found.forward_s[:, span] += piece.once_s[factor]
        found.backward_s[:, span] += piece.back_s[factor]
        found.dense[:, span] += piece.dense_weights[factor]
        found.saved_bytes[:, span] += piece.saved_bytes[factor]
    if last > 0:
        found.dense[:, last] += pieces.copied_weights[factor]
    return found


def saved_by_turns(saved_bytes: Floats, num_microbatches: Ints, pp: int, vpp: int, stages: Ints) -> Floats:
    """Saved bytes per micro-batch, for `in_flight` of them, of interleaved stages (k,) from their chunks' (n, vpp·k); (n, k).

    At its fullest a stage holds more micro-batches of its early chunks than of its late ones. It is charged for these, or for as
    many of its mean chunk where that is more: what bounds take a stage to hold at least is then right however its layers are cut.
    """
    saved = saved_bytes.reshape(len(saved_bytes), vpp, len(stages))
    found = np.asarray(saved.sum(axis=1))
    few = np.minimum(num_microbatches, TURNS_TOLD * pp)
    for count in np.unique(few).tolist():
        rows = np.flatnonzero(few == count)
        for place, stage in enumerate(stages.tolist()):
            held = held_by_chunk(pp, vpp, count, stage)
            share = vpp / float(in_flight(INTERLEAVED, pp, vpp, count, stage))
            found[rows, place] = np.maximum(found[rows, place], (saved[rows, :, place] @ held.T).max(axis=1) * share)
    return found


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
            again[names.index(block), chunk] += position < depth
    counts[names.index("embedding"), 0] = 1
    counts[names.index("head"), chunks - 1] = 1
    return counts, again

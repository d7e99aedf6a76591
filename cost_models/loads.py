"""What stages hold, from running sums over the model's blocks: any contiguous cut is a difference of two of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import ALL_LAYERS, FULL_BLOCK, NONE, Floats, Ints, LayoutTable, Split
from .layers import Pieces

Cuts = npt.NDArray[np.int64]


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

    def folded(self, pp: int) -> Loads:
        """Chunks of a stage put together: (n, pp·vpp) → (n, pp)."""
        names = Loads.__dataclass_fields__
        return Loads(*(getattr(self, name).reshape(len(self.dense), -1, pp).sum(axis=1) for name in names))


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

    `depth` (n,) is how many layers of every chunk are under recompute. `second_embedding` marks models whose last
    stage keeps a copy of the embedding: as a tied head, or for the look-ups of MTP layers.
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
    depth: Ints
    second_embedding: bool

    @classmethod
    def of(cls, pieces: Pieces, depth: Ints, tied: bool) -> Prefix:
        """Sums of the factor rows of `pieces`."""
        order = np.array([pieces.names.index(name) for name in pieces.blocks])

        def run(name: str) -> Floats:
            values = [getattr(pieces.pieces[piece], name) for piece in pieces.names]
            each = np.stack([v.sum(axis=0) if v.ndim == 2 else v for v in values], axis=1)[:, order]
            return np.asarray(np.concatenate([np.zeros((len(each), 1)), np.cumsum(each, axis=1)], axis=1))

        def end(name: str) -> End:
            piece = pieces.pieces[name]
            return End(piece.forward_s.sum(axis=0), piece.backward_s.sum(axis=0), piece.dense_weights, piece.saved_bytes)

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
            depth,
            tied or "mtp" in pieces.blocks,
        )

    def gathered(self, factor: Ints, depth: Ints) -> Prefix:
        """Sums of rows that stand for the given factor rows."""
        sums = (getattr(self, name)[factor] for name in list(Prefix.__dataclass_fields__)[:7])
        ends = (End(*(getattr(end, name)[factor] for name in End.__dataclass_fields__)) for end in (self.embedding, self.head))
        return Prefix(*sums, *ends, depth, self.second_embedding)  # type: ignore[call-arg]

    @property
    def blocks(self) -> int:
        return int(self.forward_s.shape[1]) - 1

    @property
    def work_s(self) -> Floats:
        """Forward and backward seconds of the whole model per micro-batch without recompute, (n,)."""
        ends = self.embedding.forward_s + self.embedding.backward_s + self.head.forward_s + self.head.backward_s
        return np.asarray(self.forward_s[:, -1] + self.backward_s[:, -1] + ends)

    def total_s(self, pp: int | Ints) -> Floats:
        """The same with what is recomputed on pp stages (one pp, or one per row), (n,)."""
        return np.asarray(self.work_s + self.nominal_recompute_s(pp, pp))

    def nominal_recompute_s(self, pp: int | Ints, stages: int | Ints) -> Floats:
        """Recompute seconds of the first `stages` of pp stages, at block depth K their mean: K blocks each; (n,), or
        (n, stages) for several stages of one pp.

        The mean keeps fill and drain of a stage independent of how the stages before were cut; its own steady work is exact.
        """
        share = np.where(self.depth >= self.blocks, 1.0, np.minimum(self.depth * pp / self.blocks, 1.0))
        whole = share * self.recompute_s[:, -1] / pp
        return np.asarray(whole[:, None] * stages if np.ndim(stages) > np.ndim(pp) else whole * stages)

    def chunks(self, cuts: Cuts) -> Loads:
        """Loads of the chunks between `cuts` (n, chunks+1), (n, chunks)."""
        start, stop = cuts[:, :-1], cuts[:, 1:]
        again = np.minimum(start + np.minimum(self.depth, self.blocks)[:, None], stop)

        def between(values: Floats, first: Cuts, last: Cuts) -> Floats:
            return np.asarray(np.take_along_axis(values, last, axis=1) - np.take_along_axis(values, first, axis=1))

        loads = Loads(
            between(self.forward_s, start, stop),
            between(self.backward_s, start, stop) + between(self.recompute_s, start, again),
            between(self.dense, start, stop),
            between(self.expert, start, stop),
            between(self.saved_bytes, again, stop) + between(self.recomputed_bytes, start, again),
        )
        several = cuts.shape[1] > 2
        for name in End.__dataclass_fields__:
            values = getattr(loads, name)
            values[:, 0] += getattr(self.embedding, name)
            values[:, -1] += getattr(self.head, name)
        if self.second_embedding and several:
            loads.dense[:, -1] += self.embedding.dense
        return loads

    def before(self, cuts: Cuts, pp: int) -> tuple[Floats, Floats]:
        """Forward and backward seconds of the stages before each stage, for cuts (n, pp+1); (n, pp) each."""
        stages = np.arange(pp)
        first = cuts[:, :-1]
        exact = np.take_along_axis(self.recompute_s, first, axis=1)
        recompute = np.where((self.depth >= self.blocks)[:, None], exact, self.nominal_recompute_s(pp, stages))
        forward = np.take_along_axis(self.forward_s, first, axis=1) + np.where(stages > 0, self.embedding.forward_s[:, None], 0.0)
        backward = np.take_along_axis(self.backward_s, first, axis=1) + np.where(
            stages > 0, self.embedding.backward_s[:, None], 0.0
        )
        return forward, backward + recompute

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
        if self.second_embedding and pp > 1 and stage == pp - 1:
            loads.dense[...] += self.embedding.dense[:, None, None]
        return loads

    def before_grid(self, stage: int, pp: int) -> tuple[Floats, Floats]:
        """Forward and backward seconds of the stages before a stage that begins at cut c, (n, blocks+1, 1) each."""
        whole = int(self.depth[0]) >= self.blocks
        recompute = self.recompute_s if whole else self.nominal_recompute_s(pp, stage)[:, None]
        begun = 1.0 if stage else 0.0
        forward = self.forward_s + begun * self.embedding.forward_s[:, None]
        backward = self.backward_s + recompute + begun * self.embedding.backward_s[:, None]
        return forward[:, :, None], backward[:, :, None]


def recompute_depths(table: LayoutTable) -> Ints:
    """Layers of every chunk that are under recompute, (n,): all for selective, uniform and plain full, K for block depth K."""
    block = np.where(table.recompute_mode == FULL_BLOCK, table.recompute_layers, ALL_LAYERS)
    return np.where(table.recompute_mode == NONE, 0, block)


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

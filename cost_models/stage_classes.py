"""Stages that hold the same blocks: what follows from that alone is worked out once per class of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..search_spaces.layout import Ints, Split


@dataclass(frozen=True)
class StageClasses:
    """Classes of the chunks and stages of one split, numbered as they first appear; the first and the last are their own.

    `chunk` (pp·vpp,) and `stage` (pp,) are the class of each.
    """

    split: Split
    chunk: Ints
    stage: Ints

    @classmethod
    def of(cls, split: Split, blocks: tuple[str, ...]) -> StageClasses:
        """Chunks are alike if their blocks are; stages if their chunks are."""
        count, cuts = split.pp * split.vpp, split.cuts
        held = [(blocks[cuts[c] : cuts[c + 1]], c == 0, c == count - 1) for c in range(count)]
        chunk = _numbered(held)
        stage = _numbered([tuple(chunk[s :: split.pp]) for s in range(split.pp)])
        return cls(split, np.array(chunk, dtype=np.int64), np.array(stage, dtype=np.int64))

    @cached_property
    def cuts(self) -> Ints:
        """Where all rows are cut, (1, pp·vpp+1)."""
        return np.array([self.split.cuts], dtype=np.int64)

    @cached_property
    def first(self) -> Ints:
        """The first stage of each class, rising."""
        return np.unique(self.stage, return_index=True)[1].astype(np.int64)

    @cached_property
    def runs(self) -> Ints:
        """The class of each run of neighbours of one class, (runs,)."""
        return self.stage[self._begun]

    @cached_property
    def run_lengths(self) -> Ints:
        """Stages of each run, (runs,)."""
        return np.diff(self._begun, append=len(self.stage))

    @cached_property
    def held(self) -> Ints:
        """The class of each chunk of the first stage of every class, vpp by vpp, (vpp·classes,)."""
        rows = np.arange(self.split.vpp)[:, None] * self.split.pp
        return np.asarray(self.chunk[(rows + self.first).ravel()])

    @cached_property
    def first_runs(self) -> Ints:
        """The first run of each class, rising."""
        return np.unique(self.runs, return_index=True)[1].astype(np.int64)

    @cached_property
    def _begun(self) -> Ints:
        return np.flatnonzero(np.diff(self.stage, prepend=-1)).astype(np.int64)

    @cached_property
    def spans(self) -> tuple[Ints, Ints, int]:
        """Where the chunks of each class start and stop, (1, classes), and the class of the last chunk."""
        first = np.unique(self.chunk, return_index=True)[1]
        return self.cuts[:, first], self.cuts[:, first + 1], int(self.chunk[-1])


def _numbered(keys: Sequence[tuple[object, ...]]) -> list[int]:
    """Each key's place among the distinct ones, in the order in which they appear."""
    place: dict[tuple[object, ...], int] = {}
    return [place.setdefault(key, len(place)) for key in keys]

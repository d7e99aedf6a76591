"""Where blocks may be cut into chunks: what the stack can be told, and what frameworks ask of MTP layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .layout import Bools, Ints
from .stack import Stack


@dataclass(frozen=True)
class Cutting:
    """The legal cuts of a pipeline of pp·vpp chunks over `blocks`, of which the first `layers` are decoder layers, the rest MTP.

    Every chunk holds a block, but where `bare`: the first chunk may hold the embedding alone, the last the loss alone. MTP layers
    share one chunk, the last that has blocks, with a decoder layer unless they may stand `alone` in it. Of several stages the first
    as many chunks as one holds have `led` blocks at least.
    """

    pp: int
    vpp: int
    layers: int
    blocks: int
    alone: bool = False
    bare: tuple[bool, bool] = (False, False)
    led: int = 0

    @classmethod
    def of(cls, stack: Stack, layers: int, mtp: int, pp: int, vpp: int, led: int = 0) -> Cutting:
        """What a stack can be told. A layout string puts MTP layers before a bare loss too, if several chunks a stage not on the
        first stage (Megatron-LM pipeline_parallel_layer_layout.py); an offset leaves them with the loss.
        """
        several, last = pp * vpp > 1, stack.bare_last(vpp)
        before_loss = mtp == 0 or ("layout" in stack.split_forms and (vpp == 1 or pp > 2))
        bare = (stack.bare_ends and several, last and several and before_loss)
        return cls(pp, vpp, layers, layers + mtp, last and mtp > 0, bare, led)

    @property
    def chunks(self) -> int:
        return self.pp * self.vpp

    @property
    def last_start(self) -> int:
        """The last block that a chunk with blocks may begin at."""
        return self.layers if self.alone else self.layers - 1

    @cached_property
    def least(self) -> Ints:
        """Blocks of every chunk at least, (chunks,): none where there are more chunks than can be filled, which no rule allows."""
        if self.chunks > self.blocks + sum(self.bare):
            return np.zeros(self.chunks, dtype=np.int64)
        found = np.ones(self.chunks, dtype=np.int64)
        found[0] -= self.bare[0]
        found[-1] -= self.bare[1]
        return found

    @cached_property
    def latest(self) -> Ints:
        """The last block that every chunk may begin at, or `blocks`, with what the chunks behind it hold at least, (chunks,)."""
        found = np.full(self.chunks, self.last_start)
        found[-1] = self.blocks if self.bare[1] else self.last_start
        for chunk in reversed(range(self.chunks - 1)):
            found[chunk] = min(found[chunk], found[chunk + 1] - self.least[chunk])
        return found

    def earliest(self, chunk: int) -> int:
        """The first block that a chunk may begin at for the sake of the first stage's."""
        return self.led if chunk >= self.vpp else 0

    def begins(self, chunk: int) -> Bools:
        """Whether a chunk may begin at each block, or behind all of them, (blocks+1,)."""
        block = np.arange(self.blocks + 1)
        bare = chunk == self.chunks - 1 and self.bare[1]
        return np.asarray((block >= self.earliest(chunk)) & ((block <= self.last_start) | (bare & (block == self.blocks))))

    @property
    def held_back(self) -> list[int]:
        """Chunks, but the first, that may not begin at every block that the others leave them."""
        return sorted({self.vpp, self.chunks - 2, self.chunks - 1} & set(range(1, self.chunks)))

    def legal(self, cuts: Ints) -> Bools:
        """Which cuts (n, chunks+1), from 0 to `blocks`, are legal, (n,)."""
        fine = (np.diff(cuts, axis=1) >= self.least).all(axis=1)
        for chunk in self.held_back:
            fine &= self.begins(chunk)[np.clip(cuts[:, chunk], 0, self.blocks)]
        return np.asarray(fine)

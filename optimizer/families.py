"""Ways to cut that only count layers, whatever these work.

Interleaved chunks of e or e + 1 blocks, the larger ones first or behind: in the steady state all stages take their next pass at
about the same time, so that the slowest of each moment sets the pace: chunks that are alike keep it short. What the head takes
is made up for by a last chunk of fewer blocks; the first may be a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..search_spaces.cutting import Cutting
from ..search_spaces.layout import Ints

FEWER = 3
"""Blocks at most that the last chunk holds fewer than others: heads take as long as one or two."""


@lru_cache(maxsize=256)
def layer_cuts(cutting: Cutting) -> Ints:
    """The legal cuts (k, chunks+1) of this kind, each once; there may be none."""
    found = [np.cumsum([0, *held]) for fewer in range(FEWER + 1) for held in _held(cutting, fewer)]
    cuts = np.array(found, dtype=np.int64).reshape(len(found), cutting.chunks + 1)
    legal = cuts[cutting.legal(cuts)]
    _, first = np.unique(legal, axis=0, return_index=True)
    return np.asarray(legal[np.sort(first)])


@lru_cache(maxsize=256)
def end_cuts(cutting: Cutting) -> Ints:
    """All cuts (k, chunks+1) of a stack that is told how many layers its first and its last stage hold, nearest to equal first.

    The chunks of a stage are equal, the stages between the two as well, and MTP layers are with the loss: Megatron-LM
    megatron/core/transformer/transformer_config.py, num_layers_in_first_pipeline_stage.
    """
    pp, (turn, rest) = cutting.pp, divmod(cutting.layers, cutting.vpp)
    if pp == 1 or rest or turn < pp:
        return np.empty((0, cutting.chunks + 1), dtype=np.int64)
    first, each = (grid.ravel() for grid in np.meshgrid(np.arange(1, turn), np.arange(1, turn + 1) if pp > 2 else [0]))
    last = turn - first - each * (pp - 2)
    held = np.stack([first, *[each] * (pp - 2), last], axis=1)[last > 0]
    held = held[np.lexsort((held[:, 0], -held.min(axis=1), held.max(axis=1)))]
    cuts = np.concatenate([np.zeros((len(held), 1), dtype=np.int64), np.cumsum(np.tile(held, cutting.vpp), axis=1)], axis=1)
    cuts[:, -1] = cutting.blocks
    return np.asarray(cuts)


def _held(cutting: Cutting, fewer: int) -> Iterator[list[int]]:
    """Blocks of every chunk: ends count as smaller chunks, then as larger ones, of which the last holds `fewer` less."""
    each, more = divmod(cutting.blocks + fewer, cutting.chunks)
    inner = cutting.chunks - 2
    less = cutting.chunks - more
    for end, larger in ((each, more), (each + 1, inner - less)):
        if 0 <= larger <= inner and end >= fewer:
            small = inner - larger
            many, few = [each + 1] * larger, [each] * small
            for middle in (many + few, few + many):
                yield [end, *middle, end - fewer]

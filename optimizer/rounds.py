"""Interleaved chunks cut round by round, so that the chunks of every round are alike.

A round are the chunks that stages hold as their first, their second, …; a micro-batch passes one round after the other. While
stages work through a round its largest chunk sets the pace, so that what counts is the sum of these over the rounds: layers left
over belong into as few rounds as possible. The paces of which the sum is least are found by dynamic programming over (round, block)
for many rows at once; within a round work is balanced.
"""

from __future__ import annotations

import numpy as np

from ..search_spaces.cutting import Cutting
from ..search_spaces.layout import Floats, Ints

SLACK = 1e-9  # relative, of sums that are compared


def round_starts(work_s: Floats, head_s: Floats, cutting: Cutting) -> Ints:
    """The first block of every round, and the end of the last, (n, vpp+1), for the least sum of paces.

    `work_s` (n, blocks+1) are seconds of the embedding and of the blocks before each block, `head_s` (n,) those of the head.
    """
    pp, vpp, latest = cutting.pp, cutting.vpp, cutting.latest
    paces = _paces(work_s, head_s, cutting)
    chunk = _furthest(work_s, paces, 2 * paces.shape[1])
    but_one = _repeated(chunk, pp - 1)
    last = np.minimum(but_one, latest[-1])
    left_s = (work_s[:, -1] + head_s)[:, None, None] - _read(work_s, last)
    rest_s = np.where(left_s <= paces[:, :, None] * (1.0 + SLACK), paces[:, :, None], np.inf).min(axis=1)
    whole, ends = np.take_along_axis(chunk, but_one, axis=2), []
    for turn in reversed(range(2, vpp)):
        end = np.minimum(whole, latest[turn * pp])
        sum_s = paces[:, :, None] + _read(rest_s, end)
        ends.append(np.take_along_axis(end, sum_s.argmin(axis=1)[:, None], axis=1)[:, 0])
        rest_s = sum_s.min(axis=1)
    begun = np.maximum((work_s[:, None, :] <= paces[:, :, None] * (1.0 + SLACK)).sum(axis=2) - 1, 0)
    end = np.minimum(np.take_along_axis(but_one, begun[:, :, None], axis=2)[:, :, 0], latest[pp])
    sum_s = paces + np.take_along_axis(rest_s, end, axis=1)
    starts = [np.zeros(len(work_s), dtype=np.int64), np.take_along_axis(end, sum_s.argmin(axis=1)[:, None], axis=1)[:, 0]]
    for after in reversed(ends):
        starts.append(np.take_along_axis(after, starts[-1][:, None], axis=1)[:, 0])
    return np.stack([*starts, np.full(len(work_s), cutting.blocks)], axis=1)


def paces_s(work_s: Floats, head_s: Floats, cuts: Ints, pp: int) -> Floats:
    """The sum over rounds of their largest chunk, (n,)."""
    until = np.take_along_axis(work_s, cuts, axis=1)
    until[:, 0], until[:, -1] = 0.0, until[:, -1] + head_s
    return np.asarray(np.diff(until, axis=1).reshape(len(cuts), -1, pp).max(axis=2).sum(axis=1))


def _paces(work_s: Floats, head_s: Floats, cutting: Cutting) -> Floats:
    """What the largest chunk of a round may take, rising: some of the largest blocks, without and with the head, (n, paces)."""
    count = np.arange(-(-cutting.blocks // cutting.chunks) + 2)
    blocks_s = np.diff(work_s, axis=1).max(axis=1)[:, None] * count
    return np.sort(np.concatenate([blocks_s[:, 1:], head_s[:, None] + blocks_s[:, :-1]], axis=1), axis=1)


def _furthest(work_s: Floats, paces: Floats, most: int) -> Ints:
    """Where a chunk ends at the latest that begins at each block and keeps a pace, (n, paces, blocks+1); it holds `most` blocks."""
    blocks = work_s.shape[1] - 1
    found = np.broadcast_to(np.arange(blocks + 1), (*paces.shape, blocks + 1)).copy()
    for length in range(1, min(most, blocks) + 1):
        held = (work_s[:, length:] - work_s[:, :-length])[:, None, :]
        found[:, :, :-length] += held <= paces[:, :, None] * (1.0 + SLACK)
    return found


def _repeated(step: Ints, times: int) -> Ints:
    """Where so many steps lead, (n, paces, blocks+1)."""
    found = np.broadcast_to(np.arange(step.shape[2]), step.shape)
    while times:
        if times % 2:
            found = np.take_along_axis(step, found, axis=2)
        step, times = np.take_along_axis(step, step, axis=2), times // 2
    return np.asarray(found)


def _read(values: Floats, place: Ints) -> Floats:
    """Values (n, blocks+1) at places (n, paces, blocks+1)."""
    return np.asarray(values[np.arange(len(values))[:, None, None], place])

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
CELLS_AT_ONCE = 1 << 16
"""Values of one array of rows, paces and blocks that are worked on together: they stay in the cache."""


def round_starts(work_s: Floats, head_s: Floats, cutting: Cutting) -> Ints:
    """The first block of every round, and the end of the last, (n, vpp+1), for the least sum of paces.

    `work_s` (n, blocks+1) are seconds of the embedding and of the blocks before each block, `head_s` (n,) those of the head.
    """
    paces = _paces(work_s, head_s, cutting)
    most = 2 * paces.shape[1]
    paces = paces[:, _first_enough(paces, work_s[:, -1] + head_s, cutting) :]
    at_once = max(1, CELLS_AT_ONCE // (paces.shape[1] * work_s.shape[1]))
    some = (slice(begin, begin + at_once) for begin in range(0, max(1, len(work_s)), at_once))
    return np.concatenate([_starts(work_s[each], head_s[each], paces[each], most, cutting) for each in some])


def _starts(work_s: Floats, head_s: Floats, paces: Floats, most: int, cutting: Cutting) -> Ints:
    """The same of some rows with the paces that their rounds may keep, (n, paces); a chunk holds `most` blocks."""
    pp, vpp, latest = cutting.pp, cutting.vpp, cutting.latest
    begin, row = _begins(paces.size, work_s.shape[1]).reshape(*paces.shape, 1), _begins(*work_s.shape)
    chunk = _furthest(work_s, paces, most)
    but_one = _repeated(chunk, pp - 1)
    whole = chunk.take(begin + but_one)
    left_s = (work_s[:, -1] + head_s)[:, None, None] - work_s.take(row[:, None, None] + np.minimum(but_one, latest[-1]))
    rest_s = np.where(left_s <= paces[:, :, None] * (1.0 + SLACK), paces[:, :, None], np.inf).min(axis=1)
    ends = []
    for turn in reversed(range(2, vpp)):
        end = np.minimum(whole, latest[turn * pp])
        sum_s = paces[:, :, None] + rest_s.take(row[:, None, None] + end)
        best = sum_s.argmin(axis=1)[:, None]
        ends.append(np.take_along_axis(end, best, axis=1)[:, 0])
        rest_s = np.take_along_axis(sum_s, best, axis=1)[:, 0]
    begun = np.maximum((work_s[:, None, :] <= paces[:, :, None] * (1.0 + SLACK)).sum(axis=2) - 1, 0)
    end = np.minimum(but_one.take(begin[:, :, 0] + begun), latest[pp])
    sum_s = paces + rest_s.take(row[:, None] + end)
    starts = [np.zeros(len(work_s), dtype=np.int64), np.take_along_axis(end, sum_s.argmin(axis=1)[:, None], axis=1)[:, 0]]
    for after in reversed(ends):
        starts.append(after.take(row + starts[-1]))
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


def _first_enough(paces: Floats, total_s: Floats, cutting: Cutting) -> int:
    """The first of the rising paces (n, paces) that leaves other rounds, at the longest pace, no more work than they can do."""
    least_s = total_s / cutting.pp * (1.0 - 1e-6) - (cutting.vpp - 1) * paces[:, -1]
    return int((paces < least_s[:, None]).sum(axis=1).min(initial=paces.shape[1] - 1))


def _furthest(work_s: Floats, paces: Floats, most: int) -> Ints:
    """Where a chunk ends at the latest that begins at each block and keeps a pace, (n, paces, blocks+1); it holds `most` blocks.

    As many of the largest block as the pace has room for always fit; from there one block after the other while it does.
    """
    start, limit_s = np.arange(work_s.shape[1]), (paces * (1.0 + SLACK))[:, :, None]
    last = np.minimum(start + most, len(start) - 1)
    largest_s = np.diff(work_s, axis=1).max(axis=1)[:, None, None]
    found = np.minimum(start + (limit_s / largest_s).astype(np.int64), last)
    until_s = (work_s[:, None, :] + limit_s).ravel()
    row = np.broadcast_to(_begins(*work_s.shape)[:, None, None], found.shape).ravel()
    end, last = found.ravel(), np.broadcast_to(last, found.shape).ravel()
    going = np.flatnonzero((work_s.take(row + np.minimum(end + 1, last)) <= until_s) & (end < last))
    while len(going):
        end[going] += 1
        going = going[end[going] < last[going]]
        going = going[work_s.take(row[going] + end[going] + 1) <= until_s[going]]
    return np.asarray(found)


def _repeated(step: Ints, times: int) -> Ints:
    """Where so many steps lead, (n, paces, blocks+1)."""
    begin = _begins(step.shape[0] * step.shape[1], step.shape[2]).reshape(*step.shape[:2], 1)
    found = np.broadcast_to(np.arange(step.shape[2]), step.shape)
    while times:
        if times % 2:
            found = step.take(begin + found)
        step, times = step.take(begin + step) if times > 1 else step, times // 2
    return np.asarray(found)


def _begins(rows: int, length: int) -> Ints:
    """Where each row of an array of so many begins in all of its values, (rows,)."""
    return np.arange(rows) * length

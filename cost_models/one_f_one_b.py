"""The longest paths through a 1F1B schedule in closed form: when every stage ends its last backward pass.

Stage s runs w_s = pp−1−s forwards, then forward and backward in turn, then the backwards that are left. Number a stage's passes so
that its k-th steady forward, that of micro-batch k + w_s, and its k-th backward share k: a forward then leads to the next stage's
at k + 1, a backward to the one before's at k. A path crosses three regions:

- warm-up, a grid: to the steady state of stage s it takes Σ_{j≤s} f_j and w_s times the longest of those forwards;
- steady state: going up as far as s, back down, and round. A round trip between stages u … v takes Σ(f+b) + 2(v−u)·p2p and moves
  v−u+1 micro-batches on, so that without p2p none has a longer mean than its slowest stage alone;
- drain, the warm-up reversed in time with b for f.

With X_s = Σ_{j≤s}(f_j+b_j) + 2s·p2p the longest path whose lowest steady stage is u, into the steady state at s ≥ u and out of it
at t ≥ u, takes (m−1−w_u)·x_u − X_u + (X_s + w_s·max_{j≤s} f_j) + (X_t + w_t·max_{j≤t} b_j). To enter or leave below u never pays:
where f_j > x_u, x_j is longer still. So one running maximum over s and one over t do. Fewer micro-batches than stages leave no
steady state below pp−m. With p2p, rounds of u alone give way to longer trips where those have the longer mean. Exact without p2p
and for equal stages; otherwise every value is that of some path, and the longest that is left out is longer by less than 1 %
(tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

VALUES_AT_ONCE = 1 << 15
"""Values of one array that are worked on together: enough to spare calls, few enough to stay in the cache."""


@dataclass(frozen=True, eq=False)
class _Turns:
    """The stages where paths turn, by rising stage: (turns, n) each, `stage` broadcasts.

    `forward`, `backward` are the stage's own; `reach` is X_s, `below` Σ_{j<s} b_j + s·p2p; `rounds` m−1−w_s, below zero where there
    is no steady state; `lowest` marks those that can be the lowest of a path's steady stages.
    """

    pp: int
    stage: Floats
    forward: Floats
    backward: Floats
    reach: Floats
    below: Floats
    rounds: Floats
    lowest: npt.NDArray[np.bool_]
    p2p: Floats

    @cached_property
    def work(self) -> Floats:
        return self.forward + self.backward

    @cached_property
    def behind(self) -> Floats:
        """Stages after this one, which are its warm-up forwards too."""
        return self.pp - 1.0 - self.stage


def last_backward_ends_s(pp: int, lengths: Ints, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> Floats:
    """When the first stage of every run of equal stages ends its last backward pass, (n, runs) seconds; −inf for runs of none.

    `lengths` (runs,) or (n, runs) stages each, of `forward` and `backward` (n, runs) seconds; `p2p`, `m` (n,). Along a run paths
    are linear in their turns, which makes its first and last stage enough, and the first that has a steady state.
    """
    sizes = np.asarray(lengths, dtype=np.float64).reshape(-1, forward.shape[1]).T  # (runs, n), or (runs, 1) for all rows
    turns, firsts = _turns(pp, sizes, forward.T, backward.T, p2p, m)
    steady = np.where(turns.lowest, turns.rounds * turns.work - turns.reach, -np.inf)
    trips, with_top = _longer_trips(turns) if (p2p > 0).any() else (0.0, 0.0)
    entry = turns.reach + turns.behind * _running_max(turns.forward)
    entries = _running_max(entry[::-1])[::-1]
    # Without a round of u's own, the trip that joins entry and exit above u cannot pass through u: it is an edge each way shorter.
    shorter = np.where(turns.rounds == 0, 2.0 * p2p, 0.0)
    one, joined = steady + trips + entries, steady + with_top - shorter
    any_exit = np.maximum(steady + trips + np.maximum(entries - shorter, entry), joined + turns.reach[-1])
    lower, last_exit = _running_max(any_exit), (joined + entries).max(axis=0)
    ends = np.empty((len(firsts), len(m)))
    at_once = max(1, VALUES_AT_ONCE // max(1, turns.reach.size))
    for run in range(0, len(firsts), at_once):
        own, begin = firsts[run : run + at_once], firsts[run]
        backward = turns.backward[begin:, None]  # (turns from the first of them on, runs, n)
        later = np.arange(begin, len(turns.reach))[:, None] >= own
        longest = _running_max(backward if at_once == 1 else np.where(later[:, :, None], backward, 0.0))
        out = turns.behind[begin:, None] * longest + turns.reach[begin:, None] - turns.below[own]
        if at_once > 1:
            out[~later] = -np.inf
        exits = _running_max(out[::-1])[::-1]
        found = np.maximum(any_exit[begin:, None] + exits, one[begin:, None] + out).max(axis=0)
        np.maximum(found, lower[begin] + exits[0], out=found)
        ends[run : run + at_once] = np.maximum(found, last_exit + out[-1])
    return np.where(sizes > 0, ends, -np.inf).T


def _turns(pp: int, sizes: Floats, forward: Floats, backward: Floats, p2p: Floats, m: Ints) -> tuple[_Turns, Ints]:
    """The turns of rows whose runs come one by one, (runs, n), and the place of every run's first turn among them."""
    rounds = m.astype(np.float64) - pp  # those of a stage 0, negative where some stages have no steady state
    begin = np.cumsum(sizes, axis=0) - sizes
    last = sizes - 1.0  # a run of none doubles the last stage of the one before, at no time of its own
    few, firsts = bool((rounds < 0).any()), []
    places: list[Floats] = []
    run_of: list[int] = []
    for run, size in enumerate(sizes):
        firsts.append(len(places))
        places.append(np.minimum(last[run], 0.0))
        if (size > 1).any():
            places += [np.clip(-rounds - begin[run], 0.0, last[run])] if few and (size > 2).any() else []
            places.append(last[run])
        run_of += [run] * (len(places) - len(run_of))

    def spread(values: Floats) -> Floats:
        return np.asarray(values[run_of])

    within = np.stack(np.broadcast_arrays(*places))
    f, b = (np.where(sizes > 0, seconds, 0.0) for seconds in (forward, backward))
    before_f, before_b = (_running_sum(sizes * seconds) - sizes * seconds for seconds in (f, b))
    stage = spread(begin) + within
    reach = spread(before_f + before_b) + (within + 1.0) * spread(f + b) + 2.0 * stage * p2p
    below = spread(before_b) + within * spread(b) + stage * p2p
    f, b, rounds = spread(f), spread(b), rounds + stage
    lowest = (rounds >= 0) & (sizes > 0)[run_of] & (_ends_of_runs(f, b) | (rounds == 0))
    return _Turns(pp, stage, f, b, reach, below, rounds, lowest, p2p), np.array(firsts, dtype=np.int64)


def _ends_of_runs(forward: Floats, backward: Floats) -> npt.NDArray[np.bool_]:
    """Turns unlike the one before or the one after: what is the lowest of a path does not hang on how equal stages are listed."""
    unlike = (forward[1:] != forward[:-1]) | (backward[1:] != backward[:-1])
    edge = np.ones((1, forward.shape[1]), dtype=bool)
    return np.asarray(np.concatenate([edge, unlike]) | np.concatenate([unlike, edge]))


def _longer_trips(turns: _Turns) -> tuple[Floats, Floats]:
    """What round trips from a turn u upwards take more than as many rounds of u alone, (turns, n), on any path and on one that
    reaches the last stage.

    As many trips as fit of the one with the longest mean, or of the whole way to the last stage, and one more into what is left, or
    rounds of the slowest stage above where the path passes it. A round of u is kept for the trip that joins entry and exit.
    """
    found, with_top = np.zeros_like(turns.reach), np.zeros_like(turns.reach)
    slowest, steps, further = _running_max(turns.work[::-1])[::-1], np.diff(turns.stage, axis=0), turns.work + 2.0 * turns.p2p
    climbed = np.concatenate([np.zeros((1, found.shape[1])), _running_sum(steps * further[1:])])  # to each turn from the first one
    at_once = max(1, VALUES_AT_ONCE // max(1, turns.reach.size))
    for first in range(0, len(found) - 1, at_once):
        u, tops = slice(first, min(first + at_once, len(found) - 1)), slice(first + 1, len(found))
        own = turns.work[u, None]
        up = turns.stage[tops] - turns.stage[u, None]  # (u, tops, n or 1), edges one way
        gain = climbed[tops] - climbed[u, None]  # (u, tops, n), of a trip as far as each top
        gain -= up * own
        above = np.arange(len(found))[tops] > np.arange(len(found))[u, None]
        if at_once > 1:
            gain[~above] = -np.inf
        length = np.maximum(up + 1.0, 1.0)
        longest, shortest = _longest_mean(gain, length)
        rounds = np.maximum(turns.rounds[u] - 1.0, 0.0)
        more = further[tops] - own  # per stage that a trip goes further
        wide, idle = np.maximum(steps[first:], 1.0), slowest[u] - turns.work[u]
        for size, whole in ((shortest, longest * shortest), (length[:, -1], gain[:, -1])):
            trips = np.floor(rounds / size)
            left = rounds - trips * size
            beyond = up - (left - 1.0)[:, None]  # stages that the last trip falls short of a top
            within = beyond < wide
            short = np.maximum(beyond, 0.0, out=beyond)
            short *= more
            np.subtract(gain, short, out=short)
            if at_once > 1:
                short[~above] = 0.0
            short *= within
            taken, last = trips * whole, np.maximum(short.max(axis=1), 0.0)
            np.maximum(found[u], taken + last, out=found[u])
            np.maximum(with_top[u], taken + np.maximum(last, left * idle), out=with_top[u])
    return found, with_top


def _longest_mean(gain: Floats, length: Floats) -> tuple[Floats, Floats]:
    """The longest mean of a trip from each u, and the shortest such trip, (u, n); trips are (u, tops, n or 1), short ones first."""
    longest = gain[:, 0] / length[:, 0]
    shortest = np.broadcast_to(length[:, 0], longest.shape).copy()
    for top in range(1, gain.shape[1]):
        mean = gain[:, top] / length[:, top]
        np.copyto(shortest, length[:, top], where=mean > longest)
        np.maximum(longest, mean, out=longest)
    return longest, shortest


def _running_max(values: Floats) -> Floats:
    """The highest so far along the first axis: row by row several times faster than by `accumulate`."""
    found = values.copy()
    for before, here in pairwise(found):
        np.maximum(before, here, out=here)
    return found


def _running_sum(values: Floats) -> Floats:
    """The sum so far along the first axis."""
    found = values.copy()
    for before, here in pairwise(found):
        here += before
    return found

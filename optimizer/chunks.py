"""Layers to chunks, and recompute to layers: the partition with the shortest true step, proved by cutting planes over CP-SAT.

The step of a schedule is the longest path through its passes, and a path takes its seconds whatever the chunks hold: linear in
what they hold. CP-SAT is asked for a partition that takes less than the best under the paths known so far; where there is one the
schedule is replayed for it, and its own longest paths join them; where there is none, that is a bound. Bound and step meet at the
optimum (Benders, Numer. Math. 4, 1962, with the replay as subproblem).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cost_models.timeline import Floats, Ints
from ..search_spaces.cutting import Cutting
from .chunk_master import Master
from .chunking import PASSES, Below, Chunking, at_least, chunk_seconds, stage_bytes, timed
from .critical_paths import first_stage_paths
from .two_chunks import least_of_two

TOLD = 3
"""Stages of a partition whose longest paths are told to CP-SAT."""
LEANING = 1.2
"""How much slower a stage is made to see the paths through it."""
LEANT_PASSES = 1 << 16
"""Passes that are replayed for it at once; more of them only where two rounds have left bound and step apart."""
PRICED_AT_ONCE = 256
"""Moves of a walk that are priced together, the most promising first, of which the best is taken: a replay of many takes little
longer than of a few.
"""
OUT_OF_REACH, MOVES_LIKE_THE_LAST = 1e-3, 8
"""A walk that is to come below a goal ends where it is so far above, as a share, that not even so many moves as good as the last
would do: moves gain less and less.
"""
ROUNDS = 40
"""Times that CP-SAT is asked for one partition; what it has proved by then stands."""
REPLAYED_PASSES = 1 << 17
"""Passes of a schedule that are replayed for one partition, all rounds together."""
LEAP = 1 / 3
"""Share of the gap between bound and step that is left if no partition takes less than what is asked for."""
LEAST = 0.9
"""The same from which on the best partition is asked for, not any that takes less."""
NARROW = 1e-3
"""Gap from which on likewise."""
EQUAL = 1e-6  # relative difference below which bound and step have met


@dataclass(frozen=True)
class Chunks:
    """A partition: `cuts` (chunks+1), blocks of each kind under each choice of recompute in every chunk (kinds, choices, chunks).

    `step_s` is the replayed step with what stages do after it, `bound_s` what no partition can beat; `rounds` were solved, in
    `seconds` of CP-SAT's deterministic time.
    """

    cuts: tuple[int, ...]
    counts: Ints
    step_s: float
    bound_s: float
    rounds: int
    seconds: float

    @property
    def optimal(self) -> bool:
        return self.bound_s >= self.step_s * (1.0 - 2.0 * EQUAL)


@dataclass
class _Known:
    """The best partition that is known, its step, and the step that none can beat."""

    step_s: float
    bound_s: float
    counts: Ints | None = None

    @property
    def met(self) -> bool:
        return self.bound_s >= self.step_s * (1.0 - EQUAL)

    @property
    def narrow(self) -> bool:
        return self.bound_s >= self.step_s * (1.0 - NARROW)


def best_chunks(
    chunking: Chunking, starts: Sequence[Ints] = (), below_s: float = np.inf, seconds: float = 1.0, least_s: float = 0.0
) -> Chunks | None:
    """The partition with the shortest step, or the best that `seconds` of CP-SAT's time find; None if none is below `below_s`.

    `starts` (kinds, choices, chunks) are partitions to begin from: what comes back is slower than none of them that fits. No
    partition is known to take less than `least_s`.
    """
    master, known = Master(chunking), _Known(below_s, least_s)
    evenly = chunking.blocks.backward_s.shape
    master.learn(list(at_least(chunking, chunk_seconds(chunking, starts[-1] if starts else np.zeros((*evenly, chunking.chunks))))))
    for start in starts:
        master.learn(_consider(chunking, start, known))
    known.bound_s = max(known.bound_s, master.relaxed_s())
    if known.counts is not None and not known.narrow:
        known.bound_s = least_of_two(chunking, known.counts, known.bound_s, known.step_s)
    rounds = _closed(chunking, master, known, starts, seconds)
    if known.counts is None:
        return None
    cuts = np.concatenate([[0], np.cumsum(known.counts.sum(axis=(0, 1)))])
    bound_s = min(known.bound_s, known.step_s)
    return Chunks(tuple(cuts.tolist()), known.counts, known.step_s, bound_s, rounds, master.seconds)


def _closed(chunking: Chunking, master: Master, known: _Known, starts: Sequence[Ints], seconds: float) -> int:
    """Closes the gap between what is known of a partition and what bounds it, and tells in how many rounds.

    All but LEAP of the gap is asked for at a time, half as much where that cannot be answered in half of what time is left.
    """
    passes = 2 * chunking.chunks * chunking.pipeline.num_microbatches
    lean_after = 0 if passes * chunking.pp <= LEANT_PASSES else 2
    most, left = int(np.clip(REPLAYED_PASSES // passes, 12, ROUNDS)), LEAP
    for done in range(most):
        spare = seconds - master.seconds
        if known.met or spare <= 0.0:
            return done
        if starts and done == lean_after:
            master.learn(_leaning(chunking, chunk_seconds(chunking, starts[-1])))
        if known.counts is None or left > LEAST or known.narrow:
            found, bound_s = master.best(known.counts, known.step_s, spare)
            known.bound_s = max(known.bound_s, bound_s)
            if found is None:
                return done + 1
        else:
            found, bound_s = master.below(known.step_s - left * (known.step_s - known.bound_s), spare / 2.0)
            if found is None and bound_s <= known.bound_s:
                left = (1.0 + left) / 2.0
            known.bound_s = max(known.bound_s, bound_s)
        if found is not None:
            master.learn(_consider(chunking, found, known))
    return most


def walked(
    cutting: Cutting,
    cuts: Sequence[int],
    step_s: float,
    price: Callable[[Ints], Floats],
    below: Callable[[Ints, float], Floats],
    most: int = 20,
    goal_s: float = np.inf,
) -> list[tuple[tuple[int, ...], float]]:
    """Partitions with their steps on the way downhill from `cuts`, whose step is given, best last: a good move of one block from
    one chunk to another, over and over.

    `price` gives the steps of cuts (n, chunks+1), infinite for those that do not fit; `below` what they take at least, quicker,
    given the step above which it does not matter by how much. From cuts that do not fit no way leads on, nor where `goal_s`, which
    the walk is to come below, is out of reach.
    """
    way = [(tuple(cuts), step_s)]
    for _ in range(most if np.isfinite(step_s) else 0):
        limit_s, best = way[-1][1] * (1.0 - EQUAL), None
        near = _moved(cutting, np.array(way[-1][0]))
        least_s = below(near, limit_s) if len(near) else np.zeros(0)
        hopeful = np.argsort(least_s, kind="stable")
        hopeful = hopeful[least_s[hopeful] < limit_s]
        while best is None and len(hopeful):
            now, hopeful = hopeful[:PRICED_AT_ONCE], hopeful[PRICED_AT_ONCE:]
            steps = price(near[now])
            if steps.min() < limit_s:
                best = int(steps.argmin())
                way.append((tuple(near[now[best]].tolist()), float(steps[best])))
        if best is None or _out_of_reach(way[-2][1], way[-1][1], goal_s):
            break
    return way


def _out_of_reach(before_s: float, step_s: float, goal_s: float) -> bool:
    """Whether moves as good as the last one would not lead to a goal."""
    return step_s - max(MOVES_LIKE_THE_LAST * (before_s - step_s), OUT_OF_REACH * goal_s) > goal_s


def _moved(cutting: Cutting, cuts: Ints) -> Ints:
    """All partitions that differ by one block in one chunk more and one chunk less, (n, chunks+1)."""
    moved = cuts + moves(cutting.chunks)[0]
    return np.asarray(moved[cutting.legal(moved)])


@lru_cache(maxsize=8)  # 2 MiB each of 64 chunks
def moves(chunks: int) -> tuple[Ints, Ints]:
    """What each such move adds to the cuts, (n, chunks+1), and the chunk that gives a block, (n,)."""
    take, give = np.nonzero(~np.eye(chunks, dtype=bool))
    inner = np.arange(chunks + 1)[None, :]
    between = (inner > np.minimum(give, take)[:, None]) & (inner <= np.maximum(give, take)[:, None])
    return np.where(between, np.where(give < take, -1, 1)[:, None], 0).astype(np.int8), give


def _leaning(chunking: Chunking, taken: dict[str, Floats]) -> list[Below]:
    """The longest path if one stage were slower than it is, for every stage: what would be wrong with giving it more."""
    slower = [np.where(chunking.own(stage) > 0, LEANING, 1.0) for stage in range(chunking.pp)]
    leant = [{name: each * more if name in PASSES else each for name, each in taken.items()} for more in slower]
    return [Below(path.weights, path.edges) for path in first_stage_paths(chunking.pipeline, leant, chunking.p2p_s)]


def _consider(chunking: Chunking, counts: Ints, known: _Known) -> list[Below]:
    """Replays a partition, keeps it if it is the best so far, and tells what it took longest for."""
    done, after = timed(chunking, counts)
    step_s = done[0][0] + after[0][0]
    if step_s < known.step_s and (stage_bytes(chunking, counts) <= chunking.limit_bytes).all():
        known.step_s, known.counts = step_s, counts
    return [below for _, below in (*done[:TOLD], *after[:TOLD])]

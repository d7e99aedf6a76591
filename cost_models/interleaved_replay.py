"""The interleaved schedule replayed pass by pass for many layouts at once: when every stage ends its last backward pass.

Passes come in waves, none of which waits for another of its own: of few rows a wave is one array, of many each pass is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from threading import Lock

import numpy as np

from .timeline import BACKWARD, FORWARD, INTERLEAVED, Floats, Ints, build_schedule

FEW_ROWS = 3
"""Rows up to which each is replayed in plain numbers."""
WAVE_ROWS = 24
"""Rows per stage up to which passes that wait for none of each other are replayed as one array; of more an array is long enough."""
REPLAYED_GROUPS = 12
"""Groups of pp micro-batches of an interleaved schedule that are replayed; beyond, a further group costs what the last two did."""

Pass = tuple[int, int, int, int]
"""Stage, the row of its duration (forwards of all chunks, then backwards), and the message, or its slot, that a pass reads and the
one that it writes; −1 for no message.
"""
NOTHING, NOWHERE = 0, 1
"""Slots of the message that is always there, and of those that nobody reads."""


@dataclass(frozen=True)
class _Part:
    """Passes in waves, with where each wave ends: none waits for another of its wave."""

    passes: tuple[Pass, ...]
    ends: tuple[int, ...]

    @cached_property
    def waves(self) -> list[tuple[slice | Ints, Ints, Ints, Ints]]:
        """Columns of the passes of every wave by stage; stages that follow each other, as nearly always, are told as a slice."""
        found: list[tuple[slice | Ints, Ints, Ints, Ints]] = []
        for begin, end in pairwise((0, *self.ends)):
            stages, works, reads, writes = np.array(sorted(self.passes[begin:end]), dtype=np.int64).T
            joined = int(stages[-1] - stages[0]) == len(stages) - 1
            found.append((slice(int(stages[0]), int(stages[-1]) + 1) if joined else stages, works, reads, writes))
        return found


@dataclass(frozen=True)
class _Program:
    """Passes as they are replayed: the `common` ones, then those of every way to go on, if any."""

    slots: int
    common: _Part
    ways: tuple[_Part, ...] = ()


@dataclass
class _Slots:
    """Deals messages to slots, which are used again once they are read; those below `kept` are left to others."""

    count: int = NOWHERE + 1
    of: dict[int, int] = field(default_factory=dict)
    kept: int = NOWHERE + 1
    unused: list[int] = field(default_factory=list)

    def dealt(self, passes: list[Pass]) -> _Part:
        """Passes, each after those it waits for, in waves."""
        found = []
        ordered, ends = _in_waves(passes)
        for stage, work, message, sent in ordered:
            read, write = NOTHING, NOWHERE
            if message >= 0:
                read = self.of[message]
                if read >= self.kept:
                    self.unused.append(read)
            if sent >= 0:
                if not self.unused:
                    self.unused.append(self.count)
                    self.count += 1
                write = self.of[sent] = self.unused.pop()
            found.append((stage, work, read, write))
        return _Part(tuple(found), ends)


def _in_waves(passes: list[Pass]) -> tuple[list[Pass], tuple[int, ...]]:
    """Passes, each after those it waits for, as early as these let it be, and where each wave ends."""
    waves: list[list[Pass]] = []
    of_stage: dict[int, int] = {}
    of_message: dict[int, int] = {}
    for one in passes:
        stage, _, message, sent = one
        wave = max(of_stage.get(stage, 0), of_message.get(message, 0))
        if wave == len(waves):
            waves.append([])
        waves[wave].append(one)
        of_stage[stage] = wave + 1
        if sent >= 0:
            of_message[sent] = wave + 1
    return [one for wave in waves for one in wave], tuple(accumulate(map(len, waves)))


def _passes(schedule: str, pp: int, vpp: int, num_microbatches: int) -> list[Pass]:
    """The passes of a schedule with their messages, each after what it waits for; these count micro-batch by micro-batch."""
    order = build_schedule(schedule, pp, vpp, num_microbatches)
    kind, chunk, taken, made = (each[order.sequence] for each in (order.kind, order.chunk, *order.wires))
    taken = np.where((kind == BACKWARD) & (chunk == order.chunks - 1), -1, taken)  # the way back begins where the other one ends
    made = np.where(chunk == np.where(kind == FORWARD, order.chunks - 1, 0), -1, made)
    m, each_one = num_microbatches, 2 * order.chunks
    named = (np.where(number < 0, -1, number % m * each_one + number // m) for number in (taken, made))
    work = np.where(kind == FORWARD, chunk, order.chunks + chunk)
    return list(zip(*(each.tolist() for each in (order.sequence[0], work, *named)), strict=True))


@lru_cache(maxsize=16)  # some MiB each, up to 8: those of a few points that follow each other
def whole_program(schedule: str, pp: int, vpp: int, num_microbatches: int) -> _Program:
    """A schedule from its begin to its end."""
    slots = _Slots()
    passes = slots.dealt(_passes(schedule, pp, vpp, num_microbatches))
    return _Program(slots.count, passes)


@lru_cache(maxsize=12)  # likewise
def _branching(pp: int, vpp: int, fewer: int, more: int) -> _Program:
    """What interleaved schedules of `fewer` and of `more` micro-batches begin with alike, and how each goes on, in this order."""
    short, long = (_passes(INTERLEAVED, pp, vpp, count) for count in (fewer, more))
    ahead = [[one for one in reversed(short) if one[0] == stage] for stage in range(pp)]
    alike: list[Pass] = []
    apart: list[Pass] = []
    sent = {-1}
    for one in long:
        left = ahead[one[0]]
        if left and left[-1] == one and one[2] in sent:
            sent.add(one[3])
            alike.append(left.pop())
        else:
            left.clear()  # from here on the stage goes another way
            apart.append(one)
    met = set(alike)
    slots = _Slots()
    common = slots.dealt(alike)
    waiting = dict(slots.of)
    going_on = slots.dealt(apart)
    ending = _Slots(slots.count, waiting, kept=slots.count)  # it leaves what it reads to the other way
    ended = ending.dealt([one for one in short if one not in met])
    return _Program(ending.count, common, (ended, going_on))


def replay_program(program: _Program, pp: int, forward: Floats, backward: Floats, p2p: Floats) -> list[Floats]:
    """(pp, n) end of each stage's last pass, a backward, for each way that the program goes on; chunks are rows: (pp·vpp, n)."""
    rows = forward.shape[1]
    durations = np.concatenate([forward, backward])
    if rows <= FEW_ROWS:
        each = [_replay_one(program, pp, *column) for column in zip(durations.T.tolist(), p2p.tolist(), strict=True)]
        return [np.array(ends).reshape(-1, pp).T for ends in zip(*each, strict=True)]
    run = _run_waves if rows <= WAVE_ROWS * pp else _run
    free, message = np.zeros((pp, rows)), np.empty((program.slots, rows))
    message[NOTHING] = -np.inf
    run(program.common, free, message, durations, p2p)
    ends = [free, *(free.copy() for _ in program.ways[1:])]
    for way, own in zip(program.ways, reversed(ends), strict=False):
        run(way, own, message, durations, p2p)
    return ends[::-1]


def _run(part: _Part, free: Floats, message: Floats, durations: Floats, p2p: Floats) -> None:
    """Replays passes of all rows on what was `free` and sent before them, one after the other."""
    ends, messages, each = list(free), list(message), list(durations)
    for stage, work, read, write in part.passes:
        end = ends[stage]
        np.maximum(end, messages[read], out=end)
        end += each[work]
        np.add(end, p2p, out=messages[write])


def _run_waves(part: _Part, free: Floats, message: Floats, durations: Floats, p2p: Floats) -> None:
    """The same, wave by wave."""
    ends, others = np.empty_like(free), np.empty_like(free)
    for stages, works, reads, writes in part.waves:
        end, other = ends[: len(works)], others[: len(works)]
        now = free[stages]
        message.take(reads, axis=0, out=other, mode="clip")
        np.maximum(now, other, out=now)
        durations.take(works, axis=0, out=other, mode="clip")
        now += other
        np.add(now, p2p, out=end)
        message[writes] = end
        if not isinstance(stages, slice):  # of a slice `now` is what was free itself
            free[stages] = now


def _replay_one(program: _Program, pp: int, durations: list[float], p2p: float) -> list[list[float]]:
    """The same of one row in plain numbers, which a pass takes a tenth of the time for."""
    free, message = [0.0] * pp, [0.0] * program.slots
    message[NOTHING] = -np.inf
    _run_one(program.common, free, message, durations, p2p)
    ends = [free, *(list(free) for _ in program.ways[1:])]
    for way, own in zip(program.ways, reversed(ends), strict=False):
        _run_one(way, own, message, durations, p2p)
    return ends[::-1]


def _run_one(part: _Part, free: list[float], message: list[float], durations: list[float], p2p: float) -> None:
    for stage, work, read, write in part.passes:
        end = free[stage]
        if message[read] > end:
            end = message[read]
        end += durations[work]
        free[stage] = end
        message[write] = end + p2p


def extended(pp: int, vpp: int, m: Ints, forward: Floats, backward: Floats, p2p: Floats) -> Floats:
    """(pp, n) interleaved ends of many groups: one more costs what the last two replayed did, and no less than the fullest stage.

    Two, because chunks that differ can lock stages into a rhythm of two groups. Both replays begin alike, and are one that far.
    """
    fewer, replayed = _KNOWN.of(pp, vpp, forward, backward, p2p)
    group = (replayed[0] - fewer[0]) / 2
    fullest = pp * (forward + backward).reshape(vpp, pp, -1).sum(axis=0).max(axis=0)
    return np.asarray(replayed + (m // pp - REPLAYED_GROUPS) * np.maximum(group, fullest))


@dataclass
class KnownReplays:
    """The two replays of `extended` that were met, by what they follow from: other batches of a model ask for the same ones."""

    most: int = 1 << 21  # numbers kept in all; beyond, all are forgotten
    ends: dict[bytes, Floats] = field(default_factory=dict)
    held: int = 0
    lock: Lock = field(default_factory=Lock)

    def of(self, pp: int, vpp: int, forward: Floats, backward: Floats, p2p: Floats) -> Floats:
        """(2, pp, n) ends of the shorter and of the longer replay."""
        columns = np.ascontiguousarray(np.concatenate([forward, backward, p2p[None]]).T)
        shape = pp.to_bytes(4) + vpp.to_bytes(4)
        keys = [shape + blake2b(column, digest_size=16).digest() for column in columns]
        with self.lock:
            new = {key: row for row, key in enumerate(keys) if key not in self.ends}
            if new:
                rows = list(new.values())
                program = _branching(pp, vpp, (REPLAYED_GROUPS - 2) * pp, REPLAYED_GROUPS * pp)
                replayed = np.stack(replay_program(program, pp, forward[:, rows], backward[:, rows], p2p[rows]), axis=1)
                self.ends.update(zip(new, replayed.T.copy(), strict=True))
                self.held += replayed.size
            found = np.stack([self.ends[key] for key in keys], axis=2) if keys else np.empty((2, pp, 0))
            if self.held > self.most:
                self.ends, self.held = {}, 0
        return found


_KNOWN = KnownReplays()

"""The timing of a pipeline schedule: one step replayed event by event.

A stage works through its passes strictly in the order of its `Schedule`; a pass starts when the stage is free and its input has
arrived. Messages are asynchronous: an edge between stages delays the receiver by `p2p_s`, the sender not at all. `pipeline` and
`replay` price the same schedules for many layouts at once and are held to this simulation by the tests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .schedules import (
    BACKWARD,
    FORWARD,
    GPIPE,
    INPUT,
    INTERLEAVED,
    NONE,
    ONE_F_ONE_B,
    WEIGHT,
    WHOLE,
    Bools,
    Floats,
    Ints,
    Schedule,
    build_schedule,
    check_schedule,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "GPIPE",
    "INPUT",
    "INTERLEAVED",
    "ONE_F_ONE_B",
    "WEIGHT",
    "WHOLE",
    "Floats",
    "Ints",
    "Schedule",
    "Timeline",
    "Work",
    "build_schedule",
    "check_schedule",
    "replayed",
    "simulate",
    "stages_done_s",
]


PASSES_AT_ONCE = 1 << 10
"""Passes of a stage whose columns are turned into plain numbers together: few enough for little memory."""
UNSENT = -1.0
"""When a message is sent that is not yet."""


@dataclass(frozen=True)
class Work:
    """What passes take, seconds per chunk of the model (chunks,) or of many rows (chunks, n).

    `weight_s` is the share of `backward_s` that a split backward leaves for later, `exchange_s` what of forward and of backward are
    messages that can run beside the other pass of a pair, and `early_s` what of a backward needs no gradient (its recompute) and
    may be done in the bubble before that comes. Pairs lose the `slowed` share of the compute beside their messages.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats | None = None
    exchange_s: tuple[Floats, Floats] | None = None
    early_s: Floats | None = None
    slowed: float = 0.0

    def row(self, row: int) -> Work:
        """The figures of one of many rows, (chunks,)."""
        exchange = None if self.exchange_s is None else (self.exchange_s[0][:, row], self.exchange_s[1][:, row])
        weight, early = (None if each is None else each[:, row] for each in (self.weight_s, self.early_s))
        return Work(self.forward_s[:, row], self.backward_s[:, row], weight, exchange, early, self.slowed)

    def of(self, kind: int, chunk: int) -> Floats:
        """Seconds of a pass on its own."""
        if kind == FORWARD:
            return np.asarray(self.forward_s[chunk])
        weight = 0.0 * self.backward_s[chunk] if self.weight_s is None else self.weight_s[chunk]
        if kind == WEIGHT:
            return np.asarray(weight)
        return np.asarray(self.backward_s[chunk] if kind == BACKWARD else self.backward_s[chunk] - weight)

    def of_pair(self, forward: int, backward: int) -> Floats:
        """Seconds of the forward of one chunk beside the backward of another: kernels share the device and messages the network,
        so a pair takes what is the longer of them (arXiv 2412.19437, 3.2.1), and no less than either pass alone. Kernels that end
        later than the messages have made up by then what these slowed.
        """
        first, second = self.forward_s[forward], self.backward_s[backward]
        if self.exchange_s is None:
            return np.asarray(first + second)
        messages = self.exchange_s[0][forward] + self.exchange_s[1][backward]
        kernels = first + second - (1.0 - self.slowed) * messages
        return np.asarray(np.maximum(np.maximum(kernels, messages), np.maximum(first, second)))


@dataclass(frozen=True, eq=False)
class Timeline:
    """One replayed step. Event arrays are (passes,), in order of start.

    `start_s`, `end_s` and `step_s` are in seconds from the start of the first forward pass; passes that are `paired` run with the
    one before them on their stage, from its start to its end. `in_flight` (pp,) is the most (micro-batch, chunk) activations that
    a stage holds at once.
    """

    schedule: Schedule
    work: Work
    stage: Ints
    chunk: Ints
    microbatch: Ints
    kind: Ints
    paired: Bools
    start_s: Floats
    end_s: Floats
    step_s: float
    in_flight: Ints

    @property
    def busy_s(self) -> Floats:
        """(pp,) seconds that each stage computes."""
        once = np.where(self.paired, 0.0, self.end_s - self.start_s)
        return np.asarray(np.bincount(self.stage, weights=once, minlength=self.schedule.pp), dtype=np.float64)

    @property
    def stage_end_s(self) -> Floats:
        """(pp,) when each stage has done its last pass."""
        found = np.zeros(self.schedule.pp)
        np.maximum.at(found, self.stage, self.end_s)
        return found


def simulate(
    name: str, pp: int, vpp: int, num_microbatches: int, forward_s: Floats, backward_s: Floats, p2p_s: float = 0.0
) -> Timeline:
    """Replays one step whose backwards are whole: `forward_s`, `backward_s` (pp·vpp,) seconds per chunk, `p2p_s` per edge."""
    return replayed(build_schedule(name, pp, vpp, num_microbatches), Work(forward_s, backward_s), p2p_s)


def replayed(schedule: Schedule, work: Work, p2p_s: float = 0.0) -> Timeline:
    """Replays one step of any schedule; `work` of one row, `p2p_s` seconds from stage to stage."""
    stages, positions = np.nonzero(schedule.kind != NONE)
    start_s, end_s = (np.concatenate([np.frombuffer(each) for each in of_stages]) for of_stages in _times(schedule, work, p2p_s))
    paired = schedule.paired[stages, positions]
    start_s[paired] = start_s[np.flatnonzero(paired) - 1]
    order = np.lexsort((paired, stages, end_s, start_s))
    stages, positions, paired, start_s, end_s = stages[order], positions[order], paired[order], start_s[order], end_s[order]
    chunks, microbatches, kinds = (each[stages, positions] for each in (schedule.chunk, schedule.microbatch, schedule.kind))
    held = np.array([schedule.in_flight(stage) for stage in range(schedule.pp)], dtype=np.int64)
    return Timeline(schedule, work, stages, chunks, microbatches, kinds, paired, start_s, end_s, float(end_s.max()), held)


def stages_done_s(schedule: Schedule, work: Work, p2p_s: float = 0.0) -> Floats:
    """(pp,) when each stage has done its last pass: `Timeline.stage_end_s` without the rest of it."""
    return np.array([ends[-1] for ends in _times(schedule, work, p2p_s)[1]])


def _times(schedule: Schedule, work: Work, p2p_s: float) -> tuple[list[array[float]], list[array[float]]]:
    """When the passes of every stage start and end, in its order; the second of a pair starts and ends with the end of both."""
    (takes, makes), stage = schedule.wires, np.arange(schedule.pp)[:, None]
    sent = [UNSENT] * (2 * schedule.chunks * schedule.num_microbatches + 1)  # of the last one, which NONE writes, nobody reads
    sender = np.full(len(sent), NONE)
    sender[makes] = stage
    late = np.where(sender[takes] != stage, p2p_s, 0.0)
    with_next = np.roll(schedule.paired, -1, axis=1)
    beside, beside_late = np.where(with_next, np.roll(takes, -1, axis=1), NONE), np.roll(late, -1, axis=1)
    columns = (takes, late, beside, beside_late, makes, *_durations(schedule, work))
    starts, ends = ([array("d") for _ in range(schedule.pp)] for _ in range(2))
    lengths = (schedule.kind != NONE).sum(axis=1).tolist()
    each = zip(zip(*columns, strict=True), lengths, starts, ends, strict=True)
    going = {place: _run([column[:length] for column in own], sent, *times) for place, (own, length, *times) in enumerate(each)}
    done = -1
    while going:
        before, done = done, sum(map(len, ends))
        if done == before:
            raise ValueError(f"schedule {schedule.name}: stages {list(going)} wait for each other")
        going = {place: run for place, run in going.items() if next(run, False)}
    return starts, ends


def _run(columns: Sequence[Ints | Floats], sent: list[float], starts: array[float], ends: array[float]) -> Iterator[bool]:
    """Runs the passes of one stage, the columns of `_times`, and stops wherever a message is not there yet."""
    blocks = (slice(begin, begin + PASSES_AT_ONCE) for begin in range(0, len(columns[0]), PASSES_AT_ONCE))
    free = 0.0
    for taken, delay, beside, beside_delay, made, ahead, rest in chain.from_iterable(
        zip(*(each[some].tolist() for each in columns), strict=True) for some in blocks
    ):
        begin = free + ahead
        if taken >= 0:
            while sent[taken] == UNSENT:
                yield True
            if sent[taken] + delay > begin:
                begin = sent[taken] + delay
        if beside >= 0:
            while sent[beside] == UNSENT:
                yield True
            if sent[beside] + beside_delay > begin:
                begin = sent[beside] + beside_delay
        starts.append(free if ahead else begin)
        free = sent[made] = begin + rest
        ends.append(free)


def _durations(schedule: Schedule, work: Work) -> tuple[Floats, Floats]:
    """Seconds of every pass that need no message and of those that do, (pp, longest order); a pair's are its first pass's."""
    kind, chunk = schedule.kind, schedule.chunk
    each = np.array(
        [[float(work.of(kind, chunk)) for chunk in range(schedule.chunks)] for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)]
    )
    seconds, early = each[kind, chunk], np.zeros(kind.shape)
    if work.early_s is not None:
        early = np.where((kind == BACKWARD) | (kind == INPUT), work.early_s[chunk], 0.0)
    stage, second = np.nonzero(schedule.paired)
    first, other = chunk[stage, second - 1], chunk[stage, second]
    seconds[stage, second - 1] = [float(work.of_pair(a, b)) for a, b in zip(first, other, strict=True)]
    early[stage, second - 1] = early[stage, second] = seconds[stage, second] = 0.0
    return early, seconds - early

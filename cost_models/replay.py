"""The price of any schedule by replay: the ends of its passes for many rows at once.

The step is the longest path through the passes. Every pass starts at the latest of what it waits for, so a replay is a row of
maxima and sums over columns of rows, in an order that `Schedule.groups` gives once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..search_spaces.vocabulary import V_SHAPED
from .schedules import BACKWARD, INPUT, KINDS, NONE, PAIRED, SPLIT, Floats, Ints, Schedule, group_size, usual_schedule
from .timeline import Work

REPLAYED_TURNS = 16
"""Micro-batches per stage that are replayed; beyond, further ones cost what the last did."""
LOCKED_TURNS = 4
"""Over so many micro-batches per stage the cost of a further one is taken: stages that differ can lock into a longer rhythm."""


@dataclass(frozen=True)
class Step:
    """One pass of a program, or two that run together: stage, duration, message slots that are read and that are written.

    `chunk` is that of a backward alone, whose recompute may come before its messages, else NONE.
    """

    stage: int
    duration: int
    chunk: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule made ready to be replayed: its steps in order, how many message slots they use, and the chunks of every pair.

    A duration counts kinds, then chunks: kind·chunks + chunk for a pass, beyond them the pairs.
    """

    schedule: Schedule
    steps: tuple[Step, ...]
    slots: int
    pairs: tuple[tuple[int, int], ...]

    def durations(self, work: Work) -> list[Floats]:
        """Seconds of every duration, (n,) each, less what of it may come before its messages."""
        alone = [work.of(kind, chunk) for kind in KINDS for chunk in range(self.schedule.chunks)]
        if work.early_s is not None:
            for kind in (BACKWARD, INPUT):
                for chunk, early_s in enumerate(work.early_s):
                    alone[kind * self.schedule.chunks + chunk] = alone[kind * self.schedule.chunks + chunk] - early_s
        return [*alone, *(work.of_pair(forward, backward) for forward, backward in self.pairs)]


def ends_s(schedule: Schedule, work: Work, p2p_s: Floats) -> Floats:
    """When each stage has done its last pass, (pp, n) seconds from the first forward; `work` (chunks, n), `p2p_s` (n,)."""
    return _replayed(_program(schedule), work, p2p_s)


def _replayed(program: Program, work: Work, p2p_s: Floats) -> Floats:
    durations = program.durations(work)
    rows = len(p2p_s)
    free = np.zeros((program.schedule.pp, rows))
    message = np.empty((program.slots, rows))
    for step in program.steps:
        end = free[step.stage]
        if work.early_s is not None and step.chunk != NONE:
            end += work.early_s[step.chunk]
        for slot in step.reads:
            np.maximum(end, message[slot], out=end)
        end += durations[step.duration]
        for slot in step.writes:
            np.add(end, p2p_s, out=message[slot])
    return free


def stage_ends_s(
    name: str, pp: int, vpp: int, work: Work, p2p_s: Floats, num_microbatches: Ints, split_backward: bool = True, group: int = 0
) -> Floats:
    """The same for rows of any number of micro-batches, (pp, n): exact up to REPLAYED_TURNS of them per stage, or as many turns of
    whole groups. Beyond, one more costs what it did over the last turns. `group` is the one that the stack asks for, 0 for none.
    """
    found = np.empty((pp, len(num_microbatches)))
    for count in np.unique(num_microbatches).tolist():
        rows = np.flatnonzero(num_microbatches == count)
        mine, edges = _taken(work, rows), p2p_s[rows]
        fewer, size = reduced(name, pp, count, group)
        last = _replayed(_usual_program(name, pp, vpp, fewer, split_backward, size), mine, edges)
        if fewer < count:
            turn = _turn(pp, size)
            before = _replayed(_usual_program(name, pp, vpp, fewer - turn, split_backward, size), mine, edges)
            last = last + (last - before) * ((count - fewer) // turn)
        found[:, rows] = last
    return found


def least_s(name: str, pp: int, num_microbatches: Ints, totals: Work, p2p_s: Floats) -> Floats:
    """Seconds that no cut of the model into chunks falls below, (n,); `totals` are the whole model's, (1, n).

    Stages do on average a pp-th of all passes, whose pairs save at most what hides of their messages, and one micro-batch goes
    through all chunks and back; its weight gradients can wait. A message crosses every border between stages, which a V has twice.
    """
    forward, backward = totals.forward_s[0], totals.backward_s[0]
    messages = 0.0 if totals.exchange_s is None or name not in PAIRED else totals.exchange_s[0][0] + totals.exchange_s[1][0]
    hidden = (1.0 - totals.slowed) * messages
    later = 0.0 if totals.weight_s is None or name not in SPLIT else totals.weight_s[0]
    borders = (pp - 1) * (2 if name in V_SHAPED else 1)
    through = forward + backward - later + 2 * borders * p2p_s
    return np.asarray(np.maximum(num_microbatches * (forward + backward - hidden) / pp, through), dtype=np.float64)


def reduced(name: str, pp: int, num_microbatches: int, group: int = 0) -> tuple[int, int]:
    """Micro-batches whose replay tells that of more, whole turns apart, and the size of all their groups."""
    size = group_size(name, pp, num_microbatches, group) or 0
    turn = _turn(pp, size)
    kept = REPLAYED_TURNS // LOCKED_TURNS * turn
    return num_microbatches - max(0, -(-(num_microbatches - kept) // turn)) * turn, size


def _turn(pp: int, size: int) -> int:
    """Micro-batches of the fewest whole groups that are LOCKED_TURNS per stage."""
    size = size or pp
    return -(-LOCKED_TURNS * pp // size) * size


def _taken(work: Work, rows: Ints) -> Work:
    """The given rows."""

    def of(values: Floats | None) -> Floats | None:
        return None if values is None else np.ascontiguousarray(values[:, rows])

    exchange = None if work.exchange_s is None else (work.exchange_s[0][:, rows], work.exchange_s[1][:, rows])
    return Work(work.forward_s[:, rows], work.backward_s[:, rows], of(work.weight_s), exchange, of(work.early_s), work.slowed)


@lru_cache(maxsize=16)  # up to 10 MiB each; many cuts of one layout are replayed one after the other
def _usual_program(name: str, pp: int, vpp: int, num_microbatches: int, split_backward: bool, group: int) -> Program:
    return _program(usual_schedule(name, pp, vpp, num_microbatches, split_backward, group))


def _program(schedule: Schedule) -> Program:
    """Messages between stages get a slot when they are sent and give it back when they are read."""
    kind, chunk = schedule.kind.tolist(), schedule.chunk.tolist()
    takes, makes = (each.tolist() for each in schedule.wires)
    sender, taker = (
        _stages(each, 2 * schedule.chunks * schedule.num_microbatches) for each in (schedule.wires[1], schedule.wires[0])
    )
    sent: dict[int, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    unused: list[int] = []
    slots = 0
    steps = []
    for stage, together in schedule.groups():
        reads = [sent.pop(takes[stage][p]) for p in together if takes[stage][p] >= 0 and sender[takes[stage][p]] != stage]
        unused.extend(reads)
        writes = []
        for made in (makes[stage][p] for p in together):
            if made >= 0 and taker[made] not in (NONE, stage):
                if not unused:
                    unused.append(slots)
                    slots += 1
                sent[made] = unused.pop()
                writes.append(sent[made])
        duration = kind[stage][together[0]] * schedule.chunks + chunk[stage][together[0]]
        if len(together) == 2:
            chunks = chunk[stage][together[0]], chunk[stage][together[1]]
            duration = len(KINDS) * schedule.chunks + pairs.setdefault(chunks, len(pairs))
        alone = len(together) == 1 and kind[stage][together[0]] in (BACKWARD, INPUT)
        steps.append(Step(stage, duration, chunk[stage][together[0]] if alone else NONE, tuple(reads), tuple(writes)))
    return Program(schedule, tuple(steps), slots, tuple(pairs))


def _stages(wires: Ints, messages: int) -> list[int]:
    """The other stage of every message: the one whose orders name it in `wires`, −1 where none does.

    The last forward of a micro-batch is taken on its own stage.
    """
    found = np.full(messages, NONE)
    stage, position = np.nonzero(wires >= 0)
    found[wires[stage, position]] = stage
    return [int(each) for each in found]

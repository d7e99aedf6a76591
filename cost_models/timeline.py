"""The exact order and timing of a pipeline schedule: one step replayed event by event.

A stage works through its passes strictly in the order of its `Schedule`; a pass starts when the stage is free and its input has
arrived. Messages are asynchronous: an edge between consecutive chunks delays the receiver by `p2p_s`, the sender not at all.
`pipeline` prices the same schedules for many layouts at once and is held to this simulation by the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

GPIPE, ONE_F_ONE_B, INTERLEAVED = SIMULATED = ("gpipe", "1f1b", "interleaved")
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order of passes on every stage.

    `kind`, `chunk`, `microbatch` are (pp, 2·m·vpp): position p of stage s runs that kind (FORWARD or BACKWARD) of that virtual
    chunk (chunk c sits on stage c mod pp) for that micro-batch.
    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    kind: Ints
    chunk: Ints
    microbatch: Ints

    def in_flight(self, stage: int) -> int:
        """Most (micro-batch, chunk) activations that a stage holds at once, counted off its order."""
        return int(np.cumsum(np.where(self.kind[stage] == FORWARD, 1, -1)).max())

    def passes(self) -> Iterator[tuple[int, int]]:
        """(stage, position) of every pass, each after the passes it waits for."""
        kind, chunk, microbatch = self.kind.tolist(), self.chunk.tolist(), self.microbatch.tolist()
        last, length = self.pp * self.vpp - 1, 2 * self.num_microbatches * self.vpp
        done: set[tuple[int, int, int]] = set()
        position = [0] * self.pp
        stages = list(range(self.pp))
        while stages:
            for stage in stages:
                while (p := position[stage]) < length:
                    k, c, i = kind[stage][p], chunk[stage][p], microbatch[stage][p]
                    if (source := source_of(k, c, last)) is not None and (*source, i) not in done:
                        break
                    done.add((k, c, i))
                    position[stage] += 1
                    yield stage, p
            stages = [stage for stage in stages if position[stage] < length]


@dataclass(frozen=True, eq=False)
class Timeline:
    """One replayed step. Event arrays are (pp·2·m·vpp,), in order of start.

    `start_s`, `end_s` and `step_s` are in seconds from the start of the first forward pass; `in_flight` (pp,) is the most
    (micro-batch, chunk) activations that a stage holds at once.
    """

    schedule: Schedule
    stage: Ints
    chunk: Ints
    microbatch: Ints
    kind: Ints
    start_s: Floats
    end_s: Floats
    step_s: float
    in_flight: Ints

    @property
    def busy_s(self) -> Floats:
        """(pp,) seconds that each stage computes."""
        return np.asarray(np.bincount(self.stage, weights=self.end_s - self.start_s, minlength=self.schedule.pp), dtype=np.float64)


@lru_cache(maxsize=256)
def build_schedule(name: str, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """The order of passes of `gpipe` (arXiv 1811.06965), `1f1b` or `interleaved` (both arXiv 2104.04473, as in Megatron-Core).

    Warm-up forwards: all m; pp−1−s; and 2·(pp−1−s) + (vpp−1)·pp, with Megatron-Core's default micro-batch group size of pp.
    """
    check_schedule(name, pp, vpp, num_microbatches)
    total = num_microbatches * vpp
    forward = [_turn(k, pp, vpp) for k in range(total)]
    kind, chunk, microbatch = (np.empty((pp, 2 * total), dtype=np.int64) for _ in range(3))
    for stage in range(pp):
        warm_up = min(total, _warm_up(name, pp, vpp, num_microbatches, stage))
        forwards = [(FORWARD, v * pp + stage, i) for v, i in forward]
        backwards = [(BACKWARD, (vpp - 1 - v) * pp + stage, i) for v, i in forward]
        steady = [p for pair in zip(forwards[warm_up:], backwards, strict=False) for p in pair]
        order = forwards[:warm_up] + steady + backwards[total - warm_up :]
        kind[stage], chunk[stage], microbatch[stage] = np.array(order).T
    return Schedule(name, pp, vpp, num_microbatches, kind, chunk, microbatch)


def simulate(
    name: str, pp: int, vpp: int, num_microbatches: int, forward_s: Floats, backward_s: Floats, p2p_s: float = 0.0
) -> Timeline:
    """Replays one step: `forward_s`, `backward_s` (pp·vpp,) seconds per virtual chunk, `p2p_s` seconds per edge between chunks."""
    schedule = build_schedule(name, pp, vpp, num_microbatches)
    duration = np.array([forward_s, backward_s], dtype=np.float64).tolist()
    kind, chunk, microbatch = schedule.kind.tolist(), schedule.chunk.tolist(), schedule.microbatch.tolist()
    last = pp * vpp - 1
    free = [0.0] * pp
    end: dict[tuple[int, int, int], float] = {}
    events: list[tuple[float, float, int, int, int, int]] = []
    for stage, p in schedule.passes():
        k, c, i = kind[stage][p], chunk[stage][p], microbatch[stage][p]
        source = source_of(k, c, last)
        arrived = 0.0 if source is None else end[(*source, i)] + (p2p_s if source[1] != c else 0.0)
        start = max(free[stage], arrived)
        end[k, c, i] = free[stage] = start + duration[k][c]
        events.append((start, free[stage], stage, c, i, k))
    events.sort()
    start_s, end_s = np.array([event[:2] for event in events]).T
    stages, chunks, microbatches, kinds = np.array([event[2:] for event in events], dtype=np.int64).T
    held = np.array([schedule.in_flight(stage) for stage in range(pp)], dtype=np.int64)
    return Timeline(schedule, stages, chunks, microbatches, kinds, start_s, end_s, float(end_s.max()), held)


def source_of(kind: int, chunk: int, last: int) -> tuple[int, int] | None:
    """(kind, chunk) of the pass whose output this one takes; None at the pipeline's entrance."""
    if kind == FORWARD:
        return (FORWARD, chunk - 1) if chunk > 0 else None
    return (BACKWARD, chunk + 1) if chunk < last else (FORWARD, last)


def _turn(k: int, pp: int, vpp: int) -> tuple[int, int]:
    """Chunk of the stage and micro-batch of the k-th forward: pp micro-batches through one chunk, then through the next."""
    group, rest = divmod(k, pp * vpp)
    return rest // pp, group * pp + rest % pp


def _warm_up(name: str, pp: int, vpp: int, num_microbatches: int, stage: int) -> int:
    if name == GPIPE:
        return num_microbatches
    return pp - 1 - stage if name == ONE_F_ONE_B else 2 * (pp - 1 - stage) + (vpp - 1) * pp


def check_schedule(name: str, pp: int, vpp: int, num_microbatches: int) -> None:
    """ValueError says why there is no such schedule."""
    if name not in SIMULATED:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(SIMULATED)}")
    if pp < 1 or num_microbatches < 1:
        raise ValueError(f"pp {pp} and num_microbatches {num_microbatches} must be at least 1")
    if (vpp > 1) != (name == INTERLEAVED):
        raise ValueError(f"schedule {name!r} with vpp {vpp}: interleaved needs vpp > 1, the others vpp = 1")
    if vpp > 1 and (pp == 1 or num_microbatches % pp):
        raise ValueError(f"interleaved needs pp > 1 and num_microbatches ({num_microbatches}) a multiple of pp ({pp})")

"""Longest paths through the passes of a pipeline schedule, as numbers of passes: what a step would be with other durations too.

Every path through a schedule's passes takes its seconds whatever the chunks hold, so the longest path of one partition is a lower
bound for all of them, linear in what their chunks hold, and the price itself for the partition that it was read off.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cost_models.timeline import BACKWARD, GPIPE, INTERLEAVED, Floats, Ints, build_schedule, source_of

REPLAYED = 16
"""Times pp micro-batches that are replayed; more of them lengthen a path by what its slowest stage does for each."""


@dataclass(frozen=True, eq=False)
class Path:
    """A path from the step's begin to the end of a stage's last backward: passes of each chunk (pp·vpp,), and edges crossed."""

    stage: int
    forwards: Ints
    backwards: Ints
    edges: int

    def seconds(self, forward_s: Floats, backward_s: Floats, p2p_s: float) -> float:
        """What it takes when chunks take `forward_s` and `backward_s` (pp·vpp,) a pass and an edge `p2p_s`."""
        return float(self.forwards @ forward_s + self.backwards @ backward_s + self.edges * p2p_s)


@dataclass(frozen=True)
class _Events:
    """Passes of a schedule, each after those it waits for; `before` on the same stage and `source` on another, −1 for none."""

    stage: list[int]
    kind: list[int]
    chunk: list[int]
    before: list[int]
    source: list[int]
    steady: list[bool]  # the pass and the one before it are an alternating pair
    last: list[int]  # of every stage


def longest_paths(
    schedule: str, pp: int, vpp: int, num_microbatches: int, forward_s: Floats, backward_s: Floats, p2p_s: float
) -> list[Path]:
    """The longest path to the end of every stage's last backward, in the order of stages; the first is the whole pipeline's.

    Beyond REPLAYED·pp micro-batches a path is the replayed one with more of its slowest stage: it exists, and so is a lower bound.
    """
    group = pp if schedule == INTERLEAVED else 1
    spare = 0 if schedule == GPIPE else max(0, (num_microbatches - REPLAYED * pp) // group)
    events = _events(schedule, pp, vpp, num_microbatches - spare * group)
    come_from = _replay(events, pp, forward_s.tolist(), backward_s.tolist(), p2p_s)
    work = (forward_s + backward_s).reshape(vpp, pp).sum(axis=0)
    return [_traced(events, stage, come_from, work, pp * vpp, spare * group) for stage in range(pp)]


def _replay(events: _Events, pp: int, forward_s: list[float], backward_s: list[float], p2p_s: float) -> list[int]:
    """The pass that each waits for longest."""
    duration = (forward_s, backward_s)
    end = [0.0] * (len(events.stage) + 1)  # the last entry, which −1 reads, is the step's begin
    come_from = [-1] * len(events.stage)
    for e, (kind, chunk, before, source) in enumerate(zip(events.kind, events.chunk, events.before, events.source, strict=True)):
        begin, where = end[before], before
        if source >= 0 and end[source] + (p2p_s if events.chunk[source] != chunk else 0.0) > begin:
            begin, where = end[source] + (p2p_s if events.chunk[source] != chunk else 0.0), source
        end[e] = begin + duration[kind][chunk]
        come_from[e] = where
    return come_from


def _traced(events: _Events, stage: int, come_from: list[int], work: Floats, chunks: int, spare: int) -> Path:
    counts = [[0] * chunks, [0] * chunks]
    edges, e, slowest = 0, events.last[stage], -1
    while e >= 0:
        kind, chunk, here = events.kind[e], events.chunk[e], events.stage[e]
        counts[kind][chunk] += 1
        source = come_from[e]
        if source >= 0 and source == events.before[e] and events.steady[e] and (slowest < 0 or work[here] > work[slowest]):
            slowest = here
        edges += source >= 0 and events.chunk[source] != chunk and source == events.source[e]
        e = source
    passes = np.array(counts, dtype=np.int64)
    if slowest >= 0:
        passes[:, slowest :: len(work)] += spare
    return Path(stage, passes[0], passes[1], edges)


@lru_cache(maxsize=64)
def _events(schedule: str, pp: int, vpp: int, num_microbatches: int) -> _Events:
    order = build_schedule(schedule, pp, vpp, num_microbatches)
    kind, chunk, microbatch = order.kind.tolist(), order.chunk.tolist(), order.microbatch.tolist()
    last_chunk = pp * vpp - 1
    place: dict[tuple[int, int, int], int] = {}
    last = [-1] * pp
    events = _Events([], [], [], [], [], [], last)
    for stage, p in order.passes():
        k, c, i = kind[stage][p], chunk[stage][p], microbatch[stage][p]
        source = source_of(k, c, last_chunk)
        events.stage.append(stage)
        events.kind.append(k)
        events.chunk.append(c)
        events.before.append(last[stage])
        events.source.append(-1 if source is None else place[(*source, i)])
        events.steady.append(0 < p < len(kind[stage]) - 1 and k != kind[stage][p - 1] and k == BACKWARD != kind[stage][p + 1])
        last[stage] = place[k, c, i] = len(events.stage) - 1
    return events

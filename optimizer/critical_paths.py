"""Longest paths through the passes of a pipeline schedule, as numbers of passes: what a step would be with other durations too.

Every path through a schedule's passes takes its seconds whatever the chunks hold, so the longest path of one partition is a lower
bound for all of them, linear in what their chunks hold, and the price itself for the partition that it was read off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..cost_models.schedules import BACKWARD, GPIPE, INTERLEAVED, Bools, Floats, Ints, build_schedule

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


@dataclass(frozen=True, eq=False)
class _Events:
    """Passes of a schedule, each after those it waits for; `before` on the same stage and `source` on another, −1 for none."""

    stage: Ints
    kind: Ints
    chunk: Ints
    before: Ints
    source: Ints
    steady: Bools  # the pass and the one before it are an alternating pair
    last: list[int]  # of every stage

    @cached_property
    def crossing(self) -> Bools:
        """Whether what a pass takes from its source crosses an edge."""
        return np.asarray((self.source >= 0) & (self.chunk[self.source] != self.chunk))

    @cached_property
    def replayed(self) -> list[tuple[int, int, int, int, bool]]:
        """What a replay reads: kind, chunk, before, source, and whether it crosses an edge."""
        columns = (self.kind, self.chunk, self.before, self.source, self.crossing)
        return list(zip(*(each.tolist() for each in columns), strict=True))


def longest_paths(
    schedule: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward_s: Floats,
    backward_s: Floats,
    p2p_s: float,
    stages: Sequence[int] | None = None,
) -> list[Path]:
    """The longest path to the end of the last backward of every stage, or of `stages`, in their order; the first stage's is the
    whole pipeline's.

    Beyond REPLAYED·pp micro-batches a path is the replayed one with more of its slowest stage: it exists, and so is a lower bound.
    """
    group = pp if schedule == INTERLEAVED else 1
    spare = 0 if schedule == GPIPE else max(0, (num_microbatches - REPLAYED * pp) // group)
    events = _events(schedule, pp, vpp, num_microbatches - spare * group)
    come_from = _replay(events, forward_s.tolist(), backward_s.tolist(), p2p_s)
    work = (forward_s + backward_s).reshape(vpp, pp).sum(axis=0)
    ends = [(stage, events.last[stage]) for stage in (range(pp) if stages is None else stages)]
    traced = _traced(come_from, [last for _, last in ends])
    return [_counted(events, stage, path, work, pp * vpp, spare * group) for (stage, _), path in zip(ends, traced, strict=True)]


def _replay(events: _Events, forward_s: list[float], backward_s: list[float], p2p_s: float) -> list[int]:
    """The pass that each waits for longest."""
    duration = (forward_s, backward_s)
    end = [0.0] * (len(events.stage) + 1)  # the last entry, which −1 reads, is the step's begin
    come_from = []
    for e, (kind, chunk, before, source, crosses) in enumerate(events.replayed):
        begin, where = end[before], before
        if source >= 0:
            arrived = end[source] + p2p_s if crosses else end[source]
            if arrived > begin:
                begin, where = arrived, source
        end[e] = begin + duration[kind][chunk]
        come_from.append(where)
    return come_from


def _traced(come_from: list[int], ends: list[int]) -> Iterator[Ints]:
    """The passes on the way back from each of some; where it meets an earlier one it goes on like that."""
    met: dict[int, tuple[int, int]] = {}
    found: list[Ints] = []
    for e in ends:
        own: list[int] = []
        while e >= 0 and e not in met:
            met[e] = len(found), len(own)
            own.append(e)
            e = come_from[e]
        path = np.array(own, dtype=np.int64)
        if e >= 0:
            other, place = met[e]
            path = np.concatenate([path, found[other][place:]])
        found.append(path)
        yield path


def _counted(events: _Events, stage: int, path: Ints, work: Floats, chunks: int, spare: int) -> Path:
    """The path of some passes, last first, `spare` micro-batches longer where its slowest stage alternates."""
    counts = np.bincount(events.kind[path] * chunks + events.chunk[path], minlength=2 * chunks).reshape(2, chunks)
    came = np.append(path[1:], -1)
    steady = events.stage[path[(came >= 0) & (came == events.before[path]) & events.steady[path]]]
    if len(steady):
        counts[:, steady[work[steady].argmax()] :: len(work)] += spare
    return Path(stage, counts[0], counts[1], int((events.crossing[path] & (came == events.source[path])).sum()))


@lru_cache(maxsize=4)  # some MiB each; one layout's are asked for again and again
def _events(schedule: str, pp: int, vpp: int, num_microbatches: int) -> _Events:
    order = build_schedule(schedule, pp, vpp, num_microbatches)
    stage, position = order.sequence
    kind, chunk, taken, made = (each[stage, position] for each in (order.kind, order.chunk, *order.wires))
    place = np.empty(order.kind.shape, dtype=np.int64)
    place[stage, position] = np.arange(len(stage))
    maker = np.empty(2 * order.chunks * num_microbatches, dtype=np.int64)
    maker[made] = np.arange(len(stage))
    turned = np.zeros(order.kind.shape, dtype=bool)
    turned[:, 1:-1] = (order.kind[:, 1:-1] == BACKWARD) & (order.kind[:, :-2] != BACKWARD) & (order.kind[:, 2:] != BACKWARD)
    return _Events(
        stage=stage,
        kind=kind,
        chunk=chunk,
        before=np.where(position > 0, place[stage, position - 1], -1),
        source=np.where(taken >= 0, maker[taken], -1),
        steady=turned[stage, position],
        last=place[:, -1].tolist(),
    )

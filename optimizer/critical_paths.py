"""Longest paths through the passes of a pipeline schedule, as numbers of passes: what a step would be with other durations too.

Every path through a schedule's passes takes its seconds whatever the chunks hold, so the longest path of one partition is a lower
bound for all of them, linear in what their chunks hold, and the price itself for the partition that it was read off. A pair of
passes takes the longest of several sums (`Work.of_pair`): on a path it stands for the one that is longest here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..cost_models.schedules import (
    BACKWARD,
    DUALPIPE,
    DUALPIPEV,
    FORWARD,
    INPUT,
    INTERLEAVED,
    KINDS,
    NONE,
    ONE_F_ONE_B,
    WEIGHT,
    ZB_H1,
    ZB_V,
    Bools,
    Floats,
    Ints,
    Schedule,
    group_size,
    usual_schedule,
)

CELLS_AT_ONCE = 1 << 21
"""Events times durations of each that are replayed together."""
REPLAYED = 16
"""Times pp micro-batches that are replayed; more of them lengthen a path by what its slowest stage does for each."""
Terms = tuple[tuple[str, int, float], ...]
"""A duration as a sum: what of which chunk, how often."""
ALONE = {
    FORWARD: (("forward_s", 1),),
    BACKWARD: (("backward_s", 1),),
    INPUT: (("backward_s", 1), ("weight_s", -1)),
    WEIGHT: (("weight_s", 1),),
}
TURN = {ONE_F_ONE_B: 2, ZB_H1: 3, ZB_V: 6, DUALPIPE: 2, DUALPIPEV: 2}
"""Events of a stage, pairs as one, after which its steady state begins anew with one more micro-batch, DualPipe's with two."""
Weights = dict[str, Floats | Ints]
Taken = Mapping[str, Floats]
"""Seconds of every chunk, (chunks,), by their names in `Work`; exchanges as `sent_s` of forwards and `returned_s` of backwards."""


@dataclass(frozen=True)
class Pipeline:
    """A schedule as a stack runs it (`usual_schedule`)."""

    schedule: str
    pp: int
    vpp: int
    num_microbatches: int
    split_backward: bool = True
    group: int = 0
    slowed: float = 0.0  # of the compute beside a pair's messages, as in `Work`

    @property
    def turn(self) -> tuple[int, int]:
        """Events of a stage and micro-batches after which its steady state begins anew; 0 where it has none of whole turns."""
        if self.schedule == INTERLEAVED:
            size = self._size
            return (2 * self.vpp * size, size) if size in (self.pp, self.group) else (0, 0)
        return TURN.get(self.schedule, 0), int(self.schedule in TURN) + (self.schedule == DUALPIPE)

    @property
    def _size(self) -> int:
        """Micro-batches in a group of interleaved chunks, but for the last."""
        return group_size(self.schedule, self.pp, self.num_microbatches, self.group) or self.pp

    def warm_up(self, stage: int) -> int:
        """Forwards of a stage of interleaved chunks up to its first backward; as many backwards follow from its last forward on."""
        return min(2 * (self.pp - 1 - stage) + (self.vpp - 1) * self._size + 1, self.num_microbatches * self.vpp)

    def ends_passes(self, stage: int) -> Ints:
        """Of each of a stage's chunks the forwards up to its first backward, and the backwards from its last forward on."""
        m, most = self.num_microbatches, self.warm_up(stage)
        group_by_group = np.argsort(np.tile(np.arange(m) // self._size, self.vpp), kind="stable")
        forwards = np.repeat(np.arange(self.vpp), m)[group_by_group]
        backwards = self.vpp - 1 - forwards
        return np.stack([np.bincount(each, minlength=self.vpp) for each in (forwards[:most], backwards[-most:])])

    @property
    def spare(self) -> int:
        """Turns of the steady state that are not replayed."""
        size = self.turn[1]
        return max(0, self.num_microbatches - REPLAYED * self.pp) // size if size else 0


@dataclass(frozen=True, eq=False)
class Path:
    """A path from the step's begin to the end of a stage's last pass: how often what each chunk takes is on it, (chunks,) by name,
    and edges crossed.
    """

    stage: int
    weights: Weights
    edges: int

    def seconds(self, taken: Taken, p2p_s: float) -> float:
        """What it takes when chunks take so long and an edge `p2p_s`."""
        return float(sum(weight @ taken[name] for name, weight in self.weights.items()) + self.edges * p2p_s)


@dataclass(frozen=True, eq=False)
class _Events:
    """Passes of a schedule, two that run together as one, each after those it waits for.

    (events,): stage, the number of its duration, the event `before` on the same stage, and (events, 2) `sources` of what it takes,
    −1 for none, and whether they cross an edge. Durations are of a kind and a chunk, then of a pair of chunks (`pairs`).
    """

    stage: Ints
    duration: Ints
    before: Ints
    sources: Ints
    crossing: Bools
    waits: Ints  # the chunk of a backward alone, whose recompute may come before its messages, or −1
    steady: Bools  # a turn more fits between the event before and this one
    turns: tuple[Ints, ...]  # durations of one turn of every stage
    pairs: tuple[tuple[int, int], ...]
    last: list[int]  # of every stage

    @cached_property
    def replayed(self) -> list[tuple[int, int, int, int, bool, int, bool]]:
        """What a replay reads: duration, the chunk that may redo ahead, before, and each source with whether it crosses an edge."""
        (first, second), (far, farther) = self.sources.T, self.crossing.T
        columns = (self.duration, self.waits, self.before, first, far, second, farther)
        return list(zip(*(each.tolist() for each in columns), strict=True))

    @cached_property
    def waves(self) -> list[Ints]:
        """The events that can come first, those that can come when these have, and so on: none of one waits for another."""
        depth = [0] * (len(self.stage) + 1)  # the last entry, which −1 reads, is before all
        for e, (before, (first, second)) in enumerate(zip(self.before.tolist(), self.sources.tolist(), strict=True)):
            depth[e] = 1 + max(depth[before], depth[first], depth[second])
        order = np.argsort(depth[:-1], kind="stable")
        return np.split(order, np.flatnonzero(np.diff(np.array(depth)[order])) + 1)


def longest_paths(pipeline: Pipeline, taken: Taken, p2p_s: float, stages: Sequence[int] | None = None) -> list[Path]:
    """The longest path to the end of the last pass of every stage, or of `stages`, in their order.

    Beyond REPLAYED·pp micro-batches a path is the replayed one with more of its slowest stage: it exists, and so is a lower bound.
    """
    events = _fewer(pipeline)
    sums = _sums(events, taken, pipeline.slowed)
    seconds = _seconds(sums, taken)
    come_from = _replay(events, seconds, taken["early_s"].tolist() if "early_s" in taken else None, p2p_s)
    ends = [(stage, events.last[stage]) for stage in (range(pipeline.pp) if stages is None else stages)]
    traced = _traced(come_from, [last for _, last in ends])
    told = _Told.of(pipeline, events, taken, sums, seconds)
    return [told.path(stage, way) for (stage, _), way in zip(ends, traced, strict=True)]


def first_stage_paths(pipeline: Pipeline, many: Sequence[Taken], p2p_s: float) -> list[Path]:
    """The longest path to the end of the first stage's last pass under each of many durations, which are replayed together."""
    events = _fewer(pipeline)
    at_once = max(1, CELLS_AT_ONCE // len(events.stage))
    found: list[Path] = []
    for some in (many[begin : begin + at_once] for begin in range(0, len(many), at_once)):
        sums = [_sums(events, taken, pipeline.slowed) for taken in some]
        seconds = [_seconds(own, taken) for own, taken in zip(sums, some, strict=True)]
        early_s = np.array([taken["early_s"] for taken in some]).T if "early_s" in some[0] else None
        come_from = _replay_together(events, np.array(seconds).T, early_s, p2p_s)
        ways = [next(_traced(own.tolist(), events.last[:1])) for own in come_from.T]
        told = [_Told.of(pipeline, events, *one) for one in zip(some, sums, seconds, strict=True)]
        found += [one.path(0, way) for one, way in zip(told, ways, strict=True)]
    return found


def _fewer(pipeline: Pipeline) -> _Events:
    """The events of a schedule of as many micro-batches as are replayed."""
    return _events(pipeline, pipeline.num_microbatches - pipeline.spare * pipeline.turn[1])


def _seconds(sums: list[Terms], taken: Taken) -> list[float]:
    """How long every duration is."""
    return [sum(times * float(taken[name][chunk]) for name, chunk, times in terms) for terms in sums]


def _sums(events: _Events, taken: Taken, slowed: float) -> list[Terms]:
    """What every duration is the sum of; of a pair the longest of the sums that it is at least (`Work.of_pair`)."""
    chunks = len(taken["forward_s"])
    alone: list[Terms] = [
        tuple((name, chunk, times) for name, times in ALONE[kind] if name in taken) for kind in KINDS for chunk in range(chunks)
    ]
    for forward, backward in events.pairs:
        both: Terms = (("forward_s", forward, 1), ("backward_s", backward, 1))
        ways: list[Terms] = [both]
        if "sent_s" in taken:
            messages: Terms = (("sent_s", forward, 1), ("returned_s", backward, 1))
            hidden: Terms = tuple((name, chunk, slowed - 1.0) for name, chunk, _ in messages)
            ways = [both + hidden, messages, both[:1], both[1:]]
        alone.append(max(ways, key=lambda terms: sum(times * float(taken[name][chunk]) for name, chunk, times in terms)))
    return alone


def _replay(events: _Events, seconds: list[float], early_s: list[float] | None, p2p_s: float) -> list[int]:
    """The event that each waits for longest."""
    end = [0.0] * (len(events.stage) + 1)  # the last entry, which −1 reads, is the step's begin
    come_from = []
    for e, (duration, waits, before, first, far, second, farther) in enumerate(events.replayed):
        begin, where = end[before], before
        ahead = early_s[waits] if early_s is not None and waits >= 0 else 0.0
        begin += ahead
        if first >= 0:
            arrived = end[first] + p2p_s if far else end[first]
            if arrived > begin:
                begin, where = arrived, first
        if second >= 0:
            arrived = end[second] + p2p_s if farther else end[second]
            if arrived > begin:
                begin, where = arrived, second
        end[e] = begin + seconds[duration] - ahead
        come_from.append(where)
    return come_from


def _replay_together(events: _Events, seconds: Floats, early_s: Floats | None, p2p_s: float) -> Ints:
    """The same under many durations (durations, n), (events, n): events that wait for none of each other as one array."""
    end = np.zeros((len(events.stage) + 1, seconds.shape[1]))  # the last entry, which −1 reads, is the step's begin
    come_from = np.empty((len(events.stage), seconds.shape[1]), dtype=np.int64)
    for wave in events.waves:
        begin, where = end[events.before[wave]], np.repeat(events.before[wave, None], seconds.shape[1], axis=1)
        waits = events.waits[wave, None]
        ahead = 0.0 if early_s is None else np.where(waits >= 0, early_s[waits[:, 0]], 0.0)
        begin = begin + ahead
        for sources, crossing in zip(events.sources[wave].T, events.crossing[wave].T, strict=True):
            arrived = end[sources] + np.where(crossing, p2p_s, 0.0)[:, None]
            later = arrived > begin
            begin, where = np.where(later, arrived, begin), np.where(later, sources[:, None], where)
        end[wave] = begin + seconds[events.duration[wave]] - ahead
        come_from[wave] = where
    return come_from


def _traced(come_from: list[int], ends: list[int]) -> Iterator[Ints]:
    """The events on the way back from each of some; where it meets an earlier one it goes on like that."""
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


@dataclass(frozen=True, eq=False)
class _Told:
    """Tells ways through events as paths: `sums` of every duration, seconds of every stage's turn, and turns that were `spare`d."""

    events: _Events
    sums: list[Terms]
    turn_s: Floats
    spare: int
    chunks: int
    ahead: bool

    @classmethod
    def of(cls, pipeline: Pipeline, events: _Events, taken: Taken, sums: list[Terms], seconds: list[float]) -> _Told:
        spare = pipeline.spare
        turn_s = np.array([sum(seconds[one] for one in turn.tolist()) for turn in events.turns]) if spare else np.zeros(pipeline.pp)
        return cls(events, sums, turn_s, spare, len(taken["forward_s"]), "early_s" in taken)

    def path(self, stage: int, way: Ints) -> Path:
        """The path of some events, last first, longer by the spared turns of its slowest stage that has a steady state on it."""
        events, came = self.events, np.append(way[1:], -1)
        times = np.bincount(events.duration[way], minlength=len(self.sums))
        along = (came >= 0) & (came == events.before[way])
        steady = events.stage[way[along & events.steady[way]]]
        if self.spare and len(steady):
            slowest = steady[self.turn_s[steady].argmax()]
            times = times + self.spare * np.bincount(events.turns[slowest], minlength=len(self.sums))
        weights: Weights = {}
        for duration in np.flatnonzero(times).tolist():
            for name, chunk, each in self.sums[duration]:
                weights.setdefault(name, np.zeros(self.chunks))[chunk] += each * times[duration]
        waited = (came[:, None] == events.sources[way]) & (came >= 0)[:, None] & ~along[:, None]
        if self.ahead:
            redone = events.waits[way][waited.any(axis=1)]
            weights["early_s"] = -np.bincount(redone[redone >= 0], minlength=self.chunks)
        return Path(stage, weights, int((waited & events.crossing[way]).any(axis=1).sum()))


@lru_cache(maxsize=4)  # some MiB each; one layout's are asked for again and again
def _events(pipeline: Pipeline, num_microbatches: int) -> _Events:
    order = usual_schedule(pipeline.schedule, pipeline.pp, pipeline.vpp, num_microbatches, pipeline.split_backward, pipeline.group)
    at = order.sequence
    kind, chunk, taken, made = (each[at] for each in (order.kind, order.chunk, *order.wires))
    paired = order.paired[at]
    event, first = np.cumsum(~paired) - 1, np.flatnonzero(~paired)
    beside = np.append(paired[1:], False)[first]  # whether the next pass runs with it
    stage = at[0][first]
    maker = np.full(2 * order.chunks * num_microbatches + 1, NONE)
    maker[made] = event  # −1 writes the last one, which no pass takes
    maker[-1] = NONE
    sources = np.stack([maker[taken[first]], np.where(beside, maker[np.append(taken, NONE)[first + 1]], NONE)], axis=1)
    place = np.lexsort((first, stage))
    before = np.full(len(first), NONE)
    same = stage[place][1:] == stage[place][:-1]
    before[place[1:][same]] = place[:-1][same]
    duration, pairs = _durations(order, kind[first] * order.chunks + chunk[first], chunk, first, beside)
    of_stage = [place[stage[place] == each] for each in range(pipeline.pp)]
    steady, turns = _turns(pipeline.turn[0], duration, of_stage)
    return _Events(
        stage=stage,
        duration=duration,
        before=before,
        sources=sources,
        crossing=(sources >= 0) & (stage[sources] != stage[:, None]),
        waits=np.where(~beside & np.isin(kind[first], (BACKWARD, INPUT)), chunk[first], NONE),
        steady=steady,
        turns=turns,
        pairs=pairs,
        last=[int(events[-1]) for events in of_stage],
    )


def _durations(order: Schedule, alone: Ints, chunk: Ints, first: Ints, beside: Bools) -> tuple[Ints, tuple[tuple[int, int], ...]]:
    """The number of every event's duration, and the chunks of every pair."""
    second = chunk[first[beside] + 1]
    named, place = np.unique(chunk[first[beside]] * order.chunks + second, return_inverse=True)
    duration = alone.copy()
    duration[beside] = len(KINDS) * order.chunks + place
    return duration, tuple((int(each) // order.chunks, int(each) % order.chunks) for each in named)


def _turns(turn: int, duration: Ints, of_stage: list[Ints]) -> tuple[Bools, tuple[Ints, ...]]:
    """Which events follow another in the steady state of their stage, and the durations of one turn of each.

    A stage is in its steady state where it does a turn of events over again: one more can be put between any two of them.
    """
    steady, turns = np.zeros(len(duration), dtype=bool), []
    for events in of_stage:
        each = duration[events]
        again = np.concatenate([[False], each[turn:] == each[: len(each) - turn], [False]]) if turn else np.zeros(2, dtype=bool)
        begins, ends = np.flatnonzero(np.diff(again.astype(np.int8)) == 1), np.flatnonzero(np.diff(again.astype(np.int8)) == -1)
        longest = int((ends - begins).argmax()) if len(begins) else 0
        if not len(begins) or ends[longest] - begins[longest] < turn:
            turns.append(np.zeros(0, dtype=np.int64))
            continue
        steady[events[begins[longest] + 1 : ends[longest] + turn]] = True
        turns.append(each[begins[longest] : begins[longest] + turn])
    return steady, tuple(turns)

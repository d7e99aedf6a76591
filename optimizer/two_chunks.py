"""Interleaved stages of two chunks each: the partition whose longest known path is shortest, exactly.

What a stage asks of the step at least (`chunking.asked_by`) and what it holds follow from where its two chunks begin and end, and
paths that go back and forth between two stages side by side from where theirs do. Whether any partition keeps all of these within
a limit is then a walk from stage to stage over the places that the first round of chunks and the second have come to; where the
second began is told by the bits of a state. The least limit is found by halving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..cost_models.schedules import INTERLEAVED, Bools
from ..cost_models.timeline import Floats, Ints
from .chunking import PASSES, Below, Chunking, asked_by, chunk_seconds, held_by
from .critical_paths import Weights, longest_paths

Words = npt.NDArray[np.uint64]
Lengths = tuple[int, int]
"""How long a stage's first and second chunk are, as places among the lengths that they can have."""
Runs = list[tuple[Ints, Ints]]
"""Where chunks of stages side by side begin and end."""
WORD = 64
MOST_CELLS = 5 << 19
"""Places and lengths of chunks, of all stages together, that are worked out at most: in some tenths of a second."""
MOST_STATES = 1 << 27
"""States of all stages that are looked at for one limit, each after all lengths of the stage before, to see what both ask for;
beyond, each stage is held to what it asks for alone.
"""
LEANING = (1.1, 1.3, 2.0)
"""How much slower a chunk and one beside it are made, in turn, to see the paths that go back and forth between them."""
PRECISE = 5e-4
"""Relative difference of limits at which halving ends."""
ROUNDING = 1e-9
"""Share by which limits are wider than they are, for rounding."""


def least_of_two(chunking: Chunking, counts: Ints, least_s: float, most_s: float) -> float:
    """Seconds that no partition comes below, at least `least_s`, given one (`counts`) that takes `most_s`.

    No more than that where stages do not hold two interleaved chunks, or too many partitions may be near the best.
    """
    of, one_way = chunking, chunking.blocks.backward_s.shape[1] == 1 or chunking.depth is not None
    if of.pipeline.schedule != INTERLEAVED or of.vpp != 2 or not one_way or of.leading:
        return least_s
    places = _Places(chunking, most_s * (1.0 + ROUNDING))
    if places.cells > MOST_CELLS:
        return least_s
    taken = chunk_seconds(chunking, counts)
    stages = [places.asked(stage, taken) for stage in range(of.pp)]
    links: list[_Links] = []
    if _states(places, stages, most_s) <= MOST_STATES:
        links = [_Links.of(places, stage, _between(chunking, stage, taken)) for stage in range(of.pp - 1)]
    while most_s > least_s * (1.0 + PRECISE):
        limit_s = (least_s + most_s) / 2.0
        least_s, most_s = (least_s, limit_s) if _reached(places, stages, links, limit_s) else (limit_s, most_s)
    return least_s


def _between(chunking: Chunking, stage: int, taken: dict[str, Floats]) -> Iterator[Below]:
    """The longest paths if one stage's first chunk were slower and the next one's second, and the other way round, with what
    follows on the stage.
    """
    pp, none = chunking.pp, np.zeros(chunking.chunks)
    after = max((each for each in asked_by(chunking, stage, taken) if each.after), key=lambda each: each.seconds(taken, 0.0))
    for slow in ((stage, pp + stage + 1), (pp + stage, stage + 1)):
        for leaning in LEANING:
            slower = np.ones(chunking.chunks)
            slower[list(slow)] = leaning
            leant = {name: each * slower if name in PASSES else each for name, each in taken.items()}
            path = longest_paths(chunking.pipeline, leant, chunking.p2p_s, stages=(0,))[0]
            names = {*path.weights, *after.weights}
            yield Below({each: path.weights.get(each, none) + after.weights.get(each, none) for each in names}, path.edges)


def _states(places: _Places, stages: list[Floats], limit_s: float) -> int:
    """States that are looked at, each after all lengths of the stage before."""
    lengths = [int((asked_s <= limit_s).any(axis=(0, 2)).sum()) for asked_s in stages]
    begins = [int(places.count[stage] * places.count[len(stages) + stage]) for stage in range(len(stages))]
    words = -(-int(places.count[len(stages)]) // WORD)
    return words * sum(one * other * each for one, other, each in zip(lengths, lengths[1:], begins[1:], strict=False))


class _Places:
    """Where the chunks of a pipeline can begin if no stage is to ask for more than `most_s`, how long they can be, and what stages
    then ask for.
    """

    def __init__(self, chunking: Chunking, most_s: float) -> None:
        self.of, self.blocks = chunking, len(chunking.order)
        least, chunks, block = chunking.cutting.least, np.arange(chunking.chunks + 1), np.arange(self.blocks + 1)
        inside = block[:, None] + block <= self.blocks
        run, works = (block[:, None], block[:, None] + block), map(chunking.blocks.of, ("forward_s", "backward_s"))
        each_s = sum(self._run(each, *run) for each in works if each is not None)
        passed = inside & (chunking.pipeline.num_microbatches * each_s <= most_s)
        longest = int(np.flatnonzero(passed.any(axis=0)).max(initial=1))
        before = np.concatenate([[0], np.cumsum(least)])
        self.first = np.maximum(before, self.blocks - (chunking.chunks - chunks) * longest)
        last = np.minimum(np.append(chunking.cutting.latest, self.blocks), chunks * longest)
        self.count = np.maximum(last - self.first + 1, 0)
        self.lengths = [np.arange(each, longest + 1) for each in least]

    @property
    def cells(self) -> int:
        """Places and lengths of both chunks of all stages together."""
        each = self.count[:-1] * np.array([len(lengths) for lengths in self.lengths])
        return int((each[: self.of.pp] * each[self.of.pp :]).sum())

    def begins(self, chunk: int) -> Ints:
        """The blocks that a chunk, or what is behind the last, can begin at."""
        return np.asarray(self.first[chunk] + np.arange(self.count[chunk]))

    def asked(self, stage: int, taken: dict[str, Floats]) -> Floats:
        """Seconds that a stage asks for, by begin and length of its first and of its second chunk; infinite where that is illegal
        or too much to hold.
        """
        of, second = self.of, self.of.pp + stage
        legal = self._legal(stage)[:, :, None, None] & self._legal(second)
        done, after = np.full(legal.shape, -np.inf), np.full(legal.shape, -np.inf)
        for below in asked_by(of, stage, taken):
            part = after if below.after else done
            np.maximum(part, self._of_both(stage, below.weights, below.edges * of.p2p_s), out=part)
        for weights in held_by(of, stage):
            held = self._of_both(stage, weights, float(of.fixed_bytes[stage]))
            legal &= held <= of.limit_bytes * (1.0 + ROUNDING)
        return np.where(legal, done + after, np.inf)

    def _of_both(self, stage: int, weights: Weights, fixed: float) -> Floats:
        """A constant and what is weighed of all chunks, by begin and length of a stage's two: of the others at least."""
        runs: list[Runs] = []
        for chunk in (stage, self.of.pp + stage):
            begin = self.begins(chunk)[:, None]
            runs.append([(begin, begin + self.lengths[chunk])])
        fixed, first, second = self.summed(stage, weights, runs, fixed)
        return np.asarray(fixed + first[:, :, None, None] + second)

    def summed(self, stage: int, weights: Weights, runs: Sequence[Runs], fixed: float) -> tuple[float, Floats, Floats]:
        """A constant, and what is weighed of the first round of chunks and of the second: what a stage and those next to it hold,
        which begin and end so in either round, as it is, and what lies before, between and behind at least.
        """
        pp, stages = self.of.pp, len(runs[0])
        sums: list[Floats] = [np.zeros(1), np.zeros(1)]
        for name, weight in weights.items():
            each, ends = self.of.blocks.of(name), self.of.ends.of(name)
            if each is None or ends is None:
                continue
            others = (weight[:stage], weight[stage + stages : pp + stage], weight[pp + stage + stages :])
            before, between, behind = (self._running(each, float(one.min()) if len(one) else 0.0) for one in others)
            for turn, (left, right) in enumerate(((before, between), (between, behind))):
                (begin, _), *_, (_, end) = [runs[turn][0], *runs[turn]]
                own = sum(float(weight[turn * pp + stage + at]) * self._run(each, *run) for at, run in enumerate(runs[turn]))
                sums[turn] = sums[turn] + left[np.maximum(begin, 0)] + own - right[np.minimum(end, self.blocks)]
            fixed += float(behind[-1]) + float(ends[:, 0] @ weight[[0, -1]])
        return fixed, sums[0], sums[1]

    def _running(self, each: Floats, weight: float) -> Floats:
        """What the blocks before every block and before the end weigh at least, whatever is redone of them, (blocks+1,)."""
        return np.asarray((weight * each).min(axis=1) @ self.of.running)

    def _run(self, each: Floats, begin: Ints, end: Ints) -> Floats:
        """What chunks take that begin and end so, their first `depth` blocks under the second choice."""
        begin, end = np.maximum(begin, 0), np.minimum(end, self.blocks)
        if self.of.depth is None:
            running = each[:, 0] @ self.of.running
            return np.asarray(running[end] - running[begin])
        until, redone, kept = np.minimum(begin + self.of.depth, end), each[:, -1] @ self.of.running, each[:, 0] @ self.of.running
        return np.asarray(redone[until] - redone[begin] + kept[end] - kept[until])

    def _legal(self, chunk: int) -> Bools:
        """Whether a chunk may begin and end so, (begins, lengths)."""
        begin, behind = self.begins(chunk), chunk + 1
        end = begin[:, None] + self.lengths[chunk]
        inside = (end >= self.first[behind]) & (end < self.first[behind] + self.count[behind])
        return np.asarray(inside & self.of.cutting.begins(chunk)[begin][:, None])


@dataclass(frozen=True)
class _Links:
    """What paths between a stage and the next take at least, as a sum of what they take of the first round of chunks, by the
    lengths of both stages' and the begin of the next one's (paths, length, length, begins), and of the second.
    """

    first: Floats
    second: Floats

    @classmethod
    def of(cls, places: _Places, stage: int, paths: Iterator[Below]) -> _Links:
        runs, found = [], []
        for chunk in (stage, places.of.pp + stage):
            meet = places.begins(chunk + 1)[None, None, :]
            begin, end = meet - places.lengths[chunk][:, None, None], meet + places.lengths[chunk + 1][None, :, None]
            runs.append([(begin, meet), (meet, end)])
        for below in paths:
            fixed, first, second = places.summed(stage, below.weights, runs, below.edges * places.of.p2p_s)
            found.append((fixed + first, second))
        return cls(*(np.stack(each) for each in zip(*found, strict=True)))

    @cached_property
    def least(self) -> Floats:
        """Wherever the chunks begin, at least, by the lengths of the first round and then of the second."""
        return np.asarray((self.first.min(axis=3)[:, :, :, None, None] + self.second.min(axis=3)[:, None, None]).max(axis=0))

    @cached_property
    def most(self) -> Floats:
        """The same at most."""
        return np.asarray((self.first.max(axis=3)[:, :, :, None, None] + self.second.max(axis=3)[:, None, None]).max(axis=0))

    def within(self, before: Lengths, lengths: Lengths, limit_s: float) -> Bools:
        """Where the next stage's chunks may begin, (begins of its first, of its second)."""
        first, second = self.first[:, before[0], lengths[0]], self.second[:, before[1], lengths[1]]
        return np.asarray(((first[:, :, None] + second[:, None]) <= limit_s).all(axis=0))


def _reached(places: _Places, stages: list[Floats], links: list[_Links], limit_s: float) -> bool:
    """Whether any partition stays within a limit; without links states are not told apart by the lengths that led to them."""
    pp, starts = len(stages), int(places.count[len(stages)])
    bits, each = np.zeros((starts, -(-starts // WORD)), dtype=np.uint64), np.arange(starts)
    bits[each, each // WORD] = np.uint64(1) << (each % WORD).astype(np.uint64)
    come: dict[Lengths, Words] = {(0, 0): bits[None]}
    for stage, asked_s in enumerate(stages):
        within, further = asked_s <= limit_s, dict[Lengths, Words]()
        shape = *(int(places.count[chunk]) for chunk in (stage + 1, pp + stage + 1)), bits.shape[1]
        for one, other in np.argwhere(within.any(axis=(0, 2))).tolist():
            states = _met(come, links[stage - 1] if links and stage else None, (one, other), limit_s)
            (here, there), (here2, there2) = _moved(places, stage, one), _moved(places, pp + stage, other)
            allowed = np.where(within[here, one, here2, other][:, :, None], states[here, here2], np.uint64(0))
            if allowed.any():
                key = (one, other) if links else (0, 0)
                further.setdefault(key, np.zeros(shape, dtype=np.uint64))[there, there2] |= allowed
        come = further
        if not come:
            return False
    return any((states & bits[:, None]).any() for states in come.values())


def _met(come: dict[Lengths, Words], links: _Links | None, lengths: Lengths, limit_s: float) -> Words:
    """Where a stage whose chunks are so long can begin, after those of the stage before that have come to there."""
    if links is None:
        (states,) = come.values()
        return states
    states = np.zeros_like(next(iter(come.values())))
    for before, reached in come.items():
        place = before[0], lengths[0], before[1], lengths[1]
        if links.most[place] <= limit_s:
            states |= reached
        elif links.least[place] <= limit_s:
            states |= np.where(links.within(before, lengths, limit_s)[:, :, None], reached, np.uint64(0))
    return states


def _moved(places: _Places, chunk: int, length: int) -> tuple[slice, slice]:
    """Begins of a chunk from which so long a one leads to begins of the next, as places of either."""
    off = int(places.first[chunk] + places.lengths[chunk][length] - places.first[chunk + 1])
    begin, end = max(0, -off), min(int(places.count[chunk]), int(places.count[chunk + 1]) - off)
    return slice(begin, max(begin, end)), slice(begin + off, max(begin, end) + off)

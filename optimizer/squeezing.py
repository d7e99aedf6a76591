"""Layouts that fit under none of the cuts that the search looks at, cut so that they do: blocks moved off the fullest stage.

What a stage keeps of a block hangs on the micro-batches that it has in flight, so that equal work is not equal memory. From equal
work one block at a time goes from the stage that is the most over to where that leaves the least over in all; once nothing is over,
from the stage that works longest, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Cuts
from ..cost_models.rows import Rows
from ..cost_models.schedules import stage_chunks
from ..cost_models.split_passes import busiest_s, by_replay, held_moments
from ..cost_models.step import CostModel, same_shape
from ..search_spaces.cutting import Cutting
from ..search_spaces.layout import Floats
from .bounds import mean_bytes
from .chunk_costs import chunking_of
from .chunk_master import Master
from .chunks import moves
from .stages import EQUAL, balanced_cuts, cut_rules, cutting_of

AT_ONCE, TRIED = 8, 512
"""Rows that are squeezed before the limit is looked at again, fewer of many chunks, and how many are for the sake of any that fits.
"""
CELLS, MOST_DRAWN = 1 << 13, 32
"""Chunks of all cuts of a row that are tried together, which sets how many moves are drawn beside each, and how many are at most.
"""
SHAPES, IN_VAIN = 24, 2
"""Groups of one shape that are looked at once a layout is known that fits, and times that some of theirs are squeezed in vain.
"""
PRICE = 0.03
"""By how much of the step a layout must be faster under equal work than what it has to beat: making it fit mostly costs more."""
ROOM = 1.1
"""How much of the memory stages of equal shares may ask for: later chunks that take more of the layers are kept less often."""
LEAN = (1.0, 0.5)
"""Shares of the work that go into the leanest chunks of all stages, by which it is cut where equal work leads nowhere."""
SOLVED, SECONDS = 4, 0.1
"""Shapes whose roomiest row CP-SAT is asked to cut where nothing else fits, and its deterministic seconds for each."""
DRAWS = 3
"""Times in turn that moves are drawn at random beside those that do not help alone."""


@dataclass(frozen=True)
class Squeezed:
    """Rows of one shape that fit when cut so, (n, chunks+1); their frames, what no cuts of theirs beat, and their steps from below,
    (n,).
    """

    rows: Rows
    frame: npt.NDArray[np.intp]
    bound: Floats
    cuts: Cuts
    step_s: Floats


@dataclass(frozen=True)
class _Part:
    """Some rows, their frames and what no cuts of theirs beat."""

    rows: Rows
    frame: npt.NDArray[np.intp]
    bound: Floats

    def take(self, some: npt.NDArray[np.intp]) -> _Part:
        return _Part(self.rows.take(some), self.frame[some], self.bound[some])

    @property
    def at_once(self) -> int:
        """How many of rows of one shape are squeezed together."""
        pp, vpp, _ = self.rows.shape
        return min(AT_ONCE, max(1, 4 * CELLS // (vpp * (pp * vpp) ** 2)))


@dataclass
class Tight:
    """Rows that fit under no cut that was looked at, though stages of equal shares nearly would: set apart until the limit is
    known. Once the time is over (`late`) no more of them are squeezed but the first that is tried at all, and `cut_short` tells so.
    """

    model: CostModel
    late: Callable[[], bool] = lambda: False
    cut_short: bool = False
    _waiting: list[_Part] = field(default_factory=list)

    def add(self, rows: Rows, frame: npt.NDArray[np.intp], bound: Floats) -> None:
        """Sets rows apart, with their frames and what no cuts of theirs beat."""
        if self.model.problem.stack.cuts_freely(int(rows.table.vpp.min(initial=1))) and len(rows):
            roomy = np.nonzero(mean_bytes(self.model, rows) <= ROOM * self.model.usable_bytes)[0]
            self._waiting.append(_Part(rows, frame, bound).take(roomy))

    def squeezed(self, limits_s: Callable[[npt.NDArray[np.intp]], Floats]) -> Iterator[Squeezed]:
        """Those of the rows that fit when cut anew, of which equal work promises that they come below the limits of their frames,
        the most promising first; where there is no limit yet, first any that fits, from the roomiest on.
        """
        parts = list(self._parts(limits_s))
        if parts and np.isinf(limits_s(parts[0].frame)).any():
            yield from self._any(parts)
        vain = 0
        for part in sorted(parts, key=lambda part: float(part.bound.min()))[:SHAPES]:
            if vain == IN_VAIN:
                break
            promised_s = np.maximum(self._promised_s(part.rows) * (1.0 + PRICE), part.bound)
            order = np.argsort(promised_s, kind="stable")
            while vain < IN_VAIN and len(order := order[promised_s[order] < limits_s(part.frame[order])]):
                if self._over():
                    return
                now, order = order[: part.at_once], order[part.at_once :]
                if (found := self._squeezed(part.take(now))) is None:
                    vain += 1
                else:
                    yield found

    def _any(self, parts: list[_Part]) -> Iterator[Squeezed]:
        """The first that fits."""
        rooms = [mean_bytes(self.model, part.rows) for part in parts]
        roomiest = [part.take(np.argsort(room, kind="stable")[:1]) for part, room in zip(parts, rooms, strict=True)]
        tried = 0
        for which in sorted(range(len(parts)), key=lambda which: float(rooms[which].min())):
            order, at_once = np.argsort(rooms[which], kind="stable"), parts[which].at_once
            while len(order) and tried < TRIED:
                if tried and self._over():
                    return
                now, order, tried = order[:at_once], order[at_once:], tried + at_once
                found = self._squeezed(parts[which].take(now))
                parts[which].bound[now] = np.inf  # none is squeezed twice
                if found is not None:
                    yield found
                    return
        for which in sorted(range(len(parts)), key=lambda which: float(rooms[which].min()))[:SOLVED]:
            if self._over():
                return
            if (found := self._solved(roomiest[which])) is not None:
                yield found
                return

    def _over(self) -> bool:
        """Whether the time is over, which leaves rows as they are."""
        self.cut_short = self.cut_short or self.late()
        return self.cut_short

    def _parts(self, limits_s: Callable[[npt.NDArray[np.intp]], Floats]) -> Iterator[_Part]:
        """The rows that may still come below their limits, by shape."""
        for waiting in self._waiting:
            left = waiting.take(np.nonzero(waiting.bound * (1.0 + PRICE) < limits_s(waiting.frame))[0])
            if len(left.frame):
                yield from (left.take(group) for group in same_shape(left.rows.table))

    def _promised_s(self, rows: Rows) -> Floats:
        """What rows of one shape would take if equal work fitted, from below."""
        ruled = cut_rules(self.model, rows)[0]
        if by_replay(rows):
            return busiest_s(rows, ruled) + self.model.problem.stack.step_overhead_s.value
        return self.model.price_cuts(rows, ruled, closed_form=True).step_time_s

    def _squeezed(self, part: _Part) -> Squeezed | None:
        """Those of some rows of one shape that fit when squeezed, if any do."""
        ruled, cutting = cut_rules(self.model, part.rows)[0], cutting_of(self.model, *part.rows.shape[:2])
        cuts = squeezed_cuts(self.model, part.rows, cutting, ruled)
        over = np.nonzero(self.model.cut_bytes(part.rows, cuts).max(axis=1) > self.model.usable_bytes)[0]
        for start in lean_cuts(self.model, part.rows) if len(over) else ():
            cuts[over] = squeezed_cuts(self.model, part.rows.take(over), cutting, start[over])
            over = over[self.model.cut_bytes(part.rows.take(over), cuts[over]).max(axis=1) > self.model.usable_bytes]
            if not len(over):
                break
        return self._fitting(part, cuts)

    def _fitting(self, part: _Part, cuts: Cuts) -> Squeezed | None:
        """Those of some rows of one shape that fit at these cuts, if any do."""
        priced = self.model.price_cuts(part.rows, cuts, closed_form=True)
        fits = np.nonzero(priced.fits)[0]
        some = part.take(fits)
        return Squeezed(some.rows, some.frame, some.bound, cuts[fits], priced.step_time_s[fits]) if len(fits) else None

    def _solved(self, part: _Part) -> Squeezed | None:
        """A row cut so that it fits by CP-SAT, which finds such cuts if there are any."""
        counts, _ = Master(chunking_of(self.model, part.rows)).below(np.inf, SECONDS)
        if counts is None:
            return None
        return self._fitting(part, np.cumsum([0, *counts.sum(axis=(0, 1))])[None])


def lean_cuts(model: CostModel, rows: Rows) -> Iterator[Cuts]:
    """Cuts (n, chunks+1) of rows of one shape to squeeze where equal work leads to none that fit: the more of every stage's work in
    that of its chunks of which it keeps fewest micro-batches.
    """
    pp, vpp, schedule = rows.shape
    place = stage_chunks(schedule, pp, vpp)
    if len(place) == 1:
        return
    kept = np.array([held[:, : len(place)].max(axis=0) for held in held_moments(rows)]).T  # of every chunk, (chunks of a stage, pp)
    lean = np.bincount(place[kept.argmin(axis=0), np.arange(pp)], minlength=pp * vpp) * vpp
    for share in LEAN:
        yield balanced_cuts(model, rows, pp * vpp, tuple((share * lean + (1.0 - share)).tolist()))


def squeezed_cuts(model: CostModel, rows: Rows, cutting: Cutting, cuts: Cuts) -> Cuts:
    """The cuts that moves of single blocks lead to from those of rows of one shape (n, chunks+1): where stages fit, if any of these
    is on the way. Where none helps, it is moved beside others drawn at random.
    """
    (pp, vpp, schedule), (moved, given) = rows.shape, moves(cutting.chunks)
    held = (stage_chunks(schedule, pp, vpp)[:, :, None] == given).any(axis=0)  # which stages hold the chunk that gives, by move
    found, going = cuts.copy(), np.arange(len(rows))
    over, work_s = _stage_loads(model, rows, found)
    drawn, beside = np.random.default_rng(0), np.zeros(len(rows), dtype=np.int64)
    while len(going):
        fits = over[going].sum(axis=1) <= 0.0
        fullest = np.where(fits, work_s[going].argmax(axis=1), over[going].argmax(axis=1))
        owner, move = np.nonzero(held[fullest])
        tried = found[going[owner]] + moved[move]
        pairs = beside[going[owner]] > 0
        times = np.where(pairs, np.clip(CELLS // (vpp * cutting.chunks**2), 1, MOST_DRAWN), 1)
        owner, tried, pairs = np.repeat(owner, times), np.repeat(tried, times, axis=0), np.repeat(pairs, times)
        tried[pairs] += moved[drawn.integers(len(moved), size=int(pairs.sum()))]
        legal = cutting.legal(tried)
        owner, tried = owner[legal], tried[legal]
        if not len(owner):
            break
        more, works_s = _stage_loads(model, rows.take(going[owner]), tried)
        now = np.where(fits, work_s[going].max(axis=1), over[going].sum(axis=1))
        then = np.where(fits[owner], np.where(more.any(axis=1), np.inf, works_s.max(axis=1)), more.sum(axis=1))
        better = np.nonzero(then < now[owner] * (1.0 - EQUAL))[0]
        better = better[np.argsort(then[better], kind="stable")]
        which, first = np.unique(owner[better], return_index=True)
        best, led = better[first], going[which]
        found[led], over[led], work_s[led] = tried[best], more[best], works_s[best]
        stuck = np.ones(len(going), dtype=bool)
        stuck[which] = False
        beside[led] = 0
        beside[going[stuck]] += 1
        going = going[~stuck | ((beside[going] <= DRAWS) & ~fits)]
    return found


def _stage_loads(model: CostModel, rows: Rows, cuts: Cuts) -> tuple[Floats, Floats]:
    """Bytes that every stage is over what there is, and seconds that it works per micro-batch, (n, pp)."""
    load = model.cut_loads(rows, cuts)
    return np.maximum(model.stage_bytes(rows, load) - model.usable_bytes, 0.0), load.forward_s + load.backward_s

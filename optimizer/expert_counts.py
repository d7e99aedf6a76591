"""Numbers of copies of every expert, searched by single moves of a copy, all of them packed at once in arrays.

A packing aims at a load: an expert's copies go to the fullest ranks that they fit on below it (best fit decreasing), else to the
lightest. Where no move lowers the fullest rank, the one that leaves least above the aim is made, and none of these twice (tabu
search, Glover 1989): few heavy experts come out even only where several numbers change together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import isqrt

import numpy as np

from ..search_spaces.layout import Bools, Floats, Ints

AIMS = (0.99, 0.98, 0.96, 0.995, 0.99)
"""Loads aimed at, over that of the fullest rank so far, one after the other."""
FRUITLESS = 4
"""Moves in a row without gain after which another load is aimed at."""
MOST_ROUNDS = 60
"""Moves made at most, for one unit of ranks."""
AT_ONCE = 2_000_000
"""Candidates × experts with load × ranks that a round packs."""
LIGHT = 1e-3
"""Share of a rank's mean load up to which an expert with one copy is left out while candidates are compared."""
STILL = 1.0 - 1e-9
"""A change helps where it leaves less than this share."""


@dataclass(frozen=True)
class Counted:
    """Copies of every expert, (E,), the rank of every copy, expert by expert, (P,), and the load of the fullest rank."""

    counts: Ints
    device: Ints
    fullest: float


def recounted(loads: Floats, ranks: int, start: Counted, target: float) -> Counted:
    """The start, or other numbers of copies packed onto the ranks of one unit with less on the fullest, ended at `target`."""
    made = {start.counts.tobytes()}
    best, rounds = start, 0
    for aim in AIMS:
        counts, fruitless = best.counts, 0
        while fruitless < FRUITLESS and rounds < MOST_ROUNDS and best.fullest > target:
            moved = _new(_moved(loads, ranks, counts), made)
            if not len(moved):
                break
            held, fits = _held(loads, ranks, moved, aim * best.fullest)
            over = np.where(fits, np.maximum(held - aim * best.fullest, 0.0).sum(axis=1), np.inf)
            fullest = np.where(fits, held.max(axis=1), np.inf)
            lowest = int(np.argmin(fullest))
            rounds, fruitless = rounds + 1, fruitless + 1
            found = _packed(loads, ranks, moved[lowest], aim * best.fullest)
            if max(found.fullest, fullest[lowest]) < best.fullest * STILL:
                best, counts, fruitless = found, found.counts, 0
            else:
                counts = moved[int(np.argmin(over))]
                made.add(counts.tobytes())
    return best


def _moved(loads: Floats, ranks: int, counts: Ints) -> Ints:
    """Numbers of copies after a copy less of one expert and one more of another, (candidates, E), as many as a round packs.

    Experts whose copies stay lightest give first, and those with the heaviest copies take first.
    """
    most = 1 + isqrt(AT_ONCE // (ranks * int(_simulated(loads, ranks, counts).sum())))
    left = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
    part = np.where(counts < ranks, loads / counts, -np.inf)
    givers = np.argsort(left, kind="stable")[: min(most, int(np.isfinite(left).sum()))]
    takers = np.argsort(-part, kind="stable")[: min(most, int(np.isfinite(part).sum()))]
    change = np.eye(len(loads), dtype=np.int64)
    moved: Ints = (counts + change[takers] - change[givers][:, None, :]).reshape(-1, len(loads))
    others: Ints = moved[(moved != counts).any(axis=1)]
    return others


def _new(moved: Ints, made: set[bytes]) -> Ints:
    return moved[[row.tobytes() not in made for row in moved]]


def _held(loads: Floats, ranks: int, counts: Ints, aim: float) -> tuple[Floats, Bools]:
    """Load of every rank, (candidates, ranks), and whether copies find ranks apart, (candidates,).

    Light experts with one copy are left out: they fill whatever room is left.
    """
    steps = int(_simulated(loads, ranks, counts).sum(axis=1).max())
    *_, (_, _, held, room) = islice(_steps(loads, ranks, counts, aim), steps)
    fits: Bools = room.min(axis=1) >= 0
    return held, fits


def _simulated(loads: Floats, ranks: int, counts: Ints) -> Bools:
    """Which experts' copies are placed to compare candidates, (..., E)."""
    found: Bools = (loads > LIGHT * loads.sum() / ranks) | (counts > 1)
    return found


def _packed(loads: Floats, ranks: int, counts: Ints, aim: float) -> Counted:
    """Copies, (E,) of them, of all experts packed."""
    places = [(int(expert[0]), np.flatnonzero(taken[0])) for expert, taken, _, _ in _steps(loads, ranks, counts[None, :], aim)]
    device = np.concatenate([device for _, device in sorted(places, key=lambda place: place[0])])
    return Counted(counts, device, float(np.bincount(device, np.repeat(loads / counts, counts), ranks).max()))


def _steps(loads: Floats, ranks: int, counts: Ints, aim: float) -> Iterator[tuple[Ints, Bools, Floats, Ints]]:
    """Expert by expert, heaviest copies first and light experts last: which it is, (candidates,), the ranks that take a copy,
    what ranks hold then, and the slots that they have left, (candidates, ranks); below 0 where too few ranks had room.
    """
    parts = loads / counts
    rows, place = np.arange(len(counts)), np.arange(ranks)
    taken = np.zeros((len(counts), ranks), dtype=bool)
    held: Floats = np.zeros(taken.shape)
    room: Ints = np.full(taken.shape, int(counts[0].sum()) // ranks)
    for expert in np.lexsort((-parts, ~_simulated(loads, ranks, counts)), axis=1).T:
        part, copies = parts[rows, expert][:, None], counts[rows, expert][:, None]
        lightest = np.where(held + part <= aim, -held, held + aim)
        order = np.argsort(np.where(room > 0, lightest, np.inf), axis=1, kind="stable")
        np.put_along_axis(taken, order, place < copies, axis=1)
        held, room = held + taken * part, room - taken
        yield expert, taken, held, room

"""How many copies each expert has, and how experts and copies fill the ranks of a unit so that the fullest holds least.

Copies are given to heavy experts in several ways, moved while that helps, and packed (expert_packing.py). Where the bound is still
far, the two heaviest experts are tried with other numbers of copies, then all moves of a copy are packed at once, time after time
(expert_counts.py), and of few experts CP-SAT decides numbers and places at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from ..search_spaces.layout import Floats, Ints
from .expert_counts import Counted, recounted
from .expert_model import rearranged
from .expert_packing import TIGHT, improved, longest_first, pack, packing_bound

DIVISORS = (0.0, 0.5, 1.0)
"""Ways to share out copies, as seats go to parties: by load per copy (Adams), per next copy (Jefferson), or between (Webster)."""
GIVERS = 6
"""Experts that may give up a copy, for each expert that could take one."""
MOST_TRIED = 100
"""Moves of a copy that are tried."""
FAR = 1.005
"""Load of the fullest rank over the bound from which more is tried."""
AROUND = 3
"""Copies more and fewer that are tried for the two heaviest experts."""
REARRANGED_PLACES = 1024
"""Experts × ranks up to which CP-SAT decides copies and places at once."""


def owners(loads: Floats, redundant: int, ranks: int, divisor: float = 0.0, settled: Ints | None = None) -> Ints:
    """The expert of every copy, (E + redundant,): the next copy is of the expert with the most load per copies and `divisor`.

    With a divisor of 0 the largest copy is as small as it can be with no more copies of an expert than ranks. `settled` says how
    many copies some experts have, and 0 for the others, (E,).
    """
    settled = np.zeros(len(loads), dtype=np.int64) if settled is None else settled
    counts = np.maximum(settled, 1)
    for _ in range(len(loads) + redundant - int(counts.sum())):
        counts[int(np.argmax(np.where((counts < ranks) & (settled == 0), loads / (counts + divisor), -1.0)))] += 1
    return np.repeat(np.arange(len(loads)), counts)


def split(loads: Floats, slots: Ints) -> Floats:
    """Load of every slot: its expert's over the copies of it."""
    parts: Floats = (loads / np.maximum(np.bincount(slots, minlength=len(loads)), 1))[slots]
    return parts


def rank_loads(loads: Floats, slots: Ints, ranks: int) -> Floats:
    """Load of every rank, (ranks,); a copy takes an equal part of its expert's load."""
    parts: Floats = split(loads, slots).reshape(ranks, -1).sum(axis=1)
    return parts


def fullest_load(loads: Floats, slots: Ints, ranks: int) -> float:
    """Load of the fullest rank."""
    return float(rank_loads(loads, slots, ranks).max())


def copies_bound(loads: Floats, ranks: int, redundant: int) -> float:
    """A load that the fullest rank has at least: the mean; the largest copy when copies are as even as can be; the packing bound
    where nothing is copied.
    """
    if not redundant:
        return packing_bound(loads, ranks)
    return max(float(loads.sum()) / ranks, float(split(loads, owners(loads, redundant, ranks)).max()))


def filled(loads: Floats, unit: Ints, unit_of_rank: Ints, redundant: int, enough: float = 0.0) -> Ints:
    """Slots rank by rank: every unit's experts, and as many copies in each, packed on its own ranks.

    The unit with most per rank comes first; the others need not be better than it, nor than `enough`.
    """
    ranks, spans = len(unit_of_rank), np.bincount(unit_of_rank)
    found = np.empty((ranks, (len(loads) + redundant * len(spans)) // ranks), dtype=np.int64)
    for index in np.argsort(-np.bincount(unit, loads) / spans, kind="stable").tolist():
        mine, own = np.flatnonzero(unit == index), np.flatnonzero(unit_of_rank == index)
        slots = _copied_and_packed(loads[mine], len(own), redundant, enough)
        enough = max(enough, fullest_load(loads[mine], slots, len(own)))
        found[own] = np.sort(mine[slots].reshape(len(own), -1), axis=1)
    return found.reshape(-1)


def packed_quickly(loads: Floats, ranks: int, owner: Ints) -> tuple[Ints, float]:
    """Rank of every copy by longest processing time first and swaps, and the load of the fullest."""
    parts = split(loads, owner)
    device = improved(parts, longest_first(parts, ranks, owner), ranks, owner)
    return device, float(np.bincount(device, parts, ranks).max())


def _copied_and_packed(loads: Floats, ranks: int, redundant: int, enough: float) -> Ints:
    """Slots of one unit, whose fullest rank need not hold less than `enough`."""
    if not redundant:
        return np.argsort(pack(loads, ranks, enough=enough).device, kind="stable")
    bound = copies_bound(loads, ranks, redundant)
    near = max(enough, bound * FAR)
    shared = _best_shared(loads, ranks, redundant, max(enough, bound * (1.0 + TIGHT)), near)
    owner = np.repeat(np.arange(len(loads)), shared.counts)
    packed = pack(split(loads, owner), ranks, owner, enough, start=shared.device)
    slots = owner[np.argsort(packed.device, kind="stable")]
    return rearranged(loads, ranks, slots) if packed.fullest > near and len(loads) * ranks <= REARRANGED_PLACES else slots


def _best_shared(loads: Floats, ranks: int, redundant: int, target: float, near: float) -> Counted:
    """Copies as the best of several ways shares them out; more numbers of them where none comes `near`."""
    moved = [_with_moved_copies(loads, ranks, owners(loads, redundant, ranks, divisor), target) for divisor in DIVISORS]
    best = min(moved, key=lambda found: found.fullest)
    if best.fullest <= near:
        return best
    settled = min(_settled(loads, ranks, redundant), key=lambda owner: packed_quickly(loads, ranks, owner)[1])
    other = _with_moved_copies(loads, ranks, settled, target)
    if other.fullest <= near:
        return other
    return min((recounted(loads, ranks, start, target) for start in (best, other)), key=lambda found: found.fullest)


def _settled(loads: Floats, ranks: int, redundant: int) -> Iterator[Ints]:
    """The expert of every copy with the two heaviest copied more or less often than by load per copy, and the others by that."""
    heaviest = np.argsort(-loads, kind="stable")[:2]
    usual = np.bincount(owners(loads, redundant, ranks), minlength=len(loads))[heaviest]
    ways = [range(max(1, count - AROUND), min(ranks, count + AROUND) + 1) for count in usual.tolist()]
    for counts in product(*ways):
        settled = np.zeros(len(loads), dtype=np.int64)
        settled[heaviest] = counts
        others = len(loads) - len(counts)
        if others <= len(loads) + redundant - sum(counts) <= others * ranks:
            yield owners(loads, redundant, ranks, settled=settled)


def _with_moved_copies(loads: Floats, ranks: int, owner: Ints, target: float) -> Counted:
    """Copies and their places after one more copy for an expert of the fullest rank at the expense of one that suffers least, time
    after time, while that helps.
    """
    device, fullest = packed_quickly(loads, ranks, owner)
    tried = 0
    better = True
    while better and fullest > target:
        better = False
        for counts in _moves(loads, ranks, owner, device):
            changed = np.repeat(np.arange(len(loads)), counts)
            again = packed_quickly(loads, ranks, changed)
            tried += 1
            better = again[1] < fullest * (1.0 - 1e-9)
            if better:
                owner, (device, fullest) = changed, again
            if better or tried == MOST_TRIED:
                break
        better &= tried < MOST_TRIED
    return Counted(np.bincount(owner, minlength=len(loads)), device, fullest)


def _moves(loads: Floats, ranks: int, owner: Ints, device: Ints) -> Iterator[Ints]:
    """Copies of every expert, (E,), after a copy more for one on the fullest rank and one less for another."""
    counts = np.bincount(owner, minlength=len(loads))
    full = int(np.argmax(np.bincount(device, split(loads, owner), ranks)))
    for expert in owner[device == full].tolist():
        left = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
        left[expert] = np.inf
        for other in np.argsort(left, kind="stable")[:GIVERS].tolist():
            if counts[expert] < ranks and np.isfinite(left[other]):
                changed = counts.copy()
                changed[[expert, other]] += 1, -1
                yield changed

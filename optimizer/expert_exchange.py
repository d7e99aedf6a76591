"""Experts and copies exchanged between supernodes, so that fewer tokens cross and the fullest rank stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Bools, Floats, Ints
from .expert_copies import filled, fullest_load, rank_loads, split
from .expert_crossing import copies_across, least_across, pairs_apart, shares
from .expert_model import Site
from .expert_packing import improved, longest_first, pack

TOLERANCE = 1e-3
"""Share of the least load of the fullest rank that may be given up for fewer pairs of experts across supernodes."""
ROUNDING = 1e-9
"""Share by which a figure may differ from one that is the same."""
SLACKS = (1.0, 0.5, 0.25)
"""Shares of what the fullest rank leaves above the mean that a supernode may take up: with less it is packed more easily."""
MORE_SLACKS = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.25)
"""The same where supernodes are filled for their own sake, and packed quickly."""
NEAR_ENOUGH = 5e-3
"""Share above the least that could cross, by loads alone, at which nothing more is tried."""
MOST_SWAPS = 2000
FAR_FULLER = 1.01
"""Load of the fullest rank over the mean from which the experts of the fullest ranks stay together."""


def nearer(loads: Floats, site: Site, pairs: Floats, slots: Ints) -> Ints:
    """Slots with fewer pairs apart whose fullest rank is within TOLERANCE of the given ones', or these.

    Where each routing group lies in one supernode, groups are exchanged whole; else experts and copies are, one for one, unless a
    supernode has more copies of an expert than ranks.
    """
    limit = fullest_load(loads, slots, site.ranks) * (1.0 + TOLERANCE)
    apart = pairs_apart(pairs, slots, site.supernodes)
    for found in _candidates(loads, site, pairs, slots, limit, SLACKS, _thoroughly):
        fewer = pairs_apart(pairs, found, site.supernodes) < apart * (1.0 - ROUNDING)
        if fewer and fullest_load(loads, found, site.ranks) <= limit:
            return found
    return slots


def less_across(loads: Floats, site: Site, slots: Ints, rival: Ints) -> Ints:
    """Slots with fewest tokens across, as estimated from loads: the given ones, a rival's, or such that exchanges lead to.

    Their fullest rank is no fuller than the given ones'. Independent choices pair experts in proportion to both loads, so that
    fewer such pairs apart are supernodes that are less even.
    """
    limit = fullest_load(loads, slots, site.ranks) * (1.0 + ROUNDING)
    least, across = least_across(loads, site, limit), copies_across(loads, slots, site)
    if least is not None and across <= least * (1.0 + NEAR_ENOUGH):
        return slots
    found = [slots, rival, *_candidates(loads, site, np.outer(loads, loads), slots, limit, MORE_SLACKS, _quickly)]
    legal = [each for each in found if fullest_load(loads, each, site.ranks) <= limit]
    return min(legal, key=lambda each: copies_across(loads, each, site))


@dataclass(frozen=True)
class Items:
    """What is exchanged: loads (n,), pairs between two (n, n, symmetric), what may not move, (n,), and the expert that each is of.

    Two of different `block` are not exchanged for each other.
    """

    loads: Floats
    pairs: Floats
    tied: Bools
    owner: Ints
    block: Ints


Packing = Callable[[Floats, int, Ints, float], Ints]
"""Loads of items (n,), devices, owners (n,), and what is little enough on the fullest: the device of every item, (n,)."""


def _thoroughly(loads: Floats, devices: int, owner: Ints, enough: float) -> Ints:
    return pack(loads, devices, owner, enough).device


def _quickly(loads: Floats, devices: int, owner: Ints, _: float) -> Ints:
    return improved(loads, longest_first(loads, devices, owner), devices, owner)


def _candidates(
    loads: Floats, site: Site, pairs: Floats, slots: Ints, limit: float, slacks: tuple[float, ...], packing: Packing
) -> Iterator[Ints]:
    """Slots after exchanges, with supernodes ever less full. None where a supernode has more copies of an expert than ranks."""
    held = shares(slots, site.supernodes, len(loads)) * np.bincount(slots, minlength=len(loads))[:, None]
    if len(site.spans) == 1 or (held > site.spans + 0.5).any():
        return
    mean, spans = float(loads.sum()) / site.ranks, site.spans
    homes = np.repeat(site.supernodes, len(slots) // site.ranks)
    tied = _tied(loads, slots, site.ranks)
    whole = site.units == len(spans)
    size = len(loads) // site.groups
    items = _groups(loads, pairs, tied, slots, size) if whole else _copies(loads, pairs, tied, slots, site)
    if whole:
        homes = homes[np.unique(slots // size, return_index=True)[1]]
    tried = {homes.tobytes()}
    for slack in slacks:
        room: Floats = (mean + slack * (limit - mean)) * spans.astype(np.float64)
        moved = exchanged(items, homes, room, spans)
        if moved.tobytes() in tried:
            continue
        tried.add(moved.tobytes())
        if whole:
            yield filled(loads, np.repeat(moved, size), site.supernodes, site.redundant // site.units, limit)
        else:
            yield _packed(items, moved, site, limit, packing)


def _groups(loads: Floats, pairs: Floats, tied: Bools, slots: Ints, size: int) -> Items:
    """Routing groups of `size` experts."""
    names = np.arange(len(loads) // size)
    both = np.triu(pairs, 1).reshape(len(names), size, len(names), size).sum(axis=(1, 3))
    held = np.bincount(slots // size, tied, len(names)) > 0
    return Items(loads.reshape(-1, size).sum(axis=1), _between(both + both.T, names), held, names, np.zeros_like(names))


def _copies(loads: Floats, pairs: Floats, tied: Bools, slots: Ints, site: Site) -> Items:
    """Experts and copies, a copy with its part of its expert's pairs."""
    part = 1.0 / np.bincount(slots, minlength=len(loads))[slots]
    both = np.triu(pairs, 1)
    between = (both + both.T)[np.ix_(slots, slots)] * np.outer(part, part)
    return Items(split(loads, slots), _between(between, slots), tied, slots, np.repeat(site.unit_of_rank, len(slots) // site.ranks))


def _between(pairs: Floats, owner: Ints) -> Floats:
    """Pairs without those of an item with its own kind."""
    return np.where(owner[:, None] == owner[None, :], 0.0, pairs)


def _packed(items: Items, homes: Ints, site: Site, limit: float, packing: Packing) -> Ints:
    """Slots with every supernode's experts and copies packed on its ranks, until none holds more than the limit."""
    found = np.empty((site.ranks, len(homes) // site.ranks), dtype=np.int64)
    for index, span in enumerate(site.spans.tolist()):
        mine, own = np.flatnonzero(homes == index), np.flatnonzero(site.supernodes == index)
        device = packing(items.loads[mine], span, items.owner[mine], limit)
        found[own] = np.sort(items.owner[mine][np.argsort(device, kind="stable")].reshape(span, -1), axis=1)
    return found.reshape(-1)


def _tied(loads: Floats, slots: Ints, ranks: int) -> Bools:
    """Slots of ranks that are far fuller than the mean, (P,): they stay together, a heavy expert with the light ones beside it."""
    held = rank_loads(loads, slots, ranks)
    full = held > (held.mean() + held.max()) / 2.0 if held.max() > held.mean() * FAR_FULLER else np.zeros(ranks, dtype=bool)
    return np.repeat(full, len(slots) // ranks)


def exchanged(items: Items, homes: Ints, room: Floats, spans: Ints) -> Ints:
    """Home of every item after swaps, the best each time, that leave fewer pairs apart and no home over its room (Kernighan, Lin).

    No home takes more items of one owner than its span, which is how many ranks it has to hold them apart.
    """
    homes, loads, pairs = homes.copy(), items.loads, items.pairs
    never = items.tied[:, None] | items.tied[None, :] | (items.block[:, None] != items.block[None, :])
    given = loads[:, None] - loads[None, :]
    near = np.stack([pairs[:, homes == home].sum(axis=1) for home in range(len(room))], axis=1)
    counts = np.zeros((int(items.owner.max()) + 1, len(room)), dtype=np.int64)
    np.add.at(counts, (items.owner, homes), 1)
    for _ in range(MOST_SWAPS):
        held = np.bincount(homes, loads, len(room))
        toward = near[:, homes] - near[np.arange(len(homes)), homes][:, None]
        over = (held[homes][None, :] + given > room[homes][None, :]) & (given > 0)
        over |= counts[items.owner][:, homes] >= spans[homes][None, :]
        barred = over | over.T | never | (homes[:, None] == homes[None, :])
        gain = np.where(barred, -np.inf, toward + toward.T - 2.0 * pairs)
        first, second = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[first, second] <= 1e-9 * max(float(pairs.max()), 1e-300):
            break
        here, there = homes[first], homes[second]
        near[:, here] += pairs[:, second] - pairs[:, first]
        near[:, there] += pairs[:, first] - pairs[:, second]
        np.add.at(counts, (items.owner[[first, first, second, second]], [here, there, there, here]), [-1, 1, -1, 1])
        homes[[first, second]] = there, here
    return homes

"""What of a MoE layer's tokens crosses supernodes, and experts and copies exchanged so that less does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.layout import Bools, Floats, Ints
from .expert_copies import filled, fullest_load, rank_loads, split
from .expert_model import Site
from .expert_packing import pack
from .expert_visits import visited, visited_between

TOLERANCE = 1e-3
"""Share of the least load of the fullest rank that may be given up for fewer tokens across supernodes."""
SLACKS = (1.0, 0.5, 0.25)
"""Shares of what the fullest rank leaves above the mean that a supernode may take up: with less it is packed more easily."""
MOST_SWAPS = 2000
FAR_FULLER = 1.01
"""Load of the fullest rank over the mean from which the experts of the fullest ranks stay together."""


def pairs_apart(pairs: Floats, slots: Ints, supernodes: Ints) -> float:
    """Share of the tokens' pairs of experts that sit in different supernodes; copies are chosen evenly."""
    where, both = _shares(slots, supernodes, len(pairs)), np.triu(pairs, 1)
    return float((both * (1.0 - where @ where.T)).sum() / both.sum()) if both.sum() else 0.0


def copies_across(loads: Floats, slots: Ints, site: Site, pairs: Floats | None = None) -> float:
    """Share of a token's top_k copies that are sent to other supernodes, one to each. Tokens start evenly from all ranks.

    With `pairs` an estimate: what they leave open is taken to be as even as can be (`visited`).
    """
    if len(site.spans) == 1:
        return 0.0
    found = _visited(loads, slots, site) if pairs is None or not pairs.any() else visited(*_means(loads, slots, site, pairs))
    return _sent(found, slots, site)


def across_between(loads: Floats, slots: Ints, site: Site, pairs: Floats) -> tuple[float, float]:
    """The same at least and at most, of any tokens that have these loads and pairs."""
    if len(site.spans) == 1 or not pairs.any():
        return 0.0, 1.0
    least, most = visited_between(*_means(loads, slots, site, pairs))
    return _sent(least, slots, site), _sent(most, slots, site)


def even_across(experts: int, site: Site) -> float:
    """The share of a token's copies that crosses where experts sit in order and all are chosen evenly, each by itself."""
    return copies_across(np.ones(experts), np.arange(experts), replace(site, redundant=0))


def nearer(loads: Floats, site: Site, pairs: Floats, slots: Ints) -> Ints:
    """Slots with fewer pairs apart whose fullest rank is within TOLERANCE of the given ones', or these.

    Where each routing group lies in one supernode, groups are exchanged whole; else experts and copies are, one for one, unless a
    supernode has more copies of an expert than ranks.
    """
    held = _shares(slots, site.supernodes, len(loads)) * np.bincount(slots, minlength=len(loads))[:, None]
    if len(site.spans) == 1 or (held > site.spans + 0.5).any():
        return slots
    limit = fullest_load(loads, slots, site.ranks) * (1.0 + TOLERANCE)
    apart = pairs_apart(pairs, slots, site.supernodes)
    for found in _candidates(loads, site, pairs, slots, limit):
        fewer = pairs_apart(pairs, found, site.supernodes) < apart * (1.0 - 1e-9)
        if fewer and fullest_load(loads, found, site.ranks) <= limit:
            return found
    return slots


def _shares(slots: Ints, supernodes: Ints, experts: int) -> Floats:
    """Share of every expert's copies in every supernode, (E, S)."""
    where = np.zeros((experts, int(supernodes.max()) + 1))
    np.add.at(where, (slots, np.repeat(supernodes, len(slots) // len(supernodes))), 1.0)
    shares: Floats = where / where.sum(axis=1, keepdims=True)
    return shares


def _visited(loads: Floats, slots: Ints, site: Site) -> Floats:
    """Chance that a token has an expert in a supernode, (S,), if its choices are independent.

    A routing group is among the chosen in proportion to its load; of the experts of a chosen group, each of the token's choices
    there falls on a supernode in proportion to the load that it holds.
    """
    held = np.zeros((site.groups, len(site.spans)))
    homes = np.repeat(site.supernodes, len(slots) // site.ranks)
    np.add.at(held, (slots * site.groups // len(loads), homes), split(loads, slots))
    of_group = held.sum(axis=1)
    chosen = np.minimum(1.0, site.groups_topk * of_group / of_group.sum())
    share = held / np.maximum(of_group, 1e-300)[:, None]
    hit = chosen[:, None] * (1.0 - (1.0 - np.minimum(share, 1.0)) ** (site.top_k / site.groups_topk))
    visited: Floats = 1.0 - np.prod(1.0 - hit, axis=0)
    return visited


def _means(loads: Floats, slots: Ints, site: Site, pairs: Floats) -> tuple[Floats, Floats, int]:
    """Choices of a token in every supernode and pairs of them, (S,) each, on the mean, and how many choices it has."""
    where, both = _shares(slots, site.supernodes, len(loads)), np.triu(pairs, 1)
    choices = loads @ where / loads.sum() * site.top_k
    inside = np.einsum("es,ef,fs->s", where, both, where) / both.sum()
    return choices, inside * site.top_k * (site.top_k - 1) / 2.0, site.top_k


def _sent(found: Floats, slots: Ints, site: Site) -> float:
    """Share of a token's copies that leave, of so many chances to visit a supernode, (S,).

    A token comes to no more supernodes than hold the routing groups that are open to it.
    """
    homes = np.repeat(site.supernodes, len(slots) // site.ranks)
    groups = slots * site.groups // (int(slots.max()) + 1)
    held = np.zeros((site.groups, len(site.spans)), dtype=bool)
    held[groups, homes] = True
    opened = site.groups_topk * int(held.sum(axis=1).max())
    found = found * min(1.0, opened / max(float(found.sum()), 1e-300))
    return float((found * (1.0 - site.spans / site.ranks)).sum() / site.top_k)


# --- exchanges between supernodes --------------------------------------------------------------------------------------------


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


def _candidates(loads: Floats, site: Site, pairs: Floats, slots: Ints, limit: float) -> Iterator[Ints]:
    """Slots after exchanges, with supernodes ever less full."""
    mean, spans = float(loads.sum()) / site.ranks, site.spans
    homes = np.repeat(site.supernodes, len(slots) // site.ranks)
    tied = _tied(loads, slots, site.ranks)
    whole = site.units == len(spans)
    size = len(loads) // site.groups
    items = _groups(loads, pairs, tied, slots, size) if whole else _copies(loads, pairs, tied, slots, site)
    if whole:
        homes = homes[np.unique(slots // size, return_index=True)[1]]
    for slack in SLACKS:
        room: Floats = (mean + slack * (limit - mean)) * spans.astype(np.float64)
        moved = exchanged(items, homes, room, spans)
        if whole:
            yield filled(loads, np.repeat(moved, size), site.supernodes, site.redundant // site.units, limit)
        else:
            yield _packed(items, moved, site, limit)


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


def _packed(items: Items, homes: Ints, site: Site, limit: float) -> Ints:
    """Slots with every supernode's experts and copies packed on its ranks, until none holds more than the limit."""
    found = np.empty((site.ranks, len(homes) // site.ranks), dtype=np.int64)
    for index, span in enumerate(site.spans.tolist()):
        mine, own = np.flatnonzero(homes == index), np.flatnonzero(site.supernodes == index)
        device = pack(items.loads[mine], span, items.owner[mine], limit).device
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

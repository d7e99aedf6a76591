"""What of a MoE layer's tokens crosses supernodes: estimated from loads, or from pairs of experts, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from ..search_spaces.layout import Floats, Ints
from .expert_copies import split
from .expert_model import Site
from .expert_visits import visited, visited_between


def pairs_apart(pairs: Floats, slots: Ints, supernodes: Ints) -> float:
    """Share of the tokens' pairs of experts that sit in different supernodes; copies are chosen evenly."""
    where, both = shares(slots, supernodes, len(pairs)), np.triu(pairs, 1)
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


def least_across(loads: Floats, site: Site, fullest: float) -> float | None:
    """What copies_across finds from loads at least, wherever experts and copies go with no rank above `fullest`.

    The estimate is concave in the load that a supernode holds, so that it is least where one holds as much as it can, then the
    next (a vertex of a polymatroid, Edmonds 1970). So many ranks hold no more than `fullest` each, nor than the heaviest experts
    that have room there. None where routing groups neither come out whole on supernodes nor whole ones on them.
    """
    if site.units == 1 and site.groups > 1:
        return None
    groups = loads.reshape(site.groups, -1)
    chosen, slots = _chosen(groups.sum(axis=1), site), (len(loads) + site.redundant) // site.ranks
    if site.units == len(site.spans):
        return _least_of_groups(chosen, site)
    spans = site.spans[: len(site.spans) // site.units]
    each = [_least_of_experts(group, spans, site, fullest, slots) for group in groups]
    return float(chosen @ each)


def _least_of_groups(chosen: Floats, site: Site) -> float:
    """Of whole groups, as many in each supernode: the likely ones together, whatever their loads."""
    apart = np.sort(1.0 - chosen).reshape(site.units, -1).prod(axis=1)
    return float((1.0 - apart).sum() * (1.0 - 1.0 / site.units) / site.top_k)


def _least_of_experts(loads: Floats, spans: Ints, site: Site, fullest: float, slots: int) -> float:
    """Of the experts of one group, on supernodes of so many ranks, (S,), with so many slots each."""
    heaviest = np.append(0.0, np.cumsum(np.sort(loads)[::-1]))
    held = [min(fullest * ranks, float(heaviest[min(ranks * slots, len(loads))])) for ranks in range(int(spans.sum()) + 1)]

    def crossing(before: int, span: int) -> float:
        share = np.array((held[before + span] - held[before]) / heaviest[-1])
        return float(_hit(share, site)) * (1.0 - span / site.ranks) / site.top_k

    sizes, counts = np.unique(spans, return_counts=True)
    return _least_in_any_order(tuple(sizes.tolist()), tuple(counts.tolist()), crossing)


def _least_in_any_order(sizes: tuple[int, ...], counts: tuple[int, ...], crossing: Callable[[int, int], float]) -> float:
    """The least sum of crossing(ranks of those before, ranks of its own) over supernodes of these sizes, so many of each."""

    @cache
    def least(left: tuple[int, ...]) -> float:
        before = sum(size * (count - rest) for size, count, rest in zip(sizes, counts, left, strict=True))
        ways = [
            crossing(before, size) + least((*left[:at], left[at] - 1, *left[at + 1 :])) for at, size in enumerate(sizes) if left[at]
        ]
        return min(ways, default=0.0)

    return least(counts)


def even_across(experts: int, site: Site) -> float:
    """The share of a token's copies that crosses where experts sit in order and all are chosen evenly, each by itself."""
    return copies_across(np.ones(experts), np.arange(experts), replace(site, redundant=0))


def shares(slots: Ints, supernodes: Ints, experts: int) -> Floats:
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
    share = held / np.maximum(of_group, 1e-300)[:, None]
    hit = _chosen(of_group, site)[:, None] * _hit(share, site)
    visited: Floats = 1.0 - np.prod(1.0 - hit, axis=0)
    return visited


def _chosen(of_group: Floats, site: Site) -> Floats:
    """Chance that a token goes to a routing group, from the groups' loads, (groups,)."""
    return np.asarray(np.minimum(1.0, site.groups_topk * of_group / of_group.sum()))


def _hit(share: Floats, site: Site) -> Floats:
    """Chance that a choice in a chosen group falls on what holds such shares of the group's load."""
    return np.asarray(1.0 - (1.0 - np.minimum(share, 1.0)) ** (site.top_k / site.groups_topk))


def _means(loads: Floats, slots: Ints, site: Site, pairs: Floats) -> tuple[Floats, Floats, int]:
    """Choices of a token in every supernode and pairs of them, (S,) each, on the mean, and how many choices it has."""
    where, both = shares(slots, site.supernodes, len(loads)), np.triu(pairs, 1)
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

"""Expert placement against brute force, against an EPLB-like heuristic, and against what must hold of every placement."""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import comb

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paraplan.optimizer.expert_model import Site
from paraplan.optimizer.expert_packing import longest_first, pack, packing_bound
from paraplan.optimizer.experts import (
    TOLERANCE,
    by_longest_first,
    copies_across,
    fullest_load,
    imbalance,
    in_order,
    pairs_apart,
    place,
    placement_bound,
)
from paraplan.search_spaces.layout import Floats, Ints


def site(*spans: int, redundant: int = 0, groups: int = 1, groups_topk: int = 1, top_k: int = 8) -> Site:
    return Site(np.repeat(np.arange(len(spans)), spans), top_k, redundant, groups, groups_topk)


def skewed(seed: int, kind: str, experts: int = 256, layers: int = 1) -> Floats:
    """Token counts of experts: Zipf, lognormal, and a Zipf whose popular experts wander from layer to layer."""
    draw = np.random.default_rng(seed)
    rows = []
    order = draw.permutation(experts)
    for _ in range(layers):
        if kind == "lognormal":
            share = draw.lognormal(0.0, 0.5, experts)
        else:
            share = 1.0 / (1.0 + order) ** 0.6
            if kind == "drifting":
                moved = draw.choice(experts, experts // 4, replace=False)
                order[np.sort(moved)] = order[moved]
        rows.append(draw.poisson(1e6 * share / share.sum()).astype(float))
    return np.array(rows)


# --- oracles -----------------------------------------------------------------------------------------------------------------


def dealt(items: tuple[int, ...], ranks: int, each: int) -> list[list[tuple[int, ...]]]:
    """Every way to hand out items, `each` to a rank; ranks are told apart."""
    if ranks == 0:
        return [[]]
    found = []
    for first in combinations(items, each):
        rest = tuple(item for item in items if item not in first)
        found += [[first, *others] for others in dealt(rest, ranks - 1, each)]
    return found


def brute_force(loads: Floats, where: Site, pairs: Floats | None = None) -> tuple[float, float]:
    """The least load of the fullest rank, and the least share of pairs apart within the tolerance of it."""
    experts = len(loads)
    each = (experts + where.redundant) // where.ranks
    options = []
    for counts in product(range(1, where.ranks + 1), repeat=experts):
        if sum(counts) != experts + where.redundant:
            continue
        for slots in copies_dealt(counts, where.ranks, each):
            if keeps_groups(np.array(slots).reshape(-1), experts, where):
                load = max(sum(loads[e] / counts[e] for e in rank) for rank in slots)
                options.append((load, slots))
    least = min(load for load, _ in options)
    if pairs is None:
        return least, 0.0
    near = [np.array(slots).reshape(-1) for load, slots in options if load <= least * (1.0 + TOLERANCE)]
    return least, min(pairs_apart(pairs, slots, where.supernodes) for slots in near)


def copies_dealt(counts: tuple[int, ...], ranks: int, each: int) -> list[list[tuple[int, ...]]]:
    """Every way to hand out experts with so many copies, `each` to a rank and none twice to one."""
    if ranks == 0:
        return [[]] if not any(counts) else []
    found = []
    for first in combinations([e for e, left in enumerate(counts) if left], each):
        rest = tuple(left - (e in first) for e, left in enumerate(counts))
        if max(rest) < ranks:
            found += [[first, *others] for others in copies_dealt(rest, ranks - 1, each)]
    return found


def keeps_groups(slots: Ints, experts: int, where: Site) -> bool:
    """Whether every routing group is in one unit, the same number in each."""
    if where.units == 1:
        return True
    homes: dict[int, set[int]] = {}
    for slot, expert in enumerate(slots.tolist()):
        homes.setdefault(expert * where.groups // experts, set()).add(int(where.unit_of_rank[slot * where.ranks // len(slots)]))
    return all(len(home) == 1 for home in homes.values())


def eplb_like(loads: Floats, where: Site) -> Ints:
    """What the published load balancer of DeepSeek does, in its three greedy steps, as its documentation describes them.

    Routing groups are packed onto units; in each, the next copy goes to the expert with the most load per copy; copies are packed
    onto ranks. All packing is heaviest first, to the lightest pack with room.
    """
    size, units = len(loads) // where.groups, where.units
    unit = greedy(loads.reshape(where.groups, -1).sum(axis=1), units) if units > 1 else np.zeros(where.groups, dtype=np.int64)
    slots: list[int] = []
    for index in range(units):
        experts = [e for e in range(len(loads)) if unit[e // size] == index]
        counts = dict.fromkeys(experts, 1)
        for _ in range(where.redundant // units):
            counts[max(experts, key=lambda e: loads[e] / counts[e])] += 1
        copies = np.array([e for e in experts for _ in range(counts[e])])
        place_of = greedy(np.array([loads[e] / counts[e] for e in copies]), where.ranks // units)
        slots += copies[np.argsort(place_of, kind="stable")].tolist()
    return np.array(slots)


def greedy(loads: Floats, packs: int) -> Ints:
    room, held = [len(loads) // packs] * packs, [0.0] * packs
    place_of = np.empty(len(loads), dtype=np.int64)
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        chosen = min((p for p in range(packs) if room[p]), key=lambda p: held[p])
        place_of[item], held[chosen], room[chosen] = chosen, held[chosen] + loads[item], room[chosen] - 1
    return place_of


# --- against brute force -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", ["plain", "two", "uneven", "groups", "grouped copies", "copies"])
def test_few_experts_are_placed_as_brute_force_places_them(seed: int, shape: str) -> None:
    """Six or eight experts: the fullest rank, and with it what is apart, are the least that any way of dealing them out has."""
    draw = np.random.default_rng(seed)
    experts, where = {
        "plain": (8, site(4)),
        "two": (8, site(2, 2)),
        "uneven": (6, site(2, 1)),
        "groups": (8, site(2, 2, groups=4, groups_topk=2)),
        "grouped copies": (6, site(2, 2, groups=2, redundant=2)),
        "copies": (5, site(2, 1, redundant=1)),
    }[shape]
    loads = draw.integers(1, 1000, experts) * draw.choice([1, 1, 5], experts) * 1.0
    pairs = None if where.redundant else np.triu(draw.integers(0, 50, (experts, experts)), 1) * 1.0
    found = place(loads, where, pairs)
    least, apart = brute_force(loads, where, pairs)
    allowed = TOLERANCE if pairs is not None and len(where.spans) > 1 else 1e-6
    assert found.fullest <= least * (1.0 + allowed)
    assert found.bound == pytest.approx(least, rel=1e-6 + allowed)
    assert found.bound <= least * (1.0 + 1e-9)
    if pairs is not None:
        assert pairs_apart(pairs, found.slots, where.supernodes) == pytest.approx(apart, abs=1e-4)


def test_packing_agrees_with_listing_every_packing() -> None:
    draw = np.random.default_rng(3)
    for devices, each in ((2, 4), (3, 3), (4, 2)):
        ways = dealt(tuple(range(devices * each)), devices, each)
        for _ in range(4):
            loads = draw.lognormal(0.0, 0.8, devices * each)
            least = min(max(loads[list(rank)].sum() for rank in way) for way in ways)
            found = pack(loads, devices)
            assert found.fullest <= least * (1.0 + 1e-4)
            assert packing_bound(loads, devices) <= least * (1.0 + 1e-12)
            assert found.bound <= least * (1.0 + 1e-9)


def test_bounds_of_whole_tokens_are_whole() -> None:
    """No sum of whole numbers lies between two of them: ⌈58,828 / 8⌉ = 7,354 on the fullest of eight ranks is proven best."""
    draw = np.random.default_rng(5)
    for devices, each in ((2, 4), (3, 3), (4, 2)):
        ways = dealt(tuple(range(devices * each)), devices, each)
        for _ in range(8):
            loads = np.floor(draw.lognormal(3.0, 0.8, devices * each))
            least = min(max(loads[list(rank)].sum() for rank in way) for way in ways)
            found = packing_bound(loads, devices)
            assert found == int(found) >= loads.sum() / devices
            assert found <= least and pack(loads, devices).bound == least
    loads = np.full(64, 919.0)
    loads[:12] += 1.0
    assert loads.sum() == 58_828
    found = place(loads, Site(np.zeros(8, dtype=np.int64), 1, 0))
    assert found.fullest == 7_354
    assert found.gap == 0.0
    assert place(loads / 7.0, Site(np.zeros(8, dtype=np.int64), 1, 0)).bound < 7_354 / 7.0


def test_two_on_each_rank_are_proven() -> None:
    """Heaviest with lightest is best for two on a device; the bound says so."""
    loads = np.random.default_rng(5).uniform(1.0, 20.0, 256)
    down = np.sort(loads)[::-1]
    found = pack(loads, 128)
    assert found.fullest == pytest.approx((down + down[::-1]).max())
    assert found.bound == pytest.approx(found.fullest)


# --- what must hold of every placement ---------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(
    supernodes=st.sampled_from([1, 2, 4]),
    span=st.sampled_from([2, 3, 4]),
    each=st.integers(2, 5),
    groups_each=st.sampled_from([0, 1, 2]),
    copied=st.booleans(),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.1, 0.5, 1.5]),
)
@example(supernodes=1, span=3, each=4, groups_each=0, copied=True, seed=1, spread=1.5)
def test_every_expert_is_placed_and_counts_hold(
    supernodes: int, span: int, each: int, groups_each: int, copied: bool, seed: int, spread: float
) -> None:
    ranks, groups = supernodes * span, max(1, groups_each * supernodes)
    experts = ranks * each - (ranks if copied else 0)
    if experts % groups or experts < 6:
        return
    where = site(*[span] * supernodes, groups=groups, groups_topk=groups, redundant=ranks if copied else 0)
    loads = np.random.default_rng(seed).lognormal(0.0, spread, experts)
    found = place(loads, where)
    assert sorted(set(found.slots.tolist())) == list(range(experts))
    assert len(found.slots) == experts + where.redundant
    assert all(len(set(rank)) == len(rank) for rank in found.slots.reshape(ranks, -1).tolist())  # no two copies on one rank
    assert keeps_groups(found.slots, experts, where)
    assert found.fullest == pytest.approx(fullest_load(loads, found.slots, ranks))
    assert loads.sum() / ranks <= found.bound * (1.0 + 1e-12) <= found.fullest * (1.0 + 1e-11)
    assert 0.0 <= copies_across(loads, found.slots, where) <= 1.0


def test_copies_of_one_never_come_together_however_many_it_has() -> None:
    """Up to one on each device, in any numbers: also where light ones of the same owner come last and little room is left."""
    draw = np.random.default_rng(4)
    for _ in range(300):
        devices, each = int(draw.integers(2, 7)), int(draw.integers(1, 6))
        copies = draw.integers(1, devices + 1, devices * each)
        owner = np.repeat(np.arange(len(copies)), copies)[: devices * each]
        device = longest_first(draw.lognormal(0.0, 1.0, devices * each)[owner], devices, owner)
        assert np.bincount(device).tolist() == [each] * devices
        assert len(set(zip(device.tolist(), owner.tolist(), strict=True))) == devices * each


def test_a_placement_is_the_same_every_time() -> None:
    loads = skewed(1, "lognormal")[0]
    first, second = (place(loads, site(32, 32)) for _ in range(2))
    assert first.slots.tolist() == second.slots.tolist()


# --- 256 experts on 64 ranks -------------------------------------------------------------------------------------------------


GROUPED = {"groups": 8, "groups_topk": 4}


@pytest.mark.parametrize(
    ("kind", "where", "largest_gap"),
    [
        ("zipf", site(64), 0.001),
        ("lognormal", site(64), 0.02),
        ("drifting", site(64), 0.001),
        ("zipf", site(*[8] * 8, **GROUPED), 0.01),
        ("lognormal", site(*[8] * 8, **GROUPED), 0.01),
        ("drifting", site(*[8] * 8, **GROUPED), 0.01),
        ("lognormal", site(32, 32, **GROUPED), 0.03),
        ("lognormal", site(64, redundant=64), 0.005),
        ("drifting", site(*[8] * 8, redundant=64, **GROUPED), 0.005),
    ],
)
def test_no_heuristic_does_better(kind: str, where: Site, largest_gap: float) -> None:
    for loads in skewed(4, kind, layers=1):
        found = place(loads, where)
        rivals = {"EPLB": eplb_like(loads, where)}
        if where.units == 1:
            rivals["longest first"] = by_longest_first(loads, where)
        if not where.redundant:
            rivals["in order"] = in_order(256, 64)
        for name, slots in rivals.items():
            assert found.fullest <= fullest_load(loads, slots, 64) * (1.0 + 1e-9), name
        assert found.gap <= largest_gap
        assert found.bound == pytest.approx(min(placement_bound(loads, where), found.fullest))


PUBLISHED = {
    "loads": [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]],
    "placed": [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]],
}
"""Loads of twelve experts in two layers and where DeepSeek's EPLB puts sixteen copies on two nodes of four (its README, MIT)."""


@pytest.mark.parametrize(("layer", "least", "published"), [(0, 151.0, 156.0), (1, 179.5, 179.5)])
def test_a_published_example_and_its_published_placement(layer: int, least: float, published: float) -> None:
    """The oracle gets what EPLB prints; ours is the least there is, by listing every placement that keeps groups on a node."""
    loads, theirs = (np.array(PUBLISHED[name][layer]) for name in ("loads", "placed"))
    loads, where = loads.astype(float), site(4, 4, redundant=4, groups=4, groups_topk=2, top_k=2)
    assert fullest_load(loads, theirs, 8) == published
    assert fullest_load(loads, eplb_like(loads, where), 8) == published
    found = place(loads, where)
    assert keeps_groups(found.slots, 12, where)
    assert found.fullest == least
    assert found.bound <= least


def test_two_slots_a_rank_and_as_many_copies_as_experts() -> None:
    """Pairs leave little to packing: what counts is which experts have how many copies."""
    loads, where = skewed(11, "zipf", 128)[0], site(128, redundant=128)
    found = place(loads, where)
    assert found.fullest < 0.99 * fullest_load(loads, eplb_like(loads, where), 128)
    assert found.gap < 0.02
    assert all(len(set(rank)) == 2 for rank in found.slots.reshape(128, 2).tolist())


def test_copies_level_what_no_order_can() -> None:
    loads = skewed(2, "zipf")[0]
    assert imbalance(loads, in_order(256, 64), 64) > 2.0
    assert imbalance(loads, place(loads, site(64, redundant=64)).slots, 64) < 1.01


def test_experts_that_are_chosen_together_come_together() -> None:
    """Sixteen cliques of sixteen experts, scattered: within a thousandth of the load, most pairs come into one supernode."""
    draw = np.random.default_rng(8)
    cliques = np.kron(np.eye(16), np.ones((16, 16)))
    scattered = draw.permutation(256)
    pairs = np.triu(cliques[np.ix_(scattered, scattered)] * draw.integers(50, 100, (256, 256)) + 1.0, 1)
    loads = skewed(9, "zipf")[0]
    where = site(32, 32)
    alone, near = place(loads, where), place(loads, where, pairs)
    assert near.fullest <= alone.fullest * (1.0 + TOLERANCE)
    assert pairs_apart(pairs, near.slots, where.supernodes) < 0.75 * pairs_apart(pairs, alone.slots, where.supernodes)


# --- what crosses ------------------------------------------------------------------------------------------------------------


def test_copies_across_by_counting_tokens() -> None:
    """Routing to two of four groups, one group a supernode, two experts in each: counted over all choices of two groups."""
    where = site(1, 1, 1, 1, groups=4, groups_topk=2, top_k=4)
    sent = [1.0 for pair in combinations(range(4), 2) for source in range(4) for group in pair if group != source]
    assert copies_across(np.ones(8), np.arange(8), where) == pytest.approx(len(sent) / (comb(4, 2) * 4 * 4))


def test_pairs_apart_by_counting() -> None:
    pairs = np.triu(np.arange(16.0).reshape(4, 4), 1)
    for slots in permutations(range(4)):
        home = {expert: slot // 2 for slot, expert in enumerate(slots)}
        apart = sum(pairs[a, b] for a, b in combinations(range(4), 2) if home[a] != home[b])
        assert pairs_apart(pairs, np.array(slots), np.array([0, 1])) == pytest.approx(apart / pairs.sum())
    copied = np.array([0, 1, 0, 2])  # expert 0 on both sides: half of what it shares is apart
    three = np.array([[0.0, 4.0, 2.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    assert pairs_apart(three, copied, np.array([0, 1])) == pytest.approx((2.0 + 1.0 + 3.0) / 9.0)


def test_groups_stay_together_only_where_they_come_out_whole() -> None:
    assert site(8, 8, groups=8).units == 2
    assert site(8, 8, 8, groups=8).units == 1
    assert site(40, 24, groups=8).units == 1
    assert site(*[4] * 16, groups=8).units == 8
    assert site(8, 8, groups=8, redundant=3).units == 1
    with pytest.raises(ValueError, match="do not fill"):
        place(np.ones(9), site(2))

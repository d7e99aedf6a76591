"""Experts placed on the ranks of an EP group from measured loads: the fullest rank least, then what crosses supernodes least.

Few experts are decided by one CP-SAT model (expert_model.py). Of many, the routing groups are dealt to supernodes first, copies
given to heavy experts, and each unit filled for itself (expert_copies.py). What the greedy balancer of DeepSeek finds is kept where
nothing else is better, so that no placement is worse. Then experts are exchanged between supernodes (expert_exchange.py): such as
tokens are known to choose together come into one as long as the fullest rank stays within TOLERANCE of the least; of loads alone is
known that fewer tokens cross where supernodes are less even, as far as the fullest rank leaves them room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from ..search_spaces.layout import Bools, Floats, Ints
from .expert_copies import copies_bound, filled, fullest_load, owners, packed_quickly, split
from .expert_exchange import TOLERANCE, less_across, nearer
from .expert_model import Site, decide
from .expert_packing import in_whole, longest_first, pack

DECIDED_PLACES = 80
"""Experts × ranks × possible copies up to which one CP-SAT model decides everything."""
MOST_TRIED = 100
"""Swaps of groups that are tried before one helps."""
MOST_GROUPS_MOVED = 20


@dataclass(frozen=True)
class Placed:
    """The expert in every slot, rank by rank, (P,); loads of the fullest rank, in the unit of loads, and its proven bound."""

    slots: Ints
    fullest: float
    bound: float

    @classmethod
    def of(cls, loads: Floats, slots: Ints, site: Site, bound: float) -> Placed:
        """With the bound, or the load of the fullest rank where rounding or a richer choice brings that below it."""
        fullest = fullest_load(loads, slots, site.ranks)
        return cls(slots, fullest, min(bound, fullest))

    @property
    def gap(self) -> float:
        """How far above the bound the fullest rank is, as a share; 0 is proven best."""
        return max(0.0, self.fullest / self.bound - 1.0)


def place(loads: Floats, site: Site, pairs: Floats | None = None) -> Placed:
    """Places the experts of one layer, loads (E,); `pairs` counts tokens that two experts share, (E, E).

    Every rank gets as many slots, every expert at least one. Copies of one sit on different ranks, unless greedy balancing puts
    them together and nothing better is found. ValueError if experts and redundant copies do not divide over ranks, or there are
    more copies than ranks to hold them apart.
    """
    places = len(loads) + site.redundant
    if places % site.ranks or site.redundant > len(loads) * (site.ranks // site.units - 1):
        raise ValueError(f"{places} experts with their copies do not fill {site.ranks} ranks evenly")
    found, settled = _least_full(loads, site, pairs)
    greedy = by_balancer(loads, site)
    if fullest_load(loads, greedy, site.ranks) < found.fullest / (1.0 + TOLERANCE * settled):
        found, settled = Placed.of(loads, greedy, site, placement_bound(loads, site)), False
    if settled or len(site.spans) == 1:
        return found
    if pairs is not None:
        slots = nearer(loads, site, pairs, found.slots)
    else:
        slots = less_across(loads, site, found.slots, found.slots if copies_share_ranks(greedy, site.ranks) else greedy)
    return Placed.of(loads, slots, site, found.bound)


def _least_full(loads: Floats, site: Site, pairs: Floats | None) -> tuple[Placed, bool]:
    """A placement whose fullest rank holds least, and whether it has the fewest pairs apart already."""
    bound = placement_bound(loads, site)
    if len(loads) * site.ranks * min(1 + site.redundant, site.ranks) <= DECIDED_PLACES:
        decided = decide(loads, site, *((np.outer(loads, loads), 0.0) if pairs is None else (pairs, TOLERANCE)))
        if decided is not None:
            return Placed.of(loads, decided.slots, site, max(decided.bound, bound)), pairs is not None and not site.redundant
    unit = _dealt(loads, site)
    return Placed.of(loads, filled(loads, unit, site.unit_of_rank, site.redundant // site.units), site, bound), False


def in_order(experts: int, ranks: int) -> Ints:
    """Slots as frameworks fill them unless told otherwise: the first experts on the first rank."""
    return np.arange(experts // ranks * ranks)


def round_robin(experts: int, ranks: int) -> Ints:
    """Slots dealt in turn: expert e on rank e mod ranks."""
    return np.arange(experts // ranks * ranks).reshape(-1, ranks).T.reshape(-1)


def by_longest_first(loads: Floats, site: Site) -> Ints:
    """Slots by longest processing time first, copies given to whichever expert has the most load per copy; no regard for groups."""
    owner = owners(loads, site.redundant, site.ranks)
    device = longest_first(split(loads, owner), site.ranks, owner)
    return owner[np.argsort(device, kind="stable")]


def by_balancer(loads: Floats, site: Site) -> Ints:
    """Slots as greedy balancing fills them (DeepSeek's EPLB, as its README describes it).

    Groups go to units, heaviest first to the lightest with room; in a unit the next copy goes to the expert with the most load per
    copy, and copies go to ranks as groups to units, also two of an expert to one rank.
    """
    unit = np.repeat(longest_first(loads.reshape(site.groups, -1).sum(axis=1), site.units), len(loads) // site.groups)
    redundant = site.redundant // site.units
    found = np.empty((site.ranks, (len(loads) + site.redundant) // site.ranks), dtype=np.int64)
    for index in range(site.units):
        mine, own = np.flatnonzero(unit == index), np.flatnonzero(site.unit_of_rank == index)
        owner = owners(loads[mine], redundant, 1 + redundant)
        device = longest_first(split(loads[mine], owner), len(own))
        found[own] = mine[owner[np.argsort(device, kind="stable")]].reshape(len(own), -1)
    return found.reshape(-1)


def without_groups(loads: Floats, site: Site) -> Ints:
    """Slots as longest processing time first and swaps fill them where routing groups need not stay together."""
    owner = owners(loads, site.redundant, site.ranks)
    device, _ = packed_quickly(loads, site.ranks, owner)
    return owner[np.argsort(device, kind="stable")]


def copies_share_ranks(slots: Ints, ranks: int) -> bool:
    """Whether some rank has two copies of an expert."""
    held = np.sort(slots.reshape(ranks, -1), axis=1)
    return bool((held[:, 1:] == held[:, :-1]).any())


def imbalance(loads: Floats, slots: Ints, ranks: int) -> float:
    """Load of the fullest rank over the mean: what a workload's expert_imbalance says."""
    return fullest_load(loads, slots, ranks) * ranks / float(loads.sum())


def placement_bound(loads: Floats, site: Site) -> float:
    """A load that the fullest rank has at least, wherever experts, copies and groups go.

    That of all ranks as one unit (copies_bound); and of routing groups that are kept together, the fullest unit's mean.
    """
    least = copies_bound(loads, site.ranks, site.redundant)
    if site.units == 1:
        return least
    groups = loads.reshape(site.groups, -1).sum(axis=1)
    units = pack(groups, site.units).bound / (site.ranks // site.units)
    own = _within_units(loads, site) if site.groups == site.units else 0.0
    found = max(least, units, own)
    return found if site.redundant else in_whole(loads, found)


def _within_units(loads: Floats, site: Site) -> float:
    """The bound of the fullest unit where each holds one group."""
    ranks, redundant = site.ranks // site.units, site.redundant // site.units
    return max(copies_bound(group, ranks, redundant) for group in loads.reshape(site.groups, -1))


def _dealt(loads: Floats, site: Site) -> Ints:
    """Unit of every expert, (E,): routing groups dealt so that the fullest rank holds least; in their order where each has one."""
    groups = loads.reshape(site.groups, -1)
    if site.units == 1:
        return np.zeros(len(loads), dtype=np.int64)
    unit = np.arange(site.units)
    if site.groups > site.units:
        unit = _with_moved_groups(groups, site, pack(groups.sum(axis=1), site.units).device)
    return np.repeat(unit, groups.shape[1])


def _with_moved_groups(groups: Floats, site: Site, unit: Ints) -> Ints:
    """Unit of every group after swaps of one in the fullest unit with one elsewhere, while they help the fullest rank.

    `groups` are the loads of their experts, (groups, experts of one); every unit is packed quickly.
    """
    ranks, redundant = site.ranks // site.units, site.redundant // site.units

    def fullest(members: Bools) -> float:
        inside = groups[members].reshape(-1)
        return packed_quickly(inside, ranks, owners(inside, redundant, ranks))[1]

    held = [fullest(unit == index) for index in range(site.units)]
    for _ in range(MOST_GROUPS_MOVED):
        full = int(np.argmax(held))
        for mine, other in islice(product(np.flatnonzero(unit == full), np.flatnonzero(unit != full)), MOST_TRIED):
            swapped = unit.copy()
            swapped[[mine, other]] = unit[[other, mine]]
            after = [fullest(swapped == unit[each]) for each in (mine, other)]
            if max(after) < held[full] * (1.0 - 1e-9):
                held[unit[mine]], held[unit[other]] = after
                unit = swapped
                break
        else:
            break
    return unit


def physical_to_logical(slots: Ints) -> list[int]:
    """The expert of every physical one."""
    found: list[int] = slots.tolist()
    return found


def logical_to_physical(slots: Ints, experts: int, most: int) -> list[list[int]]:
    """The physical experts of every expert, filled up with -1 to `most`."""
    found: list[list[int]] = [np.flatnonzero(slots == expert).tolist() for expert in range(experts)]
    return [each + [-1] * (most - len(each)) for each in found]


def most_copies(layers: Sequence[Ints]) -> int:
    """The most copies that any expert has."""
    return max(int(np.bincount(slots).max()) for slots in layers)

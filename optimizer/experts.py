"""Experts placed on the ranks of an EP group from measured loads: the fullest rank least, then what crosses supernodes least.

Few experts are decided by one CP-SAT model (expert_model.py). Of many, the routing groups are dealt to supernodes first, copies
given to heavy experts, and each unit packed for itself (expert_packing.py); where tokens are known to choose experts together,
swaps between supernodes bring these together as long as the fullest rank stays within TOLERANCE of the least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import Floats, Ints
from .expert_model import Site, decide
from .expert_packing import TIGHT, improved, in_whole, longest_first, pack, packing_bound

TOLERANCE = 1e-3
"""Share of the least load of the fullest rank that may be given up for fewer tokens across supernodes."""
DECIDED_PLACES = 80
"""Experts × ranks × possible copies up to which one CP-SAT model decides everything."""
MOST_SWAPS = 2000
DIVISORS = (0.0, 0.5, 1.0)
"""Ways to share out copies, as seats go to parties: by load per copy (Adams), per next copy (Jefferson), or between (Webster)."""
GIVERS = 6
"""Experts that may give up a copy, for each expert that could take one."""
MOST_TRIED = 100
"""Moves of a copy that are tried, and swaps of groups before one helps."""
MOST_GROUPS_MOVED = 20
FAR_FULLER = 1.01
"""Load of the fullest rank over the mean from which the experts of the fullest ranks stay together."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Placed:
    """The expert in every slot, rank by rank, (P,); loads of the fullest rank, in the unit of loads, and its proven bound."""

    slots: Ints
    fullest: float
    bound: float

    @property
    def gap(self) -> float:
        """How far above the bound the fullest rank is, as a share; 0 is proven best."""
        return max(0.0, self.fullest / self.bound - 1.0)


def place(loads: Floats, site: Site, pairs: Floats | None = None) -> Placed:
    """Places the experts of one layer, loads (E,); `pairs` counts tokens that two experts share, (E, E).

    Every rank gets as many slots, every expert at least one. ValueError if experts and redundant copies do not divide over ranks,
    or there are more copies than ranks to hold them apart.
    """
    slots = len(loads) + site.redundant
    if slots % site.ranks or site.redundant > len(loads) * (site.ranks // site.units - 1):
        raise ValueError(f"{slots} experts with their copies do not fill {site.ranks} ranks evenly")
    if len(loads) * site.ranks * min(1 + site.redundant, site.ranks) <= DECIDED_PLACES:
        decided = decide(loads, site, pairs, TOLERANCE)
        if decided is not None:
            fullest = fullest_load(loads, decided.slots, site.ranks)
            return Placed(decided.slots, fullest, min(max(decided.bound, placement_bound(loads, site)), fullest))
    found = _placed(loads, site, _dealt(loads, site))
    nearer = None if pairs is None else _nearer(loads, site, pairs, found)
    best = nearer or found
    return replace(best, bound=min(found.bound, best.fullest))


def in_order(experts: int, ranks: int) -> Ints:
    """Slots as frameworks fill them unless told otherwise: the first experts on the first rank."""
    return np.arange(experts // ranks * ranks)


def by_longest_first(loads: Floats, site: Site) -> Ints:
    """Slots by longest processing time first, copies given to whichever expert has the most load per copy."""
    owner = _owners(loads, site.redundant, site.ranks)
    device = longest_first(_split(loads, owner), site.ranks, owner)
    return owner[np.argsort(device, kind="stable")]


def rank_loads(loads: Floats, slots: Ints, ranks: int) -> Floats:
    """Load of every rank, (ranks,); a copy takes an equal part of its expert's load."""
    parts: Floats = _split(loads, slots).reshape(ranks, -1).sum(axis=1)
    return parts


def fullest_load(loads: Floats, slots: Ints, ranks: int) -> float:
    """Load of the fullest rank."""
    return float(rank_loads(loads, slots, ranks).max())


def imbalance(loads: Floats, slots: Ints, ranks: int) -> float:
    """Load of the fullest rank over the mean: what a workload's expert_imbalance says."""
    return fullest_load(loads, slots, ranks) * ranks / float(loads.sum())


def placement_bound(loads: Floats, site: Site) -> float:
    """A load that the fullest rank has at least, wherever experts, copies and groups go.

    The mean; the largest copy when heavy experts are copied as evenly as can be; the packing bound where nothing is copied; and of
    routing groups that are kept together, the fullest unit's mean.
    """
    if not site.redundant:
        least = packing_bound(loads, site.ranks)
    else:
        least = max(float(loads.sum()) / site.ranks, float(_split(loads, _owners(loads, site.redundant, site.ranks)).max()))
    if site.units == 1:
        return least
    groups = loads.reshape(site.groups, -1).sum(axis=1)
    units = pack(groups, site.units).bound / (site.ranks // site.units)
    own = _within_units(loads, site) if site.groups == site.units else 0.0
    found = max(least, units, own)
    return found if site.redundant else in_whole(loads, found)


def pairs_apart(pairs: Floats, slots: Ints, supernodes: Ints) -> float:
    """Share of the tokens' pairs of experts that sit in different supernodes; copies are chosen evenly."""
    where = np.zeros((len(pairs), int(supernodes.max()) + 1))
    np.add.at(where, (slots, np.repeat(supernodes, len(slots) // len(supernodes))), 1.0)
    where /= where.sum(axis=1, keepdims=True)
    both = np.triu(pairs, 1)
    return float((both * (1.0 - where @ where.T)).sum() / both.sum()) if both.sum() else 0.0


def copies_across(loads: Floats, slots: Ints, site: Site) -> float:
    """Share of a token's top_k copies that are sent to other supernodes, one to each, if its choices are independent.

    A routing group is among the chosen in proportion to its load; of the experts of a chosen group, each of the token's choices
    there falls on a supernode in proportion to the load that it holds. Tokens start evenly from all ranks.
    """
    spans = site.spans
    if len(spans) == 1:
        return 0.0
    held = np.zeros((site.groups, len(spans)))
    homes = np.repeat(site.supernodes, len(slots) // site.ranks)
    np.add.at(held, (slots * site.groups // len(loads), homes), _split(loads, slots))
    of_group = held.sum(axis=1)
    chosen = np.minimum(1.0, site.groups_topk * of_group / of_group.sum())
    share = held / np.maximum(of_group, 1e-300)[:, None]
    hit = chosen[:, None] * (1.0 - (1.0 - np.minimum(share, 1.0)) ** (site.top_k / site.groups_topk))
    visited = 1.0 - np.prod(1.0 - hit, axis=0)
    return float((visited * (1.0 - spans / site.ranks)).sum() / site.top_k)


# --- how many experts are placed ---------------------------------------------------------------------------------------------


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
        return _packed_quickly(inside, ranks, _owners(inside, redundant, ranks))[1]

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


def _placed(loads: Floats, site: Site, unit: Ints) -> Placed:
    """The slots when every expert's unit is given."""
    slots = _filled(loads, unit, site.unit_of_rank, site.redundant // site.units)
    fullest = fullest_load(loads, slots, site.ranks)
    return Placed(slots, fullest, min(placement_bound(loads, site), fullest))


def _filled(loads: Floats, unit: Ints, unit_of_rank: Ints, redundant: int, enough: float = 0.0) -> Ints:
    """Slots rank by rank: every unit's experts, and as many copies in each, packed on its own ranks.

    The unit with most per rank comes first; the others need not be better than it, nor than `enough`.
    """
    ranks, spans = len(unit_of_rank), np.bincount(unit_of_rank)
    found = np.empty((ranks, (len(loads) + redundant * len(spans)) // ranks), dtype=np.int64)
    for index in np.argsort(-np.bincount(unit, loads) / spans, kind="stable").tolist():
        mine, own = np.flatnonzero(unit == index), np.flatnonzero(unit_of_rank == index)
        slots, fullest = _copied_and_packed(loads[mine], len(own), redundant, enough)
        enough = max(enough, fullest)
        found[own] = np.sort(mine[slots].reshape(len(own), -1), axis=1)
    return found.reshape(-1)


def _copied_and_packed(loads: Floats, ranks: int, redundant: int, enough: float) -> tuple[Ints, float]:
    """Slots of one unit and the load of its fullest rank; copies are shared out in several ways, then moved while that helps."""
    bound = placement_bound(loads, Site(np.zeros(ranks, dtype=np.int64), 1, redundant))
    target = max(enough, bound * (1.0 + TIGHT))
    owner = _owners(loads, redundant, ranks)
    if redundant:
        shares = [_owners(loads, redundant, ranks, divisor) for divisor in DIVISORS]
        moved = [_with_moved_copies(loads, ranks, share, target) for share in shares]
        owner = min(moved, key=lambda found: found[1])[0]
    packed = pack(_split(loads, owner), ranks, owner, enough)
    return owner[np.argsort(packed.device, kind="stable")], packed.fullest


def _with_moved_copies(loads: Floats, ranks: int, owner: Ints, target: float) -> tuple[Ints, float]:
    """The expert of every copy, and the load of the fullest rank, after one more copy for an expert of the fullest rank at the
    expense of one that suffers least, time after time, while that helps.
    """
    device, fullest = _packed_quickly(loads, ranks, owner)
    tried = 0
    better = True
    while better and fullest > target:
        better = False
        for counts in _moves(loads, ranks, owner, device):
            changed = np.repeat(np.arange(len(loads)), counts)
            again = _packed_quickly(loads, ranks, changed)
            tried += 1
            better = again[1] < fullest * (1.0 - 1e-9)
            if better:
                owner, (device, fullest) = changed, again
            if better or tried == MOST_TRIED:
                break
        better &= tried < MOST_TRIED
    return owner, fullest


def _moves(loads: Floats, ranks: int, owner: Ints, device: Ints) -> Iterator[Ints]:
    """Copies of every expert, (E,), after a copy more for one on the fullest rank and one less for another."""
    counts = np.bincount(owner, minlength=len(loads))
    full = int(np.argmax(np.bincount(device, _split(loads, owner), ranks)))
    for expert in owner[device == full].tolist():
        left = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
        left[expert] = np.inf
        for other in np.argsort(left, kind="stable")[:GIVERS].tolist():
            if counts[expert] < ranks and np.isfinite(left[other]):
                changed = counts.copy()
                changed[[expert, other]] += 1, -1
                yield changed


def _packed_quickly(loads: Floats, ranks: int, owner: Ints) -> tuple[Ints, float]:
    parts = _split(loads, owner)
    device = improved(parts, longest_first(parts, ranks, owner), ranks, owner)
    return device, float(np.bincount(device, parts, ranks).max())


def _within_units(loads: Floats, site: Site) -> float:
    """The bound of the fullest unit where each holds one group."""
    inside = replace(
        site, supernodes=np.zeros(site.ranks // site.units, dtype=np.int64), redundant=site.redundant // site.units, groups=1
    )
    return max(placement_bound(group, inside) for group in loads.reshape(site.groups, -1))


def _owners(loads: Floats, redundant: int, ranks: int, divisor: float = 0.0) -> Ints:
    """The expert of every copy, (E + redundant,): the next copy is of the expert with the most load per copies and `divisor`.

    With a divisor of 0 the largest copy is as small as it can be with no more copies of an expert than ranks.
    """
    counts = np.ones(len(loads), dtype=np.int64)
    for _ in range(redundant):
        counts[int(np.argmax(np.where(counts < ranks, loads / (counts + divisor), -1.0)))] += 1
    return np.repeat(np.arange(len(loads)), counts)


def _split(loads: Floats, slots: Ints) -> Floats:
    """Load of every slot: its expert's over the copies of it."""
    parts: Floats = (loads / np.maximum(np.bincount(slots, minlength=len(loads)), 1))[slots]
    return parts


# --- what crosses supernodes -------------------------------------------------------------------------------------------------


def _nearer(loads: Floats, site: Site, pairs: Floats, found: Placed) -> Placed | None:
    """A placement with fewer pairs apart whose fullest rank is within TOLERANCE of the found one's, or None.

    Without copies and routing groups to keep, experts are exchanged between supernodes; groups that share one are exchanged whole.
    """
    spans = site.spans
    whole = site.units > 1
    if len(spans) == 1 or site.redundant or (whole and site.units < len(spans)):
        return None
    homes = np.empty(len(loads), dtype=np.int64)
    homes[found.slots] = np.repeat(site.supernodes, len(found.slots) // site.ranks)
    limit = found.fullest * (1.0 + TOLERANCE)
    size = len(loads) // site.groups if whole else 1
    items = loads.reshape(-1, size).sum(axis=1)
    between = pairs.reshape(len(items), size, len(items), size).sum(axis=(1, 3))
    apart = pairs_apart(pairs, found.slots, site.supernodes)
    tied: Bools = np.any(_tied(loads, found.slots, site.ranks).reshape(-1, size), axis=1, keepdims=False)
    for slack in (1.0, 0.5, 0.25):
        mean = float(loads.sum()) / site.ranks
        room = (mean + slack * (limit - mean)) * spans.astype(np.float64)
        unit = np.repeat(exchanged(items, between, homes[::size], room, tied), size)
        slots = _filled(loads, unit, site.supernodes, 0, limit)
        fullest = fullest_load(loads, slots, site.ranks)
        if fullest <= limit and pairs_apart(pairs, slots, site.supernodes) < apart * (1.0 - 1e-9):
            return Placed(slots, fullest, found.bound)
    return None


def _tied(loads: Floats, slots: Ints, ranks: int) -> Bools:
    """Experts of ranks that are far fuller than the mean, (E,): they stay together, a heavy one with the light ones beside it."""
    held = rank_loads(loads, slots, ranks)
    full = held > (held.mean() + held.max()) / 2.0 if held.max() > held.mean() * FAR_FULLER else np.zeros(ranks, dtype=bool)
    return np.isin(np.arange(len(loads)), slots.reshape(ranks, -1)[full])


def exchanged(loads: Floats, pairs: Floats, homes: Ints, room: Floats, tied: Bools) -> Ints:
    """Home of every item after swaps, the best each time, that leave fewer pairs apart and no home over its room (Kernighan, Lin).

    Items that are `tied` stay where they are.
    """
    homes = homes.copy()
    pairs = (pairs + pairs.T) * (1.0 - np.eye(len(pairs)))
    for _ in range(MOST_SWAPS):
        held = np.bincount(homes, loads, len(room))
        near = np.stack([pairs[:, homes == home].sum(axis=1) for home in range(len(room))], axis=1)
        own = near[np.arange(len(homes)), homes]
        gain = near[:, homes] - own[:, None] + near[:, homes].T - own[None, :] - 2.0 * pairs
        given = loads[:, None] - loads[None, :]
        over = (held[homes][None, :] + given > room[homes][None, :]) & (given > 0)
        gain = np.where(over | over.T | tied[:, None] | tied[None, :] | (homes[:, None] == homes[None, :]), -np.inf, gain)
        first, second = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[first, second] <= 1e-9 * max(float(pairs.max()), 1e-300):
            break
        homes[[first, second]] = homes[[second, first]]
    return homes


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

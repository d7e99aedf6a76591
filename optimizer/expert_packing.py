"""Items with loads packed onto devices, so many to each, such that the fullest holds least: heuristics, bounds, and CP-SAT.

Longest processing time first (Graham 1969, with a limit on how many a device takes) starts; swaps between the fullest device and
any other, and every way of dividing what both hold, go on; then CP-SAT packs the fullest device anew with some others until the
bound is met or several tries bring nothing. A small packing CP-SAT solves whole, and proves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from ortools.sat.python import cp_model

from ..search_spaces.layout import Floats, Ints
from .solving import deterministic_solver

TIGHT = 1e-4
"""Gap to the bound below which nothing more is tried."""
ROUNDED = 1e-12
"""Share of a bound that its own arithmetic may have added."""
WHOLE_PLACES = 160
"""Items × devices up to which CP-SAT packs everything at once."""
PART_ITEMS = (16, 24)
"""Items that CP-SAT packs anew at a time, and after some parts without gain."""
FRUITLESS = (8, 12)
"""Parts in a row without gain after which they become larger, and after which packing ends."""
MOST_PARTS = 60
MOST_MOVES = 4000
DIVIDED = 6
"""Items on a device up to which all divisions of two devices' items are looked at."""
WHOLE_LIMIT, PART_LIMIT = 1.0, 0.05
"""CP-SAT's deterministic seconds for a whole packing and for a part."""
STILL = 1.0 - 1e-9
"""A change helps where it leaves less than this share."""
UNITS = 1_000_000_000
"""Whole units that all loads together are counted in."""


@dataclass(frozen=True)
class Packed:
    """`device` of every item, (n,); the load of the fullest, and a proven bound below which none can come."""

    device: Ints
    fullest: float
    bound: float


def pack(loads: Floats, devices: int, owner: Ints | None = None, enough: float = 0.0, start: Ints | None = None) -> Packed:
    """Packs n items onto devices, n/devices on each. Items of one `owner`, copies of an expert, go to different devices.

    From a `start`, the device of every item, or longest processing time first. Nothing more is tried once the fullest device holds
    no more than `enough`. Raises ValueError if n is not a multiple of devices.
    """
    if len(loads) % devices:
        raise ValueError(f"{len(loads)} items do not divide evenly over {devices} devices")
    owner = np.arange(len(loads)) if owner is None else owner
    bound = packing_bound(loads, devices)
    device = improved(loads, longest_first(loads, devices, owner) if start is None else start, devices, owner)
    target = max(bound * (1.0 + TIGHT), enough)
    if _fullest(loads, device, devices) <= target:
        return Packed(device, _fullest(loads, device, devices), bound)
    if len(loads) * devices <= WHOLE_PLACES:
        device, proven = _solved(loads, device, devices, owner, WHOLE_LIMIT)
        fullest = _fullest(loads, device, devices)
        return Packed(device, fullest, min(max(bound, in_whole(loads, proven)), fullest))
    device = _by_parts(loads, device, devices, owner, target, np.random.default_rng(0))
    return Packed(device, _fullest(loads, device, devices), bound)


def longest_first(loads: Floats, devices: int, owner: Ints | None = None) -> Ints:
    """Device of every item, (n,): heaviest first to the lightest device that has room, and none of the item's owner.

    An owner has at most one item for each device. Where all devices with room have one of it, an item from elsewhere makes way.
    """
    owner = np.arange(len(loads)) if owner is None else owner
    order, each = np.argsort(-loads, kind="stable"), len(loads) // devices
    device = np.empty(len(loads), dtype=np.int64)
    for count, item in enumerate(order.tolist()):
        placed = order[:count]
        at = device[placed]
        free = np.where(np.bincount(at, minlength=devices) < each, np.bincount(at, loads[placed], devices), np.inf)
        apart = free.copy()
        apart[at[owner[placed] == owner[item]]] = np.inf
        place = int(np.argmin(apart))
        if np.isinf(apart[place]):
            spare = int(np.argmin(free))
            moved = _making_way(placed, at, owner, int(owner[item]), spare)
            place, device[moved] = int(device[moved]), spare
        device[item] = place
    return device


def _making_way(placed: Ints, at: Ints, owner: Ints, name: int, spare: int) -> int:
    """The last of the placed items that may go to the spare device from one without an item of the named owner.

    There is one: such a device is full, of different owners, and the spare one has room, so that it lacks one of them.
    """
    owners = owner[placed]
    able = ~np.isin(at, at[owners == name]) & ~np.isin(owners, owners[at == spare])
    return int(placed[able][-1])


def improved(loads: Floats, device: Ints, devices: int, owner: Ints) -> Ints:
    """The packing after the best change of the fullest device and one other, time after time, while any helps."""
    device = device.copy()
    splits = _splits(len(loads) // devices) if devices > 1 and len(loads) // devices <= DIVIDED else None
    for _ in range(MOST_MOVES):
        held: Floats = np.bincount(device, loads, devices).astype(np.float64)
        moved = _swap(loads, device, held, owner) or (None if splits is None else _division(loads, device, held, owner, splits))
        if moved is None:
            break
        device[moved[0]] = moved[1]
    return device


Move = tuple[Ints, Ints]
"""Items, and the device that each goes to."""


def _swap(loads: Floats, device: Ints, held: Floats, owner: Ints) -> Move | None:
    """The swap of an item of the fullest device with one of another after which the fuller of both holds least."""
    full = int(np.argmax(held))
    mine, others = np.flatnonzero(device == full), np.flatnonzero(device != full)
    if not len(others):
        return None
    given = loads[mine][:, None] - loads[others][None, :]
    after = np.maximum(held[full] - given, held[device[others]][None, :] + given)
    owners = np.zeros((len(held), int(owner.max()) + 1), dtype=bool)
    owners[device, owner] = True
    twice = owners[device[others]][:, owner[mine]].T | owners[full][owner[others]][None, :]
    after = np.where(twice & (owner[mine][:, None] != owner[others][None, :]), np.inf, after)
    if after.min() >= held[full] * STILL:
        return None
    at = np.unravel_index(int(np.argmin(after)), after.shape)
    first, second = int(mine[at[0]]), int(others[at[1]])
    return np.array([first, second]), np.array([device[second], full])


def _division(loads: Floats, device: Ints, held: Floats, owner: Ints, splits: Ints) -> Move | None:
    """The division of the items of the fullest device and another after which the fuller of both holds least."""
    full = int(np.argmax(held))
    items = np.argsort(device, kind="stable").reshape(len(held), -1)
    others = np.delete(np.arange(len(held)), full)
    both = np.concatenate([np.broadcast_to(items[full], items[others].shape), items[others]], axis=1)
    first = loads[both] @ splits.T
    after = np.maximum(first, loads[both].sum(axis=1, keepdims=True) - first)
    each = splits.shape[1] // 2
    alike = owner[both][:, :each, None] == owner[both][:, None, each:]  # copies of one expert must not come together
    beside = splits[:, :each, None] == splits[:, None, each:]
    twice = alike.reshape(len(both), -1).astype(np.int64) @ beside.reshape(len(splits), -1).T.astype(np.int64) > 0
    after = np.where(twice, np.inf, after)
    if not after.size or after.min() >= held[full] * STILL:
        return None
    other, split = np.unravel_index(int(np.argmin(after)), after.shape)
    return both[other], np.where(splits[split] == 1, full, others[other])


def _splits(each: int) -> Ints:
    """Every way to divide 2·each items into halves, the first item in the first: 0 and 1, (ways, 2·each)."""
    chosen = list(combinations(range(1, 2 * each), each - 1))
    found = np.zeros((len(chosen), 2 * each), dtype=np.int64)
    found[:, 0] = 1
    for row, members in enumerate(chosen):
        found[row, list(members)] = 1
    return found


def packing_bound(loads: Floats, devices: int) -> float:
    """A load that the fullest device has at least, whoever packs.

    The i heaviest items sit on some number u of devices, which hold them and at least the lightest that fill them up: the mean
    over those devices, at the best u (u = D for all items: the mean; i = 1: the heaviest item). Of the j·D+1 heaviest, some device
    has j+1 (pigeonhole; j = 1 is the pair bound). With two on each device, one of the i heaviest has a partner no lighter than the
    i-th lightest.
    """
    each, n = len(loads) // devices, len(loads)
    down = np.sort(loads)[::-1]
    heaviest, lightest = np.concatenate([[0.0], np.cumsum(down)]), np.concatenate([[0.0], np.cumsum(down[::-1])])
    i, u = np.arange(1, n + 1)[:, None], np.arange(1, devices + 1)[None, :]
    together = (heaviest[i] + lightest[np.clip(u * each - i, 0, n)]) / u
    spread = np.where((u * each >= i) & (u <= i), together, np.inf).min(axis=1).max()
    crowds = [down[j * devices - j : j * devices + 1].sum() + lightest[each - j - 1] for j in range(each)]
    pairs = (down + down[::-1]).max() if each == 2 else 0.0
    return in_whole(loads, float(max(spread, pairs, *crowds)))


def in_whole(loads: Floats, bound: float) -> float:
    """A bound of a sum of loads, rounded up where these are whole numbers: so is then every sum of them."""
    return float(np.ceil(bound * (1.0 - ROUNDED))) if (loads == np.rint(loads)).all() else bound


def _fullest(loads: Floats, device: Ints, devices: int) -> float:
    return float(np.bincount(device, loads, devices).max())


def _by_parts(loads: Floats, device: Ints, devices: int, owner: Ints, target: float, draw: np.random.Generator) -> Ints:
    """Packs the fullest device anew part by part: with the lightest devices, with those of the lightest items, with any."""
    each = len(loads) // devices
    fruitless = 0
    for _ in range(MOST_PARTS):
        held = np.bincount(device, loads, devices)
        order = np.argsort(held, kind="stable")
        if held[order[-1]] <= target or fruitless == FRUITLESS[1]:
            break
        size = min(devices, max(2, PART_ITEMS[fruitless >= FRUITLESS[0]] // each))
        part = np.sort(np.append(_partners(loads, device, order, fruitless, draw)[: size - 1], order[-1]))
        items = np.flatnonzero(np.isin(device, part))
        again, _ = _solved(loads[items], np.searchsorted(part, device[items]), len(part), owner[items], PART_LIMIT)
        before = held[order[-1]]
        device = device.copy()
        device[items] = part[again]
        device = improved(loads, device, devices, owner)
        fruitless = fruitless + 1 if _fullest(loads, device, devices) >= before * (1.0 - 1e-9) else 0
    return device


def _partners(loads: Floats, device: Ints, order: Ints, fruitless: int, draw: np.random.Generator) -> Ints:
    """Other devices, those first that are to be packed anew with the fullest; `order` has devices from the lightest on."""
    others = order[:-1]
    if not fruitless:
        return others
    if fruitless % 2:
        light = device[np.argsort(loads, kind="stable")]
        first = light[np.sort(np.unique(light, return_index=True)[1])]
        near = first[first != order[-1]]
        return draw.permutation(near[: max(2, len(near) // 4)])
    return draw.permutation(others)


def _solved(loads: Floats, device: Ints, devices: int, owner: Ints, limit: float) -> tuple[Ints, float]:
    """The best packing that CP-SAT finds from a given one, never worse, and the bound that it proves (in the unit of loads).

    Devices are alike: the i-th heaviest item takes one of the first i+1.
    """
    unit = float(loads.sum()) / UNITS
    whole = np.rint(loads / unit).astype(np.int64)
    order = np.argsort(-loads, kind="stable")
    names: dict[int, int] = {}
    hint = np.array([names.setdefault(int(device[item]), len(names)) for item in order])
    model = cp_model.CpModel()
    takes = [[model.new_bool_var("") for _ in range(devices)] for _ in order]
    fullest = model.new_int_var(int(np.ceil(packing_bound(loads, devices) / unit)) - len(loads), UNITS, "")
    for place, row in enumerate(takes):
        model.add_exactly_one(row)
        for index, taken in enumerate(row):
            model.add_hint(taken, bool(hint[place] == index))
            if index > place:
                model.add(taken == 0)
    for index in range(devices):
        column = [row[index] for row in takes]
        model.add(sum(column) == len(loads) // devices)
        model.add(cp_model.LinearExpr.weighted_sum(column, whole[order].tolist()) <= fullest)
        for copies in _copies(owner[order]):
            model.add_at_most_one(column[place] for place in copies)
    model.minimize(fullest)
    solver = deterministic_solver(limit)
    solver.parameters.relative_gap_limit = TIGHT / 10
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return device, 0.0
    found = np.empty(len(loads), dtype=np.int64)
    found[order] = [next(index for index, taken in enumerate(row) if solver.boolean_value(taken)) for row in takes]
    better = _fullest(loads, found, devices) < _fullest(loads, device, devices)
    return (found if better else device), (solver.best_objective_bound - len(loads)) * unit


def _copies(owner: Ints) -> list[list[int]]:
    """Items of every owner that has several."""
    return [np.flatnonzero(owner == name).tolist() for name in np.unique(owner) if (owner == name).sum() > 1]

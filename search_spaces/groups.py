"""Where the ranks of each dimension sit: size, stride and phase of its groups against the units of every network level.

A group's ranks are stride apart. Against a level whose units hold U devices, what the slowest collective needs to know is how many
units the worst-placed group touches and how few of its ranks the emptiest of those holds; what all of them send together follows
from the means. A product of extents is the special case in which everything divides; 72, 384 or TP 16 over servers of 24 are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from .layout import FLAG_RANK_ORDERS, RANK_ORDERS, Bools, Floats, Ints, LayoutTable
from .row_keys import row_keys

DIMENSIONS = ("tp", "cp", "pp", "dp", "ep", "etp", "edp")
DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
EXPERT = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}
"""Dimensions of the two grids, and what rank orders call them."""
INNERMOST = len(RANK_ORDERS)
"""In place of an order's code: every dimension is the fastest, which no order gives more than one. For bounds."""
PRECEDES = {
    (first, second): np.array([*(order.index(first) < order.index(second) for order in RANK_ORDERS), False])
    for first, second in permutations(("tp", "cp", "ep", "dp", "pp"), 2)
}
"""By pair of names and code of an order: whether the first varies faster than the second, (orders + 1,)."""
INNER_PAIRS = [pair for pair in PRECEDES if pair[1] in ("tp", "cp", "ep") and pair not in (("cp", "ep"), ("ep", "cp"))]
"""What decides on the strides of tp, cp and ep groups: the grids have one of cp and ep each."""
Sizes = tuple[int, ...]
REMEMBERED = 1 << 16
"""Placements that are kept: more than any table has of groups that do not tile their units."""


@dataclass(frozen=True)
class Placement:
    """How the groups of many layouts lie on the units of one level, mean over all groups of a job, (n,) each.

    `units` that a group touches; `mates` of its group, itself included, that a rank finds in its own unit; `straddling`: the share
    of groups that touch more than one unit.
    """

    units: Floats
    mates: Floats
    straddling: Floats


@dataclass(frozen=True)
class Groups:
    """The groups of one dimension over many layouts: `size` ranks, `stride` apart; both (n,).

    They tile the ranks in blocks of stride·size, `stride` groups a block, one rank after the other.
    """

    size: Ints
    stride: Ints

    def units(self, unit_size: int, devices: int, around: Sizes = ()) -> Floats:
        """Units of `unit_size` that the worst-placed group of a job of `devices` touches, (n,).

        A group that starts at place φ of a unit and is stride·(size−1) long ends in the ⌊(φ + length) / U⌋th unit after it.
        `around` are the units in which these lie, innermost first, where they do not tile them: then groups are counted.
        """
        if around:
            return self._as_counted((unit_size, *around), devices)[0]
        latest = self._phases(unit_size, devices)[0]
        touched = (latest + self.stride * (self.size - 1)) // unit_size + 1
        touched = np.where(self.stride >= unit_size, self.size, touched)
        return np.minimum(np.minimum(self.size, touched), -(-devices // unit_size)).astype(np.float64)

    def least(self, unit_size: int, devices: int, around: Sizes = ()) -> Floats:
        """Ranks that the emptiest unit of `unit_size` holds of a group that touches it, (n,).

        A group that leaves its first unit has ⌈(U − φ) / stride⌉ ranks there, fewest where it starts latest; likewise at its end.
        """
        if around:
            return self._as_counted((unit_size, *around), devices)[1]
        latest, earliest = self._phases(unit_size, devices)
        first = -(-(unit_size - latest) // self.stride)
        last = earliest // self.stride + 1
        whole = np.where(self.units(unit_size, devices) > 1, np.minimum(first, last), self.size)
        return np.where(self.stride >= unit_size, 1, np.minimum(whole, self.size)).astype(np.float64)

    def placement(self, unit_size: int, devices: Ints, around: Sizes = ()) -> Placement:
        """The means over all groups of jobs of `devices` (n,)."""
        if around:
            return Placement(*self._as_counted((unit_size, *around), devices)[2:])
        block = self.stride * self.size
        apart = self.stride >= unit_size
        within = (unit_size % block == 0) | (devices <= unit_size)
        each = np.where(apart, 1.0, np.where(within, self.size, unit_size / self.stride))
        units, straddling = self.size / each, np.where(each < self.size, 1.0, 0.0)
        ragged = ~apart & ~within & ((unit_size % self.stride > 0) | (block % unit_size > 0))
        for row in np.flatnonzero(ragged):
            found = _counted(int(self.size[row]), int(self.stride[row]), (unit_size,), int(devices[row]))
            units[row], each[row], straddling[row] = found[2:]
        return Placement(units, each, straddling)

    def _as_counted(self, units: Sizes, devices: int | Ints) -> tuple[Floats, ...]:
        """What `_counted` says of the groups of every row, five columns (n,)."""
        rows = np.stack(np.broadcast_arrays(self.size, self.stride, devices), axis=1)
        distinct, place = np.unique(rows, axis=0, return_inverse=True)
        found = [_counted(size, stride, units, ranks) for size, stride, ranks in distinct.tolist()]
        return tuple(np.array(found, dtype=np.float64).reshape(-1, 5)[place.reshape(-1)].T)

    def _phases(self, unit_size: int, devices: int) -> tuple[Ints, Ints]:
        """Latest place in a unit where a group starts, and the earliest where one that did not start there ends, (n,) each.

        Blocks start at multiples of gcd(stride·size, U), at all of them if there are enough blocks.
        """
        block = self.stride * self.size
        step = np.gcd(block, unit_size)
        latest, earliest = unit_size - step, step.copy()
        few: Bools = (unit_size % block > 0) & (devices // np.maximum(block, 1) < unit_size // step)
        for row in np.flatnonzero(few):
            latest[row], earliest[row] = _residues(int(block[row]), unit_size, devices // int(block[row]))
        return np.minimum(latest + self.stride - 1, unit_size - 1), np.maximum(earliest - self.stride, 0)


@lru_cache(maxsize=REMEMBERED)
def _residues(block: int, unit: int, blocks: int) -> tuple[int, int]:
    """The largest place in a unit at which one of the first `blocks` blocks starts, and the smallest above 0 at which one ends."""
    edges = np.arange(max(blocks, 1) + 1) * block % unit
    ends = edges[1:][edges[1:] > 0]
    return int(edges[:-1].max()), int(ends.min()) if len(ends) else unit


@lru_cache(maxsize=REMEMBERED)
def _counted(size: int, stride: int, units: Sizes, devices: int) -> tuple[float, float, float, float, float]:
    """Units that the worst group touches and ranks in its emptiest one; units and mates on the mean, and the share that straddles.

    Counted rank by rank over one period of groups and units (`unit_of`).
    """
    block = size * stride
    devices = max(devices // block, 1) * block
    period = math.lcm(block, *units)
    ranks = np.arange(period if devices % period == 0 else devices)
    group, position = ranks // block * stride + ranks % stride, ranks % block // stride
    order = np.argsort(group * size + position)
    group, where = group[order], unit_of(ranks, units)[order]
    first = np.flatnonzero(np.concatenate([[True], (group[1:] != group[:-1]) | (where[1:] != where[:-1])]))
    held = np.diff(first, append=len(ranks))
    groups, touched = len(ranks) / size, np.bincount(group[first])
    mates, straddling = float((held * held).sum()) / len(ranks), float((touched > 1).sum()) / groups
    return float(touched.max()), float(held.min()), len(first) / groups, mates, straddling


def unit_of(ranks: Ints, units: Sizes) -> Ints:
    """Which unit of the first size every rank stands in; units of each size lie in those of the next, filled in the order of ranks.

    The last unit in each of the next size is part empty where they do not tile it.
    """
    found, inside, whole = np.zeros_like(ranks), ranks, 0
    for size in reversed(units):
        found, inside, whole = found * -(-whole // size) + inside // size, inside % size, size
    return found


def untiled(sizes: Sizes) -> tuple[Sizes, ...]:
    """For the units of every level but the outermost: the sizes outside, up to the last of which they are no whole share; innermost
    first, none where all are whole. `sizes` as in `ClusterSpec.allocated_sizes`.
    """
    found = []
    for place, size in enumerate(sizes[:-1]):
        ragged = [index for index in range(place + 1, len(sizes) - 1) if sizes[index] % size and sizes[index] < sizes[-1]]
        found.append(tuple(sizes[place + 1 : ragged[-1] + 1]) if ragged else ())
    return tuple(found)


def groups(table: LayoutTable, dimension: str) -> Groups:
    """The groups of a dimension under each row's rank order (leftmost in the order's name varies fastest).

    Its stride is the product of the degrees of its grid that the order names before it. KeyError for a name that is not in
    DIMENSIONS.
    """
    if dimension not in DIMENSIONS:
        raise KeyError(dimension)
    grid = DENSE if dimension in DENSE else EXPERT
    stride = np.ones_like(table.tp)
    for other, name in grid.items():
        if other != dimension:
            stride = np.where(PRECEDES[name, grid[dimension]][table.rank_order], stride * getattr(table, other), stride)
    return Groups(getattr(table, dimension), stride)


def inner_strides(table: LayoutTable) -> list[Ints]:
    """Strides of the groups that layers' messages pass in, where more than the degrees decides on them.

    Under the orders of flags nothing but tp, cp, ep and etp does: then there are none.
    """
    if not (table.rank_order >= len(FLAG_RANK_ORDERS)).any():
        return []
    return [np.where(of.size > 1, of.stride, 0) for of in (groups(table, name) for name in ("tp", "cp", "ep", "etp"))]


def inner_classes(codes: Ints) -> Ints:
    """A number for each order, equal where no degrees set the groups of layers' messages apart, and 0 for those of flags, (n,)."""
    found: dict[tuple[bool, ...], int] = {}
    each = [tuple(bool(PRECEDES[first, second][code]) for first, second in INNER_PAIRS) for code in range(len(RANK_ORDERS))]
    return np.array([found.setdefault(key, len(found)) for key in each], dtype=np.int64)[codes]


def placed_alike(table: LayoutTable, units: Sequence[int], experts: bool, exact: bool) -> Ints:
    """A number for every row, equal for rows of equal degrees whose groups lie alike on units of all of these sizes, (n,).

    `exact`: strides over cp and dp count as they are, for there are groups within those groups.
    """
    placed = {name: groups(table, name) for name in ("tp", "cp", "pp", "dp", *(("ep", "etp", "edp") if experts else ()))}
    cp, dp = placed["cp"], placed["dp"]
    near, far = np.minimum(cp.stride, dp.stride), np.maximum(cp.stride, dp.stride)
    both = (cp.size > 1) & (dp.size > 1)
    apart = both & (far > near * np.where(near == cp.stride, cp.size, dp.size))
    shards = Groups(np.where(both & ~apart, cp.size * dp.size, 1), near)
    columns = [apart.astype(np.int64), *([cp.stride, dp.stride] if exact else [])]
    columns += [_place(of, unit) for of in (*placed.values(), shards) for unit in units]
    return row_keys(columns)


def _place(of: Groups, unit: int) -> Ints:
    """What decides how groups of one size lie on units: 0 for inside, the unit for one rank in each, else their stride, (n,)."""
    length = np.minimum(of.stride * of.size, unit + 1)
    inside = _divides(unit)[length] | (of.size == 1)
    return np.where(inside, 0, np.minimum(of.stride, unit))


@lru_cache(maxsize=64)
def _divides(unit: int) -> Bools:
    """By length, up to one more than the unit, whether it divides the unit: to look that up is quicker than to work it out."""
    found = unit % np.maximum(np.arange(unit + 2), 1) == 0
    found[0] = found[-1] = False
    return np.asarray(found)

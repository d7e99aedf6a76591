"""Where the ranks of each dimension sit: size, stride and phase of its groups against the units of every network level.

A group's ranks are stride apart. Against a level whose units hold U devices, what a collective needs to know is how many units the
worst-placed group touches. A product of extents is the special case in which everything divides; 72, 384 or TP 16 over servers
of 24 are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import RANK_ORDERS, Floats, Ints, LayoutTable

DIMENSIONS = ("tp", "cp", "pp", "dp", "ep", "etp", "edp")
PP_INSIDE_DP = RANK_ORDERS.index("tp-cp-ep-pp-dp")


@dataclass(frozen=True)
class Groups:
    """The groups of one dimension over many layouts: `size` ranks, `stride` apart; both (n,)."""

    size: Ints
    stride: Ints

    def units(self, unit_size: int, devices: int) -> Floats:
        """Units of `unit_size` that the worst-placed group of a job of `devices` touches, (n,).

        Groups tile the ranks in blocks of stride·size, so a block starts at a multiple of gcd(stride·size, U) into a unit;
        the worst start leaves gcd devices of the unit.
        """
        block = self.stride * self.size
        step = np.gcd(block, unit_size)
        touched = (unit_size - step + block - 1) // unit_size + 1
        touched = np.where(self.stride >= unit_size, self.size, touched)
        return np.minimum(np.minimum(self.size, touched), -(-devices // unit_size)).astype(np.float64)


def groups(table: LayoutTable, dimension: str) -> Groups:
    """The groups of a dimension under each row's rank order (leftmost in the order's name varies fastest).

    KeyError for a name that is not in DIMENSIONS.
    """
    tp_cp = table.tp * table.cp
    inside = table.rank_order == PP_INSIDE_DP
    pp_in = np.where(inside, table.pp, 1)
    if dimension == "tp":
        return Groups(table.tp, np.ones_like(table.tp))
    if dimension == "cp":
        return Groups(table.cp, table.tp)
    if dimension == "pp":
        return Groups(table.pp, np.where(inside, tp_cp, tp_cp * table.dp))
    if dimension == "dp":
        return Groups(table.dp, tp_cp * pp_in)
    if dimension == "etp":
        return Groups(table.etp, np.ones_like(table.etp))
    if dimension == "ep":
        return Groups(table.ep, table.etp)
    if dimension == "edp":
        return Groups(table.edp, table.etp * table.ep * pp_in)
    raise KeyError(dimension)

"""Which ranks talk to which: process groups, the coordinates of every rank, and the server and supernode it sits in.

In Megatron's order strings the leftmost dimension varies fastest. "tp-cp-ep-dp-pp" is rank = tp + TP·(cp + CP·(dp + DP·pp)) for
dense weights and rank = etp + ETP·(ep + EP·(edp + EDP·pp)) for experts; "tp-cp-ep-pp-dp" exchanges the last two. Any other order
of the five names is read likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.errors import InputError
from ..search_spaces.groups import DENSE, DIMENSIONS, EXPERT, Sizes, unit_of
from ..search_spaces.layout import RANK_ORDERS, Ints, Layout

SERVER_LEVELS = ("server", "node", "host")


def groups(layout: Layout, order: str | None = None) -> dict[str, list[list[int]]]:
    """Every process group of each dimension, as lists of ranks; the groups of a dimension divide all ranks among them.

    `order` defaults to the layout's. InputError if the order is unknown or the two grids do not describe the same devices.
    """
    grids = _grids(layout, order)
    return {name: _lines(*_axis(grids, name)) for name in DIMENSIONS}


def coordinates(layout: Layout, order: str | None = None) -> dict[str, Ints]:
    """Index of every rank in each dimension: columns of equal length, one row per rank."""
    grids = _grids(layout, order)
    table: dict[str, Ints] = {"rank": np.arange(layout.devices)}
    for name in DIMENSIONS:
        ranks, axis = _axis(grids, name)
        column = np.empty(layout.devices, dtype=np.int64)
        column[ranks] = np.broadcast_to(np.expand_dims(np.arange(ranks.shape[axis]), _others(ranks.ndim, axis)), ranks.shape)
        table[name] = column
    return table


def placement(layout: Layout, cluster: ClusterSpec, order: str | None = None, sizes: Sizes | None = None) -> dict[str, Ints]:
    """`coordinates` with the server ("host"), the "device" of it and the supernode of every rank, filled in the order of ranks.

    `sizes` are the problem's, by which the layout was priced (`Problem.allocated_sizes`); by default those of its own devices.
    No server stands in two supernodes: where a supernode's share of the job is no whole number of them, its last is part empty.
    """
    table, sizes = coordinates(layout, order), sizes or cluster.allocated_sizes(layout.devices)
    host = unit_of(table["rank"], sizes[server_place(cluster) :])
    first = np.unique(host, return_index=True)[1]
    supernode = unit_of(table["rank"], sizes[cluster.supernode_place :])
    return {**table, "host": host, "device": table["rank"] - first[host], "supernode": supernode}


def server_place(cluster: ClusterSpec) -> int:
    """Index of the level whose units are servers: the innermost where none is called server, node or host."""
    names = [level.name for level in cluster.levels]
    return next((names.index(name) for name in SERVER_LEVELS if name in names), 0)


Grids = tuple[dict[str, int], Ints, dict[str, int], Ints]


def _grids(layout: Layout, order: str | None) -> Grids:
    """Axis of each dimension and the ranks as an array, for the dense and for the expert grid; slowest dimension first."""
    order = order or layout.rank_order
    if order not in RANK_ORDERS:
        raise InputError(f"rank order {order!r} must name tp, cp, ep, dp and pp once each, such as {RANK_ORDERS[0]}")
    expert_devices = layout.etp * layout.ep * layout.edp * layout.pp
    if expert_devices != layout.devices:
        raise InputError(
            f"layout: tp·cp·pp·dp is {layout.devices} devices but etp·ep·edp·pp is {expert_devices}; both grids use the same ones"
        )
    slowest_first = order.split("-")[::-1]
    dense, expert = ([own for name in slowest_first for own, called in grid.items() if called == name] for grid in (DENSE, EXPERT))
    ranks = np.arange(layout.devices)
    dense_ranks = ranks.reshape([getattr(layout, name) for name in dense])
    if layout.ep * layout.etp == 1:  # nothing but copies: those of a stage, whatever the order
        expert = ["pp", "edp", "ep", "etp"]
        ranks = np.moveaxis(dense_ranks, dense.index("pp"), 0)
    elif layout.pp > 1 and slowest_first[0] != "pp":
        _same_pipelines(layout, order, dense, expert)
    return (
        {name: axis for axis, name in enumerate(dense)},
        dense_ranks,
        {name: axis for axis, name in enumerate(expert)},
        ranks.reshape([getattr(layout, name) for name in expert]),
    )


def _same_pipelines(layout: Layout, order: str, dense: Sequence[str], expert: Sequence[str]) -> None:
    """InputError where the two grids (slowest first) do not have the same pipelines; Megatron-Core asks for edp = dp besides."""
    if layout.edp != layout.dp:
        raise InputError(
            f"layout: rank order {order} needs edp = dp, so that both grids have the same pipelines; edp is {layout.edp} and "
            f"dp is {layout.dp}"
        )
    steps = [math.prod(getattr(layout, name) for name in grid[grid.index("pp") + 1 :]) for grid in (dense, expert)]
    if steps[0] != steps[1]:
        raise InputError(
            f"layout: rank order {order} puts stages {steps[0]} ranks apart in the dense grid and {steps[1]} in that of experts; "
            f"both must have the same pipelines"
        )


def _axis(grids: Grids, name: str) -> tuple[Ints, int]:
    dense, dense_ranks, expert, expert_ranks = grids
    return (dense_ranks, dense[name]) if name in dense else (expert_ranks, expert[name])


def _lines(ranks: Ints, axis: int) -> list[list[int]]:
    lines: list[list[int]] = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    return lines


def _others(dimensions: int, axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(dimensions) if other != axis)

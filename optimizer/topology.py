"""What a picture of a plan on its cluster shows: where groups lie, what every supernode holds, and what each level carries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.groups import DIMENSIONS
from ..search_spaces.layout import Ints, Layout, Problem
from .ranks import devices_per_server, devices_per_supernode, groups, placement, server_level
from .result import PricedLayout

GIB = 2.0**30


@dataclass(frozen=True)
class Dimension:
    """The groups of one dimension: `group` of every rank, and how far they reach.

    `reach` names the innermost level whose units hold every group whole. By supernode: groups that lie `inside`, and groups that
    go `across` its border.
    """

    name: str
    size: int
    count: int
    group: Ints
    reach: str
    most_supernodes: int
    inside: Ints
    across: Ints


@dataclass(frozen=True)
class LevelLoad:
    """What a device sends across a level in a step, GiB by dimension, and the share of the step that takes at full bandwidth."""

    name: str
    gib: dict[str, float]
    utilisation: float

    @property
    def total_gib(self) -> float:
        return sum(self.gib.values())


@dataclass(frozen=True)
class Topology:
    """Columns by rank (placement), the dimensions that have groups of several, the levels, and devices by supernode.

    `server` counts the devices of one, by whatever name the cluster calls what it takes for servers; `supernode_size` those that a
    supernode has, in use or not.
    """

    columns: dict[str, Ints]
    dimensions: tuple[Dimension, ...]
    levels: tuple[LevelLoad, ...]
    devices: Ints
    server: int
    server_name: str
    supernode_name: str
    supernode_size: int

    @property
    def default(self) -> str:
        """The dimension that is shown first: the widest of those whose traffic belongs inside, else the first there is."""
        names = [dimension.name for dimension in self.dimensions]
        return next((name for name in ("ep", "tp", "cp", "pp", "dp") if name in names), names[0] if names else "")


def topology(problem: Problem, priced: PricedLayout) -> Topology:
    """The picture's facts for one layout on the problem's cluster; devices that stay idle are left out."""
    layout, cluster = priced.layout, problem.cluster
    columns = placement(layout, cluster, devices=problem.devices)
    lists = groups(layout)
    return Topology(
        columns=columns,
        dimensions=tuple(
            _dimension(problem, layout, name, np.array(lists[name]))
            for name in DIMENSIONS
            if getattr(layout, name) > 1 and (problem.model.is_moe or name != "edp")
        ),
        levels=_levels(problem, priced),
        devices=np.bincount(columns["supernode"]),
        server=min(of(cluster, problem.devices) for of in (devices_per_server, devices_per_supernode)),
        server_name=server_level(cluster),
        supernode_name=cluster.supernode,
        supernode_size=next(level.size or 0 for level in cluster.levels if level.name == cluster.supernode),
    )


def _dimension(problem: Problem, layout: Layout, name: str, members: Ints) -> Dimension:
    """`members` are the ranks of every group, (groups, size)."""
    cluster, devices = problem.cluster, layout.devices
    group = np.empty(devices, dtype=np.int64)
    group[members.reshape(-1)] = np.repeat(np.arange(len(members)), members.shape[1])
    each = devices_per_supernode(cluster, problem.devices)
    home = np.sort(members // each, axis=1)
    touched = 1 + (np.diff(home, axis=1) > 0).sum(axis=1)
    supernodes = -(-devices // each)
    inside = np.bincount(home[touched == 1, 0], minlength=supernodes)
    pairs = np.unique(home * len(members) + np.arange(len(members))[:, None]) // len(members)
    return Dimension(
        name=name,
        size=members.shape[1],
        count=len(members),
        group=group,
        reach=_reach(problem, layout, members),
        most_supernodes=int(touched.max()),
        inside=inside,
        across=np.bincount(pairs, minlength=supernodes) - inside,
    )


def _reach(problem: Problem, layout: Layout, members: Ints) -> str:
    sizes = problem.cluster.allocated_sizes(problem.devices)
    for level, size in zip(problem.cluster.levels, sizes, strict=True):
        if (members.min(axis=1) // size == members.max(axis=1) // size).all():
            return level.name
    return problem.cluster.levels[-1].name


def _levels(problem: Problem, priced: PricedLayout) -> tuple[LevelLoad, ...]:
    """Every level of the cluster, innermost first, whether anything crosses it or not."""
    found = []
    for level in problem.cluster.levels:
        gib = {name: sent for name, sent in priced.traffic_gib.get(level.name, {}).items() if sent > 0}
        rate = level.bandwidth_bytes_per_s.value / level.oversubscription / level.devices_per_nic
        found.append(LevelLoad(level.name, gib, sum(gib.values()) * GIB / rate / priced.step_time_s))
    return tuple(found)

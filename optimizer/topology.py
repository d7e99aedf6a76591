"""What a picture of a plan on its cluster shows: where groups lie, what every supernode holds, and what each level carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cost_models.memory import GIB
from ..search_spaces.groups import DIMENSIONS, unit_of
from ..search_spaces.layout import Ints, Problem
from .ranks import groups, placement, server_place
from .result import PricedLayout


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
    supernode has, in use or not; `free` those of every supernode that the job may use, where that was said.
    """

    columns: dict[str, Ints]
    dimensions: tuple[Dimension, ...]
    levels: tuple[LevelLoad, ...]
    devices: Ints
    server: int
    server_name: str
    supernode_name: str
    supernode_size: int
    free: tuple[int, ...] = ()

    @property
    def default(self) -> str:
        """The dimension that is shown first: the widest of those whose traffic belongs inside, else the first there is."""
        names = [dimension.name for dimension in self.dimensions]
        return next((name for name in ("ep", "tp", "cp", "pp", "dp") if name in names), names[0] if names else "")

    def facts(self) -> dict[str, Any]:
        """What lies where and what each level carries, as JSON holds it; the place of every rank is in plan.json."""
        supernode = {"name": self.supernode_name, "size": self.supernode_size, "devices": self.devices.tolist()}
        supernode |= {"free": list(self.free)} if self.free else {}
        reaches = ("name", "size", "count", "reach", "most_supernodes")
        dimensions = [
            {name: getattr(each, name) for name in reaches} | {"inside": each.inside.tolist(), "across": each.across.tolist()}
            for each in self.dimensions
        ]
        levels = [{"name": level.name, "gib": level.gib, "utilisation": level.utilisation} for level in self.levels]
        server = {"name": self.server_name, "devices": self.server}
        return {"supernode": supernode, "server": server, "groups": dimensions, "levels": levels}


def topology(problem: Problem, priced: PricedLayout, free: tuple[int, ...] = ()) -> Topology:
    """The picture's facts for one layout on the problem's cluster; `free` as `DevicesLeft.told`."""
    layout, cluster = priced.layout, problem.cluster
    columns = placement(layout, cluster, sizes=problem.allocated_sizes)
    lists = groups(layout)
    devices = np.bincount(columns["supernode"], minlength=len(free))
    return Topology(
        columns=columns,
        dimensions=tuple(
            _dimension(problem, columns["supernode"], len(devices), name, np.array(lists[name]))
            for name in DIMENSIONS
            if getattr(layout, name) > 1 and (problem.model.is_moe or name != "edp")
        ),
        levels=_levels(problem, priced),
        devices=devices,
        server=min(problem.allocated_sizes[place] for place in (server_place(cluster), cluster.supernode_place)),
        server_name=cluster.levels[server_place(cluster)].name,
        supernode_name=cluster.supernode,
        supernode_size=next(level.size or 0 for level in cluster.levels if level.name == cluster.supernode),
        free=free,
    )


def _dimension(problem: Problem, supernode: Ints, supernodes: int, name: str, members: Ints) -> Dimension:
    """`members` are the ranks of every group, (groups, size), `supernode` is every rank's, of so many `supernodes`."""
    group = np.empty(len(supernode), dtype=np.int64)
    group[members.reshape(-1)] = np.repeat(np.arange(len(members)), members.shape[1])
    home = np.sort(supernode[members], axis=1)
    touched = 1 + (np.diff(home, axis=1) > 0).sum(axis=1)
    inside = np.bincount(home[touched == 1, 0], minlength=supernodes)
    pairs = np.unique(home * len(members) + np.arange(len(members))[:, None]) // len(members)
    return Dimension(
        name=name,
        size=members.shape[1],
        count=len(members),
        group=group,
        reach=_reach(problem, members),
        most_supernodes=int(touched.max()),
        inside=inside,
        across=np.bincount(pairs, minlength=supernodes) - inside,
    )


def _reach(problem: Problem, members: Ints) -> str:
    sizes = problem.allocated_sizes
    for place, level in enumerate(problem.cluster.levels):
        units = unit_of(members, sizes[place:])
        if (units.min(axis=1) == units.max(axis=1)).all():
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

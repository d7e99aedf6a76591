"""Where every rank runs, as files that launchers read: a host file in the order of NODE_RANK and HCCL's rank table.

The rank table follows the CANN documentation of HCCL (cann/hccl docs/zh/user_guide/cluster_info_config): version "1.0" lists
servers, their devices and rank_id (Atlas A2); "1.2" adds super_pod_list and super_device_id (Atlas A3 in supernodes), with numbers
written as text; "2.0" (Ascend 950) lists ranks with the unit of every network layer that they stand in, numbers as such.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.errors import InputError
from ..search_spaces.groups import Sizes
from ..search_spaces.layout import Ints, Layout
from .ranks import placement

BY_LAYER = "2.0"
TABLE_VERSIONS = {"ascend-910b": "1.0", "ascend-910c-die": "1.2", "ascend-950dt": BY_LAYER}
"""Version of the rank table by accelerator, where its form is documented."""
WHERE_FROM = {
    "device_ip": "--hosts FILE takes it",
    "super_device_id": "--hosts FILE takes it",
    "rank_addr_list": "hccn_tool lists the EIDs and ports of every device",
}
"""Fields that only the machine knows, and where they come from."""
FORM = "ADDRESS SUPERNODE [DEVICE_IP,… [SUPER_DEVICE_ID,…]]"


@dataclass(frozen=True)
class Host:
    """A server: its address, the supernode it stands in, and what the rank table says of its devices where that is known."""

    address: str
    supernode: str
    device_ips: tuple[str, ...] = ()
    super_device_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seats:
    """The servers of a job in the order of NODE_RANK, the columns of its ranks, and servers that it leaves free."""

    hosts: tuple[Host, ...]
    columns: Mapping[str, Ints]
    spare: tuple[Host, ...] = ()

    @property
    def slots(self) -> list[int]:
        """Ranks of every server."""
        slots: list[int] = np.bincount(self.columns["host"]).tolist()
        return slots

    def facts(self) -> dict[str, Any]:
        """Every server with its ranks, in the order of NODE_RANK, and those that stay free, as JSON holds them."""
        ends = np.cumsum([0, *self.slots]).tolist()
        known = [{name: value for name, value in vars(host).items() if value} for host in self.hosts]
        servers = [{**host, "ranks": list(range(*span))} for host, span in zip(known, pairwise(ends), strict=True)]
        return {"servers": servers, "spare": [host.address for host in self.spare]}


def seats(layout: Layout, cluster: ClusterSpec, given: Sequence[Host] | None = None, sizes: Sizes | None = None) -> Seats:
    """Gives every server of the job a host: of those `given`, or made-up names that say where it has to stand.

    Supernodes are taken in the order in which they are given, each for one part of the job that it can hold whole; what it has
    left stays free. InputError where none can, or where the devices listed for a server are not as many as the job runs there.
    """
    columns = placement(layout, cluster, sizes=sizes)
    first = columns["device"] == 0
    homes = columns["supernode"][first]
    needs = np.bincount(homes).tolist()
    if given is None:
        names = [Host(f"supernode-{home}-server-{i}", str(home)) for home, need in enumerate(needs) for i in range(need)]
        return Seats(tuple(names), columns)
    shelves: dict[str, list[Host]] = {}
    for host in given:
        shelves.setdefault(host.supernode, []).append(host)
    chosen: list[Host] = []
    for need in sorted(needs, reverse=True):
        shelf = next((name for name, hosts in shelves.items() if len(hosts) >= need), None)
        if shelf is None:
            most = max((len(hosts) for hosts in shelves.values()), default=0)
            raise InputError(
                f"hosts: a supernode of the job takes {need} servers, and of the supernodes that are left the largest has {most}; "
                f"the job needs {', '.join(map(str, needs))} servers in {len(needs)} supernodes"
            )
        chosen += shelves.pop(shelf)[:need]
    used = {host.address for host in chosen}
    found = Seats(tuple(chosen), columns, tuple(host for host in given if host.address not in used))
    for host, slots in zip(chosen, found.slots, strict=True):
        for name, values in (("device addresses", host.device_ips), ("super device ids", host.super_device_ids)):
            if values and len(values) != slots:
                raise InputError(f"hosts: {host.address} lists {len(values)} {name}, and the job runs {slots} ranks on it")
    return found


def read_hosts(text: str, source: str) -> tuple[Host, ...]:
    """Servers, one a line, as FORM; blank lines and those that start with # are passed over. InputError names the line."""
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if not 2 <= len(fields) <= 4:
            raise InputError(f"{source}: line {number} has {len(fields)} fields; write {FORM}")
        lists = [tuple(field.split(",")) for field in fields[2:]]
        hosts.append(Host(fields[0], fields[1], *lists))
    twice = [address for address, times in Counter(host.address for host in hosts).items() if times > 1]
    if twice:
        raise InputError(f"{source}: {twice[0]} is listed twice; a server stands in one place")
    if not hosts:
        raise InputError(f"{source}: names no server; write one a line, as {FORM}")
    return tuple(hosts)


def host_file(seated: Seats) -> str:
    """Servers and their slots in the order of NODE_RANK, supernode by supernode, as Open MPI and DeepSpeed read it."""
    homes = seated.columns["supernode"][seated.columns["device"] == 0]
    lines = ["# NODE_RANK is the place in this list, from 0; servers of one supernode follow each other"]
    last = -1
    for host, home, slots in zip(seated.hosts, homes.tolist(), seated.slots, strict=True):
        if home != last:
            lines.append(f"# supernode {home}" + (f": {host.supernode}" if host.supernode != str(home) else ""))
            last = home
        lines.append(f"{host.address} slots={slots}")
    lines += [f"# spare: {host.address}" for host in seated.spare]
    return "\n".join(lines) + "\n"


def rank_table(seated: Seats, cluster: ClusterSpec) -> str | None:
    """HCCL's rank table (JSON), or None where the accelerator's form of it is not documented.

    `device_ip`, `super_device_id` and the addresses of layers are what the machine says they are: they are left out, or empty.
    """
    version = TABLE_VERSIONS.get(cluster.accelerator.name)
    if version is None:
        return None
    if version == BY_LAYER:
        return _by_layer(seated)
    ranks = np.split(seated.columns["rank"], np.flatnonzero(np.diff(seated.columns["host"])) + 1)
    servers = [_server(host, own.tolist(), version) for host, own in zip(seated.hosts, ranks, strict=True)]
    lines = ",\n".join(f"    {json.dumps(server)}" for server in servers)
    head = f'{{\n  "version": "{version}",\n  "server_count": "{len(servers)}",\n  "server_list": [\n{lines}\n  ]'
    pods = "" if version == "1.0" else f',\n  "super_pod_list": [\n{_pods(seated)}\n  ]'
    return f'{head}{pods},\n  "status": "completed"\n}}\n'


def unwritten(cluster: ClusterSpec) -> str | None:
    """Why there is no rank table, in a sentence; None where there is one, or none is needed."""
    name = cluster.accelerator.name
    if cluster.accelerator.vendor != "huawei" or name in TABLE_VERSIONS:
        return None
    known = ", ".join(f"{version} of {device}" for device, version in TABLE_VERSIONS.items())
    return f"no rank_table.json: HCCL's form of it for {name} is not published (known are {known}); the hostfile holds"


def missing(seated: Seats, cluster: ClusterSpec) -> tuple[str, ...]:
    """Fields of the rank table that have to be filled in before it is used."""
    version = TABLE_VERSIONS.get(cluster.accelerator.name)
    if version is None:
        return ()
    if version == BY_LAYER:
        return ("rank_addr_list",)
    wanted = [("device_ip", all(host.device_ips for host in seated.hosts))]
    if version == "1.2":
        wanted.append(("super_device_id", all(host.super_device_ids for host in seated.hosts)))
    return tuple(name for name, there in wanted if not there)


def _by_layer(seated: Seats) -> str:
    """Version 2.0: every rank with the server (layer 0), the supernode and, where there are several of those, the cluster it is in.

    Layer 0 is what the driver's topology file describes; beyond, all reach all through switches.
    """
    columns, several = seated.columns, len(np.unique(seated.columns["supernode"])) > 1
    ranks = []
    for rank, host, device in zip(*(columns[name].tolist() for name in ("rank", "host", "device")), strict=True):
        seat = seated.hosts[host]
        units = (seat.address, seat.supernode, *(("cluster",) if several else ()))
        levels = [
            {
                "net_layer": layer,
                "net_instance_id": unit,
                "net_type": "CLOS" if layer else "TOPO_FILE_DESC",
                "net_attr": "",
                "rank_addr_list": [],
            }
            for layer, unit in enumerate(units)
        ]
        ranks.append({"rank_id": rank, "local_id": device, "device_id": device, "level_list": levels})
    lines = ",\n".join(f"    {json.dumps(rank)}" for rank in ranks)
    head = f'"status": "completed",\n  "version": "{BY_LAYER}",\n  "rank_count": {len(ranks)}'
    return f'{{\n  {head},\n  "rank_list": [\n{lines}\n  ]\n}}\n'


def _server(host: Host, ranks: Sequence[int], version: str) -> dict[str, object]:
    devices = []
    for index, rank in enumerate(ranks):
        device = {"device_id": str(index)}
        if host.device_ips:
            device["device_ip"] = host.device_ips[index]
        if version == "1.2" and host.super_device_ids:
            device["super_device_id"] = host.super_device_ids[index]
        devices.append({**device, "rank_id": str(rank)})
    return {"server_id": host.address, "device": devices}


def _pods(seated: Seats) -> str:
    homes = seated.columns["supernode"][seated.columns["device"] == 0]
    pods = []
    for home in np.unique(homes).tolist():
        hosts = [seated.hosts[index] for index in np.flatnonzero(homes == home)]
        pods.append({"super_pod_id": hosts[0].supernode, "server_list": [{"server_id": host.address} for host in hosts]})
    return ",\n".join(f"    {json.dumps(pod)}" for pod in pods)

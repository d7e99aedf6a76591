"""The cluster of a measured run: the catalog's with the supernode, and the links between servers, that its row names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ..search_spaces.cluster import ClusterSpec, Figure
from ..search_spaces.errors import InputError
from ..search_spaces.inputs import catalog_names, load_cluster
from .runs import Run, Unpriceable, meaning

VENDORS = re.compile(r"^(nvidia|amd|huawei|instinct|tesla|hgx|dgx)[-\s]+", re.IGNORECASE)
LINKS = re.compile(
    r"(?:(?P<before>inter-?(?:node|machine|server)|between (?:nodes|servers)|node-node)[^.;,|]{0,30}?)?"
    r"(?:\b(?P<count>\d{1,2}) ?[x×*] ?)?(?<![\d.])(?P<gbps>\d{2,5}) ?G(?:bps|bit/s|b/s|b)\b(?!ytes)"
    r"(?:[^.;,|]{0,30}?(?P<after>inter-?(?:node|machine|server)|between (?:nodes|servers)|node-node|(?:per|/) ?(?:node|server)))?"
)
"""What sources write of the network between servers: a rate in Gbit/s (not GB), how many links of it a server has, and the words
that say that it is a server's."""

GENERATION = re.compile(r"ascend-[^-]+|[^-]+")
"""What of an accelerator's name in the catalog tells which one it is; memory, grade and form follow."""
UNDISCLOSED = ("ascend", "ascend-undisclosed")
"""Names of devices whose generation their source does not print."""


def placed(runs: Sequence[Run], folder: Path, cluster: str | None = None) -> list[Run]:
    """The runs with the clusters that their rows name (of the catalog, or a file beside the table) or else with `cluster`.

    InputError where the latter is none; a row that names none that can be read has a defect.
    """
    usual = None if cluster is None else load_cluster(cluster)
    read: dict[str, ClusterSpec | InputError] = {}
    return [_placed(run, folder, usual, read) for run in runs]


def _placed(run: Run, folder: Path, usual: ClusterSpec | None, read: dict[str, ClusterSpec | InputError]) -> Run:
    name = run.text("cluster")
    if not name:
        return run if usual is None else replace(run, cluster=usual)
    if name not in read:
        try:
            read[name] = load_cluster(name if name in catalog_names("clusters") else folder / name)
        except InputError as error:
            read[name] = error
    found = read[name]
    return replace(run, defect=run.defect or str(found)) if isinstance(found, InputError) else replace(run, cluster=found)


def device_of(run: Run) -> str:
    """The accelerator that a row's cluster or words stand for, by its name in the catalog; else as the row has it."""
    if run.cluster is not None:
        return run.cluster.accelerator.name
    words = device_words(run.text("accelerator"))
    if words in UNDISCLOSED:
        return run.accelerator
    try:
        return load_cluster(meaning("accelerator", words)).accelerator.name
    except Unpriceable:
        return run.accelerator


def device_words(text: str) -> str:
    """An accelerator's name without its vendor, words joined by "-": NVIDIA H100 80GB HBM3 is h100-80gb-hbm3."""
    while (shorter := VENDORS.sub("", text)) != text:
        text = shorter
    return re.sub(r"(\d+)-?gi?b\b", r"\1gb", re.sub(r"[\s_()]+", "-", text.strip().lower()).strip("-"))


def cluster_of(run: Run) -> ClusterSpec:
    """The cluster that the run is said to have run on, else what its accelerator, its site and its words of links stand for."""
    if run.cluster is not None:
        _refuse_another(run, run.cluster)
        return run.cluster
    name = meaning("accelerator", device_words(run.text("accelerator")))
    site = meaning("site", f"{run.family} | {run.accelerator}")
    links = server_links(site) or server_links(f"{run.text('source')} | {run.text('notes')}")
    return _cluster(name if server_links(site) else site or name, run.count("domain_size"), links)


def _refuse_another(run: Run, cluster: ClusterSpec) -> None:
    """Unpriceable where the row names a generation of the catalog and its cluster has another; a device of one's own may be called
    anything.
    """
    told, there = device_of(replace(run, cluster=None)), cluster.accelerator.name
    known = catalog_names("accelerators")
    if told in known and there in known and GENERATION.match(told)[0] != GENERATION.match(there)[0]:  # type: ignore[index]
        words = device_words(run.text("accelerator"))
        raise Unpriceable(f"the cluster has another accelerator: {words} is not {cluster.name}'s {there}")


def server_links(text: str) -> tuple[int, float] | None:
    """Links between servers that a text tells of one server, and Gbit/s of all together; None where it tells none."""
    for found in LINKS.finditer(text):
        if found["before"] or found["after"] or found["count"]:
            count = int(found["count"] or 1)
            return count, count * float(found["gbps"])
    return None


@cache
def _cluster(name: str, domain_size: int | None, links: tuple[int, float] | None) -> ClusterSpec:
    """The catalog's cluster with a supernode of `domain_size` devices, joined as boards of that size are, and with servers of
    `links` beyond it.
    """
    cluster = load_cluster(name)
    return _linked(cluster if domain_size is None else _resized(cluster, domain_size), links)


def _resized(cluster: ClusterSpec, domain_size: int) -> ClusterSpec:
    place = [level.name for level in cluster.levels].index(cluster.supernode)
    below = cluster.levels[place - 1].size or 1 if place else 1
    if domain_size == cluster.levels[place].size or domain_size % below or domain_size <= (below if place else 0):
        return cluster
    kind = meaning("board", f"{cluster.name} | {domain_size}")
    joined = {"kind": kind, "in_network_reduction": False} if kind else {}
    level = cluster.levels[place].model_copy(update={"size": domain_size, **joined})
    # A level above that would no longer hold whole supernodes goes.
    above = [each for each in cluster.levels[place + 1 :] if each.size is None or each.size % domain_size == 0]
    return cluster.model_copy(update={"levels": (*cluster.levels[:place], level, *above)})


def _linked(cluster: ClusterSpec, links: tuple[int, float] | None) -> ClusterSpec:
    """Links of a server are shared by its devices: only where the supernode is the server do they say what one device has."""
    place = [level.name for level in cluster.levels].index(cluster.supernode)
    size = cluster.levels[place].size
    if links is None or place or len(cluster.levels) != 2 or size is None:
        return cluster
    count, gbps = links
    nics = count if count > 1 else size  # of one rate for the whole server every device has its share
    source = f"the run's own source: {gbps:g} Gbit/s per server of {size}"
    rate = Figure(value=gbps * 1e9 / 8 / nics, source=source, grade="given")
    update = {"bandwidth_bytes_per_s": rate, "devices_per_nic": max(1.0, size / nics)}
    beyond = cluster.levels[-1].model_copy(update=update)
    return cluster.model_copy(update={"levels": (*cluster.levels[:-1], beyond)})

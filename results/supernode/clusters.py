"""Clusters of one accelerator that differ in their network only, and the plans asked for on them."""

from __future__ import annotations

import sys
from typing import Any

from paraplan.optimizer import PricedLayout, build_problem, plan
from paraplan.optimizer.leftover import as_allocated
from paraplan.search_spaces.cluster import ClusterSpec
from paraplan.search_spaces.inputs import load_cluster

CONVENTIONAL = load_cluster("three-tier-h100")
SERVER, LEAF, CORE = CONVENTIONAL.levels


def three_tier(oversubscription: float) -> ClusterSpec:
    """Servers of eight under leaf switches, whose uplinks carry one of `oversubscription` bytes that could come."""
    core = CORE.model_copy(update={"oversubscription": oversubscription})
    return CONVENTIONAL.model_copy(update={"levels": (SERVER, LEAF, core)})


def supernodes(size: int) -> ClusterSpec:
    """The same accelerators, servers' bandwidth and latency among `size` of them, a network without oversubscription between."""
    inner = SERVER.model_copy(update={"size": size, "name": "supernode"})
    outer = LEAF.model_copy(update={"size": None, "name": "scale-out"})
    name = f"supernodes-of-{size}"
    return CONVENTIONAL.model_copy(update={"levels": (inner, outer), "supernode": "supernode", "name": name})


def joined_clusters(size: int, oversubscription: float) -> ClusterSpec:
    """Clusters of `size` accelerators in servers of eight, joined by links that are oversubscribed."""
    cluster = LEAF.model_copy(update={"size": size, "name": "cluster"})
    between = CORE.model_copy(update={"oversubscription": oversubscription, "name": "between"})
    return CONVENTIONAL.model_copy(update={"levels": (SERVER, cluster, between), "name": f"clusters-of-{size}"})


def best(model: str, cluster: str | ClusterSpec, devices: int, global_batch: int, **asked: Any) -> PricedLayout:
    """The plan's layout for sequences of 4,096 tokens, which may leave devices idle; told on stderr which one is searched for."""
    name = cluster if isinstance(cluster, str) else cluster.name
    print(f"planning {model} on {devices:,} of {name} {asked or ''}", file=sys.stderr, flush=True)
    problem = build_problem(model, cluster, devices, global_batch, 4096, **asked)
    return plan(problem, top=1, left=as_allocated(problem)).plan


def communication_s(priced: PricedLayout) -> float:
    """Seconds of the step in which devices wait for messages."""
    return sum(priced.breakdown_s[term] for term in ("tp", "cp", "ep", "pp", "dp"))


def compute_s(priced: PricedLayout) -> float:
    """Seconds of the step in which layers are computed."""
    return sum(priced.breakdown_s[term] for term in ("forward", "backward", "recompute"))

"""Checkpoints that drain beside training: what they take of a level's bandwidth, and what that costs the step."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost_models.checkpoint import state_bytes
from ..cost_models.profile import load_profile
from ..cost_models.recovery import Recovery
from ..cost_models.reliability import failures_per_s, kept_interval_s
from ..cost_models.step import CostModel
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.degraded import slowed
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Problem
from .endurance import saved_of
from .evaluation import price_layout, switched
from .result import Plan, PricedLayout
from .supernode_result import CheckpointTraffic

PRIORITY = "priority"


@dataclass(frozen=True)
class Way:
    """The level over which checkpoints drain, and whether a priority queue lets training's traffic go first."""

    level: str
    priority: bool


def parse_way(cluster: ClusterSpec, text: str) -> Way:
    """ "scale-out" or "scale-out:priority". InputError for what is no level, or a cluster whose storage is not known."""
    word, colon, rest = text.partition(":")
    try:
        level = cluster.level_name(word.strip())
    except KeyError as error:
        names = ", ".join(level.name for level in cluster.levels)
        raise InputError(f"checkpoint: {word!r} is not a level of {cluster.name}: {names} or supernode") from error
    if colon and rest != PRIORITY:
        raise InputError(f"checkpoint: {rest!r} is not {PRIORITY}; write {level} or {level}:{PRIORITY}")
    if cluster.storage is None:
        raise InputError(f"checkpoint: {cluster.name} says nothing of its storage; give storage.bandwidth_bytes_per_s in its YAML")
    return Way(level, bool(colon))


def with_checkpoints(plan: Plan, way: Way, profile: str | None = None) -> Plan:
    """The plan with what its checkpoints cost it."""
    return plan.model_copy(update={"checkpoint": checkpoint_traffic(plan.problem, plan.plan, way, profile)})


def checkpoint_traffic(problem: Problem, priced: PricedLayout, way: Way, profile: str | None = None) -> CheckpointTraffic:
    """What a layout's checkpoints cost it while they drain over the level of `way`.

    A device's share s of the storage meets its share b of the level. Without a queue the two flows are served alike: while training
    sends, the checkpoint gets min(s, b/2) and training the rest. With one training loses nothing, and the checkpoint gets what it
    leaves of the level, (1 − u)·b at a utilisation of u.
    """
    cluster = problem.cluster
    assert cluster.storage is not None  # parse_way has seen it
    level = next(level for level in cluster.levels if level.name == way.level)
    rate = level.bandwidth_bytes_per_s.value / level.oversubscription / level.devices_per_nic
    store, busy = cluster.storage.bandwidth_bytes_per_s.value, min(priced.level_utilisation.get(way.level, 0.0), 1.0)
    taken = 0.0 if way.priority else min(store, rate / 2.0)
    drained = min(store, (1.0 - busy) * rate) if way.priority else busy * taken + (1.0 - busy) * min(store, rate)
    each = state_bytes(problem) / priced.devices_used
    drain_s = each / drained if drained > 0 else float("inf")
    slower = switched(problem, priced.layout).model_copy(update={"cluster": slowed(cluster, {way.level: 1.0 - taken / rate})})
    model = CostModel(slower, load_profile(cluster.accelerator.priced_as, profile))
    step_s = price_layout(model, priced.layout, simulated=False).step_time_s if taken else priced.step_time_s
    interval_s = _interval_s(problem, priced, drain_s)
    share = None if interval_s is None else min(drain_s / interval_s, 1.0)
    return CheckpointTraffic(
        level=way.level,
        priority=way.priority,
        device_bytes=each,
        taken=taken / rate,
        drain_s=drain_s,
        draining_step_time_s=step_s,
        slower=step_s / priced.step_time_s - 1.0,
        interval_s=interval_s,
        # d of every i seconds make steps of T' in place of T: (i − d)/T + d/T' steps in i
        mean_slower=None if share is None else 1.0 / (1.0 - share + share * priced.step_time_s / step_s) - 1.0,
    )


def _interval_s(problem: Problem, priced: PricedLayout, drain_s: float) -> float | None:
    """Seconds between checkpoints at the best interval, None where too little is known of failures."""
    recovery, failures = Recovery.of(problem.cluster), failures_per_s(problem.cluster, priced.devices_used)
    if recovery is None or not failures:
        return None
    save_s = recovery.save_s(saved_of(problem, priced).resident)
    return float(kept_interval_s(save_s, drain_s, 1.0 / failures))

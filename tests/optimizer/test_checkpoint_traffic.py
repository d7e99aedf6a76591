"""Checkpoints that drain beside training, by hand: shares of a link, seconds to drain, and the step meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paraplan.cost_models.checkpoint import state_bytes
from paraplan.optimizer.checkpoint_traffic import checkpoint_traffic, parse_way
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.result import PricedLayout
from paraplan.optimizer.supernode_result import CheckpointTraffic
from paraplan.optimizer.sweeps.grid import Point
from paraplan.optimizer.sweeps.point import solve
from paraplan.search_spaces.cluster import ClusterSpec
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Layout, Problem

LAYOUT = Layout(tp=8, dp=4, edp=32, num_microbatches=4, overlap={"dp_gradients": 0.0, "dp_parameters": 0.0})
ADAPTER = 40e9


def site(store: float, adapter: float = ADAPTER) -> ClusterSpec:
    """HGX H100 with an adapter of so many bytes/s a device, and that share of the storage."""
    cluster = load_cluster("hgx-h100")
    assert cluster.storage is not None
    rate = cluster.levels[-1].bandwidth_bytes_per_s.model_copy(update={"value": adapter, "low": None, "high": None})
    outer = cluster.levels[-1].model_copy(update={"bandwidth_bytes_per_s": rate})
    kept = cluster.storage.bandwidth_bytes_per_s.model_copy(update={"value": store, "low": None, "high": None})
    storage = cluster.storage.model_copy(update={"bandwidth_bytes_per_s": kept})
    return cluster.model_copy(update={"levels": (*cluster.levels[:-1], outer), "storage": storage})


def priced(cluster: ClusterSpec) -> tuple[Problem, PricedLayout]:
    problem = build_problem("llama-3.1-8b", cluster, 32, 16, 4096)
    return problem, evaluate(problem, LAYOUT, replayed=False)[0]


def traffic(store: float, way: str) -> tuple[CheckpointTraffic, PricedLayout, Problem]:
    problem, found = priced(site(store))
    return checkpoint_traffic(problem, found, parse_way(problem.cluster, way)), found, problem


def test_without_a_queue_training_keeps_what_the_checkpoint_leaves() -> None:
    """Storage takes 10 of 40 GB/s: three quarters are left, as on a cluster whose adapters are that much slower."""
    draining, found, problem = traffic(10e9, "scale-out")
    assert draining.taken == pytest.approx(0.25)
    _, slower = priced(site(10e9, 0.75 * ADAPTER))
    assert draining.draining_step_time_s == pytest.approx(slower.step_time_s, rel=1e-9)
    assert draining.slower == pytest.approx(slower.step_time_s / found.step_time_s - 1.0)
    assert draining.slower > 0.005
    # what leaves the server takes a third longer, less what launching and latency have of it
    sent_s = found.level_utilisation["scale-out"] * found.step_time_s
    assert slower.step_time_s - found.step_time_s > sent_s / 3.0
    each = state_bytes(problem) / 32
    assert draining.device_bytes == pytest.approx(each)
    assert draining.drain_s == pytest.approx(each / 10e9)  # a quarter of the link is always to be had


def test_a_storage_faster_than_the_link_gets_half_of_it_while_both_send() -> None:
    """Of 40 GB/s the checkpoint has 20 while training sends, a share u of the time, and all of it otherwise."""
    draining, found, _ = traffic(100e9, "scale-out")
    busy = found.level_utilisation["scale-out"]
    assert draining.taken == pytest.approx(0.5)
    assert draining.drain_s == pytest.approx(draining.device_bytes / (busy * 20e9 + (1.0 - busy) * 40e9))


def test_a_priority_queue_leaves_training_alone_and_drains_in_its_gaps() -> None:
    draining, found, _ = traffic(100e9, "scale-out:priority")
    assert (draining.taken, draining.slower) == (0.0, 0.0)
    assert draining.draining_step_time_s == found.step_time_s
    assert draining.drain_s == pytest.approx(draining.device_bytes / ((1.0 - found.level_utilisation["scale-out"]) * 40e9))


def test_over_all_steps_the_slow_ones_are_as_many_as_drain_in_an_interval() -> None:
    """In an interval i of which d drain there are (i − d)/T + d/T' steps, where i/T could be."""
    draining, found, _ = traffic(10e9, "scale-out")
    assert draining.interval_s is not None
    assert draining.mean_slower is not None
    i, d = draining.interval_s, draining.drain_s
    steps = (i - d) / found.step_time_s + d / draining.draining_step_time_s
    assert draining.mean_slower == pytest.approx(i / found.step_time_s / steps - 1.0)
    assert 0 < draining.mean_slower < draining.slower


def answer(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> dict[str, Any]:
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "16", "--seq-len", "4096"]
    assert main([command, *job, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_both_commands_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout", "tp=8,dp=2", "--checkpoint"]
    found = answer(capsys, "evaluate", *layout, "scale-out")["checkpoint"]
    assert (found["level"], found["priority"]) == ("scale-out", False)
    fixed = ["--fix", "tp=8,pp=1,cp=1,micro_batch=1,recompute=none", "--checkpoint", "scale-out:priority"]
    assert answer(capsys, "plan", *fixed)["checkpoint"]["slower"] == 0.0
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "16", "--seq-len", "4096"]
    assert main(["evaluate", *job, *layout, "scale-out"]) == 0
    assert "Checkpoint traffic\n  drains over scale-out   without a priority queue" in capsys.readouterr().out


def test_a_sweep_carries_it(tmp_path: Path) -> None:
    fix = "tp=8,pp=1,cp=1,micro_batch=1,recompute=none"
    options = {"fix": [fix], "checkpoint": "scale-out", "rank_order": "all"}
    found = solve(Point("llama-3.1-8b", "hgx-h100", 16, 16, 4096, "bf16", options), tmp_path)
    assert found.plan_json()["checkpoint"]["level"] == "scale-out"
    assert len(found.plan_json()["problem"]["stack"]["rank_orders"]) == 120


@pytest.mark.parametrize(("text", "said"), [("rack", "not a level of hgx-h100"), ("scale-out:last", "scale-out:priority")])
def test_ways_that_there_are_not(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_way(load_cluster("hgx-h100"), text)
    with pytest.raises(InputError, match="says nothing of its storage"):
        parse_way(load_cluster("hgx-h100").model_copy(update={"storage": None}), "scale-out")

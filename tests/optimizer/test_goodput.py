"""Goodput as an aim: against every layout priced on its own, with formulas written down here again."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.reliability import server_size
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.aims import parse_aims
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import price_layout, with_default_stages
from paraplan.optimizer.planner import plan
from paraplan.optimizer.result import PricedLayout
from paraplan.search_spaces.cluster import ClusterSpec, FailureRates
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Problem

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import legal_layouts, random_problem

YEAR = 365.25 * 86400
SEEDS = (70_047, 70_069)


def failing(problem: Problem, host_bytes_per_s: float | None = None, **rates: float) -> Problem:
    """The problem on a cluster that fails so often, and whose devices copy to their hosts so slowly."""
    cluster = problem.cluster.model_copy(update={"failures": FailureRates.model_validate(rates)})
    if host_bytes_per_s is not None:
        link = cluster.host_link.model_dump() | {"bandwidth_bytes_per_s": host_bytes_per_s}
        cluster = cluster.model_copy(update={"host_link": type(cluster.host_link).model_validate(link)})
    return problem.model_copy(update={"cluster": cluster})


def effective_s(problem: Problem, priced: PricedLayout, per_year: float, restart_s: float) -> float:
    """Step over goodput by Daly's equation 20, minimised by trying intervals one after another.

    The failed device's server has lost its copies, an equal share of all, which come from the storage while the others are read
    from the hosts; a supernode's pool keeps them.
    """
    cluster, model = problem.cluster, problem.model
    assert cluster.storage is not None
    memory, server = cluster.pool or cluster.host_link, 0 if cluster.pool else server_size(cluster)
    mtbf = YEAR / per_year / priced.devices_used
    whole = (2 + problem.stack.optimizer_bytes) * model.parameters(mtp=True)
    terms = [stage.terms_gib for stage in priced.memory.stages]
    resident = max(each.get("weights", 0.0) + each.get("optimizer", 0.0) for each in terms) * GIB
    assert priced.layout.offload == "none"
    save = resident / memory.bandwidth_bytes_per_s.value
    drain = whole / cluster.storage.bandwidth_bytes_per_s.value / priced.devices_used
    stands = 2 * resident <= memory.memory_bytes_per_device.value
    read = min(drain, max(save, drain * min(1.0, server / priced.devices_used))) if stands else drain
    back = restart_s + read + resident / cluster.levels[-1].bandwidth_bytes_per_s.value
    intervals = np.maximum(drain, mtbf * np.geomspace(1e-5, 10.0, 2000))
    stretch = float((mtbf * np.expm1((intervals + save) / mtbf) / intervals).min())
    exposed = 0.0 if stands and cluster.pool else drain
    return priced.step_time_s * stretch * math.exp((back + exposed) / mtbf)


def small_problem(seed: int) -> Problem:
    problem = random_problem(seed)
    fix = {**problem.workload.fix, "offload": ("none",)}
    problem = problem.model_copy(update={"workload": problem.workload.model_copy(update={"fix": fix})})
    return failing(problem, 1e8, device_per_year=30000.0, restart_s=5.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_layout_makes_better_use_of_its_time(seed: int) -> None:
    problem = small_problem(seed)
    found = plan(problem, objective="goodput")
    assert found.goodput is not None and found.front_certificate is not None and found.front_certificate.method == "exact"
    assert found.goodput.effective_step_s == pytest.approx(effective_s(problem, found.plan, 30000.0, 5.0), rel=1e-3)
    model = CostModel(problem, load_profile(problem.cluster.accelerator.name))
    fitting = 0
    for layout in legal_layouts(problem):
        priced = price_layout(model, with_default_stages(model, layout.model_copy(update={"stages": ()})), simulated=False)
        if priced.memory.peak_gib <= priced.memory.usable_gib:
            fitting += 1
            assert found.goodput.effective_step_s <= effective_s(problem, priced, 30000.0, 5.0) * (1 + 1e-3)
    assert fitting > 1


def cloudmatrix(**rates: float) -> ClusterSpec:
    cluster = load_cluster("cloudmatrix-384")
    return cluster.model_copy(update={"failures": FailureRates.model_validate(rates)})


def test_the_best_layout_depends_on_what_fails_as_one() -> None:
    """784 dies are a supernode and 16 more: worth having where dies fail alone, not where they take a supernode down with them."""
    fix = "micro_batch=1,cp=1,vpp=1,rank_order=tp-cp-ep-dp-pp,offload=none,optimizer_sharding=zero1,recompute=none|full"
    used = {}
    for name, rates in (("die", {"device_per_year": 0.17}), ("supernode", {"supernode_per_year": 0.17 * 768})):
        problem = build_problem("llama-3.1-70b", cloudmatrix(**rates, restart_s=7200.0), 784, 784 * 3, 4096, fix=fix)
        found = plan(problem, objective="goodput")
        assert found.goodput is not None
        if found.goodput.fastest_effective_s is not None:
            assert found.goodput.fastest_effective_s >= found.goodput.effective_step_s
        used[name] = found.plan.devices_used
    assert used["supernode"] <= 768 < used["die"]


def test_without_failures_in_the_yaml_it_is_refused() -> None:
    problem = failing(build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096))
    with pytest.raises(InputError, match=r"hgx-h100 does not say how it fails.*device_per_year"):
        plan(problem, objective="goodput")
    assert parse_aims("step-time").among_failures_of(problem).failures is None


def test_the_command_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["plan", "llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "8", "--global-batch", "16", "--seq-len", "4096"]
    fix = ["--fix", "micro_batch=1,recompute=none|full,rank_order=tp-cp-ep-dp-pp,cp=1,vpp=1", "--objective", "goodput"]
    assert main([*question, *fix, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["goodput"]
    assert 0.99 < told["goodput"] < 1.0 and told["checkpoint_tb"] == pytest.approx(14 * 8.03e9 / 1e12, rel=0.01)
    assert main([*question, *fix]) == 0
    shown = capsys.readouterr().out
    assert "Failures" in shown and "goodput" in shown and "a save every" in shown

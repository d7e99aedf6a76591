"""A plan that is checked is judged within the problem that it was made for."""

from __future__ import annotations

from typing import Any

import pytest
from paraplan.optimizer.checking.checked import Checked
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.readers import read_text
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem

from .sample_plan import sample_plan

OFFLOADING = [
    ("host", "llama-3.1-8b", "hgx-h100", "megatron-lm", "tp=2,pp=1,offload=activations:0.5"),
    ("pool", "qwen3-30b-a3b", "cloudmatrix-384", "mindspeed-llm", "tp=2,pp=2,ep=4,offload=optimizer:1+activations:0.25"),
    ("peers", "llama-3.1-8b", "gb200-nvl72", "megatron-lm", "tp=1,pp=4,offload=activations:0.5"),
]
LIMITS: dict[str, Any] = {
    "memory_margin": 0.03,
    "reserved_gib": 2.5,
    "expert_imbalance": 1.4,
    "vocab_size": 64_000,
    "fix": "micro_batch=1|2",
    "forbid": "pp>8",
    "constraint": "tp<=4",
    "inside": "supernode:tp",
}


def made_for(to: str, model: str, cluster: str, framework: str, text: str, **limits: Any) -> tuple[Problem, Layout]:
    problem = build_problem(model, cluster, 16, 32, 8192, framework, offload_to=to, **limits)
    return problem, complete(problem, parse_layout(text))


def checked(problem: Problem, layout: Layout, **given: Any) -> Checked:
    """The plan of this layout, checked as its file is."""
    priced, _ = evaluate(problem, layout)
    plan = sample_plan().model_copy(update={"problem": problem, "plan": priced, "alternatives": ()})
    return check(read_text(plan.to_json(), "plan.json"), **{"best": False, **given})


@pytest.mark.parametrize("asked", OFFLOADING, ids=[case[0] for case in OFFLOADING])
def test_a_checked_plan_is_the_evaluated_one(asked: tuple[str, str, str, str, str]) -> None:
    """Its step, peak, verdict and legality are those of `evaluate` within the problem that its file holds."""
    problem, layout = made_for(*asked, **LIMITS)
    priced, broken = evaluate(problem, layout)
    found = checked(problem, layout)
    assert found.priced is not None
    assert found.problem is not None
    assert not broken
    assert found.legal
    assert found.problem.workload == problem.workload
    assert found.priced.step_time_s == pytest.approx(priced.step_time_s, rel=1e-9)
    assert found.priced.memory == priced.memory


def test_where_a_plan_offloads_to_decides_what_it_holds() -> None:
    """The same layout lends to later stages in one plan, and breaks a rule in another, as when it is evaluated."""
    lent, layout = made_for(*OFFLOADING[2])
    kept = build_problem("llama-3.1-8b", "gb200-nvl72", 16, 32, 8192, framework="megatron-lm", offload_to="host")
    assert checked(lent, layout).legal
    assert [each.rule for each in checked(kept, layout).broken] == ["C103a"]


def test_a_plan_that_leaves_devices_idle_is_legal() -> None:
    """16 of 18 devices, and two more that the job has beyond those; the best layout is looked for on all of the problem's."""
    fix = "tp=2,pp=1|3,cp=1,micro_batch=1,recompute=none"
    fewer, layout = made_for("host", "llama-3.1-8b", "gb200-nvl72", "megatron-lm", "tp=2,pp=1", fix=fix)
    problem = fewer.model_copy(update={"devices": 18})
    priced, broken = evaluate(problem, layout)
    idle = priced.model_copy(update={"devices_idle": 4})
    plan = sample_plan().model_copy(update={"problem": problem, "plan": idle, "alternatives": ()})
    found = check(read_text(plan.to_json(), "plan.json"))
    assert not broken and found.legal
    assert (found.devices, found.idle) == (20, 4)
    assert found.priced is not None and found.priced.step_time_s == pytest.approx(priced.step_time_s, rel=1e-9)
    assert found.problem is not None and found.problem.devices == 18 and found.best is not None
    assert (found.priced.devices_idle, found.best.devices_used + found.best.devices_idle) == (4, 20)
    over = check(read_text(plan.model_copy(update={"problem": fewer}).to_json().replace('"dp": 8', '"dp": 16'), "p"), best=False)
    assert over.broken[0].sentence == "tp·dp = 2·16 needs 32 devices, the job has 16."


@pytest.mark.parametrize(("change", "rule"), [({"schedule": "gpipe"}, "P012"), ({"pp": 1, "dp": 16, "edp": 16}, "P013")])
def test_an_edited_plan_breaks_the_rules_of_lending(change: dict[str, Any], rule: str) -> None:
    problem, layout = made_for(*OFFLOADING[2])
    edited = layout.model_copy(update={**change, "num_microbatches": 32 // change.get("dp", layout.dp)})
    _, broken = evaluate(problem, edited)
    found = checked(problem, edited)
    assert broken
    assert rule in {each.rule for each in found.broken}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("tp=1,cp=2,pp=9,ep=8,vpp=3,micro_batch=1,offload=activations:0.25,recompute=selective:mla_up_proj", {"C103a", "C103b"}),
        ("tp=1,cp=2,pp=9,ep=8,vpp=3,micro_batch=1,recompute=selective:mla_up_proj", set()),
    ],
)
def test_activations_that_a_job_offloads_leave_no_pipeline_and_no_recompute(text: str, rules: set[str]) -> None:
    """A layout without a problem of its own offloads to the host, as Megatron-LM does."""
    found = check(read_text(text, "layout"), "deepseek-v3", "gb200-nvl72", devices=72, global_batch=288, seq_len=8192, best=False)
    assert {each.rule for each in found.broken} & {"C103a", "C103b"} == rules


def test_what_is_given_comes_before_the_plans_own() -> None:
    problem, layout = made_for(*OFFLOADING[1], **LIMITS)
    found = checked(problem, layout, memory_margin=0.1, expert_imbalance=2.0, vocab_size=32_000).problem
    assert found is not None
    work = found.workload
    assert (work.memory_margin.evaluated, work.expert_imbalance, work.vocab_size) == (0.1, 2.0, 32_000)
    assert (work.offload_to, work.reserved_gib) == ("pool", 2.5)


def test_measured_loads_stay_the_plans() -> None:
    problem, layout = made_for(*OFFLOADING[1], measured_imbalance={1: 1.0, 4: 1.3, 8: 1.7})
    found = checked(problem, layout).problem
    assert found is not None
    assert [found.workload.imbalance_at(ep) for ep in (1, 4, 8)] == pytest.approx([1.0, 1.3, 1.7])


def test_the_best_layout_keeps_to_the_plans_limits() -> None:
    """What the plan was sought within bounds the search of the best one too, which is then the plan."""
    problem, layout = made_for(*OFFLOADING[0], fix="tp=2,pp=1,cp=1,micro_batch=1,recompute=none,offload=activations:0.5")
    found = checked(problem, layout, best=True)
    assert found.best is not None
    assert (found.best.layout.tp, found.best.layout.pp, found.best.layout.offload) == (2, 1, "activations:0.5")
    assert any("tp=2" in said for said in found.assumptions)


def test_a_level_that_another_cluster_lacks_is_left_out() -> None:
    """A plan can be checked on another cluster than its own, whose levels have other names."""
    problem = build_problem("llama-3.1-8b", "cloudmatrix-384", 16, 32, 8192, inside="package:tp;supernode:pp")
    found = checked(problem, complete(problem, parse_layout("tp=2,pp=2")), cluster="hgx-h100", framework="megatron-lm")
    assert found.problem is not None
    assert found.problem.workload.inside == {"server": ("pp",)}
    assert any("package" in said for said in found.assumptions)

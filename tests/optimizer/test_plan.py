"""The front door on real models and odd machines: it ends, its counts add up, its layouts are legal, fit and cost what they say."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete
from paraplan.optimizer.planner import plan
from paraplan.optimizer.result import Plan
from paraplan.optimizer.search import Search
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem
from paraplan.search_spaces.rules import violations
from paraplan.search_spaces.switches import names

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import legal_layouts, price_everything, random_problem

GIB = 2.0**30
FRAME = ("tp", "cp", "pp", "dp", "ep", "etp")


def assert_sound(problem: Problem, found: Plan) -> None:
    """What must hold of every plan, however large the space."""
    certificate = found.certificate
    assert certificate.legal == certificate.scored + certificate.cut_by_bound + certificate.cut_by_memory
    assert certificate.status == "optimal"
    assert certificate.gap == 0.0
    assert certificate.lower_bound_s == pytest.approx(found.plan.step_time_s, rel=1e-9)
    for one in (found.plan, *found.alternatives):
        assert violations(problem, one.layout, peak_bytes=one.memory.peak_gib * GIB) == []
        assert one.devices_used + one.devices_idle == problem.devices
        blocks = problem.model.num_layers + (problem.model.mtp.layers if problem.model.mtp else 0)
        chunks = [stage.chunks[v] for v in range(one.layout.vpp) for stage in one.layout.stages]
        assert sum(_blocks(chunk.layers) + chunk.mtp for chunk in chunks) == blocks
        assert all(_blocks(chunk.layers) + chunk.mtp >= 1 or chunk.embedding or chunk.loss for chunk in chunks)
    times = [found.plan.step_time_s, *(one.step_time_s for one in found.alternatives)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    frames = {tuple(getattr(one.layout, name) for name in FRAME) for one in (found.plan, *found.alternatives)}
    assert len(frames) == len(times)


def _blocks(layers: tuple[int, int] | None) -> int:
    return layers[1] - layers[0] + 1 if layers else 0


ODD = {
    "72 devices of a rack": ("qwen3-30b-a3b", "gb200-nvl72", 72, 288, ""),
    "71 of them": ("qwen3-30b-a3b", "gb200-nvl72", 71, 284, "micro_batch=1|2"),
    "384 dies, 61 layers and MTP": ("deepseek-v3", "cloudmatrix-384", 384, 3072, "micro_batch=1,offload=optimizer:1"),
    "15488 devices in cabinets of 88": ("moe-10t", "atlas-960-superpod", 15488, 15488, "micro_batch=1"),
    "126 layers over 16 stages": ("llama-3.1-405b", "gb200-nvl72", 576, 576, "pp=16,micro_batch=1"),
    "61 layers over 16 stages of two": ("kimi-k2", "hgx-h800", 1024, 1024, "pp=16,vpp=2,micro_batch=1"),
    "three quarters of a server": ("llama-3.1-8b", "hgx-h100", 6, 48, ""),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name: str) -> None:
    model, cluster, devices, batch, fix = ODD[name]
    problem = build_problem(model, cluster, devices, batch, 4096, fix=fix)
    assert_sound(problem, plan(problem, top=3))


@pytest.mark.parametrize(
    ("seed", "share"),
    [*((seed, None) for seed in (3, 5, 18, 24, 27, 28, 30)), (6, 5), (14, 7)],  # shares of which servers are no part
)
def test_plan_is_the_best_of_all_layouts(seed: int, share: int | None) -> None:
    problem = random_problem(seed).model_copy(update={"per_supernode": share})
    model = CostModel(problem)
    best = price_everything(problem, model, legal_layouts(problem)).best_by_frame(model.usable_bytes)
    found = plan(problem, top=4, spread=False)  # as they lie, like those that are listed
    assert_sound(problem, found)
    times = [found.plan.step_time_s, *(one.step_time_s for one in found.alternatives)]
    assert times == pytest.approx(best[:4], rel=1e-9, abs=0)


def test_a_plan_evaluates_to_itself() -> None:
    """`evaluate` of a plan's layout, stages given, is what `plan` said."""
    problem = build_problem("deepseek-moe-16b", "hgx-h100", 24, 96, 4096)
    found = plan(problem).plan
    again, broken = evaluate(problem, found.layout)
    assert broken == ()
    assert again.step_time_s == found.step_time_s
    assert again.memory == found.memory
    assert again.breakdown_s == found.breakdown_s


def test_evaluate_gives_a_layout_the_stages_that_the_search_would() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    chosen = {"tp": 2, "pp": 4, "dp": 2, "edp": 4, "num_microbatches": 32, "sequence_parallel": True}
    priced, broken = evaluate(problem, Layout(**chosen))  # type: ignore[arg-type]
    assert broken == ()
    fixed = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix="tp=2,pp=4,dp=2,cp=1,vpp=1,micro_batch=1,recompute=none")
    assert plan(fixed).plan.step_time_s <= priced.step_time_s * (1 + 1e-9)
    assert priced.layout.stages


def test_a_limit_never_makes_the_plan_faster() -> None:
    """A smaller space has no better layout; undoing what the plan chose leads to the next best frame or worse."""
    free = plan(build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096))
    chosen = free.plan.layout
    limited = plan(build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, forbid=f"dp=={chosen.dp}"))
    assert limited.plan.layout.dp != chosen.dp
    assert limited.plan.step_time_s >= free.plan.step_time_s
    assert limited.certificate.legal < free.certificate.legal


@pytest.mark.parametrize(("model", "devices", "batch"), [("llama-3.1-8b", 8, 16), ("qwen3-30b-a3b", 64, 512)])
def test_no_vpp_alone_makes_the_plan_faster(model: str, devices: int, batch: int) -> None:
    """What the search's rule cuts a little slower may be the fastest once it is cut anew."""
    free = plan(build_problem(model, "hgx-h100", devices, batch, 8192)).plan.step_time_s
    for vpp in (2, 3, 4, 6):
        with suppress(Infeasible):
            fixed = plan(build_problem(model, "hgx-h100", devices, batch, 8192, fix=f"vpp={vpp}"), bound_cuts=False)
            assert fixed.plan.step_time_s > free * (1.0 - 1e-9)


@pytest.mark.parametrize(("model", "cluster", "devices", "batch", "length"), [("llama-3.1-8b", "hgx-h100", 64, 8, 4095)])
def test_a_length_that_tp_does_not_divide_is_no_bar_to_tp(model: str, cluster: str, devices: int, batch: int, length: int) -> None:
    """Sequence parallelism is left off there, as a user would: the plan is as fast as one told to."""
    free, off = (plan(build_problem(model, cluster, devices, batch, length, fix=fix)) for fix in ("", "sequence_parallel=false"))
    assert free.plan.layout.tp > 1 and not free.plan.layout.sequence_parallel
    assert free.plan.step_time_s == pytest.approx(off.plan.step_time_s, rel=1e-9)


def test_more_memory_never_makes_the_plan_slower() -> None:
    """Exactly with the cuts that the search's rule gives; moving blocks from there can end a thousandth apart."""
    times, by_rule = [], []
    for margin in (0.4, 0.2, 0.0):
        problem = build_problem("llama-3.1-70b", "hgx-h100", 64, 128, 4096, memory_margin=margin, fix="tp=4|8,micro_batch=1")
        times.append(plan(problem).plan.step_time_s)
        by_rule.append(Search(Space(problem), CostModel(problem)).run().best[0].step_time_s)
    assert by_rule == sorted(by_rule, reverse=True)
    assert all(mine <= rule for mine, rule in zip(times, by_rule, strict=True))
    assert all(after <= before * 1.001 for before, after in pairwise(times))


def test_a_plan_keeps_clear_of_the_band_of_doubt_unless_told_otherwise() -> None:
    """Memory decides here: by default every plan is sure to fit; with no margin a faster one may be had, and is called unsure."""
    words: dict[str, Any] = {"fix": "micro_batch=1,recompute=none"}
    sure = plan(build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, **words), top=3)
    free = sure.plan.memory.capacity_gib - 0.8
    for each in (sure.plan, *sure.alternatives):
        assert each.memory.verdict == "fits" and each.memory.peak_gib <= 0.85 * free + 1e-9
    close = plan(build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, memory_margin=0.0, **words)).plan
    assert close.step_time_s < sure.plan.step_time_s
    assert close.memory.verdict == "unsure" and close.memory.peak_gib <= free


def test_evaluate_refuses_only_what_a_device_does_not_hold() -> None:
    """Within the band below the device's memory a layout is legal and unsure; above it, or above the user's margin, it is not."""
    words: dict[str, Any] = {"fix": "micro_batch=1,recompute=none"}
    problem = build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, **words)
    close = plan(build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, memory_margin=0.0, **words)).plan.layout
    priced, broken = evaluate(problem, close)
    assert broken == () and priced.memory.verdict == "unsure"
    own = build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, memory_margin=0.15, **words)
    assert any("peak memory" in sentence for sentence in evaluate(own, close)[1])
    doubled = {"micro_batch": 2, "num_microbatches": close.num_microbatches // 2}
    over, broken = evaluate(build_problem("llama-3.1-70b", "hgx-h100", 64, 128, 8192), close.model_copy(update=doubled))
    assert over.memory.peak_gib > over.memory.capacity_gib and any("peak memory" in sentence for sentence in broken)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"schedule": "zb-v"}, "schedule = zb-v has two chunks on every stage: vpp is 2, not 1."),
        ({"schedule": "dualpipe", "dp": 16, "num_microbatches": 4}, "2·pp"),
        ({"schedule": "dualpipev", "vpp": 2, "dp": 16, "num_microbatches": 4}, "2·pp"),
        ({"schedule": "zb-h1", "pp": 1}, "pp = 1 is not more than 1"),
        ({"schedule": "1f1b", "vpp": 2}, "schedule = 1f1b is not interleaved"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_it_is_priced(layout: dict[str, Any], words: str) -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    with pytest.raises(Infeasible) as caught:
        evaluate(problem, Layout(**{"pp": 4, "dp": 4, "num_microbatches": 16, "sequence_parallel": False} | layout))
    assert any(words in reason for reason in caught.value.reasons)


SIZES = {
    **{name: st.sampled_from(("1", "2", "3", "4")) for name in ("tp", "cp", "etp", "micro_batch")},
    "ep": st.sampled_from(("1", "2", "3", "8", "16")),
    "pp": st.sampled_from(("1", "2", "4")),
    "vpp": st.sampled_from(("1", "1", "3")),
}


@given(sizes=st.fixed_dictionaries(SIZES))
@settings(max_examples=80, deadline=None)
@pytest.mark.filterwarnings("error")
def test_any_layout_is_priced_or_refused_in_words(sizes: dict[str, str]) -> None:
    """Whatever a person writes down: a finite step with the rules that it breaks, or why there is nothing to price."""
    problem = build_problem("qwen3-30b-a3b", "hgx-h100", 24, 48, 4096)
    try:
        priced, _ = evaluate(problem, complete(problem, sizes))
    except Infeasible as refused:
        assert refused.reasons
        return
    assert np.isfinite(priced.step_time_s) and priced.step_time_s > 0.0 and 0.0 < priced.mfu < 1.0


def test_questions_without_an_answer() -> None:
    problem = build_problem("llama-3.1-405b", "hgx-h100", 8, 64, 4096)
    with pytest.raises(Infeasible) as caught:
        plan(problem)
    assert "need" in caught.value.summary
    with pytest.raises(InputError, match="engine"):
        plan(problem, engine="guess")
    with pytest.raises(InputError, match="top"):
        plan(problem, top=0)


def with_tp_overlap(problem: Problem) -> Problem:
    """The same problem on a stack that can hide what TP sends."""
    overlap = problem.stack.overlap.model_copy(update={"tp": 0.6})
    return problem.model_copy(update={"stack": problem.stack.model_copy(update={"overlap": overlap})})


@pytest.mark.parametrize("seed", [seed for seed in range(900, 930) if Space(random_problem(seed)).listed])
def test_overlap_that_is_switched_off_is_never_faster_nor_leaner(seed: int) -> None:
    """Why layouts with a switch off need not be looked at: they are counted among those cut by the bound."""
    problem = with_tp_overlap(random_problem(seed))
    space = Space(problem)
    table, _ = space.layouts(np.arange(len(space.frames)))
    rng = np.random.default_rng(seed)
    for row in rng.choice(len(table), size=min(4, len(table)), replace=False).tolist():
        layout = table.layout(row, problem.model.num_layers)
        on, _ = evaluate(problem, layout)
        for switch in names(problem):
            off, _ = evaluate(problem, on.layout.model_copy(update={"overlap": {switch: 0.0}}))
            assert off.step_time_s >= on.step_time_s * (1 - 1e-12), switch
            assert off.memory.peak_gib == on.memory.peak_gib
            assert off.layout.overlap[switch] == 0.0


def test_overlap_that_no_stack_knows_is_refused() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 16, 8192)
    with pytest.raises(InputError, match="overlap 'tq' is not one of tp, "):
        evaluate(problem, Layout(tp=8, num_microbatches=16, sequence_parallel=True, overlap={"tq": 0.0}))


@pytest.mark.parametrize("fix", ["schedule=dualpipe", "cp_type=a2a+p2p"])
def test_what_the_search_does_not_list_is_refused_in_words(fix: str) -> None:
    problem = build_problem("qwen3-0.6b", "atlas-800t-a2", 8, 16, 4096, "mindformers", fix=fix)
    with pytest.raises(InputError, match="plan searches"):
        plan(problem)

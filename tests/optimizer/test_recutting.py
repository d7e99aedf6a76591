"""Chunks cut again: never slower than by the rule, said in words that come back, and proved finitely whatever fits."""

from __future__ import annotations

import numpy as np
import pytest
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.planner import evaluate, plan, with_default_stages
from paraplan.optimizer.recutting import downhill, proved
from paraplan.optimizer.rounds import paces_s, round_starts
from paraplan.search_spaces.cutting import Cutting
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import FLAG_RANK_ORDERS, Problem

WORDS = "tp=2,pp=4,vpp=3,recompute=full"  # 32 layers in 12 chunks


def llama(memory: float = 1.0) -> Problem:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096)
    accelerator = problem.cluster.accelerator
    held = accelerator.memory_bytes.model_copy(update={"value": accelerator.memory_bytes.value * memory})
    cluster = problem.cluster.model_copy(update={"accelerator": accelerator.model_copy(update={"memory_bytes": held})})
    return problem.model_copy(update={"cluster": cluster})


def test_moving_blocks_never_makes_a_layout_slower_and_the_bound_is_below() -> None:
    problem = llama()
    model = CostModel(problem)
    start = with_default_stages(model, complete(problem, parse_layout(WORDS)))
    step_s, moved = downhill(model, start)
    by_rule, _ = evaluate(problem, start, replayed=False)
    priced, _ = evaluate(problem, moved, replayed=False)
    assert priced.step_time_s == pytest.approx(step_s, rel=1e-12) and step_s <= by_rule.step_time_s
    found = proved(model, start)
    assert found.bound_s <= found.step_time_s <= step_s * (1 + 1e-12)


def test_a_layout_that_does_not_fit_keeps_its_price_and_a_finite_gap() -> None:
    problem = llama(memory=0.1)
    start = with_default_stages(CostModel(problem), complete(problem, parse_layout(WORDS)))
    found = proved(CostModel(problem), start)
    assert found.layout == start and np.isfinite(found.gap) and found.gap >= 0.0


def test_evaluate_cuts_a_layout_as_its_plan_does() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096, fix="tp=2,pp=4,vpp=3,micro_batch=1,recompute=full")
    best = plan(problem, top=1).plan
    bare = best.layout.model_copy(update={"stages": ()})
    assert evaluate(problem, bare, replayed=False)[0].step_time_s == pytest.approx(best.step_time_s, rel=1e-9)


def test_stages_are_read_as_a_layout_string_and_as_numbers_of_layers() -> None:
    problem = llama()
    string = complete(problem, parse_layout("tp=2,pp=4,stages=Et*8|(t*8|)*2t*8L"))
    numbers = complete(problem, parse_layout("tp=2,pp=4,stages=8+8+8+8"))
    assert string == numbers and string.vpp == 1
    bare = complete(problem, parse_layout("pp=2,stages=E|t*16|t*16|L"))
    assert (bare.vpp, bare.schedule) == (2, "interleaved") and bare.stages[0].chunks[0].layers is None
    for words, said in (
        ("pp=4,stages=8+8+8+9", "stages hold 33 decoder and 0 MTP layers, the model has 32 and 0"),
        ("pp=4,stages=8+8+16", "3 chunks"),
        ("pp=4,vpp=2,stages=8+8+8+8", "4 chunks, pp·vpp is 4·2"),
    ):
        with pytest.raises(InputError, match=said):
            complete(problem, parse_layout(words))


def test_rounds_keep_the_least_sum_of_paces() -> None:
    """18 equal layers in three rounds of four chunks, a head of two layers: by hand 1 + 2 + 2 at best, E|t|t|t first."""
    cutting = Cutting(4, 3, 18, 18, bare=(True, True))
    work_s, head_s = np.arange(19.0)[None, :], np.array([2.0])
    starts = round_starts(work_s, head_s, cutting)
    assert starts[0, 0] == 0 and starts[0, -1] == 18
    held = np.diff(starts[0]) + np.array([0, 0, 2])
    assert np.ceil(held / 4).sum() == 5
    cuts = np.array([[0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 18]])
    assert paces_s(work_s, head_s, cuts, 4)[0] == 5.0


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "zb-h1", "dualpipe"])
def test_schedules_that_split_passes_are_cut_downhill_and_bounded(schedule: str) -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096, "torchtitan")
    model = CostModel(problem)
    start = with_default_stages(model, complete(problem, parse_layout(f"tp=2,pp=4,schedule={schedule}")))
    by_rule, moved = (evaluate(problem, one, replayed=False)[0] for one in (start, downhill(model, start)[1]))
    found = proved(model, start)
    assert moved.layout.schedule == schedule and moved.step_time_s <= by_rule.step_time_s * (1.0 - 0.001 * (schedule == "zb-v"))
    assert found.step_time_s == pytest.approx(moved.step_time_s, rel=1e-12) and found.layout == downhill(model, start)[1]
    assert found.bound_s <= found.step_time_s and found.gap < 0.5


def test_no_rank_order_alone_makes_a_plan_faster() -> None:
    """Cuts that a rule makes alike for two orders are moved for both."""
    asked = ("llama-3.1-8b", "hgx-h100", 16, 128, 8192)
    free = plan(build_problem(*asked), top=1, bound_cuts=False).plan.step_time_s
    for order in FLAG_RANK_ORDERS:
        assert plan(build_problem(*asked, fix=f"rank_order={order}"), top=1, bound_cuts=False).plan.step_time_s >= free * (1 - 1e-9)

"""The robust choice: minimax over a regret matrix that is priced exactly, and never worse at its worst than the fastest layout."""

from __future__ import annotations

import json

import numpy as np
import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.incumbent import Setting, searched, times_s
from paraplan.optimizer.planner import plan
from paraplan.optimizer.result import Robust
from paraplan.optimizer.robust import Compared, compare
from paraplan.optimizer.scenarios import Scenario, scenarios, uncertain
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, LayoutTable
from paraplan.search_spaces.quantities import free_bytes

PROFILE = load_profile("h100-80gb-sxm")  # that of all problems here
FIX = "micro_batch=1,vpp=1,recompute=none,offload=none,cp=1|2,tp=1|2|4,pp=1|2|4,optimizer_sharding=zero1,rank_order=tp-cp-ep-dp-pp"


@pytest.fixture(scope="module")
def tried() -> tuple[Setting, list[Scenario], list[Layout], Compared]:
    """A small problem in few scenarios."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix=FIX)
    setting = Setting(problem, PROFILE)
    cases = scenarios(setting, draws=3)
    nominal = [candidate.layout for candidate in searched(setting, 3).best]
    return setting, cases, nominal, compare(cases, nominal)


def test_scenarios_are_nominal_then_each_end_then_draws(tried: tuple[Setting, list[Scenario], list[Layout], Compared]) -> None:
    setting, cases, _, _ = tried
    doubts = uncertain(setting)
    names = [case.name for case in cases]
    ends = [name for name in names if name.endswith((" low", " high"))]
    assert names[0] == "nominal" and names[-3:] == [f"draw {i}" for i in range(1, 4)]
    assert len(names) == 1 + len(ends) + 3 and len(ends) == sum((d.low != d.value) + (d.high != d.value) for d in doubts)
    assert {"efficiency", "scale out efficiency", "step overhead", "server latency"} <= {doubt.name for doubt in doubts}
    assert [case.setting for case in scenarios(setting, draws=3)] == [case.setting for case in cases]


def test_a_scenario_moves_what_it_names_and_nothing_else(tried: tuple[Setting, list[Scenario], list[Layout], Compared]) -> None:
    setting, cases, _, _ = tried
    base = CostModel(setting.problem, setting.profile).problem
    for doubt in uncertain(setting):
        moved = doubt.change(setting, doubt.high)
        stack = CostModel(moved.problem, moved.profile).problem.stack
        name = doubt.name.replace(" ", "_")
        field = name if name in type(stack).model_fields else f"{name}_s"
        if field in type(stack).model_fields:
            assert getattr(stack, field).value == doubt.high
            others = {key for key in type(stack).model_fields if getattr(stack, key) != getattr(base.stack, key)}
            assert others == {field}
    draws = [case for case in cases if case.name.startswith("draw")]
    efficiency = next(doubt for doubt in uncertain(setting) if doubt.name == "efficiency")
    drawn = sorted(CostModel(c.setting.problem, c.setting.profile).problem.stack.efficiency.value for c in draws)
    edges = efficiency.low * (efficiency.high / efficiency.low) ** (np.arange(4) / 3)
    assert all(low <= value <= high for value, low, high in zip(drawn, edges, edges[1:], strict=False))


def test_the_choice_is_minimax_by_brute_force(tried: tuple[Setting, list[Scenario], list[Layout], Compared]) -> None:
    _, cases, nominal, found = tried
    worst = [0.0] * len(found.layouts)
    for case in cases:
        model, least = CostModel(case.setting.problem, case.setting.profile), searched(case.setting).best[0].step_time_s
        for place, layout in enumerate(found.layouts):
            regret = float(model.price(LayoutTable.from_layouts([layout])).step_time_s[0]) / least - 1.0
            assert regret >= -1e-9
            worst[place] = max(worst[place], regret)
    assert found.regrets.max(axis=1) == pytest.approx(worst, abs=1e-8)
    assert worst[found.minimax] == pytest.approx(min(worst), abs=1e-8)
    assert worst[found.minimax] <= worst[0] + 1e-9
    assert found.layouts[0].model_copy(update={"overlap": {}}) == nominal[0]


def test_no_layout_of_the_space_has_a_smaller_worst_regret(tried: tuple[Setting, list[Scenario], list[Layout], Compared]) -> None:
    """Also not one that wins in no scenario: the best of every frame, with its cuts in the nominal one."""
    setting, cases, _, found = tried
    every = [candidate.layout for candidate in searched(setting, 1000).best]
    assert len(every) >= len(found.layouts) - 1
    least = [searched(case.setting).best[0].step_time_s for case in cases]
    times = np.stack([times_s(case.setting, every, free_bytes(setting.problem.cluster)) for case in cases], axis=1)
    regrets = (times / np.array(least) - 1.0).max(axis=1)
    assert found.regrets[found.minimax].max() <= regrets.min() + 1e-9


def test_of_equally_bad_layouts_the_nominally_fastest_is_taken() -> None:
    layout = Layout(sequence_parallel=False)
    times = np.array([[1.0, 3.0], [1.2, 2.0], [1.1, 2.0], [1.3, np.inf]])
    found = Compared((layout,) * 4, times, times.min(axis=0))
    assert found.regrets.max(axis=1)[:3] == pytest.approx([0.5, 0.2, 0.1])
    assert found.minimax == 2 and found.order.tolist() == [2, 1, 0, 3]
    equal = Compared((layout,) * 2, np.array([[1.1, 2.0], [1.0, 2.2]]), np.array([1.0, 2.0]))
    assert equal.minimax == 1
    lost = Compared((layout,) * 2, np.array([[1.1, np.inf], [1.0, np.inf]]), np.array([1.0, np.inf]))
    assert lost.regrets[:, 1].tolist() == [0.0, 0.0] and lost.minimax == 1


def test_experts_imbalance_is_in_doubt_for_moe_models() -> None:
    problem = build_problem("qwen3-30b-a3b", "hgx-h100", 64, 256, 4096)
    setting = Setting(problem, PROFILE)
    doubt = next(doubt for doubt in uncertain(setting) if doubt.name == "expert imbalance")
    assert (doubt.low, doubt.value, doubt.high) == pytest.approx((1.05, 1.1, 1.2))
    assert doubt.change(setting, 1.2).problem.workload.expert_imbalance == 1.2


def test_plan_tells_both_winners(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.robust.scenarios", lambda setting: scenarios(setting, draws=2)[::3])
    monkeypatch.setenv("COLUMNS", "80")
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "64", "--seq-len", "4096"]
    assert main(["plan", *job, "--fix", FIX, "--robust", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "Robust" in out and "worst regret" in out and max(map(len, out.splitlines())) <= 80
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix=FIX)
    found = plan(problem, robust=True)
    assert found.robust is not None
    assert found.robust.nominal.step_time_s == pytest.approx(found.plan.step_time_s, rel=1e-9)
    again, broken = evaluate(problem, found.robust.robust.layout)
    assert again.step_time_s == pytest.approx(found.robust.robust.step_time_s, rel=1e-9) and broken == ()
    assert found.robust.robust.worst is not None and found.robust.nominal.worst is not None
    assert found.robust.robust.worst <= found.robust.nominal.worst + 1e-9
    assert Robust.model_validate(json.loads(found.to_json())["robust"]) == found.robust

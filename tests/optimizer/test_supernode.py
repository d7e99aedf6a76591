"""What a topology rule, lost devices and a reserve cost, each against searches of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.cli import main
from paraplan.optimizer.incumbent import Setting, searched
from paraplan.optimizer.planner import plan
from paraplan.optimizer.rule_prices import keeps, with_inside, with_reserve
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem

JOB = ["llama-3.1-8b", "--cluster", "hgx-h100", "--global-batch", "48", "--seq-len", "4096"]
FEW = ["--fix", "recompute=none|full", "--fix", "micro_batch=1|2", "--fix", "vpp=1"]


def best_s(problem: Problem) -> float:
    """The step of a search by itself."""
    return searched(Setting(problem, load_profile(problem.cluster.accelerator.name))).best[0].step_time_s


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """plan.json of a command that ends well."""
    assert main(["plan", *JOB, *FEW, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def few(devices: int, **limits: Any) -> Problem:
    fixed = "recompute=none|full,micro_batch=1|2,vpp=1"
    fix = ",".join(filter(None, (fixed, limits.pop("fix", ""))))
    return build_problem("llama-3.1-8b", "hgx-h100", devices, 48, 4096, fix=fix, **limits)


def test_a_rule_says_what_it_costs() -> None:
    """TP fixed to 4 and DP to be inside a server of 8: the pipeline has to grow where DP would have."""
    problem = few(32, fix="tp=4", inside="server:dp")
    cost = plan(problem).inside
    assert cost is not None
    assert cost.given
    assert cost.step_time_s == pytest.approx(best_s(problem))
    assert cost.step_time_without_s == pytest.approx(best_s(with_inside(problem, {})))
    assert cost.slower == pytest.approx(cost.step_time_s / cost.step_time_without_s - 1)
    assert cost.slower > 0.01
    assert cost.without is not None
    assert not keeps(problem, cost.without)
    assert cost.proved


def test_the_default_rule_keeps_tp_inside_and_costs_nothing_here() -> None:
    found = plan(few(16), inside_by_default=True)
    assert found.inside is not None
    assert (found.inside.given, found.inside.slower, found.inside.without) == (False, 0.0, None)
    assert found.inside.rule == "server:tp,ep where it fits"
    assert plan(few(16)).inside is None


def test_the_default_rule_says_so_where_it_costs_something() -> None:
    """TP fixed to 16 on servers of 8 leaves nothing that keeps to it; TP 8 or 16 leaves the one inside."""
    alone = plan(few(16, fix="tp=16,pp=1"), inside_by_default=True).inside
    assert alone is not None
    assert not alone.kept


def test_ep_stays_inside_where_it_fits() -> None:
    """EP 16 fits no server of 8, so that it may lie over two unless it has to be inside."""
    problem = build_problem("qwen3-30b-a3b", "hgx-h100", 64, 64, 4096, inside="server:ep?")
    base = plan(build_problem("qwen3-30b-a3b", "hgx-h100", 8, 8, 4096, fix="tp=1,pp=1,ep=8,dp=8")).plan.layout
    wide = base.model_copy(update={"dp": 64, "ep": 16, "edp": 4, "num_microbatches": 1})
    assert keeps(problem, wide)
    assert not keeps(with_inside(problem, {"server": ("ep",)}), wide)


def test_one_device_lost_leaves_dp_3_or_a_spare(capsys: pytest.CaptureFixture[str]) -> None:
    """TP 8 × PP 2 on 64 devices is DP 4; with 63 it is DP 3 on 48, and 15 idle."""
    found = answer(capsys, "--devices", "64", "--lost", "1 device", "--fix", "tp=8,pp=2")
    left = found["devices_left"]
    assert (left["devices"], left["used"], left["idle"]) == (63, 48, 15)
    assert left["free"] == [8] * 7 + [7]
    assert found["plan"]["layout"]["dp"] == 3
    assert found["plan"]["devices_idle"] == 15
    assert left["whole"]["devices_used"] == 64
    assert left["whole"]["step_time_s"] < found["plan"]["step_time_s"] == pytest.approx(left["options"][0]["step_time_s"])
    tokens = 48 * 4096
    assert found["plan"]["tokens_per_s_per_device"] == pytest.approx(tokens / found["plan"]["step_time_s"] / 63)


def test_uneven_supernodes_are_planned_for_the_count_that_is_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--free", "8,8,8,5", "--fix", "tp=4")
    left = found["devices_left"]
    times = [option["step_time_s"] for option in left["options"] if option.get("step_time_s")]
    assert times == sorted(times)
    assert found["plan"]["step_time_s"] == pytest.approx(times[0])
    assert left["used"] + left["idle"] == 29
    for option in left["options"]:
        if option.get("step_time_s"):
            assert option["step_time_s"] == pytest.approx(best_s(few(option["devices"], fix="tp=4"))), option["words"]


def test_a_slow_device_is_waited_for_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--devices", "16", "--slow", "device:0.5")
    left = found["devices_left"]
    waiting = next(o for o in left["options"] if o["devices"] == 16)
    assert "without the slow one" in left["options"][0]["words"]
    assert waiting["step_time_s"] > left["options"][0]["step_time_s"] > left["whole"]["step_time_s"]


def test_a_reserve_says_what_its_last_gib_costs() -> None:
    problem = few(8, fix="tp=1", reserved_gib=30.0)
    found = plan(problem)
    price = found.reserve
    assert price is not None
    step = found.plan.step_time_s
    assert price.less_s == pytest.approx(best_s(with_reserve(problem, 29.0)))
    assert price.more_s == pytest.approx(best_s(with_reserve(problem, 31.0)))
    assert price.proved
    assert price.price_s_per_gib == pytest.approx(step - price.less_s, abs=1e-9)
    assert price.next_s_per_gib == pytest.approx(price.more_s - step, abs=1e-9)
    assert found.plan.memory.usable_gib == pytest.approx(plan(few(8, fix="tp=1")).plan.memory.usable_gib - 30, abs=0.01)


@pytest.mark.parametrize(
    ("flags", "mentioned"),
    [
        ([], "--devices"),
        (["--devices", "16", "--free", "8,7"], "15"),
        (["--devices", "16", "--lost", "3 moons"], "moon"),
        (["--devices", "16", "--lost", "0 devices"], "no loss"),
        (["--devices", "16", "--slow", "device:2"], "device:2"),
        (["--devices", "16", "--slow", "level=rack:0.5"], "rack"),
        (["--devices", "16", "--reserve", "90"], "reserve"),
        (["--free", "8,9"], "9 devices"),
        (["--devices", "16", "--inside", "server:dp?"], "dp?"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(flags: list[str], mentioned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert mentioned in err

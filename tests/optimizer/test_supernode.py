"""What a topology rule, lost devices and a reserve cost, each against searches of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.cli import main
from paraplan.optimizer.incumbent import Setting, searched
from paraplan.optimizer.leftover import Left
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.terminal import render
from paraplan.optimizer.reports.wording import seconds
from paraplan.optimizer.result import Plan
from paraplan.optimizer.rule_prices import keeps, with_inside, with_reserve
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem
from rich.console import Console

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


def test_what_one_lost_device_leaves_is_told_in_a_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """512 devices less one, TP 8 × PP 16: DP 3 on 384, or DP 4 with a spare; TP 8 in shares of 7 is told apart."""
    fixed = "tp=8,pp=16,cp=1,micro_batch=1,vpp=1,recompute=full"
    asked = ["llama-3.1-70b", "--cluster", "hgx-h100", "--global-batch", "384", "--seq-len", "4096", "--fix", fixed]
    assert main(["plan", *asked, "--devices", "512", "--lost", "1 device", "--top", "1", "--json"]) == 0
    found = Plan.model_validate_json(capsys.readouterr().out)
    left = found.devices_left
    assert left is not None and left.whole is not None and left.whole.step_time_s is not None
    assert (left.devices, left.used, left.idle, left.whole.devices_used) == (511, 384, 127, 512)
    render(found, Console(width=100))
    out = " ".join(capsys.readouterr().out.split())
    assert "llama-3.1-70b on 511 × h100" in out
    less = 1.0 - left.whole.step_time_s / found.plan.step_time_s
    assert (
        "Of 512 devices 511 are left: the plan uses 384 of them as TP 8 × PP 16 × DP 3 and leaves 127 idle, "
        f"{seconds(found.plan.step_time_s)} a step. No legal layout that fits uses more of them. "
        f"With a spare in place of what is lost, 512 as TP 8 × PP 16 × DP 4: {seconds(left.whole.step_time_s)}, "
        f"{100 * less:.1f} % less."
    ) in out
    sevens = next(option for option in left.options if option.per_supernode == 7)
    assert sevens.step_time_s is not None and sevens.step_time_s > 2 * found.plan.step_time_s
    assert f"448 as 7 in each of 64 supernodes {seconds(sevens.step_time_s)}" in out


def test_what_idle_devices_beat_is_the_best_that_uses_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 29 devices the plan leaves some idle: the fastest layout on more of them, searched for by itself, is slower."""
    found = answer(capsys, "--free", "8,8,8,5")
    left = found["devices_left"]
    (more,) = [option for option in left["options"] if option["least_used"]]
    assert more["devices_used"] > left["used"] == more["least_used"] - 1
    forbidden = few(29).workload.model_copy(update={"forbid": (f"tp*cp*pp*dp <= {left['used']}",)})
    assert more["step_time_s"] == pytest.approx(best_s(few(29).model_copy(update={"workload": forbidden})))
    assert more["step_time_s"] > found["plan"]["step_time_s"]


def test_uneven_supernodes_are_planned_for_the_count_that_is_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--free", "8,8,8,5", "--fix", "tp=4")
    left = found["devices_left"]
    times = [option["step_time_s"] for option in left["options"] if option.get("step_time_s") and not option["least_used"]]
    assert times == sorted(times)
    assert found["plan"]["step_time_s"] == pytest.approx(times[0])
    assert left["used"] + left["idle"] == 29
    for option in left["options"]:
        if option.get("step_time_s") and not option["least_used"]:
            lying = few(option["devices"], fix="tp=4").model_copy(update={"per_supernode": option["per_supernode"]})
            assert option["step_time_s"] == pytest.approx(best_s(lying)), option["words"]


def test_shares_that_were_not_tried_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """8, 5 and 3 in three servers at once are no way to go on that is planned for: what is said of more devices is not of that."""
    assert main(["plan", *JOB, *FEW, "--free", "8,5,3", "--fix", "tp=2", "--quiet"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Equal shares in all supernodes but a last were tried, which hold 13 at most" in out
    assert "in such shares that" in out
    assert "in no other shares" in out
    assert main(["plan", *JOB, *FEW, "--free", "8,8,2", "--fix", "tp=2", "--quiet"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "were tried, which hold" not in out and "in no other shares" not in out


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
    assert price.unreserved_s == pytest.approx(best_s(with_reserve(problem, 0.0)))
    assert found.plan.memory.usable_gib == pytest.approx(plan(few(8, fix="tp=1")).plan.memory.usable_gib - 30, abs=0.01)


@pytest.mark.parametrize("reserved", [2.0, 30.0])
def test_a_reserve_says_where_the_step_changes(reserved: float, capsys: pytest.CaptureFixture[str]) -> None:
    """At the two reserves that are named, and a MiB below each, searches of their own take what is said, to a thousandth."""
    problem = few(8, fix="tp=1", reserved_gib=reserved)
    found = plan(problem)
    price, mib = found.reserve, 1 / 1024
    assert price is not None and price.until_gib is not None and price.after_s is not None
    assert price.since_gib <= reserved < price.until_gib
    assert best_s(with_reserve(problem, price.until_gib)) == pytest.approx(price.after_s)
    assert price.after_s > found.plan.step_time_s * 1.001
    assert best_s(with_reserve(problem, price.until_gib - mib)) == pytest.approx(found.plan.step_time_s, rel=1e-3)
    assert best_s(with_reserve(problem, price.since_gib)) == pytest.approx(found.plan.step_time_s, rel=1e-3)
    if price.before_s is None:
        assert price.since_gib == 0.0
    else:
        assert best_s(with_reserve(problem, price.since_gib - mib)) == pytest.approx(price.before_s)
        assert price.before_s < found.plan.step_time_s * 0.999
    render(found, Console(width=100))
    out = " ".join(capsys.readouterr().out.split())
    assert f"from {price.until_gib:.3f} GiB" in out
    assert ("The 2 GiB cost nothing; up to" in out) == (reserved == 2.0)


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


def test_what_idle_devices_beat_is_searched_for_in_rounded_shares_too() -> None:
    """Pipelines inside racks: 142 devices as 71 in each have one of 71 stages, 136 as 68 in each one of 17 that is faster."""
    asked = "tp=1|2,pp=8|17|71,vpp=1|6,cp=1,micro_batch=1,recompute=none|selective:layernorm"
    given = build_problem("llama-3.1-70b", "gb200-nvl72", 144, 256, 4096, fix=asked, inside="supernode:pp")
    found = plan(given, top=1, left=Left((72, 71), whole=144))
    assert found.devices_left is not None
    more = [each for each in found.devices_left.options if (each.devices_used or 0) > found.plan.devices_used]
    fastest = min(more, key=lambda each: each.step_time_s or 0.0)
    assert (found.plan.devices_used, fastest.devices_used) == (128, 136)

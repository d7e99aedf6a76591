"""A plain count of devices: how they lie on supernodes, which of them stay idle, and what that beats."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.cli import main
from paraplan.optimizer.found import Found
from paraplan.optimizer.incumbent import Setting, searched
from paraplan.optimizer.planner import plan
from paraplan.optimizer.result import Plan
from paraplan.optimizer.rule_prices import faster
from paraplan.search_spaces.cluster import ClusterSpec
from paraplan.search_spaces.degraded import spreads, supernode_counts
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Problem

FEW = "recompute=none,micro_batch=1,vpp=1,schedule=1f1b,cp=1"


def mixture(devices: int, fix: str) -> Problem:
    return build_problem("qwen3-30b-a3b", "gb200-nvl72", devices, 256, 4096, fix=f"{FEW},{fix}")


def planned(problem: Problem) -> Plan:
    """As the command plans for --devices alone."""
    return plan(problem, top=2)


def shares(cluster: ClusterSpec, devices: int) -> list[tuple[int, int]]:
    """Every spread: devices in all, and in each supernode."""
    return [(count, supernode_counts(cluster, count, share)[0]) for count, share in spreads(cluster, devices)]


@pytest.mark.parametrize(
    ("cluster", "devices", "expected"),
    [
        ("gb200-nvl72", 256, [(256, 64), (256, 72)]),
        ("gb200-nvl72", 72, [(72, 72)]),
        ("gb200-nvl72", 276, [(276, 69), (276, 72), (272, 68), (256, 64)]),
        ("gb200-nvl72", 576, [(576, 72), (512, 64)]),
        ("gb200-nvl72", 300, [(300, 60), (300, 72), (300, 64), (160, 32)]),  # comes out even, and 64 of 72 may lie on no more
        ("gb200-nvl72", 577, [(577, 72), (576, 64)]),
        ("gb200-nvl72", 511, [(511, 72), (511, 64), (480, 60), (256, 32)]),
        ("hgx-h100", 100, [(100, 8)]),
        ("gb200-nvl72", 500, [(500, 72), (476, 68), (448, 64)]),
        ("cloudmatrix-384", 1000, [(1000, 500), (1000, 768), (992, 496), (960, 480), (896, 448), (768, 384), (512, 256)]),
        ("cloudmatrix-384", 1152, [(1152, 576), (1152, 768), (1024, 512)]),
        ("cloudmatrix-384", 513, [(513, 513)]),
        ("atlas-960-superpod", 15_488, [(15_488, 15_488)]),
    ],
)
def test_devices_lie_as_allocated_or_in_shares_that_groups_tile(
    cluster: str, devices: int, expected: list[tuple[int, int]]
) -> None:
    spec = load_cluster(cluster)
    assert shares(spec, devices) == expected
    assert spreads(spec, devices)[0] == (devices, None)
    fewest = len(supernode_counts(spec, devices))
    assert all(len(supernode_counts(spec, *way)) <= fewest for way in spreads(spec, devices))


def test_more_devices_are_never_slower() -> None:
    """Racks of 72 in part and whole, filled and not: what lies on fewer devices may lie there with some more of them idle."""
    counts = (72, 80, 128, 144, 256, 300, 315, 320)
    steps = [planned(mixture(devices, "ep=8|64,tp=1,pp=1|2")).plan.step_time_s for devices in counts]
    assert all(more <= fewer * 1.001 for fewer, more in itertools.pairwise(steps)), dict(zip(counts, steps, strict=True))


def test_devices_that_leave_a_supernode_part_empty_may_lie_evenly_on_more() -> None:
    """1,024 on racks of 72 fill 14 and 16 devices of another, or 64 in each of 16; 4,608 fill 64 racks and ask for no more."""
    spec = load_cluster("gb200-nvl72")
    assert shares(spec, 1024) == [
        (1024, 72),
        (1024, 64),
        (1020, 68),
    ]
    assert shares(spec, 4608) == [(4608, 72), (4096, 64)]
    full = spec.model_copy(update={"max_devices": 15 * 72})
    assert (1024, 64) not in shares(full, 1024)


def test_experts_that_straddle_racks_of_72_lie_whole_in_64_of_each() -> None:
    """EP 64 on 144 devices: on 72 in each of two racks every group crosses; with 8 of each rack idle none does."""
    problem = mixture(144, "ep=64,tp=1,pp=1")
    found = planned(problem)
    alone = plan(mixture(128, "ep=64,tp=1,pp=1"), top=1)
    assert found.plan.step_time_s == pytest.approx(alone.plan.step_time_s, rel=1e-9)
    assert (found.plan.devices_used, found.plan.devices_idle, found.problem.devices) == (128, 16, 128)
    assert found.plan.tokens_per_s_per_device == pytest.approx(alone.plan.tokens_per_s_per_device * 128 / 144)
    left = found.devices_left
    assert left is not None
    assert left.open
    assert (left.free, left.used, left.idle) == ((72, 72), 128, 16)
    lying, filled, *_ = left.options
    assert (lying.words, lying.step_time_s) == ("128 as 64 in each of 2 supernodes", found.plan.step_time_s)
    filled_s = searched(Setting(problem, load_profile("gb200"))).best[0].step_time_s
    assert filled.words == "144 as 72 in each of 2 supernodes"
    assert filled.step_time_s == pytest.approx(filled_s)
    assert filled_s > 1.1 * found.plan.step_time_s
    assert found.certificate.status == "optimal"
    assert "devices: 128 as 64 in each of 2 supernodes; 144 as 72 in each of 2 supernodes" in found.certificate.space


def test_devices_are_shown_as_the_plan_lays_them(capsys: pytest.CaptureFixture[str]) -> None:
    """300 on racks of 72 would be allocated as 60 in each of 5; EP 64 wants 64 in each."""
    job = ["qwen3-30b-a3b", "--cluster", "gb200-nvl72", "--devices", "300", "--global-batch", "512", "--seq-len", "4096"]
    assert main(["plan", *job, "--fix", f"{FEW},ep=64,tp=1,pp=1", "--quiet"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "as planned 4 × 64, 1 × 44 256 used, 44 idle" in out
    assert "as allocated" not in out


def test_a_job_is_judged_where_its_layout_is_fastest() -> None:
    """The plan's own layout read back: 64 in each of 16 racks, as planned, and not 14 racks of 72 and 16 in another."""
    found = planned(build_problem("qwen3-30b-a3b", "gb200-nvl72", 1024, 1024, 4096, fix=f"{FEW},ep=64,tp=1,pp=1"))
    assert found.problem.per_supernode == 64
    read = f"tp=1,ep=64,pp={found.plan.layout.pp},dp={found.plan.layout.dp}"
    asked = {"devices": 1024, "global_batch": found.problem.workload.global_batch, "seq_len": 4096, "stack": "megatron-lm"}
    judged = check(read, "qwen3-30b-a3b", "gb200-nvl72", best=False, **asked)
    assert judged.priced is not None
    assert judged.priced.step_time_s == pytest.approx(found.plan.step_time_s)
    said = "the devices are 1,024 as 64 in each of 16 supernodes: with 1,024 as 72"
    assert any(each.startswith(said) for each in judged.assumptions)


def test_a_spread_that_is_no_faster_is_only_named() -> None:
    """PP 18 uses all 144 devices in stages of 8, whichever rack they are in."""
    found = planned(mixture(144, "ep=8,tp=1,pp=18,dp=8"))
    left = found.devices_left
    assert left is not None
    assert (left.used, left.idle, found.problem.devices) == (144, 0, 144)
    assert [(option.words, option.beaten) for option in left.options] == [
        ("144 as 72 in each of 2 supernodes", False),
        ("128 as 64 in each of 2 supernodes", True),
    ]


@pytest.mark.parametrize(("fix", "fuller"), [("tp=4,pp=3|25", 100), ("tp=8,pp=1|2|3", None)])
def test_idle_devices_say_what_they_beat(fix: str, fuller: int | None) -> None:
    """Of 100 devices on servers of 8 a pipeline of 3 uses 96: faster than one of 25, which uses all; at TP 8 nothing uses more."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 100, 40, 8192, fix=f"{FEW},{fix}")
    left = planned(problem).devices_left
    assert left is not None
    assert (left.used, left.idle) == (96, 4)
    own, more = left.options
    assert (own.words, more.words) == ("100 as 8 in each of 12 supernodes, 4 in another", "with more than 96 used")
    assert own.step_time_s is not None
    assert more.devices_used == fuller
    assert more.step_time_s is None or more.step_time_s > own.step_time_s


def test_a_rule_costs_what_the_plan_without_it_takes_on_its_own_spread() -> None:
    """DP inside a rack keeps the pipeline of 18 on all 144 devices; without that, EP 64 on 64 of every 72 is faster."""
    fix, either = f"{FEW},tp=1,ep=8|64,pp=1|18", "pp == 18 or ep == 64"
    asked = {"fix": fix, "constraint": either}
    kept = planned(build_problem("qwen3-30b-a3b", "gb200-nvl72", 144, 256, 4096, inside="supernode:dp", **asked))
    free = planned(build_problem("qwen3-30b-a3b", "gb200-nvl72", 144, 256, 4096, **asked))
    cost = kept.inside
    assert cost is not None
    assert (kept.plan.devices_used, free.plan.devices_used) == (144, 128)
    assert (cost.step_time_s, cost.step_time_without_s) == (kept.plan.step_time_s, free.plan.step_time_s)
    assert cost.step_time_without_s < cost.step_time_s
    assert cost.without is not None
    assert cost.without.devices == 128


def test_nothing_is_said_where_there_is_one_way_and_none_is_idle() -> None:
    assert planned(build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix=f"{FEW},tp=2")).devices_left is None


def test_a_plan_that_fills_no_supernode_is_priced_as_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """evaluate --layout plan.json with the plan's own options, for devices that the plan leaves idle in every supernode."""
    asked = ["qwen3-30b-a3b", "--cluster", "gb200-nvl72", "--devices", "576", "--global-batch", "512", "--seq-len", "4096"]
    found = planned(build_problem("qwen3-30b-a3b", "gb200-nvl72", 576, 512, 4096, fix=f"{FEW},ep=64,tp=1,pp=1"))
    assert (found.plan.devices_used, found.plan.devices_idle) == (512, 64)
    file = tmp_path / "plan.json"
    file.write_text(found.to_json(), encoding="utf-8")
    assert main(["evaluate", *asked, "--layout", str(file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["plan"]
    assert again["step_time_s"] == pytest.approx(found.plan.step_time_s, rel=1e-12)


def test_a_spread_that_was_not_searched_to_the_end_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit ends the first look at the other spread: that nothing faster was found there is no proof that nothing is."""
    monkeypatch.setattr("paraplan.optimizer.spreading.faster", cut_short)
    monkeypatch.setenv("COLUMNS", "160")
    job = ["qwen3-30b-a3b", "--cluster", "gb200-nvl72", "--devices", "144", "--global-batch", "256", "--seq-len", "4096"]
    assert main(["plan", *job, "--fix", f"{FEW},ep=8,tp=1,pp=18,dp=8", "--quiet"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "nothing faster found, not searched to the end" in words


def test_ways_to_go_on_that_were_not_searched_to_the_end_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was found on them in time, where all fit."""
    monkeypatch.setattr("paraplan.optimizer.leftover.faster", cut_short)
    monkeypatch.setenv("COLUMNS", "160")
    job = ["qwen3-30b-a3b", "--cluster", "gb200-nvl72", "--free", "72,72", "--lost", "4 device", "--global-batch", "256"]
    assert main(["plan", *job, "--seq-len", "4096", "--fix", f"{FEW},ep=64,tp=1,pp=1", "--quiet"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "nothing fits" not in words and words.count("nothing found, not searched to the end") > 2
    assert "Not proved: a layout could be as fast as" in words


def cut_short(setting: Setting, step_s: float, limit_s: float | None, progress: object) -> Found:
    return replace(faster(setting, step_s, limit_s), best=[], complete=False)

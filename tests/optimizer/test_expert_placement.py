"""Measured loads as files, experts of a plan placed, and the command that does it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.expert_loads import ExpertLoads, imbalance_by_ep, read_loads, read_pairs
from paraplan.optimizer.expert_placement import ExpertPlacement, expert_site, place_experts
from paraplan.optimizer.imbalance_steps import STEPS_AT, steps_at
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.experts import render_experts
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Layout, Problem
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the sample lies beside them
from sample_plan import sample_layout, sample_plan

LAYOUT = Layout(dp=32, ep=32, edp=1, num_microbatches=8)


def small_problem() -> Problem:
    """128 experts over 32 devices of four servers."""
    return build_problem("qwen3-30b-a3b", "hgx-h100", 32, 256, 4096)


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes loads of two layers, one skewed and one even, in two windows, and a plan; returns the command's arguments."""

    def write(experts: int = 128, seed: int = 0) -> list[str]:
        draw = np.random.default_rng(seed)
        lines = ["expert,layer,load,window"]
        for layer in (4, 2):
            share = draw.permutation(1.0 / (1.0 + np.arange(experts)) ** (1.2 if layer == 2 else 0.0))
            lines += [
                f"{e},{layer},{round(1e5 * share[e] * (1.0 if w == 'a' else 0.5))},{w}" for w in ("a", "b") for e in range(experts)
            ]
        (tmp_path / "loads.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        problem = small_problem()
        priced, _ = evaluate(problem, LAYOUT)
        plan = sample_plan().model_copy(update={"problem": problem, "plan": priced, "alternatives": (), "ties": ()})
        (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        return ["experts", str(tmp_path / "loads.csv"), "--plan", str(tmp_path / "plan.json")]

    return write


def test_loads_are_read_by_header() -> None:
    found = read_loads("load,expert,layer,window\n5,1,3,x\n7,0,3,x\n1,0,3,y\n", "loads", 3)
    assert list(found.layers) == [3]
    assert found.layers[3].tolist() == [[7.0, 5.0, 0.0], [1.0, 0.0, 0.0]]
    assert found.experts == 3
    assert read_pairs("layer,expert,expert,count\n3,2,0,4\n3,0,2,1\n", "pairs", 3)[3][0, 2] == 5.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layer,expert\n0,1\n", "the header is 'layer,expert'; it must be layer,expert,load"),
        ("layer,expert,load\n0,3,1\n", "line 2: expert is '3'; it must be a whole number from 0 to 2"),
        ("layer,expert,load\n0,1,-1\n", "line 2: load is '-1'; it must be a number of at least 0"),
        ("layer,expert,load\n0,1,nan\n", "load is 'nan'"),
        ("layer,expert,load\n0,1,1\n0,1,1\n", "line 3: expert 1 of layer 0 is given twice"),
        ("layer,expert,load\n0,1\n", "line 2 has 2 cells"),
        ("layer,expert,load\n0,1,0\n", "layer 0: all loads are 0"),
        ("layer,expert,load\n", "has no loads"),
        ("", "the header is ''"),
    ],
)
def test_loads_that_say_nothing_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_loads(text, "loads.csv", 3)


def test_an_expert_is_not_paired_with_itself() -> None:
    with pytest.raises(InputError, match="line 2: expert 1 is paired with itself"):
        read_pairs("layer,expert,expert,count\n0,1,1,4\n", "pairs.csv", 3)


def test_command_places_prices_and_writes_the_map(
    files: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files(), "--redundant", "32", "-o", str(tmp_path / "map.json"), "--json"]) == 0
    found = ExpertPlacement.model_validate_json(capsys.readouterr().out)
    written = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    assert [layer.layer for layer in found.layers] == [2, 4]
    assert (written["physical_experts"], written["ranks"], written["slots_per_rank"]) == (160, 32, 5)
    for physical, logical, count in zip(
        written["physical_to_logical_map"], written["logical_to_physical_map"], written["expert_count"], strict=True
    ):
        assert len(physical) == 160
        assert sum(count) == 160
        for expert, places in enumerate(logical):
            there = [place for place in places if place >= 0]
            assert [physical[place] for place in there] == [expert] * count[expert]
            assert len({place // 5 for place in there}) == len(there)  # copies on different ranks
    for layer in found.layers:
        assert layer.bound <= layer.placed <= min(layer.longest_first, layer.balanced)
        assert max(layer.longest_first, layer.balanced) <= min(layer.today, layer.round_robin)
        assert layer.ungrouped is None  # the model has no routing groups
        assert layer.worst_window is not None
        assert layer.worst_window >= layer.placed
    times = {step.of: step.step_time_s for step in found.steps}
    assert times["placed"] < times["today"]
    assert found.supernodes == 4


def test_step_time_rises_with_the_imbalance_and_is_the_plans_own() -> None:
    problem = small_problem()
    priced, _ = evaluate(problem, LAYOUT)
    found = steps_at(problem, priced.layout, {1.37: "today", 1.0: "", 3.0: ""})
    times = [step.step_time_s for step in found]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    assert {step.of for step in found} == {"", "assumed by the plan", "today"}
    own = next(step for step in found if step.of == "assumed by the plan")
    assert own.imbalance == problem.workload.expert_imbalance > 1.0  # the default is not perfect balance
    assert own.step_time_s == pytest.approx(priced.step_time_s, rel=1e-9)
    assert any("times the mean of routed tokens" in sentence for sentence in problem.assumptions)


def test_tokens_that_cross_less_are_priced_where_each_is_sent_once() -> None:
    """Half the copies between supernodes halve what EP sends there and leave what it sends inside; copies sent alone all cross."""
    problem = small_problem()

    def at(dispatcher: str, crossing: float) -> Problem:
        stack = problem.stack.model_copy(update={"moe_dispatcher": dispatcher})
        workload = problem.workload.model_copy(update={"expert_crossing": crossing})
        return problem.model_copy(update={"stack": stack, "workload": workload})

    once, less = (evaluate(at("flex", crossing), LAYOUT)[0] for crossing in (1.0, 0.5))
    alone, still = (evaluate(at("alltoall", crossing), LAYOUT)[0] for crossing in (1.0, 0.5))
    assert less.traffic_gib["scale-out"]["ep"] == pytest.approx(0.5 * once.traffic_gib["scale-out"]["ep"])
    assert less.traffic_gib["server"]["ep"] == pytest.approx(once.traffic_gib["server"]["ep"])
    assert less.breakdown_s["ep"] < once.breakdown_s["ep"]
    assert still.step_time_s == alone.step_time_s
    whole, part = (steps_at(at("flex", 1.0), once.layout, {1.2: "placed"}, crossings={"placed": share}) for share in (1.0, 0.5))
    own, placed = whole
    assert (own.imbalance, placed.imbalance) == (1.1, 1.2)
    assert part[0] == own
    assert part[1].step_time_s < placed.step_time_s


def test_co_activation_with_copies_says_what_crosses(
    files: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expert e and e + 64 are chosen together; they come into one server, copies and all."""
    lines = [f"{layer},{e},{e + 64},1000" for layer in (2, 4) for e in range(64)]
    (tmp_path / "pairs.csv").write_text("\n".join(["layer,expert,expert,count", *lines]) + "\n", encoding="utf-8")
    asked = [*files(), "--redundant", "32", "--co-activation", str(tmp_path / "pairs.csv")]
    assert main([*asked, "--json"]) == 0
    found = ExpertPlacement.model_validate_json(capsys.readouterr().out)
    assert all(layer.today_apart == 1.0 for layer in found.layers)
    assert all(layer.apart is not None and layer.apart < 0.3 for layer in found.layers)
    assert found.across < found.today_across
    assert found.across == pytest.approx(np.mean([layer.across for layer in found.layers]))
    assert any("in the price as much crosses supernodes wherever experts sit" in said for said in found.assumptions)
    render_experts(found, Console(width=100))
    out = " ".join(capsys.readouterr().out.split())
    assert "round-robin" in out
    assert "of the pairs of experts that a token chose 100.0 % are apart today" in out
    assert "Estimated from pairs, which leave open" in out
    for layer in found.layers:
        assert layer.across_between is not None
        assert layer.across_between[0] <= layer.across <= layer.across_between[1]


def test_without_pairs_what_crosses_at_least_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A heavy expert sets the fullest rank; the other ranks of a server are filled up to it, and fewer tokens go elsewhere."""
    loads = ExpertLoads({2: 1e6 / (1.0 + np.random.default_rng(0).permutation(128))[None, :]})
    found = place_experts(small_problem(), LAYOUT, loads)
    (layer,) = found.layers
    assert layer.across_least is not None
    assert layer.across_least <= layer.across < 1.05 * layer.across_least
    assert layer.across < 0.9 * found.even_across
    render_experts(found, Console(width=100))
    assert "with the fullest rank as it is placed, at least" in " ".join(capsys.readouterr().out.split())
    assert any("fuller supernode receives more" in said for said in found.assumptions)


def test_what_keeping_routing_groups_costs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    problem = build_problem("deepseek-v3", "hgx-h800", 2048, 15360, 4096)
    loads = ExpertLoads({3: 1e6 / (1.0 + np.random.default_rng(0).permutation(256))[None, :] ** 0.6})
    found = place_experts(problem, Layout(tp=1, pp=16, dp=128, ep=64, edp=2, num_microbatches=120), loads, redundant=64)
    (layer,) = found.layers
    assert found.groups_kept == 8
    assert layer.ungrouped is not None
    assert layer.ungrouped <= layer.longest_first < layer.bound <= layer.placed
    assert layer.ungrouped_across is not None
    assert layer.ungrouped_across > layer.across  # what the groups are there for
    render_experts(found, Console(width=100))
    out = " ".join(capsys.readouterr().out.split())
    cost = layer.placed / layer.ungrouped - 1.0
    assert f"Keeping routing groups together leaves the fullest rank {100 * cost:.1f} % more than it need have" in out


def test_a_plan_shows_its_step_time_over_the_imbalance() -> None:
    limits = "micro_batch=1,recompute=full,vpp=1,tp=1,pp=1"
    found = plan(build_problem("qwen3-30b-a3b", "hgx-h100", 16, 32, 4096, fix=limits, expert_imbalance=1.2))
    steps = found.at_imbalance or ()
    assert [step.imbalance for step in steps] == sorted({*STEPS_AT, 1.2})
    assert next(step for step in steps if step.of).step_time_s == pytest.approx(found.plan.step_time_s, rel=1e-9)
    assert steps[0].step_time_s < steps[-1].step_time_s
    for step in steps:
        skewed = build_problem("qwen3-30b-a3b", "hgx-h100", 16, 32, 4096, fix=limits, expert_imbalance=step.imbalance)
        assert step.memory_verdict == evaluate(skewed, found.plan.layout, replayed=False)[0].memory.verdict
    assert plan(build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, fix="micro_batch=1,recompute=full")).at_imbalance is None


def test_report_at_both_widths(
    files: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = files()
    for width in ("80", "160"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= int(width)
        assert "128 experts of qwen3-30b-a3b on 32 EP ranks, 4 on each" in " ".join(out.split())
        assert "proven best" in out
        assert "assumed by the plan" in out


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["--redundant", "5"], "128 experts and 5 copies do not fill 32 ranks evenly; 0 or 32 copies do"),
        (["--redundant", "-1"], "--redundant -1: must be at least 0"),
        (["--redundant", "32000"], "must be from 0 to 3968"),
        (["--co-activation", "absent.csv"], "there is no such file"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    files: Callable[..., list[str]], changed: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files(), *changed]) == 2
    assert sentence in capsys.readouterr().err


def test_models_without_a_choice_are_refused() -> None:
    with pytest.raises(InputError, match="every device holds all experts"):
        expert_site(small_problem(), Layout(dp=32, edp=32))
    with pytest.raises(InputError, match="has no experts"):
        expert_site(build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096), Layout(dp=8, edp=8))


def test_the_ep_group_that_touches_most_supernodes_counts() -> None:
    """Racks of 72: the second group of 64 has 8 ranks in the first rack and 56 in the next."""
    racks = small_problem().model_copy(update={"cluster": load_cluster("gb200-nvl72"), "devices": 1024})
    _, where = expert_site(racks, Layout(dp=1024, ep=64, edp=16))
    assert where.spans.tolist() == [8, 56]
    _, where = expert_site(sample_plan().problem, sample_layout())
    assert where.spans.tolist() == [8] * 8


# --- measured loads in a plan ------------------------------------------------------------------------------------------------


def skewed_loads() -> ExpertLoads:
    """Experts in the order of their popularity: the wider EP is, the further the first rank is above the mean."""
    return ExpertLoads({0: 1e6 / (1.0 + np.arange(128.0))[None, :] ** 0.7})


def test_imbalance_follows_from_loads_for_every_ep() -> None:
    found = imbalance_by_ep(ExpertLoads({3: np.array([[4.0, 2.0, 1.0, 1.0]]), 5: np.array([[1.0, 1.0, 1.0, 1.0]])}))
    assert found == {1: 1.0, 2: (1.5 + 1.0) / 2, 4: (2.0 + 1.0) / 2}


def test_plan_takes_every_ep_at_its_own_imbalance() -> None:
    """The plan under measured loads is the best of the plans for each ep at that ep's figure, and no wider than without them."""
    by_ep = imbalance_by_ep(skewed_loads())
    asked: dict[str, Any] = {"model": "qwen3-30b-a3b", "cluster": "hgx-h100", "devices": 32, "global_batch": 128, "seq_len": 4096}
    rest = "tp=1,cp=1,pp=1|2,recompute=full,micro_batch=1"
    problem = build_problem(**asked, fix=rest, measured_imbalance=by_ep)
    found = plan(problem, top=1)
    alone = {}
    for ep in (1, 2, 4, 8, 16, 32):
        try:
            alone[ep] = plan(build_problem(**asked, fix=f"ep={ep},{rest}", expert_imbalance=by_ep[ep]), top=1).plan.step_time_s
        except Infeasible:
            continue
    assert len(alone) > 2
    assert found.plan.step_time_s == pytest.approx(min(alone.values()), rel=1e-9)
    assert found.certificate.status == "optimal"
    assert found.plan.layout.ep == min(alone, key=lambda ep: alone[ep])
    assert problem.workload.imbalance_at(16) == pytest.approx(by_ep[16])
    assert any(f"{by_ep[8]:.3g} times at ep 8" in sentence for sentence in found.assumptions)
    again, broken = evaluate(problem, found.plan.layout)
    assert not broken
    assert again.step_time_s == pytest.approx(found.plan.step_time_s)


def test_measured_loads_and_one_figure_exclude_each_other() -> None:
    with pytest.raises(InputError, match="given beside measured loads"):
        build_problem("qwen3-30b-a3b", "hgx-h100", 32, 128, 4096, expert_imbalance=1.5, measured_imbalance={8: 2.0})
    even = build_problem("qwen3-30b-a3b", "hgx-h100", 32, 128, 4096, measured_imbalance={1: 1.0, 8: 1.0})
    assert even.workload.imbalance_at(8) == 1.0


def test_evaluate_shows_the_step_over_the_imbalance(files: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    loads = files()[1]
    job = [
        "--cluster",
        "hgx-h100",
        "--devices",
        "32",
        "--global-batch",
        "256",
        "--seq-len",
        "4096",
        "--layout",
        "ep=32,recompute=full",
    ]
    command = ["evaluate", "qwen3-30b-a3b", *job, "--expert-loads", loads, "--at-imbalance", "1.0,2.5"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["at_imbalance"][0]["imbalance"] == 1.0
    times = [step["step_time_s"] for step in document["at_imbalance"]]
    assert times == sorted(times)
    own = next(step for step in document["at_imbalance"] if step["of"])
    assert own["step_time_s"] == pytest.approx(document["plan"]["step_time_s"])
    assert main([*command[:-1], "0.5"]) == 2
    assert "expert imbalance 0.5: must be from 1" in capsys.readouterr().err


def test_experts_without_loads_are_named() -> None:
    loads = read_loads("layer,expert,load\n3,0,5\n3,1,7\n4,0,1\n4,1,1\n4,2,1\n", "loads", 3)
    assert loads.absent == ("experts that the loads do not list, or list with 0, are taken to receive nothing: 1 of 3 in layer 3",)
    assert read_loads("layer,expert,load\n3,0,5\n3,1,7\n", "loads", 2).absent == ()


def test_layers_without_loads_are_counted(files: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files(), "--json"]) == 0
    assert any("of 48 layers with experts 2 are measured" in said for said in json.loads(capsys.readouterr().out)["assumptions"])

"""Refinement beyond enumeration: never worse, legal by CP-SAT and near to what was sampled, the same for the same seed."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.incumbent import Setting
from paraplan.optimizer.planner import plan
from paraplan.optimizer.repair import Repairs
from paraplan.optimizer.reports.further import further_sections
from paraplan.optimizer.result import Plan, Refined
from paraplan.optimizer.study import Refine, _Pricer, study
from paraplan.optimizer.study_space import Box, Choice, Start
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import ALL_LAYERS, FULL_BLOCK, Problem, Recompute
from paraplan.search_spaces.rules import violations
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import random_problem, with_memory

FEW = Refine(trials=20)
FIX = "tp=1|2,pp=2|4,cp=1,vpp=1|2,optimizer_sharding=zero1,rank_order=tp-cp-ep-dp-pp"


def setting_of(problem: Problem) -> Setting:
    return Setting(problem, load_profile(problem.cluster.accelerator.name))


def small(**changed: Any) -> Problem:
    options = {"fix": FIX, **changed}
    return build_problem("llama-3.1-8b", "hgx-h100", 8, 48, 4096, **options)


@cache
def planned() -> Plan:
    return plan(small(), top=2)


def refined(found: Plan, asked: Refine = FEW) -> Refined:
    return study(setting_of(found.problem), found, asked)


def assert_sound(problem: Problem, found: Plan, best: Refined) -> None:
    """The refined layout is legal, fits, costs what it is said to, and is no slower than the plan."""
    assert best.refined_s is not None and best.start_s == pytest.approx(found.plan.step_time_s, rel=1e-9)
    assert best.refined_s <= best.start_s
    assert best.plan.step_time_s == pytest.approx(best.refined_s, rel=1e-9)
    assert violations(problem, best.plan.layout, peak_bytes=best.plan.memory.peak_gib * GIB) == []
    assert best.gain == pytest.approx(1.0 - best.refined_s / best.start_s)
    assert bool(best.moved) == (best.gain > 0) == (best.plan.layout != found.plan.layout or best.bucket is not None)
    assert best.unfit <= best.priced <= best.trials


def test_it_is_never_worse_than_its_start() -> None:
    tried = gained = repaired = 0
    for seed in range(200, 207):
        try:
            found = plan(random_problem(seed), top=2)
        except Infeasible:
            continue
        best = refined(found)
        assert_sound(found.problem, found, best)
        tried, gained, repaired = tried + 1, gained + bool(best.gain), repaired + best.repaired
    assert tried >= 6 and repaired > 12 and gained


def test_a_fraction_of_the_optimizer_on_the_host_beats_every_listed_layout_where_memory_is_tight() -> None:
    problem = random_problem(152)
    tight = with_memory(problem, 1.001 * plan(problem, top=1).plan.memory.peak_gib * GIB)
    found = plan(tight, top=2)
    best = refined(found)
    assert_sound(tight, found, best)
    assert found.certificate.status == "optimal" and found.plan.layout.offload == "none" and found.plan.layout.recompute == "full"
    moved = {each.knob: each.after for each in best.moved}
    share = float(moved["offload"].removeprefix("optimizer:"))
    assert 0.0 < share < 1.0 and moved["recompute"] == "none" and best.gain is not None and best.gain > 0.05
    whole, _ = evaluate(tight, best.plan.layout.model_copy(update={"offload": "optimizer:1"}))
    none, _ = evaluate(tight, best.plan.layout.model_copy(update={"offload": "none"}))
    assert whole.step_time_s > best.plan.step_time_s and none.memory.peak_gib > none.memory.usable_gib


# --- repair ------------------------------------------------------------------------------------------------------------------


def repairs_of(found: Plan) -> tuple[Repairs, Box]:
    starts = tuple(Start.of(found.problem, one.layout) for one in (found.plan, *found.alternatives))
    box = Box(found.problem, starts)
    return Repairs(setting_of(found.problem).model(), found.problem, starts, box.recomputes), box


def test_cp_sat_moves_an_illegal_sample_to_the_nearest_legal_one() -> None:
    repairs, _ = repairs_of(planned())
    own = repairs.starts[0].choice(0)
    layout = repairs.starts[0].layout
    each, group = 48 // layout.dp, layout.pp if layout.schedule == "interleaved" else 1
    legal = [size for size in range(1, each + 1) if each % size == 0 and each // size % group == 0]
    for sampled in (5, 7, each + 3):
        sample = replace(own, micro_batch=sampled, offload_per_mille=317)
        (found,) = repairs.made_legal([sample])
        nearest = min(legal, key=lambda size: abs(math.log2(size) - math.log2(sampled)))
        assert not repairs.legal([sample])[0] and repairs.legal([found])[0]
        assert found == replace(sample, micro_batch=nearest)
    assert repairs.repaired == 3
    assert repairs.made_legal([own]) == [own] and repairs.repaired == 3


def test_a_depth_beyond_every_chunk_comes_back_as_the_deepest() -> None:
    repairs, _ = repairs_of(planned())
    start = repairs.starts[0]
    sample = replace(start.choice(0), recompute=Recompute(FULL_BLOCK, 0, start.deepest + 5))
    (found,) = repairs.made_legal([sample])
    assert found.recompute == Recompute(FULL_BLOCK, 0, start.deepest) and not repairs.legal([sample])[0]


def test_cuts_that_cross_are_moved_apart_by_as_little_as_can_be() -> None:
    found = plan(small(fix="tp=1,pp=4,dp=2,cp=1,vpp=4,schedule=interleaved,micro_batch=1,optimizer_sharding=zero1"), top=1)
    repairs, _ = repairs_of(found)
    own = repairs.starts[0].choice(0)
    crossing = replace(own, cuts=(*own.cuts[:3], own.cuts[4] + 1, own.cuts[4], *own.cuts[5:]))
    (fixed,) = repairs.made_legal([crossing])
    away = sum(abs(a - b) for a, b in zip(fixed.cuts, crossing.cuts, strict=True))
    assert repairs.legal([fixed])[0] and not repairs.legal([crossing])[0] and away == 2
    assert replace(fixed, cuts=()) == replace(crossing, cuts=())


def test_a_users_limit_binds_samples() -> None:
    found = plan(small(constraint=("tp*micro_batch <= 2",)), top=1)
    repairs, box = repairs_of(found)
    start = repairs.starts[0]
    (fixed,) = repairs.made_legal([replace(start.choice(0), micro_batch=4)])
    assert fixed.micro_batch * start.layout.tp <= 2
    assert "micro_batch" in box.distributions
    assert "micro_batch" not in repairs_of(plan(small(fix=f"{FIX},micro_batch=1"), top=1))[1].distributions


@pytest.mark.parametrize("seed", [203, 205, 209, 212])
def test_no_legal_choice_is_nearer_than_the_one_that_cp_sat_returns(seed: int) -> None:
    problem = random_problem(seed)
    repairs, box = repairs_of(plan(problem, top=1))
    start, rng = repairs.starts[0], random.Random(seed)
    depths = range(1, start.deepest + 1)
    recomputes = [replace(kind, layers=k) for kind in box.recomputes for k in (depths if kind.layers == 1 else (kind.layers,))]
    own = start.choice(0)
    moved = 0
    for _ in range(6):
        sample = replace(
            own,
            micro_batch=rng.randint(1, problem.workload.global_batch),
            recompute=rng.choice(recomputes),
            offload_per_mille=rng.randint(0, 1000),
            activations_per_mille=rng.choice((0, rng.randint(0, 1000))),
        )
        offloads = {sample.offload_per_mille, own.offload_per_mille, 0, 1000}
        sizes = range(1, problem.workload.global_batch + 1)
        shares = {sample.activations_per_mille, 0}
        every = [Choice(0, size, each, f, own.cuts, a) for size in sizes for each in recomputes for f in offloads for a in shares]
        legal = [choice for choice, fine in zip(every, repairs.legal(every), strict=True) if fine]
        (found,) = repairs.made_legal([sample])
        least = min(away(start, sample, choice) for choice in legal)
        assert found in legal and away(start, sample, found) == pytest.approx(least, abs=2)  # doublings are rounded
        moved += found != sample
    assert moved


def away(start: Start, sample: Choice, choice: Choice) -> float:
    """The distance that the module documents, worked out anew."""

    def depth(recompute: Recompute) -> int:
        return min(recompute.layers, start.deepest)

    def kind(recompute: Recompute) -> tuple[int, int, bool]:
        return recompute.mode, recompute.modules, recompute.layers == ALL_LAYERS

    doublings = abs(math.log2(choice.micro_batch) - math.log2(sample.micro_batch))
    layers = abs(depth(choice.recompute) - depth(sample.recompute))
    other = kind(choice.recompute) != kind(sample.recompute)
    offloads = abs(choice.offload_per_mille - sample.offload_per_mille)
    activations = abs(choice.activations_per_mille - sample.activations_per_mille)
    return 1000 * doublings + 100 * layers + 1000 * other + offloads + activations


def test_activations_are_offloaded_where_that_is_faster() -> None:
    """The certified space offloads the optimizer alone; MindSpeed also swaps activations, behind other layers' work."""
    problem = build_problem("llama-3.1-70b", "cloudmatrix-384", 32, 32, 8192, fix="tp=8,pp=4,vpp=1,cp=1,micro_batch=1")
    found = plan(problem, top=1, refine=Refine(trials=24))
    assert found.refined is not None and found.refined.gain is not None and found.refined.gain > 0.01
    assert "activations" in found.refined.plan.layout.offload and found.refined.plan.memory.verdict == "fits"


def test_a_box_reads_back_what_it_writes() -> None:
    repairs, box = repairs_of(planned())
    for place, start in enumerate(repairs.starts):
        own = start.choice(place)
        for choice in (own, *box.neighbours(own)):
            if choice.recompute.layers <= 1 or choice.recompute.layers == ALL_LAYERS:
                assert box.read(box.params(choice)) == choice


# --- the study ---------------------------------------------------------------------------------------------------------------


def test_the_same_seed_finds_the_same_layout() -> None:
    asked = Refine(trials=48)
    assert refined(planned(), asked) == refined(planned(), asked)


def test_an_interrupt_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    priced = _Pricer.priced

    def interrupted(self: _Pricer, choices: Sequence[Choice]) -> Any:
        calls.append(len(choices))
        if len(calls) > 1:
            raise KeyboardInterrupt
        return priced(self, choices)

    monkeypatch.setattr(_Pricer, "priced", interrupted)
    best = refined(planned(), Refine(trials=200))
    assert best.stopped and best.trials == 32
    assert_sound(planned().problem, planned(), best)


def test_an_interrupt_before_the_first_sample_returns_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    found = planned()
    monkeypatch.setattr("paraplan.optimizer.study.Search.run", interrupted)
    best = refined(found)
    assert best.stopped and best.trials == 0 and best.moved == () and best.plan == found.plan


def test_a_frame_that_no_alternative_has_is_among_the_starts() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 2, 32, 4096, fix="micro_batch=1|2,cp=1,pp=1|2,vpp=1")
    found = plan(problem, top=1)
    best = refined(found)
    assert_sound(problem, found, best)
    # With tp 2 a part of the optimizer on the host is enough; with all of it there, dp 2 is the fastest.
    assert {"tp", "dp", "offload"} <= {each.knob for each in best.moved} and best.gain is not None and best.gain > 0.05


def test_progress_rises_to_the_end() -> None:
    heard: list[float] = []
    study(setting_of(planned().problem), planned(), Refine(trials=40), heard.append)
    assert heard == sorted(heard) and heard[-1] == 1.0


def test_a_hedge_makes_the_worst_imbalance_least() -> None:
    problem = build_problem("qwen3-30b-a3b", "hgx-h100", 16, 64, 4096, fix="pp=2,cp=1,tp=1|2,ep=4|8,vpp=1,micro_batch=1|2")
    found = plan(problem, top=2)
    for hedge in ("worst", "mean"):
        best = refined(found, Refine(trials=32, imbalances=(1.0, 2.0), hedge=hedge))
        assert [row.imbalance for row in best.imbalances] == [1.0, 2.0]
        times = [row.refined_s for row in best.imbalances if row.refined_s is not None]
        run = found.with_refined(best).problem
        each = [evaluate(at(run, row.imbalance), best.plan.layout)[0].step_time_s for row in best.imbalances]
        assert times == pytest.approx(each, rel=1e-9)
        assert best.refined_s == pytest.approx(max(times) if hedge == "worst" else sum(times) / 2)
        assert best.start_s is None or (best.refined_s is not None and best.refined_s <= best.start_s)


def at(problem: Problem, imbalance: float) -> Problem:
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"expert_imbalance": imbalance})})


# --- other precisions --------------------------------------------------------------------------------------------------------


def test_a_precision_is_chosen_only_where_it_is_permitted_and_then_it_is_said() -> None:
    found = planned()
    plain, best = refined(found), refined(found, Refine(trials=20, precisions=("bf16", "fp8")))
    assert (plain.precision, plain.precisions, plain.caution) == (None, (), None)
    assert best.precision == "fp8" and best.moved[0].model_dump() == {"knob": "precision", "before": "bf16", "after": "fp8"}
    assert best.caution is not None and best.caution.startswith("fp8 changes what is learnt")
    assert best.start_s == plain.start_s and best.gain is not None and best.gain > 0.1
    reached = {each.precision: each.refined_s for each in best.precisions}
    assert reached.keys() == {"bf16", "fp8"} and reached["fp8"] == best.refined_s
    assert best.refined_s < (reached["bf16"] or 0.0) <= best.start_s
    priced, broken = evaluate(at_fp8(found.problem), best.plan.layout)
    assert not broken and priced.step_time_s == pytest.approx(best.refined_s, rel=1e-9)


def test_buckets_of_gradients_are_turned_where_the_framework_can_be_told() -> None:
    """A million parameters for each of 512 replicas, Megatron-Core's own, leave a long tail to so short a step."""
    found = plan(build_problem("llama-3.1-8b", "hgx-h100", 512, 512, 8192, fix="tp=1,pp=1,cp=1,micro_batch=1"), top=1)
    best = refined(found)
    moved = {each.knob: each.after for each in best.moved}
    assert best.bucket is not None and moved["gradient_bucket"] == f"{best.bucket:,} parameters"
    assert best.gain is not None and best.gain > 0.003
    assert best.caution is not None and best.caution.startswith("No measured run has tested the price of buckets")
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as shown:
        console.print(*further_sections(found.model_copy(update={"refined": best})))
    assert best.caution in " ".join(shown.get().split())
    after = found.with_refined(best).problem
    assert after.stack.gradient_bucket == best.bucket
    assert evaluate(after, best.plan.layout)[0].step_time_s == pytest.approx(best.refined_s, rel=1e-9)
    fsdp = build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096, framework="torchtitan", fix="tp=1,pp=1,cp=1")
    assert "gradient_bucket" not in {each.knob for each in refined(plan(fsdp, top=1)).moved}


def at_fp8(problem: Problem) -> Problem:
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"precision": "fp8"})})


def test_a_precision_that_shortens_nothing_leaves_the_plan() -> None:
    """Small GEMMs wait for the host, and FP8 adds casts: the certified plan stays the floor."""
    found = plan(at_fp8(small()), top=1)
    best = refined(found, Refine(trials=12, precisions=("bf16",)))
    assert best.precision == "fp8" and best.caution is None and "precision" not in {each.knob for each in best.moved}
    assert best.refined_s is not None and best.start_s is not None and best.refined_s <= best.start_s
    assert [each.precision for each in best.precisions] == ["fp8", "bf16"]


def test_every_start_is_legal_in_its_own_precision() -> None:
    """FP8 GEMMs need tokens that 16 divides: 4,088 of one sequence are none, so that no layout of the plan carries over."""
    odd = build_problem("llama-3.1-8b", "hgx-h100", 8, 48, 4088, fix=f"{FIX},micro_batch=1")
    best = refined(plan(odd, top=2), Refine(trials=8, precisions=("fp8",)))
    assert best.precision == "bf16" and [each.refined_s is None for each in best.precisions] == [False, True]


# --- the command -------------------------------------------------------------------------------------------------------------

JOB = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "8", "--global-batch", "48", "--seq-len", "4096", "--fix", FIX]


def test_the_command_adds_the_key_refined_and_leaves_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, "--top", "2", "--refine", "--trials", "20", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    best = Refined.model_validate(document["refined"])
    assert best == refined(planned())
    assert {**document["plan"], "stages": None} == {"stages": None, **json.loads(planned().to_json())["plan"]}
    assert {"objective", "start_s", "refined_s", "gain", "trials", "repaired", "priced", "moved", "plan"} <= document[
        "refined"
    ].keys()


def test_export_writes_the_refined_layout_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = refined(planned())
    other = best.plan.model_copy(update={"layout": best.plan.layout.model_copy(update={"offload": "optimizer:0.25"})})
    path = tmp_path / "plan.json"
    held = planned().model_copy(update={"refined": best.model_copy(update={"plan": other})})
    path.write_text(held.to_json(), encoding="utf-8")
    command = ["export", str(path), "--to", "megatron-lm", "-o"]
    assert main([*command, str(tmp_path / "plain")]) == main([*command, str(tmp_path / "refined"), "--refined"]) == 0
    plain, written = ((tmp_path / name / "megatron-lm.sh").read_text(encoding="utf-8") for name in ("plain", "refined"))
    assert "--optimizer-offload-fraction 0.25" in written and "--optimizer-offload-fraction 0.25" not in plain
    path.write_text(planned().to_json(), encoding="utf-8")
    assert main([*command, str(tmp_path / "none"), "--refined"]) == 2
    assert "has no refined layout" in capsys.readouterr().err


def test_another_precision_is_exported_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", *JOB, "--top", "1", "--refine", "--trials", "8", "--refine-precision", "fp8"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fp8 changes what is learnt" in text and "Best by precision: bf16" in text
    for flags, folder in (([], "plain"), (["--refined"], "other")):
        assert main(["export", str(tmp_path / "plan.json"), "--to", "megatron-lm", "-o", str(tmp_path / folder), *flags]) == 0
    plain, written = ((tmp_path / name / "megatron-lm.sh").read_text(encoding="utf-8") for name in ("plain", "other"))
    assert "--fp8-format" in written and "--fp8-format" not in plain


def test_the_report_says_what_moved_and_that_nothing_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, "--top", "2", "--refine", "--trials", "20"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Refined Optuna, not proved" in text and "20 samples" in text and "The certificate stands for the plan" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trials", "9"], "--trials 9: is an option of --refine"),
        (["--refine", "--trials", "0"], "--trials 0: must be at least 1"),
        (["--refine", "--hedge-imbalance", "1,x"], "--hedge-imbalance '1,x': must be numbers"),
        (["--refine", "--hedge-imbalance", "0.5"], "imbalance 0.5: must be from 1"),
        (["--refine", "--hedge-imbalance", "nan"], "imbalance nan: must be from 1"),
        (["--refine", "--hedge-imbalance", "2,2"], "one is given twice"),
        (["--refine", "--hedge-imbalance", "1,2"], "llama-3.1-8b has no experts"),
        (["--refine", "--hedge-by", "mean"], "there is nothing to hedge"),
        (["--refine", "--hedge-imbalance", "1,2", "--hedge-by", "best"], "--hedge-by 'best' is not offered"),
        (["--refine-precision", "fp8"], "--refine-precision fp8: is an option of --refine"),
        (["--refine", "--refine-precision", "fp7"], "--refine-precision 'fp7' is not offered"),
        (["--refine", "--refine-precision", "fp4"], "precision = 'fp4': h100-80gb-sxm has"),
        (["--refine", "--refine-precision", "bf16"], "bf16 is the plan's own"),
        (["--refine", "--objective", "memory"], "objective memory leads with memory"),
    ],
)
def test_bad_input_is_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB, *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_library_refuses_the_same() -> None:
    for asked in (Refine(trials=0), Refine(hedge="best")):  # type: ignore[arg-type]
        with pytest.raises(InputError):
            plan(small(), refine=asked)

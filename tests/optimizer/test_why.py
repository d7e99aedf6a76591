"""Why and why not: what a search of its own finds, what stands in the way, and the sentences for it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.found import Found
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.why import render_ablations, render_why_not
from paraplan.optimizer.result import Plan
from paraplan.optimizer.search import Search
from paraplan.optimizer.why import Ablations, Limits, WhyNot, ablation, best_within, why_not
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.flags import parse_fix
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import random_problem

MODEL, CLUSTER = "llama-3.1-8b", "hgx-h100"


def small(**more: Any) -> Problem:
    return build_problem(MODEL, CLUSTER, 8, 16, 8192, **{"fix": "cp=1,micro_batch=1|2", **more})


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(small(), top=2)


@pytest.fixture(scope="module")
def ablated(found: Plan) -> Ablations:
    return ablation(found.problem, found.plan.layout)


@pytest.fixture(scope="module")
def answer(found: Plan) -> WhyNot:
    """Why not TP over the whole server."""
    return why_not(found.problem, found.plan.layout, parse_fix("tp=8"))


def independent(problem: Problem, limits: Limits) -> float | None:
    """Step time of the best layout by the front door, given the limits as its flags; None if nothing is legal and fits."""
    try:
        return plan(limits.within(problem), top=1).plan.step_time_s
    except Infeasible:
        return None


def test_an_ablation_is_what_plan_finds_with_the_flag(found: Plan, ablated: Ablations) -> None:
    """The same words as flags of `plan`, read anew."""
    assert ablated.ablations
    for one in ablated.ablations:
        flags = one.without.limits.replace('"', "").split(" ")
        fix = {**found.problem.workload.fix, **parse_fix(flags[1] if flags[0] == "--fix" else "")}
        text = ",".join(f"{name}={'|'.join(values)}" for name, values in fix.items())
        forbid = [flags[i + 1] for i, flag in enumerate(flags) if flag == "--forbid"]
        try:
            alone: float | None = plan(small(fix=text, forbid=forbid), top=1).plan.step_time_s
        except Infeasible:
            alone = None
        if one.without.status == "fits" and one.without.layout is not None:
            assert one.without.layout.step_time_s == pytest.approx(alone, rel=1e-12)
            assert one.seconds == pytest.approx(one.without.layout.step_time_s - ablated.plan.step_time_s)
            assert one.seconds >= 0 or one.choice == "sequence_parallel=true"  # a default, not a choice of the search
        else:
            assert alone is None and one.seconds is None


def test_ablations_of_a_random_problem() -> None:
    problem = random_problem(5)
    for one in ablation(problem, plan(problem, top=1).plan.layout).ablations:
        text = one.without.limits
        if text.startswith("--fix "):
            alone = independent(problem, Limits(parse_fix(text.removeprefix("--fix "))))
            layout = one.without.layout
            assert (alone is None) == (one.without.status != "fits")
            assert alone is None or (layout is not None and layout.step_time_s == pytest.approx(alone, rel=1e-12))
            assert one.without.status == "fits" or one.without.reasons


def test_every_choice_of_the_layout_is_taken_back(found: Plan, ablated: Ablations) -> None:
    chosen = found.plan.layout
    said = {one.choice.partition("=")[0] for one in ablated.ablations}
    assert said >= {name for name in ("tp", "cp", "pp", "vpp", "micro_batch") if getattr(chosen, name) > 1}
    assert ("recompute" in said) == (chosen.recompute != "none")
    assert ("optimizer_sharding" in said) == (chosen.optimizer_sharding != "none")
    for one in ablated.ablations:
        layout = one.without.layout
        if layout is not None and "=" in one.instead:
            name, _, value = one.instead.partition("=")
            assert str(getattr(layout.layout, name)).lower() == value


def test_less_recompute_is_less() -> None:
    """A plan that has to recompute loses something with a part of it, and cannot do with none."""
    problem = small(fix="tp=1,cp=1,pp=2,dp=4,vpp=1,micro_batch=2,recompute=full|selective:mlp|none")
    chosen = plan(small(fix="tp=1,cp=1,pp=2,dp=4,vpp=1,micro_batch=2,recompute=full"), top=1).plan.layout
    both = [one for one in ablation(problem, chosen).ablations if one.choice == "recompute=full"]
    assert [one.instead for one in both] == ["recompute=none", "less recompute"]
    none, less = (one.without for one in both)
    assert less.status == "fits" and less.layout is not None and less.layout.layout.recompute == "selective:mlp"
    assert none.status == "does not fit"


def test_why_not_prices_the_best_completion(found: Plan, answer: WhyNot) -> None:
    alone = plan(small(fix="cp=1,micro_batch=1|2,tp=8"), top=1).plan
    assert answer.best.status == "fits" and answer.best.layout is not None and answer.waterfall is not None
    assert answer.best.layout.step_time_s == alone.step_time_s
    assert answer.slower == pytest.approx(alone.step_time_s / found.plan.step_time_s - 1.0)
    assert answer.waterfall.difference_s == pytest.approx(alone.step_time_s - found.plan.step_time_s)
    assert answer.gives_up


def test_why_not_the_plans_own_costs_nothing(found: Plan) -> None:
    own = found.plan.layout
    answer = why_not(found.problem, own, parse_fix(f"tp={own.tp},pp={own.pp}"))
    assert answer.slower == pytest.approx(0.0, abs=1e-12)
    assert "Nothing is lost" in drawn(answer)


def test_a_plan_that_breaks_rules_itself_is_refused(found: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Edited by hand: TP of three, more devices than the problem has, and more memory than a device."""
    wrong: tuple[tuple[dict[str, Any], str, int], ...] = (
        ({"tp": 3}, "32 attention heads", 2),
        ({"dp": 24}, "devices", 2),
        ({"tp": 1, "dp": 8, "sequence_parallel": False, "num_microbatches": 2}, "peak memory", 1),
    )
    path = tmp_path / "edited.json"
    for changed, said, status in wrong:
        edited = found.plan.layout.model_copy(update=changed)
        with pytest.raises(Infeasible) as raised:
            ablation(found.problem, edited)
        assert any(said in reason for reason in raised.value.reasons), changed
        path.write_text(found.model_copy(update={"plan": found.plan.model_copy(update={"layout": edited})}).to_json())
        assert main(["why", str(path), "--not", "tp=2"]) == status  # a file of more devices than there are is bad input
        out, err = capsys.readouterr()
        assert out == "" and (said if status == 1 else "devices") in err and err.count("the plan's own layout") <= 1


def test_what_was_not_found_in_time_is_not_called_impossible(ablated: Ablations) -> None:
    one = ablated.ablations[0]
    without = one.without.model_copy(update={"status": "not found", "layout": None, "reasons": ("no layout was found.",)})
    late = ablated.model_copy(update={"ablations": (one.model_copy(update={"without": without, "seconds": None}),)})
    assert "Not found in the time limit" in drawn(late)
    assert "Impossible" not in drawn(late)


def test_what_is_illegal_is_said_with_the_rule(found: Plan) -> None:
    answer = why_not(found.problem, found.plan.layout, parse_fix("tp=3"))
    assert (answer.best.status, answer.best.layout, answer.waterfall) == ("not legal", None, None)
    assert any("32 attention heads" in reason for reason in answer.best.reasons)
    assert "No layout with it is legal." in drawn(answer)


def test_what_does_not_fit_is_priced_as_if_it_did(found: Plan) -> None:
    answer = why_not(found.problem, found.plan.layout, parse_fix("tp=1,pp=1,micro_batch=2,recompute=none,offload=none"))
    layout = answer.best.layout
    assert answer.best.status == "does not fit" and layout is not None and answer.waterfall is not None
    assert layout.memory.peak_gib > layout.memory.usable_gib == found.plan.memory.usable_gib
    assert answer.best.reasons and "but no layout with it fits" in drawn(answer)


def test_a_search_that_runs_out_of_time_says_so(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = load_profile(found.problem.cluster.accelerator.name)
    best = best_within(found.problem, Limits(parse_fix("tp=8")), curves, time_limit_s=1e-9)
    assert best.layout is not None
    assert (best.status, best.proved, best.layout.layout.tp) == ("fits", False, 8)
    monkeypatch.setattr(Search, "run", lambda self, progress: Found(complete=False, seconds=1.0))
    best = best_within(found.problem, Limits(parse_fix("tp=8")), curves, time_limit_s=1e-9)
    assert (best.status, best.proved, best.layout) == ("not found", False, None)
    assert "time limit" in best.reasons[0]


def test_an_interrupt_leaves_the_choices_that_were_searched_before(found: Plan, ablated: Ablations) -> None:
    """A search alone would come back with the best so far, which is not the best without a choice."""

    def answered(choices: int) -> Ablations:
        def interrupted(choice: str, share: float) -> None:
            if share * count > choices:
                raise KeyboardInterrupt

        return ablation(found.problem, found.plan.layout, progress=interrupted)

    count = len(ablated.ablations)
    assert ablated.unsearched == () and count > 2
    with pytest.raises(KeyboardInterrupt):
        answered(0)
    some = answered(2)
    assert some.ablations == ablated.ablations[:2]
    assert some.unsearched == tuple(one.instead for one in ablated.ablations[2:])
    assert f"Interrupted, {count - 2} not searched: {', '.join(some.unsearched)}." in " ".join(drawn(some, 160).split())


def test_limits_replace_those_on_the_same_columns() -> None:
    limited = Limits({"tp": ("8",)}, ("recompute==full",)).within(small(fix="tp=2,cp=1", forbid="pp>4")).workload
    assert limited.fix == {"tp": ("8",), "cp": ("1",)}
    assert limited.forbid == ("pp>4", "recompute==full")
    assert str(Limits({"tp": ("4", "8")}, ("pp>2",))) == '--fix tp=4|8 --forbid "pp>2"'


def drawn(answer: WhyNot | Ablations, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    if isinstance(answer, WhyNot):
        render_why_not(answer, "tp=8", console)
    else:
        render_ablations(answer, console)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_pictures_keep_to_their_width(width: int, answer: WhyNot, ablated: Ablations) -> None:
    for text in (drawn(answer, width), drawn(ablated, width)):
        assert all(len(line) <= width and line == line.rstrip() for line in text.splitlines())
        assert MODEL in text
    assert "% slower" in drawn(answer, width) and "By decision" in drawn(answer, width)
    assert all(one.instead in drawn(ablated, width) for one in ablated.ablations)


# --- the commands ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(found: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(found.to_json(), encoding="utf-8")
    return path


def test_why_prints_one_document(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(file), "--not", "tp=8", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert set(document) == {"paraplan", "problem", "plan", "best", "slower", "waterfall", "gives_up", "gains"}
    assert document["best"]["limits"] == "--fix tp=8"
    assert {"term", "first_s", "second_s", "seconds"} == set(document["waterfall"]["terms"][0])
    assert WhyNot.model_validate(document).best.status == "fits"


def test_compare_layouts_takes_files_alternatives_and_words(
    file: Path, found: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    priced = found.alternatives[0]
    other.write_text(
        json.dumps({"problem": json.loads(found.problem.model_dump_json()), "plan": json.loads(priced.model_dump_json())})
    )
    differences = []
    for words in ([str(other)], ["--alternative", "1"], ["--layout", "tp=8"]):
        assert main(["compare-layouts", str(file), *words, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["first"]["step_time_s"] == found.plan.step_time_s
        differences.append(document["waterfall"]["difference_s"])
    assert differences[0] == differences[1] == pytest.approx(priced.step_time_s - found.plan.step_time_s)
    assert main(["compare-layouts", str(file), "--alternative", "1"]) == 0
    out, err = capsys.readouterr()
    assert "By decision" in out and err == ""


def test_an_evaluated_layout_that_is_illegal_can_be_compared(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [MODEL, "--cluster", CLUSTER, "--devices", "8", "--global-batch", "16", "--seq-len", "8192"]
    assert main(["evaluate", *words, "--layout", "tp=1,micro_batch=2", "--json"]) == 1
    other = tmp_path / "refused.json"
    other.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["compare-layouts", str(file), str(other), "--json"]) == 0
    assert "peak memory" in json.loads(capsys.readouterr().out)["second_broken"][0]


def test_other_figures_than_the_documents_are_said(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    document["plan"]["step_time_s"] *= 1.01
    file.write_text(json.dumps(document), encoding="utf-8")
    assert main(["compare-layouts", str(file), "--layout", "tp=8"]) == 0
    assert "by other figures" in capsys.readouterr().err


BAD = [
    (["why", "missing.json"], "no such file"),
    (["why", "FILE", "--not", "tpp=8"], "not: 'tpp' is not a column"),
    (["why", "FILE", "--not", "tp"], "not: 'tp' is not COLUMN=VALUE"),
    (["why", "FILE", "--not", "tp=0"], "at least 1"),
    (["why", "FILE", "--not", ","], "item 1 of ',' is empty"),
    (["why", "FILE", "--time-limit", "0"], "--time-limit"),
    (["why", "BARE"], "problem is missing"),
    (["compare-layouts", "FILE"], "one of OTHER.json, --layout or --alternative"),
    (["compare-layouts", "FILE", "FILE", "--alternative", "1"], "one of OTHER.json"),
    (["compare-layouts", "FILE", "--alternative", "9"], "alternative, counted from 1"),
    (["compare-layouts", "FILE", "--alternative", "0"], "at least 1"),
    (["compare-layouts", "FILE", "--layout", "pipeline=8"], "pipeline"),
    (["compare-layouts", "FILE", "missing.json"], "no such file"),
    (["compare-layouts", "FILE", "OTHER"], "another problem, devices being 8"),
]


@pytest.mark.parametrize(("arguments", "mentioned"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_is_one_sentence(
    arguments: list[str], mentioned: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    document["problem"]["devices"] = 16
    (tmp_path / "other.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "bare.json").write_text("{}x".replace("x", ""), encoding="utf-8")
    places = {"FILE": str(file), "OTHER": str(tmp_path / "other.json"), "BARE": str(tmp_path / "bare.json")}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("paraplan: ") and err.count("\n") == 1
    assert mentioned in err


def test_the_plan_is_priced_as_it_stands(found: Plan, ablated: Ablations) -> None:
    again, broken = evaluate(found.problem, found.plan.layout)
    assert broken == () and ablated.plan.step_time_s == again.step_time_s == found.plan.step_time_s
    assert CostModel(found.problem).usable_bytes == pytest.approx(found.plan.memory.usable_gib * 2**30)


def test_devices_that_the_other_layout_leaves_idle_are_told(found: Plan) -> None:
    """Five stages leave three of eight devices over."""
    answer = why_not(found.problem, found.plan.layout, parse_fix("tp=1,pp=5"))
    assert answer.best.layout is not None and answer.best.layout.devices_idle == 3
    assert "with 3 of 8 devices idle" in " ".join(drawn(answer).split())

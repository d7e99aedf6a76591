"""plan --from: what a checkpoint loads into as it is, and what the best of all takes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate, with_default_stages
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.switching import render_switch
from paraplan.optimizer.result import Plan, Switch
from paraplan.optimizer.switching import KEPT, carried, switch
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem, Split
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import random_problem

MODEL, CLUSTER = "llama-3.1-8b", "hgx-h100"
JOB = ["--cluster", CLUSTER, "--devices", "8", "--global-batch", "16", "--seq-len", "8192"]
FIX = "cp=1|2,micro_batch=1|2"


def small(devices: int = 8, **more: Any) -> Problem:
    return build_problem(MODEL, CLUSTER, devices, 16, 8192, **{"fix": FIX, **more})


@pytest.fixture(scope="module")
def best() -> Plan:
    return plan(small(), top=2)


CURRENT = Layout(
    tp=2,
    pp=2,
    dp=2,
    edp=4,
    num_microbatches=8,
    sequence_parallel=True,
    recompute="full",
    stages=Split(2, 1, (0, 16, 32)).stages(32, "full"),
)


def test_the_checkpoint_reaches_the_best_of_what_keeps_its_shards(best: Plan) -> None:
    """Against every legal layout with the same shards, priced one at a time with the same stages."""
    found = switch(best.problem, best, CURRENT)
    assert found.broken == () and found.reachable is not None and found.current is not None
    space = Space(small(fix=f"{FIX},tp=2,pp=2,vpp=1,optimizer_sharding=zero1"))
    table = space.layouts(np.arange(len(space.frames)))[0]
    table = table.with_splits(np.zeros(len(table), dtype=np.intp), (Split(2, 1, (0, 16, 32)),))
    priced = CostModel(best.problem).price(table)
    assert found.priced == len(table)
    assert found.reachable.step_time_s == pytest.approx(priced.step_time_s[priced.fits].min(), rel=1e-12)
    for name in KEPT:
        assert getattr(found.reachable.layout, name) == getattr(CURRENT, name)
    assert Split.from_stages(found.reachable.layout.stages) == Split.from_stages(CURRENT.stages)
    assert found.gain == pytest.approx(1.0 - found.reachable.step_time_s / found.current.step_time_s)
    assert found.gain > 0 and any(move.startswith("recompute full → ") for move in found.to_reach)
    assert found.further_gain == pytest.approx(1.0 - best.plan.step_time_s / found.reachable.step_time_s)
    assert found.to_reshard


@pytest.mark.parametrize("seed", [1, 3, 15])
def test_never_worse_than_a_current_layout_that_is_legal(seed: int) -> None:
    problem = random_problem(seed)
    space = Space(problem)
    table = space.layouts(np.arange(len(space.frames)))[0]
    layout = with_default_stages(CostModel(problem), table.layout((7919 * seed) % len(table), problem.model.num_layers))
    priced, broken = evaluate(problem, layout)
    found = switch(problem, plan(problem, top=1), layout)
    assert found.broken == broken == ()
    assert found.current is not None and found.current.step_time_s == priced.step_time_s
    assert found.reachable is not None and found.reachable.step_time_s <= priced.step_time_s
    assert found.gain is not None and found.gain >= 0


def test_a_current_layout_in_the_band_of_doubt_is_not_given_up_for_a_slower_one() -> None:
    """It runs, so it fits, although a plan would keep clear of it."""
    words = {"fix": "tp=4,cp=1,dp=1|2,pp=4|8,micro_batch=1,recompute=none"}
    close = plan(build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, memory_margin=0.0, **words)).plan
    problem = build_problem("llama-3.1-70b", "hgx-h100", 32, 128, 8192, fix="cp=1,tp=4|8,micro_batch=1")
    found = switch(problem, plan(problem, top=1), close.layout)
    assert close.memory.verdict == "unsure" and found.broken == () and found.reachable is not None
    assert found.reachable.step_time_s <= close.step_time_s


def test_the_plan_itself_has_nothing_to_gain(best: Plan) -> None:
    found = switch(best.problem, best, best.plan.layout)
    assert (found.gain, found.further_gain, found.to_reach, found.to_reshard) == (0.0, 0.0, (), ())
    assert "The plan itself loads the checkpoint as it is." in drawn(best, found)


def test_what_no_longer_fits_is_said(best: Plan) -> None:
    current = carried(best.problem, Layout(tp=1, dp=8, edp=8, micro_batch=2, sequence_parallel=False, optimizer_sharding="none"), 8)
    found = switch(best.problem, best, current)
    assert any("peak memory" in sentence for sentence in found.broken)
    assert found.reachable is None and found.gain is None and found.gain_at_all is not None
    text = drawn(best, found)
    assert "illegal or too large here" in text and "Nothing that the checkpoint loads into" in text


def test_what_cannot_be_priced_may_still_be_loaded(best: Plan) -> None:
    """dp = 3 divides no batch of 16, but dp is free."""
    current = CURRENT.model_copy(update={"dp": 3, "edp": 6, "num_microbatches": 5})
    found = switch(best.problem, best, current)
    assert found.current is None and found.gain is None and len(found.broken) > 1
    assert found.reachable == switch(best.problem, best, CURRENT).reachable
    assert any(move.startswith("dp 3 → ") for move in found.to_reach)
    assert "Without resharding: restart with" in drawn(best, found)
    bare = switch(best.problem, best, current.model_copy(update={"stages": ()}))
    assert bare.reachable is None and "stages are not known" in bare.ruled_out[0]


def test_a_limit_that_leaves_the_checkpoint_out_is_named() -> None:
    problem = small(fix=f"{FIX},tp=4")
    found = switch(problem, plan(problem, top=1), CURRENT)
    assert found.reachable is None
    assert found.ruled_out == ("--fix tp=4 leaves out the checkpoint's tp",)


def test_dp_follows_the_devices() -> None:
    assert carried(small(16), CURRENT, 8).model_copy(update={"dp": 2, "edp": 4, "num_microbatches": 8}) == CURRENT
    grown = carried(small(16), CURRENT, 8)
    assert (grown.dp, grown.edp, grown.num_microbatches) == (4, 8, 4)
    assert carried(small(8), CURRENT, 8) == CURRENT
    assert carried(small(12), CURRENT, 8).dp == 2  # three would leave a part of a micro-batch


def drawn(found: Plan, switched: Switch, width: int = 80) -> str:
    stream = io.StringIO()
    render_switch(found, switched, "job", Console(file=stream, width=width))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_the_picture_keeps_to_its_width(best: Plan, width: int) -> None:
    text = drawn(best, switch(best.problem, best, CURRENT), width)
    assert all(len(line) <= width and line == line.rstrip() for line in text.splitlines())
    for words in ("now", "as it loads", "the plan", "Without resharding: restart with", "The plan needs the checkpoint resharded"):
        assert words in text


# --- the command -------------------------------------------------------------------------------------------------------------


def planned(*words: str) -> int:
    return main(["plan", MODEL, *JOB, "--fix", FIX, "--top", "2", *words])


def test_plan_from_a_list_of_values_and_from_a_plan(best: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, document = tmp_path / "job.txt", tmp_path / "plan.json"
    values.write_text("# what runs\ntp=2,pp=2\nrecompute=full\n", encoding="utf-8")
    document.write_text(best.to_json(), encoding="utf-8")
    assert planned("--from", str(values), "--json") == 0
    out = capsys.readouterr().out
    said = json.loads(out)["from"]
    assert said["current"]["layout"]["pp"] == 2 and said["reachable"]["step_time_s"] <= said["current"]["step_time_s"]
    assert {"gain", "gain_at_all", "further_gain", "to_reach", "to_reshard", "assumption"} <= set(said)
    again = Plan.model_validate_json(out)
    assert again.switch is not None and json.loads(again.to_json()) == json.loads(out)
    assert planned("--from", str(document)) == 0
    assert f"From{document}" in "".join(capsys.readouterr().out.split())  # however wide the terminal is


def test_alternatives_say_what_they_give_up(best: Plan) -> None:
    for one in json.loads(best.to_json())["alternatives"]:
        assert isinstance(one["gives_up"], list) and isinstance(one["gains"], list)
        assert one["gives_up"] or one["gains"]
    assert "gives_up" not in json.loads(best.to_json())["plan"]


def test_bad_input_is_one_sentence(best: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = json.loads(best.to_json())
    other["problem"]["model"]["hidden_size"] = 2048
    files = {"empty": "", "word": "tp:8", "column": "tpp=8", "bare": "{}", "other": json.dumps(other), "broken": "{tp"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    wanted = {
        "empty": "is empty",
        "word": "tp:8",
        "column": "tpp",
        "bare": "problem is missing",
        "other": "another model",
        "broken": "JSON",
    }
    for name, words in {**wanted, "missing": "no such file"}.items():
        assert planned("--from", str(tmp_path / name)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err and str(tmp_path / name) in err

"""The closed loop over a shared storage: workers side by side, kill -9, what runs teach, and sentences for whatever is wrong."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paraplan.cost_models.memory import GIB
from paraplan.optimizer import plan
from paraplan.optimizer.cli import main
from paraplan.optimizer.reports.tuning import lessons_lines
from paraplan.optimizer.tune import again, ask, limit_bytes, look, standing, weigh
from paraplan.optimizer.tuning_study import Subject, TuningStudy, layout_key
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.quantities import free_bytes

FIXED = "cp=1,pp=1|2,micro_batch=1|2,recompute=none|full,optimizer_sharding=zero1,offload=none,schedule=1f1b,vpp=1"
JOB = ["--cluster", "hgx-a100", "--devices", "8", "--global-batch", "32", "--seq-len", "2048", "--fix", FIXED]
MODEL = """
name: small-1b
hidden_size: 2048
vocab_size: 32000
max_position_embeddings: 4096
kinds:
  dense: {mixer: {kind: attention, heads: 16, kv_heads: 16, head_dim: 128}, mlp: {kind: mlp, width: 5632}}
layers: ["8*dense"]
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


@pytest.fixture
def subject(model: str) -> Subject:
    return Subject(build_problem(model, "hgx-a100", devices=8, global_batch=32, seq_len=2048, fix=FIXED))


@pytest.fixture
def study(tmp_path: Path) -> TuningStudy:
    return TuningStudy("small", str(tmp_path / "tune.db"), create=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paraplan.optimizer.cli", "tune", *arguments]


def test_the_first_proposal_is_the_certified_plan(subject: Subject, study: TuningStudy) -> None:
    proposal, launch = ask(study, subject)
    best = plan(subject.problem).plan
    assert layout_key(proposal.layout) == layout_key(best.layout)
    assert proposal.layout.stages == best.layout.stages
    assert proposal.state == "running"
    assert proposal.gain is None
    assert launch.plan.step_time_s == pytest.approx(proposal.predicted_s)
    assert launch.certificate.status == "feasible"


def test_the_first_proposal_is_the_plan_though_another_risks_less_memory(study: TuningStudy) -> None:
    problem = build_problem("deepseek-v3", "hgx-h800", 512, 2048, 4096, fix="tp=1,pp=8,ep=32,micro_batch=1")
    assert layout_key(ask(study, Subject(problem))[0].layout) == layout_key(plan(problem).plan.layout)


def test_proposals_differ_and_told_runs_change_the_next(subject: Subject, study: TuningStudy) -> None:
    proposals = [ask(study, subject)[0] for _ in range(3)]
    assert len({layout_key(one.layout) for one in proposals}) == 3
    before = weigh(look(subject, standing(study).lessons), study.proposals())
    for one in proposals:  # the more data parallel, the slower it was
        study.tell(one.number, one.predicted_s * (1.0 + 0.2 * one.layout.dp), None, "ran")
    found = standing(study)
    after = weigh(look(subject, found.lessons), study.proposals())
    assert found.lessons.calibration is not None
    assert found.best == min(study.proposals(), key=lambda p: p.measured_s or 0.0)
    assert after.gain is not None
    assert layout_key(after.layout) != layout_key(before.layout)
    assert after.expected_s > 1.1 * before.expected_s
    assert layout_key(ask(study, subject)[0].layout) not in {layout_key(one.layout) for one in proposals}


def test_until_nothing_is_left_no_layout_is_proposed_twice(model: str, study: TuningStudy) -> None:
    fix = FIXED.replace("micro_batch=1|2", "micro_batch=1").replace("none|full", "full") + ",tp=2"
    tiny = Subject(build_problem(model, "hgx-a100", devices=8, global_batch=32, seq_len=2048, fix=fix))
    seen = []
    with pytest.raises(Infeasible, match="no layout is left"):
        while len(seen) < 40:
            proposal, _ = ask(study, tiny)
            seen.append(layout_key(proposal.layout))
            study.tell(proposal.number, None, None, "failed")
    assert 3 <= len(seen) == len(set(seen))


def test_running_out_of_memory_lowers_the_limit_and_a_run_raises_it(subject: Subject) -> None:
    free = free_bytes(subject.problem.cluster)
    assert limit_bytes(subject.problem, 1.0, [], []) == pytest.approx(0.85 * free)
    assert limit_bytes(subject.problem, 1.25, [], []) == pytest.approx(0.85 * free / 1.25)  # peaks come out a quarter higher
    assert limit_bytes(subject.problem, 1.0, [], [0.5 * free, 0.6 * free]) < 0.5 * free
    assert limit_bytes(subject.problem, 1.0, [0.9 * free], []) == 0.9 * free
    assert limit_bytes(subject.problem, 1.0, [0.55 * free], [0.5 * free]) == 0.55 * free


def test_after_running_out_of_memory_only_emptier_layouts_are_proposed(subject: Subject, study: TuningStudy) -> None:
    first, _ = ask(study, subject)
    study.tell(first.number, None, None, "out of memory")
    for _ in range(2):
        following, _ = ask(study, subject)
        assert following.predicted_gib < first.predicted_gib
    lessons = standing(study).lessons
    assert lessons.limit_bytes < first.predicted_gib * GIB
    ran_out = f"a predicted peak of {first.predicted_gib:.1f} GiB ran out of memory: layouts below it are proposed"
    assert ran_out in " ".join(lessons_lines(subject, lessons))


def test_of_two_claims_of_one_layout_the_earlier_holds(subject: Subject, study: TuningStudy) -> None:
    first, _ = ask(study, subject)
    other = TuningStudy("small", study.storage)
    assert other.claim(subject, first.layout, first.predicted_s, first.predicted_gib, None) is None
    assert [(one.number, one.state) for one in study.proposals()] == [(first.number, "running")]
    study.abandon(first.number)
    retaken = other.claim(subject, first.layout, first.predicted_s, first.predicted_gib, None)
    assert retaken is not None
    assert (retaken.state, retaken.number) == ("running", first.number + 1), "a claim that was lost takes no number"
    other.tell(retaken.number, 1.5, None, "ran")
    assert [(one.number, one.state) for one in study.proposals()] == [(0, "abandoned"), (1, "ran")]


def test_workers_side_by_side_never_get_the_same_layout(model: str, tmp_path: Path) -> None:
    """Two workers of one new file, each asking and telling twice in its own process."""
    storage = str(tmp_path / "shared.db")
    script = (
        "import sys\n"
        "from paraplan.optimizer.tune import ask\n"
        "from paraplan.optimizer.tuning_study import Subject, TuningStudy, layout_key\n"
        "from paraplan.search_spaces.inputs import build_problem\n"
        f"subject = Subject(build_problem({model!r}, 'hgx-a100', devices=8, global_batch=32, seq_len=2048, fix={FIXED!r}))\n"
        f"study = TuningStudy('shared', {storage!r}, create=True)\n"
        "for _ in range(2):\n"
        "    proposal, _plan = ask(study, subject)\n"
        "    print(layout_key(proposal.layout))\n"
        "    study.tell(proposal.number, None, None, 'failed')\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    layouts = [line for worker in workers for line in worker.communicate()[0].splitlines()]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert len(layouts) == len(set(layouts)) == 4
    told = [one for one in TuningStudy("shared", storage).proposals() if one.state == "failed"]
    assert sorted(layout_key(one.layout) for one in told) == sorted(layouts)


def test_a_worker_killed_between_ask_and_tell_leaves_a_proposal_to_take_up_or_give_up(model: str, tmp_path: Path) -> None:
    storage = str(tmp_path / "killed.db")
    script = (
        "import sys, time\n"
        "from paraplan.optimizer.cli import main\n"
        "main(sys.argv[1:])\n"
        "print('asked', flush=True)\n"
        "time.sleep(60)\n"
    )
    arguments = ["tune", "ask", model, *JOB, "--study", "k", "--storage", storage, "--json", "--quiet"]
    worker = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert any(line == "asked\n" for line in worker.stdout)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    study = TuningStudy("k", storage)
    (left,) = study.proposals()
    assert left.state == "running"
    retaken, launch = again(study, left.number)
    assert retaken == left
    assert launch.plan.layout.stages == left.layout.stages
    study.abandon(left.number)
    subject = study.subject()
    assert subject is not None
    assert layout_key(ask(study, subject)[0].layout) == layout_key(left.layout)  # nothing was learnt, so it is proposed again


def test_a_worker_killed_while_it_asks_leaves_a_storage_that_works(model: str, tmp_path: Path) -> None:
    storage = tmp_path / "half.db"
    worker = subprocess.Popen(command("ask", model, *JOB, "--study", "h", "--storage", str(storage)), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not storage.is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(worker.pid, signal.SIGKILL)  # while the tables are made, or just after
    worker.wait()
    assert main(["tune", "ask", model, *JOB, "--study", "h", "--storage", str(storage), "--quiet"]) == 0
    assert len(TuningStudy("h", str(storage)).proposals()) >= 1


def test_ask_writes_plan_and_script_and_the_commands_round_trip(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--study", "s", "--storage", f"sqlite:///{tmp_path / 'cli.db'}"]
    out = tmp_path / "runs"
    assert main(["tune", "ask", model, *JOB, *where, "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trial"] == 0
    assert sorted(path.name for path in (out / "trial-0").iterdir()) == [
        "hosts.csv",
        "megatron-lm.md",
        "megatron-lm.sh",
        "plan.json",
    ]
    assert json.loads((out / "trial-0" / "plan.json").read_text())["plan"]["layout"] == document["plan"]["layout"]
    assert main(["tune", "ask", *where, "--again", "0", "-o", str(tmp_path / "more"), "--quiet"]) == 0
    assert "trial 0" in capsys.readouterr().out.lower()
    assert main(["tune", "tell", *where, "--trial", "0", "--step-time", "1.5", "--peak-gib", "9"]) == 0
    assert "trial 0: 1.50 s" in capsys.readouterr().out
    assert main(["tune", "show", *where, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["best"]["measured_s"] == 1.5
    assert shown["learnt"]["figures"]["efficiency"]["value"] != shown["learnt"]["figures"]["efficiency"]["before"]
    assert main(["tune", "ask", *where, "--quiet"]) == 0  # the study's own problem
    capsys.readouterr()
    assert main(["tune", "list", *where, "--abandon", "1", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [one["state"] for one in trials] == ["ran", "abandoned"]


def test_what_is_wrong_is_said_in_one_sentence(
    model: str, subject: Subject, study: TuningStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(study, subject)
    where = ["--study", "small", "--storage", study.storage]
    wrong = {
        ("show", "--study", "small", "--storage", str(tmp_path / "none.db")): "there is no such file",
        ("show", "--study", "smal", "--storage", study.storage): "there is 'small'",
        ("show", "--study", "small", "--storage", "nosuch://host/db"): "no database URL",
        ("show", "--study", "small", "--storage", model): "damaged or no study of paraplan tune",
        ("show", "--study", "small", "--storage", str(tmp_path)): "is a folder; name a file in it",
        ("list", "--study", " ", "--storage", study.storage): "--study ' ': is empty",
        ("ask", *where, "--again", "77"): "--again 77: study",
        ("tell", *where, "--trial", "7", "--oom"): "no such proposal; there is 0",
        ("tell", *where, "--trial", "0"): "give one of",
        ("tell", *where, "--trial", "0", "--oom", "--failed"): "give one of",
        ("tell", *where, "--trial", "0", "--step-time", "-1"): "--step-time -1",
        ("tell", *where, "--trial", "0", "--oom", "--peak-gib", "70"): "--peak-gib 70",
        ("ask", model, "--cluster", "hgx-a100", *where): "--devices is missing",
        ("ask", "--devices", "16", *where): "need MODEL",
        ("ask", model, *JOB[:-2], *where): "workload.fix",
        ("list", *where, "--abandon", "3"): "--abandon 3: study",
    }
    for arguments, said in wrong.items():
        assert main(["tune", *arguments]) == 2, arguments
        complaint = capsys.readouterr().err
        assert said in complaint
        assert complaint.count("\n") == 1, complaint


@pytest.mark.parametrize("damage", ["cut", "garbage", "pages", "layout"])
def test_a_damaged_storage_is_named_with_the_remedy(
    damage: str, subject: Subject, study: TuningStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(study, subject)
    path = Path(study.storage)
    whole = path.read_bytes()
    middle = len(whole) // 3
    if damage == "layout":
        with sqlite3.connect(path) as opened:
            opened.execute("update trial_user_attributes set value_json = '{' where key = 'layout'")
        opened.close()
    else:
        broken = {"cut": whole[:middle], "garbage": b"x" * middle, "pages": whole[:middle] + b"x" * middle + whole[2 * middle :]}
        path.write_bytes(broken[damage])
    assert main(["tune", "show", "--study", "small", "--storage", study.storage]) == 2
    complaint = capsys.readouterr().err
    assert f"--storage {study.storage}: is damaged or no study" in complaint
    assert "restore a copy" in complaint and complaint.count("\n") == 1


def test_a_result_is_taken_once(subject: Subject, study: TuningStudy) -> None:
    proposal, _ = ask(study, subject)
    study.tell(proposal.number, 1.0, None, "ran")
    with pytest.raises(InputError, match="ran already"):
        study.tell(proposal.number, 2.0, None, "ran")
    with pytest.raises(InputError, match="ran already"):
        study.abandon(proposal.number)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (["--step-time", "1e-9"], "faster than the peak of 8 x a100-80gb-sxm allows"),
        (["--step-time", "1e12"], "no step takes more than a week"),
        (["--step-time", "1.5", "--peak-gib", "99999"], "has 79.15 GiB"),
    ],
)
def test_an_impossible_result_is_refused_and_not_stored(
    subject: Subject, study: TuningStudy, result: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(study, subject)
    assert main(["tune", "tell", "--study", "small", "--storage", study.storage, "--trial", "0", *result]) == 2
    assert said in capsys.readouterr().err
    assert study.proposal(0).state == "running"


def test_a_told_result_is_corrected(subject: Subject, study: TuningStudy, capsys: pytest.CaptureFixture[str]) -> None:
    proposal, _ = ask(study, subject)
    tell = ["tune", "tell", "--study", "small", "--storage", study.storage, "--trial", "0"]
    assert main([*tell, "--oom", "--correct"]) == 2
    assert "leave --correct out" in capsys.readouterr().err
    assert main([*tell, "--step-time", "15", "--peak-gib", "9"]) == 0
    assert main([*tell, "--step-time", "1.5"]) == 2
    assert "--correct puts another result" in capsys.readouterr().err
    assert main([*tell, "--step-time", "1.5", "--correct"]) == 0
    assert (study.proposal(0).measured_s, study.proposal(0).measured_gib) == (1.5, None)
    assert main([*tell, "--oom", "--correct"]) == 0
    assert (study.proposal(0).state, study.proposal(0).measured_s) == ("out of memory", None)
    assert layout_key(study.proposal(0).layout) == layout_key(proposal.layout)


def test_a_study_of_something_else_in_the_storage_is_refused(study: TuningStudy) -> None:
    import optuna

    optuna.create_study(study_name="other", storage=f"sqlite:///{study.storage}").add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(InputError, match="not one of paraplan tune"):
        TuningStudy("other", study.storage).proposals()

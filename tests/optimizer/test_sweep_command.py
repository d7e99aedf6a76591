"""`paraplan sweep` as it is typed: real plans by real worker processes."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer import build_problem, plan, sweep
from paraplan.optimizer.cli import main
from paraplan.optimizer.commands.sweeping import _refused
from paraplan.optimizer.reports.sweep import render_sweep
from paraplan.optimizer.sweeps import workers
from paraplan.optimizer.sweeps.grid import read_sweep
from paraplan.optimizer.sweeps.point import Outcome
from paraplan.optimizer.sweeps.series import with_efficiencies
from paraplan.optimizer.sweeps.store import Store
from paraplan.optimizer.sweeps.sweeper import run_sweep
from paraplan.optimizer.sweeps.table import EFFICIENCIES
from paraplan.optimizer.sweeps.workers import Processes
from rich.console import Console

SWEEP = """
models: [llama-3.1-8b, no-such-model]
clusters: [hgx-h100]
devices: [1, 8]
global_batch: [4 per device]
seq_len: [4096]
options: {top: 1, fix: offload=none}
"""
PARAPLAN = [sys.executable, "-m", "paraplan.optimizer.cli"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep that has run: its YAML and its store."""
    folder = tmp_path_factory.mktemp("swept")
    path, store = folder / "sweep.yaml", str(folder / "sweep.sqlite")
    path.write_text(SWEEP)
    assert main(["sweep", str(path), "--store", store, "--workers", "1", "--quiet"]) == 0
    return path, store


def shown(store: str, query: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["sweep", "--store", store, "--show", query, "--json"]) == 0
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


def test_every_point_is_the_plan_that_plan_makes_or_a_reason(swept: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    points = shown(swept[1], "", capsys)
    assert [(point["model"], point["devices"], point["status"]) for point in points] == [
        ("llama-3.1-8b", 1, "infeasible"),
        ("llama-3.1-8b", 8, "optimal"),
        ("no-such-model", 1, "bad input"),
        ("no-such-model", 8, "bad input"),
    ]
    alone = plan(build_problem("llama-3.1-8b", "hgx-h100", 8, 32, 4096, fix="offload=none"), top=1, inside_by_default=True)
    found = points[1]["plan"]
    assert found["layout"] == json.loads(alone.to_json())["plan"]["layout"]
    assert found["step_time_s"] == alone.plan.step_time_s
    assert "No layout fits" in points[0]["reason"]
    assert "no-such-model" in points[2]["reason"]
    assert "plan" not in points[0]
    assert [point["devices"] for point in shown(swept[1], "model=llama*,devices>=8", capsys)] == [8]


def test_no_name_or_figure_is_broken_in_a_narrow_terminal(
    swept: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("40", "80", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["sweep", "--store", swept[1], "--show", "devices=8", "-q"]) == 0
        table = capsys.readouterr().out.split("Without a plan")[0]
        assert "llama-3.1-8b" in table and "no-such-model" in table and re.search(r"\d (s|ms) .*\d%  \w", table)


def test_a_wide_table_says_how_well_each_point_scales(capsys: pytest.CaptureFixture[str]) -> None:
    point = {"model": "llama-3.1-70b", "cluster": "hgx-h100", "seq_len": 4096, "precision": "bf16", "status": "optimal"}
    layout = {**dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "vpp"), 1), "recompute": "none", "offload": "none", "reason": None}
    point |= {**layout, "step_time_s": 1.0, "mfu": 0.4}
    rates = {(64, 256): 200.0, (128, 256): 150.0, (128, 512): 190.0}
    rows = [
        {**point, "devices": devices, "global_batch": batch, "tokens_per_s_per_device": rate}
        for (devices, batch), rate in rates.items()
    ]
    for width, scales in ((110, ["100%  100%", "75%  –", "–  95%"]), (80, ["100%", "75%", "–"]), (60, ["", "", ""])):
        render_sweep(with_efficiencies(rows), 0, "s.sqlite", Console(width=width))
        lines = [line for line in capsys.readouterr().out.splitlines() if "40.0%" in line]
        between = [re.sub(" +", "  ", line.split("40.0%")[1].split("one device")[0].strip()) for line in lines]
        assert between == scales


def test_a_name_stands_once_above_all_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stacks take turns in the store and lines are too short for names."""
    asked = {"model": "llama-3.1-70b", "cluster": "hgx-h100", "global_batch": 8, "seq_len": 4096, "precision": "bf16"}
    stacks = ("a-stack-whose-name-takes-more-than-half-of-such-a-line", "nemo-25")
    point = {**asked, "status": "infeasible", "reason": "nothing fits"}
    rows = [{**point, "devices": devices, "option stack": stack} for devices in (8, 16, 32) for stack in stacks]
    render_sweep(rows, 0, "s.sqlite", Console(width=80))
    lines = [line.strip() for line in capsys.readouterr().out.split("Without a plan")[0].splitlines()]
    assert [line for line in lines if line in stacks] == list(stacks)


def test_reasons_that_are_nearly_alike_say_whose_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Two reasons that differ in their last words: the option that splits them stands below each, what all share does not."""
    point = {"model": "llama-3.1-70b", "cluster": "hgx-h100", "devices": 8, "global_batch": 8, "seq_len": 4096, "precision": "bf16"}
    words = {"megatron-lm": "No layout fits: 16 devices.", "nemo-25": "No layout fits: 16 devices; gradients in bf16."}
    rows = [{**point, "option stack": stack, "status": "infeasible", "reason": said} for stack, said in words.items()]
    render_sweep(rows, 0, "s.sqlite", Console(width=100))
    lines = [line.strip() for line in capsys.readouterr().out.split("Without a plan")[1].splitlines() if line.strip()]
    assert [lines[1], lines[3]] == ["stack megatron-lm", "stack nemo-25"]


def test_the_library_sweeps_in_the_same_words(swept: tuple[Path, str]) -> None:
    rows = sweep(swept[0], swept[1], workers=1)
    assert [(row["model"], row["devices"], row["status"]) for row in rows][:2] == [
        ("llama-3.1-8b", 1, "infeasible"),
        ("llama-3.1-8b", 8, "optimal"),
    ]
    assert rows[1]["parameters"] > 8e9


def test_the_same_command_again_plans_nothing(swept: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(swept[1]).read_bytes()
    assert main(["sweep", str(swept[0]), "--store", swept[1], "--workers", "1"]) == 0
    told = capsys.readouterr()
    assert "nothing to plan" in told.err
    assert "no-such-model" in told.out
    assert main(["sweep", "--store", swept[1], "--show", ""]) == 0
    assert len(Path(swept[1]).read_bytes()) == len(before)


def test_tables_and_exports_hold_what_is_shown(swept: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--store", swept[1], "--csv", str(tmp_path / "t.csv"), "--export", "megatron-lm", "-o", str(tmp_path / "x")]
    assert main([*command, "--show", "devices=8"]) == 0
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [(row["model"], row["status"], row["option top"]) for row in rows] == [
        ("llama-3.1-8b", "optimal", "1"),
        ("no-such-model", "bad input", "1"),
    ]
    assert float(rows[0]["step_time_s"]) == shown(swept[1], "status=optimal", capsys)[0]["plan"]["step_time_s"]
    assert [rows[0][name] for name in EFFICIENCIES] == ["", ""]  # the only count of devices that has a plan
    (folder,) = (tmp_path / "x").iterdir()
    assert folder.name.startswith("llama-3.1-8b-hgx-h100-8-32-4096-bf16-")
    assert {"plan.json", "megatron-lm.sh"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("query", ["devices=8", "status!=optimal"])
def test_an_export_that_writes_nothing_is_no_success(
    query: str, swept: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the framework cannot express a plan that is picked or none is picked; also to the quiet."""
    command = ["sweep", "--store", swept[1], "--show", query, "--export", "mindspeed-llm", "-o", str(tmp_path / "x"), "-q"]
    assert main(command) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"paraplan: wrote 0 plans for mindspeed-llm to {tmp_path / 'x'}"
    if query == "devices=8":
        assert told[1].startswith("paraplan: 1 × not written: MindSpeed-LLM runs on Ascend")
        assert told[-1] == "paraplan: plan with options: {framework: mindspeed-llm}"
    assert not (tmp_path / "x").exists()


def test_plans_that_are_refused_for_one_reason_are_told_as_one() -> None:
    """Two of three models, in three points of five: which they are, and the reason once."""
    point = {"cluster": "c", "global_batch": 8, "seq_len": 1, "precision": "bf16", "status": "optimal"}
    picked = [
        (f"{model}{devices}", {**point, "model": model, "devices": devices})
        for model, devices in (("a", 8), ("a", 16), ("b", 8), ("c", 8), ("c", 16))
    ]
    said = _refused(picked, dict.fromkeys(("a8", "a16", "b8"), "too new") | {"c8": "too old"}, "deepspeed")
    assert said == (
        *("3 × not written: too new", "    model a, b"),
        *("1 × not written: too old", "    model c · devices 8"),
        "plan with options: {framework: deepspeed}",
    )
    made_for_it = [(key, {**row, "option framework": "deepspeed"}) for key, row in picked]
    assert _refused(made_for_it, {"b8": "too new"}, "deepspeed") == ("1 × not written: too new", "    model b · devices 8")


def test_parquet_holds_the_same_typed(swept: tuple[Path, str], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (paraplan[parquet])")
    assert main(["sweep", "--store", swept[1], "--show", "", "--parquet", str(tmp_path / "t.parquet")]) == 0
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.num_rows == 4
    assert str(table.schema.field("devices").type) == "int64"
    assert {str(table.schema.field(name).type) for name in ("step_time_s", *EFFICIENCIES)} == {"double"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--store", "s.sqlite"], "there is no such file"),
        (["no.yaml", "--store", "s.sqlite"], "no.yaml: there is no such file"),
        (["--store", "s.sqlite", "--workers", "0"], "--workers 0"),
        (["--store", "s.sqlite", "--workers", "2"], "there is nothing to plan"),
        (["s.yaml", "--store", "s.sqlite", "--export", "megatron-lm"], "give both or neither"),
        (["s.yaml", "--store", "s.sqlite", "--export", "fairseq", "-o", "x"], "--export 'fairseq' is nothing that files can be"),
        (["s.yaml", "--store", "s.sqlite", "--export", "megatron", "-o", "x"], "did you mean 'megatron-lm' or 'megatron-bridge'?"),
        (["s.yaml", "--store", "s.sqlite", "--ray", "auto", "--workers", "2"], "--workers 2"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_planned(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_worker_is_replaced_and_its_point_retaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sweep.yaml"
    monkeypatch.setattr(workers, "RENEWED_AFTER", 1)  # after a point of its own, a worker is replaced too
    path.write_text(SWEEP.replace("llama-3.1-8b, ", "").replace("[1, 8]", "[8, 16]"))

    class Struck(Processes):
        struck = False

        def wait(self, seconds: float) -> list[tuple[str, Outcome | None]]:
            if not self.struck:
                os.kill(self.processes[0], signal.SIGKILL)
                self.struck = True
            return super().wait(seconds)

    store, pool = Store(str(tmp_path / "s.sqlite")), Struck(1)
    first = pool.processes
    try:
        run_sweep(read_sweep(path), tmp_path, store, pool)
        assert not set(pool.processes) & set(first)
        assert [stored.outcome.status for stored, _ in store.stored()] == ["bad input", "bad input"]
    finally:
        pool.close()
        store.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_a_kill_leaves_no_orphan_and_nothing_claimed(tmp_path: Path, number: signal.Signals) -> None:
    path, store = tmp_path / "sweep.yaml", str(tmp_path / "s.sqlite")
    path.write_text(SWEEP.replace("llama-3.1-8b, no-such-model", "moe-10t").replace("[1, 8]", "[16384]"))  # seconds to plan
    command = [*PARAPLAN, "sweep", str(path), "--store", store, "--workers", "1"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = waited(lambda: children(run.pid))
    waited(lambda: Path(store).exists() and owners(store))
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert waited(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    if number == signal.SIGINT:
        assert "interrupted: 0 of 1 points are in" in said
        assert owners(store) == []
    with_it = Store(store)
    with_it.free_the_dead()
    with_it.close()
    assert owners(store) == []


TINY = """
models: [llama-3.2-3b]
clusters: [hgx-h100]
devices: [4, 8]
global_batch: [8, 16, 24, 32, 40]
seq_len: [1024]
options: {top: 1, fix: "offload=none,recompute=none,micro_batch=1,cp=1,pp=1"}
"""


def test_the_command_killed_again_and_again_ends_with_every_point_planned_once(tmp_path: Path) -> None:
    """Five kills of real processes, while they start or once they have a result or two more; no result changes afterwards."""
    path, store, draw = tmp_path / "sweep.yaml", str(tmp_path / "s.sqlite"), random.Random(3)
    path.write_text(TINY)
    command = [*PARAPLAN, "sweep", str(path), "--store", store, "--workers", "1", "--quiet"]
    kept: dict[str, tuple[str, ...]] = {}
    for kill in range(5):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        more = len(kept) + draw.randint(1, 2)
        if kill % 2:
            waited(lambda more=more: len(finished(store)) >= more, 120)
        time.sleep(draw.uniform(0.0, 0.1))
        run.kill()
        assert run.wait() == -signal.SIGKILL
        found = finished(store)
        assert kept.items() <= found.items()
        kept = found
    assert len(kept) < 10
    assert main(command[len(PARAPLAN) :]) == 0
    assert kept.items() <= finished(store).items()
    assert [row[0] for row in finished(store).values()] == ["optimal"] * 10 and owners(store) == []


def finished(store: str) -> dict[str, tuple[str, ...]]:
    """What was written of each point that is done, in the moment that it ended."""
    if not Path(store).exists():
        return {}
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        try:
            chosen = "SELECT key, status, record, seal, ended, seconds FROM paraplan_sweep_points WHERE state = 'done'"
            return {row[0]: row[1:] for row in connection.execute(chosen)}
        except sqlite3.OperationalError:  # no tables yet
            return {}


def owners(store: str) -> list[str]:
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as connection:
        try:
            return [row[0] for row in connection.execute("SELECT owner FROM paraplan_sweep_points WHERE owner IS NOT NULL")]
        except sqlite3.OperationalError:  # no tables yet
            return []


def children(number: int) -> list[int]:
    text = Path(f"/proc/{number}/task/{number}/children").read_text()
    return [int(word) for word in text.split()]


def waited(true: Any, seconds: int = 30) -> Any:
    for _ in range(100 * seconds):
        if found := true():
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited for {seconds} s")

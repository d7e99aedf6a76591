"""The command line: exit status, what goes to which stream, and one sentence for whatever is wrong."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.cli import main
from paraplan.optimizer.commands import COMMANDS as LISTED
from paraplan.optimizer.commands import GROUPS
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.layout import Layout, Problem

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the sample lies beside them
from sample_plan import sample_layout, sample_plan, sample_priced, sample_problem

JOB = ["--cluster", "hgx-h800", "--devices", "2048", "--global-batch", "15360", "--seq-len", "4096"]
COMMANDS = [(name,) for listed in LISTED.values() for name in listed]
DOOR = importlib.import_module("paraplan.optimizer.planner")
PRICES = importlib.import_module("paraplan.optimizer.evaluation")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model file, so that nothing here rests on what the catalog has."""
    path = tmp_path / "model.yaml"
    path.write_text(sample_problem().model.model_dump_json(exclude_none=True), encoding="utf-8")
    return str(path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the front door by one that answers at once; holds what it was asked."""
    seen: dict[str, Any] = {}

    def plan(problem: Problem, **options: Any) -> Any:
        seen.update(problem=problem, **options)
        return sample_plan()

    def evaluate(problem: Problem, layout: Layout, **options: Any) -> Any:
        seen.update(problem=problem, layout=layout, **options)
        return sample_priced(), ()

    monkeypatch.setattr(DOOR, "plan", plan)
    monkeypatch.setattr(PRICES, "evaluate", evaluate)
    return seen


def answers(value: Any) -> Callable[..., Any]:
    """A front door that returns the value, or raises it."""

    def door(*_: Any, **__: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return door


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "paraplan.optimizer.cli", *arguments], capture_output=True, text=True, **options)


# --- results -----------------------------------------------------------------------------------------------------------------


def test_plan_reaches_the_front_door_with_every_flag(model: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--fix", "pp=16", "--fix", "ep=8|64", "--forbid", "tp>4", "--constraint", "tp*cp<=8", "--inside", "supernode:tp,sp"]
    flags += ["--top", "3", "--time-limit", "9.5", "--engine", "bnb", "--memory-margin", "0.1", "--vocab-size", "130000"]
    flags += ["--expert-imbalance", "1.3", "--precision", "fp8", "--stack", "megatron-lm"]
    assert main(["plan", model, *JOB, *flags]) == 0
    work = asked["problem"].workload
    assert work.fix == {"etp": ("1",), "pp": ("16",), "ep": ("8", "64")}
    assert work.forbid == ("tp>4", "tp*cp>8")
    assert work.inside == {"server": ("tp",)}
    assert (work.precision, work.vocab_size, work.expert_imbalance, work.memory_margin.fraction) == ("fp8", 130000, 1.3, 0.1)
    assert (asked["top"], asked["time_limit_s"], asked["engine"], asked["profile"]) == (3, 9.5, "bnb", None)
    out, err = capsys.readouterr()
    assert "pp 16" in out
    assert err == ""


def test_plan_json_is_one_document(model: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, *JOB, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plan"]["layout"]["ep"] == 64
    assert err == ""


def test_out_writes_the_plan_with_groups_and_the_launch_files(
    model: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *JOB, "--out", str(tmp_path / "deep" / "plan")]) == 0
    names = {path.name for path in (tmp_path / "deep" / "plan").iterdir()}
    document = json.loads((tmp_path / "deep" / "plan" / "plan.json").read_text(encoding="utf-8"))
    assert names > {"plan.json"}
    assert document["groups"]["ep"][0] == list(range(64))
    assert {len(ranks) for ranks in document["groups"]["pp"]} == {16}
    assert document["certificate"] == json.loads(sample_plan().to_json())["certificate"]
    assert "plan.json" in capsys.readouterr().err


def test_a_written_plan_can_be_exported(
    model: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", model, *JOB, "--out", str(tmp_path / "a"), "--quiet"])
    capsys.readouterr()
    assert main(["export", str(tmp_path / "a" / "plan.json"), "--to", "megatron-lm", "-o", str(tmp_path / "b")]) == 0
    written = capsys.readouterr().out.split()
    assert written
    assert all(Path(path).is_file() for path in written)
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_an_export_writes_over_files_only_when_told_to(
    model: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same export again replaces nothing that reads otherwise, and says nothing; what a person changed stays, all of it."""
    (tmp_path / "plan.json").write_text(sample_plan().to_json(), encoding="utf-8")
    command = ["export", str(tmp_path / "plan.json"), "--to", "megatron-lm", "-o", str(tmp_path / "b")]
    for _ in range(2):
        assert main(command) == 0
        assert capsys.readouterr().err == ""
    script = tmp_path / "b" / "megatron-lm.sh"
    (tmp_path / "b" / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "b" / "hosts.csv").write_text("mine", encoding="utf-8")
    script.unlink()
    assert main(command) == 2
    assert "hosts.csv" in (said := capsys.readouterr().err) and "--force" in said
    assert (tmp_path / "b" / "hosts.csv").read_text("utf-8") == "mine" and not script.exists()
    assert main([*command, "--force"]) == 0
    assert "replaced 1 file" in (said := capsys.readouterr().err) and "hosts.csv" in said
    assert (tmp_path / "b" / "notes.txt").read_text("utf-8") == "mine" and script.is_file()
    (tmp_path / "b" / "hosts.csv").write_text("mine", encoding="utf-8")
    assert main([*command, "--force", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["catalog", "models", "-q"]) == 0


def test_quiet_leaves_standard_error_empty(
    model: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *JOB, "--out", str(tmp_path / "a"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_evaluate_json_has_the_keys_of_a_plan(model: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", model, *JOB, "--layout", "pp=16,ep=64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["step_time_s"] == 30.25
    assert len(document["plan"]["stages"]) == len(document["plan"]["memory"]["stages"]) == document["plan"]["layout"]["pp"]
    assert set(document) == {"paraplan", "problem", "assumptions", "plan"}


def test_evaluate_lets_the_layout_say_etp(model: str, asked: dict[str, Any]) -> None:
    assert main(["evaluate", model, *JOB, "--layout", "etp=2,ep=8"]) == 0
    assert asked["problem"].workload.fix == {"etp": ("2",)}
    assert (asked["layout"].etp, asked["layout"].edp) == (2, 128)


def test_catalog_lists_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog"]) == 0
    assert "hgx-h800" in capsys.readouterr().out
    assert main(["catalog", "clusters"]) == 0
    assert "hgx-h800" in capsys.readouterr().out.splitlines()
    assert main(["catalog", "clusters", "hgx-h800"]) == 0
    assert "accelerator: h800" in capsys.readouterr().out


def test_catalog_is_one_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    def document(*arguments: str) -> dict[str, Any]:
        assert main(["catalog", *arguments, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    assert "hgx-h800" in document()["clusters"] and document()["clusters"] == document("clusters")["clusters"]
    assert document("clusters", "hgx-h800")["accelerator"] == "h800"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["plan", "--help"], ["--version"]])
def test_help_and_version_are_results(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "paraplan" in out
    assert err == ""


@pytest.mark.parametrize("words", [*COMMANDS, *(("tune", name) for name in GROUPS["tune"][1])], ids=" ".join)
def test_help_has_a_line_for_every_option_and_an_example(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    options = {line.split("  ")[1] for line in lines if line.startswith("  -")}
    assert "--help" in options
    example = lines[lines.index("Example:") + 1]
    assert example.startswith(f"  paraplan {' '.join(words)} ")
    told = re.findall(r"(?<=\s)--?[a-z][a-z-]*", " ".join(lines[lines.index("Example:") :]))
    assert all(any(name in option.replace(",", "").split() for option in options) for name in told)


# --- no layout ---------------------------------------------------------------------------------------------------------------


def test_infeasible_is_status_1_with_its_reasons(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DOOR, "plan", answers(Infeasible("no layout fits", ("states need 12 TB", "devices ≥ 209 would do"))))
    assert main(["plan", model, *JOB, "--out", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["paraplan: no layout fits", "  states need 12 TB", "  devices ≥ 209 would do"]
    assert not (tmp_path / "out").exists()


def test_infeasible_as_json(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(DOOR, "plan", answers(Infeasible("no layout fits", ("states need 12 TB",))))
    assert main(["plan", model, *JOB, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": "no layout fits", "reasons": ["states need 12 TB"]}
    assert err == ""


def test_an_illegal_layout_is_status_1(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(PRICES, "evaluate", answers((sample_priced(), ("tp = 3 does not divide the 128 heads",))))
    arguments = ["evaluate", model, *JOB, "--layout", "tp=3"]
    assert main([*arguments, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out.index("NOT LEGAL") < out.index("tp = 3 does not divide the 128 heads") < out.index("peak memory")
    assert err.splitlines() == ["paraplan: this layout is not legal"]
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["reasons"] == ["tp = 3 does not divide the 128 heads"]
    assert document["plan"]["step_time_s"] == 30.25


def test_a_plan_that_the_framework_cannot_express_is_kept(
    model: str, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporters = importlib.import_module("paraplan.optimizer.exporters")
    monkeypatch.setattr(exporters, "render", answers(Infeasible("megatron-lm cannot express dualpipe")))
    assert main(["plan", model, *JOB, "--framework", "megatron-lm", "--out", str(tmp_path / "out")]) == 1
    assert "plan.json" in (said := capsys.readouterr().err) and "launch files are not: megatron-lm cannot express" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "hostfile"}
    assert main(["plan", model, *JOB, "--out", str(tmp_path / "out")]) == 0, (
        "of the stack's own framework, the plan without its launch files"
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "hostfile"}


# --- bad input ---------------------------------------------------------------------------------------------------------------


def test_stages_that_were_edited_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(sample_plan().to_json())
    document["plan"]["layout"]["stages"][-1]["chunks"][-1]["layers"] = [0, 500]
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(document))
    for command in (["timeline", str(edited), "-o", str(tmp_path / "t.json")], ["why", str(edited), "--not", "tp=2"]):
        assert main(command) == 2
        assert "holds layers 0 to 500, and" in capsys.readouterr().err


PLAN = ["plan", "MODEL", *JOB]
EVALUATE = ["evaluate", "MODEL", *JOB]
BAD = [
    (["plan", "no-such-model", *JOB], "no-such-model"),
    (["plan", "\x1b[31mred\n\n", *JOB], "neither in the catalog"),
    (["plan", "./no-such/config.json", *JOB], "model: ./no-such/config.json: there is no such file\n"),
    (["plan", "no-such.yaml", *JOB], "model: no-such.yaml: there is no such file\n"),
    (["plan", "MODEL", "--cluster", "hgx-h801", *JOB[2:]], "hgx-h800"),
    (["plan", "MODEL", *JOB[2:]], "--cluster"),
    (["plan", *JOB], "argument"),
    ([*PLAN, "--devices", "-8"], "-8"),
    ([*PLAN, "--devices", "0"], "0"),
    ([*PLAN, "--devices", "eight"], "eight"),
    ([*PLAN, "--devices", "8.5"], "8.5"),
    ([*PLAN, "--global-batch", "-1"], "-1"),
    ([*PLAN, "--seq-len", "4k"], "4k"),
    ([*PLAN, "--seq-len", "0"], "seq_len"),
    ([*PLAN, "--stack", "no-such-stack"], "no-such-stack"),
    ([*PLAN, "--precision", "int3"], "int3"),
    ([*PLAN, "--fix", "tpp=8"], "tpp"),
    ([*PLAN, "--fix", "tp"], "tp"),
    ([*PLAN, "--fix", "tp=0"], "tp"),
    ([*PLAN, "--fix", "tp=2", "--fix", "tp=4"], "twice"),
    ([*PLAN, "--forbid", "pp"], "pp"),
    ([*PLAN, "--constraint", "tp*cp"], "tp*cp"),
    ([*PLAN, "--constraint", "__import__('os')<=1"], "constraint"),
    ([*PLAN, "--inside", "galaxy:tp"], "galaxy"),
    *(([*PLAN, option, " "], option) for option in ("--fix", "--forbid", "--constraint", "--inside")),
    ([*PLAN, "--framework", "no-such-framework"], "no-such-framework"),
    ([*PLAN, "--framework-version", "0.16"], "framework"),
    ([*PLAN, "--engine", "guess"], "bnb"),
    ([*PLAN, "--top", "0"], "--top"),
    ([*PLAN, "--time-limit", "0"], "--time-limit"),
    ([*PLAN, "--time-limit", "nan"], "--time-limit"),
    ([*PLAN, "--devices", "9" * 40], "9 digits"),
    ([*PLAN, "--time-limit", "soon"], "soon"),
    ([*PLAN, "--memory-margin", "1.5"], "margin"),
    ([*PLAN, "--memory-margin", "nan"], "'nan' is not a finite number"),
    ([*PLAN, "--expert-imbalance", "0.5"], "expert_imbalance"),
    ([*PLAN, "--vocab-size", "-5"], "vocab_size"),
    ([*PLAN, "--no-such-flag"], "--no-such-flag"),
    ([*PLAN, "--out", "FILE"], "in the way"),
    ([*PLAN, "--out", "FILE/deeper"], "in the way"),
    ([*EVALUATE], "--layout"),
    ([*EVALUATE, "--layout", "tp:8"], "tp:8"),
    ([*EVALUATE, "--layout", "tp="], "tp="),
    ([*EVALUATE, "--layout", "tp=8|16"], "8|16"),
    ([*EVALUATE, "--layout", "tp=-8"], "-8"),
    ([*EVALUATE, "--layout", "tp=1e3"], "1e3"),
    ([*EVALUATE, "--layout", "tp=8,tp=4"], "twice"),
    ([*EVALUATE, "--layout", "pipeline=8"], "pipeline"),
    ([*EVALUATE, "--layout", "lora_rank=8"], "LoRA"),
    ([*EVALUATE, "--layout", "recompute=selective:nothing"], "nothing"),
    ([*EVALUATE, "--layout", "offload=optimizer:2"], "optimizer:2"),
    (["export", "no-such-plan.json", "--to", "megatron-lm", "-o", "OUT"], "no such file"),
    (["export", "OUT", "--to", "megatron-lm", "-o", "OUT"], "out"),
    (["export", "FILE", "--to", "megatron-lm", "-o", "OUT"], "JSON"),
    (["export", "PLAN", "--to", "no-such-framework", "-o", "OUT"], "no-such-framework"),
    (["export", "PLAN", "--to", "megatron-lm", "-o", "FILE"], "in the way"),
    (["export", "PLAN", "--to", "megatron-lm"], "--out"),
    (["export", "PLAN", "--to", "megatron-lm", "-o", "OUT", "--framework-version", "7"], "newest known, 0.19"),
    ([*PLAN, "--framework", "megatron-lm", "--framework-version", "7"], "0.12, 0.16"),
    (["report", "LAYOUT", "-o", "OUT.html"], "plan --out or plan --json"),
    (["export", "MODEL", "--to", "megatron-lm", "-o", "OUT"], "model.yaml"),
    (["catalog", "planets"], "planets"),
    (["catalog", "clusters", "hgx-h801"], "hgx-h800"),
    (["catalog", "clusters", "../models/x"], "neither"),
    (["frobnicate"], "frobnicate"),
]


@pytest.mark.parametrize(("arguments", "mentioned"), BAD, ids=[" ".join(map(ascii, case[0][-3:])) for case in BAD])
def test_bad_input_is_one_sentence(
    arguments: list[str], mentioned: str, model: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not json", encoding="utf-8")
    (tmp_path / "plan.json").write_text(sample_plan().to_json(), encoding="utf-8")
    places = {"MODEL": model, "FILE": str(tmp_path / "file"), "PLAN": str(tmp_path / "plan.json"), "OUT": str(tmp_path / "out")}
    priced = {"problem": json.loads(sample_plan().problem.model_dump_json()), "plan": json.loads(sample_priced().model_dump_json())}
    (tmp_path / "layout.json").write_text(json.dumps(priced), encoding="utf-8")
    places["LAYOUT"] = str(tmp_path / "layout.json")
    places["FILE/deeper"] = places["FILE"] + "/deeper"
    before = sorted(tmp_path.iterdir())
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paraplan: ")
    assert err.count("\n") == 1
    assert mentioned in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", "", '{"plan": NaN}', "{" * 100_000, '{"paraplan": 1, "paraplan": 2}', "\x00"], ids=range(8)
)
def test_export_refuses_what_is_no_plan(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    assert main(["export", str(path), "--to", "megatron-lm", "-o", str(tmp_path / "out")]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_refuses_bytes_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "megatron-lm", "-o", str(tmp_path / "out")]) == 2
    assert "UTF-8" in capsys.readouterr().err


# --- what a layout leaves out ------------------------------------------------------------------------------------------------


def test_what_a_layout_leaves_out_follows_from_the_rest() -> None:
    layout = complete(sample_problem(), parse_layout("pp=16,ep=64,recompute=selective:mla_up_proj+mlp"))
    assert layout.model_copy(update={"stages": sample_layout().stages}) == sample_layout()
    assert complete(sample_problem(), parse_layout("tp=8, PP=16, vpp=2")).schedule == "interleaved"
    assert complete(sample_problem(), parse_layout("tp=8,sequence-parallel=false")).sequence_parallel is False
    assert complete(sample_problem(), parse_layout("tp=8,sequence_parallel=OFF")).sequence_parallel is False
    assert complete(sample_problem(), parse_layout("tp=8,sequence_parallel=on")).sequence_parallel is True
    assert complete(sample_problem(), parse_layout("tp=8,dp=3")).dp == 3


def test_a_stack_without_the_usual_choice_gets_its_own_first() -> None:
    problem = sample_problem()
    stack = problem.stack.model_copy(update={"cp_types": ("allgather",), "optimizer_shardings": ("zero3",)})
    layout = complete(problem.model_copy(update={"stack": stack}), {})
    assert (layout.cp_type, layout.optimizer_sharding) == ("allgather", "zero3")


# --- interrupts, pipes, defects ----------------------------------------------------------------------------------------------


def test_an_interrupt_is_status_130_with_a_word(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DOOR, "plan", answers(KeyboardInterrupt()))
    assert main(["plan", model, *JOB]) == 130
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "paraplan: interrupted")


@pytest.mark.parametrize("module", ["numpy", "ortools.sat.python.cp_model", "typer"])
def test_an_interrupt_while_a_module_is_loaded_is_one_too(model: str, tmp_path: Path, module: str) -> None:
    """The module is replaced by one that is interrupted, and says so in its own way."""
    lines = ("import os, signal, time", "try:", "    os.kill(os.getpid(), signal.SIGINT); time.sleep(1)")
    end = ("except KeyboardInterrupt:", "    raise ImportError('initialization failed')")
    (tmp_path / f"{module.rpartition('.')[2]}.py").write_text("\n".join((*lines, *end)), encoding="utf-8")
    code = (
        "import importlib.machinery, sys\n"
        "from paraplan.optimizer.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            return importlib.machinery.PathFinder.find_spec(name.rpartition('.')[2], [{str(tmp_path)!r}])\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    engine = ["--engine", "cp-sat"] if "ortools" in module else []
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", model, *JOB, *engine, "--fix", "tp=1,pp=16,ep=64"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "paraplan: interrupted\n")


def test_an_early_interrupt_is_status_130() -> None:
    """Sent as soon as the entry point is there, while typer and the commands are loaded."""
    code = (
        "import os, signal, sys, threading\n"
        "from paraplan.optimizer.cli import main\n"
        "threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "sys.exit(main(['catalog']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "paraplan: interrupted\n")


def test_a_defect_is_named_without_a_traceback(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DOOR, "plan", answers(ZeroDivisionError("division by zero")))
    assert main(["plan", model, *JOB]) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert err.count("\n") == 1
    monkeypatch.setenv("PARAPLAN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["plan", model, *JOB])


def test_input_errors_of_the_front_door_are_bad_input(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DOOR, "plan", answers(InputError("profile.yaml: e_max is missing")))
    assert main(["plan", model, *JOB]) == 2
    assert capsys.readouterr().err == "paraplan: profile.yaml: e_max is missing\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_closed_pipe_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "paraplan.optimizer.cli", "catalog"], stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
@pytest.mark.parametrize(("closed", "status", "said"), [(">&-", 2, "standard output is closed"), ("2>&-", 0, "")])
def test_a_closed_stream_is_no_defect(closed: str, status: int, said: str) -> None:
    line = f'"{sys.executable}" -m paraplan.optimizer.cli catalog {closed}'
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == status
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paraplan.optimizer.cli", "catalog"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr.count("\n") == 1
    assert done.returncode == 2


def test_a_terminal_without_unicode_gets_plain_forms() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = command("evaluate", "model", *JOB, "--layout", "tp=2×4", env=environment)
    assert done.returncode == 2
    assert "2x4" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["catalog"], ["--version"]])
def test_what_is_asked_often_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from paraplan.optimizer.cli import main; status = main(sys.argv[1:]); "
        "print([name for name in ('numpy', 'ortools', 'optuna', 'yaml') if name in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")

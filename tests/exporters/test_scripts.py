"""The launch scripts as a shell sees them: syntax, quoting, refusals, and the command that they end in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from paraplan.optimizer.commands.handing_over import TARGETS
from paraplan.optimizer.exporters import EXPORTERS, export, render
from paraplan.optimizer.exporters.megatron_lm import flags
from paraplan.optimizer.readers import read_job
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import load_model
from paraplan.search_spaces.model import ModelSpec

MakePlan = Callable[..., Plan]

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek": ("megatron-lm", "deepseek", {"tp": 2, "pp": 16, "dp": 64, "ep": 64, "counts": (4,) * 15 + (2,)}),
    "llama": ("megatron-lm", "llama", {"tp": 8, "dp": 8, "cp": 2}),
    "one-server": ("megatron-lm", "llama", {"tp": 8}),
    "gpt": ("megatron-lm", "gpt", {"tp": 8, "pp": 8, "dp": 4, "seq_len": 2048}),
    "fsdp": ("megatron-lm", "llama", {"dp": 64, "optimizer_sharding": "zero3"}),
    "bridge": ("megatron-bridge", "deepseek", {"tp": 2, "pp": 16, "dp": 64, "ep": 64, "counts": (4,) * 15 + (2,)}),
    "torchtitan": ("torchtitan", "llama", {"stack": "torchtitan", "tp": 8, "dp": 8, "optimizer_sharding": "zero3"}),
    "deepspeed": ("deepspeed", "llama", {"stack": "deepspeed", "tp": 8, "dp": 8, "sequence_parallel": False}),
    "mindformers": (
        "mindformers",
        "deepseek",
        {"cluster": "cloudmatrix-384", "stack": "mindformers", "tp": 2, "pp": 8, "dp": 32, "ep": 32, "counts": (8,) * 7 + (6,)},
    ),
    "ascend": (
        "mindspeed-llm",
        "deepseek",
        {"cluster": "cloudmatrix-384", "stack": "mindspeed-llm", "tp": 2, "pp": 8, "dp": 32, "ep": 32, "counts": (8,) * 7 + (6,)},
    ),
}
PART_FILLED = {
    "mindspeed-llm": ("llama", {"cluster": "cloudmatrix-384", "stack": "mindspeed-llm", "dp": 17}),
    "mindformers": ("deepseek", {"cluster": "cloudmatrix-384", "stack": "mindformers", "dp": 17}),
    "megatron-lm": ("llama", {"dp": 17}),
}
"""Jobs whose last server is not full."""
REQUIRED = {
    "DATA_PATH": "/data/$(touch pwned) `touch pwned` 'x\" y",
    "TOKENIZER_PATH": "/tok; touch pwned",
    "CHECKPOINT_DIR": "ckpt with spaces/*",
    "TRAIN_SCRIPT": "train $(touch pwned).py",
    "DATASET": "c4; touch pwned",
    "EOD_ID": "1",
    "TRAIN_ITERS": "10",
    "LR": "1e-4",
    "NORM_EPSILON": "1e-5",
    "ROTARY_BASE": "500000",
    "MOE_LOAD_BALANCING": "aux_loss",
    "MOE_AUX_LOSS_COEFF": "1e-3",
    "MASTER_ADDR": "host0",
    "NODE_RANK": "0",
}


@pytest.fixture(params=CASES)
def script(request: pytest.FixtureRequest, make_plan: MakePlan, tmp_path: Path) -> Path:
    framework, model, layout = CASES[request.param]
    return export(make_plan(model, **layout), framework, tmp_path)[0]


def run(script: Path, changes: dict[str, str] | None = None, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the script in its folder with a torchrun and a msrun that print their arguments one a line, and what they find set."""
    tools = script.parent / "tools"
    tools.mkdir(exist_ok=True)
    found = 'echo "queues=${CUDA_DEVICE_MAX_CONNECTIONS-unset}"\nprintf "%s\\n" "$@"\necho "data=${DATA_PATH}"\n'
    for name, body in (("torchrun", found), ("msrun", found), ("python3", f'exec "{sys.executable}" "$@"\n')):
        (tools / name).write_text(f"#!/bin/sh\n{body}")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_DEVICE_MAX_CONNECTIONS": "7", **REQUIRED, **(changes or {})}
    return subprocess.run(
        ["bash", str(script), *arguments], env=env, cwd=script.parent, capture_output=True, text=True, check=False, timeout=60
    )


def test_bash_accepts_the_syntax(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0


def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    assert shellchecked(script) == (0, "")


@pytest.mark.parametrize("framework", PART_FILLED)
def test_scripts_of_a_part_filled_server_set_nothing_in_vain(framework: str, make_plan: MakePlan, tmp_path: Path) -> None:
    model, layout = PART_FILLED[framework]
    script = export(make_plan(model, **layout), framework, tmp_path)[0]
    text = script.read_text()
    assert 'case "${NODE_RANK}" in' in text
    assert read_job(script).devices == 17
    assert [name for name in re.findall(r"^([A-Z_]+)=", text, re.MULTILINE) if text.count(name) == 1] == []
    assert shellchecked(script) == (0, "")


def shellchecked(script: Path) -> tuple[int, str]:
    """What shellcheck says of it."""
    tool = shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run([tool, str(script)], capture_output=True, text=True, check=False)
    return found.returncode, found.stdout


def test_paths_stay_inert(script: Path) -> None:
    result = run(script)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert words[-1] == f"data={REQUIRED['DATA_PATH']}"
    if "--data-path" in words:
        assert words[words.index("--data-path") + 1] == REQUIRED["DATA_PATH"]
        assert words[words.index("--save") + 1] == REQUIRED["CHECKPOINT_DIR"]
    assert not list(script.parent.rglob("pwned"))


def test_mindformers_file_is_filled_in(make_plan: MakePlan, tmp_path: Path) -> None:
    framework, model, layout = CASES["mindformers"]
    plan = make_plan(model, **layout)
    words = run(export(plan, framework, tmp_path)[0]).stdout.splitlines()
    assert words[words.index("--worker_num") + 1] == "512"
    filled = yaml.safe_load((tmp_path / words[words.index("--config") + 1]).read_text())
    assert filled["train_dataset"]["data_loader"]["config"]["data_path"] == ["1", REQUIRED["DATA_PATH"]]
    assert filled["train_dataset"]["data_loader"]["sizes"] == [10 * plan.problem.workload.global_batch, 0, 0]
    assert filled["train_dataset_task"]["dataset_config"] == filled["train_dataset"]
    assert "null" not in yaml.safe_dump(filled)


def test_torchrun_gets_the_plan_s_flags(make_plan: MakePlan, tmp_path: Path) -> None:
    framework, model, layout = CASES["deepseek"]
    plan = make_plan(model, **layout)
    words = run(export(plan, framework, tmp_path)[0], arguments=("--seed", "a b")).stdout.splitlines()
    start = "queues=1 --nnodes 256 --nproc-per-node 8 --node-rank 0 --master-addr host0 --master-port 29500 ./pretrain_gpt.py"
    assert words[:12] == start.split()
    decided = [word for flag in flags(plan) for word in flag]
    assert words[12 : 12 + len(decided)] == decided
    assert words[-3:-1] == ["--seed", "a b"]


def test_fsdp_runs_without_the_single_queue(make_plan: MakePlan, tmp_path: Path) -> None:
    framework, model, layout = CASES["fsdp"]
    assert run(export(make_plan(model, **layout), framework, tmp_path)[0]).stdout.startswith("queues=unset\n")


def test_one_server_needs_no_addresses(make_plan: MakePlan, tmp_path: Path) -> None:
    framework, model, layout = CASES["one-server"]
    result = run(export(make_plan(model, **layout), framework, tmp_path)[0], {"MASTER_ADDR": "", "NODE_RANK": ""})
    assert "127.0.0.1" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"LR": "", "DATA_PATH": ""}, "set DATA_PATH: prefix of the tokenised data\nset LR: peak learning rate\n"),
        ({"NNODES": "3"}, "the layout needs 128 processes"),
        ({"NNODES": "x[$(touch pwned)]"}, "must be whole numbers"),
        ({"NPROC_PER_NODE": "$(touch pwned)"}, "must be whole numbers"),
    ],
)
def test_script_stops_before_a_wrong_start(make_plan: MakePlan, tmp_path: Path, changes: dict[str, str], words: str) -> None:
    framework, model, layout = CASES["llama"]
    result = run(export(make_plan(model, **layout), framework, tmp_path)[0], changes)
    assert result.returncode == 2 and words in result.stderr and result.stdout == ""
    assert not list(tmp_path.rglob("pwned"))


def test_processes_may_be_spread_otherwise(make_plan: MakePlan, tmp_path: Path) -> None:
    framework, model, layout = CASES["llama"]
    assert run(export(make_plan(model, **layout), framework, tmp_path)[0], {"NNODES": "08", "NPROC_PER_NODE": "16"}).returncode == 0


def test_names_cannot_leave_the_header(make_plan: MakePlan, models: dict[str, ModelSpec], tmp_path: Path) -> None:
    model = models["llama"].model_copy(update={"name": "llama\ntouch pwned\r\n$(touch pwned)\u2028touch pwned"})
    path = export(make_plan(model, tp=8), "megatron-lm", tmp_path)[0]
    run(path)
    assert not list(tmp_path.rglob("pwned"))
    head = path.read_text().split("set -euo pipefail")[0]
    assert all(line.startswith("#") or not line for line in head.split("\n"))


def test_header_says_what_the_reader_needs(script: Path) -> None:
    text = script.read_text().split("set -euo pipefail")[0]
    for words in ("Layout: tp", "Predicted for the stack", "8 s per step", "Set before launch", "NODE_RANK", "60.0 of 72.0 GiB"):
        assert words in text.replace("\n# ", " ")


def test_file_is_executable(script: Path) -> None:
    assert os.access(script, os.X_OK)


def test_server_processes_follow_the_cluster(make_plan: MakePlan) -> None:
    text = render(make_plan("llama", cluster="gb200-nvl72", tp=4, dp=16), "megatron-lm")["megatron-lm.sh"]
    assert 'NPROC_PER_NODE="${NPROC_PER_NODE:-4}"' in text and 'NNODES="${NNODES:-16}"' in text


# --- the front door ----------------------------------------------------------------------------------------------------------


def test_nothing_is_written_for_a_plan_that_cannot_be_exported(make_plan: MakePlan, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(Infeasible):
        export(make_plan("llama", tp=8, dp=8, schedule="gpipe"), "megatron-lm", target)
    with pytest.raises(InputError, match="'megatron' is not one of"):
        export(make_plan("llama", tp=8), "megatron", target)
    with pytest.raises(InputError, match="is not a version"):
        export(make_plan("llama", tp=8), "megatron-lm", target, "newest")
    assert not target.exists()


def test_version_of_the_stack_counts_only_for_its_own_framework(make_plan: MakePlan) -> None:
    uneven = {"tp": 8, "pp": 4, "dp": 4, "counts": (19, 21, 21, 19)}
    assert "--decoder-first" in render(make_plan("llama", stack="megatron-lm-0.12", **uneven), "megatron-lm")["megatron-lm.sh"]
    other = make_plan("llama", stack="mindspeed-llm", **uneven)
    assert "--pipeline-model-parallel-layout" in render(other, "megatron-lm")["megatron-lm.sh"]
    assert "--decoder-first" in render(other, "megatron-lm", "0.12")["megatron-lm.sh"]


def test_help_names_every_target() -> None:
    assert TARGETS.replace(" or ", ", ").split(", ") == list(EXPORTERS)


def test_every_exporter_is_pure(make_plan: MakePlan) -> None:
    for framework in EXPORTERS:
        plan = plan_for(make_plan, framework)
        assert render(plan, framework) == render(plan, framework)


def plan_for(make_plan: MakePlan, framework: str) -> Plan:
    """A plan that the framework can express."""
    model, layout = next(((m, d) for f, m, d in CASES.values() if f == framework), ("llama", {"tp": 8}))
    return make_plan(model, **layout)


@pytest.mark.parametrize("framework", EXPORTERS)
def test_page_says_how_to_launch_in_about_ten_lines(make_plan: MakePlan, framework: str) -> None:
    files = render(plan_for(make_plan, framework), framework)
    page = files[f"{framework}.md"]
    launch, _, notes = page.partition("\n\n- Note: ")
    assert 8 <= len(launch.splitlines()) <= 12
    assert notes and launch.count("- Note: ") == 0
    assert all(name in page for name in files if not name.endswith(".md"))
    rows = files["hosts.csv"].splitlines()
    assert rows[0] == "node_rank,supernode,first_rank,last_rank,stages" and rows[1].startswith("0,0,0,")


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge"])
def test_what_the_models_config_says_is_not_asked_for(make_plan: MakePlan, framework: str) -> None:
    """DeepSeek-V3's config.json has both; a model that is described without them has them asked for."""
    known, bare = (
        next(text for name, text in render(make_plan(model), framework).items() if name.endswith(".sh"))
        for model in ("deepseek", load_model("deepseek-v3").model_copy(update={"norm_epsilon": None, "rope_theta": None}))
    )
    assert 'NORM_EPSILON="${NORM_EPSILON:-1e-06}"' in known and 'ROTARY_BASE="${ROTARY_BASE:-10000' in known
    assert "need NORM_EPSILON" not in known and "need NORM_EPSILON" in bare and "need ROTARY_BASE" in bare

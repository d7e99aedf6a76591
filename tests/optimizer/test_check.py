"""The judgement of a job as a whole: what is judged with what is known, what mends it, what would be faster, and how it is said."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer import check as check_from_library
from paraplan.optimizer.checking.checker import Checked, check
from paraplan.optimizer.checking.tolerance import judge
from paraplan.optimizer.cli import main
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.check import render_check
from paraplan.optimizer.why import why_not
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem
from rich.console import Console

from .applying import applied
from .check_samples import LLAMA_7B, LLAMA_70B, checked, job, legal, line, rules, terms

JOB = """\
task:
  name: demo
  resource: {supernode: 4, accelerator_per_node: 32}
  strategy: {tensor_parallel: 128, pipeline_parallel: 4, data_parallel: 8}
"""
OVERLAPPED = {"overlap-grad-reduce": True, "overlap-param-gather": True}
GOOD = {"tp": 1, "mbs": 1, "gbs": 16, "seq": 2048, "use-distributed-optimizer": True, **OVERLAPPED}


def drawn(found: Checked, width: int) -> str:
    stream = io.StringIO()
    render_check(found, "job.sh", Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


# --- as far as what is known goes --------------------------------------------------------------------------------------------


def test_a_job_that_asks_for_more_than_it_has() -> None:
    found = check(read_text(JOB, "job.yaml"), best=False)
    said = " ".join(each.sentence for each in found.broken)
    assert "needs 4,096 devices, the job has 128" in said
    assert "tp = 128 is more than the 32 devices of a supernode" in said
    assert not found.ok
    for change in found.nearest_columns:
        grid = {"tp": 128, "pp": 4, "dp": 8, **change}
        assert grid["tp"] * grid["pp"] * grid["dp"] == 128
        assert grid["tp"] <= 32
    assert found.nearest[0] == ("tensor_parallel: 4",)


def test_groups_are_held_to_the_supernode_that_the_job_names() -> None:
    """Of a cluster whose own unit is a server of 8, the job's supernode of 32 is not called a server."""
    spread = JOB.replace("data_parallel: 8", "data_parallel: 8, expert_parallel: 64")
    found = check(read_text(spread, "job.yaml"), cluster="hgx-h100", best=False)
    assert any("EP groups span 64 devices, more than the 32 of one supernode of the job" in said for said in found.advice)
    assert "C141" in rules(found) and not any(said.startswith("TP groups") for said in found.advice)  # told once


def test_words_of_a_job_that_nobody_knows_are_broken_rules() -> None:
    """Each is told with the words that there are, and judged as if it were not given."""
    words = {"cp_type": "ring", "offload": "disk", "precision": "fp7", "schedule": "1f1bb", "recompute": "selective:core_atn"}
    text = JOB.replace("tensor_parallel: 128", "tensor_parallel: 4, " + ", ".join(f"{key}: {word}" for key, word in words.items()))
    found = check(read_text(text, "job.yaml"), "llama-3.1-70b", "hgx-h100", global_batch=64, seq_len=4096, best=False)
    said = [each.sentence for each in found.broken]
    assert rules(found) == {"P015"} and len(said) == len(words) and found.priced is not None
    for word, offered in zip(words.values(), ("a2a+p2p", "optimizer:F", "fp8", "interleaved", "core_attn"), strict=True):
        assert any((word.partition(":")[2] or word) in each and offered in each for each in said), word
    assert any("cp_type" in each and each.endswith("judged as if not given") for each in found.assumptions)
    assert drawn(found, 100).count("a layout knows no other word") == 1
    degrees = "{data_parallel: 1, model_parallel: 8, pipeline_stage: 1, context_parallel: 2, context_parallel_algo: ulises_cp}"
    (one,) = check(read_text(f"parallel_config: {degrees}", "job.yaml", form="mindformers"), best=False).broken
    assert one.rule == "P015" and "ulises_cp is not one of colossalai_cp, ulysses_cp, hybrid_cp" in one.sentence


def test_what_is_broken_is_not_told_again_as_not_judged() -> None:
    """Of 3 micro-batches on 4 stages and experts that do not divide, only the first leaves nothing to price."""
    options = {"devices": 96, "global_batch": 72, "seq_len": 4096, "best": False}
    found = check("pp=4,vpp=3,ep=24,micro_batch=1", "qwen3-30b-a3b", "hgx-h100", **options)
    assert rules(found) == {"C030a", "C080c"}
    assert found.unpriced == ("A layout that breaks C030a has no price.",)
    shown = drawn(found, 80).partition("the job has no price; the nearest legal layout has")[2].splitlines()
    assert shown[1].split()[:5] == ["tp", "cp", "pp", "dp", "ep"] and shown[2].split()[5] == "8"
    for each in found.broken:
        assert drawn(found, 160).count(each.sentence) == 1
    uneven = check("pp=4,vpp=3,ep=24,micro_batch=1", "qwen3-30b-a3b", "hgx-h100", **{**options, "global_batch": 71})
    assert uneven.nearest_priced is None and uneven.assumptions == ("tp 1: not given",)  # nothing has a price


def test_a_jobs_own_spellings_are_read_or_listed() -> None:
    """Resources in the plural, times with their unit apart, stores by name; a misspelling is listed, and told beside the degree."""
    text = (
        "task:\n"
        "  resources: {supernode: 4, accelerator_per_node: 32}\n"
        "  strategy: {tensor_paralel: 8, pipeline_parallel: 4, data_parallel: 8}\n"
        "  fault_tolerance:\n"
        "    checkpoint_interval: 30\n"
        "    checkpoint_interval_unit: min\n"
        "    checkpoint_save_time: 90\n"
        "    state_store: {primary: file:///dev/shm/states}\n"
        "    max_restarts: 3\n"
    )
    read = read_text(text, "job.yaml")
    assert read.devices == 128 and read.degrees["tp"] == 1
    assert any("strategy.tensor_paralel is not known" in line for line in read.assumptions)
    assert read.unknown == ("strategy.tensor_paralel = 8 (did you mean tensor_parallel?)", "fault_tolerance.max_restarts = 3")
    given = read.fault_tolerance
    assert given is not None and given.checkpoint_interval == "30 min"
    found = judge(given, None, None, None, None, None)
    assert [each.rule for each in found.broken] == ["F001", "F002"]
    assert "checkpoint_save_time 90 has no unit" in found.broken[0].sentence


def test_each_nearest_change_is_legal_when_made() -> None:
    values = {"tp": 8, "pp": 3, "ep": 16, "etp": 1, "experts": 128, "layers": 48, "heads": 32, "mbs": 1, "gbs": 100, "seq": 4096}
    found = checked(world=32, sequence_parallel=True, **values)
    assert not found.ok
    assert found.nearest_columns
    names = {"micro_batch": "mbs", "global_batch": "gbs", "seq_len": "seq"}
    for change in found.nearest_columns:
        again = {**values, **{names.get(name, name): value for name, value in change.items()}}
        if again["tp"] == 1:
            again["sequence-parallel"] = False
        mended = checked(world=32, **{"sequence_parallel": True, **{k: v for k, v in again.items() if v is not False}})
        assert not mended.broken, (change, mended.broken)


def test_what_is_missing_is_named() -> None:
    found = check("tp=8,pp=4", best=False)
    said = " ".join((*found.not_judged, *found.unpriced))
    for need in ("give MODEL", "give --cluster", "give --devices", "--global-batch", "--seq-len", "--framework"):
        assert need in said
    assert found.legal
    assert found.priced is None


def test_a_model_alone_lets_heads_be_judged() -> None:
    found = check("tp=24", "llama-3.1-70b", best=False)
    assert rules(found) == {"C020", "C022a"}
    assert "give MODEL" not in " ".join(found.not_judged)


def test_the_caller_comes_before_the_file() -> None:
    found = check(job(LLAMA_7B, world=8, **GOOD), devices=16, best=False)
    assert found.devices == 16
    assert any("devices 16 is given in place of the configuration's 8" in said for said in found.advice)
    with pytest.raises(InputError, match="at least 1"):
        check("tp=8", devices=0)


def test_a_model_that_is_not_the_configurations() -> None:
    found = check(job(LLAMA_7B, world=8, **GOOD), "llama-3.1-8b", best=False)
    assert "KV heads: 32 in the configuration, 8 in llama-3.1-8b: the latter is judged" in found.advice
    assert not any("decoder layers" in said for said in found.advice)


@pytest.mark.parametrize("devices", [72, 384, 15488])
def test_devices_that_are_no_power_of_two(devices: int) -> None:
    found = checked(world=devices, tp=7, pp=5, layers=61, heads=64, seq=4096, gbs=devices, mbs=1)
    assert {"C001", "C020", "C060"} <= rules(found)
    for change in found.nearest_columns:
        tp, pp = change.get("tp", 7), change.get("pp", 5)
        assert devices % (tp * pp) == 0 and 64 % tp == 0


@pytest.mark.parametrize(("replicas", "told"), [(1, {"C001"}), (2, {"C001", "C008"})])
def test_ranks_that_do_not_divide_the_devices_are_told_once(replicas: int, told: set[str]) -> None:
    """TP 8 on 3 stages of 64 devices; with two replicas they are 48, which is told beside it."""
    degrees = f"tensor_parallel_degree = 8\npipeline_parallel_degree = 3\ndata_parallel_replicate_degree = {replicas}"
    found = check(read_text(f"[parallelism]\n{degrees}", "job.toml", form="torchtitan", devices=64), best=False)
    assert rules(found) == told and legal(found, "C001", "pp")[:2] == (1, 2)


# --- what it costs -----------------------------------------------------------------------------------------------------------


def test_mends_fit_when_they_are_made() -> None:
    values = {"tp": 8, "pp": 2, "mbs": 1, "gbs": 512, "seq": 4096, "sequence-parallel": True}
    found = checked(LLAMA_70B, world=128, options={"cluster": "hgx-h100"}, **values)
    assert found.fit is not None and found.fit.over_gib > 0 and found.fit.mends
    sharded = checked(LLAMA_70B, world=128, options={"cluster": "hgx-h100"}, **values, **{"use-distributed-optimizer": True})
    made = next(mend for mend in found.fit.mends if "--use-distributed-optimizer" in mend.changes[0][1])
    assert sharded.priced is not None
    assert sharded.priced.memory.peak_gib == pytest.approx(made.peak_gib)
    assert sharded.priced.step_time_s == pytest.approx(made.step_time_s)


def test_a_job_that_may_not_fit_is_made_sure() -> None:
    """What is offered leaves the share of memory free below which a prediction settles nothing; even stages are among it."""
    ends = {"decoder-first-pipeline-num-layers": 23, "decoder-last-pipeline-num-layers": 19}
    values = {"tp": 8, "pp": 4, "mbs": 2, "gbs": 512, "seq": 4096, "sequence-parallel": True}
    found = checked(LLAMA_70B, world=128, options={"cluster": "hgx-h100"}, **values, **ends)
    assert found.fit is not None and found.fit.verdict == "unsure" and found.fit.over_gib < 0
    assert found.fit.mends and {mend.verdict for mend in found.fit.mends} == {"fits"}
    made = next(mend for mend in found.fit.mends if any("first-pipeline" in old for old, _ in mend.changes))
    even = checked(LLAMA_70B, world=128, options={"cluster": "hgx-h100"}, **values)
    assert even.fit is not None and (even.fit.verdict, even.fit.peak_gib) == ("fits", pytest.approx(made.peak_gib))


def test_the_changes_lead_to_the_best_layout() -> None:
    """Made in the options themselves, they give the step that was promised; their seconds add up to what it gains."""
    options = {"tp": 8, "pp": 2, "mbs": 4, "gbs": 64, "seq": 4096, "sequence-parallel": True}
    text = line(LLAMA_7B, **options)
    found = check(read_text(text, "job.sh", devices=16), cluster="hgx-h100")
    assert found.priced is not None and found.best is not None and found.changes
    assert sum(change.seconds or 0.0 for change in found.changes) == pytest.approx(
        found.best.step_time_s - found.priced.step_time_s
    )
    assert [change.seconds for change in found.changes] == sorted(change.seconds or 0.0 for change in found.changes)
    again = check(read_text(applied("megatron-lm", text, found.changes), "job.sh", devices=16), cluster="hgx-h100")
    assert again.priced is not None
    assert again.priced.step_time_s == pytest.approx(found.best.step_time_s, rel=2e-3)
    assert not again.changes or (again.faster or 0.0) < 2e-3


def test_a_plan_is_as_good_as_the_best() -> None:
    found = check(job(LLAMA_7B, world=8, **{**GOOD, "tp": 1}), cluster="hgx-h200")
    best = found.best
    assert best is not None
    assert found.faster is not None and found.faster < 0.2


def test_a_job_that_cannot_be_priced_still_learns_the_best() -> None:
    found = check(job(LLAMA_7B, world=8, **{**GOOD, "pp": 3}), cluster="hgx-h200", devices=8)
    assert not found.ok and found.priced is None
    assert found.best is None or found.changes


def test_what_overlap_brings_stands_apart() -> None:
    values = {**GOOD, "gbs": 8}
    for name in OVERLAPPED:
        values.pop(name)
    found = check(job(LLAMA_7B, world=8, **values), cluster="hgx-h200")
    change = next(each for each in found.changes if each.column == "overlap")
    assert change.after == "--overlap-grad-reduce --overlap-param-gather"
    assert change.seconds is not None and change.seconds < 0


def test_why_not_names_the_rule_and_the_gib() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-a100-40gb", 8, 8, 4096)
    options: dict[str, Any] = {"devices": 8, "global_batch": 8, "seq_len": 4096, "best": False}
    chosen = check("tp=8,micro_batch=1", "llama-3.1-8b", "hgx-a100-40gb", **options)
    assert chosen.priced is not None
    illegal = why_not(problem, chosen.priced.layout, {"tp": ("3",)})
    assert illegal.best.status == "not legal"
    assert any("C020" in reason for reason in illegal.best.reasons)
    large = why_not(problem, chosen.priced.layout, {"tp": ("1",), "pp": ("1",), "recompute": ("none",), "offload": ("none",)})
    assert large.best.status == "does not fit" and large.best.layout is not None
    memory = large.best.layout.memory
    missing = wording.gib(memory.peak_gib - memory.usable_gib)
    assert any(f"{missing} more than there is" in reason for reason in large.best.reasons)


# --- how it is said ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    found = check(job(LLAMA_7B, world=16, **{**GOOD, "tp": 8, "pp": 2, "frobnicate": 3}), cluster="hgx-h100")
    text = drawn(found, width)
    assert max(map(len, text.splitlines())) <= width
    for part in (
        "Legal",
        "Fits",
        "How good",
        "What to change",
        "--tensor-model-parallel-size 8 →",
        "--frobnicate 3",
        "Assumptions",
    ):
        assert part in text


def test_markup_in_names_stays_what_it_is() -> None:
    assert "[red]" in drawn(checked("--job-note '[red]x[/red]'", layers=4, tp=2, frob="'[red]'"), 80)


@pytest.mark.parametrize(("text", "status"), [(JOB, 1), (JOB.replace("128", "4"), 0), ("nothing of the kind", 2)])
def test_exit_status(text: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == status
    out, error = capsys.readouterr()
    assert bool(out) is (status < 2)
    assert bool(error) is (status == 2)


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert main(["check", str(path), "--json"]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["legal"] is False
    assert {each["rule"] for each in document["broken"]} == {"C001", "C141"}
    assert check_from_library is check


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["check"],
        ["check", "tp=8", "--set", "x"],
        ["check", "tp=8", "--format", "no"],
        ["check", "tp=8", "--precision", "fp7"],
        ["check", "tp=8", "--time-limit", "0"],
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("paraplan: ")


BRIDGE = (
    "run_recipe.py --recipe llama31_8b_pretrain_config model.tensor_model_parallel_size=2 train.micro_batch_size=2 "
    "train.global_batch_size=64 model.seq_length=8192 {}"
)


@pytest.mark.parametrize(
    ("text", "logit_bytes"),
    [
        (BRIDGE.format(""), 2.0),
        (BRIDGE.format("model.cross_entropy_loss_fusion=true"), 2.0),
        (BRIDGE.format("model.cross_entropy_loss_fusion=false"), 10.0),
        (BRIDGE.format("model.cross_entropy_fusion_impl=native"), 10.0),
        (line(tp=2, cross_entropy_loss_fusion=True), 10.0),
        (line(tp=2, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"), 2.0),
        (line(tp=2, cross_entropy_fusion_impl="te"), 10.0),
    ],
)
def test_the_kernel_of_the_loss_decides_what_logits_hold(text: str, logit_bytes: float) -> None:
    """Transformer Engine's writes over the BF16 logits; Megatron-Core's own keeps them in FP32, with their gradient."""
    found = check(read_text(text, "job"), "llama-3.1-8b", "hgx-h100", devices=8, global_batch=64, seq_len=8192, best=False)
    assert found.problem is not None and found.priced is not None and not found.unknown
    assert found.problem.stack.footprint.logit_bytes == logit_bytes


def test_an_unfused_loss_takes_eight_bytes_more_per_logit() -> None:
    """Of 2·8,192 tokens and half of 128,256 words on each of two ranks, at the same step time."""
    fused, unfused = (
        check(
            read_text(BRIDGE.format(f"model.cross_entropy_loss_fusion={on}"), "job"),
            "llama-3.1-8b",
            "hgx-h100",
            devices=8,
            best=False,
        )
        for on in ("true", "false")
    )
    assert terms(unfused)["transient"] - terms(fused)["transient"] == pytest.approx(2 * 8192 * 128256 / 2 * 8 / 2**30)
    assert fused.priced is not None and unfused.priced is not None
    assert unfused.priced.step_time_s == fused.priced.step_time_s


@pytest.mark.parametrize(("model", "gib", "verdict"), [("llama-3.1-8b", "15.0", "of"), ("deepseek-v3", "1,250", "more than")])
def test_the_host_holds_gradients_beside_the_states(model: str, gib: str, verdict: str) -> None:
    """8.03 and 671 billion parameters (no MTP layer is asked for) of 12 + 4 bytes over eight devices, 233 GiB of host each."""
    offloaded = line("--use-precision-aware-optimizer --optimizer-cpu-offload --use-distributed-optimizer", tp=4, mbs=1, gbs=8)
    found = check(read_text(offloaded, "job"), model, "hgx-h100", devices=8, seq_len=4096, best=False)
    said = f"16 B per parameter, take {gib} GiB for each device, {verdict} the 233 GiB"
    assert any(said in each for each in found.advice), found.advice

"""The changes that check advises, applied to a job's options as they are written, make the layout that it advises."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from paraplan.optimizer.checking.changes import changes, told_together
from paraplan.optimizer.checking.checked import AND, Change, Checked
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.readers.restating import stages_restated
from paraplan.search_spaces.layout import Split

from .applying import applied, made
from .test_check_roundtrip import bare

DENSE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 --bf16 --use-flash-attn"
)
SPARSE = (
    f"{DENSE} --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1408 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --expert-model-parallel-size 8"
)
OVER_TP = SPARSE.replace("type alltoall", "type alltoall_seq") + " --moe-tp-extend-ep --moe-permutation-async-comm"
PADDED = "--num-layers 32 --noop-layers 30,31"
WAYS = {
    "megatron-lm": (
        *("", "--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2"),
        "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
        "--pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L'",
    ),
    "mindspeed-llm": (
        *("", "--num-layers-per-virtual-pipeline-stage 2", "--num-layer-list 7,9,9,7", PADDED),
        "--schedules-method dualpipev",
        f"{PADDED} --schedules-method dualpipev",
        f"{PADDED} --num-layers-per-virtual-pipeline-stage 4",
    ),
}
RECOMPUTES = {
    "megatron-lm": (
        "",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
        "--recompute-activations",
    ),
    "mindspeed-llm": (
        *("", "--recompute-granularity full --recompute-method block --recompute-num-layers 4", "--recompute-norm"),
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --recompute-activation-function",
    ),
}


def megatron_job(framework: str, drawn: Random) -> str:
    pick = drawn.choice
    tp = pick((1, 2, 4))
    degrees = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size 4 --micro-batch-size {pick((1, 2))}"
    sharding = pick(("", "--use-distributed-optimizer", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"))
    switches = f"{'--sequence-parallel' if tp > 1 and pick((True, False)) else ''} {sharding}"
    model = pick((DENSE, SPARSE, OVER_TP) if framework == "mindspeed-llm" else (DENSE, SPARSE))
    parts = (model, degrees, switches, pick(WAYS[framework]), pick(RECOMPUTES[framework]))
    return f"torchrun --nproc_per_node 8 --nnodes 4 --global-batch-size 64 {' '.join(parts)}"


def bridge_job(drawn: Random) -> str:
    tp, pp = drawn.choice((1, 2, 4)), drawn.choice((1, 2, 4))
    words = {
        "model.tensor_model_parallel_size": tp,
        "model.pipeline_model_parallel_size": pp,
        "model.virtual_pipeline_model_parallel_size": drawn.choice(("null", 2)) if pp > 1 else "null",
        "model.sequence_parallel": drawn.choice(("true", "false")) if tp > 1 else "false",
        "model.recompute_granularity": drawn.choice(("null", "selective")),
        "ddp.use_distributed_optimizer": drawn.choice(("true", "false")),
        "train.micro_batch_size": drawn.choice((1, 2)),
        "train.global_batch_size": 64,
        "model.seq_length": 4096,
    }
    recipe = drawn.choice(("llama31_8b_pretrain_config", "qwen3_30b_a3b_pretrain_config"))
    return f"run_recipe.py --recipe={recipe} {' '.join(f'{key}={value}' for key, value in words.items())}"


def mindformers_job(drawn: Random) -> str:
    tp, pp = drawn.choice((1, 2, 4)), drawn.choice((1, 2, 4))
    dp = 32 // (tp * pp)
    count = 64 // dp
    own = {"parallel_config": {"micro_batch_num": count}, "runner_config": {"batch_size": 1}}
    halved = {"parallel_config": {"micro_batch_num": count // 2}, "runner_config": {"batch_size": 2}}
    batch = drawn.choice((own, halved))
    data: dict[str, Any] = {
        "runner_config": batch["runner_config"],
        "parallel": {"enable_parallel_optimizer": drawn.choice((True, False))},
        "parallel_config": {"data_parallel": dp, "model_parallel": tp, "pipeline_stage": pp, **batch["parallel_config"]},
        "recompute_config": {"recompute": drawn.choice((True, False, [32 // pp - 1] * pp))},
        "model": {"model_config": {"num_layers": 32, "seq_length": 4096}},
    }
    if pp == 4 and drawn.choice((True, False)):
        data["model"]["model_config"]["offset"] = [-1, 1, 1, -1]
    if drawn.choice((True, False)):
        data["swap_config"] = {"swap": True}
    return yaml.safe_dump(data)


TITAN_MODELS = {"llama3": "llama3_8b", "qwen3": "qwen3_30b_a3b"}


def torchtitan_fields(drawn: Random) -> dict[str, Any]:
    """Fields by section; degrees of 1 are left out now and then."""
    tp, pp = drawn.choice((1, 2, 4)), drawn.choice((1, 2, 4))
    local = drawn.choice((4, 8)) if pp > 1 else 1
    fields = {
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.pipeline_parallel_degree": pp,
        "parallelism.data_parallel_shard_degree": drawn.choice((-1, 32 // (tp * pp))),
        "training.local_batch_size": local,
        "training.global_batch_size": 64,
        "training.seq_len": 4096,
    }
    if pp > 1:
        fields |= {"parallelism.pipeline_parallel_schedule": drawn.choice(("1F1B", "Interleaved1F1B"))}
        fields |= {"training.global_batch_size": local * 32 // (tp * pp)}
    if drawn.choice((True, False)):
        fields = {name: value for name, value in fields.items() if value != 1 or "batch" in name}
    return fields


def torchtitan_job(drawn: Random) -> str:
    fields, module = torchtitan_fields(drawn), drawn.choice(tuple(TITAN_MODELS))
    switches = drawn.choice(("", "--training.enable_cpu_offload", "--parallelism.no-enable-sequence-parallel"))
    mode = drawn.choice(("", "activation-checkpoint:full", "activation-checkpoint:none"))
    graphs = "--training.disable_cuda_graphs" if "parallelism.pipeline_parallel_schedule" in fields else ""
    words = " ".join(f"--{name} {value}" for name, value in fields.items())
    return f"torchrun --module {module} --config {TITAN_MODELS[module]} {words} {graphs} {switches} {mode}"


def torchtitan_toml(drawn: Random) -> str:
    fields = {"model.name": "llama3", "model.flavor": "8B", **torchtitan_fields(drawn)}
    fields["activation_checkpoint.mode"] = drawn.choice(("full", "none", "selective"))
    lines = []
    for section in ("model", "parallelism", "training", "activation_checkpoint"):
        own = {name.partition(".")[2]: value for name, value in fields.items() if name.startswith(section)}
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in own.items())]
    return "\n".join(lines)


def torchtitan_program(drawn: Random) -> str:
    fields = torchtitan_fields(drawn)
    mode = drawn.choice(("None", "FullAC.Config()"))
    lines = [f"    config.{name} = {value!r}" for name, value in fields.items()]
    head = ["def planned():", "    config = llama3_8b()", "    config.model_spec = model_registry('8B')"]
    return "\n".join([*head, *lines, f"    config.activation_checkpoint = {mode}", "    return config", ""])


def deepspeed_job(drawn: Random) -> str:
    tp, pp = drawn.choice((1, 2, 4)), drawn.choice((1, 2))
    stage = drawn.choice((0, 1) if pp > 1 else (0, 1, 2, 3))
    micro, dp = drawn.choice((1, 2)), 32 // (tp * pp)
    data: dict[str, Any] = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 64 // (micro * dp),
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            **({"offload_optimizer": {"device": "cpu"}} if stage and drawn.random() < 0.5 else {}),
        },
        "tensor_parallel": {"autotp_size": tp},
        "pipeline": {"stages": pp},
        "activation_checkpointing": {"number_checkpoints": drawn.choice((None, 32))},
    }
    for left_out in drawn.choice(((), ("train_batch_size",), ("gradient_accumulation_steps",))):
        del data[left_out]
    return json.dumps(data)


def job_yaml(drawn: Random) -> str:
    tp, pp, long = drawn.choice((1, 2, 4)), drawn.choice((1, 2, 4)), drawn.choice((True, False))
    strategy: dict[str, Any] = {
        "tensor_parallel" if long else "tp": tp,
        "pipeline_parallel" if long else "pp": pp,
        "micro_batch_size": drawn.choice((1, 2)),
        "global_batch_size": 64,
        "seq_len": 4096,
        "recompute": drawn.choice(("none", "full")),
    }
    if drawn.choice((True, False)):
        strategy["data_parallel"] = 32 // (tp * pp)
    if drawn.choice((True, False)):
        strategy["layers_per_stage"] = [32 // pp] * pp
    return yaml.safe_dump({"task": {"model": "llama-3.1-8b", "resource": {"accelerators": 32}, "strategy": strategy}})


def layout_words(drawn: Random) -> str:
    tp, pp = drawn.choice((1, 2, 4)), drawn.choice((1, 2, 4))
    given = {"tp": tp, "pp": pp, "micro_batch": drawn.choice((1, 2)), "recompute": drawn.choice(("none", "full"))}
    given |= {"dp": 32 // (tp * pp)} if drawn.choice((True, False)) else {}
    given |= {"vpp": 2} if pp > 1 and drawn.choice((True, False)) else {}
    return ",".join(f"{name}={value}" for name, value in given.items())


JOBS: dict[str, Callable[[Random], str]] = {
    "megatron-lm": lambda drawn: megatron_job("megatron-lm", drawn),
    "mindspeed-llm": lambda drawn: megatron_job("mindspeed-llm", drawn),
    "megatron-bridge": bridge_job,
    "mindformers": mindformers_job,
    "torchtitan": torchtitan_job,
    "torchtitan toml": torchtitan_toml,
    "torchtitan program": torchtitan_program,
    "deepspeed": deepspeed_job,
    "job": job_yaml,
    "paraplan": layout_words,
}
"""Way to write a job → one drawn at random, on 32 devices with a batch of 64."""
ON_ASCEND = ("mindspeed-llm", "mindformers")


def judged(form: str, text: str, best: bool = True) -> Checked:
    """Judged beside what its file does not say."""
    job = read_text(text, "job", form=form.split()[0], devices=32)
    given: dict[str, Any] = {"global_batch": 64, "seq_len": 4096} if form == "paraplan" else {}
    given |= {"seq_len": 4096} if form == "deepspeed" else {}
    model = None if job.model or job.model_name else "llama-3.1-8b"
    return check(job, model, "cloudmatrix-384" if form in ON_ASCEND else "hgx-h100", best=best, **given)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("form", JOBS)
def test_advice_taken_literally(form: str, seed: int) -> None:
    """Every way to write a job: made word for word, the changes give the layout that was promised, the largest gain first."""
    text = JOBS[form](Random(f"{form} {seed}"))
    found = judged(form, text)
    assert found.best is not None, found.best_status
    changed = applied(form, text, found.changes)
    again = judged(form, changed, best=False)
    assert not again.broken, (text, changed)
    assert again.priced is not None, (changed, again.unpriced)
    if found.changes:
        assert bare(again.priced.layout) == bare(found.best.layout), (text, changed)
    assert all(change.before != change.after for change in found.changes)
    gains = [change.seconds for change in found.changes if change.seconds is not None]
    assert gains == sorted(gains)
    own = [each.seconds for each in found.changes if each.seconds is not None and each.column != "overlap"]
    assert len(own) < 2 or max(map(abs, own)) <= abs(sum(own)) * (1 + 1e-9)
    if found.changes and found.priced is not None:
        assert sum(gains) == pytest.approx(found.best.step_time_s - found.priced.step_time_s)


def shares(**seconds: float) -> list[Change]:
    return [Change(column=name, before=f"{name} 1", after=f"{name} 2", seconds=s, peak_gib=1.0) for name, s in seconds.items()]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ({"tp": -0.3, "pp": -0.1, "recompute": -0.05}, {"tp": -0.3, "pp": -0.1, "recompute": -0.05}),
        ({"cp": -3.2, "pp": -0.83, "tp": 1.94, "micro_batch": 1.72}, {"cp, pp, tp, micro_batch": -0.37}),
        ({"cp": -3.2, "tp": 2.9, "recompute": -0.1}, {"cp, tp": -0.3, "recompute": -0.1}),
        ({"tp": -0.3, "pp": 0.1, "offload": -0.2}, {"tp, pp": -0.2, "offload": -0.2}),
        ({"tp": -0.5, "pp": -0.1, "recompute": 0.4, "offload": -0.1}, {"tp, pp, recompute": -0.2, "offload": -0.1}),
        ({"tp": 0.4, "recompute": -0.5, "offload": -0.1}, {"tp, recompute, offload": -0.2}),
    ],
)
def test_shares_that_say_nothing_apart_are_told_together(seconds: dict[str, float], told: dict[str, float]) -> None:
    """Degrees that gain more than all changes do, or gain and lose, are one change, with what loses beside them if need be."""
    found = told_together(shares(**seconds))
    assert {each.column: each.seconds for each in found} == pytest.approx(told)
    assert sum(each.peak_gib or 0.0 for each in found) == len(seconds)
    assert {*AND.join(each.after for each in found).split(AND)} == {f"{name} 2" for name in seconds}


def judged_when_full(form: str, text: str) -> Checked:
    """Judged on small devices with long sequences, which fill them."""
    job = read_text(text, "job", form=form.split()[0], devices=32)
    model = None if job.model or job.model_name else "llama-3.1-8b"
    given = {"global_batch": 64} if form == "paraplan" else {}
    return check(job, model, "atlas-800t-a2" if form in ON_ASCEND else "hgx-a100-40gb", best=False, seq_len=32768, **given)


@pytest.mark.parametrize("form", JOBS)
def test_mends_taken_literally(form: str) -> None:
    """Made word for word, what is said to mend a job that does not fit does so, at the peak and step that it names."""
    made_so_far = 0
    for seed in (20, 24, 25):
        text = JOBS[form](Random(f"{form} {seed}"))
        found = judged_when_full(form, text)
        for mend in found.fit.mends if found.fit is not None else ():
            changed = applied(form, text, [Change(column="", before=old, after=new) for old, new in mend.changes])
            again = judged_when_full(form, changed)
            assert again.fit is not None and again.priced is not None, (text, changed, again.unpriced)
            assert {each.rule for each in again.broken} <= {each.rule for each in found.broken}, (text, changed)
            assert again.fit.verdict == mend.verdict and (again.fit.over_gib <= 0 < found.fit.over_gib or mend.verdict == "fits")
            assert again.fit.peak_gib == pytest.approx(mend.peak_gib, rel=1e-3), (text, changed)
            assert again.priced.step_time_s == pytest.approx(mend.step_time_s, rel=1e-3), (text, changed)
            made_so_far += 1
        if made_so_far:
            return
    pytest.fail("no job of these has mends")


def test_torchtitan_itself_takes_what_is_advised() -> None:
    """Switches, parts of the model and activation checkpointing, before its own parser."""
    pytest.importorskip("torchtitan", reason="needs the extra 'export-proof'")
    sys.path.insert(0, str(Path(__file__).parents[1] / "exporters"))
    import torchtitan_proof  # noqa: F401  # stands in for kernels of triton
    from torchtitan.config.manager import ConfigManager

    text = torchtitan_job(Random("torchtitan 2"))
    found = judged("torchtitan", text)
    assert found.best is not None and found.best.layout.pp > 1
    taken = ConfigManager().parse_args(shlex.split(applied("torchtitan", text, found.changes))[1:])
    assert len(taken.parallelism.module_fqns_per_model_part) == found.best.layout.pp * found.best.layout.vpp


DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}


@pytest.mark.parametrize("batch", [96, 100, 128, 160])
def test_what_is_near_in_deepspeed_is_legal(batch: int) -> None:
    """Written into the JSON, each proposal is judged legal."""
    text = json.dumps({**DEEPSPEED, "train_batch_size": batch})
    found = check(read_text(text, "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", seq_len=4096, best=False)
    assert bool(found.nearest) == (not found.legal) == (batch != 128)
    for near in found.nearest:
        changed = made("deepspeed", text, near)
        again = check(read_text(changed, "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", seq_len=4096, best=False)
        assert again.legal, (near, again.broken)


def test_nothing_is_near_where_no_degree_mends_it() -> None:
    text = json.dumps({**DEEPSPEED, "train_batch_size": 100, "fp16": {"enabled": True}})
    found = check(read_text(text, "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", best=False)
    assert {each.rule for each in found.broken} >= {"C029", "C121"} and not found.nearest


def test_what_the_keys_cannot_say_is_said_in_words() -> None:
    """DeepSpeed has no tensor parallelism of experts: a job that asks for it is judged all the same."""
    experts = {"enabled": True, "autoep_size": 3, "expert_tensor_parallel_size": 2}
    text = json.dumps({**DEEPSPEED, "expert_parallel": experts, "tensor_parallel": {"autotp_size": 2}})
    found = check(read_text(text, "ds.json", devices=16), "qwen3-30b-a3b", "hgx-h100", seq_len=4096, global_batch=64, best=False)
    assert found.broken and found.nearest and all(found.nearest)


def test_deepspeed_keeps_its_product() -> None:
    text = json.dumps(
        {**DEEPSPEED, "train_batch_size": 128, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    )
    found = check(read_text(text, "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", seq_len=4096)
    assert found.best is not None
    changed = {change.column: change.after for change in found.changes}
    if found.best.layout.micro_batch != 2:
        assert f'"gradient_accumulation_steps": {found.best.layout.num_microbatches}' in changed["micro_batch"]


def test_sequence_parallelism_is_turned_on_first() -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SPARSE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    found = check(read_text(f"{text} --micro-batch-size 1 --global-batch-size 8", "job"), best=False)
    assert {each.rule for each in found.broken} == {"C081"}
    assert found.nearest[0] == ("--sequence-parallel",)


RECIPE = (
    "python run_recipe.py --recipe {} model.tensor_model_parallel_size=2 train.micro_batch_size=1 model.sequence_parallel=true "
)


def test_the_stages_of_a_recipe_are_not_judged() -> None:
    text = RECIPE.format("kimi_k2_pretrain_config") + "model.pipeline_model_parallel_size=16"
    found = check(read_text(text, "job"), best=False)
    assert found.model == "kimi-k2"
    assert "C060" not in {each.rule for each in found.broken}
    assert any(said.startswith("C060 needs the stages") for said in found.not_judged)


def test_stages_are_said_as_the_version_has_them() -> None:
    """MindSpeed-LLM has layout strings from 26.1 on; before, chunks that differ are filled up with no-op layers."""
    given = "--num-layers-per-virtual-pipeline-stage 4 --noop-layers 30,31"
    text = f"torchrun --nproc_per_node 8 x.py {DENSE} --pipeline-model-parallel-size 4 --micro-batch-size 1 {given}"
    job = read_text(text, "job", form="mindspeed-llm")
    layout = check(job, cluster="atlas-800t-a2", global_batch=64, best=False).priced
    assert layout is not None and layout.layout.vpp == 2
    split = Split(2, 3, (0, 6, 11, 16, 21, 26, 30)).stages(30, "none")
    other = layout.layout.model_copy(update={"pp": 2, "vpp": 3, "stages": split})
    for version in ("core_v0.12.1", "26.0", "26.1"):
        words = dict(stages_restated(replace(job, version=version), other))
        assert words["--num-layers 32"] == "--num-layers 36"
        assert words["--noop-layers 30,31"] == "--noop-layers 11,17,23,29,34,35"
        assert words["--num-layers-per-virtual-pipeline-stage 4"] == "--num-layers-per-virtual-pipeline-stage 6"


@pytest.mark.parametrize("version", ["2.3", "26.0", "26.1", "core_v0.12.1"])
def test_a_release_has_the_stack_of_what_it_stands_on(version: str) -> None:
    text = f"torchrun --nproc_per_node 8 x.py {DENSE} --micro-batch-size 1"
    found = check(read_text(text, "job", form="mindspeed-llm"), framework_version=version, best=False)
    assert found.stack == "mindspeed-llm"
    said = f"mindspeed-llm {version} is priced as the catalog's stack of core_v0.12.1"
    assert (said in found.assumptions) == (version != "core_v0.12.1")
    bridge = check(read_text(RECIPE.format("llama31_8b_pretrain_config"), "job"), framework_version="0.6", best=False)
    assert bridge.stack == "megatron-bridge"


def test_activation_checkpointing_is_said_as_the_job_says_it() -> None:
    start = "torchrun --nproc_per_node 8 x.py --module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 2"
    for own, other in (
        ("--activation_checkpoint.mode full", "--activation_checkpoint.mode none"),
        ("activation-checkpoint:full", "activation-checkpoint:none"),
    ):
        texts = [f"{start} --training.local_batch_size 1 --training.seq_len 4096 {mode}" for mode in (own, other)]
        job, _ = jobs = [read_text(text, "job", form="torchtitan") for text in texts]
        before, after = [check(each, cluster="hgx-h100", best=False).priced for each in jobs]
        assert before is not None and after is not None
        found = changes(job, before.layout, after.layout, ("recompute",))
        assert found == (Change(column="recompute", before=own, after=other),)


def test_recipes_leave_experts_whole() -> None:
    """Every recipe that sets expert_tensor_parallel_size sets 1; a container that leaves it out has TP's."""
    text = RECIPE.format("qwen3_30b_a3b_pretrain_config") + "model.expert_model_parallel_size=4"
    found = check(read_text(text, "job", devices=8), cluster="hgx-h100", devices=8, global_batch=64, seq_len=4096, best=False)
    assert found.given["etp"] == 1 and any(said.startswith("etp 1: left out here") for said in found.assumptions)
    assert not any("--" in said for said in found.assumptions if "default, as" in said)
    wider = found.priced.layout.model_copy(update={"tp": 4, "dp": 2}) if found.priced else None
    said = changes(read_text(text, "job", devices=8), found.priced.layout, wider, ("tp",)) if found.priced and wider else ()
    assert said and not any("expert_tensor_parallel_size" in each.after for each in said)
    given = read_text(f"{text} model.expert_tensor_parallel_size=null", "job", devices=8)
    assert given.degrees["etp"] == 2
    bare = read_text(text.replace("--recipe qwen3_30b_a3b_pretrain_config ", ""), "job", devices=8)
    assert bare.degrees["etp"] == 2 and any("model.expert_tensor_parallel_size is tp" in said for said in bare.assumptions)


def test_what_a_recipe_may_set_is_not_broken_by_its_absence() -> None:
    """Of 256 devices with TP 2, 64 sequences leave half without any: unless the recipe has CP 8, as those of long ones do."""
    text = RECIPE.format("llama31_70b_sft_config") + "train.global_batch_size=64 "
    open_, told = (
        check(read_text(text + more, "job", devices=256), best=False)
        for more in ("", "model.context_parallel_size=1 model.pipeline_model_parallel_size=1")
    )
    assert not open_.broken and any(said.startswith("C029 needs cp, pp, which recipe") for said in open_.not_judged)
    assert "C029" in {each.rule for each in told.broken}


@pytest.mark.parametrize(
    ("degrees", "devices", "rule"),
    [
        ("model.pipeline_model_parallel_size=3", 32, "C001"),  # 2·3·cp divides 32 for no cp
        ("model.expert_model_parallel_size=16 model.num_moe_experts=128", 4, "C002"),
    ],
)
def test_what_no_recipe_could_set_right_is_broken(degrees: str, devices: int, rule: str) -> None:
    found = check(read_text(RECIPE.format("some_pretrain_config") + degrees, "job", devices=devices), best=False)
    assert rule in {each.rule for each in found.broken}
    assert not any(said.startswith(rule) for said in found.not_judged)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [("llama31_70b_pretrain_config", "llama-3.1-70b"), ("llama3_70b_pretrain_config", "llama-3.1-70b"), ("llama4_9b", None)],
)
def test_a_recipe_is_known_by_its_name_without_dots(recipe: str, model: str | None) -> None:
    text = RECIPE.format(recipe) + "model.pipeline_model_parallel_size=4"
    assert read_text(text, "job").model_name == model


def test_what_is_not_judged_names_what_is_missing() -> None:
    text = "tensor_parallel: 2\npipeline_parallel: 2\nvirtual_pipeline_parallel: 2\nglobal_batch_size: 64\naccelerators: 16\n"
    found = check(read_text(text, "job.yaml"), "llama-3.1-8b", "hgx-h100", best=False)
    assert not any("global batch" in said for said in found.not_judged)

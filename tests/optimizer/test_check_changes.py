"""The changes that check advises, applied to a job's options as they are written, make the layout that it advises."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterable

import pytest
from paraplan.optimizer.checking.checked import AND, Change, Checked
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.readers.shell import options

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


def random_job(framework: str, seed: int) -> str:
    pick = random.Random(f"{framework} {seed}").choice
    tp = pick((1, 2, 4))
    degrees = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size 4 --micro-batch-size {pick((1, 2))}"
    sharding = pick(("", "--use-distributed-optimizer", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"))
    switches = f"{'--sequence-parallel' if tp > 1 and pick((True, False)) else ''} {sharding}"
    parts = (pick((DENSE, SPARSE)), degrees, switches, pick(WAYS[framework]), pick(RECOMPUTES[framework]))
    return f"torchrun --nproc_per_node 8 --nnodes 4 --global-batch-size 64 {' '.join(parts)}"


def applied(text: str, changes: Iterable[Change]) -> str:
    """The command with every option of a change's left side taken out and those of its right put in."""
    words = shlex.split(text)
    start = next(place for place, word in enumerate(words) if word.startswith("--"))
    held = {option.name: option for option in options(words[start:])}
    for change in changes:
        for old in change.before.split(AND):
            for option in options(shlex.split(old)) if not old.startswith("no ") else ():
                held.pop(option.name, None)
        for new in change.after.split(AND):
            for option in options(shlex.split(new)) if not new.startswith("no ") else ():
                held[option.name] = option
    shown = (shlex.join((f"--{option.name}", *option.values)) for option in held.values())
    return f"torchrun {' '.join(shown)}"


def judged(text: str, framework: str) -> Checked:
    job = read_text(text, "job", form=framework)
    return check(job, cluster="hgx-h100" if framework != "mindspeed-llm" else "cloudmatrix-384")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("framework", ["megatron-lm", "mindspeed-llm"])
def test_advice_taken_literally(framework: str, seed: int) -> None:
    text = random_job(framework, seed)
    found = judged(text, framework)
    if found.best is None or not found.changes:
        pytest.skip("nothing is advised for this job")
    changed = applied(text, found.changes)
    again = check(read_text(changed, "job", form=framework), cluster=found.cluster, best=False)
    assert not again.broken, (text, changed)
    assert again.priced is not None, (changed, again.unpriced)
    assert bare(again.priced.layout) == bare(found.best.layout), (text, changed)
    assert all(change.before != change.after for change in found.changes)


DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}


@pytest.mark.parametrize("batch", [96, 100, 128, 160])
def test_what_is_near_in_deepspeed_is_legal(batch: int) -> None:
    """Written into the JSON, each proposal is judged legal."""
    text = json.dumps({**DEEPSPEED, "train_batch_size": batch})
    found = check(read_text(text, "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", seq_len=4096, best=False)
    assert bool(found.nearest) == (not found.legal) == (batch != 128)
    for near in found.nearest:
        made = {**json.loads(text), **json.loads("{" + ", ".join(part for part in near if part.startswith('"')) + "}")}
        made["train_batch_size"] = next((int(part.split()[-1]) for part in near if part.startswith("global batch")), batch)
        again = check(read_text(json.dumps(made), "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", seq_len=4096, best=False)
        assert again.legal, (near, again.broken)


def test_nothing_is_near_where_no_degree_mends_it() -> None:
    text = json.dumps({**DEEPSPEED, "train_batch_size": 100, "fp16": {"enabled": True}})
    found = check(read_text(text, "ds.json", devices=16), "llama-3.1-8b", "hgx-h100", best=False)
    assert {each.rule for each in found.broken} >= {"C029", "C121"} and not found.nearest


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


def test_a_recipe_is_known_by_its_name_without_dots() -> None:
    text = RECIPE.format("llama31_70b_pretrain_config") + "model.pipeline_model_parallel_size=4"
    assert read_text(text, "job").model_name == "llama-3.1-70b"


def test_what_is_not_judged_names_what_is_missing() -> None:
    text = "tensor_parallel: 2\npipeline_parallel: 2\nvirtual_pipeline_parallel: 2\nglobal_batch_size: 64\naccelerators: 16\n"
    found = check(read_text(text, "job.yaml"), "llama-3.1-8b", "hgx-h100", best=False)
    assert not any("global batch" in said for said in found.not_judged)

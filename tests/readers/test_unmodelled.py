"""Jobs with adapters, frozen parts or packed sequences: legality is judged, memory and time are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.cli import main
from paraplan.optimizer.readers import read_text
from paraplan.search_spaces.errors import InputError

LINE = (
    "torchrun --nproc_per_node 8 --nnodes 1 x.py --num-layers 32 --hidden-size 8192 --num-attention-heads 64 --vocab-size 32000 "
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 32 --seq-length 4096 --bf16"
)
OVERRIDES = "python x.py --recipe llama31_8b_{}_config model.tensor_model_parallel_size=2"
MINDFORMERS = "parallel_config: {{model_parallel: 2, data_parallel: 4}}\nmodel: {{model_config: {{num_layers: 4{}}}}}\n"
TITAN = "torchrun x.py --parallelism.tensor_parallel_degree 2 {}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{LINE} --lora-r 8 --lora-alpha 16", ["trains adapters (--lora-r 8)"]),
        (f"{LINE} --tuner_type lora", ["trains adapters (--tuner_type lora)"]),
        (f"{LINE} --freeze-LM --packing-seq-length 4096", ["keeps parameters frozen", "packs sequences"]),
        (f"{LINE} --sft", ["packs sequences (--sft)"]),
        (f"{LINE} --neat-pack", ["packs sequences"]),
        (f"{LINE} --packing", ["packs sequences (--packing)"]),
        (f"{LINE} --stage dpo", ["trains on preferences"]),
        (f"{LINE} --max-new-tokens 8", ["trains nothing"]),
        (f"{LINE} --num-rollout 8 --use-dynamic-batch-size", ["trains on what it generates", "packs sequences"]),
        (f"{LINE} --rollout-batch-size 8 --loss-type sft_loss", []),
        (f"{LINE} --context-parallel-size 2 --context-parallel-algo adaptive_cp_algo", ["exchanges what CP splits"]),
        (f"{LINE} --tuner_type full --freeze_llm false --packing false --no-packing --stage sft --enable-ft-package", []),
        (f"{LINE} --multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536", []),
        (f"{OVERRIDES.format('peft')} peft.dim=16", ["trains adapters (--recipe llama31_8b_peft_config)"]),
        (f"{OVERRIDES.format('sft')} peft.dim=16", ["trains adapters (peft.dim=16)"]),
        (f"{OVERRIDES.format('sft')} peft=lora", ["trains adapters (peft=lora)"]),
        (f"{OVERRIDES.format('sft')} --peft_scheme lora", ["trains adapters"]),
        ("peft:\n  dim: 16\nmodel:\n  tensor_model_parallel_size: 2\n", ["trains adapters (peft.dim=16)"]),
        ("peft: lora\nmodel:\n  tensor_model_parallel_size: 2\n", ["trains adapters (peft=lora)"]),
        ("peft: null\nmodel:\n  tensor_model_parallel_size: 2\n", []),
        (f"{OVERRIDES.format('sft')} dataset.enable_offline_packing=true", ["packs sequences"]),
        (f"{OVERRIDES.format('sft')} model.freeze_language_model=True", ["keeps parameters frozen"]),
        (f"{OVERRIDES.format('pretrain')} peft=null model.freeze_language_model=false", []),
        (MINDFORMERS.format(", pet_config: {pet_type: lora, lora_rank: 8}"), ["trains adapters"]),
        (MINDFORMERS.format("") + "train_dataset: {data_loader: {packing: pack}}", ["packs sequences"]),
        (MINDFORMERS.format(", kv_lora_rank: 512"), []),
        (TITAN.format("--lora.rank 8"), ["trains adapters"]),
        (TITAN.format("--model.converters float8,lora"), ["trains adapters"]),
        (TITAN.format("--dataloader.packing true"), ["packs sequences"]),
        ("[parallelism]\ntensor_parallel_degree = 2\n[lora]\nrank = 8\n", ["trains adapters"]),
        ('{"zero_optimization": {"stage": 3}, "lora": {"r": 8}, "train_batch_size": 8}', ["trains adapters"]),
        ("strategy: {tensor_parallel: 2, pipeline_parallel: 1, data_parallel: 4}\nlora: {rank: 8}", ["trains adapters"]),
        ("strategy: {tensor_parallel: 2, pipeline_parallel: 1, data_parallel: 4}", []),
    ],
)
def test_what_a_job_trains(text: str, said: list[str]) -> None:
    """Of every format, by the option that says so; switched off it is nothing, and MLA's ranks are no adapters."""
    found = read_text(text, "job").unmodelled
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_legality_is_judged_and_the_rest_is_said_not_to_be() -> None:
    """A job too large to train in full may well fit; the rules that it breaks are broken all the same."""
    plain = check(read_text(LINE, "run.sh"), cluster="hgx-h100", best=False)
    assert plain.fit is not None and plain.fit.over_gib > 0 and not plain.ok
    found = check(read_text(f"{LINE} --lora-r 8", "run.sh"), cluster="hgx-h100")
    assert found.legal and found.ok and found.fit is None and found.priced is None and found.best is None
    assert any("the job trains adapters (--lora-r 8)" in each for each in found.unpriced)
    assert not any("lora" in each for each in (*found.unknown, *found.may_change_model))
    broken = check(read_text(f"{LINE.replace('size 2', 'size 3')} --lora-r 8", "run.sh"), cluster="hgx-h100")
    assert not broken.ok and broken.unmodelled


def test_the_exit_status_is_by_what_was_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(f"{LINE} --lora-r 8")
    assert main(["check", str(tmp_path / "run.sh"), "--cluster", "hgx-h100", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["unmodelled"] == ["trains adapters (--lora-r 8)"]


SLIME = (
    "ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --num-layers 48 --hidden-size 2048 "
    "--num-attention-heads 32 --num-experts 128 --tensor-model-parallel-size 4 --expert-model-parallel-size {} "
    "--expert-tensor-parallel-size 1 --disable-bias-linear --pipeline-model-parallel-size 2 --sequence-parallel "
    "--optimizer-cpu-offload --use-precision-aware-optimizer "
    "--num-rollout 3000 --global-batch-size 256 --max-tokens-per-gpu 9216"
)


def test_the_layout_of_a_job_with_rollouts_is_judged() -> None:
    """slime turns on the distributed optimizer, which offload needs, and bf16; EP 16 on PP 2 needs 32 of its 16 devices."""
    found = check(read_text(SLIME.format(8), "run.sh"), cluster="hgx-h100", best=False)
    assert found.legal and found.devices == 16 and found.given["optimizer_sharding"] == "zero1"
    assert any("slime sets them itself" in each for each in found.assumptions)
    assert found.fit is None and any("trains on what it generates in between" in each for each in found.unpriced)
    broken = check(read_text(SLIME.format(16), "run.sh"), cluster="hgx-h100", best=False)
    assert {each.rule for each in broken.broken} == {"C002"} and {"ep": 8} in broken.nearest_columns


def test_what_only_training_needs_is_not_asked_of_a_server() -> None:
    """SP beside TP and experts is asked of a step that trains."""
    line = f"{LINE} --num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear"
    trained, served = (check(read_text(f"{line}{more}", "run.sh"), best=False) for more in ("", " --max-new-tokens 8"))
    assert "C081" in {each.rule for each in trained.broken} and not served.broken


@pytest.mark.parametrize(
    "command",
    [
        "python tools/checkpoint/convert.py --model-type GPT --loader llama_mistral --saver core --target-tensor-parallel-size 4",
        "python convert_ckpt_v2.py --load-model-type hf --save-model-type mg --num-layers-per-virtual-pipeline-stage 2",
        "python examples/convert_ckpt_x_mcore2hf.py --num-layers 64 --num-layers-per-virtual-pipeline-stage 2 --noop-layers 63",
        "torchrun --nproc_per_node 8 hf2mcore_x.py --num-layers 32 --tensor-model-parallel-size 4",
        "megatron export --model Qwen/Qwen3-8B --to_hf true --tensor_model_parallel_size 2",
    ],
)
def test_a_checkpoint_that_is_converted_is_no_training(command: str) -> None:
    with pytest.raises(InputError, match=r"run\.sh: converts a checkpoint \(.*\) and trains nothing"):
        read_text(command, "run.sh")

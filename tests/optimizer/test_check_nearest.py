"""Random jobs that break rules, in every format: what check proposes, made word for word in their configuration, is legal."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import yaml
from paraplan.optimizer.checking.checked import Checked
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import read_text

from .applying import made
from .test_check_changes import DENSE, ON_ASCEND, SPARSE

MODEL = "qwen3-30b-a3b"
DEVICES, BATCH, LENGTH = 48, 96, 4096


def degrees(drawn: Random) -> dict[str, int]:
    """Of all degrees some that do not go with 48 layers, 4 groups of 32 heads, 128 experts, 48 devices or a batch of 96."""
    found = {"tp": drawn.choice((1, 2, 3, 4, 6, 8)), "pp": drawn.choice((1, 2, 3, 4, 5, 7)), "cp": drawn.choice((1, 1, 2))}
    found |= {"ep": drawn.choice((1, 2, 4, 6, 8, 32)), "micro_batch": drawn.choice((1, 2, 3, 5, 7))}
    return found | {"vpp": drawn.choice((1, 1, 2, 5)) if found["pp"] > 1 else 1}


def megatron(form: str, drawn: Random) -> str:
    d, model = degrees(drawn), drawn.choice((DENSE, SPARSE.replace(" --expert-model-parallel-size 8", "")))
    experts = f"--expert-model-parallel-size {d['ep']}" if "experts" in model else ""
    chunks = drawn.choice((f"--num-virtual-stages-per-pipeline-rank {d['vpp']}", "--num-layers-per-virtual-pipeline-stage 2"))
    return (
        f"torchrun {model} {experts} --tensor-model-parallel-size {d['tp']} --pipeline-model-parallel-size {d['pp']} "
        f"--context-parallel-size {d['cp']} --micro-batch-size {d['micro_batch']} {chunks if d['vpp'] > 1 else ''} "
        f"--global-batch-size {BATCH} {'--sequence-parallel' if d['tp'] > 1 and drawn.random() < 0.8 else ''}"
    )


def bridge(drawn: Random) -> str:
    d = degrees(drawn)
    words = {
        "model.tensor_model_parallel_size": d["tp"],
        "model.pipeline_model_parallel_size": d["pp"],
        "model.context_parallel_size": d["cp"],
        "model.expert_model_parallel_size": d["ep"],
        "model.virtual_pipeline_model_parallel_size": d["vpp"] if d["vpp"] > 1 else "null",
        "model.sequence_parallel": str(d["tp"] > 1).lower(),
        "train.micro_batch_size": d["micro_batch"],
        "train.global_batch_size": BATCH,
        "model.seq_length": LENGTH,
    }
    return f"run_recipe.py {' '.join(f'{key}={value}' for key, value in words.items())}"


def mindformers(drawn: Random) -> str:
    d = degrees(drawn)
    parallel = {"model_parallel": d["tp"], "pipeline_stage": d["pp"], "context_parallel": d["cp"], "expert_parallel": d["ep"]}
    batch = {"data_parallel": drawn.choice((1, 2, 3, 4)), "micro_batch_num": drawn.choice((3, 4, 8))}
    data: dict[str, Any] = {
        "runner_config": {"batch_size": d["micro_batch"]},
        "parallel": {"pipeline_config": {"pipeline_interleave": d["vpp"] > 1}},
        "parallel_config": {**parallel, **batch, "use_seq_parallel": d["tp"] > 1},
        "model": {"model_config": {"seq_length": LENGTH, "pp_interleave_num": d["vpp"]}},
    }
    return yaml.safe_dump(data)


def torchtitan_fields(drawn: Random) -> dict[str, Any]:
    d = degrees(drawn)
    named = {"tensor": d["tp"], "pipeline": d["pp"], "context": d["cp"], "expert": d["ep"]}
    fields: dict[str, Any] = {f"parallelism.{name}_parallel_degree": value for name, value in named.items()}
    if d["pp"] > 1:
        fields["parallelism.pipeline_parallel_schedule"] = "1F1B" if d["vpp"] == 1 else "Interleaved1F1B"
    return {**fields, "training.local_batch_size": 4, "training.global_batch_size": BATCH, "training.seq_len": LENGTH}


def torchtitan(drawn: Random) -> str:
    words = " ".join(f"--{name} {value}" for name, value in torchtitan_fields(drawn).items())
    return f"torchrun --module qwen3 --config qwen3_30b_a3b {words} --training.disable_cuda_graphs"


def torchtitan_toml(drawn: Random) -> str:
    fields = {"model.name": "qwen3", "model.flavor": "30B-A3B", **torchtitan_fields(drawn)}
    sections = {name.partition(".")[0]: {} for name in fields}
    for name, value in fields.items():
        sections[name.partition(".")[0]][name.partition(".")[2]] = value
    lines = [(f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in own.items())) for name, own in sections.items()]
    return "\n".join(line for section in lines for line in section)


def torchtitan_program(drawn: Random) -> str:
    lines = [f"    config.{name} = {value!r}" for name, value in torchtitan_fields(drawn).items()]
    head = ["def planned():", "    config = qwen3_30b_a3b()", "    config.model_spec = model_registry('30B-A3B')"]
    return "\n".join([*head, *lines, "    return config", ""])


def deepspeed(drawn: Random) -> str:
    d = degrees(drawn)
    return json.dumps(
        {
            "train_batch_size": drawn.choice((BATCH, 100)),
            "train_micro_batch_size_per_gpu": d["micro_batch"],
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": d["tp"]},
            "sequence_parallel_size": d["cp"],
            "pipeline": {"stages": d["pp"]},
            **({"expert_parallel": {"enabled": True, "autoep_size": d["ep"]}} if d["ep"] > 1 else {}),
            **({"gradient_accumulation_steps": 4} if drawn.random() < 0.5 else {}),
        }
    )


def job_yaml(drawn: Random) -> str:
    d = degrees(drawn)
    strategy: dict[str, Any] = {
        "tensor_parallel": d["tp"],
        "pipeline_parallel": d["pp"],
        "context_parallel": d["cp"],
        "expert_parallel": d["ep"],
        "virtual_pipeline_parallel": d["vpp"],
        "micro_batch_size": d["micro_batch"],
        "global_batch_size": BATCH,
        "seq_len": LENGTH,
    }
    if drawn.random() < 0.5:
        strategy["data_parallel"] = drawn.choice((1, 2, 4, 6))
    return yaml.safe_dump({"task": {"model": MODEL, "resource": {"accelerators": DEVICES}, "strategy": strategy}})


def layout_words(drawn: Random) -> str:
    found = degrees(drawn) | ({"dp": drawn.choice((1, 2, 4, 6))} if drawn.random() < 0.5 else {})
    return ",".join(f"{name}={value}" for name, value in found.items())


JOBS: dict[str, Callable[[Random], str]] = {
    "megatron-lm": lambda drawn: megatron("megatron-lm", drawn),
    "mindspeed-llm": lambda drawn: megatron("mindspeed-llm", drawn),
    "megatron-bridge": bridge,
    "mindformers": mindformers,
    "torchtitan": torchtitan,
    "torchtitan toml": torchtitan_toml,
    "torchtitan program": torchtitan_program,
    "deepspeed": deepspeed,
    "job": job_yaml,
    "paraplan": layout_words,
}
IN_FILE = ("megatron-lm", "mindspeed-llm", "torchtitan", "torchtitan toml", "torchtitan program", "job")
"""Formats whose files say the model, or its figures."""


def judged(form: str, text: str, batch: int = BATCH, length: int = LENGTH) -> Checked:
    given: dict[str, Any] = {"global_batch": batch} if form == "paraplan" else {}
    given |= {"seq_len": length} if form in ("paraplan", "deepspeed", "megatron-lm", "mindspeed-llm") else {}
    cluster = "cloudmatrix-384" if form in ON_ASCEND else "hgx-h100"
    job = read_text(text, "job", form=form.split()[0], devices=DEVICES)
    return check(job, None if form in IN_FILE else MODEL, cluster, best=False, **given)


def after(form: str, text: str, words: tuple[str, ...]) -> Checked:
    """The job with a proposal made; what the caller gave is given anew where the proposal changes it."""
    given = {"global batch": BATCH, "sequence length": LENGTH}
    for name in given:
        given[name] = next((int(word.split()[-1]) for word in words if word.startswith(name)), given[name])
    said = [word for word in words if not word.startswith(tuple(given))]
    return judged(form, made(form, text, said), given["global batch"], given["sequence length"])


@pytest.mark.parametrize("form", JOBS)
def test_what_is_near_is_legal(form: str) -> None:
    proposals = 0
    for seed in range(3):
        text = JOBS[form](Random(f"{form} {seed}"))
        found = judged(form, text)
        assert bool(found.broken) or not found.nearest
        for words, change in zip(found.nearest, found.nearest_columns, strict=True):
            again = after(form, text, words)
            assert not again.broken, (text, change, words, [each.sentence for each in again.broken])
            proposals += 1
    assert proposals >= 3

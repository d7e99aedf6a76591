"""Small jobs for the tests of check: Megatron command lines from keywords."""

from __future__ import annotations

from typing import Any

from paraplan.optimizer.checking.checker import Checked, check
from paraplan.optimizer.readers import Job, read_text

LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--position-embedding-type rope --vocab-size 32000"
)
LLAMA_7B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope --vocab-size 32000"
)
SHORT = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "vpp": "num-virtual-stages-per-pipeline-rank",
    "mbs": "micro-batch-size",
    "gbs": "global-batch-size",
    "seq": "seq-length",
    "layers": "num-layers",
    "experts": "num-experts",
    "heads": "num-attention-heads",
    "first": "decoder-first-pipeline-num-layers",
    "last": "decoder-last-pipeline-num-layers",
    "layout": "pipeline-model-parallel-layout",
}


def line(more: str = "", **values: Any) -> str:
    """A command line of Megatron-LM: tp=8 as its option, True as a flag."""
    words = ["pretrain_gpt.py", more, "--bf16"]
    for name, value in values.items():
        option = SHORT.get(name, name.replace("_", "-"))
        words.append(f"--{option}" if value is True else f"--{option} {value}")
    return " ".join(words)


def job(more: str = "", world: int | None = None, form: str = "megatron-lm", **values: Any) -> Job:
    return read_text(line(more, **values), "job.sh", form=form, devices=world)


def checked(
    more: str = "", world: int | None = None, form: str = "megatron-lm", options: dict[str, Any] | None = None, **values: Any
) -> Checked:
    """The judgement of such a line, without a search for the best layout."""
    return check(job(more, world, form, **values), **{"best": False, **(options or {})})


def rules(found: Checked) -> set[str]:
    return {each.rule for each in found.broken}


def legal(found: Checked, rule: str, column: str) -> tuple[int, ...]:
    """The values of a column that would meet a broken rule."""
    return next(each for each in found.broken if each.rule == rule).legal[column]


def terms(found: Checked, stage: int = 0) -> dict[str, float]:
    """GiB of a stage by term."""
    assert found.priced is not None, found.unpriced
    return found.priced.memory.stages[stage].terms_gib


def states(found: Checked, stage: int = 0) -> float:
    """GiB of weights, gradients and optimizer states."""
    return sum(terms(found, stage)[name] for name in ("weights", "gradients", "optimizer"))

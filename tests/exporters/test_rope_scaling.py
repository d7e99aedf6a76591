"""Scaling of rotary positions, which trained weights hang on: told where a framework can be, read back as told, else a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paraplan.optimizer.exporters import render
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.inputs import load_model
from paraplan.search_spaces.model import RopeScaling

MakePlan = Callable[..., Plan]
LLAMA = {"tp": 8, "dp": 8}
OSS = {"dp": 64, "ep": 16, "sequence_parallel": False}
LATENT = {"pp": 16, "dp": 64, "ep": 64, "num_microbatches": 32, "counts": (4,) * 15 + (2,), "tp": 1}
KIMI = {**LATENT, "counts": (4,) * 15 + (1,)}
ASCEND = {"cluster": "cloudmatrix-384", "stack": "mindspeed-llm"}
FILES = {"megatron-bridge": "megatron_bridge_plan.py", "mindformers": "mindformers.yaml"}
UNSCALED = "positions turn as if there were none"


def written(plan: Plan, framework: str, version: str | None) -> str:
    return render(plan, framework, version)[FILES.get(framework, f"{framework}.sh")]


@pytest.mark.parametrize(
    ("framework", "version", "model", "layout"),
    [
        ("megatron-lm", None, "llama-3.1-70b", LLAMA),
        ("megatron-lm", "0.14", "llama-3.1-70b", LLAMA),
        ("megatron-lm", None, "deepseek-v3", LATENT),
        ("megatron-lm", "0.19", "gpt-oss-120b", OSS),
        ("megatron-bridge", None, "llama-3.2-3b", {"dp": 8}),
        ("megatron-bridge", None, "kimi-k2", KIMI),
        ("megatron-bridge", None, "gpt-oss-120b", OSS),
        ("mindspeed-llm", None, "llama-3.1-70b", {**ASCEND, **LLAMA}),
        ("mindspeed-llm", None, "kimi-k2", {**ASCEND, **KIMI}),
        ("mindformers", None, "deepseek-v3", {**ASCEND, **LATENT}),
    ],
)
def test_the_scaling_that_is_told_is_read_back(
    make_plan: MakePlan, framework: str, version: str | None, model: str, layout: dict[str, Any]
) -> None:
    spec = load_model(model)
    text = written(make_plan(spec, **layout), framework, version)
    job = read_text(text, "job", form=framework)
    assert UNSCALED not in text and job.model is not None
    assert job.model.rope_scaling == spec.rope_scaling and spec.rope_scaling is not None
    bare = written(make_plan(spec.model_copy(update={"rope_scaling": None}), **layout), framework, version)
    unscaled = read_text(bare, "job", form=framework).model
    assert unscaled is not None and unscaled.rope_scaling is None


@pytest.mark.parametrize(
    ("framework", "version", "model", "layout", "words"),
    [
        ("megatron-lm", None, "llama-3.2-3b", {"dp": 8}, "factor 32, not 8"),
        ("megatron-lm", None, "kimi-k2", KIMI, "beta_fast 1, not 32"),
        ("megatron-lm", "0.13", "deepseek-v3", LATENT, "original_max_position_embeddings 4096, not 163840"),
        ("megatron-lm", "0.18", "gpt-oss-120b", OSS, "no options of YaRN for attention that is not latent"),
        ("mindspeed-llm", None, "qwen3-8b", {**ASCEND, "dp": 8}, "takes 40960 / 4096 for the factor, not 4"),
        ("mindformers", None, "qwen3-8b", {**ASCEND, "dp": 8}, "YaRN, of latent attention, and no other kind"),
    ],
)
def test_a_scaling_that_cannot_be_told_is_a_note(
    make_plan: MakePlan, framework: str, version: str | None, model: str, layout: dict[str, Any], words: str
) -> None:
    spec = load_model(model)
    if spec.rope_scaling is None:
        scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
        spec = spec.model_copy(update={"rope_scaling": scaling})
    files = render(make_plan(spec, **layout), framework, version)
    for name in (f"{framework}.md", f"{framework}.sh"):
        said = files[name].replace("\n# ", " ")
        assert UNSCALED in said and words in said, name

"""Options of the Megatron family that say what the model is, by whatever name."""

from __future__ import annotations

import pytest
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import Job, read_text
from paraplan.search_spaces.layer_kinds import DenseMlp, MoeMlp
from paraplan.search_spaces.model import ModelSpec

DENSE = "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --vocab-size 32000 --seq-length 4096"
MOE = f"{DENSE} --num-experts 16 --moe-router-topk 2"


def read(line: str, framework: str = "mindspeed-llm") -> Job:
    return read_text(f"torchrun pretrain_gpt.py {line}", "job.sh", form=framework)


def model(line: str, framework: str = "mindspeed-llm") -> ModelSpec:
    found = read(line, framework).model
    assert found is not None
    return found


@pytest.mark.parametrize("option", ["--geglu", "--gelu-tanh", "--swiglu"])
def test_an_activation_that_gates_has_three_matrices(option: str) -> None:
    """MindSpeed-LLM turns the gate on for all of these."""
    assert not model(DENSE).kinds["dense"].mlp.gated
    found = model(f"{DENSE} {option}").kinds["dense"].mlp
    assert isinstance(found, DenseMlp) and found.gated
    assert not read(f"{DENSE} {option}").unknown


def test_quick_gates_that_are_clamped_are_read_as_such() -> None:
    """As NVIDIA's own example of gpt-oss gives them."""
    found = model(f"{MOE} --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0", "megatron-lm")
    experts = found.kinds["moe"].mlp
    assert isinstance(experts, MoeMlp) and experts.gated and experts.clamped


def test_deprecated_names_say_what_the_new_ones_say() -> None:
    new = "--moe-ffn-hidden-size 512 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5"
    old = "--moe-intermediate-size 512 --n-group 8 --topk-group 4 --routed-scaling-factor 2.5"
    found = model(f"{MOE} {new}")
    assert found == model(f"{MOE} {old}")
    assert isinstance(found.kinds["moe"].mlp, MoeMlp) and found.kinds["moe"].mlp.width == 512
    latent = "--kv-lora-rank 64 --v-head-dim 64"
    new = f"--multi-latent-attention {latent} --qk-pos-emb-head-dim 32 --qk-head-dim 96"
    old = f"--multi-head-latent-attention {latent} --qk-rope-head-dim 32 --qk-nope-head-dim 96"
    assert model(f"{DENSE} {new}") == model(f"{DENSE} {old}")


@pytest.mark.parametrize("option", ["--silu-clamp 7", "--attn-logit-softcapping 30", "--new-glu", "--activation-function x"])
def test_what_may_change_the_model_is_said(option: str) -> None:
    found = check(read(f"{DENSE} --bf16 {option}"), best=False)
    assert found.may_change_model == (option,) and not found.unknown


def test_a_vocabulary_that_is_given_completes_the_model() -> None:
    """Scripts with a tokenizer's path say everything but the size of its vocabulary."""
    line = DENSE.replace("--vocab-size 32000 ", "") + " --bf16 --micro-batch-size 1 --global-batch-size 8"
    options = {"cluster": "hgx-h100", "devices": 8, "best": False}
    open_ = check(read(line, "megatron-lm"), **options)
    assert open_.priced is None and "--vocab-size" in open_.unpriced[0]
    given = check(read(line, "megatron-lm"), vocab_size=32000, **options)
    whole = check(read(f"{DENSE} --bf16 --micro-batch-size 1 --global-batch-size 8", "megatron-lm"), **options)
    assert given.priced is not None and given.priced == whole.priced


def test_what_changes_no_price_is_not_said_to_change_the_model() -> None:
    plain = "--no-create-attention-mask-in-dataloader --no-shared-storage --fp8-amax-history-len 1024 --tiktoken-pattern v2"
    found = check(read(f"{DENSE} --bf16 {plain} --fp8-format hybrid --fp8-param-gather", "megatron-lm"), best=False)
    assert not found.may_change_model and not found.unknown
    assert any(said.startswith("--fp8-param-gather is priced as BF16 weights") for said in found.assumptions)

"""Options of the Megatron family that say what the model is, by whatever name."""

from __future__ import annotations

import pytest
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.readers import Job, read_text
from paraplan.search_spaces.layer_kinds import DenseMlp, MoeMlp
from paraplan.search_spaces.model import ModelSpec

DENSE = "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --vocab-size 32000 --seq-length 4096"
ROPE = "--position-embedding-type rope"
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


@pytest.mark.parametrize(("option", "learned"), [("", True), ("--use-rotary-position-embeddings", False), (ROPE, False)])
def test_rotary_positions_are_not_learned(option: str, learned: bool) -> None:
    """The older switch sets the type, as the newer option does (megatron/training/arguments.py)."""
    assert model(f"{DENSE} {option}", "megatron-lm").learned_positions is learned


def test_quick_gates_that_are_clamped_are_read_as_such() -> None:
    """As NVIDIA's own example of gpt-oss gives them."""
    found = model(f"{MOE} --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0", "megatron-lm")
    experts = found.kinds["moe"].mlp
    assert isinstance(experts, MoeMlp) and experts.gated and experts.clamped
    assert (experts.clamp_limit, experts.gate_offset) == (7.0, 1.0)


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


def test_fp8_weights_are_gathered_in_half_the_bytes() -> None:
    """What is exposed of data parallelism falls by half of the gather alone; the reduction of gradients stays.

    Weights that are kept in FP8, both ways round, take as much as in BF16; beside BF16 ones their casts take two bytes more.
    """
    line = f"{DENSE} --bf16 --fp8-format hybrid --micro-batch-size 1 --global-batch-size 16 --use-distributed-optimizer"
    options = {"cluster": "hgx-h100", "devices": 16, "best": False}
    plain, halved = (check(read(f"{line} {more}", "megatron-lm"), **options) for more in ("", "--fp8-param-gather"))
    assert plain.priced is not None and halved.priced is not None
    gathered = {found.problem.stack.gathered_weight_bytes for found in (plain, halved) if found.problem}
    assert gathered == {1, 2}
    held = [found.priced.memory.stages[0].terms_gib["weights"] for found in (plain, halved)]
    assert held[0] == pytest.approx(2.0 * held[1])
    saved = 1.0 - halved.priced.breakdown_s["dp"] / plain.priced.breakdown_s["dp"]
    assert saved == pytest.approx(1 / 2 / 3, rel=0.15)  # half of two bytes, beside FP32 gradients of four
    sent = [sum(each.get("dp", 0.0) for each in found.priced.traffic_gib.values()) for found in (plain, halved)]
    assert sent[1] / sent[0] == pytest.approx(5 / 6)
    assert any(said.startswith("--fp8-param-gather: all weights are gathered") for said in halved.assumptions)


OVER_TP = (
    "--num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-permutation-async-comm "
    "--moe-token-dispatcher-type alltoall_seq --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8"
)


def test_experts_spread_over_tp_ranks_are_more_groups_of_whole_ones() -> None:
    """MindSpeed's TP-extended EP: 8 groups on 4 TP ranks each hold 2 of 64 experts; plain options say the same as ep 32, etp 1."""
    line = f"{DENSE} --bf16 {OVER_TP}"
    cut, spread = (check(read(f"{line} {more}", "mindspeed-llm"), devices=64, best=False) for more in ("", "--moe-tp-extend-ep"))
    assert [found.given[name] for found in (cut, spread) for name in ("ep", "etp")] == [8, 4, 32, 1]
    assert spread.legal and any(said.startswith("ep 32, etp 1: --moe-tp-extend-ep") for said in spread.assumptions)
    alltoall = check(read(f"{line} --moe-tp-extend-ep".replace("_seq", ""), "mindspeed-llm"), devices=64, best=False)
    assert alltoall.given["ep"] == 8 and any("--moe-tp-extend-ep does nothing" in said for said in alltoall.assumptions)


@pytest.mark.parametrize(
    ("changed", "rule", "words"),
    [
        ((" --moe-permutation-async-comm", ""), "C085", "needs --moe-permutation-async-comm"),
        (("--moe-grouped-gemm", "--moe-fb-overlap --moe-grouped-gemm"), "C085", "does not go with --moe-fb-overlap"),
        (("parallel-size 8", "parallel-size 32"), "C080c", "ep = 128 does not divide the 64 experts"),
        (("--bf16", "--bf16 --reuse-fp32-param --swap-optimizer --use-distributed-optimizer"), "C110", "with --swap-optimizer"),
    ],
)
def test_what_mindspeed_refuses_beside_those_options(changed: tuple[str, str], rule: str, words: str) -> None:
    line = f"{DENSE} --bf16 {OVER_TP} --moe-tp-extend-ep".replace(*changed)
    (broken,) = check(read(line, "mindspeed-llm"), devices=256, best=False).broken
    assert broken.rule == rule and words in broken.sentence


def test_reused_fp32_weights_save_two_bytes_of_a_sharded_parameter() -> None:
    """MindSpeed: sizeof(bfloat16) × parameters / DP under the distributed optimizer, and nothing of weights or gradients."""
    line = f"{DENSE} --bf16 --micro-batch-size 1 --global-batch-size 16 --use-distributed-optimizer"
    options = {"cluster": "atlas-800t-a2", "devices": 8, "best": False}
    plain, reused = (check(read(f"{line} {more}", "mindspeed-llm"), **options) for more in ("", "--reuse-fp32-param"))
    assert plain.priced is not None and reused.priced is not None
    before, after = (found.priced.memory.stages[0].terms_gib for found in (plain, reused) if found.priced)
    assert {name for name in before if before[name] != after[name]} == {"optimizer"}
    assert after["optimizer"] / before["optimizer"] == pytest.approx(10 / 12)


def test_leading_dense_layers_are_fewer_than_an_even_stage_holds() -> None:
    """MindSpeed-LLM holds them against --num-layers over stages, whatever a list says; no-ops count."""
    line = f"{DENSE} --bf16 --pipeline-model-parallel-size 4 --num-experts 16 --moe-router-topk 2 --first-k-dense-replace 2"
    (broken,) = check(read(f"{line} --num-layer-list 3,2,2,1"), devices=4, best=False).broken
    assert broken.rule == "C073" and "--num-layers 12 in place of a list" in broken.sentence
    padded = f"{line.replace('--num-layers 8', '--num-layers 12')} --noop-layers 5,8,10,11"
    assert check(read(padded), devices=4, best=False).legal


def test_a_factor_that_the_model_is_not_built_with_is_told() -> None:
    """Megatron-LM passes --use-rope-scaling on to its model, and not the factor beside it."""
    for factor, idle in (("8", False), ("8.0", False), ("80", True), ("32.0", True)):
        line = f"{DENSE} {ROPE} --use-rope-scaling --rope-scaling-factor {factor}"
        scaling = model(line, "megatron-lm").rope_scaling
        assert scaling is not None and scaling.factor == 8
        assert any("does nothing" in told.sentence for told in read(line, "megatron-lm").advice) == idle

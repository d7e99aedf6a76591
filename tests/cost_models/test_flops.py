"""Model FLOPs against Megatron-LM's published count, against SC21's closed form and against 6·N·D.

Megatron (megatron/training/training.py) counts GEMMs and core attention three times forward. It leaves the router out and puts
norms of MLA latents and of MTP in, one multiply-add per weight; both differences are stated below, so that the rest agrees to the
last digit.
"""

from __future__ import annotations

import pytest
from paraplan.cost_models.details import detail, model_flops
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.search_spaces.inputs import build_problem, load_model
from paraplan.search_spaces.layout import Layout
from paraplan.search_spaces.model import Attention, DenseMlp, LatentAttention, ModelSpec, MoeMlp

FORWARD_AND_BACKWARD, MULTIPLY_ADD = 3, 2
MODELS = ("gpt3-175b", "llama-3.1-70b", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-8b")


def counted(model: str, seq_len: int = 4096, vocab_size: int | None = None) -> tuple[float, float]:
    """FLOPs of one sequence, causal attention halved and whole."""
    problem = build_problem(model, "hgx-h100", 8, 8, seq_len, vocab_size=vocab_size)
    return model_flops(CostModel(problem).layers)


def megatron(model: ModelSpec, seq_len: int, causal: bool) -> float:
    """num_floating_point_operations for one sequence; `causal` halves core attention, as it does from core 0.13 on."""
    h, per_token = model.hidden_size, 0.0
    mtp = model.mtp.layers if model.mtp else 0
    layers = [*model.layer_kinds, *([model.mtp.kind] * mtp if model.mtp else [])]
    seen = seq_len / 2 if causal else seq_len
    for name in layers:
        mixer, mlp = model.kinds[name].mixer, model.kinds[name].mlp
        if isinstance(mixer, LatentAttention):
            assert mixer.q_lora_rank is not None
            qk = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
            per_token += mixer.q_lora_rank * (h + mixer.heads * qk + 1)
            per_token += mixer.kv_lora_rank * (h + mixer.heads * (mixer.qk_nope_head_dim + mixer.v_head_dim) + 1)
            per_token += h * mixer.qk_rope_head_dim + mixer.heads * mixer.v_head_dim * h
            per_token += seen * mixer.heads * (qk + mixer.v_head_dim)
        else:
            assert isinstance(mixer, Attention)
            query, key = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            per_token += h * (query + 2 * key) + 2 * query * seen + query * h
        if isinstance(mlp, DenseMlp):
            per_token += h * mlp.width * (3 if mlp.gated else 2)
        else:
            assert isinstance(mlp, MoeMlp)
            per_token += h * (mlp.width * mlp.top_k + mlp.shared_width) * 3
    per_token += mtp * (3 * h + 2 * h * h) + h * model.vocab_size * (mtp + 1)
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * seq_len * per_token


def only_here(model: ModelSpec, seq_len: int) -> float:
    """What this repository counts and Megatron does not (routers), less what only Megatron counts (norms as multiply-adds)."""
    mtp = model.mtp.layers if model.mtp else 0
    per_token = -3.0 * model.hidden_size * mtp
    for name in (*model.layer_kinds, *([model.mtp.kind] * mtp if model.mtp else [])):
        kind = model.kinds[name]
        if isinstance(kind.mlp, MoeMlp):
            per_token += model.hidden_size * kind.mlp.experts
        if isinstance(kind.mixer, LatentAttention):
            per_token -= (kind.mixer.q_lora_rank or 0) + kind.mixer.kv_lora_rank
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * seq_len * per_token


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_both_conventions_equal_megatrons(name: str, seq_len: int) -> None:
    model = load_model(name)
    causal, full = counted(name, seq_len)
    assert causal == pytest.approx(megatron(model, seq_len, causal=True) + only_here(model, seq_len), rel=1e-12)
    assert full == pytest.approx(megatron(model, seq_len, causal=False) + only_here(model, seq_len), rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_routers_and_norms_hardly_matter(name: str) -> None:
    model = load_model(name)
    assert abs(only_here(model, 4096)) / megatron(model, 4096, causal=True) < 0.006


def test_gpt3_equals_the_closed_form_of_sc21() -> None:
    """arXiv 2104.04473 appendix: 72·B·s·l·h²·(1 + s/(6h)) + 6·B·s·h·V without recompute; a full one adds a third of the layers."""
    s, l, h, v = 2048, 96, 12288, 51200  # noqa: E741  (l is the paper's symbol)
    _, full = counted("gpt3-175b", s)
    assert full == pytest.approx(72 * s * l * h**2 * (1 + s / (6 * h)) + 6 * s * h * v, rel=1e-12)
    problem = build_problem("gpt3-175b", "hgx-a100", 128, 64, s)
    layout = Layout(tp=8, pp=8, dp=2, edp=16, num_microbatches=32, recompute="full")
    cost = CostModel(problem)
    executed = detail(cost, with_default_stages(cost, layout)).executed_flops / 64
    assert executed == pytest.approx(96 * s * l * h**2 * (1 + s / (12 * h)) + 6 * s * h * v, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt3-175b", 174.6e9),
        ("llama-3.1-8b", 8.03e9 - 0.525e9),
        ("llama-3.1-70b", 70.55e9 - 1.05e9),
        ("mixtral-8x7b", 12.88e9 - 0.13e9),
    ],
)
def test_six_flops_per_parameter_and_token_plus_attention(name: str, parameters: float) -> None:
    """6·N·D with the look-up left out (a tied matrix is the head and stays) and 6·l·s·a·d for causal attention."""
    model, s = load_model(name), 4096
    attention = 0
    for kind in model.layer_kinds:
        mixer = model.kinds[kind].mixer
        assert isinstance(mixer, Attention)
        attention += 6 * s * mixer.heads * mixer.head_dim
    causal, _ = counted(name, s)
    assert causal == pytest.approx(s * (6 * parameters + attention), rel=0.003)


def test_padding_of_the_vocabulary_is_no_model_flop() -> None:
    """A vocabulary given in the workload replaces the model's; rows of padding are executed and do not count."""
    h, s = 4096, 4096
    base, _ = counted("llama-3.1-8b")
    larger, _ = counted("llama-3.1-8b", vocab_size=128256 + 1000)
    assert larger - base == pytest.approx(6 * s * h * 1000, rel=1e-9)


def test_mtp_counts_its_layer_its_projection_and_a_second_head() -> None:
    model = load_model("deepseek-v3")
    without = model.model_copy(update={"mtp": None})
    s, h = 4096, model.hidden_size
    extra = counted("deepseek-v3", s)[0] - model_flops(CostModel(build_problem(without, "hgx-h100", 8, 8, s)).layers)[0]
    layer = megatron(model, s, True) - megatron(without, s, True) - 6 * s * (2 * h * h + 3 * h + h * model.vocab_size)
    assert extra == pytest.approx(layer + 6 * s * (2 * h * h + h * model.vocab_size) + 6 * s * (h * 256 - 1536 - 512), rel=1e-9)

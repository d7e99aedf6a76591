"""Memory against hand arithmetic: published layouts, Korthikanti et al.'s activation formulas, and what people measured.

Bytes per parameter are Megatron's: 2 for a BF16 weight, 4 for its FP32 gradient, 12 for the FP32 weight and two Adam moments. The
distributed optimizer (zero1) spreads the 12 over dp·cp for dense weights and over edp for experts: 6 + 12/n in all, 18 without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.details import Detail, detail
from paraplan.cost_models.layers import LayerModel
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.operators import logits_bytes
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.search_spaces.inputs import build_problem, load_model, load_stack
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem, Split
from paraplan.search_spaces.model import ModelSpec
from paraplan.search_spaces.stack import Stack

LLAMA2_7B = ModelSpec.model_validate(
    {
        "name": "llama-2-7b",
        "hidden_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "kinds": {
            "dense": {
                "mixer": {"kind": "attention", "heads": 32, "kv_heads": 32, "head_dim": 128},
                "mlp": {"kind": "mlp", "width": 11008},
            }
        },
        "layers": ["32*dense"],
    }
)


def gpt(h: int, heads: int, layers: int, vocab_size: int = 51200) -> ModelSpec:
    """GPT as Korthikanti et al. take it: multi-head attention, plain MLP of width 4h, biases, layer norms, tied embeddings."""
    mixer = {"kind": "attention", "heads": heads, "kv_heads": heads, "head_dim": h // heads, "qkv_bias": True, "out_bias": True}
    kinds = {"dense": {"mixer": mixer, "mlp": {"kind": "mlp", "width": 4 * h, "gated": False, "bias": True}}}
    return ModelSpec.model_validate(
        {
            "name": "gpt",
            "hidden_size": h,
            "vocab_size": vocab_size,
            "max_position_embeddings": 2048,
            "kinds": kinds,
            "layers": [f"{layers}*dense"],
            "tied_embeddings": True,
            "learned_positions": True,
            "norm": "layer",
        }
    )


def priced(
    model: str | ModelSpec, cluster: str, global_batch: int, seq_len: int, even: bool = True, stack: Any = None, **words: Any
) -> Detail:
    """Figures of one layout; `even` cuts the layers evenly, with any MTP layer last."""
    degrees = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "vpp": 1, "micro_batch": 1, **words}
    width = degrees["tp"] * degrees["cp"] * degrees["dp"]
    problem = build_problem(model, cluster, width * degrees["pp"], global_batch, seq_len, stack)
    edp = width // (degrees["ep"] * degrees["etp"])
    layout = Layout(**(degrees | {"edp": edp, "num_microbatches": global_batch // (degrees["dp"] * degrees["micro_batch"])}))
    cost = CostModel(problem)
    if not even:
        return detail(cost, with_default_stages(cost, layout))
    chunks, layers = degrees["pp"] * degrees["vpp"], problem.model.num_layers
    cuts = (*(layers * c // chunks for c in range(chunks)), len(cost.blocks))
    stages = Split(layout.pp, layout.vpp, cuts).stages(layers, layout.recompute)
    return detail(cost, layout.model_copy(update={"stages": stages}))


def static(found: Detail, stage: int | None = None) -> float:
    """Bytes of weights, gradients and optimizer states of a stage, or of the mean stage."""
    every = [terms["weights"] + terms["gradients"] + terms["optimizer"] for terms in found.stage_bytes]
    return every[stage] if stage is not None else sum(every) / len(every)


def layer_model(problem: Problem) -> LayerModel:
    return CostModel(problem).layers


# ---- weights, gradients, optimizer states --------------------------------------------------------------------------


@pytest.mark.parametrize(("sharding", "per_parameter"), [("none", 18.0), ("zero1", 7.5)])
def test_llama_70b_on_tp8_pp2(sharding: str, per_parameter: float) -> None:
    """4.41 B parameters on a device: 73.9 GiB of an 80 GB card without a distributed optimizer, 30.8 GiB with one over 8."""
    found = priced("llama-3.1-70b", "hgx-h100", 128, 4096, tp=8, pp=2, dp=8, optimizer_sharding=sharding)
    padding = 2 * 8192 * (129024 - 128256)  # both vocabulary matrices grow to a multiple of 128·8 rows
    norms = (80 * 2 + 1) * 8192 * 7  # whole on each of the 8 TP ranks
    assert static(found) == pytest.approx((70.554e9 + padding + norms) / 16 * per_parameter, rel=1e-5)
    assert static(found) / GIB == pytest.approx({18.0: 73.9, 7.5: 30.8}[per_parameter], rel=0.002)


def test_qwen3_235b_experts_are_one_26_gib_block() -> None:
    """94·128·3·4096·1536 routed weights over EP 8 and PP 2 take 26.44 GiB in BF16; EP 16 halves them."""
    words: dict[str, Any] = {"tp": 4, "pp": 2, "dp": 4, "optimizer_sharding": "none"}
    eight, four = (priced("qwen3-235b-a22b", "atlas-800t-a2", 16, 1024, ep=ep, **words) for ep in (8, 4))
    experts = 94 * 128 * 3 * 4096 * 1536
    assert experts / 8 / 2 * 2 / GIB == pytest.approx(26.44, abs=0.005)
    gained = four.stage_bytes[0]["weights"] - eight.stage_bytes[0]["weights"]
    assert gained == pytest.approx(experts / 8 / 2 * 2, rel=1e-9)  # EP 4 holds twice as many


def test_llama2_7b_fits_only_where_its_states_are_spread() -> None:
    """6.74 B parameters: 121 GB as they are, 50.6 GB over 8 data-parallel ranks, 30.3 GB on TP 2 over 4."""
    alone = priced(LLAMA2_7B, "hgx-a100", 8, 64, optimizer_sharding="none", tp=1)
    eight = priced(LLAMA2_7B, "hgx-a100", 8, 64, dp=8)
    halved = priced(LLAMA2_7B, "hgx-a100", 8, 64, tp=2, dp=4)
    assert static(alone) == pytest.approx(6.738e9 * 18, rel=1e-3)
    assert static(eight) == pytest.approx(6.738e9 * 7.5, rel=1e-3)
    assert static(halved) == pytest.approx(3.369e9 * 9, rel=3e-3)  # a quarter of a per cent more: norms and padding
    two, four = (priced(LLAMA2_7B, "hgx-a100", 8, 64, tp=2, dp=dp) for dp in (1, 2))
    assert static(two) == pytest.approx(3.369e9 * 18, rel=3e-3)
    assert static(four) == pytest.approx(3.369e9 * 12, rel=3e-3)


@pytest.mark.parametrize(("dp", "edp"), [(8, 1), (32, 4)])
def test_qwen3_30b_spreads_dense_states_over_dp_and_experts_over_edp(dp: int, edp: int) -> None:
    """28.99 B expert weights over EP 8, the rest whole: 71.4 GiB on one server, and 41 GiB on four."""
    found = priced("qwen3-30b-a3b", "hgx-h100", 32, 1024, dp=dp, ep=8)
    experts = 48 * 128 * 3 * 2048 * 768
    dense = load_model("qwen3-30b-a3b").parameters() - experts
    assert static(found) == pytest.approx(experts / 8 * (6 + 12 / edp) + dense * (6 + 12 / dp), rel=2e-4)
    assert static(found) / GIB == pytest.approx({8: 71.4, 32: 39.6}[dp], rel=0.01)


def test_deepseek_v3_states_by_hand() -> None:
    """TP 1, PP 16, EP 64 on 2048 devices: experts over 64, dense weights whole; the last stage copies the embedding."""
    model = load_model("deepseek-v3")
    found = priced(model, "hgx-h800", 2048, 4096, even=False, pp=16, dp=128, ep=64)
    experts = 59 * 256 * 3 * 7168 * 2048  # 58 layers and the MTP layer
    dense = model.parameters(mtp=True) - experts
    embedding = 129280 * 7168  # MTP looks tokens up on the last stage
    weights = sum(terms["weights"] for terms in found.stage_bytes)
    assert weights == pytest.approx(2 * (experts / 64 + dense + embedding), rel=1e-6)
    states = sum(terms["optimizer"] for terms in found.stage_bytes)
    assert states == pytest.approx(12 * (experts / 64 / 2 + (dense + embedding) / 128), rel=1e-6)


@pytest.mark.parametrize(
    ("sharding", "terms"),
    [
        ("none", (2.0, 4.0, 10.0)),
        ("zero1", (2.0, 4.0, 10 / 16)),
        ("zero2", (2.0, 4 / 16, 10 / 16)),
        ("zero3", (2 / 16, 4 / 16, 10 / 16)),
        ("hsdp:8", (2 / 8, 4 / 8, 10 / 8)),
    ],
)
def test_each_zero_stage_shards_one_more_term(sharding: str, terms: tuple[float, float, float]) -> None:
    """arXiv 1910.02054 figure 1: first the optimizer states, then the gradients, then the weights."""
    found = priced("llama-3.1-8b", "hgx-h100", 16, 4096, stack="torchtitan", dp=16, optimizer_sharding=sharding)
    parameters = load_model("llama-3.1-8b").parameters()
    for name, size in zip(("weights", "gradients", "optimizer"), terms, strict=True):
        assert found.stage_bytes[0][name] == pytest.approx(parameters * size, rel=1e-9), name


def test_fsdp_gathers_two_units_and_a_gradient() -> None:
    """Beside its shards a device holds the layer at work, the next one and a whole gradient; here the head is the largest unit."""
    words: dict[str, Any] = {"dp": 16, "stack": "torchtitan"}
    kept, gathered = (priced("llama-3.1-8b", "hgx-h100", 16, 4096, optimizer_sharding=s, **words) for s in ("zero1", "zero3"))
    head = 128256 * 4096 + 4096
    assert gathered.stage_bytes[0]["transient"] - kept.stage_bytes[0]["transient"] == pytest.approx(3 * 2 * head, rel=1e-9)


def test_offloaded_states_leave_the_device() -> None:
    words: dict[str, Any] = {"tp": 8, "pp": 2, "dp": 2}
    kept, half, none = (
        priced("llama-3.1-70b", "hgx-h100", 32, 4096, offload=o, **words) for o in ("none", "optimizer:0.5", "optimizer:1")
    )
    assert half.stage_bytes[0]["optimizer"] == pytest.approx(kept.stage_bytes[0]["optimizer"] / 2)
    assert none.stage_bytes[0]["optimizer"] == 0
    assert none.stage_bytes[0]["gradients"] == kept.stage_bytes[0]["gradients"]


def test_tied_embeddings_lie_on_the_first_and_the_last_stage() -> None:
    model = gpt(2048, 16, 24)
    two = priced(model, "hgx-h100", 32, 2048, pp=2, dp=1, optimizer_sharding="none")
    one = priced(model, "hgx-h100", 32, 2048, pp=1, dp=1, optimizer_sharding="none")
    total = sum(terms["weights"] for terms in two.stage_bytes)
    assert total - one.stage_bytes[0]["weights"] == pytest.approx(2 * 51200 * 2048, rel=1e-9)  # learned positions stay behind


@pytest.mark.parametrize(
    ("vocab", "divisor", "tp", "padded"),
    [(32002, 128, 2, 32256), (151669, 128, 4, 152064), (151669, 1, 4, 151672), (50257, 1, 2, 50258), (50257, 1, 1, 50257)],
)
def test_vocabulary_is_padded_to_the_divisor_times_tp(vocab: int, divisor: int, tp: int, padded: int) -> None:
    stack = load_stack("megatron-lm").model_copy(update={"vocab_divisor": divisor})
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, stack, vocab_size=vocab)
    assert float(layer_model(problem).vocab_size(np.array(tp))) == padded


def test_tensor_parallelism_halves_weights_but_for_norms() -> None:
    """Norms stay whole on each rank; padding of the vocabulary is left out of the comparison by a size that needs none."""
    model = load_model("llama-3.1-8b").with_vocab(131072)
    for tp in (1, 2, 4):
        narrow, wide = (priced(model, "hgx-h100", 8, 4096, tp=t, optimizer_sharding="none") for t in (tp, 2 * tp))
        norms = 2 * (32 * 2 + 1) * 4096
        halved = (narrow.stage_bytes[0]["weights"] - norms) / 2 + norms
        assert wide.stage_bytes[0]["weights"] == pytest.approx(halved, rel=1e-12)


# ---- activations ---------------------------------------------------------------------------------------------------

KORTHIKANTI = {"22B": (6144, 64, 48), "175B": (12288, 96, 96), "530B": (20480, 128, 105), "1T": (25600, 160, 128)}


def one_layer(h: int, heads: int, tp: int, sp: bool, recompute: str, kernel: str = "flash", s: int = 2048, b: int = 1) -> float:
    """Bytes that one layer of GPT keeps for backward on a rank, without dropout."""
    stack = load_stack("megatron-lm").model_copy(update={"attention_kernel": kernel})
    return kept_by(stack, h, heads, tp, sp, recompute, s, b)


def kept_by(stack: Stack, h: int, heads: int, tp: int, sp: bool, recompute: str, s: int = 2048, b: int = 1) -> float:
    """The same of a stack."""
    problem = build_problem(gpt(h, heads, 8), "hgx-a100", tp, b, s, stack)
    layout = Layout(tp=tp, edp=tp, micro_batch=b, sequence_parallel=sp, recompute=recompute)
    return float(layer_model(problem).pieces(LayoutTable.from_layouts([layout])).pieces["dense"].recomputed_bytes[0])


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_the_stack_of_korthikanti_keeps_all_that_they_count(name: str) -> None:
    """arXiv 2205.05198 table 2 with dropout: 34·sbh and 5·as²b, divided by t under TP and SP, but for 10·sbh without SP."""
    (h, heads, _), s, b, t = KORTHIKANTI[name], 2048, 1, 8
    stack, sbh, scores = load_stack("megatron-lm-2022"), s * b * h, 5 * heads * s**2 * b
    assert kept_by(stack, h, heads, 1, False, "none") == pytest.approx(34 * sbh + scores, rel=1e-12)
    assert kept_by(stack, h, heads, t, False, "none") == pytest.approx((10 + 24 / t) * sbh + scores / t, rel=1e-12)
    assert kept_by(stack, h, heads, t, True, "none") == pytest.approx((34 * sbh + scores) / t, rel=1e-12)
    assert kept_by(stack, h, heads, t, True, "selective:core_attn") == pytest.approx(34 * sbh / t, rel=1e-12)
    assert kept_by(stack, h, heads, t, True, "full") == pytest.approx(2 * sbh / t, rel=1e-12)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_a_layer_keeps_what_korthikanti_counts(name: str) -> None:
    """arXiv 2205.05198 table 2 without dropout, whose masks are 2·sbh of its 34 (1 in the 11 of attention, 1 in the 19 of the MLP).

    TP alone leaves 10 − 2 whole (layer-norm inputs, inputs of the two column-parallel GEMMs); SP divides these too; full recompute
    keeps the layer's input. Flash attention keeps no scores but one FP32 log-sum-exp per row and head.
    """
    (h, heads, _), s, b, t = KORTHIKANTI[name], 2048, 1, 8
    sbh, rows = s * b * h, 4 * s * b * heads / t
    assert one_layer(h, heads, t, True, "none") == pytest.approx((34 - 2) * sbh / t + rows, rel=1e-12)
    assert one_layer(h, heads, t, False, "none") == pytest.approx((10 - 2 + 24 / t) * sbh + rows, rel=1e-12)
    assert one_layer(h, heads, t, True, "selective:core_attn") == pytest.approx(32 * sbh / t, rel=1e-12)
    assert one_layer(h, heads, t, True, "full") == pytest.approx(2 * sbh / t, rel=1e-12)
    assert one_layer(h, heads, t, False, "full") == pytest.approx(2 * sbh, rel=1e-12)


def test_unfused_attention_keeps_scores_and_probabilities() -> None:
    """Table 2 counts 5·as²b: softmax output 2, dropout's mask 1 and output 2. Without dropout two tensors stay here, 4·as²b;
    core-attention recompute drops them and leaves what flash leaves without its log-sum-exp."""
    h, heads, s, b, t = 12288, 96, 2048, 1, 8
    kept = one_layer(h, heads, t, True, "none", "unfused") - 32 * s * b * h / t
    assert kept == pytest.approx(4 * heads * s**2 * b / t, rel=1e-12)
    assert one_layer(h, heads, t, True, "selective:core_attn", "unfused") == pytest.approx(32 * s * b * h / t, rel=1e-12)


def test_attention_memory_is_linear_with_flash_and_quadratic_without() -> None:
    flash, unfused = ([one_layer(5120, 40, 4, True, "none", kernel, s) for s in (8192, 16384)] for kernel in ("flash", "unfused"))
    assert flash[1] / flash[0] == pytest.approx(2, rel=1e-12)
    assert 3.3 < unfused[1] / unfused[0] < 4


@pytest.mark.parametrize("recompute", ["none", "selective:layernorm", "selective:mlp", "selective:layernorm+mlp"])
def test_modules_free_their_own_tensors(recompute: str) -> None:
    """layernorm: the two norms' outputs, 4·sbh; mlp: both GEMMs' wide tensors, 16·sbh (its input stays, as the checkpoint)."""
    h, heads, s, t = 12288, 96, 2048, 8
    freed = 4 * ("layernorm" in recompute) + 16 * ("mlp" in recompute)
    assert one_layer(h, heads, t, True, recompute) == pytest.approx((32 - freed) * s * h / t + 4 * s * heads / t, rel=1e-12)


def test_gqa_and_gated_mlp_by_hand() -> None:
    """Llama-3.1-8B, TP 4 with SP, per token: 4 hidden-sized tensors, q, k, v, attention's output, gate and up, their product."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 4, 8, 8192)
    table = LayoutTable.from_layouts([Layout(tp=4, edp=4, num_microbatches=8)])
    kept = layer_model(problem).pieces(table).pieces["dense"].saved_bytes[0]
    per_token = 2 * (4 * 4096 + (4096 + 2 * 1024) + 4096 + 2 * 14336 + 14336) / 4 + 4 * 32 / 4
    assert kept == pytest.approx(8192 * per_token, rel=1e-12)


def test_query_key_norms_keep_their_inputs() -> None:
    problem = build_problem("qwen3-8b", "hgx-h100", 4, 8, 4096)
    plain = problem.model.model_dump()
    plain["kinds"] = {name: {**kind, "mixer": {**kind["mixer"], "qk_norm": "none"}} for name, kind in plain["kinds"].items()}
    bare = build_problem(ModelSpec.model_validate(plain), "hgx-h100", 4, 8, 4096)
    table = LayoutTable.from_layouts([Layout(tp=4, edp=4, num_microbatches=8)])
    (name,) = set(problem.model.layer_kinds)
    more = [layer_model(p).pieces(table).pieces[name].saved_bytes[0] for p in (problem, bare)]
    assert more[0] - more[1] == pytest.approx(4096 * 2 * (32 + 8) * 128 / 4, rel=1e-9)


def moe_layer(**words: Any) -> float:
    degrees = {"tp": 1, "ep": 1, "etp": 1, "dp": 8, **words}
    problem = build_problem("qwen3-30b-a3b", "hgx-h100", degrees["tp"] * degrees["dp"], 64, 4096, expert_imbalance=1.0)
    edp = degrees["tp"] * degrees["dp"] // (degrees["ep"] * degrees["etp"])
    table = LayoutTable.from_layouts([Layout(**degrees, edp=edp, num_microbatches=8)])
    return float(layer_model(problem).pieces(table).pieces["moe"].saved_bytes[0])


def test_expert_parallelism_does_not_divide_activations() -> None:
    """A rank's experts work on as many token copies as its tokens make, top_k·s·b/TP, wherever the experts are; ETP cancels."""
    assert moe_layer(ep=8) == pytest.approx(moe_layer(ep=1), rel=1e-12)
    assert moe_layer(tp=2, ep=8) == pytest.approx(moe_layer(tp=1, ep=8) / 2, rel=1e-3)  # TP 2 with SP halves them
    routed = 8 * 4096 * 2 * (2048 + 3 * 768)  # inputs of the experts, gate and up, their product
    both = [moe_layer(tp=2, ep=4, etp=etp) for etp in (1, 2)]
    assert both[1] - both[0] == pytest.approx(8 * 4096 / 2 * 2 * 2048, rel=1e-9)  # only gathered inputs grow
    assert moe_layer(ep=8) > routed


def test_stages_hold_micro_batches_in_flight() -> None:
    """1F1B: stage s of p holds p − s. A 70 GB beside a 50 GB stage of PP 2 is that ratio over 29.8 GB of states."""
    found = priced(gpt(8192, 64, 80, 32000), "hgx-a100", 256, 4096, tp=8, pp=2, dp=16)
    first, last = (terms["activations"] for terms in found.stage_bytes)
    assert first / last == pytest.approx(2, rel=0.01)  # the final norm is the last stage's own
    llama = priced("llama-3.1-70b", "hgx-a100", 256, 4096, tp=8, pp=2, dp=16)
    assert static(llama) == pytest.approx(70.55e9 / 16 * 6.75, rel=0.003)
    four = priced(gpt(8192, 64, 80), "hgx-a100", 64, 4096, tp=8, pp=4, dp=1)
    held = [terms["activations"] for terms in four.stage_bytes]
    assert [value / held[2] * 2 for value in held[:3]] == pytest.approx([4, 3, 2], rel=1e-9)
    one = priced(gpt(8192, 64, 80), "hgx-a100", 2, 4096, tp=8, pp=4, dp=1)  # no more than there are
    assert one.stage_bytes[0]["activations"] == pytest.approx(held[2], rel=1e-9)


@pytest.mark.parametrize(("vpp", "factor"), [(5, 1.15), (10, 1.075)])
def test_interleaving_costs_activations(vpp: int, factor: float) -> None:
    """arXiv 2205.05198 section 4.2.3: 1 + (p−1)/(p·v) times as many on the first stage; more chunks cost less."""
    plain, chunked = (
        priced("llama-3.1-70b", "hgx-h100", 64, 4096, tp=4, pp=4, dp=2, vpp=v, schedule=schedule)
        for v, schedule in ((1, "1f1b"), (vpp, "interleaved"))
    )
    assert chunked.stage_bytes[0]["activations"] / plain.stage_bytes[0]["activations"] == pytest.approx(factor, rel=1e-9)


def test_uniform_recompute_keeps_a_checkpoint_every_k_layers() -> None:
    one, four = (priced("llama-3.1-8b", "hgx-h100", 16, 8192, tp=2, pp=4, dp=1, recompute=f"full:uniform:{k}") for k in (1, 4))
    assert one.stage_bytes[0]["activations"] == pytest.approx(4 * 8 * 2 * 8192 * 4096 / 2, rel=1e-12)
    assert four.stage_bytes[0]["activations"] == pytest.approx(one.stage_bytes[0]["activations"] / 4, rel=1e-12)
    stand_ins = 2 * 3 * 4096 * 14336 / 2  # at least: those for the gradients of the MLP's weights
    assert four.stage_bytes[0]["transient"] - stand_ins > 3 * (one.stage_bytes[0]["transient"] - stand_ins)  # four layers at once


def test_block_recompute_spares_the_first_layers_of_a_chunk() -> None:
    none, three, full = (
        priced("llama-3.1-8b", "hgx-h100", 16, 8192, tp=2, pp=4, dp=1, recompute=r).stage_bytes[1]["activations"]
        for r in ("none", "full:block:3", "full")
    )
    assert three == pytest.approx(full * 3 / 8 + none * 5 / 8, rel=1e-12)


# ---- what implementations keep -------------------------------------------------------------------------------------


def llama_layer(stack: str, tp: int) -> float:
    """Bytes that a layer of Llama-3.1-8B keeps per token and rank with SP on a stack."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", tp, 8, 8192, stack)
    table = LayoutTable.from_layouts([Layout(tp=tp, edp=tp, num_microbatches=8)])
    return float(layer_model(problem).pieces(table).pieces["dense"].saved_bytes[0]) / 8192


def test_eager_kernels_and_gathered_inputs_keep_more() -> None:
    """On TP 4: inputs of the two column-parallel GEMMs whole, act(gate), attention's output again; FP32 norms 8 B an element."""
    fused = llama_layer("megatron-lm", 4)
    eager = fused + 2 * 2 * 4096 * (1 - 1 / 4) + 2 * 14336 / 4 + 2 * 4096 / 4
    assert llama_layer("nanotron", 4) == pytest.approx(eager, rel=1e-12)
    assert llama_layer("aleph-alpha-flash2", 4) == pytest.approx(eager + 2 * 8 * 4096 / 4, rel=1e-12)
    assert llama_layer("aleph-alpha-flash2-rms", 4) == pytest.approx(eager + 2 * 2 * 4096 / 4, rel=1e-12)


def test_a_gathered_loss_and_a_whole_embedding_do_not_shrink_with_tp() -> None:
    """KempnerForge: 8 bytes for each of 4096 x 128256 logits, and 525 M weights of the embedding, on every TP rank."""
    words: dict[str, Any] = {"stack": "kempnerforge", "dp": 1, "optimizer_sharding": "none"}
    two, four = (priced("llama-3.1-8b", "hgx-h200", 8, 4096, tp=tp, **words).stage_bytes[0] for tp in (2, 4))
    assert two["transient"] == four["transient"] == pytest.approx(8 * 4096 * 128256)
    whole = 2 * (128256 * 4096 + (32 * 2 + 1) * 4096)
    assert two["weights"] - whole == pytest.approx(2 * (four["weights"] - whole), rel=1e-9)


def test_softmax_in_plain_pytorch_keeps_six_bytes_a_score() -> None:
    """FP32 probabilities and their BF16 cast, against Megatron's scores and probabilities: 2 bytes of 32 x 4096² scores a layer."""
    words: dict[str, Any] = {"dp": 8, "recompute": "none", "optimizer_sharding": "zero1"}
    torch, fused = (
        priced("llama-3.1-8b", "hgx-a100", 8, 4096, stack=f"aleph-alpha-{kernel}", **words).stage_bytes[0]["activations"]
        for kernel in ("torch", "fused")
    )
    assert torch - fused == pytest.approx(32 * 2 * 32 * 4096**2, rel=1e-9)


def test_a_pipeline_of_fsdp_keeps_whole_weights_and_gradients() -> None:
    """torchtitan's stages: 2 bytes gathered beside the shards, and FP32 gradients until the last of several micro-batches."""
    words: dict[str, Any] = {"stack": "torchtitan", "pp": 2, "dp": 4, "optimizer_sharding": "zero3"}
    one, two = (priced("llama-3.1-8b", "hgx-h100", 4 * m, 4096, **words).stage_bytes[0] for m in (1, 2))
    parameters = 16 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 128256 * 4096
    assert one["weights"] == two["weights"] == pytest.approx((2 / 4 + 2) * parameters)
    assert (one["gradients"], two["gradients"]) == (pytest.approx(parameters * 4 / 4), pytest.approx(parameters * 4))


def test_whole_gradients_wait_for_the_last_micro_batch() -> None:
    """KempnerForge's no_sync: 4 bytes of every gradient between micro-batches, 2 over the shards where there is one."""
    words: dict[str, Any] = {"stack": "kempnerforge", "dp": 8, "optimizer_sharding": "zero3"}
    one, two = (priced("llama-3.1-8b", "hgx-h200", 8 * m, 4096, **words).stage_bytes[0] for m in (1, 2))
    parameters = load_model("llama-3.1-8b").parameters()
    assert (one["gradients"], two["gradients"]) == (pytest.approx(parameters * 2 / 8), pytest.approx(parameters * 4))


def test_a_graph_without_accumulation_keeps_no_whole_gradient() -> None:
    """MindSpore under ZeRO-1: an eighth of the FP32 gradients after one micro-batch, all of them where several are accumulated."""
    words: dict[str, Any] = {"stack": "mindformers", "dp": 8, "optimizer_sharding": "zero1"}
    one, two = (priced("llama-3.1-8b", "atlas-800t-a2", 8 * m, 4096, **words).stage_bytes[0] for m in (1, 2))
    parameters = load_model("llama-3.1-8b").parameters()
    assert (one["gradients"], two["gradients"]) == (pytest.approx(parameters * 4 / 8), pytest.approx(parameters * 4))


def test_a_root_unit_stays_gathered() -> None:
    """torchtitan of 2024: embedding and head, 2 x 525 M weights, beside 14 bytes for each logit."""
    found = priced("llama-3.1-8b", "hgx-h100", 16, 8192, stack="torchtitan-2024", dp=8, optimizer_sharding="zero3", micro_batch=2)
    root = 2 * (2 * 128256 * 4096 + 4096)
    assert found.stage_bytes[0]["transient"] == pytest.approx(14 * 2 * 8192 * 128256 + root, rel=1e-9)


def test_fused_gradient_accumulation_has_a_stand_in_for_each_shape() -> None:
    """Llama-3.1-405B's shapes on TP 8 in BF16: attention's four, the MLP's three, norms, and the head on the last stage."""
    words: dict[str, Any] = {"tp": 8, "pp": 2, "dp": 1}
    without = load_stack("megatron-simumax")
    without = without.model_copy(update={"footprint": without.footprint.model_copy(update={"gradient_buffers": False})})
    first, last = (
        (a["transient"] - b["transient"])
        for a, b in zip(
            priced("llama-3.1-405b", "hgx-b200", 8, 4096, stack="megatron-simumax", **words).stage_bytes,
            priced("llama-3.1-405b", "hgx-b200", 8, 4096, stack=without, **words).stage_bytes,
            strict=True,
        )
    )
    h, kv, width = 16384, 8 * 128, 53248
    layer = 2 * ((2 * h * h + 2 * h * kv + 3 * h * width) / 8 + 2 * h)
    head = 2 * (h * 129024 / 8 + h * 129024 / 128256)
    assert (first, last) == (pytest.approx(layer, rel=1e-6), pytest.approx(layer + head, rel=1e-6))


# ---- transients and what people measured ---------------------------------------------------------------------------


def test_logits_of_a_big_vocabulary() -> None:
    """[4096, 1, 248320] in FP32 is 3.79 GiB; beside it lie the BF16 logits and the FP32 gradient. TP 2 halves all of it."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, vocab_size=248320)
    layers = layer_model(problem)
    both = Layout(dp=8, edp=8), Layout(tp=2, dp=4, edp=8)
    peaks = [logits_bytes(layers.factors(LayoutTable.from_layouts([layout])), np.full(1, 248320.0), 1)[0] for layout in both]
    fp32 = 4096 * 248320 * 4
    assert fp32 / GIB == pytest.approx(3.79, abs=0.005)
    assert peaks[0] == pytest.approx(fp32 * 2.5) == pytest.approx(2 * peaks[1])


def test_every_further_head_keeps_its_softmax() -> None:
    """MTP's loss waits for backward beside the main one: 4 bytes per logit more."""
    model = load_model("mimo-7b-base")
    assert model.mtp is not None and model.mtp.layers == 1
    table = LayoutTable.from_layouts([Layout(tp=2, dp=4, edp=8)])
    with_mtp, without = (
        layer_model(build_problem(m, "hgx-h100", 8, 8, 4096)).pieces(table).logits_bytes[0]
        for m in (model, model.model_copy(update={"mtp": None}))
    )
    assert with_mtp / without == pytest.approx(14 / 10)


@pytest.mark.parametrize(
    ("words", "global_batch", "measured_gb", "within"),
    [({"dp": 4, "pp": 2, "micro_batch": 2}, 2048, 49.8, 0.05), ({"tp": 8, "micro_batch": 4}, 128, 28.8, 0.16)],
)
def test_llama2_7b_on_h800(words: dict[str, Any], global_batch: int, measured_gb: float, within: float) -> None:
    """Megatron-LM #482: allocations of two layouts at 4096 tokens, taken as those of the last rank, without communicators.

    Which kernels were fused is not said; unfused SwiGLU and rotary embedding alone would add a tenth on TP 8.
    """
    found = priced(LLAMA2_7B, "hgx-h800", global_batch, 4096, optimizer_sharding="zero1", **words)
    last = sum(found.stage_bytes[-1].values()) - found.stage_bytes[-1]["communicators"]
    assert last / 1e9 == pytest.approx(measured_gb, rel=within)


def test_memory_is_linear_in_tokens() -> None:
    """torchtitan #1789: 16, 24 and 32 thousand tokens on a device lie on one line; twice the sequence is twice the batch."""
    peaks = [
        sum(priced("llama-3.1-8b", "hgx-h100", 64, s, tp=8, dp=1, recompute="full", micro_batch=b).stage_bytes[0].values())
        for s, b in ((4096, 4), (6144, 4), (4096, 8), (8192, 4))
    ]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=1e-9)
    assert peaks[3] == pytest.approx(peaks[2], rel=1e-9)


def test_what_experts_activations_read_may_be_kept_narrower() -> None:
    """DeepSeek-V3's report keeps the inputs of SwiGLU in FP8: a byte less of gate and up for every routed token of a layer."""
    stack = load_stack("megatron-bridge")
    narrow = stack.model_copy(update={"footprint": stack.footprint.model_copy(update={"expert_inner_bytes": 1.0})})
    held = []
    for each in (stack, narrow):
        problem = build_problem("qwen3-30b-a3b", "hgx-h100", 8, 8, 4096, each, expert_imbalance=1.0)
        model = CostModel(problem)
        layout = with_default_stages(model, Layout(dp=8, ep=8, edp=1, num_microbatches=1))
        held.append(detail(model, layout).stage_bytes[0]["activations"])
    assert held[0] - held[1] == pytest.approx(48 * 4096 * 8 * 2 * 768)

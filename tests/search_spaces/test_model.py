"""An architecture is kinds of layers and one list of weights; everything about size is read off that list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.search_spaces.layer_pattern import MAX_LAYERS, compact, expand
from paraplan.search_spaces.model import (
    Attention,
    CompressedAttention,
    DenseMlp,
    LatentAttention,
    LayerKind,
    LinearAttention,
    Mamba2,
    Mixer,
    ModelSpec,
    MoeMlp,
    Mtp,
    Sharding,
    Tensor,
)
from pydantic import ValidationError

H = 64
ATTENTION = Attention(heads=8, kv_heads=2, head_dim=16)
DENSE = LayerKind(mixer=ATTENTION, mlp=DenseMlp(width=256))
MOE = LayerKind(mixer=ATTENTION, mlp=MoeMlp(experts=8, top_k=2, width=32))


def model(**changes: Any) -> ModelSpec:
    """One dense layer, then three MoE layers."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "hidden_size": H,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "kinds": {"dense": DENSE, "moe": MOE},
        "layers": ("dense", "3*moe"),
    }
    return ModelSpec(**fields | changes)


def sizes(kind: LayerKind, **changes: Any) -> dict[str, int]:
    """The weights of a layer of this kind, by name."""
    spec = model(kinds={"it": kind}, layers=("it",), **changes)
    return {tensor.name: tensor.numel for tensor in spec.layer_tensors("it")}


def mixer_sizes(mixer: Mixer) -> dict[str, int]:
    return sizes(LayerKind(mixer=mixer, norms=0))


# The order of layers

NAMES = st.sampled_from(["dense", "moe", "full-attention", "linear", "m2.x", "_k"])


@pytest.mark.parametrize(
    ("items", "kinds"),
    [
        (("dense",), ("dense",)),
        (("2*dense", "moe"), ("dense", "dense", "moe")),
        (("2*(linear full)", "moe"), ("linear", "full", "linear", "full", "moe")),
        (("2*(2*linear full)",), ("linear", "linear", "full", "linear", "linear", "full")),
        ((" 1*( a   b ) ",), ("a", "b")),
    ],
)
def test_an_item_is_a_kind_a_repeated_kind_or_a_repeated_sequence(items: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    assert expand(items) == kinds


@given(st.lists(NAMES, min_size=1, max_size=60))
def test_compacting_a_sequence_loses_nothing(kinds: list[str]) -> None:
    assert expand(compact(kinds)) == tuple(kinds)


@given(st.lists(NAMES, min_size=1, max_size=8), st.integers(2, 12))
def test_repeating_a_sequence_needs_no_more_items(period: list[str], times: int) -> None:
    assert len(compact(period * times)) <= len(period)


@given(st.integers(1, 200), st.lists(NAMES, min_size=1, max_size=5))
def test_a_repeat_means_that_many_copies(times: int, period: list[str]) -> None:
    assert expand([f"{times}*({' '.join(period)})"]) == tuple(period) * times


@given(st.text(alphabet="ab2*() .-", max_size=12))
def test_any_text_is_either_in_the_notation_or_refused_with_the_item_named(item: str) -> None:
    try:
        kinds = expand([item])
    except ValueError as error:
        assert repr(item.strip()) in str(error)
    else:
        assert kinds and all(kind in item for kind in kinds)


@pytest.mark.parametrize(
    "item", ["", "0*dense", "dense*3", "2*", "2*()", "-1*dense", "2*(dense", "a b", "2*(a 2*(b))", "1.5*dense"]
)
def test_a_malformed_item_is_refused(item: str) -> None:
    with pytest.raises(ValidationError, match="layers item"):
        model(layers=(item,))


@pytest.mark.parametrize("item", ["999999*dense", f"{MAX_LAYERS}*(dense dense)", "9999*(9999*dense)"])
def test_a_model_of_absurd_depth_is_refused_before_it_is_built(item: str) -> None:
    with pytest.raises(ValidationError, match="longer than"):
        model(layers=(item,))


def test_layer_kinds_lists_the_decoder_layers_in_order_without_mtp() -> None:
    spec = model(mtp=Mtp(layers=2, kind="moe"))
    assert spec.layer_kinds == ("dense", "moe", "moe", "moe")
    assert spec.num_layers == 4


# What a record refuses


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": ("dense", "mamba")}, "'mamba', which is not defined; use one of dense, moe"),
        ({"layers": ()}, "at least 1 item"),
        ({"kinds": {"2x": DENSE}, "layers": ("2x",)}, "kind name '2x'"),
        ({"mtp": Mtp(layers=1, kind="dence")}, "mtp.kind is 'dence'"),
        ({"hidden_size": 0}, "greater than 0"),
        ({"hidden_size": True}, "valid integer"),
        ({"hidden_size": "64"}, "valid integer"),
        ({"vocab_size": 10**12}, "less than or equal"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_a_wrong_model_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        model(**changes)


@pytest.mark.parametrize(
    ("record", "fields", "words"),
    [
        (Attention, {"heads": 8, "kv_heads": 3, "head_dim": 16}, "heads 8 is not a multiple of kv_heads 3"),
        (Attention, {"heads": 8, "kv_heads": 8, "head_dim": 16, "chunked": True}, "window"),
        (MoeMlp, {"experts": 4, "top_k": 5, "width": 8}, "top_k 5 exceeds experts 4"),
        (MoeMlp, {"experts": 8, "top_k": 2, "width": 8, "routing_groups": 3}, "multiple of routing_groups"),
        (MoeMlp, {"experts": 8, "top_k": 2, "width": 8, "routing_groups_topk": 2}, "exceeds routing_groups"),
        (MoeMlp, {"experts": 8, "top_k": 2, "width": 8, "shared_width": -1}, "greater than or equal to 0"),
        (LayerKind, {}, "neither mixer nor mlp"),
    ],
)
def test_a_wrong_kind_is_refused(record: type, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        record(**fields)


# Weights of one layer


def test_grouped_query_attention_holds_four_projections() -> None:
    assert mixer_sizes(ATTENTION) == {
        "attention.q_proj": H * 128,
        "attention.k_proj": H * 32,
        "attention.v_proj": H * 32,
        "attention.o_proj": 128 * H,
    }


def test_what_attention_may_hold_besides() -> None:
    gated = ATTENTION.model_copy(update={"output_gate": True, "qkv_bias": True, "out_bias": True, "sinks": True, "qk_norm": "head"})
    extra = mixer_sizes(gated)
    assert extra["attention.q_proj"] == 2 * H * 128
    assert (extra["attention.q_bias"], extra["attention.k_bias"], extra["attention.o_bias"]) == (256, 32, H)
    assert (extra["attention.q_norm"], extra["attention.k_norm"], extra["attention.sinks"]) == (16, 16, 8)
    wide = mixer_sizes(ATTENTION.model_copy(update={"qk_norm": "width"}))
    assert (wide["attention.q_norm"], wide["attention.k_norm"]) == (128, 32)


def test_a_window_costs_no_weights() -> None:
    assert mixer_sizes(ATTENTION.model_copy(update={"window": 16})) == mixer_sizes(ATTENTION)


MLA = LatentAttention(heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)


def test_latent_attention_goes_down_and_up() -> None:
    assert mixer_sizes(MLA) == {
        "attention.q_down_proj": H * 24,
        "attention.q_norm": 24,
        "attention.q_up_proj": 24 * 4 * 12,
        "attention.kv_down_proj": H * (16 + 4),
        "attention.kv_norm": 16,
        "attention.kv_up_proj": 16 * 4 * (8 + 8),
        "attention.o_proj": 4 * 8 * H,
    }
    assert mixer_sizes(MLA.model_copy(update={"q_lora_rank": None}))["attention.q_proj"] == H * 4 * 12


def test_the_sparse_indexer_holds_queries_one_key_and_head_weights() -> None:
    with_indexer = mixer_sizes(MLA.model_copy(update={"indexer_heads": 2, "indexer_head_dim": 8, "indexer_topk": 64}))
    assert sum(with_indexer.values()) - sum(mixer_sizes(MLA).values()) == 24 * 2 * 8 + H * 8 + 2 * 8 + H * 2


def test_latent_attention_keeps_what_all_heads_read_whole_on_every_tp_rank() -> None:
    spec = model(kinds={"it": LayerKind(mixer=MLA)}, layers=("it",))
    whole = {tensor.name for tensor in spec.layer_tensors("it") if tensor.sharding == "replicated"}
    assert whole == {"attention.q_down_proj", "attention.q_norm", "attention.kv_down_proj", "attention.kv_norm", "norm"}


def test_compressed_attention_adds_a_compressor_and_its_indexer() -> None:
    window = CompressedAttention(
        heads=4, head_dim=16, rope_head_dim=4, q_lora_rank=24, o_lora_rank=8, o_groups=2, window=8, compress_ratio=0
    )
    assert sum(mixer_sizes(window).values()) == (H * 24 + 24 + 24 * 64) + (H * 16 + 16) + (2 * 8 * 32 + 2 * 8 * H) + 4
    long = window.model_copy(update={"compress_ratio": 128})
    assert mixer_sizes(long)["attention.compressor"] == 2 * H * 16 + 128 * 16 + 16
    short = window.model_copy(
        update={"compress_ratio": 4, "overlapping": True, "indexer_heads": 2, "indexer_head_dim": 8, "indexer_topk": 4}
    )
    assert mixer_sizes(short)["attention.compressor"] == 2 * H * 32 + 4 * 32 + 16
    assert mixer_sizes(short)["attention.indexer.compressor"] == 2 * H * 16 + 4 * 16 + 8


def test_linear_attention_and_state_space_mixers() -> None:
    net = LinearAttention(kind="gated_delta_net", key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=8, conv_kernel=4)
    assert sum(mixer_sizes(net).values()) == H * (16 * 2 + 32 * 2 + 4 * 2) + 4 * (16 * 2 + 32) + 2 * 4 + 8 + 32 * H
    lightning = LinearAttention(kind="lightning", key_heads=4, value_heads=4, key_head_dim=8, value_head_dim=8)
    assert sum(mixer_sizes(lightning).values()) == 4 * H * 32 + 32 + 32 * H
    mamba = Mamba2(heads=4, head_dim=16, state_size=8, groups=2, conv_kernel=4)
    assert sum(mixer_sizes(mamba).values()) == H * (128 + 32 + 4) + (64 + 32) * (4 + 1) + 3 * 4 + 64 + 64 * H


def test_a_gated_block_has_three_matrices_and_a_plain_one_two() -> None:
    assert sum(sizes(LayerKind(mlp=DenseMlp(width=256), norms=0)).values()) == 3 * H * 256
    assert sum(sizes(LayerKind(mlp=DenseMlp(width=256, gated=False, bias=True), norms=0)).values()) == 2 * H * 256 + 256 + H


def test_a_mixture_of_experts_holds_all_experts_and_uses_top_k() -> None:
    mlp = MoeMlp(experts=8, top_k=2, width=32, shared_width=48, shared_gate=True, router_expert_bias=True, latent_size=16)
    spec = model(kinds={"it": LayerKind(mlp=mlp, norms=0)}, layers=("it",))
    by_name = {tensor.name: tensor for tensor in spec.layer_tensors("it")}
    assert by_name["moe.experts.fc1"].numel == 8 * 16 * 64  # in the latent width
    assert by_name["moe.experts.fc1"].active_numel == 2 * 16 * 64
    assert by_name["moe.experts.fc1"].sharding == "expert"
    others = {name: tensor.numel for name, tensor in by_name.items() if not name.startswith("moe.experts")}
    assert others == {
        "moe.router": 8 * H,
        "moe.router.expert_bias": 8,
        "moe.latent_down": H * 16,
        "moe.latent_up": 16 * H,
        "moe.shared.fc1": H * 96,
        "moe.shared.fc2": 48 * H,
        "moe.shared.gate": H,
    }
    assert all(tensor.active_numel == tensor.numel for name, tensor in by_name.items() if not name.startswith("moe.experts"))


def test_norms_extras_and_hyper_connections() -> None:
    assert sizes(DENSE)["norm"] == 2 * H
    assert sizes(DENSE, norm="layer")["norm"] == 4 * H
    assert sizes(LayerKind(mlp=DenseMlp(width=8), extra_parameters=5))["extra"] == 5
    # Two blocks; 4 streams give 4 · (2 + 4) = 24 outputs.
    assert sizes(DENSE, residual_streams=4)["hyper_connection"] == 2 * (24 * 4 * H + 24 + 3)


# Weights of the whole model

ATTENTION_NUMEL = 2 * H * 128 + 2 * H * 32
DENSE_NUMEL = ATTENTION_NUMEL + 3 * H * 256 + 2 * H
MOE_NUMEL = ATTENTION_NUMEL + 8 * 3 * H * 32 + 8 * H + 2 * H
WORD = 1000 * H


def test_every_weight_is_counted_once() -> None:
    assert model().parameters() == 2 * WORD + DENSE_NUMEL + 3 * MOE_NUMEL + H


def test_a_tied_head_is_the_embedding() -> None:
    tied = model(tied_embeddings=True)
    assert model().parameters() - tied.parameters() == WORD
    assert [tensor.name for tensor in tied.head_tensors()] == ["final_norm"]
    assert [tensor.name for tensor in model().head_tensors()] == ["final_norm", "lm_head"]


def test_learned_positions_are_an_embedding_too() -> None:
    assert [tensor.numel for tensor in model(learned_positions=True).embedding_tensors()] == [WORD, 128 * H]


def test_active_parameters_leave_out_the_experts_a_token_misses() -> None:
    active = 2 * WORD + DENSE_NUMEL + 3 * (MOE_NUMEL - 6 * 3 * H * 32) + H
    assert model().active_parameters() == active
    assert model().active_parameters(embedding=False) == active - WORD
    assert model().active_parameters(embedding=False, head=False) == active - 2 * WORD


def test_a_tied_matrix_is_active_once_for_either_use() -> None:
    tied = model(tied_embeddings=True)
    assert tied.active_parameters() == tied.active_parameters(embedding=False) == tied.active_parameters(head=False)
    assert tied.active_parameters() - tied.active_parameters(embedding=False, head=False) == WORD


def test_an_mtp_layer_joins_two_states_and_repeats_a_layer() -> None:
    spec = model(mtp=Mtp(layers=2, kind="moe"))
    assert sum(tensor.numel for tensor in spec.mtp_tensors()) == 2 * H * H + 3 * H + MOE_NUMEL
    assert spec.parameters() == model().parameters()
    assert spec.parameters(mtp=True) == spec.parameters() + 2 * (2 * H * H + 3 * H + MOE_NUMEL)
    assert model().mtp_tensors() == ()


def test_moe_kinds_are_those_in_use() -> None:
    assert model().moe_kinds == ("moe",)
    assert not model(layers=("2*dense",)).is_moe
    assert model(layers=("2*dense",), mtp=Mtp(layers=1, kind="moe")).is_moe


def test_a_changed_copy_is_counted_anew() -> None:
    spec = model()
    before = spec.parameters(), spec.layer_kinds
    padded = spec.with_vocab(1024)
    assert (padded.vocab_size, padded.parameters() - spec.parameters()) == (1024, 2 * 24 * H)
    assert spec.model_copy(update={"layers": ("5*dense",)}).layer_kinds == ("dense",) * 5
    assert (spec.parameters(), spec.layer_kinds) == before
    with pytest.raises(ValidationError):
        spec.with_vocab(0)


# Weights of one rank

DEGREES = st.integers(1, 64)
SHARDINGS: list[Sharding] = ["tp", "kv", "replicated", "expert", "expert_replicated"]


@given(st.sampled_from(SHARDINGS), st.integers(1, 10**12), st.sampled_from([1, 2, 4, 8]), DEGREES, DEGREES, DEGREES)
def test_the_ranks_together_hold_at_least_the_whole_tensor(
    sharding: Sharding, numel: int, kv_heads: int, tp: int, ep: int, etp: int
) -> None:
    share = Tensor(name="w", numel=numel, sharding=sharding, kv_heads=kv_heads).numel_per_rank(tp, ep, etp)
    assert share * (ep * etp if sharding.startswith("expert") else tp) >= numel * (1 - 1e-12)


@given(st.integers(1, 10**6), DEGREES, DEGREES, DEGREES)
def test_a_tensor_that_divides_is_held_exactly_once(units: int, tp: int, ep: int, etp: int) -> None:
    dense = Tensor(name="w", numel=units * tp, sharding="tp")
    expert = Tensor(name="w", numel=units * ep * etp, sharding="expert")
    assert dense.numel_per_rank(tp, ep, etp) == units
    assert expert.numel_per_rank(tp, ep, etp) == units


def test_key_value_heads_are_replicated_once_tp_exceeds_them() -> None:
    tensor = Tensor(name="w", numel=800, sharding="kv", kv_heads=4)
    assert tensor.numel_per_rank(np.array([1, 2, 4, 8, 16])).tolist() == [800, 400, 200, 200, 200]


def test_shares_broadcast_over_columns_of_degrees() -> None:
    tensor = Tensor(name="w", numel=64, sharding="expert")
    shares = tensor.numel_per_rank(1, np.array([[1], [8]]), np.array([1, 2, 4]))
    assert shares.dtype == np.float64
    assert shares.tolist() == [[64, 32, 16], [8, 4, 2]]
    assert Tensor(name="w", numel=7, sharding="replicated").numel_per_rank(np.array([1, 2])).tolist() == [7, 7]

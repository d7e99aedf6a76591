"""The model families of Hugging Face: for each model_type, how its config fields say what every layer is.

A family is an entry in FAMILIES, put together from the readers in config_mixers and config_mlps. A new family is a new entry, with
a new reader where no present one fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from . import config_mixers as mixers
from . import config_mlps as mlps
from .config_fields import Fields
from .config_mixers import NO_MIXER, Mixers, NamedMixer
from .config_mlps import NO_MLP, Mlps, NamedMlp
from .layer_kinds import MoeMlp
from .layer_pattern import MAX_LAYERS


def _num_hidden_layers(f: Fields) -> int:
    layers = f.count("num_hidden_layers", "n_layer")
    if layers > MAX_LAYERS:
        raise f.error("num_hidden_layers", f"it must be at most {MAX_LAYERS:,}")
    return layers


def _no_mtp(f: Fields) -> int:
    return 0


def _one_stream(f: Fields) -> int:
    return 1


@dataclass(frozen=True)
class Family:
    """How to read one model_type. An MTP layer repeats the last decoder layer unless `mtp_layer` says otherwise."""

    mixers: Mixers
    mlps: Mlps
    depth: Callable[[Fields], int] = _num_hidden_layers
    mtp_layers: Callable[[Fields], int] = _no_mtp
    mtp_layer: Callable[[Fields, int], tuple[NamedMixer, NamedMlp]] | None = None
    residual_streams: Callable[[Fields], int] = _one_stream
    norms_per_part: int = 1  # a mixer and a feed-forward part each have one norm in front; Gemma 3 has one behind, too
    norm: Literal["rms", "layer"] = "rms"
    learned_positions: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


# Families whose layers hold one part: a pattern with one letter per layer

_NEMOTRON_BLOCKS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _nemotron_pattern(f: Fields) -> str:
    if f.has("layers_block_type"):
        pattern = "".join(_NEMOTRON_BLOCKS[block] for block in f.words("layers_block_type", _NEMOTRON_BLOCKS))
    else:
        pattern = f.letters("hybrid_override_pattern", "M*-E")
    if f.has("num_hidden_layers") and f.count("num_hidden_layers") != len(pattern):
        raise f.error("num_hidden_layers", f"it must equal the length of the layer pattern, {len(pattern)}")
    return pattern


def _nemotron_mixers(f: Fields, layers: int) -> list[NamedMixer]:
    built = {letter: _nemotron_mixer(f, letter) for letter in set(_nemotron_pattern(f))}
    return [built[letter] for letter in _nemotron_pattern(f)]


def _nemotron_mlps(f: Fields, layers: int) -> list[NamedMlp]:
    built = {letter: _nemotron_mlp(f, letter) for letter in set(_nemotron_pattern(f))}
    return [built[letter] for letter in _nemotron_pattern(f)]


def _nemotron_mixer(f: Fields, letter: str) -> NamedMixer:
    if letter == "M":
        return "mamba", mixers.mamba2(f)
    if letter == "*":
        return "attention", mixers.attention(qkv_bias=mixers.attention_bias, out_bias=mixers.attention_bias)(f)
    return NO_MIXER


def _nemotron_mlp(f: Fields, letter: str) -> NamedMlp:
    """Squared ReLU: two matrices, not three."""
    if letter == "-":
        return "mlp", mlps.dense(gated=False)(f)
    if letter == "E":
        return "moe", _nemotron_moe(f)
    return NO_MLP


def _nemotron_moe(f: Fields) -> MoeMlp:
    shared = f.extent("n_shared_experts", default=0)
    return mlps.mixture(
        f,
        "n_routed_experts",
        "moe_intermediate_size",
        gated=False,
        bias=f.flag("mlp_bias", False),
        shared_width=shared * f.count("moe_shared_expert_intermediate_size") if shared else 0,
        latent_size=f.count("moe_latent_size") if f.has("moe_latent_size") else None,
        router_expert_bias=True,
        routing_groups=f.count("n_group", default=1),
        routing_groups_topk=f.count("topk_group", default=1),
        score_function="sigmoid",
        normalized_top_k=f.flag("norm_topk_prob", True),
        routed_scaling_factor=f.number("routed_scaling_factor", 1.0),
    )


def _nemotron_mtp_layer(f: Fields, layers: int) -> tuple[NamedMixer, NamedMlp]:
    """One MTP layer is a mixer followed by a feed-forward part, "*E"."""
    pattern = f.letters("mtp_hybrid_override_pattern", "M*-E")
    if len(pattern) != 2 or pattern[0] not in "M*" or pattern[1] not in "-E":
        raise f.error("mtp_hybrid_override_pattern", 'it must be a mixer (M or *) and a feed-forward part (- or E), such as "*E"')
    return _nemotron_mixer(f, pattern[0]), _nemotron_mlp(f, pattern[1])


# MTP layers


def _nextn(f: Fields) -> int:
    return f.extent("num_nextn_predict_layers", default=0)


def _minimax_mtp(f: Fields) -> int:
    if not f.flag("use_mtp", False):
        return 0
    return f.extent("num_mtp_modules", default=0) * f.extent("mtp_transformer_layers", default=1)


def _qwen_mtp(f: Fields) -> int:
    return f.extent("mtp_num_hidden_layers", default=0)


def _deepseek_v4_mtp_layer(f: Fields, layers: int) -> tuple[NamedMixer, NamedMlp]:
    ratios = mixers.compress_ratios(f, layers)
    return mixers.compressed_mixer(f, ratios[layers] if len(ratios) > layers else 0), ("moe", mlps.deepseek_v4_moe(f))


# The table


def _qwen_moe(shared: bool, normalized: bool) -> Mlps:
    return mlps.dense_and_moe(mlps.qwen_sparse_layers, mlps.qwen_moe(shared, normalized), mlps.dense())


def _deepseek(method: str, score: str, normalized: bool, every_mixer: Mixers, **defaults: object) -> Family:
    moe = mlps.dense_and_moe(mlps.after_first_dense, mlps.deepseek_moe(method, score, normalized), mlps.dense())
    return Family(every_mixer, moe, mtp_layers=_nextn, defaults=defaults)


_latent_layers = mixers.same("attention", mixers.latent_attention)
_llama = Family(mixers.same("attention", mixers.attention(**mixers.BIASED)), mlps.dense_everywhere(mlps.dense()))
_qwen3 = Family(mixers.sliding_and_full(mixers.qwen_windows, **mixers.QWEN3), mlps.dense_everywhere(mlps.dense(bias=False)))
_deepseek_v3 = _deepseek("noaux_tc", "sigmoid", True, _latent_layers)
_QUARTER_ROTARY = {"partial_rotary_factor": 0.25}
_qwen3_5 = Family(
    mixers.qwen_hybrid(lambda f: f.flag("attn_output_gate", True)),
    mlps.dense_everywhere(mlps.dense(bias=False)),
    mtp_layers=_qwen_mtp,
    defaults=_QUARTER_ROTARY,
)

FAMILIES: dict[str, Family] = {
    "llama": _llama,
    "mistral": Family(mixers.sliding_and_full(mixers.window_everywhere), mlps.dense_everywhere(mlps.dense(bias=False))),
    "mixtral": Family(mixers.sliding_and_full(mixers.window_everywhere), mlps.moe_everywhere(mlps.mixtral_moe)),
    "qwen2": Family(mixers.sliding_and_full(mixers.qwen_windows, qkv_bias=True), mlps.dense_everywhere(mlps.dense(bias=False))),
    "qwen2_moe": Family(mixers.sliding_and_full(mixers.qwen_windows, qkv_bias=True), _qwen_moe(True, normalized=False)),
    "qwen3": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_moe": Family(_qwen3.mixers, _qwen_moe(False, normalized=False)),
    "qwen3_vl_moe": Family(_qwen3.mixers, _qwen_moe(False, normalized=True)),
    "qwen3_next": Family(mixers.qwen_hybrid(lambda f: True), _qwen_moe(True, normalized=True), defaults=_QUARTER_ROTARY),
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": Family(_qwen3_5.mixers, _qwen_moe(True, normalized=True), mtp_layers=_qwen_mtp, defaults=_QUARTER_ROTARY),
    "mimo": Family(
        mixers.sliding_and_full(mixers.qwen_windows, qkv_bias=lambda f: f.flag("attention_bias", True)),
        mlps.dense_everywhere(mlps.dense(bias=False)),
        mtp_layers=_nextn,
    ),
    "gpt_oss": Family(
        mixers.sliding_and_full(mixers.every(2, "sliding_attention", "full_attention"), sinks=True, **mixers.BIASED),
        mlps.moe_everywhere(mlps.gpt_oss_moe),
        defaults={"attention_bias": True},
    ),
    "deepseek": _deepseek("greedy", "softmax", False, mixers.same("attention", mixers.attention(**mixers.BIASED))),
    "deepseek_v2": _deepseek("greedy", "softmax", False, _latent_layers),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm_moe_dsa": _deepseek_v3,
    "deepseek_v4": Family(
        mixers.compressed_mixers,
        mlps.deepseek_v4_mlps,
        mtp_layers=_nextn,
        mtp_layer=_deepseek_v4_mtp_layer,
        residual_streams=lambda f: f.count("hc_mult"),
    ),
    "glm4_moe": _deepseek(
        "noaux_tc",
        "sigmoid",
        True,
        mixers.same(
            "attention",
            mixers.attention(qkv_bias=mixers.attention_bias, qk_norm=lambda f: "head" if f.flag("use_qk_norm", False) else "none"),
        ),
        partial_rotary_factor=0.5,
    ),
    "llama4": Family(
        mixers.by_type(
            mixers.llama4_types,
            full_attention=mixers.attention(**mixers.BIASED),
            chunked_attention=mixers.attention(window=lambda f: f.count("attention_chunk_size"), chunked=True, **mixers.BIASED),
        ),
        mlps.dense_and_moe(mlps.llama4_sparse_layers, mlps.llama4_moe, mlps.dense("intermediate_size_mlp", bias=False)),
    ),
    "minimax_m1": Family(
        mixers.by_type(mixers.minimax_types, full_attention=mixers.attention(), lightning_attention=mixers.lightning),
        mlps.moe_everywhere(mlps.minimax_m1_moe),
    ),
    "minimax_m2": Family(mixers.minimax_m2_mixers, mlps.moe_everywhere(mlps.minimax_m2_moe), mtp_layers=_minimax_mtp),
    "gemma": Family(
        mixers.same("attention", mixers.attention(**mixers.BIASED)),
        mlps.dense_everywhere(mlps.dense(bias=False)),
        defaults={"vocab_size": 256000, "tie_word_embeddings": True, "head_dim": 256},
    ),
    "gemma2": Family(
        mixers.sliding_and_full(mixers.every(2, "sliding_attention", "full_attention"), **mixers.BIASED),
        mlps.dense_everywhere(mlps.dense(bias=False)),
        norms_per_part=2,
        defaults={"vocab_size": 256000, "tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    ),
    "gemma3": Family(
        mixers.sliding_and_full(
            mixers.every(6, "sliding_attention", "full_attention", key="sliding_window_pattern"), qk_norm="head", **mixers.BIASED
        ),
        mlps.dense_everywhere(mlps.dense(bias=False)),
        norms_per_part=2,
        defaults={"vocab_size": 262208, "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 4096},
    ),
    "nemotron_h": Family(
        _nemotron_mixers,
        _nemotron_mlps,
        depth=lambda f: len(_nemotron_pattern(f)),
        mtp_layers=_nextn,
        mtp_layer=_nemotron_mtp_layer,
    ),
    "gpt2": Family(
        mixers.same("attention", mixers.attention(qkv_bias=True, out_bias=True)),
        mlps.dense_everywhere(mlps.gpt2_mlp),
        norm="layer",
        learned_positions=True,
        defaults={"tie_word_embeddings": True},
    ),
}
"""By model_type, without the "_text" that language towers of multimodal models add."""

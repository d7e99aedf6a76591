"""A ModelSpec as settings of Megatron's GPT model, which MindSpeed-LLM and Megatron-Bridge share.

Megatron builds one kind of attention and one of MLP or MoE, with a few patterns over the layers. What does not fit is refused in
a sentence: a near miss would train another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...search_spaces.errors import Infeasible
from ...search_spaces.model import Attention, DenseMlp, LatentAttention, LinearAttention, ModelSpec, MoeMlp
from .knobs import Dialect, Settings
from .request import Request, refusal


@dataclass(frozen=True)
class Architecture:
    """A model as Megatron sees it; each pattern has one entry per decoder layer."""

    spec: ModelSpec
    attention: Attention | LatentAttention  # its window, if any, holds where `windowed` says so
    linear: LinearAttention | None
    dense: DenseMlp | None
    moe: MoeMlp | None
    windowed: tuple[bool, ...]
    is_linear: tuple[bool, ...]
    is_moe: tuple[bool, ...]

    @property
    def all_biases(self) -> bool:
        """Whether every linear layer has a bias."""
        parts = [part.bias for part in (self.dense, self.moe) if part]
        return isinstance(self.attention, Attention) and self.attention.qkv_bias and self.attention.out_bias and all(parts)

    @property
    def sparse(self) -> bool:
        """Whether latent attention has DeepSeek's indexer."""
        return isinstance(self.attention, LatentAttention) and self.attention.indexer_heads > 0

    @property
    def gated(self) -> bool:
        """Whether the feed-forward parts are gated."""
        return all(part.gated for part in (self.dense, self.moe) if part)

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads if isinstance(self.attention, Attention) else self.attention.heads


class MegatronRequest(Request):
    """A plan on its way to a framework that builds Megatron's GPT model."""

    @cached_property
    def architecture(self) -> Architecture:
        return architecture(self.spec)


def architecture(spec: ModelSpec) -> Architecture:
    """Reads a model; Infeasible names everything in it that Megatron's GPT model does not have."""
    problems = list(_unknown_parts(spec))
    if problems:
        raise refusal(f"{spec.name} is not a model that Megatron's GPT code builds", problems)
    layers = [spec.kinds[name] for name in spec.layer_kinds]
    attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention | LatentAttention)]
    windows = {getattr(mixer, "window", None) for mixer in attentions} - {None}
    plain = {mixer.model_copy(update={"window": None}) if isinstance(mixer, Attention) else mixer for mixer in attentions}
    attention = plain.pop()
    if isinstance(attention, Attention):
        attention = attention.model_copy(update={"window": windows.pop() if windows else None})
    return Architecture(
        spec=spec,
        attention=attention,
        linear=next((layer.mixer for layer in layers if isinstance(layer.mixer, LinearAttention)), None),
        dense=next((layer.mlp for layer in layers if isinstance(layer.mlp, DenseMlp)), None),
        moe=next((layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)), None),
        windowed=tuple(getattr(layer.mixer, "window", None) is not None for layer in layers),
        is_linear=tuple(isinstance(layer.mixer, LinearAttention) for layer in layers),
        is_moe=tuple(isinstance(layer.mlp, MoeMlp) for layer in layers),
    )


def _unknown_parts(spec: ModelSpec) -> Iterator[str]:
    used = dict.fromkeys(spec.layer_kinds)
    kinds = [spec.kinds[name] for name in used]
    for name, kind in zip(used, kinds, strict=True):
        if kind.mixer is None or kind.mlp is None:
            yield f"layers of kind {name!r} have no {'attention' if kind.mixer is None else 'feed-forward part'}"
        elif kind.mixer.kind not in ("attention", "mla", "gated_delta_net"):
            yield f"layers of kind {name!r} use {kind.mixer.kind} attention"
        if kind.norms != 2 and kind.mixer and kind.mlp:
            yield f"layers of kind {name!r} have {kind.norms} norms where Megatron builds 2"
        if kind.extra_parameters:
            yield f"layers of kind {name!r} have {kind.extra_parameters} weights that no part of the model names"
    full = [kind.mixer for kind in kinds if isinstance(kind.mixer, Attention | LatentAttention)]
    if not full:
        yield "no layer has full attention"
    if len({mixer.model_copy(update={"window": None}) if isinstance(mixer, Attention) else mixer for mixer in full}) > 1:
        yield "its layers differ in heads, head size or another part of attention; Megatron has one for all but the window"
    if len({mixer.window for mixer in full if isinstance(mixer, Attention)} - {None}) > 1:
        yield "its layers have windows of several sizes; Megatron has one"
    for part, word in ((LinearAttention, "linear attention"), (DenseMlp, "dense MLP"), (MoeMlp, "mixture of experts")):
        found = {kind.mixer for kind in kinds if isinstance(kind.mixer, part)} | {k.mlp for k in kinds if isinstance(k.mlp, part)}
        if len(found) > 1:
            yield f"its layers have {len(found)} sizes of {word}; Megatron has one"
    mlps = [kind.mlp for kind in kinds if kind.mlp]
    if len({(mlp.gated, mlp.bias) for mlp in mlps}) > 1:
        yield "its layers differ in gating or bias of the MLP; Megatron has one setting"
    yield from _unknown_details(spec, full, mlps)


def _unknown_details(
    spec: ModelSpec, attentions: Sequence[Attention | LatentAttention], mlps: Sequence[DenseMlp | MoeMlp]
) -> Iterator[str]:
    if spec.residual_streams > 1:
        yield f"it carries {spec.residual_streams} hidden states between layers"
    if any(isinstance(mixer, Attention) and mixer.chunked for mixer in attentions):
        yield "attention is cut into chunks of tokens; Megatron's windows slide"
    if not spec.final_norm:
        yield "it has no final norm"
    if any(isinstance(mixer, Attention) and mixer.qk_norm == "width" for mixer in attentions):
        yield "queries and keys are normalised over the whole projection; Megatron does so per head"
    yield from _unknown_routing([mlp for mlp in mlps if isinstance(mlp, MoeMlp)])
    if any(isinstance(mixer, LatentAttention) and (mixer.qkv_bias or mixer.out_bias) for mixer in attentions):
        yield "its latent attention has biases"
    biases = {(mixer.qkv_bias, mixer.out_bias, mlp.bias) for mixer in attentions for mlp in mlps if isinstance(mixer, Attention)}
    if not biases <= {(True, True, True), (False, False, False), (True, False, False)}:
        yield "its biases are neither on everywhere, nor off, nor on queries, keys and values only"
    if spec.mtp and spec.mtp.kind != spec.layer_kinds[-1]:
        yield f"its MTP layer repeats kind {spec.mtp.kind!r}; Megatron repeats the last layer, {spec.layer_kinds[-1]!r}"
    if spec.mtp and spec.mtp.norms != 3:
        yield f"its MTP layer has {spec.mtp.norms} norms where Megatron builds 3"


def _unknown_routing(mixtures: Sequence[MoeMlp]) -> Iterator[str]:
    """Megatron-Core's moe_utils.py: sigmoids of several experts are always divided by their sum, that of one never."""
    if any(moe.top_k > 1 and moe.score_function != "softmax" and not moe.normalized_top_k for moe in mixtures):
        yield "weights of a token's experts are sigmoids as they are (normalized_top_k: false); Megatron divides them by their sum"
    if any(moe.top_k == 1 and moe.normalized_top_k for moe in mixtures):
        yield "its one expert a token weighs 1 whatever the router says; Megatron gives it its score: say normalized_top_k: false"


# --- settings ----------------------------------------------------------------------------------------------------------------


def size_settings(asked: MegatronRequest, layers: int, positions: str) -> Settings:
    """Widths, norms, positions and vocabulary; `layers` is what the framework counts, no-op layers included.

    Infeasible if learned positions end before the sequence does, or cannot be as many as the model has.
    """
    spec, model, seq_len, put = asked.spec, asked.architecture, asked.problem.workload.seq_len, asked.speaks.set
    if spec.learned_positions and seq_len > spec.max_position_embeddings:
        raise Infeasible(f"seq_len {seq_len} is longer than the {spec.max_position_embeddings} positions that {spec.name} learns")
    if spec.learned_positions and seq_len != spec.max_position_embeddings and not asked.speaks.has("max_positions"):
        raise Infeasible(
            f"{asked.speaks} learns as many positions as seq_len, {seq_len}; {spec.name} has {spec.max_position_embeddings}: plan "
            "with that seq_len"
        )
    settings = [
        put("layers", layers),
        put("hidden_size", spec.hidden_size),
        put("ffn_width", model.dense.width if model.dense else model.moe.width if model.moe else 0),
        put("heads", model.attention.heads),
        put("seq_len", seq_len),
    ]
    if asked.speaks.has("max_positions"):
        settings.append(put("max_positions", max(spec.max_position_embeddings, seq_len)))
    settings += [put("positions", positions), put("norm", spec.norm)]
    settings += _activation(asked)
    if not model.all_biases:
        settings.append(put("no_bias"))
        if isinstance(model.attention, Attention) and model.attention.qkv_bias:
            settings.append(put("qkv_bias"))
    if not spec.tied_embeddings:
        settings.append(put("untied"))
    return settings + _vocabulary(asked)


def _activation(asked: MegatronRequest) -> Settings:
    """SwiGLU or GELU; clamped gates are quick GELU's."""
    model, speaks = asked.architecture, asked.speaks
    if model.moe is not None and model.moe.clamped:
        settings = _clamp(model.moe, speaks)
        if speaks.has("activation"):
            return [*settings, speaks.set("gated"), speaks.set("activation", "quick_gelu")]
        return [*settings, speaks.set("quick_gated")]
    settings = speaks.sets(gated=model.gated)
    return [*settings, *speaks.sets(activation="silu" if model.gated else "gelu")] if speaks.has("activation") else settings


def _clamp(moe: MoeMlp, speaks: Dialect) -> Settings:
    """Where gates are cut off, and their offset. Infeasible for a version that cannot, and where the model does not say where."""
    settings = [speaks.set("activation_clamp", moe.clamp_limit), speaks.set("gate_offset", moe.gate_offset)]
    if moe.clamp_limit is None:
        raise Infeasible(
            "experts are clamped (clamped: true) and the model does not say at what: clamp_limit: 7.0, as gpt-oss's are"
        )
    return settings


def vocabulary_sizes(asked: MegatronRequest) -> tuple[int, int]:
    """Tokens of the vocabulary, and with those that pad it so that every rank of a TP group holds as many."""
    vocab, unit = asked.problem.workload.vocab_size or asked.spec.vocab_size, asked.stack.vocab_divisor * asked.layout.tp
    return vocab, -(-vocab // unit) * unit


def _vocabulary(asked: MegatronRequest) -> Settings:
    vocab, padded = vocabulary_sizes(asked)
    settings = [asked.speaks.set("vocab_divisor", asked.stack.vocab_divisor)]
    if asked.speaks.has("padded_vocab"):
        settings.append(asked.speaks.set("padded_vocab", padded))
    if asked.speaks.has("vocab"):
        given = vocab if vocab % asked.layout.tp == 0 else padded  # its training loop pads a tokenizer's own vocabulary only
        settings += [asked.speaks.set("vocab", given), asked.speaks.set("vocab_padded")]
    return settings


def attention_settings(asked: MegatronRequest) -> Settings:
    """Grouped-query or latent attention, the norms on queries and keys, gate and sinks; windows and mixes are the caller's."""
    mixer, put = asked.architecture.attention, asked.speaks.set
    if isinstance(mixer, LatentAttention):
        settings = [put("mla"), put("head_dim", mixer.qk_nope_head_dim)]
        if mixer.q_lora_rank:
            settings.append(put("q_lora_rank", mixer.q_lora_rank))
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        settings += [put(name, getattr(mixer, name)) for name in sizes]
        return [*settings, put("qk_norm")]  # MLA's norms on the latents hang on this setting
    settings = [put("head_dim", mixer.head_dim)]
    if mixer.rotary_fraction != 1.0:
        settings.append(put("rotary_fraction", mixer.rotary_fraction))
    if mixer.kv_heads != mixer.heads:
        settings += [put("grouped_query")] if asked.speaks.has("grouped_query") else []
        settings.append(put("kv_heads", mixer.kv_heads))
    if mixer.qk_norm == "head":
        settings.append(put("qk_norm"))
    if mixer.output_gate:
        settings.append(put("output_gate"))
    if mixer.sinks:
        settings.append(put("attention_sinks", "learnable"))
    return settings


def router_settings(moe: MoeMlp, speaks: Dialect) -> Settings:
    """Experts, router and shared expert; which layers have them is the caller's."""
    grouped = moe.routing_groups > 1
    return speaks.sets(
        experts=moe.experts,
        top_k=moe.top_k,
        expert_width=moe.width,
        score_function=moe.score_function,
        pre_softmax=moe.score_function == "softmax" and not moe.normalized_top_k,
        shared_width=moe.shared_width or None,
        shared_gate=moe.shared_gate,
        latent_size=moe.latent_size,
        expert_bias=moe.router_expert_bias,
        routing_groups=moe.routing_groups if grouped else None,
        routing_groups_topk=moe.routing_groups_topk if grouped else None,
        routed_scaling=moe.routed_scaling_factor if moe.routed_scaling_factor != 1.0 else None,
        router_dtype="fp32" if moe.experts >= 32 else None,  # Megatron's advice from 32 experts on
        grouped_gemm=True,
    )

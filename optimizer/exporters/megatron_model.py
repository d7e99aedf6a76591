"""A ModelSpec as flags of Megatron's GPT model, which MindSpeed-LLM shares.

Megatron builds one kind of attention and one of MLP or MoE, with a few patterns over the layers. What does not fit is refused in
a sentence: a near miss would train another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import Layout, Problem
from ...search_spaces.model import Attention, DenseMlp, LatentAttention, LinearAttention, ModelSpec, MoeMlp
from .knobs import Dialect

Flags = list[tuple[str, ...]]


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
    def kv_heads(self) -> int:
        return self.attention.kv_heads if isinstance(self.attention, Attention) else self.attention.heads


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


def refusal(summary: str, reasons: Sequence[str]) -> Infeasible:
    """One error that says everything: the reasons are kept apart and also end its sentence."""
    return Infeasible(f"{summary}: {'; '.join(reasons)}", tuple(reasons))


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
    if any(isinstance(mixer, LatentAttention) and (mixer.qkv_bias or mixer.out_bias) for mixer in attentions):
        yield "its latent attention has biases"
    biases = {(mixer.qkv_bias, mixer.out_bias, mlp.bias) for mixer in attentions for mlp in mlps if isinstance(mixer, Attention)}
    if not biases <= {(True, True, True), (False, False, False), (True, False, False)}:
        yield "its biases are neither on everywhere, nor off, nor on queries, keys and values only"
    if spec.mtp and spec.mtp.kind != spec.layer_kinds[-1]:
        yield f"its MTP layer repeats kind {spec.mtp.kind!r}; Megatron repeats the last layer, {spec.layer_kinds[-1]!r}"
    if spec.mtp and spec.mtp.norms != 3:
        yield f"its MTP layer has {spec.mtp.norms} norms where Megatron builds 3"


# --- flags -------------------------------------------------------------------------------------------------------------------


def size_flags(model: Architecture, problem: Problem, layout: Layout, dialect: Dialect, layers: int) -> Flags:
    """Widths, norms, positions and vocabulary; `layers` is what the framework counts, no-op layers included.

    Infeasible if learned positions end before the sequence does.
    """
    spec, workload, flag = model.spec, problem.workload, dialect.flag
    if spec.learned_positions and workload.seq_len > spec.max_position_embeddings:
        raise Infeasible(
            f"seq_len {workload.seq_len} is longer than the {spec.max_position_embeddings} positions that {spec.name} learns"
        )
    width = model.dense.width if model.dense else model.moe.width if model.moe else 0
    flags = [
        flag("layers", layers),
        flag("hidden_size", spec.hidden_size),
        flag("ffn_width", width),
        flag("heads", model.attention.heads),
        flag("seq_len", workload.seq_len),
        flag("max_positions", max(spec.max_position_embeddings, workload.seq_len)),
        flag("positions", "learned_absolute" if spec.learned_positions else "rope"),
        flag("norm", spec.norm),
    ]
    if (model.dense or model.moe) and all(part.gated for part in (model.dense, model.moe) if part):
        flags.append(flag("gated"))
    if not model.all_biases:
        flags.append(flag("no_bias"))
        if isinstance(model.attention, Attention) and model.attention.qkv_bias:
            flags.append(flag("qkv_bias"))
    if not spec.tied_embeddings:
        flags.append(flag("untied"))
    return flags + _vocabulary_flags(model, problem, layout, dialect)


def _vocabulary_flags(model: Architecture, problem: Problem, layout: Layout, dialect: Dialect) -> Flags:
    divisor = problem.stack.vocab_divisor
    flags = [dialect.flag("vocab_divisor", divisor)]
    if dialect.has("padded_vocab"):
        vocab, unit = problem.workload.vocab_size or model.spec.vocab_size, divisor * layout.tp
        flags.append(dialect.flag("padded_vocab", -(-vocab // unit) * unit))
    return flags


def attention_flags(model: Architecture, dialect: Dialect) -> Flags:
    """Grouped-query or latent attention, the norms on queries and keys, gate and sinks; windows and mixes are the caller's."""
    mixer, flag = model.attention, dialect.flag
    if isinstance(mixer, LatentAttention):
        flags = [flag("mla"), flag("head_dim", mixer.qk_nope_head_dim)]
        if mixer.q_lora_rank:
            flags.append(flag("q_lora_rank", mixer.q_lora_rank))
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        flags += [flag(name, getattr(mixer, name)) for name in sizes]
        return [*flags, flag("qk_norm")]  # MLA's norms on the latents hang on this flag
    flags = [flag("head_dim", mixer.head_dim)]
    if mixer.kv_heads != mixer.heads:
        flags += [flag("grouped_query"), flag("kv_heads", mixer.kv_heads)]
    if mixer.qk_norm == "head":
        flags.append(flag("qk_norm"))
    if mixer.output_gate:
        flags.append(flag("output_gate"))
    if mixer.sinks:
        flags.append(flag("attention_sinks", "learnable"))
    return flags


def router_flags(moe: MoeMlp, dialect: Dialect) -> Flags:
    """Experts, router and shared expert; which layers have them is the caller's."""
    flag = dialect.flag
    flags = [
        flag("experts", moe.experts),
        flag("top_k", moe.top_k),
        flag("expert_width", moe.width),
        flag("score_function", moe.score_function),
    ]
    if moe.shared_width:
        flags.append(flag("shared_width", moe.shared_width))
    if moe.shared_gate:
        flags.append(flag("shared_gate"))
    if moe.latent_size:
        flags.append(flag("latent_size", moe.latent_size))
    if moe.router_expert_bias:
        flags.append(flag("expert_bias"))
    if moe.routing_groups > 1:
        flags += [flag("routing_groups", moe.routing_groups), flag("routing_groups_topk", moe.routing_groups_topk)]
    if moe.routed_scaling_factor != 1.0:
        flags.append(flag("routed_scaling", f"{moe.routed_scaling_factor:g}"))
    if moe.experts >= 32:
        flags.append(flag("router_dtype", "fp32"))  # Megatron's advice from 32 experts on
    return [*flags, flag("grouped_gemm")]


def pattern(layers: Sequence[bool]) -> str:
    """A Python list expression of ones and zeros, one per layer, as Megatron evaluates it: "([0]*3+[1]*58)"."""
    n = len(layers)
    period = next(p for p in range(1, n + 1) if n % p == 0 and list(layers) == list(layers[:p]) * (n // p))
    if period == 1:
        return f"([{int(layers[0])}]*{n})"
    runs = "+".join(f"[{int(value)}]*{len(list(run))}" for value, run in groupby(layers[:period]))
    return f"({runs})" if period == n else f"({runs})*{n // period}"

"""The one list of operators of every layer kind: shapes, bytes moved, bytes saved for backward, messages.

Time, activation memory, traffic and FLOPs are all read off the operators built here; weights are ModelSpec's tensors. Every
figure is for one micro-batch on one rank and broadcasts over the columns of `Factors`. Tokens count what a rank works on after
cp; between blocks SP divides them by tp once more. EP does not divide a rank's tokens: it moves them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Literal

import numpy as np

from ..search_spaces.layout import Floats
from ..search_spaces.model import DenseMlp, LayerKind, ModelSpec, MoeMlp
from .mixers import mixer_operators
from .operation import (
    BF16,
    FP32,
    MLP,
    MOE,
    MOE_ACT,
    SHARED_EXPERTS,
    Factors,
    Message,
    Operator,
    activation,
    column_parallel,
    norm_and_residual,
    row_parallel,
)
from .routing import Routing

__all__ = [
    "BF16",
    "FP32",
    "LOSS",
    "Factors",
    "Message",
    "Operator",
    "dispatch_buffer_bytes",
    "embedding_operators",
    "head_operators",
    "layer_input_bytes",
    "layer_operators",
    "logits_bytes",
    "mtp_operators",
]

LOSS = "loss"
"""The operator that no framework recomputes: it stands outside of the layers."""
BIAS_FORWARD = FP32 + (BF16 + 2 * FP32) + 2 * FP32 + (FP32 + BF16)
"""Bytes per value of an expert's output whose bias is added outside the GEMM, weighted by FP32 routing probabilities: their
product is written, added to the BF16 output, all experts' sums are joined and cast back (Megatron-Core's _apply_bias)."""
BIAS_BACKWARD = (BF16 + FP32) + (FP32 + BF16) + 2 * (2 * FP32 + FP32)
"""The same backward: the gradient is cast to FP32 and, for the output, back; its products for bias and probability are written and
reduced."""
CLAMP_FORWARD, CLAMP_BACKWARD = 2 * 2 * BF16 + 2 * 2 * BF16, 2 * 3 * BF16 + 2 * 2 * BF16
"""Bytes per value of an expert's gate that is clamped, with its up-projection, ahead of the activation's kernel: both read and
written, then joined; backward both gradients and inputs read, gradients written and joined (Megatron-Core's fused_bias_geglu)."""


def layer_operators(model: ModelSpec, kind: str, f: Factors) -> list[Operator]:
    """All operators of one decoder layer of a kind, in order."""
    layer = model.kinds[kind]
    return [*mixer_operators(model, layer, f), *_mlp_operators(model, layer, f), *_dropout(model, layer, f)]


def embedding_operators(model: ModelSpec, f: Factors) -> list[Operator]:
    """Vocabulary-parallel look-up: every TP rank contributes its rows, a reduce-scatter (or all-reduce) joins them."""
    h, t = model.hidden_size, f.tokens
    rows = BF16 * t * h
    messages = row_parallel(replace(f, fp8_gathers=False), rows)
    return [Operator("embedding", "memory", f.zeros, forward_bytes=2 * rows, backward_bytes=2 * rows, messages=messages)]


def head_operators(model: ModelSpec, f: Factors, vocab_size: Floats) -> list[Operator]:
    """Final norm, LM head over the padded vocabulary and vocabulary-parallel cross entropy."""
    h, t = model.hidden_size, f.tokens
    vocab = vocab_size / f.tp
    gather = column_parallel(replace(f, fp8_gathers=False), BF16 * t * h)
    return [
        norm_and_residual("final_norm", h, f, 2 * BF16 * t * h / f.sp),  # its input, which no layer keeps, and its output
        Operator("lm_head", "gemm", f.zeros, m=t, n=vocab, k=h, messages=gather, high_precision=True),
        *_gathered_logits(t * vocab_size, f),
        _loss(t * vocab_size, f),
    ]


def _gathered_logits(logits: Floats, f: Factors) -> list[Operator]:
    """Gathered logits are copied into one tensor (received in pieces, then joined) and their gradient cut again."""
    if not f.gathered_logits:
        return []
    joined = np.where(f.tp > 1, 2.0 * BF16 * logits, 0.0)
    gather = (Message("tp", "all_gather", BF16 * logits, forward=1.0, backward=0.0),)
    return [Operator("gathered_logits", "memory", f.zeros, forward_bytes=joined, backward_bytes=joined / f.tp, messages=gather)]


def _loss(logits: Floats, f: Factors) -> Operator:
    """Cross entropy over all `logits` of the tokens: vocabulary-parallel, or on every TP rank after they were gathered."""
    # Bytes read and written per logit: softmax and gradient once each in FP32; as a chain cast, log-softmax over three reads, its
    # gradient from a dense one, cast back.
    forward, backward = (22.0, 30.0) if "loss" in f.eager else (3 * FP32, 1.5 * FP32)
    held = logits if f.gathered_logits else logits / f.tp
    spoken = () if f.gathered_logits else (Message("tp", "all_reduce", FP32 * f.tokens, forward=3.0, backward=0.0),)
    return Operator(LOSS, "memory", f.zeros, forward_bytes=forward * held, backward_bytes=backward * held, messages=spoken)


def mtp_operators(model: ModelSpec, f: Factors) -> list[Operator]:
    """One MTP layer: the next tokens' look-up, two norms, the 2h → h projection, a decoder layer (arXiv 2412.19437, 2.2).

    The projection is column-parallel; its output is gathered over the hidden size and, under SP, split over the tokens again.
    """
    if model.mtp is None:
        return []
    h, t = model.hidden_size, f.tokens
    return [
        *embedding_operators(model, f),
        norm_and_residual("mtp_norms", 2 * h, f, f.linear_bytes * 2 * t * h / f.sp),
        Operator(
            "mtp_projection",
            "gemm",
            f.zeros,
            m=t,
            n=h / f.tp,
            k=2.0 * h,
            saved_bytes=BF16 * t * h / f.sp,
            messages=(
                *column_parallel(f, BF16 * 2 * t * h),
                Message("tp", "all_gather", BF16 * t * h, 1.0, np.where(f.sequence_parallel > 0, 1.0, 0.0)),
            ),
        ),
        *layer_operators(model, model.mtp.kind, f),
    ]


def layer_input_bytes(model: ModelSpec, f: Factors) -> Floats:
    """The residual streams at a layer's input: what stays when all of the layer is recomputed, (n,)."""
    return BF16 * f.tokens * model.hidden_size * model.residual_streams / f.sp


def logits_bytes(f: Factors, vocab_size: Floats, heads: int) -> Floats:
    """Peak around the loss, (n,): what the stack holds per logit of one head, and other heads' (MTP) FP32 softmax."""
    ways = 1.0 if f.gathered_logits else f.tp
    return np.asarray(f.tokens * vocab_size / ways * (f.footprint.logit_bytes + (heads - 1) * FP32))


def dispatch_buffer_bytes(model: ModelSpec, kind: str, f: Factors) -> Floats:
    """Send and receive buffers of a MoE layer's token exchange at the assumed imbalance, (n,).

    A gather's are all tokens of the expert group, and as many outputs that it sums.
    """
    mlp = model.kinds[kind].mlp
    if not isinstance(mlp, MoeMlp):
        return f.zeros
    copies = 2.0 * f.ep * f.etp if f.gathered_tokens else mlp.top_k * (1.0 + f.imbalance)
    return BF16 * f.tokens / f.sp * copies * (mlp.latent_size or model.hidden_size)


def _dropout(model: ModelSpec, layer: LayerKind, f: Factors) -> list[Operator]:
    """The masks of what is dropped from the outputs of mixer and MLP, on the SP share (arXiv 2205.05198, section 4.1)."""
    added = (layer.mixer is not None) + (layer.mlp is not None)
    masks = f.footprint.dropout_bytes * added * f.tokens * model.hidden_size / f.sp
    return [Operator("dropout", "memory", f.zeros, saved_bytes=masks)] if f.footprint.dropout_bytes else []


def _mlp_operators(model: ModelSpec, layer: LayerKind, f: Factors) -> list[Operator]:
    mlp, h, t = layer.mlp, model.hidden_size, f.tokens
    if mlp is None:
        return []
    # After a mixer the norm's input is a residual of its own; without one it is the layer's input, which is counted there.
    residual = [Operator("residual", "memory", f.zeros, saved_bytes=layer_input_bytes(model, f))] if layer.mixer else []
    norm = norm_and_residual("mlp_norm", h, f, f.linear_bytes * t * h / (f.sp if isinstance(mlp, MoeMlp) else f.input_sp))
    if isinstance(mlp, DenseMlp):
        return [*residual, norm, *_dense_mlp("mlp", mlp.width, mlp.gated, h, f, MLP)]
    return [*residual, norm, *_moe(mlp, h, f)]


def _dense_mlp(name: str, width: int, gated: bool, h: int, f: Factors, module: int) -> list[Operator]:
    t, w = f.tokens, width / f.tp
    first = w * (2 if gated else 1)
    joined, into = first, column_parallel(f, BF16 * t * h, linears=2 if gated and f.fused_gate else 1)
    apart = []
    if gated and not f.fused_gate:  # what SP gathers is shared; without it each projection reduces its input's gradient
        joined = w
        alone = np.where(f.sequence_parallel > 0, 0.0, BF16 * t * h)
        once_more = (Message("tp", "all_reduce", alone, 0.0, 1.0, beside_wgrad=True),) if f.shared_gathers else into
        apart = [Operator(f"{name}_gate", "gemm", f.zeros, module, m=t, n=w, k=h, saved_bytes=BF16 * t * w, messages=once_more)]
    return [
        Operator(f"{name}_fc1", "gemm", f.zeros, module, m=t, n=joined, k=h, saved_bytes=BF16 * t * joined, messages=into),
        *apart,
        activation(f"{name}_act", t * first, t * w, gated, f, module),
        Operator(f"{name}_fc2", "gemm", f.zeros, module, m=t, n=h, k=w, messages=row_parallel(f, BF16 * t * h)),
    ]


def _moe(mlp: MoeMlp, h: int, f: Factors) -> list[Operator]:
    """Router, dispatch, grouped experts, combine, beside them the shared expert.

    A rank sends its SP share of the tokens top_k times and, balanced, receives as many; ETP gathers them over etp ranks that
    split the expert's width. Step time follows the fullest device: `imbalance` times the mean.
    """
    t, width = f.tokens / f.sp, mlp.latent_size or h
    routed = t * mlp.top_k * f.imbalance * f.etp
    copies = BF16 * routed * width
    bring, fetch = _gathers(mlp, t, width, f) if f.gathered_tokens else _exchanges(mlp, t * width * f.imbalance, width, copies, f)
    operators = [
        _router(mlp, t, h, f),
        *_latent("latent_down", mlp.latent_size, t, h, f),
        _permuted("permute", copies, f.linear_bytes * routed * width, bring, f),
        *_experts(mlp, routed, width, f),
        _permuted("unpermute", copies, f.footprint.combined_bytes * t * mlp.top_k * width, fetch, f),
        *(_sums(mlp, copies, t * f.ep * f.etp, width, f) if f.gathered_tokens else ()),
        *_latent("latent_up", mlp.latent_size, t, h, f),
        *_bias(mlp, routed * width, f),
    ]
    if mlp.shared_width:
        operators += _dense_mlp("shared_experts", mlp.shared_width, mlp.gated, h, f, SHARED_EXPERTS | MOE)
    return operators


Ways = tuple[tuple[Message, ...], tuple[Message, ...]]
"""What brings tokens to their experts, and what brings the experts' outputs back."""


def _exchanges(mlp: MoeMlp, sent: Floats, width: int, copies: Floats, f: Factors) -> Ways:
    """All-to-alls of `sent` values of tokens; ETP gathers the `copies` bytes that arrive."""
    limit, groups = (mlp.routing_groups_topk, mlp.routing_groups) if mlp.routing_groups > 1 else (None, 1)
    routing = Routing(mlp.top_k, mlp.experts, limit, groups, f.crossing)
    back = 1.0 if f.dispatch_bytes == BF16 else 0.0  # gradients go back as they are combined, whatever tokens are cast to
    narrow, wide = f.dispatch_bytes * width, BF16 * width
    dispatch: tuple[Message, ...] = (Message("ep", "dispatch", f.dispatch_bytes * sent, 1.0, back, routing, narrow),)
    if not back:
        dispatch += (Message("ep", "combine", BF16 * sent, 0.0, 1.0, routing, wide),)
    gather, scatter = (Message("etp", name, copies, 1.0, 1.0) for name in ("all_gather", "reduce_scatter"))
    return (*dispatch, gather), (scatter, Message("ep", "combine", BF16 * sent, 1.0, 1.0, routing, wide))


def _gathers(mlp: MoeMlp, t: Floats, width: int, f: Factors) -> Ways:
    """All ranks of EP and ETP gather each other's `t` tokens with their routing, and scatter sums of what their experts made.

    Whatever the imbalance, as much is sent: Megatron-Core's allgather dispatcher (transformer/moe/token_dispatcher.py). A token
    comes with a map of its experts (a byte each) and their scores, whose gradients go back.
    """
    maps, scores, values = (t * each for each in (mlp.experts, BF16 * mlp.experts, BF16 * width))
    into = [_over_experts("all_gather", each, back, f) for each, back in ((maps, 0.0), (scores, 1.0), (values, 1.0))]
    return tuple(chain.from_iterable(into)), _over_experts("reduce_scatter", values, 1.0, f)


def _over_experts(name: Literal["all_gather", "reduce_scatter"], own: Floats, back: float, f: Factors) -> tuple[Message, ...]:
    """A collective of every rank's `own` bytes over EP, and of what that brings over ETP; backward as often as `back` says."""
    return Message("ep", name, own * f.ep, 1.0, back), Message("etp", name, own * f.ep * f.etp, 1.0, back)


def _sums(mlp: MoeMlp, copies: Floats, all_tokens: Floats, width: int, f: Factors) -> list[Operator]:
    """Outputs of a rank's experts, `copies` bytes, added up token by token for all that were gathered, as gradients are backward.

    The sums start from zeros and are added to value by value. Of each token the rank keeps for backward which of its own experts
    are meant, as a map and as a mask, and their scores.
    """
    moved, saved = 3.0 * copies + BF16 * all_tokens * width, all_tokens * mlp.experts / f.ep * (1.0 + 1.0 + BF16)
    return [Operator("sums", "memory", f.zeros, MOE, forward_bytes=moved, backward_bytes=moved, by_value=True, saved_bytes=saved)]


def _router(mlp: MoeMlp, t: Floats, h: int, f: Factors) -> Operator:
    saved, experts = FP32 * t * mlp.experts * 2, float(mlp.experts)
    return Operator("router", "gemm", f.zeros, MOE, m=t, n=experts, k=h, saved_bytes=saved, high_precision=True)


def _permuted(name: str, copies: Floats, saved: Floats, messages: tuple[Message, ...], f: Factors) -> Operator:
    """Puts `copies` bytes of routed tokens in order around an exchange."""
    moved = f.permuted_copies * copies
    return Operator(name, "memory", f.zeros, MOE, forward_bytes=moved, backward_bytes=moved, saved_bytes=saved, messages=messages)


def _experts(mlp: MoeMlp, routed: Floats, width: int, f: Factors) -> list[Operator]:
    """The MLPs of a rank's experts on `routed` tokens in all."""
    experts, w = mlp.experts / f.ep, mlp.width / f.etp
    first, rows = w * (2 if mlp.gated else 1), routed / experts
    saved = f.footprint.expert_inner_bytes * routed * first
    return [
        Operator("experts_fc1", "grouped_gemm", f.zeros, MOE, m=rows, n=first, k=width, groups=experts, saved_bytes=saved),
        *_clamp(mlp, routed * w, f),
        activation("experts_act", routed * first, routed * w, mlp.gated, f, MOE | MOE_ACT),
        Operator("experts_fc2", "grouped_gemm", f.zeros, MOE, m=rows, n=width, k=w, groups=experts),
    ]


def _bias(mlp: MoeMlp, moved: Floats, f: Factors) -> list[Operator]:
    """Biases added to experts' outputs outside the GEMM, `moved` values each."""
    if not mlp.bias:
        return []
    forward, backward = BIAS_FORWARD * moved, BIAS_BACKWARD * moved
    values = not f.graphed
    return [Operator("experts_bias", "memory", f.zeros, MOE, forward_bytes=forward, backward_bytes=backward, by_value=values)]


def _clamp(mlp: MoeMlp, gate: Floats, f: Factors) -> list[Operator]:
    """Clamping of gate and up before the activation's kernel; `gate` values each.

    PyTorch's own kernels do it, value by value. They need token counts on the host, which a CUDA graph of the whole step does not
    have: there Transformer Engine's grouped kernels do the same, and stream (its pull requests 2864 and 2885). So it is with the
    experts' bias.
    """
    if not mlp.clamped:
        return []
    return [
        Operator(
            "experts_clamp",
            "memory",
            f.zeros,
            MOE | MOE_ACT,
            forward_bytes=CLAMP_FORWARD * gate,
            backward_bytes=CLAMP_BACKWARD * gate,
            by_value=not f.graphed,
        )
    ]


def _latent(name: str, size: int | None, t: Floats, h: int, f: Factors) -> list[Operator]:
    if size is None:
        return []
    return [Operator(name, "gemm", f.zeros, MOE, m=t, n=float(size), k=h, saved_bytes=BF16 * t * size)]

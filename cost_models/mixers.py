"""Operators of the token mixers: attention in its forms, linear attention and state-space blocks, with their norms and messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..search_spaces.layout import CP_TYPES, Floats
from ..search_spaces.model import Attention, CompressedAttention, LatentAttention, LayerKind, LinearAttention, Mamba2, ModelSpec
from .operation import (
    BF16,
    CORE_ATTN,
    FP32,
    MLA_UP_PROJ,
    Factors,
    Message,
    Operator,
    column_parallel,
    norm_and_residual,
    row_parallel,
)

QKV = 3  # linears whose product is queries, keys and values
EAGER_ROTARY = 5.0
"""Reads and writes of rotary embedding as a chain of kernels, over those of one kernel: two products, half of the input negated and
joined anew, a sum (PyTorch's rotate_half form)."""
ROTARY_CHAIN = (10, 10)  # its kernels, forward and backward: five for queries and five for keys
LINEAR_CHUNK = 64  # tokens that chunked linear-attention kernels work on at once (arXiv 2412.06464 section 3.3)


def mixer_operators(model: ModelSpec, layer: LayerKind, f: Factors) -> list[Operator]:
    """Operators of a layer's token mixer with the norm before it; none for a layer without one."""
    mixer = layer.mixer
    if mixer is None:
        return []
    h, t = model.hidden_size, f.tokens
    if isinstance(mixer, LatentAttention):
        return [norm_and_residual("input_norm", h, f, f.linear_bytes * t * h / f.sp), *_mla(mixer, h, f)]
    gather = column_parallel(f, BF16 * t * h, linears=QKV if isinstance(mixer, Attention) else 1)
    norm = norm_and_residual("input_norm", h, f, f.linear_bytes * t * h / f.input_sp)
    if isinstance(mixer, Attention):
        return [norm, *_attention(mixer, h, f, gather)]
    if isinstance(mixer, CompressedAttention):
        return [norm, *_compressed(mixer, h, f, gather)]
    return [norm, *_recurrent(mixer, h, f, gather)]


def _attention(mixer: Attention, h: int, f: Factors, gather: tuple[Message, ...]) -> list[Operator]:
    t, d = f.tokens, mixer.head_dim
    heads = mixer.heads / f.tp
    kv_heads = np.maximum(mixer.kv_heads / f.tp, 1.0)  # replicated when TP exceeds them
    q, kv = heads * d, 2 * kv_heads * d
    projected = q * (2 if mixer.output_gate else 1) + kv
    normed = mixer.qk_norm != "none"  # the norm's input stays beside the queries and keys that attention saves
    return [
        Operator("qkv_proj", "gemm", f.zeros, m=t, n=projected, k=h, saved_bytes=BF16 * t * projected, messages=gather),
        *_rotary(f, q + kv / 2, 4 if normed else 2, BF16 * t * (q + kv / 2) if normed else 0.0, mixer.scaled_rotary),
        _core("core_attention", f, heads, d, d, *_keys(f.seq_len, mixer), q + kv, kv),
        _output_projection(h, q, f),
    ]


def _mla(mixer: LatentAttention, h: int, f: Factors) -> list[Operator]:
    """Down-projections run on the SP share of the tokens; what SP gathers is the latents, not the hidden states."""
    t, heads = f.tokens, mixer.heads / f.tp
    d_qk, d_v = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim
    rank, rope = mixer.kv_lora_rank, mixer.qk_rope_head_dim
    q_rank = mixer.q_lora_rank
    q_in = q_rank or h
    down = rank + rope + (q_rank or 0)
    gathered = BF16 * t * (rank + rope + q_in)
    up = heads * d_qk * 1.0 + heads * (mixer.qk_nope_head_dim + d_v)
    kv = heads * (d_qk + d_v)
    topk = mixer.indexer_topk if mixer.indexer_heads else None
    keys, full = _mean_keys(f.seq_len, topk), _full_keys(f.seq_len, topk)
    operators = [
        Operator("mla_down_proj", "gemm", f.zeros, m=t / f.sp, n=down, k=h, saved_bytes=2 * BF16 * t / f.sp * down),
        Operator("q_up_proj", "gemm", f.zeros, MLA_UP_PROJ, m=t, n=heads * d_qk, k=q_in, messages=column_parallel(f, gathered)),
        Operator(
            "kv_up_proj",
            "gemm",
            f.zeros,
            MLA_UP_PROJ,
            m=t,
            n=heads * (mixer.qk_nope_head_dim + d_v),
            k=rank,
            saved_bytes=BF16 * t * heads * (2 * d_qk + d_v),  # q, k and v, which the up-projections make
        ),
        *_rotary(f, up, passes=2),
        _core("core_attention", f, heads, d_qk, d_v, keys, full, heads * d_qk + kv, kv),
        _output_projection(h, heads * d_v, f),
    ]
    return operators + _indexer(mixer.indexer_heads, mixer.indexer_head_dim, q_in, h, f)


def _indexer(heads: int, dim: int, q_in: int, h: int, f: Factors) -> list[Operator]:
    """DeepSeek-V3.2's lightning indexer: every query scores every key with small heads, on every TP rank."""
    if not heads:
        return []
    t, seq = f.tokens, f.seq_len
    scores = 2.0 * t * heads * dim
    return [
        Operator("indexer_proj", "gemm", f.zeros, m=t, n=heads * dim, k=q_in, saved_bytes=BF16 * t * heads * dim),
        Operator("indexer_keys", "gemm", f.zeros, m=t, n=dim + heads, k=h),
        Operator("indexer_scores", "attention", f.zeros, flops=scores * seq / 2, full_flops=scores * seq, seq=seq, head_dim=dim),
    ]


def _compressed(mixer: CompressedAttention, h: int, f: Factors, gather: tuple[Message, ...]) -> list[Operator]:
    """DeepSeek-V4: low-rank queries, a shared key-value head over a window and over one entry per `compress_ratio` tokens."""
    t, heads, d = f.tokens, mixer.heads / f.tp, mixer.head_dim
    ratio = mixer.compress_ratio
    compressed = f.seq_len / ratio if ratio else 0.0
    limit = mixer.indexer_topk if mixer.indexer_heads else compressed
    keys = _mean_keys(f.seq_len, mixer.window) + min(compressed / 2, limit)
    full = float(mixer.window) + min(compressed, limit)
    latent = mixer.o_groups * mixer.o_lora_rank / f.tp
    return [
        Operator("q_down_proj", "gemm", f.zeros, m=t, n=mixer.q_lora_rank, k=h, messages=gather),
        Operator("q_up_proj", "gemm", f.zeros, m=t, n=heads * d, k=mixer.q_lora_rank, saved_bytes=BF16 * t * (heads + 2) * d),
        Operator("kv_proj", "gemm", f.zeros, m=t, n=d * (1 + (4 if mixer.overlapping else 2) * (ratio > 0)), k=h),
        *_rotary(f, heads * d, passes=2),
        _core("core_attention", f, heads, d, d, keys, full, (heads + 1) * d, d + f.zeros),
        Operator("o_down_proj", "gemm", f.zeros, m=t, n=mixer.o_lora_rank, k=heads * d, saved_bytes=BF16 * t * heads * d),
        _output_projection(h, latent, f),
        *_indexer(mixer.indexer_heads, mixer.indexer_head_dim, mixer.q_lora_rank, h, f),
    ]


def _recurrent(mixer: LinearAttention | Mamba2, h: int, f: Factors, gather: tuple[Message, ...]) -> list[Operator]:
    """Linear attention and state-space mixers: projections, a short convolution, a chunked scan, an output projection.

    The scan's FLOPs per token are those of the chunked form: state update and read 2·(2·d_k·d_v) per head, and inside a chunk
    of C tokens C·(d_k + d_v) (arXiv 2405.21060 section 6; the delta rule adds one more d_k·d_v product, arXiv 2412.06464).
    """
    t = f.tokens
    if isinstance(mixer, Mamba2):
        inner = mixer.heads * mixer.head_dim
        projected = 2 * inner + 2 * mixer.groups * mixer.state_size + mixer.heads
        heads, d_k, d_v, chunk, products = mixer.heads, mixer.state_size, mixer.head_dim, mixer.chunk_size, 2
    else:
        inner = mixer.value_heads * mixer.value_head_dim
        keys = mixer.key_heads * mixer.key_head_dim
        delta = mixer.kind == "gated_delta_net"
        projected = 2 * keys + 2 * inner + (2 * mixer.value_heads if delta else 0)
        heads, d_k, d_v, chunk = mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim, LINEAR_CHUNK
        products = 3 if delta else 2
    flops = t * heads / f.tp * (2.0 * products * d_k * d_v + chunk * (d_k + d_v))
    wide = BF16 * t * projected / f.tp
    return [
        Operator("in_proj", "gemm", f.zeros, m=t, n=projected / f.tp, k=h, saved_bytes=2 * wide, messages=gather),
        Operator("convolution_and_gates", "memory", f.zeros, forward_bytes=4 * wide, backward_bytes=6 * wide),
        Operator("scan", "attention", f.zeros, CORE_ATTN, flops=flops, full_flops=flops, seq=float(f.seq_len), head_dim=d_v),
        _output_projection(h, inner / f.tp, f),
    ]


def _output_projection(h: int, width: Floats, f: Factors) -> Operator:
    """Row-parallel projection back to the residual stream; it saves its input."""
    t = f.tokens
    return Operator(
        "out_proj",
        "gemm",
        f.zeros,
        m=t,
        n=float(h),
        k=width,
        saved_bytes=f.linear_bytes * t * width,
        messages=row_parallel(f, BF16 * t * h),
    )


def _rotary(f: Factors, width: Floats, passes: int, saved: Floats | float = 0.0, scaled: bool = False) -> Iterator[Operator]:
    """The kernel of Transformer Engine has no factor: where YaRN has one, Megatron-Core falls back to a chain (rope_utils.py)."""
    eager = scaled or "rotary" in f.eager
    moved, kernels = BF16 * f.tokens * width * passes * (EAGER_ROTARY if eager else 1.0), ROTARY_CHAIN if eager else (1, 1)
    yield Operator("rotary", "memory", f.zeros, forward_bytes=moved, backward_bytes=moved, kernels=kernels, saved_bytes=saved)


def _core(
    name: str, f: Factors, heads: Floats, d_qk: int, d_v: int, keys: float, full_keys: float, qkv: Floats, kv: Floats
) -> Operator:
    """Scores and weighted values: 2·t·keys·(d_qk + d_v) per head; the output is saved by the projection that follows.

    `qkv` and `kv` are widths of the rank's queries, keys and values, for the messages of cp.
    """
    t, seq = f.tokens, float(f.seq_len)
    per_key = 2.0 * t * heads * (d_qk + d_v)
    covered = np.where(f.cp_type == CP_TYPES.index("p2p"), seq / f.cp, seq)  # a step of a ring works on one rank's keys
    # A fused kernel keeps one log-sum-exp per row; an unfused one what its softmax and second product need, unless recomputed.
    kept = FP32 * t * heads if f.flash else f.footprint.score_bytes * t * heads * full_keys
    copy = BF16 * t * heads * d_v if f.footprint.copied_attention else 0.0
    return Operator(
        name,
        "attention",
        f.zeros,
        CORE_ATTN,
        flops=per_key * keys,
        full_flops=per_key * full_keys,
        seq=np.minimum(covered, 2 * keys),
        head_dim=(d_qk + d_v) / 2,
        saved_bytes=kept + copy,
        messages=_context_messages(f, BF16 * t * qkv, BF16 * t * kv, BF16 * t * heads * d_v),
    )


def _context_messages(f: Factors, qkv_bytes: Floats, kv_bytes: Floats, out_bytes: Floats) -> tuple[Message, ...]:
    """What cp sends around core attention.

    Ring: keys and values visit every rank, backward they do so again with their gradients. All-gather: gathered, backward too,
    where their gradients are scattered; nothing is hidden.
    Ulysses: queries, keys, values and the output change from sequence to heads and back.
    """
    ring = np.where(f.cp_type == CP_TYPES.index("p2p"), kv_bytes, 0.0)
    gathered = np.where(f.cp_type == CP_TYPES.index("allgather"), kv_bytes * f.cp, 0.0)
    ulysses = np.where(f.cp_type == CP_TYPES.index("a2a"), 1.0, 0.0)
    return (
        Message("cp", "ring", ring, 1.0, 2.0, beside=True),
        Message("cp", "all_gather", gathered, 1.0, 1.0),
        Message("cp", "reduce_scatter", gathered, 0.0, 1.0),
        Message("cp", "all_to_all", ulysses * qkv_bytes, 1.0, 1.0),
        Message("cp", "all_to_all", ulysses * out_bytes, 1.0, 1.0),
    )


def _mean_keys(seq_len: float, window: int | None) -> float:
    """Keys a causal query sees on average: S/2, or with a window w < S, w − w²/(2S)."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)


def _keys(seq_len: float, mixer: Attention) -> tuple[float, float]:
    """Mean keys of a causal query, and keys counted without the mask. A chunked window is a block of its own: half of it each."""
    if mixer.chunked and mixer.window is not None and mixer.window < seq_len:
        return mixer.window / 2, float(mixer.window)
    return _mean_keys(seq_len, mixer.window), _full_keys(seq_len, mixer.window)


def _full_keys(seq_len: float, window: int | None) -> float:
    """Keys that the convention without a causal mask counts."""
    return float(seq_len if window is None else min(window, seq_len))

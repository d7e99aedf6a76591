"""The one list of weights: what every kind of layer holds, and how each weight is divided over the ranks.

Memory, gradients, optimizer states and parameter counts are all read off these tensors. `h` is the hidden size. In MLA and
DeepSeek-V4's attention the down-projections and the shared key are whole on every TP rank, since all heads read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from .layer_kinds import (
    Attention,
    CompressedAttention,
    DenseMlp,
    Frozen,
    LatentAttention,
    LayerKind,
    LinearAttention,
    Mamba2,
    Mixer,
    MoeMlp,
)

Degree = int | npt.NDArray[np.integer]
Sharding = Literal["tp", "kv", "replicated", "expert", "expert_replicated"]
"""How a weight is divided: over tp; over min(tp, kv heads); not; over ep and etp; over ep only."""


class Tensor(Frozen):
    """One weight of the model, counted once."""

    name: str
    numel: int  # whole, over all experts
    sharding: Sharding
    kv_heads: int = 0  # with sharding "kv": heads it holds, the most ways it can be split
    active_numel: int = 0  # weights that one token uses (an expert tensor: top_k of its experts)

    def numel_per_rank(self, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> npt.NDArray[np.float64]:
        """Weights of it on one rank, the mean over ranks where a degree does not divide them; broadcasts over the degrees."""
        tp, ep, etp = np.broadcast_arrays(tp, ep, etp)
        ways: npt.NDArray[np.integer] = {
            "tp": tp,
            "kv": np.minimum(tp, max(self.kv_heads, 1)),
            "replicated": np.ones_like(tp),
            "expert": ep * etp,
            "expert_replicated": ep,
        }[self.sharding]
        return np.asarray(float(self.numel) / ways)


def weight(name: str, numel: int, sharding: Sharding = "tp", kv_heads: int = 0) -> Tensor:
    """A tensor that every token uses whole."""
    return Tensor(name=name, numel=numel, sharding=sharding, kv_heads=kv_heads, active_numel=numel)


def norm(name: str, vectors: int, h: int, norm_kind: Literal["rms", "layer"]) -> Iterator[Tensor]:
    """`vectors` norms of hidden size; a layer norm has a bias beside its weight."""
    if vectors:
        yield weight(name, vectors * h * (2 if norm_kind == "layer" else 1), "replicated")


def layer_tensors(kind: LayerKind, h: int, norm_kind: Literal["rms", "layer"], streams: int) -> Iterator[Tensor]:
    """One layer's weights: mixer, feed-forward part, norms, hyper-connections, extras."""
    if kind.mixer is not None:
        yield from _mixer(kind.mixer, h)
    if isinstance(kind.mlp, DenseMlp):
        yield from _dense(kind.mlp, h)
    elif kind.mlp is not None:
        yield from _moe(kind.mlp, h)
    yield from norm("norm", kind.norms, h, norm_kind)
    if streams > 1:
        blocks = (kind.mixer is not None) + (kind.mlp is not None)
        yield weight("hyper_connection", blocks * _hyper_connection(streams, h), "replicated")
    if kind.extra_parameters:
        yield weight("extra", kind.extra_parameters, "replicated")


def hyper_connection_head(streams: int, h: int) -> Iterator[Tensor]:
    """What merges the residual streams into one hidden state: a gate per stream (arXiv 2512.24880)."""
    if streams > 1:
        yield weight("hyper_connection.head", streams * streams * h + streams + 1, "replicated")


def _hyper_connection(streams: int, h: int) -> int:
    """Weights around one block: n gates in, n gates out and an n × n mix, from the n·h residual; their biases; three scales."""
    outputs = streams * (2 + streams)
    return outputs * streams * h + outputs + 3


def _mixer(mixer: Mixer, h: int) -> Iterator[Tensor]:
    match mixer:
        case Attention():
            return _attention(mixer, h)
        case LatentAttention():
            return _latent_attention(mixer, h)
        case CompressedAttention():
            return _compressed_attention(mixer, h)
        case LinearAttention(kind="gated_delta_net"):
            return _gated_delta_net(mixer, h)
        case LinearAttention():
            return _lightning(mixer, h)
        case Mamba2():
            return _mamba2(mixer, h)


def _attention(a: Attention, h: int) -> Iterator[Tensor]:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    q_out = q * (2 if a.output_gate else 1)
    yield weight("attention.q_proj", h * q_out)
    yield weight("attention.k_proj", h * kv, "kv", a.kv_heads)
    yield weight("attention.v_proj", h * kv, "kv", a.kv_heads)
    yield weight("attention.o_proj", q * h)
    if a.qkv_bias:
        yield weight("attention.q_bias", q_out)
        yield weight("attention.k_bias", kv, "kv", a.kv_heads)
        yield weight("attention.v_bias", kv, "kv", a.kv_heads)
    if a.out_bias:
        yield weight("attention.o_bias", h, "replicated")
    if a.qk_norm == "head":
        yield weight("attention.q_norm", a.head_dim, "replicated")
        yield weight("attention.k_norm", a.head_dim, "replicated")
    if a.qk_norm == "width":
        yield weight("attention.q_norm", q)
        yield weight("attention.k_norm", kv, "kv", a.kv_heads)
    if a.sinks:
        yield weight("attention.sinks", a.heads)


def _latent_attention(a: LatentAttention, h: int) -> Iterator[Tensor]:
    """arXiv 2405.04434 equations 9–15; the rope key (equation 15) is part of the key-value down-projection."""
    qk, kv_down = a.qk_nope_head_dim + a.qk_rope_head_dim, a.kv_lora_rank + a.qk_rope_head_dim
    if a.q_lora_rank is None:
        yield weight("attention.q_proj", h * a.heads * qk)
    else:
        yield weight("attention.q_down_proj", h * a.q_lora_rank, "replicated")
        yield weight("attention.q_norm", a.q_lora_rank, "replicated")
        yield weight("attention.q_up_proj", a.q_lora_rank * a.heads * qk)
    yield weight("attention.kv_down_proj", h * kv_down, "replicated")
    yield weight("attention.kv_norm", a.kv_lora_rank, "replicated")
    yield weight("attention.kv_up_proj", a.kv_lora_rank * a.heads * (a.qk_nope_head_dim + a.v_head_dim))
    yield weight("attention.o_proj", a.heads * a.v_head_dim * h)
    if a.qkv_bias:
        yield weight("attention.down_bias", kv_down + (a.q_lora_rank or 0), "replicated")
    if a.out_bias:
        yield weight("attention.o_bias", h, "replicated")
    if a.indexer_heads and a.q_lora_rank is not None:
        yield weight("attention.indexer.q_proj", a.q_lora_rank * a.indexer_heads * a.indexer_head_dim, "replicated")
        yield weight("attention.indexer.k_proj", h * a.indexer_head_dim, "replicated")
        yield weight("attention.indexer.k_norm", 2 * a.indexer_head_dim, "replicated")  # a layer norm, bias included
        yield weight("attention.indexer.head_weights", h * a.indexer_heads, "replicated")


def _compressed_attention(a: CompressedAttention, h: int) -> Iterator[Tensor]:
    """DeepSeek-V4: the output projection maps each group of heads to its own low rank, then all of them to h."""
    yield weight("attention.q_down_proj", h * a.q_lora_rank, "replicated")
    yield weight("attention.q_norm", a.q_lora_rank, "replicated")
    yield weight("attention.q_up_proj", a.q_lora_rank * a.heads * a.head_dim)
    yield weight("attention.kv_proj", h * a.head_dim, "replicated")
    yield weight("attention.kv_norm", a.head_dim, "replicated")
    yield weight("attention.o_down_proj", a.heads * a.head_dim * a.o_lora_rank)
    yield weight("attention.o_up_proj", a.o_groups * a.o_lora_rank * h)
    yield weight("attention.sinks", a.heads)
    if a.compress_ratio:
        yield weight("attention.compressor", _compressor(a, a.head_dim, h), "replicated")
    if a.indexer_heads:
        yield weight("attention.indexer.q_proj", a.q_lora_rank * a.indexer_heads * a.indexer_head_dim, "replicated")
        yield weight("attention.indexer.head_weights", h * a.indexer_heads, "replicated")
        yield weight("attention.indexer.compressor", _compressor(a, a.indexer_head_dim, h), "replicated")


def _compressor(a: CompressedAttention, head_dim: int, h: int) -> int:
    """Key-value and gate projections, one learned bias per position in a compressed window, and a norm."""
    width = head_dim * (2 if a.overlapping else 1)
    return 2 * h * width + a.compress_ratio * width + head_dim


def _gated_delta_net(a: LinearAttention, h: int) -> Iterator[Tensor]:
    """arXiv 2412.06464: queries, keys, values and output gate; decay and write strength per value head; short convolution."""
    keys, values = a.key_heads * a.key_head_dim, a.value_heads * a.value_head_dim
    yield weight("linear_attention.in_proj", h * (2 * keys + 2 * values + 2 * a.value_heads))
    if a.conv_kernel:
        yield weight("linear_attention.conv", (2 * keys + values) * a.conv_kernel)
    yield weight("linear_attention.decay", 2 * a.value_heads)  # A and its time-step bias
    yield weight("linear_attention.norm", a.value_head_dim, "replicated")
    yield weight("linear_attention.o_proj", values * h)


def _lightning(a: LinearAttention, h: int) -> Iterator[Tensor]:
    """arXiv 2501.08313 section 2.2: queries, keys, values and an output gate; the decay is fixed, not learned."""
    keys, values = a.key_heads * a.key_head_dim, a.value_heads * a.value_head_dim
    yield weight("linear_attention.in_proj", h * (2 * keys + 2 * values))
    if a.conv_kernel:
        yield weight("linear_attention.conv", (2 * keys + values) * a.conv_kernel)
    yield weight("linear_attention.norm", values)
    yield weight("linear_attention.o_proj", values * h)


def _mamba2(m: Mamba2, h: int) -> Iterator[Tensor]:
    """arXiv 2405.21060 section 8: z, x, B, C and Δ from one projection; convolution over x, B, C; A, D and Δ's bias per head."""
    inner, states = m.heads * m.head_dim, 2 * m.groups * m.state_size
    projected, convolved = 2 * inner + states + m.heads, inner + states
    yield weight("mamba.in_proj", h * projected)
    yield weight("mamba.conv", convolved * m.conv_kernel)
    if m.in_bias:
        yield weight("mamba.in_bias", projected)
    if m.conv_bias:
        yield weight("mamba.conv_bias", convolved)
    yield weight("mamba.heads", 3 * m.heads)
    yield weight("mamba.norm", inner)
    yield weight("mamba.o_proj", inner * h)
    if m.out_bias:
        yield weight("mamba.o_bias", h, "replicated")


def _dense(m: DenseMlp, h: int) -> Iterator[Tensor]:
    first = m.width * (2 if m.gated else 1)
    yield weight("mlp.fc1", h * first)
    yield weight("mlp.fc2", m.width * h)
    if m.bias:
        yield weight("mlp.fc1_bias", first)
        yield weight("mlp.fc2_bias", h, "replicated")


def _moe(m: MoeMlp, h: int) -> Iterator[Tensor]:
    yield weight("moe.router", m.experts * h, "replicated")
    if m.router_expert_bias:
        yield weight("moe.router.expert_bias", m.experts, "replicated")
    if m.router_linear_bias:
        yield weight("moe.router.bias", m.experts, "replicated")
    if m.latent_size is not None:
        yield weight("moe.latent_down", h * m.latent_size, "replicated")
        yield weight("moe.latent_up", m.latent_size * h, "replicated")
    yield from _experts(m, m.latent_size or h)
    if m.shared_width:
        yield weight("moe.shared.fc1", h * m.shared_width * (2 if m.gated else 1))
        yield weight("moe.shared.fc2", m.shared_width * h)
    if m.shared_gate:
        yield weight("moe.shared.gate", h, "replicated")


def _experts(m: MoeMlp, width_in: int) -> Iterator[Tensor]:
    first = m.width * (2 if m.gated else 1)
    yield _expert("moe.experts.fc1", m, width_in * first)
    yield _expert("moe.experts.fc2", m, m.width * width_in)
    if m.bias:
        yield _expert("moe.experts.fc1_bias", m, first)
        yield _expert("moe.experts.fc2_bias", m, width_in, "expert_replicated")


def _expert(name: str, m: MoeMlp, numel: int, sharding: Sharding = "expert") -> Tensor:
    return Tensor(name=name, numel=m.experts * numel, sharding=sharding, active_numel=m.top_k * numel)

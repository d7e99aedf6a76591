"""The kinds of decoder layer a model is built from: token mixers, feed-forward parts, and the layer that joins one of each.

Sizes are counts of weights, heads or tokens. A token mixer is attention in one of its forms, linear attention, a state-space block,
or nothing; a feed-forward part is dense, a mixture of experts, or nothing. Nemotron-H's layers hold one of the two.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

LARGEST = 10**9
"""No width, head count or vocabulary of a real model comes near it; a larger one is a typing error."""
Count = Annotated[int, Field(strict=True, gt=0, le=LARGEST)]  # strict: neither true nor "8" is a count
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]


class Frozen(BaseModel):
    """Base of every input record: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Attention(Frozen):
    """Softmax attention: MHA, GQA or MQA, full or sliding-window."""

    kind: Literal["attention"] = "attention"
    heads: Count
    kv_heads: Count
    head_dim: Count
    window: Count | None = None  # tokens a query may look back on; None is full causal attention
    chunked: bool = False  # the window is a fixed block of tokens, not a sliding one (Llama 4): half as many keys on average
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"  # one weight per head dimension, or per whole projection width
    output_gate: bool = False  # doubles the query projection (Qwen3-Next)
    sinks: bool = False  # one learned logit per head (gpt-oss)
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of a head's dimensions that rotary embedding turns
    scaled_rotary: bool = False  # rotary embedding also scales queries and keys (YaRN with a factor other than 1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; make it one")
        if self.chunked and self.window is None:
            raise ValueError("chunked is true but window is null; give the chunk's length as window")
        return self


class LatentAttention(Frozen):
    """Multi-head latent attention (arXiv 2405.04434 section 2.1), with DeepSeek-V3.2's sparse indexer where it has one."""

    kind: Literal["mla"] = "mla"
    heads: Count
    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    qkv_bias: bool = False  # on the down-projections; the up-projections have none
    out_bias: bool = False
    indexer_heads: CountOrZero = 0  # 0: no indexer
    indexer_head_dim: CountOrZero = 0
    indexer_topk: CountOrZero = 0  # keys a query attends to; the rest is masked

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_indexer(self.indexer_heads, self.indexer_head_dim, self.indexer_topk)
        if self.indexer_heads and self.q_lora_rank is None:
            raise ValueError("indexer_heads needs q_lora_rank, whose latent feeds the indexer's queries; give q_lora_rank")
        return self


class CompressedAttention(Frozen):
    """DeepSeek-V4's attention: low-rank queries, one shared key-value head over compressed tokens and a sliding window."""

    kind: Literal["compressed"] = "compressed"
    heads: Count
    head_dim: Count
    rope_head_dim: Count
    q_lora_rank: Count
    o_lora_rank: Count
    o_groups: Count
    window: Count
    compress_ratio: CountOrZero = 0  # tokens folded into one compressed key-value entry; 0: window only
    overlapping: bool = False  # an entry also sees the tokens of the one before it: the compressor projects to twice the width
    indexer_heads: CountOrZero = 0
    indexer_head_dim: CountOrZero = 0
    indexer_topk: CountOrZero = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_indexer(self.indexer_heads, self.indexer_head_dim, self.indexer_topk)
        if self.heads % self.o_groups:
            raise ValueError(f"heads {self.heads} is not a multiple of o_groups {self.o_groups}; make it one")
        if self.indexer_heads and not self.compress_ratio:
            raise ValueError("indexer_heads is given but compress_ratio is 0, which leaves it nothing to choose from; give a ratio")
        return self


class LinearAttention(Frozen):
    """Recurrent mixers with a matrix state per head: gated delta net (Qwen3-Next) and lightning attention (MiniMax-M1)."""

    kind: Literal["gated_delta_net", "lightning"]
    key_heads: Count
    value_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    conv_kernel: CountOrZero = 0


class Mamba2(Frozen):
    """Mamba-2 state-space mixer (arXiv 2405.21060)."""

    kind: Literal["mamba2"] = "mamba2"
    heads: Count
    head_dim: Count
    state_size: Count
    groups: Count
    conv_kernel: Count
    chunk_size: Count = 256
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False


Mixer = Annotated[Attention | LatentAttention | CompressedAttention | LinearAttention | Mamba2, Field(discriminator="kind")]


class DenseMlp(Frozen):
    """Feed-forward block: gated (three matrices) or plain (two)."""

    kind: Literal["mlp"] = "mlp"
    width: Count
    gated: bool = True
    bias: bool = False


class MoeMlp(Frozen):
    """Mixture of experts: router, routed experts, optional shared expert, optional latent width the routed experts run in."""

    kind: Literal["moe"] = "moe"
    experts: Count
    top_k: Count
    width: Count  # of one routed expert
    gated: bool = True
    bias: bool = False
    clamped: bool = False  # inputs of the activation are clamped (gpt-oss) …
    clamp_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # … at this; unset: not said
    gate_offset: Annotated[float, Field(allow_inf_nan=False)] = 0.0  # added to the linear projection beside the gate's
    shared_width: CountOrZero = 0  # all shared experts together; 0: none
    shared_gate: bool = False  # a sigmoid gate of hidden_size weights (Qwen2-MoE, Qwen3-Next)
    latent_size: Count | None = None  # routed experts work in this width instead of hidden_size (Nemotron-3 Super)
    router_expert_bias: bool = False  # auxiliary-loss-free balancing bias, one per expert
    router_linear_bias: bool = False  # gpt-oss
    routing_groups: Count = 1  # node-limited routing: experts are dealt to this many groups …
    routing_groups_topk: Count = 1  # … and a token is sent to at most this many of them
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalized_top_k: bool = True  # weights of a token's chosen experts add up to 1; false: their scores among all experts
    routed_scaling_factor: float = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} exceeds experts {self.experts}; a token goes to at most all of them")
        if self.clamp_limit is not None and not self.clamped:
            raise ValueError(f"clamp_limit {self.clamp_limit:g} is of inputs that are clamped; say clamped: true")
        if self.experts % self.routing_groups:
            raise ValueError(f"experts {self.experts} is not a multiple of routing_groups {self.routing_groups}; make it one")
        if self.routing_groups_topk > self.routing_groups:
            raise ValueError(f"routing_groups_topk {self.routing_groups_topk} exceeds routing_groups {self.routing_groups}")
        return self


Mlp = Annotated[DenseMlp | MoeMlp, Field(discriminator="kind")]


class LayerKind(Frozen):
    """One kind of decoder layer; norms counts its norm weight vectors of hidden_size."""

    mixer: Mixer | None = None
    mlp: Mlp | None = None
    norms: CountOrZero = 2
    extra_parameters: CountOrZero = 0  # replicated weights that no other field names (layer scalars)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mixer is None and self.mlp is None:
            raise ValueError("the kind has neither mixer nor mlp; give at least one")
        return self


class Mtp(Frozen):
    """Multi-token prediction (arXiv 2412.19437 section 2.2): each layer joins two hidden states (2h → h), then a decoder layer."""

    layers: Count
    kind: str  # name of the layer kind it repeats
    norms: CountOrZero = 3  # two input norms and the final one


class RopeScaling(Frozen):
    """How rotary positions are stretched beyond the context that was trained first: fields and defaults as in transformers.

    `rope_type` llama3 blends by wavelength (Llama 3.1); yarn by frequency, and scales queries and keys (arXiv 2309.00071);
    others are kept by name. `mscale` and `mscale_all_dim` make up YaRN's scale where the config does not give it.
    """

    rope_type: str = Field(min_length=1)
    factor: PositiveFloat | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: PositiveFloat = 1.0
    mscale_all_dim: NonNegativeFloat = 0.0
    attention_factor: PositiveFloat | None = None
    truncate: bool = True  # yarn: the blended range ends at whole dimensions

    @property
    def lacking(self) -> str:
        """Fields without which positions cannot be turned so, in words; "" where all are there."""
        return " and ".join(name for name in ROPE_SCALING.get(self.rope_type, ()) if getattr(self, name) is None)


ROPE_SCALING = {
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What each kind of scaling cannot do without."""


def _check_indexer(heads: int, head_dim: int, topk: int) -> None:
    if (heads > 0) != (head_dim > 0) or (heads > 0) != (topk > 0):
        raise ValueError(
            f"indexer_heads {heads}, indexer_head_dim {head_dim} and indexer_topk {topk} must all be positive or all be 0"
        )

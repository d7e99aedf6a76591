"""ModelSpec: an architecture as kinds of layers, and the one list of its weights.

A model is an embedding, an ordered sequence of decoder layers, a final norm, an LM head and optional multi-token-prediction
(MTP) layers. A layer kind is a token mixer (attention in one of its forms, linear attention, a state-space block, or nothing)
followed by a feed-forward part (dense, mixture of experts, or nothing). Nemotron-H's layers hold one of the two.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Frozen(BaseModel):
    """Base of every input record: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Attention(Frozen):
    """Softmax attention: MHA, GQA or MQA, full or sliding-window."""

    kind: Literal["attention"] = "attention"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None = None  # tokens a query may look back on; None is full causal attention
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "width"] = "none"  # one weight per head dimension, or per whole projection width
    output_gate: bool = False  # doubles the query projection (Qwen3-Next)
    sinks: bool = False  # one learned logit per head (gpt-oss)


class LatentAttention(Frozen):
    """Multi-head latent attention (arXiv 2405.04434 section 2.1), with DeepSeek-V3.2's sparse indexer where it has one."""

    kind: Literal["mla"] = "mla"
    heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    qkv_bias: bool = False
    indexer_heads: int = 0  # 0: no indexer
    indexer_head_dim: int = 0
    indexer_topk: int = 0  # keys a query attends to; the rest is masked


class CompressedAttention(Frozen):
    """DeepSeek-V4's attention: low-rank queries, one shared key-value head over compressed tokens and a sliding window."""

    kind: Literal["compressed"] = "compressed"
    heads: PositiveInt
    head_dim: PositiveInt
    rope_head_dim: PositiveInt
    q_lora_rank: PositiveInt
    o_lora_rank: PositiveInt
    o_groups: PositiveInt
    window: PositiveInt
    compress_ratio: int = 0  # tokens folded into one compressed key-value entry; 0: window only
    indexer_heads: int = 0
    indexer_head_dim: int = 0
    indexer_topk: int = 0


class LinearAttention(Frozen):
    """Recurrent mixers with a matrix state per head: gated delta net (Qwen3-Next) and lightning attention (MiniMax-M1)."""

    kind: Literal["gated_delta_net", "lightning"]
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: int = 0


class Mamba2(Frozen):
    """Mamba-2 state-space mixer (arXiv 2405.21060)."""

    kind: Literal["mamba2"] = "mamba2"
    heads: PositiveInt
    head_dim: PositiveInt
    state_size: PositiveInt
    groups: PositiveInt
    conv_kernel: PositiveInt
    chunk_size: PositiveInt = 256
    conv_bias: bool = True
    in_bias: bool = False


Mixer = Annotated[Attention | LatentAttention | CompressedAttention | LinearAttention | Mamba2, Field(discriminator="kind")]


class DenseMlp(Frozen):
    """Feed-forward block: gated (three matrices) or plain (two)."""

    kind: Literal["mlp"] = "mlp"
    width: PositiveInt
    gated: bool = True
    bias: bool = False


class MoeMlp(Frozen):
    """Mixture of experts: router, routed experts, optional shared expert, optional latent width the routed experts run in."""

    kind: Literal["moe"] = "moe"
    experts: PositiveInt
    top_k: PositiveInt
    width: PositiveInt  # of one routed expert
    gated: bool = True
    bias: bool = False
    shared_width: int = 0  # all shared experts together; 0: none
    shared_gate: bool = False  # a sigmoid gate of hidden_size weights (Qwen2-MoE, Qwen3-Next)
    latent_size: PositiveInt | None = None  # routed experts work in this width instead of hidden_size (Nemotron-3 Super)
    router_expert_bias: bool = False  # auxiliary-loss-free balancing bias, one per expert
    router_linear_bias: bool = False  # gpt-oss
    routing_groups: int = 1  # node-limited routing: experts are dealt to this many groups …
    routing_groups_topk: int = 1  # … and a token is sent to at most this many of them
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    routed_scaling_factor: float = 1.0


Mlp = Annotated[DenseMlp | MoeMlp, Field(discriminator="kind")]


class LayerKind(Frozen):
    """One kind of decoder layer; norms counts its norm weight vectors of hidden_size."""

    mixer: Mixer | None = None
    mlp: Mlp | None = None
    norms: int = 2
    extra_parameters: int = 0  # replicated weights that no other field names (hyper-connections, layer scalars)


class Mtp(Frozen):
    """Multi-token prediction (arXiv 2412.19437 section 2.2): each layer joins two hidden states (2h → h), then one decoder layer."""

    layers: PositiveInt
    kind: str  # name of the layer kind it repeats
    norms: int = 3  # two input norms and the final one


Sharding = Literal["tp", "kv", "replicated", "expert", "expert_replicated"]
"""How a weight is divided: over tp; over min(tp, kv heads); not; over ep and etp; over ep only."""


class Tensor(Frozen):
    """One weight of the model, counted once."""

    name: str
    numel: int  # whole, over all experts
    sharding: Sharding
    kv_heads: int = 0  # with sharding "kv": heads it holds, the most ways it can be split
    active_numel: int = 0  # weights that one token uses (an expert tensor: top_k of its experts)


class ModelSpec(Frozen):
    """A language model's architecture.

    `layers` lists the decoder layers in order by kind name; an item may repeat a kind ("58*moe") or a sequence in
    parentheses ("8*(linear linear linear full)").
    """

    name: str
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    kinds: dict[str, LayerKind]
    layers: tuple[str, ...]
    tied_embeddings: bool = False
    learned_positions: bool = False
    norm: Literal["rms", "layer"] = "rms"  # a layer norm has a bias beside its weight
    mtp: Mtp | None = None
    final_norm: bool = True
    source: str = ""

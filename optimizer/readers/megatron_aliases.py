"""Options of the Megatron family that no exporter writes, by the knob that they set: older names, and other ways to say a thing."""

from __future__ import annotations

from collections.abc import Mapping

MEGATRON_LM = {
    "num-layers-per-virtual-pipeline-stage": "vpp_layers",
    "account-for-embedding-in-pipeline-split": "count_embedding",
    "account-for-loss-in-pipeline-split": "count_loss",
    "vocab-size": "vocab",
    "use-torch-fsdp2": "torch_fsdp",
    "recompute-activations": "recompute_activations",
    "distribute-saved-activations": "saved_in_parts",
    "hybrid-layer-pattern": "hybrid",
    "hybrid-override-pattern": "hybrid",
    "hybrid-attention-ratio": "hybrid",
    "world-size": "devices",
    "use-rotary-position-embeddings": "rotary",
    "rotary-interleaved": "interleaved_rotary",
    "rope-type": "rope_type",
    "n-shared-experts": "shared_experts",
    "cross-entropy-fusion-impl": "loss_kernel",
    "fp8-param-gather": "fp8_parameters",
    "fp8-param": "fp8_parameters",
}
MINDSPEED_LLM = {
    # activations that gate whatever --swiglu says (mindspeed_llm/core/transformer/mlp.py)
    "geglu": "gated",
    "gelu-tanh": "gated",
    # deprecated names, still taken (mindspeed_llm/features_manager/arguments/deprecated_args.py)
    "moe-intermediate-size": "expert_width",
    "n-group": "routing_groups",
    "topk-group": "routing_groups_topk",
    "routed-scaling-factor": "routed_scaling",
    "qk-rope-head-dim": "qk_rope_head_dim",
    "qk-nope-head-dim": "qk_nope_head_dim",
    "multi-head-latent-attention": "mla",
    "use-mc2": "overlap_tp",
    "partial-rotary-factor": "rotary_fraction",
    "moe-tp-extend-ep": "tp_extends_ep",
    "reuse-fp32-param": "reuse_fp32",
    "swap-attention": "swap_attention",
    # layers of other mixers, which these options alone do not tell in full
    "full-attention-interval": "linear_pattern",
    "kv-compress": "attention_variant",
    "compress-ratios": "attention_variant",
}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "megatron-lm": MEGATRON_LM,
    "mindspeed-llm": {**MEGATRON_LM, **MINDSPEED_LLM},
}
"""Framework → option without dashes → knob."""

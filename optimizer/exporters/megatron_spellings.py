"""The table of knobs for Megatron-LM, and for MindSpeed-LLM and Megatron-Bridge, which stand on it.

Versions were read off the option lists of the tags core_v0.12.1 … core_v0.19.0 of Megatron-LM and v2.3.0 … v26.1.0 of
MindSpeed-LLM, which stands on Megatron core_v0.12.1, and off the classes of Megatron-Bridge 0.3 … 0.6, which stands on
Megatron-Core 0.16 or later.
"""

from __future__ import annotations

from collections.abc import Sequence

from .spelling import Code, Spelling, pattern

ABSENT: tuple[Spelling, ...] = ()
"""Where a framework does without a knob that its base has."""

# --- Megatron-LM -------------------------------------------------------------------------------------------------------------

MEGATRON_LM: dict[str, tuple[Spelling, ...]] = {
    # the grid
    "tp": (Spelling("--tensor-model-parallel-size"),),
    "cp": (Spelling("--context-parallel-size"),),
    "pp": (Spelling("--pipeline-model-parallel-size"),),
    "ep": (Spelling("--expert-model-parallel-size"),),
    "etp": (Spelling("--expert-tensor-parallel-size"),),
    "sequence_parallel": (Spelling("--sequence-parallel"),),
    "rank_order_pp_inside_dp": (Spelling("--use-tp-pp-dp-mapping"),),
    "micro_batch": (Spelling("--micro-batch-size"),),
    "global_batch": (Spelling("--global-batch-size"),),
    "seq_len": (Spelling("--seq-length"),),
    # context parallelism; "allgather" in the help text is Transformer Engine's all_gather
    "cp_type": (Spelling("--cp-comm-type", values={"allgather": "all_gather"}),),
    "cp_hierarchy": (Spelling("--hierarchical-context-parallel-sizes"),),
    # stages
    "vpp": (Spelling("--num-virtual-stages-per-pipeline-rank"),),
    "layout": (Spelling("--pipeline-model-parallel-layout", since=(0, 13)),),
    "microbatch_group": (Spelling("--microbatch-group-size-per-virtual-pipeline-stage"),),
    "first_stage_layers": (Spelling("--decoder-first-pipeline-num-layers"),),
    "last_stage_layers": (Spelling("--decoder-last-pipeline-num-layers"),),
    "no_pp_overlap": (Spelling("--no-overlap-p2p-communication"),),
    # optimizer states and gradients
    "zero1": (Spelling("--use-distributed-optimizer"),),
    "fsdp": (Spelling("--use-megatron-fsdp", since=(0, 14)),),
    "fsdp_strategy": (
        Spelling("--data-parallel-sharding-strategy", values={"zero2": "optim_grads", "zero3": "optim_grads_params"}),
    ),
    "fsdp_copies": (Spelling("--num-distributed-optimizer-instances", since=(0, 16)),),
    "fsdp_outer": (Spelling("--outer-dp-sharding-strategy", since=(0, 16)),),
    "checkpoint_format": (Spelling("--ckpt-format"),),
    "overlap_gradients": (Spelling("--overlap-grad-reduce"),),
    "overlap_parameters": (Spelling("--overlap-param-gather"),),
    "gradient_bucket": (Spelling("--ddp-bucket-size"),),
    "gradients_fp32": (Spelling("--accumulate-allreduce-grads-in-fp32"),),
    "gradients_bf16": (Spelling("--grad-reduce-in-bf16"),),
    "precise_optimizer": (Spelling("--use-precision-aware-optimizer"),),
    "first_moment": (Spelling("--exp-avg-dtype", values_since={"bf16": (0, 13)}),),
    "second_moment": (Spelling("--exp-avg-sq-dtype", values_since={"bf16": (0, 13)}),),
    "optimizer_offload": (Spelling("--optimizer-cpu-offload"),),
    "optimizer_offload_fraction": (Spelling("--optimizer-offload-fraction"),),
    "overlap_optimizer_offload": (Spelling("--overlap-cpu-optimizer-d2h-h2d"),),
    "activation_offload_layers": (Spelling("--cpu-offloading-num-layers", since=(0, 16)),),
    # recompute
    "recompute": (Spelling("--recompute-granularity"),),
    "recompute_method": (Spelling("--recompute-method"),),
    "recompute_layers": (Spelling("--recompute-num-layers"),),
    "recompute_modules": (Spelling("--recompute-modules", values_since={"shared_experts": (0, 14)}),),
    # overlap of communication and kernels
    "overlap_tp": (Spelling("--tp-comm-overlap"),),
    "overlap_ep": (Spelling("--overlap-moe-expert-parallel-comm", since=(0, 14)),),
    "fused_cross_entropy": (Spelling("--cross-entropy-loss-fusion"),),
    "unfused_swiglu": (Spelling("--no-bias-swiglu-fusion"),),
    "unfused_gelu": (Spelling("--no-bias-gelu-fusion"),),
    "unfused_dropout": (Spelling("--no-bias-dropout-fusion"),),
    "unfused_rope": (Spelling("--no-rope-fusion"),),
    "unfused_softmax": (Spelling("--no-masked-softmax-fusion"),),
    "attention_kernel": (Spelling("--attention-backend"),),
    # precision
    "bf16": (Spelling("--bf16"),),
    "fp16": (Spelling("--fp16"),),
    "fp8": (Spelling("--fp8-format"),),
    "fp8_recipe": (Spelling("--fp8-recipe", values_since={"blockwise": (0, 13)}),),
    "fp4": (Spelling("--fp4-format", since=(0, 15)),),
    # the architecture
    "layers": (Spelling("--num-layers"),),
    "hidden_size": (Spelling("--hidden-size"),),
    "heads": (Spelling("--num-attention-heads"),),
    "head_dim": (Spelling("--kv-channels"),),
    "ffn_width": (Spelling("--ffn-hidden-size"),),
    "max_positions": (Spelling("--max-position-embeddings"),),
    "positions": (Spelling("--position-embedding-type"),),
    "rotary_fraction": (Spelling("--rotary-percent"),),  # of 1, whatever its name
    "norm": (Spelling("--normalization", values={"rms": "RMSNorm", "layer": "LayerNorm"}),),
    "gated": (Spelling("--swiglu"),),
    "quick_gated": (Spelling("--quick-geglu", since=(0, 15)),),
    "gate_offset": (Spelling("--glu-linear-offset", since=(0, 15)),),
    "activation_clamp": (Spelling("--activation-func-clamp-value", since=(0, 15)),),
    "no_bias": (Spelling("--disable-bias-linear"),),
    "qkv_bias": (Spelling("--add-qkv-bias"),),
    "untied": (Spelling("--untie-embeddings-and-output-weights"),),
    "vocab_divisor": (Spelling("--make-vocab-size-divisible-by"),),
    "padded_vocab": (Spelling("--padded-vocab-size", since=(0, 14)),),
    "grouped_query": (Spelling("--group-query-attention"),),
    "kv_heads": (Spelling("--num-query-groups"),),
    "qk_norm": (Spelling("--qk-layernorm"),),
    "output_gate": (Spelling("--attention-output-gate", since=(0, 16)),),
    "attention_sinks": (Spelling("--softmax-type", since=(0, 15)),),
    "window": (Spelling("--window-size", since=(0, 15), convert="({},0)".format),),
    "window_pattern": (Spelling("--window-attn-skip-freq", since=(0, 15), convert=pattern),),
    "mla": (Spelling("--multi-latent-attention"),),
    "q_lora_rank": (Spelling("--q-lora-rank"),),
    "kv_lora_rank": (Spelling("--kv-lora-rank"),),
    "qk_nope_head_dim": (Spelling("--qk-head-dim"),),
    "qk_rope_head_dim": (Spelling("--qk-pos-emb-head-dim"),),
    "v_head_dim": (Spelling("--v-head-dim"),),
    "attention_variant": (Spelling("--experimental-attention-variant", since=(0, 16)),),
    "indexer_heads": (Spelling("--dsa-indexer-n-heads", since=(0, 16)),),
    "indexer_head_dim": (Spelling("--dsa-indexer-head-dim", since=(0, 16)),),
    "indexer_topk": (Spelling("--dsa-indexer-topk", since=(0, 16)),),
    "linear_pattern": (Spelling("--linear-attention-freq", since=(0, 16), convert=pattern),),
    "linear_conv": (Spelling("--linear-conv-kernel-dim", since=(0, 16)),),
    "linear_key_head_dim": (Spelling("--linear-key-head-dim", since=(0, 16)),),
    "linear_value_head_dim": (Spelling("--linear-value-head-dim", since=(0, 16)),),
    "linear_key_heads": (Spelling("--linear-num-key-heads", since=(0, 16)),),
    "linear_value_heads": (Spelling("--linear-num-value-heads", since=(0, 16)),),
    "mtp": (Spelling("--mtp-num-layers"),),
    # mixture of experts
    "experts": (Spelling("--num-experts"),),
    "top_k": (Spelling("--moe-router-topk"),),
    "expert_width": (Spelling("--moe-ffn-hidden-size"),),
    "moe_pattern": (Spelling("--moe-layer-freq", convert=pattern),),
    "shared_width": (Spelling("--moe-shared-expert-intermediate-size"),),
    "shared_gate": (Spelling("--moe-shared-expert-gate", since=(0, 16)),),
    "latent_size": (Spelling("--moe-latent-size", since=(0, 16)),),
    "score_function": (Spelling("--moe-router-score-function", values_since={"sqrtsoftplus": (0, 18)}),),
    "pre_softmax": (Spelling("--moe-router-pre-softmax"),),  # of all experts, not of the chosen ones alone
    "expert_bias": (Spelling("--moe-router-enable-expert-bias"),),
    "routing_groups": (Spelling("--moe-router-num-groups"),),
    "routing_groups_topk": (Spelling("--moe-router-group-topk"),),
    "routed_scaling": (Spelling("--moe-router-topk-scaling-factor"),),
    "router_dtype": (Spelling("--moe-router-dtype"),),
    "grouped_gemm": (Spelling("--moe-grouped-gemm"),),
    "permute_fusion": (Spelling("--moe-permute-fusion"),),
    "dispatcher": (Spelling("--moe-token-dispatcher-type"),),
    "deepep_alone": (Spelling("--moe-enable-deepep", until=(0, 16)),),
    "flex_backend": (Spelling("--moe-flex-dispatcher-backend", since=(0, 16)),),
    # what has no choice, and what a plan leaves to the person who launches
    "mcore_models": (Spelling("--use-mcore-models"),),
    "unfused_accumulation": (Spelling("--no-gradient-accumulation-fusion"),),
    "attention_dropout": (Spelling("--attention-dropout"),),
    "hidden_dropout": (Spelling("--hidden-dropout"),),
    "tokenizer_type": (Spelling("--tokenizer-type"),),
    "tokenizer": (Spelling("--tokenizer-model"),),
    "data_path": (Spelling("--data-path"),),
    "data_split": (Spelling("--split"),),
    "save": (Spelling("--save"),),
    "load": (Spelling("--load"),),
    "save_interval": (Spelling("--save-interval"),),
    "steps": (Spelling("--train-iters"),),
    "learning_rate": (Spelling("--lr"),),
    "norm_epsilon": (Spelling("--norm-epsilon"),),
    "rotary_base": (Spelling("--rotary-base"),),
    "load_balancing": (Spelling("--moe-router-load-balancing-type"),),
    "aux_loss_coefficient": (Spelling("--moe-aux-loss-coeff"),),
}

# --- MindSpeed-LLM: what it adds to, or spells unlike, Megatron-LM 0.12.1 ----------------------------------------------------

SELECTIVE_FLAGS = {"layernorm": "recompute_norm", "moe_act": "recompute_activation", "mla_up_proj": "recompute_mla"}
"""Modules that MindSpeed-LLM recomputes alone, and the knob of each."""
MINDSPEED_LLM: dict[str, tuple[Spelling, ...]] = {
    "cp_type": (
        Spelling(
            "--context-parallel-algo",
            values={
                "p2p": "megatron_cp_algo",
                "a2a": "ulysses_cp_algo",
                "a2a+p2p": "hybrid_cp_algo",
                "allgather": "kvallgather_cp_algo",
            },
            values_since={"allgather": (26, 0)},
        ),
    ),
    "cp_hierarchy": ABSENT,
    "cp_all_to_all": (Spelling("--ulysses-degree-in-cp"),),
    "overlap_cp": (Spelling("--use-cp-send-recv-overlap"),),
    "vpp_layers": (Spelling("--num-layers-per-virtual-pipeline-stage"),),
    "layout": (Spelling("--pipeline-model-parallel-layout", since=(26, 1)),),
    "noop_layers": (Spelling("--noop-layers"),),
    "layer_list": (Spelling("--num-layer-list"),),
    "schedule": (Spelling("--schedules-method"),),
    "optimizer_offload": (Spelling("--swap-optimizer"),),
    "optimizer_offload_fraction": ABSENT,
    "recompute_ahead": (Spelling("--recompute-in-advance"),),
    "recompute_in_bubbles": (Spelling("--recompute-in-bubble"),),
    "overlap_tp": (Spelling("--use-ascend-mc2"),),
    "overlap_ep": (Spelling("--moe-alltoall-overlap-comm"),),
    "overlap_permutation": (Spelling("--moe-permutation-async-comm"),),
    "fused_accumulation": (Spelling("--gemm-gradient-accumulation-fusion"),),
    "tokenizer": (Spelling("--tokenizer-name-or-path"),),
    "backend": (Spelling("--distributed-backend"),),
    "topk_normalised": (Spelling("--norm-topk-prob"),),
    "overlap_ep_dualpipe": (Spelling("--moe-fb-overlap"),),
    "attention_kernel": (Spelling("--use-flash-attn"),),
    "recompute_activation": (Spelling("--recompute-activation-function"),),
    "recompute_norm": (Spelling("--recompute-norm"),),
    "recompute_mla": (Spelling("--recompute-mla-up-proj"),),
    "fused_swiglu": (Spelling("--use-fused-swiglu"),),
    "fused_norm": (Spelling("--use-fused-rmsnorm"),),
    "fused_rope": (Spelling("--use-fused-rotary-pos-emb"),),
    "implementation": (Spelling("--transformer-impl"),),
    "layer_spec": (Spelling("--spec"),),
    "padded_vocab": (Spelling("--padded-vocab-size"),),
    "moe_pattern": (Spelling("--moe-layer-freq"),),
    "dense_first": (Spelling("--first-k-dense-replace"),),
    "shared_gate": (Spelling("--shared-expert-gate"),),
    "window": (Spelling("--sliding-window"),),
    "fp8": (Spelling("--fp8-format", since=(26, 0)),),
    "fp8_recipe": (Spelling("--fp8-recipe", since=(26, 0)),),
    "indexer": (Spelling("--enable-dsa-indexer"),),
    "indexer_heads": (Spelling("--index-n-heads"),),
    "indexer_head_dim": (Spelling("--index-head-dim"),),
    "indexer_topk": (Spelling("--index-topk"),),
    "score_function": (Spelling("--moe-router-score-function", values_since={"sqrtsoftplus": (26, 1)}),),
}


# --- Megatron-Bridge: Megatron-LM's options are fields of its ConfigContainer, mostly by the same names -----------------------


def _listed(layers: Sequence[bool]) -> Code:
    return Code(pattern(layers))


def _field(option: Spelling) -> Spelling:
    values = {name: value for name, value in option.values.items() if isinstance(value, str)}
    return Spelling(f"model.{option.text[2:].replace('-', '_')}", values=values, values_since=option.values_since)


MEGATRON_BRIDGE: dict[str, tuple[Spelling, ...]] = {
    **{knob: (_field(options[-1]),) for knob, options in MEGATRON_LM.items()},
    "rank_order_pp_inside_dp": (Spelling("dist.use_tp_pp_dp_mapping"),),
    "micro_batch": (Spelling("train.micro_batch_size"),),
    "global_batch": (Spelling("train.global_batch_size"),),
    "data_seq_len": (Spelling("dataset.seq_length"),),
    "pipeline_type": (Spelling("model.pipeline_dtype", values={"bf16": Code("torch.bfloat16"), "fp16": Code("torch.float16")}),),
    "vpp": (Spelling("model.virtual_pipeline_model_parallel_size"),),
    "microbatch_group": (Spelling("model.microbatch_group_size_per_vp_stage"),),
    "first_stage_layers": (Spelling("model.num_layers_in_first_pipeline_stage"),),
    "last_stage_layers": (Spelling("model.num_layers_in_last_pipeline_stage"),),
    "pp_overlap": (Spelling("model.overlap_p2p_comm"),),
    "no_pp_overlap": (Spelling("model.overlap_p2p_comm", on=False),),
    "pp_unbatched": (Spelling("model.batch_p2p_comm", on=False),),
    "zero1": (Spelling("ddp.use_distributed_optimizer"),),
    "optimizer_zero1": (Spelling("optimizer.use_distributed_optimizer"),),
    "fsdp": (Spelling("ddp.use_megatron_fsdp"),),
    "fsdp_strategy": (
        Spelling("ddp.data_parallel_sharding_strategy", values={"zero2": "optim_grads", "zero3": "optim_grads_params"}),
    ),
    "fsdp_copies": (Spelling("ddp.num_distributed_optimizer_instances"),),
    "fsdp_outer": (Spelling("ddp.outer_dp_sharding_strategy"),),
    "checkpoint_format": (Spelling("checkpoint.ckpt_format"),),
    "overlap_gradients": (Spelling("ddp.overlap_grad_reduce"),),
    "overlap_parameters": (Spelling("ddp.overlap_param_gather"),),
    "gradient_bucket": (Spelling("ddp.bucket_size"),),
    "gradients_fp32": (Spelling("mixed_precision.grad_reduce_in_fp32"),),
    "gradients_bf16": (Spelling("mixed_precision.grad_reduce_in_fp32", on=False),),
    "precise_optimizer": (Spelling("optimizer.use_precision_aware_optimizer"),),
    "first_moment": (Spelling("optimizer.exp_avg_dtype", values={"bf16": Code("torch.bfloat16")}),),
    "second_moment": (Spelling("optimizer.exp_avg_sq_dtype", values={"bf16": Code("torch.bfloat16")}),),
    "optimizer_offload": (Spelling("optimizer.optimizer_cpu_offload"),),
    "optimizer_offload_fraction": (Spelling("optimizer.optimizer_offload_fraction"),),
    "overlap_optimizer_offload": (Spelling("optimizer.overlap_cpu_optimizer_d2h_h2d"),),
    "activation_offload": (Spelling("model.cpu_offloading"),),
    "recompute_modules": (Spelling("model.recompute_modules", many=True),),
    "fused_activation": (Spelling("model.bias_activation_fusion"),),
    "fused_dropout": (Spelling("model.bias_dropout_fusion"),),
    "fused_rope": (Spelling("model.apply_rope_fusion"),),
    "unfused_swiglu": (Spelling("model.bias_activation_fusion", on=False),),
    "unfused_gelu": ABSENT,  # one field for both
    "unfused_dropout": (Spelling("model.bias_dropout_fusion", on=False),),
    "unfused_rope": (Spelling("model.apply_rope_fusion", on=False),),
    "unfused_softmax": (Spelling("model.masked_softmax_fusion", on=False),),
    "unfused_accumulation": (Spelling("model.gradient_accumulation_fusion", on=False),),
    "loss_kernel": (Spelling("model.cross_entropy_fusion_impl"),),
    "attention_kernel": (Spelling("model.attention_backend", values={"unfused": Code("AttnBackend.unfused")}),),
    "bf16": (Spelling("mixed_precision", on="bf16_mixed"),),
    "fp16": (Spelling("mixed_precision", on="fp16_mixed"),),
    "fp8": ABSENT,  # the recipe says it
    "fp8_recipe": (
        Spelling(
            "mixed_precision",
            values={
                "mxfp8": "bf16_with_mxfp8_mixed",
                "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
                "tensorwise": "bf16_with_fp8_current_scaling_mixed",
            },
        ),
    ),
    "fp4": (Spelling("mixed_precision", values={"e2m1": "bf16_with_nvfp4_mixed"}),),
    "max_positions": ABSENT,  # the table of learned positions is as long as seq_length
    "gated": (Spelling("model.gated_linear_unit"),),
    "quick_gated": ABSENT,  # the function says it
    "activation": (
        Spelling(
            "model.activation_func",
            values={"quick_gelu": Code("quick_gelu")},
            convert=lambda name: Code(f"torch.nn.functional.{name}"),
        ),
    ),
    "no_bias": (Spelling("model.add_bias_linear", on=False),),
    "untied": (Spelling("model.share_embeddings_and_output_weights", on=False),),
    "padded_vocab": ABSENT,
    "vocab": (Spelling("model.vocab_size"),),
    "vocab_padded": (Spelling("model.should_pad_vocab"),),
    "grouped_query": ABSENT,
    "window": (Spelling("model.window_size", convert=lambda keys: Code(f"({keys}, 0)")),),
    "window_pattern": (Spelling("model.window_attn_skip_freq", convert=_listed),),
    "linear_pattern": (Spelling("model.linear_attention_freq", convert=_listed),),
    "experts": (Spelling("model.num_moe_experts"),),
    "moe_pattern": (Spelling("model.moe_layer_freq", convert=_listed),),
    "deepep_alone": ABSENT,
    "mcore_models": ABSENT,
    "attention_dropout": (Spelling("model.attention_dropout"),),
    "hidden_dropout": (Spelling("model.hidden_dropout"),),
    "tokenizer_type": (Spelling("tokenizer.tokenizer_type"),),
    "tokenizer": (Spelling("tokenizer.tokenizer_model"),),
    "data_path": (
        Spelling("dataset.blend", until=(0, 4), convert=lambda path: Code(f"([{path!r}], None)")),
        Spelling("dataset.data_path", since=(0, 4), many=True),
    ),
    "data_split": (Spelling("dataset.split"),),
    "save": (Spelling("checkpoint.save"),),
    "load": (Spelling("checkpoint.load"),),
    "save_interval": (Spelling("checkpoint.save_interval"),),
    "steps": (Spelling("train.train_iters"),),
    "learning_rate": (Spelling("optimizer.lr"),),
    "norm_epsilon": (Spelling("model.layernorm_epsilon"),),
}

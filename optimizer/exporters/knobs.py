"""The one table of knobs: how each framework, from which version on, spells what a plan decides.

A knob that a framework lacks is refused in words; it is never dropped. Versions were read off the option lists of the tags
core_v0.12.1 … core_v0.19.0 of Megatron-LM and v2.3.0 … v26.1.0 of MindSpeed-LLM, which stands on Megatron core_v0.12.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...search_spaces.errors import Infeasible, InputError

Version = tuple[int, ...]
NEWEST: Version = (9999,)


@dataclass(frozen=True)
class Flag:
    """A knob's spelling from version `since` on and before `until`.

    `values` renames the values that the framework calls otherwise; `values_since` holds back the values that came later.
    """

    text: str
    since: Version = ()
    until: Version | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    values_since: Mapping[str, Version] = field(default_factory=dict)


# --- Megatron-LM -------------------------------------------------------------------------------------------------------------

MEGATRON_LM: dict[str, tuple[Flag, ...]] = {
    # the grid
    "tp": (Flag("--tensor-model-parallel-size"),),
    "cp": (Flag("--context-parallel-size"),),
    "pp": (Flag("--pipeline-model-parallel-size"),),
    "ep": (Flag("--expert-model-parallel-size"),),
    "etp": (Flag("--expert-tensor-parallel-size"),),
    "sequence_parallel": (Flag("--sequence-parallel"),),
    "rank_order_pp_inside_dp": (Flag("--use-tp-pp-dp-mapping"),),
    "micro_batch": (Flag("--micro-batch-size"),),
    "global_batch": (Flag("--global-batch-size"),),
    "seq_len": (Flag("--seq-length"),),
    # context parallelism; "allgather" in the help text is Transformer Engine's all_gather
    "cp_type": (Flag("--cp-comm-type", values={"allgather": "all_gather"}),),
    "cp_hierarchy": (Flag("--hierarchical-context-parallel-sizes"),),
    # stages
    "vpp": (Flag("--num-virtual-stages-per-pipeline-rank"),),
    "layout": (Flag("--pipeline-model-parallel-layout", since=(0, 13)),),
    "first_stage_layers": (Flag("--decoder-first-pipeline-num-layers"),),
    "last_stage_layers": (Flag("--decoder-last-pipeline-num-layers"),),
    "no_pp_overlap": (Flag("--no-overlap-p2p-communication"),),
    # optimizer states and gradients
    "zero1": (Flag("--use-distributed-optimizer"),),
    "fsdp": (Flag("--use-megatron-fsdp", since=(0, 14)),),
    "fsdp_strategy": (Flag("--data-parallel-sharding-strategy", values={"zero2": "optim_grads", "zero3": "optim_grads_params"}),),
    "fsdp_copies": (Flag("--num-distributed-optimizer-instances", since=(0, 16)),),
    "fsdp_outer": (Flag("--outer-dp-sharding-strategy", since=(0, 16)),),
    "checkpoint_format": (Flag("--ckpt-format"),),
    "overlap_gradients": (Flag("--overlap-grad-reduce"),),
    "overlap_parameters": (Flag("--overlap-param-gather"),),
    "gradients_fp32": (Flag("--accumulate-allreduce-grads-in-fp32"),),
    "gradients_bf16": (Flag("--grad-reduce-in-bf16"),),
    "precise_optimizer": (Flag("--use-precision-aware-optimizer"),),
    "first_moment": (Flag("--exp-avg-dtype", values_since={"bf16": (0, 13)}),),
    "second_moment": (Flag("--exp-avg-sq-dtype", values_since={"bf16": (0, 13)}),),
    "optimizer_offload": (Flag("--optimizer-cpu-offload"),),
    "optimizer_offload_fraction": (Flag("--optimizer-offload-fraction"),),
    "overlap_optimizer_offload": (Flag("--overlap-cpu-optimizer-d2h-h2d"),),
    "activation_offload_layers": (Flag("--cpu-offloading-num-layers", since=(0, 16)),),
    # recompute
    "recompute": (Flag("--recompute-granularity"),),
    "recompute_method": (Flag("--recompute-method"),),
    "recompute_layers": (Flag("--recompute-num-layers"),),
    "recompute_modules": (Flag("--recompute-modules", values_since={"shared_experts": (0, 14)}),),
    # overlap of communication and kernels
    "overlap_tp": (Flag("--tp-comm-overlap"),),
    "overlap_ep": (Flag("--overlap-moe-expert-parallel-comm", since=(0, 14)),),
    "fused_cross_entropy": (Flag("--cross-entropy-loss-fusion"),),
    "unfused_swiglu": (Flag("--no-bias-swiglu-fusion"),),
    "unfused_gelu": (Flag("--no-bias-gelu-fusion"),),
    "unfused_dropout": (Flag("--no-bias-dropout-fusion"),),
    "unfused_rope": (Flag("--no-rope-fusion"),),
    "unfused_softmax": (Flag("--no-masked-softmax-fusion"),),
    "attention_kernel": (Flag("--attention-backend"),),
    # precision
    "bf16": (Flag("--bf16"),),
    "fp16": (Flag("--fp16"),),
    "fp8": (Flag("--fp8-format"),),
    "fp8_recipe": (Flag("--fp8-recipe", values_since={"blockwise": (0, 13)}),),
    "fp4": (Flag("--fp4-format", since=(0, 15)),),
    # the architecture
    "layers": (Flag("--num-layers"),),
    "hidden_size": (Flag("--hidden-size"),),
    "heads": (Flag("--num-attention-heads"),),
    "head_dim": (Flag("--kv-channels"),),
    "ffn_width": (Flag("--ffn-hidden-size"),),
    "max_positions": (Flag("--max-position-embeddings"),),
    "positions": (Flag("--position-embedding-type"),),
    "norm": (Flag("--normalization", values={"rms": "RMSNorm", "layer": "LayerNorm"}),),
    "gated": (Flag("--swiglu"),),
    "no_bias": (Flag("--disable-bias-linear"),),
    "qkv_bias": (Flag("--add-qkv-bias"),),
    "untied": (Flag("--untie-embeddings-and-output-weights"),),
    "vocab_divisor": (Flag("--make-vocab-size-divisible-by"),),
    "padded_vocab": (Flag("--padded-vocab-size", since=(0, 14)),),
    "grouped_query": (Flag("--group-query-attention"),),
    "kv_heads": (Flag("--num-query-groups"),),
    "qk_norm": (Flag("--qk-layernorm"),),
    "output_gate": (Flag("--attention-output-gate", since=(0, 16)),),
    "attention_sinks": (Flag("--softmax-type", since=(0, 15)),),
    "window": (Flag("--window-size", since=(0, 15)),),
    "window_pattern": (Flag("--window-attn-skip-freq", since=(0, 15)),),
    "mla": (Flag("--multi-latent-attention"),),
    "q_lora_rank": (Flag("--q-lora-rank"),),
    "kv_lora_rank": (Flag("--kv-lora-rank"),),
    "qk_nope_head_dim": (Flag("--qk-head-dim"),),
    "qk_rope_head_dim": (Flag("--qk-pos-emb-head-dim"),),
    "v_head_dim": (Flag("--v-head-dim"),),
    "attention_variant": (Flag("--experimental-attention-variant", since=(0, 16)),),
    "indexer_heads": (Flag("--dsa-indexer-n-heads", since=(0, 16)),),
    "indexer_head_dim": (Flag("--dsa-indexer-head-dim", since=(0, 16)),),
    "indexer_topk": (Flag("--dsa-indexer-topk", since=(0, 16)),),
    "linear_pattern": (Flag("--linear-attention-freq", since=(0, 16)),),
    "linear_conv": (Flag("--linear-conv-kernel-dim", since=(0, 16)),),
    "linear_key_head_dim": (Flag("--linear-key-head-dim", since=(0, 16)),),
    "linear_value_head_dim": (Flag("--linear-value-head-dim", since=(0, 16)),),
    "linear_key_heads": (Flag("--linear-num-key-heads", since=(0, 16)),),
    "linear_value_heads": (Flag("--linear-num-value-heads", since=(0, 16)),),
    "mtp": (Flag("--mtp-num-layers"),),
    # mixture of experts
    "experts": (Flag("--num-experts"),),
    "top_k": (Flag("--moe-router-topk"),),
    "expert_width": (Flag("--moe-ffn-hidden-size"),),
    "moe_pattern": (Flag("--moe-layer-freq"),),
    "shared_width": (Flag("--moe-shared-expert-intermediate-size"),),
    "shared_gate": (Flag("--moe-shared-expert-gate", since=(0, 16)),),
    "latent_size": (Flag("--moe-latent-size", since=(0, 16)),),
    "score_function": (Flag("--moe-router-score-function", values_since={"sqrtsoftplus": (0, 18)}),),
    "expert_bias": (Flag("--moe-router-enable-expert-bias"),),
    "routing_groups": (Flag("--moe-router-num-groups"),),
    "routing_groups_topk": (Flag("--moe-router-group-topk"),),
    "routed_scaling": (Flag("--moe-router-topk-scaling-factor"),),
    "router_dtype": (Flag("--moe-router-dtype"),),
    "grouped_gemm": (Flag("--moe-grouped-gemm"),),
    "permute_fusion": (Flag("--moe-permute-fusion"),),
    "dispatcher": (Flag("--moe-token-dispatcher-type"),),
    "deepep": (Flag("--moe-enable-deepep", until=(0, 16)), Flag("--moe-flex-dispatcher-backend", since=(0, 16))),
}

# --- MindSpeed-LLM: what it adds to, or spells unlike, Megatron-LM 0.12.1 ----------------------------------------------------

MINDSPEED_LLM: dict[str, tuple[Flag, ...]] = {
    "cp_type": (
        Flag(
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
    "cp_hierarchy": (Flag("--ulysses-degree-in-cp"),),
    "overlap_cp": (Flag("--use-cp-send-recv-overlap"),),
    "vpp_layers": (Flag("--num-layers-per-virtual-pipeline-stage"),),
    "layout": (Flag("--pipeline-model-parallel-layout", since=(26, 1)),),
    "noop_layers": (Flag("--noop-layers"),),
    "layer_list": (Flag("--num-layer-list"),),
    "schedule": (Flag("--schedules-method"),),
    "optimizer_offload": (Flag("--swap-optimizer"),),
    "overlap_tp": (Flag("--use-ascend-mc2"),),
    "overlap_ep": (Flag("--moe-alltoall-overlap-comm"),),
    "overlap_permutation": (Flag("--moe-permutation-async-comm"),),
    "overlap_ep_dualpipe": (Flag("--moe-fb-overlap"),),
    "attention_kernel": (Flag("--use-flash-attn"),),
    "recompute_activation": (Flag("--recompute-activation-function"),),
    "recompute_norm": (Flag("--recompute-norm"),),
    "recompute_mla": (Flag("--recompute-mla-up-proj"),),
    "fused_swiglu": (Flag("--use-fused-swiglu"),),
    "fused_norm": (Flag("--use-fused-rmsnorm"),),
    "fused_rope": (Flag("--use-fused-rotary-pos-emb"),),
    "implementation": (Flag("--transformer-impl"),),
    "layer_spec": (Flag("--spec"),),
    "padded_vocab": (Flag("--padded-vocab-size"),),
    "dense_first": (Flag("--first-k-dense-replace"),),
    "shared_gate": (Flag("--shared-expert-gate"),),
    "window": (Flag("--sliding-window"),),
    "fp8": (Flag("--fp8-format", since=(26, 0)),),
    "fp8_recipe": (Flag("--fp8-recipe", since=(26, 0)),),
    "indexer": (Flag("--enable-dsa-indexer"),),
    "indexer_heads": (Flag("--index-n-heads"),),
    "indexer_head_dim": (Flag("--index-head-dim"),),
    "indexer_topk": (Flag("--index-topk"),),
    "score_function": (Flag("--moe-router-score-function", values_since={"sqrtsoftplus": (26, 1)}),),
}


@dataclass(frozen=True)
class Framework:
    """A framework's own table, the version a plan gets that names none, the oldest and newest known, and what it stands on."""

    flags: Mapping[str, tuple[Flag, ...]]
    default: Version
    oldest: Version
    newest: Version
    base: tuple[str, Version] | None = None


FRAMEWORKS: dict[str, Framework] = {
    "megatron-lm": Framework(MEGATRON_LM, default=(0, 16), oldest=(0, 12), newest=(0, 19)),
    "mindspeed-llm": Framework(MINDSPEED_LLM, default=(26, 0), oldest=(2, 3), newest=(26, 1), base=("megatron-lm", (0, 12, 1))),
}


@dataclass(frozen=True)
class Dialect:
    """One framework at one version: which knobs it has, and how they are written on a command line."""

    framework: str
    version: Version

    def __str__(self) -> str:
        return f"{self.framework} {version_text(self.version)}"

    def flag(self, knob: str, *values: object) -> tuple[str, ...]:
        """The option and its values; Infeasible if this version lacks the knob or one of the values."""
        spelling = self._find(knob)
        if spelling is None:
            raise Infeasible(self._lacks(knob))
        words = []
        for value in map(str, values):
            since = spelling.values_since.get(value, ())
            if self.version < since:
                raise Infeasible(f"{self} has no {spelling.text} {value}; it came with {version_text(since)}")
            words.append(spelling.values.get(value, value))
        return (spelling.text, *words)

    def has(self, knob: str) -> bool:
        """Whether this version can express the knob at all."""
        return self._find(knob) is not None

    def _find(self, knob: str) -> Flag | None:
        own = FRAMEWORKS[self.framework]
        if knob in own.flags:
            return next((flag for flag in own.flags[knob] if _holds(flag, self.version)), None)
        return Dialect(*own.base)._find(knob) if own.base else None

    def _lacks(self, knob: str) -> str:
        later = [flag for flag in FRAMEWORKS[self.framework].flags.get(knob, ()) if flag.since > self.version]
        word = knob.replace("_", " ")
        if later:
            return f"{self} cannot express {word}: {later[0].text} came with {version_text(later[0].since)}"
        return f"{self} cannot express {word}"


def dialect(framework: str, version: str | None) -> Dialect:
    """The framework at the version that a text such as "0.16", "core_v0.16.1" or "main" names; None is the default version.

    A version of the framework's base ("core_v0.12.1" for MindSpeed-LLM) stands for the default. InputError if the framework or
    the version is not known.
    """
    if framework not in FRAMEWORKS:
        raise InputError(f"framework {framework!r} is not one of {', '.join(FRAMEWORKS)}")
    known = FRAMEWORKS[framework]
    if version is None:
        return Dialect(framework, known.default)
    if version.strip() in ("main", "master", "dev"):
        return Dialect(framework, NEWEST)
    match = re.search(r"\d+(?:\.\d+)*", version)
    if not match or len(match.group()) > 30:
        raise InputError(f"{framework} version {version!r} is not a version such as {version_text(known.default)} or main")
    number = tuple(int(part) for part in match.group().split("."))
    if known.base and number[:2] == known.base[1][:2]:
        return Dialect(framework, known.default)
    if number < known.oldest:
        raise InputError(f"{framework} {version_text(number)} is older than the oldest known, {version_text(known.oldest)}")
    if number[: len(known.newest)] > known.newest:
        newest = version_text(known.newest)
        raise InputError(f"{framework} {version_text(number)} is newer than the newest known, {newest}; give that, or main")
    return Dialect(framework, number)


def version_text(version: Version) -> str:
    """(0, 16) → "0.16"; the newest is "main"."""
    return "main" if version == NEWEST else ".".join(map(str, version))


def _holds(flag: Flag, version: Version) -> bool:
    return flag.since <= version and (flag.until is None or version < flag.until)

"""Options and fields that take one of a few words: frameworks refuse any other before a step is run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ...search_spaces.documents import did_you_mean
from .arguments import Option
from .job import Finding
from .shell_values import shown, unresolved

PARSED = (
    "the framework's parser takes no other word",
    "Megatron-LM megatron/training/arguments.py and the configurations that it takes options from",
)
READ = (
    "the framework knows no other word",
    "Megatron-Core transformer_config.py and model_parallel_config.py; torchtitan config/job_config.py",
)
DTYPES = ("fp32", "fp16", "bf16", "fp8")
EVERYWHERE = {
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "dataloader-type": ("single", "cyclic", "external"),
}
"""What MindSpeed-LLM, which adds words of its own to others, leaves as it is."""
MEGATRON_LM: dict[str, tuple[str, ...]] = {
    **EVERYWHERE,
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "zarr"),
    "cross-entropy-fusion-impl": ("native", "te"),
    "cuda-graph-impl": ("none", "local", "transformer_engine", "full_iteration"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "distributed-backend": ("nccl", "gloo"),
    "exp-avg-dtype": DTYPES,
    "exp-avg-sq-dtype": DTYPES,
    "fp4-format": ("e2m1",),
    "fp4-recipe": ("nvfp4", "custom"),
    "fp8-amax-compute-algo": ("most_recent", "max"),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "lr-decay-style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr-wsd-decay-style": ("exponential", "linear", "cosine", "minus_sqrt"),
    "main-grads-dtype": ("fp32", "bf16"),
    "main-params-dtype": ("fp32", "fp16"),
    "moe-flex-dispatcher-backend": ("deepep", "hybridep", "ncclep"),
    "moe-router-dtype": ("fp32", "fp64"),
    "moe-router-load-balancing-type": (*("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex", "alltoall_seq"),
    "moe-token-drop-policy": ("probs", "position"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "outer-dp-sharding-strategy": ("no_shard", "optim"),
    "pipeline-model-parallel-comm-backend": ("nccl", "ucc"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "rope-type": ("rope", "yarn"),
    "softmax-type": ("vanilla", "off-by-one", "learnable"),
    "tp-comm-bootstrap-backend": ("nccl", "mpi", "gloo"),
    "transformer-impl": ("local", "transformer_engine", "inference_optimized"),
    "weight-decay-incr-style": ("constant", "linear", "cosine"),
}
SHARED = (
    *("recompute-granularity", "recompute-method", "fp8-recipe", "fp4-recipe", "normalization", "position-embedding-type"),
    *("moe-flex-dispatcher-backend", "moe-router-dtype", "moe-router-score-function", "moe-token-drop-policy"),
    *("cross-entropy-fusion-impl", "cuda-graph-impl", "transformer-impl"),
)
"""Of these the names of Megatron-Core's fields, which Megatron-Bridge sets."""
FLOATS = ("float32", "bfloat16")
SWITCHES = frozenset(
    (
        *("accumulate-allreduce-grads-in-fp32", "add-qkv-bias", "attention-output-gate", "bf16", "cross-entropy-loss-fusion"),
        *("disable-bias-linear", "fp16", "grad-reduce-in-bf16", "group-query-attention", "moe-enable-deepep", "moe-grouped-gemm"),
        *("moe-permute-fusion", "moe-router-enable-expert-bias", "moe-router-pre-softmax", "moe-shared-expert-gate"),
        *("multi-latent-attention", "no-bias-dropout-fusion", "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "qk-layernorm"),
        *("no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-overlap-p2p-communication", "no-rope-fusion"),
        *("optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "overlap-grad-reduce", "overlap-moe-expert-parallel-comm"),
        *("overlap-param-gather", "quick-geglu", "sequence-parallel", "swiglu", "tp-comm-overlap", "use-distributed-optimizer"),
        *("untie-embeddings-and-output-weights", "use-mcore-models", "use-megatron-fsdp", "use-precision-aware-optimizer"),
        *("use-rope-scaling", "use-tp-pp-dp-mapping"),
    )
)
FIGURES = frozenset(
    (
        *("cpu-offloading-num-layers", "ddp-bucket-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        *("hierarchical-context-parallel-sizes", "microbatch-group-size-per-virtual-pipeline-stage", "recompute-num-layers"),
        *("num-distributed-optimizer-instances", "optimizer-offload-fraction", "rotary-scaling-factor", "rope-scaling-factor"),
        *("mscale", "mscale-all-dim", "rotary-percent", "moe-router-topk-scaling-factor"),
    )
)
LISTS = frozenset({"cp-comm-type", "recompute-modules", "exp-avg-dtype", "exp-avg-sq-dtype"})
"""Of Megatron-LM's options those that take no value, those that take numbers, and more that need one."""
WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron-lm": MEGATRON_LM,
    "mindspeed-llm": EVERYWHERE,
    "megatron-bridge": {
        **{f"model.{name.replace('-', '_')}": MEGATRON_LM[name] for name in SHARED},
        "model.moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
        "model.fp8": MEGATRON_LM["fp8-format"],
        "ddp.data_parallel_sharding_strategy": MEGATRON_LM["data-parallel-sharding-strategy"],
    },
    "torchtitan": {
        "activation_checkpoint.mode": ("none", "selective", "full", "memory_budget"),
        "parallelism.context_parallel_rotate_method": ("allgather", "alltoall"),
        "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
        "training.dtype": FLOATS,
        "training.mixed_precision_param": FLOATS,
        "training.mixed_precision_reduce": FLOATS,
    },
}
"""By framework and option the words of all releases from Megatron-Core 0.12 and torchtitan 0.1 to August 2026."""


def takes_words(option: str, framework: str) -> bool:
    """Whether an option is one of those."""
    return option.lstrip("-").replace("_", "-") in WORDS.get(framework, {})


def misspelt(found: Iterable[Option], framework: str) -> Iterator[Finding]:
    """Options of a command line whose word is none of theirs, with what was meant where that is near."""
    for option in found:
        words = WORDS.get(framework, {}).get(option.name.replace("_", "-"), ())
        yield from _wrong(f"--{option.name} ", option.values, words, PARSED)
        if framework == "megatron-lm":
            yield from _miscounted(option.name, option.values, bool(words))


def _miscounted(name: str, values: Sequence[str], takes: bool) -> Iterator[Finding]:
    """A switch that is given a value, and an option without its own, or with words where it takes numbers."""
    told, wrong = [value for value in values if not unresolved(value)], ""
    if name in SWITCHES and told:
        wrong = f"--{name} takes no value, and {shown(told[0])} stands behind it: leave {shown(told[0])} out."
    elif not values and (takes or name in FIGURES | LISTS):
        wrong = f"--{name} has no value: give one, or leave the option out."
    elif name in FIGURES and (word := next((value for value in told if not NUMBER.fullmatch(value)), None)) is not None:
        wrong = f"--{name} {shown(word)} is not a number."
    if wrong:
        yield Finding("P015", wrong, *PARSED)


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def misspelt_fields(fields: Iterable[tuple[str, object]], framework: str) -> Iterator[Finding]:
    """The same of dotted fields; a blank leaves what the framework has."""
    for name, value in fields:
        words = WORDS.get(framework, {}).get(name, ())
        text = str(value).strip("'\"")
        if text.lower() not in ("null", "none", ""):
            yield from _wrong(f"{name} = ", [text], words, READ)


def _wrong(named: str, values: Iterable[str], words: tuple[str, ...], where: tuple[str, str]) -> Iterator[Finding]:
    wrong = next((value for value in values if words and value not in words and not unresolved(value)), None)
    if wrong is not None:
        sentence = f"{named}{shown(wrong)} is not one of {', '.join(words)}{did_you_mean(wrong, words) or '.'}"
        yield Finding("P015", sentence, *where)

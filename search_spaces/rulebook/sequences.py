"""Rules on how sequences are split, by sequence and by context parallelism."""

from __future__ import annotations

from ..conditions import all_of, at_least, divides, equal, implies, more_than, one_of
from ..expressions import product
from ..layout import CP_TYPES
from .rule import Frameworks, Rule
from .terms import (
    ARGUMENTS,
    CONFIG,
    DEEPSPEED,
    MEGATRON,
    MINDSPEED,
    MINDSPEED_FEATURES,
    SPLIT_TP,
    TORCHTITAN,
    codes,
)

_RINGS = one_of("cp_type", codes(CP_TYPES, "p2p", "allgather", "a2a+p2p"))
_ALLGATHER, _A2A, _HYBRID = codes(CP_TYPES, "allgather", "a2a", "a2a+p2p")
_SPLIT_CP = more_than("cp", 1)
_TE_CP = "TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"

SEQUENCES: tuple[Rule, ...] = (
    Rule(
        "C040",
        "SP shards what TP leaves whole, so there must be a TP group",
        "Megatron-LM megatron/core/model_parallel_config.py",
        "arithmetic",
        implies(equal("sequence_parallel", 1), SPLIT_TP),
    ),
    Rule(
        "C041",
        "SP cuts a CP rank's tokens into tp equal parts",
        "Megatron-LM megatron/core/tensor_parallel/mappings.py",
        "arithmetic",
        implies(equal("sequence_parallel", 1), divides(product("cp", "tp"), "seq_len")),
    ),
    Rule(
        "C042a",
        "causal attention is balanced over CP ranks in 2·cp pieces, two for each",
        ARGUMENTS,
        "arithmetic",
        implies(all_of(_SPLIT_CP, _RINGS), divides(product(2, "cp"), "seq_len")),
    ),
    Rule(
        "C042b",
        "Megatron-LM asks for 2·cp pieces whatever the type of CP",
        ARGUMENTS,
        MEGATRON,
        implies(_SPLIT_CP, divides(product(2, "cp"), "seq_len")),
    ),
    Rule(
        "C044a",
        "all-to-all CP hands every rank whole heads of the whole sequence",
        f"{MINDSPEED_FEATURES}/context_parallel/ulysses_context_parallel.py",
        "arithmetic",
        implies(
            all_of(_SPLIT_CP, equal("cp_type", _A2A)),
            all_of(divides("cp", "seq_len"), divides(product("tp", "cp"), "heads")),
        ),
    ),
    Rule(
        "C044b",
        "Transformer Engine's all-to-all CP does not replicate KV heads",
        _TE_CP,
        MEGATRON,
        implies(all_of(_SPLIT_CP, equal("cp_type", _A2A)), divides(product("tp", "cp"), "kv_heads")),
    ),
    Rule(
        "C044d",
        "Transformer Engine's ring of keys and values has no sliding window",
        _TE_CP,
        MEGATRON,
        implies(all_of(more_than("windows", 0), _SPLIT_CP), one_of("cp_type", (_ALLGATHER, _A2A))),
    ),
    Rule(
        "C044e",
        "Transformer Engine adds learned sinks where every rank has the whole sequence",
        f"{_TE_CP}: softmax_type",
        MEGATRON,
        implies(all_of(more_than("sinks", 0), _SPLIT_CP), equal("cp_type", _A2A)),
    ),
    Rule(
        "C044c",
        "DeepSpeed divides the world by the sequence groups alone to find its batch",
        "deepspeed runtime/config.py: sequence_parallel_size",
        DEEPSPEED,
        implies(_SPLIT_CP, all_of(equal("tp", 1), equal("pp", 1))),
    ),
    Rule(
        "C045",
        "hybrid CP is a ring of all-to-all groups, both of at least two",
        f"{ARGUMENTS} hierarchical_context_parallel_sizes; {MINDSPEED_FEATURES}/context_parallel",
        "arithmetic",
        implies(
            all_of(_SPLIT_CP, equal("cp_type", _HYBRID)),
            all_of(at_least("cp", 4), divides(2, "cp"), divides(product(2, "tp"), "heads")),
        ),
    ),
    Rule(
        "C027",
        "sparse attention's indexer needs the keys of the whole sequence",
        CONFIG,
        MEGATRON,
        implies(all_of(more_than("indexer", 0), _SPLIT_CP), equal("cp_type", _ALLGATHER)),
    ),
    Rule(
        "C047",
        "MindSpeed-LLM runs compressed attention under all-gather CP only",
        f"{MINDSPEED_FEATURES}/context_parallel",
        MINDSPEED,
        implies(all_of(more_than("compressed", 0), _SPLIT_CP), equal("cp_type", _ALLGATHER)),
    ),
    Rule(
        "C049",
        "torchtitan runs MTP layers without CP and without a pipeline",
        "torchtitan torchtitan/models/deepseek_v3/mtp.py",
        TORCHTITAN,
        implies(more_than("mtp_layers", 0), all_of(equal("cp", 1), equal("pp", 1))),
    ),
    Rule(
        "C049b",
        "torchtitan's flexible attention gathers keys and values over CP, and has no ring",
        "torchtitan torchtitan/distributed/context_parallel/api.py",
        TORCHTITAN,
        implies(_SPLIT_CP, equal("cp_type", _ALLGATHER)),
    ),
    Rule(
        "C068",
        "Megatron-LM before 0.14 trains MTP layers without CP",
        f"{ARGUMENTS} (0.12.3, 0.13.1)",
        Frameworks(("megatron-lm",), "<0.14"),
        implies(more_than("mtp_layers", 0), equal("cp", 1)),
    ),
)

"""Every legality rule, stated once: data with an id, a reason and a source, built from the primitives of `conditions`.

Ids C… are numbered by topic: 0xx grids, 02x shapes, 03x batch, 04x sequence, 06x pipeline, 08x experts, 10x recompute and sharding,
12x precision, 14x placement. P… are the planner's own. A letter marks the parts of one rule. To add a rule, add one entry to RULES.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .conditions import Condition, all_of, any_of, at_least, at_most, divides, equal, implies, lacks, more_than, one_of
from .expressions import Quotient, Remainder, product
from .layout import (
    ALL_LAYERS,
    CP_TYPES,
    FULL_BLOCK,
    FULL_UNIFORM,
    NONE,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SELECTIVE,
    SHARDINGS,
)
from .quantities import EVEN, FIRST_LAST
from .stack import MEGATRON_CORE, Framework, Stack


@dataclass(frozen=True)
class Frameworks:
    """Frameworks that a rule binds, and the range of versions that it holds for (">=0.12,<0.16"; "" is all)."""

    names: tuple[Framework, ...]
    versions: str = ""

    def bind(self, stack: Stack) -> bool:
        return stack.framework in self.names and in_range(stack.version, self.versions)


Scope = Literal["arithmetic", "topology", "memory", "stack", "user"] | Frameworks


@dataclass(frozen=True)
class Rule:
    """One rule: pure data. `reason` says why it exists, `source` where it is checked."""

    id: str
    reason: str
    source: str
    scope: Scope
    condition: Condition

    @property
    def names(self) -> frozenset[str]:
        """Columns and constants that it reads."""
        return self.condition.names()


def in_range(version: str, versions: str) -> bool:
    """Whether a version lies in a range such as ">=0.12,<0.16"; a name without digits ("main") is newer than every number."""
    return all(_ORDER[operator](_numbers(version), _numbers(bound)) for operator, bound in re.findall(r"([<>]=?)([^,]+)", versions))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in found.group().split(".")] if found else [1 << 30]
    return tuple(numbers + [0] * (4 - len(numbers)))


_ORDER = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _codes(vocabulary: tuple[str, ...], *names: str) -> tuple[int, ...]:
    return tuple(vocabulary.index(name) for name in names)


def _module(*names: str) -> int:
    return sum(1 << RECOMPUTE_MODULES.index(name) for name in names)


MCORE = Frameworks(MEGATRON_CORE)
MEGATRON = Frameworks(("megatron-lm", "megatron-bridge"))
MINDSPEED = Frameworks(("mindspeed-llm",))
MINDFORMERS = Frameworks(("mindformers",))
TORCHTITAN = Frameworks(("torchtitan",))
DEEPSPEED = Frameworks(("deepspeed",))

ARGUMENTS = "Megatron-LM megatron/training/arguments.py"
PARALLEL_STATE = "Megatron-LM megatron/core/parallel_state.py"
CONFIG = "Megatron-LM megatron/core/transformer/transformer_config.py"
SCHEDULING = "Megatron-LM megatron/core/pipeline_parallel/schedules.py"
MINDSPEED_FEATURES = "MindSpeed mindspeed/features_manager"

_INTERLEAVED, _DUALPIPE, _DUALPIPEV, _ZB_V = _codes(SCHEDULES, "interleaved", "dualpipe", "dualpipev", "zb-v")
_V_SHAPED = one_of("schedule", (_DUALPIPEV, _ZB_V))
_RINGS = one_of("cp_type", _codes(CP_TYPES, "p2p", "allgather", "a2a+p2p"))
_ALLGATHER, _A2A, _HYBRID = _codes(CP_TYPES, "allgather", "a2a", "a2a+p2p")
_HSDP = SHARDINGS.index("hsdp")
_PP_NOT_LAST = tuple(code for code, order in enumerate(RANK_ORDERS) if not order.endswith("pp"))
_GRID = product("tp", "cp", "pp", "dp")
_EXPERT_GRID = product("etp", "ep")
_CHUNKS = product("pp", "vpp")
_ROUNDS = Quotient("num_microbatches", "pp")
_MOE = more_than("experts", 0)
_SPLIT_CP = more_than("cp", 1)
_SPLIT_TP = more_than("tp", 1)
_PIPELINED = more_than("pp", 1)
_INTERLEAVES = equal("schedule", _INTERLEAVED)
_GROUPED = all_of(
    at_least("microbatch_group", "pp"),
    at_most("microbatch_group", "num_microbatches"),
    any_of(divides("microbatch_group", "num_microbatches"), at_least(Remainder("num_microbatches", "microbatch_group"), "pp")),
)
_FULL = one_of("recompute_mode", (FULL_BLOCK, FULL_UNIFORM))


def _with_before_pp(*names: str) -> Condition:
    """Pipelines of experts in orders in which of tp, cp and ep just these vary faster than pp."""
    faster = [{*order[: order.index("pp")].split("-")} - {"dp", ""} for order in RANK_ORDERS]
    return all_of(_MOE, _PIPELINED, one_of("rank_order", tuple(code for code, each in enumerate(faster) if each == {*names})))


_SAME_STRIDE_OF_STAGES = (  # where all three vary faster C004a says it, and dp is edp
    implies(_with_before_pp("tp"), equal("etp", "tp")),
    implies(_with_before_pp("cp"), equal("cp", 1)),
    implies(_with_before_pp("ep"), equal("ep", 1)),
    implies(_with_before_pp("tp", "cp"), equal("etp", product("tp", "cp"))),
    implies(_with_before_pp("tp", "ep"), equal(_EXPERT_GRID, "tp")),
    implies(_with_before_pp("cp", "ep"), equal("ep", "cp")),
)

RULES: tuple[Rule, ...] = (
    # Grids
    Rule("C001", "the grid cannot use more devices than there are", PARALLEL_STATE, "arithmetic", at_most(_GRID, "devices")),
    Rule(
        "C002",
        "experts are laid over the same devices of a stage, so edp = tp·cp·dp / (etp·ep) must be whole",
        PARALLEL_STATE,
        "arithmetic",
        divides(_EXPERT_GRID, product("tp", "cp", "dp")),
    ),
    Rule(
        "C004a",
        "with pp inside dp, dense and expert parts share their pipeline groups only if their data-parallel sizes agree",
        PARALLEL_STATE,
        "arithmetic",
        implies(all_of(_MOE, one_of("rank_order", _PP_NOT_LAST), _PIPELINED), equal(_EXPERT_GRID, product("tp", "cp"))),
    ),
    Rule(
        "C004b",
        "a dense model's expert grid takes etp = tp, so with pp inside dp its data-parallel size agrees only if cp = 1",
        PARALLEL_STATE,
        MCORE,
        implies(all_of(equal("experts", 0), one_of("rank_order", _PP_NOT_LAST), _PIPELINED), equal("cp", 1)),
    ),
    Rule(
        "C004c",
        "neighbouring stages are as many ranks apart in the dense grid as in that of experts",
        PARALLEL_STATE,
        "arithmetic",
        all_of(*_SAME_STRIDE_OF_STAGES),
    ),
    Rule(
        "C009",
        "torchtitan's EP groups lie within the ranks that shard one copy of the weights",
        "torchtitan torchtitan/distributed/parallel_dims.py",
        TORCHTITAN,
        implies(equal("sharding", _HSDP), divides("ep", product("hsdp", "tp"))),
    ),
    Rule(
        "C012",
        "MindSpore Transformers spreads experts over the dp and tp ranks of a stage",
        "mindformers 2.1 parallel_core/training_graph/transformer/moe/ffn.py",
        MINDFORMERS,
        implies(equal("experts_across_tp", 1), divides("ep", product("dp", "tp"))),
    ),
    Rule(
        "C012b",
        "models by class of MindSpore Transformers spread experts over the dp and cp ranks of a TP rank",
        "mindformers 2.1 models/llama/llama_layer.py and modules/transformer/moe.py",
        MINDFORMERS,
        implies(equal("experts_across_tp", 0), divides("ep", product("dp", "cp"))),
    ),
    Rule(
        "C013",
        "an HSDP group is a part of the data-parallel group",
        PARALLEL_STATE,
        "arithmetic",
        implies(equal("sharding", _HSDP), all_of(at_least("hsdp", 1), divides("hsdp", product("dp", "cp")))),
    ),
    Rule(
        "C013b",
        "torchtitan's group that shards one copy of the weights holds whole CP groups",
        "torchtitan torchtitan/distributed/parallel_dims.py",
        TORCHTITAN,
        implies(equal("sharding", _HSDP), divides("cp", "hsdp")),
    ),
    # Shapes
    Rule("C020", "a TP rank holds whole attention heads", CONFIG, "arithmetic", divides("tp", "heads")),
    Rule(
        "C021a",
        "a TP rank holds whole KV heads, or whole groups of ranks share one",
        CONFIG,
        "arithmetic",
        any_of(divides("tp", "kv_heads"), divides("kv_heads_multiple", "tp")),
    ),
    Rule(
        "C021b",
        "a stack that does not replicate KV heads needs whole ones on every TP rank",
        "torchtitan torchtitan/models/common/decoder.py",
        "arithmetic",
        implies(equal("kv_replication", 0), divides("tp", "kv_heads")),
    ),
    Rule(
        "C021c",
        "Megatron-Core before 0.16 refuses tp beyond the KV heads",
        f"{CONFIG} (0.12.1)",
        Frameworks(("megatron-lm",), "<0.16"),
        divides("tp", "kv_heads"),
    ),
    Rule(
        "C021d",
        "MindSpeed-LLM stands on Megatron-Core 0.12, which refuses tp beyond the KV heads",
        f"{CONFIG} (0.12.1)",
        MINDSPEED,
        divides("tp", "kv_heads"),
    ),
    Rule("C022a", "TP cuts the feed-forward width", "Megatron-LM megatron/core/utils.py", "arithmetic", divides("tp", "mlp_width")),
    Rule("C022b", "ETP cuts the expert width", "Megatron-LM megatron/core/utils.py", "arithmetic", divides("etp", "expert_width")),
    Rule(
        "C022c",
        "TP cuts the shared-expert width",
        "Megatron-LM megatron/core/utils.py",
        "arithmetic",
        divides("tp", "shared_width"),
    ),
    Rule(
        "C026a",
        "a rank holds whole heads of linear attention, which CP divides as TP does",
        CONFIG,
        "arithmetic",
        divides(product("tp", "cp"), "linear_heads"),
    ),
    Rule(
        "C026b",
        "a TP rank holds whole groups of a state-space mixer",
        "Megatron-LM megatron/core/ssm/mamba_mixer.py",
        "arithmetic",
        divides("tp", "state_groups"),
    ),
    Rule(
        "C028",
        "experts with biases are not cut by ETP",
        CONFIG,
        MCORE,
        implies(equal("expert_bias", 1), equal("etp", 1)),
    ),
    # Batch and micro-batches
    Rule(
        "C029",
        "the global batch is dealt to dp replicas in whole micro-batches",
        "Megatron-LM megatron/core/num_microbatches_calculator.py",
        "arithmetic",
        equal(product("micro_batch", "dp", "num_microbatches"), "global_batch"),
    ),
    Rule(
        "C030a",
        "the interleaved schedule runs micro-batches in groups of pp, or of as many more as it is asked for",
        SCHEDULING,
        Frameworks(("megatron-lm", "megatron-bridge", "mindspeed-llm", "mindformers", "deepspeed", "nanotron")),
        all_of(
            implies(equal("microbatch_group", 0), implies(_INTERLEAVES, divides("pp", "num_microbatches"))),
            implies(more_than("microbatch_group", 0), implies(_INTERLEAVES, _GROUPED)),
        ),
    ),
    Rule(
        "C030b",
        "the interleaved schedule runs max(1, ⌊micro-batches / pp⌋) equal rounds",
        "PyTorch torch/distributed/pipelining/schedules.py",
        TORCHTITAN,
        implies(_INTERLEAVES, divides(_ROUNDS, "num_microbatches")),
    ),
    Rule(
        "C031",
        "MindSpore's pipeline needs at least one micro-batch per stage",
        "mindformers 2.1 (runtime)",
        MINDFORMERS,
        at_least("num_microbatches", "pp"),
    ),
    Rule(
        "C031b",
        "MindSpore runs GPipe only on interleaved chunks",
        "MindSpore 2.10 set_auto_parallel_context: pipeline_config",
        MINDFORMERS,
        implies(_PIPELINED, one_of("schedule", _codes(SCHEDULES, "1f1b", "interleaved", "zb-v"))),
    ),
    Rule(
        "C032a",
        "a V-shaped schedule fills its two chunks per stage with at least 2·pp micro-batches",
        "deepseek-ai/DualPipe dualpipe/dualpipev.py; MindSpeed docs/zh/features/dualpipev.md",
        "arithmetic",
        implies(_V_SHAPED, at_least("num_microbatches", product(2, "pp"))),
    ),
    Rule(
        "C032b",
        "DualPipe feeds an even number of micro-batches from both ends of an even pipeline, at least 2·pp of them",
        "deepseek-ai/DualPipe dualpipe/dualpipe.py",
        "arithmetic",
        implies(
            equal("schedule", _DUALPIPE),
            all_of(divides(2, "pp"), divides(2, "num_microbatches"), at_least("num_microbatches", product(2, "pp"))),
        ),
    ),
    Rule(
        "C033",
        "the 1F1B schedules of PyTorch reject fewer micro-batches than stages",
        "PyTorch torch/distributed/pipelining/schedules.py",
        TORCHTITAN,
        implies(one_of("schedule", _codes(SCHEDULES, "1f1b", "zb-h1")), at_least("num_microbatches", "pp")),
    ),
    # Sequence, SP and CP
    Rule(
        "C040",
        "SP shards what TP leaves whole, so there must be a TP group",
        "Megatron-LM megatron/core/model_parallel_config.py",
        "arithmetic",
        implies(equal("sequence_parallel", 1), _SPLIT_TP),
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
        "TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py",
        MEGATRON,
        implies(all_of(_SPLIT_CP, equal("cp_type", _A2A)), divides(product("tp", "cp"), "kv_heads")),
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
        f"{MINDSPEED_FEATURES}/context_parallel",
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
    # Pipeline and its cuts
    Rule(
        "C060",
        "stages are cut as the stack can be told: evenly, with its own first and last stage, or by a list",
        f"{ARGUMENTS}; {CONFIG}; MindSpeed-LLM num-layer-list",
        "arithmetic",
        any_of(
            equal("splits_free", 1),
            divides(_CHUNKS, "layers"),
            all_of(equal("splits_first_last", 1), _PIPELINED, divides("vpp", "layers"), at_most(_CHUNKS, "layers")),
            all_of(equal("splits_list", 1), equal("vpp", 1), at_most("pp", "layers")),
        ),
    ),
    Rule(
        "C063a",
        "every layer is placed once",
        "Megatron-LM megatron/core/transformer/pipeline_parallel_layer_layout.py",
        "arithmetic",
        equal("placed_blocks", "blocks"),
    ),
    Rule(
        "C063b",
        "the given stages must be sayable in one of the stack's split forms",
        f"{ARGUMENTS}; MindSpeed-LLM num-layer-list",
        "arithmetic",
        any_of(
            equal("splits_free", 1),
            equal("split_form", EVEN),
            all_of(equal("splits_first_last", 1), equal("split_form", FIRST_LAST)),
            all_of(equal("splits_list", 1), equal("vpp", 1), at_most("split_form", 2)),
        ),
    ),
    Rule(
        "C064a",
        "chunks alternate between stages, so there must be several",
        ARGUMENTS,
        "arithmetic",
        implies(more_than("vpp", 1), _PIPELINED),
    ),
    Rule(
        "C064b",
        "several chunks per stage are interleaved, or two of them folded into a V",
        ARGUMENTS,
        "arithmetic",
        implies(more_than("vpp", 1), any_of(_INTERLEAVES, all_of(_V_SHAPED, equal("vpp", 2)))),
    ),
    Rule(
        "C064c",
        "the interleaved schedule needs several chunks per stage",
        ARGUMENTS,
        "arithmetic",
        implies(_INTERLEAVES, more_than("vpp", 1)),
    ),
    Rule(
        "C069",
        "torchtitan does not tie embeddings across stages",
        "torchtitan torchtitan/distributed/pipeline_parallel.py",
        TORCHTITAN,
        implies(equal("tied", 1), equal("pp", 1)),
    ),
    Rule(
        "C075a",
        "a V-shaped schedule puts two chunks on every stage",
        "MindSpeed docs/zh/features/dualpipev.md; torchtitan torchtitan/distributed/pipeline_parallel.py",
        "arithmetic",
        implies(_V_SHAPED, all_of(_PIPELINED, at_most(product(2, "pp"), "blocks"))),
    ),
    Rule(
        "C075b",
        "the two chunks of every stage are equal where stages cannot be cut freely",
        "MindSpeed docs/zh/features/dualpipev.md",
        "arithmetic",
        implies(all_of(_V_SHAPED, equal("splits_free", 0)), divides(product(2, "pp"), "layers")),
    ),
    Rule(
        "C075c",
        "MindSpeed's DualPipeV runs without CP and with untied embeddings",
        f"{MINDSPEED_FEATURES}/pipeline_parallel/dualpipev_feature.py",
        MINDSPEED,
        implies(equal("schedule", _DUALPIPEV), all_of(equal("cp", 1), equal("tied", 0))),
    ),
    Rule(
        "C075d",
        "bidirectional and zero-bubble schedules need a pipeline",
        "arXiv 2401.10241; deepseek-ai/DualPipe",
        "arithmetic",
        implies(one_of("schedule", _codes(SCHEDULES, "zb-h1", "dualpipe")), _PIPELINED),
    ),
    Rule(
        "C077",
        "DeepSpeed's pipeline engine excludes ZeRO-2 and ZeRO-3",
        "deepspeed/runtime/pipe/engine.py",
        DEEPSPEED,
        implies(_PIPELINED, one_of("sharding", _codes(SHARDINGS, "none", "zero1"))),
    ),
    # Experts
    Rule("C080a", "a dense model has no experts to spread", CONFIG, "arithmetic", implies(equal("experts", 0), equal("ep", 1))),
    Rule("C080b", "a dense model has no experts to cut", CONFIG, "arithmetic", implies(equal("experts", 0), equal("etp", 1))),
    Rule("C080c", "an EP rank holds whole experts", ARGUMENTS, "arithmetic", divides("ep", "experts")),
    Rule(
        "C081",
        "training experts under TP needs SP",
        "Megatron-LM megatron/core/transformer/moe/moe_layer.py",
        MCORE,
        implies(all_of(_MOE, _SPLIT_TP), equal("sequence_parallel", 1)),
    ),
    Rule(
        "P003",
        "the stack gives experts no tensor parallelism of their own",
        "torchtitan torchtitan/distributed/parallel_dims.py; deepspeed module_inject/auto_ep_folding.py",
        "arithmetic",
        implies(equal("expert_tensor_parallel", 0), equal("etp", 1)),
    ),
    Rule(
        "P004",
        "Ascend's fused expert kernels take at most 128 experts per rank",
        "modelscope/ms-swift pull request 7374",
        MINDSPEED,
        at_most("experts", product(128, "ep")),
    ),
    Rule(
        "C093",
        "DeepSpeed's AutoEP excludes pipelines where AutoTP is on",
        "deepspeed module_inject/auto_ep_folding.py",
        DEEPSPEED,
        implies(all_of(more_than("ep", 1), _SPLIT_TP), equal("pp", 1)),
    ),
    Rule(
        "C093b",
        "DeepSpeed's AutoEP takes neither sequence parallelism nor offload beside AutoTP",
        "deepspeed module_inject/auto_ep_folding.py",
        DEEPSPEED,
        implies(all_of(more_than("ep", 1), _SPLIT_TP), all_of(equal("cp", 1), equal("optimizer_offload_per_mille", 0))),
    ),
    # Recompute, sharding and offload
    Rule(
        "C100a",
        "full recompute needs a number of layers, and only full recompute has one",
        CONFIG,
        "arithmetic",
        any_of(
            all_of(_FULL, at_least("recompute_layers", 1)),
            all_of(one_of("recompute_mode", (NONE, SELECTIVE)), equal("recompute_layers", 0)),
        ),
    ),
    Rule(
        "C100b",
        "selective recompute needs modules, and only selective recompute has any",
        CONFIG,
        "arithmetic",
        any_of(
            all_of(equal("recompute_mode", SELECTIVE), at_least("recompute_modules", 1)),
            all_of(one_of("recompute_mode", (NONE, FULL_BLOCK, FULL_UNIFORM)), equal("recompute_modules", 0)),
        ),
    ),
    Rule(
        "C100c",
        "uniform recompute keeps one checkpoint per so many of the model's layers",
        CONFIG,
        "arithmetic",
        implies(equal("recompute_mode", FULL_UNIFORM), at_most("recompute_layers", "layers")),
    ),
    Rule(
        "C100d",
        "the stack recomputes all layers of a chunk or none",
        "stack catalogue",
        "arithmetic",
        implies(all_of(equal("recompute_block", 0), equal("recompute_mode", FULL_BLOCK)), at_least("recompute_layers", ALL_LAYERS)),
    ),
    Rule(
        "C112",
        "recompute differs between chunks only where the stack is told a depth for each",
        "mindformers 2.1 recompute_config; Megatron-LM megatron/core/transformer/transformer_block.py",
        "arithmetic",
        implies(equal("recompute_by_chunk", 0), equal("depths_apart", 0)),
    ),
    Rule(
        "C101a",
        "the up-projection of latent attention is there to recompute only with latent attention",
        CONFIG,
        "arithmetic",
        implies(equal("mla", 0), lacks("recompute_modules", _module("mla_up_proj"))),
    ),
    Rule(
        "C101b",
        "expert modules are there to recompute only in a mixture of experts",
        CONFIG,
        "arithmetic",
        implies(equal("experts", 0), lacks("recompute_modules", _module("moe", "moe_act", "shared_experts"))),
    ),
    Rule(
        "C101c",
        "shared experts are there to recompute only where the model has them",
        CONFIG,
        "arithmetic",
        implies(equal("shared_width", 0), lacks("recompute_modules", _module("shared_experts"))),
    ),
    Rule(
        "P001",
        "only HSDP has a group size of its own",
        "definition",
        "arithmetic",
        any_of(equal("sharding", _HSDP), equal("hsdp", 0)),
    ),
    Rule(
        "P002",
        "the stack has no optimizer offload",
        "stack catalogue",
        "arithmetic",
        implies(equal("optimizer_can_offload", 0), equal("optimizer_offload_per_mille", 0)),
    ),
    Rule(
        "P011",
        "the stack has no activation offload",
        "stack catalogue",
        "arithmetic",
        implies(equal("activations_can_offload", 0), equal("activation_offload_per_mille", 0)),
    ),
    Rule(
        "C103a",
        "activations of a pipeline's stages stay on the device",
        CONFIG,
        Frameworks(("megatron-lm", "megatron-bridge")),
        implies(all_of(more_than("activation_offload_per_mille", 0), equal("lends", 0)), equal("pp", 1)),
    ),
    Rule(
        "C110",
        "MindSpeed's swapped optimizer is its distributed optimizer",
        f"{MINDSPEED_FEATURES}/memory",
        MINDSPEED,
        implies(more_than("optimizer_offload_per_mille", 0), more_than("sharding", 0)),
    ),
    Rule(
        "C111",
        "the optimizer on the host is precision-aware, which only the distributed optimizer is",
        "Megatron-LM megatron/training/arguments.py: optimizer_cpu_offload, use_precision_aware_optimizer",
        MCORE,
        implies(more_than("optimizer_offload_per_mille", 0), one_of("sharding", _codes(SHARDINGS, "zero1"))),
    ),
    Rule(
        "C111b",
        "DeepSpeed offloads states that ZeRO shards",
        "deepspeed runtime/zero/config.py",
        DEEPSPEED,
        implies(more_than("optimizer_offload_per_mille", 0), more_than("sharding", 0)),
    ),
    # Precision
    Rule(
        "C120a",
        "a quantised GEMM's width on every TP rank is a multiple of its alignment",
        "Megatron-LM megatron/core/fp8_utils.py",
        MCORE,
        implies(more_than("gemm_multiple", 1), divides(product("gemm_multiple", "tp"), "mlp_width")),
    ),
    Rule(
        "C120b",
        "a quantised GEMM's width on every ETP rank is a multiple of its alignment",
        "Megatron-LM megatron/core/fp8_utils.py",
        MCORE,
        implies(more_than("gemm_multiple", 1), divides(product("gemm_multiple", "etp"), "expert_width")),
    ),
    Rule(
        "C120c",
        "a quantised GEMM's tokens per CP rank are a multiple of its alignment",
        "Megatron-LM megatron/core/fp8_utils.py",
        MCORE,
        implies(more_than("gemm_multiple", 1), divides(product("gemm_multiple", "cp"), product("seq_len", "micro_batch"))),
    ),
    # Placement
    Rule(
        "C140",
        "every chunk holds a layer, the embedding, the loss, or the MTP layers, which share one",
        "definition",
        "arithmetic",
        at_most(_CHUNKS, "most_chunks"),
    ),
    Rule(
        "C141",
        "a TP group lies in one supernode or fills whole ones",
        "definition",
        "topology",
        any_of(
            divides("tp", "supernode"),
            divides("tp", "supernode_size"),
            divides("supernode", "tp"),
            at_most("devices_used", "supernode"),
        ),
    ),
    Rule("P010", "the fullest stage fits into a device", "definition", "memory", at_most("peak_bytes", "usable_bytes")),
)

"""Rules on recompute, sharding of states, and offload."""

from __future__ import annotations

from ..conditions import all_of, any_of, at_least, at_most, divides, equal, implies, lacks, more_than, one_of
from ..expressions import product
from ..layout import ALL_LAYERS, FULL_BLOCK, FULL_UNIFORM, NONE, SELECTIVE, SHARDINGS
from ..quantities import EVEN
from .rule import Frameworks, Rule
from .terms import CHUNKS, CONFIG, DEEPSPEED, HSDP, MCORE, MINDSPEED, MINDSPEED_FEATURES, codes, module

_FULL = one_of("recompute_mode", (FULL_BLOCK, FULL_UNIFORM))

STATES: tuple[Rule, ...] = (
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
        "C100e",
        "uniform recompute cuts every chunk's layers into checkpoints of as many, with none over",
        "Megatron-LM megatron/core/transformer/transformer_block.py",
        MCORE,
        implies(
            all_of(equal("recompute_mode", FULL_UNIFORM), equal("split_form", EVEN), divides(CHUNKS, "layers")),
            divides(product("recompute_layers", "pp", "vpp"), "layers"),
        ),
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
        implies(equal("mla", 0), lacks("recompute_modules", module("mla_up_proj"))),
    ),
    Rule(
        "C101b",
        "expert modules are there to recompute only in a mixture of experts",
        CONFIG,
        "arithmetic",
        implies(equal("experts", 0), lacks("recompute_modules", module("moe", "moe_act", "shared_experts"))),
    ),
    Rule(
        "C101c",
        "shared experts are there to recompute only where the model has them",
        CONFIG,
        "arithmetic",
        implies(equal("shared_width", 0), lacks("recompute_modules", module("shared_experts"))),
    ),
    Rule(
        "P001",
        "only HSDP has a group size of its own",
        "definition",
        "arithmetic",
        any_of(equal("sharding", HSDP), equal("hsdp", 0)),
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
        implies(more_than("optimizer_offload_per_mille", 0), one_of("sharding", codes(SHARDINGS, "zero1"))),
    ),
    Rule(
        "C111b",
        "DeepSpeed offloads states that ZeRO shards",
        "deepspeed runtime/zero/config.py",
        DEEPSPEED,
        implies(more_than("optimizer_offload_per_mille", 0), more_than("sharding", 0)),
    ),
)

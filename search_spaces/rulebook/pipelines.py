"""Rules on schedules, chunks, and where a framework can cut stages."""

from __future__ import annotations

from ..conditions import all_of, any_of, at_most, divides, equal, implies, more_than, one_of
from ..expressions import product
from ..layout import SCHEDULES, SHARDINGS
from ..quantities import EVEN, FIRST_LAST
from .rule import Rule
from .terms import (
    ARGUMENTS,
    CHUNKS,
    CONFIG,
    DEEPSPEED,
    DUALPIPEV,
    INTERLEAVES,
    MINDSPEED,
    MINDSPEED_FEATURES,
    PIPELINED,
    TORCHTITAN,
    V_SHAPED,
    codes,
)

PIPELINES: tuple[Rule, ...] = (
    Rule(
        "C060",
        "stages are cut as the stack can be told: evenly, with its own first and last stage, or by a list",
        f"{ARGUMENTS}; {CONFIG}; MindSpeed-LLM num-layer-list",
        "arithmetic",
        any_of(
            equal("splits_free", 1),
            divides(CHUNKS, "layers"),
            all_of(equal("splits_first_last", 1), PIPELINED, divides("vpp", "layers"), at_most(CHUNKS, "layers")),
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
        implies(more_than("vpp", 1), PIPELINED),
    ),
    Rule(
        "C064b",
        "several chunks per stage are interleaved, or two of them folded into a V",
        ARGUMENTS,
        "arithmetic",
        implies(more_than("vpp", 1), any_of(INTERLEAVES, all_of(V_SHAPED, equal("vpp", 2)))),
    ),
    Rule(
        "C064c",
        "the interleaved schedule needs several chunks per stage",
        ARGUMENTS,
        "arithmetic",
        implies(INTERLEAVES, more_than("vpp", 1)),
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
        implies(V_SHAPED, all_of(PIPELINED, at_most(product(2, "pp"), "blocks"))),
    ),
    Rule(
        "C075b",
        "the two chunks of every stage are equal where stages cannot be cut freely",
        "MindSpeed docs/zh/features/dualpipev.md",
        "arithmetic",
        implies(all_of(V_SHAPED, equal("splits_free", 0)), divides(product(2, "pp"), "layers")),
    ),
    Rule(
        "C075c",
        "MindSpeed's DualPipeV runs without CP and with untied embeddings",
        f"{MINDSPEED_FEATURES}/pipeline_parallel/dualpipev_feature.py",
        MINDSPEED,
        implies(equal("schedule", DUALPIPEV), all_of(equal("cp", 1), equal("tied", 0))),
    ),
    Rule(
        "C075d",
        "bidirectional and zero-bubble schedules need a pipeline",
        "arXiv 2401.10241; deepseek-ai/DualPipe",
        "arithmetic",
        implies(one_of("schedule", codes(SCHEDULES, "zb-h1", "dualpipe")), PIPELINED),
    ),
    Rule(
        "C077",
        "DeepSpeed's pipeline engine excludes ZeRO-2 and ZeRO-3",
        "deepspeed/runtime/pipe/engine.py",
        DEEPSPEED,
        implies(PIPELINED, one_of("sharding", codes(SHARDINGS, "none", "zero1"))),
    ),
)

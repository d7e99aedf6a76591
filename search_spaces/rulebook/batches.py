"""Rules on how a global batch is cut into micro-batches, and what interleaving asks of their number."""

from __future__ import annotations

from ..conditions import all_of, any_of, at_least, at_most, divides, equal, implies, more_than, one_of
from ..expressions import Quotient, Remainder, product
from ..layout import SCHEDULES
from .rule import Frameworks, Rule
from .terms import DUALPIPE, INTERLEAVES, MINDFORMERS, PIPELINED, SCHEDULING, TORCHTITAN, V_SHAPED, codes

_ROUNDS = Quotient("num_microbatches", "pp")
_GROUPED = all_of(
    at_least("microbatch_group", "pp"),
    at_most("microbatch_group", "num_microbatches"),
    any_of(divides("microbatch_group", "num_microbatches"), at_least(Remainder("num_microbatches", "microbatch_group"), "pp")),
)

BATCHES: tuple[Rule, ...] = (
    Rule(
        "C029",
        "the global batch is dealt to dp replicas in whole micro-batches",
        "Megatron-LM megatron/core/num_microbatches_calculator.py",
        "arithmetic",
        equal(product("micro_batch", "dp", "num_microbatches"), "global_batch"),
    ),
    Rule(
        "C030a",
        "the interleaved schedule runs micro-batches in groups of pp, or of as many more as it can be asked for",
        SCHEDULING,
        Frameworks(("megatron-lm", "megatron-bridge", "mindspeed-llm", "mindformers", "deepspeed", "nanotron")),
        all_of(
            implies(
                all_of(equal("microbatch_group", 0), equal("sets_group", 0)),
                implies(INTERLEAVES, divides("pp", "num_microbatches")),
            ),
            implies(
                all_of(equal("microbatch_group", 0), equal("sets_group", 1)),
                implies(INTERLEAVES, at_least("num_microbatches", "pp")),
            ),
            implies(more_than("microbatch_group", 0), implies(INTERLEAVES, _GROUPED)),
        ),
    ),
    Rule(
        "C030b",
        "the interleaved schedule runs max(1, ⌊micro-batches / pp⌋) equal rounds",
        "PyTorch torch/distributed/pipelining/schedules.py",
        TORCHTITAN,
        implies(INTERLEAVES, divides(_ROUNDS, "num_microbatches")),
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
        implies(PIPELINED, one_of("schedule", codes(SCHEDULES, "1f1b", "interleaved", "zb-v"))),
    ),
    Rule(
        "C032a",
        "a V-shaped schedule fills its two chunks per stage with at least 2·pp micro-batches",
        "deepseek-ai/DualPipe dualpipe/dualpipev.py; MindSpeed docs/zh/features/dualpipev.md",
        "arithmetic",
        implies(V_SHAPED, at_least("num_microbatches", product(2, "pp"))),
    ),
    Rule(
        "C032b",
        "DualPipe feeds an even number of micro-batches from both ends of an even pipeline, at least 2·pp of them",
        "deepseek-ai/DualPipe dualpipe/dualpipe.py",
        "arithmetic",
        implies(
            equal("schedule", DUALPIPE),
            all_of(divides(2, "pp"), divides(2, "num_microbatches"), at_least("num_microbatches", product(2, "pp"))),
        ),
    ),
    Rule(
        "C033",
        "the 1F1B schedules of PyTorch reject fewer micro-batches than stages",
        "PyTorch torch/distributed/pipelining/schedules.py",
        TORCHTITAN,
        implies(one_of("schedule", codes(SCHEDULES, "1f1b", "zb-h1")), at_least("num_microbatches", "pp")),
    ),
)

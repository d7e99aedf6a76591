"""Rules on experts, their parallelism and what exchanges their tokens."""

from __future__ import annotations

from ..conditions import all_of, at_most, divides, equal, implies, more_than
from ..expressions import product
from .rule import Rule
from .terms import ARGUMENTS, CONFIG, DEEPSPEED, MCORE, MINDSPEED, MOE, SPLIT_TP

EXPERTS: tuple[Rule, ...] = (
    Rule("C080a", "a dense model has no experts to spread", CONFIG, "arithmetic", implies(equal("experts", 0), equal("ep", 1))),
    Rule("C080b", "a dense model has no experts to cut", CONFIG, "arithmetic", implies(equal("experts", 0), equal("etp", 1))),
    Rule("C080c", "an EP rank holds whole experts", ARGUMENTS, "arithmetic", divides("ep", "experts")),
    Rule(
        "C081",
        "training experts under TP needs SP",
        "Megatron-LM megatron/core/transformer/moe/moe_layer.py",
        MCORE,
        implies(all_of(MOE, SPLIT_TP), equal("sequence_parallel", 1)),
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
        implies(all_of(more_than("ep", 1), SPLIT_TP), equal("pp", 1)),
    ),
    Rule(
        "C093b",
        "DeepSpeed's AutoEP takes neither sequence parallelism nor offload beside AutoTP",
        "deepspeed module_inject/auto_ep_folding.py",
        DEEPSPEED,
        implies(all_of(more_than("ep", 1), SPLIT_TP), all_of(equal("cp", 1), equal("optimizer_offload_per_mille", 0))),
    ),
)

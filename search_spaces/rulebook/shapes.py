"""Rules on which widths and heads of a model tensor parallelism divides."""

from __future__ import annotations

from ..conditions import any_of, divides, equal, implies
from ..expressions import product
from .rule import Frameworks, Rule
from .terms import CONFIG, MCORE, MINDSPEED

SHAPES: tuple[Rule, ...] = (
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
)

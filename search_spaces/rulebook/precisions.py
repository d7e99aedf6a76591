"""Rules on what quantised GEMMs ask of sizes."""

from __future__ import annotations

from ..conditions import divides, implies, more_than
from ..expressions import product
from .rule import Rule
from .terms import MCORE

PRECISIONS: tuple[Rule, ...] = (
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
)

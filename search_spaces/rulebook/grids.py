"""Rules on how ranks form grids of dense and of expert parts."""

from __future__ import annotations

from ..conditions import Condition, all_of, at_least, at_most, divides, equal, implies, one_of
from ..expressions import product
from ..layout import RANK_ORDERS
from .rule import Rule
from .terms import HSDP, MCORE, MINDFORMERS, MOE, PARALLEL_STATE, PIPELINED, TORCHTITAN

_PP_NOT_LAST = tuple(code for code, order in enumerate(RANK_ORDERS) if not order.endswith("pp"))
_GRID = product("tp", "cp", "pp", "dp")
_EXPERT_GRID = product("etp", "ep")


def _with_before_pp(*names: str) -> Condition:
    """Pipelines of experts in orders in which of tp, cp and ep just these vary faster than pp."""
    faster = [{*order[: order.index("pp")].split("-")} - {"dp", ""} for order in RANK_ORDERS]
    return all_of(MOE, PIPELINED, one_of("rank_order", tuple(code for code, each in enumerate(faster) if each == {*names})))


_SAME_STRIDE_OF_STAGES = (  # where all three vary faster C004a says it, and dp is edp
    implies(_with_before_pp("tp"), equal("etp", "tp")),
    implies(_with_before_pp("cp"), equal("cp", 1)),
    implies(_with_before_pp("ep"), equal("ep", 1)),
    implies(_with_before_pp("tp", "cp"), equal("etp", product("tp", "cp"))),
    implies(_with_before_pp("tp", "ep"), equal(_EXPERT_GRID, "tp")),
    implies(_with_before_pp("cp", "ep"), equal("ep", "cp")),
)

GRIDS: tuple[Rule, ...] = (
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
        implies(all_of(MOE, one_of("rank_order", _PP_NOT_LAST), PIPELINED), equal(_EXPERT_GRID, product("tp", "cp"))),
    ),
    Rule(
        "C004b",
        "a dense model's expert grid takes etp = tp, so with pp inside dp its data-parallel size agrees only if cp = 1",
        PARALLEL_STATE,
        MCORE,
        implies(all_of(equal("experts", 0), one_of("rank_order", _PP_NOT_LAST), PIPELINED), equal("cp", 1)),
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
        implies(equal("sharding", HSDP), divides("ep", product("hsdp", "tp"))),
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
        "C012c",
        "models by class of MindSpore Transformers cut every expert over the TP ranks too",
        "mindformers 2.1 models/llama/llama_layer.py",
        MINDFORMERS,
        implies(all_of(equal("experts_across_tp", 0), MOE), equal("etp", "tp")),
    ),
    Rule(
        "C013",
        "an HSDP group is a part of the data-parallel group",
        PARALLEL_STATE,
        "arithmetic",
        implies(equal("sharding", HSDP), all_of(at_least("hsdp", 1), divides("hsdp", product("dp", "cp")))),
    ),
    Rule(
        "C013b",
        "torchtitan's group that shards one copy of the weights holds whole CP groups",
        "torchtitan torchtitan/distributed/parallel_dims.py",
        TORCHTITAN,
        implies(equal("sharding", HSDP), divides("cp", "hsdp")),
    ),
)

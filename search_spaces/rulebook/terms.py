"""What rules of several topics speak of: frameworks, files of theirs, codes of words, and conditions."""

from __future__ import annotations

from ..conditions import equal, more_than, one_of
from ..expressions import product
from ..layout import RECOMPUTE_MODULES, SCHEDULES, SHARDINGS
from ..stack import MEGATRON_CORE
from .rule import Frameworks


def codes(vocabulary: tuple[str, ...], *names: str) -> tuple[int, ...]:
    """The places of names in a vocabulary, which are what its column holds."""
    return tuple(vocabulary.index(name) for name in names)


def module(*names: str) -> int:
    """The bits of recompute modules, one for each."""
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

INTERLEAVED, DUALPIPE, DUALPIPEV, ZB_V = codes(SCHEDULES, "interleaved", "dualpipe", "dualpipev", "zb-v")
V_SHAPED = one_of("schedule", (DUALPIPEV, ZB_V))
HSDP = SHARDINGS.index("hsdp")
CHUNKS = product("pp", "vpp")
MOE = more_than("experts", 0)
SPLIT_TP = more_than("tp", 1)
PIPELINED = more_than("pp", 1)
INTERLEAVES = equal("schedule", INTERLEAVED)

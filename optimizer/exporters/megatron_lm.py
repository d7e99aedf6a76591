"""A plan as a launch script of Megatron-LM."""

from __future__ import annotations

from ..result import Plan
from . import megatron_gpu as gpu
from .megatron_family import Groups, asked_of, options, script_files
from .megatron_model import MegatronRequest
from .megatron_parallel import optimizer_precision_settings

FRAMEWORK = "megatron-lm"


def _groups(asked: MegatronRequest) -> Groups:
    return {
        "MODEL_ARGS": [asked.speaks.set("mcore_models"), *gpu.model_settings(asked)],
        "PARALLEL_ARGS": gpu.parallel_settings(asked),
        "MEMORY_ARGS": [
            *gpu.sharding_settings(asked),
            *optimizer_precision_settings(asked),
            *gpu.memory_settings(asked),
        ],
        "PRECISION_ARGS": [*gpu.precision_settings(asked), *gpu.kernel_settings(asked)],
    }


FAMILY = gpu.family(FRAMEWORK, _groups)


def flags(plan: Plan, version: str | None = None) -> list[tuple[str, ...]]:
    """Every option that the plan decides, with its values, as one list; Infeasible says what Megatron-LM cannot express."""
    return options(FAMILY, plan, version)


def environment(plan: Plan, version: str | None = None) -> dict[str, str | None]:
    """Environment variables that the layout needs; None stands for one that must not be set."""
    return gpu.environment(asked_of(FAMILY, plan, version))


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """megatron-lm.sh, a complete launch script; Infeasible as for `flags`."""
    return script_files(FAMILY, plan, version, "MEGATRON_PATH")

"""A plan as a program of Megatron-Bridge: a Python file that fills a ConfigContainer, and the script that starts it."""

from __future__ import annotations

from ...search_spaces.model import LatentAttention
from ..result import Plan
from . import megatron_gpu as gpu
from .folder import folder
from .knobs import Settings
from .launch import Script, Variable, commented, launch_script, origin
from .megatron_family import Groups, asked_of, left_open, model_notes, with_load
from .megatron_model import MegatronRequest
from .megatron_parallel import optimizer_precision_settings
from .python_file import call, read, sections

FRAMEWORK = "megatron-bridge"
FILE = "megatron_bridge_plan.py"
SCRIPT = "megatron-bridge.sh"

CLASSES = {
    "train": "TrainingConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dist": "DistributedInitConfig",
    "dataset": "GPTDatasetConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "logger": "LoggerConfig",
}
"""Sections of a ConfigContainer beside the model, and the classes that fill them."""

IMPORTS = {
    "dataclass": "from dataclasses import dataclass",
    "torch.": "import torch",
    "GPTModelProvider": "from megatron.bridge.models.gpt_provider import GPTModelProvider",
    "MLATransformerConfig": "from megatron.bridge.models.transformer_config import MLATransformerConfig",
    "ConfigContainer": "\n    ".join(
        ["from megatron.bridge.training.config import (", *(f"{name}," for name in sorted(["ConfigContainer", *CLASSES.values()]))]
    )
    + "\n)",
    "forward_step": "from megatron.bridge.training.gpt_step import forward_step",
    "get_mixed_precision_config": "from megatron.bridge.training.mixed_precision import get_mixed_precision_config",
    "pretrain": "from megatron.bridge.training.pretrain import pretrain",
    "quick_gelu": "from megatron.core.fusions.fused_bias_geglu import quick_gelu",
    "AttnBackend": "from megatron.core.transformer.enums import AttnBackend",
}
"""What the program imports if it uses the name."""

DATA = {"random_seed": 1234, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
"""Megatron-LM's defaults, which a GPTDatasetConfig does not have."""


def settings(plan: Plan, version: str | None = None) -> Settings:
    """Every field that the plan decides; Infeasible says what Megatron-Bridge cannot express."""
    return [setting for group in _groups(asked_of(FAMILY, plan, version)).values() for setting in group]


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """megatron-bridge.sh and the program that it starts; Infeasible as for `settings`."""
    asked = asked_of(FAMILY, plan, version)
    left = left_open(asked)
    script = Script(
        command=(f'"${{HERE}}/{FILE}"',),
        variables=list(left.values()),
        environment=gpu.environment(asked),
        notes=[*model_notes(asked), *gpu.notes(asked)],
        takes_options=False,
    )
    steps = (
        f"Install {asked.speaks.title} on every server.",
        f"Set the variables that the top of {SCRIPT} lists; `bash {SCRIPT}` names all that are missing.",
        f"What else the framework is to do differently is changed in {FILE}, in the class whose field it is.",
        f"Run `NODE_RANK=N MASTER_ADDR=… bash {SCRIPT}` on every server, N as in hosts.csv.",
    )
    return folder(asked, {SCRIPT: launch_script(asked, script), FILE: _program(asked, left)}, steps, script.notes)


def _groups(asked: MegatronRequest) -> Groups:
    return {
        "model": gpu.model_settings(asked),
        "parallel": [*gpu.parallel_settings(asked), *_told(asked)],
        "memory": [*gpu.sharding_settings(asked), *gpu.memory_settings(asked)],
        "precision": [*gpu.precision_settings(asked), *optimizer_precision_settings(asked), *gpu.kernel_settings(asked)],
        "fixed": [*asked.speaks.sets(**FAMILY.fixed), asked.speaks.set("data_seq_len", asked.problem.workload.seq_len)],
    }


def _told(asked: MegatronRequest) -> Settings:
    """What Megatron-LM derives from its options and a ConfigContainer must be told."""
    pipeline_type = "fp16" if asked.precision == "fp16" else "bf16"
    return asked.speaks.sets(
        vpp=asked.layout.vpp if asked.layout.vpp > 1 else None,  # the layout string does not reach all that ask for it
        pipeline_type=pipeline_type if asked.layout.pp > 1 else None,
        optimizer_zero1=asked.layout.optimizer_sharding != "none",
    )


def _program(asked: MegatronRequest, left: dict[str, Variable]) -> str:
    opened = [asked.speaks.set(knob, read(variable)) for knob, variable in with_load(left)]
    fields = sections([*(setting for group in _groups(asked).values() for setting in group), *opened])
    latent = isinstance(asked.architecture.attention, LatentAttention)
    precision = fields.pop("mixed_precision", {})
    recipe = fields.pop("")["mixed_precision"]
    model = fields.pop("model")
    fields["dataset"] = DATA | fields["dataset"]
    body = [
        *(
            ["@dataclass", "class Provider(MLATransformerConfig, GPTModelProvider):", '    """Latent attention."""', "", ""]
            * latent
        ),
        "def config() -> ConfigContainer:",
        '    """Everything that the plan decides."""',
        f"    precision = get_mixed_precision_config({recipe!r})",
        *(f"    precision.{field} = {value!r}" for field, value in precision.items()),
        f"    model = {call('Provider' if latent else 'GPTModelProvider', model)}",
        "    return ConfigContainer(",
        "        model=model,",
        *(f"        {name}={call(kind, fields.get(name, {}), 8)}," for name, kind in CLASSES.items()),
        "        mixed_precision=precision,",
        "    )",
        "",
        "",
        'if __name__ == "__main__":',
        "    pretrain(config(), forward_step)",
        "",
    ]
    used = [line for name, line in IMPORTS.items() if any(name in line for line in body)]
    return "\n".join([*commented([origin(asked)]), "import os", *used, "", "", *body])


FAMILY = gpu.family(FRAMEWORK, _groups)

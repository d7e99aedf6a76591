"""Megatron-Bridge: overrides such as `model.tensor_model_parallel_size=8 train.global_batch_size=1024`, or the same as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...search_spaces.documents import parse_document
from ...search_spaces.errors import InputError
from ...search_spaces.inputs import catalog_names
from .dialects import knobs_of
from .job import Job
from .megatron import job_of
from .megatron_script import world
from .options import Knobs
from .shell import options, read_script

FRAMEWORK = "megatron-bridge"
OVERRIDE = re.compile(
    r"\+{0,2}((?:model|train|ddp|dist|optimizer|comm_overlap|mixed_precision|dataset|checkpoint|scheduler)\.[\w.]+)=(.*)", re.DOTALL
)

OWN = {
    "model.virtual_pipeline_model_parallel_size": "vpp",
    "model.pipeline_model_parallel_layout": "layout",
    "model.num_layers_in_first_pipeline_stage": "first_stage_layers",
    "model.num_layers_in_last_pipeline_stage": "last_stage_layers",
    "model.account_for_embedding_in_pipeline_split": "count_embedding",
    "model.account_for_loss_in_pipeline_split": "count_loss",
    "model.seq_length": "seq_len",
    "dataset.sequence_length": "seq_len",
    "dataset.seq_length": "seq_len",
    "model.vocab_size": "vocab",
    "model.gated_linear_unit": "gated",
    "model.add_qkv_bias": "qkv_bias",
    "model.num_moe_experts": "experts",
    "dist.use_tp_pp_dp_mapping": "rank_order_pp_inside_dp",
    "dist.use_megatron_fsdp": "fsdp",
    "ddp.use_megatron_fsdp": "fsdp",
    "ddp.data_parallel_sharding_strategy": "fsdp_strategy",
    "ddp.overlap_grad_reduce": "overlap_gradients",
    "ddp.overlap_param_gather": "overlap_parameters",
    "comm_overlap.overlap_grad_reduce": "overlap_gradients",
    "comm_overlap.overlap_param_gather": "overlap_parameters",
    "comm_overlap.tp_comm_overlap": "overlap_tp",
    "comm_overlap.overlap_moe_expert_parallel_comm": "overlap_ep",
    "ddp.grad_reduce_in_fp32": "gradients_fp32",
    "mixed_precision.grad_reduce_in_fp32": "gradients_fp32",
    "optimizer.optimizer_cpu_offload": "optimizer_offload",
    "optimizer.optimizer_offload_fraction": "optimizer_offload_fraction",
}
"""Keys that are not the option of Megatron-LM with underscores."""
SWITCHED_ON = {
    "zero1": "ddp.use_distributed_optimizer",
    "overlap_gradients": "ddp.overlap_grad_reduce",
    "overlap_parameters": "ddp.overlap_param_gather",
}
"""What a recipe has on unless it says otherwise."""


def overrides(text: str, where: str = "script") -> list[tuple[str, str]]:
    """The key=value pairs of the family in a text, launchers and the rest left out."""
    words = [word for line in read_script(text, None, where).commands for word in line]
    assigned = re.findall(r"(?:^|[\s\"'])(\+{0,2}(?:model|train|ddp|dist|optimizer|comm_overlap|dataset)\.[\w.]+=)", text)
    found = [match.groups() for match in (OVERRIDE.fullmatch(word) for word in words) if match]
    return [(key, value) for key, value in found] if assigned else []


def read(text: str, where: str, devices: int | None = None, variables: Mapping[str, str] | None = None) -> Job:
    """The job of an override list or of a YAML file of overrides. InputError where it holds none."""
    pairs = overrides(text, where) if variables is None else _with(text, variables)
    if not pairs:
        pairs = list(_flat(parse_document(text, where))) if not text.lstrip().startswith("-") else []
        pairs = [(key, value) for key, value in pairs if OVERRIDE.fullmatch(f"{key}={value}")]
    if not pairs:
        raise InputError(f"{where}: holds no override of {FRAMEWORK}, such as model.tensor_model_parallel_size=8")
    knobs, precision = _knobs(pairs, where)
    script = read_script(text, variables, where)
    job = job_of(
        knobs, FRAMEWORK, FRAMEWORK, devices or world(script, [o for words in script.commands for o in options(words)], where)
    )
    said = [
        f"{key} is on: {FRAMEWORK} has it so where nothing is said"
        for knob, key in SWITCHED_ON.items()
        if key in knobs.names.get(knob, "")
    ]
    dropped = ("bf16: neither", "optimizer states", "gradient reduction")
    kept = [each for each in job.assumptions if not each.startswith(dropped)]
    recipe = re.search(r"--recipe[= ]\s*(\S+)", text)
    named = _recipe_model(recipe.group(1)) if recipe else None
    base = [f"what recipe {recipe.group(1)} sets beyond these overrides is not known here"] if recipe else []
    if named is not None and job.model is None:
        base.append(f"model {named}: by the name of the recipe")
    changes = dict(job.stack_changes)
    if (
        dict(pairs).get("ddp.grad_reduce_in_fp32", dict(pairs).get("mixed_precision.grad_reduce_in_fp32", "true")).lower()
        == "false"
    ):
        changes["gradient_bytes"] = 2
    return Job(
        **{
            **vars(job),
            "assumptions": (*base, *said, *kept),
            "precision": precision or "bf16",
            "stack_changes": changes,
            "model_name": named,
        }
    )


def _recipe_model(recipe: str) -> str | None:
    """The catalog's model that a recipe such as kimi_k2_pretrain_config is for."""
    name = re.split(r"_(?:pretrain|sft|finetune|peft|lora)", recipe)[0].replace("_", "-")
    return name if name in catalog_names("models") else None


def _with(text: str, variables: Mapping[str, str]) -> list[tuple[str, str]]:
    words = [word for line in read_script(text, variables).commands for word in line]
    return [(m.group(1), m.group(2)) for m in (OVERRIDE.fullmatch(word) for word in words) if m]


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _flat(value, at)
        else:
            yield at, "null" if value is None else str(value)


def _knobs(pairs: list[tuple[str, str]], where: str) -> tuple[Knobs, str | None]:
    table = {name.replace("-", "_"): knob for name, (knob, _) in knobs_of("megatron-lm").items()}
    knobs, precision = Knobs(where), None
    for key, raw in pairs:
        value = raw.strip().strip("'\"")
        knob = OWN.get(key) or table.get(key.rpartition(".")[2])
        if key.startswith("mixed_precision") and "=" not in value and knob is None:
            precision = next((name for name in ("fp8", "fp4", "fp16", "bf16") if name in value.lower()), precision)
        elif knob is None:
            knobs.unknown.append(f"{key}={raw}")
        elif value.lower() in ("null", "none", "~", "false"):
            knobs.values.pop(knob, None)
            knobs.names[knob] = f"{key}=false"
        else:
            knobs.add(knob, key, () if value.lower() == "true" else _values(knob, value))
    for knob, key in SWITCHED_ON.items():
        if knob not in knobs.values and knob not in knobs.names:
            knobs.values[knob], knobs.names[knob] = (), f"{key} (default)"
    return knobs, precision


def _values(knob: str, value: str) -> tuple[str, ...]:
    """A list such as [core_attn,mlp] as its words; a layout of Python lists as a layout string."""
    if knob == "layout" and "[" in value:
        return (_layout_string(value),)
    if value.startswith("[") and knob != "moe_pattern":
        return tuple(part.strip().strip("'\"") for part in value.strip("[]").split(",") if part.strip())
    if knob == "positions":
        return (value,)
    return (value,)


def _layout_string(text: str) -> str:
    """[[embedding,decoder],[decoder,loss]] as "Et|tL"."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    chunks = re.findall(r"\[([^\[\]]*)\]", text)
    return "|".join("".join(letters.get(word, "?") for word in re.findall(r"\w+", chunk)) for chunk in chunks)

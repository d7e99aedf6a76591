"""Megatron-Bridge: overrides such as `model.tensor_model_parallel_size=8 train.global_batch_size=1024`, the same as YAML, or a
Python program that fills a ConfigContainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...search_spaces.documents import parse_document
from ...search_spaces.errors import InputError
from ...search_spaces.inputs import catalog_names, load_model
from .arguments import empty_words
from .dialects import knobs_of, switches_of
from .job import Job
from .megatron import job_of
from .option_words import misspelt_fields
from .options import Knobs
from .processes import world
from .python_source import Made, Source, flat, is_python, objects, richest
from .shell import UNSET, Script, options, read_script, shown, unresolved, without_value
from .unmodelled import unmodelled

FRAMEWORK = "megatron-bridge"
OVERRIDE = re.compile(
    r"\+{0,2}((?:model|train|ddp|dist|optimizer|comm_overlap|mixed_precision|dataset|checkpoint|scheduler)\.[\w.]+|mixed_precision)=(.*)",
    re.DOTALL,
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
    "model.cross_entropy_fusion_impl": "loss_kernel",
    "dist.use_tp_pp_dp_mapping": "rank_order_pp_inside_dp",
    "dist.use_megatron_fsdp": "fsdp",
    "ddp.use_megatron_fsdp": "fsdp",
    "ddp.data_parallel_sharding_strategy": "fsdp_strategy",
    "ddp.overlap_grad_reduce": "overlap_gradients",
    "ddp.overlap_param_gather": "overlap_parameters",
    "ddp.bucket_size": "gradient_bucket",
    "mixed_precision.fp8_param_gather": "fp8_parameters",
    "mixed_precision.fp8_param": "fp8_parameters",
    "ddp.fp8_param_gather": "fp8_parameters",
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
CONTAINER = "ConfigContainer"
"""The class whose sections a program fills; what else makes a configuration is a recipe."""
PLAIN = ("dataset.random_seed", "dataset.reset_", "dataset.eod_", "rng.", "logger.", "profiling.", "scheduler.", "nccl_")
"""Fields that no layout hangs on."""
CONSTANT = re.compile(r"(?:torch|AttnBackend)\.[\w.]+|quick_gelu")
"""Names of a library's constants and functions: values, though not written out."""
SWITCHED_ON = {
    "zero1": "ddp.use_distributed_optimizer",
    "overlap_gradients": "ddp.overlap_grad_reduce",
    "overlap_parameters": "ddp.overlap_param_gather",
}
"""What a recipe has on unless it says otherwise."""

SAME_WEIGHTS = {"llama3-8b": "llama-3.1-8b", "llama3-70b": "llama-3.1-70b"}
"""Models whose config.json differs from the catalog's in positions alone: Llama 3 has 8,192, and no scaling of RoPE."""


def overrides(text: str, where: str = "script") -> list[tuple[str, str]]:
    """The key=value pairs of the family in a text, launchers and the rest left out."""
    words = _overriding(read_script(text, None, where, surely=False))
    assigned = re.findall(r"(?:^|[\s\"'])(\+{0,2}(?:model|train|ddp|dist|optimizer|comm_overlap|dataset)\.[\w.]+=)", text)
    found = [match.groups() for match in (OVERRIDE.fullmatch(word) for word in words) if match]
    return [(key, value) for key, value in found] if assigned else []


def _overriding(script: Script) -> list[str]:
    """The words of the command with most overrides, or of all lines together where some are nothing but overrides."""
    counts = [sum(map(bool, map(OVERRIDE.fullmatch, words))) for words in script.commands]
    if any(count == len(words) for count, words in zip(counts, script.commands, strict=True)):
        return [word for words in script.commands for word in words]
    return script.commands[counts.index(max(counts))] if counts else []


def read(text: str, where: str, devices: int | None = None, variables: Mapping[str, str] | None = None) -> Job:
    """The job of an override list, of a YAML file of overrides or of a program. InputError where it holds none."""
    if is_python(text):
        made = program(text, where)
        if made is None:
            raise InputError(f"{where}: sets no field of {FRAMEWORK}, such as model.tensor_model_parallel_size")
        classes = made.name.endswith(CONTAINER)
        job = _job(list(_fields(made)), where, devices, recipe=None if classes else made.name or None, switched=not classes)
        return replace(job, unmodelled=unmodelled(FRAMEWORK, [("recipe", made.name), *flat(made)]))
    pairs = overrides(text, where) if variables is None else _with(text, where, variables)
    keys = list(_flat(parse_document(text, where, aliases=True))) if not pairs and not text.lstrip().startswith("-") else []
    pairs = pairs or [(key, value) for key, value in keys if OVERRIDE.fullmatch(f"{key}={value}")]
    if not pairs:
        raise InputError(f"{where}: holds no override of {FRAMEWORK}, such as model.tensor_model_parallel_size=8")
    script = read_script(text, variables, where)
    started = devices or world(script, [o for words in script.commands for o in options(words)], where)
    found = [option for words in script.commands for option in options(words)]
    given = [(option.name, option.values[0] if option.values else True) for option in found]
    recipe = next((str(value) for name, value in given if name == "recipe" and not unresolved(str(value))), None)
    job = _job(pairs, where, started, recipe=recipe)
    told = replace(job, assumptions=(*script.decisions, *job.assumptions), unmodelled=_unmodelled(script, [*given, *pairs, *keys]))
    return replace(told, unresolved=(*job.unresolved, *map(without_value, empty_words(_overriding(script)))))


def _unmodelled(script: Script, given: Sequence[tuple[str, object]]) -> tuple[str, ...]:
    """What options and keys ask for that is not modelled, those of sections that are not read otherwise among them."""
    words = [word.lstrip("+") for line in script.commands for word in line]
    keys = [(key, value) for key, equals, value in (word.partition("=") for word in words) if equals and not key.startswith("-")]
    return unmodelled(FRAMEWORK, [*given, *keys])


def program(text: str, where: str) -> Made | None:
    """The configuration of a Python program: of all that it makes, what has most of the family's fields."""
    return richest(objects(text, where), frozenset({*OWN, *(name for name in knobs_of(FRAMEWORK) if "." in name)}))


def _fields(made: Made) -> list[tuple[str, str]]:
    """Every field that holds a value, as an override would write it; what no knob has and no layout hangs on is left out."""
    found = []
    for name, value in flat(made):
        if isinstance(value, Made):
            if name == "mixed_precision" and value.arguments and isinstance(value.arguments[0], str):
                found.append((name, value.arguments[0]))
            elif not value.fields and value.arguments:
                found.append((name, _unset(value.text)))
        elif not name.startswith(PLAIN):
            found.append((name, _unset(value) if isinstance(value, Source) and not CONSTANT.fullmatch(value) else str(value)))
    return [(name, value) for name, value in found if not name.startswith(PLAIN)]


def _unset(text: str) -> str:
    return f"{UNSET}{text}{UNSET}"


def _job(pairs: list[tuple[str, str]], where: str, devices: int | None, recipe: str | None, switched: bool = True) -> Job:
    """The job of some fields, which stand on a recipe or, not `switched`, on the classes' own defaults."""
    knobs, precision = knobs_of_fields(pairs, where, switched)
    whole_experts = recipe is not None and "etp" not in knobs.names
    if whole_experts:
        knobs.values["etp"] = ("1",)
    job = job_of(knobs, FRAMEWORK, FRAMEWORK, devices)
    said = [
        f"{key} is on: {FRAMEWORK} has it so where nothing is said"
        for knob, key in SWITCHED_ON.items()
        if knobs.names.get(knob) == f"{key} (default)"
    ]
    dropped = ("bf16: neither", "optimizer states", "gradient reduction")
    kept = [each for each in job.assumptions if not each.startswith(dropped)]
    named = _recipe_model(recipe) if recipe else None
    base = [f"what recipe {recipe} sets beyond these is not known here"] if recipe else []
    if named is not None and job.model is None:
        base.append(f"model {named}: by the name of the recipe")
    if whole_experts and (job.degrees["ep"] > 1 or (named is not None and load_model(named).moe_kinds)):
        base.append("etp 1: left out here, and every recipe that sets model.expert_tensor_parallel_size sets 1")
    by_name = _recipe_precision(recipe) if recipe else None
    if by_name is not None and precision is None:
        base.append(f"{by_name}: by the name of the recipe")
    changes = dict(job.stack_changes)
    if (
        dict(pairs).get("ddp.grad_reduce_in_fp32", dict(pairs).get("mixed_precision.grad_reduce_in_fp32", "true")).lower()
        == "false"
    ):
        changes["gradient_bytes"] = 2
    return Job(
        **{
            **vars(job),
            "findings": (*job.findings, *misspelt_fields(pairs, FRAMEWORK)),
            "assumptions": (*base, *said, *kept),
            "precision": precision or by_name or "bf16",
            "stack_changes": changes,
            "model_name": named,
            "recipe": recipe,
        }
    )


def _recipe_model(recipe: str) -> str | None:
    """The catalog's model that a recipe such as kimi_k2_pretrain_config is for."""
    name = re.split(r"_(?:pretrain|sft|finetune|peft|lora)", recipe)[0].replace("_", "-")
    plain = {re.sub(r"[-._]", "", known): known for known in catalog_names("models")}  # llama31_70b is llama-3.1-70b
    bare = re.sub(r"[-._]", "", name)
    sizes = [known for short, known in plain.items() if short.startswith(bare)]  # nemotron_3_nano is the only one of its name
    only = sizes[0] if len(sizes) == 1 and bare else None
    return name if name in plain.values() else plain.get(bare, SAME_WEIGHTS.get(name, only))


def _recipe_precision(recipe: str) -> str | None:
    """The precision that a recipe such as deepseek_v4_flash_pretrain_mxfp8_config is named for."""
    found = re.search(r"_(?:mx|nv)?(fp8|fp4|bf16)(?=_)", recipe)
    return found.group(1) if found else None


def _with(text: str, where: str, variables: Mapping[str, str]) -> list[tuple[str, str]]:
    words = _overriding(read_script(text, variables, where))
    return [(m.group(1), m.group(2)) for m in (OVERRIDE.fullmatch(word) for word in words) if m]


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _flat(value, at)
        else:
            yield at, "null" if value is None else str(value)


def knobs_of_fields(pairs: list[tuple[str, str]], where: str, switched: bool) -> tuple[Knobs, str | None]:
    """(knobs, precision) of fields; with what a recipe has on where it is `switched`."""
    table = {name.replace("-", "_"): knob for name, (knob, _) in knobs_of("megatron-lm").items()}
    own, switches = knobs_of(FRAMEWORK), switches_of(FRAMEWORK)
    knobs, precision = Knobs(where), None
    for key, raw in pairs:
        value = raw.strip().strip("'\"")
        named, words = own.get(key, (None, {}))
        knob = OWN.get(key) or named or table.get(key.rpartition(".")[2])
        if key.startswith("mixed_precision") and (key == "mixed_precision" or knob is None) and "=" not in value:
            precision = next((name for name in ("fp8", "fp4", "fp16", "bf16") if name in value.lower()), precision)
        elif (key, value.lower()) in switches:
            knobs.add(switches[key, value.lower()], key, ())
        elif knob is None:
            knobs.unknown.append(f"{key}={shown(raw)}")
        elif value.lower() in ("null", "none", "~", "false"):
            knobs.values.pop(knob, None)
            knobs.names[knob] = f"{key}=false"
        else:
            knobs.add(knob, key, () if value.lower() == "true" else _values(knob, words.get(value, value)))
    for knob, key in SWITCHED_ON.items():
        if switched and knob not in knobs.values and knob not in knobs.names:
            knobs.values[knob], knobs.names[knob] = (), f"{key} (default)"
    if knobs.has("kv_heads"):  # the field alone says that heads share keys and values
        knobs.values["grouped_query"] = ()
    return knobs, precision


PATTERNS = frozenset({"moe_pattern", "window_pattern", "linear_pattern"})
"""Knobs whose lists say something of every layer."""


def _values(knob: str, value: str) -> tuple[str, ...]:
    """A list such as [core_attn,mlp] as its words; a layout of Python lists as a layout string."""
    if knob == "layout" and "[" in value:
        return (_layout_string(value),)
    if value.startswith("[") and knob not in PATTERNS:
        return tuple(part.strip().strip("'\"") for part in value.strip("[]").split(",") if part.strip())
    return (value,)


def _layout_string(text: str) -> str:
    """[[embedding,decoder],[decoder,loss]] as "Et|tL"."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    chunks = re.findall(r"\[([^\[\]]*)\]", text)
    return "|".join("".join(letters.get(word, "?") for word in re.findall(r"\w+", chunk)) for chunk in chunks)

"""verl: the overrides that lay out its Megatron actor, or the engine of its supervised trainer.

What an actor trains on is generated in between, so that its layout is judged and has no price. FSDP actors are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...search_spaces.errors import InputError
from .arguments import empty_words
from .around_megatron import catalogued
from .job import Job
from .megatron import job_of
from .megatron_bridge import knobs_of_fields
from .options import Knobs, whole
from .processes import world
from .shell import options, read_script, shown, unresolved, without_value
from .unmodelled import PACKED, ROLLOUTS, unmodelled

FORMAT, FRAMEWORK = "verl", "megatron-lm"
OVERRIDE = re.compile(r"\+{0,2}~?([a-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
ACTOR, ENGINE = "actor_rollout_ref.actor.", "engine."
SECTIONS = {
    "megatron.override_transformer_config.": "model.",
    "megatron.override_ddp_config.": "ddp.",
    "optim.override_optimizer_config.": "optimizer.",
    "megatron.use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "megatron.use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "megatron.": "model.",
}
"""Beginnings of an actor's keys → of Megatron-Bridge's that say the same."""
DEFAULTS = {"model.sequence_parallel": "true", "ddp.use_distributed_optimizer": "true"}
"""What a Megatron engine has on unless it is told otherwise (verl/workers/config/engine.py)."""
PLAIN = re.compile(
    r"megatron\.(?:\w+_offload|.*ckpt.*|\w*mbridge|.*checkpoint.*|seed|dtype|pad_\w+|entropy_\w+|use_remove_padding|forward_only|strategy"
    r"|dynamic_\w+|router_replay\..*|profile.*)"
    r"|.*\.(?:moe_permute_fusion|moe_router_dtype|apply_rope_fusion|use_flash_attn|use_\w+_gdn|use_fused_\w+|persist_layer_norm"
    r"|masked_softmax_fusion|deallocate_pipeline_outputs|bias_\w+_fusion|moe_(?:z|aux)_loss_coeff|moe_router_\w+"
    r"|gradient_accumulation_fusion)"
)
"""Keys that no layout hangs on; engines leave memory to each other between their turns."""
DROPPED = ("bf16: neither", "optimizer states", "gradient reduction", "the allgather dispatcher")


def is_verl(text: str) -> bool:
    """Whether a text starts one of verl's trainers."""
    return bool(re.search(r"\bverl\.(?:trainer|experimental)|\bactor_rollout_ref\.", text))


def read(text: str, where: str, devices: int | None = None, variables: Mapping[str, str] | None = None) -> Job:
    """The job of a launch script. InputError where no Megatron engine is laid out."""
    script = read_script(text, variables, where)
    words = max(script.commands, key=lambda line: len(list(_pairs(line))), default=[])
    given = dict(_pairs(words))
    start = next((each for each in (ACTOR, ENGINE) if any(key.startswith(each) for key in given)), ACTOR)
    own = {key.removeprefix(start): value for key, value in given.items() if key.startswith(start)}
    own = {(key if start == ACTOR or "." in key else f"megatron.{key}"): value for key, value in own.items()}
    if not any(re.fullmatch(r"megatron\.\w+_parallel_size", key) and "ulysses" not in key for key in own):
        raise InputError(
            f"{where}: is verl's and lays out no Megatron engine (actor_rollout_ref.actor.megatron.…); FSDP engines are not read, "
            "give their layout such as tp=1,cp=4"
        )
    knobs = _knobs(own, start, where)
    rolled = start == ACTOR
    started = _processes(given, where) if rolled else world(script, options(words), where)
    job = job_of(knobs, FRAMEWORK, FORMAT, devices or started)
    asked = unmodelled(FORMAT, given.items())
    said = [each for each in job.assumptions if not each.startswith(DROPPED)]
    model = catalogued(given.get("actor_rollout_ref.model.path" if rolled else "model.path", ""))
    return replace(
        job,
        assumptions=(*script.decisions, *([f"model {model}: by its path"] if model else []), *said),
        precision="bf16",
        model_name=model,
        sizes={**job.sizes, **({"mtp_layers": 1} if given.get("actor_rollout_ref.model.mtp.enable", "").lower() == "true" else {})},
        unmodelled=(*asked, f"{ROLLOUTS} (verl's actor)" if rolled else f"{PACKED} (verl removes padding)"),
        stack_changes={},
        exposed=(),
        unresolved=(*job.unresolved, *map(without_value, empty_words(words))),
    )


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Keys and values of a command line."""
    for match in map(OVERRIDE.fullmatch, words):
        if match:
            yield match.group(1), match.group(2).strip("'\"")


def _processes(given: Mapping[str, str], where: str) -> int | None:
    """Devices that the trainer is given; None where the file does not say."""
    usual = {"nnodes": "1", "n_gpus_per_node": "8"}  # verl/trainer/config
    counts = {name: given.get(f"trainer.{name}", count) for name, count in usual.items()}
    if any(map(unresolved, counts.values())):
        return None
    nodes, each = (whole(count, f"{where}: trainer.{name} =") for name, count in counts.items())
    return nodes * each


def _knobs(own: Mapping[str, str], start: str, where: str) -> Knobs:
    """What an engine's keys set, by the knobs of Megatron-Bridge's; keys are told as they stand in the file."""
    sections = {key: next((new for old, new in SECTIONS.items() if key.startswith(old)), "") for key in own}
    fields = {_renamed(section, key): key for key, section in sections.items() if section and not PLAIN.fullmatch(key)}
    pairs = [*((field, value) for field, value in DEFAULTS.items() if field not in fields)]
    pairs += [(field, own[key]) for field, key in fields.items()]
    dynamic = own.get("use_dynamic_bsz", "false").lower() == "true"
    if "ppo_micro_batch_size_per_gpu" in own and not dynamic:
        pairs.append(("train.micro_batch_size", own["ppo_micro_batch_size_per_gpu"]))
        fields["train.micro_batch_size"] = "ppo_micro_batch_size_per_gpu"
    knobs, _ = knobs_of_fields(pairs, where, switched=False)
    knobs.parsed = False
    if (knobs.text("tp") or "1") == "1":  # it turns sequence parallelism off there
        knobs.values.pop("sequence_parallel", None)
    knobs.names = {knob: f"{start}{fields[name]}" if name in fields else name for knob, name in knobs.names.items()}
    knobs.unknown = [_as_in_file(each, fields, start) for each in knobs.unknown]
    return knobs


def _renamed(section: str, key: str) -> str:
    """An engine's key as Megatron-Bridge's."""
    return section if not section.endswith(".") else f"{section}{key.rpartition('.')[2]}"


def _as_in_file(pair: str, fields: Mapping[str, str], start: str) -> str:
    name, _, value = pair.partition("=")
    return f"{start}{fields.get(name, name)}={shown(value)}"

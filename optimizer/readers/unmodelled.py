"""Training that no price here is for, adapters, frozen parts or packed sequences: one table of the options that ask for it.

Names are compared in lower case with underscores, as dotted keys or options. What is modelled trains every parameter on sequences
that each fill a row of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sign:
    """What an option asks for: its name, and the value where only some ask for it."""

    asks: str
    name: re.Pattern[str]
    value: re.Pattern[str] | None = None


ADAPTERS, FROZEN, PACKED = "trains adapters", "keeps parameters frozen", "packs sequences"
SLICES = "sends slices of sequences through the pipeline"
GENERATES = "trains nothing"
OWN_CP = "exchanges what CP splits in a way of its own"
PREFERENCES, ROLLOUTS = "trains on preferences, beside a model of reference", "trains on what it generates in between"


def _sign(asks: str, name: str, value: str | None = None) -> Sign:
    return Sign(asks, re.compile(name), re.compile(value, re.IGNORECASE) if value else None)


EVERYWHERE = (
    _sign(ADAPTERS, r"^(?!dataset\.).*?(?:^|\.)(?:q?lora|dora|peft|pet_config|adapters?|mcore_adapter)(?:[._]|$)"),
    _sign(FROZEN, r"(?:^|[._])(?:freeze|frozen)(?:[._]|$)"),
    _sign(PACKED, r"(?:^|[._])(?:pack|packed|packing)(?:[._]|$)"),
)
MEGATRON = (
    _sign(ADAPTERS, r"^(?:train|tuner|finetuning)_type$", r"lora|dora|adapter"),
    _sign(PACKED, r"^(?:sft|padding_free|use_dynamic_batch_size|max_tokens_per_gpu)$"),
    _sign(PREFERENCES, r"^(?:stage|rlhf_type)$", r"(?:dpo|orpo|simpo|kto|cpo|rm|prm)$"),
    _sign(OWN_CP, r"^context_parallel_algo$", r"(?:(?:hybrid_)?adaptive|mamba)_cp_algo$"),
    _sign(GENERATES, r"^(?:max_new_tokens|task_data_path)$"),
    _sign(ROLLOUTS, r"^(?:perform_rl_step|grpo_group_size|rollout_batch_size|num_rollout|vllm_mode)$"),
    _sign(ROLLOUTS, r"^(?:stage|rlhf_type)$", r"(?:ppo|grpo|gkd).*"),
)
OWN = {
    "megatron-lm": MEGATRON,
    "mindspeed-llm": MEGATRON,
    "megatron-bridge": (
        _sign(ADAPTERS, r"^recipe$", r".*_(?:peft|lora|dora)(?:_|$)"),
        _sign(PACKED, r"^recipe$", r".*_packed(?:_|$)"),
    ),
    "mindformers": (
        _sign(PACKED, r"^(?:train_)?dataset\.", r".*packing"),
        _sign(SLICES, r"^parallel\.pipeline_config\.pipeline_scheduler$", r"seq"),
    ),
    "torchtitan": (_sign(ADAPTERS, r"(?:^|\.)(?:converters|config|function)$", r".*lora"),),
}
"""Format → signs that only it has."""
OFF = frozenset({"", "false", "none", "null", "no", "0", "full", "[]", "{}"})
"""Values that ask for nothing."""


FED = re.compile(r"loss_type=sft_loss|rollout_function_path=.*sft.*")
"""Options by which a job that names rollouts trains on a data set."""


def signs_of(form: str, name: str) -> list[Sign]:
    """The signs of a format that an option's name is one of."""
    plain = name.lower().replace("-", "_").removeprefix("no_")
    return [sign for sign in (*EVERYWHERE, *OWN.get(form, ())) if sign.name.search(plain)]


def is_sign(form: str, name: str) -> bool:
    """Whether an option says nothing but that, whatever its value."""
    return any(sign.value is None for sign in signs_of(form, name))


def unmodelled(form: str, pairs: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """What options ask for that is not modelled, each with the first that asks for it; True stands for a bare switch."""
    found: dict[str, str] = {}
    pairs = list(pairs)
    fed = any(FED.fullmatch(f"{name.replace('-', '_')}={value}") for name, value in pairs)
    for name, value in pairs:
        text = "" if value is True else str(value)
        for sign in signs_of(form, name):
            asked = sign.value.match(text) is not None if sign.value else value is True or text.strip().lower() not in OFF
            if asked and not name.startswith(("no-", "no_")) and not (fed and sign.asks == ROLLOUTS):
                found.setdefault(sign.asks, f"{sign.asks} ({_written(form, name, text)})")
    return tuple(found.values())


def _written(form: str, name: str, value: str) -> str:
    """An option or key with its value, as the format writes it."""
    short = value if len(value) <= 40 else f"{value[:39]}…"
    if form in ("megatron-lm", "mindspeed-llm") or name == "recipe":
        return f"--{name} {short}".rstrip()
    return f"{name}={short or 'true'}" if form == "megatron-bridge" else f"{name} = {short or 'true'}"

"""Programs that hand Megatron-LM its arguments, slime and ms-swift: how they spell its options, and what they set themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ...search_spaces.inputs import catalog_names
from .arguments import Option, options
from .options import Knobs
from .shell import Script, shown

SLIME = frozenset({"actor-num-nodes", "actor-num-gpus-per-node"})
"""Options that tell slime."""
SWIFT = re.compile(r"(?:^|\s)megatron\s+(?:sft|pt|rlhf)(?=\s|$)")
"""The command of ms-swift that trains on Megatron-Core."""
SWIFT_SETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "zero1": ("use_distributed_optimizer", ()),
    "bf16": ("bf16", ()),
    "micro_batch": ("micro_batch_size", ("1",)),
    "global_batch": ("global_batch_size", ("16",)),
    "etp": ("expert_tensor_parallel_size", ("1",)),
    "recompute": ("recompute_granularity", ("selective",)),
}
"""Knob → option and value that ms-swift has by default (its page of Megatron parameters, 3.6 to 4.3)."""
SWIFT_WORDS = {"max_length": "seq-length"}
"""Options that ms-swift has in place of Megatron-LM's."""
SWIFT_PLAIN = frozenset({"model", "packing", "dataset", "deepspeed", "columns", "max-epochs", "use-hf", "model-type", "template"})
TUNED = re.compile(r"-(?:base|instruct|chat|thinking|it)(?:-\d{4})?$")
"""What is behind a model's name where only its training differs."""


def is_swift(text: str) -> bool:
    """Whether a command line is ms-swift's."""
    return bool(SWIFT.search(text))


def spelled(words: Sequence[str], known: Iterable[str]) -> list[Option]:
    """The options of a command line; one that is Megatron's with underscores is that one, true a bare switch and false none."""
    found, known, swift = [], set(known), is_swift(" ".join(words))
    for option in options(words):
        name = SWIFT_WORDS.get(option.name, option.name.replace("_", "-")) if swift else option.name.replace("_", "-")
        if option.name in known or name not in known:
            found.append(option)
        elif option.values in (("true",), ("True",)):
            found.append(Option(name, ()))
        elif option.values not in (("false",), ("False",), ("none",), ("None",)):
            found.append(Option(name, option.values))
    return found


def set_beside(knobs: Knobs, words: Sequence[str]) -> tuple[str, ...]:
    """What slime or ms-swift sets itself, in sentences, and sets it."""
    given = {option.name.replace("_", "-"): option.values for option in options(words)}
    if SLIME & given.keys():
        for knob in ("zero1", *(() if knobs.has("fp16") else ("bf16",))):
            knobs.values.setdefault(knob, ())
        return ("the distributed optimizer and bf16: slime sets them itself",)
    if not is_swift(" ".join(words)):
        return ()
    kept = {option for option, values in given.items() if values in (("false",), ("none",))}
    said = []
    for knob, (option, values) in SWIFT_SETS.items():
        if not knobs.has(knob) and option.replace("_", "-") not in kept and not (knob == "bf16" and knobs.has("fp16")):
            knobs.values[knob], knobs.names[knob] = values, f"--{option}"
            said.append(" ".join((option, *values)))
    return (f"what ms-swift has by default: {', '.join(said)}",) if said else ()


def swift_processes(script: Script, words: Sequence[str]) -> int | None:
    """Processes that ms-swift starts by itself: those of a server on one server; None where the script has more servers, or its
    commands start several numbers.
    """
    alone = is_swift(" ".join(words)) and "NNODES" not in script.variables and "NPROC_PER_NODE" not in script.conflicts
    return script.number("NPROC_PER_NODE") if alone else None


def swift_model(words: Sequence[str]) -> str | None:
    """The catalog's model that ms-swift is given by its name on a hub."""
    given = next((option.values[0] for option in options(words) if option.name == "model" and option.values), "")
    return catalogued(given) if is_swift(" ".join(words)) else None


def catalogued(path: str) -> str | None:
    """The catalog's model of a path, by its last part; None where there is none by that name."""
    name = TUNED.sub("", shown(path).rstrip("/").rsplit("/", 1)[-1].lower())
    return name if name in catalog_names("models") else None

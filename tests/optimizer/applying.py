"""Advised changes made in a configuration, word for word and by nothing else: what a person does who takes the advice."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

import yaml
from paraplan.optimizer.checking.checked import AND, Change
from paraplan.optimizer.readers.shell import options

Parts = list[tuple[str, str]]
"""(what goes, what comes), one for every option or key."""


def applied(form: str, text: str, changes: Iterable[Change]) -> str:
    """The configuration with what stands on the left of each change taken out, and what stands on its right put in."""
    pairs = [pair for each in changes for pair in zip(each.before.split(AND), each.after.split(AND), strict=True)]
    return _APPLY[form](text, pairs)


def made(form: str, text: str, words: Iterable[str]) -> str:
    """The configuration with every one of some options or keys put in."""
    return _APPLY[form](text, [("", word) for word in words])


def _megatron(text: str, pairs: Parts) -> str:
    words = shlex.split(text)
    start = next(place for place, word in enumerate(words) if word.startswith("--"))
    held = {option.name: option for option in options(words[start:])}
    for old, new in pairs:
        for option in options(shlex.split(old)) if not old.startswith("no ") else ():
            held.pop(option.name, None)
        if new.startswith("no "):
            held.pop(new.removeprefix("no --"), None)
        for option in options(shlex.split(new)) if not new.startswith("no ") else ():
            held[option.name] = option
    return f"torchrun {' '.join(shlex.join((f'--{option.name}', *option.values)) for option in held.values())}"


def _bridge(text: str, pairs: Parts) -> str:
    start, *words = shlex.split(text)
    held = {word.partition("=")[0]: word for word in words}
    for _, new in pairs:
        held |= {word.partition("=")[0]: word for word in shlex.split(new)}
    return shlex.join((start, *held.values()))


def _torchtitan(text: str, pairs: Parts) -> str:
    words = shlex.split(text)
    mode = next((word for word in words if word.startswith("activation-checkpoint:")), "")
    held = {_switch(option.name): option for option in options([word for word in words if word != mode])}
    for _, new in pairs:
        if new.startswith("activation-checkpoint:"):
            mode = new
        elif new.startswith("no "):
            held.pop(_switch(new.removeprefix("no --")), None)
        else:
            held |= {_switch(option.name): option for option in options(shlex.split(new))}
    return f"torchrun {' '.join(shlex.join((f'--{o.name}', *o.values)) for o in held.values())} {mode}"


def _switch(name: str) -> str:
    return name.replace(".no-", ".")


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data.setdefault(part, {})
    data[last] = value


def _drop(data: dict[str, Any], key: str) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data.get(part, {})
    data.pop(last, None)


def _keyed(data: dict[str, Any], pairs: Parts, key_of: Callable[[str], tuple[str, Any]], under: str = "") -> dict[str, Any]:
    for _, new in pairs:
        if new.startswith("no "):
            _drop(data, under + new.removeprefix("no ").strip('"'))
        else:
            key, value = key_of(new)
            _set(data, under + key, value)
    return data


def _yaml_pair(text: str) -> tuple[str, Any]:
    ((key, value),) = yaml.safe_load(text).items()
    return key, value


def _equals(text: str) -> tuple[str, Any]:
    key, _, value = text.partition(" = ")
    return key, json.loads(value)


def _mindformers(text: str, pairs: Parts) -> str:
    return yaml.safe_dump(_keyed(yaml.safe_load(text), pairs, _yaml_pair))


def _job(text: str, pairs: Parts) -> str:
    return yaml.safe_dump(_keyed(yaml.safe_load(text), pairs, _yaml_pair, "task.strategy."))


def _deepspeed(text: str, pairs: Parts) -> str:
    return json.dumps(_keyed(json.loads(text), pairs, _json_pair))


def _json_pair(text: str) -> tuple[str, Any]:
    value: Any = json.loads(f"{{{text}}}")
    path = []
    while isinstance(value, dict):
        ((name, value),) = value.items()
        path.append(name)
    return ".".join(path), value


def _toml(text: str, pairs: Parts) -> str:
    data = _keyed(tomllib.loads(text), pairs, _equals)
    lines = [(f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())) for section, keys in data.items()]
    return "\n".join(line for section in lines for line in section)


def _program(text: str, pairs: Parts) -> str:
    body, end = text.rsplit("    return", 1)
    lines = (re.sub("^no (.*)", r"\1 = None", new) for _, new in pairs)
    said = "".join(f"    config.{line}\n" for line in lines)
    return f"{body}{said}    return{end}"


def _layout(text: str, pairs: Parts) -> str:
    held = dict(part.split("=") for part in text.split(","))
    for _, new in pairs:
        if new.startswith("no "):
            held.pop(new.removeprefix("no "))
        else:
            held |= dict([new.split("=")])
    return ",".join("=".join(pair) for pair in held.items())


_APPLY: dict[str, Callable[[str, Parts], str]] = {
    "megatron-lm": _megatron,
    "mindspeed-llm": _megatron,
    "megatron-bridge": _bridge,
    "mindformers": _mindformers,
    "torchtitan": _torchtitan,
    "torchtitan toml": _toml,
    "torchtitan program": _program,
    "deepspeed": _deepspeed,
    "job": _job,
    "paraplan": _layout,
}

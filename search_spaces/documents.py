"""Reads YAML and JSON files safely and turns them into records; whatever is wrong comes back as one sentence.

Nothing in a file is executed. Only plain mappings, lists, text, numbers, booleans and nulls are accepted: no tags, no repeated
keys, no infinities; aliases, a few lines of which unfold into gigabytes, only where they are asked for, and only so many values.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from .errors import InputError

MAX_BYTES = 4_000_000
MAX_DEPTH = 64
MAX_VALUES = 100_000
"""Of a YAML file, aliases unfolded."""
SHORTEST_PART = 3
"""Letters from which on a word is taken for a known one cut short: seq of seq_len, batch of global_batch."""

KINDS = {
    "string_type": "text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
}
"""Findings of pydantic that a value is of another kind, and the kind."""
PREFIXES = {"n": -9, "u": -6, "µ": -6, "m": -3, "": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
"""Powers of ten that stand before a unit."""
KIND = r"(str|int|float|bool|_?[A-Z]\w*|constrained-\w+|(dict|list|tuple|function|literal|union)\b[\[-].*)$"
"""How pydantic calls the kinds of a union in a location."""

Record = TypeVar("Record", bound=BaseModel)
Location = tuple[int | str, ...]

UNSUPPORTED = {
    "lora": "LoRA and other adapters",
    "qlora": "LoRA and other adapters",
    "dora": "LoRA and other adapters",
    "peft": "LoRA and other adapters",
    "adapter": "LoRA and other adapters",
    "adapters": "LoRA and other adapters",
    "packed": "packed sequences",
    "packing": "packed sequences",
    "pack": "packed sequences",
    "frozen": "frozen parameters",
    "freeze": "frozen parameters",
}
"""Words in a key that ask for what paraplan does not price, and what they ask for."""


def read_document(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file (JSON if its name ends so) holds. InputError names the file and what would be right."""
    return parse_document(_text(path), str(path), as_json=path.suffix.lower() == ".json")


def parse_document(text: str, where: str, as_json: bool = False, aliases: bool = False) -> dict[str, Any]:
    """The mapping written in `text`; `where` names it in the InputError of a document that is malformed or not a mapping."""
    data = _parse_json(text, where) if as_json else _parse_yaml(text, where, aliases)
    if data is None:
        raise InputError(f"{where}: is empty; it must hold a mapping of keys to values")
    if not isinstance(data, dict):
        raise InputError(f"{where}: holds {_shown(data)} where a mapping of keys to values is needed")
    _refuse_odd_values(data, where, ())
    return data


def to_record(kind: type[Record], data: Any, where: str) -> Record:
    """Validates `data` as a record of `kind`. The InputError names `where` it came from, field, value and what would be right."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(sentence(error, kind, where, data)) from error


def sentence(error: ValidationError, kind: type[BaseModel], where: str, data: Any = None) -> str:
    """The first thing that pydantic found wrong, in one sentence that starts with `where`; fields are named as `data` has them."""
    found = [e for e in error.errors(include_url=False) if not _is_echo(e)]
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])  # a misspelt key also leaves one missing
    places = [_as_written(e["loc"], data) for e in found]
    at = _as_written(first["loc"], data)
    near = [at[: len(place)] == place[: len(at)] for place in places]  # what each kind of a union finds there
    if first["type"] != "extra_forbidden":
        ranked = [(e["type"] in KINDS, -len(place), n) for n, (e, place) in enumerate(zip(found, places, strict=True)) if near[n]]
        first = found[min(ranked)[-1]]
    location = _as_written(first["loc"], data)
    elsewhere = len({place for place, related in zip(places, near, strict=True) if not related})
    path = field_path(location)
    if first["type"] == "extra_forbidden":
        key = str(location[-1])
        refusal = unsupported(key)
        if refusal:
            return f"{where}: {path} asks for {refusal}, which paraplan does not price; leave it out"
        known = list(_fields_at(kind, first["loc"][:-1]))
        return f"{where}: {path} is not a known key{did_you_mean(key, known) or _listed(known)}"
    if first["type"] == "missing":
        also = [field_path(place) for e, place in zip(found, places, strict=True) if e["type"] == "missing" and place != location]
        return f"{where}: {path} is missing" + (f", and so {'is' if len(also) == 1 else 'are'} {', '.join(also)}" if also else "")
    wanted = dict.fromkeys(
        KINDS[e["type"]] for e, place in zip(found, places, strict=True) if place == location and e["type"] in KINDS
    )
    hint = _as_number(first["input"]) if "a number" in wanted else ""
    problem = f"must be {' or '.join(wanted)}{hint}" if first["type"] in KINDS else _problem(first)
    value = "" if isinstance(first["input"], BaseModel | dict) else f" = {_shown(first['input'])}"
    subject = f"{path}{value}: " if path else ""
    return f"{where}: {subject}{problem}" + (f" (and {elsewhere} more)" if elsewhere else "")


def _as_written(location: Location, data: Any) -> Location:
    """A location without the names that pydantic gives the kinds of a union, which no document holds."""
    kept: list[int | str] = []
    for place, part in enumerate(location):
        held = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list | tuple) else ()
        if part in held:
            kept.append(part)
            data = data[part]
        elif isinstance(part, int) or (place == len(location) - 1 and not re.match(KIND, part)):  # a key that is missing
            kept.append(part)
    return tuple(kept)


def _is_echo(error: Any) -> bool:
    """Whether a list is called short only because entries of it are wrong, which is told of them."""
    return bool(error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"])


def field_path(location: Iterable[int | str]) -> str:
    """("levels", 0, "size") as levels[0].size."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """«; did you mean 'x' or 'y'?», or nothing where no known word is near; those first that have it as the beginning of a part."""
    plain = word.lower()
    longer = [one for one in known if len(plain) >= SHORTEST_PART and re.search(rf"(?<![^_-]){re.escape(plain)}", one)]
    near = difflib.get_close_matches(plain, longer or known, n=3, cutoff=0.0 if longer else 0.6)
    return f"; did you mean {' or '.join(repr(match) for match in near)}?" if near else ""


def unsupported(key: str) -> str | None:
    """What a key such as "lora_rank" or "sample_packing" asks for, where paraplan does not price it."""
    words = key.lower().replace("-", "_").replace(".", "_").split("_")
    return next((UNSUPPORTED[word] for word in words if word in UNSUPPORTED), None)


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder, not a file")
        if not path.is_file():
            raise InputError(f"{path}: is not an ordinary file" if path.exists() else f"{path}: there is no such file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{path}: has {size:,} bytes; at most {MAX_BYTES:,} are read")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; let yourself read it, or name another file") from error


def _parse_json(text: str, where: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise InputError(f"{where}: {constant} is not a finite number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            raise InputError(f"{where}: key {next(key for key in keys if keys.count(key) > 1)!r} appears twice in one object")
        return result

    if not text.strip():
        return None
    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is not valid JSON: {error.msg}, line {error.lineno} column {error.colno}") from error
    except RecursionError as error:
        raise InputError(f"{where}: is nested too deeply; at most {MAX_DEPTH} levels are read") from error
    except InputError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise InputError(f"{where}: holds a value that cannot be read: {error}") from error


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """The safe loader, which keeps the last of two equal keys, made to refuse them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _parse_yaml(text: str, where: str, aliases: bool) -> Any:
    try:
        _refuse_odd_nodes(text, where, aliases)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise InputError(f"{where}: is not valid YAML: {error.problem}{place}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{where}: is not valid YAML: {str(error).splitlines()[0]}") from error
    except InputError:
        raise
    except ValueError as error:  # a date that does not exist, a number with thousands of digits
        raise InputError(f"{where}: holds a value that cannot be read: {error}") from error


def _refuse_odd_nodes(text: str, where: str, aliases: bool) -> None:
    """Looks at the events first, since composing a document already recurses into it."""
    depth = 0
    sizes: dict[str, int] = {}
    begun: list[tuple[str | None, int]] = []  # collections that are open, and the values before them
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            if not aliases or event.anchor not in sizes:
                raise InputError(f"{where}: line {line} uses the alias *{event.anchor}; write the value out instead")
            values += sizes[event.anchor]
            if values > MAX_VALUES:
                raise InputError(f"{where}: line {line}: its aliases unfold into more than {MAX_VALUES:,} values; write them out")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise InputError(f"{where}: line {line} has the tag {event.tag}; only plain values are read")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            begun.append((event.anchor, values))
            if depth > MAX_DEPTH:
                raise InputError(f"{where}: line {line} is nested too deeply; at most {MAX_DEPTH} levels are read")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, before = begun.pop()
            sizes |= {anchor: values - before + 1} if anchor is not None else {}
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            sizes |= {event.anchor: 1} if event.anchor is not None else {}


def _refuse_odd_values(data: Any, where: str, at: Location) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise InputError(f"{where}: key {key!r} in {field_path(at) or 'the document'} is not text; put it in quotes")
            _refuse_odd_values(value, where, (*at, key))
    elif isinstance(data, list):
        if len(at) > MAX_DEPTH:
            raise InputError(f"{where}: is nested too deeply; at most {MAX_DEPTH} levels are read")
        for index, value in enumerate(data):
            _refuse_odd_values(value, where, (*at, index))
    elif isinstance(data, float) and not math.isfinite(data):
        raise InputError(f"{where}: {field_path(at)} = {data} is not a finite number")


def _problem(error: Any) -> str:
    """pydantic's finding in our words."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "union_tag_invalid":
        wanted = error["ctx"]["expected_tags"].replace("'", "")
        tag = error["ctx"]["tag"]
        return f"kind = {tag!r} must be one of {wanted}{did_you_mean(tag, wanted.split(', '))}"
    if error["type"] == "literal_error":
        return f"must be {error['ctx']['expected']}"
    if error["type"] == "too_short":
        least = error["ctx"]["min_length"]
        return f"must have at least {least} {'entry' if least == 1 else 'entries'}"
    message = str(error["msg"])
    return message.replace("Input should", "must") if message.startswith("Input should") else message[0].lower() + message[1:]


def _as_number(value: Any) -> str:
    """«; write 80e9», where text such as "80 GB", "400 Gb/s" or "2 µs" stands for a number in bytes, bytes/s or seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([nuµmkKMGTP]?)(i?)([A-Za-z]\S*)\s*", value) if isinstance(value, str) else None
    if found is None:
        return ""
    amount, prefix, binary, unit = float(found[1]), found[2], found[3], found[4]
    amount /= 8 if re.match("b(?!ytes)", unit) else 1
    power = PREFIXES[prefix]
    if binary:
        return f"; write {amount * 1024.0 ** (power // 3):.0f}"
    return f"; write {amount:g}{f'e{power}' if power else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _listed(known: Sequence[str]) -> str:
    return f"; known are {', '.join(known)}" if known else ""


def _fields_at(kind: type[BaseModel], location: Location) -> Iterable[str]:
    """Names of the fields of the record that a location inside `kind` leads to; empty where it cannot be told."""
    records = [kind]
    for part in location:
        if isinstance(part, int):
            continue
        fields = [record.model_fields[part].annotation for record in records if part in record.model_fields]
        # A part that no record has is a mapping's key or a union's tag: the records stay the candidates.
        records = [record for field in fields for record in _records_in(field)] or ([] if fields else records)
    return dict.fromkeys(name for record in records for name in record.model_fields)


def _records_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [record for argument in typing.get_args(annotation) for record in _records_in(argument)]

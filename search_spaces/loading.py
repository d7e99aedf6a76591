"""Records from words: names of the catalog, and files of the user's own.

A word is a catalog name if the catalog has it, otherwise a path. Catalog files are read when asked for, one at a time, and kept.
A file may say what it is `like` and hold only what differs (derived.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from .cluster import Accelerator, ClusterSpec
from .derived import overlaid
from .documents import did_you_mean, read_document, to_record
from .errors import InputError
from .huggingface import from_config
from .model import Frozen, ModelSpec
from .scaling_families import family_model, is_family
from .stack import Stack

Kind = Literal["models", "accelerators", "clusters", "stacks"]
KINDS: tuple[Kind, ...] = ("models", "accelerators", "clusters", "stacks")
CATALOG = Path(__file__).parent / "catalog"

Source = str | Path


@cache
def catalog_names(kind: Kind) -> tuple[str, ...]:
    """Names that the catalog has for a kind, sorted. InputError if there is no such kind."""
    if kind not in KINDS:
        raise InputError(f"catalog: {kind!r} is not one of {', '.join(KINDS)}")
    return tuple(sorted(path.stem for path in (CATALOG / kind).glob("*.yaml")))


@cache
def catalog_entry(kind: Kind, name: str) -> Frozen:
    """The record of that name: ModelSpec, Accelerator, ClusterSpec or Stack. InputError names near matches."""
    if name not in catalog_names(kind):
        raise _unknown(kind, name)
    return _READERS[kind](CATALOG / kind / f"{name}.yaml")


def load_model(source: Source | ModelSpec) -> ModelSpec:
    """A model from a catalog name, a Hugging Face config.json, a folder holding one, a ModelSpec YAML, or its family and size."""
    if isinstance(source, str) and is_family(source):
        return family_model(source)
    return source if isinstance(source, ModelSpec) else cast(ModelSpec, _load("models", source))


def load_accelerator(source: Source | Accelerator) -> Accelerator:
    """An accelerator from a catalog name or a YAML file."""
    return source if isinstance(source, Accelerator) else cast(Accelerator, _load("accelerators", source))


def load_cluster(source: Source | ClusterSpec) -> ClusterSpec:
    """A cluster from a catalog name or a YAML file; the file names its accelerator or holds it as a mapping."""
    return source if isinstance(source, ClusterSpec) else cast(ClusterSpec, _load("clusters", source))


def load_stack(source: Source | Stack) -> Stack:
    """A stack from a catalog name or a YAML file."""
    return source if isinstance(source, Stack) else cast(Stack, _load("stacks", source))


def _document(kind: Kind, path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What a file holds, on top of what it is `like`: a name of the catalog, or a file beside it."""
    if kind == "models" and path.suffix.lower() == ".json":
        return from_config(path).model_dump(mode="json", exclude_none=True)
    data = read_document(path)
    if kind == "clusters":
        data |= _accelerator_of(data, path)
    like = data.pop("like", None)
    if like is None:
        return data
    if not isinstance(like, str):
        raise InputError(f"{path}: like must be a name of the catalog or of a file beside this one")
    if path.resolve() in above:
        raise InputError(f"{path}: like = {like!r} leads back to this file; let one of them stand by itself")
    if "name" not in data:
        raise InputError(f"{path}: name is missing; give what differs from {like} a name of its own")
    base = _document(kind, _beside(kind, like, path), (*above, path.resolve()))
    return _of_a_kind(kind, base, overlaid(base, data, str(path)))


def _of_a_kind(kind: Kind, base: Mapping[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """A document like another: a device is priced by what is known of the one that it is like, if it says no other."""
    own = kind != "accelerators" or changed["name"] == base["name"]
    return changed if own else {"curves_of": base["name"], **changed}


def _beside(kind: Kind, name: str, path: Path) -> Path:
    """The file of a name that a file at `path` holds: the catalog's, or one beside it."""
    beside = path.parent / name
    if name in catalog_names(kind):
        return CATALOG / kind / f"{name}.yaml"
    if not beside.is_file():
        raise _unknown(kind, name, f"{path}: ")
    return beside


def _accelerator_of(cluster: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The accelerator that a cluster's document names or holds as what differs from another."""
    device = cluster.get("accelerator")
    if isinstance(device, str):
        return {"accelerator": load_accelerator(_beside("accelerators", device, path))}
    if isinstance(device, dict) and isinstance(device.get("like"), str):
        changes = {key: value for key, value in device.items() if key != "like"}
        base = _document("accelerators", _beside("accelerators", device["like"], path))
        return {"accelerator": _of_a_kind("accelerators", base, overlaid(base, changes, f"{path}: accelerator"))}
    return {}


def _read_model(path: Path) -> ModelSpec:
    config = path.is_dir() or path.suffix.lower() == ".json"
    return from_config(path) if config else to_record(ModelSpec, _document("models", path), str(path))


_READERS: dict[Kind, Callable[[Path], Frozen]] = {
    "models": _read_model,
    "accelerators": lambda path: to_record(Accelerator, _document("accelerators", path), str(path)),
    "clusters": lambda path: to_record(ClusterSpec, _document("clusters", path), str(path)),
    "stacks": lambda path: to_record(Stack, _document("stacks", path), str(path)),
}


MOST_NAMED = 12
"""Names of the catalog that a sentence lists; of more it says how to see them."""
PATH = r"^[./~]|\.(json|ya?ml)$"
"""What no name of the catalog looks like."""


def _load(kind: Kind, source: Source) -> Frozen:
    if isinstance(source, str) and source in catalog_names(kind):
        return catalog_entry(kind, source)
    path = Path(source).expanduser()
    try:
        found = bool(str(source)) and path.exists()
    except (OSError, ValueError):  # a name too long for a file, or with a null byte in it
        found = False
    if not found and re.search(PATH, str(source), re.IGNORECASE):
        raise InputError(f"{kind[:-1]}: {_shortened(str(source))}: there is no such file")
    if not found:
        raise _unknown(kind, str(source))
    return _READERS[kind](path)


def _unknown(kind: Kind, name: str, where: str = "") -> InputError:
    names = catalog_names(kind)
    every = (
        f"; the catalog has {', '.join(names)}" if len(names) <= MOST_NAMED else f"; paraplan catalog {kind} lists the {len(names)}"
    )
    near = did_you_mean(name.rstrip("/").rpartition("/")[2], names) or every
    return InputError(f"{where}{kind[:-1]}: {_shortened(name)!r} is neither in the catalog nor a file{near}")


def _shortened(name: str) -> str:
    return name if len(name) <= 80 else name[:77] + "…"

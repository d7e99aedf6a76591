"""A document written as another one with a few keys changed: `like: NAME` and what differs.

Keys replace those of the same name. Of a mapping of several keys (`host_link`, `overlap`) only those given are replaced; a figure,
written as a number or as `value` with its source, is replaced whole, since another value has another source.
Levels of a network are given by name: `levels: {scale-out: {oversubscription: 4}}`; as a list they replace all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .documents import did_you_mean
from .errors import InputError


def overlaid(base: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`base` with `changes` on top; neither is altered. InputError, which `where` opens, names a level that the base lacks."""
    return {**base, **{key: _changed(base.get(key), value, f"{where}: {key}") for key, value in changes.items()}}


def _changed(old: Any, new: Any, where: str) -> Any:
    if not isinstance(new, dict) or "value" in new:
        return new
    if isinstance(old, list) and all(isinstance(each, dict) and "name" in each for each in old):
        return _levels(old, new, where)
    return overlaid(old, new, where) if isinstance(old, dict) and "value" not in old else new


def _levels(old: list[dict[str, Any]], new: Mapping[str, Any], where: str) -> list[Any]:
    names = [each["name"] for each in old]
    known = f"; known are {', '.join(names)}"
    for name, change in new.items():
        if name not in names:
            raise InputError(f"{where}.{name} is not a level{did_you_mean(name, names) or known}")
        if not isinstance(change, dict):
            raise InputError(f"{where}.{name} = {change!r}: must be a mapping of what changes")
    return [overlaid(each, new.get(each["name"], {}), f"{where}.{each['name']}") for each in old]

"""A nested document whose keys are taken one by one: what is not taken at the end is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...search_spaces.errors import InputError
from .options import misspelt, whole
from .shell_values import shown
from .unmodelled import is_sign, unmodelled


class Document:
    """A mapping of mappings; keys are dotted paths."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.values = dict(_flat(data, ""))
        self.taken: set[str] = set()

    def get(self, *paths: str) -> Any:
        """The first of the keys that is there and not null, as a person wrote it; None where none is."""
        for path in paths:
            self.taken.add(path)
            value = self.values.get(path)
            if value is not None:
                return shown(value) if isinstance(value, str) else value
        return None

    def whole(self, *paths: str, least: int = 1) -> int | None:
        """A whole number. InputError names file, key and value."""
        for path in paths:
            value = self.get(path)
            if value is not None:
                return whole(value, f"{self.where}: {path} =", least)
        return None

    def flag(self, *paths: str) -> bool | None:
        """True or false. InputError names file, key and value."""
        for path in paths:
            value = self.get(path)
            if value is None:
                continue
            if isinstance(value, bool):
                return value
            if str(value).lower() in ("true", "false"):
                return str(value).lower() == "true"
            raise InputError(f"{self.where}: {path} = {str(value)[:40]!r} must be true or false")
        return None

    def text(self, *paths: str) -> str | None:
        value = self.get(*paths)
        return None if value is None else str(value)

    def skip(self, *prefixes: str) -> None:
        """Keys that no layout hangs on."""
        self.taken |= {path for path in self.values if path.startswith(prefixes)}

    def unmodelled(self, form: str) -> tuple[str, ...]:
        """What the keys ask for that is not modelled; keys that ask for nothing else count as taken."""
        self.taken |= {path for path in self.values if is_sign(form, path)}
        return unmodelled(form, self.values.items())

    def under(self, path: str) -> tuple[Any, ...]:
        """What stands below a key, however deep."""
        paths = [each for each in self.values if each.startswith(f"{path}.")]
        self.taken.update(paths)
        return tuple(self.values[each] for each in paths)

    @property
    def untaken(self) -> tuple[str, ...]:
        """Keys that nobody has asked for."""
        return tuple(path for path in self.values if path not in self.taken)

    @property
    def written(self) -> dict[str, str]:
        """Key → its value as JSON has it, text without quotes; without what is null."""
        return {path: _text(value) for path, value in self.values.items() if value is not None}

    @property
    def unknown(self) -> tuple[str, ...]:
        asked = {_last(path) for path in self.taken - self.values.keys()}
        return tuple(f"{path} = {_short(self.values[path])}{misspelt(_last(path), asked)}" for path in self.untaken)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _flat(data: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        at = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _flat(value, at)
        else:
            yield at, value

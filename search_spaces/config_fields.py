"""Typed access to the fields of a Hugging Face config; a bad one becomes one sentence with file, field, value and remedy.

Hugging Face writes null for a field that is left out, so null counts as absent. A field that went by several names over the years
is asked for by all of them; the first one present is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .errors import InputError
from .layer_kinds import LARGEST

PUBLISHED = "as in the model's published config.json"


@dataclass(frozen=True)
class Fields:
    """The fields of one config. `defaults` are those of the family's configuration class, for fields that it may leave out."""

    file: str
    values: Mapping[str, object]
    defaults: Mapping[str, object]
    path: str = ""  # where the fields are in the file, with a trailing dot ("text_config.")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """The fields of a section where there is one, else these; a section has no defaults."""
        inner = self.values.get(name)
        return Fields(self.file, inner, {}, f"{self.path}{name}.") if isinstance(inner, dict) else self

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self._whole(names, 1, default)

    def extent(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        return self._whole(names, 0, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value((name,), default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._value((name,), default, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
            raise self.error(name, "it must be a positive number")
        return float(value)

    def optional(self, *names: str) -> float | None:
        """A positive number that may be left out."""
        name = next((name for name in names if self.has(name)), None)
        return None if name is None else self.number(name, 0.0)

    def text(self, name: str, allowed: Collection[str], default: str | None = None) -> str:
        """One of the allowed words."""
        value = self._value((name,), default, f"one of {', '.join(allowed)}")
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, f"it must be one of {', '.join(allowed)}")
        return value

    def words(self, name: str, allowed: Collection[str], length: int | None = None) -> list[str]:
        """A list of the allowed words, one per layer where a length is given."""
        must = f"it must be a list of {', '.join(allowed)}"
        words = [item for item in self._list(name, length, must) if isinstance(item, str) and item in allowed]
        if len(words) != len(self._list(name, length, must)):
            raise self.error(name, must)
        return words

    def wholes(self, name: str, length: int | None = None) -> list[int]:
        """A list of whole numbers from 0, one per layer where a length is given."""
        must = "it must be a list of whole numbers, none negative"
        numbers = [item for item in self._list(name, length, must) if _is_whole(item, 0)]
        if len(numbers) != len(self._list(name, length, must)):
            raise self.error(name, must)
        return [int(str(number)) for number in numbers]

    def letters(self, name: str, allowed: Collection[str]) -> str:
        """A non-empty string of the allowed letters."""
        value = self._value((name,), None, f"a string of the letters {' '.join(allowed)}")
        if not isinstance(value, str) or not value or not set(value) <= set(allowed):
            raise self.error(name, f"it must be a string of the letters {' '.join(allowed)}")
        return value

    def error(self, name: str, remedy: str) -> InputError:
        """The InputError for a field whose value is not what it must be."""
        return InputError(f"{self.file}: {self.path}{name} is {_shown(self.values.get(name))}; {remedy}")

    def _whole(self, names: tuple[str, ...], least: int, default: int | None) -> int:
        kind = "a positive whole number" if least else "a whole number, not negative"
        value = self._value(names, default, kind)
        if not _is_whole(value, least):
            present = next((name for name in names if self.has(name)), names[0])
            raise self.error(present, f"it must be {kind} of at most {LARGEST:,}")
        return int(str(value))

    def _value(self, names: tuple[str, ...], default: object, kind: str) -> object:
        for source in (self.values, self.defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        if default is None:
            raise InputError(f"{self.file}: {self.path}{' or '.join(names)} is missing; give {kind} {PUBLISHED}")
        return default

    def _list(self, name: str, length: int | None, must: str) -> list[object]:
        value = self._value((name,), None, must.removeprefix("it must be "))
        if not isinstance(value, list):
            raise self.error(name, must)
        if length is not None and len(value) != length:
            raise self.error(name, f"it must have one item per layer, {length}")
        return value


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"

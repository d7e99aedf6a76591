"""Settings as Python source: calls of configuration classes with keyword arguments, and assignments of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .knobs import Settings
from .launch import Variable
from .spelling import Code

LINE = 100


def sections(settings: Settings) -> dict[str, dict[str, Any]]:
    """Fields by the section before their first dot, "" for none; of two settings of a field the later one counts."""
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        section, _, field = setting.name.rpartition(".")
        found.setdefault(section, {})[field] = setting.value
    return found


def literal(value: Any, indent: int) -> str:
    """A value as Python reads it back; a list that would not fit on a line takes one for each item."""
    if not isinstance(value, list) or len(repr(value)) <= LINE:
        return repr(value)
    inside = " " * (indent + 4)
    return "\n".join(["[", *(f"{inside}{item!r}," for item in value), " " * indent + "]"])


def call(name: str, fields: Mapping[str, Any], indent: int = 4) -> str:
    """A call with one keyword argument on each line; values are written as Python reads them back."""
    if not fields:
        return f"{name}()"
    inside = " " * (indent + 4)
    return "\n".join(
        [f"{name}(", *(f"{inside}{field}={literal(value, indent + 4)}," for field, value in fields.items()), " " * indent + ")"]
    )


def read(variable: Variable) -> Code:
    """The expression that reads a variable of the environment as what it is."""
    text = f"os.environ[{variable.name!r}]"
    return Code(text if variable.kind is str else f"{variable.kind.__name__}({text})")

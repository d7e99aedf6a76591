"""How one knob is spelled by one framework over its versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ...search_spaces.releases import Version


class Code(str):
    """A value of a Python file that stands there as it is written, such as torch.bfloat16."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Spelling:
    """A knob's option, dotted field or key, from version `since` on and before `until`.

    `values` renames the values that the framework calls otherwise and `convert` writes the others; `values_since` holds back the
    values that came later; `only` lists all there are, where these are few; `on` is what a bare switch is set to.
    """

    text: str
    since: Version = ()
    until: Version | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    values_since: Mapping[str, Version] = field(default_factory=dict)
    only: tuple[str, ...] | None = None
    on: Any = True
    convert: Callable[[Any], Any] | None = None
    many: bool = False  # a field that is a list even of one value

    def write(self, value: Any) -> Any:
        """A value as the framework has it."""
        if str(value) in self.values:
            return self.values[str(value)]
        return self.convert(value) if self.convert else value


Spellings = Mapping[str, tuple[Spelling, ...]]


def pattern(layers: Sequence[bool]) -> str:
    """A Python list expression of ones and zeros, one per layer, as Megatron evaluates it: "([0]*3+[1]*58)"."""
    n = len(layers)
    period = next(p for p in range(1, n + 1) if n % p == 0 and list(layers) == list(layers[:p]) * (n // p))
    if period == 1:
        return f"([{int(layers[0])}]*{n})"
    runs = "+".join(f"[{int(value)}]*{len(list(run))}" for value, run in groupby(layers[:period]))
    return f"({runs})" if period == n else f"({runs})*{n // period}"

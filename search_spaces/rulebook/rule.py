"""A legality rule as data, and which frameworks and versions it binds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..conditions import Condition
from ..stack import Framework, Stack


@dataclass(frozen=True)
class Frameworks:
    """Frameworks that a rule binds, and the range of versions that it holds for (">=0.12,<0.16"; "" is all)."""

    names: tuple[Framework, ...]
    versions: str = ""

    def bind(self, stack: Stack) -> bool:
        return stack.framework in self.names and in_range(stack.version, self.versions)


Scope = Literal["arithmetic", "topology", "memory", "stack", "user"] | Frameworks


@dataclass(frozen=True)
class Rule:
    """One rule: pure data. `reason` says why it exists, `source` where it is checked."""

    id: str
    reason: str
    source: str
    scope: Scope
    condition: Condition

    @property
    def names(self) -> frozenset[str]:
        """Columns and constants that it reads."""
        return self.condition.names()


def in_range(version: str, versions: str) -> bool:
    """Whether a version lies in a range such as ">=0.12,<0.16"; a name without digits ("main") is newer than every number."""
    return all(_ORDER[operator](_numbers(version), _numbers(bound)) for operator, bound in re.findall(r"([<>]=?)([^,]+)", versions))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in found.group().split(".")] if found else [1 << 30]
    return tuple(numbers + [0] * (4 - len(numbers)))


_ORDER = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}

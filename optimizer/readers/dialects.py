"""The exporters' table of knobs, read both ways: the only place where readers meet it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.layout import Layout
from ...search_spaces.releases import RELEASES
from ...search_spaces.vocabulary import MAIN
from ..exporters import deepspeed, mindformers, torchtitan
from ..exporters.knobs import FRAMEWORKS, Dialect, Settings, dialect
from ..exporters.launch import TOTAL
from ..exporters.request import Alone, Laid

PROCESSES = TOTAL
"""Variable of an exported script that holds the processes of all servers together."""
TABLED = frozenset(FRAMEWORKS)
"""Frameworks that the table spells knobs for."""


@dataclass(frozen=True)
class Words:
    """Options of a framework at a version, by default its newest; one that the table does not go back to is taken for that."""

    framework: str
    version: str | None = None

    @property
    def _dialect(self) -> Dialect:
        with suppress(InputError):
            return dialect(self.framework, self.version or MAIN)
        return dialect(self.framework, MAIN)

    def flag(self, knob: str, *values: object) -> tuple[str, ...]:
        """The option of a knob and its values, a newer version's for what a job already says; Infeasible if no version has it."""
        with suppress(Infeasible):
            return self._dialect.set(knob, *values).words
        return dialect(self.framework, MAIN).set(knob, *values).words

    def has(self, knob: str) -> bool:
        """Whether this version has the knob."""
        return self._dialect.has(knob)


@cache
def knobs_of(framework: str) -> Mapping[str, tuple[str, Mapping[str, str]]]:
    """Option name without dashes → (knob, our words for its values), of a framework and what it stands on; its own comes first."""
    base = RELEASES[framework].base
    found = {
        flag.text.lstrip("-"): (knob, {str(theirs): ours for ours, theirs in flag.values.items()})
        for knob, flags in FRAMEWORKS[framework].spellings.items()
        for flag in flags
    }
    return {**(knobs_of(base[0]) if base else {}), **found}


@cache
def switches_of(framework: str) -> Mapping[tuple[str, str], str]:
    """(Option name, value in lower case) → the knob that just this value turns on, of a framework's own table."""
    return {
        (flag.text.lstrip("-"), str(flag.on).lower()): knob
        for knob, flags in FRAMEWORKS[framework].spellings.items()
        for flag in flags
        if flag.on is not True
    }


SETTINGS: dict[str, Callable[[Laid], Settings]] = {
    module.FRAMEWORK: module.layout_settings for module in (mindformers, torchtitan, deepspeed)
}
"""Framework whose configuration is a table of keys → what a layout sets in it."""


def asked_alone(framework: str, layout: Layout, layers: int) -> Alone:
    """A layout of so many decoder layers for a framework at its usual version."""
    return Alone(layout, layers, dialect(framework, None))


def layout_keys(asked: Alone) -> dict[str, tuple[str, Any]]:
    """Knob → key and value of all that a layout sets. Infeasible where the framework cannot say it."""
    framework = asked.speaks.framework
    return {knobs_of(framework)[setting.name][0]: (setting.name, setting.value) for setting in SETTINGS[framework](asked)}

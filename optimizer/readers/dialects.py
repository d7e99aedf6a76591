"""The exporters' table of knobs, read both ways: the only place where readers meet it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...search_spaces.layout import Layout
from ..exporters import deepspeed, mindformers, torchtitan
from ..exporters.knobs import FRAMEWORKS, Settings, dialect
from ..exporters.launch import TOTAL
from ..exporters.request import Alone, Laid

PROCESSES = TOTAL
"""Variable of an exported script that holds the processes of all servers together."""
TABLED = frozenset(FRAMEWORKS)
"""Frameworks that the table spells knobs for."""


@dataclass(frozen=True)
class Words:
    """Options of a framework's newest version."""

    framework: str

    def flag(self, knob: str, *values: object) -> tuple[str, ...]:
        """The option of a knob and its values; Infeasible if the framework lacks it."""
        return dialect(self.framework, "main").set(knob, *values).words

    def has(self, knob: str) -> bool:
        """Whether the framework has the knob."""
        return dialect(self.framework, "main").has(knob)


@cache
def knobs_of(framework: str) -> Mapping[str, tuple[str, Mapping[str, str]]]:
    """Option name without dashes → (knob, our words for its values), of a framework and what it stands on; its own comes first."""
    own = FRAMEWORKS[framework]
    found = {
        flag.text.lstrip("-"): (knob, {str(theirs): ours for ours, theirs in flag.values.items()})
        for knob, flags in own.spellings.items()
        for flag in flags
    }
    return {**(knobs_of(own.base[0]) if own.base else {}), **found}


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

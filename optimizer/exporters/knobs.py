"""Knobs in a framework's own words: one name for what a plan decides, and the option, field or key that each framework has for it.

The table itself is in `spellings`. A knob that a framework lacks, at its version, is refused in words; it is never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...search_spaces.errors import Infeasible
from ...search_spaces.releases import RELEASES, Version, release, version_text
from .spelling import Code, Spelling
from .spellings import FRAMEWORKS

__all__ = ["FRAMEWORKS", "Code", "Dialect", "Setting", "Settings", "dialect"]


@dataclass(frozen=True)
class Setting:
    """One thing set, as the framework spells it: an option or a dotted field, and its values; without any, a switch turned on."""

    name: str
    values: tuple[Any, ...] = ()
    many: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """As words of a command line."""
        return (self.name, *map(str, self.values))

    @property
    def value(self) -> Any:
        """As the value of a field: True for a bare switch, a list for several values."""
        if not self.values:
            return True
        return self.values[0] if len(self.values) == 1 and not self.many else list(self.values)


Settings = list[Setting]


@dataclass(frozen=True)
class Dialect:
    """One framework at one version: which knobs it has, and how they are written."""

    framework: str
    version: Version

    def __str__(self) -> str:
        return f"{self.framework} {version_text(self.version)}".strip()

    @property
    def title(self) -> str:
        """The framework as its makers write it, with the version."""
        return f"{FRAMEWORKS[self.framework].title} {version_text(self.version)}".strip()

    @property
    def core(self) -> Version:
        """Version of what it stands on, its own where it stands on nothing: Megatron-Core's, for the Megatron family."""
        base = RELEASES[self.framework].base
        return base[1] if base else self.version

    def set(self, knob: str, *values: Any) -> Setting:
        """The knob spelled with its values; Infeasible if this version lacks the knob or one of the values."""
        spelling = self._find(knob)
        if spelling is None:
            raise Infeasible(self._lacks(knob))
        return Setting(spelling.text, self._written(knob, spelling, values), spelling.many)

    def sets(self, **values: Any) -> Settings:
        """Several knobs of one value each, in order; None leaves a knob out, True turns a switch on and False leaves it."""
        found = {knob: value for knob, value in values.items() if value is not None and value is not False}
        return [self.set(knob) if value is True else self.set(knob, value) for knob, value in found.items()]

    def has(self, knob: str) -> bool:
        """Whether this version can express the knob at all."""
        return self._find(knob) is not None

    def _written(self, knob: str, spelling: Spelling, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in map(str, values):
            since = spelling.values_since.get(value, ())
            if self.version < since:
                raise Infeasible(f"{self} has no {spelling.text} {value}; it came with {version_text(since)}")
            if spelling.only is not None and value not in spelling.only:
                has = f"it has {', '.join(map(str, spelling.only))}"
                raise Infeasible(f"{self} cannot express {_words(knob)} {value}; {has}")
        if not values and spelling.on is not True:
            return (spelling.on,)
        return tuple(spelling.write(value) for value in values)

    def _find(self, knob: str) -> Spelling | None:
        own = FRAMEWORKS[self.framework]
        if knob in own.spellings:
            return next((found for found in own.spellings[knob] if _holds(found, self.version)), None)
        base = RELEASES[self.framework].base
        return Dialect(*base)._find(knob) if base else None

    def _lacks(self, knob: str) -> str:
        later = [found for found in FRAMEWORKS[self.framework].spellings.get(knob, ()) if found.since > self.version]
        if later:
            return f"{self} cannot express {_words(knob)}: {later[0].text} came with {version_text(later[0].since)}"
        return f"{self} cannot express {_words(knob)}"


def dialect(framework: str, version: str | None) -> Dialect:
    """The framework at the release that a text names (`release`); None is the default one. InputError for what is not known."""
    return Dialect(framework, release(framework, version))


def _words(knob: str) -> str:
    return knob.replace("_", " ")


def _holds(spelling: Spelling, version: Version) -> bool:
    return spelling.since <= version and (spelling.until is None or version < spelling.until)

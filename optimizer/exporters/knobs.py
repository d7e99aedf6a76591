"""Knobs in a framework's own words: one name for what a plan decides, and the option, field or key that each framework has for it.

The table itself is in `spellings`. A knob that a framework lacks, at its version, is refused in words; it is never dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.vocabulary import MAIN, NEWEST_WORDS
from .spelling import NEWEST, Code, Spelling, Version
from .spellings import FRAMEWORKS

__all__ = ["FRAMEWORKS", "NEWEST", "Code", "Dialect", "Setting", "Settings", "dialect", "version_text"]


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
        base = FRAMEWORKS[self.framework].base
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
        return Dialect(*own.base)._find(knob) if own.base else None

    def _lacks(self, knob: str) -> str:
        later = [found for found in FRAMEWORKS[self.framework].spellings.get(knob, ()) if found.since > self.version]
        if later:
            return f"{self} cannot express {_words(knob)}: {later[0].text} came with {version_text(later[0].since)}"
        return f"{self} cannot express {_words(knob)}"


def dialect(framework: str, version: str | None) -> Dialect:
    """The framework at the version that a text such as "0.16", "core_v0.16.1" or "main" names; None is the default version.

    A version of the framework's base ("core_v0.12.1" for MindSpeed-LLM) stands for the default, and a year and month ("2026-08")
    for what was newest then. InputError if the framework or the version is not known.
    """
    if framework not in FRAMEWORKS:
        raise InputError(f"framework {framework!r} is not one of {', '.join(FRAMEWORKS)}")
    known = FRAMEWORKS[framework]
    if version is None:
        return Dialect(framework, known.default)
    if version.strip() in NEWEST_WORDS:
        return Dialect(framework, NEWEST)
    match = re.search(r"\d+(?:\.\d+)*", version)
    if not match or len(match.group()) > 30:
        raise InputError(f"{framework} version {version!r} is not a version such as {version_text(known.default)} or main")
    dated = re.match(r"(20\d\d-\d\d)\b", version)
    if dated and known.dates:
        return Dialect(framework, _at_date(framework, dated.group(1)))
    number = tuple(int(part) for part in match.group().split("."))
    if known.base and number[:2] == known.base[1][:2]:
        return Dialect(framework, known.default)
    if number < known.oldest:
        raise InputError(f"{framework} {version} is older than the oldest known, {version_text(known.oldest)}")
    if number[: len(known.newest)] > known.newest:
        newest = version_text(known.newest)
        raise InputError(f"{framework} {version} is newer than the newest known, {newest}; give that, or main")
    return Dialect(framework, number)


def _at_date(framework: str, date: str) -> Version:
    known = FRAMEWORKS[framework].dates
    older = [version for since, version in known.items() if since <= date]
    if not older:
        raise InputError(f"{framework} of {date} is older than the oldest known, of {min(known)}")
    return older[-1]


def version_text(version: Version) -> str:
    """(0, 16) → "0.16"; the newest is "main"."""
    return MAIN if version == NEWEST else ".".join(map(str, version))


def _words(knob: str) -> str:
    return knob.replace("_", " ")


def _holds(spelling: Spelling, version: Version) -> bool:
    return spelling.since <= version and (spelling.until is None or version < spelling.until)

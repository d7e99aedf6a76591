"""Releases of the frameworks: the numbers that are known, by which dates they go, and what they stand on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from .errors import InputError
from .vocabulary import MAIN, NEWEST_WORDS

Version = tuple[int, ...]
NEWEST: Version = (9999,)
DATED = re.compile(r"(20\d\d-\d\d)\b")
"""A release by its year and month."""


@dataclass(frozen=True)
class Releases:
    """The version that is meant where none is named, the oldest and newest known, and the framework that they stand on.

    `dates` maps the year and month of a release to its version, for stacks that are known by their date.
    """

    default: Version
    oldest: Version
    newest: Version
    base: tuple[str, Version] | None = None
    dates: Mapping[str, Version] = field(default_factory=dict)


RELEASES: Mapping[str, Releases] = {
    "megatron-lm": Releases(default=(0, 16), oldest=(0, 12), newest=(0, 19)),
    "megatron-bridge": Releases(
        default=(0, 6),
        oldest=(0, 3),
        newest=(0, 6),
        base=("megatron-lm", (0, 16)),
        dates={"2026-02": (0, 3), "2026-04": (0, 4), "2026-06": (0, 5), "2026-08": (0, 6)},
    ),
    "mindspeed-llm": Releases(default=(26, 0), oldest=(2, 3), newest=(26, 1), base=("megatron-lm", (0, 12, 1))),
    "mindformers": Releases(default=(2, 1), oldest=(2, 1), newest=(2, 1)),
    "torchtitan": Releases(default=(0, 3), oldest=(0, 3), newest=(0, 3)),
    "deepspeed": Releases(default=(0, 19), oldest=(0, 19), newest=(0, 19)),
    "job": Releases(default=(), oldest=(), newest=()),
    "groups": Releases(default=(), oldest=(), newest=()),
}


def release(framework: str, named: str | None) -> Version:
    """The release that a text such as "0.16", "core_v0.16.1" or "main" names; None is the default one.

    A version of what the framework stands on ("core_v0.12.1" for MindSpeed-LLM) stands for the default, and a year and month
    ("2026-08") for what was newest then. InputError if the framework or the version is not known.
    """
    if framework not in RELEASES:
        raise InputError(f"framework {framework!r} is not one of {', '.join(RELEASES)}")
    known = RELEASES[framework]
    if named is None:
        return known.default
    if named.strip() in NEWEST_WORDS:
        return NEWEST
    match = re.search(r"\d+(?:\.\d+)*", named)
    if not match or len(match.group()) > 30:
        raise InputError(f"{framework} version {named!r} is not a version such as {version_text(known.default)} or main")
    dated = DATED.match(named)
    if dated and known.dates:
        return _at_date(framework, dated.group(1))
    number = tuple(int(part) for part in match.group().split("."))
    if known.base and number[:2] == known.base[1][:2]:
        return known.default
    if number < known.oldest:
        raise InputError(f"{framework} {named} is older than the oldest known, {version_text(known.oldest)}")
    if number[: len(known.newest)] > known.newest:
        newest = version_text(known.newest)
        raise InputError(f"{framework} {named} is newer than the newest known, {newest}; give that, or main")
    return number


def _at_date(framework: str, date: str) -> Version:
    known = RELEASES[framework].dates
    older = [version for since, version in known.items() if since <= date]
    if not older:
        raise InputError(f"{framework} of {date} is older than the oldest known, of {min(known)}")
    return older[-1]


def known_release(framework: str, named: str) -> Version | None:
    """The release that a text names; None where it names none that is known."""
    with suppress(InputError):
        return release(framework, named)
    return None


def known_span(framework: str) -> str:
    """The oldest and the newest release that are known, in words."""
    known = RELEASES[framework]
    return " to ".join(dict.fromkeys(map(version_text, (known.oldest, known.newest))))


def version_text(version: Version) -> str:
    """(0, 16) → "0.16"; the newest is "main"."""
    return MAIN if version == NEWEST else ".".join(map(str, version))

"""Options of a command line, and its words that have no value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .shell_values import UNSET, shown, unresolved

OPTION = re.compile(r"--([A-Za-z][\w.\-:]*)(?:=(.*))?$", re.DOTALL)
CALLED_SO = "ARGS?|ARGUMENTS|OPTS|OPTIONS?|FLAGS|EXTRAS?|PARAMS|OVERRIDES"
SEVERAL = re.compile(rf"[@*]|.*\[@\]|(?:.*_)?(?:{CALLED_SO})(?:_.*)?", re.IGNORECASE)
"""Names that stand for further options rather than for the value of one: arguments, arrays, and what is called so."""


@dataclass(frozen=True)
class Option:
    """`--name value value`; `name` without its dashes, hyphens kept as they are."""

    name: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *(shown(value) for value in self.values)))


def options(words: Sequence[str]) -> list[Option]:
    """The options of a command line, in order; words before the first, and those without a value that add none, belong to none."""
    found: list[Option] = []
    for word in words:
        match = OPTION.match(word)
        if match:
            found.append(Option(match.group(1), () if match.group(2) is None else (match.group(2),)))
        elif found and not _adds_nothing(word, found[-1]):
            found[-1] = Option(found[-1].name, (*found[-1].values, word))
    return found


def empty_words(words: Sequence[str]) -> list[str]:
    """Words of a command line that hold no value and may stand for options, as they are written, each once."""
    found: list[str] = []
    last: Option | None = None
    for word in words:
        match = OPTION.match(word)
        if match:
            last = Option(match.group(1), () if match.group(2) is None else (match.group(2),))
        elif _is_empty(word) and (_several(word) or (last is not None and _adds_nothing(word, last))):
            found.append(word)
        elif last is not None:
            last = Option(last.name, (*last.values, word))
    return list(dict.fromkeys(found))


def _adds_nothing(word: str, option: Option) -> bool:
    """Whether a word behind an option is none of its values: an empty one, or one that stands for options it does not hold."""
    if not word or _is_empty(word):
        return bool(option.values) or _several(word)
    return False


def _is_empty(word: str) -> bool:
    """Whether nothing but one variable without a value makes up a word."""
    return len(word) > 2 and word[0] == word[-1] == UNSET and word.count(UNSET) == 2


def _several(word: str) -> bool:
    return any(SEVERAL.fullmatch(name) for name in unresolved(word))

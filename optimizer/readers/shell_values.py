"""Variables of a shell script by name, and the words that a word becomes with them put in; nothing is executed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ...search_spaces.errors import InputError
from .arithmetic import arithmetic
from .shell_flow import Line
from .shell_words import Part, Word, words_of

UNSET = "\x00"
"""Stands in a word for what has no value in the file, with the name behind it up to the next one."""
MARKED = re.compile(f"{UNSET}([^{UNSET}]*){UNSET}")
MOST_CHARACTERS = 20_000_000
POSITIONAL = re.compile(r"[0-9]+|[@*#]")


@dataclass
class Script:
    """What a script holds: variables by name, each a list of words; command lines as words; `#SBATCH` lines as words.

    `given` are variables that the caller sets and the script does not change. `conflicts` are variables that are assigned several
    values, `decisions` say which conditionals were read or left out and which files are not there. `folders` are where it lies,
    and files that it reads in; a text of no file lies nowhere.
    """

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    conflicts: dict[str, list[str]] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    functions: dict[str, list[Line]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    given: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()
    where: str = "script"
    size: int = 0
    rounds: int = 0

    def number(self, *names: str) -> int | None:
        """The first of the variables that holds a whole number."""
        for name in names:
            words = self.variables.get(name, [])
            if len(words) == 1 and re.fullmatch(r"\d{1,9}", words[0]):
                return int(words[0])
        return None

    def grow(self, characters: int) -> None:
        """Counts what is put in. InputError for more than anybody means."""
        self.size += characters
        if self.size > MOST_CHARACTERS:
            said = f"its variables and functions unfold into more than {MOST_CHARACTERS:,} characters"
            raise InputError(f"{self.where}: {said}; write them out")


def unresolved(word: str) -> list[str]:
    """The names in a word that have no value in the file."""
    return MARKED.findall(word)


def shown(word: str) -> str:
    """A word as a person wrote it."""
    return MARKED.sub(lambda match: f"${{{match.group(1)}}}" if match.group(1).endswith("[@]") else f"${match.group(1)}", word)


def filled(word: str) -> str | None:
    """A word with variables that have no value left out, as a shell has them; None where one hangs on what is no variable."""
    if any(not name.removesuffix("[@]").isidentifier() and not name.isdigit() for name in unresolved(word)):
        return None
    return MARKED.sub("", word)


def without_value(text: str) -> str:
    """An option as a person wrote it, and why the file holds no value for it."""
    return f"{shown(text)} ({'; '.join(dict.fromkeys(map(_reason, unresolved(text))))})"


def _reason(name: str) -> str:
    plain = name.removesuffix("[@]")
    if plain == "(…)":
        return "what a command prints"
    if plain.startswith("(("):
        return f"{plain.strip('()')} is worked out of what the file does not set"
    if POSITIONAL.fullmatch(plain):
        return f"${plain} is an argument of the script"
    return f"the file sets no {plain}" if plain.isidentifier() else f"${plain} is no plain variable"


def expanded(script: Script, word: Word, whole: bool = False) -> list[str]:
    """The words that one word becomes; `whole` keeps it in one, as an assignment does."""
    found = [""]
    open_word = any(part.quoted for part in word)
    for part in word:
        values = _values(script, part)
        script.grow(sum(map(len, values)))
        if part.kind == "text" or (part.quoted and not part.array) or whole:
            found[-1] += " ".join(values)
            open_word = open_word or bool(values)
            continue
        words = values if part.quoted else [piece for value in values for piece in value.split()]
        if not words:
            open_word = open_word and not (part.quoted and word[1:] == [part])  # "${NAME[@]}" of nothing is no word at all
            continue
        found[-1] += words[0]
        found += words[1:]
        open_word = True
    return [text for text in found if text or open_word]


def _values(script: Script, part: Part) -> list[str]:
    if part.kind == "arithmetic":
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", part.text)
        value = arithmetic(plain.replace("10#", ""), lambda name: " ".join(script.variables.get(name, [])) or None)
        return [_unset(f"(({part.text}))") if value is None else str(value)]
    if part.kind == "command":
        return [_unset("(…)")]
    if part.kind != "variable":
        return [part.text]
    held = _held(script, part)
    if part.operator == "+":
        return _default(script, part) if held and held != [""] else [""]
    if held is not None and (held != [""] or part.default is None or part.operator == "?"):
        return held
    if part.default is None or part.operator == "?":
        return [_unset(_name(part))]
    if part.operator == "=":
        script.variables[part.text] = [" ".join(_default(script, part))]
        return script.variables[part.text]
    return _default(script, part)


def _name(part: Part) -> str:
    """A variable without a value as a person wrote it: NAME, NAME[@], and others in braces."""
    if part.prefix or part.index is not None:
        return f"{{{part.prefix}{part.text}{f'[{part.index}]' if part.index is not None else ''}}}"
    return f"{part.text}[@]" if part.array and part.text != "@" else part.text


def _default(script: Script, part: Part) -> list[str]:
    return [text for word in words_of(part.default or "") for text in expanded(script, word)] or [""]


def _held(script: Script, part: Part) -> list[str] | None:
    """What a variable holds; None where it has no value."""
    values = script.variables.get(part.text)
    if values is None:
        return None
    if part.prefix == "#":
        return [str(len(values) if part.array else len(" ".join(values)))]
    if part.prefix == "!":
        return script.variables.get(" ".join(values))
    if part.index is not None:
        place = arithmetic(part.index.replace("$", ""), lambda name: " ".join(script.variables.get(name, [])) or None)
        return [values[place]] if place is not None and 0 <= place < len(values) else None
    if part.array and part.text in script.given:
        return [word for value in values for word in value.split()]  # the caller can give text alone
    return values


def _unset(name: str) -> str:
    """What stands for a value that the file does not hold; without blanks, at which a word would be cut."""
    plain = "".join(name.replace(UNSET, "").split())
    return f"{UNSET}{plain}{UNSET}"

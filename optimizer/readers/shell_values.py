"""Variables of a shell script by name, and the words that a word becomes with them put in; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...search_spaces.errors import InputError
from .arithmetic import arithmetic, divides_by_zero
from .shell_changes import CHANGES, REPLACES, changed, piece
from .shell_flow import Line
from .shell_words import Part, Word, words_of

UNSET = "\x00"
"""Stands in a word for what has no value in the file, with the name behind it up to the next one."""
MARKED = re.compile(f"{UNSET}([^{UNSET}]*){UNSET}")
BY_ZERO = "/0"
"""Behind the name of an expression that divides by zero."""
MOST_NESTED = 30
"""Variables and expressions in an expression."""
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
    return MARKED.sub(lambda match: _shown_name(match.group(1)), word)


def _shown_name(name: str) -> str:
    return f"${{{name}}}" if name.endswith("[@]") else f"${name.removesuffix(BY_ZERO)}"


def filled(word: str) -> str | None:
    """A word with variables that have no value left out, as a shell has them; None where one hangs on what is no variable."""
    if any(not name.removesuffix("[@]").isidentifier() and not name.isdigit() for name in unresolved(word)):
        return None
    return MARKED.sub("", word)


def without_value(text: str) -> str:
    """An option as a person wrote it, and why the file holds no value for it."""
    return f"{shown(text)} ({reason_of(text)})"


def reason_of(text: str) -> str:
    """Why the file holds no value for what is in a word."""
    return "; ".join(dict.fromkeys(map(_reason, unresolved(text))))


def _reason(name: str) -> str:
    plain = name.removesuffix("[@]")
    if plain == "(…)":
        return "what a command prints"
    if plain.endswith(BY_ZERO):
        return f"{plain.removesuffix(BY_ZERO).strip('()')} divides by zero"
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
        return [worked_out(script, part.text)]
    if part.kind == "command":
        return [_unset("(…)")]
    if part.kind != "variable":
        return [part.text]
    held = _held(script, part)
    if part.operator in CHANGES:
        made = _changed(script, part, held) if held is not None else None
        return [_unset(_name(part))] if made is None else made
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


def _number_of(script: Script, name: str) -> str | None:
    return " ".join(script.variables.get(name, [])) or None


def worked_out(script: Script, text: str) -> str:
    """The value of an arithmetic expression, or what stands for one that has none."""
    plain = text.replace('"', "")
    if 0 < plain.count("$") <= MOST_NESTED:
        plain = " ".join(each for word in words_of(f'"{plain}"') for each in expanded(script, word, whole=True))
    plain = plain.replace("10#", "")
    value = arithmetic(plain, lambda name: _number_of(script, name))
    if value is not None:
        return str(value)
    return _unset(f"(({text})){BY_ZERO if divides_by_zero(plain, lambda name: _number_of(script, name)) else ''}")


def _changed(script: Script, part: Part, held: Sequence[str]) -> list[str] | None:
    """What a variable holds, with what is cut off or replaced; None where that has no value."""
    operand = part.default or ""
    if part.operator == ":":
        places = [arithmetic(text.replace("$", ""), lambda name: _number_of(script, name)) for text in operand.split(":")]
        if None in places or len(places) > 2:
            return None
        first, length = places[0] or 0, places[1] if len(places) > 1 else None
        return piece([script.where, *held] if part.text == "@" else held, first, length, part.array)
    pieces = SLASH.split(operand, maxsplit=1) if part.operator in REPLACES else [operand]
    words = [" ".join(_default_words(script, text)) for text in pieces]
    return None if any(map(unresolved, words)) else changed(held, part.operator, words)


def _default_words(script: Script, text: str) -> list[str]:
    """The words of a pattern or of what takes its place: one, unless it has quotes of its own."""
    plain = text if re.search(r"[\"']", text) else f'"{text}"'
    return [found for word in words_of(plain) for found in expanded(script, word, whole=True)]


SLASH = re.compile(r"(?<!\\)/")


def _name(part: Part) -> str:
    """A variable without a value as a person wrote it: NAME, NAME[@], and others in braces."""
    if part.operator in CHANGES:
        return f"{{{part.prefix}{part.text}{'[@]' if part.array and part.text != '@' else ''}{part.operator}{part.default}}}"
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

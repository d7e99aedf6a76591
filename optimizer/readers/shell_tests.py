"""Tests of a shell script judged by its own values: whether a conditional is met, and how that is told."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from .arithmetic import arithmetic
from .shell_flow import OPENERS, Line, keyword
from .shell_values import Script, expanded, filled
from .shell_words import LET, Word

COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def decision(script: Script, lines: Sequence[Line], met: bool | None, head: str) -> str:
    written = " ".join(map(_written_line, lines))
    names = dict.fromkeys(p.text for line in lines for word in line for p in word if p.kind == "variable" and p.text.isidentifier())
    unset = [name for name in names if name not in script.variables]
    shown_as = written if len(written) <= 80 else f"{written[:79]}…"
    why = "cannot be told from the file" if met is None else "met" if met else "not met"
    if unset and met is not None:
        why += f" as {' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set"
    switch = f"; --set {next(iter(names))}=… can change that" if names else ""
    return f"{head} {shown_as}: {why}, so what it guards is {'read' if met else 'left out'}{switch}"


def _written_line(line: Line) -> str:
    words = [_written(word) for word in line]
    return f"(({words[1].strip()}))" if words[:1] == [LET] and len(words) == 2 else " ".join(words)


def _written(word: Word) -> str:
    """A word about as the script has it."""
    if word[0].kind == "command":
        return "$(…)"
    if word[0].kind == "array":
        return word[0].text
    default = [f":-{part.default}" if part.default is not None else "" for part in word]
    return "".join(
        part.text if part.kind in ("text", "operator", "redirect") else f"${{{part.text}{more}}}" if more else f"${part.text}"
        for part, more in zip(word, default, strict=True)
    )


def holds(script: Script, lines: Sequence[Sequence[Word]]) -> bool | None:
    """Whether a test is met; None where that cannot be told."""
    if len(lines) != 1:
        return None
    double = any(keyword(word) == "[[" for word in lines[0])
    parts, operators = joined(lines[0])
    alternatives: list[list[bool | None]] = [[]]
    for place, part in enumerate(parts):
        if place and operators[place - 1] == "||":
            alternatives.append([])
        alternatives[-1].append(_met(script, part, double))
    return _any([_all(each) for each in alternatives])


def joined(line: Sequence[Word]) -> tuple[list[list[Word]], list[str]]:
    """The parts of a line between && and ||, and these."""
    parts: list[list[Word]] = [[]]
    operators = []
    for word in line:
        if word[0].kind == "operator":
            operators.append(word[0].text)
            parts.append([])
        else:
            parts[-1].append(word)
    return parts, operators


def _all(values: Sequence[bool | None]) -> bool | None:
    return False if False in values else None if None in values else True


def _any(values: Sequence[bool | None]) -> bool | None:
    return True if True in values else None if None in values else False


def _met(script: Script, part: Sequence[Word], double: bool) -> bool | None:
    """One comparison, with what is left of the brackets around it."""
    words = [" ".join(expanded(script, word, whole=True)) for word in part]
    negated = False
    if words[:1] == [LET]:
        value = arithmetic(words[1], lambda name: " ".join(script.variables.get(name, [])) or None) if len(words) == 2 else None
        return None if value is None else value != 0
    while words and words[0] in ("!", *OPENERS):
        negated ^= words[0] == "!"
        words = words[1:]
    while words and words[-1] in ("]", "]]"):
        words = words[:-1]
    known = [text for text in map(filled, words) if text is not None]
    if len(known) < len(words):
        return None
    words = known
    for joint, verdict in (("-o", _any), ("-a", _all)):
        if joint in words and not double:
            at = words.index(joint)
            sides = [_compared(side, double, script) for side in (words[:at], words[at + 1 :])]
            met = verdict(sides)
            return None if met is None else met != negated
    met = _compared(words, double, script)
    return None if met is None else met != negated


def _compared(words: Sequence[str], double: bool, script: Script) -> bool | None:
    if len(words) == 1:
        return {"true": True, "false": False}.get(words[0], bool(words[0]))
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in COMPARED:
        numbers = [arithmetic(side, lambda name: " ".join(script.variables.get(name, [])) or None) for side in (left, right)]
        return None if None in numbers else COMPARED[sign](numbers[0] or 0, numbers[1] or 0)
    if sign in ("=", "==", "!="):
        same = fnmatchcase(left, right) if double else left == right
        return same == (sign != "!=")
    return None

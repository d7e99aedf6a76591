"""A launch script read as text: its variables, arrays and command lines. Nothing is executed, and no file but it is looked at.

Variables are put in where they stand; a command substitution has no value here. Of conditionals and loops (`shell_flow`), and after
a test with && or ||, what the script's own values let through is read, a variable without one being empty as it is in the shell; a
test that cannot be told counts as not met, and what was decided is told. The last assignment of a name wins, and names that are
assigned different values are told.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ...search_spaces.errors import InputError
from .arithmetic import arithmetic
from .shell_flow import OPENERS, Line, Reader, follow, is_test, keyword, shapes
from .shell_words import ARRAY_BEGIN, ARRAY_END, ASSIGNMENT, Part, Word, lines_of, words_of

UNSET = "\x00"
"""Stands in a word for what has no value in the file, with the name behind it up to the next one."""
MOST_CHARACTERS = 20_000_000
INNER_OPTION = re.compile(r"(?:^|\s)--[a-zA-Z]")
"""Of a word in quotes, which is a command line by itself if it has several."""
POSITIONAL = re.compile(r"[0-9]+|[@*#]")
MOST_ROUNDS = 10_000
"""Of all loops together."""
MOST_SHELLS = 8
"""Shells that start each other."""
KEYWORDS = frozenset(
    {"export", "readonly", "local", "declare", "typeset", "then", "else", "do", "if", "elif", "while", "{", "exec", "env"}
)


@dataclass
class Script:
    """What a script holds: variables by name, each a list of words; command lines as words; `#SBATCH` lines as words.

    `conflicts` are variables that are assigned several values, `decisions` say which conditionals were read or left out.
    """

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    conflicts: dict[str, list[str]] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    functions: dict[str, list[Line]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
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


def read_script(text: str, given: Mapping[str, str] | None = None, where: str = "script") -> Script:
    """The script of a text. `given` are variables that the caller sets, as the environment of the script would.

    InputError for variables that unfold into more than anybody means.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"\\[ \t]*\n", " ", text)
    given = dict(given or {})
    script = Script({name: [value] for name, value in given.items()}, where=where)
    script.batch = re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE)
    _follow(script, list(lines_of(text)), given)
    if not any(map(options, script.commands)):
        _uncalled(script, given)
    return script


def unresolved(word: str) -> list[str]:
    """The names in a word that have no value in the file."""
    return re.findall(f"{UNSET}([^{UNSET}]*){UNSET}", word)


def shown(word: str) -> str:
    """A word as a person wrote it."""
    return re.sub(f"{UNSET}([^{UNSET}]*){UNSET}", lambda match: f"${match.group(1)}", word)


def without_value(text: str) -> str:
    """An option as a person wrote it, and why the file holds no value for it."""
    return f"{shown(text)} ({'; '.join(dict.fromkeys(map(_reason, unresolved(text))))})"


def _reason(name: str) -> str:
    if name == "(…)":
        return "what a command prints"
    if name.startswith("(("):
        return f"{name.strip('()')} is worked out of what the file does not set"
    if POSITIONAL.fullmatch(name):
        return f"${name} is an argument of the script"
    return f"the file sets no {name}" if name.isidentifier() else f"${name} is no plain variable"


def _follow(script: Script, lines: Sequence[Line], given: Mapping[str, str], depth: int = 0) -> None:
    """What runs of the lines of a script."""

    def assign(name: str, value: str) -> bool:
        script.rounds += 1
        if script.rounds > MOST_ROUNDS:
            raise InputError(f"{script.where}: its loops go round more than {MOST_ROUNDS:,} times; write out what they start")
        if name in given:
            return value == given[name]
        script.variables[name] = [value]
        return True

    def fill(word: Word) -> list[str] | None:
        words = _expanded(script, word)
        if any(not name.isidentifier() and not name.isdigit() for each in words for name in unresolved(each)):
            return None
        return [re.sub(f"{UNSET}[^{UNSET}]*{UNSET}", "", each) for each in words]

    reader = Reader(
        take=lambda line: _take_guarded(script, line, given, depth),
        command=lambda line: _take(script, line, given, depth),
        holds=lambda tests: _holds(script, tests),
        decision=lambda head, tests, met: _decision(script, tests, met, head),
        fill=fill,
        assign=assign,
        define=script.functions.__setitem__,
        tell=script.decisions.append,
    )
    follow(lines, reader)


def _uncalled(script: Script, given: Mapping[str, str]) -> None:
    """Functions that nothing calls, of a script that holds no option elsewhere: it may be one that another reads."""
    for name in [name for name in script.functions if name not in script.called]:
        script.decisions.append(f"function {name}: nothing in the file calls it, it is read as if it were called without arguments")
        _follow(script, script.functions[name], given, 1)


def _take_guarded(script: Script, line: Sequence[Word], given: Mapping[str, str], depth: int) -> None:
    """The commands of a line that && and || join: what follows a test only if the test lets it through."""
    parts, operators = _joined(line)
    if not is_test(parts[0]) or not operators:
        for part in parts:
            _take(script, part, given, depth)
        return
    last = max(place for place, part in enumerate(parts) if is_test(part) or keyword(part[-1]) in ("]", "]]"))
    tests = [list(line[: _end_of(parts, last)])]
    met = _holds(script, tests)
    if last == len(parts) - 1:
        return
    if any(map(shapes, parts[last + 1 :])):
        script.decisions.append(_decision(script, tests, met, "if"))
    if (met is True) == (operators[last] == "&&"):
        for part in parts[last + 1 :]:
            _take(script, part, given, depth)


def _end_of(parts: Sequence[Sequence[Word]], last: int) -> int:
    """Words of a line up to the end of one of its parts, with the operators between."""
    return sum(map(len, parts[: last + 1])) + last


def _take(script: Script, line: Sequence[Word], given: Mapping[str, str], depth: int = 0) -> None:
    """One command: assignments at its front, then its words, or the lines of another shell that it starts."""
    rest = [word for word in line if word[0].kind != "operator"]
    while rest:
        head = rest[0]
        name = _assigned(head)
        if name is None:
            if len(head) == 1 and head[0].kind == "text" and head[0].text in KEYWORDS:
                rest = rest[1:]
                continue
            break
        plus = head[0].text.startswith(f"{name}+=")
        value = _after_equals(head)
        consumed = 1
        if not value and len(rest) > 1 and rest[1] == ARRAY_BEGIN:
            end = next((i for i, word in enumerate(rest) if word == ARRAY_END), len(rest))
            words = [text for word in rest[2:end] for text in _expanded(script, word)]
            consumed = end + 1
        else:
            words = [" ".join(_expanded(script, value, whole=True))] if value else [""]
        _assign(script, name, words, plus, given)
        rest = rest[consumed:]
    words = [text for word in rest if word not in (ARRAY_BEGIN, ARRAY_END) for text in _expanded(script, word)]
    inner = _inner(words) if depth < MOST_SHELLS else ""
    outer = [word for word in words if word != inner] if words[:1] != ["eval"] else []
    if outer and outer[0] in script.functions and depth < MOST_SHELLS:
        _call(script, outer, given, depth)
    elif outer[:1] == ["shift"]:
        _shift(script, outer)
    elif outer:
        script.commands.append(outer)
    if inner:
        _follow(script, list(lines_of(inner)), given, depth + 1)


def _call(script: Script, words: Sequence[str], given: Mapping[str, str], depth: int) -> None:
    """A function with its arguments in the place of the script's own."""
    name, *arguments = words
    script.called.add(name)
    script.size += sum(len(line) for line in script.functions[name]) + 1
    if script.size > MOST_CHARACTERS:
        raise InputError(f"{script.where}: its functions call each other too often; write them out")
    outer = {key: value for key, value in script.variables.items() if POSITIONAL.fullmatch(key)}
    _place(script, arguments)
    _follow(script, script.functions[name], given, depth + 1)
    _place(script, [])
    script.variables |= outer


def _place(script: Script, arguments: Sequence[str]) -> None:
    """Sets what $1, $@ and $# stand for."""
    for key in [key for key in script.variables if POSITIONAL.fullmatch(key)]:
        del script.variables[key]
    if arguments:
        script.variables |= {str(number): [word] for number, word in enumerate(arguments, start=1)}
        script.variables |= {"@": list(arguments), "*": [" ".join(arguments)], "#": [str(len(arguments))]}


def _shift(script: Script, words: Sequence[str]) -> None:
    """Drops the first of a function's arguments; of the script's own, which are not known, nothing."""
    count = int(words[1]) if len(words) > 1 and words[1].isdigit() and len(words[1]) < 4 else 1
    _place(script, script.variables.get("@", [])[count:])


def _inner(words: Sequence[str]) -> str:
    """The command line that a command holds as text: of eval, of `bash -c`, or a quoted one that ssh, srun or the like pass on."""
    if words[:1] == ["eval"]:
        return " ".join(words[1:])
    return next((word for word in words if len(INNER_OPTION.findall(word)) > 1), "")


def _assign(script: Script, name: str, words: list[str], plus: bool, given: Mapping[str, str]) -> None:
    if name in given:
        return
    before = script.variables.get(name)
    if plus and before is not None:
        words = [*before, *words] if len(before) != 1 or len(words) != 1 else [before[0] + words[0]]
    elif before is not None and before != words and name not in (" ".join(words)):
        seen = script.conflicts.setdefault(name, [" ".join(before)])
        seen.append(" ".join(words))
    script.variables[name] = words


def _assigned(word: Word) -> str | None:
    match = ASSIGNMENT.match(word[0].text) if word and word[0].kind == "text" and not word[0].quoted else None
    return match.group(1) if match else None


def _after_equals(word: Word) -> Word:
    head = word[0].text
    tail = head[head.index("=") + 1 :]
    return [*([Part("text", tail)] if tail else []), *word[1:]]


def _expanded(script: Script, word: Word, whole: bool = False) -> list[str]:
    """The words that one word becomes; `whole` keeps it in one, as an assignment does."""
    found = [""]
    open_word = any(part.quoted for part in word)
    for part in word:
        values = _values(script, part)
        script.size += sum(map(len, values))
        if script.size > MOST_CHARACTERS:
            raise InputError(f"{script.where}: its variables unfold into more than {MOST_CHARACTERS:,} characters; write them out")
        if part.kind == "text" or (part.quoted and not part.array) or whole:
            found[-1] += " ".join(values)
            open_word = open_word or bool(values)
            continue
        words = values if part.quoted else [piece for value in values for piece in value.split()]
        if not words:
            continue
        found[-1] += words[0]
        found += words[1:]
        open_word = True
    return [text for text in found if text or open_word]


def _values(script: Script, part: Part) -> list[str]:
    if part.kind == "text":
        return [part.text]
    if part.kind == "arithmetic":
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", part.text)
        value = arithmetic(plain.replace("10#", ""), lambda name: " ".join(script.variables.get(name, [])) or None)
        return [_unset(f"(({part.text}))") if value is None else str(value)]
    if part.kind == "command":
        return [_unset("(…)")]
    if part.text in script.variables:
        values = script.variables[part.text]
        if values != [""] or part.default is None:
            return values
    if part.default is not None and part.assigns:
        script.variables[part.text] = [" ".join(text for word in words_of(part.default) for text in _expanded(script, word))]
        return script.variables[part.text]
    if part.default is not None:
        return [text for word in words_of(part.default) for text in _expanded(script, word)] or [""]
    return [_unset(part.text)]


def _unset(name: str) -> str:
    """What stands for a value that the file does not hold; without blanks, at which a word would be cut."""
    plain = "".join(name.replace(UNSET, "").split())
    return f"{UNSET}{plain}{UNSET}"


# --- conditionals ------------------------------------------------------------------------------------------------------------

COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def _decision(script: Script, lines: Sequence[Line], met: bool | None, head: str) -> str:
    written = " ".join(_written(word) for line in lines for word in line)
    names = dict.fromkeys(p.text for line in lines for word in line for p in word if p.kind == "variable" and p.text.isidentifier())
    unset = [name for name in names if name not in script.variables]
    shown_as = written if len(written) <= 80 else f"{written[:79]}…"
    why = "cannot be told from the file" if met is None else "met" if met else "not met"
    if unset and met is not None:
        why += f" as {' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set"
    switch = f"; --set {next(iter(names))}=… can change that" if names else ""
    return f"{head} {shown_as}: {why}, so what it guards is {'read' if met else 'left out'}{switch}"


def _written(word: Word) -> str:
    """A word about as the script has it."""
    if word[0].kind == "command":
        return "$(…)"
    if word[0].kind == "array":
        return word[0].text
    default = [f":-{part.default}" if part.default is not None else "" for part in word]
    return "".join(
        part.text if part.kind in ("text", "operator") else f"${{{part.text}{more}}}" if more else f"${part.text}"
        for part, more in zip(word, default, strict=True)
    )


def _holds(script: Script, lines: Sequence[Sequence[Word]]) -> bool | None:
    """Whether a test is met; None where that cannot be told."""
    if len(lines) != 1:
        return None
    double = any(keyword(word) == "[[" for word in lines[0])
    parts, operators = _joined(lines[0])
    alternatives: list[list[bool | None]] = [[]]
    for place, part in enumerate(parts):
        if place and operators[place - 1] == "||":
            alternatives.append([])
        alternatives[-1].append(_met(script, part, double))
    return _any([_all(each) for each in alternatives])


def _joined(line: Sequence[Word]) -> tuple[list[list[Word]], list[str]]:
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
    words = [" ".join(_expanded(script, word, whole=True)) for word in part]
    negated = False
    while words and words[0] in ("!", *OPENERS):
        negated ^= words[0] == "!"
        words = words[1:]
    while words and words[-1] in ("]", "]]"):
        words = words[:-1]
    if any(not name.isidentifier() and not name.isdigit() for word in words for name in unresolved(word)):
        return None
    words = [re.sub(f"{UNSET}[^{UNSET}]*{UNSET}", "", word) for word in words]
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


# --- from characters to words ------------------------------------------------------------------------------------------------

# --- options -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """`--name value value`; `name` without its dashes, hyphens kept as they are."""

    name: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *(shown(value) for value in self.values)))


def options(words: Sequence[str]) -> list[Option]:
    """The options of a command line, in order; words before the first belong to none."""
    found: list[Option] = []
    for word in words:
        match = re.match(r"--([A-Za-z][\w.\-:]*)(?:=(.*))?$", word, re.DOTALL)
        if match:
            found.append(Option(match.group(1), () if match.group(2) is None else (match.group(2),)))
        elif found:
            found[-1] = Option(found[-1].name, (*found[-1].values, word))
    return found

"""A launch script read as text: its variables, arrays and command lines. Nothing is executed, and no file but it is looked at.

Variables are put in where they stand; a command substitution has no value here. Branches are not followed: every assignment
counts, the last one of a name wins, and names that are assigned different values are told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...search_spaces.errors import InputError
from .arithmetic import arithmetic

UNSET = "\x00"
"""Stands in a word for what has no value in the file, with the name behind it up to the next one."""
MOST_WORDS = 200_000
MOST_CHARACTERS = 20_000_000
SEPARATORS = frozenset("\n;&|")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
KEYWORDS = frozenset(
    {"export", "readonly", "local", "declare", "typeset", "then", "else", "do", "if", "elif", "while", "{", "exec", "env"}
)


@dataclass
class Script:
    """What a script holds: variables by name, each a list of words; command lines as words; `#SBATCH` lines as words.

    `conflicts` are variables that are assigned several values.
    """

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    conflicts: dict[str, list[str]] = field(default_factory=dict)
    where: str = "script"
    size: int = 0

    def number(self, *names: str) -> int | None:
        """The first of the variables that holds a whole number."""
        for name in names:
            words = self.variables.get(name, [])
            if len(words) == 1 and re.fullmatch(r"\d{1,9}", words[0]):
                return int(words[0])
        return None


@dataclass(frozen=True)
class Part:
    """A piece of a word: "text", "variable", "arithmetic" or "command"; quoted pieces are not cut at blanks."""

    kind: str
    text: str
    quoted: bool = False
    default: str | None = None
    array: bool = False


Word = list[Part]


def read_script(text: str, given: Mapping[str, str] | None = None, where: str = "script") -> Script:
    """The script of a text. `given` are variables that the caller sets, as the environment of the script would.

    InputError for variables that unfold into more than anybody means.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"\\[ \t]*\n", " ", text)
    given = dict(given or {})
    script = Script({name: [value] for name, value in given.items()}, where=where)
    script.batch = re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE)
    for line in _lines(text):
        _take(script, line, given)
    return script


def unresolved(word: str) -> list[str]:
    """The names in a word that have no value in the file."""
    return re.findall(f"{UNSET}([^{UNSET}]*){UNSET}", word)


def shown(word: str) -> str:
    """A word as a person wrote it."""
    return re.sub(f"{UNSET}([^{UNSET}]*){UNSET}", lambda match: f"${match.group(1)}", word)


def _take(script: Script, line: list[Word], given: Mapping[str, str]) -> None:
    """One logical line: assignments at its front, then a command."""
    rest = list(line)
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
    if words:
        script.commands.append(words)


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
    if part.default is not None:
        return [text for word in _words(part.default) for text in _expanded(script, word)] or [""]
    return [_unset(part.text)]


def _unset(name: str) -> str:
    """What stands for a value that the file does not hold; without blanks, at which a word would be cut."""
    plain = "".join(name.replace(UNSET, "").split())
    return f"{UNSET}{plain}{UNSET}"


# --- from characters to words ------------------------------------------------------------------------------------------------

ARRAY_BEGIN: Word = [Part("array", "(")]
ARRAY_END: Word = [Part("array", ")")]


def _lines(text: str) -> Iterator[list[Word]]:
    """Logical lines as words: cut at line ends, semicolons and pipes outside quotes and arrays; comments and here-documents out."""
    reader = _Reader(_without_heredocs(text))
    line: list[Word] = []
    for word in reader.words():
        if word is None:
            if line:
                yield line
            line = []
        else:
            line.append(word)
    if line:
        yield line


def _words(text: str) -> list[Word]:
    return [word for line in _lines(text) for word in line] if text else []


def _without_heredocs(text: str) -> str:
    kept: list[str] = []
    until = ""
    for line in text.split("\n"):
        if until:
            until = "" if line.strip() == until else until
            continue
        match = HEREDOC.search(line)
        if match and "<<<" not in line and not line.lstrip().startswith("#") and "((" not in line:
            until = match.group(2)
            line = line[: match.start()]
        kept.append(line)
    return "\n".join(kept)


class _Reader:
    """Cuts characters into words; None stands for the end of a logical line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0  # of arrays
        self.parts: Word = []
        self.started = False

    def words(self) -> Iterator[Word | None]:
        count = 0
        while self.at < len(self.text) and count < MOST_WORDS:
            for word in self._step():
                count += 1
                yield word
        yield from self._flush()
        yield None

    def _step(self) -> Iterator[Word | None]:
        char = self.text[self.at]
        if char in " \t":
            yield from self._flush()
            self.at += 1
        elif char == "#" and not self.started:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif char in SEPARATORS:
            yield from self._flush()
            self.at += 1
            if not self.depth:
                yield None
        elif char == "(" and self._after_assignment():
            yield from self._flush()
            self.depth = 1
            self.at += 1
            yield ARRAY_BEGIN
        elif char == ")" and self.depth:
            yield from self._flush()
            self.depth = 0
            self.at += 1
            yield ARRAY_END
        elif char in "()":
            yield from self._flush()
            self.at += 1
            if not self.depth:
                yield None
        elif char == "'":
            self._quoted_plain()
        elif char == '"':
            self._quoted()
        elif char == "\\":
            self._add(Part("text", self.text[self.at + 1 : self.at + 2], True))
            self.at += 2
        elif char in "$`":
            self._dollar(False)
        else:
            match = re.compile(r"[^\s;&|()'\"\\$`]+").match(self.text, self.at)
            piece = match.group() if match else char
            self._add(Part("text", piece))
            self.at += len(piece)

    def _after_assignment(self) -> bool:
        return bool(self.parts and self.parts[-1].kind == "text" and re.fullmatch(r"[A-Za-z_]\w*\+?=", self.parts[-1].text))

    def _flush(self) -> Iterator[Word]:
        if self.started:
            yield self.parts
        self.parts, self.started = [], False

    def _add(self, part: Part) -> None:
        self.started = True
        last = self.parts[-1] if self.parts else None
        if last and last.kind == part.kind == "text" and last.quoted == part.quoted:
            self.parts[-1] = Part("text", last.text + part.text, part.quoted)
        else:
            self.parts.append(part)

    def _quoted_plain(self) -> None:
        end = self.text.find("'", self.at + 1)
        end = len(self.text) if end < 0 else end
        self._add(Part("text", self.text[self.at + 1 : end], True))
        self.at = end + 1

    def _quoted(self) -> None:
        self.at += 1
        self._add(Part("text", "", True))
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\":
                self._add(Part("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char in "$`":
                self._dollar(True)
            else:
                end = min((place for place in (self.text.find(c, self.at) for c in '"\\$`') if place >= 0), default=len(self.text))
                self._add(Part("text", self.text[self.at : end], True))
                self.at = end
        self.at += 1

    def _dollar(self, quoted: bool) -> None:
        """A variable, an arithmetic expression or a command substitution, which stays what it is."""
        text, at = self.text, self.at
        if text[at] == "`":
            end = text.find("`", at + 1)
            self.at = len(text) if end < 0 else end + 1
            self._add(Part("command", "", quoted))
        elif text.startswith("$((", at):
            end = _closing(text, at + 1)
            self._add(Part("arithmetic", text[at + 3 : end - 1], quoted))
            self.at = end + 1
        elif text.startswith("$(", at):
            self.at = _closing(text, at + 1) + 1
            self._add(Part("command", "", quoted))
        elif text.startswith("${", at):
            end = _closing(text, at + 1, "{}")
            self._add(_braced(text[at + 2 : end], quoted))
            self.at = end + 1
        else:
            match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$-])").match(text, at)
            if match:
                self._add(Part("variable", match.group(1), quoted, array=match.group(1) in "@*"))
                self.at = match.end()
            else:
                self._add(Part("text", "$", quoted))
                self.at += 1


def _braced(inside: str, quoted: bool) -> Part:
    """`NAME`, `NAME:-default`, `NAME[@]`, `NAME[*]`; whatever else has no value here."""
    match = re.fullmatch(r"([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?::?[-=](.*))?", inside, re.DOTALL)
    if not match:
        return Part("variable", f"{{{inside}}}", quoted)
    return Part("variable", match.group(1), quoted, match.group(3), bool(match.group(2)) or match.group(1) in "@*")


def _closing(text: str, at: int, pair: str = "()") -> int:
    """Where the bracket at a place is closed; the end of the text where it is not."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if not depth:
            return place
    return len(text)


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

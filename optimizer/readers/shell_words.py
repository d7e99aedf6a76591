"""Shell text cut into logical lines, words and their parts, quotes undone; nothing is executed or put in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...search_spaces.errors import InputError
from .shell_changes import CHANGES

MOST_WORDS = 200_000
BLANKS = " \t\x1f"
SEPARATORS = frozenset("\n;&|")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
EMPTY = re.compile(r"\([ \t]*\)")
HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
DOCUMENT = re.compile("\x01(\\d+)\x01")
"""Stands for a here-document by number where it is named."""
REDIRECTION = re.compile(r"\d*(?:<<<|<>|>>|>\||[<>]&|[<>])|&>>?")
JOINED = "\x1f"
"""Stands for the end of a line that goes on, or of one that is taken out: a blank by which lines are still counted."""
FED = re.compile(r"(^|[;&|]\s*)cat\s*(\x01\d+\x01)\s*\|(?!\|)\s*(?:(?:envsubst|tee\s+[^\s|]+)\s*\|\s*)*(.*)")
"""`cat`, a here-document and the command that it is piped to."""
PLACEHOLDER = re.compile(r"<[^\s<>&;|()]+>")
"""What a person is to fill in, as <your path>, which a shell would take for two redirections."""


@dataclass(frozen=True)
class Part:
    """A piece of a word: "text", "variable", "arithmetic" or "command"; quoted pieces are not cut at blanks.

    An "operator" is && or ||; a "mark", on a line of its own, what ends a pattern or a branch of `case` or makes a name a function.
    A "redirect" is an operator before a file or a here-string, a "document" the text of a here-document, quoted if the shell puts
    no variables in. `operator` says what a variable has a `default` for: - and = where it has no value, with = keeping it, + where
    it has one, and those that change its value (`shell_changes`) by what; `prefix` is # for its length and ! for the variable that
    it names, `index` the place in an array.
    """

    kind: str
    text: str
    quoted: bool = False
    default: str | None = None
    array: bool = False
    operator: str = ""
    prefix: str = ""
    index: str | None = None


Word = list[Part]
ARRAY_BEGIN: Word = [Part("array", "(")]
ARRAY_END: Word = [Part("array", ")")]
LET = "let"
"""Command that works out arithmetic, as `((…))` does too."""
EXPR = re.compile(r"\s*expr\s+([^`|;&<>\"'$(]|\$\{?\w+\}?)+")
END_OF_PATTERN, END_OF_BRANCH, DEFINITION = ")", ";;", "()"


def lines_of(text: str, where: str = "") -> Iterator[list[Word]]:
    """Logical lines as words: cut at line ends, semicolons and pipes outside quotes and arrays; comments and here-documents out.

    InputError, with `where` and the line, for a quote that is never closed, if it is the whole text of a file.
    """
    reader = _Reader(*_documents(re.sub(r"\\[ \t]*\n", JOINED, text)), where)
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


def words_of(text: str) -> list[Word]:
    return [word for line in lines_of(text) for word in line if word[0].kind not in ("operator", "mark")] if text else []


def _documents(text: str) -> tuple[str, list[Part]]:
    """A text with a mark in the place of each here-document, and these."""
    kept: list[str] = []
    found: list[Part] = []
    until, body = "", list[str]()
    for line in text.split("\n"):
        if until and line.strip() == until:
            found[-1] = Part("document", "\n".join(body), found[-1].quoted)
            until = ""
            kept[-1] += JOINED * (len(body) + 1)
        elif until:
            body.append(line)
        else:
            match = HEREDOC.search(line)
            if match and not line.lstrip().startswith("#") and "((" not in line:
                until, body = match.group(2), []
                line = f"{line[: match.start()]} \x01{len(found)}\x01 {line[match.end() :]}"
                line = FED.sub(r"\1\3 \2", line)
                found.append(Part("document", "", bool(match.group(1))))
            kept.append(line)
    return "\n".join(kept), found


class _Reader:
    """Cuts characters into words; None stands for the end of a logical line."""

    def __init__(self, text: str, documents: list[Part], where: str) -> None:
        self.text = text
        self.where = where
        self.documents = documents
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
        """What stands here: between words, a word of its own, or a part of one."""
        char = self.text[self.at]
        if char in BLANKS:
            yield from self._flush()
            self.at += 1
        elif char == "#" and not self.started:  # a comment ends with its line, also one that seems to go on
            end = min((place for place in map(self._next, f"\n{JOINED}") if place >= 0), default=len(self.text))
            self.at = end
            if self.text[end : end + 1] == JOINED and not self.depth:
                yield None
        elif (found := self._redirection()) and not self.depth:
            yield from self._redirected(found.group())
            self.at = found.end()
        elif (numbered := DOCUMENT.match(self.text, self.at)) and int(numbered.group(1)) < len(self.documents):
            yield from self._flush()
            yield [self.documents[int(numbered.group(1))]]
            self.at = numbered.end()
        elif char in "<>" and self.text[self.at + 1 : self.at + 2] == "(":
            self.at = _closing(self.text, self.at + 1) + 1
            self._add(Part("command", ""))
        elif self.text.startswith(("&&", "||"), self.at) and not self.depth:
            yield from self._flush()
            yield [Part("operator", char * 2)]
            self.at += 2
        elif self.text.startswith(END_OF_BRANCH, self.at) and not self.depth:
            yield from self._marked(END_OF_BRANCH, re.compile(r";;&?").match(self.text, self.at))
        elif char in SEPARATORS:
            yield from self._flush()
            self.at += 1
            if not self.depth:
                yield None
        elif char in "()":
            yield from self._bracket(char)
        else:
            self._piece(char)

    def _bracket(self, char: str) -> Iterator[Word | None]:
        """An array, a function's name, arithmetic, the end of a pattern, or a subshell."""
        if char == "(" and self._after_assignment():
            yield from self._flush()
            self.depth = 1
            self.at += 1
            yield ARRAY_BEGIN
        elif char == ")" and self.depth:
            yield from self._flush()
            self.depth = 0
            self.at += 1
            yield ARRAY_END
        elif char == "(" and not self.depth and (empty := EMPTY.match(self.text, self.at)):
            yield from self._marked(DEFINITION, empty)
        elif char == "(" and not self.depth and not self.started and self.text.startswith("((", self.at):
            end = _closing(self.text, self.at)
            yield [Part("text", LET)]
            yield [Part("text", self.text[self.at + 2 : end - 1], True)]
            self.at = end + 1
        elif char == ")":
            yield from self._marked(END_OF_PATTERN, re.compile(r"\)").match(self.text, self.at))
        else:
            yield from self._flush()
            self.at += 1
            if not self.depth:
                yield None

    def _piece(self, char: str) -> None:
        """A part of a word: quoted, escaped, put in by the shell, or plain."""
        if char == "'":
            self._quoted_plain()
        elif char == '"':
            self._quoted()
        elif char == "\\":
            self._add(Part("text", self.text[self.at + 1 : self.at + 2], True))
            self.at += 2
        elif char in "$`":
            self._dollar(False)
        else:
            match = PLACEHOLDER.match(self.text, self.at) or re.compile(r"[^\s;&|()'\"\\$`<>]+").match(self.text, self.at)
            piece = match.group() if match else char
            self._add(Part("text", piece))
            self.at += len(piece)

    def _redirection(self) -> re.Match[str] | None:
        """A redirection that begins here, other than of what a command in brackets reads or writes."""
        if self.text[self.at] not in "<>&" or PLACEHOLDER.match(self.text, self.at):
            return None
        found = REDIRECTION.match(self.text, self.at)
        return found if found and (found.group() not in "<>" or self.text[found.end() : found.end() + 1] != "(") else None

    def _redirected(self, operator: str) -> Iterator[Word]:
        """The word so far, unless it is the number of the stream, and the redirection."""
        stream = len(self.parts) == 1 and self.parts[0].text.isdigit() and not self.parts[0].quoted
        if not stream:
            yield from self._flush()
        self.parts, self.started = [], False
        yield [Part("redirect", operator)]

    def _marked(self, mark: str, found: re.Match[str] | None) -> Iterator[Word | None]:
        """The line so far, and the mark on one of its own."""
        yield from self._flush()
        self.at = found.end() if found else self.at + len(mark)
        yield from (None, [Part("mark", mark)], None)

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

    def _next(self, char: str) -> int:
        return self.text.find(char, self.at)

    def _unclosed(self, opened: int) -> None:
        """InputError for a quote of a file that is opened at a place and never closed."""
        if self.where:
            line = 1 + sum(self.text.count(end, 0, opened) for end in f"\n{JOINED}")
            quote = self.text[opened]
            raise InputError(f"{self.where}: line {line}: the quote {quote} is never closed; close it, or one before it")

    def _quoted_plain(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            self._unclosed(self.at)
            end = len(self.text)
        self._add(Part("text", self.text[self.at + 1 : end].replace(JOINED, " "), True))
        self.at = end + 1

    def _quoted(self) -> None:
        opened = self.at
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
                self._add(Part("text", self.text[self.at : end].replace(JOINED, " "), True))
                self.at = end
        if self.at >= len(self.text):
            self._unclosed(opened)
        self.at += 1

    def _dollar(self, quoted: bool) -> None:
        """A variable, an arithmetic expression or a command substitution, which stays what it is."""
        text, at = self.text, self.at
        if text[at] == "`":
            end = text.find("`", at + 1)
            end = len(text) if end < 0 else end
            self._add(_substituted(text[at + 1 : end], quoted))
            self.at = end + 1
        elif text.startswith("$((", at):
            end = _closing(text, at + 1)
            self._add(Part("arithmetic", text[at + 3 : end - 1], quoted))
            self.at = end + 1
        elif text.startswith("$(", at):
            end = _closing(text, at + 1)
            self._add(_substituted(text[at + 2 : end], quoted))
            self.at = end + 1
        elif text.startswith("$[", at):
            end = _closing(text, at + 1, "[]")
            self._add(Part("arithmetic", text[at + 2 : end], quoted))
            self.at = end + 1
        elif text.startswith("${", at):
            end = _closing(text, at + 1, "{}")
            self._add(_braced(text[at + 2 : end], quoted))
            self.at = end + 1
        else:
            match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$-])").match(text, at)
            if match:
                self._add(Part("variable", match.group(1), quoted, array=match.group(1) == "@"))
                self.at = match.end()
            else:
                self._add(Part("text", "$", quoted))
                self.at += 1


def _substituted(command: str, quoted: bool) -> Part:
    """What a command prints: arithmetic of `expr`, and of any other nothing that is known."""
    if EXPR.fullmatch(command):
        return Part("arithmetic", command.strip().removeprefix("expr").replace("\\", ""), quoted)
    return Part("command", "", quoted)


BRACED = re.compile(
    rf"([!#]?)([A-Za-z_]\w*|\d{{1,2}}|[@*])(?:\[([^\]]*)\])?(?::?([-=+?])(.*)|({'|'.join(map(re.escape, CHANGES))})(.*))?",
    re.DOTALL,
)


def _braced(inside: str, quoted: bool) -> Part:
    """`NAME`, `NAME:-default`, `NAME%pattern` and the like, `NAME[@]`, `NAME[0]`, `!NAME`, `#NAME`; the rest has no value."""
    match = BRACED.fullmatch(inside)
    if not match or (match.group(1) == "!" and match.group(3) is not None):
        return Part("variable", "#" if inside == "#" else f"{{{inside}}}", quoted)
    prefix, name, index, operator, default, change, operand = match.groups()
    operator, default = operator or change, default if change is None else operand
    array = index == "@" or name == "@" or (prefix == "#" and index == "*")
    return Part("variable", name, quoted, default, array, operator or "", prefix, None if index in ("@", "*") else index)


def _closing(text: str, at: int, pair: str = "()") -> int:
    """Where the bracket at a place is closed; the end of the text where it is not."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if not depth:
            return place
    return len(text)

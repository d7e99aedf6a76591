"""Which lines of a shell script are read: of `if` and `case` the branch that is met, of loops and functions what runs.

Nothing is executed. A loop over words is read for each of them, one under a test that is met once, a function where it is called.
What cannot be told from the file is left out, and every decision that matters is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...search_spaces.errors import InputError
from .shell_words import ASSIGNMENT, DEFINITION, END_OF_BRANCH, END_OF_PATTERN, LET, Word

Line = Sequence[Word]
OPENERS = ("[", "[[", "test", LET)
SETTING = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.DOTALL)
"""Arithmetic that sets a variable: its name, the operator, and what it is set to."""
SPLIT = frozenset({"if", "then", "elif", "else", "fi", "while", "until", "do", "done", "esac", "{", "}"})
"""Keywords that stand on a line of their own once a script is cut up."""
MOST_NESTED = 100
MOST_ROUNDS = 64
"""Words of a loop that it is read for."""


@dataclass(frozen=True)
class Reader:
    """What is done with the lines that run: `take` reads a command line, `command` a command that stands in place of a test.

    `holds` tells whether a test is met, `decision` says so in a sentence that is told; `fill` puts variables in, None for a word
    without a value; `assign` sets a loop's variable, False where the caller has; `define` keeps a function's lines; `exit` on a
    line of its own `ends` a script, but not one that another reads in.
    """

    take: Callable[[Line], None]
    command: Callable[[Line], None]
    holds: Callable[[Sequence[Line]], bool | None]
    decision: Callable[[str, Sequence[Line], bool | None], str]
    fill: Callable[[Word], list[str] | None]
    assign: Callable[[str, str], bool]
    define: Callable[[str, list[Line]], None]
    tell: Callable[[str], None]
    ends: bool = False


def follow(lines: Sequence[Line], reader: Reader) -> None:
    """Reads what runs of the lines of a script."""
    _Flow(list(_cut(lines)), reader).block(0, (), True, 0)


def is_test(line: Line) -> bool:
    """Whether a line is a test in brackets, or arithmetic that sets nothing."""
    words = [keyword(word) for word in line]
    head = words[1 if words[0] == "!" and len(words) > 1 else 0] if words else ""
    return head in OPENERS and not (head == LET and any(SETTING.match(word[0].text) for word in line))


def keyword(word: Word) -> str:
    """The text of a word without quotes or variables; "" of any other."""
    return word[0].text if len(word) == 1 and word[0].kind == "text" and not word[0].quoted else ""


def shapes(line: Line) -> bool:
    """Whether a line assigns something, or gives an option."""
    return any(
        word[0].kind == "text" and not word[0].quoted and (ASSIGNMENT.match(word[0].text) or word[0].text.startswith("--"))
        for word in line
        if word
    )


def _cut(lines: Sequence[Line]) -> Iterator[Line]:
    """The lines with keywords, and what follows the head of a `case` or a function, on lines of their own."""
    for line in lines:
        rest = line
        while rest and (head := keyword(rest[0])) in SPLIT:
            yield rest[:1]
            rest = rest[1:] if head not in ("fi", "done", "esac", "}") else ()
        apart = {"case": 3, "function": 2}.get(keyword(rest[0]), 0) if rest else 0
        if len(rest) > apart > 0:
            yield rest[:apart]
            yield from _cut([rest[apart:]])
        elif rest:
            yield rest


@dataclass(frozen=True)
class _Flow:
    """The lines of a script by number."""

    lines: Sequence[Line]
    reader: Reader

    def block(self, at: int, ends: Sequence[str], reading: bool, depth: int) -> int:
        """The lines from one on; the number of the one that ends them, or of the script's end."""
        if depth > MOST_NESTED:
            raise InputError(f"script: conditionals and loops nest more than {MOST_NESTED} deep; write them out")
        while at < len(self.lines) and self._head(at) not in ends:
            at = self._statement(at, reading, depth)
        return at

    def _statement(self, at: int, reading: bool, depth: int) -> int:
        """One statement; the number of the line behind it."""
        line, head = self.lines[at], self._head(at)
        if head == "if":
            return self._if(at, reading, depth)
        if head in ("while", "until"):
            return self._while(at, reading, depth)
        if head in ("for", "select"):
            return self._for(at, reading, depth)
        if head == "case":
            return self._case(at, reading, depth)
        if self._defines(at):
            return self._function(at, reading, depth)
        if head == "{":
            return self.block(at + 1, ("}",), reading, depth + 1) + 1
        if reading and head == "exit" and depth == 0 and self.reader.ends and not any(word[0].kind == "operator" for word in line):
            self._told(at + 1, len(self.lines), ["exit: what follows it is left out"])
            return len(self.lines)
        if reading and head not in SPLIT and line[0][0].kind != "mark":
            self.reader.take(line)
        return at + 1

    def _head(self, at: int) -> str:
        """The keyword, or the mark, that a line begins with."""
        if at >= len(self.lines):
            return ""
        word = self.lines[at][0]
        return word[0].text if word[0].kind == "mark" else keyword(word)

    def _until(self, at: int, *heads: str) -> int:
        """The first line from one on that begins with one of the words."""
        while at < len(self.lines) and self._head(at) not in heads:
            at += 1
        return at

    def _told(self, start: int, end: int, said: Sequence[str]) -> None:
        """Tells decisions on lines that assign something or give an option."""
        if any(map(shapes, self.lines[start:end])):
            for each in said:
                self.reader.tell(each)

    def _tested(self, lines: Sequence[Line]) -> bool | None:
        """Whether a test is met; commands in its place are read."""
        for line in lines:
            if not is_test(line):
                self.reader.command(line)
        return self.reader.holds(lines)

    def _if(self, at: int, reading: bool, depth: int) -> int:
        start, done, said = at, not reading, list[str]()
        while self._head(at) in ("if", "elif"):
            then = self._until(at + 1, "then")
            tests, met = self.lines[at + 1 : then], False
            if not done:
                found = self._tested(tests)
                met = found is True
                said.append(self.reader.decision("if", tests, found))
            at = self.block(then + 1, ("elif", "else", "fi"), met, depth + 1)
            done = done or met
        if self._head(at) == "else":
            at = self.block(at + 1, ("fi",), not done, depth + 1)
        self._told(start + 1, at, said)
        return at + 1

    def _while(self, at: int, reading: bool, depth: int) -> int:
        """A loop under a test is read once if that is met, one under a command once in any case; options of a script are none."""
        start, do = at, self._until(at + 1, "do")
        tests, met = self.lines[at + 1 : do], False
        said: list[str] = []
        if reading:
            tested = any(map(is_test, tests))
            optional = any(keyword(word) == "getopts" for line in tests for word in line)
            found = self._tested(tests) if tested else False if optional else None
            if tested and found is not None and self._head(at) == "until":
                found = not found
            met = found is True or not (tested or optional)
            said = [self.reader.decision(self._head(at), tests, found)] if tested or optional else []
            for line in tests if not tested and not optional else ():
                self.reader.command(line)
        at = self.block(do + 1, ("done",), met, depth + 1)
        self._told(start + 1, at, said)
        return at + 1

    def _for(self, at: int, reading: bool, depth: int) -> int:
        """The body for every word; where these have no value, once with a variable that has none."""
        line, do = self.lines[at], self._until(at, "do")
        name = keyword(line[1]) if len(line) > 1 else ""
        listed = line[3:] if len(line) > 2 and keyword(line[2]) == "in" else ()
        filled = [self.reader.fill(word) for word in listed] if reading else []
        values = [] if None in filled else [value for words in filled for value in words or ()]
        rounds = [value for value in values[:MOST_ROUNDS] if self.reader.assign(name, value)] if name.isidentifier() else []
        end = do
        for value in rounds:
            self.reader.assign(name, value)
            end = self.block(do + 1, ("done",), True, depth + 1)
        if not rounds:
            end = self.block(do + 1, ("done",), reading and not (listed and not values and None not in filled), depth + 1)
        if len(rounds) > 1:
            shown = " ".join(values) if len(values) <= 8 else f"{' '.join(values[:8])} …"
            said = f"for {name} in {shown}: of commands that differ in it the first, {name}={values[0]}, is judged"
            self._told(do + 1, end, [f"{said}; --set {name}=… names another"])
        return end + 1

    def _case(self, at: int, reading: bool, depth: int) -> int:
        """The first branch with a pattern that the word matches; none where the word has no value."""
        start, line = at, self.lines[at]
        filled = self.reader.fill(line[1]) if reading and len(line) > 1 else None
        subject = " ".join(filled) if filled is not None else None
        done, taken = subject is None, ""
        at += 1
        while at < len(self.lines) and self._head(at) != "esac":
            body = self._until(at, END_OF_PATTERN, "esac")
            patterns = [pattern for each in self.lines[at:body] for word in each for pattern in self._pattern(word)]
            met = not done and subject is not None and any(fnmatchcase(subject, pattern) for pattern in patterns)
            taken = "|".join(patterns) if met else taken
            done = done or met
            at = self.block(body + 1, (END_OF_BRANCH, "esac"), met, depth + 1)
            at += self._head(at) == END_OF_BRANCH
        if reading:
            said = self.reader.decision("case", [line[1:2]], None if subject is None else bool(taken))
            self._told(start + 1, at, [said.replace("what it guards is read", f"its branch {taken} is read")])
        return at + 1

    def _pattern(self, word: Word) -> list[str]:
        return self.reader.fill(word) or []

    def _defines(self, at: int) -> bool:
        """Whether a function begins at a line: `name()` or `function name`."""
        return self._head(at) == "function" or (len(self.lines[at]) == 1 and self._head(at + 1) == DEFINITION)

    def _function(self, at: int, reading: bool, depth: int) -> int:
        line = self.lines[at]
        named = line[1:] if self._head(at) == "function" else line
        body = self._until(at, "{")
        end = self.block(body + 1, ("}",), False, depth + 1)
        if reading and named and keyword(named[0]):
            self.reader.define(keyword(named[0]), list(self.lines[body + 1 : end]))
        return end + 1

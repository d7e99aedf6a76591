"""A configuration written as a Python program, read as text: what it makes by calls and sets on what it made. Nothing is executed.

Branches are not followed: every assignment counts, the last one of a field wins, as in the shell scripts that are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...search_spaces.errors import InputError

MOST_ITEMS = 100_000
"""Of a list: a typing slip such as [0]*10**9 must not fill the memory."""
OPENING = re.compile(r"^(?:from\s+[\w.]+\s+import\b|import\s+\w|def\s+\w+\s*\(|class\s+\w)", re.MULTILINE)


@dataclass
class Made:
    """What a call makes: its name, the arguments that have no name, and fields, by keyword or assigned afterwards."""

    name: str = ""
    arguments: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    def __str__(self) -> str:
        return self.text


class Source(str):
    """An expression that has no value here, as it is written."""

    __slots__ = ()


def is_python(text: str) -> bool:
    """Whether a text is a Python program that defines or imports something."""
    if not OPENING.search(text):
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def objects(text: str, where: str) -> list[Made]:
    """Everything that a program makes and keeps in a variable or returns. InputError for what is no program."""
    program = _Program()
    try:
        program.run(ast.parse(text).body)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{where}: is not Python: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise InputError(f"{where}: its expressions are nested too deeply to be read") from error
    return [made for made in (*program.names.values(), *program.returned) if isinstance(made, Made)]


def constants(text: str) -> dict[str, Any]:
    """The literals that a program assigns to names of its own, outside functions."""
    found: dict[str, Any] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                found[statement.targets[0].id] = ast.literal_eval(statement.value)
            except (ValueError, TypeError, RecursionError):
                continue  # no literal
    return found


def flat(made: Made, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of the fields below, with their values; of a call that has none, the call itself."""
    for name, value in made.fields.items():
        at = f"{path}.{name}" if path else name
        if isinstance(value, Made):
            yield at, value
            yield from flat(value, at)
        else:
            yield at, value


def richest(made: Iterable[Made], known: frozenset[str]) -> Made | None:
    """Of all objects the one of which most fields bear a known dotted name; None where none bears any."""
    scored = [(sum(name in known for name, _ in flat(each)), each) for each in made]
    best = max(scored, key=lambda pair: pair[0], default=(0, None))
    return best[1] if best[0] else None


class _Program:
    """The names of a program and what they hold, in whatever function they are."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.returned: list[Any] = []

    def run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._assign(target, self.value(statement.value))
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self.value(statement.value))
            elif isinstance(statement, ast.Return) and statement.value is not None:
                self.returned.append(self.value(statement.value))
            for part in ("body", "orelse", "finalbody"):
                if not isinstance(statement, ast.ClassDef):
                    self.run(getattr(statement, part, []))

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            return
        if isinstance(target, ast.Tuple) and isinstance(value, list) and len(target.elts) == len(value):
            for each, part in zip(target.elts, value, strict=True):
                self._assign(each, part)
            return
        path: list[str] = []
        while isinstance(target, ast.Attribute):
            path.insert(0, target.attr)
            target = target.value
        if not path or not isinstance(target, ast.Name):
            return
        place = self.names.get(target.id)
        if not isinstance(place, Made):
            place = self.names[target.id] = Made()
        for name in path[:-1]:
            inner = place.fields.get(name)
            if not isinstance(inner, Made):
                inner = place.fields[name] = Made()
            place = inner
        place.fields[path[-1]] = value

    def value(self, node: ast.expr) -> Any:
        """The value of an expression: a constant, a list, what a call makes, or its own text."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Source(node.id))
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Starred):
            return self.value(node.value)
        if isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            return Made("dict", (), {str(k): self.value(v) for k, v in zip(keys, node.values, strict=True) if k is not None})
        if isinstance(node, ast.Call):
            named = {word.arg: self.value(word.value) for word in node.keywords if word.arg is not None}
            return Made(ast.unparse(node.func), tuple(map(self.value, node.args)), named, ast.unparse(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand)
            return -value if isinstance(value, int | float) else Source(ast.unparse(node))
        found = self._computed(node) if isinstance(node, ast.BinOp) else None
        return Source(ast.unparse(node)) if found is None else found

    def _computed(self, node: ast.BinOp) -> Any:
        """The value of arithmetic on whole numbers, and of lists that are joined or repeated; None for anything else."""
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
            return left + right if len(left) + len(right) <= MOST_ITEMS else None
        if isinstance(left, list) and type(right) is int and isinstance(node.op, ast.Mult):
            return left * right if len(left) * max(right, 0) <= MOST_ITEMS else None
        if type(left) is not int or type(right) is not int:
            return None
        operations = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
        if right:
            operations |= {ast.FloorDiv: left // right, ast.Mod: left % right}
        return operations.get(type(node.op))

"""A launch script read as text: its variables, arrays and command lines. Nothing is executed.

Variables are put in where they stand; a command substitution has no value here. Of conditionals and loops (`shell_flow`), and after
a test with && or ||, what the script's own values let through is read, a variable without one being empty as it is in the shell; a
test that cannot be told counts as not met, and what was decided is told. The last assignment of a name wins, and names that are
assigned different values are told. Scripts that it reads in or starts are followed where they lie beside it, as are here-documents
that a shell runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...search_spaces.errors import InputError
from .arguments import Option, options
from .shell_files import found_beside, text_of
from .shell_flow import SETTING, Line, Reader, follow, is_test, keyword, shapes
from .shell_tests import decision, holds, joined
from .shell_values import POSITIONAL, UNSET, Script, expanded, filled, reason_of, shown, unresolved, without_value, worked_out
from .shell_words import ARRAY_BEGIN, ARRAY_END, ASSIGNMENT, LET, Part, Word, lines_of, words_of

__all__ = ["UNSET", "Option", "Script", "options", "read_script", "reason_of", "shown", "unresolved", "without_value"]

INNER_OPTION = re.compile(r"(?:^|\s)--[a-zA-Z]")
"""Of a word in quotes, which is a command line by itself if it has several."""
MOST_ROUNDS = 10_000
"""Of all loops together."""
MOST_SHELLS = 8
"""Shells, functions and files that start each other."""
DECLARES = frozenset({"export", "readonly", "local", "declare", "typeset"})
KEYWORDS = DECLARES | {"then", "else", "do", "if", "elif", "while", "{", "exec", "env", "nohup", "time"}
SHELLS = frozenset({"bash", "sh", "zsh", "sbatch", "srun", "salloc", "ssh", "mpirun", "numactl"})
"""What runs a script that it is given by name or as a here-document."""
TOLD = re.compile(r"-[a-z]*c")
"""Option of a shell before a command line in quotes."""
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
SBATCH = "sbatch"
BATCH = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus": ("SLURM_GPUS",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gpus-per-task": ("SLURM_GPUS_PER_TASK",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
"""Option of sbatch → variables that Slurm sets from it (sbatch's manual, output environment variables)."""
SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}


@dataclass(frozen=True)
class _Streams:
    """What a command is fed and writes: a here-document, a here-string, and the file that its output goes to."""

    document: str | None = None
    string: str | None = None
    target: str = ""


def read_script(text: str, given: Mapping[str, str] | None = None, where: str = "script", *, surely: bool = True) -> Script:
    """The script of a text; `where` is its path, if it has one. `given` are variables that the caller sets, as the environment of
    the script would.

    InputError for variables that unfold into more than anybody means, and for a quote that is never closed in what is `surely` a
    script.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    given = dict(given or {})
    script = Script({name: [value] for name, value in given.items()}, given=frozenset(given), where=where)
    script.folders = (Path(where).resolve().parent,) if text_of(where) is not None else ()
    batch = [line.partition(" #")[0] for line in BATCH.findall(text)]
    _set_by_slurm(script, [word for line in batch for word in line.split()])
    _follow(script, _lines(text, where if surely else ""))
    if not any(map(options, script.commands)):
        _uncalled(script)
    own = [word for line in batch for each in words_of(line) for word in expanded(script, each)]
    told = [word for words in script.commands if words[0] == SBATCH for word in words[1:]]  # comes before the lines of the file
    script.batch = _spelled_out([*own, *told])
    return script


def _lines(text: str, where: str = "") -> list[Line]:
    return list(lines_of(text, where))


def _set_by_slurm(script: Script, words: Sequence[str]) -> None:
    """Variables that a job of sbatch finds set, as far as options of sbatch say; tasks of all nodes follow from those of one."""
    told = {option.name: int(option.values[0]) for option in options(_spelled_out(words)) if _whole(option)}
    if {"nodes", "ntasks-per-node"} <= told.keys():
        told.setdefault("ntasks", told["nodes"] * told["ntasks-per-node"])
    for option, value in told.items():
        script.variables |= {name: [str(value)] for name in SLURM.get(option, ()) if name not in script.given}


def _whole(option: Option) -> bool:
    return bool(option.values) and re.fullmatch(r"\d{1,9}", option.values[0]) is not None


def _spelled_out(words: Sequence[str]) -> list[str]:
    """Words of sbatch with short options as the long ones: -N 4, -N4."""
    found: list[str] = []
    for word in words:
        long = SHORT.get(word[:2])
        found += [word] if long is None else [long, *([word[2:]] if word[2:] else [])]
    return found


def _follow(script: Script, lines: Sequence[Line], depth: int = 0) -> None:
    """What runs of the lines of a script."""

    def assign(name: str, value: str) -> bool:
        script.rounds += 1
        if script.rounds > MOST_ROUNDS:
            raise InputError(f"{script.where}: its loops go round more than {MOST_ROUNDS:,} times; write out what they start")
        if name in script.given:
            return [value] == script.variables[name]
        script.variables[name] = [value]
        return True

    def fill(word: Word) -> list[str] | None:
        words = [filled(each) for each in expanded(script, word)]
        known = [each for each in words if each is not None]
        return known if len(known) == len(words) else None

    reader = Reader(
        take=lambda line: _take_guarded(script, line, depth),
        command=lambda line: _take(script, line, depth),
        holds=lambda tests: holds(script, tests),
        decision=lambda head, tests, met: decision(script, tests, met, head),
        fill=fill,
        assign=assign,
        define=script.functions.__setitem__,
        tell=script.decisions.append,
        ends=depth == 0,
    )
    follow(lines, reader)


def _uncalled(script: Script) -> None:
    """Functions that nothing calls, of a script that holds no option elsewhere: it may be one that another reads."""
    for name in [name for name in script.functions if name not in script.called]:
        script.decisions.append(f"function {name}: nothing in the file calls it, it is read as if it were called without arguments")
        _follow(script, script.functions[name], 1)


def _take_guarded(script: Script, line: Sequence[Word], depth: int) -> None:
    """The commands of a line that && and || join: what follows a test only if the test lets it through."""
    parts, operators = joined(line)
    if not is_test(parts[0]) or not operators:
        for part in parts:
            _take(script, part, depth)
        return
    last = max(place for place, part in enumerate(parts) if is_test(part) or (part and keyword(part[-1]) in ("]", "]]")))
    tests = [list(line[: _end_of(parts, last)])]
    met = holds(script, tests)
    if last == len(parts) - 1:
        return
    if any(map(shapes, parts[last + 1 :])):
        script.decisions.append(decision(script, tests, met, "if"))
    if (met is True) == (operators[last] == "&&"):
        for part in parts[last + 1 :]:
            _take(script, part, depth)


def _end_of(parts: Sequence[Sequence[Word]], last: int) -> int:
    """Words of a line up to the end of one of its parts, with the operators between."""
    return sum(map(len, parts[: last + 1])) + last


# --- one command -------------------------------------------------------------------------------------------------------------


def _take(script: Script, line: Sequence[Word], depth: int = 0) -> None:
    """One command: assignments at its front, then its words, or the lines of another shell that it starts."""
    line, streams = _redirected(script, [word for word in line if word[0].kind != "operator"])
    separators = script.variables.get("IFS")
    rest = _assigned_ahead(script, line)
    words = [text for word in rest if word not in (ARRAY_BEGIN, ARRAY_END) for text in expanded(script, word)]
    if words[:1] == ["read"]:
        _read(script, words[1:], streams)
    if words and "IFS" in script.variables and script.variables["IFS"] != separators:
        script.variables.pop("IFS")
        script.variables |= {"IFS": separators} if separators is not None else {}
    inner = _inner(words) if depth < MOST_SHELLS else ""
    outer = [word for word in words if word != inner] if words[:1] != ["eval"] else []
    started = _started(outer)
    if outer and outer[0] in script.functions and depth < MOST_SHELLS:
        _call(script, outer, depth)
    elif outer[:1] == [LET]:
        _let(script, outer[1:])
    elif outer[:1] == ["shift"]:
        _shift(script, outer)
    elif outer[:1] in (["source"], ["."]) and len(outer) > 1:
        _read_in(script, outer[1], outer[2:], depth)
    elif outer:
        script.commands.append(outer)
    if started:
        _read_in(script, started[0], started[1:], depth)
    if streams.document is not None and depth < MOST_SHELLS and _runs(words, streams.target):
        _set_by_slurm(script, words if words[0] == SBATCH else [])
        if words[1:2] == ["-s"]:
            _with_arguments(script, _lines(streams.document), words[2:], depth + 1)
            return
        inner = streams.document
    if inner:
        _follow(script, _lines(inner), depth + 1)


def _redirected(script: Script, line: Sequence[Word]) -> tuple[list[Word], _Streams]:
    """A command without what goes to files and comes from them, which is kept apart."""
    kept: list[Word] = []
    document, string, target = None, None, ""
    place = 0
    while place < len(line):
        part = line[place][0]
        if part.kind == "document":
            document = part.text if part.quoted else part.text.replace("\\$", "$")
        elif part.kind == "redirect":
            place += 1
            text = " ".join(expanded(script, line[place], whole=True)) if place < len(line) else ""
            string = text if part.text == "<<<" else string
            target = text if part.text.startswith(">") else target
        else:
            kept.append(line[place])
        place += 1
    return kept, _Streams(document, string, target)


def _assigned_ahead(script: Script, line: Sequence[Word]) -> list[Word]:
    """Takes the assignments, and words such as export, that a command begins with; what is left of it."""
    rest = list(line)
    declares = False
    while rest:
        head = rest[0]
        name = _assigned(head)
        if name is None:
            word = keyword(head)
            if word not in KEYWORDS and not (declares and word[:1] in "-+" and word[1:2] != "-"):
                break
            declares = word in DECLARES or (declares and word not in KEYWORDS)
            rest = rest[1:]
            continue
        plus = head[0].text.startswith(f"{name}+=")
        value = _after_equals(head)
        consumed = 1
        array = not value and len(rest) > 1 and rest[1] == ARRAY_BEGIN
        if array:
            end = next((i for i, word in enumerate(rest) if word == ARRAY_END), len(rest))
            words = [text for word in rest[2:end] for text in expanded(script, word)]
            consumed = end + 1
        else:
            words = [" ".join(expanded(script, value, whole=True))] if value else [""]
        _assign(script, name, words, plus, array)
        rest = rest[consumed:]
    return rest


def _assign(script: Script, name: str, words: list[str], plus: bool, array: bool) -> None:
    """Sets a variable; += adds words to an array, and text to the first word of what it is."""
    if name in script.given:
        return
    before = script.variables.get(name)
    if plus and before is not None:
        words = [*before, *words] if array else ["".join((*before[:1], *words)), *before[1:]]
    elif before is not None and before != words and name not in (" ".join(words)):
        seen = script.conflicts.setdefault(name, [" ".join(before)])
        seen.append(" ".join(words))
    script.variables[name] = words


def _let(script: Script, words: Sequence[str]) -> None:
    """Arithmetic that sets variables: NAME = expression, NAME += expression, NAME++."""
    for text in words:
        step = STEP.fullmatch(text)
        match = SETTING.match(f"{step.group(1)} {step.group(2)}= 1" if step else text)
        if match:
            name, operator, value = match.groups()
            _assign(script, name, [worked_out(script, f"{name}{operator}({value})" if operator else value)], False, False)


STEP = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+])\2\s*")


def _assigned(word: Word) -> str | None:
    match = ASSIGNMENT.match(word[0].text) if word and word[0].kind == "text" and not word[0].quoted else None
    return match.group(1) if match else None


def _after_equals(word: Word) -> Word:
    head = word[0].text
    tail = head[head.index("=") + 1 :]
    return [*([Part("text", tail)] if tail else []), *word[1:]]


def _read(script: Script, words: Sequence[str], streams: _Streams) -> None:
    """`read` of a here-string or a here-document: its words by name, the last name taking the rest."""
    text = streams.string if streams.string is not None else streams.document
    flags = [word for word in words if word.startswith("-")]
    names = [word for word in words if word.isidentifier() and word not in script.given]
    if text is None or not names:
        return
    if UNSET in text and (len(names) > 1 or flags):
        script.variables = {name: words for name, words in script.variables.items() if name not in names}
        return
    if any("d" in flag for flag in flags):  # up to another mark than the end of the line, as a rule everything
        script.variables[names[0]] = [text]
        return
    marks = "".join(script.variables.get("IFS", [" \t\n"]))
    pieces = re.split(f"[{re.escape(marks)}]" if marks.strip() else r"\s+", text.strip()) if marks else [text]
    if any("a" in flag for flag in flags):
        script.variables[names[0]] = pieces
        return
    joint = marks[:1] if marks.strip() else " "
    held = [*pieces[: len(names) - 1], joint.join(pieces[len(names) - 1 :])]
    script.variables |= {name: [value] for name, value in zip(names, [*held, *[""] * len(names)], strict=False)}


# --- functions, shells and files ---------------------------------------------------------------------------------------------


def _call(script: Script, words: Sequence[str], depth: int) -> None:
    """A function with its arguments in the place of the script's own."""
    name, *arguments = words
    script.called.add(name)
    script.grow(sum(len(line) for line in script.functions[name]) + 1)
    _with_arguments(script, script.functions[name], arguments, depth + 1)


def _with_arguments(script: Script, lines: Sequence[Line], arguments: Sequence[str], depth: int) -> None:
    outer = {key: value for key, value in script.variables.items() if POSITIONAL.fullmatch(key)}
    _place(script, arguments)
    _follow(script, lines, depth)
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
    told = [
        after for shell, flag, after in zip(words, words[1:], words[2:], strict=False) if shell in SHELLS and TOLD.fullmatch(flag)
    ]
    return next((word for word in words if len(INNER_OPTION.findall(word)) > 1), told[0] if told else "")


def _started(words: Sequence[str]) -> Sequence[str]:
    """The script that a command starts, with its arguments: `bash run.sh 8`, `srun -N 2 run.sh`, `./run.sh`."""
    if not words or not (words[0] in SHELLS or words[0].endswith(SCRIPTS)):
        return ()
    place = next((place for place, word in enumerate(words) if word.endswith(SCRIPTS)), None)
    return words[place:] if place is not None else ()


def _runs(words: Sequence[str], target: str) -> bool:
    """Whether a here-document is run by the command, or written to a script."""
    if words[:1] in (["cat"], ["tee"]):
        return (target or words[-1]).endswith(SCRIPTS)
    return bool(words) and words[0] in SHELLS


def _read_in(script: Script, word: str, arguments: Sequence[str], depth: int) -> None:
    """A script that lies beside this one, read as part of it; one that does not is told."""
    path = found_beside(script.folders, word)
    text = text_of(path) if path is not None else None
    if path is None or text is None:
        missing = f"{shown(word)}: not found beside {Path(script.where).name}, so what it sets is not known"
        script.decisions += [missing] if missing not in script.decisions else []
        return
    if depth >= MOST_SHELLS:
        return
    script.grow(len(text))
    outer, script.folders = script.folders, (path.parent, *script.folders)
    if arguments:
        _with_arguments(script, _lines(text), arguments, depth + 1)
    else:
        _follow(script, _lines(text), depth + 1)
    script.folders = outer

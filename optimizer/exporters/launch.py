"""Launch scripts: a header in words, variables, a check of the number of processes, and the command that starts the framework."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from ...search_spaces.model import ModelSpec
from ...search_spaces.stack import Framework
from ..result import PricedLayout
from .request import Request

WIDTH = 112
TOTAL = "TOTAL_PROCESSES"
"""Variable of a script that holds the processes of all servers together."""
SAVE_INTERVAL = 500
"""Steps between checkpoints where nobody says otherwise."""


@dataclass(frozen=True)
class Variable:
    """What a plan does not decide and the person who launches must: its name, what it is, and a default if one is harmless."""

    name: str
    meaning: str
    default: str | None = None
    kind: type[str] | type[int] | type[float] = str


def norm_epsilon(spec: ModelSpec) -> Variable:
    """Whoever launches says it only of a model whose description does not."""
    known = None if spec.norm_epsilon is None else f"{spec.norm_epsilon:g}"
    return Variable("NORM_EPSILON", "epsilon of the model's norms", known, kind=float)


def rotary_base(spec: ModelSpec, kind: type[int] | type[float]) -> Variable:
    """As norm_epsilon; some frameworks take whole numbers alone."""
    known = None if spec.rope_theta is None else str(kind(spec.rope_theta))
    return Variable("ROTARY_BASE", "theta of the rotary embedding", known, kind=kind)


@dataclass(frozen=True)
class Script:
    """All that a launch script is made of.

    `arrays` are words as they stand, `open_arguments` pairs of an option and the variable that holds its value. `command` is the
    framework's own part of the last command, in the shell's words; `launcher` starts the processes.
    """

    command: Sequence[str]
    variables: Sequence[Variable]
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: must not be set
    arrays: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict)
    open_arguments: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    before: Sequence[str] = ()  # lines of shell that prepare the launch
    takes_options: bool = True  # arguments of the script are the framework's options
    launcher: Sequence[str] = (
        'torchrun --nnodes "${NNODES}" --nproc-per-node "${NPROC_PER_NODE}" --node-rank "${NODE_RANK}"',
        '--master-addr "${MASTER_ADDR}" --master-port "${MASTER_PORT}"',
    )


def launch_script(asked: Request, script: Script) -> str:
    """The script's text: it stops before anything runs if variables are missing or the number of processes is not the plan's."""
    slots = asked.slots
    arrays = [*script.arrays, *(["OPEN_ARGS"] if script.open_arguments else [])]
    command = [*script.launcher, *script.command, *(f'"${{{name}[@]}}"' for name in arrays)]
    command += ['"$@"'] if script.takes_options else []
    read = " ".join([*command, *script.before])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *commented(_summary(asked, script)),
            "",
            "set -euo pipefail",
            'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"' if "${HERE}" in read else "",
            *_environment(script.environment),
            *_variables(script, len(slots)),
            "",
            *_processes(slots, read),
            "",
            *_arrays(script.arrays),
            *_open(script.open_arguments),
            *script.before,
            " \\\n  ".join(["exec " + command[0], *command[1:]]),
            "",
        ]
    )


def layout_words(priced: PricedLayout) -> str:
    """The layout on one line, in the words of the project."""
    layout = priced.layout
    words = [
        f"tp {layout.tp} · cp {layout.cp} · pp {layout.pp} · dp {layout.dp}",
        f"ep {layout.ep} · etp {layout.etp} · edp {layout.edp}",
        f"vpp {layout.vpp}, schedule {layout.schedule}",
        f"micro-batch {layout.micro_batch} × {layout.num_microbatches}",
        f"SP {'on' if layout.sequence_parallel else 'off'}",
        f"optimizer sharding {layout.optimizer_sharding}",
        f"recompute {layout.recompute}",
        f"offload {layout.offload}",
    ]
    return "; ".join(words)


def origin(asked: Request) -> str:
    """What was planned, and for which software, in a sentence."""
    cluster, model = asked.problem.cluster, asked.spec.name
    return (
        f"{model} on {asked.layout.devices} x {cluster.accelerator.name} ({cluster.name}), for {asked.speaks.title}; written by "
        f"paraplan {asked.plan.paraplan}."
    )


def batch_words(asked: Request) -> str:
    """Batch, sequence and precision, which no exporter changes."""
    workload = asked.problem.workload
    return f"Batch: {workload.global_batch} sequences of {workload.seq_len} tokens, {workload.precision}."


def predicted(asked: Request) -> str:
    """What the plan promises, and of which stack, in a sentence; a second where these files are for another framework."""
    priced, stack = asked.plan.plan, asked.stack
    (low, high), memory = priced.step_time_interval_s, priced.memory
    promise = (
        f"Predicted for the stack {stack.name}: {priced.step_time_s:.3g} s per step ({low:.3g} to {high:.3g}), "
        f"MFU {100 * priced.mfu:.1f} %, fullest stage "
        f"{memory.peak_gib:.1f} of {memory.usable_gib:.1f} GiB usable ({memory.verdict})."
    )
    if asked.speaks.framework not in get_args(Framework) or asked.speaks.framework == stack.framework:
        return promise
    return (
        f"{promise} That is no prediction for {asked.speaks.title}: time and memory there differ; for its own, plan with "
        f"--framework {asked.speaks.framework}."
    )


def host_order(asked: Request) -> str:
    """In which order servers must be numbered for the groups to lie where the plan put them."""
    cluster, devices = asked.problem.cluster, asked.layout.devices
    if asked.per_server == devices:
        return "There is one server, number 0."
    if asked.problem.allocated_sizes[cluster.supernode_place] == asked.per_server:
        return "Servers that share a switch should have numbers that follow each other."
    return f"Servers of one {cluster.supernode} must have numbers that follow each other: the layout was placed in that order."


def printable(text: str) -> str:
    """Text on one line; names come from the user's files, so nothing but printable characters gets through."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def commented(lines: Iterable[str]) -> list[str]:
    """Words as lines of comment, for a shell or for Python."""
    return [f"# {piece}".rstrip() for line in lines for piece in textwrap.wrap(printable(line), WIDTH) or [""]]


def _summary(asked: Request, script: Script) -> list[str]:
    required = [variable for variable in script.variables if variable.default is None]
    return [
        origin(asked),
        "",
        f"Layout: {layout_words(asked.plan.plan)}.",
        batch_words(asked),
        predicted(asked),
        "",
        "Set before launch, the same on every server: " + "; ".join(f"{v.name} ({v.meaning})" for v in required) + ".",
        f"On each server: NODE_RANK. {host_order(asked)}",
        *(
            ["Further options of the framework may be given as arguments of this script; they come last and win."]
            * script.takes_options
        ),
        *(f"Note: {note}" for note in script.notes),
    ]


def _environment(environment: Mapping[str, str | None]) -> list[str]:
    return [f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def _variables(script: Script, servers: int) -> list[str]:
    """All that is missing is said at once, each with its meaning."""
    required = {v.name: v.meaning for v in script.variables if v.default is None}
    if servers > 1:
        required |= {"MASTER_ADDR": "address of server 0", "NODE_RANK": f"number of this server, 0 to {servers - 1}"}
    defaults = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"} if servers == 1 else {}
    defaults |= {v.name: v.default for v in script.variables if v.default is not None}
    defaults["MASTER_PORT"] = "29500"
    names = [*required, *defaults]
    return [
        "",
        "missing=0",
        "need() {",
        '  if [ -z "${!1:-}" ]; then echo "set $1: $2" >&2; missing=1; fi',
        "}",
        *(f"need {name} {shlex.quote(meaning)}" for name, meaning in required.items()),
        'if [ "${missing}" -ne 0 ]; then exit 2; fi',
        *(f'{name}="${{{name}:-{default}}}"' for name, default in defaults.items()),
        *(f"export {line}" for line in textwrap.wrap(" ".join(names), WIDTH)),
    ]


def _processes(slots: Sequence[int], read: str) -> list[str]:
    """Digits are checked first: bash would run a command hidden in an arithmetic expression.

    `read` is the part of the script that may use the counts.
    """
    servers, per_server, devices = len(slots), max(slots), sum(slots)
    short = {count: [place for place, each in enumerate(slots) if each == count] for count in sorted({*slots} - {per_server})}
    if short:
        some = ", ".join(f"{count} on server {' '.join(map(str, places))}" for count, places in short.items())
        cases = " ".join(f"{' | '.join(map(str, places))}) NPROC_PER_NODE={count} ;;" for count, places in short.items())
        return [
            f"export {TOTAL}={devices}  # {some}, {per_server} on every other",
            *([f"NNODES={servers}"] if "${NNODES}" in read else []),
            f'case "${{NODE_RANK}}" in {cases} *) NPROC_PER_NODE={per_server} ;; esac',
        ]
    return [
        f"{TOTAL}={devices}",
        f'NNODES="${{NNODES:-{servers}}}"',
        f'NPROC_PER_NODE="${{NPROC_PER_NODE:-{per_server}}}"',
        'case "${NNODES}:${NPROC_PER_NODE}" in',
        '  *[!0-9:]* | :* | *:) echo "NNODES and NPROC_PER_NODE must be whole numbers" >&2; exit 2 ;;',
        "esac",
        f'if [ "$((10#${{NNODES}} * 10#${{NPROC_PER_NODE}}))" -ne "${{{TOTAL}}}" ]; then',
        f'  echo "the layout needs {devices} processes; NNODES=${{NNODES}} times NPROC_PER_NODE=${{NPROC_PER_NODE}} differs" >&2',
        "  exit 2",
        "fi",
    ]


def _arrays(groups: Mapping[str, Sequence[tuple[str, ...]]]) -> list[str]:
    lines = []
    for name, settings in groups.items():
        lines += [f"{name}=(", *("  " + " ".join(_quote(word) for word in words) for words in settings), ")"]
    return lines


def _open(arguments: Sequence[tuple[str, str]]) -> list[str]:
    if not arguments:
        return []
    return ["OPEN_ARGS=(", *(f'  {option} "${{{name}}}"' for option, name in arguments), ")", ""]


def _quote(word: str) -> str:
    """A word as the shell reads it back; a bare comma in an array is what shellcheck takes for a slip."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and re.search("[,{}]", word) else quoted

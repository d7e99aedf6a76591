"""The launch script that the Megatron family shares: a header in words, variables, flags in arrays, and torchrun."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...search_spaces.layout import Layout
from ..ranks import devices_per_server
from ..result import Plan

WIDTH = 112


@dataclass(frozen=True)
class Variable:
    """What a plan does not decide and the person who launches must: its name, what it is, and a default if one is harmless."""

    name: str
    meaning: str
    default: str | None = None


@dataclass(frozen=True)
class Script:
    """All that a launch script is made of. `flags` are plain values; `open_flags` name variables, and are quoted as such."""

    framework: str
    home: str  # variable that holds the framework's folder
    environment: Mapping[str, str | None]  # None: must not be set
    variables: Sequence[Variable]
    flags: Mapping[str, Sequence[tuple[str, ...]]]
    open_flags: Sequence[tuple[str, str]]
    notes: Sequence[str]


def launch_script(plan: Plan, script: Script) -> str:
    """The script's text: it stops before anything runs if a variable is missing or the number of processes is not the plan's."""
    layout = plan.plan.layout
    per_server = devices_per_server(plan.problem.cluster, layout.devices)
    servers = layout.devices // per_server
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *_comment(_summary(plan, script)),
            "",
            "set -euo pipefail",
            "",
            *_environment(script.environment),
            *_variables(script, servers),
            "",
            *_processes(servers, per_server, layout.devices),
            "",
            *_arrays(script.flags),
            "OPEN_ARGS=(",
            *(f'  {option} "${{{name}}}"' for option, name in script.open_flags),
            ")",
            "",
            *_torchrun(script),
            "",
        ]
    )


def layout_words(layout: Layout) -> str:
    """The layout on one line, in the words of the project."""
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


def _summary(plan: Plan, script: Script) -> list[str]:
    problem, priced = plan.problem, plan.plan
    layout, memory, workload = priced.layout, priced.memory, problem.workload
    low, high = priced.step_time_interval_s
    required = [variable for variable in script.variables if variable.default is None]
    return [
        f"{problem.model.name} on {layout.devices} x {problem.cluster.accelerator.name} ({problem.cluster.name}), for "
        f"{script.framework}; written by paraplan {plan.paraplan}.",
        "",
        f"Layout: {layout_words(layout)}.",
        f"Batch: {workload.global_batch} sequences of {workload.seq_len} tokens, {workload.precision}.",
        f"Predicted: {priced.step_time_s:.3g} s per step ({low:.3g} to {high:.3g}), MFU {priced.mfu:.1%}, fullest stage "
        f"{memory.peak_gib:.1f} of {memory.usable_gib:.1f} GiB usable ({memory.verdict}).",
        "",
        "Set before launch, the same on every server: " + "; ".join(f"{v.name} ({v.meaning})" for v in required) + ".",
        f"On each server: NODE_RANK. {_host_order(plan)}",
        "Further options of the framework may be given as arguments of this script; they come last and win.",
        *(f"Note: {note}" for note in script.notes),
    ]


def _host_order(plan: Plan) -> str:
    cluster, devices = plan.problem.cluster, plan.plan.layout.devices
    per_server = devices_per_server(cluster, devices)
    if per_server == devices:
        return "There is one server, number 0."
    if cluster.allocated_sizes(devices)[[level.name for level in cluster.levels].index(cluster.supernode)] == per_server:
        return "Servers that share a switch should have numbers that follow each other."
    return f"Servers of one {cluster.supernode} must have numbers that follow each other: the layout was placed in that order."


def _comment(lines: Iterable[str]) -> list[str]:
    """Comment lines; names come from the user's files, so nothing but printable text on commented lines gets through."""
    comments = []
    for line in lines:
        clean = " ".join("".join(c if c.isprintable() else " " for c in line).split())
        comments += [f"# {piece}".rstrip() for piece in textwrap.wrap(clean, WIDTH) or [""]]
    return comments


def _environment(environment: Mapping[str, str | None]) -> list[str]:
    return [f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def _variables(script: Script, servers: int) -> list[str]:
    required = [variable.name for variable in script.variables if variable.default is None]
    if servers > 1:
        required += ["MASTER_ADDR", "NODE_RANK"]
    return [
        "",
        f"for name in {' '.join(required)}; do",
        '  if [ -z "${!name:-}" ]; then',
        '    echo "set ${name} first: the top of this script says what it is" >&2',
        "    exit 2",
        "  fi",
        "done",
        *(f'{v.name}="${{{v.name}:-{v.default}}}"' for v in script.variables if v.default is not None),
        *(['MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"', 'NODE_RANK="${NODE_RANK:-0}"'] if servers == 1 else []),
        'MASTER_PORT="${MASTER_PORT:-29500}"',
        f'{script.home}="${{{script.home}:-.}}"',
    ]


def _processes(servers: int, per_server: int, devices: int) -> list[str]:
    """Digits are checked first: bash would run a command hidden in an arithmetic expression."""
    return [
        f'NNODES="${{NNODES:-{servers}}}"',
        f'NPROC_PER_NODE="${{NPROC_PER_NODE:-{per_server}}}"',
        'case "${NNODES}:${NPROC_PER_NODE}" in',
        '  *[!0-9:]* | :* | *:) echo "NNODES and NPROC_PER_NODE must be whole numbers" >&2; exit 2 ;;',
        "esac",
        f'if [ "$((10#${{NNODES}} * 10#${{NPROC_PER_NODE}}))" -ne {devices} ]; then',
        f'  echo "the layout needs {devices} processes; NNODES=${{NNODES}} times NPROC_PER_NODE=${{NPROC_PER_NODE}} differs" >&2',
        "  exit 2",
        "fi",
    ]


def _arrays(groups: Mapping[str, Sequence[tuple[str, ...]]]) -> list[str]:
    lines = []
    for name, flags in groups.items():
        lines += [f"{name}=(", *("  " + " ".join(_quote(word) for word in flag) for flag in flags), ")"]
    return lines


def _quote(word: str) -> str:
    """A word as the shell reads it back; a bare comma in an array is what shellcheck takes for a slip."""
    return f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word)


def _torchrun(script: Script) -> list[str]:
    arrays = [*script.flags, "OPEN_ARGS"]
    return [
        "exec torchrun \\",
        '  --nnodes "${NNODES}" --nproc-per-node "${NPROC_PER_NODE}" --node-rank "${NODE_RANK}" \\',
        '  --master-addr "${MASTER_ADDR}" --master-port "${MASTER_PORT}" \\',
        f'  "${{{script.home}}}/pretrain_gpt.py" \\',
        *(f'  "${{{name}[@]}}" \\' for name in arrays),
        '  "$@"',
    ]

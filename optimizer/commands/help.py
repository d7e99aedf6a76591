"""What --help prints: options under headings, a line each, and an example; the list of commands likewise."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

OWN, OUTPUT = "Options", "Output"
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "Job": (
        *("cluster", "devices", "global_batch", "seq_len", "vocab_size", "precision", "expert_imbalance", "expert_loads"),
        *("stack", "framework", "framework_version", "profile"),
    ),
    "Limits": (
        *("fix", "forbid", "constraint", "inside", "schedule", "rank_order"),
        *("offload_to", "memory_margin", "reserve"),
    ),
    "Devices that are left, slow or shared": ("free", "lost", "slow", "checkpoint"),
    "Aim and search": ("objective", "device_hour_price", "engine", "time_limit", "top"),
    "More questions": (
        *("current", "sensitivity", "robust", "refine", "trials"),
        *("refine_precision", "hedge_imbalance", "hedge_by"),
    ),
    OUTPUT: ("out", "stages", "force", "as_json", "quiet", "help"),
}
"""Options of every command by heading; what is not named here is the command's own."""

HELD = "\ue000"
"""Stands, until it is printed, for a blank at which no line may break."""
JOB = "--cluster hgx-h100 --devices 64 --global-batch 256 --seq-len 4096"
EXAMPLES: Mapping[str, str] = {
    "plan": f"paraplan plan llama-3.1-70b {JOB} --out my-plan",
    "evaluate": f"paraplan evaluate llama-3.1-70b {JOB} --layout tp=4,pp=4",
    "check": "paraplan check pretrain.sh --cluster hgx-h100",
    "compare": (
        "paraplan compare llama-3.1-70b --clusters hgx-h100,gb200-nvl72 --devices 64 --global-batch 256 --seq-len 4096 "
        "--price hgx-h100=2.5 --price gb200-nvl72=5"
    ),
    "size": "paraplan size llama-3.1-70b --cluster hgx-h100 --tokens 10T --days 30 --global-batch 1024 --seq-len 4096",
    "compare-layouts": "paraplan compare-layouts my-plan/plan.json --layout tp=8,pp=4",
    "why": "paraplan why my-plan/plan.json --not tp=8,pp=4",
    "export": "paraplan export my-plan/plan.json --to megatron-bridge -o launch",
    "timeline": "paraplan timeline my-plan/plan.json -o step.svg",
    "ranks": "paraplan ranks my-plan/plan.json -o launch --hosts servers.txt",
    "topology": "paraplan topology my-plan/plan.json -o topology.html",
    "report": "paraplan report my-plan/plan.json -o plan.html",
    "experts": "paraplan experts loads.csv --plan my-plan/plan.json -o map.json",
    "sweep": "paraplan sweep sweep.yaml --store sweep.sqlite --csv table.csv",
    "validate": "paraplan validate runs.csv",
    "calibrate": "paraplan calibrate my-runs.csv --site -o site.yaml",
    "catalog": "paraplan catalog clusters hgx-h100",
    "ask": f"paraplan tune ask llama-3.1-70b {JOB} --study first -o runs",
    "tell": "paraplan tune tell --study first --trial 0 --step-time 12.3",
    "show": "paraplan tune show --study first",
    "list": "paraplan tune list --study first --abandon 2",
}


class Command(TyperCommand):
    """A command whose help names what must be given in the usage line, and the rest under headings."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the options that must be given, each on one line with its value, and that there are others."""
        start = f"Usage: {ctx.command_path} "
        given = [_placed(each) for each in self.params if not _is_option(each)]
        given += [f"{each.opts[0]}{HELD}{each.metavar}" for each in self.params if _is_option(each) and each.required]
        text = start + " ".join([*given, "[OPTIONS]"])
        lines = textwrap.wrap(text, formatter.width, subsequent_indent=" " * len(start), break_on_hyphens=False)
        formatter.write("\n".join(lines).replace(HELD, " ") + "\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments first, then the command's own options, then those that commands share."""
        parameters: list[Any] = self.get_params(ctx)
        arguments = [(_placed(each), each.help) for each in parameters if not _is_option(each) and each.help]
        by_name = {each.name: each for each in parameters if _is_option(each) and not each.hidden}
        shared = {name for names in OPTIONS.values() for name in names}
        headed = {OWN: tuple(name for name in by_name if name not in shared), **OPTIONS}
        groups = {heading: [_row(by_name[name]) for name in names if name in by_name] for heading, names in headed.items()}
        for heading, rows in {"Arguments": arguments, **groups}.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example, as it can be copied into a shell."""
        indent = " " * (formatter.current_indent + 2)
        lines = textwrap.wrap(EXAMPLES[self.name or ""], formatter.width - 8, break_long_words=False, break_on_hyphens=False)
        with formatter.section("Example"):
            formatter.write(indent + f" \\\n{indent}  ".join(lines) + "\n")


class Group(TyperGroup):
    """Commands under the headings of `listed`, a line each."""

    listed: Mapping[str, Mapping[str, str]] = {}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with its one line."""
        width = max(len(name) for lines in self.listed.values() for name in lines)
        for heading, lines in self.listed.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in lines.items()])


def group_of(listed: Mapping[str, Mapping[str, str]]) -> type[Group]:
    """A group that lists these: headings, names and one line each."""
    return type("Listed", (Group,), {"listed": listed})


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _placed(argument: Any) -> str:
    """How an argument stands in the usage line."""
    name = str(argument.metavar or argument.name)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _row(option: Any) -> tuple[str, str]:
    """«-o, --out DIR» and what it is for."""
    names = ", ".join(sorted((*option.opts, *option.secondary_opts), key=len))
    return (names if option.is_flag else f"{names} {option.metavar}"), option.help or ""

"""Options and arguments that several commands share, and their readers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from ...search_spaces.errors import InputError


def whole(text: str | int) -> int:
    """Reads a whole number; like typer's own reader, but its complaint names what was given."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", str(text)):
        raise typer.BadParameter(f"{text!r} is not a whole number of at most 9 digits")
    return int(text)


def number(text: str | float) -> float:
    """Reads a number likewise; none is endless or nothing."""
    try:
        value = float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a finite number")
    return value


def stated(option: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
    """The texts of an option that may be left out but not left empty, as an unset variable of a script leaves it."""
    if any(not text.strip(" ,") for text in values or ()):
        raise InputError(f"--{option.name}: is empty; give what the option is to say, or leave it out")
    return values


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Catalog name, Hugging Face config.json, YAML, or a size: moe:10T."),
]
Cluster = Annotated[str, typer.Option("--cluster", metavar="NAME|FILE", help="Cluster: catalog name or YAML.")]
Devices = Annotated[int, typer.Option("--devices", parser=whole, metavar="N", help="Devices (ranks) of the job.")]
GlobalBatch = Annotated[int, typer.Option("--global-batch", parser=whole, metavar="B", help="Sequences per step.")]
SeqLen = Annotated[int, typer.Option("--seq-len", parser=whole, metavar="S", help="Tokens per sequence.")]
StackName = Annotated[
    str | None, typer.Option("--stack", metavar="NAME|FILE", help="Training software; else the cluster's usual one.")
]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help="Of the GEMMs: bf16 (by default), fp16, fp8 or fp4.")]
Inside = Annotated[
    list[str] | None,
    typer.Option("--inside", metavar="LEVEL:DIMS", callback=stated, help="Keep groups inside a level: supernode:tp,ep; none."),
]
Fix = Annotated[list[str] | None, typer.Option("--fix", metavar="COLUMN=VALUE,…", callback=stated, help="Fix: tp=8,pp=4|8.")]
Forbid = Annotated[list[str] | None, typer.Option("--forbid", metavar="RULE", callback=stated, help='Forbid: "pp>16".')]
Constraint = Annotated[
    list[str] | None,
    typer.Option("--constraint", metavar="RULE", callback=stated, help='Demand: "tp*cp <= 64", "pp == 8 or vpp == 1".'),
]
Free = Annotated[str | None, typer.Option("--free", metavar="N,N,…", help="Free in each supernode: 384,384,380.")]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="LEVEL[:priority]", help="Price checkpoints that drain over this level."),
]
RankOrder = Annotated[
    str,
    typer.Option(
        "--rank-order",
        metavar="flags|all",
        help="Search the orders of flags, or all of the API's.",
    ),
]
Lost = Annotated[
    list[str] | None,
    typer.Option("--lost", metavar="N WHAT", help="Plan for the rest: '1 device', '2 servers'."),
]
Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="WHAT:F", help="Share of rate: device:0.9, level=server:0.8."),
]
Reserve = Annotated[
    float | None, typer.Option("--reserve", parser=number, metavar="GIB", help="GiB of every device to leave to others.")
]
OffloadTo = Annotated[
    str | None,
    typer.Option(
        "--offload-to",
        metavar="TIER",
        help="Offload activations too: to host, pool or peers.",
    ),
]
Framework = Annotated[str | None, typer.Option("--framework", metavar="NAME", help="Plan for what this framework can express.")]
FrameworkVersion = Annotated[str | None, typer.Option("--framework-version", metavar="V", help="Version of the framework.")]
Profile = Annotated[str | None, typer.Option("--profile", metavar="FILE", help="Fitted figures to use over the shipped ones.")]
MemoryMargin = Annotated[
    float | None,
    typer.Option("--memory-margin", parser=number, metavar="F", help="Share of memory to keep free; a plan keeps 0.15."),
]
VocabSize = Annotated[
    int | None, typer.Option("--vocab-size", parser=whole, metavar="N", help="Vocabulary, where it differs from the model's.")
]
ExpertImbalance = Annotated[
    float | None,
    typer.Option("--expert-imbalance", parser=number, metavar="F", help="Tokens of the fullest device over the mean: 1.1."),
]
Stages = Annotated[bool, typer.Option("--stages", help="Show every stage: layers, time, waiting, memory.")]
ExpertLoads = Annotated[
    Path | None,
    typer.Option("--expert-loads", metavar="FILE", help="Or measured: a table of layer, expert, load."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")]

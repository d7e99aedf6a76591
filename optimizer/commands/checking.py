"""check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...search_spaces.errors import InputError
from ..streams import Meter
from .answers import DONE, NO_LAYOUT, Answer
from .options import (
    AsJson,
    ExpertImbalance,
    Framework,
    FrameworkVersion,
    MemoryMargin,
    Profile,
    Quiet,
    StackName,
    VocabSize,
    number,
    whole,
)

if TYPE_CHECKING:
    from ..checking.checked import Checked
    from ..checking.group_check import CheckedGroups


def check_command(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="Launch script, overrides, YAML, TOML, JSON, or tp=8,pp=4.")
    ] = None,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, where CONFIG does not describe it.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="NAME|FILE", help="Cluster: catalog name or YAML.")] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", parser=whole, metavar="N", help="Devices (ranks) of the job, if it does not say.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", parser=whole, metavar="B", help="Sequences per step, likewise.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", parser=whole, metavar="S", help="Tokens per sequence, likewise.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Format of CONFIG; else seen by what it holds."),
    ] = None,
    variables: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A variable of the script, or argument 1, 2, ….")
    ] = None,
    groups: Annotated[Path | None, typer.Option("--groups", metavar="FILE", help="Judge rank lists (JSON) against CONFIG.")] = None,
    stack: StackName = None,
    precision: Annotated[str | None, typer.Option("--precision", metavar="NAME", help="Precision of the GEMMs, likewise.")] = None,
    framework: Framework = None,
    framework_version: FrameworkVersion = None,
    profile: Profile = None,
    memory_margin: MemoryMargin = None,
    vocab_size: VocabSize = None,
    expert_imbalance: ExpertImbalance = None,
    save_time: Annotated[
        float | None, typer.Option("--checkpoint-save-time", parser=number, metavar="S", help="Seconds that a checkpoint takes.")
    ] = None,
    best: Annotated[bool, typer.Option("--best/--no-best", help="Search the best layout too, or leave it out.")] = True,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", parser=number, metavar="S", help="Stop that search after S seconds.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Judge an existing job: is it legal, does it fit, and what would be faster?"""
    for flag, value in (("--time-limit", time_limit), ("--checkpoint-save-time", save_time)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{flag} {value:g}: must be a number of seconds greater than 0")
    if groups is not None:
        return _groups(groups, config, cluster, devices, form, as_json)
    if config is None:
        raise InputError("check: give the configuration of a job, or --groups FILE")
    from ..checking.checker import check

    with Meter(shown=not (quiet or as_json)) as meter:
        found = check(
            config,
            model,
            cluster,
            devices=devices,
            global_batch=global_batch,
            seq_len=seq_len,
            stack=stack,
            precision=precision,
            framework=framework,
            framework_version=framework_version,
            form=form,
            variables=_variables(variables or []),
            profile=profile,
            memory_margin=memory_margin,
            expert_imbalance=expert_imbalance,
            vocab_size=vocab_size,
            checkpoint_save_time_s=save_time,
            best=best,
            time_limit_s=time_limit,
            progress=meter,
        )
    status = DONE if found.ok else NO_LAYOUT
    if as_json:
        return Answer(lambda: print(found.model_dump_json(indent=2, exclude_none=True)), status=status)
    return Answer(lambda: _render(found, str(config)), status=status)


def _variables(given: list[str]) -> dict[str, str] | None:
    """NAME=VALUE pairs. InputError for anything else."""
    found = {}
    for pair in given:
        match = re.fullmatch(r"([A-Za-z_]\w*|\d{1,2})=(.*)", pair, re.DOTALL)
        if not match:
            raise InputError(f"--set {pair[:60]!r}: write NAME=VALUE, such as NNODES=16, or 2=8 for an argument")
        found[match.group(1)] = match.group(2)
    return found or None


def _groups(path: Path, config: str | None, cluster: str | None, devices: int | None, form: str | None, as_json: bool) -> Answer:
    from ...search_spaces.inputs import load_cluster
    from ..checking.group_check import read_and_check
    from ..readers import read_job

    sizes: dict[str, int] = {}
    if config is not None:
        job = read_job(config, form=form, devices=devices)
        sizes = {name: value for name, value in job.degrees.items() if name in ("tp", "cp", "pp", "dp", "ep", "etp")}
        devices = devices if devices is not None else job.devices
        each = sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1)
        if "dp" not in sizes and devices is not None and devices % each == 0:
            sizes["dp"] = devices // each
    found = read_and_check(path, sizes, devices, load_cluster(cluster) if cluster is not None else None)
    status = DONE if found.ok else NO_LAYOUT
    if as_json:
        return Answer(lambda: print(found.model_dump_json(indent=2, exclude_none=True)), status=status)
    return Answer(lambda: _render_groups(found, str(path)), status=status)


def _render(found: Checked, name: str) -> None:
    from rich.console import Console

    from ..reports.check import render_check

    render_check(found, name, Console())


def _render_groups(found: CheckedGroups, name: str) -> None:
    from rich.console import Console

    from ..reports.check import render_groups

    render_groups(found, name, Console())

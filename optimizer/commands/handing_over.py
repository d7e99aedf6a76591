"""export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...search_spaces.errors import InputError
from .answers import Answer
from .options import FrameworkVersion, Quiet

TARGETS = "megatron-lm, megatron-bridge, mindspeed-llm, mindformers, torchtitan, deepspeed, job or groups"
"""Named here for the help text, which is printed without loading the exporters."""


def export_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.json, or what evaluate --json printed.")],
    to: Annotated[str, typer.Option("--to", metavar="FRAMEWORK", help=f"{TARGETS}.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.")],
    framework_version: FrameworkVersion = None,
    refined: Annotated[bool, typer.Option("--refined", help="Write the layout that plan --refine found.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files in DIR that read otherwise.")] = False,
    quiet: Quiet = False,
) -> Answer:
    """Write a plan as a training framework's own files, a scheduler's job file or a file of process groups.

    Files are written all or none, and never over others of their names unless --force says so.
    """
    from ..exporters import render
    from ..writing import refuse_replacing, replaced, write_folder
    from .documents import read_chosen

    plan = read_chosen(plan_file)
    if refined and plan.refined is None:
        raise InputError(f"--refined: {plan_file} has no refined layout; write it with plan --refine, or leave the option out")
    chosen = plan.with_refined(plan.refined) if refined and plan.refined is not None else plan
    files = render(chosen, to, framework_version)
    if not force:
        refuse_replacing(out, files)
    notes = replaced(out, files)
    written = write_folder(out, files)
    return Answer(lambda: print(*written, sep="\n"), () if quiet else notes)

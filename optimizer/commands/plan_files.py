"""The files that plan --out and its kin write: plan.json, where ranks sit, and what a framework is started with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...search_spaces.errors import Infeasible, InputError
from .placing import seating_files

if TYPE_CHECKING:
    from ..result import Plan


def check_output(directory: Path, framework: str | None, framework_version: str | None, flag: str = "--framework") -> None:
    """Refuses before the search what could not be written after it; the framework was named by the flag."""
    from ..writing import refuse_closed

    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest}: a file of this name is in the way; name a folder to write to")
    refuse_closed(nearest)
    if framework is not None:
        from ...search_spaces.documents import did_you_mean
        from ..exporters import EXPORTERS

        if framework not in EXPORTERS:
            near = did_you_mean(framework, tuple(EXPORTERS)) or f"; there is {', '.join(EXPORTERS)}"
            raise InputError(f"{flag} {framework!r} is nothing that files can be written for{near}")
        from ..exporters.knobs import FRAMEWORKS, dialect

        if framework_version is not None and framework in FRAMEWORKS:
            dialect(framework, framework_version)  # raises, naming the versions that it knows


def cannot_say(plan: Plan, framework: str | None, framework_version: str | None) -> tuple[str, ...]:
    """What a framework that was asked for cannot express of the plan, in sentences: better told now than at its export."""
    if framework is None:
        return ()
    from ..exporters import EXPORTERS, render_if_possible

    return render_if_possible(plan, framework, framework_version)[1] if framework in EXPORTERS else ()


def write_plan(plan: Plan, directory: Path, framework: str | None, framework_version: str | None) -> tuple[str, ...]:
    """Writes plan.json and the framework's files, all or none; returns what was done, in sentences.

    Where the framework cannot express the plan, the plan is written alone; Infeasible then, if the framework was asked for.
    """
    from ..exporters import render, render_if_possible
    from ..writing import replaced, write_folder

    missed = None
    try:
        launch, notes = (
            (render(plan, framework, framework_version), ())
            if framework
            else render_if_possible(plan, plan.problem.stack.framework)
        )
    except Infeasible as error:
        launch, notes, missed = {}, (), error
    seating, blanks = seating_files(plan)
    files = {"plan.json": plan_json(plan), **seating, **launch}
    others = replaced(directory, files)
    write_folder(directory, files)
    if missed is not None:
        raise Infeasible(f"{', '.join(files)} are in {directory}, launch files are not: {missed.summary}", missed.reasons)
    return (f"wrote {', '.join(files)} to {directory}", *others, *blanks, *notes)


def plan_json(plan: Plan) -> str:
    """plan.json with its groups and ranks, a dimension on one line: thousands of ranks would otherwise take a line each."""
    import json

    from ..ranks import groups, placement

    layout = plan.plan.layout
    placed = placement(layout, plan.problem.cluster, sizes=plan.problem.allocated_sizes)
    columns = {name: column.tolist() for name, column in placed.items() if name != "rank"}
    rest = plan.model_copy(update={"groups": None, "ranks": None}).to_json().removesuffix("\n}")
    for key, value in (("groups", groups(layout)), ("ranks", columns)):
        lines = ",\n".join(f'    "{name}": {json.dumps(entries)}' for name, entries in value.items())
        rest += f',\n  "{key}": {{\n{lines}\n  }}'
    return f"{rest}\n}}\n"

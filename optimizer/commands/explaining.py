"""compare-layouts and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...search_spaces.errors import Infeasible, InputError
from ..streams import Meter
from .answers import Answer, at_least_one, refusal
from .options import AsJson, Profile, Quiet, number, whole

if TYPE_CHECKING:
    from ...search_spaces.layout import Layout
    from ..result import PricedLayout

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.json, or what evaluate --json printed.")]
TOLD_APART = 1e-6  # relative difference of step times from which a document was priced with other figures


def compare_layouts_command(
    plan_file: PlanFile,
    other_file: Annotated[Path | None, typer.Argument(metavar="[OTHER.json]", help="Another one of the same problem.")] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="NAME=VALUE,…", help="Or a layout, as evaluate takes it.")
    ] = None,
    alternative: Annotated[
        int | None, typer.Option("--alternative", parser=whole, metavar="N", help="Or the plan's N-th alternative, from 1.")
    ] = None,
    profile: Profile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Show the way from one layout to another: what each term and each decision adds to the step."""
    from ..layout_words import complete, parse_layout
    from ..waterfall import compare_layouts
    from .documents import one_problem, read_priced

    if sum(given is not None for given in (other_file, layout, alternative)) != 1:
        raise InputError("compare-layouts: give PLAN.json and one of OTHER.json, --layout or --alternative")
    problem, first = read_priced(plan_file)
    documents = [(plan_file, first)]
    if layout is not None:
        second, named = complete(problem, parse_layout(layout)), layout
    elif alternative is not None:
        at_least_one("--alternative", alternative)
        documents.append((plan_file, read_priced(plan_file, alternative)[1]))
        second, named = documents[-1][1].layout, f"alternative {alternative}"
    else:
        theirs, priced = read_priced(other_file or plan_file)
        one_problem(problem, theirs, (plan_file, other_file or plan_file))
        documents.append((other_file or plan_file, priced))
        second, named = priced.layout, str(other_file)
    try:
        found = compare_layouts(problem, first.layout, second, profile=profile)
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    again = (found.first, found.second)
    notes = tuple(note for (path, told), now in zip(documents, again, strict=False) for note in _repriced(path, told, now))
    if as_json:
        return _json(found)

    def show() -> None:
        from rich.console import Console

        from ..reports.waterfall import render_compared

        render_compared(found, (str(plan_file), named), Console())

    return Answer(show, () if quiet else notes)


def why_command(
    plan_file: PlanFile,
    other: Annotated[
        list[str] | None, typer.Option("--not", metavar="COLUMN=VALUE,…", help="What was expected instead: tp=16,pp=4.")
    ] = None,
    profile: Profile = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", parser=number, metavar="S", help="Stop each search after S seconds.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Say why a plan and not one with other values (--not), or what each of its choices buys."""
    from ...search_spaces.flags import parse_fix
    from ..why import ablation, why_not
    from .documents import read_priced

    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise InputError(f"--time-limit {time_limit:g}: must be a number of seconds greater than 0")
    fix = parse_fix(",".join(other), "not") if other else {}
    if other and not fix:
        raise InputError("not: names no column; write COLUMN=VALUE, such as tp=16,pp=4")
    problem, told = read_priced(plan_file)
    options: dict[str, Any] = {"profile": profile, "time_limit_s": time_limit}
    chosen: Layout = told.layout
    try:
        with Meter(shown=not (quiet or as_json)) as meter:
            found = (
                why_not(problem, chosen, fix, progress=meter, **options)
                if fix
                else ablation(problem, chosen, progress=meter, **options)
            )
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    notes = tuple(_repriced(plan_file, told, found.plan))
    if as_json:
        return _json(found)

    def show() -> None:
        from rich.console import Console

        from ..reports.why import render_ablations, render_why_not
        from ..why import WhyNot

        if isinstance(found, WhyNot):
            render_why_not(found, " ".join(f"{name}={'|'.join(values)}" for name, values in fix.items()), Console())
        else:
            render_ablations(found, Console())

    return Answer(show, () if quiet else notes)


def _repriced(path: Path, told: PricedLayout, now: PricedLayout) -> tuple[str, ...]:
    """A note where a document's step is not what the layout costs with the figures at hand."""
    if abs(now.step_time_s / told.step_time_s - 1.0) < TOLD_APART:
        return ()
    before, after = told.step_time_s, now.step_time_s
    return (f"{path}: says {before:.4g} s, priced now {after:.4g} s: by other figures (--profile) or another version",)


def _json(found: Any) -> Answer:
    text = found.model_dump_json(indent=2, exclude_none=True)
    return Answer(lambda: print(text))

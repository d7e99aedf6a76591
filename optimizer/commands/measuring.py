"""validate and calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...cost_models.run_files import NEEDED
from ...cost_models.runs import MEASURED, PEAK
from ..streams import Meter
from .answers import Answer
from .cataloguing import catalog_names
from .options import AsJson, Profile, Quiet

if TYPE_CHECKING:
    from ...cost_models.calibration import Calibrations
    from ...cost_models.validation import Validation

MOST_NAMED = 8  # columns of a table that are not read
RunsFile = Annotated[
    Path,
    typer.Argument(
        metavar="RUNS.csv",
        help=f"A CSV with {', '.join(NEEDED)} and one of {', '.join((*MEASURED, PEAK))}; results/validation/vocabulary.md has all "
        "that is read. models.json beside it gives shapes of models.",
    ),
]
Where = Annotated[str | None, typer.Option("--cluster", metavar="NAME|FILE", help="Where the runs were made, if no column says.")]


def validate_command(
    runs: RunsFile,
    cluster: Where = None,
    profile: Profile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Price measured runs and say how far off the predictions are."""
    from ...cost_models.validation import validate

    with Meter(shown=not (quiet or as_json)) as meter:
        found = validate(runs, profile, lambda share: meter("pricing runs", share), cluster)
    if as_json:
        return Answer(lambda: print(found.to_json()), () if quiet else _ignored(runs))
    return Answer(lambda: _render_validation(found), () if quiet else _ignored(runs))


def calibrate_command(
    runs: RunsFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PROFILE.yaml", help="File to write, for --profile.")],
    stack: Annotated[str | None, typer.Option("--stack", metavar="NAME", help="Training software to fit; by default all.")] = None,
    site: Annotated[bool, typer.Option("--site", help="The runs are your own: one to three are enough.")] = False,
    cluster: Where = None,
    profile: Profile = None,
    quiet: Quiet = False,
) -> Answer:
    """Fit a stack's figures to measured runs whose split is fit, and write them as a profile."""
    from ...cost_models.calibration import calibrate
    from ..reports.calibration import profile_yaml
    from ..writing import spare_inputs, write_file

    if stack is not None and stack not in catalog_names("stacks"):
        from ...search_spaces.inputs import catalog_entry

        catalog_entry("stacks", stack)  # raises, naming what is near
    spare_inputs({"--out": out}, (runs, profile, cluster, runs.parent / "models.json"))
    with Meter(shown=not quiet) as meter:
        found = calibrate(runs, stack, site, profile, lambda share: meter("fitting", share), cluster)
    write_file(out, profile_yaml(found))
    return Answer(lambda: _render_calibration(found), () if quiet else (*_ignored(runs), f"wrote {out}"))


def _ignored(runs: Path) -> tuple[str, ...]:
    """A note on columns that nothing reads: one of them may be misspelt."""
    from ...cost_models.run_files import OPTIONAL, columns_of
    from ...cost_models.run_models import FLAGS, SIZES, unread
    from ...search_spaces.documents import did_you_mean

    def named(column: str) -> str:
        near = did_you_mean(column, (*OPTIONAL, *SIZES, *FLAGS)).removeprefix("; ")
        return f"{column!r} ({near})" if near else repr(column)

    names = unread(columns_of(runs))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (f"{runs}: columns that are not read: {', '.join(map(named, names[:MOST_NAMED]))}{more}",) if names else ()


def _render_validation(found: Validation) -> None:
    from rich.console import Console

    from ..reports.validation import render

    render(found, Console())


def _render_calibration(found: Calibrations) -> None:
    from rich.console import Console

    from ..reports.calibration import render

    render(found, Console())

"""tune ask, tell, show and list."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ...search_spaces.errors import Infeasible, InputError
from ..streams import Meter
from .answers import Answer, refusal
from .options import (
    AsJson,
    Profile,
    Quiet,
    number,
    whole,
)
from .plan_files import check_output, plan_json
from .problem_options import SearchOptions, spread

if TYPE_CHECKING:
    from ...search_spaces.layout import Problem
    from ..result import Plan
    from ..tune import Standing
    from ..tuning_study import Proposal, TuningStudy

Value = TypeVar("Value")
StudyName = Annotated[str, typer.Option("--study", metavar="NAME", help="The study's name in its storage.")]
Storage = Annotated[str, typer.Option("--storage", metavar="FILE|URL", help="SQLite file, or a URL that Optuna takes; tune.db.")]
OptionalModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="As for plan; left out with its options: the study's own.")
]
Trial = Annotated[int, typer.Option("--trial", parser=whole, metavar="N", help="The proposal that was run.")]


@spread
def ask_command(
    study: StudyName,
    model: OptionalModel = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="NAME|FILE", help="Cluster: catalog name or YAML.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", parser=whole, metavar="N", help="Devices (ranks) of the job.")] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", parser=whole, metavar="B", help="Sequences per step.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", parser=whole, metavar="S", help="Tokens per sequence.")] = None,
    storage: Storage = "tune.db",
    *,
    asked: SearchOptions,
    profile: Profile = None,
    again: Annotated[
        int | None, typer.Option("--again", parser=whole, metavar="N", help="Hand out running proposal N once more.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write plan.json and launch files to DIR/trial-N.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Propose the layout to run next, and mark it as running."""
    if out is not None:
        check_output(out, asked.framework, asked.framework_version)
    problem: Problem | None = None
    if model is not None:
        problem = asked.sought(
            model,
            _given("--cluster", cluster),
            _given("--devices", devices),
            _given("--global-batch", global_batch),
            _given("--seq-len", seq_len),
            profile,
        )
    elif any((cluster, devices, global_batch, seq_len, profile)) or not asked.untouched:
        raise InputError("tune ask: options of a problem need MODEL before them; left out altogether, the study's own stands")
    from ..reports import tuning as report
    from ..tune import again as hand_out
    from ..tune import ask, subject_of
    from ..tuning_study import Subject, TuningStudy

    opened = TuningStudy(study, storage, create=problem is not None)
    subject = subject_of(opened) if problem is None else Subject(problem, None if profile is None else str(Path(profile).resolve()))
    try:
        with Meter(shown=not (quiet or as_json)) as meter:
            proposal, plan = ask(opened, subject, meter) if again is None else hand_out(opened, again)
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    notes = () if out is None else _write(plan, out / f"trial-{proposal.number}", asked.framework_version)
    if as_json:
        document = report.proposal_json(proposal, plan)
        return Answer(lambda: print(document))
    return Answer(lambda: _render_proposal(opened, proposal, plan), () if quiet else notes)


def tell_command(
    study: StudyName,
    trial: Trial,
    storage: Storage = "tune.db",
    step_time: Annotated[
        float | None, typer.Option("--step-time", parser=number, metavar="S", help="Seconds per step, after warm-up.")
    ] = None,
    oom: Annotated[bool, typer.Option("--oom", help="It ran out of device memory.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="It failed otherwise: nothing is learnt.")] = False,
    peak_gib: Annotated[
        float | None,
        typer.Option("--peak-gib", parser=number, metavar="G", help="Peak memory allocated on the fullest device."),
    ] = None,
    correct: Annotated[bool, typer.Option("--correct", help="In place of the result told before.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Take the result of a run back: its step time, or that it ran out of memory or failed."""
    if sum((step_time is not None, oom, failed)) != 1:
        raise InputError("tune tell: give one of --step-time S, --oom and --failed")
    for flag, value in (("--step-time", step_time), ("--peak-gib", peak_gib)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} {value:g}: must be greater than 0")
    if peak_gib is not None and step_time is None:
        raise InputError(f"--peak-gib {peak_gib:g}: the peak of a run that did not finish says nothing; leave it out")
    from ..reports import tuning as report
    from ..tune import learn, refuse_impossible, subject_of
    from ..tuning_study import TuningStudy

    opened = TuningStudy(study, storage)
    subject = subject_of(opened)
    refuse_impossible(subject, opened.proposal(trial), step_time, peak_gib)
    take = opened.correct if correct else opened.tell
    take(trial, step_time, peak_gib, "out of memory" if oom else "failed" if failed else "ran")
    found, lessons = opened.proposal(trial), learn(subject, opened.proposals())
    if as_json:
        document = report.told_json(subject, found, lessons)
        return Answer(lambda: print(document))
    lines = report.told(subject, found, lessons)
    return Answer(lambda: print(*lines, sep="\n"))


def show_command(study: StudyName, storage: Storage = "tune.db", as_json: AsJson = False, quiet: Quiet = False) -> Answer:
    """Show the best so far, all runs beside their predictions, what was learnt, and whether to stop."""
    from ..reports import tuning as report
    from ..tune import standing
    from ..tuning_study import TuningStudy

    with Meter(shown=not (quiet or as_json)) as meter:
        found = standing(TuningStudy(study, storage), meter)
    if as_json:
        document = report.standing_json(found)
        return Answer(lambda: print(document))
    return Answer(lambda: _render_standing(study, found))


def list_command(
    study: StudyName,
    storage: Storage = "tune.db",
    abandon: Annotated[
        list[str] | None,
        typer.Option("--abandon", metavar="N", help="Give up a running proposal; may come again."),
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """List the proposals, and give up those that nobody runs any more."""
    from ..reports import tuning as report
    from ..tuning_study import TuningStudy

    opened = TuningStudy(study, storage)
    for given in abandon or ():
        opened.abandon(whole(given))
    proposals = opened.proposals()
    if as_json:
        document = report.list_json(proposals)
        return Answer(lambda: print(document))
    notes = tuple(f"gave up trial {given}" for given in abandon or ())
    return Answer(lambda: _render_list(proposals), notes)


def _given(flag: str, value: Value | None) -> Value:
    if value is None:
        raise InputError(f"tune ask MODEL: {flag} is missing; MODEL needs --cluster, --devices, --global-batch and --seq-len")
    return value


def _write(plan: Plan, directory: Path, framework_version: str | None) -> tuple[str, ...]:
    """Writes plan.json and, where the framework has an exporter that can say the layout, its files; what was done, in sentences."""
    from ..exporters import render_if_possible
    from ..writing import write_folder

    launch, notes = render_if_possible(plan, plan.problem.stack.framework, framework_version)
    files = {"plan.json": plan_json(plan), **launch}
    write_folder(directory, files)
    return (f"wrote {', '.join(files)} to {directory}", *notes)


def _render_proposal(study: TuningStudy, proposal: Proposal, plan: Plan) -> None:
    from rich.console import Console

    from ..reports import tuning as report

    report.render_proposal(study.name, study.storage, proposal, plan, Console())


def _render_standing(name: str, found: Standing) -> None:
    from rich.console import Console

    from ..reports import tuning as report

    report.render_standing(name, found, Console())


def _render_list(proposals: list[Proposal]) -> None:
    from rich.console import Console

    from ..reports import tuning as report

    report.render_list(proposals, Console())

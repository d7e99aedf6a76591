"""plan and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...search_spaces.errors import Infeasible, InputError
from ..engines import ENGINES
from ..streams import Meter
from .answers import DONE, NO_LAYOUT, Answer, at_least_one, offered, refusal, sentences
from .options import (
    AsJson,
    Cluster,
    Devices,
    ExpertImbalance,
    Framework,
    FrameworkVersion,
    GlobalBatch,
    Inside,
    MemoryMargin,
    Model,
    Precision,
    Profile,
    Quiet,
    SeqLen,
    StackName,
    VocabSize,
    number,
    whole,
)

if TYPE_CHECKING:
    from ...search_spaces.layout import Layout, Problem
    from ..result import Plan, PricedLayout
    from ..study import Refine

ILLEGAL = "this layout is not legal"


def plan_command(
    model: Model,
    cluster: Cluster,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    stack: StackName = None,
    precision: Precision = "bf16",
    fix: Annotated[list[str] | None, typer.Option("--fix", metavar="COLUMN=VALUE,…", help="Fix: tp=8,pp=4|8.")] = None,
    forbid: Annotated[list[str] | None, typer.Option("--forbid", metavar="RULE", help='Forbid: "pp>16".')] = None,
    constraint: Annotated[
        list[str] | None, typer.Option("--constraint", metavar="RULE", help='Demand: "tp*cp <= 64", "pp == 8 or vpp == 1".')
    ] = None,
    inside: Inside = None,
    framework: Framework = None,
    framework_version: FrameworkVersion = None,
    profile: Profile = None,
    objective: Annotated[
        str,
        typer.Option("--objective", metavar="AIM,…", help="What is made least: step-time, memory, devices, cost, traffic."),
    ] = "step-time",
    device_hour_price: Annotated[
        float | None, typer.Option("--device-hour-price", parser=number, metavar="P", help="Price of a device for an hour.")
    ] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Plan again on slightly other hardware.")] = False,
    robust: Annotated[bool, typer.Option("--robust", help="Find the layout least hurt by figures in doubt.")] = False,
    refine: Annotated[
        bool, typer.Option("--refine", help="Let Optuna go on from the plan and its alternatives, beyond what is listed.")
    ] = False,
    trials: Annotated[int | None, typer.Option("--trials", parser=whole, metavar="N", help="Samples of --refine; 256.")] = None,
    hedge_imbalance: Annotated[
        str | None,
        typer.Option("--hedge-imbalance", metavar="F,…", help="Refine for these imbalances of the experts: 1.0,1.5,2.0."),
    ] = None,
    hedge_by: Annotated[
        str | None, typer.Option("--hedge-by", metavar="NAME", help="What is least over them: worst (as a rule) or mean.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help=f"Search: {', '.join(ENGINES)}.")] = "auto",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", parser=number, metavar="S", help="Stop the search after S seconds, not what is asked beyond."),
    ] = None,
    top: Annotated[
        int,
        typer.Option("--top", parser=whole, metavar="K", help="Layouts to report: the best of each frame (tp, cp, …)."),
    ] = 5,
    memory_margin: MemoryMargin = None,
    vocab_size: VocabSize = None,
    expert_imbalance: ExpertImbalance = None,
    current: Annotated[
        Path | None, typer.Option("--from", metavar="CURRENT.json", help="What runs now: a plan.json, or a file with tp=8,pp=4,….")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write plan.json and launch files here.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Find the layout with the shortest step that fits, and prove it."""
    offered("--engine", engine, tuple(ENGINES))
    at_least_one("--top", top)
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise InputError(f"--time-limit {time_limit:g}: must be a number of seconds greater than 0")
    if out is not None:
        check_output(out, framework, framework_version)
    from ...search_spaces.inputs import build_problem
    from ..aims import parse_aims
    from ..planner import plan

    parse_aims(objective, device_hour_price)  # raises, naming what is wrong
    asked = _refine(refine, trials, hedge_imbalance, hedge_by)
    problem = build_problem(
        model,
        cluster,
        devices,
        global_batch,
        seq_len,
        stack,
        precision,
        framework=framework,
        framework_version=framework_version,
        fix=",".join(fix or ()),
        forbid=forbid or (),
        constraint=constraint or (),
        inside=inside or (),
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        vocab_size=vocab_size,
    )
    running = None if current is None else _read_running(current, problem)
    try:
        with Meter(shown=not (quiet or as_json)) as meter:
            found = plan(
                problem,
                profile=profile,
                engine=engine,
                top=top,
                time_limit_s=time_limit,
                progress=meter,
                objective=objective,
                device_hour_price=device_hour_price,
                sensitivity=sensitivity,
                robust=robust,
                refine=asked,
            )
            if running is not None:
                found = _with_switch(found, running, profile, meter)
        notes = () if out is None else _write_plan(found, out, framework, framework_version)
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    if found.certificate.status != "optimal" and found.front_certificate is None:
        notes = (f"stopped early: the best layout so far, within {found.certificate.gap:.0%} of the best there can be", *notes)
    if as_json:
        return Answer(lambda: print(found.to_json()))
    return Answer(lambda: _render(found, current), () if quiet else notes)


def evaluate_command(
    model: Model,
    cluster: Cluster,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    layout: Annotated[
        str, typer.Option("--layout", metavar="NAME=VALUE,…", help="tp=8,pp=16,ep=8,micro_batch=1,vpp=2,recompute=selective.")
    ],
    stack: StackName = None,
    precision: Precision = "bf16",
    inside: Inside = None,
    framework: Framework = None,
    framework_version: FrameworkVersion = None,
    profile: Profile = None,
    memory_margin: MemoryMargin = None,
    vocab_size: VocabSize = None,
    expert_imbalance: ExpertImbalance = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Price one layout and say whether it is legal. What --layout leaves out follows: dp from the devices, the rest is 1 or off."""
    from ...cost_models.profile import load_profile
    from ...search_spaces.inputs import build_problem
    from ..layout_words import complete, parse_layout
    from ..planner import assumptions, evaluate

    given = parse_layout(layout)
    problem = build_problem(
        model,
        cluster,
        devices,
        global_batch,
        seq_len,
        stack,
        precision,
        framework=framework,
        framework_version=framework_version,
        fix=f"etp={given['etp']}" if "etp" in given else "",  # or else an assumption would fix it to 1
        inside=inside or (),
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        vocab_size=vocab_size,
    )
    try:
        priced, broken = evaluate(problem, complete(problem, given), profile=profile)
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    said = assumptions(problem, load_profile(problem.cluster.accelerator.name, profile), profile)
    problem = problem.model_copy(update={"assumptions": said})
    if broken and as_json:
        return refusal(ILLEGAL, broken, as_json, problem=problem.model_dump(mode="json"), plan=priced.model_dump(mode="json"))
    if as_json:
        return Answer(lambda: print(_priced_json(problem, priced)))
    return Answer(
        lambda: _render_layout(problem, priced), sentences(ILLEGAL, broken) if broken else (), NO_LAYOUT if broken else DONE
    )


def _refine(refine: bool, trials: int | None, imbalances: str | None, by: str | None) -> Refine | None:
    """What the study of --refine is asked; InputError for options of it without it, or without what they need."""
    given = {"--trials": trials, "--hedge-imbalance": imbalances, "--hedge-by": by}
    if not refine:
        alone = next((flag for flag, value in given.items() if value is not None), None)
        if alone is not None:
            raise InputError(f"{alone} {given[alone]}: is an option of --refine; give that too")
        return None
    if by is not None and imbalances is None:
        raise InputError(f"--hedge-by {by}: there is nothing to hedge; give --hedge-imbalance 1.0,1.5,2.0")
    from ..study import TRIALS, Refine

    offered("--hedge-by", by or "worst", ("worst", "mean"))
    at_least_one("--trials", TRIALS if trials is None else trials)
    hedge: Literal["worst", "mean"] = "mean" if by == "mean" else "worst"
    return Refine(TRIALS if trials is None else trials, _imbalances(imbalances or ""), hedge)


def _imbalances(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise InputError(f"--hedge-imbalance {text!r}: must be numbers with commas between them, as 1.0,1.5,2.0") from error


def check_output(directory: Path, framework: str | None, framework_version: str | None) -> None:
    """Refuses before the search what could not be written after it."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest}: a file of this name is in the way; name a folder to write to")
    if framework is not None:
        from ..exporters import EXPORTERS

        if framework not in EXPORTERS:
            raise InputError(f"--framework {framework!r} cannot be written to --out; there is {', '.join(EXPORTERS)}")
        from ..exporters.knobs import FRAMEWORKS, dialect

        if framework_version is not None and framework in FRAMEWORKS:
            dialect(framework, framework_version)  # raises, naming the versions that it knows


def _read_running(path: Path, problem: Problem) -> Layout:
    """The layout of the job that runs now, as it would go on with the problem's devices."""
    from ..switching import carried
    from .documents import read_current

    layout, devices = read_current(path, problem)
    return carried(problem, layout, devices)


def _with_switch(found: Plan, running: Layout, profile: str | None, meter: Meter) -> Plan:
    from ..switching import switch

    switched = switch(found.problem, found, running, profile=profile, progress=lambda share: meter("from what runs now", share))
    return found.model_copy(update={"switch": switched})


def _render(plan: Plan, current: Path | None) -> None:
    from rich.console import Console

    from ..reports.terminal import render

    render(plan, Console())
    if plan.switch is not None:
        from ..reports.switching import render_switch

        render_switch(plan, plan.switch, str(current), Console())


def _render_layout(problem: Problem, priced: PricedLayout) -> None:
    from rich.console import Console

    from ..reports.terminal import render_layout

    render_layout(problem, priced, Console())


def _priced_json(problem: Problem, priced: PricedLayout) -> str:
    """The keys of plan.json that one layout has."""
    from importlib.metadata import version

    from pydantic_core import to_json

    document = {"paraplan": version("paraplan"), "problem": problem, "assumptions": problem.assumptions, "plan": priced}
    return to_json(document, indent=2, exclude_none=True, inf_nan_mode="null").decode()


def _write_plan(plan: Plan, directory: Path, framework: str | None, framework_version: str | None) -> tuple[str, ...]:
    """Writes plan.json and the framework's files, all or none; returns what was done, in sentences."""
    from ..exporters import EXPORTERS, render
    from ..writing import write_folder

    target = framework or plan.problem.stack.framework
    files = {"plan.json": plan_json(plan)}
    if target in EXPORTERS:
        files |= render(plan, target, framework_version)
    write_folder(directory, files)
    wrote = f"wrote {', '.join(files)} to {directory}"
    return (wrote,) if target in EXPORTERS else (wrote, f"no launch files: {target} has no exporter")


def plan_json(plan: Plan) -> str:
    """plan.json with its groups, a dimension on one line: thousands of ranks would otherwise take a line each."""
    import json

    from ..ranks import groups

    lines = ",\n".join(f'    "{name}": {json.dumps(ranks)}' for name, ranks in groups(plan.plan.layout).items())
    rest = plan.model_copy(update={"groups": None}).to_json().removesuffix("\n}")
    return f'{rest},\n  "groups": {{\n{lines}\n  }}\n}}\n'

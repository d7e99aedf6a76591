"""plan and evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...search_spaces.errors import Infeasible
from ..interrupts import hold
from ..streams import Meter
from .answers import DONE, NO_LAYOUT, Answer, refusal
from .options import (
    AsJson,
    Checkpoint,
    Cluster,
    Devices,
    Free,
    GlobalBatch,
    Lost,
    Model,
    Profile,
    Quiet,
    SeqLen,
    Slow,
    Stages,
    whole,
)
from .plan_files import cannot_say, check_output, write_plan
from .plan_options import AimOptions, StudyOptions, imbalances_of
from .problem_options import ProblemOptions, SearchOptions, spread

if TYPE_CHECKING:
    from ...search_spaces.layout import Layout, Problem
    from ..deadline import Deadline
    from ..result import Plan, PricedLayout
    from ..supernode_result import CheckpointTraffic, StepAt

ILLEGAL = "this layout is not legal"


@spread
def plan_command(
    model: Model,
    cluster: Cluster,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    devices: Annotated[
        int | None, typer.Option("--devices", parser=whole, metavar="N", help="Devices (ranks) of the job; with --free their sum.")
    ] = None,
    *,
    asked: SearchOptions,
    aims: AimOptions,
    study: StudyOptions,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="NAME,…", help="Orders of passes to search: zb-v, …, or any."),
    ] = None,
    checkpoint: Checkpoint = None,
    free: Free = None,
    lost: Lost = None,
    slow: Slow = None,
    profile: Profile = None,
    current: Annotated[
        Path | None, typer.Option("--from", metavar="CURRENT.json", help="What runs now: a plan.json, or tp=8,… in a file.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write plan.json and launch files here.")] = None,
    stages: Stages = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Find the layout with the shortest step that fits, and prove it."""
    aims.check()
    if out is not None:
        check_output(out, asked.framework, asked.framework_version)
    from ..checkpoint_traffic import parse_way, with_checkpoints
    from ..deadline import Deadline
    from ..leftover import what_is_left
    from ..planner import plan, with_schedules
    from ..stage_work import with_stage_work

    refine = study.study
    machine, given, left = what_is_left(cluster, devices, free, lost or (), slow or ())
    problem = asked.sought(model, machine, given, global_batch, seq_len, profile)
    problem = problem if schedule is None else with_schedules(problem, schedule)
    running = None if current is None else _read_running(current, problem)
    way = None if checkpoint is None else parse_way(problem.cluster, checkpoint)
    deadline = Deadline.after(aims.time_limit)
    hold()
    try:
        with Meter(shown=not (quiet or as_json)) as meter:
            found = plan(
                problem,
                profile=profile,
                engine=aims.engine,
                top=aims.top,
                time_limit_s=aims.time_limit,
                progress=meter,
                objective=aims.objective,
                device_hour_price=aims.device_hour_price,
                sensitivity=aims.sensitivity,
                robust=aims.robust,
                refine=refine,
                inside_by_default=not asked.inside,
                left=left,
            )
            if running is not None:
                found = _with_switch(found, running, profile, meter, deadline)
            if way is not None:
                found = with_checkpoints(found, way, profile)
            if stages or as_json or out is not None:
                found = found.model_copy(update={"plan": with_stage_work(found.problem, found.plan, profile)})
        notes = (
            cannot_say(found, asked.framework, asked.framework_version)
            if out is None
            else write_plan(found, out, asked.framework, asked.framework_version)
        )
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    if as_json:
        return Answer(lambda: print(found.to_json()))
    return Answer(lambda: _render(found, current, stages), () if quiet else (*_unproved(found), *notes))


def _unproved(found: Plan) -> Iterator[str]:
    """That a plan is not proved, and how far off it may be."""
    waits = found.devices_left is not None and found.devices_left.slow is not None
    if found.certificate.status != "optimal" and found.front_certificate is None and not waits:
        gap = found.certificate.gap
        of_best = (
            "with no bound on how much faster others are" if gap is None else f"within {100 * gap:.0f} % of the best there can be"
        )
        yield f"not proved: the best layout found, {of_best}"


@spread
def evaluate_command(
    model: Model,
    cluster: Cluster,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="NAME=VALUE,…",
            help="tp=8,pp=16,recompute=full,…, or a plan.json.",
        ),
    ],
    *,
    asked: ProblemOptions,
    checkpoint: Checkpoint = None,
    profile: Profile = None,
    stages: Stages = False,
    at_imbalance: Annotated[
        str | None, typer.Option("--at-imbalance", metavar="F,…", help="Show the step at these imbalances too.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Price one layout and say whether it is legal.

    What --layout leaves out follows: dp from the devices; stages are cut as a search cuts them, fastest among those that fit (plan
    then moves the cuts of its best layouts); sharding is zero1 or the first that the stack offers; the rest is 1 or off.
    """
    from ..checkpoint_traffic import checkpoint_traffic, parse_way
    from ..evaluation import evaluate
    from ..layout_words import STAGES, complete, parse_layout
    from ..leftover import lies_as, over
    from ..stage_work import with_stage_work
    from .documents import lying_as, read_priced

    told = read_priced(Path(layout)) if layout.endswith(".json") else None
    whole_layout = None if told is None else told[1].layout
    machine, given_devices, per_supernode = lying_as(told, cluster, devices)
    given = parse_layout(layout) if whole_layout is None else {"etp": str(whole_layout.etp), "offload": whole_layout.offload}
    # etp, or else an assumption would fix it to 1; offload, since some rules are said only where it is asked for
    fix = ",".join(f"{name}={given[name]}" for name in ("etp", "offload") if name in given)
    problem = asked.problem(model, machine, given_devices, global_batch, seq_len, fix=fix, profile=profile)
    problem = problem.model_copy(update={"per_supernode": per_supernode})
    way = None if checkpoint is None else parse_way(problem.cluster, checkpoint)
    try:
        priced, broken = evaluate(problem, whole_layout or complete(problem, given), profile=profile)
    except Infeasible as error:
        return refusal(error.summary, error.reasons, as_json)
    priced = over(with_stage_work(problem, priced, profile) if stages or as_json else priced, devices)
    own_cuts = whole_layout is not None or STAGES in given
    said = (*_assumed(problem, priced, profile, own_cuts), *lies_as(problem, None if told is None else told[0]))
    problem = problem.model_copy(update={"assumptions": said})
    steps = () if at_imbalance is None else _steps(problem, priced.layout, at_imbalance, profile)
    draining = None if way is None else checkpoint_traffic(problem, priced, way, profile)
    if broken and as_json:
        return refusal(ILLEGAL, broken, as_json, problem=problem.model_dump(mode="json"), plan=priced.model_dump(mode="json"))
    if as_json:
        return Answer(lambda: print(_priced_json(problem, priced, steps, draining)))
    return Answer(
        lambda: _render_layout(problem, priced, broken, steps, draining, stages),
        (ILLEGAL,) if broken else (),
        NO_LAYOUT if broken else DONE,
    )


def _assumed(problem: Problem, priced: PricedLayout, profile: str | None, own_cuts: bool) -> Iterator[str]:
    """What the price of a layout takes for granted, also where its stages are cut, unless they were given."""
    from ...cost_models.profile import load_profile
    from ...cost_models.step import CostModel
    from ..assumptions import assumptions, cut_assumptions, exchange_assumptions, schedule_assumptions
    from ..evaluation import switched

    curves = load_profile(problem.cluster.accelerator.priced_as, profile)
    cost = CostModel(switched(problem, priced.layout), curves)
    yield from assumptions(problem, curves, profile)
    yield from schedule_assumptions(problem, priced.layout)
    yield from exchange_assumptions(cost, priced)
    yield from () if own_cuts else cut_assumptions(cost, priced)


def _steps(problem: Problem, layout: Layout, text: str, profile: str | None) -> tuple[StepAt, ...]:
    from ..imbalance_steps import steps_at

    return steps_at(problem, layout, dict.fromkeys(imbalances_of(text, "--at-imbalance"), ""), profile)


def _read_running(path: Path, problem: Problem) -> tuple[Layout, int | None]:
    """The layout of the job that runs now, as it would go on with the problem's devices, and how many lie in each supernode."""
    from ..switching import carried
    from .documents import read_current

    layout, devices, share = read_current(path, problem)
    return carried(problem, layout, devices), share


def _with_switch(found: Plan, running: tuple[Layout, int | None], profile: str | None, meter: Meter, deadline: Deadline) -> Plan:
    from ..switching import switch

    def heard(share: float) -> None:
        meter("from what runs now", share)

    layout, share = running
    switched = switch(found.problem, found, layout, share=share, profile=profile, progress=heard, deadline=deadline)
    said = f"from: stopped after {switched.priced:,} of the layouts that the checkpoint loads into"
    unanswered = (*found.unanswered, said) if switched.stopped else found.unanswered
    return found.model_copy(update={"switch": switched, "unanswered": unanswered})


def _render(plan: Plan, current: Path | None, stages: bool) -> None:
    from rich.console import Console

    from ..reports.terminal import render

    render(plan, Console())
    if stages:
        _render_stages(plan.plan)
    if plan.switch is not None:
        from ..reports.switching import render_switch

        render_switch(plan, plan.switch, str(current), Console())


def _render_layout(
    problem: Problem,
    priced: PricedLayout,
    broken: tuple[str, ...],
    steps: tuple[StepAt, ...],
    draining: CheckpointTraffic | None,
    stages: bool,
) -> None:
    from rich.console import Console

    from ..reports.imbalance import render_steps
    from ..reports.terminal import render_layout

    render_layout(problem, priced, Console(), broken)
    if draining is not None:
        from ..reports.drawing import print_sections
        from ..reports.supernode import checkpoint_section

        console = Console()
        print_sections(console, [checkpoint_section(draining)], console.width)
    if steps:
        render_steps(steps, Console())
    if stages:
        _render_stages(priced)


def _render_stages(priced: PricedLayout) -> None:
    from rich.console import Console

    from ..reports.stages import render_stages

    render_stages(priced.stages or (), priced.memory, Console())


def _priced_json(
    problem: Problem, priced: PricedLayout, steps: tuple[StepAt, ...], draining: CheckpointTraffic | None = None
) -> str:
    """The keys of plan.json that one layout has, and its steps at other imbalances of the experts and what draining checkpoints
    cost, where they were asked for.
    """
    from importlib.metadata import version

    from pydantic_core import to_json

    document = {"paraplan": version("paraplan"), "problem": problem, "assumptions": problem.assumptions, "plan": priced}
    if steps:
        document["at_imbalance"] = steps
    if draining is not None:
        document["checkpoint"] = draining
    return to_json(document, indent=2, exclude_none=True, inf_nan_mode="null").decode()

"""ranks, topology and experts: where things sit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...search_spaces.errors import InputError
from ..streams import Meter
from .answers import Answer, document, wanted
from .options import AsJson, Profile, Quiet, whole

if TYPE_CHECKING:
    from ...search_spaces.layout import Problem
    from ...search_spaces.model import ModelSpec
    from ..rank_files import Seats
    from ..result import Plan, PricedLayout

HOSTS, RANKS = "hostfile", "rank_table.json"
"""Files that ranks writes."""
Picture = Literal["svg", "html", "png"]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.json, or what evaluate --json printed.")]


def ranks_command(
    plan_file: PlanFile,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write to.")] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            "--hosts",
            metavar="FILE",
            help="Servers, one a line: ADDRESS SUPERNODE ….",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Write which server takes which ranks: a host file in the order of supernodes and, for Ascend, HCCL's rank table."""
    from ..rank_files import read_hosts, seats
    from ..writing import spare_inputs, write_folder
    from .documents import read_chosen, text_of

    wanted(out, as_json)
    for name in (HOSTS, RANKS):
        spare_inputs({"--out": None if out is None else out / name}, (plan_file, hosts))
    plan = read_chosen(plan_file)
    given = None if hosts is None else read_hosts(text_of(hosts, "a list of servers"), str(hosts))
    seated = seats(plan.plan.layout, plan.problem.cluster, given, plan.problem.allocated_sizes)
    written = () if out is None else write_folder(out, _files(plan, seated))
    if as_json:
        return Answer(document(seated.facts()))
    return Answer(lambda: print(*written, sep="\n"), () if quiet else _notes(plan, seated))


def topology_command(
    plan_file: PlanFile,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Picture to write: .svg, .html or .png.")] = None,
    alternative: Annotated[
        int, typer.Option("--alternative", parser=whole, metavar="N", help="The plan's N-th alternative, from 1.")
    ] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Draw a plan on its cluster: supernodes, servers, devices, groups by colour, the load of each level."""
    from ..topology import topology
    from ..writing import spare_inputs
    from .documents import read_free, read_priced

    wanted(out, as_json)
    spare_inputs({"--out": out}, (plan_file,))
    if alternative < 0:
        raise InputError(f"--alternative {alternative}: alternatives are counted from 1")
    kind = None if out is None else _kind(out)
    problem, priced = read_priced(plan_file, alternative)
    free = read_free(plan_file)
    if out is not None and kind is not None:
        _draw(problem, priced, kind, out, free)
    if as_json:
        return Answer(document(topology(problem, priced, free).facts()))
    return Answer(lambda: None, () if quiet else (f"wrote {out}",))


def _kind(out: Path) -> Picture:
    """The kind of picture that a name asks for; InputError for another."""
    kinds: dict[str, Picture] = {".svg": "svg", ".html": "html", ".png": "png"}
    kind = kinds.get(out.suffix.lower())
    if kind is None:
        raise InputError(f"--out {out}: name a file that ends in {', '.join(kinds)}")
    return kind


def _draw(problem: Problem, priced: PricedLayout, kind: Picture, out: Path, free: tuple[int, ...]) -> None:
    from ..reports.topology import draw
    from ..writing import write_file

    try:
        picture = draw(problem, priced, kind, free)
    except ImportError as error:
        raise InputError("a PNG needs matplotlib: pip install 'paraplan[plots]', or name a .svg or .html") from error
    write_file(out, picture)


def experts_command(
    loads_file: Annotated[Path, typer.Argument(metavar="LOADS.csv", help="Tokens by expert: layer,expert,load[,window].")],
    plan_file: Annotated[Path, typer.Option("--plan", metavar="PLAN.json", help="The plan whose EP ranks they go to.")],
    together: Annotated[
        Path | None,
        typer.Option("--co-activation", metavar="FILE", help="Tokens by pair: layer, expert, expert, count."),
    ] = None,
    redundant: Annotated[
        int, typer.Option("--redundant", parser=whole, metavar="N", help="Copies of heavy experts beyond one of each.")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the expert map (JSON) here.")] = None,
    profile: Profile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Place experts on EP ranks from measured loads, and say what that is worth."""
    from ..expert_loads import read_loads, read_pairs
    from ..expert_placement import expert_site, place_experts
    from ..writing import spare_inputs, write_file
    from .documents import read_priced, text_of

    spare_inputs({"--out": out}, (loads_file, plan_file, together, profile))
    if redundant < 0:
        raise InputError(f"--redundant {redundant}: must be at least 0")
    problem, priced = read_priced(plan_file)
    moe, _ = expert_site(problem, priced.layout, redundant)
    loads = read_loads(text_of(loads_file, "a table of loads"), str(loads_file), moe.experts)
    pairs = None if together is None else read_pairs(text_of(together, "a table of pairs"), str(together), moe.experts)
    with Meter(shown=not (quiet or as_json)) as meter:
        found = place_experts(problem, priced.layout, loads, pairs, redundant, profile, meter)
    if out is not None:
        write_file(out, found.map.model_dump_json() + "\n")
    notes = () if out is None or quiet else (f"wrote {out}",)
    if as_json:
        return Answer(lambda: print(found.model_dump_json(indent=2, exclude_none=True)))

    def show() -> None:
        from rich.console import Console

        from ..reports.experts import render_experts

        render_experts(found, Console())

    return Answer(show, notes)


def measured_imbalance(path: Path | None, model: str | ModelSpec) -> dict[int, float]:
    """Tokens of the fullest device over the mean by ep, from a file of loads for a model's experts; nothing without a file."""
    if path is None:
        return {}
    from ...search_spaces.inputs import load_model
    from ..expert_loads import imbalance_by_ep, read_loads
    from ..expert_placement import moe_of
    from .documents import text_of

    experts = moe_of(load_model(model)).experts
    return imbalance_by_ep(read_loads(text_of(path, "a table of loads"), str(path), experts))


def seating_files(plan: Plan) -> tuple[dict[str, str], tuple[str, ...]]:
    """Host file and rank table of a plan whose servers have no addresses yet, and what these leave open, in sentences."""
    from ..rank_files import seats

    seated = seats(plan.plan.layout, plan.problem.cluster, sizes=plan.problem.allocated_sizes)
    return _files(plan, seated), _notes(plan, seated)


def _files(plan: Plan, seated: Seats) -> dict[str, str]:
    from ..rank_files import host_file, rank_table

    table = rank_table(seated, plan.problem.cluster)
    return {HOSTS: host_file(seated), **({} if table is None else {RANKS: table})}


def _notes(plan: Plan, seated: Seats) -> tuple[str, ...]:
    """Fields of the rank table that only the machine knows, or why there is no rank table."""
    from ..rank_files import WHERE_FROM, missing, unwritten

    cluster = plan.problem.cluster
    blank = (f"{RANKS} leaves out {name}: {WHERE_FROM[name]}" for name in missing(seated, cluster))
    why = unwritten(cluster)
    return (*blank, *(() if why is None else (why,)))

"""Plans and layouts read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.documents import parse_document, to_record
from ...search_spaces.errors import InputError
from ...search_spaces.inputs import check_devices, load_cluster
from ...search_spaces.layout import Layout, Problem
from ..layout_words import complete, parse_layout
from ..result import Certificate, Plan, PricedLayout
from ..supernode_result import DevicesLeft

SAME_PROBLEM = ("model", "cluster", "devices", "per_supernode", "stack", "global_batch", "seq_len", "precision")
"""What two layouts must share for their prices to be of one problem."""


def read_plan(path: Path) -> Plan:
    """A plan.json; InputError for anything else, what evaluate --json printed among it: it has no certificate."""
    document = parse_document(text_of(path, "a plan.json"), str(path), as_json=True)
    if "plan" in document and "certificate" not in document:
        raise InputError(
            f"{path}: is one layout, as evaluate --json prints it, with nothing that a search found to report; name what "
            "plan --out or plan --json wrote"
        )
    plan = to_record(Plan, document, str(path))
    _of(plan.problem, plan.plan, path)
    return plan


def read_chosen(path: Path) -> Plan:
    """A plan.json, or the layout that evaluate --json printed as a plan that nothing was searched for. InputError where it breaks
    rules.
    """
    document = parse_document(text_of(path, "a plan.json"), str(path), as_json=True)
    if "plan" not in document or "certificate" in document:
        return read_plan(path)
    if "reasons" in document:
        raise InputError(f"{path}: its layout is not legal: {' '.join(map(str, document['reasons']))}")
    problem, priced = _priced(document, path, 0)
    if not priced.layout.stages:
        raise InputError(f"{path}: its layout has no stages; price it with evaluate --json, and name what that printed")
    unproved = Certificate(
        status="feasible",
        space="one layout, priced alone",
        legal=1,
        scored=1,
        cut_by_bound=0,
        cut_by_memory=0,
        seconds=0.0,
    )
    said = str(document.get("paraplan", ""))
    return Plan(paraplan=said, problem=problem, assumptions=problem.assumptions, plan=priced, certificate=unproved)


def read_priced(path: Path, alternative: int = 0) -> tuple[Problem, PricedLayout]:
    """The problem and the layout of a plan.json or of what evaluate --json printed; `alternative` counts from 1, 0 is the plan."""
    return _priced(parse_document(text_of(path, "a plan.json"), str(path), as_json=True), path, alternative)


def read_free(path: Path) -> tuple[int, ...]:
    """Devices free in each supernode of a plan.json, where it was made for what is left of a cluster (`DevicesLeft.told`)."""
    document = parse_document(text_of(path, "a plan.json"), str(path), as_json=True)
    left = document.get("devices_left")
    return () if left is None else to_record(DevicesLeft, left, f"{path}: devices_left").told


def read_current(path: Path, problem: Problem) -> tuple[Layout, int, int | None]:
    """The layout of a running job, how many devices it was planned for, and how many in each supernode (None: nobody says).

    The file is a plan.json, what evaluate --json printed, or NAME=VALUE pairs as --layout takes them, for the problem's devices.
    """
    text = text_of(path, "a plan.json or a list of NAME=VALUE")
    if text.lstrip().startswith("{"):
        theirs, priced = _priced(parse_document(text, str(path), as_json=True), path, 0)
        if _shape(theirs) != _shape(problem):
            raise InputError(f"{path}: is a layout of another model, {theirs.model.name}; name the model that the job trains")
        return priced.layout, theirs.devices, _share(theirs) if theirs.cluster == problem.cluster else None
    try:
        given = parse_layout(",".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if not given:
        raise InputError(f"{path}: is empty; write a layout such as tp=8,pp=4, or name a plan.json")
    return complete(problem, given), problem.devices, None


def one_problem(first: Problem, second: Problem, names: tuple[Path, Path]) -> None:
    """InputError where two documents are of different problems; limits and assumptions may differ."""
    ours, theirs = (_facts(problem) for problem in (first, second))
    for fact in SAME_PROBLEM:
        if ours[fact] != theirs[fact]:
            values = " and ".join(f"{_called(facts[fact])} in {name}" for facts, name in zip((ours, theirs), names, strict=True))
            raise InputError(f"{names[1]}: is of another problem, {fact} being {values}; compare two layouts of one")


def _priced(document: dict[str, Any], path: Path, alternative: int) -> tuple[Problem, PricedLayout]:
    for key in ("problem", "plan"):
        if key not in document:
            raise InputError(f"{path}: {key} is missing; name a plan.json or what evaluate --json printed")
    problem = to_record(Problem, document["problem"], f"{path}: problem")
    if not alternative:
        return problem, _of(problem, to_record(PricedLayout, document["plan"], f"{path}: plan"), path)
    others = document.get("alternatives", [])
    if not 0 < alternative <= len(others):
        raise InputError(
            f"--alternative {alternative}: {path} has {len(others)} alternative{'' if len(others) == 1 else 's'}, counted from 1"
        )
    found = to_record(PricedLayout, others[alternative - 1], f"{path}: alternatives[{alternative - 1}]")
    return problem, _of(problem, found, path)


def _of(problem: Problem, priced: PricedLayout, path: Path) -> PricedLayout:
    """The layout; InputError where its stages, edited since, are none of the model's."""
    layout, layers = priced.layout, problem.model.num_layers
    if layout.stages and len(layout.stages) != layout.pp:
        said = f"layout.stages lists {len(layout.stages)} stages and pp is {layout.pp}"
        raise InputError(f"{path}: {said}; name a plan as it was written")
    for stage in layout.stages:
        for first, last in (chunk.layers for chunk in stage.chunks if chunk.layers):
            if not 0 <= first <= last < layers:
                said = f"stage {stage.stage} holds layers {first} to {last}, and {problem.model.name} has 0 to {layers - 1}"
                raise InputError(f"{path}: {said}; name a plan as it was written")
    if layout.devices > problem.devices:
        said = f"tp·cp·pp·dp = {layout.devices} is more than the {problem.devices} devices of its problem"
        raise InputError(f"{path}: {said}; name a plan as it was written")
    return priced


def lying_as(told: tuple[Problem, PricedLayout] | None, cluster: str, devices: int) -> tuple[ClusterSpec, int, int | None]:
    """The cluster, how many of its devices a layout may use, and how many in each supernode: as its plan has them, where it fits.

    Devices beyond those that the plan was made for stay idle.
    """
    machine = load_cluster(cluster)
    check_devices(machine, devices)
    if told is None or machine != told[0].cluster or told[1].layout.devices > devices:
        return machine, devices, None
    problem = told[0]
    if devices >= problem.devices:
        return problem.cluster, problem.devices, problem.per_supernode
    usual = problem.cluster.allocated_sizes(devices) == problem.cluster.allocated_sizes(devices, _share(problem))
    return problem.cluster, devices, None if usual else _share(problem)


def _share(problem: Problem) -> int:
    """Devices in each supernode but a last with the rest."""
    return problem.allocated_sizes[problem.cluster.supernode_place]


def _facts(problem: Problem) -> dict[str, Any]:
    work = problem.workload
    own = {name: getattr(problem, name) for name in ("model", "cluster", "devices", "per_supernode", "stack")}
    return {**own, **{name: getattr(work, name) for name in ("global_batch", "seq_len", "precision")}}


def _shape(problem: Problem) -> Any:
    """What gives a checkpoint its tensors: the model, however it is called, and the vocabulary."""
    return problem.model.model_copy(update={"name": ""}), problem.workload.vocab_size


def _called(fact: Any) -> str:
    return str(getattr(fact, "name", fact))


def text_of(path: Path, wanted: str) -> str:
    """What a file holds; InputError where it is none, or no text."""
    if not path.is_file():
        raise InputError(f"{path}: is not {wanted}" if path.exists() else f"{path}: there is no such file")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; let yourself read it, or name another file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from error

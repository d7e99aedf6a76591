"""One point of a sweep planned, in a process of its own: a plan, or why there is none, is the result either way."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
import zlib
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.inputs import Kind, catalog_names
from ..commands.problem_options import SearchOptions
from .grid import PlanOptions, Point

if TYPE_CHECKING:
    from ...search_spaces.layout import Problem
    from ..known_best import KnownBest
    from ..leftover import Left

Status = Literal["optimal", "feasible", "infeasible", "bad input", "failed"]
PLANNED: tuple[Status, ...] = ("optimal", "feasible")


@dataclass(frozen=True)
class Outcome:
    """What came of a point: the certificate's status and the plan, or the reason that there is none.

    `digest` is of all that the answer follows from, `document` the compressed plan.json, `version` that of paraplan.
    """

    status: Status
    digest: str
    seconds: float
    reason: str = ""
    document: bytes | None = None
    version: str = version("paraplan")

    def plan_json(self) -> dict[str, Any]:
        """The plan.json; ValueError where there is none."""
        if self.document is None:
            raise ValueError(f"a point that is {self.status} has no plan")
        found: dict[str, Any] = json.loads(zlib.decompress(self.document))
        return found


def solve(point: Point, folder: Path) -> Outcome:
    """Plans a point; words that name files are looked up beside the sweep.yaml, in `folder`."""
    from ..checkpoint_traffic import parse_way, with_checkpoints
    from ..commands.plan_options import StudyOptions
    from ..planner import plan

    begun = time.monotonic()
    digest = ""
    try:
        options = PlanOptions.model_validate(point.options)
        problem, left = problem_of(point, options, folder)
        profile = _file(options.profile, folder)
        digest = _digest(problem, profile, point)
        found = plan(
            problem,
            profile=profile,
            engine=options.engine,
            top=options.top,
            time_limit_s=options.time_limit,
            objective=options.objective,
            device_hour_price=options.device_hour_price,
            sensitivity=options.sensitivity,
            robust=options.robust,
            refine=StudyOptions(**{each.name: getattr(options, each.name) for each in fields(StudyOptions)}).study,
            inside_by_default=not options.inside,
            left=left,
            bound_cuts=options.bound_cuts,
            known=_known_best(),
        )
        if options.checkpoint is not None:
            found = with_checkpoints(found, parse_way(problem.cluster, options.checkpoint), profile)
    except InputError as error:
        return Outcome("bad input", digest or _refusal(error), time.monotonic() - begun, str(error))
    except Infeasible as error:
        reasons = (error.summary, *(reason for reason in error.reasons if reason not in error.summary))
        return Outcome("infeasible", digest or _refusal(error), time.monotonic() - begun, " ".join(reasons))
    except Exception as error:
        return Outcome("failed", "", time.monotonic() - begun, _defect(error))
    document = zlib.compress(found.to_json(indent=None).encode())
    return Outcome(found.certificate.status, digest, time.monotonic() - begun, document=document)


def digest_of(point: Point, folder: Path) -> str:
    """What the answer to a point follows from today: the resolved problem with its curves, or what is wrong with it."""
    try:
        options = PlanOptions.model_validate(point.options)
        problem, _ = problem_of(point, options, folder)
        return _digest(problem, _file(options.profile, folder), point)
    except (InputError, Infeasible) as error:
        return _refusal(error)


def problem_of(point: Point, options: PlanOptions, folder: Path) -> tuple[Problem, Left | None]:
    """The problem as plan would build it from the same words, and what is left of the cluster, where options say so."""
    from ..leftover import what_is_left

    cluster = _named("clusters", point.cluster, folder)
    machine, devices, left = what_is_left(cluster, point.devices, options.free, options.lost, options.slow)
    loads = _file(options.expert_loads, folder)
    said = {each.name: getattr(options, each.name) for each in fields(SearchOptions) if each.name in PlanOptions.model_fields}
    files = {
        "stack": None if options.stack is None else _named("stacks", options.stack, folder),
        "expert_loads": None if loads is None else Path(loads),
    }
    model = _named("models", point.model, folder)
    asked = SearchOptions(**(said | files), precision=point.precision)
    problem = asked.sought(model, machine, devices, point.global_batch, point.seq_len, _file(options.profile, folder))
    return problem, left


@cache
def _known_best() -> KnownBest:
    """The best layouts of the points that this process planned before."""
    from ..known_best import KnownBest

    return KnownBest()


@cache
def _shipped_curves(accelerator: str) -> str:
    from ...cost_models.profile import load_profile

    return load_profile(accelerator).model_dump_json()


def _digest(problem: Problem, profile: str | None, point: Point) -> str:
    from ...cost_models.profile import load_profile

    name = problem.cluster.accelerator.priced_as
    curves = _shipped_curves(name) if profile is None else load_profile(name, profile).model_dump_json()
    parts = (problem.model_dump_json(), curves, json.dumps(dict(point.options), sort_keys=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _defect(error: Exception) -> str:
    """What broke, as the command says it: one point must not end a sweep."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"a defect of paraplan, please report it: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} ({error})"


def _refusal(error: Exception) -> str:
    return hashlib.sha256(f"refused: {error}".encode()).hexdigest()[:32]


def _named(kind: Kind, word: str, folder: Path) -> str:
    """A name of the catalog as it stands, or a file."""
    return word if word in catalog_names(kind) else _beside(word, folder)


def _beside(word: str, folder: Path) -> str:
    """A file of that name in the sweep's folder, or else the word as it stands: a path from here, or wrong."""
    try:
        return str(folder / word) if (folder / word).exists() else word
    except (OSError, ValueError):  # a word too long for a file, or with a null byte in it
        return word


def _file(word: str | None, folder: Path) -> str | None:
    return None if word is None else _beside(word, folder)

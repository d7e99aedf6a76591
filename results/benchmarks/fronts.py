"""How good an evolved front is where the exact one can be had, and what either costs.

`python results/benchmarks/regenerate.py fronts` writes the page. Both fronts start from the fastest layouts of the search, as a
plan's do. The share of the volume: of what the exact front dominates up to a tenth beyond its worst figures, each aim scaled from
its least to its greatest value there, what the evolved one dominates too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.aims import Aims, parse_aims
from paraplan.optimizer.evolution import evolved_front
from paraplan.optimizer.incumbent import Setting, searched
from paraplan.optimizer.pareto import Archive, Job, exact_front, jobs_of, price_layouts
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Floats, Layout, Problem

REFERENCE = 1.1
WAYS = ((5_000, 12), (20_000, 12), (5_000, 48), (20_000, 48))
"""Layouts that the first generation is chosen from, and generations."""


@dataclass(frozen=True)
class Case:
    """A problem with aims, its devices used whole."""

    name: str
    problem: Problem
    aims: Aims


@dataclass(frozen=True)
class Evolved:
    """An evolved front beside the exact one."""

    sampled: int
    generations: int
    volume: float  # share of the exact front's
    met: int  # points of the exact front that it has
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The exact front of a case, and evolved ones."""

    case: Case
    layouts: int
    points: int
    seconds: float
    evolved: tuple[Evolved, ...]


def cases() -> Iterator[Case]:
    """Problems of some 200,000 to 800,000 layouts."""
    for words, objective in (
        (("qwen3-30b-a3b", "hgx-h100", 16, 256, 4096), "step-time,memory"),
        (("llama-3.1-70b", "hgx-h100", 64, 256, 4096), "step-time,memory,traffic"),
        (("llama-3.1-70b", "hgx-h100", 256, 512, 8192), "step-time,memory"),
        (("mixtral-8x22b", "hgx-h100", 64, 256, 4096), "step-time,memory,traffic"),
    ):
        name = f"{words[0]}, {words[2]} × {words[1]}, {objective.replace(',', ' and ')}"
        yield Case(name, build_problem(*words), parse_aims(objective))


def measured(case: Case) -> Measured:
    """The exact front and the evolved ones of a case, seconds of the processor each."""
    profile = load_profile(case.problem.cluster.accelerator.priced_as)
    jobs = jobs_of(case.problem, profile, case.aims)
    fastest = [candidate.layout for candidate in searched(Setting(case.problem, profile), 5).best]
    begun = time.process_time()
    exact = exact_front(jobs, case.aims, _started(jobs, case.aims, fastest)).figures
    seconds = time.process_time() - begun
    evolved = tuple(_evolved(jobs, case.aims, fastest, exact, *way) for way in WAYS)
    return Measured(case, sum(job.space.listed for job in jobs), len(exact), seconds, evolved)


def _started(jobs: list[Job], aims: Aims, fastest: list[Layout]) -> Archive:
    archive = Archive(len(aims.names))
    price_layouts(archive, jobs, 0, aims, fastest)
    return archive


def _evolved(jobs: list[Job], aims: Aims, fastest: list[Layout], exact: Floats, sampled: int, generations: int) -> Evolved:
    begun = time.process_time()
    found = evolved_front(jobs, aims, _started(jobs, aims, fastest), generations, sample=sampled).figures
    seconds = time.process_time() - begun
    low, span = exact.min(axis=0), np.maximum(np.ptp(exact, axis=0), 1e-12)
    share = volume((found - low) / span) / volume((exact - low) / span)
    met = np.isclose(exact[:, None], found[None], rtol=1e-9).all(axis=2).any(axis=1)
    return Evolved(sampled, generations, share, int(met.sum()), seconds)


def volume(points: Floats) -> float:
    """What points (n, aims) dominate below the reference in every aim."""
    points = points[(points < REFERENCE).all(axis=1)]
    if not len(points):
        return 0.0
    if points.shape[1] == 1:
        return float(REFERENCE - points.min())
    points = points[np.argsort(points[:, -1], kind="stable")]
    heights = np.diff(points[:, -1], append=REFERENCE)
    return float(sum(height * volume(points[: place + 1, :-1]) for place, height in enumerate(heights.tolist()) if height > 0))


if __name__ == "__main__":
    for case in cases():
        print(measured(case))

"""Branch and bound held to listing everything, problem by problem: used by the tests and by results/benchmarks/brute_force.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from paraplan.cost_models.profile import Profile, load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.search import Search
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.layout import Problem

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside this file
from brute_force import Priced, chosen_by_frame, legal_layouts, price_everything, tiny_problem, with_memory

TOP = 3
LARGEST = 200  # layouts of a problem that are still quick to list
RELATIVE = 1e-9
SCARCE = 0.3  # share of the layouts that fit where memory is made scarce


@dataclass(frozen=True)
class Comparison:
    """One problem, how many layouts it has, and what differed (none if nothing did)."""

    problem: Problem
    legal: int
    differences: tuple[str, ...]


def tiny_problems(first_seed: int) -> Iterator[Problem]:
    """Tiny problems without end, from a seed on, that are neither empty nor slow to list."""
    seed = first_seed
    while True:
        problem = tiny_problem(seed)
        if 0 < Space(problem).listed <= LARGEST:
            yield problem
        seed += 1


def compared(problem: Problem) -> Comparison:
    """The problem searched and listed: on ample memory, and where few of its layouts fit."""
    layouts = legal_layouts(problem)
    counted = Space(problem).listed
    if counted != len(layouts):
        return Comparison(problem, counted, (f"{counted} layouts are counted, {len(layouts)} listed",))
    profile = _profile(problem.cluster.accelerator.name)
    everything = price_everything(problem, CostModel(problem, profile), layouts)
    least_bytes = np.full(len(layouts), np.inf)
    np.minimum.at(least_bytes, everything.owner, everything.peak_bytes)
    found: list[str] = []
    for usable in (1e12, float(np.quantile(least_bytes, SCARCE)) * 1.0005):
        limited = with_memory(problem, usable)
        model = CostModel(limited, profile)
        found += _differences(Search(Space(limited), model, top=TOP), chosen_by_frame(model, layouts, TOP), everything)
    return Comparison(problem, counted, tuple(found))


def _differences(search: Search, listed: list[float], everything: Priced) -> Iterator[str]:
    found = search.run()
    times = [candidate.step_time_s for candidate in found.best]
    if len(times) != len(listed) or not np.allclose(times, listed, rtol=RELATIVE, atol=0.0):
        yield f"the search finds {times}, listing finds {listed}"
    best = everything.best_by_frame(search.model.usable_bytes)
    if bool(best) != bool(times) or (best and times[0] < best[0] * (1.0 - RELATIVE)):
        yield f"the search finds {times[:1]}, the best of all partitions takes {best[:1]}"
    counts = found.counts
    if counts.legal != counts.scored + counts.cut_by_bound + counts.cut_by_memory:
        yield f"the counts do not add up: {counts}"
    if not found.complete or (times and found.lower_bound_s != times[0]):
        yield f"the proof is not complete: lower bound {found.lower_bound_s}, best {times[:1]}"


@cache
def _profile(accelerator: str) -> Profile:
    return load_profile(accelerator)

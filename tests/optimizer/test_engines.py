"""Every engine under one certificate: CP-SAT proves what branch and bound proves, Optuna finds it where it can and says its gap."""

from __future__ import annotations

import itertools
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.profile import Profile, load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.engines import ENGINES, Task, solve
from paraplan.optimizer.engines.benders import whole_ns
from paraplan.optimizer.engines.coordinates import Coordinates, Picks
from paraplan.optimizer.engines.refinement import refined
from paraplan.optimizer.found import Found
from paraplan.optimizer.planner import plan
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.layout import LayoutTable, Problem
from paraplan.search_spaces.rules import legal_mask, violations

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import random_problem, tiny_problem, with_memory

TOP = 3
SAMPLED = 96  # layouts within which the sampler has to find the optimum of a small problem


@cache
def curves(accelerator: str) -> Profile:
    return load_profile(accelerator)


def task(problem: Problem, top: int = TOP, time_limit_s: float | None = None) -> Task:
    return Task(Space(problem), CostModel(problem, curves(problem.cluster.accelerator.name)), top, time_limit_s)


def times(found: Found) -> list[float]:
    return [candidate.step_time_s for candidate in found.best]


def assert_adds_up(found: Found) -> None:
    counts = found.counts
    assert counts.legal == counts.scored + counts.cut_by_bound + counts.cut_by_memory
    assert min(counts.scored, counts.cut_by_bound, counts.cut_by_memory) >= 0


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_cp_sat_proves_the_optimum_of_branch_and_bound(first: int) -> None:
    proved = 0
    for seed in range(first, first + 8):
        problem = random_problem(seed) if seed % 4 == 0 else tiny_problem(seed)
        if seed % 3 == 0:
            problem = with_memory(problem, 1e9)
        bnb, benders = solve("bnb", task(problem)), solve("cp-sat", task(problem))
        assert times(benders) == pytest.approx(times(bnb), rel=1e-9, abs=0)
        assert benders.complete and benders.counts.legal == bnb.counts.legal == Space(problem).legal
        assert benders.lower_bound_s == (times(benders)[0] if benders.best else np.inf)
        assert_adds_up(benders)
        proved += bool(benders.best)
    assert proved > 4


@pytest.mark.parametrize("engine", ["cp-sat", "optuna"])
def test_an_engine_returns_legal_layouts_at_the_price_of_their_stages(engine: str) -> None:
    problem = tiny_problem(3)
    model = CostModel(problem)
    found = solve(engine, task(problem))
    assert found.best
    for candidate in found.best:
        price = model.price(LayoutTable.from_layouts([candidate.layout]))
        assert price.step_time_s[0] == pytest.approx(candidate.step_time_s, rel=1e-9, abs=0)
        assert violations(problem, candidate.layout, peak_bytes=float(price.peak_bytes[0])) == []


def test_cp_sat_goes_through_windows_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.engines.benders.WINDOW", 5)
    monkeypatch.setattr("paraplan.optimizer.engines.benders.FRAMES_PER_ROUND", 2)
    problem = random_problem(6)
    assert len(Space(problem).frames) > 20
    assert times(solve("cp-sat", task(problem))) == times(solve("bnb", task(problem)))


def test_bounds_in_nanoseconds_are_rounded_down() -> None:
    seconds = np.array([0.0, 1.9e-9, 2.5, 1e300])
    assert whole_ns(seconds).tolist() == [0, 1, 2_500_000_000, 10**18]


def test_optuna_finds_the_optimum_of_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the seeds whose problem has a few hundred layouts, more than the budget, all but one; and that one nearly."""
    monkeypatch.setattr("paraplan.optimizer.engines.sampling.BUDGET", SAMPLED)
    tried = [problem for problem in map(tiny_problem, range(24)) if 100 < Space(problem).listed < 700]
    off = []
    for problem in tried:
        optimum_s, sampled = times(solve("bnb", task(problem)))[0], solve("optuna", task(problem))
        assert sampled.counts.scored <= SAMPLED
        assert sampled.lower_bound_s <= optimum_s * (1.0 + 1e-12)
        assert_adds_up(sampled)
        off.append(times(sampled)[0] / optimum_s - 1.0)
    assert sum(gap < 1e-9 for gap in off) >= max(5, len(tried) - 1)
    assert max(off) < 0.01


def test_optuna_calls_optimal_only_what_it_priced_whole_or_the_bound_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.engines.sampling.BUDGET", 48)
    certificate = plan(random_problem(6), engine="optuna").certificate
    assert certificate.status == "feasible"
    assert certificate.gap > 0.0
    assert certificate.lower_bound_s <= plan(random_problem(6)).plan.step_time_s


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_engine_gives_the_same_answer_twice(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.engines.sampling.BUDGET", 96)
    problem = tiny_problem(9)
    first, second = solve(engine, task(problem)), solve(engine, task(problem))
    assert (first.best, first.counts) == (second.best, second.counts)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_engine_says_why_nothing_fits(engine: str) -> None:
    with pytest.raises(Infeasible, match="usable"):
        plan(with_memory(tiny_problem(3), 1e6), engine=engine)


@pytest.mark.parametrize("engine", ["cp-sat", "optuna"])
def test_an_interrupted_engine_returns_what_it_has(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.engines.benders.FRAMES_PER_ROUND", 2)
    problem = random_problem(6)

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    plain = task(problem, top=1)
    found = solve(engine, Task(plain.space, plain.model, 1, None, interrupt))
    assert found.best and not found.complete
    assert found.lower_bound_s <= times(solve("bnb", task(problem)))[0] <= times(found)[0]
    assert_adds_up(found)


@pytest.mark.parametrize("engine", ["cp-sat", "optuna"])
def test_a_time_limit_leaves_an_honest_gap(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(6)
    best_s = times(solve("bnb", task(problem)))[0]
    monkeypatch.setattr("paraplan.optimizer.engines.benders.FRAMES_PER_ROUND", 2)
    for looks in range(2, 60):
        clock = itertools.count()  # a second passes whenever somebody looks
        with monkeypatch.context() as patched:
            patched.setattr("time.monotonic", lambda clock=clock: float(next(clock)))
            found = solve(engine, task(problem, time_limit_s=float(looks)))
        assert_adds_up(found)
        if found.best:
            break
    assert not found.complete
    assert found.lower_bound_s <= best_s <= times(found)[0]


def test_a_sampler_that_finds_nothing_points_to_the_engine_that_looks_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.engines.sampling.refined", _nothing_fits)
    with pytest.raises(InputError, match="engine auto"):
        monkeypatch.setattr("paraplan.optimizer.engines.sampling.BUDGET", 8)
        plan(random_problem(6), engine="optuna")


def _nothing_fits(model: CostModel, rows: object) -> object:
    found = refined(model, rows)  # type: ignore[arg-type]
    found.step_time_s[:] = np.inf
    return found


def test_points_land_on_legal_layouts_and_those_of_a_frame_in_it() -> None:
    problem = random_problem(6)
    space = Space(problem)
    frames = np.flatnonzero(space.layouts_per_frame > 0)
    coordinates = Coordinates(space, frames)
    points = np.random.default_rng(0).uniform(coordinates.low, coordinates.high, (64, len(coordinates.low)))
    keys = coordinates.nearest(points)
    assert len(set(keys)) == len(keys) == len(points)
    picks = Picks.of(keys)
    assert legal_mask(problem, space.combined(picks.frames, picks.pipeline, picks.sharing)).all()
    assert set(coordinates.nearest(points, set(keys))).isdisjoint(keys)
    assert [key[0] for key in coordinates.nearest(coordinates.plainest(frames))] == frames.tolist()


def test_points_beyond_the_last_layout_come_back_with_nothing() -> None:
    problem = tiny_problem(5)
    space = Space(problem)
    coordinates = Coordinates(space, np.flatnonzero(space.layouts_per_frame > 0))
    points = np.tile(coordinates.low, (space.listed + 3, 1))
    assert len(coordinates.nearest(points)) == space.listed

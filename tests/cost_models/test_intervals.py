"""Intervals: residuals with a group left out against the fit made without it, how pairs are held together, and the coverage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.intervals import Residuals, Stranger, held, independent, intervals_of, left_out
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.validation import validate

SAMPLE = Path(__file__).parents[1] / "measured" / "runs_sample.csv"


def test_leaving_a_group_out_is_fitting_without_it() -> None:
    """For a linear model the formula is exact: against ridge regressions made without each group."""
    rng = np.random.default_rng(0)
    jacobian, target, weights, prior = rng.normal(size=(12, 3)), rng.normal(size=12), rng.uniform(0.5, 2.0, 12), np.eye(3) * 0.7
    groups = list("aaabbbbccddd")

    def solved(rows: np.ndarray) -> np.ndarray:
        part = jacobian[rows]
        return np.linalg.solve((part.T * weights[rows]) @ part + prior, -(part.T * weights[rows]) @ target[rows])

    theta = solved(np.arange(12))
    curvature = (jacobian.T * weights) @ jacobian + prior
    found = left_out(target + jacobian @ theta, jacobian, weights, curvature, groups)
    for group in "abcd":
        rows = np.array([each == group for each in groups])
        assert found[rows] == pytest.approx((target + jacobian @ solved(np.flatnonzero(~rows)))[rows])


def residuals(stack: str, values: list[float], models: list[int] | None = None, spread: float = 0.0) -> Residuals:
    models = list(range(len(values))) if models is None else models
    return Residuals(stack, "h100", tuple(values), (False,) * len(values), (0,) * len(values), tuple(models), spread)


def test_many_models_speak_for_themselves_and_few_are_held_to_the_others() -> None:
    sizes = np.linspace(0.001, 0.05, 400).tolist()
    found = intervals_of([residuals("many", sizes), residuals("few", [0.001]), residuals("wild", [0.5] * 40)], []).pairs
    many, few = found["many"]["h100"]["dense"], found["few"]["h100"]["dense"]
    assert many.high == pytest.approx(np.exp(0.04), abs=0.01)
    assert few.high > 1.2 > many.high
    assert "1 run of 1 model" in few.source and many.low == pytest.approx(1 / many.high, rel=1e-3)


def test_runs_of_one_model_count_for_few() -> None:
    assert independent([1, 2, 3, 4]) == 4.0
    assert 1.0 < independent([1] * 40) < 2.0
    assert independent([1] * 20 + [2] * 20) == pytest.approx(2 * independent([1] * 20), rel=0.1)
    given = (residuals("own", [0.01] * 40, models) for models in (list(range(40)), [0, 1] * 20, [0] * 40))
    narrow, wide, widest = (intervals_of([each], [], {"dense": 0.2}).pairs["own"]["h100"]["dense"].high for each in given)
    assert narrow < 1.05 < wide < widest == pytest.approx(np.exp(0.2), abs=1e-3)


def test_what_few_runs_leave_unknown_widens_an_interval() -> None:
    sizes = [
        intervals_of([residuals("own", [0.05, 0.05], spread=spread)], [], {"dense": 0.1}).pairs["own"]["h100"]["dense"].high
        for spread in (0.3, 0.1, 0.0)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.2 and 1.05 < sizes[2] < 1.12


def test_intervals_hold_models_to_come() -> None:
    """Sixty stacks, each with five models of ten runs that share half of what they are off by: 80 % of a sixth model's runs."""
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(60):
        off = 0.1 * (rng.normal(size=(6, 1)) + rng.normal(size=(6, 10)))
        size = held(np.abs(off[:5]).ravel(), independent(np.repeat(range(5), 10).tolist()), others=0.18)
        inside.append(np.mean(np.abs(off[5]) <= size))
    assert 0.75 < np.mean(inside) < 0.92


def test_ranking_noise_is_what_layouts_of_one_problem_differ_by() -> None:
    """A bias that is common to a problem's layouts does not count: 30 % off alike, 2 % apart."""
    assert intervals_of([residuals("one", [0.30, 0.32])], []).ranking["dense"] == pytest.approx(0.0202, abs=1e-4)


def test_families_left_out_tell_of_one_to_come_however_many_runs_each_has() -> None:
    """Of twelve, off by 1 to 12 %, the tenth holds 80 %, though the first has most runs by far."""
    sizes = [np.full(1000 if size == 1 else 10, size / 100.0) for size in range(1, 13)]
    found = intervals_of([], [Stranger(each, np.zeros(len(each), dtype=bool)) for each in sizes]).unmeasured
    assert found["dense"].high == pytest.approx(np.exp(0.10), abs=1e-3)
    assert "12 families" in found["dense"].source and "moe" not in found


def test_what_nobody_measured_is_wider_and_says_so() -> None:
    profile = load_profile("h100-80gb-sxm")
    measured = profile.interval("nemo-24", "h100-80gb-sxm", moe=False)
    unknown = profile.interval("nobody", "h100-80gb-sxm", moe=False)
    assert unknown.low < measured.low and unknown.high > measured.high
    assert "nobody was not measured on h100-80gb-sxm" in unknown.source


def test_intervals_hold_about_as_many_of_the_samples_test_rows_as_they_say() -> None:
    inside, rows = next((i, n) for name, split, i, n, _ in validate(SAMPLE).coverage() if (name, split) == ("all rows", "test"))
    assert rows >= 10
    assert 0.6 <= inside / rows <= 1.0

"""The posterior of few runs on synthetic stacks whose truth is known: closed forms, oddities, floors, learning and coverage."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from paraplan.cost_models.posterior import Noise, Posterior, Prior, posterior

Array = NDArray[np.float64]
NOISE = Noise(run=0.05, job=0.07, freedom=3.0)
NORMAL = Noise(run=0.05, job=0.07, freedom=1e9)
WIDE = Prior(np.zeros(2), np.array([0.3, 0.8]), np.full(2, -4.0), np.full(2, 4.0))
COUNTS = (0, 1, 3, 10)


def learnt(residual: object, prior: Prior, noise: Noise, weights: Array, jobs: list[int]) -> Posterior:
    starts = np.array([prior.centre, prior.centre + prior.spread * np.array([0.0, 1.0])])
    return posterior(residual, prior, noise, weights, jobs, starts)  # type: ignore[arg-type]


def step_s(points: Array, kernels_s: Array, layers: Array) -> Array:
    """Step times (points, n) of a stack with an efficiency and a floor of 1 ms per layer."""
    efficiency, floor = np.exp(points).T[:, :, None]
    return np.maximum(kernels_s / efficiency, 1e-3 * layers * floor)


def test_a_linear_model_has_its_closed_form() -> None:
    """Against generalised least squares with a residual part that runs of one job share, one selection beside another."""
    rng = np.random.default_rng(0)
    slopes, measured, jobs = rng.normal(size=(7, 2)), rng.normal(0.0, 0.1, 7), [0, 0, 0, 1, 1, 2, 3]
    weights = np.array([[1.0] * 7, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.5]])
    found = learnt(lambda points: points @ slopes.T - measured, WIDE, NORMAL, weights, jobs)
    for place, row in enumerate(weights):
        seen = np.flatnonzero(row)
        alike = np.equal.outer(np.array(jobs)[seen], np.array(jobs)[seen])
        precision = np.linalg.inv(np.diag(NORMAL.run**2 / row[seen]) + NORMAL.job**2 * alike)
        curvature = slopes[seen].T @ precision @ slopes[seen] + np.diag(1.0 / WIDE.spread**2)
        theta = np.linalg.solve(curvature, slopes[seen].T @ precision @ measured[seen])
        assert found.theta[place] == pytest.approx(theta, abs=1e-4)
        assert found.covariance[place] == pytest.approx(np.linalg.inv(curvature), rel=1e-4)


def test_a_run_in_doubt_is_weighed_by_its_own_spread() -> None:
    """Two runs of two jobs and one figure that both follow: θ = Σ y/v ÷ (Σ 1/v + 1/σ²), v being a run's and its job's variance."""
    noise, measured = Noise(np.array([0.05, 0.2]), 0.07, 1e9), np.array([0.1, -0.3])
    prior = Prior(np.zeros(1), np.array([0.2]), np.array([-4.0]), np.array([4.0]))
    found = posterior(lambda p: p @ np.ones((1, 2)) - measured, prior, noise, np.ones((1, 2)), [0, 1], np.zeros((1, 1)))
    variance = np.array([0.05**2, 0.2**2]) + 0.07**2
    assert found.theta[0, 0] == pytest.approx((measured / variance).sum() / ((1.0 / variance).sum() + 1.0 / 0.2**2), abs=1e-4)


def test_runs_of_one_job_say_less_than_runs_of_several() -> None:
    slopes, measured, weights = np.ones((6, 1)), np.full(6, 0.2), np.ones((1, 6))
    prior = Prior(np.zeros(1), np.array([0.3]), np.array([-4.0]), np.array([4.0]))
    one, several = (
        posterior(lambda p: p @ slopes.T - measured, prior, NOISE, weights, jobs, np.zeros((1, 1)))
        for jobs in ([0] * 6, list(range(6)))
    )
    assert 0.1 < one.theta[0, 0] < several.theta[0, 0] < 0.2
    assert one.spread[0, 0] > 1.5 * several.spread[0, 0]


def test_an_oddity_among_few_runs_is_no_lesson() -> None:
    kernels_s, layers = np.full(4, 1.0), np.full(4, 20.0)
    truth = np.array([[-0.2, 0.0]])
    measured = step_s(truth, kernels_s, layers)[0] * np.array([1.0, 1.0, 20.0, 1.0])
    found = learnt(lambda p: np.log(step_s(p, kernels_s, layers) / measured), WIDE, NOISE, np.ones((1, 4)), [0, 1, 2, 3])
    assert found.theta[0, 0] == pytest.approx(-0.2, abs=0.03)


@pytest.mark.parametrize(("bound", "moved", "kept"), [("host", 1, 0), ("kernels", 0, 1)])
def test_a_run_moves_what_it_is_bound_by(bound: str, moved: int, kept: int) -> None:
    """One run with small kernels, 1.5 times slower than expected, speaks of its host; one with large kernels of them."""
    kernels_s, layers = np.array([0.002 if bound == "host" else 2.0]), np.array([30.0])
    measured = 1.5 * step_s(np.zeros((1, 2)), kernels_s, layers)[0]
    found = learnt(lambda p: np.log(step_s(p, kernels_s, layers) / measured), WIDE, NOISE, np.ones((1, 1)), [0])
    assert abs(found.theta[0, moved]) > 0.2
    assert abs(found.theta[0, kept]) < 1e-6
    assert found.covariance[0, kept, kept] == pytest.approx(WIDE.spread[kept] ** 2)


def test_a_floor_below_all_kernels_is_found_where_runs_need_it() -> None:
    """At the prior's centre no run lies on the floor, so that only the second start sees it."""
    kernels_s, layers = np.array([0.031, 0.06, 0.12]), np.full(3, 30.0)
    measured = step_s(np.array([[0.0, 1.0]]), kernels_s, layers)[0]
    found = learnt(lambda p: np.log(step_s(p, kernels_s, layers) / measured), WIDE, NOISE, np.ones((1, 3)), [0, 1, 2])
    assert found.theta[0] == pytest.approx([0.0, 1.0], abs=0.15)


@pytest.fixture(scope="module")
def studied() -> tuple[Array, Array]:
    """Errors of rows to come by COUNTS, (stacks, counts, rows), and how many spreads wide they are: 60 stacks from the prior."""
    rng = np.random.default_rng(1)
    errors, sizes = [], []
    for _ in range(60):
        truth = WIDE.spread * rng.normal(size=2)
        kernels_s, layers, jobs = np.exp(rng.normal(-3.5, 1.0, 40)), rng.integers(8, 60, 40).astype(float), np.repeat(range(20), 2)
        odd = NOISE.job * rng.normal(size=20)[jobs] + NOISE.run * rng.standard_t(NOISE.freedom, 40)
        measured = step_s(truth[None], kernels_s, layers)[0] * np.exp(odd)
        weights = np.array([[1.0] * count + [0.0] * (40 - count) for count in COUNTS])

        def residual(points: Array, kernels_s: Array = kernels_s, layers: Array = layers, measured: Array = measured) -> Array:
            return np.log(step_s(points, kernels_s, layers) / measured)

        found = learnt(residual, WIDE, NOISE, weights, jobs.tolist())
        noise = np.hypot(NOISE.job, NOISE.run * 3.0**0.5)
        errors.append(found.residuals[:, 20:])
        sizes.append(np.abs(found.residuals[:, 20:]) / np.hypot(found.spread[:, 20:], noise))
    return np.abs(errors), np.array(sizes)


def test_more_runs_never_teach_worse(studied: tuple[Array, Array]) -> None:
    medians = np.median(studied[0], axis=(0, 2))
    assert (np.diff(medians) < 0).all()
    assert medians[0] > 0.2 and medians[2] < 0.12


def test_intervals_hold_their_share_after_any_number_of_runs(studied: tuple[Array, Array]) -> None:
    inside = np.mean(studied[1] < 1.2816, axis=(0, 2))
    assert ((inside > 0.7) & (inside < 0.92)).all()

"""What few runs say of a stack's figures: the posterior under a prior of their logarithms and residuals of three parts.

A residual, log(predicted/measured), is a part that all runs of one job share (a job is a model at a number of devices: what the
cost model gets wrong of it, it gets wrong each time) and a part of the run's own, which has Student's t distribution, so that a
run far off everything else is taken for an oddity, not for a lesson. A run that is bound by its host then moves the host's floors
and a run that is bound by its kernels their efficiency: each has derivatives by those figures alone.

Many selections of the same runs are followed at once, each with weights of its own: pricing some hundred points takes hardly
longer than pricing one, and leaving out every model in turn or learning from many draws needs no more pricings than one fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Floats

Residual = Callable[[Floats], Floats]
"""log(predicted/measured) of every run (points, n) at points (points, p) of the figures' logarithms."""

STEP = 0.03  # of a logarithm, for derivatives
ROUNDS = 10
LONGEST = 1.0  # a step's part along one figure, of a logarithm
COARSE = (8.0, 3.0)  # widths, in units of the runs' own, with which the first rounds look: no run is an oddity yet


@dataclass(frozen=True)
class Noise:
    """Spreads of a residual's parts, of log step time: each run's own, one for all or (n,), with Student's degrees of freedom, and
    its job's."""

    run: float | Floats
    job: float
    freedom: float


@dataclass(frozen=True)
class Prior:
    """Independent normal priors of the figures' logarithms, (p,), within bounds."""

    centre: Floats
    spread: Floats
    low: Floats
    high: Floats

    def inside(self, theta: Floats) -> Floats:
        """Points (…, p) moved to the bounds."""
        return np.clip(theta, self.low, self.high)


@dataclass(frozen=True)
class Posterior:
    """Of every selection s: the best point theta (s, p), its covariance (s, p, p), and the derivatives (s, n, p) and residuals
    (s, n) of all runs there."""

    theta: Floats
    covariance: Floats
    jacobian: Floats
    residuals: Floats
    loss: Floats

    @property
    def spread(self) -> Floats:
        """Spread of every run's log prediction that the figures' uncertainty makes, (s, n)."""
        return np.asarray(np.sqrt(np.einsum("snp,spq,snq->sn", self.jacobian, self.covariance, self.jacobian)))


def posterior(residual: Residual, prior: Prior, noise: Noise, weights: Floats, jobs: Sequence[object], starts: Floats) -> Posterior:
    """The posterior of every selection: weights (s, n) are 0 for runs that it does not hold.

    Damped Gauss–Newton steps from each of the points `starts` (k, p); of every selection the best end is kept.
    """
    count, (selections, _) = len(starts), weights.shape
    theta = np.repeat(prior.inside(starts), selections, axis=0)
    found = _ascended(residual, prior, noise, np.tile(weights, (count, 1)), _membership(jobs), theta)
    best = found.loss.reshape(count, selections).argmin(axis=0) * selections + np.arange(selections)
    return Posterior(*(each[best] for each in (found.theta, found.covariance, found.jacobian, found.residuals, found.loss)))


def _ascended(residual: Residual, prior: Prior, noise: Noise, weights: Floats, members: Floats, theta: Floats) -> Posterior:
    """All selections step together; each has its own damping, and keeps its place where a step gains nothing."""
    damping = np.full(len(theta), 1e-3)
    residuals, jacobian = _linear(residual, prior, theta)
    for turn in range(ROUNDS):
        own = noise.run * (COARSE[turn] if turn < len(COARSE) else 1.0)
        look = Noise(own, noise.job, noise.freedom)
        slope, curvature, loss = _normal(prior, look, weights, members, theta, residuals, jacobian)
        diagonal = np.einsum("spp->sp", curvature)
        damped = curvature + damping[:, None, None] * np.einsum("sp,pq->spq", diagonal, np.eye(theta.shape[1]))
        step = np.clip(-np.linalg.solve(damped, slope[:, :, None])[:, :, 0], -LONGEST, LONGEST)
        trial = prior.inside(theta + step)
        tried, slopes = _linear(residual, prior, trial)
        gains = loss - _normal(prior, look, weights, members, trial, tried, slopes)[2]
        taken = gains > 0
        theta = np.where(taken[:, None], trial, theta)
        residuals = np.where(taken[:, None], tried, residuals)
        jacobian = np.where(taken[:, None, None], slopes, jacobian)
        damping = np.where(taken, damping / 8.0, damping * 16.0)
        if turn > len(COARSE) and (gains < 1e-3).all():
            break
    _, curvature, loss = _normal(prior, noise, weights, members, theta, residuals, jacobian)
    return Posterior(theta, np.asarray(np.linalg.inv(curvature)), jacobian, residuals, loss)


def _linear(residual: Residual, prior: Prior, theta: Floats) -> tuple[Floats, Floats]:
    """Residuals (s, n) at points (s, p) and their derivatives (s, n, p), priced together."""
    count, figures = theta.shape
    steps = np.where(theta + STEP > prior.high, -STEP, STEP)
    moved = theta[:, None, :] + steps[:, :, None] * np.eye(figures)
    points = np.concatenate((theta[:, None, :], moved), axis=1).reshape(-1, figures)
    priced = residual(points).reshape(count, figures + 1, -1)
    slopes = (priced[:, 1:] - priced[:, :1]) / steps[:, :, None]
    return priced[:, 0], slopes.transpose(0, 2, 1)


def _normal(
    prior: Prior, noise: Noise, weights: Floats, members: Floats, theta: Floats, residuals: Floats, jacobian: Floats
) -> tuple[Floats, Floats, Floats]:
    """Gradient (s, p), Gauss–Newton curvature (s, p, p) and size (s,) of −log posterior, the jobs' parts at their best."""
    parts = np.zeros((len(theta), members.shape[1]))
    for _ in range(4):  # the jobs' parts and the weights of runs follow from each other
        precision = weights * _pull(residuals - parts @ members.T, noise) / noise.run**2
        total = precision @ members + 1.0 / noise.job**2
        parts = ((precision * residuals) @ members) / total
    left = residuals - parts @ members.T
    away = (theta - prior.centre) / prior.spread
    slope = np.einsum("snp,sn->sp", jacobian, precision * left) + away / prior.spread
    shared = np.einsum("snp,sn,ng->sgp", jacobian, precision, members)
    curvature = np.einsum("snp,sn,snq->spq", jacobian, precision, jacobian) + np.diag(1.0 / prior.spread**2)
    curvature = curvature - np.einsum("sgp,sg,sgq->spq", shared, 1.0 / total, shared)
    tails = (noise.freedom + 1.0) / 2.0 * np.log1p((left / noise.run) ** 2 / noise.freedom)
    loss = (weights * tails).sum(axis=1) + ((parts / noise.job) ** 2).sum(axis=1) / 2.0 + (away**2).sum(axis=1) / 2.0
    return slope, curvature, loss


def _pull(left: Floats, noise: Noise) -> Floats:
    """Weight of a run whose own part is `left` under Student's t, as its normal of the moment has it (Lange et al. 1989)."""
    return np.asarray((noise.freedom + 1.0) / (noise.freedom + (left / noise.run) ** 2))


def _membership(jobs: Sequence[object]) -> Floats:
    """1 where a run (row) belongs to a job (column), (n, jobs)."""
    kinds = list(dict.fromkeys(jobs))
    return np.array([[float(job == kind) for kind in kinds] for job in jobs])

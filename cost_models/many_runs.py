"""Many runs of a stack speak for themselves: the most likely values of the figures that move their step times most.

Residuals are log(predicted/measured). Huber's loss over them and log-normal priors around the stack's own figures are made least
by Levenberg–Marquardt in the logarithms of the figures. Derivatives are cheap here (one more pricing each) and the posterior comes
with the last step, so this takes some tens of pricings where a sampling optimiser takes hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.layout import Floats
from .intervals import FEW_MODELS, REPEATS, left_out
from .parameters import Parameter, Summary, summary
from .trials import Priced
from .validation import Outcome

HUBER = 1.345  # residuals in units of their spread beyond which a row's pull grows no more (95 % efficient, Huber 1981)
TYPICAL_NOISE = 0.06
"""What a stack's layouts are off by when one scalar is known, and the most that the search reckons with: with more the priors would
hold where the data have not been followed yet."""
STEP = 0.03  # of a logarithm, for derivatives
DAMPINGS = 5  # of a step, each eight times the one before
SCAN = (-2.0, -1.0, 1.0, 2.0)  # where a parameter is first tried, in units of its prior's width


@dataclass(frozen=True)
class Search:
    """The least of Huber's loss and priors over the logarithms of `parameters`, which start at their priors' centres, (p,)."""

    runs: Priced
    parameters: tuple[Parameter, ...]
    start: Floats

    def only(self, places: Sequence[int]) -> Search:
        """The search over some of the parameters."""
        return replace(self, parameters=tuple(self.parameters[i] for i in places), start=self.start[list(places)])

    def values(self, theta: Floats) -> dict[str, float]:
        """The stack's figures at a point."""
        return {p.name: float(math.exp(t)) for p, t in zip(self.parameters, theta, strict=True)}

    def residuals(self, points: Sequence[Floats]) -> Floats:
        """log(predicted/measured) at some points, (points, n)."""
        names = [p.name for p in self.parameters]
        return np.asarray(np.log(self.runs.predict_all(names, np.exp(np.array(points))) / self.runs.measured))

    @property
    def _spreads(self) -> Floats:
        return np.array([p.spread for p in self.parameters])

    def strongest(self, count: int) -> list[int]:
        """Places of the parameters that move the predictions most within their priors; the first always counts."""
        if len(self.parameters) <= 1:
            return [0]
        ends = [(place, step * p.spread) for place, p in enumerate(self.parameters) if place for step in (-1.0, 2.0)]
        found = self.residuals([self.start, *(self._moved(self.start, *end) for end in ends)])
        sizes = np.sqrt(np.mean((found[1:] - found[0]) ** 2, axis=1)).reshape(-1, 2).max(axis=1)
        moved = [np.inf, *sizes.tolist()]
        ranked = sorted(range(len(moved)), key=lambda place: -moved[place])
        return sorted(place for place in ranked[:count] if moved[place] > REPEATS / 10)

    def _moved(self, theta: Floats, place: int, step: float) -> Floats:
        found = theta.copy()
        found[place] += step
        return self._inside(found)

    def _inside(self, theta: Floats) -> Floats:
        return np.clip(theta, np.log([p.low for p in self.parameters]), np.log([p.high for p in self.parameters]))

    def noise(self, residuals: Floats) -> float:
        """Spread of the residuals, robustly; never less than repeats differ by."""
        return max(REPEATS, 1.4826 * float(np.median(np.abs(residuals - np.median(residuals)))))

    def loss(self, theta: Floats, residuals: Floats, noise: float) -> float:
        """Negative log posterior, up to a constant."""
        size = np.abs(residuals) / noise
        huber = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(self.runs.weights @ huber + (((theta - self.start) / self._spreads) ** 2).sum() / 2)

    def solve(self, rounds: int = 12) -> tuple[Floats, float]:
        """The best point, and the spread of the residuals there."""
        theta, residuals = self._scanned()
        damping = 1e-2
        for _ in range(rounds):
            noise = min(self.noise(residuals), TYPICAL_NOISE)
            least = self.loss(theta, residuals, noise)
            slope, curvature = self._normal(theta, residuals, noise)
            # All dampings that would be tried one after the other are priced at once; the first that gains is taken.
            dampings = damping * 8.0 ** np.arange(DAMPINGS)
            steps = [np.linalg.solve(curvature + d * np.diag(np.diag(curvature)), -slope) for d in dampings]
            trials = [self._inside(theta + np.clip(step, -1.0, 1.0)) for step in steps]
            tried = self.residuals(trials)
            gains = [least - self.loss(*trial, noise) for trial in zip(trials, tried, strict=True)]
            taken = next((place for place, gain in enumerate(gains) if gain > 0), None)
            if taken is None:
                break
            theta, residuals, damping = trials[taken], tried[taken], dampings[taken] / 4
            if gains[taken] < 1e-3:
                break
        return theta, self.noise(residuals)

    def _scanned(self) -> tuple[Floats, Floats]:
        """A start beyond flat stretches: a floor that no kernel time falls below has no derivative."""
        theta, residuals = self.start, self.residuals([self.start])[0]
        for place, parameter in enumerate(self.parameters if len(self.parameters) > 1 else ()):
            there = np.arange(len(theta)) == place
            trials = [np.where(there, self._moved(self.start, place, step * parameter.spread), theta) for step in SCAN]
            for trial, tried in zip(trials, self.residuals(trials), strict=True):
                noise = min(max(self.noise(residuals), self.noise(tried)), TYPICAL_NOISE)
                if self.loss(trial, tried, noise) < self.loss(theta, residuals, noise):
                    theta, residuals = trial, tried
        return theta, residuals

    def _normal(self, theta: Floats, residuals: Floats, noise: float) -> tuple[Floats, Floats]:
        """Gradient (p,) and Gauss–Newton curvature (p, p) of the loss; rows beyond HUBER pull with less weight."""
        jacobian, weights = self._linear(theta, residuals, noise)
        prior = 1.0 / self._spreads**2
        slope = jacobian.T @ (weights * residuals) + prior * (theta - self.start)
        return slope, (jacobian.T * weights) @ jacobian + np.diag(prior)

    def _linear(self, theta: Floats, residuals: Floats, noise: float) -> tuple[Floats, Floats]:
        """Derivatives of the residuals (n, p), and the weights with which rows pull, (n,)."""
        at_top = theta + STEP > np.log([p.high for p in self.parameters])
        steps = np.where(at_top, -STEP, STEP)
        moved = self.residuals([self._moved(theta, place, step) for place, step in enumerate(steps)])
        jacobian = ((moved - residuals) / steps[:, None]).T
        size = np.maximum(np.abs(residuals) / noise, 1e-12)
        return jacobian, self.runs.weights * np.minimum(1.0, HUBER / size) / noise**2

    def left_out(self, theta: Floats, noise: float, outcomes: Sequence[Outcome]) -> Floats:
        """log(measured/predicted) of every run with its model left out of the fit; its job or itself where models are few."""
        residuals = self.residuals([theta])[0]
        jacobian, weights = self._linear(theta, residuals, noise)
        curvature = (jacobian.T * weights) @ jacobian + np.diag(1.0 / self._spreads**2)
        return -left_out(residuals, jacobian, weights, curvature, groups_of(outcomes))

    def summary(self, theta: Floats, noise: float) -> Summary:
        """Fitted figures with intervals, and pairs that the data cannot tell apart, from the curvature at the optimum."""
        _, curvature = self._normal(theta, self.residuals([theta])[0], noise)
        return summary(self.parameters, self.start, theta, np.asarray(np.linalg.inv(curvature)))


def groups_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What is left out together: a model's runs, or where models are few a model's on so many devices, else each run alone."""
    models = [o.run.text("model") for o in outcomes]
    jobs = [f"{model} on {o.run.text('num_accelerators')}" for model, o in zip(models, outcomes, strict=True)]
    enough = [names for names in (models, jobs) if len(set(names)) >= FEW_MODELS]  # without one of two it would be half a fit
    return enough[0] if enough else [o.run.id for o in outcomes]

"""Runs of a stack that are too few to fit it by: what they say under what other stacks let expect (posterior.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.layout import Floats
from .parameters import PARAMETERS, Parameter, movable, start_of
from .pooling import Prior as Expected
from .posterior import Noise, Posterior, Prior, posterior
from .trials import Priced
from .validation import Outcome

NOISE = Noise(run=0.05, job=0.07, freedom=3.0)
"""Chosen by leaving families out, over rows to fit: smaller ones follow single runs, larger ones do not follow three."""


@dataclass(frozen=True)
class FewRuns:
    """Runs of one stack on one accelerator, the figures that they may move, and what is expected of those."""

    runs: Priced
    parameters: tuple[Parameter, ...]
    prior: Prior
    jobs: tuple[object, ...]
    doubts: Floats

    @property
    def names(self) -> list[str]:
        """Figures in the order of the posterior's points."""
        return [p.name for p in self.parameters]

    def residuals(self, points: Floats) -> Floats:
        """log(predicted/measured) at points (points, p) of the figures' logarithms, (points, n)."""
        return np.asarray(np.log(self.runs.predict_all(self.names, np.exp(points)) / self.runs.measured))

    def learn(self, weights: Floats) -> Posterior:
        """The posterior of every selection of the runs, weights (s, n).

        Searched for from the prior's centre and from higher floors: a floor that no kernel time falls below has no derivative.
        """
        floors = np.array(["floor" in name for name in self.names]) * self.prior.spread
        starts = np.array([self.prior.centre, self.prior.centre + floors])
        noise = replace(NOISE, run=np.hypot(NOISE.run, self.doubts))
        return posterior(self.residuals, self.prior, noise, weights * self.runs.weights, self.jobs, starts)

    def left_out(self) -> tuple[Floats, list[int]]:
        """Weights of selections, every run and then each group left out in turn, (1 + groups, n), and every run's selection.

        A group is a job's runs; where all are of one job each run is alone: without the job nothing would be left to learn from.
        """
        groups: list[object] = list(self.jobs if len(set(self.jobs)) > 1 else range(len(self.jobs)))
        every = list(dict.fromkeys(groups))
        weights = np.array([[1.0] * len(groups), *([float(other != group) for other in groups] for group in every)])
        return weights, [1 + every.index(group) for group in groups]


def few_runs(
    outcomes: Sequence[Outcome], runs: Priced, expected: Mapping[str, Expected], parameters: Sequence[Parameter] = PARAMETERS
) -> FewRuns:
    """Runs that are priced already, with priors where other pairs have any to give, else around the documented figures."""
    free = [p.with_spread(expected[p.name].spread if p.name in expected else p.between) for p in movable(parameters, runs)]
    low, high = (np.log([getattr(p, end) for p in free]) for end in ("low", "high"))
    prior = Prior(np.array([start_of(p, runs, expected) for p in free]), np.array([p.spread for p in free]), low, high)
    return FewRuns(runs, tuple(free), prior, tuple(job_of_run(outcome) for outcome in outcomes), doubts_of(outcomes))


def doubts_of(outcomes: Sequence[Outcome]) -> Floats:
    """What the runs' sources leave open of each, as a spread of log step time, (n,)."""
    return np.array([0.0 if outcome.job is None else outcome.job.doubt for outcome in outcomes])


def job_of_run(outcome: Outcome) -> object:
    """What runs share whose deviations have one cause: the source, the model and the number of devices."""
    return outcome.run.family, outcome.run.text("model"), outcome.run.text("num_accelerators")

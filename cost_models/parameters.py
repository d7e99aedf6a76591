"""The figures of a stack that measured runs may move: bounds from physics, and how far stacks lie from what is documented."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Floats
from .pooling import Prior
from .trials import Priced

CONFOUNDED = 0.85  # correlation from which two parameters cannot be told apart
Z95 = 1.96
FEW_ROWS = 10
"""With fewer, only what other stacks let expect gives a figure its meaning."""


@dataclass(frozen=True)
class Parameter:
    """A figure of the stack: bounds from physics, width of its log-normal prior, and from how many rows on, and device counts
    among them, it is freed.

    `between` is how far stacks lie from their documented figures, by those with many rows: the width where rows are few. `start`
    stands in for a stack's figure of 0, which has no logarithm.
    """

    name: str
    low: float
    high: float
    spread: float
    least_rows: int
    start: float = 0.0
    least_sizes: int = 1
    between: float = 0.6


PARAMETERS: tuple[Parameter, ...] = (
    # A sustained rate above the kernel measured alone would need a faster grade of the device (Ascend 910B: 376 over 313).
    Parameter("efficiency", 0.2, 1.2, 0.35, 1, between=0.2),
    # A layer launches 30 to 300 kernels at 5 to 30 µs each; experts wait for token counts besides.
    Parameter("host_floor_dense_s", 2e-5, 2e-2, 0.8, 4, between=0.8),
    Parameter("host_floor_moe_s", 5e-5, 5e-2, 1.2, 4, between=0.5),
    # From kernels that write scores out in pieces to a generation newer than the one that the curve was read from.
    Parameter("attention_efficiency", 0.15, 1.6, 0.5, FEW_ROWS),
    # Eager kernels pass over memory up to ten times where a fused one passes once.
    Parameter("elementwise_efficiency", 0.1, 1.3, 0.5, FEW_ROWS),
    # NCCL beside compute that waits for the slowest rank, against the library alone.
    Parameter("scale_up_efficiency", 0.2, 1.3, 0.5, FEW_ROWS),
    # Collectives of many servers meet on shared links, and a site may have fewer or slower NICs than its kind of server.
    Parameter("scale_out_efficiency", 0.05, 1.3, 0.5, FEW_ROWS),
    # From a network that is not blocking to one whose links all of a job's servers share; sizes of jobs tell it.
    Parameter("scale_out_congestion", 0.02, 1.5, 0.6, FEW_ROWS, start=0.1, least_sizes=3),
    # A collective's launch, its stream synchronisation and its bookkeeping: tens to hundreds of microseconds.
    Parameter("host_floor_per_collective_s", 1e-6, 5e-3, 1.0, FEW_ROWS, start=3e-5, between=1.0),
    Parameter("host_floor_pipeline_s", 1e-6, 5e-3, 1.5, FEW_ROWS, start=3e-5, between=1.5),
    Parameter("step_overhead_s", 1e-3, 2.0, 0.7, FEW_ROWS),
)


def centres(priors: Mapping[str, Prior], runs: Priced) -> dict[str, float]:
    """Figures where priors have their centres."""
    return {p.name: math.exp(start_of(p, runs, priors)) for p in movable(PARAMETERS, runs) if p.name in priors}


def movable(parameters: Sequence[Parameter], runs: Priced) -> list[Parameter]:
    """Those that have a logarithm: under CUDA graphs no layer has a floor."""
    return [p for p in parameters if runs.figures[p.name] or p.start]


def start_of(parameter: Parameter, runs: Priced, priors: Mapping[str, Prior]) -> float:
    """Logarithm of the figure at the centre of its prior, within its bounds."""
    shift = priors[parameter.name].shift if parameter.name in priors else 0.0
    value = math.log(runs.figures[parameter.name] or parameter.start) + shift
    return min(max(value, math.log(parameter.low)), math.log(parameter.high))


@dataclass(frozen=True)
class Fit:
    """One fitted figure with its 95 % interval; `prior` is what the stack had, `learnt` the share of the prior's variance gone."""

    name: str
    prior: float
    value: float
    low: float
    high: float
    learnt: float
    at_bound: bool
    kept: bool = False  # the stack's own figure, which runs that were left out follow as well


Summary = tuple[tuple[Fit, ...], tuple[tuple[str, str, float], ...]]


def summary(parameters: Sequence[Parameter], start: Floats, theta: Floats, covariance: Floats) -> Summary:
    """Figures with intervals at a point (p,) whose covariance is (p, p), and pairs that cannot be told apart."""
    spread = np.sqrt(np.diag(covariance))
    fits = []
    for p, t, sd, centre in zip(parameters, theta, spread, start, strict=True):
        low, high = (min(max(math.exp(t + z * sd), p.low), p.high) for z in (-Z95, Z95))
        at_bound = abs(t - math.log(p.low)) < 1e-6 or abs(t - math.log(p.high)) < 1e-6
        values = [_rounded(x) for x in (math.exp(centre), math.exp(t), low, high)]
        learnt = 1.0 - float(sd / p.spread) ** 2
        fits.append(Fit(p.name, values[0], values[1], min(values[1:]), max(values[1:]), learnt, at_bound))
    correlation = covariance / np.outer(spread, spread)
    pairs = [(i, j) for i in range(len(theta)) for j in range(i) if abs(correlation[i, j]) > CONFOUNDED]
    return tuple(fits), tuple((parameters[j].name, parameters[i].name, float(correlation[i, j])) for i, j in pairs)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")

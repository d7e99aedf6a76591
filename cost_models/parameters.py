"""The figures of a stack that measured runs may move (parameters.yaml): bounds from physics, and how far stacks lie from what is
documented.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..search_spaces.documents import read_document, to_record
from ..search_spaces.layout import Floats
from ..search_spaces.model import Frozen
from .log_fit import Z95
from .pooling import Prior
from .trials import Priced

CONFOUNDED = 0.85  # correlation from which two parameters cannot be told apart
FEW_ROWS = 10
"""With fewer, only what other stacks let expect gives a figure its meaning."""


class Shared(Frozen):
    """What pairs of stack and accelerator have in common of a prior's variance, by label."""

    any: float
    generation: float
    accelerator: float
    framework: float
    stack: float
    source: str

    @property
    def shares(self) -> tuple[float, ...]:
        """In the order of a pair's labels."""
        return self.any, self.generation, self.accelerator, self.framework, self.stack


class Bounded(Frozen):
    """A figure's bounds from physics, width of its log-normal prior, and from how many rows on, and device counts among them, it is
    freed.

    `between` is how far stacks lie from their documented figures, by those with many rows: the width where rows are few. `start`
    stands in for a stack's figure of 0, which has no logarithm. `shared` names what is common to pairs; without it none is pooled.
    """

    low: float
    high: float
    spread: float
    source: str
    least_rows: int = FEW_ROWS
    start: float = 0.0
    least_sizes: int = 1
    between: float = 0.6
    shared: str | None = None


class Parameter(Bounded):
    """Such a figure by name, with the shares of a pair's labels; none where it is not pooled."""

    name: str
    shares: tuple[float, ...] = ()

    def with_spread(self, spread: float) -> Parameter:
        """The same under a prior of that width."""
        return self.model_copy(update={"spread": spread})


class Known(Frozen):
    """The file: figures by name, and what pairs share."""

    figures: Mapping[str, Bounded]
    shared: Mapping[str, Shared]


def _read(path: Path) -> tuple[Parameter, ...]:
    known = to_record(Known, read_document(path), path.name)
    shares = {name: shared.shares for name, shared in known.shared.items()}
    return tuple(
        Parameter(name=name, shares=shares[figure.shared] if figure.shared else (), **figure.model_dump())
        for name, figure in known.figures.items()
    )


PARAMETERS = _read(Path(__file__).parent / "parameters.yaml")


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

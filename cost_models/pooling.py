"""What well-measured pairs of stack and accelerator say of those that are measured badly or not at all.

For every figure the logarithm of fitted over documented is taken as a sum of independent normal parts: one common to all pairs,
one of the accelerator's generation, of the accelerator, of the stack's framework, of the stack, and one of the pair alone. What
the pairs' fits, each with its own uncertainty, say of the parts is then linear algebra (kriging; Rasmussen and Williams 2006,
equations 2.25 and 2.26, with a kernel of shared labels). The width of a figure's prior is what the parts add up to.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..search_spaces.layout import Floats

LEAST_NUGGET = 1e-4  # of a logarithm, squared: keeps the system regular


@dataclass(frozen=True)
class Pair:
    """A stack on an accelerator."""

    stack: str
    framework: str
    accelerator: str

    @property
    def labels(self) -> tuple[str, ...]:
        """What pairs may share, in the order of a figure's shares."""
        return (
            "any",
            f"generation {generation(self.accelerator)}",
            f"accelerator {self.accelerator}",
            f"framework {self.framework}",
            f"stack {self.stack}",
        )


TOLD_BY_ONE_RUN = frozenset({"efficiency"})
"""What a pair's own runs say better however few they are: pooled for pairs that have none (with it as the centre, fits of three
rows predict others worse)."""


def generation(accelerator: str) -> str:
    """Devices of one generation share their kernels: the name without its host, its memory and its grade."""
    found = re.match(r"g?(b)\d|(a1|h|mi\d|ascend-9\d)", accelerator)
    return (found[1] or found[2]) if found else accelerator


@dataclass(frozen=True)
class Seen:
    """A figure fitted on a pair: log of fitted over documented, and the variance that the fit leaves it."""

    pair: Pair
    log_ratio: float
    variance: float


@dataclass(frozen=True)
class Prior:
    """Of a figure's logarithm: centre over the stack's documented figure, and width."""

    shift: float
    spread: float


@dataclass(frozen=True)
class Pool:
    """What was `seen` of a figure whose prior has width `spread`, by label with its `shares`."""

    seen: tuple[Seen, ...]
    spread: float
    shares: tuple[float, ...]

    def without(self, *pairs: Pair) -> Pool:
        """What the other pairs say."""
        return Pool(tuple(one for one in self.seen if one.pair not in pairs), self.spread, self.shares)

    def prior(self, pair: Pair) -> Prior:
        """What is to be expected on a pair that was not seen."""
        if not self.seen:
            return Prior(0.0, self.spread)
        across = self.spread**2 * np.array([self._alike(pair, one.pair) for one in self.seen])
        left = float(self.spread**2 - across @ np.linalg.solve(self._covariance, across))
        return Prior(float(across @ self._weights), math.sqrt(max(left, 0.0)))

    def factors(self) -> dict[str, float]:
        """The same as factors on the documented figure: those of a pair's labels are multiplied."""
        found: dict[str, float] = {}
        for place, share in enumerate(self.shares):
            for label in dict.fromkeys(one.pair.labels[place] for one in self.seen):
                weights = [w for w, one in zip(self._weights, self.seen, strict=True) if one.pair.labels[place] == label]
                found[label] = math.exp(share * self.spread**2 * float(sum(weights)))
        return found

    @cached_property
    def _covariance(self) -> Floats:
        alike = np.array([[self._alike(a.pair, b.pair) for b in self.seen] for a in self.seen])
        own = (1.0 - sum(self.shares)) * np.eye(len(self.seen))
        return np.asarray(self.spread**2 * (alike + own) + np.diag([one.variance + LEAST_NUGGET for one in self.seen]))

    @cached_property
    def _weights(self) -> Floats:
        return np.asarray(np.linalg.solve(self._covariance, [one.log_ratio for one in self.seen]))

    def _alike(self, first: Pair, second: Pair) -> float:
        return sum(share for share, a, b in zip(self.shares, first.labels, second.labels, strict=True) if a == b)

"""How far step times lie from their predictions: intervals from the residuals of runs that the figures were not fitted to.

Of a pair of stack and accelerator that was fitted, the residuals are those of every model's runs when all runs of that model are
left out, or of every run where models are few. Pairs with few runs are held to what pairs as a whole do. Of pairs that nobody
measured, they are those of every pair when its figures are pooled from the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..search_spaces.layout import Floats
from .profile import Interval, Intervals

COVERAGE = 0.8
"""Share of runs that an interval is meant to hold."""
LIKE_OTHERS = 5
"""Runs of one's own that say as much of one's spread as all other pairs together do."""
Kind = Literal["dense", "moe"]
KINDS: dict[bool, Kind] = {False: "dense", True: "moe"}


@dataclass(frozen=True)
class Residuals:
    """log(measured/predicted) of a pair's runs, each left out of what predicts it, and whether the model has experts, (n,)."""

    stack: str
    accelerator: str
    values: tuple[float, ...]
    moe: tuple[bool, ...]
    problems: tuple[int, ...] = ()  # runs that share one are layouts of one problem

    def of(self, moe: bool) -> Floats:
        """Sizes of those of one kind of model."""
        return np.abs([value for value, has in zip(self.values, self.moe, strict=True) if has == moe])


def intervals_of(fitted: Sequence[Residuals], unmeasured: Sequence[Residuals]) -> Intervals:
    """Intervals of every pair that was fitted and of those that nobody measured, for dense models and those with experts."""
    pairs: dict[str, dict[str, dict[Kind, Interval]]] = defaultdict(lambda: defaultdict(dict))
    new: dict[Kind, Interval] = {}
    for moe, kind in KINDS.items():
        typical = _typical(each.of(moe) for each in fitted)
        for each in fitted:
            own = each.of(moe)
            if len(own) and typical is not None:
                pairs[each.stack][each.accelerator][kind] = _interval(_held(own, typical), f"{_count(len(own))}, each left out")
        wide = _typical(each.of(moe) for each in unmeasured)
        if wide is not None:
            count = sum(len(each.of(moe)) > 0 for each in unmeasured)
            new[kind] = _interval(wide, f"{count} pairs of stack and accelerator, each left out")
    return Intervals(pairs={stack: dict(found) for stack, found in pairs.items()}, unmeasured=new, ranking=_ranking(fitted))


def _ranking(fitted: Sequence[Residuals]) -> dict[Kind, float]:
    """What half of all pairs of layouts of one problem are misjudged by against each other, every problem counting alike."""
    found: dict[Kind, float] = {}
    for moe, kind in KINDS.items():
        sizes = []
        for each in fitted:
            groups: dict[int, list[float]] = defaultdict(list)
            for value, has, problem in zip(each.values, each.moe, each.problems, strict=True):
                if has == moe:
                    groups[problem].append(value)
            sizes += [np.abs(np.subtract.outer(g, g)[np.triu_indices(len(g), 1)]) for g in groups.values() if len(g) > 1]
        size = _typical(sizes, share=0.5)
        if size is not None:
            found[kind] = round(math.expm1(size), 4)
    return found


def left_out(residuals: Floats, jacobian: Floats, weights: Floats, curvature: Floats, groups: Sequence[str]) -> Floats:
    """Residuals (n,) of each group's runs with that group left out of the fit, to first order.

    A least-squares fit without the rows of g leaves them (I − H_gg)⁻¹ r_g, where H = J C⁻¹ Jᵀ W (Cook and Weisberg 1982, section
    2.2.3, for several rows at once); C is the curvature with its priors, so that I − H_gg has an inverse.
    """
    found = residuals.copy()
    for group in dict.fromkeys(groups):
        rows = np.flatnonzero([each == group for each in groups])
        part = jacobian[rows]
        hat = part @ np.linalg.solve(curvature, part.T * weights[rows])
        found[rows] = np.linalg.solve(np.eye(len(rows)) - hat, residuals[rows])
    return found


def _typical(every: Iterable[Floats], share: float = COVERAGE) -> float | None:
    """The size that a share of the residuals stay below, every array counting alike."""
    known = [sizes for sizes in every if len(sizes)]
    if not known:
        return None
    sizes, weights = np.concatenate(known), np.concatenate([np.full(len(each), 1.0 / len(each)) for each in known])
    order = np.argsort(sizes)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(sizes[order][np.searchsorted(below, share)])


def _held(own: Floats, typical: float) -> float:
    """A pair's own size, drawn to the typical one the more the fewer its runs."""
    size = float(np.quantile(own, min(COVERAGE * (1.0 + 1.0 / len(own)), 1.0)))  # the rank that holds COVERAGE of the next run
    return (len(own) * size + LIKE_OTHERS * typical) / (len(own) + LIKE_OTHERS)


def _interval(size: float, source: str) -> Interval:
    return Interval(low=float(f"{math.exp(-size):.4g}"), high=float(f"{math.exp(size):.4g}"), source=f"{COVERAGE:.0%} of {source}")


def _count(runs: int) -> str:
    return f"{runs} {'run' if runs == 1 else 'runs'}"

"""How far step times lie from their predictions: intervals from the residuals of runs that the figures were not fitted to.

Of a pair of stack and accelerator that was fitted, the residuals are those of every model's runs when all runs of that model are
left out. Runs of one model are off alike, so that many of them say little of a model to come: they count as the number of
independent runs that say as much. A pair with few is held to what pairs as a whole do or, where its figures were learnt from few
runs, to what the posterior of those lets expect. Of pairs that nobody measured, the residuals are those of every family of runs
with figures pooled from pairs that it did not run on, each family counting alike: a stack to come is a stranger to all of them,
where most pairs of one family have siblings among the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import Floats
from .profile import Interval, Intervals

COVERAGE = 0.8
"""Share of runs that an interval is meant to hold."""
LIKE_OTHERS = 5
"""Independent runs of one's own that say as much of one's spread as all other pairs together do."""
FEW_MODELS = 3
"""Models of a pair below which its residuals do not tell what a new model is off by."""
ALIKE = 0.5
"""Correlation of how far off runs of one model are, by fit rows of pairs with several models."""
REPEATS = 0.02  # of log step time: what repeats of one run differ by
Z_COVERAGE = 1.2816  # of a normal residual in units of its spread: 80 % lie below
Kind = Literal["dense", "moe"]
T = TypeVar("T")
KINDS: dict[bool, Kind] = {False: "dense", True: "moe"}


@dataclass(frozen=True)
class Residuals:
    """log(measured/predicted) of a pair's runs, each left out of what predicts it, and whether the model has experts, (n,)."""

    stack: str
    accelerator: str
    values: tuple[float, ...]
    moe: tuple[bool, ...]
    problems: tuple[int, ...] = ()  # runs that share one are layouts of one problem
    models: tuple[int, ...] = ()  # runs that share one are of one model
    spread: float = 0.0  # of log step times, by what few runs leave unknown of the figures, and sources of their runs
    slips: int = 0  # runs that the figures do not explain and that are not among these

    def without(self, slips: npt.NDArray[np.bool_]) -> Residuals:
        """The residuals of the other runs; `slips` is (n,)."""

        def rest(column: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(value for value, slip in zip(column, slips, strict=True) if not slip)

        parts = rest(self.values), rest(self.moe), rest(self.problems), rest(self.models)
        return Residuals(self.stack, self.accelerator, *parts, self.spread, int(slips.sum()))

    def of(self, moe: bool) -> Floats:
        """Sizes of those of one kind of model."""
        return np.abs([value for value, has in zip(self.values, self.moe, strict=True) if has == moe])

    def models_of(self, moe: bool) -> list[int]:
        """Models of the runs of one kind of model."""
        return [model for model, has in zip(self.models, self.moe, strict=True) if has == moe]


@dataclass(frozen=True)
class Stranger:
    """log(measured/predicted) of one family's runs by figures of pairs that it did not run on; which models have experts, (n,)."""

    values: Floats
    moe: npt.NDArray[np.bool_]

    def of(self, moe: bool) -> Floats:
        """Sizes of those of one kind of model."""
        return np.asarray(np.abs(self.values[self.moe == moe]))


def intervals_of(
    fitted: Sequence[Residuals], strangers: Sequence[Stranger], known: Mapping[Kind, float] = MappingProxyType({})
) -> Intervals:
    """Intervals of every pair that was fitted and of those that nobody measured, for dense models and those with experts.

    `known` are the typical sizes of pairs as a whole where they are known from elsewhere.
    """
    pairs: dict[str, dict[str, dict[Kind, Interval]]] = defaultdict(lambda: defaultdict(dict))
    new: dict[Kind, Interval] = {}
    sizes: dict[Kind, float] = {}
    for moe, kind in KINDS.items():
        typical = known.get(kind, _typical(each.of(moe) for each in fitted if len(set(each.models_of(moe))) >= FEW_MODELS))
        if typical is not None:
            sizes[kind] = float(f"{typical:.4g}")
        for each in fitted:
            own = each.of(moe)
            if len(own) and typical is not None:
                others = math.hypot(typical, Z_COVERAGE * each.spread)
                # Runs left out beside others of their own model, or one run alone, say nothing of a model to come.
                several = len(set(each.models)) > 1
                size = held(own, independent(each.models_of(moe)), others) if several else others
                pairs[each.stack][each.accelerator][kind] = _interval(size, _source(each, moe))
        wide = _typical(each.of(moe) for each in strangers)
        if wide is not None:
            count = sum(len(each.of(moe)) > 0 for each in strangers)
            new[kind] = _interval(wide, f"{count} families of runs, each left out with all stacks and accelerators that it ran on")
    found = {stack: dict(each) for stack, each in pairs.items()}
    return Intervals(pairs=found, unmeasured=new, ranking=_ranking(fitted), typical=sizes)


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


def independent(models: Sequence[int]) -> float:
    """How many independent runs say as much as these (design effect of samples in clusters, Kish 1965, section 5.4)."""
    counts = np.unique(models, return_counts=True)[1]
    return float(len(models) / (1.0 + (np.sum(counts**2) / len(models) - 1.0) * ALIKE))


def held(own: Floats, runs: float, others: float) -> float:
    """A pair's own size, drawn to that of others the more the fewer its independent `runs`.

    Its own is the rank that holds COVERAGE of a run to come (split conformal: Vovk et al. 2005; Lei et al. 2018, section 2.2).
    """
    size = max(float(np.quantile(own, min(COVERAGE * (1.0 + 1.0 / runs), 1.0), method="higher")), REPEATS)
    return math.exp((runs * math.log(size) + LIKE_OTHERS * math.log(others)) / (runs + LIKE_OTHERS))


def _interval(size: float, source: str) -> Interval:
    low, high = (float(f"{math.exp(end):.4g}") for end in (-size, size))
    return Interval(low=low, high=high, source=f"{100 * COVERAGE:.0f} % of {source}")


def _source(found: Residuals, moe: bool) -> str:
    count, models = len(found.of(moe)), len(set(found.models_of(moe)))
    own = f"{count} {'run' if count == 1 else 'runs'} of {models} {'model' if models == 1 else 'models'}"
    if len(set(found.models)) < 2:
        said = f"models of other stacks: {own} cannot tell of another"
    elif independent(found.models_of(moe)) < LIKE_OTHERS:
        said = f"models, mostly of other stacks: {own} {'is' if count == 1 else 'are'} few"
    else:
        said = f"{own}, each left out"
    runs, are = ("1 run", "is") if found.slips == 1 else (f"{found.slips} runs", "are")
    return f"{said}; {runs} that the figures do not explain {are} not counted" if found.slips else said

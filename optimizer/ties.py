"""Alternatives that the predictions cannot tell from the plan, and which measurement would.

Most of what a step time is off by is common to all layouts of a problem, so two of them are told apart better than either is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..cost_models.profile import Profile
from ..search_spaces.layout import Layout, Problem
from .aims import PER_SECOND, STEP_TIME
from .result import PricedLayout, Tie

WORTH = 0.005  # share of the step below which a term's difference decides nothing
MESSAGES = {
    "tp": "all-gather",
    "cp": "exchange of keys and values",
    "ep": "all-to-all",
    "dp": "reduce-scatter of gradients",
    "pp": "send between stages",
}
KERNELS = {
    "forward": "one layer's forward pass",
    "backward": "one layer's backward pass",
    "recompute": "one layer's backward pass with its recompute",
    "host": "the launches of one layer without its kernels",
    "optimizer": "one optimizer step",
    "offload": "one optimizer step with its offload",
}


COUNTED = ("devices", "traffic")
"""Aims whose figures are counted rather than measured: two of them are told apart by any difference."""
EQUALS = "both take as much: the plan is the faster"


def ties(
    problem: Problem, profile: Profile, best: PricedLayout, others: Sequence[PricedLayout], aim: str = STEP_TIME
) -> tuple[Tie, ...]:
    """Those of the others that have more of the aim by less than layouts of one problem are misjudged by in it."""
    noise = noise_of(aim, problem, profile)
    if noise is None:
        return ()
    found, own = [], _figure(aim, best)
    for place, other in enumerate(others):
        more = (_figure(aim, other) - own) / own if own else _figure(aim, other)  # of none, any at all is more than any noise
        if more <= noise:
            decided_by = _decided_by(problem, best, other) if aim in PER_SECOND else EQUALS
            slower = other.step_time_s / best.step_time_s - 1.0
            found.append(Tie(alternative=place, aim=aim, more=more, slower=slower, noise=noise, decided_by=decided_by))
    return tuple(found)


def _figure(aim: str, priced: PricedLayout) -> float:
    return priced.step_time_s if priced.aims is None else priced.aims[aim]


def noise_of(aim: str, problem: Problem, profile: Profile) -> float | None:
    """The share by which two layouts of the problem are commonly misjudged against each other in an aim; None where nobody measured
    it, as of peaks.
    """
    if aim in COUNTED:
        return 0.0
    return misjudged_by(problem, profile) if aim in PER_SECOND else None


def misjudged_by(problem: Problem, profile: Profile) -> float | None:
    """The same of the step time, and of all that follows from it."""
    ranking = profile.intervals.ranking
    if not ranking:
        return None
    # Few groups of layouts have experts: they are not known better than dense ones.
    return max(ranking.values()) if problem.model.is_moe else ranking.get("dense", max(ranking.values()))


def kind(problem: Problem) -> Literal["dense", "moe"]:
    """Whether the model has experts, in the words of a profile's intervals."""
    return "moe" if problem.model.is_moe else "dense"


def _decided_by(problem: Problem, best: PricedLayout, other: PricedLayout) -> str:
    """The term that differs most between the two, and what to measure of it."""
    terms = dict.fromkeys((*best.breakdown_s, *other.breakdown_s))
    deltas = {name: other.breakdown_s.get(name, 0.0) - best.breakdown_s.get(name, 0.0) for name in terms}
    name = max(deltas, key=lambda term: abs(deltas[term]), default="")
    both = "run both for 20 steps"
    if not name or abs(deltas[name]) < WORTH * best.step_time_s:
        return f"no term differs by more than {100 * WORTH:.1f} % of the step: {both}"
    larger = other if deltas[name] > 0 else best
    what = _measurement(problem, name, larger)
    share = abs(deltas[name]) / best.step_time_s
    return f"{name} differs most ({100 * share:.1f} % of the step): {f'measure {what}, or {both}' if what else both}"


def _measurement(problem: Problem, term: str, priced: PricedLayout) -> str:
    """What would show how long the term takes in the layout that spends more on it; blank where only whole steps would."""
    if term in MESSAGES:
        return f"a {term.upper()} {getattr(priced.layout, term)} {MESSAGES[term]} {_where(problem, term, priced)}"
    if term in KERNELS:
        return f"{KERNELS[term]} at {_shape(priced.layout)}"
    return ""


def _where(problem: Problem, dimension: str, priced: PricedLayout) -> str:
    """Whether the dimension's traffic stays in a supernode."""
    names = [level.name for level in problem.cluster.levels]
    outside = names[names.index(problem.cluster.supernode) + 1 :]
    crossing = any(priced.traffic_gib.get(level, {}).get(dimension, 0.0) > 0 for level in outside)
    return "across supernodes" if crossing else "inside the supernode"


def _shape(layout: Layout) -> str:
    return f"TP {layout.tp}, CP {layout.cp} and micro-batch {layout.micro_batch}"

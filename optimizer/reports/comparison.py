"""What one layout gives up and gains beside another, in a few phrases."""

from __future__ import annotations

from dataclasses import dataclass

from ...search_spaces.layout import Problem
from ..result import PricedLayout
from . import wording

WORTH_TIME = 0.005  # share of the step below which a term's difference is not mentioned
WORTH_MEMORY = 0.02  # share of the usable memory
WORTH_TRAFFIC = 1.1  # factor between the traffic of two layouts
WORTH_SHARE = 0.01  # share of traffic that leaves the supernode below which it does not matter to either
CHOICES = ("schedule", "optimizer_sharding", "recompute", "offload", "rank_order")
MOST_LOSSES = 3


@dataclass(frozen=True)
class Comparison:
    """`slower` as a share of the first layout's step; losses and gains in words, largest first; `changes` beside the frame.

    A report that is short of room shows the first MOST_LOSSES of the losses and the first of the gains.
    """

    slower: float
    losses: tuple[str, ...]
    gains: tuple[str, ...]
    changes: tuple[str, ...]


def compare(problem: Problem, first: PricedLayout, other: PricedLayout) -> Comparison:
    """`other` as seen from `first`."""
    deltas = sorted(_time(first, other) + _memory(first, other) + _traffic(problem, first, other), reverse=True)
    return Comparison(
        slower=other.step_time_s / first.step_time_s - 1.0,
        losses=tuple(phrase for weight, phrase in deltas if weight > 0),
        gains=tuple(phrase for weight, phrase in reversed(deltas) if weight < 0),
        changes=tuple(
            f"{name.replace('optimizer_', '').replace('_', ' ')} {getattr(other.layout, name).removeprefix('selective:')}"
            for name in CHOICES
            if getattr(other.layout, name) != getattr(first.layout, name)
        ),
    )


def beyond_supernode(problem: Problem, priced: PricedLayout) -> float:
    """GiB per used device and step that leave a supernode."""
    names = [level.name for level in problem.cluster.levels]
    outside = names[names.index(problem.cluster.supernode) + 1 :]
    return sum(sum(priced.traffic_gib.get(name, {}).values()) for name in outside)


Deltas = list[tuple[float, str]]


def _time(first: PricedLayout, other: PricedLayout) -> Deltas:
    """Each term's difference as a share of the first step."""
    terms = dict.fromkeys((*first.breakdown_s, *other.breakdown_s))
    shares = {name: (other.breakdown_s.get(name, 0.0) - first.breakdown_s.get(name, 0.0)) / first.step_time_s for name in terms}
    return [(share, f"{wording.change(share)} {name}") for name, share in shares.items() if abs(share) >= WORTH_TIME]


def _memory(first: PricedLayout, other: PricedLayout) -> Deltas:
    """Headroom is weighed by its share of the usable memory, a tenth of what the same share of the step would weigh."""
    more = other.memory.peak_gib - first.memory.peak_gib
    share = more / first.memory.usable_gib
    phrase = f"{wording.signed(wording.gib(-more))} headroom"
    return [(share / 10, phrase)] if abs(share) >= WORTH_MEMORY else []


def _traffic(problem: Problem, first: PricedLayout, other: PricedLayout) -> Deltas:
    """Traffic that leaves the supernode, where either layout has some worth speaking of."""
    before, after = beyond_supernode(problem, first), beyond_supernode(problem, other)
    if max(first.cross_supernode_share, other.cross_supernode_share) < WORTH_SHARE:
        return []
    if not before:
        return [(WORTH_TIME, f"{wording.signed(wording.gib(after))} of cross-supernode traffic where there was none")]
    if not after:
        return [(-WORTH_TIME, "no cross-supernode traffic")]
    ratio = after / before
    phrase = f"{wording.times(ratio)} cross-supernode traffic"
    if ratio >= WORTH_TRAFFIC:
        return [(WORTH_TIME, phrase)]
    return [(-WORTH_TIME, phrase)] if ratio <= 1 / WORTH_TRAFFIC else []

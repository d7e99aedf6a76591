"""How groups of ranks sit on the levels of a network, and what of their messages crosses each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..search_spaces.layout import Bools, Floats, Ints


@dataclass(frozen=True)
class Crossing:
    """How groups sit on the levels; all arrays are (levels, n).

    `members`: ranks of the group in one unit; `fan`: parts joined at the level (1: nothing crosses it). `gathered`: what a rank
    sends across the level of a buffer that the group gathers, as a share of it; `outside`: ranks of the group that the level lies
    between; `leaving`: edges of a ring through the group that leave a unit. Of a group that does not tile its units these three
    are those of the rank that has most to send, which sits where fewest of its group do; `Network.mean_crossing` has the means.

    `joined`: units that the level's fabric joins to each other, so many as a group that leaves one touches; `passed`: of the ranks
    in one unit of the whole fabric, the share that the level lies between.
    """

    members: Floats
    fan: Floats
    gathered: Floats
    outside: Floats
    leaving: Floats
    joined: Floats
    passed: Floats

    @cached_property
    def below(self) -> Floats:
        """Ranks of the group in one unit of the level below, (levels, n)."""
        return np.concatenate([np.ones((1, self.members.shape[1])), self.members[:-1]])

    @cached_property
    def crossed(self) -> Bools:
        """Whether anything crosses the level, (levels, n)."""
        return np.asarray(self.outside > 0.0)

    @cached_property
    def size(self) -> Floats:
        return np.asarray(self.members[-1])

    @cached_property
    def outermost(self) -> Ints:
        """Index of the outermost level that the group crosses, (n,); 0 where the group is one rank."""
        crossed = self.crossed
        last = len(crossed) - 1 - np.argmax(crossed[::-1], axis=0)
        return np.where(crossed.any(axis=0), last, 0)

    @cached_property
    def edges(self) -> Floats:
        """Neighbours in a chain through the group that the level lies between, at most, (levels, n): they add up to n − 1."""
        return np.asarray(self.size / self.members * (self.fan - 1.0))

    @cached_property
    def tree_steps(self) -> Floats:
        """Steps up and down a binary tree over the parts that each level joins, (levels, n)."""
        return np.asarray(2.0 * np.ceil(np.log2(np.maximum(self.fan, 1.0))))

    def take(self, rows: Ints) -> Crossing:
        return Crossing(*(getattr(self, name)[:, rows] for name in Crossing.__dataclass_fields__))

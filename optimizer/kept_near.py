"""What a search keeps of layouts a little slower than the best, to be cut in other ways once it has ended."""

from __future__ import annotations

import numpy as np

from ..search_spaces.layout import Floats
from .found import Kept
from .search_rows import Wave, Ways

NEAR, NEAR_LAYOUTS = 0.05, 128
"""By how much of the step a layout that is not cut exactly may be slower than those that are kept to be cut anew after the search,
which gains 1 % at the mean and more than that of one in thirty, and how many are.
"""


class KeptNear:
    """By frame, vpp, micro-batch, rank order and recompute: layouts with what none of their cuts can beat."""

    def __init__(self) -> None:
        self._near: dict[tuple[int, ...], list[tuple[float, Kept]]] = {}

    def note(self, wave: Wave, bound: Floats, ways: Ways, limit_s: float) -> None:
        """Remembers the rows of each key that are not much slower than the limit: the fastest, and slower ones that still may win,
        by their bound, where it no longer may.
        """
        table, below = wave.rows.table, ways.below_s.min(axis=1)
        near = np.nonzero(below < np.minimum(limit_s * (1.0 + NEAR), np.finfo(float).max))[0]
        near = near[np.lexsort((bound[near], below[near]))]
        redone = (table.recompute_mode, table.recompute_modules, table.recompute_layers)
        told_apart = (wave.frame, table.vpp, table.micro_batch, table.rank_order, *redone)
        keys = zip(*(column[near].tolist() for column in told_apart), strict=True)
        for row, key, least_s, below_s in zip(near.tolist(), keys, bound[near].tolist(), below[near].tolist(), strict=True):
            known = self._near.setdefault(key, [])
            if all(least_s < other_s or below_s < kept.step_time_s for other_s, kept in known):
                known.append((least_s, wave.kept(row, ways.cuts[row][ways.below_s[row].argmin()], below_s)))

    def nearest(self, limit_s: float, frame_limit_s: Floats) -> list[Kept]:
        """The fastest of what is remembered that may still win with other cuts: whatever the limit was on the way."""
        limits_s = {key: min(limit_s, float(frame_limit_s[key[0]])) for key in self._near}
        hopeful = [
            (kept.step_time_s, key, kept)
            for key, known in self._near.items()
            for least_s, kept in known
            if least_s < limits_s[key] and kept.step_time_s <= limit_s * (1.0 + NEAR)
        ]
        return [kept for _, _, kept in sorted(hopeful, key=lambda each: each[:2])[:NEAR_LAYOUTS]]

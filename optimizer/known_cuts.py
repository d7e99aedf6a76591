"""Cuts that a rule gave before, by all that they follow from.

Every search of a model meets the same ones over and over, whatever its batch is, and the searches of a sweep share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from ..cost_models.loads import Cuts
from ..search_spaces.layout import Floats
from ..search_spaces.row_keys import Ints

MOST_CUTS = 1 << 22
"""Numbers kept in all; beyond, all are forgotten: a sweep that goes on to other models has no more use for them."""


@dataclass
class _Known:
    """Cuts of one rule, (rows, chunks+1), and each row's place by the bytes of what it follows from."""

    cuts: Cuts
    place: dict[bytes, int] = field(default_factory=dict)


class KnownCuts:
    """Rules that cut rows of work one by one, and what they gave."""

    def __init__(self, most: int = MOST_CUTS) -> None:
        self._most = most
        self._of: dict[Hashable, _Known] = {}
        self._held = 0
        self._lock = Lock()

    def of(self, rule: Hashable, work_s: Floats, cut: Callable[[Ints], Cuts]) -> Cuts:
        """The cuts (n, chunks+1) of rows of work (n, columns); those that are new come from `cut`, given their places among the n.

        `rule` names all else that the cuts follow from.
        """
        each = np.ascontiguousarray(work_s)
        keys = each.view(f"V{each.itemsize * each.shape[1]}").ravel().tolist()
        with self._lock:
            known = self._of.get(rule)
            place = {} if known is None else known.place
            new = {key: row for row, key in enumerate(keys) if key not in place}
            if known is None or new:
                known = self._joined(rule, known, list(new), cut(np.array(list(new.values()), dtype=np.int64)))
            return known.cuts[[known.place[key] for key in keys]].astype(np.int64)

    def _joined(self, rule: Hashable, known: _Known | None, keys: list[bytes], cuts: Cuts) -> _Known:
        """What is known of a rule with more cuts, one for each key: none twice."""
        if known is None:
            known = _Known(np.empty((0, cuts.shape[1]), dtype=np.int16))
        first = len(known.place)
        joined = _Known(np.concatenate([known.cuts, cuts.astype(np.int16)]), known.place)
        joined.place.update((key, first + row) for row, key in enumerate(keys))
        if self._held + cuts.size > self._most:
            self._of, self._held = {}, 0
            return joined
        self._of[rule], self._held = joined, self._held + cuts.size
        return joined

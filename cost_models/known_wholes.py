"""What the kernels and messages of a model's pieces cost, kept for the next problem that differs in nothing they follow from.

A plan prices one problem several times over, under other limits and for other questions; a sweep goes on to other batches of the
same model on the same devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from ..search_spaces.layout import Ints, Problem
from .pieces import Wholes
from .profile import Profile

MOST_COMBINATIONS = 24_000
"""Combinations kept in all, some 3 kB each; the problem at hand keeps all of its own."""
ASIDE = frozenset({"global_batch", "fix", "forbid", "demanded", "inside", "memory_margin", "reserved_gib"})
"""What of a workload no micro-batch of a given size feels."""


OUTSIDE = frozenset({"gradient_bucket"})
"""What of a stack none does."""


@dataclass
class KnownWholes:
    """Combinations of what pieces depend on that were met, by the bytes of their columns."""

    profile: Profile
    wholes: Wholes | None = None
    place: dict[bytes, int] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def of(self, keys: list[bytes], worked_out: Callable[[Ints], Wholes]) -> tuple[Wholes, Ints]:
        """All combinations known, and the places of the given ones; `worked_out` is asked for those that are new, by their places
        among the keys.
        """
        with self.lock:
            new = np.array([row for row, key in enumerate(keys) if key not in self.place], dtype=np.int64)
            if len(new) or self.wholes is None:
                added = worked_out(new)
                self.wholes = added if self.wholes is None else Wholes.joined(self.wholes, added)
                self.place |= {keys[row]: place for place, row in enumerate(new.tolist(), len(self.place))}
            return self.wholes, np.array([self.place[key] for key in keys], dtype=np.int64)


_KEPT: OrderedDict[str, KnownWholes] = OrderedDict()
_KEEPING = Lock()


def known_wholes(problem: Problem, profile: Profile) -> KnownWholes:
    """What is known of problems like this one, whose stack has its figures, priced by this profile."""
    parts = (problem.model, problem.cluster, problem.stack)
    key = "\n".join(
        (
            *(part.model_dump_json(exclude=set(OUTSIDE)) for part in parts),
            str(problem.allocated_sizes),
            problem.workload.model_dump_json(exclude=set(ASIDE)),
        )
    )
    with _KEEPING:
        found = _KEPT.pop(key, None)
        if found is None or (found.profile is not profile and found.profile != profile):
            found = KnownWholes(profile)
        held = sum(len(each.place) for each in _KEPT.values()) + len(found.place)
        while _KEPT and held > MOST_COMBINATIONS:
            held -= len(_KEPT.popitem(last=False)[1].place)
        _KEPT[key] = found
    return found

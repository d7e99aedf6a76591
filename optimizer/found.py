"""What a search keeps of the layouts it scores, and what it proves of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..search_spaces.layout import Layout, LayoutTable, Split


@dataclass
class Counts:
    """How many layouts met which end; of a search that was stopped `cut_by_bound` holds those never looked at too."""

    legal: int = 0
    scored: int = 0
    cut_by_bound: int = 0
    cut_by_memory: int = 0


@dataclass(frozen=True)
class Candidate:
    """One scored layout: its step time, its row and its cuts."""

    step_time_s: float
    layout: Layout


@dataclass(frozen=True)
class Kept:
    """The best layout of a frame so far: its step time, its row as a table, and where it is cut."""

    step_time_s: float
    row: LayoutTable
    split: Split

    def candidate(self, num_layers: int) -> Candidate:
        """The layout itself, with its stages."""
        layout = self.row.layout(0, num_layers)
        return Candidate(self.step_time_s, layout.model_copy(update={"stages": self.split.stages(num_layers, layout.recompute)}))


@dataclass
class Found:
    """Best layouts by frame, best first; what was proved on the way."""

    best: list[Candidate] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    lower_bound_s: float = np.inf
    complete: bool = True
    seconds: float = 0.0
    frames: int = 0
    any_cuts_bound_s: float = np.inf
    """What no layout can beat however it is cut, where `lower_bound_s` holds for the cuts that the search gives each."""
    frames_bound_s: float = 0.0
    """What none can beat that fits however much it redoes besides; 0 where no frame was looked at."""
    near: list[Candidate] = field(default_factory=list)
    """Layouts a little slower than the best, of each frame, vpp, micro-batch and recompute: cut otherwise they may be faster."""


def over_all(best: Found, searched: Sequence[Found]) -> Found:
    """The best layouts of one of some spaces with what the searches of all prove."""
    return replace(
        best,
        complete=all(each.complete for each in searched),
        lower_bound_s=min(best.best[0].step_time_s, *(each.lower_bound_s for each in searched)),
        any_cuts_bound_s=min(each.any_cuts_bound_s for each in searched),
        frames_bound_s=min(each.frames_bound_s for each in searched),
    )

"""Layouts that were best for the same model on the same devices under other batches and lengths: what they take here ends most of a
search early.

They are a guess that the search proves: it looks at all that may be faster, and where that is too little, at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost_models.step import CostModel
from ..search_spaces.choices import FRAME
from ..search_spaces.layout import Layout, LayoutTable, Problem
from ..search_spaces.rules import violations

SLACK = 1e-6
"""Share of their time by which layouts may be slower as the search cuts them: rounding, or cuts that end a little beside these."""
PROBLEMS, OF_EACH = 32, 3
"""Models on devices that are remembered, and searches of each, the last ones."""


@dataclass
class KnownBest:
    """The best layouts of the last searches, cut as a search cuts them, by model, cluster and devices."""

    kept: OrderedDict[tuple[str, str, tuple[int, ...]], list[list[Layout]]] = field(default_factory=OrderedDict)

    def remember(self, problem: Problem, layouts: Sequence[Layout]) -> None:
        """Keeps the best layouts of a problem for the next one like it."""
        key = _key(problem)
        self.kept[key] = [list(layouts), *self.kept.pop(key, [])][:OF_EACH]
        if len(self.kept) > PROBLEMS:
            self.kept.popitem(last=False)

    def expected_s(self, model: CostModel, problem: Problem, top: int) -> float:
        """What so many frames of a problem come below with layouts known from others like it; infinite where fewer can run here."""
        layouts = list(_legal(problem, [layout for layouts in self.kept.get(_key(problem), []) for layout in layouts]))
        if len(layouts) < top:
            return np.inf
        priced = model.price(LayoutTable.from_layouts(layouts))
        steps = np.where(priced.fits, priced.step_time_s, np.inf).tolist()
        least: dict[tuple[int, ...], float] = {}
        for layout, step_s in zip(layouts, steps, strict=True):
            frame = tuple(getattr(layout, name) for name in FRAME)
            least[frame] = min(least.get(frame, np.inf), step_s)
        return sorted(least.values())[top - 1] * (1.0 + SLACK) if len(least) >= top else np.inf


def _key(problem: Problem) -> tuple[str, str, tuple[int, ...]]:
    return problem.model.model_dump_json(), problem.cluster.name, problem.allocated_sizes


def _legal(problem: Problem, layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Those of the layouts that the problem's batch can be dealt to and its rules allow, each once."""
    met = set[str]()
    for layout in layouts:
        count, rest = divmod(problem.workload.global_batch, layout.micro_batch * layout.dp)
        here = layout.model_copy(update={"num_microbatches": count})
        if count and not rest and repr(here) not in met and not violations(problem, here):
            met.add(repr(here))
            yield here

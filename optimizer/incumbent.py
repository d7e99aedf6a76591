"""Searches of changed problems that start from what is known: layouts priced there, whose times the search has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_models.profile import Profile
from ..cost_models.step import CostModel
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import Floats, Layout, LayoutTable, Problem, Split
from .deadline import NEVER, Deadline
from .found import Candidate, Found
from .recutting import settled
from .search import Search
from .stages import EQUAL, best_partitions, default_cuts, partitioned_exactly


@dataclass(frozen=True)
class Setting:
    """A problem with the profile that it is priced by, and until when questions about it may take."""

    problem: Problem
    profile: Profile
    deadline: Deadline = NEVER

    def model(self) -> CostModel:
        return CostModel(self.problem, self.profile)


def searched(setting: Setting, top: int = 1, ceiling_s: float = np.inf) -> Found:
    """The best frames of a setting that are faster than the ceiling.

    KeyboardInterrupt ends it without an answer, OutOfTime once the setting's deadline has passed.
    """
    setting.deadline.check()
    found = Search(Space(setting.problem), setting.model(), top, setting.deadline.left_s, ceiling_s).run()
    if not found.complete:
        setting.deadline.check()
        raise KeyboardInterrupt
    return found


def fastest(setting: Setting, known: Sequence[Layout] = ()) -> Candidate | None:
    """The fastest layout of a setting, None if nothing fits; `known` are legal layouts of it that the search need not repeat."""
    best = min((re_cut(setting, layout) for layout in known), key=lambda c: c.step_time_s, default=None)
    if best is None or not np.isfinite(best.step_time_s):
        best = None
    found = searched(setting, 1, np.inf if best is None else best.step_time_s * (1.0 - EQUAL))
    if found.best:
        moved = settled(setting.model(), found, setting.deadline, bounded=False)
        if not moved.whole:
            setting.deadline.check()
            raise KeyboardInterrupt
        best = moved.best[0]
    return best


def re_cut(setting: Setting, layout: Layout) -> Candidate:
    """A layout with the best stages that it has in a setting, by the search's rule or its own; infinite time where none fit."""
    model = setting.model()
    table = LayoutTable.from_layouts([layout])
    rows, split = model.rows(table), table.splits[0]
    if partitioned_exactly(setting.problem, table).all():
        best = best_partitions(model, rows, np.full(1, np.inf), model.usable_bytes)
        if not np.isfinite(best.time_s[0]):
            return Candidate(np.inf, layout)
        found = best.cuts
    else:
        found = np.stack([default_cuts(model, rows)[0], *([split.cuts] if layout.stages else [])])
    priced = model.price_cuts(rows.take(np.zeros(len(found), dtype=np.intp)), found)
    steps = np.where(priced.fits, priced.step_time_s, np.inf)
    cuts = tuple(int(c) for c in found[steps.argmin()])
    stages = Split(split.pp, split.vpp, cuts).stages(setting.problem.model.num_layers, layout.recompute)
    return Candidate(float(steps.min()), layout.model_copy(update={"stages": stages}))


def times_s(setting: Setting, layouts: Sequence[Layout], limit_bytes: float) -> Floats:
    """Step times of layouts with their stages as they are, (n,); infinite for those above the limit of a device."""
    priced = setting.model().price(LayoutTable.from_layouts(layouts))
    return np.where(priced.peak_bytes <= limit_bytes, priced.step_time_s, np.inf)


def same_choice(first: Layout, other: Layout) -> bool:
    """Whether two layouts differ in nothing but where stages are cut."""
    aside = {"stages", "overlap"}
    return first.model_dump(exclude=aside) == other.model_dump(exclude=aside)

"""Any layouts priced at their best partition, as branch and bound scores them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cost_models.loads import Cuts
from ...cost_models.rows import Rows
from ...cost_models.step import CostModel, same_shape
from ...search_spaces.layout import Floats, Layout, LayoutTable, Split
from ..bounds import least_after, row_bounds_bytes, row_bounds_s
from ..stages import EQUAL, balanced_cuts, best_partitions, default_cuts, partitioned_exactly


@dataclass(frozen=True)
class Refined:
    """Step time of each row at its best partition, infinite where none fits, (n,), and its cuts."""

    table: LayoutTable
    step_time_s: Floats
    cuts: tuple[Cuts, ...]

    def layout(self, row: int, num_layers: int) -> Layout:
        """The row with its stages."""
        layout = self.table.layout(row, num_layers)
        split = Split(layout.pp, layout.vpp, tuple(int(cut) for cut in self.cuts[row]))
        return layout.model_copy(update={"stages": split.stages(num_layers, layout.recompute)})


def refined(model: CostModel, rows: Rows) -> Refined:
    """Cuts every row into stages: 1F1B exactly, other schedules by their rule."""
    step_time_s = np.full(len(rows), np.inf)
    cuts: list[Cuts] = [np.empty(0, dtype=np.int64)] * len(rows)
    exact = partitioned_exactly(model.problem, rows.table)
    for members in same_shape(rows.table, depth=True):
        part = rows.take(members)
        found = _partitioned(model, part) if exact[members[0]] else _by_rule(model, part)
        step_time_s[members] = found[0]
        for member, each in zip(members.tolist(), found[1], strict=True):
            cuts[member] = each
    return Refined(rows.table, step_time_s, tuple(cuts))


def overflow_s(model: CostModel, rows: Rows) -> Floats:
    """A step time for rows that do not fit, longer the more memory they lack at least: what a sampler can descend, (n,)."""
    bound_s = row_bounds_s(model, rows, least_after(model, rows))
    return np.asarray(bound_s * (1.0 + np.maximum(row_bounds_bytes(model, rows) / model.usable_bytes, 1.0)))


def _partitioned(model: CostModel, part: Rows) -> tuple[Floats, Cuts]:
    overhead_s = model.problem.stack.step_overhead_s.value
    balanced = model.price_cuts(part, balanced_cuts(model, part, int(part.table.pp[0])))
    # What the balanced cuts take is a limit that the best ones meet; without one, every length of every stage is looked at.
    limit_s = np.where(balanced.fits, balanced.step_time_s * (1.0 + EQUAL) - overhead_s, np.inf)
    best = best_partitions(model, part, limit_s, model.usable_bytes)
    return best.time_s + overhead_s, best.cuts


def _by_rule(model: CostModel, part: Rows) -> tuple[Floats, Cuts]:
    cuts = default_cuts(model, part)
    priced = model.price_cuts(part, cuts)
    return np.where(priced.fits, priced.step_time_s, np.inf), cuts

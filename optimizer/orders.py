"""Rank orders that only Megatron-Core's Python API takes, beside those of flags that a plan is searched over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..cost_models.profile import Profile
from ..cost_models.step import CostModel
from ..search_spaces.groups import placed_alike
from ..search_spaces.layout import FLAG_RANK_ORDERS, RANK_ORDERS, Layout, LayoutTable, Problem
from ..search_spaces.rules import violations
from ..search_spaces.stack import MEGATRON_CORE
from .reports import wording

WORTH = 0.0005
"""Share of the step that an order has to spare to be spoken of: less is 0.0 % of it."""
OTHERS = f"{len(RANK_ORDERS) - len(FLAG_RANK_ORDERS)} other rank orders that only Megatron-Core's Python API takes"


def other_orders(problem: Problem, profile: Profile, layouts: Sequence[Layout]) -> str:
    """Whether orders beyond those of flags would make the layouts of a plan faster, best first, in words.

    Blank where all orders were searched, one is fixed, or the framework lays out ranks by itself. Layouts have their stages.
    """
    stack = problem.stack
    if (
        "rank_order" in problem.workload.fix
        or stack.framework not in MEGATRON_CORE
        or len(stack.rank_orders) > len(FLAG_RANK_ORDERS)
    ):
        return ""
    wide = problem.model_copy(update={"stack": stack.model_copy(update={"rank_orders": RANK_ORDERS})})
    model = CostModel(wide, profile)
    steps = [dict(_steps_s(model, layout)) for layout in layouts]
    own_s = min(step[layout.rank_order] for step, layout in zip(steps, layouts, strict=True))
    better = sorted(
        (step_s, place, order)
        for place, step in enumerate(steps)
        for order, step_s in step.items()
        if order not in FLAG_RANK_ORDERS and step_s <= own_s * (1.0 - WORTH)
    )
    for step_s, place, order in better:
        if not violations(wide, layouts[place].model_copy(update={"rank_order": order})):
            whose = f"alternative {place}" if place else "the plan's layout"
            gain = f"{order} gives {whose} {step_s:.4g} s, {wording.percent(1.0 - step_s / own_s)} less than the plan"
            return f"of the {OTHERS}, {gain}: --rank-order all searches them"
    none = f"none of the {OTHERS} makes a layout reported here {100 * WORTH:.2g} % faster than the plan"
    return f"{none}: --rank-order all searches them for others"


def _steps_s(model: CostModel, layout: Layout) -> Iterator[tuple[str, float]]:
    """The layout's step under its own order and every other that places its groups otherwise, and with which it fits."""
    orders = [layout.rank_order, *(order for order in RANK_ORDERS if order != layout.rank_order)]
    table = LayoutTable.from_layouts([layout.model_copy(update={"rank_order": order}) for order in orders])
    problem = model.problem
    units = problem.allocated_sizes[:-1]
    first = np.sort(np.unique(placed_alike(table, units, problem.model.is_moe, exact=True), return_index=True)[1])
    priced = model.price_cuts(model.rows(table.take(first)), np.array([table.splits[0].cuts]))
    for row, step_s, fits in zip(first.tolist(), priced.step_time_s.tolist(), priced.fits.tolist(), strict=True):
        if fits or row == 0:
            yield orders[row], step_s

"""Step time over the imbalance of the experts: what a fuller rank costs a layout."""

from __future__ import annotations

from collections.abc import Mapping

from ..cost_models.profile import load_profile
from ..cost_models.step import CostModel
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Layout, LayoutTable, Problem
from .supernode_result import StepAt

STEPS_AT = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Imbalances that the step time is shown for beside those that were asked for or measured."""
ASSUMED = "assumed by the plan"
MOST_IMBALANCE = 1000


def steps_at(
    problem: Problem,
    layout: Layout,
    named: Mapping[float, str],
    profile: str | None = None,
    crossings: Mapping[str, float] | None = None,
) -> tuple[StepAt, ...]:
    """The layout's step time at the problem's own imbalance of the experts and at others, each with its name, least first.

    `crossings` says by name how many copies of tokens leave a supernode over those under even routing.

    InputError for an imbalance that none can be, or a model without experts.
    """
    from .evaluation import switched, with_default_stages

    if not problem.model.is_moe:
        raise InputError(f"experts: {problem.model.name} has no experts")
    own = problem.workload.imbalance_at(layout.ep)
    points = {round(at, 4): (at, of) for at, of in sorted(named.items(), key=lambda item: item[1])}  # a name before none
    points[round(own, 4)] = (own, points.get(round(own, 4), (own, ""))[1] or ASSUMED)
    curves = load_profile(problem.cluster.accelerator.priced_as, profile)
    found = []
    for _, (at, of) in sorted(points.items()):
        if not 1 <= at <= MOST_IMBALANCE:
            raise InputError(f"expert imbalance {at:g}: must be from 1, every device as full as the others, to {MOST_IMBALANCE:,}")
        crossing = (crossings or {}).get(of, problem.workload.expert_crossing)
        spread = {"expert_imbalance": at, "imbalance_shape": {}, "expert_crossing": crossing}
        workload = problem.workload.model_copy(update=spread)
        model = CostModel(switched(problem.model_copy(update={"workload": workload}), layout), curves)
        staged = layout if layout.stages else with_default_stages(model, layout)
        priced = model.price(LayoutTable.from_layouts([staged]))
        found.append(StepAt(imbalance=at, step_time_s=float(priced.step_time_s[0]), of=of))
    return tuple(found)

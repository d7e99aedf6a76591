"""Step time over the imbalance of the experts: what a fuller rank costs a layout."""

from __future__ import annotations

from collections.abc import Mapping

from ..cost_models.memory import GIB, verdict
from ..cost_models.profile import load_profile
from ..cost_models.step import CostModel
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Layout, LayoutTable, Problem
from ..search_spaces.quantities import free_bytes
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
    points = dict(sorted(points.items()))
    curves = load_profile(problem.cluster.accelerator.priced_as, profile)
    models = []
    for at, of in points.values():
        if not 1 <= at <= MOST_IMBALANCE:
            raise InputError(f"expert imbalance {at:g}: must be from 1, every device as full as the others, to {MOST_IMBALANCE:,}")
        crossing = (crossings or {}).get(of, problem.workload.expert_crossing)
        spread = {"expert_imbalance": at, "imbalance_shape": {}, "expert_crossing": crossing}
        workload = problem.workload.model_copy(update=spread)
        models.append(CostModel(switched(problem.model_copy(update={"workload": workload}), layout), curves))
    staged = [layout if layout.stages else with_default_stages(model, layout) for model in models]
    priced = models[0].price_each(LayoutTable.from_layouts(staged), models)
    free_gib = free_bytes(problem.cluster) / GIB
    verdicts = [verdict(peak / GIB, free_gib) for peak in priced.peak_bytes.tolist()]
    each = zip(points.values(), priced.step_time_s.tolist(), verdicts, strict=True)
    return tuple(StepAt(imbalance=at, step_time_s=step_s, of=of, memory_verdict=fits) for (at, of), step_s, fits in each)

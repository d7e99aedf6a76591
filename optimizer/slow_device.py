"""One device slower than the others: which stage of a layout it does least harm in.

Inside its stage a slow device is waited for at every message of the TP, CP and EP groups that it is in, so that its stage takes as
long as if all were slow; other stages wait for it only through the pipeline, and other replicas before gradients are reduced. A
stage with less to do than the fullest therefore hides some of it.
"""

from __future__ import annotations

import numpy as np

from ..cost_models.pipeline import stage_ends_s
from ..cost_models.profile import Profile
from ..cost_models.step import CostModel
from ..search_spaces.layout import Floats, Layout, LayoutTable, Problem
from .ranks import placement
from .supernode_result import SlowPlace


def slow_place(slow: Problem, spared: Problem, profile: Profile, layout: Layout) -> SlowPlace:
    """The stage in which a device as slow as those of `slow` costs least, all others being those of `spared`.

    `layout` has its stages. Its step there is no longer than with every device slow, which is what the search priced.
    """
    steps = stage_steps_s(slow, spared, profile, layout)
    stage, worst = int(steps[:-1].argmin()), int(steps[:-1].argmax())
    columns = placement(layout, slow.cluster)
    rank = int(np.flatnonzero(columns["pp"] == stage)[0])
    return SlowPlace(
        stage=stage,
        rank=rank,
        host=int(columns["host"][rank]),
        step_time_s=float(steps[stage]),
        worst_stage=worst,
        worst_step_time_s=float(steps[worst]),
        spared_step_time_s=float(steps[-1]),
    )


def stage_steps_s(slow: Problem, spared: Problem, profile: Profile, layout: Layout) -> Floats:
    """The step with a slow device in each stage, and with none at the end, (pp + 1,)."""
    table = LayoutTable.from_layouts([layout])
    cuts, pp = np.array([table.splits[0].cuts]), layout.pp
    models = [CostModel(problem, profile) for problem in (spared, slow)]
    rows = [model.rows(table) for model in models]
    flows = [model.flow(row, cuts) for model, row in zip(models, rows, strict=True)]
    times = [model.around_pipeline(row, flow) for model, row, flow in zip(models, rows, flows, strict=True)]
    here = np.eye(pp + 1, pp, dtype=bool)

    def mixed(of_spared: Floats, of_slow: Floats) -> Floats:
        """Figures of stages, or of chunks dealt to them in turn: row s has those of the slow device in stage s."""
        return np.where(np.tile(here, len(of_slow[0]) // pp), of_slow, of_spared)

    forward, backward = (mixed(*(getattr(flow.chunks, name) for flow in flows)) for name in ("forward_s", "backward_s"))
    p2p_s, m = np.repeat(rows[0].p2p_s, pp + 1), np.full(pp + 1, layout.num_microbatches)
    ends = stage_ends_s(layout.schedule, pp, layout.vpp, forward, backward, p2p_s, m)
    done = ends + mixed(*(each.reduced_s for each in times))
    after = mixed(*(each.after_s for each in times))
    return np.asarray(done.max(axis=1) + after.max(axis=1) + models[0].problem.stack.step_overhead_s.value)

"""One device slower than the others: which stage of a layout it does least harm in.

Inside its stage a slow device is waited for at every message of the TP, CP and EP groups that it is in, so that its stage takes as
long as if all were slow; other stages wait for it only through the pipeline, and other replicas before gradients are reduced. A
stage with less to do than the fullest therefore hides some of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_models import replay
from ..cost_models.pipeline import stage_ends_s
from ..cost_models.profile import Profile
from ..cost_models.schedules import group_size, usual_schedule
from ..cost_models.step import CostModel
from ..cost_models.timeline import Work, stages_done_s
from ..search_spaces.choices import FRAME
from ..search_spaces.layout import Floats, Layout, LayoutTable, Problem
from .ranks import placement
from .result import RATES, PricedLayout
from .supernode_result import SlowPlace


@dataclass(frozen=True)
class _Mixed:
    """Seconds of one layout's passes and of what follows them, with the slow device in each stage, and with none at the end.

    By chunk (pp + 1, chunks), and by stage (pp + 1, pp).
    """

    forward_s: Floats
    backward_s: Floats
    reduced_s: Floats
    after_s: Floats
    p2p_s: float
    overhead_s: float

    def steps_s(self, ends_s: Floats) -> Floats:
        """The steps whose stages end their passes at `ends_s`, (pp + 1, pp)."""
        return np.asarray((ends_s + self.reduced_s).max(axis=1) + self.after_s.max(axis=1) + self.overhead_s)


def slow_place(slow: Problem, spared: Problem, profile: Profile, layout: Layout) -> SlowPlace:
    """The stage in which a device as slow as those of `slow` costs least, all others being those of `spared`.

    `layout` has its stages. Its step there is no longer than with every device slow.
    """
    steps = stage_steps_s(slow, spared, profile, layout)
    stage, worst = int(steps[:-1].argmin()), int(steps[:-1].argmax())
    columns = placement(layout, slow.cluster, sizes=slow.allocated_sizes)
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
    mixed, pp = _mixed(slow, spared, profile, layout), layout.pp
    p2p_s, m = np.full(pp + 1, mixed.p2p_s), np.full(pp + 1, layout.num_microbatches)
    asked = spared.stack.microbatch_group
    if group_size(layout.schedule, pp, layout.num_microbatches, asked) is None:
        return mixed.steps_s(stage_ends_s(layout.schedule, pp, layout.vpp, mixed.forward_s, mixed.backward_s, p2p_s, m))
    work = Work(mixed.forward_s.T, mixed.backward_s.T)
    return mixed.steps_s(replay.stage_ends_s(layout.schedule, pp, layout.vpp, work, p2p_s, m, group=asked).T)


def waiting(slow: Problem, spared: Problem, profile: Profile, priced: PricedLayout) -> tuple[PricedLayout, SlowPlace]:
    """A layout priced with no device slow, as it is with the slow one where it does least harm: what is waited is a bubble."""
    layout = priced.layout
    place = slow_place(slow, spared, profile, layout)
    longer = place.step_time_s / priced.step_time_s
    waited = {**priced.breakdown_s, "bubble": priced.breakdown_s["bubble"] + place.step_time_s - priced.step_time_s}
    low, high = priced.step_time_interval_s
    slower = {name: getattr(priced, name) / longer for name in RATES}
    changed = {
        "step_time_s": place.step_time_s,
        "step_time_interval_s": (low * longer, high * longer),
        "breakdown_s": waited,
        "level_utilisation": {level: share / longer for level, share in priced.level_utilisation.items()},
    }
    if priced.simulated_step_time_s is not None:
        mixed = _mixed(slow, spared, profile, layout)
        stack, m = spared.stack, layout.num_microbatches
        schedule = usual_schedule(layout.schedule, layout.pp, layout.vpp, m, stack.split_backward, stack.microbatch_group)
        passes = Work(mixed.forward_s[place.stage], mixed.backward_s[place.stage])
        ends = np.broadcast_to(stages_done_s(schedule, passes, mixed.p2p_s), mixed.reduced_s.shape)
        changed["simulated_step_time_s"] = float(mixed.steps_s(ends)[place.stage])
    return priced.model_copy(update={**slower, **changed}), place


def least_harmed(
    slow: Problem, spared: Problem, profile: Profile, priced: Sequence[PricedLayout], top: int
) -> tuple[list[PricedLayout], SlowPlace]:
    """Layouts priced with no device slow, as they are while they wait for one, the `top` fastest of different frames first to last;
    and where the fastest has the slow one.
    """
    found = sorted((waiting(slow, spared, profile, each) for each in priced), key=lambda each: each[0].step_time_s)
    of_frame: dict[tuple[int, ...], PricedLayout] = {}
    for each, _ in found:
        of_frame.setdefault(tuple(getattr(each.layout, name) for name in FRAME), each)
    return list(of_frame.values())[:top], found[0][1]


def slow_assumptions(place: SlowPlace | None) -> Iterator[str]:
    """What the figures of a plan that waits for a slow device are of."""
    if place is not None:
        yield (
            f"one device is slow: the plan's figures are with it in stage {place.stage}, alternatives' with it where it does least "
            f"harm to them; where nobody chooses its place the plan's step takes up to {place.worst_step_time_s:.4g} s (stage "
            f"{place.worst_stage}); the bound of the certificate, and whatever else reads this plan, are of no device slow"
        )


def _mixed(slow: Problem, spared: Problem, profile: Profile, layout: Layout) -> _Mixed:
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
    reduced, after = (mixed(*(getattr(each, name) for each in times)) for name in ("reduced_s", "after_s"))
    return _Mixed(forward, backward, reduced, after, float(rows[0].p2p_s[0]), models[0].problem.stack.step_overhead_s.value)

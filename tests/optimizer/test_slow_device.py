"""One slow device: the stage that it is in takes longer, the others wait only as the pipeline makes them."""

from __future__ import annotations

from io import StringIO

import numpy as np
import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.timeline import Work, replayed
from paraplan.optimizer.leftover import Left, ways
from paraplan.optimizer.planner import evaluate, order_of, plan
from paraplan.optimizer.reports.terminal import render
from paraplan.optimizer.slow_device import slow_place, stage_steps_s
from paraplan.search_spaces.degraded import slowed
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Layout, Problem
from rich.console import Console

SHARE = 0.8


def problems(model: str = "llama-3.1-8b") -> tuple[Problem, Problem]:
    """The job with every device slow, and with none."""
    whole = build_problem(model, "hgx-h100", 32, 64, 4096)
    return whole.model_copy(update={"cluster": slowed(whole.cluster, {"device": SHARE})}), whole


def staged(problem: Problem, layout: Layout) -> Layout:
    return evaluate(problem, layout)[0].layout


def steps_of(layout: Layout) -> tuple[list[float], float, float]:
    slow, whole = problems()
    profile = load_profile(whole.cluster.accelerator.name)
    steps = stage_steps_s(slow, whole, profile, layout).tolist()
    return steps, evaluate(whole, layout)[0].step_time_s, evaluate(slow, layout)[0].step_time_s


LAYOUTS = {
    "1f1b": Layout(tp=2, pp=4, dp=4, edp=8, num_microbatches=16),
    "interleaved": Layout(tp=2, pp=4, dp=4, edp=8, vpp=2, num_microbatches=16, schedule="interleaved"),
    "gpipe": Layout(tp=2, pp=4, dp=4, edp=8, num_microbatches=16, schedule="gpipe"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_step_lies_between_none_slow_and_all_slow(kind: str) -> None:
    steps, none, all_slow = steps_of(staged(problems()[1], LAYOUTS[kind]))
    assert len(steps) == 5
    assert steps[-1] == pytest.approx(none, rel=1e-12)
    assert all(none <= step <= all_slow * (1 + 1e-12) for step in steps)


def test_without_a_pipeline_all_wait_at_every_message() -> None:
    steps, none, all_slow = steps_of(staged(problems()[1], Layout(tp=8, dp=4, edp=32, num_microbatches=16)))
    assert steps == pytest.approx([all_slow, none])


def test_a_stage_with_little_to_do_hides_the_slow_device() -> None:
    """Of 32 layers on four stages the first has two: slow or not, the others set the pace, and all but its two passes hide."""
    slow, whole = problems()
    layout = staged(whole, LAYOUTS["1f1b"])
    cuts = [[0, 1], [2, 11], [12, 21], [22, 31]]
    stages = tuple(
        stage.model_copy(update={"chunks": (stage.chunks[0].model_copy(update={"layers": tuple(layers)}),)})
        for stage, layers in zip(layout.stages, cuts, strict=True)
    )
    layout = layout.model_copy(update={"stages": stages})
    steps, none, all_slow = steps_of(layout)
    assert int(np.argmin(steps[:-1])) == 0
    assert steps[0] < none * 1.02
    assert steps[3] > none * 1.1
    profile = load_profile(whole.cluster.accelerator.name)
    place = slow_place(slow, whole, profile, layout)
    assert (place.stage, place.rank, place.host) == (0, 0, 0)
    assert place.step_time_s == steps[0]
    assert place.worst_step_time_s == max(steps[:-1])
    assert all_slow > place.worst_step_time_s


@pytest.mark.parametrize("kind", LAYOUTS)
def test_steps_are_those_of_the_schedule_event_by_event(kind: str) -> None:
    """Passes of the slow stage's chunks from the one cluster, all others from the other, replayed pass by pass."""
    slow, whole = problems()
    layout = staged(whole, LAYOUTS[kind])
    steps, none, _ = steps_of(layout)
    fast, late = (detail(CostModel(problem), layout) for problem in (whole, slow))
    after = none - (replayed(order_of(whole, layout), fast.passes, fast.p2p_s).stage_end_s + fast.reduced_s).max()
    for stage in range(layout.pp):
        chunk_slow, stage_slow = np.arange(layout.pp * layout.vpp) % layout.pp == stage, np.arange(layout.pp) == stage
        forward, backward = (
            np.where(chunk_slow, getattr(late.passes, name), getattr(fast.passes, name)) for name in ("forward_s", "backward_s")
        )
        ends = replayed(order_of(whole, layout), Work(forward, backward), fast.p2p_s).stage_end_s
        expected = (ends + np.where(stage_slow, late.reduced_s, fast.reduced_s)).max() + after
        assert steps[stage] == pytest.approx(expected, rel=0.005)


def test_the_plan_says_where_to_put_it() -> None:
    """The way that waits is compared by its step with the device in its best stage."""
    whole = build_problem("llama-3.1-70b", "hgx-h100", 32, 64, 4096, fix="tp=4,pp=8,vpp=1,micro_batch=1,recompute=full")
    slow = whole.model_copy(update={"cluster": slowed(whole.cluster, {"device": SHARE})})
    left = Left((8, 8, 8, 8), None, load_cluster("hgx-h100"))
    found = plan(slow, left=left)
    assert found.devices_left is not None
    waiting = next(option for option in found.devices_left.options if "waiting" in option.words)
    assert waiting.slow is not None
    assert waiting.step_time_s == waiting.slow.step_time_s <= found.plan.step_time_s
    assert waiting.slow.spared_step_time_s < waiting.slow.step_time_s <= waiting.slow.worst_step_time_s
    assert sum(found.plan.breakdown_s.values()) == pytest.approx(found.plan.step_time_s, rel=1e-9)
    if found.devices_left.slow is not None:
        said = f"with it in stage {waiting.slow.stage}, as advised, the step is {waiting.slow.step_time_s:.3g} s"
        assert any(said in assumption for assumption in found.assumptions)
    alone = [way for way in ways(slow, left) if way.spared is None]
    assert all("without the slow one" in way.words for way in alone)


def test_the_headline_says_that_it_is_of_every_device_slow() -> None:
    """No place of the slow device takes as long as the step above, which the search priced: that is said beside it."""
    whole = build_problem("llama-3.1-70b", "hgx-h100", 128, 512, 4096, fix="tp=4,pp=4,vpp=1,micro_batch=1,cp=1,recompute=none")
    slow = whole.model_copy(update={"cluster": slowed(whole.cluster, {"device": 0.9})})
    found = plan(slow, left=Left((8,) * 16, None, load_cluster("hgx-h100")))
    assert found.devices_left is not None
    place = found.devices_left.slow
    assert place is not None
    assert place.step_time_s <= place.worst_step_time_s <= found.plan.step_time_s
    page = StringIO()
    render(found, Console(width=200, file=page))
    shown = page.getvalue()
    headline, words = shown.index("step time"), shown.index("that is if every device were slow")
    assert headline < words < shown.index("Layout")
    assert f"with the slow one in stage {place.stage}, as advised below" in shown

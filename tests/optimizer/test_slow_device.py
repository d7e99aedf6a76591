"""One slow device: the stage that it is in takes longer, the others wait only as the pipeline makes them."""

from __future__ import annotations

import json
from io import StringIO

import numpy as np
import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.timeline import Work, replayed
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate, order_of
from paraplan.optimizer.leftover import Left, ways
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.supernode import left_words, told_apart
from paraplan.optimizer.reports.terminal import render
from paraplan.optimizer.reports.wording import seconds
from paraplan.optimizer.result import Plan
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


def test_the_step_in_groups_that_the_stack_asks_for_is_the_price() -> None:
    slow, whole = (each.model_copy(update={"stack": each.stack.model_copy(update={"microbatch_group": 6})}) for each in problems())
    layout = staged(whole, LAYOUTS["interleaved"])
    steps = stage_steps_s(slow, whole, load_profile(whole.cluster.accelerator.name), layout)
    assert steps[-1] == pytest.approx(evaluate(whole, layout)[0].step_time_s, rel=1e-12)
    assert (steps[:-1] >= steps[-1]).all() and steps.max() <= evaluate(slow, layout)[0].step_time_s * (1 + 1e-12)


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


def slow_plan(devices: int, batch: int, fix: str, share: float = SHARE, top: int = 5) -> Plan:
    whole = build_problem("llama-3.1-70b", "hgx-h100", devices, batch, 4096, fix=fix)
    slow = whole.model_copy(update={"cluster": slowed(whole.cluster, {"device": share})})
    return plan(slow, left=Left((8,) * (devices // 8), None, load_cluster("hgx-h100")), top=top)


def test_the_plan_is_of_one_slow_device_where_it_does_least_harm() -> None:
    """What is waited for it is a bubble on top of the step that the same layout has without it."""
    found = slow_plan(32, 64, "tp=4,pp=8,vpp=1,micro_batch=1,recompute=full")
    assert found.devices_left is not None
    option, place = found.devices_left.options[0], found.devices_left.slow
    assert "waiting for the slow one" in option.words
    assert place is not None
    assert option.step_time_s == place.step_time_s == found.plan.step_time_s
    assert place.spared_step_time_s < place.step_time_s <= place.worst_step_time_s
    assert sum(found.plan.breakdown_s.values()) == pytest.approx(found.plan.step_time_s, rel=1e-9)
    spared, _ = evaluate(found.problem, found.plan.layout)
    waited = found.plan.breakdown_s["bubble"] - spared.breakdown_s["bubble"]
    assert waited == pytest.approx(place.step_time_s - spared.step_time_s, rel=1e-6)
    assert spared.step_time_s == pytest.approx(place.spared_step_time_s)
    longer = place.step_time_s / spared.step_time_s
    assert found.plan.mfu == pytest.approx(spared.mfu / longer)
    assert found.plan.simulated_step_time_s == pytest.approx(found.plan.step_time_s, rel=0.005)
    assert found.certificate.lower_bound_s <= spared.step_time_s * (1 + 1e-9)
    assert any(f"with it in stage {place.stage}, alternatives'" in assumption for assumption in found.assumptions)


def test_ways_to_go_on_with_a_slow_device_wait_for_it_or_do_without() -> None:
    slow, whole = problems()
    found = list(ways(slow, Left((8,) * 4, None, load_cluster("hgx-h100"))))
    waits, does_without = ([way for way in found if (way.slow is not None) == waiting] for waiting in (True, False))
    assert [(way.problem.devices, way.slow) for way in waits] == [(32, slow)]
    assert waits[0].problem.cluster.accelerator == whole.cluster.accelerator
    assert all("without the slow one" in way.words and way.problem.devices < 32 for way in does_without)


def test_a_layout_that_takes_longer_with_the_slow_device_is_told_apart_from_it_without() -> None:
    """TP 4 × PP 4 on 16 of 24 devices, the slow one among them or not; all 24 are there, and none of them is lost."""
    whole = build_problem("llama-3.1-70b", "hgx-h100", 24, 64, 4096, fix="tp=4,pp=4,vpp=1,micro_batch=1,cp=1,recompute=full")
    slow = whole.model_copy(update={"cluster": slowed(whole.cluster, {"device": SHARE})})
    left = plan(slow, left=Left((8,) * 3, None, whole.cluster), top=1).devices_left
    assert left is not None and left.whole is not None
    without, waiting = left.options[0], next(option for option in left.options if option.slow is not None)
    waiting = waiting.model_copy(update={"layout": without.layout})
    assert [option.step_time_s for option in told_apart((without, waiting))] == [without.step_time_s, waiting.step_time_s]
    assert left.whole.devices == 24
    assert " ".join(left_words(left)).startswith("24 devices are there: the plan uses 16 of them")


def test_alternatives_are_in_the_order_that_the_slow_device_leaves() -> None:
    found = slow_plan(128, 512, "tp=2|4,pp=4|8,vpp=1,micro_batch=1,cp=1,recompute=none", share=0.9, top=3)
    times = [priced.step_time_s for priced in (found.plan, *found.alternatives)]
    assert times == sorted(times)
    assert len(times) == 3


def test_the_headline_says_where_the_slow_device_is() -> None:
    """And what it costs in the worst place, which JSON has too, for those who do not choose."""
    found = slow_plan(128, 512, "tp=4,pp=4,vpp=1,micro_batch=1,cp=1,recompute=none", share=0.9)
    assert found.devices_left is not None
    place = found.devices_left.slow
    assert place is not None
    page = StringIO()
    render(found, Console(width=200, file=page))
    shown = page.getvalue()
    worst = f"{seconds(place.worst_step_time_s)} where it does most, stage {place.worst_stage}"
    words = f"this is with the slow device where it does least harm, stage {place.stage}; {worst}"
    assert place.worst_step_time_s > place.step_time_s * 1.01
    assert shown.index("step time") < shown.index(words) < shown.index("Layout")
    told = json.loads(found.to_json())
    assert told["devices_left"]["options"][0]["slow"]["worst_step_time_s"] == pytest.approx(place.worst_step_time_s)
    assert told["plan"]["step_time_s"] == place.step_time_s
    assert any(f"up to {place.worst_step_time_s:.4g} s (stage {place.worst_stage})" in said for said in told["assumptions"])


def test_a_slow_level_is_said_and_costs_what_crosses_it(capsys: pytest.CaptureFixture[str]) -> None:
    """DP across servers at 80 % of their links; the same layout takes as long as on a cluster of such links."""
    job = ["plan", "llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "32", "--seq-len", "4096"]
    fix = "tp=8,pp=1,cp=1,dp=2,micro_batch=2,recompute=full"
    assert main([*job, "--fix", fix, "--slow", "level=scale-out:0.8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        "every link of level scale-out carries 80 % of its bandwidth: groups across it follow the slowest" in found["assumptions"]
    )
    whole = build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096, fix=fix)
    slow = whole.model_copy(update={"cluster": slowed(whole.cluster, {"scale-out": 0.8})})
    step_s, whole_s = found["plan"]["step_time_s"], plan(whole).plan.step_time_s
    assert step_s == pytest.approx(plan(slow).plan.step_time_s)
    assert step_s > whole_s * 1.001

"""Buckets of gradients: the framework's own cost nothing more, small ones latency, large ones a tail that nothing hides."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from paraplan.cost_models.crossing import Crossing
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.search_spaces.groups import groups
from paraplan.search_spaces.inputs import build_problem, load_stack
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem

OWN = 256_000_000
"""Megatron-Core's own for 256 replicas: a million parameters each."""


def told(problem: Problem, bucket: int | None) -> Problem:
    return problem.model_copy(update={"stack": problem.stack.model_copy(update={"gradient_bucket": bucket})})


@cache
def wide() -> tuple[Problem, Layout]:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 512, 1024, 8192, framework="megatron-lm")
    return problem, complete(problem, parse_layout("tp=1,pp=2,micro_batch=1,recompute=full,optimizer_sharding=zero1"))


def step_s(bucket: int | None) -> float:
    problem, layout = wide()
    return evaluate(told(problem, bucket), layout)[0].step_time_s


def test_the_frameworks_own_size_costs_what_no_size_does() -> None:
    assert step_s(OWN) == pytest.approx(step_s(None), rel=1e-12)


def test_small_buckets_wait_for_latency_and_large_ones_leave_a_tail() -> None:
    """The best lies between; a bucket that holds a whole stage hides nothing of it."""
    times = [step_s(size) for size in (1_000_000, 10_000_000, 128_000_000, 1_000_000_000, 10_000_000_000)]
    assert times[:3] == sorted(times[:3], reverse=True) and times[2:] == sorted(times[2:]) and times[2] < step_s(None) < times[1]


@cache
def widest() -> tuple[Problem, Layout]:
    """1,024 replicas, for which Megatron-Core's own buckets are of 1.024 billion."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 1024, 2048, 8192, framework="megatron-lm")
    return problem, complete(problem, parse_layout("tp=1,pp=1,micro_batch=1,optimizer_sharding=zero1"))


def widest_group() -> tuple[CostModel, Crossing]:
    problem, layout = widest()
    model = CostModel(problem)
    return model, model.network.crossing(groups(LayoutTable.from_layouts([layout]), "dp"))


@pytest.mark.parametrize("bucket", [100_000_000, 256_000_000, 500_000_000])
def test_what_shows_is_no_less_than_the_last_bucket_and_the_first_gather(bucket: int) -> None:
    (problem, layout), (model, at) = widest(), widest_group()
    held = problem.model.parameters()
    size = np.array([held / np.ceil(held / bucket)])
    tail_s, head_s = model.network.reduce_scatter_s(at, 4 * size), model.network.all_gather_s(at, 2 * size)
    shown_s = evaluate(told(problem, bucket), layout)[0].breakdown_s["dp"]
    assert shown_s >= float(tail_s[0] + head_s[0]) * (1.0 - 1e-3)


def test_a_message_beyond_the_frameworks_own_number_waits_for_a_ring_over_all_ranks() -> None:
    """127 hops between servers and 896 inside them, less the 14 and 7 that one message's price has."""
    model, at = widest_group()
    curve = model.profile.collective_curve("scale-up", "reduce_scatter")
    inside_s, between_s = curve.hop_latency_s, model.network.latency[-1]
    assert inside_s is not None
    wait_s = float(model.network.flat_ring_s("reduce_scatter", at)[0])
    assert wait_s == pytest.approx((127 - 14) * between_s + (896 - 7) * inside_s.value, rel=1e-9)


def test_hundreds_of_buckets_round_a_thousand_ranks_never_pay() -> None:
    """Megatron-Core lets its buckets grow with the replicas for that reason: 804 of 10 million take a second in hops alone."""
    problem, layout = widest()
    own_s, small_s = (evaluate(told(problem, bucket), layout)[0].step_time_s for bucket in (None, 10_000_000))
    assert small_s > own_s + 0.5


def test_an_all_reduce_goes_up_and_down_trees() -> None:
    """Only scattering and gathering go round: without sharding a bucket more costs no ring."""
    problem, _ = widest()
    layout = complete(problem, parse_layout("tp=4,pp=1,micro_batch=1,optimizer_sharding=none"))
    own_s, small_s = (evaluate(told(problem, bucket), layout)[0].step_time_s for bucket in (None, 10_000_000))
    assert own_s < small_s < own_s + 0.1


def test_a_bucket_of_a_whole_stage_exposes_its_gradients_and_its_weights() -> None:
    problem, layout = wide()
    whole, apart = (told(problem, 10**11), problem.stack.overlap.model_copy(update={"dp_gradients": 0.0, "dp_parameters": 0.0}))
    bare = problem.model_copy(update={"stack": problem.stack.model_copy(update={"overlap": apart})})
    exposed, hidden, none = (evaluate(each, layout)[0].breakdown_s["dp"] for each in (whole, problem, bare))
    assert hidden < 0.5 * exposed and exposed <= none * (1.0 + 1e-9)


def test_without_replicas_or_overlap_a_bucket_changes_nothing() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, framework="megatron-lm")
    layout = complete(problem, parse_layout("tp=8,micro_batch=1"))
    assert evaluate(told(problem, 10**6), layout)[0] == evaluate(problem, layout)[0]
    problem, layout = wide()
    exposed = layout.model_copy(update={"overlap": {"dp_gradients": 0.0, "dp_parameters": 0.0}})
    assert evaluate(told(problem, 10**6), exposed)[0].step_time_s == evaluate(problem, exposed)[0].step_time_s


def test_only_frameworks_that_can_be_told_take_a_size() -> None:
    assert load_stack("megatron-lm").model_copy(update={"gradient_bucket": 1}).sends_buckets
    with pytest.raises(ValueError, match="are told how many parameters' gradients"):
        load_stack("torchtitan").model_validate(load_stack("torchtitan").model_dump() | {"gradient_bucket": 1})

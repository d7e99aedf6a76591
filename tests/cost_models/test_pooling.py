"""What measured pairs of stack and accelerator say of others: by hand where one pair speaks, by limits where several do."""

from __future__ import annotations

import math

import pytest
from paraplan.cost_models.pooling import LEAST_NUGGET, Pair, Pool, Seen, generation
from paraplan.cost_models.profile import PooledFigure, load_profile
from paraplan.search_spaces.cluster import Figure
from paraplan.search_spaces.inputs import load_stack

HOST = (0.5, 0.05, 0.1, 0.05, 0.1)
"""Shares of what is common to any, to a generation, an accelerator, a framework and a stack."""
NANOTRON = Pair("nanotron", "nanotron", "h100-80gb-sxm")
BRIDGE = Pair("megatron-bridge", "megatron-bridge", "gb200")
NEW = Pair("new", "new", "h100-80gb-sxm")


def pool(*seen: Seen) -> Pool:
    return Pool(seen, spread=0.8, shares=HOST)


def test_one_pair_speaks_for_another_by_what_they_share() -> None:
    """Both are on an H100: they share "any", the generation and the accelerator, 0.65 of the variance."""
    found = pool(Seen(NANOTRON, 1.0, 0.1)).prior(NEW)
    variance, shared = 0.8**2, 0.65 * 0.8**2
    weight = shared / (variance + 0.1 + LEAST_NUGGET)
    assert found.shift == pytest.approx(weight)
    assert found.spread == pytest.approx(math.sqrt(variance - weight * shared))


def test_factors_of_the_labels_multiply_to_the_prior() -> None:
    known = pool(Seen(NANOTRON, 1.0, 0.01), Seen(BRIDGE, 2.0, 0.3))
    factors = known.factors()
    for pair in (NEW, Pair("megatron-fsdp", "megatron-bridge", "gb300"), Pair("mine", "mine", "mi300x")):
        product = math.prod(factors.get(label, 1.0) for label in pair.labels)
        assert math.log(product) == pytest.approx(known.prior(pair).shift)


def test_a_badly_known_fit_says_little_and_none_says_nothing() -> None:
    sure, unsure = (pool(Seen(NANOTRON, 1.0, variance)).prior(NEW) for variance in (0.0, 100.0))
    assert unsure.shift < 0.01 < sure.shift
    assert unsure.spread == pytest.approx(0.8, rel=0.01) and sure.spread < 0.7
    assert pool().prior(NEW) == pool(Seen(NEW, 5.0, 0.0)).without(NEW).prior(NEW)
    assert (pool().prior(NEW).shift, pool().prior(NEW).spread) == (0.0, 0.8)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("b200", "gb300", True), ("h100-80gb-sxm", "h800", True), ("a100-40gb-sxm", "a100-80gb-sxm", True), ("h200", "b200", False)],
)
def test_generations(first: str, second: str, same: bool) -> None:
    assert (generation(first) == generation(second)) is same


def test_a_stack_that_nobody_measured_gets_pooled_figures_and_one_that_was_its_own() -> None:
    floor = PooledFigure(factors={"any": 2.0, "framework nanotron": 1.5}, spread=0.5, source="pooled from 3 fits")
    profile = load_profile("h100-80gb-sxm", fits=False).model_copy(update={"pooled": {"host_floor_dense_s": floor}})
    stack = load_stack("nanotron")
    found = profile.stack_figures(stack, "h100-80gb-sxm")["host_floor_dense_s"]
    assert found.value == pytest.approx(3.0 * stack.host_floor_dense_s.value)
    assert found.source.startswith("pooled from 3 fits") and found.low is not None and found.low < found.value
    own = {"efficiency": Figure(value=0.5, source="fitted", grade="measured")}
    measured = profile.model_copy(update={"stacks": {"nanotron": {"h100-80gb-sxm": own}}})
    assert measured.stack_figures(stack, "h100-80gb-sxm") == own


def test_what_was_measured_or_given_of_a_stack_is_not_pooled() -> None:
    floor = PooledFigure(factors={"any": 2.0}, spread=0.5, source="pooled")
    profile = load_profile("h100-80gb-sxm", fits=False).model_copy(update={"pooled": {"host_floor_dense_s": floor}})
    given = load_stack("nanotron").model_copy(update={"host_floor_dense_s": Figure(value=1e-3, source="mine", grade="given")})
    assert profile.stack_figures(given, "h100-80gb-sxm") == {}


def test_a_stack_measured_elsewhere_sustains_what_others_of_the_generation_do() -> None:
    """NeMo of 2025 was measured on GB200, never on B200: kernels of the generation fall short of their tables by as much."""
    stack = load_stack("nemo-25")
    pooled = load_profile("b200").stack_figures(stack, "b200")["efficiency"]
    assert pooled.value < 0.95 * stack.efficiency.value
    assert pooled.grade == "assumed" and "pooled from" in pooled.source

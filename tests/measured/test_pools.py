"""Published runs of every pool of families and of every stack (`draw.py` drew them): errors recorded of them may not grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.run_statistics import POOLS, Statistics, statistics
from paraplan.cost_models.validation import Outcome, outcomes_of, summarize

from .draw import stack_of

HERE = Path(__file__).parent
RECORDED = {
    ("A100 and H100, llm-foundry (FSDP)", "fit"): (0.02, 0.01),
    ("A100 and H100, llm-foundry (FSDP)", "test"): (0.04, 0.03),
    ("A100, Aleph Alpha", "fit"): (0.03, 0.03),
    ("A100, Aleph Alpha", "test"): (0.06, 0.06),
    ("A100, Megatron of 2021 and 2022 (sc21, korthikanti)", "fit"): (0.04, 0.04),
    ("A100, Megatron of 2021 and 2022 (sc21, korthikanti)", "test"): (0.10, 0.04),
    ("A100, bigscience", "fit"): (0.01, 0.01),
    ("A100, bigscience", "test"): (0.05, 0.02),
    ("A100, one server, small GPT models (vtrain-single)", "fit"): (0.12, 0.01),
    ("A100, one server, small GPT models (vtrain-single)", "test"): (0.10, 0.05),
    ("Ascend 910B (mindspeed-llm, mindformers)", "fit"): (0.11, 0.02),
    ("Ascend 910B (mindspeed-llm, mindformers)", "test"): (0.13, 0.12),
    ("B200, simumax", "fit"): (0.02, 0.02),
    ("B200, simumax", "test"): (0.01, 0.01),
    ("Blackwell, NVIDIA's MoE runs", "fit"): (0.02, 0.01),
    ("Blackwell, NVIDIA's MoE runs", "test"): (0.06, 0.02),
    ("Blackwell, NVIDIA's dense runs", "fit"): (0.02, 0.02),
    ("Blackwell, NVIDIA's dense runs", "test"): (0.06, 0.06),
    ("H100 and H200, other FSDP (torchtitan, kempner)", "fit"): (0.02, 0.01),
    ("H100 and H200, other FSDP (torchtitan, kempner)", "test"): (0.07, 0.06),
    ("H100, NVIDIA's MoE runs", "fit"): (0.04, 0.02),
    ("H100, NVIDIA's MoE runs", "test"): (0.06, 0.05),
    ("H100, NVIDIA's dense runs", "fit"): (0.02, 0.01),
    ("H100, NVIDIA's dense runs", "test"): (0.02, 0.02),
    ("H100, nanotron", "fit"): (0.14, 0.02),
    ("H100, nanotron", "test"): (0.03, 0.03),
}
"""Of each pool and split: the median error of step time, and the size of its bias, rounded up to whole per cents."""

OF_STACKS = {
    "aleph-alpha-flash1": (0.03, 0.03),
    "aleph-alpha-flash2": (0.06, 0.05),
    "aleph-alpha-flash2-rms": (0.02, 0.02),
    "aleph-alpha-fused": (0.01, 0.01),
    "aleph-alpha-torch": (0.20, 0.18),
    "kempnerforge": (0.05, 0.02),
    "llm-foundry": (0.03, 0.01),
    "megatron-bridge": (0.05, 0.02),
    "megatron-bridge-2025": (0.08, 0.04),
    "megatron-bridge-ep-overlap": (0.02, 0.01),
    "megatron-deepspeed": (0.08, 0.01),
    "megatron-deepspeed-2024": (0.10, 0.01),
    "megatron-deepspeed-bf16": (0.02, 0.01),
    "megatron-fsdp": (0.01, 0.01),
    "megatron-lm": (0.03, 0.02),
    "megatron-lm-2022": (0.04, 0.03),
    "megatron-simumax": (0.02, 0.01),
    "mindformers": (0.13, 0.03),
    "mindspeed-llm": (0.08, 0.02),
    "nanotron": (0.03, 0.02),
    "nemo-24": (0.03, 0.03),
    "nemo-25": (0.02, 0.01),
    "nemo-automodel": (0.02, 0.02),
    "torchtitan": (0.03, 0.01),
    "torchtitan-2024": (0.03, 0.01),
}
"""Likewise of each stack, both splits together: a stack that became 4 % slower or faster, and no better by it, is seen here."""


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return outcomes_of(read_runs(HERE / "pools_sample.csv"), read_shapes(HERE / "pools_models.json"))


@pytest.fixture(scope="module")
def pools(outcomes: list[Outcome]) -> dict[tuple[str, str], Statistics]:
    """Statistics of the sample by pool and split."""
    return {(pool, split): found for pool, split, found, _ in summarize(outcomes).pools()}


def test_the_sample_holds_rows_of_every_pool_and_split(pools: dict[tuple[str, str], Statistics]) -> None:
    assert set(pools) == set(RECORDED) == {(pool.name, split) for pool in POOLS for split in ("fit", "test")}


@pytest.mark.parametrize(("pool", "split"), RECORDED)
def test_recorded_errors_have_not_grown(pools: dict[tuple[str, str], Statistics], pool: str, split: str) -> None:
    time, (median, bias) = pools[pool, split].time, RECORDED[pool, split]
    assert time is not None and time.rows >= 3
    assert time.median <= median
    assert abs(time.bias) <= bias


def test_the_sample_holds_rows_of_every_stack_that_fits_serve(outcomes: list[Outcome]) -> None:
    assert {stack_of(outcome) for outcome in outcomes} == set(OF_STACKS)


@pytest.mark.parametrize("stack", OF_STACKS)
def test_recorded_errors_of_stacks_have_not_grown(outcomes: list[Outcome], stack: str) -> None:
    time, (median, bias) = statistics([o for o in outcomes if stack_of(o) == stack]).time, OF_STACKS[stack]
    assert time is not None and time.rows >= 3
    assert time.median <= median
    assert abs(time.bias) <= bias

"""Token exchanges between more supernodes than were measured: found, told, and in the upper end of the step's interval."""

from __future__ import annotations

import pytest
from paraplan.cost_models.exchanges import exchanges
from paraplan.cost_models.reach import unmeasured_supernodes
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.assumptions import exchange_assumptions, schedule_assumptions
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem


def laid(cluster: str, words: str) -> tuple[Problem, Layout]:
    problem = build_problem("deepseek-v3", cluster, 256, 1024, 4096)
    return problem, complete(problem, parse_layout(words))


@pytest.mark.parametrize(
    ("cluster", "words", "supernodes"),
    [
        ("hgx-h100", "pp=4,ep=32", 0),  # four servers, as measured
        ("hgx-h100", "pp=4,ep=64", 8),
        ("hgx-h100", "tp=2,pp=4,ep=32,rank_order=tp-cp-ep-dp-pp", 0),  # experts take the place of TP: etp is 1
        ("three-tier-h100", "pp=4,ep=64", 0),  # the cluster says what its spine carries
        ("gb200-nvl72", "pp=4,ep=64", 0),  # at most two racks
    ],
)
def test_exchanges_beyond_what_was_measured_are_found(cluster: str, words: str, supernodes: int) -> None:
    problem, layout = laid(cluster, words)
    assert unmeasured_supernodes(CostModel(problem).network, layout) == supernodes


def test_they_are_told_and_widen_the_interval_by_what_a_congested_network_would_take() -> None:
    highs = []
    for words in ("pp=4,ep=32", "pp=4,ep=64"):
        problem, layout = laid("hgx-h100", words)
        priced, _ = evaluate(problem, layout)
        told = list(exchange_assumptions(CostModel(problem), priced))
        high = priced.step_time_interval_s[1]
        added = (exchanges().congested.value - 1) * priced.breakdown_s["ep"] * bool(told)
        highs.append((told, (high - added) / priced.step_time_s))
    (within, of_few), (beyond, of_many) = highs
    assert not within
    assert "8 supernodes" in beyond[0]
    assert of_many == pytest.approx(of_few)


@pytest.mark.parametrize(
    ("words", "stack", "told"),
    [
        # Of the first stage 2·(pp−1) + (vpp−1)·pp + 1 forwards come before the first pair.
        ("pp=4,vpp=2,ep=8,num_microbatches=32", "megatron-bridge-ep-overlap", "11 of 64 forwards"),
        ("ep=8,num_microbatches=16", "megatron-bridge-ep-overlap", "1 of 16 forwards"),
        ("pp=4,vpp=2,ep=8,num_microbatches=32", "megatron-bridge", ""),
        ("pp=4,vpp=2,num_microbatches=32", "megatron-bridge-ep-overlap", ""),
    ],
)
def test_exchanges_of_passes_that_run_beside_none_are_told(words: str, stack: str, told: str) -> None:
    problem = build_problem("qwen3-30b-a3b", "hgx-h100", 16, 256, 4096, stack)
    said = schedule_assumptions(problem, complete(problem, parse_layout(words)))
    assert len(said) == bool(told) and all(told in each for each in said), said

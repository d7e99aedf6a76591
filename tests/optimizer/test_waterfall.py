"""Waterfalls: bars add up to the difference, decisions do not depend on which end is called first, and what is drawn says so."""

from __future__ import annotations

import io
import math
import random
import sys
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import price_layout, with_default_stages
from paraplan.optimizer.reports.waterfall import render_compared
from paraplan.optimizer.result import PricedLayout
from paraplan.optimizer.waterfall import DECISIONS, MOST_ORDERED, _Walk, changed_columns, compare_layouts, waterfall
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Split
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import random_problem


def random_pair(seed: int) -> tuple[CostModel, PricedLayout, PricedLayout] | None:
    """Two legal layouts of a random problem, priced; None if it has fewer."""
    problem, rng = random_problem(seed), random.Random(seed)
    space = Space(problem)
    if space.listed < 2:
        return None
    table = space.layouts(np.arange(len(space.frames)))[0]
    model = CostModel(problem)
    rows = rng.sample(range(len(table)), 2)
    first, second = (with_default_stages(model, table.layout(row, problem.model.num_layers)) for row in rows)
    return model, price_layout(model, first, simulated=False), price_layout(model, second, simulated=False)


@cache
def pairs() -> list[tuple[CostModel, PricedLayout, PricedLayout]]:
    return [pair for pair in map(random_pair, range(24)) if pair][:10]


def test_bars_add_up_to_the_difference_and_turn_round_with_the_ends() -> None:
    interacting = 0
    for model, first, second in pairs():
        there, back = waterfall(model, first, second), waterfall(model, second, first)
        step, peak = max(first.step_time_s, second.step_time_s), max(first.memory.peak_gib, second.memory.peak_gib)
        difference = second.step_time_s - first.step_time_s
        assert there.difference_s == difference
        assert abs(math.fsum(bar.seconds for bar in there.terms) - difference) <= 1e-12 * step
        assert [one.column for one in there.decisions] == [one.column for one in back.decisions]
        if there.decisions:
            assert abs(math.fsum(one.seconds for one in there.decisions) - difference) <= 1e-12 * step
            more = second.memory.peak_gib - first.memory.peak_gib
            assert abs(math.fsum(one.peak_gib for one in there.decisions) - more) <= 1e-12 * peak
        for one, other in zip(there.decisions, back.decisions, strict=True):
            assert (one.first, one.second) == (other.second, other.first)
            assert abs(one.seconds + other.seconds) <= 1e-9 * step
        assert 0 <= there.unusable <= there.between
        interacting += len(there.decisions) > 1
    assert interacting > len(pairs()) / 2


def test_terms_are_the_difference_of_the_breakdowns() -> None:
    for model, first, second in pairs()[:6]:
        for bar in waterfall(model, first, second).terms:
            assert (bar.first_s, bar.second_s) == (first.breakdown_s[bar.term], second.breakdown_s[bar.term])
            assert bar.seconds == pytest.approx(bar.second_s - bar.first_s, abs=1e-12 * first.step_time_s)


def test_a_share_is_the_mean_over_all_orders() -> None:
    """Against the definition: every order walked, one column after the other."""
    checked = 0
    for model, first, second in pairs():
        walk = _Walk(model, first, second)
        if not 2 <= len(walk.changed) <= 4 or checked > 5:
            continue
        value, each = walk.step_time_s, dict.fromkeys(walk.changed, 0.0)
        orders = list(permutations(walk.changed))
        for order in orders:
            for place, name in enumerate(order):
                each[name] += value[frozenset(order[: place + 1])] - value[frozenset(order[:place])]
        expected = [each[name] / len(orders) for name in walk.changed]
        assert walk.shares(value) == pytest.approx(expected, abs=1e-12 * max(value.values()))
        checked += 1
    assert checked > 3


def test_layouts_in_between_cost_what_they_cost_alone() -> None:
    """A state whose columns make a legal layout on as many devices has that layout's price, cut as the end with as many stages."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    model = CostModel(problem)
    first = Layout(tp=2, dp=8, edp=16, num_microbatches=8, sequence_parallel=True)
    second = Layout(pp=4, dp=4, edp=4, micro_batch=2, num_microbatches=8, sequence_parallel=False)
    priced = [price_layout(model, with_default_stages(model, layout), simulated=False) for layout in (first, second)]
    walk = _Walk(model, *priced)
    assert walk.changed == ("tp", "pp", "micro_batch")
    both = Layout(tp=2, pp=4, dp=2, edp=4, micro_batch=2, num_microbatches=16, sequence_parallel=True)
    for taken, layout in (
        ({"pp", "micro_batch"}, both),
        ({"pp"}, both.model_copy(update={"micro_batch": 1, "num_microbatches": 32})),
    ):
        alone = price_layout(model, layout.model_copy(update={"stages": priced[1].layout.stages}), simulated=False)
        assert walk.step_time_s[frozenset(taken)] == pytest.approx(alone.step_time_s, rel=1e-12)
        assert walk.peak_gib[frozenset(taken)] == pytest.approx(alone.memory.peak_gib, rel=1e-12)


def test_a_layout_that_needs_more_devices_takes_turns() -> None:
    """TP 16 and PP 16 on 16 devices: both at once need 256, and count sixteen times."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    model = CostModel(problem)
    ends = (
        Layout(tp=16, edp=16, num_microbatches=64, sequence_parallel=True),
        Layout(pp=16, num_microbatches=64, sequence_parallel=False),
    )
    walk = _Walk(model, *(price_layout(model, with_default_stages(model, end), simulated=False) for end in ends))
    (layout, _, turns) = walk._layout(frozenset({"pp"}))
    assert (layout.tp, layout.pp, layout.dp, turns) == (16, 16, 1, 16.0)
    assert not walk.usable[walk.states.index(frozenset({"pp"})) - 1]


def test_more_decisions_than_are_ordered_are_walked_one_way_and_back() -> None:
    problem = build_problem("deepseek-v3", "hgx-h800", 512, 1024, 4096)
    model = CostModel(problem)
    first = Layout(pp=16, dp=32, ep=8, edp=4, num_microbatches=32, sequence_parallel=False)
    changed = {"tp": 2, "cp": 2, "pp": 8, "dp": 16, "ep": 16, "edp": 4, "vpp": 2, "micro_batch": 2, "num_microbatches": 32}
    more = {"recompute": "full", "optimizer_sharding": "none", "schedule": "interleaved", "sequence_parallel": True}
    second = Layout.model_validate({**changed, **more})
    ends = [price_layout(model, with_default_stages(model, layout), simulated=False) for layout in (first, second)]
    there, back = waterfall(model, *ends), waterfall(model, *reversed(ends))
    assert len(there.decisions) > MOST_ORDERED
    assert there.between == 2 * (len(there.decisions) - 1)
    assert there.averaged.startswith("the mean over one order, tp, cp, pp")
    assert math.fsum(one.seconds for one in there.decisions) == pytest.approx(there.difference_s, abs=1e-12 * ends[0].step_time_s)
    for one, other in zip(there.decisions, back.decisions, strict=True):
        assert one.seconds == pytest.approx(-other.seconds, abs=1e-9 * ends[0].step_time_s)


def test_what_follows_is_no_decision() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    first = Layout(tp=2, pp=2, dp=4, edp=8, num_microbatches=16, sequence_parallel=True)
    second = first.model_copy(update={"tp": 1, "dp": 8, "num_microbatches": 8, "sequence_parallel": False, "cp_type": "allgather"})
    assert changed_columns(problem, first, second) == ("tp",)
    fewer = first.model_copy(update={"dp": 2, "edp": 4, "num_microbatches": 32})
    assert changed_columns(problem, first, fewer) == ("devices_used",)
    wide = Layout(tp=2, pp=5, dp=1, edp=2, num_microbatches=64, sequence_parallel=True)
    assert changed_columns(problem, first, wide) == ("pp",)  # ten of the sixteen devices are what pp leaves room for
    interleaved = first.model_copy(update={"vpp": 2, "schedule": "interleaved"})
    assert changed_columns(problem, first, interleaved) == ("vpp",)
    off = first.model_copy(update={"sequence_parallel": False})
    assert changed_columns(problem, first, off) == ("sequence_parallel",)
    cuts = [first.model_copy(update={"stages": Split(2, 1, cut).stages(8, "none")}) for cut in ((0, 4, 8), (0, 5, 8))]
    assert changed_columns(problem, *cuts) == ("stages",)
    assert changed_columns(problem, first, first) == ()
    assert set(DECISIONS) >= {"tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "recompute"}


@pytest.mark.parametrize("width", [80, 160])
def test_the_picture_keeps_to_its_width_and_names_both_ends(width: int) -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    first = Layout(tp=2, dp=8, edp=16, num_microbatches=8, sequence_parallel=True)
    second = Layout(pp=4, dp=4, edp=4, micro_batch=16, num_microbatches=1, sequence_parallel=False)
    found = compare_layouts(problem, first, second)
    assert any("peak memory" in sentence for sentence in found.second_broken)
    stream = io.StringIO()
    render_compared(found, ("plan.json", "pp=4,micro_batch=16"), Console(file=stream, width=width))
    text = stream.getvalue()
    assert all(len(line) <= width and line == line.rstrip() for line in text.splitlines())
    for words in (
        "from  plan.json",
        "to    pp=4,micro_batch=16",
        "By term",
        "By decision",
        "1 → 4",
        "is more than the usable",
        "Shapley",
        "Memory and traffic",
        "weights ",
    ):
        assert words in text
    bars = [line for line in text.partition("By decision")[2].splitlines() if "█" in line]
    assert len(bars) == 2 + len(found.waterfall.decisions)

"""Changed hardware: every figure is the plan of the changed problem, and thresholds lie where the winner changes."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.changes import faster_compute, faster_level, faster_memory, more_devices, more_memory, slower_levels
from paraplan.optimizer.incumbent import Setting, fastest, re_cut, same_choice, searched
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.further import differences
from paraplan.optimizer.result import Plan, Sensitivity
from paraplan.optimizer.sensitivity import DIGITS, Knob, sensitivity, threshold
from paraplan.search_spaces.inputs import build_problem

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import random_problem

GIB = 2.0**30
PROFILE = load_profile("h100-80gb-sxm")  # that of all problems here
FIX = (
    "micro_batch=1,vpp=1,recompute=none|full,offload=none,cp=1,tp=1|2|4,pp=1|2|4,rank_order=tp-cp-ep-dp-pp,optimizer_sharding=zero1"
)


def setting(devices: int = 16) -> Setting:
    problem = build_problem("llama-3.1-8b", "hgx-h100", devices, 64, 4096, fix=FIX)
    return Setting(problem, PROFILE)


@pytest.fixture(scope="module")
def asked() -> tuple[Setting, Plan, Sensitivity]:
    """A small plan with its sensitivity, and how often progress was told."""
    here = setting()
    found = plan(here.problem)
    shares: list[float] = []
    answer = sensitivity(here, found.plan.layout, found.plan.step_time_s, shares.append)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    return here, found, answer


CHANGES = {
    "+1 GiB of memory": lambda s: more_memory(s, GIB),
    "+10 % compute": lambda s: faster_compute(s, 1.1),
    "+10 % memory bandwidth": lambda s: faster_memory(s, 1.1),
    "+10 % server bandwidth": lambda s: faster_level(0)(s, 1.1),
    "+10 % scale-out bandwidth": lambda s: faster_level(1)(s, 1.1),
    "−1 µs server latency": lambda s: slower_levels((0,))(s, -1e-6),
    "−1 µs scale-out latency": lambda s: slower_levels((1,))(s, -1e-6),
    "+8 devices": lambda s: more_devices(s, 8),
    "−8 devices": lambda s: more_devices(s, -8),
}


def test_every_row_is_a_plan_of_the_changed_problem(asked: tuple[Setting, Plan, Sensitivity]) -> None:
    here, found, answer = asked
    assert [row.change for row in answer.table] == list(CHANGES)
    for row in answer.table:
        changed = CHANGES[row.change](here)
        again = searched(changed).best[0].step_time_s
        assert row.step_time_s == pytest.approx(again, rel=1e-8)
        assert row.difference == pytest.approx(again / found.plan.step_time_s - 1.0, abs=1e-8)
    gib = next(row for row in answer.table if row.change.startswith("+1 GiB"))
    assert gib.step_time_s == pytest.approx(plan(more_memory(here, GIB).problem).plan.step_time_s, rel=1e-8)


def test_better_hardware_is_never_slower(asked: tuple[Setting, Plan, Sensitivity]) -> None:
    for row in asked[2].table:
        if "devices" not in row.change:
            assert row.difference is not None and row.difference <= 1e-9
    here = asked[0]
    for change in (faster_compute, faster_memory, faster_level(0), faster_level(1)):
        times = [searched(change(here, factor)).best[0].step_time_s for factor in (0.5, 1.0, 2.0)]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


def test_the_winner_changes_at_a_threshold_and_not_before(asked: tuple[Setting, Plan, Sensitivity]) -> None:
    here, found, answer = asked
    moves = {
        "memory": lambda s, gib: more_memory(s, gib * GIB),
        "compute": faster_compute,
        "memory bandwidth": faster_memory,
        "server bandwidth": faster_level(0),
        "scale-out bandwidth": faster_level(1),
        "server latency": lambda s, us: slower_levels((0,))(s, us * 1e-6),
        "scale-out latency": lambda s, us: slower_levels((1,))(s, us * 1e-6),
    }
    assert {row.name for row in answer.thresholds} == set(moves)
    changing = [row for row in answer.thresholds if row.changes_at is not None]
    assert changing, "a threshold to look at"
    for row in answer.thresholds:
        if row.changes_at is None or row.holds_to is None:
            best = fastest(moves[row.name](here, row.end))
            assert best is not None and best.step_time_s >= own_s(here, found, moves[row.name], row.end) * (1 - 1e-5)
            continue
        before, after = (searched(moves[row.name](here, value)).best for value in (row.holds_to, row.changes_at))
        assert before[0].step_time_s >= own_s(here, found, moves[row.name], row.holds_to) * (1 - 1e-5)
        scale = 16.0 if row.unit == "GiB" else max(row.holds_to, row.changes_at)
        assert abs(row.holds_to - row.changes_at) <= DIGITS * scale
        if row.layout is None:
            assert not after
        else:
            assert not same_choice(after[0].layout, found.plan.layout)
            assert after[0].step_time_s < own_s(here, found, moves[row.name], row.changes_at)
            assert differences(found.plan.layout, row.layout)


def own_s(here: Setting, found: Plan, change: object, value: float) -> float:
    """What the plan's own layout takes at some value."""
    return re_cut(change(here, value), found.plan.layout).step_time_s  # type: ignore[operator]


def test_a_knob_that_nothing_depends_on_has_no_threshold() -> None:
    here = setting()
    best = searched(here).best[0].layout
    still = Knob("nothing", "×", lambda s, factor: s, 1.1, "", 1.0, (4.0,))
    found = threshold(here, best, still, 4.0)
    assert found.holds_to is None and found.changes_at is None


def test_less_memory_until_nothing_fits() -> None:
    fix = "tp=2,pp=1,dp=1,cp=1,micro_batch=1,recompute=full,offload=none,optimizer_sharding=zero1"
    problem = build_problem("llama-3.1-8b", "hgx-h100", 2, 64, 4096, fix=fix, memory_margin=0.0)
    here = Setting(problem, PROFILE)
    best = searched(here).best
    assert best, "the sample fits as it is"
    knob = Knob("memory", "GiB", lambda s, gib: more_memory(s, gib * GIB), 1.0, "", 0.0, (-40.0,))
    found = threshold(here, best[0].layout, knob, -40.0)
    assert found.layout is None and found.changes_at is not None and found.holds_to is not None
    assert not searched(more_memory(here, found.changes_at * GIB)).best
    assert searched(more_memory(here, found.holds_to * GIB)).best


@pytest.mark.parametrize("seed", [18])
def test_a_search_that_starts_from_a_known_layout_finds_the_same(seed: int) -> None:
    problem = random_problem(seed)
    here = Setting(problem, PROFILE)
    free = searched(here, top=3).best
    for known in free:
        best = fastest(here, [known.layout])
        assert best is not None and best.step_time_s == pytest.approx(free[0].step_time_s, rel=1e-8)
        assert re_cut(here, known.layout).step_time_s == pytest.approx(known.step_time_s, rel=1e-8)
    assert searched(here, 1, free[0].step_time_s * (1 - 1e-6)).best == []

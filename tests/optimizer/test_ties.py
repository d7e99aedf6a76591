"""Ties: what lies within the noise of ranking, and the measurement that would decide."""

from __future__ import annotations

import re

import pytest
from paraplan.cost_models.profile import Intervals, Profile, load_profile
from paraplan.optimizer.ties import ties

from .sample_plan import sample_plan
from .test_terminal import shown

PLAN = sample_plan()


def profile(noise: float | None) -> Profile:
    known = Intervals() if noise is None else Intervals(ranking={"moe": noise})
    return load_profile(PLAN.problem.cluster.accelerator.name).model_copy(update={"intervals": known})


@pytest.mark.parametrize(("noise", "count"), [(None, 0), (0.0001, 0), (0.03, 1), (10.0, len(PLAN.alternatives))])
def test_alternatives_within_the_noise_of_ranking_are_ties(noise: float | None, count: int) -> None:
    found = ties(PLAN.problem, profile(noise), PLAN.plan, PLAN.alternatives)
    assert [tie.alternative for tie in found] == list(range(count))
    assert all(tie.slower <= tie.noise == noise for tie in found)


def test_the_term_that_differs_most_names_the_measurement() -> None:
    """The third alternative spends more on its all-to-all, over 128 experts' ranks."""
    found = ties(PLAN.problem, profile(10.0), PLAN.plan, PLAN.alternatives)
    assert re.match(r"ep differs most .*: measure a EP 128 all-to-all (inside|across)", found[2].decided_by)
    assert found[3].decided_by.startswith("tp differs most") and "TP 4 all-gather" in found[3].decided_by


def test_two_layouts_with_equal_terms_are_decided_by_running_both() -> None:
    twin = PLAN.plan.model_copy(update={"step_time_s": PLAN.plan.step_time_s * 1.0001})
    (tie,) = ties(PLAN.problem, profile(0.01), PLAN.plan, [twin])
    assert "run both for 20 steps" in tie.decided_by and "no term differs" in tie.decided_by


@pytest.mark.parametrize(("aim", "found"), [("goodput", [0]), ("cost", [0]), ("memory", []), ("devices", [1])])
def test_ties_are_told_in_the_aim_that_leads(aim: str, found: list[int]) -> None:
    """Of what follows from the step time by its noise, of what is counted where it is equal; of peaks nobody measured it."""
    best, *others = (PLAN.plan.model_copy(update={"aims": {aim: figure}}) for figure in (100.0, 102.0, 100.0))
    others = others if aim == "devices" else others[:1]
    told = ties(PLAN.problem, profile(0.03), best, others, aim)
    assert [(tie.alternative, tie.aim) for tie in told] == [(place, aim) for place in found]
    assert [tie.more for tie in told] == pytest.approx([0.0 if aim == "devices" else 0.02 for _ in told])


def test_the_terminal_says_which_are_ties_and_the_plan_stays_the_shortest() -> None:
    found = ties(PLAN.problem, profile(0.03), PLAN.plan, PLAN.alternatives)
    for width in (80, 160):
        text = " ".join(shown(PLAN.model_copy(update={"ties": found}), width).split())
        assert "tie: " in text
        assert "commonly off by 3.0 % against each other" in text and "1 alternative may be as fast" in text
    assert "tie: " not in shown(PLAN, 160)
    assert PLAN.plan.step_time_s < min(one.step_time_s for one in PLAN.alternatives)

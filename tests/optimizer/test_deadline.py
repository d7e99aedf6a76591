"""One time limit over all that is asked: what is answered by then stands, the rest is said."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cache

import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer import further, robust, sensitivity
from paraplan.optimizer.aims import parse_aims
from paraplan.optimizer.cli import main
from paraplan.optimizer.deadline import Deadline
from paraplan.optimizer.further import Questions, answered
from paraplan.optimizer.incumbent import Setting
from paraplan.optimizer.interrupts import OutOfTime
from paraplan.optimizer.planner import plan
from paraplan.optimizer.result import Plan
from paraplan.optimizer.study import Refine
from paraplan.search_spaces.inputs import build_problem

PROFILE = load_profile("h100-80gb-sxm")  # that of all problems here
NARROW = "pp=1|2,cp=1,micro_batch=1,recompute=none|full"
ALL = Questions(parse_aims("step-time,memory"), sensitivity=True, robust=True, refine=Refine(trials=32))


@cache
def found() -> Plan:
    return plan(build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix=NARROW))


@dataclass(frozen=True)
class Countdown(Deadline):
    """A deadline that passes once it was looked at so many times."""

    left: list[int] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        self.left[0] -= 1
        return self.left[0] < 0


def ask(deadline: Deadline, asked: Questions = ALL) -> Plan:
    return answered(found(), PROFILE, asked, deadline=deadline)


def test_what_there_is_no_time_for_is_said() -> None:
    late = ask(Deadline(2.0, time.monotonic() - 1.0))
    assert [said.split()[0] for said in late.unanswered] == ["sensitivity", "robust", "refine", "objective"]
    assert all("the time limit of 2 s had passed" in said for said in late.unanswered)
    assert (late.sensitivity, late.robust, late.refined, late.front) == (None, None, None, None)
    assert late.plan == found().plan and late.certificate == found().certificate


def test_an_interrupt_before_leaves_nothing_to_be_taken_up() -> None:
    late = ask(Deadline(heard=-1))
    assert len(late.unanswered) == 4 and all("interrupted" in said for said in late.unanswered)


@pytest.mark.parametrize("looks", [8, 30])
def test_what_is_answered_in_time_stands(looks: int) -> None:
    some = ask(Countdown(limit_s=1.0, left=[looks]), Questions(ALL.aims, sensitivity=True))
    knobs = list(sensitivity._knobs(Setting(found().problem, PROFILE)))
    assert some.sensitivity is not None
    table, thresholds = some.sensitivity.table, some.sensitivity.thresholds
    assert 0 < len(table) + len(thresholds) == len(knobs) + sum(len(knob.ends) for knob in knobs) - some.sensitivity.unanswered
    assert some.sensitivity.unanswered > 0 and [row.change for row in table] == [knob.said for knob in knobs[: len(table)]]
    assert [said.split()[0] for said in some.unanswered] == ["sensitivity", "objective"]


def test_an_interrupt_keeps_what_was_found_and_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    winners, calls = robust._winners, []

    def winners_of_two(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return winners(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(robust, "_winners", winners_of_two)
    some = ask(Deadline(), Questions(ALL.aims, robust=True))
    assert some.robust is not None and len(some.robust.scenarios) == 3 and len(some.robust.untried) > 3
    assert len(some.robust.robust.regrets) == 3 and some.front is None
    assert [said.partition(":")[2].strip() for said in some.unanswered] == ["interrupted", "interrupted"]


def test_a_front_that_is_stopped_says_so_and_holds_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise OutOfTime

    monkeypatch.setattr(further, "exact_front", stopped)
    some = ask(Deadline(), Questions(ALL.aims))
    assert some.front and some.front_certificate and some.front_certificate.stopped
    assert "stopped" in some.front_certificate.covers and some.front[0].step_time_s <= found().plan.step_time_s * (1 + 1e-9)
    assert Plan.model_validate_json(some.to_json()) == some


def test_the_command_says_what_was_not_answered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sensitivity, "_what_if", interrupted)
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "64", "--seq-len", "4096"]
    assert main(["plan", *job, "--fix", NARROW, "--sensitivity", "--robust", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [said.split()[0] for said in document["unanswered"]] == ["sensitivity", "robust"]
    assert main(["plan", *job, "--fix", NARROW, "--sensitivity", "--quiet"]) == 0
    assert "Sensitivity is answered but for" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "status"), [("recutting._bettered", "feasible"), ("planner.offloaded", "optimal")])
def test_an_interrupt_after_the_search_leaves_what_it_found(name: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts are moved and other places of activations looked at afterwards: before that others may be faster."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 32, 4096)
    whole = plan(problem)
    monkeypatch.setattr(f"paraplan.optimizer.{name}", interrupted)
    found = plan(problem)
    assert found.certificate.status == status and found.plan.step_time_s >= whole.plan.step_time_s
    assert found.certificate.lower_bound_s is not None and found.certificate.lower_bound_s <= whole.plan.step_time_s
    assert found.plan.memory.verdict == "fits"

"""An interrupt at every moment of a plan: what it then says of its step is true, and nothing that was found is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from paraplan.optimizer import explain, recutting, search
from paraplan.optimizer.interrupts import hold, noted
from paraplan.optimizer.leftover import Left
from paraplan.optimizer.near_best import NearBest
from paraplan.optimizer.planner import plan
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem

SAME = 1e-9
MOMENTS = 100  # more than a plan has
SPREADING = "racks of 72 or 64"
FEW = "recompute=none,micro_batch=1,cp=1"
LOST = "four of 144 lost"
JOBS = {
    SPREADING: ("qwen3-30b-a3b", "gb200-nvl72", 144, 256, 4096, None, f"{FEW},ep=64,tp=1,pp=1,vpp=1"),
    LOST: ("qwen3-30b-a3b", "gb200-nvl72", 140, 256, 4096, None, f"{FEW},ep=64,tp=1,pp=1,vpp=1"),
    "depths by chunk": (
        "qwen3-32b",
        "atlas-800t-a2",
        64,
        512,
        32768,
        "mindformers",
        "tp=8,pp=4,vpp=1,cp=1,micro_batch=1,offload=optimizer:1",
    ),
}
LEFT = {LOST: Left((72, 68), whole=144)}


@cache
def job(name: str) -> Problem:
    model, cluster, devices, batch, seq_len, stack, fix = JOBS[name]
    return build_problem(model, cluster, devices, batch, seq_len, stack, fix=fix)


@cache
def whole(name: str) -> Plan:
    return plan(job(name), top=2, left=LEFT.get(name))


@dataclass
class Moments:
    """The moments of a plan at which it looks, searches or cuts; at one of them an interrupt comes."""

    at: float = np.inf
    came: int = 0
    best_s: float = np.inf
    """The shortest step that was found for the job before the interrupt."""
    kept: list[float] = field(default_factory=list)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.came += 1
            if self.came == self.at:
                self.best_s = min(self.kept, default=np.inf)
                os.kill(os.getpid(), signal.SIGINT)
            return function(*arguments, **named)

        return watched


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Moments:
    found, keep = Moments(), search.Search._keep

    def kept(own: search.Search, part: Any, cuts: Any, step_time_s: Any) -> None:
        keep(own, part, cuts, step_time_s)
        if own._best and own.model.problem.workload == request.getfixturevalue("problem").workload:
            found.kept.append(own.best[0].step_time_s)

    monkeypatch.setattr(explain, "clashing", lambda problem: ())  # takes long, and is no moment of the search
    monkeypatch.setattr(search.Search, "_keep", kept)
    monkeypatch.setattr(search.Search, "begin", found.before(search.Search.begin))
    monkeypatch.setattr(search, "check", found.before(search.check))
    monkeypatch.setattr(NearBest, "_walk", found.before(NearBest._walk))
    for name in ("_redone_by_chunk", "_proved_first"):
        monkeypatch.setattr(recutting, name, found.before(getattr(recutting, name)))
    return found


@pytest.fixture(params=JOBS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def problem(name: str) -> Problem:
    return job(name)


def test_a_plan_that_is_cut_short_is_honest(name: str, problem: Problem, moments: Moments) -> None:
    full = whole(name).plan.step_time_s
    for moments.at in range(1, MOMENTS, {SPREADING: 1, LOST: 5}.get(name, 2)):
        moments.came, moments.kept = 0, []
        try:
            with noted():
                hold()
                found = plan(problem, top=2, left=LEFT.get(name))
        except KeyboardInterrupt:
            assert moments.came >= moments.at and not np.isfinite(moments.best_s), "a layout had been found"
            continue
        step_s, certificate = found.plan.step_time_s, found.certificate
        assert full * (1.0 - SAME) <= step_s <= moments.best_s * (1.0 + SAME)
        assert certificate.status != "optimal" or step_s <= full * (1.0 + SAME)
        assert certificate.lower_bound_s is not None and certificate.lower_bound_s <= full * (1.0 + SAME)
        if moments.came < moments.at:
            break
    assert 5 < moments.at < MOMENTS - 1 and found == whole(name).model_copy(update={"certificate": certificate})

"""Work that problems share: what a plan finds does not hang on what was planned before it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paraplan.cost_models import known_wholes
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer import stages
from paraplan.optimizer.known_cuts import KnownCuts
from paraplan.optimizer.sweeps.grid import PlanOptions, Point
from paraplan.optimizer.sweeps.point import problem_of, solve
from paraplan.search_spaces.layout import Problem

HERE = Path(__file__).parent
MOE = Point("qwen3-30b-a3b", "hgx-h100", 32, 64, 4096, "bf16", {"top": 2})


def planned(point: Point) -> dict[str, Any]:
    document = solve(point, HERE).plan_json()
    del document["certificate"]["seconds"]
    return document


def problem(point: Point) -> Problem:
    return problem_of(point, PlanOptions(), HERE)[0]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_wholes, "_KEPT", OrderedDict())
    monkeypatch.setattr(stages, "_KNOWN", KnownCuts())


def test_a_point_comes_out_as_it_does_alone(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    others = [replace(MOE, global_batch=128), replace(MOE, seq_len=8192), replace(MOE, devices=16)]
    after = [planned(point) for point in (*others, MOE)][-1]
    monkeypatch.setattr(known_wholes, "_KEPT", OrderedDict())
    monkeypatch.setattr(stages, "_KNOWN", KnownCuts())
    assert after == planned(MOE)


def test_batches_of_one_model_share_its_pieces_and_nothing_else_does(forgetful: None) -> None:
    curves = load_profile("h100-80gb-sxm")

    def known(point: Point) -> known_wholes.KnownWholes:
        return known_wholes.known_wholes(problem(point), curves)

    own = known(MOE)
    assert known(replace(MOE, global_batch=128)) is own
    for changed in (
        {"seq_len": 8192},
        {"devices": 64},
        {"precision": "fp8"},
        {"model": "qwen3-235b-a22b"},
        {"cluster": "hgx-h200"},
    ):
        assert known(replace(MOE, **changed)) is not own, changed  # type: ignore[arg-type]
    wider = problem(MOE)
    slower = wider.model_copy(update={"workload": wider.workload.model_copy(update={"expert_imbalance": 2.0})})
    assert known_wholes.known_wholes(slower, curves) is not own
    assert known_wholes.known_wholes(wider, load_profile("b200")) is not own


def test_pieces_of_models_long_done_are_forgotten(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    monkeypatch.setattr(known_wholes, "MOST_COMBINATIONS", 1)
    for devices in (8, 16):
        solve(replace(MOE, model="llama-3.1-8b", devices=devices), HERE)
    assert len(known_wholes._KEPT) == 1


def test_known_cuts_are_worked_out_once_and_forgotten_beyond_their_most() -> None:
    asked: list[int] = []

    def cut(new: np.ndarray) -> np.ndarray:
        asked.append(len(new))
        return np.stack([np.zeros(len(new), dtype=np.int64), 7 + new], axis=1)

    work, known = np.arange(6.0).reshape(3, 2), KnownCuts(most=6)
    assert known.of("rule", work, cut).tolist() == known.of("rule", work, cut).tolist() == [[0, 7], [0, 8], [0, 9]]
    assert known.of("rule", work[::-1], cut).tolist() == [[0, 9], [0, 8], [0, 7]]
    known.of("other rule", work[:1], cut)  # more than it keeps
    known.of("rule", work, cut)
    assert asked == [3, 1, 3]

"""Work that problems share: what a plan finds does not hang on what was planned before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paraplan.cost_models import interleaved_replay, known_wholes
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import known_best, stages
from paraplan.optimizer.found import Found
from paraplan.optimizer.known_cuts import KnownCuts
from paraplan.optimizer.search import Search
from paraplan.optimizer.sweeps import point
from paraplan.optimizer.sweeps.grid import PlanOptions, Point
from paraplan.optimizer.sweeps.point import problem_of, solve
from paraplan.optimizer.sweeps.table import record_of, row_of
from paraplan.search_spaces.layout import Problem

HERE = Path(__file__).parent
MOE = Point("qwen3-30b-a3b", "hgx-h100", 32, 64, 4096, "bf16", {"top": 2})


def planned(asked: Point) -> dict[str, Any]:
    """A point as a store keeps it, with its row, but for what is timed."""
    outcome = solve(asked, HERE)
    document, row = outcome.plan_json(), row_of(asked, outcome, record_of(outcome))
    del document["certificate"]["seconds"], row["seconds"]
    return {**document, "row": row}


def problem(asked: Point) -> Problem:
    return problem_of(asked, PlanOptions(), HERE)[0]


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process one that has planned nothing, as it is at first."""

    def forgotten() -> None:
        monkeypatch.setattr(known_wholes, "_KEPT", OrderedDict())
        monkeypatch.setattr(stages, "_KNOWN", KnownCuts())
        point._known_best.cache_clear()

    forgotten()
    return forgotten


def test_a_sweep_that_is_interrupted_and_goes_on_has_the_rows_of_one_that_is_not(forget: Callable[[], None]) -> None:
    """All columns and all of its plans, whatever the process that goes on has not seen of what came before."""
    points = [MOE, replace(MOE, global_batch=128), replace(MOE, seq_len=8192), replace(MOE, devices=16)]
    whole = [planned(each) for each in points]
    forget()
    assert [planned(each) for each in points[2:]] == whole[2:]


def test_the_best_layouts_of_one_batch_spare_the_next_most_of_its_search(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> None:
    scored: list[int] = []
    end = Search.end

    def told(*search: Any) -> Found:
        found = end(*search)
        scored.append(found.counts.scored)
        return found

    monkeypatch.setattr(Search, "end", told)
    solve(MOE, HERE)
    forget()
    solve(replace(MOE, global_batch=128), HERE)
    alone = scored[0]
    scored.clear()
    solve(MOE, HERE)
    assert scored[0] < alone


def test_a_guess_that_nothing_comes_below_is_given_up(monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
    alone = planned(MOE)
    point._known_best.cache_clear()
    monkeypatch.setattr(known_best.KnownBest, "expected_s", lambda *_: 0.5 * alone["plan"]["step_time_s"])
    assert planned(MOE) == alone


def test_layouts_that_a_problem_forbids_are_no_guess(forget: Callable[[], None]) -> None:
    solve(MOE, HERE)
    same = problem(MOE)
    known = point._known_best()
    (layouts,) = known.kept.values()
    frames = {(each.tp, each.cp, each.pp, each.dp, each.ep) for each in layouts[0]}
    model = CostModel(same, load_profile("h100-80gb-sxm"))
    assert len(frames) == 2
    assert np.isfinite(known.expected_s(model, same, 2))
    assert known.expected_s(model, same, 3) == np.inf
    tp = layouts[0][0].tp
    other = same.model_copy(update={"workload": same.workload.model_copy(update={"forbid": (f"tp = {tp}",)})})
    assert known.expected_s(model, other, 2) == np.inf


def test_searches_of_models_long_done_are_forgotten(monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
    monkeypatch.setattr(known_best, "PROBLEMS", 1)
    for devices in (8, 16):
        solve(replace(MOE, model="llama-3.1-8b", devices=devices), HERE)
    assert [key[2][-1] for key in point._known_best().kept] == [16]


def test_batches_of_one_model_share_its_pieces_and_nothing_else_does(forget: Callable[[], None]) -> None:
    curves = load_profile("h100-80gb-sxm")

    def known(asked: Point) -> known_wholes.KnownWholes:
        return known_wholes.known_wholes(problem(asked), curves)

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


def test_pieces_of_models_long_done_are_forgotten(monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
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


def test_replays_are_made_once_come_out_as_alone_and_are_forgotten_beyond_their_most(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    replay = interleaved_replay.replay_program

    def told(program: Any, pp: int, forward: np.ndarray, backward: np.ndarray, p2p: np.ndarray) -> list[np.ndarray]:
        replayed.append(forward.shape[1])
        return replay(program, pp, forward, backward, p2p)

    monkeypatch.setattr(interleaved_replay, "replay_program", told)
    rng, (pp, vpp) = np.random.default_rng(0), (2, 2)
    forward, backward, p2p = rng.uniform(1.0, 2.0, (4, 5)), rng.uniform(2.0, 3.0, (4, 5)), rng.uniform(0.0, 0.1, 5)
    known = interleaved_replay.KnownReplays(most=2 * pp * 5)
    alone = [interleaved_replay.KnownReplays().of(pp, vpp, forward[:, [n]], backward[:, [n]], p2p[[n]]) for n in range(5)]
    replayed.clear()
    for some in ([0, 1, 1, 2], [2, 3, 0], [4, 0]):
        found = known.of(pp, vpp, forward[:, some], backward[:, some], p2p[some])
        assert np.array_equal(found, np.concatenate([alone[n] for n in some], axis=2))
    known.of(pp, vpp, forward[:, :1], backward[:, :1], p2p[:1] + 0.1)  # more than it keeps
    known.of(pp, vpp, forward[:, :1], backward[:, :1], p2p[:1])
    assert replayed == [3, 1, 1, 1, 1]

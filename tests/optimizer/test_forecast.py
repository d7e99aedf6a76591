"""What runs of some layouts let expect of others: a synthetic truth, known formulas, and what may never be proposed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paraplan.optimizer.forecast import Ledger, chance_to_fit, excluded, forecast, improvement
from paraplan.search_spaces.layout import Floats, Layout, LayoutTable

NOWHERE = np.array([], dtype=np.intp)
LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=64 // (tp * pp), micro_batch=mb) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for mb in (1, 2, 4)
]
TABLE = LayoutTable.from_layouts(LAYOUTS)


def ledger(predicted_s: Floats, **known: object) -> Ledger:
    """A ledger of LAYOUTS, all far from filling a device, with nothing run but what is given."""
    blank = Ledger(TABLE, predicted_s, np.full(len(TABLE), 0.5), NOWHERE, np.array([]), NOWHERE, NOWHERE, NOWHERE)
    return replace(blank, **known)  # type: ignore[arg-type]


def problem(seed: int) -> tuple[Floats, Floats]:
    """Predicted and true step times: off by a common factor, by what TP costs, and by noise."""
    random = np.random.default_rng(seed)
    predicted = 10.0 * np.exp(random.normal(0.0, 0.12, len(TABLE)))
    bias = 0.2 + 0.08 * np.log2(TABLE.tp) - 0.05 * np.log2(TABLE.pp)
    return predicted, predicted * np.exp(bias + random.normal(0.0, 0.01, len(TABLE)))


def test_first_proposal_is_the_fastest_predicted() -> None:
    predicted, _ = problem(0)
    assert forecast(ledger(predicted)).best == int(np.argmin(predicted))


def test_two_workers_before_any_result_get_the_two_fastest_predicted() -> None:
    predicted, _ = problem(0)
    order = np.argsort(predicted)
    assert forecast(ledger(predicted, pending=order[:1])).best == order[1]


@pytest.mark.parametrize(("mean", "spread"), [(0.05, 0.1), (-0.1, 0.05), (0.0, 0.2)])
def test_improvement_is_the_expectation_over_runs(mean: float, spread: float) -> None:
    z = np.linspace(-8, 8, 200_001)
    weights = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    expected = float(weights @ np.maximum(1.0 - np.exp(mean + spread * z), 0.0))
    assert improvement(np.array([mean]), np.array([spread]))[0] == pytest.approx(expected, rel=1e-6)


def test_a_slow_run_moves_the_next_proposal_away_from_its_like() -> None:
    predicted = 10.0 + 0.01 * np.log2(64.0 / TABLE.tp)  # the more TP the faster, by a hair
    slow = np.array([int(np.argmin(predicted))])
    after = forecast(ledger(predicted, ran=slow, measured_s=predicted[slow] * 1.5))
    other = np.array([int(np.argmax(predicted))])
    both = forecast(
        ledger(predicted, ran=np.concatenate([slow, other]), measured_s=np.array([predicted[slow[0]] * 1.5, predicted[other[0]]]))
    )
    assert TABLE.tp[slow[0]] == 8
    assert after.mean[TABLE.tp == 8].mean() > after.mean[TABLE.tp == 1].mean()
    assert TABLE.tp[both.best] < 8


def test_what_was_run_or_is_running_is_never_proposed_again() -> None:
    predicted, truth = problem(1)
    ran, out, failed, pending = (np.argsort(predicted)[i : i + 2] for i in (0, 2, 4, 6))
    known = {"ran": ran, "measured_s": truth[ran], "out_of_memory": out, "failed": failed, "pending": pending}
    found = forecast(ledger(predicted, full=np.linspace(0.9, 0.3, len(TABLE)), **known))
    assert (found.gain[np.concatenate([ran, out, failed, pending])] < 0).all()
    assert found.gain[found.best] >= 0


def test_nothing_is_left_once_all_were_run() -> None:
    predicted, truth = problem(1)
    assert forecast(ledger(predicted, ran=np.arange(len(TABLE)), measured_s=truth)).exhausted


def test_layouts_that_fill_a_device_as_one_that_ran_out_are_excluded_unless_a_fuller_one_ran() -> None:
    full = np.array([0.5, 0.7, 0.8, 0.9])
    nothing = np.array([])
    assert excluded(full, nothing, nothing).tolist() == [False] * 4
    assert excluded(full, np.array([0.5]), np.array([0.7])).tolist() == [False, True, True, True]
    assert excluded(full, np.array([0.8]), np.array([0.7])).tolist() == [False, False, False, True]


def test_runs_move_the_chance_to_fit() -> None:
    full, nothing = np.linspace(0.7, 1.2, 20), np.array([])
    before = chance_to_fit(full, nothing, nothing)
    assert (np.diff(before) < 0).all()
    assert before[0] > 0.99
    assert before[-1] < 0.02
    assert (chance_to_fit(full, np.array([1.05]), nothing) > before).all()
    assert (chance_to_fit(full, nothing, np.array([0.95])) < before).all()


def test_the_loop_reaches_the_best_in_fewer_runs_than_chance_does() -> None:
    runs = []
    for seed in range(12):
        predicted, truth = problem(seed)
        done: list[int] = []
        while not done or truth[done].min() > 1.005 * truth.min():
            ran = np.array(done, dtype=np.intp)
            done.append(forecast(ledger(predicted, ran=ran, measured_s=truth[ran])).best)
        runs.append(len(done))
    by_chance = (len(TABLE) + 1) / 2  # until the one best of n is drawn
    by_prediction = [1 + int((p < p[np.argmin(t)]).sum()) for p, t in map(problem, range(12))]
    assert np.mean(runs) < by_chance / 4
    assert np.mean(runs) < np.mean(by_prediction)


def test_a_forecast_is_the_same_for_the_same_runs() -> None:
    predicted, truth = problem(3)
    ran = np.array([3, 8])
    first, second = (forecast(ledger(predicted, ran=ran, measured_s=truth[ran])) for _ in range(2))
    np.testing.assert_array_equal(first.gain, second.gain)

"""Many trial points in one table cost what each costs alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.calibration import PARAMETERS, pairs_of
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.trials import MOST_ROWS, Priced
from paraplan.search_spaces.cluster import Figure

MEASURED = Path(__file__).parents[1] / "measured"
NAMES = [p.name for p in PARAMETERS]


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], Priced]:
    found = pairs_of(read_runs(MEASURED / "runs_sample.csv"), read_shapes(MEASURED / "models.json"))
    return {key: Priced(rows, None, shipped=False) for key, rows in found.items()}


def test_every_point_is_priced_as_the_cost_model_prices_it_alone(pairs: dict[tuple[str, str], Priced]) -> None:
    """Every calibrated figure at once, on dense and MoE models, with and without a pipeline, FSDP and CUDA graphs."""
    rng = np.random.default_rng(0)
    for key, runs in pairs.items():
        centre = np.array([runs.figures[p.name] or p.start or 1e-4 for p in PARAMETERS])
        points = centre * np.exp(rng.normal(0.0, 0.3, (4, len(NAMES))))
        together = runs.predict_all(NAMES, points)
        for point, found in zip(points, together, strict=True):
            figures = {n: Figure(value=float(v), source="test", grade="given") for n, v in zip(NAMES, point, strict=True)}
            for problem, profile, table, places in runs.batches:
                moved = problem.model_copy(update={"stack": problem.stack.with_figures(figures)})
                assert found[places] == pytest.approx(CostModel(moved, profile).price(table).step_time_s, rel=1e-12), key


def test_more_points_than_fit_a_table_are_cut_into_several(pairs: dict[tuple[str, str], Priced]) -> None:
    runs = min(pairs.values(), key=lambda each: len(each.measured))
    points = np.linspace(0.5, 1.0, MOST_ROWS + 1)[:, None]
    found = runs.predict_all(["efficiency"], points)
    assert found[-1] == pytest.approx(runs.predict({"efficiency": 1.0}), rel=1e-12)
    assert (np.diff(found, axis=0) < 0).all()

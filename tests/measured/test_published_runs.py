"""Published step times against predictions: the recorded error may not grow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import mean

import pytest

SCRIPT = Path(__file__).parents[2] / "results" / "published-runs" / "regenerate.py"
SPEC = importlib.util.spec_from_file_location("published_runs", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
published = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(published)


@pytest.mark.parametrize(
    ("source", "rows", "mean_error", "largest"),
    [("arXiv 2205.05198", 8, 0.025, 0.055), ("arXiv 2104.04473", 6, 0.042, 0.057)],
)
def test_error_on_published_runs_has_not_grown(source: str, rows: int, mean_error: float, largest: float) -> None:
    runs = [run for run in published.runs() if run["source"] == source]
    errors = [abs(published.predicted_s(run) / float(run["measured_step_time_s"]) - 1.0) for run in runs]
    assert len(runs) == rows
    assert mean(errors) <= mean_error
    assert max(errors) <= largest

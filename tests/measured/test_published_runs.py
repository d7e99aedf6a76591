"""Published step times against predictions: the recorded error may not grow."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

import pytest
from paraplan.cost_models.validation import Outcome

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


@pytest.fixture(scope="module")
def unseen() -> Mapping[tuple[str, str], list[Outcome]]:
    found: Mapping[tuple[str, str], list[Outcome]] = published.unseen()
    return found


def test_every_unseen_run_is_priced_and_at_most_sixty_stand_there(unseen: Mapping[tuple[str, str], list[Outcome]]) -> None:
    outcomes = [each for rows in unseen.values() for each in rows]
    assert [each.run.id for each in outcomes if each.skipped] == []
    assert 50 <= len(outcomes) <= 60


@pytest.mark.parametrize(
    ("family", "accelerator", "median_error", "bias"),
    [
        ("internevo", "A100-80GB-SXM", 0.17, 0.17),
        ("fms-fsdp", "A100-80GB-SXM", 0.12, 0.12),
        ("fms-fsdp", "H100-80GB-SXM", 0.12, 0.07),
        ("nemo-25", "GB200", 0.09, 0.09),
        ("nemo-25", "B200", 0.09, 0.09),
        ("nemotron-4", "H100-80GB-SXM", 0.21, 0.21),
        ("mt-nlg", "A100-80GB-SXM", 0.05, 0.05),
    ],
)
def test_raw_transfer_to_families_that_no_fit_has_seen_has_not_grown_worse(
    unseen: Mapping[tuple[str, str], list[Outcome]], family: str, accelerator: str, median_error: float, bias: float
) -> None:
    errors = [published.error_of(each) for each in unseen[family, accelerator]]
    assert median(abs(error) for error in errors) <= median_error
    assert abs(median(errors)) <= bias

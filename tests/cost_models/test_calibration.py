"""Calibration: recovers what made synthetic runs, looks at no test row, and writes a profile that the other commands apply."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.calibration import PARAMETERS, Calibration, Calibrations, calibrate, earns_its_figures, pairs_of
from paraplan.cost_models.profile import Intervals, load_profile
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.runs import Run
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.transfer import learning_curve
from paraplan.cost_models.trials import Priced
from paraplan.cost_models.validation import outcomes_of, validate
from paraplan.optimizer.assumptions import assumptions
from paraplan.optimizer.cli import main
from paraplan.optimizer.reports.calibration import doubts, figure_lines, profile_yaml
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem

MEASURED = Path(__file__).parents[1] / "measured"
TRUTH = {"efficiency": 0.7, "host_floor_dense_s": 0.004, "attention_efficiency": 0.5}
Row = dict[str, str]


def rows(count: int, split: str = "fit") -> list[Row]:
    """Runs of Llama 3.1 8B on H100 that differ in sequence length, TP, servers and micro-batch."""
    found = []
    for seq, tp, servers, micro in product((1024, 8192, 32768), (1, 2, 4, 8), (1, 4), (1, 2)):
        found.append(
            {
                "id": f"s{seq}-tp{tp}-n{servers}-mbs{micro}",
                "family": "mine",
                "split": split,
                "model": "llama-3.1-8b",
                "accelerator": "H100",
                "software": "Megatron-LM",
                "precision": "bf16",
                "num_accelerators": str(8 * servers),
                "seq_len": str(seq),
                "global_batch": "128",
                "micro_batch": str(micro),
                "tp": str(tp),
                "pp": "1",
                "dp": str(8 * servers // tp),
            }
        )
    return found[:: max(1, len(found) // count)][:count]


def timed(given: Sequence[Row], truth: Mapping[str, float], shipped: bool = True) -> list[Row]:
    """The same rows with the step times that a stack of these figures would have."""
    runs = [Run({**row, "measured_step_time_s": "1"}, row["id"]) for row in given]
    seconds = Priced(outcomes_of(runs, read_shapes(MEASURED / "models.json")), None, shipped).predict(truth)
    return [{**row, "measured_step_time_s": f"{s:.9g}"} for row, s in zip(given, seconds, strict=True)]


def table(path: Path, given: Sequence[Row]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(given[0]))
        writer.writeheader()
        writer.writerows(given)
    return path


@pytest.fixture(scope="module")
def synthetic() -> list[Row]:
    return timed(rows(24), TRUTH)


@pytest.fixture(scope="module")
def found(synthetic: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    (only,) = calibrate(table(tmp_path_factory.mktemp("runs") / "runs.csv", synthetic))
    return only


def test_known_figures_are_recovered(found: Calibration) -> None:
    assert (found.stack, found.accelerator, found.rows) == ("megatron-lm", "h100-80gb-sxm", 24)
    values = {fit.name: fit for fit in found.fits}
    for name, value in TRUTH.items():
        assert values[name].value == pytest.approx(value, rel=0.05), name
        assert values[name].low <= value <= values[name].high
    assert found.before.median > 0.2
    assert found.after.median < 0.01


def test_one_outlier_moves_little(synthetic: list[Row], found: Calibration, tmp_path: Path) -> None:
    slow = {**synthetic[3], "measured_step_time_s": str(5 * float(synthetic[3]["measured_step_time_s"]))}
    (robust,) = calibrate(table(tmp_path / "runs.csv", [*synthetic[:3], slow, *synthetic[4:]]))
    assert robust.fits[0].value == pytest.approx(found.fits[0].value, rel=0.05)


def test_rows_of_the_test_split_are_never_looked_at(synthetic: list[Row], found: Calibration, tmp_path: Path) -> None:
    held_out = [{**row, "split": "test", "measured_step_time_s": "0.001"} for row in synthetic]
    (same,) = calibrate(table(tmp_path / "runs.csv", [*held_out, *synthetic]))
    assert same == found
    (without,) = calibrate(table(tmp_path / "few.csv", synthetic[:3]), site=True)
    (site,) = calibrate(table(tmp_path / "runs.csv", [*held_out[:3], *synthetic[:3]]), site=True)
    assert site == without


def test_one_to_three_rows_of_a_site_bring_the_rest_near(tmp_path: Path) -> None:
    everything = table(tmp_path / "all.csv", timed(rows(24, ""), {"efficiency": 0.7}))
    few = [row for row in timed(rows(24, ""), {"efficiency": 0.7}) if row["seq_len"] == "8192"]
    errors = []
    for count in (1, 3):
        learnt = calibrate(table(tmp_path / "site.csv", few[:count]), site=True)
        profile = tmp_path / "site.yaml"
        profile.write_text(profile_yaml(learnt), encoding="utf-8")
        time = next(c.statistics.time for c in validate(everything, str(profile)).cells if c.slice == "counted")
        assert time is not None
        errors.append(time.median)
    before = next(c.statistics.time for c in validate(everything).cells if c.slice == "counted")
    assert before is not None and before.median > 0.15
    assert errors[0] < 0.05 and errors[1] < 0.05


def test_a_sites_interval_shrinks_with_its_runs_to_what_models_are_off_by(tmp_path: Path) -> None:
    """From what a stack's documented figures leave unknown down to what the runs of one known stack show."""
    every = timed(rows(24, ""), {"efficiency": 0.8})
    widths = []
    for count in (1, 3, 12):
        found = calibrate(table(tmp_path / "site.csv", every[:: 24 // count][:count]), site=True)
        interval = found.intervals.pairs["megatron-lm"]["h100-80gb-sxm"]["dense"]
        assert interval.low < 1.0 < interval.high
        widths.append(interval.high)
    assert widths == sorted(widths, reverse=True)
    assert load_profile("h100-80gb-sxm").interval("nobody", "h100-80gb-sxm", moe=False).high > widths[1]


def test_a_learning_curve_falls_and_its_intervals_hold() -> None:
    """Of a stack at three quarters of the documented efficiency whose runs scatter by 3 %."""
    scatter = np.exp(np.random.default_rng(0).normal(0.0, 0.03, 14))
    exact = timed(rows(14), {"efficiency": 0.7}, shipped=False)
    noisy = [{**row, "measured_step_time_s": str(float(row["measured_step_time_s"]) * scatter[i])} for i, row in enumerate(exact)]
    (own,) = pairs_of([Run(row, row["id"]) for row in noisy], read_shapes(MEASURED / "models.json")).values()
    curve = learning_curve(own, [], {}, draws=3)
    assert (curve.family, curve.moe, curve.held_out) == ("mine", False, 4)
    assert curve.errors[0] > 0.15 and curve.documented > 0.15
    assert curve.errors[1] < 0.1 and curve.errors[2] < 0.06 and curve.errors[3] < 0.05
    assert all(inside > 0.75 for inside in curve.inside[1:])


def test_a_run_bound_by_its_host_says_nothing_of_the_kernels(tmp_path: Path) -> None:
    """One run of 1024 tokens on TP 8 with floors three times the documented: the efficiency stays, the floor moves."""
    (host,) = (row for row in rows(48, "") if row["id"] == "s1024-tp8-n4-mbs1")
    slow = timed([host], {"host_floor_dense_s": 0.003})
    (found,) = calibrate(table(tmp_path / "site.csv", slow), site=True)
    moved = {fit.name: abs(np.log(fit.value / fit.prior)) for fit in found.fits}
    assert moved["host_floor_dense_s"] > 3.0 * moved["efficiency"]


def test_a_profile_lies_over_the_stack_named_in_it_alone(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(profile_yaml(Calibrations((found,), {}, Intervals())), encoding="utf-8")
    for stack, expected in (("megatron-lm", found.figures()["efficiency"].value), ("megatron-bridge", None)):
        problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, stack)
        own = CostModel(problem).problem.stack.efficiency.value
        applied = CostModel(problem, load_profile("h100-80gb-sxm", str(path))).problem.stack.efficiency.value
        assert applied == (own if expected is None else expected)


def test_a_plan_names_what_a_profile_changes(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(profile_yaml(Calibrations((found,), {}, Intervals())), encoding="utf-8")
    for stack, words in (("megatron-lm", "from"), ("megatron-bridge", "says nothing of megatron-bridge on h100-80gb-sxm")):
        problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, stack)
        said = assumptions(problem, load_profile("h100-80gb-sxm", str(path)), str(path))
        assert any(str(path) in sentence and words in sentence for sentence in said)


def test_times_that_are_none_are_told_and_move_nothing(synthetic: list[Row], found: Calibration, tmp_path: Path) -> None:
    times = ("-3", "0", "abc", "nan", "1.8s")
    odd = ({**synthetic[0], "id": f"odd {time}", "measured_step_time_s": time} for time in times)
    path = table(tmp_path / "runs.csv", [*synthetic, *odd])
    (same,) = calibrate(path)
    assert same == found
    skipped = [each for each in validate(path).outcomes if each.skipped]
    assert [each.run.id for each in skipped] == [f"odd {time}" for time in times]
    assert all("measured_step_time_s" in (each.skipped or "") for each in skipped)


def test_a_fit_that_predicts_left_out_runs_no_better_is_not_taken(tmp_path: Path) -> None:
    """Runs that scatter around the stack's own figures say nothing against them, and the report says so."""
    scatter = np.exp(np.random.default_rng(0).normal(0.0, 0.1, 24))
    exact = timed(rows(24), {}, shipped=False)
    noisy = [
        {**row, "measured_step_time_s": f"{float(row['measured_step_time_s']) * factor}"}
        for row, factor in zip(exact, scatter, strict=True)
    ]
    (learnt,) = calibrate(table(tmp_path / "runs.csv", noisy))
    assert all(fit.kept for fit in learnt.fits)
    assert learnt.after == learnt.before
    assert doubts(learnt) == ["a fit predicts runs that are left out no better: the stack's own figures are kept"]
    assert {line[4] for line in figure_lines(learnt)} == {"kept"}


def test_figures_are_earned_by_more_than_one_standard_error() -> None:
    own, even = np.array([0.2, -0.2] * 6), np.ones(12)
    assert earns_its_figures(own, own / 4, even)
    assert not earns_its_figures(own, own, even)
    assert not earns_its_figures(own, np.array([0.0, 0.4, 0.0, 0.4, 0.0, 0.3] * 2), even)  # better on the whole, by chance as well
    assert earns_its_figures(own[:4], own[:4], even[:4])  # too few to judge


@pytest.mark.parametrize("factor", [280.0, 1.0])
def test_a_run_that_no_figures_explain_is_named(factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single run of a site, 280 times slower than predicted, as milliseconds or several steps are."""
    (row,) = timed(rows(48, "")[12:13], {})
    slow = {**row, "measured_step_time_s": f"{float(row['measured_step_time_s']) * factor:.6g}"}
    runs, profile = table(tmp_path / "runs.csv", [slow]), tmp_path / "site.yaml"
    assert main(["calibrate", str(runs), "--site", "-o", str(profile)]) == 0
    printed, head = " ".join(capsys.readouterr().out.split()), profile.read_text(encoding="utf-8").partition("\nstacks:")[0]
    for text in (printed, head):
        assert ("do not explain" in text) == (factor > 1.0)
        assert (f"{row['id']} (" in text) == (factor > 1.0)
    assert all(line.startswith("#") for line in head.splitlines())


def test_reasons_are_quoted_with_their_rows(synthetic: list[Row], tmp_path: Path) -> None:
    changes = ({"tp": ""}, {"tp": ""}, {"model": "nobody-7b"}, {"seq_len": "x"}, {"accelerator": ""})
    odd = [{**row, **changed} for row, changed in zip(synthetic, changes, strict=False)]
    with pytest.raises(InputError) as raised:
        calibrate(table(tmp_path / "runs.csv", odd))
    message = str(raised.value)
    assert f"{odd[0]['id']}, {odd[1]['id']}: missing field: tp" in message
    assert f"{odd[2]['id']}: unknown model shape" in message
    assert f"{odd[3]['id']}: seq_len" in message
    assert message.endswith("and 1 more)")


def test_physical_bounds_are_kept_and_named(tmp_path: Path) -> None:
    """Steps at nine tenths of the peak: faster than any stack, not than the device."""
    runs = [Run({**row, "measured_step_time_s": "1"}, row["id"]) for row in rows(24)]
    least = [o.mfu_time_s or 0.0 for o in outcomes_of(runs, {})]
    fast = [{**row, "measured_step_time_s": f"{seconds / 0.9:.9g}"} for row, seconds in zip(rows(24), least, strict=True)]
    (found,) = calibrate(table(tmp_path / "runs.csv", fast))
    assert found.fits[0].at_bound
    assert found.fits[0].value == next(p.high for p in PARAMETERS if p.name == "efficiency")


@pytest.mark.parametrize(
    ("changes", "site", "words"),
    [
        ({"split": ""}, False, "--site takes rows without a split"),
        ({"split": "test"}, True, "no row has split 'fit'"),
        ({"tp": ""}, False, "missing field: tp"),
        ({"measured_step_time_s": ""}, False, "no row to fit can be priced"),
    ],
)
def test_nothing_to_fit_is_one_sentence(
    changes: Row, site: bool, words: str, synthetic: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "runs.csv", [{**synthetic[0], **changes}])
    with pytest.raises(InputError, match=words):
        calibrate(path, site=site)
    assert main(["calibrate", str(path), "-o", str(tmp_path / "p.yaml"), *(["--site"] if site else [])]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "p.yaml").exists()


def test_the_command_writes_what_plan_and_validate_read(
    synthetic: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, profile = table(tmp_path / "runs.csv", synthetic[:6]), tmp_path / "site.yaml"
    assert main(["calibrate", str(runs), "--stack", "megatron-lm", "-o", str(profile)]) == 0
    assert "efficiency" in capsys.readouterr().out
    words = ["evaluate", "llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "64"]
    layout = ["--seq-len", "4096", "--layout", "tp=2,micro_batch=1", "--json"]
    answers = []
    for more in ([], ["--profile", str(profile)]):
        assert main([*words, *layout, *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]
    assert main(["validate", str(runs), "--profile", str(profile)]) == 0
    assert main(["calibrate", str(runs), "--stack", "megatron-ml", "-o", str(profile)]) == 2
    assert "megatron-lm" in capsys.readouterr().err


def test_the_sample_of_published_runs_can_be_calibrated() -> None:
    """Its stacks with rows to fit get no worse on those rows."""
    assert any(run.split == "fit" for run in read_runs(MEASURED / "runs_sample.csv"))
    for found in calibrate(MEASURED / "runs_sample.csv"):
        assert found.after.median <= found.before.median + 0.01, found.stack

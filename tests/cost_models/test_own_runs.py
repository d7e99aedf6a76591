"""A user's own table of runs: on a cluster of his own, as his tools wrote it, with what he knows of each row."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from paraplan.cost_models.calibration import Calibrations, calibrate, slips_among
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.validation import Outcome, Validation, validate
from paraplan.optimizer.cli import main
from paraplan.optimizer.commands.problem_options import ProblemOptions
from paraplan.optimizer.reports.calibration import planned, profile_yaml
from paraplan.search_spaces.loading import CATALOG

Row = dict[str, str]
JOB = ("--devices", "16", "--global-batch", "128", "--seq-len", "4096", "--stack", "megatron-lm")
LAYOUTS = ((8, 1), (4, 1), (2, 1), (8, 2), (16, 1))  # tp, micro_batch
BASE = {
    "id": "base",
    "model": "llama-3.1-8b",
    "accelerator": "H100",
    "num_accelerators": "16",
    "precision": "bf16",
    "seq_len": "4096",
    "global_batch": "128",
    "micro_batch": "1",
    "tp": "8",
    "pp": "1",
    "software": "Megatron-LM",
    "measured_step_time_s": "6.5",
}


def table(path: Path, rows: Sequence[Row], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def validated(tmp_path: Path, *rows: Row, **options: str) -> Validation:
    return validate(table(tmp_path / "runs.csv", rows), **options)


def only(found: Validation) -> Outcome:
    (outcome,) = found.outcomes
    return outcome


# --- a cluster of one's own ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HGX H100 whose servers have 25 GB/s each, an eighth of that per device."""
    document = yaml.safe_load((CATALOG / "clusters" / "hgx-h100.yaml").read_text(encoding="utf-8"))
    document["name"] = "my-cluster"
    document["levels"][-1]["bandwidth_bytes_per_s"]["value"] = 25e9 / 8
    path = tmp_path_factory.mktemp("site") / "my.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def evaluated(cluster: str, tp: int, micro: int, *options: str) -> dict[str, object]:
    command = ["evaluate", "llama-3.1-8b", "--cluster", cluster, *JOB, "--layout", f"tp={tp},micro_batch={micro}", "--json"]
    with redirect_stdout(StringIO()) as printed:
        assert main([*command, *options]) == 0
    found: dict[str, object] = json.loads(printed.getvalue())
    return found


def step_s(document: dict[str, object]) -> float:
    plan = document["plan"]
    assert isinstance(plan, dict)
    return float(plan["step_time_s"])


@pytest.fixture(scope="module")
def measured(slow: Path) -> Path:
    """What `evaluate` says of some layouts on the slow cluster, as if it had been measured there."""
    rows = []
    for tp, micro in LAYOUTS[:4]:
        seconds = step_s(evaluated(str(slow), tp, micro))
        cells = {"id": f"tp{tp}-{micro}", "tp": str(tp), "micro_batch": str(micro), "measured_step_time_s": str(seconds)}
        rows.append({**BASE, **cells})
    return table(slow.parent / "mine.csv", rows)


def test_runs_of_a_cluster_of_ones_own_are_priced_there(slow: Path, measured: Path) -> None:
    errors = [o.predicted_step_time_s / o.measured_step_time_s - 1.0 for o in validate(measured, cluster=str(slow)).outcomes]  # type: ignore[operator]
    assert errors == pytest.approx([0.0] * 4, abs=1e-6)
    away = [o.predicted_step_time_s / o.measured_step_time_s - 1.0 for o in validate(measured).outcomes]  # type: ignore[operator]
    assert min(away) < -0.05


def test_a_site_learns_nothing_of_its_stack_from_a_network_that_is_told(slow: Path, measured: Path, tmp_path: Path) -> None:
    """With the network told the profile changes no step time; without it the network would stand in other figures."""
    profile = tmp_path / "site.yaml"
    assert main(["calibrate", str(measured), "--site", "--cluster", str(slow), "-o", str(profile), "--quiet"]) == 0
    plain, laid = (evaluated(str(slow), 16, 1, *options) for options in ((), ("--profile", str(profile))))
    assert step_s(laid) == pytest.approx(step_s(plain), rel=0.005)
    assert not any("learnt on" in line for line in laid["assumptions"])  # type: ignore[attr-defined]
    elsewhere = evaluated("hgx-h100", 16, 1, "--profile", str(profile))
    said = [line for line in elsewhere["assumptions"] if "learnt on" in line]  # type: ignore[attr-defined]
    assert len(said) == 1
    assert "my-cluster (server 450 GB/s, scale-out 3.125 GB/s)" in said[0]
    assert "hgx-h100 (server 450 GB/s, scale-out 50 GB/s)" in said[0]


def test_a_column_names_the_cluster_of_a_row_beside_the_table(slow: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(slow.read_text(encoding="utf-8"), encoding="utf-8")
    rows = [{**BASE, "id": name, "tp": "16", "cluster": name} for name in ("own.yaml", "hgx-h100", "", "nowhere.yaml")]
    own, catalog, blank, lost = validated(tmp_path, *rows).outcomes
    assert [o.job.problem.cluster.name for o in (own, catalog, blank) if o.job] == ["my-cluster", "hgx-h100", "hgx-h100"]
    assert "there is no such file" in (lost.skipped or "")
    first = validated(tmp_path, *rows, cluster="three-tier-h100").outcomes[2].job
    assert first is not None and first.problem.cluster.name == "three-tier-h100"


def test_an_accelerator_of_ones_own_comes_with_its_cluster(slow: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(slow.read_text(encoding="utf-8"))
    device = yaml.safe_load((CATALOG / "accelerators" / "h100-80gb-sxm.yaml").read_text(encoding="utf-8"))
    document["accelerator"] = {**device, "name": "abacus-9000"}
    path = tmp_path / "abacus.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    unnamed = {name: cell for name, cell in BASE.items() if name != "accelerator"}
    for row in ({**BASE, "accelerator": "Abacus 9000 rev. B"}, unnamed):
        outcome = only(validated(tmp_path, row, cluster=str(path)))
        assert outcome.job is not None and outcome.job.accelerator == "abacus-9000"
    assert (only(validated(tmp_path, {**BASE, "accelerator": "Abacus 9000"})).skipped or "").startswith("accelerator not in the")


def test_rows_of_another_accelerator_are_not_priced_on_the_cluster(slow: Path, tmp_path: Path) -> None:
    other = only(validated(tmp_path, {**BASE, "accelerator": "A100"}, cluster=str(slow)))
    assert other.skipped == "the cluster has another accelerator: a100 is not my-cluster's h100-80gb-sxm"


def test_a_cluster_that_is_none_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "runs.csv", [BASE])
    assert main(["validate", str(path), "--cluster", "hgx-h10"]) == 2
    assert "hgx-h100" in capsys.readouterr().err


# --- files as programs write them ------------------------------------------------------------------------------------------------


def test_semicolons_part_cells_where_commas_part_decimals(tmp_path: Path) -> None:
    """As a spreadsheet saves it in much of Europe: byte order mark, capitals in the header, 6,5 for six and a half."""
    path = table(tmp_path / "runs.csv", [{**BASE, "measured_step_time_s": "6,5", "notes": "pp_layout=Et*4|L, as it was"}], ";")
    head, _, rest = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(f"\ufeff{head.upper().replace('ID;', 'Id;')}\n{rest}", encoding="utf-8")
    (run,) = read_runs(path)
    assert (run.id, run.text("notes"), run.number("measured_step_time_s")) == ("base", "pp_layout=Et*4|L, as it was", 6.5)
    (tabbed,) = read_runs(table(tmp_path / "tabs.tsv", [BASE], "\t"))
    assert (tabbed.id, tabbed.text("model")) == ("base", BASE["model"])


def test_commas_between_thousands_stay_what_they_are_where_commas_part_cells(tmp_path: Path) -> None:
    (run,) = read_runs(table(tmp_path / "runs.csv", [{**BASE, "seq_len": "131,072"}]))
    assert run.count("seq_len") == 131072


def test_rows_without_an_id_are_named_after_their_lines(tmp_path: Path) -> None:
    unnamed = {name: cell for name, cell in BASE.items() if name != "id"}
    found = validated(tmp_path, unnamed, {**unnamed, "tp": "4"})
    assert [o.run.id for o in found.outcomes] == ["row 2", "row 3"]
    assert all(o.why_not_counted is None for o in found.outcomes)


@pytest.mark.parametrize("command", [["validate"], ["calibrate", "--site", "-o", "site.yaml"]])
def test_a_table_without_a_row_is_bad_input(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.csv").write_text(",".join(BASE) + "\n\n", encoding="utf-8")
    assert main([*command, "runs.csv"]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert not Path("site.yaml").exists()


# --- what is counted together ----------------------------------------------------------------------------------------------------


def layouts(**cells: str) -> list[Row]:
    """Runs of one problem in four layouts, the slower the fewer TP ranks."""
    seconds = {"8": "6.3", "4": "5.7", "2": "5.4", "1": "5.2"}
    return [{**BASE, "id": f"tp{tp}", "tp": tp, "measured_step_time_s": s, **cells} for tp, s in seconds.items()]


def test_a_table_without_groups_is_ranked_by_what_its_rows_share(tmp_path: Path) -> None:
    """Another problem's rows, however many and however fast, are no rivals; other words for the same one are."""
    other = [{**row, "id": f"long-{row['id']}", "seq_len": "8192", "global_batch": "64"} for row in layouts()[:3]]
    same = [{**layouts()[0], "id": "again", "micro_batch": "2", "precision": "BF16", "accelerator": "NVIDIA H100 80GB HBM3"}]
    found = validated(tmp_path, *layouts(), *other, *same)
    (cell,) = [each for each in found.cells if each.slice == "counted"]
    ranking = cell.statistics.ranking
    assert ranking is not None and ranking.groups == 1
    assert ranking.random_mean == pytest.approx((6.3 + 6.3 + 5.7 + 5.4 + 5.2) / 5 / 5.2 - 1.0)


def test_a_table_with_groups_is_ranked_within_them_alone(tmp_path: Path) -> None:
    """Rows that its source puts in none stand for themselves."""
    (blank,) = [each for each in validated(tmp_path, *layouts(group="")).cells if each.slice == "counted"]
    (named,) = [each for each in validated(tmp_path, *layouts(group="sweep")).cells if each.slice == "counted"]
    assert blank.statistics.ranking is None
    assert named.statistics.ranking is not None


def test_spellings_of_one_device_are_counted_together(tmp_path: Path) -> None:
    names = ("H100", "H100 SXM5 80GB", "NVIDIA H100 80GB HBM3", "H100-96GB", "A100-80GB")
    found = validated(tmp_path, *({**BASE, "id": name, "accelerator": name} for name in names))
    rows = {cell.accelerator: cell.statistics.time.rows for cell in found.cells if cell.slice == "counted" and cell.statistics.time}
    assert rows == {"H100": 3, "H100-96GB": 1, "A100-80GB": 1}


def test_a_device_whose_generation_is_not_told_stays_apart(tmp_path: Path) -> None:
    rows = [{**BASE, "id": name, "accelerator": name, "software": "MindSpeed-LLM"} for name in ("Ascend", "Ascend-910B")]
    assert {cell.accelerator for cell in validated(tmp_path, *rows).cells} == {"Ascend", "Ascend-910B"}


# --- what a row tells of itself, and what is guessed -----------------------------------------------------------------------------

PEAK = {**BASE, "measured_peak_mem_gib": "40"}


def test_how_a_peak_was_read_is_what_its_row_says(tmp_path: Path) -> None:
    """The allocator's cache and what lies beside it on the device make the same peak larger; words in notes count as well."""
    said = ("allocated", "reserved", "nvidia-smi")
    columns = [{**PEAK, "id": each, "memory_measure": each, "notes": ""} for each in said]
    words = ("torch.cuda.max_memory_allocated()", "max_memory_reserved", "read off nvidia-smi")
    notes = [{**PEAK, "id": each, "memory_measure": "", "notes": each} for each in words]
    found = validated(tmp_path, *columns, *notes).outcomes
    allocated, reserved, device = (o.predicted_peak_gib or 0.0 for o in found[:3])
    assert allocated < reserved < device
    assert [o.predicted_peak_gib for o in found[3:]] == [allocated, reserved, device]
    assert not any("how the peak was read" in note for o in found for note in o.notes)


def test_a_peak_of_which_nothing_tells_how_it_was_read_is_taken_as_allocated(tmp_path: Path) -> None:
    told, untold, unknown = validated(
        tmp_path,
        {**PEAK, "memory_measure": "allocated"},
        {**PEAK, "id": "untold", "memory_measure": ""},
        {**PEAK, "id": "unknown", "memory_measure": "as the dashboard has it"},
    ).outcomes
    assert untold.predicted_peak_gib == unknown.predicted_peak_gib == told.predicted_peak_gib
    note = "how the peak was read is not told: allocated assumed"
    assert note in untold.notes and note not in told.notes
    word = "memory_measure 'as the dashboard has it' is no way to read a peak that is known: allocated assumed"
    assert word in unknown.notes and note not in unknown.notes
    assert note not in only(validated(tmp_path, BASE)).notes


def test_a_guessed_stack_has_the_interval_of_stacks_that_nobody_measured(tmp_path: Path) -> None:
    """Priced as the cluster's usual stack, but nobody knows that it is one: its own interval would claim to."""
    told, blank, near = validated(
        tmp_path, BASE, {**BASE, "id": "blank", "software": ""}, {**BASE, "id": "near", "software": "HomeBrew 1.0"}
    ).outcomes
    assert blank.predicted_step_time_s == told.predicted_step_time_s
    assert told.interval and blank.interval and blank.interval == near.interval
    assert blank.interval.high - 1.0 > 1.5 * (told.interval.high - 1.0)
    unmeasured = load_profile("h100-80gb-sxm").intervals.unmeasured["dense"]
    assert blank.interval.high >= unmeasured.high and blank.interval.low <= unmeasured.low


def test_runs_of_a_stack_that_is_guessed_alike_narrow_its_interval(tmp_path: Path) -> None:
    rows = [{**row, "software": ""} for row in layouts()]
    path, profile = table(tmp_path / "runs.csv", rows), tmp_path / "site.yaml"
    assert main(["calibrate", str(path), "--site", "-o", str(profile), "--quiet"]) == 0
    before, after = (validate(path, laid).outcomes[0].interval for laid in (None, str(profile)))
    assert before and after and after.high < before.high


def test_a_trainer_that_nobody_knows_is_one_stack_which_plans_take_from_its_profile(tmp_path: Path) -> None:
    """Whatever its rows' sharding: FSDP's words tell of it, ZeRO-1 alone would not. What is guessed is said, and can be named."""
    words = ("FSDP", "SHARD_GRAD_OP", "ddp", "zero1")
    rows = [
        {**BASE, "id": name, "tp": "1", "software": "my-own-trainer", "optimizer_sharding": name, "recompute": "full"}
        for name in words
    ]
    found = calibrate(table(tmp_path / "runs.csv", rows), site=True)
    assert [(each.stack, each.rows, each.guessed) for each in found] == [("torchtitan", 4, ("my-own-trainer",))]
    taken = "my-own-trainer is taken for torchtitan, the nearest that is known: plan with --stack torchtitan, or with this profile"
    assert planned(found.pairs[0], found) == [f"{taken} and no --stack"]
    profile = tmp_path / "site.yaml"
    profile.write_text(profile_yaml(found), encoding="utf-8")
    asked = ProblemOptions().problem("llama-3.1-8b", "hgx-h100", 16, 128, 4096, profile=str(profile))
    assert asked.stack.name == "torchtitan"
    assert asked.assumptions[0] == f"stack torchtitan, with which {profile} was learnt"
    assert ProblemOptions(stack="megatron-lm").problem(
        "llama-3.1-8b", "hgx-h100", 16, 128, 4096, profile=str(profile)
    ).stack.name == ("megatron-lm")
    own = validate(tmp_path / "runs.csv", str(profile))
    assert {o.job.problem.stack.name for o in own.outcomes if o.job} == {"torchtitan"}


# --- what a calibration says -----------------------------------------------------------------------------------------------------


def test_rows_of_other_stacks_are_not_told_of_where_one_is_asked_for(tmp_path: Path) -> None:
    """Neither those that could be priced nor those that could not, whose words tell their stack."""
    given = [
        BASE,
        {**BASE, "id": "no time", "measured_step_time_s": ""},
        {**BASE, "id": "other", "software": "torchtitan"},
        {**BASE, "id": "other, no time", "software": "torchtitan", "measured_step_time_s": ""},
        {**BASE, "id": "other, no shape", "software": "torchtitan", "model": "nobody-7b"},
        {**BASE, "id": "no shape", "model": "nobody-7b"},
        {**BASE, "id": "usual, no shape", "software": "", "model": "nobody-7b"},
    ]
    path = table(tmp_path / "runs.csv", given)
    said = calibrate(path, "megatron-lm", site=True).unused
    assert sorted(name for ids in said.values() for name in ids) == ["no shape", "no time", "usual, no shape"]
    assert sum(map(len, calibrate(path, site=True).unused.values())) == 5


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Six runs of two models that took a tenth longer than predicted, more or less."""
    rows = [
        {**row, "id": f"{model}-{row['id']}", "model": model} for model in ("llama-3.1-8b", "qwen3-8b") for row in layouts()[:3]
    ]
    priced = validate(table(tmp_path_factory.mktemp("models") / "runs.csv", rows)).outcomes
    ratios = (1.08, 1.12, 1.1, 1.12, 1.09, 1.1)
    times = [f"{(o.predicted_step_time_s or 0.0) * ratio:.4f}" for o, ratio in zip(priced, ratios, strict=True)]
    return [{**row, "measured_step_time_s": seconds} for row, seconds in zip(rows, times, strict=True)]


def reach(found: Calibrations) -> float:
    return found.intervals.pairs["megatron-lm"]["h100-80gb-sxm"]["dense"].high - 1.0


def test_a_slip_of_a_thousand_does_not_stretch_the_interval_of_a_site(two_models: list[Row], tmp_path: Path) -> None:
    """Milliseconds taken for seconds: the row is named, moves no figure, and does not count among what runs are off by."""
    slip = {**two_models[0], "id": "slip", "micro_batch": "2", "measured_step_time_s": "18200"}
    plain = calibrate(table(tmp_path / "right.csv", two_models), site=True)
    found = calibrate(table(tmp_path / "wrong.csv", [*two_models, slip]), site=True)
    assert [name for name, _ in found.pairs[0].unexplained] == ["slip"]
    assert reach(found) < 1.15 * reach(plain)
    assert found.pairs[0].fits[0].value == pytest.approx(plain.pairs[0].fits[0].value, rel=0.02)
    said = " ".join(profile_yaml(found).split())
    assert "1 run that the figures do not explain is not counted" in said
    assert "leave the rows out: intervals do not count them" in said


@pytest.mark.parametrize(
    ("ratios", "slips"),
    [
        ([1.0, 1.1, 1000.0], 1),  # one is one even among three
        ([1.0, 1000.0], 0),  # of two nobody knows which is the slip
        ([1000.0], 0),
        ([1.0] * 20 + [3.0] * 5, 5),  # an interval of four in five leaves a fifth out
        ([1.0] * 19 + [3.0] * 6, 0),
        ([1.0, 1.9, 0.55], 0),
    ],
)
def test_slips_are_few_and_far_off(ratios: list[float], slips: int) -> None:
    assert slips_among(np.array(ratios)).sum() == slips


def test_runs_that_are_mostly_unexplained_are_all_counted(two_models: list[Row], tmp_path: Path) -> None:
    """Then it is the prediction that is off, and the interval is to say so."""
    factors = (1.0, 30.0, 0.02, 5.0, 40.0, 0.03)
    rows = [
        {**r, "measured_step_time_s": str(float(r["measured_step_time_s"]) * f)} for r, f in zip(two_models, factors, strict=True)
    ]
    found = calibrate(table(tmp_path / "runs.csv", rows), site=True)
    assert 2 * len(found.pairs[0].unexplained) >= found.pairs[0].rows
    assert reach(found) > 0.5
    assert "figures and intervals are not to be relied on" in " ".join(profile_yaml(found).split())

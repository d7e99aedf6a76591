"""The fitter: recovers what made the data, says how sure it is, and writes whole, reproducible profile files."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paraplan.cost_models import profile as profile_module
from paraplan.cost_models.collective_fit import dealt_destinations, expected_destinations, fit_collective, fit_moe, wire_and_hops
from paraplan.cost_models.kernel_fit import fit_gemm, main, read_tables, update_profile
from paraplan.cost_models.kernel_tables import devices
from paraplan.cost_models.log_fit import Parameter, fit_log
from paraplan.cost_models.profile import CollectiveCurve, GemmCurve, collective_s, gemm_s, load_profile, together_s
from paraplan.search_spaces.errors import InputError

PROFILES = Path(profile_module.__file__).parent / "profiles"
GEMM_TRUTH = {"e_max": 0.78, "m0": 90.0, "n0": 300.0, "k0": 140.0, "launch_s": 5e-6}
RING_TRUTH = {"efficiency": 0.8, "half_bytes": 5e6, "gamma": 0.6, "launch_s": 6e-6, "hop_latency_s": 1e-6, "local_cost": 0.4}
AXIS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def curve_of(kind: Any, truth: dict[str, float]) -> Any:
    return kind.model_validate({k: {"value": v, "low": v, "high": v, "source": "made up"} for k, v in truth.items()})


def gemm_rows(seed: int, noise: float, peak: float = 1e15) -> list[dict[str, str]]:
    m, n, k = (axis.ravel() for axis in np.meshgrid(AXIS, AXIS, AXIS, indexing="ij"))
    time_s = gemm_s(curve_of(GemmCurve, GEMM_TRUTH), peak, m, n, k)
    time_s = time_s * np.exp(np.random.default_rng(seed).normal(0, noise, m.size))
    shapes = zip(m, n, k, time_s, strict=True)
    return [{"m": str(a), "n": str(b), "k": str(c), "latency_us": str(t * 1e6)} for a, b, c, t in shapes]


def ring_rows(collective: str, seed: int, noise: float, groups: tuple[int, ...] = (2, 4, 8)) -> list[dict[str, str]]:
    n, message = (axis.ravel().astype(float) for axis in np.meshgrid(groups, 2.0 ** np.arange(9, 31)))
    wire, hops = wire_and_hops(collective, message, n)
    passes = 2 if collective == "all_reduce" else 1
    curve = curve_of(CollectiveCurve, RING_TRUTH).model_copy(update={"passes": passes})
    time_s = collective_s(curve, 450e9, 0.0, hops, wire, message)
    time_s = time_s * np.exp(np.random.default_rng(seed).normal(0, noise, n.size))
    points = zip(n, message, time_s, strict=True)
    return [{"num_gpus": str(int(a)), "bytes": str(int(b)), "latency_us": str(t * 1e6)} for a, b, t in points]


def test_gemm_parameters_are_recovered_exactly_without_noise() -> None:
    curve, error = fit_gemm(gemm_rows(0, 0.0), 1e15, "made up")
    for name, truth in GEMM_TRUTH.items():
        assert getattr(curve, name).value == pytest.approx(truth, rel=0.01), name
    assert error.held_out_p90 < 0.001


def test_gemm_intervals_cover() -> None:
    hits, trials = 0, 40
    for seed in range(trials):
        curve, _ = fit_gemm(gemm_rows(seed, 0.05), 1e15, "made up")
        hits += sum(getattr(curve, name).low <= truth <= getattr(curve, name).high for name, truth in GEMM_TRUTH.items())
    assert 0.88 <= hits / (trials * len(GEMM_TRUTH)) <= 1.0  # 95 % nominal


def test_gemm_fit_shrugs_off_outliers() -> None:
    rows = gemm_rows(3, 0.03)
    for row in rows[::17]:
        row["latency_us"] = str(3 * float(row["latency_us"]))
    curve, error = fit_gemm(rows, 1e15, "made up")
    assert curve.e_max.value == pytest.approx(GEMM_TRUTH["e_max"], rel=0.04)
    assert error.held_out_median < 0.04


def test_held_out_half_is_fixed_and_its_error_is_the_noise() -> None:
    error, again = (fit_gemm(gemm_rows(5, 0.05), 1e15, "made up")[1] for _ in range(2))
    assert error == again
    assert abs(error.points_fitted - error.points_held_out) <= 1
    assert error.held_out_median == pytest.approx(0.6745 * 0.05, rel=0.25)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_collective_parameters_are_recovered(collective: str) -> None:
    fit = fit_collective(ring_rows(collective, 1, 0.01), collective, 450e9, "made up")
    curve, error = fit.curve, fit.error
    assert curve.passes == (2 if collective == "all_reduce" else 1)
    for name, tolerance in (("efficiency", 0.06), ("launch_s", 0.05), ("hop_latency_s", 0.05), ("gamma", 0.15)):
        assert getattr(curve, name).value == pytest.approx(RING_TRUTH[name], rel=tolerance), name
    assert error.held_out_median < 0.015


def test_a_given_hop_latency_is_kept() -> None:
    hop = curve_of(CollectiveCurve, RING_TRUTH).hop_latency_s
    curve = fit_collective(ring_rows("all_to_all", 2, 0.01), "all_to_all", 450e9, "made up", hop).curve
    assert curve.hop_latency_s == hop
    assert curve.launch_s.value == pytest.approx(RING_TRUTH["launch_s"], rel=0.05)


def test_one_group_size_leaves_out_what_it_cannot_tell() -> None:
    fit = fit_collective(ring_rows("all_gather", 2, 0.01, groups=(8,)), "all_gather", 450e9, "made up")
    curve, error = fit.curve, fit.error
    assert curve.hop_latency_s is None
    assert curve.local_cost is None
    assert error.held_out_median < 0.03


def test_a_rate_above_the_link_is_never_fitted() -> None:
    rows = ring_rows("all_gather", 2, 0.01)
    for row in rows:
        row["latency_us"] = str(float(row["latency_us"]) / 4)
    curve = fit_collective(rows, "all_gather", 450e9, "made up").curve
    assert curve.efficiency.high <= 1.0


def test_wire_bytes_follow_the_algorithms() -> None:
    message, n = np.array(8.0), np.array(4.0)
    assert wire_and_hops("all_reduce", message, n) == (12.0, 6.0)
    assert wire_and_hops("all_gather", message, n) == (6.0, 3.0)
    assert wire_and_hops("all_to_all", message, n) == (6.0, 1.0)
    assert wire_and_hops("all_reduce_in_network", message, n) == (8.0, 1.0)
    with pytest.raises(InputError, match="broadcast"):
        wire_and_hops("broadcast", message, n)


def test_expected_destinations_match_a_simulation() -> None:
    random, experts, top_k, destinations = np.random.default_rng(0), 64, 6, 8
    drawn = np.argsort(random.random((20_000, experts)), axis=1)[:, :top_k] // (experts // destinations)
    distinct = np.mean([np.unique(row).size for row in drawn])
    expected = expected_destinations(*(np.array([float(x)]) for x in (destinations, top_k, experts)))
    assert expected[0] == pytest.approx(distinct, rel=0.01)


def test_moe_exchange_is_fitted_over_distinct_destinations() -> None:
    tokens = 2.0 ** np.arange(0, 18)
    eight, message = np.full(tokens.size, 8.0), tokens * 7168 * 2
    message = message * expected_destinations(eight, np.full(tokens.size, 8.0), np.full(tokens.size, 256.0))
    time_us = 1e6 * (3e-5 + message * 7 / 8 / (450e9 * 0.6) * (1 + (2e6 / message) ** 0.6))
    shape = {"hidden": "7168", "topk": "8", "experts": "256", "sms": "20"}
    rows = [{**shape, "tokens_per_rank": str(t), "latency_us": str(u)} for t, u in zip(tokens, time_us, strict=True)]
    fit = fit_moe(rows, eight, 2.0, 450e9, "made up")
    curve, error = fit.curve, fit.error
    assert curve.efficiency.value == pytest.approx(0.6, rel=0.05)
    assert curve.launch_s.value == pytest.approx(3e-5, rel=0.05)
    assert error.held_out_p90 < 0.02


def test_what_multiprocessors_copy_is_told_from_what_links_carry() -> None:
    """Half of the shapes wait for copies at 20 GB/s per multiprocessor and 8 KB more per token, half for half of the link."""
    axes = np.meshgrid(
        2.0 ** np.arange(4, 18), [2048.0, 4096.0, 7168.0], [4.0, 8.0, 16.0, 32.0, 64.0], [1.0, 2.0, 8.0], indexing="ij"
    )
    tokens, hidden, sms, top_k = (axis.ravel() for axis in axes)
    experts, eight = np.full(tokens.size, 256.0), np.full(tokens.size, 8.0)
    copies = tokens * hidden * 2 * expected_destinations(eight, top_k, experts)
    links_s, copies_s = copies * 7 / 8 / (450e9 * 0.5), (copies + tokens * 8192) / (sms * 20e9)
    time_us = 1e6 * (3e-5 + together_s(links_s, copies_s))
    columns = {"hidden": hidden, "topk": top_k, "experts": experts, "sms": sms, "tokens_per_rank": tokens, "latency_us": time_us}
    rows = [dict(zip(columns, map(str, values), strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        row["sms"] = str(int(float(row["sms"])))
    curve = fit_moe(rows, eight, 2.0, 450e9, "made up").curve
    assert curve.sm_bytes_per_s is not None
    assert curve.handling_bytes is not None
    assert curve.sm_bytes_per_s.value == pytest.approx(20e9, rel=0.05)
    assert curve.handling_bytes.value == pytest.approx(8192, rel=0.1)
    assert curve.efficiency.value == pytest.approx(0.5, rel=0.05)


def test_experts_dealt_in_turn_reach_as_many_ranks_as_there_are() -> None:
    two, eight, many = (dealt_destinations(np.array([n]), np.array([8.0]), np.array([256.0]))[0] for n in (2.0, 8.0, 64.0))
    assert (two, eight, many) == (2, 8, 8)


def test_an_unidentified_parameter_gets_a_wide_interval() -> None:
    x = np.linspace(1, 10, 50)
    estimate = fit_log(lambda p: p[0] * x + 0 * p[1], 2 * x, [Parameter(1, 0.1, 10), Parameter(1, 1e-3, 1e3)])
    assert estimate.value[0] == pytest.approx(2, rel=1e-3)
    assert estimate.high[1] / estimate.low[1] > 100
    assert np.abs(estimate.residual).max() < 1e-3


def write_tables(folder: Path) -> None:
    """Tables of the A100 with made-up GEMMs and the collectives of the truth above."""
    gemm = [{"system": "a100_sxm", "gemm_dtype": "bfloat16", **row} for row in gemm_rows(0, 0.02, 312e12)]
    collectives = []
    for label, name in (("all_gather",) * 2, ("reduce_scatter",) * 2, ("all_reduce",) * 2, ("alltoall", "all_to_all")):
        collectives += [{"system": "a100_sxm", "collective": label, **row} for row in ring_rows(name, 0, 0.02)]
    for name, rows in (("gemm", gemm), ("collectives", collectives), ("moe_all_to_all", [{"system": "none"}])):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def test_update_keeps_documented_sections_and_is_reproducible(tmp_path: Path) -> None:
    write_tables(tmp_path)
    path = tmp_path / "a100-80gb-sxm.yaml"
    shutil.copy(PROFILES / path.name, path)
    tables = read_tables(tmp_path)
    updated = update_profile(path, tables, devices()["a100-80gb-sxm"])
    text = path.read_text(encoding="utf-8")
    shipped = load_profile("a100-80gb-sxm")
    assert updated.attention == shipped.attention
    assert updated.collectives["scale-out"] == shipped.collectives["scale-out"]
    assert updated.collectives["scale-up"]["p2p"] == shipped.collectives["scale-up"]["p2p"]
    assert updated.gemm["bf16"].n0.value == pytest.approx(GEMM_TRUTH["n0"], rel=0.2)
    assert load_profile("a100-80gb-sxm", str(path), fits=False) == updated
    update_profile(path, tables, devices()["a100-80gb-sxm"])
    assert path.read_text(encoding="utf-8") == text
    assert text.startswith("#")
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_figure_that_training_runs_gave_outlives_a_new_fit_of_the_table(tmp_path: Path) -> None:
    write_tables(tmp_path)
    path = tmp_path / "a100-80gb-sxm.yaml"
    text = (PROFILES / path.name).read_text(encoding="utf-8")
    given = "{value: 0.5, low: 0.4, high: 0.6, source: share that training runs sustain}"
    path.write_text(re.sub(r"e_max: \{.*'fit: a100_sxm bfloat16.*\}", f"e_max: {given}", text, count=1), encoding="utf-8")
    curve = update_profile(path, read_tables(tmp_path), devices()["a100-80gb-sxm"]).gemm["bf16"]
    assert curve.e_max.value == 0.5
    assert curve.n0.value == pytest.approx(GEMM_TRUTH["n0"], rel=0.2)


def test_the_command_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "gemm.csv" in capsys.readouterr().err
    write_tables(tmp_path)
    assert main([str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "a100-80gb-sxm.yaml" in capsys.readouterr().err

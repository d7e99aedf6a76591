"""The shipped curves against measured points, physics and each other; loading and overriding."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from paraplan.cost_models import profile as profile_module
from paraplan.cost_models.collective_fit import NCCL_TESTS, wire_and_hops
from paraplan.cost_models.kernel_fit import GEMM_DTYPES
from paraplan.cost_models.kernel_tables import devices
from paraplan.cost_models.profile import (
    Fitted,
    Profile,
    attention_efficiency,
    collective_s,
    gemm_s,
    grouped_gemm_s,
    load_profile,
)
from paraplan.search_spaces.errors import InputError
from pydantic import ValidationError

SHIPPED = sorted(path.stem for path in (Path(profile_module.__file__).parent / "profiles").glob("*.yaml"))
MEASURED = Path(__file__).parents[1] / "measured"
SYSTEMS = {device.system: name for name, device in devices().items() if device.measured.same_links and name != "a100-40gb-sxm"}
BF16_CEILING, QUANTISED_CEILING = 0.08, 0.11  # medians of the shipped fits; a refit may lower them, never raise them
COLLECTIVE_CEILING, ALL_TO_ALL_CEILING, MOE_CEILING = 0.065, 0.09, 0.14

sizes = st.floats(min_value=1.0, max_value=1e6)
message_sizes = st.floats(min_value=1.0, max_value=1e11)


def sample(name: str) -> list[dict[str, str]]:
    with (MEASURED / name).open(encoding="utf-8") as file:
        next(file)  # the source line
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> Any:
    return np.array([float(row[name]) for row in rows])


@pytest.fixture(params=SHIPPED)
def profile(request: pytest.FixtureRequest) -> Profile:
    return load_profile(request.param)


def figures(record: Any) -> Iterator[Fitted]:
    if isinstance(record, Fitted):
        yield record
    elif isinstance(record, dict):
        for item in record.values():
            yield from figures(item)
    elif hasattr(type(record), "model_fields"):
        for name in type(record).model_fields:
            yield from figures(getattr(record, name))


def test_every_accelerator_of_the_brief_is_shipped() -> None:
    expected = "a100-80gb-sxm a100-40gb-sxm h100-80gb-sxm h100-96gb-sxm h800 h20 h200 b200 b300 gb200 gb300 mi300x mi355x"
    ascend = "ascend-910b ascend-910c-die ascend-950dt ascend-960"
    assert set(SHIPPED) == {*expected.split(), *ascend.split(), "default"}


def test_every_figure_says_where_it_comes_from(profile: Profile) -> None:
    every = list(figures(profile))
    assert len(every) > 60
    assert all(len(figure.source) > 6 for figure in every)
    assert profile.provenance.summary


def test_a_launch_read_off_exchanges_of_one_hop_has_the_hop_in_it(profile: Profile) -> None:
    """Wherever the fit of a fused kernel goes, on its own accelerator or to another: the level's latency is not added again."""
    for curves in profile.collectives.values():
        for name, curve in curves.items():
            if name.startswith("moe_") and curve.launch_s.source.removeprefix("transferred: ").startswith("fit"):
                assert curve.hop_latency_s is not None and curve.hop_latency_s.value == 0.0, name


def test_fitted_profiles_record_their_held_out_errors(profile: Profile) -> None:
    curves = {f"gemm.{key}" for key in profile.gemm}
    assert not profile.fitted or curves <= set(profile.provenance.errors)
    for key, error in profile.provenance.errors.items():
        assert error.held_out_median <= error.held_out_p90 < 0.3, key
        assert abs(error.points_fitted - error.points_held_out) <= max(10, error.points_fitted // 5)


def test_recorded_errors_do_not_grow(profile: Profile) -> None:
    for key, error in profile.provenance.errors.items():
        ceiling = COLLECTIVE_CEILING
        if key.startswith("gemm"):
            ceiling = BF16_CEILING if key.endswith("bf16") else QUANTISED_CEILING
        elif "moe" in key:
            ceiling = MOE_CEILING
        elif key.endswith("all_to_all"):
            ceiling = ALL_TO_ALL_CEILING
        assert error.held_out_median <= ceiling, key


@pytest.mark.parametrize("dtype", sorted(GEMM_DTYPES))
def test_gemm_curves_meet_measured_points(dtype: str) -> None:
    rows_of = defaultdict(list)
    for row in sample("gemm_sample.csv"):
        if row["gemm_dtype"] == dtype and GEMM_DTYPES[dtype] in devices()[SYSTEMS[row["system"]]].peak_flops:
            rows_of[row["system"]].append(row)
    assert rows_of
    for system, rows in rows_of.items():
        name, precision = SYSTEMS[system], GEMM_DTYPES[dtype]
        shipped = load_profile(name)
        m, n, k, measured = (column(rows, key) for key in ("m", "n", "k", "latency_us"))
        curve, recorded = shipped.gemm[precision], shipped.provenance.errors[f"gemm.{precision}"]
        ratio = gemm_s(curve, devices()[name].peak_flops[precision], m, n, k) / (measured * 1e-6)
        if not curve.e_max.source.startswith("fit:"):  # training runs say what is sustained, the table how it grows with sizes
            assert np.median(ratio) < 1, f"{system}: kernels of training that are slower than a serving path's"
            ratio = ratio / np.median(ratio)
        error = abs(ratio - 1)
        assert np.median(error) < 2 * recorded.held_out_median, system  # 32 points: the median itself scatters
        assert np.quantile(error, 0.75) < 1.3 * recorded.held_out_p90, system


@pytest.mark.parametrize("collective", sorted(NCCL_TESTS))
def test_collective_curves_meet_measured_points(collective: str) -> None:
    rows_of = defaultdict(list)
    for row in sample("collectives_sample.csv"):
        if row["collective"] == NCCL_TESTS[collective]:
            rows_of[row["system"]].append(row)
    for system, rows in rows_of.items():
        device, curves = devices()[SYSTEMS[system]], load_profile(SYSTEMS[system]).collectives["scale-up"]
        if collective == "all_reduce_in_network" and not device.measured.in_network:
            continue
        if device.measured.in_network and NCCL_TESTS[collective] == "all_reduce":
            rows = [row for row in rows if (row["num_gpus"] == "8") == (collective == "all_reduce_in_network")]
        n, message, measured = (column(rows, key) for key in ("num_gpus", "bytes", "latency_us"))
        wire, hops = wire_and_hops(collective, message, n)
        predicted = collective_s(curves[collective], device.scale_up_bytes_per_s, 1e-6, hops, wire, message)
        error = abs(predicted / (measured * 1e-6) - 1)
        assert np.median(error) < 0.12, (system, error)
        assert error.max() < 0.5, (system, error)  # B200 at 16 MiB: NCCL switches protocol, a step no smooth curve follows


def test_the_large_message_limit_agrees_with_measurements_beyond_the_table() -> None:
    # 8 x H200 at 16 GiB (stas00/ml-engineering): all-gather 361.4, all-reduce on the switches 482.3 GB/s bus bandwidth
    curves, eight, message = load_profile("h200").collectives["scale-up"], np.array(8.0), np.array(2.0**34)
    wire, hops = wire_and_hops("all_gather", message, eight)
    assert wire / collective_s(curves["all_gather"], 450e9, 0, hops, wire, message) == pytest.approx(361.4e9, rel=0.05)
    seconds = collective_s(curves["all_reduce_in_network"], 450e9, 0, 1, message, message)
    assert 1.75 * message / seconds == pytest.approx(482.3e9, rel=0.08)


def test_best_gemm_agrees_with_an_independent_shape_search() -> None:
    # brute-force shape search of stas00/ml-engineering: best share of dense BF16 peak
    best = {"a100-80gb-sxm": 0.869, "h100-80gb-sxm": 0.803, "h200": 0.803, "b200": 0.776, "gb200": 0.729, "mi300x": 0.514}
    for name, share in best.items():
        size = 16384.0
        reached = 2 * size**3 / gemm_s(load_profile(name).gemm["bf16"], 1e15, size, size, size) / 1e15
        assert share - 0.12 < reached < share + 0.02, name


@given(m=sizes, n=sizes, k=sizes, factor=st.floats(min_value=1.001, max_value=100))
def test_gemm_time_grows_with_every_dimension(m: float, n: float, k: float, factor: float) -> None:
    curve = load_profile("b200").gemm["fp8"]
    base = gemm_s(curve, 4.5e15, m, n, k)
    for grown in ((m * factor, n, k), (m, n * factor, k), (m, n, k * factor)):
        assert gemm_s(curve, 4.5e15, *grown) > base


def test_gemm_asymptotes(profile: Profile) -> None:
    for curve in profile.gemm.values():
        huge = 1e7
        assert 2 * huge**3 / gemm_s(curve, 1e15, huge, huge, huge) / 1e15 == pytest.approx(curve.e_max.value, rel=1e-3)
        assert gemm_s(curve, 1e30, 1, 1, 1) == pytest.approx(curve.launch_s.value)
        assert gemm_s(curve, 1e15, 0, 128, 128) == 0
        batched = gemm_s(curve, 1e15, 512, 512, 512, batch=8) - curve.launch_s.value
        assert batched == pytest.approx(8 * (gemm_s(curve, 1e15, 512, 512, 512) - curve.launch_s.value))


def test_gemm_broadcasts() -> None:
    time_s = gemm_s(load_profile("h200").gemm["bf16"], 989e12, np.array([[1.0], [64.0]]), np.array([32.0, 64.0, 0.0]), 128)
    assert time_s.shape == (2, 3)
    assert (time_s[:, 2] == 0).all()


def test_grouped_gemm_is_slower_than_one_gemm_of_all_tokens(profile: Profile) -> None:
    curve = profile.gemm["bf16"]
    together = gemm_s(curve, 1e15, 16384, 2048, 7168)
    split = grouped_gemm_s(curve, profile.grouped_gemm, 1e15, 16384 / 32, 2048, 7168, 32)
    assert together < split < 3 * together
    assert grouped_gemm_s(curve, profile.grouped_gemm, 1e15, 0, 2048, 7168, 32) == 0


@given(message=message_sizes, factor=st.floats(min_value=1.001, max_value=1e3), n=st.integers(min_value=2, max_value=1024))
def test_collective_time_grows_with_bytes_and_devices(message: float, factor: float, n: int) -> None:
    for name, curve in load_profile("h100-80gb-sxm").collectives["scale-up"].items():
        if name not in NCCL_TESTS:
            continue
        size = np.array(message)
        small = collective_s(curve, 450e9, 1e-6, *reversed(wire_and_hops(name, size, np.array(n))), size)
        large = collective_s(curve, 450e9, 1e-6, *reversed(wire_and_hops(name, size * factor, np.array(n))), size * factor)
        wide = collective_s(curve, 450e9, 1e-6, *reversed(wire_and_hops(name, size, np.array(n + 1.0))), size)
        assert large > small
        assert wide >= small


def test_collective_asymptotes(profile: Profile) -> None:
    for section in profile.collectives.values():
        for curve in section.values():
            hop_s = curve.hop_latency_s.value if curve.hop_latency_s else 3e-6
            fixed = curve.launch_s.value + 5 * hop_s
            assert collective_s(curve, 1e30, 3e-6, 5, 1.0, 1.0) == pytest.approx(fixed)
            wire = curve.passes * 1e18  # all of the buffer leaves: no copy stays local
            assert wire / collective_s(curve, 1e11, 3e-6, 5, wire, 1e18) == pytest.approx(1e11 * curve.efficiency.value, rel=0.05)


def test_nothing_sent_costs_nothing(profile: Profile) -> None:
    curve = profile.collective_curve("scale-up", "all_reduce")
    assert (collective_s(curve, 1e11, 1e-6, 3, [0.0, 0.0], [0.0, 1e6]) == 0).all()


def test_attention_grows_with_sequence_and_head(profile: Profile) -> None:
    seq, head = np.array([[512.0], [4096.0], [131072.0]]), np.array([64.0, 128.0, 256.0])
    for curve in (profile.attention.forward, profile.attention.backward, profile.attention.unfused_forward):
        share = attention_efficiency(curve, seq, head)
        assert (np.diff(share, axis=0) > 0).all()
        assert (np.diff(share, axis=1) > 0).all()
        assert (share < curve.e_max.value).all()


def test_flash_attention_beats_unfused_and_meets_the_h100_charts() -> None:
    # arXiv 2407.08608 figure 5, causal forward, head dimension 128, TFLOP/s: cuDNN and FlashAttention-3
    curves = load_profile("h100-80gb-sxm").attention
    for seq, cudnn, fa3 in ((1024, 410, 423), (4096, 518, 579), (16384, 539, 616)):
        reached = 989 * float(attention_efficiency(curves.forward, seq, 128))
        assert 0.95 * min(cudnn, fa3) < reached < 1.05 * max(cudnn, fa3)
        assert attention_efficiency(curves.unfused_forward, seq, 128) < attention_efficiency(curves.forward, seq, 128)


def test_fp16_and_vendor_formats_share_a_path() -> None:
    shipped = load_profile("gb200")
    assert shipped.gemm_curve("fp16") is shipped.gemm["bf16"]
    assert shipped.gemm_curve("nvfp4") is shipped.gemm["fp4"]


def test_missing_curves_are_named() -> None:
    shipped = load_profile("a100-80gb-sxm")
    with pytest.raises(InputError, match=r"no gemm curve for precision 'fp8'; it has bf16"):
        shipped.gemm_curve("fp8")
    with pytest.raises(InputError, match=r"section 'optical'.*scale-out, scale-up"):
        shipped.collective_curve("optical", "all_reduce")
    with pytest.raises(InputError, match="no curve for 'broadcast'"):
        shipped.collective_curve("scale-up", "broadcast")


def test_unknown_accelerators_get_the_default_and_variants_their_family() -> None:
    unknown = load_profile("my-chip")
    assert (unknown.accelerator, unknown.fitted) == ("my-chip", False)
    assert unknown.gemm == load_profile("default").gemm
    assert load_profile("ascend-910b-376t").gemm == load_profile("ascend-910b").gemm
    assert load_profile("H200").gemm == load_profile("h200").gemm
    assert load_profile("../h200").gemm == unknown.gemm
    other_memory, die = load_profile("h100-96gb-sxm"), load_profile("h100-80gb-sxm")
    assert (other_memory.gemm, other_memory.collectives, other_memory.fitted) == (die.gemm, die.collectives, True)
    assert other_memory.accelerator == "h100-96gb-sxm"


def test_a_users_file_overrides_section_by_section(tmp_path: Path) -> None:
    mine = {"value": 0.5, "low": 0.4, "high": 0.6, "source": "my own runs"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"gemm": {"bf16": {"e_max": mine}}, "memory_efficiency": dict(mine)}), encoding="utf-8")
    shipped, merged = load_profile("h200"), load_profile("h200", str(file))
    assert merged.gemm["bf16"].e_max.value == merged.memory_efficiency.value == 0.5
    assert merged.gemm["bf16"].k0 == shipped.gemm["bf16"].k0
    assert merged.gemm["fp8"] == shipped.gemm["fp8"]
    assert merged.collectives == shipped.collectives


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gemm: {bf16: {e_max: {value: 1.5, low: 1, high: 2, source: x}}}", "e_max"),
        ("memory_efficiency: {value: 0.5, low: 0.6, high: 0.7, source: x}", "outside its interval"),
        ("memory_efficiency: {value: 0.5}", "memory_efficiency"),
        ("speed: 3", "speed"),
        ("- 1", "mapping"),
        ("a: [", "mine.yaml"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"mine\.yaml") as caught:
        load_profile("h200", str(file))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        load_profile("h200", str(tmp_path / "nowhere.yaml"))


def test_profiles_are_immutable() -> None:
    with pytest.raises(ValidationError):
        load_profile("h200").fitted = False  # type: ignore[misc]

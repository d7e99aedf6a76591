"""What rows of a sweep say together: batches that they share, strategies, scaling efficiency and fronts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.optimizer.reports.sweep_look import COLOURS, ink, short_count
from paraplan.optimizer.sweeps.grid import Batch
from paraplan.optimizer.sweeps.series import (
    batches,
    by_size,
    efficiencies,
    front,
    in_batch,
    panels,
    phase_axes,
    strategy,
    with_efficiencies,
)

DEGREES = {"tp": 1, "cp": 1, "pp": 1, "dp": 8, "ep": 1, "vpp": 1}


def row(devices: int, global_batch: int, rate: float = 100.0, **more: Any) -> dict[str, Any]:
    asked = {"model": "dense:7B", "cluster": "hgx-h100", "seq_len": 4096, "precision": "bf16", "status": "optimal"}
    return {
        **asked,
        **DEGREES,
        "devices": devices,
        "global_batch": global_batch,
        "tokens_per_s_per_device": rate,
        "tokens_per_s": rate * devices,
        **more,
    }


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([(64, 256), (128, 512), (256, 1024)], ["4 per device"]),
        ([(64, 256), (128, 256), (256, 256)], ["256 sequences"]),
        ([(64, 256), (64, 512)], ["256 sequences", "512 sequences"]),
        ([(64, 64), (64, 128), (128, 128), (128, 256)], ["1 per device", "2 per device"]),
        ([(64, 256), (128, 256), (256, 256), (128, 512), (256, 1024)], ["4 per device", "256 sequences"]),
        ([(64, 256), (256, 256), (256, 1024)], ["4 per device", "256 sequences"]),
        ([], []),
    ],
)
def test_the_fewest_batches_that_hold_all_rows(asked: list[tuple[int, int]], words: list[str]) -> None:
    found = batches([row(*pair) for pair in asked])
    assert [batch.words for batch in found] == words


def test_a_batch_of_tokens_is_told_by_sequences_that_get_fewer_as_they_get_longer() -> None:
    rows = [row(64, 1024, seq_len=4096), row(64, 128, seq_len=32768), row(64, 4, seq_len=1 << 20)]
    assert batches(rows) == [Batch("tokens", 1 << 22)]


@given(st.lists(st.tuples(st.sampled_from([8, 16, 64]), st.integers(1, 64), st.sampled_from([1024, 4096])), min_size=1))
def test_every_row_is_of_a_batch_that_is_named(asked: list[tuple[int, int, int]]) -> None:
    rows = [row(devices, batch, seq_len=length) for devices, batch, length in asked]
    assert all(any(in_batch(one, batch) for batch in batches(rows)) for one in rows)


def test_a_strategy_is_what_is_divided_beside_the_batch() -> None:
    assert strategy(row(8, 8)) == "data or cp"
    assert strategy(row(8, 8, tp=2, cp=4, ep=8)) == "tp ep"
    assert strategy(row(8, 8, tp=2, pp=2, ep=8, dp=64)) == "tp pp ep"


def test_efficiency_is_against_the_fewest_devices_that_have_a_plan_at_the_same_batch() -> None:
    rows = [
        row(64, 256, status="infeasible"),
        row(128, 512, 200.0),
        row(256, 1024, 190.0),
        row(256, 512, 150.0),
        row(128, 512, 50.0, cluster="gb200-nvl72"),
        row(256, 1024, 55.0, cluster="gb200-nvl72"),
    ]
    assert efficiencies(rows, Batch("per device", 4)) == {1: 1.0, 2: 0.95, 4: 1.0, 5: pytest.approx(1.1)}
    assert efficiencies(rows, Batch("sequences", 512)) == {1: 1.0, 3: 0.75}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_a_front_holds_what_no_other_beats(points: list[tuple[int, int]]) -> None:
    found = front(points, lambda point: point[0], lambda point: point[1])
    beaten = {a for a in points for b in points if a != b and b[0] <= a[0] and b[1] >= a[1]}
    assert set(found) == set(points) - beaten
    assert found == sorted(set(found))


def test_models_are_ordered_by_size_and_experts_apart() -> None:
    names = ("moe:30B", "dense:70B", "mine.yaml", "moe:2T", "dense:7B")
    assert by_size([row(8, 8, model=name) for name in names]) == ["dense:7B", "dense:70B", "moe:30B", "moe:2T", "mine.yaml"]


def test_panels_are_what_differs_beside_their_axes() -> None:
    lengths = [row(64, 256, seq_len=length) for length in (4096, 8192)]
    assert phase_axes(lengths) == ("seq_len", "cluster") or phase_axes(lengths) == ("seq_len", "model")
    both = [row(devices, 4 * devices, cluster=name) for devices in (64, 128) for name in ("gb200-nvl72", "hgx-h100")]
    assert phase_axes(both) == ("devices", "cluster")
    assert {title: len(held) for title, held in panels(both, "devices", "model").items()} == {"gb200-nvl72": 2, "hgx-h100": 2}
    twice = [*both, *(row(devices, 8 * devices, cluster="hgx-h100") for devices in (64, 128))]
    assert list(panels(twice, "devices", "cluster")) == ["batch 4 per device", "batch 8 per device"]


def test_clusters_that_have_one_count_each_stand_side_by_side() -> None:
    counts = {"hgx-h100": 2048, "gb200-nvl72": 768}
    rows = [row(count, batch, cluster=name) for name, count in counts.items() for batch in (2048, 8192)]
    assert phase_axes(rows) == ("cluster", "model")
    found = panels(rows, "cluster", "model")
    assert {title: [one["cluster"] for one in held] for title, held in found.items()} == {
        "batch 2,048 sequences": list(counts),
        "batch 8,192 sequences": list(counts),
    }


def linear(colour: str) -> list[float]:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lightness(colour: str) -> float:
    """CIE L*, of which a difference of about 2 is just seen between patches side by side."""
    return 116 * luminance(colour) ** (1 / 3) - 16


def test_colours_of_strategies_are_told_apart_in_grey_and_words_on_them_are_read() -> None:
    steps = [lightness(colour) for colour in COLOURS.values()]
    assert min(a - b for a, b in pairwise(steps)) > 6  # by lightness alone, which every eye sees
    for name, colour in COLOURS.items():
        pair = sorted((luminance(colour), luminance(ink(name))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) > 4.5  # WCAG 2, contrast (minimum)


def test_counts_are_short_where_they_are_powers_of_two() -> None:
    assert [short_count(value) for value in (64, 1024, 1536, 16384, 1 << 20)] == ["64", "1K", "1,536", "16K", "1M"]


def test_each_row_says_how_well_it_scales_where_other_counts_of_devices_have_a_plan_at_its_batch() -> None:
    rows = [
        row(64, 256, 200.0),
        row(128, 256, 150.0),
        row(128, 512, 190.0),
        row(256, 256, status="infeasible", tokens_per_s_per_device=None),
        row(64, 256, 10.0, cluster="gb200-nvl72"),
    ]
    found = [(each["efficiency_fixed_batch"], each["efficiency_scaled_batch"]) for each in with_efficiencies(rows)]
    assert found == [(1.0, 1.0), (0.75, None), (None, 0.95), (None, None), (None, None)]

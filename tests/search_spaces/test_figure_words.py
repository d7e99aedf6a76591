"""Figures in the assumptions: read in units, the user's own named, and text with a unit answered with the number to write."""

from __future__ import annotations

import pytest
from paraplan.search_spaces.cluster import Figure
from paraplan.search_spaces.documents import to_record
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.figure_words import assumed


def figure(value: float, low: float, high: float) -> Figure:
    return Figure(value=value, low=low, high=high, grade="assumed", source="a guess")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("hgx context_bytes", (819 * 2**20, 2**29, 3 * 2**30), "= 0.8 GiB (0.5 to 3): a guess"),
        ("hgx communicator_bytes", (200 * 2**20, 100 * 2**20, 400 * 2**20), "= 200 MiB (100 to 400): a guess"),
        ("hgx scale-out bandwidth_bytes_per_s", (50e9, 40e9, 50e9), "= 50 GB/s (40 to 50): a guess"),
        ("stack host_floor_moe_s", (2.7e-3, 675e-6, 5.4e-3), "= 2.7 ms (0.675 to 5.4): a guess"),
        ("stack restart_s", (600, 180, 1000), "= 600 s (180 to 1,000): a guess"),
        ("stack efficiency", (0.93, 0.8, 1.1), "= 0.93 (0.8 to 1.1): a guess"),
    ],
)
def test_assumed_figures_are_read_in_units(name: str, values: tuple[float, float, float], said: str) -> None:
    assert list(assumed([(name, figure(*values))])) == [f"{name} {said}"]


def test_figures_of_the_user_stand_in_one_sentence() -> None:
    given = {name: Figure.model_validate(value) for name, value in (("mine memory_bytes", 96e9), ("mine peak_flops.bf16", 1e15))}
    measured = Figure(value=1.0, grade="measured", source="a table")
    assert list(assumed([*given.items(), ("mine latency_s", measured)])) == [
        "taken as given, from your files: mine memory_bytes = 89.4 GiB, mine peak_flops.bf16 = 1 PFLOP/s"
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80 GB", "80e9"),
        ("400 Gb/s", "50e9"),
        ("2 µs", "2e-6"),
        ("989TFLOP/s", "989e12"),
        ("64 MiB", "67108864"),
        ("1.5 s", "1.5"),
        ("eighty", None),
    ],
)
def test_text_with_a_unit_is_answered_with_the_number(text: str, number: str | None) -> None:
    with pytest.raises(InputError) as refused:
        to_record(Figure, {"value": text, "source": "a table", "grade": "measured"}, "mine.yaml")
    hint = "" if number is None else f"; write {number}"
    assert str(refused.value) == f"mine.yaml: value = {text!r}: must be a number{hint}"
    if number is not None:
        to_record(Figure, {"value": float(number), "source": "a table", "grade": "measured"}, "mine.yaml")

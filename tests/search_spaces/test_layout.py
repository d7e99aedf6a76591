"""Columns of many layouts: rows that agree are found, whatever they hold, and a table prices every row as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from paraplan.cost_models.step import CostModel, same_shape
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import LayoutTable, Split
from paraplan.search_spaces.row_keys import distinct_rows, row_keys, sorted_rows, varying

WHOLE = arrays.arrays(np.int64, st.just(24), elements=st.integers(-(1 << 40), 1 << 40) | st.integers(0, 3))
SHARES = arrays.arrays(np.float64, st.just(24), elements=st.floats(0, 1, allow_nan=False) | st.sampled_from([0.0, 1.0]))


@given(st.lists(WHOLE | SHARES, min_size=1, max_size=5))
def test_keys_agree_where_all_columns_do_and_nowhere_else(columns: list[np.ndarray]) -> None:
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    keys = row_keys(columns).tolist()
    assert [[a == b for b in keys] for a in keys] == [[a == b for b in rows] for a in rows]


@given(st.lists(WHOLE | SHARES, min_size=1, max_size=5))
def test_distinct_rows_are_the_first_of_each(columns: list[np.ndarray]) -> None:
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    first, member = distinct_rows(columns)
    assert sorted(first.tolist()) == sorted({row: rows.index(row) for row in rows}.values())
    assert [rows[first[place]] for place in member] == rows


@given(st.lists(WHOLE, min_size=1, max_size=5))
def test_sorted_rows_lie_by_their_columns_and_equal_ones_as_they_lay(columns: list[np.ndarray]) -> None:
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    order, begin = sorted_rows(columns)
    assert order.tolist() == sorted(range(len(rows)), key=rows.__getitem__)
    ordered = [rows[row] for row in order]
    assert begin.tolist() == [place for place, row in enumerate(ordered) if not place or row != ordered[place - 1]]


@given(arrays.arrays(np.int64, st.tuples(st.integers(1, 9), st.integers(1, 200)), elements=st.integers(90, 91)))
def test_wide_rows_are_told_apart_by_what_varies(rows: np.ndarray) -> None:
    """Also where least values with so many digits behind them pass what an integer holds."""
    columns = varying(rows)
    assert all(len(set(column.tolist())) > 1 for column in columns)
    distinct = {row.tobytes() for row in rows}
    first, member = distinct_rows([np.zeros(len(rows), dtype=np.int64), *columns])
    assert len(first) == len(distinct) and (rows[first][member] == rows).all()


def test_no_rows_have_no_keys() -> None:
    assert len(row_keys([np.zeros(0, dtype=np.int64)])) == 0
    first, member = distinct_rows([np.zeros(0, dtype=np.int64), np.zeros(0)])
    assert len(first) == len(member) == 0


@pytest.mark.parametrize(
    ("model", "cluster", "devices", "stack"),
    [
        ("llama-3.1-8b", "hgx-h100", 24, None),
        ("qwen3-30b-a3b", "hgx-h100", 16, None),
        ("llama-3.1-8b", "hgx-h100", 16, "torchtitan"),
    ],
)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_shuffled_table_prices_every_row_as_if_it_were_alone(
    model: str, cluster: str, devices: int, stack: str | None, seed: int
) -> None:
    """Works and states are shared between the rows of a table; no row may notice."""
    problem = build_problem(model, cluster, devices, 48, 4096, stack)
    space, rng = Space(problem), np.random.default_rng(seed)
    table, _ = space.layouts(rng.choice(len(space.frames), size=6, replace=False))
    table = cut_at_random(table.take(rng.permutation(len(table))[:40]), len(CostModel(problem).blocks), rng)
    together = CostModel(problem).price(table)
    for row in range(len(table)):
        alone = CostModel(problem).price(table.take(np.array([row])))
        assert together.step_time_s[row] == pytest.approx(alone.step_time_s[0], rel=1e-12)
        assert together.peak_bytes[row] == pytest.approx(alone.peak_bytes[0], rel=1e-12)
        assert together.fits[row] == alone.fits[0]


def cut_at_random(table: LayoutTable, blocks: int, rng: np.random.Generator) -> LayoutTable:
    """Two ways to cut the blocks for each pp and vpp, dealt to the rows at random."""
    split, splits = np.zeros(len(table), dtype=np.int64), []
    for members in same_shape(table):
        pp, vpp = int(table.pp[members[0]]), int(table.vpp[members[0]])
        for _ in range(2):
            inner = np.sort(rng.choice(np.arange(1, blocks), size=pp * vpp - 1, replace=False))
            splits.append(Split(pp, vpp, (0, *inner.tolist(), blocks)))
        split[members] = len(splits) - 1 - rng.integers(0, 2, len(members))
    return table.with_splits(split, tuple(splits))

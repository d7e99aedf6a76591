"""Stages priced by class against the full price of every stage."""

from __future__ import annotations

import numpy as np
import pytest
from paraplan.cost_models.stage_classes import StageClasses
from paraplan.cost_models.step import CostModel
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import LayoutTable, Problem, Split

PROBLEMS = {
    "dense": ("gpt3-175b", "hgx-a100", 512, 192, 2048),
    "mixture of experts": ("deepseek-v3", "hgx-h800", 512, 1024, 4096),
    "offloading": ("qwen3-30b-a3b", "atlas-800t-a2", 64, 128, 4096),
}
LAYOUTS = 400


def random_cuts(rng: np.random.Generator, blocks: int, chunks: int) -> tuple[int, ...]:
    """Even cuts with the remainder first, or spread, or any cuts at all, chunks without blocks among them."""
    kind = rng.integers(3)
    if kind == 0:
        base, extra = divmod(blocks, chunks)
        return (0, *np.cumsum([base + (c < extra) for c in range(chunks)]).tolist())
    if kind == 1:
        return tuple(np.linspace(0, blocks, chunks + 1).round().astype(int).tolist())
    return (0, *np.sort(rng.integers(0, blocks + 1, chunks - 1)).tolist(), blocks)


def random_table(problem: Problem, rng: np.random.Generator) -> LayoutTable:
    """Random legal layouts, several of each split."""
    space, blocks = Space(problem), len(CostModel(problem).blocks)
    frames = rng.choice(np.flatnonzero(space.layouts_per_frame), 40)
    table, _ = space.layouts(np.unique(frames))
    table = table.take(rng.choice(len(table), LAYOUTS))
    split, splits = np.zeros(len(table), dtype=np.int64), []
    for shape in sorted(set(zip(table.pp.tolist(), table.vpp.tolist(), strict=True))):
        members = np.flatnonzero((table.pp == shape[0]) & (table.vpp == shape[1]))
        for some in (members[::2], members[1::2]):
            split[some] = len(splits)
            splits.append(Split(*shape, random_cuts(rng, blocks, shape[0] * shape[1])))
    return table.with_splits(split, tuple(splits))


@pytest.mark.parametrize("name", PROBLEMS)
def test_prices_by_class_are_those_of_all_stages(name: str) -> None:
    model = CostModel(build_problem(*PROBLEMS[name]))
    table = random_table(model.problem, np.random.default_rng(7))
    by_class, rows = model.price(table, closed_form=True), model.rows(table).known()
    key = table.split * 8 + table.schedule
    assert len(np.unique(key)) > 10
    for each in np.unique(key):
        members = np.flatnonzero(key == each)
        cuts = np.array([table.splits[int(table.split[members[0]])].cuts])
        whole = model.price_cuts(rows.take(members), cuts, closed_form=True)
        np.testing.assert_allclose(by_class.step_time_s[members], whole.step_time_s, rtol=1e-13)
        np.testing.assert_array_equal(by_class.peak_bytes[members], whole.peak_bytes)
        np.testing.assert_array_equal(by_class.fits[members], whole.fits)
        np.testing.assert_array_equal(by_class.fullest_stage[members], whole.fullest_stage)
        flow = model.flow(rows.take(members), cuts, closed_form=True)
        done = model.around_pipeline(rows.take(members), flow).done_s
        told = done[np.arange(len(members)), by_class.critical_stage[members]]
        np.testing.assert_allclose(told, done.max(axis=1), rtol=1e-13)


def test_classes_of_a_split() -> None:
    blocks = ("dense",) * 2 + ("moe",) * 6
    found = StageClasses.of(Split(6, 1, (0, 1, 2, 4, 6, 7, 8)), blocks)
    assert found.stage.tolist() == [0, 1, 2, 2, 3, 4]
    assert (found.runs.tolist(), found.run_lengths.tolist()) == ([0, 1, 2, 3, 4], [1, 1, 2, 1, 1])
    again = StageClasses.of(Split(5, 1, (0, 2, 4, 5, 7, 8)), ("moe",) * 8)
    assert (again.stage.tolist(), again.first.tolist(), again.first_runs.tolist()) == ([0, 1, 2, 1, 3], [0, 1, 2, 4], [0, 1, 2, 4])
    chunked = StageClasses.of(Split(2, 2, (0, 2, 4, 6, 8)), ("moe",) * 8)
    assert (chunked.chunk.tolist(), chunked.stage.tolist()) == ([0, 1, 1, 2], [0, 1])

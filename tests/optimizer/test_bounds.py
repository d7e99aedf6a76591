"""Bounds are admissible: no layout under any partition takes less time or memory, and nothing that fits is called unreachable."""

from __future__ import annotations

import random
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.step import CostModel, same_shape
from paraplan.optimizer.bounds import (
    frame_bounds,
    least_after,
    most_work_s,
    row_bounds_bytes,
    row_bounds_s,
    ruled_bounds_s,
    work_bounds_bytes,
    work_bounds_s,
)
from paraplan.optimizer.reach import reachable
from paraplan.optimizer.stages import partitioned_exactly
from paraplan.search_spaces.choices import FRAME
from paraplan.search_spaces.conditions import any_of, at_most, equal
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem, load_stack
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LayerKind
from paraplan.search_spaces.layout import COLUMNS, Layout, LayoutTable, Problem
from paraplan.search_spaces.model import ModelSpec
from paraplan.search_spaces.rulebook import Rule
from paraplan.search_spaces.rules import rules_for
from paraplan.search_spaces.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import Priced, given, legal_layouts, price_everything, random_cluster, random_problem

ROUNDING = 1.0 + 1e-12


def priced_problems(seeds: range, largest: int = 1200) -> list[tuple[Problem, CostModel, Priced]]:
    """Problems with every layout and partition priced; those that are empty or slow to list are passed over."""
    found = []
    for problem in map(random_problem, seeds):
        if 0 < Space(problem).listed <= largest:
            model = CostModel(problem)
            found.append((problem, model, price_everything(problem, model, legal_layouts(problem))))
    return found


def least(values: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """Least value over the rows of each owner, (count,)."""
    found = np.full(count, np.inf)
    np.minimum.at(found, owner, values)
    return found


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(500, 560, 10)], ids=lambda seeds: str(seeds.start))
def test_no_partition_lies_below_its_bounds(seeds: range) -> None:
    for problem, model, priced in priced_problems(seeds):
        layouts = priced.layouts
        rows = model.rows(LayoutTable.from_layouts(layouts))
        after = least_after(model, rows)
        assert np.isfinite(after).all()
        best_s = least(priced.step_time_s, priced.owner, len(layouts))
        assert (row_bounds_s(model, rows, after) <= best_s * ROUNDING).all()
        assert (row_bounds_bytes(model, rows) <= least(priced.peak_bytes, priced.owner, len(layouts)) * ROUNDING).all()

        space = Space(problem)
        place = {frame: i for i, frame in enumerate(zip(*(getattr(space.frames, name).tolist() for name in FRAME), strict=True))}
        frame = np.array([place[tuple(getattr(layout, name) for name in FRAME)] for layout in layouts], dtype=np.intp)
        bound, fits = frame_bounds(model, space)
        assert (bound[frame] <= best_s * ROUNDING).all()
        assert_works_bound_their_layouts(problem, model, priced, best_s)
        lightest = least(priced.peak_bytes, frame[priced.owner], len(space.frames))
        assert (fits | (lightest > model.usable_bytes)).all()


@pytest.mark.parametrize("bucket", [1000, 10**9])
def test_bounds_hold_for_buckets_of_any_size(bucket: int) -> None:
    tried = 0
    for seed in range(500, 515):
        problem = random_problem(seed)
        if problem.stack.sends_buckets and 0 < Space(problem).listed <= 600:
            model = CostModel(problem.model_copy(update={"stack": problem.stack.model_copy(update={"gradient_bucket": bucket})}))
            priced = price_everything(problem, model, legal_layouts(problem))
            rows = model.rows(LayoutTable.from_layouts(priced.layouts))
            best_s = least(priced.step_time_s, priced.owner, len(priced.layouts))
            assert (row_bounds_s(model, rows, least_after(model, rows)) <= best_s * ROUNDING).all()
            tried += 1
    assert tried >= 2


def assert_works_bound_their_layouts(problem: Problem, model: CostModel, priced: Priced, best_s: np.ndarray) -> None:
    """A work's bounds, for any layout that it stands for; the works stand for every layout, each once."""
    space = Space(problem)
    works = space.works(np.arange(len(space.frames)))
    table, of_work = space.layouts_of(works)
    assert works.stands_for.sum() == space.legal and len(table) == space.listed
    mine = [tuple(row) for row in zip(*(getattr(table, name).tolist() for name in COLUMNS[:-1]), strict=True)]
    theirs = LayoutTable.from_layouts(priced.layouts)
    place = {tuple(row): i for i, row in enumerate(zip(*(getattr(theirs, name).tolist() for name in COLUMNS[:-1]), strict=True))}
    layout = np.array([place[row] for row in mine], dtype=np.intp)
    assert sorted(layout.tolist()) == list(range(len(priced.layouts)))
    rows = model.rows(works.table)
    lightest = least(priced.peak_bytes, priced.owner, len(priced.layouts))
    assert (work_bounds_s(model, rows)[of_work] <= best_s[layout] * ROUNDING).all()
    assert (work_bounds_bytes(model, rows, space.sharings)[of_work] <= lightest[layout] * ROUNDING).all()
    ruled = np.nonzero(~partitioned_exactly(problem, works.table))[0]
    below = np.zeros(len(rows))
    below[ruled] = ruled_bounds_s(model, rows.take(ruled))
    assert (below[of_work] <= best_s[layout] * (1.0 + 1e-9)).all()


@pytest.mark.parametrize("seeds", [range(first, first + 8) for first in (600, 700, 800)], ids=lambda seeds: str(seeds.start))
def test_a_partition_that_meets_its_limits_is_reachable(seeds: range) -> None:
    """The limits are those that some partition just meets: its own step time, its own peak, both."""
    reached = 0
    for problem, model, priced in priced_problems(seeds, largest=400):
        rows = model.rows(LayoutTable.from_layouts(priced.layouts))
        after = least_after(model, rows)
        for members in same_shape(rows.table):
            if not partitioned_exactly(problem, rows.table.take(members)).all():
                continue
            for row in members:
                one = rows.take(np.array([row]))
                mine = np.nonzero(priced.owner == row)[0]
                for partition in mine[np.argsort(priced.step_time_s[mine])][[0, len(mine) // 2]]:
                    limit = priced.step_time_s[partition] - model.problem.stack.step_overhead_s.value
                    work_s = most_work_s(one, after[[row]], np.array([limit]))
                    peak = priced.peak_bytes[partition] * ROUNDING
                    assert reachable(model, one, work_s, peak).all()
                    reached += 1
    assert reached > 100


def uneven_problem(seed: int) -> Problem:
    """Wide and narrow layers in any order, on a host that costs nothing: redoing one wide layer takes longer than a narrow one."""
    rng = random.Random(seed)
    kinds = {
        "narrow": LayerKind(mlp=DenseMlp(width=64), norms=1),
        "wide": LayerKind(mixer=Attention(heads=12, kv_heads=4, head_dim=64), mlp=DenseMlp(width=16384)),
    }
    order = ["wide", *(rng.choice(("narrow", "wide")) for _ in range(rng.randint(3, 7)))]
    rng.shuffle(order)
    model = ModelSpec(
        name="uneven", hidden_size=768, vocab_size=1000, max_position_embeddings=1024, kinds=kinds, layers=tuple(order)
    )
    floors = {"host_floor_dense_s": given(1e-9), "host_floor_moe_s": given(1e-9)}
    stack = load_stack("megatron-lm").model_copy(update=floors)
    workload = Workload(global_batch=48, seq_len=720)
    return Problem(model=model, cluster=random_cluster(rng), devices=8, stack=stack, workload=workload)


def test_block_recompute_of_unequal_layers_hides_no_partition() -> None:
    """A stage that begins one layer later redoes another layer, which may take longer than what it left out."""
    for seed in range(60):
        problem = uneven_problem(seed)
        model, layers = CostModel(problem), problem.model.num_layers
        rng = random.Random(seed)
        pp = rng.randint(2, min(5, layers))
        layout = Layout(pp=pp, num_microbatches=48, sequence_parallel=False, recompute=f"full:block:{rng.choice((1, 1, 2))}")
        rows = model.rows(LayoutTable.from_layouts([layout]))
        after = least_after(model, rows)
        for inner in combinations(range(1, layers), pp - 1):
            cuts = np.array([[0, *inner, layers]])
            chunks, price = rows.chunks(cuts), model.price_cuts(rows, cuts)
            work_s = (chunks.forward_s + chunks.backward_s).max(axis=1)
            assert reachable(model, rows, work_s * ROUNDING, price.peak_bytes[0] * ROUNDING).all()
            allowed_s = most_work_s(rows, after, price.step_time_s - problem.stack.step_overhead_s.value)
            assert (work_s <= allowed_s).all()


def test_memory_bounds_hold_where_the_first_stage_has_the_larger_short_lived_block() -> None:
    """A gathered embedding that TP leaves whole outweighs the head's share and a short sequence's logits."""
    problem = build_problem("llama-3.1-8b", "hgx-h200", 16, 16, 256, "kempnerforge")
    model = CostModel(problem)
    layout = Layout(tp=4, pp=2, dp=2, edp=8, num_microbatches=8, sequence_parallel=False, optimizer_sharding="zero3")
    rows = model.rows(LayoutTable.from_layouts([layout]))
    assert rows.last_transient_bytes[0] < rows.transient_bytes[0]
    for first in range(1, 32):
        peak = model.price_cuts(rows, np.array([[0, first, 32]])).peak_bytes
        assert (row_bounds_bytes(model, rows) <= peak * ROUNDING).all()
        assert reachable(model, rows, np.full(1, np.inf), peak[0] * ROUNDING).all()


def test_limits_that_nothing_meets_are_unreachable() -> None:
    problem = uneven_problem(1)
    model = CostModel(problem)
    rows = model.rows(LayoutTable.from_layouts([Layout(pp=2, num_microbatches=48, sequence_parallel=False)]))
    anything = np.full(1, np.inf)
    assert reachable(model, rows, anything, np.inf).all()
    assert not reachable(model, rows, anything, rows.transient_bytes[0] / 2).any()  # no stage holds even its buffers
    assert not reachable(model, rows, rows.work_s / 3, np.inf).any()  # two stages do two thirds of the work


def test_bounds_hold_where_a_rule_ties_both_kinds_of_choices() -> None:
    """A rule over pipeline and sharing columns makes one list of two; bounds then read their choices from that list."""
    problem = build_problem("qwen3-0.6b", "hgx-h100", 8, 16, 4096, fix="recompute=none")
    condition = any_of(at_most("vpp", 1), equal("sharding", 1))
    tied = Space(problem, (*rules_for(problem), Rule("T1", "test", "test", "arithmetic", condition)))
    free, model = Space(problem), CostModel(problem)
    assert 0 < tied.listed < free.listed
    for mine, theirs in zip(frame_bounds(model, tied), frame_bounds(model, free), strict=True):
        np.testing.assert_array_equal(mine, theirs)

"""Stages that hold mirror images, or whose passes are split, are cut as well as by listing all cuts, and no bound is above them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.loads import Cuts
from paraplan.cost_models.rows import Rows
from paraplan.cost_models.schedules import BACKWARD, FORWARD, MIRRORED, PAIRED, SPLIT, stage_chunks
from paraplan.cost_models.split_passes import pass_times
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.mirrored import REACH, mirrored_cuts
from paraplan.optimizer.recutting import proved
from paraplan.optimizer.stages import balanced_cuts, cut_family, cutting_of, default_cuts, roomy_family
from paraplan.search_spaces.inputs import load_stack
from paraplan.search_spaces.layout import Floats, Layout, LayoutTable, Problem, Split
from paraplan.search_spaces.vocabulary import V_SHAPED

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import given, legal_cuts, random_model, random_problem, with_memory


def deep(seed: int, schedule: str, split_backward: bool) -> Problem:
    """A random model of eight layers or so on a stack that can be told any cut and runs the schedule."""
    rng, problem = random.Random(f"mirrored {seed}"), random_problem(seed)
    changes = {"schedules": (schedule,), "split_backward": split_backward}
    if seed % 2:
        changes |= {"host_floor_dense_s": given(1e-6), "host_floor_moe_s": given(1e-6)}
    stack = load_stack("megatron-lm").model_copy(update=changes)
    model = next(model for _ in range(99) if (model := random_model(rng, most_layers=11)).num_layers > 6)
    return problem.model_copy(update={"model": model, "stack": stack, "devices": 8})


def listed(model: CostModel, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Steps of all legal cuts of a layout, and the bytes of each one's fullest stage."""
    cuts = np.array(legal_cuts(model.problem, layout.pp, layout.vpp), dtype=np.int64)
    rows = model.rows(LayoutTable.from_layouts([layout]))
    priced = model.price_cuts(rows.take(np.zeros(len(cuts), dtype=np.intp)), cuts)
    return priced.step_time_s, priced.peak_bytes


def case(seed: int, schedule: str) -> tuple[Problem, Layout]:
    """A random problem, and a layout of eight devices or fewer that leaves only its cuts open."""
    problem, rng = deep(seed, schedule, split_backward=seed % 3 > 0), random.Random(seed)
    pp, vpp, moe = *((2, 2) if schedule in V_SHAPED else (4, 1)), problem.model.is_moe
    asked = {"pp": pp, "vpp": vpp, "schedule": schedule, "dp": 2, "ep": 1 + moe, "edp": 2 - moe, "sequence_parallel": False}
    layout = Layout(num_microbatches=rng.choice((2, 3, 6)) * 2 * pp, recompute=rng.choice(("none", "full")), **asked)
    return problem, layout


def cut_by_rule(model: CostModel, layout: Layout) -> Layout:
    """The layout with the fastest cuts of the search's family."""
    cuts = default_cuts(model, model.rows(LayoutTable.from_layouts([layout])))[0]
    split = Split(layout.pp, layout.vpp, tuple(cuts.tolist()), layout.schedule in V_SHAPED)
    return layout.model_copy(update={"stages": split.stages(model.problem.model.num_layers, layout.recompute)})


@pytest.mark.parametrize("schedule", SPLIT)
def test_cuts_of_replayed_schedules_are_held_to_every_other_one(schedule: str) -> None:
    """At ample memory and at what a third of all cuts hold: as fast as the fastest that fits, and proved so."""
    gaps = []
    for seed in range(5):
        problem, layout = case(seed, schedule)
        _, peaks = listed(CostModel(problem), layout)
        for usable in (1e13, float(np.quantile(peaks, 0.3)) * 1.01):
            model = CostModel(with_memory(problem, usable))
            steps, peaks = listed(model, layout)
            fastest_s = steps[peaks <= model.usable_bytes].min()
            found = proved(model, cut_by_rule(model, layout), seconds=0.3)
            assert found.step_time_s == pytest.approx(fastest_s, rel=1e-6)
            assert found.bound_s <= fastest_s * (1 + 1e-9)
            gaps.append(found.gap)
    assert max(gaps) < 1e-5


@pytest.mark.parametrize("schedule", MIRRORED)
def test_mirrored_cuts_leave_the_fullest_stage_least_to_do(schedule: str) -> None:
    """Of all legal cuts near those of equal work."""
    for seed in range(12):
        problem, layout = case(seed, schedule)
        model = CostModel(problem)
        rows, cutting = model.rows(LayoutTable.from_layouts([layout])), cutting_of(model, layout.pp, layout.vpp)
        balanced = balanced_cuts(model, rows, cutting.chunks)
        ours = mirrored_cuts(rows, cutting, balanced)
        every = np.array(legal_cuts(problem, layout.pp, layout.vpp), dtype=np.int64)
        near = every[(np.abs(every - balanced) <= REACH).all(axis=1)]
        assert (near == ours).all(axis=1).any()
        assert fullest_s(model, rows, ours)[0] <= fullest_s(model, rows, near).min() * (1 + 1e-8)


@pytest.mark.parametrize("schedule", MIRRORED)
def test_cuts_that_must_fit_leave_the_fullest_stage_least_to_do_of_those_that_do(schedule: str) -> None:
    """Of all legal cuts near those of equal work that fit, at memory that few of these fit into."""
    other = 0
    for seed in range(16):
        problem, layout = case(seed, schedule)
        _, peaks = listed(CostModel(problem), layout)
        model = CostModel(with_memory(problem, float(np.quantile(peaks, 0.1)) * 1.001))
        rows = model.rows(LayoutTable.from_layouts([layout]))
        balanced, mirrored = roomy_family(model, rows)[0]
        every, (_, peaks) = np.array(legal_cuts(problem, layout.pp, layout.vpp), dtype=np.int64), listed(model, layout)
        near = every[(np.abs(every - balanced) <= REACH).all(axis=1) & (peaks <= model.usable_bytes)]
        ours = cut_family(model, rows)[0, 1:]
        np.testing.assert_allclose(model.cut_bytes(rows, ours).max(), peaks[(every == ours).all(axis=1)], rtol=1e-12)
        if len(near):
            other += (ours != mirrored).any()
            assert (near == ours).all(axis=1).any()
            assert fullest_s(model, rows, ours)[0] <= fullest_s(model, rows, near).min() * (1 + 1e-8)
    assert other > 2


def fullest_s(model: CostModel, rows: Rows, cuts: Cuts) -> Floats:
    """What the stage that works longest takes of a micro-batch, pairs as pairs, (n,)."""
    (pp, vpp, schedule), many = rows.shape, rows.take(np.zeros(len(cuts), dtype=np.intp))
    work = pass_times(model.layers, many, cuts, many.chunks(cuts))
    found = []
    for first, last in stage_chunks(schedule, pp, vpp).T.tolist():
        alone = [work.of(kind, chunk) for kind in (FORWARD, BACKWARD) for chunk in (first, last)]
        found.append(work.of_pair(first, last) + work.of_pair(last, first) if schedule in PAIRED else sum(alone))
    return np.asarray(np.max(found, axis=0))

"""Plans over schedules that split or pair their passes: against listing, under bounds that no layout falls below."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.schedules import SPLIT
from paraplan.cost_models.split_passes import kept_bytes
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.bounds import frame_bounds, least_after, row_bounds_bytes, row_bounds_s, ruled_bounds_s
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.planner import plan, with_schedules
from paraplan.optimizer.search import REPLAYED_ROWS, Search
from paraplan.optimizer.search_rows import Wave, Ways
from paraplan.search_spaces.choices import FRAME
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_stack
from paraplan.search_spaces.layout import Floats, LayoutTable, Problem

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import chosen_by_frame, legal_layouts, price_everything, tiny_problem, with_memory

ROUNDING = 1.0 + 1e-9
TOP = 3


def split_problem(seed: int, schedule: str) -> Problem:
    """A tiny problem on a stack that runs the schedule, whose pipelines have two stages or more."""
    problem = tiny_problem(seed)
    stack = load_stack("torchtitan").model_copy(update={"schedules": ("1f1b", schedule), "optimizer_shardings": ("zero1", "zero3")})
    fix = {"schedule": (schedule,), "micro_batch": ("1",), "recompute": ("none", "full"), "optimizer_sharding": ("zero1",)}
    model = problem.model.model_copy(update={"mtp": None, "tied_embeddings": False})
    workload = problem.workload.model_copy(update={"fix": {**problem.workload.fix, **fix, "cp_type": ("allgather",)}, "forbid": ()})
    return problem.model_copy(update={"model": model, "stack": stack, "workload": workload, "devices": 4})


def grouped_problem(seed: int) -> Problem:
    """A tiny problem on a stack that interleaves micro-batches in groups of three, or redoes chunks of one layer ahead."""
    problem, ahead = split_problem(seed, "interleaved"), seed % 3 == 2
    changes = {"schedules": ("1f1b", "interleaved"), "microbatch_group": 0 if ahead else 3, "recompute_ahead": ahead}
    stack = load_stack("megatron-lm").model_copy(update=changes)
    fix = {**problem.workload.fix, "cp_type": ("p2p",)}
    workload = problem.workload.model_copy(update={"fix": fix, "global_batch": 24})
    return problem.model_copy(update={"stack": stack, "workload": workload, "devices": 6 if seed % 2 else 4})


@pytest.mark.parametrize("schedule", [*SPLIT, "interleaved"])
def test_search_finds_what_listing_finds(schedule: str) -> None:
    """At ample memory and at what a third of the layouts hold; every bound stays below every layout that it is for."""
    looked_at = 0
    for seed in range(16 if schedule in SPLIT else 9):
        problem = grouped_problem(seed) if schedule == "interleaved" else split_problem(seed, schedule)
        layouts = legal_layouts(problem)
        assert Space(problem).listed == len(layouts)
        if not layouts:
            continue
        model = CostModel(problem)
        priced = price_everything(problem, model, layouts)
        assert set(priced.owner.tolist()) == set(range(len(layouts)))
        rows = model.rows(LayoutTable.from_layouts(priced.layouts))
        after = least_after(model, rows)
        step_s, peak = (np.full(len(layouts), np.inf) for _ in range(2))  # of the least way to cut each
        np.minimum.at(step_s, priced.owner, priced.step_time_s)
        np.minimum.at(peak, priced.owner, priced.peak_bytes)
        assert (row_bounds_s(model, rows, after) <= step_s * ROUNDING).all()
        assert (ruled_bounds_s(model, rows) <= step_s * ROUNDING).all()
        assert (row_bounds_bytes(model, rows) <= peak * ROUNDING).all()
        space = Space(problem)
        frames = list(zip(*(getattr(space.frames, name).tolist() for name in FRAME), strict=True))
        bound, _ = frame_bounds(model, space)
        mine = [frames.index(tuple(getattr(layout, name) for name in FRAME)) for layout in layouts]
        assert (bound[mine] <= step_s * ROUNDING).all()
        for usable in (1e12, float(np.quantile(peak, 0.3)) * 1.0005):
            limited = with_memory(problem, usable)
            found = Search(Space(limited), CostModel(limited), top=TOP).run()
            assert [c.step_time_s for c in found.best] == pytest.approx(chosen_by_frame(CostModel(limited), layouts, TOP), rel=1e-9)
            counts = found.counts
            assert counts.legal == counts.scored + counts.cut_by_bound + counts.cut_by_memory and found.complete
        looked_at += len(layouts)
    assert looked_at >= 20


def test_a_plan_over_all_schedules_of_a_stack_is_at_least_as_fast_as_over_each() -> None:
    problem = build_problem(
        "llama-3.1-8b", "hgx-h100", 16, 32, 4096, "torchtitan", fix="tp=2,micro_batch=1,optimizer_sharding=zero2"
    )
    every = plan(with_schedules(problem, "any"), top=1)
    assert every.certificate.status == "optimal"
    for name in problem.stack.schedules:
        one = plan(with_schedules(problem, name), top=1).plan
        assert one.layout.schedule == name
        assert every.plan.step_time_s <= one.step_time_s * ROUNDING
        assert one.simulated_step_time_s == pytest.approx(one.step_time_s, rel=0.01)
        assert one.memory.peak_gib <= one.memory.usable_gib


@pytest.mark.parametrize(("tp", "kept"), [(1, 32.0), (2, 4 + 28 / 2), (8, 4 + 28 / 8)])
def test_what_weight_gradients_wait_with(tp: int, kept: float) -> None:
    """arXiv 2401.10241, section 2.3: 32·s·b·h a layer. Under SP the gradients of two row-parallel outputs stay whole, 4·s·b·h."""
    problem = build_problem("gpt3-175b", "hgx-h100", 4 * tp, 64, 2048, "megatron-lm")
    model = CostModel(problem)
    layout = complete(problem, parse_layout(f"tp={tp},pp=4,schedule=zb-h1,micro_batch=1"))
    rows, blocks = model.rows(LayoutTable.from_layouts([layout])), len(model.blocks)
    of_stages = kept_bytes(model.layers, rows, np.array([[0, 1, 3, 4, blocks]]))[0]
    layer = kept * 2048 * problem.model.hidden_size
    assert of_stages[1:3].tolist() == pytest.approx([2 * layer, layer], rel=1e-12)


def test_what_a_stack_does_not_run_is_refused() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096)
    with pytest.raises(InputError, match="megatron-lm runs 1f1b, interleaved"):
        with_schedules(problem, "1f1b,zb-v")
    fixed = replace_fix(problem, ("1f1b",))
    with pytest.raises(InputError, match="give one of the two"):
        with_schedules(fixed, "any")


def replace_fix(problem: Problem, schedules: tuple[str, ...]) -> Problem:
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"fix": {"schedule": schedules}})})


def test_a_time_limit_ends_replays_once_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layout of a split schedule that may still win is replayed, which takes long: no wave is replayed to its end."""
    asked = ("qwen3-30b-a3b", "cloudmatrix-384", 64, 256, 4096)
    problem = with_schedules(build_problem(*asked, framework="mindspeed-llm", fix="cp=1,micro_batch=1"), "dualpipev")
    search, replay = Search(Space(problem), CostModel(problem), top=TOP), Search._replay_some
    after: list[int] = []

    def replayed(self: Search, part: Wave, bound: Floats, ways: Ways) -> None:
        after.append(len(part.frame) if self.seconds_left < 0 else 0)
        replay(self, part, bound, ways)
        self._deadline = 0.0 if self._best else self._deadline

    monkeypatch.setattr(Search, "_replay_some", replayed)
    found = search.run()
    assert found.best and not found.complete and sum(after) < REPLAYED_ROWS
    assert found.lower_bound_s <= found.best[0].step_time_s

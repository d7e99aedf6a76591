"""The space lists what nested loops over every degree find, once each, and nothing that a rule or the user forbids."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from paraplan.search_spaces.choices import FRAME
from paraplan.search_spaces.conditions import any_of, at_most, equal
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import COLUMNS, SCHEDULES, Layout, LayoutTable, Problem
from paraplan.search_spaces.row_keys import row_keys
from paraplan.search_spaces.rulebook import Rule
from paraplan.search_spaces.rules import rules_for, violations

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))  # the oracle lies beside the tests of the search
from brute_force import legal_layouts, random_problem


def listed(space: Space) -> LayoutTable:
    return space.layouts(np.arange(len(space.frames)))[0]


def layouts_of(problem: Problem) -> list[Layout]:
    table = listed(Space(problem))
    return [table.layout(row, problem.model.num_layers) for row in range(len(table))]


def small(**limits: object) -> Problem:
    """A dense model on one server under some limits."""
    stack = limits.pop("stack", "megatron-lm")
    model = limits.pop("model", "qwen3-0.6b")
    limits.setdefault("memory_margin", 0.06)
    devices = limits.pop("devices", 8)
    return build_problem(model, "hgx-h100", devices, 16, 4096, stack, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200, 220))
def test_layouts_are_those_of_nested_loops(seed: int) -> None:
    problem = random_problem(seed)
    space = Space(problem)
    if space.listed > 800:
        problem = problem.model_copy(update={"devices": 3})
        space = Space(problem)
    table = listed(space)
    mine = [table.layout(row, problem.model.num_layers) for row in range(len(table))]
    theirs = legal_layouts(problem)
    assert space.listed == len(mine) == len(theirs)

    def key(layout: Layout) -> str:
        """A layout as text, without the CP type and the rank order, of which one stands for all where they make no difference."""
        order = layout.rank_order if layout.pp > 1 and layout.dp > 1 else ""
        return str(layout.model_copy(update={"cp_type": layout.cp_type if layout.cp > 1 else "p2p", "rank_order": order}))

    assert sorted(map(key, mine)) == sorted(map(key, theirs))


@pytest.mark.parametrize("seed", range(300, 316))
def test_every_layout_is_legal_and_listed_once(seed: int) -> None:
    problem = random_problem(seed)
    space = Space(problem)
    table = listed(space)
    assert len(table) == space.listed == space.layouts_per_frame.sum()
    keys = row_keys([getattr(table, name) for name in COLUMNS])
    assert len(np.unique(keys)) == len(table)
    for row in np.random.default_rng(seed).permutation(len(table))[:40].tolist():
        assert violations(problem, table.layout(row, problem.model.num_layers)) == []


def test_layouts_of_some_frames_belong_to_them() -> None:
    space = Space(small())
    some = np.array([5, 2, 9])
    table, member = space.layouts(some)
    assert np.bincount(member).tolist() == space.layouts_per_frame[some].tolist()
    for name in FRAME:
        np.testing.assert_array_equal(getattr(table, name), getattr(space.frames, name)[some][member])


FIXED = {
    "tp": "tp=2|4",
    "cp": "cp=2",
    "pp": "pp=3",
    "dp": "dp=4",
    "vpp": "vpp=2",
    "micro_batch": "micro_batch=2",
    "num_microbatches": "num_microbatches=4",
    "schedule": "schedule=interleaved",
    "cp_type": "cp_type=a2a",
    "optimizer_sharding": "optimizer_sharding=none",
    "recompute": "recompute=full:uniform:4|full:block:28|selective:core_attn+mlp",
    "offload": "offload=optimizer:0.5",
    "rank_order": "rank_order=tp-cp-ep-pp-dp",
    "sequence_parallel": "sequence_parallel=false",
}


@pytest.mark.parametrize("column", FIXED)
def test_a_fixed_column_takes_its_values_and_no_other(column: str) -> None:
    few = {"recompute": "recompute=none", "offload": "offload=none", "micro_batch": "micro_batch=1|2"}
    if column == "num_microbatches":
        few.pop("micro_batch")
    problem = small(fix=",".join({**few, column: FIXED[column]}.values()))
    found = {str(getattr(layout, column)).lower() for layout in layouts_of(problem)}
    assert found == {value.lower() for value in problem.workload.fix[column]}


@pytest.mark.parametrize("fix", ["ep=4", "etp=2", "edp=2"])
def test_expert_degrees_can_be_fixed(fix: str) -> None:
    problem = small(model="mixtral-8x7b", fix=f"{fix},recompute=full,micro_batch=1")
    column, value = fix.split("=")
    assert {getattr(layout, column) for layout in layouts_of(problem)} == {int(value)}


def test_sequence_parallelism_that_is_off_leaves_tp_free() -> None:
    layouts = layouts_of(small(fix="sequence_parallel=false,recompute=none,offload=none,micro_batch=1"))
    assert {layout.tp for layout in layouts} == {1, 2, 4, 8}
    assert not any(layout.sequence_parallel for layout in layouts)
    on = layouts_of(small(fix="recompute=none,offload=none,micro_batch=1"))
    assert all(layout.sequence_parallel == (layout.tp > 1) for layout in on)


def test_values_that_clash_across_kinds_of_columns_leave_nothing() -> None:
    assert Space(small(fix="tp=4,dp=4")).legal == 0
    assert Space(small(fix="vpp=2,schedule=1f1b")).legal == 0
    assert Space(small(fix="pp=2,vpp=2,micro_batch=1,num_microbatches=3")).legal == 0
    assert Space(small(fix="dp=2,micro_batch=4,num_microbatches=2")).legal > 0


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        ({"forbid": "tp>2"}, lambda x: x.tp > 2),
        ({"forbid": "micro_batch*dp>8"}, lambda x: x.micro_batch * x.dp > 8),
        ({"forbid": "recompute==full"}, lambda x: x.recompute == "full"),
        (
            {"constraint": "pp == 2 or micro_batch == 1 and optimizer_sharding != none"},
            lambda x: x.pp != 2 and (x.micro_batch > 1 or x.optimizer_sharding == "none"),
        ),
        ({"constraint": "tp*cp<=4"}, lambda x: x.tp * x.cp > 4),
        ({"constraint": "optimizer_sharding==zero1"}, lambda x: x.optimizer_sharding != "zero1"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_is_forbidden_is_gone_and_the_rest_is_left(limits: dict[str, str], broken: object) -> None:
    few = "micro_batch=1|2,recompute=none|full,offload=none"
    free, limited = layouts_of(small(fix=few)), layouts_of(small(fix=few, **limits))
    assert not any(map(broken, limited))  # type: ignore[arg-type]
    frames = {tuple(getattr(layout, name) for name in FRAME) for layout in free if not broken(layout)}  # type: ignore[operator]
    assert {tuple(getattr(layout, name) for name in FRAME) for layout in limited} == frames


def test_forbidding_one_of_two_equals_leaves_the_other() -> None:
    """Where CP type or rank order make no difference one stands for all: the first that is allowed.

    Without data parallelism, a dense model takes pp inside dp only at cp = 1 (C004b).
    """
    free = Space(small())
    cp, pp, dp = free.frames.cp, free.frames.pp, free.frames.dp
    for limit, alike in (("cp_type==p2p", cp == 1), ("rank_order==tp-cp-ep-dp-pp", (pp == 1) | ((dp == 1) & (cp == 1)))):
        limited = Space(small(forbid=limit))
        np.testing.assert_array_equal(cp, limited.frames.cp)
        np.testing.assert_array_equal(free.layouts_per_frame[alike], limited.layouts_per_frame[alike])
        assert (limited.layouts_per_frame[~alike] < free.layouts_per_frame[~alike]).all()


def test_groups_can_be_kept_inside_a_level() -> None:
    problem = small(devices=16, inside="supernode:tp,cp")
    frames = Space(problem).frames
    assert (frames.tp * frames.cp <= 8).all()
    free = Space(small(devices=16)).frames
    assert (free.tp * free.cp > 8).any()


def test_hsdp_offers_the_units_of_every_level_that_the_ranks_divide() -> None:
    problem = build_problem("llama-3.1-8b", "gb200-nvl72", 144, 144, 4096, "torchtitan", fix="tp=1,cp=1,pp=1")
    found = {layout.optimizer_sharding for layout in layouts_of(problem)}
    assert {"hsdp:4", "hsdp:72"} <= found
    assert found <= {"zero2", "zero3", "hsdp:4", "hsdp:72"}
    within = build_problem("llama-3.1-8b", "gb200-nvl72", 4, 16, 4096, "torchtitan", fix="tp=1,cp=1,pp=1")
    assert {layout.optimizer_sharding for layout in layouts_of(within)} == {"zero2", "zero3"}


def test_shardings_that_run_one_program_in_a_pipeline_are_listed_once() -> None:
    """torchtitan's stages stay gathered under ZeRO-2 as under ZeRO-3, which stands for both unless it is forbidden."""

    def found(pp: int, **limits: str) -> set[str]:
        words = f"tp=2,pp={pp},cp=1,micro_batch=1"
        problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 16, 4096, "torchtitan", fix=words, **limits)  # type: ignore[arg-type]
        return {layout.optimizer_sharding for layout in layouts_of(problem)}

    assert found(1) == {"zero2", "zero3"}
    assert found(2) == {"zero3"}
    assert found(2, forbid="optimizer_sharding==zero3") == {"zero2"}
    assert "(in a pipeline zero2 is zero3)" in Space(build_problem("llama-3.1-8b", "hgx-h100", 8, 16, 4096, "torchtitan")).words


def test_more_than_half_of_the_devices_work_unless_the_batch_is_too_small() -> None:
    frames = Space(small(devices=12)).frames
    used = frames.tp * frames.cp * frames.pp * frames.dp
    largest = {}
    for row in range(len(frames)):
        grid = int(frames.tp[row]), int(frames.cp[row]), int(frames.pp[row])
        room = 12 // (grid[0] * grid[1] * grid[2])
        largest[grid] = max(dp for dp in (1, 2, 4, 8, 16) if dp <= room)
        assert 2 * used[row] > 12 or frames.dp[row] == largest[grid]
    assert (2 * used <= 12).any() or (2 * used > 12).all()


def test_interleaved_chunks_run_in_whole_groups() -> None:
    """torchtitan would also run m between pp and 2·pp as one group; that is not priced, and so not in the space."""
    layouts = layouts_of(small(stack="torchtitan", model="llama-3.1-8b", fix="optimizer_sharding=zero3,schedule=interleaved"))
    assert layouts
    assert all(layout.num_microbatches % layout.pp == 0 for layout in layouts)


def test_mtp_layers_never_need_a_chunk_that_the_stack_cannot_say() -> None:
    """61 decoder layers and one MTP layer: 62 chunks need a layout string, in which the MTP layer may stand alone."""
    common = {"devices": 64, "global_batch": 64, "seq_len": 4096, "fix": "pp=62,tp=1,cp=1,ep=1,dp=1,recompute=none"}
    for stack, cluster, chunks in (("megatron-lm", "hgx-h100", 62), ("mindspeed-llm", "atlas-800t-a2", 0)):
        problem = build_problem("deepseek-v3", cluster, stack=stack, **common)  # type: ignore[arg-type]
        assert (Space(problem).listed > 0) == (chunks == 62)


def test_what_has_no_price_leaves_an_empty_space() -> None:
    problem = build_problem("qwen3-0.6b", "atlas-800t-a2", 8, 16, 4096, "mindformers", fix="cp_type=a2a+p2p")
    assert Space(problem).listed == 0


def test_a_rule_that_ties_both_kinds_of_choices_is_kept() -> None:
    problem = small(fix="recompute=none,pp=2")
    rule = Rule("T1", "test", "test", "arithmetic", any_of(at_most("vpp", 1), equal("sharding", 1)))
    free, tied = listed(Space(problem)), listed(Space(problem, (*rules_for(problem), rule)))
    allowed = (free.vpp <= 1) | (free.sharding == 1)
    assert len(tied) == int(allowed.sum()) < len(free)
    keys = [row_keys([getattr(table, name) for name in COLUMNS]) for table in (free.take(allowed), tied)]
    assert sorted(keys[0].tolist()) == sorted(keys[1].tolist())


@pytest.mark.parametrize(
    "constraint", ["", "recompute == none or micro_batch*dp <= 4 and cp_type == a2a", "vpp == 1 or rank_order != tp-cp-ep-dp-pp"]
)
def test_choices_that_rules_tie_are_those_of_nested_loops(constraint: str) -> None:
    """Offloaded activations exclude recompute, and users may tie any columns: what is left is listed once, as the oracle finds."""
    few = "recompute=none|full,micro_batch=1|2,optimizer_sharding=zero1,pp=1|2,cp=1|2"
    problem = small(devices=4, fix=few, offload_to="host", **({"constraint": constraint} if constraint else {}))
    mine, theirs = layouts_of(problem), legal_layouts(problem)
    assert len(mine) == len(theirs) == Space(problem).listed > 0
    assert Counter(map(tied, mine)) == Counter(map(tied, theirs))


def tied(layout: Layout) -> tuple[object, ...]:
    """Columns that the rules of the test tie, but for those of which one value may stand for all."""
    free = layout.cp_type if layout.cp > 1 else "", layout.rank_order if layout.pp > 1 and layout.dp > 1 else ""
    return layout.recompute, layout.offload, layout.micro_batch, layout.vpp, layout.dp, *free


def test_rules_that_tie_choices_of_which_there_are_none_leave_nothing() -> None:
    assert Space(small(fix="vpp=2,schedule=1f1b", offload_to="host")).legal == 0


def test_tied_choices_of_a_large_job_are_counted_as_fast_as_free_ones() -> None:
    """960 ways through the batch by 120 to share of 7,594 frames: worked through pair by pair they take most of a minute."""
    space = Space(build_problem("gpt3-175b", "hgx-a100", 4096, 1536, 2048, offload_to="host"))
    begun = time.process_time()
    assert (space.legal, space.listed) == (16_453_266, 4_947_786)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize("offload_to", [None, "host"])
def test_a_stack_that_hides_what_tp_sends_has_a_switch_for_it(offload_to: str | None) -> None:
    """Twice as many layouts with tp > 1 and sequence parallelism, none of them listed; as many as ever without."""
    few = "recompute=none|full,micro_batch=1"
    problem = small(fix=few, offload_to=offload_to)
    overlap = problem.stack.overlap.model_copy(update={"tp": 0.6})
    hiding = problem.model_copy(update={"stack": problem.stack.model_copy(update={"overlap": overlap})})
    space, switched = Space(problem), Space(hiding)
    assert switched.listed == space.listed
    np.testing.assert_array_equal(switched.legal_per_frame, space.legal_per_frame * np.where(space.frames.tp > 1, 2, 1))
    for each in (space, switched):
        assert each.variants(listed(each)).sum() == each.works(np.arange(len(each.frames))).stands_for.sum() == each.legal
    assert "tp, dp_gradients and dp_parameters overlap on or off" in switched.words
    off = "sequence_parallel=false,recompute=none,micro_batch=1,offload=none"
    counts = [Space(small(fix=off, stack=stack)) for stack in (problem.stack, hiding.stack)]
    assert counts[0].legal == counts[1].legal > 0


def test_words_name_what_is_fixed_and_how_stages_are_cut() -> None:
    assert "fixed: tp = 2 or 4" in Space(small(fix="tp=2|4")).words
    assert "cp type p2p, allgather, a2a" in Space(small()).words
    assert "cp type" not in Space(small(fix="cp_type=p2p")).words
    assert "every contiguous split" in Space(small()).words
    assert "first and the last" in Space(small(stack="megatron-lm-0.12")).words
    assert "equal stages" in Space(small(stack="megatron-lm-2022")).words


def test_gpipe_is_listed_where_there_are_stages_or_nothing_else_is_asked() -> None:
    """On one stage it runs what 1F1B runs, and holds more."""

    def schedules_by_pp(fix: str) -> set[tuple[int, str]]:
        space = Space(build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, "torchtitan", fix=fix))
        table = space.layouts(np.arange(len(space.frames)))[0]
        return {(pp, SCHEDULES[code]) for pp, code in zip(table.pp.tolist(), table.schedule.tolist(), strict=True)}

    every = schedules_by_pp("tp=2,vpp=1")
    assert (1, "gpipe") not in every and {(1, "1f1b"), (2, "gpipe"), (2, "1f1b")} <= every
    assert (1, "gpipe") in schedules_by_pp("tp=2,vpp=1,schedule=gpipe")

"""Chunks that redo layers to depths of their own: one price everywhere, said to the framework that takes them, and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import check
from paraplan.optimizer.chunk_costs import opened
from paraplan.optimizer.chunking import stage_bytes, step_seconds
from paraplan.optimizer.chunks import best_chunks
from paraplan.optimizer.evaluation import evaluate, with_default_stages
from paraplan.optimizer.exporters.mindformers import document
from paraplan.optimizer.exporters.mindspeed_llm import files as mindspeed_files
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.planner import plan
from paraplan.optimizer.recutting import proved
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Chunk, Layout, LayoutTable, Problem, Split, Stage

ASKED = ("qwen3-32b", "atlas-800t-a2", 64, 512, 32768, "mindformers")
WORDS = "tp=8,pp=4,recompute=full:block:3,offload=optimizer:1"


def layout_of(problem: Problem, words: str = WORDS) -> Layout:
    return with_default_stages(CostModel(problem), complete(problem, parse_layout(words)))


def with_depths(problem: Problem, layout: Layout, depths: tuple[int, ...]) -> Layout:
    split = replace(Split.from_stages(layout.stages), redone=depths)
    return layout.model_copy(update={"stages": split.stages(problem.model.num_layers, layout.recompute)})


@pytest.fixture(scope="module")
def planned() -> Plan:
    problem = build_problem(*ASKED, fix="tp=8,pp=4,vpp=1,cp=1,micro_batch=1,offload=optimizer:1")
    return plan(problem, top=1)


def test_depths_come_back_from_the_words_of_stages() -> None:
    split = Split(4, 2, (0, 0, 3, 5, 8, 9, 11, 12, 12), redone=(0, 3, 0, 2, 1, 0, 1, 0))
    stages = split.stages(11, "full:block:3")
    assert [chunk.recompute for stage in stages for chunk in stage.chunks] == [
        *("none", "full", "full", "none"),
        *("none", "full", "full:block:2", "none"),
    ]
    assert Split.from_stages(stages) == split
    mixed = (
        Stage(stage=0, chunks=(Chunk(layers=(0, 1), recompute="full"),)),
        Stage(stage=1, chunks=(Chunk(layers=(2, 3), recompute="selective:mlp"),)),
    )
    with pytest.raises(ValueError, match="chunks may differ as none, full, full:block:K"):
        Split.from_stages(mixed)


@pytest.mark.parametrize("words", [WORDS, f"{WORDS},vpp=2", f"{WORDS},schedule=zb-v"])
def test_the_same_depth_in_every_chunk_costs_what_one_for_all_does(words: str) -> None:
    problem = build_problem(*ASKED)
    layout = layout_of(problem, words)
    chunks = layout.pp * layout.vpp
    one, model = LayoutTable.from_layouts([layout]), CostModel(problem)
    apart = one.with_splits(one.split, (replace(one.splits[0], redone=(3,) * chunks),))
    deeper = one.with_splits(one.split, (replace(one.splits[0], redone=(4,) * chunks),))
    alike, other = model.price(apart), model.price(deeper)
    assert alike.step_time_s == pytest.approx(model.price(one).step_time_s, rel=1e-12)
    assert alike.peak_bytes == pytest.approx(model.price(one).peak_bytes, rel=1e-12)
    assert other.step_time_s > alike.step_time_s and other.peak_bytes <= alike.peak_bytes  # of a V weight gradients keep the most


def test_every_way_to_price_depths_says_the_same() -> None:
    problem = build_problem(*ASKED)
    layout = with_depths(problem, layout_of(problem), (5, 2, 1, 0))
    priced, broken = evaluate(problem, layout)
    table = CostModel(problem).price(LayoutTable.from_layouts([layout]))
    assert not broken
    assert table.step_time_s[0] == pytest.approx(priced.step_time_s, rel=1e-12)
    assert priced.simulated_step_time_s == pytest.approx(priced.step_time_s, rel=1e-2)
    assert sum(priced.breakdown_s.values()) == pytest.approx(priced.step_time_s, rel=1e-9)
    assert table.peak_bytes[0] / 2**30 == pytest.approx(priced.memory.peak_gib, rel=1e-12)
    held = [stage.terms_gib["activations"] for stage in priced.memory.stages]
    uniform = evaluate(problem, layout_of(problem))[0].memory.stages
    assert held[0] < uniform[0].terms_gib["activations"] and held[3] > uniform[3].terms_gib["activations"]


def test_late_stages_redo_less_and_the_step_is_shorter(planned: Plan) -> None:
    problem, layout = planned.problem, planned.plan.layout
    split = Split.from_stages(layout.stages)
    assert split.redone and split.redone[-1] < split.redone[0]
    uniform = min(
        evaluate(problem, layout_of(problem, WORDS.replace("block:3", f"block:{k}")), replayed=False)[0].step_time_s
        for k in (2, 3, 4)
    )
    assert planned.plan.step_time_s < 0.97 * uniform
    found = proved(CostModel(problem), layout)
    assert found.bound_s <= planned.plan.step_time_s * (1 + 1e-9)
    assert found.step_time_s == pytest.approx(planned.plan.step_time_s, rel=1e-6)


def test_the_framework_is_told_them_and_its_file_is_read_so(planned: Plan, tmp_path: Path) -> None:
    written = document(planned)
    split = Split.from_stages(planned.plan.layout.stages)
    assert written["recompute_config"]["recompute"] == list(split.redone)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(written))
    found = check(str(file), ASKED[0], cluster=ASKED[1], devices=ASKED[2], best=False)
    assert found.priced is not None and found.priced.step_time_s == pytest.approx(planned.plan.step_time_s, rel=1e-9)
    with pytest.raises(Infeasible, match="recompute differs between stages"):
        mindspeed_files(planned)


def test_whoever_fixes_recompute_gets_it_everywhere() -> None:
    problem = build_problem(*ASKED, fix="tp=8,pp=4,vpp=1,cp=1,micro_batch=1,offload=optimizer:1,recompute=full:block:3")
    assert not Split.from_stages(plan(problem, top=1).plan.layout.stages).redone


def test_other_stacks_refuse_them() -> None:
    problem = build_problem("qwen3-32b", "hgx-h100", 64, 512, 4096, "megatron-lm")
    layout = with_depths(problem, layout_of(problem, "tp=8,pp=4,recompute=full:block:3"), (5, 2, 1, 0))
    _, broken = evaluate(problem, layout, replayed=False)
    assert len(broken) == 1 and "recompute" in broken[0]
    chunks = layout.stages[1].chunks
    other = layout.stages[1].model_copy(
        update={"chunks": tuple(c.model_copy(update={"recompute": "selective:mlp"}) for c in chunks)}
    )
    with pytest.raises(InputError, match="chunks may differ"):
        evaluate(problem, layout.model_copy(update={"stages": (layout.stages[0], other, *layout.stages[2:])}))


def test_splits_of_one_table_may_tell_depths_or_not() -> None:
    problem = build_problem(*ASKED)
    plain = layout_of(problem)
    apart, model = with_depths(problem, plain, (5, 2, 1, 0)), CostModel(problem)
    both = model.price(LayoutTable.from_layouts([plain, apart]))
    each = [float(model.price(LayoutTable.from_layouts([one])).step_time_s[0]) for one in (plain, apart)]
    assert both.step_time_s.tolist() == pytest.approx(each, rel=1e-12) and np.ptp(each) > 0


@pytest.mark.parametrize(("words", "mixed"), [("tp=8,pp=4", True), ("tp=8,pp=4,vpp=2", False)])
def test_choices_that_layers_make_for_themselves_cost_what_they_cost_all(words: str, mixed: bool) -> None:
    """All layers under one of the choices take the layout's own price, and CP-SAT's mixture takes no longer than any that fits."""
    problem = build_problem("llama-3.1-70b", "hgx-h100", 64, 64, 4096, "megatron-lm")
    model, plain = CostModel(problem), layout_of(problem, words)
    choices = [{"recompute": name} for name in ("none", "selective:layernorm", "full")] + [{"offload": "activations:0.5"}]
    stages = Split.from_stages(plain.stages)
    layouts = [plain.model_copy(update=choice) for choice in choices]
    chunking = opened(model, layouts)
    priced = model.price(LayoutTable.from_layouts(layouts))
    alike = np.zeros((len(layouts), len(chunking.running), len(layouts), chunking.chunks), dtype=np.int64)
    for place, counts in enumerate(alike):
        counts[:, place] = chunking.held(stages.cuts)
        step_s = step_seconds(chunking, counts) + model.problem.stack.step_overhead_s.value
        assert step_s == pytest.approx(priced.step_time_s[place], rel=1e-9)
        # Ends and the largest transient are those of one choice, and what a stage holds of unequal chunks is their mean.
        assert stage_bytes(chunking, counts).max() == pytest.approx(priced.peak_bytes[place], rel=6e-3)
    leanest = float(np.sort(priced.peak_bytes)[:2].mean())
    found = best_chunks(replace(chunking, limit_bytes=leanest), list(alike), seconds=0.5)
    assert found is not None
    fastest_s = priced.step_time_s[priced.peak_bytes <= leanest].min()
    assert found.step_s + model.problem.stack.step_overhead_s.value <= fastest_s * (1.0 - 1e-3 * mixed) + 1e-9
    assert not mixed or len(set(np.nonzero(found.counts.sum(axis=(0, 2)))[0])) > 1


def test_depths_are_made_less_wherever_memory_leaves_room() -> None:
    """With 7 GiB reserved the ruled cuts leave no room without recompute, and the cuts that they are moved to do."""
    asked = ("llama-3.1-70b", "atlas-800t-a2", 32, 64, 8192, "mindformers")
    found = plan(build_problem(*asked, fix="pp=4,tp=8,vpp=2,offload=optimizer:1", reserved_gib=7.0), top=1)
    stages = found.plan.layout.stages
    assert {chunk.recompute for stage in stages for chunk in stage.chunks} == {"none"}
    deeper, _ = evaluate(found.problem, found.plan.layout.model_copy(update={"recompute": "full:block:1", "stages": ()}))
    assert found.plan.step_time_s < 0.98 * deeper.step_time_s
    bound_s = found.certificate.cuts_lower_bound_s
    assert bound_s is not None and bound_s <= found.plan.step_time_s

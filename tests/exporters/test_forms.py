"""Partitions in the forms of the frameworks, held to what each asks of them whatever the partition: C071, C072, C075 and C076."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paraplan.optimizer.checking.job_layout import laid_out
from paraplan.optimizer.exporters.mindformers import document
from paraplan.optimizer.exporters.mindspeed_llm import files
from paraplan.optimizer.exporters.splits import layer_counts, noop_layers, padded_ids
from paraplan.optimizer.readers import read_job
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem, Recompute, Split
from paraplan.search_spaces.rules import violations

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the plans lie beside them
from random_plans import plan

PER_STAGE = {"1f1b": 1, "interleaved": 3, "zb-v": 2, "dualpipev": 2}
"""Chunks of a stage."""
DENSE = build_problem("qwen3-8b", "cloudmatrix-384", 64, 128, 4096, "mindformers")  # 36 layers
EXPERTS = build_problem("qwen3-30b-a3b", "cloudmatrix-384", 64, 128, 4096, "mindspeed-llm")  # 48 layers, untied


def layers_by_chunk(draw: st.DrawFn, layers: int, chunks: int, least: int) -> list[int]:
    """Layers of every chunk, `least` of them in each at least."""
    inner = sorted(draw(st.lists(st.integers(0, layers - least * chunks), min_size=chunks - 1, max_size=chunks - 1)))
    return [b - a + least for a, b in itertools.pairwise([0, *inner, layers - least * chunks])]


@st.composite
def partitions(draw: st.DrawFn, problem: Problem, schedules: tuple[str, ...], least: int) -> tuple[Layout, Split]:
    schedule, pp = draw(st.sampled_from(schedules)), draw(st.sampled_from((2, 4)))
    vpp, layers = PER_STAGE[schedule], problem.model.num_layers
    counts = layers_by_chunk(draw, layers, pp * vpp, least)
    redone = tuple(draw(st.integers(0, count)) for count in counts) if problem.stack.recompute_by_chunk else ()
    split = Split(pp, vpp, (0, *itertools.accumulate(counts)), schedule in ("zb-v", "dualpipev"), redone)
    recompute = f"full:block:{max(redone)}" if any(redone) else "none"
    ep = 2 if problem.model.is_moe else 1
    sizes = {"pp": pp, "vpp": vpp, "dp": 64 // pp, "num_microbatches": 2 * pp, "ep": ep, "edp": 64 // pp // ep}
    layout = Layout(
        **sizes, schedule=schedule, recompute=recompute, stages=split.stages(layers, recompute), sequence_parallel=False
    )
    return layout, split


def sayable(problem: Problem, layout: Layout) -> Problem:
    """The problem with the batch that the layout runs."""
    batch = layout.dp * layout.micro_batch * layout.num_microbatches
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"global_batch": batch})})


@given(case=partitions(DENSE, ("1f1b", "interleaved", "zb-v"), least=1))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_offsets_and_depths_of_mindformers_come_back(case: tuple[Layout, Split], tmp_path: Path) -> None:
    """C071: pp numbers for each round of chunks, which add up to what an even share leaves; a V's second round by stage too."""
    layout, split = case
    problem = sayable(DENSE, layout)
    written: dict[str, Any] = document(plan(problem, layout))
    offset, layers = written["model"]["model_config"]["offset"], problem.model.num_layers
    rows = offset if isinstance(offset, list) and isinstance(offset[0], list) else [offset] if offset else []
    assert all(len(row) == layout.pp for row in rows) and len(rows) in (0, layout.vpp)
    assert sum(map(sum, rows)) == (layers % (layout.pp * layout.vpp) if rows else 0)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(written))
    read, _, told, wrong = laid_out(read_job(str(file), devices=64), problem.model, problem.stack)
    assert not wrong and told is not None and told.cuts == split.cuts and told.folded == split.folded
    depths = [min(chunk_depth(read, told, place), count) for place, count in enumerate(split.counts)]
    assert depths == list(split.redone)


def chunk_depth(layout: Layout, split: Split, place: int) -> int:
    """Layers that the chunk at a place redoes, by the layout that was read."""
    return split.redone[place] if split.redone else Recompute.parse(layout.recompute).layers


@given(case=partitions(EXPERTS, ("dualpipev",), least=1))
@settings(max_examples=30, deadline=None)
def test_dualpipev_of_mindspeed_is_padded_to_two_equal_chunks_a_stage(case: tuple[Layout, Split]) -> None:
    """C075: pp > 1, no CP, no VPP option, layers with the no-ops a multiple of 2·pp; C076: none of the options it excludes."""
    layout, split = case
    problem = sayable(EXPERTS, layout)
    assert not violations(problem, layout)
    counts = layer_counts(layout.stages, "dualpipev")
    assert counts == split.counts
    padded, _ = noop_layers(counts)
    each = padded // (2 * layout.pp)
    assert padded % (2 * layout.pp) == 0 and padded >= 2 * layout.pp
    held = [sum(chunk * each <= one < (chunk + 1) * each for one in padded_ids(counts)) for chunk in range(2 * layout.pp)]
    for stage in layout.stages:  # down the stages and back up
        assert layer_counts([stage]) == (held[stage.stage], held[2 * layout.pp - 1 - stage.stage])
    script = next(text for name, text in files(plan(problem, layout)).items() if name.endswith(".sh"))
    assert "--schedules-method dualpipev" in script
    for option in (
        "virtual",
        "--recompute-in-",
        "--overlap-grad-reduce",
        "--pipeline-model-parallel-layout",
        "--context-parallel-size 2",
    ):
        assert option not in script
    if len(set(counts)) > 1:
        assert f"--num-layers {padded}" in script and "--noop-layers" in script


@pytest.mark.parametrize(("change", "rule"), [({"cp": 2, "dp": 16}, "without CP"), ({"num_microbatches": 3}, "micro-batches")])
def test_what_dualpipev_excludes_is_refused(change: dict[str, int], rule: str) -> None:
    split = Split(2, 2, (0, 12, 24, 36, 48), True)
    layout = Layout(
        **{"pp": 2, "vpp": 2, "dp": 32, "num_microbatches": 4, "edp": 32, **change},
        schedule="dualpipev",
        stages=split.stages(48, "none"),
        sequence_parallel=False,
    )
    assert any(rule in each.reason for each in violations(sayable(EXPERTS, layout), layout))

"""Stages that recompute differently are told to a framework as they are, or refused: none of them is told another choice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from paraplan.optimizer.exporters import render
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Chunk, Layout, Split, Stage

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the plans lie beside them
from random_plans import plan

FORMATS = {
    "megatron-lm": "hgx-h100",
    "megatron-bridge": "hgx-h100",
    "mindspeed-llm": "cloudmatrix-384",
    "mindformers": "cloudmatrix-384",
}
"""Frameworks that run pipelines from a file, with a cluster that each is run on."""
MIXED = (
    ("selective:core_attn", "none", "none", "none"),
    ("selective:core_attn+mlp", "selective:mlp", "selective:mlp", "selective:mlp"),
    ("full", "selective:core_attn", "none", "none"),
    ("full:block:3", "full:block:1", "selective:mlp", "none"),
    ("full:uniform:3", "full:block:3", "none", "none"),
    ("full:uniform:3", "none", "none", "none"),
)
DEPTHS = ("full:block:5", "full:block:2", "full:block:1", "none")


def stages_plan(framework: str, words: tuple[str, ...]) -> Plan:
    """36 layers on four stages that recompute as they are told."""
    problem = build_problem("qwen3-8b", FORMATS[framework], 64, 128, 4096, framework)
    cut = Split(4, 1, (0, 9, 18, 27, 36)).stages(36, "none")
    stages = tuple(
        Stage(stage=stage.stage, chunks=tuple(Chunk(**{**dict(chunk), "recompute": each}) for chunk in stage.chunks))
        for stage, each in zip(cut, words, strict=True)
    )
    return plan(problem, Layout(pp=4, dp=16, edp=16, num_microbatches=8, recompute=words[0], stages=stages))


@pytest.mark.parametrize("framework", FORMATS)
@pytest.mark.parametrize("words", MIXED, ids="/".join)
def test_choices_that_no_framework_mixes_are_refused(framework: str, words: tuple[str, ...]) -> None:
    with pytest.raises(Infeasible, match="recompute"):
        render(stages_plan(framework, words), framework)


@pytest.mark.parametrize("framework", ("megatron-lm", "megatron-bridge", "mindspeed-llm"))
def test_depths_by_stage_are_refused_where_one_depth_is_told(framework: str) -> None:
    with pytest.raises(Infeasible, match="recompute differs between stages"):
        render(stages_plan(framework, DEPTHS), framework)


def test_depths_by_stage_are_told_where_each_chunk_has_its_own() -> None:
    files = render(stages_plan("mindformers", DEPTHS), "mindformers")
    (told,) = (yaml.safe_load(text)["recompute_config"] for name, text in files.items() if name.endswith((".yaml", ".yml")))
    assert told["recompute"] == [5, 2, 1, 0]

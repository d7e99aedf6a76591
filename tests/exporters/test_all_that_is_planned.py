"""Whatever the search may choose for a framework, its exporter says and the reader finds, bare chunks and V shapes included."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from paraplan.optimizer.checking.job_layout import laid_out
from paraplan.optimizer.exporters import render
from paraplan.optimizer.planner import plan as make_plan
from paraplan.optimizer.readers import read_text
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout

sys.path.insert(0, str(Path(__file__).parent))
from random_plans import plans, ragged

LLAMA, QWEN, SMALL = ("llama-3.1-70b", 256, 1024, 8192), ("qwen3-32b", 64, 512, 4096), ("qwen3-8b", 96, 768, 4096)
LATENT, MOE, MIXTRAL = ("deepseek-v3", 512, 4096, 4096), ("qwen3-235b-a22b", 512, 2048, 4096), ("mixtral-8x22b", 128, 512, 8192)
CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "megatron-lm": ("hgx-h100", (LLAMA, QWEN, SMALL, LATENT, MOE, MIXTRAL)),
    "megatron-bridge": ("hgx-h100", (LLAMA, QWEN, SMALL, LATENT, MOE, MIXTRAL)),
    "mindspeed-llm": ("cloudmatrix-384", (LLAMA, QWEN, SMALL, LATENT, MOE, MIXTRAL)),
    "mindformers": ("cloudmatrix-384", (QWEN, SMALL, LATENT, MOE)),
    "torchtitan": ("hgx-h100", (LLAMA, QWEN, SMALL, LATENT, MOE)),
    "deepspeed": ("hgx-h100", (LLAMA, QWEN, SMALL, MOE, MIXTRAL)),
}
"""Framework → cluster, and problems that it has the architectures for."""


EVERY = 7
"""Of so many plans one is read back: no divisor of the problems' numbers, so that each has its turn."""


def cuts_of(layout: Layout) -> list[list[dict[str, Any]]]:
    """What every chunk of every stage holds."""
    return [[chunk.model_dump(exclude={"recompute"}) for chunk in stage.chunks] for stage in layout.stages]


def cuts_read(drawn: Plan, files: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """The same by the first of the exported files that holds a job."""
    for name, text in files.items():
        with suppress(InputError):  # a script that only starts the others
            job = read_text(text, name, devices=drawn.plan.layout.devices)
            return cuts_of(laid_out(job, drawn.problem.model, drawn.problem.stack)[0])
    raise AssertionError(f"none of {', '.join(files)} holds a job")


@pytest.mark.parametrize("framework", CASES)
def test_every_legal_layout_and_cut_can_be_written(framework: str) -> None:
    cluster, problems = CASES[framework]
    bare = interleaved = 0
    for number, drawn in enumerate(plans(12 * len(problems), 23, framework, cluster, problems, cut=ragged)):
        layout = drawn.plan.layout
        files = render(drawn, framework)
        assert files
        if number % EVERY == 0:
            assert cuts_read(drawn, files) == cuts_of(layout)
        interleaved += layout.vpp > 1
        bare += any(chunk.layers is None for stage in layout.stages for chunk in stage.chunks)
    assert interleaved or framework == "deepspeed"
    assert bare or not drawn.problem.stack.bare_ends


CHOSEN = (
    ("qwen3-32b", "atlas-800t-a2", "mindformers", {}),  # its best plan leaves the embedding alone
    ("qwen3-8b", "cloudmatrix-384", "mindformers", {"fix": "pp=4,schedule=zb-v"}),
    ("qwen3-30b-a3b", "cloudmatrix-384", "mindformers", {"fix": "pp=4,vpp=2"}),
    ("qwen3-32b", "hgx-h100", "megatron-lm", {"fix": "pp=4,vpp=2"}),
    ("qwen3-30b-a3b", "hgx-h100", "megatron-bridge", {"fix": "pp=4,vpp=3"}),
    ("qwen3-30b-a3b", "cloudmatrix-384", "mindspeed-llm", {"fix": "pp=4,vpp=2"}),
    ("qwen3-32b", "hgx-h100", "torchtitan", {"fix": "pp=4,vpp=2"}),
    ("qwen3-8b", "hgx-h100", "deepspeed", {"fix": "pp=4"}),
)
"""Model, cluster, framework, and what is asked of the layout."""


@pytest.mark.parametrize(("model", "cluster", "framework", "asked"), CHOSEN)
def test_what_the_search_chooses_can_be_written(model: str, cluster: str, framework: str, asked: dict[str, str]) -> None:
    problem = build_problem(model, cluster, 64, 512, 4096, framework=framework, **asked)
    assert render(make_plan(problem, time_limit_s=60), framework)

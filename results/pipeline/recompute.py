"""What recompute that differs between layers could gain, and what of it frameworks can be told."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import build_problem
from paraplan.optimizer.bounds import least_after, row_bounds_s
from paraplan.optimizer.chunk_costs import opened
from paraplan.optimizer.chunking import Chunking, step_seconds
from paraplan.optimizer.chunks import best_chunks
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.recutting import proved
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces import Layout
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.layout import Ints, LayoutTable, Split

EQUAL = 5e-4  # as of partitions
SECONDS = 2.0
"""Deterministic seconds of CP-SAT for each job."""
JOBS = (
    (("deepseek-v3", "hgx-h800", 2048, 16384, 4096, "megatron-bridge", "fp8"), "pp=16,ep=64", False),
    (("llama-3.1-405b", "hgx-h100", 8192, 2048, 8192, "megatron-lm", "bf16"), "tp=8,pp=16", False),
    (("kimi-k2", "hgx-h100", 512, 4096, 4096, "megatron-bridge", "bf16"), "tp=2,pp=16,ep=32", False),
    (("qwen3-235b-a22b", "hgx-h100", 256, 2048, 4096, "megatron-bridge", "bf16"), "tp=2,pp=8,ep=32", False),
    (("deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096, "mindspeed-llm", "bf16"), "tp=2,pp=8,ep=32", False),
    (("deepseek-v3", "cloudmatrix-384", 1536, 15360, 4096, "mindformers", "bf16"), "tp=2,pp=8,ep=32", True),
    (("deepseek-v3", "atlas-800t-a2", 1024, 4096, 4096, "mindformers", "bf16"), "tp=4,pp=16,ep=8,offload=optimizer:1", True),
    (("qwen3-32b", "atlas-800t-a2", 64, 512, 32768, "mindformers", "bf16"), "tp=8,pp=4,offload=optimizer:1", True),
)
"""A problem, a layout without its recompute, and whether its stack is told a depth for every chunk."""


@dataclass(frozen=True)
class _Chosen:
    """Of a job the best choice for all layers, and what CP-SAT chooses layer by layer and chunk by chunk; steps in seconds."""

    uniform: str
    uniform_s: float
    open_s: float
    bound_s: float
    by_chunk: tuple[float, tuple[int, ...]] | None


def recompute() -> str:
    """The section on recompute."""
    rows = []
    for asked, words, told in JOBS:
        print(f"recomputing {asked[0]} {words}", file=sys.stderr, flush=True)
        found = _chosen(asked, words, told)
        by_chunk, depths = ("", "") if found.by_chunk is None else (_gain(found, found.by_chunk[0]), _runs(found.by_chunk[1]))
        rows.append(
            (
                f"{asked[0]}, {words}, {asked[5]}",
                found.uniform,
                wording.seconds(found.uniform_s, 4),
                _gain(found, found.open_s),
                wording.percent(found.open_s / found.bound_s - 1.0),
                by_chunk,
                depths,
            )
        )
    heads = ("job", "best for all layers", "step", "layer by layer", "gap", "chunk by chunk", "depths")
    return f"""## Recompute

Early stages keep more micro-batches in flight than late ones, so that what they must redo to fit late ones need not. best for all
layers: the fastest choice that fits, of all that `plan` lists. layer by layer: the step if every layer chose for itself between
none, each selective set and full, cuts and choices together by CP-SAT in {SECONDS:g} deterministic seconds, half of them from
scratch and half from the choices for all (`chunk_costs`); the gap is to the best bound known. No framework here is told that.
chunk by chunk: full recompute of the first so many layers of every chunk, which MindSpore Transformers is told: `plan` does it
there by itself, with CP-SAT's bound over cuts and depths.

{markdown(heads, rows, code=(1,))}
"""


def _chosen(asked: tuple[str, str, int, int, int, str, str], words: str, told: bool) -> _Chosen:
    problem = build_problem(*asked)
    model, overhead_s = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as)), problem.stack.step_overhead_s.value
    bare = complete(problem, parse_layout(words))
    choices = [str(each) for each in Space(problem).choices.recomputes()]
    layouts = [with_default_stages(model, bare.model_copy(update={"recompute": each})) for each in choices]
    best, step_s = _best(model, layouts)
    kinds = [layout for layout in layouts if ":block:" not in layout.recompute]
    chunking = opened(model, kinds)
    starts = [_uniform(chunking, layout, place) for place, layout in enumerate(kinds) if _best(model, [layout])[1] < np.inf]
    starts.sort(key=lambda start: -step_seconds(chunking, start))
    both = [one for begun in ([], starts) if (one := best_chunks(chunking, begun, seconds=SECONDS / 2.0)) is not None]
    open_s, proved_s = min(one.step_s for one in both), max(one.bound_s for one in both)
    rows = model.rows(LayoutTable.from_layouts(kinds[:1]))  # none recomputed: no choice takes less
    bound_s = max(proved_s + overhead_s, float(row_bounds_s(model, rows, least_after(model, rows))[0]))
    by_chunk = None
    if told:
        deepest = next(layout for layout in layouts if layout.recompute == "full")
        start = best if best.recompute != "none" else deepest
        cut = proved(model, start, SECONDS)
        by_chunk = cut.step_time_s, Split.from_stages(cut.layout.stages).redone
    return _Chosen(best.recompute, step_s, open_s + overhead_s, bound_s, by_chunk)


def _uniform(chunking: Chunking, layout: Layout, choice: int) -> Ints:
    """A layout's own cuts with every layer under one choice."""
    counts = np.zeros((len(chunking.running), chunking.blocks.backward_s.shape[1], chunking.chunks), dtype=np.int64)
    counts[:, choice] = chunking.held(Split.from_stages(layout.stages).cuts)
    return counts


def _best(model: CostModel, layouts: list[Layout]) -> tuple[Layout, float]:
    """The fastest layout that fits, and its step."""
    priced = [model.price(LayoutTable.from_layouts([layout])) for layout in layouts]
    steps = [float(one.step_time_s[0]) if one.fits[0] else np.inf for one in priced]
    best = min(range(len(layouts)), key=lambda place: steps[place])
    return layouts[best], steps[best]


def _gain(found: _Chosen, step_s: float) -> str:
    gain = step_s / found.uniform_s - 1.0
    return "equal" if abs(gain) <= EQUAL else wording.signed(wording.percent(gain))


def _runs(depths: tuple[int, ...]) -> str:
    return " ".join(map(str, depths))

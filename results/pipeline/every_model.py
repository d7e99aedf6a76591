"""Every model of the catalog cut into pipelines of three sizes: how near to the best the cuts are proved, and in what time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import build_problem
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.recutting import Recut, proved
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces import Layout, Problem
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import catalog_names
from paraplan.search_spaces.layout import LayoutTable
from paraplan.search_spaces.rules import violations

SIZES = (4, 8, 16)
ASKED = ("hgx-h100", 1024, 1024, 4096, "megatron-bridge", "bf16")
WAYS = (("1f1b", ""), ("interleaved", ",vpp=2"))
EXACT = 1e-4
"""Gap below which a partition counts as the best."""


def every_model() -> str:
    """The section on the catalog's models."""
    rows, gaps, seconds = [], {way: list[float]() for way, _ in WAYS}, []
    for name in catalog_names("models"):
        print(f"cutting {name}", file=sys.stderr, flush=True)
        found = dict(_cut(name))
        if found:
            for (_, way), (recut, _) in found.items():
                gaps[way].append(recut.gap)
            seconds += [each for _, each in found.values()]
            rows.append((name, *(_cell(found.get(key)) for key in product(SIZES, (way for way, _ in WAYS)))))
    heads = ("model", *(f"pp={pp}, {way}" for pp, (way, _) in product(SIZES, WAYS)))
    cluster, devices, batch, seq_len, stack, _ = ASKED
    about = (
        f"Each of the catalog's models on {devices:,} × {cluster} with {stack} and {batch:,} sequences of {seq_len:,} tokens, "
        "all layers redone, as much TP and EP as is legal up to 8, in pipelines of three sizes: by how much other cuts could be "
        "faster at most, proved as in a plan, and the processor's seconds for cuts and proof. No figures: no such layout is legal, "
        "or none was found to fit."
    )
    sums = " ".join(_sum(way, found) for way, found in gaps.items() if found)
    took = f"Cuts and proof took {np.median(seconds):.1f} s in the median and {max(seconds):.1f} s at most."
    return "\n\n".join(["## Every model", about, markdown(heads, rows), f"{sums} {took}", ""])


def _sum(way: str, gaps: Sequence[float]) -> str:
    """How many partitions of one schedule are proved the best, and how far the others may be from it."""
    exact = sum(gap < EXACT for gap in gaps)
    return (
        f"Of {len(gaps)} partitions of {way} {exact} are proved the best to {100 * EXACT:.2g} %; the median gap is "
        f"{wording.percent(float(np.median(gaps)))}, the largest {wording.percent(max(gaps))}."
    )


def _cut(name: str) -> Iterator[tuple[tuple[int, str], tuple[Recut, float]]]:
    """What is proved of a model by size and schedule, and in how many seconds."""
    problem = build_problem(name, *ASKED)
    model = CostModel(problem)
    for pp, (way, words) in product(SIZES, WAYS):
        layout = _layout(problem, f"pp={pp}{words},recompute=full")
        if layout is not None:
            begun = time.process_time()
            recut = proved(model, with_default_stages(model, layout))
            seconds = time.process_time() - begun
            if model.price(LayoutTable.from_layouts([recut.layout])).fits[0]:
                yield (pp, way), (recut, seconds)


def _layout(problem: Problem, words: str) -> Layout | None:
    """The first legal layout with the most TP, then EP; none if there is none."""
    for tp, ep in product((8, 4, 2, 1), (8, 4, 2, 1) if problem.model.is_moe else (1,)):
        try:
            layout = complete(problem, parse_layout(f"tp={tp},ep={ep},{words}"))
        except InputError:  # degrees that do not divide the devices
            continue
        if not violations(problem, layout):
            return layout
    return None


def _cell(found: tuple[Recut, float] | None) -> str:
    return "" if found is None else f"{wording.percent(found[0].gap)}, {found[1]:.1f} s"

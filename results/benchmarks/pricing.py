"""Layouts priced per second on one core: step time and the memory of every stage.

`python results/benchmarks/pricing.py` prints the figures; `regenerate.py` beside it writes them down. A million legal layouts of
GPT-3 175B on 4,096 A100 in shuffled order, factor tables built inside the timing; interleaved schedules from below in closed form,
as the search prices all but its finalists.
"""

from __future__ import annotations

import time

import numpy as np
from paraplan.cost_models.step import CostModel, same_shape
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import LayoutTable, Problem, Split

LAYOUTS = 1_000_000
SEED = 20


def shuffled_layouts(problem: Problem, count: int) -> LayoutTable:
    """Random legal layouts with even stages, the first ones a layer longer where they do not divide; drawn with replacement where
    there are fewer.
    """
    space = Space(problem)
    rng = np.random.default_rng(SEED)
    weights = space.layouts_per_frame / space.listed
    frames, times = np.unique(rng.choice(len(space.frames), size=count, p=weights), return_counts=True)
    table, member = space.layouts(frames)
    first = np.searchsorted(member, np.arange(len(frames)))
    picked = np.repeat(first, times) + rng.integers(0, np.repeat(space.layouts_per_frame[frames], times))
    table = table.take(rng.permutation(picked))
    blocks = problem.model.num_layers
    split, splits = np.zeros(len(table), dtype=np.int64), []
    for members in same_shape(table):
        pp, vpp = int(table.pp[members[0]]), int(table.vpp[members[0]])
        each, more = divmod(blocks, pp * vpp)
        cuts = np.cumsum([0, *(each + (chunk < more) for chunk in range(pp * vpp))])
        split[members] = len(splits)
        splits.append(Split(pp, vpp, tuple(cuts.tolist())))
    return table.with_splits(split, tuple(splits))


def layouts_per_second(problem: Problem, table: LayoutTable) -> float:
    begun = time.process_time()
    CostModel(problem).price(table, closed_form=True)
    return len(table) / (time.process_time() - begun)


if __name__ == "__main__":
    gpt3 = build_problem("gpt3-175b", "hgx-a100", 4096, 4096, 2048)
    layouts = shuffled_layouts(gpt3, LAYOUTS)
    print(f"{layouts_per_second(gpt3, layouts):,.0f} layouts/s")

"""Rows under several ways to cut each: their steps, of which a look at the first stage alone spares most.

The first stage ends last, and before that lies the longest path through any; it has the most micro-batches in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Cuts
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel, Prices
from ..search_spaces.layout import Floats, Ints
from ..search_spaces.row_keys import distinct_rows, varying

FEW_CELLS = 1 << 14
"""Chunks of all ways up to which a look at the first stage takes as long as it spares."""
SLACK = 1e-9
"""Relative rounding beyond which a way is left out: memory above what there is, a step above the goal."""


def price_family(model: CostModel, rows: Rows, family: Cuts) -> Prices:
    """Every row under every way of its family (n, ways, ·), timed from below where there is a closed form, (n·ways,)."""
    (works, work), (n, ways, width) = _works(rows, family), family.shape
    flow = model.flow(rows.take(np.repeat(works, ways)), family[works].reshape(-1, width), closed_form=True)
    return model.price_flow(rows.take(np.repeat(np.arange(n), ways)), flow.take(_of_each(work, ways)))


def fitting_family_s(model: CostModel, rows: Rows, family: Cuts, goal_s: float = np.inf) -> Floats:
    """The steps of `price_family` as (n, ways), infinite for ways that do not fit, which are not timed: mostly the most.

    Of ways that take `goal_s` or more by their first stage comes what they take by that, which is below their step.
    """
    (works, work), ways = _works(rows, family), family.shape[1]
    found = _first_stage_s(model, rows, family, works, work)
    row, way = np.nonzero(found < min(goal_s, np.finfo(float).max))
    if not len(row):
        return found
    used, place = np.unique(work[row] * ways + way, return_inverse=True)
    flow = model.flow(rows.take(works[used // ways]), family[works[used // ways], used % ways], closed_form=True)
    every, load = rows.take(row), flow.load.take(place)
    away = model.away_bytes(every, load).max(axis=1) <= model.host_limit_bytes
    fits = np.nonzero(away & (model.stage_bytes(every, load).max(axis=1) <= model.usable_bytes))[0]
    found[row, way] = np.inf
    if len(fits):
        found[row[fits], way[fits]] = model.price_flow(every.take(fits), flow.take(place[fits])).step_time_s
    return found


def _first_stage_s(model: CostModel, rows: Rows, family: Cuts, works: npt.NDArray[np.intp], work: Ints) -> Floats:
    """The steps of `price_family` from below, (n, ways), infinite where the first stage does not fit; zero where it is the only
    one, what it holds hangs on others, or all are priced as fast.
    """
    n, ways, width = family.shape
    if rows.shape[0] == 1 or rows.lent.any() or len(works) * ways * width < FEW_CELLS:
        return np.zeros((n, ways))
    working = rows.take(np.repeat(works, ways))
    flow = model.first_flow(working, family[works].reshape(-1, width), _longest_s(rows.take(works), family[works]).ravel())
    flow, every = flow.take(_of_each(work, ways)), rows.take(np.repeat(np.arange(n), ways))
    fits = model.stage_bytes(every, flow.load, np.zeros(1, dtype=np.int64))[:, 0] <= model.usable_bytes * (1.0 + SLACK)
    return np.where(fits, model.least_step_s(every, flow) * (1.0 - SLACK), np.inf).reshape(n, ways)


def _works(rows: Rows, family: Cuts) -> tuple[npt.NDArray[np.intp], Ints]:
    """Rows that stand for all that share their pipelines under all ways of their family, and the place of each row's."""
    return distinct_rows([*rows.work_columns, *varying(family.reshape(len(rows), -1))])


def _of_each(work: Ints, ways: int) -> Ints:
    """Where the ways of every row's work are, (n·ways,)."""
    return (work[:, None] * ways + np.arange(ways)).ravel()


def _longest_s(rows: Rows, family: Cuts) -> Floats:
    """`paths_s` of every row's own family (n, ways, ·): ways that all rows share are worked out once."""
    shared = (family == family[:1]).all(axis=(0, 2))
    found = np.empty(family.shape[:2])
    for some, cuts in ((shared, family[:1]), (~shared, family)):
        if some.any():
            found[:, some] = paths_s(rows, cuts[:, some])
    return found


def paths_s(rows: Rows, cuts: Cuts) -> Floats:
    """The longest path through one stage under some cuts (n or 1, ways, pp·vpp+1), (n, ways): the chunks before it of the first
    micro-batch, there and back, and all that it does itself.
    """
    (pp, vpp, _), pieces, m = rows.shape, rows.pieces, rows.column("num_microbatches")[:, None, None]
    start, stop = cuts[..., :-1], cuts[..., 1:]
    found = np.zeros((len(rows), cuts.shape[1], pp))

    def passed(some: npt.NDArray[np.intp], seconds: Floats, held: Ints) -> Floats:
        stages, first = held.reshape(*held.shape[:2], vpp, pp).sum(axis=2), held[..., :pp]
        return np.asarray(seconds[rows.factor[some]][:, None, None] * (m[some] * stages + np.cumsum(first, axis=2) - first))

    each = np.arange(len(rows))
    for name in pieces.names:
        piece, running = pieces.pieces[name], pieces.running[name]
        found += passed(each, piece.once_s + piece.back_s, running[stop] - running[start])
    for name, chunk in (("embedding", 0), ("head", -1)):
        held = np.zeros_like(start)
        held[..., chunk] = 1
        found += passed(each, pieces.pieces[name].once_s + pieces.pieces[name].back_s, held)
    for depth in np.unique(rows.depth[rows.depth > 0]).tolist():
        alike = np.nonzero(rows.depth == depth)[0]
        first, last = (ends if len(cuts) == 1 else ends[alike] for ends in (start, stop))
        again = np.minimum(first + min(depth, len(pieces.blocks)), last)
        for name in pieces.names:
            found[alike] += passed(alike, pieces.pieces[name].again_s, pieces.running[name][again] - pieces.running[name][first])
    return np.asarray(found.max(axis=2))

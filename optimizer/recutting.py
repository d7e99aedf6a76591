"""A layout's chunks cut again: downhill by its price, and what no other way to cut them could beat, by cutting planes.

The search cuts interleaved chunks where work is balanced, so that its proof covers all layouts alike; here it shows what moving
blocks of one layout would still gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost_models.pieces import Piece
from ..cost_models.pipeline import in_flight
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel
from ..search_spaces.layout import NONE, Floats, Ints, Layout, LayoutTable, Split
from .bounds import least_after, row_bounds_s
from .chunks import Blocks, Chunking, Chunks, best_chunks, walked
from .stages import last_start

PROOF_SECONDS = 0.1
"""Deterministic seconds that CP-SAT may look for a better way to cut one layout."""


@dataclass(frozen=True)
class Recut:
    """A layout with its best known cuts, its step, and the step that no cuts of it can beat."""

    layout: Layout
    step_time_s: float
    bound_s: float
    rounds: int

    @property
    def gap(self) -> float:
        """How much shorter the step could be with other cuts, at most, as a share of the bound."""
        return self.step_time_s / self.bound_s - 1.0


def proved(model: CostModel, layout: Layout, seconds: float = PROOF_SECONDS) -> Recut:
    """The layout with the best cuts that CP-SAT finds in `seconds` of its time, at least as good as its own, and a bound."""
    rows = model.rows(LayoutTable.from_layouts([layout]))
    chunking, way = chunking_of(model, rows), _way(model, rows)
    overhead_s = model.problem.stack.step_overhead_s.value
    found = best_chunks(chunking, [counts_of(chunking, cuts) for cuts in way], seconds=seconds)
    tried = [way[-1]] if found is None else [way[-1], found.cuts]
    steps = _price(model, rows, np.array(tried))
    best = int(steps.argmin())
    least_s = float(row_bounds_s(model, rows, least_after(model, rows))[0])
    bound_s = min(float(steps[best]), max(least_s, 0.0 if found is None else found.bound_s + overhead_s))
    return Recut(_with_cuts(model, layout, tried[best]), float(steps[best]), bound_s, _rounds(found))


def _rounds(found: Chunks | None) -> int:
    return 0 if found is None else found.rounds


def _way(model: CostModel, rows: Rows) -> list[tuple[int, ...]]:
    chunking = chunking_of(model, rows)
    return walked(chunking, rows.table.splits[0].cuts, lambda cuts: _price(model, rows, cuts))


def _price(model: CostModel, rows: Rows, cuts: Ints) -> Floats:
    """Steps of one row under many cuts, infinite where they do not fit."""
    priced = model.price_cuts(rows.take(np.zeros(len(cuts), dtype=np.intp)), cuts)
    return np.where(priced.fits, priced.step_time_s, np.inf)


def _with_cuts(model: CostModel, layout: Layout, cuts: tuple[int, ...]) -> Layout:
    stages = Split(layout.pp, layout.vpp, cuts).stages(model.problem.model.num_layers, layout.recompute)
    return layout.model_copy(update={"stages": stages})


def counts_of(chunking: Chunking, cuts: tuple[int, ...]) -> Ints:
    """Blocks of each kind under each choice of recompute in every chunk, (kinds, choices, chunks)."""
    held = chunking.held(cuts)
    if chunking.depth is None:
        return held[:, None, :]
    begin, end = np.array(cuts[:-1]), np.array(cuts[1:])
    redone = chunking.running[:, np.minimum(begin + chunking.depth, end)] - chunking.running[:, begin]
    return np.stack([held - redone, redone], axis=1)


def chunking_of(model: CostModel, rows: Rows) -> Chunking:
    """The partition that one layout leaves to choose, its recompute as it is."""
    (pp, vpp, schedule), pieces, table = rows.shape, rows.pieces, rows.table
    blocks, depth = len(pieces.blocks), int(rows.depth[0])
    partly = table.recompute_mode[0] != NONE and depth < blocks
    choices = [False, True] if partly else [bool(table.recompute_mode[0] != NONE)]
    stage, m = np.arange(pp), int(table.num_microbatches[0])
    transient = np.where(stage == pp - 1, rows.last_transient_bytes[0], rows.transient_bytes[0])
    embedding, head = pieces.pieces["embedding"], pieces.pieces["head"]
    free_f, free_b = pieces.unused_shares
    return Chunking(
        schedule,
        pp,
        vpp,
        m,
        float(rows.p2p_s[0]),
        tuple(pieces.names.index(name) for name in pieces.blocks),
        _costs(model, rows, [pieces.pieces[name] for name in pieces.names], choices),
        _costs(model, rows, [embedding, head], [False], float(pieces.copied_weights[rows.factor[0]])),
        in_flight(schedule, pp, vpp, m, stage) / vpp,
        transient + rows.communicator_bytes[0],
        model.usable_bytes,
        last_start(model),
        min(1, blocks // (pp * vpp)),
        depth if partly else None,
        (float(free_f[rows.factor[0]]), float(free_b[rows.factor[0]])),
    )


def _costs(model: CostModel, rows: Rows, pieces: list[Piece], choices: list[bool], copied: float = 0.0) -> Blocks:
    """What pieces of one row cost where they are redone or not; the last keeps `copied` weights more."""
    at, overlap, unslowed = int(rows.factor[0]), model.problem.stack.overlap, model.layers.unslowed
    hidden_g, hidden_p = overlap.dp_gradients * unslowed, overlap.dp_parameters * unslowed

    def column(name: str) -> Floats:
        return np.array([float(getattr(piece, name)[at]) for piece in pieces])

    dense, expert = column("dense_weights"), column("expert_weights")
    dense[-1] += copied

    def held(pair: tuple[Floats, Floats]) -> Floats:
        return np.asarray(float(pair[0][0]) * dense + float(pair[1][0]) * expert)

    gradients, parameters = held(rows.gradient_s), held(rows.parameter_s)
    return Blocks(
        forward_s=column("once_s"),
        backward_s=np.stack([column("back_s") + again * column("again_s") for again in choices], axis=1),
        saved_bytes=np.stack([column("recomputed_bytes" if again else "saved_bytes") for again in choices], axis=1),
        state_bytes=held((rows.rates.total(0), rows.rates.total(1))),
        reduced_s=gradients * (1.0 - hidden_g),
        gradients_s=gradients * hidden_g,
        stepped_s=held(rows.optimizer_s) + held(rows.offload_s) + parameters * (1.0 - hidden_p),
        parameters_s=parameters * hidden_p,
    )

"""A layout's chunks cut again: downhill by its price, and what no other way to cut them could beat, by cutting planes.

The search cuts interleaved chunks by a rule, so that its proof covers all layouts alike; the best that it finds are then cut here
as well as can be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.pieces import Piece
from ..cost_models.pipeline import in_flight
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel
from ..cost_models.timeline import WHOLE
from ..search_spaces.choices import FRAME
from ..search_spaces.layout import NONE, Floats, Ints, Layout, LayoutTable, Split
from .bounds import least_after, row_bounds_s
from .chunks import Blocks, Chunking, Chunks, best_chunks, walked
from .deadline import Deadline
from .search import Candidate, Found
from .stages import EQUAL, cutting_of, partitioned_exactly

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
    best, least_s = int(steps.argmin()), float(row_bounds_s(model, rows, least_after(model, rows))[0])
    bound_s = min(float(steps[best]), max(least_s, 0.0 if found is None else found.bound_s + overhead_s))
    if not np.isfinite(steps[best]):  # nothing fits: the layout stays as it is, and so does its price
        own_s = float(model.price(rows.table).step_time_s[0])
        return Recut(layout, own_s, min(own_s, least_s), _rounds(found))
    return Recut(_with_cuts(model, layout, tried[best]), float(steps[best]), bound_s, _rounds(found))


def settled(model: CostModel, found: Found, deadline: Deadline, bounded: bool = True) -> tuple[list[Candidate], Recut | None]:
    """The best layouts of a search, and those near them, with better cuts where there are any; the best of each frame, fastest
    first, and what is proved of the fastest's cuts.

    Nothing is proved where there is one way to cut it, no time left, or nobody asks for it (`bounded`).
    """
    fastest_s = found.best[0].step_time_s
    by_frame = {_frame(candidate.layout): candidate for candidate in reversed(found.best)}
    for candidate in sorted([*found.best, *found.near], key=lambda candidate: candidate.step_time_s):
        frame = _frame(candidate.layout)
        known = by_frame.get(frame)
        limit_s = fastest_s if known is None else known.step_time_s
        if deadline.passed or not _least_s(model, candidate.layout) < limit_s:
            continue
        step_s, layout = downhill(model, candidate.layout)
        if step_s < limit_s * (1.0 - EQUAL):
            by_frame[frame], fastest_s = Candidate(step_s, layout), min(fastest_s, step_s)
    best = sorted(by_frame.values(), key=lambda candidate: candidate.step_time_s)
    return _proved_first(model, best, bounded and not deadline.passed)


def _frame(layout: Layout) -> tuple[int, ...]:
    return tuple(getattr(layout, name) for name in FRAME)


def _least_s(model: CostModel, layout: Layout) -> float:
    """What no cuts of a layout can beat."""
    rows = model.rows(LayoutTable.from_layouts([layout]))
    return float(row_bounds_s(model, rows, least_after(model, rows))[0])


def _proved_first(model: CostModel, found: list[Candidate], asked: bool) -> tuple[list[Candidate], Recut | None]:
    """The layouts with the first as CP-SAT cuts it, where that is asked and there are several ways to, and its bound."""
    first = found[0]
    whole = first.layout.schedule in WHOLE and model.problem.stack.cuts_freely(first.layout.vpp)
    if not asked or first.layout.pp == 1 or not whole:
        return found, None
    proof = proved(model, first.layout)
    if proof.step_time_s < first.step_time_s * (1.0 - EQUAL):
        found[0] = replace(first, step_time_s=proof.step_time_s, layout=proof.layout)
    return found, proof


def downhill(model: CostModel, layout: Layout) -> tuple[float, Layout]:
    """The step of a layout with the cuts that single moves of blocks lead to from its own, and the layout with these.

    It stays as it is where its stack cannot be told others, where it does not fit, and for 1F1B, which is cut so from the first.
    """
    rows = model.rows(LayoutTable.from_layouts([layout]))
    open_cuts = layout.pp > 1 and model.problem.stack.cuts_freely(layout.vpp) and layout.schedule in WHOLE
    if not open_cuts or partitioned_exactly(model.problem, rows.table).all():
        return float(model.price(rows.table).step_time_s[0]), layout
    way = _way(model, rows)
    if len(way) == 1:
        return float(model.price(rows.table).step_time_s[0]), layout
    return float(_price(model, rows, np.array(way[-1:]))[0]), _with_cuts(model, layout, way[-1])


def _rounds(found: Chunks | None) -> int:
    return 0 if found is None else found.rounds


def _way(model: CostModel, rows: Rows) -> list[tuple[int, ...]]:
    price, below = (lambda cuts, closed=closed: _price(model, rows, cuts, closed) for closed in (False, True))
    return walked(chunking_of(model, rows), rows.table.splits[0].cuts, price, below)


def _price(model: CostModel, rows: Rows, cuts: Ints, closed_form: bool = False) -> Floats:
    """Steps of one row under many cuts, infinite where they do not fit; in `closed_form` from below."""
    priced = model.price_cuts(rows.take(np.zeros(len(cuts), dtype=np.intp)), cuts, closed_form)
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
    copied = float(pieces.copied_weights[rows.factor[0]])
    beside_mtp = {"mtp": copied / pieces.counts["mtp"]} if pieces.copied_for is not None else {}
    copies = [beside_mtp.get(name, 0.0) for name in pieces.names]
    free_f, free_b = pieces.unused_shares
    return Chunking(
        schedule,
        cutting_of(model, pp, vpp),
        m,
        float(rows.p2p_s[0]),
        tuple(pieces.names.index(name) for name in pieces.blocks),
        _costs(model, rows, [pieces.pieces[name] for name in pieces.names], choices, copies),
        _costs(model, rows, [embedding, head], [False], [0.0, 0.0 if beside_mtp else copied]),
        in_flight(schedule, pp, vpp, m, stage) / vpp,
        transient + rows.communicator_bytes[0],
        model.usable_bytes,
        depth if partly else None,
        (float(free_f[rows.factor[0]]), float(free_b[rows.factor[0]])),
    )


def _costs(model: CostModel, rows: Rows, pieces: list[Piece], choices: list[bool], copied: list[float]) -> Blocks:
    """What pieces of one row cost where they are redone or not; each keeps so many `copied` weights more."""
    at, overlap, unslowed = int(rows.factor[0]), model.problem.stack.overlap, model.layers.unslowed
    hidden_g, hidden_p = overlap.dp_gradients * unslowed, overlap.dp_parameters * unslowed

    def column(name: str) -> Floats:
        return np.array([float(getattr(piece, name)[at]) for piece in pieces])

    dense, expert = column("dense_weights"), column("expert_weights")
    dense += copied

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

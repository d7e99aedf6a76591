"""What a layout leaves to choose of its chunks: where they may be cut, and what each block costs there (`Chunking`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..cost_models.pieces import ENDS
from ..cost_models.rows import Rows
from ..cost_models.schedules import MIRRORED, loss_stages
from ..cost_models.split_passes import by_replay, held_moments, pass_figures, recomputes_ahead, slowed_in_pairs
from ..cost_models.step import CostModel
from ..search_spaces.layout import FULL_BLOCK, NONE, Floats, Ints, Layout, LayoutTable, Split
from .chunking import Blocks, Chunking
from .critical_paths import Pipeline
from .stages import cutting_of

NO_ENDS = (np.zeros(1), np.zeros(1))


def chunking_of(model: CostModel, rows: Rows, leading: bool = False, beside: Rows | None = None) -> Chunking:
    """The partition that one layout leaves to choose, its recompute as it is or, `leading`, to any depth in every chunk.

    What stages hold beside their blocks is as in `beside`, if that is given.
    """
    mode, depth = int(rows.column("recompute_mode")[0]), int(rows.depth[0])
    partly = mode != NONE and depth < len(rows.pieces.blocks)
    choices = [(0, False), (0, True)] if partly or leading else [(0, mode != NONE)]
    found = _chunking(model, rows, choices, depth if partly and not leading else None, beside)
    return replace(found, leading=leading)


def opened(model: CostModel, layouts: Sequence[Layout]) -> Chunking:
    """The partition that layouts leave to choose that differ in recompute and activation offload only: for each layer which of them
    it follows, every layer by itself.
    """
    rows = model.rows(LayoutTable.from_layouts(layouts))
    redone = (rows.column("recompute_mode") != NONE).tolist()
    return _chunking(model, rows, list(enumerate(redone)))


def counts_of(chunking: Chunking, split: Split) -> Ints:
    """Blocks of each kind under each choice of recompute in every chunk, (kinds, choices, chunks)."""
    held = chunking.held(split.cuts)
    if chunking.depth is None and not chunking.leading:
        return held[:, None, :]
    begin, end = np.array(split.cuts[:-1]), np.array(split.cuts[1:])
    depth = np.array(split.redone) if chunking.depth is None else chunking.depth
    redone = chunking.running[:, np.minimum(begin + depth, end)] - chunking.running[:, begin]
    return np.stack([held - redone, redone], axis=1)


def _chunking(
    model: CostModel, rows: Rows, choices: list[tuple[int, bool]], depth: int | None = None, beside: Rows | None = None
) -> Chunking:
    """The partition of rows that differ in recompute and activation offload, with a row and whether it redoes for each choice."""
    (pp, vpp, schedule), pieces, m = rows.shape, rows.pieces, int(rows.table.num_microbatches[0])
    held, stack, mirrored = rows if beside is None else beside, model.problem.stack, schedule in MIRRORED
    ends_here = loss_stages(schedule, pp, vpp)
    transient = np.where(ends_here, held.last_transient_bytes.max(), held.transient_bytes.max())  # of whichever choice
    # Stages of both ends of the model need no second embedding.
    copied = 0.0 if mirrored else float(pieces.copied_weights[rows.factor[0]])
    beside_mtp = {"mtp": copied / pieces.counts["mtp"]} if pieces.copied_for is not None else {}
    copies = [beside_mtp.get(name, 0.0) for name in pieces.names]
    free_f, free_b = pieces.unused_shares
    with_head = [0.0, 0.0 if beside_mtp else copied]
    return Chunking(
        Pipeline(schedule, pp, vpp, m, stack.split_backward, stack.microbatch_group, slowed_in_pairs(model.problem)),
        cutting_of(model, pp, vpp),
        float(rows.p2p_s[0]),
        tuple(pieces.names.index(name) for name in pieces.blocks),
        _costs(model, rows, pieces.names, choices, copies),
        _costs(model, rows, ENDS, [(0, False)], with_head),
        held_moments(rows),
        transient + rows.communicator_bytes[0],
        model.usable_bytes,
        depth,
        free=(float(free_f[rows.factor[0]]), float(free_b[rows.factor[0]])),
        apart=not by_replay(rows),
    )


def _costs(model: CostModel, rows: Rows, names: Sequence[str], choices: list[tuple[int, bool]], copied: list[float]) -> Blocks:
    """What pieces cost as they are, or redone, in each of some rows; each keeps so many `copied` weights more."""
    pieces = [rows.pieces.pieces[name] for name in names]
    overlap, unslowed = model.problem.stack.overlap, model.layers.unslowed
    hidden_g, hidden_p = float(rows.hidden_gradients[0]) * unslowed, overlap.dp_parameters * unslowed

    def column(name: str, row: int = 0) -> Floats:
        return np.array([float(getattr(piece, name)[rows.factor[row]]) for piece in pieces])

    dense, expert = column("dense_weights"), column("expert_weights")
    dense += copied

    def held(pair: tuple[Floats, Floats]) -> Floats:
        return np.asarray(float(pair[0][0]) * dense + float(pair[1][0]) * expert)

    gradients, parameters = held(rows.gradient_s), held(rows.parameter_s)
    last, first = (held(each) for each in model.exposed_ends_s(rows) or (NO_ENDS, NO_ENDS))
    blocks = Blocks(
        forward_s=np.stack([column("once_s", row) for row, _ in choices], axis=1),
        backward_s=np.stack([column("back_s", row) + again * column("again_s", row) for row, again in choices], axis=1),
        saved_bytes=np.stack([column("recomputed_bytes" if again else "saved_bytes", row) for row, again in choices], axis=1),
        state_bytes=held((rows.rates.total(0), rows.rates.total(1))),
        reduced_s=gradients * (1.0 - hidden_g) + last,
        gradients_s=gradients * hidden_g - last,
        stepped_s=held(rows.optimizer_s) + held(rows.offload_s) + parameters * (1.0 - hidden_p) + first,
        parameters_s=parameters * hidden_p - first,
    )
    return _with_passes(model, rows, names, choices, blocks) if by_replay(rows) else blocks


def _with_passes(model: CostModel, rows: Rows, names: Sequence[str], choices: list[tuple[int, bool]], blocks: Blocks) -> Blocks:
    """The costs of pieces whose passes are split, paired or redone ahead."""
    figures, mode = [pass_figures(model.layers, rows, name) for name in names], rows.column("recompute_mode")

    def column(name: str, choice: int = 0) -> Floats:
        return np.array([float(getattr(each, name)[choice]) for each in figures])

    returned = [column("returned_s", place) + again * column("resent_s", place) for place, again in choices]
    ahead = recomputes_ahead(rows)
    early = [again * ahead * (mode[place] == FULL_BLOCK) * column("again_s", place) for place, again in choices]
    return replace(
        blocks,
        weight_s=column("weight_s"),
        sent_s=np.stack([column("sent_s", place) for place, _ in choices], axis=1),
        returned_s=np.stack(returned, axis=1),
        early_s=np.stack(early, axis=1) if ahead else None,
        kept_bytes=column("kept_bytes"),
    )

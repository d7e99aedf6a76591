"""What ranks send per step: bytes by dimension across each level, for many layouts at once, all passes and recompute included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..search_spaces.groups import Groups, groups
from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Floats, LayoutTable
from ..search_spaces.row_keys import row_keys
from .lending import lends, partners_across
from .loads import Cuts, Loads
from .pieces import ENDS
from .rows import Rows
from .sharding import copy_groups, exchanges, reduces_gradients, shard_group
from .step import CostModel, moved_share

MESSAGE_COLUMNS = ("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "sequence_parallel", "cp_type", "rank_order")
"""What a layer's messages and the places of their groups depend on."""
OFFLOAD = "offload"
"""What goes to the supernode's pool, whose memory is no device's, or to other stages' devices, among the dimensions of traffic."""


def sent_bytes(
    model: CostModel, rows: Rows, redone: Mapping[str, Floats], dense: Floats, expert: Floats
) -> Iterator[tuple[str, Floats]]:
    """Dimension by dimension, bytes that a used device sends one way per step across each level, mean over devices, (levels, n).

    A dimension may come several times. Where groups tile no unit of a level, those of some stages straddle two and others' do not:
    every stage is taken to have their mean. `redone`: layers of each kind under recompute, (n,); `dense` and `expert`: parameters
    on one rank of every stage, summed, (n,).
    """
    table = rows.table
    yield from _layer_bytes(model, table, redone)
    yield from _data_bytes(model, table, dense, expert)
    yield _pipeline_bytes(model, table, rows.pieces.layer_input_bytes[rows.factor])
    if model.problem.workload.offload_to == "pool":
        at_supernode = np.arange(len(model.network.levels))[:, None] == model.network.supernode
        yield OFFLOAD, np.where(at_supernode, offloaded_bytes(model, rows, redone, dense, expert), 0.0)


def offloaded_bytes(model: CostModel, rows: Rows, redone: Mapping[str, Floats], dense: Floats, expert: Floats) -> Floats:
    """Bytes that a used device sends per step to the host or the pool, mean over devices, (n,).

    Activations of every micro-batch, those of experts as the fullest rank has them, and of optimizer states what a step sends away.
    As with a device's other traffic as much comes in as goes out, but for states that the host steps: their weights come back.
    """
    saved = np.zeros(len(rows))
    leaves = rows.column("activation_offload").any() and not lends(model.problem)
    for name, held in rows.pieces.counts.items() if leaves else ():
        piece, again = rows.pieces.pieces[name], redone.get(name, 0.0)
        saved += (held - again) * piece.saved_bytes[rows.factor] + again * piece.recomputed_bytes[rows.factor]
    activations = saved * moved_share(rows) * rows.column("num_microbatches")
    states = dense * rows.offloaded_bytes[0] + expert * rows.offloaded_bytes[1]
    return np.asarray((activations + states) / rows.column("pp"))


def lent_bytes(model: CostModel, rows: Rows, chunks: Loads) -> Floats:
    """Bytes of activations that a used device sends per step to another stage's, or back to it, across each level, (levels,).

    Mean over devices; for one row, and what its chunks hold (1, pp·vpp).
    """
    pp = rows.shape[0]
    moved = (chunks.folded(pp).saved_bytes * rows.column("num_microbatches")[:, None] * rows.lent_shares)[0]
    across = partners_across(rows.table, 0, model.network.sizes)
    return np.asarray(2.0 * (across * moved).sum(axis=1) / pp)


def layers_redone(model: CostModel, rows: Rows, cuts: Cuts) -> dict[str, Floats]:
    """Pieces of each kind that are under recompute between `cuts` (n, chunks+1) of rows of one shape, (n,)."""
    table, depth = rows.table, np.minimum(rows.redone, len(model.blocks))
    last = np.minimum(cuts[:, :-1] + depth, cuts[:, 1:])
    found = {}
    for name in dict.fromkeys(model.blocks):
        before = np.concatenate([[0], np.cumsum([block == name for block in model.blocks])])
        found[name] = (before[last] - before[cuts[:, :-1]]).sum(axis=1).astype(np.float64)
    if model.problem.stack.recomputed_ends:
        full = (table.recompute_mode == FULL_BLOCK) | (table.recompute_mode == FULL_UNIFORM)
        found |= {name: full.astype(np.float64) for name in ENDS}
    return found


def _layer_bytes(model: CostModel, table: LayoutTable, redone: Mapping[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """Messages of the layers, embedding and head; worked out once per distinct place and size."""
    _, first, which = np.unique(
        row_keys([getattr(table, name) for name in MESSAGE_COLUMNS]), return_index=True, return_inverse=True
    )
    distinct = table.take(first)
    full = (table.recompute_mode == FULL_BLOCK) | (table.recompute_mode == FULL_UNIFORM)
    selective = table.recompute_mode == SELECTIVE
    each = table.num_microbatches / table.pp
    for name in (*dict.fromkeys(model.blocks), *ENDS):
        held, again = max(model.blocks.count(name), 1), redone.get(name, np.zeros(len(table)))
        for sent in model.layers.sent(name, distinct):
            forward, backward = sent.forward[which], sent.backward[which]
            repeats = full | (selective & ((sent.modules & table.recompute_modules) != 0))
            passes = held * (forward + backward) + np.where(repeats, again * forward, 0.0)
            yield sent.dimension, sent.level_bytes[:, which] * passes * each


def _data_bytes(model: CostModel, table: LayoutTable, dense: Floats, expert: Floats) -> Iterator[tuple[str, Floats]]:
    """Gradients and weights of the mean stage, once per step or in every micro-batch, and between the copies of HSDP's shards."""
    stack, often = model.problem.stack, exchanges(model.problem.stack, table)
    gradient_bytes, m = float(stack.sent_gradient_bytes), table.num_microbatches.astype(np.float64)
    reduced = reduces_gradients(stack, table)
    scatters = np.where(reduced, 0.0, often.scatters_once + often.scatters_each * m)
    gathers = often.gathers_once + m * (1.0 * often.gathers_each + often.gathers_again)
    for dimension, group, total in (("dp", shard_group(table), dense), ("edp", groups(table, "edp"), expert)):
        mean = total / table.pp
        sent = model.network.ring_bytes(model.network.mean_crossing(group, table.devices), mean)
        sent = sent * (scatters * gradient_bytes + gathers * stack.gathered_weight_bytes)
        yield dimension, sent + np.where(reduced, _reduced_bytes(model, table, group, gradient_bytes * mean), 0.0)
        between = often.copies_once + often.copies_each * m
        if dimension == "dp" and between.any():
            yield dimension, between * _reduced_bytes(model, table, copy_groups(table), gradient_bytes * mean / group.size)


def _reduced_bytes(model: CostModel, table: LayoutTable, group: Groups, total_bytes: Floats) -> Floats:
    """What a rank of a group sends across each level to all-reduce, (levels, n)."""
    network = model.network
    return network.all_reduce_bytes(network.crossing(group), network.mean_crossing(group, table.devices), total_bytes)


def _pipeline_bytes(model: CostModel, table: LayoutTable, message_bytes: Floats) -> tuple[str, Floats]:
    """Activations forward and gradients back over every boundary between chunks, spread over the stages."""
    pp = table.pp.astype(np.float64)
    at = model.network.mean_crossing(groups(table, "pp"), table.devices)
    boundaries = at.gathered * pp * table.vpp
    ring = model.network.ring_pass_bytes(at, np.ones(len(pp))) * pp / np.maximum(pp - 1.0, 1.0)  # edges of the closed ring
    boundaries += (ring - at.gathered * pp) * (table.vpp - 1)  # from the last stage back to the first
    return "pp", 2.0 * table.num_microbatches * message_bytes * boundaries / pp

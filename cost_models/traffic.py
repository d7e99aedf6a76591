"""What ranks send per step: bytes by dimension across each level, for many layouts at once, all passes and recompute included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..search_spaces.groups import Groups, groups
from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, SHARDINGS, Floats, LayoutTable, row_keys
from .layers import shard_group
from .loads import Cuts, recompute_depths
from .operators import BF16
from .rows import Rows
from .step import CostModel

ZERO1, ZERO3, HSDP = SHARDINGS.index("zero1"), SHARDINGS.index("zero3"), SHARDINGS.index("hsdp")
MESSAGE_COLUMNS = ("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "sequence_parallel", "cp_type", "rank_order")
"""What a layer's messages and the places of their groups depend on."""


def sent_bytes(
    model: CostModel, rows: Rows, redone: Mapping[str, Floats], dense: Floats, expert: Floats
) -> Iterator[tuple[str, Floats]]:
    """Dimension by dimension, bytes that a used device sends one way per step across each level, mean over devices, (levels, n).

    A dimension may come several times. `redone`: layers of each kind under recompute, (n,); `dense` and `expert`: parameters on
    one rank of every stage, summed, (n,).
    """
    table = rows.table
    yield from _layer_bytes(model, table, redone)
    yield from _data_bytes(model, table, dense, expert)
    yield _pipeline_bytes(model, table, rows.pieces.layer_input_bytes[rows.factor])


def layers_redone(model: CostModel, table: LayoutTable, cuts: Cuts) -> dict[str, Floats]:
    """Layers of each kind that are under recompute between `cuts` (n, chunks+1), (n,)."""
    depth = np.minimum(recompute_depths(table), len(model.blocks))[:, None]
    last = np.minimum(cuts[:, :-1] + depth, cuts[:, 1:])
    found = {}
    for name in dict.fromkeys(model.blocks):
        before = np.concatenate([[0], np.cumsum([block == name for block in model.blocks])])
        found[name] = (before[last] - before[cuts[:, :-1]]).sum(axis=1).astype(np.float64)
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
    for name in (*dict.fromkeys(model.blocks), "embedding", "head"):
        held, again = max(model.blocks.count(name), 1), redone.get(name, np.zeros(len(table)))
        for sent in model.layers.sent(name, distinct):
            forward, backward = sent.forward[which], sent.backward[which]
            repeats = full | (selective & ((sent.modules & table.recompute_modules) != 0))
            passes = held * (forward + backward) + np.where(repeats, again * forward, 0.0)
            yield sent.dimension, sent.level_bytes[:, which] * passes * each


def _data_bytes(model: CostModel, table: LayoutTable, dense: Floats, expert: Floats) -> Iterator[tuple[str, Floats]]:
    """Gradients and weights of the mean stage; ZeRO-2 scatters and ZeRO-3 gathers per micro-batch, HSDP reduces between shards."""
    sharding = table.sharding
    gradient_bytes = float(model.problem.stack.sent_gradient_bytes)
    times = np.where(sharding > ZERO1, table.num_microbatches, 1.0)
    reductions = np.where(sharding == 0, 2.0, 1.0) * times * gradient_bytes
    gathers = BF16 * np.where(sharding >= ZERO3, 2.0 * times, (sharding > 0).astype(np.float64))
    for dimension, group, total in (("dp", shard_group(table), dense), ("edp", groups(table, "edp"), expert)):
        mean = total / table.pp
        yield dimension, model.network.ring_bytes(model.network.crossing(group), mean) * (reductions + gathers)
        copies = np.where(sharding == HSDP, table.cp * table.dp // group.size, 1)
        if dimension == "dp" and (copies > 1).any():
            between = model.network.crossing(Groups(copies, group.stride * group.size))
            sent = 2.0 * gradient_bytes * model.network.ring_bytes(between, mean / group.size)
            yield dimension, np.where(copies > 1, sent, 0.0)


def _pipeline_bytes(model: CostModel, table: LayoutTable, message_bytes: Floats) -> tuple[str, Floats]:
    """Activations forward and gradients back over every boundary between chunks, spread over the stages."""
    pp, each = table.pp.astype(np.float64), np.arange(len(table))
    at = model.network.crossing(groups(table, "pp"))
    units = pp / at.members
    below = np.concatenate([pp[None, :], units[:-1]])
    boundaries = (below - units) * table.vpp
    boundaries[at.outermost, each] += np.where(pp > 1, table.vpp - 1, 0)  # from the last stage back to the first
    return "pp", 2.0 * table.num_microbatches * message_bytes * boundaries / pp

"""What each stage holds at its peak, by term, per device.

Static: weights, gradients and optimizer states, sharded as the layout says; states are first allocated at the first step.
Dynamic: the saved activations of the micro-batches in flight, the largest transient, and the buffers of communicators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..search_spaces.groups import DIMENSIONS, groups
from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SHARDINGS, Floats, LayoutTable, Problem
from .layers import Pieces, shard_group
from .operators import BF16

ZERO1, ZERO2, ZERO3, HSDP = (SHARDINGS.index(name) for name in ("zero1", "zero2", "zero3", "hsdp"))
GIB = float(2**30)


@dataclass(frozen=True)
class StaticRates:
    """Bytes that one parameter on a rank costs, by term, for dense and for expert weights; all (n,)."""

    weights: tuple[Floats, Floats]
    gradients: tuple[Floats, Floats]
    optimizer: tuple[Floats, Floats]
    host: tuple[Floats, Floats]  # of the offloaded optimizer states, in the host's memory

    def total(self, which: int) -> Floats:
        return np.asarray(self.weights[which] + self.gradients[which] + self.optimizer[which])


def static_rates(problem: Problem, table: LayoutTable) -> StaticRates:
    """Bytes per parameter: 2 weight, gradient_bytes, optimizer_bytes of the stack, over the shards of each (arXiv 1910.02054, 3).

    Dense states are spread over dp·cp, expert states over edp; ZeRO-1 shards the states, ZeRO-2 gradients too, ZeRO-3 weights too.
    """
    shards = (shard_group(table).size.astype(np.float64), table.edp.astype(np.float64))
    stage = np.minimum(table.sharding, ZERO3)
    gradient, states = float(problem.stack.gradient_bytes), problem.stack.optimizer_bytes
    resident = 1.0 - table.optimizer_offload

    def over(count: Floats, from_stage: int, size: float) -> Floats:
        return np.where(stage >= from_stage, size / count, size)

    return StaticRates(
        weights=(over(shards[0], ZERO3, BF16), over(shards[1], ZERO3, BF16)),
        gradients=(over(shards[0], ZERO2, gradient), over(shards[1], ZERO2, gradient)),
        optimizer=(over(shards[0], ZERO1, states) * resident, over(shards[1], ZERO1, states) * resident),
        host=(over(shards[0], ZERO1, states) * table.optimizer_offload, over(shards[1], ZERO1, states) * table.optimizer_offload),
    )


def transient_bytes(pieces: Pieces, table: LayoutTable, last: bool) -> Floats:
    """The largest short-lived block of a stage, (n,).

    Backward holds the gradient of the layer's largest tensor and, under full recompute, the layer's own activations again; the
    last stage holds the logits instead if they are larger; a MoE layer holds its send and receive buffers. FSDP adds two gathered
    units, one at work and one prefetched, and the whole gradient of one, which ZeRO-2 has too.
    """
    layers = [pieces.pieces[name] for name in pieces.names]
    full = (table.recompute_mode == FULL_BLOCK) | (table.recompute_mode == FULL_UNIFORM)
    depth = np.where(table.recompute_mode == FULL_UNIFORM, table.recompute_layers, 1)
    again = np.max([piece.saved_bytes - piece.recomputed_bytes for piece in layers], axis=0)
    working = np.where(full, again * depth, again) + pieces.largest_saved_bytes + pieces.dispatch_bytes
    if last:
        working = np.maximum(working, pieces.logits_bytes)
    units = [*layers, pieces.pieces["head"]] if last else layers
    unit = BF16 * np.max([piece.dense_weights + piece.expert_weights for piece in units], axis=0)
    return np.asarray(working + unit * np.where(table.sharding >= ZERO3, 3.0, np.where(table.sharding == ZERO2, 1.0, 0.0)))


def verdict(peak: float, limit: float, band: float) -> Literal["fits", "unsure", "oom"]:
    """Whether a peak fits under a limit, both in one unit; within the relative `band` of the limit nobody knows."""
    if abs(peak / limit - 1.0) <= band:
        return "unsure"
    return "fits" if peak < limit else "oom"


def communicator_count(table: LayoutTable) -> Floats:
    """Communicators that a rank belongs to: one per dimension of more than one rank, (n,)."""
    counts = [(groups(table, d).size > 1).astype(np.float64) for d in DIMENSIONS]
    return np.asarray(np.sum(counts, axis=0))

"""What each stage holds at its peak, by term, per device.

Static: weights, gradients and optimizer states, sharded as the layout says; states are first allocated at the first step.
Dynamic: the saved activations of the micro-batches in flight, the largest transient, and the buffers of communicators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..search_spaces.groups import DIMENSIONS, groups
from ..search_spaces.layout import FULL_UNIFORM, Floats, Ints, LayoutTable, Problem, sharding_as_run
from ..search_spaces.quantities import free_bytes
from ..search_spaces.stack import Stack
from ..search_spaces.workload import MEMORY_BAND
from .operators import BF16
from .pieces import Pieces
from .sharding import ZERO1, ZERO2, ZERO3, gathered_stages, shard_group, waiting_gradients

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

    def take(self, rows: npt.NDArray[np.intp] | Ints) -> StaticRates:
        """The given rows."""
        pairs = (getattr(self, name) for name in StaticRates.__dataclass_fields__)
        return StaticRates(*((dense[rows], expert[rows]) for dense, expert in pairs))


def static_rates(problem: Problem, table: LayoutTable) -> StaticRates:
    """Bytes per parameter: 2 weight, gradient_bytes, optimizer_bytes of the stack, over the shards of each (arXiv 1910.02054, 3).

    Dense states are spread over dp·cp, expert states over edp; ZeRO-1 shards the states, ZeRO-2 gradients too, ZeRO-3 weights too.
    Some stacks keep a weight's casts to a lower precision beside it, some a gradient in the compute dtype beside the accumulated
    one, some accumulate none in a single micro-batch; some FSDP ones accumulate whole gradients over micro-batches, and leave a
    pipeline's weights gathered.
    """
    shards = (shard_group(table).size.astype(np.float64), table.edp.astype(np.float64))
    stage = np.minimum(sharding_as_run(problem.stack, table.sharding, table.pp), ZERO3)
    gradient, states = float(problem.stack.gradient_bytes), problem.stack.optimizer_bytes
    footprint = problem.stack.footprint
    resident = 1.0 - table.optimizer_offload
    stepping = states + footprint.step_gradient_bytes
    beside = np.where(stage >= ZERO2, 0.0, footprint.compute_gradient_bytes)
    whole = waiting_gradients(problem.stack, table) & (table.num_microbatches > 1)
    waiting = footprint.unsharded_gradient_bytes or problem.stack.sent_gradient_bytes
    cast = footprint.cached_weight_bytes.get(problem.workload.precision, 0.0)
    beside_weight = np.where(gathered_stages(problem.stack, table), BF16, 0.0) + cast
    released = footprint.released_gradients & (table.num_microbatches == 1) & (table.pp == 1)
    gradients_from = np.where(released, ZERO1, ZERO2)

    def over(count: Floats, from_stage: int | Ints, size: float) -> Floats:
        return np.where(stage >= from_stage, size / count, size)

    def gradients(count: Floats) -> Floats:
        return np.where(whole, waiting, over(count, gradients_from, gradient) + beside)

    return StaticRates(
        weights=(over(shards[0], ZERO3, BF16) + beside_weight, over(shards[1], ZERO3, BF16) + beside_weight),
        gradients=(gradients(shards[0]), gradients(shards[1])),
        optimizer=(over(shards[0], ZERO1, stepping) * resident, over(shards[1], ZERO1, stepping) * resident),
        host=(over(shards[0], ZERO1, states) * table.optimizer_offload, over(shards[1], ZERO1, states) * table.optimizer_offload),
    )


def transient_bytes(pieces: Pieces, table: LayoutTable, stack: Stack, last: bool) -> Floats:
    """The largest short-lived block of a stage, (n,), and what a stack keeps beside it whatever the stage holds.

    Backward holds the gradient of the layer's largest tensor, under full recompute the layer's own activations again, and of what
    is offloaded the layer's part: copies keep pace with passes, so that one layer's has yet to leave or is back in time. The last
    stage holds the logits instead if they are larger; a MoE layer holds its send and receive buffers. FSDP adds two gathered units,
    one at work and one prefetched, and the whole gradient of one, which ZeRO-2 has too. Where its root unit holds the embedding and
    the head, it stays gathered and the layers' units come and go beside the rest.
    """
    layers = [pieces.pieces[name] for name in pieces.names]
    depth = np.where(table.recompute_mode == FULL_UNIFORM, table.recompute_layers, 1)
    in_work = depth * np.max([piece.working_bytes for piece in layers], axis=0)
    working = in_work + pieces.largest_saved_bytes + pieces.dispatch_bytes
    logits = pieces.logits_bytes + pieces.pieces["head"].working_bytes
    head, embedding = (BF16 * pieces.pieces[name].dense_weights for name in ("head", "embedding"))
    units = [BF16 * (piece.dense_weights + piece.expert_weights) for piece in layers]
    footprint, sharding = stack.footprint, sharding_as_run(stack, table.sharding, table.pp)
    gathered = np.where((table.pp > 1) & footprint.gathered_stages, 1.0, 3.0)
    copies = np.where(sharding >= ZERO3, gathered, np.where(sharding == ZERO2, 1.0, 0.0))
    if footprint.root_unit:
        working = working + np.max(units, axis=0) * copies
        root = np.where(sharding >= ZERO3, (np.where(table.pp == 1, embedding, 0.0) + head) if last else embedding, 0.0)
        at_loss = logits + (0.0 if footprint.root_resharded else root)
        held = np.maximum(working + root, at_loss) if last else working + root
    else:
        unit = np.max([*units, head] if last else units, axis=0)
        held = (np.maximum(working, logits) if last else working) + unit * copies
    buffers = pieces.gradient_buffer_bytes + (head if last and footprint.gradient_buffers else 0.0)
    return np.asarray(held + buffers)


def verdict(peak: float, free: float) -> Literal["fits", "unsure", "oom"]:
    """Whether a peak fits into a device's free memory, both in one unit; within MEMORY_BAND of it nobody knows."""
    if peak <= free * (1.0 - MEMORY_BAND):
        return "fits"
    return "oom" if peak > free * (1.0 + MEMORY_BAND) else "unsure"


def runs_out(problem: Problem, peak_bytes: float) -> bool:
    """The best guess whether a run with this peak runs out of memory: its allocator reserves more than it hands out."""
    return peak_bytes * problem.stack.reserved_over_allocated.value > free_bytes(problem.cluster)


def communicator_count(table: LayoutTable) -> Floats:
    """Communicators that a rank belongs to: one per dimension of more than one rank, (n,)."""
    counts = [(groups(table, d).size > 1).astype(np.float64) for d in DIMENSIONS]
    return np.asarray(np.sum(counts, axis=0))

"""A piece of the model under the recompute, sharding and offload of every row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.groups import groups
from ..search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Bools, Floats, Ints, LayoutTable, Problem
from .compute import Kernels
from .lending import lends, most_lent
from .loads import recompute_depths
from .network import Network
from .operators import BF16
from .pieces import COMPUTE, DP, ENDS, EP, HOST, OFFLOAD, Piece, Whole
from .sharding import ZERO2, copy_groups, exchanges, shard_group

LEAST_RESIDENT = 1e-9
"""Share of the activations that stays on the device where all are offloaded: the rest follows from it by division."""


@dataclass(frozen=True)
class RowPieces:
    """What rows make of the pieces of one problem's model, of which `blocks` are layers."""

    problem: Problem
    network: Network
    kernels: Kernels
    blocks: int

    def piece(self, name: str, whole: Whole, table: LayoutTable, place: Ints) -> Piece:
        """A piece under the recompute and sharding of every row."""
        forward, backward = whole.forward_s[:, place], whole.backward_s[:, place]
        recompute = np.zeros_like(forward)
        apart = np.where(table.recompute_mode == FULL_UNIFORM, np.maximum(table.recompute_layers, 1), 1)
        kept = whole.input_bytes[place] / apart  # checkpoints lie that many layers apart
        full = (table.recompute_mode == FULL_BLOCK) | (table.recompute_mode == FULL_UNIFORM)
        selective = table.recompute_mode == SELECTIVE
        backward += np.where(full, whole.redone_s[:, place], 0.0)
        for part in whole.parts:
            repeated = full | (selective & ((part.modules & table.recompute_modules) != 0))
            recompute += np.where(repeated, part.forward_s[:, place], 0.0)
            kept += np.where(repeated, 0.0, part.saved_bytes[place])
        dense, expert = whole.dense_weights[place], whole.expert_weights[place]
        outside = whole.outside_s[0][place], whole.outside_s[1][place]
        if (table.sharding >= ZERO2).any():
            root = name in ENDS and self.problem.stack.footprint.root_unit
            self._gather(forward, backward, recompute, (dense, expert), outside, table, root)
        forward_s, backward_s, wait_s = (floor[place] for floor in whole.floors_s)
        forward[HOST] = np.maximum(forward_s - forward.sum(axis=0), wait_s)
        backward[HOST] = np.maximum(backward_s - backward.sum(axis=0), 0.0)
        recompute[HOST] = np.where(full, np.maximum(forward_s - recompute.sum(axis=0), wait_s), 0.0)
        saved = (whole.input_bytes + whole.saved_bytes)[place]
        kept = saved if name in ENDS else kept  # only layers let go of what they do again
        leaves = self._leaving(table)
        resident = resident_share(leaves)
        working = saved - kept * resident
        if leaves.any():
            self._move(forward, backward, recompute, (leaves * saved, leaves * kept), table, name in ENDS)
            if not lends(self.problem):  # what stages lend is taken off by stage
                saved, kept = saved * resident, kept * resident
        return Piece(forward, backward, recompute, saved, kept, working, dense, expert, outside)

    def _leaving(self, table: LayoutTable) -> Floats:
        """Share of what is saved that leaves the device, (n,); where stages lend it, that of the stage which lends most."""
        return most_lent(table) if lends(self.problem) else table.activation_offload

    def _move(
        self, forward: Floats, backward: Floats, recompute: Floats, moved: tuple[Floats, Floats], table: LayoutTable, end: bool
    ) -> None:
        """Adds what activations take to leave and to come back beyond the passes beside which they do.

        Of what is `moved` of all that a piece saves and of what it keeps under recompute, a redone layer moves the latter, and
        brings it back beside its recompute too. Where a depth leaves some layers of a chunk as they are, passes are those of such
        a layer and recompute is less by what the others do not move; it stays above nothing, since bounds take it to.
        """
        saved, kept = moved
        as_it_is = end | ((table.recompute_mode == FULL_BLOCK) & (recompute_depths(table) < self.blocks))
        out_s, back_s = self._move_s(saved, forward), self._move_s(saved, backward)
        redone_out_s, redone_back_s = self._move_s(kept, forward), self._move_s(kept, backward + recompute)
        less_s = np.minimum(out_s + back_s - redone_out_s - redone_back_s, recompute.sum(axis=0))
        forward[OFFLOAD] = np.where(as_it_is, out_s, redone_out_s)
        backward[OFFLOAD] = np.where(as_it_is, back_s, redone_back_s)
        recompute[OFFLOAD] = np.where(as_it_is, -less_s, 0.0)

    def _move_s(self, moved_bytes: Floats, beside: Floats) -> Floats:
        """Seconds that activations take to leave or come back beyond the pass beside which they do, (n,).

        Over the host's link they move beside all of it; a pool and other devices share the links of the scale-up network with
        whatever the pass sends, which leaves its compute and waiting.
        """
        to = self.problem.workload.offload_to
        if to == "peers":
            move_s = self.network.p2p_s(np.full(moved_bytes.shape, self.network.supernode), moved_bytes)
        else:
            move_s = moved_bytes / self.problem.cluster.tier(to).bandwidth_bytes_per_s.value
        free_s = beside.sum(axis=0) if to == "host" else beside[COMPUTE] + beside[HOST]
        return np.asarray(np.maximum(move_s - free_s, 0.0))

    def _gather(
        self,
        forward: Floats,
        backward: Floats,
        recompute: Floats,
        weights: tuple[Floats, Floats],
        busy: tuple[Floats, Floats],
        table: LayoutTable,
        root: bool,
    ) -> None:
        """Adds what ZeRO-2/3 and HSDP send per layer and micro-batch beyond what hides behind the layer's own pass.

        ZeRO-3 gathers a layer's weights forward and again backward and scatters its gradients; ZeRO-2 only scatters (arXiv
        1910.02054 section 7), but for FSDP's form of it, which gathers forward. HSDP does as ZeRO-3 within shards of K ranks. What
        waits for the step's end the states carry. Gradients are cast into the buffer that is scattered. The `root` unit of an FSDP
        model is gathered before anything else runs and scattered after everything has: nothing hides it. It is gathered again for
        the backward only where it was let go. Of a recompute only its compute hides them: the host may set the pace of the rest.
        `busy`, for how long links that data parallelism uses are taken, forward and backward, grows by the gathers.
        """
        stack = self.problem.stack
        share, sent, often = 0.0 if root else stack.overlap.fsdp, stack.sent_gradient_bytes, exchanges(stack, table)
        again = 0.0 if root and not stack.footprint.root_resharded else 1.0
        own = (busy[0] + busy[1]) > 0  # the layer's own messages leave the supernode too, and are in the way
        for parameters, group in ((weights[0], shard_group(table)), (weights[1], groups(table, "edp"))):
            at = self.network.crossing(group)
            gather_s = np.where(often.gathers_each, self.network.all_gather_s(at, stack.gathered_weight_bytes * parameters), 0.0)
            again_s = np.where(often.gathers_again, again * gather_s, 0.0)
            back_s = again_s + np.where(often.scatters_each, self.network.reduce_scatter_s(at, sent * parameters), 0.0)
            if parameters is weights[0] and often.copies_each.any():
                between_s = self.network.all_reduce_s(self.network.crossing(copy_groups(table)), sent * parameters / group.size)
                back_s = back_s + np.where(often.copies_each, between_s, 0.0)
            backward[COMPUTE] += np.where(often.scatters_each, self.kernels.elementwise_s((BF16 + sent) * parameters), 0.0)
            apart = (at.outermost > self.network.supernode) & ~own
            forward[DP] += _exposed(gather_s, share, _beside(forward, apart))
            backward[DP] += _exposed(back_s, share, _beside(backward, apart) + recompute[COMPUTE])
            busy[0][:] += gather_s
            busy[1][:] += again_s


def resident_share(offloaded: Floats) -> Floats:
    """Share of the saved activations that stays on the device."""
    return np.asarray(np.maximum(1.0 - offloaded, LEAST_RESIDENT))


def _beside(passing: Floats, apart: Bools) -> Floats:
    """Seconds of a pass (components, n) behind which exchanges of weights hide, (n,): its compute, and its own messages where these
    travel `apart` from them."""
    return np.asarray(np.where(apart, passing[: EP + 1].sum(axis=0), passing[COMPUTE]))


def _exposed(time_s: Floats, share: float, compute_s: Floats) -> Floats:
    return np.asarray(time_s - np.minimum(time_s * share, compute_s))

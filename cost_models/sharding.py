"""Ranks that share a weight's states, and how often in a step they gather it, scatter its gradients and reduce between copies.

ZeRO-2 and up exchange in every micro-batch unless the framework waits: PyTorch's FSDP under no_sync, and under a pipeline, keeps
whole gradients until the last micro-batch; a pipeline's weights stay gathered from the first. FSDP's form of ZeRO-2 keeps weights
from the forward to the backward of one micro-batch, others' from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.groups import Groups, Placement, Sizes, groups
from ..search_spaces.layout import SHARDINGS, Bools, Floats, Ints, LayoutTable, sharding_as_run
from ..search_spaces.stack import Stack

ZERO1, ZERO2, ZERO3, HSDP = (SHARDINGS.index(name) for name in ("zero1", "zero2", "zero3", "hsdp"))


@dataclass(frozen=True)
class Exchanges:
    """What the ranks of each row exchange in every micro-batch, and what once per step, (n,) each."""

    gathers_each: Bools  # weights, before the forward
    gathers_again: Bools  # and before the backward
    gathers_once: Bools
    scatters_each: Bools  # gradients, after the backward
    scatters_once: Bools
    copies_each: Bools  # HSDP: a shard's gradients between the copies of its group
    copies_once: Bools


def exchanges(stack: Stack, table: LayoutTable) -> Exchanges:
    """The exchanges of every row; without sharding gradients are all-reduced once, which is none of these."""
    within, again = table.sharding >= ZERO2, table.sharding >= ZERO3
    weights = within if stack.zero2_gathers == "every micro-batch" else again
    once = (table.pp == 1) | (stack.pipeline_exchanges == "once")
    waits, stays = waiting_gradients(stack, table) & once, gathered_stages(stack, table) & once
    copies, each = table.sharding == HSDP, ~waits & (stack.copies_reduced == "every micro-batch")
    return Exchanges(
        gathers_each=weights & ~stays,
        gathers_again=again & ~stays,
        gathers_once=(table.sharding == ZERO1) | (within & ~weights) | stays,
        scatters_each=within & ~waits,
        scatters_once=(table.sharding == ZERO1) | waits,
        copies_each=copies & each,
        copies_once=copies & ~each,
    )


def reduces_gradients(stack: Stack, table: LayoutTable) -> Bools:
    """Rows whose ranks all-reduce gradients, though under ZeRO-1 each needs its shard alone, (n,)."""
    return np.asarray((table.sharding == 0) | ((table.sharding == ZERO1) & (stack.zero1_reduction == "all_reduce")))


def waiting_gradients(stack: Stack, table: LayoutTable) -> Bools:
    """Rows whose ranks keep whole gradients until the last micro-batch, (n,)."""
    always = stack.footprint.unsharded_gradient_bytes > 0
    return np.asarray((table.sharding >= ZERO2) & (always | gathered_stages(stack, table)))


def gathered_stages(stack: Stack, table: LayoutTable) -> Bools:
    """Rows whose stages keep their weights gathered from the first micro-batch to the last, (n,)."""
    sharded = sharding_as_run(stack, table.sharding, table.pp) >= ZERO3
    return np.asarray(sharded & (table.pp > 1) & stack.footprint.gathered_stages)


@dataclass(frozen=True)
class ShardGroups(Groups):
    """Groups over cp and dp: runs of the `inner` ranks, one run for each of the `outer`.

    Where another dimension lies between the two the runs are further apart than their length; then `stride` is only the mean step.
    """

    inner: Groups
    outer: Groups

    def units(self, unit_size: int, devices: int, around: Sizes = ()) -> Floats:
        """As of any group, where the runs join; else those of one run at each of its places."""
        each = self.inner.units(unit_size, devices, around) * self.outer.units(unit_size, devices, around)
        nested = np.minimum(np.minimum(each, self.size), -(-devices // unit_size))
        return np.where(self._apart, nested, super().units(unit_size, devices, around))

    def least(self, unit_size: int, devices: int, around: Sizes = ()) -> Floats:
        """As of any group, where the runs join; else as few of a run as any unit has, of as few runs as any has of those."""
        each = self.inner.least(unit_size, devices, around) * self.outer.least(unit_size, devices, around)
        return np.where(self._apart, np.minimum(each, self.size), super().least(unit_size, devices, around))

    def placement(self, unit_size: int, devices: Ints, around: Sizes = ()) -> Placement:
        """As of any group, where the runs join; else as if the runs lay on the units independently of their places there."""
        joined, inner, outer = (
            one.placement(unit_size, devices, around) for one in (Groups(self.size, self.stride), self.inner, self.outer)
        )
        units = np.minimum(np.minimum(inner.units * outer.units, self.size), -(-devices // unit_size))
        straddling = 1.0 - (1.0 - inner.straddling) * (1.0 - outer.straddling)
        found = (units, np.minimum(inner.mates * outer.mates, self.size), straddling)
        return Placement(
            *(np.where(self._apart, a, b) for a, b in zip(found, (joined.units, joined.mates, joined.straddling), strict=True))
        )

    @property
    def _apart(self) -> Bools:
        return np.asarray(self.outer.stride > self.inner.stride * self.inner.size)


def shard_group(table: LayoutTable) -> ShardGroups:
    """Ranks that share a dense weight's optimizer states: dp·cp of them, tp apart; under HSDP the inner K."""
    cp, dp = groups(table, "cp"), groups(table, "dp")
    size = np.where(table.sharding == HSDP, np.minimum(np.maximum(table.hsdp, 1), table.cp * table.dp), table.cp * table.dp)
    length, near, far = cp.size, cp.stride, dp.stride
    if (near > far).any():
        length, near, far = np.where(near > far, [dp.size, far, near], [length, near, far])
    spread = far > near * length
    stride = np.where(spread, np.maximum(near, far // length), near)
    inner = np.minimum(size, length)
    return ShardGroups(size, stride, Groups(inner, near), Groups(size // inner, far))


def copy_groups(table: LayoutTable) -> Groups:
    """Ranks that hold the same shard of a dense weight: one of each shard group (HSDP); alone elsewhere."""
    group = shard_group(table)
    return Groups(np.maximum(table.cp * table.dp // group.size, 1), group.stride * group.size)

"""What ranks keep of a parameter and exchange for it once per step: memory, data-parallel traffic, optimizer, offload."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..search_spaces.cluster import HostLink
from ..search_spaces.groups import groups
from ..search_spaces.layout import Floats, Ints, LayoutTable, Problem
from .memory import StaticRates, communicator_count, static_rates
from .network import Network
from .operators import BF16, FP32
from .profile import Profile
from .sharding import ZERO1, copy_groups, exchanges, reduces_gradients, shard_group

Pair = tuple[Floats, Floats]
"""Figures for dense and for expert weights, (n,) each."""


class States:
    """The states of the rows of a table, one row for each distinct combination; `dense` and `expert` (n,) are the parameters of
    the whole model on the ranks of all stages. `*_s` pairs are seconds per parameter on the rank.
    """

    def __init__(
        self, problem: Problem, network: Network, profile: Profile, table: LayoutTable, dense: Floats, expert: Floats
    ) -> None:
        self._problem, self._network, self._profile = problem, network, profile
        self._table, self._weights = table, (dense, expert)

    @staticmethod
    def columns(table: LayoutTable) -> list[Ints | Floats]:
        """What states depend on."""
        several = (table.num_microbatches > 1).astype(np.int64)
        names = ("tp", "cp", "pp", "dp", "ep", "etp", "sharding", "hsdp", "optimizer_offload", "rank_order")
        return [*(getattr(table, name) for name in names), several]

    @cached_property
    def rates(self) -> StaticRates:
        """Bytes that one parameter on the rank costs."""
        return static_rates(self._problem, self._table)

    @cached_property
    def communicator_bytes(self) -> Floats:
        """Buffers of the communicators that a rank belongs to, (n,)."""
        return np.asarray(communicator_count(self._table) * self._problem.cluster.communicator_bytes.value)

    @cached_property
    def outermost(self) -> Ints:
        """Index of the outermost level between neighbouring stages, (n,)."""
        return self._network.crossing(groups(self._table, "pp")).outermost

    @property
    def gradient_s(self) -> Pair:
        """To reduce gradients once per step."""
        return self._data_parallel_s[:2]

    @property
    def parameter_s(self) -> Pair:
        """To gather weights once per step."""
        return self._data_parallel_s[2:]

    @property
    def optimizer_s(self) -> Pair:
        """To step the states that lie on the device."""
        return self._optimizer_s[:2]

    @property
    def offload_s(self) -> Pair:
        """To step those that lie on the host."""
        return self._optimizer_s[2:]

    @cached_property
    def _data_parallel_s(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Gradients, then parameters; at the size of a mean stage, since a message's rate depends on it.

        ZeRO-1 scatters gradients (or all-reduces them, as the stack does) and gathers weights, ZeRO-2 gathers weights, without
        sharding gradients are all-reduced; what ZeRO-2 and up send per micro-batch the pieces carry, what waits for the last is
        here. HSDP all-reduces dense gradients between its shards once more.
        """
        stack, network, table = self._problem.stack, self._network, self._table
        often, gradients, parameters = exchanges(stack, table), [], []
        dense, expert = self._weights
        for weights, group in ((dense, shard_group(table)), (expert, groups(table, "edp"))):
            mean = np.maximum(weights / table.pp, 1.0)
            sent_bytes, at = stack.sent_gradient_bytes * mean, network.crossing(group)
            scatter, reduce = network.reduce_scatter_s(at, sent_bytes), network.all_reduce_s(at, sent_bytes)
            once = np.where(reduces_gradients(stack, table), reduce, np.where(often.scatters_once, scatter, 0.0))
            if weights is dense and often.copies_once.any():
                between = network.all_reduce_s(network.crossing(copy_groups(table)), sent_bytes / group.size)
                once = once + np.where(often.copies_once, between, 0.0)
            gradients.append(once / mean)
            parameters.append(np.where(often.gathers_once, network.all_gather_s(at, BF16 * mean), 0.0) / mean)
        return gradients[0], gradients[1], parameters[0], parameters[1]

    @cached_property
    def _optimizer_s(self) -> tuple[Floats, Floats, Floats, Floats]:
        """On the device, then on the host: every state read and written once, gradient read, weight written.

        An offloaded fraction that is stepped on the host sends its gradients there in FP32, has its states updated at the rate of
        the host's memory and brings its weights back; one stepped on the device brings its states in and takes them out again, as
        those in a pool always do: no processor steps them there.
        Part of the copies hides behind the stepping of other pieces; the stepping itself does not.
        """
        stack, cluster, table = self._problem.stack, self._problem.cluster, self._table
        memory = cluster.accelerator.memory_bandwidth_bytes_per_s.value * self._profile.memory_efficiency.value
        touched = 2.0 * stack.optimizer_bytes + stack.gradient_bytes + BF16
        tier = cluster.tier(self._problem.workload.offload_to)
        there = tier.memory_bandwidth_bytes_per_s.value if isinstance(tier, HostLink) and self._on_host else memory
        copied_s = sum(self._copied) / tier.bandwidth_bytes_per_s.value * (1.0 - stack.overlap.offload)
        here = [share * touched * (1.0 - table.optimizer_offload) / memory for share in self._shares]
        away = [share * table.optimizer_offload * (copied_s + touched / there) for share in self._shares]
        return here[0], here[1], away[0], away[1]

    @property
    def offloaded_bytes(self) -> Pair:
        """What of each parameter's states leaves the device in a step, bytes per parameter."""
        dense, expert = (share * self._table.optimizer_offload * self._copied[0] for share in self._shares)
        return dense, expert

    @property
    def _on_host(self) -> bool:
        """Whether a processor steps the offloaded states where they lie."""
        return self._problem.workload.offload_to == "host" and self._problem.stack.offloaded_step == "host"

    @property
    def _copied(self) -> tuple[float, float]:
        """Bytes per parameter that an offloaded fraction sends from the device in a step, and that come back."""
        states = self._problem.stack.optimizer_bytes
        return (FP32, BF16) if self._on_host else (states, states)

    @property
    def _shares(self) -> Pair:
        """Share of a parameter's states that a rank keeps."""
        sizes = (shard_group(self._table).size, self._table.edp)
        dense, expert = (np.where(self._table.sharding >= ZERO1, 1.0 / size, 1.0) for size in sizes)
        return dense, expert

"""What ranks keep of a parameter and exchange for it once per step: memory, data-parallel traffic, optimizer, offload."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..search_spaces.cluster import HostLink
from ..search_spaces.groups import groups
from ..search_spaces.layout import Floats, Ints, LayoutTable, Problem
from ..search_spaces.libraries import megatron_core
from ..search_spaces.row_keys import distinct_rows
from .crossing import Crossing
from .memory import StaticRates, communicator_count, static_rates
from .network import Network
from .operators import BF16, FP32
from .profile import Profile
from .sharding import ZERO1, copy_groups, exchanges, reduces_gradients, shard_group

Pair = tuple[Floats, Floats]
"""Figures for dense and for expert weights, (n,) each."""
Quad = tuple[Floats, Floats, Floats, Floats]
"""Such a pair of gradients, then one of parameters."""


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
        return self._stages.outermost

    @cached_property
    def edges(self) -> Floats:
        """Pairs of neighbouring stages that each level lies between, (levels, n)."""
        return self._stages.edges

    @cached_property
    def chain(self) -> Ints:
        """A number for every row, equal where pairs of neighbouring stages lie alike, (n,)."""
        return distinct_rows(list(self.edges))[1]

    @cached_property
    def _stages(self) -> Crossing:
        return self._network.crossing(groups(self._table, "pp"))

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

    @property
    def own_gradient_tail_s(self) -> Pair:
        """The last bucket of gradients at the framework's own size: no pass is left to hide it."""
        return self._ends_s[0][:2]

    @property
    def own_parameter_head_s(self) -> Pair:
        """The first bucket of weights at that size, which the first pass waits for."""
        return self._ends_s[0][2:]

    @property
    def gradient_tail_s(self) -> Pair:
        """The last bucket of gradients at the size that the stack names."""
        return self._ends_s[1][:2]

    @property
    def parameter_head_s(self) -> Pair:
        """The first bucket of weights at that size."""
        return self._ends_s[1][2:]

    @cached_property
    def _data_parallel_s(self) -> Quad:
        """Gradients, then parameters; at the size of a mean stage, since a message's rate depends on it.

        ZeRO-1 scatters gradients (or all-reduces them, as the stack does) and gathers weights, ZeRO-2 gathers weights, without
        sharding gradients are all-reduced; what ZeRO-2 and up send per micro-batch the pieces carry, what waits for the last is
        here. HSDP all-reduces dense gradients between its shards once more.
        One message stands for buckets of the framework's own size, with which the stack's shares of hidden traffic were found; of
        another size all of them take as much longer as that many messages take longer than the framework's own; those beyond its
        number wait for a ring over all ranks each, as NCCL scatters and gathers.
        """
        whole_s, mean = self._messages_s(self._mean_stage), self._mean_stage
        if self._problem.stack.gradient_bucket is not None:
            own, told = self._buckets
            few_s, many_s = self._messages_s(_over(mean, own)), self._messages_s(_over(mean, told))
            counts = (*own, *own), (*told, *told)
            each = zip(whole_s, *counts, few_s, many_s, self._ring_s, strict=True)
            a, b, c, d = (
                one + many * told_s - few * own_s + np.maximum(many - few, 0.0) * ring_s
                for one, few, many, own_s, told_s, ring_s in each
            )
            whole_s = a, b, c, d
        return _per_parameter(whole_s, mean)

    @cached_property
    def _ends_s(self) -> tuple[Quad, Quad]:
        """One bucket of the framework's own size, and one of that which the stack names."""
        mean, (own, told) = self._mean_stage, self._buckets
        few_s, many_s = self._messages_s(_over(mean, own)), self._messages_s(_over(mean, told))
        return _per_parameter(few_s, mean), _per_parameter(many_s, mean)

    @property
    def _ring_s(self) -> Quad:
        """Seconds that one more message waits where a ring over all ranks scatters gradients, and where one gathers weights.

        An all-reduce goes up and down trees, as it is priced.
        """
        network, table = self._network, self._table
        often, (dense, expert) = exchanges(self._problem.stack, table), (shard_group(table), groups(table, "edp"))
        scatters = often.scatters_once & ~reduces_gradients(self._problem.stack, table)
        at = network.crossing(dense), network.crossing(expert)
        a, b = (np.where(scatters, network.flat_ring_s("reduce_scatter", each), 0.0) for each in at)
        c, d = (np.where(often.gathers_once, network.flat_ring_s("all_gather", each), 0.0) for each in at)
        return a, b, c, d

    @cached_property
    def _mean_stage(self) -> Pair:
        """Parameters of a mean stage on the rank."""
        dense, expert = (np.maximum(weights / self._table.pp, 1.0) for weights in self._weights)
        return dense, expert

    @property
    def _buckets(self) -> tuple[Pair, Pair]:
        """How many buckets a mean stage has of the framework's own size, and of that which the stack names.

        Megatron-Core has buckets only in the first chunk of the first stage, which ends last; all stages are priced alike.
        """
        stack, (dense, expert) = self._problem.stack, self._mean_stage
        usual = megatron_core().gradient_buckets
        own = np.maximum(usual.least, usual.each_replica * self._table.dp)
        told = np.full_like(own, stack.gradient_bucket) if stack.sends_buckets else own
        return (np.ceil(dense / own), np.ceil(expert / own)), (np.ceil(dense / told), np.ceil(expert / told))

    def _messages_s(self, parameters: Pair) -> Quad:
        """Seconds to reduce gradients of so many parameters in one message, and to gather their weights in one."""
        stack, network, table = self._problem.stack, self._network, self._table
        often, reduced, gathered = exchanges(stack, table), [], []
        for size, group, dense in ((parameters[0], shard_group(table), True), (parameters[1], groups(table, "edp"), False)):
            sent_bytes, at = stack.sent_gradient_bytes * size, network.crossing(group)
            scatter, reduce = network.reduce_scatter_s(at, sent_bytes), network.all_reduce_s(at, sent_bytes)
            once = np.where(reduces_gradients(stack, table), reduce, np.where(often.scatters_once, scatter, 0.0))
            if dense and often.copies_once.any():
                between = network.all_reduce_s(network.crossing(copy_groups(table)), sent_bytes / group.size)
                once = once + np.where(often.copies_once, between, 0.0)
            reduced.append(once)
            gathered.append(np.where(often.gathers_once, network.all_gather_s(at, stack.gathered_weight_bytes * size), 0.0))
        return reduced[0], reduced[1], gathered[0], gathered[1]

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
        return self._problem.workload.offload_to != "pool" and self._problem.stack.offloaded_step == "host"

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


def _over(pair: Pair, counts: Pair) -> Pair:
    return pair[0] / counts[0], pair[1] / counts[1]


def _per_parameter(seconds: Quad, parameters: Pair) -> Quad:
    dense, expert = parameters
    return seconds[0] / dense, seconds[1] / expert, seconds[2] / dense, seconds[3] / expert

"""What one piece of the model costs a rank per micro-batch: every layer kind, the MTP layer, the embedding and the head.

A piece's cost depends on few columns (tp, cp, ep, etp, micro-batch, what is recomputed, how weights are gathered), so it is worked
out once per distinct combination and gathered by the rows that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.groups import Groups, groups
from ..search_spaces.layout import (
    FULL_BLOCK,
    FULL_UNIFORM,
    SELECTIVE,
    SHARDINGS,
    Floats,
    Ints,
    LayoutTable,
    Problem,
)
from ..search_spaces.model import MoeMlp, Tensor
from .compute import Kernels
from .network import Crossing, Network
from .operators import (
    BF16,
    Factors,
    Message,
    Operator,
    dispatch_buffer_bytes,
    embedding_operators,
    head_operators,
    layer_input_bytes,
    layer_operators,
    logits_bytes,
    mtp_operators,
)
from .profile import Profile

COMPONENTS = ("compute", "tp", "cp", "ep", "dp", "host")
COMPUTE, TP, CP, EP, DP, HOST = range(len(COMPONENTS))
_COMPONENT_OF = {"tp": TP, "cp": CP, "ep": EP, "etp": EP}
ZERO2, ZERO3, HSDP = (SHARDINGS.index(name) for name in ("zero2", "zero3", "hsdp"))
FP8_BYTES = 1.0
PERMUTED_AROUND_COLLECTIVE, PERMUTED_AROUND_KERNEL = 4.0, 2.0
"""Passes over the routed tokens that put them in order: before an all-to-all by rank and after it by expert, each read and written;
a fused dispatch takes tokens as they lie, and only what it delivers is spread to its experts."""
PIECE_COLUMNS = (
    "tp",
    "cp",
    "ep",
    "etp",
    "micro_batch",
    "sequence_parallel",
    "cp_type",
    "recompute_mode",
    "recompute_modules",
)


@dataclass(frozen=True)
class Piece:
    """Cost of one piece; times are (components, n) in seconds, bytes (n,).

    `recompute_s` and `recomputed_bytes` are for a layer under the row's recompute choice, `saved_bytes` for one that keeps
    everything. `gradient_s` is the part of backward_s that a FSDP reduction of gradients adds.
    """

    forward_s: Floats
    backward_s: Floats
    recompute_s: Floats
    saved_bytes: Floats
    recomputed_bytes: Floats
    dense_weights: Floats  # parameters on one rank, shared by its dp·cp group
    expert_weights: Floats  # parameters on one rank, shared by its edp group


@dataclass(frozen=True)
class Pieces:
    """Costs of all pieces for n factor rows; `blocks[i]` names the piece of block i (decoder layers, then MTP layers)."""

    pieces: dict[str, Piece]
    blocks: tuple[str, ...]
    layer_input_bytes: Floats
    logits_bytes: Floats
    dispatch_bytes: Floats
    largest_saved_bytes: Floats  # of one operator: its gradient is as large
    gradient_buffer_bytes: Floats  # stand-ins for the gradients of the layers' weights, one for each shape

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.blocks))


@dataclass(frozen=True)
class Sent:
    """One message of one piece: who sends it, how many bytes cross each level (levels, n), and how often."""

    dimension: str
    level_bytes: Floats
    forward: Floats
    backward: Floats
    modules: int


class LayerModel:
    """Prices the pieces of one problem's model on its cluster with its stack."""

    def __init__(self, problem: Problem, profile: Profile, network: Network) -> None:
        self.problem = problem
        self.model = problem.model
        self.network = network
        self.kernels = Kernels(problem.cluster.accelerator, profile, problem.stack, problem.workload.precision)
        slowdown = problem.cluster.compute_slowdown_beside_communication
        self._slowdown = slowdown.value if slowdown else 0.0
        mtp = self.model.mtp.layers if self.model.mtp else 0
        self.blocks: tuple[str, ...] = (*self.model.layer_kinds, *["mtp"] * mtp)
        self.heads = 1 + mtp  # every MTP layer runs the shared head and a loss of its own

    def factors(self, table: LayoutTable) -> Factors:
        """The columns that operators read, as floats."""
        workload, stack = self.problem.workload, self.problem.stack
        as_float = {name: getattr(table, name).astype(np.float64) for name in PIECE_COLUMNS[:6]}
        fp8 = workload.precision in ("fp8", "fp4")
        return Factors(
            **as_float,
            cp_type=table.cp_type,
            seq_len=float(workload.seq_len),
            linear_bytes=FP8_BYTES if fp8 else BF16,
            flash=stack.attention_kernel == "flash",
            eager=frozenset(stack.eager_kernels),
            fused_gate=stack.fused_gate,
            gathered_logits=stack.gathered_logits,
            imbalance=workload.expert_imbalance,
            permuted_copies=PERMUTED_AROUND_KERNEL if stack.moe_dispatcher == "flex" else PERMUTED_AROUND_COLLECTIVE,
            footprint=stack.footprint,
            fused_experts=stack.cuda_graphs,
        )

    def vocab_size(self, tp: Floats | Ints) -> Floats:
        """Vocabulary padded to a multiple of the stack's divisor times tp (Megatron's rule), (n,)."""
        unit = self.problem.stack.vocab_divisor * np.asarray(tp, dtype=np.float64)
        return np.ceil((self.problem.workload.vocab_size or self.model.vocab_size) / unit) * unit

    def pieces(self, table: LayoutTable) -> Pieces:
        """Costs of every piece for each row of `table`."""
        f = self.factors(table)
        crossings = {d: self.network.crossing(groups(table, d)) for d in ("tp", "cp", "ep", "etp")}
        priced: dict[str, Piece] = {}
        for name in dict.fromkeys(self.blocks):
            priced[name] = self._piece(name, table, f, crossings, self._floors(name, table, f))
        for name in ("embedding", "head"):
            priced[name] = self._piece(name, table, f, crossings, (f.zeros, f.zeros, f.zeros))
        moe_kinds = [kind for kind in self.model.kinds if isinstance(self.model.kinds[kind].mlp, MoeMlp)]
        buffers = [dispatch_buffer_bytes(self.model, kind, f) for kind in moe_kinds]
        return Pieces(
            priced,
            self.blocks,
            layer_input_bytes(self.model, f),
            logits_bytes(f, self.vocab_size(f.tp), self.heads),
            np.max(buffers, axis=0) if buffers else f.zeros,
            np.max([op.saved_bytes + f.zeros for name in set(self.blocks) for op in self.operators(name, f)], axis=0),
            self._gradient_buffer_bytes(table),
        )

    def _gradient_buffer_bytes(self, table: LayoutTable) -> Floats:
        """BF16 bytes of one weight of every shape that the layers hold, (n,): experts share theirs."""
        found: dict[tuple[str, int], Floats] = {}
        for name in dict.fromkeys(self.blocks) if self.problem.stack.footprint.gradient_buffers else ():
            kind = self.model.kinds[self.model.mtp.kind if name == "mtp" and self.model.mtp else name]
            for tensor in self.tensors(name):
                experts = kind.mlp.experts if isinstance(kind.mlp, MoeMlp) and tensor.sharding.startswith("expert") else 1
                held = tensor.numel_per_rank(table.tp, table.ep, table.etp)
                found[tensor.name, tensor.numel] = held if experts == 1 else held * table.ep / experts
        return np.asarray(BF16 * sum(found.values(), np.zeros(len(table))))

    def operators(self, name: str, f: Factors) -> list[Operator]:
        """Operators of a piece by name."""
        if name == "embedding":
            return embedding_operators(self.model, f)
        if name == "head":
            return head_operators(self.model, f, self.vocab_size(f.tp)) * self.heads
        return mtp_operators(self.model, f) if name == "mtp" else layer_operators(self.model, name, f)

    def operators_unpadded(self, name: str, f: Factors) -> list[Operator]:
        """The same without rows of padding in the vocabulary, for FLOP counts."""
        if name == "head":
            vocab = self.problem.workload.vocab_size or self.model.vocab_size
            return head_operators(self.model, f, vocab + f.zeros) * self.heads
        return self.operators(name, f)

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        """Weights of a piece by name."""
        if name == "embedding":
            return self.model.embedding_tensors()
        if name == "head":
            return self.model.head_tensors()
        return self.model.mtp_tensors() if name == "mtp" else self.model.layer_tensors(name)

    def sent(self, name: str, table: LayoutTable) -> list[Sent]:
        """Every message of a piece with the bytes that cross each level, for traffic: the mean rank's, whatever the imbalance."""
        f = replace(self.factors(table), imbalance=1.0)
        found = []
        for op in self.operators(name, f):
            for message in op.messages:
                at = self.network.crossing(groups(table, message.dimension))
                level_bytes, _ = self._time(message, at)
                times = (np.asarray(message.forward + f.zeros), np.asarray(message.backward + f.zeros))
                found.append(Sent(message.dimension, level_bytes, *times, op.modules))
        return found

    def _moe_mlp(self, name: str) -> MoeMlp | None:
        kind = self.model.mtp.kind if name == "mtp" and self.model.mtp else name
        mlp = self.model.kinds[kind].mlp
        return mlp if isinstance(mlp, MoeMlp) else None

    def _floors(self, name: str, table: LayoutTable, f: Factors) -> tuple[Floats, Floats, Floats]:
        """Host time of a layer's forward and backward pass, and how long the device waits for the host in forward, (n,) each.

        Its launches, those of each expert on the device, TP collectives, and the pipeline engine's. Tokens per expert are read
        by the host before it launches the experts: it has no work queued then, so the device waits however long its kernels take.
        """
        stack, mlp = self.problem.stack, self._moe_mlp(name)
        wait = f.zeros
        if mlp is None:
            floor_s = stack.host_floor_dense_s.value + f.zeros
        else:
            casts = stack.host_floor_casts.value if self.problem.workload.precision in ("fp8", "fp4") else 1.0
            floor_s = stack.host_floor_moe_s.value * stack.launched_moe_share * casts + f.zeros
            floor_s = floor_s + stack.host_floor_per_expert_s.value * mlp.experts / f.ep
            wait = stack.host_wait_moe_s.value + f.zeros
        each_s = stack.host_floor_per_collective_s.value
        engine_s = np.where(table.pp > 1, stack.host_floor_pipeline_s.value * f.tp, 0.0)
        forward, backward = floor_s + engine_s, floor_s + engine_s
        if np.any(each_s):
            spoken = [m for op in self.operators(name, f) for m in op.messages if m.dimension == "tp" and not m.hidden]
            for message in spoken:
                calls = np.where((f.tp > 1) & (message.bytes > 0), each_s, 0.0)
                forward, backward = forward + calls * message.forward, backward + calls * message.backward
        return forward, backward, wait

    def _piece(
        self, name: str, table: LayoutTable, f: Factors, at: dict[str, Crossing], floors: tuple[Floats, Floats, Floats]
    ) -> Piece:
        operators = self.operators(name, f)
        shape = (len(COMPONENTS), len(table))
        forward, backward, recompute = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        saved = layer_input_bytes(self.model, f) if name not in ("embedding", "head") else f.zeros
        apart = np.where(table.recompute_mode == FULL_UNIFORM, np.maximum(table.recompute_layers, 1), 1)
        kept = saved / apart  # checkpoints lie that many layers apart
        full = (table.recompute_mode == FULL_BLOCK) | (table.recompute_mode == FULL_UNIFORM)
        selective = table.recompute_mode == SELECTIVE
        for op in operators:
            repeated = full | (selective & ((op.modules & table.recompute_modules) != 0))
            op_forward, op_backward = self._operator_s(op, at)
            forward += op_forward
            backward += op_backward
            recompute += np.where(repeated, op_forward, 0.0)
            saved = saved + op.saved_bytes
            kept = kept + np.where(repeated, 0.0, op.saved_bytes)
        dense, expert = self._weights(name, table)
        backward[COMPUTE] += self._accumulation_s(dense + expert)
        self._gather(forward, backward, recompute, dense, expert, table)
        forward_s, backward_s, wait_s = floors
        forward[HOST] = np.maximum(forward_s - forward.sum(axis=0), wait_s)
        backward[HOST] = np.maximum(backward_s - backward.sum(axis=0), 0.0)
        recompute[HOST] = np.where(full, np.maximum(forward_s - recompute.sum(axis=0), wait_s), 0.0)
        return Piece(forward, backward, recompute, saved, kept, dense, expert)

    def _operator_s(self, op: Operator, at: dict[str, Crossing]) -> tuple[Floats, Floats]:
        """Forward and backward time of one operator by component, with the traffic that the stack hides taken off."""
        n = len(op.zeros)
        forward, backward = np.zeros((len(COMPONENTS), n)), np.zeros((len(COMPONENTS), n))
        forward[COMPUTE], backward[COMPUTE] = self.kernels.forward_s(op), self.kernels.backward_s(op)
        overlap = self.problem.stack.overlap
        for message in op.messages:
            if message.hidden:
                continue
            _, once_s = self._time(message, at[message.dimension])
            component = _COMPONENT_OF[message.dimension]
            share = {TP: overlap.tp, CP: overlap.cp if message.beside else 0.0, EP: overlap.ep}[component]
            for total, times in ((forward, message.forward), (backward, message.backward)):
                whole_s = once_s * times
                hidden = np.minimum(whole_s * share, total[COMPUTE]) if message.beside else whole_s * share
                if message.beside_wgrad and overlap.tp_wgrad:  # Megatron's asynchronous reduction of the input's gradient
                    hidden = np.maximum(hidden, np.minimum(whole_s * overlap.tp_wgrad, self.kernels.wgrad_s(op)))
                total[component] += whole_s - hidden + hidden * self._slowdown
        return forward, backward

    def _time(self, message: Message, at: Crossing) -> tuple[Floats, Floats]:
        """Bytes across each level (levels, n) and seconds (n,) of one message."""
        net = self.network
        if message.collective in ("dispatch", "combine"):
            dedup = self.problem.stack.moe_dispatcher == "flex"
            level_bytes = net.dispatch_bytes(at, message.bytes, message.top_k, message.limit, dedup, message.groups)
            return level_bytes, net.exchange_s(at, level_bytes, f"moe_{message.collective}" if dedup else "all_to_all")
        if message.collective == "all_to_all":
            return net.all_to_all_bytes(at, message.bytes), net.all_to_all_s(at, message.bytes)
        if message.collective == "ring":
            return net.ring_pass_bytes(at, message.bytes), net.ring_pass_s(at, message.bytes)
        collectives: dict[str, Callable[[Crossing, Floats], Floats]] = {
            "all_gather": net.all_gather_s,
            "reduce_scatter": net.reduce_scatter_s,
            "all_reduce": net.all_reduce_s,
        }
        passes = 2.0 if message.collective == "all_reduce" else 1.0
        return passes * net.ring_bytes(at, message.bytes), collectives[message.collective](at, message.bytes)

    def _weights(self, name: str, table: LayoutTable) -> tuple[Floats, Floats]:
        totals = {False: np.zeros(len(table)), True: np.zeros(len(table))}
        for tensor in self.tensors(name):
            expert = tensor.sharding.startswith("expert")
            totals[expert] = totals[expert] + tensor.numel_per_rank(table.tp, table.ep, table.etp)
        if name in ("embedding", "head"):  # rows of padding included
            padded = self.vocab_size(table.tp) / self.model.vocab_size
            totals[False] = totals[False] * padded
        if name == "embedding" and self.problem.stack.footprint.replicated_embedding:
            totals[False] = totals[False] * table.tp
        return totals[False], totals[True]

    def _accumulation_s(self, weights: Floats) -> Floats:
        """Seconds to add one micro-batch's weight gradients to their buffer, (n,), where GEMMs do not do it themselves.

        The gradient is read, the buffer read and written.
        """
        stack = self.problem.stack
        if stack.fused_accumulation:
            return np.zeros_like(weights)
        return self.kernels.elementwise_s((BF16 + 2.0 * stack.gradient_bytes) * weights)

    def _gather(
        self, forward: Floats, backward: Floats, recompute: Floats, dense: Floats, expert: Floats, table: LayoutTable
    ) -> None:
        """Adds what ZeRO-2/3 and HSDP send per layer and micro-batch beyond what hides behind the layer's own compute.

        ZeRO-3 gathers a layer's weights forward and again backward and scatters its gradients; ZeRO-2 only scatters
        (arXiv 1910.02054 section 7). HSDP does so within shards of K ranks.
        """
        sharded = table.sharding >= ZERO2
        if not sharded.any():
            return
        share = self.problem.stack.overlap.fsdp
        for parameters, group in ((dense, shard_group(table)), (expert, groups(table, "edp"))):
            at = self.network.crossing(group)
            gather_s = self.network.all_gather_s(at, BF16 * parameters)
            scatter_s = self.network.reduce_scatter_s(at, self.problem.stack.sent_gradient_bytes * parameters)
            gathers = table.sharding >= ZERO3
            forward[DP] += np.where(gathers, _exposed(gather_s, share, forward[COMPUTE]), 0.0)
            twice_s = np.where(gathers, gather_s, 0.0) + np.where(sharded, scatter_s, 0.0)
            backward[DP] += _exposed(twice_s, share, backward[COMPUTE] + recompute[COMPUTE])


@dataclass(frozen=True)
class ShardGroups(Groups):
    """Groups over cp and dp: runs of the `inner` ranks, one run for each of the `outer`.

    With pp inside dp the runs lie further apart than their length; then `stride` is only the mean step.
    """

    inner: Groups
    outer: Groups

    def units(self, unit_size: int, devices: int) -> Floats:
        """As of any group, where the runs join; else those of one run at each of its places."""
        apart = self.outer.stride > self.inner.stride * self.inner.size
        each = self.inner.units(unit_size, devices) * self.outer.units(unit_size, devices)
        nested = np.minimum(np.minimum(each, self.size), -(-devices // unit_size))
        return np.where(apart, nested, super().units(unit_size, devices))


def shard_group(table: LayoutTable) -> ShardGroups:
    """Ranks that share a dense weight's optimizer states: dp·cp of them, tp apart; under HSDP the inner K."""
    cp, dp = groups(table, "cp"), groups(table, "dp")
    size = np.where(table.sharding == HSDP, np.minimum(np.maximum(table.hsdp, 1), table.cp * table.dp), table.cp * table.dp)
    spread = dp.stride > cp.stride * table.cp
    stride = np.where(spread, np.maximum(cp.stride, dp.stride // table.cp), cp.stride)
    inner = np.minimum(size, table.cp)
    return ShardGroups(size, stride, Groups(inner, cp.stride), Groups(size // inner, dp.stride))


def _exposed(time_s: Floats, share: float, compute_s: Floats) -> Floats:
    return np.asarray(time_s - np.minimum(time_s * share, compute_s))

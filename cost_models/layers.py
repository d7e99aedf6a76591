"""What one piece of the model costs a rank per micro-batch: every layer kind, the MTP layer, the embedding and the head.

`LayerModel.wholes` walks through the operators of every piece; `LayerModel.pieces` puts recompute and sharding on top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.groups import Groups, groups, inner_strides
from ..search_spaces.layout import (
    FULL_BLOCK,
    FULL_UNIFORM,
    SELECTIVE,
    Bools,
    Floats,
    Ints,
    LayoutTable,
    Problem,
)
from ..search_spaces.model import MoeMlp, Tensor
from ..search_spaces.row_keys import distinct_rows
from .compute import Kernels
from .lending import lends, most_lent
from .loads import recompute_depths
from .message_times import MessageTimes
from .network import Network
from .operation import FP8
from .operators import (
    BF16,
    LOSS,
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
from .pieces import DENSE_COLUMNS, WHOLE_COLUMNS, Part, Piece, Pieces, Whole, Wholes
from .profile import Profile
from .sharding import ZERO2, copy_groups, exchanges, shard_group

COMPONENTS = ("compute", "tp", "cp", "ep", "dp", "host", "offload")
ENDS = ("embedding", "head")
COMPUTE, TP, CP, EP, DP, HOST, OFFLOAD = range(len(COMPONENTS))
LEAST_RESIDENT = 1e-9
"""Share of the activations that stays on the device where all are offloaded: the rest follows from it by division."""
_COMPONENT_OF = {"tp": TP, "cp": CP, "ep": EP, "etp": EP}
PERMUTED_AROUND_COLLECTIVE, PERMUTED_AROUND_KERNEL = 4.0, 2.0
"""Passes over the routed tokens that put them in order: before an all-to-all by rank and after it by expert, each read and written;
a fused dispatch takes tokens as they lie, and only what it delivers is spread to its experts."""


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
        self._lost = problem.cluster.lost_beside_communication
        mtp = self.model.mtp.layers if self.model.mtp else 0
        self.blocks: tuple[str, ...] = (*self.model.layer_kinds, *["mtp"] * mtp)
        self.heads = 1 + mtp  # every MTP layer runs the shared head and a loss of its own

    @property
    def unslowed(self) -> float:
        """Share of traffic beside compute that hides, where kernels take 1 + s times as long meanwhile.

        Traffic of g seconds beside b of compute leaves max(g·s/(1+s), g−b) exposed: g·s/(1+s), and of the rest what exceeds b. On
        engines of their own collectives slow nothing.
        """
        return 1.0 if all(level.offload_engine for level in self.network.levels) else 1.0 - self._lost

    def factors(self, table: LayoutTable) -> Factors:
        """The columns that operators read, as floats."""
        workload, stack = self.problem.workload, self.problem.stack
        as_float = {name: getattr(table, name).astype(np.float64) for name in WHOLE_COLUMNS[:6]}
        fp8 = workload.precision in ("fp8", "fp4")
        return Factors(
            **as_float,
            cp_type=table.cp_type,
            seq_len=float(workload.seq_len),
            linear_bytes=FP8 if fp8 else BF16,
            flash=stack.attention_kernel == "flash",
            eager=frozenset(stack.eager_kernels),
            graphed=stack.cuda_graphs,
            fused_gate=stack.fused_gate,
            shared_gathers=stack.shared_gathers,
            fp8_gathers=fp8 and stack.fp8_gathers,
            gathered_logits=stack.gathered_logits,
            imbalance=self._imbalance(table.ep),
            crossing=workload.expert_crossing,
            dispatch_bytes=stack.dispatched_bytes,
            permuted_copies=PERMUTED_AROUND_KERNEL if stack.moe_dispatcher == "flex" else PERMUTED_AROUND_COLLECTIVE,
            footprint=stack.footprint,
        )

    def _imbalance(self, ep: Ints) -> float | Floats:
        """Tokens of the fullest device over the mean: one figure, or a column (n,) where it was measured for every ep."""
        workload = self.problem.workload
        if not workload.imbalance_shape:
            return workload.expert_imbalance
        degrees, which = np.unique(ep, return_inverse=True)
        return np.array([workload.imbalance_at(degree) for degree in degrees.tolist()])[which]

    def vocab_size(self, tp: Floats | Ints) -> Floats:
        """Vocabulary padded to a multiple of the stack's divisor times tp (Megatron's rule), (n,)."""
        unit = self.problem.stack.vocab_divisor * np.asarray(tp, dtype=np.float64)
        return np.ceil((self.problem.workload.vocab_size or self.model.vocab_size) / unit) * unit

    def wholes(self, table: LayoutTable, shared: bool = True) -> Wholes:
        """What every piece costs before recompute and sharding, for each row of `table`.

        Pieces without experts cost the same under every EP and ETP: the walk through their operators is `shared`, unless the
        stack's figures are columns of the table's own.
        """
        f, names = self.factors(table), (*dict.fromkeys(self.blocks), *ENDS)
        routed = [name for name in names if name not in ENDS and self._moe_mlp(name)]
        first = place = np.arange(len(table))
        if shared:
            columns = (getattr(table, name) for name in DENSE_COLUMNS)
            first, place = distinct_rows([*columns, table.pp > 1, *inner_strides(table)])
        pieces, largest = self._walked(routed, table)
        others, largest_of_others = self._walked([name for name in names if name not in routed], table.take(first))
        pieces |= {name: whole.spread(place) for name, whole in others.items()}
        moe_kinds = [kind for kind in self.model.kinds if isinstance(self.model.kinds[kind].mlp, MoeMlp)]
        buffers = [dispatch_buffer_bytes(self.model, kind, f) for kind in moe_kinds]
        return Wholes(
            {name: pieces[name] for name in names},
            layer_input_bytes(self.model, f),
            logits_bytes(f, self.vocab_size(f.tp), self.heads),
            np.max(buffers, axis=0) if buffers else f.zeros,
            np.maximum(largest, largest_of_others[place]),
            self._gradient_buffer_bytes(table),
            self._word_embedding(table) if self.model.tied_embeddings or "mtp" in self.blocks else f.zeros,
        )

    def _walked(self, names: Sequence[str], table: LayoutTable) -> tuple[dict[str, Whole], Floats]:
        """The walk through the operators of some pieces, and the most that an operator of their layers saves, (n,)."""
        if not names:
            return {}, np.zeros(len(table))
        f = self.factors(table)
        sent = MessageTimes.of(self.network, table, self._dedup)
        operators = {name: self.operators(name, f) for name in names}
        saved = [op.saved_bytes + f.zeros for name in names if name not in ENDS for op in operators[name]]
        found = {name: self._whole(name, table, f, sent, each) for name, each in operators.items()}
        return found, np.max(saved, axis=0) if saved else f.zeros

    def pieces(self, table: LayoutTable, wholes: Wholes | None = None, place: Ints | None = None) -> Pieces:
        """Costs of every piece for each row of `table`; row i's combination is `wholes[place[i]]`, where these are at hand."""
        if wholes is None or place is None:
            wholes, place = self.wholes(table), np.arange(len(table))
        return Pieces(
            {name: self._piece(name, whole, table, place) for name, whole in wholes.pieces.items()},
            self.blocks,
            wholes.layer_input_bytes[place],
            wholes.logits_bytes[place],
            wholes.dispatch_bytes[place],
            wholes.largest_saved_bytes[place],
            wholes.gradient_buffer_bytes[place],
            wholes.copied_weights[place],
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
                level_bytes = self._level_bytes(message, groups(table, message.dimension), table.devices)
                times = (np.asarray(message.forward + f.zeros), np.asarray(message.backward + f.zeros))
                found.append(Sent(message.dimension, level_bytes, *times, op.modules))
        return found

    def _moe_mlp(self, name: str) -> MoeMlp | None:
        kind = self.model.mtp.kind if name == "mtp" and self.model.mtp else name
        mlp = self.model.kinds[kind].mlp
        return mlp if isinstance(mlp, MoeMlp) else None

    def _floors(
        self, name: str, table: LayoutTable, f: Factors, sent: MessageTimes, operators: list[Operator]
    ) -> tuple[Floats, Floats, Floats]:
        """Host time of a layer's forward and backward pass, and how long the device waits for the host in forward, (n,) each.

        Its launches, those of each expert on the device, TP collectives, and the pipeline engine's. Tokens per expert are read
        by the host before it launches the experts: it has no work queued then, so the device waits however long its kernels take.
        In a pipeline the host reads what each message holds before it goes on, and waits for the delays of collectives too.
        """
        if name in ENDS:
            return f.zeros, f.zeros, f.zeros
        stack, mlp = self.problem.stack, self._moe_mlp(name)
        wait = f.zeros
        if mlp is None:
            eager = 1.0 if stack.fused_kernels else np.where(f.tp > 1, stack.host_floor_eager.value, 1.0)
            floor_s = stack.host_floor_dense_s.value * eager + f.zeros
        else:
            casts = stack.host_floor_casts.value if self.problem.workload.precision in ("fp8", "fp4") else 1.0
            floor_s = stack.host_floor_moe_s.value * stack.launched_moe_share * casts + f.zeros
            floor_s = floor_s + stack.host_floor_per_expert_s.value * mlp.experts / f.ep
            wait = stack.host_wait_moe_s.value + f.zeros
        each_s = stack.host_floor_per_collective_s.value
        engine_s = np.where(table.pp > 1, stack.host_floor_pipeline_s.value * f.tp, 0.0)
        forward, backward = floor_s + engine_s, floor_s + engine_s
        if np.any(each_s) or np.any(stack.scale_out_delay_s.value):
            spoken = [m for op in operators for m in op.messages if m.dimension == "tp" and not m.hidden]
            for message in spoken:
                calls = np.where((f.tp > 1) & (message.bytes > 0), each_s, 0.0)
                calls = calls + np.where(table.pp > 1, self._delay_s(message, sent), 0.0)
                forward, backward = forward + calls * message.forward, backward + calls * message.backward
        return forward, backward, wait

    def _whole(self, name: str, table: LayoutTable, f: Factors, sent: MessageTimes, operators: list[Operator]) -> Whole:
        shape = (len(COMPONENTS), len(table))
        times: defaultdict[int, Floats] = defaultdict(lambda: np.zeros(shape))
        saved: dict[int, Floats] = {}
        forward, backward, redone = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        ends_again = self.problem.stack.recomputed_ends and name in ENDS
        for op in operators:
            again = [redone] if ends_again and op.name != LOSS else []
            op_forward, op_backward = self._operator_s(op, sent)
            for component, seconds in op_forward.items():
                for total in (forward, times[op.modules], *again):
                    total[component] += seconds
            for component, seconds in op_backward.items():
                backward[component] += seconds
            saved[op.modules] = saved.get(op.modules, f.zeros) + op.saved_bytes
        dense, expert = self._weights(name, table)
        backward[COMPUTE] += self.accumulation_s(dense + expert)
        return Whole(
            tuple(Part(modules, times[modules], saved[modules]) for modules in times),
            forward,
            backward,
            redone,
            layer_input_bytes(self.model, f) if name not in ENDS else f.zeros,
            np.sum(list(saved.values()), axis=0),
            self._floors(name, table, f, sent, operators),
            self._outside_s(operators, sent),
            dense,
            expert,
        )

    def _piece(self, name: str, whole: Whole, table: LayoutTable, place: Ints) -> Piece:
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
        as_it_is = end | ((table.recompute_mode == FULL_BLOCK) & (recompute_depths(table) < len(self.blocks)))
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

    def _outside_s(self, operators: list[Operator], sent: MessageTimes) -> tuple[Floats, Floats]:
        """Forward and backward seconds in which a piece's messages keep the network between supernodes busy, (n,) each."""
        forward, backward = operators[0].zeros, operators[0].zeros
        for message in (message for op in operators for message in op.messages):
            leaves = sent.leaves(message)
            if leaves.any():
                once_s = np.where(leaves, sent.once_s(message), 0.0)
                forward, backward = forward + once_s * message.forward, backward + once_s * message.backward
        return forward, backward

    def _operator_s(self, op: Operator, sent: MessageTimes) -> tuple[dict[int, Floats], dict[int, Floats]]:
        """Forward and backward time of one operator by component that it has, (n,) each, less the traffic that the stack hides."""
        forward, backward = {COMPUTE: self.kernels.forward_s(op)}, {COMPUTE: self.kernels.backward_s(op)}
        overlap = self.problem.stack.overlap
        for message in op.messages:
            if message.hidden or not (once_s := sent.once_s(message)).any():
                continue
            lost = np.where(self.network.on_engines(sent.at[message.dimension]), 0.0, self._lost) if self._lost else 0.0
            component = _COMPONENT_OF[message.dimension]
            share = {TP: overlap.tp, CP: overlap.cp if message.beside else 0.0, EP: overlap.ep}[component]
            for total, times in ((forward, message.forward), (backward, message.backward)):
                if not np.any(times):
                    continue
                whole_s = once_s * times
                hidden = np.minimum(whole_s * share, total[COMPUTE]) if message.beside else whole_s * share
                if message.beside_wgrad and overlap.tp_wgrad:  # Megatron's asynchronous reduction of the input's gradient
                    hidden = np.maximum(hidden, np.minimum(whole_s * overlap.tp_wgrad, self.kernels.wgrad_s(op)))
                exposed_s = whole_s - hidden + hidden * lost + self._delay_s(message, sent) * times
                total[component] = total.get(component, 0.0) + exposed_s
        return forward, backward

    def _delay_s(self, message: Message, sent: MessageTimes) -> Floats | float:
        """What a collective costs that leaves the supernode before a byte moves, and whatever runs beside it, (n,)."""
        delay_s = self.problem.stack.scale_out_delay_s.value
        return np.where(sent.leaves(message), delay_s, 0.0) if delay_s else 0.0

    def _level_bytes(self, message: Message, group: Groups, devices: Ints) -> Floats:
        """Bytes that one message sends across each level in jobs that use `devices` (n,), mean over ranks, (levels, n)."""
        net, at = self.network, self.network.mean_crossing(group, devices)
        if message.routing is not None:
            return net.dispatch_bytes(at, message.bytes, message.routing, self._dedup)
        if message.collective == "all_to_all":
            return net.all_to_all_bytes(at, message.bytes)
        if message.collective == "ring":
            return net.ring_pass_bytes(at, message.bytes)
        if message.collective == "all_reduce":
            return net.all_reduce_bytes(net.crossing(group), at, np.asarray(message.bytes))
        return net.ring_bytes(at, message.bytes)

    @property
    def _dedup(self) -> bool:
        """Whether a token travels once to a unit, however many of its experts are there."""
        return self.problem.stack.moe_dispatcher == "flex"

    def _weights(self, name: str, table: LayoutTable) -> tuple[Floats, Floats]:
        """Dense and expert parameters of a piece on a rank, rows of padding in the vocabulary included, (n,) each."""
        totals = {False: np.zeros(len(table)), True: np.zeros(len(table))}
        for tensor in self.tensors(name):
            expert, held = tensor.sharding.startswith("expert"), tensor.numel_per_rank(table.tp, table.ep, table.etp)
            if tensor.name == "embedding.word":
                held = self._word_embedding(table)
            elif tensor.name == "lm_head":
                held = held * self.vocab_size(table.tp) / self.model.vocab_size
            totals[expert] = totals[expert] + held
        return totals[False], totals[True]

    def _word_embedding(self, table: LayoutTable) -> Floats:
        """Parameters of the padded word embedding on a rank, (n,)."""
        ways = 1 if self.problem.stack.footprint.replicated_embedding else table.tp
        return np.asarray(self.vocab_size(table.tp) * self.model.hidden_size / ways)

    def accumulation_s(self, weights: Floats) -> Floats:
        """Seconds to add one micro-batch's weight gradients to their buffer, (n,), where GEMMs do not do it themselves.

        The gradient is read, the buffer read and written.
        """
        stack = self.problem.stack
        if stack.fused_accumulation:
            return np.zeros_like(weights)
        return self.kernels.elementwise_s((BF16 + 2.0 * stack.gradient_bytes) * weights)

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


def _beside(passing: Floats, apart: Bools) -> Floats:
    """Seconds of a pass (components, n) behind which exchanges of weights hide, (n,): its compute, and its own messages where these
    travel `apart` from them."""
    return np.asarray(np.where(apart, passing[: EP + 1].sum(axis=0), passing[COMPUTE]))


def resident_share(offloaded: Floats) -> Floats:
    """Share of the saved activations that stays on the device."""
    return np.asarray(np.maximum(1.0 - offloaded, LEAST_RESIDENT))


def _exposed(time_s: Floats, share: float, compute_s: Floats) -> Floats:
    return np.asarray(time_s - np.minimum(time_s * share, compute_s))

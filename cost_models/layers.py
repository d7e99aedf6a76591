"""What one piece of the model costs a rank per micro-batch: every layer kind, the MTP layer, the embedding and the head.

`LayerModel.wholes` walks through the operators of every piece; `LayerModel.pieces` puts recompute and sharding on top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..search_spaces.groups import Groups, groups, inner_strides
from ..search_spaces.layout import Floats, Ints, LayoutTable, Problem
from ..search_spaces.model import MoeMlp, Tensor
from ..search_spaces.row_keys import distinct_rows
from .compute import Kernels
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
from .pieces import COMPONENTS, COMPUTE, CP, DENSE_COLUMNS, ENDS, EP, TP, WHOLE_COLUMNS, Part, Pieces, Whole, Wholes
from .profile import Profile
from .row_pieces import RowPieces

_COMPONENT_OF = {"tp": TP, "cp": CP, "ep": EP, "etp": EP}
PERMUTED_COPIES = {"alltoall": 4.0, "allgather": 1.0, "flex": 2.0}
"""Passes over the routed tokens that put them in order: before an all-to-all by rank and after it by expert, each read and written;
a fused dispatch takes tokens as they lie, and only what it delivers is spread to its experts. So it is with gathered tokens, but
their way back is a sum (`operators._sums`): of two permutations one is left."""


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
            permuted_copies=PERMUTED_COPIES[stack.moe_dispatcher],
            gathered_tokens=stack.moe_dispatcher == "allgather",
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
        of_rows = RowPieces(self.problem, self.network, self.kernels, len(self.blocks))
        return Pieces(
            {name: of_rows.piece(name, whole, table, place) for name, whole in wholes.pieces.items()},
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

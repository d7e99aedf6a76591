"""What a piece of the model costs in one pass, by hand."""

from __future__ import annotations

from paraplan.search_spaces.model import Attention, DenseMlp, LatentAttention, MoeMlp
from reference_network import ReferenceNetwork
from reference_records import BF16, Msg, Op, PieceCost, Times


class ReferencePieces(ReferenceNetwork):
    """Times of passes by component, weights, what is kept, and what FSDP and offload add."""

    def recomputed(self, op: Op) -> bool:
        if self.recompute.mode in (2, 3):
            return True
        return self.recompute.mode == 1 and bool(op.modules & set(self.recompute.module_names))

    def end_again(self, piece: str, op: Op) -> bool:
        """Whether an embedding's or a head's operator is done twice: a layer like others to some libraries, but for the loss."""
        full = self.recompute.mode in (2, 3) and self.stack.recomputed_ends
        return full and piece in ("embedding", "head") and op.name != "loss"

    def weights(self, piece: str) -> tuple[float, float]:
        """Parameters of a piece on one rank: dense, expert."""
        h, tp = self.model.hidden_size, self.layout.tp
        norm = h * (2 if self.model.norm == "layer" else 1)
        if piece == "embedding":
            return self.vocab * h / (1 if self.keeps.replicated_embedding else tp), 0.0
        if piece == "head":
            return (0 if self.model.tied_embeddings else self.vocab * h / tp) + norm, 0.0
        if piece == "mtp":
            assert self.model.mtp is not None
            dense, expert = self.weights(self.model.mtp.kind)
            return dense + 2 * h * h / tp + self.model.mtp.norms * norm, expert
        layer = self.model.kinds[piece]
        dense = layer.norms * norm
        if isinstance(layer.mixer, Attention):
            a = layer.mixer
            kv_ways = min(tp, a.kv_heads)
            dense += 2 * h * a.heads * a.head_dim / tp + 2 * h * a.kv_heads * a.head_dim / kv_ways
            dense += 2 * a.head_dim if a.qk_norm == "head" else 0
            assert not (a.qkv_bias or a.out_bias)
        else:
            b = layer.mixer
            assert isinstance(b, LatentAttention) and b.q_lora_rank is not None
            dense += h * (b.q_lora_rank + b.kv_lora_rank + b.qk_rope_head_dim) + b.q_lora_rank + b.kv_lora_rank
            dense += b.q_lora_rank * b.heads * (b.qk_nope_head_dim + b.qk_rope_head_dim) / tp
            dense += b.kv_lora_rank * b.heads * (b.qk_nope_head_dim + b.v_head_dim) / tp + b.heads * b.v_head_dim * h / tp
        if isinstance(layer.mlp, DenseMlp):
            return dense + (3 if layer.mlp.gated else 2) * h * layer.mlp.width / tp, 0.0
        moe = layer.mlp
        assert isinstance(moe, MoeMlp)
        dense += moe.experts * h + (moe.experts if moe.router_expert_bias else 0) + 3 * h * moe.shared_width / tp
        expert = 3 * moe.experts * h * moe.width / (self.layout.ep * self.layout.etp)
        if moe.bias:
            expert += moe.experts * (2 * moe.width / self.layout.etp + h) / self.layout.ep
        return dense, expert

    def piece(self, name: str) -> PieceCost:
        forward, backward, recompute = Times(), Times(), Times()
        layer = name not in ("embedding", "head")
        saved = self.hidden_bytes if layer else 0.0
        kept = saved / (self.recompute.layers if self.recompute.mode == 3 else 1)
        for op in self.operators(name):
            one_way = [self.one_way(op, side) for side in ("forward", "backward")]
            forward.add(one_way[0])
            backward.add(one_way[1])
            if self.end_again(name, op):
                backward.add(one_way[0])
            again = self.recomputed(op)
            if again:
                recompute.add(one_way[0])
            saved += op.saved
            kept += 0.0 if again else op.saved
        dense, expert = self.weights(name)
        if not self.stack.fused_accumulation:  # one gradient read, the buffer read and written
            passed = (BF16 + 2 * self.stack.gradient_bytes) * (dense + expert)
            backward.parts["compute"] += self.memory_s(passed, self.stack.elementwise_efficiency.value)
        if self.sharding >= 2:
            self._fsdp(name, forward, backward, recompute, dense, expert)
        if layer:
            self._floors(name, forward, backward, recompute)
        kept = kept if layer else saved
        self._offload(forward, backward, recompute, saved * self.leaving, kept * self.leaving, layer)
        return PieceCost(forward, backward, recompute, saved, kept, (saved * self.leaving, kept * self.leaving), dense, expert)

    def one_way(self, op: Op, side: str) -> Times:
        """Seconds of an operator in one pass: its compute, and what of its messages is exposed."""
        compute_s = op.forward_s if side == "forward" else op.backward_s
        slowdown = self.cluster.compute_slowdown_beside_communication
        slow = 1 - 1 / (1 + slowdown.value) if slowdown else 0.0  # work that compute does not get done meanwhile
        times = Times()
        times.parts["compute"] = compute_s
        for message in op.messages:
            if message.hidden:
                continue
            whole_s = self.message_s(message) * getattr(message, side)
            component = "ep" if message.dimension == "etp" else message.dimension
            share = {"tp": self.stack.overlap.tp, "cp": self.stack.overlap.cp if message.beside else 0.0}
            hidden_s = whole_s * share.get(component, self.stack.overlap.ep)
            hidden_s = min(hidden_s, compute_s) if message.beside else hidden_s
            if message.wgrad:
                hidden_s = max(hidden_s, min(whole_s * self.stack.overlap.tp_wgrad, op.wgrad_s))
            delay_s = self.stack.scale_out_delay_s.value if self.leaves(self.groups[message.dimension]) else 0.0
            times.parts[component] += whole_s - hidden_s + hidden_s * slow
            times.parts[component] += delay_s * getattr(message, side) if message.bytes else 0.0
        return times

    def _floors(self, name: str, forward: Times, backward: Times, recompute: Times) -> None:
        """What the host takes to launch a layer, where that is more than its passes take."""
        mlp = self.model.kinds[self.model.mtp.kind if name == "mtp" and self.model.mtp else name].mlp
        floor_s, wait_s = self.stack.host_floor_dense_s.value, 0.0
        if self.stack.eager_kernels and self.layout.tp > 1:
            floor_s *= self.stack.host_floor_eager.value
        if isinstance(mlp, MoeMlp):
            floor_s, wait_s = self._moe_floor_s(mlp), self.stack.host_wait_moe_s.value
        if self.layout.pp > 1:
            floor_s += self.stack.host_floor_pipeline_s.value * self.layout.tp
        each_s = self.stack.host_floor_per_collective_s.value
        if self.layout.pp > 1 and self.leaves(self.groups["tp"]):
            each_s += self.stack.scale_out_delay_s.value
        once, back = self.tp_calls(name, "forward") * each_s, self.tp_calls(name, "backward") * each_s
        forward.parts["host"] = max(floor_s + once - forward.total, wait_s)
        backward.parts["host"] = max(floor_s + back - backward.total, 0.0)
        if self.recompute.mode in (2, 3):
            recompute.parts["host"] = max(floor_s + once - recompute.total, wait_s)

    def _moe_floor_s(self, mlp: MoeMlp) -> float:
        floor_s = self.stack.host_floor_moe_s.value
        for module in self.stack.graph_modules:
            if module in self.stack.graph_shares:
                floor_s -= self.stack.graph_shares[module].value * self.stack.host_floor_moe_s.value
        if self.workload.precision in ("fp8", "fp4"):
            floor_s *= self.stack.host_floor_casts.value
        return floor_s + mlp.experts // self.layout.ep * self.stack.host_floor_per_expert_s.value

    def _offload(self, forward: Times, backward: Times, recompute: Times, saved: float, kept: float, layer: bool) -> None:
        """Activations go away beside the forward and come back beside the backward, after its recompute if there is any.

        Where only some layers of a chunk are redone, `recompute` holds the difference; it never makes redoing free.
        """

        def exposed_s(moved: float, *passes: Times) -> float:
            beside = ["compute", "host"] if self.workload.offload_to == "pool" else list(forward.parts)
            free_s = sum(each.parts[part] for each in passes for part in beside)
            return max(moved / self.cluster.tier(self.workload.offload_to).bandwidth_bytes_per_s.value - free_s, 0.0)

        as_it_is = exposed_s(saved, forward), exposed_s(saved, backward)
        redone = exposed_s(kept, forward), exposed_s(kept, backward, recompute)
        if self.recompute.mode == 2 and self.recompute.layers < len(self.blocks):
            recompute.parts["offload"] = max(sum(redone) - sum(as_it_is), -recompute.total)
            redone = as_it_is
        forward.parts["offload"], backward.parts["offload"] = redone if layer else as_it_is

    def tp_calls(self, name: str, side: str) -> float:
        """TP collectives of one pass over a layer, hidden ones aside."""
        if self.layout.tp == 1:
            return 0.0
        messages = [m for op in self.operators(name) for m in op.messages if m.dimension == "tp" and not m.hidden]
        return sum(getattr(message, side) for message in messages)

    def leaves(self, ranks: list[list[int]]) -> bool:
        """Whether a group spans supernodes."""
        supernode = [level.name for level in self.levels].index(self.cluster.supernode)
        return any(fan > 1 for _, fan in self.place(ranks)[supernode + 1 :])

    def gathers_s(self, name: str, parameters: float, ranks: list[list[int]]) -> tuple[float, float]:
        """Weights of a piece gathered in every micro-batch, forward and backward (ZeRO-3) or forward alone (FSDP's ZeRO-2)."""
        if not self.gathers_forward or (self.stays_gathered and self.once):
            return 0.0, 0.0
        once_s = self.collective_s(Msg("dp", "all_gather", BF16 * parameters, 1, 1), ranks)
        return once_s, 0.0 if self.sharding == 2 or (self.is_root(name) and not self.keeps.root_resharded) else once_s

    def is_root(self, name: str) -> bool:
        """Whether a piece belongs to the root unit, which is gathered before all else and scattered after it."""
        return self.keeps.root_unit and name in ("embedding", "head")

    def _fsdp(self, name: str, forward: Times, backward: Times, recompute: Times, dense: float, expert: float) -> None:
        """Weights gathered forward and backward (ZeRO-3), gradients scattered (ZeRO-2 too), per layer and micro-batch.

        Stages that stay gathered, and gradients that wait for the last micro-batch, do so once per step (`_after`). What travels
        between supernodes hides behind a layer's messages too if those stay inside.
        """
        share = 0.0 if self.is_root(name) else self.stack.overlap.fsdp
        messages = [m for op in self.operators(name) for m in op.messages]
        inside = not any(self.leaves(self.groups[m.dimension]) for m in messages if m.bytes and m.forward + m.backward)
        shards, copies = self.shards()
        for parameters, ranks in ((dense, shards), (expert, self.groups["edp"])):
            gather_s, again_s = self.gathers_s(name, parameters, ranks)
            scatter_s = 0.0
            if not (self.waits and self.once):
                scatter_s = self.collective_s(Msg("dp", "reduce_scatter", self.sent_gradient * parameters, 1, 1), ranks)
                cast = (BF16 + self.sent_gradient) * parameters  # gradients into the buffer that is scattered
                backward.parts["compute"] += self.memory_s(cast, self.stack.elementwise_efficiency.value)
                if self.copies_each and parameters is dense:
                    shard = Msg("dp", "all_reduce", self.sent_gradient * parameters / len(shards[0]), 1, 1)
                    scatter_s += self.collective_s(shard, copies)
            behind = ("compute", "tp", "cp", "ep") if inside and self.leaves(ranks) else ("compute",)
            forward.parts["dp"] += gather_s - min(gather_s * share, sum(forward.parts[part] for part in behind))
            both_s = again_s + scatter_s
            beside_s = sum(backward.parts[part] for part in behind) + recompute.parts["compute"]
            backward.parts["dp"] += both_s - min(both_s * share, beside_s)

    @property
    def gathers_forward(self) -> bool:
        return self.sharding >= 3 or (self.sharding == 2 and self.stack.zero2_gathers == "every micro-batch")

    @property
    def stays_gathered(self) -> bool:
        return self.sharding >= 3 and self.layout.pp > 1 and self.keeps.gathered_stages

    @property
    def once(self) -> bool:
        """Whether what waits or stays gathered is exchanged once per step."""
        return self.layout.pp == 1 or self.stack.pipeline_exchanges == "once"

    @property
    def waits(self) -> bool:
        """Whether whole gradients stay until the last micro-batch."""
        return self.sharding >= 2 and (self.keeps.unsharded_gradient_bytes > 0 or self.stays_gathered)

    @property
    def copies_each(self) -> bool:
        """Whether HSDP's copies of a shard reduce in every micro-batch."""
        return self.sharding == 4 and not (self.waits and self.once) and self.stack.copies_reduced == "every micro-batch"

    def costs(self) -> dict[str, PieceCost]:
        return {name: self.piece(name) for name in (*dict.fromkeys(self.blocks), "embedding", "head")}

"""What a stage holds at its peak, by hand."""

from __future__ import annotations

from paraplan.cost_models.timeline import FORWARD, build_schedule
from paraplan.search_spaces.model import MoeMlp
from reference_pieces import ReferencePieces
from reference_records import BF16, FP32, PieceCost


class ReferenceMemory(ReferencePieces):
    """Bytes of a stage by term."""

    def _memory(
        self,
        costs: dict[str, PieceCost],
        dense: list[float],
        expert: list[float],
        activations: list[float],
        held: list[int],
        stage: int,
    ) -> dict[str, float]:
        pp, vpp, m = self.layout.pp, self.layout.vpp, self.layout.num_microbatches
        shards = (len(self.shards()[0][0]), self.layout.edp)
        terms = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
        for parameters, count in zip((sum(dense[c] for c in held), sum(expert[c] for c in held)), shards, strict=True):
            terms["weights"] += BF16 * parameters / (count if self.sharding >= 3 else 1)
            if self.stays_gathered:
                terms["weights"] += BF16 * parameters
            if self.keeps.cached_weight_bytes and self.problem.workload.precision == "fp8":
                terms["weights"] += 2 * parameters  # a byte each way round
            released = self.keeps.released_gradients and m == pp == 1 and self.sharding == 1
            if self.sharding < 2 and not released:
                terms["gradients"] += (self.stack.gradient_bytes + self.keeps.compute_gradient_bytes) * parameters
            elif m > 1 and self.waits:
                terms["gradients"] += (self.keeps.unsharded_gradient_bytes or self.sent_gradient) * parameters
            else:
                terms["gradients"] += self.stack.gradient_bytes * parameters / count
            stepping = self.stack.optimizer_bytes + self.keeps.step_gradient_bytes
            states = stepping * parameters / (count if self.sharding >= 1 else 1)
            terms["optimizer"] += states * (1 - self.offload)
        # Micro-batches in flight; an interleaved stage holds what its order holds of each of its chunks.
        terms["activations"] = 0.0 if vpp > 1 else sum(activations[c] for c in held) * min(pp - stage, m)
        if vpp > 1:
            order, now = build_schedule("interleaved", pp, vpp, m), 0.0
            for kind, chunk in zip(order.kind[stage].tolist(), order.chunk[stage].tolist(), strict=True):
                now += activations[chunk] if kind == FORWARD else -activations[chunk]
                terms["activations"] = max(terms["activations"], now)
        terms["transient"] = self._transient(costs, last=stage == pp - 1)
        talking = [name for name in ("tp", "cp", "pp", "dp", "ep", "etp", "edp") if getattr(self.layout, name) > 1]
        terms["communicators"] = len(talking) * self.cluster.communicator_bytes.value
        return terms

    def _transient(self, costs: dict[str, PieceCost], last: bool) -> float:
        layers = {name: costs[name] for name in self.blocks}
        # The layer at work is there whole: what it makes again, and what will leave or has come back.
        again = max(cost.saved - cost.kept + cost.moved[1] for cost in layers.values())
        if self.recompute.mode == 3:
            again *= self.recompute.layers
        largest = max(op.saved for name in layers for op in self.operators(name))
        exchange = 0.0
        if self.model.is_moe:
            copies = BF16 * self.tokens / self.sp * self._moe_mlp().top_k * self.model.hidden_size
            exchange = copies * (1 + self.workload.expert_imbalance)
        logits = 0.0
        if last:
            columns = self.vocab if self.stack.gathered_logits else self.vocab / self.layout.tp
            logits = (self.keeps.logit_bytes + (self.heads - 1) * FP32) * self.tokens * columns + costs["head"].moved[0]
        pp = self.layout.pp
        resident = pp > 1 and self.keeps.gathered_stages
        copies = {0: 0, 1: 0, 2: 1}.get(self.sharding, 1 if resident else 3)
        layer_unit = BF16 * max(cost.dense + cost.expert for cost in layers.values())
        head, embedding = BF16 * costs["head"].dense, BF16 * costs["embedding"].dense
        working = again + largest + exchange
        if self.keeps.root_unit:
            root = 0.0
            if self.sharding >= 3:
                root += head if last else 0.0
                root += embedding if not last or pp == 1 else 0.0
            peak = max(working + layer_unit * copies + root, logits + (0.0 if self.keeps.root_resharded else root))
        else:
            peak = max(working, logits) + copies * max(layer_unit, head if last else 0.0)
        return peak + self._stand_ins(layers) + (head if last and self.keeps.gradient_buffers else 0.0)

    def _stand_ins(self, layers: dict[str, PieceCost]) -> float:
        """BF16 bytes of one weight of every shape in the layers, where the stack hands such tensors to autograd."""
        if not self.keeps.gradient_buffers:
            return 0.0
        shapes: dict[tuple[str, int], float] = {}
        for name in layers:
            assert self.model.mtp is not None or name != "mtp"
            kind = self.model.kinds[self.model.mtp.kind if name == "mtp" and self.model.mtp else name]
            for tensor in self.model.mtp_tensors() if name == "mtp" else self.model.layer_tensors(name):
                ways = {"tp": self.layout.tp, "kv": min(self.layout.tp, tensor.kv_heads or 1), "replicated": 1}
                if tensor.sharding in ways:
                    shapes[tensor.name, tensor.numel] = tensor.numel / ways[tensor.sharding]
                else:
                    assert isinstance(kind.mlp, MoeMlp)
                    split = self.layout.etp if tensor.sharding == "expert" else 1
                    shapes[tensor.name, tensor.numel] = tensor.numel / kind.mlp.experts / split
        return BF16 * sum(shapes.values())

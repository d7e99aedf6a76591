"""One layout priced by hand: plain floats and loops, written from the formulas and not from the code under test.

Covers what the tests price: dense GQA layers, MLA, mixtures of experts with or without a shared expert, MTP, every cp type, ZeRO
and HSDP, recompute, offload, 1F1B and interleaving. Only catalog records and profile figures are read; explicit rank groups take
the place of sizes and strides, and an event simulation that of the replayed recurrence.
"""

from __future__ import annotations

import numpy as np
from paraplan.cost_models.pipeline import stage_ends_s
from paraplan.cost_models.timeline import simulate
from reference_memory import ReferenceMemory
from reference_records import BF16, FP32, Msg, PieceCost, Times


class Reference(ReferenceMemory):
    """All figures of one layout whose stages are given."""

    def price(self) -> tuple[float, dict[str, float], list[dict[str, float]]]:
        """Step time, its breakdown, and bytes per stage and term."""
        pp, vpp, m, costs = self.layout.pp, self.layout.vpp, self.layout.num_microbatches, self.costs()
        f, b, dense, expert, activations = ([0.0] * (pp * vpp) for _ in range(5))
        for c, chunk in enumerate(self.chunks):
            for name, again in chunk:
                cost = costs[name]
                f[c] += cost.forward.total
                b[c] += cost.backward.total + (cost.recompute.total if again else 0.0)
                dense[c] += cost.dense
                expert[c] += cost.expert
                activations[c] += cost.kept - cost.moved[1] if again else cost.saved - cost.moved[0]
        if len(self.chunks) > 1 and (self.model.tied_embeddings or self.model.mtp):
            with_mtp = [c for c, chunk in enumerate(self.chunks) if any(name == "mtp" for name, _ in chunk)]
            dense[with_mtp[0] if with_mtp else -1] += costs["embedding"].dense
        p2p_s = self.between_stages_s(self.hidden_bytes)
        if self.stack.scattered_p2p and pp > 1 and not self.layout.sequence_parallel:
            p2p_s = self.between_stages_s(self.hidden_bytes / self.layout.tp)
            p2p_s += self.message_s(Msg("tp", "all_gather", self.hidden_bytes, 1, 0))
        if self.layout.schedule == "interleaved":
            p2p_s *= 1 - self.stack.overlap.pp_interleaved
        blocked_s = 0.0
        if self.stack.blocking_p2p and pp > 1:
            away = self.leaves(self.groups["pp"])
            reached = (self.stack.scale_out_efficiency if away else self.stack.scale_up_efficiency).value
            blocked_s, p2p_s = 2 * (m + pp - 1) * p2p_s / reached, 0.0
        ends, still = self._ends_s(f, b, p2p_s), self._ends_s(f, b, 0.0)
        stage_of = [[c for c in range(pp * vpp) if c % pp == s] for s in range(pp)]
        beside = [self._beside_s(costs, f, b, dense, expert, stage_of, s) for s in range(pp)]
        # Every stage's gradients are reduced once its last backward is over; then all wait for each other and step together.
        done = [end + beside[s]["gradients"] for s, end in enumerate(ends)]
        after = [part["weights"] + part["optimizer"] + part["offload"] for part in beside]
        last, slowest = done.index(max(done)), after.index(max(after))
        stalled_s = self.stalled_s() + blocked_s
        step_s = max(done) + max(after) + self.stack.step_overhead_s.value + stalled_s
        exposed = {**beside[slowest], "dp": beside[last]["gradients"] + beside[slowest]["weights"]}
        fullest = max(range(last, pp), key=lambda s: sum(f[c] + b[c] for c in stage_of[s]))
        breakdown = self._breakdown(costs, stage_of[fullest], m, ends[last], still[last], exposed)
        breakdown["pp"] += stalled_s
        memory = [self._memory(costs, dense, expert, activations, stage_of[s], s) for s in range(pp)]
        return step_s, breakdown, memory

    def stalled_s(self) -> float:
        """Messages of a micro-batch that stall on the fullest stage: in and out, both passes; of two stages one way in each."""
        supernode = self.unit_sizes[[level.name for level in self.levels].index(self.cluster.supernode)]
        pp, dp, m = self.layout.pp, self.layout.dp, self.layout.num_microbatches
        if pp == 1 or dp == 1 or self.sharding or self.problem.devices <= 2 * supernode:
            return 0.0
        return m * (2 if pp == 2 else 4) * self.stack.message_stall_s.value

    def _ends_s(self, f: list[float], b: list[float], p2p_s: float) -> list[float]:
        """When every stage ends its last backward: as replayed event by event, or at most 1 % before where edges take time."""
        pp, vpp, m, schedule = self.layout.pp, self.layout.vpp, self.layout.num_microbatches, self.layout.schedule
        timeline = simulate(schedule, pp, vpp, m, np.array(f), np.array(b), p2p_s)
        replayed = [float(timeline.end_s[timeline.stage == s].max()) for s in range(pp)]
        if vpp > 1 or p2p_s == 0.0:
            return replayed
        found = stage_ends_s(schedule, pp, vpp, np.array([f]), np.array([b]), p2p_s, m)[0].tolist()
        assert all(0.99 * end <= closed <= end * (1.0 + 1e-12) for closed, end in zip(found, replayed, strict=True))
        return [float(end) for end in found]

    def _beside_s(
        self,
        costs: dict[str, PieceCost],
        f: list[float],
        b: list[float],
        dense: list[float],
        expert: list[float],
        stage_of: list[list[int]],
        stage: int,
    ) -> dict[str, float]:
        """Exposed gradient and weight traffic, optimizer and offload of one stage."""
        pp = self.layout.pp
        names = (*self.blocks, "embedding", "head")
        optimizer = offload = 0.0
        chunks = stage_of[stage]
        gradients, weights = dict.fromkeys(chunks, 0.0), dict.fromkeys(chunks, 0.0)
        shards, copies = self.shards()
        for held, ranks, mean in (
            (dense, shards, sum(costs[name].dense for name in names) / pp),
            (expert, self.groups["edp"], sum(costs[name].expert for name in names) / pp),
        ):
            mine = sum(held[c] for c in stage_of[stage])
            if mine == 0.0:
                continue
            buffer = self.sent_gradient * mean
            if self.sharding <= 1:
                kind = "all_reduce" if self.sharding == 0 else self.stack.zero1_reduction
                seconds = self.collective_s(Msg("dp", kind, buffer, 1, 0), ranks)
                gradients = {c: gradients[c] + seconds * held[c] / mean for c in chunks}
            elif self.waits and self.once:
                seconds = self.collective_s(Msg("dp", "reduce_scatter", buffer, 1, 0), ranks)
                gradients = {c: gradients[c] + seconds * held[c] / mean for c in chunks}
            if (self.sharding in (1, 2) and not self.gathers_forward) or (self.stays_gathered and self.once):
                seconds = self.collective_s(Msg("dp", "all_gather", BF16 * mean, 1, 0), ranks)
                weights = {c: weights[c] + seconds * held[c] / mean for c in chunks}
            if self.sharding == 4 and held is dense and not self.copies_each:
                reduced = Msg("dp", "all_reduce", buffer / len(ranks[0]), 1, 0)
                seconds = self.collective_s(reduced, copies)
                gradients = {c: gradients[c] + seconds * held[c] / mean for c in chunks}
            share = 1 / len(ranks[0]) if self.sharding else 1.0
            stepped_s, moved_s = self._step_s()
            optimizer += mine * share * (1 - self.offload) * stepped_s
            offload += mine * share * self.offload * moved_s
        overlap = self.stack.overlap
        slowdown = self.cluster.compute_slowdown_beside_communication
        slowed = 1 + (slowdown.value if slowdown else 0.0)  # compute beside traffic that hides takes so many times as long
        free_f, free_b = self.adapters_free(costs)
        hides_g, hides_w = overlap.dp_gradients / slowed, overlap.dp_parameters / slowed
        if self.layout.optimizer_sharding == "zero1":
            hides_g *= overlap.zero1_gradients
        return {
            "gradients": sum(gradients.values()) * (1 - hides_g) + self._late_s(gradients, hides_g, b, free_b),
            "weights": sum(weights.values()) * (1 - hides_w)
            + self._late_s(weights, hides_w, f, free_f, sum(f[c] for c in range(stage)) * free_f),
            "optimizer": optimizer,
            "offload": offload,
        }

    def _step_s(self) -> tuple[float, float]:
        """Seconds to update a parameter on the device, and one whose states are with the host."""
        memory = self.device.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value
        touched = 2 * self.stack.optimizer_bytes + self.stack.gradient_bytes + BF16
        host = self.cluster.tier(self.workload.offload_to)
        if self.stack.offloaded_step == "host":
            copied, stepped_s = FP32 + BF16, touched / host.memory_bandwidth_bytes_per_s.value
        else:
            copied, stepped_s = 2 * self.stack.optimizer_bytes, touched / memory
        copied_s = copied / host.bandwidth_bytes_per_s.value * (1 - self.stack.overlap.offload)
        return touched / memory, copied_s + stepped_s

    def _late_s(self, traffic: dict[int, float], hides: float, passes: list[float], free: float, lead: float = 0.0) -> float:
        """A link that serves a stage's chunks one after the other, each from its own last pass on, the first chunk last.

        Told backwards in time it is the gathering of weights: each due before its own first pass is over, the first chunk first.
        """
        ahead = {chunk: sum(self.layout.pp * passes[c] for c in traffic if c < chunk) + passes[chunk] for chunk in traffic}
        clock = -float("inf")
        for chunk in sorted(traffic, reverse=True):
            clock = max(clock, -free * ahead[chunk]) + hides * traffic[chunk]
        return max(0.0, clock - lead)

    def adapters_free(self, costs: dict[str, PieceCost]) -> tuple[float, float]:
        """Share of a forward and of a backward pass through the whole model in which the links of data parallelism are free."""
        supernode = [level.name for level in self.levels].index(self.cluster.supernode)
        total, outside = [0.0, 0.0], [0.0, 0.0]
        for name in (*self.blocks, "embedding", "head"):
            total[0] += costs[name].forward.total
            total[1] += costs[name].backward.total
            for message in (message for op in self.operators(name) for message in op.messages):
                crossed = [i for i, (_, fan) in enumerate(self.place(self.groups[message.dimension])) if fan > 1]
                if crossed and crossed[-1] > supernode:
                    outside[0] += self.message_s(message) * message.forward
                    outside[1] += self.message_s(message) * message.backward
            for parameters, ranks in ((costs[name].dense, self.shards()[0]), (costs[name].expert, self.groups["edp"])):
                for side, seconds in enumerate(self.gathers_s(name, parameters, ranks)):
                    outside[side] += seconds  # they take the links that gradients take
        return max(1 - outside[0] / total[0], 0.0), max(1 - outside[1] / total[1], 0.0)

    def _breakdown(
        self, costs: dict[str, PieceCost], held: list[int], m: int, path_s: float, still_s: float, after: dict[str, float]
    ) -> dict[str, float]:
        forward, backward, recompute = Times(), Times(), Times()
        for c in held:
            for name, again in self.chunks[c]:
                forward.add(costs[name].forward)
                backward.add(costs[name].backward)
                if again:
                    recompute.add(costs[name].recompute)
        busy = Times()
        for part in (forward, backward, recompute):
            busy.add(part, m)
        return {
            "forward": m * forward.parts["compute"],
            "backward": m * backward.parts["compute"],
            "recompute": m * recompute.parts["compute"],
            "tp": busy.parts["tp"],
            "cp": busy.parts["cp"],
            "ep": busy.parts["ep"],
            "pp": max(path_s - still_s, 0.0),
            "dp": busy.parts["dp"] + after["dp"],
            "bubble": min(still_s, path_s) - busy.total,
            "optimizer": after["optimizer"],
            "offload": busy.parts["offload"] + after["offload"],
            "host": busy.parts["host"] + self.stack.step_overhead_s.value,
        }

"""One layout priced by hand: plain floats and loops, written from the formulas and not from the code under test.

Covers what the tests price: dense GQA layers, MLA, mixtures of experts with or without a shared expert, MTP, every cp type, ZeRO
and HSDP, recompute, offload, 1F1B and interleaving. Only catalog records and profile figures are read; explicit rank groups take
the place of sizes and strides, and an event simulation that of the replayed recurrence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf, log2

import numpy as np
from paraplan.cost_models.pipeline import paths_s
from paraplan.cost_models.profile import CollectiveCurve, Profile, load_profile
from paraplan.cost_models.timeline import simulate
from paraplan.optimizer.ranks import coordinates, groups
from paraplan.search_spaces.cluster import Level
from paraplan.search_spaces.layout import Layout, Problem, Recompute, parse_offload, parse_sharding
from paraplan.search_spaces.model import Attention, DenseMlp, LatentAttention, MoeMlp

BF16, FP32 = 2.0, 4.0


@dataclass(frozen=True)
class Msg:
    """One collective: dimension, kind, bytes of its buffer (dispatch: one copy of the tokens; ring: a rank's own block), and how
    often a pass sends it.
    """

    dimension: str
    collective: str
    bytes: float
    forward: float
    backward: float
    beside: bool = False
    wgrad: bool = False  # may run beside the weight gradient
    hidden: bool = False


@dataclass(frozen=True)
class Op:
    """One kernel: seconds alone, FLOPs forward (causal, full), bytes kept for backward, modules that free it, messages."""

    name: str
    forward_s: float
    backward_s: float
    flops: tuple[float, float] = (0.0, 0.0)
    saved: float = 0.0
    modules: frozenset[str] = frozenset()
    messages: tuple[Msg, ...] = ()
    wgrad_s: float = 0.0


@dataclass
class Times:
    """Seconds of one pass by component."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("compute", "tp", "cp", "ep", "dp", "host"), 0.0))

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def add(self, other: Times, times: float = 1.0) -> None:
        for name, value in other.parts.items():
            self.parts[name] += times * value


@dataclass
class PieceCost:
    forward: Times
    backward: Times
    recompute: Times
    saved: float
    kept: float
    dense: float
    expert: float


class Reference:
    """All figures of one layout whose stages are given."""

    def __init__(self, problem: Problem, layout: Layout, profile: Profile | None = None) -> None:
        self.problem, self.layout = problem, layout
        self.model, self.cluster, self.workload = problem.model, problem.cluster, problem.workload
        self.device = self.cluster.accelerator
        self.profile = profile or load_profile(self.device.name)
        self.stack = problem.stack.with_figures(self.profile.stack_figures(problem.stack, self.device.name))
        self.levels = self.cluster.levels
        self.unit_sizes = self.cluster.allocated_sizes(problem.devices)
        self.groups = groups(layout) | {"dp_cp": self._dp_cp_groups()}
        self.tokens = layout.micro_batch * self.workload.seq_len / layout.cp
        self.sp = layout.tp if layout.sequence_parallel else 1
        self.linear = 1.0 if self.workload.precision in ("fp8", "fp4") else BF16
        self.keeps = self.stack.footprint
        self.sent_gradient = self.stack.reduced_gradient_bytes or self.stack.gradient_bytes
        self.recompute = Recompute.parse(layout.recompute)
        self.sharding, self.hsdp = parse_sharding(layout.optimizer_sharding)  # 0 none, 1 zero1, 2 zero2, 3 zero3, 4 hsdp
        self.offload = parse_offload(layout.offload)[0]
        mtp = self.model.mtp.layers if self.model.mtp else 0
        self.heads = 1 + mtp
        self.blocks = [*self.model.layer_kinds, *["mtp"] * mtp]
        unit = self.stack.vocab_divisor * layout.tp
        self.vocab = ceil((self.workload.vocab_size or self.model.vocab_size) / unit) * unit
        self.chunks = self._chunks()

    # ---- kernels -------------------------------------------------------------------------------------------------

    def memory_s(self, moved: float, share: float = 1.0) -> float:
        if moved == 0:
            return 0.0
        rate = share * self.device.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value
        return moved / rate + self.profile.elementwise_launch_s.value

    def gemm_s(self, m: float, n: float, k: float, groups: float | None = None, bf16: bool = False) -> float:
        precision = "bf16" if bf16 and self.workload.precision in ("fp8", "fp4") else self.workload.precision
        curve = self.profile.gemm_curve(precision)
        efficiency = curve.e_max.value / ((1 + curve.m0.value / m) * (1 + curve.n0.value / n) * (1 + curve.k0.value / k))
        kernel_s = 2 * m * n * k * (groups or 1) / (self.device.peak_flops[precision].value * efficiency)
        if groups is None:
            kernel_s += curve.launch_s.value
        else:
            grouped = self.profile.grouped_gemm
            kernel_s = kernel_s / grouped.relative_efficiency.value + grouped.launch_s.value
            if self.stack.expert_gemms == "one by one":
                kernel_s += (groups - 1) * curve.launch_s.value
        roofline_s = self.memory_s(BF16 * (groups or 1) * (m * k + k * n + m * n))
        return max(kernel_s, roofline_s) / self.stack.efficiency.value

    def attention_s(self, flops: float, full_flops: float, keys: float, head_dim: float, backward: bool) -> float:
        curves = self.profile.attention
        if self.stack.attention_kernel == "flash":
            curve, work = (curves.backward, 2.5 * flops) if backward else (curves.forward, flops)
        else:
            curve, work = (curves.unfused_backward, 2 * full_flops) if backward else (curves.unfused_forward, full_flops)
        efficiency = curve.e_max.value / ((1 + curve.seq0.value / keys) * (1 + curve.head_dim0.value / head_dim))
        efficiency *= self.stack.efficiency.value * self.stack.attention_efficiency.value
        return work / (self.device.peak_flops["bf16"].value * efficiency)

    def gemm(
        self,
        name: str,
        m: float,
        n: float,
        k: float,
        saved: float = 0.0,
        modules: str = "",
        messages: tuple[Msg, ...] = (),
        groups: float | None = None,
        bf16: bool = False,
    ) -> Op:
        dgrad_s, wgrad_s = self.gemm_s(m, k, n, groups, bf16), self.gemm_s(n, k, m, groups, bf16)
        flops = 2 * m * n * k * (groups or 1)
        forward_s = self.gemm_s(m, n, k, groups, bf16)
        return Op(name, forward_s, dgrad_s + wgrad_s, (flops, flops), saved, frozenset(modules.split()), messages, wgrad_s)

    def elementwise(
        self, name: str, forward: float, backward: float, saved: float = 0.0, modules: str = "", messages: tuple[Msg, ...] = ()
    ) -> Op:
        share = self.stack.elementwise_efficiency.value
        once_s, back_s = self.memory_s(forward, share), self.memory_s(backward, share)
        return Op(name, once_s, back_s, (0.0, 0.0), saved, frozenset(modules.split()), messages)

    # ---- operators -----------------------------------------------------------------------------------------------

    def into_tp(self, size: float) -> tuple[Msg, ...]:
        """Before a column-parallel GEMM: with SP gather forward, gather again (hidden) and scatter backward; else reduce there."""
        if self.layout.sequence_parallel:
            return (
                Msg("tp", "all_gather", size, 1, 0),
                Msg("tp", "all_gather", size, 0, 1, hidden=True),
                Msg("tp", "reduce_scatter", size, 0, 1, wgrad=True),
            )
        return (Msg("tp", "all_reduce", size, 0, 1, wgrad=True),)

    def out_of_tp(self, size: float) -> tuple[Msg, ...]:
        """After a row-parallel GEMM."""
        if self.layout.sequence_parallel:
            return (Msg("tp", "reduce_scatter", size, 1, 0), Msg("tp", "all_gather", size, 0, 1))
        return (Msg("tp", "all_reduce", size, 1, 0),)

    def norm(self, name: str, width: int, saved: float) -> Op:
        saved += self.keeps.norm_bytes * self.tokens * width / self.sp
        tensor = BF16 * self.tokens * width / self.sp
        passes = (21, 35) if "norm" in self.stack.eager_kernels else (4, 6)
        return self.elementwise(name, passes[0] * tensor, passes[1] * tensor, saved, "layernorm")

    def gemm_input(self, width: int) -> float:
        """Saved input of a dense column-parallel GEMM."""
        return self.linear * self.tokens * width / (1 if self.keeps.gathered_inputs else self.sp)

    def activation(self, name: str, inputs: float, outputs: float, gated: bool, modules: str) -> Op:
        moved = BF16 * (inputs + outputs)
        saved = self.linear * outputs
        if gated and self.keeps.separate_activation:
            saved += BF16 * outputs
        if "activation" in self.stack.eager_kernels:
            return self.elementwise(name, 5 * moved / 3, 3 * moved, saved, modules)
        return self.elementwise(name, moved, 2 * moved, saved, modules)

    def core(self, heads: float, d_qk: int, d_v: int, qkv: float, kv: float) -> Op:
        t, seq, cp = self.tokens, float(self.workload.seq_len), self.layout.cp
        full = 2 * t * heads * (d_qk + d_v) * seq
        keys = seq / cp if self.layout.cp_type == "p2p" else seq
        messages = {
            "p2p": (Msg("cp", "ring", BF16 * t * kv, 1, 2, beside=True),),
            "allgather": (Msg("cp", "all_gather", BF16 * t * kv * cp, 1, 1), Msg("cp", "reduce_scatter", BF16 * t * kv * cp, 0, 1)),
            "a2a": (Msg("cp", "all_to_all", BF16 * t * qkv, 1, 1), Msg("cp", "all_to_all", BF16 * t * heads * d_v, 1, 1)),
        }[self.layout.cp_type]
        once_s, back_s = (self.attention_s(full / 2, full, keys, (d_qk + d_v) / 2, backward) for backward in (False, True))
        kept = FP32 * t * heads if self.stack.attention_kernel == "flash" else 2 * BF16 * t * heads * seq
        if self.keeps.copied_attention:
            kept += BF16 * t * heads * d_v
        return Op("core_attention", once_s, back_s, (full / 2, full), kept, frozenset({"core_attn"}), messages)

    def mixer(self, mixer: Attention | LatentAttention) -> Iterator[Op]:
        h, t, tp = self.model.hidden_size, self.tokens, self.layout.tp
        elementwise = 5 if "rotary" in self.stack.eager_kernels else 1
        latent = isinstance(mixer, LatentAttention)
        yield self.norm("input_norm", h, self.linear * t * h / self.sp if latent else self.gemm_input(h))
        if isinstance(mixer, Attention):
            d, heads = mixer.head_dim, mixer.heads / tp
            kv_heads = max(mixer.kv_heads / tp, 1)
            width = (heads + 2 * kv_heads) * d
            yield self.gemm("qkv_proj", t, width, h, BF16 * t * width, messages=self.into_tp(BF16 * t * h))
            normed = mixer.qk_norm != "none"
            moved = BF16 * t * (heads + kv_heads) * d * (4 if normed else 2) * elementwise
            yield self.elementwise("rotary", moved, moved, BF16 * t * (heads + kv_heads) * d if normed else 0.0)
            yield self.core(heads, d, d, width, 2 * kv_heads * d)
            value = heads * d
        else:
            d_qk, d_v, heads = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim, mixer.heads / tp
            assert mixer.q_lora_rank is not None
            latents = mixer.q_lora_rank + mixer.kv_lora_rank + mixer.qk_rope_head_dim
            yield self.gemm("mla_down_proj", t / self.sp, latents, h, 2 * BF16 * t / self.sp * latents)
            gathered = self.into_tp(BF16 * t * latents)
            yield self.gemm("q_up_proj", t, heads * d_qk, mixer.q_lora_rank, modules="mla_up_proj", messages=gathered)
            up = heads * (mixer.qk_nope_head_dim + d_v)
            qkv = heads * (2 * d_qk + d_v)
            yield self.gemm("kv_up_proj", t, up, mixer.kv_lora_rank, BF16 * t * qkv, "mla_up_proj")
            moved = BF16 * t * (heads * d_qk + up) * 2 * elementwise
            yield self.elementwise("rotary", moved, moved)
            yield self.core(heads, d_qk, d_v, qkv, heads * (d_qk + d_v))
            value = heads * d_v
        yield self.gemm("out_proj", t, h, value, self.linear * t * value, messages=self.out_of_tp(BF16 * t * h))

    def dense_mlp(self, name: str, width: int, gated: bool, modules: str) -> Iterator[Op]:
        h, t, w = self.model.hidden_size, self.tokens, width / self.layout.tp
        first = 2 * w if gated else w
        into = self.into_tp(BF16 * t * h)
        if gated and not self.stack.fused_gate:
            yield self.gemm(f"{name}_up", t, w, h, BF16 * t * w, modules, into)
            alone = () if self.layout.sequence_parallel else (Msg("tp", "all_reduce", BF16 * t * h, 0, 1, wgrad=True),)
            yield self.gemm(f"{name}_gate", t, w, h, BF16 * t * w, modules, alone)
        else:
            yield self.gemm(f"{name}_fc1", t, first, h, BF16 * t * first, modules, into)
        yield self.activation(f"{name}_act", t * first, t * w, gated, modules)
        yield self.gemm(f"{name}_fc2", t, h, w, modules=modules, messages=self.out_of_tp(BF16 * t * h))

    def moe(self, mlp: MoeMlp) -> Iterator[Op]:
        h, etp, local = self.model.hidden_size, self.layout.etp, mlp.experts / self.layout.ep
        t = self.tokens / self.sp
        imbalance = self.workload.expert_imbalance
        rows = t * mlp.top_k * imbalance * etp  # token copies that the fullest rank's experts work on
        w = mlp.width / etp
        first = 2 * w if mlp.gated else w
        copies, sent = BF16 * rows * h, BF16 * t * h * imbalance
        yield self.gemm("router", t, mlp.experts, h, 2 * FP32 * t * mlp.experts, "moe", bf16=True)
        to_experts = (Msg("ep", "dispatch", sent, 1, 1), Msg("etp", "all_gather", copies, 1, 1))
        # An all-to-all sorts tokens by rank before and by expert after; a fused dispatch only spreads what it delivered.
        sorted_bytes = (2 if self.stack.moe_dispatcher == "flex" else 4) * copies
        yield self.elementwise("permute", sorted_bytes, sorted_bytes, self.linear * rows * h, "moe", to_experts)
        yield self.gemm("experts_fc1", rows / local, first, h, BF16 * rows * first, "moe", groups=local)
        if mlp.clamped and not self.stack.cuda_graphs:
            # Gate and up: each read and written, both joined. Backward: gradient and input read, gradient written, both joined.
            yield self.elementwise("experts_clamp", 16 * rows * w, 20 * rows * w, modules="moe moe_act")
        yield self.activation("experts_act", rows * first, rows * w, mlp.gated, "moe moe_act")
        yield self.gemm("experts_fc2", rows / local, h, w, modules="moe", groups=local)
        back = (Msg("etp", "reduce_scatter", copies, 1, 1), Msg("ep", "combine", sent, 1, 1))
        yield self.elementwise("unpermute", sorted_bytes, sorted_bytes, modules="moe", messages=back)
        if mlp.bias and not self.stack.cuda_graphs:
            # bias·p in FP32; out + that; joined; cast back. Then cast; cast of the output's gradient; two products, each reduced.
            forward = 4 + (2 + 4 + 4) + (4 + 4) + (4 + 2)
            backward = (2 + 4) + (4 + 2) + (4 + 4 + 4) + (4 + 4 + 4)
            yield self.elementwise("experts_bias", forward * rows * h, backward * rows * h, modules="moe")
        if mlp.shared_width:
            yield from self.dense_mlp("shared", mlp.shared_width, mlp.gated, "shared_experts moe")

    @property
    def hidden_bytes(self) -> float:
        """Hidden states of a micro-batch as they lie between layers."""
        return BF16 * self.tokens * self.model.hidden_size / self.sp

    def layer(self, kind: str) -> Iterator[Op]:
        layer, h = self.model.kinds[kind], self.model.hidden_size
        assert isinstance(layer.mixer, Attention | LatentAttention)
        yield from self.mixer(layer.mixer)
        yield Op("residual", 0.0, 0.0, saved=self.hidden_bytes)
        dense = isinstance(layer.mlp, DenseMlp)
        yield self.norm("mlp_norm", h, self.gemm_input(h) if dense else self.linear * self.tokens * h / self.sp)
        if isinstance(layer.mlp, DenseMlp):
            yield from self.dense_mlp("mlp", layer.mlp.width, layer.mlp.gated, "mlp")
        else:
            assert isinstance(layer.mlp, MoeMlp)
            yield from self.moe(layer.mlp)

    def embedding(self) -> Op:
        rows = BF16 * self.tokens * self.model.hidden_size
        return self.elementwise("embedding", 2 * rows, 2 * rows, messages=self.out_of_tp(rows))

    def operators(self, piece: str) -> list[Op]:
        h, t, tp = self.model.hidden_size, self.tokens, self.layout.tp
        if piece == "embedding":
            return [self.embedding()]
        if piece == "head":
            per_logit = (22.0, 30.0) if "loss" in self.stack.eager_kernels else (12.0, 6.0)
            logits, copied, spoken = t * self.vocab / tp, 0.0, Msg("tp", "all_reduce", FP32 * t, 3, 0)
            if self.stack.gathered_logits:
                logits, spoken = t * self.vocab, Msg("tp", "all_gather", BF16 * t * self.vocab, 1, 0)
                copied = 2 * BF16 * logits if tp > 1 else 0.0
            head = [
                self.norm("final_norm", h, 2 * BF16 * t * h / self.sp),
                self.gemm("lm_head", t, self.vocab / tp, h, messages=self.into_tp(BF16 * t * h), bf16=True),
                self.elementwise("loss", per_logit[0] * logits + copied, per_logit[1] * logits + copied / tp, messages=(spoken,)),
            ]
            return head * self.heads
        if piece == "mtp":
            assert self.model.mtp is not None
            again = Msg("tp", "all_gather", BF16 * t * h, 1, 1 if self.layout.sequence_parallel else 0)
            messages = (*self.into_tp(2 * BF16 * t * h), again)
            return [
                self.embedding(),
                self.norm("mtp_norms", 2 * h, self.linear * 2 * t * h / self.sp),
                self.gemm("mtp_projection", t, h / tp, 2 * h, BF16 * t * h / self.sp, messages=messages),
                *self.layer(self.model.mtp.kind),
            ]
        return list(self.layer(piece))

    # ---- network -------------------------------------------------------------------------------------------------

    def _dp_cp_groups(self) -> list[list[int]]:
        """Ranks that hold the same dense weights: same tp and pp, any dp and cp; under HSDP the runs of K of them."""
        at = coordinates(self.layout)
        found: dict[tuple[int, int], list[int]] = {}
        for rank, tp, pp in zip(at["rank"], at["tp"], at["pp"], strict=True):
            found.setdefault((int(tp), int(pp)), []).append(int(rank))
        return list(found.values())

    def shards(self) -> tuple[list[list[int]], list[list[int]]]:
        """Groups that shard dense states, and groups of the copies of a shard (HSDP)."""
        whole = self.groups["dp_cp"]
        if self.sharding != 4:
            return whole, []
        k = min(self.hsdp, len(whole[0]))
        inner = [group[i : i + k] for group in whole for i in range(0, len(group), k)]
        return inner, [group[i::k] for group in whole for i in range(k)]

    def place(self, ranks: list[list[int]]) -> list[tuple[float, float]]:
        """(members in a unit, parts joined) at every level, for the group that touches most units there."""
        size = len(ranks[0])
        units = [size]
        for unit in self.unit_sizes[:-1]:
            units.append(min(units[-1], max(len({rank // unit for rank in group}) for group in ranks)))
        units.append(1)
        return [(size / units[i + 1], units[i] / units[i + 1]) for i in range(len(self.levels))]

    def level_bytes(self, message: Msg, ranks: list[list[int]]) -> list[float]:
        """Bytes that a rank sends across each level."""
        at, size = self.place(ranks), len(ranks[0])
        below = [1.0, *(members for members, _ in at[:-1])]
        match message.collective:
            case "all_gather" | "reduce_scatter":
                return [message.bytes * (fan - 1) / members for members, fan in at]
            case "all_reduce":
                return [2 * message.bytes * (fan - 1) / members for members, fan in at]
            case "all_to_all":
                return [message.bytes * (members - inner) / size for (members, _), inner in zip(at, below, strict=True)]
            case "ring":
                units = [size, *(size / members for members, _ in at)]
                edges = [u if u > 1 else 0.0 for u in units]
                return [message.bytes * (size - 1) * (edges[i] - edges[i + 1]) / size for i in range(len(at))]
        assert message.collective in ("dispatch", "combine")
        mlp = self._moe_mlp()
        sent = []
        for level, (members, _), inner in zip(self.levels, at, below, strict=True):
            if self.stack.moe_dispatcher != "flex":
                sent.append(message.bytes * mlp.top_k * (members - inner) / size)
                continue
            # A fabric joins units of the one below; from one to another of them a token goes straight and once.
            fabric = [i for i, other in enumerate(self.levels) if other.efficiency_profile == level.efficiency_profile]
            targets = size / below[fabric[0]]
            hit = targets * (1 - (1 - 1 / targets) ** mlp.top_k)
            if mlp.routing_groups > 1:
                hit = min(hit, mlp.routing_groups_topk * max(targets / mlp.routing_groups, 1.0))
            sent.append(message.bytes * min(hit, mlp.top_k) * (members - inner) / at[fabric[-1]][0])
        return sent

    def message_s(self, message: Msg) -> float:
        return self.collective_s(message, self.groups[message.dimension])

    def collective_s(self, message: Msg, ranks: list[list[int]]) -> float:
        if len(ranks[0]) == 1 or message.bytes == 0:
            return 0.0
        if message.collective == "ring":
            return (len(ranks[0]) - 1) * self.p2p_s(ranks, message.bytes)
        sent = self.level_bytes(message, ranks)
        routed = message.collective in ("dispatch", "combine")
        name = message.collective
        if routed:
            name = f"moe_{name}" if self.stack.moe_dispatcher == "flex" else "all_to_all"
        buffer = sum(sent) if routed else message.bytes
        once_s = self._algorithm_s(name, ranks, sent, buffer)
        at = self.place(ranks)
        crossed = [i for i, (_, fan) in enumerate(at) if fan > 1]
        top = self.levels[crossed[-1]]
        if name != "all_reduce" or len(crossed) > 1 or not top.in_network_reduction:
            return once_s
        if "all_reduce_in_network" not in self.profile.collectives[top.efficiency_profile]:
            return once_s
        once = [message.bytes if i in crossed else 0.0 for i in range(len(at))]
        return min(once_s, self._algorithm_s("all_reduce_in_network", ranks, once, buffer))

    def _algorithm_s(self, name: str, ranks: list[list[int]], sent: list[float], buffer: float) -> float:
        at = self.place(ranks)
        fabrics: dict[str, float] = {}
        delay_s = 0.0
        inner_curve = self._curve(name, 0)
        kept = max(inner_curve.passes * buffer - sum(sent), 0.0)
        for i, ((_, fan), level) in enumerate(zip(at, self.levels, strict=True)):
            if fan <= 1:
                continue
            curve = self._curve(name, i)
            local = inner_curve.local_cost.value if i == 0 and inner_curve.local_cost else 0.0
            rate = self.bandwidth(level) * self.reached(level) * curve.efficiency.value
            assert level.kind == "switched"
            ramp = 1 + (curve.half_bytes.value / max(buffer, 1.0)) ** curve.gamma.value
            fabrics.setdefault(level.efficiency_profile, 0.0)
            rails = 1.0  # a ring of one rail carries what all ranks of the unit below would have sent
            if self.stack.rails == "one" and level.efficiency_profile == "scale-out" and name != "all_to_all" and i:
                rails = at[i - 1][0]
            fabrics[level.efficiency_profile] += (sent[i] * rails + local * kept) / rate * ramp
            hop_s = curve.hop_latency_s.value if curve.hop_latency_s else level.latency_s.value
            at_once = name in ("all_to_all", "moe_dispatch", "moe_combine")
            steps = 1.0 if at_once else inner_curve.passes * min(fan - 1, 2 * ceil(log2(fan)))
            delay_s += steps * hop_s
        outermost = max(i for i, (_, fan) in enumerate(at) if fan > 1)
        return self._curve(name, outermost).launch_s.value + delay_s + max(fabrics.values())

    def bandwidth(self, level: Level) -> float:
        """What one device can send across a level."""
        return level.bandwidth_bytes_per_s.value / level.devices_per_nic / level.oversubscription

    def reached(self, level: Level) -> float:
        """Share of it that the stack's collectives reach."""
        if level.efficiency_profile != "scale-out":
            return self.stack.scale_up_efficiency.value
        congested = (64 / self.problem.devices) ** self.stack.scale_out_congestion.value
        return self.stack.scale_out_efficiency.value * congested

    def _curve(self, name: str, level: int) -> CollectiveCurve:
        section = self.profile.collectives[self.levels[level].efficiency_profile]
        return section.get(name) or section[name.removesuffix("_in_network")]

    def p2p_s(self, ranks: list[list[int]], size: float) -> float:
        """One message between the members of the group that lie furthest apart."""
        crossed = [i for i, (_, fan) in enumerate(self.place(ranks)) if fan > 1]
        if not crossed:
            return 0.0
        level, curve = self.levels[crossed[-1]], self._curve("p2p", crossed[-1])
        rate = self.bandwidth(level) * curve.efficiency.value
        ramp = 1 + (curve.half_bytes.value / max(size, 1.0)) ** curve.gamma.value
        return level.latency_s.value + curve.launch_s.value + size / rate * ramp

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _moe_mlp(self) -> MoeMlp:
        return next(kind.mlp for kind in self.model.kinds.values() if isinstance(kind.mlp, MoeMlp))

    def recomputed(self, op: Op) -> bool:
        if self.recompute.mode in (2, 3):
            return True
        return self.recompute.mode == 1 and bool(op.modules & set(self.recompute.module_names))

    def weights(self, piece: str) -> tuple[float, float]:
        """Parameters of a piece on one rank: dense, expert."""
        h, tp = self.model.hidden_size, self.layout.tp
        norm = h * (2 if self.model.norm == "layer" else 1)
        published = self.model.vocab_size
        if piece == "embedding":
            return self.vocab * h / (1 if self.keeps.replicated_embedding else tp), 0.0
        if piece == "head":
            matrix = 0 if self.model.tied_embeddings else published * h / tp
            return (matrix + norm) * self.vocab / published, 0.0
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
        slowdown = self.cluster.compute_slowdown_beside_communication
        slow = slowdown.value if slowdown else 0.0
        for op in self.operators(name):
            one_way = []
            for compute_s, side in ((op.forward_s, "forward"), (op.backward_s, "backward")):
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
                    times.parts[component] += whole_s - hidden_s + hidden_s * slow
                one_way.append(times)
            forward.add(one_way[0])
            backward.add(one_way[1])
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
            self._fsdp(forward, backward, recompute, dense, expert)
        kind = self.model.kinds[self.model.mtp.kind if name == "mtp" and self.model.mtp else name] if layer else None
        if kind is not None:
            floor_s, wait_s = self.stack.host_floor_dense_s.value, 0.0
            if isinstance(kind.mlp, MoeMlp):
                floor_s = self.stack.host_floor_moe_s.value
                for module in self.stack.graph_modules:
                    if module in self.stack.graph_shares:
                        floor_s -= self.stack.graph_shares[module].value * self.stack.host_floor_moe_s.value
                if self.workload.precision in ("fp8", "fp4"):
                    floor_s *= self.stack.host_floor_casts.value
                floor_s += kind.mlp.experts // self.layout.ep * self.stack.host_floor_per_expert_s.value
                wait_s = self.stack.host_wait_moe_s.value
            if self.layout.pp > 1:
                floor_s += self.stack.host_floor_pipeline_s.value * self.layout.tp
            each_s = self.stack.host_floor_per_collective_s.value
            once, back = self.tp_calls(name, "forward") * each_s, self.tp_calls(name, "backward") * each_s
            forward.parts["host"] = max(floor_s + once - forward.total, wait_s)
            backward.parts["host"] = max(floor_s + back - backward.total, 0.0)
            if self.recompute.mode in (2, 3):
                recompute.parts["host"] = max(floor_s + once - recompute.total, wait_s)
        return PieceCost(forward, backward, recompute, saved, kept, dense, expert)

    def tp_calls(self, name: str, side: str) -> float:
        """TP collectives of one pass over a layer, hidden ones aside."""
        if self.layout.tp == 1:
            return 0.0
        messages = [m for op in self.operators(name) for m in op.messages if m.dimension == "tp" and not m.hidden]
        return sum(getattr(message, side) for message in messages)

    def _fsdp(self, forward: Times, backward: Times, recompute: Times, dense: float, expert: float) -> None:
        """Weights gathered forward and backward (ZeRO-3), gradients scattered (ZeRO-2 too), per layer and micro-batch."""
        share = self.stack.overlap.fsdp
        for parameters, ranks in ((dense, self.shards()[0]), (expert, self.groups["edp"])):
            gather_s = self.collective_s(Msg("dp", "all_gather", BF16 * parameters, 1, 1), ranks) if self.sharding >= 3 else 0.0
            scatter_s = self.collective_s(Msg("dp", "reduce_scatter", self.sent_gradient * parameters, 1, 1), ranks)
            forward.parts["dp"] += gather_s - min(gather_s * share, forward.parts["compute"])
            both_s = gather_s + scatter_s
            backward.parts["dp"] += both_s - min(both_s * share, backward.parts["compute"] + recompute.parts["compute"])

    # ---- stages --------------------------------------------------------------------------------------------------

    def _chunks(self) -> list[list[tuple[str, bool]]]:
        """(piece, recomputed) of every virtual chunk, in the order of the pipeline."""
        depth = {0: 0, 1: inf, 2: self.recompute.layers, 3: inf}[self.recompute.mode]
        found = []
        for v in range(self.layout.vpp):
            for stage in self.layout.stages:
                chunk = stage.chunks[v]
                layers = self.blocks[chunk.layers[0] : chunk.layers[1] + 1] if chunk.layers else []
                held = [(name, i < depth) for i, name in enumerate([*layers, *["mtp"] * chunk.mtp])]
                held += [("embedding", False)] if chunk.embedding else []
                held += [("head", False)] if chunk.loss else []
                found.append(held)
        return found

    def costs(self) -> dict[str, PieceCost]:
        return {name: self.piece(name) for name in (*dict.fromkeys(self.blocks), "embedding", "head")}

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
                activations[c] += cost.kept if again else cost.saved
        if len(self.chunks) > 1 and (self.model.tied_embeddings or self.model.mtp):
            dense[-1] += costs["embedding"].dense
        p2p_s = self.p2p_s(self.groups["pp"], self.hidden_bytes)
        if self.stack.scattered_p2p and pp > 1 and not self.layout.sequence_parallel:
            p2p_s = self.p2p_s(self.groups["pp"], self.hidden_bytes / self.layout.tp)
            p2p_s += self.message_s(Msg("tp", "all_gather", self.hidden_bytes, 1, 0))
        if self.layout.schedule == "interleaved":
            p2p_s *= 1 - self.stack.overlap.pp_interleaved
        paths, still = self._paths_s(costs, f, b, p2p_s), self._paths_s(costs, f, b, 0.0)
        stage_of = [[c for c in range(pp * vpp) if c % pp == s] for s in range(pp)]
        after = [self._after_s(costs, f, b, dense, expert, stage_of, s) for s in range(pp)]
        totals = [path + sum(after[s].values()) for s, path in enumerate(paths)]
        critical = max(range(pp), key=lambda s: totals[s])
        step_s = totals[critical] + self.stack.step_overhead_s.value
        breakdown = self._breakdown(costs, stage_of[critical], m, paths[critical], still[critical], after[critical])
        memory = [self._memory(costs, dense, expert, activations, stage_of[s], s) for s in range(pp)]
        return step_s, breakdown, memory

    def _paths_s(self, costs: dict[str, PieceCost], f: list[float], b: list[float], p2p_s: float) -> list[float]:
        """Longest path through each stage."""
        pp, vpp, m = self.layout.pp, self.layout.vpp, self.layout.num_microbatches
        if vpp > 1:
            exact = simulate(self.layout.schedule, pp, vpp, m, np.array(f), np.array(b), p2p_s).step_s
            closed = paths_s("interleaved", pp, vpp, np.array([f]), np.array([b]), p2p_s, m, closed_form=True)[0]
            return [float(path + exact - closed.max()) for path in closed]
        # Other stages than one's own are taken with the mean of the recomputed layers at block depth K.
        every = self.recompute.mode != 2 or self.recompute.layers >= len(self.blocks)
        redone = [sum(costs[name].recompute.total for name, again in chunk if again) for chunk in self.chunks]
        if not every:
            all_s = sum(costs[name].recompute.total for name in self.blocks)
            redone_mean = all_s / pp * min(self.recompute.layers * pp / len(self.blocks), 1.0)
        else:
            redone_mean = 0.0
        elsewhere = [f[s] + b[s] - (0.0 if every else redone[s] - redone_mean) for s in range(pp)]
        whole_s, paths = sum(elsewhere), []
        for s in range(pp):
            x, behind = f[s] + b[s], pp - 1 - s
            before = sum(elsewhere[:s]) + 2 * s * p2p_s
            loop = whole_s - sum(elsewhere[:s]) + 2 * behind * p2p_s  # down from this stage and back up to it
            warm_up = min(behind, m - 1)
            steady = [before + m * x]  # every micro-batch on this stage
            steady += [before + loop + (m - 1) * x - warm_up * min(f[s], b[s])]  # one micro-batch all the way, then this stage
            turns = (m - 1) // (behind + 1)
            if turns:  # the first and the last micro-batch all the way
                steady += [before + 2 * loop + (m - 1 - behind - 1) * x]
            front = max(m - 1 - warm_up - 1, 0) // (s + 1) * max(before - s * x, 0.0)
            longest = max(steady) + front
            if turns:
                longest = max(longest, before + (1 + turns) * loop + (m - 1 - turns * (behind + 1)) * x)
            paths.append(longest)
        return paths

    def _after_s(
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
        gradients = weights = optimizer = offload = 0.0
        memory = self.device.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value
        touched = 2 * self.stack.optimizer_bytes + self.stack.gradient_bytes + BF16
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
                gradients += self.collective_s(Msg("dp", kind, buffer, 1, 0), ranks) * mine / mean
            if self.sharding in (1, 2):
                weights += self.collective_s(Msg("dp", "all_gather", BF16 * mean, 1, 0), ranks) * mine / mean
            if self.sharding == 4 and held is dense:
                reduced = Msg("dp", "all_reduce", buffer / len(ranks[0]), 1, 0)
                gradients += self.collective_s(reduced, copies) * mine / mean
            share = 1 / len(ranks[0]) if self.sharding else 1.0
            optimizer += mine * share * touched * (1 - self.offload) / memory
            host = self.cluster.host_link
            if self.stack.offloaded_step == "host":
                copied, stepped_s = FP32 + BF16, touched / host.memory_bandwidth_bytes_per_s.value
            else:
                copied, stepped_s = 2 * self.stack.optimizer_bytes, touched / memory
            copied_s = copied / host.bandwidth_bytes_per_s.value * (1 - self.stack.overlap.offload)
            offload += mine * share * self.offload * (copied_s + stepped_s)
        # Compute that the traffic can hide behind: this stage's and that of the stages before it, where no block depth blurs it.
        own_f, own_b = (sum(part[c] for c in stage_of[stage]) for part in (f, b))
        before_f, before_b = self._before(costs, f, b, stage_of, stage)
        overlap = self.stack.overlap
        exposed = gradients - min(gradients * overlap.dp_gradients, own_b + before_b)
        exposed += weights - min(weights * overlap.dp_parameters, own_f + before_f)
        return {"dp": exposed, "optimizer": optimizer, "offload": offload}

    def _before(
        self, costs: dict[str, PieceCost], f: list[float], b: list[float], stage_of: list[list[int]], stage: int
    ) -> tuple[float, float]:
        before = [c for s in range(stage) for c in stage_of[s]]
        forward, backward = sum(f[c] for c in before), sum(b[c] for c in before)
        if self.layout.vpp == 1 and self.recompute.mode == 2 and self.recompute.layers < len(self.blocks):
            redone = [sum(costs[name].recompute.total for name, again in chunk if again) for chunk in self.chunks]
            mean = sum(costs[name].recompute.total for name in self.blocks) / self.layout.pp
            mean *= min(self.recompute.layers * self.layout.pp / len(self.blocks), 1.0)
            backward += stage * mean - sum(redone[:stage])
        return forward, backward

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
            "offload": after["offload"],
            "host": busy.parts["host"] + self.stack.step_overhead_s.value,
        }

    # ---- memory --------------------------------------------------------------------------------------------------

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
            if self.sharding >= 3 and pp > 1 and self.keeps.gathered_stages:
                terms["weights"] += BF16 * parameters
            if self.sharding < 2:
                terms["gradients"] += (self.stack.gradient_bytes + self.keeps.compute_gradient_bytes) * parameters
            elif m > 1 and self.keeps.unsharded_gradient_bytes:
                terms["gradients"] += self.keeps.unsharded_gradient_bytes * parameters
            else:
                terms["gradients"] += self.stack.gradient_bytes * parameters / count
            states = self.stack.optimizer_bytes * parameters / (count if self.sharding >= 1 else 1)
            terms["optimizer"] += states * (1 - self.offload)
        # Micro-batches in flight; an interleaved stage holds chunks, each a vpp-th of it on average.
        flight = min(pp - stage, m) if vpp == 1 else min(m * vpp, 2 * (pp - 1 - stage) + (vpp - 1) * pp + 1) / vpp
        terms["activations"] = sum(activations[c] for c in held) * flight
        terms["transient"] = self._transient(costs, last=stage == pp - 1)
        talking = [name for name in ("tp", "cp", "pp", "dp", "ep", "etp", "edp") if getattr(self.layout, name) > 1]
        terms["communicators"] = len(talking) * self.cluster.communicator_bytes.value
        return terms

    def _transient(self, costs: dict[str, PieceCost], last: bool) -> float:
        layers = {name: costs[name] for name in self.blocks}
        again = max(cost.saved - cost.kept for cost in layers.values())
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
            logits = (self.keeps.logit_bytes + (self.heads - 1) * FP32) * self.tokens * columns
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

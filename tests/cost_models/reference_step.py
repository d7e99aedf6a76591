"""One layout priced by hand: plain floats and loops, written from the formulas and not from the code under test.

Covers what the tests price: dense GQA layers, MLA, mixtures of experts with or without a shared expert, MTP, every cp type, ZeRO
and HSDP, recompute, offload, 1F1B and interleaving. Only catalog records and profile figures are read; explicit rank groups take
the place of sizes and strides, and an event simulation that of the replayed recurrence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, comb, inf, log2

import numpy as np
from paraplan.cost_models.pipeline import stage_ends_s
from paraplan.cost_models.profile import CollectiveCurve, Profile, load_profile
from paraplan.cost_models.timeline import FORWARD, build_schedule, simulate
from paraplan.optimizer.ranks import coordinates, groups
from paraplan.search_spaces.cluster import Level
from paraplan.search_spaces.layout import Layout, Problem, Recompute, parse_offload, parse_sharding
from paraplan.search_spaces.model import Attention, DenseMlp, LatentAttention, MoeMlp

BF16, FP32 = 2.0, 4.0
COMPONENTS = ("compute", "tp", "cp", "ep", "dp", "host", "offload")


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

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0.0))

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
    moved: tuple[float, float]  # of what is saved, and of what is kept, the bytes that leave
    dense: float
    expert: float


def units_hit(mlp: MoeMlp, units: int) -> float:
    """Of `units` that hold the experts in equal runs, how many a token goes to, by counting the choices that leave one out."""
    each, k = mlp.experts // units, mlp.top_k
    if mlp.routing_groups <= 1:
        return units * (1 - comb(mlp.experts - each, k) / comb(mlp.experts, k))
    groups, limit, group = mlp.routing_groups, mlp.routing_groups_topk, mlp.experts // mlp.routing_groups
    opened = limit * group
    if each <= group:
        return units * limit / groups * (1 - comb(opened - each, k) / comb(opened, k))
    mine = each // group
    left_out = sum(
        comb(mine, j) * comb(groups - mine, limit - j) / comb(groups, limit) * comb(opened - j * group, k) / comb(opened, k)
        for j in range(min(mine, limit) + 1)
    )
    return units * (1 - left_out)


class Reference:
    """All figures of one layout whose stages are given."""

    def __init__(self, problem: Problem, layout: Layout, profile: Profile | None = None) -> None:
        self.problem, self.layout = problem, layout
        self.model, self.cluster, self.workload = problem.model, problem.cluster, problem.workload
        self.device = self.cluster.accelerator
        self.profile = profile or load_profile(self.device.name)
        self.stack = problem.stack.with_figures(self.profile.stack_figures(problem.stack, self.device.name))
        self.levels = self.cluster.levels
        self.unit_sizes = problem.allocated_sizes
        self.groups = groups(layout) | {"dp_cp": self._dp_cp_groups()}
        self.tokens = layout.micro_batch * self.workload.seq_len / layout.cp
        self.sp = layout.tp if layout.sequence_parallel else 1
        self.linear = 1.0 if self.workload.precision in ("fp8", "fp4") else BF16
        self.keeps = self.stack.footprint
        self.sent_gradient = self.stack.reduced_gradient_bytes or self.stack.gradient_bytes
        self.recompute = Recompute.parse(layout.recompute)
        self.sharding, self.hsdp = parse_sharding(layout.optimizer_sharding)  # 0 none, 1 zero1, 2 zero2, 3 zero3, 4 hsdp
        if self.sharding == 2 and layout.pp > 1 and self.keeps.gathered_stages:
            self.sharding = 3  # stages that stay gathered from the first micro-batch to the last let weights go after neither pass
        self.offload, self.leaving = parse_offload(layout.offload)
        mtp = self.model.mtp.layers if self.model.mtp else 0
        self.heads = 1 + mtp
        self.blocks = [*self.model.layer_kinds, *["mtp"] * mtp]
        unit = self.stack.vocab_divisor * layout.tp
        self.vocab = ceil((self.workload.vocab_size or self.model.vocab_size) / unit) * unit
        self.chunks = self._chunks()

    # ---- kernels -------------------------------------------------------------------------------------------------

    def memory_s(self, moved: float, share: float = 1.0, kernels: int = 1) -> float:
        if moved == 0:
            return 0.0
        rate = share * self.device.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value
        return moved / rate + kernels * self.profile.elementwise_launch_s.value

    def cast_s(self, values: float) -> float:
        """Operands that are cast to FP8 by kernels of their own."""
        if self.workload.precision not in ("fp8", "fp4"):
            return 0.0
        return self.memory_s(self.stack.fp8_cast_bytes * values, self.stack.elementwise_efficiency.value)

    def gemm_s(self, m: float, n: float, k: float, groups: float | None = None, bf16: bool = False) -> float:
        precision = "bf16" if bf16 and self.workload.precision in ("fp8", "fp4") else self.workload.precision
        curve = self.profile.gemm_curve(precision)
        efficiency = curve.e_max.value / ((1 + curve.m0.value / m) * (1 + curve.n0.value / n) * (1 + curve.k0.value / k))
        kernel_s = 2 * m * n * k * (groups or 1) / (self.device.peak_flops[precision].value * efficiency)
        if groups is None or self.stack.expert_gemms == "one by one":
            kernel_s += (groups or 1) * curve.launch_s.value
        else:
            grouped = self.profile.grouped_gemm
            kernel_s = kernel_s / grouped.relative_efficiency.value + grouped.launch_s.value
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
        if groups and self.stack.expert_gemms == "one by one" and self.stack.fused_accumulation:
            moved = (2 * self.stack.gradient_bytes - BF16) * n * k * groups  # a buffer read and written, in place of a BF16 write
            wgrad_s += moved / (self.device.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value)
        flops = 2 * m * n * k * (groups or 1)
        forward_s, backward_s = self.gemm_s(m, n, k, groups, bf16), dgrad_s + wgrad_s
        if not bf16:  # input and weight; output gradient and weight, output gradient and input
            forward_s += self.cast_s((m * k + n * k) * (groups or 1))
            backward_s += self.cast_s((2 * m * n + n * k + m * k) * (groups or 1))
        return Op(name, forward_s, backward_s, (flops, flops), saved, frozenset(modules.split()), messages, wgrad_s)

    def elementwise(
        self,
        name: str,
        forward: float,
        backward: float,
        saved: float = 0.0,
        modules: str = "",
        messages: tuple[Msg, ...] = (),
        kernels: tuple[int, int] = (1, 1),
    ) -> Op:
        share = self.stack.elementwise_efficiency.value
        once_s, back_s = self.memory_s(forward, share, kernels[0]), self.memory_s(backward, share, kernels[1])
        return Op(name, once_s, back_s, (0.0, 0.0), saved, frozenset(modules.split()), messages)

    # ---- operators -----------------------------------------------------------------------------------------------

    def into_tp(self, size: float, linears: int = 1, bf16: bool = False) -> tuple[Msg, ...]:
        """Before a column-parallel GEMM: with SP gather forward, gather again (hidden) and scatter backward; else reduce there.

        Each of several linears does so alone, where the stack does not share what they gather.
        """
        times = 1 if self.stack.shared_gathers else linears
        if self.layout.sequence_parallel:
            gathered = size if bf16 else size * self.gathered_width
            return (
                Msg("tp", "all_gather", gathered, times, 0),
                Msg("tp", "all_gather", gathered, 0, 1, hidden=True),
                Msg("tp", "reduce_scatter", size, 0, times, wgrad=True),
            )
        return (Msg("tp", "all_reduce", size, 0, times, wgrad=True),)

    def out_of_tp(self, size: float, bf16: bool = False) -> tuple[Msg, ...]:
        """After a row-parallel GEMM."""
        if self.layout.sequence_parallel:
            gathered = size if bf16 else size * self.gathered_width
            return (Msg("tp", "reduce_scatter", size, 1, 0), Msg("tp", "all_gather", gathered, 0, 1))
        return (Msg("tp", "all_reduce", size, 1, 0),)

    @property
    def gathered_width(self) -> float:
        """Of a linear's tensor when TP gathers it, over BF16."""
        return 0.5 if self.stack.fp8_gathers and self.workload.precision in ("fp8", "fp4") else 1.0

    def norm(self, name: str, width: int, saved: float) -> Op:
        saved += self.keeps.norm_bytes * self.tokens * width / self.sp
        tensor = BF16 * self.tokens * width / self.sp
        if "norm" in self.stack.eager_kernels:
            return self.elementwise(name, 21 * tensor, 35 * tensor, saved, "layernorm", kernels=(7, 12))
        return self.elementwise(name, 4 * tensor, 6 * tensor, saved, "layernorm")

    def gemm_input(self, width: int) -> float:
        """Saved input of a dense column-parallel GEMM."""
        return self.linear * self.tokens * width / (1 if self.keeps.gathered_inputs else self.sp)

    def activation(self, name: str, inputs: float, outputs: float, gated: bool, modules: str) -> Op:
        moved = BF16 * (inputs + outputs)
        saved = self.linear * outputs
        if gated and self.keeps.separate_activation:
            saved += BF16 * outputs
        if "activation" in self.stack.eager_kernels:
            return self.elementwise(name, 5 * moved / 3, 3 * moved, saved, modules, kernels=(2, 4))
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
        kept = FP32 * t * heads if self.stack.attention_kernel == "flash" else self.keeps.score_bytes * t * heads * seq
        if self.keeps.copied_attention:
            kept += BF16 * t * heads * d_v
        return Op("core_attention", once_s, back_s, (full / 2, full), kept, frozenset({"core_attn"}), messages)

    def mixer(self, mixer: Attention | LatentAttention) -> Iterator[Op]:
        h, t, tp = self.model.hidden_size, self.tokens, self.layout.tp
        scaled = isinstance(mixer, Attention) and mixer.scaled_rotary  # YaRN's factor, which no fused kernel knows
        elementwise, chain = (5, (10, 10)) if scaled or "rotary" in self.stack.eager_kernels else (1, (1, 1))
        latent = isinstance(mixer, LatentAttention)
        yield self.norm("input_norm", h, self.linear * t * h / self.sp if latent else self.gemm_input(h))
        if isinstance(mixer, Attention):
            d, heads = mixer.head_dim, mixer.heads / tp
            kv_heads = max(mixer.kv_heads / tp, 1)
            width = (heads + 2 * kv_heads) * d
            yield self.gemm("qkv_proj", t, width, h, BF16 * t * width, messages=self.into_tp(BF16 * t * h, linears=3))
            normed = mixer.qk_norm != "none"
            moved = BF16 * t * (heads + kv_heads) * d * (4 if normed else 2) * elementwise
            kept = BF16 * t * (heads + kv_heads) * d if normed else 0.0
            yield self.elementwise("rotary", moved, moved, kept, kernels=chain)
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
            yield self.elementwise("rotary", moved, moved, kernels=chain)
            yield self.core(heads, d_qk, d_v, qkv, heads * (d_qk + d_v))
            value = heads * d_v
        yield self.gemm("out_proj", t, h, value, self.linear * t * value, messages=self.out_of_tp(BF16 * t * h))

    def dense_mlp(self, name: str, width: int, gated: bool, modules: str) -> Iterator[Op]:
        h, t, w = self.model.hidden_size, self.tokens, width / self.layout.tp
        first = 2 * w if gated else w
        if gated and not self.stack.fused_gate:
            into = self.into_tp(BF16 * t * h)
            yield self.gemm(f"{name}_up", t, w, h, BF16 * t * w, modules, into)
            alone = () if self.layout.sequence_parallel else (Msg("tp", "all_reduce", BF16 * t * h, 0, 1, wgrad=True),)
            yield self.gemm(f"{name}_gate", t, w, h, BF16 * t * w, modules, alone if self.stack.shared_gathers else into)
        else:
            into = self.into_tp(BF16 * t * h, linears=2 if gated else 1)
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
        slower = (
            1.0 if self.stack.cuda_graphs else 1 / self.profile.by_value_share.value
        )  # kernels that go value by value, which no graph of a step holds
        if mlp.clamped:
            # Gate and up: each read and written, both joined. Backward: gradient and input read, gradient written, both joined.
            yield self.elementwise("experts_clamp", 16 * slower * rows * w, 20 * slower * rows * w, modules="moe moe_act")
        yield self.activation("experts_act", rows * first, rows * w, mlp.gated, "moe moe_act")
        yield self.gemm("experts_fc2", rows / local, h, w, modules="moe", groups=local)
        back = (Msg("etp", "reduce_scatter", copies, 1, 1), Msg("ep", "combine", sent, 1, 1))
        weighed = self.keeps.combined_bytes * t * mlp.top_k * h  # a rank's own tokens, however full the experts were
        yield self.elementwise("unpermute", sorted_bytes, sorted_bytes, weighed, "moe", back)
        if mlp.bias:
            # bias·p in FP32; out + that; joined; cast back. Then cast; cast of the output's gradient; two products, each reduced.
            forward = 4 + (2 + 4 + 4) + (4 + 4) + (4 + 2)
            backward = (2 + 4) + (4 + 2) + (4 + 4 + 4) + (4 + 4 + 4)
            yield self.elementwise("experts_bias", forward * slower * rows * h, backward * slower * rows * h, modules="moe")
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
        yield Op("dropout", 0.0, 0.0, saved=2 * self.keeps.dropout_bytes * self.tokens * h / self.sp)  # of attention, of the MLP
        dense = isinstance(layer.mlp, DenseMlp)
        yield self.norm("mlp_norm", h, self.gemm_input(h) if dense else self.linear * self.tokens * h / self.sp)
        if isinstance(layer.mlp, DenseMlp):
            yield from self.dense_mlp("mlp", layer.mlp.width, layer.mlp.gated, "mlp")
        else:
            assert isinstance(layer.mlp, MoeMlp)
            yield from self.moe(layer.mlp)

    def embedding(self) -> Op:
        rows = BF16 * self.tokens * self.model.hidden_size
        return self.elementwise("embedding", 2 * rows, 2 * rows, messages=self.out_of_tp(rows, bf16=True))

    def operators(self, piece: str) -> list[Op]:
        h, t, tp = self.model.hidden_size, self.tokens, self.layout.tp
        if piece == "embedding":
            return [self.embedding()]
        if piece == "head":
            per_logit = (22.0, 30.0) if "loss" in self.stack.eager_kernels else (12.0, 6.0)
            whole, copied = t * self.vocab, 2 * BF16 * t * self.vocab if tp > 1 else 0.0
            gathered, spoken = [], (Msg("tp", "all_reduce", FP32 * t, 3, 0),)
            if self.stack.gathered_logits:
                gather = (Msg("tp", "all_gather", BF16 * whole, 1, 0),)
                gathered, spoken = [self.elementwise("gathered_logits", copied, copied / tp, messages=gather)], ()
            logits = whole if gathered else whole / tp
            head = [
                self.norm("final_norm", h, 2 * BF16 * t * h / self.sp),
                self.gemm("lm_head", t, self.vocab / tp, h, messages=self.into_tp(BF16 * t * h, bf16=True), bf16=True),
                *gathered,
                self.elementwise("loss", per_logit[0] * logits, per_logit[1] * logits, messages=spoken),
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
            hit = units_hit(mlp, round(targets))
            sent.append(message.bytes * hit * (members - inner) / at[fabric[-1]][0])
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
        at = self.place(ranks)
        if routed and name != "all_to_all":
            copies = message.bytes * units_hit(self._moe_mlp(), len(ranks[0]))  # one to every device with one of a token's experts
            return self._algorithm_s(name, ranks, sent, self.delivered(message, ranks), self.copying_s(name, ranks, copies))
        buffer = message.bytes * self._moe_mlp().top_k if routed else message.bytes
        once_s = self._algorithm_s(name, ranks, sent, buffer)
        if any(self.goes_straight(name, i) for i in range(len(at))):  # on the levels where that can be, by steps on the others
            once_s = min(once_s, self._algorithm_s(f"{name}_direct", ranks, sent, buffer))
        return min(once_s, self.in_switches_s(message, ranks))

    def in_switches_s(self, message: Msg, ranks: list[list[int]]) -> float:
        """An all-reduce through switches that reduce; without end where they do not, or it leaves their fabric."""
        at = self.place(ranks)
        crossed = [i for i, (_, fan) in enumerate(at) if fan > 1]
        top, fabrics = self.levels[crossed[-1]], {self.levels[i].efficiency_profile for i in crossed}
        curves = self.profile.collectives[top.efficiency_profile]
        able = top.in_network_reduction and "all_reduce_in_network" in curves
        if message.collective != "all_reduce" or len(fabrics) > 1 or not able:
            return inf
        once = [message.bytes if i == crossed[-1] else 0.0 for i in range(len(at))]
        return self._algorithm_s("all_reduce_in_network", ranks, once, message.bytes)

    def delivered(self, message: Msg, ranks: list[list[int]]) -> dict[str, float]:
        """Copies that a fused exchange brings to the units which each fabric joins, those of a rank's own in, in bytes."""
        at, found = self.place(ranks), {}
        below = [1.0, *(members for members, _ in at[:-1])]
        for level, inner in zip(self.levels, below, strict=True):
            found.setdefault(level.efficiency_profile, message.bytes * units_hit(self._moe_mlp(), round(len(ranks[0]) / inner)))
        return found

    def copying_s(self, name: str, ranks: list[list[int]], copies: float) -> float:
        """What the multiprocessors of a fused exchange take for its copies, at the outermost level where that is known."""
        crossed = [i for i, (_, fan) in enumerate(self.place(ranks)) if fan > 1]
        for i in range(crossed[-1], -1, -1):
            curve = self._curve(name, i)
            if curve.sm_bytes_per_s:
                tokens = self.tokens / self.sp * self.workload.expert_imbalance
                handled = tokens * curve.handling_bytes.value if curve.handling_bytes else 0.0
                return (copies + handled) / (self.stack.exchange_sms * curve.sm_bytes_per_s.value)
        return 0.0

    def _algorithm_s(
        self, name: str, ranks: list[list[int]], sent: list[float], buffer: float | dict[str, float], copying_s: float = 0.0
    ) -> float:
        at = self.place(ranks)
        fabrics: dict[str, float] = {}
        delay_s = 0.0
        inner_curve = self._curve(name, 0)
        names = [level.efficiency_profile for level in self.levels]
        if isinstance(buffer, dict):  # a fused exchange: what stays in a unit passes through its fabric's kernel too
            through = {fabric: sum(s for s, other in zip(sent, names, strict=True) if other == fabric) for fabric in names}
            copied = [max(buffer[f] - through[f], 0.0) if names.index(f) == i else 0.0 for i, f in enumerate(names)]
            messages = [buffer[fabric] for fabric in names]
        else:
            copied = [max(inner_curve.passes * buffer - sum(sent), 0.0), *[0.0] * (len(names) - 1)]
            messages = [buffer] * len(names)
        for i, ((_, fan), level) in enumerate(zip(at, self.levels, strict=True)):
            if fan <= 1:
                continue
            curve = self._curve(name, i)
            local = curve.local_cost.value if curve.local_cost else 0.0
            rate = self.bandwidth(level) * self.reached(level) * curve.efficiency.value
            links = (fan - 1) / self.peers(i) if level.kind == "full_mesh" else 1.0  # of a device's, those to its group
            ramp = 1 + (self.half_bytes(curve, level) / max(messages[i], 1.0)) ** curve.gamma.value
            fabrics.setdefault(level.efficiency_profile, 0.0)
            fabrics[level.efficiency_profile] += (sent[i] / links + local * copied[i]) / rate * ramp
            hop_s = curve.hop_latency_s.value if curve.hop_latency_s else level.latency_s.value
            exchanged = name in ("all_to_all", "moe_dispatch", "moe_combine")
            further = [other for (_, apart), other in zip(at[i + 1 :], names[i + 1 :], strict=True) if apart > 1]
            if exchanged and ((name == "all_to_all" and further) or names[i] in further):
                continue  # its peers there are sent to while the furthest are: the way to those is what is waited for
            at_once = exchanged or (name.endswith("_direct") and self.goes_straight(name.removesuffix("_direct"), i))
            rings = i == 0 and curve.hop_latency_s is not None  # of servers were measured hop by hop
            steps = 1 if at_once else fan - 1 if rings else min(fan - 1, 2 * ceil(log2(fan)))
            if not name.endswith("_in_network"):  # which has its hop in the launch
                delay_s += inner_curve.passes * steps * hop_s
        outermost = max(i for i, (_, fan) in enumerate(at) if fan > 1)
        return self._curve(name, outermost).launch_s.value + delay_s + (max(fabrics.values()) ** 4 + copying_s**4) ** 0.25

    def goes_straight(self, name: str, i: int) -> bool:
        """A measured curve says so, or a mesh or switch inside the supernode whose library was not measured hop by hop."""
        level, section = self.levels[i], self.profile.collectives[self.levels[i].efficiency_profile]
        inside = i <= [each.name for each in self.levels].index(self.problem.cluster.supernode)
        joined = level.kind in ("full_mesh", "switched") and name != "all_to_all"
        return f"{name}_direct" in section or (inside and joined and section[name].hop_latency_s is None)

    def peers(self, i: int) -> int:
        """Units that a unit of level i is joined to, whether the job has them or not."""
        size, below = self.levels[i].size, self.levels[i - 1].size if i else 1
        assert size is not None and below is not None
        return size // below - 1

    def bandwidth(self, level: Level) -> float:
        """What one device can send across a level."""
        return level.bandwidth_bytes_per_s.value / level.devices_per_nic / level.oversubscription

    def half_bytes(self, curve: CollectiveCurve, level: Level) -> float:
        """What a device's share of an oversubscribed link carries in the time that the curve's own half takes at full rate."""
        return curve.half_bytes.value / level.oversubscription

    def reached(self, level: Level) -> float:
        """Share of it that the stack's collectives reach."""
        if level.efficiency_profile != "scale-out":
            return self.stack.scale_up_efficiency.value
        congested = (64 / self.problem.devices) ** self.stack.scale_out_congestion.value
        return self.stack.scale_out_efficiency.value * congested

    def _curve(self, name: str, level: int) -> CollectiveCurve:
        section = self.profile.collectives[self.levels[level].efficiency_profile]
        return section.get(name) or section[name.removesuffix("_in_network").removesuffix("_direct")]

    def p2p_s(self, ranks: list[list[int]], size: float) -> float:
        """One message between the members of the group that lie furthest apart."""
        crossed = [i for i, (_, fan) in enumerate(self.place(ranks)) if fan > 1]
        if not crossed:
            return 0.0
        return self.message_across_s(crossed[-1], size)

    def message_across_s(self, index: int, size: float) -> float:
        """One message across a level."""
        level, curve = self.levels[index], self._curve("p2p", index)
        rate = self.bandwidth(level) * curve.efficiency.value
        rate /= self.peers(index) if level.kind == "full_mesh" else 1
        ramp = 1 + (self.half_bytes(curve, level) / max(size, 1.0)) ** curve.gamma.value
        return level.latency_s.value + curve.launch_s.value + size / rate * ramp

    def between_stages_s(self, size: float) -> float:
        """One message to the next stage: the mean edge of pipelines that cross most, wraps of interleaved ones in;
        two stages beside the slowest edge take it twice for every two micro-batches, pp stages a mean one 2(pp−1) times for pp.
        """
        pipelines, pp, vpp = self.groups["pp"], self.layout.pp, self.layout.vpp
        if pp == 1:
            return 0.0
        left = [pp - 1]  # edges that leave a unit of each level, innermost first
        for unit in self.unit_sizes:
            left.append(max(sum(a // unit != b // unit for a, b in pairwise(ranks)) for ranks in pipelines))
        across = [
            (self.message_across_s(i, size), before - after) for i, (before, after) in enumerate(pairwise(left)) if before > after
        ]
        slowest = across[-1][0]
        wraps = 1 - 1 / vpp if self.layout.schedule == "interleaved" else 0.0
        mean = (sum(seconds * count for seconds, count in across) + wraps * slowest) / (pp - 1 + wraps)
        return max(mean, slowest * pp / (2 * (pp - 1))) if len(across) > 1 else slowest

    # ---- pieces --------------------------------------------------------------------------------------------------

    def _moe_mlp(self) -> MoeMlp:
        return next(kind.mlp for kind in self.model.kinds.values() if isinstance(kind.mlp, MoeMlp))

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
        slowdown = self.cluster.compute_slowdown_beside_communication
        slow = 1 - 1 / (1 + slowdown.value) if slowdown else 0.0  # work that compute does not get done meanwhile
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
                    delay_s = self.stack.scale_out_delay_s.value if self.leaves(self.groups[message.dimension]) else 0.0
                    times.parts[component] += whole_s - hidden_s + hidden_s * slow
                    times.parts[component] += delay_s * getattr(message, side) if message.bytes else 0.0
                one_way.append(times)
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
        kind = self.model.kinds[self.model.mtp.kind if name == "mtp" and self.model.mtp else name] if layer else None
        if kind is not None:
            floor_s, wait_s = self.stack.host_floor_dense_s.value, 0.0
            if self.stack.eager_kernels and self.layout.tp > 1:
                floor_s *= self.stack.host_floor_eager.value
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
            if self.layout.pp > 1 and self.leaves(self.groups["tp"]):
                each_s += self.stack.scale_out_delay_s.value
            once, back = self.tp_calls(name, "forward") * each_s, self.tp_calls(name, "backward") * each_s
            forward.parts["host"] = max(floor_s + once - forward.total, wait_s)
            backward.parts["host"] = max(floor_s + back - backward.total, 0.0)
            if self.recompute.mode in (2, 3):
                recompute.parts["host"] = max(floor_s + once - recompute.total, wait_s)
        kept = kept if layer else saved
        self._offload(forward, backward, recompute, saved * self.leaving, kept * self.leaving, layer)
        return PieceCost(forward, backward, recompute, saved, kept, (saved * self.leaving, kept * self.leaving), dense, expert)

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
            optimizer += mine * share * touched * (1 - self.offload) / memory
            host = self.cluster.tier(self.workload.offload_to)
            if self.stack.offloaded_step == "host":
                copied, stepped_s = FP32 + BF16, touched / host.memory_bandwidth_bytes_per_s.value
            else:
                copied, stepped_s = 2 * self.stack.optimizer_bytes, touched / memory
            copied_s = copied / host.bandwidth_bytes_per_s.value * (1 - self.stack.overlap.offload)
            offload += mine * share * self.offload * (copied_s + stepped_s)
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

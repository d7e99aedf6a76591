"""Kernels of every piece of a model, by hand."""

from __future__ import annotations

from collections.abc import Iterator

from paraplan.search_spaces.model import Attention, DenseMlp, LatentAttention, MoeMlp
from reference_layout import ReferenceLayout
from reference_records import BF16, FP32, Msg, Op


class ReferenceOperators(ReferenceLayout):
    """Seconds of a kernel, and the kernels of a layer, an embedding and a head."""

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

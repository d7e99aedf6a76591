"""How long an operator's kernels take on one device: roofline with shape-dependent efficiency (Williams et al. 2009)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.cluster import Accelerator
from ..search_spaces.layout import Floats
from ..search_spaces.stack import Stack
from .operators import BF16, Operator
from .profile import AttentionCurve, Profile, attention_efficiency, gemm_s, grouped_gemm_s

FLASH_BACKWARD = 2.5  # GEMMs of the fused backward over the forward's: five for two (arXiv 2205.14135, algorithm 4)


@dataclass(frozen=True)
class Kernels:
    """Kernel times of one accelerator at a GEMM precision, slowed by the stack's efficiency scalar."""

    accelerator: Accelerator
    profile: Profile
    stack: Stack
    precision: str

    def forward_s(self, op: Operator) -> Floats:
        """Seconds of the forward kernels of `op`, (n,)."""
        if op.kind == "attention":
            return self._attention_s(op, 1.0, backward=False)
        if op.kind == "memory":
            return self.elementwise_s(op.forward_bytes + op.zeros, op.kernels[0], op.by_value)
        return self._gemm_s(op, op.m, op.n, op.k) + self._cast_s(op, op.m * op.k + op.n * op.k)

    def backward_s(self, op: Operator) -> Floats:
        """Seconds of the backward kernels of `op`, (n,): for a GEMM dgrad (m×k×n) and wgrad (n×k×m)."""
        if op.kind == "attention":
            return self._attention_s(op, FLASH_BACKWARD if self.stack.attention_kernel == "flash" else 2.0, backward=True)
        if op.kind == "memory":
            return self.elementwise_s(op.backward_bytes + op.zeros, op.kernels[1], op.by_value)
        cast_s = self._cast_s(op, 2.0 * op.m * op.n + op.n * op.k + op.m * op.k)
        return self._gemm_s(op, op.m, op.k, op.n) + self.wgrad_s(op) + cast_s

    def _cast_s(self, op: Operator, values: Floats | float) -> Floats | float:
        """Seconds to cast the operands of a GEMM by kernels of their own, each for each GEMM that it enters."""
        each = self.stack.fp8_cast_bytes
        if not each or op.high_precision or self.precision not in ("fp8", "fp4"):
            return 0.0
        return self.elementwise_s(each * op.groups * values + op.zeros)

    def wgrad_s(self, op: Operator) -> Floats:
        """Seconds of the weight gradient of a GEMM, (n,).

        It is added to a buffer that its epilogue reads and writes. Of one large GEMM that hides behind the products of tiles that
        are not as far; an expert's own GEMM has hardly more tiles than the device has processors, and shows all of it.
        """
        alone = op.kind == "grouped_gemm" and self.stack.expert_gemms == "one by one" and self.stack.fused_accumulation
        added = (2.0 * self.stack.gradient_bytes - BF16) * op.n * op.k * op.groups if alone else 0.0
        return self._gemm_s(op, op.n, op.k, op.m) + added / self._memory_rate

    def elementwise_s(self, moved: Floats, kernels: int = 1, by_value: bool = False) -> Floats:
        """Seconds of `kernels` in a row that only move `moved` bytes through memory together, (n,); `by_value`: `Operator`."""
        share = self.profile.by_value_share.value if by_value else 1.0
        return self._memory_s(moved, self.stack.elementwise_efficiency.value * share, kernels)

    def _gemm_s(self, op: Operator, m: Floats | float, n: Floats | float, k: Floats | float) -> Floats:
        precision = "bf16" if op.high_precision and self.precision in ("fp8", "fp4") else self.precision
        curve, peak = self.profile.gemm_curve(precision), self.peak(precision)
        if op.kind != "grouped_gemm":
            time_s = gemm_s(curve, peak, m, n, k)
        elif self.stack.expert_gemms == "one by one":  # plain GEMMs: each expert's has a launch, a ramp and a tail of its own
            time_s = gemm_s(curve, peak, m, n, k, op.groups) + (op.groups - 1.0) * curve.launch_s.value
        else:
            time_s = grouped_gemm_s(curve, self.profile.grouped_gemm, peak, m, n, k, op.groups)
        moved = BF16 * op.groups * (m * k + k * n + m * n)
        return np.maximum(time_s, self._memory_s(moved + op.zeros)) / self._efficiency + op.zeros

    def _attention_s(self, op: Operator, times: float, backward: bool) -> Floats:
        width = self.stack.tiled_head_dim or op.head_dim
        efficiency = attention_efficiency(self._attention_curve(backward), op.seq, width)
        flops = op.flops if self.stack.attention_kernel == "flash" else op.full_flops  # unfused kernels skip no masked block
        rate = self.peak("bf16") * efficiency * self.stack.attention_efficiency.value * self._efficiency
        return times * flops / rate + op.zeros

    def _attention_curve(self, backward: bool) -> AttentionCurve:
        curves = self.profile.attention
        if self.stack.attention_kernel == "flash":
            return curves.backward if backward else curves.forward
        return curves.unfused_backward if backward else curves.unfused_forward

    def _memory_s(self, moved: Floats, share: float = 1.0, kernels: int = 1) -> Floats:
        launch_s = kernels * self.profile.elementwise_launch_s.value
        return np.where(moved > 0, moved / (self._memory_rate * share) + launch_s, 0.0)

    @property
    def _memory_rate(self) -> float:
        """Bytes per second that kernels which only move data reach."""
        return self.accelerator.memory_bandwidth_bytes_per_s.value * self.profile.memory_efficiency.value

    @property
    def _efficiency(self) -> float:
        return self.stack.efficiency.value

    def peak(self, precision: str) -> float:
        """Dense peak of a precision, FLOP/s."""
        return self.accelerator.peak_flops[precision].value

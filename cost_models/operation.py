"""What an operator is: the columns it reads, its shape and bytes, its messages; and the blocks that every layer kind shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..search_spaces.layout import RECOMPUTE_MODULES, Floats, Ints
from ..search_spaces.stack import Footprint
from .routing import Routing

BF16 = 2.0
FP32 = 4.0
FP8 = 1.0
Kind = Literal["gemm", "grouped_gemm", "attention", "memory"]
CORE_ATTN, LAYERNORM, MOE_ACT, MLA_UP_PROJ, MLP, SHARED_EXPERTS, MOE = (1 << i for i in range(len(RECOMPUTE_MODULES)))

NORM_CHAIN = (7, 12)
"""Kernels of a norm in plain PyTorch, forward (cast, square, mean, scale, cast, weight, residual) and backward, whose chain is
longer by what the mean and both branches add."""
ACTIVATION_CHAIN = (2, 4)  # SiLU and the product with the gate; a gradient of each factor, SiLU's own, their sum


@dataclass(frozen=True)
class Factors:
    """The columns that a layer's cost depends on; all (n,). `linear_bytes` is the width of a saved GEMM input (1 under FP8)."""

    tp: Floats
    cp: Floats
    ep: Floats
    etp: Floats
    micro_batch: Floats
    sequence_parallel: Floats  # 0 or 1
    cp_type: Ints
    seq_len: float
    linear_bytes: float = BF16
    flash: bool = True
    eager: frozenset[str] = frozenset()
    graphed: bool = False  # the whole step is one CUDA graph
    fused_gate: bool = True
    shared_gathers: bool = True
    fp8_gathers: bool = False
    gathered_logits: bool = False
    imbalance: float | Floats = 1.0
    crossing: float = 1.0  # tokens that leave a supernode over those under even routing
    dispatch_bytes: float = BF16
    permuted_copies: float = 4.0  # reads and writes of the routed tokens on either side of the experts
    gathered_tokens: bool = False  # every rank of an expert group gets all of its tokens and picks those of its experts
    footprint: Footprint = field(default_factory=Footprint)

    @property
    def tokens(self) -> Floats:
        return self.micro_batch * self.seq_len / self.cp

    @property
    def sp(self) -> Floats:
        """What SP divides the tokens between blocks by."""
        return np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @property
    def input_sp(self) -> Floats:
        """What SP divides the saved inputs of column-parallel GEMMs by: nothing where they are kept gathered."""
        return np.ones_like(self.tp) if self.footprint.gathered_inputs else self.sp

    @property
    def gathered_share(self) -> float:
        """Bytes of a value that TP gathers for a linear, over those in BF16: one scale per tensor goes without saying."""
        return FP8 / BF16 if self.fp8_gathers else 1.0

    @property
    def zeros(self) -> Floats:
        return np.zeros_like(self.tp)


@dataclass(frozen=True)
class Message:
    """One collective of a dimension: the bytes of its buffer, and how often forward and backward send it.

    "dispatch" and "combine" carry one copy of a rank's tokens, `copy_bytes` each, to their experts and back, as `routing` spreads
    them. A "ring" passes every rank's buffer on from neighbour to neighbour until all have seen it. A `beside` message runs while
    the kernels of its own operator do (ring attention) and exposes the rest; one `beside_wgrad` can run while its operator's weight
    gradient is computed; a `hidden` one costs traffic but no time.
    """

    dimension: Literal["tp", "cp", "ep", "etp"]
    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring", "dispatch", "combine"]
    bytes: Floats
    forward: float | Floats = 1.0
    backward: float | Floats = 1.0
    routing: Routing | None = None
    copy_bytes: float = 0.0
    beside: bool = False
    beside_wgrad: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class Operator:
    """One kernel, or one kind of kernels in a row.

    GEMM: m×n×k forward; dgrad is m×k×n and wgrad n×k×m where it has a weight; grouped: `groups` experts of m tokens each.
    Attention: `flops` forward over `seq` keys and heads of `head_dim`. Memory: bytes read and written. `saved_bytes` stay until
    backward; they are freed when one of `modules` is recomputed. `flops` count a causal mask, `full_flops` do not. A
    `high_precision` GEMM stays in BF16 under FP8 and FP4.
    """

    name: str
    kind: Kind
    zeros: Floats
    modules: int = 0
    m: Floats | float = 0.0
    n: Floats | float = 0.0
    k: Floats | float = 0.0
    groups: Floats | float = 1.0
    flops: Floats | float = 0.0
    full_flops: Floats | float = 0.0
    seq: Floats | float = 1.0
    head_dim: float = 1.0
    forward_bytes: Floats | float = 0.0
    backward_bytes: Floats | float = 0.0
    kernels: tuple[int, int] = (1, 1)  # in a row that move these bytes, forward and backward
    by_value: bool = False  # moved value by value: kernels that broadcast, read views or mix types, and do not stream
    saved_bytes: Floats | float = 0.0
    messages: tuple[Message, ...] = ()
    high_precision: bool = False

    @property
    def forward_flops(self) -> Floats:
        """Executed forward FLOPs of the rank, (n,)."""
        gemm = 2.0 * self.m * self.n * self.k * self.groups if self.kind in ("gemm", "grouped_gemm") else self.flops
        return np.asarray(gemm + self.zeros)

    @property
    def forward_full_flops(self) -> Floats:
        """The same with attention counted over the whole sequence, (n,)."""
        return np.asarray(self.full_flops + self.zeros) if self.kind == "attention" else self.forward_flops


def norm_and_residual(name: str, width: int, f: Factors, output_bytes: Floats) -> Operator:
    """Norm and residual add on the SP share: input and residual read, both written; its output is what the next GEMM saves.

    As a chain of kernels (PyTorch's RMSNorm written out) it works on FP32 copies, each pass over them worth two in BF16: cast,
    square, mean, scale, cast back, weight, residual; and about as many again, with the sums of both branches, backward.
    In plain operators its FP32 input and the normalised tensor that its weight multiplies stay too.
    """
    moved = BF16 * f.tokens * width / f.sp
    apart = f.footprint.norm_bytes * f.tokens * width / f.sp
    eager = "norm" in f.eager
    forward, backward = (21.0, 35.0) if eager else (4.0, 6.0)
    return Operator(
        name,
        "memory",
        f.zeros,
        LAYERNORM,
        forward_bytes=forward * moved,
        backward_bytes=backward * moved,
        kernels=NORM_CHAIN if eager else (1, 1),
        saved_bytes=output_bytes + apart,
    )


def activation(name: str, inputs: Floats, outputs: Floats, gated: bool, f: Factors, module: int) -> Operator:
    """Elementwise activation: reads the first GEMM's output, writes the second one's input, which it saves.

    As a chain (SiLU, then the product with the gate) five tensors pass where three do, backward nine where six do.
    In plain operators a gated one saves act(gate) besides: the product's gradient needs both of its factors.
    """
    moved = BF16 * (inputs + outputs)
    eager = "activation" in f.eager
    forward, backward = (5.0 / 3.0, 3.0) if eager else (1.0, 2.0)
    apart = BF16 * outputs if gated and f.footprint.separate_activation else 0.0
    return Operator(
        name,
        "memory",
        f.zeros,
        module,
        forward_bytes=forward * moved,
        backward_bytes=backward * moved,
        kernels=ACTIVATION_CHAIN if eager else (1, 1),
        saved_bytes=f.linear_bytes * outputs + apart,
    )


def column_parallel(f: Factors, input_bytes: Floats, linears: int = 1) -> tuple[Message, ...]:
    """Input of a column-parallel GEMM, or of several `linears` that are one (Korthikanti et al. 2022, section 4.2.2).

    SP: gathered forward, its gradient scattered backward; the second gather, for wgrad, runs beside dgrad. Without SP only backward
    speaks, one all-reduce. Where a framework parallelises linear by linear, each of them does so for itself.
    """
    sharded = np.where(f.sequence_parallel > 0, input_bytes, 0.0)
    times = 1.0 if f.shared_gathers else float(linears)
    return (
        Message("tp", "all_gather", sharded * f.gathered_share, times, 0.0),
        Message("tp", "all_gather", sharded * f.gathered_share, 0.0, 1.0, hidden=True),
        Message("tp", "reduce_scatter", sharded, 0.0, times, beside_wgrad=True),
        Message("tp", "all_reduce", np.where(f.sequence_parallel > 0, 0.0, input_bytes), 0.0, times, beside_wgrad=True),
    )


def row_parallel(f: Factors, output_bytes: Floats) -> tuple[Message, ...]:
    """Output of a row-parallel GEMM. SP: scattered forward, gathered backward; without SP one all-reduce forward."""
    return (
        Message("tp", "reduce_scatter", np.where(f.sequence_parallel > 0, output_bytes, 0.0), 1.0, 0.0),
        Message("tp", "all_gather", np.where(f.sequence_parallel > 0, output_bytes * f.gathered_share, 0.0), 0.0, 1.0),
        Message("tp", "all_reduce", np.where(f.sequence_parallel > 0, 0.0, output_bytes), 1.0, 0.0),
    )

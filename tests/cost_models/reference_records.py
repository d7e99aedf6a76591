"""What the recomputation by hand speaks of: messages, kernels, and what a piece of the model costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb

from paraplan.search_spaces.model import MoeMlp

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

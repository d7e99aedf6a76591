"""Workload: what is trained per step, and what the user fixes, limits or forbids."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from .model import Frozen

Precision = Literal["bf16", "fp16", "fp8", "fp4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Tier = Literal["host", "pool", "peers"]
"""What is offloaded goes to the host's memory, to that of the supernode's pool, or, of activations, to other stages' devices."""


MEMORY_BAND = 0.15
"""Relative distance from a device's free memory within which a predicted peak does not settle whether a run fits: of 724 published
runs on 80 GB devices those outside it fit or run out as predicted 97 times of 100, those inside 78 times."""

LARGEST_IMBALANCE = 1000.0
"""Tokens of the fullest device over the mean beyond which a figure is taken for a slip."""


class MemoryMargin(Frozen):
    """Part of the device memory kept out of reach, as a fraction of the capacity left after the context.

    A plan keeps `fraction` clear, by default the whole band of doubt; a layout that is only evaluated is refused beyond
    `evaluated`, by default beyond all that the device has.
    """

    fraction: Annotated[float, Field(ge=0, lt=1)] = MEMORY_BAND
    evaluated: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Workload(Frozen):
    """One training step: global batch in sequences, sequence length in tokens, precision and the user's limits.

    `fix` maps a column to the values it may take ({"tp": (8,), "recompute": ("none", "full")}); `forbid` holds comparisons such as
    "pp>16", of which those in `demanded` were written as constraints, "pp<=16"; `inside` maps a level of the network to the
    dimensions whose groups must stay within one of its units. `expert_imbalance` is the tokens of the fullest device over the mean;
    `imbalance_shape` says, by ep, what share of its excess over 1 remains (none: all of it, whatever ep is). `expert_crossing` is
    the copies of tokens that leave a supernode, one to each other that a token goes to, over those under even routing.
    """

    global_batch: Annotated[int, Field(gt=0, le=10_000_000)]
    seq_len: Annotated[int, Field(gt=0, le=100_000_000)]
    precision: Precision = "bf16"
    fix: dict[str, tuple[str, ...]] = {}
    forbid: tuple[str, ...] = ()
    demanded: tuple[str, ...] = ()
    inside: dict[str, tuple[str, ...]] = {}
    memory_margin: MemoryMargin = MemoryMargin()
    offload_to: Tier = "host"
    activation_shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.0,)  # of the activations, that a plan may so offload
    reserved_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of every device, for caches and others' buffers
    expert_imbalance: Annotated[float, Field(ge=1, le=LARGEST_IMBALANCE)] = 1.1  # tokens of the fullest device over the mean
    imbalance_shape: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0, le=1)]] = {}
    expert_crossing: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    vocab_size: Annotated[int, Field(gt=0, le=10_000_000)] | None = None  # where it differs from the model's

    def imbalance_at(self, ep: int) -> float:
        """Tokens of the fullest device over the mean at a degree of expert parallelism."""
        return 1.0 + (self.expert_imbalance - 1.0) * self.imbalance_shape.get(ep, 1.0)

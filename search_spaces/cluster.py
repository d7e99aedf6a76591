"""ClusterSpec: the accelerator, the levels of the network from innermost to outermost, and what sits behind them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from .model import Frozen

Grade = Literal["official", "measured", "announced", "secondary", "assumed"]
"""Where a figure comes from; an assumed one carries an interval and is named in every plan that uses it."""


class Figure(Frozen):
    """A physical figure with its source, its grade and, where it is not certain, an interval."""

    value: NonNegativeFloat
    source: str
    grade: Grade
    low: NonNegativeFloat | None = None
    high: NonNegativeFloat | None = None
    note: str = ""


class Accelerator(Frozen):
    """One device as software addresses it (a rank): a GPU, or a die of a two-die package.

    `peak_flops` are dense rates by GEMM precision ("bf16", "fp16", "fp8", "fp4"); memory in bytes, bandwidth in bytes/s.
    """

    name: str
    vendor: Literal["nvidia", "huawei", "amd", "google", "amazon"]
    peak_flops: dict[str, Figure]
    memory_bytes: Figure
    memory_bandwidth_bytes_per_s: Figure
    power_w: Figure | None = None
    note: str = ""


class Level(Frozen):
    """One tier of the network.

    `size` counts the devices inside one unit of this level (2 for a die pair, 16 for a server, 768 for a supernode); the
    outermost level has none and spans the cluster. `bandwidth_bytes_per_s` is what one device can send across this level, one
    way, when all send at once and nothing is oversubscribed; `oversubscription` divides it for traffic that leaves the unit
    below. On a full mesh a pair of devices sees only 1/(members−1) of it.
    """

    name: str
    size: PositiveInt | None = None
    bandwidth_bytes_per_s: Figure
    latency_s: Figure
    kind: Literal["switched", "full_mesh", "ring", "torus"] = "switched"
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    devices_per_nic: Annotated[float, Field(gt=0)] = 1.0
    in_network_reduction: bool = False
    offload_engine: bool = False  # collectives run beside the compute cores instead of on them
    efficiency_profile: str = "scale-out"  # section of the accelerator's profile whose collective curves apply here


class HostLink(Frozen):
    """The way from a device to its host's memory."""

    bandwidth_bytes_per_s: Figure
    memory_bytes_per_device: Figure


class PoolTier(Frozen):
    """Memory of a supernode that any of its devices can use over the scale-up network."""

    bandwidth_bytes_per_s: Figure
    memory_bytes_per_device: Figure


class FailureRates(Frozen):
    """Failures per year, left blank where nobody has published them."""

    device_per_year: Figure | None = None
    server_per_year: Figure | None = None
    supernode_per_year: Figure | None = None


class ClusterSpec(Frozen):
    """A cluster of supernodes; `levels` go from innermost to outermost and `supernode` names the scale-up level."""

    name: str
    accelerator: Accelerator
    levels: tuple[Level, ...]
    supernode: str
    host_link: HostLink
    pool: PoolTier | None = None
    failures: FailureRates = FailureRates()
    max_devices: PositiveInt | None = None
    default_stack: str
    compute_slowdown_beside_communication: Annotated[Figure | None, Field()] = None
    context_bytes: Figure  # driver context and what the allocator cannot use, held back from the capacity
    note: str = ""
    source: str = ""

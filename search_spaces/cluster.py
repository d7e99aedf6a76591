"""ClusterSpec: the accelerator, the levels of the network from innermost to outermost, and what sits behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from .model import Frozen
from .workload import Precision

Grade = Literal["official", "measured", "announced", "secondary", "assumed", "given"]
"""Where a figure comes from. An assumed one carries an interval and is named in every plan that uses it; a given one is the
user's own, written as a bare number."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LevelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""A name that `--inside LEVEL:tp,ep` can carry."""


class Sourced(Frozen):
    """A figure that no interval is known of, and where it is from."""

    value: Amount
    source: Annotated[str, Field(min_length=1)]


class Figure(Frozen):
    """A physical figure with its source, its grade and, where it is not certain, an interval.

    In a file a bare number stands for a figure that the user gives without a source.
    """

    value: Amount
    source: Annotated[str, Field(min_length=1)]
    grade: Grade
    low: Amount | None = None
    high: Amount | None = None
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def _bare_number(cls, data: Any) -> Any:
        if isinstance(data, int | float | str) and not isinstance(data, bool):
            return {"value": data, "source": "given by the user", "grade": "given"}
        return data

    @model_validator(mode="after")
    def _inside_interval(self) -> Figure:
        if self.grade == "assumed" and (self.low is None or self.high is None):
            raise ValueError("an assumed figure needs low and high")
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"value {self.value:g} is outside its own interval, {low:g} to {high:g}")
        return self


def _quantity(unit: str, low: float, high: float, hint: str) -> AfterValidator:
    """Refuses a figure that no hardware has: nearly always another unit was meant."""

    def check(figure: Figure) -> Figure:
        if not low <= figure.value <= high:
            raise ValueError(f"{figure.value:g} {unit} is not a figure of this kind, which is in {unit}: {hint}")
        return figure

    return AfterValidator(check)


FlopRate = Annotated[Figure, _quantity("FLOP/s", 1e11, 1e18, "989 TFLOP/s is 989e12")]
Bytes = Annotated[Figure, _quantity("bytes", 1e8, 1e15, "80 GB is 80e9")]
Bandwidth = Annotated[Figure, _quantity("bytes/s", 1e7, 1e15, "450 GB/s is 450e9, and 400 Gb/s is 50e9")]
Latency = Annotated[Figure, _quantity("seconds", 0.0, 0.1, "2 µs is 2e-6")]
Multiprocessors = Annotated[Figure, _quantity("multiprocessors", 16, 1024, "an H100 has 132")]


class Accelerator(Frozen):
    """One device as software addresses it (a rank): a GPU, or a die of a two-die package.

    `peak_flops` are dense rates by GEMM precision ("bf16", "fp16", "fp8", "fp4"); `memory_bytes` is the total that a framework
    sees (79.2 GiB of an 80 GB card), from which a cluster's `context_bytes` are still held back; bandwidth in bytes/s.
    """

    name: str
    vendor: Literal["nvidia", "huawei", "amd", "google", "amazon"]
    peak_flops: Annotated[dict[str, FlopRate], Field(min_length=1)]
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: Bandwidth
    power_w: Figure | None = None
    multiprocessors: Multiprocessors | None = None  # of which kernels that exchange tokens take some; none: they run elsewhere
    curves_of: str = ""  # another accelerator of the same kind, whose kernel curves and fitted figures it is priced by
    note: str = ""

    @property
    def priced_as(self) -> str:
        """The accelerator by whose kernel curves and fitted figures it is priced."""
        return self.curves_of or self.name

    @field_validator("peak_flops")
    @classmethod
    def _known_precisions(cls, rates: dict[str, FlopRate]) -> dict[str, FlopRate]:
        for precision in rates:
            if precision not in get_args(Precision):
                raise ValueError(f"precision {precision!r} is not one of {', '.join(get_args(Precision))}")
        return rates

    @property
    def blackwell(self) -> bool:
        """Whether it is an NVIDIA one with FP4, that is Blackwell or later."""
        return self.vendor == "nvidia" and "fp4" in self.peak_flops


class Level(Frozen):
    """One tier of the network.

    `size` counts the devices inside one unit of this level (2 for a die pair, 16 for a server, 768 for a supernode); the
    outermost level has none and spans the cluster. `bandwidth_bytes_per_s` is what one device can send across this level, one
    way, when all send at once and nothing is oversubscribed; `oversubscription` divides it for traffic that leaves the unit
    below. On a full mesh a pair of devices sees only 1/(members−1) of it. `latency_s` is that of the whole way between two
    devices which the level lies between, levels further in included.
    """

    name: LevelName
    size: PositiveInt | None = None
    bandwidth_bytes_per_s: Bandwidth
    latency_s: Latency
    kind: Literal["switched", "full_mesh", "ring", "torus"] = "switched"
    oversubscription: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    devices_per_nic: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    in_network_reduction: bool = False
    offload_engine: bool = False  # collectives run beside the compute cores instead of on them
    efficiency_profile: str = "scale-out"  # section of the accelerator's profile whose collective curves apply here


class HostLink(Frozen):
    """The way from a device to its host's memory, and that memory; each device's share of both."""

    bandwidth_bytes_per_s: Bandwidth
    memory_bandwidth_bytes_per_s: Bandwidth
    memory_bytes_per_device: Bytes


class PoolTier(Frozen):
    """Memory of a supernode that any of its devices can use over the scale-up network."""

    bandwidth_bytes_per_s: Bandwidth
    memory_bytes_per_device: Bytes


class Storage(Frozen):
    """The distributed storage that checkpoints outlive a failure in: each device's share when all write or read at once."""

    bandwidth_bytes_per_s: Bandwidth


class FailureRates(Frozen):
    """Interruptions of a job per year and unit, and what coming back takes; blank where nothing is known.

    A rate of devices may hold all that interrupts a job, where only their number is published. `restart_s` are the seconds from a
    failure to a job that runs again, but for reading its states and redoing lost work, `repair_days` how long what failed is away.
    """

    device_per_year: Figure | None = None
    server_per_year: Figure | None = None
    supernode_per_year: Figure | None = None
    restart_s: Figure | None = None
    repair_days: Figure | None = None


class ClusterSpec(Frozen):
    """A cluster of supernodes; `levels` go from innermost to outermost and `supernode` names the scale-up level."""

    name: str
    accelerator: Accelerator
    levels: Annotated[tuple[Level, ...], Field(min_length=2)]
    supernode: str
    host_link: HostLink
    pool: PoolTier | None = None
    failures: FailureRates = FailureRates()
    storage: Storage | None = None
    max_devices: PositiveInt | None = None
    default_stack: str
    compute_slowdown_beside_communication: Annotated[Figure | None, Field()] = None
    communicator_bytes: Bytes  # device memory that each communicator of a rank holds for its buffers
    context_bytes: Figure  # driver context and what the allocator cannot use, held back from the capacity
    note: str = ""
    source: str = ""

    @property
    def rates(self) -> str:
        """The cluster's name and what one device can send over each level of its network, in words."""
        shares = [each.bandwidth_bytes_per_s.value / each.devices_per_nic / each.oversubscription for each in self.levels]
        words = [f"{each.name} {share / 1e9:.4g} GB/s" for each, share in zip(self.levels, shares, strict=True)]
        return f"{self.name} ({', '.join(words)})"

    @property
    def lost_beside_communication(self) -> float:
        """Share of the compute that is lost while traffic runs beside it: s/(1+s) where kernels take 1+s times as long."""
        slowdown = self.compute_slowdown_beside_communication
        return slowdown.value / (1.0 + slowdown.value) if slowdown else 0.0

    @field_validator("levels")
    @classmethod
    def _levels_nest(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        """Names differ, only the outermost level has no size, and each unit holds a whole number of the units below."""
        names = [level.name for level in levels]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two levels are called {name!r}; give each its own name")
        if levels[-1].size is not None:
            raise ValueError(f"the outermost level, {names[-1]!r}, spans the cluster: leave its size out")
        inner = Level.model_construct(name="device", size=1)
        for level in levels[:-1]:
            if level.size is None:
                raise ValueError(f"level {level.name!r} needs a size: only the outermost, {names[-1]!r}, goes without")
            unit = inner.size or 1
            if level.size < unit or (level.size == unit and inner.name != "device"):
                raise ValueError(f"level {level.name!r} has size {level.size}, which must be greater than {inner.name!r}'s {unit}")
            if level.size % unit:
                near = level.size // unit * unit
                raise ValueError(
                    f"level {level.name!r} has size {level.size}, which must be a multiple of {inner.name!r}'s {unit}, as is {near}"
                )
            inner = level
        return levels

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSpec:
        sized = [level.name for level in self.levels[:-1]]
        if self.supernode not in sized:
            raise ValueError(f"supernode {self.supernode!r} must name a level with a size: {', '.join(sized)}")
        if "supernode" in sized and self.supernode != "supernode":
            raise ValueError(f"a level is called 'supernode' but supernode names {self.supernode!r}; rename the level")
        if self.context_bytes.value >= self.accelerator.memory_bytes.value:
            raise ValueError(
                f"context_bytes {self.context_bytes.value:g} leaves nothing of the accelerator's "
                f"{self.accelerator.memory_bytes.value:g} bytes"
            )
        return self

    def tier(self, to: Literal["host", "pool", "peers"]) -> HostLink | PoolTier:
        """Where offloaded bytes go, and beside activations on peers optimizer states. KeyError for a pool where there is none."""
        if to != "pool":
            return self.host_link
        if self.pool is None:
            raise KeyError(to)
        return self.pool

    @property
    def level_words(self) -> str:
        """What `level_name` takes, in words."""
        names = [level.name for level in self.levels]
        return ", ".join(names) if "supernode" in names else f"{', '.join(names)} or supernode"

    def level_name(self, word: str) -> str:
        """The level that a user's word names; "supernode" is always the scale-up level. KeyError if there is none."""
        if word == "supernode":
            return self.supernode
        if word in (level.name for level in self.levels):
            return word
        raise KeyError(word)

    @property
    def supernode_place(self) -> int:
        """Index of the scale-up level."""
        return [level.name for level in self.levels].index(self.supernode)

    def allocated_sizes(self, devices: int, per_supernode: int | None = None) -> tuple[int, ...]:
        """Devices in use in one unit of each level, innermost first, when a job has `devices` devices of the cluster.

        From the outermost level inwards, a job (or what it has of the unit above) is spread evenly over the fewest units that
        can hold it, where that comes out whole: 256 devices on NVL72 are 4 racks of 64. Where it does not, units are filled and
        the last stays part empty: 2048 dies over supernodes of 768 count as 768.

        With `per_supernode`, supernodes have so many each and the last has the rest, down to one: 276 as 72, 72, 72 and 60.
        Levels outside then hold whole supernodes, levels inside what a supernode's share is spread to as above. Units of a level
        lie in those of the next, in every one of which the last may be part empty: 69 in servers of 4 are 17 and one device
        more. The last entry is `devices`. ValueError if either number is less than 1.
        """
        place = self.supernode_place
        if min(devices, devices if per_supernode is None else per_supernode) < 1:
            raise ValueError(f"devices {devices} and devices per supernode {per_supernode} must be at least 1")
        sizes = [level.size or devices for level in self.levels[:-1]]
        if per_supernode is None:
            return _spread(devices, sizes)
        each = min(per_supernode, devices)
        outside = _spread(-(-devices // each), [size // sizes[place] for size in sizes[place + 1 :]])
        return (*_spread(each, sizes[:place]), *(min(units * each, devices) for units in outside))


def _spread(whole: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of a whole, what one unit of each size has, innermost first: as much as the others where that comes out even, else all it
    holds; the whole itself comes last.
    """
    found = [whole]
    for size in reversed(sizes):
        units = -(-found[-1] // size)
        found.append(size if found[-1] % units else found[-1] // units)
    return tuple(reversed(found))

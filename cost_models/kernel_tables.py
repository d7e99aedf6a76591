"""What the tables of measured kernels were measured on, and what they cannot tell (kernel_tables.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import PositiveInt

from ..search_spaces.cluster import Sourced
from ..search_spaces.documents import read_document, to_record
from ..search_spaces.loading import load_cluster
from ..search_spaces.model import Frozen


class Measured(Frozen):
    """Rows of one system, and the cluster of the catalog that they are of."""

    cluster: str
    system: str
    in_network: bool = False  # 8-device all-reduces ran on the switches (NVLS)
    same_links: bool = True  # False: the table's chip with other links; only GEMMs carry over
    fp8_tensor: bool = False  # GEMMs of FP8 scaled per tensor are read


class Ranks(Frozen):
    """Ranks of a host, by system."""

    usual: PositiveInt
    other: Mapping[str, PositiveInt]
    source: str

    def of(self, system: str) -> int:
        return self.other.get(system, self.usual)


class KernelTables(Frozen):
    """What stands beside the tables."""

    source: str
    devices: tuple[Measured, ...]
    half_tile: Sourced
    extrapolation: Sourced
    servers_nic_bytes_per_s: Sourced
    deepep_ranks: Ranks
    beside_hybridep: tuple[str, ...]
    feeding_sms: Sourced
    nvlink_ranks: Sourced


@dataclass(frozen=True)
class Device:
    """One profile that the tables can fill: its rows, dense peaks in FLOP/s by precision, scale-up bytes/s one way."""

    measured: Measured
    peak_flops: Mapping[str, float]
    scale_up_bytes_per_s: float

    @property
    def system(self) -> str:
        """What the tables call it."""
        return self.measured.system


@cache
def kernel_tables() -> KernelTables:
    """The file."""
    path = Path(__file__).parent / "kernel_tables.yaml"
    return to_record(KernelTables, read_document(path), path.name)


@cache
def devices() -> Mapping[str, Device]:
    """Devices by the name of their profile."""
    found = {}
    for measured in kernel_tables().devices:
        cluster = load_cluster(measured.cluster)
        peaks = {precision: figure.value for precision, figure in cluster.accelerator.peak_flops.items()}
        peaks |= {"fp8_tensor": peaks["fp8"]} if measured.fp8_tensor else {}
        found[cluster.accelerator.priced_as] = Device(measured, peaks, cluster.levels[0].bandwidth_bytes_per_s.value)
    return found

"""Counts of devices that make clusters comparable: as much peak, or as much money an hour, as so many devices of another one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.errors import InputError
from ...search_spaces.inputs import load_cluster

LIKE = re.compile(r"(peak|price)\s+of\s+(\d{1,9})\s+(\S+)")
PEAK_OF = "bf16"
NEAR = 1.05
"""How far a count may be off for batches to be dealt evenly."""


class Alike(NamedTuple):
    """So many devices, and their peak or price over what was asked for."""

    devices: int
    share: float


@dataclass(frozen=True)
class Like:
    """As much peak (dense, BF16) or price as `devices` of `cluster`, a name of the catalog or a file."""

    what: Literal["peak", "price"]
    devices: int
    cluster: str

    @classmethod
    def read(cls, text: str) -> Like:
        """That of "peak of 2048 hgx-h100". InputError for anything else."""
        found = LIKE.fullmatch(text.strip())
        if found is None or int(found[2]) < 1:
            raise InputError(f"devices = {text!r}: must be a whole number, or such as 'peak of 2048 hgx-h100' or 'price of …'")
        return cls("peak" if found[1] == "peak" else "price", int(found[2]), found[3])

    def of(
        self, machine: ClusterSpec, file_of: Mapping[str, str], prices: Mapping[str, float], batches: Iterable[int] = ()
    ) -> Alike:
        """Devices of `machine` that come nearest to it.

        Of the whole servers that are NEAR, those that all `batches` (sequences a step) can be dealt to: seven supernodes and a
        batch of a power of two would compare how they divide, not the machines. Where there are none, or no batches, the nearest
        of the counts that most batches can be dealt to (`sizing.counts`).
        """
        from ..device_counts import counts, unit_of

        other = load_cluster(file_of.get(self.cluster, self.cluster))
        if machine.name == other.name:
            return Alike(self.devices, 1.0)
        wanted = self.devices * self._worth(other, prices) / self._worth(machine, prices)
        known, unit = counts(machine), unit_of(machine)
        near = range(math.ceil(wanted / NEAR / unit) * unit, math.floor(wanted * NEAR) + 1, unit)
        shared = set(batches)
        dealt = [count for count in near if shared and all(batch % _odd_part(count) == 0 for batch in shared)]
        best = min(dealt or known, key=lambda count: abs(math.log(count / wanted)))
        return Alike(best, best / wanted)

    def _worth(self, machine: ClusterSpec, prices: Mapping[str, float]) -> float:
        if self.what == "peak":
            return machine.accelerator.peak_flops[PEAK_OF].value
        if machine.name not in prices:
            raise InputError(f"devices = 'price of {self.devices} {self.cluster}': prices has none of {machine.name}; add one")
        return prices[machine.name]


def _odd_part(count: int) -> int:
    return count // (count & -count)

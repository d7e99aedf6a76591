"""Counts of devices that make clusters comparable: as much peak, or as much money an hour, as so many devices of another one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.errors import InputError
from ...search_spaces.inputs import load_cluster

LIKE = re.compile(r"(peak|price)\s+of\s+(\d{1,9})\s+(\S+)")
PEAK_OF = "bf16"
NEAR = math.sqrt(2.0)
"""How far a count may be off for batches to be dealt evenly: what is compared is told per peak or price."""


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

    def of(self, machine: ClusterSpec, file_of: Mapping[str, str], prices: Mapping[str, float], batches: Iterable[int] = ()) -> int:
        """Devices of `machine` that come nearest to it, among whole servers or supernodes.

        Of counts that are near enough, those that `batches` (sequences a step) can be dealt to come first: seven supernodes and a
        batch of a power of two would compare how they divide, not the machines.
        """
        from ..sizing import counts

        other = load_cluster(file_of.get(self.cluster, self.cluster))
        if machine.name == other.name:
            return self.devices
        wanted = self.devices * self._worth(other, prices) / self._worth(machine, prices)
        known = counts(machine)
        dealt = [count for count in known if all(batch % _odd_part(count) == 0 for batch in batches)]
        near = [count for count in dealt if 1.0 / NEAR <= count / wanted <= NEAR]
        return min(near or known, key=lambda count: abs(math.log(count / wanted)))

    def _worth(self, machine: ClusterSpec, prices: Mapping[str, float]) -> float:
        if self.what == "peak":
            return machine.accelerator.peak_flops[PEAK_OF].value
        if machine.name not in prices:
            raise InputError(f"devices = 'price of {self.devices} {self.cluster}': prices has none of {machine.name}; add one")
        return prices[machine.name]


def _odd_part(count: int) -> int:
    return count // (count & -count)

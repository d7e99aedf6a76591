"""Where a job's states are kept, tier by tier, and what saving them and coming back from a failure take.

A save goes from device memory to the supernode's pool where there is one, else to the host's memory, and drains from there to the
distributed storage. After a failure every copy that still stands is read where it is; what was lost with the failed unit comes from
the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..search_spaces.cluster import ClusterSpec, Figure
from ..search_spaces.layout import Bools, Floats
from .reliability import RATES, Values, rates, server_size, supernode_size

COPIES = 2
"""Of every state beside the devices: the last that has drained stays until the next one has."""


@dataclass(frozen=True)
class Saved:
    """Bytes that the fullest device saves, (n,): `resident` in its memory, `held` those and what it keeps at its host."""

    resident: Values
    held: Values


@dataclass(frozen=True)
class Recovery:
    """What saving, draining and coming back take on a cluster: seconds per byte of a device, and the fixed part.

    `tier` is the memory that a save goes to and `copy_bytes_per_s` a device's way to it and back, `room_bytes` its share of it;
    `store_bytes_per_s` a device's share of the distributed storage, `spread_bytes_per_s` what it receives of other devices once
    states have been read; `restart_s` detection, rescheduling and start-up. `lost` has for every kind of failure, by the name of
    its rate, how many devices' copies it takes with it.
    """

    tier: Literal["host", "pool"]
    copy_bytes_per_s: float
    room_bytes: float
    store_bytes_per_s: float
    spread_bytes_per_s: float
    restart_s: float
    lost: Mapping[str, int]
    told: tuple[tuple[str, Figure], ...]  # the figures behind it, by name

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Recovery | None:
        """That of a cluster; None where its YAML lacks `storage` or `failures.restart_s`.

        A device that fails is taken to be replaced with its server, whose memory is then lost. A copy in the pool lies on another
        server of the supernode, where it has more than one, and outlives both.
        """
        if cluster.storage is None or cluster.failures.restart_s is None:
            return None
        told = {
            **{f"failures {name}": figure for name, figure in rates(cluster).items()},
            "failures restart_s": cluster.failures.restart_s,
            "storage bandwidth_bytes_per_s": cluster.storage.bandwidth_bytes_per_s,
        }
        memory, server, supernode = cluster.pool or cluster.host_link, server_size(cluster), supernode_size(cluster)
        if cluster.pool is not None and supernode > server:
            server = 0
        return cls(
            "pool" if cluster.pool else "host",
            memory.bandwidth_bytes_per_s.value,
            memory.memory_bytes_per_device.value,
            cluster.storage.bandwidth_bytes_per_s.value,
            cluster.levels[-1].bandwidth_bytes_per_s.value,
            cluster.failures.restart_s.value,
            dict(zip(RATES, (server, server, supernode), strict=True)),
            tuple(told.items()),
        )

    def save_s(self, resident_bytes: Values) -> Floats:
        """Seconds that training waits for a save: the fullest device's states go to the tier, but for those that are there."""
        return np.asarray(np.asarray(resident_bytes) / self.copy_bytes_per_s)

    def drain_s(self, state_bytes: Values, devices: Values) -> Floats:
        """Seconds until the copy is in the storage, all devices writing their share of it, training going on."""
        return np.asarray(np.asarray(state_bytes) / (self.store_bytes_per_s * np.asarray(devices)))

    def copies_stand(self, saved: Saved) -> Bools:
        """Whether the tier has room for its copies beside what is offloaded; without, everything is read from the storage."""
        resident, held = np.asarray(saved.resident), np.asarray(saved.held)
        return np.asarray(COPIES * resident + (held - resident) <= self.room_bytes)

    def lost_share(self, kind: str, devices: Values) -> Floats:
        """Share of the states of which a failure of a kind takes the copies, of jobs on so many devices."""
        return np.asarray(np.minimum(self.lost[kind] / np.asarray(devices), 1.0))

    def exposed_s(self, kind: str, state_bytes: Values, saved: Saved, devices: Values) -> Floats:
        """Seconds after a save in which a failure of a kind undoes it: until it has drained, where that takes copies along."""
        safe = self.copies_stand(saved) & (self.lost_share(kind, devices) == 0.0)
        return np.asarray(np.where(safe, 0.0, self.drain_s(state_bytes, devices)))

    def read_s(self, kind: str, state_bytes: Values, saved: Saved, devices: Values) -> Floats:
        """Seconds until every state is back on a device: copies that stand are read where they are, beside them the lost ones from
        the storage, all devices reading; or everything from there, where that is sooner or nothing stands.
        """
        nearest = self.reads_copies(kind, state_bytes, saved, devices)
        return np.asarray(np.where(nearest, self._nearest_s(kind, state_bytes, saved, devices), self.drain_s(state_bytes, devices)))

    def reads_copies(self, kind: str, state_bytes: Values, saved: Saved, devices: Values) -> Bools:
        """Whether copies that stand are read after a failure of a kind."""
        sooner = self._nearest_s(kind, state_bytes, saved, devices) < self.drain_s(state_bytes, devices)
        return np.asarray(self.copies_stand(saved) & sooner)

    def _nearest_s(self, kind: str, state_bytes: Values, saved: Saved, devices: Values) -> Floats:
        from_storage = self.lost_share(kind, devices) * self.drain_s(state_bytes, devices)
        return np.asarray(np.maximum(self.save_s(saved.held), from_storage))

    def back_s(self, kind: str, state_bytes: Values, saved: Saved, devices: Values) -> Floats:
        """Seconds from a failure to the next step: restart, one read of the states, and their way to all that hold them."""
        read = self.read_s(kind, state_bytes, saved, devices)
        return np.asarray(self.restart_s + read + np.asarray(saved.held) / self.spread_bytes_per_s)

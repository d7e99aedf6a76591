"""What a message costs: collectives over the levels of the network, for groups given by size and stride.

A group touches some number of units of every level. At each level it joins `fan` = (units one level down) / (units here)
parts, and what crosses there is booked there. Levels of one fabric share a device's ports, so their times add; different
fabrics (scale-up, scale-out) carry a pipelined collective at the same time, so the slower one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..search_spaces.cluster import ClusterSpec, Level
from ..search_spaces.groups import Groups
from ..search_spaces.layout import Floats, Ints
from .profile import Fitted, Profile

EXCHANGES = ("all_to_all", "moe_dispatch", "moe_combine")
"""Collectives that reach every peer in one step."""


@dataclass(frozen=True)
class Crossing:
    """How groups sit on the levels; both arrays are (levels, n).

    `members`: ranks of the group in one unit; `fan`: parts joined at the level (1: nothing crosses it).
    """

    members: Floats
    fan: Floats

    @property
    def below(self) -> Floats:
        """Ranks of the group in one unit of the level below, (levels, n)."""
        return np.concatenate([np.ones((1, self.members.shape[1])), self.members[:-1]])

    @property
    def size(self) -> Floats:
        return np.asarray(self.members[-1])

    @property
    def outermost(self) -> Ints:
        """Index of the outermost level that the group crosses, (n,); 0 where the group is one rank."""
        crossed = self.fan > 1.0
        last = len(crossed) - 1 - np.argmax(crossed[::-1], axis=0)
        return np.where(crossed.any(axis=0), last, 0)

    def take(self, rows: Ints) -> Crossing:
        return Crossing(self.members[:, rows], self.fan[:, rows])


@dataclass(frozen=True)
class _Curves:
    """Figures of one collective on every level, (levels,); what passes through memory depends on the innermost one's alone."""

    half_bytes: Floats
    gamma: Floats
    efficiency: Floats
    launch_s: Floats
    hop_s: Floats  # the library's whole hop where it was measured, else the level's latency
    local_cost: float
    passes: float


class Network:
    """The levels of a cluster as a job of `devices` devices sees them, with the curves of its accelerator's profile.

    `scale_up` and `scale_out` are the shares of those levels' bandwidth that the stack's collectives reach, one or a column (n,);
    p2p meets no others. With `rails` "one" a ring leaves a unit through the adapter of one of its ranks, not of all.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        profile: Profile,
        devices: int,
        scale_up: float | Floats = 1.0,
        scale_out: float | Floats = 1.0,
        rails: Literal["all", "one"] = "all",
    ) -> None:
        self.levels: tuple[Level, ...] = cluster.levels
        self.sizes: tuple[int, ...] = cluster.allocated_sizes(devices)
        self.devices = devices
        self.supernode = [level.name for level in cluster.levels].index(cluster.supernode)
        self._profile = profile
        shared = np.array([level.devices_per_nic for level in self.levels])
        oversubscribed = np.array([level.oversubscription for level in self.levels])
        out = np.array([[level.efficiency_profile == "scale-out"] for level in self.levels])
        self._reached = np.where(out, scale_out, scale_up)  # (levels, 1 or n)
        self._one_rail = out & (rails == "one")
        self.bandwidth = np.array([x.bandwidth_bytes_per_s.value for x in self.levels]) / shared / oversubscribed
        self.latency = np.array([level.latency_s.value for level in self.levels])
        fabrics = tuple(dict.fromkeys(level.efficiency_profile for level in self.levels))
        self._fabrics = [np.array([x.efficiency_profile == name for x in self.levels]) for name in fabrics]
        of_fabric = [next(rows for rows in self._fabrics if rows[level]) for level in range(len(self.levels))]
        self._innermost = np.array([np.argmax(rows) for rows in of_fabric])  # of each level's fabric
        self._outermost = np.array([len(rows) - 1 - np.argmax(rows[::-1]) for rows in of_fabric])
        parts = np.array(self.sizes) / np.array((1, *self.sizes[:-1]))
        mesh = np.array([level.kind == "full_mesh" for level in self.levels])
        self._mesh_peers = np.where(mesh, np.maximum(parts - 1.0, 1.0), np.inf)
        self._of_collective: dict[str, _Curves] = {}
        self._ring_kind = np.array([level.kind in ("ring", "torus") for level in self.levels])[:, None]

    def crossing(self, group: Groups) -> Crossing:
        """Places groups on the levels."""
        units = np.ones((len(self.levels) + 1, len(group.size)))
        units[0] = group.size
        for index, size in enumerate(self.sizes[:-1]):
            units[index + 1] = np.minimum(units[index], group.units(size, self.devices))
        return Crossing(members=group.size / units[1:], fan=units[:-1] / units[1:])

    def all_gather_s(self, at: Crossing, total_bytes: Floats) -> Floats:
        """All-gather of `total_bytes` (what every rank holds afterwards), seconds (n,)."""
        return self._collective("all_gather", at, self.ring_bytes(at, total_bytes), total_bytes)

    def reduce_scatter_s(self, at: Crossing, total_bytes: Floats) -> Floats:
        """Reduce-scatter of `total_bytes` (what every rank holds before), seconds (n,)."""
        return self._collective("reduce_scatter", at, self.ring_bytes(at, total_bytes), total_bytes)

    def all_reduce_s(self, at: Crossing, total_bytes: Floats) -> Floats:
        """All-reduce of `total_bytes` held by every rank, seconds (n,): reduce-scatter, then all-gather, 2·S·(n−1)/n sent.

        Within one level whose switches reduce, S is sent once instead, if that is faster.
        """
        ring = self._collective("all_reduce", at, 2.0 * self.ring_bytes(at, total_bytes), total_bytes)
        alone = (at.fan > 1.0).sum(axis=0) == 1
        reduces = np.array([self._reduces(level) for level in self.levels])[at.outermost] & alone
        if not reduces.any():
            return ring
        once = np.where(at.fan > 1.0, total_bytes, 0.0)
        return np.where(reduces, np.minimum(ring, self._collective("all_reduce_in_network", at, once, total_bytes)), ring)

    def all_to_all_s(self, at: Crossing, sent_bytes: Floats) -> Floats:
        """All-to-all where every rank holds `sent_bytes` for the group, its own share included, seconds (n,)."""
        return self._collective("all_to_all", at, self.all_to_all_bytes(at, sent_bytes), sent_bytes)

    def exchange_s(self, at: Crossing, level_bytes: Floats, kernel: str = "all_to_all") -> Floats:
        """Exchange of tokens that sends `level_bytes` (levels, n) per rank, seconds (n,).

        `kernel`: the library's all-to-all, or "moe_dispatch" and "moe_combine", fused kernels that find the receivers themselves.
        """
        return self._collective(kernel, at, level_bytes, level_bytes.sum(axis=0))

    def p2p_s(self, at_level: Ints, message_bytes: Floats) -> Floats:
        """One message to a neighbour across the level of the given index, seconds (n,)."""
        curves = self._curves("p2p")
        alpha = self.latency + curves.launch_s
        rate = self.bandwidth * curves.efficiency
        rate = np.where(np.isfinite(self._mesh_peers), rate / self._mesh_peers, rate)
        half, gamma = curves.half_bytes[at_level], curves.gamma[at_level]
        slow = 1.0 + (half / np.maximum(message_bytes, 1.0)) ** gamma
        return np.where(message_bytes > 0, alpha[at_level] + message_bytes / rate[at_level] * slow, 0.0)

    def ring_pass_s(self, at: Crossing, own_bytes: Floats) -> Floats:
        """Every rank's `own_bytes` passed on from neighbour to neighbour until all ranks have seen them, seconds (n,).

        All ranks pass at once, n−1 times; the neighbours that lie furthest apart set the pace.
        """
        return np.asarray((at.size - 1.0) * self.p2p_s(at.outermost, own_bytes))

    @staticmethod
    def ring_pass_bytes(at: Crossing, own_bytes: Floats) -> Floats:
        """Bytes that a rank sends across each level while `own_bytes` of every rank go round, mean over the ring, (levels, n).

        As many edges leave units as the ring touches units; those that stay in one unit of the next level are booked here.
        """
        units = at.size / at.members
        leaving = np.where(units > 1.0, units, 0.0)
        edges = np.concatenate([at.size[None, :], leaving[:-1]]) - leaving
        return np.asarray(own_bytes * (at.size - 1.0) * edges / at.size)

    @staticmethod
    def ring_bytes(at: Crossing, total_bytes: Floats) -> Floats:
        """Bytes that one rank sends across each level to gather (or scatter) `total_bytes`, (levels, n).

        Outermost level first, a rank passes on its S/n to fan−1 peers, then what it has to the next level's: S·(fan−1)/members,
        which adds up to S·(n−1)/n (Chan et al. 2007, section 4, per level).
        """
        return np.asarray(total_bytes * (at.fan - 1.0) / at.members)

    @staticmethod
    def all_to_all_bytes(at: Crossing, sent_bytes: Floats) -> Floats:
        """Bytes that one rank sends across each level in an all-to-all, (levels, n): its peers there over the group."""
        return np.asarray(sent_bytes * (at.members - at.below) / at.size)

    def dispatch_bytes(
        self, at: Crossing, token_bytes: Floats, top_k: int, limit: int | None, dedup: bool, groups: int = 1
    ) -> Floats:
        """Bytes that one rank sends across each level to bring its tokens to their experts, (levels, n).

        `token_bytes` is one copy of all its tokens. Routing is taken as uniform. Without dedup every one of the top_k
        copies travels alone. With it (DeepEP) a token enters a fabric's unit once, however many of its experts are there, and
        is passed on inside by the rank that receives it: of u units 1−(1−1/u)^top_k are hit, and each is sent to across the
        fabric unless the token entered there. Inside one fabric every unit is reached straight, whatever levels lie between.
        Node-limited routing sends to `limit` of `groups`: no more units than those fill.
        """
        peers = (at.members - at.below) / at.size  # share of the experts that lie across this level
        if not dedup:
            return np.asarray(token_bytes * top_k * peers)
        inside, whole = at.below[self._innermost], at.members[self._outermost]
        share = inside / at.size  # of all experts, in one of the units that the fabric joins
        hit = 1.0 - (1.0 - np.minimum(share, 1.0)) ** top_k
        units = hit / np.maximum(share, 1e-30)
        if limit is not None:
            units = np.minimum(units, limit * np.maximum(1.0 / np.maximum(groups * share, 1e-30), 1.0))
        entered_elsewhere = (at.members - at.below) / whole
        return np.asarray(token_bytes * np.minimum(units, top_k) * entered_elsewhere)

    def _reduces(self, level: Level) -> bool:
        return level.in_network_reduction and "all_reduce_in_network" in self._profile.collectives[level.efficiency_profile]

    def _curves(self, collective: str) -> _Curves:
        """The curve of every level's fabric for a collective; where a fabric has none in the network, its plain one."""
        if collective not in self._of_collective:
            self._of_collective[collective] = self._read_curves(collective)
        return self._of_collective[collective]

    def _read_curves(self, collective: str) -> _Curves:
        name = collective.removesuffix("_in_network")
        fast, plain = ([self._profile.collectives[x.efficiency_profile].get(n) for x in self.levels] for n in (collective, name))
        curves = [
            f or p or self._profile.collective_curve(x.efficiency_profile, name)
            for f, p, x in zip(fast, plain, self.levels, strict=True)
        ]
        hop = np.array([c.hop_latency_s.value if c.hop_latency_s else 0.0 for c in curves])
        return _Curves(
            np.array([c.half_bytes.value for c in curves]),
            np.array([c.gamma.value if isinstance(c.gamma, Fitted) else c.gamma for c in curves]),
            np.array([c.efficiency.value for c in curves]),
            np.array([c.launch_s.value for c in curves]),
            np.where(hop > 0, hop, self.latency),
            curves[0].local_cost.value if curves[0].local_cost else 0.0,
            curves[0].passes,
        )

    def _collective(self, name: str, at: Crossing, level_bytes: Floats, message_bytes: Floats) -> Floats:
        """Time of the profile's CollectiveCurve with what each level carries in place of one wire figure."""
        curves = self._curves(name)
        mesh = np.minimum((at.fan - 1.0) / self._mesh_peers[:, None], 1.0)
        share = np.where(np.isfinite(self._mesh_peers)[:, None], np.maximum(mesh, 1e-9), 1.0)
        slow = 1.0 + (curves.half_bytes[:, None] / np.maximum(message_bytes, 1.0)) ** curves.gamma[:, None]
        through_one = self._one_rail & (name != "all_to_all")
        moved = level_bytes * np.where(through_one, at.below, 1.0)
        moved[0] += curves.local_cost * np.maximum(curves.passes * message_bytes - level_bytes.sum(axis=0), 0.0)
        rate = self.bandwidth[:, None] * self._reached * curves.efficiency[:, None]
        level_s = moved / (rate * share) * slow * (at.fan > 1.0)
        wire = np.max(np.array([level_s[rows].sum(axis=0) for rows in self._fabrics]), axis=0)
        delay = (self._hops(name, at, curves.passes) * curves.hop_s[:, None]).sum(axis=0)
        return np.where((at.size > 1) & (message_bytes > 0), curves.launch_s[at.outermost] + delay + wire, 0.0)

    def _hops(self, name: str, at: Crossing, passes: float) -> Floats:
        """Steps in a row at each level: neighbour by neighbour in a ring, at most as many as up and down a binary tree."""
        if name in EXCHANGES:
            return (at.fan > 1.0).astype(np.float64)
        ring = at.fan - 1.0
        tree = 2.0 * np.ceil(np.log2(np.maximum(at.fan, 1.0)))
        return passes * np.where(self._ring_kind, ring, np.minimum(ring, tree))

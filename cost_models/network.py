"""What a message costs: collectives over the levels of the network, for groups given by size and stride.

A group touches some number of units of every level. At each level it joins `fan` = (units one level down) / (units here)
parts, and what crosses there is booked there. Levels of one fabric share a device's ports, so their times add; different
fabrics (scale-up, scale-out) carry a pipelined collective at the same time, so the slower one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Literal

import numpy as np

from ..search_spaces.cluster import ClusterSpec, Level
from ..search_spaces.groups import Groups, untiled
from ..search_spaces.layout import Bools, Floats, Ints
from ..search_spaces.libraries import deep_ep
from .crossing import Crossing
from .level_curves import LevelCurves, level_curves
from .profile import Profile, together_s
from .routing import Routing

Exchange = Literal["moe_dispatch", "moe_combine"]
EXCHANGES = ("all_to_all", "moe_dispatch", "moe_combine")
"""Collectives that reach every peer in one step."""
ROUNDING = 1e-12


class Network:
    """The levels of a cluster as a job sees them that has `sizes` devices in one unit of each, with the curves of its accelerator's
    profile. The last size is all devices (`ClusterSpec.allocated_sizes`).

    `scale_up` and `scale_out` are the shares of those levels' bandwidth that the stack's collectives reach, one or a column (n,);
    p2p meets no others. `backend` names the kernels of token exchanges, which have `sms` multiprocessors to copy with (unset:
    DeepEP's own).
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        profile: Profile,
        sizes: tuple[int, ...],
        scale_up: float | Floats = 1.0,
        scale_out: float | Floats = 1.0,
        backend: str = "",
        sms: int | None = None,
    ) -> None:
        self.levels: tuple[Level, ...] = cluster.levels
        self.sizes, self.devices = sizes, sizes[-1]
        self._units = tuple(zip(sizes[:-1], untiled(sizes), strict=True))
        self.supernode = cluster.supernode_place
        self._profile = profile
        self._backend, self._sms = f"_{backend}" if backend else "", sms or deep_ep().multiprocessors
        shared = np.array([level.devices_per_nic for level in self.levels])
        oversubscribed = np.array([level.oversubscription for level in self.levels])
        out = np.array([[level.efficiency_profile == "scale-out"] for level in self.levels])
        self._reached = np.where(out, scale_out, scale_up)  # (levels, 1 or n)
        self.bandwidth = np.array([x.bandwidth_bytes_per_s.value for x in self.levels]) / shared / oversubscribed
        self.latency = np.array([level.latency_s.value for level in self.levels])
        fabrics = tuple(dict.fromkeys(level.efficiency_profile for level in self.levels))
        self._fabrics = [np.array([x.efficiency_profile == name for x in self.levels]) for name in fabrics]
        of_fabric = [next(rows for rows in self._fabrics if rows[level]) for level in range(len(self.levels))]
        self._innermost = np.array([np.argmax(rows) for rows in of_fabric])  # of each level's fabric
        self._outermost = np.array([len(rows) - 1 - np.argmax(rows[::-1]) for rows in of_fabric])
        built = [level.size or used for level, used in zip(self.levels, self.sizes, strict=True)]  # a small job adds no links
        parts = np.array(built) / np.array((1, *built[:-1]))
        mesh = np.array([level.kind == "full_mesh" for level in self.levels])
        self._mesh_peers = np.where(mesh, np.maximum(parts - 1.0, 1.0), np.inf)
        self._of_collective: dict[str, LevelCurves] = {}
        self._ring_kind = np.array([level.kind in ("ring", "torus") for level in self.levels])[:, None]

    def crossing(self, group: Groups) -> Crossing:
        """Places groups on the levels, as the worst of each layout lies."""
        return self._placed(group, self.devices)

    def _placed(self, group: Groups, devices: int) -> Crossing:
        """Places groups of a job of so many devices."""
        shape = (len(self.levels) + 1, len(group.size))
        units, least = np.ones(shape), np.ones(shape)
        units[0], least[-1] = group.size, group.size
        for index, (size, around) in enumerate(self._units):
            units[index + 1] = np.minimum(units[index], group.units(size, devices, around))
            least[index + 1] = np.maximum(least[index], group.least(size, devices, around))
        members, fan, below = group.size / units[1:], units[:-1] / units[1:], group.size / units[:-1]
        outside = self._at_worst(members - below, np.diff(least, axis=0))
        return Crossing(
            members,
            fan,
            gathered=self._at_worst((fan - 1.0) / members, 1.0 / least[:-1] - 1.0 / least[1:]),
            outside=outside,
            leaving=np.where(units[1:] > 1.0, units[1:], 0.0),
            joined=units[self._innermost],
            passed=outside / members[self._outermost],
        )

    def _at_worst(self, mean: Floats, emptiest: Floats) -> Floats:
        """What crosses the levels, (levels, n), for the rank that has most of it; both arguments broadcast.

        Of a group that does not tile its units, those that hold fewest of it have fewest ways out for what a whole unit lacks. The
        levels of one fabric share a rank's ports, so what their sum is short of is spread over them.
        """
        found = mean.copy()
        for rows in self._fabrics:
            sum_of_mean, most = mean[rows].sum(axis=0), emptiest[rows].sum(axis=0)
            if (most > sum_of_mean * (1.0 + ROUNDING)).any():
                found[rows] *= np.maximum(most / np.where(sum_of_mean > 0, sum_of_mean, np.inf), 1.0)
        return found

    def mean_crossing(self, group: Groups, devices: Ints) -> Crossing:
        """Places groups on the levels of jobs that use `devices` (n,), mean over all of a layout's groups and ranks.

        Where units are ragged, a token's chance to meet one is that of as many ranks as a rank has in another unit on the mean.
        """
        shape = (len(self.levels) + 1, len(group.size))
        units, mates, straddling = np.ones(shape), np.ones(shape), np.zeros(shape)
        units[0], mates[-1] = group.size, group.size
        for index, (size, around) in enumerate(self._units, start=1):
            at = group.placement(size, devices, around)
            units[index], mates[index], straddling[index] = at.units, at.mates, at.straddling
        members, outer, inner = group.size / units[1:], self._outermost, self._innermost
        others, beyond = units[inner] - units[outer + 1], mates[outer + 1] - mates[inner]
        alone = (inner == 0)[:, None] | (others <= 0)
        whole = (np.arange(len(self.levels)) == outer)[:, None]
        return Crossing(
            members,
            fan=units[:-1] / units[1:],
            gathered=(units[:-1] - units[1:]) / group.size,
            outside=mates[1:] - mates[:-1],
            leaving=(units - (1.0 - straddling))[1:],
            joined=np.where(alone, units[inner], group.size * others / np.where(alone, 1.0, beyond)),
            passed=(np.where(whole, members[outer], mates[1:]) - mates[:-1]) / members[outer],
        )

    def all_gather_s(self, at: Crossing, total_bytes: Floats) -> Floats:
        """All-gather of `total_bytes` (what every rank holds afterwards), seconds (n,)."""
        return self._at_least_inside(lambda net, *sent: net._gathered_s("all_gather", *sent), at, total_bytes)

    def reduce_scatter_s(self, at: Crossing, total_bytes: Floats) -> Floats:
        """Reduce-scatter of `total_bytes` (what every rank holds before), seconds (n,)."""
        return self._at_least_inside(lambda net, *sent: net._gathered_s("reduce_scatter", *sent), at, total_bytes)

    def all_reduce_s(self, at: Crossing, total_bytes: Floats) -> Floats:
        """All-reduce of `total_bytes` held by every rank, seconds (n,): reduce-scatter, then all-gather, 2·S·(n−1)/n sent.

        Within a fabric whose switches reduce, S is sent once instead, through the outermost level, if that is faster.
        """
        return self._at_least_inside(lambda net, *sent: np.min(net._all_reduces_s(*sent), axis=0), at, total_bytes)

    def flat_ring_s(self, name: str, at: Crossing) -> Floats:
        """What a message that goes round all ranks in one ring waits beyond the steps that its price has, seconds (n,).

        Levels that are crossed straight keep their one step.
        """
        straight, curves = self._straight(name)[:, None], self._curves(name)
        steps = self._hops(name, at, curves.passes)
        beyond = np.where(straight, 0.0, curves.passes * at.edges - steps)
        return np.asarray((beyond * curves.hop_s[:, None]).sum(axis=0))

    def all_reduce_bytes(self, at: Crossing, mean: Crossing, total_bytes: Floats) -> Floats:
        """Bytes that one rank sends across each level to all-reduce `total_bytes`, (levels, n), the way that is timed.

        `at` are the groups as they are timed, `mean` as they lie on the mean.
        """
        ring_s, once_s = self._all_reduces_s(at, total_bytes)
        return np.where(once_s < ring_s, self._once_bytes(mean, total_bytes), 2.0 * self.ring_bytes(mean, total_bytes))

    def _all_reduces_s(self, at: Crossing, total_bytes: Floats) -> tuple[Floats, Floats]:
        """Seconds from rank to rank, and through switches that reduce, inf where there are none on the way, (n,) each."""
        ring_s = self._fastest("all_reduce", at, 2.0 * self.ring_bytes(at, total_bytes), total_bytes)
        alone = (at.size > 1) & ~(at.crossed & (self._innermost[:, None] != self._innermost[at.outermost])).any(axis=0)
        reduces = np.array([self._reduces(level) for level in self.levels])[at.outermost] & alone
        if not reduces.any():
            return ring_s, np.full_like(ring_s, np.inf)
        once_s = self._collective("all_reduce_in_network", at, self._once_bytes(at, total_bytes), total_bytes)
        return ring_s, np.where(reduces, once_s, np.inf)

    def _once_bytes(self, at: Crossing, total_bytes: Floats) -> Floats:
        """What a rank sends to the switches of the outermost level that its group crosses, (levels, n)."""
        return np.where(np.arange(len(self.levels))[:, None] == at.outermost, total_bytes, 0.0)

    def all_to_all_s(self, at: Crossing, sent_bytes: Floats) -> Floats:
        """All-to-all where every rank holds `sent_bytes` for the group, its own share included, seconds (n,)."""
        return self._at_least_inside(
            lambda net, at, sent: net._collective("all_to_all", at, net.all_to_all_bytes(at, sent), sent), at, sent_bytes
        )

    def exchange_s(self, at: Crossing, token_bytes: Floats, routing: Routing, kernel: Exchange | None, copy_bytes: float) -> Floats:
        """Tokens to their experts or back, `token_bytes` one copy of all of a rank's, `copy_bytes` of one token, seconds (n,).

        `kernel`: a fused one that finds the receivers itself, or none: the library's all-to-all of every copy. A fused one brings
        every copy to its device by itself, from whichever fabric it comes.
        """
        return self._at_least_inside(lambda net, *sent: net._exchanged_s(*sent, routing, kernel, copy_bytes), at, token_bytes)

    def _exchanged_s(
        self, at: Crossing, token_bytes: Floats, routing: Routing, kernel: Exchange | None, copy_bytes: float
    ) -> Floats:
        level_bytes = self.dispatch_bytes(at, token_bytes, routing, kernel is not None)
        if kernel is None:
            return self._collective("all_to_all", at, level_bytes, np.asarray(token_bytes * routing.top_k))
        delivered = token_bytes * self._units_hit(at, routing)  # through each fabric, own units' included
        kept = np.zeros_like(delivered)
        for rows in self._fabrics:
            first = int(np.argmax(rows))
            kept[first] = np.maximum(delivered[first] - level_bytes[rows].sum(axis=0), 0.0)
        name = f"{kernel}{self._backend}"
        curves = self._curves(name)
        handled = delivered[0] + token_bytes / copy_bytes * curves.handling_bytes[at.outermost]
        copies_s = handled / (self._sms * curves.sm_bytes_per_s[at.outermost])
        return self._collective(name, at, level_bytes, delivered, kept, copies_s)

    def p2p_s(self, at_level: Ints, message_bytes: Floats) -> Floats:
        """One message to a neighbour across the level of the given index, seconds (n,)."""
        curves = self._curves("p2p")
        alpha = self.latency + curves.launch_s
        rate = self.bandwidth * curves.efficiency
        rate = np.where(np.isfinite(self._mesh_peers), rate / self._mesh_peers, rate)
        half, gamma = curves.half_bytes[at_level], curves.gamma[at_level]
        slow = 1.0 + (half / np.maximum(message_bytes, 1.0)) ** gamma
        return np.where(message_bytes > 0, alpha[at_level] + message_bytes / rate[at_level] * slow, 0.0)

    def chain_s(self, edges: Floats, message_bytes: Floats, wraps: Floats) -> Floats:
        """One message between neighbouring stages as a pipeline feels it, (n,); `edges` (levels, n) of a chain of stages, back from
        whose last to the first it goes `wraps` times for every pass through all.

        The mean of all edges, which is what fill and drain take. A turn between two stages takes its edge twice and moves two
        micro-batches on, one between all pp stages moves pp on over twice pp − 1: no less than pp/(2(pp−1)) of the slowest edge.
        """
        outermost = len(edges) - 1 - np.argmax(edges[::-1] > 0, axis=0)
        slowest_s, apart = self.p2p_s(outermost, message_bytes), edges.sum(axis=0)
        mixed = np.flatnonzero((edges > 0).sum(axis=0) > 1)
        if not len(mixed):
            return slowest_s
        some, between, wrapped = edges[:, mixed], apart[mixed], wraps[mixed]
        each = [self.p2p_s(np.full(len(mixed), level), message_bytes[mixed]) for level in range(len(edges))]
        found, slowest = slowest_s.copy(), slowest_s[mixed]
        mean_s = ((some * each).sum(axis=0) + wrapped * slowest) / (between + wrapped)
        found[mixed] = np.maximum(mean_s, slowest * (between + 1.0) / (2.0 * between))
        return found

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
        edges = np.concatenate([at.size[None, :], at.leaving[:-1]]) - at.leaving
        return np.asarray(own_bytes * (at.size - 1.0) * edges / at.size)

    @staticmethod
    def ring_bytes(at: Crossing, total_bytes: Floats) -> Floats:
        """Bytes that one rank sends across each level to gather (or scatter) `total_bytes`, (levels, n).

        Outermost level first, a rank passes on its S/n to fan−1 peers, then what it has to the next level's: S·(fan−1)/members,
        which adds up to S·(n−1)/n (Chan et al. 2007, section 4, per level).
        """
        return np.asarray(total_bytes * at.gathered)

    @staticmethod
    def all_to_all_bytes(at: Crossing, sent_bytes: Floats) -> Floats:
        """Bytes that one rank sends across each level in an all-to-all, (levels, n): its peers there over the group."""
        return np.asarray(sent_bytes * at.outside / at.size)

    def dispatch_bytes(self, at: Crossing, token_bytes: Floats, routing: Routing, dedup: bool) -> Floats:
        """Bytes that one rank sends across each level to bring its tokens to their experts, (levels, n).

        `token_bytes` is one copy of all its tokens. Routing is taken as uniform. Without dedup every one of the top_k
        copies travels alone. With it (DeepEP) a token enters a fabric's unit once, however many of its experts are there, and
        is passed on inside by the rank that receives it: each of the units that are hit is sent to across the fabric unless the
        token entered there. Inside one fabric every unit is reached straight, whatever levels lie between.
        """
        if not dedup:
            return np.asarray(token_bytes * routing.top_k * at.outside / at.size)
        return np.asarray(token_bytes * self._units_hit(at, routing) * at.passed)

    def _units_hit(self, at: Crossing, routing: Routing) -> Floats:
        """Units of each level's fabric in which a token has an expert, (levels, n)."""
        beyond = np.arange(len(self.levels)) > self.supernode
        return routing.units_hit(at.joined) * np.where(beyond, routing.crossing, 1.0)[:, None]

    def _at_least_inside(self, priced: Callable[[Network, Crossing, Floats], Floats], at: Crossing, sent_bytes: Floats) -> Floats:
        """What `priced` says of `sent_bytes` in groups, (n,): where they straddle units that they fit into, no less than inside.

        What crosses hides behind what does not and relieves the links inside; a library that is faster for it would go the same way
        where all links are fast.
        """
        sent_bytes = np.broadcast_to(np.asarray(sent_bytes, dtype=np.float64), at.size.shape)
        time_s = priced(self, at, sent_bytes)
        rows = np.flatnonzero((at.outermost > self._outermost[0]) & (at.size <= self.sizes[self._outermost[0]]))
        if len(rows):
            inside_s = priced(self._of(rows), self._side_by_side(at.size[rows]), sent_bytes[rows])
            time_s = time_s.copy()
            time_s[rows] = np.maximum(time_s[rows], inside_s)
        return time_s

    def _of(self, rows: Ints) -> Network:
        """The network as some rows of a table see it."""
        if self._reached.shape[1] == 1:
            return self
        part = copy(self)
        part._reached = self._reached[:, rows]
        return part

    def _side_by_side(self, size: Floats) -> Crossing:
        """Groups of so many ranks side by side in one unit of the innermost fabric."""
        sizes, place = np.unique(size.astype(np.int64), return_inverse=True)
        return self._placed(Groups(sizes, np.ones_like(sizes)), self.sizes[self._outermost[0]]).take(place)

    def _gathered_s(self, name: str, at: Crossing, total_bytes: Floats) -> Floats:
        return self._fastest(name, at, self.ring_bytes(at, total_bytes), total_bytes)

    def _fastest(self, name: str, at: Crossing, level_bytes: Floats, message_bytes: Floats) -> Floats:
        """The library's algorithm on all levels, or straight to every peer at once on those where that can be."""
        time_s = self._collective(name, at, level_bytes, message_bytes)
        if not self._straight(name).any():
            return time_s
        return np.minimum(time_s, self._collective(f"{name}_direct", at, level_bytes, message_bytes))

    def _straight(self, name: str) -> Bools:
        """Levels on which a collective that goes straight where it can does so, (levels,)."""
        return np.array([self._goes_straight(name, index) for index in range(len(self.levels))])

    def on_engines(self, at: Crossing) -> Bools:
        """Whether every level that a group crosses moves data on engines of its own, (n,)."""
        without = np.array([not level.offload_engine for level in self.levels])
        return np.asarray(~(at.crossed & without[:, None]).any(axis=0))

    def _goes_straight(self, name: str, index: int) -> bool:
        """Whether peers across a level are reached at once: by a curve of its own, else assumed of meshes and switches inside a
        supernode, one hop at the library's rate and launch. A curve with a measured time per hop holds what the library does.
        """
        level = self.levels[index]
        curves = self._profile.collective_curves(level.efficiency_profile)
        if f"{name}_direct" in curves:
            return True
        return index <= self.supernode and level.kind in ("full_mesh", "switched") and curves[name].hop_latency_s is None

    def _furthest(self, at: Crossing, apart: bool) -> Floats:
        """1 at the outermost level that is crossed, (levels, n): peers are sent to at once, and a level's latency is that of the
        whole way between devices that it lies between. `apart`: in each fabric, as what enters one is passed on inside.
        """
        further = np.zeros_like(at.crossed)
        for rows in self._fabrics if apart else [np.ones(len(self.levels), dtype=bool)]:
            beyond = np.cumsum(at.crossed[rows][::-1], axis=0)[::-1]
            further[rows] = at.crossed[rows] & (beyond == 1)
        return further.astype(np.float64)

    def _reduces(self, level: Level) -> bool:
        return level.in_network_reduction and "all_reduce_in_network" in self._profile.collective_curves(level.efficiency_profile)

    def _curves(self, collective: str) -> LevelCurves:
        if collective not in self._of_collective:
            plain = collective.removesuffix("_in_network").removesuffix("_direct").removesuffix(self._backend)
            self._of_collective[collective] = level_curves(self.levels, self._profile, collective, plain)
        return self._of_collective[collective]

    def _collective(
        self,
        name: str,
        at: Crossing,
        level_bytes: Floats,
        message_bytes: Floats,
        kept_bytes: Floats | None = None,
        copies_s: Floats | None = None,
    ) -> Floats:
        """Time of the profile's CollectiveCurve with what each level carries in place of one wire figure.

        `message_bytes` (n,), or (levels, n) where fabrics carry messages of their own; `kept_bytes` (levels, n) stay on this side
        of a level and are only copied: by default what the innermost does not send of the message. `copies_s` (n,) are what the
        kernel's multiprocessors take.
        """
        curves = self._curves(name)
        mesh = np.minimum((at.fan - 1.0) / self._mesh_peers[:, None], 1.0)
        share = np.where(np.isfinite(self._mesh_peers)[:, None], np.maximum(mesh, 1e-9), 1.0)
        slow = 1.0 + (curves.half_bytes[:, None] / np.maximum(message_bytes, 1.0)) ** curves.gamma[:, None]
        copied = np.zeros(level_bytes.shape)  # within the device, whatever links a mesh leaves unused
        if kept_bytes is None:
            copied[0] = curves.local_cost[0] * np.maximum(curves.passes * message_bytes - level_bytes.sum(axis=0), 0.0)
        else:
            copied += curves.local_cost[:, None] * kept_bytes
        rate = self.bandwidth[:, None] * self._reached * curves.efficiency[:, None]
        level_s = (level_bytes / share + copied) / rate * slow * at.crossed
        links_s = np.max(np.array([level_s[rows].sum(axis=0) for rows in self._fabrics]), axis=0)
        kernel_s = links_s if copies_s is None else together_s(links_s, copies_s)
        delay = (self._hops(name, at, curves.passes) * curves.hop_s[:, None]).sum(axis=0)
        return np.where(
            (at.size > 1) & (level_bytes.sum(axis=0) > 0),
            curves.launch_s[at.outermost] + delay + kernel_s,
            0.0,
        )

    def _hops(self, name: str, at: Crossing, passes: float) -> Floats:
        """Steps in a row at each level: neighbour by neighbour in a ring, at most as many as up and down a binary tree; one on
        each that is crossed straight, for what was gathered further out is passed on further in. Exchanges reach all peers at once
        (`_furthest`).

        As the curves were fitted (collective_fit.wire_and_hops): a measured time per hop is that of rings inside a server, and what
        switches reduce has its only hop in the launch.
        """
        if name.endswith("_in_network"):
            return np.zeros_like(at.fan)
        once = at.crossed.astype(np.float64)
        if name.removesuffix(self._backend) in EXCHANGES:
            return passes * self._furthest(at, apart=name != "all_to_all")
        ring = at.fan - 1.0
        rings = self._ring_kind | self._curves(name).hop_measured[:, None] & (np.arange(len(self.levels)) == 0)[:, None]
        steps = np.where(rings, ring, np.minimum(ring, at.tree_steps))
        if name.endswith("_direct"):
            steps = np.where(self._straight(name.removesuffix("_direct"))[:, None], once, steps)
        return passes * steps

"""Messages between explicit groups of ranks, by hand."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, inf, log2

from paraplan.cost_models.profile import CollectiveCurve
from paraplan.search_spaces.cluster import Level
from reference_operators import ReferenceOperators
from reference_records import Msg, units_hit


class ReferenceNetwork(ReferenceOperators):
    """Seconds of a message over the levels that its groups cross."""

    def place(self, ranks: list[list[int]]) -> list[tuple[float, float]]:
        """(members in a unit, parts joined) at every level, for the group that touches most units there."""
        size = len(ranks[0])
        units = [size]
        for unit in self.unit_sizes[:-1]:
            units.append(min(units[-1], max(len({rank // unit for rank in group}) for group in ranks)))
        units.append(1)
        return [(size / units[i + 1], units[i] / units[i + 1]) for i in range(len(self.levels))]

    def level_bytes(self, message: Msg, ranks: list[list[int]]) -> list[float]:
        """Bytes that a rank sends across each level."""
        at, size = self.place(ranks), len(ranks[0])
        below = [1.0, *(members for members, _ in at[:-1])]
        match message.collective:
            case "all_gather" | "reduce_scatter":
                return [message.bytes * (fan - 1) / members for members, fan in at]
            case "all_reduce":
                return [2 * message.bytes * (fan - 1) / members for members, fan in at]
            case "all_to_all":
                return [message.bytes * (members - inner) / size for (members, _), inner in zip(at, below, strict=True)]
            case "ring":
                units = [size, *(size / members for members, _ in at)]
                edges = [u if u > 1 else 0.0 for u in units]
                return [message.bytes * (size - 1) * (edges[i] - edges[i + 1]) / size for i in range(len(at))]
        assert message.collective in ("dispatch", "combine")
        mlp = self._moe_mlp()
        sent = []
        for level, (members, _), inner in zip(self.levels, at, below, strict=True):
            if self.stack.moe_dispatcher != "flex":
                sent.append(message.bytes * mlp.top_k * (members - inner) / size)
                continue
            # A fabric joins units of the one below; from one to another of them a token goes straight and once.
            fabric = [i for i, other in enumerate(self.levels) if other.efficiency_profile == level.efficiency_profile]
            targets = size / below[fabric[0]]
            hit = units_hit(mlp, round(targets))
            sent.append(message.bytes * hit * (members - inner) / at[fabric[-1]][0])
        return sent

    def message_s(self, message: Msg) -> float:
        return self.collective_s(message, self.groups[message.dimension])

    def collective_s(self, message: Msg, ranks: list[list[int]]) -> float:
        if len(ranks[0]) == 1 or message.bytes == 0:
            return 0.0
        if message.collective == "ring":
            return (len(ranks[0]) - 1) * self.p2p_s(ranks, message.bytes)
        fabric = [i for i, level in enumerate(self.levels) if level.efficiency_profile == self.levels[0].efficiency_profile]
        straddles = any(fan > 1 for _, fan in self.place(ranks)[fabric[-1] + 1 :])
        fits = len(ranks[0]) <= self.unit_sizes[fabric[-1]]
        least_s = self.placed_s(message, [list(range(len(ranks[0])))]) if straddles and fits else 0.0
        return max(self.placed_s(message, ranks), least_s)

    def placed_s(self, message: Msg, ranks: list[list[int]]) -> float:
        """As the groups lie; those that straddle units which they fit into take no less than side by side inside one."""
        sent = self.level_bytes(message, ranks)
        routed = message.collective in ("dispatch", "combine")
        name = message.collective
        if routed:
            name = f"moe_{name}" if self.stack.moe_dispatcher == "flex" else "all_to_all"
        at = self.place(ranks)
        if routed and name != "all_to_all":
            copies = message.bytes * units_hit(self._moe_mlp(), len(ranks[0]))  # one to every device with one of a token's experts
            return self._algorithm_s(name, ranks, sent, self.delivered(message, ranks), self.copying_s(name, ranks, copies))
        buffer = message.bytes * self._moe_mlp().top_k if routed else message.bytes
        once_s = self._algorithm_s(name, ranks, sent, buffer)
        if any(self.goes_straight(name, i) for i in range(len(at))):  # on the levels where that can be, by steps on the others
            once_s = min(once_s, self._algorithm_s(f"{name}_direct", ranks, sent, buffer))
        return min(once_s, self.in_switches_s(message, ranks))

    def in_switches_s(self, message: Msg, ranks: list[list[int]]) -> float:
        """An all-reduce through switches that reduce; without end where they do not, or it leaves their fabric."""
        at = self.place(ranks)
        crossed = [i for i, (_, fan) in enumerate(at) if fan > 1]
        top, fabrics = self.levels[crossed[-1]], {self.levels[i].efficiency_profile for i in crossed}
        curves = self.profile.collectives[top.efficiency_profile]
        able = top.in_network_reduction and "all_reduce_in_network" in curves
        if message.collective != "all_reduce" or len(fabrics) > 1 or not able:
            return inf
        once = [message.bytes if i == crossed[-1] else 0.0 for i in range(len(at))]
        return self._algorithm_s("all_reduce_in_network", ranks, once, message.bytes)

    def delivered(self, message: Msg, ranks: list[list[int]]) -> dict[str, float]:
        """Copies that a fused exchange brings to the units which each fabric joins, those of a rank's own in, in bytes."""
        at, found = self.place(ranks), {}
        below = [1.0, *(members for members, _ in at[:-1])]
        for level, inner in zip(self.levels, below, strict=True):
            found.setdefault(level.efficiency_profile, message.bytes * units_hit(self._moe_mlp(), round(len(ranks[0]) / inner)))
        return found

    def copying_s(self, name: str, ranks: list[list[int]], copies: float) -> float:
        """What the multiprocessors of a fused exchange take for its copies, at the outermost level where that is known."""
        crossed = [i for i, (_, fan) in enumerate(self.place(ranks)) if fan > 1]
        for i in range(crossed[-1], -1, -1):
            curve = self._curve(name, i)
            if curve.sm_bytes_per_s:
                tokens = self.tokens / self.sp * self.workload.expert_imbalance
                handled = tokens * curve.handling_bytes.value if curve.handling_bytes else 0.0
                return (copies + handled) / (self.stack.exchange_sms * curve.sm_bytes_per_s.value)
        return 0.0

    def _algorithm_s(
        self, name: str, ranks: list[list[int]], sent: list[float], buffer: float | dict[str, float], copying_s: float = 0.0
    ) -> float:
        at = self.place(ranks)
        fabrics: dict[str, float] = {}
        delay_s = 0.0
        inner_curve = self._curve(name, 0)
        names = [level.efficiency_profile for level in self.levels]
        if isinstance(buffer, dict):  # a fused exchange: what stays in a unit passes through its fabric's kernel too
            through = {fabric: sum(s for s, other in zip(sent, names, strict=True) if other == fabric) for fabric in names}
            copied = [max(buffer[f] - through[f], 0.0) if names.index(f) == i else 0.0 for i, f in enumerate(names)]
            messages = [buffer[fabric] for fabric in names]
        else:
            copied = [max(inner_curve.passes * buffer - sum(sent), 0.0), *[0.0] * (len(names) - 1)]
            messages = [buffer] * len(names)
        for i, ((_, fan), level) in enumerate(zip(at, self.levels, strict=True)):
            if fan <= 1:
                continue
            curve = self._curve(name, i)
            local = curve.local_cost.value if curve.local_cost else 0.0
            rate = self.bandwidth(level) * self.reached(level) * curve.efficiency.value
            links = (fan - 1) / self.peers(i) if level.kind == "full_mesh" else 1.0  # of a device's, those to its group
            ramp = 1 + (self.half_bytes(curve, level) / max(messages[i], 1.0)) ** curve.gamma.value
            fabrics.setdefault(level.efficiency_profile, 0.0)
            fabrics[level.efficiency_profile] += (sent[i] / links + local * copied[i]) / rate * ramp
            hop_s = curve.hop_latency_s.value if curve.hop_latency_s else level.latency_s.value
            exchanged = name in ("all_to_all", "moe_dispatch", "moe_combine")
            further = [other for (_, apart), other in zip(at[i + 1 :], names[i + 1 :], strict=True) if apart > 1]
            if exchanged and ((name == "all_to_all" and further) or names[i] in further):
                continue  # its peers there are sent to while the furthest are: the way to those is what is waited for
            at_once = exchanged or (name.endswith("_direct") and self.goes_straight(name.removesuffix("_direct"), i))
            rings = i == 0 and curve.hop_latency_s is not None  # of servers were measured hop by hop
            steps = 1 if at_once else fan - 1 if rings else min(fan - 1, 2 * ceil(log2(fan)))
            if not name.endswith("_in_network"):  # which has its hop in the launch
                delay_s += inner_curve.passes * steps * hop_s
        outermost = max(i for i, (_, fan) in enumerate(at) if fan > 1)
        return self._curve(name, outermost).launch_s.value + delay_s + (max(fabrics.values()) ** 4 + copying_s**4) ** 0.25

    def goes_straight(self, name: str, i: int) -> bool:
        """A measured curve says so, or a mesh or switch inside the supernode whose library was not measured hop by hop."""
        level, section = self.levels[i], self.profile.collectives[self.levels[i].efficiency_profile]
        inside = i <= [each.name for each in self.levels].index(self.problem.cluster.supernode)
        joined = level.kind in ("full_mesh", "switched") and name != "all_to_all"
        return f"{name}_direct" in section or (inside and joined and section[name].hop_latency_s is None)

    def peers(self, i: int) -> int:
        """Units that a unit of level i is joined to, whether the job has them or not."""
        size, below = self.levels[i].size, self.levels[i - 1].size if i else 1
        assert size is not None and below is not None
        return size // below - 1

    def bandwidth(self, level: Level) -> float:
        """What one device can send across a level."""
        return level.bandwidth_bytes_per_s.value / level.devices_per_nic / level.oversubscription

    def half_bytes(self, curve: CollectiveCurve, level: Level) -> float:
        """What a device's share of an oversubscribed link carries in the time that the curve's own half takes at full rate."""
        return curve.half_bytes.value / level.oversubscription

    def reached(self, level: Level) -> float:
        """Share of it that the stack's collectives reach."""
        if level.efficiency_profile != "scale-out":
            return self.stack.scale_up_efficiency.value
        congested = (64 / self.problem.devices) ** self.stack.scale_out_congestion.value
        return self.stack.scale_out_efficiency.value * congested

    def _curve(self, name: str, level: int) -> CollectiveCurve:
        section = self.profile.collectives[self.levels[level].efficiency_profile]
        return section.get(name) or section[name.removesuffix("_in_network").removesuffix("_direct")]

    def p2p_s(self, ranks: list[list[int]], size: float) -> float:
        """One message between the members of the group that lie furthest apart."""
        crossed = [i for i, (_, fan) in enumerate(self.place(ranks)) if fan > 1]
        if not crossed:
            return 0.0
        return self.message_across_s(crossed[-1], size)

    def message_across_s(self, index: int, size: float) -> float:
        """One message across a level."""
        level, curve = self.levels[index], self._curve("p2p", index)
        rate = self.bandwidth(level) * curve.efficiency.value
        rate /= self.peers(index) if level.kind == "full_mesh" else 1
        ramp = 1 + (self.half_bytes(curve, level) / max(size, 1.0)) ** curve.gamma.value
        return level.latency_s.value + curve.launch_s.value + size / rate * ramp

    def between_stages_s(self, size: float) -> float:
        """One message to the next stage: the mean edge of pipelines that cross most, wraps of interleaved ones in;
        two stages beside the slowest edge take it twice for every two micro-batches, pp stages a mean one 2(pp−1) times for pp.
        """
        pipelines, pp, vpp = self.groups["pp"], self.layout.pp, self.layout.vpp
        if pp == 1:
            return 0.0
        left = [pp - 1]  # edges that leave a unit of each level, innermost first
        for unit in self.unit_sizes:
            left.append(max(sum(a // unit != b // unit for a, b in pairwise(ranks)) for ranks in pipelines))
        across = [
            (self.message_across_s(i, size), before - after) for i, (before, after) in enumerate(pairwise(left)) if before > after
        ]
        slowest = across[-1][0]
        wraps = 1 - 1 / vpp if self.layout.schedule == "interleaved" else 0.0
        mean = (sum(seconds * count for seconds, count in across) + wraps * slowest) / (pp - 1 + wraps)
        return max(mean, slowest * pp / (2 * (pp - 1))) if len(across) > 1 else slowest

"""Traffic against an explicit list of every message between explicit ranks, and the shares that are read off it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations
from math import comb, inf
from pathlib import Path
from typing import Any

import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import evaluate, with_default_stages
from paraplan.optimizer.ranks import coordinates
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem, parse_offload
from paraplan.search_spaces.model import MoeMlp

sys.path.insert(0, str(Path(__file__).parent))  # the reference lies beside this file

from reference_step import Msg, Reference

Sent = tuple[int, int, float]  # from rank, to rank, bytes


class Wire:
    """Bytes on the wire by level and dimension, each message booked at the outermost level that it crosses."""

    def __init__(self, problem: Problem) -> None:
        self.names = [level.name for level in problem.cluster.levels]
        self.units = seated(problem.allocated_sizes[:-1], problem.devices)
        fabrics = [level.efficiency_profile for level in problem.cluster.levels]
        self.fabric = fabrics.count(fabrics[0])  # the first level beyond the innermost fabric
        self.bytes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def level(self, a: int, b: int) -> int:
        """The innermost level whose units hold both ranks."""
        return next((i for i, unit in enumerate(self.units) if unit[a] == unit[b]), len(self.units))

    def book(self, dimension: str, sent: Iterator[Sent], times: float = 1.0) -> None:
        for source, target, size in sent:
            self.bytes[self.names[self.level(source, target)]][dimension] += times * size

    def gather(self, ranks: list[int], total: float) -> Iterator[Sent]:
        """All-gather level by level from the outside: a unit passes what its ranks have on to each of its siblings, once.

        A unit has all that came from outside, its ranks an equal part each, so that every one of them has its share of `total` to
        pass on. A reduce-scatter sends the same bytes the other way.
        """
        units: list[list[int]] = [ranks]
        for level in reversed(range(len(self.units) + 1)):
            parts = [self._split(unit, level) for unit in units]
            for unit, siblings in zip(units, parts, strict=True):
                for a, b in permutations(siblings, 2):
                    yield a[0], b[0], total * len(a) / len(unit)
            units = [part for siblings in parts for part in siblings]

    def to_switches(self, ranks: list[int], total: float) -> Iterator[Sent]:
        """An all-reduce in the switches that join the group: every rank sends them its buffer, once."""
        furthest = max(self.level(ranks[0], rank) for rank in ranks)
        for rank in ranks:
            yield rank, next(other for other in ranks if self.level(rank, other) == furthest), total

    def _split(self, ranks: list[int], level: int) -> list[list[int]]:
        """The ranks of a unit by the units of the level below, in which they lie."""
        if level == 0:
            return [[rank] for rank in ranks]
        found: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            found[self.units[level - 1][rank]].append(rank)
        return list(found.values())


def seated(sizes: tuple[int, ...], devices: int) -> list[list[int]]:
    """The unit of every level that each rank stands in: the next one begins where that is full, or one outside it."""
    units, taken, number = [[] for _ in sizes], [0] * len(sizes), [0] * len(sizes)
    for _ in range(devices):
        full = max((level for level, size in enumerate(sizes) if taken[level] == size), default=-1)
        for level in range(full + 1):
            taken[level], number[level] = 0, number[level] + 1
        for level, unit in enumerate(units):
            taken[level] += 1
            unit.append(number[level])
    return units


def pairs(ranks: list[int], each: float) -> Iterator[Sent]:
    return ((a, b, each) for a in ranks for b in ranks if a != b)


def dispatched(wire: Wire, ranks: list[int], token_bytes: float, mlp: MoeMlp, dedup: bool) -> Iterator[Sent]:
    """Tokens to the ranks of their experts, uniform in expectation.

    Without dedup each of the top_k copies travels alone. With it a token enters every unit of the innermost fabric that it is sent
    to once, at the rank of the sender's own place there, which passes it on to the others that are hit.
    """
    n, experts, k = len(ranks), mlp.experts, mlp.top_k
    if not dedup:
        yield from pairs(ranks, token_bytes * k / n)
        return

    def hit(members: int) -> float:
        """Chance that one of a token's experts is on some of the ranks."""
        return 1 - comb(experts - experts // n * members, k) / comb(experts, k)

    servers = wire._split(ranks, wire.fabric)
    for home in servers:
        for place, source in enumerate(home):
            for server in servers:
                entry = server[place % len(server)]
                if server is not home:
                    yield source, entry, token_bytes * hit(len(server))
                for rank in server:
                    if rank != entry:
                        yield entry, rank, token_bytes * hit(1)


def listed(problem: Problem, layout: Layout) -> dict[str, dict[str, float]]:
    """GiB per device, level and dimension, from all messages of a step between all ranks."""
    even = problem.model_copy(update={"workload": problem.workload.model_copy(update={"expert_imbalance": 1.0})})
    reference, wire = Reference(even, layout), Wire(problem)
    dense, expert = book_passes(wire, reference)
    m, edge = layout.num_microbatches, reference.hidden_bytes
    for ranks in reference.groups["pp"]:
        for c in range(layout.pp * layout.vpp - 1):
            here, there = ranks[c % layout.pp], ranks[(c + 1) % layout.pp]
            wire.book("pp", iter([(here, there, edge), (there, here, edge)]), m)
    for _, size in to_the_pool(problem, layout, dense, expert):
        wire.bytes[problem.cluster.supernode]["offload"] += size
    book_states(wire, reference, dense, expert)
    used = layout.devices
    return {level: {d: size / used / GIB for d, size in by.items() if size > 0} for level, by in wire.bytes.items()}


def in_switches(reference: Reference, message: Msg, groups: list[list[int]]) -> bool:
    """Whether switches are the fastest way, by the reference's own times."""
    through_s = reference.in_switches_s(message, groups)
    return through_s < inf and reference.collective_s(message, groups) == through_s


def collective(wire: Wire, reference: Reference, message: Msg, ranks: list[int]) -> Iterator[Sent]:
    """What one message of a pass sends in one group."""
    match message.collective:
        case "all_gather" | "reduce_scatter":
            yield from wire.gather(ranks, message.bytes)
        case "all_reduce" if len(ranks) > 1 and in_switches(reference, message, reference.groups[message.dimension]):
            yield from wire.to_switches(ranks, message.bytes)
        case "all_reduce":
            yield from wire.gather(ranks, 2 * message.bytes)
        case "all_to_all":
            yield from pairs(ranks, message.bytes / len(ranks))
        case "ring":
            steps = len(ranks) - 1
            yield from ((a, b, steps * message.bytes) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True) if a != b)
        case "dispatch" | "combine":
            dedup = reference.stack.moe_dispatcher == "flex"
            yield from dispatched(wire, ranks, message.bytes, reference._moe_mlp(), dedup)


def book_passes(wire: Wire, reference: Reference) -> tuple[list[float], list[float]]:
    """Messages of all passes; dense and expert parameters of a rank by stage."""
    layout, model = reference.layout, reference.model
    stage_of = coordinates(layout)["pp"]
    dense, expert = [0.0] * layout.pp, [0.0] * layout.pp
    for index, chunk in enumerate(reference.chunks):
        stage = index % layout.pp
        for name, again in chunk:
            held = reference.weights(name)
            dense[stage] += held[0]
            expert[stage] += held[1]
            for op in reference.operators(name):
                redone = (again and reference.recomputed(op)) or reference.end_again(name, op)
                for message in op.messages:
                    times = message.forward + message.backward + (message.forward if redone else 0)
                    for ranks in reference.groups[message.dimension]:
                        if stage_of[ranks[0]] == stage:
                            sent = collective(wire, reference, message, ranks)
                            wire.book(message.dimension, sent, layout.num_microbatches * times)
    if layout.pp > 1 and (model.tied_embeddings or model.mtp):
        dense[-1] += reference.weights("embedding")[0]
    return dense, expert


def book_states(wire: Wire, reference: Reference, dense: list[float], expert: list[float]) -> None:
    """Gradients and weights between the ranks that share them."""
    stack, layout, m = reference.stack, reference.layout, reference.layout.num_microbatches
    gradient, stage_of = float(stack.sent_gradient_bytes), coordinates(layout)["pp"]
    shards, copies = reference.shards()
    # none: all-reduce; zero1: scatter, gather; zero2: scatter per micro-batch; zero3, hsdp: two gathers per micro-batch too,
    # of which FSDP's zero2 has the first
    forward = m if reference.gathers_forward else 1
    scatters, gathers = {0: (0, 0), 1: (1, 1), 2: (m, forward), 3: (m, 2 * m), 4: (m, 2 * m)}[reference.sharding]
    scatters = 1 if reference.waits and reference.once else scatters
    gathers = 1 if reference.stays_gathered and reference.once else gathers
    reduced = reference.sharding == 0 or (reference.sharding == 1 and stack.zero1_reduction == "all_reduce")
    scatters = 0 if reduced else scatters
    for dimension, groups, weights in (("dp", shards, dense), ("edp", reference.groups["edp"], expert)):
        for ranks in groups:
            mine = weights[int(stage_of[ranks[0]])]
            wire.book(dimension, wire.gather(ranks, (scatters * gradient + gathers * 2) * mine))
            if reduced and len(ranks) > 1:  # as the message of a mean stage is timed
                mean = Msg("dp", "all_reduce", gradient * sum(weights) / layout.pp, 1, 0)
                through = in_switches(reference, mean, groups)
                wire.book(dimension, (wire.to_switches if through else wire.gather)(ranks, gradient * mine * (1 if through else 2)))
    for ranks in copies:
        times = m if reference.copies_each else 1
        wire.book("dp", wire.gather(ranks, 2 * gradient * times * dense[int(stage_of[ranks[0]])] / len(shards[0])))


def to_the_pool(problem: Problem, layout: Layout, dense: list[float], expert: list[float]) -> Iterator[tuple[int, float]]:
    """What every rank sends to the pool in a step: activations of each micro-batch, of as many tokens as the rank with most of
    them has, and states once they are stepped.
    """
    states, activations = parse_offload(layout.offload)
    fullest = Reference(problem, layout)
    stages, costs = coordinates(layout)["pp"], fullest.costs()
    shards = (layout.dp * layout.cp, layout.edp) if layout.optimizer_sharding == "zero1" else (1, 1)
    for rank, stage in enumerate(stages.tolist()):
        held = [piece for chunk in fullest.chunks[stage :: layout.pp] for piece in chunk]
        saved = sum(costs[name].kept if again else costs[name].saved for name, again in held)
        kept = dense[stage] / shards[0] + expert[stage] / shards[1]
        yield rank, layout.num_microbatches * activations * saved + states * problem.stack.optimizer_bytes * kept


LAYOUTS: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "tp in the server": ("llama-3.1-8b", "hgx-h100", None, {"tp": 4, "pp": 2, "dp": 2}),
    "tp over servers": ("llama-3.1-8b", "hgx-h100", None, {"tp": 16, "pp": 2, "dp": 1, "recompute": "full"}),
    "tp without sp": ("llama-3.1-8b", "hgx-h100", None, {"tp": 8, "pp": 2, "dp": 2, "sequence_parallel": False}),
    "pipeline in one server": ("llama-3.1-8b", "hgx-h100", None, {"pp": 4, "dp": 4, "rank_order": "tp-cp-ep-pp-dp"}),
    "pipeline around cp": (
        "llama-3.1-8b",
        "hgx-h100",
        None,
        {"tp": 2, "cp": 4, "pp": 2, "dp": 4, "rank_order": "tp-cp-ep-pp-dp"},
    ),
    "interleaved over servers": (
        "llama-3.1-8b",
        "hgx-h100",
        None,
        {"tp": 4, "pp": 4, "dp": 2, "vpp": 2, "schedule": "interleaved", "recompute": "selective:mlp"},
    ),
    "ring over servers": ("llama-3.1-8b", "hgx-h100", None, {"tp": 4, "cp": 4, "pp": 2, "dp": 1, "recompute": "full:block:3"}),
    "ulysses": ("llama-3.1-8b", "hgx-h100", None, {"tp": 2, "cp": 8, "pp": 2, "dp": 1, "cp_type": "a2a"}),
    "gathered keys": ("llama-3.1-8b", "hgx-h100", None, {"tp": 2, "cp": 8, "dp": 2, "cp_type": "allgather"}),
    "all-reduced gradients": ("llama-3.1-8b", "hgx-h100", None, {"tp": 2, "dp": 16, "optimizer_sharding": "none"}),
    "gradients scattered": ("llama-3.1-8b", "hgx-h100", "deepspeed", {"tp": 2, "dp": 16, "optimizer_sharding": "zero2"}),
    "fsdp": ("llama-3.1-8b", "hgx-h100", "torchtitan", {"dp": 32, "optimizer_sharding": "zero3"}),
    "fsdp, gathered once per micro-batch": ("llama-3.1-8b", "hgx-h100", "torchtitan", {"dp": 8, "optimizer_sharding": "zero2"}),
    "fsdp that waits for the last micro-batch": (
        "llama-3.1-8b",
        "hgx-h100",
        "kempnerforge",
        {"dp": 16, "optimizer_sharding": "zero3"},
    ),
    "ends under recompute": ("llama-3.1-8b", "hgx-a100", "aleph-alpha-flash2", {"tp": 4, "pp": 2, "dp": 2, "recompute": "full"}),
    "fsdp of stages": ("llama-3.1-8b", "hgx-h100", "torchtitan", {"tp": 2, "pp": 2, "dp": 8, "optimizer_sharding": "hsdp:4"}),
    "hsdp": ("llama-3.1-8b", "hgx-h100", "torchtitan", {"dp": 32, "optimizer_sharding": "hsdp:8"}),
    "tied embeddings": ("qwen3-0.6b", "hgx-h100", None, {"tp": 2, "pp": 4, "dp": 4}),
    "experts over servers": (
        "qwen3-30b-a3b",
        "hgx-h800",
        None,
        {"tp": 2, "pp": 2, "dp": 8, "ep": 16, "recompute": "selective:moe"},
    ),
    "experts split by tensor": ("qwen3-30b-a3b", "hgx-h800", None, {"tp": 2, "pp": 2, "dp": 16, "ep": 8, "etp": 2}),
    "experts, deduplicated": ("qwen3-30b-a3b", "hgx-h100", "megatron-bridge", {"dp": 64, "ep": 32, "recompute": "full"}),
    "packages, servers, supernode": ("qwen3-30b-a3b", "cloudmatrix-384", None, {"tp": 4, "pp": 2, "dp": 8, "ep": 32}),
    "tp 16 in racks of 72": ("llama-3.1-8b", "gb200-nvl72", None, {"tp": 16, "dp": 9}),
    "pipeline over racks of 72": ("llama-3.1-8b", "gb200-nvl72", None, {"tp": 16, "pp": 3, "dp": 3}),
    "ring of 16 in racks of 72": ("llama-3.1-8b", "gb200-nvl72", None, {"cp": 16, "dp": 9}),
    "experts on 16 of 72, each copy alone": ("qwen3-30b-a3b", "gb200-nvl72", "megatron-lm", {"dp": 144, "ep": 16}),
    "experts on 16 of 72, deduplicated": ("qwen3-30b-a3b", "gb200-nvl72", "megatron-bridge", {"dp": 144, "ep": 16}),
    "experts on 32 of 72, deduplicated": ("qwen3-30b-a3b", "gb200-nvl72", "megatron-bridge", {"dp": 288, "ep": 32}),
    "64 ranks as 24, 24 and 16": ("llama-3.1-8b", "gb200-nvl72", None, {"tp": 16, "dp": 4, "per_supernode": 24}),
    "stages of 16 in 24, 24 and 16": ("llama-3.1-8b", "gb200-nvl72", None, {"tp": 4, "pp": 4, "dp": 4, "per_supernode": 24}),
    "experts in 24, 24 and 16": ("qwen3-30b-a3b", "gb200-nvl72", "megatron-lm", {"dp": 64, "ep": 8, "per_supernode": 24}),
    "servers of 4 in shares of 30": ("llama-3.1-8b", "gb200-nvl72", None, {"tp": 4, "dp": 16, "per_supernode": 30}),
    "experts in shares of 30": ("qwen3-30b-a3b", "gb200-nvl72", "megatron-lm", {"dp": 64, "ep": 4, "per_supernode": 30}),
    "packages and servers in shares of 27": ("llama-3.1-8b", "cloudmatrix-384", None, {"tp": 2, "dp": 32, "per_supernode": 27}),
    "activations and states to the pool": (
        "llama-3.1-8b",
        "cloudmatrix-384",
        None,
        {"tp": 4, "pp": 4, "dp": 8, "recompute": "full:block:3", "offload": "optimizer:0.5+activations:0.25"},
    ),
    "experts' states to the pool": (
        "qwen3-30b-a3b",
        "cloudmatrix-384",
        None,
        {"tp": 4, "pp": 2, "dp": 8, "ep": 16, "optimizer_sharding": "none", "offload": "optimizer:1+activations:1"},
    ),
    "reduced in the switches of a server": (
        "llama-3.1-8b",
        "hgx-h100",
        None,
        {"tp": 8, "pp": 2, "dp": 4, "sequence_parallel": False, "optimizer_sharding": "none"},
    ),
    "gradients reduced in a rack's switches": (
        "llama-3.1-8b",
        "gb200-nvl72",
        None,
        {"tp": 2, "dp": 32, "optimizer_sharding": "none"},
    ),
    "sharded states, reduced whole": ("llama-3.1-8b", "hgx-a100", "aleph-alpha-flash2", {"tp": 4, "pp": 2, "dp": 8}),
    "mtp": ("deepseek-v3", "cloudmatrix-384", None, {"tp": 4, "pp": 4, "dp": 4, "ep": 16, "recompute": "full"}),
}


ROUGHLY = {
    # Where groups tile no unit those of some stages straddle and others' do not; the mean stage is taken to lie as all do.
    "pipeline over racks of 72": 0.12,
    "stages of 16 in 24, 24 and 16": 0.03,
    # Groups leave 8, 16 or 24 ranks in another rack; a token's chance to be sent there is taken as that of their mean.
    "experts on 32 of 72, deduplicated": 0.05,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_traffic_equals_the_list_of_all_messages(name: str) -> None:
    model, cluster, stack, words = LAYOUTS[name]
    degrees = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "micro_batch": 1, **words}
    share = degrees.pop("per_supernode", None)
    width = degrees["tp"] * degrees["cp"] * degrees["dp"]
    to = "pool" if "offload" in words else None
    problem = build_problem(model, cluster, width * degrees["pp"], 64, 4096, stack, offload_to=to)
    problem = problem.model_copy(update={"per_supernode": share})
    edp = width // (degrees["ep"] * degrees["etp"])
    layout = Layout(**(degrees | {"edp": edp, "num_microbatches": max(64 // degrees["dp"], 1)}))
    cost = CostModel(problem)
    layout = with_default_stages(cost, layout)
    found, expected = detail(cost, layout), listed(problem, layout)
    exact = ROUGHLY.get(name, 1e-9)
    assert {level: set(by) for level, by in found.traffic_gib.items() if by} == {level: set(by) for level, by in expected.items()}
    for level, by in expected.items():
        for dimension, size in by.items():
            assert found.traffic_gib[level][dimension] == pytest.approx(size, rel=exact), (level, dimension)
    supernode = wire_levels_outside(problem)
    outside = sum(size for level in supernode for size in expected.get(level, {}).values())
    whole = sum(size for by in expected.values() for name, size in by.items() if name != "offload")  # the pool is no device
    assert found.cross_supernode_share == pytest.approx(outside / whole, rel=exact)


@pytest.mark.parametrize("words", [{"dp": 8, "tp": 2}, {"dp": 4, "tp": 2, "recompute": "full"}])
def test_zero2_and_zero3_of_gathered_stages_are_one_program(words: dict[str, Any]) -> None:
    """torchtitan's `never` and `default` both keep a pipeline's weights after forward, and torch's pipelining resharding and
    gradient reduction off until the last backward: one time, one memory, one traffic.
    """
    problem = build_problem("llama-3.1-8b", "hgx-h100", 2 * words["dp"] * 2, 64, 4096, "torchtitan")
    found = []
    for sharding in ("zero2", "zero3"):
        layout = Layout(pp=2, edp=words["dp"] * 2, num_microbatches=64 // words["dp"], optimizer_sharding=sharding, **words)
        cost = CostModel(problem)
        priced = detail(cost, with_default_stages(cost, layout))
        found.append((priced.step_time_s, priced.stage_bytes, priced.traffic_gib))
    assert found[0] == found[1]


def wire_levels_outside(problem: Problem) -> list[str]:
    names = [level.name for level in problem.cluster.levels]
    return names[names.index(problem.cluster.supernode) + 1 :]


def test_one_device_sends_nothing() -> None:
    problem = build_problem("qwen3-0.6b", "hgx-h100", 1, 8, 4096)
    priced, _ = evaluate(problem, Layout(num_microbatches=8))
    assert not any(priced.traffic_gib.values())
    assert priced.cross_supernode_share == 0


def test_recompute_sends_forward_traffic_again() -> None:
    """SP sends the hidden states four times per layer and direction and gathers two of them again for wgrad; full recompute repeats
    forward's share.
    """
    problem = build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096)
    layouts = (Layout(tp=8, edp=8, num_microbatches=8, recompute=choice) for choice in ("none", "full"))
    none, full = (evaluate(problem, layout)[0].traffic_gib["server"]["tp"] for layout in layouts)
    hidden = 2 * 4096 * 4096 * 7 / 8 / GIB
    layers = 32 * 8
    assert full - none == pytest.approx(4 * hidden * layers, rel=1e-9)
    head_and_embedding = (1 + 1 + 1 + 1 + 1) * hidden * 8 + 2 * 3 * 4 * 4096 * 7 / 8 / GIB * 8
    assert none == pytest.approx((4 + 4 + 2) * hidden * layers + head_and_embedding, rel=1e-9)

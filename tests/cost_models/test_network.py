"""What crosses each level of the network, and what it costs, against counts one by one and against routing by lot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.cost_models.network import Exchange, Network
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.routing import Routing
from paraplan.cost_models.step import CostModel
from paraplan.search_spaces.cluster import ClusterSpec
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.groups import Groups
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Layout, LayoutTable

ODD_CLUSTERS = [
    ("gb200-nvl72", 72),
    ("gb200-nvl72", 576),
    ("cloudmatrix-384", 384),
    ("cloudmatrix-384", 768),
    ("cloudmatrix-384", 2048),
    ("atlas-960-superpod", 15488),
    ("atlas-950-superpod", 3072),
]
COLLECTIVES = ("all_gather_s", "reduce_scatter_s", "all_reduce_s", "all_to_all_s")


def network(name: str | ClusterSpec, devices: int) -> Network:
    cluster = load_cluster(name)
    return Network(cluster, load_profile(cluster.accelerator.name), cluster.allocated_sizes(devices))


def some_groups(devices: int, count: int = 300) -> Groups:
    """Groups of any size and stride that fit the job."""
    rng = np.random.default_rng(devices)
    size = rng.choice([1, 2, 3, 4, 6, 8, 11, 12, 16, 22, 24, 32, 64, 72, 88, 96, 128], count)
    stride = rng.choice([1, 2, 3, 4, 8, 9, 16, 64, 72, 88], count)
    keep = size * stride <= devices
    return Groups(size[keep], stride[keep])


def bytes_of(size: int) -> np.ndarray:
    return np.full(size, 1e8)


@pytest.mark.parametrize(("name", "devices"), ODD_CLUSTERS)
def test_a_group_is_the_product_of_what_its_levels_join(name: str, devices: int) -> None:
    net, group = network(name, devices), some_groups(devices)
    at = net.crossing(group)
    np.testing.assert_allclose(at.fan.prod(axis=0), group.size)
    np.testing.assert_allclose(at.members[-1], group.size)
    np.testing.assert_allclose(at.below * at.fan, at.members)
    assert (at.fan >= 1.0).all()
    crossed = at.fan > 1.0
    assert (at.outermost[group.size > 1] == len(crossed) - 1 - np.argmax(crossed[::-1, group.size > 1], axis=0)).all()


@pytest.mark.parametrize(("name", "devices"), ODD_CLUSTERS)
def test_what_is_sent_over_all_levels_adds_up(name: str, devices: int) -> None:
    """A gather, a scatter and an all-to-all of S bytes send S·(n−1)/n per rank, whatever the levels: on average over all ranks, and
    the worst never less.
    """
    net, group = network(name, devices), some_groups(devices)
    at, sent = net.crossing(group), bytes_of(len(group.size))
    expected = sent * (group.size - 1) / group.size
    mean = net.mean_crossing(group, np.full(len(sent), devices))
    for formula in (net.ring_bytes, net.all_to_all_bytes):
        np.testing.assert_allclose(formula(mean, sent).sum(axis=0), expected)
        assert (formula(at, sent).sum(axis=0) >= expected * (1 - 1e-12)).all()


def test_a_group_that_does_not_tile_waits_for_its_emptiest_unit() -> None:
    """EP 64 on racks of 72: eight of a group alone in a rack bring in what the other 56 hold, through eight ways."""
    net, sent = network("gb200-nvl72", 576), np.array([64.0])
    at = net.crossing(Groups(np.array([64]), np.array([1])))
    assert net.ring_bytes(at, sent)[-1, 0] == pytest.approx(64 * (1 / 8 - 1 / 64))
    assert net.all_to_all_bytes(at, sent)[-1, 0] == pytest.approx(56)
    mean = net.mean_crossing(Groups(np.array([64]), np.array([1])), np.array([576]))
    split = [8 * (9 - k) if k else 64 for k in range(9)]  # of group k, in the rack where it starts
    assert net.all_to_all_bytes(mean, sent)[-1, 0] == pytest.approx(np.mean([2 * a * (64 - a) / 64 for a in split]))


def test_where_known_groups_cross() -> None:
    net = network("gb200-nvl72", 576)  # eight racks of 72, servers of 4
    for size, stride, fans in (
        (4, 1, (4, 1, 1)),
        (8, 1, (4, 2, 1)),
        (72, 1, (4, 18, 1)),
        (64, 1, (4, 8, 2)),  # blocks of 64 do not tile 72: the worst one lies in two racks
        (8, 72, (1, 1, 8)),
        (18, 4, (1, 18, 1)),
    ):
        at = net.crossing(Groups(np.array([size]), np.array([stride])))
        assert at.fan[:, 0].tolist() == pytest.approx(fans)
    net = network("cloudmatrix-384", 384)  # half a supernode: nothing leaves it
    at = net.crossing(Groups(np.array([384, 16, 24]), np.array([1, 1, 16])))
    assert at.fan[-1].tolist() == [1.0, 1.0, 1.0]
    net = network("atlas-960-superpod", 15488)  # cabinets of 88
    at = net.crossing(Groups(np.array([88, 176, 15488, 16]), np.array([1, 1, 1, 1])))
    assert at.fan[0].tolist() == pytest.approx([88, 88, 88, 8])  # 16 divides no 88: two cabinets of eight
    assert at.fan[1].tolist() == pytest.approx([1, 2, 176, 2])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("name", "devices"), [*ODD_CLUSTERS, ("hgx-h100", 64), ("mi300x", 64)])
def test_more_bytes_take_longer(name: str, devices: int, collective: str) -> None:
    net, group = network(name, devices), some_groups(devices, 100)
    at = net.crossing(group)
    times = np.array([getattr(net, collective)(at, np.full(len(group.size), size)) for size in np.logspace(2, 10, 33)])
    assert (np.diff(times, axis=0)[:, group.size > 1] > 0).all()
    assert (times[:, group.size == 1] == 0).all()
    assert (getattr(net, collective)(at, np.zeros(len(group.size))) == 0).all()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_larger_groups_take_longer(collective: str) -> None:
    """But for the copies of a rank's own share, which shrink as it does: a few percent at most."""
    net = network("hgx-h100", 512)
    sizes = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    for size in (1e4, 1e7, 1e9):
        times = getattr(net, collective)(net.crossing(Groups(sizes, np.ones_like(sizes))), np.full(len(sizes), size))
        assert (np.diff(times) >= -0.04 * times[1:]).all()
        assert times[-1] > 1.2 * times[1]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_group_spread_over_servers_takes_longer_than_inside_one(collective: str) -> None:
    net = network("hgx-h100", 64)
    groups = Groups(np.array([8, 8, 8]), np.array([1, 2, 8]))
    times = getattr(net, collective)(net.crossing(groups), bytes_of(3))
    assert times[0] < times[1] < times[2]


@given(
    cluster=st.sampled_from([name for name, _ in ODD_CLUSTERS] + ["hgx-h100", "hgx-h800", "mi300x", "three-tier-h100"]),
    share=st.integers(1, 12),
    stride=st.integers(2, 96),
    collective=st.sampled_from([*COLLECTIVES, "dispatch", "library dispatch"]),
    size=st.floats(3.0, 10.0),
)
@settings(max_examples=100, deadline=None)
def test_no_group_is_faster_for_leaving_the_unit_that_it_fits_into(
    cluster: str, share: int, stride: int, collective: str, size: float
) -> None:
    """A group side by side in one supernode, against the same with members moved out of it."""
    spec = load_cluster(cluster)
    supernode = spec.levels[spec.supernode_place].size or 1
    ranks, net, sent = max(supernode // share, 1), network(spec, 8 * supernode), np.array([10.0**size])
    if supernode % ranks or ranks * stride > 8 * supernode:
        return
    inside, outwards = (net.crossing(Groups(np.array([ranks]), np.array([apart]))) for apart in (1, stride))
    if outwards.outermost[0] <= net.supernode:
        return
    if collective in COLLECTIVES:
        times = [getattr(net, collective)(at, sent)[0] for at in (inside, outwards)]
    else:
        kernel: Exchange | None = "moe_dispatch" if collective == "dispatch" else None
        times = [net.exchange_s(at, sent, Routing(8, 4 * ranks + 8), kernel, 8192.0)[0] for at in (inside, outwards)]
    assert times[0] <= times[1] * (1 + 1e-9)


def test_a_message_to_a_neighbour_takes_longer_further_out() -> None:
    for name, devices in ODD_CLUSTERS:
        net = network(name, devices)
        outwards = np.arange(len(net.levels))
        times = net.p2p_s(outwards, np.full(len(outwards), 1e8))
        assert (np.diff(times[net.supernode :]) > 0).all()
        assert net.p2p_s(outwards, np.zeros(len(outwards))).tolist() == [0.0] * len(outwards)


def one_f_one_b_s(edges: list[float], num_microbatches: int) -> float:
    """1F1B of equal stages, forward 1 s and backward 2 s, pass by pass, with a message of its own length on every edge."""
    pp = len(edges) + 1
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * pp
    orders = []
    for stage in range(pp):
        warm = min(pp - 1 - stage, num_microbatches)
        steady = [each for k in range(num_microbatches - warm) for each in (("f", warm + k), ("b", k))]
        orders.append(
            [*(("f", k) for k in range(warm)), *steady, *(("b", k) for k in range(num_microbatches - warm, num_microbatches))]
        )
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, k = order[0]
                before = stage - 1 if kind == "f" else stage + 1
                arrived = 0.0
                if 0 <= before < pp:
                    if (kind, k, before) not in ends:
                        break
                    arrived = ends[kind, k, before] + edges[min(stage, before)]
                free[stage] = ends[kind, k, stage] = max(free[stage], arrived) + (1.0 if kind == "f" else 2.0)
                order.pop(0)
    return max(free)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(("pp", "stride", "devices"), [(8, 4, 576), (8, 16, 1152), (16, 8, 1152), (12, 24, 576), (8, 48, 1152)])
def test_stages_in_and_across_racks_talk_as_each_edge_does(pp: int, stride: int, devices: int, num_microbatches: int) -> None:
    """Pipelines over racks of 72, some neighbours in one, some not: within 3 % of a replay of the worst pipeline, edge by edge,
    where a message across takes a fifth of a forward; as if all edges crossed would be up to 8 % more.
    """
    net = network("gb200-nvl72", devices)
    m, size = pp * num_microbatches, np.array([1e8])
    at = net.crossing(Groups(np.array([pp]), np.array([stride])))
    inside, across = (float(net.p2p_s(np.array([level]), size)[0]) for level in (1, 2))
    scale = 0.2 / across
    starts = [block * pp * stride + offset for block in range(devices // (pp * stride)) for offset in range(stride)]
    patterns = {tuple((s + stride * e) // 72 != (s + stride * (e + 1)) // 72 for e in range(pp - 1)) for s in starts}
    told = float(net.chain_s(at.edges, size, np.zeros(1))[0])
    exact = max(one_f_one_b_s([scale * (across if out else inside) for out in pattern], m) for pattern in patterns)
    assert one_f_one_b_s([scale * told] * (pp - 1), m) == pytest.approx(exact, rel=0.03)
    assert one_f_one_b_s([0.2] * (pp - 1), m) > exact * 1.02


def slower_inside(cluster: ClusterSpec, level: str, more_s: float) -> ClusterSpec:
    """The cluster with another latency of one level."""
    levels = [
        each.model_copy(update={"latency_s": each.latency_s.model_copy(update={"value": each.latency_s.value + more_s})})
        if each.name == level
        else each
        for each in cluster.levels
    ]
    return cluster.model_copy(update={"levels": tuple(levels)})


@pytest.mark.parametrize(("kernel", "devices"), [(None, 64), ("moe_dispatch", 64), (None, 1536)])
def test_peers_that_are_reached_at_once_wait_for_the_furthest_only(kernel: Exchange | None, devices: int) -> None:
    """A latency is that of the whole way between two dies (StrataCL: 0.2 µs in a package, 0.7 in a server, 2.1 across servers)."""
    cluster = load_cluster("cloudmatrix-384")
    further = cluster.levels[2 if devices <= 768 else 3].name
    for level, waits in (("package", False), ("server", False), (further, True)):
        plain, slow = (
            exchanged_s(network(each, devices), devices, 4096.0, kernel) for each in (cluster, slower_inside(cluster, level, 1e-3))
        )
        assert slow - plain == pytest.approx(1e-3 if waits else 0.0, abs=1e-9)


def test_a_fused_kernel_waits_for_the_way_in_and_the_way_on() -> None:
    """What enters a supernode once is passed on inside: one hop in each of the two fabrics, none for levels further in."""
    cluster = load_cluster("cloudmatrix-384")
    for level, waits in (("server", False), ("supernode", True), ("scale-out", True)):
        plain, slow = (exchanged_s(network(each, 1536), 1536, 4096.0) for each in (cluster, slower_inside(cluster, level, 1e-3)))
        assert slow - plain == pytest.approx(1e-3 if waits else 0.0, abs=1e-9)


def meshed(kind: str, devices: int = 64) -> Network:
    """Servers of 8 devices, fully meshed or behind a switch, nothing else different."""
    cluster = load_cluster("hgx-h100")
    inner = cluster.levels[0].model_copy(update={"kind": kind, "in_network_reduction": False})
    return network(cluster.model_copy(update={"levels": (inner, *cluster.levels[1:])}), devices)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_full_mesh_gives_a_group_only_the_links_to_its_members(size: int) -> None:
    """Of a device's seven links a group of n uses n−1, a whole server all; what a device copies within itself needs none."""
    group = Groups(np.array([size]), np.array([1]))
    mesh, switched = meshed("full_mesh"), meshed("switched")
    for collective in COLLECTIVES:
        slow, fast = (getattr(net, collective)(net.crossing(group), np.array([1e12])) for net in (mesh, switched))
        curve = load_profile("h100-80gb-sxm").collectives["scale-up"][collective.removesuffix("_s")]
        sent = curve.passes * (size - 1) / size
        copied = curve.local_cost.value * (curve.passes - sent) if curve.local_cost else 0.0
        assert slow[0] / fast[0] == pytest.approx((sent * 7 / (size - 1) + copied) / (sent + copied), rel=1e-3)
    slow, fast = (net.p2p_s(np.array([0]), np.array([1e12])) for net in (mesh, switched))
    assert slow[0] / fast[0] == pytest.approx(7, rel=1e-3)


def test_a_small_job_adds_no_links_to_a_mesh() -> None:
    """Two of eight devices that are joined pair by pair talk over one link, whoever uses the others."""
    alone, among = meshed("full_mesh", 2), meshed("full_mesh", 8)
    pair = Groups(np.array([2]), np.array([1]))
    for collective in COLLECTIVES:
        once, twice = (getattr(net, collective)(net.crossing(pair), bytes_of(1)) for net in (alone, among))
        assert once == twice
    assert alone.p2p_s(np.array([0]), bytes_of(1)) == among.p2p_s(np.array([0]), bytes_of(1))


# --- expert dispatch ---------------------------------------------------------------------------------------------------------


def routed_by_lot(
    units: list[int], fabrics: list[str], experts: int, top_k: int, dedup: bool, limit: int | None, groups: int, tokens: int = 2500
) -> np.ndarray:
    """Copies of a token that cross each level, on average, when experts are drawn at random, (levels,).

    Alone, every copy goes straight to its device. With dedup a token goes once to every unit that a fabric joins and that it
    needs, to the rank there in its own sender's place, which passes it on inside.
    """
    rng, size = np.random.default_rng(3), units[-1]
    counts = np.zeros(len(units))
    for _ in range(tokens):
        source = int(rng.integers(size))
        open_groups = rng.choice(groups, limit or groups, replace=False)
        allowed = np.flatnonzero(np.isin(np.arange(experts) * groups // experts, open_groups))
        devices = rng.choice(allowed, top_k, replace=False) * size // experts
        for level, members in enumerate(units):
            below = units[level - 1] if level else 1
            if dedup:
                levels = [i for i, fabric in enumerate(fabrics) if fabric == fabrics[level]]
                inside, whole = units[levels[0] - 1] if levels[0] else 1, units[levels[-1]]
                for hit in np.unique(devices // inside) * inside:
                    entry = hit // whole * whole + source % whole // inside * inside
                    counts[level] += hit // members == entry // members and hit // below != entry // below
            else:
                counts[level] += ((devices // members == source // members) & (devices // below != source // below)).sum()
    return counts / tokens


@pytest.mark.parametrize(
    ("name", "devices", "ep", "per_device"),
    [
        ("hgx-h100", 64, 64, 16),
        ("hgx-h100", 64, 8, 2),
        ("hgx-h100", 32, 32, 1),
        ("gb200-nvl72", 144, 72, 4),
        ("cloudmatrix-384", 1536, 128, 2),
    ],
)
@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_dispatch_sends_what_routing_by_lot_sends(name: str, devices: int, ep: int, top_k: int, per_device: int) -> None:
    """With few experts too, of which a token's are distinct."""
    net, experts = network(name, devices), per_device * ep
    if top_k > experts:
        return
    net = network(name, devices)
    at = net.crossing(Groups(np.array([ep]), np.array([1])))
    units = [round(float(members)) for members in at.members[:, 0]]
    fabrics = [level.efficiency_profile for level in net.levels]
    for dedup in (False, True):
        sent = net.dispatch_bytes(at, np.array([1.0]), Routing(top_k, experts), dedup)[:, 0]
        counted = routed_by_lot(units, fabrics, experts, top_k, dedup, None, 1)
        np.testing.assert_allclose(sent, counted, rtol=0.03, atol=0.03)


def test_dispatch_alone_sends_every_copy_once() -> None:
    net = network("cloudmatrix-384", 1536)
    at = net.crossing(Groups(np.array([128]), np.array([1])))
    sent = net.dispatch_bytes(at, np.array([1.0]), Routing(8, 256), False)
    assert sent.sum() == pytest.approx(8 * 127 / 128)


@pytest.mark.parametrize("dispatched", [(8, 4, 8), (8, 2, 8), (6, 3, 4)])
def test_node_limited_routing_sends_to_no_more_nodes(dispatched: tuple[int, int, int]) -> None:
    """DeepSeek-V3's 4 of 8 groups and its kin: what is sent by lot."""
    top_k, limit, groups = dispatched
    net = network("hgx-h100", 8 * groups)
    at = net.crossing(Groups(np.array([8 * groups]), np.array([1])))
    routing = Routing(top_k, 32 * groups, limit, groups)
    sent = net.dispatch_bytes(at, np.array([1.0]), routing, True)[:, 0]
    free = net.dispatch_bytes(at, np.array([1.0]), Routing(top_k, 32 * groups), True)[:, 0]
    counted = routed_by_lot([8, 8 * groups], ["scale-up", "scale-out"], 32 * groups, top_k, True, limit, groups)
    assert (sent <= free * (1 + 1e-12)).all()
    assert sent[1] <= limit
    np.testing.assert_allclose(sent, counted, rtol=0.02)


def test_dispatch_never_sends_more_than_every_copy() -> None:
    for name, devices in ODD_CLUSTERS:
        net, group = network(name, devices), some_groups(devices, 60)
        at, one = net.crossing(group), np.ones(len(group.size))
        for top_k in (1, 2, 8):
            alone = net.dispatch_bytes(at, one, Routing(top_k, 256), False)
            once = net.dispatch_bytes(at, one, Routing(top_k, 256), True)
            outermost = at.outermost, np.arange(len(one))
            assert (once[outermost] <= alone[outermost] * (1 + 1e-9)).all()
            mean = net.mean_crossing(group, np.full(len(one), devices))
            assert (net.dispatch_bytes(mean, one, Routing(top_k, 256), False).sum(axis=0) <= top_k).all()


def exchanged_s(net: Network, ranks: int, hidden: float, kernel: Exchange | None = "moe_dispatch") -> float:
    """Seconds in which 4,096 tokens of BF16 reach their 8 of 256 experts on `ranks` devices side by side."""
    at, copy_bytes = net.crossing(Groups(np.array([ranks]), np.array([1]))), 2.0 * hidden
    return float(net.exchange_s(at, np.array([4096 * copy_bytes]), Routing(8, 256), kernel, copy_bytes)[0])


@pytest.mark.parametrize("name", ["hgx-b200", "hgx-b300", "gb200-nvl72", "gb300-nvl72"])
def test_deepep_on_blackwell_waits_for_its_multiprocessors(name: str) -> None:
    """A fifth of them at work, it takes nearly five times as long; HybridEP, which most stacks run there, is faster than either."""
    cluster = load_cluster(name)
    profile = load_profile(cluster.accelerator.name)
    many, few = (
        exchanged_s(Network(cluster, profile, cluster.allocated_sizes(8), backend="deepep", sms=sms), 4, 7168) for sms in (20, 4)
    )
    assert 3.5 <= few / many <= 5
    assert exchanged_s(network(name, 8), 4, 7168) < 0.8 * many
    assert exchanged_s(Network(cluster, profile, cluster.allocated_sizes(8), backend="hybridep", sms=4), 4, 7168) == exchanged_s(
        network(name, 8), 4, 7168
    )


def test_half_as_wide_tokens_take_more_than_half_as_long() -> None:
    """A token of 2,048 costs DeepEP more than two sevenths of one of 7,168: each is looked at, however wide."""
    net = network("hgx-h100", 8)
    assert exchanged_s(net, 8, 2048) > 1.15 * 2048 / 7168 * exchanged_s(net, 8, 7168)


def test_an_oversubscribed_link_is_filled_by_fewer_bytes() -> None:
    """An oversubscribed spine stretches what it carries by as much, the wait before it by far less."""
    cluster = load_cluster("hgx-h100")
    out = cluster.levels[-1]
    narrow = cluster.model_copy(update={"levels": (*cluster.levels[:-1], out.model_copy(update={"oversubscription": 4.0}))})
    wide_net, narrow_net = network(cluster, 64), network(narrow, 64)
    at = wide_net.crossing(Groups(np.array([64, 64]), np.array([1, 1])))
    slower = narrow_net.all_to_all_s(at, np.array([1e3, 1e10])) / wide_net.all_to_all_s(at, np.array([1e3, 1e10]))
    assert slower[0] < 1.25
    assert slower[1] == pytest.approx(4.0, rel=0.02)


# --- algorithms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 64])
def test_full_mesh_wins_small_messages_on_cloudmatrix_and_rings_large_ones(size: int) -> None:
    """arXiv 2607.26444: straight to every peer below 1 MiB, by far at 64 KiB; a ring above 16 MiB."""
    net = network("cloudmatrix-384", 768)
    at = net.crossing(Groups(np.full(4, size), np.ones(4, dtype=np.int64)))
    message = np.array([2.0**16, 2.0**20, 2.0**24, 2.0**28])
    bytes_ = net.ring_bytes(at, message)
    ring, direct = (net._collective(name, at, bytes_, message) for name in ("all_gather", "all_gather_direct"))
    assert (direct[:2] < ring[:2]).all()
    assert (ring[2:] < direct[2:]).all()
    np.testing.assert_array_equal(net.all_gather_s(at, message), np.minimum(ring, direct))
    outside = network("cloudmatrix-384", 1536)
    across = outside.crossing(Groups(np.array([2]), np.array([768])))
    once = outside.ring_bytes(across, message[:1])
    assert outside.all_gather_s(across, message[:1])[0] == outside._collective("all_gather", across, once, message[:1])[0]


@pytest.mark.parametrize(("size", "least", "most"), [(16, 1.9, 2.6), (32, 5.0, 7.5)])
def test_a_ring_of_one_hop_after_another_loses_to_a_full_mesh_by_the_published_factor(size: int, least: float, most: float) -> None:
    """arXiv 2607.26444 has 4.5 times at 64 KiB: between what rings of 16 and of 32 dies lose; trees, rings by level lose less."""
    net, message = network("cloudmatrix-384", 768), np.array([2.0**16])
    at = net.crossing(Groups(np.array([size]), np.array([1])))
    for name, passes in (("all_gather", 1.0), ("all_reduce", 2.0)):
        sent = passes * net.ring_bytes(at, message)
        by_level, direct = (net._collective(each, at, sent, message)[0] for each in (name, f"{name}_direct"))
        by_level_hops_s = (net._hops(name, at, passes)[:, 0] * net._curves(name).hop_s).sum()
        flat = by_level - by_level_hops_s + passes * (size - 1) * net.latency[at.outermost[0]]
        assert least <= flat / direct <= most
        assert by_level / direct < 2


@pytest.mark.parametrize(("name", "direct"), [("atlas-800t-a2", True), ("mi300x", True), ("mi355x", True), ("hgx-h100", False)])
def test_small_messages_go_straight_over_a_mesh(name: str, direct: bool) -> None:
    """One hop where a ring of eight takes seven; NCCL's measured curves hold what it does, whatever its switches could."""
    net = network(name, 8)
    at = net.crossing(Groups(np.array([8]), np.array([1])))
    small, large = np.array([2.0**12]), np.array([2.0**30])
    saved_s = 5 * net.latency[0]  # a tree of eight takes six
    for collective, passes in (("all_gather", 1.0), ("reduce_scatter", 1.0)):
        library_s = net._collective(collective, at, passes * net.ring_bytes(at, small), small)
        assert library_s - getattr(net, f"{collective}_s")(at, small) == pytest.approx(saved_s if direct else 0.0, abs=1e-12)
    assert net.all_gather_s(at, large) == pytest.approx(
        net._collective("all_gather", at, net.ring_bytes(at, large), large), rel=0.01
    )


def gathered(ranks: list[int], units: list[int], straight: list[bool]) -> tuple[np.ndarray, list[int]]:
    """An all-gather message by message, outermost level first: shares that each rank sends across every level, (levels, ranks), and
    steps in a row there. Straight over a level a rank sends what it has to every peer at once, else from neighbour to neighbour.
    """
    held = {rank: {rank} for rank in ranks}
    sent, steps = np.zeros((len(units), len(ranks))), [0] * len(units)
    inner = [1, *units[:-1]]
    for level in range(len(units) - 1, -1, -1):
        lanes: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            lanes.setdefault((rank // units[level], rank % inner[level]), []).append(rank)
        had = {rank: set(held[rank]) for rank in ranks}
        for lane in lanes.values():
            for place, rank in enumerate(lane):
                for ahead in range(1, len(lane)):
                    sent[level, ranks.index(rank)] += len(had[rank if straight[level] else lane[place - ahead + 1]])
                    held[lane[(place + ahead) % len(lane)]] |= had[rank]
            steps[level] = max(steps[level], min(len(lane) - 1, 1) if straight[level] else len(lane) - 1)
    assert all(each == set(ranks) for each in held.values())
    return sent, steps


def in_three_supernodes() -> ClusterSpec:
    """CloudMatrix384's dies in supernodes of 128: 384 of them are 2⁷·3."""
    cluster = load_cluster("cloudmatrix-384")
    levels = tuple(level.model_copy(update={"size": 128}) if level.name == "supernode" else level for level in cluster.levels)
    return cluster.model_copy(update={"levels": levels})


@pytest.mark.parametrize(
    ("cluster", "devices", "size", "stride"),
    [
        (load_cluster("mi355x"), 72, 72, 1),  # nine meshes of eight
        (load_cluster("mi355x"), 32, 8, 4),  # two of each of four
        (in_three_supernodes(), 384, 384, 1),
        (in_three_supernodes(), 384, 24, 16),  # a die of every server
    ],
)
def test_straight_inside_and_round_a_ring_outside(cluster: ClusterSpec, devices: int, size: int, stride: int) -> None:
    """Next to no bytes take one hop on every level inside a supernode and steps around a ring, or up and down a tree, outside; all
    send what a list of every message sends across each level.
    """
    net = network(cluster, devices)
    at, small = net.crossing(Groups(np.array([size]), np.array([stride]))), np.array([1e-6])
    straight = [index <= net.supernode for index in range(len(net.levels))]
    sent, steps = gathered([stride * rank for rank in range(size)], [min(unit, devices) for unit in net.sizes], straight)
    assert net.ring_bytes(at, np.array([float(size)]))[:, 0] == pytest.approx(sent.mean(axis=1))
    assert np.ptp(sent, axis=1).max() == 0  # none sends more than another
    curves = net._curves("all_gather_direct")
    by_hand_s = curves.launch_s[-1] + sum(np.minimum(steps, np.maximum(at.tree_steps[:, 0], 1)) * net.latency)
    assert net.all_gather_s(at, small)[0] == pytest.approx(by_hand_s, rel=1e-4)
    ringed_s = curves.launch_s[-1] + sum(np.minimum(at.fan - 1, at.tree_steps)[:, 0] * net.latency)
    assert (by_hand_s < ringed_s) == bool((at.fan[: net.supernode + 1] > 2).any())


def test_trays_of_a_rack_reduce_in_its_switches() -> None:
    """GB200's all-reduce over 72 devices: 850 GB/s of bus bandwidth with reduction in the switches (NVIDIA, GTC 2025)."""
    net = network("gb200-nvl72", 72)
    at = net.crossing(Groups(np.array([72]), np.array([1])))
    size = np.array([2.0**33])
    bus = 2 * size * 71 / 72 / net.all_reduce_s(at, size)
    assert bus[0] == pytest.approx(850e9, rel=0.08)
    two = network("gb200-nvl72", 144)
    across = two.crossing(Groups(np.array([144]), np.array([1])))  # over the network between racks nothing reduces
    assert two.all_reduce_s(across, size)[0] >= two._collective("all_reduce", across, 2 * two.ring_bytes(across, size), size)[0]


def test_a_level_of_an_unknown_fabric_is_refused_by_name() -> None:
    cluster = load_cluster("hgx-h100")
    server, outer = cluster.levels
    named = cluster.model_copy(update={"levels": (server.model_copy(update={"efficiency_profile": "foo"}), outer)})
    problem = build_problem("llama-3.1-8b", named, 8, 16, 2048)
    with pytest.raises(InputError, match="no collectives section 'foo'"):
        CostModel(problem).price(LayoutTable.from_layouts([Layout(tp=2, dp=4, num_microbatches=4)]))

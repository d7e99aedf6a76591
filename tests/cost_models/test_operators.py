"""Properties that hold for every legal layout, and kernels and messages that can be checked one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.compute import Kernels
from paraplan.cost_models.details import detail
from paraplan.cost_models.network import Network
from paraplan.cost_models.operators import Factors, Operator, dispatch_buffer_bytes, head_operators, layer_operators
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.routing import Routing
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.search_spaces.cluster import ClusterSpec, Figure
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.groups import Groups
from paraplan.search_spaces.inputs import build_problem, load_accelerator, load_cluster, load_model, load_stack
from paraplan.search_spaces.layout import SCHEDULES, Layout, LayoutTable, Problem

PROBLEMS: dict[str, tuple[Any, ...]] = {
    "dense": ("llama-3.1-8b", "hgx-h100", 64, 128, 8192),
    "mixture": ("qwen3-30b-a3b", "hgx-h800", 64, 256, 4096),
    "latent attention, mtp": ("deepseek-v3", "cloudmatrix-384", 256, 512, 4096),
    "fsdp": ("llama-3.1-8b", "hgx-h100", 32, 64, 8192, "torchtitan"),
    "hybrid": ("qwen3-next-80b-a3b", "hgx-h200", 32, 64, 8192),
    "windows and sinks": ("gpt-oss-20b", "hgx-b200", 32, 64, 8192),
}


@cache
def problem_of(name: str) -> Problem:
    return build_problem(*PROBLEMS[name])


@cache
def random_layouts(name: str) -> tuple[Layout, ...]:
    """Legal layouts of random frames, cut as the search would cut them."""
    problem = problem_of(name)
    rng, space, cost = np.random.default_rng(0), Space(problem), CostModel(problem)
    used = np.nonzero(space.layouts_per_frame)[0]
    found = []
    for frame in rng.choice(used, 18):
        table, _ = space.layouts(np.array([frame]))
        layout = table.layout(int(rng.integers(len(table))), problem.model.num_layers)
        found.append(with_default_stages(cost, layout))
    return tuple(found)


@pytest.mark.parametrize("name", PROBLEMS)
def test_breakdown_and_terms_add_up_on_random_legal_layouts(name: str) -> None:
    problem = problem_of(name)
    cost = CostModel(problem)
    for layout in random_layouts(name):
        found = detail(cost, layout)
        assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s, rel=1e-9)
        assert min(found.breakdown_s.values()) >= -1e-9 * found.step_time_s, (layout, found.breakdown_s)
        assert found.executed_flops >= found.model_flops
        price = cost.price(LayoutTable.from_layouts([layout]))
        assert price.step_time_s[0] == pytest.approx(found.step_time_s, rel=1e-9)
        assert price.peak_bytes[0] == pytest.approx(max(sum(terms.values()) for terms in found.stage_bytes), rel=1e-9)
        assert 0 <= found.cross_supernode_share <= 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_table_prices_as_its_rows_do(name: str) -> None:
    problem = problem_of(name)
    cost, layouts = CostModel(problem), random_layouts(name)
    together = cost.price(LayoutTable.from_layouts(layouts))
    for row, layout in enumerate(layouts):
        alone = cost.price(LayoutTable.from_layouts([layout]))
        for figure in ("step_time_s", "peak_bytes", "critical_stage", "fullest_stage"):
            assert getattr(together, figure)[row] == pytest.approx(getattr(alone, figure)[0], rel=1e-12), figure


def faster(figure: Figure, times: float) -> Figure:
    return Figure(value=figure.value * times, source="a test", grade="given")


def with_network(cluster: ClusterSpec, level: int, times: float) -> ClusterSpec:
    levels = list(cluster.levels)
    wide = faster(levels[level].bandwidth_bytes_per_s, times)
    levels[level] = levels[level].model_copy(update={"bandwidth_bytes_per_s": wide})
    return cluster.model_copy(update={"levels": tuple(levels)})


def with_device(cluster: ClusterSpec, name: str, times: float) -> ClusterSpec:
    device = cluster.accelerator
    if name == "memory":
        update: dict[str, Any] = {"memory_bandwidth_bytes_per_s": faster(device.memory_bandwidth_bytes_per_s, times)}
    else:
        update = {"peak_flops": {key: faster(rate, times) for key, rate in device.peak_flops.items()}}
    return cluster.model_copy(update={"accelerator": device.model_copy(update=update)})


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("what", ["innermost", "outermost", "memory", "peak"])
def test_better_hardware_is_never_slower(name: str, what: str) -> None:
    """Twice the bandwidth of a level or of the memory, or twice the peak, on the same layouts and cuts."""
    problem = problem_of(name)
    cluster = problem.cluster
    if what in ("innermost", "outermost"):
        better = with_network(cluster, 0 if what == "innermost" else -1, 2.0)
    else:
        better = with_device(cluster, what, 2.0)
    table = LayoutTable.from_layouts(random_layouts(name))
    before = CostModel(problem).price(table).step_time_s
    after = CostModel(problem.model_copy(update={"cluster": better})).price(table).step_time_s
    # Interleaved stages are raised alike to the replayed path, which shortens by a little less than theirs in closed form: one
    # that is critical only for what follows its path may then end later.
    slack = np.where(table.schedule == SCHEDULES.index("interleaved"), 1e-3, 1e-9)
    assert (after <= before * (1 + slack)).all()
    if what in ("memory", "peak"):
        assert after.sum() < before.sum()


@pytest.mark.parametrize("name", ["dense", "mixture", "latent attention, mtp"])
def test_recompute_trades_time_for_memory(name: str) -> None:
    """On the same cuts nothing recomputed is fastest; what is recomputed leaves fewer activations behind, full the fewest."""
    problem = problem_of(name)
    cost = CostModel(problem)
    choices = ("none", "selective:layernorm", "selective:layernorm+mlp", "full")
    for layout in random_layouts(name)[:12]:
        time_s, kept = [], []
        for choice in choices:
            stages = tuple(
                s.model_copy(update={"chunks": tuple(c.model_copy(update={"recompute": choice}) for c in s.chunks)})
                for s in layout.stages
            )
            found = detail(cost, layout.model_copy(update={"recompute": choice, "stages": stages}))
            time_s.append(found.step_time_s)
            kept.append([terms["activations"] for terms in found.stage_bytes])
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(time_s)), layout
        for fewer, more in zip(kept[1:], kept, strict=False):
            assert all(a <= b * (1 + 1e-12) for a, b in zip(fewer, more, strict=True)), layout


# ---- kernels -------------------------------------------------------------------------------------------------------


def kernels(device: str, stack: str, precision: str) -> Kernels:
    return Kernels(load_accelerator(device), load_profile(device), load_stack(stack), precision)


def factors(seq_len: float = 4096.0, linear_bytes: float = 2.0, cp: float = 1.0, cp_type: int = 0) -> Factors:
    """One rank with tp, ep, etp and micro-batch 1."""
    one = np.ones(1)
    kind = np.full(1, cp_type, dtype=np.int64)
    return Factors(one, cp * one, one, one, one, np.zeros(1), kind, seq_len, linear_bytes)


def test_backward_of_a_gemm_is_two_gemms_of_its_own_shape() -> None:
    zeros, k = np.zeros(1), kernels("h100-80gb-sxm", "megatron-lm", "bf16")
    gemm = Operator("gemm", "gemm", zeros, m=8192.0, n=512.0, k=4096.0)
    dgrad = Operator("dgrad", "gemm", zeros, m=8192.0, n=4096.0, k=512.0)
    wgrad = Operator("wgrad", "gemm", zeros, m=512.0, n=4096.0, k=8192.0)
    assert k.backward_s(gemm) == pytest.approx(k.forward_s(dgrad) + k.forward_s(wgrad))


def test_gradients_of_experts_one_by_one_show_their_accumulation() -> None:
    """Of each weight's FP32 buffer 4 bytes are read and 4 written where 2 were: 0.8 GB more for 16 experts of 2048 x 4096."""
    one, grouped = (kernels("b200", name, "bf16") for name in ("megatron-lm", "torchtitan"))
    experts = Operator("fc1", "grouped_gemm", np.zeros(1), m=1024.0, n=4096.0, k=2048.0, groups=16.0)
    apart = Kernels(one.accelerator, one.profile, one.stack.model_copy(update={"fused_accumulation": False}), "bf16")
    rate = one.accelerator.memory_bandwidth_bytes_per_s.value * one.profile.memory_efficiency.value
    assert one.wgrad_s(experts) - apart.wgrad_s(experts) == pytest.approx(6 * 16 * 4096 * 2048 / rate)
    together = Kernels(grouped.accelerator, grouped.profile, grouped.stack.model_copy(update={"fused_accumulation": False}), "bf16")
    assert grouped.wgrad_s(experts) == pytest.approx(together.wgrad_s(experts))


def test_a_thin_gemm_takes_as_long_as_its_bytes() -> None:
    """One row against 16384² weights: 512 MiB at the memory's rate, whatever the tensor cores could do."""
    k = kernels("h100-80gb-sxm", "megatron-lm", "bf16")
    thin = Operator("thin", "gemm", np.zeros(1), m=1.0, n=16384.0, k=16384.0)
    moved_s = 2 * 16384 * 16384 / (k.accelerator.memory_bandwidth_bytes_per_s.value * k.profile.memory_efficiency.value)
    assert k.forward_s(thin)[0] >= moved_s / k.stack.efficiency.value


def test_unfused_attention_computes_what_the_mask_hides() -> None:
    """Flash kernels skip masked blocks; unfused ones do all of it: twice the FLOPs at full causal attention."""
    k = kernels("a100-80gb-sxm", "megatron-lm", "bf16")
    unfused = Kernels(k.accelerator, k.profile, k.stack.model_copy(update={"attention_kernel": "unfused"}), "bf16")
    attention = Operator("attention", "attention", np.zeros(1), flops=1e12, full_flops=2e12, seq=4096.0, head_dim=128.0)
    whole = Operator("attention", "attention", np.zeros(1), flops=2e12, full_flops=2e12, seq=4096.0, head_dim=128.0)
    assert unfused.forward_s(attention) == pytest.approx(unfused.forward_s(whole))
    assert k.forward_s(attention) == pytest.approx(k.forward_s(whole) / 2)


@pytest.mark.parametrize("name", ["lm_head", "router"])
def test_head_and_router_stay_in_bf16_under_fp8(name: str) -> None:
    model = load_model("qwen3-30b-a3b")
    f = factors(linear_bytes=1.0)
    operators = {op.name: op for op in (*layer_operators(model, "moe", f), *head_operators(model, f, np.full(1, 151936.0)))}
    fp8, bf16 = (kernels("h100-80gb-sxm", "megatron-lm", precision) for precision in ("fp8", "bf16"))
    assert fp8.forward_s(operators[name]) == pytest.approx(bf16.forward_s(operators[name]))
    assert fp8.forward_s(operators["out_proj"]) < bf16.forward_s(operators["out_proj"])


def test_a_ring_step_covers_one_ranks_keys() -> None:
    """Ring attention calls its kernel once per rank's keys; Ulysses and gathered keys call it on the whole sequence."""
    model = load_model("llama-3.1-8b")

    def core(cp_type: int) -> Operator:
        operators = layer_operators(model, "dense", factors(cp=4.0, cp_type=cp_type, seq_len=32768.0))
        return next(op for op in operators if op.name == "core_attention")

    assert core(0).seq == pytest.approx(8192)
    assert core(1).seq == core(2).seq == pytest.approx(32768)
    assert core(0).forward_flops == pytest.approx(core(1).forward_flops)


@pytest.mark.parametrize(("model", "kind", "mean", "full"), [("gpt-oss-20b", "sliding", 128 - 128**2 / (2 * 4096), 128)])
def test_a_sliding_window_limits_the_keys(model: str, kind: str, mean: float, full: float) -> None:
    spec = load_model(model)
    name = next(n for n, k in spec.kinds.items() if getattr(k.mixer, "window", None))
    core = next(op for op in layer_operators(spec, name, factors()) if op.name == "core_attention")
    assert core.forward_full_flops[0] / core.forward_flops[0] == pytest.approx(full / mean)


def test_gathered_tokens_are_all_that_a_group_has() -> None:
    """EP 8 over 4,096 tokens a rank of Qwen3-30B (2,048 wide, 8 of 128 experts), whatever the imbalance.

    Gathered and, on the way back, scattered are 32,768 tokens in BF16; with each come 128 scores, which have gradients, and a map.
    Of 32,768 sums of 2,048 values each is zeroed once, and the rank's 32,768 copies are added.
    """
    model = load_model("qwen3-30b-a3b")
    f = replace(factors(), ep=np.full(1, 8.0), gathered_tokens=True, imbalance=3.0)
    operators = {op.name: op for op in layer_operators(model, "moe", f)}
    into, back = (
        [(m.collective, float(m.bytes[0]), m.forward, m.backward) for m in operators[name].messages if m.dimension == "ep"]
        for name in ("permute", "unpermute")
    )
    tokens, scores, maps = 32768 * 2048 * 2, 32768 * 128 * 2, 32768 * 128
    assert into == [("all_gather", maps, 1, 0), ("all_gather", scores, 1, 1), ("all_gather", tokens, 1, 1)]
    assert back == [("reduce_scatter", tokens, 1, 1)]
    assert dispatch_buffer_bytes(model, "moe", f)[0] == 2 * tokens
    sums = {op.name: op for op in layer_operators(model, "moe", replace(f, imbalance=1.0))}["sums"]
    assert sums.forward_bytes[0] == sums.backward_bytes[0] == 3 * tokens + tokens  # as many copies as tokens: 8 of 8 ranks' 1/8


# ---- what crosses a level ------------------------------------------------------------------------------------------


def network(name: str, devices: int) -> Network:
    cluster = load_cluster(name)
    return Network(cluster, load_profile(cluster.accelerator.name), cluster.allocated_sizes(devices))


def at(net: Network, size: int, stride: int) -> Any:
    return net.crossing(Groups(np.array([size]), np.array([stride])))


def test_a_gather_sends_every_byte_once() -> None:
    """S·(n−1)/n in all, of which S·(servers−1)/n leaves the server."""
    net = network("hgx-h100", 64)
    sent = net.ring_bytes(at(net, 32, 1), np.full(1, 3200.0))[:, 0]
    assert sent.tolist() == pytest.approx([3200 * 7 / 8, 3200 * 3 / 32])
    assert sent.sum() == pytest.approx(3200 * 31 / 32)


def test_a_ring_is_paced_by_the_edge_between_servers() -> None:
    """8 ranks two by two in 4 servers: 4 of 8 edges leave a server; each of 7 steps waits for one of them."""
    net, block = network("hgx-h100", 32), np.full(1, 1e8)
    ring = at(net, 8, 4)
    assert net.ring_pass_bytes(ring, block)[:, 0].tolist() == pytest.approx([7e8 / 2, 7e8 / 2])
    assert net.ring_pass_s(ring, block)[0] == pytest.approx(7 * net.p2p_s(np.array([1]), block)[0])
    assert net.ring_pass_s(ring, block)[0] > 7e8 / 50e9
    inside = at(net, 8, 1)
    assert net.ring_pass_bytes(inside, block)[:, 0].tolist() == pytest.approx([7e8, 0])
    assert net.ring_pass_s(at(net, 1, 4), block)[0] == 0


def test_deduplicated_tokens_cross_once_and_are_passed_on_inside() -> None:
    """64 ranks on 8 servers, top-8 of 256 experts: C(224, 8) / C(256, 8) of all choices leave out a server, C(252, 8) a rank.

    An eighth of the servers is a token's own; an eighth of the ranks hit are those it enters a server through.
    """
    net = network("hgx-h800", 64)
    servers, ranks = (n * (1 - comb(256 - 256 // n, 8) / comb(256, 8)) for n in (8, 64))
    sent = net.dispatch_bytes(at(net, 64, 1), np.ones(1), Routing(8, 256), True)[:, 0]
    assert sent.tolist() == pytest.approx([ranks * 7 / 8, servers * 7 / 8])
    every = net.dispatch_bytes(at(net, 64, 1), np.ones(1), Routing(8, 256), False)[:, 0]
    assert every.tolist() == pytest.approx([8 * 7 / 64, 8 * 56 / 64])


def test_node_limited_routing_caps_servers_and_not_ranks() -> None:
    """DeepSeek-V3: 4 of 8 groups. On 8 servers a group is a server; on 8 ranks of one server it is a rank."""
    net, routing = network("hgx-h800", 64), Routing(8, 256, 4, 8)
    wide = net.dispatch_bytes(at(net, 64, 1), np.ones(1), routing, True)[:, 0]
    ranks = 32 * (1 - comb(124, 8) / comb(128, 8))
    servers = 4 * (1 - comb(96, 8) / comb(128, 8))  # rarely, all of a token's experts are in three of its four
    assert wide.tolist() == pytest.approx([ranks * 7 / 8, servers * 7 / 8])
    narrow = net.dispatch_bytes(at(net, 8, 1), np.ones(1), routing, True)[:, 0]
    assert narrow.tolist() == pytest.approx([servers * 7 / 8, 0])

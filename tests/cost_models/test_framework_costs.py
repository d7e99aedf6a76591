"""What frameworks add to the bytes and kernels of a layer, each by hand: own gathers, casts, chains, root units, delays, stalls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.compute import Kernels
from paraplan.cost_models.operators import Factors, Operator, layer_operators
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.sharding import shard_group
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.search_spaces.cluster import Figure
from paraplan.search_spaces.inputs import build_problem, load_accelerator, load_model, load_stack
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem
from paraplan.search_spaces.stack import Overlap, Stack

ONE = np.ones(1)
DENSE = load_model("llama-3.1-8b")


def figure(value: float) -> Figure:
    return Figure(value=value, source="made up", grade="measured")


def problem(stack: Stack, devices: int, batch: int = 64, seq_len: int = 4096, cluster: str = "hgx-h100") -> Problem:
    """Llama 3.1 8B with a stack that keeps its own figures."""
    found = build_problem("llama-3.1-8b", cluster, devices, batch, seq_len)
    return found.model_copy(update={"stack": stack})


def step_s(of: Problem, **degrees: Any) -> float:
    """Step time of a layout without SP, cut evenly, with the stack's documented figures."""
    cost = CostModel(of, load_profile(of.cluster.accelerator.name, None, False))
    counted = {"num_microbatches": of.workload.global_batch // degrees["dp"], "edp": degrees["tp"] * degrees["dp"]}
    given = {"cp": 1, "ep": 1, "etp": 1, "micro_batch": 1, "sequence_parallel": degrees["tp"] > 1, **counted, **degrees}
    return float(cost.price(LayoutTable.from_layouts([with_default_stages(cost, Layout(**given))])).step_time_s[0])


def layer(stack: Stack, sequence_parallel: bool = True, fp8: bool = False) -> list[Operator]:
    """Operators of one layer at TP 4, one sequence of 4,096 tokens."""
    f = Factors(
        *(x * ONE for x in (4, 1, 1, 1, 1, sequence_parallel)),
        cp_type=np.zeros(1, dtype=np.int64),
        seq_len=4096.0,
        fused_gate=stack.fused_gate,
        shared_gathers=stack.shared_gathers,
        fp8_gathers=fp8 and stack.fp8_gathers,
    )
    return layer_operators(DENSE, DENSE.layer_kinds[0], f)


def sent(operators: list[Operator], collective: str) -> tuple[float, float, float]:
    """How often forward and backward send a collective for which someone waits, and the bytes of all."""
    spoken = [m for op in operators for m in op.messages if m.collective == collective and not m.hidden and np.all(m.bytes > 0)]
    return (
        sum(float(m.forward) for m in spoken),
        sum(float(m.backward) for m in spoken),
        sum(float(m.bytes[0]) * float(m.forward + m.backward) for m in spoken),
    )


def test_linears_that_gather_for_themselves() -> None:
    """q, k, v, gate and up each gather their input and scatter its gradient; the two outputs are scattered and gathered."""
    alone, shared = layer(load_stack("kempnerforge")), layer(load_stack("torchtitan"))
    assert sent(alone, "all_gather")[:2] == (5, 2) and sent(alone, "reduce_scatter")[:2] == (2, 5)
    assert sent(shared, "all_gather")[:2] == (2, 2) and sent(shared, "reduce_scatter")[:2] == (2, 2)
    without_sp = layer(load_stack("kempnerforge"), sequence_parallel=False)
    assert sent(without_sp, "all_reduce")[:2] == (2, 5) and sent(without_sp, "all_gather") == (0, 0, 0)


def test_what_is_cast_before_it_is_gathered_takes_half_the_bytes() -> None:
    stack = load_stack("torchtitan")
    assert sent(layer(stack, fp8=True), "all_gather")[2] == sent(layer(stack), "all_gather")[2] / 2
    assert sent(layer(stack, fp8=True), "reduce_scatter") == sent(layer(stack), "reduce_scatter")


def test_each_operand_is_cast_for_each_of_its_gemms() -> None:
    """Forward input and weight; backward the output's gradient twice, the weight and the input: five bytes of each value."""
    device, profile = load_accelerator("h100-80gb-sxm"), load_profile("h100-80gb-sxm")
    m, n, k = 8192.0, 4096.0, 1024.0
    op = Operator("linear", "gemm", np.zeros(1), m=m, n=n, k=k)
    plain, cast = (
        Kernels(device, profile, load_stack("torchtitan").model_copy(update={"fp8_cast_bytes": each}), "fp8") for each in (0.0, 5.0)
    )
    rate = device.memory_bandwidth_bytes_per_s.value * profile.memory_efficiency.value
    launch_s = profile.elementwise_launch_s.value
    forward_s, backward_s = 5 * (m * k + n * k) / rate + launch_s, 5 * (2 * m * n + n * k + m * k) / rate + launch_s
    assert cast.forward_s(op) - plain.forward_s(op) == pytest.approx(forward_s)
    assert cast.backward_s(op) - plain.backward_s(op) == pytest.approx(backward_s)
    kept = Operator("lm_head", "gemm", np.zeros(1), m=m, n=n, k=k, high_precision=True)
    assert cast.forward_s(kept) == plain.forward_s(kept)


def test_every_kernel_of_a_chain_is_launched() -> None:
    device, profile = load_accelerator("a100-80gb-sxm"), load_profile("a100-80gb-sxm")
    kernels = Kernels(device, profile, load_stack("aleph-alpha-flash1"), "bf16")
    chain = Operator("norm", "memory", np.zeros(1), forward_bytes=1e9, backward_bytes=1e9, kernels=(7, 12))
    one = Operator("norm", "memory", np.zeros(1), forward_bytes=1e9, backward_bytes=1e9)
    launch_s = profile.elementwise_launch_s.value
    assert kernels.forward_s(chain) - kernels.forward_s(one) == pytest.approx(6 * launch_s)
    assert kernels.backward_s(chain) - kernels.backward_s(one) == pytest.approx(11 * launch_s)


@pytest.mark.parametrize("resharded", [False, True])
def test_nothing_hides_a_root_unit(resharded: bool) -> None:
    """Layers that hide all they exchange expose nothing; embedding and head are gathered before the forward, once more before the
    backward only if they were let go, and their gradients scattered after it.
    """
    stack = load_stack("torchtitan-2024")
    keeps = stack.footprint.model_copy(update={"root_resharded": resharded})
    stack = stack.model_copy(update={"footprint": keeps, "overlap": Overlap(fsdp=1.0)})
    of = problem(stack, devices=64, seq_len=32768)
    cost = CostModel(of, load_profile("h100-80gb-sxm", None, False))
    layout = Layout(tp=1, cp=1, pp=1, dp=64, ep=1, etp=1, edp=64, micro_batch=1, num_microbatches=1, optimizer_sharding="zero3")
    table = LayoutTable.from_layouts([with_default_stages(cost, layout)])
    at, pieces = cost.network.crossing(shard_group(table)), cost.pieces(table).pieces
    assert pieces[DENSE.layer_kinds[0]].forward_s[4] == pieces[DENSE.layer_kinds[0]].backward_s[4] == 0.0
    for name in ("embedding", "head"):
        gather_s = cost.network.all_gather_s(at, 2.0 * pieces[name].dense_weights)
        scatter_s = cost.network.reduce_scatter_s(at, 4.0 * pieces[name].dense_weights)
        assert pieces[name].forward_s[4] == pytest.approx(gather_s)
        assert pieces[name].backward_s[4] == pytest.approx(scatter_s + resharded * gather_s)


def test_eager_layers_under_tp_take_the_host_longer() -> None:
    """16 layers on each of two stages, 16 micro-batches and one more pass to fill: three passes of a floor that hides all else."""
    stack = load_stack("kempnerforge").model_copy(update={"host_floor_dense_s": figure(0.1)})
    eager = stack.model_copy(update={"eager_kernels": ("norm", "activation", "rotary", "loss")})
    degrees = {"tp": 4, "pp": 2, "dp": 4, "optimizer_sharding": "zero3", "recompute": "full"}
    slow, fast = (step_s(problem(each, devices=32), **degrees) for each in (eager, stack))
    assert slow - fast == pytest.approx((16 + 1) * 16 * 3 * 0.1 * (8.0 - 1.0), rel=0.01)


def test_a_collective_that_leaves_the_server_has_a_delay_of_its_own() -> None:
    """Two gathers and two scatters forward, as many backward, in each of 32 layers; those inside a server have none."""
    stack = load_stack("nanotron").model_copy(update={"host_floor_dense_s": figure(1e-6)})
    prompt = stack.model_copy(update={"scale_out_delay_s": figure(0.0)})
    late, soon = (step_s(problem(each, 16), tp=16, pp=1, dp=1, optimizer_sharding="none") for each in (stack, prompt))
    ends = 1 + 1 + 1 + 1 + 3  # embedding: a scatter and its gradient's gather; head: a gather, a scatter, three sums of the loss
    assert late - soon == pytest.approx(64 * (32 * 8 + ends) * stack.scale_out_delay_s.value)
    inside = [step_s(problem(each, 16), tp=8, pp=1, dp=2, optimizer_sharding="none") for each in (stack, prompt)]
    assert inside[0] == inside[1]


@pytest.mark.parametrize(
    ("degrees", "messages"),
    [
        ({"tp": 1, "pp": 4, "dp": 8, "optimizer_sharding": "none"}, 4),  # in and out, forward and backward
        ({"tp": 1, "pp": 2, "dp": 16, "optimizer_sharding": "none"}, 2),  # the first stage only sends, the last only receives
        ({"tp": 1, "pp": 4, "dp": 8, "optimizer_sharding": "zero1"}, 0),  # not wrapped in DDP
        ({"tp": 8, "pp": 4, "dp": 1, "optimizer_sharding": "none"}, 0),
        ({"tp": 1, "pp": 1, "dp": 32, "optimizer_sharding": "none"}, 0),
    ],
)
def test_messages_between_stages_that_ddp_wraps_stall(degrees: dict[str, Any], messages: int) -> None:
    stack = load_stack("nanotron")
    smooth = stack.model_copy(update={"message_stall_s": figure(0.0)})
    stalled, free = (step_s(problem(each, devices=32), **degrees) for each in (stack, smooth))
    assert stalled - free == pytest.approx(64 / degrees["dp"] * messages * 0.26, abs=1e-9)


def test_two_servers_do_not_stall() -> None:
    stack = load_stack("nanotron")
    smooth = stack.model_copy(update={"message_stall_s": figure(0.0)})
    both = [step_s(problem(each, devices=16), tp=1, pp=2, dp=8, optimizer_sharding="none") for each in (stack, smooth)]
    assert both[0] == both[1]


@pytest.mark.parametrize(("sharding", "hidden"), [("none", 1.0), ("zero1", 0.0)])
def test_what_ddp_does_not_wrap_reduces_in_the_open(sharding: str, hidden: float) -> None:
    overlap = Overlap(dp_gradients=1.0, zero1_gradients=0.0)
    stack = load_stack("nanotron").model_copy(update={"overlap": overlap, "scale_out_delay_s": figure(0.0)})
    table = LayoutTable.from_layouts([Layout(tp=1, dp=8, edp=8, num_microbatches=8, optimizer_sharding=sharding)])
    assert CostModel(problem(stack, devices=8)).rows(table).hidden_gradients.tolist() == [hidden]
    together = stack.model_copy(update={"overlap": overlap.model_copy(update={"zero1_gradients": 1.0})})
    later = [step_s(problem(each, devices=8), tp=1, pp=1, dp=8, optimizer_sharding=sharding) for each in (stack, together)]
    assert (later[0] > later[1]) == (hidden == 0.0)


def test_attention_with_tiles_that_shrink_gains_nothing_from_wider_heads() -> None:
    accelerator, profile = load_accelerator("a100-80gb-sxm"), load_profile("a100-80gb-sxm")
    times = {}
    for name in ("llm-foundry", "megatron-lm"):
        kernels = Kernels(accelerator, profile, load_stack(name), "bf16")
        heads = [Operator("attention", "attention", np.zeros(1), flops=1e12, seq=4096.0, head_dim=width) for width in (64.0, 128.0)]
        times[name] = [float(kernels.forward_s(op)[0]) for op in heads]
    assert times["llm-foundry"][0] == times["llm-foundry"][1]
    assert times["megatron-lm"][0] > times["megatron-lm"][1]


def test_blocking_messages_take_both_stages_from_their_passes() -> None:
    stack = load_stack("aleph-alpha-flash2").model_copy(update={"scale_out_efficiency": figure(0.5)})
    waits, goes_on = (problem(stack.model_copy(update={"blocking_p2p": blocks}), devices=16) for blocks in (True, False))
    degrees = {"tp": 8, "pp": 2, "dp": 1, "optimizer_sharding": "none", "num_microbatches": 64, "sequence_parallel": False}
    table = LayoutTable.from_layouts([Layout(**degrees, edp=8)])
    edge_s = float(CostModel(goes_on).rows(table).p2p_s[0])
    rows = CostModel(waits, load_profile("h100-80gb-sxm", None, False)).rows(table)
    assert rows.p2p_s.tolist() == [0.0]
    assert rows.stalled_s[0] == pytest.approx(2 * 65 * edge_s / 0.5)

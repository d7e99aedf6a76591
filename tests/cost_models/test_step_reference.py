"""Whole steps against a reference that prices one layout by hand, in plain floats: time, breakdown and memory to 1e-9."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.stage_times import late_s
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.timeline import simulate
from paraplan.optimizer.evaluation import evaluate, with_default_stages
from paraplan.search_spaces.cluster import Figure
from paraplan.search_spaces.inputs import build_problem, load_cluster, load_model, load_stack
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem
from paraplan.search_spaces.model import Attention, ModelSpec, MoeMlp

sys.path.insert(0, str(Path(__file__).parent))  # the reference lies beside this file

from reference_step import Reference

DENSE = ("llama-3.1-8b", "hgx-h100")
A100 = ("llama-3.1-8b", "jean-zay-a100")


def with_expert_biases(name: str) -> ModelSpec:
    """A catalog model whose experts have biases and clamped activations and whose rotary embedding is scaled, as gpt-oss's."""
    model = load_model(name)
    kinds = dict(model.kinds)
    for kind, layer in model.kinds.items():
        if isinstance(layer.mlp, MoeMlp):
            kinds[kind] = layer.model_copy(update={"mlp": layer.mlp.model_copy(update={"bias": True, "clamped": True})})
        if isinstance(layer.mixer, Attention):
            kinds[kind] = kinds[kind].model_copy(update={"mixer": layer.mixer.model_copy(update={"scaled_rotary": True})})
    return model.model_copy(update={"kinds": kinds})


GRAPHED = load_stack("megatron-bridge").model_copy(update={"graph_modules": ("attn", "moe_router", "mlp")})
WHOLE_STEP = load_stack("megatron-bridge").model_copy(update={"cuda_graphs": True})
HGX = load_cluster("hgx-h200")
MESH = HGX.levels[0].model_copy(update={"size": 4, "kind": "full_mesh", "in_network_reduction": False})
BOARDS_OF_FOUR = HGX.model_copy(update={"levels": (MESH, HGX.levels[1])})
ALL_EAGER = load_stack("kempnerforge").model_copy(update={"eager_kernels": ("norm", "activation", "rotary", "loss")})
CAST_BY_ROWS = load_stack("torchtitan").model_copy(update={"fp8_cast_bytes": 5.0, "fp8_gathers": False})
POOLED = load_cluster("cloudmatrix-384")
SLOW = {"bandwidth_bytes_per_s": Figure(value=3e9, source="made up", grade="given")}
assert POOLED.pool is not None
SLOW_POOL = POOLED.model_copy(update={"pool": POOLED.pool.model_copy(update=SLOW)})
SLOW_HOST = HGX.model_copy(update={"host_link": HGX.host_link.model_copy(update=SLOW)})
CASES = {
    # name: (model, cluster, stack, precision, seq_len, layout)
    "dense": (*DENSE, None, "bf16", 8192, {"tp": 4, "pp": 2, "dp": 2, "recompute": "selective:core_attn+mlp"}),
    "dense without sharded states": (*DENSE, None, "bf16", 2048, {"tp": 2, "pp": 4, "dp": 4, "optimizer_sharding": "none"}),
    "tp without sp": (*DENSE, None, "bf16", 8192, {"tp": 8, "pp": 2, "dp": 1, "sequence_parallel": False}),
    "ring attention": (*DENSE, None, "bf16", 32768, {"tp": 4, "cp": 4, "pp": 2, "dp": 1, "recompute": "selective:layernorm+mlp"}),
    "gathered keys and values": (*DENSE, None, "bf16", 32768, {"tp": 4, "cp": 2, "pp": 2, "dp": 2, "cp_type": "allgather"}),
    "ulysses": (*DENSE, None, "bf16", 32768, {"tp": 2, "cp": 4, "pp": 2, "dp": 2, "cp_type": "a2a"}),
    "interleaved": (*DENSE, None, "bf16", 8192, {"tp": 4, "pp": 2, "dp": 2, "vpp": 2, "schedule": "interleaved"}),
    "interleaved block depth": (
        *DENSE,
        None,
        "bf16",
        8192,
        {"tp": 2, "pp": 4, "dp": 8, "vpp": 2, "schedule": "interleaved", "recompute": "full:block:1"},
    ),
    "fp8": (*DENSE, None, "fp8", 8192, {"tp": 2, "pp": 2, "dp": 4, "micro_batch": 2}),
    "checkpoints two layers apart": (*DENSE, None, "bf16", 8192, {"tp": 2, "pp": 2, "dp": 4, "recompute": "full:uniform:2"}),
    "pp inside dp": (
        *DENSE,
        None,
        "bf16",
        8192,
        {"tp": 4, "pp": 2, "dp": 2, "rank_order": "tp-cp-ep-pp-dp"},
    ),
    "stages in and across servers": (*DENSE, None, "bf16", 8192, {"tp": 4, "pp": 8, "rank_order": "tp-cp-ep-pp-dp"}),
    "interleaved in and across servers": (
        *DENSE,
        None,
        "bf16",
        8192,
        {"tp": 2, "pp": 8, "dp": 2, "vpp": 2, "schedule": "interleaved", "rank_order": "tp-cp-ep-pp-dp"},
    ),
    "pp inside dp, around cp": (
        *DENSE,
        None,
        "bf16",
        8192,
        {"tp": 2, "cp": 2, "pp": 4, "dp": 2, "rank_order": "tp-cp-ep-pp-dp"},
    ),
    "fsdp": (*DENSE, "torchtitan", "bf16", 8192, {"tp": 2, "dp": 16, "optimizer_sharding": "zero3"}),
    "hsdp": (*DENSE, "torchtitan", "bf16", 8192, {"dp": 32, "optimizer_sharding": "hsdp:8"}),
    "fsdp that keeps weights for the backward": (
        *DENSE,
        "torchtitan",
        "bf16",
        8192,
        {"tp": 2, "dp": 16, "optimizer_sharding": "zero2"},
    ),
    "fsdp with a root unit, of stages": (
        *DENSE,
        "torchtitan-2024",
        "bf16",
        8192,
        {"tp": 2, "pp": 2, "dp": 8, "optimizer_sharding": "zero2"},
    ),
    "dropout": (*DENSE, "megatron-lm-2022", "bf16", 2048, {"tp": 4, "pp": 2, "dp": 2, "recompute": "selective:core_attn"}),
    "unfused kernels": (*DENSE, "deepspeed", "bf16", 4096, {"tp": 2, "dp": 8, "optimizer_sharding": "zero2"}),
    "eager kernels, gathered inputs": (*DENSE, "aleph-alpha-flash1", "bf16", 8192, {"tp": 4, "pp": 2, "dp": 2}),
    "gradients beside their accumulation": (*DENSE, "nanotron", "bf16", 4096, {"tp": 2, "dp": 4, "recompute": "full"}),
    "fsdp with a root unit": (*DENSE, "torchtitan-2024", "bf16", 8192, {"dp": 8, "optimizer_sharding": "zero3"}),
    "fsdp that accumulates whole gradients": (
        *DENSE,
        "kempnerforge",
        "bf16",
        4096,
        {"tp": 2, "dp": 8, "optimizer_sharding": "zero3"},
    ),
    "fsdp of pipeline stages": (
        *DENSE,
        "kempnerforge",
        "bf16",
        4096,
        {"tp": 2, "pp": 2, "dp": 4, "optimizer_sharding": "zero3", "sequence_parallel": False},
    ),
    "fsdp of a mesh of four": (
        "llama-3.1-8b",
        BOARDS_OF_FOUR,
        "kempnerforge",
        "bf16",
        4096,
        {"tp": 2, "dp": 8, "optimizer_sharding": "zero3", "recompute": "full"},
    ),
    "gathers in fp8": (*DENSE, "torchtitan", "fp8", 8192, {"tp": 8, "dp": 4, "optimizer_sharding": "zero3"}),
    "operands cast by rows": (*DENSE, CAST_BY_ROWS, "fp8", 8192, {"tp": 2, "dp": 4, "optimizer_sharding": "zero3"}),
    "layers that are not compiled": (*DENSE, ALL_EAGER, "bf16", 4096, {"tp": 4, "pp": 2, "dp": 2, "optimizer_sharding": "zero3"}),
    "activations to a slow host": (
        "llama-3.1-8b",
        SLOW_HOST,
        None,
        "bf16",
        8192,
        {"tp": 2, "dp": 8, "recompute": "none", "offload": "activations:0.5"},
    ),
    "activations of a pipeline to a pool": (
        "deepseek-v3",
        SLOW_POOL,
        "mindspeed-llm",
        "bf16",
        4096,
        {"tp": 4, "pp": 8, "dp": 8, "ep": 16, "recompute": "selective:layernorm", "offload": "optimizer:0.5+activations:1"},
    ),
    "inputs of redone layers to a pool": (
        "llama-3.1-8b",
        SLOW_POOL,
        "mindspeed-llm",
        "bf16",
        8192,
        {"tp": 2, "pp": 2, "dp": 4, "recompute": "full", "offload": "activations:0.75"},
    ),
    "checkpoints two layers apart to a pool": (
        "llama-3.1-8b",
        SLOW_POOL,
        "mindspeed-llm",
        "bf16",
        8192,
        {"tp": 2, "pp": 2, "dp": 4, "recompute": "full:uniform:2", "offload": "activations:1"},
    ),
    "some layers redone, all to a pool": (
        "llama-3.1-8b",
        SLOW_POOL,
        "mindspeed-llm",
        "bf16",
        8192,
        {"tp": 2, "pp": 2, "dp": 4, "recompute": "full:block:4", "offload": "activations:1"},
    ),
    "tp over servers": (*DENSE, "nanotron", "bf16", 4096, {"tp": 16, "dp": 2}),
    "tp over servers, in a pipeline": (*DENSE, "nanotron", "bf16", 4096, {"tp": 16, "pp": 2, "dp": 1}),
    "stages that stall": (*DENSE, "nanotron", "bf16", 4096, {"tp": 1, "pp": 4, "dp": 8, "optimizer_sharding": "none"}),
    "stand-ins for gradients": (*DENSE, "megatron-simumax", "bf16", 4096, {"tp": 2, "pp": 2, "dp": 2}),
    "stand-ins for experts' gradients": (
        "qwen3-30b-a3b",
        "hgx-b200",
        "megatron-simumax",
        "bf16",
        4096,
        {"tp": 2, "pp": 2, "dp": 8, "ep": 4, "etp": 2},
    ),
    "gathered logits, gate apart": (
        *A100,
        "aleph-alpha-flash2",
        "bf16",
        2048,
        {"tp": 4, "pp": 2, "dp": 4, "sequence_parallel": False},
    ),
    "embedding and head redone": (
        *A100,
        "aleph-alpha-flash2",
        "bf16",
        2048,
        {"tp": 2, "pp": 2, "dp": 8, "sequence_parallel": False, "recompute": "full"},
    ),
    "gate apart under sp": (*A100, "aleph-alpha-flash2-rms", "bf16", 2048, {"tp": 2, "pp": 1, "dp": 32}),
    "accumulation and scattered activations": (
        *A100,
        "megatron-deepspeed-bf16",
        "bf16",
        2048,
        {"tp": 4, "pp": 4, "dp": 4, "sequence_parallel": False, "recompute": "full"},
    ),
    "gradients cast for the step": (*A100, "megatron-deepspeed", "bf16", 2048, {"tp": 8, "pp": 4, "dp": 2, "recompute": "full"}),
    "fsdp of experts": (
        "qwen3-30b-a3b",
        "hgx-h100",
        "torchtitan",
        "bf16",
        4096,
        {"dp": 16, "ep": 8, "optimizer_sharding": "zero3"},
    ),
    "experts": (
        "qwen3-30b-a3b",
        "hgx-h800",
        None,
        "bf16",
        4096,
        {"tp": 2, "pp": 2, "dp": 8, "ep": 8, "recompute": "selective:moe_act"},
    ),
    "experts split by tensor": ("qwen3-30b-a3b", "hgx-h800", None, "bf16", 4096, {"tp": 2, "pp": 2, "dp": 8, "ep": 4, "etp": 2}),
    "deduplicated dispatch": (
        "qwen3-30b-a3b",
        "hgx-h100",
        "megatron-bridge",
        "bf16",
        4096,
        {"pp": 2, "dp": 16, "ep": 16, "recompute": "selective:moe"},
    ),
    "modules replayed from graphs": ("qwen3-30b-a3b", "gb200-nvl72", GRAPHED, "fp8", 4096, {"pp": 2, "dp": 32, "ep": 16}),
    "fused dispatch over trays": ("deepseek-v3", "gb200-nvl72", "megatron-bridge", "fp8", 4096, {"pp": 4, "dp": 64, "ep": 32}),
    "biases of experts": (
        with_expert_biases("qwen3-30b-a3b"),
        "hgx-b200",
        "megatron-bridge-ep-overlap",
        "bf16",
        4096,
        {"dp": 16, "ep": 8, "etp": 2, "tp": 2, "recompute": "full"},
    ),
    "biases of experts, fused": (with_expert_biases("qwen3-30b-a3b"), "hgx-b200", WHOLE_STEP, "bf16", 4096, {"dp": 16, "ep": 8}),
    "a calibrated stack": (*DENSE, "calibrated", "bf16", 8192, {"tp": 8, "pp": 2, "dp": 2, "recompute": "full"}),
    "experts, calibrated": ("qwen3-30b-a3b", "hgx-h100", "calibrated", "bf16", 4096, {"tp": 2, "pp": 2, "dp": 8, "ep": 8}),
    "experts, tied to nodes": ("deepseek-v3", "hgx-h800", "megatron-bridge", "bf16", 4096, {"tp": 2, "pp": 8, "dp": 16, "ep": 32}),
    "supernode": (
        "deepseek-v3",
        "cloudmatrix-384",
        None,
        "bf16",
        4096,
        {"tp": 4, "pp": 8, "dp": 8, "ep": 16, "recompute": "full:block:2", "offload": "optimizer:1"},
    ),
    "supernode, all recomputed": (
        "deepseek-v3",
        "cloudmatrix-384",
        None,
        "bf16",
        4096,
        {"tp": 2, "pp": 4, "dp": 32, "ep": 64, "recompute": "full", "offload": "optimizer:0.5"},
    ),
}


FIGURES = {
    "efficiency": 0.7,
    "attention_efficiency": 0.4,
    "elementwise_efficiency": 0.25,
    "scale_up_efficiency": 0.8,
    "scale_out_efficiency": 0.6,
    "scale_out_congestion": 0.4,
    "host_floor_dense_s": 0.004,
    "host_floor_moe_s": 0.003,
    "host_floor_per_collective_s": 0.0003,
    "host_floor_pipeline_s": 0.0002,
    "step_overhead_s": 0.05,
}
CALIBRATED = {name: Figure(value=value, source="made up", grade="measured") for name, value in FIGURES.items()}


def case(name: str, global_batch: int = 256) -> tuple[Problem, CostModel, Layout]:
    """Problem, cost model and layout of a case, cut as the search would cut it."""
    model, cluster, stack, precision, seq_len, words = CASES[name]
    degrees = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "micro_batch": 1, **words}
    width = degrees["tp"] * degrees["cp"] * degrees["dp"]
    calibrated = stack == "calibrated"
    given = None if calibrated else stack
    offload_to = "pool" if cluster is SLOW_POOL else None
    problem = build_problem(model, cluster, width * degrees["pp"], global_batch, seq_len, given, precision, offload_to=offload_to)
    derived = {
        "edp": width // (degrees["ep"] * degrees["etp"]),
        "num_microbatches": global_batch // (degrees["dp"] * degrees["micro_batch"]),
    }
    profile = load_profile(problem.cluster.accelerator.name)
    if calibrated:
        stacks = {problem.stack.name: {problem.cluster.accelerator.name: CALIBRATED}}
        profile = profile.model_copy(update={"stacks": stacks})
    cost = CostModel(problem, profile)
    return problem, cost, with_default_stages(cost, Layout(**(degrees | derived)))


@pytest.mark.parametrize("name", CASES)
def test_step_time_and_memory_equal_the_reference(name: str) -> None:
    problem, cost, layout = case(name)
    step_s, breakdown, memory = Reference(problem, layout, cost.profile).price()
    found = detail(cost, layout)
    for term in breakdown:
        assert found.breakdown_s[term] == pytest.approx(breakdown[term], rel=1e-9, abs=1e-9 * step_s), term
    assert found.step_time_s == pytest.approx(step_s, rel=1e-9)
    for stage, terms in enumerate(memory):
        for term, size in terms.items():
            # Of activations that all leave a billionth stays, from which what moves is worked out.
            assert found.stage_bytes[stage][term] == pytest.approx(size, rel=1e-9, abs=100), (stage, term)
    prices = cost.price(LayoutTable.from_layouts([layout]))
    assert prices.step_time_s[0] == pytest.approx(step_s, rel=1e-9)
    assert prices.peak_bytes[0] == pytest.approx(max(sum(terms.values()) for terms in memory), rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_breakdown_adds_up_and_nothing_is_negative(name: str) -> None:
    problem, _, layout = case(name)
    priced, _ = evaluate(problem, layout)
    assert sum(priced.breakdown_s.values()) == pytest.approx(priced.step_time_s, rel=1e-9)
    assert all(value >= -1e-12 * priced.step_time_s for value in priced.breakdown_s.values()), priced.breakdown_s
    for stage in priced.memory.stages:
        assert sum(stage.terms_gib.values()) == pytest.approx(stage.peak_gib, rel=1e-12)
        assert all(value >= 0 for value in stage.terms_gib.values())


@pytest.mark.parametrize("name", CASES)
def test_the_event_simulation_confirms_the_pipeline(name: str) -> None:
    """The longest path in closed form lies at most 1 % below the replayed schedule."""
    _, cost, layout = case(name)
    found = detail(cost, layout)
    shape = layout.schedule, layout.pp, layout.vpp, layout.num_microbatches
    replayed = simulate(*shape, found.passes.forward_s, found.passes.backward_s, found.p2p_s).step_s
    assert replayed * 0.99 <= found.pipeline_s <= replayed * (1.0 + 1e-12)


@pytest.mark.parametrize("name", ["dense", "ring attention", "fp8", "interleaved", "experts split by tensor", "supernode"])
def test_model_flops_equal_three_times_the_forward_operators(name: str) -> None:
    """The reference's operators of one rank, put together over ranks that split the work, without padding and imbalance."""
    problem, cost, layout = case(name)
    even = problem.model_copy(update={"workload": problem.workload.model_copy(update={"expert_imbalance": 1.0})})
    reference = Reference(even, layout)
    reference.vocab = problem.model.vocab_size
    causal = full = 0.0
    for piece in (*reference.blocks, "embedding", "head"):
        for op in reference.operators(piece):
            # Down-projections and routers run on the SP share; without SP every TP rank repeats them, which MFU counts once.
            ways = layout.tp * layout.cp
            causal += 3 * op.flops[0] * ways / layout.micro_batch
            full += 3 * op.flops[1] * ways / layout.micro_batch
    found = detail(cost, layout)
    assert found.model_flops == pytest.approx(causal * problem.workload.global_batch, rel=1e-9)
    assert found.model_flops_full_attention == pytest.approx(full * problem.workload.global_batch, rel=1e-9)


def test_mfu_counts_every_device_given() -> None:
    """MFU and HFU are over the dense peak of all devices, idle ones included; recompute counts for HFU alone."""
    problem, _, layout = case("dense")
    priced, _ = evaluate(problem, layout)
    more = problem.model_copy(update={"devices": 2 * problem.devices})
    spread, _ = evaluate(more, layout)
    peak = problem.cluster.accelerator.peak_flops["bf16"].value
    flops = detail(CostModel(problem), layout).model_flops
    assert priced.mfu == pytest.approx(flops / priced.step_time_s / problem.devices / peak)
    assert spread.devices_idle == problem.devices
    assert spread.mfu * spread.step_time_s == pytest.approx(priced.mfu * priced.step_time_s / 2)
    assert priced.hfu > priced.mfu
    full, _ = evaluate(problem, layout.model_copy(update={"recompute": "full", "stages": ()}))
    embedding_and_head = 6 * 128256 * 4096 * 8192 * 256
    assert full.hfu / full.mfu == pytest.approx(1 + (flops - embedding_and_head) / 3 / flops, rel=1e-9)


def test_usable_memory_is_capacity_less_context_and_margin() -> None:
    """15 % are kept clear by default; the user's own margin takes their place."""
    problem, cost, layout = case("dense")
    cluster = problem.cluster
    free = cluster.accelerator.memory_bytes.value - cluster.context_bytes.value
    assert 0 <= free * (1 - 0.15) - cost.usable_bytes < 2**20  # whole MiB
    priced, _ = evaluate(problem, layout)
    assert priced.memory.usable_gib == pytest.approx(cost.usable_bytes / GIB)
    own = build_problem("llama-3.1-8b", "hgx-h100", 16, 256, 8192, memory_margin=0.1)
    assert 0 <= free * (1 - 0.1) - CostModel(own).usable_bytes < 2**20
    assert priced.memory.peak_gib == pytest.approx(max(np.array([stage.peak_gib for stage in priced.memory.stages])))


def test_traffic_of_chunks_hides_behind_the_passes_that_follow() -> None:
    """Two chunks of 10 s of traffic each, 4 s a pass, pp 3: the later one hides behind 3·4 s and its own pass, the first waits."""
    traffic, passes = np.array([[10.0, 10.0]]), np.array([[4.0, 4.0]])
    assert late_s(traffic, passes, (3, 2)) == pytest.approx(np.array([[6.0]]))  # the first begins 4 s before the end, for 10 s
    assert late_s(np.array([[10.0, 30.0]]), passes, (3, 2)) == pytest.approx(np.array([[40.0 - 16.0]]))  # both wait
    assert late_s(traffic, passes, (3, 1)) == pytest.approx(np.array([[6.0, 6.0]]))  # stages that are not told apart
    assert late_s(traffic, passes, (3, 2), 5.0) == pytest.approx(np.array([[1.0]]))

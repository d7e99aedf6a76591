"""What shares links and what slows compute: experts' and data-parallel traffic, engines beside the cores, narrow dispatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.details import Detail, detail
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.search_spaces.cluster import ClusterSpec, Figure
from paraplan.search_spaces.inputs import build_problem, load_cluster, load_stack
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem

EXPERTS = {"dp": 64, "edp": 2, "ep": 32, "num_microbatches": 4}


def priced(problem: Problem, **degrees: Any) -> tuple[CostModel, Layout, Detail]:
    model = CostModel(problem)
    layout = with_default_stages(model, Layout(**degrees))
    return model, layout, detail(model, layout)


def mixture(cluster: ClusterSpec | str = "hgx-h100", **stack: Any) -> Problem:
    return build_problem("qwen3-30b-a3b", cluster, 64, 256, 4096, load_stack("megatron-lm").model_copy(update=stack))


def test_adapters_that_experts_use_are_not_free_for_gradients() -> None:
    """EP 32 leaves servers of 8, EP 8 does not: of its passes only the rest can hide data-parallel traffic."""
    for ep, free in ((8, True), (32, False)):
        model, layout, _ = priced(mixture(), **{**EXPERTS, "ep": ep, "edp": 64 // ep})
        rows = model.rows(LayoutTable.from_layouts([layout]))
        forward, backward = rows.pieces.unused_shares
        assert (forward[0] == 1.0) == (backward[0] == 1.0) == free
        flow = model.flow(rows, np.array([[0, len(model.blocks)]]))
        np.testing.assert_allclose(flow.backward_s[0, 0], flow.load.backward_s[0, 0] * backward[0])


def test_compute_beside_traffic_is_slowed_unless_engines_carry_it() -> None:
    """With a slow-down s, hidden traffic leaves s/(1+s) of itself exposed; on engines of their own collectives leave none."""
    spec = load_cluster("cloudmatrix-384")
    free = spec.model_copy(update={"compute_slowdown_beside_communication": None})
    engines = spec.model_copy(update={"levels": tuple(level.model_copy(update={"offload_engine": True}) for level in spec.levels)})
    times = []
    for one in (free, engines, spec):
        problem = build_problem("llama-3.1-8b", one, 32, 64, 4096)
        overlap = problem.stack.overlap.model_copy(update={"tp": 0.5, "tp_wgrad": 0.0})
        stack = problem.stack.model_copy(update={"overlap": overlap})
        times.append(priced(problem.model_copy(update={"stack": stack}), tp=4, dp=8, edp=32, num_microbatches=8)[2])
    without, carried, slowed = (found.breakdown_s["tp"] for found in times)
    assert carried == pytest.approx(without)
    assert slowed == pytest.approx(without * (0.5 + 0.5 * (1 - 1 / 1.25)) / 0.5)
    assert times[2].breakdown_s["dp"] >= times[0].breakdown_s["dp"]


def test_a_dispatch_in_fp8_carries_a_byte_and_a_scale_where_bf16_carries_two() -> None:
    """Forward only: experts' outputs and all gradients travel in BF16."""
    wide, narrow = (
        sum(by.get("ep", 0.0) for by in priced(mixture(dispatch_precision=precision), **EXPERTS)[2].traffic_gib.values())
        for precision in ("bf16", "fp8")
    )
    share = (1 + 4 / 128) / 2
    assert narrow / wide == pytest.approx((3 + share) / 4)


def test_devices_behind_one_adapter_share_it() -> None:
    """Eight devices on one adapter send an eighth each, whatever group they talk in."""
    spec = load_cluster("hgx-h100")
    outer = spec.levels[-1].model_copy(update={"devices_per_nic": 8.0})
    shared = spec.model_copy(update={"levels": (*spec.levels[:-1], outer)})
    rate = Figure(value=spec.levels[-1].bandwidth_bytes_per_s.value / 8, source="made up", grade="given")
    slow = spec.model_copy(
        update={"levels": (*spec.levels[:-1], spec.levels[-1].model_copy(update={"bandwidth_bytes_per_s": rate}))}
    )
    found = [priced(mixture(one), **EXPERTS)[2].step_time_s for one in (shared, slow, spec)]
    assert found[0] == pytest.approx(found[1])
    assert found[0] > found[2]

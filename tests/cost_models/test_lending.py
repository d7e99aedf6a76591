"""Activations that early stages of a pipeline keep on the devices of late ones: memory, what the links carry, rules and search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.schedules import build_schedule
from paraplan.cost_models.split_passes import stage_loads
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.timeline import Timeline, Work, replayed
from paraplan.optimizer.bounds import row_bounds_bytes
from paraplan.optimizer.evaluation import evaluate, with_default_stages
from paraplan.optimizer.exporters import render
from paraplan.optimizer.planner import plan
from paraplan.optimizer.ranks import coordinates
from paraplan.search_spaces.cluster import ClusterSpec, Figure
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Layout, Problem, Split
from paraplan.search_spaces.rules import violations


def job(cluster: ClusterSpec | str = "gb200-nvl72", devices: int = 16, model: str = "llama-3.1-8b", **limits: Any) -> Problem:
    return build_problem(model, cluster, devices, 32, 8192, **{"offload_to": "peers", **limits})


def piped(pp: int, num_microbatches: int, offload: str = "none", **more: Any) -> Layout:
    chosen = {"tp": 1, "pp": pp, "dp": 1, "edp": 1, "num_microbatches": num_microbatches, "micro_batch": 1, **more}
    return Layout(**chosen, offload=offload)


def fullest_bytes(timeline: Timeline, saved: list[float], most: float) -> list[float]:
    """What stages hold at their fullest, pass by pass: a micro-batch from its forward's start to its backward's end, of which the
    fuller of two stages keeps a share with the other, half of what it has more but not above `most`.
    """
    pp = len(saved)
    events = sorted(
        (float(timeline.end_s[k]), -1, int(timeline.stage[k]))
        if timeline.kind[k]
        else (float(timeline.start_s[k]), 1, int(timeline.stage[k]))
        for k in range(len(timeline.stage))
    )
    in_flight, held = [0] * pp, [0.0] * pp
    most_of = [int(count) for count in timeline.in_flight]
    lends = [min(most, max(most_of[s] - most_of[pp - 1 - s], 0) / 2 / most_of[s]) for s in range(pp)]
    for _, change, stage in events:
        in_flight[stage] += change
        for s in (stage, pp - 1 - stage):
            partner = pp - 1 - s
            own = in_flight[s] * saved[s] * (1 - lends[s])
            held[s] = max(held[s], own + in_flight[partner] * saved[partner] * lends[partner])
    return held


@pytest.mark.parametrize("most", [0.1, 0.25, 0.5])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (4, 3), (4, 16), (5, 16), (8, 8), (8, 32)])
def test_stages_hold_what_a_replay_counts(pp: int, num_microbatches: int, most: float) -> None:
    """Stages of unequal layers, embedding and head: the stated peaks are those of a replay of every pass with both shares."""
    problem = job()
    model = CostModel(problem)
    layout = with_default_stages(model, piped(pp, num_microbatches))
    whole, lent = (detail(model, layout.model_copy(update={"offload": name})) for name in ("none", f"activations:{most}"))
    timeline = replayed(build_schedule("1f1b", pp, 1, num_microbatches), Work(np.full(pp, 1.0), np.full(pp, 2.0)))
    saved = [terms["activations"] / count for terms, count in zip(whole.stage_bytes, timeline.in_flight, strict=True)]
    counted = fullest_bytes(timeline, saved, most)
    told = [terms["activations"] for terms in lent.stage_bytes]
    assert told == pytest.approx(counted, rel=1e-9)
    assert sum(told) == pytest.approx(sum(terms["activations"] for terms in whole.stage_bytes))


@pytest.mark.parametrize(("pp", "vpp", "num_microbatches"), [(2, 2, 8), (4, 2, 4), (4, 2, 16), (4, 4, 8)])
def test_interleaved_stages_hold_no_more_than_is_told(pp: int, vpp: int, num_microbatches: int) -> None:
    """Chunks of equal layers: a replay's peaks of a pair may come one after the other, so that it never counts more, and within a
    chunk of what is told.
    """
    model, chunks = CostModel(job()), pp * vpp
    stages = Split(pp, vpp, tuple(range(0, 33, 32 // chunks))).stages(32, "none")
    layout = piped(pp, num_microbatches, vpp=vpp, schedule="interleaved", stages=stages)
    whole, lent = (detail(model, layout.model_copy(update={"offload": name})) for name in ("none", "activations:0.5"))
    timeline = replayed(build_schedule("interleaved", pp, vpp, num_microbatches), Work(np.full(chunks, 1.0), np.full(chunks, 2.0)))
    each = whole.stage_bytes[1]["activations"] / timeline.in_flight[1]  # of a chunk without an end of the model
    counted = fullest_bytes(timeline, [each] * pp, 0.5)
    for stage in range(1, pp - 1):
        told = lent.stage_bytes[stage]["activations"]
        assert counted[stage] * (1 - 1e-9) <= told <= counted[stage] + each
    assert max(terms["activations"] for terms in lent.stage_bytes) < max(terms["activations"] for terms in whole.stage_bytes)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_no_cuts_come_below_the_bound_on_memory(schedule: str) -> None:
    """Every way to deal the layers of a small model to four stages: the fullest holds at least what is cut by."""
    fix = f"tp=1,cp=1,pp=4,dp=1,micro_batch=1,recompute=none,vpp={1 + (schedule == 'interleaved')},schedule={schedule}"
    problem = job(devices=4, model="qwen3-0.6b", fix=fix)
    model, space = CostModel(problem), Space(problem)
    table, _ = space.layouts(np.arange(len(space.frames)))
    rows = model.rows(table)
    assert (rows.lent > 0).any()
    least, rng = row_bounds_bytes(model, rows), np.random.default_rng(1)
    chunks = rows.shape[0] * rows.shape[1]
    for _ in range(200):
        cuts = np.array([[0, *sorted(rng.integers(0, 29, chunks - 1)), 28]])
        chunk_loads = rows.chunks(np.broadcast_to(cuts, (len(rows), chunks + 1)))
        peaks = model.stage_bytes(rows, stage_loads(rows, chunk_loads)).max(axis=1)
        assert (peaks >= least * (1 - 1e-9)).all()


def test_half_makes_equal_stages_even() -> None:
    """Between the ends of four stages of eight layers three and two micro-batches in flight become two and a half each."""
    model, stages = CostModel(job()), Split(4, 1, (0, 8, 16, 24, 32)).stages(32, "none")
    whole, half, quarter = (
        [terms["activations"] for terms in detail(model, piped(4, 16, offload, stages=stages)).stage_bytes]
        for offload in ("none", "activations:0.5", "activations:0.25")
    )
    each = whole[1] / 3
    assert whole[1:3] == pytest.approx([3 * each, 2 * each])
    assert half[1:3] == pytest.approx([2.5 * each, 2.5 * each])
    assert quarter[1:3] == pytest.approx(half[1:3])  # a sixth of stage 1's is enough
    assert half[0] == pytest.approx(0.625 * whole[0])  # stage 0 lends what is asked until both have as much
    assert quarter[0] == pytest.approx(0.75 * whole[0])


def slowed(times: float) -> ClusterSpec:
    """GB200 NVL72 with links inside the rack that many times slower."""
    spec = load_cluster("gb200-nvl72")
    *inside, out = spec.levels
    rate = Figure(value=inside[-1].bandwidth_bytes_per_s.value / times, source="made up", grade="given")
    slow = tuple(level.model_copy(update={"bandwidth_bytes_per_s": rate}) for level in inside)
    return spec.model_copy(update={"levels": (*slow, out)})


def test_copies_hide_behind_passes_until_links_are_too_slow() -> None:
    """At full rate nothing is exposed; where copies dwarf passes a stage pays for its bytes out and back, less what passes take."""
    lent = "activations:0.5"
    assert evaluate(job(), piped(4, 32, lent))[0].breakdown_s["offload"] == 0
    exposed = [evaluate(job(slowed(times)), piped(4, 32, lent))[0] for times in (100.0, 300.0, 1000.0)]
    apart = [evaluate(job(slowed(times)), piped(4, 32))[0] for times in (100.0, 300.0, 1000.0)]
    offload = [found.breakdown_s["offload"] for found in exposed]
    assert offload[0] < offload[1] < offload[2]
    for found, without in zip(exposed, apart, strict=True):
        assert found.step_time_s >= without.step_time_s
        assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("cluster", ["gb200-nvl72", "cloudmatrix-384"])
def test_traffic_is_that_of_every_message(cluster: str, order: str) -> None:
    """64 ranks, message by message: a share of what an early rank saves goes to the one with its other coordinates, and returns."""
    problem = job(cluster, 64)
    layout = with_default_stages(CostModel(problem), piped(8, 16, tp=4, dp=2, edp=8, rank_order=order, micro_batch=1))
    whole = detail(CostModel(problem), layout)
    found = detail(CostModel(problem), layout.model_copy(update={"offload": "activations:0.3"}))
    at, sizes = coordinates(layout), problem.cluster.allocated_sizes(64)
    of_place = {tuple(int(at[name][rank]) for name in ("tp", "cp", "dp", "pp")): rank for rank in range(64)}
    sent = dict.fromkeys((level.name for level in problem.cluster.levels), 0.0)
    for (tp, cp, dp, stage), rank in of_place.items():
        ours, theirs = 8 - stage, stage + 1
        share = min(0.3, max(ours - theirs, 0) / 2 / ours)
        partner = of_place[tp, cp, dp, 7 - stage]
        level = next(k for k, size in enumerate(sizes) if rank // size == partner // size)
        saved = whole.stage_bytes[stage]["activations"] / ours
        sent[problem.cluster.levels[level].name] += 2 * 16 * share * saved / 64
    told = {name: by.get("offload", 0.0) * GIB for name, by in found.traffic_gib.items()}
    assert told == pytest.approx(sent, rel=1e-9)
    assert sum(sent.values()) > 0


def test_rules_of_lending() -> None:
    """Only 1F1B's stages lend, of a pipeline inside one supernode, whatever a stack's own offload can do."""
    lends = piped(4, 16, "activations:0.5", dp=4, edp=4)

    def broken(problem: Problem, **changed: Any) -> set[str]:
        return {each.rule for each in violations(problem, lends.model_copy(update=changed))}

    assert not broken(job(stack="megatron-lm"), num_microbatches=8)
    assert "P012" in broken(job(), schedule="gpipe")
    assert "P012" not in broken(job(), schedule="interleaved", vpp=2)
    assert "P013" in broken(job(), pp=1, dp=16, edp=16)
    across = job("hgx-h100")
    assert "P014" in broken(across, num_microbatches=8)
    assert "P014" not in broken(across, num_microbatches=8, rank_order="tp-cp-ep-pp-dp")
    assert "C103a" in broken(job("hgx-h100", offload_to="host"))


def tight(pp: int, room: float, **more: Any) -> Problem:
    """Llama 3.1 8B in `pp` stages on devices of so many bytes."""
    spec = load_cluster("gb200-nvl72")
    memory = Figure(value=room, source="made up", grade="given")
    spec = spec.model_copy(update={"accelerator": spec.accelerator.model_copy(update={"memory_bytes": memory})})
    fix = f"tp=1,cp=1,pp={pp},dp=1,micro_batch=1,recompute=none|full,optimizer_sharding=none,schedule=1f1b"
    return job(spec, pp, **{"fix": f"{fix},rank_order=tp-cp-ep-dp-pp", "memory_margin": 0.05, **more})


@pytest.mark.parametrize(("pp", "room"), [(2, 1.5e11), (2, 1.2e11), (3, 9.0e10), (3, 8.0e10)])
def test_the_plan_is_the_best_of_all_cuts_and_shares(pp: int, room: float) -> None:
    """Every recompute, share and cut of a short pipeline, listed and priced."""
    problem = tight(pp, room)
    model, space = CostModel(problem), Space(problem)
    table, _ = space.layouts(np.arange(len(space.frames)))
    inner = np.array(np.meshgrid(*[np.arange(1, 32)] * (pp - 1))).reshape(pp - 1, -1).T
    inner = inner[(np.diff(inner, axis=1) > 0).all(axis=1)]
    cuts = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, 32)))
    least_s, lent = np.inf, False
    for row in range(len(table)):
        prices = model.price_cuts(model.rows(table.take(np.full(len(cuts), row, dtype=np.intp))), cuts)
        step_s = float(np.where(prices.fits, prices.step_time_s, np.inf).min())
        lent = bool(table.activation_offload[row]) if step_s < least_s * (1 - 1e-9) else lent
        least_s = min(least_s, step_s)
    found = plan(problem, top=1)
    assert found.plan.step_time_s == pytest.approx(least_s, rel=1e-9)
    assert found.plan.memory.peak_gib * GIB <= model.usable_bytes
    assert lent == found.plan.layout.offload.startswith("activations")


def test_interleaved_stages_lend_where_that_is_faster() -> None:
    """Every cut that is looked at is priced with what both of a pair hold, and the plan fits."""
    fix = "tp=1,cp=1,pp=4,dp=1,micro_batch=1,vpp=2,schedule=interleaved,recompute=none|full,optimizer_sharding=none"
    found, alone = (plan(tight(4, 9.2e10, fix=fix, offload_to=to)) for to in ("peers", None))
    assert found.plan.layout.offload.startswith("activations")
    assert found.plan.step_time_s < alone.plan.step_time_s
    model = CostModel(found.problem)
    assert found.plan.memory.peak_gib * GIB <= model.usable_bytes


def test_lent_memory_spares_recompute_and_is_no_frameworks() -> None:
    """Where early stages run out and late ones have room the plan lends, says so, and is not written for a framework."""
    found, alone = plan(tight(4, 8.0e10)), plan(tight(4, 8.0e10, offload_to=None))
    assert found.plan.step_time_s < alone.plan.step_time_s
    assert "on devices of late ones" in found.certificate.space
    assert found.certificate.cuts_lower_bound_s is None  # what two stages lend each other couples their cuts
    assert any("no framework" in said for said in found.assumptions)
    with pytest.raises(Infeasible, match="no option"):
        render(found, "megatron-lm")
    assert render(found, "groups")

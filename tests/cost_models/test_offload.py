"""Activations and optimizer states that leave the device: memory, what the link exposes, and what the host or the pool can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.details import Detail, detail
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.evaluation import evaluate, with_default_stages
from paraplan.optimizer.planner import plan
from paraplan.search_spaces.cluster import ClusterSpec, Figure
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem, Split
from paraplan.search_spaces.rules import violations


def given(value: float) -> Figure:
    return Figure(value=value, source="made up", grade="given")


def linked(rate: float, room: float = 1e13, cluster: str = "hgx-h100", tier: str = "host_link") -> ClusterSpec:
    """A cluster whose devices reach their host, or pool, at `rate` bytes/s, with `room` bytes there."""
    spec = load_cluster(cluster)
    link = getattr(spec, tier).model_copy(update={"bandwidth_bytes_per_s": given(rate), "memory_bytes_per_device": given(room)})
    return spec.model_copy(update={tier: link})


def job(cluster: ClusterSpec | str = "hgx-h100", **limits: Any) -> Problem:
    return build_problem("llama-3.1-8b", cluster, 8, 32, 8192, **limits)


def priced(problem: Problem, offload: str, **degrees: Any) -> tuple[CostModel, Layout, Detail]:
    chosen = {"tp": 2, "dp": 4, "num_microbatches": 8, "edp": 8, **degrees}
    model = CostModel(problem)
    layout = with_default_stages(model, Layout(**chosen, offload=offload))
    return model, layout, detail(model, layout)


@pytest.mark.parametrize(("to", "tier"), [("host", "host_link"), ("pool", "pool")])
def test_the_link_is_in_use_for_what_leaves(to: str, tier: str) -> None:
    """Of activations what every micro-batch saves, once in a step over a link of 10 GB/s; only a pool lies on the network."""
    problem = job(linked(1e10, cluster="cloudmatrix-384", tier=tier), offload_to=to)
    saved_gib = priced(problem, "none")[2].stage_bytes[0]["activations"] / GIB  # one micro-batch is in flight without a pipeline
    found, _ = evaluate(problem, Layout(tp=2, dp=4, num_microbatches=8, edp=8, offload="activations:0.5"))
    sent_gib = 8 * 0.5 * saved_gib
    assert found.level_utilisation[f"{to} link"] == pytest.approx(sent_gib * GIB / 1e10 / found.step_time_s, rel=1e-6)
    assert found.traffic_gib["supernode"].get("offload", 0.0) == pytest.approx(sent_gib if to == "pool" else 0.0, rel=1e-6)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_offloaded_activations_leave_the_device(share: float) -> None:
    whole, less = (priced(job(linked(1e15)), offload)[2] for offload in ("none", f"activations:{share}"))
    for before, after in zip(whole.stage_bytes, less.stage_bytes, strict=True):
        assert after["activations"] == pytest.approx((1 - share) * before["activations"], rel=1e-6, abs=100)
        assert {**after, "activations": 0} == {**before, "activations": 0} | {"transient": after["transient"]}
    assert less.step_time_s == pytest.approx(whole.step_time_s)  # over a link without end
    assert less.breakdown_s["offload"] == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_layer_at_work_stays_on_the_device(recompute: str) -> None:
    """However much leaves: a layer's activations are there while it makes or needs them. Two micro-batches of 17 layers in flight.

    A stage that sends half away holds half of 34 layers and the other half of one; sending all, one. Redone layers leave their
    inputs behind, 2·8192·4096 bytes over TP 2, and one layer is made anew, its input among what it takes.
    """
    stages = {"pp": 2, "dp": 2, "edp": 4, "num_microbatches": 16, "recompute": recompute}
    problem = job(linked(1e15, cluster="atlas-800t-a2"), stack="mindspeed-llm")
    whole = priced(problem, "none", **stages | {"recompute": "none"})[2].stage_bytes[0]
    layer = whole["activations"] / 34 if recompute == "none" else 2 * 8192 * 4096 / 2
    held = {f: priced(problem, f"activations:{f}", **stages)[2].stage_bytes[0] for f in (0.0, 0.5, 1.0)}
    for share, terms in held.items():
        assert terms["activations"] == pytest.approx((1 - share) * 34 * layer, rel=1e-9, abs=100)
        assert terms["transient"] - held[0.0]["transient"] == pytest.approx(share * layer, rel=1e-6)
    # The layer made anew is there whole beside the inputs of all.
    assert held[0.0]["transient"] - whole["transient"] == pytest.approx(whole["activations"] / 34 - layer, rel=1e-6)


def test_redone_layers_move_their_inputs_alone() -> None:
    """Over 1 MB/s nothing is hidden to speak of: out and back go 32 layers' inputs and what the head keeps, 8 times a step."""
    rate, hidden = 1e6, 2 * 8192 * 4096 / 2
    problem = job(stack="mindspeed-llm", cluster=linked(rate, cluster="atlas-800t-a2"))
    found = priced(problem, "activations:1", recompute="full")[2]
    assert found.breakdown_s["offload"] == pytest.approx(8 * 2 * (32 + 2) * hidden / rate, rel=0.01)


def test_a_slow_link_exposes_what_no_pass_hides() -> None:
    """At a rate where copies dwarf compute, each micro-batch pays for its bytes out and back, less what its passes take."""
    rate = 2e8
    _, _, none = priced(job(linked(rate)), "none")
    _, _, found = priced(job(linked(rate)), "activations:0.5")
    (moved,) = [stage["activations"] * 0.5 for stage in none.stage_bytes]  # one micro-batch is in flight without a pipeline
    layers = sum(none.breakdown_s.values()) - none.breakdown_s["optimizer"] - none.breakdown_s["dp"]
    out_and_back = 8 * 2 * moved / rate
    assert found.step_time_s > none.step_time_s
    assert found.breakdown_s["offload"] == pytest.approx(out_and_back - layers, rel=0.05)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)


def test_more_offload_and_slower_links_never_shorten_a_step() -> None:
    times = [[priced(job(linked(rate)), f"activations:{f}")[2].step_time_s for f in (0.25, 0.5, 1.0)] for rate in (1e9, 1e10, 1e11)]
    assert (np.diff(times, axis=1) >= 0).all()
    assert (np.diff(times, axis=0) <= 0).all()


def test_what_the_host_cannot_hold_does_not_fit() -> None:
    model, layout, found = priced(job(), "none")
    activations = found.stage_bytes[0]["activations"]
    table = LayoutTable.from_layouts([layout.model_copy(update={"offload": "activations:1"})])
    for room, fits in ((activations * 1.01, True), (activations * 0.99, False)):
        prices = CostModel(job(linked(1e10, room))).price(table)
        assert bool(prices.fits[0]) is fits
    assert model.host_limit_bytes > activations


def test_a_pool_is_reached_over_its_own_link_and_shares_it() -> None:
    """CloudMatrix384: the pool hangs on the scale-up links, so what TP sends hides nothing; host copies hide beside it."""
    cluster = linked(2e9, cluster="cloudmatrix-384", tier="pool")
    cluster = cluster.model_copy(update={"host_link": linked(2e9, cluster="cloudmatrix-384").host_link})
    host, pool = (priced(job(cluster, offload_to=to), "activations:0.5")[2] for to in ("host", "pool"))
    assert host.breakdown_s["offload"] > 0
    tp_s = host.breakdown_s["tp"]
    assert tp_s > 0
    assert pool.breakdown_s["offload"] - host.breakdown_s["offload"] == pytest.approx(tp_s, rel=0.05)
    states = [
        priced(job(linked(r, cluster="cloudmatrix-384", tier="pool"), offload_to="pool"), "optimizer:1")[2] for r in (1e10, 2e10)
    ]
    slow, fast = (found.breakdown_s["offload"] for found in states)
    assert slow > fast > 0
    tight = CostModel(job(linked(1e10, 1e8, "cloudmatrix-384", "pool"), offload_to="pool"))
    _, layout, _ = priced(job(cluster), "optimizer:1")
    assert not tight.price(LayoutTable.from_layouts([layout])).fits[0]
    with pytest.raises(InputError, match=r"no pool of memory; host is what it has, or peers"):
        job(offload_to="pool")


def test_the_search_finds_the_best_offload_there_is() -> None:
    """Without a pipeline every layout has one cut: the plan is the least of all that fit, listed and priced."""
    limits: dict[str, Any] = {
        "fix": "pp=1,offload=none|activations:0.5|activations:1|optimizer:1,recompute=none,micro_batch=1|2|4",
        "memory_margin": 0.05,
    }
    problem = build_problem("llama-3.1-8b", linked(2e10), 2, 32, 8192, **limits)
    space, model = Space(problem), CostModel(problem)
    table, _ = space.layouts(np.arange(len(space.frames)))
    table = table.with_splits(np.zeros(len(table), dtype=np.intp), (Split(1, 1, (0, 32)),))
    prices = model.price(table)
    best = int(np.where(prices.fits, prices.step_time_s, np.inf).argmin())
    found = plan(problem).plan
    assert found.step_time_s == pytest.approx(float(prices.step_time_s[best]))
    assert (table.activation_offload[prices.fits] > 0).any()
    assert found.memory.peak_gib * GIB <= model.usable_bytes


def test_stages_are_cut_within_what_the_pool_holds() -> None:
    """Of all cuts of a pipeline the least whose stages find room in a pool that holds less than the best would send there."""
    fix = "tp=2,cp=1,pp=2,dp=1,micro_batch=1,recompute=none,offload=activations:1,optimizer_sharding=none,schedule=1f1b"
    fix += ",rank_order=tp-cp-ep-dp-pp"

    def asked(room: float) -> Problem:
        cluster = linked(4e10, room, "cloudmatrix-384", "pool")
        return build_problem("llama-3.1-8b", cluster, 4, 32, 8192, fix=fix, memory_margin=0.05, offload_to="pool")

    def listed(room: float) -> tuple[float, float]:
        """The least step over all cuts, and the most that a stage of any cut sends away."""
        model, space = CostModel(asked(room)), Space(asked(room))
        table, _ = space.layouts(np.arange(len(space.frames)))
        rows, cuts = model.rows(table.take(np.zeros(31, dtype=np.intp))), np.array([(0, cut, 32) for cut in range(1, 32)])
        prices = model.price_cuts(rows, cuts)
        away = model.away_bytes(rows, model.flow(rows, cuts).load).max(axis=1)
        return float(np.where(prices.fits, prices.step_time_s, np.inf).min()), float(away[prices.step_time_s.argmin()])

    free_s, needed = listed(1e13)
    tight_s, _ = listed(0.9 * needed)
    assert tight_s > free_s
    for room, least_s in ((1e13, free_s), (0.9 * needed, tight_s)):
        assert plan(asked(room), top=1).plan.step_time_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.parametrize("rate", [1e9, 5e9, 4e10])
def test_redone_and_offloaded_layers_are_searched_to_the_end(rate: float) -> None:
    """However slow the pool is, the plan is the least of all cuts of two stages under every recompute and share."""
    fix = "tp=2,cp=1,pp=2,dp=1,micro_batch=1,optimizer_sharding=none,schedule=1f1b,rank_order=tp-cp-ep-dp-pp"
    fix += ",recompute=none|full:block:4|full:block:8|full|selective:layernorm,offload=activations:1|activations:0.5"
    cluster = linked(rate, 1e12, "cloudmatrix-384", "pool")
    more: dict[str, Any] = {"fix": fix, "memory_margin": 0.02, "offload_to": "pool", "stack": "mindspeed-llm"}
    problem = build_problem("llama-3.1-8b", cluster, 4, 32, 8192, **more)
    model, space = CostModel(problem), Space(problem)
    table, _ = space.layouts(np.arange(len(space.frames)))
    cuts, least_s = np.array([(0, cut, 32) for cut in range(1, 32)]), np.inf
    for row in range(len(table)):
        prices = model.price_cuts(model.rows(table.take(np.full(31, row, dtype=np.intp))), cuts)
        least_s = min(least_s, float(np.where(prices.fits, prices.step_time_s, np.inf).min()))
    assert plan(problem, top=1).plan.step_time_s == pytest.approx(least_s, rel=1e-9)


def test_saying_where_to_lets_activations_leave() -> None:
    """Quarters of them, where the stack can; else the certificate names the flag, and what it would gain on the plan's degrees."""
    fix = "tp=4|8,cp=1,pp=4,vpp=1,micro_batch=1,recompute=none|full"

    def asked(**more: Any) -> Problem:
        return build_problem("llama-3.1-70b", "cloudmatrix-384", 64, 64, 8192, fix=fix, **more)

    moved = {float(share) for share in Space(asked(offload_to="pool")).sharings["activation_offload"]}
    assert moved == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert set(Space(asked()).sharings["activation_offload"]) == {0.0}
    assert set(Space(asked(offload_to="host", stack="mindformers")).sharings["activation_offload"]) == {0.0}
    alone, free = plan(asked()), plan(asked(offload_to="pool"))
    assert free.plan.step_time_s < alone.plan.step_time_s
    assert "activations:" in free.plan.layout.offload
    assert "shares 0, 0.25, 0.5, 0.75, 1 of the activations to the pool" in free.certificate.space
    assert "activations stay on the device" in alone.certificate.space
    assert f"{free.plan.step_time_s:.4g} s" in alone.certificate.beyond[-1]
    assert alone.certificate.beyond[-1].endswith("less than the plan: --offload-to pool searches them")


def test_rules_of_activation_offload() -> None:
    """Megatron moves activations of whole layers: without a pipeline and without recompute."""
    problem = job(fix="offload=activations:0.5")
    base = Layout(tp=2, dp=4, edp=8, num_microbatches=8, offload="activations:0.5")
    assert not violations(problem, base)
    piped = base.model_copy(update={"pp": 2, "dp": 2, "edp": 4, "num_microbatches": 16})
    assert any(broken.rule == "C103a" for broken in violations(problem, piped))
    redone = base.model_copy(update={"recompute": "full"})
    assert any(broken.rule == "C103b" for broken in violations(problem, redone))
    other = build_problem("llama-3.1-8b", "hgx-h100", 8, 32, 8192, stack="nanotron")
    assert any(broken.rule == "P011" for broken in violations(other, base))
    step_s = evaluate(problem, base)[0].step_time_s
    assert step_s >= evaluate(problem, base.model_copy(update={"offload": "none"}))[0].step_time_s

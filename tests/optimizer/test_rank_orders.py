"""Rank orders beyond those of flags: what a search over all of them finds, and which it counts as one."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer import orders
from paraplan.optimizer.cli import main
from paraplan.optimizer.evaluation import evaluate
from paraplan.optimizer.exporters import EXPORTERS, render
from paraplan.optimizer.incumbent import Setting, searched
from paraplan.optimizer.planner import plan
from paraplan.optimizer.ranks import groups
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import Infeasible, InputError
from paraplan.search_spaces.groups import placed_alike
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import FLAG_RANK_ORDERS, RANK_ORDERS, Layout, LayoutTable, Problem
from paraplan.search_spaces.rules import violations

FEW = "micro_batch=1,vpp=1,recompute=full,offload=none,optimizer_sharding=zero1"
JOBS = {
    "dense": ("llama-3.1-8b", "hgx-h100", 32, 64, 8192, f"{FEW},cp_type=p2p,tp=2,cp=2|4,pp=1|2"),
    "mixture": ("qwen3-30b-a3b", "hgx-h100", 64, 128, 4096, f"{FEW},tp=2|4,cp=1|2,pp=2,ep=4|8,etp=1|2"),
}


def problem(job: str, **limits: Any) -> Problem:
    model, cluster, devices, batch, length, fix = JOBS[job]
    extra = limits.pop("fix", "")
    return build_problem(model, cluster, devices, batch, length, fix=",".join(filter(None, (fix, extra))), **limits)


def best_s(of: Problem) -> float:
    found = searched(Setting(of, load_profile(of.cluster.accelerator.name))).best
    return found[0].step_time_s if found else np.inf


@pytest.mark.parametrize("job", JOBS)
def test_the_best_of_all_orders_is_the_best_of_a_search_for_each(job: str) -> None:
    """Of every sixth order, those of flags among them; then without the one that wins, so that the others have to."""
    some = [*FLAG_RANK_ORDERS, *RANK_ORDERS[2::6]]
    alone = {order: best_s(problem(job, rank_order="all", fix=f"rank_order={order}")) for order in some}
    assert len({round(step, 9) for step in alone.values()}) > 2  # orders differ
    while alone:
        among = "|".join(alone)
        fastest = min(alone.values())
        assert best_s(problem(job, rank_order="all", fix=f"rank_order={among}")) == pytest.approx(fastest, rel=1e-9)
        alone = {order: step for order, step in alone.items() if step > fastest * (1 + 1e-9)}


@pytest.mark.parametrize("job", JOBS)
def test_orders_that_count_as_one_cost_the_same(job: str) -> None:
    """Legal orders of the frame with most layouts, priced by themselves: those of one number agree, and each is listed once."""
    everything = problem(job, rank_order="all")
    space = Space(everything)
    frames = np.argsort(-space.layouts_per_frame, kind="stable")[:1]
    table, frame = space.layouts(frames)
    for place in range(len(frames)):
        listed = [table.layout(row, everything.model.num_layers) for row in np.flatnonzero(frame == place).tolist()]
        orders = [listed[0].model_copy(update={"rank_order": order}) for order in RANK_ORDERS]
        legal = [layout for layout in orders if not violations(everything, layout)]
        keys = placed_alike(LayoutTable.from_layouts(legal), everything.allocated_sizes[:-1], job == "mixture", False)
        alike: dict[int, list[Layout]] = {}
        for layout, key in zip(legal, keys.tolist(), strict=True):
            alike.setdefault(key, []).append(layout)
        for same in alike.values():
            ends = {
                same[0].rank_order: same[0],
                same[len(same) // 2].rank_order: same[len(same) // 2],
                same[-1].rank_order: same[-1],
            }
            assert len({round(evaluate(everything, layout)[0].step_time_s, 9) for layout in ends.values()}) == 1
        per_choice = len({each.cp_type for each in listed})
        assert len(legal) > len(alike) == len(listed) / per_choice


def test_flags_of_a_framework_do_not_say_them() -> None:
    """A plan with such an order goes out as process groups, and is refused in words as options."""
    order = "dp-tp-cp-ep-pp"
    found = plan(problem("dense", rank_order="all", fix=f"rank_order={order}", forbid=("cp==4", "pp==2")))
    assert found.plan.layout.rank_order == order
    assert groups(found.plan.layout)["dp"][0] == list(range(8))
    assert "initialize_model_parallel" in " ".join(found.assumptions)
    assert "process_groups.py" in render(found, "groups")
    for framework in set(EXPORTERS) - {"groups", "job"}:
        with pytest.raises(Infeasible) as refused:
            render(found, framework)
        assert any(f"rank order {order}" in reason for reason in refused.value.reasons), framework


def test_an_order_is_illegal_where_only_flags_are_given() -> None:
    layout = Layout(tp=2, pp=2, dp=8, edp=16, num_microbatches=8, rank_order="tp-dp-cp-ep-pp")
    assert [broken.rule for broken in violations(problem("dense"), layout) if "rank_order" in broken.rule] == ["stack rank_order"]
    assert not [broken for broken in violations(problem("dense", rank_order="all"), layout) if "rank_order" in broken.rule]
    with pytest.raises(InputError, match="torchtitan lays ranks out by itself"):
        build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, framework="torchtitan", rank_order="all")
    with pytest.raises(InputError, match=r"rank-order = 'some': must be flags"):
        build_problem("llama-3.1-8b", "hgx-h100", 8, 8, 4096, rank_order="some")


def test_orders_beyond_flags_are_tried_on_the_layouts_of_a_plan() -> None:
    """TP 8 fills a server under the orders of flags, CP 2 lies across; the API can put CP inside, where CP has more to send."""
    words: dict[str, Any] = {"fix": f"{FEW},tp=8,cp=2,pp=1,cp_type=p2p"}
    asked = "llama-3.1-8b", "hgx-h100", 64, 64, 4096
    found = plan(build_problem(*asked, **words), top=1)
    said = re.search(r"takes, (\S+) gives the plan's layout ([\d.]+) s, [\d.]+ % less than the plan", found.certificate.beyond[0])
    assert said is not None
    wide = build_problem(*asked, **words, rank_order="all")
    step_s = evaluate(wide, found.plan.layout.model_copy(update={"rank_order": said[1]}))[0].step_time_s
    assert step_s == pytest.approx(float(said[2]), rel=1e-3)
    assert step_s < found.plan.step_time_s * 0.999
    assert best_s(wide) == pytest.approx(step_s)
    assert "Python API" not in str(plan(wide, top=1).certificate.beyond)
    kept = plan(build_problem(*asked, **words), top=1, inside_by_default=True)
    assert "none of the 118 other rank orders" in kept.certificate.beyond[0]  # TP would lie across servers


def test_orders_that_spare_next_to_nothing_are_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix=f"{FEW},tp=2,cp=1,pp=1")
    layout, profile = plan(asked, top=1, bound_cuts=False).plan.layout, load_profile("h100-80gb-sxm")
    other = next(order for order in RANK_ORDERS if order not in FLAG_RANK_ORDERS)
    for gain, said in ((0.0004, "none of the 118"), (0.0006, f"{other} gives the plan's layout 0.9994 s, <0.1 % less")):
        monkeypatch.setattr(orders, "_steps_s", lambda *_, gain=gain: [(layout.rank_order, 1.0), (other, 1.0 - gain)])
        assert said in orders.other_orders(asked, profile, [layout])


def test_orders_beyond_flags_are_no_matter_where_the_order_is_given() -> None:
    few = "micro_batch=1,vpp=1,recompute=full,tp=2,cp=1,pp=1"
    for words in ({"framework": "torchtitan"}, {"fix": f"{few},rank_order={RANK_ORDERS[0]}"}):
        asked: dict[str, Any] = {"fix": few, **words}
        found = plan(build_problem("llama-3.1-8b", "hgx-h100", 16, 32, 4096, **asked), top=1)
        assert "Python API" not in str(found.certificate.beyond)


def test_the_certificate_says_which_orders_were_searched(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "32", "--seq-len", "4096"]
    spaces = []
    for chosen in ("flags", "all"):
        assert main([*words, "--fix", f"{FEW},tp=2,cp=1|2", "--rank-order", chosen, "--json"]) == 0
        spaces.append(json.loads(capsys.readouterr().out)["certificate"])
    assert "rank orders tp-cp-ep-dp-pp, tp-cp-ep-pp-dp;" in spaces[0]["space"]
    assert "120 rank orders, those once that place a frame's groups alike" in spaces[1]["space"]
    assert spaces[1]["legal"] > spaces[0]["legal"]


def test_inside_follows_the_order() -> None:
    """DP of 8 at stride 1 lies in a server of 8, and TP behind it does not."""
    layout = Layout(tp=2, dp=8, edp=16, num_microbatches=8, rank_order="dp-tp-cp-ep-pp")
    broken = {
        name: [one.rule for one in violations(problem("dense", rank_order="all", inside=f"server:{name}"), layout)]
        for name in ("tp", "dp")
    }
    assert "inside server dp" not in broken["dp"]
    assert "inside server tp" in broken["tp"]

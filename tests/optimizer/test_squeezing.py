"""Layouts of which equal work does not fit: cut so that they do, and walked from cuts that no single move makes faster."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.memory import GIB
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import build_problem
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.search import Search
from paraplan.optimizer.squeezing import Tight, squeezed_cuts
from paraplan.optimizer.stages import balanced_cuts, cut_family, cut_rules, cutting_of
from paraplan.optimizer.walks import Walk
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import load_stack
from paraplan.search_spaces.layout import Floats, Ints, Layout, LayoutTable, Problem
from paraplan.search_spaces.quantities import MIB
from paraplan.search_spaces.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import legal_cuts, random_cluster, random_model, with_memory

ASKED = ("llama-4-maverick", "hgx-h100", 512, 1024, 8192, "megatron-bridge")
FIXED = "tp=2,pp=8,vpp=2,ep=16,cp=1,micro_batch=1,recompute=none,optimizer_sharding=zero1,offload=none"


def test_a_layout_that_fits_under_no_usual_cut_is_found() -> None:
    problem = build_problem(*ASKED, fix=FIXED)
    model = CostModel(problem)
    found = Search(Space(problem), model).run()
    table = LayoutTable.from_layouts([candidate.layout for candidate in found.best])
    rows = model.rows(table).take(np.zeros(1, dtype=np.intp))
    usual = [model.cut_bytes(rows, cuts[None]).max() for cuts in cut_family(model, rows)[0]]
    assert min(usual) > model.usable_bytes
    assert model.price(table).fits.all()
    assert found.complete and found.lower_bound_s == found.any_cuts_bound_s < found.best[0].step_time_s
    counts = found.counts
    assert counts.legal == counts.scored + counts.cut_by_bound + counts.cut_by_memory and counts.scored
    assert min(counts.cut_by_bound, counts.cut_by_memory) >= 0


def test_when_the_time_is_over_one_more_try_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that nothing mends are tried in turn until then; that none fits is not said of a search that was cut short."""
    problem = with_memory(build_problem(*ASKED, fix=FIXED.replace("pp=8,vpp=2", "pp=8|16,vpp=2|3|4")), 60 * GIB)
    tries: list[int] = []
    monkeypatch.setattr(Tight, "_squeezed", lambda tight, part: tries.append(len(part.frame)))
    whole = Search(Space(problem), CostModel(problem)).run()
    assert whole.complete and not whole.best and len(tries) > 1
    tries.clear()
    short = Search(Space(problem), CostModel(problem), time_limit_s=0.0).run()
    assert len(tries) == 1 and not short.complete and not short.best


def test_squeezed_cuts_are_legal_and_pairs_of_moves_never_slow_them() -> None:
    problem = build_problem(*ASKED)
    model = CostModel(problem)
    rows = model.rows(LayoutTable.from_layouts([complete(problem, parse_layout(FIXED.replace(",optimizer_sharding=zero1", "")))]))
    cutting = cutting_of(model, 8, 2)
    cuts = squeezed_cuts(model, rows, cutting, balanced_cuts(model, rows, 16))
    priced = model.price_cuts(rows, cuts)
    assert cutting.legal(cuts).all() and priced.fits.all()
    begun = tuple(cuts[0].tolist()), float(priced.step_time_s[0])
    ended, step_s = Walk(model, rows).wandered(begun)
    assert step_s <= begun[1] and cutting.legal(np.array([ended])).all()
    assert model.price_cuts(rows, np.array([ended])).fits.all()


def interleaved(seed: int) -> Problem:
    """Interleaved chunks of a small model on one pipeline, every choice but the cuts made."""
    rng = random.Random(f"tight {seed}")
    pp, vpp = rng.choice(((2, 2), (3, 2), (2, 3)))
    fixed = {"pp": pp, "vpp": vpp, "schedule": "interleaved", "recompute": rng.choice(("none", "none", "full")), "micro_batch": 1}
    fixed |= {"offload": "none", "optimizer_sharding": "zero1"}
    fix = {name: (str(value),) for name, value in fixed.items()}
    workload = Workload(global_batch=pp * rng.choice((1, 2, 4)), seq_len=rng.choice((96, 720, 2048)), fix=fix)
    model, cluster = random_model(rng), random_cluster(rng)
    return Problem(model=model, cluster=cluster, devices=pp, stack=load_stack("megatron-lm"), workload=workload)


def peaks(model: CostModel, layout: Layout, cuts: Ints) -> Floats:
    """Bytes of the fullest stage under each of some cuts."""
    return np.asarray(model.cut_bytes(model.rows(LayoutTable.from_layouts([layout] * len(cuts))), cuts).max(axis=1))


def test_what_fits_under_any_cuts_is_found() -> None:
    """Memory that few of all cuts fit in: each is tried, and the search finds one wherever there is one."""
    over = {"usual cuts": 0, "squeezed": 0}
    for seed in range(51, 59):
        problem = interleaved(seed)
        pp, vpp = (int(problem.workload.fix[name][0]) for name in ("pp", "vpp"))
        cuts = np.array(legal_cuts(problem, pp, vpp))
        if len(cuts) < 2:
            continue
        layout = complete(problem, parse_layout(",".join(f"{name}={value}" for name, (value,) in problem.workload.fix.items())))
        tight = with_memory(problem, float(peaks(CostModel(problem), layout, cuts).min()) + 3 * MIB)
        model = CostModel(tight)
        row = model.rows(LayoutTable.from_layouts([layout]))
        over["usual cuts"] += bool(peaks(model, layout, cut_family(model, row)[0]).min() > model.usable_bytes)
        squeezed = squeezed_cuts(model, row, cutting_of(model, pp, vpp), cut_rules(model, row)[0])
        over["squeezed"] += bool(peaks(model, layout, squeezed)[0] > model.usable_bytes)
        (best,) = Search(Space(tight), model).run().best
        assert model.price(LayoutTable.from_layouts([best.layout])).fits.all(), seed
    assert over["usual cuts"] > over["squeezed"] > 0

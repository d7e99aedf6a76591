"""Layouts of which equal work does not fit: cut so that they do, and walked from cuts that no single move makes faster."""

from __future__ import annotations

import numpy as np
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import build_problem
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.search import Search
from paraplan.optimizer.squeezing import squeezed_cuts
from paraplan.optimizer.stages import balanced_cuts, cut_family, cutting_of
from paraplan.optimizer.walks import Walk
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.layout import LayoutTable

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

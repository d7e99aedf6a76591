"""The search finds what listing everything finds: counts, feasibility, best step times of frames, and an honest certificate."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.step import CostModel, same_shape
from paraplan.optimizer.found import Found
from paraplan.optimizer.planner import plan
from paraplan.optimizer.search import Search
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import Infeasible
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import SCHEDULES, Layout, LayoutTable, Problem, Split
from paraplan.search_spaces.rules import violations
from paraplan.search_spaces.vocabulary import V_SHAPED

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import chosen_by_frame, legal_cuts, legal_layouts, price_everything, random_problem, settings, with_memory

GROUPS, SEEDS_PER_GROUP, TOP = 18, 3, 3
LARGEST = 800  # layouts of a problem that are still quick to list


def small_problems(group: int) -> list[tuple[Problem, list[Layout]]]:
    """The group's problems with all their legal layouts: the next seeds whose problem is neither empty nor slow to list."""
    found, seed = [], 10_000 * group
    while len(found) < SEEDS_PER_GROUP:
        problem = random_problem(seed)
        if 0 < Space(problem).listed <= LARGEST:
            found.append((problem, legal_layouts(problem)))
        seed += 1
    return found


def searched(problem: Problem, top: int = TOP) -> Found:
    return Search(Space(problem), CostModel(problem), top=top).run()


@pytest.mark.parametrize("group", range(GROUPS))
def test_search_finds_what_listing_everything_finds(group: int) -> None:
    for problem, layouts in small_problems(group):
        assert Space(problem).listed == len(layouts)
        legal = sum(settings(problem, layout) for layout in layouts)
        everything = price_everything(problem, CostModel(problem), layouts)
        least_bytes = np.full(len(layouts), np.inf)
        np.minimum.at(least_bytes, everything.owner, everything.peak_bytes)
        # Ample memory, room for a third of the layouts, room for the leanest alone, and a little too little for any.
        for usable in (1e12, *np.quantile(least_bytes, [0.3, 0.0]) * 1.0005, least_bytes.min() * 0.9995):
            limited = with_memory(problem, usable)
            best = chosen_by_frame(CostModel(limited), layouts, TOP)
            of_all = everything.best_by_frame(CostModel(limited).usable_bytes)
            assert len(best) == min(len(of_all), TOP)
            assert (np.array(best) >= np.array(of_all[: len(best)]) * (1.0 - 1e-9)).all()
            found = searched(limited)
            if not best and found.best:  # cut in a way that is not listed, as none of those fits
                squeezed = LayoutTable.from_layouts([candidate.layout for candidate in found.best])
                assert CostModel(limited).price(squeezed).fits.all() and found.complete
                assert found.lower_bound_s == found.any_cuts_bound_s <= found.best[0].step_time_s
                continue
            assert found.any_cuts_bound_s <= min(of_all, default=np.inf) * (1.0 + 1e-9)
            times = [candidate.step_time_s for candidate in found.best]
            assert times == pytest.approx(best, rel=1e-9, abs=0)
            counts = found.counts
            assert counts.legal == counts.scored + counts.cut_by_bound + counts.cut_by_memory == legal
            assert min(counts.scored, counts.cut_by_bound, counts.cut_by_memory) >= 0
            assert found.complete
            if best:
                assert found.lower_bound_s == times[0]
                assert counts.scored >= 1
            else:
                assert counts.cut_by_memory == counts.legal


@pytest.mark.parametrize("seed", range(12))
def test_what_is_found_is_legal_and_costs_what_it_says(seed: int) -> None:
    """Every layout that comes back, priced anew from its own stages, takes the time that the search says, and breaks no rule."""
    problem = random_problem(seed)
    model = CostModel(problem)
    for candidate in searched(problem).best:
        price = model.price(LayoutTable.from_layouts([candidate.layout]))
        assert price.step_time_s[0] == pytest.approx(candidate.step_time_s, rel=1e-9, abs=0)
        assert price.peak_bytes[0] <= model.usable_bytes
        assert violations(problem, candidate.layout, peak_bytes=float(price.peak_bytes[0])) == []


def test_alternatives_differ_in_frame_and_come_best_first() -> None:
    found = searched(random_problem(4), top=5)
    frames = [(c.layout.tp, c.layout.cp, c.layout.pp, c.layout.dp, c.layout.ep, c.layout.etp) for c in found.best]
    assert len(set(frames)) == len(frames) == 5
    times = [candidate.step_time_s for candidate in found.best]
    assert times == sorted(times)


def test_how_many_alternatives_are_kept_does_not_change_the_best() -> None:
    problem = random_problem(6)
    assert searched(problem, top=1).best[0].step_time_s == searched(problem, top=8).best[0].step_time_s


def test_a_search_gives_the_same_answer_twice() -> None:
    problem = random_problem(8)
    first, second = searched(problem), searched(problem)
    assert first.best == second.best
    assert first.counts == second.counts


@pytest.mark.parametrize("looks", [6, 8, 12])
def test_a_time_limit_leaves_an_honest_bound(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is stopped says so, and the best of all layouts is no faster than its lower bound."""
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096)
    true_s = searched(problem, top=1).best[0].step_time_s
    clock = itertools.count()  # a second passes whenever somebody looks
    monkeypatch.setattr("paraplan.optimizer.search.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("paraplan.optimizer.search.ROWS_PER_BATCH", 2000)
    found = plan(problem, time_limit_s=looks)
    certificate = found.certificate
    assert certificate.status == "feasible"
    assert 0.0 < certificate.lower_bound_s <= true_s <= found.plan.step_time_s
    assert certificate.gap == pytest.approx(found.plan.step_time_s / certificate.lower_bound_s - 1.0)
    assert certificate.legal == certificate.scored + certificate.cut_by_bound + certificate.cut_by_memory
    monkeypatch.undo()
    assert plan(problem, time_limit_s=1e6).certificate.status == "optimal"


def test_an_interrupted_search_returns_what_it_has() -> None:
    problem = random_problem(6)

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    search = Search(Space(problem), CostModel(problem), top=1)
    found = search.run(interrupt)
    assert found.best
    assert not found.complete
    assert found.lower_bound_s <= searched(problem, top=1).best[0].step_time_s <= found.best[0].step_time_s


@pytest.mark.parametrize("work", [1, 3000])
def test_a_search_of_so_much_work_ends_alike_on_any_clock(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, ends = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096), []
    monkeypatch.setattr("paraplan.optimizer.search.ROWS_PER_BATCH", 2000)
    for tick in (0.0, 100.0):  # seconds that pass whenever somebody looks
        clock = itertools.count()
        monkeypatch.setattr("paraplan.optimizer.search.time.monotonic", lambda clock=clock, tick=tick: tick * next(clock))
        found = Search(Space(problem), CostModel(problem), top=1, work_limit=work).run()
        ends.append((found.complete, found.counts, found.lower_bound_s, found.best[0].step_time_s))
    assert ends[0] == ends[1] and ends[0][0] is False and ends[0][2] <= ends[0][3]
    assert Search(Space(problem), CostModel(problem), top=1, work_limit=work).finds_any()


def test_a_problem_that_fits_nowhere_says_why() -> None:
    problem = random_problem(13)
    with pytest.raises(Infeasible) as caught:
        plan(with_memory(problem, 2e8))
    assert "usable" in caught.value.summary
    tight = problem.model_copy(update={"workload": problem.workload.model_copy(update={"fix": {"tp": ("7",)}})})
    with pytest.raises(Infeasible) as caught:
        plan(tight)
    assert "tp" in caught.value.summary
    assert caught.value.reasons


@pytest.mark.parametrize("seed", range(100, 112))
def test_no_cuts_of_any_layout_beat_the_bound_over_all_cuts(seed: int) -> None:
    """Interleaved chunks too, which the search cuts by a rule."""
    problem = random_problem(seed)
    if not 0 < Space(problem).listed <= LARGEST:
        return
    model, layouts = CostModel(problem), legal_layouts(problem)
    found, table, best_s = searched(problem, top=1), LayoutTable.from_layouts(layouts), np.inf
    for rows in same_shape(table):
        pp, vpp, schedule = (int(getattr(table, name)[rows[0]]) for name in ("pp", "vpp", "schedule"))
        cuts = legal_cuts(problem, pp, vpp) if problem.stack.cuts_freely(vpp) else []
        splits = tuple(Split(pp, vpp, each, SCHEDULES[schedule] in V_SHAPED) for each in cuts)
        many = table.take(np.repeat(rows, len(splits))).with_splits(np.tile(np.arange(len(splits)), len(rows)), splits)
        priced = model.price(many)
        best_s = min(best_s, float(priced.step_time_s[priced.fits].min(initial=np.inf)))
    assert found.any_cuts_bound_s <= best_s * (1.0 + 1e-9)

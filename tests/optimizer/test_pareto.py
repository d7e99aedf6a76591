"""Fronts hold what no layout beats, and nothing else: exact ones against all layouts priced, evolved ones against those."""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from paraplan.cost_models.details import detail
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel, same_shape
from paraplan.cost_models.traffic import layers_redone
from paraplan.optimizer.aims import Aims, beyond_supernode_gib, front_of, knee_place, least_place, parse_aims, representatives
from paraplan.optimizer.cli import main
from paraplan.optimizer.evolution import evolved_front
from paraplan.optimizer.pareto import Archive, Job, Point, device_counts, device_unit, exact_front, jobs_of, refined
from paraplan.optimizer.planner import plan
from paraplan.optimizer.reports.comparison import beyond_supernode
from paraplan.optimizer.result import Plan
from paraplan.optimizer.stages import balanced_cuts, default_cuts, partitioned_exactly
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import build_problem, load_cluster
from paraplan.search_spaces.layout import Floats, LayoutTable, Problem
from paraplan.search_spaces.rules import violations

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the oracle lies beside them
from brute_force import Priced, legal_layouts, price_everything, random_problem, with_memory

GIB = 2.0**30
PROFILE = load_profile("h100-80gb-sxm")  # that of all problems here
GROUPS, SEEDS_PER_GROUP = 10, 5
LARGEST, MOST_DEVICES = 30, 8  # of a problem that is quick to list
NARROW = "micro_batch=1,vpp=1,recompute=none|full,cp=1,offload=none,rank_order=tp-cp-ep-dp-pp,optimizer_sharding=zero1"
AIMS = (("step-time", "memory"), ("step-time", "memory", "traffic"), ("memory", "cost", "devices"), ("traffic", "step-time"))


def small_problems(group: int) -> list[tuple[Problem, Priced]]:
    """The group's problems with all their layouts priced under every partition, every second one short of memory."""
    found, seed = [], 50_000 + 1000 * group
    while len(found) < SEEDS_PER_GROUP:
        problem = random_problem(seed)
        if problem.devices <= MOST_DEVICES and 0 < Space(problem).listed <= LARGEST:
            priced = price_everything(problem, CostModel(problem, PROFILE), legal_layouts(problem))
            if len(found) % 2:
                problem = with_memory(problem, float(np.quantile(priced.peak_bytes, 0.4)))
            found.append((problem, priced))
        seed += 1
    return found


def starting_rows(problem: Problem, priced: Priced, model: CostModel) -> list[int]:
    """The row of every layout under the split that stands for it: the balanced one if that fits, else the fastest that does; where
    it is not cut exactly the one that the search gives it.
    """
    found, table = [], LayoutTable.from_layouts(priced.layouts)
    free = partitioned_exactly(problem, table)
    for members in same_shape(table):
        rows = model.rows(table.take(members))
        begun = balanced_cuts(model, rows, int(table.pp[members[0]])) if free[members[0]] else default_cuts(model, rows)
        for number, cuts in zip(members, begun.tolist(), strict=True):
            mine = np.nonzero(priced.owner == number)[0]
            own = [priced.table.splits[int(priced.table.split[row])].cuts for row in mine]
            start = mine[own.index(tuple(cuts))]
            fitting = mine[priced.peak_bytes[mine] <= model.usable_bytes]
            if priced.peak_bytes[start] <= model.usable_bytes:
                found.append(int(start))
            elif free[number] and len(fitting):
                found.append(int(fitting[priced.step_time_s[fitting].argmin()]))
    return found


def figures_of(priced: Priced, chosen: list[int], aims: Aims, model: CostModel) -> Floats:
    """Aims of some rows."""
    table = priced.table.take(np.array(chosen, dtype=np.intp))
    traffic = traffic_gib(model, table) if aims.needs_traffic else np.zeros(len(table))
    return aims.figures(priced.step_time_s[chosen], priced.peak_bytes[chosen], table.devices, traffic)


def traffic_gib(model: CostModel, table: LayoutTable) -> Floats:
    """GiB across supernodes of rows whose splits are given."""
    found = np.zeros(len(table))
    for members in same_shape(table):
        rows = model.rows(table.take(members))
        cuts = np.array([table.splits[int(index)].cuts for index in rows.table.split])
        chunks = rows.chunks(cuts)
        dense, expert = chunks.dense.sum(axis=1), chunks.expert.sum(axis=1)
        found[members] = beyond_supernode_gib(model, rows, layers_redone(model, rows, cuts), dense, expert)
    return found


def assert_front_of(front: Floats, figures: Floats) -> None:
    """Every row is matched or beaten by the front, whose own points are rows that none clearly beats."""
    for row in figures:
        assert (front <= row * (1.0 + 1e-9)).all(axis=1).any()
    for point in front:
        assert np.isclose(figures, point, rtol=1e-9, atol=0).all(axis=1).any()
        beaten = (figures <= point * (1.0 + 1e-9)).all(axis=1) & (figures < point * (1.0 - 1e-6)).any(axis=1)
        assert not beaten.any()


def hypervolume(figures: Floats, reference: Floats) -> float:
    """Volume that some row beats below the reference, sliced along the last aim."""
    inside = figures[(figures < reference).all(axis=1)]
    if not len(inside) or figures.shape[1] == 1:
        return float((reference - inside).max(initial=0.0))
    levels = np.unique(inside[:, -1])
    ends = [*levels[1:], reference[-1]]
    slices = (hypervolume(inside[inside[:, -1] <= low][:, :-1], reference[:-1]) for low in levels)
    return sum(area * (end - low) for area, low, end in zip(slices, levels, ends, strict=True))


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_exact_front_is_that_of_all_layouts(group: int) -> None:
    for number, (problem, priced) in enumerate(small_problems(group)):
        aims = Aims(AIMS[(group + number) % len(AIMS)])
        job = Job.of(problem, PROFILE)
        found = exact_front([job], aims)
        rows = starting_rows(problem, priced, job.model)
        assert bool(found.points) == bool(rows)
        assert_front_of(found.figures, figures_of(priced, rows, aims, job.model))
        for point in found.points[:1]:
            again = refined([job], aims, point)
            assert all(a <= b for a, b in zip(again.figures, point.figures, strict=True))
            peak = job.model.price(LayoutTable.from_layouts([again.layout])).peak_bytes[0]
            assert violations(problem, again.layout, peak_bytes=float(peak)) == []


@pytest.mark.parametrize("seed", [28, 50_001])
def test_traffic_of_many_layouts_is_that_of_each(seed: int) -> None:
    problem = random_problem(seed)
    model, layouts = CostModel(problem, PROFILE), legal_layouts(problem)[::29]
    priced = price_everything(problem, model, layouts)
    chosen = np.arange(0, len(priced.table), max(len(priced.table) // 6, 1))
    together = traffic_gib(model, priced.table.take(chosen))
    levels = [level.name for level in problem.cluster.levels]
    outside = levels[levels.index(problem.cluster.supernode) + 1 :]
    for row, found in zip(chosen, together, strict=True):
        one = detail(model, priced.table.layout(int(row), problem.model.num_layers)).traffic_gib
        assert found == pytest.approx(sum(sum(one[level].values()) for level in outside), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seed", [3, 5])
def test_an_evolved_front_is_never_above_the_exact_one_and_covers_most_of_it(seed: int) -> None:
    problem, aims = random_problem(seed), Aims(("step-time", "memory"))
    jobs = [Job.of(problem, PROFILE)]
    exact = exact_front(jobs, aims)
    found = evolved_front(jobs, aims, Archive(2), generations=2)
    again = evolved_front(jobs, aims, Archive(2), generations=2)
    assert np.array_equal(found.figures, again.figures)
    for figures in found.figures:
        assert (exact.figures <= figures * (1.0 + 1e-9)).all(axis=1).any()
    reference = exact.figures.max(axis=0) * 1.1
    ratio = hypervolume(found.figures, reference) / hypervolume(exact.figures, reference)
    assert 0.98 <= ratio <= 1.0 + 1e-9


def test_generations_find_what_the_first_sample_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraplan.optimizer.evolution.SAMPLED", 40)
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix="micro_batch=1,vpp=1,recompute=none")
    aims = Aims(("step-time", "memory"))
    jobs = [Job.of(problem, PROFILE)]
    exact = exact_front(jobs, aims)
    reference = exact.figures.max(axis=0) * 1.1
    few, more = (evolved_front(jobs, aims, Archive(2), generations=count) for count in (0, 3))
    ratios = [hypervolume(each.figures, reference) / hypervolume(exact.figures, reference) for each in (few, more)]
    assert ratios[0] < ratios[1] <= 1.0 + 1e-9 and ratios[1] >= 0.97


def test_front_of_keeps_each_figure_once_and_in_order() -> None:
    figures = np.array([[2.0, 1.0], [1.0, 3.0], [1.0, 3.0], [1.5, 3.0], [3.0, 0.5], [2.0, 2.0]])
    assert front_of(figures).tolist() == [1, 0, 4]
    assert least_place(figures, 1, ("step-time", "memory")) == 4
    assert knee_place(np.array([[0.0, 10.0], [1.0, 4.0], [10.0, 0.0]])) == 1


def test_representatives_stand_for_the_whole_front() -> None:
    rng = np.random.default_rng(0)
    figures = rng.uniform(1.0, 2.0, (400, 3))
    figures = figures[front_of(figures)]
    kept, share = representatives(figures, [0, len(figures) - 1], 12)
    assert {0, len(figures) - 1} <= set(kept) and len(kept) <= 12 < len(figures)
    shown = figures[kept]
    assert all((shown <= row * (1.0 + share) + 1e-12).all(axis=1).any() for row in figures)
    assert representatives(figures[:5], [0], 12) == ([0, 1, 2, 3, 4], 0.0)


def test_an_archive_asks_only_for_points_that_stay() -> None:
    archive, asked = Archive(2), []

    def point(row: int) -> Point:
        asked.append(row)
        return row  # type: ignore[return-value]

    archive.add(np.array([[1.0, 3.0], [2.0, 4.0], [3.0, 1.0]]), point)
    assert asked == [0, 2]
    assert archive.hopeful(np.array([[1.0, 3.0], [0.5, 9.0], [2.0, 2.0], [3.0, 2.0]])).tolist() == [False, True, True, False]


def test_units_of_devices() -> None:
    rack, pod = load_cluster("gb200-nvl72"), load_cluster("cloudmatrix-384")
    assert [device_unit(rack, count) for count in (576, 72, 64)] == [72, 4, 4]
    assert [device_unit(pod, count) for count in (1536, 768)] == [768, 16]
    problem = build_problem("llama-3.1-8b", "hgx-h100", 64, 256, 4096)
    assert device_counts(problem) == (64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1)
    assert [device_counts(problem.model_copy(update={"devices": few})) for few in (6, 8)] == [(6, 3, 2, 1), (8, 4, 2, 1)]
    many = device_counts(problem.model_copy(update={"devices": 4096}))
    assert len(many) <= 24 and all(a > b for a, b in pairwise(many)) and all(count % 8 == 0 or 256 % count == 0 for count in many)


@cache
def asked(objective: str, **options: float) -> Plan:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 4096, fix=NARROW)
    return plan(problem, objective=objective, **options)  # type: ignore[arg-type]


def test_a_plan_with_a_front_keeps_its_proved_winner() -> None:
    found, fastest = asked("step-time,memory,traffic"), asked("step-time")
    assert fastest.front is None and fastest.front_certificate is None
    assert found.front is not None and found.front_certificate is not None
    assert found.plan == fastest.plan and found.certificate.status == "optimal"
    assert found.front[0].aims["step-time"] == pytest.approx(found.plan.step_time_s, rel=1e-9)
    times = [point.step_time_s for point in found.front]
    assert times == sorted(times)
    for point in found.front:
        assert point.aims["step-time"] == pytest.approx(point.step_time_s, rel=1e-9)
        assert point.aims["memory"] == pytest.approx(point.memory.peak_gib, rel=1e-9)
        assert point.aims["traffic"] == pytest.approx(beyond_supernode(found.problem, point), rel=1e-9, abs=1e-12)
    marks = [mark for point in found.front for mark in point.marks]
    assert sorted(marks) == ["knee", "least memory", "least step-time", "least traffic"]
    assert Plan.model_validate_json(found.to_json()) == found


@pytest.mark.parametrize("aim", ["memory", "traffic", "cost", "devices"])
def test_one_aim_alone_is_made_least(aim: str) -> None:
    found, fastest = asked(aim), asked("step-time")
    both = asked(f"step-time,{aim}")
    assert (found.front is None) == (aim in ("memory", "traffic")) and both.front is not None
    least = min(point.aims[aim] for point in both.front)
    own = {
        "memory": found.plan.memory.peak_gib,
        "traffic": beyond_supernode(found.problem, found.plan),
        "cost": found.plan.devices_used * found.plan.step_time_s / 3600.0,
        "devices": found.plan.devices_used,
    }
    assert own[aim] == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert found.plan.aims is not None and found.plan.aims[aim] == pytest.approx(own[aim], rel=1e-9, abs=1e-12)
    figures = [one.aims[aim] for one in found.alternatives if one.aims]
    assert len(figures) == len(found.alternatives) and figures == sorted(figures) and min(figures, default=least) >= least
    assert found.plan.step_time_s >= fastest.plan.step_time_s * (1 - 1e-9) or found.problem.devices < 16
    assert violations(found.problem, found.plan.layout, peak_bytes=found.plan.memory.peak_gib * GIB) == []


def test_the_least_cost_comes_with_what_other_counts_of_devices_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever saves on devices is told what the saving takes in time."""
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "32", "--global-batch", "64", "--seq-len", "4096"]
    narrow = ["--fix", NARROW, "--quiet"]
    assert main(["plan", *job, *narrow, "--objective", "cost", "--json"]) == 0
    found = Plan.model_validate_json(capsys.readouterr().out)
    assert found.front is not None and found.plan.aims is not None
    counts = [point.devices_used + point.devices_idle for point in found.front]
    assert len(set(counts)) > 1 and counts == sorted(counts, reverse=True)
    costs = [point.aims["cost"] for point in found.front]
    assert costs == sorted(costs, reverse=True) and costs[-1] == found.plan.aims["cost"]
    assert counts[-1] == found.problem.devices
    assert main(["plan", *job, *narrow, "--objective", "cost"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Front" in text and "devices cost device-hours step time s layout" in text


def test_a_price_scales_the_cost() -> None:
    free, priced = asked("cost,step-time"), asked("cost,step-time", device_hour_price=2.5)
    assert free.front and priced.front and priced.front_certificate
    assert [2.5 * p.aims["cost"] for p in free.front] == pytest.approx([p.aims["cost"] for p in priced.front])
    assert priced.front_certificate.units["cost"] == "price"


def test_jobs_on_fewer_devices_are_looked_at_only_where_an_aim_asks() -> None:
    problem = build_problem("llama-3.1-8b", "hgx-h100", 24, 64, 4096)
    assert [job.problem.devices for job in jobs_of(problem, PROFILE, Aims(("step-time", "memory")))] == [24]
    assert [job.problem.devices for job in jobs_of(problem, PROFILE, Aims(("devices", "memory")))] == [24, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("text", "price", "named"),
    [
        ("speed", None, "speed"),
        ("step-time,step-time", None, "twice"),
        ("cost", -1.0, "greater than 0"),
        ("memory", 2.0, "cost"),
        ("", None, "''"),
    ],
)
def test_aims_that_are_none(text: str, price: float | None, named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_aims(text, price)


def test_the_terminal_shows_the_front(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "64", "--seq-len", "4096"]
    limits = ["--fix", NARROW, "--quiet"]
    assert main(["plan", *job, *limits, "--objective", "step-time,memory"]) == 0
    out = capsys.readouterr().out
    assert "Front  exact" in out and "knee" in out and "least memory" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["plan", *job, *limits, "--objective", "memory", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["front_certificate"]["aims"] == ["memory", "step-time"] and "front" not in document


def test_a_cost_is_proved_by_the_step_times_of_every_count_of_devices() -> None:
    found = asked("cost")
    certificate = found.front_certificate
    assert certificate is not None and certificate.lower_bound is not None and found.plan.aims is not None
    assert certificate.gap == pytest.approx(found.plan.aims["cost"] / certificate.lower_bound - 1.0, abs=1e-9)
    assert 0.0 <= certificate.gap < 1e-6
    memory = asked("memory").front_certificate
    assert memory is not None and memory.lower_bound is None and memory.gap is None


@pytest.mark.parametrize(
    ("aim", "told"),
    [
        ("memory", ["peak memory GiB", "The plan has the least memory of all layouts", "of the step time: feasible"]),
        ("goodput", ["effective step s", "Most goodput", "as low in effective step"]),
    ],
)
def test_the_terminal_speaks_of_the_aim(
    aim: str, told: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    job = ["llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "64", "--seq-len", "4096"]
    assert main(["plan", *job, "--fix", NARROW, "--quiet", "--objective", aim]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert [text for text in told if text not in words] == [] and "least goodput" not in words.lower()

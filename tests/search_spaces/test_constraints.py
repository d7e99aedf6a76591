"""The CP-SAT model has the same layouts as the masks, switches rules off one by one, and knows memory as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ortools.sat.python import cp_model
from paraplan.search_spaces.constraints import PeakTable, RuleModel, build_model, candidate_domains
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LayerKind, MoeMlp
from paraplan.search_spaces.layout import Layout, LayoutTable, Problem
from paraplan.search_spaces.model import ModelSpec
from paraplan.search_spaces.quantities import DERIVED, MIB, constants
from paraplan.search_spaces.rules import legal_mask, rules_for, rules_over, violations

FRAME = ("tp", "cp", "pp", "dp", "ep", "etp")
ATTENTION = Attention(heads=12, kv_heads=4, head_dim=64)


def tiny(kind: LayerKind, layers: int = 6) -> ModelSpec:
    return ModelSpec(
        name="tiny", hidden_size=768, vocab_size=1000, max_position_embeddings=512, kinds={"k": kind}, layers=(f"{layers}*k",)
    )


DENSE = tiny(LayerKind(mixer=ATTENTION, mlp=DenseMlp(width=3072)))
MOE = tiny(LayerKind(mixer=ATTENTION, mlp=MoeMlp(experts=8, top_k=2, width=512)))


def solutions(built: RuleModel, names: Sequence[str]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    class Collect(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            found.append(tuple(self.value(built.columns[name]) for name in names))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.enumerate_all_solutions = True
    assert solver.solve(built.model, Collect()) in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return found


def feasible(model: cp_model.CpModel) -> bool:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def small_problem(model: ModelSpec, stack: str, devices: int = 8, **limits: str) -> Problem:
    return build_problem(model, "hgx-h100", devices, 12, 96, stack, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "problem",
    [
        small_problem(DENSE, "megatron-lm"),
        small_problem(MOE, "megatron-lm"),
        small_problem(MOE, "torchtitan", 12),
        small_problem(MOE, "megatron-lm-0.12", 16, forbid="pp>2", inside="server:tp,ep"),
    ],
    ids=["dense", "moe", "torchtitan", "limited"],
)
def test_solver_lists_the_frames_that_the_masks_leave(problem: Problem) -> None:
    domains = {name: range(1, 9) for name in FRAME}
    grid = np.meshgrid(*(np.arange(1, 9) for _ in FRAME), indexing="ij")
    table = {name: axis.ravel() for name, axis in zip(FRAME, grid, strict=True)}
    mask = legal_mask(problem, table)
    by_mask = set(zip(*(table[name][mask].tolist() for name in FRAME), strict=True))
    rules = rules_over(rules_for(problem), {*constants(problem), *FRAME, *DERIVED})
    by_solver = solutions(build_model(problem, rules, domains), FRAME)
    assert len(by_solver) == len(set(by_solver))
    assert set(by_solver) == by_mask
    assert by_mask


def test_solver_lists_the_inner_choices_that_the_masks_leave() -> None:
    problem = small_problem(DENSE, "megatron-lm", fix="tp=2,dp=1")
    names = ("tp", "pp", "dp", "vpp", "micro_batch", "num_microbatches", "schedule")
    domains = {
        "tp": (1, 2),
        "pp": (1, 2, 3),
        "dp": (1, 2),
        "vpp": (1, 2, 3),
        "micro_batch": (1, 2, 3),
        "num_microbatches": (4, 6, 12),
    }
    domains["schedule"] = (1, 2)
    grid = np.meshgrid(*(np.array(domains[name]) for name in names), indexing="ij")
    table = {name: axis.ravel() for name, axis in zip(names, grid, strict=True)}
    mask = legal_mask(problem, table)
    rules = rules_over(rules_for(problem), {*constants(problem), *names})
    by_solver = solutions(build_model(problem, rules, domains), names)
    assert sorted(by_solver) == sorted(zip(*(table[name][mask].tolist() for name in names), strict=True))
    assert by_solver


def test_a_guarded_rule_holds_only_where_its_guard_is_on() -> None:
    problem = small_problem(DENSE, "megatron-lm", fix="tp=5")
    rules = rules_over(rules_for(problem), {*constants(problem), "tp"})
    built = build_model(problem, rules, {"tp": range(1, 13)}, guarded=True)
    assert set(built.guards) == {rule.id for rule in rules}
    built.model.add_assumptions(list(built.guards.values()))
    assert not feasible(built.model)
    built.model.clear_assumptions()
    built.model.add_assumptions([guard for name, guard in built.guards.items() if name != "fix tp"])
    assert feasible(built.model)


def test_candidate_domains_hold_every_legal_value_and_what_limits_name() -> None:
    problem = small_problem(MOE, "megatron-lm", fix="tp=7", forbid="pp>40")
    domains = candidate_domains(problem, rules_for(problem))
    assert {1, 2, 3, 4, 7, 12} - {12} <= set(domains["tp"])
    assert {39, 40, 41} <= set(domains["pp"])
    assert {1, 2, 4, 8} <= set(domains["ep"]) and {1, 2, 3, 4, 6, 12} <= set(domains["micro_batch"])
    assert min(min(values) for name, values in domains.items() if name in FRAME) == 1


def test_a_column_without_a_domain_is_refused() -> None:
    problem = small_problem(DENSE, "megatron-lm")
    with pytest.raises(KeyError):
        build_model(problem, rules_for(problem), {"tp": (1, 2)})


# Memory


def priced(problem: Problem) -> tuple[LayoutTable, np.ndarray]:
    layouts = [Layout(tp=tp, dp=8 // tp, num_microbatches=12 * tp // 8) for tp in (2, 4)]
    layouts.append(layouts[0].model_copy(update={"recompute": "full"}))
    return LayoutTable.from_layouts(layouts), np.array([95e9, 40e9, 60e9])


def test_peak_table_keeps_the_least_peak_rounded_up() -> None:
    problem = small_problem(DENSE, "megatron-lm")
    table, peak_bytes = priced(problem)
    peaks = PeakTable.least(problem, table, peak_bytes, ("tp", "dp"))
    assert peaks.rows[:, :2].tolist() == [[2, 4], [4, 2]]
    assert (peaks.rows[:, 2] % MIB == 0).all()
    assert (peaks.rows[:, 2] - np.array([60e9, 40e9]) >= 0).all() and (peaks.rows[:, 2] - np.array([60e9, 40e9]) < MIB).all()


def test_memory_reads_the_same_in_mask_violations_and_solver() -> None:
    problem = small_problem(DENSE, "megatron-lm")
    usable = constants(problem)["usable_bytes"]
    edge = np.array([usable - 1.0, float(usable), usable + 1.0])
    layouts = [Layout(tp=tp, num_microbatches=12) for tp in (1, 2, 4)]
    table = LayoutTable.from_layouts(layouts)
    fits = [not violations(problem, layout, float(peak)) for layout, peak in zip(layouts, edge, strict=True)]
    assert fits == [True, True, False]
    peaks = PeakTable.least(problem, table, edge, ("tp",))
    rules = rules_over(rules_for(problem), {*constants(problem), "tp", "peak_bytes"})
    built = build_model(problem, rules, {"tp": range(1, 13)}, peaks)
    assert [tp for (tp,) in sorted(solutions(built, ("tp",)))] == [1, 2]  # what the table does not list does not fit


def test_products_stop_before_they_overflow() -> None:
    problem = small_problem(DENSE, "megatron-lm")
    huge = dict.fromkeys(("tp", "cp", "pp", "dp"), (1, 1 << 17))
    rules = [rule for rule in rules_for(problem) if rule.id == "C001"]
    built = build_model(problem, rules, huge)
    assert built.model.validate() == ""
    assert solutions(built, ("tp", "cp", "pp", "dp")) == [(1, 1, 1, 1)]

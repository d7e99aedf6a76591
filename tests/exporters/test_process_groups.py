"""The file of process groups: its lists are those of ranks.py, and its counts of parameters add up to the model's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from paraplan.optimizer.exporters.process_groups import FILE, axes, files
from paraplan.optimizer.ranks import DIMENSIONS, groups
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import InputError

MakePlan = Callable[..., Plan]

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tp": 8, "cp": 2, "pp": 4, "dp": 4, "counts": (20,) * 4}),
    ("llama", {"tp": 4, "cp": 2, "pp": 2, "dp": 4, "rank_order": "tp-cp-ep-pp-dp", "counts": (40, 40)}),
    ("deepseek", {"tp": 2, "pp": 16, "dp": 64, "ep": 64, "counts": (4,) * 15 + (2,)}),
    ("qwen", {"tp": 4, "cp": 2, "dp": 8, "ep": 8, "etp": 2}),
    ("qwen", {"dp": 8}),
    ("gpt", {"tp": 8, "pp": 8, "dp": 3, "seq_len": 2048, "counts": (12,) * 8}),
]


def module(plan: Plan) -> Any:
    written = ModuleType("process_groups")
    exec(files(plan)[FILE], vars(written))
    return written


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_lists_are_those_of_the_plan(make_plan: MakePlan, model: str, layout: dict[str, Any]) -> None:
    plan = make_plan(model, **layout)
    written, expected = module(plan), groups(plan.plan.layout)
    assert {name: written.group_ranks(name) for name in DIMENSIONS} == expected
    together = written.group_ranks("dp_cp")
    assert sorted(rank for ranks in together for rank in ranks) == list(range(plan.plan.layout.devices))
    assert {len(ranks) for ranks in together} == {plan.plan.layout.dp * plan.plan.layout.cp}
    assert all(len({written.place(rank, "tp") for rank in ranks[:3]}) == 1 for ranks in together[:2])


def test_axes_are_found_again_and_irregular_ranks_refused() -> None:
    assert axes([0, 1, 2, 3]) == ((4, 1),) and axes([5]) == ()
    assert axes([0, 2, 8, 10, 64, 66, 72, 74]) == ((2, 64), (2, 8), (2, 2))
    for irregular in ([0, 1, 3], [0, 1, 2, 4, 5, 7]):
        with pytest.raises(ValueError, match=r"ranks are (not regular|no whole number)|no whole number"):
            axes(irregular)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_parameters_of_all_ranks_are_the_model_s(make_plan: MakePlan, model: str, layout: dict[str, Any]) -> None:
    """Dense weights are held dp·cp times, experts edp times; what TP leaves whole is held by each of its ranks."""
    plan = make_plan(model, **layout)
    chosen, spec = plan.plan.layout, plan.problem.model
    parameters = module(plan).PARAMETERS
    assert len(parameters) == chosen.pp
    per_stage = chosen.devices // chosen.pp
    dense = sum(count for count, _ in parameters) * per_stage / (chosen.dp * chosen.cp)
    experts = sum(count for _, count in parameters) * per_stage / chosen.edp
    whole = spec.parameters(mtp=True)
    tied_twice = spec.vocab_size * spec.hidden_size if spec.tied_embeddings and chosen.pp > 1 else 0
    assert whole <= dense + experts < (whole + tied_twice) * 1.08


def test_a_rank_that_is_off_is_told(make_plan: MakePlan) -> None:
    written = module(make_plan("llama", tp=8, pp=4, dp=2, counts=(20,) * 4))
    dense, experts = written.PARAMETERS[1]
    written.check_parameters(dense, experts, rank=16)
    with pytest.raises(RuntimeError, match=r"rank 16, stage 1: \d+ dense parameters; the plan counts \d+"):
        written.check_parameters(dense * 8, experts, rank=16)


def test_balance_between_ranks(make_plan: MakePlan) -> None:
    """Stages of 21, 20, 20 and 19 layers are as unequal as planned; a rank that holds a stage's weights whole is not."""
    written = module(make_plan("llama", tp=8, pp=4, dp=2, counts=(21, 20, 20, 19)))
    held = [written.PARAMETERS[written.place(rank, "pp")] for rank in range(64)]
    totals = [sum(each) for each in held]
    assert written.check_balance(0, held=held) == pytest.approx(max(totals) * 64 / sum(totals)) == written.planned_balance()
    held[17] = (held[17][0] * 8, 0)
    with pytest.raises(RuntimeError, match=r"stage 1: rank 17 holds \d+ parameters, rank 16 \d+"):
        written.check_balance(0, held=held)
    doubled = [
        (dense * 2, experts) if written.place(rank, "pp") == 0 else (dense, experts) for rank, (dense, experts) in enumerate(held)
    ]
    doubled[17] = doubled[16]
    with pytest.raises(RuntimeError, match="times the mean"):
        written.check_balance(0, held=doubled)


def test_backend_follows_the_accelerator(make_plan: MakePlan) -> None:
    assert module(make_plan("llama", tp=8)).BACKEND == "nccl"
    assert module(make_plan("llama", cluster="atlas-800t-a2", stack="mindspeed-llm", tp=8)).BACKEND == "hccl"
    with pytest.raises(InputError, match="says nothing to process groups"):
        files(make_plan("llama", tp=8), "1.0")

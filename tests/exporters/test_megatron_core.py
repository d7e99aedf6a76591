"""A sample of exported plans, and of layouts of any kind, before Megatron-Core itself; megatron_core_proof.py runs them all."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paraplan.optimizer.exporters.process_groups import FILE, files
from paraplan.optimizer.ranks import groups
from paraplan.optimizer.result import Plan

pytest.importorskip("torch", reason="the extra export-proof is not installed")
pytest.importorskip("megatron.core", reason="the extra export-proof is not installed")


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def proof() -> Any:
    sys.path.insert(0, str(Path(__file__).parent))
    import megatron_core_proof

    return megatron_core_proof


def test_sampled_plans_are_accepted(proof: Any) -> None:
    accepted, refused = proof.prove(60, seed=7)
    assert (accepted, dict(refused)) == (60, {})


def test_what_megatron_core_refuses_our_rules_refuse(proof: Any) -> None:
    theirs, ours, only = proof.disprove(60, seed=7)
    assert not only and ours >= theirs > 30


def test_groups_of_4096_ranks_are_megatron_core_s(proof: Any, make_plan: Any) -> None:
    plan: Plan = make_plan("deepseek", tp=4, cp=2, pp=16, dp=32, ep=64, num_microbatches=16, counts=(4,) * 15 + (2,))
    proof.world(4096)
    exported = proof.sections(proof.settings(plan))
    theirs = proof.check_groups(exported)
    ours = groups(plan.plan.layout)
    assert {name: ours[name][0] for name in theirs} == theirs


def test_process_groups_are_built_on_4096_ranks(proof: Any, make_plan: Any) -> None:
    plan: Plan = make_plan("deepseek", tp=4, cp=2, pp=16, dp=32, ep=64, num_microbatches=16, counts=(4,) * 15 + (2,))
    written = ModuleType("process_groups")
    exec(files(plan)[FILE], vars(written))
    proof.parallel_state.destroy_model_parallel()
    proof.world(4096)
    own = written.build(backend="fake")
    lists = groups(plan.plan.layout)
    assert {name: proof.dist.get_process_group_ranks(own[name]) for name in lists} == {name: lists[name][0] for name in lists}
    proof.dist.destroy_process_group()

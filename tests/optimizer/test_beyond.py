"""What a certificate says of more chunks a stage than its space lists, held to a plan that is given them."""

from __future__ import annotations

import re

import pytest
from paraplan.optimizer.planner import plan
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem

JOB = ("gpt3-175b", "hgx-a100", 4096, 1536, 2048)
FRAME = "tp=4,cp=2,pp=8,dp=64,micro_batch=3,recompute=none,offload=none"


def job(more: str = "") -> Problem:
    return build_problem(*JOB, fix=f"{FRAME}{more}")


def test_more_chunks_that_are_faster_are_named_with_what_they_take() -> None:
    found = plan(job())
    words = "; ".join(found.certificate.beyond)
    told = re.search(r"vpp (\d+) on tp 4 cp 2 pp 8 dp 64 takes (\S+) s, (\S+) % less than the plan: --fix vpp=(\d+)", words)
    assert found.plan.layout.vpp <= 8 and told, words
    deeper = plan(job(f",vpp={told[4]}"))
    assert told[1] == told[4] and deeper.plan.step_time_s == pytest.approx(float(told[2]), rel=1e-3)
    assert 1.0 - deeper.plan.step_time_s / found.plan.step_time_s == pytest.approx(float(told[3]) / 100.0, abs=1e-3)


def test_where_few_chunks_are_best_or_vpp_is_fixed_nothing_is_said() -> None:
    assert "--fix vpp" not in str(plan(job(",vpp=2|4")).certificate.beyond)
    flat = plan(build_problem("llama-3.1-8b", "hgx-h100", 16, 64, 8192, fix="pp=1,recompute=none"))
    assert "--fix vpp" not in str(flat.certificate.beyond)


def test_micro_batches_in_other_groups_that_are_faster_are_named_with_what_they_take() -> None:
    """25 micro-batches on 4 stages: interleaved they would leave one over, unless Megatron is told of larger groups."""

    def asked(more: str) -> Problem:
        fix = f"tp=2,dp=8,ep=8,micro_batch=5,recompute=none{more}"
        return build_problem("gpt-oss-20b", "hgx-a100", 64, 1000, 1024, fix=fix)

    found = plan(asked(""))
    words = "; ".join(found.certificate.beyond)
    told = re.search(r"25 micro-batches in vpp (\d).* takes (\S+) s, (\S+) % less than the plan: --fix pp=4,vpp=(\d)", words)
    assert found.plan.layout.pp == 4 and found.plan.layout.schedule == "1f1b" and told, words
    grouped = plan(asked(f",pp=4,vpp={told[4]}"))
    assert told[1] == told[4] and grouped.plan.step_time_s < float(told[2]) * 1.001 < found.plan.step_time_s
    assert "other than pp" not in "; ".join(grouped.certificate.beyond)

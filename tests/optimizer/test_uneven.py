"""Supernodes with unequal shares of a job: priced, planned, placed and exported as they lie."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from paraplan.cost_models.profile import load_profile
from paraplan.optimizer.checking.checker import check
from paraplan.optimizer.cli import main
from paraplan.optimizer.deadline import Deadline
from paraplan.optimizer.exporters import job, megatron_lm
from paraplan.optimizer.leftover import Left, chosen, what_is_left
from paraplan.optimizer.planner import plan
from paraplan.optimizer.rank_files import seats
from paraplan.optimizer.ranks import placement
from paraplan.optimizer.result import Plan
from paraplan.optimizer.switching import switch
from paraplan.optimizer.topology import topology
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.groups import unit_of
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Problem

FEW = "recompute=none,micro_batch=1,vpp=1,schedule=1f1b,cp=1"
MIXTURE = ["qwen3-30b-a3b", "--cluster", "gb200-nvl72", "--global-batch", "264", "--seq-len", "4096"]


def on_two_racks(first: int, second: int, fix: str) -> Problem:
    return build_problem("qwen3-30b-a3b", "gb200-nvl72", first + second, 264, 4096, fix=f"{FEW},{fix}")


@pytest.fixture(scope="module")
def uneven() -> Plan:
    """EP 4 and no pipeline on 72 devices of one rack and 60 of another, which a cluster would allocate as twice 66."""
    return plan(on_two_racks(72, 60, "tp=1,pp=1,ep=4"), left=Left((72, 60)), top=1)


def test_a_plan_says_how_its_devices_lie(uneven: Plan) -> None:
    assert (uneven.problem.per_supernode, uneven.problem.allocated_sizes) == (72, (4, 72, 132))
    assert uneven.devices_left is not None
    assert uneven.devices_left.options[0].words == "132 as 72 in one supernode, 60 in another"
    evenly = plan(on_two_racks(72, 60, "tp=1,pp=1,ep=4"), top=1, spread=False)
    assert evenly.plan.step_time_s > uneven.plan.step_time_s  # EP 4 straddles racks of 66
    assert "per_supernode" not in json.loads(evenly.to_json())["problem"]


def test_a_plan_is_priced_again_as_it_lies(uneven: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(uneven.to_json(), encoding="utf-8")
    assert main(["evaluate", *MIXTURE, "--devices", "132", "--layout", str(file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plan"]["step_time_s"] == pytest.approx(uneven.plan.step_time_s, rel=1e-12)
    assert again["problem"]["per_supernode"] == 72


def test_another_machine_is_not_taken_for_the_plan_s(uneven: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Racks of 36 that are otherwise those of the plan: its layout is priced on them, not on the plan's own racks of 72."""
    (file, machine), racks = (tmp_path / "plan.json", tmp_path / "racks.json"), uneven.problem.cluster.model_dump(mode="json")
    file.write_text(uneven.to_json(), encoding="utf-8")
    level = next(level for level in racks["levels"] if level["name"] == racks["supernode"])
    level["size"] = 36
    machine.write_text(json.dumps(racks), encoding="utf-8")
    asked = ["qwen3-30b-a3b", "--cluster", str(machine), *MIXTURE[3:], "--devices", "132"]
    assert main(["evaluate", *asked, "--layout", str(file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["problem"]
    assert next(each["size"] for each in again["cluster"]["levels"] if each["name"] == level["name"]) == 36
    assert again.get("per_supernode") is None


@pytest.mark.parametrize(
    ("cluster", "devices", "lies"),
    [
        ("gb200-nvl72", 140, "as planned: 132 as 72 in one supernode, 60 in another"),
        ("gb200-nvl72", 130, "as planned: 130 as 72 in one supernode, 58 in another"),
        ("hgx-h100", 132, "as allocated, not as planned: 132 as 8 in each of 16 supernodes, 4 in another"),
    ],
)
def test_a_plan_lies_as_it_did_on_other_counts_too(
    uneven: Plan, cluster: str, devices: int, lies: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 of its devices: what it does not use is idle, and is counted over the devices that are asked for."""
    layout = uneven.plan.layout.model_copy(update={"dp": 128, "edp": 32, "num_microbatches": 2})
    file = tmp_path / "plan.json"
    file.write_text(uneven.model_copy(update={"plan": uneven.plan.model_copy(update={"layout": layout})}).to_json(), "utf-8")
    workload = ["--cluster", cluster, "--devices", str(devices), "--global-batch", "256", "--seq-len", "4096"]
    main(["evaluate", MIXTURE[0], *workload, "--layout", str(file)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"the layout lies {lies}" in said
    assert f"{devices - 128} of {devices} devices stay idle" in said


def test_what_runs_now_lies_as_it_did(uneven: Plan) -> None:
    """A running job on 72 and 60, beside a plan on twice 66 that the scheduler grants, and where no more is free."""
    problem = on_two_racks(66, 66, "tp=1,pp=1,ep=4").model_copy(update={"per_supernode": 66})
    granted, left = plan(problem, top=1), plan(problem, left=Left((66, 66)), top=1)
    found = switch(granted.problem, granted, uneven.plan.layout, share=72)
    assert found.lies == "What runs now lies as it did: 132 as 72 in one supernode, 60 in another."
    assert found.current is not None and found.current.step_time_s == pytest.approx(uneven.plan.step_time_s, rel=1e-9)
    told = switch(left.problem, left, uneven.plan.layout, share=72)
    assert told.lies.startswith("What runs now had 72 in each supernode, which does not fit; priced as")


def test_a_plan_is_judged_as_it_lies(uneven: Plan, tmp_path: Path) -> None:
    """Of uneven shares as of any: EP 4 keeps inside 72 and 60, and so does what the check prices."""
    file = tmp_path / "plan.json"
    file.write_text(uneven.to_json(), encoding="utf-8")
    judged, of_more = check(file, best=False), check(file, devices=134, best=False)
    assert judged.priced is not None and of_more.priced is not None
    assert judged.priced.step_time_s == pytest.approx(uneven.plan.step_time_s, rel=1e-12)
    assert of_more.priced.step_time_s == pytest.approx(uneven.plan.step_time_s, rel=1e-3)
    assert (of_more.idle, of_more.legal) == (2, True)
    assert "the layout lies as planned: 134 as 72 in one supernode, 62 in another" in of_more.assumptions


def test_ranks_pictures_and_files_show_the_racks_as_they_are_filled(uneven: Plan) -> None:
    problem, layout = uneven.problem, uneven.plan.layout
    columns = placement(layout, problem.cluster, sizes=problem.allocated_sizes)
    assert np.bincount(columns["supernode"]).tolist() == topology(problem, uneven.plan).devices.tolist() == [72, 60]
    hosts = seats(layout, problem.cluster, sizes=problem.allocated_sizes).hosts
    assert [host.supernode for host in hosts] == ["0"] * 18 + ["1"] * 15
    written = job.files(uneven)
    resource = yaml.safe_load(written["job.yaml"])["task"]["resource"]
    assert (resource["supernode"], resource["accelerator_per_node"], resource["accelerators"]) == (2, 72, 132)
    lines = written["hosts.csv"].splitlines()
    assert (lines[18], lines[19]) == ("17,0,68,71,0", "18,1,72,75,0")


def test_servers_that_are_not_full_run_fewer_processes() -> None:
    """70 in each of two racks are 17 servers of 4 and one that runs 2; ranks of the second rack begin a server of their own."""
    uneven = plan(on_two_racks(70, 62, "tp=1,pp=1,ep=2"), left=Left((70, 62)), top=1)
    assert uneven.problem.allocated_sizes == (4, 70, 132)
    columns = placement(uneven.plan.layout, uneven.problem.cluster, sizes=uneven.problem.allocated_sizes)
    assert np.bincount(columns["host"]).tolist() == [4] * 17 + [2] + [4] * 15 + [2]
    assert unit_of(np.array([69, 70, 73, 74]), (4, 70)).tolist() == [17, 18, 18, 19]
    script = next(text for name, text in megatron_lm.files(uneven).items() if name.endswith(".sh"))
    assert 'case "${NODE_RANK}" in 17 | 33) NPROC_PER_NODE=2 ;; *) NPROC_PER_NODE=4 ;; esac' in script


def test_more_than_a_supernode_has_is_refused(uneven: Plan) -> None:
    document: dict[str, Any] = json.loads(uneven.to_json())["problem"]
    with pytest.raises(ValueError, match="per_supernode 73 is more than the 72 devices of a supernode"):
        Problem.model_validate(document | {"per_supernode": 73})


def test_a_device_more_is_never_slower() -> None:
    """Two to four supernodes with anything free, and one device more in one of them.

    Up to the little that a network reaches less for a job that is so much larger, idle devices and all.
    """
    rng = random.Random(5)

    def best_s(free: list[int]) -> float:
        problem = build_problem("llama-3.1-8b", "hgx-h100", sum(free), 48, 4096, fix=f"{FEW},tp=1|2|4,pp=1|2")
        left = Left(tuple(sorted(free, reverse=True)))
        step_s = chosen(problem, load_profile("h100"), left, Deadline.after(None)).options[0].step_time_s
        return np.inf if step_s is None else step_s

    for _ in range(6):
        free = [rng.randint(2, 7) for _ in range(rng.randint(2, 4))]
        place = rng.randrange(len(free))
        more = [*free[:place], free[place] + 1, *free[place + 1 :]]
        assert best_s(more) <= best_s(free) * 1.001, (free, more)


@pytest.mark.parametrize(
    ("cluster", "free", "less"), [("gb200-nvl72", (72, 12), (72, 11)), ("cloudmatrix-384", (768, 384), (768, 383))]
)
def test_a_last_supernode_that_comes_out_even_is_filled_all_the_same(
    cluster: str, free: tuple[int, int], less: tuple[int, int]
) -> None:
    """84 devices on racks of 72 would be allocated as twice 42, 1,152 on supernodes of 768 as twice 576; one less fills."""
    steps = []
    for counts in (free, less):
        problem = build_problem("qwen3-30b-a3b", cluster, sum(counts), 384, 4096, fix=f"{FEW},tp=1,pp=1|3,ep=8|16")
        found = chosen(problem, load_profile(problem.cluster.accelerator.name), Left(counts), Deadline.after(None))
        assert counts != free or found.way.problem.allocated_sizes[problem.cluster.supernode_place] == counts[0]
        steps.append(found.options[0].step_time_s or np.inf)
    assert steps[0] <= steps[1]


def test_a_rack_more_is_never_slower() -> None:
    """72 and 61 in two racks are less than half of all once another rack has 47, and still what is fastest for EP 64."""
    steps = []
    for counts in ((72, 61, 45, 45), (72, 61, 47, 45, 45)):
        problem = build_problem("qwen3-30b-a3b", "gb200-nvl72", sum(counts), 512, 4096, fix=f"{FEW},tp=1,pp=1,ep=64")
        steps.append(chosen(problem, load_profile("gb200"), Left(counts), Deadline.after(None)).options[0].step_time_s or np.inf)
    assert steps[1] <= steps[0] * (1.0 + 1e-6)


def test_a_spare_keeps_the_job_on_its_fastest_spread() -> None:
    """216 devices with none lost lie as 64 in each of three racks, as a plan of them would."""
    _, devices, left = what_is_left("gb200-nvl72", None, "72,72,72", ("1 device",), ())
    assert (devices, left.whole, left.before) == (216, 216, (72, 72, 72))
    problem = build_problem("qwen3-30b-a3b", "gb200-nvl72", 216, 384, 4096, fix=f"{FEW},ep=64,tp=1,pp=1")
    found = plan(problem, left=left, top=1).devices_left
    assert found is not None and found.whole is not None
    whole = plan(problem, left=Left(left.before), top=1)
    assert found.whole.step_time_s == pytest.approx(whole.plan.step_time_s)
    assert found.whole.per_supernode == whole.problem.allocated_sizes[1] == 64
    with pytest.raises(InputError, match="73 devices"):
        what_is_left("gb200-nvl72", None, "73,72", (), ())


def test_a_problem_that_says_how_its_devices_lie_is_planned_so() -> None:
    even = on_two_racks(72, 60, "tp=1,pp=1,ep=4").model_copy(update={"per_supernode": 66})
    found = plan(even, top=1)
    assert (found.problem.per_supernode, found.devices_left) == (66, None)

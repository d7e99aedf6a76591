"""Host files and rank tables: every rank once, supernodes kept together, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.optimizer.cli import main
from paraplan.optimizer.commands.plan_files import plan_json
from paraplan.optimizer.rank_files import Host, host_file, missing, rank_table, read_hosts, seats, unwritten
from paraplan.optimizer.ranks import groups, placement
from paraplan.optimizer.result import Plan
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import catalog_names, load_cluster
from paraplan.search_spaces.layout import Layout

sys.path.insert(0, str(Path(__file__).parent))  # tests are collected without packages; the sample lies beside them
from sample_plan import sample_plan

ASCEND = Layout(tp=8, pp=4, dp=48, ep=32, edp=12, etp=1)  # 1,536 dies: two supernodes of 768


def table_of(cluster: str, layout: Layout, hosts: tuple[Host, ...] | None = None) -> dict[str, Any]:
    machine = load_cluster(cluster)
    text = rank_table(seats(layout, machine, hosts), machine)
    assert text is not None
    found: dict[str, Any] = json.loads(text)
    return found


@given(st.sampled_from(catalog_names("clusters")), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]))
def test_every_rank_has_one_seat(cluster: str, dp: int, tp: int) -> None:
    machine, layout = load_cluster(cluster), Layout(tp=tp, dp=dp, edp=dp * tp)
    columns = placement(layout, machine)
    seat = columns["host"] * layout.devices + columns["device"]
    assert len(np.unique(seat)) == layout.devices
    homes = np.unique(np.stack([columns["host"], columns["supernode"]]), axis=1)
    assert homes.shape[1] == columns["host"].max() + 1  # no server stands in two supernodes
    for found in groups(layout).values():
        assert sorted(rank for group in found for rank in group) == list(range(layout.devices))


def test_rank_table_of_two_supernodes() -> None:
    table = table_of("cloudmatrix-384", ASCEND)
    columns = placement(ASCEND, load_cluster("cloudmatrix-384"))
    assert (table["version"], table["status"], table["server_count"]) == ("1.2", "completed", "96")
    assert [len(pod["server_list"]) for pod in table["super_pod_list"]] == [48, 48]
    order = [int(device["rank_id"]) for server in table["server_list"] for device in server["device"]]
    assert order == list(range(1536))
    assert {tuple(int(d["device_id"]) for d in server["device"]) for server in table["server_list"]} == {tuple(range(16))}
    pod_of = {server["server_id"]: int(pod["super_pod_id"]) for pod in table["super_pod_list"] for server in pod["server_list"]}
    for server in table["server_list"]:
        assert {int(columns["supernode"][int(d["rank_id"])]) for d in server["device"]} == {pod_of[server["server_id"]]}


def test_rank_table_of_servers_without_supernodes() -> None:
    table = table_of("atlas-800t-a2", Layout(tp=8, dp=2, edp=16))
    assert table["version"] == "1.0"
    assert "super_pod_list" not in table
    assert table["server_list"][1]["device"][0] == {"device_id": "0", "rank_id": "8"}


def test_no_rank_table_where_none_is_documented() -> None:
    for name in ("hgx-h100", "atlas-960-superpod"):
        machine = load_cluster(name)
        assert rank_table(seats(Layout(tp=8, edp=8), machine), machine) is None
    assert unwritten(load_cluster("hgx-h100")) is None
    assert "for ascend-960 is not published" in (unwritten(load_cluster("atlas-960-superpod")) or "")
    assert unwritten(load_cluster("atlas-950-superpod")) is None


def test_rank_table_by_network_layer() -> None:
    """Ascend 950: every rank with its cabinet, its supernode and, across two of them, the cluster; the machine knows addresses."""
    layout = Layout(tp=8, pp=2, dp=128, edp=1024)
    table = table_of("atlas-950-superpod", layout)
    assert (table["version"], table["status"], table["rank_count"]) == ("2.0", "completed", 2048)
    ranks = table["rank_list"]
    assert [rank["rank_id"] for rank in ranks] == list(range(2048))
    assert [rank["local_id"] for rank in ranks] == [rank["device_id"] for rank in ranks] == [n % 64 for n in range(2048)]
    layers = [[level["net_instance_id"] for level in rank["level_list"]] for rank in ranks]
    assert len({server for server, _, _ in layers}) == 32
    assert [len({names[1] for names in layers[home : home + 1024]}) for home in (0, 1024)] == [1, 1]
    assert layers[0][1] != layers[1024][1]
    assert {names[2] for names in layers} == {"cluster"}
    kinds = {tuple((level["net_layer"], level["net_type"]) for level in rank["level_list"]) for rank in ranks}
    assert kinds == {((0, "TOPO_FILE_DESC"), (1, "CLOS"), (2, "CLOS"))}
    assert all(level["rank_addr_list"] == [] for level in ranks[5]["level_list"])
    machine = load_cluster("atlas-950-superpod")
    assert missing(seats(layout, machine), machine) == ("rank_addr_list",)
    alone = table_of("atlas-950-superpod", Layout(tp=8, dp=8, edp=64))
    assert [level["net_layer"] for level in alone["rank_list"][0]["level_list"]] == [0, 1]


def test_hosts_are_sorted_into_supernodes() -> None:
    """Given pod by pod and server by server in turns, with one to spare."""
    lines = [
        f"10.0.{pod}.{server} pod{pod} {','.join(f'10.{pod}.{server}.{d}' for d in range(16))}"
        for server in range(49)
        for pod in (7, 3)
    ]
    machine = load_cluster("cloudmatrix-384")
    seated = seats(ASCEND, machine, read_hosts("# servers\n" + "\n".join(lines), "hosts"))
    assert [host.supernode for host in seated.hosts] == ["pod7"] * 48 + ["pod3"] * 48
    assert [host.address for host in seated.spare] == ["10.0.7.48", "10.0.3.48"]
    table = json.loads(rank_table(seated, machine) or "")
    assert table["server_list"][48]["device"][2] == {"device_id": "2", "device_ip": "10.3.0.2", "rank_id": "770"}
    assert [pod["super_pod_id"] for pod in table["super_pod_list"]] == ["pod7", "pod3"]
    assert missing(seated, machine) == ("super_device_id",)
    names = [line for line in host_file(seated).splitlines() if not line.startswith("#")]
    assert names[0] == "10.0.7.0 slots=16"
    assert len(names) == 96


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a", "line 1 has 1 fields; write ADDRESS SUPERNODE"),
        ("a p\nb p\na q", "a is listed twice"),
        ("# nothing\n", "names no server"),
        (
            "\n".join(f"h{i} p{i % 4}" for i in range(96)),
            "takes 48 servers, and of the supernodes that are left the largest has 24",
        ),
        ("\n".join(f"h{i} p{i % 2} 1.1.1.1" for i in range(96)), "h0 lists 1 device addresses, and the job runs 16 ranks"),
    ],
)
def test_hosts_that_do_not_serve_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        seats(ASCEND, load_cluster("cloudmatrix-384"), read_hosts(text, "hosts"))


def test_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = sample_plan()
    problem = plan.problem.model_copy(update={"cluster": load_cluster("cloudmatrix-384")})
    (tmp_path / "plan.json").write_text(plan.model_copy(update={"problem": problem}).to_json(), encoding="utf-8")
    assert main(["ranks", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert [Path(line).name for line in out.split()] == ["hostfile", "rank_table.json"]
    assert "leaves out device_ip: --hosts" in err
    assert "leaves out super_device_id: --hosts" in err
    assert len(json.loads((tmp_path / "out" / "rank_table.json").read_text(encoding="utf-8"))["super_pod_list"]) == 3
    assert main(["ranks", str(tmp_path / "plan.json"), "--json"]) == 0
    servers = json.loads(capsys.readouterr().out)["servers"]
    assert [rank for server in servers for rank in server["ranks"]] == list(range(plan.plan.layout.devices))
    assert len({server["supernode"] for server in servers}) == 3


def test_every_command_reads_what_evaluate_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layout goes where a plan goes; a report of a search there was none is refused, and so is a layout that breaks rules."""
    told, out = tmp_path / "told.json", tmp_path / "out"
    job = ["evaluate", "llama-3.1-8b", "--cluster", "hgx-h100", "--devices", "16", "--global-batch", "16", "--seq-len", "4096"]
    assert main([*job, "--layout", "tp=4,pp=2,vpp=1", "--json"]) == 0
    told.write_text(capsys.readouterr().out, encoding="utf-8")
    for asked in (
        ["ranks", str(told), "-o", str(out)],
        ["export", str(told), "--to", "megatron-lm", "-o", str(out)],
        ["export", str(told), "--to", "groups", "-o", str(out)],
        ["topology", str(told), "-o", str(tmp_path / "t.svg")],
        ["timeline", str(told), "-o", str(tmp_path / "t.json")],
        ["compare-layouts", str(told), "--layout", "tp=2,pp=2"],
    ):
        assert main(asked) == 0, (asked, capsys.readouterr().err)
    hosts = [line.split()[0] for line in (out / "hostfile").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(hosts) == 2
    assert "--pipeline-model-parallel-size 2" in (out / "megatron-lm.sh").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(told), "-o", str(tmp_path / "t.html")]) == 2
    assert "nothing that a search found to report" in capsys.readouterr().err
    assert main([*job, "--layout", "tp=4,pp=2,vpp=1,ep=2", "--json"]) == 1
    told.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["ranks", str(told), "-o", str(out)]) == 2
    assert "is not legal" in capsys.readouterr().err


def test_plan_json_says_where_every_rank_sits() -> None:
    plan = sample_plan()
    written = Plan.model_validate_json(plan_json(plan))
    columns = placement(plan.plan.layout, plan.problem.cluster)
    assert written.ranks is not None
    assert list(written.ranks) == ["tp", "cp", "pp", "dp", "ep", "etp", "edp", "host", "device", "supernode"]
    for name, column in written.ranks.items():
        assert column == columns[name].tolist()
    assert written.groups == groups(plan.plan.layout)


def test_a_plan_that_is_written_says_what_it_has_no_rank_table_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Atlas 960: its form is not published, so none is made up; the host file is there."""
    job = [
        "plan",
        "llama-3.1-8b",
        "--cluster",
        "atlas-960-superpod",
        "--devices",
        "16",
        "--global-batch",
        "16",
        "--seq-len",
        "4096",
    ]
    assert main([*job, "--fix", "tp=4,pp=1,cp=1,vpp=1,micro_batch=1,recompute=full", "--out", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    assert "no rank_table.json: HCCL's form of it for ascend-960 is not published" in err
    assert not (tmp_path / "out" / "rank_table.json").exists()
    assert (tmp_path / "out" / "hostfile").exists()

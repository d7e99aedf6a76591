"""Rank lists that somebody else wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from paraplan.optimizer.checking.group_check import check_groups, read_groups
from paraplan.optimizer.cli import main
from paraplan.optimizer.ranks import groups
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import load_cluster
from paraplan.search_spaces.layout import Layout

SIZES = {"tp": 8, "pp": 16, "dp": 4}


def copied() -> dict[str, list[list[int]]]:
    """What a widely copied snippet builds for TP 8 · PP 16 · DP 4."""
    return {
        "tp": [list(range(start, start + 8)) for start in range(0, 512, 8)],
        "pp": [list(range(16 * i, 16 * i + 32)) for i in range(16)],
        "dp": [list(range(start, start + 128)) for start in range(0, 512, 128)],
    }


def test_a_snippet_that_is_widely_copied() -> None:
    found = check_groups(copied(), SIZES)
    assert not found.ok and found.devices == 512
    tp, pp, dp = sorted(found.dimensions, key=lambda each: ("tp", "pp", "dp").index(each.dimension))
    assert (tp.groups, tp.sizes, tp.broken) == (64, {8: 64}, ())
    assert (pp.groups, pp.sizes, pp.touched, pp.missing) == (16, {32: 16}, 272, 240)
    assert (pp.expected_groups, pp.expected_size, pp.expected_stride) == (32, 16, 32)
    assert (dp.groups, dp.sizes) == (4, {128: 4})
    assert (dp.expected_groups, dp.expected_size, dp.expected_stride) == (128, 4, 8)
    assert "32 groups of 16, ranks 32 apart" in " ".join(pp.broken)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8, pp=16, dp=4, edp=32, num_microbatches=1),
        Layout(tp=4, cp=2, pp=2, dp=4, ep=8, edp=4, num_microbatches=1),
        Layout(tp=2, pp=3, dp=12, ep=4, etp=2, edp=3, num_microbatches=1),
    ],
)
def test_our_own_groups_are_right(layout: Layout) -> None:
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp", "edp")}
    found = check_groups(groups(layout), sizes)
    assert found.ok, found.broken
    strides = {each.dimension: each.expected_stride for each in found.dimensions if each.expected_stride}
    for name, stride in strides.items():
        first = groups(layout)[name][0]
        assert len(first) == 1 or first[1] - first[0] == stride


GRID = Layout(tp=2, cp=2, pp=4, dp=4, ep=4, etp=1, edp=4, num_microbatches=1)


@pytest.mark.parametrize(
    ("dimension", "first", "second"),
    [
        ("dp", 0, 63),  # another stage
        ("dp", 0, 17),  # another stage and TP rank
        ("dp", 0, 1),  # another TP rank of the same stage
        ("tp", 0, 16),  # another stage
        ("cp", 0, 5),
        ("pp", 0, 21),
        ("ep", 0, 20),  # another stage
        ("ep", 0, 5),  # another expert rank of the same stage
        ("edp", 0, 17),
    ],
)
def test_ranks_that_change_places(dimension: str, first: int, second: int) -> None:
    """Sizes and counts stay right, but the groups are no longer those of one grid."""
    sizes = {name: getattr(GRID, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp", "edp")}
    lists = {name: [list(group) for group in found] for name, found in groups(GRID).items()}
    assert check_groups(lists, sizes).ok
    swap = {first: second, second: first}
    lists[dimension] = [[swap.get(rank, rank) for rank in group] for group in lists[dimension]]
    found = check_groups(lists, sizes)
    assert not found.ok
    assert all(not each.broken for each in found.dimensions)
    assert any(dimension in sentence for sentence in found.broken)


def test_a_grid_in_any_order_of_ranks_is_right() -> None:
    """Renumbering all ranks alike leaves a grid a grid."""
    order = np.random.default_rng(1).permutation(64)
    lists = {name: [[int(order[rank]) for rank in group] for group in found] for name, found in groups(GRID).items()}
    assert check_groups(lists, {"tp": 2, "cp": 2, "pp": 4, "dp": 4}).ok


def test_a_dimension_without_groups_is_said_to_have_none() -> None:
    (tp,) = check_groups({"tp": []}, {"tp": 8, "dp": 64}, devices=512).dimensions
    assert tp.broken[0] == "tp: no groups; it should be 64 groups of 8."


def test_one_group_that_leaves_a_supernode() -> None:
    found = check_groups({"tp": [list(range(64))]}, cluster=load_cluster("hgx-h100"))
    assert any("1 group of 1 leaves its server of 8 devices" in said for said in found.dimensions[0].broken)


def test_groups_that_leave_a_supernode() -> None:
    lists = {"tp": [list(range(start, start + 16)) for start in range(0, 64, 16)]}
    found = check_groups(lists, cluster=load_cluster("hgx-h100"))
    assert "4 groups of 4 leave their server of 8 devices" in " ".join(found.dimensions[0].broken)
    assert check_groups(lists, cluster=load_cluster("gb200-nvl72")).ok


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ({"tp": [[0, 1], [2]]}, "differ in size"),
        ({"tp": [[0, 1], [1, 2]]}, "more than one group"),
        ({"tp": [[0, 0], [1, 2]]}, "twice in one"),
        ({"tp": [[0, 1], [3, 4]]}, "in no group (2)"),
        ({"tp": [[0, 1], [2, 3]], "pp": [[0, 1], [2, 3]], "dp": [[0], [1], [2], [3]]}, "share 2 ranks"),
    ],
)
def test_faults(lists: dict[str, list[list[int]]], said: str) -> None:
    found = check_groups(lists)
    assert not found.ok
    assert said in " ".join((*found.broken, *(sentence for each in found.dimensions for sentence in each.broken)))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "",
        '{"tp": 3}',
        '{"tp": [3]}',
        '{"tp": [["x"]]}',
        '{"tp": [[-1]]}',
        '{"tp": [[true]]}',
        '{"tp": [[1e9]]}',
        '{"tp": [[0]], "tensor": [[0]]}',
    ],
)
def test_files_that_hold_no_groups(text: str) -> None:
    with pytest.raises(InputError):
        read_groups(text, "groups.json")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"world_size": 512, "groups": copied()}))
    assert main(["check", "tp=8,pp=16,dp=4", "--groups", str(path)]) == 1
    assert "272" in capsys.readouterr().out
    assert main(["check", "tp=8,pp=16,dp=4", "--groups", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"] == 512
    assert main(["check", "--groups", str(tmp_path / "none.json")]) == 2

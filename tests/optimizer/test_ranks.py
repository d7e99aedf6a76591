"""Process groups against a brute-force reading of Megatron's order strings, against known groups, and against Megatron itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paraplan.optimizer.ranks import coordinates, groups, placement
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import load_cluster
from paraplan.search_spaces.layout import RANK_ORDERS, Layout

BIG = Layout(tp=8, cp=2, pp=16, dp=16, ep=64, etp=1, edp=4)


def layouts() -> st.SearchStrategy[Layout]:
    small = st.sampled_from([1, 2, 3, 4])

    def build(tp: int, cp: int, pp: int, dp: int, pick: int) -> Layout:
        width = tp * cp * dp
        pairs = [(ep, etp) for ep in range(1, width + 1) for etp in range(1, width + 1) if width % (ep * etp) == 0]
        ep, etp = pairs[pick % len(pairs)]
        return Layout(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp, edp=width // (ep * etp))

    return st.builds(build, small, small, small, small, st.integers(0, 999))


def oracle(sizes: dict[str, int], order: str, dimension: str) -> list[list[int]]:
    """Groups by counting: the rank of an index tuple is read digit by digit, the leftmost name turning fastest."""
    names = order.split("-")
    found: dict[tuple[int, ...], list[int]] = {}
    for index in product(*(range(sizes[name]) for name in names)):
        rank, stride = 0, 1
        for name, digit in zip(names, index, strict=True):
            rank += digit * stride
            stride *= sizes[name]
        rest = tuple(digit for name, digit in zip(names, index, strict=True) if name != dimension)
        found.setdefault(rest, []).append(rank)
    return sorted(sorted(group) for group in found.values())


def orders_of(order: str) -> tuple[str, str]:
    """The dense and the expert reading of a Megatron order: the expert grid has no cp, and ep where the dense one has none."""
    names = order.split("-")
    called = {"tp": "etp", "dp": "edp"}
    return "-".join(n for n in names if n != "ep"), "-".join(called.get(n, n) for n in names if n != "cp")


@given(layouts(), st.sampled_from(RANK_ORDERS))
def test_groups_match_an_independent_count(layout: Layout, order: str) -> None:
    """In all 120 orders; refused is what megatron-core asserts against: grids of other pipelines, or pp not last and edp not dp."""
    dense, expert = orders_of(order)
    sizes = layout.model_dump()
    pipelines = oracle(sizes, dense, "pp")
    if layout.ep * layout.etp == 1:
        pass  # nothing but copies, whatever the order: see the test of a dense model
    elif layout.pp > 1 and (pipelines != oracle(sizes, expert, "pp") or (not order.endswith("pp") and layout.edp != layout.dp)):
        with pytest.raises(InputError, match="pipelines"):
            groups(layout, order)
        return
    found = groups(layout, order)
    for name in ("tp", "cp", "pp", "dp"):
        assert sorted(found[name]) == oracle(sizes, dense, name)
    if layout.ep * layout.etp > 1:
        for name in ("ep", "etp", "edp", "pp"):
            assert sorted(found[name]) == oracle(sizes, expert, name)


def test_known_groups_of_4096_ranks() -> None:
    found = groups(BIG)
    assert found["tp"][0] == list(range(8))
    assert found["cp"][0] == [0, 8]
    assert found["dp"][0] == [16 * i for i in range(16)]
    assert found["pp"][0] == [256 * i for i in range(16)]
    assert found["ep"][0] == list(range(64))
    assert found["edp"][0] == [0, 64, 128, 192]
    assert found["etp"][0] == [0]


def test_experts_split_by_tensor_parallelism_stride_over_it() -> None:
    layout = Layout(tp=2, cp=1, pp=1, dp=16, ep=8, etp=2, edp=2)
    assert groups(layout)["ep"][0] == [0, 2, 4, 6, 8, 10, 12, 14]


@given(layouts())
def test_every_rank_is_in_one_group_of_each_dimension(layout: Layout) -> None:
    for name, found in groups(layout).items():
        assert sorted(rank for group in found for rank in group) == list(range(layout.devices))
        assert {len(group) for group in found} == {getattr(layout, name)}


@given(layouts())
def test_coordinates_are_positions_in_groups(layout: Layout) -> None:
    table = coordinates(layout)
    assert table["rank"].tolist() == list(range(layout.devices))
    for name, found in groups(layout).items():
        for group in found:
            assert table[name][group].tolist() == list(range(len(group)))


def test_dense_model_with_pipelines_inside_replicas() -> None:
    """Without experts the copies of a stage are all its ranks, wherever the order puts them."""
    layout = Layout(tp=2, cp=1, pp=2, dp=2, edp=4, rank_order="tp-cp-ep-pp-dp")
    found = groups(layout)
    assert found["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found["edp"] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_grids_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match=r"tp·cp·pp·dp is 8 devices but etp·ep·edp·pp is 16"):
        groups(Layout(tp=2, dp=4, ep=8, edp=2))
    with pytest.raises(InputError, match="needs edp = dp"):
        groups(Layout(tp=2, pp=2, dp=4, ep=8, edp=1), "tp-cp-ep-pp-dp")
    with pytest.raises(InputError, match="puts stages 1 ranks apart in the dense grid and 2 in that of experts"):
        groups(Layout(cp=2, pp=2, dp=2, etp=2, edp=2), "tp-pp-dp-cp-ep")
    with pytest.raises(InputError, match="once each"):
        groups(BIG, "dp-tp-pp")


def test_placement_on_supernodes_that_are_not_filled() -> None:
    """256 devices on racks of 72 are 4 racks of 64, with servers of 4."""
    cluster = load_cluster("gb200-nvl72")
    layout = Layout(tp=4, pp=4, dp=16, edp=64)
    table = placement(layout, cluster)
    assert np.bincount(table["host"]).tolist() == [4] * 64
    assert np.bincount(table["supernode"]).tolist() == [64] * 4


def test_groups_match_megatron_core() -> None:
    state: Any = pytest.importorskip(
        "megatron.core.parallel_state", reason="megatron-core is not installed (paraplan[export-proof])"
    )
    dense = state.RankGenerator(tp=8, ep=1, dp=16, pp=16, cp=2, order="tp-cp-ep-dp-pp")
    expert = state.RankGenerator(tp=1, ep=64, dp=4, pp=16, cp=1, order="tp-cp-ep-dp-pp")
    found = groups(BIG)
    for name in ("tp", "cp", "pp", "dp"):
        assert found[name] == dense.get_ranks(name)
    assert found["ep"] == expert.get_ranks("ep")
    assert found["edp"] == expert.get_ranks("dp")

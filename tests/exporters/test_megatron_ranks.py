"""Process groups of random layouts in all orders against those that megatron-core itself draws up, rank by rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from paraplan.optimizer.ranks import coordinates, groups
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.layout import FLAG_RANK_ORDERS, RANK_ORDERS, Layout

LAYOUTS = 100
OF_EACH_ORDER = 30
MOST_RANKS = 4096
EXPERT_NAMES = {"ep": "ep", "etp": "tp", "edp": "dp", "pp": "pp"}
"""Dimensions of the expert grid, and what megatron-core calls them in the generator of that grid."""


@pytest.fixture(scope="module")
def generator() -> Any:
    state: Any = pytest.importorskip(
        "megatron.core.parallel_state", reason="megatron-core is not installed (paraplan[export-proof])"
    )
    return state.RankGenerator


def random_layouts(seed: int, order: str) -> Iterator[Layout]:
    """Layouts of every size up to MOST_RANKS, thirds and fifths among their degrees; edp is dp where the order asks for it."""
    draw = random.Random(seed)
    while True:
        tp, cp, pp, dp = (
            draw.choice(sizes) for sizes in ((1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 3, 5, 8, 16), (1, 2, 3, 4, 6, 16, 64))
        )
        width = tp * cp * dp
        etp = draw.choice([size for size in (1, 2, tp) if tp % size == 0])
        ep = (
            width // (etp * dp)
            if order != RANK_ORDERS[0]
            else draw.choice([n for n in range(1, width // etp + 1) if width // etp % n == 0])
        )
        layout = Layout(tp=tp, cp=cp, pp=pp, dp=dp, etp=etp, ep=ep, edp=width // (etp * ep), rank_order=order)
        if layout.devices <= MOST_RANKS and layout.etp * layout.ep * layout.edp * pp == layout.devices:
            yield layout


@pytest.mark.parametrize("order", FLAG_RANK_ORDERS)
def test_groups_are_megatron_cores_own(generator: Any, order: str) -> None:
    largest = 0
    for _, layout in zip(range(LAYOUTS), random_layouts(7, order), strict=False):
        dense = generator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
        expert = generator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
        found = groups(layout)
        for name in ("tp", "cp", "pp", "dp"):
            assert found[name] == dense.get_ranks(name), (layout, name)
        for name, theirs in EXPERT_NAMES.items():
            assert sorted(found[name]) == sorted(expert.get_ranks(theirs)), (layout, name)
        table = coordinates(layout)
        for name, their_groups in (("tp", dense.get_ranks("tp")), ("dp", dense.get_ranks("dp")), ("ep", expert.get_ranks("ep"))):
            assert all(table[name][group].tolist() == list(range(len(group))) for group in their_groups), (layout, name)
        largest = max(largest, layout.devices)
    assert largest > MOST_RANKS // 2  # large jobs were among them


@pytest.mark.parametrize("order", RANK_ORDERS[len(FLAG_RANK_ORDERS) :])
def test_orders_of_the_python_api_are_megatron_cores_own(generator: Any, order: str) -> None:
    """Whatever pp stands before: groups are theirs, or they assert that grids disagree and we refuse."""
    accepted = 0
    for _, layout in zip(range(OF_EACH_ORDER), orders_layouts(order), strict=False):
        dense = generator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
        expert = generator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
        agree = order.endswith("pp") or layout.pp == 1 or layout.edp == layout.dp  # initialize_model_parallel's two assertions
        if not agree or dense.get_ranks("pp") != expert.get_ranks("pp"):
            with pytest.raises(InputError, match="pipelines"):
                groups(layout)
            continue
        accepted += 1
        found = groups(layout)
        for name in ("tp", "cp", "pp", "dp"):
            assert found[name] == dense.get_ranks(name), (layout, name)
        for name, theirs in EXPERT_NAMES.items():
            assert sorted(found[name]) == sorted(expert.get_ranks(theirs)), (layout, name)
    assert accepted


def orders_layouts(order: str) -> Iterator[Layout]:
    """Small layouts with experts, of every kind that an order may or may not take: every other one has edp = dp and etp = tp."""
    draw = random.Random(order)
    while True:
        tp, cp, pp, dp = (draw.choice(sizes) for sizes in ((1, 2, 4), (1, 1, 2, 3), (2, 3, 4), (2, 3, 4, 6)))
        yield Layout(tp=tp, cp=cp, pp=pp, dp=dp, etp=tp, ep=max(cp, 1), edp=dp, rank_order=order)
        width = tp * cp * dp
        etp = draw.choice([size for size in (1, 2, tp) if tp % size == 0])
        ep = draw.choice([n for n in range(2, width // etp + 1) if width // etp % n == 0] or [1])
        if ep > 1:
            yield Layout(tp=tp, cp=cp, pp=pp, dp=dp, etp=etp, ep=ep, edp=width // (etp * ep), rank_order=order)

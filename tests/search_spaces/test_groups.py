"""Where groups sit on the units of a level, against the ranks of every group counted one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from paraplan.search_spaces.groups import DIMENSIONS, Groups, groups, untiled
from paraplan.search_spaces.inputs import load_cluster
from paraplan.search_spaces.layout import FLAG_RANK_ORDERS, RANK_ORDERS, Layout, LayoutTable

UNITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 64, 72, 88, 384, 768)


def random_layout(rng: random.Random, data: tuple[int, ...] = (1, 2, 3, 4, 5, 8)) -> Layout:
    """Degrees that divide nothing in particular, in any order; where pp is not last the two grids agree, as rule C004a asks."""
    while True:
        tp, cp, pp, dp = (rng.choice(choice) for choice in ((1, 2, 3, 4, 8), (1, 2, 3, 5), (1, 2, 3, 4, 7), data))
        order = rng.choice((*FLAG_RANK_ORDERS, *RANK_ORDERS))
        tied = not order.endswith("pp") and pp > 1
        whole = tp * cp if tied else tp * cp * dp
        ep = rng.choice([d for d in range(1, whole + 1) if whole % d == 0])
        etp = whole // ep if tied else rng.choice([d for d in range(1, whole // ep + 1) if whole // ep % d == 0])
        edp = tp * cp * dp // (ep * etp)
        layout = Layout(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, etp=etp, edp=edp, rank_order=order, sequence_parallel=False)
        if not tied or ranks_of(layout, "pp") == ranks_of(layout, "pp", experts=True):
            return layout


def ranks_of(layout: Layout, dimension: str, experts: bool = False) -> list[list[int]]:
    """Every group of a dimension as its ranks, from Megatron's definition: the leftmost name of the order varies fastest.

    `experts`: pipelines as the grid of experts has them.
    """
    experts |= dimension in ("etp", "ep", "edp")
    called = {"tp": "etp", "dp": "edp"} if experts else {}
    names = [called.get(name, name) for name in layout.rank_order.split("-") if name != ("cp" if experts else "ep")]
    shape = [getattr(layout, name) for name in reversed(names)]
    ranks = np.arange(np.prod(shape)).reshape(shape)
    axis = len(names) - 1 - names.index(dimension)
    return np.moveaxis(ranks, axis, -1).reshape(-1, getattr(layout, dimension)).tolist()  # type: ignore[no-any-return]


def test_size_and_stride_are_those_of_the_ranks() -> None:
    rng = random.Random(1)
    for _ in range(300):
        layout = random_layout(rng)
        table = LayoutTable.from_layouts([layout])
        for dimension in DIMENSIONS:
            found, ranks = groups(table, dimension), ranks_of(layout, dimension)
            assert int(found.size[0]) == len(ranks[0])
            if len(ranks[0]) > 1:
                assert {b - a for group in ranks for a, b in pairwise(group)} == {int(found.stride[0])}


def held(ranks: list[list[int]], unit: int) -> list[Counter[int]]:
    """For every group, how many of its ranks lie in each unit that it touches."""
    return [Counter(rank // unit for rank in group) for group in ranks]


@pytest.mark.parametrize("seed", range(4))
def test_worst_groups_and_means_are_those_counted_rank_by_rank(seed: int) -> None:
    """300 frames in many orders, every dimension, fifteen sizes of a unit: nothing is off anywhere."""
    rng = random.Random(seed)
    for _ in range(75):
        layout = random_layout(rng)
        table = LayoutTable.from_layouts([layout])
        for dimension in DIMENSIONS:
            found, ranks = groups(table, dimension), ranks_of(layout, dimension)
            for unit in rng.sample(UNITS, 3):
                counted, case = held(ranks, unit), (layout, dimension, unit)
                assert found.units(unit, layout.devices)[0] == max(len(each) for each in counted), case
                assert found.least(unit, layout.devices)[0] == min(min(each.values()) for each in counted), case
                mean = found.placement(unit, table.devices)
                assert mean.units[0] == pytest.approx(np.mean([len(each) for each in counted])), case
                mates = sum(n * n for each in counted for n in each.values()) / layout.devices
                assert mean.mates[0] == pytest.approx(mates), case
                assert mean.straddling[0] == pytest.approx(np.mean([len(each) > 1 for each in counted])), case


@pytest.mark.parametrize(
    ("cluster", "devices", "share", "lying"),
    [
        ("gb200-nvl72", 276, 72, (72, 72, 72, 60)),
        ("gb200-nvl72", 276, 69, (69, 69, 69, 69)),  # servers of 4: each rack's last has one device of them
        ("gb200-nvl72", 240, 70, (70, 70, 70, 30)),
        ("cloudmatrix-384", 360, 125, (125, 125, 110)),  # packages of 2 in servers of 16, the last of both part empty
    ],
)
def test_groups_on_uneven_supernodes_are_those_counted_rank_by_rank(
    cluster: str, devices: int, share: int, lying: tuple[int, ...]
) -> None:
    """Every group's ranks on units that are dealt out one after the other, in each supernode anew."""
    spec, rng = load_cluster(cluster), random.Random(devices)
    sizes = spec.allocated_sizes(devices, share)
    assert sum(lying) == devices == sizes[-1]
    data = tuple(each for each in range(2, devices) if devices % each == 0)
    drawn = (random_layout(rng, data) for _ in range(2000))
    for layout in islice((each for each in drawn if each.devices == devices), 10):
        table = LayoutTable.from_layouts([layout])
        for level, around in enumerate(untiled(sizes)):
            unit = [(home, place // sizes[level]) for home, held in enumerate(lying) for place in range(held)]
            for dimension in DIMENSIONS:
                found, ranks = groups(table, dimension), ranks_of(layout, dimension)
                counted, case = [Counter(unit[rank] for rank in group) for group in ranks], (layout, dimension, sizes[level])
                assert found.units(sizes[level], devices, around)[0] == max(len(each) for each in counted), case
                assert found.least(sizes[level], devices, around)[0] == min(min(each.values()) for each in counted), case
                mean = found.placement(sizes[level], table.devices, around)
                assert mean.units[0] == pytest.approx(np.mean([len(each) for each in counted])), case
                assert mean.straddling[0] == pytest.approx(np.mean([len(each) > 1 for each in counted])), case


@pytest.mark.parametrize(
    ("size", "stride", "unit", "devices", "units"),
    [
        (8, 1, 8, 64, 1),  # TP 8 in a server of 8
        (16, 1, 24, 72, 2),  # TP 16 over servers of 24 straddles a boundary
        (72, 1, 72, 144, 1),
        (64, 1, 72, 576, 2),  # 64 of 72 tile no rack
        (36, 2, 72, 144, 1),
        (4, 18, 72, 144, 1),
        (6, 72, 72, 432, 6),  # one rank in every rack
        (384, 1, 768, 15488, 1),
        (15488, 1, 88, 15488, 176),
        (5, 7, 7, 35, 5),
        (3, 1, 1, 12, 3),
        (12, 1, 72, 12, 1),  # the job has no second unit
    ],
)
def test_known_groups(size: int, stride: int, unit: int, devices: int, units: int) -> None:
    assert Groups(np.array([size]), np.array([stride])).units(unit, devices).tolist() == [units]


def test_unknown_dimension() -> None:
    table = LayoutTable.from_layouts([Layout(sequence_parallel=False)])
    with pytest.raises(KeyError):
        groups(table, "vpp")

"""What is left of a cluster: counts per supernode, losses, slow parts, and the counts of devices that can be planned for."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from paraplan.search_spaces.degraded import (
    after_loss,
    check_free,
    device_counts,
    parse_free,
    parse_slow,
    rounded_counts,
    slowed,
    supernode_counts,
)
from paraplan.search_spaces.errors import InputError
from paraplan.search_spaces.inputs import load_cluster


def test_a_job_is_spread_over_supernodes_as_levels_are_allocated() -> None:
    assert supernode_counts(load_cluster("gb200-nvl72"), 256) == (64, 64, 64, 64)
    assert supernode_counts(load_cluster("cloudmatrix-384"), 2048) == (768, 768, 512)
    assert supernode_counts(load_cluster("cloudmatrix-384"), 384) == (384,)


@pytest.mark.parametrize(
    ("cluster", "devices", "lost", "left"),
    [
        ("hgx-h100", 32, "1 device", (8, 8, 8, 7)),
        ("hgx-h100", 32, "2 servers", (8, 8)),
        ("hgx-h100", 32, "9 devices", (8, 8, 7)),
        ("cloudmatrix-384", 1536, "1 server", (768, 752)),
        ("cloudmatrix-384", 1536, "1 supernode", (768,)),
        ("cloudmatrix-384", 1536, "2 dies", (768, 766)),
    ],
)
def test_losses_come_out_of_as_few_supernodes_as_they_can(cluster: str, devices: int, lost: str, left: tuple[int, ...]) -> None:
    spec = load_cluster(cluster)
    assert after_loss(spec, supernode_counts(spec, devices), lost) == left


@pytest.mark.parametrize(
    ("lost", "mentioned"),
    [
        ("one device", "one device"),
        ("5 racks", "rack"),
        ("4 servers", "nothing to plan"),
        ("99 devices", "nothing"),
        ("1 scale-out", "spans"),
    ],
)
def test_losses_that_make_no_sense_are_refused(lost: str, mentioned: str) -> None:
    with pytest.raises(InputError, match=mentioned):
        after_loss(load_cluster("hgx-h100"), (8, 8, 8, 8), lost)


@pytest.mark.parametrize("cluster", ["gb200-nvl72", "cloudmatrix-384", "hgx-h100"])
@pytest.mark.parametrize("shortfall", [(), (1,), (4, 9), (40,)])
def test_every_count_is_spread_as_it_says(cluster: str, shortfall: tuple[int, ...]) -> None:
    """No count asks a supernode for more than it has free."""
    spec = load_cluster(cluster)
    size = next(level.size for level in spec.levels if level.name == spec.supernode) or 0
    free = tuple(sorted((max(size - (shortfall[i] if i < len(shortfall) else 0), 1) for i in range(4)), reverse=True))
    counts = device_counts(spec, free)
    assert counts
    for count, share in counts:
        each = supernode_counts(spec, count, share)
        assert len(each) <= len(free)
        assert all(asked <= there for asked, there in zip(each, free, strict=False)), (count, each)
        assert 2 * count >= sum(free)
    assert counts[0][0] == sum(free) or shortfall == (4, 9)  # whose supernodes differ three times


def test_a_few_devices_of_every_supernode_stay_spread_over_all() -> None:
    """120 devices would lie in two racks of 72; what is free are 40 in each of three."""
    spec = load_cluster("gb200-nvl72")
    assert (device_counts(spec, (40, 40, 40)), rounded_counts(spec, (40, 40, 40))) == (((120, 40),), ((96, 32), (40, None)))


@pytest.mark.parametrize(
    ("cluster", "free", "expected", "rounded"),
    [
        (
            "gb200-nvl72",
            (72, 72, 72, 60),
            [(72, 72, 72, 60), (60,) * 4],
            [(64, 64, 64, 60), (56,) * 4, (48,) * 4, (32,) * 4, (72,)],
        ),
        (
            "gb200-nvl72",
            (72, 72, 72, 59),
            [(72, 72, 72, 59), (59,) * 4],
            [(64, 64, 64, 59), (58,) * 4, (56,) * 4, (48,) * 4, (32,) * 4, (72,)],
        ),
        ("cloudmatrix-384", (768, 384), [(768, 384), (768,), (384, 384)], [(256, 256)]),
        ("cloudmatrix-384", (384, 384), [(384, 384), (384,)], [(256, 256)]),
        ("hgx-h100", (8,) * 63 + (7,), [(8,) * 63 + (7,), (7,) * 64], [(6,) * 64, (4,) * 64, (8,)]),
        ("hgx-h100", (7, 7), [(7, 7), (7,)], [(6, 6), (4, 4)]),
        ("gb200-nvl72", (50, 3, 2, 1), [(50, 3), (50,)], [(48, 3), (32, 3), (3, 3, 2), (2, 2, 2, 1), (1,) * 4]),
        ("atlas-960-superpod", (15_487,), [(15_487,)], []),
    ],
)
def test_a_job_may_lie_as_its_devices_are_free_or_in_shares_that_groups_tile(
    cluster: str, free: tuple[int, ...], expected: list[tuple[int, ...]], rounded: list[tuple[int, ...]]
) -> None:
    spec = load_cluster(cluster)
    assert [supernode_counts(spec, *way) for way in device_counts(spec, free)] == expected
    assert [supernode_counts(spec, *way) for way in rounded_counts(spec, free)] == rounded


def test_a_device_more_leaves_every_group_of_a_power_of_two_as_much_room() -> None:
    """Of supernodes that have at least as many free, shares that such groups tile hold at least as many devices."""
    spec, rng = load_cluster("gb200-nvl72"), random.Random(3)

    def room(free: Iterable[int], tile: int) -> int:
        ordered = sorted(free, reverse=True)
        each = [supernode_counts(spec, *way) for of in (device_counts, rounded_counts) for way in of(spec, ordered)]
        return max((sum(way) for way in each if way[0] % tile == 0 or len(way) == 1), default=0)

    for _ in range(200):
        free = [rng.randint(1, 71) for _ in range(rng.randint(1, 4))]
        place = rng.randrange(len(free) + 1)
        more = [*free[:place], free[place] + 1, *free[place + 1 :]] if place < len(free) else [*free, 1]
        for tile in (1, 2, 4, 8, 16, 32, 64):
            assert room(more, tile) >= room(free, tile), (free, more, tile)


def test_free_devices() -> None:
    assert parse_free("380, 384,384,0") == (384, 384, 380)
    check_free(load_cluster("cloudmatrix-384"), (768, 1))
    with pytest.raises(InputError, match="769"):
        check_free(load_cluster("cloudmatrix-384"), (769,))
    for text in ("", "8;8", "-1", "0", "8.5"):
        with pytest.raises(InputError, match="free"):
            parse_free(text)


def test_slow_parts() -> None:
    cluster = load_cluster("hgx-h100")
    slow = parse_slow(["level=scale-out:0.8", "device:0.9"])
    assert slow == {"scale-out": 0.8, "device": 0.9}
    changed = slowed(cluster, slow)
    assert changed.levels[-1].bandwidth_bytes_per_s.value == pytest.approx(0.8 * cluster.levels[-1].bandwidth_bytes_per_s.value)
    assert changed.levels[0] == cluster.levels[0]
    assert changed.accelerator.peak_flops["bf16"].value == pytest.approx(0.9 * cluster.accelerator.peak_flops["bf16"].value)
    assert slowed(cluster, parse_slow(["level=supernode:0.5"])).levels[0].bandwidth_bytes_per_s.value == 225e9
    for text in ("device", "device:0", "device:1.5", "scale-out:fast", ":0.5"):
        with pytest.raises(InputError, match="slow"):
            parse_slow([text])
    with pytest.raises(InputError, match="rack"):
        slowed(cluster, {"rack": 0.5})

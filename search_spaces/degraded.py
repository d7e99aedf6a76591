"""What of a cluster is left to a job: devices lost or free in uneven numbers, levels and devices that run slow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from .cluster import ClusterSpec, Figure
from .errors import InputError

DEVICE = "device"
TILES = (2, 4, 8, 16, 32, 64, 128, 256)
"""Multiples that a supernode's share is also rounded down to, beside whole servers: groups of powers of two tile them."""
LARGE_TILES = tuple(tile for tile in TILES if tile >= 32)
"""Those that shares are rounded down to where nobody says what each supernode has free."""
LEAST_USED = 0.5
"""Share of the devices below which a count is no way to go on by itself: frames that leave more idle are no candidates either."""
LEAST_FILLED = 2 / 3
"""Share of a supernode that a job uses at least where it lies on more of them than hold it."""


def supernode_counts(cluster: ClusterSpec, devices: int, per_supernode: int | None = None) -> tuple[int, ...]:
    """Devices that a job of `devices` has in each supernode, largest first (`ClusterSpec.allocated_sizes`)."""
    each = cluster.allocated_sizes(devices, per_supernode)[cluster.supernode_place]
    whole, rest = divmod(devices, each)
    return (each,) * whole + ((rest,) if rest else ())


def parse_free(text: str) -> tuple[int, ...]:
    """Devices free in each supernode, "384,384,380", largest first. InputError for what is no count."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and len(part) <= 9 for part in parts) or not any(int(part) for part in parts):
        raise InputError(f"free: {text!r} is not a list of devices in each supernode, such as 384,384,380")
    return tuple(sorted((int(part) for part in parts if int(part)), reverse=True))


def check_free(cluster: ClusterSpec, free: Sequence[int]) -> None:
    """InputError where more devices are said to be free in a supernode than it has."""
    size = _supernode_size(cluster)
    if size is not None and max(free) > size:
        raise InputError(f"free: {max(free)} devices in a supernode of {cluster.name}, which has {size}")


def after_loss(cluster: ClusterSpec, free: Sequence[int], lost: str) -> tuple[int, ...]:
    """What is free once "1 device", "2 servers" or "1 supernode" of it is lost, from as few supernodes as that takes.

    InputError for a word that is no level with a size, or where nothing is left.
    """
    found = re.fullmatch(r"\s*(\d{1,6})\s+([A-Za-z0-9_.-]+?)s?\s*", lost)
    if found is None:
        raise InputError(f"lost: {lost!r} is not a number of devices, servers or supernodes, such as '1 device'")
    count, word = int(found[1]), found[2]
    if not count:
        raise InputError(f"lost: {lost!r} is no loss; name a number from 1 on, or leave lost out")
    if word == "supernode" or word == cluster.supernode:
        left = list(free)[: max(len(free) - count, 0)]
    else:
        gone, left = count * _size_of(cluster, word), list(free)
        while gone and left:
            taken = min(gone, left[-1])
            left[-1] -= taken
            gone -= taken
            left = [each for each in left if each]
        left = [] if gone else left
    if not left:
        where = "one supernode" if len(free) == 1 else f"{len(free):,} supernodes"
        raise InputError(f"lost: {lost!r} of {sum(free):,} devices in {where} leaves nothing to plan for")
    return tuple(sorted(left, reverse=True))


def device_counts(cluster: ClusterSpec, free: Sequence[int]) -> tuple[tuple[int, int | None], ...]:
    """How a job may lie where supernodes have `free` devices each: how many in all, and in each supernode but a last with the rest
    (None: as they are allocated). Most devices come first.

    Every share that some supernode has free, in each of those that have it, and beside them all that the next one has; or one
    supernode alone.
    """
    found = _unrounded(free)
    return _ways(cluster, found, sum(free)) or _ways(cluster, {max(found)}, 0)


def rounded_counts(cluster: ClusterSpec, free: Sequence[int]) -> tuple[tuple[int, int | None], ...]:
    """The same with shares that are rounded down to whole servers or multiples of a power of two, which groups tile.

    Beside them those of less than LEAST_USED, which would be ways to go on without the supernodes that they have no use for.
    """
    shares = {each // tile * tile for each in free for tile in (*_server(cluster), *TILES)} - {0, *free}
    several = {way for way in (_filled(free, share) for share in shares) if way[0] > way[1]}
    few = {way for way in _unrounded(free) if way[0] < LEAST_USED * sum(free)}
    return _ways(cluster, several | few, 0)


def _unrounded(free: Sequence[int]) -> set[tuple[int, int]]:
    """Every share that is free, where it is; and one supernode alone."""
    return {(max(free), max(free)), *(_filled(free, share) for share in free)}


def _filled(free: Sequence[int], share: int) -> tuple[int, int]:
    """Devices in all, and the share: of all supernodes that have it free, and what the next one has."""
    rest = max((each for each in free if each < share), default=0)
    return share * sum(each >= share for each in free) + rest, share


def spreads(cluster: ClusterSpec, devices: int) -> tuple[tuple[int, int | None], ...]:
    """How a job of up to `devices` may lie on supernodes: how many in all, and in each supernode but a last with the rest.

    As they are allocated comes first (None); then all supernodes filled but the last, and shares of a full one or of an even part
    in servers or powers of two, which groups tile: where fewer devices may lie, so may more. No more supernodes are asked for than
    hold all devices, unless that leaves one part empty: then shares of LEAST_FILLED may lie on more. Inside one supernode there is
    but one way.
    """
    own, size = cluster.allocated_sizes(devices)[cluster.supernode_place], _supernode_size(cluster) or devices
    units = -(-devices // own)
    if units == 1:
        return ((devices, None),)
    even = devices % units == 0
    room = (cluster.max_devices or np.inf) / size
    found = set[tuple[int, int]]() if own == size else {(devices, size)}
    tiles = (*_server(cluster), *LARGE_TILES)
    for share in {most // tile * tile for most in (devices // units, size) for tile in tiles} - {0, own}:
        more = not even and share >= LEAST_FILLED * size and devices // share <= room
        found.add((max(min(units * share, devices), devices // share * share if more else 0), share))
    return ((devices, None), *_ways(cluster, found, devices))


def _ways(cluster: ClusterSpec, found: Set[tuple[int, int]], devices: int) -> tuple[tuple[int, int | None], ...]:
    """Those that use enough of all devices, most first; None in place of a share that is what the cluster allocates."""
    enough = sorted((way for way in found if way[0] >= LEAST_USED * devices), reverse=True)
    usual = [cluster.allocated_sizes(count) == cluster.allocated_sizes(count, share) for count, share in enough]
    return tuple((count, None if own else share) for (count, share), own in zip(enough, usual, strict=True))


def _server(cluster: ClusterSpec) -> tuple[int, ...]:
    """Devices of a server, or of what else there is inside a supernode, if anything."""
    place = cluster.supernode_place
    return (cluster.levels[place - 1].size or 1,) if place else ()


def parse_slow(texts: Iterable[str]) -> dict[str, float]:
    """What runs at which share of its rate: "level=scale-out:0.8" and "device:0.9". InputError says what would be right."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, share = text.removeprefix("level=").partition(":")
        try:
            rate = float(share)
        except ValueError:
            rate = -1.0
        if not name.strip() or not 0 < rate <= 1 or (text.startswith("level=") and name == DEVICE):
            raise InputError(f"slow: {text!r} is not level=NAME:F or device:F with F above 0 and at most 1, such as device:0.9")
        found[name.strip()] = rate
    return found


def slowed(cluster: ClusterSpec, slow: Mapping[str, float]) -> ClusterSpec:
    """The cluster with levels at a share of their bandwidth, and every device as slow as the slowest.

    A step waits for that one wherever it stands, so that no layout takes longer than this; in a stage with little to do one
    device may take less.
    """
    changed = cluster
    for name, share in slow.items():
        if name == DEVICE:
            device = changed.accelerator
            rates = {precision: _scaled(rate, share) for precision, rate in device.peak_flops.items()}
            memory = _scaled(device.memory_bandwidth_bytes_per_s, share)
            device = device.model_copy(update={"peak_flops": rates, "memory_bandwidth_bytes_per_s": memory})
            changed = changed.model_copy(update={"accelerator": device})
            continue
        known = _known_level(changed, name, "slow")
        levels = tuple(
            level.model_copy(update={"bandwidth_bytes_per_s": _scaled(level.bandwidth_bytes_per_s, share)})
            if level.name == known
            else level
            for level in changed.levels
        )
        changed = changed.model_copy(update={"levels": levels})
    return changed


def slow_levels(slow: Mapping[str, float]) -> tuple[str, ...]:
    """What is assumed of levels that run slow, in sentences."""
    return tuple(
        f"every link of level {name} carries {100 * share:.0f} % of its bandwidth: groups across it follow the slowest"
        for name, share in slow.items()
        if name != DEVICE
    )


def _scaled(figure: Figure, share: float) -> Figure:
    ends = {name: None if end is None else end * share for name, end in (("low", figure.low), ("high", figure.high))}
    source = f"{share:g} of {figure.value:g}, as was said to be slow: {figure.source}"
    return figure.model_copy(update={"value": figure.value * share, "source": source, **ends})


def _supernode_size(cluster: ClusterSpec) -> int | None:
    return cluster.levels[cluster.supernode_place].size


def _size_of(cluster: ClusterSpec, word: str) -> int:
    if word in (DEVICE, "die", "rank", "gpu", "npu"):
        return 1
    name = _known_level(cluster, word, "lost")
    size = next(level.size for level in cluster.levels if level.name == name)
    if size is None:
        raise InputError(f"lost: {word!r} spans the cluster; name devices or a level with a size")
    return size


def _known_level(cluster: ClusterSpec, word: str, flag: str) -> str:
    try:
        return cluster.level_name(word)
    except KeyError as error:
        raise InputError(f"{flag}: {word!r} is neither device nor a level of {cluster.name}: {cluster.level_words}") from error

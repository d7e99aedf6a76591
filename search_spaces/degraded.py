"""What of a cluster is left to a job: devices lost or free in uneven numbers, levels and devices that run slow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .cluster import ClusterSpec, Figure
from .errors import InputError

DEVICE = "device"
TILES = (32, 64, 128, 256)
"""Multiples that a supernode's share is also rounded down to, beside whole servers: groups of powers of two tile them."""
LEAST_USED = 0.5
"""Share of the free devices below which a count is not tried: frames that leave more idle are no candidates either."""
LEAST_FILLED = 2 / 3
"""Share of a supernode that a job uses at least where it lies on more of them than hold it."""


def supernode_counts(cluster: ClusterSpec, devices: int) -> tuple[int, ...]:
    """Devices that a job of `devices` has in each supernode, largest first."""
    each = cluster.allocated_sizes(devices)[_supernode(cluster)]
    whole, rest = divmod(devices, each)
    return (each,) * whole + ((rest,) if rest else ())


def parse_free(text: str) -> tuple[int, ...]:
    """Devices free in each supernode, "384,384,380", largest first. InputError for what is no count."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and len(part) <= 9 for part in parts) or not any(int(part) for part in parts):
        raise InputError(f"free: {text!r} is not a list of devices in each supernode, such as 384,384,380")
    return tuple(sorted((int(part) for part in parts if int(part)), reverse=True))


def check_free(cluster: ClusterSpec, free: Sequence[int]) -> None:
    """InputError where more devices are said to be free in a supernode than it has."""
    size = cluster.levels[_supernode(cluster)].size
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


def device_counts(cluster: ClusterSpec, free: Sequence[int]) -> tuple[tuple[int, ClusterSpec], ...]:
    """Counts of devices that a job could be planned for where supernodes have `free` devices each, most first.

    Equal shares of the first supernodes, whole or in servers or powers of two; or all devices where only the last supernode has
    fewer. A count stands for how `ClusterSpec.allocated_sizes` spreads it; beside it the cluster that spreads it so: where shares
    are small enough for fewer supernodes, one whose supernodes are no larger than they.
    """
    ordered, place = sorted(free, reverse=True), _supernode(cluster)
    inner = (cluster.levels[place - 1].size if place else 1) or 1
    found = {ordered[0]: cluster}
    if len(set(ordered[:-1])) <= 1 and cluster.allocated_sizes(sum(ordered))[place] == ordered[0]:
        found[sum(ordered)] = cluster
    for units in range(1, len(ordered) + 1):
        most = ordered[units - 1]
        if units < len(ordered) and ordered[units] == most:
            continue
        for share in {most, *(most // tile * tile for tile in (inner, *TILES))} - {0}:
            spread = _spread(cluster, units * share, share)
            if spread is not None:
                found.setdefault(units * share, spread)
    enough = [count for count in found if count >= LEAST_USED * sum(ordered)] or [max(found)]
    return tuple((count, found[count]) for count in sorted(enough, reverse=True))


def spreads(cluster: ClusterSpec, devices: int) -> tuple[tuple[int, ClusterSpec], ...]:
    """Ways in which a job of up to `devices` can lie on supernodes, each with the cluster that spreads it so (`device_counts`).

    All as they are allocated come first; then equal shares in servers or powers of two, which groups tile. No more supernodes
    are asked for than hold all devices, unless that leaves one part empty: then shares of LEAST_FILLED may lie on more. Inside one
    supernode there is but one way.
    """
    place, own = _supernode(cluster), cluster.allocated_sizes(devices)
    units, size = -(-devices // own[place]), cluster.levels[place].size or devices
    even = devices % units == 0
    room = (cluster.max_devices or np.inf) / size
    tiles = (*([cluster.levels[place - 1].size or 1] if place else []), *TILES)
    mosts = {devices // units} if even else {devices // units, own[place]}
    shares = {most // tile * tile for most in mosts for tile in tiles} - {0, own[place]}
    found = [(devices, cluster)]
    for share in sorted(shares, reverse=True) if units > 1 else ():
        more = not even and share >= LEAST_FILLED * size and devices // share <= room
        count = (devices // share if more else min(units, devices // share)) * share
        spread = _spread(cluster, count, share)
        if spread is not None and count >= LEAST_USED * devices:
            found.append((count, spread))
    return tuple(found)


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


def _spread(cluster: ClusterSpec, count: int, share: int) -> ClusterSpec | None:
    """The cluster, or one with smaller supernodes, that has `share` of a job of `count` in each; None if neither does."""
    either = (cluster, _shrunk(cluster, share))
    return next((one for one in either if one.allocated_sizes(count)[_supernode(cluster)] == share), None)


def slow_levels(slow: Mapping[str, float]) -> tuple[str, ...]:
    """What is assumed of levels that run slow, in sentences."""
    return tuple(
        f"every link of level {name} carries {share:.0%} of its bandwidth: groups across it follow the slowest"
        for name, share in slow.items()
        if name != DEVICE
    )


def _shrunk(cluster: ClusterSpec, share: int) -> ClusterSpec:
    """The cluster with supernodes of whole servers that hold `share` devices; as it is where they lie in units of their own."""
    place = _supernode(cluster)
    if cluster.levels[place + 1].size is not None:
        return cluster
    inner = (cluster.levels[place - 1].size if place else 1) or 1
    smaller = cluster.levels[place].model_copy(update={"size": -(-share // inner) * inner})
    return cluster.model_copy(update={"levels": (*cluster.levels[:place], smaller, *cluster.levels[place + 1 :])})


def _scaled(figure: Figure, share: float) -> Figure:
    ends = {name: None if end is None else end * share for name, end in (("low", figure.low), ("high", figure.high))}
    source = f"{share:g} of {figure.value:g}, as was said to be slow: {figure.source}"
    return figure.model_copy(update={"value": figure.value * share, "source": source, **ends})


def _supernode(cluster: ClusterSpec) -> int:
    return [level.name for level in cluster.levels].index(cluster.supernode)


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

"""Rank lists that somebody else wrote, held against what process groups must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.documents import parse_document
from ...search_spaces.errors import InputError
from ...search_spaces.groups import DIMENSIONS
from ..readers.python_source import constants, is_python
from ..reports import wording
from ..result import Result

ALIASES = {
    **{name: name for name in DIMENSIONS},
    **{"tensor": "tp", "tensor_parallel": "tp", "model": "tp", "pipeline": "pp", "pipeline_parallel": "pp", "data": "dp"},
    **{"data_parallel": "dp", "context": "cp", "context_parallel": "cp", "expert": "ep", "expert_parallel": "ep"},
    **{"expert_tensor_parallel": "etp", "expert_data_parallel": "edp"},
}
"""What a dimension may be called in a file."""
MOST_RANKS = 5_000_000
SHOWN = 8


class GroupsOf(Result):
    """The groups of one dimension: how many, their sizes with how often each occurs, the ranks that they touch or miss."""

    dimension: str
    groups: int
    sizes: dict[int, int]
    touched: int
    missing: int
    doubled: int
    expected_groups: int | None = None
    expected_size: int | None = None
    expected_stride: int | None = None
    broken: tuple[str, ...] = ()


class CheckedGroups(Result):
    """The judgement of rank lists; `ok` where every dimension's groups deal out all ranks once, have the right size and cross those
    of the other dimensions as a grid's do. `checked` says what was held against what.
    """

    devices: int
    devices_from: str
    ok: bool
    dimensions: tuple[GroupsOf, ...]
    broken: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()


def read_groups(text: str, where: str) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """(groups by dimension, what the file says of sizes) of a JSON such as {"tp": [[0, 1], …], "world_size": 16}, or of an
    exported Python file."""
    data = parse_document(text, where, as_json=True) if not is_python(text) else _program(text, where)
    held: Mapping[str, Any] = data["groups"] if isinstance(data.get("groups"), dict) else data
    groups, sizes = {}, {}
    for name, value in {**data, **held}.items():
        key = name.lower().removesuffix("_groups").removesuffix("_group").removesuffix("_ranks").replace("-", "_")
        if key in ALIASES and isinstance(value, list):
            if ALIASES[key] in groups:
                raise InputError(f"{where}: {ALIASES[key]} groups are given twice")
            groups[ALIASES[key]] = _lists(value, name, where)
        elif key in ("world_size", "devices", "world") and isinstance(value, int) and not isinstance(value, bool):
            sizes["devices"] = value
    layout = data.get("layout")
    plan = data.get("plan")
    if layout is None and isinstance(plan, dict):
        layout = plan.get("layout")
    if isinstance(layout, dict):
        sizes |= {k: v for k, v in layout.items() if k in DIMENSIONS and isinstance(v, int) and not isinstance(v, bool) and v > 0}
    if not groups:
        raise InputError(f'{where}: holds no groups; give lists of ranks by dimension, such as {{"tp": [[0, 1], [2, 3]]}}')
    return groups, sizes


def _program(text: str, where: str) -> dict[str, Any]:
    """As the JSON: the rank lists that the axes of an exported file stand for. Only its constants are looked at."""
    given = constants(text)
    groups, world = given.get("GROUPS"), given.get("WORLD_SIZE")
    if not isinstance(groups, dict) or type(world) is not int:
        raise InputError(f"{where}: has no GROUPS and WORLD_SIZE; give a file that export --to groups wrote, or JSON")
    found: dict[str, Any] = {"world_size": world}
    for name, axes in groups.items():
        try:
            firsts, members = ([(int(size), int(stride)) for size, stride in each] for each in axes)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: GROUPS[{name!r}] is not two lists of (size, stride)") from error
        if prod(size for size, _ in (*firsts, *members)) > MOST_RANKS:
            raise InputError(f"{where}: GROUPS[{name!r}] lists more than {MOST_RANKS:,} ranks")
        found[str(name)] = [[first + rank for rank in _spread(members)] for first in _spread(firsts)]
    return found


def _spread(axes: Sequence[tuple[int, int]]) -> list[int]:
    """Sums of a multiple of each stride, the last axis fastest."""
    return [sum(at) for at in product(*([n * stride for n in range(size)] for size, stride in axes))]


def _lists(value: list[Any], name: str, where: str) -> list[list[int]]:
    found, count = [], 0
    for place, group in enumerate(value):
        if not isinstance(group, list):
            raise InputError(f"{where}: {name}[{place}] is not a list of ranks")
        count += len(group)
        if count > MOST_RANKS:
            raise InputError(f"{where}: {name} lists more than {MOST_RANKS:,} ranks")
        for rank in group:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 or rank > 10**9:
                raise InputError(f"{where}: {name}[{place}] holds {str(rank)[:40]!r}, which is no rank (0, 1, 2, …)")
        found.append(group)
    return found


def check_groups(
    groups: Mapping[str, Sequence[Sequence[int]]],
    sizes: Mapping[str, int] | None = None,
    devices: int | None = None,
    cluster: ClusterSpec | None = None,
) -> CheckedGroups:
    """Judges rank lists: ranks missing or doubled, sizes that differ or are not the layout's, TP that leaves its supernode.

    `sizes` are the degrees that the groups should have; without them sizes are only held to each other. Without `devices` the
    ranks run up to the largest that is listed, or to the product of the sizes.
    """
    sizes = dict(sizes or {})
    world, source = _world(groups, sizes, devices)
    dimensions = [_judged(name, groups[name], world, sizes, cluster) for name in DIMENSIONS if name in groups]
    broken = [*_grid(sizes, dimensions, world), *_shared(groups)]
    dealt = {each.dimension: groups[each.dimension] for each in dimensions if _deals_out(each, world)}
    if not broken:
        broken += _uncrossed(dealt, world)
    return CheckedGroups(
        devices=world,
        devices_from=source,
        ok=not broken and all(not each.broken for each in dimensions),
        dimensions=tuple(dimensions),
        broken=tuple(broken),
        checked=tuple(_checked(dealt, sizes)),
    )


def read_and_check(path: Path, sizes: Mapping[str, int], devices: int | None, cluster: ClusterSpec | None) -> CheckedGroups:
    """The judgement of a file's rank lists. InputError for a file that holds none."""
    from ..readers import read_file

    where, text = read_file(path)
    groups, own = read_groups(text, where)
    return check_groups(groups, {**own, **sizes}, devices if devices is not None else own.get("devices"), cluster)


def _world(groups: Mapping[str, Sequence[Sequence[int]]], sizes: Mapping[str, int], devices: int | None) -> tuple[int, str]:
    largest = max((rank for lists in groups.values() for group in lists for rank in group), default=-1)
    if devices is not None:
        return devices, "given"
    if {"tp", "pp", "dp"} <= sizes.keys():
        return sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes.get("cp", 1), "the product of the layout's degrees"
    return largest + 1, "the largest rank that is listed"


def _judged(
    name: str, lists: Sequence[Sequence[int]], world: int, sizes: Mapping[str, int], cluster: ClusterSpec | None
) -> GroupsOf:
    """The groups of one dimension, held to what the layout's degrees ask of them."""
    counts = Counter(rank for group in lists for rank in group)
    size = sizes.get(name)
    missing = sorted(set(range(world)) - counts.keys())
    doubled = sorted(rank for rank, count in counts.items() if count > 1)
    outside = sorted(rank for rank in counts if rank >= world)
    found = GroupsOf(
        dimension=name,
        groups=len(lists),
        sizes=dict(sorted(Counter(map(len, lists)).items())),
        touched=sum(rank < world for rank in counts),
        missing=len(missing),
        doubled=len(doubled),
        expected_groups=world // size if size and world % size == 0 else None,
        expected_size=size,
        expected_stride=_stride(name, sizes),
    )
    broken = [*_misshapen(found), *_misplaced(name, world, missing, doubled, outside)]
    if name in ("tp", "etp") and cluster is not None:
        broken += _leaving(name, lists, cluster, world)
    return found.model_copy(update={"broken": tuple(broken)})


def _misshapen(found: GroupsOf) -> Iterator[str]:
    """Groups of another size or number than the layout's, or of several sizes."""
    name, size, groups, stride = found.dimension, found.expected_size, found.expected_groups, found.expected_stride
    had = ", ".join(f"{wording.count(count, 'group')} of {length}" for length, count in found.sizes.items()) or "no groups"
    if size is not None and groups is not None and found.sizes.keys() != {size}:
        apart = f", ranks {stride} apart" if stride and stride > 1 and size > 1 else ""
        yield f"{name}: {had}; it should be {wording.count(groups, 'group')} of {size}{apart}."
    elif size is not None and groups is not None and found.groups != groups:
        yield f"{name}: {had}; it should be {wording.count(groups, 'group')} of {size}."
    elif len(found.sizes) > 1:
        yield f"{name}: groups differ in size: {had}."


def _misplaced(name: str, world: int, missing: Sequence[int], doubled: Sequence[int], outside: Sequence[int]) -> Iterator[str]:
    """Ranks in no group, in several, and beyond the job's."""
    if missing:
        touched = f"{world - len(missing):,} are touched"
        yield f"{name}: {len(missing):,} of {world:,} ranks are in no group ({_shown(missing)}); {touched}."
    if doubled:
        yield f"{name}: {wording.count(len(doubled), 'rank')} in more than one group or twice in one ({_shown(doubled)})."
    if outside:
        yield f"{name}: {wording.count(len(outside), 'rank')} beyond the job's {world:,} ({_shown(outside)})."


def _leaving(name: str, lists: Sequence[Sequence[int]], cluster: ClusterSpec, world: int) -> Iterator[str]:
    """Groups with ranks in several supernodes, which are filled in the order of ranks."""
    sizes = cluster.allocated_sizes(world)
    unit = sizes[[level.name for level in cluster.levels].index(cluster.supernode)]
    leaving = [place for place, group in enumerate(lists) if len({rank // unit for rank in group}) > 1]
    if leaving:
        leave = "leaves its" if len(leaving) == 1 else "leave their"
        yield (
            f"{name}: {wording.count(len(leaving), 'group')} of {len(lists):,} {leave} {cluster.supernode} of {unit} devices "
            f"(the first is group {leaving[0]}, ranks {_shown(lists[leaving[0]])})."
        )


def _grid(sizes: Mapping[str, int], dimensions: Sequence[GroupsOf], world: int) -> Iterator[str]:
    """Whether the sizes of the dense grid multiply to the ranks, by the layout or by the groups themselves."""
    own = {each.dimension: next(iter(each.sizes)) for each in dimensions if len(each.sizes) == 1}
    held = {name: sizes.get(name) or own.get(name) for name in ("tp", "cp", "pp", "dp")}
    if held["cp"] is None:
        held["cp"] = 1
    if None in held.values():
        return
    whole = 1
    for value in held.values():
        whole *= value or 1
    if whole != world:
        shown = "·".join(str(held[name]) for name in ("tp", "cp", "pp", "dp") if held[name] != 1)
        named = "·".join(name for name in ("tp", "cp", "pp", "dp") if held[name] != 1)
        source = "the layout's" if sizes.keys() & held.keys() else "the groups'"
        yield f"{source} sizes {named} = {shown} make {whole:,} ranks, the job has {world:,}."


def _shared(groups: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[str]:
    """Pairs of dimensions of the dense grid whose groups meet in more than one rank, which no grid's do."""
    place = {name: {rank: index for index, group in enumerate(lists) for rank in group} for name, lists in groups.items()}
    for first, second in combinations([name for name in ("tp", "cp", "pp", "dp") if name in groups], 2):
        pairs = Counter((place[first][rank], place[second][rank]) for rank in place[first] if rank in place[second])
        worst = max(pairs, key=lambda pair: pairs[pair], default=None)
        if worst is not None and pairs[worst] > 1:
            both = f"{first} group {worst[0]} and {second} group {worst[1]}"
            yield f"{both} share {pairs[worst]} ranks; groups of two dimensions of a grid meet in one."


DENSE, SPARSE = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
"""The two grids over all ranks; a stage is the same set of ranks in both."""


def _deals_out(each: GroupsOf, world: int) -> bool:
    return (
        not each.doubled
        and each.touched == world == sum(size * count for size, count in each.sizes.items())
        and len(each.sizes) == 1
    )


def _uncrossed(groups: Mapping[str, Sequence[Sequence[int]]], world: int) -> Iterator[str]:
    """Dimensions that no grid has: what their groups chain together is not as large as the product of their sizes.

    Groups of a grid that differ in some coordinates chain exactly the ranks that share all others, so that a group of dp that
    mixes stages chains too many with cp or tp. Expert groups have to lie inside what tp, cp and dp chain: a stage.
    """
    place = {name: _places(lists, world) for name, lists in groups.items()}
    told: list[set[str]] = []
    for grid in (DENSE, SPARSE):
        own = [name for name in grid if name in groups]
        for count in range(2, len(own) + 1):
            for names in combinations(own, count):
                if any(known <= set(names) for known in told):
                    continue
                right = prod(len(groups[name][0]) for name in names)
                sizes = np.bincount(_chained([place[name] for name in names], world), minlength=world)
                odd = np.nonzero((sizes != right) & (sizes > 0))[0]
                if len(odd):
                    told.append(set(names))
                    chained = f"the groups of {', '.join(names)} chain {sizes[odd[0]]:,} ranks from rank {odd[0]:,} on"
                    yield f"{chained}; in a grid it is {'·'.join(str(len(groups[n][0])) for n in names)} = {right:,}."
    if told or not {"tp", "dp"} <= groups.keys():
        return
    stage = _chained([place[name] for name in DENSE[:3] if name in groups], world)
    for name in (each for each in SPARSE[:3] if each in groups):
        outside = [index for index, group in enumerate(groups[name]) if len({int(stage[rank]) for rank in group}) > 1]
        if outside:
            first = f"the first is group {outside[0]}, ranks {_shown(groups[name][outside[0]])}"
            yield f"{name}: {wording.count(len(outside), 'group')} with ranks of several stages ({first})."


def _places(lists: Sequence[Sequence[int]], world: int) -> npt.NDArray[np.int64]:
    """The group of each rank."""
    found = np.zeros(world, dtype=np.int64)
    for index, group in enumerate(lists):
        found[list(group)] = index
    return found


def _chained(places: Sequence[npt.NDArray[np.int64]], world: int) -> npt.NDArray[np.int64]:
    """For each rank the lowest that groups connect it with."""
    label = np.arange(world)
    while True:
        before = label
        for place in places:
            least = np.full(int(place.max()) + 1, world)
            np.minimum.at(least, place, label)
            label = least[place]
        if np.array_equal(before, label):
            return label


def _checked(dealt: Mapping[str, object], sizes: Mapping[str, int]) -> Iterator[str]:
    """What was held against what, in sentences."""
    yield "whether every rank is in one group of each dimension" + (", of the size that the layout says" if sizes else "")
    grids = [[name for name in grid if name in dealt] for grid in (DENSE, SPARSE)]
    crossed = [", ".join(names) for names in grids if len(names) > 1]
    if crossed:
        yield f"whether groups cross as those of a grid do: {'; '.join(crossed)}"
    yield "not the order in which a framework itself would number ranks"


def _stride(name: str, sizes: Mapping[str, int]) -> int | None:
    """How far apart the ranks of a group are in Megatron's usual order, tp-cp-ep-dp-pp."""
    order = ("tp", "cp", "dp", "pp")
    if name not in order or not {"tp", "pp", "dp"} <= sizes.keys():
        return None
    stride = 1
    for inner in order[: order.index(name)]:
        stride *= sizes.get(inner, 1)
    return stride


def _shown(ranks: Sequence[int]) -> str:
    """«3–5, 9, …»"""
    rising = sorted(ranks)
    if len(rising) <= SHOWN or rising[-1] - rising[0] + 1 == len(rising):
        return wording.ranges(rising)
    return wording.ranges(rising[:SHOWN]) + ", …"

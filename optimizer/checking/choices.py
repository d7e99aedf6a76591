"""Choices of a job that are words: the columns that rules read of each, and the words near the one that the job has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from ...search_spaces.choices import divisors
from ...search_spaces.layout import (
    ALL_LAYERS,
    FULL_BLOCK,
    FULL_UNIFORM,
    SELECTIVE,
    Recompute,
    offload_text,
    parse_offload,
    parse_sharding,
)
from ...search_spaces.quantities import PER_MILLE
from ...search_spaces.vocabulary import CP_TYPES, RANK_ORDERS, RECOMPUTE_MODULES, SCHEDULES, SHARDINGS

RECOMPUTE_COLUMNS = ("recompute_mode", "recompute_modules", "recompute_layers")
OFFLOAD_COLUMNS = ("optimizer_offload_per_mille", "activation_offload_per_mille")
Values = Mapping[str, int]


@dataclass(frozen=True)
class Choice:
    """A field of a layout that is a word.

    `near` gives for the integers of a job other words, the nearest first; `said` the integers of a word.
    """

    name: str
    near: Callable[[Values], Iterator[str]]
    said: Callable[[str], dict[str, int]]
    columns: frozenset[str]


def _listed(name: str, vocabulary: tuple[str, ...]) -> Choice:
    def near(values: Values) -> Iterator[str]:
        codes = sorted(range(len(vocabulary)), key=lambda code: (abs(code - values[name]), code))
        return (vocabulary[code] for code in codes if code != values[name])

    return Choice(name, near, lambda word: {name: vocabulary.index(word)}, frozenset({name}))


def _shardings(values: Values) -> Iterator[str]:
    """Shards of HSDP are divisors of the replicas, where the job has such shards."""
    if values["hsdp"]:
        sizes = divisors(values["dp"] * values["cp"]) if "dp" in values else []
        yield from (f"hsdp:{size}" for size in _by_distance(sizes, values["hsdp"]))
    own = values["sharding"]
    yield from (SHARDINGS[code] for code in sorted(range(SHARDINGS.index("hsdp")), key=lambda code: abs(code - own)) if code != own)


def _said_sharding(word: str) -> dict[str, int]:
    code, size = parse_sharding(word)
    return {"sharding": code, "hsdp": size}


def _recomputed(values: Values) -> Iterator[str]:
    """Fewer of its modules; units of another length, all layers of a chunk; nothing."""
    mode, modules, layers = (values[name] for name in RECOMPUTE_COLUMNS)
    names = [name for bit, name in enumerate(RECOMPUTE_MODULES) if modules >> bit & 1]
    if mode == SELECTIVE:
        for size in range(len(names) - 1, 0, -1):
            yield from (f"selective:{'+'.join(kept)}" for kept in combinations(names, size))
    if mode == FULL_UNIFORM and "layers" in values:
        yield from (f"full:uniform:{size}" for size in _by_distance(divisors(values["layers"]), layers))
    if mode in (FULL_UNIFORM, FULL_BLOCK) and not (mode == FULL_BLOCK and layers >= ALL_LAYERS):
        yield "full"
    if mode != Recompute().mode:
        yield "none"


def _said_recompute(word: str) -> dict[str, int]:
    choice = Recompute.parse(word)
    return dict(zip(RECOMPUTE_COLUMNS, (choice.mode, choice.modules, choice.layers), strict=True))


def _offloaded(values: Values) -> Iterator[str]:
    """All of the optimizer's states or none of them, no activations, nothing."""
    optimizer, activations = (values[name] / PER_MILLE for name in OFFLOAD_COLUMNS)
    kept = ((1.0, activations), (0.0, activations)) if optimizer else ()
    for shares in (*kept, (optimizer, 0.0), (0.0, 0.0)):
        if shares != (optimizer, activations):
            yield offload_text(*shares)


def _said_offload(word: str) -> dict[str, int]:
    return dict(zip(OFFLOAD_COLUMNS, (round(share * PER_MILLE) for share in parse_offload(word)), strict=True))


def _by_distance(sizes: list[int], given: int) -> list[int]:
    return sorted((size for size in sizes if size != given), key=lambda size: (abs(math.log2(size / given)), size))


CHOICES = (
    _listed("schedule", SCHEDULES),
    Choice("optimizer_sharding", _shardings, _said_sharding, frozenset({"sharding", "hsdp"})),
    _listed("cp_type", CP_TYPES),
    Choice("recompute", _recomputed, _said_recompute, frozenset(RECOMPUTE_COLUMNS)),
    Choice("offload", _offloaded, _said_offload, frozenset(OFFLOAD_COLUMNS)),
    _listed("rank_order", RANK_ORDERS),
)

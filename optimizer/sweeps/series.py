"""What a sweep's rows say together: which strategy won where, batches that points share, how well jobs scale, and fronts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ...cost_models.money import SECONDS_PER_HOUR
from ...search_spaces.scaling_families import is_family, parameters
from .grid import AXES, Batch
from .point import PLANNED
from .table import EFFICIENCIES, Row

K = TypeVar("K")

STRATEGIES = ("data or cp", "tp", "pp", "tp pp", "ep", "tp ep", "pp ep", "tp pp ep")
"""What carries a model beside data parallelism, from the least that is divided to the most; context parallelism comes on top."""
DIVIDES_LAYERS = ("tp", "pp", "ep")
DEGREES = ("tp", "cp", "pp", "dp", "ep", "vpp")
EVERY_MILLION = 1e6
DECIMALS = 4  # of an efficiency in a table


def is_planned(row: Row) -> bool:
    return row["status"] in PLANNED


def strategy(row: Row) -> str:
    """One of STRATEGIES, by the degrees above 1 of a planned row."""
    return " ".join(name for name in DIVIDES_LAYERS if row[name] > 1) or STRATEGIES[0]


def layout_words(row: Row, names: Iterable[str] = DEGREES) -> str:
    """Degrees above 1: "tp 8 pp 4 dp 16"."""
    return " ".join(f"{name} {row[name]}" for name in names if row[name] > 1) or "one device"


def model_sizes(rows: Iterable[Row]) -> dict[str, float]:
    """Parameters of every model, as far as a row or a family's name tells."""
    found: dict[str, float] = {}
    for row in rows:
        name = row["model"]
        if row.get("parameters"):
            found[name] = row["parameters"]
        elif name not in found and is_family(name):
            found[name] = parameters(name.partition(":")[2])
    return found


def by_size(rows: Sequence[Row]) -> list[str]:
    """The models from the smallest to the largest, families and models of experts apart; those of unknown size last."""
    sizes = model_sizes(rows)
    dense = {row["model"] for row in rows if row.get("active_parameters") and row["active_parameters"] == row["parameters"]}
    dense |= {row["model"] for row in rows if row["model"].startswith("dense:")}
    return sorted({row["model"] for row in rows}, key=lambda name: (name not in dense, sizes.get(name, float("inf")), name))


def batches(rows: Sequence[Row]) -> list[Batch]:
    """The fewest batches that all rows are of: of sequences, per device, of tokens, or of each what holds most of what is left.

    Of as few, those that hold points in common: a grid of batches that stay and that grow has both.
    """
    each = [_possible(row) for row in rows]
    covers = [*({one[kind] for one in each} for kind in range(3)), _mixed(each)]
    held = [sum(batch in one for batch in cover for one in set(each)) for cover in covers]
    best = min(range(len(covers)), key=lambda place: (len(covers[place]), -held[place]))
    return sorted(covers[best])


def in_batch(row: Row, batch: Batch) -> bool:
    return bool(row["global_batch"] == batch.sequences(row["devices"], row["seq_len"]))


def _possible(row: Row) -> tuple[Batch, Batch, Batch]:
    count = row["global_batch"]
    return Batch("sequences", count), Batch("per device", count / row["devices"]), Batch("tokens", count * row["seq_len"])


def _mixed(each: Sequence[tuple[Batch, ...]]) -> set[Batch]:
    held: dict[Batch, set[tuple[Batch, ...]]] = defaultdict(set)
    for one in each:
        for batch in one:
            held[batch].add(one)
    left, chosen = set(each), set[Batch]()
    while left:
        best = max(sorted(held), key=lambda batch: (len(held[batch] & left), len(held[batch])))
        chosen.add(best)
        left -= held[best]
    return chosen


def problem_but(row: Row, *left_out: str) -> tuple[object, ...]:
    """What was asked, apart from some axes: rows that agree in it differ in those alone."""
    options = sorted(name for name in row if name.startswith("option "))
    return tuple((name, row[name]) for name in (*AXES, *options) if name not in left_out)


def efficiencies(rows: Sequence[Row], batch: Batch) -> dict[int, float]:
    """Of the rows of a batch, by their place: tokens per second and device over those of the fewest devices that have a plan.

    Rows with which no others differ in devices alone are left out.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if is_planned(row) and in_batch(row, batch):
            groups[problem_but(row, "devices", "global_batch")].append(place)
    found: dict[int, float] = {}
    for places in groups.values():
        if len({rows[place]["devices"] for place in places}) < 2:
            continue
        least = rows[min(places, key=lambda place: rows[place]["devices"])]["tokens_per_s_per_device"]
        found |= {place: rows[place]["tokens_per_s_per_device"] / least for place in places}
    return found


def with_efficiencies(rows: Sequence[Row]) -> list[Row]:
    """The rows with how well each scales, at a batch that stays and at one that grows with the devices (EFFICIENCIES).

    None where no other count of devices has a plan at that batch, or this one has none: there is nothing to compare.
    """
    fixed, scaled = EFFICIENCIES
    added: list[Row] = [dict.fromkeys(EFFICIENCIES) for _ in rows]
    counts = {(row["global_batch"], row["devices"]) for row in rows}
    shared = {fixed: {Batch("sequences", batch) for batch, _ in counts}}
    shared[scaled] = {Batch("per device", batch / devices) for batch, devices in counts}
    for name, of_kind in shared.items():
        for batch in of_kind:
            for place, share in efficiencies(rows, batch).items():
                added[place][name] = round(share, DECIMALS)
    return [{**row, **more} for row, more in zip(rows, added, strict=True)]


def device_hours(row: Row) -> float:
    """Per million tokens, idle devices included: they are paid for as well."""
    return float(EVERY_MILLION / row["tokens_per_s_per_device"] / SECONDS_PER_HOUR)


def front(items: Sequence[K], least: Callable[[K], float], most: Callable[[K], float]) -> list[K]:
    """Those that no other beats: none has less of the one and more of the other; from the least on."""
    kept: list[K] = []
    for item in sorted(items, key=lambda each: (least(each), -most(each))):
        if not kept or most(item) > most(kept[-1]):
            kept.append(item)
    return kept


def varying(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """The names whose values differ between rows."""
    return [name for name in names if len({row.get(name) for row in rows}) > 1]


def phase_axes(rows: Sequence[Row]) -> tuple[str, str]:
    """What a phase diagram goes along, across and upwards: devices, else sequence length; models, else what else differs.

    Where every cluster has devices of its own, those of one peak say, across are clusters.
    """
    if one_count_each(rows):
        return "cluster", "model"
    across = (varying(rows, ("devices", "seq_len")) or ["devices"])[0]
    upwards = [name for name in ("model", "seq_len", "cluster", "precision") if name != across]
    return across, (varying(rows, upwards) or ["model"])[0]


def one_count_each(rows: Sequence[Row]) -> bool:
    """Whether several clusters have one count of devices each, and not the same."""
    pairs = {(row["cluster"], row["devices"]) for row in rows}
    return len({devices for _, devices in pairs}) > 1 and len(pairs) == len({cluster for cluster, _ in pairs})


def values_of(rows: Sequence[Row], name: str) -> list[Any]:
    """The values along an axis, in order; models and clusters as they are compared."""
    if name == "model":
        return by_size(rows)
    found = dict.fromkeys(row[name] for row in rows)
    return list(found) if name in ("cluster", "precision") else sorted(found)


def panels(rows: Sequence[Row], *inside: str) -> dict[str, list[Row]]:
    """Rows by what differs between them beside what a panel shows itself, under its title; a row of two batches is in both."""
    options = sorted({name for row in rows for name in row if name.startswith("option ")})
    implied = ("devices",) if one_count_each(rows) and "cluster" in inside else ()
    apart = [name for name in varying(rows, (*AXES, *options)) if name not in (*inside, *implied, "global_batch")]
    shared: list[Batch | None] = [*batches(rows)] if "global_batch" not in inside else [None]
    found: dict[str, list[Row]] = {}
    for values in _in_order(rows, apart):
        held = [row for row in rows if all(row.get(name) == value for name, value in zip(apart, values, strict=True))]
        for batch in shared:
            title = [words_of(name, value) for name, value in zip(apart, values, strict=True)]
            title += [f"batch {batch.words}"] if batch is not None and len(shared) > 1 else []
            chosen = held if batch is None else [row for row in held if in_batch(row, batch)]
            if chosen:
                found[" · ".join(title)] = chosen
    return found


def _in_order(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Any, ...]]:
    there = {tuple(row.get(name) for name in names) for row in rows}
    orders = [values_of(rows, name) if name in AXES else sorted({row.get(name) for row in rows}, key=str) for name in names]
    return [values for values in itertools.product(*orders) if values in there]


def words_of(axis: str, value: Any) -> str:
    """A value of an axis as a picture names it: "4,096 tokens", "1,024 devices", "hgx-h100"."""
    if axis == "seq_len":
        return f"{value // 1024:,}K tokens" if value % 1024 == 0 else f"{value:,} tokens"
    if axis == "devices":
        return f"{value:,} devices"
    if axis.startswith("option "):
        return f"{axis.removeprefix('option ')} {'as usual' if value is None else value}"
    return str(value)

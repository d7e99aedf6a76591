"""Measured loads of experts, and how often tokens chose two together, read from CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..search_spaces.errors import InputError
from ..search_spaces.layout import Floats

LOAD_COLUMNS = ("layer", "expert", "load")
FEW = 4  # layers that are named
PAIR_COLUMNS = ("layer", "expert", "expert", "count")


@dataclass(frozen=True)
class ExpertLoads:
    """Loads by layer, each (windows, E); windows are spans of time that were measured one after another."""

    layers: dict[int, Floats]

    @property
    def experts(self) -> int:
        return int(next(iter(self.layers.values())).shape[1])

    @property
    def absent(self) -> tuple[str, ...]:
        """What was not measured, in words: experts without any tokens are taken to be as idle as that."""
        idle = {layer: int((windows.sum(axis=0) == 0).sum()) for layer, windows in self.layers.items()}
        named = [f"{idle[layer]} of {self.experts} in layer {layer}" for layer in idle if idle[layer]]
        more = f" and {len(named) - FEW} more layers" if len(named) > FEW else ""
        said = f"experts that the loads do not list, or list with 0, are taken to receive nothing: {', '.join(named[:FEW])}{more}"
        return (said,) if named else ()


def read_loads(text: str, source: str, experts: int) -> ExpertLoads:
    """Columns layer, expert, load (tokens) and, if there are several, window. An expert that is not listed received nothing.

    InputError names source, line and what is wrong.
    """
    cells: dict[int, dict[tuple[str, int], float]] = {}
    for line, row in _rows(text, source, LOAD_COLUMNS, ("window",)):
        layer, expert = _index(row[0], source, line, "layer"), _index(row[1], source, line, "expert", experts)
        key = (row[3] if len(row) > 3 else "", expert)
        if key in cells.setdefault(layer, {}):
            raise InputError(f"{source}: line {line}: expert {expert} of layer {layer} is given twice; add the loads up")
        cells[layer][key] = _amount(row[2], source, line, "load")
    if not cells:
        raise InputError(f"{source}: has no loads; write a line for every layer and expert below {','.join(LOAD_COLUMNS)}")
    layers = {}
    for layer in sorted(cells):
        windows = list(dict.fromkeys(window for window, _ in cells[layer]))
        loads = np.zeros((len(windows), experts))
        for (window, expert), load in cells[layer].items():
            loads[windows.index(window), expert] = load
        if not loads.sum(axis=1).all():
            raise InputError(f"{source}: layer {layer}: all loads are 0; leave the layer out, or the window")
        layers[layer] = loads
    return ExpertLoads(layers)


def imbalance_by_ep(loads: ExpertLoads) -> dict[int, float]:
    """Load of the fullest rank over the mean for every ep that divides the experts, these in order; mean over layers.

    Several windows are added up.
    """
    sums = np.array([windows.sum(axis=0) for windows in loads.layers.values()])
    degrees = [ep for ep in range(1, loads.experts + 1) if loads.experts % ep == 0]
    by_rank = {ep: sums.reshape(len(sums), ep, -1).sum(axis=2) for ep in degrees}
    return {ep: max(1.0, float((held.max(axis=1) / held.mean(axis=1)).mean())) for ep, held in by_rank.items()}


def read_pairs(text: str, source: str, experts: int) -> dict[int, Floats]:
    """Tokens that chose two experts together, by layer: (E, E), zero on and below the diagonal. InputError likewise."""
    layers: dict[int, Floats] = {}
    for line, row in _rows(text, source, PAIR_COLUMNS, ()):
        layer = _index(row[0], source, line, "layer")
        first, second = sorted(_index(cell, source, line, "expert", experts) for cell in row[1:3])
        if first == second:
            raise InputError(f"{source}: line {line}: expert {first} is paired with itself; leave the line out")
        layers.setdefault(layer, np.zeros((experts, experts)))[first, second] += _amount(row[3], source, line, "count")
    return layers


def _rows(text: str, source: str, columns: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Lines below the header, with their number, cells in the order of the columns."""
    reader = csv.reader(io.StringIO(text, newline=""))
    header = [cell.strip().lower() for cell in next(reader, [])]
    names = (*columns, *(name for name in optional if name in header))
    wanted = ",".join(columns)
    if sorted(header) != sorted(names):
        raise InputError(
            f"{source}: the header is {','.join(header)!r}; it must be {wanted}" + "".join(f"[,{o}]" for o in optional)
        )
    order = list(range(len(names))) if len(set(names)) < len(names) else [header.index(name) for name in names]
    if len(set(names)) < len(names) and tuple(header) != names:
        raise InputError(f"{source}: the header is {','.join(header)!r}; its columns must come as {wanted}")
    for row in reader:
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(names):
            raise InputError(f"{source}: line {reader.line_num} has {len(row)} cells; the header has {len(names)}")
        yield reader.line_num, [row[at].strip() for at in order]


def _index(cell: str, source: str, line: int, name: str, limit: int | None = None) -> int:
    if not (cell.isascii() and cell.isdigit() and len(cell) < 10) or (limit is not None and int(cell) >= limit):
        upto = "a whole number from 0" if limit is None else f"a whole number from 0 to {limit - 1}, the model's {limit} experts"
        raise InputError(f"{source}: line {line}: {name} is {cell!r}; it must be {upto}")
    return int(cell)


def _amount(cell: str, source: str, line: int, name: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e300:
        raise InputError(f"{source}: line {line}: {name} is {cell!r}; it must be a number of at least 0")
    return value

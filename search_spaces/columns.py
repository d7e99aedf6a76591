"""Columns by name: crossed, filtered and told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .layout import Bools, Ints
from .row_keys import distinct_rows, row_keys


def unpacked(bits: npt.NDArray[np.uint8], size: int) -> Bools:
    """Rows of bits as (n, size) of their own."""
    return np.unpackbits(bits, axis=1, count=size).view(bool)


def runs(count: Ints) -> tuple[npt.NDArray[np.intp], Ints]:
    """For runs of the given lengths one after the other: which run every place belongs to, and how far it is into it."""
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)


def all_but(choices: Mapping[str, Any], name: str) -> Ints:
    """A number for every choice, equal where all columns but one are."""
    return row_keys([values for other, values in choices.items() if other != name])


def first_of_each(legal: Bools, key: Ints) -> Bools:
    """In every row of `legal` (n, choices), the first that is set among the choices of one key, (n, choices)."""
    order = np.argsort(key, kind="stable")
    ordered = legal[:, order]
    count = np.cumsum(ordered, axis=1)
    before = np.concatenate([np.zeros((len(legal), 1), dtype=count.dtype), count], axis=1)
    first = np.empty_like(legal)
    first[:, order] = ordered & (count - before[:, np.searchsorted(key[order], key[order])] == 1)
    return first


def meshed(axes: dict[str, Ints]) -> dict[str, Ints]:
    """Every combination of some columns' values, a row each."""
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    return {name: values.ravel() for name, values in zip(axes, mesh, strict=True)}


def where(columns: dict[str, Ints], mask: Bools) -> dict[str, Ints]:
    """The rows that a mask keeps."""
    return {name: values[mask] for name, values in columns.items()}


def cross(columns: dict[str, Ints], name: str, values: Ints) -> dict[str, Ints]:
    """Every row with every value of one column more."""
    n = len(next(iter(columns.values())))
    return {**{key: np.repeat(column, len(values)) for key, column in columns.items()}, name: np.tile(values, n)}


def unique_rows(columns: list[Ints], count: int) -> tuple[list[Ints], Ints]:
    """Distinct rows of some columns of `count` rows and each row's place among them; without columns all rows are alike."""
    if not columns:
        return [], np.zeros(count, dtype=np.int64)
    first, member = distinct_rows(columns)
    return [column[first] for column in columns], member

"""Layouts as points of a box, and the legal layouts nearest to a point: what samplers of continuous variables need.

A degree is its logarithm to base 2, any other choice its place among the values that occur in the space.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...search_spaces.choices import FRAME
from ...search_spaces.enumeration import Space
from ...search_spaces.layout import DEGREES, Floats, Ints
from ...search_spaces.row_keys import row_keys

RECOMPUTE = ("recompute_mode", "recompute_layers", "recompute_modules")
SHARDING = ("sharding", "hsdp")
FOLLOWS = "num_microbatches"  # from the batch, dp and the micro-batch
Places = npt.NDArray[np.intp]
Key = tuple[int, int, int]
"""A legal layout by place: frame of the space, rows of the tables of its pipeline and sharing choices."""


@dataclass(frozen=True)
class Picks:
    """Legal layouts by place, a column of each part of a Key, (n,)."""

    frames: Places
    pipeline: Ints
    sharing: Ints

    @classmethod
    def of(cls, keys: Sequence[Key]) -> Picks:
        places = np.array(keys, dtype=np.int64).reshape(-1, 3)
        return cls(places[:, 0], places[:, 1], places[:, 2])


class Coordinates:
    """The box of a space's layouts, whose frames are `frames`: `names` with bounds `low` and `high`, columns (axes,)."""

    def __init__(self, space: Space, frames: Places) -> None:
        self._space, self._frames = space, frames
        self._frame_axes = _axes({name: getattr(space.frames, name)[frames] for name in FRAME})
        self._pipeline_axes, self._sharing_axes = _axes(space.pipeline_lists.table), _axes(space.sharing_lists.table)
        every = self._frame_axes | self._pipeline_axes | self._sharing_axes
        self.names = list(every)
        self.low, self.high = (np.array([ends(values) for values in every.values()]) for ends in (np.min, np.max))

    def nearest(self, points: Floats, taken: Container[Key] = ()) -> list[Key]:
        """For each point (n, axes) the legal layout nearest to it that is neither taken nor another point's before it.

        Nearest is first the frame, then the sum of distances along all other axes; the first of equals. Shorter than n where no
        more layouts are left.
        """
        found: dict[Key, None] = {}
        for point in points:
            key = next((key for key in self._by_distance(point) if key not in taken and key not in found), None)
            if key is None:
                break
            found[key] = None
        return list(found)

    def plainest(self, frames: Places) -> Floats:
        """Points of some frames (places in the space) with the least of every other axis, (n, axes)."""
        points = np.tile(self.low, (len(frames), 1))
        place = {int(frame): row for row, frame in enumerate(self._frames)}
        rows = [place[int(frame)] for frame in frames]
        for axis, values in enumerate(self._frame_axes.values()):
            points[:, axis] = values[rows]
        return points

    def _by_distance(self, point: Floats) -> Iterator[Key]:
        """All legal layouts, nearest first."""
        ends = np.cumsum([len(self._frame_axes), len(self._pipeline_axes)])
        to_frame, to_pipeline, to_sharing = np.split(point, ends)
        away = _distance(self._frame_axes, to_frame, np.arange(len(self._frames)))
        pipeline, sharing = self._space.pipeline_lists, self._space.sharing_lists
        for frame in (self._frames[place] for place in _rising(away)):
            first = pipeline.choice[pipeline.start[frame] : pipeline.start[frame] + pipeline.count[frame]]
            second = sharing.choice[sharing.start[frame] : sharing.start[frame] + sharing.count[frame]]
            along = _distance(self._pipeline_axes, to_pipeline, first)
            across = _distance(self._sharing_axes, to_sharing, second)
            for pair in _rising((along[:, None] + across[None, :]).ravel()):
                yield int(frame), int(first[pair // len(second)]), int(second[pair % len(second)])


def _axes(table: dict[str, npt.NDArray[np.generic]]) -> dict[str, Floats]:
    """The coordinates of a table's rows by name; axes that never vary are left out."""
    found: dict[str, Floats] = {}
    for name, values in table.items():
        if name in DEGREES and name != FOLLOWS:
            found[name] = np.log2(values.astype(np.float64))
        elif name not in (*DEGREES, *RECOMPUTE, *SHARDING):
            found[name] = _places([values])
    for name, columns in (("recompute", RECOMPUTE), ("optimizer_sharding", SHARDING)):
        if columns[0] in table:
            found[name] = _places([table[column] for column in columns])
    return {name: values for name, values in found.items() if np.ptp(values) > 0}


def _places(columns: Sequence[npt.NDArray[np.generic]]) -> Floats:
    """The place of each row among the distinct rows in rising order, (n,)."""
    return np.unique(row_keys(columns), return_inverse=True)[1].astype(np.float64)


def _distance(axes: dict[str, Floats], point: Floats, rows: Ints) -> Floats:
    """Sum of distances of some rows to a point along the axes, (n,)."""
    away = np.zeros(len(rows))
    for values, x in zip(axes.values(), point, strict=True):
        away += np.abs(values[rows] - x)
    return away


def _rising(values: Floats) -> Iterator[int]:
    """Places of the values, the least first, the first of equals first; sorted only if more than the least are asked for."""
    least = int(values.argmin())
    yield least
    yield from (place for place in np.argsort(values, kind="stable").tolist() if place != least)

"""Works and layouts on their way through a search, with what is known of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cost_models.loads import Cuts
from ..cost_models.rows import Rows
from ..cost_models.step import same_shape
from ..search_spaces.enumeration import Works
from ..search_spaces.layout import SCHEDULES, Floats, Ints, LayoutTable, Split
from ..search_spaces.vocabulary import V_SHAPED
from .found import Kept


@dataclass(frozen=True)
class Wave:
    """Some rows that are scored together: their frames, and the least work after the pipeline per work in it (`bounds`)."""

    rows: Rows
    frame: npt.NDArray[np.intp]
    after: Floats

    def take(self, members: npt.NDArray[np.intp]) -> Wave:
        return Wave(self.rows.take(members), self.frame[members], self.after[members])

    def kept(self, row: int, cuts: Ints, step_time_s: float) -> Kept:
        """One row with where it is cut."""
        table = self.rows.table
        folded = SCHEDULES[int(table.schedule[row])] in V_SHAPED
        split = Split(int(table.pp[row]), int(table.vpp[row]), tuple(cuts.tolist()), folded)
        return Kept(step_time_s, table.take(np.array([row])), split)


@dataclass(frozen=True)
class Ways:
    """Ways to cut some rows, an array (ways, chunks+1) each, and what each way takes at least, (n, most ways), infinite where it
    does not fit or there are fewer.
    """

    below_s: Floats
    cuts: npt.NDArray[np.object_]

    def take(self, members: npt.NDArray[np.intp]) -> Ways:
        return Ways(self.below_s[members], self.cuts[members])

    def with_rows(self, members: npt.NDArray[np.intp], below_s: Floats, family: Cuts) -> Ways:
        """With some rows of one shape, of which each has its own `family` (n, ways, chunks+1)."""
        more = max(0, below_s.shape[1] - self.below_s.shape[1])
        padded = np.pad(self.below_s, ((0, 0), (0, more)), constant_values=np.inf)
        padded[members[:, None], np.arange(below_s.shape[1])] = below_s
        for row, own in zip(members.tolist(), family, strict=True):
            self.cuts[row] = own
        return Ways(padded, self.cuts)


@dataclass(frozen=True)
class Batch:
    """Works of some frames, with their rows, frames and bounds, best first; `end` is how many frames have been looked at then.

    `bound` holds for the cuts that the search gives a work, `any_cuts_bound` for all.
    """

    works: Works
    rows: Rows
    frame: npt.NDArray[np.intp]
    bound: Floats
    any_cuts_bound: Floats
    end: int

    def take(self, members: npt.NDArray[np.intp] | slice) -> Batch:
        rows = np.arange(len(self.bound))[members]
        works, taken, frame = self.works.take(rows), self.rows.take(rows), self.frame[rows]
        return Batch(works, taken, frame, self.bound[rows], self.any_cuts_bound[rows], self.end)


def same_shaped(table: LayoutTable, members: npt.NDArray[np.intp], depth: bool) -> Iterator[npt.NDArray[np.intp]]:
    """Members that share pp, vpp and schedule (and the recompute depth)."""
    if len(members):
        yield from (members[group] for group in same_shape(table.take(members), depth))

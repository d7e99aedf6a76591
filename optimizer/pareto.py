"""Several aims at once: the front of the legal layouts, exact where every layout can be priced.

A layout stands for one split of it: the one that the search would start from or, where that does not fit, the fastest that does.
Replayed schedules and splits that have to be searched are first priced from below; only what the front so far does not beat in
every aim is worked out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost_models.checkpoint import saved_bytes
from ..cost_models.loads import Cuts, recompute_depths
from ..cost_models.profile import Profile
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel, same_shape
from ..cost_models.traffic import layers_redone
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import SCHEDULES, Bools, Floats, Ints, Layout, LayoutTable, Problem, Split
from ..search_spaces.row_keys import distinct_rows
from .aims import PER_SECOND, Aims, beyond_supernode_gib, dominated_by, front_of
from .bounds import least_after, row_bounds_bytes, row_bounds_s, ruled_bounds_s
from .family_prices import price_family
from .reach import reachable
from .stages import balanced_cuts, best_partitions, cut_family, default_cuts, partitioned_exactly

EXACT_LAYOUTS = 250_000
"""Legal layouts up to which all are priced: so many take some 5 s on one core, and five times that where traffic is an aim; NSGA-II
takes as long as the former and misses most points of such fronts (results/benchmarks/README.md).
"""
ROWS_PER_BLOCK = 100_000
ROWS_AT_ONCE = 128  # rows that are replayed or partitioned before the front is looked at again
ROUNDING = 1e-9  # by which a bound may pass a price that equals it
MOST_COUNTS = 8  # counts of devices that are looked at
ONE_F_ONE_B = SCHEDULES.index("1f1b")
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Job:
    """A problem on some of its devices, with its space and its prices."""

    problem: Problem
    model: CostModel
    space: Space

    @classmethod
    def of(cls, problem: Problem, profile: Profile) -> Job:
        return cls(problem, CostModel(problem, profile), Space(problem))


@dataclass(frozen=True)
class Point:
    """One layout, stages given, with the figures of its aims; `job` is its place among the jobs."""

    figures: tuple[float, ...]
    job: int
    layout: Layout


@dataclass
class Archive:
    """Points that no other is at least as good as in every aim, in rising order of the first aim."""

    aims: int
    points: list[Point] = field(default_factory=list)
    figures: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.figures = np.empty((0, self.aims))

    def add(self, figures: Floats, point: Callable[[int], Point]) -> None:
        """Takes in rows (n, aims); `point` makes the point of a row, and is asked only for rows that stay."""
        known = len(self.points)
        both = np.concatenate([self.figures, figures])
        kept = front_of(both)
        self.points = [self.points[place] if place < known else point(int(place) - known) for place in kept]
        self.figures = both[kept]

    def hopeful(self, figures: Floats) -> np.ndarray:
        """Which rows (n, aims) no point of the archive is at least as good as in every aim, (n,)."""
        return ~dominated_by(figures, self.figures)

    def limits_s(self, aims: Aims, below: Floats, devices: Ints) -> Floats:
        """Step time that rows have to beat, (n,): from there on a point is at least as good in every aim, whatever is better than
        `below` (n, aims) in the aims that do not follow from the step time. Infinite where no point is.
        """
        timed = [aim for aim, name in enumerate(aims.names) if name in PER_SECOND]
        other = [aim for aim, name in enumerate(aims.names) if name not in PER_SECOND]
        seconds = np.stack([aims.seconds(aim, self.figures[:, [aim]], devices) for aim in timed]) if timed else None
        if seconds is None:
            return np.full(len(below), np.inf)
        better = (self.figures[:, None, other] <= below[None, :, other]).all(axis=2)
        return np.asarray(np.where(better, seconds.max(axis=0), np.inf).min(axis=0, initial=np.inf))


@dataclass(frozen=True)
class _Pending:
    """Rows of one shape priced from below, still to be cut; `of` are their places among the rows that they came with."""

    job: int
    rows: Rows
    below: Floats
    of: Ints


@dataclass(frozen=True)
class _Begun:
    """Rows of one shape priced at the cuts that the search would start from or, where these take replays to find, `cuts` being
    none, from below: figures (n, aims), peaks and which rows fit, (n,).
    """

    cuts: Cuts | None
    figures: Floats
    peak_bytes: Floats
    fits: Bools


def device_unit(cluster: ClusterSpec, devices: int) -> int:
    """The outermost unit (supernode, server, …) of which a job of so many devices has a whole number, more than one; else the
    innermost of more than one device.
    """
    sizes = [level.size for level in cluster.levels if level.size and level.size > 1]
    whole = [size for size in sizes if size < devices and devices % size == 0]
    return whole[-1] if whole else sizes[0]


def device_counts(problem: Problem) -> tuple[int, ...]:
    """Counts of devices to look at, the problem's own first: every number of whole units, or evenly spaced ones of them; and what
    divides the least of these.
    """
    unit = device_unit(problem.cluster, problem.devices)
    units = problem.devices // unit
    step = -(-units // MOST_COUNTS)
    whole = [count * unit for count in range(units - units % step, 0, -step)] if units > 1 else [problem.devices]
    parts = (count for count in range(whole[-1] - 1, 0, -1) if whole[-1] % count == 0)
    return tuple(dict.fromkeys((problem.devices, *whole, *parts)))


def jobs_of(problem: Problem, profile: Profile, aims: Aims) -> list[Job]:
    """The problem itself, and on fewer devices where an aim asks for that."""
    counts = device_counts(problem) if aims.fewer_devices else (problem.devices,)
    return [Job.of(problem.model_copy(update={"devices": count}), profile) for count in counts]


def exact_front(jobs: Sequence[Job], aims: Aims, known: Archive | None = None, progress: Progress | None = None) -> Archive:
    """The front of all legal layouts of the jobs, and of the points that are `known`."""
    archive = known or Archive(len(aims.names))
    pending: list[_Pending] = []
    legal = sum(job.space.listed for job in jobs)
    done = 0
    for place, job in enumerate(jobs):
        for frames in _blocks(job.space):
            table, _ = job.space.layouts(frames)
            pending += _price(archive, place, job, aims, table)
            done += len(table)
            if progress is not None:
                progress(0.8 * done / legal)
    for index, group in enumerate(pending):
        deque(_work_out(archive, jobs[group.job], aims, group), maxlen=0)
        if progress is not None:
            progress(0.8 + 0.2 * (index + 1) / len(pending))
    return archive


def sampled_front(archive: Archive, jobs: Sequence[Job], place: int, aims: Aims, table: LayoutTable) -> None:
    """Takes in the front of some legal layouts of a job."""
    for group in _price(archive, place, jobs[place], aims, table):
        deque(_work_out(archive, jobs[place], aims, group), maxlen=0)


def price_layouts(archive: Archive, jobs: Sequence[Job], place: int, aims: Aims, layouts: Sequence[Layout]) -> None:
    """Takes in layouts of one job whose stages are given."""
    job = jobs[place]
    for _, rows, cuts in _told(job, layouts):
        _add(archive, job, place, aims, rows, cuts)


def figures_of(job: Job, aims: Aims, layouts: Sequence[Layout]) -> Floats:
    """Figures of layouts of a job whose stages are given, (n, aims)."""
    found = np.empty((len(layouts), len(aims.names)))
    for members, rows, cuts in _told(job, layouts):
        found[members] = _figures(job, aims, rows, cuts)
    return found


def _told(job: Job, layouts: Sequence[Layout]) -> Iterator[tuple[Ints, Rows, Cuts]]:
    """Layouts whose stages are given, those of one shape together: their places, rows and cuts."""
    table = LayoutTable.from_layouts(layouts)
    for members in same_shape(table):
        part = table.take(members)
        yield members, job.model.rows(part), np.array([table.splits[int(index)].cuts for index in part.split])


def price_table(archive: Archive, jobs: Sequence[Job], place: int, aims: Aims, table: LayoutTable) -> Floats:
    """Prices some legal layouts of a job, takes in those that fit, and returns all figures, (n, aims).

    Those that the archive beats from below are not worked out to the end: replayed schedules keep their price from below, and
    what does not fit as the search would start from it counts as unfit: its figures are multiplied by how far it is from fitting,
    tenfold.
    """
    job, found = jobs[place], np.empty((len(table), len(aims.names)))
    whole = job.model.rows(table)
    for members in same_shape(table, depth=True):
        rows = whole.take(members)
        begun = _begun(job, aims, rows)
        over = 10.0 * np.maximum(begun.peak_bytes / job.model.usable_bytes, 1.0)
        found[members] = np.where(begun.fits[:, None], begun.figures, begun.figures * over[:, None])
        for group in _taken(archive, place, job, aims, rows, begun):
            for some, known in _work_out(archive, job, aims, group):
                found[members[group.of[some]]] = known
    return found


def refined(jobs: Sequence[Job], aims: Aims, point: Point) -> Point:
    """The point with the fastest split that needs no more memory, where the stack can be told one; never worse in any aim."""
    job = jobs[point.job]
    table = LayoutTable.from_layouts([point.layout])
    if not partitioned_exactly(job.problem, table).all():
        return point
    rows = job.model.rows(table)
    priced = job.model.price_cuts(rows, np.array([table.splits[0].cuts]))
    best = best_partitions(job.model, rows, np.full(1, np.inf), float(priced.peak_bytes[0]))
    if not np.isfinite(best.time_s[0]):
        return point
    figures = _figures(job, aims, rows, best.cuts)
    better = _maker(job, point.job, rows, best.cuts, figures)(0)
    return better if all(a <= b for a, b in zip(better.figures, point.figures, strict=True)) else point


def _blocks(space: Space) -> Iterator[np.ndarray]:
    """Frames whose layouts are priced together."""
    sizes = space.layouts_per_frame
    group = np.cumsum(sizes) // ROWS_PER_BLOCK
    for number in np.unique(group[sizes > 0]):
        yield np.nonzero((group == number) & (sizes > 0))[0]


def _price(archive: Archive, place: int, job: Job, aims: Aims, table: LayoutTable) -> list[_Pending]:
    """Takes in the rows that their starting split prices at once, and returns the others that may still stay, from below."""
    model, pending = job.model, []
    whole = model.rows(table)
    least_bytes = row_bounds_bytes(model, whole)
    hopeful = least_bytes <= model.usable_bytes
    if not aims.needs_traffic:  # which costs as much to bound as to work out
        step_s = row_bounds_s(model, whole, least_after(model, whole))
        stretch = aims.least_stretch(table.devices)
        below = aims.figures(step_s, least_bytes, table.devices, np.zeros(len(table)), stretch)
        hopeful &= archive.hopeful(below * (1.0 - ROUNDING))
    whole, least_bytes = whole.take(np.nonzero(hopeful)[0]), least_bytes[hopeful]
    for members in same_shape(whole.table) if len(whole) else ():
        rows = whole.take(members)
        if not aims.needs_traffic and not partitioned_exactly(job.problem, rows.table).all():
            rows = rows.take(np.nonzero(archive.hopeful(_ruled_below(job, aims, rows, least_bytes[members])))[0])
        if len(rows):
            pending += _taken(archive, place, job, aims, rows, _begun(job, aims, rows))
    return pending


def _ruled_below(job: Job, aims: Aims, rows: Rows, least_bytes: Floats) -> Floats:
    """Figures that rows of one shape are not better than however the search cuts them, (n, aims): far quicker than to price every
    way.
    """
    works, work = distinct_rows(rows.work_columns)
    step_s, devices = ruled_bounds_s(job.model, rows.take(works))[work], rows.table.devices
    return aims.figures(step_s, least_bytes, devices, np.zeros(len(rows)), aims.least_stretch(devices)) * (1.0 - ROUNDING)


def _begun(job: Job, aims: Aims, rows: Rows) -> _Begun:
    """Rows of one shape as the search would start with them."""
    model = job.model
    if int(rows.table.schedule[0]) == ONE_F_ONE_B:
        exact = partitioned_exactly(job.problem, rows.table).all()
        cuts = balanced_cuts(model, rows, int(rows.table.pp[0])) if exact else default_cuts(model, rows)
        priced = model.price_cuts(rows, cuts, closed_form=True)
        figures = _figures(job, aims, rows, cuts, priced.step_time_s, priced.peak_bytes)
        return _Begun(cuts, figures, priced.peak_bytes, priced.fits)
    family = cut_family(model, rows)
    priced, shape = price_family(model, rows, family), family.shape[:2]
    fits: Bools = np.reshape(priced.fits, shape)
    counted = fits | ~fits.any(axis=1, keepdims=True)
    step_s, peak_bytes = (
        np.where(counted, each.reshape(shape), np.inf).min(axis=1) for each in (priced.step_time_s, priced.peak_bytes)
    )
    traffic = _traffic_gib(job, aims, rows, family[:, 0], again=False)
    figures = aims.figures(step_s, peak_bytes, rows.table.devices, traffic, aims.least_stretch(rows.table.devices))
    return _Begun(None, figures, peak_bytes, np.asarray(fits.any(axis=1)))


def _taken(archive: Archive, place: int, job: Job, aims: Aims, rows: Rows, begun: _Begun) -> list[_Pending]:
    """Takes in the rows of one shape that their starting cuts price at once; the others that may still stay, from below."""
    cuts, figures, fits = begun.cuts, begun.figures, begun.fits
    if cuts is None:
        below = figures * (1.0 - ROUNDING)
        some = np.nonzero(fits & archive.hopeful(below))[0]
        return [_Pending(place, rows.take(some), below[some], some)] if len(some) else []
    whole = np.nonzero(fits)[0]
    archive.add(figures[whole], _maker(job, place, rows.take(whole), cuts[whole], figures[whole]))
    misfits = np.nonzero(~fits & partitioned_exactly(job.problem, rows.table))[0]
    if not len(misfits):
        return []
    part = rows.take(misfits)
    below = _below(job, aims, part, cuts[misfits])
    some = np.nonzero(archive.hopeful(below))[0]
    return [_Pending(place, part.take(some), below[some], misfits[some])] if len(some) else []


def _work_out(archive: Archive, job: Job, aims: Aims, group: _Pending) -> Iterator[tuple[Ints, Floats]]:
    """Prices the rows that the archive does not beat from below, a few at a time: places in the group, and their figures."""
    left = np.argsort(group.below[:, 0], kind="stable")
    while len(left):
        left = left[archive.hopeful(group.below[left])]
        some, left = left[:ROWS_AT_ONCE], left[ROWS_AT_ONCE:]
        if not len(some):
            return
        rows = group.rows.take(some)
        if int(rows.table.schedule[0]) != ONE_F_ONE_B:
            yield some, _add(archive, job, group.job, aims, rows, default_cuts(job.model, rows))
            continue
        limit_s = archive.limits_s(aims, group.below[some], rows.table.devices) * (1.0 + ROUNDING)
        limit_s -= job.problem.stack.step_overhead_s.value
        fits = np.nonzero(reachable(job.model, rows, np.full(len(rows), np.inf), job.model.usable_bytes))[0]
        rows, some, limit_s = rows.take(fits), some[fits], limit_s[fits]
        for members in same_shape(rows.table, depth=True) if len(rows) else ():
            part = rows.take(members)
            best = best_partitions(job.model, part, limit_s[members], job.model.usable_bytes)
            found = np.nonzero(np.isfinite(best.time_s))[0]
            if len(found):
                yield some[members[found]], _add(archive, job, group.job, aims, part.take(found), best.cuts[found])


def _add(archive: Archive, job: Job, place: int, aims: Aims, rows: Rows, cuts: Cuts) -> Floats:
    figures = _figures(job, aims, rows, cuts)
    archive.add(figures, _maker(job, place, rows, cuts, figures))
    return figures


def _figures(
    job: Job, aims: Aims, rows: Rows, cuts: Cuts, step_s: Floats | None = None, peak_bytes: Floats | None = None
) -> Floats:
    """Figures of the aims for rows of one shape at their cuts, (n, aims)."""
    if step_s is None or peak_bytes is None:
        priced = job.model.price_cuts(rows, cuts)
        step_s, peak_bytes = priced.step_time_s, priced.peak_bytes
    traffic, stretch = _traffic_gib(job, aims, rows, cuts, again=True), _stretch(aims, rows, cuts)
    return aims.figures(step_s, peak_bytes, rows.table.devices, traffic, stretch)


def _below(job: Job, aims: Aims, rows: Rows, cuts: Cuts) -> Floats:
    """Figures that no split of the rows is better than in any aim, (n, aims); `cuts` are any."""
    step_s = row_bounds_s(job.model, rows, least_after(job.model, rows))
    traffic = _traffic_gib(job, aims, rows, cuts, again=False)
    stretch = aims.least_stretch(rows.table.devices)
    return aims.figures(step_s, row_bounds_bytes(job.model, rows), rows.table.devices, traffic, stretch) * (1.0 - ROUNDING)


def _stretch(aims: Aims, rows: Rows, cuts: Cuts) -> Floats | float:
    """Expected time over training time of rows of one shape at their cuts, (n,)."""
    return 1.0 if aims.failures is None else aims.failures.stretch(rows.table.devices, saved_bytes(rows, cuts))


def _traffic_gib(job: Job, aims: Aims, rows: Rows, cuts: Cuts, again: bool) -> Floats:
    """GiB across supernodes, (n,); without `again` block depths redo nothing, whose share depends on the split."""
    if not aims.needs_traffic:
        return np.zeros(len(rows))
    chunks = rows.chunks(cuts)
    redone = layers_redone(job.model, rows, cuts)
    if not again:
        whole = recompute_depths(rows.table) >= len(job.model.blocks)
        redone = {name: np.where(whole, count, 0.0) for name, count in redone.items()}
    return beyond_supernode_gib(job.model, rows, redone, chunks.dense.sum(axis=1), chunks.expert.sum(axis=1))


def _maker(job: Job, place: int, rows: Rows, cuts: Cuts, figures: Floats) -> Callable[[int], Point]:
    num_layers = job.problem.model.num_layers

    def point(row: int) -> Point:
        table = rows.table
        split = Split(int(table.pp[row]), int(table.vpp[row]), tuple(int(c) for c in cuts[row]))
        layout = table.layout(row, num_layers)
        stages = split.stages(num_layers, layout.recompute)
        return Point(tuple(map(float, figures[row])), place, layout.model_copy(update={"stages": stages}))

    return point

"""The front of a space too large to price whole: Optuna's NSGA-II over the legal layouts, from good ones on.

A trial names every choice by its place among those that occur and stands for the legal layout nearest to it: every trial is legal.
Layouts that do not fit in memory are told as worse the further they are from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..search_spaces.choices import FRAME, PIPELINE
from ..search_spaces.enumeration import Space
from ..search_spaces.layout import DEGREES, Floats, LayoutTable
from .aims import Aims
from .pareto import Archive, Job, price_table, sampled_front

POPULATION = 64
GENERATIONS = 12
SAMPLED = 20_000
"""Layouts, evenly spaced over the legal ones, from whose front the first generation comes."""
KNOBS = tuple(name for name in PIPELINE if name != "num_microbatches")
Progress = Callable[[float], None]


def evolved_front(
    jobs: Sequence[Job],
    aims: Aims,
    known: Archive,
    generations: int = GENERATIONS,
    seed: int = 0,
    progress: Progress | None = None,
    sample: int | None = None,
) -> Archive:
    """A front of the jobs' layouts by NSGA-II (Deb et al. 2002), deterministic for a seed.

    It starts from the points that are `known` and from the front of an even sample of the space, which holds its extremes: of
    `sample` layouts, or as many as SAMPLED says.
    """
    import optuna

    archive, most = known, sample or SAMPLED
    for place in range(len(jobs)):
        sampled_front(archive, jobs, place, aims, sampled(jobs[place].space, most // len(jobs)))
    codes = [_Codes(job.space) for job in jobs]
    names = sorted({name for code in codes for name in code.sizes})
    sizes = {name: max(code.sizes.get(name, 1) for code in codes) for name in names}
    sizes["job"] = len(jobs)
    free = [name for name, size in sizes.items() if size > 1]  # a sampler takes time for every name
    distributions: dict[str, Any] = {name: optuna.distributions.IntDistribution(0, sizes[name] - 1) for name in free}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    study = optuna.create_study(directions=["minimize"] * len(aims.names), sampler=sampler)
    for point in _spread(archive, POPULATION):
        table = LayoutTable.from_layouts([point.layout])
        own = {"job": point.job, **codes[point.job].encoded(table)}
        study.enqueue_trial({name: own[name] for name in free})
    for generation in range(generations):
        trials = [study.ask(fixed_distributions=distributions) for _ in range(POPULATION)]
        wanted = [dict.fromkeys(sizes, 0) | trial.params for trial in trials]
        figures = _priced(archive, jobs, codes, aims, wanted)
        for trial, values in zip(trials, figures.tolist(), strict=True):
            study.tell(trial, values)
        if progress is not None:
            progress((generation + 1) / generations)
    return archive


def sampled(space: Space, most: int) -> LayoutTable:
    """Legal layouts spaced evenly over their listing, at most `most`."""
    per_frame = space.layouts_per_frame
    places = np.unique(np.linspace(0, int(per_frame.sum()) - 1, most).astype(np.int64))
    frame = np.searchsorted(np.cumsum(per_frame), places, side="right")
    inner = places - (np.cumsum(per_frame) - per_frame)[frame]
    return _layouts(space, frame, inner)


def _layouts(space: Space, frame: np.ndarray, inner: np.ndarray) -> LayoutTable:
    """The layouts at places `inner` (n,) of the lists of their frames."""
    distinct, which = np.unique(frame, return_inverse=True)
    sizes = space.layouts_per_frame[distinct]
    parts = []
    for index, each in enumerate(distinct):  # the listing of one frame is short; of all of them it is not
        table, _ = space.layouts(np.array([each]))
        parts.append(table.take(np.minimum(inner[which == index], sizes[index] - 1)))
    return LayoutTable.concatenate(parts)


def _spread(archive: Archive, most: int) -> list[Any]:
    """Points of the archive spaced evenly along it, the ends included."""
    places = np.unique(np.linspace(0, len(archive.points) - 1, min(most, len(archive.points))).astype(np.int64))
    return [archive.points[place] for place in places]


class _Codes:
    """Choices of one space as places among those that occur, and back to the nearest legal layout."""

    def __init__(self, space: Space) -> None:
        self._space = space
        frames = space.frames
        self._degrees = {name: np.unique(getattr(frames, name)) for name in FRAME}
        self._knobs = {name: np.unique(values) for name, values in space.pipeline_lists.table.items() if name in KNOBS}
        self._sharing = max(len(next(iter(space.sharing_lists.table.values()), [0])), 1)
        knobs = {name: len(values) for name, values in self._knobs.items()}
        self.sizes = {**{name: len(values) for name, values in self._degrees.items()}, **knobs, "sharing": self._sharing}
        self._live = np.nonzero(space.layouts_per_frame > 0)[0]
        self._place = {name: np.searchsorted(self._degrees[name], getattr(frames, name)[self._live]) for name in FRAME}

    def encoded(self, table: LayoutTable) -> dict[str, int]:
        """The places of a table's one row."""
        known = {**self._degrees, **self._knobs}
        codes = {name: int(np.searchsorted(values, getattr(table, name)[0])) for name, values in known.items()}
        codes = {name: min(code, len(known[name]) - 1) for name, code in codes.items()}
        sharing = self._space.sharing_lists.table
        same = [np.isclose(values, getattr(table, name)[0]) for name, values in sharing.items() if name not in DEGREES]
        return {**codes, "sharing": int(np.argmax(np.sum(same, axis=0))) if same else 0}

    def nearest(self, wanted: dict[str, int]) -> tuple[int, int]:
        """Frame and place in its list of the legal layout whose choices lie nearest, counted in places."""
        far = np.sum([np.abs(self._place[name] - wanted[name]) for name in FRAME], axis=0)
        frame = int(self._live[int(np.argmin(far))])
        pipeline, sharing = self._space.pipeline_lists, self._space.sharing_lists
        mine = pipeline.choice[pipeline.start[frame] : pipeline.start[frame] + pipeline.count[frame]]
        away = [
            np.abs(np.searchsorted(self._knobs[name], values[mine]) - wanted[name])
            for name, values in pipeline.table.items()
            if name in self._knobs
        ]
        first = int(np.argmin(np.sum(away, axis=0)))
        shares = sharing.choice[sharing.start[frame] : sharing.start[frame] + sharing.count[frame]]
        second = int(np.argmin(np.abs(shares - wanted["sharing"])))
        return frame, first * int(sharing.count[frame]) + second


def _priced(archive: Archive, jobs: Sequence[Job], codes: Sequence[_Codes], aims: Aims, wanted: Sequence[dict[str, int]]) -> Floats:
    """Figures of the layouts that some trials stand for, (n, aims); those that fit are taken in."""
    figures = np.empty((len(wanted), len(aims.names)))
    for place, code in enumerate(codes):
        mine = [i for i, each in enumerate(wanted) if each["job"] == place]
        if not mine:
            continue
        frame, inner = (np.array(column) for column in zip(*(code.nearest(wanted[i]) for i in mine), strict=True))
        order = np.argsort(frame, kind="stable")
        table = _layouts(jobs[place].space, frame[order], inner[order])
        figures[np.array(mine)[order]] = price_table(archive, jobs, place, aims, table)
    return figures

"""Optuna as an engine: a sampler proposes points, the nearest legal layouts that are new are priced, their times told back.

Sampling proves nothing by itself: the lower bound is the least bound of any frame, and the gap to it is stated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...search_spaces.layout import Floats
from ..bounds import frame_bounds
from ..found import Candidate, Counts, Found
from ..interrupts import stoppable
from .coordinates import Coordinates, Key, Picks, Places
from .refinement import overflow_s, refined
from .task import Task

if TYPE_CHECKING:
    import optuna

BUDGET = 512
"""Layouts that are priced."""
PER_BATCH = 32
"""Points asked for at once, and priced together."""
STARTS = 32
"""Frames of the least bounds whose plainest layouts are priced first."""
SEED = 0


def solve(task: Task) -> Found:
    """The best layouts that TPE finds from the frames of the least bounds; optimal only if the bounds say so."""
    return sample(task, tpe(SEED), BUDGET, STARTS).found


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    """A sampler that results/engines.md compares with others, here from the frames of least bound."""
    import optuna

    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=PER_BATCH)


@dataclass
class Sampled:
    """What a study found in `priced` layouts: `progress` holds (layouts priced, seconds, best step time) where that improved."""

    found: Found = field(default_factory=Found)
    priced: int = 0
    progress: list[tuple[int, float, float]] = field(default_factory=list)


def sample(task: Task, sampler: optuna.samplers.BaseSampler, budget: int, starts: int = 0) -> Sampled:
    """Prices up to `budget` layouts that the sampler proposes, or as many as there are, or until the time limit or Ctrl-C."""
    begun = time.monotonic()
    space, model = task.space, task.model
    bound, fits = frame_bounds(model, space)
    per_frame = space.layouts_per_frame
    counts = Counts(legal=space.legal, cut_by_memory=int(space.legal_per_frame[~fits].sum()))
    frames = np.flatnonzero(fits & (per_frame > 0))
    result = Sampled(Found(counts=counts, frames=len(space.frames)))
    least_bound_s = float(bound[frames].min(initial=np.inf))
    trials = _Trials(task, result, begun)
    possible = int(per_frame[frames].sum())
    if possible:
        coordinates = Coordinates(space, frames)
        first = frames[np.argsort(bound[frames], kind="stable")[:starts]]
        _study(trials, coordinates, sampler, first, min(budget, possible))
    found, result.priced = result.found, len(trials.value)
    found.best = sorted(trials.best.values(), key=lambda candidate: candidate.step_time_s)[: task.top]
    best_s = found.best[0].step_time_s if found.best else np.inf
    found.complete = len(trials.value) == possible or best_s <= least_bound_s
    found.lower_bound_s = best_s if found.complete else min(least_bound_s, best_s)
    found.frames_bound_s = least_bound_s
    counts.cut_by_bound = counts.legal - counts.scored - counts.cut_by_memory
    found.seconds = time.monotonic() - begun
    return result


def _study(trials: _Trials, coordinates: Coordinates, sampler: optuna.samplers.BaseSampler, first: Places, budget: int) -> None:
    """Asks and tells until the budget is priced; an interrupt leaves what is there."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    names, ends = coordinates.names, zip(coordinates.low, coordinates.high, strict=True)
    box: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.FloatDistribution(float(low), float(high)) for name, (low, high) in zip(names, ends, strict=True)
    }
    for point in coordinates.plainest(first):
        study.enqueue_trial(dict(zip(names, point.tolist(), strict=True)))
    with stoppable() as ended:
        while len(trials.value) < budget and not trials.out_of_time:
            batch = [study.ask(box) for _ in range(min(PER_BATCH, budget - len(trials.value)))]
            points = np.array([[trial.params[name] for name in names] for trial in batch]).reshape(len(batch), len(names))
            for trial, value in zip(batch, trials.priced(coordinates.nearest(points, trials.value)), strict=True):
                study.tell(trial, value)
            trials.heard(len(trials.value) / budget)
    if ended.by is not None and not trials.best:
        raise ended.by


class _Trials:
    """The layouts that were priced: their values by place, and the best of each frame."""

    def __init__(self, task: Task, result: Sampled, begun: float) -> None:
        self._task, self._result, self._begun = task, result, begun
        self.value: dict[Key, float] = {}
        self.best: dict[int, Candidate] = {}
        self.heard: Callable[[float], None] = task.progress or (lambda share: None)

    @property
    def out_of_time(self) -> bool:
        limit_s = self._task.time_limit_s
        return limit_s is not None and time.monotonic() - self._begun > limit_s

    def priced(self, keys: list[Key]) -> list[float]:
        """The logarithm of the step time of each layout, none of which was priced before."""
        model, picks = self._task.model, Picks.of(keys)
        rows = model.rows(self._task.space.combined(picks.frames, picks.pipeline, picks.sharing))
        found = refined(model, rows)
        fits = np.isfinite(found.step_time_s)
        seconds: Floats = np.where(fits, found.step_time_s, overflow_s(model, rows))
        values: list[float] = np.log(seconds).tolist()
        self.value |= dict(zip(keys, values, strict=True))
        counts = self._result.found.counts
        counts.scored += int(fits.sum())
        counts.cut_by_memory += int((~fits).sum())
        for row in np.flatnonzero(fits).tolist():
            frame, step_time_s = keys[row][0], float(found.step_time_s[row])
            if frame not in self.best or step_time_s < self.best[frame].step_time_s:
                self.best[frame] = Candidate(step_time_s, found.layout(row, model.problem.model.num_layers))
        self._record()
        return values

    def _record(self) -> None:
        best_s = min((candidate.step_time_s for candidate in self.best.values()), default=np.inf)
        progress = self._result.progress
        if np.isfinite(best_s) and (not progress or best_s < progress[-1][2]):
            progress.append((len(self.value), time.monotonic() - self._begun, best_s))

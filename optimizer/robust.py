"""The layout whose worst regret over scenarios is least: what the figures in doubt may cost, whichever way they fall.

A layout's regret in a scenario is its step time over the best of that scenario, less one. Candidates are the winners of every
scenario and of the nominal problem, each with its own stages, and those that win nowhere but stay near: whatever has a smaller
worst regret than the best of the winners is nowhere farther than that from a scenario's best, so that the nominal scenario and the
one that is worst for that winner are searched once more for all within it. All are priced exactly in all scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import Floats, Layout
from ..search_spaces.quantities import free_bytes
from .found import Candidate
from .incumbent import Setting, searched, times_s
from .interrupts import stoppable
from .result import Regret, Robust
from .scenarios import Scenario, scenarios
from .stages import EQUAL

PER_SCENARIO = 3  # best frames of each scenario that become candidates
COMPROMISES = 32  # frames looked for that win in no scenario
ALIKE = 9  # decimals of a regret beyond which two are the same
REPORTED = 8  # candidates that are reported
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Compared:
    """Candidates in scenarios: step times (candidates, scenarios), infinite where one does not fit, and the best of each."""

    layouts: tuple[Layout, ...]
    times_s: Floats
    best_s: Floats

    @property
    def regrets(self) -> Floats:
        """Shares above the best of each scenario, (candidates, scenarios); none in one that no layout fits."""
        possible = np.isfinite(self.best_s)
        return np.where(possible, self.times_s, 1.0) / np.where(possible, self.best_s, 1.0) - 1.0

    @property
    def minimax(self) -> int:
        """Place of the candidate with the least worst regret; of equal ones the fastest in the first scenario, the nominal."""
        return int(self.order[0])

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """Places of the candidates from the least worst regret to the greatest."""
        return np.lexsort((self.times_s[:, 0], np.round(self.regrets.max(axis=1), ALIKE)))


def robust(setting: Setting, nominal: Sequence[Layout], progress: Progress | None = None) -> Robust:
    """The robust choice beside the nominal winner, which is the first of the best `nominal` layouts.

    An interrupt or the setting's deadline ends it with the scenarios that were searched by then.
    """
    cases = scenarios(setting)
    compared = compare(cases, nominal, progress)
    tried = len(compared.best_s)
    names = tuple(case.name for case in cases[:tried])
    return Robust(
        scenarios=names,
        untried=tuple(case.name for case in cases[tried:]),
        best_s=_told(compared.best_s),
        nominal=_regret(compared, names, 0),
        robust=_regret(compared, names, compared.minimax),
        candidates=tuple(_regret(compared, names, int(place)) for place in compared.order[:REPORTED]),
        tried=len(compared.layouts),
    )


def compare(cases: Sequence[Scenario], nominal: Sequence[Layout], progress: Progress | None = None) -> Compared:
    """Searches every scenario, or the first of them until it is interrupted, and prices all candidates in all of these.

    A candidate fits in a scenario if its device holds it: the margin that a plan keeps is there for such doubts.
    """
    layouts = _distinct(nominal)
    searches: list[list[Candidate]] = []
    with stoppable():  # the scenarios that were searched stand
        for index, case in enumerate(cases):
            found = _winners(case.setting, layouts) if index else []
            searches.append(found)
            layouts = _distinct([*layouts, *(candidate.layout for candidate in found)])
            if progress is not None:
                progress((index + 1) / (len(cases) + 1))
        layouts = _distinct([*layouts, *_compromises(cases, _compared(cases, layouts, searches))])
    return _compared(cases, layouts, searches)


def _compared(cases: Sequence[Scenario], layouts: Sequence[Layout], searches: Sequence[Sequence[Candidate]]) -> Compared:
    """Layouts in the scenarios that were searched."""
    times = np.stack([_times_s(case.setting, layouts) for case in cases[: len(searches)]], axis=1)
    found_s = [min((candidate.step_time_s for candidate in found), default=np.inf) for found in searches]
    return Compared(tuple(layouts), times, np.minimum(times.min(axis=0), found_s))


def _compromises(cases: Sequence[Scenario], compared: Compared) -> Iterator[Layout]:
    """Layouts of frames that no candidate has, near enough to the best of a scenario to have a smaller worst regret.

    The nominal scenario and that of the worst regret, the fastest frames of each.
    """
    regrets = compared.regrets[compared.minimax]
    worst = float(regrets.max())
    if not np.isfinite(worst) or worst <= EQUAL:
        return
    for place in sorted({0, int(regrets.argmax())}):
        ceiling_s = float(compared.best_s[place]) * (1.0 + worst)
        yield from (candidate.layout for candidate in searched(cases[place].setting, COMPROMISES, ceiling_s).best)


def _winners(setting: Setting, known: Sequence[Layout]) -> list[Candidate]:
    """The best frames of a scenario that are faster than the candidates so far let expect."""
    usable = setting.model().usable_bytes
    times = np.sort(times_s(setting, known, usable))
    ceiling = float(times[min(PER_SCENARIO, len(times)) - 1])
    return searched(setting, PER_SCENARIO, ceiling * (1.0 - EQUAL)).best


def _times_s(setting: Setting, layouts: Sequence[Layout]) -> Floats:
    return times_s(setting, layouts, free_bytes(setting.problem.cluster))


def _distinct(layouts: Sequence[Layout]) -> list[Layout]:
    """Each layout once, stages included; what the stack overlaps is left out, since it says nothing about the choice."""
    plain = (layout.model_copy(update={"overlap": {}}) for layout in layouts)
    return list({layout.model_dump_json(): layout for layout in plain}.values())


def _regret(compared: Compared, names: Sequence[str], place: int) -> Regret:
    own = compared.regrets[place]
    worst = int(own.argmax())
    return Regret(
        layout=compared.layouts[place],
        step_time_s=float(compared.times_s[place, 0]),
        worst=_told(own[[worst]])[0],
        worst_scenario=names[worst],
        mean=_told(own.mean(keepdims=True))[0],
        regrets=_told(own),
    )


def _told(values: Floats) -> tuple[float | None, ...]:
    """Numbers as a document can hold them: none for what is infinite."""
    return tuple(float(value) if np.isfinite(value) else None for value in values)

"""Answers beyond the fastest layout: fronts over several aims, what changed hardware would bring, what doubtful figures may
cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..cost_models.profile import Profile
from .aims import STEP_TIME, Aims, best_in, front_of, knee_place, least_place, representatives
from .deadline import NEVER, Deadline
from .endurance import goodput_of
from .evaluation import price_layout
from .evolution import GENERATIONS, POPULATION, SAMPLED, evolved_front
from .incumbent import Setting, searched
from .interrupts import stoppable
from .pareto import EXACT_LAYOUTS, Archive, Job, Point, exact_front, figures_of, jobs_of, price_layouts, refined
from .planner import beside
from .result import FrontCertificate, FrontPoint, Plan, PricedLayout
from .robust import robust
from .sensitivity import sensitivity
from .stages import EQUAL
from .study import Refine, study
from .ties import ties

SHOWN = 16
KNEE = "knee"
"""The mark of the suggested compromise: of the shown layouts the one whose largest shortfall is least, each aim scaled from its
least to its greatest value among them."""
Progress = Callable[[str, float], None]
Heard = Callable[[float], None]


@dataclass(frozen=True)
class Questions:
    """What is asked beside the plan, of which `top` layouts are told."""

    aims: Aims
    sensitivity: bool = False
    robust: bool = False
    refine: Refine | None = None
    top: int = 5


def answered(
    found: Plan,
    profile: Profile,
    asked: Questions,
    progress: Progress | None = None,
    deadline: Deadline = NEVER,
) -> Plan:
    """The plan with the answers to what else was asked; sensitivity, robustness and refinement are those of its step time.

    Each question gets the time that the ones before it leave, none after an interrupt. The plan says what is not answered, or not
    wholly.
    """
    fastest, setting, unanswered = found, Setting(found.problem, profile, deadline), list[str]()
    questions = (
        (asked.sensitivity, "sensitivity", "changing the hardware", _sensitivity),
        (asked.robust, "robust", "trying scenarios", _robust),
        (asked.refine is not None, "refine", "refining", _refined),
        (asked.aims.names != (STEP_TIME,), "objective", "weighing aims", _weighed),
    )
    for _, name, stage, answer in (question for question in questions if question[0]):
        left = "was not taken up"
        if not deadline.passed:
            left = "was not answered"
            with stoppable():
                told = deadline.hearing(None if progress is None else partial(progress, stage))
                found, left = answer(found, setting, fastest, asked, told)
        if left:
            why = "interrupted" if deadline.interrupted else f"the time limit of {deadline.limit_s:g} s had passed"
            unanswered.append(f"{name} {left}: {why}")
    return found.model_copy(update={"unanswered": (*found.unanswered, *unanswered)}) if unanswered else found


def _sensitivity(found: Plan, setting: Setting, fastest: Plan, _: Questions, progress: Heard) -> tuple[Plan, str]:
    """The plan with its table and thresholds, and what is missing of them in words."""
    changed = sensitivity(setting, fastest.plan.layout, fastest.plan.step_time_s, progress)
    said = f"is answered but for {changed.unanswered} of its figures" if changed.unanswered else ""
    return found.model_copy(update={"sensitivity": changed}), said


def _robust(found: Plan, setting: Setting, fastest: Plan, _: Questions, progress: Heard) -> tuple[Plan, str]:
    """Likewise with its regrets over scenarios."""
    tried = robust(setting, [one.layout for one in (fastest.plan, *fastest.alternatives)], progress)
    count = len(tried.scenarios)
    said = f"is answered for {count} of {count + len(tried.untried)} scenarios" if tried.untried else ""
    return found.model_copy(update={"robust": tried}), said


def _refined(found: Plan, setting: Setting, fastest: Plan, asked: Questions, progress: Heard) -> tuple[Plan, str]:
    """Likewise with what a study found around it."""
    assert asked.refine is not None
    made = study(setting, fastest, asked.refine, progress)
    said = f"is answered by {made.trials} of {asked.refine.trials} trials" if made.stopped else ""
    return found.model_copy(update={"refined": made}), said


def _weighed(found: Plan, setting: Setting, _: Plan, asked: Questions, progress: Heard) -> tuple[Plan, str]:
    """Likewise with the front of several aims, or led by another."""
    found = with_front(found, setting, asked.aims, asked.top, progress)
    stopped = found.front_certificate is not None and found.front_certificate.stopped
    return found, "is answered by the layouts that were priced so far" if stopped else ""


def with_front(found: Plan, setting: Setting, aims: Aims, top: int, progress: Callable[[float], None] | None = None) -> Plan:
    """The plan least in the first aim (of equal ones the fastest) and the front of several aims.

    Of one aim for which jobs on fewer devices are looked at, the front of it and the step time: what there is on other counts.
    """
    begun = time.monotonic()
    aims = aims.among_failures_of(setting.problem)
    counted = aims if len(aims.names) > 1 else replace(aims, names=(*aims.names, STEP_TIME))
    jobs = jobs_of(setting.problem, setting.profile, counted)
    bounds_s, counts = [found.certificate.lower_bound_s or 0.0], [setting.problem.devices]
    archive = Archive(len(counted.names))
    price_layouts(archive, jobs, 0, counted, [one.layout for one in (found.plan, *found.alternatives)])
    legal = sum(job.space.listed for job in jobs)
    exact = legal <= EXACT_LAYOUTS
    with stoppable() as ended:  # the layouts that were priced stand
        for place, job in enumerate(jobs[1:], start=1):
            fastest = searched(replace(setting, problem=job.problem), 1).best
            if fastest:
                price_layouts(archive, jobs, place, counted, [candidate.layout for candidate in fastest])
                bounds_s.append(fastest[0].step_time_s)
                counts.append(job.problem.devices)
        (exact_front if exact else evolved_front)(jobs, counted, archive, progress=progress)
    stopped = ended.stopped
    points, within = _shown(jobs, counted, archive)
    least = None if stopped or found.certificate.gap is None else counted.least(bounds_s, counts)
    certificate = FrontCertificate(
        method="exact" if exact else "nsga2",
        stopped=stopped,
        covers=_covers(jobs, exact, stopped),
        aims=counted.names,
        units={name: counted.unit(name) for name in counted.names},
        legal=legal,
        size=len(archive.points),
        within=within,
        seconds=time.monotonic() - begun,
        lower_bound=least,
        gap=None if least is None else max(0.0, float(_figures(points)[:, 0].min()) / least - 1.0),
    )
    soonest = found.plan
    found = _led_by(found, setting, jobs, counted, points, top)
    front = _front(jobs, counted, points) if len(aims.names) > 1 or aims.fewer_devices else None
    goodput = None if aims.failures is None else goodput_of(aims.failures, found.plan, soonest)
    return found.model_copy(update={"front": front, "front_certificate": certificate, "goodput": goodput})


def _shown(jobs: list[Job], aims: Aims, archive: Archive) -> tuple[list[Point], float]:
    """Points that stand for the whole front, refined, by rising step time (or first aim), and within what share they do."""
    figures = archive.figures
    always = [*(least_place(figures, aim, aims.names) for aim in range(len(aims.names))), knee_place(figures)]
    kept, within = representatives(figures, always, SHOWN)
    points = [refined(jobs, aims, archive.points[place]) for place in kept]
    points = [points[place] for place in front_of(_figures(points))]
    by = aims.names.index(STEP_TIME) if STEP_TIME in aims.names else 0
    return sorted(points, key=lambda point: point.figures[by]), within


def _led_by(found: Plan, setting: Setting, jobs: list[Job], aims: Aims, points: list[Point], top: int) -> Plan:
    """The plan with the least of the first aim in front, followed by the points that give up least of it, or where there are none
    by the fastest layouts; each with its figures, and which of them tie in that aim.

    Where that aim is the step time, what was searched and proved stands as it is. The certificate goes on speaking of step time.
    """
    first = aims.names[0]
    if first == STEP_TIME:
        return found
    best = points[least_place(_figures(points), 0, aims.names)]
    job, certificate = jobs[best.job], found.certificate
    winner = price_layout(job.model, best.layout, simulated=True)
    (winner,) = _with_aims(job, aims, [winner])
    others = sorted((point for point in points if point is not best and point.job == best.job), key=lambda point: point.figures)
    priced = [price_layout(job.model, one.layout, simulated=False) for one in others[: top - 1]]
    if not others and best.job == 0:  # the fastest layout is the least in both
        priced = list(found.alternatives)
    alternatives = sorted(_with_aims(job, aims, priced), key=lambda one: (one.aims or {})[first])
    gap = None if certificate.lower_bound_s is None else winner.step_time_s / certificate.lower_bound_s - 1.0
    status = "feasible" if gap is None or gap > EQUAL else certificate.status
    return found.model_copy(
        update={
            "problem": job.problem,
            "plan": winner,
            "certificate": certificate.model_copy(update={"gap": gap, "status": status}),
            "alternatives": tuple(beside(job.problem, winner, other) for other in alternatives),
            "ties": ties(job.problem, setting.profile, winner, alternatives, first),
        }
    )


def _with_aims(job: Job, aims: Aims, priced: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Layouts of a job with their figures of the aims."""
    figures = figures_of(job, aims, [one.layout for one in priced]) if priced else ()
    named = (dict(zip(aims.names, row.tolist(), strict=True)) for row in figures)
    return [one.model_copy(update={"aims": own}) for one, own in zip(priced, named, strict=True)]


def _front(jobs: list[Job], aims: Aims, points: list[Point]) -> tuple[FrontPoint, ...]:
    """Points in the plan's shape, the extremes and the knee marked."""
    figures = _figures(points)
    marks: list[list[str]] = [[] for _ in points]
    for aim, name in enumerate(aims.names):
        marks[least_place(figures, aim, aims.names)].append(best_in(name))
    marks[knee_place(figures)].append(KNEE)
    found = []
    for point, own in zip(points, marks, strict=True):
        priced = price_layout(jobs[point.job].model, point.layout, simulated=False)
        shape = {name: getattr(priced, name) for name in PricedLayout.model_fields}
        shape["aims"] = dict(zip(aims.names, point.figures, strict=True))
        found.append(FrontPoint(**shape, marks=tuple(own)))
    return tuple(found)


def _figures(points: list[Point]) -> np.ndarray:
    return np.array([point.figures for point in points])


def _covers(jobs: list[Job], exact: bool, stopped: bool) -> str:
    """What is proved of a front, in words."""
    legal = sum(job.space.listed for job in jobs)
    counts = [job.problem.devices for job in jobs]
    where = f", on {', '.join(map(str, counts))} devices" if len(counts) > 1 else ""
    each = " on each of these counts" if len(counts) > 1 else ""
    if stopped:
        return (
            f"stopped before all was priced that the method looks at of {legal:,} legal layouts{where}: what is shown is the front "
            f"of those that were. Only the least step time on {counts[0]} devices is proved."
        )
    if exact:
        return (
            f"all {legal:,} layouts{where} with everything overlapped that the stack can, each with the split that the search "
            "starts from or, where that does not fit, the fastest that does: none is better than the front in one aim without "
            "being worse in another. Those shown then got the fastest split that needs no more memory. Other splits are covered "
            f"for the least step time{each} only."
        )
    return (
        f"{legal:,} legal layouts{where} are too many to price: NSGA-II, {GENERATIONS} generations of {POPULATION}, started from "
        f"the fastest layouts{each} and from the front of {SAMPLED:,} evenly spaced ones. Only the least step time{each} is proved."
    )

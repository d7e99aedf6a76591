"""The closed loop with real runs: which layout to run next, and what the runs so far have taught.

Everything follows from the study's trials: told runs calibrate the stack's figures (the same site layer as `calibrate --site`) and
move the limit of memory; the search then runs with both, and `forecast` says which of its layouts and their neighbours is most
worth a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from ..cost_models.calibration import Calibration, fit_pairs
from ..cost_models.details import model_flops
from ..cost_models.intervals import REPEATS
from ..cost_models.memory import GIB
from ..cost_models.profile import Profile, load_profile
from ..cost_models.run_layouts import Job
from ..cost_models.run_measures import implied_mfu
from ..cost_models.runs import Run
from ..cost_models.step import CostModel, same_shape
from ..cost_models.validation import Outcome
from ..search_spaces.choices import FRAME
from ..search_spaces.cluster import Figure
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.layout import Bools, Layout, LayoutTable, Problem, Split
from ..search_spaces.quantities import MIB, free_bytes, usable_bytes
from ..search_spaces.workload import MemoryMargin
from .assumptions import assumptions
from .deadline import NEVER
from .evaluation import price_layout
from .explain import explain_infeasible
from .forecast import Ledger, forecast
from .found import Counts, Found
from .recutting import settled
from .result import Certificate, Plan
from .search import Search
from .stages import default_cuts
from .tuning_study import Proposal, Subject, TuningStudy, layout_key

FRAMES = 8  # the fastest frames, whose best layouts and neighbours are candidates
NEIGHBOURS = 64  # of all of them, the fastest predicted
CALIBRATED_FROM = 3
"""Runs from which proposals rest on calibrated figures: one or two tell what layouts are off by together, which `forecast` learns
too, but not which of the figures is to blame (replayed on published runs, results/tune)."""
STOP = REPEATS
"""A run that is expected to gain less than what repeats of one run differ by cannot show its gain."""
LONGEST_STEP_S = 7 * 86400.0  # beyond it a number is a slip
LEAST_TO_STOP = 3  # results before that, replayed on published runs, left 2.4 % to gain where three left 1 %
CHOICES: tuple[tuple[str, ...], ...] = (
    ("micro_batch",),
    ("vpp", "schedule"),
    ("recompute_mode", "recompute_modules", "recompute_layers"),
    ("sharding", "hsdp"),
    ("cp_type",),
    ("rank_order",),
    ("optimizer_offload", "activation_offload"),
)
"""What neighbours of one frame differ in: one of these."""
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Lessons:
    """What told runs say: figures of the stack, measured over predicted peaks, and how full a device may be predicted to get.

    `calibration` is None before the first run; `profile` holds its figures from CALIBRATED_FROM runs on. `peak_factor` multiplies
    predicted peaks; `limit_bytes` is the largest that is proposed, before that factor, and `out_bytes` the least that ran out.
    """

    profile: Profile
    calibration: Calibration | None
    peak_factor: float
    limit_bytes: float
    out_bytes: float


@dataclass(frozen=True)
class Standing:
    """A study as it stands: proposals, what they taught, best so far, and what the next run is expected to gain."""

    subject: Subject
    proposals: tuple[Proposal, ...]
    lessons: Lessons
    best: Proposal | None
    gain: float | None  # share of the best step that the next run is expected to gain; None before the first result

    @property
    def results(self) -> int:
        """Runs that came back with a step time."""
        return sum(one.state == "ran" for one in self.proposals)

    @property
    def enough(self) -> bool:
        """Whether to stop: the next run is expected to gain less than a measurement can show, and enough runs say so."""
        return self.gain is not None and self.gain < STOP and self.results >= LEAST_TO_STOP


def ask(study: TuningStudy, subject: Subject, progress: Progress | None = None) -> tuple[Proposal, Plan]:
    """Proposes the layout to run next, marked as running, and the plan to launch it with.

    Raises Infeasible where no layout is left, InputError if the study tunes something else.
    """
    study.refuse_other(subject)
    taught: list[Proposal] | None = None
    while True:  # until no other worker has proposed the same at the same moment
        proposals = study.proposals()
        if taught != _taught(proposals):
            taught = _taught(proposals)
            candidates = look(subject, learn(subject, proposals), progress)
        choice = weigh(candidates, proposals)
        proposal = study.claim(subject, choice.layout, choice.expected_s, choice.peak_bytes / GIB, choice.gain)
        if proposal is not None:
            return proposal, launch_plan(subject, proposal, candidates.lessons, candidates)


def standing(study: TuningStudy, progress: Progress | None = None) -> Standing:
    """Where the study stands; InputError where it has no proposals."""
    subject = subject_of(study)
    proposals = study.proposals()
    lessons = learn(subject, proposals)
    try:
        gain = weigh(look(subject, lessons, progress), proposals).gain
    except Infeasible:
        gain = 0.0
    return Standing(subject, tuple(proposals), lessons, _best(proposals), gain)


def _taught(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Those whose results calibration and memory learn from."""
    return [p for p in proposals if p.state in ("ran", "out of memory")]


def _best(proposals: Sequence[Proposal]) -> Proposal | None:
    return min((p for p in proposals if p.measured_s), key=lambda p: p.measured_s or math.inf, default=None)


def subject_of(study: TuningStudy) -> Subject:
    """What the study tunes; InputError where nothing was proposed yet."""
    subject = study.subject()
    if subject is None:
        raise InputError(f"study {study.name!r} has no proposals yet; paraplan tune ask MODEL … makes the first")
    return subject


def again(study: TuningStudy, number: int) -> tuple[Proposal, Plan]:
    """A running proposal once more, with its plan; InputError where it is not running."""
    subject, proposal = subject_of(study), study.proposal(number, "--again")
    if proposal.state != "running":
        raise InputError(f"--again {number}: {proposal.state} already; only a running proposal is handed out again")
    return proposal, launch_plan(subject, proposal, learn(subject, study.proposals()))


def refuse_impossible(subject: Subject, proposal: Proposal, step_time_s: float | None, peak_gib: float | None) -> None:
    """InputError for a result that no device can bring: faster than its peak, longer than any step, fuller than its memory."""
    problem, device = subject.problem, subject.problem.cluster.accelerator
    if step_time_s is not None and step_time_s > LONGEST_STEP_S:
        raise InputError(f"--step-time {step_time_s:g}: no step takes more than a week; give the seconds of one step")
    if step_time_s is not None:
        flops = (
            model_flops(CostModel(problem, load_profile(device.name, subject.profile)).layers)[0] * problem.workload.global_batch
        )
        job = outcome_of(subject, proposal).job
        assert job is not None
        least = implied_mfu(job, 1.0, flops)[0]
        if step_time_s < least:
            said = f"is faster than the peak of {problem.devices} x {device.name} allows ({least:.3g} s)"
            raise InputError(f"--step-time {step_time_s:g}: {said}; give the seconds of one whole step")
    most = device.memory_bytes.value / GIB
    if peak_gib is not None and peak_gib > most:
        raise InputError(f"--peak-gib {peak_gib:g}: {device.name} has {most:.4g} GiB; give the peak of one device, in GiB")


def learn(subject: Subject, proposals: Sequence[Proposal]) -> Lessons:
    """What the runs so far have taught."""
    problem, name = subject.problem, subject.problem.cluster.accelerator.priced_as
    profile = load_profile(name, subject.profile)
    ran = [p for p in proposals if p.state == "ran"]
    calibration = None
    if ran:
        outcomes = [outcome_of(subject, p) for p in ran]
        calibration = fit_pairs({(problem.stack.name, name): outcomes}, subject.profile, shipped=True).pairs[0]
    if calibration is not None and len(ran) >= CALIBRATED_FROM:
        profile = with_figures(profile, problem.stack.name, calibration.figures())
    ratios = [p.measured_gib / p.predicted_gib for p in ran if p.measured_gib]
    factor = float(np.median(ratios)) if ratios else 1.0
    out = [p.predicted_gib * GIB for p in proposals if p.state == "out of memory"]
    limit = limit_bytes(problem, factor, [p.predicted_gib * GIB for p in ran], out)
    return Lessons(profile, calibration, factor, limit, min(out, default=math.inf))


def limit_bytes(problem: Problem, peak_factor: float, ran: Sequence[float], out_of_memory: Sequence[float]) -> float:
    """The largest predicted peak that is proposed: what the margin allows, or what ran; below what ran out unless more ran.

    Peaks that were measured correct the predictions first.
    """
    free = free_bytes(problem.cluster)
    allowed = free * (1.0 - problem.workload.memory_margin.fraction) / peak_factor
    return max(min(allowed, min(out_of_memory, default=math.inf) - MIB), max(ran, default=0.0))


def outcome_of(subject: Subject, proposal: Proposal) -> Outcome:
    """A told run in the form that calibration takes."""
    problem = subject.problem
    cells = {"family": "this study", "model": problem.model.name, "status": "ok"}
    run = Run(cells, f"trial {proposal.number}")
    job = Job(run, problem, proposal.layout, problem.workload.precision, "allocated fullest")
    return Outcome(run, measured_step_time_s=proposal.measured_s, job=job)


def with_figures(profile: Profile, stack: str, figures: Mapping[str, Figure]) -> Profile:
    """The profile with a stack's figures on its accelerator laid over those it has."""
    own = profile.stacks.get(stack, {})
    laid = {**own.get(profile.accelerator, {}), **figures}
    return profile.model_copy(update={"stacks": {**profile.stacks, stack: {**own, profile.accelerator: laid}}})


def launch_plan(subject: Subject, proposal: Proposal, lessons: Lessons, candidates: Candidates | None = None) -> Plan:
    """The proposal as a plan that exporters take. Its certificate says that it was proposed to learn, not proved the fastest."""
    model = CostModel(subject.problem, lessons.profile)
    priced = price_layout(model, proposal.layout, simulated=True)
    found = candidates.found if candidates else Found(counts=Counts(legal=1, scored=1))
    bound = min(found.lower_bound_s, priced.step_time_s)
    return Plan(
        paraplan=version("paraplan"),
        problem=subject.problem,
        assumptions=assumptions(subject.problem, lessons.profile, subject.profile),
        plan=priced,
        certificate=Certificate(
            status="feasible",
            space=candidates.space.words if candidates else "one layout",
            legal=found.counts.legal,
            scored=found.counts.scored,
            cut_by_bound=found.counts.cut_by_bound,
            cut_by_memory=found.counts.cut_by_memory,
            lower_bound_s=bound,
            gap=priced.step_time_s / bound - 1.0,
            seconds=found.seconds,
        ),
        notes={"tune": {"trial": proposal.number, "expected_gain": proposal.gain}},
    )


@dataclass(frozen=True)
class Candidates:
    """Layouts that may be proposed, by the lessons that they were searched with."""

    layouts: tuple[Layout, ...]
    lessons: Lessons
    model: CostModel
    found: Found
    space: Space


@dataclass(frozen=True)
class Choice:
    """The layout to run next: its step time as the runs so far let expect it; the gain is None before the first result."""

    layout: Layout
    expected_s: float
    peak_bytes: float
    gain: float | None


def look(subject: Subject, lessons: Lessons, progress: Progress | None = None) -> Candidates:
    """The best layouts of the fastest frames and their neighbours; Infeasible where nothing fits."""
    problem = _with_limit(subject.problem, lessons.limit_bytes)
    model, space = CostModel(problem, lessons.profile), Space(problem)
    found = Search(space, model, FRAMES).run(None if progress is None else lambda share: progress("searching", share))
    if not found.best and lessons.limit_bytes < usable_bytes(subject.problem):
        raise Infeasible(
            f"no layout is left to propose: none is predicted to stay within {lessons.limit_bytes / GIB:.1f} GiB, as runs taught"
        )
    if not found.best:
        raise explain_infeasible(problem, model, space)
    found.best = settled(model, found, NEVER).best[:FRAMES]
    best = [candidate.layout for candidate in found.best]
    return Candidates((*best, *_neighbours(model, space, best)), lessons, model, found, space)


def weigh(candidates: Candidates, proposals: Sequence[Proposal]) -> Choice:
    """The candidate that is most worth a run, at first the fastest by the model.

    Infeasible where all were proposed before, or fill a device as one that ran out.
    """
    counted = [p for p in proposals if p.state != "abandoned"]
    keyed = {layout_key(p.layout): p.layout for p in counted}
    for layout in candidates.layouts:
        keyed.setdefault(layout_key(layout), layout)
    layouts, model, lessons = list(keyed.values()), candidates.model, candidates.lessons
    table = LayoutTable.from_layouts(layouts)
    prices = model.price(table)
    reserved = model.problem.stack.reserved_over_allocated.value
    at = {state: np.array([i for i, p in enumerate(counted) if p.state == state], dtype=np.intp) for state in STATES}
    expected = forecast(
        Ledger(
            table=table,
            predicted_s=prices.step_time_s,
            full=prices.peak_bytes * lessons.peak_factor * reserved / free_bytes(model.problem.cluster),
            ran=at["ran"],
            measured_s=np.array([p.measured_s for p in counted if p.state == "ran"], dtype=np.float64),
            out_of_memory=at["out of memory"],
            failed=at["failed"],
            pending=at["running"],
        )
    )
    if expected.exhausted:
        raise Infeasible("no layout is left to propose: all were run, are being run, or fill a device as one that ran out does")
    place = expected.best if counted else 0  # before anything was asked, the plan itself
    gain = float(expected.gain[place]) if len(at["ran"]) else None
    return Choice(layouts[place], math.exp(expected.mean[place]), float(prices.peak_bytes[place]), gain)


STATES = ("ran", "out of memory", "failed", "running")


def _with_limit(problem: Problem, most_bytes: float) -> Problem:
    """The problem with the margin of memory that leaves so much of a device."""
    fraction = min(max(1.0 - most_bytes / free_bytes(problem.cluster), 0.0), 1.0 - 1e-9)
    margin = MemoryMargin(fraction=fraction, evaluated=problem.workload.memory_margin.evaluated)
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"memory_margin": margin})})


def _neighbours(model: CostModel, space: Space, best: Sequence[Layout]) -> list[Layout]:
    """Legal layouts that fit and differ in one choice from the best of their frame, the fastest predicted ones first."""
    if not best:
        return []
    frames = np.stack([getattr(space.frames, name) for name in FRAME], axis=1)
    own = np.array([[getattr(layout, name) for name in FRAME] for layout in best])
    places = np.array([int(np.flatnonzero((frames == row).all(axis=1))[0]) for row in own])
    every, member = space.layouts(places)
    centre = LayoutTable.from_layouts(best).take(member)
    differs = [_differs(every, centre, names) for names in CHOICES]
    kept = np.flatnonzero(np.sum(differs, axis=0) == 1)
    table, same_cuts = every.take(kept), ~differs[1][kept]
    splits = [Split.from_stages(layout.stages) for layout in best]
    cuts: list[Split] = [splits[frame] for frame in member[kept]]
    rows = model.rows(table)
    others = np.flatnonzero(~same_cuts)
    for group in same_shape(table.take(others)) if len(others) else ():
        some = others[group]
        pp, vpp = int(table.pp[some[0]]), int(table.vpp[some[0]])
        for row, found in zip(some, default_cuts(model, rows.take(some)), strict=True):
            cuts[row] = Split(pp, vpp, tuple(int(c) for c in found))
    distinct = tuple(dict.fromkeys(cuts))
    table = table.with_splits(np.array([distinct.index(split) for split in cuts]), distinct)
    prices = model.price(table)
    order = [int(row) for row in np.argsort(prices.step_time_s, kind="stable") if prices.fits[row]]
    return [table.layout(row, model.problem.model.num_layers) for row in order[:NEIGHBOURS]]


def _differs(first: LayoutTable, second: LayoutTable, names: Sequence[str]) -> Bools:
    return np.asarray(np.any([getattr(first, name) != getattr(second, name) for name in names], axis=0))

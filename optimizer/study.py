"""Optuna beyond enumeration: from the certified plan on, mixed and continuous knobs that no listing holds.

Samples are made legal by CP-SAT (`repair`), stages of plain 1F1B are cut exactly, and every layout is priced as the search prices
it. What comes back is never worse than the start in the same objective. It lies outside the certified space, so that nothing is
proved of it but its own price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from typing import Literal

import numpy as np

from ..cost_models.profile import Profile
from ..cost_models.step import CostModel
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import InputError
from ..search_spaces.inputs import check_precision
from ..search_spaces.layout import DEGREES, Floats, Ints, Layout, LayoutTable, Problem, Split
from ..search_spaces.workload import LARGEST_IMBALANCE, Precision
from .engines.refinement import overflow_s, refined
from .engines.sampling import PER_BATCH, tpe
from .evaluation import price_layout
from .incumbent import Setting, same_choice
from .interrupts import stoppable
from .repair import Repairs, keeps_rules
from .result import AtImbalance, AtPrecision, Moved, Plan, PricedLayout, Refined
from .search import Search
from .stages import EQUAL, partitioned_exactly
from .study_space import BUCKETS, REACH, Box, Choice, Run, Start, by_run, cut_at, table_of
from .ties import misjudged_by

TRIALS = 256
NEIGHBOURS = PER_BATCH // 2
"""Trials of a batch that are neighbours of the best so far; the sampler proposes the others."""
WIDER = 5
"""Frames from beyond the plan's list that a study starts from."""
TENTHS = ("none", *(f"optimizer:{tenth / 10:g}" for tenth in range(1, 11)))
QUARTERS = tuple(f"activations:{quarter / 4:g}" for quarter in range(1, 5))
KNOBS = (
    *(name for name in DEGREES if name != "num_microbatches"),
    "schedule",
    "optimizer_sharding",
    "recompute",
    "offload",
    "cp_type",
)
COVERS = (
    "outside the certified space: the frames, schedules and sharding of the plan, of its alternatives and of the fastest layouts "
    "with tenths of the optimizer on the host, or where the stack can quarters of the activations offloaded (at the greatest "
    "imbalance hedged), with any micro-batch that divides the batch, any recompute depth, any per mille of either, cuts of 1F1B "
    f"exact and others moved by up to {REACH} layers, and the same in each other precision that was permitted; for the best of "
    "these, where the framework can be told and reduces gradients once per step, buckets of 10 million to 2.56 billion of them; "
    "what is fixed stays. The certificate stands for the plan; of the refined layout only its price is known."
)
CAUTION = "changes what is learnt and not only how fast: no price covers convergence. Compare loss curves before relying on it."
UNTESTED = "No measured run has tested the price of buckets of another size than the framework's own: time both."
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Refine:
    """What a study is asked: how many samples, which imbalances of the experts the layout has to do well under, and in which
    precisions beside its own the job may run.

    Without imbalances the step time of the problem itself is made least; with them the worst or the mean over them.
    """

    trials: int = TRIALS
    imbalances: tuple[float, ...] = ()
    hedge: Literal["worst", "mean"] = "worst"
    seed: int = 0
    precisions: tuple[Precision, ...] = ()

    def check(self, problem: Problem) -> None:
        """Raises InputError, naming what is wrong for the problem."""
        if self.trials < 1:
            raise InputError(f"trials {self.trials}: must be at least 1")
        if self.hedge not in ("worst", "mean"):
            raise InputError(f"hedge {self.hedge!r} is not one of worst, mean")
        for value in self.imbalances:
            if not 1.0 <= value <= LARGEST_IMBALANCE:
                raise InputError(f"hedged imbalance {value:g}: must be from 1, every device as full as the others, to 1,000")
        if len(set(self.imbalances)) < len(self.imbalances):
            raise InputError("hedged imbalances: one is given twice; give each once")
        if self.imbalances and not problem.model.is_moe:
            raise InputError(f"hedged imbalances: {problem.model.name} has no experts; leave them out")
        for precision in self.precisions:
            check_precision(problem.cluster, problem.stack, precision)
        own = problem.workload.precision
        if self.precisions and set(self.precisions) == {own}:
            raise InputError(f"refined precisions: {own} is the plan's own; name another that the job may run in")

    def all_precisions(self, problem: Problem) -> tuple[Precision, ...]:
        """The problem's own, in which the certified plan runs whatever is permitted, then the others."""
        return tuple(dict.fromkeys((problem.workload.precision, *self.precisions)))

    @property
    def objective(self) -> str:
        """What is made least, in words."""
        if not self.imbalances:
            return "step time"
        return f"{self.hedge} step time at expert imbalance {', '.join(f'{value:g}' for value in self.imbalances)}"


@dataclass(frozen=True)
class _Priced:
    """A choice at the best cuts known of it: seconds under every imbalance, the objective, and what the sampler is told.

    Seconds are infinite where it does not fit.
    """

    cuts: Cuts
    times_s: tuple[float, ...]
    value_s: float
    told: float


def study(setting: Setting, found: Plan, asked: Refine, progress: Callable[[float], None] | None = None) -> Refined:
    """The best layout of a study around a plan and other good ones; an interrupt ends it with the best so far."""
    heard = progress or (lambda share: None)
    known = [one.layout for one in (found.plan, *found.alternatives)]
    precisions = asked.all_precisions(setting.problem)
    settings = [replace(setting, problem=Run(precision).of(setting.problem)) for precision in precisions]
    starts = [_kept(each.problem, known) for each in settings]
    with stoppable() as listing:
        if found.certificate.status == "optimal":  # a search that was cut short is not followed by one that takes longer
            for place, each in enumerate(settings):
                told = setting.deadline.hearing(partial(_heard_part, heard, place, len(settings)))
                wider = _wider(each, known[0], asked, place == 0, told)
                starts[place] += [one for one in wider if not any(same_choice(one, other) for other in starts[place])]
    trials, box = _begun(setting, [Start.of(s.problem, one) for s, own in zip(settings, starts, strict=True) for one in own], asked)
    with stoppable() as sampling:
        if not listing.stopped:
            _sample(trials, box, asked, setting.deadline.hearing(lambda share: heard(0.5 + 0.5 * share)))
            trials.try_buckets(setting.problem)
    return _told(setting, found.plan, asked, trials, listing.stopped or sampling.stopped)


def _heard_part(heard: Callable[[float], None], done: int, parts: int, share: float) -> None:
    """Tells how far the listing is, the first half of a study, with `share` of the next of its parts done."""
    heard(0.5 * (done + share) / parts)


def _kept(problem: Problem, layouts: Sequence[Layout]) -> list[Layout]:
    """Those of the layouts that are legal in the precision of the problem."""
    legal = keeps_rules(problem, LayoutTable.from_layouts(layouts))
    return [layout for layout, fine in zip(layouts, legal.tolist(), strict=True) if fine]


def _wider(setting: Setting, layout: Layout, asked: Refine, listed: bool, progress: Callable[[float], None]) -> list[Layout]:
    """The fastest frames that beat a layout at the greatest imbalance hedged, with tenths of the optimizer or quarters of the
    activations offloaded.

    None where that would list nothing new, as far as the plain space was `listed` already. An exact search: where no fraction is
    listed, a frame that needs a little offload is known by what all of it costs, and would not be among the starts.
    """
    problem = _at_imbalance(setting.problem, max(asked.imbalances, default=setting.problem.workload.expert_imbalance))
    workload = problem.workload
    stack = problem.stack
    shares = (*(TENTHS if stack.optimizer_offload else ()), *(QUARTERS if stack.activation_offload else ()))
    if shares and "offload" not in workload.fix:
        workload = workload.model_copy(update={"fix": {**workload.fix, "offload": tuple(dict.fromkeys(("none", *shares)))}})
    elif listed and not asked.imbalances:
        return []
    problem = problem.model_copy(update={"workload": workload})
    model = CostModel(problem, setting.profile)
    own = model.price(LayoutTable.from_layouts([layout]))
    ceiling_s = float(own.step_time_s[0]) if own.fits[0] else math.inf
    found = Search(Space(problem), model, WIDER, setting.deadline.left_s, ceiling_s).run(progress)
    if not found.complete:
        raise KeyboardInterrupt
    return [candidate.layout for candidate in found.best]


def _begun(setting: Setting, starts: Sequence[Start], asked: Refine) -> tuple[_Trials, Box]:
    """A study without trials, whose first start is the plan."""
    pricers, box = _Pricers(setting, asked, starts), Box(setting.problem, starts)
    own = pricers.of(Run(starts[0].precision))
    repairs = Repairs(own.models[0], setting.problem, starts, box.recomputes)
    return _Trials(pricers, repairs, own.as_given(starts[0])), box


def _sample(trials: _Trials, box: Box, asked: Refine, progress: Callable[[float], None]) -> None:
    """Asks and tells: the starts first, then the sampler's proposals with neighbours of the best among them."""
    import optuna

    ranges = box.distributions
    if not ranges:
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.create_study(sampler=tpe(asked.seed))
    for place, start in enumerate(trials.starts):
        sampler.enqueue_trial(box.params(start.choice(place)))
    while trials.asked < asked.trials:
        size = min(PER_BATCH, asked.trials - trials.asked)
        if trials.asked:
            for choice in trials.fresh(box.neighbours(trials.best), min(NEIGHBOURS, size)):
                sampler.enqueue_trial(box.params(choice))
        batch = [sampler.ask(ranges) for _ in range(size)]
        for trial, value in zip(batch, trials.told([box.read(trial.params) for trial in batch]), strict=True):
            sampler.tell(trial, value)
        progress(trials.asked / asked.trials)


@dataclass
class _Trials:
    """Choices that were priced, each by the pricer of how it runs, and the best; `start` is the plan as it was certified."""

    pricers: _Pricers
    repairs: Repairs
    start: _Priced
    asked: int = 0
    priced: dict[Choice, _Priced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best, self.found = self.starts[0].choice(0), self.start
        self._proposed: set[Choice] = set()

    @property
    def starts(self) -> Sequence[Start]:
        return self.repairs.starts

    def best_s(self, precision: str) -> float:
        """The least objective of what was priced in a precision, infinite where nothing of it fits."""
        values = [one.value_s for choice, one in self.priced.items() if self.starts[choice.start].precision == precision]
        certified = [self.start.value_s] if precision == self.starts[0].precision else []
        return min([*certified, *values], default=math.inf)

    def fresh(self, choices: Iterable[Choice], most: int) -> list[Choice]:
        """The first of the choices that were neither priced nor proposed before; now they are proposed."""
        unknown = (choice for choice in dict.fromkeys(choices) if choice not in self._proposed and choice not in self.priced)
        new = list(islice(unknown, most))
        self._proposed.update(new)
        return new

    def told(self, samples: Sequence[Choice]) -> list[float]:
        """What the sampler is told of samples, each of the nearest legal choice."""
        choices = self.repairs.made_legal(samples)
        self._price(list(dict.fromkeys(choice for choice in choices if choice not in self.priced)))
        self.asked += len(samples)
        return [self.priced[choice].told for choice in choices]

    def try_buckets(self, problem: Problem) -> None:
        """Prices the best choice with other buckets, where the stack can be told one."""
        if problem.stack.sends_buckets:
            self._price([replace(self.best, bucket=size) for size in BUCKETS])

    def _price(self, new: Sequence[Choice]) -> None:
        """Prices choices, and keeps the best."""
        for run, members in by_run(self.starts, new):
            some = [new[place] for place in members]
            for choice, priced in zip(some, self.pricers.of(run).priced(some), strict=True):
                self.priced[choice] = priced
                if priced.value_s < self.found.value_s * (1.0 - EQUAL):
                    self.best, self.found = choice, priced


@dataclass
class _Pricers:
    """A pricer for each way to run, made when it is first asked for."""

    setting: Setting
    asked: Refine
    starts: Sequence[Start]
    known: dict[Run, _Pricer] = field(default_factory=dict)

    def of(self, run: Run) -> _Pricer:
        if run not in self.known:
            self.known[run] = _Pricer(run.of(self.setting.problem), self.setting.profile, self.asked, self.starts)
        return self.known[run]


class _Pricer:
    """Prices choices that run alike under every imbalance that is hedged, or under the problem's own."""

    def __init__(self, problem: Problem, profile: Profile, asked: Refine, starts: Sequence[Start]) -> None:
        self.problem, self.starts = problem, starts
        imbalances = asked.imbalances or (problem.workload.expert_imbalance,)
        self.models = tuple(CostModel(_at_imbalance(problem, value), profile) for value in imbalances)
        self._worst = asked.hedge == "worst"

    def as_given(self, start: Start) -> _Priced:
        """A start at its own stages."""
        times_s = self._times_s(start.row)
        return _Priced(start.cuts, tuple(times_s[:, 0].tolist()), float(self._value_s(times_s)[0]), math.nan)

    def priced(self, choices: Sequence[Choice]) -> list[_Priced]:
        """Legal choices, told cuts as they are and others at the best of those that are exact under one imbalance."""
        table = table_of(self.problem, self.starts, choices)
        cuts = [choice.cuts or self.starts[choice.start].cuts for choice in choices]
        times_s = np.full((len(self.models), len(choices)), np.inf)
        exact = partitioned_exactly(self.problem, table)
        self._improve(table, cuts, times_s, np.flatnonzero(~exact), cuts)
        for model in self.models:
            part = np.flatnonzero(exact)
            best = refined(model, model.rows(table.take(part))) if len(part) else None
            if best is not None:
                fits = np.flatnonzero(np.isfinite(best.step_time_s))
                found = [tuple(best.cuts[row].tolist()) for row in fits.tolist()]
                self._improve(table, cuts, times_s, part[fits], dict(zip(part[fits].tolist(), found, strict=True)))
        value_s = self._value_s(times_s)
        told = np.log(np.where(np.isfinite(value_s), value_s, self._overflow_s(table)))
        each = zip(cuts, times_s.T.tolist(), value_s.tolist(), told.tolist(), strict=True)
        return [_Priced(own, tuple(times), value, log) for own, times, value, log in each]

    def _improve(
        self, table: LayoutTable, cuts: list[Cuts], times_s: Floats, rows: Ints, tried: Mapping[int, Cuts] | Sequence[Cuts]
    ) -> None:
        """Takes over the cuts `tried` of some rows where these are better by them."""
        if not len(rows):
            return
        there = self._times_s(cut_at(table.take(rows), [tried[row] for row in rows.tolist()]))
        better = self._value_s(there) < self._value_s(times_s[:, rows])
        times_s[:, rows[better]] = there[:, better]
        for row in rows[better].tolist():
            cuts[row] = tried[row]

    def _times_s(self, table: LayoutTable) -> Floats:
        """Step times of rows with cuts under every imbalance, infinite where they do not fit, (imbalances, n)."""
        prices = [model.price(table) for model in self.models]
        return np.stack([np.where(price.fits, price.step_time_s, np.inf) for price in prices])

    def _value_s(self, times_s: Floats) -> Floats:
        return np.asarray(times_s.max(axis=0) if self._worst else times_s.mean(axis=0))

    def _overflow_s(self, table: LayoutTable) -> Floats:
        return np.asarray(np.max([overflow_s(model, model.rows(table)) for model in self.models], axis=0))


def _at_imbalance(problem: Problem, value: float) -> Problem:
    workload = problem.workload.model_copy(update={"expert_imbalance": value})
    return problem.model_copy(update={"workload": workload})


def _told(setting: Setting, before: PricedLayout, asked: Refine, trials: _Trials, stopped: bool) -> Refined:
    """What a study found, in the words of plan.json."""
    start, best = trials.start, trials.found
    own, run = Run(trials.starts[0].precision), Run(trials.starts[trials.best.start].precision, trials.best.bucket)
    problem = run.of(setting.problem)
    if best is start:
        layout = before.layout
    else:
        row = cut_at(table_of(problem, trials.starts, [trials.best]), [best.cuts])
        layout = row.layout(0, problem.model.num_layers)
    sampled = [one for choice, one in trials.priced.items() if not choice.bucket]
    each = zip(asked.imbalances, start.times_s, best.times_s, strict=False)
    comparable = math.isfinite(start.value_s) and math.isfinite(best.value_s)
    return Refined(
        objective=asked.objective,
        start_s=_finite(start.value_s),
        refined_s=_finite(best.value_s),
        gain=1.0 - best.value_s / start.value_s if comparable else None,
        noise=misjudged_by(problem, setting.profile),
        moved=(*_run_otherwise(own, run), *_moved(before.layout, layout)),
        trials=trials.asked,
        repaired=trials.repairs.repaired,
        priced=len(sampled),
        unfit=sum(not math.isfinite(one.value_s) for one in sampled),
        seed=asked.seed,
        stopped=stopped,
        covers=COVERS,
        imbalances=tuple(AtImbalance(imbalance=x, start_s=_finite(a), refined_s=_finite(b)) for x, a, b in each),
        bucket=run.bucket or None,
        precision=run.precision if asked.precisions else None,
        caution=_caution(own, run),
        precisions=tuple(
            AtPrecision(precision=each, refined_s=_finite(trials.best_s(each)))
            for each in (asked.all_precisions(setting.problem) if asked.precisions else ())
        ),
        plan=before if best is start else price_layout(CostModel(problem, setting.profile), layout, simulated=True),
    )


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _caution(before: Run, after: Run) -> str | None:
    """What no price or no measured run covers of how the software runs otherwise."""
    learnt = f"{after.precision} {CAUTION}" if after.precision != before.precision else ""
    return " ".join(filter(None, (learnt, UNTESTED if after.bucket else ""))) or None


def _run_otherwise(before: Run, after: Run) -> Iterator[Moved]:
    """What of the software was moved: the precision, and buckets of gradients."""
    if after.precision != before.precision:
        yield Moved(knob="precision", before=before.precision, after=after.precision)
    if after.bucket:
        yield Moved(knob="gradient_bucket", before="as the stack has it", after=f"{after.bucket:,} parameters")


def _moved(before: Layout, after: Layout) -> tuple[Moved, ...]:
    """The knobs that two layouts set differently, where stages are cut the last."""
    values = [(name, str(getattr(before, name)), str(getattr(after, name))) for name in KNOBS]
    values.append(("stages", _counts(before), _counts(after)))
    return tuple(Moved(knob=knob, before=old, after=new) for knob, old, new in values if old != new)


def _counts(layout: Layout) -> str:
    """Layers of every chunk, equal neighbours together: «18, 3 × 21, 20»."""
    runs = [(count, len(list(run))) for count, run in groupby(Split.from_stages(layout.stages).counts)]
    return ", ".join(f"{times} × {count}" if times > 1 else str(count) for count, times in runs)

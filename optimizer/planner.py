"""The front door: plan(problem) finds the best layout and proves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from ..cost_models.profile import Profile, load_profile
from ..cost_models.schedules import SPLIT
from ..cost_models.step import CostModel
from ..search_spaces.choices import PLANNED_SCHEDULES, PRICED_CP_TYPES
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.layout import Problem
from .aims import STEP_TIME, Aims, parse_aims
from .assumptions import assumptions, exchange_assumptions, schedule_assumptions
from .beyond import more_chunks, offloaded, other_groups, unsequenced
from .deadline import Deadline
from .engines import ENGINES, Task, solve
from .evaluation import priced_and_replayed
from .found import Found, over_all
from .imbalance_steps import STEPS_AT, steps_at
from .incumbent import Setting
from .interrupts import stoppable
from .known_best import KnownBest
from .leftover import Chosen, Left, as_allocated, chosen, with_left
from .orders import other_orders
from .recutting import Recut, settled
from .reports.comparison import compare
from .result import Certificate, Plan, PricedLayout
from .rule_prices import DEFAULT_INSIDE, Answer, reserve_price, ruled, with_inside
from .slow_device import least_harmed, slow_assumptions
from .spreading import spread_out
from .stages import EQUAL
from .supernode_result import SlowPlace
from .ties import ties

if TYPE_CHECKING:
    from .study import Refine

Progress = Callable[[str, float], None]


def plan(
    problem: Problem,
    *,
    profile: str | None = None,
    engine: str = "auto",
    top: int = 5,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    objective: str = STEP_TIME,
    device_hour_price: float | None = None,
    sensitivity: bool = False,
    robust: bool = False,
    refine: Refine | None = None,
    inside_by_default: bool = False,
    left: Left | None = None,
    spread: bool = True,
    bound_cuts: bool = True,
    known: KnownBest | None = None,
) -> Plan:
    """The fastest legal layout that fits, with its certificate and the next best frames.

    `objective` names other aims, several with commas between: the plan is then the least of the first, and `front` holds what
    the others trade for. `sensitivity` and `robust` ask what changed hardware and uncertain figures would do to the answer,
    `refine` for a study of choices that the certified space does not list, which leaves plan and certificate as they are.
    `inside_by_default` keeps TP inside supernodes, and EP where it fits, if the problem names no such rule; what a rule costs is
    said either way. `left` says how many devices of each supernode are free; where nobody does, the plan chooses how they lie. It
    then also says what leaving some idle beats. Without `spread`, or where the problem has a share for each, they lie as it says.
    `bound_cuts` has the certificate say what other cuts of the plan's layers could gain, and other rank orders of its layouts.
    `known` are the best layouts of problems planned before: they spare search, and are kept up to date. The certificate then says
    nothing that hangs on them.
    `time_limit_s` bounds all that is asked together; what there was no time for stands in `unanswered`.
    Raises Infeasible with the minimal conflict in words when nothing is legal, or where the time was too short; InputError for an
    unknown engine or profile.
    """
    deadline = Deadline.after(time_limit_s)
    aims = parse_aims(objective, device_hour_price)
    if left is None and spread and problem.per_supernode is None:
        left = as_allocated(problem)
    lost = left is not None and not left.open
    more = objective != STEP_TIME or sensitivity or robust or refine is not None
    _refuse_unasked(problem, engine, top, aims, refine)
    _refuse_unplanned(problem, alone=engine in ("auto", "bnb") and not more and not lost)
    curves = load_profile(problem.cluster.accelerator.priced_as, profile)
    planning = _Planning(curves, profile, engine, top, deadline, progress, left, inside_by_default, bound_cuts, known)
    fastest, rest = planning.fastest(problem)
    if not more:
        return fastest
    from .further import Questions, answered

    return answered(fastest, curves, Questions(aims, sensitivity, robust, refine, top), progress, rest)


@dataclass(frozen=True)
class _Planning:
    """How a plan is asked for: what stays the same for every problem that is searched on the way to it."""

    curves: Profile
    profile: str | None
    engine: str
    top: int
    deadline: Deadline
    progress: Progress | None
    left: Left | None
    inside_by_default: bool
    bound_cuts: bool
    known: KnownBest | None

    def fastest(self, problem: Problem) -> tuple[Plan, Deadline]:
        """The fastest layout with all that is said of it, and the time that is left for further questions."""
        taken = self._on_what_is_left(problem)

        def answered(asked: Problem, share: float) -> Answer:
            return self._answered_alone(asked, share, taken.found if taken is not None and asked is taken.way.problem else None)

        answer, inside = ruled(problem if taken is None else taken.way.problem, answered, self.inside_by_default)
        if not answer.found.best:
            raise self._nothing_found(answer)
        if taken is not None and not all(found.complete for found in taken.searched):
            answer = replace(answer, found=over_all(answer.found, (answer.found, *taken.searched)))
        rest = self._rest_after(answer.found)
        model = CostModel(answer.problem, self.curves)
        priced, place = self._priced(model, answer, taken, rest)
        told = self._told(model, answer, priced, place, rest)
        told = told.model_copy(update={**self._prices(answer, priced[0]), "inside": inside})
        if self.left is None:
            return told, rest
        options, whole = (answer.options, None) if taken is None else (taken.options, taken.whole)
        return with_left(told, self.left, options, whole, place), rest

    def _heard_of(self, stage: str) -> Callable[[float], None] | None:
        progress = self.progress
        return None if progress is None else lambda share: progress(stage, share)

    def _rest_after(self, found: Found) -> Deadline:
        """No more time where a search was cut short; one that samples is never complete."""
        return self.deadline if found.complete or self.engine == "optuna" else self.deadline.over

    def _on_what_is_left(self, problem: Problem) -> Chosen | None:
        """With which of the devices that are free the job goes on; None where none is lost or slow."""
        if self.left is None or self.left.open:
            return None
        return chosen(problem, self.curves, self.left, self.deadline, self._heard_of("what is left"))

    def _searched(self, problem: Problem, share: float = 1.0) -> Answer:
        """The best layouts on the devices as they lie; searches for what a reserve costs are to have as much time each."""
        limit_s = self.deadline.share_s(3 if problem.workload.reserved_gib else 1)
        limit_s = None if limit_s is None else limit_s * share
        task = Task(Space(problem), CostModel(problem, self.curves), self.top, limit_s, self._heard_of("searching"), self.known)
        return Answer(problem, solve(self.engine, task), limit_s)

    def _finished(self, problem: Problem, found: Found) -> Answer:
        """The best layouts on a spread of which `found` is the fastest: where nothing else is asked for, that alone."""
        plain = self.engine in ("auto", "bnb") and "schedule" not in problem.workload.fix
        return Answer(problem, found) if plain and self.top == 1 else self._searched_beside(problem, found)

    def _searched_beside(self, problem: Problem, found: Found, share: float = 1.0) -> Answer:
        """The best layouts where the fastest is found: that and its proof stand where the search for others ends before it has come
        to it.
        """
        alone = Answer(problem, found)
        with stoppable():
            searched = self._searched(problem, share)
            if self.engine == "optuna" or searched.found.complete:
                return searched
            best = min((searched, alone), key=_fastest_s)
            return replace(best, found=over_all(best.found, (found,))) if found.complete else best
        return alone

    def _answered_alone(self, problem: Problem, share: float, known: Found | None) -> Answer:
        """The best layouts on the best spread of the devices, moved block by block; `known` is what was found of it before."""
        if known is not None and known.best:
            answer = self._searched_beside(problem, known, share)
        else:
            answer = self._searched(problem, share)
        if self.left is not None and self.left.open:
            setting, heard = Setting(problem, self.curves), self._heard_of("other spreads")
            answer = spread_out(setting, answer, self._finished, self.deadline, heard, self.known)
        found = answer.found
        if not found.best:
            return answer
        moved = settled(CostModel(answer.problem, self.curves), found, self._rest_after(found), self.bound_cuts)
        if not moved.whole:
            found = _however_cut(answer.problem, found)
        return replace(answer, found=replace(found, best=moved.best[: self.top]), cuts=moved.cuts)

    def _nothing_found(self, answer: Answer) -> BaseException:
        """Why there is no layout: an interrupt, too little time, an engine that only samples, or a conflict."""
        if self.deadline.interrupted:
            return KeyboardInterrupt()
        if answer.found.complete:
            from .explain import explain_infeasible

            return explain_infeasible(answer.problem, CostModel(answer.problem, self.curves), Space(answer.problem))
        # the limit began to run a little before the search
        if answer.limit_s is not None and answer.found.seconds >= 0.99 * answer.limit_s:
            return Infeasible(f"time limit of {self.deadline.limit_s:g} s: no layout was found in it; give it more time.")
        tried = f"engine {self.engine}: none of the layouts that it tried fits into memory"
        return InputError(f"{tried}; engine auto looks at all of them.")

    def _priced(
        self, model: CostModel, answer: Answer, taken: Chosen | None, rest: Deadline
    ) -> tuple[list[PricedLayout], SlowPlace | None]:
        """The best layouts priced and replayed, and where the first waits for a slow device, if it does."""
        waiting = [] if taken is None or taken.waiting is None else [taken.waiting]
        priced = priced_and_replayed(model, [*(candidate.layout for candidate in answer.found.best), *waiting], rest)
        if taken is None or taken.way.slow is None:
            return priced, None
        return least_harmed(taken.way.slow, answer.problem, self.curves, priced, self.top)

    def _told(
        self, model: CostModel, answer: Answer, priced: Sequence[PricedLayout], place: SlowPlace | None, rest: Deadline
    ) -> Plan:
        problem, best = answer.problem, priced[0]
        cuts = answer.cuts if place is None else None
        proved = _certificate(answer.found, Space(problem).words, best.step_time_s, cuts, alone=self.known is None)
        return Plan(
            paraplan=version("paraplan"),
            problem=problem,
            assumptions=(
                *assumptions(problem, self.curves, self.profile),
                *schedule_assumptions(problem, best.layout),
                *exchange_assumptions(model, best),
                *slow_assumptions(place),
                *(self.left.said if self.left else ()),
            ),
            plan=best,
            certificate=proved.model_copy(update={"beyond": self._beyond(problem, priced, rest)}),
            alternatives=tuple(beside(problem, best, other) for other in priced[1:]),
            ties=ties(problem, self.curves, best, priced[1:]),
        )

    def _beyond(self, problem: Problem, priced: Sequence[PricedLayout], rest: Deadline) -> tuple[str, ...]:
        """What the certificate says of rank orders, shares offloaded, chunks and their groups that the space has not."""
        if not self.bound_cuts or rest.passed:
            return ()
        kept = with_inside(problem, DEFAULT_INSIDE) if self.inside_by_default else problem
        reported = [each.layout for each in priced]
        with stoppable():
            asked = Setting(kept, self.curves), reported, priced[0].step_time_s, self.deadline
            said = [other_orders(kept, self.curves, reported)]
            for look in (offloaded, more_chunks, other_groups, unsequenced):
                said += [] if rest.passed else [look(*asked)]
            return tuple(words for words in said if words)
        return ()

    def _prices(self, answer: Answer, best: PricedLayout) -> dict[str, object]:
        """What reserved memory costs, and what uneven experts would."""
        problem, found = answer.problem, answer.found
        setting, heard = Setting(problem, self.curves), self._heard_of("other reserves")
        reserved, uneven = problem.workload.reserved_gib, best.layout.ep > 1
        return {
            "reserve": reserve_price(setting, found.best[0], self.deadline, found.complete, heard) if reserved else None,
            "at_imbalance": steps_at(problem, best.layout, dict.fromkeys(STEPS_AT, ""), self.profile) if uneven else None,
        }


def with_schedules(problem: Problem, text: str) -> Problem:
    """The problem with its search narrowed, or widened, to the named schedules: names with commas between, or `any`.

    InputError for what its stack does not offer.
    """
    offered, fixed = problem.stack.schedules, problem.workload.fix.get("schedule")
    names = offered if text == "any" else tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = next((name for name in names if name not in offered), None)
    if wrong is not None or not names:
        raise InputError(f"schedule {wrong or text!r}: {problem.stack.name} runs {', '.join(offered)}; name some of these, or any.")
    if fixed is not None:
        raise InputError(f"schedule {text}: fix names schedule = {' or '.join(fixed)} too; give one of the two.")
    workload = problem.workload.model_copy(update={"fix": {**problem.workload.fix, "schedule": names}})
    return problem.model_copy(update={"workload": workload})


def _refuse_unasked(problem: Problem, engine: str, top: int, aims: Aims, refine: Refine | None) -> None:
    """InputError for questions that no search answers."""
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}.")
    if top < 1:
        raise InputError(f"top {top} must be at least 1.")
    if refine is not None and aims.names[0] != STEP_TIME:
        aim = ",".join(aims.names)
        raise InputError(f"refine shortens the step, and objective {aim} leads with {aims.names[0]}: name {STEP_TIME} first.")
    if refine is not None:
        refine.check(problem)
    aims.among_failures_of(problem)  # raises where too little is known of them


def _refuse_unplanned(problem: Problem, alone: bool) -> None:
    """InputError where a column is fixed to nothing that is listed; `alone`: by the search itself, without further questions."""
    split = [name for name in problem.stack.schedules if name in SPLIT]
    planned = (*PLANNED_SCHEDULES, *split) if alone else PLANNED_SCHEDULES
    for name, listed in (("schedule", planned), ("cp_type", PRICED_CP_TYPES)):
        fixed = problem.workload.fix.get(name)
        if fixed and (not set(fixed) & set(listed) or not (alone or set(SPLIT).isdisjoint(fixed))):
            raise InputError(
                f"fix {name} = {' or '.join(fixed)}: plan searches {', '.join(listed)}; evaluate --layout {name}={fixed[0]},… says "
                "what one layout with it costs."
            )


def beside(problem: Problem, best: PricedLayout, other: PricedLayout) -> PricedLayout:
    """An alternative with what it gives up and gains beside the plan, in words."""
    trade = compare(problem, best, other)
    return other.model_copy(update={"gives_up": trade.losses, "gains": trade.gains})


def _fastest_s(answer: Answer) -> float:
    return answer.found.best[0].step_time_s if answer.found.best else np.inf


def _however_cut(problem: Problem, found: Found) -> Found:
    """What was found with the bound that holds for all cuts, and for all depths of recompute where chunks have their own: layouts
    were left uncut that the space has cut anew.
    """
    by_chunk = problem.stack.recompute_by_chunk and "recompute" not in problem.workload.fix
    covers_all = np.isfinite(found.any_cuts_bound_s) and not by_chunk
    bound_s = min(found.lower_bound_s, found.any_cuts_bound_s if covers_all else found.frames_bound_s)
    complete = found.complete and bound_s >= found.best[0].step_time_s * (1.0 - EQUAL)
    return replace(found, complete=complete, lower_bound_s=bound_s)


def _certificate(found: Found, words: str, best: float, cuts: Recut | None = None, alone: bool = True) -> Certificate:
    """What was proved of a plan whose step takes `best`: what the search found, or longer by a wait for a slow device.

    `alone`: the search began with nothing that was found before it, so that the way that it took is told too.
    """
    bound, counts = min(found.lower_bound_s, found.best[0].step_time_s, best), found.counts
    any_cuts = min(found.any_cuts_bound_s, bound)
    proved = alone and np.isfinite(found.any_cuts_bound_s) and any_cuts > 0
    optimal = best <= bound * (1.0 + EQUAL)  # no further apart than the same step priced in two ways
    return Certificate(
        status="optimal" if optimal else "feasible",
        space=words,
        legal=counts.legal,
        scored=counts.scored if alone else None,
        cut_by_bound=counts.cut_by_bound if alone else None,
        cut_by_memory=counts.cut_by_memory if alone else None,
        lower_bound_s=bound or None,
        gap=0.0 if optimal else best / bound - 1.0 if bound else None,
        seconds=found.seconds,
        any_cuts_lower_bound_s=any_cuts if proved else None,
        any_cuts_gap=best / any_cuts - 1.0 if proved else None,
        cuts_lower_bound_s=None if cuts is None else cuts.bound_s,
        cuts_gap=None if cuts is None else best / cuts.bound_s - 1.0,
        cuts_found_s=None if cuts is None else min(cuts.step_time_s, best),
    )

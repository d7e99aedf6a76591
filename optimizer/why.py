"""Why this plan and not another: the best layout under other choices, found by a search of its own.

`why_not` asks about columns that somebody names; `ablation` takes back, one at a time, every choice that the plan made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from ..cost_models.profile import Profile, load_profile
from ..cost_models.step import CostModel
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible
from ..search_spaces.layout import FULL_BLOCK, NONE, RANK_ORDERS, SELECTIVE, SHARDINGS, Layout, Problem, Recompute, parse_sharding
from .deadline import NEVER
from .evaluation import evaluate, price_layout
from .explain import conflict, explain_infeasible
from .interrupts import stoppable
from .recutting import settled
from .reports import wording
from .reports.comparison import compare
from .result import PricedLayout, Result
from .search import Search
from .waterfall import Bar, Waterfall, term_bars, waterfall

AMPLE_BYTES = 1e18
"""Memory of a device on which every layout fits."""

Progress = Callable[[str, float], None]
Values = Mapping[str, tuple[str, ...]]
Status = Literal["fits", "does not fit", "not legal", "not found"]


@dataclass(frozen=True)
class Limits:
    """What a search is held to beside the problem's own limits: `fix` takes the place of those on the same columns."""

    fix: Values
    forbid: tuple[str, ...] = ()

    def within(self, problem: Problem) -> Problem:
        workload = problem.workload
        changed = {"fix": {**workload.fix, **self.fix}, "forbid": tuple(dict.fromkeys((*workload.forbid, *self.forbid)))}
        return problem.model_copy(update={"workload": workload.model_copy(update=changed)})

    def __str__(self) -> str:
        """The flags of `plan` that say the same."""
        fixed = ",".join(f"{name}={'|'.join(values)}" for name, values in self.fix.items())
        return " ".join([*([f"--fix {fixed}"] if fixed else []), *(f'--forbid "{text}"' for text in self.forbid)])


class Best(Result):
    """The best layout under some limits, said as flags of `plan`.

    Where none fits, `layout` is the fastest if memory were no limit, priced and judged on the real device; where none is legal
    there is none. `reasons` say in sentences what is broken. `proved`: whether the search looked at everything.
    """

    limits: str
    status: Status
    layout: PricedLayout | None = None
    proved: bool = True
    reasons: tuple[str, ...] = ()


class WhyNot(Result):
    """The answer to `--not`: the plan, the best layout that has what was named, and the way from one to the other."""

    paraplan: str
    problem: Problem
    plan: PricedLayout
    best: Best
    slower: float | None = None
    waterfall: Waterfall | None = None
    gives_up: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()


class Ablation(Result):
    """What one choice of the plan buys: the best layout without it, `slower` as a share of the plan's step.

    `seconds` is what is lost without the choice, None where nothing fits without it. It is below 0 only for what the plan's search
    did not look at: SP, which is on wherever it can be, or anything where the search was stopped.
    """

    choice: str
    instead: str
    without: Best
    seconds: float | None = None
    slower: float | None = None
    terms: tuple[Bar, ...] = ()
    gives_up: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()


class Ablations(Result):
    """The plan, and every choice that it makes, taken back one at a time; those in `unsearched` an interrupt left out."""

    paraplan: str
    problem: Problem
    plan: PricedLayout
    ablations: tuple[Ablation, ...]
    unsearched: tuple[str, ...] = ()


def why_not(
    problem: Problem,
    chosen: Layout,
    fix: Values,
    *,
    profile: str | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> WhyNot:
    """Why `chosen` and not the best layout with the values of `fix`: what that breaks or costs.

    Raises Infeasible where `chosen` itself is illegal or does not fit: nothing can be slower than what does not run.
    """
    curves = load_profile(problem.cluster.accelerator.priced_as, profile)
    plan = _legal(problem, chosen, profile)
    report = None if progress is None else (lambda share: progress("searching", share))
    best = best_within(problem, Limits(fix), curves, time_limit_s, report, explained=True)
    if best.layout is None:
        return WhyNot(paraplan=version("paraplan"), problem=problem, plan=plan, best=best)
    trade = compare(problem, plan, best.layout)
    return WhyNot(
        paraplan=version("paraplan"),
        problem=problem,
        plan=plan,
        best=best,
        slower=trade.slower,
        waterfall=waterfall(CostModel(problem, curves), plan, best.layout),
        gives_up=trade.losses,
        gains=trade.gains,
    )


def ablation(
    problem: Problem,
    chosen: Layout,
    *,
    profile: str | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Ablations:
    """What each choice of `chosen` buys: a search without it for every one; the time limit is for each.

    An interrupt leaves the choices that were searched before, if any. Raises Infeasible where `chosen` itself is illegal or does
    not fit.
    """
    curves = load_profile(problem.cluster.accelerator.priced_as, profile)
    plan = _legal(problem, chosen, profile)
    choices = list(_choices(problem, chosen))
    found: list[Ablation] = []
    with stoppable() as ended:
        for index, (choice, instead, limits) in enumerate(choices):

            def report(share: float, index: int = index, instead: str = instead) -> None:
                if progress is not None:
                    progress(instead, (index + share) / len(choices))

            report(0.0)
            found.append(_ablation(problem, plan, choice, instead, best_within(problem, limits, curves, time_limit_s, report)))
    if ended.by is not None and not found:
        raise ended.by
    return Ablations(
        paraplan=version("paraplan"),
        problem=problem,
        plan=plan,
        ablations=tuple(_distinct(found)),
        unsearched=tuple(instead for _, instead, _ in choices[len(found) :]),
    )


def _legal(problem: Problem, chosen: Layout, profile: str | None) -> PricedLayout:
    """The layout priced; Infeasible, with the rules that it breaks, where it is illegal or does not fit."""
    priced, broken = evaluate(problem, chosen, profile=profile)
    if broken:
        raise Infeasible("the plan's own layout is illegal or does not fit; name a plan that plan wrote for this problem", broken)
    return priced


def best_within(
    problem: Problem,
    limits: Limits,
    profile: Profile,
    time_limit_s: float | None = None,
    progress: Callable[[float], None] | None = None,
    explained: bool = False,
) -> Best:
    """The best layout of a problem under more limits; `explained` also looks for changes that would let one fit."""
    changed = limits.within(problem)
    model, space = CostModel(changed, profile), Space(changed)
    found = Search(space, model, 1, time_limit_s).run(progress)
    if not found.complete and (time_limit_s is None or found.seconds < time_limit_s):
        raise KeyboardInterrupt  # a search that is interrupted ends with what it has; here others would follow
    if found.best:
        moved = settled(model, found, NEVER)
        if not moved.whole:
            raise KeyboardInterrupt
        best = price_layout(model, moved.best[0].layout, simulated=False)
        return Best(limits=str(limits), status="fits", layout=best, proved=found.complete)
    if not found.complete:
        reason = f"no layout was found within the time limit, nor was it proved that there is none ({space.legal:,} are legal)."
        return Best(limits=str(limits), status="not found", proved=False, reasons=(reason,))
    if explained:
        error = explain_infeasible(changed, model, space)
        reasons = (error.summary, *(reason for reason in error.reasons if reason not in error.summary))
    elif space.legal:
        reasons = ()
    else:
        reasons = (conflict(changed, fits=lambda _: False).summary,)
    if not space.legal:
        return Best(limits=str(limits), status="not legal", reasons=reasons)
    unlimited = _without_memory_limit(changed)
    fastest = Search(Space(unlimited), CostModel(unlimited, profile), 1, time_limit_s).run(progress).best
    priced = price_layout(model, fastest[0].layout, simulated=False) if fastest else None
    return Best(limits=str(limits), status="does not fit", layout=priced, reasons=(*reasons, *_too_large(space.legal, priced)))


def _too_large(legal: int, fastest: PricedLayout | None) -> tuple[str, ...]:
    """That none of the legal layouts fits, and what the fastest would hold."""
    if fastest is None:
        return (f"none of {wording.count(legal, 'legal layout')} fits.",)
    peak, usable = fastest.memory.peak_gib, fastest.memory.usable_gib
    held = f"{wording.gib(peak)} of {wording.gib(usable)} usable, {wording.gib(peak - usable)} more than there is"
    return (f"none of {wording.count(legal, 'legal layout')} fits; the fastest would hold {held}.",)


def _without_memory_limit(problem: Problem) -> Problem:
    device = problem.cluster.accelerator
    ample = device.model_copy(update={"memory_bytes": device.memory_bytes.model_copy(update={"value": AMPLE_BYTES})})
    return problem.model_copy(update={"cluster": problem.cluster.model_copy(update={"accelerator": ample})})


def _ablation(problem: Problem, plan: PricedLayout, choice: str, instead: str, without: Best) -> Ablation:
    if without.layout is None:
        return Ablation(choice=choice, instead=instead, without=without)
    trade = compare(problem, plan, without.layout)
    fits = without.status == "fits"
    return Ablation(
        choice=choice,
        instead=instead,
        without=without,
        seconds=without.layout.step_time_s - plan.step_time_s if fits else None,
        slower=trade.slower if fits else None,
        terms=term_bars(plan, without.layout),
        gives_up=trade.losses,
        gains=trade.gains,
    )


def _distinct(found: list[Ablation]) -> Iterator[Ablation]:
    """Less of a choice is left out where the best of it is none at all, which has its own line."""
    for place, each in enumerate(found):
        layout = each.without.layout
        earlier = found[place - 1] if place else None
        part_of = earlier is not None and earlier.choice == each.choice
        if part_of and earlier is not None and layout is not None and layout == earlier.without.layout:
            continue
        yield each


def _choices(problem: Problem, chosen: Layout) -> Iterator[tuple[str, str, Limits]]:
    """What a layout chooses beyond the plainest, what stands in its place, and the limits that say so."""

    def instead(name: str, value: str) -> tuple[str, str, Limits]:
        given = getattr(chosen, name)
        said = str(given).lower() if isinstance(given, bool) else str(given)
        return f"{name}={said}", f"{name}={value}", Limits({name: (value,)})

    for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch"):
        if getattr(chosen, name) > 1:
            yield instead(name, "1")
    if chosen.tp > 1 and chosen.sequence_parallel:
        yield instead("sequence_parallel", "false")
    if chosen.recompute != "none":
        yield instead("recompute", "none")
        forbidden = _as_much(problem, Recompute.parse(chosen.recompute))
        if forbidden:
            yield f"recompute={chosen.recompute}", "less recompute", Limits({}, forbidden)
    sharding = parse_sharding(chosen.optimizer_sharding)[0]
    if sharding:
        yield instead("optimizer_sharding", "none")
    if sharding > SHARDINGS.index("zero1") and "zero1" in problem.stack.optimizer_shardings:
        yield instead("optimizer_sharding", "zero1")
    if chosen.offload != "none":
        yield instead("offload", "none")
    if chosen.rank_order != RANK_ORDERS[0] and chosen.pp > 1 and chosen.dp > 1:
        yield instead("rank_order", RANK_ORDERS[0])


def _as_much(problem: Problem, chosen: Recompute) -> tuple[str, ...]:
    """What forbids all recompute but less than the chosen; () where nothing lies between that and none.

    Forbidden rather than fixed: block depths that cover a whole chunk stay out of the space only while nobody names them.
    """
    table = Space(problem).pipeline_lists.table
    rows = zip(*(table[f"recompute_{part}"].tolist() for part in ("mode", "modules", "layers")), strict=True)
    offered = [each for each in (Recompute(*row) for row in dict.fromkeys(rows)) if each.mode != NONE]
    if not any(_less(each, chosen) for each in offered):
        return ()
    return tuple(f"recompute=={each}" for each in offered if not _less(each, chosen))


def _less(one: Recompute, other: Recompute) -> bool:
    """Whether one redoes a proper part of what the other does."""
    if one.mode == SELECTIVE:
        return other.mode != SELECTIVE or (one.modules | other.modules == other.modules != one.modules)
    return one.mode == FULL_BLOCK and other.mode != SELECTIVE and one.layers < other.layers

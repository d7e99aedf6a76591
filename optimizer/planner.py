"""The front door: plan(problem) finds the best layout and proves it; evaluate(problem, layout) prices one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from ..cost_models.details import Detail, detail
from ..cost_models.memory import GIB, verdict
from ..cost_models.profile import Profile, load_profile
from ..cost_models.reach import CONGESTED, MEASURED_SUPERNODES, congestion_s, unmeasured_supernodes
from ..cost_models.schedules import PAIRED, SPLIT, Schedule, usual_schedule
from ..cost_models.step import CostModel
from ..cost_models.timeline import Timeline, replayed
from ..search_spaces.choices import PLANNED_SCHEDULES, PRICED_CP_TYPES
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import assumed
from ..search_spaces.layout import Layout, LayoutTable, Problem, Split
from ..search_spaces.quantities import free_bytes, usable_bytes
from ..search_spaces.rules import violations
from ..search_spaces.vocabulary import V_SHAPED
from ..search_spaces.workload import MemoryMargin
from .aims import STEP_TIME, parse_aims
from .deadline import Deadline
from .engines import ENGINES, Task, solve
from .imbalance_steps import STEPS_AT, steps_at
from .incumbent import Setting
from .leftover import Left, chosen, with_left
from .offloading import offloaded
from .orders import other_orders
from .recutting import Recut, downhill, settled
from .reports.comparison import compare
from .result import Certificate, Memory, Plan, PricedLayout, StageMemory
from .rule_prices import DEFAULT_INSIDE, Answer, reserve_price, ruled, with_inside
from .search import Found
from .slow_device import least_harmed, slow_assumptions
from .spreading import spread_out
from .stages import EQUAL, default_cuts
from .supernode_result import LeftOption, SlowPlace
from .ties import ties

if TYPE_CHECKING:
    from .study import Refine

UNPRICEABLE = frozenset(
    {
        *("C001", "C002", "C029", "C030a", "C030b", "C032a", "C032b", "C060", "C063a", "C063b"),
        *("C064a", "C064b", "C064c", "C075a", "C075b", "C075d", "C140"),
    }
)
"""Rules without which a layout has no devices, stages, order of passes or whole micro-batches: there is nothing to price."""
TOLD = ("efficiency", "host_floor_dense_s", "host_floor_moe_s", "step_overhead_s")
"""Figures of a stack that a plan names where they are assumed."""
WORTH_A_REPLAY = 0.01
"""Share of its price by which a plan's replay has to be longer before those of its alternatives are asked for."""
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
    bound_cuts: bool = True,
) -> Plan:
    """The fastest legal layout that fits, with its certificate and the next best frames.

    `objective` names other aims, several with commas between: the plan is then the least of the first, and `front` holds what
    the others trade for. `sensitivity` and `robust` ask what changed hardware and uncertain figures would do to the answer,
    `refine` for a study of choices that the certified space does not list, which leaves plan and certificate as they are.
    `inside_by_default` keeps TP inside supernodes, and EP where it fits, if the problem names no such rule; what a rule costs is
    said either way. `left` says how many devices of each supernode are free, or that this is open: the plan then also says what
    leaving some idle beats.
    `bound_cuts` has the certificate say what other cuts of the plan's layers could gain, and other rank orders of its layouts.
    `time_limit_s` bounds all that is asked together; what there was no time for stands in `unanswered`.
    Raises Infeasible with the minimal conflict in words when nothing is legal, or where the time was too short; InputError for an
    unknown engine or profile.
    """
    deadline = Deadline.after(time_limit_s)
    aims = parse_aims(objective, device_hour_price)
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}.")
    if top < 1:
        raise InputError(f"top {top} must be at least 1.")
    if refine is not None and aims.names[0] != STEP_TIME:
        raise InputError(f"refine shortens the step, and objective {objective} leads with {aims.names[0]}: name {STEP_TIME} first.")
    if refine is not None:
        refine.check(problem)
    lost = left is not None and not left.open
    further = objective != STEP_TIME or sensitivity or robust or refine is not None or lost
    _refuse_unplanned(problem, engine in ("auto", "bnb") and not further)
    aims.among_failures_of(problem)  # raises where too little is known of them
    curves = load_profile(problem.cluster.accelerator.name, profile)

    def heard_of(stage: str) -> Callable[[float], None] | None:
        return None if progress is None else lambda share: progress(stage, share)

    options: tuple[LeftOption, ...] = ()
    whole: LeftOption | None = None
    slow: Problem | None = None
    place: SlowPlace | None = None
    waiting: Layout | None = None
    if left is not None and lost:
        taken = chosen(problem, curves, left, deadline, heard_of("what is left"))
        options, whole, waiting = taken.options, taken.whole, taken.waiting
        problem, slow = taken.way.problem, taken.way.slow
    others = 2 if problem.workload.reserved_gib else 0

    def searched(of: Problem, share: float = 1.0) -> Answer:
        limit_s = deadline.share_s(1 + others)
        limit_s = None if limit_s is None else limit_s * share
        found = solve(engine, Task(Space(of), CostModel(of, curves), top, limit_s, heard_of("searching")))
        return Answer(of, found, limit_s)

    stopped = False

    def rest_after(found: Found) -> Deadline:
        """No more time after an interrupt or where a search was cut short; one that samples is never complete."""
        return deadline if not stopped and (found.complete or engine == "optuna") else Deadline.after(0.0)

    def answered_alone(of: Problem, share: float) -> Answer:
        nonlocal stopped
        found = searched(of, share)
        if left is not None and left.open:
            found = spread_out(Setting(of, curves), found, searched, deadline, heard_of("other spreads"))
        if found.found.best:
            best, cuts = found.found.best, None
            try:
                best, cuts = settled(CostModel(found.problem, curves), found.found, rest_after(found.found), bound_cuts)
            except KeyboardInterrupt:  # what the search found stands, cut by its rule
                stopped = True
            found = replace(found, found=replace(found.found, best=best[:top]), cuts=cuts)
        return found

    answer, inside = ruled(problem, answered_alone, inside_by_default)
    problem, found, cuts = answer.problem, answer.found, answer.cuts
    options = options or answer.options
    model, space = CostModel(problem, curves), Space(problem)
    if not found.best and not found.complete:
        raise _nothing_found(engine, time_limit_s, answer)
    if not found.best:
        from .explain import explain_infeasible

        raise explain_infeasible(problem, model, space)
    layouts = [*(candidate.layout for candidate in found.best), *([] if waiting is None else [waiting])]
    try:
        priced = _replayed(model, layouts, rest_after(found))
    except KeyboardInterrupt:
        stopped = True
        priced = _replayed(model, layouts, rest_after(found))
    if slow is not None:
        priced, place = least_harmed(slow, problem, curves, priced, top)
    kept = with_inside(problem, DEFAULT_INSIDE) if inside_by_default else problem
    beyond: list[str] = []
    if bound_cuts and not rest_after(found).passed:
        reported = [each.layout for each in priced]
        try:
            moved = offloaded(Setting(kept, curves), reported, priced[0].step_time_s, deadline)
            beyond = [words for words in (other_orders(kept, curves, reported), moved) if words]
        except KeyboardInterrupt:
            stopped = True
    fastest = Plan(
        paraplan=version("paraplan"),
        problem=problem,
        assumptions=(
            *assumptions(problem, curves, profile),
            *exchange_assumptions(model, priced[0]),
            *slow_assumptions(place),
            *(left.said if left else ()),
        ),
        plan=priced[0],
        certificate=_certificate(found, "; ".join((space.words, *beyond)), priced[0].step_time_s, cuts if slow is None else None),
        alternatives=tuple(_beside(problem, priced[0], other) for other in priced[1:]),
        ties=ties(problem, curves, priced[0], priced[1:]),
    )
    reserve = (
        reserve_price(Setting(problem, curves), found.best[0].step_time_s, deadline, found.complete, heard_of("other reserves"))
        if problem.workload.reserved_gib
        else None
    )
    best = priced[0].layout
    steps = steps_at(problem, best, dict.fromkeys(STEPS_AT, ""), profile) if best.ep > 1 else None
    fastest = fastest.model_copy(update={"inside": inside, "reserve": reserve, "at_imbalance": steps})
    if left is not None:
        fastest = with_left(fastest, left, options, whole, place)
    if objective == STEP_TIME and not sensitivity and not robust and refine is None:
        return fastest
    from .further import Questions, answered

    interrupted = rest_after(found).passed and not deadline.passed
    return answered(fastest, curves, Questions(aims, sensitivity, robust, refine, top), progress, deadline, interrupted)


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


def _replayed(model: CostModel, layouts: Sequence[Layout], deadline: Deadline) -> list[PricedLayout]:
    """The layouts priced, the first with its replay; the others with theirs where the first is told wrong by its price and theirs
    could be the shorter one, as far as there is time. A replay never takes less than the price.
    """
    details = [detail(model, layout) for layout in layouts]
    priced = [_described(model, layout, found) for layout, found in zip(layouts, details, strict=True)]
    longest = _simulated_s(model.problem, details[0], layouts[0])
    wrong = longest > priced[0].step_time_s * (1.0 + WORTH_A_REPLAY)
    replays = [
        longest,
        *(
            _simulated_s(model.problem, f, o.layout) if wrong and o.step_time_s < longest and not deadline.passed else None
            for f, o in zip(details[1:], priced[1:], strict=True)
        ),
    ]
    return [one.model_copy(update={"simulated_step_time_s": replay}) for one, replay in zip(priced, replays, strict=True)]


def _beside(problem: Problem, best: PricedLayout, other: PricedLayout) -> PricedLayout:
    """An alternative with what it gives up and gains beside the plan, in words."""
    trade = compare(problem, best, other)
    return other.model_copy(update={"gives_up": trade.losses, "gains": trade.gains})


def _nothing_found(engine: str, time_limit_s: float | None, answer: Answer) -> InputError | Infeasible:
    """Why a search that was not complete has no layout: too little time, or an engine that only samples."""
    if answer.limit_s is not None and answer.found.seconds >= 0.99 * answer.limit_s:  # it began to run a little before the search
        return Infeasible(f"time limit of {time_limit_s:g} s: no layout was found in it; give it more time.")
    return InputError(f"engine {engine}: none of the layouts that it tried fits into memory; engine auto looks at all of them.")


def evaluate(
    problem: Problem, layout: Layout, *, profile: str | None = None, replayed: bool = True
) -> tuple[PricedLayout, tuple[str, ...]]:
    """One layout priced as it stands, and the rules that it breaks, memory among them, in words (none when it is legal).

    A layout without stages gets the split that the search would start from. Memory is broken beyond what a device has, less the
    margin that the workload sets for evaluations; the verdict says how sure that is. Raises Infeasible where there is nothing to
    price. What the layout's `overlap` says of the stack's abilities holds as far as the stack has them: 0 leaves traffic exposed.
    `replayed` also times the schedule event by event, which takes as long as there are micro-batches.
    """
    problem = switched(problem, layout)
    model = CostModel(problem, load_profile(problem.cluster.accelerator.name, profile))
    broken = violations(problem, layout)
    unpriced = tuple(_unpriced(layout))
    if unpriced or any(violation.rule in UNPRICEABLE for violation in broken):
        raise Infeasible("the layout cannot be priced", (*(violation.sentence for violation in broken), *unpriced))
    if not layout.stages:
        _, layout = downhill(model, with_default_stages(model, layout))
    priced = price_layout(model, layout, simulated=replayed)
    judged = _with_margin(problem, problem.workload.memory_margin.evaluated)
    broken = violations(judged, layout, peak_bytes=priced.memory.peak_gib * GIB)
    return priced, tuple(violation.sentence for violation in broken)


def switched(problem: Problem, layout: Layout) -> Problem:
    """The problem with its stack hiding no more than the layout lets it. InputError names what no stack could hide."""
    overlap = problem.stack.overlap
    unknown = sorted(layout.overlap.keys() - type(overlap).model_fields.keys())
    if unknown:
        raise InputError(f"overlap {unknown[0]!r} is not one of {', '.join(type(overlap).model_fields)}.")
    kept = {name: min(share, getattr(overlap, name)) for name, share in layout.overlap.items()}
    stack = problem.stack.model_copy(update={"overlap": overlap.model_copy(update=kept)})
    return problem.model_copy(update={"stack": stack})


def _unpriced(layout: Layout) -> Iterator[str]:
    """Why a layout's schedule has no price, in sentences."""
    if layout.schedule in V_SHAPED and layout.vpp != 2:
        yield f"schedule = {layout.schedule} has two chunks on every stage: vpp is 2, not {layout.vpp}."


def _with_margin(problem: Problem, fraction: float) -> Problem:
    margin = MemoryMargin(fraction=fraction, evaluated=fraction)
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"memory_margin": margin})})


def with_default_stages(model: CostModel, layout: Layout) -> Layout:
    """The layout with the split that the search would give it: the fastest that a plan may have, else one that a device holds, else
    any.
    """
    rows = model.rows(LayoutTable.from_layouts([layout]))
    judged = _with_margin(model.problem, model.problem.workload.memory_margin.evaluated)
    cuts = default_cuts(model, rows, (model.usable_bytes, usable_bytes(judged)))
    split = Split(layout.pp, layout.vpp, tuple(int(c) for c in cuts[0]), layout.schedule in V_SHAPED)
    stages = split.stages(model.problem.model.num_layers, layout.recompute)
    return layout.model_copy(update={"stages": stages})


def price_layout(model: CostModel, layout: Layout, simulated: bool) -> PricedLayout:
    """Everything that is predicted about a layout whose stages are given."""
    found = detail(model, layout)
    priced = _described(model, layout, found)
    return priced.model_copy(update={"simulated_step_time_s": _simulated_s(model.problem, found, layout)}) if simulated else priced


def _described(model: CostModel, layout: Layout, found: Detail) -> PricedLayout:
    problem = model.problem
    seconds, devices = found.step_time_s, problem.devices
    accelerator = problem.cluster.accelerator
    peak = accelerator.peak_flops[problem.workload.precision].value
    tokens = problem.workload.global_batch * problem.workload.seq_len
    interval = model.profile.interval(problem.stack.name, accelerator.name, problem.model.is_moe)
    return PricedLayout(
        layout=layout.model_copy(update={"overlap": _overlap(problem, layout)}),
        step_time_s=seconds,
        step_time_interval_s=(
            seconds * interval.low,
            seconds * interval.high + congestion_s(model.network, layout, found.breakdown_s["ep"]),
        ),
        tokens_per_s_per_device=tokens / seconds / devices,
        model_tflops_per_device=found.model_flops / seconds / devices / 1e12,
        mfu=found.model_flops / seconds / devices / peak,
        mfu_full_attention=found.model_flops_full_attention / seconds / devices / peak,
        hfu=found.executed_flops / seconds / devices / peak,
        breakdown_s=found.breakdown_s,
        memory=_memory(model, found),
        traffic_gib=found.traffic_gib,
        level_utilisation=_utilisation(model, found),
        cross_supernode_share=found.cross_supernode_share,
        devices_used=layout.devices,
        devices_idle=devices - layout.devices,
    )


def _utilisation(model: CostModel, found: Detail) -> dict[str, float]:
    """Bytes that a used device sends across each level, or by its link to the host or the pool, over what its links there could
    carry in the step.
    """
    carried = {
        level.name: rate * found.step_time_s / GIB
        for level, rate in zip(model.network.levels, model.network.bandwidth, strict=True)
    }
    used = {level: sum(by.values()) / float(carried[level]) for level, by in found.traffic_gib.items() if by}
    if found.offloaded_gib:
        to = model.problem.workload.offload_to
        rate = model.problem.cluster.tier(to).bandwidth_bytes_per_s.value
        used[f"{to} link"] = found.offloaded_gib * GIB / rate / found.step_time_s
    return used


def _overlap(problem: Problem, layout: Layout) -> dict[str, float]:
    """What the stack hides, and what the layout leaves exposed though it could."""
    shares = problem.stack.overlap.model_dump()
    return {name: share for name, share in shares.items() if share > 0 or layout.overlap.get(name) == 0}


def assumptions(problem: Problem, profile: Profile, path: str | None = None) -> tuple[str, ...]:
    """What was assumed: the problem's own list, the stack's figures that nobody measured, and how far to trust the curves.

    `path` is the user's file that `profile` was laid under.
    """
    stack = problem.stack.with_figures(profile.stack_figures(problem.stack, problem.cluster.accelerator.name))
    figures = ((f"{stack.name} {name}", getattr(stack, name)) for name in TOLD)
    return (*problem.assumptions, *assumed(figures), *_laid_over(problem, profile, path), *_profile_assumptions(profile, problem))


def schedule_assumptions(problem: Problem, layout: Layout) -> tuple[str, ...]:
    """What the price of a layout assumes of a schedule that splits or pairs its passes."""
    said = []
    splits = layout.schedule in SPLIT and (problem.stack.split_backward or layout.schedule not in PAIRED)
    if splits:
        said.append(
            f"{layout.schedule}: between its input's gradient and its weights' a GEMM keeps its input and its output's gradient, "
            "whatever is recomputed"
        )
    if layout.schedule in PAIRED and not splits:
        said.append(f"{layout.schedule}: {problem.stack.name} computes weight gradients with their input's, as it does by default")
    if layout.schedule in PAIRED:
        said.append(
            f"{layout.schedule}: a forward beside a backward hides the exchange of tokens of each behind the other's kernels"
        )
    return tuple(said)


def exchange_assumptions(model: CostModel, priced: PricedLayout) -> Iterator[str]:
    """What the price of a layout assumes of exchanges of tokens between more supernodes than were measured."""
    supernodes = unmeasured_supernodes(model.network, priced.layout)
    if supernodes:
        longer = congestion_s(model.network, priced.layout, priced.breakdown_s["ep"])
        yield (
            f"tokens are exchanged between {supernodes} supernodes: measured on up to {MEASURED_SUPERNODES}, and on eight in three "
            f"networks, two of which held the rate that is priced; under an oversubscribed spine they took {CONGESTED:g} times as "
            f"long, which would add {longer:.3g} s to the step (in the upper end of its interval): give `oversubscription` where "
            "the cluster has it"
        )


def _laid_over(problem: Problem, profile: Profile, path: str | None) -> tuple[str, ...]:
    """Which figures of the stack a user's file changes."""
    if path is None:
        return ()
    name = problem.cluster.accelerator.name
    pair, shipped = f"{problem.stack.name} on {name}", load_profile(name)
    own, laid = (each.stack_figures(problem.stack, name) for each in (shipped, profile))
    changed = [f"{key} = {figure.value:.4g}" for key, figure in laid.items() if own.get(key) != figure]
    if not changed:
        return (f"{path} says nothing of {pair}: no figure of the stack is changed by it",)
    asked = (problem.stack.name, name, problem.model.is_moe)
    same = profile.interval(*asked) == shipped.interval(*asked)
    interval = "; it has no interval of its own for such models: that of the shipped figures stands" if same else ""
    return (f"figures of {pair} from {path}: {', '.join(changed)}{interval}",)


def _profile_assumptions(profile: Profile, problem: Problem) -> tuple[str, ...]:
    known = profile.interval(problem.stack.name, problem.cluster.accelerator.name, problem.model.is_moe)
    interval = f"step times may be {1 - known.low:.0%} lower to {known.high - 1:.0%} higher ({known.source})"
    if profile.fitted:
        return (f"kernel and collective curves of {profile.accelerator} are fitted to measured kernels; {interval}",)
    return (f"no measured curves for {profile.accelerator}: documented efficiencies are used; {interval}",)


def _simulated_s(problem: Problem, found: Detail, layout: Layout) -> float:
    """The step with its pipeline replayed event by event: a stage's gradients are reduced when its own last backward has ended."""
    return float((replayed_passes(problem, found, layout).stage_end_s + found.reduced_s).max()) + found.after_s


def replayed_passes(problem: Problem, found: Detail, layout: Layout) -> Timeline:
    """Every pass of a layout's pipeline with its times."""
    return replayed(order_of(problem, layout), found.passes, found.p2p_s)


def order_of(problem: Problem, layout: Layout) -> Schedule:
    """The order of passes of a layout, as the problem's stack runs it."""
    stack, m = problem.stack, layout.num_microbatches
    return usual_schedule(layout.schedule, layout.pp, layout.vpp, m, stack.split_backward, stack.microbatch_group)


def _memory(model: CostModel, found: Detail) -> Memory:
    usable = model.usable_bytes
    stages = tuple(
        StageMemory(stage=index, peak_gib=sum(terms.values()) / GIB, terms_gib={k: v / GIB for k, v in terms.items()})
        for index, terms in enumerate(found.stage_bytes)
    )
    peak = max(stage.peak_gib for stage in stages)
    return Memory(
        capacity_gib=model.problem.cluster.accelerator.memory_bytes.value / GIB,
        usable_gib=usable / GIB,
        peak_gib=peak,
        verdict=verdict(peak, free_bytes(model.problem.cluster) / GIB),
        stages=stages,
    )


def _certificate(found: Found, words: str, best: float, cuts: Recut | None = None) -> Certificate:
    """What was proved of a plan whose step takes `best`: what the search found, or longer by a wait for a slow device."""
    bound = min(found.lower_bound_s, found.best[0].step_time_s, best)
    any_cuts = min(found.any_cuts_bound_s, bound)
    proved = np.isfinite(found.any_cuts_bound_s) and any_cuts > 0
    return Certificate(
        status="optimal" if found.complete and best <= found.best[0].step_time_s * (1.0 + EQUAL) else "feasible",
        space=words,
        legal=found.counts.legal,
        scored=found.counts.scored,
        cut_by_bound=found.counts.cut_by_bound,
        cut_by_memory=found.counts.cut_by_memory,
        lower_bound_s=bound,
        gap=best / bound - 1.0 if np.isfinite(bound) and bound > 0 else 0.0,
        seconds=found.seconds,
        any_cuts_lower_bound_s=any_cuts if proved else None,
        any_cuts_gap=best / any_cuts - 1.0 if proved else None,
        cuts_lower_bound_s=None if cuts is None else cuts.bound_s,
        cuts_gap=None if cuts is None else best / cuts.bound_s - 1.0,
        cuts_found_s=None if cuts is None else min(cuts.step_time_s, best),
    )

"""The front door: plan(problem) finds the best layout and proves it; evaluate(problem, layout) prices one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from ..cost_models.details import Detail, detail
from ..cost_models.memory import GIB, verdict
from ..cost_models.profile import Profile, load_profile
from ..cost_models.step import CostModel
from ..cost_models.timeline import simulate
from ..search_spaces.choices import PRICED_SCHEDULES
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import assumed
from ..search_spaces.layout import Layout, LayoutTable, Problem, Split
from ..search_spaces.quantities import free_bytes, usable_bytes
from ..search_spaces.rules import violations
from ..search_spaces.workload import MemoryMargin
from .aims import STEP_TIME, parse_aims
from .engines import ENGINES, Task, solve
from .reports.comparison import compare
from .result import Certificate, Memory, Plan, PricedLayout, StageMemory
from .search import Found
from .stages import default_cuts
from .ties import ties

if TYPE_CHECKING:
    from .study import Refine

UNPRICEABLE = frozenset({"C029", "C030a", "C030b", "C060", "C063a", "C063b", "C064a", "C064b", "C064c", "C140"})
"""Rules without which a layout has no stages or no whole number of micro-batches: there is nothing to price."""
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
) -> Plan:
    """The fastest legal layout that fits, with its certificate and the next best frames.

    `objective` names other aims, several with commas between: the plan is then the least of the first, and `front` holds what
    the others trade for. `sensitivity` and `robust` ask what changed hardware and uncertain figures would do to the answer,
    `refine` for a study of choices that the certified space does not list, which leaves plan and certificate as they are.
    Raises Infeasible with the minimal conflict in words when nothing is legal, InputError for an unknown engine or profile.
    """
    aims = parse_aims(objective, device_hour_price)
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}.")
    if top < 1:
        raise InputError(f"top {top} must be at least 1.")
    if refine is not None and aims.names[0] != STEP_TIME:
        raise InputError(f"refine shortens the step, and objective {objective} leads with {aims.names[0]}: name {STEP_TIME} first.")
    if refine is not None:
        refine.check(problem)
    curves = load_profile(problem.cluster.accelerator.name, profile)
    model = CostModel(problem, curves)
    space = Space(problem)
    heard = None if progress is None else lambda share: progress("searching", share)
    found = solve(engine, Task(space, model, top, time_limit_s, heard))
    if not found.best and not found.complete:
        raise InputError(_nothing_found(engine, time_limit_s, found))
    if not found.best:
        from .explain import explain_infeasible

        raise explain_infeasible(problem, model, space)
    priced = _replayed(model, [candidate.layout for candidate in found.best])
    fastest = Plan(
        paraplan=version("paraplan"),
        problem=problem,
        assumptions=assumptions(problem, curves, profile),
        plan=priced[0],
        certificate=_certificate(found, space.words),
        alternatives=tuple(_beside(problem, priced[0], other) for other in priced[1:]),
        ties=ties(problem, curves, priced[0], priced[1:]),
    )
    if objective == STEP_TIME and not sensitivity and not robust and refine is None:
        return fastest
    from .further import Questions, answered

    return answered(fastest, curves, Questions(aims, sensitivity, robust, refine), top, progress)


def _replayed(model: CostModel, layouts: Sequence[Layout]) -> list[PricedLayout]:
    """The layouts priced, the first with its replay; the others with theirs where the first is told wrong by its price and theirs
    could be the shorter one. A replay never takes less than the price.
    """
    details = [detail(model, layout) for layout in layouts]
    priced = [_described(model, layout, found) for layout, found in zip(layouts, details, strict=True)]
    longest = _simulated_s(details[0], layouts[0])
    wrong = longest > priced[0].step_time_s * (1.0 + WORTH_A_REPLAY)
    replays = [
        longest,
        *(
            _simulated_s(f, o.layout) if wrong and o.step_time_s < longest else None
            for f, o in zip(details[1:], priced[1:], strict=True)
        ),
    ]
    return [one.model_copy(update={"simulated_step_time_s": replay}) for one, replay in zip(priced, replays, strict=True)]


def _beside(problem: Problem, best: PricedLayout, other: PricedLayout) -> PricedLayout:
    """An alternative with what it gives up and gains beside the plan, in words."""
    trade = compare(problem, best, other)
    return other.model_copy(update={"gives_up": trade.losses, "gains": trade.gains})


def _nothing_found(engine: str, time_limit_s: float | None, found: Found) -> str:
    if time_limit_s is not None and found.seconds >= 0.99 * time_limit_s:  # the limit began to run a little before the search
        return f"time limit of {time_limit_s:g} s: no layout was found in it; give it more time."
    return f"engine {engine}: none of the layouts that it tried fits into memory; engine auto looks at all of them."


def evaluate(problem: Problem, layout: Layout, *, profile: str | None = None) -> tuple[PricedLayout, tuple[str, ...]]:
    """One layout priced as it stands, and the rules that it breaks, memory among them, in words (none when it is legal).

    A layout without stages gets the split that the search would start from. Memory is broken beyond what a device has, less the
    margin that the workload sets for evaluations; the verdict says how sure that is. Raises Infeasible where there is nothing to
    price. What the layout's `overlap` says of the stack's abilities holds as far as the stack has them: 0 leaves traffic exposed.
    """
    problem = _switched(problem, layout)
    model = CostModel(problem, load_profile(problem.cluster.accelerator.name, profile))
    broken = violations(problem, layout)
    unpriced = tuple(_unpriced(layout))
    if unpriced or any(violation.rule in UNPRICEABLE for violation in broken):
        raise Infeasible("the layout cannot be priced", (*(violation.sentence for violation in broken), *unpriced))
    if not layout.stages:
        layout = with_default_stages(model, layout)
    priced = price_layout(model, layout, simulated=True)
    judged = _with_margin(problem, problem.workload.memory_margin.evaluated)
    broken = violations(judged, layout, peak_bytes=priced.memory.peak_gib * GIB)
    return priced, tuple(violation.sentence for violation in broken)


def _switched(problem: Problem, layout: Layout) -> Problem:
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
    if layout.schedule not in PRICED_SCHEDULES:
        yield f"schedule = {layout.schedule} is not priced; {', '.join(PRICED_SCHEDULES)} are."
    if layout.schedule == "interleaved" and layout.num_microbatches % layout.pp > 0:
        yield "the interleaved schedule is priced for micro-batches in whole groups of pp only."


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
    split = Split(layout.pp, layout.vpp, tuple(int(c) for c in cuts[0]))
    stages = split.stages(model.problem.model.num_layers, layout.recompute)
    return layout.model_copy(update={"stages": stages})


def price_layout(model: CostModel, layout: Layout, simulated: bool) -> PricedLayout:
    """Everything that is predicted about a layout whose stages are given."""
    found = detail(model, layout)
    priced = _described(model, layout, found)
    return priced.model_copy(update={"simulated_step_time_s": _simulated_s(found, layout)}) if simulated else priced


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
        step_time_interval_s=(seconds * interval.low, seconds * interval.high),
        tokens_per_s_per_device=tokens / seconds / devices,
        model_tflops_per_device=found.model_flops / seconds / devices / 1e12,
        mfu=found.model_flops / seconds / devices / peak,
        mfu_full_attention=found.model_flops_full_attention / seconds / devices / peak,
        hfu=found.executed_flops / seconds / devices / peak,
        breakdown_s=found.breakdown_s,
        memory=_memory(model, found),
        traffic_gib=found.traffic_gib,
        cross_supernode_share=found.cross_supernode_share,
        devices_used=layout.devices,
        devices_idle=devices - layout.devices,
    )


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


def _simulated_s(found: Detail, layout: Layout) -> float:
    """The step with its pipeline replayed event by event in place of the closed form.

    The first stage ends with the pipeline, the others as much before it as their messages may hide behind the backward passes of
    stages before them: what each then adds follows the end of the pipeline.
    """
    timeline = simulate(
        layout.schedule, layout.pp, layout.vpp, layout.num_microbatches, found.chunk_forward_s, found.chunk_backward_s, found.p2p_s
    )
    return float(timeline.step_s) + found.beside_pipeline_s


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


def _certificate(found: Found, words: str) -> Certificate:
    best = found.best[0].step_time_s
    bound = min(found.lower_bound_s, best)
    return Certificate(
        status="optimal" if found.complete else "feasible",
        space=words,
        legal=found.counts.legal,
        scored=found.counts.scored,
        cut_by_bound=found.counts.cut_by_bound,
        cut_by_memory=found.counts.cut_by_memory,
        lower_bound_s=bound,
        gap=best / bound - 1.0 if np.isfinite(bound) and bound > 0 else 0.0,
        seconds=found.seconds,
    )

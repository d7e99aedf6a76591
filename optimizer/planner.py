"""The front door: plan(problem) finds the best layout and proves it; evaluate(problem, layout) prices one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import numpy as np

from ..cost_models.details import Detail, detail
from ..cost_models.memory import GIB, verdict
from ..cost_models.profile import Profile, load_profile
from ..cost_models.step import CostModel
from ..cost_models.timeline import simulate
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import assumed
from ..search_spaces.layout import Layout, LayoutTable, Problem, Split
from ..search_spaces.quantities import free_bytes
from ..search_spaces.rules import violations
from ..search_spaces.workload import MemoryMargin
from .explain import explain_infeasible
from .result import Certificate, Memory, Plan, PricedLayout, StageMemory
from .search import Found, Search
from .stages import default_cuts
from .ties import ties

ENGINES = ("auto", "bnb")
UNPRICEABLE = frozenset({"C029", "C030a", "C030b", "C060", "C063a", "C063b", "C064a", "C064b", "C064c", "C140"})
"""Rules without which a layout has no stages or no whole number of micro-batches: there is nothing to price."""
TOLD = ("efficiency", "host_floor_dense_s", "host_floor_moe_s", "step_overhead_s")
"""Figures of a stack that a plan names where they are assumed."""
Progress = Callable[[str, float], None]


def plan(
    problem: Problem,
    *,
    profile: str | None = None,
    engine: str = "auto",
    top: int = 5,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest legal layout that fits, with its certificate and the next best frames.

    Raises Infeasible with the minimal conflict in words when nothing is legal, InputError for an unknown engine or profile.
    """
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}.")
    if top < 1:
        raise InputError(f"top {top} must be at least 1.")
    curves = load_profile(problem.cluster.accelerator.name, profile)
    model = CostModel(problem, curves)
    space = Space(problem)
    search = Search(space, model, top, time_limit_s)
    found = search.run(None if progress is None else lambda share: progress("searching", share))
    if not found.best and not found.complete:
        raise InputError(f"time limit of {time_limit_s:g} s: no layout was found in it; give it more time.")
    if not found.best:
        raise explain_infeasible(problem, model, space)
    priced = [price_layout(model, candidate.layout, simulated=index == 0) for index, candidate in enumerate(found.best)]
    return Plan(
        paraplan=version("paraplan"),
        problem=problem,
        assumptions=assumptions(problem, curves, profile),
        plan=priced[0],
        certificate=_certificate(found, space.words),
        alternatives=tuple(priced[1:]),
        ties=ties(problem, curves, priced[0], priced[1:]),
    )


def evaluate(problem: Problem, layout: Layout, *, profile: str | None = None) -> tuple[PricedLayout, tuple[str, ...]]:
    """One layout priced as it stands, and the rules that it breaks, memory among them, in words (none when it is legal).

    A layout without stages gets the split that the search would start from. Memory is broken beyond what a device has, less the
    margin that the workload sets for evaluations; the verdict says how sure that is. Raises Infeasible where there is nothing to
    price.
    """
    model = CostModel(problem, load_profile(problem.cluster.accelerator.name, profile))
    broken = violations(problem, layout)
    ragged = layout.schedule == "interleaved" and layout.num_microbatches % layout.pp > 0
    if ragged or any(violation.rule in UNPRICEABLE for violation in broken):
        words = "the interleaved schedule is priced for micro-batches in whole groups of pp only."
        raise Infeasible("the layout cannot be priced", (*(v.sentence for v in broken), *((words,) if ragged else ())))
    if not layout.stages:
        layout = with_default_stages(model, layout)
    priced = price_layout(model, layout, simulated=True)
    judged = _with_margin(problem, problem.workload.memory_margin.evaluated)
    broken = violations(judged, layout, peak_bytes=priced.memory.peak_gib * GIB)
    return priced, tuple(violation.sentence for violation in broken)


def _with_margin(problem: Problem, fraction: float) -> Problem:
    margin = MemoryMargin(fraction=fraction, evaluated=fraction)
    return problem.model_copy(update={"workload": problem.workload.model_copy(update={"memory_margin": margin})})


def with_default_stages(model: CostModel, layout: Layout) -> Layout:
    """The layout with the split that the search would give it."""
    rows = model.rows(LayoutTable.from_layouts([layout]))
    split = Split(layout.pp, layout.vpp, tuple(int(c) for c in default_cuts(model, rows)[0]))
    stages = split.stages(model.problem.model.num_layers, layout.recompute)
    return layout.model_copy(update={"stages": stages})


def price_layout(model: CostModel, layout: Layout, simulated: bool) -> PricedLayout:
    """Everything that is predicted about a layout whose stages are given."""
    problem, found = model.problem, detail(model, layout)
    seconds, devices = found.step_time_s, problem.devices
    accelerator = problem.cluster.accelerator
    peak = accelerator.peak_flops[problem.workload.precision].value
    tokens = problem.workload.global_batch * problem.workload.seq_len
    interval = model.profile.interval(problem.stack.name, accelerator.name, problem.model.is_moe)
    return PricedLayout(
        layout=layout.model_copy(update={"overlap": problem.stack.overlap.model_dump(exclude_defaults=True)}),
        step_time_s=seconds,
        step_time_interval_s=(seconds * interval.low, seconds * interval.high),
        tokens_per_s_per_device=tokens / seconds / devices,
        model_tflops_per_device=found.model_flops / seconds / devices / 1e12,
        mfu=found.model_flops / seconds / devices / peak,
        mfu_full_attention=found.model_flops_full_attention / seconds / devices / peak,
        hfu=found.executed_flops / seconds / devices / peak,
        breakdown_s=found.breakdown_s,
        simulated_step_time_s=_simulated_s(found, layout) if simulated else None,
        memory=_memory(model, found),
        traffic_gib=found.traffic_gib,
        cross_supernode_share=found.cross_supernode_share,
        devices_used=layout.devices,
        devices_idle=devices - layout.devices,
    )


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
    interval = "; too few runs for an interval of its own: that of the shipped figures stands" if same else ""
    return (f"figures of {pair} from {path}: {', '.join(changed)}{interval}",)


def _profile_assumptions(profile: Profile, problem: Problem) -> tuple[str, ...]:
    known = profile.interval(problem.stack.name, problem.cluster.accelerator.name, problem.model.is_moe)
    interval = f"step times may be {1 - known.low:.0%} lower to {known.high - 1:.0%} higher ({known.source})"
    if profile.fitted:
        return (f"kernel and collective curves of {profile.accelerator} are fitted to measured kernels; {interval}",)
    return (f"no measured curves for {profile.accelerator}: documented efficiencies are used; {interval}",)


def _simulated_s(found: Detail, layout: Layout) -> float:
    """The step with its pipeline replayed event by event in place of the closed form."""
    timeline = simulate(
        layout.schedule, layout.pp, layout.vpp, layout.num_microbatches, found.chunk_forward_s, found.chunk_backward_s, found.p2p_s
    )
    return found.step_time_s - found.path_s + float(timeline.step_s)


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

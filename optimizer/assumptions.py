"""What a plan or a price assumes, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cost_models.exchanges import exchanges
from ..cost_models.memory import GIB
from ..cost_models.profile import Profile, load_profile
from ..cost_models.reach import congestion_s, unmeasured_supernodes
from ..cost_models.schedules import INTERLEAVED, ONE_F_ONE_B, PAIRED, SPLIT, build_schedule, group_size
from ..cost_models.split_passes import slowed_in_pairs
from ..cost_models.step import CostModel
from ..search_spaces.cluster import Figure
from ..search_spaces.figure_words import assumed
from ..search_spaces.layout import Layout, LayoutTable, Problem
from .result import PricedLayout
from .stages import even_cuts

TOLD = ("efficiency", "step_overhead_s")
"""Figures of a stack that a plan names where they are assumed, beside the host's floor of a layer of its kind."""


def assumptions(problem: Problem, profile: Profile, path: str | None = None) -> tuple[str, ...]:
    """What was assumed: the problem's own list, the stack's figures that nobody measured, and how far to trust the curves.

    `path` is the user's file that `profile` was laid under.
    """
    stack = problem.stack.with_figures(profile.stack_figures(problem.stack, problem.cluster.accelerator.priced_as))
    floors = ("host_floor_dense_s", *(["host_floor_moe_s"] if problem.model.is_moe else []))
    figures = (
        (f"{stack.name} {name}", figure)
        for name, figure in stack
        if isinstance(figure, Figure) and (name in (*TOLD, *floors) or figure.grade == "given")
    )
    return (*problem.assumptions, *assumed(figures), *_laid_over(problem, profile, path), *_profile_assumptions(profile, problem))


def schedule_assumptions(problem: Problem, layout: Layout) -> tuple[str, ...]:
    """What the price of a layout assumes of a schedule that splits or pairs its passes, or hides exchanges."""
    said = []
    splits = layout.schedule in SPLIT and (problem.stack.split_backward or layout.schedule not in PAIRED)
    if splits:
        under_sp = ", of an input that TP gathers the rank's share, of an output that TP scatters the whole gradient"
        said.append(
            f"{layout.schedule}: between its input's gradient and its weights' a GEMM keeps its input and its output's gradient, "
            f"whatever is recomputed{under_sp if layout.tp > 1 and layout.sequence_parallel else ''}"
        )
    if layout.schedule in PAIRED and not splits:
        said.append(f"{layout.schedule}: {problem.stack.name} computes weight gradients with their input's, as it does by default")
    if layout.schedule in PAIRED:
        said.append(
            f"{layout.schedule}: a forward beside a backward hides the exchange of tokens of each behind the other's kernels, "
            f"which compute {100 * slowed_in_pairs(problem):.1f} % less meanwhile"
        )
    if problem.stack.overlap.ep and layout.ep > 1 and layout.schedule in (ONE_F_ONE_B, INTERLEAVED):
        said.append(_hidden_alone(problem, layout))
    return tuple(said)


def _hidden_alone(problem: Problem, layout: Layout) -> str:
    """What is assumed of passes that Megatron-Core runs beside no other (`build_schedule`, overlapped)."""
    pp, vpp, m = layout.pp, layout.vpp, layout.num_microbatches
    group = group_size(layout.schedule, pp, m, problem.stack.microbatch_group)
    alone = vpp * m - int(build_schedule(layout.schedule, pp, vpp, m, group, overlapped=True).paired[0].sum())
    return (
        f"a pass hides {100 * problem.stack.overlap.ep:.0f} % of its exchange of tokens, as was measured where nearly all run "
        "in pairs; "
        f"that {alone} of {vpp * m} forwards of the first stage, and as many backwards, run alone and hide nothing is not priced"
    )


def exchange_assumptions(model: CostModel, priced: PricedLayout) -> Iterator[str]:
    """What the price of a layout assumes of exchanges of tokens between more supernodes than were measured."""
    supernodes = unmeasured_supernodes(model.network, priced.layout)
    if supernodes:
        known, longer = exchanges(), congestion_s(model.network, priced.layout, priced.breakdown_s["ep"])
        yield (
            f"tokens are exchanged between {supernodes} supernodes: measured on up to {known.measured_supernodes.value:g}, and on "
            "eight in three networks, two of which held the rate that is priced; under an oversubscribed spine they took "
            f"{known.congested.value:g} times as long, which would add {longer:.3g} s to the step (in the upper end of its "
            "interval): give `oversubscription` where the cluster has it"
        )


def cut_assumptions(model: CostModel, priced: PricedLayout) -> Iterator[str]:
    """That stages which nobody gave are cut as a plan's, and what the equal ones of a framework would take, where these differ, or
    that there are none.
    """
    layout, layers = priced.layout, model.problem.model.num_layers
    chunks, split = layout.pp * layout.vpp, LayoutTable.from_layouts([layout]).splits[0]
    even = replace(split, cuts=tuple(int(cut) for cut in even_cuts(len(model.blocks), model.layers.heads - 1, chunks)))
    cut = "stages are not given, so they are cut as in a plan, fastest among those that fit"
    if layers % chunks:
        yield f"{cut}; {layers} layers do not make {chunks} equal chunks"
        return
    if even.cuts == split.cuts:
        return
    equal = model.price(LayoutTable.from_layouts([layout.model_copy(update={"stages": even.stages(layers, layout.recompute)})]))
    yield (
        f"{cut}; the equal ones of a framework that is told nothing would take {equal.step_time_s[0]:.3g} s and "
        f"{equal.peak_bytes[0] / GIB:.1f} GiB at most"
    )


def _laid_over(problem: Problem, profile: Profile, path: str | None) -> tuple[str, ...]:
    """Which figures of the stack a user's file changes."""
    if path is None:
        return ()
    name = problem.cluster.accelerator.priced_as
    pair, shipped = f"{problem.stack.name} on {name}", load_profile(name)
    own, laid = (each.stack_figures(problem.stack, name) for each in (shipped, profile))
    changed = [f"{key} = {figure.value:.4g}" for key, figure in laid.items() if own.get(key) != figure]
    if not changed:
        others = ", ".join(profile.learnt_stacks(name))
        of_others = f"; it was learnt with {others}: --stack says which is meant" if others else ""
        return (f"{path} says nothing of {pair}: no figure of the stack is changed by it{of_others}",)
    asked = (problem.stack.name, name, problem.model.is_moe)
    same = profile.interval(*asked) == shipped.interval(*asked)
    interval = "; it has no interval of its own for such models: that of the shipped figures stands" if same else ""
    said = f"figures of {pair} from {path}: {', '.join(changed)}{interval}"
    learnt, here = profile.learnt_on.get(problem.stack.name, {}).get(name, ()), problem.cluster.rates
    if not learnt or here in learnt:
        return (said,)
    return (said, f"they were learnt on {', '.join(learnt)}, and this is {here}: what they say of that network may not hold here")


def _profile_assumptions(profile: Profile, problem: Problem) -> tuple[str, ...]:
    known = profile.interval(problem.stack.name, problem.cluster.accelerator.priced_as, problem.model.is_moe)
    interval = f"step times may be {100 * (1 - known.low):.0f} % lower to {100 * (known.high - 1):.0f} % higher ({known.source})"
    if profile.fitted:
        return (f"kernel and collective curves of {profile.accelerator} are fitted to measured kernels; {interval}",)
    return (f"no measured curves for {profile.accelerator}: documented efficiencies are used; {interval}",)

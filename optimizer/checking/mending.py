"""What breaks the memory of a layout, and the smallest changes that mend it, each confirmed by its price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ...cost_models.memory import GIB
from ...cost_models.step import CostModel
from ...search_spaces.choices import Choices, divisors
from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import Layout, LayoutTable, Problem, Recompute, Split
from ...search_spaces.quantities import constants, free_bytes
from ...search_spaces.rules import rules_for, violations
from ...search_spaces.workload import MEMORY_BAND
from ..evaluation import price_layout, with_default_stages
from ..result import PricedLayout, Result
from ..walks import downhill

MOST_MENDS, MOST_PAIRED = 3, 4
WIDENED = ("tp", "cp", "pp", "ep", "etp", "vpp")


class Mend(Result):
    """A change of a layout: the columns that differ, its peak and how its step compares; `surely` if clear of the band in which a
    predicted peak settles nothing.
    """

    columns: tuple[str, ...]
    layout: Layout
    peak_gib: float
    step_time_s: float
    slower: float
    surely: bool


def breaking_term(priced: PricedLayout) -> tuple[int, str, float]:
    """(stage, term, GiB): the largest term of the fullest stage."""
    stage = max(priced.memory.stages, key=lambda each: each.peak_gib)
    term = max(stage.terms_gib, key=lambda name: stage.terms_gib[name])
    return stage.stage, term, stage.terms_gib[term]


def mends(model: CostModel, priced: PricedLayout) -> tuple[Mend, ...]:
    """Changes of one choice, or where none is enough of two, after which the layout fits: fewest choices first, then the fastest.

    A layout that is not surely too large is mended by what surely fits. Of two changes, those that save most by themselves are
    tried, one of each choice.
    """
    free = free_bytes(model.problem.cluster) / GIB
    enough = free if priced.memory.peak_gib > free else free * (1.0 - MEMORY_BAND)
    singles = _priced(model, priced, list(_changes(model, priced.layout)))
    found = [mend for mend in singles if mend.peak_gib <= enough]
    if not found:
        best = list(_distinct(sorted(singles, key=lambda mend: mend.peak_gib)))[:MOST_PAIRED]
        pairs = [
            ((*once.columns, *second), twice)
            for once in best
            for second, twice in _changes(model, once.layout)
            if not set(once.columns) & set(second)
        ]
        found = [mend for mend in _priced(model, priced, pairs) if mend.peak_gib <= enough]
    surest = [mend for mend in found if mend.surely] or found
    return tuple(_distinct(sorted(surest, key=lambda mend: (len(mend.columns), mend.step_time_s))))[:MOST_MENDS]


def recut(model: CostModel, before: PricedLayout, found: Mend) -> Mend:
    """The mend of a job that leaves its stages to the planner, with those that it would then be given."""
    _, layout = downhill(model, with_default_stages(model, found.layout.model_copy(update={"stages": ()})))
    priced = price_layout(model, layout, simulated=False)
    free = free_bytes(model.problem.cluster) / GIB
    return found.model_copy(
        update={
            "layout": layout,
            "peak_gib": priced.memory.peak_gib,
            "step_time_s": priced.step_time_s,
            "slower": priced.step_time_s / before.step_time_s - 1.0,
            "surely": priced.memory.peak_gib <= free * (1.0 - MEMORY_BAND),
        }
    )


Change = tuple[tuple[str, ...], Layout]


def _distinct(found: list[Mend]) -> Iterator[Mend]:
    """The first mend of each set of columns."""
    seen: set[frozenset[str]] = set()
    for mend in found:
        if frozenset(mend.columns) not in seen:
            seen.add(frozenset(mend.columns))
            yield mend


def _priced(model: CostModel, priced: PricedLayout, changes: list[Change]) -> list[Mend]:
    """The changes that are legal, priced together."""
    problem = model.problem
    rules = {rule.id for rule in rules_for(problem) if rule.scope == "user"}
    named: list[tuple[str, ...]] = []
    layouts: list[Layout] = []
    for columns, layout in changes:
        if any(each.rule not in rules for each in violations(problem, layout.model_copy(update={"stages": ()}))):
            continue
        try:
            layouts.append(_staged(model, columns, layout))
        except (Infeasible, ValueError):
            continue
        named.append(columns)
    if not layouts:
        return []
    prices = model.price(LayoutTable.from_layouts(layouts))
    free = free_bytes(problem.cluster)
    return [
        Mend(
            columns=columns,
            layout=layout,
            peak_gib=float(peak) / GIB,
            step_time_s=float(step),
            slower=float(step) / priced.step_time_s - 1.0,
            surely=bool(peak <= free * (1.0 - MEMORY_BAND)),
        )
        for columns, layout, peak, step in zip(named, layouts, prices.peak_bytes, prices.step_time_s, strict=True)
    ]


def _staged(model: CostModel, columns: Sequence[str], layout: Layout) -> Layout:
    """The layout with the stages that it comes with, or the planner's where their number changes."""
    if not layout.stages or (len(layout.stages), len(layout.stages[0].chunks)) != (layout.pp, layout.vpp):
        return with_default_stages(model, layout.model_copy(update={"stages": ()}))
    split = Split.from_stages(layout.stages)
    split = replace(split, redone=()) if "recompute" in columns else split
    return layout.model_copy(update={"stages": split.stages(model.problem.model.num_layers, layout.recompute)})


def _changes(model: CostModel, layout: Layout) -> Iterator[Change]:
    """Layouts in which one choice takes less memory, dp and the micro-batches following."""
    problem = model.problem
    stack, c = problem.stack, constants(problem)
    if layout.stages and layout.pp > 1:
        with suppress(Infeasible):  # of stages that no form of the stack can say there is no other cut
            yield ("stages",), with_default_stages(model, layout.model_copy(update={"stages": ()}))
    order = [name for name in ("none", "zero1", "zero2", "zero3") if name in stack.optimizer_shardings]
    if layout.optimizer_sharding in order:
        for sharding in order[order.index(layout.optimizer_sharding) + 1 :]:
            yield ("optimizer_sharding",), layout.model_copy(update={"optimizer_sharding": sharding})
    given = Recompute.parse(layout.recompute)
    for choice in Choices(_unfixed(problem), c).recomputes():
        if choice != given and (choice.mode, choice.modules.bit_count(), choice.layers) > (
            given.mode,
            given.modules.bit_count(),
            given.layers,
        ):
            yield ("recompute",), layout.model_copy(update={"recompute": str(choice)})
    if stack.optimizer_offload and layout.offload == "none" and layout.optimizer_sharding != "none":
        yield ("offload",), layout.model_copy(update={"offload": "optimizer:1"})
    if layout.tp > 1 and stack.sequence_parallel and not layout.sequence_parallel:
        yield ("sequence_parallel",), layout.model_copy(update={"sequence_parallel": True})
    for size in divisors(layout.micro_batch)[:-1]:
        yield ("micro_batch",), _followed(problem, layout, {"micro_batch": size})
    for name in WIDENED:
        value = getattr(layout, name)
        for wider in (value * 2, value * 4):
            if name == "vpp" and layout.vpp == 1:
                continue
            yield (name,), _followed(problem, layout, {name: wider})


def _unfixed(problem: Problem) -> Problem:
    workload = problem.workload
    fix = {name: values for name, values in workload.fix.items() if name != "recompute"}
    return problem.model_copy(update={"workload": workload.model_copy(update={"fix": fix})})


def _followed(problem: Problem, layout: Layout, changed: dict[str, int]) -> Layout:
    """The layout with a degree changed; dp takes up as many devices as it did."""
    new = layout.model_copy(update=changed)
    dp = max(1, layout.devices // (new.tp * new.cp * new.pp))
    edp = max(1, new.tp * new.cp * dp // (new.ep * new.etp))
    count = max(1, problem.workload.global_batch // (new.micro_batch * dp))
    sequence = new.tp > 1 and (layout.sequence_parallel or (layout.tp == 1 and problem.stack.sequence_parallel))
    return new.model_copy(update={"dp": dp, "edp": edp, "num_microbatches": count, "sequence_parallel": sequence})

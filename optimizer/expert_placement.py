"""The experts of a plan's layout placed from measured loads, layer by layer, and what that is worth in step time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Literal

import numpy as np

from ..search_spaces.errors import InputError
from ..search_spaces.groups import unit_of
from ..search_spaces.layer_kinds import MoeMlp
from ..search_spaces.layout import Floats, Ints, Layout, Problem
from ..search_spaces.model import ModelSpec
from .expert_crossing import across_between, copies_across, even_across, least_across, pairs_apart
from .expert_exchange import TOLERANCE
from .expert_loads import ExpertLoads
from .expert_model import Site
from .experts import (
    by_balancer,
    by_longest_first,
    copies_share_ranks,
    imbalance,
    in_order,
    logical_to_physical,
    most_copies,
    physical_to_logical,
    place,
    round_robin,
    without_groups,
)
from .imbalance_steps import STEPS_AT, steps_at
from .ranks import groups
from .result import Result
from .supernode_result import StepAt

PROVEN = 1e-6
"""Gap below which a placement is called optimal."""


class LayerPlacement(Result):
    """One layer: load of the fullest rank over the mean in today's order, dealt in turn, by longest processing time first (without
    regard for routing groups), by greedy balancing as EPLB does it, as placed, and the least that any placement can have.

    `gap` is how far the placed one is above that bound, as a share. `ungrouped` is what longest processing time first and swaps
    reach where routing groups that are kept need not be. `across` and so on are the shares of a token's copies that cross
    supernodes, estimated; where pairs were counted, `across_between` and so on are the least and the most that tokens with these
    loads and pairs could have, and `apart` and `today_apart` the shares of the pairs of experts that a token chose; where none
    were, `across_least` is what the estimate has at least with no rank fuller than as placed, None where no bound is known;
    `worst_window` and `today_worst_window` the imbalance in the worst of several windows that were measured.
    """

    layer: int
    today: float
    round_robin: float
    longest_first: float
    balanced: float
    ungrouped: float | None = None
    placed: float
    bound: float
    gap: float
    status: Literal["optimal", "feasible"]
    today_across: float
    across: float
    ungrouped_across: float | None = None
    across_least: float | None = None
    across_between: tuple[float, float] | None = None
    today_across_between: tuple[float, float] | None = None
    today_apart: float | None = None
    apart: float | None = None
    today_worst_window: float | None = None
    worst_window: float | None = None


class ExpertMap(Result):
    """Physical experts, ranks in order and `slots_per_rank` on each, and logical ones, layer by layer, as EPLB returns them.

    `logical_to_physical_map` is filled up with -1; `expert_count` is how many copies of an expert there are.
    """

    layers: tuple[int, ...]
    logical_experts: int
    physical_experts: int
    ranks: int
    slots_per_rank: int
    physical_to_logical_map: tuple[list[int], ...]
    logical_to_physical_map: tuple[list[list[int]], ...]
    expert_count: tuple[list[int], ...]


class ExpertPlacement(Result):
    """Where the experts go; figures are means over layers. `even_across`: what would cross if all experts were chosen evenly."""

    paraplan: str
    model: str
    ep: int
    supernodes: int
    redundant: int
    groups_kept: int
    today: float
    placed: float
    today_across: float
    across: float
    even_across: float
    layers: tuple[LayerPlacement, ...]
    steps: tuple[StepAt, ...]
    assumptions: tuple[str, ...]
    map: ExpertMap


def place_experts(
    problem: Problem,
    layout: Layout,
    loads: ExpertLoads,
    pairs: Mapping[int, Floats] | None = None,
    redundant: int = 0,
    profile: str | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> ExpertPlacement:
    """Places every measured layer's experts on the EP ranks of a layout, and prices the layout before and after.

    InputError where the layout has no EP ranks to choose between, or experts and copies do not fill them evenly.
    """
    moe, where = expert_site(problem, layout, redundant)
    found: list[LayerPlacement] = []
    slots: list[Ints] = []
    for done, (layer, windows) in enumerate(loads.layers.items()):
        if progress is not None:
            progress("placing experts", done / len(loads.layers))
        own = None if pairs is None else pairs.get(layer)
        placed, record = _layer(layer, windows, where, own)
        slots.append(placed)
        found.append(record)
    names = ("today", "placed", "today_across", "across")
    today, after, today_across, across = (float(np.mean([getattr(each, name) for each in found])) for name in names)
    even = even_across(moe.experts, where)
    return ExpertPlacement(
        paraplan=version("paraplan"),
        model=problem.model.name,
        ep=layout.ep,
        supernodes=len(where.spans),
        redundant=redundant,
        groups_kept=moe.routing_groups if where.units > 1 else 0,
        today=today,
        placed=after,
        today_across=today_across,
        across=across,
        even_across=even,
        layers=tuple(found),
        steps=steps_at(
            problem,
            layout,
            {**dict.fromkeys(STEPS_AT, ""), today: "today", after: "placed"},
            profile,
            {"today": today_across / even, "placed": across / even} if even else {},
        ),
        assumptions=(*loads.absent, *_unmeasured(problem, loads), *_assumed(problem, moe, where, pairs, slots)),
        map=_map(tuple(loads.layers), slots, moe.experts, layout.ep),
    )


def expert_site(problem: Problem, layout: Layout, redundant: int = 0) -> tuple[MoeMlp, Site]:
    """The experts of the model, and the ranks of the EP group that touches most supernodes. InputError if there is no choice."""
    moe = moe_of(problem.model)
    if layout.ep == 1:
        raise InputError("experts: the plan has ep = 1, so every device holds all experts and there is nothing to place")
    slots = moe.experts + redundant
    units = Site(_supernodes(problem, layout), moe.top_k, redundant, moe.routing_groups, moe.routing_groups_topk)
    if slots % layout.ep:
        raise InputError(
            f"--redundant {redundant}: {moe.experts} experts and {redundant} copies do not fill {layout.ep} ranks evenly; "
            f"{redundant // layout.ep * layout.ep} or {-(-redundant // layout.ep) * layout.ep} copies do"
        )
    most = moe.experts * (layout.ep // units.units - 1)
    if not 0 <= redundant <= most:
        raise InputError(f"--redundant {redundant}: must be from 0 to {most}, copies of an expert being on different ranks")
    return moe, units


def moe_of(model: ModelSpec) -> MoeMlp:
    """The model's routed experts. InputError if it has none, or layers with different numbers of them."""
    found = {kind.mlp for kind in model.kinds.values() if isinstance(kind.mlp, MoeMlp)}
    counts = sorted({mlp.experts for mlp in found})
    if not found:
        raise InputError(f"experts: {model.name} has no experts to place; name a model or a plan that has")
    if len(counts) > 1:
        raise InputError(f"experts: layers of {model.name} have {' and '.join(map(str, counts))} experts; only one number works")
    return min(found, key=lambda mlp: mlp.model_dump_json())


def _supernodes(problem: Problem, layout: Layout) -> Ints:
    """Supernode of every rank of the EP group that touches most of them, counted from 0, (ep,)."""
    units = problem.allocated_sizes[problem.cluster.supernode_place :]
    homes = np.sort(unit_of(np.array(groups(layout)["ep"]), units), axis=1)
    most = int(np.argmax((np.diff(homes, axis=1) > 0).sum(axis=1)))
    return np.unique(homes[most], return_inverse=True)[1]


def _layer(layer: int, windows: Floats, where: Site, pairs: Floats | None) -> tuple[Ints, LayerPlacement]:
    loads: Floats = windows.sum(axis=0)
    today = in_order(len(loads), where.ranks)
    found = place(loads, where, pairs)
    mean = float(loads.sum()) / where.ranks
    worst = [max(imbalance(window, slots, where.ranks) for window in windows) for slots in (today, found.slots)]
    free = without_groups(loads, where) if where.units > 1 else None
    return found.slots, LayerPlacement(
        layer=layer,
        today=imbalance(loads, today, where.ranks),
        round_robin=imbalance(loads, round_robin(len(loads), where.ranks), where.ranks),
        longest_first=imbalance(loads, by_longest_first(loads, where), where.ranks),
        balanced=imbalance(loads, by_balancer(loads, where), where.ranks),
        ungrouped=None if free is None else imbalance(loads, free, where.ranks),
        placed=found.fullest / mean,
        bound=found.bound / mean,
        gap=found.gap,
        status="optimal" if found.gap <= PROVEN else "feasible",
        today_across=copies_across(loads, today, where, pairs),
        across=copies_across(loads, found.slots, where, pairs),
        ungrouped_across=None if free is None else copies_across(loads, free, where, pairs),
        across_least=least_across(loads, where, found.fullest) if pairs is None and len(where.spans) > 1 else None,
        across_between=None if pairs is None else across_between(loads, found.slots, where, pairs),
        today_across_between=None if pairs is None else across_between(loads, today, where, pairs),
        today_apart=None if pairs is None else pairs_apart(pairs, today, where.supernodes),
        apart=None if pairs is None else pairs_apart(pairs, found.slots, where.supernodes),
        today_worst_window=worst[0] if len(windows) > 1 else None,
        worst_window=worst[1] if len(windows) > 1 else None,
    )


def _unmeasured(problem: Problem, loads: ExpertLoads) -> Iterable[str]:
    """Layers with experts whose loads nobody gave."""
    routed = sum(kind in problem.model.moe_kinds for kind in problem.model.layer_kinds)
    if len(loads.layers) < routed:
        said = "the others are taken to be like their mean, and have no map"
        yield f"of {routed} layers with experts {len(loads.layers)} are measured: {said}"


def _assumed(
    problem: Problem, moe: MoeMlp, where: Site, pairs: Mapping[int, Floats] | None, slots: Sequence[Ints]
) -> Iterable[str]:
    yield "a copy of an expert receives an equal part of its load, and copies of one expert sit on different ranks"
    shared = sum(copies_share_ranks(each, where.ranks) for each in slots)
    if shared:
        yield f"in {shared} of {len(slots)} layers copies of an expert share a rank, which leaves the fullest rank less than apart"
    yield "step times take the mean over layers of the imbalance"
    if where.redundant:
        share = where.redundant / moe.experts
        yield f"weights, gradients and states of copies, {100 * share:.1f} % more of the experts', are in neither price nor memory"
    if len(where.spans) == 1:
        return
    if problem.stack.moe_dispatcher == "flex":
        yield "and the mean over layers of the copies of tokens that cross supernodes, today and as placed"
    else:
        yield "the stack sends every copy of a token by itself: in the price as much crosses supernodes wherever experts sit"
    if pairs is None:
        yield from _of_loads_alone(where)
    else:
        yield (
            "pairs do not settle what crosses supernodes: it is estimated for tokens that have these loads and pairs and are else "
            "as even as can be, and bounded for any that have them"
        )
    if moe.routing_groups > 1 and where.units == 1:
        spans = ", ".join(map(str, where.spans))
        yield (
            f"the {moe.routing_groups} routing groups are not kept together: they do not come out whole on supernodes of {spans} "
            f"ranks with {where.redundant} copies"
        )
    if moe.routing_groups > 1 and where.units > 1:
        yield f"each of the {moe.routing_groups} routing groups stays together, for which LPT has no regard"
    if pairs is not None and where.units == len(where.spans) == where.groups:
        yield "what tokens choose together moves no expert: each supernode keeps one routing group"
    elif pairs is not None:
        near = f"whose fullest rank is within {100 * TOLERANCE:.1f} % of the least"
        yield f"of placements {near}, one with fewer pairs apart is taken"


def _of_loads_alone(where: Site) -> Iterable[str]:
    """What crosses supernodes where no pairs were counted, and what is done about it."""
    yield "each choice of a token is taken to be independent in what crosses supernodes; --co-activation says which go together"
    if where.units == len(where.spans) == where.groups:
        yield "each supernode keeps one routing group, so that as much crosses wherever its experts sit"
        return
    yield (
        "what crosses then depends on how loads lie on supernodes: of placements with as little on the fullest rank one with "
        "fuller and emptier supernodes is taken, to which tokens go once; where all ranks are equally full none has less across"
    )
    yield "a fuller supernode receives more of it than its part, at most as many times as the fullest rank has the mean"


def _map(layers: tuple[int, ...], slots: list[Ints], experts: int, ranks: int) -> ExpertMap:
    most = most_copies(slots)
    return ExpertMap(
        layers=layers,
        logical_experts=experts,
        physical_experts=len(slots[0]),
        ranks=ranks,
        slots_per_rank=len(slots[0]) // ranks,
        physical_to_logical_map=tuple(physical_to_logical(each) for each in slots),
        logical_to_physical_map=tuple(logical_to_physical(each, experts, most) for each in slots),
        expert_count=tuple(np.bincount(each, minlength=experts).tolist() for each in slots),
    )

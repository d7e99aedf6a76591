"""From a job that runs: the best layout that its checkpoint loads into as it is, beside the best of all.

A checkpoint loads without resharding while every rank finds the weights of its own file: tp, pp, vpp, ep, etp, the split of the
layers into stages and optimizer_sharding stay; dp, cp, micro-batch, recompute, offload, overlap and rank order are free. Assumed
is a checkpoint of one file per rank of the model (Megatron's classic format) whose optimizer states are gathered over dp when they
are saved, or reshardable over it; one that is reshardable as a whole loads into any layout: then the best of all is reachable too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..cost_models.profile import load_profile
from ..cost_models.step import CostModel
from ..search_spaces.degraded import supernode_counts
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible
from ..search_spaces.inputs import ETP_ASSUMPTION
from ..search_spaces.layout import Layout, LayoutTable, Problem, Split
from ..search_spaces.rules import legal_mask
from .deadline import NEVER, Deadline
from .evaluation import evaluate, price_layout
from .interrupts import stoppable
from .layout_words import following_dp
from .leftover import on, words_of
from .result import Plan, PricedLayout, Switch
from .why import Limits

KEPT = ("tp", "pp", "vpp", "ep", "etp", "optimizer_sharding")
"""Columns that a checkpoint is written for, beside the stages."""
FREE = ("cp", "dp", "micro_batch", "schedule", "sequence_parallel", "cp_type", "recompute", "offload", "rank_order")
ASSUMPTION = (
    "a checkpoint of one file per rank of tp, pp and ep loads while tp, pp, vpp, ep, etp, the stages and optimizer_sharding stay; "
    "its optimizer states are gathered over dp when saved, or reshardable over it"
)
ROWS_PER_BATCH = 100_000
REPLAYED_ROWS = 64
"""Layouts that are priced by replay before what they cost is held against the bounds of the rest."""


def carried(problem: Problem, layout: Layout, devices: int) -> Layout:
    """A layout of a job on `devices` as it would go on with the problem's: dp follows the devices, micro-batches the batch.

    dp is the largest that leaves whole micro-batches and expert groups or, where none does, the largest, for the rules to refuse.
    """
    batch, each = problem.workload.global_batch, layout.tp * layout.cp
    dp = layout.dp
    if devices != problem.devices:
        dp = following_dp(problem, layout, problem.devices) or max(1, problem.devices // (each * layout.pp))
    follow = {
        "dp": dp,
        "edp": max(1, each * dp // (layout.ep * layout.etp)),
        "num_microbatches": max(1, batch // (layout.micro_batch * dp)),
    }
    return layout.model_copy(update=follow)


def switch(
    problem: Problem,
    plan: Plan,
    current: Layout,
    *,
    share: int | None = None,
    profile: str | None = None,
    progress: Callable[[float], None] | None = None,
    deadline: Deadline = NEVER,
) -> Switch:
    """What a job that runs `current` gains: by what its checkpoint loads into as it is, and by `plan`, the best of all.

    The layout that is reached without resharding is the best of all legal ones that keep what the checkpoint is written for, each
    of them priced. It is never slower than a current layout that is legal. An interrupt or the deadline ends it with the best of
    those priced by then. `share`: devices that the current layout has in each supernode; None: as the plan has.
    """
    model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as, profile))
    here = _with_own_etp(problem, current)
    standing = _as_it_lies(here, plan, current, share)
    priced, broken = _as_it_stands(standing, current, profile)
    current = current if priced is None else priced.layout
    clash = _ruled_out(here, current)
    reached, count, stopped = (None, 0, False) if clash else _best_reachable(here, model, current, deadline.hearing(progress))
    if priced is not None and not broken and (reached is None or priced.step_time_s < reached.step_time_s):
        reached = priced
    return Switch(
        current=priced,
        broken=broken,
        reachable=reached,
        priced=count,
        gain=_gain(priced, reached),
        gain_at_all=_gain(priced, plan.plan),
        further_gain=_gain(reached, plan.plan),
        to_reach=() if reached is None else _moves(current, reached.layout, FREE),
        to_reshard=_reshards(current, plan.plan.layout),
        ruled_out=clash,
        stopped=stopped,
        assumption=ASSUMPTION,
        lies=_lies(here, standing, share),
    )


def _as_it_lies(problem: Problem, plan: Plan, current: Layout, share: int | None) -> Problem:
    """The problem with `share` devices of the current layout in each supernode; as it is where they do not fit what is free."""
    if share is None or problem.allocated_sizes[problem.cluster.supernode_place] == share:
        return problem
    left, size = plan.devices_left, problem.cluster.levels[problem.cluster.supernode_place].size
    told = left is not None and not left.open
    for devices in (max(problem.devices, current.devices), current.devices):
        needs = supernode_counts(problem.cluster, devices, share)
        free = left.free if left is not None and told else (size or devices,) * len(needs)
        if len(needs) <= len(free) and all(need <= there for need, there in zip(needs, free, strict=False)):
            return on(problem, devices, share)
    return problem


def _lies(problem: Problem, standing: Problem, share: int | None) -> str:
    """How the current layout lies, in a sentence, where that is not as the plan does, or not as it did before."""
    if standing is not problem:
        return f"What runs now lies as it did: {words_of(standing)}."
    before = share is None or share == problem.allocated_sizes[problem.cluster.supernode_place]
    return "" if before else f"What runs now had {share:,} in each supernode, which does not fit; priced as {words_of(problem)}."


def _as_it_stands(problem: Problem, current: Layout, profile: str | None) -> tuple[PricedLayout | None, tuple[str, ...]]:
    """The current layout priced, None where that cannot be done, and the rules that it breaks."""
    try:
        return evaluate(problem, current, profile=profile)
    except Infeasible as error:
        return None, (f"{error.summary}.", *error.reasons)


def _ruled_out(problem: Problem, current: Layout) -> tuple[str, ...]:
    """Why nothing can be reached, in sentences, before anything is searched."""
    fix = problem.workload.fix
    clash = [name for name in KEPT if _text(current, name) not in fix.get(name, (_text(current, name),))]
    unknown = () if current.stages else ("the checkpoint's stages are not known: name a plan.json of the job",)
    return (*(f"--fix {name}={'|'.join(fix[name])} leaves out the checkpoint's {name}" for name in clash), *unknown)


def _gain(before: PricedLayout | None, after: PricedLayout | None) -> float | None:
    """By how much a step is shorter, as a share of the one before."""
    return None if before is None or after is None else 1.0 - after.step_time_s / before.step_time_s


def _with_own_etp(problem: Problem, current: Layout) -> Problem:
    """The problem without the assumption about etp, where it is the assumption that fixes it: a checkpoint has its own."""
    return Limits({"etp": (str(current.etp),)}).within(problem) if ETP_ASSUMPTION in problem.assumptions else problem


def _best_reachable(
    problem: Problem, model: CostModel, current: Layout, progress: Callable[[float], None]
) -> tuple[PricedLayout | None, int, bool]:
    """The fastest layout that keeps what the checkpoint is written for and fits; how many were priced for it, and whether that was
    stopped before all were.
    """
    limited = Limits({name: (_text(current, name),) for name in KEPT}).within(problem)
    space, split = Space(limited), Split.from_stages(current.stages)
    best_s, best, done = np.inf, None, 0
    with stoppable() as ended:  # the best of those priced stands
        for frames in _batches(space.layouts_per_frame):
            table = space.layouts(frames)[0]
            table = table.with_splits(np.zeros(len(table), dtype=np.intp), (split,))
            table = table.take(legal_mask(limited, table))
            for row, seconds in _falling(model, table, best_s):
                best_s, best = seconds, table.layout(row, problem.model.num_layers)
            done += len(table)
            progress(done / max(1, space.listed))
    stopped = ended.stopped and done < space.listed
    return None if best is None else price_layout(model, best, simulated=False), done, stopped


def _batches(sizes: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.intp]]:
    """Frames whose layouts are priced together."""
    if sizes.sum():
        batch = np.cumsum(sizes) // ROWS_PER_BATCH
        yield from (np.flatnonzero((batch == number) & (sizes > 0)) for number in np.unique(batch[sizes > 0]))


def _falling(model: CostModel, table: LayoutTable, limit_s: float) -> Iterator[tuple[int, float]]:
    """Rows that fit and beat the limit and each other, in turn: all are priced from below, those that may win are replayed."""
    if not len(table):
        return
    below = model.price(table, closed_form=True)
    order = np.argsort(np.where(below.fits, below.step_time_s, np.inf), kind="stable")
    for begin in range(0, len(order), REPLAYED_ROWS):
        some = order[begin : begin + REPLAYED_ROWS]
        some = some[below.fits[some] & (below.step_time_s[some] < limit_s)]
        if not len(some):
            return
        seconds = model.price(table.take(some)).step_time_s
        first = int(seconds.argmin())
        if seconds[first] < limit_s:
            limit_s = float(seconds[first])
            yield int(some[first]), limit_s


def _text(layout: Layout, name: str) -> str:
    value = getattr(layout, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _moves(before: Layout, after: Layout, names: tuple[str, ...]) -> tuple[str, ...]:
    values = ((name, _text(before, name), _text(after, name)) for name in names)
    return tuple(f"{name} {old} → {new}" for name, old, new in values if old != new)


def _reshards(before: Layout, after: Layout) -> tuple[str, ...]:
    """What of a checkpoint would have to be rewritten; () if nothing."""
    moves = _moves(before, after, KEPT)
    same_chunks = (before.pp, before.vpp) == (after.pp, after.vpp) and before.stages
    cut_anew = same_chunks and Split.from_stages(before.stages) != Split.from_stages(after.stages)
    return (*moves, *(("stages cut anew",) if cut_anew else ()))

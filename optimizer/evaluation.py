"""What one layout costs: priced as it stands, with the rules that it breaks, and its schedule replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cost_models.details import Detail, detail
from ..cost_models.memory import GIB, verdict
from ..cost_models.profile import load_profile
from ..cost_models.reach import congestion_s
from ..cost_models.schedules import Schedule, usual_schedule
from ..cost_models.step import CostModel
from ..cost_models.timeline import stages_done_s
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.layout import Layout, LayoutTable, Problem, Split
from ..search_spaces.quantities import free_bytes, usable_bytes
from ..search_spaces.rules import violations
from ..search_spaces.vocabulary import V_SHAPED
from ..search_spaces.workload import MemoryMargin
from .deadline import Deadline
from .result import Memory, PricedLayout, StageMemory
from .stages import default_cuts
from .walks import downhill

UNPRICEABLE = frozenset(
    {
        *("C001", "C002", "C029", "C030a", "C030b", "C032a", "C032b", "C060", "C063a", "C063b"),
        *("C064a", "C064b", "C064c", "C075a", "C075b", "C075d", "C140"),
    }
)
"""Rules without which a layout has no devices, stages, order of passes or whole micro-batches: there is nothing to price."""
WORTH_A_REPLAY = 0.01
"""Share of its price by which a plan's replay has to be longer before those of its alternatives are asked for."""


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
    model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as, profile))
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


def priced_and_replayed(model: CostModel, layouts: Sequence[Layout], deadline: Deadline) -> list[PricedLayout]:
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


def _described(model: CostModel, layout: Layout, found: Detail) -> PricedLayout:
    problem = model.problem
    seconds, devices = found.step_time_s, problem.devices
    accelerator = problem.cluster.accelerator
    peak = accelerator.peak_flops[problem.workload.precision].value
    tokens = problem.workload.global_batch * problem.workload.seq_len
    interval = model.profile.interval(problem.stack.name, accelerator.priced_as, problem.model.is_moe)
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
        asked = model.problem.workload.offload_to
        to, rate = "pool" if asked == "pool" else "host", model.problem.cluster.tier(asked).bandwidth_bytes_per_s.value
        used[f"{to} link"] = found.offloaded_gib * GIB / rate / found.step_time_s
    return used


def _overlap(problem: Problem, layout: Layout) -> dict[str, float]:
    """What the stack hides, and what the layout leaves exposed though it could."""
    shares = problem.stack.overlap.model_dump()
    return {name: share for name, share in shares.items() if share > 0 or layout.overlap.get(name) == 0}


def _simulated_s(problem: Problem, found: Detail, layout: Layout) -> float:
    """The step with its pipeline replayed event by event: a stage's gradients are reduced when its own last backward has ended."""
    done_s = stages_done_s(order_of(problem, layout), found.passes, found.p2p_s)
    return float((done_s + found.reduced_s).max()) + found.after_s


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

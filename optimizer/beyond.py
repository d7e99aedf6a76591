"""What a space does not list, beside a plan that was searched in it, on frames of the degrees that the plan reports:
activations that leave the device, more chunks a stage, micro-batches in groups of other than pp, no sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..search_spaces.choices import FRAME, MAX_MICRO_BATCH, MAX_VPP, divisors, groups_are_free
from ..search_spaces.inputs import OFFLOADED_SHARES
from ..search_spaces.layout import Layout, Problem
from ..search_spaces.rules import violations
from .deadline import Deadline
from .found import Candidate
from .incumbent import Setting
from .reports import wording
from .rule_prices import faster

FEW_CHUNKS = MAX_VPP // 2
"""Chunks a stage up to which a layout does not ask for more than the space lists."""


def offloaded(setting: Setting, layouts: Sequence[Layout], step_s: float, deadline: Deadline) -> str:
    """Whether a frame of the degrees of some layouts has a step below `step_s` with activations in the pool, or on the host where
    there is none, in words.

    Blank where such layouts were searched, the stack moves none, or offload is fixed.
    """
    problem = setting.problem
    workload = problem.workload
    if not problem.stack.activation_offload or any(workload.activation_shares) or "offload" in workload.fix:
        return ""
    tier = "pool" if problem.cluster.pool else "host"
    moved = {"offload": "activations:1", "recompute": "none"}
    able = [layout for layout in layouts if not violations(problem, layout.model_copy(update=moved))]
    found = faster(Setting(_moved(problem, tier, able), setting.profile), step_s, deadline.share_s(2)) if able else None
    best, flag = found.best if found else [], f"--offload-to {tier} searches them"
    if found and not best and not found.complete:
        return f"activations in the {tier} were not looked at to the end: {flag}"
    if not best:
        return f"with activations in the {tier} no frame of the degrees reported here is faster than the plan: {flag} for others"
    return f"{best[0].layout.offload} to the {tier} {_gain(best[0], step_s)}: {flag}"


def more_chunks(setting: Setting, layouts: Sequence[Layout], step_s: float, deadline: Deadline) -> str:
    """Whether a frame of the degrees of some layouts has a step below `step_s` with more chunks a stage than the space lists, in
    words. Blank where none of the layouts has many, they can have no more, or vpp is fixed.
    """
    problem = setting.problem
    most = max((problem.model.num_layers // layout.pp for layout in layouts if layout.vpp > FEW_CHUNKS), default=0)
    if most <= MAX_VPP or "vpp" in problem.workload.fix:
        return ""
    vpp = {"vpp": tuple(map(str, range(MAX_VPP + 1, most + 1))), "schedule": ("interleaved",)}
    found = faster(Setting(_of_degrees(problem, layouts, vpp), setting.profile), step_s, deadline.share_s(2))
    if found.best:
        chunks = found.best[0].layout.vpp
        return f"vpp {chunks} {_gain(found.best[0], step_s)}: --fix vpp={chunks} searches it"
    where = "frame of the degrees reported here is faster than the plan" if found.complete else "frame was looked at to the end"
    return f"with vpp beyond {MAX_VPP} no {where}: --fix vpp=N searches others"


def other_groups(setting: Setting, layouts: Sequence[Layout], step_s: float, deadline: Deadline) -> str:
    """Whether the degrees of the first of some layouts have a step below `step_s` with interleaved chunks of which micro-batches do
    not go into groups of pp, in words. Blank where such were searched, the stack cannot be told of them, or all go into groups.
    """
    problem, layout = setting.problem, layouts[0]
    fix, pp, own = problem.workload.fix, layout.pp, problem.workload.global_batch // layout.dp
    unasked = groups_are_free(problem) or not problem.stack.sets_microbatch_group
    sizes = fix.get("micro_batch", tuple(str(size) for size in divisors(own) if size <= MAX_MICRO_BATCH))
    over = tuple(size for size in sizes if own // int(size) > pp > 1 and own // int(size) % pp)
    if unasked or not over or "interleaved" not in fix.get("schedule", ("interleaved",)):
        return ""
    chunks = {"vpp": fix.get("vpp", tuple(map(str, range(2, MAX_VPP + 1)))), "schedule": ("interleaved",), "micro_batch": over}
    found = faster(Setting(_of_degrees(problem, [layout], chunks), setting.profile), step_s, deadline.share_s(2))
    if found.best:
        best = found.best[0].layout
        said = f"{best.num_microbatches} micro-batches in vpp {best.vpp}, whose groups are not of pp,"
        return f"{said} {_gain(found.best[0], step_s)}: --fix pp={best.pp},vpp={best.vpp} searches them"
    none = "nothing of the plan's degrees is faster" if found.complete else "the plan's degrees were not looked at to the end"
    return f"interleaved in groups of other than pp micro-batches {none}: --fix pp=P,vpp=V searches others"


def unsequenced(setting: Setting, layouts: Sequence[Layout], step_s: float, deadline: Deadline) -> str:
    """Whether the degrees of the first of some layouts have a step below `step_s` without sequence parallelism, in words; blank
    where they have not, it has none, or that is fixed.
    """
    problem, layout = setting.problem, layouts[0]
    if "sequence_parallel" in problem.workload.fix or not layout.sequence_parallel:
        return ""
    off = _of_degrees(problem, [layout], {"sequence_parallel": ("false",)})
    found = faster(Setting(off, setting.profile), step_s, deadline.share_s(2)).best
    gain = f"without sequence parallelism the best {_gain(found[0], step_s)}" if found else ""
    return gain and f"{gain}: --fix sequence_parallel=false searches others"


def _gain(found: Candidate, step_s: float) -> str:
    frame = " ".join(f"{name} {getattr(found.layout, name)}" for name in FRAME if getattr(found.layout, name) > 1)
    return f"on {frame} takes {found.step_time_s:.4g} s, {wording.percent(1.0 - found.step_time_s / step_s)} less than the plan"


def _moved(problem: Problem, tier: str, layouts: Sequence[Layout]) -> Problem:
    """The problem of some layouts' degrees, with some activations, or all, in a tier."""
    narrowed = _of_degrees(problem, layouts, {})
    moved = {"offload_to": tier, "activation_shares": OFFLOADED_SHARES[1:]}
    return narrowed.model_copy(update={"workload": narrowed.workload.model_copy(update=moved)})


def _of_degrees(problem: Problem, layouts: Sequence[Layout], fix: Mapping[str, tuple[str, ...]]) -> Problem:
    """The problem of some layouts' degrees alone, with more that is fixed."""
    degrees = {name: tuple(sorted({str(getattr(layout, name)) for layout in layouts})) for name in FRAME}
    workload = problem.workload.model_copy(update={"fix": {**problem.workload.fix, **degrees, **fix}})
    return problem.model_copy(update={"workload": workload})

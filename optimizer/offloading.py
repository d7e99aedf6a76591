"""Activations that leave the device, beside a plan that was searched with all of them on it."""

from __future__ import annotations

from collections.abc import Sequence

from ..search_spaces.choices import FRAME
from ..search_spaces.inputs import OFFLOADED_SHARES
from ..search_spaces.layout import Layout, Problem
from ..search_spaces.rules import violations
from .deadline import Deadline
from .incumbent import Setting
from .rule_prices import faster


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
    layout, gain = best[0].layout, 1.0 - best[0].step_time_s / step_s
    frame = " ".join(f"{name} {getattr(layout, name)}" for name in FRAME if getattr(layout, name) > 1)
    return f"{layout.offload} to the {tier} on {frame} takes {best[0].step_time_s:.4g} s, {gain:.1%} less than the plan: {flag}"


def _moved(problem: Problem, tier: str, layouts: Sequence[Layout]) -> Problem:
    """The problem of some layouts' degrees, with some activations, or all, in a tier."""
    degrees = {name: tuple(sorted({str(getattr(layout, name)) for layout in layouts})) for name in FRAME}
    moved = {"fix": {**problem.workload.fix, **degrees}, "offload_to": tier, "activation_shares": OFFLOADED_SHARES[1:]}
    return problem.model_copy(update={"workload": problem.workload.model_copy(update=moved)})

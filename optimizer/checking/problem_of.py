"""The problem that a job is a layout of: where the job is a plan, that which it was made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...search_spaces.choices import divisors
from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.flags import parse_clause
from ...search_spaces.inputs import ETP_ASSUMPTION, build_problem
from ...search_spaces.layout import RANK_ORDERS, Problem
from ...search_spaces.model import ModelSpec
from ...search_spaces.stack import MEGATRON_CORE, Stack
from ...search_spaces.workload import MemoryMargin
from ..readers import Job


def problem_of(
    job: Job,
    model: ModelSpec,
    cluster: ClusterSpec,
    stack: Stack,
    memory_margin: float | None,
    expert_imbalance: float | None,
    vocab_size: int | None,
) -> Problem:
    """The problem of a job on a cluster; what is given comes before what a plan was made for.

    Stages that a job's own configuration lists can be said, in one form or another.
    """
    free = not job.split.free and not job.split.even and not stack.cuts_freely(vpp=2)
    software = stack.model_copy(update={"split_forms": tuple(dict.fromkeys((*stack.split_forms, "layout")))}) if free else stack
    asked = _asked(job.problem, cluster, software) if job.problem is not None else {}
    if expert_imbalance is not None:
        asked |= {"expert_imbalance": expert_imbalance, "measured_imbalance": {}}
    if software.expert_tensor_parallel and not software.experts_across_tp:  # etp follows tp
        degrees = (str(degree) for degree in divisors(job.devices or 1))
        asked["fix"] = {"etp": tuple(degrees), **asked.get("fix", {})}
    given = {"memory_margin": memory_margin, "vocab_size": vocab_size}
    asked |= {name: value for name, value in given.items() if value is not None}
    devices, batch, seq_len = job.devices or 1, job.global_batch or 1, job.seq_len or 1
    problem = build_problem(model, cluster, devices, batch, seq_len, software, job.precision or "bf16", **asked)
    return problem.model_copy(update={"per_supernode": job.per_supernode(cluster)})


def _asked(own: Problem, cluster: ClusterSpec, stack: Stack) -> dict[str, Any]:
    """What was asked of a plan's problem, in the words of `build_problem`; what was only assumed is left to be assumed again."""
    work = own.workload
    measured = {ep: work.imbalance_at(ep) for ep in work.imbalance_shape}
    return {
        "fix": _chosen(own),
        "forbid": [text for text in work.forbid if text not in work.demanded],
        "constraint": [str(parse_clause(text).negated) for text in work.demanded],
        "inside": {word: dimensions for word, dimensions in _inside(own).items() if _has(cluster, word)},
        "memory_margin": None if work.memory_margin == MemoryMargin() else work.memory_margin.fraction,
        "expert_imbalance": None if measured else work.expert_imbalance,
        "measured_imbalance": measured,
        "vocab_size": work.vocab_size,
        "reserved_gib": work.reserved_gib,
        "offload_to": work.offload_to if work.offload_to != "host" or any(work.activation_shares) else None,
        "rank_order": "all" if stack.framework in MEGATRON_CORE and stack.rank_orders == RANK_ORDERS else "flags",
    }


def _chosen(problem: Problem) -> dict[str, tuple[str, ...]]:
    """What its user fixed, without what was fixed by assumption."""
    assumed = {"etp"} if ETP_ASSUMPTION in problem.assumptions else set[str]()
    return {name: values for name, values in problem.workload.fix.items() if name not in assumed}


def _inside(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Its levels that groups stay within, the scale-up level by the word that every cluster has for it."""
    supernode = problem.cluster.supernode
    return {"supernode" if level == supernode else level: names for level, names in problem.workload.inside.items()}


def _has(cluster: ClusterSpec, word: str) -> bool:
    return word in ("supernode", *(level.name for level in cluster.levels))


def levels_left_out(own: Problem | None, cluster: ClusterSpec) -> Iterator[str]:
    """Levels that a plan's groups stay within and that the cluster it is checked on lacks, in sentences."""
    for word, dimensions in _inside(own).items() if own is not None else ():
        if not _has(cluster, word):
            yield f"{', '.join(dimensions)} is not kept inside one {word}, as it was for the plan: {cluster.name} has no such level"


def search_limits(problem: Problem) -> Iterator[str]:
    """What narrows the search for the best layout of a plan's problem, in a sentence."""
    work = problem.workload
    limits = (
        *(f"{name}={'|'.join(values)}" for name, values in _chosen(problem).items()),
        *(f"not {text}" for text in work.forbid if text not in work.demanded),
        *(str(parse_clause(text).negated) for text in work.demanded),
        *(f"{', '.join(dimensions)} inside one {level}" for level, dimensions in work.inside.items()),
    )
    if limits:
        yield f"the plan's limits hold: {'; '.join(limits)}"


__all__ = ["levels_left_out", "problem_of", "search_limits"]

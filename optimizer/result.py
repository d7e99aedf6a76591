"""What comes back: Plan and its parts, in the words of plan.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..search_spaces.layout import Layout, Problem


class Result(BaseModel):
    """Base of every output record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StageMemory(Result):
    """Peak of one stage; `terms_gib` (weights, gradients, optimizer, activations, transient, communicators) adds up to it."""

    stage: int
    peak_gib: float
    terms_gib: dict[str, float]


class Memory(Result):
    """Memory of the layout: `peak_gib` is the fullest stage's; usable = capacity − margin."""

    capacity_gib: float
    usable_gib: float
    peak_gib: float
    verdict: Literal["fits", "unsure", "oom"]
    stages: tuple[StageMemory, ...]


class PricedLayout(Result):
    """One layout with everything that is predicted about it (design section 2 defines each figure)."""

    layout: Layout
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    tokens_per_s_per_device: float
    model_tflops_per_device: float
    mfu: float
    mfu_full_attention: float
    hfu: float
    breakdown_s: dict[str, float]
    simulated_step_time_s: float | None = None
    memory: Memory
    traffic_gib: dict[str, dict[str, float]]  # level → dimension → GiB per used device and step
    cross_supernode_share: float
    devices_used: int
    devices_idle: int


class Certificate(Result):
    """What was proved: legal = scored + cut_by_bound + cut_by_memory; gap = step_time / lower_bound − 1.

    Where the search was stopped (`feasible`), cut_by_bound also counts what it did not get to; the gap covers it.
    """

    status: Literal["optimal", "feasible"]
    space: str
    legal: int
    scored: int
    cut_by_bound: int
    cut_by_memory: int
    lower_bound_s: float
    gap: float
    seconds: float


class Tie(Result):
    """An alternative whose lead or lag the predictions cannot tell from none, and in words what would decide."""

    alternative: int  # its place among the alternatives, from 0
    slower: float  # as a share of the plan's step
    noise: float  # what two layouts of one problem are commonly misjudged by against each other
    decided_by: str


class Plan(Result):
    """The answer to one Problem: the best layout, what proves it, and the next best frames."""

    paraplan: str
    problem: Problem
    assumptions: tuple[str, ...]
    plan: PricedLayout
    certificate: Certificate
    alternatives: tuple[PricedLayout, ...] = ()
    ties: tuple[Tie, ...] = ()
    groups: dict[str, list[list[int]]] | None = None
    notes: dict[str, Any] = Field(default_factory=dict)

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent, exclude_none=True)

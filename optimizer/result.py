"""What comes back: Plan and its parts, in the words of plan.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..search_spaces.layout import Layout, Problem
from ..search_spaces.workload import Precision
from .supernode_result import CheckpointTraffic, DevicesLeft, InsideCost, ReservePrice, StepAt


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


class StageWork(Result):
    """What one stage does: its decoder and MTP layers, seconds of forward and of backward passes per micro-batch, micro-batches
    that it holds activations of at its fullest (a chunk of several counts as a part), and the share of the pipeline that it waits.
    """

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    in_flight: float
    idle_share: float


RATES = ("tokens_per_s_per_device", "model_tflops_per_device", "mfu", "mfu_full_attention", "hfu")
"""Figures of a layout that are per device and second."""


class PricedLayout(Result):
    """One layout with everything that is predicted about it."""

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
    stages: tuple[StageWork, ...] | None = None  # of a plan, or of one layout that is priced; `memory.stages` has their memory
    traffic_gib: dict[str, dict[str, float]]  # level → dimension → GiB per used device and step
    level_utilisation: dict[str, float] = {}  # level → bytes sent over what a device's links there could carry in the step; "host
    # link" or "pool link" where something is offloaded
    cross_supernode_share: float
    devices_used: int
    devices_idle: int
    gives_up: tuple[str, ...] | None = None  # of an alternative, beside the plan: what is worse, largest first
    gains: tuple[str, ...] | None = None  # and what is better
    aims: dict[str, float] | None = None  # where another aim than the step time leads, and on a front: the figure of every aim


class Certificate(Result):
    """What was proved: legal = scored + cut_by_bound + cut_by_memory; gap = step_time / lower_bound − 1, 0 where the status is
    `optimal`.

    How many met which end, and `any_cuts_lower_bound_s`, hang on where a search begins as well: a point of a sweep, which begins
    with what others found before it, tells neither, so that it is the same whatever these were.
    Where the search was stopped (`feasible`), cut_by_bound also counts what it did not get to; the gap covers it, and there is
    none where that was not bounded either. Where no layout fits under the cuts of the space and some fit under others, the best
    of these that was found is `feasible` too, and the gap that to all cuts. `beyond` says what was looked at outside the space,
    with the flag that searches it. `space` says how each layout is cut into chunks: `status`, `lower_bound_s` and `gap` hold
    for these cuts, `any_cuts_lower_bound_s` and `any_cuts_gap` for all layouts however they are cut, chunks redoing as many
    layers each. Of the plan's own layout no other cuts are faster than `cuts_lower_bound_s` (CP-SAT's bound, with its gap), nor
    other depths of its chunks where its stack is told these; `cuts_found_s` is what the plan's take, the best that is known.
    """

    status: Literal["optimal", "feasible"]
    space: str
    legal: int
    scored: int | None = None
    cut_by_bound: int | None = None
    cut_by_memory: int | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    seconds: float
    any_cuts_lower_bound_s: float | None = None
    any_cuts_gap: float | None = None
    cuts_lower_bound_s: float | None = None
    cuts_gap: float | None = None
    cuts_found_s: float | None = None
    beyond: tuple[str, ...] = ()


class Tie(Result):
    """An alternative whose lead or lag in the plan's aim the predictions cannot tell from none, and in words what would decide."""

    alternative: int  # its place among the alternatives, from 0
    aim: str = "step-time"
    more: float  # of the aim, as a share of the plan's figure
    slower: float  # as a share of the plan's step
    noise: float  # what two layouts of one problem are commonly misjudged by against each other in the aim; 0 where it is counted
    decided_by: str


class Switch(Result):
    """What a job that runs another layout gains, and what it takes; gains are shares of the step that is left behind.

    `current` is the job's layout as it would run here, None where it cannot be priced; `broken` are the rules that it breaks here.
    `reachable` is the best that its checkpoint loads into without resharding, of `priced` layouts, None where nothing is legal and
    fits; `further_gain` is the plan's over it. `to_reach` and `to_reshard` are the changed columns: those of `reachable`, and those
    of the plan that a checkpoint would have to be rewritten for (none: it loads as it is).
    """

    current: PricedLayout | None = None
    broken: tuple[str, ...] = ()
    reachable: PricedLayout | None = None
    priced: int = 0
    gain: float | None = None
    gain_at_all: float | None = None
    further_gain: float | None = None
    to_reach: tuple[str, ...] = ()
    to_reshard: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    stopped: bool = False  # before all that can be reached was priced
    assumption: str
    lies: str = ""  # how the job's devices lie, in a sentence, where not as the plan's


class FrontPoint(PricedLayout):
    """One layout of a front; `marks` say what it is the extreme of, and which is the knee."""

    aims: dict[str, float]
    marks: tuple[str, ...] = ()


class FrontCertificate(Result):
    """How a front was found and what that covers. No layout of it is better than a shown one by more than `within` in any aim.

    No legal layout has less than `lower_bound` of the first aim, cut as the space says, where that follows from the step time; the
    plan's figure lies `gap` above it.
    """

    method: Literal["exact", "nsga2"]
    stopped: bool = False  # before all was priced that the method looks at
    covers: str
    aims: tuple[str, ...]
    units: dict[str, str]
    legal: int
    size: int
    within: float
    seconds: float
    lower_bound: float | None = None
    gap: float | None = None


class WhatIf(Result):
    """The best step on changed hardware, found by a search of its own; no figures where nothing fits there."""

    change: str
    step_time_s: float | None = None
    difference: float | None = None  # as a share of the plan's step
    same_layout: bool | None = None  # but for where stages are cut
    layout: Layout | None = None


class Threshold(Result):
    """The plan's layout wins up to `holds_to`; at `changes_at` another does, `layout`, or nothing fits any more.

    Without both, none does up to `end`.
    """

    name: str
    unit: str
    end: float
    holds_to: float | None = None
    changes_at: float | None = None
    layout: Layout | None = None


class Sensitivity(Result):
    """What hardware a little better would bring, and how far it may change before another layout wins."""

    table: tuple[WhatIf, ...]
    thresholds: tuple[Threshold, ...]
    unanswered: int = 0  # rows and thresholds that there was no time for


class Regret(Result):
    """A layout over all scenarios: its share above the best of each, none where it does not fit, and where that is worst."""

    layout: Layout
    step_time_s: float  # nominal
    worst: float | None
    worst_scenario: str
    mean: float | None
    regrets: tuple[float | None, ...]


class Robust(Result):
    """The layout with the least worst-case regret beside the nominal winner; `candidates` are the best of the `tried`.

    `untried` are scenarios that there was no time for: they are in no figure here.
    """

    scenarios: tuple[str, ...]
    untried: tuple[str, ...] = ()
    best_s: tuple[float | None, ...]  # of each scenario, none where nothing fits
    nominal: Regret
    robust: Regret
    candidates: tuple[Regret, ...]
    tried: int


class Moved(Result):
    """A choice that a refined layout makes differently from the plan, in words."""

    knob: str
    before: str
    after: str


class AtImbalance(Result):
    """Step times of the plan and of the refined layout at one imbalance of the experts, none where a layout does not fit."""

    imbalance: float
    start_s: float | None = None
    refined_s: float | None = None


class AtPrecision(Result):
    """The least objective that a study found in one precision, none where nothing of it fits."""

    precision: str
    refined_s: float | None = None


class Refined(Result):
    """The best layout of a study that started from the certified plan, and never worse than it in the `objective`.

    `start_s` and `refined_s` are seconds of the objective, none where a layout does not fit under all of its imbalances; `gain` is
    a share of the start. Of `trials` samples `repaired` were illegal and moved to the nearest legal choice, and `priced` distinct
    layouts came of all, of which `unfit` do not fit in memory. `noise` is what two layouts of one problem are commonly misjudged by
    against each other. `bucket` is how many parameters' gradients are to be reduced together, where not as the stack has it. Where
    other precisions were permitted, `precision` is that of the layout and `precisions` says what each reached. Another precision
    than the plan's comes with a `caution`, and so do buckets of another size.
    """

    objective: str
    start_s: float | None = None
    refined_s: float | None = None
    gain: float | None = None
    noise: float | None = None
    moved: tuple[Moved, ...]
    trials: int
    repaired: int
    priced: int
    unfit: int
    seed: int
    stopped: bool  # before all trials were made
    covers: str
    imbalances: tuple[AtImbalance, ...] = ()
    bucket: int | None = None
    precision: Precision | None = None
    caution: str | None = None
    precisions: tuple[AtPrecision, ...] = ()
    plan: PricedLayout


class Line(Result):
    """A line of arithmetic: «FLOPs = 6·N·D = 6 · 3.7e10 · 1e13», and its value."""

    name: str
    expression: str
    value: float
    unit: str


class Goodput(Result):
    """What failures make of a layout's time, saved at the best interval; `goodput` is the share of time that trains.

    `effective_step_s` is a step's time over that share, `fastest_effective_s` the same of the fastest layout. `saved_gib` is what
    the fullest device copies to the `tier`, its host's memory or the supernode's pool, in `save_s`, while training waits;
    `checkpoint_tb` what all write to the storage in `drain_s`, while it goes on. `interval_s` is the exact best, Young's and Daly's
    are the textbook's approximations of it.
    """

    goodput: float
    effective_step_s: float
    fastest_effective_s: float | None = None
    mtbf_s: float
    failures_per_day: float
    tier: Literal["host", "pool"] = "host"
    saved_gib: float
    checkpoint_tb: float
    save_s: float
    drain_s: float
    back_s: float
    interval_s: float
    young_interval_s: float | None = None
    daly_interval_s: float | None = None
    assumptions: tuple[str, ...] = ()


class Plan(Result):
    """The answer to one Problem: the best layout, what proves it, and the next best frames."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    paraplan: str
    problem: Problem
    assumptions: tuple[str, ...]
    plan: PricedLayout
    certificate: Certificate
    alternatives: tuple[PricedLayout, ...] = ()
    ties: tuple[Tie, ...] = ()
    switch: Switch | None = Field(default=None, alias="from")
    groups: dict[str, list[list[int]]] | None = None
    ranks: dict[str, list[int]] | None = None  # by column, a row per rank: its coordinates, host, device of it, supernode
    notes: dict[str, Any] = Field(default_factory=dict)
    front: tuple[FrontPoint, ...] | None = None
    front_certificate: FrontCertificate | None = None
    sensitivity: Sensitivity | None = None
    robust: Robust | None = None
    refined: Refined | None = None
    inside: InsideCost | None = None
    devices_left: DevicesLeft | None = None
    reserve: ReservePrice | None = None
    checkpoint: CheckpointTraffic | None = None
    at_imbalance: tuple[StepAt, ...] | None = None
    goodput: Goodput | None = None
    unanswered: tuple[str, ...] = ()  # what was asked and not answered, or not wholly, in words

    def with_refined(self, refined: Refined) -> Plan:
        """The plan with a refined layout in its place, in the precision and with the buckets that this is for."""
        work, stack = self.problem.workload, self.problem.stack
        work = work.model_copy(update={"precision": refined.precision or work.precision})
        stack = stack.model_copy(update={"gradient_bucket": refined.bucket or stack.gradient_bucket})
        problem = self.problem.model_copy(update={"workload": work, "stack": stack})
        return self.model_copy(update={"plan": refined.plan, "problem": problem})

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent, exclude_none=True, by_alias=True)

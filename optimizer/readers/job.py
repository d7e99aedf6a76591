"""What a job's configuration says, whatever format it is written in: the facts that `check` judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.layout import Problem, Stage
from ...search_spaces.model import ModelSpec

MOST = 1_000_000_000
"""No degree, batch or width of a real job comes near it; a larger number is a typing error."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: the id of a rule, a sentence with both values, why the rule exists and where it is stated."""

    rule: str
    sentence: str
    reason: str = ""
    source: str = ""


@dataclass(frozen=True)
class SplitWish:
    """How a configuration asks for stages to be cut.

    Nothing given stands for the framework's own even split. `layout` holds stages as they are; `counts` are layers per chunk in
    virtual-pipeline order; `first` and `last` set a stage apart; `less` are the layers that embedding and loss stand for on the
    first and the last chunk of an otherwise even split; `embedding` and `loss` count as a layer each; `free` leaves the cut to the
    planner.
    """

    layout: tuple[Stage, ...] = ()
    counts: tuple[int, ...] = ()
    first: int | None = None
    last: int | None = None
    less: tuple[int, int] | None = None
    embedding: bool = False
    loss: bool = False
    free: bool = False

    @property
    def even(self) -> bool:
        """Whether the framework divides the layers by itself."""
        return self == SplitWish()


@dataclass(frozen=True)
class FaultTolerance:
    """What a job says of failures, as it is written there."""

    checkpoint_interval: str | None = None
    node_failure_policy: str | None = None
    state_store: tuple[str, ...] = ()
    checkpoint_save_time: str | None = None


@dataclass(frozen=True)
class Job:
    """One job. What is None or missing was not given and is not assumed; what was assumed stands in `assumptions`.

    `degrees` are integer columns of a layout (dp only where the format states it), `choices` its text columns; `sizes` are the
    model's figures that rules read, as far as the configuration gives them; `stack_changes` are fields of the stack that it sets,
    and shares of its overlap. `unknown` are options that were not understood, `unresolved` those whose value the file lacks.
    """

    format: str
    framework: str | None = None
    version: str | None = None  # of that; None stands for its newest
    degrees: Mapping[str, int] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    exposed: tuple[str, ...] = ()  # kinds of traffic that it leaves unhidden
    devices: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    vocab_size: int | None = None
    model: ModelSpec | None = None
    model_name: str | None = None
    # the model, once its vocabulary is known, where that is all that it does not say of it
    with_vocabulary: Callable[[int], ModelSpec] | None = None
    no_model: str = ""  # why the model that it describes cannot be read
    recipe: str | None = None  # what it stands on, which may cut stages in a way that is not known here
    sizes: Mapping[str, int] = field(default_factory=dict)
    split: SplitWish = SplitWish()
    redone: tuple[int, ...] = ()  # layers that each chunk redoes as a whole, where chunks differ in that
    stack: str | None = None
    stack_changes: Mapping[str, Any] = field(default_factory=dict)
    supernode_size: int | None = None
    # what it sets as it says it: of the Megatron family by knob, of a table of keys by key
    written: Mapping[str, str] = field(default_factory=dict)
    notation: str = ""  # how it writes keys, where a format has several ways
    problem: Problem | None = None  # where the configuration is a plan of paraplan's own
    left_out: int = 0  # devices that such a plan has beyond those of its problem: they stay idle wherever they lie
    fault_tolerance: FaultTolerance | None = None
    findings: tuple[Finding, ...] = ()
    advice: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # of what was assumed, what makes the model another than it likely is
    unmodelled: tuple[str, ...] = ()  # what it trains in another way than is priced, with the option that says so
    unknown: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()

    def per_supernode(self, cluster: ClusterSpec) -> int | None:
        """Devices in each supernode but a last with the rest, where it is a plan that says so of this cluster."""
        return self.problem.per_supernode if self.problem is not None and self.problem.cluster == cluster else None

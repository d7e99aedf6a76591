"""What is known of a job as the integers that rules read, and the rules that bind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.conditions import any_of, at_most, divides, equal
from ...search_spaces.expressions import Words, evaluate, names_in, product
from ...search_spaces.layout import COLUMNS, Layout, LayoutTable, Split, parse_offload
from ...search_spaces.limits import offload_rules, stack_rules
from ...search_spaces.model import ModelSpec
from ...search_spaces.quantities import (
    DERIVED,
    GEMM_MULTIPLE,
    PER_MILLE,
    WORDS,
    cluster_constants,
    fillable_chunks,
    lending_constants,
    model_constants,
    most_chunks,
    split_form,
    stack_constants,
)
from ...search_spaces.rulebook import PARALLEL_STATE, RULES, Frameworks, Rule
from ...search_spaces.stack import Stack
from ..readers import Job
from ..readers.unmodelled import GENERATES, ROLLOUTS

OWN_WORDS = ("paraplan", "job")
"""Formats that name choices in paraplan's own words: a framework's own configuration asks for nothing that it lacks."""
OFFERED = frozenset({"stack schedule", "stack sharding", "stack recompute"})
"""Of what a stack offers, what its framework has; of CP types and rank orders a framework may have more than is priced."""
SPLITS = ("splits_free", "splits_first_last", "splits_list")


@dataclass(frozen=True)
class Known:
    """What is known of a job as the integers that rules read, and the rules that bind it.

    `dp_follows`: dp is what the devices leave, rather than a choice of its own. `offers`: what the stack has of every choice, also
    where the job's own words may ask for more.
    """

    values: Mapping[str, int]
    rules: tuple[Rule, ...]
    dp_follows: bool
    words: Words = WORDS
    sayable: Mapping[str, int] = field(default_factory=dict)  # how stages could be cut, where the job leaves that
    offers: tuple[Rule, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(rule.id for rule in self.rules)

    @property
    def judged(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.names <= self.values.keys())

    @property
    def failed(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.judged if not rule.condition.mask(self.values))


REPLICA, GRID = product("tp", "cp", "pp"), product("tp", "cp", "pp", "dp")
GRIDS = {
    dp: Rule("C001", sentence, PARALLEL_STATE, "arithmetic", condition)
    for dp, sentence, condition in (
        ("left open", "dp is what tp·cp·pp leave of the devices, in whole replicas", divides(REPLICA, "devices")),
        ("named", "the degrees of the grid multiply to the devices of the job", equal(GRID, "devices")),
        ("planned", "the degrees of the grid multiply to no more than the devices of the job", at_most(GRID, "devices")),
    )
}
"""The rule of the grid by what a job says of dp; a plan may leave devices idle."""
TP_INSIDE = Rule(
    "C141",
    "TP talks in every layer and belongs inside the scale-up domain",
    "definition",
    "topology",
    at_most("tp", "supernode_size"),
)
TP_TILES = Rule(
    "C141",
    "a TP group lies in one supernode or fills whole ones",
    "definition",
    "topology",
    any_of(
        divides("tp", "supernode"),
        divides("tp", "supernode_size"),
        divides("supernode", "tp"),
        at_most("devices_used", "supernode"),
    ),
)
"""What jobs are judged by of which nobody said what stays inside; plans are by their own rules."""
OF_TRAINING = frozenset({"C029", "C081"})
"""Rules that frameworks ask of steps that train, not of those that only generate."""
OF_FUSED_KERNELS = frozenset({"P004"})
"""Rules of MindSpeed's kernels, which also run what stands on another Megatron-Core there, as ms-swift does."""
WHOLE = frozenset({"C001", "C029"})
"""Rules that whole replicas and whole micro-batches are."""
NOT_JUDGED_HERE = frozenset({"C001", "C063a", "C063b", "P010"})
"""Rules that a job is judged by in another form: the whole grid, its own stages, and memory by price."""


def known_of(
    job: Job,
    layout: Layout,
    dp: int | None,
    split: Split | None,
    model: ModelSpec | None,
    stack: Stack | None,
    cluster: ClusterSpec | None,
) -> Known:
    """The integers and rules of a job. `dp` is None where it cannot be told; `split` is what the framework would cut."""
    values = {**(model_constants(model) if model else dict(job.sizes)), **_machine(job, cluster)}
    if stack is not None:
        values |= stack_constants(stack)
    values |= lending_constants(_offload_to(job))
    if model is not None and stack is not None:
        values["most_chunks"] = most_chunks(model, stack)
    elif "layers" in values:
        mtp = int(values.get("mtp_layers", 0) > 0)
        values["most_chunks"] = fillable_chunks(values["layers"], stack) if stack is not None else values["layers"] + mtp
    sayable: dict[str, int] = {}
    if not job.split.free and job.split.even:
        sayable = {name: values[name] for name in SPLITS if name in values}
        values |= {"splits_free": 0, "splits_first_last": 0, "splits_list": 0}
    elif not job.split.free:
        values["most_chunks"] = max(values.get("most_chunks", 0), layout.pp * layout.vpp)  # its own stages are judged as they are
        values |= {"splits_free": 1, "splits_first_last": 1, "splits_list": 1}
    for name, value in (("devices", job.devices), ("global_batch", job.global_batch), ("seq_len", job.seq_len)):
        if value is not None:
            values[name] = value
    if job.precision is not None:
        values["gemm_multiple"] = GEMM_MULTIPLE[job.precision]
    values |= _columns(layout, dp, "micro_batch" in job.degrees, job.global_batch)
    if split is not None and "layers" in values:
        values |= {"placed_blocks": split.cuts[-1], "split_form": split_form(split, values["layers"])}
        values |= {"depths_apart": int(bool(split.redone))}
    values |= {name: int(evaluate(e, values)) for name, e in DERIVED.items() if names_in(e) <= values.keys()}
    levels = cluster.levels if cluster is not None else ()
    units = {f"unit_{level.name}": f"the {{}} devices of one {level.name}" for level in levels}
    words = Words({**WORDS.phrases, **units}, WORDS.codes, WORDS.settings, WORDS.columns)
    offers = tuple(stack_rules(stack)) if stack is not None else ()
    return Known(values, tuple(_binding(job, layout, stack, cluster)), "dp" not in job.degrees, words, sayable, offers)


def _machine(job: Job, cluster: ClusterSpec | None) -> dict[str, int]:
    """The units of the network that the job is on; its own supernode, where it names one, before the cluster's."""
    size, found = job.supernode_size, {}
    if cluster is not None:
        found = {"supernode_size": next(level.size or 1 for level in cluster.levels if level.name == cluster.supernode)}
    if cluster is not None and job.devices is not None:
        found = cluster_constants(cluster, cluster.allocated_sizes(job.devices, job.per_supernode(cluster)))
    if size is not None:
        found |= {"supernode_size": size, **({"supernode": min(size, job.devices)} if job.devices is not None else {})}
    return found


def _columns(layout: Layout, dp: int | None, has_micro_batch: bool, global_batch: int | None) -> dict[str, int]:
    """The layout as rules read it, without what is not known of it."""
    table = LayoutTable.from_layouts([layout.model_copy(update={"stages": ()})])
    found = {name: int(getattr(table, name)[0]) for name in COLUMNS if name != "split" and not name.endswith("_offload")}
    for name in ("optimizer_offload", "activation_offload"):
        found[f"{name}_per_mille"] = round(float(getattr(table, name)[0]) * PER_MILLE)
    if dp is None:
        del found["dp"]
    if not has_micro_batch:
        del found["micro_batch"]
    if dp is None or not has_micro_batch or global_batch is None:
        del found["num_microbatches"]
    return found


def _offload_to(job: Job) -> str:
    """Where what it offloads goes: to the host, unless a plan says otherwise."""
    return job.problem.workload.offload_to if job.problem is not None else "host"


def _binding(job: Job, layout: Layout, stack: Stack | None, cluster: ClusterSpec | None) -> Iterator[Rule]:
    """The rules that bind a job: the rulebook's for its framework, its grid's, TP inside a supernode where it names those, what its
    stack offers, and those of activations that it offloads.
    """
    named = "planned" if job.problem is not None else "named"
    yield GRIDS[named if "dp" in job.degrees else "left open"]
    if job.supernode_size is not None:
        yield TP_INSIDE
    if job.problem is None:
        yield TP_TILES
    generates, rolls = (any(each.startswith(asks) for each in job.unmodelled) for asks in (GENERATES, ROLLOUTS))
    on_mindspeed = job.stack is not None and cluster is not None and cluster.accelerator.vendor == "huawei"
    for rule in RULES:
        if (generates and rule.id in OF_TRAINING) or (rolls and "seq_len" in rule.names):  # what is rolled out is padded as needed
            continue
        bound = isinstance(rule.scope, Frameworks) and stack is not None and rule.scope.bind(stack)
        bound = bound or (on_mindspeed and rule.id in OF_FUSED_KERNELS)
        if rule.id not in NOT_JUDGED_HERE and (bound or rule.scope == "arithmetic"):
            yield rule
    if stack is not None and job.format in OWN_WORDS:
        yield from (rule for rule in stack_rules(stack) if rule.id in OFFERED)
    if stack is not None and parse_offload(layout.offload)[1] > 0:
        yield from offload_rules(stack, cluster.supernode if cluster is not None else "supernode", _offload_to(job))

"""The job YAML of a cluster's scheduler: task, resource, strategy and fault_tolerance."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from ...search_spaces.documents import parse_document, to_record
from ...search_spaces.errors import InputError
from ...search_spaces.layout import Split
from ...search_spaces.model import ModelSpec
from .job import MOST, FaultTolerance, Job, SplitWish
from .options import whole
from .structured import Document

FORMAT = "job"
TOLERANCE = "fault_tolerance"
STRATEGY = {
    "tp": ("tensor_parallel", "tp"),
    "pp": ("pipeline_parallel", "pp"),
    "dp": ("data_parallel", "dp"),
    "cp": ("context_parallel", "cp"),
    "ep": ("expert_parallel", "ep"),
    "etp": ("expert_tensor_parallel", "etp"),
    "vpp": ("virtual_pipeline_parallel", "vpp"),
    "micro_batch": ("micro_batch_size", "micro_batch"),
}
"""Columns and how `strategy` spells them."""
GLOBAL_BATCH = tuple(
    f"{section}{name}" for name in ("global_batch_size", "global_batch") for section in ("strategy.", "training.", "")
)
"""Keys of the global batch; the one that is read comes first."""
TEXT = ("recompute", "optimizer_sharding", "schedule", "offload", "cp_type", "rank_order")


def read(text: str, where: str, devices: int | None = None) -> Job:
    """The job of a YAML. InputError where it has no strategy."""
    data = parse_document(text, where, aliases=True)
    task = data.get("task", data)
    task = _nested(task) if isinstance(task, dict) else task
    if not isinstance(task, dict) or not isinstance(task.get("strategy"), dict):
        raise InputError(f"{where}: task.strategy is missing; give tensor_parallel, pipeline_parallel and data_parallel there")
    doc = Document(task, f"{where}: task" if task is not data else where)
    supernodes, each, accelerators = (doc.whole(*_resource(name)) for name in RESOURCES[:3])
    if supernodes and each and supernodes * each > MOST:
        raise InputError(f"{where}: resource.supernode {supernodes} × accelerator_per_node {each} is no cluster")
    given = {column: doc.whole(*(f"strategy.{name}" for name in names)) for column, names in STRATEGY.items()}
    said = [_not_given(doc, column) for column in ("tp", "pp") if given[column] is None]
    degrees = {column: value or 1 for column, value in given.items() if column != "dp" or value is not None}
    if given["micro_batch"] is None:
        degrees.pop("micro_batch")
    sp = doc.flag("strategy.sequence_parallel", "strategy.sp")
    choices = {column: value for column in TEXT if (value := doc.text(f"strategy.{column}")) is not None}
    if sp is not None:
        choices["sequence_parallel"] = "true" if sp else "false"
    global_batch = doc.whole(*GLOBAL_BATCH)
    seq_len = doc.whole("strategy.seq_len", "training.seq_len", "strategy.sequence_length", "seq_len")
    tolerance = _fault_tolerance(doc)
    model = doc.text("model", "model.name")
    shape = _shape(task.get("model"), f"{doc.where}: model")
    split = _split(doc, degrees, where, said)
    precision = doc.text("strategy.precision")
    doc.skip(
        *(["model."] if shape else []),
        "name",
        "strategy.num_microbatches",
        *_resource("accelerator"),
        "priority",
        "queue",
        "image",
        "command",
        "env",
    )
    return Job(
        format=FORMAT,
        degrees=degrees,
        choices=choices,
        devices=devices or accelerators or (supernodes * each if supernodes and each else None),
        global_batch=global_batch,
        seq_len=seq_len,
        model=shape,
        model_name=model,
        precision=precision,
        split=split,
        written=doc.written,
        supernode_size=each,
        fault_tolerance=tolerance,
        assumptions=tuple(said),
        unmodelled=doc.unmodelled(FORMAT),
        unknown=doc.unknown,
    )


RESOURCES = ("supernode", "accelerator_per_node", "accelerators", "accelerator")
UNITS = ("seconds", "minutes", "hours", "days", "steps")
FLAT = frozenset(
    {*(name for names in STRATEGY.values() for name in names), *TEXT, "sequence_parallel", "sp", "precision"}
    | {"num_microbatches", "layers_per_stage", "layers_per_chunk"}
)


def is_flat(keys: Collection[str]) -> bool:
    """Whether the keys of a job's own level are those of its strategy."""
    return bool({"tensor_parallel", "pipeline_parallel", "data_parallel"} & set(keys))


def _nested(task: dict[str, Any]) -> dict[str, Any]:
    """A job whose resources and strategy stand beside each other, as one in which they have a section each."""
    strategy = {name: value for name, value in task.items() if name in FLAT and not isinstance(value, dict)}
    resource = {name: value for name, value in task.items() if name in RESOURCES and not isinstance(value, dict)}
    rest = {name: value for name, value in task.items() if name not in {*strategy, *resource}}
    for name, found in (("strategy", strategy), ("resource", resource)):
        own = rest.get(name, {})
        if found and isinstance(own, dict):
            rest[name] = {**found, **own}
    return rest


def _split(doc: Document, degrees: dict[str, int], where: str, said: list[str]) -> SplitWish:
    """Layers of each stage, or of each chunk in the virtual pipeline's order, where they are listed; else the planner's cut."""
    name = "layers_per_chunk" if degrees.get("vpp", 1) > 1 else "layers_per_stage"
    listed = doc.get(f"strategy.{name}")
    if not isinstance(listed, list):
        if name == "layers_per_chunk" and doc.get("strategy.layers_per_stage") is not None:
            said.append("stages cut by the planner: layers_per_stage does not say what each chunk holds, layers_per_chunk would")
        return SplitWish(free=True)
    counts = [whole(each, f"{where}: strategy.{name}", 0) for each in listed]
    ahead = doc.get(f"strategy.mtp_{name}")
    if ahead is None:
        return SplitWish(counts=tuple(counts))
    if not isinstance(ahead, list) or len(ahead) != len(listed):
        raise InputError(f"{where}: strategy.mtp_{name} must be a list of {len(listed)} numbers, as {name} is")
    mtp = [whole(each, f"{where}: strategy.mtp_{name}", 0) for each in ahead]
    if any(more and any(counts[number:]) for number, more in enumerate(mtp, start=1)):
        raise InputError(f"{where}: strategy.mtp_{name} puts MTP layers before decoder layers; they follow the last of them")
    cuts = (0, *accumulate(layers + more for layers, more in zip(counts, mtp, strict=True)))
    vpp = degrees.get("vpp", 1)
    return SplitWish(layout=Split(len(listed) // vpp, vpp, cuts).stages(sum(counts), "none"))


def _shape(given: Any, where: str) -> ModelSpec | None:
    """A model that is written out rather than named."""
    return to_record(ModelSpec, given, where) if isinstance(given, dict) and "kinds" in given else None


def _resource(name: str) -> tuple[str, str]:
    """Where a resource may be given."""
    return f"resource.{name}", f"resources.{name}"


def _not_given(doc: Document, column: str) -> str:
    """That a degree is taken as 1, and what is there in its stead if it looks like it."""
    name = STRATEGY[column][0]
    near = get_close_matches(f"strategy.{name}", doc.untaken, 1, 0.9)
    return f"{column} 1: strategy.{name} is not given" + (f"; {near[0]} is not known" if near else "")


def _fault_tolerance(doc: Document) -> FaultTolerance | None:
    """What is said of failures; None where nothing is. InputError where it is no mapping."""
    if doc.get(TOLERANCE) is not None:
        raise InputError(f"{doc.where}: {TOLERANCE} must be a mapping of checkpoint_interval, node_failure_policy and state_store")
    if not any(path.startswith(f"{TOLERANCE}.") for path in doc.values):
        return None
    store = doc.get(f"{TOLERANCE}.state_store")
    stores = store if isinstance(store, list) else [] if store is None else [store]
    return FaultTolerance(
        checkpoint_interval=_time(doc, "checkpoint_interval"),
        node_failure_policy=doc.text(f"{TOLERANCE}.node_failure_policy"),
        state_store=(*map(str, stores), *(str(each) for each in doc.under(f"{TOLERANCE}.state_store"))),
        checkpoint_save_time=_time(doc, "checkpoint_save_time"),
    )


def _time(doc: Document, name: str) -> str | None:
    """A time as it is written, its unit maybe in a key of its own or in the key's name."""
    named = {unit: doc.text(f"{TOLERANCE}.{name}_{unit}") for unit in UNITS}
    amount, unit = doc.text(f"{TOLERANCE}.{name}"), doc.text(f"{TOLERANCE}.{name}_unit")
    if amount is not None:
        return amount if unit is None else f"{amount} {unit}"
    return next((f"{value} {unit}" for unit, value in named.items() if value is not None), None)

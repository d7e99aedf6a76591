"""A plan as the YAML file of a job for a cluster's scheduler: resources, strategy and fault tolerance."""

from __future__ import annotations

from typing import Any

from ...search_spaces.errors import InputError
from ...search_spaces.inputs import catalog_names, load_model
from ...search_spaces.layout import Layout
from ...search_spaces.model import ModelSpec
from ..result import Plan
from .folder import folder
from .knobs import Dialect
from .launch import SAVE_INTERVAL, commented, layout_words, origin, predicted
from .request import Request, refuse_unsayable
from .splits import layer_count, virtual_chunks

FRAMEWORK = "job"
FILE = "job.yaml"


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """job.yaml and how it is used; InputError for a version, which the file does not have."""
    import yaml

    if version is not None:
        raise InputError(f"framework-version: {version} says nothing to a job file; leave it out")
    asked = Request(plan, Dialect(FRAMEWORK, ()))
    refuse_unsayable(asked)
    head = commented(
        [
            origin(asked),
            f"Layout: {layout_words(plan.plan)}.",
            predicted(asked),
            "accelerator_per_node counts the accelerators of one supernode. Name a state_store that outlives a server.",
        ]
    )
    body = yaml.safe_dump({"task": _task(asked)}, sort_keys=False, allow_unicode=True, width=112)
    return folder(asked, {FILE: "\n".join([*head, body])}, STEPS, NOTES)


STEPS = (
    f"Name in {FILE}, as state_store, what checkpoints are kept in: it must outlive a server, which /dev/shm does not.",
    "Submit it to the scheduler; what its keys are called there, is the scheduler's own: resource counts supernodes and the "
    "accelerators of one, strategy is the layout, fault_tolerance says when to save and what to do when a server fails.",
    f"`paraplan check {FILE} --cluster NAME` judges it again, after a change or on another cluster.",
)
NOTES = (
    "The scheduler starts no framework by it: export to that of the job as well, which sets what trains as this layout says.",
    f"A save every {SAVE_INTERVAL} steps is a beginning; `paraplan check` says what interval the cluster's failures ask for.",
)


def _task(asked: Request) -> dict[str, Any]:
    layout, workload, cluster = asked.layout, asked.problem.workload, asked.problem.cluster
    supernode = min(asked.problem.allocated_sizes[cluster.supernode_place], layout.devices)
    return {
        "name": asked.spec.name,
        "model": _model(asked.spec),
        "resource": {
            "supernode": -(-layout.devices // supernode),
            "accelerator_per_node": supernode,
            **({"accelerators": layout.devices} if layout.devices % supernode else {}),  # the last supernode is not full
            "accelerator": cluster.accelerator.name,
        },
        "strategy": {
            **dict(strategy(layout).values()),
            "global_batch_size": workload.global_batch,
            "seq_len": workload.seq_len,
            "precision": workload.precision,
        },
        "fault_tolerance": {
            "checkpoint_interval": f"{SAVE_INTERVAL} steps",
            "node_failure_policy": "restart",
            "state_store": None,
        },
    }


def _model(spec: ModelSpec) -> str | dict[str, Any]:
    """The model's name where the catalog has it so; else the name with its shape, which no name would lead to."""
    known = load_model(spec.name).model_copy(update={"source": spec.source}) if spec.name in catalog_names("models") else None
    return spec.name if known == spec else spec.model_dump(mode="json", exclude_none=True)


def strategy(layout: Layout) -> dict[str, tuple[str, Any]]:
    """Knob → key and value of all that a layout sets.

    Stages are layers of every chunk in the order of the virtual pipeline, none where they are left open; MTP layers likewise where
    they are not with the loss.
    """
    each = "chunk" if layout.vpp > 1 else "stage"
    chunks = virtual_chunks(layout.stages, layout.schedule) if layout.stages else ()
    apart = any(chunk.mtp and not chunk.loss for chunk in chunks)
    return {
        "tp": ("tensor_parallel", layout.tp),
        "pp": ("pipeline_parallel", layout.pp),
        "vpp": ("virtual_pipeline_parallel", layout.vpp),
        "dp": ("data_parallel", layout.dp),
        "cp": ("context_parallel", layout.cp),
        "ep": ("expert_parallel", layout.ep),
        "etp": ("expert_tensor_parallel", layout.etp),
        "sequence_parallel": ("sequence_parallel", layout.sequence_parallel),
        "micro_batch": ("micro_batch_size", layout.micro_batch),
        "num_microbatches": ("num_microbatches", layout.num_microbatches),
        "schedule": ("schedule", layout.schedule),
        "cp_type": ("cp_type", layout.cp_type),
        "optimizer_sharding": ("optimizer_sharding", layout.optimizer_sharding),
        "recompute": ("recompute", layout.recompute),
        "offload": ("offload", layout.offload),
        "rank_order": ("rank_order", layout.rank_order),
        **({"stages": (f"layers_per_{each}", [layer_count(chunk) for chunk in chunks])} if chunks else {}),
        **({"mtp_stages": (f"mtp_layers_per_{each}", [chunk.mtp for chunk in chunks])} if apart else {}),
    }

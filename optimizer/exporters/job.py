"""A plan as the YAML file of a job for a cluster's scheduler: resources, strategy and fault tolerance."""

from __future__ import annotations

from typing import Any

from ...search_spaces.errors import InputError
from ...search_spaces.inputs import catalog_names, load_model
from ...search_spaces.model import ModelSpec
from ..result import Plan
from .knobs import Dialect
from .launch import SAVE_INTERVAL, commented, layout_words, origin, predicted
from .request import Request, refuse_unsayable
from .splits import layer_count, virtual_chunks

FRAMEWORK = "job"
FILE = "job.yaml"


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """job.yaml; InputError for a version, which the file does not have."""
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
    return {FILE: "\n".join([*head, body])}


def _task(asked: Request) -> dict[str, Any]:
    layout, workload, cluster = asked.layout, asked.problem.workload, asked.problem.cluster
    supernode = cluster.allocated_sizes(layout.devices)[[level.name for level in cluster.levels].index(cluster.supernode)]
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
            "tensor_parallel": layout.tp,
            "pipeline_parallel": layout.pp,
            "virtual_pipeline_parallel": layout.vpp,
            "data_parallel": layout.dp,
            "context_parallel": layout.cp,
            "expert_parallel": layout.ep,
            "expert_tensor_parallel": layout.etp,
            "sequence_parallel": layout.sequence_parallel,
            "micro_batch_size": layout.micro_batch,
            "num_microbatches": layout.num_microbatches,
            "global_batch_size": workload.global_batch,
            "seq_len": workload.seq_len,
            "precision": workload.precision,
            "schedule": layout.schedule,
            "cp_type": layout.cp_type,
            "optimizer_sharding": layout.optimizer_sharding,
            "recompute": layout.recompute,
            "offload": layout.offload,
            "rank_order": layout.rank_order,
            **_cut(asked),
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


def _cut(asked: Request) -> dict[str, list[int]]:
    """Layers of every chunk in the order of the virtual pipeline, none where the plan leaves its stages open; MTP layers likewise
    where they are not with the loss."""
    layout, each = asked.layout, "chunk" if asked.layout.vpp > 1 else "stage"
    chunks = virtual_chunks(layout.stages, layout.schedule) if layout.stages else ()
    found = {f"layers_per_{each}": [layer_count(chunk) for chunk in chunks]}
    return found if asked.mtp_with_loss else {**found, f"mtp_layers_per_{each}": [chunk.mtp for chunk in chunks]}

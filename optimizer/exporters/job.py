"""A plan as the YAML file of a job for a cluster's scheduler: resources, strategy and fault tolerance."""

from __future__ import annotations

from typing import Any

from ...search_spaces.errors import InputError
from ...search_spaces.layout import Layout
from ..result import Plan
from .knobs import Dialect
from .launch import SAVE_INTERVAL, commented, layout_words, origin, predicted
from .request import Request, refuse_unsayable
from .splits import layer_counts

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
        "model": asked.spec.name,
        "resource": {
            "supernode": -(-layout.devices // supernode),
            "accelerator_per_node": supernode,
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
            "layers_per_chunk" if layout.vpp > 1 else "layers_per_stage": _layers(layout),
        },
        "fault_tolerance": {
            "checkpoint_interval": f"{SAVE_INTERVAL} steps",
            "node_failure_policy": "restart",
            "state_store": None,
        },
    }


def _layers(layout: Layout) -> list[int]:
    """Decoder layers of every chunk in the order of the virtual pipeline; none where the plan leaves its stages open."""
    return list(layer_counts(layout.stages, layout.schedule)) if layout.stages else []

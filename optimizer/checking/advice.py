"""What is legal in a job but costs: bubbles, groups that leave their supernode, host memory."""

from __future__ import annotations

from collections.abc import Iterator

from ...cost_models.memory import GIB
from ...cost_models.operation import FP32
from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.layout import Layout, Problem, parse_offload
from ..readers import Job
from ..reports import wording
from .known import Known


def advice(job: Job, known: Known, cluster: ClusterSpec | None, problem: Problem | None, layout: Layout) -> Iterator[str]:
    """What is legal but costs: bubbles, TP or EP that leave a supernode, host memory."""
    values = known.values
    count, pp, vpp = values.get("num_microbatches"), values["pp"], values["vpp"]
    if count is not None and pp > 1 and count < 4 * pp and count * values["micro_batch"] * values["dp"] == values["global_batch"]:
        bubble = (pp - 1) / (count * vpp)
        least = 4 * pp * values["micro_batch"] * values["dp"]
        micro, leave = ("1 micro-batch", "leaves") if count == 1 else (f"{count} micro-batches", "leave")
        yield (
            f"{micro} on pp = {pp} stages {leave} the pipeline idle for {wording.percent(bubble)} of its work "
            f"({wording.percent(bubble / (1 + bubble))} of the step); a global batch of {least:,} would have 4 per stage"
        )
    size = values.get("supernode_size")
    if size is not None and cluster is not None:
        broken = {rule.id for rule in known.failed}
        for name, span in (("TP", values["tp"]), ("EP", values["ep"] * values["etp"])):
            if span > size and not (name == "TP" and "C141" in broken):  # which says as much
                unit = "supernode of the job" if job.supernode_size is not None else cluster.supernode
                outside = f"{name} groups span {span} devices, more than the {size} of one {unit}"
                yield f"{outside}: they talk over the slower network"
    if problem is not None and layout.offload != "none" and "dp" in values:
        yield from _host_memory(problem, layout)


def _host_memory(problem: Problem, layout: Layout) -> Iterator[str]:
    """What the hosts hold of the optimizer, FP32 gradients to step with beside its states; sharded ones lie on every device once,
    whole ones once per replica.
    """
    share = parse_offload(layout.offload)[0]
    if not share:
        return
    sharded = layout.optimizer_sharding != "none"
    copies = layout.devices if sharded else layout.tp * layout.pp
    each = problem.stack.optimizer_bytes + FP32
    needed = share * each * problem.model.parameters(mtp=True) / copies
    room = problem.cluster.host_link.memory_bytes_per_device.value
    verdict = "more than" if needed > room else "of"
    said = f"optimizer states and gradients on the host, {each:g} B per parameter, take {wording.gib(needed / GIB)} for each device"
    yield f"{said}, {verdict} the {wording.gib(room / GIB)} that it has, before buffers and copies of the weights"

"""What a job of the Megatron family changes of its stack's abilities and costs, from what its options set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...search_spaces.inputs import load_stack
from ...search_spaces.libraries import mindspeed_llm
from ...search_spaces.stack import FP32_ADAM, Footprint
from .options import Knobs

FLEX_BACKENDS = ("deepep", "hybridep")  # whose exchanges have a price of their own
EP_OVERLAPPED = "megatron-bridge-ep-overlap"
"""The stack that says what share of the exchange of tokens Megatron-Core's paired passes hide."""
FUSED_LOSS = "megatron-bridge"
"""The stack that says what a logit holds under Transformer Engine's cross entropy."""


def exposed(knobs: Knobs) -> Iterator[str]:
    """Traffic that the options leave beside the compute instead of behind it."""
    if not knobs.has("overlap_gradients"):
        yield "dp_gradients"
    if not (knobs.has("overlap_parameters") and knobs.has("overlap_gradients")):
        yield "dp_parameters"
    if knobs.has("no_pp_overlap"):
        yield "pp_interleaved"


def stack_changes(knobs: Knobs, framework: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if knobs.has("gradients_bf16"):
        changes["gradient_bytes"] = 2
    if knobs.text("first_moment") == "bf16" and knobs.text("second_moment") == "bf16":
        changes["optimizer_bytes"] = 8.0
    if knobs.has("reuse_fp32"):
        changes["optimizer_bytes"] = float(changes.get("optimizer_bytes", FP32_ADAM)) - mindspeed_llm().shared_weight_bytes.value
        changes["optimizer_offload"] = knobs.has("optimizer_offload")  # each excludes the other
    if framework == "mindspeed-llm":
        changes["attention_kernel"] = "flash" if knobs.has("attention_kernel") else "unfused"
    elif knobs.text("attention_kernel") == "unfused":
        changes["attention_kernel"] = "unfused"
    dispatcher = knobs.text("dispatcher")
    if dispatcher in ("allgather", "alltoall", "flex"):
        changes["moe_dispatcher"] = dispatcher
        backend = knobs.text("flex_backend") or ("deepep" if framework == "megatron-lm" else "")  # Megatron's own default
        if dispatcher == "flex" and backend in FLEX_BACKENDS:
            changes["flex_backend"] = backend
    elif knobs.has("experts") and dispatcher is None and framework != "megatron-bridge":
        changes["moe_dispatcher"] = "allgather"
    footprint: dict[str, Any] = {}
    if gathers_fp8(knobs, framework):
        changes["gathered_weight_bytes"] = 1
        footprint["cached_weight_bytes"] = {}  # the weights themselves are what is cast
    bucket = knobs.whole("gradient_bucket")
    if bucket:
        changes["gradient_bucket"] = bucket
    divisor = knobs.whole("vocab_divisor")
    if divisor:
        changes["vocab_divisor"] = divisor
    if knobs.has("recompute_ahead"):
        changes["recompute_ahead"] = True
    if knobs.has("overlap_ep") and framework != "mindspeed-llm":
        changes["overlap"] = {"ep": load_stack(EP_OVERLAPPED).overlap.ep}
    logit_bytes = _logit_bytes(knobs)
    if logit_bytes is not None:
        footprint["logit_bytes"] = logit_bytes
    if footprint:
        changes["footprint"] = footprint
    changes["sets_microbatch_group"] = False  # a job runs the groups that it asks for, or those of pp
    group = knobs.whole("microbatch_group")
    if group:
        changes["microbatch_group"] = group
    return changes


def gathers_fp8(knobs: Knobs, framework: str) -> bool:
    """Whether weights are gathered in FP8: only a job that computes in it can, and PyTorch's FSDP does not.

    A recipe of Megatron-Bridge may say so where it is not read.
    """
    computes = knobs.has("fp8") or framework == "megatron-bridge"
    return knobs.has("fp8_parameters") and computes and not knobs.has("torch_fsdp")


def _logit_bytes(knobs: Knobs) -> float | None:
    """What a logit holds at the loss, where options choose its kernel; None leaves it to the stack.

    Transformer Engine's kernel writes the gradient over the logits, Megatron-Core's own keeps an FP32 copy, fused or not.
    """
    kernel, off = knobs.text("loss_kernel"), "fused_cross_entropy" in knobs.names and not knobs.has("fused_cross_entropy")
    if off or kernel == "native":
        return Footprint().logit_bytes
    fused = kernel == "te" and knobs.has("fused_cross_entropy")
    return load_stack(FUSED_LOSS).footprint.logit_bytes if fused else None

"""Stack: the training software, what it can express and overlap, and its own costs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .cluster import Figure
from .model import Frozen

Framework = Literal["megatron-lm", "megatron-bridge", "mindspeed-llm", "mindformers", "torchtitan", "deepspeed", "nanotron"]
SplitForm = Literal["even", "first_last", "layer_list", "noop_layers", "layout"]
"""Ways in which a framework can be told where stages are cut, from the least to the most free."""

Fraction = Annotated[float, Field(ge=0, le=1)]


class Overlap(Frozen):
    """Share of each kind of traffic that the stack can hide behind compute running at the same time (0 none, 1 all)."""

    tp: Fraction = 0.0
    cp: Fraction = 0.0
    ep: Fraction = 0.0
    pp_interleaved: Fraction = 0.0  # p2p of the interleaved schedule; plain 1F1B exposes it
    dp_gradients: Fraction = 0.0
    dp_parameters: Fraction = 0.0
    fsdp: Fraction = 0.0
    offload: Fraction = 0.0


class Stack(Frozen):
    """One training framework at one version, as it is usually run."""

    name: str
    framework: Framework
    version: str
    attention_kernel: Literal["flash", "unfused"] = "flash"
    fused_kernels: bool = True  # norms, activations, rotary embedding and cross entropy each in one kernel
    overlap: Overlap = Overlap()
    cuda_graphs: bool = False
    moe_dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall"
    gradient_bytes: Literal[2, 4] = 4  # of the accumulation buffer
    optimizer_bytes: float = 12.0  # fp32 main weight and two Adam moments
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    cp_types: tuple[str, ...] = ("p2p",)
    optimizer_shardings: tuple[str, ...] = ("none", "zero1")
    recompute_modules: tuple[str, ...] = ("core_attn",)  # names accepted after "selective:"
    recompute_block: bool = True  # full recompute of the first K layers of each chunk
    rank_orders: tuple[str, ...] = ("tp-cp-ep-dp-pp",)
    split_forms: tuple[SplitForm, ...] = ("even",)
    optimizer_offload: bool = False
    kv_replication: bool = True  # TP beyond the KV heads replicates them; without it kv_heads must divide
    expert_tensor_parallel: bool = True  # has its own ETP degree
    vocab_divisor: int = 128  # vocabulary is padded to a multiple of this times tp
    efficiency: Figure  # what is left of the kernels' measured rate in a training step
    host_floor_dense_s: Figure  # host time to launch one dense layer, forward
    host_floor_moe_s: Figure
    step_overhead_s: Figure  # per step: data, logging, host synchronisation
    precisions: tuple[str, ...] = ("bf16", "fp16")
    note: str = ""
    source: str = ""

"""Stack: the training software, what it can express and overlap, and its own costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from .cluster import Figure
from .model import Frozen
from .vocabulary import CP_TYPES, RANK_ORDERS, RECOMPUTE_MODULES, SCHEDULES, SHARDINGS
from .workload import Precision

Framework = Literal["megatron-lm", "megatron-bridge", "mindspeed-llm", "mindformers", "torchtitan", "deepspeed", "nanotron"]
SplitForm = Literal["even", "first_last", "layer_list", "noop_layers", "layout"]
"""Ways in which a framework can be told where stages are cut, from the least to the most free."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[tuple[str, ...], Field(min_length=1)]
WHOLE = Figure(value=1.0, source="the profile's own rate: nothing is known to take from it", grade="official")
NOTHING = Figure(value=0.0, source="not known apart from the layer's host floor", grade="official")
SHARES = ("efficiency", "attention_efficiency", "elementwise_efficiency", "scale_out_efficiency")
"""Parameters that divide a time: they must be above 0."""
FLOORS = ("host_floor_dense_s", "host_floor_moe_s", "host_floor_per_collective_s", "host_floor_pipeline_s")
CALIBRATED = (*SHARES, *FLOORS, "step_overhead_s")
"""What a stack's own measured runs can tell, and what may differ from accelerator to accelerator."""


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
    optimizer_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 12.0  # fp32 main weight and two Adam moments
    schedules: Words = ("1f1b", "interleaved")
    cp_types: Words = ("p2p",)
    optimizer_shardings: Words = ("none", "zero1")  # "hsdp" offers every hsdp:K
    recompute_modules: tuple[str, ...] = ("core_attn",)  # names accepted after "selective:"
    recompute_block: bool = True  # full recompute of the first K layers of each chunk
    rank_orders: Words = ("tp-cp-ep-dp-pp",)
    split_forms: Annotated[tuple[SplitForm, ...], Field(min_length=1)] = ("even",)
    optimizer_offload: bool = False
    offloaded_step: Literal["host", "device"] = "host"  # a CPU optimizer, or states that visit the device to be updated
    kv_replication: bool = True  # TP beyond the KV heads replicates them; without it kv_heads must divide
    expert_tensor_parallel: bool = True  # has its own ETP degree
    vocab_divisor: PositiveInt = 128  # vocabulary is padded to a multiple of this times tp
    efficiency: Figure  # what is left of the kernels' measured rate in a training step
    host_floor_dense_s: Figure  # host time to launch one dense layer, forward
    host_floor_moe_s: Figure
    attention_efficiency: Figure = WHOLE  # share of the profile's attention rate that the stack's kernel reaches
    elementwise_efficiency: Figure = WHOLE  # share of the profile's memory rate that its elementwise kernels reach
    scale_out_efficiency: Figure = WHOLE  # share of the profile's scale-out rates that its collectives reach
    host_floor_per_collective_s: Figure = NOTHING  # host time that each TP collective adds to a layer's floor
    host_floor_pipeline_s: Figure = NOTHING  # host time that a pipeline engine adds per layer, pass and TP rank
    step_overhead_s: Figure  # per step: data, logging, host synchronisation
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("bf16", "fp16")
    note: str = ""
    source: str = ""
    by_accelerator: dict[str, dict[str, Figure]] = {}  # figures of CALIBRATED that differ on an accelerator

    def on(self, accelerator: str) -> Stack:
        """The stack as it runs on the accelerator of this name; another grade of it keeps the stack's own figures."""
        return self.with_figures(self.by_accelerator.get(accelerator, {}))

    def with_figures(self, figures: Mapping[str, Figure]) -> Stack:
        """The stack with some figures replaced. Under CUDA graphs the host launches no layer, whatever the floors are elsewhere."""
        kept = {name: figure for name, figure in figures.items() if not (self.cuda_graphs and name in FLOORS)}
        return self.model_copy(update={**kept, "by_accelerator": {}})

    def cuts_freely(self, vpp: int) -> bool:
        """Whether it can be told any contiguous split into stages of vpp chunks."""
        forms = set(self.split_forms)
        return bool(forms & {"layout", "noop_layers"}) or ("layer_list" in forms and vpp == 1)

    @field_validator("schedules", "cp_types", "optimizer_shardings", "rank_orders", "recompute_modules")
    @classmethod
    def _known_words(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        known = {
            "schedules": SCHEDULES,
            "cp_types": CP_TYPES,
            "optimizer_shardings": SHARDINGS,
            "rank_orders": RANK_ORDERS,
            "recompute_modules": RECOMPUTE_MODULES,
        }[str(info.field_name)]
        for value in values:
            if value not in known:
                raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        return values

    @field_validator(*SHARES)
    @classmethod
    def _some_efficiency(cls, figure: Figure) -> Figure:
        if figure.value <= 0:
            raise ValueError("must be greater than 0: it divides every kernel's time")
        return figure

    @field_validator("by_accelerator")
    @classmethod
    def _known_figures(cls, accelerators: dict[str, dict[str, Figure]]) -> dict[str, dict[str, Figure]]:
        for accelerator, figures in accelerators.items():
            check_figures(accelerator, figures)
        return accelerators


def check_figures(accelerator: str, figures: Mapping[str, Figure]) -> None:
    """Refuses, with ValueError, figures that no accelerator changes and shares that are not above 0."""
    for name, figure in figures.items():
        if name not in CALIBRATED:
            raise ValueError(f"{accelerator}: {name!r} is not one of {', '.join(CALIBRATED)}")
        if name in SHARES and figure.value <= 0:
            raise ValueError(f"{accelerator}: {name} must be greater than 0: it divides a time")

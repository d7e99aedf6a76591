"""Stack: the training software, what it can express and overlap, and its own costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from .cluster import Figure
from .libraries import deep_ep, pytorch
from .model import Frozen
from .vocabulary import CP_TYPES, RANK_ORDERS, RECOMPUTE_MODULES, SCHEDULES, SHARDINGS
from .workload import Precision

Framework = Literal["megatron-lm", "megatron-bridge", "mindspeed-llm", "mindformers", "torchtitan", "deepspeed", "nanotron"]
MEGATRON_CORE: tuple[Framework, ...] = ("megatron-lm", "megatron-bridge", "mindspeed-llm")
"""Those built on Megatron-Core, whose initialize_model_parallel takes any rank order from a program."""
SplitForm = Literal["even", "first_last", "layer_list", "noop_layers", "offset", "layout"]
"""Ways in which a framework can be told where stages are cut, from the least to the most free."""
ANY_CHUNKS = frozenset(("noop_layers", "offset", "layout"))
"""Those that cut any chunk anywhere; a list of layers cuts stages of one chunk."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[tuple[str, ...], Field(min_length=1)]
WHOLE = Figure(value=1.0, source="the profile's own rate: nothing is known to take from it", grade="official")
NOTHING = Figure(value=0.0, source="not known apart from the layer's host floor", grade="official")
FREE = Figure(value=0.0, source="a network without congestion: collectives of many devices are as fast as of few", grade="official")
FP32_ADAM = 12.0  # bytes of states per parameter: main weight and two moments
UNCONGESTED = 64.0
"""Devices of a job at which a scale-out efficiency is stated: about as many as hang on one set of leaf switches."""
SHARES = ("efficiency", "attention_efficiency", "elementwise_efficiency", "scale_up_efficiency", "scale_out_efficiency")
"""Parameters that divide a time: they must be above 0."""
FLOORS = ("host_floor_dense_s", "host_floor_moe_s", "host_floor_per_collective_s", "host_floor_pipeline_s")
GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""What Megatron's cuda_graph_scope can capture of a layer, besides the whole iteration."""
CALIBRATED = (*SHARES, "scale_out_congestion", *FLOORS, "step_overhead_s")
"""What a stack's own measured runs can tell, and what may differ from accelerator to accelerator."""


class Overlap(Frozen):
    """Share of each kind of traffic that the stack can hide behind compute running at the same time (0 none, 1 all)."""

    tp: Fraction = 0.0
    tp_wgrad: Fraction = 0.0  # of the input gradient's reduction, behind the same linear's weight gradient
    cp: Fraction = 0.0
    ep: Fraction = 0.0
    pp_interleaved: Fraction = 0.0  # p2p of the interleaved schedule; plain 1F1B exposes it
    dp_gradients: Fraction = 0.0
    zero1_gradients: Fraction = 1.0  # what of dp_gradients is left where ranks share out optimizer states
    dp_parameters: Fraction = 0.0
    fsdp: Fraction = 0.0
    offload: Fraction = 0.0


class Footprint(Frozen):
    """What an implementation holds in memory beyond fused kernels over sharded tensors, as its own code says (`source`).

    Widths are per token on a rank; the defaults are those of Megatron-Core.
    """

    logit_bytes: Annotated[float, Field(ge=2, allow_inf_nan=False)] = 10.0  # per logit at the loss: BF16, FP32 copy, its gradient
    gathered_inputs: bool = False  # under SP a column-parallel GEMM keeps its gathered input, not the rank's share of it
    separate_activation: bool = False  # a gated MLP keeps act(gate) beside gate, up and their product
    copied_attention: bool = False  # attention's output is copied into the order that its projection reads, and both stay
    score_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 4.0  # per score of unfused attention: scores, probabilities
    dropout_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # per element that attention or an MLP adds to the
    # residual stream: the mask of the dropout before it; 0 without dropout
    expert_inner_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0  # per value that an expert's activation reads
    combined_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # per value that experts send back, kept where scores
    # weigh it: their gradient needs it; 0 where the experts' activation has weighed it before
    norm_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # per element of a norm, beside its input and output
    replicated_embedding: bool = False  # TP leaves the embedding whole
    compute_gradient_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # per weight, beside the accumulation
    step_gradient_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # per weight that a rank updates: gradients cast
    # for the step into one block, for which what activations leave free has no place
    released_gradients: bool = False  # a single micro-batch without a pipeline leaves no gradient whole: none is accumulated, and
    # each goes once its shard is reduced
    unsharded_gradient_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # FSDP, of whole gradients between
    # micro-batches where it reduces only after the last one; 0: each micro-batch reduces
    root_unit: bool = False  # FSDP keeps embedding and head in one unit that stays gathered
    root_resharded: bool = False  # but not from the head's forward to its backward, where the loss is
    gathered_stages: bool = False  # FSDP leaves the weights of a pipeline's stages gathered between micro-batches, and their
    # gradients whole until the last one
    gradient_buffers: bool = False  # autograd gets a BF16 stand-in for each shape of weight whose gradient a GEMM accumulates
    cached_weight_bytes: dict[Precision, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}  # by precision, per parameter: a
    # BF16 weight's casts for the forward and the backward pass, kept over micro-batches; embedding and head are counted too
    source: str = ""


class Stack(Frozen):
    """One training framework at one version, as it is usually run."""

    name: str
    framework: Framework
    version: str
    attention_kernel: Literal["flash", "unfused"] = "flash"
    tiled_head_dim: PositiveInt | None = None  # heads of any width run as ones so wide: tiles hold fewer keys of wider ones
    eager_kernels: tuple[Literal["norm", "activation", "rotary", "loss"], ...] = ()  # chains of kernels; the others are one each
    fused_gate: bool = True  # gate and up projection of a gated MLP are one GEMM; apart, each sends its input's gradient
    shared_gathers: bool = True  # linears with one input gather it once under SP; else each of q, k, v, gate and up for itself
    fused_accumulation: bool = True  # GEMMs add to the gradient buffer; else every micro-batch passes over it once more
    fp8_gathers: bool = False  # under FP8 inputs and output gradients of linears are cast before TP gathers them
    fp8_cast_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # per value of an operand that kernels of their own
    # cast for each of its GEMMs; 0: whatever produces it casts it, and one scale serves both of its GEMMs
    gathered_logits: bool = False  # every TP rank holds all logits and computes the whole loss
    scattered_p2p: bool = False  # without SP, TP ranks send a share of the activation each to the next stage, which gathers them
    blocking_p2p: bool = False  # a message between stages holds up both of them, and all ranks of a stage send at once
    zero1_reduction: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"  # of gradients, once per step
    zero2_gathers: Literal["once", "every micro-batch"] = "once"  # of weights; FSDP lets go of them after every backward
    copies_reduced: Literal["every micro-batch", "last micro-batch"] = "last micro-batch"  # gradients between HSDP's copies
    pipeline_exchanges: Literal["once", "every micro-batch"] = "once"  # of FSDP's stages that stay gathered, whole gradients too
    overlap: Overlap = Overlap()
    fused_tp: Annotated[float, Field(ge=0, le=1)] = 0.0  # of TP's traffic, hidden where products work on pieces of it (MC2)
    cuda_graphs: bool = False
    moe_dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall"
    flex_backend: Literal["", "deepep", "hybridep"] = ""  # of the flex dispatcher; unset: what most stacks run on the accelerator
    exchange_sms: PositiveInt = Field(default_factory=lambda: deep_ep().multiprocessors)  # given to its kernels where those copy by
    # themselves
    dispatch_precision: Literal["bf16", "fp8"] = "bf16"  # of tokens on their way to experts; they come back in BF16
    expert_gemms: Literal["grouped", "one by one"] = "grouped"  # in one kernel, or a kernel for each expert
    gradient_bytes: Literal[2, 4] = 4  # of the accumulation buffer
    gradient_bucket: PositiveInt | None = None  # parameters whose gradients data parallelism reduces in one message, where that is
    # once per step, and whose weights it gathers in one; unset: Megatron-Core's own
    reduced_gradient_bytes: Literal[2, 4] | None = None  # of what data parallelism sends, where it is another width
    gathered_weight_bytes: Literal[1, 2] = 2  # of what data parallelism gathers of weights: 1 where these are kept in FP8
    optimizer_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = FP32_ADAM
    footprint: Footprint = Footprint()
    reserved_over_allocated: Figure = Field(default_factory=lambda: pytorch().reserved_over_allocated)
    schedules: Words = ("1f1b", "interleaved")
    microbatch_group: NonNegativeInt = 0  # that an interleaved chunk runs before the next one does; 0: as many as there are stages
    sets_microbatch_group: bool = False  # where that is 0, more can be asked for when stages do not divide the micro-batches
    recompute_ahead: bool = False  # interleaved chunks of one layer redo it before its gradient comes (MindSpeed's ripipe)
    split_backward: bool = True  # two-way schedules leave weight gradients for their bubbles; else every backward is whole
    cp_types: Words = ("p2p",)
    optimizer_shardings: Words = ("none", "zero1")  # "hsdp" offers every hsdp:K
    recompute_modules: tuple[str, ...] = ("core_attn",)  # names accepted after "selective:"
    recomputed_ends: bool = False  # full recompute counts embedding and head among the layers and redoes them too, but for the loss
    recompute_block: bool = True  # full recompute of the first K layers of each chunk
    recompute_by_chunk: bool = False  # another K for every chunk
    rank_orders: Words = ("tp-cp-ep-dp-pp",)
    split_forms: Annotated[tuple[SplitForm, ...], Field(min_length=1)] = ("even",)
    optimizer_offload: bool = False
    activation_offload: bool = False  # saved activations of a layer leave the device and come back beside other layers' work
    offloaded_step: Literal["host", "device"] = "host"  # a CPU optimizer, or states that visit the device to be updated
    sequence_parallel: bool = True  # shards beside TP what TP leaves whole
    kv_replication: bool = True  # TP beyond the KV heads replicates them; without it kv_heads must divide
    expert_tensor_parallel: bool = True  # has its own ETP degree
    experts_across_tp: bool = True  # EP takes ranks of TP too, rather than of dp·cp alone
    vocab_divisor: PositiveInt = 128  # vocabulary is padded to a multiple of this times tp
    efficiency: Figure  # what is left of the kernels' measured rate in a training step
    host_floor_dense_s: Figure  # host time to launch one dense layer, forward
    host_floor_moe_s: Figure
    attention_efficiency: Figure = WHOLE  # share of the profile's attention rate that the stack's kernel reaches
    elementwise_efficiency: Figure = WHOLE  # share of the profile's memory rate that its elementwise kernels reach
    host_floor_eager: Figure = WHOLE  # a dense layer's floor under TP where it is not compiled, over that where it is
    host_floor_casts: Figure = WHOLE  # a MoE layer's floor under FP8 and FP4 over that in BF16: casts, scales and transposes
    host_floor_per_expert_s: Figure = NOTHING  # host time that each expert of the device adds: its GEMMs are launched one by one
    host_wait_moe_s: Figure = NOTHING  # idle device time per MoE layer, forward: the host reads token counts before it launches on
    graph_modules: tuple[str, ...] = ()  # parts of a layer that are replayed from CUDA graphs (GRAPH_MODULES)
    graph_shares: Mapping[str, Figure] = {}  # share of a MoE layer's floor that a module's graph saves
    scale_up_efficiency: Figure = WHOLE  # share of the profile's rates inside a supernode that its collectives reach
    scale_out_efficiency: Figure = WHOLE  # share of the profile's scale-out rates that its collectives reach, on 64 devices
    scale_out_congestion: Figure = FREE  # power by which that share falls with the number of devices
    host_floor_per_collective_s: Figure = NOTHING  # host time that each TP collective adds to a layer's floor
    host_floor_pipeline_s: Figure = NOTHING  # host time that a pipeline engine adds per layer, pass and TP rank
    scale_out_delay_s: Figure = NOTHING  # of every collective of a layer that leaves the supernode, before a byte moves
    message_stall_s: Figure = NOTHING  # of every message between stages whose weights no rank shares out (see Rows.stalled_s) …
    stall_free_supernodes: NonNegativeInt = 0  # … of jobs on more supernodes than these
    step_overhead_s: Figure  # per step: data, logging, host synchronisation
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("bf16", "fp16")
    note: str = ""
    source: str = ""

    def with_figures(self, figures: Mapping[str, Figure]) -> Stack:
        """The stack with some figures replaced. Under CUDA graphs the host launches no layer, whatever the floors are elsewhere."""
        kept = {name: figure for name, figure in figures.items() if not (self.cuda_graphs and name in FLOORS)}
        return self.model_copy(update=kept)

    @property
    def launched_moe_share(self) -> float:
        """Share of a MoE layer's host floor that is left beside the modules replayed from graphs."""
        saved = sum(self.graph_shares[name].value for name in self.graph_modules if name in self.graph_shares)
        return max(1.0 - saved, 0.0)

    @property
    def slower_in_pipelines(self) -> bool:
        """Whether a layer costs more in a pipeline than without one."""
        return bool(np.any(self.host_floor_pipeline_s.value) or np.any(self.scale_out_delay_s.value))

    @property
    def stalls(self) -> bool:
        """Whether stages wait for their messages beyond what the schedule of passes tells."""
        return self.blocking_p2p or bool(self.message_stall_s.value)

    @property
    def sends_buckets(self) -> bool:
        """Whether it reduces gradients in buckets of a size that it can be told."""
        return self.framework in MEGATRON_CORE and self.overlap.dp_gradients > 0

    @property
    def sent_gradient_bytes(self) -> float:
        """Bytes per gradient that data parallelism reduces."""
        return float(self.reduced_gradient_bytes or self.gradient_bytes)

    @property
    def dispatched_bytes(self) -> float:
        """Bytes per value of a token that is dispatched; FP8 carries scales."""
        return deep_ep().fp8_bytes if self.dispatch_precision == "fp8" else 2.0

    @property
    def fused_kernels(self) -> bool:
        """Whether norms, activations, rotary embedding and cross entropy are each one kernel."""
        return not self.eager_kernels

    def scale_out_share(self, devices: int) -> float:
        """Share of the scale-out rates that collectives of a job reach: it falls with its size, as flows of many meet on links."""
        share: float = self.scale_out_efficiency.value * (UNCONGESTED / devices) ** self.scale_out_congestion.value
        return share

    def cuts_freely(self, vpp: int) -> bool:
        """Whether it can be told any contiguous split into stages of vpp chunks."""
        return not ANY_CHUNKS.isdisjoint(self.split_forms) or ("layer_list" in self.split_forms and vpp == 1)

    @property
    def sets_ends_apart(self) -> bool:
        """Whether it can be told how many layers the first and the last stage hold, those between being equal."""
        return "first_last" in self.split_forms

    @property
    def bare_ends(self) -> bool:
        """Whether embedding, and loss or MTP layers, can each be a chunk without decoder layers."""
        return "layout" in self.split_forms or "offset" in self.split_forms

    def bare_last(self, vpp: int) -> bool:
        """Whether the last chunk can be without decoder layers.

        An offset may leave the ends of its rows empty (MindSpore Transformers, LayerSetting._check_inputs). The last chunk of a V
        shape, of two chunks a stage, is no end of them.
        """
        return "layout" in self.split_forms or ("offset" in self.split_forms and vpp != 2)

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

    @field_validator("microbatch_group")
    @classmethod
    def _known_groups(cls, size: int, info: ValidationInfo) -> int:
        if size and info.data.get("framework") not in MEGATRON_CORE:
            raise ValueError(f"only {', '.join(MEGATRON_CORE)} are told how many micro-batches go through a chunk at a time")
        return size

    @field_validator("sets_microbatch_group")
    @classmethod
    def _can_be_told(cls, told: bool, info: ValidationInfo) -> bool:
        if told and info.data.get("framework") not in MEGATRON_CORE:
            raise ValueError(f"only {', '.join(MEGATRON_CORE)} can be told how many micro-batches go through a chunk at a time")
        return told

    @field_validator("gradient_bucket")
    @classmethod
    def _known_buckets(cls, size: int | None, info: ValidationInfo) -> int | None:
        if size and info.data.get("framework") not in MEGATRON_CORE:
            raise ValueError(f"only {', '.join(MEGATRON_CORE)} are told how many parameters' gradients are reduced together")
        return size

    @field_validator("graph_modules", "graph_shares")
    @classmethod
    def _known_modules(cls, values: Iterable[str]) -> Iterable[str]:
        for value in values:
            if value not in GRAPH_MODULES:
                raise ValueError(f"{value!r} is not one of {', '.join(GRAPH_MODULES)}")
        return values

    @field_validator(*SHARES)
    @classmethod
    def _some_efficiency(cls, figure: Figure) -> Figure:
        if figure.value <= 0:
            raise ValueError("must be greater than 0: it divides every kernel's time")
        return figure


def check_figures(accelerator: str, figures: Mapping[str, Figure]) -> None:
    """Refuses, with ValueError, figures that no accelerator changes and shares that are not above 0."""
    for name, figure in figures.items():
        if name not in CALIBRATED:
            raise ValueError(f"{accelerator}: {name!r} is not one of {', '.join(CALIBRATED)}")
        if name in SHARES and figure.value <= 0:
            raise ValueError(f"{accelerator}: {name} must be greater than 0: it divides a time")

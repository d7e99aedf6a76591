"""A plan as DeepSpeed's JSON file, and the script that starts a training program with it.

DeepSpeed has no training program of its own: the file sets its engine, and the model is the program's. What the program must do
itself, such as cutting the model into stages, stands on the page beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...search_spaces.layout import ALL_LAYERS, FULL_BLOCK, FULL_UNIFORM, NONE, SELECTIVE
from ..result import Plan
from .documents import nested
from .folder import folder
from .knobs import Settings
from .launch import Script, Variable, launch_script
from .request import PIPELINES_OUTERMOST, Laid, Request, request

FRAMEWORK = "deepspeed"
FILE = "deepspeed.json"
SHAPE = "model.json"
SCRIPT = "deepspeed.sh"


def settings(plan: Plan, version: str | None = None) -> Settings:
    """Every key that the plan decides; Infeasible says what DeepSpeed cannot express."""
    return _settings(request(Request, plan, FRAMEWORK, version, _problems))


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """deepspeed.sh, deepspeed.json and the model's shape; Infeasible as for `settings`."""
    asked = request(Request, plan, FRAMEWORK, version, _problems)
    script = Script(
        command=('"${TRAIN_SCRIPT}"', f'--deepspeed --deepspeed_config "${{HERE}}/{FILE}"'),
        variables=[Variable("TRAIN_SCRIPT", "Python file that builds the model and calls deepspeed.initialize")],
        environment={"SEQ_LEN": str(asked.problem.workload.seq_len)},
        notes=[*_duties(asked), *_notes(asked)],
    )
    steps = (
        f"Install {asked.speaks.title} on every server.",
        f"Set TRAIN_SCRIPT to a program that builds the model of {SHAPE} and passes {FILE} to deepspeed.initialize.",
        *(f"In that program: {duty}." for duty in _duties(asked)),
        f"Run `NODE_RANK=N MASTER_ADDR=… bash {SCRIPT}` on every server, N as in hosts.csv.",
    )
    written = json.dumps(nested(_settings(asked)), indent=2) + "\n"
    return folder(asked, {SCRIPT: launch_script(asked, script), FILE: written, SHAPE: _shape(asked)}, steps, list(_notes(asked)))


def _shape(asked: Request) -> str:
    """The model as paraplan reads it, with the vocabulary that is trained."""
    trained = asked.spec.model_copy(update={"vocab_size": asked.problem.workload.vocab_size or asked.spec.vocab_size})
    return json.dumps(trained.model_dump(mode="json", exclude_none=True), indent=2) + "\n"


def _problems(asked: Request) -> Iterator[str]:
    layout, recompute, both = asked.layout, asked.recompute, asked.layout.tp > 1 and asked.layout.ep > 1
    if asked.shard:
        yield f"optimizer_sharding {layout.optimizer_sharding}: its groups hold weights only, not states; plan with zero3"
    if layout.pp > 1 and layout.optimizer_sharding in ("zero2", "zero3"):
        yield f"optimizer_sharding {layout.optimizer_sharding} with pp {layout.pp}: its pipelines take zero1 at most"
    if layout.schedule != "1f1b":
        yield f"schedule {layout.schedule}: it has 1f1b"
    if not asked.is_even:
        yield "stages of unequal numbers of layers: its partition is uniform; plan with the deepspeed stack, which cuts evenly"
    if layout.rank_order != PIPELINES_OUTERMOST:
        yield f"rank order {layout.rank_order}: its pipelines are outermost; plan with {PIPELINES_OUTERMOST}"
    if both and (layout.pp > 1 or layout.cp > 1 or asked.offload[0]):
        yield f"ep {layout.ep} with tp {layout.tp}: it then takes pp 1, cp 1 and no offload"
    if layout.cp > 1 and layout.tp * layout.pp > 1:
        yield f"cp {layout.cp} with tp {layout.tp} and pp {layout.pp}: its sequence groups are set beside data parallelism only"
    if recompute and (recompute.mode in (SELECTIVE, FULL_UNIFORM) or (recompute.mode == FULL_BLOCK and not _whole(asked))):
        yield f"recompute {recompute}: a program checkpoints all layers or none; plan with recompute=full or none"
    if layout.sequence_parallel:
        yield "sequence_parallel on: its AutoTP reduces whole activations; plan with sequence_parallel=false"
    if asked.offload[1]:
        yield f"offload {layout.offload}: activations stay on the device"
    if asked.offload[0] and layout.optimizer_sharding == "none":
        yield f"offload {layout.offload}: only sharded states go to the host; plan with zero1 or more"
    if 0 < asked.offload[0] < 1 and layout.optimizer_sharding != "zero3":
        yield f"offload {layout.offload}: a part of the states goes to the host with zero3 only"
    if asked.precision not in ("bf16", "fp16"):
        yield f"precision {asked.precision}: it has bf16 and fp16"


def _whole(asked: Request) -> bool:
    recompute = asked.recompute
    return recompute is not None and recompute.layers >= min(ALL_LAYERS, max(asked.counts))


def _duties(asked: Request) -> Iterator[str]:
    """What no key of the file sets."""
    layout, recompute = asked.layout, asked.recompute
    yield f"sequences have {asked.problem.workload.seq_len:,} tokens, which SEQ_LEN says"
    if layout.pp > 1:
        yield f"the model is a PipelineModule with num_stages={layout.pp} and partition_method='uniform' over its layers"
    if layout.cp > 1:
        yield f"attention is DistributedAttention over sequence groups of {layout.cp} ranks that follow each other"
    if recompute and recompute.mode != NONE:
        yield "every layer is checkpointed (recompute full)"


def _gradient_type(asked: Request) -> str:
    """Of accumulated gradients: FP32, unless the plan's stack keeps them in two bytes; then the type of the computation."""
    return "fp32" if asked.stack.gradient_bytes == 4 else asked.precision


def _notes(asked: Request) -> Iterator[str]:
    """What of the file changes how training converges."""
    yield (
        f"gradients accumulate in {_gradient_type(asked)} (data_types.grad_accum_dtype), which is what the plan's stack "
        f"{asked.stack.name} was priced with; fp32 takes twice the memory of two bytes and loses nothing in sums"
    )
    yield "optimizer, learning rate and gradient clipping are the program's: the file sets none of them"


def _settings(asked: Request) -> Settings:
    speaks, sharded = asked.speaks, asked.layout.optimizer_sharding != "none"
    return [
        speaks.set("global_batch", asked.problem.workload.global_batch),
        *layout_settings(asked),
        speaks.set(asked.precision, True),
        speaks.set("gradient_type", _gradient_type(asked)),
        *speaks.sets(overlap_gradients=sharded and asked.overlaps("dp_gradients"), pinned=asked.offload[0] > 0),
    ]


def layout_settings(asked: Laid) -> Settings:
    """Every key that a layout decides; what it does not use is left out."""
    layout, speaks, share = asked.layout, asked.speaks, asked.offload[0]
    return [
        speaks.set("micro_batch", layout.micro_batch),
        speaks.set("accumulation", layout.num_microbatches),
        speaks.set("zero_stage", layout.optimizer_sharding),
        *speaks.sets(
            optimizer_offload=share > 0,
            optimizer_offload_fraction=share if 0 < share < 1 else None,
            tp=layout.tp if layout.tp > 1 else None,
            cp=layout.cp if layout.cp > 1 else None,
            expert_parallel=layout.ep > 1,
            ep=layout.ep if layout.ep > 1 else None,
            etp=layout.etp if layout.ep > 1 else None,
            pp=layout.pp if layout.pp > 1 else None,
            partition="uniform" if layout.pp > 1 else None,
            recompute=asked.layers if asked.recompute and asked.recompute.mode != NONE else None,
        ),
    ]

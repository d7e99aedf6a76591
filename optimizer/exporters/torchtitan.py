"""A plan as a configuration function of torchtitan, and the script that trains with it.

torchtitan builds the models that it ships. One is taken only if it agrees with the plan's in every size; a near miss would train
another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...search_spaces.layout import ALL_LAYERS, FULL_BLOCK, FULL_UNIFORM, NONE, SELECTIVE
from ...search_spaces.model import Attention, DenseMlp, LatentAttention, ModelSpec, MoeMlp
from ..result import Plan
from .folder import folder
from .knobs import Settings
from .launch import SAVE_INTERVAL, Script, Variable, commented, launch_script, origin
from .python_file import literal, read, sections
from .request import PIPELINES_OUTERMOST, Laid, Request, mtp_layers, request
from .spelling import Code
from .splits import virtual_chunks

FRAMEWORK = "torchtitan"
MODULE = "torchtitan_plan"
SCRIPT = "torchtitan.sh"
LAYERS = ("def layers(first, end):", '    return [f"layers.{number}" for number in range(first, end)]', "", "")
POSITIONS = (
    "def with_positions(model, length):",
    '    """Rotary tables as long as a sequence: the registry stops at the length that a model was pretrained with."""',
    "    for layer in model.layers:",
    "        layer.attention.rope = replace(layer.attention.rope, max_seq_len=max(length, layer.attention.rope.max_seq_len))",
    "",
    "",
)
CHUNKED_LOSS = "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary))"


@dataclass(frozen=True)
class Shape:
    """What tells one model from another; kv_heads is 0 for latent attention, a width or number of experts 0 where there is none."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    experts: int
    top_k: int
    expert_width: int
    vocab: int
    tied: bool = False


@dataclass(frozen=True)
class Flavor:
    """A model that torchtitan ships: its module and name there, and the configuration function that training starts from."""

    module: str
    name: str
    config: str
    shape: Shape
    takes_mtp: bool = False


FLAVORS = (
    Flavor("llama3", "8B", "llama3_8b", Shape(4096, 32, 32, 8, 14336, 0, 0, 0, 128256)),
    Flavor("llama3", "70B", "llama3_70b", Shape(8192, 80, 64, 8, 28672, 0, 0, 0, 128256)),
    Flavor("llama3", "405B", "llama3_70b", Shape(16384, 126, 128, 8, 53248, 0, 0, 0, 128256)),
    Flavor("qwen3", "0.6B", "qwen3_0_6b", Shape(1024, 28, 16, 8, 3072, 0, 0, 0, 151936, True)),
    Flavor("qwen3", "1.7B", "qwen3_1_7b", Shape(2048, 28, 16, 8, 6144, 0, 0, 0, 151936, True)),
    Flavor("qwen3", "4B", "qwen3_1_7b", Shape(2560, 36, 32, 8, 9728, 0, 0, 0, 151936, True)),
    Flavor("qwen3", "8B", "qwen3_14b", Shape(4096, 36, 32, 8, 12288, 0, 0, 0, 151936)),
    Flavor("qwen3", "14B", "qwen3_14b", Shape(5120, 40, 40, 8, 17408, 0, 0, 0, 151936)),
    Flavor("qwen3", "32B", "qwen3_32b", Shape(5120, 64, 64, 8, 25600, 0, 0, 0, 151936)),
    Flavor("qwen3", "30B-A3B", "qwen3_30b_a3b", Shape(2048, 48, 32, 4, 0, 128, 8, 768, 151936)),
    Flavor("qwen3", "235B-A22B", "qwen3_30b_a3b", Shape(4096, 94, 64, 4, 0, 128, 8, 1536, 151936)),
    Flavor("deepseek_v3", "671B", "deepseek_v3_671b", Shape(7168, 61, 128, 0, 18432, 256, 8, 2048, 129280), takes_mtp=True),
    Flavor("gpt_oss", "120b", "gpt_oss_120b", Shape(2880, 36, 64, 8, 0, 128, 4, 2880, 201088)),
)
"""Read off the registries of torchtitan 0.3.0; of the sizes that it ships without a configuration, a sibling's is the start."""


def settings(plan: Plan, version: str | None = None) -> Settings:
    """Every field that the plan decides; Infeasible says what torchtitan cannot express."""
    return _settings(request(Request, plan, FRAMEWORK, version, _problems))


def files(plan: Plan, version: str | None = None) -> dict[str, str]:
    """torchtitan.sh and the module that holds the configuration; Infeasible as for `settings`."""
    asked = request(Request, plan, FRAMEWORK, version, _problems)
    left = {
        "data_path": Variable("DATASET", "name of a data set that torchtitan registers, such as c4"),
        "tokenizer": Variable("TOKENIZER_PATH", "folder of the Hugging Face tokenizer"),
        "save": Variable("CHECKPOINT_DIR", "where checkpoints are read and written"),
        "steps": Variable("TRAIN_ITERS", "number of steps", kind=int),
        "save_interval": Variable("SAVE_INTERVAL", "steps between checkpoints", str(SAVE_INTERVAL), kind=int),
    }
    rate = Variable("LR", "peak learning rate", kind=float)
    script = Script(
        command=("-m torchtitan.train", f"--module {MODULE}", "--config planned"),
        variables=[*left.values(), rate],
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        before=('export PYTHONPATH="${HERE}${PYTHONPATH:+:${PYTHONPATH}}"',),
        notes=["what the plan does not decide is as in the configuration of torchtitan that it starts from"],
    )
    steps = (
        f"Install {asked.speaks.title} on every server.",
        f"Set the variables that the top of {SCRIPT} lists; `bash {SCRIPT}` names all that are missing.",
        f"Run `NODE_RANK=N MASTER_ADDR=… bash {SCRIPT}` on every server, N as in hosts.csv.",
    )
    opened = [asked.speaks.set(knob, read(variable)) for knob, variable in left.items()]
    return folder(asked, {SCRIPT: launch_script(asked, script), f"{MODULE}.py": _module(asked, opened, rate)}, steps, script.notes)


def flavor(spec: ModelSpec) -> Flavor | None:
    """The shipped model of the same shape, if there is one."""
    shape = _shape(spec)
    return next((found for found in FLAVORS if found.shape == shape), None)


def _shape(spec: ModelSpec) -> Shape | None:
    kinds = [spec.kinds[name] for name in spec.layer_kinds]
    heads = {mixer.heads for kind in kinds if isinstance(mixer := kind.mixer, Attention | LatentAttention)}
    mixer, dense = kinds[0].mixer, next((kind.mlp for kind in kinds if isinstance(kind.mlp, DenseMlp)), None)
    moe = next((kind.mlp for kind in kinds if isinstance(kind.mlp, MoeMlp)), None)
    if len(heads) != 1 or not isinstance(mixer, Attention | LatentAttention):
        return None
    turned = mixer.rotary_fraction if isinstance(mixer, Attention) else 1.0
    if turned != 1.0 or (moe is not None and not moe.normalized_top_k):
        return None  # all that it ships turn whole heads and divide the weights of a token's experts by their sum
    return Shape(
        hidden=spec.hidden_size,
        layers=spec.num_layers,
        heads=mixer.heads,
        kv_heads=mixer.kv_heads if isinstance(mixer, Attention) else 0,
        width=dense.width if dense else 0,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert_width=moe.width if moe else 0,
        vocab=spec.vocab_size,
        tied=spec.tied_embeddings,
    )


# --- what cannot be exported -------------------------------------------------------------------------------------------------


def _problems(asked: Request) -> Iterator[str]:
    layout, spec, recompute = asked.layout, asked.spec, asked.recompute
    shipped = flavor(spec)
    if shipped is None:
        yield f"it ships no model of the shape of {spec.name}; it has {', '.join(f'{f.module} {f.name}' for f in FLAVORS)}"
    if asked.problem.workload.vocab_size not in (None, spec.vocab_size):
        yield f"vocab_size {asked.problem.workload.vocab_size}: its models have their own, {spec.vocab_size}"
    if mtp_layers(spec) and (layout.cp > 1 or layout.pp > 1 or (shipped and not shipped.takes_mtp)):
        yield f"{mtp_layers(spec)} MTP layers with cp {layout.cp} and pp {layout.pp}: it trains MTP with neither"
    if asked.problem.cluster.accelerator.vendor not in ("nvidia", "amd"):
        yield f"torchtitan runs on GPUs, not on {asked.problem.cluster.accelerator.name}"
    if layout.optimizer_sharding in ("none", "zero1"):
        yield f"optimizer_sharding {layout.optimizer_sharding}: FSDP shards gradients too; plan with zero2, zero3 or hsdp:K"
    if asked.shard and (asked.shard % layout.cp or (layout.dp * layout.cp) % asked.shard):
        yield f"optimizer_sharding {layout.optimizer_sharding}: the group must hold whole CP groups and divide dp·cp"
    elif layout.ep > 1 and _shards(asked) * layout.cp * layout.tp % layout.ep:
        yield f"ep {layout.ep} does not divide {_shards(asked) * layout.cp * layout.tp}, the ranks that shard a copy of the weights"
    if layout.etp > 1:
        yield f"etp {layout.etp}: it gives experts no tensor parallelism of their own; plan with etp=1"
    if layout.rank_order != PIPELINES_OUTERMOST:
        yield f"rank order {layout.rank_order}: its pipelines are outermost; plan with {PIPELINES_OUTERMOST}"
    if layout.schedule == "interleaved" and layout.num_microbatches % max(1, layout.num_microbatches // layout.pp):
        yield f"interleaving runs equal rounds of micro-batches, which {layout.num_microbatches} over pp {layout.pp} are not"
    if recompute and (recompute.mode in (SELECTIVE, FULL_UNIFORM) or (recompute.mode == FULL_BLOCK and not _whole(asked))):
        yield f"recompute {recompute}: it recomputes all layers or none; plan with recompute=full or none"
    if any(asked.offload):
        yield f"offload {layout.offload}: its offload takes weights and gradients along; plan with offload=none"
    if asked.precision in ("fp16", "fp4"):
        yield f"precision {asked.precision}: it has bf16 and fp8"


def _whole(asked: Request) -> bool:
    recompute = asked.recompute
    return recompute is not None and (recompute.layers >= ALL_LAYERS or recompute.layers >= max(asked.counts))


def _shards(asked: Laid) -> int:
    """Ranks of dp that shard one copy of the weights; those of cp shard them too."""
    return asked.shard // asked.layout.cp if asked.shard else asked.layout.dp


# --- settings ----------------------------------------------------------------------------------------------------------------


def _settings(asked: Request) -> Settings:
    layout, speaks, length = asked.layout, asked.speaks, asked.problem.workload.seq_len
    return [
        *layout_settings(asked),
        *(_tokens(asked) if speaks.has("micro_batch_tokens") else [speaks.set("global_batch", asked.global_batch)]),
        speaks.set("seq_len", length),
        speaks.set("no_cuda_graphs", not asked.stack.cuda_graphs),
        speaks.set("checkpoints", True),
        speaks.set("compile", True),
        speaks.set("compiled", "model", "loss"),
        speaks.set("overlap_tp", asked.overlaps("tp") and layout.tp > 1),
    ]


def layout_settings(asked: Laid) -> Settings:
    """Every field that a layout decides, batches in sequences as 0.3 has them."""
    layout, speaks, recompute = asked.layout, asked.speaks, asked.recompute
    resharded = "never" if layout.optimizer_sharding == "zero2" else "always" if layout.pp == 1 else "default"
    pipelined = layout.pp > 1
    # without a pipeline, micro-batches are the steps of gradient accumulation
    local = layout.micro_batch * (layout.num_microbatches if pipelined else 1)
    return [
        *(speaks.set(name, getattr(layout, name)) for name in ("tp", "cp", "pp", "ep")),
        speaks.set("replicas", layout.dp // _shards(asked)),
        speaks.set("shards", _shards(asked)),
        speaks.set("reshard", resharded),
        speaks.set("sequence_parallel", layout.sequence_parallel or layout.tp == 1),
        *speaks.sets(cp_type=layout.cp_type if layout.cp > 1 else None),
        *(_pipeline(asked) if pipelined else []),
        *speaks.sets(
            micro_batch=layout.micro_batch if pipelined and speaks.has("micro_batch") else None,
            local_batch=local if speaks.has("local_batch") else None,
        ),
        speaks.set("recompute", "none" if recompute is None or recompute.mode == NONE else "full"),
    ]


def _pipeline(asked: Laid) -> Settings:
    """Schedule, and the modules of every chunk by name, in the order that a token passes them."""
    speaks = asked.speaks
    parts = (
        Code(f"[{', '.join([*map(repr, front), f'*layers({first}, {end})', *map(repr, back)])}]")
        for front, first, end, back in _parts(asked)
    )
    return [speaks.set("schedule", asked.layout.schedule), speaks.set("stages", *parts)]


def modules(asked: Laid) -> list[list[str]]:
    """The modules of every chunk, each by its name."""
    return [[*front, *(f"layers.{layer}" for layer in range(first, end)), *back] for front, first, end, back in _parts(asked)]


def _parts(asked: Laid) -> Iterator[tuple[list[str], int, int, list[str]]]:
    """Of every chunk, what is before its layers, the first of these, the one behind the last, and what follows them."""
    layout, first = asked.layout, 0
    chunks = virtual_chunks(layout.stages, layout.schedule) if layout.stages else ()
    for index, count in enumerate(asked.counts):
        last = index == len(asked.counts) - 1 if not chunks else chunks[index].loss
        yield ["tok_embeddings"] if index == 0 else [], first, first + count, ["norm", "lm_head"] if last else []
        first += count


def _tokens(asked: Request) -> Settings:
    """The batch after 0.3, which counts tokens."""
    layout, speaks, workload = asked.layout, asked.speaks, asked.problem.workload
    return [
        speaks.set("micro_batch_tokens", layout.micro_batch * workload.seq_len),
        speaks.set("step_tokens", workload.global_batch * workload.seq_len),
        speaks.set("pipeline_micro_batches", layout.num_microbatches if layout.pp > 1 else 1),
    ]


def _converters(asked: Request) -> dict[str, str]:
    """What turns GEMMs into FP8: of all linear layers but head and router, and of the experts where there are any."""
    if asked.precision != "fp8":
        return {}
    experts = {"Float8GroupedExpertsConverter": "model_compile_enabled=True"} if asked.spec.is_moe else {}
    return {"Float8LinearConverter": "filter_fqns=['lm_head', 'router.gate'], model_compile_enabled=True", **experts}


def _module(asked: Request, opened: Settings, rate: Variable) -> str:
    shipped = flavor(asked.spec)
    assert shipped is not None  # refused before
    fields = sections([*_settings(asked), *opened])
    registry = [repr(shipped.name)]
    if shipped.takes_mtp and mtp_layers(asked.spec):
        registry.append(f"num_mtp_layers={mtp_layers(asked.spec)}")
    quantised = _converters(asked)
    if quantised:
        registry.append(f"converters=[{', '.join(f'{name}.Config({words})' for name, words in quantised.items())}]")
    loss = "MTPLoss.Config(global_vocab_size=vocabulary)" if len(registry) > 1 and "mtp" in registry[1] else CHUNKED_LOSS
    imports = [
        "import os",
        "from dataclasses import replace",
        "",
        *([f"from torchtitan.components.quantization import {', '.join(quantised)}"] if quantised else []),
        *(["from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss"] if loss is CHUNKED_LOSS else []),
        "from torchtitan.components.optimizer import default_adamw",
        *(["from torchtitan.distributed.activation_checkpoint import FullAC"] if "FullAC" in repr(fields) else []),
        f"from torchtitan.models.{shipped.module} import model_registry",
        f"from torchtitan.models.{shipped.module}.config_registry import {shipped.config}",
        *([f"from torchtitan.models.{shipped.module}.mtp import MTPLoss"] if loss is not CHUNKED_LOSS else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
    ]
    body = [
        "",
        "",
        *POSITIONS,
        *(LAYERS if asked.layout.pp > 1 else []),
        "def planned():",
        '    """Everything that the plan decides, over what torchtitan ships for the model."""',
        f"    config = {shipped.config}()",
        f"    config.model_spec = model_registry({', '.join(registry)})",
        f"    with_positions(config.model_spec.model, {asked.problem.workload.seq_len})",
        "    vocabulary = decoder_vocab_size(config.model_spec)",
        f"    config.loss = {loss}",
        f"    config.optimizer = default_adamw(lr={read(rate)})",
        *(
            f"    config.{f'{section}.' if section else ''}{field} = {literal(value, 4)}"
            for section, named in fields.items()
            for field, value in named.items()
        ),
        "    return config",
        "",
    ]
    return "\n".join([*commented([origin(asked)]), *imports, *body])

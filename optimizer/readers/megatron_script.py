"""Megatron-LM and MindSpeed-LLM: a launch script or an argument list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ...search_spaces.errors import InputError
from .arguments import empty_words
from .around_megatron import SWIFT_PLAIN, is_swift, set_beside, spelled, swift_model, swift_processes
from .dialects import knobs_of
from .job import Job
from .megatron import job_of
from .megatron_aliases import ALIASES
from .megatron_contradictions import queues
from .option_words import misspelt, takes_words
from .options import Knobs, by_knob
from .processes import NODES, OF_THE_WORLD, PER_NODE, world
from .shell import SCRIPTS, Option, Script, options, read_script, shown, unresolved, without_value
from .unmodelled import is_sign, unmodelled

PLAIN_PREFIXES = (
    *("lr", "min-lr", "adam", "sgd", "train", "eval", "log", "save", "load", "data", "tokenizer", "tensorboard", "wandb", "init"),
    *(
        "actor-num",
        "no-load",
        "no-save",
        "ckpt",
        "dist",
        "attention-dropout",
        "hidden-dropout",
        "weight-decay",
        "clip",
        "seed",
        "vocab-file",
    ),
    *("merge-file", "num-workers", "exit", "finetune", "start-weight", "end-weight", "rotary", "rope", "norm-epsilon", "split"),
    *(
        "use-mcore",
        "mock",
        "override",
        "timing",
        "profile",
        "nnodes",
        "nproc",
        "node-rank",
        "master",
        "rdzv",
        "local-rank",
        "nodes",
    ),
    *(
        "ntasks",
        "gpus",
        "npus",
        "job-name",
        "moe-aux-loss",
        "moe-router-load-balancing",
        "moe-z-loss",
        "moe-router-bias",
    ),
    *("disable-", "enable-", "no-masked", "no-rope", "no-bias", "no-gradient", "no-async", "gemm-", "use-fused", "use-rotary"),
    *("use-flash", "use-cpu-init", "legacy", "cache", "async", "manual-gc", "empty-unused", "accumulate", "check-for-nan", "spec"),
    *(
        "transformer-impl",
        "attention-softmax",
        "apply-",
        "untie",
        "swiglu",
        "squared",
        "openai-gelu",
        "bias-",
        "te-",
    ),
    *(
        "norm-topk-prob",
        "topk-group",
        "moe-router-topk-scaling",
        "cuda-graph",
        "position",
        "seq-aux",
        "mtp-loss",
        "mtp-mem",
        "mla-fa",
        "create-attention-mask",
        "no-create-attention-mask",
        "no-shared-storage",
        "no-mmap",
        "tiktoken",
        "fp8-amax",
        "rank",
        "make-vocab",
        "prompt",
        "stage",
        "is-",
    ),
)
PLAIN = re.compile("|".join(map(re.escape, PLAIN_PREFIXES)))
"""Beginnings of options that neither layout nor cost hangs on."""

MINDSPEED_ONLY = frozenset(
    {
        "context-parallel-algo",
        "schedules-method",
        "noop-layers",
        "num-layer-list",
        "use-ascend-mc2",
        "swap-optimizer",
        "moe-fb-overlap",
        "recompute-in-bubble",
        "recompute-in-advance",
    }
    | {"use-fused-swiglu", "use-fused-rmsnorm", "use-fused-rotary-pos-emb", "use-flash-attn-npu", "first-k-dense-replace"}
    | {"reuse-fp32-param", "moe-permutation-async-comm", "moe-alltoall-overlap-comm", "recompute-activation-function"}
)


def read(text: str, where: str, framework: str, devices: int | None = None, variables: Mapping[str, str] | None = None) -> Job:
    """The job of a script or an argument list. InputError where it holds no option of the framework."""
    script = read_script(text, variables, where)
    words = command_line(script, framework)
    found = spelled(words, _known(framework))
    for command in [words] if words else script.commands:
        _refuse_converter(command, where)
    if not found:
        raise InputError(f"{where}: holds no option of {framework}, such as --tensor-model-parallel-size; name its launch script")
    launchers = _ahead_of_program(words, framework)
    # the exporters' table has the shorter list; the other members of the family share its spelling
    read_here = (o for o in found if o not in launchers and not _plain(o.name, framework) and not is_sign(framework, o.name))
    knobs = by_knob(read_here, framework, ALIASES[framework], SWIFT_PLAIN if is_swift(" ".join(words)) else frozenset(), where)
    beside, model = set_beside(knobs, words), swift_model(words)
    named = (f"model {model}: by --model",) if model else ()
    knobs.empty, knobs.parsed = empty_words(words), not is_swift(" ".join(words))
    _refuse_passed_on(knobs, words)
    counts = (option for option in found if option.name in PER_NODE + NODES + OF_THE_WORLD)
    launched = (option for option in counts if any(map(unresolved, option.values[:1])))
    knobs.unresolved += [without_value(f"--{option.name} {option.values[0]}") for option in launched]
    knobs.unresolved += map(without_value, knobs.empty)
    started = devices or world(script, found, where) or swift_processes(script, words)
    job = job_of(knobs, framework, framework, started)
    told = tuple(
        f"{name} {values[-1]}: the last of the values {', '.join(dict.fromkeys(values))} that the script assigns"
        for name, values in script.conflicts.items()
        if len(values) <= 8 and all(len(value) <= 40 for value in values)
    )
    asked = unmodelled(framework, ((option.name, " ".join(map(shown, option.values)) or True) for option in found))
    said = (*script.decisions, *told, *beside, *named, *job.assumptions)
    own = "megatron-lm" if is_swift(" ".join(words)) else None  # it stands on Megatron-Core 0.16 and later, on Ascend too
    findings = (*job.findings, *queues(knobs, script.variables.get("CUDA_DEVICE_MAX_CONNECTIONS", [None])[-1]))
    job = replace(job, findings=findings, assumptions=said, unmodelled=asked, model_name=model, stack=job.stack or own)
    return _with_misspelt(job, found) if knobs.parsed else job


def _with_misspelt(job: Job, found: Sequence[Option]) -> Job:
    """The job with words that Megatron-LM's parser refuses; beside options that it has not, another's may know them."""
    wrong = tuple(misspelt(found, job.format))
    forked = any(not takes_words(each.split()[0], job.format) for each in job.unknown)
    return replace(job, advice=(*job.advice, *wrong)) if forked else replace(job, findings=(*job.findings, *wrong))


PROGRAM = re.compile(r"(?:.*/)?[^/]+\.py")


def _ahead_of_program(words: Sequence[str], framework: str) -> tuple[Option, ...]:
    """Options of what starts the program, as numactl and torchrun do, as they stand among the options of the whole command."""
    program = next((place for place, word in enumerate(words) if PROGRAM.fullmatch(word)), 0)
    known = _known(framework)
    ahead = options(words[:program])
    return tuple(o for o in options(words)[: len(ahead)] if o.name not in known and o.name.replace("_", "-") not in known)


CONVERTS = re.compile(
    r"loader|saver|(load|save)-model-type|(source|target)-(tensor|pipeline|expert)(-model)?-parallel-size|convert-checkpoint-from-.*"
)
CONVERTER = re.compile(r"(?:.*/)?[^/]*(?:convert|hf2mcore|mcore2hf|hf2mg|mg2hf)[^/]*\.py")
EXPORT = ("megatron", "export")
"""The command of ms-swift that converts."""
TRAINS = frozenset({"train-iters", "train-samples", "train-epochs", "lr"})


def _refuse_converter(words: Sequence[str], where: str) -> None:
    """InputError for a command that rewrites a checkpoint for another layout, and trains nothing."""
    names = [option.name.replace("_", "-") for option in options(words)]
    said = next((f"--{name}" for name in names if CONVERTS.fullmatch(name)), None)
    said = said or next((word for word in words if CONVERTER.fullmatch(word)), None)
    said = said or next((" ".join(pair) for pair in pairwise(words) if pair == EXPORT), None)
    if said is not None and not TRAINS & set(names):
        raise InputError(f"{where}: converts a checkpoint ({said}) and trains nothing; name the script of the job that trains")


STAGED = ("vpp", "vpp_layers", "layout", "first_stage_layers", "last_stage_layers")
"""Knobs of stages, which there are several of."""


def _refuse_passed_on(knobs: Knobs, words: Sequence[str]) -> None:
    """InputError where a command cuts stages, but their number is in what it passes on or is passed, and not here."""
    cut = next((knobs.names[knob] for knob in STAGED if knobs.has(knob)), None)
    script = next((word for word in words if word.endswith(SCRIPTS) and not word.startswith("-")), None)
    passed = [shown(word) for word in words if unresolved(word)]
    if cut is not None and not knobs.has("pp") and (script or passed):
        missing = f"is in {script}, which is not read" if script else f"may be in {', '.join(dict.fromkeys(passed[:3]))}"
        said = f"{cut} is given without --pipeline-model-parallel-size, which {missing}"
        raise InputError(f"{knobs.where}: {said}; name the script that has it, or give both")


def is_mindspeed(text: str) -> bool:
    """Whether a script is MindSpeed-LLM's rather than Megatron-LM's: by options that only it has, or by its name.

    ms-swift's is not, on Ascend either: it stands on Megatron-Core 0.16 and later.
    """
    if is_swift(text):
        return False
    names = set(re.findall(r"--([a-z][a-z0-9-]+)", text))
    return bool(names & MINDSPEED_ONLY) or bool(re.search(r"mindspeed|ASCEND_|HCCL_|NPUS_PER_NODE", text, re.IGNORECASE))


def is_megatron(text: str) -> bool:
    """Whether a text has options of the Megatron family, or converts its checkpoints."""
    names = {name.replace("_", "-") for name in re.findall(r"--([a-z][a-z0-9_-]+)", text)}
    return is_swift(text) or bool(names & _TELLING) or len(list(filter(CONVERTS.fullmatch, names))) > 1


_TELLING = frozenset(
    {"tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"}
    | {"num-layers", "micro-batch-size", "global-batch-size", "num-attention-heads", "hidden-size", "use-distributed-optimizer"}
    | {"expert-tensor-parallel-size", "decoder-last-pipeline-num-layers", "decoder-first-pipeline-num-layers", "num-experts"}
    | {"num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout"}
)


def _known(framework: str) -> frozenset[str]:
    """Names of the options that are read."""
    return frozenset({*knobs_of(framework), *ALIASES[framework]})


def _plain(name: str, framework: str) -> bool:
    return name not in _known(framework) and bool(PLAIN.match(name.replace("_", "-")))


SHOWS = ("echo", "printf")
"""Commands that show what another runs."""


def command_line(script: Script, framework: str) -> list[str]:
    """The command that trains: that with most of the framework's own options, or all that variables hold where none has any."""
    known = _known(framework)

    def score(words: Sequence[str]) -> int:
        return sum(option.name in known for option in spelled(words, known))

    best = max(script.commands, key=lambda words: (score(words), words[0] not in SHOWS), default=[])
    if score(best):
        return best
    held = [[word for text in words for word in text.split()] for words in script.variables.values()]
    return [word for words in held if score(words) for word in words]  # helpers' own options are none of the job's

"""Megatron-LM and MindSpeed-LLM: a launch script or an argument list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...search_spaces.errors import InputError
from .dialects import PROCESSES, knobs_of
from .job import MOST, Job
from .megatron import job_of
from .options import by_knob
from .shell import Option, Script, options, read_script, unresolved, without_value

MORE = {
    "num-layers-per-virtual-pipeline-stage": "vpp_layers",
    "account-for-embedding-in-pipeline-split": "count_embedding",
    "account-for-loss-in-pipeline-split": "count_loss",
    "vocab-size": "vocab",
    "use-torch-fsdp2": "torch_fsdp",
    "recompute-activations": "recompute_activations",
    "hybrid-layer-pattern": "hybrid",
    "hybrid-override-pattern": "hybrid",
    "world-size": "devices",
    "n-shared-experts": "shared_experts",
}
"""Options of layouts and models that no exporter writes."""

PLAIN_PREFIXES = (
    *("lr", "min-lr", "adam", "sgd", "train", "eval", "log", "save", "load", "data", "tokenizer", "tensorboard", "wandb", "init"),
    *("no-load", "no-save", "ckpt", "dist", "attention-dropout", "hidden-dropout", "weight-decay", "clip", "seed", "vocab-file"),
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
        "sequence",
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
        "quick-geglu",
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
        "make-vocab",
        "prompt",
        "stage",
        "is-",
    ),
)
PLAIN = re.compile("|".join(map(re.escape, PLAIN_PREFIXES)))
"""Beginnings of options that neither layout nor cost hangs on."""

PER_NODE = ("nproc-per-node", "nproc_per_node", "gpus-per-node", "ntasks-per-node", "gpus_per_node", "npus-per-node")
NODES = ("nnodes", "nodes", "num-nodes", "num_nodes")
PER_NODE_VARIABLES = ("NPROC_PER_NODE", "GPUS_PER_NODE", "NPUS_PER_NODE", "GPUS", "NPROC")
NODE_VARIABLES = ("NNODES", "NUM_NODES", "NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NUM_HOSTS", "PET_NNODES")
MINDSPEED_ONLY = frozenset(
    {
        "context-parallel-algo",
        "schedules-method",
        "noop-layers",
        "num-layer-list",
        "use-ascend-mc2",
        "swap-optimizer",
        "moe-fb-overlap",
    }
    | {"use-fused-swiglu", "use-fused-rmsnorm", "use-fused-rotary-pos-emb", "use-flash-attn-npu", "first-k-dense-replace"}
    | {"reuse-fp32-param", "moe-permutation-async-comm", "moe-alltoall-overlap-comm", "recompute-activation-function"}
)


def read(text: str, where: str, framework: str, devices: int | None = None, variables: Mapping[str, str] | None = None) -> Job:
    """The job of a script or an argument list. InputError where it holds no option of the framework."""
    script = read_script(text, variables, where)
    found = command_line(script, framework)
    if not found:
        raise InputError(f"{where}: holds no option of {framework}, such as --tensor-model-parallel-size; name its launch script")
    # the exporters' table has the shorter list; the other members of the family share its spelling
    knobs = by_knob([o for o in found if not _plain(o.name, framework)], framework, MORE, frozenset(), where)
    launched = (option for option in found if option.name in PER_NODE + NODES and any(map(unresolved, option.values[:1])))
    knobs.unresolved += [without_value(f"--{option.name} {option.values[0]}") for option in launched]
    job = job_of(knobs, framework, framework, devices or world(script, found, where))
    told = tuple(
        f"{name} {values[-1]}: the last of the values {', '.join(dict.fromkeys(values))} that the script assigns"
        for name, values in script.conflicts.items()
        if len(values) <= 8 and all(len(value) <= 40 for value in values)
    )
    return Job(**{**vars(job), "assumptions": (*script.decisions, *told, *job.assumptions)})


def is_mindspeed(text: str) -> bool:
    """Whether a script is MindSpeed-LLM's rather than Megatron-LM's: by options that only it has, or by its name."""
    names = set(re.findall(r"--([a-z][a-z0-9-]+)", text))
    return bool(names & MINDSPEED_ONLY) or bool(re.search(r"mindspeed|ASCEND_|HCCL_|NPUS_PER_NODE", text, re.IGNORECASE))


def is_megatron(text: str) -> bool:
    """Whether a text has options of the Megatron family."""
    return bool(set(re.findall(r"--([a-z][a-z0-9-]+)", text)) & _TELLING)


_TELLING = frozenset(
    {"tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"}
    | {"num-layers", "micro-batch-size", "global-batch-size", "num-attention-heads", "hidden-size", "use-distributed-optimizer"}
    | {"expert-tensor-parallel-size", "decoder-last-pipeline-num-layers", "decoder-first-pipeline-num-layers", "num-experts"}
    | {"num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout"}
)


def _plain(name: str, framework: str) -> bool:
    return name not in knobs_of(framework) and name not in MORE and bool(PLAIN.match(name.replace("_", "-")))


def command_line(script: Script, framework: str) -> list[Option]:
    """Options of the command that trains: that with most of the framework's own, or all that variables hold where none has any."""
    known = knobs_of(framework)

    def score(found: Sequence[Option]) -> int:
        return sum(option.name in known or option.name in MORE for option in found)

    lines = [options(words) for words in script.commands]
    best = max(lines, key=score, default=[])
    if score(best):
        return best
    held = [options([word for text in words for word in text.split()]) for words in script.variables.values()]
    return [option for found in held if score(found) for option in found]  # helpers' own options are none of the job's


def world(script: Script, found: Sequence[Option], where: str) -> int | None:
    """Processes of the job: what the launcher is told, else #SBATCH lines, else variables by their usual names."""
    batch = options(script.batch)
    told = script.number(PROCESSES)
    if told is not None:
        return told
    for lines in (found, *(options(words) for words in script.commands), batch):
        per_node, nodes = (_number(lines, names) for names in (PER_NODE, NODES))
        if per_node is not None and nodes is not None:
            return _product(per_node, nodes, where)
        if per_node is not None and lines is not batch:
            outer = script.number(*NODE_VARIABLES) or _number(batch, NODES)
            told = any(option.name in NODES for option in lines)
            if outer is not None or not told:
                return _product(per_node, outer or 1, where)
    total = script.number("WORLD_SIZE")
    if total is not None:
        return total
    per_node, nodes = script.number(*PER_NODE_VARIABLES), script.number(*NODE_VARIABLES)
    return _product(per_node, nodes, where) if per_node is not None and nodes is not None else None


def _product(per_node: int, nodes: int, where: str) -> int:
    if not 0 < per_node * nodes <= MOST:
        raise InputError(f"{where}: {nodes} nodes of {per_node} processes are no job")
    return per_node * nodes


def _number(found: Sequence[Option], names: Sequence[str]) -> int | None:
    values = [option.values[0] for option in found if option.name in names and option.values]
    plain = [value for value in values if re.fullmatch(r"\d{1,9}", value)]
    return int(plain[-1]) if plain else None

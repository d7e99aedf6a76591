"""A choice of a layout as the format that the job is written in spells it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.layout import FULL_BLOCK, FULL_UNIFORM, SELECTIVE, Layout, Recompute, parse_offload
from ..exporters.megatron_spellings import SELECTIVE_FLAGS
from ..exporters.splits import layer_counts, megatron_layout
from .dialects import Words
from .job import Job
from .job_yaml import GLOBAL_BATCH
from .megatron_bridge import OWN

Speller = Callable[[Job, Layout, str], str]

DEGREES = ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
OVERLAPS = {"dp_gradients": "--overlap-grad-reduce", "dp_parameters": "--overlap-param-gather"}
GROUPS = {
    "megatron-lm": "--microbatch-group-size-per-virtual-pipeline-stage {}",
    "mindspeed-llm": "--microbatch-group-size-per-virtual-pipeline-stage {}",
    "megatron-bridge": "microbatch_group_size_per_vp_stage={}",
}
"""How formats ask for the micro-batches that an interleaved chunk runs before the next one does."""
NO_P2P_OVERLAP = "--no-overlap-p2p-communication"


def spelled(job: Job, layout: Layout, column: str) -> str:
    """The value of one column in the words of the job's format; paraplan's where the format has none."""
    speller = _SPELLERS.get(job.format)
    return speller(job, layout, column) if speller else _paraplan(layout, column)


def overlap_spelled(form: str, kinds: Sequence[str], on: bool) -> str:
    """Options that hide some kinds of traffic behind compute, given or left out."""
    options = OVERLAPS if form in ("megatron-lm", "mindspeed-llm") else {}
    if form == "megatron-bridge":
        options = {"dp_gradients": "ddp.overlap_grad_reduce", "dp_parameters": "ddp.overlap_param_gather"}
        return " ".join(f"{options.get(kind, kind)}={str(on).lower()}" for kind in kinds)
    names = [options.get(kind, f"overlap of {kind}") for kind in kinds if kind != "pp_interleaved"]
    shown = names if on else [f"no {name}" for name in names]
    switched = [NO_P2P_OVERLAP if not on else f"no {NO_P2P_OVERLAP}"] if "pp_interleaved" in kinds else []
    return " ".join((*shown, *switched))


def trained_spelled(job: Job, name: str, value: int) -> str:
    """Another global batch or sequence length, as the configuration has it; in words where the caller gave it.

    "" where the keys of a layout make up the batch.
    """
    if name == "global_batch" and job.format in BATCH_MADE_UP:
        return ""
    if job.format == "megatron-bridge" and name in job.written:
        return f"{job.written[name].partition('=')[0]}={value}"
    if name in job.written:
        return f"{job.written[name].split()[0]} {value}"
    key = next((key for key in TRAINED_KEYS.get((job.format, name), ()) if key in job.written), None)
    if key is None:
        return f"{'global batch' if name == 'global_batch' else 'sequence length'} {value}"
    plain = key.rpartition(".")[2] if job.format == "job" else key
    if job.notation.startswith("options"):
        return f"--{key} {value}"
    return f"{plain} = {value}" if job.notation else f"{plain}: {value}"


BATCH_MADE_UP = frozenset({"mindformers", "deepspeed", "torchtitan"})
"""Formats in which keys of the layout make up the global batch."""
TRAINED_KEYS = {
    ("job", "global_batch"): GLOBAL_BATCH,
    ("job", "seq_len"): ("strategy.seq_len", "training.seq_len", "strategy.sequence_length", "seq_len"),
    ("mindformers", "seq_len"): ("model.model_config.seq_length", "train_dataset.seq_length"),
    ("torchtitan", "seq_len"): ("training.seq_len",),
}
"""Keys of what is trained, by format; the one that is read comes first."""


def _paraplan(layout: Layout, column: str) -> str:
    if column == "stages":
        return (
            f"stages {'+'.join(map(str, layer_counts(layout.stages, layout.schedule)))}" if layout.stages else "stages as they are"
        )
    if column == "devices_used":
        return f"dp={layout.dp}"
    value = getattr(layout, column)
    return f"{column}={str(value).lower() if isinstance(value, bool) else value}"


# --- the Megatron family -----------------------------------------------------------------------------------------------------


def _megatron(job: Job, layout: Layout, column: str) -> str:
    return _option(Words(job.format, job.version), layout, column)


def _option(speaks: Words, layout: Layout, column: str) -> str:
    """An option with its value, or "no --option" where the choice is to leave it out."""
    if column == "vpp" and (layout.vpp == 1 or _said_by_layout(speaks, layout)):
        return f"no {speaks.flag('vpp')[0]}"
    if column in DEGREES:
        return " ".join(speaks.flag(column, getattr(layout, column)))
    if column == "devices_used":
        return f"{layout.devices} processes"
    if column == "stages":
        return _stages(speaks, layout)
    if column == "cp_type":
        return " ".join(speaks.flag("cp_type", layout.cp_type))
    if column == "recompute":
        return _recompute(speaks, Recompute.parse(layout.recompute))
    if column == "optimizer_sharding":
        return _sharding(speaks, layout.optimizer_sharding)
    if column == "offload":
        return _offload(speaks, layout)
    if column == "schedule" and speaks.has("schedule"):
        name = speaks.flag("schedule")[0]
        return f"{name} {layout.schedule}" if layout.schedule == "dualpipev" else f"no {name}"
    switches = {"sequence_parallel": ("sequence_parallel", layout.sequence_parallel)}
    switches["rank_order"] = ("rank_order_pp_inside_dp", layout.rank_order == "tp-cp-ep-pp-dp")
    if column in switches:
        knob, on = switches[column]
        name = speaks.flag(knob)[0]
        return name if on else f"no {name}"
    return _paraplan(layout, column)


def _offload(speaks: Words, layout: Layout) -> str:
    name = speaks.flag("optimizer_offload")[0]
    share = parse_offload(layout.offload)[0]
    if not share:
        return f"no {name}"
    if speaks.framework == "mindspeed-llm":
        return name
    return " ".join((name, *speaks.flag("optimizer_offload_fraction", f"{share:g}"), *speaks.flag("precise_optimizer")))


def _said_by_layout(speaks: Words, layout: Layout) -> bool:
    """Whether a layout string gives the chunks, which excludes the option for them."""
    return bool(layout.stages) and speaks.framework == "megatron-lm" and len(set(layer_counts(layout.stages, layout.schedule))) > 1


def _stages(speaks: Words, layout: Layout) -> str:
    if not layout.stages:
        return "stages as the framework cuts them"
    counts = layer_counts(layout.stages, layout.schedule)
    if not speaks.has("layout"):
        return f"stages of {'+'.join(map(str, counts))} layers"
    if len(set(counts)) == 1:
        return f"no {speaks.flag('layout')[0]}"
    if speaks.framework == "mindspeed-llm" and layout.vpp == 1 and min(counts) > 0:
        return " ".join(speaks.flag("layer_list", ",".join(map(str, counts))))
    try:
        return " ".join((speaks.flag("layout")[0], shlex.quote(megatron_layout(layout.stages))))
    except (Infeasible, InputError):
        return f"stages of {'+'.join(map(str, counts))} layers"


def _recompute(speaks: Words, choice: Recompute) -> str:
    granularity = speaks.flag("recompute")[0]
    if choice.mode in (FULL_BLOCK, FULL_UNIFORM):
        whole = choice.mode == FULL_BLOCK and choice.layers >= 1 << 20
        method = "block" if choice.mode == FULL_BLOCK and not whole else "uniform"
        depth = 1 if whole else choice.layers
        return f"{granularity} full {speaks.flag('recompute_method')[0]} {method} {speaks.flag('recompute_layers')[0]} {depth}"
    if choice.mode != SELECTIVE:
        return f"no {granularity}"
    if speaks.framework == "mindspeed-llm":
        return " ".join(
            speaks.flag(SELECTIVE_FLAGS[name])[0] if name in SELECTIVE_FLAGS else f"{granularity} selective"
            for name in choice.module_names
        )
    return f"{granularity} selective {speaks.flag('recompute_modules')[0]} {' '.join(choice.module_names)}"


def _sharding(speaks: Words, sharding: str) -> str:
    name = speaks.flag("zero1")[0]
    if sharding == "none":
        return f"no {name}"
    if sharding == "zero1":
        return name
    return f"--use-megatron-fsdp ({sharding})"


def _bridge(job: Job, layout: Layout, column: str) -> str:
    """model.tensor_model_parallel_size=8: the option of Megatron-LM as a key, or Bridge's own."""
    own = {knob: key for key, knob in reversed(OWN.items())}
    speaks = Words("megatron-lm")
    sections = {"micro_batch": "train", "zero1": "ddp", "rank_order_pp_inside_dp": "dist"}

    def key(knob: str) -> str:
        name = speaks.flag(knob)[0].lstrip("-").replace("-", "_")
        return own.get(knob) or f"{sections.get(knob, 'model')}.{name}"

    if column in DEGREES:
        return f"{key(column)}={getattr(layout, column)}"
    if column == "sequence_parallel":
        return f"{key(column)}={str(layout.sequence_parallel).lower()}"
    if column == "cp_type":
        return f"model.cp_comm_type={layout.cp_type}"
    if column == "optimizer_sharding":
        return f"{key('zero1')}={str(layout.optimizer_sharding != 'none').lower()}"
    if column == "offload":
        return f"{key('optimizer_offload')}={str(layout.offload != 'none').lower()}"
    if column == "stages" and layout.stages and len(set(layer_counts(layout.stages))) > 1:
        return f"{key('layout')}={shlex.quote(megatron_layout(layout.stages))}"
    if column == "recompute":
        return _bridge_recompute(Recompute.parse(layout.recompute))
    return _paraplan(layout, column)


def _bridge_recompute(choice: Recompute) -> str:
    if choice.mode in (FULL_BLOCK, FULL_UNIFORM):
        whole = choice.mode == FULL_BLOCK and choice.layers >= 1 << 20
        method, depth = ("uniform", 1) if whole else ("block" if choice.mode == FULL_BLOCK else "uniform", choice.layers)
        return f"model.recompute_granularity=full model.recompute_method={method} model.recompute_num_layers={depth}"
    if choice.mode == SELECTIVE:
        return f"model.recompute_granularity=selective model.recompute_modules=[{','.join(choice.module_names)}]"
    return "model.recompute_granularity=null"


_SPELLERS: dict[str, Speller] = {
    "megatron-lm": _megatron,
    "mindspeed-llm": _megatron,
    "megatron-bridge": _bridge,
}

"""What the keys of a job's configuration would have to say for another layout: those that differ, as the format writes them.

Of the formats that are a table of keys; options of the Megatron family hang together otherwise (`restating`). What a layout's keys
are is the exporters' to say; what stands in the file is `Job.written`, by key.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...search_spaces.layout import Layout, Split, Stage
from ...search_spaces.vocabulary import V_SHAPED
from ..exporters.job import strategy
from ..exporters.splits import layer_counts, megatron_layout
from ..exporters.torchtitan import modules
from .dialects import asked_alone, layout_keys
from .job import Job
from .job_yaml import STRATEGY
from .splits import cut

Keys = dict[str, tuple[str, Any]]
"""Knob → key and value."""

OWNERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("dp", "replicas", "shards"), ("devices_used", "optimizer_sharding", "tp", "cp", "pp")),
    **dict.fromkeys(
        ("num_microbatches", "accumulation", "local_batch", "global_batch"), ("micro_batch", "devices_used", "tp", "cp", "pp")
    ),
    "micro_batch": ("micro_batch", "pp"),
    "sequence_parallel": ("sequence_parallel", "tp"),
    **dict.fromkeys(("cp_type", "cp_hierarchy"), ("cp_type", "cp")),
    **dict.fromkeys(("schedule", "interleaved"), ("schedule", "vpp", "pp")),
    **dict.fromkeys(("zero1", "zero_stage", "reshard"), ("optimizer_sharding", "pp")),
    **dict.fromkeys(("offset", "stages", "mtp_stages", "partition", "no_cuda_graphs"), ("stages", "pp", "vpp")),
    "vpp": ("vpp", "pp", "stages"),
    "recompute": ("recompute", "pp", "vpp", "stages"),
    **dict.fromkeys(("optimizer_offload", "optimizer_offload_fraction"), ("offload",)),
    "expert_parallel": ("ep",),
}
"""Knob → the columns whose change it comes with, the first of those that change; one that is not here is a column itself."""
BATCHES: Mapping[tuple[str, str], str | None] = {
    ("mindformers", "num_microbatches"): "1",
    ("mindformers", "accumulation"): "1",
    ("torchtitan", "local_batch"): "8",
    ("torchtitan", "micro_batch"): "1",
    ("torchtitan", "global_batch"): None,
    ("deepspeed", "global_batch"): None,
    ("deepspeed", "accumulation"): None,
    ("deepspeed", "micro_batch"): None,
}
"""Keys that make up the batch together, which files write in several ways: they are held to the file, or to the default here."""
SWITCHED = ("true", "false")
"""A switch is held to the file too: what it is set to may do nothing as the job is, and something as it is to be."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    "optimizer.swap": ("swap_config.swap",),
    "training.local_batch_size": ("training.batch_size",),
    **{f"strategy.{usual}": tuple(f"strategy.{name}" for name in others) for usual, *others in STRATEGY.values()},
    "strategy.sequence_parallel": ("strategy.sp",),
}
"""Other names that readers take for a key."""


@dataclass(frozen=True)
class Difference:
    """A key that differs, as the file has it and as the layout needs it; "no KEY" where it is left out."""

    knob: str
    before: str
    after: str

    def owner(self, columns: Sequence[str]) -> str:
        """The one of the changed columns that this comes with."""
        return next((name for name in OWNERS.get(self.knob, (self.knob,)) if name in columns), columns[0])


def differences(job: Job, before: Layout, after: Layout) -> list[Difference]:
    """Every key that has to read otherwise. Infeasible where the format cannot say the layout."""
    own, wanted = (_KEYS[job.format](job, layout) for layout in (before, after))
    found = []
    for knob, (key, value) in wanted.items():
        name = _name(job, key)
        held = job.written.get(name)
        if held is not None and _same(held, _plain(value)):
            continue
        usual = _plain(own[knob][1]) if knob in own else None
        as_held = held is not None and ((job.format, knob) in BATCHES or held.lower() in SWITCHED)
        now = held if as_held else BATCHES.get((job.format, knob), usual)
        if now is None or not _same(now, _plain(value)):
            found.append(Difference(knob, _held(job, name), _said(job, name, value)))
    for knob in own.keys() - wanted.keys():
        name = _name(job, own[knob][0])
        if name in job.written:
            found.append(Difference(knob, _held(job, name), _unsaid(job, name)))
    return found


def has_keys(form: str) -> bool:
    """Whether a format is a table of keys."""
    return form in _KEYS


def _name(job: Job, key: str) -> str:
    """The name that the file gives a key, or else the usual one."""
    return next((name for name in ALIASES.get(key, ()) if name in job.written), key)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _same(one: str, other: str) -> bool:
    return one.strip().lower().replace(" ", "") == other.strip().lower().replace(" ", "")


# --- keys of a layout --------------------------------------------------------------------------------------------------------


def _layers(job: Job, layout: Layout) -> int:
    """Decoder layers of the model; of one that is not known, a layer for every chunk."""
    if layout.stages:
        return sum(layer_counts(layout.stages, layout.schedule))
    known = job.model.num_layers if job.model else job.sizes.get("layers")
    return known or layout.pp * layout.vpp


def _mindformers(job: Job, layout: Layout) -> Keys:
    return layout_keys(asked_alone("mindformers", layout, _layers(job, layout)))


def _deepspeed(job: Job, layout: Layout) -> Keys:
    """Of the three keys of the batch, two are enough."""
    found = layout_keys(asked_alone("deepspeed", layout, _layers(job, layout)))
    batch = layout.micro_batch * layout.num_microbatches * layout.dp
    total, steps = "train_batch_size", "gradient_accumulation_steps"
    if steps not in job.written and (total in job.written or layout.num_microbatches == 1):
        del found["accumulation"]
    return {**found, **({"global_batch": (total, batch)} if total in job.written else {})}


def _torchtitan(job: Job, layout: Layout) -> Keys:
    """With the whole batch where the local one does not give it; without what fills up the devices by itself."""
    asked = asked_alone("torchtitan", layout.model_copy(update={"cp_type": "allgather"}), _layers(job, layout))
    found = layout_keys(asked)
    if layout.cp > 1 and (layout.cp_type == "p2p" or ROTATION in job.written):
        found["cp_type"] = (ROTATION, "alltoall" if layout.cp_type == "p2p" else "allgather")
    if NO_SP in job.written:
        found["sequence_parallel"] = (NO_SP, layout.tp > 1 and not layout.sequence_parallel)
    batch = layout.micro_batch * layout.num_microbatches * layout.dp
    total = "training.global_batch_size"
    if total in job.written or found["local_batch"][1] * layout.dp != batch:
        found["global_batch"] = (total, batch)
    if job.written.get(found["shards"][0], "-1") == "-1" and layout.devices == job.devices:
        del found["shards"]
    if layout.pp > 1:
        found["stages"] = (found["stages"][0], modules(asked))
        mtp = sum(chunk.mtp for stage in layout.stages for chunk in stage.chunks)
        if layout.stages and layout.stages == own_stages(job, layout, _layers(job, layout), mtp):
            del found["stages"]
        graphs = "training.disable_cuda_graphs"
        found |= {} if job.notation == "toml" or graphs in job.written else {"no_cuda_graphs": (graphs, True)}
    return found


def own_stages(job: Job, layout: Layout, layers: int, mtp: int) -> tuple[Stage, ...]:
    """The stages that torchtitan cuts of a layout where the job lists no modules; none where it would cut no or other chunks."""
    if job.split.less is None or layout.vpp > 2 or DEPTH in job.written:
        return ()
    split = cut(job.split, layers, mtp, layout.pp, layout.vpp, layout.schedule in V_SHAPED)
    return split.stages(layers, layout.recompute) if isinstance(split, Split) else ()


def _job(job: Job, layout: Layout) -> Keys:
    """dp only where it is given or leaves devices over: it follows from the others."""
    found: Keys = {knob: (f"strategy.{name}", value) for knob, (name, value) in strategy(layout).items()}
    if not {"strategy.data_parallel", "strategy.dp"} & job.written.keys() and layout.devices == job.devices:
        del found["dp"]
    return {knob: key for knob, key in found.items() if knob != "num_microbatches" or key[0] in job.written}


ROTATION, NO_SP = "parallelism.context_parallel_rotate_method", "parallelism.disable_sequence_parallel"
"""Keys of earlier versions of torchtitan."""
DEPTH = "parallelism.pipeline_parallel_layers_per_stage"
COLUMNS = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "sequence_parallel", "cp_type", "schedule", "optimizer_sharding"),
    *("recompute", "offload", "rank_order"),
)


def _paraplan(job: Job, layout: Layout) -> Keys:
    found: Keys = {name: (name, getattr(layout, name)) for name in COLUMNS}
    if "dp" not in job.written and layout.devices == job.devices:
        del found["dp"]
    return {**found, **({"stages": ("stages", _stages(layout))} if layout.stages else {})}


def _stages(layout: Layout) -> str:
    """Layers of every chunk, or a layout string where MTP layers are not with the loss."""
    chunks = [chunk for stage in layout.stages for chunk in stage.chunks]
    if all(chunk.loss or not chunk.mtp for chunk in chunks):
        return "+".join(map(str, layer_counts(layout.stages, layout.schedule)))
    return megatron_layout(layout.stages)


_KEYS: dict[str, Callable[[Job, Layout], Keys]] = {
    "mindformers": _mindformers,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "job": _job,
    "paraplan": _paraplan,
}

# --- how they are written ----------------------------------------------------------------------------------------------------


def _held(job: Job, key: str) -> str:
    """A key as the file has it."""
    held = job.written.get(key)
    return _unsaid(job, key) if held is None else _said(job, key, _read(held))


def _read(held: str) -> Any:
    """The value that a text stands for, where it is a number, a list or the like."""
    try:
        return json.loads(held if held[:1] in "[{" else held.lower())
    except ValueError:
        return held


def _said(job: Job, key: str, value: Any) -> str:
    return _NOTATIONS[job.notation or job.format](key, value)


def _unsaid(job: Job, key: str) -> str:
    """ "no KEY", without a value."""
    return f"no {_shown_key(job, key)}"


def _shown_key(job: Job, key: str) -> str:
    form = job.notation or job.format
    if form == "options":
        return "activation-checkpoint" if key == "activation_checkpoint" else f"--{key}"
    if form == "options by section":
        return f"--{key}.mode" if key == "activation_checkpoint" else f"--{key}"
    return f'"{key}"' if form == "deepspeed" else key.removeprefix("strategy.") if form == "job" else key


def _yaml(key: str, value: Any) -> str:
    return f"{key}: {_plain(value)}"


def _json(key: str, value: Any) -> str:
    """ "a": {"b": 1} of a.b."""
    first, *rest = key.split(".")
    text = json.dumps(value)
    for name in reversed(rest):
        text = f'{{"{name}": {text}}}'
    return f'"{first}": {text}'


def _option(key: str, value: Any) -> str:
    """An option; of a switch, --a.b or --a.no-b, and of modules those of a part joined by commas."""
    if key == "activation_checkpoint":
        return f"activation-checkpoint:{_mode(value)}"
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return f"--{key}" if value else f"--{section}.no-{name}"
    parts = [",".join(part) for part in value] if isinstance(value, list) else [str(value)]
    return f"--{key} {shlex.join(parts)}"


def _sectioned(key: str, value: Any) -> str:
    """As `_option`, with activation checkpointing as an option of its section, as versions before 0.3 have it."""
    return f"--{key}.mode {_mode(value)}" if key == "activation_checkpoint" else _option(key, value)


def _toml(key: str, value: Any) -> str:
    return (
        f"activation_checkpoint.mode = {json.dumps(_mode(value))}"
        if key == "activation_checkpoint"
        else f"{key} = {json.dumps(value)}"
    )


def _python(key: str, value: Any) -> str:
    if key == "activation_checkpoint":
        mode = _mode(value)
        return f"{key} = {None if mode == 'none' else f'{mode.title()}AC.Config()'}"
    return f"{key} = {value!r}"


def _mode(value: Any) -> str:
    """Activation checkpointing by name, of that or of the object that configures it."""
    return "none" if value is None else str(value).removesuffix("AC.Config()").lower()


_NOTATIONS: dict[str, Callable[[str, Any], str]] = {
    "mindformers": _yaml,
    "job": lambda key, value: _yaml(key.removeprefix("strategy."), value),
    "deepspeed": _json,
    "options": _option,
    "options by section": _sectioned,
    "toml": _toml,
    "python": _python,
    "paraplan": lambda key, value: f"{key}={_plain(value)}",
}

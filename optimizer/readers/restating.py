"""The options that make a job's configuration ask for another layout's stages, and those that follow other options unsaid.

What a configuration of the Megatron family says of its stages hangs together: the layers with or without no-ops, their list or
layout, the chunks, the schedule. So all of it is restated when any of it changes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.layout import Layout
from ...search_spaces.vocabulary import V_SHAPED
from ..exporters.splits import first_last, layer_counts, layer_list, megatron_layout, noop_layers
from .dialects import Words
from .job import Job
from .megatron_bridge import OWN
from .spelling import spelled

FAMILY = ("megatron-lm", "mindspeed-llm", "megatron-bridge")
STAGE_KNOBS = (
    *("layers", "noop_layers", "layer_list", "layout", "first_stage_layers", "last_stage_layers", "count_embedding", "count_loss"),
    *("vpp", "vpp_layers", "schedule"),
)
Pair = tuple[str, str]


def stages_restated(job: Job, layout: Layout) -> list[Pair]:
    """(as the job has it, as the layout needs it) of every option on stages that changes; "no --option" where it is left out."""
    wanted = _wanted(job, layout)
    pairs = [
        (as_written(job, knob), _spelled(job, knob, wanted.get(knob))) for knob in STAGE_KNOBS if {knob} & {*job.written, *wanted}
    ]
    return [(before, after) for before, after in pairs if before != after]


def followers(job: Job, after: Layout, column: str, columns: Collection[str]) -> Iterator[Pair]:
    """What a change of one of the changed columns changes unsaid, and so has to be said with it."""
    if column == "cp" and "cp_type" not in columns and after.cp > 1 and job.format in FAMILY:
        yield as_written(job, "cp_type"), spelled(job, after, "cp_type")
    if column != "tp" or job.format not in FAMILY:
        return
    moe = job.sizes.get("experts", 0) > 0 or after.ep > 1
    said = "etp" in {*job.written, *columns} or job.recipe is not None or extends(job)  # a recipe's is 1, whatever tp is
    if moe and not said:
        yield _spelled(job, "etp", None), _spelled(job, "etp", str(after.etp))
    if "sequence_parallel" not in columns and after.sequence_parallel != ("sequence_parallel" in job.written):
        yield as_written(job, "sequence_parallel"), _spelled(job, "sequence_parallel", "" if after.sequence_parallel else None)


EXTENDS, EXPERT_GRID = "tp_extends_ep", ("tp", "ep", "etp")


def extends(job: Job) -> bool:
    """Whether a job spreads experts over its TP ranks too."""
    return EXTENDS in job.written and "alltoall_seq" in job.written.get("dispatcher", "")


def experts_restated(job: Job, after: Layout) -> list[Pair]:
    """What places experts of a job that spreads them over its TP ranks too: as many groups of these, or else the plain options."""
    wanted: dict[str, str | None]
    if after.etp == 1 and after.ep % after.tp == 0:
        wanted = {"ep": str(after.ep // after.tp)}
    else:
        wanted = {"ep": str(after.ep), "etp": str(after.etp), "dispatcher": "alltoall", EXTENDS: None}
    pairs = [(as_written(job, knob), _spelled(job, knob, value)) for knob, value in wanted.items()]
    return [(before, now) for before, now in pairs if before != now]


def _wanted(job: Job, layout: Layout) -> dict[str, str]:
    """Knob → value of what cuts a layout's stages; a value of "" is a switch. Infeasible where the framework cannot say them."""
    counts = layer_counts(layout.stages, layout.schedule)
    real = {"layers": str(sum(counts))} if "layers" in job.written else {}
    own = job.format == "mindspeed-llm"
    mtp_with_loss = all(chunk.loss or not chunk.mtp for stage in layout.stages for chunk in stage.chunks)
    mtp = any(chunk.mtp for stage in layout.stages for chunk in stage.chunks)
    even = len(set(counts)) == 1 and mtp_with_loss
    if layout.schedule in V_SHAPED:
        return {**(real if even else _padded(counts)), "schedule": layout.schedule}
    if even and layout.vpp == 1:
        return real
    if even and (own or "vpp_layers" in job.written):
        return {**real, "vpp_layers": str(counts[0])}
    if even:
        return {**real, "vpp": str(layout.vpp)}
    ends = first_last(counts, layout.pp) if layout.vpp == 1 and mtp_with_loss else None
    if ends and not own:
        return {**real, "first_stage_layers": str(ends[0]), "last_stage_layers": str(ends[1])}
    if own and layout.vpp == 1 and min(counts) > 0 and not mtp and not _dense_stage(job, sum(counts), layout.pp):
        return {**real, "layer_list": layer_list(counts)}
    if own and min(counts) > 0 and mtp_with_loss:
        return {**_padded(counts), **({"vpp_layers": str(max(counts))} if layout.vpp > 1 else {})}
    if job.format != "megatron-bridge" and not Words(job.format, job.version).has("layout"):
        raise Infeasible(f"{job.format} has no option for stages of {counts} layers")
    chunks = {"vpp": str(layout.vpp)} if job.format == "megatron-bridge" and layout.vpp > 1 else {}
    return {**real, **chunks, "layout": megatron_layout(layout.stages)}


def _dense_stage(job: Job, layers: int, pp: int) -> bool:
    """Whether leading dense layers fill an even share of the layers, which MindSpeed-LLM refuses whatever a list says."""
    first = re.search(r"\d+$", job.written.get("dense_first", ""))
    return first is not None and int(first.group()) >= max(1, layers // pp)


def _padded(counts: tuple[int, ...]) -> dict[str, str]:
    layers, ids = noop_layers(counts)
    return {"layers": str(layers), "noop_layers": ",".join(map(str, ids))}


def _name(job: Job, knob: str) -> str:
    """The option of a knob: the job's own name for it, else the framework's."""
    if knob in job.written:
        return job.written[knob].replace("=", " ").split(" ")[0]
    if job.format == "megatron-bridge":
        own = {knob: key for key, knob in reversed(OWN.items())}
        return own.get(knob) or f"model.{Words('megatron-lm').flag(knob)[0].lstrip('-').replace('-', '_')}"
    return Words(job.format, job.version).flag(knob)[0]


def as_written(job: Job, knob: str) -> str:
    """A knob as the job has it; left out, in its format's words, where it does not."""
    return job.written.get(knob) or _spelled(job, knob, None)


def _spelled(job: Job, knob: str, value: str | None) -> str:
    name = _name(job, knob)
    if job.format == "megatron-bridge":
        return f"{name}={'null' if value is None else shlex.quote(value) if value else 'true'}"
    return f"no {name}" if value is None else f"{name} {shlex.quote(value)}" if value else name


def can_be_said(job: Job, layout: Layout) -> bool:
    """Whether the job's format has options for the layout's stages."""
    try:
        return job.format in FAMILY and bool(layout.stages) and _wanted(job, layout) is not None
    except (Infeasible, InputError, ValueError):
        return False


RECOMPUTE_KNOBS = (
    *("recompute", "recompute_method", "recompute_layers", "recompute_modules", "recompute_activations"),
    *("recompute_norm", "recompute_activation", "recompute_mla"),
)


def recompute_written(written: Mapping[str, str]) -> str:
    """All that a job says of recompute; "" where it says nothing."""
    return " ".join(written[knob] for knob in RECOMPUTE_KNOBS if knob in written)

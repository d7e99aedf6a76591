"""Where a job of the Megatron family cuts its stages, from what its options set."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...search_spaces.errors import InputError
from ...search_spaces.layout import Stage
from ...search_spaces.rulebook.terms import ARGUMENTS
from ..exporters.splits import parse_megatron_layout
from .job import Finding, SplitWish
from .megatron_model import Described, noops
from .options import Knobs
from .splits import uneven_remedy


def other_chunks(knobs: Knobs, listed: int, framework: str) -> Iterator[Finding]:
    """Chunks per stage that a layout does not have; Megatron-Bridge takes both where they agree."""
    given = knobs.whole("vpp")
    if framework == "megatron-bridge" and given is not None and given != listed:
        said = f"{knobs.names['vpp']} is {given}, but {knobs.names['layout']} has {listed} chunks a stage"
        yield Finding("C062", f"{said}; give {listed}, or leave it out.", "the layout says how many chunks there are", ARGUMENTS)


def chunks_of(knobs: Knobs, model: Described, pp: int, framework: str, findings: list[Finding]) -> int:
    """Chunks per stage, given as such or as layers of a chunk."""
    ways = [knobs.names[knob] for knob in ("vpp", "vpp_layers", "layout") if knobs.has(knob)]
    if framework == "megatron-bridge" and knobs.has("vpp") and knobs.has("layout"):
        ways.remove(knobs.names["vpp"])
    if len(ways) > 1:
        findings.append(
            Finding("C062", f"{' and '.join(ways)} both say how stages are cut; give one.", "they exclude each other", ARGUMENTS)
        )
    chunks, depth = knobs.whole("vpp"), knobs.whole("vpp_layers")
    if chunks is None and depth is not None and "layers" not in model.sizes:
        knobs.unresolved.append(f"{knobs.names['vpp_layers']} {depth} (how many chunks that is follows from --num-layers)")
    if chunks is not None or depth is None or "layers" not in model.sizes:
        return chunks or 1
    layers = knobs.whole("layers") or 0
    if layers % (pp * depth):
        said = f"chunks of {depth} layers on pp = {pp} stages, {pp * depth} a round, do not divide {layers} layers"
        remedy = _other_depths(layers, pp, knobs.names["vpp_layers"])
        findings.append(Finding("C060", f"{said}{remedy}.", "a stage's chunks hold as many layers each", ARGUMENTS))
        return max(2, round(layers / (pp * depth)))  # chunks it asks for, as nearly as can be
    return layers // (pp * depth)


def _other_depths(layers: int, pp: int, option: str) -> str:
    """Layers of a chunk that would divide a stage's; without chunks, the nearest cut that is not even."""
    if layers % pp == 0:
        depths = [d for d in range(1, layers // pp) if (layers // pp) % d == 0]
        return f"; {', '.join(map(str, depths))} would, as would leaving {option} out" if depths else f"; leave {option} out"
    uneven = uneven_remedy(layers, pp)
    return f", nor do the stages; without {option}, {uneven} would" if uneven else f", nor do the {pp} stages"


def split_of(knobs: Knobs, degrees: dict[str, int], model: Described, findings: list[Finding]) -> tuple[SplitWish, int | None]:
    """How stages are cut, and the chunks per stage where a layout string says so."""
    pp, vpp = degrees["pp"], degrees["vpp"]
    text = knobs.text("layout")
    if text is not None:
        try:
            stages = parse_megatron_layout(text.replace(" ", "") if text.startswith("[") else text, pp)
        except InputError as error:
            findings.append(Finding("C063", f"{error}.", "Megatron-Core refuses the layout", ARGUMENTS))
            return SplitWish(free=True), None
        findings += [*_beside_noops(knobs, "layout"), *_beside_dualpipev(knobs), *_other_layers(knobs, stages)]
        return SplitWish(layout=stages), len(stages[0].chunks)
    listed = knobs.text("layer_list")
    if listed is not None:
        findings += _beside_noops(knobs, "layer_list")
        counts = [int(part) for part in re.split(r"[,\s]+", listed) if re.fullmatch(r"\d{1,6}", part)]
        return SplitWish(counts=tuple(counts)), None
    layers = knobs.whole("layers")
    left_out = noops(knobs, layers) if layers else ()
    if left_out and layers:
        return _around_noops(layers, left_out, degrees, knobs, findings), None
    first, last = (knobs.whole(f"{end}_stage_layers", 0) or None for end in ("first", "last"))
    if vpp > 1 and (first or last) and knobs.has("vpp_layers"):
        findings.append(
            Finding(
                "C062",
                "a first or last stage of its own needs --num-virtual-stages-per-pipeline-rank, not layers per chunk.",
                "layers per chunk differ between stages",
                ARGUMENTS,
            )
        )
    return SplitWish(first=first, last=last, embedding=knobs.has("count_embedding"), loss=knobs.has("count_loss")), None


def _around_noops(
    layers: int, left_out: tuple[int, ...], degrees: dict[str, int], knobs: Knobs, findings: list[Finding]
) -> SplitWish:
    """Chunks as even in layers with the no-ops counted, less those that each holds."""
    chunks = degrees["pp"] * degrees["vpp"]
    if layers % chunks:
        findings.append(
            Finding(
                "C072",
                f"pp·vpp = {chunks} does not divide the {layers} layers, no-ops included.",
                "no-op layers fill the model up to an even split",
                "MindSpeed mindspeed/features_manager",
            )
        )
        return SplitWish(free=True)
    size = layers // chunks
    counts = tuple(size - sum(index * size <= each < (index + 1) * size for each in left_out) for index in range(chunks))
    return SplitWish(counts=counts)


def _beside_noops(knobs: Knobs, knob: str) -> Iterator[Finding]:
    """No-op layers beside another way to cut stages."""
    layers = knobs.whole("layers")
    left_out = noops(knobs, layers) if layers else ()
    if left_out and layers:
        remedy = f"leave --noop-layers out and give --num-layers {layers - len(left_out)}"
        sentence = f"{knobs.names[knob]} and --noop-layers both say how stages are cut; {remedy}."
        yield Finding("C072", sentence, "no-op layers fill an even split up", "MindSpeed mindspeed/features_manager")


def _beside_dualpipev(knobs: Knobs) -> Iterator[Finding]:
    if knobs.text("schedule") == "dualpipev":
        sentence = f"{knobs.names['layout']} does not go with --schedules-method dualpipev; give one of them."
        source = "MindSpeed mindspeed/features_manager/pipeline_parallel/pipeline_model_parallel_layout_feature.py"
        yield Finding("C074", sentence, "the layout's chunks go round, dualpipev's back", source)


def _other_layers(knobs: Knobs, stages: tuple[Stage, ...]) -> Iterator[Finding]:
    """A layout string that places other layers than --num-layers, where that counts no-ops in."""
    layers = knobs.whole("layers")
    placed = sum(chunk.layers[1] - chunk.layers[0] + 1 for stage in stages for chunk in stage.chunks if chunk.layers)
    if layers and noops(knobs, layers) and placed != layers:
        sentence = f"the layout places {placed} decoder layers, {knobs.names['layers']} is {layers}; give both the same."
        yield Finding("C063", sentence, "Megatron-Core refuses the layout", ARGUMENTS)

"""What the stages of a pipeline do in a step: layers, seconds, micro-batches in flight, waiting."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost_models.schedules import FORWARD, stage_chunks
from ..search_spaces.layout import Problem, Stage
from .result import PricedLayout, StageWork
from .step_timeline import StepTimeline, step_timeline


def with_stage_work(problem: Problem, priced: PricedLayout, profile: str | None = None) -> PricedLayout:
    """The layout with what its stages do, read off a replay of its step."""
    return priced.model_copy(update={"stages": stage_work(step_timeline(problem, priced.layout, profile))})


def stage_work(step: StepTimeline) -> tuple[StageWork, ...]:
    """The figures of every stage; a pass beside another counts as if it ran alone."""
    line, layout, order = step.pipeline, step.layout, step.pipeline.schedule
    chunks = stage_chunks(order.name, order.pp, order.vpp)
    found = []
    for stage in range(layout.pp):
        mine = line.stage == stage
        forward, backward = mine & (line.kind == FORWARD), mine & (line.kind != FORWARD)
        seconds = [
            sum(float(line.work.of(kind, chunk)) for kind, chunk in zip(line.kind[these], line.chunk[these], strict=True))
            for these in (forward, backward)
        ]
        found.append(
            StageWork(
                stage=stage,
                layers=_layers(layout.stages, chunks[:, stage].tolist(), order.name == "dualpipe", stage),
                forward_s=seconds[0] / layout.num_microbatches,
                backward_s=seconds[1] / layout.num_microbatches,
                in_flight=float(line.in_flight[stage]) / len(chunks),
                idle_share=float(step.idle_share[stage]),
            )
        )
    return tuple(found)


def _layers(stages: Sequence[Stage], chunks: Sequence[int], doubled: bool, stage: int) -> int:
    """Layers of a stage; DualPipe's stages hold those of their mirror image too."""
    holders = chunks if doubled else [stage]
    held = [chunk for holder in holders for chunk in stages[holder].chunks]
    return sum((chunk.layers[1] - chunk.layers[0] + 1 if chunk.layers else 0) + chunk.mtp for chunk in held)

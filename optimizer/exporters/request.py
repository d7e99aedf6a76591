"""A plan on its way to one framework: what every exporter reads of it, and what no framework could be told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np

from ...search_spaces.errors import Infeasible
from ...search_spaces.layout import (
    FLAG_RANK_ORDERS,
    FULL_BLOCK,
    NONE,
    Layout,
    Problem,
    Recompute,
    Stage,
    parse_offload,
    parse_sharding,
)
from ...search_spaces.model import ModelSpec
from ...search_spaces.stack import Stack
from ..ranks import placement
from ..result import Plan
from .knobs import Dialect, dialect
from .splits import layer_count, layer_counts, virtual_chunks

PIPELINES_OUTERMOST, PIPELINES_INSIDE = FLAG_RANK_ORDERS


class Laid(ABC):
    """A layout of so many decoder layers on its way to one framework at a version, with no plan around it."""

    redoes_by_chunk: ClassVar[bool] = False  # whether it is told how many layers each chunk redoes

    speaks: Dialect

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The layout that is to be said."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Decoder layers of the model."""

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.layout.micro_batch * self.layout.num_microbatches * self.layout.dp

    @property
    def offload(self) -> tuple[float, float]:
        """Shares of the optimizer's states and of the activations that go to the host."""
        return parse_offload(self.layout.offload)

    @property
    def shard(self) -> int:
        """Size of an HSDP group, 0 without HSDP."""
        return parse_sharding(self.layout.optimizer_sharding)[1]

    @cached_property
    def recompute(self) -> Recompute | None:
        """The single setting that gives every chunk the recompute it was planned with, or None.

        Chunks may differ in depth as far as one K allows: min(K, layers) is a chunk's depth.
        """
        chunks = [chunk for stage in self.layout.stages for chunk in stage.chunks if chunk.layers]
        planned = self.planned_recompute
        if len(planned) == 1:
            return next(iter(planned.values()))
        if any(recompute.mode not in (NONE, FULL_BLOCK) for recompute in planned.values()):
            return None
        depths = [min(planned[chunk.recompute].layers, layer_count(chunk)) for chunk in chunks]
        deepest = max(depths)
        same = all(depth == min(deepest, layer_count(chunk)) for depth, chunk in zip(depths, chunks, strict=True))
        return Recompute(FULL_BLOCK, 0, deepest) if same else None

    @cached_property
    def planned_recompute(self) -> dict[str, Recompute]:
        """What chunks with layers are planned to recompute, each way once."""
        chunks = (chunk for stage in self.layout.stages for chunk in stage.chunks if chunk.layers)
        words = dict.fromkeys(chunk.recompute for chunk in chunks) or [self.layout.recompute]
        return {each: Recompute.parse(each) for each in words}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Decoder layers of each chunk that are redone as a whole, in the order that a token passes the chunks."""
        if not self.layout.stages:
            depth = Recompute.parse(self.layout.recompute).layers
            return tuple(min(depth, count) for count in self.counts)
        chunks = virtual_chunks(self.layout.stages, self.layout.schedule)
        return tuple(min(Recompute.parse(chunk.recompute).layers, layer_count(chunk)) for chunk in chunks)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Decoder layers of each chunk in the order that a token passes them; equal ones where the layout lists no stages."""
        if self.layout.stages:
            return layer_counts(self.layout.stages, self.layout.schedule)
        chunks = self.layout.pp * self.layout.vpp
        return (self.layers // chunks,) * min(chunks, self.layers + 1)  # a job may ask for billions, illegal and empty


@dataclass(frozen=True)
class Request(Laid):
    """A plan, and the framework at its version that it is to be said to."""

    plan: Plan
    speaks: Dialect

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    @property
    def layout(self) -> Layout:
        return self.plan.plan.layout

    @property
    def layers(self) -> int:
        return self.spec.num_layers

    @property
    def spec(self) -> ModelSpec:
        return self.problem.model

    @property
    def stack(self) -> Stack:
        return self.problem.stack

    @property
    def precision(self) -> str:
        return self.problem.workload.precision

    @property
    def slots(self) -> tuple[int, ...]:
        """Processes that every server runs, in the order of their numbers."""
        hosts = placement(self.layout, self.problem.cluster, sizes=self.problem.allocated_sizes)["host"]
        return tuple(np.bincount(hosts).tolist())

    @property
    def per_server(self) -> int:
        """Processes that a server runs; the last one of a supernode may run fewer."""
        return max(self.slots)

    @property
    def blackwell(self) -> bool:
        """Whether the accelerator is NVIDIA's Blackwell or later."""
        return self.problem.cluster.accelerator.blackwell

    @property
    def pipelines_inside_replicas(self) -> bool:
        """Whether pipelines vary faster than data-parallel replicas among the ranks."""
        return self.layout.rank_order == PIPELINES_INSIDE

    def overlaps(self, kind: str) -> bool:
        """Whether the plan counts on hiding this traffic: the layout's own figure, or else the stack's."""
        share = self.layout.overlap.get(kind, getattr(self.stack.overlap, kind))
        return bool(share > 0)

    @property
    def mtp_with_loss(self) -> bool:
        """Whether all MTP layers are in the chunk of the loss."""
        if not self.layout.stages:
            return True
        chunks = virtual_chunks(self.layout.stages, self.layout.schedule)
        return chunks[-1].mtp == sum(chunk.mtp for chunk in chunks) == mtp_layers(self.spec)

    @property
    def is_even(self) -> bool:
        """Whether every chunk holds as many decoder layers, and MTP layers sit with the loss, as frameworks do by themselves."""
        return not self.layout.stages or (len(set(self.counts)) == 1 and self.mtp_with_loss)


@dataclass(frozen=True)
class Alone(Laid):
    """A layout that no plan holds, of a model of so many decoder layers."""

    given: Layout
    depth: int
    speaks: Dialect

    @property
    def layout(self) -> Layout:
        return self.given

    @property
    def layers(self) -> int:
        return self.depth


Kind = TypeVar("Kind", bound=Request)


def request(
    kind: type[Kind], plan: Plan, framework: str, version: str | None, problems: Callable[[Kind], Iterator[str]] | None = None
) -> Kind:
    """The plan for a framework at a version; Infeasible with everything in it that the framework cannot be told, at once."""
    made = kind(plan, dialect(framework, version))
    refuse(made, [*_problems(made), *(problems(made) if problems else ())])
    return made


def refuse_unsayable(asked: Request) -> None:
    """Infeasible with all that no framework could be told, if there is anything."""
    refuse(asked, list(_problems(asked)))


def mtp_layers(spec: ModelSpec) -> int:
    return spec.mtp.layers if spec.mtp else 0


def refusal(summary: str, reasons: Sequence[str]) -> Infeasible:
    """One error that says everything: the reasons are kept apart and also end its sentence."""
    return Infeasible(f"{summary}: {'; '.join(reasons)}", tuple(reasons))


def refuse(asked: Request, problems: Sequence[str]) -> None:
    """Infeasible with all problems at once, if there are any."""
    if problems:
        raise refusal(f"{asked.speaks} cannot run the plan for {asked.spec.name}", problems)


def _problems(asked: Request) -> Iterator[str]:
    """What a framework would understand as something else, or not at all."""
    layout, spec = asked.layout, asked.spec
    batch = asked.problem.workload.global_batch
    if batch != layout.micro_batch * layout.num_microbatches * layout.dp:
        yield (
            f"micro_batch {layout.micro_batch} × num_microbatches {layout.num_microbatches} × dp {layout.dp} is not the global "
            f"batch of {batch}"
        )
    if layout.etp * layout.ep * layout.edp * layout.pp != layout.devices:
        yield f"etp·ep·edp·pp is {layout.etp * layout.ep * layout.edp * layout.pp}, tp·cp·pp·dp is {layout.devices}"
    if not spec.is_moe and (layout.ep > 1 or layout.etp > 1):
        yield f"ep {layout.ep} and etp {layout.etp} on a model without experts"
    if layout.pp > 1 and not layout.stages and spec.num_layers % (layout.pp * layout.vpp):
        yield f"{spec.num_layers} layers over pp·vpp = {layout.pp * layout.vpp} chunks, and the layout lists no stages"
    if asked.recompute is None and not asked.redoes_by_chunk:
        yield "recompute differs between stages in a way that one depth for all chunks does not give"
    if layout.stages:
        yield from _stage_problems(spec, layout, layout.stages)


def _stage_problems(spec: ModelSpec, layout: Layout, stages: Sequence[Stage]) -> Iterator[str]:
    """Frameworks are told how many layers a chunk has, not which: the stages must list them in order and leave none out."""
    try:
        chunks = virtual_chunks(stages, layout.schedule)
    except ValueError as error:
        yield str(error)
        return
    listed = [layer for chunk in chunks if chunk.layers for layer in range(chunk.layers[0], chunk.layers[1] + 1)]
    if listed != list(range(spec.num_layers)):
        yield f"stages list {len(listed)} layers; they must be the {spec.num_layers} of {spec.name}, in order"
    if sum(chunk.mtp for chunk in chunks) != mtp_layers(spec):
        yield f"stages list {sum(chunk.mtp for chunk in chunks)} MTP layers; {spec.name} has {mtp_layers(spec)}"
    if [chunk.embedding for chunk in chunks] != [True] + [False] * (len(chunks) - 1):
        yield "the embedding belongs to the first chunk"
    if [chunk.loss for chunk in chunks] != [False] * (len(chunks) - 1) + [True]:
        yield "the loss belongs to the last chunk"

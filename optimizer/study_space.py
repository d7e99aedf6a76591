"""Choices that the enumeration does not list, around layouts that it does, and the box of knobs that a sampler turns.

A choice keeps a start's frame, schedule and sharing of states, and sets what has too many values to list: the micro-batch, what is
recomputed and to which depth, the fractions of the optimizer and of activations that are offloaded, and the cuts of schedules
whose cuts follow from a rule. The buckets in which gradients are reduced change nothing else: they have no knob, and are tried one
by one for the best choice.
Stages of plain 1F1B are cut exactly for every choice, so that their cuts need no knob. Precision changes what is learnt and not
only how fast: a start has one, the problem's own unless others are permitted. Depths of recompute that differ between chunks are
the plan's own (`recutting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..search_spaces.enumeration import Space
from ..search_spaces.expressions import divisors
from ..search_spaces.layout import ALL_LAYERS, FULL_BLOCK, FULL_UNIFORM, Layout, LayoutTable, Problem, Recompute, Split
from ..search_spaces.quantities import PER_MILLE
from ..search_spaces.workload import Precision
from .stages import partitioned_exactly

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

REACH = 2
"""Layers by which a cut may move from where the start has it, to either side."""
OFFLOAD_STEPS = (1, 4, 16, 64, 256)
"""Per mille by which a neighbour's offload differs."""
KIND_STEP = 64
"""Per mille by which the offload of a neighbour with another kind of recompute differs."""
BUCKETS = tuple(10_000_000 << doubled for doubled in range(9))
"""Parameters of a bucket of gradients that are tried."""
DEPTH_STEPS = (1, 4)
"""Layers by which a neighbour's recompute depth differs."""


@dataclass(frozen=True)
class Choice:
    """What is set of one layout, legal or not, around the start of that place; `cuts` only where they are told."""

    start: int
    micro_batch: int
    recompute: Recompute
    offload_per_mille: int
    cuts: tuple[int, ...] = ()
    activations_per_mille: int = 0
    bucket: int = 0


@dataclass(frozen=True)
class Start:
    """A layout of the certified space, or of that of another precision: its row, its cuts, whether these are told in choices, and
    the deepest block recompute.
    """

    layout: Layout
    precision: Precision
    row: LayoutTable
    cuts: tuple[int, ...]
    tells_cuts: bool
    deepest: int

    @classmethod
    def of(cls, problem: Problem, layout: Layout) -> Start:
        row = LayoutTable.from_layouts([layout])
        split = row.splits[0]
        told = problem.stack.cuts_freely(split.vpp) and len(split.cuts) > 2 and not partitioned_exactly(problem, row).all()
        depth = row.recompute(0).layers
        deepest = max(max(split.counts) + REACH, depth if depth < ALL_LAYERS else 0)
        return cls(layout, problem.workload.precision, row, split.cuts, told, deepest)

    def choice(self, place: int) -> Choice:
        """The start as a choice of its own."""
        offload, activations = (
            round(float(share[0]) * PER_MILLE) for share in (self.row.optimizer_offload, self.row.activation_offload)
        )
        cuts = self.cuts if self.tells_cuts else ()
        return Choice(place, self.layout.micro_batch, self.row.recompute(0), offload, cuts, activations)


class Run(NamedTuple):
    """How the software of a choice runs: precision of its GEMMs, and parameters of a bucket, 0 for the stack's own."""

    precision: Precision
    bucket: int = 0

    def of(self, problem: Problem) -> Problem:
        """The problem run so."""
        workload = problem.workload.model_copy(update={"precision": self.precision})
        changed = problem.model_copy(update={"workload": workload})
        if not self.bucket:
            return changed
        return changed.model_copy(update={"stack": problem.stack.model_copy(update={"gradient_bucket": self.bucket})})


def by_run(starts: Sequence[Start], choices: Sequence[Choice]) -> Iterator[tuple[Run, list[int]]]:
    """The choices that run alike together: how, and their places."""
    each = [Run(starts[choice.start].precision, choice.bucket) for choice in choices]
    yield from ((run, [place for place, own in enumerate(each) if own == run]) for run in dict.fromkeys(each))


def table_of(problem: Problem, starts: Sequence[Start], choices: Sequence[Choice]) -> LayoutTable:
    """The choices as rows without cuts."""
    rows = [starts[choice.start].row for choice in choices]
    table = LayoutTable.concatenate([replace(row, splits=()) for row in rows])
    micro_batch = np.array([choice.micro_batch for choice in choices], dtype=np.int64)
    recompute = [choice.recompute for choice in choices]
    return replace(
        table,
        micro_batch=micro_batch,
        num_microbatches=problem.workload.global_batch // (table.dp * micro_batch),
        recompute_mode=np.array([each.mode for each in recompute], dtype=np.int64),
        recompute_modules=np.array([each.modules for each in recompute], dtype=np.int64),
        recompute_layers=np.array([each.layers for each in recompute], dtype=np.int64),
        optimizer_offload=np.array([choice.offload_per_mille for choice in choices]) / PER_MILLE,
        activation_offload=np.array([choice.activations_per_mille for choice in choices]) / PER_MILLE,
        split=np.full(len(choices), -1, dtype=np.int64),
    )


def cut_at(table: LayoutTable, cuts: Sequence[tuple[int, ...]]) -> LayoutTable:
    """The rows with their cuts; a block depth that covers every chunk is full recompute, and is called so."""
    splits = [Split(pp, vpp, each) for pp, vpp, each in zip(table.pp.tolist(), table.vpp.tolist(), cuts, strict=True)]
    distinct = tuple(dict.fromkeys(splits))
    place = {split: index for index, split in enumerate(distinct)}
    longest = np.array([max(split.counts) for split in splits], dtype=np.int64)
    covered = (table.recompute_mode == FULL_BLOCK) & (table.recompute_layers >= longest)
    table = replace(table, recompute_layers=np.where(covered, ALL_LAYERS, table.recompute_layers))
    return table.with_splits(np.array([place[split] for split in splits], dtype=np.intp), distinct)


class Box:
    """The knobs of a problem around some starts, as ranges that a sampler draws from; what is fixed to one value has no knob.

    Ranges are wider than what is legal: a micro-batch is any number up to what a replica gets, cuts move without regard to each
    other, a depth may pass the layers of a chunk.
    """

    def __init__(self, problem: Problem, starts: Sequence[Start]) -> None:
        self._problem, self._starts = problem, starts
        fixed = {name for name, values in problem.workload.fix.items() if len(values) == 1}
        self.recomputes = _kinds(problem, starts)
        replicas = min(start.layout.dp for start in starts)
        self._most = {
            "start": len(starts) - 1,
            "micro_batch": 1 if "micro_batch" in fixed else problem.workload.global_batch // replicas,
            "recompute": 0 if "recompute" in fixed else len(self.recomputes) - 1,
            "depth": max(start.deepest for start in starts) if any(each.layers == 1 for each in self.recomputes) else 1,
            "offload": int(problem.stack.optimizer_offload and "offload" not in fixed),
            "activations": int(problem.stack.activation_offload and "offload" not in fixed),
        }
        self._told = max((len(start.cuts) - 2 for start in starts if start.tells_cuts), default=0)

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distributions of the knobs that can be turned at all."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        most = self._most
        every: dict[str, BaseDistribution] = {
            "start": CategoricalDistribution(range(most["start"] + 1)),
            "micro_batch": IntDistribution(1, most["micro_batch"], log=True),
            "recompute": CategoricalDistribution(range(most["recompute"] + 1)),
            "depth": IntDistribution(1, most["depth"]),
            "offload": FloatDistribution(0.0, float(most["offload"])),
            "activations": FloatDistribution(0.0, float(most["activations"])),
        }
        found = {name: each for name, each in every.items() if not each.single()}
        return found | {f"cut_{place}": IntDistribution(-REACH, REACH) for place in range(1, self._told + 1)}

    def read(self, params: dict[str, Any]) -> Choice:
        """The choice that a sample stands for, as it is."""
        place = params.get("start", 0)
        start = self._starts[place]
        own = start.choice(place)
        return Choice(
            place,
            params.get("micro_batch", own.micro_batch),
            self._recompute(params) if "recompute" in params else own.recompute,
            round(params["offload"] * PER_MILLE) if "offload" in params else own.offload_per_mille,
            tuple(
                cut + (params[f"cut_{position}"] if 0 < position < len(start.cuts) - 1 else 0)
                for position, cut in enumerate(start.cuts)
            )
            if start.tells_cuts
            else (),
            round(params["activations"] * PER_MILLE) if "activations" in params else own.activations_per_mille,
        )

    def params(self, choice: Choice) -> dict[str, Any]:
        """A sample that stands for the choice."""
        start, depth = self._starts[choice.start], choice.recompute.layers
        moved = [cut - base for cut, base in zip(choice.cuts, start.cuts, strict=True)][1:-1] if start.tells_cuts else []
        every = {
            "start": choice.start,
            "micro_batch": choice.micro_batch,
            "recompute": self.recomputes.index(plain(choice.recompute)),
            "depth": depth if 1 <= depth <= self._most["depth"] else 1,
            "offload": choice.offload_per_mille / PER_MILLE,
            "activations": choice.activations_per_mille / PER_MILLE,
        }
        every |= {f"cut_{place}": moved[place - 1] if place <= len(moved) else 0 for place in range(1, self._told + 1)}
        return {name: value for name, value in every.items() if name in self.distributions}

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Choices that differ from a legal one by a little, legal or not: in one knob, or in another kind of recompute with the
        offload that it needs."""
        names, start, now = self.distributions, self._starts[choice.start], choice.offload_per_mille
        moves = [sign * step for step in OFFLOAD_STEPS for sign in (-1, 1)]
        offloads = [now + move for move in moves] if "offload" in names else []
        yield from (replace(choice, offload_per_mille=each) for each in offloads if 0 <= each <= PER_MILLE)
        shares = [choice.activations_per_mille + move for move in moves] if "activations" in names else []
        yield from (replace(choice, activations_per_mille=each) for each in shares if 0 <= each <= PER_MILLE)
        others = [kind for kind in self.recomputes if kind.layers != 1 and kind != choice.recompute] if "recompute" in names else []
        for step in (0, -KIND_STEP, KIND_STEP) if "offload" in names else (0,):
            offload = min(max(now + step, 0), PER_MILLE)
            yield from (replace(choice, recompute=kind, offload_per_mille=offload) for kind in others)
        if "depth" in names and choice.recompute.mode in (FULL_BLOCK, FULL_UNIFORM):
            depth = min(choice.recompute.layers, start.deepest)
            depths = [depth + sign * step for step in DEPTH_STEPS for sign in (-1, 1)]
            modes = [kind.mode for kind in self.recomputes if kind.layers == 1]
            yield from (replace(choice, recompute=Recompute(m, 0, v)) for v in depths for m in modes if 1 <= v <= start.deepest)
        if "micro_batch" in names:
            sizes = divisors(self._problem.workload.global_batch // start.layout.dp)
            yield from (replace(choice, micro_batch=v) for v in _beside(sizes, choice.micro_batch))
        for position in range(1, len(choice.cuts) - 1):
            for step in (-1, 1):
                cuts = [*choice.cuts[:position], choice.cuts[position] + step, *choice.cuts[position + 1 :]]
                if abs(cuts[position] - start.cuts[position]) <= REACH:
                    yield replace(choice, cuts=tuple(cuts))

    def _recompute(self, params: dict[str, Any]) -> Recompute:
        kind: Recompute = self.recomputes[params["recompute"]]
        return replace(kind, layers=params.get("depth", 1)) if kind.layers == 1 else kind


def plain(recompute: Recompute) -> Recompute:
    """The kind of a recompute: its depth, where it has one, set to 1."""
    return replace(recompute, layers=1) if 0 < recompute.layers < ALL_LAYERS else recompute


def _kinds(problem: Problem, starts: Sequence[Start]) -> tuple[Recompute, ...]:
    """Kinds of recompute that are listed or that a start has, and, where nothing is fixed, those of the stack with a depth."""
    free = problem.stack.recompute_block and "recompute" not in problem.workload.fix
    deep = [Recompute(FULL_BLOCK, 0, 1), Recompute(FULL_UNIFORM, 0, 1)] if free else []
    found = [*Space(problem).choices.recomputes(), *(start.row.recompute(0) for start in starts), *deep]
    return tuple(dict.fromkeys(plain(each) for each in found))


def _beside(values: Sequence[int], value: int) -> list[int]:
    """The next smaller and the next larger of rising values."""
    return [*[v for v in values if v < value][-1:], *[v for v in values if v > value][:1]]

"""What stages do around a pipeline: when each ends, what it exchanges for its states, and how much of that its passes hide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Floats, Ints
from .loads import Loads


@dataclass(frozen=True)
class StageTimes:
    """Times of stages, (n, pp): when each ends its last backward pass, and what it does for its states before and after.

    A stage's gradients are reduced once its own last backward has ended. Then all wait for each other: the gradient norm spans the
    model, and Megatron-LM's train_step joins all ranks once more after the optimizer (its logical_and_across_model_parallel_group).
    What comes after, weights gathered for the next step in it, so takes as long as on the stage that takes longest.
    """

    end_s: Floats
    reduced_s: Floats
    gathered_s: Floats
    optimizer_s: Floats
    offload_s: Floats | None  # nothing is offloaded

    @property
    def done_s(self) -> Floats:
        """When each stage's gradients are reduced."""
        return np.asarray(self.end_s + self.reduced_s)

    @property
    def after_s(self) -> Floats:
        """What each stage does once all are done."""
        found = self.gathered_s + self.optimizer_s
        return np.asarray(found if self.offload_s is None else found + self.offload_s)

    @property
    def total_s(self) -> Floats:
        """The step without its fixed overhead, (n,)."""
        return np.asarray(self.done_s.max(axis=1) + self.after_s.max(axis=1))


@dataclass(frozen=True)
class Flow:
    """The pipeline of some rows: what chunks and stages hold, (n, pp·vpp) and (n, pp), and when each stage ends its last backward
    pass, (n, pp).

    `forward_s` and `backward_s` are of one pass of every chunk, or of stages that are not told apart by chunk, as far as messages
    can hide behind it, `lead_s` (n, pp) of the forward passes before a stage's first.
    """

    chunks: Loads
    load: Loads
    end_s: Floats
    lead_s: Floats
    forward_s: Floats
    backward_s: Floats

    def take(self, rows: Ints) -> Flow:
        """The given rows."""
        times = (each[rows] for each in (self.end_s, self.lead_s, self.forward_s, self.backward_s))
        return Flow(self.chunks.take(rows), self.load.take(rows), *times)


@dataclass(frozen=True)
class Kept:
    """What stages do for the states that they keep, shaped like their loads: traffic of gradients and of parameters that stays
    exposed and that hides as far as there are passes to hide it, optimizer, and offload if there is any.

    What hides is told by chunk, as passes are: pp of the pipeline and how many of a stage are told apart are in `turns`.
    """

    turns: tuple[int, int]
    exposed_gradients_s: Floats
    gradients_s: Floats
    exposed_parameters_s: Floats | None  # without sharding nothing is gathered
    parameters_s: Floats | None
    optimizer_s: Floats
    offload_s: Floats | None

    def begun(self, starts: slice) -> Kept:
        """Of stages (n, k, starts, lengths) those that begin at some of the cuts."""
        exposed, hidden, optimizer = (each[:, :, starts] for each in (self.exposed_gradients_s, self.gradients_s, self.optimizer_s))
        gathered, parameters, offload = (
            None if each is None else each[:, :, starts] for each in (self.exposed_parameters_s, self.parameters_s, self.offload_s)
        )
        return Kept(self.turns, exposed, hidden, gathered, parameters, optimizer, offload)

    def beside(self, flow: Flow) -> StageTimes:
        """The times of stages with that pipeline: what does not hide behind its passes is exposed."""
        gathered_s = self.gathered_s(flow.forward_s, flow.lead_s)
        return StageTimes(flow.end_s, self.reduced_s(flow.backward_s), gathered_s, self.optimizer_s, self.offload_s)

    def reduced_s(self, backward_s: Floats) -> Floats:
        """Gradient traffic that the last backward passes do not hide."""
        return np.asarray(self.exposed_gradients_s + late_s(self.gradients_s, backward_s, self.turns))

    def gathered_s(self, forward_s: Floats, lead_s: Floats) -> Floats:
        """Parameter traffic that the first forward passes do not hide."""
        if self.parameters_s is None or self.exposed_parameters_s is None:
            return np.zeros_like(self.optimizer_s)
        return np.asarray(self.exposed_parameters_s + late_s(self.parameters_s, forward_s, self.turns, lead_s))

    @property
    def stepped_s(self) -> Floats:
        """What follows the gradients whatever is hidden."""
        found = self.optimizer_s if self.exposed_parameters_s is None else self.optimizer_s + self.exposed_parameters_s
        return found if self.offload_s is None else found + self.offload_s


def late_s(traffic_s: Floats, passes_s: Floats, turns: tuple[int, int], lead_s: Floats | float = 0.0) -> Floats:
    """Traffic of stages that their passes do not hide; per chunk (n, vpp·stages) where they have several, else of any shape.

    A chunk's gradients hide behind its own last backward pass and those of the chunks that follow, pp each (Megatron-LM starts a
    chunk's reduction when its last micro-batch is done); its weights behind the forward passes before, and `lead_s` before those.
    What waits in line for the same links is late together.
    """
    return left_s(in_line_s(traffic_s, turns), behind_s(passes_s, turns, lead_s), turns)


def in_line_s(traffic_s: Floats, turns: tuple[int, int]) -> Floats:
    """Of `late_s` what hangs on the traffic: that of each chunk and of those before it in line, (n, vpp, stages)."""
    return traffic_s if turns[1] == 1 else np.cumsum(traffic_s.reshape(len(traffic_s), turns[1], -1), axis=1)


def behind_s(passes_s: Floats, turns: tuple[int, int], lead_s: Floats | float = 0.0) -> Floats:
    """Of `late_s` what hangs on the passes: those that each chunk's traffic can hide behind, (n, vpp, stages)."""
    pp, vpp = turns
    if vpp == 1:
        return np.asarray(passes_s + lead_s)
    passes = passes_s.reshape(len(passes_s), vpp, -1)
    found, before = np.empty_like(passes), np.asarray(lead_s) + np.zeros_like(passes[:, 0])
    for chunk in range(vpp):
        found[:, chunk] = passes[:, chunk] + before
        before += pp * passes[:, chunk]
    return found


def left_s(in_line: Floats, behind: Floats, turns: tuple[int, int]) -> Floats:
    """`late_s` from these two."""
    waiting = in_line - behind
    if turns[1] > 1:
        waiting = waiting.max(axis=1)
    return np.asarray(np.maximum(waiting, 0.0))


def highest(values: Floats) -> tuple[Floats, Ints]:
    """The largest of every row of (n, stages), and the first stage that has it, (n,) both."""
    best, place = values[:, 0].copy(), np.zeros(len(values), dtype=np.int16)
    for stage in range(1, values.shape[1]):
        better = values[:, stage] > best
        np.maximum(place, better * np.int16(stage), out=place)
        np.maximum(best, values[:, stage], out=best)
    return best, place.astype(np.int64)

"""One step of a layout as it runs: every pass of every stage with its times, what follows the pipeline, and memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..cost_models.details import detail
from ..cost_models.memory import GIB
from ..cost_models.profile import load_profile
from ..cost_models.schedules import BACKWARD, FORWARD, INPUT, SPLIT, Floats
from ..cost_models.split_passes import kept_bytes, recompute_s
from ..cost_models.step import CostModel
from ..cost_models.timeline import Timeline, replayed
from ..search_spaces.layout import Layout, LayoutTable, Problem
from .evaluation import order_of, switched

HIDDEN = "gradients, hidden"
"""What a stage exchanges behind its passes."""


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """A step of one layout. Stages are (pp,), chunks of the model (chunks,), seconds and GiB.

    `pipeline` holds the passes; of a backward the first `recompute_s` is recompute. After its own last pass a stage exchanges
    gradients for `reduced_s`, of which `hidden_s` more ran behind passes; once all have done so each spends `optimizer_s`,
    `offload_s` and `gathered_s`, and the step ends `overhead_s` after the slowest: at `step_s`. A stage holds `static_gib` always,
    `saved_gib` per chunk and micro-batch from its forward to its backward, `kept_gib` until a weight gradient that follows apart,
    and `transient_gib` while it computes: the largest short-lived block of any pass, charged to each, as the price charges it.
    """

    problem: Problem
    layout: Layout
    pipeline: Timeline
    recompute_s: Floats
    p2p_s: float
    reduced_s: Floats
    optimizer_s: Floats
    offload_s: Floats
    gathered_s: Floats
    hidden_s: Floats
    overhead_s: float
    static_gib: Floats
    transient_gib: Floats
    saved_gib: Floats
    kept_gib: Floats
    usable_gib: float

    @property
    def step_s(self) -> float:
        """From the start of the first forward to the end of the step."""
        return self.reduced_at_s + float((self.optimizer_s + self.offload_s + self.gathered_s).max()) + self.overhead_s

    @property
    def reduced_at_s(self) -> float:
        """When the last stage's gradients are exchanged."""
        return float((self.pipeline.stage_end_s + self.reduced_s).max())

    def around(self, stage: int) -> Iterator[tuple[str, str, float, float]]:
        """What a stage does outside its passes: in words, the kind of time it is, begin and end; nothing that takes no time."""
        end, at = float(self.pipeline.stage_end_s[stage]), self.reduced_at_s
        spans = [
            (HIDDEN, "dp", max(0.0, end - float(self.hidden_s[stage])), end),
            ("gradients", "dp", end, end + float(self.reduced_s[stage])),
        ]
        for words, kind in (("optimizer", "optimizer"), ("offload", "offload"), ("weights", "dp")):
            seconds = {"optimizer": self.optimizer_s, "offload": self.offload_s, "weights": self.gathered_s}[words]
            spans.append((words, kind, at, at + float(seconds[stage])))
            at = spans[-1][-1]
        spans.append(("host", "host", self.step_s - self.overhead_s, self.step_s))
        return (span for span in spans if span[3] > span[2])

    @property
    def idle_share(self) -> Floats:
        """Share of the pipeline's time that each stage waits, (pp,)."""
        return np.asarray(1.0 - self.pipeline.busy_s / self.pipeline.step_s)

    def memory_gib(self, stage: int) -> tuple[Floats, Floats]:
        """Times at which what a stage holds changes, and GiB from each on, both (changes,)."""
        line, changes = self.pipeline, [(0.0, float(self.static_gib[stage]))]
        mine = np.flatnonzero(line.stage == stage)
        columns = (line.kind, line.chunk, line.paired, line.start_s, line.end_s)
        for kind, chunk, paired, start, end in zip(*(each[mine].tolist() for each in columns), strict=True):
            changes.append(self._change(kind, chunk, start, end))
            if not paired:  # the passes of a pair share one block
                transient = float(self.transient_gib[stage])
                changes += [(start, transient), (end, -transient)]
        changes.sort()
        times, amounts = (np.array(column) for column in zip(*changes, strict=True))
        last = np.append(np.diff(times) > 0, True)  # what changes at once is told as one
        return times[last], np.cumsum(amounts)[last]

    def _change(self, kind: int, chunk: int, start: float, end: float) -> tuple[float, float]:
        """When a pass changes what is held for backwards, and by how many GiB."""
        saved, kept = float(self.saved_gib[chunk]), float(self.kept_gib[chunk])
        if kind == FORWARD:
            return start, saved
        if kind in (BACKWARD, INPUT):
            return end, (kept if kind == INPUT else 0.0) - saved
        return end, -kept


def step_timeline(problem: Problem, layout: Layout, profile: str | None = None) -> StepTimeline:
    """The step of a layout whose stages are given."""
    problem = switched(problem, layout)
    model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as, profile))
    table = LayoutTable.from_layouts([layout])
    rows, cuts = model.rows(table), np.array([table.splits[0].cuts])
    flow, found = model.flow(rows, cuts), detail(model, layout)
    times, kept = model.around_pipeline(rows, flow), model.kept(rows, flow.load)
    order = order_of(problem, layout)
    terms = found.stage_bytes
    transient = np.array([stage["transient"] for stage in terms]) / GIB
    static = np.array([sum(stage.values()) - stage["transient"] - stage["activations"] for stage in terms]) / GIB
    hides = np.maximum(kept.exposed_gradients_s + kept.gradients_s - times.reduced_s, 0.0)[0]
    nothing = np.zeros(layout.pp)
    return StepTimeline(
        problem=problem,
        layout=layout,
        pipeline=replayed(order, found.passes, found.p2p_s),
        recompute_s=recompute_s(rows, cuts)[0],
        p2p_s=found.p2p_s,
        reduced_s=times.reduced_s[0] + nothing,
        optimizer_s=times.optimizer_s[0] + nothing,
        offload_s=nothing if times.offload_s is None else times.offload_s[0] + nothing,
        gathered_s=times.gathered_s[0] + nothing,
        hidden_s=hides + nothing,
        overhead_s=float(model.problem.stack.step_overhead_s.value),
        static_gib=static,
        transient_gib=transient,
        saved_gib=flow.chunks.saved_bytes[0] / GIB,
        kept_gib=kept_bytes(model.layers, rows, cuts)[0] / GIB if layout.schedule in SPLIT else np.zeros(order.chunks),
        usable_gib=model.usable_bytes / GIB,
    )

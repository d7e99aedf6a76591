"""What a layout saves: the bytes of a checkpoint on the fullest device, in its memory and at its host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Floats, Problem
from .loads import Cuts
from .operators import BF16
from .reliability import Recovery, Values, failure_rate, time_over_work
from .rows import Rows
from .split_passes import stage_loads


@dataclass(frozen=True)
class Saved:
    """Bytes that the fullest device saves, (n,): `resident` in its memory, `held` those and what it keeps at its host."""

    resident: Floats
    held: Floats


def state_bytes(problem: Problem) -> float:
    """Bytes of a whole checkpoint: weights and optimizer states of every parameter, once."""
    return (BF16 + problem.stack.optimizer_bytes) * problem.model.parameters(mtp=True)


def saved_bytes(rows: Rows, cuts: Cuts) -> Saved:
    """What the first replica of every shard copies to its host, for rows that share pp, vpp and schedule.

    A device saves the weights and optimizer states that it holds: sharded states are on all, others are saved by one replica.
    """
    load, rates = stage_loads(rows, rows.chunks(cuts)), rows.rates

    def held(pair: tuple[Floats, Floats]) -> Floats:
        return np.asarray(pair[0][:, None] * load.dense + pair[1][:, None] * (load.expert if load.experts else 0.0))

    resident = held(rates.weights) + held(rates.optimizer)
    return Saved(resident.max(axis=1), (resident + held(rates.host)).max(axis=1))


@dataclass(frozen=True)
class Failures:
    """What failures make of the time of one problem's layouts."""

    problem: Problem
    recovery: Recovery

    @classmethod
    def of(cls, problem: Problem) -> Failures | None:
        """None where the cluster's YAML says too little of its failures."""
        recovery = Recovery.of(problem.cluster)
        known = failure_rate(problem.cluster, problem.devices)
        return None if recovery is None or not known else cls(problem, recovery)

    def stretch(self, devices: Values, saved: Saved | None = None) -> Floats:
        """Expected time over training time of layouts on so many devices; without what they save, what none is better than."""
        rate = failure_rate(self.problem.cluster, devices)
        assert rate is not None  # `of` has seen one
        whole = state_bytes(self.problem)
        resident, held = (0.0, 0.0) if saved is None else (saved.resident, saved.held)
        recovery = self.recovery
        back, drain = recovery.back_s(whole, held, devices), recovery.drain_s(whole, devices)
        return time_over_work(recovery.save_s(resident), drain, back, 1.0 / np.asarray(rate))

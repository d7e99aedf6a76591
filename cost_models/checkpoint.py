"""What a layout saves, the bytes of a checkpoint on the fullest device, and what failures make of its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..search_spaces.layout import Floats, Problem
from .loads import Cuts
from .operators import BF16
from .recovery import Recovery, Saved
from .reliability import Values, failure_rate, failure_rates, kept_interval_s, time_over_work, weighed_s
from .rows import Rows
from .split_passes import stage_loads


def state_bytes(problem: Problem) -> float:
    """Bytes of a whole checkpoint: weights and optimizer states of every parameter, once."""
    return (BF16 + problem.stack.optimizer_bytes) * problem.model.parameters(mtp=True)


def saved_bytes(rows: Rows, cuts: Cuts) -> Saved:
    """What the first replica of every shard copies to the host or the pool, for rows that share pp, vpp and schedule.

    A device saves the weights and optimizer states that it holds: sharded states are on all, others are saved by one replica.
    """
    load, rates = stage_loads(rows, rows.chunks(cuts)), rows.rates

    def held(pair: tuple[Floats, Floats]) -> Floats:
        return np.asarray(pair[0][:, None] * load.dense + pair[1][:, None] * (load.expert if load.experts else 0.0))

    resident = held(rates.weights) + held(rates.optimizer)
    return Saved(resident.max(axis=1), (resident + held(rates.host)).max(axis=1))


@dataclass(frozen=True)
class Endured:
    """What failures `mtbf_s` apart take of layouts, (n,), in seconds: a save every `interval_s`, its drain, coming back.

    `failure_s` is what one takes beside the work since the last save, and `stretch` expected time over training time.
    """

    save_s: Floats
    drain_s: Floats
    back_s: Floats
    failure_s: Floats
    interval_s: Floats
    mtbf_s: Floats
    stretch: Floats


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

    def endured(self, devices: Values, saved: Saved) -> Endured:
        """What failures take of layouts on so many devices that save so much; broadcasts."""
        whole, recovery = state_bytes(self.problem), self.recovery
        by_kind = failure_rates(self.problem.cluster, devices)
        rate = np.asarray(np.sum(list(by_kind.values()), axis=0))
        shares = [each / rate for each in by_kind.values()]
        back = [recovery.back_s(kind, whole, saved, devices) for kind in by_kind]
        exposed = [recovery.exposed_s(kind, whole, saved, devices) for kind in by_kind]
        save, drain, mtbf = recovery.save_s(saved.resident), recovery.drain_s(whole, devices), 1.0 / rate
        failure_s = weighed_s(back, shares, mtbf) + weighed_s(exposed, shares, mtbf)
        interval = kept_interval_s(save, drain, mtbf)
        stretch = time_over_work(interval, save, failure_s, mtbf)
        return Endured(save, drain, weighed_s(back, shares, mtbf), failure_s, interval, mtbf, stretch)

    def stretch(self, devices: Values, saved: Saved | None = None) -> Floats:
        """Expected time over training time of layouts on so many devices; without what they save, what none is better than."""
        return self.endured(devices, Saved(0.0, 0.0) if saved is None else saved).stretch

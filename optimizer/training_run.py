"""A training run that is to be sized: its days, what it takes by arithmetic, and what a plan of so many devices makes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..cost_models.checkpoint import Failures
from ..cost_models.reliability import SECONDS_PER_DAY
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import build_problem, load_cluster, load_model
from ..search_spaces.layout import Problem
from .endurance import furthest, stretch_ends
from .interrupts import came
from .planner import plan
from .result import Goodput, Line, PricedLayout, Result

SUFFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}


@dataclass(frozen=True)
class Run:
    """A training run to be sized; devices are what is asked for."""

    model: str
    cluster: ClusterSpec
    tokens: float
    days: float
    global_batch: int
    seq_len: int
    stack: str | None = None
    precision: str = "bf16"
    profile: str | None = None

    def problem(self, devices: int) -> Problem:
        return build_problem(self.model, self.cluster, devices, self.global_batch, self.seq_len, self.stack, self.precision)

    @property
    def steps(self) -> int:
        """Steps until all tokens have been seen."""
        return math.ceil(self.tokens / (self.global_batch * self.seq_len))

    def days_of(self, step_s: float) -> float:
        """Days of all steps."""
        return self.steps * step_s / SECONDS_PER_DAY


class Tried(Result):
    """One count of devices: its best layout, and the days that the run takes with it; `reason` where nothing fits or is legal."""

    devices: int
    reason: str = ""
    plan: PricedLayout | None = None
    goodput: Goodput | None = None
    days: float | None = None
    days_interval: tuple[float, float] | None = None  # with the step and all figures of failures at their ends


def amount(text: str, flag: str) -> float:
    """A count with an SI suffix, or B for 10⁹: "10T" is 10¹³. InputError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]?)\s*", text)
    if found is None or found[2] not in SUFFIXES or float(found[1]) <= 0:
        raise InputError(f"{flag} {text[:40]!r}: must be a count such as 10T, 300B or 1e13 (suffixes k, M, G or B, T, P)")
    return float(found[1]) * SUFFIXES[found[2]]


def attempt(run: Run, devices: int, layouts: int = 1) -> Tried:
    """A layout on so many devices and the days that the run takes with it: of the fastest `layouts` the one that gets furthest
    with failures, where those are known.
    """
    problem = run.problem(devices)
    failures = Failures.of(problem)
    try:
        found = plan(problem, profile=run.profile, top=layouts if failures else 1, inside_by_default=True, bound_cuts=False)
    except Infeasible as error:
        return Tried(devices=devices, reason=error.summary)
    best, goodput = (found.plan, None) if failures is None else furthest(failures, (found.plan, *found.alternatives))
    step_s = best.step_time_s if goodput is None else goodput.effective_step_s
    stretches = (1.0, 1.0) if failures is None else stretch_ends(failures, best)
    low, high = (run.days_of(end * stretch) for end, stretch in zip(best.step_time_interval_s, stretches, strict=True))
    return Tried(devices=devices, plan=best, goodput=goodput, days=run.days_of(step_s), days_interval=(low, high))


def whole(run: Run, devices: int, *layouts: int) -> Tried:
    """An attempt whose search was not cut short; KeyboardInterrupt for one that was."""
    before = came()
    found = attempt(run, devices, *layouts)
    if came() > before:
        raise KeyboardInterrupt
    return found


def arithmetic(
    active: float, tokens: float, days: float, flops_per_device: float, rate_words: str = "", parameters: float | None = None
) -> tuple[Line, ...]:
    """6·N·D over what a device does: from parameters and tokens to devices, a line a step. A mixture's N is what a token uses."""
    flops = 6.0 * active * tokens
    seconds = flops / flops_per_device
    of = "" if parameters is None or parameters == active else f" of {parameters:.4g}"
    return (
        Line(name="N", expression=f"parameters that a token uses{of}", value=active, unit=""),
        Line(name="D", expression="tokens", value=tokens, unit=""),
        Line(name="FLOPs", expression=f"6·N·D = 6 · {active:.4g} · {tokens:.4g}", value=flops, unit="FLOP"),
        Line(name="rate", expression=rate_words or "of a device", value=flops_per_device, unit="FLOP/s"),
        Line(name="device-seconds", expression=f"{flops:.4g} / {flops_per_device:.4g}", value=seconds, unit="s"),
        Line(name="device-days", expression=f"{seconds:.4g} / 86400", value=seconds / SECONDS_PER_DAY, unit="days"),
        Line(
            name="devices",
            expression=f"{seconds / SECONDS_PER_DAY:.4g} / {days:g} days, before they are rounded up to whole units",
            value=seconds / SECONDS_PER_DAY / days,
            unit="",
        ),
    )


def per_token(run: Run) -> float:
    """FLOPs of a token by 6·N."""
    return 6.0 * load_model(run.model).active_parameters(embedding=False)


def least_devices(run: Run) -> float:
    """Devices that it would take at their peak."""
    return per_token(run) * run.tokens / run.cluster.accelerator.peak_flops[run.precision].value / SECONDS_PER_DAY / run.days


def by_hand(run: Run, rate: float, words: str) -> Iterator[str]:
    """The arithmetic at what a device does, FLOP/s, a line a step."""
    return in_words(arithmetic(per_token(run) / 6.0, run.tokens, run.days, rate, words))


def in_words(lines: Iterable[Line]) -> Iterator[str]:
    return (f"{line.name}: {line.expression} = {line.value:.4g} {line.unit}".rstrip() for line in lines)


def at_target(run: Run, mfu: float) -> Line:
    """The devices that a constant MFU would take."""
    peak = run.cluster.accelerator.peak_flops[run.precision].value
    words = f"were MFU {100 * mfu:.0f} % of {peak / 1e12:,.0f} TFLOP/s at every size, and nothing failed"
    return Line(name="devices", expression=words, value=least_devices(run) / mfu, unit="")


def in_time(run: Run, one: Tried) -> bool:
    return one.days is not None and one.days <= run.days


def surely_in_time(run: Run, one: Tried) -> bool:
    return one.days_interval is not None and one.days_interval[1] <= run.days


def sized(model: str, cluster: str, tokens: float, days: float, global_batch: int, seq_len: int, **more: str | None) -> Run:
    """A run of a catalog cluster or a file's."""
    given = {name: value for name, value in more.items() if value is not None}
    return Run(model, load_cluster(cluster), tokens, days, global_batch, seq_len, **given)

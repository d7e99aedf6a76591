"""How many devices a training run needs to be done in time: real plans at several counts, failures included."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..cost_models.checkpoint import Failures
from ..cost_models.reliability import SECONDS_PER_DAY, server_size, spares
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import MOST_DEVICES, build_problem, load_cluster, load_model
from ..search_spaces.layout import Problem
from .endurance import goodput_of
from .planner import plan
from .result import Goodput, PricedLayout, Result

SUFFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
STEPS = (8, 9, 10, 12, 15)
"""Units that are tried, times powers of two: counts that batches and layers divide by, at most a quarter apart."""
FURTHEST = 2.0
"""Factor by which the next count may be larger: one that is far too large takes long to plan."""
MOST_PLANS = 24
NO_GAIN = 3  # larger jobs in a row that are no faster than the fastest before the batch is taken to be the limit
Progress = Callable[[str, float], None]


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


class Tried(Result):
    """One count of devices: its best layout, and the days that the run takes with it; `reason` where nothing fits or is legal."""

    devices: int
    reason: str = ""
    plan: PricedLayout | None = None
    goodput: Goodput | None = None
    days: float | None = None


class Line(Result):
    """A line of the arithmetic: «FLOPs = 6·N·D = 6 · 3.7e10 · 1e13», and its value."""

    name: str
    expression: str
    value: float
    unit: str


class Sizing(Result):
    """The least count tried that is done in time, all that were tried, and the arithmetic in lines."""

    model: str
    cluster: str
    tokens: float
    days: float
    steps: int
    parameters: int
    active_parameters: int
    chosen: Tried
    tried: tuple[Tried, ...]
    lines: tuple[Line, ...]
    spare_servers: int | None = None
    assumptions: tuple[str, ...] = ()


def amount(text: str, flag: str) -> float:
    """A count with an SI suffix, or B for 10⁹: "10T" is 10¹³. InputError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]?)\s*", text)
    if found is None or found[2] not in SUFFIXES or float(found[1]) <= 0:
        raise InputError(f"{flag} {text[:40]!r}: must be a count such as 10T, 300B or 1e13 (suffixes k, M, G or B, T, P)")
    return float(found[1]) * SUFFIXES[found[2]]


def size(
    run: Run, *, target_mfu: float | None = None, repair_days: float | None = None, progress: Progress | None = None
) -> Sizing:
    """The fewest devices, among whole units, with which the run is done in its days.

    Starts where every device would run at its peak, goes to the count that the plan there asks for, and so on: larger jobs are
    less efficient, so this comes from below. Between the last count that takes too long and the first that does not, it halves.
    Infeasible where no count tried is in time. InputError for a target that is none.
    """
    if not 0 < run.days < math.inf:
        raise InputError(f"--days {run.days:g}: must be a number of days greater than 0")
    if target_mfu is not None and not 0 < target_mfu <= 1:
        raise InputError(f"--target-mfu {target_mfu:g}: must be a share of the peak, such as 0.4")
    if repair_days is not None and not 0 < repair_days < math.inf:
        raise InputError(f"--repair-days {repair_days:g}: must be a number of days greater than 0")
    ladder, tried = counts(run.cluster), dict[int, Tried]()

    def at(place: int) -> Tried:
        if place not in tried:
            tried[place] = attempt(run, ladder[place])
            if progress is not None:
                progress(f"{ladder[place]:,} devices", len(tried) / MOST_PLANS)
        return tried[place]

    enough = _first_in_time(run, ladder, at)
    short = max((place for place, one in tried.items() if place < enough and not _in_time(run, one)), default=-1)
    while enough - short > 1 and len(tried) < MOST_PLANS:
        middle = (short + enough) // 2
        short, enough = (short, middle) if _in_time(run, at(middle)) else (middle, enough)
    return _sized(run, tried[enough], [tried[place] for place in sorted(tried)], target_mfu, repair_days)


def attempt(run: Run, devices: int) -> Tried:
    """The best layout on so many devices, and the days that the run takes with it, failures included where they are known."""
    problem = run.problem(devices)
    try:
        best = plan(problem, profile=run.profile, top=1, inside_by_default=True, bound_cuts=False).plan
    except Infeasible as error:
        return Tried(devices=devices, reason=error.summary)
    failures = Failures.of(problem)
    goodput = None if failures is None else goodput_of(failures, best)
    step_s = best.step_time_s if goodput is None else goodput.effective_step_s
    return Tried(devices=devices, plan=best, goodput=goodput, days=run.steps * step_s / SECONDS_PER_DAY)


def counts(cluster: ClusterSpec) -> tuple[int, ...]:
    """Counts of devices to try, at most a quarter apart from 8 servers on: whole servers, and whole supernodes.

    Both, since a supernode of 72 gives counts that batches rarely divide by, and 32 racks of 64 are as good a job as 30 of 72.
    """
    most = min(cluster.max_devices or MOST_DEVICES, MOST_DEVICES)
    supernode = next(level.size or 1 for level in cluster.levels if level.name == cluster.supernode)
    smooth = {*range(1, 8), *(step << power for step in STEPS for power in range(24))}
    units = {min(supernode, server_size(cluster)), supernode}
    return tuple(sorted({unit * number for unit in units for number in smooth if unit * number <= most}))


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


def _first_in_time(run: Run, ladder: tuple[int, ...], at: Callable[[int], Tried]) -> int:
    """A place of the ladder that is in time, come to from below."""
    problem = run.problem(ladder[0])
    peak = run.cluster.accelerator.peak_flops[run.precision].value
    least = 6.0 * problem.model.active_parameters(embedding=False) * run.tokens / peak / SECONDS_PER_DAY / run.days
    place = min(bisect.bisect_left(ladder, least), len(ladder) - 1)
    fastest, stale = math.inf, 0
    for _ in range(MOST_PLANS):
        found = at(place)
        if _in_time(run, found):
            return place
        if found.days is not None:
            stale = 0 if found.days < fastest * (1.0 - 1e-3) else stale + 1
            fastest = min(fastest, found.days)
        mostly_idle = found.plan is not None and found.plan.devices_idle > found.plan.devices_used
        if place == len(ladder) - 1 or stale >= NO_GAIN or mostly_idle:
            break
        wanted = ladder[place] * (FURTHEST if found.days is None else min(found.days / run.days, FURTHEST))
        place = min(max(place + 1, bisect.bisect_left(ladder, wanted)), len(ladder) - 1)
    raise Infeasible(f"no count of {run.cluster.name} does {run.tokens:.3g} tokens in {run.days:g} days", _why(run, found, fastest))


def _why(run: Run, last: Tried, fastest: float) -> tuple[str, ...]:
    if math.isinf(fastest):
        return (f"{last.devices:,} devices: {last.reason}",)
    return (
        f"the fastest takes {fastest:.3g} days; up to {last.devices:,} devices were tried",
        f"a batch of {run.global_batch:,} sequences keeps only so many devices busy: a larger one, or more days, would help",
    )


def _in_time(run: Run, one: Tried) -> bool:
    return one.days is not None and one.days <= run.days


def _sized(run: Run, chosen: Tried, tried: list[Tried], target_mfu: float | None, repair_days: float | None) -> Sizing:
    model, best, goodput = load_model(run.model), chosen.plan, chosen.goodput
    assert best is not None  # it is in time
    share = 1.0 if goodput is None else goodput.goodput
    active, peak = model.active_parameters(embedding=False), run.cluster.accelerator.peak_flops[run.precision].value
    per_token = best.model_tflops_per_device * 1e12 / best.tokens_per_s_per_device
    rate = 6.0 * active * best.tokens_per_s_per_device * share
    words = (
        f"6·N × {best.tokens_per_s_per_device:,.0f} tokens/s of a device × {share:.3f} goodput; MFU {best.mfu:.1%} counts "
        f"{per_token / (6.0 * active):.3f} · 6·N, attention and MTP in"
    )
    lines = list(arithmetic(active, run.tokens, run.days, rate, words, model.parameters()))
    if target_mfu is not None:
        needed = 6.0 * active * run.tokens / (target_mfu * peak * SECONDS_PER_DAY * run.days)
        at_target = f"were MFU {target_mfu:.0%} of {peak / 1e12:,.0f} TFLOP/s at every size, and nothing failed"
        lines.append(Line(name="devices", expression=at_target, value=needed, unit=""))
    per_day = 0.0 if goodput is None else goodput.failures_per_day
    return Sizing(
        model=model.name,
        cluster=run.cluster.name,
        tokens=run.tokens,
        days=run.days,
        steps=run.steps,
        parameters=model.parameters(),
        active_parameters=active,
        chosen=chosen,
        tried=tuple(tried),
        lines=tuple(lines),
        spare_servers=None if repair_days is None or goodput is None else spares(per_day, repair_days),
        assumptions=() if goodput is None else goodput.assumptions,
    )


def sized(model: str, cluster: str, tokens: float, days: float, global_batch: int, seq_len: int, **more: str | None) -> Run:
    """A run of a catalog cluster or a file's."""
    given = {name: value for name, value in more.items() if value is not None}
    return Run(model, load_cluster(cluster), tokens, days, global_batch, seq_len, **given)

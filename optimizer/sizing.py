"""How many devices a training run needs to be done in time: real plans at several counts, failures included."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..cost_models.checkpoint import Failures
from ..cost_models.reliability import SECONDS_PER_DAY, SERVER, SUPERNODE, server_size, spare_units, supernode_size
from ..search_spaces.cluster import ClusterSpec, Figure
from ..search_spaces.degraded import LARGE_TILES
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import MOST_DEVICES, build_problem, load_cluster, load_model
from ..search_spaces.layout import Problem
from .endurance import failure_lines, furthest, stretch_ends
from .interrupts import came, stoppable
from .planner import plan
from .result import Goodput, Line, PricedLayout, Result

SUFFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
STEPS = (8, 9, 10, 12, 15)
"""Units that are tried, times powers of two: counts that batches and layers divide by, at most a quarter apart."""
FURTHEST = 2.0
"""Factor by which the next count may be larger: one that is far too large takes long to plan."""
MOST_PLANS = 24
MORE = 1.25
"""Counts with which every device would have to do so many times what it does at any count tried are not tried."""
APART = 0.03
"""Share by which counts that are tried one after another differ at least: nearer ones are found between them."""
NEAR = 0.01
"""Share of a count by which the one below it may be off: steps are not known any better."""
MOST_SURE = 4  # plans of larger counts, to find one that is in time at the late end of what is uncertain
LAYOUTS = 4  # of a count, the fastest ones: of these the one that gets furthest with failures is taken
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


class Sizing(Result):
    """The least count found that is done in time, all that were tried, and the arithmetic in lines.

    Counts are whole units of `unit` devices, none below `least`: there a device would have to do MORE times what it does at any
    count tried. `short` is the largest tried that is too slow and smaller than the chosen one, none where there is none; those
    between the two were not tried. `sure` is the least tried that is in time at the late end of the interval of its days, none
    where no count tried is.
    """

    model: str
    cluster: str
    tokens: float
    days: float
    steps: int
    parameters: int
    active_parameters: int
    chosen: Tried
    sure: Tried | None
    least: int
    short: int | None
    unit: int
    tried: tuple[Tried, ...]
    lines: tuple[Line, ...]
    failure_lines: tuple[Line, ...] = ()
    spare_servers: int | None = None
    spare_supernodes: int | None = None
    repair_days: float | None = None  # not known
    assumptions: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()  # what an interrupt left untried, in words


def amount(text: str, flag: str) -> float:
    """A count with an SI suffix, or B for 10⁹: "10T" is 10¹³. InputError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]?)\s*", text)
    if found is None or found[2] not in SUFFIXES or float(found[1]) <= 0:
        raise InputError(f"{flag} {text[:40]!r}: must be a count such as 10T, 300B or 1e13 (suffixes k, M, G or B, T, P)")
    return float(found[1]) * SUFFIXES[found[2]]


def size(
    run: Run, *, target_mfu: float | None = None, repair_days: float | None = None, progress: Progress | None = None
) -> Sizing:
    """The fewest devices, in whole units, with which the run is done in its days.

    Every plan may leave devices idle and spread the others over supernodes as it likes; what it leaves idle is left out. Larger
    jobs are mostly less efficient, so a count in time is come to from below, from where every device would run at its peak. But
    one that divides its supernodes well may do with fewer devices than one that is larger: of all counts with which no device has
    to do MORE times what it did in any plan, the likely ones (`likely`) are tried from the least on, then the whole units between
    the last that is too slow and the first that is not, by halving, down to NEAR. The chosen count gets the layout that gets
    furthest with failures, of its fastest LAYOUTS. An interrupt ends it with the least count tried that is in time.
    Infeasible where no count tried is in time. InputError for a target that is none.
    """
    if not 0 < run.days < math.inf:
        raise InputError(f"--days {run.days:g}: must be a number of days greater than 0")
    if target_mfu is not None and not 0 < target_mfu <= 1:
        raise InputError(f"--target-mfu {target_mfu:g}: must be a share of the peak, such as 0.4")
    if repair_days is not None and not 0 < repair_days < math.inf:
        raise InputError(f"--repair-days {repair_days:g}: must be a number of days greater than 0")
    trials = _Trials(run, progress)
    with stoppable() as ended:
        enough = _first_in_time(trials, target_mfu)
        least = trials.least()
        enough = _narrowed(trials, least, _fewer(trials, least, enough))
        trials.look_closer(enough)
        _look_for_sure(trials, enough)
    if ended.by is not None:
        enough, least = trials.least_in_time(ended.by), trials.least()
    tried = trials.tried
    sure = next((tried[count] for count in sorted(tried) if count >= enough and _surely_in_time(run, tried[count])), None)
    left = f"interrupted: fewer than {enough:,} devices may do, and more may be what is in time at the late end"
    return _sized(
        run,
        _Found(
            chosen=tried[enough],
            sure=sure,
            least=least,
            short=trials.short(enough),
            unit=trials.unit,
            tried=tuple(tried[count] for count in sorted(tried)),
            unanswered=(left,) if ended.stopped else (),
        ),
        target_mfu,
        repair_days,
    )


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


def _whole(run: Run, devices: int, *layouts: int) -> Tried:
    """An attempt whose search was not cut short; KeyboardInterrupt for one that was."""
    before = came()
    found = attempt(run, devices, *layouts)
    if came() > before:
        raise KeyboardInterrupt
    return found


def counts(cluster: ClusterSpec) -> tuple[int, ...]:
    """Counts of devices to try first, at most a quarter apart from 8 servers on: whole servers, and whole supernodes.

    Both, since a supernode of 72 gives counts that batches rarely divide by, and 32 racks of 64 are as good a job as 30 of 72.
    """
    most = min(cluster.max_devices or MOST_DEVICES, MOST_DEVICES)
    smooth = {*range(1, 8), *(step << power for step in STEPS for power in range(24))}
    units = {_unit(cluster), supernode_size(cluster)}
    return tuple(sorted({unit * number for unit in units for number in smooth if unit * number <= most}))


def likely(cluster: ClusterSpec, least: int, below: int) -> list[int]:
    """Counts from `least` to less than `below`: those of `counts`, and equal shares of every supernode that groups of powers of two
    tile, as 64 of 72; of those that are not APART the one that the larger power of two divides.
    """
    size = supernode_size(cluster)
    shares = {size // tile * tile for tile in LARGE_TILES} - {0}
    every = {*counts(cluster), *(count for share in shares for count in range(-(-least // share) * share, below, share))}
    found: list[int] = []
    for count in sorted(count for count in every if least <= count < below):
        if not found or count >= found[-1] * (1.0 + APART):
            found.append(count)
        elif count & -count > found[-1] & -found[-1]:
            found[-1] = count
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


def _unit(cluster: ClusterSpec) -> int:
    """Devices of what a job is made of at the least: a server, or a supernode that is smaller."""
    return min(supernode_size(cluster), server_size(cluster))


def _per_token(run: Run) -> float:
    """FLOPs of a token by 6·N."""
    return 6.0 * load_model(run.model).active_parameters(embedding=False)


def _least(run: Run) -> float:
    """Devices that it would take at their peak."""
    return _per_token(run) * run.tokens / run.cluster.accelerator.peak_flops[run.precision].value / SECONDS_PER_DAY / run.days


@dataclass
class _Trials:
    """Counts of a run that were planned, each once."""

    run: Run
    progress: Progress | None
    tried: dict[int, Tried] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unit, self.ladder = _unit(self.run.cluster), counts(self.run.cluster)

    def at(self, devices: int) -> Tried:
        if devices not in self.tried:
            self.tried[devices] = _whole(self.run, devices)
            if self.progress is not None:
                self.progress(f"{devices:,} devices", min(len(self.tried) / MOST_PLANS, 1.0))
        return self.tried[devices]

    def in_time(self, devices: int) -> bool:
        return _in_time(self.run, self.at(devices))

    def look_closer(self, devices: int) -> None:
        """Has a count's layout chosen by what failures make of it, where they are known."""
        if self.at(devices).goodput is not None:
            self.tried[devices] = _whole(self.run, devices, LAYOUTS)

    def without_idle(self, devices: int) -> int:
        """Of a count in time what its plan uses, as long as a plan of only that is in time."""
        used = self.at(devices).plan
        needed = devices if used is None else -(-used.devices_used // self.unit) * self.unit
        return self.without_idle(needed) if needed < devices and self.in_time(needed) else devices

    def least_in_time(self, ended: BaseException) -> int:
        """The least count tried that is in time; where none is, what `ended` the trials, or Infeasible with what was tried."""
        if not self.tried:
            raise ended
        enough = min((count for count, one in self.tried.items() if _in_time(self.run, one)), default=None)
        if enough is None:
            told = (f"{count:,} devices: {one.reason or f'{one.days:.3g} days'}" for count, one in sorted(self.tried.items()))
            raise Infeasible("interrupted before a count in time was found", tuple(told))
        return enough

    def short(self, enough: int) -> int | None:
        """The largest count tried that is too slow and less than one in time."""
        return max((count for count, one in self.tried.items() if count < enough and not _in_time(self.run, one)), default=None)

    def least(self) -> int:
        """Whole units with which the run were in time if a device did MORE times what it did in any plan, or worked at its peak."""
        done = [one.plan.devices_used * one.days for one in self.tried.values() if one.plan is not None and one.days is not None]
        wanted = max(_least(self.run), min(done) / MORE / self.run.days)
        return max(math.ceil(wanted / self.unit), 1) * self.unit


def _first_in_time(trials: _Trials, target_mfu: float | None) -> int:
    """A count of the ladder that is in time, come to from below."""
    run, ladder = trials.run, trials.ladder
    place = min(bisect.bisect_left(ladder, _least(run)), len(ladder) - 1)
    fastest, stale = math.inf, 0
    for _ in range(MOST_PLANS):
        found = trials.at(ladder[place])
        if _in_time(run, found):
            return found.devices
        if found.days is not None:
            stale = 0 if found.days < fastest * (1.0 - 1e-3) else stale + 1
            fastest = min(fastest, found.days)
        mostly_idle = found.plan is not None and found.plan.devices_idle > found.plan.devices_used
        if place == len(ladder) - 1 or stale >= NO_GAIN or mostly_idle:
            break
        wanted = found.devices * (FURTHEST if found.days is None else min(found.days / run.days, FURTHEST))
        place = min(max(place + 1, bisect.bisect_left(ladder, wanted)), len(ladder) - 1)
    at_the_end = place == len(ladder) - 1 and stale < NO_GAIN
    reasons = _limit(run, found, fastest, target_mfu) if at_the_end else _why(run, found, fastest)
    raise Infeasible(f"no count of {run.cluster.name} does {run.tokens:.3g} tokens in {run.days:g} days", reasons)


def _fewer(trials: _Trials, least: int, enough: int) -> int:
    """The least of the likely counts that is in time, where that is less than one that is known to be."""
    enough = trials.without_idle(enough)
    found = next((count for count in likely(trials.run.cluster, least, enough) if trials.in_time(count)), enough)
    return trials.without_idle(found)


def _narrowed(trials: _Trials, least: int, enough: int) -> int:
    """The least count that is in time, whole units being halved from the largest below it that is too slow, down to NEAR."""
    unit = trials.unit
    for _ in range(MOST_PLANS):
        short = max(trials.short(enough) or 0, least - unit)
        if enough - short <= max(unit, NEAR * enough):
            break
        middle = max((short + enough) // 2 // unit * unit, short + unit)
        enough = trials.without_idle(middle) if trials.in_time(middle) else enough
    return enough


def _look_for_sure(trials: _Trials, enough: int) -> None:
    """Tries larger counts until one is in time at the late end of what is uncertain, or adding devices does not help."""
    run, ladder, found, before = trials.run, trials.ladder, trials.at(enough), math.inf
    for _ in range(MOST_SURE):
        high = math.inf if found.days_interval is None else found.days_interval[1]
        larger = bisect.bisect_left(ladder, found.devices * min(high / run.days, FURTHEST))
        if high <= run.days or high >= before or larger == len(ladder):
            return
        found, before = trials.at(ladder[larger]), high


def _limit(run: Run, last: Tried, fastest: float, target_mfu: float | None) -> tuple[str, ...]:
    """What it would take beyond the cluster's or the planner's largest job, what that one can do, and the arithmetic."""
    most = run.cluster.max_devices
    why = f"{run.cluster.name} has no more" if most is not None and most <= MOST_DEVICES else "no larger job is planned"
    largest = f"{last.devices:,} devices, the most that were tried since {why}"
    targeted = () if target_mfu is None else tuple(_in_words([_at_target(run, target_mfu)]))
    if last.days is None:
        peak = run.cluster.accelerator.peak_flops[run.precision].value
        least = f"by the arithmetic 6·N·D takes at least {_least(run):,.0f} devices, were each at its peak"
        return (f"with {largest}: {last.reason}", least, *_by_hand(run, peak, "of a device at its peak"), *targeted)
    needed, seen = last.devices * last.days / run.days, run.tokens * run.days / last.days
    rate = _per_token(run) * run.tokens / (last.devices * last.days * SECONDS_PER_DAY)
    return (
        f"about {needed:,.0f} devices would, were they as efficient as {largest}",
        f"those take {last.days:.3g} days, failures included, or see {seen:.3g} tokens in {run.days:g} days",
        *_by_hand(run, rate, "of a device in the largest job that was tried"),
        *targeted,
        *(_why(run, last, fastest)[1:] if last.days > fastest else ()),
    )


def _by_hand(run: Run, rate: float, words: str) -> Iterator[str]:
    """The arithmetic at what a device does, FLOP/s, a line a step."""
    return _in_words(arithmetic(_per_token(run) / 6.0, run.tokens, run.days, rate, words))


def _in_words(lines: Iterable[Line]) -> Iterator[str]:
    return (f"{line.name}: {line.expression} = {line.value:.4g} {line.unit}".rstrip() for line in lines)


def _at_target(run: Run, mfu: float) -> Line:
    """The devices that a constant MFU would take."""
    peak = run.cluster.accelerator.peak_flops[run.precision].value
    words = f"were MFU {mfu:.0%} of {peak / 1e12:,.0f} TFLOP/s at every size, and nothing failed"
    return Line(name="devices", expression=words, value=_least(run) / mfu, unit="")


def _why(run: Run, last: Tried, fastest: float) -> tuple[str, ...]:
    if math.isinf(fastest):
        return (f"{last.devices:,} devices: {last.reason}",)
    return (
        f"the fastest takes {fastest:.3g} days; up to {last.devices:,} devices were tried",
        f"a batch of {run.global_batch:,} sequences keeps only so many devices busy: a larger one, or more days, would help",
    )


def _in_time(run: Run, one: Tried) -> bool:
    return one.days is not None and one.days <= run.days


def _surely_in_time(run: Run, one: Tried) -> bool:
    return one.days_interval is not None and one.days_interval[1] <= run.days


@dataclass(frozen=True)
class _Found:
    """What a search for the count came to (see Sizing)."""

    chosen: Tried
    sure: Tried | None
    least: int
    short: int | None
    unit: int
    tried: tuple[Tried, ...]
    unanswered: tuple[str, ...] = ()


def _sized(run: Run, found: _Found, target_mfu: float | None, repair_days: float | None) -> Sizing:
    chosen = found.chosen
    model, best, goodput = load_model(run.model), chosen.plan, chosen.goodput
    assert best is not None  # it is in time
    share = 1.0 if goodput is None else goodput.goodput
    active = model.active_parameters(embedding=False)
    per_token = best.model_tflops_per_device * 1e12 / best.tokens_per_s_per_device
    rate = 6.0 * active * best.tokens_per_s_per_device * share
    words = (
        f"6·N × {best.tokens_per_s_per_device:,.0f} tokens/s of a device × {share:.3f} goodput; MFU {best.mfu:.1%} counts "
        f"{per_token / (6.0 * active):.3f} · 6·N, attention and MTP in"
    )
    lines = list(arithmetic(active, run.tokens, run.days, rate, words, model.parameters()))
    if target_mfu is not None:
        lines.append(_at_target(run, target_mfu))
    failures = Failures.of(run.problem(chosen.devices))
    away = run.cluster.failures.repair_days if repair_days is None else Figure.model_validate(repair_days)
    spare = {} if away is None else spare_units(run.cluster, best.devices_used, away.value)
    return Sizing(
        model=model.name,
        cluster=run.cluster.name,
        tokens=run.tokens,
        days=run.days,
        steps=run.steps,
        parameters=model.parameters(),
        active_parameters=active,
        chosen=chosen,
        sure=found.sure,
        least=found.least,
        short=found.short,
        unit=found.unit,
        tried=found.tried,
        lines=tuple(lines),
        failure_lines=() if failures is None else failure_lines(failures, best),
        spare_servers=spare.get(SERVER),
        spare_supernodes=spare.get(SUPERNODE),
        repair_days=None if away is None else away.value,
        assumptions=_assumptions(run, goodput, spare, away),
        unanswered=found.unanswered,
    )


def _assumptions(run: Run, goodput: Goodput | None, spare: Mapping[str, int], away: Figure | None) -> tuple[str, ...]:
    """What a sizing rests on that nobody gave, in sentences; `away` are the days that a failed unit is."""
    said = () if goodput is None else goodput.assumptions
    if away is None:
        return (*said, f"no spares: how long repairs of {run.cluster.name} take is not known: --repair-days says it")
    if not spare:
        return (*said, f"no spares: how often {run.cluster.name} fails is not known")
    told = f"what fails is away for {away.value:g} days ({away.grade}): --repair-days says otherwise"
    return said if away.grade == "given" else (*said, told)


def sized(model: str, cluster: str, tokens: float, days: float, global_batch: int, seq_len: int, **more: str | None) -> Run:
    """A run of a catalog cluster or a file's."""
    given = {name: value for name, value in more.items() if value is not None}
    return Run(model, load_cluster(cluster), tokens, days, global_batch, seq_len, **given)

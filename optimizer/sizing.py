"""How many devices a training run needs to be done in time: real plans at several counts, failures included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..cost_models.checkpoint import Failures
from ..cost_models.reliability import SERVER, SUPERNODE, spare_units
from ..search_spaces.cluster import Figure
from ..search_spaces.errors import InputError
from ..search_spaces.inputs import load_model
from .device_counts import Progress, Trials, fewer, first_in_time, look_for_sure, narrowed
from .endurance import failure_lines
from .interrupts import stoppable
from .result import Goodput, Line, Result
from .training_run import Run, Tried, arithmetic, at_target, surely_in_time


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
    trials = Trials(run, progress)
    with stoppable() as ended:
        enough = first_in_time(trials, target_mfu)
        least = trials.least()
        enough = narrowed(trials, least, fewer(trials, least, enough))
        trials.look_closer(enough)
        look_for_sure(trials, enough)
    if ended.by is not None:
        enough, least = trials.least_in_time(ended.by), trials.least()
    tried = trials.tried
    sure = next((tried[count] for count in sorted(tried) if count >= enough and surely_in_time(run, tried[count])), None)
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
        f"6·N × {best.tokens_per_s_per_device:,.0f} tokens/s of a device × {share:.3f} goodput; MFU {100 * best.mfu:.1f} % counts "
        f"{per_token / (6.0 * active):.3f} · 6·N, attention and MTP in"
    )
    lines = list(arithmetic(active, run.tokens, run.days, rate, words, model.parameters()))
    if target_mfu is not None:
        lines.append(at_target(run, target_mfu))
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
        lines=tuple(lines),
        failure_lines=() if failures is None else failure_lines(failures, best),
        spare_servers=spare.get(SERVER),
        spare_supernodes=spare.get(SUPERNODE),
        repair_days=None if away is None else away.value,
        assumptions=_assumptions(run, goodput, spare, away),
        **vars(found),
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

"""Whether a job's fault tolerance can do what it says: the checkpoint interval and where states are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...cost_models.reliability import daly_interval_s, failures_per_s, lost_share, rates
from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.figure_words import assumed
from ..readers import FaultTolerance
from ..reports import wording
from ..result import Result
from .legality import Broken

UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86400.0),
}
STEPS = ("step", "steps", "iteration", "iterations", "iter", "iters")
AMOUNT = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)"
PARTS = re.compile(rf"{AMOUNT}\s*([a-z]+)[\s,]*")
CLOCK = re.compile(r"([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")
ISO = re.compile(rf"p(?:{AMOUNT}(d))?(?:t(?:{AMOUNT}(h))?(?:{AMOUNT}(m))?(?:{AMOUNT}(s))?)?")
VOLATILE = re.compile(
    r"^(?:file://)?(/dev/shm|(?:/var)?/run/shm|/tmp|/mnt/ramdisk)(/|$|:)"
    r"|^(tmpfs|ramfs|ramdisk|shm|ram|(?:host[_ -]?)?memory|local[_ -]?(?:memory|disk|nvme|ssd))(/|$|:)",
    re.IGNORECASE,
)
"""Stores that are gone with their host: its memory, a folder that is commonly kept there, or a disk of its own."""
ABORTING = ("", "none", "abort", "fail", "stop")
FAR = 2.0
"""Factor off the best interval from which a given one is told."""


class Tolerance(Result):
    """What fault tolerance costs a job: the interval that is best, and the share of time lost with it and with the given one."""

    interval_s: float | None = None
    save_s: float | None = None
    save_at_least: bool = False  # the save time is only what copying the states to the host takes
    mtbf_s: float | None = None
    best_interval_s: float | None = None
    lost: float | None = None
    lost_at_best: float | None = None
    broken: tuple[Broken, ...] = ()
    advice: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()  # rates of failure that nobody measured, where the verdict rests on them


@dataclass(frozen=True)
class Duration:
    """A time, in seconds or in steps; `unit` is blank where none was written."""

    amount: float
    unit: str

    def seconds(self, step_time_s: float | None) -> float | None:
        if self.unit in UNITS:
            return self.amount * UNITS[self.unit]
        return self.amount * step_time_s if self.unit in STEPS and step_time_s is not None else None


def duration(text: str) -> Duration | None:
    """ "30min", "1.5 h", "1h30m", "00:30:00", ISO 8601's "PT30M", "500 steps" or a bare "500"; None for anything else."""
    plain = text.strip().lower()
    if clock := CLOCK.fullmatch(plain):
        hours, minutes, seconds = map(int, clock.groups())
        return Duration(3600.0 * hours + 60.0 * minutes + seconds, "s")
    if re.fullmatch(AMOUNT, plain):
        return Duration(float(plain), "")
    iso = ISO.fullmatch(plain)
    parts = list(zip(iso.groups()[::2], iso.groups()[1::2], strict=True)) if iso else PARTS.findall(plain)
    given = [(float(amount), unit) for amount, unit in parts if amount]
    if len(given) == 1 and given[0][1] in STEPS and PARTS.fullmatch(plain):
        return Duration(*given[0])
    if not given or any(unit not in UNITS for _, unit in given) or (not iso and PARTS.sub("", plain)):
        return None
    return Duration(*given[0]) if len(given) == 1 else Duration(sum(amount * UNITS[unit] for amount, unit in given), "s")


def judge(
    given: FaultTolerance,
    cluster: ClusterSpec | None,
    devices: int | None,
    step_time_s: float | None,
    save_s: float | None,
    least_save_s: float | None,
    unpriced: str = "a layout that has a price",
) -> Tolerance:
    """What is wrong with a job's fault tolerance. `save_s` is what a checkpoint takes, `least_save_s` what it takes at least;
    `unpriced` is what its step waits for where it has no price.
    """
    interval, broken = _timed("checkpoint_interval", given.checkpoint_interval)
    written, wrong = _timed("checkpoint_save_time", given.checkpoint_save_time)
    broken = [*broken, *wrong, *_store(given)]
    seconds = interval.seconds(step_time_s) if interval is not None else None
    save = save_s if save_s is not None else written.seconds(step_time_s) if written is not None else None
    at_least = save is None
    save = least_save_s if save is None else save
    rate = failures_per_s(cluster, devices) if cluster is not None and devices is not None else None
    needs = list(_needs(given, interval, seconds, save, cluster, devices, rate, unpriced))
    if not save or not rate or given.checkpoint_interval is None:
        return Tolerance(
            interval_s=seconds, save_s=save, save_at_least=at_least and save is not None, broken=tuple(broken), needs=tuple(needs)
        )
    mtbf = 1.0 / rate
    best = daly_interval_s(save, mtbf)
    least = lost_share(best, save, mtbf)
    lost = lost_share(seconds, save, mtbf) if seconds else None
    return Tolerance(
        interval_s=seconds,
        save_s=save,
        save_at_least=at_least,
        mtbf_s=mtbf,
        best_interval_s=best,
        lost=lost,
        lost_at_best=least,
        broken=tuple(broken),
        advice=(_verdict(seconds, best, lost, least, mtbf, at_least),),
        needs=tuple(needs),
        assumptions=tuple(_assumed(cluster)) if cluster is not None else (),
    )


def _assumed(cluster: ClusterSpec) -> Iterator[str]:
    """Rates of failure that nobody measured."""
    yield from assumed((f"{cluster.name} failures {name}", figure) for name, figure in rates(cluster).items())


def _timed(name: str, text: str | None) -> tuple[Duration | None, list[Broken]]:
    """What is written of a time, and what is wrong with it."""
    if text is None:
        return None, []
    found = duration(text)
    if found is None or not found.amount:
        return None, [_untimely(f"{name} {text[:40]!r} is not a time: write 30min, 2h or 500 steps.")]
    if found.unit:
        return found, []
    amount = f"{found.amount:g}"
    return None, [_untimely(f"{name} {amount} has no unit: {amount} steps, {amount} s and {amount} min differ; write one of them.")]


def _untimely(sentence: str) -> Broken:
    return Broken(rule="F001", sentence=sentence, reason="an interval is a time or a number of steps", source="definition")


def _store(given: FaultTolerance) -> Iterator[Broken]:
    """States that live in the memory of the host that may be lost."""
    policy = (given.node_failure_policy or "").strip().lower()
    if policy in ABORTING and given.node_failure_policy is not None:
        return
    if given.state_store and all(VOLATILE.match(store.strip()) for store in given.state_store):
        stores = " and ".join(given.state_store)
        yield Broken(
            rule="F002",
            sentence=f"state_store {stores[:60]} dies with its host, so that a lost host cannot be restored; add a store that "
            "outlives it, such as a shared file system or another host's memory.",
            reason="what a failure takes away cannot be restored from",
            source="definition",
        )


def _needs(
    given: FaultTolerance,
    interval: Duration | None,
    seconds: float | None,
    save: float | None,
    cluster: ClusterSpec | None,
    devices: int | None,
    rate: float | None,
    unpriced: str,
) -> Iterator[str]:
    """What else would be needed to hold the interval against the best one."""
    if given.checkpoint_interval is None:
        yield "the interval to save at: fault_tolerance.checkpoint_interval"
    elif interval is not None and seconds is None:
        yield f"the time of a step, to turn steps into seconds: {unpriced}"
    if save is None:
        yield f"how long a checkpoint takes: --checkpoint-save-time, or, for what it takes at least, {unpriced}"
    if cluster is None or devices is None:
        yield "how often the cluster fails: --cluster"
    elif rate is None:
        yield f"how often {cluster.name} fails: its YAML has no failures (device_per_year, server_per_year)"


def _verdict(given: float | None, best: float, lost: float | None, least: float, mtbf: float, at_least: bool) -> str:
    """How far off the interval is, and what that costs; the best one where none is given whose time is known."""
    failing = f"with a failure every {span(mtbf)}"
    longer = "since a save may take longer"
    if not given or lost is None:
        best_said = f"the best interval is {span(best)}"
        known = f", {failing}: {wording.percent(least)} of the time is lost"
        return f"{best_said} or more {failing}, {longer}" if at_least else f"{best_said}{known}"
    if 1.0 / FAR <= given / best <= FAR:
        near = f"saving every {span(given)} is near the best interval, {span(best)}, {failing}"
        return f"{near}: {wording.percent(lost)} of the time is lost"
    if at_least and given > best:
        said = f"saving every {span(given)} may be right {failing}: the best interval is {span(best)} or more"
        return f"{said}, {longer}"
    word = "too rare" if given > best else "too often"
    return (
        f"saving every {span(given)} is {word} {failing}: {wording.percent(lost)} of the time is lost, "
        f"{wording.percent(least)} at the best interval, {span(best)}"
    )


def span(seconds: float) -> str:
    """A long duration: 45 s, 12 min, 3.4 h, 12 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{wording.significant(seconds / size, 2)} {unit}"
    return wording.seconds(seconds, 2)

"""How often a job fails, how often it should be saved, and what share of its time is left for training.

The interval between checkpoints balances the time spent saving against the work lost at a failure: J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..search_spaces.cluster import ClusterSpec, Figure
from ..search_spaces.layout import Floats, Ints

SECONDS_PER_DAY = 24 * 3600.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY

RATES = ("device_per_year", "server_per_year", "supernode_per_year")
SERVER, SUPERNODE = "server", "supernode"

Values = float | Floats | Ints


def unit_counts(cluster: ClusterSpec, devices: Values) -> tuple[Values, Values, Values]:
    """Devices, servers and supernodes of a job, a unit being filled before the next is begun; broadcasts."""
    return devices, -(-devices // server_size(cluster)), -(-devices // supernode_size(cluster))


def supernode_size(cluster: ClusterSpec) -> int:
    """Devices of a supernode."""
    return next(level.size or 1 for level in cluster.levels if level.name == cluster.supernode)


def server_size(cluster: ClusterSpec) -> int:
    """Devices of a server: of the level called so, else of the innermost one."""
    named = (level.size for level in cluster.levels if level.name in ("server", "node", "host"))
    return next(named, None) or cluster.levels[0].size or 1


def failure_rates(cluster: ClusterSpec, devices: Values) -> dict[str, Floats]:
    """Failures per second of jobs on so many devices, by the names of the rates that are known."""
    counts = dict(zip(RATES, unit_counts(cluster, devices), strict=True))
    known = {name: figure.value * np.asarray(counts[name]) / SECONDS_PER_YEAR for name, figure in rates(cluster).items()}
    return {name: np.asarray(rate, dtype=np.float64) for name, rate in known.items()}


def failure_rate(cluster: ClusterSpec, devices: Values) -> Floats | None:
    """The same of devices, servers and supernodes together; None where no rate is known."""
    known = list(failure_rates(cluster, devices).values())
    return np.asarray(np.sum(known, axis=0)) if known else None


def rates(cluster: ClusterSpec) -> dict[str, Figure]:
    """The cluster's rates of failure that are known, by name."""
    every = {name: getattr(cluster.failures, name) for name in RATES}
    return {name: figure for name, figure in every.items() if figure is not None}


def failures_per_s(cluster: ClusterSpec, devices: int) -> float | None:
    """The same of one job."""
    rate = failure_rate(cluster, devices)
    return None if rate is None else float(rate)


def yearly_rate(mtbf_s: float, devices: int) -> float:
    """Failures per device and year at which a job on so many devices fails every `mtbf_s`."""
    return SECONDS_PER_YEAR / mtbf_s / devices


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """√(2·C·M): seconds of work between checkpoints that take `save_s`, failures being `mtbf_s` apart (Young 1974)."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Young's interval to higher order, less the save itself (Daly 2006, equation 37); M where a save takes over twice that."""
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2.0 * mtbf_s))
    return young_interval_s(save_s, mtbf_s) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - save_s


def best_interval_s(save_s: Values, mtbf_s: Values) -> Floats:
    """The interval that loses least, exactly: T = M·(1 + W₀(−e^(−1−C/M))), W₀ being Lambert's function; broadcasts.

    Where the derivative of (e^((T+C)/M) − 1)/T (Daly 2006, equation 20) is zero, x = T/M solves −x − ln(1−x) = C/M. The left side
    is convex and rising, so Newton's steps from the right of the root come down to it.
    """
    save, mtbf = np.broadcast_arrays(np.asarray(save_s, dtype=np.float64), np.asarray(mtbf_s, dtype=np.float64))
    ratio = save / mtbf
    x = np.minimum(np.sqrt(2.0 * ratio), -np.expm1(-1.0 - ratio))  # both are at or beyond the root
    for _ in range(64):
        x = np.where(x > 0, x - (-x - np.log1p(-x) - ratio) * (1.0 - x) / np.where(x > 0, x, 1.0), 0.0)
    return np.asarray(mtbf * x)


def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Share of the time of a long job that saving, redone work and restarts take, work being saved every `interval_s`.

    Expected time per interval with exponential failures, M·e^(R/M)·(e^((T+C)/M) − 1), against the T of work in it (Daly 2006,
    equation 20).
    """
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 500.0:
        return 1.0
    spent = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    return 1.0 - interval_s / spent


def time_over_work(interval_s: Values, save_s: Values, failure_s: Values, mtbf_s: Values) -> Floats:
    """Expected time over training time, 1 or more, work being saved every `interval_s`; broadcasts.

    Daly's equation 20. `failure_s` is what a failure takes beside the work since the last save: coming back, and what a checkpoint
    takes to drain to where the failure cannot reach it, since it counts only then. With intervals of T+C between failures M apart,
    E⌊(X−D)/(T+C)⌋⁺ = e^(−D/M)/(e^((T+C)/M) − 1) of them count: the drain D weighs exactly as if restarts took that much longer.
    """
    interval, save, mtbf = np.broadcast_arrays(interval_s, save_s, mtbf_s)
    whole = np.where(interval > 0, interval, 1.0)
    per_work = np.where(interval > 0, mtbf * np.expm1(np.minimum((interval + save) / mtbf, 500.0)) / whole, 1.0)
    return np.asarray(per_work * np.exp(np.minimum(np.asarray(failure_s) / mtbf, 100.0)))


def weighed_s(seconds: Sequence[Values], shares: Sequence[Values], mtbf_s: Values) -> Floats:
    """The one duration R that weighs in `time_over_work` as those of several kinds of failure do: e^(−R/M) = Σ share·e^(−R_k/M).

    Exact for drains. For coming back, a failure meanwhile is taken to begin it anew as a failure of its own kind would.
    """
    mtbf = np.asarray(mtbf_s)
    kinds = [share * np.exp(-np.minimum(each / mtbf, 100.0)) for each, share in zip(seconds, shares, strict=True)]
    return np.asarray(-mtbf * np.log(np.minimum(np.sum(kinds, axis=0), 1.0)))


def kept_interval_s(save_s: Values, drain_s: Values, mtbf_s: Values) -> Floats:
    """The best interval, no shorter than a checkpoint takes to drain: the next one would wait for it; broadcasts."""
    return np.asarray(np.maximum(best_interval_s(save_s, mtbf_s), drain_s))


def spare_units(cluster: ClusterSpec, devices: int, repair_days: float) -> dict[str, int]:
    """Spare servers and supernodes of a job (`spares`), by the name of the unit; none of those whose failures are not known.

    A device is replaced with its server; supernodes that fail as a whole are counted for themselves, unless they are servers.
    """
    per_day = {name: float(rate) * SECONDS_PER_DAY for name, rate in failure_rates(cluster, devices).items()}
    whole = SUPERNODE if supernode_size(cluster) > server_size(cluster) else SERVER
    unit_of = dict(zip(RATES, (SERVER, SERVER, whole), strict=True))
    units = dict.fromkeys(unit_of[name] for name in per_day)
    return {unit: spares(sum(rate for name, rate in per_day.items() if unit_of[name] == unit), repair_days) for unit in units}


def spares(failures_per_day: float, repair_days: float, confidence: float = 0.99) -> int:
    """Least number of spare units with which, `confidence` of the time, as many are there as are being repaired.

    Units in repair are Poisson with mean rate × repair time (M/G/∞, Palm 1938), whatever the distribution of repairs.
    """
    mean = failures_per_day * repair_days
    if mean > 700.0:  # e^−mean is 0 in doubles; the normal limit with continuity correction is within a unit there
        from statistics import NormalDist

        return math.ceil(mean + NormalDist().inv_cdf(confidence) * math.sqrt(mean) - 0.5)
    term = total = math.exp(-mean)
    count = 0
    while total < confidence:
        count += 1
        term *= mean / count
        total += term
    return count

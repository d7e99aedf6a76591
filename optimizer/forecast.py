"""What runs of some layouts let expect of the others: how fast, how sure, and whether they run out of memory.

The calibrated cost model gives every layout a step time; what it is off by is a Gaussian process over the layouts' choices
(Rasmussen and Williams 2006, equations 2.25 and 2.26): a part common to all, a part that layouts share the more the more alike they
are, and the noise of a measurement. Layouts that are being run count as if they had come out as expected ("kriging believer",
Ginsbourger et al. 2010), so that the next proposal lies elsewhere. A proposal is worth its expected improvement (Jones et al. 1998)
times the chance that it does not run out of memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cost_models.intervals import REPEATS
from ..search_spaces.layout import DEGREES, FULL_BLOCK, Bools, Floats, LayoutTable
from ..search_spaces.workload import MEMORY_BAND

COMMON = 0.15  # of log step time: what all layouts of a problem are off by together
ALIKE = 4.0  # distance at which layouts have little in common: two degrees changed by a factor of four each, say
DOUBT = 0.1
"""Of log step time: what a layout is off by on its own. Half of all pairs of published layouts are misjudged against each other by
less than 6 %, some of the others by much more."""
SURE = 1.9  # standard deviations in MEMORY_BAND, beyond which predictions are right 97 times of 100
CERTAIN = 0.97  # chance to fit from which it is not weighed against time
PEAKS_DIFFER = 0.5  # share of that spread by which peaks of one problem are off by themselves; the rest is common
GRID = np.linspace(-0.6, 0.6, 121)  # of log(peak that runs out / free memory)

Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Ledger:
    """Layouts (n,) as predicted, and what became of some of them: places of those that ran with their times, and of the others.

    `full` is the predicted peak as a share of the memory that a device has free.
    """

    table: LayoutTable
    predicted_s: Floats
    full: Floats
    ran: Places
    measured_s: Floats
    out_of_memory: Places
    failed: Places
    pending: Places

    @property
    def open(self) -> Bools:
        """Which were neither run nor are being run, and are not excluded by memory, (n,)."""
        found = ~excluded(self.full, self.full[self.ran], self.full[self.out_of_memory])
        found[np.concatenate([self.ran, self.out_of_memory, self.failed, self.pending])] = False
        return found


@dataclass(frozen=True)
class Forecast:
    """Expected log step time and its spread, the chance to fit, and the gain that a run is expected to bring, all (n,).

    The gain is a share of the best step time so far; layouts that are not open have none (−1).
    """

    mean: Floats
    spread: Floats
    fitting: Floats
    gain: Floats

    @property
    def best(self) -> int:
        """The place of the layout to run next; of equal gains the first."""
        return int(np.argmax(self.gain))

    @property
    def exhausted(self) -> bool:
        return not bool((self.gain >= 0.0).any())


def forecast(ledger: Ledger) -> Forecast:
    """What to expect of every layout of the ledger.

    Until a run has come back there is no gain: layouts are worth their speed over that of the fastest predicted, which is the first
    proposal.
    """
    mean, spread = _residuals(ledger)
    mean = mean + np.log(ledger.predicted_s)
    fitting = chance_to_fit(ledger.full, ledger.full[ledger.ran], ledger.full[ledger.out_of_memory])
    weight = np.minimum(fitting / CERTAIN, 1.0)
    if len(ledger.ran):
        gain = improvement(mean - math.log(float(ledger.measured_s.min())), spread) * weight
    else:
        gain = weight * np.exp(mean.min() - mean)
    return Forecast(mean, spread, fitting, np.where(ledger.open, gain, -1.0))


def improvement(mean: Floats, spread: Floats) -> Floats:
    """Expected share by which runs beat the best so far, of log step times relative to it: E[(1 − e^z)⁺], z ~ N(mean, spread²)."""
    wide = np.maximum(spread, 1e-9)
    below = -mean / wide
    return np.asarray(np.maximum(_normal(below) - np.exp(mean + wide**2 / 2) * _normal(below - wide), 0.0))


def excluded(full: Floats, ran: Floats, out_of_memory: Floats) -> Bools:
    """Layouts predicted to fill a device at least as much as one that ran out did, and more than any that ran, (n,)."""
    return np.asarray((full >= out_of_memory.min(initial=np.inf)) & (full > ran.max(initial=0.0)))


def chance_to_fit(full: Floats, ran: Floats, out_of_memory: Floats) -> Floats:
    """Chance that layouts with a predicted peak of `full` of the free memory run, given the peaks of those that did and did not.

    The peak at which runs run out is unknown by a common factor, on a grid, and every layout by one of its own.
    """
    sigma = math.log1p(MEMORY_BAND) / SURE
    own = sigma * PEAKS_DIFFER
    common = sigma * math.sqrt(1.0 - PEAKS_DIFFER**2)
    weight = np.exp(-0.5 * (GRID / common) ** 2)
    for peaks, sign in ((ran, 1.0), (out_of_memory, -1.0)):
        for peak in np.log(peaks):
            weight = weight * np.maximum(_normal(sign * (GRID - peak) / own), 1e-12)
    weight = weight / weight.sum()
    return np.asarray(_normal((GRID[None, :] - np.log(full)[:, None]) / own) @ weight)


def features(table: LayoutTable) -> Floats:
    """Choices as coordinates (n, p): a factor of two in a degree, or another kind of anything else, is one step."""
    degrees = [np.log2(getattr(table, name)) for name in DEGREES if name != "num_microbatches"]
    recompute = np.where(table.recompute_mode >= FULL_BLOCK, 2.0, np.minimum(table.recompute_mode, 1))
    kinds = (table.sharding, table.hsdp, table.cp_type, table.schedule, table.rank_order)
    ones = [np.unique(kind, return_inverse=True)[1].astype(np.float64) for kind in kinds]
    rest = [table.sequence_parallel, table.optimizer_offload, table.activation_offload]
    return np.column_stack([*degrees, recompute, *ones, *rest]).astype(np.float64)


def _residuals(ledger: Ledger) -> tuple[Floats, Floats]:
    """Mean and spread of log(measured/predicted) of every layout, (n,)."""
    points = features(ledger.table)
    believed = np.concatenate([ledger.ran, ledger.pending])
    prior = COMMON**2 + DOUBT**2
    if not len(believed):
        return np.zeros(len(points)), np.full(len(points), math.sqrt(prior))
    told = np.log(ledger.measured_s / ledger.predicted_s[ledger.ran])
    mean, _ = _posterior(points, ledger.ran, told)
    told = np.concatenate([told, mean[ledger.pending]])
    return _posterior(points, believed, told)


def _posterior(points: Floats, seen: Places, values: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation at all points, given values at those seen."""
    if not len(seen):
        return np.zeros(len(points)), np.full(len(points), math.hypot(COMMON))
    across = _covariance(points, points[seen])
    own = across[seen] + REPEATS**2 * np.eye(len(seen))
    weights = np.linalg.solve(own, across.T)
    left = COMMON**2 + DOUBT**2 - np.einsum("ij,ji->i", across, weights)
    return np.asarray(values @ weights), np.sqrt(np.maximum(left, 0.0))


def _covariance(first: Floats, second: Floats) -> Floats:
    square = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(COMMON**2 + DOUBT**2 * np.exp(-square / (2.0 * (ALIKE / 2.0) ** 2)))


def _normal(z: Floats) -> Floats:
    """The standard normal distribution."""
    flat = np.asarray(z, dtype=np.float64).ravel()
    return np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in flat]).reshape(np.shape(z))

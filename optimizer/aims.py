"""What a plan can make least, and each aim's figure for layouts that are priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.checkpoint import Failures
from ..cost_models.memory import GIB
from ..cost_models.money import SECONDS_PER_HOUR
from ..cost_models.rows import Rows
from ..cost_models.step import CostModel
from ..cost_models.traffic import sent_bytes
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Floats, Ints, Problem

STEP_TIME, GOODPUT = "step-time", "goodput"
UNITS = {STEP_TIME: "s", "memory": "GiB", "devices": "", "cost": "device-hours", "traffic": "GiB", GOODPUT: "s"}
"""Every aim: seconds of a step, peak of the fullest device, devices used, what a step costs, what crosses supernodes per device,
and seconds of a step over the share of time that failures leave for training.
"""
MEANT = {STEP_TIME: "step time", "memory": "peak memory", "traffic": "traffic", GOODPUT: "effective step"}
"""What the figure of an aim is of, where its name does not say it."""
BEST = {GOODPUT: "most goodput", "devices": "fewest devices"}
"""What is said of a layout that is the best in an aim, where that is not "least" and its name."""
FEWER_DEVICES = ("devices", "cost")
"""Aims for which jobs on fewer devices are looked at."""
PER_SECOND = (STEP_TIME, "cost", GOODPUT)
"""Aims that follow from the step time."""
SIGNIFICANT = 10


@dataclass(frozen=True)
class Aims:
    """The aims of one question, in its order; `device_hour_price` turns the cost from device-hours into money, `failures` are
    what goodput is reckoned with.
    """

    names: tuple[str, ...]
    device_hour_price: float | None = None
    failures: Failures | None = None

    @property
    def fewer_devices(self) -> bool:
        return any(name in FEWER_DEVICES for name in self.names)

    @property
    def needs_traffic(self) -> bool:
        return "traffic" in self.names

    @property
    def needs_goodput(self) -> bool:
        return GOODPUT in self.names

    def among_failures_of(self, problem: Problem) -> Aims:
        """The aims with the failures of the problem's cluster. InputError where goodput is an aim and they are not known."""
        if not self.needs_goodput:
            return self
        failures = Failures.of(problem)
        if failures is None:
            raise InputError(
                f"--objective goodput: {problem.cluster.name} does not say how it fails; its YAML needs failures (device_per_year, "
                "server_per_year or supernode_per_year, and restart_s) and storage.bandwidth_bytes_per_s"
            )
        return replace(self, failures=failures)

    def least_stretch(self, devices: Ints | Floats) -> Floats | float:
        """What no layout on so many devices has less of: expected time over training time."""
        return 1.0 if self.failures is None else self.failures.stretch(np.asarray(devices, dtype=np.float64))

    def least(self, step_time_s: Sequence[float], devices: Sequence[int]) -> float | None:
        """What no layout has less of in the first aim, where that follows from the step time: of jobs on so many devices none of
        whose layouts is faster than these seconds. None for other aims.
        """
        if self.names[0] not in PER_SECOND:
            return None
        seconds, counts = np.array(step_time_s), np.array(devices)
        none = np.zeros(len(seconds))
        return float(self.figures(seconds, none, counts, none, self.least_stretch(counts))[:, 0].min())

    def unit(self, name: str) -> str:
        """What the figures of an aim are counted in."""
        return "price" if name == "cost" and self.device_hour_price is not None else UNITS[name]

    def figures(
        self, step_time_s: Floats, peak_bytes: Floats, devices: Ints, traffic_gib: Floats, stretch: Floats | float = 1.0
    ) -> Floats:
        """Figures of n layouts, (n, aims), to SIGNIFICANT digits; all are better when less. `stretch`: expected time over training
        time.
        """
        hours = devices * step_time_s / SECONDS_PER_HOUR
        known = {
            STEP_TIME: step_time_s,
            "memory": peak_bytes / GIB,
            "devices": devices.astype(np.float64),
            "cost": hours * (1.0 if self.device_hour_price is None else self.device_hour_price),
            "traffic": traffic_gib,
            GOODPUT: step_time_s * stretch,
        }
        return _rounded(np.stack([known[name] for name in self.names], axis=1))

    def seconds(self, aim: int, figures: Floats, devices: Ints) -> Floats:
        """The step time at which layouts on so many devices have a figure of an aim of PER_SECOND; broadcasts."""
        if self.names[aim] == STEP_TIME:
            return figures + 0.0 * devices
        if self.names[aim] == GOODPUT:
            return np.asarray(figures / self.least_stretch(devices))
        price = 1.0 if self.device_hour_price is None else self.device_hour_price
        return np.asarray(figures * SECONDS_PER_HOUR / price / devices)


def _rounded(figures: Floats) -> Floats:
    """Figures that differ by no more than the order of a sum become the same: neither beats the other."""
    size = np.where(figures > 0, figures, 1.0)
    unit = 10.0 ** (np.floor(np.log10(size)) - SIGNIFICANT + 1)
    return np.asarray(np.round(figures / unit) * unit)


def best_in(name: str) -> str:
    """«least memory», «most goodput»."""
    return BEST.get(name, f"least {name}")


def parse_aims(text: str, device_hour_price: float | None = None) -> Aims:
    """Aims of "step-time,memory". InputError names an unknown or repeated aim, and a price that is none."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in UNITS:
            raise InputError(f"--objective {name!r} is not offered; there is {', '.join(UNITS)}, one or several")
        if names.count(name) > 1:
            raise InputError(f"--objective names {name} twice; once is enough")
    if device_hour_price is not None and not 0 < device_hour_price < float("inf"):
        raise InputError(f"--device-hour-price {device_hour_price:g}: must be a price greater than 0")
    if device_hour_price is not None and "cost" not in names:
        raise InputError(f"--device-hour-price {device_hour_price:g} needs the aim cost: --objective {text},cost")
    return Aims(names, device_hour_price)


def beyond_supernode_gib(model: CostModel, rows: Rows, redone: dict[str, Floats], dense: Floats, expert: Floats) -> Floats:
    """GiB that a used device sends across supernodes per step, (n,)."""
    outside = slice(model.network.supernode + 1, None)
    parts = [sent[outside].sum(axis=0) for _, sent in sent_bytes(model, rows, redone, dense, expert)]
    return np.asarray(np.sum(parts, axis=0) / GIB)


def dominated_by(figures: Floats, others: Floats) -> np.ndarray:
    """Which of the figures (n, aims) some row of `others` (k, aims) is no worse than in any aim, (n,)."""
    found = np.zeros(len(figures), dtype=bool)
    for other in others:
        found |= (other <= figures).all(axis=1)
    return found


def front_of(figures: Floats) -> np.ndarray:
    """Places of the rows (n, aims) that no other is at least as good as in every aim, by rising aims; of equal rows the first."""
    order = np.lexsort(figures.T[::-1])
    left, place = figures[order], 0
    while place < len(left):  # rows stand in rising order of the first aim, so none is dominated by one that comes later
        keep = (left < left[place]).any(axis=1)
        keep[: place + 1] = True
        left, order, place = left[keep], order[keep], place + 1
    return order


def least_place(figures: Floats, aim: int, names: Sequence[str]) -> int:
    """Place of the row that is least in one aim, then in step time where that is an aim, then in the others by their order."""
    first = [aim, *(i for i, name in enumerate(names) if name == STEP_TIME), *range(len(names))]
    return int(np.lexsort(figures[:, first[::-1]].T)[0])


def knee_place(figures: Floats) -> int:
    """Place of the row whose largest shortfall is least, each aim scaled from its least to its greatest value on the front."""
    low, high = figures.min(axis=0), figures.max(axis=0)
    short = (figures - low) / np.where(high > low, high - low, 1.0)
    return int(np.lexsort((short.sum(axis=1), short.max(axis=1)))[0])


def representatives(figures: Floats, always: Sequence[int], most: int) -> tuple[list[int], float]:
    """At most `most` rows of a front, and the share by which no row of it is better than a shown one in any aim.

    Rows are gone through in their order; one that a kept row matches within the share in every aim is left out.
    """
    share = 0.0
    while True:
        kept = list(dict.fromkeys(always))
        for place in range(len(figures)):
            if place not in kept and not (figures[kept] <= figures[place] * (1.0 + share)).all(axis=1).any():
                kept.append(place)
            if len(kept) > most:
                break
        if len(kept) <= max(most, len(dict.fromkeys(always))):
            return sorted(kept), share
        share = 1.25 * share if share else 0.01

"""How well figures carry over: every family left out in turn, predicted from the others, then after some of its own runs.

Only rows of split `fit` are looked at: this is how the way of pooling was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .calibration import FEW_ROWS, Calibration, Pairs, centres, fit, pair_of, pairs_of, pools_of, priors_of
from .pooling import Pool, Prior
from .run_models import read_shapes
from .runs import read_runs
from .trials import Priced
from .validation import Outcome

COUNTS = (0, 1, 3, 10)
LEAST_HELD_OUT = 3
"""Rows of a family on a stack and accelerator that are held out beyond those that may be learnt from."""


@dataclass(frozen=True)
class Learnt:
    """A family's rows on one accelerator: median error over draws after so many of its own runs, and of the documented figures.

    `moe`: whether most of its models have experts. `errors` are by COUNTS, as far as there are rows; 0 is the raw transfer.
    """

    family: str
    stack: str
    accelerator: str
    moe: bool
    held_out: int
    documented: float
    errors: tuple[float, ...]


def leave_one_family_out(path: Path, draws: int = 1) -> list[Learnt]:
    """The learning curve of every family with enough rows, on each stack and accelerator that it ran on."""
    runs = [run for run in read_runs(path) if run.split == "fit"]
    pairs = pairs_of(runs, read_shapes(path.parent / "models.json"))
    known = {key: fit(rows) for key, rows in _many(pairs).items()}
    found = []
    for family in dict.fromkeys(run.family for run in runs):
        others = {key: [o for o in rows if o.run.family != family] for key, rows in pairs.items()}
        pools = _pools(known, pairs, others)
        for key, rows in pairs.items():
            own = [o for o in rows if o.run.family == family]
            if len(own) >= LEAST_HELD_OUT + COUNTS[1]:
                found.append(_curve(family, own, others[key], pools, draws))
    return found


def _many(pairs: Pairs) -> Pairs:
    return {key: rows for key, rows in pairs.items() if len(rows) >= FEW_ROWS}


def _pools(known: dict[tuple[str, str], Calibration], pairs: Pairs, others: Pairs) -> dict[str, Pool]:
    """What pairs say without the family; those that it has no row of keep their fit."""
    fits = [known[key] if len(rows) == len(pairs[key]) else fit(rows) for key, rows in _many(others).items()]
    return pools_of(fits)


def _curve(family: str, own: Sequence[Outcome], rest: Sequence[Outcome], pools: dict[str, Pool], draws: int) -> Learnt:
    """One family's rows of one pair: learnt from the first of a draw, measured on those that no count learns from."""
    pair, runs = pair_of(own), Priced(own, None, shipped=False)
    priors = priors_of(pools, pair)
    counts = [count for count in COUNTS if count + LEAST_HELD_OUT <= len(own)]
    tried = np.zeros((draws, len(counts)))
    documented = np.abs(runs.predict({}) / runs.measured - 1.0)
    sizes = np.zeros(draws)
    for draw in range(draws):
        order = np.random.default_rng(draw).permutation(len(own))
        held_out = order[counts[-1] :]
        sizes[draw] = np.median(documented[held_out])
        for place, count in enumerate(counts):
            values = _figures([*rest, *(own[i] for i in order[:count])], priors, runs)
            predicted = runs.predict(values)[held_out]
            tried[draw, place] = np.median(np.abs(predicted / runs.measured[held_out] - 1.0))
    moe = sum(o.job is not None and o.job.problem.model.is_moe for o in own) * 2 > len(own)
    errors = tuple(float(x) for x in np.median(tried, axis=0))
    return Learnt(family, pair.stack, pair.accelerator, moe, len(own) - counts[-1], float(np.median(sizes)), errors)


def _figures(rows: Sequence[Outcome], priors: dict[str, Prior], runs: Priced) -> dict[str, float]:
    """What a pair's figures are after some rows: its fit, or where there are none the centres of its priors."""
    if not rows:
        return centres(priors, runs)
    return {one.name: one.value for one in fit(rows, priors=priors).fits}

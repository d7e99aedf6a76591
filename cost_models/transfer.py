"""How well figures carry over: every family left out in turn, predicted from the others, then after some of its own runs.

Only rows of split `fit` are looked at: this is how the way of pooling and the widths of posteriors were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..search_spaces.layout import Floats, Ints
from .calibration import Calibration, Pairs, fit, pair_of, pairs_of, pools_of, priors_of
from .few_runs import doubts_of, few_runs
from .intervals import Z_COVERAGE
from .parameters import FEW_ROWS
from .pooling import Pool
from .profile import load_profile
from .run_files import read_runs
from .run_models import read_shapes
from .trials import Priced
from .validation import Outcome

COUNTS = (0, 1, 3, 10)
DRAWS = 10
LEAST_HELD_OUT = 3
"""Rows of a family on a stack and accelerator that are held out beyond those that may be learnt from."""
MOST_OWN = 60
"""Rows of a family, drawn by seed, that stand for all of them: more take longer and say the same."""


@dataclass(frozen=True)
class Learnt:
    """A family's rows on one accelerator: median error over draws after so many of its own runs, and of the documented figures.

    `moe`: whether most of its models have experts. `errors` are by COUNTS, as far as there are rows; 0 is the raw transfer.
    `inside` is the share of held-out rows within the interval of the posterior, or that of pairs which nobody measured where
    nothing was learnt from; mean over draws.
    """

    family: str
    stack: str
    accelerator: str
    moe: bool
    held_out: int
    documented: float
    errors: tuple[float, ...]
    inside: tuple[float, ...]


def leave_one_family_out(path: Path, draws: int = DRAWS) -> list[Learnt]:
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
                found.append(learning_curve(_some(own), others[key], pools, draws))
    return found


def learning_curve(own: Sequence[Outcome], rest: Sequence[Outcome], pools: dict[str, Pool], draws: int = DRAWS) -> Learnt:
    """One family's rows of one pair beside the others': learnt from the first of a draw, measured on those no count learns from."""
    rows, pair = [*own, *rest], pair_of(own)
    runs = Priced(rows, None, shipped=False)
    counts = [count for count in COUNTS if count + LEAST_HELD_OUT <= len(own)]
    orders = [np.random.default_rng(draw).permutation(len(own)) for draw in range(draws)]
    held_out = [order[counts[-1] :] for order in orders for _ in counts]
    weights = np.array([_seen(order[:count], len(own), len(rest)) for order in orders for count in counts])
    found = few_runs(rows, runs, priors_of(pools, pair)).learn(weights)
    moe = sum(o.job is not None and o.job.problem.model.is_moe for o in own) * 2 > len(own)
    profile = load_profile(pair.accelerator)
    typical = profile.intervals.typical["moe" if moe else "dense"]
    width = np.hypot(typical, Z_COVERAGE * np.hypot(found.spread, doubts_of(rows)))
    width[~weights.any(axis=1)] = math.log(profile.unmeasured_interval(pair.stack, pair.accelerator, moe).high)
    errors = [np.median(np.abs(np.expm1(found.residuals[s, held]))) for s, held in enumerate(held_out)]
    inside = [np.mean(np.abs(found.residuals[s, held]) <= width[s, held]) for s, held in enumerate(held_out)]
    documented = np.abs(runs.predict({}) / runs.measured - 1.0)
    return Learnt(
        own[0].run.family,
        pair.stack,
        pair.accelerator,
        moe,
        len(own) - counts[-1],
        float(np.median([np.median(documented[order[counts[-1] :]]) for order in orders])),
        tuple(np.median(np.reshape(errors, (draws, -1)), axis=0).tolist()),
        tuple(np.mean(np.reshape(inside, (draws, -1)), axis=0).tolist()),
    )


def _seen(learnt: Ints, own: int, rest: int) -> Floats:
    """Weights of one selection: all rows of other families, and of one's own those learnt from, (own + rest,)."""
    found = np.concatenate((np.zeros(own), np.ones(rest)))
    found[learnt] = 1.0
    return found


def _some(own: Sequence[Outcome]) -> list[Outcome]:
    places = np.random.default_rng(0).permutation(len(own))[:MOST_OWN]
    return [own[place] for place in sorted(places)]


def _many(pairs: Pairs) -> Pairs:
    return {key: rows for key, rows in pairs.items() if len(rows) >= FEW_ROWS}


def _pools(known: dict[tuple[str, str], Calibration], pairs: Pairs, others: Pairs) -> dict[str, Pool]:
    """What pairs say without the family; those that it has no row of keep their fit."""
    fits = [known[key] if len(rows) == len(pairs[key]) else fit(rows) for key, rows in _many(others).items()]
    return pools_of(fits)

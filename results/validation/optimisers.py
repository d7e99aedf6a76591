"""Compares the fit's optimiser with Optuna's CMA-ES at equal numbers of pricings: python results/validation/optimisers.py RUNS.csv

Writes optimisers.md beside this file. Needs optuna and cmaes. A pricing is one trial point of a stack's figures over all its rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import optuna
from paraplan.cost_models.calibration import pairs_of
from paraplan.cost_models.many_runs import TYPICAL_NOISE, Search
from paraplan.cost_models.parameters import FEW_ROWS, PARAMETERS
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.trials import Priced
from paraplan.optimizer.reports.validation import markdown

PAIRS = (("aleph-alpha-flash2", "a100-80gb-sxm"), ("megatron-fsdp", "gb300"))
BUDGETS = (1, 4)  # times what Levenberg–Marquardt took
SEEDS = (0, 1)
PAGE = """# Which optimiser fits a stack's figures

`python results/validation/optimisers.py RUNS.csv` writes this page.

All figures of a stack are free within their priors; the loss is the negative log posterior (Huber's, noise {noise:.0%}): less
is better. A pricing is one trial point. Levenberg–Marquardt (`cost_models/many_runs.py`) scans each figure first, so that it
starts beyond flat stretches, then follows derivatives; Optuna's CMA-ES samples within the physical bounds, starting from the same
documented figures (median of {seeds} seeds). LM is deterministic, and its curvature gives the intervals.

{table}
"""


class Counted(Priced):
    """Counts the points that are priced."""

    pricings = 0

    def predict_all(self, names, points):  # type: ignore[no-untyped-def]
        """As the base class prices them."""
        self.pricings += len(points)
        return super().predict_all(names, points)


def main() -> None:
    """Writes the page."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python results/validation/optimisers.py RUNS.csv")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = Path(sys.argv[1])
    families = ("aleph-alpha", "megatron-bridge")
    runs = [run for run in read_runs(path) if run.split == "fit" and run.family in families]
    pairs = pairs_of(runs, read_shapes(path.parent / "models.json"))
    lines = []
    for key in PAIRS:
        priced = Counted(pairs[key], None, shipped=False)
        free = tuple(p for p in PARAMETERS if p.least_rows <= FEW_ROWS and (priced.figures[p.name] or p.start))
        search = Search(priced, free, np.log([priced.figures[p.name] or p.start for p in free]))
        start = loss(search, search.start)
        priced.pricings = 0
        best = loss(search, search.solve()[0])
        spent = priced.pricings
        cells = [f"{float(np.median([cma(search, times * spent, seed) for seed in SEEDS])):.1f}" for times in BUDGETS]
        lines.append((*key, str(len(pairs[key])), str(len(free)), f"{start:.1f}", str(spent), f"{best:.1f}", *cells))
    headers = ("stack", "accelerator", "rows", "figures", "loss before", "pricings", "LM", *(f"CMA-ES, {n}×" for n in BUDGETS))
    page = PAGE.format(table=markdown(headers, lines), noise=TYPICAL_NOISE, seeds=len(SEEDS))
    (Path(__file__).parent / "optimisers.md").write_text(page, encoding="utf-8")


def loss(search: Search, theta: np.ndarray) -> float:
    """The loss at one point, at the same noise for all."""
    return search.loss(theta, search.residuals([theta])[0], TYPICAL_NOISE)


def cma(search: Search, trials: int, seed: int) -> float:
    """The least loss that CMA-ES finds in so many pricings."""

    def objective(trial: optuna.Trial) -> float:
        theta = [trial.suggest_float(p.name, np.log(p.low), np.log(p.high)) for p in search.parameters]
        return loss(search, np.array(theta))

    start = {p.name: float(t) for p, t in zip(search.parameters, search.start, strict=True)}
    sampler = optuna.samplers.CmaEsSampler(x0=start, sigma0=0.5, seed=seed)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(start)  # priced too: what x0 names is only where samples centre
    study.optimize(objective, n_trials=trials)
    return float(study.best_value)


if __name__ == "__main__":
    main()

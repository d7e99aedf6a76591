"""Compares the engines on twenty problems and writes results/engines.md: python results/engines/regenerate.py

CMA-ES joins where the package cmaes is installed, the Gaussian process where torch and scipy are. Every engine runs on one
processor, whose seconds are counted: other work on the machine leaves them alone.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import optuna
from paraplan.cost_models.step import CostModel
from paraplan.optimizer.engines import Task
from paraplan.optimizer.engines.benders import prove
from paraplan.optimizer.engines.sampling import PER_BATCH, SEED, STARTS, sample
from paraplan.optimizer.found import Found
from paraplan.optimizer.search import Search
from paraplan.optimizer.streams import Meter
from paraplan.optimizer.writing import write_file
from paraplan.search_spaces import Problem
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tables import LARGEST, TooLargeError, solve_tables  # noqa: E402

BUDGET = 192
"""Layouts that every sampler prices."""
LIMIT_S = 60.0
"""Longest that a proof may take, by the clock, before its gap is written instead."""
SAMPLER_LIMIT_S = 120.0
"""Likewise of a sampler's layouts."""
GP = "GP"
GP_LIMIT_S = 10.0
"""Seconds of the processor in which the Gaussian process proposes, the rest being random: it takes nearly one for each layout,
others milliseconds."""
WORKERS = 2
"""Processes among which the problems are dealt."""
REACHED = 1e-6
"""Relative distance within which an optimum counts as reached."""
PRODUCT = "TPE from bounds"
"""The sampler of `--engine optuna`."""
NARROW = "recompute=none,micro_batch=1,offload=none,optimizer_sharding=zero1"


@dataclass(frozen=True)
class Case:
    """One problem: model, cluster, devices, global batch, tokens per sequence, and what is fixed."""

    model: str
    cluster: str
    devices: int
    global_batch: int
    seq_len: int = 4096
    fix: str = ""

    @property
    def problem(self) -> Problem:
        return build_problem(self.model, self.cluster, self.devices, self.global_batch, self.seq_len, fix=self.fix)

    @property
    def title(self) -> str:
        return f"{self.model}, {self.devices:,} × {self.cluster}{', narrowed' if self.fix else ''}"


CASES = (
    Case("qwen3-0.6b", "hgx-h100", 8, 16, fix=NARROW),
    Case("llama-3.2-3b", "mi300x", 8, 32, fix=NARROW),
    Case("deepseek-v2-lite", "hgx-h800", 8, 32, fix=NARROW),
    Case("qwen3-30b-a3b", "hgx-h200", 12, 48, fix=NARROW),
    Case("gpt-oss-20b", "hgx-b200", 16, 64, fix=NARROW),
    Case("llama-3.1-8b", "hgx-h100", 8, 64),
    Case("qwen3-8b", "atlas-800t-a2", 24, 96),
    Case("qwen3-30b-a3b", "hgx-h100", 16, 64),
    Case("gpt-oss-20b", "hgx-b200", 32, 128),
    Case("qwen3-32b", "mi355x", 64, 256),
    Case("llama-3.1-70b", "hgx-h100", 64, 256, 8192),
    Case("mixtral-8x22b", "hgx-h200", 128, 512),
    Case("qwen3-235b-a22b", "gb200-nvl72", 288, 1152),
    Case("kimi-k2", "hgx-h100", 512, 4096),
    Case("gpt3-175b", "hgx-a100", 1024, 1536, 2048),
    Case("deepseek-v3", "cloudmatrix-384", 1536, 15360),
    Case("llama-3.1-405b", "three-tier-h100", 4096, 2048, 8192),
    Case("moe-10t", "atlas-950-superpod", 16384, 16384),
    Case("moe-10t", "atlas-960-superpod", 30976, 30976),
    Case("moe-1.8t", "cloudmatrix-384", 131072, 131072),
)
Sampler = Callable[[], optuna.samplers.BaseSampler]


def samplers() -> dict[str, tuple[Sampler, int]]:
    """The samplers that can run here, each with the number of frames whose plainest layouts it starts from."""
    kinds: dict[str, tuple[Sampler, int]] = {
        "random": (lambda: optuna.samplers.RandomSampler(seed=SEED), 0),
        "NSGA-II": (_nsga2, 0),
        "NSGA-II from bounds": (_nsga2, STARTS),
        "TPE": (_tpe, 0),
        PRODUCT: (_tpe, STARTS),
    }
    if find_spec("cmaes"):
        kinds["CMA-ES"] = (lambda: optuna.samplers.CmaEsSampler(seed=SEED, popsize=PER_BATCH, warn_independent_sampling=False), 0)
    if find_spec("torch") and find_spec("scipy"):
        kinds[GP] = (_gaussian_process, 0)
    return kinds


def _gaussian_process() -> optuna.samplers.BaseSampler:
    end_s = time.process_time() + GP_LIMIT_S

    class Limited(optuna.samplers.GPSampler):
        """One that leaves its proposals to chance once its time has passed."""

        def sample_relative(self, *asked: Any) -> dict[str, Any]:
            return {} if time.process_time() > end_s else super().sample_relative(*asked)

    return Limited(seed=SEED, n_startup_trials=PER_BATCH)


def _nsga2() -> optuna.samplers.BaseSampler:
    return optuna.samplers.NSGAIISampler(seed=SEED, population_size=PER_BATCH)


def _tpe() -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=SEED, multivariate=True, constant_liar=True, n_startup_trials=PER_BATCH)


@dataclass(frozen=True)
class Timing:
    """Seconds until the best layout was found and until it was proved; `proved` is false where the limit came first."""

    optimum_s: float
    proof_s: float
    best_s: float
    proved: bool


@dataclass(frozen=True)
class Sampling:
    """What a sampler came to: gap to the optimum, layouts priced in all, seconds in all and until its best, layouts until then.

    `reached` says whether that is the optimum.
    """

    gap: float
    priced: int
    seconds: float
    best_after: int
    best_after_s: float
    reached: bool


@dataclass
class Row:
    """Everything measured on one case; `tables_s` is none where the space is too large."""

    case: Case
    legal: int
    bnb: Timing
    benders: Timing
    tables_s: float | None
    sampled: dict[str, Sampling] = field(default_factory=dict)


def main() -> None:
    """Runs every engine on every case and writes the page."""
    begun, rows = time.monotonic(), list[Row]()
    with Meter(shown=True) as meter, ProcessPoolExecutor(WORKERS, initializer=_warm) as workers:
        for row in workers.map(measured, CASES):
            rows.append(row)
            meter("comparing engines", len(rows) / len(CASES))
    write_file(HERE.parent / "engines.md", page(rows, time.monotonic() - begun))


def _warm() -> None:
    """Imports and first calls are nobody's search."""
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    measured(CASES[0])


def measured(case: Case) -> Row:
    """All engines on one case. ValueError where two that prove an optimum disagree."""
    problem = case.problem
    engines = [_branch_and_bound, _benders]
    timings = {
        run: _timed(problem, run) for run in (engines if CASES.index(case) % 2 else reversed(engines))
    }  # neither always first
    bnb, benders = (timings[run] for run in engines)
    tables_s, by_tables_s = _tabulated(problem)
    proofs = [(name, timing.best_s) for name, timing in (("bnb", bnb), ("cp-sat", benders)) if timing.proved]
    proofs += [("tables", by_tables_s)] if by_tables_s is not None else []
    if any(abs(best_s / proofs[0][1] - 1.0) > REACHED for _, best_s in proofs):
        raise ValueError(f"{case.title}: the engines prove different optima: {proofs}")
    row = Row(case, Space(problem).legal, bnb, benders, tables_s)
    optimum_s = min(bnb.best_s, benders.best_s)
    for name, (sampler, starts) in samplers().items():
        row.sampled[name] = _sampled(problem, sampler(), starts, optimum_s)
    return row


def _timed(problem: Problem, run: Callable[[Task, Search, Callable[[float], None]], Found]) -> Timing:
    """An engine from its space to its proof; the optimum counts as found at the end of the batch or round that held it."""
    begun = time.process_time()
    space, model = Space(problem), CostModel(problem)
    search = Search(space, model, 1, LIMIT_S)
    seen: list[tuple[float, float]] = []

    def look(_: float) -> None:
        if search.best and (not seen or search.best[0].step_time_s < seen[-1][1]):
            seen.append((time.process_time() - begun, search.best[0].step_time_s))

    found = run(Task(space, model, 1, LIMIT_S, look), search, look)
    proof_s = time.process_time() - begun
    look(1.0)
    return Timing(seen[-1][0], proof_s, found.best[0].step_time_s, found.complete)


def _branch_and_bound(task: Task, search: Search, look: Callable[[float], None]) -> Found:
    return search.run(look)


def _benders(task: Task, search: Search, look: Callable[[float], None]) -> Found:
    return prove(task, search)


def _tabulated(problem: Problem) -> tuple[float | None, float | None]:
    """Seconds and optimum of the objective as one table; nothing where the space is too large for it."""
    begun = time.process_time()
    try:
        best_s = solve_tables(Space(problem), CostModel(problem))
    except TooLargeError:
        return None, None
    return time.process_time() - begun, best_s


def _sampled(problem: Problem, sampler: optuna.samplers.BaseSampler, starts: int, optimum_s: float) -> Sampling:
    begun, batches_s = time.process_time(), list[float]()
    task = Task(Space(problem), CostModel(problem), 1, SAMPLER_LIMIT_S, lambda _: batches_s.append(time.process_time() - begun))
    result = sample(task, sampler, BUDGET, starts)
    seconds = time.process_time() - begun
    best_s = result.progress[-1][2] if result.progress else np.inf
    enough_s = max(best_s, optimum_s * (1.0 + REACHED))
    after = next((priced for priced, _, step_s in result.progress if step_s <= enough_s), 0)
    after_s = batches_s[min(-(-after // PER_BATCH), len(batches_s)) - 1] if batches_s else np.nan
    reached = bool(best_s <= optimum_s * (1.0 + REACHED))
    return Sampling(best_s / optimum_s - 1.0, result.priced, seconds, after, after_s, reached)


def page(rows: list[Row], seconds: float) -> str:
    """The page: what is best where, the proofs, the samplers."""
    names = list(rows[0].sampled)
    return f"""# The engines compared

Regenerate with `python results/engines/regenerate.py` ({seconds / 60:.0f} minutes with {WORKERS} processes).

{verdict(rows, names)}

## Proofs

Seconds of one processor from the problem to the optimum (the end of the batch or round that held it) and to its proof, and × the
proof's time over branch and bound's in the same run. Every engine keeps one layout. `tables` prices every layout and gives CP-SAT
the objective as one table; it refuses spaces of more than {LARGEST:,} layouts (–), those with overlap on and off counted once,
which `legal layouts` counts apart. `narrowed` fixes `{NARROW}`.

{table(PROOFS, (_proof_line(row) for row in rows))}

## Samplers at equal budgets

Every sampler prices {BUDGET} layouts, all different; fewer (in brackets) where there are no more or {SAMPLER_LIMIT_S:.0f} s pass
first. Each of its points becomes the nearest legal layout that was not priced yet, cut into stages as branch and bound does.
`from bounds`: the plainest layouts of the {STARTS} frames of least bound come first. Gap to the optimum @ the layouts, and seconds,
after which the sampler had its best; a gap of 0 is the optimum.{_gp_limit(names)}
{_left_out(names)}

{table(("problem", *names), ((row.case.title, *(_sampler_cell(row, name) for name in names)) for row in rows))}
"""


def _gp_limit(names: list[str]) -> str:
    process = f"\n{GP}, the Gaussian process, proposes for {GP_LIMIT_S:.0f} s of the processor, and leaves the rest to chance."
    return process if GP in names else ""


PROOFS = ("problem", "legal layouts", "bnb optimum", "bnb proof", "cp-sat optimum", "cp-sat proof", "×", "tables proof", "×")


def verdict(rows: list[Row], names: list[str]) -> str:
    """Which engine is best where and why, in the figures of this run."""
    count = len(rows)
    both = [row for row in rows if row.bnb.proved and row.benders.proved]
    ratios = [row.benders.proof_s / row.bnb.proof_s for row in both]
    totals = sum(row.bnb.proof_s for row in both), sum(row.benders.proof_s for row in both)
    tabulated = [row.tables_s / row.bnb.proof_s for row in rows if row.tables_s is not None]
    proved = sum(row.bnb.proved for row in rows), sum(row.benders.proved for row in rows)
    reached = {name: sum(row.sampled[name].reached for row in rows) for name in names}
    gaps = {name: median(row.sampled[name].gap for row in rows) for name in names}
    order = sorted(names, key=lambda name: (gaps[name], -reached[name]))
    paces = {name: median(row.sampled[name].seconds / row.bnb.proof_s for row in rows) for name in names}
    shown = "; ".join(f"{name} {gaps[name]:.1%}, {reached[name]} of {count}, {paces[name]:.2g} ×" for name in order)
    same = "the same ones" if proved[0] == proved[1] else "those of the other among them, or the page would not have been written"
    faster = "bnb" if totals[0] <= totals[1] else "cp-sat"
    place = order.index(PRODUCT) + 1
    return f"""- **bnb** proves {proved[0]} of {count} optima within {LIMIT_S:.0f} s each, **cp-sat** (Benders)
  {proved[1]}, {same}. Those that both prove take bnb {totals[0]:.0f} s in all and cp-sat {totals[1]:.0f} s:
  {median(ratios):.2g} times as long at the median, from {min(ratios):.2g} to {max(ratios):.2g} times. The subproblem of cp-sat is
  bnb's own pricing; its master is presolved again in every round. cp-sat is a second reading of the rules, the user's among them.
  The faster in all is {faster}; `--engine auto` is bnb.
- **tables** takes {median(tabulated):.2g} times bnb's time where it can be run at all ({len(tabulated)} of {count}): it prices
  everything that bounds leave out.
- **optuna** proves nothing. Median gap after {BUDGET} layouts, optima reached, and median time over that of bnb's proof:
  {shown}.
  `--engine optuna` is {PRODUCT}, number {place} of the {len(order)} by median gap, with a larger budget. Samplers are for knobs
  that cannot be listed."""


def _left_out(names: list[str]) -> str:
    missing = [
        *([] if "CMA-ES" in names else ["CMA-ES (needs the package cmaes)"]),
        *([] if "GP" in names else ["the Gaussian process (needs torch and scipy)"]),
    ]
    return f"Left out for want of a package that paraplan does not depend on: {', '.join(missing)}." if missing else ""


def _proof_line(row: Row) -> tuple[str, ...]:
    tables = ("–", "–") if row.tables_s is None else (f"{row.tables_s:.2f}", f"{row.tables_s / row.bnb.proof_s:.1f}")
    ratio = f"{row.benders.proof_s / row.bnb.proof_s:.1f}" if row.bnb.proved and row.benders.proved else "–"
    return (row.case.title, f"{row.legal:,}", *_seconds(row.bnb), *_seconds(row.benders), ratio, *tables)


def _seconds(timing: Timing) -> tuple[str, str]:
    return f"{timing.optimum_s:.2f}", f"{timing.proof_s:.2f}" if timing.proved else f"> {LIMIT_S:.0f}"


def _sampler_cell(row: Row, name: str) -> str:
    sampling = row.sampled[name]
    fewer = f" ({sampling.priced})" if sampling.priced < BUDGET else ""
    if not np.isfinite(sampling.gap):
        return f"none fits{fewer}"
    gap = "0" if sampling.reached else f"{sampling.gap:.1%}"
    return f"{gap} @ {sampling.best_after}, {sampling.best_after_s:.1f} s{fewer}"


def table(headers: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; figures right, words left."""
    rule = ("---", *("---:" for _ in headers[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, rule, *lines))


if __name__ == "__main__":
    main()

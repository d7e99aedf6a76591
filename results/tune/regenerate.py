"""Replays tuning on groups of published layouts of one problem: python results/tune/regenerate.py RUNS.csv

Writes README.md beside this file. Only layouts that were measured may be proposed, and a layout's result is what was measured of
it. RUNS.csv has the columns of the measured-runs format; models.json beside it gives the models' shapes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from textwrap import wrap

import numpy as np
import optuna
from paraplan.cost_models.calibration import fit
from paraplan.cost_models.run_files import read_runs
from paraplan.cost_models.run_models import read_shapes
from paraplan.cost_models.step import CostModel
from paraplan.cost_models.validation import Outcome, measured_of, problem_key, profile_of
from paraplan.optimizer.forecast import Ledger, features, forecast
from paraplan.optimizer.tune import CALIBRATED_FROM, LEAST_TO_STOP, STOP, with_figures
from paraplan.search_spaces.layout import LayoutTable
from paraplan.search_spaces.quantities import free_bytes

HERE = Path(__file__).parent
COUNTS = (1, 2, 3, 5, 10)
LEAST = 8  # layouts of a group that ran
MOST_OF_SMALL = 10  # groups of the many small ones of one server
CLOSE = 0.02  # what repeats of one run differ by
SEEDS = 4
STARTUP = 3  # random runs before TPE takes over
LINE = 136  # characters of the page's text
PENALTY = 2.0  # a run that yields nothing, for TPE, over the slowest that ran

Ints = np.typing.NDArray[np.intp]
Floats = np.typing.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Group:
    """Layouts of one problem: step times measured, infinite where a run yielded nothing, and predicted with documented figures."""

    family: str
    outcomes: tuple[Outcome, ...]
    table: LayoutTable
    measured_s: Floats
    out_of_memory: np.typing.NDArray[np.bool_]

    @cached_property
    def documented(self) -> tuple[Floats, Floats]:
        """`priced` before any run."""
        return self.priced()

    def priced(self, told: Sequence[int] = ()) -> tuple[Floats, Floats]:
        """Step times and peaks as a share of free memory, (n,): with the stack's documented figures, calibrated by runs told."""
        job = self.outcomes[0].job
        assert job is not None
        stack, cluster = job.problem.stack, job.problem.cluster
        curves = profile_of(job.accelerator, job.gemm_curve, None, False)
        if told:
            found = fit([self.outcomes[i] for i in told], shipped=False, priors={})
            curves = curves.model_copy(update={"accelerator": cluster.accelerator.name})
            curves = with_figures(curves, stack.name, found.figures())
        model = CostModel(job.problem, curves)
        prices = model.price(self.table)
        return prices.step_time_s, prices.peak_bytes * model.problem.stack.reserved_over_allocated.value / free_bytes(cluster)


@dataclass(frozen=True)
class Regrets:
    """Mean regret and share of groups that come close to the best after each of COUNTS runs, in per cent as they are printed."""

    mean: tuple[float, ...]
    close: tuple[float, ...]

    @classmethod
    def of(cls, found: Floats) -> Regrets:
        """Of the regret in every group, (n, counts)."""
        mean, close = 100.0 * found.mean(axis=0), 100.0 * (found <= CLOSE).mean(axis=0)
        return cls(tuple(round(each, 1) for each in mean.tolist()), tuple(round(each) for each in close.tolist()))


Policy = Callable[[Group, int], list[int]]
"""Places of the layouts that are run, in order, at most COUNTS[-1]; the seed counts where chance does."""


def main() -> None:
    """Writes the page."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python results/tune/regenerate.py RUNS.csv")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    groups = groups_of(Path(sys.argv[1]))
    lines: list[str] = []
    replayed: dict[str, dict[str, Regrets]] = defaultdict(dict)
    for family in dict.fromkeys(group.family for group in groups):
        members = [group for group in groups if group.family == family]
        for name, (policy, seeds) in POLICIES.items():
            found = Regrets.of(np.array([reached(g, policy(g, seed)) for g in members for seed in range(seeds)]))
            replayed[family][name] = found
            cells = [f"{mean:.1f} % · {close:.0f} %" for mean, close in zip(found.mean, found.close, strict=True)]
            lines.append(f"| {family} | {name} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    (HERE / "README.md").write_text(page(groups, lines, stopping(groups), conclusions(replayed)), encoding="utf-8")


def groups_of(path: Path) -> list[Group]:
    """Groups of one problem and software with enough layouts that ran; repeats of a layout are one, of median time."""
    shared: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
    for outcome in measured_of(read_runs(path), read_shapes(path.parent / "models.json")):
        known = outcome.measured_step_time_s or outcome.run.status in ("oom", "fail")
        if outcome.job is not None and not outcome.excluded and known:
            shared[(outcome.run.family, outcome.run.text("software"), *problem_key(outcome.job))].append(outcome)
    found = [_group(rows) for rows in shared.values()]
    large = [group for group in found if np.isfinite(group.measured_s).sum() >= LEAST]
    kept = []
    for family in dict.fromkeys(group.family for group in large):
        members = [group for group in large if group.family == family]
        kept += members[:: -(-len(members) // MOST_OF_SMALL)] if family == "vtrain-single" else members
    return kept


def _group(rows: Sequence[Outcome]) -> Group:
    layouts: dict[str, list[Outcome]] = defaultdict(list)
    for row in rows:
        if row.job is not None:
            layouts[row.job.layout.model_dump_json()].append(row)
    kept = []
    for same in layouts.values():
        times = [row.measured_step_time_s for row in same if row.measured_step_time_s]
        ran = next((row for row in same if row.measured_step_time_s), same[0])
        kept.append(replace(ran, measured_step_time_s=float(np.median(times)) if times else None))
    return Group(
        rows[0].run.family,
        tuple(kept),
        LayoutTable.from_layouts([row.job.layout for row in kept if row.job is not None]),
        np.array([row.measured_step_time_s or np.inf for row in kept]),
        np.array([not row.measured_step_time_s and row.run.status == "oom" for row in kept]),
    )


def reached(group: Group, order: Sequence[int]) -> Floats:
    """Regret after each of COUNTS runs: the best so far over the best measured, less one; the slowest counts while none has run."""
    ran = group.measured_s[np.isfinite(group.measured_s)]
    so_far = np.minimum.accumulate(np.minimum(group.measured_s[list(order)], ran.max()))
    return np.array([so_far[min(count, len(so_far)) - 1] / ran.min() - 1.0 for count in COUNTS])


@cache
def ours(group: Group, calibrated: bool = True, learning: bool = True) -> tuple[list[int], list[float]]:
    """The proposals of paraplan tune and what each was expected to gain; without `learning` in the order of the first
    predictions alone."""
    order: list[int] = []
    gains: list[float] = []
    predicted, full = group.documented
    for _ in range(min(COUNTS[-1], len(group.measured_s))):
        ran = [i for i in order if np.isfinite(group.measured_s[i])]
        if calibrated and learning and len(ran) >= CALIBRATED_FROM and order[-1] == ran[-1]:
            predicted, full = group.priced(ran)
        found = forecast(ledger_of(group, order if learning else [], predicted, full, [] if learning else order))
        if found.exhausted:  # what is left fills a device as one that ran out does
            break
        gains.append(float(found.gain[found.best]) if ran else np.inf)
        order.append(found.best)
    return order, gains


def ledger_of(group: Group, told: Sequence[int], predicted: Floats, full: Floats, passed_over: Sequence[int]) -> Ledger:
    """The group with the results of those told; the others that were run are only not to be run again."""
    ran = [i for i in told if np.isfinite(group.measured_s[i])]
    out = [i for i in told if group.out_of_memory[i]]
    failed = [i for i in told if i not in ran and i not in out]
    places = [np.array(each, dtype=np.intp) for each in (ran, out, [*failed, *passed_over])]
    return Ledger(
        table=group.table,
        predicted_s=predicted,
        full=full,
        ran=places[0],
        measured_s=group.measured_s[ran],
        out_of_memory=places[1],
        failed=places[2],
        pending=np.array([], dtype=np.intp),
    )


def tpe(group: Group, seed: int, seeded: bool) -> list[int]:
    """Optuna's TPE over the coordinates of the group's layouts; what it asks for is taken as the nearest that was not run.

    `seeded`: it is told the predictions of all layouts that are predicted to fit, and starts from the fastest of them.
    """
    points = features(group.table)
    points = points[:, np.ptp(points, axis=0) > 0]
    choices = {
        str(axis): optuna.distributions.CategoricalDistribution(np.unique(points[:, axis]).tolist())
        for axis in range(points.shape[1])
    }
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    study = optuna.create_study(sampler=sampler)

    def tell(place: int, value: float) -> None:
        params = {str(axis): float(x) for axis, x in enumerate(points[place])}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=choices, value=value))

    order = [] if seeded else at_random(group, seed)[:STARTUP]
    scale, slowest = 1.0, group.measured_s[np.isfinite(group.measured_s)].max()
    predicted, full = group.documented
    if seeded:
        for place in np.flatnonzero(full <= 1.0):
            tell(int(place), float(predicted[place]))
        order.append(int(np.argmin(np.where(full <= 1.0, predicted, np.inf))))
    for place in order[:-1]:
        tell(place, float(min(group.measured_s[place], PENALTY * slowest)))
    while len(order) < min(COUNTS[-1], len(points)):
        last = group.measured_s[order[-1]]
        if seeded and scale == 1.0 and np.isfinite(last):
            scale = float(predicted[order[-1]] / last)
        tell(order[-1], float(min(last, PENALTY * slowest) * scale))
        asked = study.ask(choices)
        far = np.abs(points - [asked.params[str(axis)] for axis in range(points.shape[1])]).sum(axis=1)
        far[order] = np.inf
        study.tell(asked, state=optuna.trial.TrialState.FAIL)  # the nearest is told in its place
        order.append(int(np.argmin(far)))
    return order


def at_random(group: Group, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).permutation(len(group.measured_s))[: COUNTS[-1]]]


LOOP, ALONE, TOLD = "paraplan tune", "predictions alone", "TPE told the predictions"
POLICIES: dict[str, tuple[Policy, int]] = {
    LOOP: (lambda group, _: ours(group)[0], 1),
    "without calibration": (lambda group, _: ours(group, calibrated=False)[0], 1),
    ALONE: (lambda group, _: ours(group, learning=False)[0], 1),
    TOLD: (lambda group, seed: tpe(group, seed, True), SEEDS),
    "TPE": (lambda group, seed: tpe(group, seed, False), SEEDS),
    "random": (at_random, 25 * SEEDS),
}


def stopping(groups: Sequence[Group]) -> str:
    """Where the advice to stop would have ended it."""
    counts, regrets = [], []
    for group in groups:
        order, gains = ours(group)
        results = np.cumsum([0, *np.isfinite(group.measured_s[order])])
        stops = (place for place, gain in enumerate(gains) if gain < STOP and results[place] >= LEAST_TO_STOP)
        count = next(stops, len(order))
        counts.append(count)
        so_far = group.measured_s[order[:count]].min()
        regrets.append(so_far / group.measured_s.min() - 1.0)
    return (
        f"The advice to stop (an expected gain below {100 * STOP:.0f} %, after {LEAST_TO_STOP} results or more) comes after "
        f"{np.median(counts):.0f} runs at the median ({min(counts)} to {max(counts)}, of at most {COUNTS[-1]}), with a regret of "
        f"{100 * np.mean(regrets):.1f} % on average and {100 * np.max(regrets):.1f} % at worst."
    )


def conclusions(replayed: Mapping[str, Mapping[str, Regrets]]) -> list[str]:
    """What follows from the table, by family and policy, one paragraph of a list each: no figure of it is written by hand."""
    first = {name: _of_each(replayed, name, 1) for name in (ALONE, "random")}
    said = [
        f"The predictions alone put a layout first that is within {100 * CLOSE:.0f} % of the best in {first[ALONE]} of groups; a "
        f"random pick is that in {first['random']}, and the best of {COUNTS[-1]} runs of TPE alone in "
        f"{_of_each(replayed, 'TPE', COUNTS[-1])}.",
        *(f"After {count} runs, learning {_changed(replayed, count)}, beside the order of the predictions." for count in (2, 5)),
        f"Calibrating the stack's figures as well {_calibrating(replayed)}; proposals rest on calibrated figures from "
        f"{CALIBRATED_FROM} runs on.",
        "That number and the width of the residuals were chosen on these very groups.",
        f"Optuna's TPE told the predictions has a lower mean regret than the loop {_lower(replayed, TOLD, LOOP)}, and TPE alone "
        f"than TPE told the predictions {_lower(replayed, 'TPE', TOLD)}.",
        "Optuna's Gaussian process is not replayed here; results/engines.md compares it with others on searches.",
        "The band in which memory is unsure was read from published runs too, Aleph Alpha's among them. No published group has "
        "enough layouts of a model of hundreds of billions of parameters, or of one with experts.",
        "The advice to stop looks one run ahead: it comes early where a whole region is misjudged.",
    ]
    return ["- " + "\n  ".join(wrap(words, LINE)) for words in said]


def _of_each(replayed: Mapping[str, Mapping[str, Regrets]], policy: str, count: int) -> str:
    """«69 % (aleph-alpha), 50 % (vtrain-single)»: the share of each family's groups that came close after so many runs."""
    place = COUNTS.index(count)
    return ", ".join(f"{found[policy].close[place]:.0f} % ({family})" for family, found in replayed.items())


def _changed(replayed: Mapping[str, Mapping[str, Regrets]], count: int) -> str:
    """Where the loop's mean regret is less than without learning, where it is more, and where it is the same."""
    place = COUNTS.index(count)
    ways: dict[str, list[str]] = {"lowers the mean regret": [], "raises it": [], "leaves it as it is": []}
    for family, found in replayed.items():
        without, learnt = found[ALONE].mean[place], found[LOOP].mean[place]
        way = list(ways)[0 if learnt < without else 1 if learnt > without else 2]
        ways[way].append(f"{family} ({without:.1f} % to {learnt:.1f} %)")
    return "; ".join(f"{way} on {', '.join(families)}" for way, families in ways.items() if families)


def _calibrating(replayed: Mapping[str, Mapping[str, Regrets]]) -> str:
    """By how much calibration changes the mean regret at most, and where."""
    pairs = [(family, found[LOOP].mean, found["without calibration"].mean) for family, found in replayed.items()]
    changes = [(own[i] - other[i], family, count) for family, own, other in pairs for i, count in enumerate(COUNTS)]
    most, family, count = max(changes, key=lambda change: abs(change[0]))
    if not most:
        return "changes no mean regret"
    return f"changes the mean regret by {most:+.1f} points at most, on {family} after {count} runs"


def _lower(replayed: Mapping[str, Mapping[str, Regrets]], policy: str, other: str) -> str:
    """Where one policy's mean regret is less than another's."""
    places = []
    for family, found in replayed.items():
        pairs = zip(COUNTS, found[policy].mean, found[other].mean, strict=True)
        counts = [str(count) for count, mine, theirs in pairs if mine < theirs]
        places += [f"on {family} after {', '.join(counts)} runs"] if counts else []
    return "; ".join(places) or "nowhere"


def page(groups: Sequence[Group], lines: Sequence[str], stop: str, follows: Sequence[str]) -> str:
    """The page: what was replayed, the table, what follows from it."""
    sizes = []
    for family in dict.fromkeys(group.family for group in groups):
        members = [group for group in groups if group.family == family]
        layouts, ran = (sum(len(g.measured_s) for g in members), sum(int(np.isfinite(g.measured_s).sum()) for g in members))
        sizes.append(f"| {family} | {len(members)} | {layouts} | {ran} |")
    head = " | ".join(str(count) for count in COUNTS)
    return "\n".join(
        [
            INTRODUCTION,
            "",
            "| family | groups | layouts | of which ran |",
            "|---|---:|---:|---:|",
            *sizes,
            "",
            "## Regret after so many runs",
            "",
            f"| family | how layouts are chosen | {head} |",
            f"|---|---|{'---:|' * len(COUNTS)}",
            *lines,
            "",
            stop,
            "",
            "## What follows",
            "",
            *follows,
            "",
        ]
    )


INTRODUCTION = f"""# Tuning replayed on published runs

`python results/tune/regenerate.py RUNS.csv` writes this page.

Groups of published runs that share model, devices, batch, stack and software, with {LEAST} or more layouts that ran (of the
many small groups of vtrain-single every few). Only measured layouts may be proposed; a layout's result is what was measured of it
(the median of repeats); one that ran out of memory or crashed is a run that yields nothing. Predictions start from the stacks'
documented figures, none of them fitted to any run, and are calibrated by nothing but the runs told in the replay.

Cells: mean regret (best step time found so far over the best measured in the group, less one; while nothing has run, the slowest
counts) · share of groups where it is at most {100 * CLOSE:.0f} %. TPE is Optuna's, after {STARTUP} runs at random, over
{SEEDS} seeds."""


if __name__ == "__main__":
    main()

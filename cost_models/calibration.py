"""What measured runs say about a software stack on an accelerator: a robust fit of a few of its named figures.

Many runs are fitted by themselves (many_runs.py), few under what other stacks let expect (few_runs.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..search_spaces.cluster import Figure, Grade
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Floats
from .few_runs import doubts_of, few_runs
from .intervals import COVERAGE, Kind, Residuals, Stranger, intervals_of
from .many_runs import Search
from .parameters import FEW_ROWS, PARAMETERS, Fit, Parameter, centres, movable, start_of, summary
from .pooling import TOLD_BY_ONE_RUN, Pair, Pool, Prior, Seen
from .profile import Intervals, load_profile
from .run_clusters import cluster_of, placed
from .run_files import read_runs, some_ids
from .run_layouts import stack_of, with_one_stack_each
from .run_models import Shape, read_shapes
from .run_statistics import Errors, errors
from .runs import Run, Unpriceable
from .trials import Priced
from .validation import Outcome, measured_of, problem_key

MOST_PARAMETERS = 6
"""More are not identified by one sweep: the rest keep the stack's own figures."""
ROWS_PER_PARAMETER = 4  # fewer, and a figure follows single rows
FEWEST_TO_JUDGE = 10  # fewer runs cannot tell what a fit to them is worth
MANY_ROWS = 20
"""Rows from which a pair's figures start from the documented ones; with fewer, from what other pairs let expect."""
KEPT = "as documented: a fit predicted runs that were left out no better"
POOLED = "pooled from other stacks and accelerators; these runs say little of it"
UNEXPLAINED = 2.0
"""Measured over predicted after the fit, or the reverse, beyond which a run is named: no fit within physical bounds came near."""
MOST_REASONS = 3  # that an error quotes, each with a row
LEAST_LEARNT = 0.1  # share of its prior's variance below which a figure is left as it was


@dataclass(frozen=True)
class Calibration:
    """What `rows` runs say of one stack on one accelerator.

    `confounded`: pairs of parameters whose estimates are correlated beyond CONFOUNDED. `before` and `after`: errors on the same
    rows with the stack's own figures and with the fitted ones.
    """

    stack: str
    accelerator: str
    framework: str
    rows: int
    families: tuple[str, ...]
    fits: tuple[Fit, ...]
    confounded: tuple[tuple[str, str, float], ...]
    before: Errors
    after: Errors
    residuals: Residuals
    unexplained: tuple[tuple[str, float], ...] = ()  # ids of runs off by more than UNEXPLAINED after the fit; measured/predicted
    clusters: tuple[str, ...] = ()  # that the runs were made on: ClusterSpec.rates
    guessed: tuple[str, ...] = ()  # software that the stack is only the nearest of; "" where a run names none

    def figures(self) -> dict[str, Figure]:
        """The fitted figures as a stack or a profile holds them."""
        source = f"fitted on {self.rows} {'run' if self.rows == 1 else 'runs'} of {', '.join(self.families)}"
        return {fit.name: _figure(fit, KEPT if fit.kept else source if fit.learnt >= LEAST_LEARNT else POOLED) for fit in self.fits}

    @property
    def pair(self) -> Pair:
        return Pair(self.stack, self.framework, self.accelerator)


@dataclass(frozen=True)
class Calibrations:
    """Every pair's calibration in order, what they let expect of pairs that nobody measured, and intervals of step times."""

    pairs: tuple[Calibration, ...]
    pools: Mapping[str, Pool]
    intervals: Intervals
    unused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ids of rows to fit that have no say, by reason
    site: bool = False  # whether the figures start from shipped ones, as a site's do

    def __iter__(self) -> Iterator[Calibration]:
        return iter(self.pairs)


Progress = Callable[[float], None]


def calibrate(
    path: Path,
    stack: str | None = None,
    site: bool = False,
    profile: str | None = None,
    progress: Progress | None = None,
    cluster: str | None = None,
) -> Calibrations:
    """Fits every stack and accelerator of a CSV of measured runs to its rows with split `fit`.

    Figures start from the stack's documented ones. With `site` they start from those fitted to published runs, rows without a
    split are a site's own and count too, and software that is not known by name is one stack, however its rows shard; rows marked
    `test` are never looked at. `stack` names the only one to fit; `profile`
    is a YAML laid over the accelerators' curves; `cluster` is where rows ran that name no cluster. InputError where there is
    nothing to fit.
    """
    usable = ("fit", "") if site else ("fit",)
    every = placed(read_runs(path, located=cluster is not None), path.parent, cluster)
    every = with_one_stack_each(every) if site else every
    runs = [run for run in every if run.text("split").lower() in usable]
    if not runs:
        hint = "" if site else "; --site takes rows without a split"
        raise InputError(f"{path}: no row has split 'fit'{hint}")
    return calibrate_runs(runs, read_shapes(path.parent / "models.json"), stack, profile, progress, str(path), site)


def calibrate_runs(
    runs: Sequence[Run],
    shapes: Mapping[str, Shape],
    stack: str | None = None,
    profile: str | None = None,
    progress: Progress | None = None,
    origin: str = "runs",
    shipped: bool = True,
) -> Calibrations:
    """The same for rows at hand, whatever their split; with `shipped` from the figures that were fitted to published runs.

    Rows under a structural exclusion have no say.
    """
    outcomes = measured_of(runs, shapes)
    families = _by_pair(outcomes)
    wanted = {key: rows for key, rows in families.items() if stack in (None, key[0])}
    if not wanted and families:
        there = ", ".join(sorted({name for name, _ in families}))
        raise InputError(f"{origin}: no run of stack {stack!r} has a step time to fit; there are runs of {there}")
    if not wanted:
        raise InputError(f"{origin}: no row to fit can be priced and has a step time ({_quoted(_unused(outcomes))})")
    asked = [outcome for outcome in outcomes if stack is None or stack_name(outcome) == stack]
    return replace(fit_pairs(wanted, profile, shipped, progress), unused=_unused(asked))


def stack_name(outcome: Outcome) -> str | None:
    """The stack that a row's words stand for, whether it can be priced or not; None where they do not tell."""
    if outcome.job is not None:
        return outcome.job.problem.stack.name
    try:
        return stack_of(outcome.run, cluster_of(outcome.run))[0]
    except Unpriceable:
        return None


def _unused(outcomes: Sequence[Outcome]) -> dict[str, tuple[str, ...]]:
    """Ids of rows that have no say, by reason, the commonest first."""
    found: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if not _has_say(outcome):
            found[outcome.why_not_counted or "no step time"].append(outcome.run.id)
    return {reason: tuple(ids) for reason, ids in sorted(found.items(), key=lambda each: -len(each[1]))}


def _quoted(unused: Mapping[str, Sequence[str]]) -> str:
    """The first reasons, each with its rows."""
    said = [f"{some_ids(ids)}: {reason}" for reason, ids in unused.items()]
    more = len(said) - MOST_REASONS
    return "; ".join(said[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")


def pairs_of(runs: Sequence[Run], shapes: Mapping[str, Shape]) -> dict[tuple[str, str], list[Outcome]]:
    """Runs that have a step time and are counted, by stack and accelerator."""
    return _by_pair(measured_of(runs, shapes))


def _has_say(outcome: Outcome) -> bool:
    return bool(outcome.job is not None and outcome.measured_step_time_s and not outcome.excluded)


def _by_pair(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.job is not None and _has_say(outcome):
            problem = outcome.job.problem
            found[problem.stack.name, problem.cluster.accelerator.priced_as].append(outcome)
    return found


Pairs = Mapping[tuple[str, str], Sequence[Outcome]]


def fit_pairs(pairs: Pairs, profile: str | None = None, shipped: bool = True, progress: Progress | None = None) -> Calibrations:
    """Fits rows by stack and accelerator: those with many first, and what they say is where the others start from.

    With `shipped`, pairs start from the profile's figures, pooled ones among them, and are not pooled again.
    """
    found: dict[tuple[str, str], Calibration] = {}
    pools: dict[str, Pool] = {}
    waiting = [key for key, rows in pairs.items() if shipped or len(rows) < FEW_ROWS]
    for key in (key for key in pairs if key not in waiting):
        found[key] = fit(pairs[key], profile, shipped)
        if progress is not None:
            progress(len(found) / len(pairs))
    pools = pools_of(tuple(found.values()))
    middling = [key for key in found if len(pairs[key]) < MANY_ROWS]
    for key in (*waiting, *middling):
        expected = priors_of(pools, pair_of(pairs[key]))
        priors = {name: prior for name, prior in expected.items() if name not in TOLD_BY_ONE_RUN}
        found[key] = fit(pairs[key], profile, shipped, priors=priors)
        if progress is not None:
            progress(len(found) / len(pairs))
    new = [] if shipped else strangers(pairs, pools, profile)
    known = _typical(pairs, profile) if shipped else {}
    intervals = intervals_of([each.residuals for each in found.values()], new, known)
    return Calibrations(tuple(found[key] for key in pairs), pools, intervals, site=shipped)


def _typical(pairs: Pairs, profile: str | None) -> Mapping[Kind, float]:
    """What the profile says of runs in general, which a site's few runs do not."""
    accelerator = next(accelerator for _, accelerator in pairs)
    return load_profile(accelerator, profile).intervals.typical


def strangers(pairs: Pairs, pools: Mapping[str, Pool], profile: str | None = None) -> list[Stranger]:
    """Residuals of every family's runs with figures pooled from pairs that it did not run on."""
    families: dict[str, dict[Pair, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for rows in pairs.values():
        for outcome in rows:
            families[outcome.run.family][pair_of(rows)].append(outcome)
    return [_stranger(own, {name: pool.without(*own) for name, pool in pools.items()}, profile) for own in families.values()]


def _stranger(own: Mapping[Pair, Sequence[Outcome]], pools: Mapping[str, Pool], profile: str | None) -> Stranger:
    """One family's runs by pair, priced with what `pools` of other pairs let expect."""
    found = []
    for pair, rows in own.items():
        runs = Priced(rows, profile, shipped=False)
        found.append(np.log(runs.measured / runs.predict(centres(priors_of(pools, pair), runs))))
    moe = [outcome.job is not None and outcome.job.problem.model.is_moe for rows in own.values() for outcome in rows]
    return Stranger(np.concatenate(found), np.array(moe))


def pools_of(calibrations: Sequence[Calibration]) -> dict[str, Pool]:
    """What pairs with many rows say of each figure that is pooled."""
    pooled = {p.name: p for p in PARAMETERS if p.shares}
    seen: dict[str, list[Seen]] = {name: [] for name in pooled}
    for found in calibrations:
        for one in found.fits if found.rows >= FEW_ROWS else ():
            if one.name in seen:
                variance = pooled[one.name].spread ** 2 * max(1.0 - one.learnt, 0.0)
                seen[one.name].append(Seen(found.pair, math.log(one.value / one.prior), variance))
    return {p.name: Pool(tuple(seen[p.name]), min(p.spread, p.between), p.shares) for p in pooled.values() if seen[p.name]}


def priors_of(pools: Mapping[str, Pool], pair: Pair) -> dict[str, Prior]:
    """Priors of a pair's figures from what was seen on the other pairs."""
    return {name: pool.without(pair).prior(pair) for name, pool in pools.items()}


def pair_of(outcomes: Sequence[Outcome]) -> Pair:
    """The stack and accelerator of outcomes that share them."""
    job = outcomes[0].job
    assert job is not None
    stack = job.problem.stack
    return Pair(stack.name, stack.framework, job.problem.cluster.accelerator.priced_as)


def fit(
    outcomes: Sequence[Outcome],
    profile: str | None = None,
    shipped: bool = False,
    parameters: Sequence[Parameter] = PARAMETERS,
    priors: Mapping[str, Prior] | None = None,
) -> Calibration:
    """The figures of one stack on one accelerator that explain measured step times best; outcomes must all be of that pair.

    `priors` say what other pairs let expect; a figure that they move stands in the answer whether the runs say anything of it or
    not. With few runs every figure is free within its prior, so that the one moves by which a run is bound; with more, those
    that move the predictions most.
    """
    runs = Priced(outcomes, profile, shipped)
    few = len(outcomes) < (FEW_ROWS if priors is None else MANY_ROWS)
    priors = priors or {}
    found = _learnt(outcomes, runs, priors, parameters) if few else _fitted(outcomes, runs, priors, parameters)
    moved = {name for name, prior in priors.items() if prior.shift} | runs.pooled
    told = {parameters[0].name, *moved, *(f.name for f in found.fits if few and f.value != f.prior)}
    fits = tuple(f for f in found.fits if f.learnt >= LEAST_LEARNT or f.name in told)
    pair, before = pair_of(outcomes), runs.predict({})
    residuals = _residuals(outcomes, found)
    own = np.log(runs.measured / before)
    if not earns_its_figures(own, found.left_out, runs.weights):
        scalar = _fitted(outcomes, runs, {}, parameters[:1])
        single = earns_its_figures(own, scalar.left_out, runs.weights)
        alone = {one.name: one for one in scalar.fits} if single else {}
        fits = tuple(alone.get(fit.name) or _kept(fit, runs.figures[fit.name]) for fit in fits)
        residuals = replace(residuals, values=tuple((scalar.left_out if single else own).tolist()))
    after = runs.predict({fit.name: fit.value for fit in fits})
    if few or shipped:  # a published stack's many runs are taken as they are: their tail is its own
        residuals = residuals.without(slips_among(runs.measured / after))
    return Calibration(
        pair.stack,
        pair.accelerator,
        pair.framework,
        len(outcomes),
        tuple(dict.fromkeys(o.run.family for o in outcomes)),
        fits,
        found.confounded,
        _errors(before, runs.measured),
        _errors(after, runs.measured),
        residuals,
        _unexplained(outcomes, runs.measured / after),
        tuple(dict.fromkeys(o.job.problem.cluster.rates for o in outcomes if o.job is not None)),
        tuple(dict.fromkeys(o.run.text("software") for o in outcomes if o.job is not None and not o.job.stack_told)),
    )


def slips_among(ratios: Floats) -> npt.NDArray[np.bool_]:
    """Which runs are so few and so far off, by measured over predicted after the fit, that they are taken for slips, (n,).

    An interval that is to hold a share of runs leaves the others out anyway; more of them say that the figures are wrong.
    """
    off = np.abs(np.log(ratios)) > math.log(UNEXPLAINED)
    count, least = off.sum(), min(COVERAGE * len(off), len(off) - 1)  # runs that are explained: one slip is one even among three
    return np.asarray(off if len(off) - count >= least and 2 * count < len(off) else np.zeros_like(off))


def _unexplained(outcomes: Sequence[Outcome], ratios: Floats) -> tuple[tuple[str, float], ...]:
    """Runs whose ratio of measured to predicted is beyond UNEXPLAINED, the worst first."""
    off = np.abs(np.log(ratios))
    return tuple((outcomes[i].run.id, float(ratios[i])) for i in np.argsort(-off, kind="stable") if off[i] > math.log(UNEXPLAINED))


@dataclass(frozen=True)
class _Found:
    """What a way of fitting found: `left_out` are log(measured/predicted) without the run's own model or job, (n,).

    `spread` is what the figures' uncertainty makes of the runs' log step times; where rows are many it does not count.
    """

    fits: tuple[Fit, ...]
    confounded: tuple[tuple[str, str, float], ...]
    left_out: Floats
    spread: float = 0.0


def _fitted(outcomes: Sequence[Outcome], runs: Priced, priors: Mapping[str, Prior], parameters: Sequence[Parameter]) -> _Found:
    """Many rows speak for themselves: of the figures that move them most the most likely values."""
    sizes = {outcome.job.problem.devices for outcome in outcomes if outcome.job is not None}
    free = [p for p in movable(parameters, runs) if len(outcomes) >= p.least_rows and len(sizes) >= p.least_sizes]
    free = [p.with_spread(priors[p.name].spread) if p.name in priors else p for p in free]
    search = Search(runs, tuple(free), np.array([start_of(p, runs, priors) for p in free]))
    search = search.only(search.strongest(min(MOST_PARAMETERS, max(2, len(outcomes) // ROWS_PER_PARAMETER))))
    theta, noise = search.solve()
    fits, confounded = search.summary(theta, noise)
    return _Found(fits, confounded, search.left_out(theta, noise, outcomes))


def _learnt(outcomes: Sequence[Outcome], runs: Priced, priors: Mapping[str, Prior], parameters: Sequence[Parameter]) -> _Found:
    """Few rows move what was expected as far as they are to be believed."""
    few = few_runs(outcomes, runs, priors, parameters)
    weights, selection = few.left_out()
    found = few.learn(weights)
    fits, confounded = summary(few.parameters, few.prior.centre, found.theta[0], found.covariance[0])
    left_out = -found.residuals[selection, np.arange(len(selection))]
    return _Found(fits, confounded, left_out, float(np.sqrt(np.mean(found.spread[0] ** 2))))


def _residuals(outcomes: Sequence[Outcome], found: _Found) -> Residuals:
    pair = pair_of(outcomes)
    models = [o.run.text("model") for o in outcomes]
    keys = [problem_key(o.job) if o.job else None for o in outcomes]
    return Residuals(
        pair.stack,
        pair.accelerator,
        tuple(found.left_out.tolist()),
        tuple(o.job is not None and o.job.problem.model.is_moe for o in outcomes),
        tuple(keys.index(key) for key in keys),
        tuple(models.index(model) for model in models),
        math.hypot(found.spread, float(np.median(doubts_of(outcomes)))),
    )


def earns_its_figures(own: Floats, left_out: Floats, weights: Floats) -> bool:
    """Whether fitted figures predict runs that are left out better than the stack's own do, by more than one standard error.

    `own` and `left_out` are residuals (n,) with the former, and with the latter from a fit without the run itself; where they
    cannot be told apart the simpler answer stands (one-standard-error rule, Breiman et al. 1984, section 3.4.3). Too few runs to
    judge by are followed.
    """
    if len(own) < FEWEST_TO_JUDGE:
        return True
    gained = np.abs(own) - np.abs(left_out)
    mean = float(np.average(gained, weights=weights))
    variance = float(np.average((gained - mean) ** 2, weights=weights))
    return mean > math.sqrt(variance / (weights.sum() - 1.0)) if weights.sum() > 1.0 else mean > 0.0


def _kept(found: Fit, own: float) -> Fit:
    """The stack's own figure in place of the fitted one, which did not earn its place."""
    return replace(found, value=own, low=min(found.low, own), high=max(found.high, own), learnt=0.0, at_bound=False, kept=True)


def _errors(predicted: Floats, measured: Floats) -> Errors:
    found = errors(list(zip(predicted.tolist(), measured.tolist(), strict=True)))
    assert found is not None
    return found


def _figure(fit: Fit, source: str) -> Figure:
    """A fitted value; measured is what these runs taught, not what stands because they could not."""
    grade: Grade = "assumed" if source in (KEPT, POOLED) else "measured"
    return Figure(value=fit.value, low=fit.low, high=fit.high, grade=grade, source=source)

"""What measured runs say about a software stack on an accelerator: a robust fit of a few of its named figures.

Residuals are log(predicted/measured). Huber's loss over them and log-normal priors around the stack's own figures are made least
by Levenberg–Marquardt in the logarithms of the figures. Derivatives are cheap here (one more pricing each) and the posterior comes
with the last step, so this takes some tens of pricings where a sampling optimiser takes hundreds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..search_spaces.cluster import Figure
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Floats
from .intervals import Residuals, intervals_of, left_out
from .pooling import SHARES, Pair, Pool, Prior, Seen
from .profile import Intervals
from .run_models import Shape, read_shapes
from .run_statistics import Errors, errors
from .runs import Run, read_runs
from .trials import Priced
from .validation import Outcome, measured_of, problem_key

MOST_PARAMETERS = 6
"""More are not identified by one sweep: the rest keep the stack's own figures."""
ROWS_PER_PARAMETER = 4  # fewer, and a figure follows single rows
HUBER = 1.345  # residuals in units of their spread beyond which a row's pull grows no more (95 % efficient, Huber 1981)
LEAST_NOISE = 0.02  # of log step time: what repeats of one run differ by
FEW_ROWS = 10
FEWEST_TO_JUDGE = 5  # fewer runs cannot tell what a fit to them is worth
FEW_MODELS = 3
MANY_ROWS = 20
"""Rows from which a pair's figures start from the documented ones; with fewer, from what other pairs let expect."""
TYPICAL_NOISE = 0.06
"""What a stack's layouts are off by when one scalar is known: the least with few rows, and the most that the search reckons with,
since with more the priors would hold where the data have not been followed yet."""
STEP = 0.03  # of a logarithm, for derivatives
KEPT = "as documented: a fit predicted runs that were left out no better"
POOLED = "pooled from other stacks and accelerators; these runs say little of it"
DAMPINGS = 5  # of a step, each eight times the one before
SCAN = (-2.0, -1.0, 1.0, 2.0)  # where a parameter is first tried, in units of its prior's width
LEAST_LEARNT = 0.1  # share of its prior's variance below which a figure is left as it was
CONFOUNDED = 0.85  # correlation from which two parameters cannot be told apart
Z95 = 1.96


@dataclass(frozen=True)
class Parameter:
    """A figure of the stack: bounds from physics, width of its log-normal prior, and from how many rows on, and device counts
    among them, it is freed.

    `start` stands in for a stack's figure of 0, which has no logarithm.
    """

    name: str
    low: float
    high: float
    spread: float
    least_rows: int
    start: float = 0.0
    least_sizes: int = 1


PARAMETERS: tuple[Parameter, ...] = (
    # A sustained rate above the kernel measured alone would need a faster grade of the device (Ascend 910B: 376 over 313).
    Parameter("efficiency", 0.2, 1.2, 0.35, 1),
    # A layer launches 30 to 300 kernels at 5 to 30 µs each; experts wait for token counts besides.
    Parameter("host_floor_dense_s", 2e-5, 2e-2, 0.8, 4),
    Parameter("host_floor_moe_s", 5e-5, 5e-2, 1.2, 4),
    # From kernels that write scores out in pieces to a generation newer than the one that the curve was read from.
    Parameter("attention_efficiency", 0.15, 1.6, 0.5, FEW_ROWS),
    # Eager kernels pass over memory up to ten times where a fused one passes once.
    Parameter("elementwise_efficiency", 0.1, 1.3, 0.5, FEW_ROWS),
    # NCCL beside compute that waits for the slowest rank, against the library alone.
    Parameter("scale_up_efficiency", 0.2, 1.3, 0.5, FEW_ROWS),
    # Collectives of many servers meet on shared links, and a site may have fewer or slower NICs than its kind of server.
    Parameter("scale_out_efficiency", 0.05, 1.3, 0.5, FEW_ROWS),
    # From a network that is not blocking to one whose links all of a job's servers share; sizes of jobs tell it.
    Parameter("scale_out_congestion", 0.02, 1.5, 0.6, FEW_ROWS, start=0.1, least_sizes=3),
    # A collective's launch, its stream synchronisation and its bookkeeping: tens to hundreds of microseconds.
    Parameter("host_floor_per_collective_s", 1e-6, 5e-3, 1.0, FEW_ROWS, start=3e-5),
    Parameter("host_floor_pipeline_s", 1e-6, 5e-3, 1.5, FEW_ROWS, start=3e-5),
    Parameter("step_overhead_s", 1e-3, 2.0, 0.7, FEW_ROWS),
)


@dataclass(frozen=True)
class Fit:
    """One fitted figure with its 95 % interval; `prior` is what the stack had, `learnt` the share of the prior's variance gone."""

    name: str
    prior: float
    value: float
    low: float
    high: float
    learnt: float
    at_bound: bool
    kept: bool = False  # the stack's own figure, which runs that were left out follow as well


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
    noise: float
    before: Errors
    after: Errors
    residuals: Residuals

    def figures(self) -> dict[str, Figure]:
        """The fitted figures as a stack or a profile holds them."""
        source = f"fitted on {self.rows} {'run' if self.rows == 1 else 'runs'} of {', '.join(self.families)}"
        sources = {fit.name: KEPT if fit.kept else source if fit.learnt >= LEAST_LEARNT else POOLED for fit in self.fits}
        return {fit.name: _figure(fit.value, sources[fit.name], fit.low, fit.high) for fit in self.fits}

    @property
    def pair(self) -> Pair:
        return Pair(self.stack, self.framework, self.accelerator)


@dataclass(frozen=True)
class Calibrations:
    """Every pair's calibration in order, what they let expect of pairs that nobody measured, and intervals of step times."""

    pairs: tuple[Calibration, ...]
    pools: Mapping[str, Pool]
    intervals: Intervals

    def __iter__(self) -> Iterator[Calibration]:
        return iter(self.pairs)


Progress = Callable[[float], None]


def calibrate(
    path: Path, stack: str | None = None, site: bool = False, profile: str | None = None, progress: Progress | None = None
) -> Calibrations:
    """Fits every stack and accelerator of a CSV of measured runs to its rows with split `fit`.

    Figures start from the stack's documented ones. With `site` they start from those fitted to published runs, and rows without
    a split are a site's own and count too; rows marked `test` are never looked at. `stack` names the only one to fit; `profile`
    is a YAML laid over the accelerators' curves. InputError where there is nothing to fit.
    """
    usable = ("fit", "") if site else ("fit",)
    runs = [run for run in read_runs(path) if run.text("split") in usable]
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
    families = pairs_of(runs, shapes)
    wanted = {key: rows for key, rows in families.items() if stack in (None, key[0])}
    if not wanted and families:
        there = ", ".join(sorted({name for name, _ in families}))
        raise InputError(f"{origin}: no run of stack {stack!r} has a step time to fit; there are runs of {there}")
    if not wanted:
        skipped = next((o.skipped for o in reversed(measured_of(runs, shapes)) if o.skipped), "")
        raise InputError(f"{origin}: no row to fit can be priced and has a step time{f' ({skipped})' if skipped else ''}")
    return fit_pairs(wanted, profile, shipped, progress)


def pairs_of(runs: Sequence[Run], shapes: Mapping[str, Shape]) -> dict[tuple[str, str], list[Outcome]]:
    """Runs that have a step time and are counted, by stack and accelerator."""
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in measured_of(runs, shapes):
        if outcome.job is not None and outcome.measured_step_time_s and not outcome.excluded:
            problem = outcome.job.problem
            found[problem.stack.name, problem.cluster.accelerator.name].append(outcome)
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
        found[key] = fit(pairs[key], profile, shipped, priors=priors_of(pools, pair_of(pairs[key])))
        if progress is not None:
            progress(len(found) / len(pairs))
    enough = [each.residuals for each in found.values() if not shipped or each.rows >= FEW_ROWS]
    unmeasured = [] if shipped else unmeasured_residuals(pairs, pools, profile)
    return Calibrations(tuple(found[key] for key in pairs), pools, intervals_of(enough, unmeasured))


def unmeasured_residuals(pairs: Pairs, pools: Mapping[str, Pool], profile: str | None = None) -> list[Residuals]:
    """Residuals of every pair with figures pooled from the others alone."""
    found = []
    for rows in pairs.values():
        runs, pair = Priced(rows, profile, shipped=False), pair_of(rows)
        start = centres(priors_of(pools, pair), runs)
        moe = tuple(o.job is not None and o.job.problem.model.is_moe for o in rows)
        found.append(Residuals(pair.stack, pair.accelerator, tuple(np.log(runs.measured / runs.predict(start)).tolist()), moe))
    return found


def pools_of(calibrations: Sequence[Calibration]) -> dict[str, Pool]:
    """What pairs with many rows say of each figure that is pooled."""
    spreads = {p.name: p.spread for p in PARAMETERS}
    seen: dict[str, list[Seen]] = {name: [] for name in SHARES}
    for found in calibrations:
        for one in found.fits if found.rows >= FEW_ROWS else ():
            if one.name in seen:
                variance = spreads[one.name] ** 2 * max(1.0 - one.learnt, 0.0)
                seen[one.name].append(Seen(found.pair, math.log(one.value / one.prior), variance))
    return {name: Pool(tuple(ratios), spreads[name], SHARES[name]) for name, ratios in seen.items() if ratios}


def priors_of(pools: Mapping[str, Pool], pair: Pair) -> dict[str, Prior]:
    """Priors of a pair's figures from what was seen on the other pairs."""
    return {name: pool.without(pair).prior(pair) for name, pool in pools.items()}


def pair_of(outcomes: Sequence[Outcome]) -> Pair:
    """The stack and accelerator of outcomes that share them."""
    job = outcomes[0].job
    assert job is not None
    stack = job.problem.stack
    return Pair(stack.name, stack.framework, job.problem.cluster.accelerator.name)


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
    sizes = {outcome.job.problem.devices for outcome in outcomes if outcome.job is not None}
    free = [p for p in _movable(parameters, runs) if (few or len(outcomes) >= p.least_rows) and len(sizes) >= p.least_sizes]
    free = [replace(p, spread=priors[p.name].spread) if p.name in priors else p for p in free]
    start = np.array([_start(p, runs, priors) for p in free])
    search = Search(runs, tuple(free), start)
    if not few:
        search = search.only(search.strongest(min(MOST_PARAMETERS, max(2, len(outcomes) // ROWS_PER_PARAMETER))))
    theta, noise = search.solve()
    fits, confounded = search.summary(theta, noise)
    moved = {name for name, prior in priors.items() if prior.shift} | runs.pooled
    fits = tuple(fit for fit in fits if fit.learnt >= LEAST_LEARNT or fit.name in moved or fit.name == parameters[0].name)
    pair, before = pair_of(outcomes), runs.predict({})
    residuals = search.left_out(theta, noise, outcomes, pair)
    own = np.log(runs.measured / before)
    if not earns_its_figures(own, np.array(residuals.values), runs.weights):
        fits = tuple(_kept(fit, runs.figures[fit.name]) for fit in fits)
        residuals = replace(residuals, values=tuple(own.tolist()))
    after = runs.predict({fit.name: fit.value for fit in fits})
    return Calibration(
        pair.stack,
        pair.accelerator,
        pair.framework,
        len(outcomes),
        tuple(dict.fromkeys(o.run.family for o in outcomes)),
        fits,
        confounded,
        noise,
        _errors(before, runs.measured),
        _errors(after, runs.measured),
        residuals,
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


def centres(priors: Mapping[str, Prior], runs: Priced) -> dict[str, float]:
    """Figures where priors have their centres."""
    return {p.name: math.exp(_start(p, runs, priors)) for p in _movable(PARAMETERS, runs) if p.name in priors}


def _movable(parameters: Sequence[Parameter], runs: Priced) -> list[Parameter]:
    """Those that have a logarithm: under CUDA graphs no layer has a floor."""
    return [p for p in parameters if runs.figures[p.name] or p.start]


def _start(parameter: Parameter, runs: Priced, priors: Mapping[str, Prior]) -> float:
    shift = priors[parameter.name].shift if parameter.name in priors else 0.0
    value = math.log(runs.figures[parameter.name] or parameter.start) + shift
    return min(max(value, math.log(parameter.low)), math.log(parameter.high))


def _kept(found: Fit, own: float) -> Fit:
    """The stack's own figure in place of the fitted one, which did not earn its place."""
    return replace(found, value=own, low=min(found.low, own), high=max(found.high, own), learnt=0.0, at_bound=False, kept=True)


def _errors(predicted: Floats, measured: Floats) -> Errors:
    found = errors(list(zip(predicted.tolist(), measured.tolist(), strict=True)))
    assert found is not None
    return found


def _figure(value: float, source: str, low: float, high: float) -> Figure:
    return Figure(value=value, low=low, high=high, grade="measured", source=source)


@dataclass(frozen=True)
class Search:
    """The least of Huber's loss and priors over the logarithms of `parameters`, which start at their priors' centres, (p,)."""

    runs: Priced
    parameters: tuple[Parameter, ...]
    start: Floats

    def only(self, places: Sequence[int]) -> Search:
        """The search over some of the parameters."""
        return replace(self, parameters=tuple(self.parameters[i] for i in places), start=self.start[list(places)])

    def values(self, theta: Floats) -> dict[str, float]:
        """The stack's figures at a point."""
        return {p.name: float(math.exp(t)) for p, t in zip(self.parameters, theta, strict=True)}

    def residuals(self, points: Sequence[Floats]) -> Floats:
        """log(predicted/measured) at some points, (points, n)."""
        names = [p.name for p in self.parameters]
        return np.asarray(np.log(self.runs.predict_all(names, np.exp(np.array(points))) / self.runs.measured))

    @property
    def _spreads(self) -> Floats:
        return np.array([p.spread for p in self.parameters])

    def strongest(self, count: int) -> list[int]:
        """Places of the parameters that move the predictions most within their priors; the first always counts."""
        if len(self.parameters) <= 1:
            return [0]
        ends = [(place, step * p.spread) for place, p in enumerate(self.parameters) if place for step in (-1.0, 2.0)]
        found = self.residuals([self.start, *(self._moved(self.start, *end) for end in ends)])
        sizes = np.sqrt(np.mean((found[1:] - found[0]) ** 2, axis=1)).reshape(-1, 2).max(axis=1)
        moved = [np.inf, *sizes.tolist()]
        ranked = sorted(range(len(moved)), key=lambda place: -moved[place])
        return sorted(place for place in ranked[:count] if moved[place] > LEAST_NOISE / 10)

    def _moved(self, theta: Floats, place: int, step: float) -> Floats:
        found = theta.copy()
        found[place] += step
        return self._inside(found)

    def _inside(self, theta: Floats) -> Floats:
        return np.clip(theta, np.log([p.low for p in self.parameters]), np.log([p.high for p in self.parameters]))

    def noise(self, residuals: Floats) -> float:
        """Spread of the residuals, robustly; never less than repeats differ by."""
        least = LEAST_NOISE if len(residuals) >= FEW_ROWS else TYPICAL_NOISE
        return max(least, 1.4826 * float(np.median(np.abs(residuals - np.median(residuals)))))

    def loss(self, theta: Floats, residuals: Floats, noise: float) -> float:
        """Negative log posterior, up to a constant."""
        size = np.abs(residuals) / noise
        huber = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(self.runs.weights @ huber + (((theta - self.start) / self._spreads) ** 2).sum() / 2)

    def solve(self, rounds: int = 12) -> tuple[Floats, float]:
        """The best point, and the spread of the residuals there."""
        theta, residuals = self._scanned()
        damping = 1e-2
        for _ in range(rounds):
            noise = min(self.noise(residuals), TYPICAL_NOISE)
            least = self.loss(theta, residuals, noise)
            slope, curvature = self._normal(theta, residuals, noise)
            # All dampings that would be tried one after the other are priced at once; the first that gains is taken.
            dampings = damping * 8.0 ** np.arange(DAMPINGS)
            steps = [np.linalg.solve(curvature + d * np.diag(np.diag(curvature)), -slope) for d in dampings]
            trials = [self._inside(theta + np.clip(step, -1.0, 1.0)) for step in steps]
            tried = self.residuals(trials)
            gains = [least - self.loss(*trial, noise) for trial in zip(trials, tried, strict=True)]
            taken = next((place for place, gain in enumerate(gains) if gain > 0), None)
            if taken is None:
                break
            theta, residuals, damping = trials[taken], tried[taken], dampings[taken] / 4
            if gains[taken] < 1e-3:
                break
        return theta, self.noise(residuals)

    def _scanned(self) -> tuple[Floats, Floats]:
        """A start beyond flat stretches: a floor that no kernel time falls below has no derivative."""
        theta, residuals = self.start, self.residuals([self.start])[0]
        for place, parameter in enumerate(self.parameters if len(self.parameters) > 1 else ()):
            there = np.arange(len(theta)) == place
            trials = [np.where(there, self._moved(self.start, place, step * parameter.spread), theta) for step in SCAN]
            for trial, tried in zip(trials, self.residuals(trials), strict=True):
                noise = min(max(self.noise(residuals), self.noise(tried)), TYPICAL_NOISE)
                if self.loss(trial, tried, noise) < self.loss(theta, residuals, noise):
                    theta, residuals = trial, tried
        return theta, residuals

    def _normal(self, theta: Floats, residuals: Floats, noise: float) -> tuple[Floats, Floats]:
        """Gradient (p,) and Gauss–Newton curvature (p, p) of the loss; rows beyond HUBER pull with less weight."""
        jacobian, weights = self._linear(theta, residuals, noise)
        prior = 1.0 / self._spreads**2
        slope = jacobian.T @ (weights * residuals) + prior * (theta - self.start)
        return slope, (jacobian.T * weights) @ jacobian + np.diag(prior)

    def _linear(self, theta: Floats, residuals: Floats, noise: float) -> tuple[Floats, Floats]:
        """Derivatives of the residuals (n, p), and the weights with which rows pull, (n,)."""
        at_top = theta + STEP > np.log([p.high for p in self.parameters])
        steps = np.where(at_top, -STEP, STEP)
        moved = self.residuals([self._moved(theta, place, step) for place, step in enumerate(steps)])
        jacobian = ((moved - residuals) / steps[:, None]).T
        size = np.maximum(np.abs(residuals) / noise, 1e-12)
        return jacobian, self.runs.weights * np.minimum(1.0, HUBER / size) / noise**2

    def left_out(self, theta: Floats, noise: float, outcomes: Sequence[Outcome], pair: Pair) -> Residuals:
        """Residuals of every model's runs when they are left out of the fit; of every run alone where there are few models."""
        residuals = self.residuals([theta])[0]
        jacobian, weights = self._linear(theta, residuals, noise)
        curvature = (jacobian.T * weights) @ jacobian + np.diag(1.0 / self._spreads**2)
        models = [o.run.text("model") for o in outcomes]
        few = len(set(models)) < FEW_MODELS  # without one of two, the fit would be half of itself
        found = left_out(residuals, jacobian, weights, curvature, [o.run.id for o in outcomes] if few else models)
        moe = tuple(o.job is not None and o.job.problem.model.is_moe for o in outcomes)
        keys = [problem_key(o.job) if o.job else None for o in outcomes]
        problems = tuple(keys.index(key) for key in keys)
        return Residuals(pair.stack, pair.accelerator, tuple((-found).tolist()), moe, problems)

    def summary(self, theta: Floats, noise: float) -> tuple[tuple[Fit, ...], tuple[tuple[str, str, float], ...]]:
        """Fitted figures with intervals, and pairs that the data cannot tell apart, from the curvature at the optimum."""
        _, curvature = self._normal(theta, self.residuals([theta])[0], noise)
        covariance = np.linalg.inv(curvature)
        spread = np.sqrt(np.diag(covariance))
        fits = []
        for p, t, sd, centre in zip(self.parameters, theta, spread, self.start, strict=True):
            low, high = (min(max(math.exp(t + z * sd), p.low), p.high) for z in (-Z95, Z95))
            at_bound = abs(t - math.log(p.low)) < 1e-6 or abs(t - math.log(p.high)) < 1e-6
            values = [_rounded(x) for x in (math.exp(centre), math.exp(t), low, high)]
            learnt = 1.0 - float(sd / p.spread) ** 2
            fits.append(Fit(p.name, values[0], values[1], min(values[1:]), max(values[1:]), learnt, at_bound))
        correlation = covariance / np.outer(spread, spread)
        pairs = [(i, j) for i in range(len(theta)) for j in range(i) if abs(correlation[i, j]) > CONFOUNDED]
        named = tuple((self.parameters[j].name, self.parameters[i].name, float(correlation[i, j])) for i, j in pairs)
        return tuple(fits), named


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")

"""What measured runs say about a software stack on an accelerator: a robust fit of a few of its named figures.

Residuals are log(predicted/measured). Huber's loss over them and log-normal priors around the stack's own figures are made least
by Levenberg–Marquardt in the logarithms of the figures. Derivatives are cheap here (one more pricing each) and the posterior comes
with the last step, so this takes some tens of pricings where a sampling optimiser takes hundreds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..search_spaces.cluster import Figure
from ..search_spaces.errors import InputError
from ..search_spaces.layout import Floats, LayoutTable, Problem
from ..search_spaces.stack import CALIBRATED
from .profile import Profile
from .run_models import Shape, read_shapes
from .run_statistics import Errors, errors
from .runs import Run, read_runs
from .step import CostModel
from .validation import Outcome, outcomes_of, problem_key, profile_of, without_fits

MOST_PARAMETERS = 6
"""More are not identified by one sweep: the rest keep the stack's own figures."""
ROWS_PER_PARAMETER = 4  # fewer, and a figure follows single rows
HUBER = 1.345  # residuals in units of their spread beyond which a row's pull grows no more (95 % efficient, Huber 1981)
LEAST_NOISE = 0.02  # of log step time: what repeats of one run differ by
FEW_ROWS = 10
TYPICAL_NOISE = 0.06
"""What a stack's layouts are off by when one scalar is known: the least with few rows, and the most that the search reckons with,
since with more the priors would hold where the data have not been followed yet."""
STEP = 0.03  # of a logarithm, for derivatives
SCAN = (-2.0, -1.0, 1.0, 2.0)  # where a parameter is first tried, in units of its prior's width
LEAST_LEARNT = 0.1  # share of its prior's variance below which a figure is left as it was
CONFOUNDED = 0.85  # correlation from which two parameters cannot be told apart
Z95 = 1.96


@dataclass(frozen=True)
class Parameter:
    """A figure of the stack: bounds from physics, width of its log-normal prior, and from how many rows on it is freed.

    `start` stands in for a stack's figure of 0, which has no logarithm.
    """

    name: str
    low: float
    high: float
    spread: float
    least_rows: int
    start: float = 0.0


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
    # Collectives of many servers meet on shared links, and a site may have fewer or slower NICs than its kind of server.
    Parameter("scale_out_efficiency", 0.05, 1.3, 0.5, FEW_ROWS),
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


@dataclass(frozen=True)
class Calibration:
    """What `rows` runs say of one stack on one accelerator.

    `confounded`: pairs of parameters whose estimates are correlated beyond CONFOUNDED. `before` and `after`: errors on the same
    rows with the stack's own figures and with the fitted ones.
    """

    stack: str
    accelerator: str
    rows: int
    families: tuple[str, ...]
    fits: tuple[Fit, ...]
    confounded: tuple[tuple[str, str, float], ...]
    noise: float
    before: Errors
    after: Errors

    def figures(self) -> dict[str, Figure]:
        """The fitted figures as a stack or a profile holds them."""
        source = f"fitted on {self.rows} {'run' if self.rows == 1 else 'runs'} of {', '.join(self.families)}"
        return {fit.name: _figure(fit.value, source, fit.low, fit.high) for fit in self.fits}


Progress = Callable[[float], None]


def calibrate(
    path: Path, stack: str | None = None, site: bool = False, profile: str | None = None, progress: Progress | None = None
) -> tuple[Calibration, ...]:
    """Fits every stack and accelerator of a CSV of measured runs to its rows with split `fit`.

    With `site` rows without a split are a site's own and count too; rows marked `test` are never looked at. `stack` names the
    only one to fit; `profile` is a YAML laid over the accelerators' curves. InputError where there is nothing to fit.
    """
    usable = ("fit", "") if site else ("fit",)
    runs = [run for run in read_runs(path) if run.text("split") in usable]
    if not runs:
        hint = "" if site else "; --site takes rows without a split"
        raise InputError(f"{path}: no row has split 'fit'{hint}")
    return calibrate_runs(runs, read_shapes(path.parent / "models.json"), stack, profile, progress, str(path))


def calibrate_runs(
    runs: Sequence[Run],
    shapes: Mapping[str, Shape],
    stack: str | None = None,
    profile: str | None = None,
    progress: Progress | None = None,
    origin: str = "runs",
) -> tuple[Calibration, ...]:
    """The same for rows at hand, whatever their split. Rows under a structural exclusion have no say."""
    families: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    skipped = ""
    for outcome in outcomes_of(runs, shapes, profile):
        if outcome.job is None:
            skipped = outcome.skipped or skipped
        elif outcome.measured_step_time_s and not outcome.excluded:
            problem = outcome.job.problem
            families[problem.stack.name, problem.cluster.accelerator.name].append(outcome)
    wanted = {key: rows for key, rows in families.items() if stack in (None, key[0])}
    if not wanted and families:
        there = ", ".join(sorted({name for name, _ in families}))
        raise InputError(f"{origin}: no run of stack {stack!r} has a step time to fit; there are runs of {there}")
    if not wanted:
        raise InputError(f"{origin}: no row to fit can be priced and has a step time{f' ({skipped})' if skipped else ''}")
    found = []
    for done, rows in enumerate(wanted.values()):
        found.append(fit(rows, profile))
        if progress is not None:
            progress((done + 1) / len(wanted))
    return tuple(found)


@dataclass(frozen=True)
class Learnt:
    """Median error and bias on rows that were held out, after `learnt_from` other runs; medians over draws of those."""

    stack: str
    accelerator: str
    held_out: int
    learnt_from: int
    median: float
    bias: float


def learning_curve(path: Path, counts: Sequence[int] = (0, 1, 3, 10), draws: int = 3, least: int = 5) -> list[Learnt]:
    """How a stack that is new to the tool gets better with a site's first runs: fitted from its documented figures to a few rows.

    Rows of split `fit` are drawn from and those of split `test` are the measure; stacks with fewer than `least` of the latter, or
    too few of the former, are left out.
    """
    rows: dict[tuple[str, str], dict[str, list[Outcome]]] = defaultdict(lambda: {"fit": [], "test": []})
    plain: dict[int, Problem] = {}
    for o in outcomes_of(read_runs(path), read_shapes(path.parent / "models.json")):
        if o.job is not None and o.measured_step_time_s and not o.excluded and o.run.split in ("fit", "test"):
            problem = plain.setdefault(id(o.job.problem.stack), without_fits(o.job.problem))
            bare = replace(o.job, problem=o.job.problem.model_copy(update={"stack": problem.stack}))
            rows[problem.stack.name, problem.cluster.accelerator.name][o.run.split].append(replace(o, job=bare))
    found = []
    for (stack, accelerator), split in rows.items():
        if len(split["test"]) >= least and len(split["fit"]) >= max(counts):
            held_out = Priced(split["test"], None)
            for count in counts:
                tried = [_held_out_error(held_out, split["fit"], count, seed) for seed in range(draws if count else 1)]
                median, bias = (float(np.median([getattr(each, name) for each in tried])) for name in ("median", "bias"))
                found.append(Learnt(stack, accelerator, len(split["test"]), count, median, bias))
    return found


def _held_out_error(held_out: Priced, rows: Sequence[Outcome], count: int, seed: int) -> Errors:
    drawn = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    fits = fit([rows[i] for i in drawn]).fits if count else ()
    return _errors(held_out.predict({each.name: each.value for each in fits}), held_out.measured)


def fit(outcomes: Sequence[Outcome], profile: str | None = None, parameters: Sequence[Parameter] = PARAMETERS) -> Calibration:
    """The figures of one stack on one accelerator that explain measured step times best; outcomes must all be of that pair."""
    runs = Priced(outcomes, profile)
    free = [p for p in parameters if len(outcomes) >= p.least_rows]
    start = np.log([_start(p, runs) for p in free])
    search = Search(runs, tuple(free), start)
    search = search.only(search.strongest(min(MOST_PARAMETERS, max(2, len(outcomes) // ROWS_PER_PARAMETER))))
    theta, noise = search.solve()
    fits, confounded = search.summary(theta, noise)
    fits = tuple(fit for fit in fits if fit.learnt >= LEAST_LEARNT or fit.name == parameters[0].name)
    before, after = runs.predict({}), runs.predict({fit.name: fit.value for fit in fits})
    job = outcomes[0].job
    assert job is not None
    return Calibration(
        job.problem.stack.name,
        job.problem.cluster.accelerator.name,
        len(outcomes),
        tuple(dict.fromkeys(o.run.family for o in outcomes)),
        fits,
        confounded,
        noise,
        _errors(before, runs.measured),
        _errors(after, runs.measured),
    )


def _start(parameter: Parameter, runs: Priced) -> float:
    value = runs.figures[parameter.name] or parameter.start
    return min(max(value, parameter.low), parameter.high)


def _errors(predicted: Floats, measured: Floats) -> Errors:
    found = errors(list(zip(predicted.tolist(), measured.tolist(), strict=True)))
    assert found is not None
    return found


def _figure(value: float, source: str, low: float | None = None, high: float | None = None) -> Figure:
    return Figure(value=value, low=low, high=high, grade="measured", source=source)


class Priced:
    """Runs of one stack on one accelerator, laid out so that they are priced again and again with other figures of the stack."""

    def __init__(self, outcomes: Sequence[Outcome], path: str | None) -> None:
        batches: dict[tuple[object, ...], list[int]] = defaultdict(list)
        jobs = [outcome.job for outcome in outcomes if outcome.job is not None]
        for place, job in enumerate(jobs):
            batches[problem_key(job)].append(place)
        self.measured = np.array([outcome.measured_step_time_s for outcome in outcomes], dtype=np.float64)
        self.weights = _repeat_weights(outcomes)
        self.batches: list[tuple[Problem, Profile, LayoutTable, list[int]]] = []
        for places in batches.values():
            job = jobs[places[0]]
            curves = profile_of(job.curves, job.gemm_curve, path)
            accelerator = job.problem.cluster.accelerator.name
            stack = job.problem.stack.on(accelerator).with_figures(curves.stack_figures(job.problem.stack.name, accelerator))
            problem = job.problem.model_copy(update={"stack": stack})
            table = LayoutTable.from_layouts([jobs[place].layout for place in places])
            self.batches.append((problem, curves.model_copy(update={"stacks": {}}), table, places))
        # Floors of runs under CUDA graphs are 0: the stack's own are those of the others.
        self.figures = {name: max(getattr(b[0].stack, name).value for b in self.batches) for name in CALIBRATED}

    def predict(self, values: Mapping[str, float]) -> Floats:
        """Step times in seconds, (n,), with some of the stack's figures replaced."""
        figures = {name: _figure(value, "on trial") for name, value in values.items()}
        found = np.empty(len(self.measured))
        for problem, profile, table, places in self.batches:
            stack = problem.stack.with_figures(figures)
            found[places] = CostModel(problem.model_copy(update={"stack": stack}), profile).price(table).step_time_s
        return found


def _repeat_weights(outcomes: Sequence[Outcome]) -> Floats:
    """1/k for each of k runs of one problem and layout: repeats are one observation, not several."""
    keys = [(problem_key(o.job), o.job.layout.model_dump_json()) if o.job else None for o in outcomes]
    counts: dict[object, int] = defaultdict(int)
    for key in keys:
        counts[key] += 1
    return np.array([1.0 / counts[key] for key in keys])


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

    def residuals(self, theta: Floats) -> Floats:
        """log(predicted/measured), (n,)."""
        return np.asarray(np.log(self.runs.predict(self.values(theta)) / self.runs.measured))

    @property
    def _spreads(self) -> Floats:
        return np.array([p.spread for p in self.parameters])

    def strongest(self, count: int) -> list[int]:
        """Places of the parameters that move the predictions most within their priors; the first always counts."""
        if len(self.parameters) <= 1:
            return [0]
        base = self.residuals(self.start)
        moved = [np.inf]
        for place, parameter in enumerate(self.parameters[1:], start=1):
            ends = [self.residuals(self._moved(self.start, place, step * parameter.spread)) - base for step in (-1.0, 2.0)]
            moved.append(max(float(np.sqrt(np.mean(end**2))) for end in ends))
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
            gained = 0.0
            for _ in range(5):
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
                trial = self._inside(theta + np.clip(step, -1.0, 1.0))
                tried = self.residuals(trial)
                gained = least - self.loss(trial, tried, noise)
                if gained > 0:
                    theta, residuals, damping = trial, tried, damping / 4
                    break
                damping *= 8
            if gained < 1e-3:
                break
        return theta, self.noise(residuals)

    def _scanned(self) -> tuple[Floats, Floats]:
        """A start beyond flat stretches: a floor that no kernel time falls below has no derivative."""
        theta, residuals = self.start, self.residuals(self.start)
        for place, parameter in enumerate(self.parameters):
            for step in SCAN if len(self.parameters) > 1 else ():
                trial = self._moved(self.start, place, step * parameter.spread)
                trial = np.where(np.arange(len(theta)) == place, trial, theta)
                tried = self.residuals(trial)
                noise = min(max(self.noise(residuals), self.noise(tried)), TYPICAL_NOISE)
                if self.loss(trial, tried, noise) < self.loss(theta, residuals, noise):
                    theta, residuals = trial, tried
        return theta, residuals

    def _normal(self, theta: Floats, residuals: Floats, noise: float) -> tuple[Floats, Floats]:
        """Gradient (p,) and Gauss–Newton curvature (p, p) of the loss; rows beyond HUBER pull with less weight."""
        columns = []
        for place in range(len(theta)):
            at_top = theta[place] + STEP > math.log(self.parameters[place].high)
            step = -STEP if at_top else STEP
            columns.append((self.residuals(self._moved(theta, place, step)) - residuals) / step)
        jacobian = np.stack(columns, axis=1)
        size = np.maximum(np.abs(residuals) / noise, 1e-12)
        weights = self.runs.weights * np.minimum(1.0, HUBER / size) / noise**2
        prior = 1.0 / self._spreads**2
        slope = jacobian.T @ (weights * residuals) + prior * (theta - self.start)
        return slope, (jacobian.T * weights) @ jacobian + np.diag(prior)

    def summary(self, theta: Floats, noise: float) -> tuple[tuple[Fit, ...], tuple[tuple[str, str, float], ...]]:
        """Fitted figures with intervals, and pairs that the data cannot tell apart, from the curvature at the optimum."""
        _, curvature = self._normal(theta, self.residuals(theta), noise)
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

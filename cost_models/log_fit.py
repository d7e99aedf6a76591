"""Fits positive parameters to measured times: Huber residuals of logarithms, a weak prior, intervals that cover. Numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .profile import FitError

FloatArray = NDArray[np.float64]
Rows = Sequence[Mapping[str, str]]

HUBER_DELTA = 0.1  # residuals of time beyond 10 % count linearly: outliers and protocol switches must not bend the curve
NOISE = 0.02  # spread of repeated kernel timings, against which the prior is weighed
PRIOR_SD = 3.0  # of the log of a parameter: only keeps unidentified ones finite (a factor of 20 either way is one sd)
PRIOR_WEIGHT = (NOISE / PRIOR_SD) ** 2
Z95 = 1.96


@dataclass(frozen=True)
class Parameter:
    """A positive parameter: where the fit starts and the bounds that physics sets."""

    start: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """Fitted parameters (p,) with 95 % intervals (p,), and the log residuals measured/predicted (n,)."""

    value: FloatArray
    low: FloatArray
    high: FloatArray
    residual: FloatArray


def fit_log(
    predict: Callable[[FloatArray], FloatArray], measured: FloatArray, parameters: Sequence[Parameter], iterations: int = 200
) -> Estimate:
    """Huber fit of log(measured) by log(predict(θ)), θ (p,) positive: Levenberg–Marquardt on log θ with bounds by clipping.

    Intervals are 95 %, from the sandwich covariance (errors need not be equal or normal), clipped to the bounds.
    """
    start = np.log([p.start for p in parameters])
    low, high = np.log([p.low for p in parameters]), np.log([p.high for p in parameters])
    target = np.log(measured)

    def residual(x: FloatArray) -> FloatArray:
        return np.asarray(target - np.log(predict(np.exp(x))), dtype=np.float64)

    def objective(x: FloatArray) -> float:
        size = np.abs(residual(x))
        huber = np.where(size <= HUBER_DELTA, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
        return float(huber.sum() + PRIOR_WEIGHT * 0.5 * ((x - start) ** 2).sum())

    x, damping, best = start.copy(), 1e-2, objective(start)
    for _ in range(iterations):
        step = _step(residual, x, start, damping, low, high)
        candidate = np.clip(x + step, low, high)
        value = objective(candidate)
        if value < best:
            done = best - value < 1e-10 * best
            x, best, damping = candidate, value, max(damping / 3, 1e-9)
            if done:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    error = Z95 * np.sqrt(np.diag(_sandwich(residual, x, low, high)))
    return Estimate(np.exp(x), np.exp(np.maximum(x - error, low)), np.exp(np.minimum(x + error, high)), residual(x))


def held_out(predicted: FloatArray, measured: FloatArray, fitted: NDArray[np.bool_], data: str) -> FitError:
    """Relative errors of the points that were not fitted: median and 90th percentile."""
    error = np.abs(predicted / measured - 1.0)[~fitted]
    return FitError(
        held_out_median=float(np.median(error)),
        held_out_p90=float(np.quantile(error, 0.9)),
        points_fitted=int(fitted.sum()),
        points_held_out=int((~fitted).sum()),
        data=data,
    )


def chessboard(*axes: FloatArray) -> NDArray[np.bool_]:
    """Every second point of a grid: True where the sum of the axes' ranks is even."""
    ranks = sum(np.unique(axis, return_inverse=True)[1] for axis in axes)
    return np.asarray(np.asarray(ranks) % 2 == 0, dtype=np.bool_)


def figures(names: Sequence[str], x: FloatArray, low: FloatArray, high: FloatArray, source: str) -> dict[str, Any]:
    """Fitted figures with their intervals as a profile holds them."""
    return {
        name: {"value": float(v), "low": float(a), "high": float(b), "source": source}
        for name, v, a, b in zip(names, x, low, high, strict=True)
    }


def column(rows: Rows, name: str) -> FloatArray:
    """One column of a table, (rows,)."""
    return np.array([float(row[name]) for row in rows], dtype=np.float64)


def sizes(rows: Rows, column: str = "num_gpus") -> str:
    """The distinct values of a column, as a source says them: 2/4/8."""
    return "/".join(str(size) for size in sorted({int(row[column]) for row in rows}))


def _step(
    residual: Callable[[FloatArray], FloatArray],
    x: FloatArray,
    prior: FloatArray,
    damping: float,
    low: FloatArray,
    high: FloatArray,
) -> FloatArray:
    """One damped Gauss–Newton step on the Huber-weighted residuals; parameters pressed against a bound stay."""
    r = residual(x)
    jacobian = _jacobian(residual, x, low, high)
    weight = HUBER_DELTA / np.maximum(np.abs(r), HUBER_DELTA)
    gradient = jacobian.T @ (weight * r) - PRIOR_WEIGHT * (x - prior)
    normal = jacobian.T @ (weight[:, None] * jacobian) + PRIOR_WEIGHT * np.eye(x.size)
    free = ~(((x <= low) & (gradient < 0)) | ((x >= high) & (gradient > 0)))
    step = np.zeros_like(x)
    inner = normal[np.ix_(free, free)]
    step[free] = np.linalg.solve(inner + damping * np.diag(np.diag(inner)), gradient[free])
    return step


def _sandwich(residual: Callable[[FloatArray], FloatArray], x: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Covariance of log parameters: bread (JᵀWJ)⁻¹, filling Jᵀ diag(ψ²) J, with the small-sample factor n/(n−p)."""
    r = residual(x)
    jacobian = _jacobian(residual, x, low, high)
    inside = np.abs(r) <= HUBER_DELTA
    score = np.clip(r, -HUBER_DELTA, HUBER_DELTA)
    bread = np.linalg.inv(jacobian.T @ (inside[:, None] * jacobian) + PRIOR_WEIGHT * np.eye(x.size))
    filling = jacobian.T @ (score[:, None] ** 2 * jacobian) * r.size / max(r.size - x.size, 1)
    return np.asarray(bread @ (filling + PRIOR_WEIGHT * NOISE**2 * np.eye(x.size)) @ bread, dtype=np.float64)


def _jacobian(
    residual: Callable[[FloatArray], FloatArray], x: FloatArray, low: FloatArray, high: FloatArray, width: float = 1e-4
) -> FloatArray:
    """∂ log(prediction) / ∂ log θ (n, p) by differences that stay within the bounds."""
    columns = []
    for i in range(x.size):
        up, down = x.copy(), x.copy()
        up[i], down[i] = min(x[i] + width, high[i]), max(x[i] - width, low[i])
        columns.append((residual(down) - residual(up)) / (up[i] - down[i]))
    return np.stack(columns, axis=1)

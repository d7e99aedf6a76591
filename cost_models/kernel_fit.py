"""Fits the curves of profile.py to tables of measured kernels and writes them into the profile files.

    python -m paraplan.cost_models.kernel_fit MEASURED_DIR -o PROFILE_DIR

MEASURED_DIR holds gemm.csv, collectives.csv and moe_all_to_all.csv; PROFILE_DIR the YAML files whose documented sections
(attention, memory, scale-out, …) are kept. Numpy only; no random numbers, so that a run reproduces the shipped files.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ..search_spaces.errors import InputError
from .profile import CollectiveCurve, FitError, Fitted, GemmCurve, Profile, collective_s, gemm_s

FloatArray = NDArray[np.float64]
Rows = Sequence[Mapping[str, str]]

HUBER_DELTA = 0.1  # residuals of time beyond 10 % count linearly: outliers and protocol switches must not bend the curve
NOISE = 0.02  # spread of repeated kernel timings, against which the prior is weighed
PRIOR_SD = 3.0  # of the log of a parameter: only keeps unidentified ones finite (a factor of 20 either way is one sd)
PRIOR_WEIGHT = (NOISE / PRIOR_SD) ** 2
Z_95 = 1.96
HALF_TILE = 32.0  # rows or columns lost on average to the smallest tensor-core tile (64); tables from m = 1024 cannot see less
EXTRAPOLATION = 1.15  # a collective's limit for endless messages over the best rate in its table, copies in the device included


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


@dataclass(frozen=True)
class Device:
    """One profile that the tables can fill: names of its rows, dense peaks in FLOP/s, scale-up bytes/s one way."""

    system: str
    peak_flops: dict[str, float]
    scale_up_bytes_per_s: float
    in_network: bool  # 8-device all-reduces of the table ran on the switches (NVLS)
    same_links: bool = True  # False: the table's chip with other links; only GEMMs carry over


GEMM_DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8", "fp8": "fp8_tensor", "nvfp4": "fp4"}

NCCL_TESTS = {  # our name: the table's; all_gather first, since its time per hop serves all_to_all
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_in_network": "all_reduce",
    "all_to_all": "alltoall",
}

_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "fp8_tensor": 1979e12}
DEVICES = {
    "a100-80gb-sxm": Device("a100_sxm", {"bf16": 312e12}, 300e9, in_network=False),
    "a100-40gb-sxm": Device("a100_sxm", {"bf16": 312e12}, 300e9, in_network=False),
    "h100-80gb-sxm": Device("h100_sxm", _HOPPER, 450e9, in_network=True),
    "h800": Device("h100_sxm", _HOPPER, 200e9, in_network=False, same_links=False),
    "h200": Device("h200_sxm", _HOPPER, 450e9, in_network=True),
    "b200": Device("b200_sxm", {"bf16": 2.25e15, "fp8": 4.5e15, "fp8_tensor": 4.5e15, "fp4": 9e15}, 900e9, in_network=True),
    "b300": Device("b300_sxm", {"bf16": 2.25e15, "fp8": 4.5e15, "fp8_tensor": 4.5e15, "fp4": 12.6e15}, 900e9, in_network=True),
    "gb200": Device("gb200", {"bf16": 2.5e15, "fp8": 5e15, "fp8_tensor": 5e15, "fp4": 10e15}, 900e9, in_network=False),
    "gb300": Device("gb300", {"bf16": 2.5e15, "fp8": 5e15, "fp8_tensor": 5e15, "fp4": 15e15}, 900e9, in_network=False),
}
NIC_BYTES_PER_S = 50e9  # of the hosts that the multi-node MoE rows were measured on
RACKS = ("gb200", "gb300")
WIDE_LINKS = ("b200_sxm", "b300_sxm")
"""Servers whose NVLink the table's DeepEP fills by less than half, on 20 SMs: their profiles hold documented rates of HybridEP."""
NVLINK_KERNEL = "trtllm-NVLinkTwoSided"
BF16_BYTES = 2.0
FP8_SCALED_BYTES = 1 + 4 / 128  # one FP32 scale for 128 values

TABLE = "ai-dynamo/aiconfigurator benchmark data at 095f58a51 (Apache-2.0)"


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
    error = Z_95 * np.sqrt(np.diag(_sandwich(residual, x, low, high)))
    return Estimate(np.exp(x), np.exp(np.maximum(x - error, low)), np.exp(np.minimum(x + error, high)), residual(x))


def fit_gemm(rows: Rows, peak_flops: float, source: str) -> tuple[GemmCurve, FitError]:
    """GEMM curve of one device and precision, and its error on the shapes held out.

    `rows` hold m, n, k and latency_us. Every second shape of the (m, n, k) grid, as on a chessboard, is held out for the
    error; the curve returned is fitted on all.
    """
    m, n, k, measured = (_column(rows, name) for name in ("m", "n", "k", "latency_us"))
    measured = measured * 1e-6
    bounds = [
        Parameter(0.8, 0.05, 1.0),
        Parameter(64.0, HALF_TILE, 1e5),
        Parameter(64.0, HALF_TILE, 1e5),
        Parameter(64.0, HALF_TILE, 1e5),
        Parameter(3e-6, 1e-7, 1e-4),
    ]

    def curve(x: FloatArray, low: FloatArray, high: FloatArray) -> GemmCurve:
        return GemmCurve.model_validate(_figures(("e_max", "m0", "n0", "k0", "launch_s"), x, low, high, source))

    def fit(keep: NDArray[np.bool_]) -> GemmCurve:
        def predict(x: FloatArray) -> FloatArray:
            return gemm_s(curve(x, x, x), peak_flops, m[keep], n[keep], k[keep])

        estimate = fit_log(predict, measured[keep], bounds)
        return curve(estimate.value, estimate.low, estimate.high)

    fitted = _chessboard(m, n, k)
    error = _held_out(gemm_s(fit(fitted), peak_flops, m, n, k), measured, fitted, source)
    return fit(np.ones_like(fitted)), error


def fit_collective(
    rows: Rows, collective: str, bytes_per_s: float, source: str, hop_latency_s: Fitted | None = None
) -> tuple[CollectiveCurve, FitError]:
    """Curve of one collective on one kind of link, and its error on the sizes held out (every second one of each group size).

    `rows` hold num_gpus, bytes (the buffer S) and latency_us. Group sizes separate the time per hop and the copy that stays
    local from launch and rate; a single group size or a collective of one hop takes `hop_latency_s` as given.
    """
    n, message, measured = (_column(rows, name) for name in ("num_gpus", "bytes", "latency_us"))
    wire, hops = wire_and_hops(collective, message, n)
    return _fit_messages(collective, wire, message, hops, n, measured * 1e-6, bytes_per_s, source, hop_latency_s)


def wire_and_hops(collective: str, message: FloatArray, n: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Bytes that one of n devices sends for a buffer of `message` bytes, and the hops in a row, as profile.py counts them."""
    share = message * (n - 1) / n
    if collective == "all_reduce":
        return 2 * share, 2 * (n - 1)
    if collective in ("all_gather", "reduce_scatter"):
        return share, n - 1
    if collective == "all_to_all":
        return share, np.ones_like(n)
    if collective == "all_reduce_in_network":
        return message, np.ones_like(n)
    raise InputError(f"collective {collective!r} has no wire rule; use all_reduce, all_gather, reduce_scatter or all_to_all.")


def fit_moe(
    rows: Rows, destinations: FloatArray, value_bytes: float, bytes_per_s: float, source: str
) -> tuple[CollectiveCurve, FitError]:
    """Curve of a fused MoE token exchange among `destinations` (n,) devices or servers, and its held-out error.

    `rows` hold hidden, tokens_per_rank, topk, experts and latency_us. Each token goes once, at `value_bytes` a value, to every
    destination that holds one of its experts; routing is uniform.
    """
    hidden, tokens, top_k, experts, measured = (
        _column(rows, name) for name in ("hidden", "tokens_per_rank", "topk", "experts", "latency_us")
    )
    message = tokens * hidden * value_bytes * expected_destinations(destinations, top_k, experts)
    wire = message * (destinations - 1) / destinations
    hops = np.ones_like(wire)
    return _fit_messages("moe", wire, message, hops, destinations, measured * 1e-6, bytes_per_s, source, None)


def expected_destinations(destinations: FloatArray, top_k: FloatArray, experts: FloatArray) -> FloatArray:
    """Mean number of distinct destinations among a token's top_k experts, spread evenly and drawn without repetition."""
    missed = np.ones_like(destinations)
    elsewhere = experts * (destinations - 1) / destinations
    for draw in range(int(top_k.max(initial=0))):
        chance = np.maximum(elsewhere - draw, 0.0) / np.maximum(experts - draw, 1.0)
        missed = np.where(draw < top_k, missed * chance, missed)
    return np.asarray(destinations * (1.0 - missed), dtype=np.float64)


def fitted_sections(tables: Mapping[str, Rows], device: Device) -> tuple[dict[str, Any], dict[str, FitError]]:
    """What the tables say about a device: `gemm` and `collectives` sections in a profile's form, and errors by curve."""
    gemm: dict[str, Any] = {}
    errors: dict[str, FitError] = {}
    for dtype, precision in GEMM_DTYPES.items():
        rows = [r for r in tables["gemm"] if r["system"] == device.system and r["gemm_dtype"] == dtype]
        if rows:
            source = f"fit: {device.system} {dtype} GEMMs, {TABLE}"
            curve, errors[f"gemm.{precision}"] = fit_gemm(rows, device.peak_flops[precision], source)
            gemm[precision] = curve.model_dump(mode="json")
    if not device.same_links:
        return {"gemm": gemm}, errors
    collectives: dict[str, Any] = {"scale-up": {}, "scale-out": {}}
    for section, name, curve_, error in (*_collectives(tables, device), *_moe(tables, device)):
        collectives[section][name] = curve_.model_dump(mode="json", exclude_none=True)
        errors[f"collectives.{section}.{name}"] = error
    return {"gemm": gemm, "collectives": collectives}, errors


def update_profile(path: Path, tables: Mapping[str, Rows], device: Device) -> Profile:
    """Replaces the fitted curves in a profile file, keeps its other sections, checks the whole and writes it in one piece."""
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    sections, errors = fitted_sections(tables, device)
    data["gemm"] = {**data.get("gemm", {}), **sections["gemm"]}
    for section, curves in sections.get("collectives", {}).items():
        data["collectives"][section] = {**data["collectives"].get(section, {}), **curves}
    data["provenance"]["errors"] = {key: error.model_dump(mode="json") for key, error in errors.items()}
    data = _rounded(data)
    profile = Profile.model_validate(data)
    _write_whole(path, _to_yaml(data, _header(path)))
    return profile


def read_tables(measured: Path) -> dict[str, Rows]:
    """The three kernel tables of a folder as rows of strings; InputError when one is missing."""
    tables: dict[str, Rows] = {}
    for name in ("gemm", "collectives", "moe_all_to_all"):
        path = measured / f"{name}.csv"
        if not path.is_file():
            raise InputError(f"{path}: not found; MEASURED_DIR must hold gemm.csv, collectives.csv and moe_all_to_all.csv.")
        with path.open(encoding="utf-8", newline="") as file:
            tables[name] = list(csv.DictReader(file))
    return tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Refits every profile that the tables cover; returns the exit status (2: bad input)."""
    parser = argparse.ArgumentParser(prog="python -m paraplan.cost_models.kernel_fit", description=main.__doc__)
    parser.add_argument("measured_dir", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder with the profile files to update")
    options = parser.parse_args(arguments)
    try:
        tables = read_tables(options.measured_dir)
        for name, device in DEVICES.items():
            path = options.output / f"{name}.yaml"
            if not path.is_file():
                raise InputError(f"{path}: not found; the documented sections of the profile must be there before fitting.")
            profile = update_profile(path, tables, device)
            for curve, error in profile.provenance.errors.items():
                print(f"{name:14s} {curve:38s} held out: median {error.held_out_median:.3f}  p90 {error.held_out_p90:.3f}")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _collectives(tables: Mapping[str, Rows], device: Device) -> Iterable[tuple[str, str, CollectiveCurve, FitError]]:
    rows = [r for r in tables["collectives"] if r["system"] == device.system]
    hop_latency_s: Fitted | None = None
    for name, label in NCCL_TESTS.items():
        chosen = [r for r in rows if r["collective"] == label]
        if device.in_network and label == "all_reduce":
            chosen = [r for r in chosen if (r["num_gpus"] == "8") == (name == "all_reduce_in_network")]
        elif name == "all_reduce_in_network":
            continue
        how = " (NVLS for large sizes)" if name == "all_reduce_in_network" else ""
        source = f"fit: {device.system} nccl-tests {label}, {_sizes(chosen)} devices{how}, {TABLE}"
        given = hop_latency_s if name == "all_to_all" else None
        curve, error = fit_collective(chosen, name, device.scale_up_bytes_per_s, source, given)
        hop_latency_s = hop_latency_s or curve.hop_latency_s
        yield "scale-up", name, curve, error


def _moe(tables: Mapping[str, Rows], device: Device) -> Iterable[tuple[str, str, CollectiveCurve, FitError]]:
    rows = [r for r in tables["moe_all_to_all"] if r["system"] == device.system]
    # 20 communication SMs is DeepEP's default; few experts leave devices without one, which uniform routing does not describe
    deep_ep = [r for r in rows if r["kernel"] == "deepep-normal" and r["sms"] == "20" and int(r["experts"]) >= 64]
    for phase in ("dispatch", "combine"):
        value_bytes = FP8_SCALED_BYTES if phase == "dispatch" else BF16_BYTES
        chosen = [r for r in deep_ep if r["phase"] == phase]
        # trays of NVL72 racks hold 4 devices and the table does not say how many took part: the NVLink rows serve instead
        server = [r for r in chosen if r["nodes"] == "1"] if device.system not in (*RACKS, *WIDE_LINKS) else []
        if server:
            source = f"fit: {device.system} DeepEP normal {phase}, one server of 8, {TABLE}"
            eight = np.full(len(server), 8.0)
            curve, error = fit_moe(server, eight, value_bytes, device.scale_up_bytes_per_s, source)
            yield "scale-up", f"moe_{phase}", curve, error
        # eight servers are 3.4 times slower than four, which volume does not explain: one fabric's congestion, not the kernel;
        # other systems' rows repeat the H100's
        servers = [r for r in chosen if r["nodes"] in ("2", "4")] if device.system == "h100_sxm" else []
        if servers:
            source = f"fit: {device.system} DeepEP normal {phase}, 2/4 servers of 8 with 400 Gb/s NICs, {TABLE}"
            curve, error = fit_moe(servers, _column(servers, "nodes"), value_bytes, NIC_BYTES_PER_S, source)
            yield "scale-out", f"moe_{phase}", curve, error
        rack = [r for r in rows if r["kernel"] == NVLINK_KERNEL and r["dtype"] == "bfloat16" and r["phase"] == phase]
        rack = [r for r in rack if int(r["experts"]) >= 64]
        if rack:
            source = f"fit: {device.system} TensorRT-LLM NVLink two-sided {phase} in BF16, EP {_sizes(rack, 'ep')}, {TABLE}"
            curve, error = fit_moe(rack, _column(rack, "ep"), BF16_BYTES, device.scale_up_bytes_per_s, source)
            yield "scale-up", f"moe_{phase}", curve, error


def _fit_messages(
    collective: str,
    wire: FloatArray,
    message: FloatArray,
    hops: FloatArray,
    n: FloatArray,
    measured_s: FloatArray,
    bytes_per_s: float,
    source: str,
    hop_latency_s: Fitted | None,
) -> tuple[CollectiveCurve, FitError]:
    """Fits the parameters that the points can tell apart: hop time and local copy need several group sizes."""
    several = np.unique(n).size > 1 and collective != "moe"
    free_hop = several and hop_latency_s is None and np.unique(hops).size > 1
    names = ["efficiency", "half_bytes", "gamma", "launch_s"]
    best = float((wire / measured_s).max()) / bytes_per_s
    bounds = [
        Parameter(min(best, 1.0), 0.01, min(EXTRAPOLATION * best, 1.0)),
        Parameter(4e6, 1e3, 1e9),
        Parameter(0.7, 0.2, 2.0),
        Parameter(5e-6, 1e-7, 2e-4),
    ]
    if free_hop:
        names.append("hop_latency_s")
        bounds.append(Parameter(1e-6, 1e-8, 2e-5))
    if several:
        names.append("local_cost")
        bounds.append(Parameter(0.4, 0.01, 1.0))
    fixed: dict[str, Any] = {"passes": 2 if collective == "all_reduce" else 1}
    if hop_latency_s is not None:
        fixed["hop_latency_s"] = hop_latency_s.model_dump()

    def curve(x: FloatArray, low: FloatArray, high: FloatArray) -> CollectiveCurve:
        return CollectiveCurve.model_validate({**fixed, **_figures(names, x, low, high, source)})

    def predicted(fit: CollectiveCurve, keep: NDArray[np.bool_]) -> FloatArray:
        return collective_s(fit, bytes_per_s, 0.0, hops[keep], wire[keep], message[keep])

    def fit(keep: NDArray[np.bool_]) -> CollectiveCurve:
        estimate = fit_log(lambda x: predicted(curve(x, x, x), keep), measured_s[keep], bounds)
        return curve(estimate.value, estimate.low, estimate.high)

    every = np.ones(message.shape, dtype=np.bool_)
    fitted = _chessboard(message, n)
    error = _held_out(predicted(fit(fitted), every), measured_s, fitted, source)
    return fit(every), error


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


def _held_out(predicted: FloatArray, measured: FloatArray, fitted: NDArray[np.bool_], data: str) -> FitError:
    error = np.abs(predicted / measured - 1.0)[~fitted]
    return FitError(
        held_out_median=float(np.median(error)),
        held_out_p90=float(np.quantile(error, 0.9)),
        points_fitted=int(fitted.sum()),
        points_held_out=int((~fitted).sum()),
        data=data,
    )


def _chessboard(*axes: FloatArray) -> NDArray[np.bool_]:
    """Every second point of a grid: True where the sum of the axes' ranks is even."""
    ranks = sum(np.unique(axis, return_inverse=True)[1] for axis in axes)
    return np.asarray(np.asarray(ranks) % 2 == 0, dtype=np.bool_)


def _figures(names: Sequence[str], x: FloatArray, low: FloatArray, high: FloatArray, source: str) -> dict[str, Any]:
    return {
        name: {"value": float(v), "low": float(a), "high": float(b), "source": source}
        for name, v, a, b in zip(names, x, low, high, strict=True)
    }


def _column(rows: Rows, name: str) -> FloatArray:
    return np.array([float(row[name]) for row in rows], dtype=np.float64)


def _sizes(rows: Rows, column: str = "num_gpus") -> str:
    return "/".join(str(size) for size in sorted({int(row[column]) for row in rows}))


def _rounded(value: Any) -> Any:
    """Four significant digits everywhere: rounding keeps low ≤ value ≤ high."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


class _ProfileDumper(yaml.SafeDumper):
    """Block style, but one line for each figure (a mapping with a source), in the order given; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_mapping(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.nodes.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style="source" in data or "data" in data)


_ProfileDumper.add_representer(dict, _represent_mapping)


def _to_yaml(data: dict[str, Any], header: str) -> str:
    return header + str(yaml.dump(data, Dumper=_ProfileDumper, sort_keys=False, width=10_000, allow_unicode=True))


def _header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def _write_whole(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())

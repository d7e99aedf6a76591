"""Fits the curves of collectives and of MoE token exchanges to tables of measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..search_spaces.errors import InputError
from .log_fit import FloatArray, Parameter, Rows, chessboard, column, figures, fit_log, held_out, sizes
from .profile import CollectiveCurve, FitError, Fitted, collective_s
from .routing import missed

EXTRAPOLATION = 1.15  # a collective's limit for endless messages over the best rate in its table, copies in the device included
NIC_BYTES_PER_S = 50e9  # of the hosts that the multi-node MoE rows were measured on
RACKS = ("gb200", "gb300")
WIDE_LINKS = ("b200_sxm", "b300_sxm")
"""Servers whose NVLink the table's DeepEP fills by less than half, on 20 SMs: their profiles hold documented rates of HybridEP."""
NVLINK_KERNEL = "trtllm-NVLinkTwoSided"
BF16_BYTES = 2.0
FP8_SCALED_BYTES = 1 + 4 / 128  # one FP32 scale for 128 values
TABLE = "ai-dynamo/aiconfigurator benchmark data at 095f58a51 (Apache-2.0)"

NCCL_TESTS = {  # our name: the table's; all_gather first, since its time per hop serves all_to_all
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_in_network": "all_reduce",
    "all_to_all": "alltoall",
}


@dataclass(frozen=True)
class Device:
    """One profile that the tables can fill: names of its rows, dense peaks in FLOP/s, scale-up bytes/s one way."""

    system: str
    peak_flops: dict[str, float]
    scale_up_bytes_per_s: float
    in_network: bool  # 8-device all-reduces of the table ran on the switches (NVLS)
    same_links: bool = True  # False: the table's chip with other links; only GEMMs carry over


@dataclass(frozen=True)
class Points:
    """Measured messages (p,): bytes that a device sends, the buffer's, hops in a row, group sizes, seconds."""

    wire: FloatArray
    message: FloatArray
    hops: FloatArray
    n: FloatArray
    measured_s: FloatArray
    bytes_per_s: float

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """The half that the error's curve is fitted on: every second point of sizes and group sizes, as on a chessboard."""
        return chessboard(self.message, self.n)

    def predicted_s(self, curve: CollectiveCurve) -> FloatArray:
        return collective_s(curve, self.bytes_per_s, 0.0, self.hops, self.wire, self.message)


@dataclass(frozen=True)
class MessageFit:
    """The curve of all points, the curve of half of them, and how far that one is off the others."""

    curve: CollectiveCurve
    half: CollectiveCurve
    error: FitError
    points: Points


def collective_fits(tables: Mapping[str, Rows], device: Device) -> Iterator[tuple[str, str, MessageFit]]:
    """Fits of every curve that the tables have of a device: the profile's section, the curve's name there, the fit."""
    yield from _library(tables["collectives"], device)
    yield from _exchanges(tables["moe_all_to_all"], device)


def fit_collective(rows: Rows, collective: str, bytes_per_s: float, source: str, hop_latency_s: Fitted | None = None) -> MessageFit:
    """Curve of one collective on one kind of link, and its error on the sizes held out (every second one of each group size).

    `rows` hold num_gpus, bytes (the buffer S) and latency_us. Group sizes separate the time per hop and the copy that stays
    local from launch and rate; a single group size or a collective of one hop takes `hop_latency_s` as given.
    """
    n, message, measured = (column(rows, name) for name in ("num_gpus", "bytes", "latency_us"))
    wire, hops = wire_and_hops(collective, message, n)
    return _fit(Points(wire, message, hops, n, measured * 1e-6, bytes_per_s), collective, source, hop_latency_s)


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


def fit_moe(rows: Rows, destinations: FloatArray, value_bytes: float, bytes_per_s: float, source: str) -> MessageFit:
    """Curve of a fused MoE token exchange among `destinations` (n,) devices or servers, and its held-out error.

    `rows` hold hidden, tokens_per_rank, topk, experts and latency_us. Each token goes once, at `value_bytes` a value, to every
    destination that holds one of its experts; routing is uniform. Tokens for a device's or server's own experts pass through the
    same kernel, at a share of the cost that several numbers of destinations tell apart.
    """
    hidden, tokens, top_k, experts, measured = (
        column(rows, name) for name in ("hidden", "tokens_per_rank", "topk", "experts", "latency_us")
    )
    message = tokens * hidden * value_bytes * expected_destinations(destinations, top_k, experts)
    wire = message * (destinations - 1) / destinations
    points = Points(wire, message, np.ones_like(wire), destinations, measured * 1e-6, bytes_per_s)
    at_once = Fitted(value=0.0, low=0.0, high=0.0, source="one hop, whose time is in launch_s")
    return _fit(points, "moe", source, at_once)


def expected_destinations(destinations: FloatArray, top_k: FloatArray, experts: FloatArray) -> FloatArray:
    """Mean number of distinct destinations among a token's top_k experts, spread evenly and drawn without repetition."""
    found = np.zeros_like(destinations)
    for total, draws in {(float(e), int(k)) for e, k in zip(experts, top_k, strict=True)}:
        rows = (experts == total) & (top_k == draws)
        found[rows] = destinations[rows] * (1.0 - missed(total, total / destinations[rows], draws))
    return found


def _library(table: Rows, device: Device) -> Iterator[tuple[str, str, MessageFit]]:
    rows = [r for r in table if r["system"] == device.system]
    hop_latency_s: Fitted | None = None
    for name, label in NCCL_TESTS.items():
        chosen = [r for r in rows if r["collective"] == label]
        if device.in_network and label == "all_reduce":
            chosen = [r for r in chosen if (r["num_gpus"] == "8") == (name == "all_reduce_in_network")]
        elif name == "all_reduce_in_network":
            continue
        how = " (NVLS for large sizes)" if name == "all_reduce_in_network" else ""
        source = f"fit: {device.system} nccl-tests {label}, {sizes(chosen)} devices{how}, {TABLE}"
        given = hop_latency_s if name == "all_to_all" else None
        found = fit_collective(chosen, name, device.scale_up_bytes_per_s, source, given)
        hop_latency_s = hop_latency_s or found.curve.hop_latency_s
        yield "scale-up", name, found


def _exchanges(table: Rows, device: Device) -> Iterator[tuple[str, str, MessageFit]]:
    rows = [r for r in table if r["system"] == device.system]
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
            yield "scale-up", f"moe_{phase}", fit_moe(server, eight, value_bytes, device.scale_up_bytes_per_s, source)
        # eight servers are 3.4 times slower than four, which volume does not explain: one fabric's congestion, not the kernel;
        # other systems' rows repeat the H100's
        servers = [r for r in chosen if r["nodes"] in ("2", "4")] if device.system == "h100_sxm" else []
        if servers:
            source = f"fit: {device.system} DeepEP normal {phase}, 2/4 servers of 8 with 400 Gb/s NICs, {TABLE}"
            yield "scale-out", f"moe_{phase}", fit_moe(servers, column(servers, "nodes"), value_bytes, NIC_BYTES_PER_S, source)
        rack = [r for r in rows if r["kernel"] == NVLINK_KERNEL and r["dtype"] == "bfloat16" and r["phase"] == phase]
        rack = [r for r in rack if int(r["experts"]) >= 64]
        if rack:
            source = f"fit: {device.system} TensorRT-LLM NVLink two-sided {phase} in BF16, EP {sizes(rack, 'ep')}, {TABLE}"
            yield "scale-up", f"moe_{phase}", fit_moe(rack, column(rack, "ep"), BF16_BYTES, device.scale_up_bytes_per_s, source)


def _fit(points: Points, collective: str, source: str, hop_latency_s: Fitted | None) -> MessageFit:
    """Fits the parameters that the points can tell apart: hop time and local copy need several group sizes."""
    several = np.unique(points.n).size > 1
    free_hop = several and hop_latency_s is None and np.unique(points.hops).size > 1
    names = ["efficiency", "half_bytes", "gamma", "launch_s"]
    best = float((points.wire / points.measured_s).max()) / points.bytes_per_s
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
        return CollectiveCurve.model_validate({**fixed, **figures(names, x, low, high, source)})

    def fit(keep: NDArray[np.bool_]) -> CollectiveCurve:
        estimate = fit_log(lambda x: points.predicted_s(curve(x, x, x))[keep], points.measured_s[keep], bounds)
        return curve(estimate.value, estimate.low, estimate.high)

    half, whole = fit(points.fitted), fit(np.ones_like(points.fitted))
    return MessageFit(whole, half, held_out(points.predicted_s(half), points.measured_s, points.fitted, source), points)

"""Fits the curves of collectives and of MoE token exchanges to tables of measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..search_spaces.errors import InputError
from ..search_spaces.libraries import deep_ep
from .kernel_tables import Device, kernel_tables
from .log_fit import FloatArray, Parameter, Rows, chessboard, column, figures, fit_log, held_out, sizes
from .profile import CollectiveCurve, FitError, Fitted, collective_s, together_s
from .routing import missed

DEEP_EP, NVLINK_KERNEL = "deepep-normal", "trtllm-NVLinkTwoSided"
BF16_BYTES = 2.0

NCCL_TESTS = {  # our name: the table's; all_gather first, since its time per hop serves all_to_all
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_in_network": "all_reduce",
    "all_to_all": "alltoall",
}


@dataclass(frozen=True)
class Points:
    """Measured messages (p,): bytes that a device sends, the buffer's, hops in a row, group sizes, seconds.

    Of a kernel that copies by itself also the bytes of all copies that it makes, tokens and multiprocessors.
    """

    wire: FloatArray
    message: FloatArray
    hops: FloatArray
    n: FloatArray
    measured_s: FloatArray
    bytes_per_s: float
    copied: FloatArray | None = None
    tokens: FloatArray | None = None
    sms: FloatArray | None = None

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """The half that the error's curve is fitted on: every second point of sizes, group sizes and multiprocessors, as on a
        chessboard.
        """
        return chessboard(self.message, self.n, *(() if self.sms is None else (self.sms,)))

    def predicted_s(self, curve: CollectiveCurve) -> FloatArray:
        time_s = collective_s(curve, self.bytes_per_s, 0.0, self.hops, self.wire, self.message)
        if self.copied is None or self.tokens is None or self.sms is None or curve.sm_bytes_per_s is None:
            return time_s
        handled = self.copied + self.tokens * (curve.handling_bytes.value if curve.handling_bytes else 0.0)
        launch_s = curve.launch_s.value
        return launch_s + together_s(time_s - launch_s, handled / (self.sms * curve.sm_bytes_per_s.value))


@dataclass(frozen=True)
class MessageFit:
    """The curve of all points, the curve of half of them, how far that one is off the others, and the rows of the points."""

    curve: CollectiveCurve
    half: CollectiveCurve
    error: FitError
    points: Points
    rows: Rows


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
    return _fit(Points(wire, message, hops, n, measured * 1e-6, bytes_per_s), rows, collective, source, hop_latency_s)


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
    rows: Rows, units: FloatArray, value_bytes: float, bytes_per_s: float, source: str, devices: float = 1.0, dealt: bool = False
) -> MessageFit:
    """Curve of a fused MoE token exchange among `units` (n,) of `devices` devices each, and its held-out error.

    `rows` hold hidden, tokens_per_rank, topk, experts, sms and latency_us. Each token goes once, at `value_bytes` a value, to every
    unit that holds one of its experts, and there to every device that does; routing is uniform, or experts are `dealt` in turn.
    Tokens for a unit's own experts pass through the same kernel, at a share of the cost that several numbers of units tell apart,
    as several numbers of multiprocessors do what these copy.
    """
    hidden, tokens, top_k, experts, measured = (
        column(rows, name) for name in ("hidden", "tokens_per_rank", "topk", "experts", "latency_us")
    )
    reached = dealt_destinations if dealt else expected_destinations
    copy_bytes = tokens * hidden * value_bytes
    message = copy_bytes * reached(units, top_k, experts)
    wire = message * (units - 1) / units
    told = len({row["sms"] for row in rows}) > 1
    copying = (copy_bytes * reached(units * devices, top_k, experts), tokens, column(rows, "sms")) if told else ()
    points = Points(wire, message, np.ones_like(wire), units, measured * 1e-6, bytes_per_s, *copying)
    at_once = Fitted(value=0.0, low=0.0, high=0.0, source="one hop, whose time is in launch_s")
    return _fit(points, rows, "moe", source, at_once)


def expected_destinations(destinations: FloatArray, top_k: FloatArray, experts: FloatArray) -> FloatArray:
    """Mean number of distinct destinations among a token's top_k experts, spread evenly and drawn without repetition."""
    found = np.zeros_like(destinations)
    for total, draws in {(float(e), int(k)) for e, k in zip(experts, top_k, strict=True)}:
        rows = (experts == total) & (top_k == draws)
        found[rows] = destinations[rows] * (1.0 - missed(total, total / destinations[rows], draws))
    return found


def dealt_destinations(destinations: FloatArray, top_k: FloatArray, experts: FloatArray) -> FloatArray:
    """Distinct destinations of a token whose experts are dealt in turn, lest any rank get more than another."""
    return np.minimum(destinations, top_k)


def _library(table: Rows, device: Device) -> Iterator[tuple[str, str, MessageFit]]:
    rows = [r for r in table if r["system"] == device.system]
    hop_latency_s: Fitted | None = None
    for name, label in NCCL_TESTS.items():
        chosen = [r for r in rows if r["collective"] == label]
        if device.measured.in_network and label == "all_reduce":
            chosen = [r for r in chosen if (r["num_gpus"] == "8") == (name == "all_reduce_in_network")]
        elif name == "all_reduce_in_network":
            continue
        how = " (NVLS for large sizes)" if name == "all_reduce_in_network" else ""
        source = f"fit: {device.system} nccl-tests {label}, {sizes(chosen)} devices{how}, {kernel_tables().source}"
        given = hop_latency_s if name == "all_to_all" else None
        found = fit_collective(chosen, name, device.scale_up_bytes_per_s, source, given)
        hop_latency_s = hop_latency_s or found.curve.hop_latency_s
        yield "scale-up", name, found


def _exchanges(table: Rows, device: Device) -> Iterator[tuple[str, str, MessageFit]]:
    rows = [r for r in table if r["system"] == device.system]
    for phase, value_bytes in (("dispatch", deep_ep().fp8_bytes), ("combine", BF16_BYTES)):
        deepep = [r for r in rows if r["kernel"] == DEEP_EP and r["phase"] == phase]
        yield from _on_a_host([r for r in deepep if r["nodes"] == "1"], device, phase, value_bytes)
        if device.system == "h100_sxm":  # other systems' rows repeat the H100's
            yield from _between_servers(deepep, device, phase, value_bytes)
        yield from _in_a_rack([r for r in rows if r["kernel"] == NVLINK_KERNEL and r["phase"] == phase], device, phase)


def _on_a_host(rows: Rows, device: Device, phase: str, value_bytes: float) -> Iterator[tuple[str, str, MessageFit]]:
    tables = kernel_tables()
    if not rows:
        return
    name = f"moe_{phase}_deepep" if device.system in tables.beside_hybridep else f"moe_{phase}"
    ranks = tables.deepep_ranks.of(device.system)
    source = f"fit: {device.system} DeepEP normal {phase} on {sizes(rows, 'sms')} SMs, one host of {ranks}, {tables.source}"
    yield "scale-up", name, fit_moe(rows, np.full(len(rows), float(ranks)), value_bytes, device.scale_up_bytes_per_s, source)


def _between_servers(rows: Rows, device: Device, phase: str, value_bytes: float) -> Iterator[tuple[str, str, MessageFit]]:
    tables = kernel_tables()
    # the spine of that fabric slows eight servers down
    rows = [r for r in rows if r["nodes"] in ("2", "4") and int(r["sms"]) >= tables.feeding_sms.value]
    if not rows:
        return
    how = f"2/4 servers of 8 with 400 Gb/s NICs, {sizes(rows, 'sms')} SMs"
    source = f"fit: {device.system} DeepEP normal {phase}, {how}, {tables.source}"
    nic, ranks = tables.servers_nic_bytes_per_s.value, float(tables.deepep_ranks.of(device.system))
    yield "scale-out", f"moe_{phase}", fit_moe(rows, column(rows, "nodes"), value_bytes, nic, source, ranks)


def _in_a_rack(rows: Rows, device: Device, phase: str) -> Iterator[tuple[str, str, MessageFit]]:
    tables = kernel_tables()
    rows = [r for r in rows if r["dtype"] == "bfloat16" and int(r["ep"]) >= tables.nvlink_ranks.value]
    if not rows:
        return
    source = f"fit: {device.system} TensorRT-LLM NVLink two-sided {phase} in BF16, EP {sizes(rows, 'ep')}, {tables.source}"
    links = device.scale_up_bytes_per_s
    yield "scale-up", f"moe_{phase}", fit_moe(rows, column(rows, "ep"), BF16_BYTES, links, source, dealt=True)


def _fit(points: Points, rows: Rows, collective: str, source: str, hop_latency_s: Fitted | None) -> MessageFit:
    """Fits the parameters that the points can tell apart: hop time and local copy need several group sizes."""
    several = np.unique(points.n).size > 1
    free_hop = several and hop_latency_s is None and np.unique(points.hops).size > 1
    names = ["efficiency", "half_bytes", "gamma", "launch_s"]
    best = float((points.wire / points.measured_s).max()) / points.bytes_per_s
    bounds = [
        Parameter(min(best, 1.0), 0.01, min(kernel_tables().extrapolation.value * best, 1.0)),
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
    if points.sms is not None:
        names.append("sm_bytes_per_s")
        bounds.append(Parameter(2e10, 1e8, 1e12))
    if points.tokens is not None and np.unique(points.message / points.tokens).size > 8:  # of several widths, not only top_k
        names.append("handling_bytes")
        bounds.append(Parameter(5e3, 1.0, 1e6))
    fixed: dict[str, Any] = {"passes": 2 if collective == "all_reduce" else 1}
    if hop_latency_s is not None:
        fixed["hop_latency_s"] = hop_latency_s.model_dump()

    def curve(x: FloatArray, low: FloatArray, high: FloatArray) -> CollectiveCurve:
        return CollectiveCurve.model_validate({**fixed, **figures(names, x, low, high, source)})

    def fit(keep: NDArray[np.bool_]) -> CollectiveCurve:
        estimate = fit_log(lambda x: points.predicted_s(curve(x, x, x))[keep], points.measured_s[keep], bounds)
        return curve(estimate.value, estimate.low, estimate.high)

    half, whole = fit(points.fitted), fit(np.ones_like(points.fitted))
    return MessageFit(whole, half, held_out(points.predicted_s(half), points.measured_s, points.fitted, source), points, rows)

"""Profile: what share of an accelerator's datasheet rates its kernels and collectives reach, as curves over sizes.

A profile is physics of one accelerator. What a training framework loses on top (efficiency scalar, host floors, overlap)
belongs to the Stack, bandwidths and latencies of the network to the ClusterSpec. A site's own profile may lay what it measured of
a stack over the catalog's figures (`stacks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeFloat, field_validator, model_validator

from ..search_spaces.cluster import Figure
from ..search_spaces.documents import parse_document, read_document, to_record
from ..search_spaces.errors import InputError
from ..search_spaces.model import Frozen
from ..search_spaces.stack import CALIBRATED, Stack, check_figures
from .exchanges import exchanges
from .pooling import Pair

FloatArray = NDArray[np.float64]

FITS = "fits.yaml"
Z95 = 1.96
DEFAULT = "default"  # the profile of accelerators that nobody has measured

PRECISION_ALIASES = {"fp16": "bf16", "fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
"""Precisions that run on the tensor-core path of another one and share its curve."""


class Fitted(Frozen):
    """One fitted or documented figure, the interval it lies in, and what it was read from or fitted on."""

    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat
    source: str

    @model_validator(mode="after")
    def _interval_holds_value(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"value {self.value:g} lies outside its interval {self.low:g} to {self.high:g}")
        return self


class Efficiency(Fitted):
    """A share of a datasheet rate: above 0, at most 1."""

    value: Annotated[float, Field(gt=0, le=1)]
    low: Annotated[float, Field(gt=0, le=1)]
    high: Annotated[float, Field(gt=0, le=1)]


class GemmCurve(Frozen):
    """C(m×n) = A(m×k)·B(k×n): share of dense peak e_max / ((1 + m0/m)(1 + n0/n)(1 + k0/k)), plus a fixed launch time."""

    e_max: Efficiency
    m0: Fitted
    n0: Fitted
    k0: Fitted
    launch_s: Fitted


class GroupedGemmCurve(Frozen):
    """Experts' GEMMs in one kernel, relative to the plain GEMM of the same precision.

    time = gemm_s(curve, peak, tokens per expert, n, k, batch = local experts) without launch / relative_efficiency + launch_s.
    """

    relative_efficiency: Efficiency
    launch_s: Fitted


class AttentionCurve(Frozen):
    """One attention kernel: share of dense peak e_max / ((1 + seq0/seq)(1 + head_dim0/head_dim)).

    `seq` is the sequence length that one kernel call covers (a window's or a CP rank's where that is shorter). The
    head-dimension term is the softmax: its work per score does not shrink with the head.
    """

    e_max: Efficiency
    seq0: Fitted
    head_dim0: Fitted


class AttentionCurves(Frozen):
    """Attention forward and backward, with a fused (flash) kernel and unfused (scores written to memory).

    Flash kernels skip masked blocks: a causal mask halves their FLOPs; their backward counts 2.5 times the forward's (five
    GEMMs for two). Unfused attention does all FLOPs whatever the mask, its backward 2 times the forward's, and its curves
    hold the whole score path, softmax and memory traffic included.
    """

    forward: AttentionCurve
    backward: AttentionCurve
    unfused_forward: AttentionCurve
    unfused_backward: AttentionCurve


class CollectiveCurve(Frozen):
    """One collective over one kind of level.

    time = launch_s + hops · (hop_latency_s, or the level's latency where that is not measured)
         + (wire + local_cost · max(passes · message − wire, 0)) / (bandwidth · efficiency) · (1 + (half_bytes / message)^gamma)

    `wire` is what one device sends, `message` the collective's buffer S. A byte of S that stays on its device is still copied
    (all-gather, reduce-scatter, all-to-all: S/n of it, one pass; all-reduce: 2S/n, two passes) at `local_cost` of a sent one.
    `hop_latency_s` is the whole time per hop, the library's part and the wire's, read off small messages. `half_bytes` belong to
    the adapter's bandwidth: of links that are oversubscribed, fewer bytes fill the wait, by as much.

    Kernels that copy by themselves reach `sm_bytes_per_s` per multiprocessor given to them, over all copies of a token and
    `handling_bytes` more for each token; the two times, theirs and the links', join as `together_s` says.
    """

    efficiency: Efficiency
    half_bytes: Fitted
    gamma: Fitted
    launch_s: Fitted
    hop_latency_s: Fitted | None = None
    local_cost: Fitted | None = None
    sm_bytes_per_s: Fitted | None = None
    handling_bytes: Fitted | None = None
    passes: Literal[1, 2] = 1


class Interval(Frozen):
    """Relative interval of measured over predicted: 0.9 to 1.15 says that the truth lies 10 % below to 15 % above."""

    low: Annotated[float, Field(gt=0, le=1)]
    high: Annotated[float, Field(ge=1)]
    source: str


class Intervals(Frozen):
    """Intervals of step times by stack, accelerator and kind of model ("dense", "moe"), and of pairs that nobody measured.

    `ranking`: how far two layouts of one problem are misjudged against each other, as a share of the step. `typical`: the size of
    log(measured/predicted) that most runs stay below whose model was not measured but whose stack was.
    """

    pairs: dict[str, dict[str, dict[Literal["dense", "moe"], Interval]]] = {}
    unmeasured: dict[Literal["dense", "moe"], Interval] = {}
    ranking: dict[Literal["dense", "moe"], NonNegativeFloat] = {}
    typical: dict[Literal["dense", "moe"], NonNegativeFloat] = {}


class PooledFigure(Frozen):
    """A figure of stacks that nobody measured on an accelerator: factors on the documented one, by what the pair has in common
    with those that were measured (the labels of `pooling.Pair`); `spread` is the width of its logarithm.
    """

    factors: dict[str, Annotated[float, Field(gt=0)]]
    spread: NonNegativeFloat
    source: str

    def applied(self, documented: Figure, labels: Sequence[str]) -> Figure:
        """The documented figure times the factors of the labels."""
        value = documented.value * math.prod(self.factors.get(label, 1.0) for label in labels)
        wide = math.exp(Z95 * self.spread)
        source = f"{self.source}, instead of {documented.value:g} ({documented.source})"
        return Figure(value=value, low=value / wide, high=value * wide, grade="assumed", source=source)


class FitError(Frozen):
    """How far a fitted curve is from the points that it was not fitted on: relative errors of time, as fractions."""

    held_out_median: NonNegativeFloat
    held_out_p90: NonNegativeFloat
    points_fitted: int
    points_held_out: int
    data: str


class Provenance(Frozen):
    """Where a profile comes from; `errors` are keyed by curve ("gemm.bf16", "collectives.scale-up.all_reduce")."""

    summary: str
    errors: dict[str, FitError] = {}
    notes: tuple[str, ...] = ()


class Profile(Frozen):
    """All curves of one accelerator.

    `gemm` is keyed by precision (bf16, fp8 = scaled per block, fp8_tensor = scaled per tensor, fp4), `collectives` by the
    level's `efficiency_profile` ("scale-up", "scale-out") and then by collective: all_reduce, all_gather, reduce_scatter,
    all_to_all, p2p, and where known those that end in _direct (to every peer at once, in one hop), all_reduce_in_network (switches
    reduce; wire = S), moe_dispatch and moe_combine (fused token exchange; wire and message count each token once per destination
    device), and those with a kernel's name behind (_deepep) where it is another one than most stacks run on the accelerator.
    """

    accelerator: str
    fitted: bool  # False: documented figures only, no curve was fitted on this accelerator
    gemm: dict[str, GemmCurve]
    grouped_gemm: GroupedGemmCurve
    attention: AttentionCurves
    memory_efficiency: Efficiency  # share of memory bandwidth that elementwise kernels reach
    by_value_share: Efficiency  # of that rate, where kernels go value by value: `Operator.by_value`
    elementwise_launch_s: Fitted
    collectives: dict[str, dict[str, CollectiveCurve]]
    step_time_interval: Interval
    step_time_interval_moe: Interval | None = None  # of models with experts, where they are known less well
    provenance: Provenance
    stacks: dict[str, dict[str, dict[str, Figure]]] = {}  # fitted figures of a stack on an accelerator
    intervals: Intervals = Intervals()
    pooled: dict[str, PooledFigure] = {}  # for stacks without an entry on the accelerator
    learnt_on: dict[str, dict[str, tuple[str, ...]]] = {}  # clusters of a site's runs by stack and accelerator: ClusterSpec.rates

    @field_validator("pooled")
    @classmethod
    def _known_pooled(cls, pooled: dict[str, PooledFigure]) -> dict[str, PooledFigure]:
        for name in pooled:
            if name not in CALIBRATED:
                raise ValueError(f"{name!r} is not one of {', '.join(CALIBRATED)}")
        return pooled

    @field_validator("stacks")
    @classmethod
    def _known_figures(cls, stacks: dict[str, dict[str, dict[str, Figure]]]) -> dict[str, dict[str, dict[str, Figure]]]:
        for stack, accelerators in stacks.items():
            for accelerator, figures in accelerators.items():
                check_figures(f"{stack} on {accelerator}", figures)
        return stacks

    def learnt_stacks(self, accelerator: str) -> tuple[str, ...]:
        """Stacks of which a site's own runs on an accelerator taught something."""
        return tuple(name for name, there in self.learnt_on.items() if accelerator in there)

    def stack_figures(self, stack: Stack, accelerator: str) -> dict[str, Figure]:
        """Figures that lie over a stack's documented ones on an accelerator: its own fitted ones, else what others let expect."""
        own = self.stacks.get(stack.name, {}).get(accelerator)
        return self.pooled_figures(stack, accelerator) if own is None else own

    def pooled_figures(self, stack: Stack, accelerator: str) -> dict[str, Figure]:
        """Figures of a stack without an entry on an accelerator; what was measured or given of it stays as it is."""
        if accelerator in self.stacks.get(stack.name, {}):
            return {}
        labels = Pair(stack.name, stack.framework, accelerator).labels
        documented = {name: getattr(stack, name) for name in self.pooled}
        free = {name: figure for name, figure in documented.items() if figure.grade not in ("measured", "given")}
        return {name: self.pooled[name].applied(figure, labels) for name, figure in free.items()}

    def interval(self, stack: str, accelerator: str, moe: bool) -> Interval:
        """The relative interval of step times: of the pair where it was measured, else the widest that is known to apply."""
        own = self.intervals.pairs.get(stack, {}).get(accelerator, {}).get("moe" if moe else "dense")
        return self.unmeasured_interval(stack, accelerator, moe) if own is None else own

    def unmeasured_interval(self, stack: str, accelerator: str, moe: bool) -> Interval:
        """The same of a pair of which nothing was measured."""
        kind: Literal["dense", "moe"] = "moe" if moe else "dense"
        documented = self.step_time_interval_moe or self.step_time_interval if moe else self.step_time_interval
        others = self.intervals.unmeasured.get(kind)
        if others is None:
            return documented
        source = f"{stack} was not measured on {accelerator} with such models; {others.source}; {documented.source}"
        return Interval(low=min(others.low, documented.low), high=max(others.high, documented.high), source=source)

    def gemm_curve(self, precision: str) -> GemmCurve:
        """The GEMM curve of a precision or of the path it shares; InputError when the profile has none."""
        curve = self.gemm.get(PRECISION_ALIASES.get(precision, precision))
        if curve is None:
            raise InputError(
                f"profile {self.accelerator!r} has no gemm curve for precision {precision!r}; it has {_names(self.gemm)}."
            )
        return curve

    def collective_curves(self, section: str) -> dict[str, CollectiveCurve]:
        """The curves of a kind of level; InputError names what is missing."""
        if section not in self.collectives:
            raise InputError(
                f"profile {self.accelerator!r} has no collectives section {section!r}; "
                f"efficiency_profile of a level must be one of {_names(self.collectives)}."
            )
        return self.collectives[section]

    def collective_curve(self, section: str, collective: str) -> CollectiveCurve:
        """The curve of a collective on a kind of level; InputError names the missing section or collective."""
        curves = self.collective_curves(section)
        curve = curves.get(collective)
        if curve is None:
            raise InputError(f"profile {self.accelerator!r}: {section} has no curve for {collective!r}; it has {_names(curves)}.")
        return curve


def load_profile(accelerator_name: str, path: str | None = None, fits: bool = True) -> Profile:
    """Profile of an accelerator: the shipped file of that name, else of the longest name that it extends, else the default.

    A grade or memory variant (ascend-910b-376t, say) thus takes its family's figures, and so does one whose file names another's
    (`curves_of`); `default.yaml` has `fitted: false`.
    `path` is a user's YAML that overrides section by section: a mapping is merged key by key down to single figures, a
    figure (value, low, high, source) is replaced whole. Raises InputError on unreadable or malformed files. Between the two lie
    the stacks' figures of `fits.yaml`, which were fitted to published runs; without `fits` the documented ones hold.
    """
    if path is None:
        return _shipped_profile(accelerator_name, fits)
    _, data = _shipped_figures(accelerator_name, fits)
    return to_record(Profile, _merged(data, read_document(Path(path))), path)


@cache
def _shipped_profile(accelerator_name: str, fits: bool) -> Profile:
    family, data = _shipped_figures(accelerator_name, fits)
    return to_record(Profile, data, f"profile {family}")


def _shipped_figures(accelerator_name: str, fits: bool) -> tuple[str, dict[str, Any]]:
    """The family of an accelerator, and what ships with the package of it."""
    shipped = resources.files(__package__) / "profiles"
    names = [file.name.removesuffix(".yaml") for file in shipped.iterdir() if file.name.endswith(".yaml")]
    name = accelerator_name.lower()
    family = max((n for n in names if name == n or name.startswith(f"{n}-")), key=len, default=DEFAULT)
    shared = _shipped("profiles", f"{family}.yaml", f"profile {family}").get("curves_of", family)
    data = {**_shipped("profiles", f"{shared}.yaml", f"profile {shared}"), "accelerator": accelerator_name}
    return family, _merged(data, _shipped(".", FITS, FITS)) if fits else data


@cache
def _shipped(folder: str, file: str, name: str) -> dict[str, Any]:
    """A document that comes with the package, read once; nobody changes it."""
    text = (resources.files(__package__) / folder / file).read_text(encoding="utf-8")
    return parse_document(text, name)


def gemm_s(curve: GemmCurve, peak: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1) -> FloatArray:
    """Seconds of `batch` GEMMs of m×n×k in one kernel at dense `peak` FLOP/s; arguments broadcast; an empty GEMM costs 0."""
    rows, columns, depth, count = (np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
    # mnk (1 + m0/m)(1 + n0/n)(1 + k0/k) = (m + m0)(n + n0)(k + k0): no division by an empty GEMM's size
    padded = (rows + curve.m0.value) * (columns + curve.n0.value) * (depth + curve.k0.value)
    rate = np.asarray(peak, dtype=np.float64) * curve.e_max.value
    return _where(rows * columns * depth * count > 0, 2.0 * count * padded / rate + curve.launch_s.value)


def grouped_gemm_s(
    curve: GemmCurve, grouped: GroupedGemmCurve, peak: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, groups: ArrayLike
) -> FloatArray:
    """Seconds of one grouped GEMM: `groups` experts, each m×n×k (m = mean tokens per expert); arguments broadcast."""
    single_s = gemm_s(curve, peak, m, n, k, groups)
    work_s = (single_s - curve.launch_s.value) / grouped.relative_efficiency.value + grouped.launch_s.value
    return _where(single_s > 0, work_s)


def attention_efficiency(curve: AttentionCurve, seq: ArrayLike, head_dim: ArrayLike) -> FloatArray:
    """Share of dense peak that an attention kernel reaches; arguments broadcast and must be positive."""
    keys, width = np.asarray(seq, dtype=np.float64), np.asarray(head_dim, dtype=np.float64)
    share: FloatArray = curve.e_max.value * (keys / (keys + curve.seq0.value)) * (width / (width + curve.head_dim0.value))
    return share


def collective_s(
    curve: CollectiveCurve,
    bandwidth: ArrayLike,
    latency: ArrayLike,
    hops: ArrayLike,
    wire_bytes: ArrayLike,
    message_bytes: ArrayLike,
) -> FloatArray:
    """Seconds of one collective, as CollectiveCurve defines it; arguments broadcast.

    Bandwidth in bytes/s per device one way, latency in seconds per hop of the level. Nothing sent (`wire_bytes` = 0) costs 0.
    Hops are steps in a row: ring all-gather and reduce-scatter n−1, ring all-reduce 2(n−1), all-to-all, p2p, in-network 1.
    """
    wire, message = np.asarray(wire_bytes, dtype=np.float64), np.asarray(message_bytes, dtype=np.float64)
    rate = np.asarray(bandwidth, dtype=np.float64) * curve.efficiency.value
    hop_s = np.asarray(latency if curve.hop_latency_s is None else curve.hop_latency_s.value, dtype=np.float64)
    moved = wire
    if curve.local_cost is not None:
        moved = wire + curve.local_cost.value * np.maximum(curve.passes * message - wire, 0.0)
    sent = (wire > 0) & (message > 0)
    ramp = (curve.half_bytes.value / np.where(sent, message, 1.0)) ** curve.gamma.value
    time_s = curve.launch_s.value + np.asarray(hops, dtype=np.float64) * hop_s + moved / rate * (1.0 + ramp)
    return _where(sent, time_s)


def together_s(links_s: ArrayLike, copies_s: ArrayLike) -> FloatArray:
    """Seconds of a kernel whose copies feed the links as it goes: of the slower one, somewhat more where both take as long."""
    slower, faster = np.maximum(links_s, copies_s), np.minimum(links_s, copies_s)
    ratio, order = faster / np.where(slower > 0, slower, 1.0), exchanges().sharpness.value
    return np.asarray(slower * (1.0 + ratio**order) ** (1.0 / order), dtype=np.float64)


def _where(condition: NDArray[np.bool_], time_s: FloatArray) -> FloatArray:
    return np.where(condition, time_s, np.zeros_like(time_s))


def _names(keys: dict[str, Any]) -> str:
    return ", ".join(sorted(keys)) or "none"


def _merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`override` laid over `base`; figures are replaced whole, lest a new value keep an old interval and source."""
    result = dict(base)
    for key, value in override.items():
        old = base.get(key)
        sections = isinstance(old, dict) and isinstance(value, dict) and "source" not in old
        result[key] = _merged(cast("dict[str, Any]", old), value) if sections else value
    return result

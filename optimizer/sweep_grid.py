"""A sweep.yaml as points: every combination of its models, clusters, devices, batches, lengths, precisions and options.

    models: [llama-3.1-8b, {family: moe, sizes: [600B, 10T]}]   # names, files beside the YAML, or a scaling family (sweep_family)
    clusters: [hgx-h100, cloudmatrix-384]
    devices: [64, 1024]
    global_batch: [4 per device]                                # sequences a step: numbers, or so many for every device
    seq_len: [4096]
    precision: [bf16]
    options: {forbid: ["pp>16"], stack: [megatron-lm, torchtitan]}

Options are named as the flags of plan. A flag that plan takes once spans the grid if it is given a list; for one that may be
repeated (fix, forbid, constraint, inside, lost, slow) a list is the flag repeated, and a list of lists spans the grid.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt, field_validator

from ..search_spaces.documents import read_document, to_record
from ..search_spaces.errors import InputError
from ..search_spaces.model import Frozen
from .sweep_family import member_name

MOST_POINTS = 1_000_000
PER_DEVICE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(?:per|/|×|x|\*)\s*devices?")
REPEATED = ("fix", "forbid", "constraint", "inside", "lost", "slow")
AXES = ("model", "cluster", "devices", "global_batch", "seq_len", "precision")


class PlanOptions(Frozen):
    """Flags of plan that a point may carry. `top` is 1 unless it is given: the best layout is the same, its record is smaller."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stack: str | None = None
    fix: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    constraint: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    free: str | None = None
    lost: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    reserve: float | None = None
    offload_to: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    profile: str | None = None
    objective: str = "step-time"
    device_hour_price: float | None = None
    sensitivity: bool = False
    robust: bool = False
    refine: bool = False
    trials: int | None = None
    hedge_imbalance: str | None = None
    hedge_by: str | None = None
    engine: str = "auto"
    time_limit: Annotated[float, Field(gt=0)] | None = None
    top: PositiveInt = 1
    memory_margin: float | None = None
    vocab_size: int | None = None
    expert_imbalance: float | None = None
    expert_loads: str | None = None

    @field_validator(*REPEATED, mode="before")
    @classmethod
    def _once_or_often(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stack", "free", "framework_version", "hedge_imbalance", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        """A version such as 0.16, which YAML reads as a number."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Point:
    """One problem of a sweep, as it was asked for; `options` holds only what was given."""

    model: str
    cluster: str
    devices: int
    global_batch: int
    seq_len: int
    precision: str
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The point's name in a store: equal for equal questions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Point:
        return cls(**json.loads(text))


class _Scaling(Frozen):
    """Sizes of one family."""

    family: str
    sizes: Annotated[tuple[str, ...], Field(min_length=1)]


class _File(Frozen):
    """A sweep.yaml; a single value stands for a list of one."""

    models: Annotated[tuple[str | _Scaling, ...], Field(min_length=1)]
    clusters: Annotated[tuple[str, ...], Field(min_length=1)]
    devices: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    global_batch: Annotated[tuple[PositiveInt | str, ...], Field(min_length=1)]
    seq_len: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    precision: Annotated[tuple[str, ...], Field(min_length=1)] = ("bf16",)
    options: dict[str, Any] = {}

    @field_validator("models", "clusters", "devices", "global_batch", "seq_len", "precision", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else (value,)


def read_sweep(path: Path) -> list[Point]:
    """The points of a sweep.yaml in the order of its lists, models outermost, each once. InputError for what it cannot mean.

    What only a plan could find wrong (a cluster that does not exist, say) is left to the points: each is a result with its reason.
    """
    data = read_document(path)
    found = to_record(_File, data, str(path))
    options = list(_option_sets(found.options, str(path)))
    try:
        models = [name for one in found.models for name in _names(one)]
        batches = [_batch(one) for one in found.global_batch]
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    axes = (models, found.clusters, found.devices, batches, found.seq_len, found.precision, options)
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_POINTS:
        raise InputError(f"{path}: names {count:,} points; at most {MOST_POINTS:,} fit one sweep, so split it")
    points = (
        Point(model, cluster, devices, _sequences(batch, devices), seq_len, precision, chosen)
        for model, cluster, devices, batch, seq_len, precision, chosen in itertools.product(*axes)
    )
    return list({point.key: point for point in points}.values())


def _names(model: str | _Scaling) -> Iterable[str]:
    return [model] if isinstance(model, str) else [member_name(model.family, size) for size in model.sizes]


def _batch(given: int | str) -> int | float:
    """Sequences a step as they stand, or for every device as a float."""
    if isinstance(given, int):
        return given
    found = PER_DEVICE.fullmatch(given.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise InputError(f"global_batch = {given!r}: must be a whole number or such as '4 per device'")
    return float(found[1])


def _sequences(batch: int | float, devices: int) -> int:
    return batch if isinstance(batch, int) else max(1, round(batch * devices))


def _option_sets(options: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """Every combination of the options' values, each checked and holding only what differs from plan's own defaults."""
    names = [name.replace("-", "_") for name in options]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: options.{twice} is given twice; leave one out")
    spans = [_span(name, value) for name, value in zip(names, options.values(), strict=True)]
    for values in itertools.product(*spans):
        checked = to_record(PlanOptions, dict(zip(names, values, strict=True)), f"{where}: options")
        yield json.loads(checked.model_dump_json(exclude_unset=True))


def _span(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    if name in REPEATED and not all(isinstance(item, list) for item in value):
        return [value]
    return value

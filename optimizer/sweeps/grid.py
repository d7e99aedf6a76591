"""A sweep.yaml as points: every combination of its models, clusters, devices, batches, lengths, precisions and options.

    models: [llama-3.1-8b, {family: moe, sizes: [600B, 10T]}]   # names, files beside the YAML, or a scaling family (sweep_family)
    clusters: [hgx-h100, cloudmatrix-384]
    devices: [64, 1024]                                         # or as much as others: "peak of 2048 hgx-h100", "price of …"
    global_batch: [4 per device]                                # sequences a step: numbers, 4 per device, or 4Mi tokens
    seq_len: [4096]
    precision: [bf16]
    options: {forbid: ["pp>16"], stack: [megatron-lm, torchtitan]}
    prices: {hgx-h100: 2.5, cloudmatrix-384: 1.2}               # of a device-hour, for "price of …"; or a file of such pairs

Options are named as the flags of plan. A flag that plan takes once spans the grid if it is given a list; for one that may be
repeated (fix, forbid, constraint, inside, lost, slow) a list is the flag repeated, and a list of lists spans the grid.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from ...search_spaces.documents import did_you_mean, read_document, to_record
from ...search_spaces.errors import InputError
from ...search_spaces.model import Frozen
from ...search_spaces.scaling_families import member_name

if TYPE_CHECKING:
    from .counts import Alike

MOST_POINTS = 1_000_000
PER_DEVICE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(?:per|/|×|x|\*)\s*devices?")
TOKENS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(|ki|mi|gi|k|m|g)\s*tokens?")
MULTIPLES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
Count = Annotated[int, Field(strict=True, gt=0)]
Number = Annotated[float, Field(strict=True)]
"""Strict: true is no number."""
REPEATED = ("fix", "forbid", "constraint", "inside", "lost", "slow")
AXES = ("model", "cluster", "devices", "global_batch", "seq_len", "precision")


class PlanOptions(Frozen):
    """Flags of plan that a point may carry. `top` is 1 unless it is given: the best layout is the same, its record is smaller.

    `bound_cuts` is no flag: whether the certificate also says what other cuts of the plan's layers could gain, as plan's does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stack: str | None = None
    fix: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    constraint: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    rank_order: str = "flags"
    checkpoint: str | None = None
    free: str | None = None
    lost: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    reserve: Number | None = None
    offload_to: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    profile: str | None = None
    objective: str = "step-time"
    device_hour_price: Number | None = None
    sensitivity: bool = False
    robust: bool = False
    refine: bool = False
    trials: Count | None = None
    hedge_imbalance: str | None = None
    hedge_by: str | None = None
    refine_precision: str | None = None
    engine: str = "auto"
    time_limit: Annotated[Number, Field(gt=0)] | None = None
    top: Count = 1
    memory_margin: Number | None = None
    vocab_size: Count | None = None
    expert_imbalance: Number | None = None
    expert_loads: str | None = None
    bound_cuts: bool = False

    @field_validator(*REPEATED, mode="before")
    @classmethod
    def _once_or_often(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stack", "free", "framework_version", "hedge_imbalance", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        """A version such as 0.16, which YAML reads as a number."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True, order=True)
class Batch:
    """A global batch as a rule that points share: so many sequences a step, so many for every device, or so many tokens a step."""

    unit: Literal["sequences", "per device", "tokens"]
    amount: float

    def sequences(self, devices: int, seq_len: int) -> int:
        per = {"sequences": 1.0, "per device": devices, "tokens": 1.0 / seq_len}[self.unit]
        return max(1, round(self.amount * per))

    @property
    def words(self) -> str:
        return f"{self.amount:,g} {self.unit}" if self.unit == "per device" else f"{self.amount:,.0f} {self.unit}"


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
        return key_of(self.to_json())

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Point:
        return cls(**json.loads(text))


def key_of(asked: str) -> str:
    """The key of a point given as JSON."""
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


class _Scaling(Frozen):
    """Sizes of one family."""

    family: str
    sizes: Annotated[tuple[str, ...], Field(min_length=1)]


class _File(Frozen):
    """A sweep.yaml; a single value stands for a list of one."""

    models: Annotated[tuple[str | _Scaling, ...], Field(min_length=1)]
    clusters: Annotated[tuple[str, ...], Field(min_length=1)]
    devices: Annotated[tuple[Count | str, ...], Field(min_length=1)]
    global_batch: Annotated[tuple[Count | str, ...], Field(min_length=1)]
    seq_len: Annotated[tuple[Count, ...], Field(min_length=1)]
    precision: Annotated[tuple[str, ...], Field(min_length=1)] = ("bf16",)
    options: dict[str, Any] = {}
    prices: dict[str, Annotated[Number, Field(gt=0)]] | str = {}

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
        _refuse_fractions(found.global_batch, batches, found.seq_len)
        _refuse_unknown_prices(found, path.absolute().parent)
        count_of = _counts(found, path.absolute().parent)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    axes = (models, found.clusters, found.devices, batches, found.seq_len, found.precision, options)
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_POINTS:
        raise InputError(f"{path}: names {count:,} points; at most {MOST_POINTS:,} fit one sweep, so split it")
    points = (
        Point(model, cluster, count, batch.sequences(count, seq_len), seq_len, precision, chosen)
        for model, cluster, devices, batch, seq_len, precision, chosen in itertools.product(*axes)
        for count in [count_of[cluster, devices]]
    )
    return list({point.key: point for point in points}.values())


def roundings(path: Path) -> tuple[str, ...]:
    """What a sweep.yaml's batches of tokens come to where no whole number of sequences is exactly as many, in sentences."""
    found = to_record(_File, read_document(path), str(path))
    return tuple(
        f"global_batch = {given!r}: with sequences of {seq_len:,} tokens taken as {count:,} of them, {count * seq_len:,} tokens"
        for given in found.global_batch
        for seq_len in found.seq_len
        if (batch := _batch(given)).unit == "tokens" and batch.amount % seq_len
        for count in [batch.sequences(1, seq_len)]
    )


def _refuse_fractions(given: Iterable[int | str], batches: Iterable[Batch], seq_lens: Iterable[int]) -> None:
    """InputError for a batch of so few tokens that it rounds to no sequence."""
    longest = max(seq_lens)
    for said, batch in zip(given, batches, strict=True):
        if batch.unit == "tokens" and 2 * batch.amount < longest:
            raise InputError(f"global_batch = {said!r}: is less than one sequence of seq_len {longest}; ask for a multiple of it")


def _refuse_unknown_prices(found: _File, folder: Path) -> None:
    """InputError for a price of a cluster that is neither here nor in the catalog."""
    if not isinstance(found.prices, dict):
        return
    from ...search_spaces.inputs import catalog_names, load_cluster

    known = [*catalog_names("clusters"), *found.clusters]
    for name in found.clusters:
        if (folder / name).is_file():
            with contextlib.suppress(InputError):  # told by the points of that cluster
                known.append(load_cluster(folder / name).name)
    for name in found.prices:
        if name not in known:
            raise InputError(f"prices.{name}: {name!r} is no cluster of this sweep or the catalog{did_you_mean(name, known)}")


def _counts(found: _File, folder: Path) -> dict[tuple[str, int | str], int]:
    """Devices by cluster and by what stands in the list."""
    given: dict[tuple[str, int | str], int] = {
        (cluster, count): count for cluster in found.clusters for count in found.devices if isinstance(count, int)
    }
    return given | {(name, like): alike.devices for name, like, alike in _alike(found, folder)}


def alike(path: Path) -> Iterator[tuple[str, str, Alike]]:
    """Of a sweep.yaml every cluster, what it is to have as much of as another, and the devices taken for that."""
    return _alike(to_record(_File, read_document(path), str(path)), path.absolute().parent)


def likenesses(path: Path) -> Iterator[str]:
    """What devices of one peak or price come to, in sentences."""
    for given, found in itertools.groupby(alike(path), key=lambda each: each[1]):
        said = ", ".join(f"{one.devices:,} on {cluster} ({100 * one.share:.1f} % of it)" for cluster, _, one in found)
        yield f"devices = {given!r}: {said}"


def _alike(found: _File, folder: Path) -> Iterator[tuple[str, str, Alike]]:
    like = [given for given in found.devices if isinstance(given, str)]
    if not like:
        return
    from ...search_spaces.inputs import load_cluster
    from ..comparing import read_prices
    from .counts import Like

    beside = {path.name: str(path) for path in folder.glob("*.yaml")}
    own, file = found.prices, found.prices if isinstance(found.prices, str) else ""
    prices = own if isinstance(own, dict) else read_prices([beside.get(file, file)], field="prices")
    machines = {cluster: load_cluster(beside.get(cluster, cluster)) for cluster in found.clusters}
    shared = [batch for batch in map(_batch, found.global_batch) if batch.unit != "per device"]
    batches = {batch.sequences(1, seq_len) for batch in shared for seq_len in found.seq_len}
    for given in like:
        wanted = Like.read(given)
        for name, machine in machines.items():
            yield name, given, wanted.of(machine, beside, prices, batches)


def _names(model: str | _Scaling) -> Iterable[str]:
    return [model] if isinstance(model, str) else [member_name(model.family, size) for size in model.sizes]


def _batch(given: int | str) -> Batch:
    if isinstance(given, int):
        return Batch("sequences", given)
    text = given.strip().lower()
    if (found := PER_DEVICE.fullmatch(text)) and float(found[1]) > 0:
        return Batch("per device", float(found[1]))
    if (found := TOKENS.fullmatch(text)) and float(found[1]) > 0:
        return Batch("tokens", float(found[1]) * MULTIPLES[found[2]])
    raise InputError(f"global_batch = {given!r}: must be a whole number of sequences, or such as '4 per device' or '4Mi tokens'")


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

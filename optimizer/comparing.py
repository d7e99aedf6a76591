"""Clusters side by side: the best plan of one model on each, what its tokens cost, and where one is cheaper than another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from pathlib import Path

from ..cost_models.checkpoint import Failures
from ..cost_models.money import per_million_tokens
from ..cost_models.reliability import supernode_size
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.documents import read_document
from ..search_spaces.errors import Infeasible, InputError
from ..search_spaces.inputs import build_problem
from ..search_spaces.model import ModelSpec
from ..search_spaces.scaling import scaled
from .endurance import goodput_of
from .interrupts import came, stoppable
from .planner import plan
from .reports import wording
from .result import PricedLayout, Result

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
MOVES = 1.05
"""Largest over least ratio of prices from which on it is told how a size moves between them."""
UNPLANNED = "was not planned: interrupted before"
Progress = Callable[[str, float], None]


class Side(Result):
    """One cluster: its best plan and what a million tokens cost there, failures included where they are known."""

    cluster: str
    devices: int
    supernode: int
    reason: str = ""  # why there is no plan
    plan: PricedLayout | None = None
    goodput: float | None = None
    tokens_per_s: float | None = None  # of the job, after failures
    device_hours: float | None = None  # per million tokens
    price: float | None = None
    kwh: float | None = None

    @property
    def per_device(self) -> float | None:
        """Tokens per second and device given, after failures."""
        return None if self.tokens_per_s is None else self.tokens_per_s / self.devices


class Row(Result):
    """All sides at one size of the model."""

    parameters: int
    active_parameters: int
    sides: tuple[Side, ...]


class Reach(Result):
    """Parameters from `least` to `most`; without the one, all that is smaller, without the other, all that is larger."""

    least: float | None = None
    most: float | None = None


class Overtake(Result):
    """Two clusters over the sizes: tokens per device of `second` over those of `first`, which is also the price of its device-hour
    over the first's at which they cost the same, none where one of them has no plan; `cheaper` are the sizes at which `second` is
    the cheaper one or has the only plan, and `by_ratio` has them for other ratios of the prices, over the range in which they
    decide. `alone` says in sentences where only one has a plan.
    """

    first: str
    second: str
    premium: tuple[float | None, ...]
    price_ratio: float
    priced: bool  # else both device-hours are taken to cost the same
    cheaper: tuple[Reach, ...] = ()
    by_ratio: tuple[tuple[float, tuple[Reach, ...]], ...] = ()
    alone: tuple[str, ...] = ()
    verdict: str


class Compared(Result):
    """The model as asked for or at several sizes, on several clusters."""

    model: str
    global_batch: int
    seq_len: int
    precision: str
    rows: tuple[Row, ...]
    overtakes: tuple[Overtake, ...] = ()
    assumptions: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()  # what an interrupt left unplanned, in words


@dataclass(frozen=True)
class Field:
    """Clusters with their devices, and prices of a device-hour by name."""

    clusters: tuple[ClusterSpec, ...]
    devices: tuple[int, ...]
    prices: Mapping[str, float]


def read_prices(given: Sequence[str], names: Sequence[str] | None = None, field: str = "--price") -> dict[str, float]:
    """Prices of a device-hour from NAME=PRICE or YAML files of such pairs, of the clusters named or of all.

    InputError for no price, or of no cluster here; it begins with `field`, which the user gave them by.
    """
    found: dict[str, float] = {}
    for text in given:
        name, equals, price = text.partition("=")
        where = f"{field} {text[:60] if equals else text}"
        if text.count("=") > 1:
            raise InputError(f"{where}: names several clusters; repeat {field}, once for each")
        if not equals and not Path(text).exists():
            raise InputError(f"{where}: is neither CLUSTER=PRICE, such as hgx-h100=2.5, nor a YAML of such pairs")
        try:
            pairs = {name.strip(): price} if equals else read_document(Path(text))
        except InputError as error:
            raise InputError(f"{field}: {error}") from error
        for key, value in pairs.items():
            try:
                number = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not 0 < number < math.inf:
                raise InputError(f"{where}: {key} = {value!r} is not the price of a device-hour, such as 2.5")
            if equals and names is not None and key not in names:
                raise InputError(f"{where}: {key!r} is not compared here; there is {', '.join(names)}")
            found[key] = number
    return {key: value for key, value in found.items() if names is None or key in names}


def compare(
    model: ModelSpec,
    field: Field,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
    sizes: Sequence[float] = (),
    progress: Progress | None = None,
) -> Compared:
    """The best plan on every cluster, at the model's own size or at each of `sizes`, there each two clusters compared.

    An interrupt ends it with what is planned by then, the plan that it broke off left out; KeyboardInterrupt where that is nothing.
    """
    models = [scaled(model, size) for size in sorted(sizes)] if sizes else [model]
    asked = [(spec, place) for spec in models for place in range(len(field.clusters))]
    sides, before = list[Side](), came()
    with stoppable() as ended:
        for number, (spec, place) in enumerate(asked):
            if progress is not None:
                progress(field.clusters[place].name, number / len(asked))
            side = _side(spec, field, place, global_batch, seq_len, precision)
            if came() > before:
                break
            sides.append(side)
    if not sides:
        raise ended.by or KeyboardInterrupt
    width = len(field.clusters)
    rows = tuple(_row(spec, sides[n * width : (n + 1) * width], field) for n, spec in enumerate(models) if n * width < len(sides))
    whole = rows[: len(sides) // width]
    pairs = combinations(range(width), 2) if len(whole) > 1 else ()
    return Compared(
        model=model.name,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        rows=rows,
        overtakes=tuple(overtake(whole, first, second, field.prices) for first, second in pairs),
        assumptions=_assumptions(field),
        unanswered=tuple(f"{_named(spec)} on {field.clusters[place].name} {UNPLANNED}" for spec, place in asked[len(sides) :]),
    )


def _row(model: ModelSpec, sides: Sequence[Side], field: Field) -> Row:
    """All sides of a model; those that an interrupt left out say so."""
    left = [
        Side(cluster=cluster.name, devices=devices, supernode=supernode_size(cluster), reason=UNPLANNED)
        for cluster, devices in zip(field.clusters[len(sides) :], field.devices[len(sides) :], strict=True)
    ]
    return Row(parameters=model.parameters(), active_parameters=model.active_parameters(), sides=(*sides, *left))


def _named(model: ModelSpec) -> str:
    return f"{model.name} of {wording.large(model.parameters())}"


def overtake(rows: Sequence[Row], first: int, second: int, prices: Mapping[str, float]) -> Overtake:
    """At which sizes the second cluster's tokens are cheaper: between two sizes by straight lines over the logarithm."""
    names = [rows[0].sides[place].cluster for place in (first, second)]
    priced = all(name in prices for name in names)
    ratio = prices[names[1]] / prices[names[0]] if priced else 1.0
    premium = [_premium(row.sides[first], row.sides[second]) for row in rows]
    told = [each if each is not None and 0 < each < math.inf else None for each in premium]
    cheaper, alone = _cheaper(rows, premium, ratio), tuple(_alone(rows, premium, names))
    return Overtake(
        first=names[0],
        second=names[1],
        premium=tuple(told),
        price_ratio=ratio,
        priced=priced,
        cheaper=cheaper,
        by_ratio=tuple((each, _cheaper(rows, premium, each)) for each in _ratios(told)),
        alone=alone,
        verdict="; ".join((_verdict(names, [each for each in told if each is not None], ratio, cheaper), *alone)),
    )


def in_words(cheaper: Sequence[Reach]) -> str:
    """The sizes at which the second cluster is the cheaper one: up to 21B and from 76B on."""
    return " and ".join(map(_reach_in_words, cheaper)) or "at no size"


def _reach_in_words(reach: Reach) -> str:
    least, most = (None if end is None else wording.large(end) for end in (reach.least, reach.most))
    if least is None or most is None:
        return f"from {least} on" if least else f"up to {most}" if most else "at every size"
    return f"at {least}" if least == most else f"from {least} to {most}"


def _cheaper(rows: Sequence[Row], premium: Sequence[float | None], ratio: float) -> tuple[Reach, ...]:
    """Sizes at which the premium is no less than a ratio of prices; none beside a size at which neither cluster has a plan."""
    known = groupby(zip(rows, premium, strict=True), key=lambda at: at[1] is not None)
    runs = [[(row.parameters, p) for row, p in run if p is not None] for there, run in known if there]
    return tuple(reach for run in runs for reach in _reaches(run, ratio, rows[0].parameters, rows[-1].parameters))


def _alone(rows: Sequence[Row], premium: Sequence[float | None], names: Sequence[str]) -> Iterator[str]:
    """Where only one of two clusters has a plan, a sentence for every run of such sizes."""
    sizes = [wording.large(row.parameters) for row in rows]
    owner = {0.0: names[0], math.inf: names[1]}
    place = 0
    for only, run in groupby(owner.get(each) if each is not None else None for each in premium):
        first, place = place, place + len(list(run))
        if only is None:
            continue
        begins = f"from somewhere between {sizes[first - 1]} and {sizes[first]}" if first else ""
        ends = f"somewhere between {sizes[place - 1]} and {sizes[place]}" if place < len(rows) else ""
        where = f"{begins} {f'to {ends}' if ends else 'on'}" if begins else f"up to {ends}" if ends else "at every size"
        yield f"{where} only {only} has a plan"


def _reaches(run: Sequence[tuple[int, float]], ratio: float, smallest: int, largest: int) -> list[Reach]:
    """The reaches of neighbouring sizes that all have a premium; open where they go up to the smallest or largest size."""
    turns = [_turn(*a, *b, ratio) for a, b in pairwise(run) if (a[1] >= ratio) != (b[1] >= ratio)]
    (first, premium), (last, final) = run[0], run[-1]
    ends: list[float | None] = [None if first == smallest else first] if premium >= ratio else []
    ends += turns
    ends += [None if last == largest else last] if final >= ratio else []
    return [Reach(least=least, most=most) for least, most in zip(ends[::2], ends[1::2], strict=True)]


def _turn(small: int, p: float, large: int, q: float, ratio: float) -> float:
    """Parameters at which a premium passes through a ratio of prices; where one cluster has no plan at one of the two sizes, the
    one at which the second is the cheaper, as far as is known.
    """
    if {p, q} & {0.0, math.inf}:
        return small if p >= ratio else large
    return math.exp(math.log(small) + (ratio - p) / (q - p) * (math.log(large) - math.log(small)))


def _ratios(premium: Sequence[float | None]) -> list[float]:
    """Ratios of prices, a few between those at which one of the two is the cheaper one at every size."""
    known = [each for each in premium if each is not None]
    if len(known) < 2 or max(known) < min(known) * MOVES:
        return []
    return sorted({round(min(known) + share * (max(known) - min(known)), 2) for share in RATIOS})


def _verdict(names: Sequence[str], premium: Sequence[float], ratio: float, cheaper: Sequence[Reach]) -> str:
    where = "a device-hour of both costing the same" if ratio == 1.0 else f"its device-hour costing {ratio:.2f} times as much"
    if not premium:
        return f"{names[1]} and {names[0]} have no size at which both have a plan"
    if not cheaper:
        return f"{names[1]} is at no size the cheaper one, {where}; at best it may cost {max(premium):.2f} times as much"
    return f"{names[1]} is the cheaper one {in_words(cheaper)}, {where}"


def _premium(first: Side, second: Side) -> float | None:
    """Tokens per device of the second over those of the first: 0 or infinite where only the first or the second has a plan."""
    mine, theirs = first.per_device, second.per_device
    if mine is None:
        return None if theirs is None else math.inf
    return 0.0 if theirs is None else theirs / mine


def _side(model: ModelSpec, field: Field, place: int, global_batch: int, seq_len: int, precision: str) -> Side:
    cluster, devices = field.clusters[place], field.devices[place]
    price, supernode = field.prices.get(cluster.name), supernode_size(cluster)
    problem = build_problem(model, cluster, devices, global_batch, seq_len, None, precision)
    try:
        best = plan(problem, top=1, inside_by_default=True, bound_cuts=False).plan
    except Infeasible as error:
        return Side(cluster=cluster.name, devices=devices, supernode=supernode, reason=error.summary)
    failures = Failures.of(problem)
    goodput = None if failures is None else goodput_of(failures, best).goodput
    rate = best.tokens_per_s_per_device * devices * (1.0 if goodput is None else goodput)
    power = cluster.accelerator.power_w
    spent = per_million_tokens(rate, devices, price, None if power is None else power.value)
    return Side(
        cluster=cluster.name,
        devices=devices,
        supernode=supernode,
        plan=best,
        goodput=goodput,
        tokens_per_s=rate,
        device_hours=spent.device_hours,
        price=spent.price,
        kwh=spent.kwh,
    )


def _assumptions(field: Field) -> tuple[str, ...]:
    """Where figures that decide come from, in words."""
    said = [f"a device-hour of {name} costs {price:g} (given)" for name, price in field.prices.items()]
    missing = [cluster.name for cluster in field.clusters if cluster.name not in field.prices]
    said += [f"no price of {', '.join(missing)}: --price {missing[0]}=…, or a YAML of such pairs"] if missing else []
    said.append("energy is that of the devices at their rated power; hosts, network and cooling come on top")
    unrated = {cluster.name: cluster.accelerator.name for cluster in field.clusters if cluster.accelerator.power_w is None}
    if unrated:
        devices = ", ".join(dict.fromkeys(unrated.values()))
        said.append(
            f"no energy of {', '.join(unrated)}: no rated power of {devices} is known; power_w in a copy of its YAML gives it"
        )
    for cluster in field.clusters:
        rates = cluster.failures
        known = [rate for rate in (rates.device_per_year, rates.server_per_year, rates.supernode_per_year) if rate is not None]
        if any(rate.grade == "assumed" for rate in known):
            said.append(f"{cluster.name}: nobody has published how often it fails; its goodput rests on an assumed rate")
    return tuple(said)

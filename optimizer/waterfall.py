"""From one layout to another: what each term of the step and each decision adds to the difference of their step times.

Bars of either waterfall add up to the difference. Decisions interact, so what one of them adds depends on which others were taken
before it: its bar is the mean over all orders (Shapley value), or over one order and its reverse where too many columns changed.
The layouts in between are priced whether or not a run could use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..cost_models.memory import GIB
from ..cost_models.profile import load_profile
from ..cost_models.step import CostModel, same_shape
from ..search_spaces.layout import Bools, Floats, Layout, LayoutTable, Problem, Split
from ..search_spaces.rules import legal_mask, rules_for
from .evaluation import evaluate
from .layout_words import following_dp
from .result import PricedLayout, Result
from .stages import balanced_cuts, default_cuts

DECISIONS = (
    *("devices_used", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch"),
    *("schedule", "sequence_parallel", "cp_type", "optimizer_sharding", "recompute", "offload", "rank_order", "stages"),
)
"""Columns that decide a layout, in the order in which they are taken where not all orders are. dp, edp and num_microbatches follow
from devices and batch, stages from pp and vpp unless those stay."""
MOST_ORDERED = 7
"""Decisions of which all orders are averaged, by 2⁷ prices of layouts."""


class Bar(Result):
    """What one term of the step adds on the way from the first layout to the second."""

    term: str
    first_s: float
    second_s: float
    seconds: float


class Decision(Result):
    """What one changed column adds to the step and to the fullest stage; `first` and `second` are its values."""

    column: str
    first: str
    second: str
    seconds: float
    peak_gib: float


class Waterfall(Result):
    """The way from a first layout to a second: both lists of bars add up to `difference_s`, the second's step less the first's.

    `between` layouts were priced on the way, of which `unusable` break a rule or do not fit: they stand for their decisions only.
    """

    difference_s: float
    terms: tuple[Bar, ...]
    decisions: tuple[Decision, ...]
    averaged: str
    between: int
    unusable: int


class Compared(Result):
    """Two layouts of one problem, the rules that each breaks in sentences, and the way from the first to the second."""

    paraplan: str
    problem: Problem
    first: PricedLayout
    first_broken: tuple[str, ...] = ()
    second: PricedLayout
    second_broken: tuple[str, ...] = ()
    waterfall: Waterfall


def compare_layouts(problem: Problem, first: Layout, second: Layout, *, profile: str | None = None) -> Compared:
    """Prices two layouts, whatever rules they break, and the way from one to the other. Infeasible if one cannot be priced."""
    (one, one_broken), (other, other_broken) = (evaluate(problem, layout, profile=profile) for layout in (first, second))
    model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as, profile))
    return Compared(
        paraplan=version("paraplan"),
        problem=problem,
        first=one,
        first_broken=one_broken,
        second=other,
        second_broken=other_broken,
        waterfall=waterfall(model, one, other),
    )


def waterfall(model: CostModel, first: PricedLayout, second: PricedLayout) -> Waterfall:
    """Both waterfalls between two layouts that `model` priced."""
    walk = _Walk(model, first, second)
    seconds = _settled(walk.shares(walk.step_time_s), second.step_time_s - first.step_time_s)
    peaks = _settled(walk.shares(walk.peak_gib), second.memory.peak_gib - first.memory.peak_gib)
    return Waterfall(
        difference_s=second.step_time_s - first.step_time_s,
        terms=term_bars(first, second),
        decisions=tuple(
            Decision(column=name, first=_shown(walk.first, name), second=_shown(walk.second, name), seconds=s, peak_gib=gib)
            for name, s, gib in zip(walk.changed, seconds, peaks, strict=True)
        ),
        averaged=walk.averaged,
        between=max(0, len(walk.states) - 2),
        unusable=int((~walk.usable).sum()),
    )


def term_bars(first: PricedLayout, second: PricedLayout) -> tuple[Bar, ...]:
    """The terms of the breakdown, each with what it adds."""
    names = list(dict.fromkeys((*first.breakdown_s, *second.breakdown_s)))
    before, after = ([priced.breakdown_s.get(name, 0.0) for name in names] for priced in (first, second))
    added = _settled([b - a for a, b in zip(before, after, strict=True)], second.step_time_s - first.step_time_s)
    return tuple(
        Bar(term=name, first_s=a, second_s=b, seconds=s) for name, a, b, s in zip(names, before, after, added, strict=True)
    )


def changed_columns(problem: Problem, first: Layout, second: Layout) -> tuple[str, ...]:
    """The decisions in which two layouts differ, in the order of DECISIONS; what follows from others is none."""
    return tuple(name for name in DECISIONS if _differs(problem, first, second, name))


def _settled(parts: Sequence[float], whole: float) -> list[float]:
    """The parts with what rounding left of their sum in the largest, so that they add up to the whole."""
    settled = list(parts)
    if settled:
        largest = max(range(len(settled)), key=lambda i: abs(settled[i]))
        settled[largest] += whole - math.fsum(settled)
    return settled


def _differs(problem: Problem, first: Layout, second: Layout, name: str) -> bool:
    """Whether two layouts decide a column differently, rather than by what the other columns make of it."""
    if name == "devices_used":
        return _devices(problem, first) != _devices(problem, second)
    if name == "schedule":
        return first.vpp == second.vpp == 1 and first.schedule != second.schedule
    if name == "sequence_parallel":
        return _departs(first) != _departs(second)
    if name == "cp_type":
        return min(first.cp, second.cp) > 1 and first.cp_type != second.cp_type
    if name == "stages":
        same = (first.pp, first.vpp) == (second.pp, second.vpp) and first.stages and second.stages
        return bool(same) and Split.from_stages(first.stages) != Split.from_stages(second.stages)
    return bool(getattr(first, name) != getattr(second, name))


def _devices(problem: Problem, layout: Layout) -> int:
    """The devices that dp takes up: the problem's, unless the layout's dp is not what follows from them."""
    return problem.devices if layout.dp == following_dp(problem, layout, problem.devices) else layout.devices


def _departs(layout: Layout) -> bool:
    """Whether SP is off although there is TP."""
    return layout.tp > 1 and not layout.sequence_parallel


def _shown(layout: Layout, name: str) -> str:
    if name == "devices_used":
        return str(layout.devices)
    if name == "stages":
        counts = Split.from_stages(layout.stages).counts
        return "+".join(map(str, counts))
    value = getattr(layout, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class _Walk:
    """The layouts between two that share their first or second value of every column: `states` are the sets of columns taken."""

    model: CostModel
    first_priced: PricedLayout
    second_priced: PricedLayout

    @property
    def first(self) -> Layout:
        return self.first_priced.layout

    @property
    def second(self) -> Layout:
        return self.second_priced.layout

    @cached_property
    def changed(self) -> tuple[str, ...]:
        return changed_columns(self.model.problem, self.first, self.second)

    @property
    def _in_all_orders(self) -> bool:
        return len(self.changed) <= MOST_ORDERED

    @property
    def averaged(self) -> str:
        if self._in_all_orders:
            return "the mean over all orders of the decisions (Shapley value)"
        return f"the mean over one order, {', '.join(self.changed)}, and its reverse"

    @cached_property
    def states(self) -> tuple[frozenset[str], ...]:
        """From nothing taken to everything taken."""
        names = self.changed
        if self._in_all_orders:
            return tuple(frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size))
        ways = (names, names[::-1])
        return tuple(dict.fromkeys(frozenset(way[:size]) for size in range(len(names) + 1) for way in ways))

    @cached_property
    def _layouts(self) -> tuple[tuple[Layout, Split | None, float], ...]:
        return tuple(self._layout(taken) for taken in self.states[1:-1])

    @cached_property
    def _priced(self) -> tuple[Floats, Floats, Bools]:
        """Step times and peaks of all states, and which of those between may run."""
        if not self._layouts:
            return np.empty(0), np.empty(0), np.empty(0, dtype=bool)
        layouts, splits, turns = zip(*self._layouts, strict=True)
        table = _cut(self.model, LayoutTable.from_layouts(layouts), splits)
        prices = self.model.price(table)
        rules = tuple(rule for rule in rules_for(self.model.problem) if rule.scope != "user")
        usable = prices.fits & legal_mask(self.model.problem, table, rules)
        return prices.step_time_s * np.array(turns), prices.peak_bytes / GIB, usable

    @property
    def step_time_s(self) -> dict[frozenset[str], float]:
        """By state; the two ends as they were priced."""
        return self._by_state(self._priced[0], self.first_priced.step_time_s, self.second_priced.step_time_s)

    @property
    def peak_gib(self) -> dict[frozenset[str], float]:
        return self._by_state(self._priced[1], self.first_priced.memory.peak_gib, self.second_priced.memory.peak_gib)

    @property
    def usable(self) -> Bools:
        return self._priced[2]

    def _by_state(self, between: Floats, first: float, second: float) -> dict[frozenset[str], float]:
        values = [first, *map(float, between), second] if self.changed else [first]
        return dict(zip(self.states, values, strict=True))

    def shares(self, value: Mapping[frozenset[str], float]) -> list[float]:
        """What each changed column adds to a figure that is known of every state."""
        if not self._in_all_orders:
            return [self._along_one_order(value, place) for place in range(len(self.changed))]
        n = len(self.changed)
        weight = [math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n) for size in range(n)]
        return [
            math.fsum(
                weight[len(before)] * (value[before | {name}] - value[before]) for before in self.states if name not in before
            )
            for name in self.changed
        ]

    def _along_one_order(self, value: Mapping[frozenset[str], float], place: int) -> float:
        before, after = frozenset(self.changed[:place]), frozenset(self.changed[place + 1 :])
        taken = frozenset({self.changed[place]})
        return 0.5 * (value[before | taken] - value[before] + value[after | taken] - value[after])

    def _layout(self, taken: frozenset[str]) -> tuple[Layout, Split | None, float]:
        """A layout in between, its split if one of the ends gives it, and by what its step counts.

        What follows: dp takes up the devices, in whole expert groups and, if it can, whole micro-batches, the last of which else is
        partly filled; vpp stays within the layers. One that needs more devices takes turns on them.
        """

        def of(name: str) -> Layout:
            return self.second if name in taken else self.first

        tp, cp, pp, ep, etp = (getattr(of(name), name) for name in ("tp", "cp", "pp", "ep", "etp"))
        vpp = max(1, min(of("vpp").vpp, len(self.model.blocks) // pp)) if pp > 1 else 1
        open_dp = Layout(
            **{"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "vpp": vpp, "micro_batch": of("micro_batch").micro_batch},
            sequence_parallel=tp > 1 and not _departs(of("sequence_parallel")),
            cp_type=of("cp_type").cp_type if min(self.first.cp, self.second.cp) > 1 else _with_cp(self.first, self.second).cp_type,
            schedule="interleaved" if vpp > 1 else _plain(of("schedule"), self.first, self.second),
            **{name: getattr(of(name), name) for name in ("optimizer_sharding", "recompute", "offload", "rank_order")},
        )
        problem, devices = self.model.problem, _devices(self.model.problem, of("devices_used"))
        group = ep * etp // math.gcd(ep * etp, tp * cp)
        dp = following_dp(problem, open_dp, devices) or max(devices // (tp * cp * pp) // group, 1) * group
        batches = -(-problem.workload.global_batch // (open_dp.micro_batch * dp))
        follow = {
            "dp": dp,
            "edp": tp * cp * dp // (ep * etp),
            "num_microbatches": -(-batches // pp) * pp if vpp > 1 else batches,
        }
        layout = open_dp.model_copy(update=follow)
        return layout, self._split(layout, of("stages")), max(1.0, layout.devices / devices)

    def _split(self, layout: Layout, stages_of: Layout) -> Split | None:
        """The split of an end that has as many chunks; None where neither has."""
        shape = (layout.pp, layout.vpp)
        alike = [end for end in (stages_of, self.first, self.second) if (end.pp, end.vpp) == shape]
        return Split.from_stages(alike[0].stages) if alike else None


def _with_cp(first: Layout, second: Layout) -> Layout:
    return second if second.cp > 1 else first


def _plain(decided: Layout, *ends: Layout) -> str:
    """The schedule of stages of one chunk: as decided, or that of the end which has such stages."""
    return next((end.schedule for end in (decided, *ends) if end.vpp == 1), "1f1b")


def _cut(model: CostModel, table: LayoutTable, given: Sequence[Split | None]) -> LayoutTable:
    """The table with a split for every row: as given, or else as the search would start from."""
    splits = list(given)
    rows, missing = model.rows(table), np.array([i for i, split in enumerate(given) if split is None], dtype=np.intp)
    for members in same_shape(table.take(missing), depth=True) if len(missing) else ():
        part = rows.take(missing[members])
        pp, vpp = int(part.table.pp[0]), int(part.table.vpp[0])
        free = model.problem.stack.cuts_freely(vpp) or model.problem.stack.sets_ends_apart
        cut = default_cuts(model, part) if free else balanced_cuts(model, part, pp * vpp)
        for row, cuts in zip(missing[members], cut, strict=True):
            splits[row] = Split(pp, vpp, tuple(int(cut) for cut in cuts))
    distinct = tuple(dict.fromkeys(split for split in splits if split is not None))
    place: npt.NDArray[np.intp] = np.array([distinct.index(split) for split in splits if split is not None], dtype=np.intp)
    return table.with_splits(place, distinct)

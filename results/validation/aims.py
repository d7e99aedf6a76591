"""What predictions aim at, beside what rows of split `test` say of them: one line an aim, met or missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from paraplan.cost_models.run_statistics import BLACKWELL, NVIDIA, Statistics, errors, median_interval, statistics
from paraplan.cost_models.transfer import Learnt
from paraplan.cost_models.validation import Outcome, Validation

Lines = list[tuple[str, ...]]
HEADERS = ("aim", "rows", "found", "aimed at", "")
TAIL = 2.5
"""How many times the aim of its median a 90th percentile may be."""
BIAS = 0.04
WHOLE_TABLE_5 = ("korthikanti-t5-",)


@dataclass(frozen=True)
class Slice:
    """Rows that an aim is set for: counted ones of some families for which something holds."""

    name: str
    families: tuple[str, ...]
    median: float
    holds: Callable[[Outcome], bool] = lambda _: True

    def of(self, outcomes: Sequence[Outcome], split: str = "test") -> list[Outcome]:
        counted = (o for o in outcomes if not o.excluded and o.job is not None and split in ("", o.run.split))
        return [o for o in counted if o.run.family in self.families and self.holds(o)]


def on(accelerators: tuple[str, ...], *moe: bool) -> Callable[[Outcome], bool]:
    """Rows of one generation of devices, of dense models, of mixtures of experts, or of both."""
    return lambda o: o.run.accelerator.startswith(accelerators) and o.job is not None and o.job.problem.model.is_moe in moe


def flash(o: Outcome) -> bool:
    """Rows whose attention is a FlashAttention."""
    return o.job is not None and "flash" in o.job.problem.stack.name


def unpiped(o: Outcome) -> bool:
    """Rows without a pipeline, their tensor parallelism inside a server."""
    return o.job is not None and o.job.layout.pp == 1 and o.job.layout.tp <= 8


FLASH = Slice("Aleph Alpha, FlashAttention", ("aleph-alpha",), 0.035, flash)
UNPIPED = Slice("nanotron, no pipeline, TP ≤ 8", ("nanotron",), 0.035, unpiped)
STEPS = (
    FLASH,
    UNPIPED,
    Slice("bigscience", ("bigscience",), 0.035),
    Slice("SC21 and Korthikanti", ("sc21", "korthikanti"), 0.035),
    Slice("NVIDIA, dense, H100", NVIDIA, 0.035, on(("H100",), False)),
    Slice("llm-foundry", ("llm-foundry",), 0.035),
    Slice("NVIDIA, dense, Blackwell", NVIDIA, 0.06, on(BLACKWELL, False)),
    Slice("NVIDIA, MoE, H100", NVIDIA, 0.09, on(("H100",), True)),
    Slice("NVIDIA, MoE, Blackwell", NVIDIA, 0.09, on(BLACKWELL, True)),
    Slice("Ascend 910B, dense and MoE", ("mindspeed-llm", "mindformers"), 0.12, on(("Ascend",), False, True)),
)
RANKED = (
    (Slice("Aleph Alpha", ("aleph-alpha",), 0.0), 0.92, 0.03),
    (UNPIPED, 0.92, 0.03),
    (Slice("nanotron, all layouts", ("nanotron",), 0.06), 0.95, 0.05),
)
"""Rows in groups, the least Spearman correlation aimed at, and the largest mean regret."""
PEAKS = (
    Slice("simumax", ("simumax",), 0.05),
    Slice("nanotron, no pipeline, TP ≤ 8", ("nanotron",), 0.05, unpiped),
    Slice("kempner", ("kempner",), 0.05),
    Slice("torchtitan", ("torchtitan",), 0.05),
)


def aims(found: Validation, curve: Sequence[Learnt]) -> Lines:
    """The table's lines."""
    outcomes = found.outcomes
    return [
        line
        for part in (
            steps(outcomes),
            rankings(outcomes),
            peaks(outcomes),
            out_of_memory(outcomes),
            tables(outcomes),
            new_stacks(curve),
        )
        for line in part
    ]


def steps(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Median, 90th percentile and bias of step times."""
    for each in STEPS:
        time = _statistics(each, outcomes).time
        if time is not None:
            what, rows = f"step time, {each.name}", str(time.rows)
            yield _line(f"{what}: median", rows, time.median, each.median)
            yield _line(f"{what}: 90th percentile", rows, time.p90, TAIL * each.median)
            yield _line(f"{what}: bias", rows, time.bias, BIAS)


def rankings(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Rank correlation and regret within groups."""
    for each, least, largest in RANKED:
        found = _statistics(each, outcomes)
        if found.time is not None and each.median and each not in STEPS:
            yield _line(f"step time, {each.name}: median", str(found.time.rows), found.time.median, each.median)
        if found.ranking is not None and found.ranking.spearman_median is not None:
            groups = f"{found.ranking.groups} groups"
            value = found.ranking.spearman_median
            yield (f"ranking, {each.name}: Spearman", groups, f"{value:.2f}", f"≥ {least:.2f}", _met(value >= least))
            yield _line(f"ranking, {each.name}: mean regret", groups, found.ranking.regret_mean, largest)


def peaks(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Median errors of peak memory, with where nine in ten medians of other rows like these would lie."""
    for each in PEAKS:
        peak, within = _statistics(each, outcomes).memory.peak, median_interval(each.of(outcomes), peaks=True)
        if peak is not None:
            what, rows, value, most, met = _line(f"peak memory, {each.name}: median", str(peak.rows), peak.median, each.median)
            yield what, rows, f"{value} ({_percent(within[0])} to {_percent(within[1])})" if within else value, most, met


def out_of_memory(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Precision and recall of running out, over all rows that say whether they ran."""
    memory = _statistics(RANKED[0][0], outcomes).memory
    for what, value in (("precision", memory.precision), ("recall", memory.recall)):
        if value is not None:
            yield (f"running out, Aleph Alpha: {what}", str(memory.rows), f"{value:.3f}", "≥ 0.93", _met(value >= 0.93))


def tables(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Whole tables of papers, rows to fit and rows of `test` together."""
    eight = _offs(o for o in Slice("", ("korthikanti",), 0.0).of(outcomes, "") if o.run.id.startswith(WHOLE_TABLE_5))
    if len(eight):
        yield _line("step time, Korthikanti's table 5, all rows: mean", str(len(eight)), float(eight.mean()), 0.03)
        yield _line("step time, Korthikanti's table 5, all rows: largest", str(len(eight)), float(eight.max()), 0.07)
    simumax = Slice("", ("simumax",), 0.0).of(outcomes, "")
    off, bias = _offs(simumax), errors([(o.predicted_step_time_s, o.measured_step_time_s) for o in simumax])
    if bias is not None:
        yield _line("step time, simumax, all rows: mean", str(len(off)), float(off.mean()), 0.04)
        yield _line("step time, simumax, all rows: bias", str(len(off)), bias.bias, 0.02)


def new_stacks(curve: Sequence[Learnt]) -> Iterator[tuple[str, ...]]:
    """Dense families that no figure has seen: as they stand, and after three runs."""
    for place, what, aim in ((0, "before any run", 0.25), (2, "after three runs", 0.08)):
        dense = [one for one in curve if not one.moe]
        known = [one.errors[place] for one in dense if len(one.errors) > place]
        over = sum(value > aim for value in known)
        if known:
            said, rows = f"{_percent(max(known))}, {over} of {len(known)} over", f"{len(known)} of {len(dense)} stacks"
            yield (f"a new dense stack, {what}: worst", rows, said, f"≤ {_percent(aim)}", _met(not over))


def _statistics(each: Slice, outcomes: Sequence[Outcome]) -> Statistics:
    return statistics(each.of(outcomes))


def _offs(outcomes: Sequence[Outcome] | Iterator[Outcome]) -> np.ndarray:
    timed = [
        (o.predicted_step_time_s, o.measured_step_time_s) for o in outcomes if o.predicted_step_time_s and o.measured_step_time_s
    ]
    return np.array([abs(predicted / measured - 1.0) for predicted, measured in timed])


def _line(what: str, rows: str, value: float, most: float) -> tuple[str, ...]:
    """A figure whose size may not exceed its aim."""
    signed = f"{100 * value:+.1f} %".replace("-", "−") if "bias" in what else _percent(value)
    return what, rows, signed, f"{'within ±' if 'bias' in what else '≤ '}{_percent(most)}", _met(abs(value) <= most)


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if abs(value) >= 1e-3 else "<0.1 %"


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"

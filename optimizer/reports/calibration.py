"""What a calibration found: for the terminal, and as the YAML that --profile reads."""

from __future__ import annotations

from collections.abc import Iterable

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...cost_models.calibration import Calibration, Calibrations
from ...cost_models.pooling import Pool

INDENT = (0, 0, 0, 2)
LEARNT_LITTLE = 0.5
"""Share of a prior's variance below which the runs have said little of a figure."""


def render(calibrations: Iterable[Calibration], console: Console) -> None:
    """Of every stack and accelerator: errors before and after, the figures with their intervals, and what is not identified."""
    for found in calibrations:
        console.print(f"\n{found.stack} on {found.accelerator}: {rows(found)}", style="bold", markup=False, highlight=False)
        console.print(Padding(Text(errors_sentence(found)), INDENT))
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(("figure", "before", "fitted", "95 % interval", "")):
            table.add_column(name, justify="right" if index in (1, 2) else "left", no_wrap=True)
        for line in figure_lines(found):
            table.add_row(*line)
        console.print(Padding(table, INDENT))
        for sentence in doubts(found):
            console.print(Padding(Text(sentence), INDENT))


def rows(found: Calibration) -> str:
    """How many runs, and whose."""
    return f"{found.rows} {'run' if found.rows == 1 else 'runs'} of {', '.join(found.families)}"


def errors_sentence(found: Calibration) -> str:
    """Residuals before and after."""
    before, after = found.before, found.after
    return (
        f"median error {before.median:.1%} → {after.median:.1%}, 90th percentile {before.p90:.1%} → {after.p90:.1%}, "
        f"bias {before.bias:+.1%} → {after.bias:+.1%}"
    )


def figure_lines(found: Calibration) -> list[tuple[str, ...]]:
    """Figure, value before, fitted value, interval, remark."""
    lines: list[tuple[str, ...]] = []
    for fit in found.fits:
        little = "little learnt" if fit.learnt < LEARNT_LITTLE else ""
        remark = "kept" if fit.kept else "at its bound" if fit.at_bound else little
        lines.append((fit.name, f"{fit.prior:.3g}", f"{fit.value:.3g}", f"{fit.low:.3g} to {fit.high:.3g}", remark))
    return lines


def doubts(found: Calibration) -> list[str]:
    """In sentences: that a fit was not worth it, or which figures the runs cannot tell apart."""
    if any(fit.kept for fit in found.fits):
        return ["a fit predicts runs that are left out no better: the stack's own figures are kept"]
    return [f"{a} and {b} cannot be told apart by these runs (correlation {r:+.2f})" for a, b, r in found.confounded]


def profile_yaml(calibrations: Calibrations) -> str:
    """The profile's sections of stacks, intervals and pooled figures, to be laid over the shipped ones."""
    stacks: dict[str, dict[str, object]] = {}
    for found in calibrations:
        figures = {name: figure.model_dump(exclude_defaults=True) for name, figure in found.figures().items()}
        stacks.setdefault(found.stack, {})[found.accelerator] = figures
    document: dict[str, object] = {"stacks": stacks}
    if intervals := calibrations.intervals.model_dump(exclude_defaults=True):
        document["intervals"] = intervals
    if calibrations.pools:
        document["pooled"] = {name: _pooled(pool) for name, pool in calibrations.pools.items()}
    head = "".join(f"# {c.stack} on {c.accelerator}: {rows(c)}; {errors_sentence(c)}\n" for c in calibrations)
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _pooled(pool: Pool) -> dict[str, object]:
    stacks = sorted({one.pair.stack for one in pool.seen})
    source = f"pooled from {len(pool.seen)} fits of {', '.join(stacks)}"
    factors = {label: float(f"{factor:.3g}") for label, factor in sorted(pool.factors().items())}
    return {"factors": factors, "spread": pool.spread, "source": source}

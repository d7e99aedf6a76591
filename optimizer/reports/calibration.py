"""What a calibration found: for the terminal, and as the YAML that --profile reads."""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from rich.console import Console
from rich.table import Table

from ...cost_models.calibration import Calibration

LEARNT_LITTLE = 0.5
"""Share of a prior's variance below which the runs have said little of a figure."""


def render(calibrations: Sequence[Calibration], console: Console) -> None:
    """Of every stack and accelerator: errors before and after, the figures with their intervals, and what is not identified."""
    for found in calibrations:
        console.print(f"\n{found.stack} on {found.accelerator}: {rows(found)}", style="bold", markup=False, highlight=False)
        console.print(f"  {errors_sentence(found)}", markup=False, highlight=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
        for index, name in enumerate(("figure", "before", "fitted", "95 % interval", "")):
            table.add_column(name, justify="right" if index in (1, 2) else "left", no_wrap=index < 4)
        for line in figure_lines(found):
            table.add_row(*line)
        console.print(table)
        for sentence in doubts(found):
            console.print(f"  {sentence}", markup=False, highlight=False)


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
        remark = "at its physical bound" if fit.at_bound else "the runs say little of it" if fit.learnt < LEARNT_LITTLE else ""
        lines.append((fit.name, f"{fit.prior:.3g}", f"{fit.value:.3g}", f"{fit.low:.3g} to {fit.high:.3g}", remark))
    return lines


def doubts(found: Calibration) -> list[str]:
    """Which figures the runs cannot tell apart, in sentences."""
    return [f"{a} and {b} cannot be told apart by these runs (correlation {r:+.2f})" for a, b, r in found.confounded]


def profile_yaml(calibrations: Sequence[Calibration]) -> str:
    """The profile's section of stacks, to be laid over the shipped figures."""
    stacks: dict[str, dict[str, object]] = {}
    for found in calibrations:
        figures = {name: figure.model_dump(exclude_defaults=True) for name, figure in found.figures().items()}
        stacks.setdefault(found.stack, {})[found.accelerator] = figures
    head = "".join(f"# {c.stack} on {c.accelerator}: {rows(c)}; {errors_sentence(c)}\n" for c in calibrations)
    return head + yaml.safe_dump({"stacks": stacks}, sort_keys=False, allow_unicode=True)

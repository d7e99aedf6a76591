"""What a calibration found: for the terminal, and as the YAML that --profile reads."""

from __future__ import annotations

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...cost_models.calibration import Calibration, Calibrations
from ...cost_models.pooling import Pool
from ...cost_models.profile import Intervals
from ...cost_models.run_files import MOST_IDS, some_ids

INDENT = (0, 0, 0, 2)
LEARNT_LITTLE = 0.5
"""Share of a prior's variance below which the runs have said little of a figure."""


def render(calibrations: Calibrations, console: Console) -> None:
    """Of every stack and accelerator: errors before and after, figures and step times with their intervals, and what is doubted.

    Then the rows to fit that were not used, and why.
    """
    for found in calibrations:
        console.print(f"\n{found.stack} on {found.accelerator}: {rows(found)}", style="bold", markup=False, highlight=False)
        console.print(Padding(Text(errors_sentence(found)), INDENT))
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(("figure", "before", "fitted", "95 % interval", "")):
            table.add_column(name, justify="right" if index in (1, 2) else "left", no_wrap=True)
        for line in figure_lines(found):
            table.add_row(*line)
        console.print(Padding(table, INDENT))
        for sentence in (*planned(found, calibrations), *expectations(found, calibrations.intervals), *doubts(found)):
            console.print(Padding(Text(sentence), INDENT))
        for sentence in warnings(found):
            console.print(Padding(Text(sentence, style="red"), INDENT))
    if calibrations.unused:
        console.print(
            f"\n{sum(map(len, calibrations.unused.values()))} of the rows to fit were not used", style="bold", highlight=False
        )
    for reason, ids in calibrations.unused.items():
        console.print(Padding(Text(f"{len(ids)} × {reason} ({some_ids(ids)})"), INDENT))


def rows(found: Calibration) -> str:
    """How many runs, and whose."""
    return f"{found.rows} {'run' if found.rows == 1 else 'runs'} of {', '.join(found.families)}"


def errors_sentence(found: Calibration) -> str:
    """Residuals before and after."""
    before, after = found.before, found.after
    return (
        f"median error {100 * before.median:.1f} % → {100 * after.median:.1f} %, "
        f"90th percentile {100 * before.p90:.1f} % → {100 * after.p90:.1f} %, "
        f"bias {100 * before.bias:+.1f} % → {100 * after.bias:+.1f} %"
    )


def figure_lines(found: Calibration) -> list[tuple[str, ...]]:
    """Figure, value before, fitted value, interval, remark."""
    lines: list[tuple[str, ...]] = []
    for fit in found.fits:
        little = "little learnt" if fit.learnt < LEARNT_LITTLE else ""
        remark = "kept" if fit.kept else "at its bound" if fit.at_bound else little
        lines.append((fit.name, f"{fit.prior:.3g}", f"{fit.value:.3g}", f"{fit.low:.3g} to {fit.high:.3g}", remark))
    return lines


def planned(found: Calibration, calibrations: Calibrations) -> list[str]:
    """In a sentence: which stack a site's runs are taken for, and how a plan is told."""
    if not calibrations.site:
        return []
    names = ", ".join(name or "software that is not named" for name in found.guessed)
    taken = f"{names} is taken for {found.stack}, the nearest that is known: " if names else ""
    alone = len({each.stack for each in calibrations if each.accelerator == found.accelerator}) == 1
    return [f"{taken}plan with --stack {found.stack}" + ", or with this profile and no --stack" * alone]


def expectations(found: Calibration, intervals: Intervals) -> list[str]:
    """In sentences: how far step times to come may lie from their predictions, by kind of model."""
    own = intervals.pairs.get(found.stack, {}).get(found.accelerator, {})
    return [
        f"step times of {kind} models may be {100 * (1 - each.low):.0f} % lower to {100 * (each.high - 1):.0f} % higher "
        f"({each.source})"
        for kind, each in (("dense", own.get("dense")), ("MoE", own.get("moe")))
        if each is not None
    ]


def doubts(found: Calibration) -> list[str]:
    """In sentences: that a fit was not worth it, or which figures the runs cannot tell apart."""
    if any(fit.kept for fit in found.fits):
        return ["a fit predicts runs that are left out no better: the stack's own figures are kept"]
    return [f"{a} and {b} cannot be told apart by these runs (correlation {r:+.2f})" for a, b, r in found.confounded]


def warnings(found: Calibration) -> list[str]:
    """In a sentence: which runs the fitted figures do not explain."""
    if not found.unexplained:
        return []
    named = ", ".join(f"{name} ({ratio:.3g}×)" for name, ratio in found.unexplained[:MOST_IDS])
    more = len(found.unexplained) - MOST_IDS
    rest = f" and {more} more" if more > 0 else ""
    left = "intervals do not count them" if found.residuals.slips else "figures and intervals are not to be relied on"
    return [
        f"warning: the fitted figures, kept within physical bounds, do not explain {named}{rest}, measured over predicted; check "
        f"step time, batch and layout, or leave the rows out: {left}"
    ]


def profile_yaml(calibrations: Calibrations) -> str:
    """The profile's sections of stacks, intervals and pooled figures, to be laid over the shipped ones."""
    stacks: dict[str, dict[str, object]] = {}
    for found in calibrations:
        figures = {name: figure.model_dump(exclude_defaults=True) for name, figure in found.figures().items()}
        stacks.setdefault(found.stack, {})[found.accelerator] = figures
    document: dict[str, object] = {"stacks": stacks}
    if calibrations.site:
        clusters: dict[str, dict[str, list[str]]] = {}
        for found in calibrations:
            clusters.setdefault(found.stack, {})[found.accelerator] = list(found.clusters)
        document["learnt_on"] = clusters
    if intervals := calibrations.intervals.model_dump(exclude_defaults=True):
        document["intervals"] = intervals
    if calibrations.pools:
        document["pooled"] = {name: _pooled(pool) for name, pool in calibrations.pools.items()}
    of_each = ((c, (errors_sentence(c), *planned(c, calibrations), *expectations(c, calibrations.intervals))) for c in calibrations)
    said = [(c, "; ".join(sentences)) for c, sentences in of_each]
    head = "".join(f"# {c.stack} on {c.accelerator}: {rows(c)}; {words}\n" for c, words in said)
    head += "".join(f"# {c.stack} on {c.accelerator}: {sentence}\n" for c in calibrations for sentence in warnings(c))
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _pooled(pool: Pool) -> dict[str, object]:
    stacks = {one.pair.stack for one in pool.seen}
    source = f"pooled from {len(pool.seen)} fits of {len(stacks)} stacks"
    factors = {label: float(f"{factor:.3g}") for label, factor in sorted(pool.factors().items())}
    return {"factors": factors, "spread": pool.spread, "source": source}

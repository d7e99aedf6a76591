"""Tables of predictions beside measured runs: for the terminal, and as Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...cost_models.run_exclusions import REASONS
from ...cost_models.run_files import some_ids
from ...cost_models.run_statistics import Ended, Ranking, Statistics
from ...cost_models.runs import VOCABULARY
from ...cost_models.transfer import COUNTS, Learnt
from ...cost_models.validation import Outcome, Validation
from .wording import count

TIME = ("rows", "median", "90th", "bias", "unfitted", "constant", "Spearman", "regret", "random")
"""Columns of step time: errors, median errors without a fit and of a constant MFU, rank correlation, regret, a random pick's."""
POOLED = (*TIME[:2], "its 90 % interval", *TIME[2:])
"""The same with the bootstrap interval of the median."""
MEMORY = ("peaks", "median", "90th", "bias", "ran out", "precision", "recall", "false alarms", "unsure")
"""Columns of memory: errors of the peak, rows that ran out of memory among those that say, the verdict on them."""
ENDED = ("rows", "ran out", "predicted", "precision", "recall", "false alarms", "unsure")
"""Columns of how runs ended, all rows that say so."""
TIME_SHORT = ("rows", "med", "90th", "bias", "unfit", "const", "Spearman", "regret")
MEMORY_SHORT = ("peaks", "med", "90th", "bias")
ENDED_SHORT = ("rows", "ran out", "predicted", "prec", "rec", "alarms", "unsure")
"""The same columns for a terminal of 80 columns; shares are in percent."""
WORST = 2
"""Rows of each family that are named as its worst."""
Lines = list[tuple[str, ...]]
LEGEND = (
    "fit: rows that figures may be fitted to; test: rows that they never saw.",
    "med, 90th: median and 90th percentile of |predicted/measured − 1|; bias: median log of predicted/measured, + is too high.",
    "unfit: med with documented figures only; const: with one MFU for the whole family.",
    "Spearman: rank correlation within groups of one problem (how many); regret: time of our pick over the best, less one.",
    "prec: share of runs predicted to run out of memory that did; rec: share of those that ran out that were predicted to; "
    "alarms: share of those that ran that were predicted not to; unsure: peaks within 15 % of the limit.",
    "–: no row tells.",
)
"""What the terminal's columns mean, a sentence each."""


def render(validation: Validation, console: Console) -> None:
    """How many rows were priced, accuracy per family and accelerator, worst rows, what was left out or assumed, and a legend."""
    console.print(Text(headline(validation)))
    console.print()
    families = [
        (c.family, f"{c.accelerator.removesuffix('-SXM')} {c.split}", c.statistics)
        for c in validation.cells
        if c.slice == "counted"
    ]
    pools = [(name, split, found) for name, split, found, _ in validation.pools()]
    for title, named in (("counted rows", families), ("pooled", pools)):
        lines = [(head, name, *_bare(time_cells(found)[:-1])) for head, name, found in named if found.time]
        _grouped(console, f"Step time, {title} (%)", TIME_SHORT, lines)
    memory = [(head, name, *_bare(memory_cells(s)[:4])) for head, name, s in families if s.memory.peak]
    _grouped(console, "Memory, counted rows (%)", MEMORY_SHORT, memory)
    ends = [(family, *_bare(ended_cells(verdicts))) for family, verdicts in validation.ended()]
    _print(console, "Running out of memory, all rows that say (%)", ("family", *ENDED_SHORT), ends, numbers=len(ENDED_SHORT))
    _print(console, "Worst rows", ("id", "ratio", "predicted", "measured"), worst(validation), numbers=3)
    _print(console, "Not priced", ("rows", "family", "reason"), skipped(validation, named=True))
    _print(console, "Priced but not counted", ("rows", "family", "rule"), excluded(validation))
    _print(console, "Assumed or odd", ("rows", "family", "what"), noted(validation))
    for sentence in LEGEND:
        console.print(Text(sentence, style="dim"))


def headline(validation: Validation) -> str:
    """How many rows there are and what became of them."""
    rows = validation.outcomes
    skipped, counted = sum(o.skipped is not None for o in rows), sum(o.why_not_counted is None for o in rows)
    return f"{count(len(rows), 'row')}: {len(rows) - skipped} priced, {counted} of them counted; {skipped} not priced"


def time_table(validation: Validation, slices: Sequence[str] = ()) -> Lines:
    """Family, accelerator, slice, split and step time, one line per cell with a measured row; all slices unless some are named."""
    return [
        (c.family, c.accelerator, c.slice, c.split, *time_cells(c.statistics))
        for c in validation.cells
        if c.statistics.time and (not slices or c.slice in slices)
    ]


def memory_table(validation: Validation, slices: Sequence[str] = ()) -> Lines:
    """The same for memory."""
    return [
        (c.family, c.accelerator, c.slice, c.split, *memory_cells(c.statistics))
        for c in validation.cells
        if has_memory(c.statistics) and (not slices or c.slice in slices)
    ]


def pool_table(validation: Validation) -> Lines:
    """Pool, split and step time, in the order of POOLED."""
    return [
        (name, split, *_with_interval(time_cells(found), within)) for name, split, found, within in validation.pools() if found.time
    ]


def _with_interval(cells: tuple[str, ...], within: tuple[float, float] | None) -> tuple[str, ...]:
    """The cells of step time with the interval of the median after the median."""
    return (*cells[:2], "–" if within is None else f"{100 * within[0]:.1f}–{_share(within[1])}", *cells[2:])


def coverage(validation: Validation) -> Lines:
    """Of which rows how many lie inside the interval that a plan would state, and how far it reaches up."""
    found = validation.coverage()
    return [(name, split, str(rows), _share(inside / rows), _signed(reach)) for name, split, inside, rows, reach in found]


def learning_curves(found: Sequence[Learnt]) -> Lines:
    """Families left out: what was held out, and median errors by how many of their rows were learnt from; by the same counts the
    shares of rows inside their intervals.
    """
    lines: Lines = []
    for one in found:
        missing = (None,) * (len(COUNTS) - len(one.errors))
        errors, inside = ([_share(value) for value in (*each, *missing)] for each in (one.errors, one.inside))
        kind = "MoE" if one.moe else "dense"
        lines.append((one.family, one.stack, one.accelerator, kind, str(one.held_out), _share(one.documented), *errors, *inside))
    return lines


def worst(validation: Validation, of_each: int = WORST) -> Lines:
    """Of every family the counted rows that are off by the largest factor."""
    return [_worst_line(outcome) for outcome in validation.worst(of_each)]


def skipped(validation: Validation, named: bool = False) -> Lines:
    """How many rows of which family could not be priced, and why, with the first ids if `named`; alike reasons are one."""
    reasons: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in validation.outcomes:
        if outcome.skipped:
            reasons[outcome.run.family, _short(outcome.skipped)].append(outcome)
    most = sorted(reasons.items(), key=lambda each: -len(each[1]))
    return [
        (str(len(rows)), family, f"{reason} ({some_ids([o.run.id for o in rows])})" if named else reason)
        for (family, reason), rows in most
    ]


def excluded(validation: Validation) -> Lines:
    """How many rows of which family fall under which structural rule, or have nothing to be compared with."""
    found = Counter((o.run.family, f"{rule}: {REASONS[rule]}") for o in validation.outcomes for rule in o.excluded)
    nothing = [o for o in validation.outcomes if o.why_not_counted and not o.skipped and not o.excluded]
    found.update((o.run.family, o.why_not_counted or "") for o in nothing)
    return [(str(count), family, rule) for (family, rule), count in found.most_common()]


def noted(validation: Validation) -> Lines:
    """How many rows of which family something was assumed of, or is odd about, with the first of each kind."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for outcome in validation.outcomes:
        for note in outcome.notes:
            kinds.setdefault((outcome.run.family, note.partition(": ")[0]), []).append(note)
    most = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    return [(str(len(notes)), family, notes[0] + (", …" if len(set(notes)) > 1 else "")) for (family, _), notes in most]


def ended_table(validation: Validation) -> Lines:
    """Family, and how its runs ended against what was predicted."""
    return [(family, *ended_cells(verdicts)) for family, verdicts in validation.ended()]


def vocabulary() -> Lines:
    """The mapping from a CSV's words, one line per entry."""
    return [(word.column, word.pattern or "(blank)", word.meaning or "as the stack has it", word.note) for word in VOCABULARY]


def markdown(headers: Sequence[str], lines: Iterable[Sequence[str]], code: Sequence[int] = ()) -> str:
    """A Markdown table; columns whose places are in `code` are set as code."""

    def shown(place: int, cell: str) -> str:
        text = cell.replace("|", "\\|")
        return f"`{text}`" if place in code and text else text

    rows = ["| " + " | ".join(shown(place, cell) for place, cell in enumerate(line)) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers), *rows])


def time_cells(found: Statistics) -> tuple[str, ...]:
    """Step time in the order of TIME."""
    time, documented, baseline, ranks = found.time, found.documented, found.constant_mfu, found.ranking
    return (
        str(time.rows if time else 0),
        _share(time.median if time else None),
        _share(time.p90 if time else None),
        _signed(time.bias if time else None),
        _share(documented.median if documented else None),
        _share(baseline.median if baseline else None),
        _spearman(ranks),
        _share(ranks.regret_mean if ranks else None),
        _share(ranks.random_mean if ranks else None),
    )


def memory_cells(found: Statistics) -> tuple[str, ...]:
    """Memory in the order of MEMORY."""
    memory, peak = found.memory, found.memory.peak
    return (
        str(peak.rows if peak else 0),
        _share(peak.median if peak else None),
        _share(peak.p90 if peak else None),
        _signed(peak.bias if peak else None),
        f"{memory.oom}/{memory.rows}",
        _share(memory.precision),
        _share(memory.recall),
        _share(memory.false_alarms),
        _share(memory.unsure),
    )


def ended_cells(found: Ended) -> tuple[str, ...]:
    """How runs ended in the order of ENDED."""
    counts = (found.rows, found.oom, found.predicted)
    shares = (found.precision, found.recall, found.false_alarms, found.unsure)
    return (*map(str, counts), *map(_share, shares))


def has_memory(found: Statistics) -> bool:
    """Whether a slice has a measured peak, or a row that ran out or was predicted to."""
    return bool(found.memory.peak or found.memory.oom or found.memory.predicted)


def _print(console: Console, title: str, headers: Sequence[str], lines: Lines, numbers: int = 0) -> None:
    """A table whose last `numbers` columns hold numbers; nothing where it has no line."""
    if not lines:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for place, name in enumerate(headers):
        number = place >= len(headers) - numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
    console.print()


def _grouped(console: Console, title: str, headers: Sequence[str], lines: Lines) -> None:
    """A table of numbers whose lines stand, indented, below what their first cell names, which is written once.

    Nothing is wrapped or cut: a terminal of 80 columns holds it.
    """
    if not lines:
        return
    rows = [("", *headers), *((f"  {name}", *cells) for _, name, *cells in lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    text = [" ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    console.print(Text(title, style="italic"))
    console.print(Text(text[0], style="bold"))
    for above, line, row in zip(["", *(line[0] for line in lines)], lines, text[1:], strict=False):
        if line[0] != above:
            console.print(Text(line[0]))
        console.print(Text(row))
    console.print()


def _bare(cells: Sequence[str]) -> list[str]:
    """Cells without their unit, which stands in the title."""
    return [cell.removesuffix(" %") for cell in cells]


def _worst_line(outcome: Outcome) -> tuple[str, ...]:
    predicted, measured = outcome.predicted_step_time_s or 0.0, outcome.measured_step_time_s or 1.0
    return outcome.run.id, _ratio(predicted / measured), f"{predicted:.3g} s", f"{measured:.3g} s"


def _ratio(value: float) -> str:
    """Two decimals, or two significant figures where those would be zeros or a long number."""
    return f"{value:.2f}" if 0.1 <= value < 100 else np.format_float_positional(float(f"{value:.2g}"), trim="-")


def _short(reason: str | None) -> str:
    head, _, tail = (reason or "").partition(": ")
    return head if tail and head.startswith(("unknown model shape", "layers of several kinds", "model shape")) else reason or ""


def _spearman(found: Ranking | None) -> str:
    if found is None or found.spearman_median is None:
        return "–"
    return f"{found.spearman_median:.2f} ({found.groups})".replace("-", "−")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f} %".replace("-", "−")

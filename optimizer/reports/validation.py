"""Tables of predictions beside measured runs: for the terminal, and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...cost_models.run_exclusions import EXCLUSIONS
from ...cost_models.run_statistics import Ranking, Statistics
from ...cost_models.runs import VOCABULARY
from ...cost_models.transfer import COUNTS, Learnt
from ...cost_models.validation import Outcome, Validation

TIME = ("rows", "median", "90th", "bias", "unfitted", "constant", "Spearman", "regret", "random")
"""Columns of step time: errors, median errors without a fit and of a constant MFU, rank correlation, regret, a random pick's."""
MEMORY = ("peaks", "median", "90th", "bias", "ran out", "precision", "recall", "unsure")
"""Columns of memory: errors of the peak, rows that ran out of memory among those that say, the verdict on them."""
TIME_SHORT = ("rows", "med", "90th", "bias", "unfit", "const", "Spearman", "regret")
MEMORY_SHORT = ("peaks", "med", "90th", "bias", "ran out", "prec", "rec", "unsure")
"""The same columns for a terminal of 80 columns; shares are in percent."""
WORST = 2
"""Rows of each family that are named as its worst."""
Lines = list[tuple[str, ...]]


def render(validation: Validation, console: Console) -> None:
    """Accuracy per family and accelerator, worst rows, and what was left out."""
    families = [
        (c.family, f"{c.accelerator.removesuffix('-SXM')} {c.split}", c.statistics)
        for c in validation.cells
        if c.slice == "counted"
    ]
    pools = validation.pools()
    for title, named in (("counted rows", families), ("pooled", pools)):
        lines = [(head, name, *_bare(time_cells(found)[:-1])) for head, name, found in named if found.time]
        _grouped(console, f"Step time, {title} (%)", TIME_SHORT, lines)
    memory = [(head, name, *_bare(memory_cells(s))) for head, name, s in families if has_memory(s)]
    _grouped(console, "Memory, counted rows (%)", MEMORY_SHORT, memory)
    _print(console, "Worst rows", ("id", "ratio", "predicted", "measured"), worst(validation), numbers=3)
    _print(console, "Not priced", ("rows", "family", "reason"), skipped(validation))
    _print(console, "Priced but not counted", ("rows", "family", "rule"), excluded(validation))


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
    """Pool, split and step time."""
    return [(name, split, *time_cells(found)) for name, split, found in validation.pools() if found.time]


def coverage(validation: Validation) -> Lines:
    """Of which rows how many lie inside the interval that a plan would state."""
    return [(name, split, str(rows), _share(inside / rows)) for name, split, inside, rows in validation.coverage()]


def learning_curves(found: Sequence[Learnt]) -> Lines:
    """Families left out: what was held out, and median errors by how many of their rows were learnt from."""
    lines: Lines = []
    for one in found:
        errors = [_share(one.errors[place] if place < len(one.errors) else None) for place in range(len(COUNTS))]
        kind = "MoE" if one.moe else "dense"
        lines.append((one.family, one.stack, one.accelerator, kind, str(one.held_out), _share(one.documented), *errors))
    return lines


def worst(validation: Validation, of_each: int = WORST) -> Lines:
    """Of every family the counted rows that are off by the largest factor."""
    return [_worst_line(outcome) for outcome in validation.worst(of_each)]


def skipped(validation: Validation) -> Lines:
    """How many rows of which family could not be priced, and why; reasons that name a model are put together."""
    reasons = Counter((o.run.family, _short(o.skipped)) for o in validation.outcomes if o.skipped)
    return [(str(count), family, reason) for (family, reason), count in reasons.most_common()]


def excluded(validation: Validation) -> Lines:
    """How many rows of which family fall under which structural rule."""
    reasons = {rule.id: rule.reason for rule in EXCLUSIONS}
    found = Counter((o.run.family, rule) for o in validation.outcomes for rule in o.excluded)
    return [(str(count), family, f"{rule}: {reasons[rule]}") for (family, rule), count in found.most_common()]


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
        f"{memory.oom}/{memory.rows}" if memory.oom else "–",
        _two(memory.precision),
        _two(memory.recall),
        _share(memory.unsure),
    )


def has_memory(found: Statistics) -> bool:
    """Whether a slice has a measured peak, or a row that ran out."""
    return bool(found.memory.peak or found.memory.oom)


def _print(console: Console, title: str, headers: Sequence[str], lines: Lines, numbers: int = 0) -> None:
    """A table whose last `numbers` columns hold numbers; nothing where it has no line."""
    if not lines:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for place, name in enumerate(headers):
        number = place >= len(headers) - numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for line in lines:
        table.add_row(*line)
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
    return outcome.run.id, f"{predicted / measured:.2f}", f"{predicted:.3g} s", f"{measured:.3g} s"


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


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"

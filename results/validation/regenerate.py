"""Prices a table of published measured runs and writes what came of it: python results/validation/regenerate.py RUNS.csv

Writes README.md, statistics.csv, vocabulary.md and four plots beside this file; without a table vocabulary.md alone. RUNS.csv has
the columns of the measured-runs format; models.json beside it gives the models' shapes.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from paraplan.cost_models.intervals import COVERAGE
from paraplan.cost_models.run_files import COLUMNS, NEEDED
from paraplan.cost_models.run_models import FLAGS, SIZES
from paraplan.cost_models.transfer import COUNTS, DRAWS, Learnt, leave_one_family_out
from paraplan.cost_models.validation import Validation, validate
from paraplan.optimizer.reports import validation as report
from paraplan.optimizer.reports.validation_plots import write_plots
from paraplan.search_spaces.cluster import Figure
from paraplan.search_spaces.loading import catalog_names, load_stack

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from aims import HEADERS, aims  # noqa: E402
from shortfalls import shortfalls  # noqa: E402


def main() -> None:
    """Writes the folder's files."""
    if len(sys.argv) > 2:
        raise SystemExit("usage: python results/validation/regenerate.py [RUNS.csv]")
    (HERE / "vocabulary.md").write_text(vocabulary(), encoding="utf-8")
    if len(sys.argv) < 2:
        return
    found = validate(Path(sys.argv[1]))
    write_plots(found, HERE)
    curve = leave_one_family_out(Path(sys.argv[1]))
    (HERE / "README.md").write_text(readme(found, curve), encoding="utf-8")
    with (HERE / "statistics.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for title, headers, lines in (
            ("step time", report.TIME, report.time_table(found)),
            ("memory", report.MEMORY, report.memory_table(found)),
        ):
            writer.writerow((title, *SLICE[1:], *headers))
            writer.writerows(lines)


def vocabulary() -> str:
    """The page of what a table of runs may hold: its columns, and the words that are read in them."""
    columns = [(name, "yes" if name in NEEDED else "", what) for name, what in COLUMNS.items()]
    shape = "the model's shape, of which the catalog's is taken without them; models.json counts first"
    columns.append((", ".join((*SIZES, *FLAGS)), "", shape))
    words = report.markdown(("column", "pattern", "meaning", "note"), report.vocabulary(), code=(0, 1, 2))
    return "\n".join(
        [
            "# A table of runs: its columns, and its words",
            "",
            "A CSV, its cells parted by commas, semicolons or tabs. Besides what is needed a row has one of the measured figures, "
            "or a status.",
            "",
            report.markdown(("column", "needed", "what it holds"), columns, code=(0,)),
            "",
            "## From a source's words to a Stack and a Layout",
            "",
            VOCABULARY_NOTE,
            "",
            words,
            "",
        ]
    )


def readme(found: Validation, curve: Sequence[Learnt]) -> str:
    """The page: accuracy, plots, worst rows, and what was left out."""
    rows, priced = len(found.outcomes), sum(1 for o in found.outcomes if not o.skipped)
    timed = sum(1 for o in found.outcomes if not o.excluded and o.measured_step_time_s and o.predicted_step_time_s)
    return "\n".join(
        [
            "# Predictions beside published measured runs",
            "",
            "`python results/validation/regenerate.py RUNS.csv` writes this page; `paraplan validate RUNS.csv` prints the same.",
            "",
            f"{rows} rows, {priced} priced, {timed} of them with a step time and counted. A few named figures of each stack on",
            "each accelerator (`cost_models/fits.yaml`) are fitted to rows of split `fit` by `paraplan",
            "calibrate`; rows of split `test` are never fitted.",
            "",
            "Errors are |predicted/measured − 1|, bias the median of log(predicted/measured); unfitted is the median error with",
            "the stacks' documented figures, constant that of the family's own median MFU, taken from its `fit` rows. Ranking is",
            "within groups of one problem and one software version, ties averaged (in brackets the number of groups); regret is",
            "the mean over groups, random that of any pick. The interval of a median is a bootstrap of groups, nine times in ten.",
            "Peaks are predicted as their sources measured them: allocated, reserved, or of the whole device. Running out:",
            "precision and recall of the boolean on rows that say whether they ran, false alarms as a share of those that ran;",
            "unsure is the share of peaks within 15 % of the free memory.",
            "",
            "Documented is not blind. No optimiser touched these figures, but every stack's efficiency, and some host floors, were",
            "read by hand from published runs of it or of a stack like it, `fit` rows among them, as the sources in its YAML say.",
            f"Of {', '.join(by_hand())} whole lists of figures were read so: their unfitted column is",
            "no baseline without a fit. The constant MFU beside it is.",
            "",
            "## What is aimed at, and what is met",
            "",
            "Rows of split `test`, where not all rows are said. Medians of few rows have wide intervals (90 %), which peaks",
            "have here and step times in the tables below. What is missed is explained [further down](#what-falls-short-and-why).",
            "",
            report.markdown(HEADERS, aims(found, curve)),
            "",
            "## Step time: families that share hardware and kind of model",
            "",
            report.markdown(("rows of", "split", *report.POOLED), report.pool_table(found)),
            "",
            "## Intervals",
            "",
            f"A plan states the interval that is to hold the step time {COVERAGE:.0%} of the time; it comes from `fit` rows",
            "alone, each predicted without its model's rows, of which many count for few. How often it holds it, and how far it",
            "reaches above the prediction, in the median:",
            "",
            report.markdown(("rows of", "split", "rows", "inside", "reaches"), report.coverage(found)),
            "",
            "## Families left out",
            "",
            "All among `fit` rows. A family's rows are predicted by figures that never saw them: those of other families on the",
            "same stack and accelerator, else what well-measured stacks let expect (0); then after 1, 3 and 10 of its own runs, on",
            f"rows that no count learns from. Median errors, medians over {DRAWS} draws; documented: with the stack's documented",
            "figures; inside: how often the interval of so many runs holds the step time; where none are known of a stack on an",
            "accelerator, that is the interval of what nobody measured. One run of MindSpeed or MindFormers says less than",
            "another's: their tables name no grade of the device and take layouts from scripts (±15 %).",
            "",
            report.markdown(LEFT_OUT, report.learning_curves(curve)),
            "",
            "## What falls short, and why",
            "",
            shortfalls(found, curve),
            "",
            "## Step time per family and accelerator",
            "",
            report.markdown((*SLICE, *report.TIME), report.time_table(found, SHOWN)),
            "",
            "## Memory per family and accelerator",
            "",
            report.markdown((*SLICE, *report.MEMORY), report.memory_table(found, SHOWN)),
            "",
            "## Running out of memory per family, all rows that say whether they ran",
            "",
            report.markdown(("family", *report.ENDED), report.ended_table(found)),
            "",
            "Per stack: [statistics.csv](statistics.csv). From a source's words to a Stack and a Layout:",
            "[vocabulary.md](vocabulary.md).",
            "",
            "## Plots",
            "",
            "![Predicted beside measured step time, per family](predicted-vs-measured.png)",
            "",
            "![Error by factor of the layout](error-by-factor.png)",
            "",
            "![Peak memory](memory.png)",
            "",
            "![Regret per group](regret.png)",
            "",
            "## Worst rows of each family",
            "",
            report.markdown(("id", "predicted / measured", "predicted", "measured"), report.worst(found, 3), code=(0,)),
            "",
            "## Not priced",
            "",
            report.markdown(("rows", "family", "reason"), report.skipped(found)),
            "",
            "## Priced but not counted",
            "",
            "Structural rules: they name what a row is, never how far a prediction is off; `beyond-peak` reads what was measured,",
            "which no device does.",
            "",
            report.markdown(("rows", "family", "rule"), report.excluded(found)),
            "",
            "## Assumed or odd",
            "",
            "The first of each kind.",
            "",
            report.markdown(("rows", "family", "what"), report.noted(found)),
            "",
        ]
    )


def by_hand() -> list[str]:
    """Stacks of the catalog with a figure whose source says that it was read from rows of split `fit`."""
    stacks = [load_stack(name) for name in catalog_names("stacks")]
    return [
        stack.name
        for stack in stacks
        if any("rows for fitting" in figure.source for _, figure in stack if isinstance(figure, Figure))
    ]


INSIDE = tuple(f"inside {count}" for count in COUNTS)
LEFT_OUT = ("family", "stack", "accelerator", "models", "held out", "documented", *map(str, COUNTS), *INSIDE)
SLICE = ("family", "accelerator", "slice", "split")
SHOWN = ("counted", "everything", "dense", "MoE", "pp 1, tp ≤ 8", "pp > 1 or tp > 8")
"""Slices on the page; those by stack are in statistics.csv."""
VOCABULARY_NOTE = (
    "One table, read top down: the first entry of a column whose pattern matches the whole cell, in any case, counts. "
    "A meaning that starts with ! is a reason why the row cannot be priced, one that starts with ~ the nearest that is known "
    "(the row says so). The text for `accelerator` is without its vendor, for `stack` is software, family, "
    "precision, optimizer_sharding and comm_overlap, joined by ` | `, for `doubt` the family (a spread of log step time), for "
    "`selective` the stack."
)


if __name__ == "__main__":
    main()

"""A CSV of measured runs as rows: one that cannot be read is a row with a defect, only a file that is no such table is refused."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..search_spaces.errors import InputError
from .runs import MEASURED, PEAK, Run

NEEDED = ("id", "model", "accelerator", "num_accelerators", "seq_len", "global_batch", "micro_batch", "tp", "pp")
"""Columns without which a file is not a table of runs."""
OPTIONAL = (
    *("family", "group", "split", "source", "source_version", "domain_size", "software", "flops_convention", "status", "notes"),
    *("sp", "cp", "cp_type", "vpp", "pp_schedule", "ep", "etp", "dp", "optimizer_sharding", "recompute", "offload"),
    *("precision", "comm_overlap", "moe_dispatcher", "cuda_graphs", "fp8_details", *MEASURED, PEAK),
)
"""The other columns of the format; shapes of models have theirs in run_models."""
OTHER_NAMES = {"framework": "software"}  # columns that are read where those that they stand for are blank
MOST_IDS = 3  # rows that are named for one reason
MOST_LINES = 50
"""Lines of one row: a quote that was left open takes in the rows below it."""


def read_runs(path: Path) -> list[Run]:
    """The rows of a CSV of measured runs, every one. InputError, in one sentence, for a file that is not one."""
    with _opened(path) as (header, reader):
        return [_run(header, first, last, row) for first, last, row in _rows(reader)]


def columns_of(path: Path) -> list[str]:
    """Names of the columns of a CSV of measured runs, in lower case. InputError for a file that is not one."""
    with _opened(path) as (header, _):
        return header


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Any]]:
    """The header of a table of runs, and a reader of the rows below it."""
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder, not a file")
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            yield _header(next(reader, []), path), reader
    except csv.Error as error:
        raise InputError(f"{path}: is not a CSV file: {error}") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def some_ids(ids: Sequence[str]) -> str:
    """The first few ids of rows, and that there are more."""
    return ", ".join((*ids[:MOST_IDS], "…") if len(ids) > MOST_IDS else ids)


def _header(cells: Sequence[str], path: Path) -> list[str]:
    """Names of the columns, in lower case."""
    if any(_readable(cell) != cell for cell in cells):
        raise InputError(f"{path}: is not UTF-8 text (its first line); save it as UTF-8")
    names = [cell.strip().lower() for cell in cells]
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputError(f"{path}: has no column {missing[0]!r}; a table of runs needs {', '.join(NEEDED)}")
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise InputError(f"{path}: has the column {twice[0]!r} more than once; keep one of them")
    return names


def _rows(reader: Any) -> Iterator[tuple[int, int, list[str] | str]]:
    """Rows with their first and last lines; in place of one that is not CSV the reason why."""
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            row = f"not a row of CSV: {error}"
        if row:  # an empty line is no row
            yield first, reader.line_num, row


def _run(header: Sequence[str], first: int, last: int, row: list[str] | str) -> Run:
    if isinstance(row, str):
        return Run({}, f"row {first}", defect=row)
    read = [_readable(cell.strip()) for cell in row]
    cells = dict(zip(header, [*read, *[""] * (len(header) - len(read))], strict=False))
    for name, meant in OTHER_NAMES.items():
        cells[meant] = cells.get(meant) or cells.get(name, "")
    defect = ""
    if last - first >= MOST_LINES:
        defect = f"row of more than {MOST_LINES} lines: a quote is left open"
    elif any(read[len(header) :]):
        defect = "more cells than the header"
    said = (
        ("no id: named after its line", not cells["id"]),
        ("fewer cells than the header: what is missing is taken as blank", len(read) < len(header)),
        ("not UTF-8 text: characters that cannot be read are left out", read != [cell.strip() for cell in row]),
    )
    return Run(cells, cells["id"] or f"row {first}", defect, tuple(note for note, holds in said if holds))


def _readable(cell: str) -> str:
    """The cell with a replacement character for every byte that is not UTF-8."""
    return cell if cell.isascii() else cell.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

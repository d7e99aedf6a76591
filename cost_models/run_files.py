"""A CSV of measured runs as rows: one that cannot be read is a row with a defect, only a file that is no such table is refused."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..search_spaces.errors import InputError
from .runs import MEASURED, PEAK, Run

COLUMNS: Mapping[str, str] = {
    "model": "a name of the catalog or of models.json beside the file, or any with the row's own sizes",
    "accelerator": "the device, in any common spelling; with a cluster that is told it may be left out",
    "num_accelerators": "devices (ranks) of the job",
    "seq_len": "tokens per sequence",
    "global_batch": "sequences per step",
    "micro_batch": "sequences per forward pass of one data-parallel rank",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "id": "what the row is called; blank: row and its line",
    "family": "rows of one source, whose errors are counted together; blank: unnamed",
    "group": "layouts of one problem that are ranked together; no such column: rows of equal model, accelerator, devices, lengths, "
    "batch, precision and software",
    "split": "fit or test; blank: test, with calibrate --site rows to learn from",
    "source": "where the figure stands, and what it says of links between servers: 8x400Gb/s, 800 Gb/s per server",
    "source_version": "release of the software that the source measured",
    "cluster": "where the row ran: a name of the catalog, or a cluster file beside the table; --cluster says it for all rows",
    "domain_size": "devices of one supernode, or of a server, where they are not the catalog's; a told cluster says it",
    "software": "framework and version; blank: the cluster's usual stack, with the interval of stacks that nobody measured",
    "precision": "of the GEMMs: bf16, fp16, fp8 (a recipe behind it: fp8-blockwise, mxfp8, fp8 rowwise) or nvfp4; blank: bf16",
    "sp": "sequence parallelism: yes or no; blank: where tp > 1",
    "cp": "context-parallel ranks; blank: 1",
    "cp_type": "how they exchange: p2p (ring), allgather or a2a (Ulysses); blank: p2p",
    "vpp": "model chunks of one stage; blank: 1",
    "pp_schedule": "1f1b, interleaved, gpipe, zb-h1, zb-v, dualpipe or dualpipev; blank: 1f1b, with vpp > 1 interleaved",
    "ep": "expert-parallel ranks; needed where the model has experts",
    "etp": "tensor-parallel ranks of experts; blank: the framework's own",
    "dp": "data-parallel ranks; blank: what is left of the devices",
    "optimizer_sharding": "none, zero1, zero2, zero3, hsdp:K; blank: zero1, of FSDP stacks zero3",
    "recompute": "none, full, full:block:K, full:uniform:K, selective, selective:core_attn+mlp",
    "offload": "none, optimizer:F, activations:F (shares), or the framework's words",
    "comm_overlap": "what is overlapped (tp, grad-reduce, param-gather, moe-ep-a2a), or none; blank: what the stack overlaps",
    "moe_dispatcher": "alltoall, allgather, deepep or hybridep; blank: the stack's",
    "cuda_graphs": "full_iteration, or transformer_engine:attn+mlp+…",
    "fp8_details": "not priced: for the reader",
    MEASURED[0]: "seconds of one step",
    MEASURED[1]: "tokens per second and device",
    MEASURED[2]: "TFLOP/s per device",
    MEASURED[3]: "a share, or per cent",
    PEAK: "GiB of the fullest device",
    "memory_measure": "how the peak was read: allocated, reserved (the allocator's cache is in) or device (nvidia-smi: context and "
    "communicators too); blank: as the family is known to, else allocated",
    "flops_convention": "behind TFLOP/s and MFU: causal attention halved or full attention, hardware where recompute counts",
    "status": "ok, oom or fail; blank: ok where anything was measured",
    "notes": "words that are looked for: links between servers (1 x 200 Gb/s per server), layers by stage (pp_layout=…), how the "
    "peak was read (nvidia-smi, max_memory_reserved), balanced experts, FSDP group K, torch.compile=false; and for "
    "why a row is not counted or not priced: implausible, does not match, LoRA, packed sequences",
}
"""Every column of the format that is read, and what it holds; shapes of models have theirs in run_models."""
NEEDED = tuple(COLUMNS)[:8]
"""Columns without which a file is not a table of runs."""
OPTIONAL = tuple(COLUMNS)[8:]
DELIMITERS = (",", ";", "\t")
DECIMAL_COMMA = re.compile(r"[~≈]? ?-?\d+,\d+ ?%?")
"""A number as programs write it that put semicolons between cells because the comma is taken."""
OTHER_NAMES = {"framework": "software"}  # columns that are read where those that they stand for are blank
NAN = "nan"  # what tables of numbers write for a blank, in columns of words too; of a measured figure it is told
MOST_IDS = 3  # rows that are named for one reason
MOST_LINES = 50
"""Lines of one row: a quote that was left open takes in the rows below it."""


def read_runs(path: Path, located: bool = False) -> list[Run]:
    """The rows of a CSV of measured runs, every one. InputError, in one sentence, for a file that is not one.

    Where they are `located` otherwise, rows need name no accelerator.
    """
    with _opened(path) as (header, reader):
        _refuse_incomplete(header, path, located)
        runs = [_run(header, first, last, row, reader.dialect.delimiter == ";") for first, last, row in _rows(reader)]
    if not runs:
        raise InputError(f"{path}: holds no run: below its header there is no row")
    return runs


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
            delimiter = _delimiter(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            yield _header(next(reader, []), path), reader
    except csv.Error as error:
        raise InputError(f"{path}: is not a CSV file: {error}") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _delimiter(line: str) -> str:
    """What parts the cells of a header: that by which it names the most columns that are read."""

    def named(delimiter: str) -> int:
        return sum(cell.strip(' "\r\n').lower() in COLUMNS for cell in line.split(delimiter))

    return max(DELIMITERS, key=named)


def some_ids(ids: Sequence[str]) -> str:
    """The first few ids of rows, and that there are more."""
    return ", ".join((*ids[:MOST_IDS], "…") if len(ids) > MOST_IDS else ids)


def _header(cells: Sequence[str], path: Path) -> list[str]:
    """Names of the columns, in lower case."""
    if any(_readable(cell) != cell for cell in cells):
        raise InputError(f"{path}: is not UTF-8 text (its first line); save it as UTF-8")
    names = [cell.strip().lower() for cell in cells]
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise InputError(f"{path}: has the column {twice[0]!r} more than once; keep one of them")
    return names


def _refuse_incomplete(header: Sequence[str], path: Path, located: bool) -> None:
    spared = {"accelerator"} if located or "cluster" in header else set()
    missing = [name for name in NEEDED if name not in header and name not in spared]
    if missing:
        spare = " (or the cluster of all rows by --cluster)" if missing[0] == "accelerator" else ""
        raise InputError(f"{path}: has no column {missing[0]!r}; a table of runs needs {', '.join(NEEDED)}{spare}")


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


def _run(header: Sequence[str], first: int, last: int, row: list[str] | str, decimal_comma: bool) -> Run:
    if isinstance(row, str):
        return Run({}, f"row {first}", defect=row)
    read = [_readable(cell.strip()) for cell in row]
    if decimal_comma:
        read = [cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell for cell in read]
    cells = dict(zip(header, [*read, *[""] * (len(header) - len(read))], strict=False))
    cells |= {name: "" for name, cell in cells.items() if cell.lower() == NAN and name not in (*MEASURED, PEAK)}
    for name, meant in OTHER_NAMES.items():
        cells[meant] = cells.get(meant) or cells.get(name, "")
    defect = ""
    if last - first >= MOST_LINES:
        defect = f"row of more than {MOST_LINES} lines: a quote is left open"
    elif any(read[len(header) :]):
        defect = "more cells than the header"
    said = (
        ("no id: named after its line", not cells.get("id")),
        ("fewer cells than the header: what is missing is taken as blank", len(read) < len(header)),
        ("not UTF-8 text: characters that cannot be read are left out", any(_readable(cell) != cell for cell in row)),
    )
    return Run(cells, cells.get("id") or f"row {first}", defect, tuple(note for note, holds in said if holds))


def _readable(cell: str) -> str:
    """The cell with a replacement character for every byte that is not UTF-8."""
    return cell if cell.isascii() else cell.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

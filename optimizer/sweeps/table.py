"""The points of a store as rows of plain values: for the terminal, CSV, Parquet, queries and JSON; and their plans as folders."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...search_spaces.errors import Infeasible, InputError
from ..writing import write_file, write_folder
from .grid import AXES, Point
from .point import Outcome
from .store import Store

Row = dict[str, Any]
FIGURES = (
    *("parameters", "active_parameters"),
    *("step_time_s", "tokens_per_s_per_device", "tokens_per_s", "model_tflops_per_device", "mfu", "peak_gib", "usable_gib"),
    *("memory_verdict", "cross_supernode_share", "devices_used", "devices_idle"),
)
CHOICES = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "edp", "vpp", "micro_batch", "num_microbatches", "cp_type", "schedule"),
    *("optimizer_sharding", "recompute", "offload", "rank_order"),
)
PROOF = ("legal", "gap")
ABOUT = ("seconds", "paraplan", "reason")
EFFICIENCIES = ("efficiency_fixed_batch", "efficiency_scaled_batch")
"""Tokens per second and device over those of the fewest devices of the table, at as many sequences a step, and at as many for every
device; they come from all rows together (`series.with_efficiencies`).
"""
WHOLE = frozenset((*FIGURES[:2], "devices", "global_batch", "seq_len", "devices_used", "devices_idle", *CHOICES[:10], "legal"))
TEXT = frozenset(("model", "cluster", "precision", "status", "memory_verdict", "paraplan", "reason", *CHOICES[10:]))


def record_of(outcome: Outcome) -> str:
    """The figures of an outcome that its row shows, as JSON; an empty object where there is no plan."""
    if outcome.document is None:
        return "{}"
    from ...search_spaces.model import ModelSpec

    found = outcome.plan_json()
    plan, proof = found["plan"], found["certificate"]
    model = ModelSpec.model_validate(found["problem"]["model"])
    work, memory = found["problem"]["workload"], plan["memory"]
    tokens = work["global_batch"] * work["seq_len"]
    own = {"tokens_per_s": tokens / plan["step_time_s"], "peak_gib": memory["peak_gib"], "usable_gib": memory["usable_gib"]}
    sizes = {"parameters": model.parameters(), "active_parameters": model.active_parameters()}
    figures = {**sizes, **plan, **own, "memory_verdict": memory["verdict"]}
    return json.dumps(
        {
            **{name: figures[name] for name in FIGURES},
            **{name: plan["layout"].get(name) for name in CHOICES},
            **{name: proof[name] for name in PROOF},
        }
    )


def row_of(point: Point, outcome: Outcome, record: str) -> Row:
    """One row: what was asked, with options as text, what came of it, and where that comes from."""
    asked = {name: getattr(point, name) for name in AXES}
    options = {f"option {name}": _option_text(value) for name, value in point.options.items()}
    about = {"seconds": outcome.seconds, "paraplan": outcome.version, "reason": outcome.reason or None}
    return {**asked, **options, "status": outcome.status, **json.loads(record), **about}


def rows_of(store: Store, keys: Iterable[str] | None = None) -> list[tuple[str, Row]]:
    """Keys and rows of the points that are done, in the store's order; all, or those of the keys."""
    return [(one.point.key, row_of(one.point, one.outcome, record)) for one, record in store.stored(keys)]


def columns_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns of a table of the rows: all that there is, options behind what they span beside, and last what was added to rows."""
    options = sorted({name for row in rows for name in row if name.startswith("option ")})
    known = (*AXES, *options, "status", *FIGURES, *CHOICES, *PROOF, *ABOUT)
    return tuple(dict.fromkeys((*known, *(name for row in rows for name in row))))


def documents(store: Store, keys: Iterable[str]) -> Iterable[tuple[Point, Outcome]]:
    """Points with their plans, one at a time."""
    return ((one.point, one.outcome) for one, _ in store.stored(keys, documents=True))


def point_json(point: Point, outcome: Outcome) -> dict[str, Any]:
    """A point as --json shows it: what was asked, its status, and the plan with its certificate as in plan.json, or the reason."""
    asked = {name: getattr(point, name) for name in AXES}
    asked = {**asked, "options": dict(point.options), "status": outcome.status}
    if outcome.document is None:
        return {**asked, "reason": outcome.reason}
    found = outcome.plan_json()
    return {**asked, "plan": found["plan"], "certificate": found["certificate"], "assumptions": found["assumptions"]}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows with a line of column names, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """The same table typed by column, whole or not at all. InputError where pyarrow is not installed."""
    require_parquet()
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    names = columns_of(rows)
    fields = [arrow.field(name, _arrow_type(arrow, name)) for name in names]
    table = arrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows], schema=arrow.schema(fields))
    held = io.BytesIO()
    parquet.write_table(table, held)
    write_file(path, held.getvalue())


def require_parquet() -> None:
    """InputError where Parquet cannot be written: before a sweep rather than after it."""
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise InputError("--parquet: pyarrow is not installed; pip install 'paraplan[parquet]', or write --csv")


def export_winners(
    store: Store, keys: Sequence[str], framework: str, directory: Path, framework_version: str | None = None
) -> tuple[int, dict[str, str]]:
    """Writes every plan and its framework's files into a folder of its own, all or none.

    Returns how many folders there are, and by the keys of the points whose plans the framework cannot express, why not.
    """
    from ..exporters import render
    from ..result import Plan

    files: dict[str, str | bytes] = {}
    refused: dict[str, str] = {}
    written = 0
    for point, outcome in documents(store, keys):
        if outcome.document is None:
            continue
        plan = Plan.model_validate(outcome.plan_json())
        folder = folder_name(point)
        try:
            launch = render(plan, framework, framework_version)
        except Infeasible as error:
            refused[point.key] = "; ".join(error.reasons or (error.summary,))
            continue
        files |= {f"{folder}/{name}": text for name, text in {"plan.json": plan.to_json(), **launch}.items()}
        written += 1
    if files:
        write_folder(directory, files)
    return written, refused


def folder_name(point: Point) -> str:
    """A folder for a point, told from others of the same words by the beginning of its key."""
    words = f"{point.model} {point.cluster} {point.devices} {point.global_batch} {point.seq_len} {point.precision}"
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', words).strip('-.')[:120]}-{point.key[:8]}"


def _arrow_type(arrow: Any, name: str) -> Any:
    if name in TEXT or name.startswith("option "):
        return arrow.string()
    return arrow.int64() if name in WHOLE else arrow.float64()


def _option_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

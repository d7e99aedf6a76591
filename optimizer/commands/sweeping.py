"""sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...search_spaces.errors import InputError
from ..streams import INTERRUPTED, Meter
from .answers import DONE, Answer, at_least_one
from .handing_over import TARGETS
from .options import AsJson, FrameworkVersion, Quiet, whole
from .planning import check_output

if TYPE_CHECKING:
    from ..sweep import Run
    from ..sweep_grid import Point
    from ..sweep_store import Store
    from ..sweep_table import Row
    from ..sweep_workers import Pool


def sweep_command(
    store: Annotated[
        str, typer.Option("--store", metavar="FILE|URL", help="Where results are kept: an SQLite file, postgresql://HOST/NAME.")
    ],
    sweep_file: Annotated[
        Path | None, typer.Argument(metavar="SWEEP.yaml", help="models, clusters, devices, …; without it the store is only shown.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", parser=whole, metavar="N", help="Processes that plan; as many as there are cores.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Plan on a Ray cluster instead: its address, auto or local.")
    ] = None,
    show: Annotated[
        str | None,
        typer.Option("--show", metavar="QUERY", help='Plan nothing, show what is stored: "model=moe:*,devices>=1024"; "" is all.'),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="Write the table as Parquet.")] = None,
    export: Annotated[
        str | None, typer.Option("--export", metavar="FRAMEWORK", help=f"Write every plan for {TARGETS}, to folders in -o DIR.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for --export.")] = None,
    framework_version: FrameworkVersion = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Plan every point of a grid, resumably: what is planned is kept as it ends, and the same command goes on from there."""
    _check(sweep_file, workers, ray, show, parquet, export, out, framework_version)
    from ..sweep_grid import read_sweep
    from ..sweep_store import Store

    points = None if sweep_file is None else read_sweep(sweep_file)
    running = points is not None and show is None
    place = Store(store, write=running)
    try:
        notes: tuple[str, ...] = ()
        status = DONE
        if points is not None and sweep_file is not None and running:
            try:
                notes = _run_notes(_run(points, sweep_file, place, workers, ray, Meter(shown=not (quiet or as_json))))
            except KeyboardInterrupt:
                return Answer(lambda: None, _interrupted(place, points), INTERRUPTED)
        keys = None if points is None else [point.key for point in points]
        answer = _shown(place, keys, show or "", csv, parquet, export, out, framework_version, as_json)
        return Answer(answer.show, () if quiet else (*notes, *answer.notes), status)
    finally:
        place.close()


def _check(
    sweep_file: Path | None,
    workers: int | None,
    ray: str | None,
    show: str | None,
    parquet: Path | None,
    export: str | None,
    out: Path | None,
    framework_version: str | None,
) -> None:
    """InputError before a sweep for what could not be done after it."""
    at_least_one("--workers", 1 if workers is None else workers)
    if workers is not None and ray not in (None, "local"):
        raise InputError(f"--workers {workers}: the cluster at --ray {ray} has cores of its own; leave it out")
    if (workers is not None or ray is not None) and (sweep_file is None or show is not None):
        raise InputError("--workers and --ray: there is nothing to plan; give a SWEEP.yaml, and no --show")
    if (export is None) != (out is None):
        raise InputError("--export FRAMEWORK and -o DIR: give both or neither")
    if export is not None and out is not None:
        check_output(out, export, framework_version)
    if parquet is not None:
        from ..sweep_table import require_parquet

        require_parquet()


def _run(points: Sequence[Point], sweep_file: Path, store: Store, workers: int | None, ray: str | None, meter: Meter) -> Run:
    from ..sweep import run_sweep

    pool = _pool(len(points), workers, ray)
    try:
        with meter:
            return run_sweep(points, sweep_file.absolute().parent, store, pool, meter)
    finally:
        pool.close()


def _pool(points: int, workers: int | None, ray: str | None) -> Pool:
    if ray is not None:
        from ..sweep_ray import Ray

        return Ray(ray, workers)
    from ..sweep_workers import Processes, usable_cores

    return Processes(min(workers or usable_cores(), points))


def _run_notes(run: Run) -> tuple[str, ...]:
    changed = f"; {run.renewed:,} anew, since their problem, its curves or paraplan's version changed, or they failed before"
    if not run.planned:
        return ("nothing to plan: the store has all points",)
    return (f"planned {run.planned:,} points{changed if run.renewed else ''}",)


def _interrupted(store: Store, points: Sequence[Point]) -> tuple[str, ...]:
    done = sum(done for done, _ in store.states(point.key for point in points).values())
    return (f"interrupted: {done:,} of {len(points):,} points are in {store.where}; the same command goes on from there",)


def _shown(
    store: Store,
    keys: Sequence[str] | None,
    query: str,
    csv: Path | None,
    parquet: Path | None,
    export: str | None,
    out: Path | None,
    framework_version: str | None,
    as_json: bool,
) -> Answer:
    """The points that a query picks, written and printed as asked for."""
    from ..sweep_query import parse_query, select
    from ..sweep_table import columns_of, export_winners, rows_of, write_csv, write_parquet

    every = rows_of(store, keys)
    picked = select(every, parse_query(query, columns_of([row for _, row in every])))
    chosen, rows = [key for key, _ in picked], [row for _, row in picked]
    notes: tuple[str, ...] = ()
    if csv is not None:
        write_csv(rows, csv)
    if parquet is not None:
        write_parquet(rows, parquet)
    if export is not None and out is not None:
        count, refused = export_winners(store, chosen, export, out, framework_version)
        notes = (f"wrote {count:,} plans for {export} to {out}", *refused)
    left = store.left() if keys is None else len(keys) - len(every)
    if as_json:
        document = _json(store, chosen, left)
        return Answer(lambda: print(document), notes)
    return Answer(lambda: _render(rows, left, store.where), notes)


def _json(store: Store, keys: Sequence[str], left: int) -> str:
    import json

    from ..sweep_table import documents, point_json

    points: list[dict[str, Any]] = [point_json(point, outcome) for point, outcome in documents(store, keys)]
    return json.dumps({"points": points, "not_done": left}, indent=2, ensure_ascii=False)


def _render(rows: Sequence[Row], left: int, where: str) -> None:
    from rich.console import Console

    from ..reports.sweep import render_sweep

    render_sweep(rows, left, where, Console())

"""sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...search_spaces.errors import InputError
from ..reports.wording import count
from ..streams import INTERRUPTED, Meter
from .answers import BAD_INPUT, DONE, NO_LAYOUT, Answer, at_least_one
from .options import AsJson, FrameworkVersion, Quiet, whole
from .plan_files import check_output

if TYPE_CHECKING:
    from ..sweeps.grid import Point
    from ..sweeps.store import Store
    from ..sweeps.sweeper import Run
    from ..sweeps.table import Row
    from ..sweeps.workers import Pool


def sweep_command(
    store: Annotated[str, typer.Option("--store", metavar="FILE|URL", help="Where results are kept: SQLite, or postgresql://….")],
    sweep_file: Annotated[
        Path | None, typer.Argument(metavar="SWEEP.yaml", help="models, clusters, devices, …; left out, the store is shown.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", parser=whole, metavar="N", help="Processes that plan; else one a core.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Plan on a Ray cluster: its address, auto or local.")
    ] = None,
    show: Annotated[
        str | None,
        typer.Option("--show", metavar="QUERY", help='Only show what is stored: "model=moe:*"; "" is all.'),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="Write the table as Parquet.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="DIR", help="Draw strategies, curves, fronts; a page of them."),
    ] = None,
    export: Annotated[
        str | None, typer.Option("--export", metavar="FRAMEWORK", help="Write every plan for it, to folders in -o DIR.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for --export.")] = None,
    framework_version: FrameworkVersion = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Answer:
    """Plan every point of a grid, resumably: what is planned is kept as it ends, and the same command goes on from there."""
    wanted = _Wanted(csv, parquet, plot, export, out, framework_version, as_json, quiet)
    _check(sweep_file, workers, ray, show, wanted)
    from ..sweeps.grid import likenesses, read_sweep, roundings
    from ..sweeps.store import Store

    points = None if sweep_file is None else read_sweep(sweep_file)
    _spare(points or (), sweep_file, store, wanted)
    running = points is not None and show is None
    place = Store(store, write=running)
    try:
        run: Run | None = None
        if points is not None and sweep_file is not None and running:
            try:
                run = _run(points, sweep_file, place, workers, ray, Meter(shown=not (quiet or as_json)))
            except KeyboardInterrupt:
                return Answer(lambda: None, _interrupted(place, points), INTERRUPTED)
        keys = None if points is None else [point.key for point in points]
        notes, status = _ended(run, place, points or ())
        if sweep_file is not None and run is not None:
            notes = (*roundings(sweep_file), *likenesses(sweep_file), *notes)
        answer = _shown(place, keys, show or "", wanted)
        return Answer(answer.show, (*(() if quiet else notes), *answer.notes), status or answer.status)
    finally:
        place.close()


@dataclass(frozen=True)
class _Wanted:
    """What is written of the points that a query picks, beside what is printed."""

    csv: Path | None
    parquet: Path | None
    plot: Path | None
    export: str | None
    out: Path | None
    framework_version: str | None
    as_json: bool
    quiet: bool


def _check(sweep_file: Path | None, workers: int | None, ray: str | None, show: str | None, wanted: _Wanted) -> None:
    """InputError before a sweep for what could not be done after it."""
    at_least_one("--workers", 1 if workers is None else workers)
    if workers is not None and ray not in (None, "local"):
        raise InputError(f"--workers {workers}: the cluster at --ray {ray} has cores of its own; leave it out")
    if (workers is not None or ray is not None) and (sweep_file is None or show is not None):
        raise InputError("--workers and --ray: there is nothing to plan; give a SWEEP.yaml, and no --show")
    if (wanted.export is None) != (wanted.out is None):
        raise InputError("--export FRAMEWORK and -o DIR: give both or neither")
    if wanted.export is not None and wanted.out is not None:
        check_output(wanted.out, wanted.export, wanted.framework_version, "--export")
    if wanted.parquet is not None:
        from ..sweeps.table import require_parquet

        require_parquet()
    if wanted.plot is not None:
        from ..reports.sweep_look import require_plots

        require_plots()


def _spare(points: Sequence[Point], sweep_file: Path | None, store: str, wanted: _Wanted) -> None:
    """InputError where a table would take the place of the store, of the sweep or of a file that it names."""
    from ..writing import refuse_place, spare_inputs

    folder = Path() if sweep_file is None else sweep_file.absolute().parent
    words = {word for point in points for word in (point.model, point.cluster, *point.options.values()) if isinstance(word, str)}
    kept = [] if "://" in store else [Path(f"{store}{tail}").expanduser() for tail in ("", "-wal", "-shm", "-journal")]
    tables = {"--csv": wanted.csv, "--parquet": wanted.parquet}
    spare_inputs(tables, (sweep_file, *kept, *(folder / word for word in sorted(words)), *map(Path, sorted(words))))
    for option, path in tables.items():
        if path is not None:
            refuse_place(path, f"{option} ")


def _run(points: Sequence[Point], sweep_file: Path, store: Store, workers: int | None, ray: str | None, meter: Meter) -> Run:
    from ..sweeps.sweeper import run_sweep

    pool = _pool(len(points), workers, ray)
    try:
        with meter:
            return run_sweep(points, sweep_file.absolute().parent, store, pool, meter)
    finally:
        pool.close()


def _pool(points: int, workers: int | None, ray: str | None) -> Pool:
    if ray is not None:
        from ..sweeps.ray_workers import Ray

        return Ray(ray, workers)
    from ..sweeps.workers import Processes, usable_cores

    return Processes(min(workers or usable_cores(), points))


def _ended(run: Run | None, store: Store, points: Sequence[Point]) -> tuple[tuple[str, ...], int]:
    """What a run did, in words that agree with the table, and its exit status: that of its points where none has a plan."""
    from ..sweeps.point import PLANNED

    if run is None:
        return (), DONE
    counts = store.statuses(point.key for point in points)
    planned = sum(counts.get(name, 0) for name in PLANNED)
    status = DONE if planned else BAD_INPUT if set(counts) == {"bad input"} else NO_LAYOUT
    if not run.planned:
        return ("nothing to plan: the store has all points",), status
    changed = (
        f"; {run.renewed:,} anew: their problem, its curves or paraplan's version changed, they failed before, or were damaged"
    )
    others = [f", {many:,} {name}" for name, many in sorted(counts.items()) if name not in PLANNED]
    now = f"; {run.planned:,} of these now" if run.planned < len(points) else ""
    said = f"planned {planned:,} of {count(len(points), 'point')}{''.join(others)}{now}{changed if run.renewed else ''}"
    return (said,), status


def _interrupted(store: Store, points: Sequence[Point]) -> tuple[str, ...]:
    done = sum(done for done, _ in store.states(point.key for point in points).values())
    return (f"interrupted: {done:,} of {len(points):,} points are in {store.where}; the same command goes on from there",)


def _shown(store: Store, keys: Sequence[str] | None, query: str, wanted: _Wanted) -> Answer:
    """The points that a query picks, written and printed as asked for."""
    from ..sweeps.query import check_values, parse_query, select
    from ..sweeps.series import with_efficiencies
    from ..sweeps.table import columns_of, rows_of, write_csv, write_parquet

    every = rows_of(store, keys)
    stored = with_efficiencies([row for _, row in every])
    every = [(key, row) for (key, _), row in zip(every, stored, strict=True)]
    conditions = parse_query(query, columns_of(stored))
    check_values(conditions, stored)
    picked = select(every, conditions)
    chosen, rows = [key for key, _ in picked], [row for _, row in picked]
    if wanted.csv is not None:
        write_csv(rows, wanted.csv)
    if wanted.parquet is not None:
        write_parquet(rows, wanted.parquet)
    drawn = _drawn(store, chosen, rows, wanted)
    exported, status = _exported(store, picked, wanted)
    notes = (*(() if wanted.quiet else drawn), *exported)
    left = store.left() if keys is None else len(keys) - len(every)
    if wanted.as_json:
        document = _json(store, chosen, left)
        return Answer(lambda: print(document), notes, status)
    return Answer(lambda: _render(rows, left, store.where), notes, status)


def _drawn(store: Store, keys: Sequence[str], rows: Sequence[Row], wanted: _Wanted) -> Sequence[str]:
    """Draws the pictures that are asked for; returns what was written, in words."""
    if wanted.plot is None:
        return ()
    from ..reports.sweep_page import sweep_page
    from ..reports.sweep_plots import pictures
    from ..sweeps.trades import trades
    from ..writing import spare_inputs, write_folder

    traded, title = trades(store, keys), Path(store.where).stem.partition("?")[0]
    files: dict[str, str | bytes] = {**pictures(rows, traded), "sweep.html": sweep_page(rows, title, traded)}
    for name in files:
        spare_inputs({"--plot": wanted.plot / name}, () if "://" in store.where else (store.where,))
    write_folder(wanted.plot, files)
    return (f"wrote {', '.join(files)} to {wanted.plot}",)


def _exported(store: Store, picked: Sequence[tuple[str, Row]], wanted: _Wanted) -> tuple[Sequence[str], int]:
    """Writes every plan for a framework, where that is asked for; returns what was and what was not written, in words.

    And the exit status: where nothing was written, that is no success. What was not written is told the quiet too.
    """
    if wanted.export is None or wanted.out is None:
        return (), DONE
    from ..sweeps.table import export_winners

    written, refused = export_winners(store, [key for key, _ in picked], wanted.export, wanted.out, wanted.framework_version)
    done = f"wrote {count(written, 'plan')} for {wanted.export} to {wanted.out}"
    told = [done] if not (wanted.quiet and written) else []
    return (*told, *_refused(picked, refused, wanted.export)), DONE if written else NO_LAYOUT


def _refused(picked: Sequence[tuple[str, Row]], refused: Mapping[str, str], framework: str) -> Sequence[str]:
    """Why plans were not written, equal reasons as one, and how to plan what can be."""
    if not refused:
        return ()
    from ..exporters.knobs import FRAMEWORKS
    from ..reports.sweep import commonest
    from ..sweeps.point import PLANNED

    planned = [row for _, row in picked if row["status"] in PLANNED]
    missed = [{**row, "reason": refused[key]} for key, row in picked if key in refused]
    told, rest = commonest(missed, planned)
    lines = [line for many, why, whose in told for line in (f"{many:,} × not written: {why}", *([f"    {whose}"] if whose else []))]
    lines += [f"and {rest:,} more reasons"] if rest else []
    free = framework in FRAMEWORKS and any(row.get("option framework") != framework for row in missed)
    return (*lines, *([f"plan with options: {{framework: {framework}}}"] if free else []))


def _json(store: Store, keys: Sequence[str], left: int) -> str:
    import json

    from ..sweeps.table import documents, point_json

    points: list[dict[str, Any]] = [point_json(point, outcome) for point, outcome in documents(store, keys)]
    return json.dumps({"points": points, "not_done": left}, indent=2, ensure_ascii=False)


def _render(rows: Sequence[Row], left: int, where: str) -> None:
    from rich.console import Console

    from ..reports.sweep import render_sweep

    render_sweep(rows, left, where, Console())

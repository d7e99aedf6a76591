"""Opens the database of a store, and says in one sentence what is wrong with one that does not open or breaks while it is used.

A file is looked at before anything is written to it: one that is no store, is damaged or cannot be written stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, event, exc, inspect, text
from sqlalchemy.engine import URL, make_url

from ...search_spaces.errors import InputError

PATIENCE_S = 60  # for another process's write to an SQLite file
MAGIC = b"SQLite format 3\0"
LOCK = 0x70617261706C616E  # name of an advisory lock of PostgreSQL
FULL = ("full", "disk i/o", "no space", "file too large")
UNWRITABLE = ("readonly", "read-only", "permission denied")
UNREACHABLE = ("unable to open", "refused", "connect", "resolve", "timeout", "authentication")


def opened(where: str, tables: MetaData, write: bool) -> Engine:
    """The engine of a store, its tables made if need be; InputError, the store untouched, where it cannot be used.

    `where` is a file of SQLite or an SQLAlchemy URL. Without `write` there has to be a store, and nothing is written.
    """
    url = _url(where)
    file = Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None
    if file is not None:
        _look_at(file, where, tables, write)
    with told(where):
        engine = _engine(url, file, write)
        names = set(inspect(engine).get_table_names()) if not write else set()
        if not write and not names.issuperset(tables.tables):
            raise InputError(f"--store {where}: holds no sweep; give a SWEEP.yaml to begin one")
        if write:
            _make_tables(engine, tables)
        return engine


@contextlib.contextmanager
def told(where: str) -> Iterator[None]:
    """What breaks in a store's database, as an InputError of one sentence."""
    try:
        yield
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        raise InputError(_complaint(where, error)) from error


def _url(where: str) -> URL:
    if not where.strip():
        raise InputError("--store: is empty; name a file such as sweep.sqlite, or a database such as postgresql://HOST/NAME")
    if "://" not in where:
        return URL.create("sqlite", database=str(Path(where).expanduser()))
    try:
        url = make_url(where)
    except exc.ArgumentError as error:
        raise InputError(f"--store {where}: is no URL of a database; write postgresql://USER@HOST/NAME") from error
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InputError(f"--store {where}: names no file; a sweep has to outlive its process")
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgresql", "postgres") else url


def _look_at(file: Path, where: str, tables: MetaData, write: bool) -> None:
    """InputError for a file that cannot serve as a store; reads only."""
    if file.is_dir():
        raise InputError(f"--store {where}: is a folder; name a file in it, such as {file / 'sweep.sqlite'}")
    if not file.absolute().parent.is_dir():
        raise InputError(f"--store {where}: there is no folder {file.parent}; make it first")
    if not file.exists():
        if not write:
            raise InputError(f"--store {where}: there is no such file; give a SWEEP.yaml to begin one")
        if not os.access(file.absolute().parent, os.W_OK):
            raise InputError(f"--store {where}: its folder is read-only; make it writable, or name another place")
        return
    if write and not (os.access(file, os.W_OK) and os.access(file.absolute().parent, os.W_OK)):
        raise InputError(f"--store {where}: is read-only, it or its folder; make both writable, or name another file")
    try:
        with file.open("rb") as stream:
            head = stream.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"--store {where}: cannot be read ({error.strerror})") from error
    if head and head != MAGIC:
        raise InputError(f"--store {where}: is damaged or no SQLite file; restore a copy, or name another file")
    if head:
        _look_inside(file, where, tables)


def _look_inside(file: Path, where: str, tables: MetaData) -> None:
    """InputError for a database that is damaged or none of ours.

    One that nobody writes to is looked at without the files that SQLite keeps beside it, which a reader cannot take away again; if
    that says it is damaged and somebody has begun to write meanwhile, it is looked at once more.
    """
    before = _writes(file)
    try:
        _look_through(_address(file, quiet=not before[1]), where, tables)
    except InputError:
        if _writes(file) == before:
            raise
        _look_through(_address(file, quiet=False), where, tables)


def _look_through(address: str, where: str, tables: MetaData) -> None:
    with told(where), contextlib.closing(sqlite3.connect(address, uri=True, timeout=PATIENCE_S)) as connection:
        found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
        if found != ["ok"]:
            raise InputError(f"--store {where}: is damaged ({found[0].splitlines()[-1]}); restore a copy, or name another file")
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if names and not names & set(tables.tables):
        raise InputError(f"--store {where}: is a database of something else (it holds {min(names)}); name another file")


def _writes(file: Path) -> tuple[int, int]:
    """When a file was last written, and the bytes that wait beside it to be."""
    waiting = Path(f"{file}-wal")
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime_ns, waiting.stat().st_size
    return file.stat().st_mtime_ns, 0


def _address(file: Path, quiet: bool) -> str:
    """To read only; `quiet`: as one that nobody writes to, without files beside it."""
    return f"{file.absolute().as_uri()}?mode=ro" + ("&immutable=1" if quiet else "")


def _engine(url: URL, file: Path | None, write: bool) -> Engine:
    try:
        if file is None:
            return create_engine(url, pool_pre_ping=True)
        if not write:
            return create_engine("sqlite://", creator=lambda: _read_only(file))
        engine = create_engine(url, connect_args={"timeout": PATIENCE_S})
    except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
        remedy = "pip install 'paraplan[postgres]'" if "psycopg" in str(error) else "name an SQLite file or postgresql://HOST/NAME"
        raise InputError(f"--store {_hidden(url)}: cannot be opened here ({_first_line(error)}); {remedy}") from error
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _read_only(file: Path) -> sqlite3.Connection:
    unwritable = not os.access(file.absolute().parent, os.W_OK) and not Path(f"{file}-wal").exists()
    connection = sqlite3.connect(_address(file, unwritable), uri=True, timeout=PATIENCE_S, check_same_thread=False)
    connection.text_factory = _readable
    return connection


def _on_connect(connection: Any, _: object) -> None:
    """Readers beside a writer (WAL), a commit on the disk before it counts, and transactions begun by us: the driver would wait
    with the lock until the first change, when another process may have it.
    """
    connection.isolation_level = None
    connection.text_factory = _readable
    cursor = connection.cursor()
    _write_ahead(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _readable(raw: bytes) -> str:
    """A text of the store; of a damaged one what can be read, so that it is known by its seal and not by failing."""
    return raw.decode(errors="replace")


def _write_ahead(cursor: sqlite3.Cursor) -> None:
    """Switching needs the file alone for a moment, and SQLite does not wait for that as it does for a write: others open it too."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > ends:
                raise
            time.sleep(0.05)


def _make_tables(engine: Engine, tables: MetaData) -> None:
    with engine.begin() as connection:
        alone(connection)
        tables.create_all(connection)
        for table in tables.tables.values():
            _add_columns(connection, table)


def _add_columns(connection: Connection, table: Table) -> None:
    """Those that a store made by an earlier version lacks; they are empty in the rows that it holds."""
    held = {column["name"] for column in inspect(connection).get_columns(table.name)}
    for column in table.columns:
        if column.name not in held:
            of = column.type.compile(connection.dialect)
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {of}"))


def alone(connection: Connection) -> None:
    """Until the transaction ends no other makes tables or adds points: what both make at once, one of them would fail to make."""
    if connection.dialect.name == "postgresql":  # of SQLite there is one writer anyway
        connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))


def _complaint(where: str, error: BaseException) -> str:
    reason = _first_line(getattr(error, "orig", None) or error)
    place = f"--store {_hidden(where)}"
    low = reason.lower()
    if any(word in low for word in FULL):
        return f"{place}: has no room for more ({reason}); what it held is still there, and the same command goes on from it"
    if "locked" in low:
        return f"{place}: another program holds it ({reason}); try again when that is done"
    if any(word in low for word in UNWRITABLE):
        return f"{place}: cannot be written ({reason}); make it writable, or name another"
    if any(word in low for word in UNREACHABLE):
        return f"{place}: cannot be reached ({reason}); check the path or URL, and that the server runs"
    return f"{place}: is damaged or no store of paraplan sweep ({reason}); restore a copy, or name another"


def _hidden(where: str | URL) -> str:
    """Without the password."""
    if isinstance(where, str) and "://" not in where:
        return where
    return make_url(where).render_as_string(hide_password=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""The store of sweeps: points, what came of them, and who is at work on which; SQLite, PostgreSQL or what SQLAlchemy opens.

A point is `waiting` or `done`. Whoever plans it is its owner, a row of `runners`; a result, and its owner's leave, are one
transaction, so that a process killed at any moment leaves points waiting or done and nothing between. Points of an owner that is
dead are free again: at once where its process can be looked for, elsewhere once its heartbeat has stood still.

A result carries a seal. A store from before there were seals gets the column when it is opened to write, and is read without it;
its old results have none until they are planned anew.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    delete,
    func,
    insert,
    inspect,
    select,
    update,
)

from ...search_spaces.errors import InputError
from .grid import Point
from .opening import alone, opened, told
from .point import Outcome
from .presence import machine, process, runs
from .seal import is_sound, name_of, seal_of

T = TypeVar("T")
LEASE_S = 60.0
"""Seconds without a heartbeat after which the points of an owner on another machine are free again."""
MANY = 500  # keys of one statement
PAGE = 100  # rows read at once, their documents with them
WAITING, DONE = "waiting", "done"

METADATA = MetaData()
POINTS = Table(
    "paraplan_sweep_points",
    METADATA,
    Column("key", String(32), primary_key=True),
    Column("place", Integer, nullable=False, index=True),  # the order in which points came into the store
    Column("asked", Text, nullable=False),  # the point, as JSON
    Column("state", String(8), nullable=False),
    Column("owner", String(32), index=True),
    Column("status", String(16)),
    Column("reason", Text),
    Column("record", Text),  # the figures of its row in a table, as JSON
    Column("document", LargeBinary),  # plan.json, zlib
    Column("digest", String(32)),
    Column("version", Text),
    Column("seconds", Double),
    Column("ended", Text),
    Column("seal", String(32)),  # none in results of stores from before there were seals
)
RUNNERS = Table(
    "paraplan_sweep_runners",
    METADATA,
    Column("name", String(32), primary_key=True),
    Column("machine", Text, nullable=False),
    Column("process", Text, nullable=False),
    Column("beat", Integer, nullable=False),
)


@dataclass(frozen=True)
class Stored:
    """A point of a store with its outcome, its document left out unless it was asked for."""

    point: Point
    outcome: Outcome


class Store:
    """One open store, and this process as a runner of it.

    Every method is one transaction, and raises InputError, in one sentence, where the database cannot take it.
    """

    def __init__(self, where: str, write: bool = True) -> None:
        self.where = where
        self.name = uuid.uuid4().hex
        self._engine = opened(where, METADATA, write)
        with told(where):
            held = {column["name"] for column in inspect(self._engine).get_columns(POINTS.name)}
        self._columns = [column for column in POINTS.c if column.name in held]
        self._seen: dict[str, tuple[int, float]] = {}  # beat of a runner and when it was first seen, on our clock alone

    def close(self) -> None:
        with told(self.where):
            self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with told(self.where), self._engine.begin() as connection:
            yield connection

    def add(self, points: Sequence[Point]) -> int:
        """Takes in the points that it does not hold yet, all or none; returns how many those were."""
        by_key = {point.key: point for point in points}
        with self._transaction() as connection:
            alone(connection)
            known = (connection.scalars(select(POINTS.c.key).where(POINTS.c.key.in_(some))) for some in _some(by_key))
            held = {key for keys in known for key in keys}
            first = (connection.scalar(select(func.max(POINTS.c.place))) or 0) + 1
            new = [(key, point.to_json()) for key, point in by_key.items() if key not in held]
            rows = [{"key": key, "place": n, "asked": asked, "state": WAITING} for n, (key, asked) in enumerate(new, start=first)]
            for some in _some(rows):
                connection.execute(insert(POINTS), some)
        return len(new)

    def states(self, keys: Iterable[str]) -> dict[str, tuple[bool, bool]]:
        """Whether each point is done, and whether somebody is at work on it."""
        with self._transaction() as connection:
            return {
                row.key: (row.state == DONE, row.owner is not None)
                for some in _some(keys)
                for row in connection.execute(select(POINTS.c.key, POINTS.c.state, POINTS.c.owner).where(POINTS.c.key.in_(some)))
            }

    def statuses(self, keys: Iterable[str]) -> dict[str, int]:
        """How many of the points that are done have each status."""
        found: Counter[str] = Counter()
        with self._transaction() as connection:
            for some in _some(keys):
                chosen = select(POINTS.c.status).where(POINTS.c.key.in_(some), POINTS.c.state == DONE)
                found.update(connection.scalars(chosen))
        return dict(found)

    def origins(self, keys: Iterable[str]) -> dict[str, tuple[str, str]]:
        """What the result of every point that is done followed from, and the version that planned it."""
        with self._transaction() as connection:
            return {
                row.key: (row.digest, row.version)
                for some in _some(keys)
                for row in connection.execute(
                    select(POINTS.c.key, POINTS.c.digest, POINTS.c.version).where(POINTS.c.key.in_(some), POINTS.c.state == DONE)
                )
            }

    def damaged(self, keys: Iterable[str]) -> list[str]:
        """Which of the points hold a result that is not what was written."""
        return [row["key"] for row in self._results(set(keys)) if not is_sound(row)]

    def renew(self, points: Iterable[Point]) -> None:
        """Lets points that have a result be planned again; the old ones stand until then, though no longer counted."""
        again = update(POINTS).where(POINTS.c.key == bindparam("of"), POINTS.c.state != WAITING)
        again = again.values(asked=bindparam("question"), state=WAITING, owner=None)
        with self._transaction() as connection:
            for some in _some({"of": point.key, "question": point.to_json()} for point in points):
                connection.execute(again, some)

    def claim(self, keys: Sequence[str], most: int) -> list[str]:
        """Makes this process the owner of up to so many of the points, those that are free, in their order; returns which."""
        mine: list[str] = []
        with self._transaction() as connection:
            self._join(connection)
            for key in keys:
                if len(mine) == most:
                    break
                free = (POINTS.c.key == key, POINTS.c.state == WAITING, POINTS.c.owner.is_(None))
                if connection.execute(update(POINTS).where(*free).values(owner=self.name)).rowcount:
                    mine.append(key)
        return mine

    def finish(self, key: str, outcome: Outcome, record: str) -> bool:
        """Writes what came of a point, in one piece; False if another had done so first, whose result stands."""
        values: dict[str, Any] = {
            "state": DONE,
            "owner": None,
            "status": outcome.status,
            "reason": outcome.reason or None,
            "record": record,
            "document": outcome.document,
            "digest": outcome.digest,
            "version": outcome.version,
            "seconds": outcome.seconds,
            "ended": datetime.now(UTC).isoformat(" ", "seconds"),
        }
        values["seal"] = seal_of(key, values)
        with self._transaction() as connection:
            done = connection.execute(update(POINTS).where(POINTS.c.key == key, POINTS.c.state == WAITING).values(**values))
        return bool(done.rowcount)

    def beat(self) -> None:
        """Tells the others that this process still runs."""
        with self._transaction() as connection:
            self._join(connection)

    def leave(self) -> None:
        """Frees what this process has claimed and not finished."""
        with self._transaction() as connection:
            _free(connection, self.name)

    def free_the_dead(self) -> int:
        """Frees the points whose owners no longer run; returns how many owners those were."""
        here, now = machine(), time.monotonic()
        with self._transaction() as connection:
            others = connection.execute(select(RUNNERS).where(RUNNERS.c.name != self.name)).all()
            dead = [row.name for row in others if self._is_dead(row, here, now)]
            for name in dead:
                _free(connection, name)
        return len(dead)

    def stored(self, keys: Iterable[str] | None = None, documents: bool = False) -> Iterator[tuple[Stored, str]]:
        """Points that are done with their outcomes and records, in the store's order; all of them, or those of the keys.

        InputError at a result that is not what was written.
        """
        for row in self._results(None if keys is None else set(keys)):
            if not is_sound(row):
                remedy = "the sweep command that asked for it plans it again; or restore a copy of the store"
                raise InputError(f"--store {self.where}: the result of {name_of(row)} is damaged; {remedy}")
            document = row["document"] if documents else None
            outcome = Outcome(row["status"], row["digest"], row["seconds"], row["reason"] or "", document, row["version"])
            yield Stored(Point.from_json(row["asked"]), outcome), row["record"]

    def _results(self, wanted: set[str] | None) -> Iterator[dict[str, Any]]:
        """Rows that hold a result, in the store's order; all, or those of the keys."""
        names, last = [column.name for column in self._columns], -1
        while True:
            after = select(*self._columns).where(POINTS.c.place > last, POINTS.c.state != WAITING)
            with self._transaction() as connection:
                found = connection.execute(after.order_by(POINTS.c.place, POINTS.c.key).limit(PAGE)).all()
            rows = [dict(zip(names, row, strict=True)) for row in found]
            if not rows:
                return
            last = rows[-1]["place"]
            yield from (row for row in rows if wanted is None or row["key"] in wanted)

    def left(self) -> int:
        """Points that are not done."""
        with self._transaction() as connection:
            return connection.scalar(select(func.count()).where(POINTS.c.state == WAITING)) or 0

    def _join(self, connection: Connection) -> None:
        """One more beat; anew if another took this process, long suspended, for dead."""
        mine = RUNNERS.c.name == self.name
        if not connection.execute(update(RUNNERS).where(mine).values(beat=RUNNERS.c.beat + 1)).rowcount:
            connection.execute(insert(RUNNERS).values(name=self.name, machine=machine(), process=process(), beat=0))

    def _is_dead(self, runner: Any, here: str, now: float) -> bool:
        if runner.machine == here:
            return not runs(runner.process)
        beat, since = self._seen.get(runner.name, (None, now))
        if beat != runner.beat:
            since = now
        self._seen[runner.name] = (runner.beat, since)
        return now - since > LEASE_S


def _free(connection: Connection, name: str) -> None:
    connection.execute(update(POINTS).where(POINTS.c.owner == name).values(owner=None))
    connection.execute(delete(RUNNERS).where(RUNNERS.c.name == name))


def _some(items: Iterable[T]) -> Iterator[list[T]]:
    """In lists of what one statement takes."""
    every = list(items)
    return (every[begin : begin + MANY] for begin in range(0, len(every), MANY))

"""Nothing of a sweep is lost: kills, several processes on one store, and stores that cannot be used."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paraplan.optimizer.cli import main
from paraplan.optimizer.sweeps import store as sweep_store
from paraplan.optimizer.sweeps import sweeper
from paraplan.optimizer.sweeps.grid import Point
from paraplan.optimizer.sweeps.point import Outcome, digest_of
from paraplan.optimizer.sweeps.store import POINTS, RUNNERS, Store
from paraplan.optimizer.sweeps.sweeper import run_sweep
from paraplan.search_spaces.errors import InputError
from sqlalchemy import insert, select, text, update

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from sweep_stand_in import StandIn, grid  # noqa: E402


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path / "sweep.sqlite")


def results(where: str) -> dict[str, str]:
    store = Store(where, write=False)
    found = {stored.point.key: stored.outcome.reason for stored, _ in store.stored()}
    store.close()
    return found


def ran(where: str, points: list[Point], log: Path) -> sweeper.Run:
    store = Store(where)
    run = run_sweep(points, log.parent, store, StandIn(log))
    store.close()
    return run


def test_killed_at_random_moments_a_sweep_goes_on_and_no_result_is_lost_or_made_twice(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "sweep_kills.py"), str(tmp_path / "s.sqlite"), str(tmp_path / "log"), "7"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert told["kills"] >= 20
    assert told["wrong"] == 0
    assert told["points"] <= told["computed"] <= told["points"] + told["kills"]  # at most the point that each was at


SHARE = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from paraplan.optimizer.sweeps.point import digest_of
from paraplan.optimizer.sweeps.store import Store
from paraplan.optimizer.sweeps.sweeper import run_sweep
from sweep_stand_in import StandIn, grid
where, log = sys.argv[1], Path(sys.argv[2])
digest_of(grid(1)[0], log.parent)  # loads what a first point would load
print("ready", flush=True)
sys.stdin.read()
run_sweep(grid(60), log.parent, Store(where), StandIn(log, 0.01))
"""


def test_processes_share_a_store_and_no_point_is_done_twice(where: str, tmp_path: Path) -> None:
    logs = [tmp_path / f"log{n}" for n in range(3)]
    command = [sys.executable, "-c", SHARE.format(here=str(HERE)), where]
    runs = [subprocess.Popen([*command, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for log in logs]
    for run in runs:
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    for run in runs:  # all are ready: now they begin
        assert run.stdin is not None
        run.stdin.close()
    assert [run.wait() for run in runs] == [0, 0, 0]
    planned = Counter(key for log in logs if log.exists() for key in log.read_text().split())
    assert planned == Counter(point.key for point in grid(60))
    assert len(results(where)) == 60


def test_points_of_a_dead_process_of_this_machine_are_free_at_once(where: str, tmp_path: Path) -> None:
    points = grid(3)
    store = Store(where)
    store.add(points)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    claimed_by(store, "gone", f"{gone.pid} 1", sweep_store.machine(), points[0])
    claimed_by(store, "us", sweep_store.process(), sweep_store.machine(), points[1])
    assert store.free_the_dead() == 1
    assert [taken for _, taken in (store.states([point.key])[point.key] for point in points)] == [False, True, False]
    store.close()


def test_points_of_another_machine_are_free_once_its_heartbeat_stands_still(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sweep_store.time, "monotonic", lambda: now)
    store, point = Store(where), grid(1)[0]
    store.add([point])
    claimed_by(store, "far", "1 1", "another machine", point)
    assert store.free_the_dead() == 0
    now = sweep_store.LEASE_S + 1
    with store._transaction() as connection:
        connection.execute(update(RUNNERS).values(beat=2))
    assert store.free_the_dead() == 0  # it beat in between
    now += sweep_store.LEASE_S + 1
    assert store.free_the_dead() == 1
    assert store.claim([point.key], 1) == [point.key]
    store.close()


def claimed_by(store: Store, name: str, process: str, machine: str, point: Point) -> None:
    with store._transaction() as connection:
        connection.execute(insert(RUNNERS).values(name=name, machine=machine, process=process, beat=1))
        connection.execute(update(POINTS).where(POINTS.c.key == point.key).values(owner=name))


def test_a_result_that_comes_late_does_not_replace_the_one_that_stands(where: str) -> None:
    store, point = Store(where), grid(1)[0]
    store.add([point])
    assert store.finish(point.key, Outcome("infeasible", "d", 1.0, "first"), "{}")
    assert not store.finish(point.key, Outcome("infeasible", "d", 1.0, "second"), "{}")
    assert results(where) == {point.key: "first"}
    store.close()


def test_another_sweep_extends_a_store_and_leaves_what_it_held(where: str, tmp_path: Path) -> None:
    assert ran(where, grid(4), tmp_path / "log") == sweeper.Run(4, 0, 4)
    before = results(where)
    assert ran(where, grid(6), tmp_path / "log") == sweeper.Run(2, 0, 2)
    assert ran(where, grid(2), tmp_path / "log") == sweeper.Run(0, 0, 0)
    after = results(where)
    assert len(after) == 6
    assert before.items() <= after.items()


def test_points_whose_problem_or_version_changed_or_that_failed_are_planned_anew(where: str, tmp_path: Path) -> None:
    points = grid(3)
    ran(where, points, tmp_path / "log")
    before = results(where)
    store = Store(where)
    with store._transaction() as connection:
        connection.execute(update(POINTS).where(POINTS.c.key == points[0].key).values(digest=""))  # as of one that failed
        connection.execute(update(POINTS).where(POINTS.c.key == points[1].key).values(version="0.0.1"))
    store.close()
    assert ran(where, points, tmp_path / "log") == sweeper.Run(0, 2, 2)
    assert {key for key, word in results(where).items() if before[key] == word} == {points[2].key}
    model, mine = tmp_path / "mine.yaml", [Point("mine.yaml", "hgx-h100", 8, 8, 4096, "bf16", {})]
    model.write_text("name: mine")
    assert ran(where, mine, tmp_path / "log") == sweeper.Run(1, 0, 1)
    assert ran(where, mine, tmp_path / "log") == sweeper.Run(0, 0, 0)
    model.write_text("name: mine\nhidden: 8")
    assert ran(where, mine, tmp_path / "log") == sweeper.Run(0, 1, 1)


def test_a_point_whose_worker_is_killed_is_tried_again_and_then_a_result_with_its_reason(where: str, tmp_path: Path) -> None:
    class Deadly(StandIn):
        def wait(self, seconds: float) -> list[tuple[str, Outcome | None]]:
            (key, _), *_ = super().wait(seconds)
            return [(key, None)]

    points, log = grid(1), tmp_path / "log"
    store = Store(where)
    run_sweep(points, tmp_path, store, Deadly(log))
    store.close()
    assert len(log.read_text().split()) == sweeper.MOST_LOST
    assert "were killed" in results(where)[points[0].key]
    assert ran(where, points, log).renewed == 1


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("damage", ["text", "cut", "scribbled"])
def test_a_damaged_store_is_refused_in_words_and_stays_as_it_is(where: str, tmp_path: Path, damage: str) -> None:
    ran(where, grid(40), tmp_path / "log")
    path = Path(where)
    content = path.read_bytes()
    assert len(content) > 8192
    damaged = {
        "text": b"not a database at all",
        "cut": content[: len(content) // 2],
        "scribbled": content[:4096] + b"\xa5" * 4096 + content[8192:],
    }[damage]
    path.write_bytes(damaged)
    before = sorted(tmp_path.iterdir())
    for write in (False, True):
        with pytest.raises(InputError, match=r"--store .*damaged") as error:
            Store(where, write)
        assert "\n" not in str(error.value)
    assert path.read_bytes() == damaged
    assert sorted(tmp_path.iterdir()) == before


PLAN = zlib.compress(json.dumps({"plan": {"layout": list(range(400))}}).encode())


def with_a_plan(where: str, tmp_path: Path) -> Point:
    """Two points that are done, the first with a plan and figures of its row; returns that one."""
    first, second = grid(2)
    store = Store(where)
    store.add([first, second])
    store.finish(first.key, Outcome("optimal", digest_of(first, tmp_path), 1.0, document=PLAN), '{"step_time_s": 1.5}')
    store.finish(second.key, Outcome("bad input", digest_of(second, tmp_path), 1.0, "second"), "{}")
    store.close()
    return first


def flipped_in_the_file(where: str) -> None:
    """One bit of a byte in the middle of the plan, whose page stays as sound as SQLite looks at it."""
    content = bytearray(Path(where).read_bytes())
    content[content.index(PLAN[:64]) + 200] ^= 1
    Path(where).write_bytes(content)


def written(column: str, value: str) -> Callable[[str], None]:
    def change(where: str) -> None:
        with contextlib.closing(sqlite3.connect(where)) as connection, connection:
            connection.execute(f"UPDATE {POINTS.name} SET {column} = CAST(? AS TEXT) WHERE status = 'optimal'", (value,))

    return change


DAMAGES = {
    "a bit of the plan": flipped_in_the_file,
    "a record that is no JSON": written("record", '{"step_ti'),
    "another question": written("asked", "{}"),
    "no state": written("state", "dome"),
}
SEALED_DAMAGES = {**DAMAGES, "another figure": written("record", '{"step_time_s": 1.4}')}
CASES = [*((damage, True) for damage in SEALED_DAMAGES), *((damage, False) for damage in DAMAGES)]


@pytest.mark.parametrize(("damage", "sealed"), CASES)
def test_a_result_that_is_not_what_was_written_is_named_and_planned_anew(
    where: str, tmp_path: Path, damage: str, sealed: bool
) -> None:
    """In a store from before there were seals too, but for what still reads as a result."""
    point = with_a_plan(where, tmp_path)
    if not sealed:
        before_seals(where)
    SEALED_DAMAGES[damage](where)
    for show in (["--show", ""], ["--csv", str(tmp_path / "t.csv")], ["--export", "megatron-lm", "-o", str(tmp_path / "x")]):
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            assert main(["sweep", "--store", where, *show]) == 2
        assert f"--store {where}: the result of " in told.getvalue() and point.key in told.getvalue()
        assert "is damaged; the sweep command that asked for it plans it again" in told.getvalue()
    assert ran(where, grid(2), tmp_path / "log") == sweeper.Run(0, 1, 1)
    assert len(results(where)) == 2
    assert ran(where, grid(2), tmp_path / "log") == sweeper.Run(0, 0, 0)


def before_seals(where: str) -> None:
    with contextlib.closing(sqlite3.connect(where)) as connection:
        connection.execute(f"ALTER TABLE {POINTS.name} DROP COLUMN seal")


def test_a_store_from_before_seals_is_read_as_it_is_and_gets_the_column_when_it_is_extended(where: str, tmp_path: Path) -> None:
    ran(where, grid(3), tmp_path / "log")
    before = results(where)
    before_seals(where)
    old = digest(Path(where))
    assert results(where) == before and digest(Path(where)) == old  # to read changes nothing
    assert ran(where, grid(4), tmp_path / "log") == sweeper.Run(1, 0, 1)
    assert before.items() <= results(where).items()
    with contextlib.closing(sqlite3.connect(where)) as connection:
        seals = [row[0] for row in connection.execute(f"SELECT seal FROM {POINTS.name} ORDER BY place")]
    assert seals[:3] == [None] * 3 and len(seals[3]) == 32


def test_a_database_of_something_else_is_refused_and_stays_as_it_is(where: str) -> None:
    with sqlite3.connect(where) as connection:
        connection.execute("CREATE TABLE trials (x)")
    before = digest(Path(where))
    with pytest.raises(InputError, match=r"something else .*trials"):
        Store(where)
    assert digest(Path(where)) == before


def test_places_that_cannot_hold_a_store_are_refused(tmp_path: Path) -> None:
    for where, words in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "s.sqlite"), "there is no folder"),
        ("", "is empty"),
        ("sqlite:///:memory:", "names no file"),
        ("nodb://x", "cannot be opened here"),
        ("postgresql+nodriver://u:secret@h/d", "cannot be opened here"),
    ):
        with pytest.raises(InputError, match=words) as error:
            Store(where)
        assert "secret" not in str(error.value)
    with pytest.raises(InputError, match="there is no such file"):
        Store(str(tmp_path / "s.sqlite"), write=False)
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from paraplan.optimizer.sweeps.sweeper import run_sweep
from paraplan.optimizer.sweeps.store import Store
from paraplan.search_spaces.errors import InputError
from sweep_stand_in import StandIn, grid
log = Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    run_sweep(grid(120), log.parent, Store(sys.argv[1]), StandIn(log))
except InputError as error:
    print(error)
"""


def test_a_full_disk_is_said_in_words_and_what_the_store_held_stays(where: str, tmp_path: Path) -> None:
    ran(where, grid(30), tmp_path / "log")
    before = results(where)
    limit = Path(where).stat().st_size + 24_000
    script = FULL.format(here=str(HERE))
    command = [sys.executable, "-c", script, where, str(tmp_path / "log"), str(limit)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert said.startswith(f"--store {where}: has no room for more")
    assert "\n" not in said
    after = results(where)
    assert before.items() <= after.items()
    assert ran(where, grid(120), tmp_path / "log").planned == 120 - len(after)  # with room again, the rest
    assert after.items() <= results(where).items()


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs a user without rights to the store")
def test_a_store_that_is_read_only_can_be_shown_and_not_extended() -> None:
    """By a user of its own where the tests run as root, whom no permission stops."""
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        ran(str(folder / "s.sqlite"), grid(5), folder / "log")
        before = digest(folder / "s.sqlite")
        (folder / "s.sqlite").chmod(0o444)
        folder.chmod(0o555)
        told = os.pipe()
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:
                os.setuid(65534)
            os.write(told[1], json.dumps([len(results(str(folder / "s.sqlite"))), refused(str(folder / "s.sqlite"))]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(told[1])
        shown, sentence = json.loads(os.read(told[0], 65536))
        os.close(told[0])
        assert shown == 5
        assert "is read-only" in sentence
        assert digest(folder / "s.sqlite") == before
        assert {path.name for path in folder.iterdir()} == {"s.sqlite", "log"}
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def refused(where: str) -> str:
    try:
        Store(where)
    except InputError as error:
        return str(error)
    return ""


PROGRAMS = [str(path) for path in Path("/usr/lib/postgresql").glob("*/bin")]
INITDB = shutil.which("initdb", path=os.pathsep.join([*PROGRAMS, os.environ.get("PATH", "")]))


def without_postgres() -> str | None:
    if INITDB is None:
        return "no PostgreSQL server is installed"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed (paraplan[postgres])"
    return None


@pytest.fixture
def postgres() -> Iterator[str]:
    """A server of our own in a folder of its own, reached by a socket there. initdb refuses root."""
    reason = without_postgres()
    if reason is not None:
        pytest.skip(reason)
    assert INITDB is not None
    programs, folder = Path(INITDB).resolve().parent, Path(tempfile.mkdtemp(prefix="pg-"))
    user = {"user": "nobody"} if os.getuid() == 0 else {}
    if user:
        shutil.chown(folder, "nobody")
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    control = [str(programs / "pg_ctl"), "-D", str(folder / "data"), "-w"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "check": True, **user}
    try:
        subprocess.run([str(programs / "initdb"), "-D", str(folder / "data"), "-U", "sweep", "-A", "trust", "-N"], **quiet)
        subprocess.run([*control, "-o", options, "-l", str(folder / "log"), "start"], **quiet)
        try:
            yield f"postgresql://sweep@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)
    finally:
        shutil.rmtree(folder)


def test_many_share_a_postgresql_database_as_they_share_a_file(postgres: str, tmp_path: Path) -> None:
    test_processes_share_a_store_and_no_point_is_done_twice(postgres, tmp_path)
    store, more = Store(postgres), grid(61)[60:]
    store.add(more)
    claimed_by(store, "far", "1 1", "another machine", more[0])
    assert store.claim([more[0].key], 1) == []
    with store._transaction() as connection:
        assert connection.scalar(select(POINTS.c.owner).where(POINTS.c.key == more[0].key)) == "far"
    assert store.damaged([point.key for point in grid(60)]) == []
    with store._transaction() as connection:
        connection.execute(text(f"ALTER TABLE {POINTS.name} DROP COLUMN seal"))
    store.close()
    store = Store(postgres)  # the column comes back
    assert store.finish(more[0].key, Outcome("bad input", "d", 1.0, "late"), "{}")
    assert store.damaged([point.key for point in grid(61)]) == []
    store.close()
    with pytest.raises(InputError, match="cannot be reached"):
        Store(postgres.replace("host=", "host=/nowhere"))

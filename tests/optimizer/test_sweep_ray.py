"""A sweep on a Ray cluster of this machine, one of its workers killed in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from paraplan.optimizer.sweeps.grid import Point
from paraplan.optimizer.sweeps.ray_workers import LOCAL, Ray
from paraplan.optimizer.sweeps.store import Store
from paraplan.optimizer.sweeps.sweeper import run_sweep
from paraplan.search_spaces.errors import InputError

LIMIT_S = 300  # 20 s on an idle machine of two cores, most of them the start of Ray


def test_without_ray_the_option_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"paraplan\[ray\]"):
        Ray(LOCAL)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "localhost:{}", "ray://127.0.0.1:{}", "[::1]:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes; where somebody listens, it is Ray that joins."""
    joined: list[str] = []
    ray = SimpleNamespace(init=lambda address, **_: joined.append(address), remote=lambda **_: lambda solve: solve)
    monkeypatch.setitem(sys.modules, "ray", ray)
    listening = socket.create_server(("localhost" if "localhost" in form else "127.0.0.1", 0))
    address = form.format(listening.getsockname()[1])
    if "::1" not in form:
        with contextlib.closing(listening):
            Ray(address)
        assert joined == [address]
    listening.close()
    joined.clear()
    with at_most(10), pytest.raises(InputError, match=rf"--ray {re.escape(address)}: no cluster answers there \(.+\)"):
        Ray(address)
    assert not joined


def test_a_sweep_on_a_local_cluster_loses_nothing_when_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (paraplan[ray])")
    points = [Point("llama-3.1-8b", "hgx-h100", 8, batch, 4096, "bf16", {}) for batch in (8, 16, 24, 32, 40, 48)]
    store, pool = Store(str(tmp_path / "s.sqlite")), Ray(LOCAL, 2)
    killed: list[int] = []
    threading.Thread(target=kill_one, args=(killed,), daemon=True).start()
    try:
        assert pool.slots == 2
        with at_most(LIMIT_S):
            run_sweep(points, tmp_path, store, pool)
        found = {stored.point.key: stored.outcome.status for stored, _ in store.stored()}
    finally:
        pool.close()
        store.close()
    assert killed
    assert found == {point.key: "optimal" for point in points}


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """TimeoutError where it takes longer: a cluster that never answers is a failure and no wait."""

    def over(*_: object) -> None:
        raise TimeoutError(f"the sweep has not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def kill_one(killed: list[int]) -> None:
    """Kills the first process that is at a point: Ray calls it by the task that it runs."""
    while not killed:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text()
                mine = os.getpgid(int(folder.name)) == os.getpgid(0) or owned(folder)
            except OSError:  # it has ended in between
                continue
            if words.startswith("ray::_solve") and mine:
                os.kill(int(folder.name), signal.SIGKILL)
                killed.append(int(folder.name))
                return
        time.sleep(0.02)


def owned(folder: Path) -> bool:
    """Whether a process descends from this one."""
    number = folder.name
    while number not in ("0", "1", ""):
        if number == str(os.getpid()):
            return True
        number = (Path("/proc") / number / "stat").read_text().rpartition(")")[2].split()[1]
    return False

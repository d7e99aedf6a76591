"""Processes of this machine that plan points, one at a time each.

They end with the process that began them, however it ends, and write nothing themselves: a result is only ever whole. Heavy modules
are imported in the workers alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .grid import Point
    from .point import Outcome

PATIENCE_S = 5.0  # for a worker to end
RENEWED_AFTER = 200
"""Points after which a worker is replaced: no more than so many can leave anything behind in it."""
WORKER = "paraplan.optimizer.sweeps.worker"


class Pool(Protocol):
    """What plans points side by side."""

    @property
    def slots(self) -> int:
        """How many points it can have at once."""

    def submit(self, key: str, point: Point, folder: Path) -> None:
        """Takes on a point; there has to be a slot for it."""

    def wait(self, seconds: float) -> list[tuple[str, Outcome | None]]:
        """What ended, at the latest after so many seconds; None for a point whose worker was killed."""

    def close(self) -> None:
        """Ends all work at once; what is not done is lost."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """A pool of worker processes; one that is killed is replaced, and its point comes back as lost (None)."""

    def __init__(self, workers: int) -> None:
        self._workers = [_Worker() for _ in range(workers)]

    @property
    def slots(self) -> int:
        return len(self._workers)

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.process.pid for worker in self._workers)

    def submit(self, key: str, point: Point, folder: Path) -> None:
        next(worker for worker in self._workers if worker.key is None).take(key, point, folder)

    def wait(self, seconds: float) -> list[tuple[str, Outcome | None]]:
        busy: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers if worker.key is not None}
        ended = [worker for ready in wait(list(busy), seconds) if not (worker := busy[ready]).came_up()]
        return [self._result(worker) for worker in ended]

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()

    def _result(self, worker: _Worker) -> tuple[str, Outcome | None]:
        key, outcome = worker.give()
        if outcome is None or worker.planned == RENEWED_AFTER:
            worker.connection.close()
            worker.end()
            self._workers[self._workers.index(worker)] = _Worker()
        return key, outcome


class _Worker:
    """One process and our end of the pipe to it; `key` is of the point that it plans.

    It has a process group of its own: Ctrl-C goes to every process of the terminal's, and it ends with us anyway.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        self.ready = False
        self.planned = 0
        self.connection, theirs = Pipe()
        command = [sys.executable, "-P", "-m", WORKER, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0)
        theirs.close()

    def take(self, key: str, point: Point, folder: Path) -> None:
        self.key = key
        with contextlib.suppress(OSError):  # it is dead, which `give` finds out
            self.connection.send((point, folder))

    def came_up(self) -> bool:
        """Whether what it sent says that it runs, and not a result. RuntimeError if it ended before it ever did."""
        if self.ready:
            return False
        try:
            self.ready = bool(self.connection.recv())
        except (EOFError, OSError) as error:
            self.end()
            if self.process.returncode > 0:
                raise RuntimeError(f"a process that plans could not start: exit status {self.process.returncode}") from error
            return False  # killed
        return True

    def give(self) -> tuple[str, Outcome | None]:
        """The point that it had and what came of it, None if it was killed."""
        key, self.key = self.key or "", None
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, OSError):
            return key, None
        self.planned += 1
        return key, outcome

    def end(self) -> None:
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

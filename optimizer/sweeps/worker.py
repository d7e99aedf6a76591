"""One process that plans points: `python -m paraplan.optimizer.sweeps.worker FD`, where FD is its end of a pipe.

A module that is run, not a function of a process that multiprocessing starts: that would run the caller's own script once more.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

READY = "ready"


def main() -> None:
    """Plans what comes until nobody is there to send more."""
    connection = Connection(int(sys.argv[1]))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # one worker, one core
        os.environ.setdefault(name, "1")
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    from .point import solve

    connection.send(READY)
    while True:
        point, folder = tasks.get()
        connection.send(solve(point, folder))
        give_back()


def give_back() -> None:
    """Returns to the system what the last point freed: glibc keeps it, in pieces that the next point's arrays do not fit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _listen(connection: Connection, tasks: queue.SimpleQueue[Any]) -> None:
    """Hands tasks on; where the other end is closed, all ends, in the middle of a plan too."""
    while True:
        try:
            tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main()

"""Runs a sweep in one process after another and kills each at a moment drawn at random: python sweep_kills.py STORE LOG SEED

Prints a line of JSON: how many were killed while they ran, whether a stored result was ever lost or changed, and how it ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from paraplan.optimizer.sweeps.point import digest_of
from paraplan.optimizer.sweeps.store import Store
from paraplan.optimizer.sweeps.sweeper import run_sweep
from sweep_stand_in import StandIn, grid

POINTS, LEAST_KILLS = 150, 22
LINE = 33  # bytes of the log for a point
POINT_S = 0.002


def results(where: str) -> dict[str, str]:
    store = Store(where, write=False)
    try:
        return {stored.point.key: stored.outcome.reason for stored, _ in store.stored()}
    finally:
        store.close()


def one_run(where: str, log: Path) -> None:
    store = Store(where)
    run_sweep(grid(POINTS), log.parent, store, StandIn(log, POINT_S))
    store.close()


def wait_a_while(log: Path, draw: random.Random, at_work: bool) -> None:
    """Until a process has planned some points and is at the next or, not `at_work`, while it still starts."""
    if at_work:
        wanted = lines(log) + draw.randint(1, 10)
        for _ in range(5_000):
            if lines(log) >= wanted:
                break
            time.sleep(0.002)
    time.sleep(draw.uniform(0.0, 0.01))


def lines(log: Path) -> int:
    return log.stat().st_size // LINE if log.exists() else 0


def main(where: str, log: Path, seed: int) -> None:
    draw = random.Random(seed)
    digest_of(grid(1)[0], log.parent)  # loads here, once, what every process would load
    kept: dict[str, str] = {}
    kills, wrong = 0, 0
    while len(kept) < POINTS:
        child = os.fork()
        if child == 0:
            one_run(where, log)
            os._exit(0)
        if kills < LEAST_KILLS:
            wait_a_while(log, draw, at_work=kills % 3 > 0)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        if Path(where).exists() and Path(where).stat().st_size:
            found = results(where) if kills or len(kept) else kept
            wrong += sum(found.get(key) != word for key, word in kept.items())
            kept = found
    print(json.dumps({"kills": kills, "wrong": wrong, "points": len(kept), "computed": lines(log)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

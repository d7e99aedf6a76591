"""A pool that plans nothing: every point comes back at once with a word of its own, so that a result computed twice shows."""

from __future__ import annotations

import time
import uuid
from collections import deque
from pathlib import Path

from paraplan.optimizer.sweeps.grid import Point
from paraplan.optimizer.sweeps.point import Outcome, digest_of


class StandIn:
    """Two slots; a point takes `seconds`. Every key that it was given is written to `log`, a line each, before it comes back."""

    slots = 2

    def __init__(self, log: Path, seconds: float = 0.0) -> None:
        self.log = log
        self.seconds = seconds
        self.given: deque[tuple[str, Point, Path]] = deque()

    def submit(self, key: str, point: Point, folder: Path) -> None:
        self.given.append((key, point, folder))

    def wait(self, seconds: float) -> list[tuple[str, Outcome | None]]:
        key, point, folder = self.given.popleft()
        with self.log.open("a") as stream:
            stream.write(f"{key}\n")
        time.sleep(self.seconds)
        return [(key, Outcome("bad input", digest_of(point, folder), self.seconds, uuid.uuid4().hex))]

    def close(self) -> None:
        self.given.clear()


def grid(count: int) -> list[Point]:
    """Points of a model that does not exist: all that makes them is quick."""
    return [Point("no-such-model", "hgx-h100", 8, batch, 4096, "bf16", {}) for batch in range(1, count + 1)]

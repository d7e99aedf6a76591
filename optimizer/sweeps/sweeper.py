"""Runs sweeps: claims points, has them planned side by side, writes each as it ends, and waits for what others are at.

A store may hold points of other sweeps; they stay as they are. What was planned before counts if it followed from the same problem,
curves and version of paraplan and is still what was written; the rest, and points that failed, are planned anew.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from ...search_spaces.errors import InputError
from .grid import Point, read_sweep
from .point import Outcome, digest_of
from .store import Store
from .table import Row, record_of, rows_of
from .workers import Pool

TURN_S = 0.5  # at the latest so often what others did is looked at
BEAT_S = 5.0
MOST_LOST = 2
"""Workers that a point may lose before it is given up: it is then likely the cause."""
WINDOW = 64  # points looked through for free ones at a time, beside those that are wanted
RATE_OVER_S = 60.0
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Run:
    """What a run did: points new to the store, points planned anew since what they followed from has changed, points planned."""

    added: int
    renewed: int
    planned: int


def sweep(sweep_file: Path | str, store: str, *, workers: int | None = None, progress: Progress | None = None) -> list[Row]:
    """Plans every point of a sweep.yaml that the store, a file or a URL, has no result for, and returns a row for each.

    `workers` processes of this machine plan, as many as there are cores by default. InputError for a sweep or a store that is none.
    """
    from .series import with_efficiencies
    from .workers import Processes, usable_cores

    path = Path(sweep_file)
    points, place = read_sweep(path), Store(store)
    pool = Processes(min(workers or usable_cores(), len(points)))
    try:
        run_sweep(points, path.absolute().parent, place, pool, progress)
        return with_efficiencies([row for _, row in rows_of(place, [point.key for point in points])])
    finally:
        pool.close()
        place.close()


def run_sweep(points: Sequence[Point], folder: Path, store: Store, pool: Pool, progress: Progress | None = None) -> Run:
    """Plans all points that the store has no result for, and returns once every one has. InputError where the store breaks.

    `pool` stays open. Stopped at any moment, killed even, the store holds what was planned; the same call goes on from there.
    """
    by_key = {point.key: point for point in points}
    added = store.add(points)
    stale = _stale(by_key, folder, store)
    store.renew(by_key[key] for key in stale)
    work = _Work(by_key, folder, store, pool, _Rate(len(by_key), progress))
    with _heart(store):
        try:
            work.begin()
            while work.left:
                work.turn()
        finally:
            with contextlib.suppress(InputError):  # a broken store is told by what broke in it first
                store.leave()
    return Run(added, len(stale), work.planned)


def _stale(by_key: Mapping[str, Point], folder: Path, store: Store) -> list[str]:
    """Points whose results do not follow from what holds today, or are no longer what was written."""
    today, damaged = version("paraplan"), dict.fromkeys(store.damaged(by_key))
    origins = {key: origin for key, origin in store.origins(by_key).items() if key not in damaged}
    return [*damaged, *(key for key, (digest, by) in origins.items() if by != today or digest != digest_of(by_key[key], folder))]


@dataclass
class _Work:
    """Points still to be claimed, in hand, and in the hands of others."""

    by_key: Mapping[str, Point]
    folder: Path
    store: Store
    pool: Pool
    rate: _Rate
    waiting: deque[str] = field(default_factory=deque)
    mine: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    lost: dict[str, int] = field(default_factory=dict)
    planned: int = 0
    looked_s: float = 0.0

    @property
    def left(self) -> int:
        return len(self.waiting) + len(self.mine) + len(self.others)

    def begin(self) -> None:
        self.store.free_the_dead()
        self.others = set(self.by_key)
        self._look_at_others()
        self.rate.begin(self.left)

    def turn(self) -> None:
        """Fills the free slots, takes what ended, and looks at what others did."""
        self._claim()
        if self.mine:
            for key, outcome in self.pool.wait(TURN_S):
                self._take(key, outcome)
        elif not self.waiting:
            time.sleep(TURN_S)
        if self.others and time.monotonic() - self.looked_s >= TURN_S:
            self.store.free_the_dead()
            self._look_at_others()
        self.rate.tell(self.left)

    def _claim(self) -> None:
        room = self.pool.slots - len(self.mine)
        if room < 1 or not self.waiting:
            return
        seen = [self.waiting[n] for n in range(min(len(self.waiting), room + WINDOW))]
        claimed = self.store.claim(seen, room)
        looked_at = seen[: seen.index(claimed[-1]) + 1] if len(claimed) == room else seen
        for _ in looked_at:
            self.waiting.popleft()
        self.others |= set(looked_at) - set(claimed)
        self.mine |= set(claimed)
        for key in claimed:
            self.pool.submit(key, self.by_key[key], self.folder)

    def _take(self, key: str, outcome: Outcome | None) -> None:
        if outcome is None:
            self.lost[key] = self.lost.get(key, 0) + 1
            if self.lost[key] < MOST_LOST:
                self.pool.submit(key, self.by_key[key], self.folder)
                return
            reason = f"{MOST_LOST} processes that planned it were killed, as where memory runs out; the same command tries again"
            outcome = Outcome("failed", "", 0.0, reason)
        self.store.finish(key, outcome, record_of(outcome))
        self.mine.discard(key)
        self.planned += 1

    def _look_at_others(self) -> None:
        states = self.store.states(self.others)
        free = [key for key in self.by_key if states.get(key) == (False, False)]
        self.waiting.extend(free)
        self.others = {key for key, (done, taken) in states.items() if taken and not done}
        self.looked_s = time.monotonic()


class _Rate:
    """Says how far a sweep is, how fast it goes and how long it will take at that."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.progress = progress
        self.seen: deque[tuple[float, int]] = deque()

    def begin(self, left: int) -> None:
        self.seen.append((time.monotonic(), left))

    def tell(self, left: int) -> None:
        if self.progress is None:
            return
        now = time.monotonic()
        while len(self.seen) > 1 and now - self.seen[0][0] > RATE_OVER_S:
            self.seen.popleft()
        since, before = self.seen[0]
        self.seen.append((now, left))
        rate = (before - left) / (now - since) if now > since else 0.0
        pace = f", {rate:.2g} a second, {_duration(left / rate)} left" if rate > 0 else ""
        self.progress(f"{self.total - left:,} of {self.total:,} points{pace}", 1.0 - left / max(self.total, 1))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _heart(store: Store) -> Iterator[None]:
    """Beats while a sweep runs, whatever the main thread is at; one that fails is told by what the sweep writes next."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(InputError):
                store.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

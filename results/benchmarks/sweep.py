"""Times a sweep of a thousand points and writes sweep.md: python results/benchmarks/sweep.py [--every K] [--workers N]

Seconds are those of the machine at hand. `--every K` plans each K-th group of points that share model, cluster and devices, whole,
so that they reuse each other's work as all do; K must have no divisor with the number of groups in common, or it would pick the
same devices or clusters over and over. The page says so. Groups come in a mixed order, always the same, so that each tenth of the
points has all sizes: what processes hold then shows whether it grows with the points.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import tempfile
import time
from collections import Counter
from itertools import groupby
from math import gcd
from pathlib import Path

from paraplan.optimizer.sweeps.grid import Point, read_sweep
from paraplan.optimizer.sweeps.store import Store
from paraplan.optimizer.sweeps.sweeper import run_sweep
from paraplan.optimizer.sweeps.table import Row, rows_of
from paraplan.optimizer.sweeps.workers import RENEWED_AFTER, Processes
from paraplan.optimizer.writing import write_file

HERE = Path(__file__).parent
SWEEP = HERE / "thousand.yaml"
LOOKED_EVERY_S = 0.2
PARTS = 10
"""Parts of the points of which the most memory is told, each by itself."""
MIB = float(1 << 20)


class Watched(Processes):
    """Worker processes whose memory is looked at while they plan: the most that any held while each part of the points was done."""

    def __init__(self, workers: int, points: int) -> None:
        super().__init__(workers)
        self.points, self.done, self.looked_s = points, 0, 0.0
        self.most_bytes = [0] * PARTS

    def wait(self, seconds: float) -> list[tuple[str, object]]:  # type: ignore[override]
        ended = super().wait(min(seconds, LOOKED_EVERY_S))
        if time.monotonic() - self.looked_s > LOOKED_EVERY_S:
            self.looked_s = time.monotonic()
            part = min(self.done * PARTS // self.points, PARTS - 1)
            self.most_bytes[part] = max(self.most_bytes[part], *map(resident_bytes, self.processes))
        self.done += len(ended)
        return ended


def resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended in between
        return 0


def sampled(points: list[Point], every: int) -> list[Point]:
    """Each K-th group of the points that share model, cluster and devices and follow each other in the grid; in a mixed order."""
    groups = [list(group) for _, group in groupby(points, lambda point: (point.model, point.cluster, point.devices))]
    if gcd(every, len(groups)) > 1:
        raise SystemExit(f"--every {every}: it must have no divisor in common with the {len(groups)} groups of the grid")
    mixed = random.Random(0).sample(groups[::every], len(groups[::every]))
    return [point for group in mixed for point in group]


def main(every: int, workers: int) -> None:
    points = sampled(read_sweep(SWEEP), every)
    with tempfile.TemporaryDirectory() as folder:
        store, pool = Store(str(Path(folder) / "sweep.sqlite")), Watched(workers, len(points))
        begun = time.monotonic()
        run_sweep(points, HERE, store, pool, lambda words, _: print(f"\r{words}", end="", flush=True))
        seconds = time.monotonic() - begun
        rows = [row for _, row in rows_of(store)]
        pool.close()
        store.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    write_file(HERE / "sweep.md", page(points, rows, seconds, used.ru_utime + used.ru_stime, pool.most_bytes, workers, every))


def page(
    points: list[Point], rows: list[Row], seconds: float, worked_s: float, most_bytes: list[int], workers: int, every: int
) -> str:
    came = ", ".join(f"{count:,} {status}" for status, count in Counter(row["status"] for row in rows).most_common())
    took = sorted(row["seconds"] for row in rows)
    late_s = took[min(len(took) - 1, 99 * len(took) // 100)]
    part = f"of each {every}-th group of points that share model, cluster and devices, all points of " if every > 1 else ""
    tenths = " | ".join(f"{part * len(points) // PARTS:,}" for part in range(1, PARTS + 1))
    memory = " | ".join(f"{most / MIB:,.0f}" for most in most_bytes)
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:5]
    lines = "\n".join(
        f"| {row['model']} | {row['cluster']} | {row['devices']:,} | {row['global_batch']:,} | {row['seq_len']:,} "
        f"| {row['status']} | {row['seconds']:.1f} |"
        for row in slowest
    )
    return f"""# A sweep of a thousand points

`python results/benchmarks/sweep.py{f" --every {every}" if every > 1 else ""}` on {platform.machine()}, {workers} processes:
{part}[thousand.yaml](thousand.yaml), 7B to 10T on 64 to 16,384 devices of four clusters, by a store in SQLite.

| | |
|---|---:|
| points | {len(points):,} ({came}) |
| seconds on the wall | {seconds:,.0f} |
| seconds of processors | {worked_s:,.0f}, {worked_s / len(points):.2f} a point |
| so a thousand points on two cores of their own | {worked_s / len(points) * 500 / 60:.1f} min |
| a point, median and 99 in 100 (on the wall) | {took[len(took) // 2]:.2f} s, {late_s:.1f} s |

The points come in an order that mixes sizes. Each process plans at most {RENEWED_AFTER} of them before another takes its place:

| points done, up to | {tenths} |
|---|{"---:|" * PARTS}
| most memory of a process since the count before, MiB | {memory} |

| slowest points | cluster | devices | batch | tokens | came | seconds |
|---|---|---:|---:|---:|---|---:|
{lines}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="K")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    given = parser.parse_args()
    main(given.every, given.workers)

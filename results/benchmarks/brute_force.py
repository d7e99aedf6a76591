"""Compares the search with listing everything on a thousand problems: python results/benchmarks/brute_force.py

Writes results/benchmarks/brute-force.md; takes several minutes. Exit status 1 if any problem is solved differently.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "optimizer"))
from against_listing import LARGEST, SCARCE, TOP, Comparison, compared, tiny_problems  # noqa: E402
from paraplan.optimizer.streams import Meter  # noqa: E402
from paraplan.search_spaces.layout import Problem  # noqa: E402

PROBLEMS = 1000


def main() -> int:
    """Compares, writes the record, and says whether all was equal."""
    begun, done = time.monotonic(), []
    with Meter(shown=True) as meter:
        for problem in islice(tiny_problems(0), PROBLEMS):
            done.append(compared(problem))
            meter("comparing", len(done) / PROBLEMS)
    (HERE / "brute-force.md").write_text(_record(done, time.monotonic() - begun), encoding="utf-8")
    return int(any(comparison.differences for comparison in done))


def _record(done: list[Comparison], seconds: float) -> str:
    unequal = [comparison for comparison in done if comparison.differences]
    lines = [
        "# Branch and bound against listing everything",
        "",
        "Regenerate with `python results/benchmarks/brute_force.py`.",
        "",
        f"{len(done):,} random problems of 1 to {LARGEST} legal layouts, {sum(c.legal for c in done):,} in all. Each is listed by",
        "plain loops, cut into stages in every way of its space and priced. The search runs on each problem twice, with ample",
        f"memory and where {SCARCE:.0%} of the layouts fit. Compared: the number of legal layouts, the step times of the {TOP}",
        "best frames (to nine digits), that the counts of the certificate add up, and that the proof is complete.",
        "",
        f"**{len(done) - len(unequal):,} of {len(done):,} are equal** ({seconds:.0f} s on 2 cores in use by others too).",
        "",
        "| kind of problem | problems |",
        "|---|---|",
        *(f"| {name} | {count:,} |" for name, count in _kinds(done)),
    ]
    lines += ["", *(f"- {c.problem.model_dump_json()}: {'; '.join(c.differences)}" for c in unequal)] if unequal else []
    return "\n".join(lines) + "\n"


def _kinds(done: list[Comparison]) -> list[tuple[str, int]]:
    """How many problems there are of each kind; a problem counts in several."""
    kinds: dict[str, Callable[[Problem], bool]] = {
        "dense": lambda p: not p.model.is_moe,
        "mixture of experts": lambda p: p.model.is_moe,
        "with MTP": lambda p: p.model.mtp is not None,
        "with `--forbid` or `--constraint`": lambda p: bool(p.workload.forbid),
        "with `--inside`": lambda p: bool(p.workload.inside),
    }
    levels = Counter(_levels_in_use(c.problem) for c in done)
    devices = Counter(c.problem.devices for c in done)
    return [
        *((name, sum(holds(c.problem) for c in done)) for name, holds in kinds.items()),
        *((f"{level} network level{'s' if level > 1 else ''} in use", levels[level]) for level in sorted(levels)),
        *((f"{count} device{'s' if count > 1 else ''}", devices[count]) for count in sorted(devices)),
    ]


def _levels_in_use(problem: Problem) -> int:
    """Levels inside whose units several devices of the job sit and that not all of them share with the level below."""
    sizes = (1, *problem.allocated_sizes)
    return max(1, sum(a < b for a, b in pairwise(sizes)))


if __name__ == "__main__":
    sys.exit(main())

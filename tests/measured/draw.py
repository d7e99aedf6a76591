"""Draws the sample of measured runs that the tests price: python tests/measured/draw.py RUNS.csv

Writes pools_sample.csv and pools_models.json beside this file: of every pool of families and split a few counted runs, drawn by
a hash of their names, so that no error has a say in it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from pathlib import Path

from paraplan.cost_models.run_statistics import POOLS
from paraplan.cost_models.validation import Outcome, validate

HERE = Path(__file__).parent
EACH = 6
"""Runs of every pool and split."""
OF_A_STACK = 4
"""Runs at least of every stack that has so many."""
UNREAD = {"source_version", "group", "measured_tflops_note"}
"""Columns that no price depends on."""


def main() -> None:
    """Writes the sample."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tests/measured/draw.py RUNS.csv")
    table = Path(sys.argv[1])
    counted = [o for o in validate(table).outcomes if not o.excluded and o.measured_step_time_s and o.predicted_step_time_s]
    of_pools = [[o for o in counted if pool.holds(o) and o.run.split == split] for pool in POOLS for split in ("fit", "test")]
    of_stacks = [[o for o in counted if stack_of(o) == stack] for stack in sorted({stack_of(o) for o in counted})]
    drawn = {o.run.id: o for members in of_pools for o in draw(members, EACH)}
    drawn |= {o.run.id: o for members in of_stacks for o in draw(members, OF_A_STACK)}
    write([drawn[name] for name in sorted(drawn)], json.loads((table.parent / "models.json").read_text(encoding="utf-8")))


def draw(members: list[Outcome], most: int) -> list[Outcome]:
    """A few runs, by the hash of their names."""
    return sorted(members, key=_order)[:most]


def stack_of(outcome: Outcome) -> str:
    """The stack that a counted run is priced with."""
    return outcome.job.problem.stack.name if outcome.job else ""


def write(outcomes: list[Outcome], shapes: dict[str, object]) -> None:
    """The rows with the columns that any of them fills, and the shapes they name."""
    rows = [{name: cell for name, cell in o.run.cells.items() if name not in UNREAD} for o in outcomes]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    with (HERE / "pools_sample.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    named = {row["model"]: shapes[row["model"]] for row in rows if row["model"] in shapes}
    lines = [f"{json.dumps(name)}: {json.dumps(shape, ensure_ascii=False)}" for name, shape in named.items()]
    (HERE / "pools_models.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _order(outcome: Outcome) -> str:
    return hashlib.sha256(outcome.run.id.encode()).hexdigest()


if __name__ == "__main__":
    main()

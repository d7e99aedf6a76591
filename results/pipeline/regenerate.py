"""Compares partitions, recompute, schedules and bubbles, and writes results/pipeline.md:

python results/pipeline/regenerate.py RUNS.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

from paraplan.optimizer.writing import write_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from bubbles import measured_bubbles  # noqa: E402
from every_model import every_model  # noqa: E402
from orders import schedules  # noqa: E402
from partitions import partitions  # noqa: E402
from recompute import recompute  # noqa: E402

HEAD = """# Pipelines: where they are cut, in which order they run, and how far that is measured

`python results/pipeline/regenerate.py RUNS.csv` writes this page; the table of measured runs is that of `paraplan validate`.
"""


def main() -> None:
    """Writes the page. SystemExit without a table of runs."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python results/pipeline/regenerate.py RUNS.csv")
    parts = [HEAD, partitions(), every_model(), recompute(), schedules(), measured_bubbles(Path(sys.argv[1]))]
    write_file(HERE.parent / "pipeline.md", "\n".join(parts))


if __name__ == "__main__":
    main()

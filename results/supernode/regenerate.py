"""Works through cases that users reported of supernodes and writes results/supernode.md: python results/supernode/regenerate.py"""

from __future__ import annotations

import sys
from pathlib import Path

from paraplan.optimizer.writing import write_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from boundary import pipeline_at_boundary, two_clusters  # noqa: E402
from left import what_is_left  # noqa: E402
from published import published_layouts  # noqa: E402
from sizes import supernode_sizes  # noqa: E402
from tensor_parallel import expert_parallel, tensor_parallel  # noqa: E402

HEAD = """# Supernodes: what was reported, and what the model says

`python results/supernode/regenerate.py` writes this page, verdicts included. A report is somebody's claim about other machines and
software; “agrees” and “wrong here” are about this model's numbers, which are no measurements.
"""
SECTIONS = (tensor_parallel, expert_parallel, pipeline_at_boundary, supernode_sizes, two_clusters, published_layouts, what_is_left)


def main() -> None:
    write_file(HERE.parent / "supernode.md", "\n".join([HEAD, *(section() for section in SECTIONS)]))


if __name__ == "__main__":
    main()

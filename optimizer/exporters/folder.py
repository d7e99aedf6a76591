"""What lies beside a framework's own files in an exported folder: a page that says how to launch, and the order of the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..ranks import coordinates, placement
from .launch import batch_words, host_order, layout_words, origin, predicted, printable
from .request import Request

HOSTS = "hosts.csv"


def folder(asked: Request, files: Mapping[str, str], steps: Sequence[str], notes: Sequence[str] = ()) -> dict[str, str]:
    """The framework's files, a page named after it, and hosts.csv; the first file stays the first.

    `notes` are what training hangs on and the plan does not decide, or decided without being asked.
    """
    return {**files, f"{asked.speaks.framework}.md": _page(asked, files, steps, notes), HOSTS: hosts(asked)}


def hosts(asked: Request) -> str:
    """One line per server: its number, its supernode, the ranks that it runs and the pipeline stages that these belong to."""
    table = placement(asked.layout, asked.problem.cluster, sizes=asked.problem.allocated_sizes)
    stages = coordinates(asked.layout)["pp"]
    first = np.flatnonzero(np.diff(table["host"], prepend=-1))
    last = np.append(first[1:], asked.layout.devices) - 1
    lines = [
        f"{number},{table['supernode'][a]},{a},{b},{' '.join(map(str, np.unique(stages[a : b + 1])))}"
        for number, (a, b) in enumerate(zip(first, last, strict=True))
    ]
    return "\n".join(["node_rank,supernode,first_rank,last_rank,stages", *lines, ""])


def _page(asked: Request, files: Mapping[str, str], steps: Sequence[str], notes: Sequence[str]) -> str:
    return "\n".join(
        [
            f"# {printable(origin(asked))}",
            "",
            f"- Layout: {layout_words(asked.plan.plan)}.",
            f"- {batch_words(asked)}",
            f"- {predicted(asked)}",
            f"- Files: {', '.join(files)}; {HOSTS} lists the servers in order. {host_order(asked)}",
            "",
            *(f"{number}. {printable(step)}" for number, step in enumerate(steps, start=1)),
            *(["", *(f"- Note: {printable(note)}" for note in notes)] if notes else []),
            "",
        ]
    )

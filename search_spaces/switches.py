"""Overlap switches: whether gradients and parameters, sent once per step, and what tensor parallelism sends in every layer hide
behind compute or are left exposed.

Whatever they expose lengthens a pass or what stands around the pipeline, and takes no memory, so that it never makes a layout
faster, nor leaner. Such layouts are counted, not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .layout import SHARDINGS, Bools, Ints, Problem

NONE, ZERO1, ZERO2 = (SHARDINGS.index(name) for name in ("none", "zero1", "zero2"))
SENT_UNDER = {"dp_gradients": (NONE, ZERO1), "dp_parameters": (ZERO1, ZERO2)}
"""Which shardings send once per step what a switch of `Overlap` would hide; further ones send it within the passes, and FSDP's
form of ZeRO-2 too.
"""


def names(problem: Problem) -> tuple[str, ...]:
    """The switches that the problem's stack has."""
    return tuple(name for name in ("tp", *SENT_UNDER) if getattr(problem.stack.overlap, name) > 0)


def words(problem: Problem) -> str:
    """«tp, dp_gradients and dp_parameters», or «no»."""
    *others, last = names(problem) or ("no",)
    return f"{', '.join(others)} and {last}" if others else last


def settings(problem: Problem, sharding: Ints) -> Ints:
    """How many settings there are, under each sharding, of the switches of what replicas send, where they talk at all."""
    found = np.ones(len(sharding), dtype=np.int64)
    for name in SENT_UNDER.keys() & names(problem):
        within = (sharding == ZERO2) & (problem.stack.zero2_gathers != "once")
        found *= np.where(np.isin(sharding, SENT_UNDER[name]) & ~within, 2, 1)
    return found


def layer_settings(problem: Problem, sequence_parallel: Ints) -> Ints:
    """How many settings there are of the switch of what tensor parallelism sends: its GEMMs take in a part of the sequence after
    the other while the next is sent, so that it needs sequence parallelism.
    """
    return np.where((sequence_parallel > 0) & ("tp" in names(problem)), 2, 1)


def replicated(problem: Problem, columns: Mapping[str, Any]) -> Bools:
    """Where dense or expert weights have replicas to talk to, by columns of the frame."""
    dense = columns["dp"] * columns["cp"] > 1
    experts = columns["tp"] * columns["cp"] * columns["dp"] > columns["ep"] * columns["etp"]
    return np.asarray(dense | (experts & problem.model.is_moe))

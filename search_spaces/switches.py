"""Overlap switches: whether what is sent once per step, gradients and parameters, hides behind compute or is left exposed.

Either changes what stands around the pipeline and nothing in it, so that exposing it never makes a layout faster, nor leaner. Such
layouts are counted, not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .layout import SHARDINGS, Bools, Ints, Problem

NONE, ZERO1, ZERO2 = (SHARDINGS.index(name) for name in ("none", "zero1", "zero2"))
SENT_UNDER = {"dp_gradients": (NONE, ZERO1), "dp_parameters": (ZERO1, ZERO2)}
"""Which shardings send once per step what a switch of `Overlap` would hide; further ones send it within the passes."""


def names(problem: Problem) -> tuple[str, ...]:
    """The switches that the problem's stack has."""
    return tuple(name for name in SENT_UNDER if getattr(problem.stack.overlap, name) > 0)


def settings(problem: Problem, sharding: Ints) -> Ints:
    """How many settings of the switches there are under each sharding, where replicas talk at all."""
    found = np.ones(len(sharding), dtype=np.int64)
    for name in names(problem):
        found *= np.where(np.isin(sharding, SENT_UNDER[name]), 2, 1)
    return found


def replicated(problem: Problem, columns: Mapping[str, Any]) -> Bools:
    """Where dense or expert weights have replicas to talk to, by columns of the frame."""
    dense = columns["dp"] * columns["cp"] > 1
    experts = columns["tp"] * columns["cp"] * columns["dp"] > columns["ep"] * columns["etp"]
    return np.asarray(dense | (experts & problem.model.is_moe))

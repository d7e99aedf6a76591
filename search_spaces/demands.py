"""What rules, and the ways in which stages can be cut, demand of a choice that goes with a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .choices import FRAME, SHARING, groups_are_free
from .layout import ALL_LAYERS, FULL_BLOCK, SCHEDULES, Bools, Problem
from .rules import Rule

SCALED = {f"{name}_per_mille": name for name in SHARING if name.endswith("_offload")}
"""Shares that move, as rules read them: whole numbers of thousandths."""
Columns = Mapping[str, Any]
"""Constants, and columns that broadcast: frames down, choices across."""


@dataclass(frozen=True)
class Demand:
    """What a legal choice has to meet: a mask over the columns of the frame and of the choice that it looks at, some of which may
    be given.
    """

    frame: set[str]
    names: Set[str]
    mask: Callable[[Columns], Any]
    given: Columns = field(default_factory=dict)


def demand_of(rule: Rule, given: Columns | None = None) -> Demand:
    """What a rule asks of the columns that it names."""
    return Demand(frame_names(rule), rule.names, rule.condition.mask, given or {})


def chosen_names(names: Set[str]) -> set[str]:
    """The given names with the columns of choices that derived ones among them come from."""
    scaled = {column for name, column in SCALED.items() if name in names}
    return {*names, *scaled, *(("micro_batch",) if "num_microbatches" in names else ())}


def frame_names(rule: Rule) -> set[str]:
    """Frame columns that a rule looks at, through derived ones too."""
    behind = {
        "devices_used": {"tp", "cp", "pp", "dp"},
        "edp": set(FRAME) - {"pp"},
        "sequence_parallel": {"tp"},
        "num_microbatches": {"dp"},
    }
    return set().union(*(behind.get(name, {name}) for name in rule.names))


def distinct_pipelines(problem: Problem, constants: Mapping[str, int], choices: Mapping[str, Any]) -> list[Demand]:
    """Choices that stages can be cut for, each of them once.

    A stack that cannot be told where to cut gets equal chunks, or equal ones on every stage but the ends (`end_cuts`) where these
    can be set apart; what others can be told is `Cutting`. Interleaved chunks run in
    groups of pp micro-batches, or in those that the stack asks for; others, which are replayed pass by pass, stand aside unless the
    user names pp and vpp. So do block depths that cover a mean chunk for `full`, unless the user names them, and GPipe for 1F1B
    where there is one stage: it runs the same passes and holds more.
    """
    stack, layers, blocks = problem.stack, constants["layers"], constants["blocks"]

    def can_be_cut(known: Columns) -> Bools:
        chunks = known["pp"] * known["vpp"]
        free = np.where(known["vpp"] > 1, stack.cuts_freely(2), stack.cuts_freely(1))
        apart = stack.sets_ends_apart & (known["pp"] > 1) & (layers % known["vpp"] == 0) & (chunks <= layers)
        return np.asarray(np.where(free, chunks <= constants["most_chunks"], (layers % chunks == 0) | apart))

    def in_groups(known: Columns) -> Bools:
        m, pp = known["num_microbatches"], known["pp"]
        grouped = (m >= pp) if groups_are_free(problem) else (m % pp == 0)  # of fewer it would hold less than bounds count
        return np.asarray((known["schedule"] != SCHEDULES.index("interleaved")) | grouped)

    def less_than_full(known: Columns) -> Bools:
        depth = known["recompute_layers"]
        block = (known["recompute_mode"] == FULL_BLOCK) & (depth < ALL_LAYERS)
        return np.asarray(~(block & (depth * known["pp"] * known["vpp"] >= blocks)))

    def in_stages(known: Columns) -> Bools:
        return np.asarray((known["schedule"] != SCHEDULES.index("gpipe")) | (known["pp"] > 1))

    found = [
        Demand({"pp"}, {"vpp"}, can_be_cut),
        Demand({"pp", "dp"}, {"schedule", "num_microbatches"}, in_groups),
    ]
    if np.isin([SCHEDULES.index(name) for name in ("gpipe", "1f1b")], choices["schedule"]).all():
        found.append(Demand({"pp"}, {"schedule"}, in_stages))
    if "recompute" not in problem.workload.fix:
        found.append(Demand({"pp"}, {"vpp", "recompute_mode", "recompute_layers"}, less_than_full))
    return found

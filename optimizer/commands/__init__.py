"""The commands: functions that read their options and return an Answer, printing nothing themselves."""

from __future__ import annotations

from collections.abc import Callable

from .answers import Answer
from .cataloguing import catalog_command
from .checking import check_command
from .explaining import compare_layouts_command, why_command
from .handing_over import export_command
from .measuring import calibrate_command, validate_command
from .picturing import report_command, timeline_command
from .placing import experts_command, ranks_command, topology_command
from .planning import evaluate_command, plan_command
from .sizing import compare_command, size_command
from .sweeping import sweep_command
from .tuning import ask_command, list_command, show_command, tell_command

COMMANDS: dict[str, Callable[..., Answer]] = {
    "plan": plan_command,
    "evaluate": evaluate_command,
    "check": check_command,
    "compare": compare_command,
    "size": size_command,
    "compare-layouts": compare_layouts_command,
    "why": why_command,
    "export": export_command,
    "timeline": timeline_command,
    "ranks": ranks_command,
    "topology": topology_command,
    "report": report_command,
    "experts": experts_command,
    "sweep": sweep_command,
    "validate": validate_command,
    "calibrate": calibrate_command,
    "catalog": catalog_command,
}
"""By name, in the order in which help lists them."""

GROUPS: dict[str, tuple[str, dict[str, Callable[..., Answer]]]] = {
    "tune": (
        "Propose layouts to run, learn from the runs, propose the next.",
        {"ask": ask_command, "tell": tell_command, "show": show_command, "list": list_command},
    ),
}
"""Commands of several words, by their first: what they are for, and those below it."""

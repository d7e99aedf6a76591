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

Listed = dict[str, tuple[Callable[..., Answer], str]]
"""Commands by name, each with the line that the list of commands has of it."""

COMMANDS: dict[str, Listed] = {
    "The best layout": {
        "plan": (plan_command, "find the layout with the shortest step that fits, with proof"),
        "evaluate": (evaluate_command, "price one layout, and say whether it is legal"),
    },
    "Why, and what it looks like": {
        "why": (why_command, "what each choice of a plan buys, or why not another"),
        "compare-layouts": (compare_layouts_command, "where the difference of two layouts comes from"),
        "timeline": (timeline_command, "draw one step pass by pass, or trace it for Perfetto"),
        "topology": (topology_command, "draw supernodes, servers, devices, groups and loads"),
        "report": (report_command, "write the whole plan with its pictures, to pass on"),
    },
    "Existing jobs, and handing over": {
        "check": (check_command, "is a job legal, does it fit, what would be faster"),
        "export": (export_command, "write what a training framework is started with"),
        "ranks": (ranks_command, "write the host file, and HCCL's rank table"),
        "experts": (experts_command, "place experts on EP ranks from measured loads"),
    },
    "Many problems, sizes and money": {
        "compare": (compare_command, "clusters side by side, each with its best plan"),
        "size": (size_command, "the fewest devices that a run needs to be done in time"),
        "sweep": (sweep_command, "plan every point of a grid, resumably"),
    },
    "Measured runs, and what is known": {
        "validate": (validate_command, "predictions beside measured runs"),
        "calibrate": (calibrate_command, "fit a stack's figures to runs, or learn your site"),
        "catalog": (catalog_command, "models, accelerators, clusters and stacks, with sources"),
    },
}
"""By heading, in the order in which help lists them."""

GROUPS: dict[str, tuple[str, Listed]] = {
    "tune": (
        "Propose layouts to run, learn from the runs, propose the next.",
        {
            "ask": (ask_command, "propose the layout to run next"),
            "tell": (tell_command, "take the result of a run back"),
            "show": (show_command, "the best so far, what was learnt, whether to stop"),
            "list": (list_command, "all proposals; give up those that nobody runs"),
        },
    ),
}
"""Commands of several words, by their first: what they are for, and those below it."""

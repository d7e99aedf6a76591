"""A plan as the files that a training framework is started with: one module per framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...search_spaces.documents import did_you_mean
from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.layout import parse_offload
from ..result import Plan
from ..writing import write_folder
from . import deepspeed, job, megatron_bridge, megatron_lm, mindformers, mindspeed_llm, process_groups, torchtitan

__all__ = ["EXPORTERS", "export", "render", "render_if_possible"]

EXPORTERS: dict[str, Callable[[Plan, str | None], dict[str, str]]] = {
    module.FRAMEWORK: module.files
    for module in (megatron_lm, megatron_bridge, mindspeed_llm, mindformers, torchtitan, deepspeed, job, process_groups)
}
"""Framework → function from a plan and a version to file name → text. A new exporter is one entry."""


def render(plan: Plan, framework: str, framework_version: str | None = None) -> dict[str, str]:
    """The files for a framework, as file name → text; nothing is written.

    The version is by default the stack's, if the plan was made for this framework, or else the exporter's usual one. InputError if
    the framework or version is unknown; Infeasible if the framework cannot express the plan.
    """
    if framework not in EXPORTERS:
        raise InputError(f"framework {framework!r} is not one of {', '.join(EXPORTERS)}{did_you_mean(framework, tuple(EXPORTERS))}")
    layout, stack = plan.plan.layout, plan.problem.stack
    if framework != process_groups.FRAMEWORK and plan.problem.workload.offload_to == "peers" and parse_offload(layout.offload)[1]:
        said = f"{framework} has no option that keeps a stage's activations on another's devices; plan without --offload-to peers"
        raise Infeasible(f"offload = {layout.offload}: {said}")
    version = framework_version or (stack.version if stack.framework == framework else None)
    return EXPORTERS[framework](plan, version)


def render_if_possible(plan: Plan, framework: str, framework_version: str | None = None) -> tuple[dict[str, str], tuple[str, ...]]:
    """The files of `render` and no words; or no files and why not, in sentences, for whoever has more to write than them."""
    if framework not in EXPORTERS:
        return {}, (f"no launch files: {framework} has no exporter",)
    try:
        return render(plan, framework, framework_version), ()
    except Infeasible as error:
        return {}, tuple(f"no launch files: {sentence}" for sentence in (error.reasons or (error.summary,)))
    except InputError as error:
        return {}, (f"no launch files: {error}",)


def export(plan: Plan, framework: str, directory: Path, framework_version: str | None = None) -> list[Path]:
    """Writes the files of `render` into a folder, all or none, and returns their paths; errors come before anything is written."""
    return write_folder(directory, render(plan, framework, framework_version))

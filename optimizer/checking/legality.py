"""Whether a job is legal, as far as what is known of it lets that be judged.

The rules are those of the rulebook. A rule that reads what is not known (the model, the cluster, the batch) is left for later and
told, with the input that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from ...search_spaces.conditions import known
from ...search_spaces.expressions import names_in
from ...search_spaces.inputs import load_stack
from ...search_spaces.limits import stack_rules
from ...search_spaces.rulebook import Rule
from ...search_spaces.rules import scope_name
from ...search_spaces.stack import Framework
from ..readers import Job
from ..result import Result
from .known import GRIDS, OFFERED, WHOLE, Known
from .nearby import MOVING, VARIED, can_be_met, meeting, reached, told, varied, words_meeting

MODEL_NAMES = frozenset(
    {"layers", "mtp_layers", "blocks", "heads", "kv_heads", "kv_heads_multiple", "linear_heads", "state_groups", "mlp_width", "mla"}
    | {"experts", "expert_width", "shared_width", "indexer", "compressed", "tied", "most_chunks", "placed_blocks", "split_form"}
    | {"windows", "sinks"}
)
STACK_NAMES = frozenset(
    {"kv_replication", "expert_tensor_parallel", "optimizer_can_offload", "recompute_block", "splits_free", "splits_first_last"}
    | {"splits_list", "recompute_by_chunk", "experts_across_tp"}
)
USUAL_STACKS = (*get_args(Framework), "megatron-fsdp")
NEEDS = {
    "a model": "give MODEL",
    "a cluster": "give --cluster",
    "the number of devices": "give --devices",
    "the global batch": "give --global-batch",
    "the micro-batch": "the configuration leaves it out",
    "the sequence length": "give --seq-len",
    "a framework": "give --framework or --stack",
}

Values = dict[str, tuple[int | str, ...]]
"""Of some columns the values that meet a rule: numbers, or words."""


class Broken(Result):
    """A rule that a job breaks. `legal` holds, for columns of the rule, the values that would meet it and break no rule that is
    met, with all else as it is; `alone`, where there are none, those that would meet this rule and may break others.
    """

    rule: str
    sentence: str
    reason: str = ""
    source: str = ""
    scope: str = ""
    legal: Values = {}
    alone: Values = {}


def broken_rules(found: Known) -> list[Broken]:
    """Every rule that the job breaks, with the values of its columns that would meet it."""
    failed = found.failed
    return [_broken(found, rule, {each.id for each in failed} - {rule.id}) for rule in failed]


def _broken(found: Known, rule: Rule, others: set[str]) -> Broken:
    """The rule that is broken, in words; `others` are broken too, and not asked of what would mend this one."""
    failure = rule.condition.failure(found.words, found.values)
    held = tuple(each for each in found.rules if each.id not in others)
    legal = meeting(found, rule, held, whole=not others & WHOLE)
    if failure.of is not None and names_in(failure.of) & MOVING:
        failure = replace(failure, values=reached(found, rule, failure.of, legal))
    fine: Values = {**told(found, legal), **words_meeting(found, rule, held)}
    whole_grid = rule in (GRIDS["named"], GRIDS["planned"])
    clause = _grid_sentence(found.values) if whole_grid else failure.clause
    remedy = ("" if whole_grid else failure.remedy) or _elsewhere(found, rule)
    return Broken(
        rule=rule.id,
        sentence=f"{clause}; {remedy}." if remedy else f"{clause}.",
        reason=rule.reason,
        source=rule.source,
        scope=scope_name(rule.scope),
        legal=fine,
        alone={} if fine else _meeting_alone(found, rule),
    )


def _elsewhere(found: Known, rule: Rule) -> str:
    """The usual stacks that have the word which this one lacks."""
    if rule.id not in OFFERED:
        return ""
    have = [
        name
        for name in USUAL_STACKS
        if all(each.condition.mask(found.values) for each in stack_rules(load_stack(name)) if each.id == rule.id)
    ]
    return f"{', '.join(have)} {'has' if len(have) == 1 else 'have'} it" if have else ""


def _meeting_alone(found: Known, rule: Rule) -> Values:
    """Values that meet just this rule."""
    return {**told(found, meeting(found, rule, (rule,), whole=rule.id in WHOLE)), **words_meeting(found, rule, (rule,))}


def left_to_recipe(found: Known, job: Job) -> dict[str, tuple[str, ...]]:
    """Rules that are broken with what a job leaves to its recipe, and met with other values of those columns."""
    if job.recipe is None:
        return {}
    resting = {}
    for rule in found.judged:
        unset = [name for name in VARIED if name in job.degrees and name not in job.written and name in varied(rule)]
        if unset and not rule.condition.mask(found.values) and can_be_met(found, rule, unset):
            resting[rule.id] = tuple(unset)
    return resting


def _grid_sentence(values: Mapping[str, int]) -> str:
    degrees = [name for name in ("tp", "cp", "pp", "dp") if values[name] > 1] or ["tp"]
    needed = values["tp"] * values["cp"] * values["pp"] * values["dp"]
    shown = "·".join(degrees)
    return (
        f"{shown} = {'·'.join(str(values[name]) for name in degrees)} needs {needed:,} devices, the job has {values['devices']:,}"
    )


def not_judged(found: Known) -> tuple[str, ...]:
    """What is needed to judge the rules that could not be, with how many these are."""
    waiting: dict[str, list[str]] = {}
    for rule in found.rules:
        missing = rule.names - found.values.keys()
        if missing and known(rule.condition, found.values) is not True:
            for need in {_need(name, found.values) for name in missing} - {""}:
                waiting.setdefault(need, []).append(rule.id)
    return tuple(
        f"{len(ids)} {'rule needs' if len(ids) == 1 else 'rules need'} {need} ({NEEDS[need]}): {', '.join(dict.fromkeys(ids))}"
        for need in NEEDS
        if (ids := waiting.get(need))
    )


def _need(name: str, values: Mapping[str, int]) -> str:
    """The input that a column waits for; none where what is given leaves it open, as a grid that is broken does."""
    if name in MODEL_NAMES:
        return "a model"
    if name in STACK_NAMES:
        return "a framework"
    if name.startswith(("unit_", "supernode")):  # what of them is in use hangs on the devices
        return "the number of devices" if "supernode_size" in values and "devices" not in values else "a cluster"
    if name in ("devices", "dp", "edp", "devices_used"):
        return "the number of devices" if "devices" not in values else ""
    if name == "num_microbatches" and "global_batch" in values:
        return ""
    if name == "micro_batch" and "global_batch" in values:
        return "the micro-batch"
    if name in ("global_batch", "num_microbatches", "micro_batch"):
        return "the global batch"
    return "the sequence length" if name == "seq_len" else ""

"""Options that say for which problem a layout is sought, as the commands and the points of a sweep share them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import TYPE_CHECKING, Any, get_type_hints

from .answers import Answer
from .options import (
    Constraint,
    ExpertImbalance,
    ExpertLoads,
    Fix,
    Forbid,
    Framework,
    FrameworkVersion,
    Inside,
    MemoryMargin,
    OffloadTo,
    Precision,
    RankOrder,
    Reserve,
    StackName,
    VocabSize,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ...search_spaces.cluster import ClusterSpec
    from ...search_spaces.layout import Problem
    from ...search_spaces.model import ModelSpec

KEYWORD = Parameter.KEYWORD_ONLY


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """What is said of a problem besides its model, its cluster and its batch."""

    stack: StackName = None
    precision: Precision = "bf16"
    inside: Inside = None
    rank_order: RankOrder = "flags"
    framework: Framework = None
    framework_version: FrameworkVersion = None
    memory_margin: MemoryMargin = None
    reserve: Reserve = None
    offload_to: OffloadTo = None
    vocab_size: VocabSize = None
    expert_imbalance: ExpertImbalance = None
    expert_loads: ExpertLoads = None

    def problem(
        self,
        model: str | ModelSpec,
        cluster: str | ClusterSpec,
        devices: int,
        global_batch: int,
        seq_len: int,
        *,
        fix: str = "",
        forbid: Iterable[str] = (),
        constraint: Iterable[str] = (),
        profile: str | None = None,
    ) -> Problem:
        """The problem that is meant, checked; InputError as of `build_problem`.

        A `profile` that a site learnt with one stack says which, where nothing else does.
        """
        from ...search_spaces.inputs import build_problem
        from .placing import measured_imbalance

        learnt = None if profile is None or self.stack or self.framework else _learnt_stack(profile, cluster)
        problem = build_problem(
            model,
            cluster,
            devices,
            global_batch,
            seq_len,
            self.stack or learnt,
            self.precision,
            framework=self.framework,
            framework_version=self.framework_version,
            fix=fix,
            forbid=forbid,
            constraint=constraint,
            inside=() if tuple(self.inside or ()) == ("none",) else self.inside or (),
            memory_margin=self.memory_margin,
            expert_imbalance=self.expert_imbalance,
            measured_imbalance=measured_imbalance(self.expert_loads, model),
            vocab_size=self.vocab_size,
            reserved_gib=self.reserve,
            offload_to=self.offload_to,
            rank_order=self.rank_order,
        )
        if learnt is None:
            return problem
        return problem.model_copy(
            update={"assumptions": (f"stack {learnt}, with which {profile} was learnt", *problem.assumptions)}
        )


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ProblemOptions):
    """The same for a search, which limits narrow."""

    fix: Fix = None
    forbid: Forbid = None
    constraint: Constraint = None

    def sought(
        self,
        model: str | ModelSpec,
        cluster: str | ClusterSpec,
        devices: int,
        global_batch: int,
        seq_len: int,
        profile: str | None = None,
    ) -> Problem:
        """The problem within its limits."""
        return self.problem(
            model,
            cluster,
            devices,
            global_batch,
            seq_len,
            fix=",".join(self.fix or ()),
            forbid=self.forbid or (),
            constraint=self.constraint or (),
            profile=profile,
        )

    @property
    def untouched(self) -> bool:
        """Whether nothing was said."""
        return self == type(self)()


def _learnt_stack(profile: str, cluster: str | ClusterSpec) -> str | None:
    """The only stack that a site's profile was learnt with on the cluster's accelerator; None where there is none, or several."""
    from ...cost_models.profile import load_profile
    from ...search_spaces.inputs import load_cluster

    accelerator = load_cluster(cluster).accelerator.priced_as
    stacks = load_profile(accelerator, profile).learnt_stacks(accelerator)
    return stacks[0] if len(stacks) == 1 else None


def spread(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """The command with the options that some parameters hold in their place: typer knows no parameter that holds others."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    held = {name: _options(hints[name]) for name in own if is_dataclass(hints[name])}
    parameters: list[Parameter] = []
    for name, each in own.items():
        parameters += held.get(name) or [each.replace(kind=KEYWORD, annotation=hints[name])]

    @wraps(command)
    def gathered(**given: Any) -> Answer:
        records = {name: hints[name](**{each.name: given.pop(each.name) for each in options}) for name, options in held.items()}
        return command(**given, **records)

    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return gathered


def _options(record: type[DataclassInstance]) -> list[Parameter]:
    """The fields of a record as keywords of their own."""
    hints = get_type_hints(record, include_extras=True)
    return [Parameter(each.name, KEYWORD, default=each.default, annotation=hints[each.name]) for each in fields(record)]

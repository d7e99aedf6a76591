"""Options that say for which problem a layout is sought, as the commands and the points of a sweep share them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
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
    ) -> Problem:
        """The problem that is meant, checked; InputError as of `build_problem`."""
        from ...search_spaces.inputs import build_problem
        from .placing import measured_imbalance

        return build_problem(
            model,
            cluster,
            devices,
            global_batch,
            seq_len,
            self.stack,
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


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ProblemOptions):
    """The same for a search, which limits narrow."""

    fix: Fix = None
    forbid: Forbid = None
    constraint: Constraint = None

    def sought(self, model: str | ModelSpec, cluster: str | ClusterSpec, devices: int, global_batch: int, seq_len: int) -> Problem:
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
        )

    @property
    def untouched(self) -> bool:
        """Whether nothing was said."""
        return self == type(self)()


def spread(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """The command with the options that its parameter `asked` holds in that one's place: typer knows none that hold others."""
    hints = get_type_hints(command, include_extras=True)
    held = get_type_hints(hints["asked"], include_extras=True)
    options = [Parameter(each.name, KEYWORD, default=each.default, annotation=held[each.name]) for each in fields(hints["asked"])]
    parameters: list[Parameter] = []
    for name, own in inspect.signature(command).parameters.items():
        parameters += options if name == "asked" else [own.replace(kind=KEYWORD, annotation=hints[name])]

    @wraps(command)
    def gathered(**given: Any) -> Answer:
        asked = hints["asked"](**{option.name: given.pop(option.name) for option in options})
        return command(**given, asked=asked)

    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return gathered

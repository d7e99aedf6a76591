"""Options of plan beyond its problem: what is made least and how it is looked for, and the study that goes on from the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...search_spaces.errors import InputError
from ..engines import ENGINES
from .answers import at_least_one, offered
from .options import number, whole

if TYPE_CHECKING:
    from ...search_spaces.workload import Precision
    from ..study import Refine


@dataclass(frozen=True, kw_only=True)
class AimOptions:
    """What a plan makes least, what else is asked of it, and how far the search goes."""

    objective: Annotated[
        str, typer.Option("--objective", metavar="AIM,…", help="step-time, memory, devices, cost, traffic, goodput.")
    ] = "step-time"
    device_hour_price: Annotated[
        float | None, typer.Option("--device-hour-price", parser=number, metavar="P", help="Price of a device for an hour.")
    ] = None
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Plan again on slightly other hardware.")] = False
    robust: Annotated[bool, typer.Option("--robust", help="Find the layout least hurt by figures in doubt.")] = False
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help=f"Search: {', '.join(ENGINES)}; auto is bnb.")] = "auto"
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", parser=number, metavar="S", help="Stop after S seconds, with what is found by then."),
    ] = None
    top: Annotated[int, typer.Option("--top", parser=whole, metavar="K", help="Layouts to report, each of other degrees; 5.")] = 5

    def check(self) -> None:
        """InputError that names an option which says nothing that can be done."""
        offered("--engine", self.engine, tuple(ENGINES))
        at_least_one("--top", self.top)
        if self.time_limit is not None and not 0 < self.time_limit < float("inf"):
            raise InputError(f"--time-limit {self.time_limit:g}: must be a number of seconds greater than 0")
        from ..aims import parse_aims

        parse_aims(self.objective, self.device_hour_price)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What the study of --refine is asked."""

    refine: Annotated[bool, typer.Option("--refine", help="Let Optuna go on from the plan, beyond its space.")] = False
    refine_precision: Annotated[
        str | None,
        typer.Option("--refine-precision", metavar="NAME,…", help="Precisions it may choose; they change learning."),
    ] = None
    trials: Annotated[
        int | None, typer.Option("--trials", parser=whole, metavar="N", help="Samples of --refine; 256 by default.")
    ] = None
    hedge_imbalance: Annotated[
        str | None,
        typer.Option("--hedge-imbalance", metavar="F,…", help="Refine for these imbalances: 1.0,1.5,2.0."),
    ] = None
    hedge_by: Annotated[
        str | None, typer.Option("--hedge-by", metavar="NAME", help="What is least over them: worst (default), mean.")
    ] = None

    @property
    def study(self) -> Refine | None:
        """The study; InputError for options of it without it, or without what they need."""
        given = {
            "--trials": self.trials,
            "--hedge-imbalance": self.hedge_imbalance,
            "--hedge-by": self.hedge_by,
            "--refine-precision": self.refine_precision,
        }
        if not self.refine:
            alone = next((flag for flag, value in given.items() if value is not None), None)
            if alone is not None:
                raise InputError(f"{alone} {given[alone]}: is an option of --refine; give that too")
            return None
        if self.hedge_by is not None and self.hedge_imbalance is None:
            raise InputError(f"--hedge-by {self.hedge_by}: there is nothing to hedge; give --hedge-imbalance 1.0,1.5,2.0")
        from ..study import TRIALS, Refine

        trials = TRIALS if self.trials is None else self.trials
        offered("--hedge-by", self.hedge_by or "worst", ("worst", "mean"))
        at_least_one("--trials", trials)
        hedge: Literal["worst", "mean"] = "mean" if self.hedge_by == "mean" else "worst"
        permitted = _precisions(self.refine_precision or "")
        return Refine(trials, imbalances_of(self.hedge_imbalance or ""), hedge, precisions=permitted)


def imbalances_of(text: str, flag: str = "--hedge-imbalance") -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise InputError(f"{flag} {text!r}: must be numbers with commas between them, as 1.0,1.5,2.0") from error


def _precisions(text: str) -> tuple[Precision, ...]:
    """Names of precisions between commas."""
    from ...search_spaces.workload import PRECISIONS

    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        offered("--refine-precision", name, PRECISIONS)
    return tuple(each for each in PRECISIONS if each in names)

"""A tuning study: proposals and what became of them, as trials in an Optuna storage that many workers share.

A proposal is written in one piece together with its layout, so that trials stand in one order for all. Of proposals of one layout
the earliest counts, and the study's problem is that of its earliest trial: both can be read off the trials alone, so a worker
that is killed at any moment leaves nothing to repair.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from pydantic import ValidationError

from ..search_spaces.documents import to_record
from ..search_spaces.errors import InputError
from ..search_spaces.layout import DEGREES, Layout, Problem

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

P = ParamSpec("P")
T = TypeVar("T")
State = Literal["running", "ran", "out of memory", "failed", "abandoned"]
CORRECTABLE: tuple[State, ...] = ("ran", "out of memory", "failed")
LOST = "lost"  # outcome of a proposal that another worker had made already
OPEN_TRIES, PAUSE_S = 40, 0.1  # workers that make the tables of a new file at the same moment get in each other's way
UNREACHABLE = ("unable to open", "readonly", "refused", "denied", "resolve", "could not connect", "full")
PATIENCE_S = 60  # for another worker's write to an SQLite file


@dataclass(frozen=True)
class Proposal:
    """One trial: the layout, what the model and the runs until then let expect of it, and what came of it."""

    number: int
    layout: Layout
    state: State
    predicted_s: float
    predicted_gib: float
    gain: float | None  # share of the best step so far that the run was expected to bring; None before the first result
    since: str
    measured_s: float | None = None
    measured_gib: float | None = None


@dataclass(frozen=True)
class Subject:
    """What is tuned: the problem, and the user's profile that predictions start from."""

    problem: Problem
    profile: str | None = None

    def to_json(self) -> str:
        return json.dumps({"profile": self.profile, "problem": self.problem.model_dump(mode="json", exclude_none=True)})

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def _storage_told(method: Callable[P, T]) -> Callable[P, T]:
    """The method of a study with what breaks in its storage said in one sentence, as an InputError."""

    @wraps(method)
    def told(*arguments: P.args, **options: P.kwargs) -> T:
        import optuna
        from sqlalchemy import exc

        study = arguments[0]
        assert isinstance(study, TuningStudy)
        try:
            return method(*arguments, **options)
        except (exc.SQLAlchemyError, optuna.exceptions.StorageInternalError, json.JSONDecodeError, ValidationError) as error:
            raise InputError(_complaint(study.storage, error)) from error

    return told


class TuningStudy:
    """The trials of one study. Every method reads the storage anew."""

    def __init__(self, name: str, storage: str, create: bool = False) -> None:
        """Opens it; InputError, in one sentence, where there is none and `create` is not set, or the storage cannot be opened."""
        self.name = name
        self.storage = storage
        self._study = _opened(name, storage, create)

    @_storage_told
    def subject(self) -> Subject | None:
        """What the study tunes: that of its earliest trial; None while there is none."""
        trials = self._trials()
        if not trials:
            return None
        text = self._study.user_attrs.get(_key(trials[0].user_attrs["subject"]))
        if not isinstance(text, str):
            raise InputError(f"study {self.name!r}: its problem is missing from {self.storage}; begin another study")
        found = json.loads(text)
        return Subject(to_record(Problem, found["problem"], f"study {self.name!r}"), found["profile"])

    @_storage_told
    def proposals(self) -> list[Proposal]:
        """All that count, in order and numbered so: of several of one layout the earliest, unless that was abandoned."""
        attributes = self._study.user_attrs
        return [_proposal(place, trial, attributes.get(_correction(trial.number))) for place, trial in enumerate(self._valid())]

    def proposal(self, number: int, flag: str = "--trial") -> Proposal:
        """The proposal of that number; InputError, naming the option that gave it, where there is none."""
        found = next((one for one in self.proposals() if one.number == number), None)
        if found is None:
            known = [str(one.number) for one in self.proposals()]
            there = f"there is {', '.join(known)}" if known else "it has none yet"
            raise InputError(f"{flag} {number}: study {self.name!r} has no such proposal; {there}")
        return found

    @_storage_told
    def claim(
        self, subject: Subject, layout: Layout, predicted_s: float, predicted_gib: float, gain: float | None
    ) -> Proposal | None:
        """Proposes a layout and marks it as running; None if another worker did so first.

        InputError if the study tunes something else.
        """
        from optuna.trial import TrialState, create_trial

        ticket = uuid.uuid4().hex
        self._study.set_user_attr(_key(subject.digest), subject.to_json())
        told = {"predicted_s": predicted_s, "predicted_gib": predicted_gib, "gain": gain}
        attributes = {"subject": subject.digest, "ticket": ticket, "layout": layout.model_dump(mode="json"), **told}
        degrees = {name: getattr(layout, name) for name in DEGREES}
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING, params=degrees, distributions=_distributions(subject.problem), user_attrs=attributes
            )
        )
        trials = self._trials()
        mine = next(trial for trial in trials if trial.user_attrs["ticket"] == ticket)
        if trials[0].user_attrs["subject"] != subject.digest:
            self._close(mine.number, LOST)
            self.refuse_other(subject)
        place = next((place for place, trial in enumerate(self._valid()) if trial.number == mine.number), None)
        if place is None:
            self._close(mine.number, LOST)
            return None
        return _proposal(place, mine)

    def refuse_other(self, subject: Subject) -> None:
        """InputError, naming what differs, if the study tunes something else."""
        own = self.subject()
        if own is None or own.digest == subject.digest:
            return
        where, there, here = _difference(json.loads(own.to_json()), json.loads(subject.to_json()))
        said = f"{where} is {there} there and {here} here"
        raise InputError(f"study {self.name!r} tunes another problem: {said}; give another --study")

    @_storage_told
    def tell(self, number: int, step_time_s: float | None, peak_gib: float | None, outcome: State) -> None:
        """Takes a proposal's result; InputError if it has one already."""
        found = self.proposal(number)
        if found.state in CORRECTABLE:
            raise InputError(f"--trial {number}: {found.state} already; --correct puts another result in the place of that")
        if found.state != "running":
            raise InputError(f"--trial {number}: {found.state} already; tell a proposal that is running")
        own = self._valid()[number].number
        if peak_gib is not None:
            self._attribute(own, "peak_gib", peak_gib)
        self._close(own, outcome, step_time_s)

    @_storage_told
    def correct(self, number: int, step_time_s: float | None, peak_gib: float | None, outcome: State) -> None:
        """Puts another result in the place of one that was told; InputError if none was."""
        if (found := self.proposal(number)).state not in CORRECTABLE:
            raise InputError(f"--trial {number}: {found.state}, has no result to correct; leave --correct out")
        # a finished trial takes no change, so that corrections stand beside the trials
        told = {"outcome": outcome, "step_time_s": step_time_s, "peak_gib": peak_gib}
        self._study.set_user_attr(_correction(self._valid()[number].number), told)

    @_storage_told
    def abandon(self, number: int) -> None:
        """Gives up a proposal that nobody runs any more: its layout may be proposed again."""
        if (found := self.proposal(number, "--abandon")).state != "running":
            raise InputError(f"--abandon {number}: {found.state} already; only a running proposal is given up")
        self._close(self._valid()[number].number, "abandoned")

    def _trials(self) -> list[FrozenTrial]:
        found = self._study.get_trials(deepcopy=False)
        if any("ticket" not in trial.user_attrs for trial in found):
            raise InputError(f"study {self.name!r} in {self.storage} is not one of paraplan tune; give another --study")
        return found

    def _valid(self) -> list[FrozenTrial]:
        """The trials that count. One of a layout that another worker proposed at the same moment never does: it takes no number."""
        seen: set[str] = set()
        kept = []
        trials = self._trials()
        for trial in trials:
            own = trial.user_attrs["subject"] == trials[0].user_attrs["subject"] and trial.user_attrs.get("outcome") != LOST
            key = layout_key(Layout.model_validate(trial.user_attrs["layout"]))
            abandoned = trial.user_attrs.get("outcome") == "abandoned"
            if own and (abandoned or key not in seen):
                kept.append(trial)
            if own and not abandoned:
                seen.add(key)
        return kept

    def _close(self, number: int, outcome: str, value: float | None = None) -> None:
        from optuna.trial import TrialState

        self._attribute(number, "outcome", outcome)
        try:
            self._study.tell(number, value, TrialState.COMPLETE if value is not None else TrialState.FAIL)
        except ValueError as error:  # told by another worker at the same moment
            raise InputError("--trial: it has a result already; --correct puts another in its place") from error

    def _attribute(self, number: int, name: str, value: Any) -> None:
        trial = self._trials()[number]
        if not trial.state.is_finished():
            self._study._storage.set_trial_user_attr(trial._trial_id, name, value)


def layout_key(layout: Layout) -> str:
    """What makes two layouts the same: everything that is chosen but where stages are cut, which follows from it."""
    return layout.model_dump_json(exclude={"stages", "overlap"})


def _opened(name: str, storage: str, create: bool) -> Study:
    import optuna
    from sqlalchemy import exc

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not name.strip():
        raise InputError(f"--study {name!r}: is empty; give the study a name")
    url = storage if "://" in storage else f"sqlite:///{Path(storage).expanduser()}"
    file = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and file.is_dir():
        raise InputError(f"--storage {storage}: is a folder; name a file in it, such as {Path(storage) / 'tune.db'}")
    if url.startswith("sqlite:///") and not create and not file.is_file():
        raise InputError(f"--storage {storage}: there is no such file; tune ask begins one")
    if url.startswith("sqlite:///") and not file.absolute().parent.is_dir():
        raise InputError(f"--storage {storage}: there is no folder {file.parent}; make it first")
    options: dict[str, Any] = {"connect_args": {"timeout": PATIENCE_S}} if url.startswith("sqlite") else {}
    for attempt in range(OPEN_TRIES):
        try:
            place = optuna.storages.RDBStorage(url, engine_kwargs=options)
            if create:
                return optuna.create_study(study_name=name, storage=place, load_if_exists=True)
            return optuna.load_study(study_name=name, storage=place)
        except KeyError as error:
            names = [summary.study_name for summary in optuna.get_all_study_summaries(place, include_best_trial=False)]
            there = f"there is {', '.join(map(repr, names))}" if names else "there is none yet"
            raise InputError(f"--study {name!r}: is not in {storage}; {there}") from error
        except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
            raise InputError(f"--storage {storage}: is no database URL that can be opened here ({_first_line(error)})") from error
        except (exc.OperationalError, exc.IntegrityError, exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
            if attempt == OPEN_TRIES - 1 or "not a database" in str(error) or not _contended(error):
                raise InputError(_complaint(storage, error)) from error
            time.sleep(PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def _contended(error: BaseException) -> bool:
    """Whether another worker made the tables, or holds the file, at the same moment."""
    return any(word in f"{error} {error.__cause__}" for word in ("already exists", "UNIQUE", "locked", "no such table"))


def _complaint(storage: str, error: BaseException) -> str:
    """What is wrong with a storage, and what to do: another program holds it, it is damaged or no study, or it is out of reach."""
    reason = _first_line(error.__cause__ or error)
    if "locked" in reason:
        return f"--storage {storage}: another program holds it ({reason}); try again when that is done"
    if any(word in reason for word in UNREACHABLE):
        return f"--storage {storage}: cannot be opened ({reason}); check the path or URL and its permissions"
    return f"--storage {storage}: is damaged or no study of paraplan tune ({reason}); restore a copy, or name another file"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _key(digest: str) -> str:
    return f"subject {digest}"


def _correction(number: int) -> str:
    return f"correction {number}"


def _distributions(problem: Problem) -> dict[str, BaseDistribution]:
    """Ranges of the degrees, for Optuna's own plots and dashboard."""
    from optuna.distributions import IntDistribution

    high = max(problem.devices, problem.workload.global_batch, problem.model.num_layers)
    return {name: IntDistribution(1, high, log=True) for name in DEGREES}


def _proposal(place: int, trial: FrozenTrial, correction: Mapping[str, Any] | None = None) -> Proposal:
    """A trial as the proposal of that place; a correction stands in the place of the result that was told first."""
    told = {**trial.user_attrs, "step_time_s": trial.value, **(correction or {})}
    finished = trial.state.is_finished()
    return Proposal(
        number=place,
        layout=Layout.model_validate(told["layout"]),
        state=cast(State, told["outcome"] if finished else "running"),
        predicted_s=told["predicted_s"],
        predicted_gib=told["predicted_gib"],
        gain=told["gain"],
        since=trial.datetime_start.isoformat(" ", "minutes") if trial.datetime_start else "",
        measured_s=told["step_time_s"] if told.get("outcome") == "ran" and finished else None,
        measured_gib=told.get("peak_gib") if finished else None,
    )


def _difference(there: Any, here: Any, path: str = "") -> tuple[str, str, str]:
    """The first field in which two documents differ, and its values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            if there.get(name) != here.get(name):
                return _difference(there.get(name), here.get(name), f"{path}.{name}" if path else name)
    return path.removeprefix("problem."), _shown(there), _shown(here)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 60 else text[:57] + "…"
    return "not given" if value is None else str(value)

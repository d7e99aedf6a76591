"""Changes of a job's layout in the words of its own configuration, each complete: with all that has to be said along with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.layout import Layout, Split, Stage
from ..readers import Job, SplitWish
from ..readers.keyed import differences, has_keys
from ..readers.restating import Pair, as_written, can_be_said, followers, recompute_written, stages_restated
from ..readers.spelling import spelled, trained_spelled
from ..readers.splits import cut, even_counts, first_last_counts
from ..waterfall import Decision
from .checked import AND, Change
from .legality import TRAINED

SHAPING = ("pp", "vpp", "stages")
"""Decisions that change how stages are cut."""
CUTS = frozenset({"C060", "C061", "C063a"})
"""Rules that a reader finds broken by what is said of stages."""


def changes(job: Job, before: Layout, after: Layout, columns: Sequence[str]) -> tuple[Change, ...]:
    """A change for each of the columns that differ. Taken together they make the one layout's configuration the other's."""
    if not columns:
        return ()
    pairs = _keyed(job, before, after, columns) if has_keys(job.format) else None
    pairs = pairs if pairs is not None else {column: _pairs(job, before, after, column, columns) for column in columns}
    return tuple(
        Change(column=column, before=AND.join(old for old, _ in said), after=AND.join(new for _, new in said))
        for column, said in pairs.items()
        if said
    )


def with_shares(found: Sequence[Change], decisions: Sequence[Decision]) -> list[Change]:
    """The changes with what each adds; what a column adds that is said with another's goes to the change that cuts the stages."""
    said = {each.column for each in found}
    home = next((each.column for each in found if each.column in SHAPING), next(iter(said), ""))
    added: dict[str, tuple[float, float]] = {}
    for each in decisions:
        column = each.column if each.column in said else home
        seconds, gib = added.get(column, (0.0, 0.0))
        added[column] = seconds + each.seconds, gib + each.peak_gib
    return [
        each.model_copy(update=dict(zip(("seconds", "peak_gib"), added[each.column], strict=True)))
        if each.column in added
        else each
        for each in found
    ]


def _keyed(job: Job, before: Layout, after: Layout, columns: Sequence[str]) -> dict[str, list[Pair]] | None:
    """What differs of a table of keys, by the column that it comes with; None where the format cannot say one of the layouts."""
    try:
        found = differences(job, before, after)
    except (Infeasible, InputError):
        return None
    pairs: dict[str, list[Pair]] = {column: [] for column in columns}
    for each in found:
        pairs[each.owner(columns)].append((each.before, each.after))
    return pairs


def _pairs(job: Job, before: Layout, after: Layout, column: str, columns: Sequence[str]) -> list[Pair]:
    """One column's options; with the first that shapes the pipeline goes how its stages are cut, where that has to be said."""
    said = [spelled(job, layout, column) for layout in (before, after)]
    if column == "devices_used" and job.devices and "dp" not in job.degrees:  # dp follows, also where it does not come out whole
        said[0] = f"{job.devices} processes"
    if column == "recompute" and (written := recompute_written(job.written)):
        said[0] = written
    if not can_be_said(job, after):
        return [(said[0], said[1])] if said[0] != said[1] else []
    shaping = next((name for name in columns if name in SHAPING), None)
    if column == "etp" and "etp" not in job.written:
        said[0] = as_written(job, "etp")
    pairs = [] if column in ("vpp", "stages") else [(said[0], said[1])]
    pairs += [*followers(job, after, column, columns), *(stages_restated(job, after) if column == shaping else [])]
    return [pair for pair in pairs if pair[0] != pair[1]]


# --- the nearest legal layouts -----------------------------------------------------------------------------------------------


def proposed(job: Job, layout: Layout, change: Mapping[str, int], dp_follows: bool, layers: int | None, mtp: int) -> Layout:
    """The layout with columns changed: what follows from them, and stages cut evenly or as near to it as comes out."""
    own = {name: bool(v) if name == "sequence_parallel" else v for name, v in change.items() if name not in TRAINED}
    new = layout.model_copy(update=own)
    each = new.tp * new.cp * new.pp
    dp = max(1, job.devices // each) if dp_follows and job.devices else new.dp
    batch = change.get("global_batch", job.global_batch) or new.micro_batch * dp
    new = new.model_copy(
        update={
            "dp": dp,
            "edp": max(1, new.tp * new.cp * dp // (new.ep * new.etp)),
            "num_microbatches": max(1, batch // (new.micro_batch * dp)),
            "sequence_parallel": new.sequence_parallel and new.tp > 1,
            "schedule": ("interleaved" if new.vpp > 1 else "1f1b") if new.schedule in ("interleaved", "1f1b") else new.schedule,
        }
    )
    if new.stages and not {"pp", "vpp"} & change.keys():
        return new
    return new.model_copy(update={"stages": _stages(job, new, layers, mtp)})


def _stages(job: Job, layout: Layout, layers: int | None, mtp: int) -> tuple[Stage, ...]:
    """Even stages; else a first and a last of their own, or of a job that lists its stages nearly even ones."""
    if layers is None or job.split.free:
        return ()
    wishes = [SplitWish()]
    if even_counts(layers, layout.pp, layout.vpp) is None:
        ends = first_last_counts(layers, layout.pp)
        wishes = [SplitWish(first=ends[0], last=ends[1])] if ends and layout.vpp == 1 else []
        if not job.split.even:
            each, rest = divmod(layers, layout.pp * layout.vpp)
            counts = tuple(each + int(chunk < rest) for chunk in range(layout.pp * layout.vpp))
            wishes.append(SplitWish(counts=counts))
    found = (cut(wish, layers, mtp, layout.pp, layout.vpp) for wish in wishes)
    split = next((each for each in found if isinstance(each, Split)), None)
    return split.stages(layers, layout.recompute) if split is not None else ()


def nearest_words(job: Job, layout: Layout, change: Mapping[str, int], made: Layout) -> tuple[str, ...]:
    """What a change of columns makes a job's configuration say, in its own words."""
    trained = tuple(said for name in change if name in TRAINED and (said := trained_spelled(job, name, change[name])))
    if has_keys(job.format):
        with suppress(Infeasible, InputError):  # what its keys cannot say is said in words
            return (*(each.after for each in differences(job, layout, made)), *trained)
    columns = [name for name in change if name not in TRAINED]
    misplaced = any(each.rule in CUTS for each in job.findings)
    if (made.stages != layout.stages or misplaced) and not set(SHAPING) & set(columns):
        columns.append("stages")
    return (*(part for each in changes(job, layout, made, columns) for part in each.after.split(AND)), *trained)

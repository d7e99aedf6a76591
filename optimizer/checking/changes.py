"""Changes of a job's layout in the words of its own configuration, each complete: with all that has to be said along with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ...search_spaces.errors import Infeasible, InputError
from ...search_spaces.layout import Layout, Split, Stage
from ..readers import Job, SplitWish
from ..readers.keyed import differences, has_keys, own_stages
from ..readers.restating import (
    EXPERT_GRID,
    Pair,
    as_written,
    can_be_said,
    experts_restated,
    extends,
    followers,
    recompute_written,
    stages_restated,
)
from ..readers.spelling import spelled, trained_spelled
from ..readers.splits import cut, even_counts, first_last_counts
from ..waterfall import Decision
from .checked import AND, Change
from .nearby import TRAINED, Changed

SHAPING = ("pp", "vpp", "stages")
"""Decisions that change how stages are cut."""
DEGREES = ("devices_used", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "stages")
"""Decisions that only come out together on the devices there are."""
ROUNDING = 1e-9
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


def told_together(found: Sequence[Change]) -> list[Change]:
    """The changes such that none has more than the whole gain, as few as that takes told as one: all degrees, also where some of
    them gain and some lose, as between them lie layouts that the devices do not hold; what loses beside them; all.
    """
    shares = {each.column: each.seconds for each in found if each.seconds is not None}
    degrees = [shares[name] for name in DEGREES if name in shares]
    mixed = min(degrees, default=0.0) < 0.0 < max(degrees, default=0.0)
    against = [name for name, seconds in shares.items() if seconds * math.fsum(shares.values()) < 0.0]
    ways = (*(() if mixed else ((),)), DEGREES, (*DEGREES, *against), tuple(shares))
    return next(told for told in (_joined(found, columns) for columns in ways) if not _exceeds(told))


def _exceeds(found: Sequence[Change]) -> bool:
    """Whether a share is more than what all of them add up to."""
    shares = [each.seconds for each in found if each.seconds is not None]
    return max(map(abs, shares), default=0.0) > abs(math.fsum(shares)) * (1.0 + ROUNDING)


def _joined(found: Sequence[Change], columns: Sequence[str]) -> list[Change]:
    """The changes with those of some columns as one, where they have shares."""
    own = [each for each in found if each.column in columns and each.seconds is not None]
    if len(own) < 2:
        return list(found)
    one = Change(
        column=", ".join(each.column for each in own),
        before=AND.join(each.before for each in own),
        after=AND.join(each.after for each in own),
        seconds=math.fsum(each.seconds or 0.0 for each in own),
        peak_gib=math.fsum(each.peak_gib or 0.0 for each in own),
    )
    return [one, *(each for each in found if each not in own)]


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
    extended = extends(job) and column in EXPERT_GRID
    pairs = [] if column in ("vpp", "stages") or (extended and column != "tp") else [(said[0], said[1])]
    if extended and column == next(name for name in columns if name in EXPERT_GRID):
        pairs += experts_restated(job, after)
    pairs += [*followers(job, after, column, columns), *(stages_restated(job, after) if column == shaping else [])]
    return [pair for pair in pairs if pair[0] != pair[1]]


# --- the nearest legal layouts -----------------------------------------------------------------------------------------------


def proposed(job: Job, layout: Layout, change: Changed, dp_follows: bool, layers: int | None, mtp: int) -> Layout:
    """The layout with columns changed: what follows from them, and stages cut evenly or as near to it as comes out."""
    own = {name: bool(v) if name == "sequence_parallel" else v for name, v in change.items() if name not in TRAINED}
    new = layout.model_copy(update=own)
    each = new.tp * new.cp * new.pp
    dp = max(1, job.devices // each) if dp_follows and job.devices else new.dp
    batch = int(change.get("global_batch", job.global_batch or 0)) or new.micro_batch * dp
    new = new.model_copy(
        update={
            "dp": dp,
            "edp": max(1, new.tp * new.cp * dp // (new.ep * new.etp)),
            "num_microbatches": max(1, batch // (new.micro_batch * dp)),
            "sequence_parallel": new.sequence_parallel and new.tp > 1,
            "schedule": ("interleaved" if new.vpp > 1 else "1f1b") if new.schedule in ("interleaved", "1f1b") else new.schedule,
        }
    )
    if layers is None or not new.stages or {"pp", "vpp"} & change.keys():
        return new.model_copy(update={"stages": _stages(job, new, layers, mtp)})
    if "recompute" not in change:
        return new
    same = replace(Split.from_stages(new.stages), redone=())
    return new.model_copy(update={"stages": same.stages(layers, new.recompute)})


def _stages(job: Job, layout: Layout, layers: int | None, mtp: int) -> tuple[Stage, ...]:
    """As torchtitan itself cuts them; else even, with a first and a last of their own, or of a job that lists them nearly even."""
    if layers is None or job.split.free:
        return ()
    if own := own_stages(job, layout, layers, mtp):
        return own
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


def nearest_words(job: Job, layout: Layout, change: Changed, made: Layout) -> tuple[str, ...]:
    """What a change of columns makes a job's configuration say, in its own words."""
    trained = tuple(said for name in change if name in TRAINED and (said := trained_spelled(job, name, int(change[name]))))
    if has_keys(job.format):
        with suppress(Infeasible, InputError):  # what its keys cannot say is said in words
            return (*(each.after for each in differences(job, layout, made)), *trained)
    columns = [name for name in change if name not in TRAINED]
    misplaced = any(each.rule in CUTS for each in job.findings)
    if (made.stages != layout.stages or misplaced) and not set(SHAPING) & set(columns):
        columns.append("stages")
    return (*(part for each in changes(job, layout, made, columns) for part in each.after.split(AND)), *trained)

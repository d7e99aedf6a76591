"""What is legal near a job: values of one column that meet a broken rule, and the fewest changes after which none is broken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt

from ...search_spaces.choices import FRAME, divisors
from ...search_spaces.conditions import nearest_two
from ...search_spaces.expressions import Column, Expression, evaluate, names_in
from ...search_spaces.quantities import DERIVED
from ...search_spaces.rulebook import Rule
from ...search_spaces.vocabulary import SCHEDULES
from ..readers.splits import first_last_counts
from .choices import CHOICES, Choice
from .known import WHOLE, Known

VARIED = (*FRAME, "vpp", "micro_batch", "global_batch", "seq_len")
"""Columns of which legal values near the given ones are looked for, in the order in which they are told."""
GRID = {"tp", "cp", "pp", "dp"}
MOVING = {*VARIED, *DERIVED, "num_microbatches", "edp", "sequence_parallel", "placed_blocks", "split_form", "schedule"}
"""What changes with those."""
KEPT_AT_ONE = ("cp", "ep", "etp", "vpp")
"""Columns that stay at 1 where they are: nearest means with what the job uses."""
TRAINED = {"global_batch", "seq_len"}
BY_CHUNKS = PLAIN, INTERLEAVED = SCHEDULES.index("1f1b"), SCHEDULES.index("interleaved")
"""Schedules of which the one follows from a single chunk a stage, the other from several."""
MOST_ROWS = 200_000
DEEPEST = 4096
"""Stages of the deepest pipeline that is thought of."""
WANTED, MOST_CHANGED = 3, 4
WORD_APART = 0.5
"""How far a word is from the next, where twice a number is at 1: of changes of one column, words come first."""
MOST_WORDS = 4
"""Words of which what they ask of the numbers is looked for."""
MOST_TOLD = 12
"""Legal values of one column that are listed."""


Changed = dict[str, int | str]
"""A change of some columns of a layout: numbers, and words."""
Option = tuple[int, float, Changed]
"""How many columns a change has, how far they are moved, and the change."""


def nearest(found: Known, ids: Set[str]) -> list[Changed]:
    """Changes of columns after which no rule that can be judged is broken: of few columns first, then the least far; those of the
    batch or the sequence, which change what is trained, last. `ids` are the rules that are broken.
    """
    options = [*_by_numbers(found, ids), *_by_words(found, ids)]
    order = sorted(options, key=lambda o: (not _keeps_training(o), o[0], o[1], sorted(o[2].items())))
    return _least([change for _, _, change in order])


def _by_words(found: Known, ids: Set[str]) -> list[Option]:
    """Changes in which another word meets what is broken; where none does by itself, with what it asks of the numbers."""
    broken = [rule for rule in found.failed if rule.id in ids]
    options: list[Option] = []
    waiting: list[tuple[float, Changed, Known, set[str]]] = []
    for choice in CHOICES:
        for rank, word in enumerate(_offered(found, choice) if _reads(broken, choice) else ()):
            moved = replace(found, values={**found.values, **choice.said(word)})
            rest = {*ids} - {each.id for each in found.failed} | {each.id for each in moved.failed}
            far = WORD_APART * (rank + 1)
            if not rest:
                options.append((1, far, {choice.name: word}))
            elif not all(rule in moved.failed for rule in broken):
                waiting.append((far, {choice.name: word}, moved, rest))
    for far, said, moved, rest in () if options else waiting[:MOST_WORDS]:
        options += [(1 + size, far + more, _with_word(said, change)) for size, more, change in _by_numbers(moved, rest)]
    return options


def _with_word(said: Changed, change: Changed) -> Changed:
    """A word beside a change of numbers; whether chunks are interleaved follows from their number."""
    follows = said.get("schedule") in [SCHEDULES[code] for code in BY_CHUNKS] and "vpp" in change
    return {"schedule": SCHEDULES[INTERLEAVED if int(change["vpp"]) > 1 else PLAIN], **change} if follows else {**said, **change}


def _least(changes: Sequence[Changed]) -> list[Changed]:
    """The first of the changes that do not hold another one and more."""
    enough = [change for change in changes if not any(each and each.items() < change.items() for each in changes)]
    return enough[:WANTED]


def words_meeting(found: Known, rule: Rule, rules: Sequence[Rule]) -> dict[str, tuple[str, ...]]:
    """For each choice that is a word and that a rule reads the words that meet the rules with all else as it is."""
    judged = [each for each in rules if each.names <= found.values.keys()]
    meeting = {}
    for choice in CHOICES:
        if rule.names & choice.columns:
            said = ((word, {**found.values, **choice.said(word)}) for word in _offered(found, choice))
            fine = (word for word, values in said if all(each.condition.mask(values) for each in judged))
            meeting[choice.name] = tuple(islice(fine, MOST_TOLD))
    return {name: words for name, words in meeting.items() if words}


def _reads(rules: Sequence[Rule], choice: Choice) -> bool:
    return any(rule.names & choice.columns for rule in rules)


def _offered(found: Known, choice: Choice) -> list[str]:
    """Words near the job's that its stack has."""
    offers = [rule for rule in found.offers if rule.names & choice.columns and rule.names <= found.values.keys()]
    return [
        word
        for word in choice.near(found.values)
        if all(rule.condition.mask({**found.values, **choice.said(word)}) for rule in offers)
    ]


def _by_numbers(found: Known, ids: Set[str]) -> list[Option]:
    """Changes of the columns that are numbers, and of sequence parallelism.

    What the job does not use is taken up, and what the broken rules do not touch is moved, only where nothing else helps.
    """
    found = replace(found, values={**found.values, **found.sayable})
    named = {name for rule in found.rules if rule.id in ids for name in rule.names & set(VARIED)}
    touched = {name for rule in found.rules if rule.id in ids for name in varied(rule)}
    options = _without_columns(found, ids)
    recut = any(not change for _, _, change in options)
    if touched & GRID and not recut:  # one degree takes another with it, and the batch
        touched |= {*GRID, "ep", "micro_batch", "global_batch"}
    unused = named & set(KEPT_AT_ONE)
    for columns, taken_up in ((touched, set[str]()), (touched, unused), ({*VARIED} if touched else set(), unused)):
        free = {name: _able(found, name) for name in VARIED if name in columns and _is_free(found, name, taken_up)}
        for size in range(1, MOST_CHANGED + 1):
            if options and (size == MOST_CHANGED or (len(options) >= WANTED and any(_keeps_training(o) for o in options))):
                break
            for names in combinations(free, size):
                options += [(size, far, {**change}) for far, change in _legal_changes(found, {name: free[name] for name in names})]
        if options:
            break
    return options


def _is_free(found: Known, name: str, taken_up: Set[str]) -> bool:
    return _may_vary(found, name) or name in taken_up & found.values.keys()


def _keeps_training(option: Option) -> bool:
    return not TRAINED & option[2].keys()


def _without_columns(found: Known, ids: Set[str]) -> list[Option]:
    """What mends a job without another degree: an uneven cut, and sequence parallelism."""
    options: list[Option] = []
    if ids == {"C060"} and _legal(found, {"pp": np.array([found.values["pp"]])}, found.rules)[0]:
        options.append((0, 0.0, {}))  # the same layout with stages cut in another way
    read = {name for rule in found.rules if rule.id in ids for name in rule.names}
    if found.values.get("sequence_parallel") == 0 and found.values["tp"] > 1 and "sequence_parallel" in read:
        on: Changed = {"sequence_parallel": 1}
        if _legal(found, {"sequence_parallel": np.array([1])}, found.rules)[0] and ids <= set(found.ids):
            options.append((0, 0.0, on))
    return options


def _may_vary(found: Known, name: str) -> bool:
    if name == "dp" and found.dp_follows:
        return False
    return name in found.values and not (name in KEPT_AT_ONE and found.values[name] == 1)


def varied(rule: Rule) -> set[str]:
    names = set(rule.names)
    if names & {"devices_used", "edp"}:
        names |= {"tp", "cp", "pp", "dp"}
    if "dp" in names or "num_microbatches" in names:
        names |= {"tp", "cp", "pp", "dp"}
    if "num_microbatches" in names:
        names |= {"micro_batch", "global_batch"}
    if "schedule" in names:  # which several chunks make the interleaved one
        names |= {"vpp"}
    return names


def _able(found: Known, name: str) -> list[int]:
    """Other values of a column that divide the devices, where it is a degree of the grid, and break no rule by themselves."""
    devices = found.values.get("devices")
    others = [v for v in _candidates(found, name) if v != found.values[name]]
    if name in FRAME and devices is not None:
        others = [v for v in others if devices % v == 0]
    alone = [rule for rule in found.rules if rule.names & MOVING == {name}]
    mask = np.ones(len(others), dtype=bool)
    for rule in alone if others else ():
        if rule.names <= found.values.keys():
            mask &= rule.condition.mask({**found.values, name: np.array(others, dtype=np.int64)})
    return [v for v, fine in zip(others, mask, strict=True) if fine]


def _legal_changes(found: Known, free: Mapping[str, Sequence[int]]) -> list[tuple[float, dict[str, int]]]:
    """(distance, change) of the best few legal rows in which exactly these columns differ, each to one of its values."""
    names, lists = list(free), list(free.values())
    if not all(lists) or math.prod(map(len, lists)) > MOST_ROWS:
        return []
    columns = _grid(names, lists)
    mask = _legal(found, columns, found.rules)
    far = np.sum([np.abs(np.log2(columns[name] / found.values[name])) for name in names], axis=0)
    rows = np.nonzero(mask)[0]
    near = rows[np.argsort(far[rows], kind="stable")[: 4 * WANTED]]
    found_changes = [(float(far[row]), {name: int(columns[name][row]) for name in names}) for row in near]
    return [(distance, change) for distance, change in found_changes if _cut_well(found, change)][:WANTED]


def _cut_well(found: Known, change: Mapping[str, int]) -> bool:
    """Whether the layers divide evenly, or so nearly that a first and a last stage of their own take up the rest."""
    values = {**found.values, **change}
    if not found.sayable or "layers" not in values or values["layers"] % (values["pp"] * values["vpp"]) == 0:
        return True
    return first_last_counts(values["layers"], values["pp"]) is not None


def meeting(found: Known, rule: Rule, rules: Sequence[Rule], whole: bool) -> dict[str, list[int]]:
    """For each column of a rule the values that meet the rules with all else as it is."""
    legal: dict[str, list[int]] = {}
    for name in VARIED:
        if name in varied(rule) and (name == "pp" or _may_vary(found, name)):
            candidates = _candidates(found, name)
            mask = _legal(found, {name: np.array(candidates, dtype=np.int64)}, rules, whole)
            legal[name] = [value for value, fine in zip(candidates, mask, strict=True) if fine]
    return {name: values for name, values in legal.items() if values}


def reached(found: Known, rule: Rule, of: Expression, legal: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The two nearest values of an expression that a legal value of one column makes it, all else that the rule reads as it is."""
    rest = {name: found.values[name] for name in rule.names - names_in(of)}
    values: set[int] = set()
    for name, each in legal.items():
        moved = _following(found, {name: np.array(each, dtype=np.int64)})
        if rest.keys() <= moved.keys():
            same = np.ones(len(each), dtype=bool)
            for other, given in rest.items():
                same &= moved[other] == given
            values |= set(np.broadcast_to(evaluate(of, moved), len(each))[same].tolist())
    return nearest_two(int(evaluate(of, found.values)), values)


def told(found: Known, legal: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Of many values those nearest to the given."""
    told = {}
    for name, values in legal.items():
        near = sorted(values, key=lambda value: (abs(math.log2(value / found.values[name])), value))
        told[name] = tuple(sorted(near[:MOST_TOLD]))
    return told


def can_be_met(found: Known, rule: Rule, names: Sequence[str]) -> bool:
    """Whether any values of these columns meet a rule; so many that they are not tried are taken to hold one that does."""
    lists = [sorted({found.values[name], *_able(found, name)}) for name in names]
    if math.prod(map(len, lists)) > MOST_ROWS:
        return True
    return bool(_legal(found, _grid(names, lists), (rule,), whole=rule.id in WHOLE).any())


def _grid(names: Sequence[str], lists: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[np.int64]]:
    meshes = np.meshgrid(*(np.array(values, dtype=np.int64) for values in lists), indexing="ij")
    return {name: mesh.reshape(-1) for name, mesh in zip(names, meshes, strict=True)}


def _legal(
    found: Known, columns: Mapping[str, npt.NDArray[np.int64]], rules: Iterable[Rule], whole: bool = True
) -> npt.NDArray[np.bool_]:
    """Which rows of changed columns meet the rules, what follows worked out anew; `whole`: and divide devices and batch."""
    values = _following(found, columns)
    mask = np.ones(len(next(iter(columns.values()))), dtype=bool)
    if whole and found.dp_follows and "devices" in values:
        mask &= values["devices"] % (values["tp"] * values["cp"] * values["pp"]) == 0
    if whole and {"dp", "micro_batch", "global_batch"} <= values.keys():
        mask &= values["global_batch"] % (values["micro_batch"] * values["dp"]) == 0
    if "layers" in values and "splits_free" in found.sayable:  # an uneven cut is looked for without interleaving only
        mask &= (values["vpp"] == 1) | (values["layers"] % (values["pp"] * values["vpp"]) == 0)
    for rule in rules:
        if rule.names <= values.keys():
            mask &= rule.condition.mask(values)
    return mask


def _following(found: Known, columns: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, Column]:
    """All columns where some are changed: dp, micro-batches and the schedule follow, and what is derived."""
    values: dict[str, Column] = {**found.values, **columns}
    if found.dp_follows and "devices" in values:
        values["dp"] = np.maximum(values["devices"] // (values["tp"] * values["cp"] * values["pp"]), 1)
    if {"dp", "micro_batch", "global_batch"} <= values.keys():
        values["num_microbatches"] = values["global_batch"] // (values["micro_batch"] * values["dp"])
    if "sequence_parallel" in values and "tp" in columns:
        values["sequence_parallel"] = np.where(columns["tp"] > 1, values["sequence_parallel"], 0)
    if "vpp" in columns and values["schedule"] in BY_CHUNKS:
        values["schedule"] = np.where(columns["vpp"] > 1, INTERLEAVED, PLAIN)
    values |= {name: evaluate(e, values) for name, e in DERIVED.items() if names_in(e) <= values.keys()}
    if {"pp", "vpp"} & columns.keys():
        values.pop("placed_blocks", None)
        values.pop("split_form", None)
    return values


def _candidates(found: Known, name: str) -> list[int]:
    """What a column may be, near and far."""
    values, given = found.values, found.values[name]
    devices = values.get("devices", 8 * given)
    if name == "pp":
        deepest = values.get("blocks", 8 * given)
        return list(range(1, min(deepest, values.get("devices", deepest), DEEPEST) + 1))
    if name == "ep":
        return divisors(values["experts"]) if values.get("experts") else divisors(devices)
    if name == "vpp":
        return list(range(1, min(values.get("blocks", 8 * given), 64) + 1))
    if name == "micro_batch":
        return [v for v in divisors(values.get("global_batch", given)) if v <= 8 * given]
    if name in ("global_batch", "seq_len"):
        return _multiples(found, name)
    return divisors(devices)


def _multiples(found: Known, name: str) -> list[int]:
    """The multiples next to a batch or a length that the degrees divide."""
    v = found.values
    if name == "global_batch":
        step = v.get("dp", 1) * v.get("micro_batch", 1) * (v["pp"] if v["vpp"] > 1 else 1)
        least = step * (v["pp"] if v["vpp"] == 1 else 1)
        steps = {step, *(dp * v.get("micro_batch", 1) for dp in divisors(v.get("devices", 1)))}
        return sorted({-(-v[name] // each) * each for each in steps} | {v[name] // step * step, least, 2 * least} - {0})
    step = v["cp"] * math.lcm(2 if v["cp"] > 1 else 1, v["tp"])
    return sorted({each for each in (v[name] // step * step, -(-v[name] // step) * step) if each > 0})

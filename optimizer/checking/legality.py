"""Whether a job is legal, as far as what is known of it lets that be judged, and which legal layouts are nearest to it.

The rules are those of the rulebook. A rule that reads what is not known (the model, the cluster, the batch) is left for later and
told, with the input that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ...search_spaces.choices import divisors
from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.conditions import at_most, divides, equal, known, nearest_two
from ...search_spaces.expressions import Column, Expression, Words, evaluate, names_in, product
from ...search_spaces.layout import COLUMNS, Layout, LayoutTable, Split, parse_offload
from ...search_spaces.limits import offload_rules
from ...search_spaces.model import ModelSpec
from ...search_spaces.quantities import (
    DERIVED,
    GEMM_MULTIPLE,
    PER_MILLE,
    WORDS,
    cluster_constants,
    fillable_chunks,
    lending_constants,
    model_constants,
    most_chunks,
    split_form,
    stack_constants,
)
from ...search_spaces.rulebook import PARALLEL_STATE, RULES, Frameworks, Rule
from ...search_spaces.rules import scope_name
from ...search_spaces.stack import Stack
from ...search_spaces.vocabulary import SCHEDULES
from ..readers import Job
from ..readers.splits import first_last_counts
from ..readers.unmodelled import GENERATES
from ..result import Result

FRAME = ("tp", "cp", "pp", "dp", "ep", "etp")
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
MOST_TOLD = 12
"""Legal values of one column that are listed."""
MODEL_NAMES = frozenset(
    {"layers", "mtp_layers", "blocks", "heads", "kv_heads", "kv_heads_multiple", "linear_heads", "state_groups", "mlp_width", "mla"}
    | {"experts", "expert_width", "shared_width", "indexer", "compressed", "tied", "most_chunks", "placed_blocks", "split_form"}
)
STACK_NAMES = frozenset(
    {"kv_replication", "expert_tensor_parallel", "optimizer_can_offload", "recompute_block", "splits_free", "splits_first_last"}
    | {"splits_list", "recompute_by_chunk", "experts_across_tp"}
)
SPLITS = ("splits_free", "splits_first_last", "splits_list")
NEEDS = {
    "a model": "give MODEL",
    "a cluster": "give --cluster",
    "the number of devices": "give --devices",
    "the global batch": "give --global-batch",
    "the micro-batch": "the configuration leaves it out",
    "the sequence length": "give --seq-len",
    "a framework": "give --framework or --stack",
}


class Broken(Result):
    """A rule that a job breaks. `legal` holds, for columns of the rule, the values that would meet it and break no rule that is
    met, with all else as it is; `alone`, where there are none, those that would meet this rule and may break others.
    """

    rule: str
    sentence: str
    reason: str = ""
    source: str = ""
    scope: str = ""
    legal: dict[str, tuple[int, ...]] = {}
    alone: dict[str, tuple[int, ...]] = {}


@dataclass(frozen=True)
class Known:
    """What is known of a job as the integers that rules read, and the rules that bind it.

    `dp_follows`: dp is what the devices leave, rather than a choice of its own.
    """

    values: Mapping[str, int]
    rules: tuple[Rule, ...]
    dp_follows: bool
    words: Words = WORDS
    sayable: Mapping[str, int] = field(default_factory=dict)  # how stages could be cut, where the job leaves that

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(rule.id for rule in self.rules)

    @property
    def judged(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.names <= self.values.keys())


GRID_FOLLOWS = Rule(
    "C001",
    "dp is what tp·cp·pp leave of the devices, in whole replicas",
    PARALLEL_STATE,
    "arithmetic",
    divides(product("tp", "cp", "pp"), "devices"),
)
GRID_GIVEN = Rule(
    "C001",
    "the degrees of the grid multiply to the devices of the job",
    PARALLEL_STATE,
    "arithmetic",
    equal(product("tp", "cp", "pp", "dp"), "devices"),
)
TP_INSIDE = Rule(
    "C141",
    "TP talks in every layer and belongs inside the scale-up domain",
    "definition",
    "topology",
    at_most("tp", "supernode_size"),
)
OF_TRAINING = frozenset({"C029", "C081"})
"""Rules that frameworks ask of steps that train, not of those that only generate."""
WHOLE = frozenset({"C001", "C029"})
"""Rules that whole replicas and whole micro-batches are."""
NOT_JUDGED_HERE = frozenset({"C001", "C063a", "C063b", "P010"})
"""Rules that a job is judged by in another form: the whole grid, its own stages, and memory by price."""


def known_of(
    job: Job,
    layout: Layout,
    dp: int | None,
    split: Split | None,
    model: ModelSpec | None,
    stack: Stack | None,
    cluster: ClusterSpec | None,
) -> Known:
    """The integers and rules of a job. `dp` is None where it cannot be told; `split` is what the framework would cut."""
    values = {**(model_constants(model) if model else dict(job.sizes)), **_machine(job, cluster)}
    if stack is not None:
        values |= stack_constants(stack)
    values |= lending_constants(_offload_to(job))
    if model is not None and stack is not None:
        values["most_chunks"] = most_chunks(model, stack)
    elif "layers" in values:
        mtp = int(values.get("mtp_layers", 0) > 0)
        values["most_chunks"] = fillable_chunks(values["layers"], stack) if stack is not None else values["layers"] + mtp
    sayable: dict[str, int] = {}
    if not job.split.free and job.split.even:
        sayable = {name: values[name] for name in SPLITS if name in values}
        values |= {"splits_free": 0, "splits_first_last": 0, "splits_list": 0}
    elif not job.split.free:
        values["most_chunks"] = max(values.get("most_chunks", 0), layout.pp * layout.vpp)  # its own stages are judged as they are
        values |= {"splits_free": 1, "splits_first_last": 1, "splits_list": 1}
    for name, value in (("devices", job.devices), ("global_batch", job.global_batch), ("seq_len", job.seq_len)):
        if value is not None:
            values[name] = value
    if job.precision is not None:
        values["gemm_multiple"] = GEMM_MULTIPLE[job.precision]
    values |= _columns(layout, dp, "micro_batch" in job.degrees, job.global_batch)
    if split is not None and "layers" in values:
        values |= {"placed_blocks": split.cuts[-1], "split_form": split_form(split, values["layers"])}
        values |= {"depths_apart": int(bool(split.redone))}
    values |= {name: int(evaluate(e, values)) for name, e in DERIVED.items() if names_in(e) <= values.keys()}
    levels = cluster.levels if cluster is not None else ()
    units = {f"unit_{level.name}": f"the {{}} devices of one {level.name}" for level in levels}
    words = Words({**WORDS.phrases, **units}, WORDS.codes, WORDS.settings, WORDS.columns)
    return Known(values, tuple(_binding(job, layout, stack, cluster)), "dp" not in job.degrees, words, sayable)


def _machine(job: Job, cluster: ClusterSpec | None) -> dict[str, int]:
    """The units of the network that the job is on; its own supernode, where it names one, before the cluster's."""
    size, found = job.supernode_size, {}
    if cluster is not None:
        found = {"supernode_size": next(level.size or 1 for level in cluster.levels if level.name == cluster.supernode)}
    if cluster is not None and job.devices is not None:
        found = cluster_constants(cluster, job.devices)
    if size is not None:
        found |= {"supernode_size": size, **({"supernode": min(size, job.devices)} if job.devices is not None else {})}
    return found


def _columns(layout: Layout, dp: int | None, has_micro_batch: bool, global_batch: int | None) -> dict[str, int]:
    """The layout as rules read it, without what is not known of it."""
    table = LayoutTable.from_layouts([layout.model_copy(update={"stages": ()})])
    found = {name: int(getattr(table, name)[0]) for name in COLUMNS if name != "split" and not name.endswith("_offload")}
    for name in ("optimizer_offload", "activation_offload"):
        found[f"{name}_per_mille"] = round(float(getattr(table, name)[0]) * PER_MILLE)
    if dp is None:
        del found["dp"]
    if not has_micro_batch:
        del found["micro_batch"]
    if dp is None or not has_micro_batch or global_batch is None:
        del found["num_microbatches"]
    return found


def _offload_to(job: Job) -> str:
    """Where what it offloads goes: to the host, unless a plan says otherwise."""
    return job.problem.workload.offload_to if job.problem is not None else "host"


def _binding(job: Job, layout: Layout, stack: Stack | None, cluster: ClusterSpec | None) -> Iterator[Rule]:
    """The rules that bind a job: the rulebook's for its framework, its grid's, TP inside a supernode where it names those, and
    those of activations that it offloads.
    """
    yield GRID_GIVEN if "dp" in job.degrees else GRID_FOLLOWS
    if job.supernode_size is not None:
        yield TP_INSIDE
    for rule in RULES:
        if rule.id in OF_TRAINING and any(each.startswith(GENERATES) for each in job.unmodelled):
            continue
        bound = isinstance(rule.scope, Frameworks) and stack is not None and rule.scope.bind(stack)
        if rule.id not in NOT_JUDGED_HERE and (bound or rule.scope in ("arithmetic", "topology")):
            yield rule
    if stack is not None and parse_offload(layout.offload)[1] > 0:
        yield from offload_rules(stack, cluster.supernode if cluster is not None else "supernode", _offload_to(job))


def broken_rules(found: Known) -> list[Broken]:
    """Every rule that the job breaks, with the values of its columns that would meet it."""
    failed = [rule for rule in found.judged if not rule.condition.mask(found.values)]
    return [_broken(found, rule, {each.id for each in failed} - {rule.id}) for rule in failed]


def _broken(found: Known, rule: Rule, others: set[str]) -> Broken:
    """The rule that is broken, in words; `others` are broken too, and not asked of what would mend this one."""
    failure = rule.condition.failure(found.words, found.values)
    held = tuple(each for each in found.rules if each.id not in others)
    legal = _meeting(found, rule, held, whole=not others & WHOLE)
    if failure.of is not None and names_in(failure.of) & MOVING:
        failure = replace(failure, values=_reached(found, failure.of, legal))
    clause, remedy = (_grid_sentence(found.values), "") if rule is GRID_GIVEN else (failure.clause, failure.remedy)
    return Broken(
        rule=rule.id,
        sentence=f"{clause}; {remedy}." if remedy else f"{clause}.",
        reason=rule.reason,
        source=rule.source,
        scope=scope_name(rule.scope),
        legal=_told(found, legal),
        alone={} if legal else _told(found, _meeting(found, rule, (rule,), whole=rule.id in WHOLE)),
    )


def left_to_recipe(found: Known, job: Job) -> dict[str, tuple[str, ...]]:
    """Rules that are broken with what a job leaves to its recipe, and met with other values of those columns."""
    if job.recipe is None:
        return {}
    resting = {}
    for rule in found.judged:
        unset = [name for name in VARIED if name in job.degrees and name not in job.written and name in _varied(rule)]
        if unset and not rule.condition.mask(found.values) and _can_be_met(found, rule, unset):
            resting[rule.id] = tuple(unset)
    return resting


def _can_be_met(found: Known, rule: Rule, names: Sequence[str]) -> bool:
    """Whether any values of these columns meet a rule; so many that they are not tried are taken to hold one that does."""
    lists = [sorted({found.values[name], *_able(found, name)}) for name in names]
    if math.prod(map(len, lists)) > MOST_ROWS:
        return True
    return bool(_legal(found, _grid(names, lists), (rule,), whole=rule.id in WHOLE).any())


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
    if name.startswith(("unit_", "supernode")):
        return "a cluster"
    if name in ("devices", "dp", "edp", "devices_used"):
        return "the number of devices" if "devices" not in values else ""
    if name == "num_microbatches" and "global_batch" in values:
        return ""
    if name == "micro_batch" and "global_batch" in values:
        return "the micro-batch"
    if name in ("global_batch", "num_microbatches", "micro_batch"):
        return "the global batch"
    return "the sequence length" if name == "seq_len" else ""


# --- what is legal nearby ----------------------------------------------------------------------------------------------------


def nearest(found: Known, broken: Sequence[Broken]) -> list[dict[str, int]]:
    """Changes of columns after which no rule that can be judged is broken: of few columns first, then the least far; those of the
    batch or the sequence, which change what is trained, last.
    """
    found = replace(found, values={**found.values, **found.sayable})
    ids = {each.rule for each in broken}
    named = {name for rule in found.rules if rule.id in ids for name in rule.names & set(VARIED)}
    touched = {name for rule in found.rules if rule.id in ids for name in _varied(rule)}
    options = _without_columns(found, ids)
    recut = any(not change for _, _, change in options)
    if touched & GRID and not recut:  # one degree takes another with it, and the batch
        touched |= {*GRID, "ep", "micro_batch", "global_batch"}
    for unused in (set[str](), named & set(KEPT_AT_ONE)):  # what the job does not use is taken up only where nothing else helps
        columns = [name for name in VARIED if name in touched and (_may_vary(found, name) or name in unused & found.values.keys())]
        free = {name: _able(found, name) for name in columns}
        for size in range(1, MOST_CHANGED + 1):
            if len(options) >= (WANTED if size < MOST_CHANGED else 1):
                break
            for names in combinations(free, size):
                options += [(size, far, change) for far, change in _legal_changes(found, {name: free[name] for name in names})]
        if options:
            break
    order = sorted(options, key=lambda o: (bool(TRAINED & o[2].keys()), o[0], o[1], sorted(o[2].items())))
    found_changes = [change for _, _, change in order]
    enough = [change for change in found_changes if not any(each and each.items() < change.items() for each in found_changes)]
    return enough[:WANTED]


Option = tuple[int, float, dict[str, int]]
"""How many columns a change has, how far they are moved, and the change."""


def _without_columns(found: Known, ids: set[str]) -> list[Option]:
    """What mends a job without another degree: an uneven cut, and sequence parallelism."""
    options: list[Option] = []
    if ids == {"C060"} and _legal(found, {"pp": np.array([found.values["pp"]])}, found.rules)[0]:
        options.append((0, 0.0, {}))  # the same layout with stages cut in another way
    read = {name for rule in found.rules if rule.id in ids for name in rule.names}
    if found.values.get("sequence_parallel") == 0 and found.values["tp"] > 1 and "sequence_parallel" in read:
        on = {"sequence_parallel": 1}
        if _legal(found, {name: np.array([value]) for name, value in on.items()}, found.rules)[0] and ids <= set(found.ids):
            options.append((0, 0.0, on))
    return options


def _may_vary(found: Known, name: str) -> bool:
    if name == "dp" and found.dp_follows:
        return False
    return name in found.values and not (name in KEPT_AT_ONE and found.values[name] == 1)


def _varied(rule: Rule) -> set[str]:
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


def _meeting(found: Known, rule: Rule, rules: Sequence[Rule], whole: bool) -> dict[str, list[int]]:
    """For each column of a rule the values that meet the rules with all else as it is."""
    legal: dict[str, list[int]] = {}
    for name in VARIED:
        if name in _varied(rule) and (name == "pp" or _may_vary(found, name)):
            candidates = _candidates(found, name)
            mask = _legal(found, {name: np.array(candidates, dtype=np.int64)}, rules, whole)
            legal[name] = [value for value, fine in zip(candidates, mask, strict=True) if fine]
    return {name: values for name, values in legal.items() if values}


def _reached(found: Known, of: Expression, legal: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The two nearest values of an expression that a legal value of one column makes it."""
    values: set[int] = set()
    for name, each in legal.items():
        values |= set(np.atleast_1d(evaluate(of, _following(found, {name: np.array(each, dtype=np.int64)}))).tolist())
    return nearest_two(int(evaluate(of, found.values)), values)


def _told(found: Known, legal: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Of many values those nearest to the given."""
    told = {}
    for name, values in legal.items():
        near = sorted(values, key=lambda value: (abs(math.log2(value / found.values[name])), value))
        told[name] = tuple(sorted(near[:MOST_TOLD]))
    return told


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

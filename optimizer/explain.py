"""Why nothing is legal or fits, and what would help: a minimal conflict of rules, the memory of the states, verified changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from ..cost_models.profile import Profile
from ..cost_models.step import CostModel
from ..search_spaces.choices import SP_IS_ON, SP_WHERE
from ..search_spaces.cluster import ClusterSpec
from ..search_spaces.conditions import all_of, any_of, equal, negation
from ..search_spaces.constraints import PeakTable, RuleModel, build_model, candidate_domains
from ..search_spaces.enumeration import Space
from ..search_spaces.errors import Infeasible
from ..search_spaces.flags import parse_clause
from ..search_spaces.layout import Problem
from ..search_spaces.limits import LENDING
from ..search_spaces.quantities import DERIVED, constants, usable_bytes, words_for
from ..search_spaces.rules import Rule, rules_for, rules_over
from .search import Search
from .solving import deterministic_solver

DETERMINISTIC_LIMIT = 30.0
"""CP-SAT's deterministic seconds for one decision; past them a rule is kept in the conflict."""

DEVICE_TRIES = 6
"""Device counts beyond the least that memory allows which are tried before giving up on suggesting one."""

TRY_WORK = 1 << 21
"""Work of a search for a layout of a changed problem, in works that are bounded, some ten seconds; a change that needs more is not
suggested."""

WEIGHT_BYTES = 2.0
"""Bytes of a weight on a device, in every precision that is trained in."""

Fits = Callable[[Problem], bool]


@dataclass(frozen=True)
class States:
    """Bytes that training the whole model needs on its devices, however they are divided; `least_activation_bytes` is per device.

    `weight_bytes` is the part of them that data parallelism copies unless the sharding says otherwise; `what` names the states.
    """

    state_bytes: float
    least_activation_bytes: float = 0.0
    weight_bytes: float = 0.0
    what: str = "weights, gradients and optimizer states"


@dataclass(frozen=True)
class Clash:
    """One rule of a conflict: what it asks for, and where that comes from."""

    rule: str
    sentence: str
    source: str


@dataclass(frozen=True)
class Relaxation:
    """A change after which there is a layout: found by solving the changed problem, not by guessing."""

    sentence: str
    problem: Problem


@dataclass(frozen=True)
class Conflict:
    """Why a problem has no layout. `rules` is a conflict that none of its members can be left out of (if `minimal`)."""

    summary: str
    rules: tuple[Clash, ...]
    memory: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]
    minimal: bool = True

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences for the user: the clashing rules, what memory says beyond the summary, and any one change that helps."""
        clashes = tuple(f"{clash.rule}: {clash.sentence} ({clash.source})." for clash in self.rules)
        helps = "; ".join(relaxation.sentence for relaxation in self.relaxations)
        memory = tuple(sentence for sentence in self.memory if sentence not in self.summary)
        return (*clashes, *memory, *((f"Any one of these helps: {helps}.",) if helps else ()))

    def error(self) -> Infeasible:
        return Infeasible(self.summary, self.reasons)


def explain_infeasible(problem: Problem, model: CostModel, space: Space) -> Infeasible:
    """The error for a problem whose search came back empty, with the changes that a search of their own confirms."""
    states, some_legal = training_states(problem), bool(space.legal)
    found = conflict(problem, states=states, fits=lambda changed: searched(changed, model.profile), some_legal=some_legal)
    if found.rules or some_legal:
        return found.error()
    return Infeasible(f"No layout is legal in the space that is searched: {space.words}.", found.reasons)


def searched(problem: Problem, profile: Profile) -> bool:
    """Whether a search of its own finds a layout of the problem that fits; none is looked for where the states alone do not."""
    if training_states(problem).state_bytes > problem.devices * usable_bytes(problem):
        return False
    lean = _with_leanest_schedule(problem)
    return Search(Space(lean), CostModel(lean, profile), top=1, work_limit=TRY_WORK).finds_any()


def _with_leanest_schedule(problem: Problem) -> Problem:
    """The problem with 1F1B, if the user left that free: no schedule that a search tries keeps fewer micro-batches, and interleaved
    chunks, which keep more, are most of what it would look at in vain.
    """
    fix = problem.workload.fix
    if "1f1b" not in problem.stack.schedules or {"schedule", "vpp"} & fix.keys():
        return problem
    return _with_workload(problem, {"fix": {**fix, "schedule": ("1f1b",)}})


def training_states(problem: Problem) -> States:
    """The states of a problem's model under its stack; those of an optimizer that may be offloaded are left out."""
    stack, parameters = problem.stack, problem.model.parameters(mtp=True)
    weights = WEIGHT_BYTES * parameters
    gradients = float(stack.gradient_bytes) * parameters
    if stack.optimizer_offload and problem.workload.fix.get("offload") != ("none",):
        return States(weights + gradients, weight_bytes=weights, what="weights and gradients, with the optimizer on the host,")
    return States(weights + gradients + stack.optimizer_bytes * parameters, weight_bytes=weights)


def conflict(
    problem: Problem,
    *,
    peaks: PeakTable | None = None,
    states: States | None = None,
    fits: Fits | None = None,
    some_legal: bool = False,
) -> Conflict:
    """Explains a problem for which nothing legal fits; `some_legal`: something is known to be legal, and memory is short.

    `peaks` gives the memory rule its table where the search has one. `fits` says whether a changed problem has a layout, by a real
    search; without it a change is verified against the rules alone, and none is suggested for a lack of memory.
    """
    rules = _binding(problem, memory=peaks is not None)
    core, minimal = ((), True) if some_legal else _minimal_core(problem, rules, peaks)
    short_of_memory = not core or any(rule.scope == "memory" for rule in core)
    memory = memory_statement(problem, states) if states is not None and short_of_memory else ()
    verified = fits or (None if short_of_memory else legal)
    relaxations = tuple(_relaxations(problem, core, states, short_of_memory, verified)) if verified else ()
    clashes = tuple(_clash(problem, rule) for rule in core)
    return Conflict(_summary(problem, core, memory), clashes, memory, relaxations, minimal)


def clashing(problem: Problem) -> tuple[str, ...]:
    """What leaves no layout of a problem's space legal, in words: what stays inside levels if that does it, else rules that clash.

    () where it is the space that has none, or to say it takes too long.
    """
    kept = [rule for rule in rules_for(problem) if rule.id.startswith("inside ")]
    alone = [rule.reason for rule in kept for _, without in _without_limits(problem, [rule]) if Space(without).legal]
    return tuple(alone) or tuple(_clash(problem, rule).sentence for rule in _minimal_core(problem, _binding(problem), None)[0])


def legal(problem: Problem) -> bool:
    """Whether some layout meets every rule, memory aside."""
    return _status(_model(problem, _binding(problem)).model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def least_devices(state_bytes: float, device_bytes: float, least_activation_bytes: float = 0.0) -> int:
    """Devices that hold the states beside the activations each of them needs; `device_bytes` is what one may fill. ValueError
    if a device does not even hold the activations."""
    room = device_bytes - least_activation_bytes
    if room <= 0:
        raise ValueError(f"{least_activation_bytes:.3g} bytes of activations do not fit into {device_bytes:.3g}")
    return math.ceil(state_bytes / room)


def memory_statement(problem: Problem, states: States) -> tuple[str, ...]:
    """What the whole model's states need against what the devices hold, and what the degrees that are fixed leave on each."""
    usable, devices = usable_bytes(problem), problem.devices
    activations = states.least_activation_bytes
    if activations >= usable:
        return (
            f"The activations of one micro-batch take at least {activations / 2**30:.1f} GiB of a device, more than the "
            f"{usable / 2**30:.1f} GiB usable.",
        )
    needed = least_devices(states.state_bytes, usable, activations)
    beside = f" beside {activations / 2**30:.1f} GiB of activations each" if activations else ""
    total = (
        f"{states.what.capitalize()} need {_amount(states.state_bytes)} however they are sharded; {devices} devices × "
        f"{usable / 2**30:.1f} GiB usable hold {_amount(devices * usable)}"
    )
    if needed > devices:
        return (f"{total}. They need at least {needed} devices{beside}.", *_weights_statement(problem, states, usable))
    return tuple(_weights_statement(problem, states, usable)) or (
        f"{states.what.capitalize()} alone need {_amount(states.state_bytes)} of {_amount(devices * usable)}, but with the "
        f"activations of micro-batches of {problem.workload.seq_len:,} tokens the fullest stage passes the "
        f"{usable / 2**30:.1f} GiB usable of a device under every cut that was tried.",
    )


def _weights_statement(problem: Problem, states: States, usable: float) -> Iterator[str]:
    """What tp and pp leave of a dense model's weights on a device when both are fixed and data parallelism copies them."""
    fix, c = problem.workload.fix, constants(problem)
    shards_weights = {"zero3", "hsdp"} & {name.partition(":")[0] for name in problem.stack.optimizer_shardings}
    if c["experts"] or shards_weights or not states.weight_bytes or not {"tp", "pp"} <= fix.keys():
        return
    tp, pp = (max(int(value) for value in fix[name]) for name in ("tp", "pp"))
    each = states.weight_bytes / (tp * pp)
    verdict = "more than" if each > usable else "of"
    yield (
        f"tp·pp = {tp}·{pp} = {tp * pp} leaves {_amount(each)} of weights on every device, {verdict} the "
        f"{_amount(usable)} ({usable / 2**30:.1f} GiB) usable; dp only copies them."
    )


def _amount(size: float) -> str:
    return f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{size / 1e9:.0f} GB"


SP_WITH_TP = Rule(
    "P005",
    f"SP is on {SP_WHERE}, unless it is fixed otherwise",
    "default",
    "arithmetic",
    any_of(all_of(SP_IS_ON, equal("sequence_parallel", 1)), all_of(negation(SP_IS_ON), equal("sequence_parallel", 0))),
)


def _binding(problem: Problem, memory: bool = False) -> tuple[Rule, ...]:
    """The rules of a problem with the default that the search itself keeps to."""
    rules = tuple(rule for rule in rules_for(problem) if memory or rule.scope != "memory")
    chosen = "sequence_parallel" in problem.workload.fix or not problem.stack.sequence_parallel
    return rules if chosen else (*rules, SP_WITH_TP)


def _model(
    problem: Problem, rules: Sequence[Rule], peaks: PeakTable | None = None, guarded: bool = False, among: Sequence[Rule] = ()
) -> RuleModel:
    """The model of some rules; `among`, if given, are those whose numbers its domains hold."""
    domains = candidate_domains(problem, among or rules)
    known = {*constants(problem), *domains, *DERIVED, *(("peak_bytes",) if peaks is not None else ())}
    return build_model(problem, rules_over(rules, known), domains, peaks, guarded)


def _solver() -> cp_model.CpSolver:
    return deterministic_solver(DETERMINISTIC_LIMIT)


def _status(model: cp_model.CpModel, solver: cp_model.CpSolver | None = None) -> cp_model.CpSolverStatus:
    """CP-SAT's verdict. ValueError if the model itself is malformed, which no input may cause."""
    status = (solver or _solver()).solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(model.validate())
    return status


def _minimal_core(problem: Problem, rules: Sequence[Rule], peaks: PeakTable | None) -> tuple[tuple[Rule, ...], bool]:
    """Rules that cannot hold together, none of which can be left out; () if the rules have a layout. And whether that is proved.

    By halves (QuickXplain: Junker, AAAI 2004, section 3): as many solves as the logarithm of the rules for each that is found. What
    the user said can be taken back and stays where it matters; conventions of the search itself go first.
    """
    unsure = []

    def clash(some: Sequence[Rule]) -> bool:
        status = _status(_model(problem, some, peaks, among=rules).model)
        unsure.extend([status] * (status == cp_model.UNKNOWN))
        return bool(status == cp_model.INFEASIBLE)

    def needed(beside: Sequence[Rule], added: bool, among: Sequence[Rule]) -> list[Rule]:
        """Of some rules those that clash beside others, which may do so by themselves if any has been `added`."""
        if added and clash(beside):
            return []
        if len(among) == 1:
            return list(among)
        kept, last = among[: len(among) // 2], among[len(among) // 2 :]
        second = needed([*beside, *kept], bool(kept), last)
        return [*needed([*beside, *second], bool(second), kept), *second]

    preferred = sorted(rules, key=lambda rule: (rule.scope != "user", rule.scope != "memory", rule.id.startswith("P"), rule.id))
    core = needed([], False, preferred) if clash(preferred) else []
    return tuple(rule for rule in rules if rule in core), not unsure


def _asks(problem: Problem, rule: Rule) -> str:
    return rule.condition.requirement(words_for(problem), constants(problem))


def _clash(problem: Problem, rule: Rule) -> Clash:
    if rule.scope in ("user", "stack"):
        return Clash(rule.id, rule.reason, rule.source)
    return Clash(rule.id, f"{_asks(problem, rule)}: {rule.reason}", rule.source)


def _summary(problem: Problem, core: Sequence[Rule], memory: Sequence[str]) -> str:
    if memory:
        return f"No layout fits. {memory[0]}"
    if not core:
        return "No layout fits: every legal one, its stages cut as the search cuts them, needs more memory than a device has."
    wanted = " and ".join(rule.reason for rule in core if rule.scope in ("user", "stack"))
    asked = " and ".join(_asks(problem, rule) for rule in core if rule.scope not in ("user", "stack"))
    if wanted and asked:
        return f"No layout is legal: {wanted}, but the rules ask that {asked}."
    if len(core) == 1:
        return f"No layout is legal: {wanted or asked}."
    return f"No layout is legal: {wanted or asked} cannot hold together."


def _relaxations(
    problem: Problem, core: Sequence[Rule], states: States | None, short_of_memory: bool, fits: Fits
) -> Iterator[Relaxation]:
    """Changes that lead to a layout, each verified."""
    for sentence, changed in _without_limits(problem, core):
        if fits(changed):
            yield Relaxation(sentence, changed)
    if short_of_memory:
        yield from _lighter_states(problem, fits)
    for count in _device_counts(problem, core, states, short_of_memory):
        changed = problem.model_copy(update={"devices": count})
        if fits(changed):
            yield Relaxation(f"{count} devices", changed)
            break
    if any({"global_batch", "seq_len"} & rule.names for rule in core):
        yield from _rounded(problem, fits)


def _without_limits(problem: Problem, core: Sequence[Rule]) -> Iterator[tuple[str, Problem]]:
    """The problem without each limit of the user's that is part of the conflict, or all of them where memory is it."""
    rules = [rule for rule in (core or rules_for(problem)) if rule.scope == "user"]
    for rule in rules:
        kind, _, rest = rule.id.partition(" ")
        workload = problem.workload
        if kind == "fix":
            changed = {"fix": {name: values for name, values in workload.fix.items() if name != rest}}
            yield f"{rest} other than {' or '.join(workload.fix[rest])}", _with_workload(problem, changed)
        elif kind == "forbid":
            kept = tuple(text for text in workload.forbid if text != rest)
            yield f"allowing {rest}", _with_workload(problem, {"forbid": kept})
        elif kind == "constraint":
            kept = tuple(text for text in workload.forbid if str(parse_clause(text).negated) != rest)
            yield f"leaving {rest} out", _with_workload(problem, {"forbid": kept})
        elif kind == "inside":
            level, dimension = rest.rsplit(" ", 1)
            yield (
                f"{dimension} groups outside one {level}",
                _with_workload(problem, {"inside": _outside(problem, level, dimension)}),
            )
    if any(rule.id in LENDING for rule in rules):
        yield "activations on the host, not on other stages' devices", _with_workload(problem, {"offload_to": "host"})


def _outside(problem: Problem, level: str, dimension: str) -> dict[str, tuple[str, ...]]:
    """`inside` without one dimension of one level, however both are called there."""
    names = {dimension, "sp"} if dimension == "tp" else {dimension}
    return {
        word: tuple(name for name in dimensions if name not in names or problem.cluster.level_name(word) != level)
        for word, dimensions in problem.workload.inside.items()
    }


def _with_workload(problem: Problem, changed: Mapping[str, object]) -> Problem:
    return problem.model_copy(update={"workload": problem.workload.model_copy(update=changed)})


def _lighter_states(problem: Problem, fits: Fits) -> Iterator[Relaxation]:
    """Gradients accumulated in two bytes, and the optimizer on the host."""
    if problem.stack.gradient_bytes == 4:
        changed = problem.model_copy(update={"stack": problem.stack.model_copy(update={"gradient_bytes": 2})})
        if fits(changed):
            where = f"gradient_bytes: 2 in a copy of the stack {problem.stack.name}"
            yield Relaxation(f"gradients accumulated in bf16 ({where})", changed)
    if problem.stack.optimizer_offload and problem.workload.fix.get("offload") not in (None, ("optimizer:1",)):
        fix = {**problem.workload.fix, "offload": ("optimizer:1",)}
        changed = _with_workload(problem, {"fix": fix})
        if fits(changed):
            yield Relaxation("optimizer offload", changed)


def _device_counts(problem: Problem, core: Sequence[Rule], states: States | None, short_of_memory: bool) -> Iterator[int]:
    """Larger device counts worth trying, in ascending order: what the rules' grid needs, or what the states need."""
    if not short_of_memory and not any("devices" in rule.names for rule in core):
        return
    least = _least_grid(problem) if not short_of_memory else problem.devices + 1
    if least is None:
        return
    if states is not None and short_of_memory and states.least_activation_bytes < usable_bytes(problem):
        least = max(least, least_devices(states.state_bytes, usable_bytes(problem), states.least_activation_bytes))
    limit = problem.cluster.max_devices or math.inf
    yield from (count for count in _round_counts(problem.cluster, least) if problem.devices < count <= limit)


def _round_counts(cluster: ClusterSpec, least: int) -> Iterable[int]:
    """`least`, then whole innermost units of more than one device, a quarter and a half more, then doublings."""
    unit = next(level.size for level in cluster.levels if level.size and level.size > 1)
    first = -(-least // unit) * unit
    power = 1 << (least - 1).bit_length()
    more = (-(-first * quarters // (4 * unit)) * unit for quarters in (5, 6))
    return sorted({least, first, *more, *(power << step for step in range(DEVICE_TRIES - 2))})


def _least_grid(problem: Problem) -> int | None:
    """The fewest devices on which the other rules have a layout; None if there is no such number."""
    wide = problem.model_copy(update={"devices": problem.cluster.max_devices or 64 * problem.devices})
    rules = tuple(rule for rule in _binding(wide) if not rule.id.startswith("inside "))
    built = _model(wide, rules)
    built.model.minimize(built.value("devices_used"))
    solver = _solver()
    if _status(built.model, solver) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return int(solver.objective_value)


def _rounded(problem: Problem, fits: Fits) -> Iterator[Relaxation]:
    """The next global batch and sequence length that the fixed degrees divide."""
    fix, workload = problem.workload.fix, problem.workload
    degree = {name: math.lcm(*(int(value) for value in fix.get(name, ("1",)))) for name in ("dp", "micro_batch", "pp", "cp", "tp")}
    batch_step, length_step = degree["dp"] * degree["micro_batch"] * degree["pp"], degree["cp"] * math.lcm(2, degree["tp"])
    for name, value, step in (("global_batch", workload.global_batch, batch_step), ("seq_len", workload.seq_len, length_step)):
        nearest = -(-value // step) * step
        if nearest != value:
            changed = _with_workload(problem, {name: nearest})
            if fits(changed):
                yield Relaxation(f"{name} {nearest}", changed)

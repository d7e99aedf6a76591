"""What the stack offers and what the user fixes, forbids or keeps inside a level, as rules like all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from math import prod

from .conditions import (
    Compare,
    Condition,
    Not,
    all_of,
    any_of,
    at_most,
    divides,
    equal,
    implies,
    lacks,
    more_than,
    one_of,
)
from .errors import InputError
from .expressions import Expression, product
from .flags import INTEGER_COLUMNS, Clause, Comparison, Joined, parse_clause, parse_fix, parse_inside
from .groups import DENSE, EXPERT
from .layout import (
    CP_TYPES,
    FLAG_RANK_ORDERS,
    NONE,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SHARDINGS,
    Problem,
    Recompute,
    parse_offload,
    parse_sharding,
)
from .quantities import PER_MILLE
from .rulebook import Rule
from .stack import Stack

LARGEST = 1 << 50
"""Of a product in a rule: masks in 64 bits and CP-SAT's variables both hold it exactly."""
LENDING = ("P012", "P013", "P014")
"""Rules of the user's who has stages lend each other memory."""
BATCHES = ("micro_batch", "num_microbatches")
VOCABULARIES = {
    "schedule": SCHEDULES,
    "cp_type": CP_TYPES,
    "rank_order": RANK_ORDERS,
    "sequence_parallel": ("false", "true"),
}


def stack_rules(stack: Stack) -> Iterable[Rule]:
    """What the stack offers of schedules, CP types, shardings, rank orders and modules to recompute."""
    offers = (
        ("schedule", SCHEDULES, stack.schedules),
        ("sharding", SHARDINGS, stack.optimizer_shardings),
        ("rank_order", RANK_ORDERS, stack.rank_orders),
    )
    for column, vocabulary, offered in offers:
        codes = tuple(vocabulary.index(name) for name in offered)
        if set(offered) != set(vocabulary):
            yield Rule(f"stack {column}", f"{stack.name} has {', '.join(offered)}", stack.source, "stack", one_of(column, codes))
    types = one_of("cp_type", tuple(CP_TYPES.index(name) for name in stack.cp_types))
    yield Rule(
        "stack cp_type", f"{stack.name} has {', '.join(stack.cp_types)}", stack.source, "stack", any_of(equal("cp", 1), types)
    )
    missing = [name for name in RECOMPUTE_MODULES if name not in stack.recompute_modules]
    if missing:
        bits = sum(1 << RECOMPUTE_MODULES.index(name) for name in missing)
        names = ", ".join(stack.recompute_modules) or "no module by itself"
        yield Rule("stack recompute", f"{stack.name} recomputes {names}", stack.source, "stack", lacks("recompute_modules", bits))


def user_rules(problem: Problem) -> Iterable[Rule]:
    """The workload's `fix`, `forbid` and `inside`. InputError names what does not exist."""
    workload = problem.workload
    fixed = workload.fix.get("offload")
    shares = workload.activation_shares if fixed is None else [parse_offload(choice)[1] for choice in fixed]
    if any(shares):  # said only where asked: they tie choices that are listed apart
        yield from offload_rules(problem.stack, problem.cluster.supernode, workload.offload_to)
    for column, values in parse_fix(workload.fix).items():
        yield Rule(f"fix {column}", f"{column} is fixed to {' or '.join(values)}", "workload.fix", "user", _fixed(column, values))
    for text in workload.forbid:
        clause = parse_clause(text)
        _refuse_the_huge(clause, text if text not in workload.demanded else str(clause.negated), problem)
        if text in workload.demanded:
            named, reason, source = f"constraint {clause.negated}", f"{clause.negated} is demanded", "a constraint of the workload"
        else:
            named, reason, source = f"forbid {text}", f"{text} is forbidden", "workload.forbid"
        yield Rule(named, reason, source, "user", Not(_clause(clause)))
    orders = {*problem.stack.rank_orders, *FLAG_RANK_ORDERS}
    for word, dimensions in parse_inside(workload.inside).items():
        level = _level(problem, word)
        for dimension in dimensions:
            fits = " that fits" if dimension.endswith("?") else ""
            reason = f"every {dimension.removesuffix('?')} group{fits} stays inside one {level}"
            yield Rule(f"inside {level} {dimension}", reason, "workload.inside", "user", _inside(level, dimension, orders))


def offload_rules(stack: Stack, supernode: str, to: str) -> Iterable[Rule]:
    """What binds activations that leave the device, to the host, the pool or other stages' devices."""
    if to == "peers":
        yield from _lending_rules(supernode, {*stack.rank_orders, *FLAG_RANK_ORDERS})
    elif stack.framework in ("megatron-lm", "megatron-bridge"):
        reason = "activations are either recomputed or offloaded"
        conflict = implies(more_than("activation_offload_per_mille", 0), equal("recompute_mode", NONE))
        yield Rule("C103b", reason, "Megatron-LM megatron/core/transformer/transformer_config.py", "stack", conflict)


def _lending_rules(supernode: str, orders: Set[str]) -> Iterable[Rule]:
    """Where stages may keep activations on each other's devices."""
    source, lent = "Kim et al., ICML 2023 (BPipe), section 3", more_than("activation_offload_per_mille", 0)
    falling = one_of("schedule", tuple(SCHEDULES.index(name) for name in ("1f1b", "interleaved")))
    reason = "early stages hold more micro-batches than late ones under 1F1B, interleaved or not"
    falls, several, close = LENDING
    yield Rule(falls, reason, source, "user", implies(lent, falling))
    yield Rule(several, "the only stage has none to lend to", source, "user", implies(lent, more_than("pp", 1)))
    near = implies(lent, _inside(supernode, "pp", orders))
    yield Rule(close, f"stages lend each other memory inside one {supernode}", source, "user", near)


def _level(problem: Problem, word: str) -> str:
    try:
        return problem.cluster.level_name(word)
    except KeyError as error:
        cluster = problem.cluster
        raise InputError(f"inside: {word!r} is not a level of {cluster.name}: {cluster.level_words}") from error


def _fixed(column: str, values: tuple[str, ...]) -> Condition:
    if column in INTEGER_COLUMNS:
        return one_of(column, tuple(int(value) for value in values))
    if column in VOCABULARIES:
        return one_of(column, tuple(VOCABULARIES[column].index(value) for value in values))
    return any_of(*(_COMPOSITES[column](value) for value in values)) if len(values) > 1 else _COMPOSITES[column](values[0])


def _sharding(text: str) -> Condition:
    code, size = parse_sharding(text)
    return all_of(equal("sharding", code), equal("hsdp", size)) if size else equal("sharding", code)


def _recompute(text: str) -> Condition:
    choice = Recompute.parse(text)
    return all_of(
        equal("recompute_mode", choice.mode),
        equal("recompute_modules", choice.modules),
        equal("recompute_layers", choice.layers),
    )


def _offload(text: str) -> Condition:
    optimizer, activations = (round(share * PER_MILLE) for share in parse_offload(text))
    return all_of(equal("optimizer_offload_per_mille", optimizer), equal("activation_offload_per_mille", activations))


_COMPOSITES: dict[str, Callable[[str], Condition]] = {
    "optimizer_sharding": _sharding,
    "recompute": _recompute,
    "offload": _offload,
}


def _clause(clause: Clause) -> Condition:
    if isinstance(clause, Joined):
        join = all_of if clause.word == "and" else any_of
        return join(*(_clause(part) for part in clause.parts))
    return _comparison(clause)


def _comparison(comparison: Comparison) -> Condition:
    name, value = comparison.left[0], comparison.right[0]
    if isinstance(name, str) and isinstance(value, str) and name not in INTEGER_COLUMNS:
        same = _fixed(name, (value,))
        return same if comparison.op == "==" else Not(same)
    return Compare(_side(comparison.left), comparison.op, _side(comparison.right))  # type: ignore[arg-type]


def _refuse_the_huge(clause: Clause, said: str, problem: Problem) -> None:
    """InputError where a product may grow beyond what is computed exactly."""
    if isinstance(clause, Joined):
        for part in clause.parts:
            _refuse_the_huge(part, said, problem)
        return
    for factors in (clause.left, clause.right):
        if _most(factors, problem) > LARGEST:
            shown = said if len(said) <= 60 else said[:57] + "…"
            raise InputError(
                f"workload: {shown!r} has a product that may exceed 2^{LARGEST.bit_length() - 1}, the most that is computed; "
                f"write fewer or smaller factors"
            )


def _most(factors: tuple[str | int, ...], problem: Problem) -> int:
    """An upper bound of a product: columns of one grid multiply to the devices at most, those of the batch to it."""
    counts = Counter(factor for factor in factors if isinstance(factor, str))
    most = prod(factor for factor in factors if isinstance(factor, int))
    devices, batch = problem.devices, problem.workload.global_batch
    for names, bound in ((DENSE, devices), (("ep", "etp", "edp"), devices), (BATCHES, batch), (("vpp",), problem.model.num_layers)):
        most *= bound ** max(counts[name] for name in names)
    return most


def _side(factors: tuple[str | int, ...]) -> Expression:
    return factors[0] if len(factors) == 1 else product(*factors)


def _inside(level: str, dimension: str, orders: Set[str]) -> Condition:
    """Groups of more than one rank lie in one unit: their blocks tile it, or the job has no second unit.

    Blocks start at multiples of their span, so a span that does not divide the unit straddles a boundary as soon as there is one.
    The span depends on what varies faster than the dimension: orders in which that is alike are said together.
    """
    unit, where_it_fits, dimension = f"unit_{level}", dimension.endswith("?"), dimension.removesuffix("?")
    alike: dict[Expression, list[int]] = {}
    for code, order in enumerate(RANK_ORDERS):
        if order in orders:
            alike.setdefault(_span(dimension, order), []).append(code)
    ways = []
    for span, codes in alike.items():
        within: Condition = divides(span, unit)
        if where_it_fits:
            within = any_of(more_than(span, unit), within)
        ways.append(within if len(alike) == 1 else all_of(one_of("rank_order", tuple(codes)), within))
    return implies(more_than(dimension, 1), any_of(*ways, at_most("devices_used", unit)))


def _span(dimension: str, order: str) -> Expression:
    """Ranks from the first to past the last of a group's block."""
    grid = DENSE if dimension in DENSE else EXPERT
    upto = order[: order.index(grid[dimension])].split("-")
    factors = [own for own, called in grid.items() if own == dimension or called in upto]
    if {"etp", "ep", "edp"} <= {*factors}:
        factors = ["tp", "cp", "dp", *(name for name in factors if name == "pp")]
    return factors[0] if len(factors) == 1 else product(*factors)

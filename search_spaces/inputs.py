"""The one place that turns a user's words into a Problem: catalog names, files and flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import cast

from .choices import SP_WHERE
from .cluster import ClusterSpec, Figure
from .documents import did_you_mean, to_record
from .errors import InputError
from .figure_words import assumed
from .flags import (
    Comparison,
    Values,
    parse_constraint,
    parse_fix,
    parse_forbid,
    parse_inside,
    refuse_unsupported,
)
from .layout import RANK_ORDERS, Problem
from .loading import (
    KINDS,
    Kind,
    Source,
    catalog_entry,
    catalog_names,
    load_accelerator,
    load_cluster,
    load_model,
    load_stack,
)
from .model import ModelSpec
from .releases import DATED, RELEASES, known_release, known_span
from .stack import MEGATRON_CORE, Stack
from .vocabulary import MAIN, NEWEST_WORDS
from .workload import Workload

__all__ = [
    "KINDS",
    "Comparison",
    "Kind",
    "build_problem",
    "catalog_entry",
    "catalog_names",
    "framework_stack",
    "load_accelerator",
    "load_cluster",
    "load_model",
    "load_stack",
    "parse_constraint",
    "parse_fix",
    "parse_forbid",
    "parse_inside",
    "refuse_unsupported",
    "stands_in",
]

MOST_DEVICES = 524_288  # beyond, the frames of a job no longer fit a search of seconds
OFFLOADED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the activations: what a search tries once it is said where they may go."""
LENT_SHARES = (0.0, 0.25, 0.5)
"""The same where they go to other stages' devices: with half of them two stages have as much."""
ETP_ASSUMPTION = "etp = 1: experts are spread over devices whole, not split by tensor parallelism"
SP_ASSUMPTION = f"sequence parallelism is on {SP_WHERE}"
OF_THE_SEARCH = (ETP_ASSUMPTION, SP_ASSUMPTION)
"""Assumptions on which layouts are looked at, of which one that is given may be none."""

API_ASSUMPTION = (
    "ranks are laid out through Megatron-Core's initialize_model_parallel(order=…), whose orders are more than flags say"
)


def framework_stack(framework: str, version: str | None = None) -> Stack:
    """The catalog's stack of a framework: that of the given version, or else the one that bears the framework's name.

    "main", or another word for what is newest, is the latter, called main. Of a release that has no stack of its own it is the
    newest before it, else the usual one, with its version.
    """
    stacks = [cast(Stack, catalog_entry("stacks", name)) for name in catalog_names("stacks")]
    mine = [stack for stack in stacks if stack.framework == framework]
    if not mine:
        known = sorted({stack.framework for stack in stacks})
        raise InputError(
            f"framework: {framework!r} is not known{did_you_mean(framework, known) or '; known are ' + ', '.join(known)}"
        )
    usual = next((stack for stack in mine if stack.name == framework), mine[0])
    if version is None:
        return usual
    if version.strip() in NEWEST_WORDS:
        return usual.model_copy(update={"version": MAIN})
    for stack in sorted(mine, key=lambda stack: stack is not usual):  # other stacks of the same version are variants of it
        if _same_version(stack.version, version):
            return stack
    return _standing_in(usual, mine, version).model_copy(update={"version": version})


def _standing_in(usual: Stack, stacks: Sequence[Stack], version: str) -> Stack:
    """Of a framework's stacks the one that a release without its own is taken for. InputError for a release that is not known."""
    framework, versions = usual.framework, sorted({stack.version for stack in stacks}, key=_numbers)
    asked = known_release(framework, version)
    if asked is None:
        between = f", and of releases {known_span(framework)}" if framework in RELEASES else ""
        raise InputError(f"framework-version: {framework} {version} has no stack; there is {', '.join(versions)}{between}")
    dated = ((known_release(framework, stack.version), stack) for stack in (usual, *stacks))
    before = [(number, stack) for number, stack in dated if number is not None and number <= asked]
    return max(before, key=itemgetter(0), default=(asked, usual))[1]  # the first of the newest: the usual one before its variants


def stands_in(stack: Stack, version: str | None) -> tuple[str, ...]:
    """That a release that is asked for is taken for the catalog's stack, where that is of another."""
    own = cast(Stack, catalog_entry("stacks", stack.name)).version if stack.name in catalog_names("stacks") else stack.version
    if stack.version != version or version in (own, MAIN):
        return ()
    return (f"{stack.framework} {version} is priced as the catalog's stack of {own}",)


def build_problem(
    model: Source | ModelSpec,
    cluster: Source | ClusterSpec,
    devices: int,
    global_batch: int,
    seq_len: int,
    stack: Source | Stack | None = None,
    precision: str = "bf16",
    *,
    framework: str | None = None,
    framework_version: str | None = None,
    fix: str | Mapping[str, Values] = "",
    forbid: str | Iterable[str] = (),
    constraint: str | Iterable[str] = (),
    inside: str | Iterable[str] | Mapping[str, Sequence[str]] = (),
    memory_margin: float | None = None,
    expert_imbalance: float | None = None,
    measured_imbalance: Mapping[int, float] | None = None,
    vocab_size: int | None = None,
    reserved_gib: float | None = None,
    offload_to: str | None = None,
    rank_order: str = "flags",
) -> Problem:
    """Everything that a layout is chosen for, checked, with what was assumed listed in words.

    Global batch in sequences, sequence length in tokens. `inside` may say "supernode" for whatever level a cluster names so.
    `measured_imbalance` says by ep how many tokens the fullest device receives over the mean, in place of one `expert_imbalance`.
    `rank_order` "all" adds to the stack's orders those that only Megatron-Core's Python API takes.
    `offload_to` "host" or "pool" also lets the search move activations there, where the stack can; "peers" has it lend those of
    early stages' to late ones, which no stack is known to do.
    Without a stack or framework the cluster's default stack is taken; etp is fixed to 1 for a MoE model unless `fix` says
    otherwise. InputError, in one sentence, for anything that is unknown, does not fit the cluster, or is a precision that
    accelerator or stack lack.
    """
    spec, machine = load_model(model), load_cluster(cluster)
    software = _with_orders(_chosen_stack(machine, stack, framework, framework_version), rank_order)
    check_devices(machine, devices)
    fixed, demanded = parse_fix(fix), parse_constraint(constraint)
    given = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "precision": precision,
        "fix": {"etp": ("1",), **fixed} if spec.is_moe else fixed,
        "forbid": tuple(dict.fromkeys((*parse_forbid(forbid), *demanded))),
        "demanded": demanded,
        "inside": _known_levels(machine, parse_inside(inside)),
        "memory_margin": _margin(memory_margin),
        **_imbalance(expert_imbalance, measured_imbalance or {}),
        "vocab_size": vocab_size,
        "reserved_gib": reserved_gib,
        "offload_to": offload_to,
        "activation_shares": _shares(offload_to, software),
    }
    workload = to_record(Workload, {key: value for key, value in given.items() if value is not None}, "workload")
    _check_reserve(machine, workload)
    _check_offload(machine, workload, framework)
    check_precision(machine, software, workload.precision)
    default_stack = stack is None and framework is None
    return Problem(
        model=spec,
        cluster=machine,
        devices=devices,
        stack=software,
        workload=workload,
        assumptions=(
            *([f"stack {software.name} ({software.framework} {software.version}), the default of {machine.name}"] * default_stack),
            *([ETP_ASSUMPTION] * (spec.is_moe and "etp" not in fixed)),
            *([API_ASSUMPTION] * (rank_order == "all")),
            *stands_in(software, framework_version),
            *([f"{software.framework} {MAIN} is taken to do what stack {software.name} does"] * (software.version == MAIN)),
            *_assumptions(spec, machine, software, workload),
        ),
    )


def _margin(share: float | None) -> dict[str, float] | None:
    """The workload's margin, the same for plans and single layouts; None where it is not given."""
    if share is None:
        return None
    if not 0 <= share < 1:
        raise InputError(f"workload: memory_margin = {share:g} must be at least 0 and less than 1")
    return {"fraction": share, "evaluated": share}


def _shares(offload_to: str | None, stack: Stack) -> tuple[float, ...] | None:
    """Of the activations, what a search lets leave the device; None where nothing does."""
    if offload_to == "peers":
        return LENT_SHARES
    return OFFLOADED_SHARES if offload_to is not None and stack.activation_offload else None


def _imbalance(one: float | None, measured: Mapping[int, float]) -> dict[str, object]:
    """The workload's figures: the largest that was measured, and what share of its excess each ep has."""
    if not measured:
        return {"expert_imbalance": one}
    if one is not None:
        raise InputError(f"expert_imbalance {one:g} is given beside measured loads; give one of the two")
    most = max(measured.values())
    shape = {ep: (value - 1.0) / (most - 1.0) for ep, value in measured.items()} if most > 1.0 else {}
    return {"expert_imbalance": most, "imbalance_shape": shape}


def _imbalance_words(workload: Workload) -> str:
    if not workload.imbalance_shape:
        return f"the fullest device receives {workload.expert_imbalance:g} times the mean of routed tokens"
    widest = max(workload.imbalance_shape)
    shown = [ep for ep in sorted(workload.imbalance_shape) if ep in (8, 16, 64, widest)]
    said = ", ".join(f"{workload.imbalance_at(ep):.3g} times at ep {ep}" for ep in shown)
    return f"the fullest device receives by measured loads, experts in their order, over the mean of routed tokens: {said}"


def _numbers(version: str) -> tuple[list[int], str]:
    """What versions are sorted by: 0.9 comes before 0.12."""
    return [int(part) for part in re.findall(r"\d+", version)], version


def _same_version(mine: str, asked: str) -> bool:
    """0.12.1 and 0.12 are one stack: versions agree as far as both go."""
    first, second = (re.search(r"\d+(?:\.\d+)*", version) for version in (mine, asked))  # core_v0.12.1 is 0.12.1
    if first is None or second is None or DATED.match(mine) or DATED.match(asked):
        return mine == asked
    return all(a == b for a, b in zip(first.group().split("."), second.group().split("."), strict=False))


def _chosen_stack(cluster: ClusterSpec, stack: Source | Stack | None, framework: str | None, version: str | None) -> Stack:
    if framework is None and version is not None:
        raise InputError(f"framework-version: {version} needs a framework beside it")
    if stack is None:
        return load_stack(cluster.default_stack) if framework is None else framework_stack(framework, version)
    chosen = load_stack(stack)
    if framework is not None and chosen.framework != framework:
        raise InputError(
            f"framework: {framework!r} is not that of stack {chosen.name!r}, {chosen.framework!r}; give one of the two"
        )
    if version is None or _same_version(chosen.version, version):
        return chosen
    if framework_stack(chosen.framework, version).name != chosen.name:
        raise InputError(
            f"framework-version: {version} is not that of stack {chosen.name!r}, {chosen.version}; give one of the two"
        )
    return chosen.model_copy(update={"version": version})


def _with_orders(stack: Stack, orders: str) -> Stack:
    """The stack with its own rank orders ("flags"), or with all that Megatron-Core's Python API takes ("all")."""
    if orders not in ("flags", "all"):
        raise InputError(f"rank-order = {orders!r}: must be flags (the stack's) or all (those of Megatron-Core's Python API)")
    if orders == "all" and stack.framework not in MEGATRON_CORE:
        raise InputError(f"rank-order = all: {stack.framework} lays ranks out by itself; {', '.join(MEGATRON_CORE)} can be told")
    return stack.model_copy(update={"rank_orders": RANK_ORDERS}) if orders == "all" else stack


def check_devices(cluster: ClusterSpec, devices: int) -> None:
    """InputError for a number of devices that is none, or more than a cluster has or a plan reaches."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise InputError(f"devices = {devices!r}: must be a whole number of at least 1")
    if cluster.max_devices is not None and devices > cluster.max_devices:
        raise InputError(f"devices = {devices}: {cluster.name} has at most {cluster.max_devices}")
    if devices > MOST_DEVICES:
        raise InputError(f"devices = {devices}: plans reach up to {MOST_DEVICES:,}")


def _check_reserve(cluster: ClusterSpec, workload: Workload) -> None:
    left = (cluster.accelerator.memory_bytes.value - cluster.context_bytes.value) * (1.0 - workload.memory_margin.fraction) / 2**30
    if workload.reserved_gib >= left:
        raise InputError(f"reserve = {workload.reserved_gib:g} GiB: a device of {cluster.name} has {left:.1f} GiB to give")


def _check_offload(cluster: ClusterSpec, workload: Workload, framework: str | None) -> None:
    if workload.offload_to == "peers" and framework is not None:
        raise InputError(f"offload-to = peers: {framework} has no option for it, nor has another framework; leave one of them out")
    if workload.offload_to == "pool" and cluster.pool is None:
        raise InputError(
            f"offload-to = pool: {cluster.name} has no pool of memory; host is what it has, or peers, the memory of later stages' "
            "devices"
        )


def check_precision(cluster: ClusterSpec, stack: Stack, precision: str) -> None:
    """Raises InputError for a precision that the accelerator or the stack lacks."""
    rates = cluster.accelerator.peak_flops
    if precision not in rates:
        raise InputError(f"precision = {precision!r}: {cluster.accelerator.name} has {', '.join(rates)}")
    if precision not in stack.precisions:
        raise InputError(f"precision = {precision!r}: stack {stack.name} has {', '.join(stack.precisions)}")


def _known_levels(cluster: ClusterSpec, inside: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """`inside` with each word replaced by the cluster's own name of the level."""
    known: dict[str, tuple[str, ...]] = {}
    for word, dimensions in inside.items():
        try:
            level = cluster.level_name(word)
        except KeyError as error:
            raise InputError(f"inside: {word!r} is not a level of {cluster.name}: {cluster.level_words}") from error
        known[level] = tuple(dict.fromkeys((*known.get(level, ()), *dimensions)))
    return known


def _assumptions(model: ModelSpec, cluster: ClusterSpec, stack: Stack, workload: Workload) -> Iterable[str]:
    """What was taken for granted, in words."""
    if workload.seq_len > model.max_position_embeddings:
        yield (
            f"seq_len {workload.seq_len} is beyond the {model.max_position_embeddings} positions of {model.name}: "
            "taken to be trained with extended positions"
        )
    if "sequence_parallel" not in workload.fix:
        has = stack.sequence_parallel
        yield SP_ASSUMPTION if has else f"no sequence parallelism: {stack.name} has none beside TP"
    if model.is_moe:
        yield _imbalance_words(workload)
    yield (
        f"Adam with {stack.optimizer_bytes:g} bytes of states and a {stack.gradient_bytes}-byte gradient per parameter, "
        f"all parameters trained, sequences of {workload.seq_len} tokens not packed"
    )
    if workload.offload_to == "peers":
        yield (
            "activations that late stages' devices hold for early ones (BPipe) are copied beside their passes over the supernode's "
            "links, every stage's as if it lent as much as the first; no framework that is exported to has an option for it"
        )
    if workload.reserved_gib:
        yield f"{workload.reserved_gib:g} GiB of every device are reserved and hold nothing of the plan"
    margin = workload.memory_margin
    yield (
        f"a plan fills a device to {100 * (1 - margin.fraction):.3g} % of the memory that the context leaves, a layout that is "
        f"given may fill {100 * (1 - margin.evaluated):.3g} %"
    )
    figures = list(_figures(cluster, workload))
    announced = [where for where, figure in figures if figure.grade == "announced"]
    if announced:
        yield f"{cluster.name} is announced hardware, not measured: {', '.join(announced)}"
    yield from assumed(figures)


def _figures(cluster: ClusterSpec, workload: Workload) -> Iterable[tuple[str, Figure]]:
    """Figures that a plan for this workload rests on, by name; offload's only if offload may be chosen."""
    device = cluster.accelerator
    yield f"{device.name} peak_flops.{workload.precision}", device.peak_flops[workload.precision]
    yield f"{device.name} memory_bytes", device.memory_bytes
    yield f"{device.name} memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s
    for level in cluster.levels:
        yield f"{cluster.name} {level.name} bandwidth_bytes_per_s", level.bandwidth_bytes_per_s
        yield f"{cluster.name} {level.name} latency_s", level.latency_s
    yield f"{cluster.name} context_bytes", cluster.context_bytes
    yield f"{cluster.name} communicator_bytes", cluster.communicator_bytes
    if cluster.compute_slowdown_beside_communication is not None:
        yield f"{cluster.name} compute_slowdown_beside_communication", cluster.compute_slowdown_beside_communication
    if workload.fix.get("offload") != ("none",):
        name, tier = ("pool", cluster.pool) if workload.offload_to == "pool" and cluster.pool else ("host_link", cluster.host_link)
        yield f"{cluster.name} {name} bandwidth_bytes_per_s", tier.bandwidth_bytes_per_s
        yield f"{cluster.name} {name} memory_bytes_per_device", tier.memory_bytes_per_device

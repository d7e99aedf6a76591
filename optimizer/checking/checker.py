"""An existing job judged: is it legal, does it fit, how good is it, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...cost_models.memory import GIB
from ...cost_models.schedules import group_size
from ...cost_models.step import CostModel
from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.errors import Infeasible
from ...search_spaces.inputs import OF_THE_SEARCH, load_cluster
from ...search_spaces.layout import Layout, Problem
from ...search_spaces.model import ModelSpec
from ...search_spaces.quantities import model_constants
from ...search_spaces.rules import violations
from ...search_spaces.stack import Stack
from ..evaluation import UNPRICEABLE, evaluate, price_layout
from ..leftover import over
from ..planner import plan
from ..readers import Finding, Job, read_job
from ..readers.options import may_shape_the_model
from ..readers.spelling import GROUPS, overlap_spelled
from ..readers.splits import uneven_remedy
from ..result import PricedLayout
from ..waterfall import changed_columns, term_bars, waterfall
from .advice import advice
from .changes import changes, nearest_words, proposed, told_together, with_shares
from .checked import Change, Checked
from .costing import SAME, Cost, Given, costed
from .job_layout import filled, given_of, in_known_words
from .known import Known
from .legality import Broken, broken_rules, not_judged
from .nearby import TRAINED, Changed, nearest
from .problem_of import search_limits
from .subject import Subject, on_ascend, subject_of
from .tolerance import Tolerance, judge

Progress = Callable[[str, float], None]
MENDED_BY_COLUMNS = frozenset({"C007", "C008", "C029", "C060", "C061", "C063a", "C071", "C072", "C023", "C040"})
"""Rules that a reader finds broken and that other degrees, stages or batches can mend."""
TOLD_BY_READERS = frozenset({"C029"})
"""Of these, what is told once, in the words of the configuration, with the values that the rule then finds legal."""
OF_THE_GRID = frozenset({"C007", "C008"})
"""What readers find of replicas that the devices leave: where it is of as many ranks as C001, that one tells it."""
SIZES = {
    "layers": "decoder layers:",
    "mtp_layers": "MTP layers:",
    "heads": "attention heads:",
    "kv_heads": "KV heads:",
    "mlp_width": "feed-forward width:",
    "experts": "experts:",
    "expert_width": "expert width:",
}
"""Figures of a model that a configuration and a model that is given beside it can disagree on."""


def check(
    config: str | Path | Job,
    model: str | Path | ModelSpec | None = None,
    cluster: str | Path | ClusterSpec | None = None,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    stack: str | Path | Stack | None = None,
    precision: str | None = None,
    framework: str | None = None,
    framework_version: str | None = None,
    form: str | None = None,
    variables: Mapping[str, str] | None = None,
    profile: str | None = None,
    memory_margin: float | None = None,
    expert_imbalance: float | None = None,
    vocab_size: int | None = None,
    checkpoint_save_time_s: float | None = None,
    best: bool = True,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Judges a job as far as what is known of it goes; what is given here stands in for what the configuration leaves out.

    Without a model, a cluster or a batch the rules that need none are judged, and the rest is said to need which input. `best`
    also looks for the best layout on the same devices. InputError for a configuration that cannot be read.
    """
    machine = load_cluster(cluster) if cluster is not None else None
    job = config if isinstance(config, Job) else read_job(config, form=form, devices=devices, variables=variables)
    if not isinstance(config, Job) and (job.format, stack, framework, framework_version) == ("megatron-lm", None, None, None):
        job = on_ascend(job, machine, config, devices, variables)
    job = filled(in_known_words(job), devices, global_batch, seq_len, precision, vocab_size)
    subject = subject_of(job, model, machine, stack, framework, framework_version)
    broken = _broken(subject)
    near = _near(subject, broken)
    cost = costed(subject, broken, Given(memory_margin, expert_imbalance, vocab_size, profile))
    problem, said = cost.problem, list(subject.said)
    beside = None if cost.priced is not None or problem is None else _nearest_priced(problem, near, profile)
    said += cost.said if best or cost.priced or beside else ()
    found = None
    if best and problem is not None:
        found = _best(problem, profile, time_limit_s, progress)
        taken = (*(each for each in problem.assumptions if each in OF_THE_SEARCH), *search_limits(problem))
        said += [f"in the search for the best layout, {each}" for each in taken]
    way = _way(subject, cost, cost.priced or beside, found, not broken and cost.fits)
    tolerance = _tolerance(subject, cost, checkpoint_save_time_s)
    broken += tolerance.broken if tolerance else ()
    said += tolerance.assumptions if tolerance else ()
    return Checked(
        **_named(subject),
        **_legality(subject, broken),
        problem=problem,
        ok=not broken and (cost.fit is None or cost.fits),
        nearest=tuple(nearest_words(subject.job, subject.layout, change, each) for change, each in near),
        nearest_columns=tuple(change for change, _ in near),
        advice=_advice(subject, problem, model),
        doubts=subject.job.doubts if model is None else (),
        unpriced=_unpriced(subject, cost, broken),
        fit=cost.fit,
        priced=cost.priced,
        nearest_priced=beside,
        fault_tolerance=tolerance.model_copy(update={"broken": ()}) if tolerance else None,
        assumptions=tuple(dict.fromkeys(said)),
        **way,
    )


def _named(subject: Subject) -> dict[str, Any]:
    """What the job is and runs on, and what of it could not be read or is not modelled."""
    job, stack, cluster = subject.job, subject.stack, subject.cluster
    used = subject.layout.devices
    return {
        "paraplan": version("paraplan"),
        "format": job.format,
        "framework": job.framework or (stack.framework if stack else None),
        "stack": stack.name if stack else None,
        "model": subject.model.name if subject.model else job.model_name,
        "cluster": cluster.name if cluster else None,
        "accelerator": cluster.accelerator.name if cluster else None,
        "devices": job.devices + job.left_out if job.devices is not None else None,
        "idle": max(0, (job.devices or 0) + job.left_out - used) if job.problem is not None else 0,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "unmodelled": job.unmodelled,
        "unknown": tuple(each for each in job.unknown if not may_shape_the_model(each)),
        "may_change_model": tuple(each for each in job.unknown if may_shape_the_model(each)),
        "unresolved": job.unresolved,
    }


def _broken(subject: Subject) -> list[Broken]:
    """All rules that the job breaks: what its reader found, and what its columns do."""
    found, known = subject.job.findings, subject.known
    told = list(_as_broken((*found, *subject.cut_wrong, *subject.beyond_device)))
    judged = [_with_group(each, subject) for each in _with_uneven(broken_rules(known), known, found)]
    again = {each.rule: each for each in judged if each.rule in TOLD_BY_READERS & {each.rule for each in told}}
    told = [
        each.model_copy(update={"legal": again[each.rule].legal, "alone": again[each.rule].alone}) if each.rule in again else each
        for each in told
    ]
    grid = next((_counted(each) for each in judged if each.rule == "C001"), "")
    told = [each for each in told if each.rule not in OF_THE_GRID or not grid.startswith(_counted(each))]
    return [*told, *(each for each in judged if each.rule not in again)]


def _counted(broken: Broken) -> str:
    """What a sentence says of the ranks that it counts, whatever it calls them."""
    return broken.sentence.partition(" = ")[2].removesuffix(".")


def _legality(subject: Subject, broken: Sequence[Broken]) -> dict[str, Any]:
    """The layout as it was read, and what rules say of it."""
    known, split = subject.known, subject.split
    return {
        "given": given_of(subject.job, subject.layout, subject.dp),
        "stages": split.counts if split else (),
        "mtp": split.beyond(known.values["layers"]) if split else (),
        "legal": not broken if known.judged or broken else None,
        "broken": tuple(broken),
        "judged": len(known.judged),
        "not_judged": (*not_judged(known), *subject.left_open),
    }


def _advice(subject: Subject, problem: Problem | None, model: object) -> tuple[str, ...]:
    """What is worth knowing though no rule is broken; `model` is what was given beside the configuration."""
    job = subject.job
    return (
        *_other_model(job, subject.model, model),
        *_other_supernode(job, subject.cluster),
        *(each.sentence for each in job.advice),
        *advice(job, subject.known, subject.cluster, problem, subject.layout),
    )


def _as_broken(findings: Iterable[Finding]) -> Iterator[Broken]:
    for each in findings:
        yield Broken(rule=each.rule, sentence=each.sentence, reason=each.reason, source=each.source, scope="framework")


def _with_uneven(broken: Sequence[Broken], known: Known, found: Sequence[Finding]) -> Iterator[Broken]:
    """The rules with, for an even split that does not come out, the uneven one that is nearest.

    The two chunks of a V are told of by their own rule, layers per chunk by the reader.
    """
    told = "C075b" in {each.rule for each in broken} or "C060" in {each.rule for each in found}
    for each in broken:
        if each.rule == "C060" and told:
            continue
        remedy = (
            uneven_remedy(known.values["layers"], known.values["pp"]) if each.rule == "C060" and known.values["vpp"] == 1 else ""
        )
        yield each.model_copy(update={"sentence": f"{each.sentence[:-1]}, as would {remedy}."}) if remedy else each


def _with_group(each: Broken, subject: Subject) -> Broken:
    """Interleaving that leaves micro-batches over, with the option that lets it run as it is."""
    known = subject.known.values
    option = GROUPS.get(subject.job.format)
    if each.rule != "C030a" or option is None or known["microbatch_group"]:
        return each
    group = group_size("interleaved", known["pp"], known["num_microbatches"])
    if group is None or group < known["pp"]:
        return each
    return each.model_copy(update={"sentence": f"{each.sentence[:-1]}, as would {option.format(group)}."})


def _near(subject: Subject, broken: Sequence[Broken]) -> list[tuple[Changed, Layout]]:
    """The nearest legal changes with the layouts that they make."""
    job, known, layers = subject.job, subject.known, subject.known.values.get("layers")
    near = _nearest(job, known, broken)
    return [(each, proposed(job, subject.layout, each, known.dp_follows, layers, subject.mtp_layers)) for each in near]


def _nearest(job: Job, known: Known, broken: Sequence[Broken]) -> list[Changed]:
    """Legal changes of columns; none where something else is wrong that no column mends."""
    if not broken or any(each.rule not in MENDED_BY_COLUMNS for each in job.findings):
        return []
    near = nearest(known, {each.rule for each in broken})
    only_steps = job.format == "deepspeed" and {each.rule for each in job.findings} == {"C029"} and len(broken) == 1
    return [{}, *near[:-1]] if only_steps and _steps(known.values) else near


def _steps(values: Mapping[str, int]) -> int | None:
    """Accumulation steps that make up the global batch; None where they are not whole."""
    if not {"global_batch", "micro_batch", "dp"} <= values.keys():
        return None
    each = values["micro_batch"] * values["dp"]
    return values["global_batch"] // each if values["global_batch"] % each == 0 else None


def _unpriced(subject: Subject, cost: Cost, broken: Sequence[Broken]) -> tuple[str, ...]:
    """Why there is no price: of rules that are told as broken their ids alone."""
    told = {each.rule for each in broken}
    found = violations(cost.problem, subject.layout) if cost.unpriced and cost.problem is not None else []
    again = {each.sentence: each.rule for each in found if each.rule in told}
    named = dict.fromkeys(again[said] for said in cost.unpriced if again.get(said) in UNPRICEABLE)
    rest = (said for said in cost.unpriced if said not in again)
    return tuple(dict.fromkeys((*([f"A layout that breaks {', '.join(named)} has no price."] if named else []), *rest)))


def _best(problem: Problem, profile: str | None, time_limit_s: float | None, progress: Progress | None) -> Any:
    """The best plan of the problem, or the Infeasible that says why there is none."""
    try:
        return plan(problem, profile=profile, top=1, spread=False, time_limit_s=time_limit_s, progress=progress)
    except Infeasible as error:
        return error


def _nearest_priced(problem: Problem, near: Sequence[tuple[Changed, Layout]], profile: str | None) -> PricedLayout | None:
    """The nearest legal layout of a job that has no price itself, priced; None where it changes the problem or has no price."""
    for change, layout in near:
        if change.keys() & TRAINED:
            continue
        try:
            return evaluate(problem, layout, profile=profile, replayed=False)[0]
        except Infeasible:
            continue
    return None


def _way(subject: Subject, cost: Cost, priced: PricedLayout | None, found: Any, fine: bool) -> dict[str, Any]:
    """The best layout and the way to it, in the format's words, largest gain first; none from a job that is `fine` and as fast."""
    job, layout, problem = subject.job, subject.layout, cost.problem
    if found is None or problem is None:
        return {}
    if isinstance(found, Infeasible):
        return {"best_status": " ".join((found.summary, *found.reasons))}
    best = over(found.plan, problem.devices + job.left_out)
    way: dict[str, Any] = {"best": best, "certificate": found.certificate, "best_status": found.certificate.status}
    if priced is None or cost.model is None:
        return {**way, "changes": changes(job, layout, best.layout, changed_columns(problem, layout, best.layout))}
    faster = 1.0 - best.step_time_s / priced.step_time_s
    if faster < SAME and fine:
        return {**way, "faster": faster}
    hidden, shown = _overlapped(job, cost.model, priced)
    walk = waterfall(cost.model, hidden, best)
    walk = walk.model_copy(update={"difference_s": best.step_time_s - priced.step_time_s, "terms": term_bars(priced, best)})
    # from the job itself, also where the walk starts from the nearest legal layout
    decided = (each.column for each in walk.decisions)
    columns = tuple(dict.fromkeys((*changed_columns(problem, layout, best.layout), *decided)))
    own = told_together(with_shares(changes(job, layout, best.layout, columns), walk.decisions))
    untold_last = cost.priced is not None  # from a job without a price the untold make it legal, and come first
    found_changes = sorted([*shown, *own], key=lambda change: ((change.seconds is None) == untold_last, change.seconds or 0.0))
    return {**way, "faster": faster, "waterfall": walk, "changes": tuple(found_changes)}


def _overlapped(job: Job, cost: CostModel, priced: PricedLayout) -> tuple[PricedLayout, list[Change]]:
    """The job with everything hidden behind compute that its stack can hide, and what switching that on brings."""
    stack = cost.problem.stack.overlap
    off = [name for name in job.exposed if getattr(stack, name) > 0]
    if not off:
        return priced, []
    hidden = price_layout(cost, priced.layout.model_copy(update={"overlap": {}}), simulated=False)
    before, after = (overlap_spelled(job.format, off, on) for on in (False, True))
    seconds, gib = hidden.step_time_s - priced.step_time_s, hidden.memory.peak_gib - priced.memory.peak_gib
    return hidden, [Change(column="overlap", before=before, after=after, seconds=seconds, peak_gib=gib)]


def _other_model(job: Job, model: ModelSpec | None, given: object) -> Iterator[str]:
    """Sizes of the configuration that the given model does not have."""
    if given is None or model is None:
        return
    theirs = model_constants(model)
    for name, value in job.sizes.items():
        unused = name == "mlp_width" and not theirs[name]  # every layer is a mixture of experts
        if name in SIZES and theirs[name] != value and not unused:
            yield f"{SIZES[name]} {value} in the configuration, {theirs[name]} in {model.name}: the latter is judged"


def _other_supernode(job: Job, cluster: ClusterSpec | None) -> Iterator[str]:
    """A job that names another supernode than the cluster has."""
    if cluster is None or job.supernode_size is None:
        return
    size = next(level.size for level in cluster.levels if level.name == cluster.supernode)
    if size != job.supernode_size:
        yield f"the job has {job.supernode_size} accelerators in a supernode, a {cluster.supernode} of {cluster.name} has {size}"


def _tolerance(subject: Subject, cost: Cost, save_s: float | None) -> Tolerance | None:
    """The job's fault tolerance judged; its states go to the host at the link's rate at the fastest."""
    job, priced, problem = subject.job, cost.priced, cost.problem
    if job.fault_tolerance is None:
        return None
    least = None
    if priced is not None and problem is not None:
        fullest = max(priced.memory.stages, key=lambda each: each.peak_gib).terms_gib
        states = fullest.get("weights", 0.0) + fullest.get("optimizer", 0.0)
        least = states * GIB / problem.cluster.host_link.bandwidth_bytes_per_s.value
    step_s, unpriced = priced.step_time_s if priced else None, cost.lacking or "a layout that has a price"
    return judge(job.fault_tolerance, subject.cluster, job.devices, step_s, save_s, least, unpriced)


__all__ = ["Change", "Checked", "check"]

"""An existing job judged: is it legal, does it fit, how good is it, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...cost_models.memory import GIB
from ...cost_models.profile import load_profile
from ...cost_models.step import CostModel
from ...search_spaces.choices import PRICED_CP_TYPES
from ...search_spaces.cluster import ClusterSpec
from ...search_spaces.degraded import spreads
from ...search_spaces.errors import Infeasible
from ...search_spaces.inputs import OF_THE_SEARCH, load_cluster, stands_in
from ...search_spaces.layout import Layout, Problem
from ...search_spaces.model import ModelSpec
from ...search_spaces.quantities import model_constants
from ...search_spaces.stack import Stack
from ..assumptions import assumptions
from ..evaluation import evaluate, price_layout, switched
from ..leftover import lies_as, on, over, words_of
from ..planner import plan
from ..readers import Finding, Job, read_job
from ..readers.options import may_shape_the_model
from ..readers.spelling import overlap_spelled
from ..readers.splits import uneven_remedy
from ..reports.wording import seconds
from ..result import PricedLayout
from ..waterfall import changed_columns, term_bars, waterfall
from .advice import advice
from .changes import changes, nearest_words, proposed, told_together, with_shares
from .checked import Change, Checked, Fit, Mended
from .job_layout import filled, given_of, laid_out, model_of, stack_of, with_asked_mtp, with_recipe
from .known import Known, known_of
from .legality import Broken, broken_rules, left_to_recipe, not_judged
from .mending import breaking_term, mends, recut
from .nearby import TRAINED, Changed, nearest
from .problem_of import levels_left_out, problem_of, search_limits
from .tolerance import Tolerance, judge

Progress = Callable[[str, float], None]
MENDED_BY_COLUMNS = frozenset({"C007", "C008", "C029", "C060", "C061", "C063a", "C071", "C072", "C023", "C040"})
"""Rules that a reader finds broken and that other degrees, stages or batches can mend."""
SAME = 1e-3
"""Share of the step below which another layout is not faster."""
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
        job = _on_ascend(job, machine, config, devices, variables)
    job = filled(job, devices, global_batch, seq_len, precision, vocab_size)
    machine = machine or (job.problem.cluster if job.problem else None)
    spec, said_of_mtp = with_asked_mtp(job, model_of(job, model))
    software = stack_of(job, machine, stack, framework, framework_version)
    if software is not None and software.framework == job.format:
        job = replace(job, version=software.version)
    job, left_open = with_recipe(job, spec)
    said_of_version = stands_in(software, framework_version) if software is not None else ()
    layout, dp, split, cut_wrong = laid_out(job, spec, software)
    known = known_of(job, layout, dp, split, spec, software, machine)
    known = replace(known, rules=tuple(rule for rule in known.rules if not left_open or rule.id != "C060"))
    unsettled = left_to_recipe(known, job)
    known = replace(known, rules=tuple(rule for rule in known.rules if rule.id not in unsettled))
    left_open += tuple(f"{rule} needs {', '.join(names)}, which recipe {job.recipe} may set" for rule, names in unsettled.items())
    broken = [*_as_broken((*job.findings, *cut_wrong)), *_with_uneven(broken_rules(known), known, job.findings)]
    near = _nearest(job, known, broken)
    mtp = (spec.mtp.layers if spec.mtp else 0) if spec is not None else job.sizes.get("mtp_layers", 0)
    made = [proposed(job, layout, change, known.dp_follows, known.values.get("layers"), mtp) for change in near]
    lacking = ", ".join(_missing(job, spec, machine, software))
    missing = [*_other_training(job), *([f"Memory and time need {lacking}."] if lacking else [])][:1]
    unpriced = [*missing, *_unpriceable(job, layout, dp, broken)]
    said = [*job.assumptions, *said_of_mtp, *said_of_version]
    problem = priced = found = curves = None
    if spec is not None and machine is not None and software is not None and not missing:
        problem = problem_of(job, spec, machine, software, memory_margin, expert_imbalance, vocab_size)
        said += levels_left_out(job.problem, machine)
        curves = load_profile(machine.accelerator.name, profile)
        said += [each for each in assumptions(problem, curves, profile) if each not in (*said, *OF_THE_SEARCH)]
    if problem is not None and not unpriced:
        try:
            problem, priced, lies = _where_fastest(problem, layout, profile)
            priced = over(priced, problem.devices + job.left_out)
            said += lies or lies_as(problem, job.problem)
        except Infeasible as error:
            unpriced += error.reasons or (error.summary,)
    cost = CostModel(problem, curves) if problem is not None and curves is not None else None
    fit = _fit(job, CostModel(switched(problem, layout), curves), priced) if problem and curves and priced else None
    if best and problem is not None:
        found = _best(problem, profile, time_limit_s, progress)
        taken = (*(each for each in problem.assumptions if each in OF_THE_SEARCH), *search_limits(problem))
        said += [f"in the search for the best layout, {each}" for each in taken]
    start = priced
    if priced is None and problem is not None:
        start = _nearest_priced(problem, near, made, profile)
    fine = not broken and fit is not None and fit.over_gib <= 0
    way = _way(job, problem, cost, start, layout, found, fine)
    tolerance = _tolerance(job, machine, priced, problem, checkpoint_save_time_s, lacking or "a layout that has a price")
    broken += tolerance.broken if tolerance else ()
    said += tolerance.assumptions if tolerance else ()
    legal = not broken if known.judged or broken else None
    return Checked(
        paraplan=version("paraplan"),
        format=job.format,
        framework=job.framework or (software.framework if software else None),
        stack=software.name if software else None,
        model=spec.name if spec else job.model_name,
        cluster=machine.name if machine else None,
        accelerator=machine.accelerator.name if machine else None,
        devices=job.devices + job.left_out if job.devices is not None else None,
        idle=max(0, (job.devices or 0) + job.left_out - layout.devices) if job.problem is not None else 0,
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        problem=problem,
        given=given_of(job, layout, dp),
        stages=split.counts if split else (),
        mtp=split.beyond(known.values["layers"]) if split else (),
        ok=not broken and (fit is None or fit.over_gib <= 0),
        legal=legal,
        broken=tuple(broken),
        nearest=tuple(nearest_words(job, layout, change, each) for change, each in zip(near, made, strict=True)),
        nearest_columns=tuple(near),
        advice=(
            *_other_model(job, spec, model),
            *_other_supernode(job, machine),
            *(each.sentence for each in job.advice),
            *advice(job, known, machine, problem, layout),
        ),
        judged=len(known.judged),
        not_judged=(*not_judged(known), *left_open),
        doubts=job.doubts if model is None else (),
        unmodelled=job.unmodelled,
        unpriced=tuple(dict.fromkeys(unpriced)),
        fit=fit,
        priced=priced,
        nearest_priced=start if priced is None else None,
        fault_tolerance=tolerance.model_copy(update={"broken": ()}) if tolerance else None,
        assumptions=tuple(dict.fromkeys(said)),
        unknown=tuple(each for each in job.unknown if not may_shape_the_model(each)),
        may_change_model=tuple(each for each in job.unknown if may_shape_the_model(each)),
        unresolved=job.unresolved,
        **way,
    )


def _on_ascend(
    job: Job, machine: ClusterSpec | None, config: str | Path, devices: int | None, variables: Mapping[str, str] | None
) -> Job:
    """A job of Megatron-LM as what runs its script there reads it: Megatron-LM itself runs on GPUs. ms-swift runs on both."""
    if machine is None or machine.accelerator.vendor != "huawei" or job.stack is not None:
        return job
    said = f"run by MindSpeed-LLM: Megatron-LM itself does not run on {machine.accelerator.name}"
    again = read_job(config, form="mindspeed-llm", devices=devices, variables=variables)
    return replace(again, assumptions=(said, *again.assumptions))


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


# --- what it costs -----------------------------------------------------------------------------------------------------------


def _other_training(job: Job) -> Iterator[str]:
    """Training that no price is for, in one sentence."""
    if job.unmodelled:
        asked = " and ".join(job.unmodelled)
        yield f"Memory and time: the job {asked}; what is modelled trains every parameter on whole sequences."


def _missing(job: Job, model: ModelSpec | None, cluster: ClusterSpec | None, stack: Stack | None) -> list[str]:
    """What is not known and a price needs."""
    why = f"; {job.no_model}" if job.no_model else ""
    inputs = {
        f"a model (MODEL{', or --vocab-size for the one that it describes' if job.with_vocabulary else why})": model,
        "a cluster (--cluster)": cluster,
        "a framework (--framework or --stack)": stack,
        "the number of devices (--devices)": job.devices,
        "the global batch (--global-batch)": job.global_batch,
        "the sequence length (--seq-len)": job.seq_len,
    }
    return [name for name, value in inputs.items() if value is None]


def _unpriceable(job: Job, layout: Layout, dp: int | None, broken: Sequence[Broken]) -> Iterator[str]:
    """What leaves nothing to price, in sentences."""
    if layout.cp > 1 and layout.cp_type not in PRICED_CP_TYPES:
        yield f"cp_type {layout.cp_type} is not priced; {', '.join(PRICED_CP_TYPES)} are."
    if job.devices is not None and dp is None:
        yield "A layout that does not divide its devices has no price."
    elif job.devices is not None and layout.devices > job.devices:
        yield f"A layout of {layout.devices:,} devices has no price on {job.devices:,}."
    elif any(each.rule in ("C060", "C061", "C062", "C063", "C063a", "C071", "C072", "C074", "C075b") for each in broken):
        yield "A layout whose stages cannot be cut has no price."
    elif any(each.rule == "C002" for each in broken):
        yield "A layout whose expert grid does not fit its devices has no price."


def _fit(job: Job, cost: CostModel, priced: PricedLayout) -> Fit:
    """Whether the fullest stage fits, and what mends it where that is not sure."""
    memory = priced.memory
    stage, term, term_gib = breaking_term(priced)
    free = memory.capacity_gib - cost.problem.cluster.context_bytes.value / GIB
    helps = mends(cost, priced) if memory.peak_gib > free else ()
    if job.split.free:
        helps = tuple(mend for mend in (recut(cost, priced, mend) for mend in helps) if mend.peak_gib <= free)
    return Fit(
        verdict=memory.verdict,
        stage=stage,
        peak_gib=memory.peak_gib,
        free_gib=free,
        over_gib=memory.peak_gib - free,
        term=term,
        term_gib=term_gib,
        mends=tuple(
            Mended(
                changes=_words(changes(job, priced.layout, mend.layout, mend.columns)),
                peak_gib=mend.peak_gib,
                step_time_s=mend.step_time_s,
                slower=mend.slower,
                verdict="fits" if mend.surely else "unsure",
            )
            for mend in helps
        ),
    )


def _words(found: Iterable[Change]) -> tuple[tuple[str, str], ...]:
    return tuple((each.before, each.after) for each in found)


def _where_fastest(problem: Problem, layout: Layout, profile: str | None) -> tuple[Problem, PricedLayout, tuple[str, ...]]:
    """The problem with its devices as it says they lie, or as the layout is fastest; its price, and what that takes for granted."""
    said = [problem] if problem.per_supernode else []
    lying = said or [on(problem, *each) for each in spreads(problem.cluster, problem.devices) if each[0] == problem.devices]
    priced = [evaluate(each, layout, profile=profile, replayed=False)[0] for each in lying]
    steps = [each.step_time_s for each in priced]
    place = steps.index(min(steps))
    if steps[place] > steps[0] * (1.0 - SAME):
        return problem, priced[0], ()
    own, usual = (words_of(each) for each in (lying[place], lying[0]))
    return lying[place], priced[place], (f"the devices are {own}: with {usual} the job takes {seconds(steps[0])}",)


def _best(problem: Problem, profile: str | None, time_limit_s: float | None, progress: Progress | None) -> Any:
    """The best plan of the problem, or the Infeasible that says why there is none."""
    try:
        return plan(problem, profile=profile, top=1, spread=False, time_limit_s=time_limit_s, progress=progress)
    except Infeasible as error:
        return error


def _nearest_priced(problem: Problem, near: Sequence[Changed], made: Sequence[Layout], profile: str | None) -> PricedLayout | None:
    """The nearest legal layout of a job that has no price itself, priced; None where it changes the problem or has no price."""
    for change, layout in zip(near, made, strict=True):
        if change.keys() & TRAINED:
            continue
        try:
            return evaluate(problem, layout, profile=profile, replayed=False)[0]
        except Infeasible:
            continue
    return None


def _way(
    job: Job,
    problem: Problem | None,
    cost: CostModel | None,
    priced: PricedLayout | None,
    layout: Layout,
    found: Any,
    fine: bool,
) -> dict[str, Any]:
    """The best layout and the way to it, in the format's words, largest gain first; none from a job that is `fine` and as fast."""
    if found is None or problem is None:
        return {}
    if isinstance(found, Infeasible):
        return {"best_status": " ".join((found.summary, *found.reasons))}
    best = over(found.plan, problem.devices + job.left_out)
    way: dict[str, Any] = {"best": best, "certificate": found.certificate, "best_status": found.certificate.status}
    if priced is None or cost is None:
        return {**way, "changes": changes(job, layout, best.layout, changed_columns(problem, layout, best.layout))}
    faster = 1.0 - best.step_time_s / priced.step_time_s
    if faster < SAME and fine:
        return {**way, "faster": faster}
    hidden, shown = _overlapped(job, problem, cost, priced)
    walk = waterfall(cost, hidden, best)
    walk = walk.model_copy(update={"difference_s": best.step_time_s - priced.step_time_s, "terms": term_bars(priced, best)})
    # from the job itself, also where the walk starts from the nearest legal layout
    decided = (each.column for each in walk.decisions)
    columns = tuple(dict.fromkeys((*changed_columns(problem, layout, best.layout), *decided)))
    own = told_together(with_shares(changes(job, layout, best.layout, columns), walk.decisions))
    found_changes = sorted([*shown, *own], key=lambda change: (change.seconds is None, change.seconds or 0.0))
    return {**way, "faster": faster, "waterfall": walk, "changes": tuple(found_changes)}


def _overlapped(job: Job, problem: Problem, cost: CostModel, priced: PricedLayout) -> tuple[PricedLayout, list[Change]]:
    """The job with everything hidden behind compute that its stack can hide, and what switching that on brings."""
    stack = problem.stack.overlap
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


def _tolerance(
    job: Job,
    cluster: ClusterSpec | None,
    priced: PricedLayout | None,
    problem: Problem | None,
    save_s: float | None,
    unpriced: str,
) -> Tolerance | None:
    if job.fault_tolerance is None:
        return None
    least = None
    if priced is not None and problem is not None:
        fullest = max(priced.memory.stages, key=lambda each: each.peak_gib).terms_gib
        states = fullest.get("weights", 0.0) + fullest.get("optimizer", 0.0)
        least = states * GIB / problem.cluster.host_link.bandwidth_bytes_per_s.value
    return judge(job.fault_tolerance, cluster, job.devices, priced.step_time_s if priced else None, save_s, least, unpriced)


__all__ = ["Change", "Checked", "Fit", "Mended", "check"]

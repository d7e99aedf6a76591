"""What a job costs, as far as it can be priced: its problem, its step and memory, whether it fits, and why it has no price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...cost_models.memory import GIB
from ...cost_models.profile import load_profile
from ...cost_models.step import CostModel
from ...search_spaces.choices import PRICED_CP_TYPES
from ...search_spaces.degraded import spreads
from ...search_spaces.errors import Infeasible
from ...search_spaces.inputs import OF_THE_SEARCH
from ...search_spaces.layout import Layout, Problem
from ..assumptions import assumptions
from ..evaluation import evaluate, switched
from ..leftover import lies_as, on, over, words_of
from ..readers import Job
from ..reports.wording import seconds
from ..result import PricedLayout
from .changes import changes
from .checked import Change, Fit, Mended
from .legality import Broken
from .mending import breaking_term, mends, recut
from .problem_of import levels_left_out, problem_of
from .subject import Subject

SAME = 1e-3
"""Share of the step below which another layout is not faster."""


@dataclass(frozen=True)
class Given:
    """What a price takes that a job may not say: memory left free, experts' imbalance, vocabulary, kernels' profile."""

    memory_margin: float | None
    expert_imbalance: float | None
    vocab_size: int | None
    profile: str | None


@dataclass(frozen=True)
class Cost:
    """The problem a job solves with its price, None where inputs are lacking or nothing can be priced; `unpriced` says why.

    `lacking`: the inputs, in one phrase; `said`: what the price takes for granted.
    """

    lacking: str
    unpriced: tuple[str, ...]
    said: tuple[str, ...] = ()
    problem: Problem | None = None
    model: CostModel | None = None
    priced: PricedLayout | None = None
    fit: Fit | None = None

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.fit is not None and self.fit.over_gib <= 0


def costed(subject: Subject, broken: Sequence[Broken], given: Given) -> Cost:
    """What the job costs, with its devices where it is fastest."""
    job, layout = subject.job, subject.layout
    lacking = ", ".join(_missing(subject))
    missing = (*_other_training(job), *([f"Memory and time need {lacking}."] if lacking else []))[:1]
    unpriced = (*missing, *_unpriceable(job, layout, subject.dp, broken))
    if subject.without_units:
        return Cost(lacking, (*unpriced, f"GEMMs in {job.precision} have no rate on the device."))
    if missing or subject.model is None or subject.cluster is None or subject.stack is None:
        return Cost(lacking, unpriced)
    inputs = (subject.model, subject.cluster, subject.stack)
    problem = problem_of(job, *inputs, given.memory_margin, given.expert_imbalance, given.vocab_size)
    curves = load_profile(subject.cluster.accelerator.priced_as, given.profile)
    taken = (each for each in assumptions(problem, curves, given.profile) if each not in OF_THE_SEARCH)
    said = (*levels_left_out(job.problem, subject.cluster), *taken)
    if unpriced:
        return Cost(lacking, unpriced, said, problem, CostModel(problem, curves))
    try:
        lying, priced, lies = _where_fastest(problem, layout, given.profile)
    except Infeasible as error:
        return Cost(lacking, error.reasons or (error.summary,), said, problem, CostModel(problem, curves))
    priced = over(priced, lying.devices + job.left_out)
    fit = _fit(job, CostModel(switched(lying, layout), curves), priced)
    return Cost(lacking, (), (*said, *(lies or lies_as(lying, job.problem))), lying, CostModel(lying, curves), priced, fit)


def _other_training(job: Job) -> Iterator[str]:
    """Training that no price is for, in one sentence."""
    if job.unmodelled:
        asked = " and ".join(job.unmodelled)
        yield f"Memory and time: the job {asked}; what is modelled trains every parameter on whole sequences."


def _missing(subject: Subject) -> list[str]:
    """What is not known and a price needs."""
    job = subject.job
    why = f"; {job.no_model}" if job.no_model else ""
    inputs = {
        f"a model (MODEL{', or --vocab-size for the one that it describes' if job.with_vocabulary else why})": subject.model,
        "a cluster (--cluster)": subject.cluster,
        "a framework (--framework or --stack)": subject.stack,
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
    elif any(each.rule == "C029" for each in broken):
        yield "A layout whose micro-batches do not make up the global batch has no price."
    elif any(each.rule == "C002" for each in broken):
        yield "A layout whose expert grid does not fit its devices has no price."


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


def _fit(job: Job, cost: CostModel, priced: PricedLayout) -> Fit:
    """Whether the fullest stage fits, and what mends it where that is not sure."""
    memory = priced.memory
    stage, term, term_gib = breaking_term(priced)
    free = memory.capacity_gib - cost.problem.cluster.context_bytes.value / GIB
    helps = mends(cost, priced) if memory.verdict != "fits" else ()
    if job.split.free:
        recuts = (recut(cost, priced, mend) for mend in helps if "stages" not in mend.columns)
        helps = tuple(mend for mend in recuts if mend.surely or mend.peak_gib <= free < memory.peak_gib)
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

"""How far predictions are off, whether they rank layouts, and whether they know what fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..search_spaces.layout import Floats

if TYPE_CHECKING:
    from .validation import Outcome

SMALLEST_GROUP = 4
"""Layouts that a group must have measured for its ranking to count."""
DRAWS = 2000  # of groups, for the interval of a median
SAME = 1e-9  # relative difference below which two predictions are a tie


@dataclass(frozen=True)
class Errors:
    """Of predictions over measured values: rows, median and 90th percentile of |error|, median log ratio."""

    rows: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True)
class Ranking:
    """Within groups: median and least Spearman correlation; regret is measured time of our pick over the best, less one.

    `random_mean` is the mean regret of a pick at random, which is what a constant MFU makes: it ties all layouts of a group.
    """

    groups: int
    spearman_median: float | None
    spearman_least: float | None
    regret_median: float
    regret_mean: float
    regret_largest: float
    random_mean: float


@dataclass(frozen=True)
class Ended:
    """Out of memory as predicted, among `rows` that say whether they ran: how many did not (`oom`), how many were predicted not to.

    `precision` of those predicted, `recall` of those that ran out, `false_alarms` the share of those that ran that were predicted
    not to; `unsure` the share of verdicts that say so, `sure_accuracy` how many of the others are right. None where there is none.
    """

    rows: int
    oom: int
    predicted: int
    precision: float | None
    recall: float | None
    false_alarms: float | None
    unsure: float | None
    sure_accuracy: float | None


@dataclass(frozen=True)
class Memory(Ended):
    """The same, and errors of the peak."""

    peak: Errors | None


@dataclass(frozen=True)
class Statistics:
    """One slice: step time, its ranking, memory, and the step time of two baselines: constant MFU, and nothing fitted."""

    time: Errors | None
    ranking: Ranking | None
    memory: Memory
    constant_mfu: Errors | None
    documented: Errors | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def statistics(outcomes: Sequence[Outcome]) -> Statistics:
    """Statistics of outcomes, whatever they have in common."""
    timed = [o for o in outcomes if o.measured_step_time_s is not None and o.predicted_step_time_s is not None]
    return Statistics(
        errors([(o.predicted_step_time_s, o.measured_step_time_s) for o in timed]),
        ranking(timed),
        _memory(outcomes),
        errors([(o.constant_mfu_s, o.measured_step_time_s) for o in timed]),
        errors([(o.documented_s, o.measured_step_time_s) for o in timed]),
    )


def errors(pairs: Sequence[tuple[float | None, float | None]]) -> Errors | None:
    """Errors of (predicted, measured) pairs; None without any."""
    known = np.array([(p, m) for p, m in pairs if p is not None and m is not None], dtype=np.float64)
    if not len(known):
        return None
    ratio = known[:, 0] / known[:, 1]
    size = np.abs(ratio - 1.0)
    return Errors(len(known), float(np.median(size)), float(np.percentile(size, 90)), float(np.median(np.log(ratio))))


def median_interval(outcomes: Sequence[Outcome], draws: int = DRAWS, peaks: bool = False) -> tuple[float, float] | None:
    """Where the median |error| of step times, or of `peaks`, would lie with other rows like these, nine times in ten; None below
    two groups.

    A bootstrap of whole groups, since rows of one are off alike (Davison and Hinkley 1997, section 3.8), by its percentiles.
    """
    pairs = [
        (o, o.predicted_peak_gib if peaks else o.predicted_step_time_s, o.measured_peak_gib if peaks else o.measured_step_time_s)
        for o in outcomes
    ]
    known = [(o, predicted / measured) for o, predicted, measured in pairs if predicted and measured]
    groups, which = np.unique([o.run.text("group") or o.run.id for o, _ in known], return_inverse=True)
    if len(groups) < 2:
        return None
    size = np.abs(np.array([ratio for _, ratio in known]) - 1.0)
    order = np.argsort(size)
    taken = np.random.default_rng(0).multinomial(len(groups), np.full(len(groups), 1.0 / len(groups)), size=draws)
    below = np.cumsum(taken[:, which[order]], axis=1)
    medians = size[order][np.argmax(2 * below >= below[:, -1:], axis=1)]
    return float(np.quantile(medians, 0.05)), float(np.quantile(medians, 0.95))


def ranking(outcomes: Sequence[Outcome]) -> Ranking | None:
    """Ranking within groups of the same problem and software; None where no group is large enough."""
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for o in outcomes:
        if key := ranked_within(o):
            groups[key].append(o)
    regrets, correlations, random = [], [], []
    for members in groups.values():
        if len(members) >= SMALLEST_GROUP:
            ours = np.array([o.predicted_step_time_s for o in members], dtype=np.float64)
            measured = np.array([o.measured_step_time_s for o in members], dtype=np.float64)
            regrets.append(regret(ours, measured))
            correlations.append(spearman(ours, measured))
            random.append(float(measured.mean() / measured.min() - 1.0))
    if not regrets:
        return None
    known = [value for value in correlations if value is not None]
    return Ranking(
        len(regrets),
        float(np.median(known)) if known else None,
        min(known) if known else None,
        float(np.median(regrets)),
        float(np.mean(regrets)),
        max(regrets),
        float(np.mean(random)),
    )


RANKED_WITHIN = ("family", "group", "precision", "global_batch", "software", "source_version")


def ranked_within(outcome: Outcome) -> tuple[str, ...]:
    """What the layouts have in common that an outcome is ranked among; empty where its table puts it in no group.

    In a table without such a column it is what is priced, whatever its layout: a problem, by its row's own software.
    """
    run, job = outcome.run, outcome.job
    if "group" in run.cells:
        return tuple(run.text(name) for name in RANKED_WITHIN) if run.text("group") else ()
    if job is None:
        return ()
    problem = job.problem
    sizes = (problem.devices, problem.workload.seq_len, problem.workload.global_batch)
    names = (problem.model.name, problem.cluster.name, job.accelerator, job.gemm_curve, problem.workload.precision)
    return (run.family, *names, *map(str, sizes), problem.stack.name, run.text("software").lower())


def regret(predicted: Floats, measured: Floats) -> float:
    """Measured time of the layout predicted fastest over the best measured, less one; a tie is the mean of those tied."""
    picked = predicted <= predicted.min() * (1.0 + SAME)
    return float(measured[picked].mean() / measured.min() - 1.0)


def spearman(first: Floats, second: Floats) -> float | None:
    """Rank correlation with average ranks for ties; None where one side is all ties."""
    a, b = average_ranks(first), average_ranks(second)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def average_ranks(values: Floats) -> Floats:
    """Ranks from 1; values within SAME of each other share the mean of theirs."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(ordered) > SAME * np.abs(ordered[1:])]))
    counts = np.diff(np.append(starts, len(values)))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat(starts + (counts + 1) / 2.0, counts)
    return ranks


def ended(outcomes: Sequence[Outcome]) -> Ended:
    """How well it is told whether runs end for want of memory; rows that failed otherwise do not say."""
    judged = [o for o in outcomes if o.predicted_oom is not None and o.run.status in ("ok", "oom")]
    truth = np.array([o.run.status == "oom" for o in judged], dtype=bool)
    guess = np.array([o.predicted_oom for o in judged], dtype=bool)
    sure = np.array([o.memory_verdict != "unsure" for o in judged], dtype=bool)
    return Ended(
        len(judged),
        int(truth.sum()),
        int(guess.sum()),
        _mean(truth[guess]),
        _mean(guess[truth]),
        _mean(guess[~truth]),
        _mean(~sure),
        _mean((truth == guess)[sure]),
    )


def _mean(values: npt.NDArray[np.bool_]) -> float | None:
    return float(values.mean()) if len(values) else None


def _memory(outcomes: Sequence[Outcome]) -> Memory:
    peak = errors([(o.predicted_peak_gib, o.measured_peak_gib) for o in outcomes if o.run.status == "ok"])
    return Memory(**asdict(ended(outcomes)), peak=peak)


def slices(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """The ways in which a family's rows on one accelerator are counted: without the excluded ones, with them, and by what they are.

    Stacks and dense or MoE models come apart where there are several.
    """
    counted = [o for o in outcomes if not o.excluded]
    yield "counted", counted
    if len(counted) < len(outcomes):
        yield "everything", list(outcomes)
    for parts in (_parts(counted, _stack), _parts(counted, _kind), _parts(counted, _trust)):
        if len(parts) > 1:
            yield from parts.items()


def _parts(outcomes: Sequence[Outcome], name: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    parts: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        if o.job is not None:
            parts[name(o)].append(o)
    return dict(sorted(parts.items()))


def _stack(outcome: Outcome) -> str:
    return f"stack {outcome.job.problem.stack.name}" if outcome.job else ""


def _kind(outcome: Outcome) -> str:
    return ("MoE" if outcome.job.problem.model.is_moe else "dense") if outcome.job else ""


def _trust(outcome: Outcome) -> str:
    """nanotron's runs without a pipeline inside a server are its clean ones."""
    if outcome.job is None or outcome.run.family != "nanotron":
        return ""
    layout = outcome.job.layout
    return "pp 1, tp ≤ 8" if layout.pp == 1 and layout.tp <= 8 else "pp > 1 or tp > 8"


@dataclass(frozen=True)
class Pool:
    """Families that one figure is reported for together; `accelerators` is a prefix pattern, `moe` None for either kind."""

    name: str
    families: tuple[str, ...]
    accelerators: tuple[str, ...]
    moe: bool | None = None

    def holds(self, outcome: Outcome) -> bool:
        return (
            outcome.job is not None
            and not outcome.excluded
            and outcome.run.family in self.families
            and outcome.run.accelerator.startswith(self.accelerators)
            and self.moe in (None, outcome.job.problem.model.is_moe)
        )


NVIDIA = ("megatron-bridge", "bridge-studies", "mcore-moe", "megatron-lm", "nemo-docs", "dgxc")
BLACKWELL = ("B200", "B300", "GB200", "GB300")
POOLS = (
    Pool("A100, Megatron of 2021 and 2022 (sc21, korthikanti)", ("sc21", "korthikanti"), ("A100",)),
    Pool("A100, Aleph Alpha", ("aleph-alpha",), ("A100",)),
    Pool("A100, bigscience", ("bigscience",), ("A100",)),
    Pool("A100 and H100, llm-foundry (FSDP)", ("llm-foundry",), ("A100", "H100")),
    Pool("H100, NVIDIA's dense runs", NVIDIA, ("H100",), moe=False),
    Pool("H100, NVIDIA's MoE runs", NVIDIA, ("H100",), moe=True),
    Pool("Blackwell, NVIDIA's dense runs", NVIDIA, BLACKWELL, moe=False),
    Pool("Blackwell, NVIDIA's MoE runs", NVIDIA, BLACKWELL, moe=True),
    Pool("B200, simumax", ("simumax",), ("B200",)),
    Pool("H100, nanotron", ("nanotron",), ("H100",)),
    Pool("H100 and H200, other FSDP (torchtitan, kempner)", ("torchtitan", "kempner"), ("H100", "H200")),
    Pool("Ascend 910B (mindspeed-llm, mindformers)", ("mindspeed-llm", "mindformers"), ("Ascend",)),
    Pool("A100, one server, small GPT models (vtrain-single)", ("vtrain-single",), ("A100",)),
)
"""What is compared over families that share hardware and kind of model."""

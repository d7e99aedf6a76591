"""Rows that are priced but not counted: structural rules, each with an id and a reason, none of which looks at an error.

They name what a row is (its size, its features, what its source says of it), never how far a prediction is off; one reads what was
measured, which no device does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..search_spaces.model import Attention
from .run_clusters import UNDISCLOSED
from .run_layouts import Job


@dataclass(frozen=True)
class Exclusion:
    """One rule; `holds` says whether a job falls under it."""

    id: str
    reason: str
    holds: Callable[[Job], bool]


def _is(job: Job, family: str) -> bool:
    return job.run.family == family


def _notes(job: Job, pattern: str) -> bool:
    return re.search(pattern, f"{job.run.id} {job.run.text('notes')}", re.IGNORECASE) is not None


def _odd_head(job: Job) -> bool:
    mixers = [kind.mixer for kind in job.problem.model.kinds.values()]
    return any(isinstance(mixer, Attention) and mixer.head_dim % 8 for mixer in mixers)


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "nanotron-many-devices",
        "above 128 devices the sweep stalls on its network (79 % of rows on 512 devices are off by more than 1.5 times)",
        lambda job: _is(job, "nanotron") and job.problem.devices > 128,
    ),
    Exclusion(
        "nanotron-tp32",
        "TP 32 spans four servers in another mode of the implementation",
        lambda job: _is(job, "nanotron") and job.layout.tp > 16,
    ),
    Exclusion(
        "odd-head-dim",
        "head_dim is not a multiple of 8: tensor cores run GEMMs of it a quarter slower, which no curve says",
        _odd_head,
    ),
    Exclusion("vpp-unknown", "the virtual pipeline size is printed as NA", lambda job: _notes(job, r"VP printed NA")),
    Exclusion(
        "from-memory",
        "step time and batch are unconfirmed",
        lambda job: _is(job, "korthikanti") and _notes(job, r"from memory, unconfirmed"),
    ),
    Exclusion("token-drop", "tokens over the experts' capacity are dropped", lambda job: _notes(job, r"tokendrop")),
    Exclusion(
        "first-release-moe",
        "MoE on GB200 in NeMo before Megatron-Bridge: a first release without fused dispatch",
        lambda job: (
            job.problem.stack.name in ("nemo-24", "nemo-25")
            and job.problem.model.is_moe
            and job.problem.cluster.accelerator.name == "gb200"
        ),
    ),
    Exclusion(
        "one-micro-batch",
        "one micro-batch per step on one server: launches and the step's own overhead are most of it",
        lambda job: _is(job, "bridge-studies") and job.layout.num_microbatches * job.problem.devices <= 8,
    ),
    Exclusion(
        "ungrouped-experts",
        "experts run one after another, not as a grouped GEMM",
        lambda job: _is(job, "kempner") and job.problem.model.is_moe,
    ),
    Exclusion(
        "script-mismatch",
        "number and script do not belong together, or the number is implausible by its source's own note",
        lambda job: _notes(job, r"MISMATCH|implausible|not consistent|do not use"),
    ),
    Exclusion(
        "recipe-mismatch",
        "the recipe or layout that its source names does not match the row: what was recomputed or overlapped is not told",
        lambda job: _notes(job, r"does not match (the )?row|(recipe|layout|config|script)\b[^;]*does not match"),
    ),
    Exclusion(
        "known-regression",
        "its source's own footnote says that the release ran it worse than it should: a regression, or a mapping left unoptimised",
        lambda job: _notes(job, r"known regression|unoptimi[sz]ed mapping"),
    ),
    Exclusion(
        "offload-untold",
        "its notes name an offload of which the row's own field says nothing",
        lambda job: job.layout.offload == "none" and _notes(job, r"(?<!no )(?<!without )\boff-?load"),
    ),
    Exclusion(
        "generation-unknown",
        "the device generation is not printed",
        lambda job: job.run.accelerator.lower() in UNDISCLOSED,
    ),
    Exclusion(
        "padded-samples",
        "fine-tuning on samples of a few hundred tokens: what is counted as tokens, and how it was padded, is not told",
        lambda job: _notes(job, r"finetune") and job.problem.workload.seq_len < 512,
    ),
)

BEYOND_PEAK = "beyond-peak"
REPEATED = "repeated"
REASONS: Mapping[str, str] = {
    **{rule.id: rule.reason for rule in EXCLUSIONS},
    BEYOND_PEAK: "the measured speed is above the peak of the device: a slip in a figure, a unit or the batch",
    REPEATED: "the very row stands in the table already",
}
"""Reason of every rule by id. The last two are not told by a job alone: by its model FLOPs, and by the rest of the table."""


def exclusions(job: Job) -> tuple[str, ...]:
    """Ids of the rules that a job falls under."""
    return tuple(rule.id for rule in EXCLUSIONS if rule.holds(job))

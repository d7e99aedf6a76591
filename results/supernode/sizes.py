"""Equal accelerators in supernodes of growing size, for models of growing size."""

from __future__ import annotations

from dataclasses import dataclass

from clusters import best, supernodes, three_tier
from paraplan.optimizer import PricedLayout
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces.inputs import load_model
from paraplan.search_spaces.layer_kinds import MoeMlp

LEAN = "micro_batch=1,recompute=none|selective:moe_act|selective:layernorm+moe_act|selective:layernorm+moe_act+mla_up_proj"
"""What is left to choose where the whole search would take minutes."""
JOBS = (
    ("qwen2.5-7b", 1152, 2304, ""),
    ("llama-3.1-70b", 1152, 2304, ""),
    ("llama-3.1-405b", 4608, 4608, ""),
    ("deepseek-v3", 9216, 18432, LEAN),
    ("moe-1.8t", 4608, 4608, LEAN),
    ("moe-10t", 9216, 9216, LEAN),
)
"""Model, devices (which all sizes up to 1,024 divide, or nearly all), global batch, what is fixed."""
SIZES = (8, 16, 64, 72, 128, 384, 768, 1024, 8192, 15488)
RACK, USED = 72, 64
"""A rack, and what is used of it where groups of powers of two are to tile it."""
FLAT = 0.02
"""Share of the best step within which a smaller supernode is as good."""
WORTH = 0.03
HUNDREDS = 100
TRILLION = 1e12


@dataclass(frozen=True)
class Found:
    """The best plans of one job: on three-tier networks, by size of the supernode, and on racks with all or part of each in use."""

    model: str
    devices: int
    four: PricedLayout
    eight: PricedLayout
    by_size: dict[int, PricedLayout]
    all_used: PricedLayout
    part_used: PricedLayout

    def gain(self, priced: PricedLayout) -> float:
        """Speed over that on the network that is oversubscribed 4:1."""
        return self.four.step_time_s / priced.step_time_s

    @property
    def spared(self) -> float:
        """Speed of racks with some of each idle over that of all in use."""
        return self.all_used.step_time_s / self.part_used.step_time_s

    @property
    def good(self) -> list[int]:
        """The sizes that are as good as the best, smallest first."""
        least = min(priced.step_time_s for priced in self.by_size.values())
        return [size for size, priced in self.by_size.items() if priced.step_time_s <= least * (1.0 + FLAT)]

    @property
    def flat_from(self) -> int:
        """The smallest size that is as good as the best and has none among the larger that is not."""
        last_bad = max((size for size in SIZES if size not in self.good), default=0)
        return min(size for size in SIZES if size > last_bad)

    @property
    def row(self) -> tuple[str, ...]:
        """The table's cells."""
        plans = (*(self.by_size[size] for size in SIZES), self.all_used, self.part_used)
        return (
            f"{self.model}, {_size(self.model)}",
            f"{self.devices:,}",
            f"{wording.seconds(self.four.step_time_s)}, {wording.percent(self.four.mfu)}{self._idle(self.four)}",
            *(f"{self.gain(priced):.3f}{self._idle(priced)}" for priced in (self.eight, *plans)),
            f"{self.good[0]:,}",
            f"{self.flat_from:,}",
        )

    def _idle(self, priced: PricedLayout) -> str:
        idle = self.devices - priced.devices_used
        return f" ({idle:,})" if idle else ""


def supernode_sizes() -> str:
    """The section on what a larger supernode brings."""
    jobs = [_found(*job) for job in JOBS]
    rack = f"{RACK}, all in use", f"{USED} of {RACK}"
    heads = ("model", "devices", "4:1: step, MFU", "8:1", *(f"{size:,}" for size in SIZES), *rack, "enough", "flat from")
    large = [job for job in jobs if load_model(job.model).parameters() >= TRILLION]
    meeting = [job for job in large if job.good[0] >= HUNDREDS]
    said = "Agrees" if len(meeting) == len(large) else "Depends on the model" if meeting else "Wrong here"
    gains = {job.model: job.gain(min(job.by_size.values(), key=lambda priced: priced.step_time_s)) for job in jobs}
    none = [model for model, gain in gains.items() if gain < 1.0 + WORTH]
    most = max(gains, key=lambda model: gains[model])
    return f"""## How large a supernode has to be

Report: a trillion parameters want supernodes of hundreds of cards at least; small models gain nothing.

H100 throughout, so that only the network differs: servers of eight in a three-tier network whose core is oversubscribed 4:1 or
8:1, or supernodes with the server's bandwidth and latency among so many cards and an adapter of 50 GB/s each, not oversubscribed,
between. The mixtures have micro-batch 1 and four kinds of recompute to choose from, to keep searches short. Figures are speed over
that of the 4:1 cluster, each with its own best layout; behind them in brackets is how many of the job's devices that plan leaves
idle, where it does. “{USED} of {RACK}” leaves eight cards of every rack idle and is counted with them: a ninth of the job's devices
does nothing. The plan for {RACK} may do so too; “{RACK}, all in use” may not. “enough” is the smallest supernode within {FLAT:.0%}
of the best, “flat from” the smallest that has no larger one outside of that. Columns from the job's size on are one machine, all of
the job in one supernode: that the gain is flat there says nothing of larger jobs.

{markdown(heads, [job.row for job in jobs])}

**{said}.** Of the models from a trillion parameters on, {
        ", ".join(f"{job.model} has enough with {job.good[0]:,}" for job in large)
    }. Less than
{WORTH:.0%} are in it for {", ".join(none) if none else "none"}; most, {gains[most]:.2f}×, for {most}. {_what_asks(jobs)}

{_all_used(jobs)} {_part_used(jobs)}
"""


def _found(model: str, devices: int, batch: int, fix: str) -> Found:
    """What is planned for a job."""
    four, eight = (best(model, three_tier(ratio), devices, batch, fix=fix) for ratio in (4.0, 8.0))
    by_size: dict[int, PricedLayout] = {}
    for size in SIZES:
        whole = next((s for s in by_size if s >= devices), None)  # one supernode holds the job already
        by_size[size] = by_size[whole] if whole else best(model, supernodes(size), devices, batch, fix=fix)
    all_used = by_size[RACK]
    if all_used.devices_used < devices:
        constraint = f"tp*cp*pp*dp == {devices}"
        all_used = best(model, supernodes(RACK), devices, batch, fix=fix, constraint=constraint)
    part_used = best(model, supernodes(USED), devices * USED // RACK, batch, fix=fix)
    return Found(model, devices, four, eight, by_size, all_used, part_used)


def _what_asks(jobs: list[Found]) -> str:
    """Whether parameters or experts tell how large a supernode has to be, from the order of models by either."""
    models = {job.model: load_model(job.model) for job in jobs}
    mlps = {name: [kind.mlp for kind in model.kinds.values()] for name, model in models.items()}
    experts = {name: max((mlp.experts for mlp in each if isinstance(mlp, MoeMlp)), default=0) for name, each in mlps.items()}
    enough = {job.model: job.good[0] for job in jobs}
    told = [
        all(enough[first] <= enough[second] for first in models for second in models if size[first] < size[second])
        for size in ({name: model.parameters() for name, model in models.items()}, experts)
    ]
    listed = ", ".join(f"{name} {enough[name]:,} with {experts[name]:,} experts" for name in models)
    if told == [False, True]:
        return f"Enough grows with the number of experts, not with that of parameters: {listed}."
    if told == [True, False]:
        return f"Enough grows with the number of parameters, not with that of experts: {listed}."
    return f"Enough grows with {'both' if all(told) else 'neither of'} parameters and experts: {listed}."


def _all_used(jobs: list[Found]) -> str:
    """For which models racks of 72, all in use, are worth less than supernodes of 64, by what both gain over the 4:1 cluster."""
    worse = [job for job in jobs if job.gain(job.all_used) < job.gain(job.by_size[USED]) * (1.0 - FLAT)]
    if not worse:
        return f"Racks of {RACK}, all in use, are worth what supernodes of {USED} are to all."
    said = ", ".join(f"{job.model} ({job.gain(job.all_used):.2f}× against {job.gain(job.by_size[USED]):.2f}×)" for job in worse)
    others = "" if len(worse) == len(jobs) else f"; the others lose less than {FLAT:.0%}"
    why = "groups of powers of two straddle their boundaries or have to be smaller"
    return f"Racks of {RACK}, all in use, are worth less than supernodes of {USED} for {said}: {why}{others}."


def _part_used(jobs: list[Found]) -> str:
    """For which models leaving eight of 72 idle is worth it, by speed over that of all 72 in use."""
    won, lost = [job for job in jobs if job.spared > 1.0], [job for job in jobs if job.spared <= 1.0]
    first, second = (", ".join(f"{job.model} ({job.spared:.2f}×)" for job in group) for group in (won, lost))
    gained = (
        f"Leaving eight of each idle gains for {first}, in spite of fewer devices"
        if won
        else "Leaving eight of each idle never gains"
    )
    return f"{gained}; what it leaves of the speed of all {RACK} for the others: {second}." if lost else f"{gained}."


def _size(model: str) -> str:
    parameters = load_model(model).parameters()
    return f"{parameters / 1e12:.1f}T" if parameters >= TRILLION else f"{parameters / 1e9:.0f}B"

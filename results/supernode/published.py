"""Layouts published for DeepSeek-V3, and where they stand in the order of all frames."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import PricedLayout, build_problem, compare_layouts, evaluate, plan
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.comparison import compare
from paraplan.optimizer.reports.further import degrees
from paraplan.optimizer.reports.validation import markdown
from paraplan.optimizer.search import Search
from paraplan.search_spaces import Problem
from paraplan.search_spaces.enumeration import Space

ALL_FRAMES = 1_000_000
SHOWN = 3
"""Decisions and terms that are named."""


@dataclass(frozen=True)
class Job:
    """A problem and the layouts published for it, in words."""

    cluster: str
    devices: int
    global_batch: int
    stack: str
    precision: str
    layouts: tuple[str, ...]

    @property
    def problem(self) -> Problem:
        return build_problem("deepseek-v3", self.cluster, self.devices, self.global_batch, 4096, self.stack, self.precision)


JOBS = (
    Job(
        "hgx-h800",
        2048,
        15360,
        "megatron-bridge",
        "fp8",
        (
            "pp=16,ep=64,schedule=dualpipe,recompute=selective:layernorm+mla_up_proj",
            "pp=16,ep=64,recompute=selective:layernorm+mla_up_proj+moe_act",
        ),
    ),
    Job(
        "gb200-nvl72",
        256,
        2048,
        "megatron-bridge",
        "bf16",
        ("pp=8,ep=32,recompute=selective:mla_up_proj", "pp=4,vpp=4,ep=64,recompute=selective:mla_up_proj"),
    ),
    Job(
        "cloudmatrix-384",
        512,
        3840,
        "mindspeed-llm",
        "bf16",
        (
            "tp=2,pp=8,ep=32,recompute=full:block:8,offload=optimizer:1",
            "tp=2,pp=8,ep=32,schedule=dualpipev,recompute=full,offload=optimizer:1",
        ),
    ),
)


def published_layouts() -> str:
    """The section on where they stand."""
    rows, differences, shares = [], [], []
    for job in JOBS:
        problem = job.problem
        print(f"planning deepseek-v3 on {job.devices:,} of {job.cluster}", file=sys.stderr, flush=True)
        winner = plan(problem, top=1).plan
        name = f"{job.devices:,} × {job.cluster}"
        rows.append((name, f"ours: {degrees(winner.layout)}", *_figures(winner, winner), ""))
        for words in job.layouts:
            priced, broken = evaluate(problem, complete(problem, parse_layout(words)), replayed=False)
            faster, frames = _faster(problem, priced.step_time_s)
            shares.append(faster / frames)
            rank = f"{faster:,} of {frames:,}"
            rows.append((name, f"`{words}`", *_figures(priced, winner), rank))
            differences.append(f"- {name}, `{words}`: {_difference(problem, priced, winner, broken)}")
    return f"""## Layouts published for DeepSeek-V3

PP 16 EP 64 on 2,048 H800 (its report, DualPipe; as 1F1B beside it), PP 8 EP 32 and PP 4 EP 64 on 256 GB200 (recipes), TP 2 PP 8
EP 32 on 512 dies of Atlas A3 (a recipe; with and without DualPipeV). “faster” counts the frames whose best layout that a plan may
have is faster; a plan keeps a share of the memory free, which a published layout need not.

{markdown(("job", "layout", "step", "on ours", "MFU", "peak", "faster"), rows)}

What our winner does differently; a decision's seconds are the mean over the orders in which they can be taken (Shapley value):

{chr(10).join(differences)}

The last of the published layouts has {max(shares):.1%} of all frames before it, the first {min(shares):.1%}. Two schedules among
them, DualPipe and DualPipeV, are priced and not searched, so a plan cannot return them.
"""


def _figures(priced: PricedLayout, winner: PricedLayout) -> tuple[str, str, str, str]:
    return (
        wording.seconds(priced.step_time_s),
        wording.signed(wording.percent(priced.step_time_s / winner.step_time_s - 1.0)),
        wording.percent(priced.mfu),
        f"{wording.gib(priced.memory.peak_gib)}, {priced.memory.verdict}",
    )


def _faster(problem: Problem, step_time_s: float) -> tuple[int, int]:
    """Frames that hold a faster layout which fits, and all."""
    model = CostModel(problem, load_profile(problem.cluster.accelerator.name))
    found = Search(Space(problem), model, ALL_FRAMES, ceiling_s=step_time_s).run()
    return len(found.best), found.frames


def _difference(problem: Problem, priced: PricedLayout, winner: PricedLayout, broken: tuple[str, ...]) -> str:
    way = compare_layouts(problem, priced.layout, winner.layout).waterfall
    largest = sorted(way.decisions, key=lambda decision: -abs(decision.seconds))[:SHOWN]
    decided = ", ".join(
        f"{one.column} {one.first} → {one.second} ({wording.signed(wording.seconds(one.seconds))})".replace("selective:", "")
        for one in largest
    )
    trade = compare(problem, priced, winner)
    gains, losses = ", ".join(trade.gains[:SHOWN]) or "nothing", ", ".join(trade.losses[:SHOWN]) or "nothing"
    unfit = f" As published: {' '.join(broken)}" if broken else ""
    return f"{decided}. It gains {gains}, and gives up {losses}.{unfit}"

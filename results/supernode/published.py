"""Layouts published for DeepSeek-V3, and where they stand in the order of all frames."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paraplan.cost_models.memory import GIB
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.schedules import SPLIT
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import PricedLayout, build_problem, compare_layouts, evaluate, plan
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.planner import with_schedules
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.comparison import compare
from paraplan.optimizer.reports.further import degrees
from paraplan.optimizer.reports.validation import markdown
from paraplan.optimizer.search import Search
from paraplan.search_spaces import Problem
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.flags import parse_fix
from paraplan.search_spaces.inputs import load_cluster, load_stack
from paraplan.search_spaces.stack import Stack

ALL_FRAMES = 1_000_000
FOUR_EACH = "stages=Et*4|(t*4|)*14tmL"
"""61 layers on 16 stages, four each and one beside MTP layer and loss; how they were cut is not published."""
LEAN = "micro_batch=1,cp=1,recompute=none|full|selective:layernorm+moe_act|selective:layernorm+moe_act+mla_up_proj"
"""What is left to choose beside orders that are replayed, where the whole search would take minutes."""
SHOWN = 3
"""Decisions and terms that are named."""


BRIDGE = load_stack("megatron-bridge")
REPORTED = BRIDGE.model_copy(
    update={
        "name": "as DeepSeek-V3's report has it",
        "optimizer_bytes": 8.0,  # BF16 moments beside FP32 main weights, and FP32 gradients: arXiv 2412.19437, 3.3.3
        "gradient_bytes": 4,
        "footprint": BRIDGE.footprint.model_copy(update={"expert_inner_bytes": 1.0}),  # SwiGLU's inputs in FP8, the same section
        "schedules": (*BRIDGE.schedules, "dualpipe", "dualpipev"),
    }
)


@dataclass(frozen=True)
class Job:
    """A problem, `schedules` to search too, and the layouts published for it, in words; `name` tells jobs of a cluster apart."""

    cluster: str
    devices: int
    global_batch: int
    stack: str | Stack
    precision: str
    layouts: tuple[str, ...]
    schedules: str | None = None
    name: str = ""

    @property
    def problem(self) -> Problem:
        asked = "deepseek-v3", self.cluster, self.devices, self.global_batch, 4096, self.stack, self.precision
        return build_problem(*asked)

    @property
    def winner(self) -> PricedLayout:
        """Our fastest, of 1F1B orders and of the named ones."""
        found = [plan(self.problem, top=1).plan]
        if self.schedules:
            problem = self.problem
            workload = problem.workload.model_copy(update={"fix": {**problem.workload.fix, **parse_fix(LEAN)}})
            found.append(plan(with_schedules(problem.model_copy(update={"workload": workload}), self.schedules), top=1).plan)
        return min(found, key=lambda priced: priced.step_time_s)


JOBS = (
    Job(
        "hgx-h800",
        2048,
        15360,
        REPORTED,
        "fp8",
        ("pp=16,ep=64,schedule=dualpipe,recompute=selective:layernorm+mla_up_proj+moe_act," + FOUR_EACH,),
        "dualpipe",
        ", states and activations as reported",
    ),
    Job(
        "hgx-h800",
        2048,
        15360,
        "megatron-bridge",
        "fp8",
        ("pp=16,ep=64,recompute=selective:layernorm+mla_up_proj+moe_act",),
        name=", Megatron-Bridge",
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
        "dualpipev",
    ),
)


def published_layouts() -> str:
    """The section on where they stand."""
    rows, differences, shares, on_h800 = [], [], [], []
    for job in JOBS:
        problem = job.problem
        name = f"{job.devices:,} × {job.cluster}{job.name}"
        print(f"planning deepseek-v3 on {name}", file=sys.stderr, flush=True)
        winner = job.winner
        order = f" {winner.layout.schedule}" if winner.layout.schedule in SPLIT else ""
        rows.append((name, f"ours: {degrees(winner.layout)}{order}", *_figures(winner, winner), ""))
        for words in job.layouts:
            priced, broken = evaluate(problem, complete(problem, parse_layout(words)), replayed=False)
            if job.stack is REPORTED:
                plain = build_problem("deepseek-v3", job.cluster, job.devices, job.global_batch, 4096, BRIDGE, job.precision)
                on_h800 += [each.memory.peak_gib for each in (priced, evaluate(plain, priced.layout, replayed=False)[0])]
            faster, frames = _faster(problem, priced.step_time_s)
            shares.append(faster / frames)
            rank = f"{faster:,} of {frames:,}"
            rows.append((name, f"`{words}`", *_figures(priced, winner), rank))
            differences.append(f"- {name}, `{words}`: {_difference(problem, priced, winner, broken)}")
    return f"""## Layouts published for DeepSeek-V3

PP 16 EP 64 on 2,048 H800 (its report, DualPipe; as 1F1B of Megatron-Bridge beside it), PP 8 EP 32 and PP 4 EP 64 on 256 GB200
(recipes), TP 2 PP 8 EP 32 on 512 dies of Atlas A3 (a recipe; with and without DualPipeV). Ours is searched with the orders of
the published layouts too (with CP 1, micro-batch 1 and four kinds of recompute, to keep that short). “faster” counts the frames
whose best layout under 1F1B orders is faster and fits a plan, which keeps a share of the memory free that a published layout need
not.

{markdown(("job", "layout", "step", "on ours", "MFU", "peak", "faster"), rows)}

{_on_80_gb(*on_h800)}

What our winner does differently; a decision's seconds are the mean over the orders in which they can be taken (Shapley value):

{chr(10).join(differences)}

The last of the published layouts has {max(shares):.1%} of all frames before it, the first {min(shares):.1%}. A plan returns
DualPipe or DualPipeV where its stack runs them and `--schedule` names them.
"""


def _on_80_gb(as_reported: float, plain: float) -> str:
    """What our memory of DeepSeek's own run lacks, by its peaks with the report's savings and without, in GiB."""
    there = load_cluster("hgx-h800").accelerator.memory_bytes.value / GIB
    return f"""That run was made on cards of 80 GB, of which software sees {there:.1f} GiB: our peak of {as_reported:.0f} GiB is
{as_reported / there - 1.0:.0%} above what it can have been, in the middle of the pipeline. In it is what the report says of memory:
RMSNorm, MLA up-projections and SwiGLU are redone, inputs of linear layers and of SwiGLU kept in FP8, moments in BF16, gradients in
FP32 (arXiv 2412.19437, 3.2.3 and 3.3.3; by Megatron-Bridge's widths it would be {plain:.0f} GiB). Not in it is what the report does
not tell: where its stages are cut, whether weights are kept in BF16 beside the FP8 that GEMMs read, and what both directions of
DualPipe share."""


def _figures(priced: PricedLayout, winner: PricedLayout) -> tuple[str, str, str, str]:
    return (
        wording.seconds(priced.step_time_s),
        wording.signed(wording.percent(priced.step_time_s / winner.step_time_s - 1.0)),
        wording.percent(priced.mfu),
        f"{wording.gib(priced.memory.peak_gib)}, {priced.memory.verdict}",
    )


def _faster(problem: Problem, step_time_s: float) -> tuple[int, int]:
    """Frames that hold a faster layout which fits, and all."""
    model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as))
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

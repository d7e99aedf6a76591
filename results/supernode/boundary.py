"""Groups kept inside supernodes with PP between, against TP or EP across the boundary; and two clusters against one supernode."""

from __future__ import annotations

from typing import Any

from clusters import best, communication_s, joined_clusters, supernodes
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.further import degrees
from paraplan.optimizer.reports.validation import markdown

INSIDE = "supernode:tp,cp,ep"
JOBS: tuple[tuple[str, str, int, int, str, dict[str, Any]], ...] = (
    ("deepseek-v3", "hgx-h800", 2048, 15360, "ep=64", {"precision": "fp8"}),
    ("deepseek-v3", "gb200-nvl72", 1152, 4608, "ep=128", {}),
    ("llama-3.1-405b", "hgx-h100", 2048, 2048, "tp=16", {}),
    ("moe-10t", "cloudmatrix-384", 6144, 6144, "ep=512,etp=2", {}),
)
"""Model, cluster, devices, batch, the group that is too wide for one supernode, and what else is asked."""
MUCH, SOME = 0.07, 0.03
"""Points of MFU that agree with a report of about ten, and that are in its direction."""


def pipeline_at_boundary() -> str:
    """The section on what crosses the supernode's boundary."""
    rows, gained, halved = [], [], []
    for model, cluster, devices, batch, wide, asked in JOBS:
        inside = best(model, cluster, devices, batch, inside=INSIDE, **asked)
        across = best(model, cluster, devices, batch, fix=wide, **asked)
        job = f"{model}, {devices:,} × {cluster}"
        for words, priced in ((f"`--inside {INSIDE}`", inside), (f"`--fix {wide}`", across)):
            share, mfu = wording.percent(priced.cross_supernode_share), wording.percent(priced.mfu)
            rows.append((job, words, wording.seconds(priced.step_time_s), share, mfu, degrees(priced.layout)))
        gained.append(inside.mfu - across.mfu)
        halved.append(inside.cross_supernode_share <= 0.5 * across.cross_supernode_share)
    agreeing = sum(points >= MUCH for points in gained)
    said = "Agrees" if agreeing == len(gained) else "Wrong here" if max(gained) < SOME else "Depends"
    return f"""## What crosses the boundary of a supernode

Report: with PP at the boundary in place of TP or EP, traffic across fell from 40 % to 20 % and MFU rose by about ten points.

The best layout that keeps TP, CP and EP inside, and the best with a group that is too wide for one supernode. “across” is the
share of all bytes that leave a supernode.

{markdown(("job", "asked", "step", "across", "MFU", "layout"), rows)}

**{said}.** The share is at least halved in {sum(halved)} of {len(halved)} jobs; MFU rises by {
        ", ".join(f"{100 * points:.1f}" for points in gained)
    } points. The share alone says little: what is left of it inside the rule is the pipeline's and the gradients', of which most is
hidden, while what a wide group sends is waited for.
"""


def two_clusters() -> str:
    """The section on a model that is moved from two data-parallel clusters into one supernode."""
    model, devices, batch, report = "deepseek-v3", 1024, 8192, (0.46, 0.58, 0.30)
    joined = joined_clusters(devices // 2, 8.0)
    before = best(model, joined, devices, batch, inside="cluster:tp,cp,ep,pp")
    after = best(model, supernodes(devices), devices, batch)
    shares = [communication_s(priced) / priced.step_time_s for priced in (before, after)]
    cases = (
        (f"two clusters of {devices // 2:,}, DP between (8:1)", before, shares[0]),
        (f"one supernode of {devices:,}", after, shares[1]),
    )
    rows = [
        (
            words,
            wording.seconds(priced.step_time_s),
            wording.percent(priced.mfu),
            wording.percent(share),
            wording.percent(priced.breakdown_s["dp"] / priced.step_time_s),
            degrees(priced.layout),
        )
        for words, priced, share in cases
    ]
    halving = report[0] / (1.0 - report[2] / 2.0)
    needed = (1.0 - report[0] / report[1]) / report[2]
    halved = before.mfu / (1.0 - shares[0] / 2.0)
    gain, reported = after.mfu / before.mfu, report[1] / report[0]
    said = "Agrees in size" if 0.9 <= gain / reported <= 1.1 else "Depends" if gain > 1.05 else "Wrong here"
    words = "more" if after.mfu > halved else "less"
    return f"""## From two data-parallel clusters into a supernode

Report: a 600B mixture of experts rose from MFU {report[0]:.0%} to {report[1]:.0%} when a communication share of {report[2]:.0%} was
halved.

Halving {report[2]:.0%} of a step leads from {report[0]:.0%} to {halving:.1%}, not {report[1]:.0%}: that takes {needed:.0%} of the
communication away, or something else came along. {model} stands in for the model, on {devices:,} H100 in servers of eight, batch
{batch:,}; “communication” is what is exposed of tp, cp, ep, pp and dp.

{markdown(("where", "step", "MFU", "communication", "dp", "layout"), rows)}

**{said}, but not for the reason given.** MFU rises {gain:.2f}-fold here ({reported:.2f}-fold in the report), {words} than halving
this model's own share would give ({halved:.1%}). The gradients between the clusters are the smaller part of the share: what the
supernode changes is which layouts are worth running, a shorter pipeline and wider groups of experts among them.
"""

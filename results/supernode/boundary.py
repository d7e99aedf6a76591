"""Groups kept inside supernodes with PP between, against groups wider than a supernode; and two clusters against one supernode."""

from __future__ import annotations

from typing import Any

from clusters import best, communication_s, joined_clusters, supernodes
from paraplan.optimizer import PricedLayout
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.further import degrees
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces.inputs import load_cluster

GROUPS = ("tp", "cp", "ep")
INSIDE = "supernode:" + ",".join(GROUPS)
JOBS: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("deepseek-v3", "hgx-h800", 2048, 15360, {"precision": "fp8"}),
    ("deepseek-v3", "gb200-nvl72", 1152, 4608, {}),
    ("llama-3.1-405b", "hgx-h100", 2048, 2048, {}),
    ("moe-10t", "cloudmatrix-384", 6144, 6144, {"fix": "etp=1|2|4"}),
)
"""Model, cluster, devices, batch, and what else is asked. The last has fewer experts than a supernode has dies: its EP groups are
wider only where experts are cut."""
MUCH, SOME = 0.07, 0.03
"""Points of MFU that agree with a report of about ten, and that are in its direction."""


def pipeline_at_boundary() -> str:
    """The section on what crosses the supernode's boundary."""
    rows = []
    found: dict[str, tuple[PricedLayout, PricedLayout]] = {}
    for model, cluster, devices, batch, asked in JOBS:
        wide = _wider_than(cluster)
        inside = best(model, cluster, devices, batch, inside=INSIDE, **asked)
        across = best(model, cluster, devices, batch, constraint=wide, **asked)
        job = f"{model}, {devices:,} × {cluster}"
        found[job] = inside, across
        rows += [(job, words, *_figures(priced)) for words, priced in ((f"`--inside {INSIDE}`", inside), (f"`{wide}`", across))]
    gained = {job: round(inside.mfu, 3) - round(across.mfu, 3) for job, (inside, across) in found.items()}
    fallen = {job: across.cross_supernode_share - inside.cross_supernode_share for job, (inside, across) in found.items()}
    halved = [inside.cross_supernode_share <= 0.5 * across.cross_supernode_share for inside, across in found.values()]
    least, *_, most = sorted(found, key=lambda job: gained[job] / fallen[job])
    agreeing = sum(points >= MUCH for points in gained.values())
    said = "Agrees" if agreeing == len(gained) else "Wrong here" if max(gained.values()) < SOME else "Depends"
    within, beyond = (max(_waits(pair[0], terms) for pair in found.values()) for terms in (("pp", "dp"), GROUPS))
    wide_waits = [_waits(across, GROUPS) for _, across in found.values()]
    return f"""## What crosses the boundary of a supernode

Report: with PP at the boundary in place of TP or EP, traffic across fell from 40 % to 20 % and MFU rose by about ten points.

The best layout that keeps TP, CP and EP inside, and the best of all that have a TP × CP or an EP × ETP group with more ranks than a
supernode has devices. “across” is the share of all bytes that leave a supernode; the next two columns are what is waited for of the
groups' messages and of the pipeline's and the gradients', as shares of the step. moe-10t has 512 experts, so that its EP is wider
than a supernode only where experts are cut: both of its rows may choose ETP 1, 2 or 4.

{markdown(("job", "asked", "step", "across", "tp, cp, ep", "pp, dp", "MFU", "layout"), rows)}

**{said}.** The share is at least halved in {sum(halved)} of {len(halved)} jobs; MFU rises by {
        ", ".join(f"{100 * points:.1f}" for points in gained.values())
    } points. The share alone does not tell the gain: a point of it
is worth {gained[least] / fallen[least]:.2f} points of MFU for {least}, and {gained[most] / fallen[most]:.2f} for {most}.
What is left of it inside the rule, the pipeline's and the gradients', is waited for {wording.percent(within)} of the step at most.
Groups inside are waited for {wording.percent(beyond)} at most, wide ones from {wording.percent(min(wide_waits))} to {
        wording.percent(max(wide_waits))
    }.
"""


def _wider_than(cluster: str) -> str:
    """The constraint that some group does not fit a supernode of the cluster."""
    machine = load_cluster(cluster)
    size = machine.levels[machine.supernode_place].size
    return f"tp*cp > {size} or ep*etp > {size}"


def _figures(priced: PricedLayout) -> tuple[str, ...]:
    shares = (priced.cross_supernode_share, _waits(priced, GROUPS), _waits(priced, ("pp", "dp")), priced.mfu)
    idle = f", {priced.devices_idle:,} idle" if priced.devices_idle else ""
    return wording.seconds(priced.step_time_s), *map(wording.percent, shares), f"{degrees(priced.layout)}{idle}"


def _waits(priced: PricedLayout, terms: tuple[str, ...]) -> float:
    """Share of the step in which devices wait for such messages."""
    return sum(priced.breakdown_s[term] for term in terms) / priced.step_time_s


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
this model's own share would give ({halved:.1%}). {_what_changes(before, after, shares[0])}
"""


def _what_changes(before: PricedLayout, after: PricedLayout, share: float) -> str:
    """What part of the share of communication the gradients are, and how the layouts differ."""
    gradients = before.breakdown_s["dp"] / before.step_time_s
    part = f"Gradients between the clusters are {wording.percent(gradients / share)} of the share"
    changes = (
        ("pipeline", before.layout.pp, after.layout.pp, "shorter", "longer"),
        ("group of experts", before.layout.ep, after.layout.ep, "narrower", "wider"),
    )
    said = [
        f"a {less if new < old else more} {what} ({new} in place of {old})" for what, old, new, less, more in changes if new != old
    ]
    if gradients > 0.5 * share:
        return f"{part}, the larger part."
    if not said:
        return f"{part}; pipeline and groups of experts stay as they are."
    return f"{part}; what the supernode changes is which layouts are worth running, here {' and '.join(said)}."

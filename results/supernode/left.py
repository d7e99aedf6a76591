"""Clusters that have lost a device, have uneven numbers free, or one device slower than the others."""

from __future__ import annotations

import sys

from paraplan.optimizer import build_problem, plan
from paraplan.optimizer.leftover import Left
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.further import degrees
from paraplan.optimizer.reports.supernode import left_words, told_apart
from paraplan.optimizer.reports.validation import markdown
from paraplan.optimizer.supernode_result import DevicesLeft, LeftOption
from paraplan.search_spaces.degraded import after_loss, slowed, supernode_counts
from paraplan.search_spaces.inputs import load_cluster

LEAN = "micro_batch=1|2|4,recompute=none|full|selective:layernorm+moe_act+mla_up_proj"
SLOW = 0.8


def what_is_left() -> str:
    """The section on devices that are lost, idle or slow."""
    lost, uneven, slow = one_lost(), uneven_racks(), one_slow()
    rows = [
        (
            job,
            option.words,
            step(option.step_time_s),
            "" if option.devices_idle is None else f"{option.devices_idle:,}",
            frame(option),
        )
        for job, left in (("a device lost", lost), ("uneven racks", uneven), ("a slow device", slow))
        for option in (*told_apart(left.options), *((left.whole,) if left.whole else ()))
    ]
    kept = lost.options[0].layout
    assert kept is not None
    assert lost.whole is not None
    three = "Agrees" if kept.dp == 3 and lost.used == 384 else "Wrong here"
    place = next(option.slow for option in slow.options if option.slow is not None)
    harm = place.worst_step_time_s / place.spared_step_time_s - 1.0
    hidden = place.step_time_s / place.spared_step_time_s - 1.0
    return f"""## What is left of a cluster

Report: of 512 devices at TP 8 × PP 16 one that fails leaves DP 3 on 384, or a spare takes its place. Two more cases are of the
kind that schedulers meet: racks with uneven numbers free, and one device that runs at {SLOW:.0%} of its rate.

gpt3-175b on 512 H100 with TP 8 and PP 16, batch 1,536 of 2,048 tokens, one device lost; deepseek-v3 on racks of GB200 with 72, 72,
72 and 60 free, batch 2,160; llama-3.1-70b on 64 H100 with PP 8 and TP 4, batch 128, one device slow. The first of each is what the
plan takes of the ways that it tries: every share that some supernode has free, of all that have it and what the next one has, and
shares rounded to servers and powers of two where they are faster.

{markdown(("job", "way to go on", "step", "idle", "layout"), rows)}

**{three}.** {" ".join(left_words(lost))}
The slow device costs {wording.percent(harm)} of the step in stage {place.worst_stage}, where it does most harm, and
{wording.percent(hidden)} in stage {place.stage}, which has time to spare: the plan says so.
"""


def one_lost() -> DevicesLeft:
    """TP 8 × PP 16 on 512 devices less one."""
    cluster = load_cluster("hgx-h100")
    free = after_loss(cluster, supernode_counts(cluster, 512), "1 device")
    return asked("gpt3-175b", "hgx-h100", 512, 1536, 2048, Left(free, 512), fix="tp=8,pp=16")


def uneven_racks() -> DevicesLeft:
    """Four racks, of which one has twelve devices taken."""
    free = (72, 72, 72, 60)
    return asked("deepseek-v3", "gb200-nvl72", sum(free), 2160, 4096, Left(free), fix=LEAN)


def one_slow() -> DevicesLeft:
    """Waiting for it, or going on without it."""
    cluster = load_cluster("hgx-h100")
    left = Left(supernode_counts(cluster, 64), None, cluster)
    return asked("llama-3.1-70b", "hgx-h100", 64, 128, 4096, left, fix="tp=4,pp=8")


def asked(model: str, name: str, devices: int, batch: int, length: int, left: Left, fix: str) -> DevicesLeft:
    """What the plan says of its devices; told on stderr which one is searched for."""
    print(f"planning {model} on what is left of {devices:,} of {name}", file=sys.stderr, flush=True)
    cluster = load_cluster(name)
    problem = build_problem(
        model, cluster if left.unslowed is None else slowed(cluster, {"device": SLOW}), devices, batch, length, fix=fix
    )
    found = plan(problem, top=1, left=left).devices_left
    assert found is not None
    return found


def step(seconds: float | None) -> str:
    return "nothing fits" if seconds is None else wording.seconds(seconds)


def frame(option: LeftOption) -> str:
    return "" if option.layout is None else degrees(option.layout)

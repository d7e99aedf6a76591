"""Equal accelerators in supernodes of growing size, for models of growing size."""

from __future__ import annotations

from clusters import best, supernodes, three_tier
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces.inputs import load_model

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
SIZES = (8, 64, 72, 128, 384, 768, 1024, 8192, 15488)
RACK, USED = 72, 64
"""A rack, and what is used of it where groups of powers of two are to tile it."""
FLAT = 0.02
"""Share of the best step within which a smaller supernode is as good."""
WORTH = 0.03
HUNDREDS = 100
TRILLION = 1e12


def supernode_sizes() -> str:
    """The section on what a larger supernode brings."""
    rows, flat, gains, spared = [], {}, {}, {}
    beside: dict[str, tuple[float, float]] = {}
    for model, devices, batch, fix in JOBS:
        four, eight = (best(model, three_tier(ratio), devices, batch, fix=fix) for ratio in (4.0, 8.0))
        steps: dict[int, float] = {}
        for size in SIZES:
            whole = next((s for s in steps if s >= devices), None)  # one supernode holds the job already
            steps[size] = steps[whole] if whole else best(model, supernodes(size), devices, batch, fix=fix).step_time_s
        idle = best(model, supernodes(USED), devices * USED // RACK, batch, fix=fix).step_time_s
        spared[model] = steps[RACK] / idle
        least = min(steps.values())
        flat[model] = next(size for size in SIZES if steps[size] <= least * (1.0 + FLAT))
        gains[model] = four.step_time_s / least
        beside[model] = four.step_time_s / steps[RACK], four.step_time_s / steps[USED]
        rows.append(
            (
                f"{model}, {_size(model)}",
                f"{devices:,}",
                f"{wording.seconds(four.step_time_s)}, {wording.percent(four.mfu)}",
                f"{four.step_time_s / eight.step_time_s:.2f}",
                *(f"{four.step_time_s / steps[size]:.2f}" for size in SIZES),
                f"{four.step_time_s / idle:.2f}",
                f"{flat[model]:,}",
            )
        )
    heads = ("model", "devices", "4:1: step, MFU", "8:1", *(f"{size:,}" for size in SIZES), f"{USED} of {RACK}", "flat from")
    large = [model for model, *_ in JOBS if load_model(model).parameters() >= TRILLION]
    meeting = [model for model in large if flat[model] >= HUNDREDS]
    said = "Agrees" if len(meeting) == len(large) else "Depends on the model" if meeting else "Wrong here"
    none = [model for model in gains if gains[model] < 1.0 + WORTH]
    most = max(gains, key=lambda model: gains[model])
    return f"""## How large a supernode has to be

Report: a trillion parameters want supernodes of hundreds of cards at least; small models gain nothing.

H100 throughout, so that only the network differs: servers of eight in a three-tier network whose core is oversubscribed 4:1 or
8:1, or supernodes with the server's bandwidth and latency among so many cards and an adapter of 50 GB/s each, not oversubscribed,
between. The mixtures have micro-batch 1 and four kinds of recompute to choose from, to keep searches short. Figures are speed over
that of the 4:1 cluster, each with its own best layout; “flat from” is the smallest supernode within {FLAT:.0%} of the best.
“{USED} of {RACK}” leaves eight cards of every rack idle and is counted with them: a ninth of the job's devices does nothing.
Columns from the job's size on are one machine, all of the job in one supernode: that the gain is flat there says nothing of larger
jobs.

{markdown(heads, rows)}

**{said}.** Of the models from a trillion parameters on, {", ".join(f"{model} wants {flat[model]:,}" for model in large)}. Less than
{WORTH:.0%} are in it for {", ".join(none) if none else "none"}; most, {gains[most]:.2f}×, for {most}. It is not the number of
parameters that asks for a large supernode but the number of experts among which tokens are exchanged: dense models keep TP and CP
within a server and hide the rest, and a mixture of few experts is served by as many cards as it has experts. {_seventy_two(beside)}
{_idle(spared)}
"""


def _idle(spared: dict[str, float]) -> str:
    """For which models leaving eight of 72 idle is worth it, by speed over that of all 72 in use."""
    won = {model: gain for model, gain in spared.items() if gain > 1.0}
    lost = {model: gain for model, gain in spared.items() if gain <= 1.0}
    first, second = (", ".join(f"{model} ({gain:.2f}×)" for model, gain in group.items()) for group in (won, lost))
    gained = (
        f"Leaving eight of each idle gains for {first}, in spite of fewer devices"
        if won
        else "Leaving eight of each idle never gains"
    )
    return f"{gained}; what it leaves of the speed of all 72: {second}." if lost else f"{gained}."


def _seventy_two(beside: dict[str, tuple[float, float]]) -> str:
    """For which models racks of 72 are worth less than supernodes of 64, by what both gain over the 4:1 cluster."""
    worse = [f"{model} ({rack:.2f}× against {used:.2f}×)" for model, (rack, used) in beside.items() if rack < used * (1.0 - FLAT)]
    if not worse:
        return f"Racks of {RACK}, all in use, are worth what supernodes of {USED} are to all."
    others = "" if len(worse) == len(beside) else "; the others lose nothing by it"
    why = "groups of powers of two straddle their boundaries"
    return f"Racks of {RACK}, all in use, are worth less than supernodes of {USED} for {', '.join(worse)}: {why}{others}."


def _size(model: str) -> str:
    parameters = load_model(model).parameters()
    return f"{parameters / 1e12:.1f}T" if parameters >= TRILLION else f"{parameters / 1e9:.0f}B"

"""How wide TP may be inside a CloudMatrix384, and what EP pays for leaving a supernode."""

from __future__ import annotations

from itertools import pairwise, product

from clusters import best, communication_s, compute_s, supernodes
from paraplan.optimizer import PricedLayout, build_problem, evaluate
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.ranks import groups
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.further import degrees
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces import Problem

MODEL, CLUSTER, DEVICES, BATCH = "moe-1.8t", "cloudmatrix-384", 3072, 6144
SEARCHED = (1, 2, 4, 8, 16, 32)
BEYOND = (64, 128, 256)
"""More TP ranks than the model's KV heads (32) or heads (128): the stack refuses it, and it is priced all the same."""
UNSEARCHED_EP = 16
GRID = {"PP": (4, 6, 12, 16), "VPP": (1, 2, 4), "micro-batch": (1, 2, 4), "ETP": (1, 2, 4, 8)}
"""Degrees of the layouts that are priced where none is searched."""
CLAIMED = 128
EP, SMALL, LARGE = 64, 8, 1024
EXPERTS, SPREAD_DEVICES, SPREAD_BATCH, SUPERNODE = 16, 6144, 12288, 768
INSIDE_ORDER, SPREAD_ORDER = "tp-cp-ep-dp-pp", "pp-tp-cp-dp-ep"
"""Ranks of an EP group side by side, and as far apart as a program can lay them: each dp·pp ranks from the next."""
BALANCED = 0.25
"""Distance of communication over compute from one within which the two are called balanced."""


def tensor_parallel() -> str:
    """The section on TP."""
    problem = build_problem(MODEL, CLUSTER, DEVICES, BATCH, 4096, fix="etp=1|2|4|8")
    found = {tp: best(MODEL, CLUSTER, DEVICES, BATCH, fix=f"tp={tp}") for tp in SEARCHED}
    found |= {tp: priced for tp in BEYOND if (priced := _unsearched(problem, tp))}
    ratio = {tp: _per_layer(priced) for tp, priced in found.items()}
    rows = [
        (
            str(tp),
            wording.seconds(priced.step_time_s),
            wording.percent(priced.mfu),
            f"{ratio[tp]:.2f}",
            degrees(priced.layout),
        )
        for tp, priced in found.items()
    ]
    fastest = min(found, key=lambda tp: found[tp].step_time_s)
    nearest = min(ratio, key=lambda tp: abs(ratio[tp] - 1.0))
    even = abs(ratio[nearest] - 1.0) <= BALANCED
    balance = f"Communication comes nearest to compute at TP {nearest} ({ratio[nearest]:.2f})"
    slower = found[CLAIMED].step_time_s / found[fastest].step_time_s - 1.0
    said = "agrees" if fastest == CLAIMED else "depends on what balance means" if even and nearest == CLAIMED else "wrong here"
    return f"""## TP inside a CloudMatrix384

Report: TP 128 balances communication against compute inside the supernode.

{MODEL} on {DEVICES:,} dies, batch {BATCH:,}; the best layout with each TP. Beyond the model's 32 KV heads the stack refuses TP:
those rows are the fastest that fit of a grid, priced all the same: {_grid_words()}. “per layer” is communication (tp, cp, ep) over
compute (forward, backward, recompute), of both what shows: what a stack hides behind compute is left out.

{markdown(("TP", "step", "MFU", "per layer", "layout"), rows)}

**{said.capitalize()}.** The shortest step is that of TP {fastest}; TP {CLAIMED} is {wording.percent(slower)} slower. {balance}{
        "" if even else ", which is no balance"
    }. {_trend(ratio)}
"""


def _grid_words() -> str:
    """«PP 4, 6, 12, 16; …»."""
    said = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in GRID.items())
    return f"{said}; EP {UNSEARCHED_EP}, the optimizer offloaded"


def _trend(ratio: dict[int, float]) -> str:
    """Whether communication over compute rises with every doubling of TP."""
    rises = [wide for narrow, wide in pairwise(ratio) if ratio[wide] > ratio[narrow]]
    least, most = min(ratio), max(ratio)
    grows = "with every wider group" if len(rises) == len(ratio) - 1 else f"in {len(rises)} of {len(ratio) - 1} steps"
    return f"From TP {least} to TP {most} communication grows {grows}, from {ratio[least]:.2f} of compute to {ratio[most]:.2f}."


def expert_parallel() -> str:
    """The section on EP: on CloudMatrix384, then of a model whose groups are wider."""
    return f"""## EP inside one supernode and across eight

Report: the exchange of tokens belongs inside; across eight supernodes it eats the step. “ep” is the exposed exchange of tokens as
a share of the step.

{_on_cloudmatrix()}
{_on_servers()}"""


def _on_cloudmatrix() -> str:
    inside = best(MODEL, CLUSTER, SPREAD_DEVICES, SPREAD_BATCH, fix=f"ep={EXPERTS}")
    words = f"ep={EXPERTS},rank_order={SPREAD_ORDER}"
    across = best(MODEL, CLUSTER, SPREAD_DEVICES, SPREAD_BATCH, fix=words, rank_order="all")
    problem = build_problem(MODEL, CLUSTER, SPREAD_DEVICES, SPREAD_BATCH, 4096)
    back, _ = evaluate(problem, across.layout.model_copy(update={"rank_order": INSIDE_ORDER}), replayed=False)
    touched = len({rank // SUPERNODE for rank in groups(across.layout)["ep"][0]})
    cases = (
        (f"best with EP {EXPERTS} inside one supernode", inside),
        (f"best with EP {EXPERTS} across {touched} supernodes", across),
        ("the same layout with EP inside", back),
    )
    loses, moved = across.step_time_s / inside.step_time_s - 1.0, across.step_time_s / back.step_time_s - 1.0
    return f"""{MODEL} on {SPREAD_DEVICES:,} dies of CloudMatrix384, 8 supernodes, batch {SPREAD_BATCH:,}. The model has {
        EXPERTS
    } experts, so
that side by side an EP group never leaves a supernode; across them it is laid by the order {SPREAD_ORDER}, which a program can ask
of Megatron-Core: pipelines and TP inside, {EXPERTS // touched} ranks of an EP group in each supernode, `--inside` without ep.

{_table(cases)}

**{_verdict(loses)}.** Across, the best takes {wording.percent(loses)} longer; one layout, by its order alone, {
        wording.percent(moved)
    }. Much is computed of every token that goes to an expert as wide as these, which is why the exchange is not more of the step.
"""


def _on_servers() -> str:
    model, devices, batch = "deepseek-v3", 2048, 16384
    inside = best(model, supernodes(LARGE), devices, batch, fix=f"ep={EP}")
    across = best(model, supernodes(SMALL), devices, batch, fix=f"ep={EP}")
    free = best(model, supernodes(SMALL), devices, batch)
    same, _ = evaluate(build_problem(model, supernodes(SMALL), devices, batch, 4096), inside.layout, replayed=False)
    cases = (
        (f"EP {EP} inside one supernode of {LARGE:,}", inside),
        (f"the same layout, EP across {EP // SMALL} supernodes of {SMALL}", same),
        (f"best with EP {EP} across {EP // SMALL} supernodes of {SMALL}", across),
        (f"best at all on supernodes of {SMALL}", free),
    )
    loses = same.step_time_s / inside.step_time_s - 1.0
    kept = free.layout.ep <= SMALL
    return f"""{model} on {devices:,} H100 of equal servers, batch {batch:,}; only the size of the supernode differs.

{_table(cases)}

**{_verdict(loses)}.** Moved across, the layout takes {wording.percent(loses)} longer. The search answers with EP {
        free.layout.ep
    }, {"which stays" if kept else "which does not stay"} inside a server, and
its step is {wording.percent(free.step_time_s / inside.step_time_s - 1.0)} longer than inside the large supernode.
"""


def _table(cases: tuple[tuple[str, PricedLayout], ...]) -> str:
    rows = [
        (
            words,
            wording.seconds(priced.step_time_s),
            wording.percent(priced.mfu),
            wording.percent(priced.breakdown_s["ep"] / priced.step_time_s),
            wording.percent(priced.cross_supernode_share),
            degrees(priced.layout),
        )
        for words, priced in cases
    ]
    return markdown(("where", "step", "MFU", "ep", "traffic across", "layout"), rows)


def _verdict(loses: float) -> str:
    return "Agrees" if loses > 0.1 else "Wrong here" if loses < 0.02 else "Depends"


def _per_layer(priced: PricedLayout) -> float:
    return (communication_s(priced) - priced.breakdown_s["pp"] - priced.breakdown_s["dp"]) / compute_s(priced)


def _unsearched(problem: Problem, tp: int) -> PricedLayout | None:
    """The fastest that fits of a grid of layouts that break no rule but those on heads; None if none does."""
    fitting = []
    for pp, vpp, micro_batch, etp in product(*GRID.values()):
        dp, rest = divmod(problem.devices, tp * pp)
        if rest or problem.workload.global_batch % (dp * micro_batch) or tp * dp % (UNSEARCHED_EP * etp):
            continue
        if vpp > 1 and problem.workload.global_batch // (dp * micro_batch) % pp:
            continue
        words = f"tp={tp},pp={pp},vpp={vpp},ep={UNSEARCHED_EP},etp={etp},micro_batch={micro_batch},offload=optimizer:1"
        priced, broken = evaluate(problem, complete(problem, parse_layout(words)), replayed=False)
        if priced.memory.verdict == "fits" and all("heads" in sentence for sentence in broken):
            fitting.append(priced)
    return min(fitting, key=lambda priced: priced.step_time_s, default=None)

"""Ways to cut well-known models into stages, priced alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from paraplan.cost_models.profile import load_profile
from paraplan.cost_models.step import CostModel
from paraplan.optimizer import PricedLayout, build_problem, evaluate
from paraplan.optimizer.evaluation import with_default_stages
from paraplan.optimizer.exporters.splits import megatron_layout, parse_megatron_layout
from paraplan.optimizer.layout_words import complete, parse_layout
from paraplan.optimizer.recutting import Recut, proved
from paraplan.optimizer.reports import wording
from paraplan.optimizer.reports.validation import markdown
from paraplan.search_spaces import Layout, Problem
from paraplan.search_spaces.layout import LayoutTable, Split
from paraplan.search_spaces.stack import Stack

PROOF_SECONDS = 1.0
"""Deterministic seconds of CP-SAT for each layout."""
MARGIN = 0.05
"""Share of the memory that every partition has to leave free, ours and the others."""
EQUAL = 5e-4
"""Difference of steps, as a share, below which two partitions are called equally good."""


@dataclass(frozen=True)
class Job:
    """A problem, a layout without its stages, and the published partition as a Megatron layout string (none: even)."""

    model: str
    cluster: str
    devices: int
    global_batch: int
    seq_len: int
    stack: str | Stack
    precision: str
    words: str
    published: str = ""

    @property
    def problem(self) -> Problem:
        asked = (self.model, self.cluster, self.devices, self.global_batch, self.seq_len, self.stack, self.precision)
        return build_problem(*asked, memory_margin=MARGIN)


V3 = ("deepseek-v3", "hgx-h800", 2048, 16384, 4096, "megatron-bridge", "fp8")
LLAMA = ("llama-3.1-405b", "hgx-h100", 8192, 2048, 8192, "megatron-lm", "bf16")
OLDER = tuple((*LLAMA[:5], stack, "bf16") for stack in ("megatron-lm-0.12", "nemo-25", "nemo-24"))
KIMI = ("kimi-k2", "hgx-h100", 512, 4096, 4096, "megatron-bridge", "bf16")
GPT = ("gpt3-175b", "hgx-a100", 1024, 1536, 2048, "megatron-lm", "bf16")
QWEN = ("qwen3-235b-a22b", "hgx-h100", 256, 2048, 4096, "megatron-bridge", "bf16")
V3_H100 = ("deepseek-v3", "hgx-h100", 1024, 8192, 4096, "megatron-bridge", "bf16")
GLM = ("glm-5", "hgx-b200", 2048, 8192, 4096, "megatron-bridge", "bf16")
SELECTIVE = "recompute=selective:layernorm+mla_up_proj+moe_act"
FULL = "recompute=full"
JOBS = (
    Job(*V3, f"pp=16,ep=64,{FULL}", "Et*4|(t*4|)*14tmL"),
    Job(*V3, f"pp=16,vpp=2,ep=64,{FULL}", "Et*3|(tt|)*29m|L"),
    Job(*V3_H100, "tp=2,pp=8,vpp=4,ep=64,recompute=selective:mla_up_proj+mlp", "Et|(tt|)*30mL"),
    Job(*V3_H100, "tp=2,pp=8,vpp=4,ep=64,recompute=selective:mla_up_proj+mlp,offload=optimizer:1", "Ettt|(tt|)*29m|L"),
    Job(*GLM, f"tp=2,pp=8,vpp=4,ep=32,{FULL}"),
    Job(*LLAMA, f"tp=8,pp=16,{FULL}", "Et*7|(t*8|)*14t*7L"),
    Job(*LLAMA, f"tp=8,pp=16,vpp=4,{FULL}", "Et|(tt|)*62tL"),
    Job(*LLAMA, f"tp=8,pp=16,vpp=7,{FULL}"),
    Job(*LLAMA, f"tp=8,pp=16,vpp=8,{FULL}", "E|(t|)*126L"),
    *(Job(*older, f"tp=8,pp=16,{FULL}") for older in OLDER),
    *(Job(*older, f"tp=8,pp=16,vpp=7,{FULL}") for older in OLDER),
    Job(*KIMI, f"tp=2,pp=16,ep=32,{SELECTIVE}", "Et*4|(t*4|)*14tL"),
    Job(*GPT, "tp=8,pp=8"),
    Job(*GPT, "tp=8,pp=8,vpp=3"),
    Job(*QWEN, f"tp=2,pp=8,ep=32,{FULL}", "Et*11|(t*12|)*6t*11L"),
    Job(*QWEN, f"tp=2,pp=8,vpp=4,ep=32,{FULL}", "Et*2|(t*3|)*30t*2L"),
)


def partitions() -> str:
    """The section on partitions."""
    rows, ours_over, proofs = [], [], []
    for job in JOBS:
        print(f"cutting {job.model} {job.words}", file=sys.stderr, flush=True)
        problem = job.problem
        model = CostModel(problem, load_profile(problem.cluster.accelerator.priced_as))
        layout = with_default_stages(model, complete(problem, parse_layout(job.words)))
        found = proved(model, layout, PROOF_SECONDS) if problem.stack.cuts_freely(layout.vpp) else None
        ways = {"ours": layout if found is None else found.layout, **dict(_framework_ways(model, layout))}
        if job.published:
            stages = parse_megatron_layout(job.published, layout.pp)
            ways["published"] = layout.model_copy(update={"vpp": len(stages[0].chunks), "stages": stages})
        priced = {name: evaluate(problem, way, replayed=False)[0] for name, way in ways.items()}
        ours = priced["ours"]
        rows += [_row(job, name, one, ours) for name, one in priced.items()]
        alike = {name: one for name, one in priced.items() if name != "ours" and one.memory.verdict == ours.memory.verdict}
        ours_over.append({name: one.step_time_s / ours.step_time_s - 1.0 for name, one in alike.items()})
        if found is not None:
            proofs.append(_proof(job, found))
    return f"""## Partitions

Each row is one layout with other stages, priced by `evaluate`. ours: `optimizer/stages.py` for 1F1B, `optimizer/recutting.py` after
it, whose CP-SAT bound is below. even: equal layers, where they divide. account: Megatron-LM's account-for-embedding and -loss,
which count each as a layer. overrides: its first and last stage apart, the best over all. MTP stays with the loss in all three.
{", ".join(older[5] for older in OLDER)} set the first and the last stage apart and no other: ours is then the
best that they can be told, and CP-SAT has no cuts to find.
Every partition has to leave {MARGIN:.0%} of the memory free, where one of its kind can.

{markdown(("job", "way", "step", "on ours", "peak", "layout string"), rows, code=(5,))}

How much shorter other cuts could make the step at most, as proved by CP-SAT in {PROOF_SECONDS:g}
deterministic seconds each:

{markdown(("job", "gap", "cutting planes"), proofs)}

{_conclusion(ours_over)}
"""


def _framework_ways(model: CostModel, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """The partitions that Megatron's other options reach, each kind's best."""
    layers = model.problem.model.num_layers
    kinds = {
        "even": [_with_ends(layers, layout, 0, 0)],
        "account": [_with_ends(layers, layout, *ends) for ends in ((1, 0), (0, 1), (1, 1))],
        "overrides": [_overridden(layers, layout, *ends) for ends in product(range(1, layers), repeat=2)],
    }
    for kind, ways in kinds.items():
        legal = [way for way in ways if way is not None]
        if legal:
            yield kind, _fastest(model, layout, legal)


def _with_ends(layers: int, layout: Layout, embedding: int, loss: int) -> tuple[int, ...] | None:
    """Layers per chunk where embedding and loss count as layers; None where that does not come out whole."""
    chunks = layout.pp * layout.vpp
    each, rest = divmod(layers + embedding + loss, chunks)
    if rest or each <= max(embedding, loss):
        return None
    return (each - embedding, *[each] * (chunks - 2), each - loss)


def _overridden(layers: int, layout: Layout, first: int, last: int) -> tuple[int, ...] | None:
    """Layers per chunk with that many on the first and on the last stage; None where the rest does not come out whole."""
    each, rest = divmod(layers - first - last, layout.pp - 2)
    if rest or each < 1 or any(count % layout.vpp for count in (first, each, last)):
        return None
    turn = (first // layout.vpp, *[each // layout.vpp] * (layout.pp - 2), last // layout.vpp)
    return turn * layout.vpp


def _fastest(model: CostModel, layout: Layout, ways: Sequence[tuple[int, ...]]) -> Layout:
    """The layout with the fastest of the ways that fit, else of all."""
    rows = model.rows(LayoutTable.from_layouts([layout]))
    cuts = np.concatenate([np.zeros((len(ways), 1), dtype=np.int64), np.cumsum(ways, axis=1)], axis=1)
    cuts[:, -1] = len(model.blocks)
    priced = model.price_cuts(rows.take(np.zeros(len(ways), dtype=np.intp)), cuts)
    best = int(np.lexsort((priced.step_time_s, ~priced.fits))[0])
    split = Split(layout.pp, layout.vpp, tuple(int(cut) for cut in cuts[best]))
    return layout.model_copy(update={"stages": split.stages(model.problem.model.num_layers, layout.recompute)})


def _name(job: Job) -> str:
    stack = f"{job.stack}, " if job.stack in [older[5] for older in OLDER] else ""
    return f"{job.model}, {stack}{job.words}".replace("recompute=selective:", "").replace(",recompute=full", "")


def _row(job: Job, name: str, priced: PricedLayout, ours: PricedLayout) -> tuple[str, ...]:
    over = priced.step_time_s / ours.step_time_s - 1.0
    return (
        _name(job),
        name,
        wording.seconds(priced.step_time_s, 4),
        "" if priced is ours else "equal" if abs(over) <= EQUAL else wording.signed(wording.percent(over)),
        f"{wording.gib(priced.memory.peak_gib)}, {priced.memory.verdict}",
        megatron_layout(priced.layout.stages),
    )


def _proof(job: Job, found: Recut) -> tuple[str, str, str]:
    return _name(job), wording.percent(found.gap), str(found.rounds)


def _conclusion(ours_over: Sequence[dict[str, float]]) -> str:
    """What the table says, in words."""

    def span(name: str) -> str:
        shares = [over[name] for over in ours_over if name in over]
        if not shares:
            return f"- {name}: nowhere legal with ours' verdict on memory."
        equal, faster = sum(abs(share) <= EQUAL for share in shares), sum(share < -EQUAL for share in shares)
        return (
            f"- {name}: of {len(ours_over)} jobs {len(shares)} can use it at ours' verdict on memory; as good as ours in {equal}, "
            f"faster in {faster}, at worst {wording.percent(max(shares))} slower."
        )

    faster = [over["published"] for over in ours_over if over.get("published", 0.0) < -EQUAL]
    beaten = "No published partition is faster than ours."
    if faster:
        beaten = f"In {len(faster)} jobs the published partition is faster than ours, by up to {wording.percent(-min(faster))}."
    return "\n".join(span(name) for name in ("even", "account", "overrides", "published")) + f"\n\n{beaten}"

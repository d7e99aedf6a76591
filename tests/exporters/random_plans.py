"""Plans drawn at random from the spaces that the search lists, and layouts drawn without regard to any rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from paraplan.optimizer.ranks import server_place
from paraplan.optimizer.result import Certificate, Memory, Plan, PricedLayout
from paraplan.search_spaces.cutting import Cutting
from paraplan.search_spaces.enumeration import Space
from paraplan.search_spaces.inputs import build_problem
from paraplan.search_spaces.layout import Layout, Problem, Split
from paraplan.search_spaces.quantities import led_layers
from paraplan.search_spaces.vocabulary import V_SHAPED

PROBLEMS = (
    ("llama-3.1-70b", 256, 1024, 8192),
    ("deepseek-v3", 512, 4096, 4096),
    ("qwen3-235b-a22b", 512, 2048, 4096),
    ("gpt3-175b", 384, 1536, 2048),
    ("mixtral-8x22b", 128, 512, 8192),
    ("gpt-oss-120b", 128, 512, 4096),
)
"""Model, devices, global batch and sequence length."""


@cache
def space(stack: str, cluster: str, model: str, devices: int, batch: int, seq_len: int) -> Space:
    return Space(
        build_problem(model, cluster, devices, batch, seq_len, stack, fix="etp=1|2" if stack.startswith("megatron") else "")
    )


def plans(
    count: int,
    seed: int,
    stack: str = "megatron-lm",
    cluster: str = "hgx-h100",
    problems: tuple[Any, ...] = PROBLEMS,
    cut: Callable[..., Split] | None = None,
) -> Iterator[Plan]:
    """Legal plans on whole servers, of every model in turn, with cuts and depths of recompute of their own wherever the stack can
    be told any."""
    rng = random.Random(seed)
    while count:
        for case in problems:
            own = space(stack, cluster, *case)
            table, _ = own.layouts(np.array([rng.randrange(len(own.frames))]))
            if not len(table):
                continue
            spec = own.problem.model
            layout = table.layout(rng.randrange(len(table)), spec.num_layers)
            if layout.devices % own.problem.cluster.allocated_sizes(layout.devices)[server_place(own.problem.cluster)]:
                continue
            blocks = spec.num_layers + (spec.mtp.layers if spec.mtp else 0)
            split = (cut or cuts)(rng, own.problem, layout, spec.num_layers, blocks)
            recompute = layout.recompute
            if own.problem.stack.recompute_by_chunk and recompute == "full":
                split = replace(split, redone=tuple(rng.randint(0, count) for count in split.counts))
                recompute = f"full:block:{max(split.redone)}" if any(split.redone) else "none"
            chosen = layout.model_copy(update={"recompute": recompute, "stages": split.stages(spec.num_layers, recompute)})
            yield plan(own.problem, chosen)
            count -= 1
            if not count:
                return


def cuts(rng: random.Random, problem: Problem, layout: Layout, layers: int, blocks: int) -> Split:
    """Contiguous chunks of a layer or more, the MTP layers in the last; where the stack can be told no others, even ones or ones
    whose first and last stage are apart."""
    chunks, free = layout.pp * layout.vpp, problem.stack.cuts_freely(layout.vpp)
    if free and chunks > layers:  # ends without layers
        return ragged(rng, problem, layout, layers, blocks)
    if layers % chunks == 0 and (not free or rng.random() < 0.3):
        inner = [n * layers // chunks for n in range(1, chunks)]
    elif free:
        inner = sorted(rng.sample(range(1, layers), chunks - 1))
        led = led_layers(problem.model, problem.stack)
        if layout.pp > 1 and inner[layout.vpp - 1] < led:  # as far as the first stage must hold
            inner = sorted(rng.sample(range(led, layers), chunks - layout.vpp))
            inner = [*sorted(rng.sample(range(1, inner[0]), layout.vpp - 1)), *inner]
    else:
        each, round_ = layers // chunks, layers // layout.vpp
        ends = round_ - each * (layout.pp - 2)
        counts = [ends // 2, *[each] * (layout.pp - 2), ends - ends // 2] * layout.vpp
        inner = list(accumulate(counts))[:-1]
    return Split(layout.pp, layout.vpp, (0, *inner, blocks))


def any_layouts(count: int, seed: int, problem: Problem) -> Iterator[Layout]:
    """Layouts of any degrees that multiply to the devices, most of them illegal."""
    rng = random.Random(seed)
    for _ in range(count):
        tp, cp, pp = rng.choice([1, 2, 3, 4, 6, 8, 16]), rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 4, 5, 7, 8])
        dp = max(1, problem.devices // (tp * cp * pp))
        vpp = rng.choice([1, 1, 2, 3])
        moe = problem.model.is_moe
        yield Layout(
            tp=tp,
            cp=cp,
            pp=pp,
            dp=dp,
            ep=rng.choice([1, 2, 3, 8, 12, 16, 48]) if moe else rng.choice([1, 1, 1, 2]),
            etp=rng.choice([1, 1, 2, 4]),
            vpp=vpp,
            micro_batch=1,
            num_microbatches=max(1, problem.workload.global_batch // dp),
            schedule="interleaved" if vpp > 1 else "1f1b",
            sequence_parallel=rng.random() < 0.7,
            cp_type=rng.choice(["p2p", "a2a", "allgather"]),
            recompute=rng.choice(
                ["none", "full", "full:uniform:2", "selective:core_attn", "selective:mla_up_proj", "selective:moe_act"]
            ),
        )


def plan(problem: Problem, layout: Layout) -> Plan:
    """A plan around a layout; its predictions are only there to be printed."""
    certificate = Certificate(
        status="optimal",
        space="one layout",
        legal=1,
        scored=1,
        cut_by_bound=0,
        cut_by_memory=0,
        lower_bound_s=8,
        gap=0,
        seconds=0.1,
    )
    priced = PricedLayout(
        layout=layout,
        step_time_s=8.0,
        step_time_interval_s=(7.2, 9.1),
        tokens_per_s_per_device=1000.0,
        model_tflops_per_device=400.0,
        mfu=0.4,
        mfu_full_attention=0.41,
        hfu=0.4,
        breakdown_s={"forward": 8.0},
        memory=Memory(capacity_gib=80.0, usable_gib=72.0, peak_gib=60.0, verdict="fits", stages=()),
        traffic_gib={},
        cross_supernode_share=0.1,
        devices_used=layout.devices,
        devices_idle=problem.devices - layout.devices,
    )
    return Plan(paraplan="0.1.0", problem=problem, assumptions=(), plan=priced, certificate=certificate)


def ragged(rng: random.Random, problem: Problem, layout: Layout, layers: int, blocks: int) -> Split:
    """Any cut that the search may choose: chunks at the ends without layers, MTP layers before the loss, V shapes."""
    if not problem.stack.cuts_freely(layout.vpp):
        return cuts(rng, problem, layout, layers, blocks)
    led = led_layers(problem.model, problem.stack)
    cutting = Cutting.of(problem.stack, layers, blocks - layers, layout.pp, layout.vpp, led)
    while True:
        found = [0]
        for chunk in range(1, cutting.chunks):
            first = max(found[-1] + int(cutting.least[chunk - 1]), cutting.earliest(chunk))
            last = max(first, int(cutting.latest[chunk]))
            share = first + (last - first) // (cutting.chunks - chunk)
            found.append(rng.choice([first, min(share, last), rng.randint(first, last), last]))
        if cutting.legal(np.array([[*found, blocks]]))[0]:
            return Split(layout.pp, layout.vpp, (*found, blocks), layout.schedule in V_SHAPED)

"""The oracle of the search: small problems made at random, and their best layouts found by listing everything.

Nothing here uses the enumeration, the bounds or the partition of the product: degrees come from nested loops, legality from
the rules read one layout at a time, stages from every contiguous cut. Only the price of a layout with given stages is the
product's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement, pairwise, product

import numpy as np
import numpy.typing as npt
from paraplan.cost_models.step import CostModel, same_shape
from paraplan.optimizer.stages import best_partitions, cut_family, default_cuts, partitioned_exactly
from paraplan.search_spaces.cluster import ClusterSpec, Figure
from paraplan.search_spaces.flags import parse_constraint
from paraplan.search_spaces.inputs import load_cluster, load_stack
from paraplan.search_spaces.layer_kinds import Attention, DenseMlp, LatentAttention, LayerKind, MoeMlp, Mtp
from paraplan.search_spaces.layout import (
    CP_TYPES,
    RANK_ORDERS,
    SCHEDULES,
    SHARDINGS,
    Floats,
    Layout,
    LayoutTable,
    Problem,
    Recompute,
    Split,
    offload_text,
    parse_offload,
    parse_sharding,
)
from paraplan.search_spaces.model import ModelSpec
from paraplan.search_spaces.quantities import EVEN, constants
from paraplan.search_spaces.rules import Rule, rules_for
from paraplan.search_spaces.stack import Stack
from paraplan.search_spaces.workload import MemoryMargin, Workload

STACKS = ("megatron-lm", "mindspeed-llm", "torchtitan", "megatron-lm-0.12")
FRAME = ("tp", "cp", "pp", "dp", "ep", "etp")
FORBIDDEN = ("pp>4", "tp*cp>8", "dp==2", "micro_batch>2", "vpp==3", "ep<2", "cp_type==p2p", "rank_order==tp-cp-ep-dp-pp")
DEMANDED = (
    "tp*cp <= 6",
    "pp == 2 or vpp == 1",
    "not (tp == 2 and dp == 2)",
    "micro_batch*dp <= 12",
    "pp <= 3 and tp*pp <= 12",
    "ep <= 4 or etp == 1",
    "optimizer_sharding == zero1 or pp <= 2",
    "recompute == none or micro_batch == 1",
)
MOVED = (0.0, 0.25, 1.0)
BLOCK_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

Named = tuple[frozenset[str], Rule]
"""A rule with the columns that it reads."""


# --- problems ----------------------------------------------------------------------------------------------------------------


def random_problem(seed: int) -> Problem:
    """A small problem that no two seeds share: odd head counts, odd unit sizes, odd device counts, limits of the user's."""
    rng = random.Random(seed)
    stack = random_stack(rng)
    devices = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 18, 24, 30, 36, 48))
    model = random_model(rng)
    batch = rng.choice((4, 6, 8, 12, 15, 16, 18, 24, 30))
    inner = tuple(rng.sample(("tp", "cp", "ep", "dp"), rng.choice((1, 2))))
    workload = Workload(
        global_batch=batch,
        seq_len=rng.choice((96, 128, 192, 720)),
        fix=random_fix(rng, model, stack, batch),
        forbid=tuple(rng.sample(FORBIDDEN, rng.choice((0, 0, 1)))),
        inside={"supernode": inner} if rng.random() < 0.25 else {},
        memory_margin=MemoryMargin(fraction=0.05),
    )
    return Problem(model=model, cluster=random_cluster(rng), devices=devices, stack=stack, workload=workload)


def tiny_problem(seed: int) -> Problem:
    """A problem that is quick to list, on up to 72 devices: inner choices fixed to a few, two thirds under limits of the user's."""
    rng, rng_moved = random.Random(f"tiny {seed}"), random.Random(f"moved {seed}")
    problem = random_problem(seed)
    model = random_model(rng, most_layers=4)
    stack, batch = problem.stack, rng.choice((4, 6, 8, 12, 18, 24))
    shardings = [name for name in stack.optimizer_shardings if name != "hsdp"]
    fix = {
        "recompute": rng.choice((("none",), ("none", "full"))),
        "micro_batch": rng.choice((("1",), ("1", "2"), ("2",))),
        "rank_order": rng.choice(((stack.rank_orders[-1],), stack.rank_orders)),
        "cp_type": (stack.cp_types[0],),
        "optimizer_sharding": tuple(sorted(rng.sample(shardings, min(2, len(shardings))))),
    } | ({"etp": ("1",)} if model.is_moe and rng.random() < 0.7 else {})
    shares = (0.0, rng_moved.choice(MOVED)) if stack.activation_offload else (0.0,)
    fix |= {} if any(shares) else {"offload": ("none",)}
    forbid = tuple(rng.sample(FORBIDDEN, rng.choice((0, 0, 1)))) + parse_constraint(rng.sample(DEMANDED, rng.choice((0, 1, 1))))
    limits = {"fix": fix, "forbid": tuple(dict.fromkeys(forbid)), "activation_shares": tuple(sorted(set(shares)))}
    workload = problem.workload.model_copy(update={"global_batch": batch, **limits})
    devices = rng.choice((1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 18, 24, 36, 48, 72))
    return problem.model_copy(update={"model": model, "devices": devices, "workload": workload})


def random_stack(rng: random.Random) -> Stack:
    """A stack of the catalog, half of the time on a host so fast that unequal layers take unequal times."""
    stack = load_stack(rng.choice(STACKS))
    if rng.random() < 0.5:
        return stack
    fast = {"host_floor_dense_s": 1e-6, "host_floor_moe_s": 2e-6, "step_overhead_s": 1e-4}
    return stack.model_copy(update={name: given(value) for name, value in fast.items()})


def given(value: float) -> Figure:
    return Figure(value=value, source="test", grade="given")


def random_model(rng: random.Random, most_layers: int = 8) -> ModelSpec:
    """Two layers or more: dense, then MoE, or layers that hold a mixer or a feed-forward part only; with or without MTP."""
    heads = rng.choice((2, 3, 4, 6, 8, 12))
    kv_heads = rng.choice([h for h in (1, 2, 3, 4, 6, 12) if heads % h == 0])
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=64)
    latent = LatentAttention(heads=heads, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    mixer = rng.choice((attention, attention, latent))
    moe = MoeMlp(
        experts=rng.choice((4, 6, 8, 9)), top_k=rng.choice((1, 2)), width=rng.choice((192, 1536)), shared_width=rng.choice((0, 192))
    )
    kinds = {
        "dense": LayerKind(mixer=mixer, mlp=DenseMlp(width=rng.choice((384, 1152, 1536)))),
        "moe": LayerKind(mixer=mixer, mlp=moe),
        "mixer": LayerKind(mixer=mixer, norms=1),
        "narrow": LayerKind(mlp=DenseMlp(width=384), norms=1),
    }
    layers = rng.randint(2, most_layers)
    first = rng.randint(0, layers - 1) if rng.random() < 0.5 else layers
    order = ["dense"] * first + ["moe"] * (layers - first)
    if rng.random() < 0.3:
        order = ["mixer", *(rng.choice(("mixer", "narrow", order[-1])) for _ in range(layers - 2)), order[-1]]
    mtp = Mtp(layers=rng.choice((1, 1, 2)), kind=order[-1]) if rng.random() < 0.3 else None
    return ModelSpec(
        name="small",
        hidden_size=rng.choice((384, 768)),
        vocab_size=rng.choice((1000, 8192)),
        max_position_embeddings=1024,
        kinds={kind: kinds[kind] for kind in dict.fromkeys(order)},
        layers=tuple(order),
        tied_embeddings=rng.random() < 0.3,
        mtp=mtp,
    )


def random_cluster(rng: random.Random) -> ClusterSpec:
    """Two to four levels whose units divide nothing in particular."""
    sizes = rng.choice(((3,), (4,), (6,), (8,), (12,), (72,), (2, 6), (3, 12), (4, 24), (2, 4, 12), (3, 6, 18)))
    base = load_cluster("hgx-h100")
    inner, outer = base.levels
    levels = [
        inner.model_copy(
            update={
                "name": "supernode" if size == sizes[-1] else f"inner{size}",
                "size": size,
                "kind": rng.choice(("switched", "full_mesh")) if index == 0 else "switched",
                "in_network_reduction": rng.random() < 0.5,
            }
        )
        for index, size in enumerate(sizes)
    ]
    changed = {
        "name": "odd",
        "levels": (*levels, outer.model_copy(update={"oversubscription": rng.choice((1.0, 2.0))})),
        "supernode": "supernode",
        "communicator_bytes": given(1e8),
        "context_bytes": given(1e8),
    }
    return base.model_copy(update=changed)


def random_fix(rng: random.Random, model: ModelSpec, stack: Stack, batch: int) -> dict[str, tuple[str, ...]]:
    """Usually a few columns, which keeps a problem small."""
    fix: dict[str, tuple[str, ...]] = {}
    if rng.random() < 0.8:
        blocks = (("full:block:1", "full"), ("full:uniform:2", "none"), ("full:block:2",)) if stack.recompute_block else ()
        fix["recompute"] = rng.choice((("none",), ("none", "full"), *blocks))
    if model.is_moe and rng.random() < 0.7:
        fix["etp"] = ("1",)
    if not model.is_moe and rng.random() < 0.2:
        fix["sequence_parallel"] = ("false",)
    if rng.random() < 0.5:
        fix["micro_batch"] = rng.choice((("1",), ("1", "2"), ("3",)))
    if rng.random() < 0.1:
        fix["pp"] = (str(rng.randint(1, 5)),)
    if rng.random() < 0.1:
        fix["dp"] = (str(rng.choice([d for d in (1, 2, 3, 4, 6) if batch % d == 0])),)
    if rng.random() < 0.4:
        fix["offload"] = ("none",)
    if rng.random() < 0.3:
        fix["rank_order"] = (stack.rank_orders[-1],)
    return fix


def with_memory(problem: Problem, usable: float) -> Problem:
    """The same problem on devices of which so many bytes may be filled."""
    cluster = problem.cluster
    free = usable / (1.0 - problem.workload.memory_margin.fraction)
    accelerator = cluster.accelerator.model_copy(update={"memory_bytes": given(free + cluster.context_bytes.value)})
    return problem.model_copy(update={"cluster": cluster.model_copy(update={"accelerator": accelerator})})


# --- every legal layout ------------------------------------------------------------------------------------------------------


def legal_layouts(problem: Problem) -> list[Layout]:
    """Every layout of the documented space that breaks no rule, by loops over all degrees up to the device count.

    A rule is read, one set of integers at a time, as soon as all that it looks at is chosen.
    """
    fixed = constants(problem)
    # What the optimizer cuts, the stack can say.
    values = {**fixed, "placed_blocks": fixed["blocks"], "split_form": EVEN, "depths_apart": 0}
    rules = [(frozenset(rule.names), rule) for rule in rules_for(problem) if rule.scope != "memory"]
    found: dict[tuple[object, ...], Layout] = {}
    for frame, after_frame in _kept(_frames(problem), values, rules):
        framed = {**values, **frame}
        for pipeline, after_pipeline in _kept(_pipelines(problem, frame), framed, after_frame):
            for sharing, _ in _kept(_sharings(problem), {**framed, **pipeline}, after_pipeline):
                layout = _layout(frame, pipeline, sharing)
                found.setdefault(_meaning(problem.stack, layout), layout)
    return list(found.values())


def _kept(
    choices: Iterable[dict[str, int]], values: Mapping[str, int], rules: Sequence[Named]
) -> Iterator[tuple[dict[str, int], list[Named]]]:
    """Choices that break none of the rules that can now be read, each with the rules that still cannot.

    All choose the same columns.
    """
    chosen = list(choices)
    if not chosen:
        return
    known = {**values, **{name: np.array([choice[name] for choice in chosen]) for name in chosen[0]}}
    later = [(names, rule) for names, rule in rules if not names <= known.keys()]
    legal = np.ones(len(chosen), dtype=bool)
    for names, rule in rules:
        if names <= known.keys():
            legal &= rule.condition.mask(known)
    for place in np.flatnonzero(legal):
        yield chosen[place], later


def _frames(problem: Problem) -> Iterator[dict[str, int]]:
    """Grids that use more than half of the devices, or as many as the batch allows; all that fit where dp is fixed."""
    n, batch, c, fix = problem.devices, problem.workload.global_batch, constants(problem), problem.workload.fix
    degrees = range(1, n + 1)
    of_experts = [e for e in degrees if c["experts"] and c["experts"] % e == 0] or [1]
    of_width = [e for e in degrees if c["expert_width"] and c["expert_width"] % e == 0] or [1]
    depths = [int(pp) for pp in fix["pp"]] if "pp" in fix else range(1, min(n, c["blocks"]) + 1)
    for tp, cp, pp in product(degrees, degrees, depths):
        if tp * cp * pp > n or c["heads"] % tp or c["seq_len"] % cp:
            continue
        allowed = [dp for dp in degrees if batch % dp == 0 and tp * cp * pp * dp <= n]
        for dp in allowed:
            if "dp" not in fix and 2 * tp * cp * pp * dp <= n and dp != max(allowed):
                continue
            for ep, etp in product(of_experts, of_width):
                if tp * cp * dp % (ep * etp) == 0:
                    frame = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp, "edp": tp * cp * dp // (ep * etp)}
                    can = tp > 1 and c["seq_len"] % (tp * cp) == 0
                    on = can and problem.stack.sequence_parallel and fix.get("sequence_parallel") != ("false",)
                    yield {**frame, "devices_used": tp * cp * pp * dp, "sequence_parallel": int(on)}


def _pipelines(problem: Problem, frame: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """How the pipeline of a frame works through the batch, legal or not, where some cut of the space can be told to the stack."""
    stack, fix, layers = problem.stack, problem.workload.fix, problem.model.num_layers
    micro_batches = [int(v) for v in fix["micro_batch"]] if "micro_batch" in fix else range(1, 17)
    schedules = fix.get("schedule") or [s for s in stack.schedules if s in ("gpipe", "1f1b", "interleaved")]
    for micro_batch, vpp, schedule in product(micro_batches, range(1, 9), schedules):
        m, chunks = problem.workload.global_batch // (micro_batch * frame["dp"]), frame["pp"] * vpp
        most = layers + sum(_bare_ends(problem, 2)) - max(0, led_blocks(problem) - 1)
        cuttable = chunks <= most if stack.cuts_freely(vpp) else bool(told_cuts(problem, frame["pp"], vpp))
        turns = vpp == 2 if schedule in ("zb-v", "dualpipev") else (vpp > 1) == (schedule == "interleaved")
        needless = schedule == "gpipe" and frame["pp"] == 1 and "1f1b" in schedules
        if m == 0 or not turns or needless or (schedule == "interleaved" and m % frame["pp"]) or not cuttable:
            continue
        for text in fix.get("recompute") or recompute_choices(problem, chunks):
            recompute = Recompute.parse(text)
            yield {
                "micro_batch": micro_batch,
                "num_microbatches": m,
                "vpp": vpp,
                "schedule": SCHEDULES.index(schedule),
                "recompute_mode": recompute.mode,
                "recompute_modules": recompute.modules,
                "recompute_layers": recompute.layers,
            }


def _sharings(problem: Problem) -> Iterator[dict[str, int]]:
    """How ranks talk and share states, legal or not."""
    stack, fix = problem.stack, problem.workload.fix
    for cp_type, sharding, offload, order in product(
        [c for c in stack.cp_types if c in ("p2p", "allgather", "a2a")],
        shardings(problem),
        fix.get("offload", offloads(problem)),
        stack.rank_orders,
    ):
        code, hsdp = parse_sharding(sharding)
        yield {
            "cp_type": CP_TYPES.index(cp_type),
            "sharding": code,
            "hsdp": hsdp,
            "optimizer_offload_per_mille": round(1000 * parse_offload(offload)[0]),
            "activation_offload_per_mille": round(1000 * parse_offload(offload)[1]),
            "rank_order": RANK_ORDERS.index(order),
        }


def _layout(frame: Mapping[str, int], pipeline: Mapping[str, int], sharing: Mapping[str, int]) -> Layout:
    recompute = Recompute(*(pipeline[f"recompute_{part}"] for part in ("mode", "modules", "layers")))
    sharding = SHARDINGS[sharing["sharding"]]
    return Layout(
        **{name: frame[name] for name in (*FRAME, "edp")},
        **{name: pipeline[name] for name in ("vpp", "micro_batch", "num_microbatches")},
        sequence_parallel=bool(frame["sequence_parallel"]),
        cp_type=CP_TYPES[sharing["cp_type"]],
        schedule=SCHEDULES[pipeline["schedule"]],
        optimizer_sharding=f"hsdp:{sharing['hsdp']}" if sharding == "hsdp" else sharding,
        recompute=str(recompute),
        offload=offload_text(sharing["optimizer_offload_per_mille"] / 1000, sharing["activation_offload_per_mille"] / 1000),
        rank_order=RANK_ORDERS[sharing["rank_order"]],
    )


def recompute_choices(problem: Problem, chunks: int) -> list[str]:
    """None; every module that does something here, alone and with all before it; block depths below a mean chunk; full."""
    kinds = problem.model.kinds.values()
    moe = [kind.mlp for kind in kinds if isinstance(kind.mlp, MoeMlp)]
    there = {
        "core_attn": problem.stack.attention_kernel != "flash",
        "layernorm": True,
        "moe_act": bool(moe),
        "mla_up_proj": any(isinstance(kind.mixer, LatentAttention) for kind in kinds),
        "shared_experts": any(mlp.shared_width for mlp in moe),
        "mlp": any(isinstance(kind.mlp, DenseMlp) for kind in kinds),
        "moe": bool(moe),
    }
    chain = [name for name, useful in there.items() if useful and name in problem.stack.recompute_modules]
    sets = {frozenset([name]) for name in chain} | {frozenset(chain[:n]) for n in range(1, len(chain) + 1)}
    blocks = problem.model.num_layers + (problem.model.mtp.layers if problem.model.mtp else 0)
    depths = [k for k in BLOCK_DEPTHS if k * chunks < blocks] if problem.stack.recompute_block else []
    return ["none", *("selective:" + "+".join(sorted(s)) for s in sets), *(f"full:block:{k}" for k in depths), "full"]


def shardings(problem: Problem) -> list[str]:
    """Those of the stack; HSDP over whole units of the levels that are smaller than the job."""
    offered = problem.stack.optimizer_shardings
    sizes = {size for size in problem.allocated_sizes[:-1] if 1 < size < problem.devices}
    return [name for name in offered if name != "hsdp"] + [f"hsdp:{size}" for size in sorted(sizes) if "hsdp" in offered]


def offloads(problem: Problem) -> list[str]:
    """All optimizer states or none, where the stack moves them, with every share of activations that the problem lets go."""
    states = (0, 1) if problem.stack.optimizer_offload else (0,)
    return [offload_text(whole, share) for whole in states for share in problem.workload.activation_shares]


def _bare_ends(problem: Problem, vpp: int) -> tuple[bool, bool]:
    """Whether embedding, and loss or MTP layers, can be chunks without decoder layers: layout strings and offsets say so, but for
    the loss of a V shape, which no row of an offset ends with."""
    said = set(problem.stack.split_forms)
    return bool({"layout", "offset"} & said), "layout" in said or ("offset" in said and vpp != 2)


def led_blocks(problem: Problem) -> int:
    """Blocks until the first layer of experts, it included, which MindSpeed-LLM wants on the first stage; else none."""
    moe = [isinstance(problem.model.kinds[name].mlp, MoeMlp) for name in problem.model.layer_kinds]
    return moe.index(True) + 1 if problem.stack.framework == "mindspeed-llm" and True in moe[1:] and not moe[0] else 0


def legal_cuts(problem: Problem, pp: int, vpp: int = 1) -> list[tuple[int, ...]]:
    """Every way to cut a model's blocks into pp·vpp chunks that its stack can be told."""
    layers, chunks = problem.model.num_layers, pp * vpp
    blocks = layers + (problem.model.mtp.layers if problem.model.mtp else 0)
    inner = combinations_with_replacement(range(blocks + 1), chunks - 1)
    return [cuts for each in inner if can_be_told(problem, pp, vpp, cuts := (0, *each, blocks))]


def told_cuts(problem: Problem, pp: int, vpp: int) -> list[tuple[int, ...]]:
    """Every way of a stack that cannot be told any: equal chunks, or the layers of the first and the last stage, each of them and
    what a stage between is left with dealt to its chunks (Megatron-Core's TransformerConfig)."""
    layers = problem.model.num_layers
    blocks = layers + (problem.model.mtp.layers if problem.model.mtp else 0)
    counts = [[layers // pp] * pp] if layers % pp == 0 else []
    if "first_last" in problem.stack.split_forms and pp > 1:
        for first, last in product(range(1, layers), repeat=2):
            each, rest = divmod(layers - first - last, pp - 2) if pp > 2 else (1, layers - first - last)
            counts += [[first, *[each] * (pp - 2), last]] if rest == 0 and each > 0 else []
    whole = {tuple(each) for each in counts if all(held and held % vpp == 0 for held in each)}
    chunked = ([held // vpp for held in each] * vpp for each in sorted(whole))
    return [(*accumulate(each[:-1], initial=0), blocks) for each in chunked]


def can_be_told(problem: Problem, pp: int, vpp: int, cuts: tuple[int, ...]) -> bool:
    """Read off the letters of each chunk, as Megatron-Core reads its layout string."""
    layers, (bare_first, bare_last) = problem.model.num_layers, _bare_ends(problem, vpp)
    chunks = [["t" if block < layers else "m" for block in range(a, b)] for a, b in pairwise(cuts)]
    if not all(chunks[1:-1]) or not (chunks[0] or bare_first) or not (chunks[-1] or bare_last) or not any(chunks):
        return False
    if pp > 1 and cuts[vpp] < led_blocks(problem):
        return False
    with_mtp = [index for index, letters in enumerate(chunks) if "m" in letters]
    if not with_mtp:
        return True
    (place, *others) = with_mtp
    before_loss = place == len(chunks) - 2 and not chunks[-1] and "layout" in problem.stack.split_forms
    if others or not (place == len(chunks) - 1 or (before_loss and (vpp == 1 or place % pp))):
        return False
    return bare_last or "t" in chunks[place]


def _meaning(stack: Stack, layout: Layout) -> tuple[object, ...]:
    """What tells layouts apart: the CP type only where there is CP, the rank order only where pp and dp both are; of ZeRO-2 and
    ZeRO-3 nothing, where a pipeline's stages stay gathered.
    """
    always = (*FRAME, "vpp", "micro_batch", "schedule", "recompute", "offload")
    gathered = stack.footprint.gathered_stages and layout.pp > 1 and layout.optimizer_sharding in ("zero2", "zero3")
    return (
        *(getattr(layout, name) for name in always),
        "gathered" if gathered else layout.optimizer_sharding,
        layout.cp_type if layout.cp > 1 else "",
        layout.rank_order if layout.pp > 1 and layout.dp > 1 else "",
    )


# --- every partition, priced -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """Every legal layout with every partition of its own: `owner` (rows,) is the layout that a row belongs to."""

    layouts: tuple[Layout, ...]
    owner: npt.NDArray[np.intp]
    table: LayoutTable
    step_time_s: Floats
    peak_bytes: Floats

    def best_by_frame(self, usable_bytes: float) -> list[float]:
        """Least step time of every frame that has a partition in so much memory, fastest first."""
        best: dict[tuple[int, ...], float] = {}
        for row in np.nonzero(self.peak_bytes <= usable_bytes)[0]:
            layout = self.layouts[self.owner[row]]
            frame = tuple(getattr(layout, name) for name in FRAME)
            best[frame] = min(best.get(frame, np.inf), float(self.step_time_s[row]))
        return sorted(best.values())


def chosen_by_frame(model: CostModel, layouts: list[Layout], top: int) -> list[float]:
    """Least step time of the `top` frames when their layouts are cut as the space says, fastest first; frames that fit nowhere are
    left out.

    1F1B by `best_partitions` under the device's memory where the stack can be told cuts, anything else by the fastest of the
    search's family.
    """
    problem, table = model.problem, LayoutTable.from_layouts(layouts)
    rows, step_s = model.rows(table), np.full(len(layouts), np.inf)
    for members in same_shape(table, depth=True):
        part = rows.take(members)
        if partitioned_exactly(problem, part.table).all():
            found = best_partitions(model, part, np.full(len(members), np.inf), model.usable_bytes)
            step_s[members] = found.time_s + problem.stack.step_overhead_s.value
            continue
        priced = model.price_cuts(part, default_cuts(model, part))
        step_s[members] = np.where(priced.fits, priced.step_time_s, np.inf)
    best: dict[tuple[int, ...], float] = {}
    for layout, seconds in zip(layouts, step_s.tolist(), strict=True):
        frame = tuple(getattr(layout, name) for name in FRAME)
        best[frame] = min(best.get(frame, np.inf), seconds)
    return sorted(seconds for seconds in best.values() if np.isfinite(seconds))[:top]


def settings(problem: Problem, layout: Layout) -> int:
    """How many settings a layout has of the switches that hide what TP sends where it cuts sequences too, and what replicas send
    once per step: two of each.
    """
    moe = any(isinstance(kind.mlp, MoeMlp) for kind in problem.model.kinds.values())
    talks = layout.dp * layout.cp > 1 or (moe and layout.edp > 1)
    sent = {
        "dp_gradients": layout.optimizer_sharding in ("none", "zero1"),
        "dp_parameters": layout.optimizer_sharding in ("zero1", *(("zero2",) if problem.stack.zero2_gathers == "once" else ())),
    }
    there = {name: talks and under for name, under in sent.items()} | {"tp": layout.tp > 1 and layout.sequence_parallel}
    return 2 ** sum(met and getattr(problem.stack.overlap, name) > 0 for name, met in there.items())


def price_everything(problem: Problem, model: CostModel, layouts: list[Layout]) -> Priced:
    """Prices every layout under every partition of the space."""
    table = LayoutTable.from_layouts(layouts)
    splits: dict[Split, int] = {}
    owner, split = [], []
    for rows, choices in partitions(problem, model, table):
        for row, choice in product(rows.tolist(), choices):
            owner.append(row)
            split.append(splits.setdefault(choice, len(splits)))
    owners = np.array(owner, dtype=np.intp)
    many = table.take(owners).with_splits(np.array(split, dtype=np.intp), tuple(splits))
    prices = model.price(many)
    return Priced(tuple(layouts), owners, many, prices.step_time_s, prices.peak_bytes)


def partitions(problem: Problem, model: CostModel, table: LayoutTable) -> Iterator[tuple[np.ndarray, list[Split]]]:
    """Every contiguous cut for 1F1B on stacks that can be told one; otherwise the search's family."""
    for rows in same_shape(table):
        pp, vpp, schedule = (int(getattr(table, name)[rows[0]]) for name in ("pp", "vpp", "schedule"))
        if not problem.stack.cuts_freely(vpp):
            cuts = told_cuts(problem, pp, vpp)
        elif SCHEDULES[schedule] == "1f1b":
            cuts = legal_cuts(problem, pp)
        else:
            for row, ways in zip(rows, cut_family(model, model.rows(table.take(rows))).tolist(), strict=True):
                yield np.array([row]), [Split(pp, vpp, tuple(each), SCHEDULES[schedule] in ("zb-v", "dualpipev")) for each in ways]
            continue
        yield rows, [Split(pp, vpp, each) for each in cuts]

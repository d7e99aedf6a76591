"""What a layout may choose from, column by column, before any rule has its say.

A layout is a *frame* (tp, cp, pp, dp, ep, etp) and inner choices of two kinds that no rule of the catalogue ties to each other: how
the pipeline works through the batch (micro-batch, vpp, schedule, recompute) and how ranks talk and share states (cp_type, sharding,
offload, rank order).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from .conditions import all_of, divides, more_than
from .expressions import product as product_of
from .groups import inner_classes
from .layout import (
    ALL_LAYERS,
    CP_TYPES,
    FLAG_RANK_ORDERS,
    FULL_BLOCK,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SELECTIVE,
    SHARDINGS,
    Ints,
    Problem,
    Recompute,
    parse_offload,
    parse_sharding,
    sharding_as_run,
)
from .model import DenseMlp, LatentAttention, MoeMlp
from .quantities import PER_MILLE
from .row_keys import distinct_rows, row_keys
from .switches import words as switches
from .vocabulary import V_SHAPED

FRAME = ("tp", "cp", "pp", "dp", "ep", "etp")
PIPELINE = ("micro_batch", "num_microbatches", "vpp", "schedule", "recompute_mode", "recompute_modules", "recompute_layers")
SHARING = ("cp_type", "sharding", "hsdp", "optimizer_offload", "activation_offload", "rank_order")
PLANNED_SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""Schedules that the search lists unless others are named: the price of these it can bound in closed form."""
PRICED_CP_TYPES = ("p2p", "allgather", "a2a")
MAX_MICRO_BATCH = 16
MAX_VPP = 8
BLOCK_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SP_WHERE = "wherever tp > 1 and tp·cp divides the sequence"
SP_IS_ON = all_of(more_than("tp", 1), divides(product_of("cp", "tp"), "seq_len"))
"""Where a search has sequence parallelism on, in words and as a condition, if the stack has it and nothing fixes it otherwise."""
CUT_ALIKE = (
    "of equal work or, interleaved, of e or e + 1 layers, the larger ones first or behind and up to 3 layers fewer in the last, "
    "or where a stage holds two ends within 2 layers of equal work with least for the fullest stage, whichever is fastest; "
    "those of the best layouts, and of some within 5 % of these while they are in reach, then moved block by block, or two at "
    "once, while faster; where none of these fits in memory, some of those that may are cut from equal work until they fit"
)
"""How a search cuts what it does not cut exactly (`optimizer/stages.py`, `optimizer/recutting.py`)."""
APART = "stages equal but for the first and the last, by every number of layers that these can be told to hold"
"""How a search cuts for frameworks that are told of these two only."""


def groups_are_free(problem: Problem) -> bool:
    """Whether a search looks at interleaved chunks whose micro-batches do not go into groups of pp."""
    return problem.stack.microbatch_group > 0 or {"pp", "vpp"} <= set(problem.workload.fix)


class Choices:
    """The values that a problem offers; `fix` of the workload narrows a column's."""

    def __init__(self, problem: Problem, constants: Mapping[str, int]) -> None:
        self.problem = problem
        self.constants = constants

    def candidates(self, name: str, values: Iterable[int]) -> Ints:
        """What a column may be, in rising order: the values that the user fixes, else the given ones."""
        fixed = self.problem.workload.fix.get(name)
        chosen = [int(value) for value in fixed] if fixed else list(values)
        return np.array(sorted(set(chosen)), dtype=np.int64)

    def pipelines(self) -> dict[str, Ints]:
        """Columns of every way through the batch."""
        fix = self.problem.workload.fix
        micro = self.candidates("micro_batch", (v for v in divisors(self.constants["global_batch"]) if v <= MAX_MICRO_BATCH))
        vpp = self.candidates("vpp", range(1, MAX_VPP + 1))
        offered = [name for name in self.problem.stack.schedules if name in PLANNED_SCHEDULES]
        known = {*PLANNED_SCHEDULES, *self.problem.stack.schedules}
        schedules = [name for name in fix.get("schedule", offered) if name in known]
        rows = [
            (mb, 0, v, SCHEDULES.index(s), r.mode, r.modules, r.layers)
            for mb, v, s, r in product(micro, vpp, schedules, self.recomputes())
            if (v == 2 if s in V_SHAPED else (v > 1) == (s == "interleaved"))
        ]
        return _as_columns(PIPELINE, rows)

    def sharings(self) -> dict[str, Any]:
        """Columns of every way to talk and to share states, those of like work together."""
        fix = self.problem.workload.fix
        cp_types = self._cp_types()
        shardings = [parse_sharding(name) for name in fix.get("optimizer_sharding", self._shardings())]
        offloads = [parse_offload(name) for name in fix["offload"]] if "offload" in fix else self._offloads()
        orders = [RANK_ORDERS.index(name) for name in self.rank_orders]
        rows = [
            (CP_TYPES.index(cp), *sharding, *offload, order)
            for cp, sharding, offload, order in product(cp_types, shardings, offloads, orders)
        ]
        choices = {**_as_columns(SHARING, rows), **_as_floats(SHARING, rows)}
        first, kind = distinct_rows([work_kinds(choices)])
        by_work = np.argsort(first[kind], kind="stable")  # kinds in the order in which the stack names them
        return {name: column[by_work] for name, column in choices.items()}

    @property
    def rank_orders(self) -> tuple[str, ...]:
        """Rank orders on offer."""
        return tuple(self.problem.workload.fix.get("rank_order", self.problem.stack.rank_orders))

    @property
    def places_freely(self) -> bool:
        """Whether some of them are beyond what flags say."""
        return not set(self.rank_orders) <= set(FLAG_RANK_ORDERS)

    def _cp_types(self) -> list[str]:
        """Those of the stack, or that are asked for, which have a price."""
        asked = self.problem.workload.fix.get("cp_type", self.problem.stack.cp_types)
        return [name for name in asked if name in PRICED_CP_TYPES]

    def _shardings(self) -> list[str]:
        """Those of the stack; HSDP with the units of every level but the outermost as its shard groups."""
        sizes = self.problem.allocated_sizes
        shards = [f"hsdp:{size}" for size in sorted(set(sizes[:-1])) if 1 < size < sizes[-1]]
        offered = self.problem.stack.optimizer_shardings
        return [name for name in offered if name != "hsdp"] + (shards if "hsdp" in offered else [])

    def _offloads(self) -> list[tuple[float, float]]:
        """Shares of optimizer states and of activations that leave the device."""
        states = (0.0, 1.0) if self.problem.stack.optimizer_offload else (0.0,)
        return list(product(states, self.problem.workload.activation_shares))

    def recomputes(self) -> list[Recompute]:
        """None, chains of selective modules from the cheapest to redo, block depths, full."""
        fixed = self.problem.workload.fix.get("recompute")
        if fixed:
            return [Recompute.parse(text) for text in fixed]
        chain = [name for name in self._useful_modules() if name in self.problem.stack.recompute_modules]
        masks = {1 << RECOMPUTE_MODULES.index(name) for name in chain}
        masks |= {sum(1 << RECOMPUTE_MODULES.index(name) for name in chain[:depth]) for depth in range(1, len(chain) + 1)}
        found = [Recompute(), *(Recompute(SELECTIVE, mask) for mask in sorted(masks))]
        depths = [k for k in BLOCK_DEPTHS if k < self.constants["blocks"]] if self.problem.stack.recompute_block else []
        return [*found, *(Recompute(FULL_BLOCK, 0, depth) for depth in (*depths, ALL_LAYERS))]

    def _useful_modules(self) -> list[str]:
        kinds = self.problem.model.kinds.values()
        moe = [kind.mlp for kind in kinds if isinstance(kind.mlp, MoeMlp)]
        useful = ["core_attn"] if self.problem.stack.attention_kernel != "flash" else []
        useful.append("layernorm")
        useful += ["moe_act"] if moe else []
        useful += ["mla_up_proj"] if any(isinstance(kind.mixer, LatentAttention) for kind in kinds) else []
        useful += ["shared_experts"] if any(mlp.shared_width for mlp in moe) else []
        useful += ["mlp"] if any(isinstance(kind.mlp, DenseMlp) for kind in kinds) else []
        return useful + (["moe"] if moe else [])

    @property
    def words(self) -> str:
        """The space in words that a planner can check against the counts."""
        c, fix = self.constants, self.problem.workload.fix
        choices = self.pipelines()
        recomputes = len({tuple(row) for row in zip(*(choices[n].tolist() for n in PIPELINE[4:]), strict=True)})
        experts = f"ep: all that divide the {c['experts']} experts" if c["experts"] else "a dense model's ep and etp are 1"
        single, several = (self.problem.stack.cuts_freely(vpp) for vpp in (1, 2))
        splits = "1F1B cut by the best min–max over every contiguous split or balanced, then moved block by block while faster"
        splits += f"; chunks of other schedules {CUT_ALIKE if several else 'equal'}"
        by_chunk = self.problem.stack.recompute_by_chunk and "recompute" not in fix
        splits += "; of the best layouts every chunk then redoes layers to a depth of its own" if by_chunk else ""
        splits += "; embedding and loss may be chunks without layers" if self.problem.stack.bare_ends else ""
        parts = {
            "tp": f"tp: all that divide the {c['heads'] or c['linear_heads']} heads",
            "cp": "cp: all that divide the sequence",
            "cp_type": f"cp type {', '.join(self._cp_types())}",
            "pp": f"pp: 1 to {c['blocks']}",
            "dp": "dp: all that divide the batch and use more than half of the devices, or the most that the batch allows",
            "ep": experts,
            "micro_batch": f"micro-batch up to {MAX_MICRO_BATCH}",
            "vpp": f"vpp up to {MAX_VPP}{self._group_words()}",
            "recompute": f"{recomputes} recompute choices",
            "sequence_parallel": f"sequence parallelism on {SP_WHERE}" if self.problem.stack.sequence_parallel else "",
            "optimizer_sharding": f"sharding {', '.join(self._shardings())}{self._one_program()}",
            "rank_order": _order_words(self.rank_orders),
            "offload": self._offload_words(),
            "overlap": f"{switches(self.problem)} overlap on or off (off is never faster)",
        }
        said = [text for name, text in parts.items() if text and name not in fix]
        said.append(splits if single else APART if self.problem.stack.sets_ends_apart else "equal stages")
        fixed = ", ".join(f"{name} = {' or '.join(values)}" for name, values in sorted(fix.items()))
        workload = self.problem.workload
        inside = ", ".join(f"{level}:{'+'.join(dimensions)}" for level, dimensions in sorted(workload.inside.items()))
        limits = (("fixed", fixed), ("forbidden", ", ".join(workload.forbid)), ("inside", inside))
        return "; ".join([*said, *(f"{name}: {text}" for name, text in limits if text)])

    def _group_words(self) -> str:
        grouped = "interleaved" in self.problem.stack.schedules and not groups_are_free(self.problem)
        return ", micro-batches in groups of pp (in others where pp and vpp are fixed)" if grouped else ""

    def _one_program(self) -> str:
        """Of shardings that are listed once in a pipeline."""
        offered = np.array([parse_sharding(name)[0] for name in self._shardings()])
        run = sharding_as_run(self.problem.stack, offered, np.array(2))
        once = (f"{SHARDINGS[a]} is {SHARDINGS[b]}" for a, b in zip(offered, run, strict=True) if a != b and b in offered)
        said = ", ".join(once)
        return f" (in a pipeline {said})" if said else ""

    def _offload_words(self) -> str:
        stack, workload = self.problem.stack, self.problem.workload
        words = f"optimizer offload {'none or all' if stack.optimizer_offload else 'none'}"
        if workload.offload_to == "peers" and any(workload.activation_shares):
            shares = ", ".join(f"{share:g}" for share in workload.activation_shares)
            return (
                f"{words}, at most shares {shares} of the activations of early stages on devices of late ones (1F1B then cut as if "
                "partners' layers saved alike: others may do better)"
            )
        if not stack.activation_offload:
            return words
        if not any(workload.activation_shares):
            return f"{words}, activations stay on the device (--offload-to lets shares of them go)"
        shares = ", ".join(f"{share:g}" for share in workload.activation_shares)
        return f"{words}, shares {shares} of the activations to the {workload.offload_to}"


def _order_words(orders: Sequence[str]) -> str:
    """«rank orders tp-cp-ep-dp-pp, tp-cp-ep-pp-dp»."""
    if len(orders) <= len(FLAG_RANK_ORDERS):
        return f"rank order{'s' * (len(orders) > 1)} {', '.join(orders)}"
    return f"{len(orders)} rank orders, those once that place a frame's groups alike"


def work_kinds(choices: Mapping[str, Any]) -> Ints:
    """A number for every sharing choice, equal where a micro-batch costs the same: cp type, activations that are moved, where
    layers' groups lie, and how FSDP gathers weights.
    """
    gathers = choices["sharding"] >= SHARDINGS.index("zero2")
    moved = np.rint(choices["activation_offload"] * PER_MILLE).astype(np.int64)
    gathered = [np.where(gathers, choices[name], 0) for name in ("sharding", "hsdp", "rank_order")]
    return row_keys([choices["cp_type"], moved, inner_classes(choices["rank_order"]), *gathered])


def divisors(number: int) -> list[int]:
    """Divisors in rising order; of 0 (a model without such a part) none."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def crossed(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Every row of one set of columns with every row of another."""
    n, m = len(next(iter(first.values()))), len(next(iter(second.values())))
    return {name: np.repeat(column, m) for name, column in first.items()} | {
        name: np.tile(column, n) for name, column in second.items()
    }


def _as_columns(names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> dict[str, Ints]:
    return {name: np.array([row[i] for row in rows], dtype=np.int64) for i, name in enumerate(names)}


def _as_floats(names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    return {name: np.array([row[i] for row in rows], dtype=np.float64) for i, name in enumerate(names) if name.endswith("_offload")}

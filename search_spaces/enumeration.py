"""The legal layouts of a problem, listed or counted: the rules of `rules` read as numpy masks over candidate columns.

A layout is a *frame* (tp, cp, pp, dp, ep, etp) and inner choices of two kinds that no rule ties to each other: how the
pipeline works through the batch (micro-batch, vpp, schedule, recompute) and how ranks talk and share states (cp_type,
sharding, offload, rank order). So the legal inner choices of a frame are a product of two short lists, which can be counted
without being listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from .layout import (
    ALL_LAYERS,
    COLUMNS,
    CP_TYPES,
    FULL_BLOCK,
    RANK_ORDERS,
    RECOMPUTE_MODULES,
    SCHEDULES,
    SELECTIVE,
    Bools,
    Ints,
    LayoutTable,
    Problem,
    Recompute,
    parse_offload,
    parse_sharding,
    row_keys,
)
from .model import DenseMlp, LatentAttention, MoeMlp
from .quantities import EVEN, PER_MILLE, constants
from .rules import Rule, rules_for, rules_over

FRAME = ("tp", "cp", "pp", "dp", "ep", "etp")
PIPELINE = ("micro_batch", "num_microbatches", "vpp", "schedule", "recompute_mode", "recompute_modules", "recompute_layers")
SHARING = ("cp_type", "sharding", "hsdp", "optimizer_offload", "activation_offload", "rank_order")
_PER_MILLE = {f"{name}_per_mille": name for name in SHARING if name.endswith("_offload")}  # as rules read them
PRICED_SCHEDULES = ("gpipe", "1f1b", "interleaved")
PRICED_CP_TYPES = ("p2p", "allgather", "a2a")
MAX_MICRO_BATCH = 16
MAX_VPP = 8
BLOCK_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Frames:
    """Columns tp, cp, pp, dp, ep, etp of many frames, (n,)."""

    tp: Ints
    cp: Ints
    pp: Ints
    dp: Ints
    ep: Ints
    etp: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: npt.NDArray[np.intp] | Bools) -> Frames:
        return Frames(*(getattr(self, name)[rows] for name in FRAME))

    @property
    def columns(self) -> dict[str, Ints]:
        return {name: getattr(self, name) for name in FRAME}


@dataclass(frozen=True)
class _Lists:
    """Legal inner choices of one kind per frame: `choice[start[f] : start[f] + count[f]]` index rows of `table`."""

    table: dict[str, Any]
    choice: Ints
    start: Ints
    count: Ints

    def take(self, rows: npt.NDArray[np.intp] | Bools) -> _Lists:
        return replace(self, start=self.start[rows], count=self.count[rows])


class Space:
    """The legal layouts of one problem under a list of rules.

    `fix` of the workload narrows a column's candidates; an illegal value there leaves an empty space, which `explain` puts
    into words.
    """

    def __init__(self, problem: Problem, rules: tuple[Rule, ...] | None = None) -> None:
        self.problem = problem
        self.rules = rules_for(problem) if rules is None else rules
        self.constants = constants(problem)

    @cached_property
    def frames(self) -> Frames:
        """All legal frames. Of the counts of devices, those that use at least half of them, or the most that the batch allows."""
        c = self.constants
        devices = self.problem.devices
        tp = self._candidates("tp", _divisors(c["heads"] or c["linear_heads"]))
        cp = self._candidates("cp", [1, *(v for v in _divisors(c["seq_len"]) if v > 1)])
        pp = self._candidates("pp", range(1, c["blocks"] + 1))
        grid = _grid({"tp": tp, "cp": cp, "pp": pp})
        grid = _where(grid, grid["tp"] * grid["cp"] * grid["pp"] <= devices)
        grid = self._legal(grid)
        grid = self._with_dp(grid, self._candidates("dp", _divisors(c["global_batch"])))
        grid = self._legal(grid)
        experts = c["experts"]
        for name, values in (("ep", _divisors(experts)), ("etp", _divisors(c["expert_width"]))):
            grid = _cross(grid, name, self._candidates(name, values if experts else [1]))
            rest = grid["tp"] * grid["cp"] * grid["dp"]
            grid = _where(grid, rest % (grid["ep"] * grid.get("etp", 1)) == 0)
        grid = self._legal(grid)
        return Frames(*(grid[name] for name in FRAME))

    @cached_property
    def pipeline_lists(self) -> _Lists:
        names = PIPELINE + SHARING if self._tied_rules else PIPELINE
        choices = self._pipeline_choices()
        return self._lists(names, _product(choices, self._sharing_choices()) if self._tied_rules else choices)

    @cached_property
    def sharing_lists(self) -> _Lists:
        if not self._tied_rules:
            return self._lists(SHARING, self._sharing_choices())
        ones = np.ones(len(self.frames), dtype=np.int64)
        return _Lists({}, np.zeros(1, dtype=np.int64), 0 * ones, ones)

    @cached_property
    def _tied_rules(self) -> bool:
        """Whether a rule (a user's, say) ties both kinds of choices together: then they are listed as one kind."""
        pipeline, sharing = set(PIPELINE), {*SHARING, *_PER_MILLE}
        return any(rule.names & pipeline and rule.names & sharing for rule in self.rules)

    @cached_property
    def layouts_per_frame(self) -> Ints:
        """Number of legal layouts of each frame, (n,)."""
        return self.pipeline_lists.count * self.sharing_lists.count

    @property
    def legal(self) -> int:
        """Number of legal layouts: counted, not listed."""
        return int(self.layouts_per_frame.sum())

    def layouts(self, rows: npt.NDArray[np.intp]) -> tuple[LayoutTable, npt.NDArray[np.intp]]:
        """All legal layouts of the given frames, and for each the position in `rows` of its frame."""
        pipeline, sharing = self.pipeline_lists.take(rows), self.sharing_lists.take(rows)
        total = pipeline.count * sharing.count
        frame = np.repeat(np.arange(len(rows)), total)
        place = np.arange(int(total.sum())) - np.repeat(np.cumsum(total) - total, total)
        first = pipeline.choice[pipeline.start[frame] + place // sharing.count[frame]]
        second = sharing.choice[sharing.start[frame] + place % sharing.count[frame]]
        columns: dict[str, Any] = {name: getattr(self.frames, name)[rows][frame] for name in FRAME}
        columns |= {name: values[first] for name, values in pipeline.table.items()}
        columns |= {name: values[second] for name, values in sharing.table.items()}
        columns["num_microbatches"] = self.problem.workload.global_batch // (columns["dp"] * columns["micro_batch"])
        columns["sequence_parallel"] = self.sequence_parallel(columns["tp"])
        columns["split"] = np.full(len(frame), -1, dtype=np.int64)
        return LayoutTable(**{name: columns[name] for name in COLUMNS}), frame

    def sequence_parallel(self, tp: Ints) -> Ints:
        """1 wherever tp > 1, or nowhere if the user fixes it to be off, (n,)."""
        return ((tp > 1) & (self.problem.workload.fix.get("sequence_parallel") != ("false",))).astype(np.int64)

    @property
    def words(self) -> str:
        """The space in words that a planner can check against the counts."""
        c, fix = self.constants, self.problem.workload.fix
        choices = self._pipeline_choices()
        recomputes = len({tuple(row) for row in zip(*(choices[n].tolist() for n in PIPELINE[4:]), strict=True)})
        experts = f"ep: all that divide the {c['experts']} experts" if c["experts"] else "a dense model's ep and etp are 1"
        single, several = (self.problem.stack.cuts_freely(vpp) for vpp in (1, 2))
        splits = f"every contiguous split of 1F1B, chunks of other schedules {'balanced' if several else 'equal'}"
        parts = {
            "tp": f"tp: all that divide the {c['heads'] or c['linear_heads']} heads",
            "cp": "cp: all that divide the sequence",
            "pp": f"pp: 1 to {c['blocks']}",
            "dp": "dp: all that divide the batch and use more than half of the devices, or the most that the batch allows",
            "ep": experts,
            "micro_batch": f"micro-batch up to {MAX_MICRO_BATCH}",
            "vpp": f"vpp up to {MAX_VPP}",
            "recompute": f"{recomputes} recompute choices",
            "optimizer_sharding": f"sharding {', '.join(self._shardings())}",
            "offload": f"optimizer offload {'none or all' if self.problem.stack.optimizer_offload else 'none'}",
        }
        said = [text for name, text in parts.items() if name not in fix]
        said.append(splits if single else "equal stages")
        fixed = ", ".join(f"{name} = {' or '.join(values)}" for name, values in sorted(fix.items()))
        return "; ".join(said) + (f"; fixed: {fixed}" if fixed else "")

    def _candidates(self, name: str, values: Iterable[int]) -> Ints:
        fixed = self.problem.workload.fix.get(name)
        chosen = [int(value) for value in fixed] if fixed else list(values)
        return np.array(sorted(set(chosen)), dtype=np.int64)

    def _legal(self, columns: dict[str, Ints]) -> dict[str, Ints]:
        known = {**self.constants, **self._derived(columns)}
        mask = np.ones(len(columns["tp"]), dtype=bool)
        for rule in rules_over(self.rules, known):
            mask &= np.broadcast_to(rule.condition.mask(known), mask.shape)
        return _where(columns, mask)

    def _with_dp(self, grid: dict[str, Ints], dp: Ints) -> dict[str, Ints]:
        """Crosses with every dp that fits and keeps half of the devices busy, or the largest that fits."""
        room = self.problem.devices // (grid["tp"] * grid["cp"] * grid["pp"])
        largest = dp[np.maximum(np.searchsorted(dp, room, side="right") - 1, 0)]
        crossed = _cross({**grid, "_room": room, "_largest": largest}, "dp", dp)
        used = crossed["dp"] <= crossed["_room"]
        enough = (2 * crossed["dp"] > crossed["_room"]) | (crossed["dp"] == crossed["_largest"])
        if "dp" in self.problem.workload.fix:
            enough = used
        kept = _where(crossed, used & enough)
        return {name: values for name, values in kept.items() if not name.startswith("_")}

    def _pipeline_choices(self) -> dict[str, Ints]:
        fix = self.problem.workload.fix
        micro = self._candidates("micro_batch", (v for v in _divisors(self.constants["global_batch"]) if v <= MAX_MICRO_BATCH))
        vpp = self._candidates("vpp", range(1, MAX_VPP + 1))
        offered = [name for name in self.problem.stack.schedules if name in PRICED_SCHEDULES]
        schedules = [name for name in fix.get("schedule", offered) if name in PRICED_SCHEDULES]
        rows = [
            (mb, 0, v, SCHEDULES.index(s), r.mode, r.modules, r.layers)
            for mb, v, s, r in product(micro, vpp, schedules, self._recomputes())
            if (v > 1) == (s == "interleaved")
        ]
        return _as_columns(PIPELINE, rows)

    def _sharing_choices(self) -> dict[str, Any]:
        fix, stack = self.problem.workload.fix, self.problem.stack
        cp_types = [name for name in fix.get("cp_type", stack.cp_types) if name in PRICED_CP_TYPES]
        shardings = [parse_sharding(name) for name in fix.get("optimizer_sharding", self._shardings())]
        offloads = fix.get("offload", ("none", "optimizer:1") if stack.optimizer_offload else ("none",))
        orders = [RANK_ORDERS.index(name) for name in fix.get("rank_order", stack.rank_orders)]
        rows = [
            (CP_TYPES.index(cp), *sharding, *parse_offload(offload), order)
            for cp, sharding, offload, order in product(cp_types, shardings, offloads, orders)
        ]
        return {**_as_columns(SHARING, rows), **_as_floats(SHARING, rows)}

    def _shardings(self) -> list[str]:
        """Those of the stack; HSDP with the units of every level but the outermost as its shard groups."""
        sizes = self.problem.cluster.allocated_sizes(self.problem.devices)
        shards = [f"hsdp:{size}" for size in sorted(set(sizes[:-1])) if 1 < size < sizes[-1]]
        offered = self.problem.stack.optimizer_shardings
        return [name for name in offered if name != "hsdp"] + (shards if "hsdp" in offered else [])

    def _recomputes(self) -> list[Recompute]:
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

    def _lists(self, names: tuple[str, ...], choices: dict[str, Any]) -> _Lists:
        """Legal choices per frame, worked out once per distinct combination of the frame columns that the rules look at."""
        frames = self.frames.columns
        rules = self._rules_of(names)
        size = len(next(iter(choices.values())))
        looked_at = sorted({*(name for rule in rules for name in _frame_names(rule)), "pp", "dp", "cp"} & set(FRAME))
        combos, of_frame = _unique_rows([frames[name] for name in looked_at])
        wide = {name: column[:, None] for name, column in zip(looked_at, combos, strict=True)}
        deep = {name: column[None, :] for name, column in choices.items() if name != "num_microbatches"}
        cut = {"split_form": EVEN, "placed_blocks": self.constants["blocks"]}  # the optimizer's own cuts can be said
        known = {**self.constants, **cut, **self._derived({**wide, **deep})}
        mask = np.ones((len(combos[0]), size), dtype=bool)
        for rule in rules:
            mask &= np.broadcast_to(rule.condition.mask(known), mask.shape)
        mask = self._distinct_choices(mask, known, choices)
        count = mask.sum(axis=1)
        choice = np.nonzero(mask)[1]
        return _Lists(choices, choice, (np.cumsum(count) - count)[of_frame], count[of_frame])

    def _rules_of(self, names: tuple[str, ...]) -> list[Rule]:
        """Rules that look at some of the inner columns `names` and at no others."""
        names = (*names, *_PER_MILLE) if SHARING[0] in names else names
        other = {*PIPELINE, *SHARING, *_PER_MILLE} - set(names)
        return [rule for rule in self.rules if rule.names & set(names) and not rule.names & other]

    def _distinct_choices(self, legal: Bools, known: Mapping[str, Any], choices: Mapping[str, Any]) -> Bools:
        """The legal choices (n, choices) that stages can be cut for, each of them once.

        A stack that cannot be told where to cut gets equal chunks. MTP layers share the last chunk, which holds a decoder layer
        too unless a layout string says otherwise. Interleaved chunks run in groups of pp micro-batches, as they are priced.
        Block depths that cover a mean chunk stand aside for `full`, unless the user names them; so do all but the first legal
        cp type at cp = 1, and all but the first legal rank order where pp or dp is 1.
        """
        pp = np.asarray(known["pp"])
        if PIPELINE[0] in choices:
            stack, layers = self.problem.stack, self.constants["layers"]
            chunks, depth = pp * np.asarray(known["vpp"]), np.asarray(known["recompute_layers"])
            free = np.where(np.asarray(known["vpp"]) > 1, stack.cuts_freely(2), stack.cuts_freely(1))
            alone = self.constants["mtp_layers"] > 0 and "layout" in stack.split_forms
            legal = legal & np.where(free, chunks <= layers + alone, layers % chunks == 0)
            in_groups = known["num_microbatches"] % pp == 0
            legal = legal & ((np.asarray(known["schedule"]) != SCHEDULES.index("interleaved")) | in_groups)
            if "recompute" not in self.problem.workload.fix:
                block = (np.asarray(known["recompute_mode"]) == FULL_BLOCK) & (depth < ALL_LAYERS)
                legal = legal & ~(block & (depth * chunks >= self.constants["blocks"]))
        if SHARING[0] in choices:
            for alike, name in ((known["cp"] == 1, "cp_type"), ((pp == 1) | (known["dp"] == 1), "rank_order")):
                others = row_keys([values for other, values in choices.items() if other != name])
                rows = np.broadcast_to(alike, (len(legal), 1))[:, 0]
                legal[rows] = _first_of_each(legal[rows], others)
        return legal

    def _derived(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The given columns with those that follow from them, as far as their own ingredients are there."""
        known = dict(columns)
        if {"tp", "cp", "pp", "dp"} <= known.keys():
            known["devices_used"] = known["tp"] * known["cp"] * known["pp"] * known["dp"]
        if {"tp", "cp", "dp", "ep", "etp"} <= known.keys():
            known["edp"] = known["tp"] * known["cp"] * known["dp"] // (known["ep"] * known["etp"])
        if "tp" in known:
            known["sequence_parallel"] = self.sequence_parallel(known["tp"])
        for scaled, name in _PER_MILLE.items():
            if name in known:
                known[scaled] = np.rint(known[name] * PER_MILLE).astype(np.int64)
        if {"dp", "micro_batch"} <= known.keys():
            known["num_microbatches"] = self.constants["global_batch"] // (known["dp"] * known["micro_batch"])
        return known


def _first_of_each(legal: Bools, key: Ints) -> Bools:
    """In every row of `legal` (n, choices), the first that is set among the choices of one key, (n, choices)."""
    order = np.argsort(key, kind="stable")
    ordered = legal[:, order]
    count = np.cumsum(ordered, axis=1)
    before = np.concatenate([np.zeros((len(legal), 1), dtype=count.dtype), count], axis=1)
    first = np.empty_like(legal)
    first[:, order] = ordered & (count - before[:, np.searchsorted(key[order], key[order])] == 1)
    return first


def _frame_names(rule: Rule) -> set[str]:
    """Frame columns that a rule looks at, through derived ones too."""
    behind = {
        "devices_used": {"tp", "cp", "pp", "dp"},
        "edp": set(FRAME) - {"pp"},
        "sequence_parallel": {"tp"},
        "num_microbatches": {"dp"},
    }
    return set().union(*(behind.get(name, {name}) for name in rule.names))


def _divisors(number: int) -> list[int]:
    """Divisors in rising order; of 0 (a model without such a part) none."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _grid(axes: dict[str, Ints]) -> dict[str, Ints]:
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    return {name: values.ravel() for name, values in zip(axes, mesh, strict=True)}


def _where(columns: dict[str, Ints], mask: Bools) -> dict[str, Ints]:
    return {name: values[mask] for name, values in columns.items()}


def _cross(columns: dict[str, Ints], name: str, values: Ints) -> dict[str, Ints]:
    n = len(next(iter(columns.values())))
    return {**{key: np.repeat(column, len(values)) for key, column in columns.items()}, name: np.tile(values, n)}


def _unique_rows(columns: list[Ints]) -> tuple[list[Ints], Ints]:
    """Distinct rows of some columns and each row's place among them."""
    _, first, inverse = np.unique(row_keys(columns), return_index=True, return_inverse=True)
    return [column[first] for column in columns], inverse


def _product(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Every row of one set of columns with every row of another."""
    n, m = len(next(iter(first.values()))), len(next(iter(second.values())))
    return {name: np.repeat(column, m) for name, column in first.items()} | {
        name: np.tile(column, n) for name, column in second.items()
    }


def _as_columns(names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> dict[str, Ints]:
    return {name: np.array([row[i] for row in rows], dtype=np.int64) for i, name in enumerate(names)}


def _as_floats(names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    return {name: np.array([row[i] for row in rows], dtype=np.float64) for i, name in enumerate(names) if name.endswith("_offload")}

"""The legal layouts of a problem, listed or counted: the rules of `rules` read as numpy masks over candidate columns.

A layout is a *frame* (tp, cp, pp, dp, ep, etp) and inner choices of two kinds that no rule ties to each other: how the
pipeline works through the batch (micro-batch, vpp, schedule, recompute) and how ranks talk and share states (cp_type,
sharding, offload, rank order). So the legal inner choices of a frame are a product of two short lists, which can be counted
without being listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .choices import FRAME, PIPELINE, SHARING, SP_IS_ON, Choices, crossed, divisors, work_kinds
from .columns import all_but, cross, first_of_each, meshed, runs, unique_rows, unpacked, where
from .demands import SCALED, Demand, chosen_names, demand_of, distinct_pipelines
from .groups import placed_alike
from .layout import (
    COLUMNS,
    Bools,
    Ints,
    LayoutTable,
    Problem,
    sharding_as_run,
)
from .quantities import EVEN, PER_MILLE, constants
from .row_keys import distinct_rows, row_keys
from .rules import Rule, rules_for, rules_over
from .switches import layer_settings, replicated, settings

CELLS_PER_BLOCK = 1 << 24
"""Frames times choices whose legality is worked out at once."""
CELLS_AT_ONCE = 1 << 18
"""Of them those of which equal ones are told at once: what is known of them stays in the cache."""


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
    """Legal inner choices of one kind per frame: `choice[start[f] : start[f] + count[f]]` index rows of `table`.

    Where replicas talk, each choice stands for `variants` settings of the overlap switches, those of a frame for `total` in all.
    """

    table: dict[str, Any]
    variants: Ints
    choice: Ints
    start: Ints
    count: Ints
    total: Ints

    def take(self, rows: npt.NDArray[np.intp] | Bools) -> _Lists:
        return replace(self, start=self.start[rows], count=self.count[rows], total=self.total[rows])


@dataclass(frozen=True)
class Works:
    """Layouts by the work of a micro-batch: the first one of every kind stands in `table` for all `count` that share its work.

    They differ in how states are kept and ranks are ordered. `frame` is the place among the frames asked for; `choice` and
    `kind` lead back to the layouts themselves; `stands_for` counts these with every setting of the overlap switches.
    """

    table: LayoutTable
    frame: npt.NDArray[np.intp]
    choice: Ints
    kind: Ints
    count: Ints
    stands_for: Ints

    def take(self, rows: npt.NDArray[np.intp]) -> Works:
        each = (getattr(self, name)[rows] for name in ("frame", "choice", "kind", "count", "stands_for"))
        return Works(self.table.take(rows), *each)


class Space:
    """The legal layouts of one problem under a list of rules.

    `fix` of the workload narrows a column's candidates; an illegal value there leaves an empty space, which `explain` puts
    into words.
    """

    def __init__(self, problem: Problem, rules: tuple[Rule, ...] | None = None) -> None:
        self.problem = problem
        self.rules = rules_for(problem) if rules is None else rules
        self.constants = constants(problem)
        self.choices = Choices(problem, self.constants)

    @cached_property
    def frames(self) -> Frames:
        """All legal frames. Of the counts of devices, those that use at least half of them, or the most that the batch allows."""
        c = self.constants
        devices = self.problem.devices
        tp = self.choices.candidates("tp", divisors(c["heads"] or c["linear_heads"]))
        cp = self.choices.candidates("cp", [1, *(v for v in divisors(c["seq_len"]) if v > 1)])
        pp = self.choices.candidates("pp", range(1, c["blocks"] + 1))
        grid = meshed({"tp": tp, "cp": cp, "pp": pp})
        grid = where(grid, grid["tp"] * grid["cp"] * grid["pp"] <= devices)
        grid = self._legal(grid)
        grid = self._with_dp(grid, self.choices.candidates("dp", divisors(c["global_batch"])))
        grid = self._legal(grid)
        experts = c["experts"]
        for name, values in (("ep", divisors(experts)), ("etp", divisors(c["expert_width"]))):
            grid = cross(grid, name, self.choices.candidates(name, values if experts else [1]))
            rest = grid["tp"] * grid["cp"] * grid["dp"]
            grid = where(grid, rest % (grid["ep"] * grid.get("etp", 1)) == 0)
        grid = self._legal(grid)
        return Frames(*(grid[name] for name in FRAME))

    @cached_property
    def pipeline_lists(self) -> _Lists:
        choices = self.choices.pipelines()
        demands = [*self._demands(PIPELINE), *distinct_pipelines(self.problem, self.constants, choices)]
        pipelines = self._lists(choices, demands)
        return self._paired(pipelines) if self._tied_rules else pipelines

    @cached_property
    def sharing_lists(self) -> _Lists:
        if not self._tied_rules:
            return self._lists(self.choices.sharings(), self._demands(SHARING))
        ones = np.ones(len(self.frames), dtype=np.int64)
        return _Lists({}, np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 0 * ones, ones, ones)

    @cached_property
    def _kinds(self) -> tuple[Ints, Ints]:
        """Where runs of sharing choices begin in the flat list that cost a micro-batch the same, and how long each is."""
        lists = self.sharing_lists
        key = work_kinds(lists.table)[lists.choice] if lists.table else np.zeros(len(lists.choice), dtype=np.int64)
        new = np.ones(len(key), dtype=bool)
        new[1:] = key[1:] != key[:-1]
        new[lists.start[lists.count > 0]] = True
        first = np.nonzero(new)[0]
        return first, np.diff(first, append=len(key))

    @cached_property
    def _tied_rules(self) -> list[Rule]:
        """Rules (a user's, say) that tie both kinds of choices together: where there are any, both are listed as one kind."""
        pipeline, sharing = set(PIPELINE), {*SHARING, *SCALED}
        return [rule for rule in self.rules if rule.names & pipeline and rule.names & sharing]

    @property
    def sharings(self) -> dict[str, Any]:
        """Columns of every choice of how ranks talk and share states."""
        return {name: column for name, column in (self.pipeline_lists.table | self.sharing_lists.table).items() if name in SHARING}

    @cached_property
    def layouts_per_frame(self) -> Ints:
        """Number of legal layouts of each frame that are listed, with everything overlapped that can be, (n,)."""
        return self.pipeline_lists.count * self.sharing_lists.count

    @property
    def listed(self) -> int:
        """Number of layouts that would be listed."""
        return int(self.layouts_per_frame.sum())

    @cached_property
    def legal_per_frame(self) -> Ints:
        """Number of legal layouts of each frame with every setting of the overlap switches, (n,)."""
        pipeline, sharing = self.pipeline_lists, self.sharing_lists
        sent = replicated(self.problem, self.frames.columns)
        listed = np.where(sent, pipeline.total * sharing.total, pipeline.count * sharing.count)
        return listed * layer_settings(self.problem, self.sequence_parallel(self.frames.tp, self.frames.cp))

    @property
    def legal(self) -> int:
        """Number of legal layouts: counted, not listed."""
        return int(self.legal_per_frame.sum())

    def variants(self, table: LayoutTable) -> Ints:
        """How many legal layouts every row of a table stands for, (n,): itself with each setting of the overlap switches."""
        sent = np.where(replicated(self.problem, vars(table)), settings(self.problem, table.sharding), 1)
        return sent * layer_settings(self.problem, table.sequence_parallel)

    def layouts(self, rows: npt.NDArray[np.intp]) -> tuple[LayoutTable, npt.NDArray[np.intp]]:
        """All legal layouts of the given frames, and for each the position in `rows` of its frame."""
        pipeline, sharing = self.pipeline_lists.take(rows), self.sharing_lists.take(rows)
        frame, place = runs(pipeline.count * sharing.count)
        first = pipeline.choice[pipeline.start[frame] + place // sharing.count[frame]]
        second = sharing.choice[sharing.start[frame] + place % sharing.count[frame]]
        return self.combined(rows[frame], first, second), frame

    def combined(self, frames: npt.NDArray[np.intp], pipeline: Ints, sharing: Ints) -> LayoutTable:
        """The layouts of some frames with one choice each of the two kinds: rows of the tables of `pipeline_lists` and
        `sharing_lists`."""
        columns: dict[str, Any] = {name: getattr(self.frames, name)[frames] for name in FRAME}
        columns |= {name: values[pipeline] for name, values in self.pipeline_lists.table.items()}
        columns |= {name: values[sharing] for name, values in self.sharing_lists.table.items()}
        columns["num_microbatches"] = self.problem.workload.global_batch // (columns["dp"] * columns["micro_batch"])
        columns["sequence_parallel"] = self.sequence_parallel(columns["tp"], columns["cp"])
        columns["split"] = np.full(len(frames), -1, dtype=np.int64)
        return LayoutTable(**{name: columns[name] for name in COLUMNS})

    def works(self, rows: npt.NDArray[np.intp]) -> Works:
        """The legal layouts of the given frames by the work of a micro-batch: one row for all that share it."""
        first, size = self._kinds
        pipeline, sharing = self.pipeline_lists.take(rows), self.sharing_lists.take(rows)
        begin = np.searchsorted(first, sharing.start)
        count = np.where(sharing.count > 0, np.searchsorted(first, sharing.start + sharing.count) - begin, 0)
        frame, place = runs(pipeline.count * count)
        choice = pipeline.choice[pipeline.start[frame] + place // count[frame]]
        kind = begin[frame] + place % count[frame]
        table = self.combined(rows[frame], choice, sharing.choice[first[kind]])
        sums = np.add.reduceat(self.sharing_lists.variants[self.sharing_lists.choice], first) if len(first) else size
        inner = SHARING[0] in self.pipeline_lists.table  # then a work is one layout, and so are its switches
        several = np.where(replicated(self.problem, vars(table)), sums[kind], size[kind])
        several *= layer_settings(self.problem, table.sequence_parallel)
        stands_for = self.variants(table) if inner else several
        return Works(table, frame, choice, kind, size[kind], stands_for)

    def layouts_of(self, works: Works) -> tuple[LayoutTable, npt.NDArray[np.intp]]:
        """All legal layouts that some rows of `works` stand for, and for each the row that does."""
        row, place = runs(works.count)
        sharing = self.sharing_lists.choice[self._kinds[0][works.kind[row]] + place]
        first = {name: values[works.choice[row]] for name, values in self.pipeline_lists.table.items()}
        second = {name: values[sharing] for name, values in self.sharing_lists.table.items()}
        return replace(works.table.take(row), **{k: v for k, v in {**first, **second}.items() if k != "num_microbatches"}), row

    def sequence_parallel(self, tp: Ints, cp: Ints) -> Ints:
        """1 where a search has it on (SP_IS_ON); nowhere if the user fixes it to be off or the stack has none, (n,)."""
        off = self.problem.workload.fix.get("sequence_parallel") == ("false",) or not self.problem.stack.sequence_parallel
        return np.asarray(SP_IS_ON.mask({**self.constants, "tp": tp, "cp": cp}) & (not off), dtype=np.int64)

    @property
    def words(self) -> str:
        """The space in words that a planner can check against the counts."""
        return self.choices.words

    def _legal(self, columns: dict[str, Ints]) -> dict[str, Ints]:
        known = {**self.constants, **self._derived(columns)}
        mask = np.ones(len(columns["tp"]), dtype=bool)
        for rule in rules_over(self.rules, known):
            mask &= np.broadcast_to(rule.condition.mask(known), mask.shape)
        return where(columns, mask)

    def _with_dp(self, grid: dict[str, Ints], dp: Ints) -> dict[str, Ints]:
        """Crosses with every dp that fits and keeps half of the devices busy, or the largest that fits."""
        room = self.problem.devices // (grid["tp"] * grid["cp"] * grid["pp"])
        largest = dp[np.maximum(np.searchsorted(dp, room, side="right") - 1, 0)]
        crossed = cross({**grid, "_room": room, "_largest": largest}, "dp", dp)
        used = crossed["dp"] <= crossed["_room"]
        enough = (2 * crossed["dp"] > crossed["_room"]) | (crossed["dp"] == crossed["_largest"])
        if "dp" in self.problem.workload.fix:
            enough = used
        kept = where(crossed, used & enough)
        return {name: values for name, values in kept.items() if not name.startswith("_")}

    def _lists(self, choices: dict[str, Any], demands: Sequence[Demand]) -> _Lists:
        """Legal choices per frame, worked out once per distinct combination of the frame columns that the demands look at."""
        frames = self.frames.columns
        placing: tuple[str, ...] = FRAME if self.choices.places_freely else ("pp", "dp", "cp")
        if SHARING[0] not in choices:
            placing = ("pp", "dp")
        looked_at = sorted({*(name for demand in demands for name in demand.frame), *placing} & set(FRAME))
        combos, of_frame = unique_rows([frames[name] for name in looked_at], len(self.frames))
        wide = dict(zip(looked_at, combos, strict=True))
        met = [self._met(demand, wide, choices) for demand in demands]
        size = len(next(iter(choices.values())))
        stands_for = settings(self.problem, choices["sharding"]) if SHARING[0] in choices else np.ones(size, dtype=np.int64)
        step = max(1, CELLS_PER_BLOCK // max(size, 1))
        each, found, listed = [], [], 0
        for begin in range(0, len(combos[0]), step):
            block = slice(begin, begin + step)
            alike, of_row = self._legal_lists(met, {name: column[block] for name, column in wide.items()}, block, choices)
            count = alike.sum(axis=1)
            each.append(np.stack([listed + np.cumsum(count) - count, count, alike @ stands_for])[:, of_row])
            found.append(np.nonzero(alike)[1].astype(np.int32))
            listed += int(count.sum())
        start, count, total = np.concatenate([np.zeros((3, 0), dtype=np.int64), *each], axis=1)[:, of_frame]
        return _Lists(choices, stands_for, np.concatenate([np.zeros(0, dtype=np.int32), *found]), start, count, total)

    def _paired(self, pipelines: _Lists) -> _Lists:
        """Pairs of a way through the batch and a way to share, per frame, where rules tie the two.

        Ways through the batch of one kind leave the same ways to share, which are listed once for all of them.
        """
        sharings = self.choices.sharings()
        kind, ties = self._tied_kinds(pipelines.table, sharings)
        each = [self._lists(sharings, [*self._demands(SHARING), *tied]) for tied in ties]
        first, of_frame = distinct_rows([column for lists in (pipelines, *each) for column in (lists.start, lists.count)])
        shared, variants = np.concatenate([lists.choice for lists in each]), each[0].variants
        begin = np.cumsum([0, *(len(lists.choice) for lists in each[:-1])])
        starts = np.stack([lists.start[first] for lists in each]) + begin[:, None]
        counts = np.stack([lists.count[first] for lists in each])
        row, place = runs(pipelines.count[first])
        pipeline = pipelines.choice[pipelines.start[first][row] + place]
        at = kind[pipeline], row
        run, place = runs(counts[at])
        sharing = shared[starts[at][run] + place]
        count, total = (
            np.bincount(row, weights, len(first)).astype(np.int64)
            for weights in (counts[at], np.bincount(run, variants[sharing], len(row)))
        )
        choice = pipeline[run] * len(variants) + sharing
        start, count, total = np.stack([np.cumsum(count) - count, count, total])[:, of_frame]
        return _Lists(crossed(pipelines.table, sharings), np.tile(variants, len(kind)), choice, start, count, total)

    def _tied_kinds(self, pipelines: Mapping[str, Any], sharings: Mapping[str, Any]) -> tuple[Ints, list[list[Demand]]]:
        """The kind of each way through the batch, and what the rules that tie both kinds of choices demand of the ways to share
        beside one of each kind: kinds are those that these rules tell apart.
        """
        looked_at = set().union(*(chosen_names(rule.names) for rule in self._tied_rules))
        first, of_choice = distinct_rows([column for name, column in pipelines.items() if name in looked_at])
        places: dict[bytes, int] = {}
        ties: list[list[Demand]] = []
        kind = np.zeros(len(first), dtype=np.int64)
        for index, row in enumerate(first.tolist()):
            given = {name: int(column[row]) for name, column in pipelines.items()}
            tied = [demand_of(rule, given) for rule in self._tied_rules]
            masks = (self._met(demand, self.frames.columns, sharings)[0] for demand in tied)
            kind[index] = places.setdefault(b"".join(np.packbits(mask).tobytes() for mask in masks), len(places))
            ties += [tied] if kind[index] == len(ties) else []
        return kind[of_choice], ties or [[]]

    def _legal_lists(
        self, met: Sequence[tuple[Bools, Ints, Ints]], frames: Mapping[str, Ints], block: slice, choices: Mapping[str, Any]
    ) -> tuple[Bools, Ints]:
        """The distinct sets of legal choices of a block of frame columns, (sets, choices), and the set of each of its rows.

        Eight choices go into a byte: rows that have the same ones, as most do, are then cheap to tell.
        """
        size, rows = len(next(iter(choices.values()))), len(next(iter(frames.values())))
        if not size:
            return np.zeros((1, 0), dtype=bool), np.zeros(rows, dtype=np.int64)
        legal = np.tile(np.packbits(np.ones(size, dtype=bool)), (rows, 1))
        for mask, of_row, of_choice in met:
            used, place = np.unique(of_row[block], return_inverse=True)
            legal &= np.packbits(mask[used][:, of_choice], axis=1)[place]
        if SHARING[0] in choices:
            step = max(1, CELLS_AT_ONCE // size)
            for part in (slice(begin, begin + step) for begin in range(0, rows, step)):
                own = {name: column[part] for name, column in frames.items()}
                legal[part] = np.packbits(self._distinct_sharings(unpacked(legal[part], size), own, choices), axis=1)
        first, of_row = np.unique(legal.view(f"V{legal.shape[1]}").ravel(), return_index=True, return_inverse=True)[1:]
        return unpacked(legal[first], size), of_row

    def _distinct_sharings(self, legal: Bools, frames: Mapping[str, Ints], choices: Mapping[str, Any]) -> Bools:
        """The legal choices (n, choices), each of them once: at cp = 1 the first cp type stands for all, of rank orders that place
        groups alike the first (where pp or dp is 1 those of flags do), and of shardings that run one program in a pipeline.
        """
        whole = (frames["pp"] == 1) | (frames["dp"] == 1)
        free = self.choices.places_freely
        for alike, name in ((frames["cp"] == 1, "cp_type"), *(((whole, "rank_order"),) if not free else ())):
            legal[alike] = first_of_each(legal[alike], all_but(choices, name))
        run = sharding_as_run(self.problem.stack, choices["sharding"], np.array(2))
        if (run != choices["sharding"]).any():
            staged = frames["pp"] > 1
            legal[staged] = first_of_each(legal[staged], row_keys([*({**choices, "sharding": run}).values()]))
        return self._distinct_orders(legal, frames, choices) if free else legal

    def _distinct_orders(self, legal: Bools, frames: Mapping[str, Ints], choices: Mapping[str, Any]) -> Bools:
        """The legal choices (n, choices) whose rank order is the first of those that place the frame's groups alike."""
        orders, order = np.unique(choices["rank_order"], return_inverse=True)
        rows, count = len(legal), len(orders)
        columns = {name: np.repeat(frames[name], count) for name in FRAME} | {"rank_order": np.tile(orders, rows)}
        table = LayoutTable(**{name: columns.get(name, np.zeros(rows * count, dtype=np.int64)) for name in COLUMNS})
        units = self.problem.allocated_sizes[:-1]
        hsdp = "hsdp" in self.problem.stack.optimizer_shardings
        place = placed_alike(table, units, self.constants["experts"] > 0, hsdp).reshape(rows, count)
        by_place = np.argsort(place, axis=1, kind="stable")
        in_runs = np.take_along_axis(place, by_place, axis=1)
        begins = np.concatenate([np.ones((rows, 1), dtype=bool), in_runs[:, 1:] != in_runs[:, :-1]], axis=1)
        found = np.zeros_like(legal)
        others = all_but(choices, "rank_order")
        for other in np.unique(others):
            members = np.flatnonzero(others == other)
            offered = np.zeros((rows, count), dtype=bool)
            offered[:, order[members]] = legal[:, members]
            ordered = np.take_along_axis(offered, by_place, axis=1)
            so_far = np.cumsum(ordered, axis=1)
            before = np.maximum.accumulate(np.where(begins, so_far - ordered, 0), axis=1)
            np.put_along_axis(offered, by_place, ordered & (so_far - before == 1), axis=1)
            found[:, members] = offered[:, order[members]]
        return found

    def _met(self, demand: Demand, wide: Mapping[str, Ints], choices: Mapping[str, Any]) -> tuple[Bools, Ints, Ints]:
        """Where a demand is met, over the distinct values of the columns that it looks at; and the place among them of each
        combination of frame columns and of each choice.
        """
        inner = chosen_names(demand.names)
        frame = [name for name in wide if name in demand.frame]
        chosen = [name for name in choices if name in inner and name != "num_microbatches"]
        rows, of_row = unique_rows([wide[name] for name in frame], len(next(iter(wide.values()))))
        columns, of_choice = unique_rows([choices[name] for name in chosen], len(next(iter(choices.values()))))
        known: dict[str, Any] = dict(zip(frame, (column[:, None] for column in rows), strict=True))
        known |= dict(zip(chosen, (column[None, :] for column in columns), strict=True))
        known |= demand.given
        # The optimizer's own cuts can be said.
        cut = {"split_form": EVEN, "placed_blocks": self.constants["blocks"], "depths_apart": 0}
        mask = demand.mask({**self.constants, **cut, **self._derived(known)})
        shape = len(rows[0]) if rows else 1, len(columns[0]) if columns else 1
        return np.broadcast_to(mask, shape), of_row, of_choice

    def _demands(self, names: tuple[str, ...]) -> list[Demand]:
        """What the rules demand that look at some of the inner columns `names` and at no others."""
        names = (*names, *SCALED) if SHARING[0] in names else names
        other = {*PIPELINE, *SHARING, *SCALED} - set(names)
        return [demand_of(rule) for rule in self.rules if rule.names & set(names) and not rule.names & other]

    def _derived(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The given columns with those that follow from them, as far as their own ingredients are there."""
        known = dict(columns)
        if {"tp", "cp", "pp", "dp"} <= known.keys():
            known["devices_used"] = known["tp"] * known["cp"] * known["pp"] * known["dp"]
        if {"tp", "cp", "dp", "ep", "etp"} <= known.keys():
            known["edp"] = known["tp"] * known["cp"] * known["dp"] // (known["ep"] * known["etp"])
        if {"tp", "cp"} <= known.keys():
            known["sequence_parallel"] = self.sequence_parallel(known["tp"], known["cp"])
        for scaled, name in SCALED.items():
            if name in known:
                known[scaled] = np.rint(known[name] * PER_MILLE).astype(np.int64)
        if {"dp", "micro_batch"} <= known.keys():
            known["num_microbatches"] = self.constants["global_batch"] // (known["dp"] * known["micro_batch"])
        return known

"""CP-SAT's model of a partition: which blocks each chunk holds, under the paths learnt so far."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..cost_models.timeline import Floats, Ints
from .chunking import STATES, Below, Chunking, held_by, turning
from .solving import deterministic_solver, keep_legal

RESOLUTION = 1 << 36
"""Units of time of a step; coefficients are rounded down to them, so that the bound stays below what is true. Finer ones than
these, a ten-millionth in all, now and then keep CP-SAT busy for seconds before its first node.
"""
BYTES = 1 << 10
"""Unit of memory; what stages hold is rounded up to it, so that a partition within some of them of the limit may be left out."""
UNBOUNDED = 1 << 62
"""Limits of a constraint from which on CP-SAT means none."""
TOLERANCE = 1e-5
"""Relative error that a linear program's optimum is allowed, far above what GLOP allows itself."""


class Master:
    """CP-SAT's model of the partition: which blocks each chunk holds, under the paths learnt so far."""

    def __init__(self, chunking: Chunking) -> None:
        from ortools.sat.python import cp_model

        self._of, self._model, self.seconds = chunking, cp_model.CpModel(), 0.0
        blocks, chunks = len(chunking.order), chunking.chunks
        kinds, choices = chunking.blocks.backward_s.shape
        model = self._model
        cuts: list[Any] = [0, *(model.new_int_var(0, blocks, f"cut {c}") for c in range(1, chunks)), blocks]
        before = [[self._before(kind, cut) for cut in cuts] for kind in range(kinds)]
        self._counts: list[list[list[Any]]] = [
            [[model.new_int_var(0, blocks, f"kind {k} choice {r} chunk {c}") for c in range(chunks)] for r in range(choices)]
            for k in range(kinds)
        ]
        for k in range(kinds):
            for c in range(chunks):
                model.add(sum(self._counts[k][r][c] for r in range(choices)) == before[k][c + 1] - before[k][c])
        if chunking.depth is not None or chunking.leading:
            for c in range(chunks):
                self._redo_first(c, cuts[c], cuts[c + 1], chunking.depth)
        keep_legal(model, cuts, chunking.cutting)
        self._mix_kinds()
        self._unit_s = self._whole_s() / RESOLUTION
        self._done, self._after = (model.new_int_var(0, RESOLUTION, name) for name in ("done", "after"))
        self._step = model.new_int_var(0, 2 * RESOLUTION, "step")
        model.add(self._step == self._done + self._after)
        self._hold_all()
        self._limit_memory()

    def learn(self, bounds: list[Below]) -> None:
        """Bounds the two parts of the step from below."""
        for below in bounds:
            fixed, coefficients = self._linear(below)
            terms = [
                int(np.floor(coefficients[k, r, c] / self._unit_s)) * variable
                for k, by_choice in enumerate(self._counts)
                for r, by_chunk in enumerate(by_choice)
                for c, variable in enumerate(by_chunk)
            ]
            part = self._after if below.after else self._done
            self._model.add(part >= int(np.floor(fixed / self._unit_s)) + sum(terms))

    def best(self, known: Ints | None, most_s: float, seconds: float) -> tuple[Ints | None, float]:
        """The best partition under what is known, None if none takes `most_s` or less, and the step that none can beat."""
        self._model.minimize(self._step)
        self._hint(known)
        found, bound_s = self._solved(most_s, seconds)
        self._model.clear_hints()  # type: ignore[no-untyped-call]
        self._model.clear_objective()  # type: ignore[no-untyped-call]
        return found, bound_s

    def below(self, most_s: float, seconds: float) -> tuple[Ints | None, float]:
        """Any partition that takes `most_s` or less under what is known, and `most_s` where there is none, else 0: to refute all
        is far less work than to find the best.
        """
        return self._solved(most_s, seconds)

    def relaxed_s(self) -> float:
        """The step that no partition beats under what is known even if blocks could be parted: the linear relaxation, in a few
        hundredths of a second.
        """
        from ortools.linear_solver.python import model_builder

        linear = model_builder.Model()  # type: ignore[no-untyped-call]
        variables = self._model.proto.variables
        scale = [RESOLUTION if domain.domain[1] >= RESOLUTION else 1 for domain in variables]
        each = [
            linear.new_num_var(one.domain[0] / size, one.domain[len(one.domain) - 1] / size, None)
            for one, size in zip(variables, scale, strict=True)
        ]
        for constraint in self._model.proto.constraints:
            if constraint.has_linear() and not len(constraint.enforcement_literal):
                row = constraint.linear
                weights = [weight * scale[at] for at, weight in zip(row.vars, row.coeffs, strict=True)]
                most = max(map(abs, weights), default=1)
                total = sum(each[at] * (weight / most) for at, weight in zip(row.vars, weights, strict=True))
                low, high = row.domain[0], row.domain[len(row.domain) - 1]
                linear.add_linear_constraint(
                    total, -np.inf if low <= -UNBOUNDED else low / most, np.inf if high >= UNBOUNDED else high / most
                )
        linear.minimize(each[self._step.index])
        solver = model_builder.Solver("glop")
        if solver.solve(linear) != model_builder.SolveStatus.OPTIMAL:
            return 0.0
        return float(solver.objective_value) * RESOLUTION * self._unit_s * (1.0 - TOLERANCE)

    def _solved(self, most_s: float, seconds: float) -> tuple[Ints | None, float]:
        from ortools.sat.python import cp_model

        solver = deterministic_solver(seconds)
        solver.parameters.cp_model_probing_level = 0  # takes longer than to refute what the paths alone do
        solver.parameters.cp_model_presolve = self._of.pipeline.vpp == 1  # so does all of it where stages hold several chunks
        self._step.proto.domain[1] = int(min(np.ceil(most_s / self._unit_s), 2 * RESOLUTION))
        status = solver.solve(self._model)
        self.seconds += solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None, most_s
        bound_s = max(solver.best_objective_bound, 0.0) * self._unit_s
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound_s
        counts = [[[solver.value(variable) for variable in by_chunk] for by_chunk in by_choice] for by_choice in self._counts]
        return np.array(counts, dtype=np.int64), bound_s

    def _hold_all(self) -> None:
        """Counts what every stage holds, and what of the step that asks for at least: where none has room for more than n blocks,
        pp of them hold no more than pp·n.
        """
        of, blocks = self._of, len(self._of.order)
        held = [self._model.new_int_var(0, blocks, f"stage {stage}") for stage in range(of.pp)]
        for stage, variable in enumerate(held):
            own = of.place[:, stage].tolist()
            self._model.add(variable == sum(by_chunk[c] for by_choice in self._counts for by_chunk in by_choice for c in own))
            asked_s = np.max([self._asked_s(below, own) for _, below in turning(of, stage)], axis=0)
            units = np.floor(np.minimum(asked_s / self._unit_s, 2.0 * RESOLUTION)).astype(np.int64).tolist()
            asked = self._model.new_int_var(0, RESOLUTION, f"asked {stage}")
            self._model.add_element(variable, units, asked)
            self._model.add(self._done >= asked)
        self._model.add(sum(held) == blocks * of.place.size // of.chunks)

    def _asked_s(self, below: Below, own: list[int]) -> Floats:
        """What a path takes at least where some chunks hold so many blocks together, (blocks+1,): the cheapest runs of blocks that
        they could be, with what is to be left for the others; infinite for so few or so many that there are none.
        """
        fixed, by_choice = self._linear(below)
        each = by_choice.min(axis=1)  # (kinds, chunks)
        anywhere, blocks, least = each.min(axis=1), len(self._of.order), self._of.cutting.least
        others = np.delete((each - anywhere[:, None]).min(axis=0) * least, own).sum()
        total = np.zeros(1)
        for chunk in own:
            begin, end = int(least[:chunk].sum()), blocks - int(least[chunk + 1 :].sum())
            work = ((each[:, chunk] - anywhere) @ self._of.running)[begin : end + 1]
            runs = np.full(blocks + 1, np.inf)
            for length in range(int(least[chunk]), len(work)):
                runs[length] = (work[length:] - work[: len(work) - length]).min()
            sums = total[:, None] + runs  # of so many blocks before and so many here
            total = np.array([np.diagonal(sums[:, ::-1], offset).min() for offset in range(blocks, blocks - len(runs), -1)])
        return np.asarray(np.maximum(fixed + anywhere @ self._of.running[:, -1] + others + total, 0.0))

    def _mix_kinds(self) -> None:
        """What a chunk holds of a kind is about its share of what it holds: at least as in the leanest run of so many blocks, and
        no more than in the richest.
        """
        of = self._of
        if len(of.running) == 1:
            return
        for c in range(of.chunks):
            each = [sum(by_chunk[c] for by_chunk in by_choice) for by_choice in self._counts]
            length = sum(each)
            for count, running in zip(each, of.running, strict=True):
                for sign in (1, -1):
                    for (short, few), (long, many) in pairwise(_hull(running, sign)):
                        inside = (long - short) * count - (many - few) * (length - short) - few * (long - short)
                        self._model.add(sign * inside >= 0)

    def _before(self, kind: int, cut: Any) -> Any:
        """Blocks of a kind before a cut."""
        running = self._of.running[kind].tolist()
        if isinstance(cut, int):
            return running[cut]
        if len(self._of.running) == 1:
            return cut
        found = self._model.new_int_var(0, running[-1], "")
        self._model.add_element(cut, running, found)
        return found

    def _redo_first(self, chunk: int, cut: Any, end: Any, depth: int | None) -> None:
        """Puts the first `depth` blocks of a chunk under the second choice, or as many as one likes."""
        until = self._model.new_int_var(0, len(self._of.order), "")
        if depth is None:
            self._model.add(until >= cut)
            self._model.add(until <= end)
        else:
            self._model.add_min_equality(until, [cut + depth, end])
        for kind, (_, redone) in enumerate(self._counts):
            self._model.add(redone[chunk] == self._before(kind, until) - self._before(kind, cut))

    def _whole_s(self) -> float:
        """All chunks on one device, step after step: no step is longer."""
        of, counts = self._of, self._of.running[:, -1]

        def most(name: str) -> float:
            each, ends = of.blocks.of(name), of.ends.of(name)
            return 0.0 if each is None or ends is None else float(counts @ each.max(axis=1) + ends.sum())

        work = sum(most(name) for name in ("forward_s", "backward_s", "sent_s", "returned_s"))
        crossings = 2.0 * of.chunks * of.p2p_s
        return of.pipeline.num_microbatches * (work + crossings) + sum(most(name) for name in STATES)

    def _limit_memory(self) -> None:
        of, model = self._of, self._model
        for stage in range(of.pp):
            for weights in held_by(of, stage):
                fixed, each = of.linear(weights, float(of.fixed_bytes[stage]))
                units = np.ceil(each / BYTES).astype(np.int64)
                terms = [int(units[k, r, c]) * self._counts[k][r][c] for k, r, c in np.argwhere(units).tolist()]
                model.add(sum(terms) <= int(np.floor((of.limit_bytes - fixed) / BYTES)))

    def _linear(self, below: Below) -> tuple[float, Floats]:
        """A bound as a constant and seconds per block (kinds, choices, chunks)."""
        return self._of.linear(below.weights, below.edges * self._of.p2p_s)

    def _hint(self, known: Ints | None) -> None:
        for (k, r, c), value in np.ndenumerate(known if known is not None else np.zeros((0, 0, 0), dtype=np.int64)):
            self._model.add_hint(self._counts[k][r][c], int(value))


def _hull(running: Ints, sign: int) -> list[tuple[int, int]]:
    """The corners of the convex hull, from below (`sign` 1) or above (−1), of how many blocks of a kind runs of every length hold,
    as (length, blocks); `running` (blocks+1,) counts those before each block.
    """
    corners = [(0, 0)]
    for length in range(1, len(running)):
        here = length, sign * int((sign * (running[length:] - running[:-length])).min())
        while len(corners) > 1 and sign * _turn(corners[-2], corners[-1], here) <= 0:
            corners.pop()
        corners.append(here)
    return corners


def _turn(first: tuple[int, int], second: tuple[int, int], third: tuple[int, int]) -> int:
    """Above zero where the way through three points turns upwards."""
    return (second[0] - first[0]) * (third[1] - first[1]) - (second[1] - first[1]) * (third[0] - first[0])

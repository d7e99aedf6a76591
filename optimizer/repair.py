"""Samples made legal by CP-SAT: of all legal choices around a start the one nearest to what was sampled.

The rules are read as constraints over every column of a layout; columns that a choice does not set are held at the start's. The
distance is counted along each knob, in thousandths of a doubling of the micro-batch, per mille of offload and so on, and summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ortools.sat.python import cp_model

from ..cost_models.step import CostModel
from ..search_spaces.constraints import RuleModel, build_model
from ..search_spaces.cutting import Cutting
from ..search_spaces.expressions import divisors
from ..search_spaces.layout import ALL_LAYERS, COLUMNS, SCHEDULES, Bools, LayoutTable, Problem, Recompute
from ..search_spaces.quantities import DERIVED, EVEN, PER_MILLE, constants
from ..search_spaces.rules import Rule, legal_mask, rules_for, rules_over
from .solving import deterministic_solver, keep_legal
from .stages import cutting_of
from .study_space import REACH, Choice, Run, Start, by_run, plain, table_of

PER_DOUBLING, PER_LAYER, PER_KIND = 1000, 100, 1000
"""Distance of a doubled micro-batch, of a layer of recompute depth or of a cut, and of another kind of recompute; an offload counts
its per mille."""
DETERMINISTIC_LIMIT = 10.0
"""CP-SAT's deterministic seconds for one sample; it needs thousandths of one."""
INTERLEAVED = SCHEDULES.index("interleaved")


@dataclass
class Repairs:
    """Legality of choices around some starts, and the nearest legal one of any; `repaired` counts the samples that needed it."""

    model: CostModel
    problem: Problem
    starts: Sequence[Start]
    recomputes: Sequence[Recompute]
    repaired: int = 0
    _known: dict[Choice, Choice] = field(default_factory=dict)
    _nearest: dict[int, _Nearest] = field(default_factory=dict)

    def legal(self, choices: Sequence[Choice]) -> Bools:
        """Which choices break no rule but memory, and can be cut and priced as they stand, (n,)."""
        table = table_of(self.problem, self.starts, choices)
        mask = np.empty(len(choices), dtype=bool)
        for run, members in by_run(self.starts, choices):
            mask[members] = keeps_rules(run.of(self.problem), table.take(np.array(members)))
        mask &= (table.schedule != INTERLEAVED) | (table.num_microbatches >= table.pp)
        deepest = np.array([self.starts[choice.start].deepest for choice in choices])
        mask &= (table.recompute_layers == ALL_LAYERS) | (table.recompute_layers <= deepest)
        return np.asarray(mask & np.array([self._can_be_cut(choice) for choice in choices]))

    def made_legal(self, choices: Sequence[Choice]) -> list[Choice]:
        """The choices that are legal as they are, and for each other the legal one nearest to it."""
        legal = self.legal(choices)
        self.repaired += int((~legal).sum())
        return [choice if fine else self._repair(choice) for choice, fine in zip(choices, legal, strict=True)]

    def _can_be_cut(self, choice: Choice) -> bool:
        """Whether the cuts of a choice are legal, where it tells any."""
        return not choice.cuts or bool(self._cutting(self.starts[choice.start]).legal(np.array([choice.cuts]))[0])

    def _cutting(self, start: Start) -> Cutting:
        return cutting_of(self.model, start.layout.pp, start.layout.vpp)

    def _repair(self, choice: Choice) -> Choice:
        if choice not in self._known:
            if choice.start not in self._nearest:
                start = self.starts[choice.start]
                problem = Run(start.precision).of(self.problem)
                built, cutting = _rules_around(problem, start, self.recomputes), self._cutting(start)
                self._nearest[choice.start] = _Nearest(built, self.problem, start, choice.start, self.recomputes, cutting)
            self._known[choice] = self._nearest[choice.start].to(choice)
        return self._known[choice]


def keeps_rules(problem: Problem, table: LayoutTable) -> Bools:
    """Which rows break no rule but memory, (n,)."""
    return legal_mask(problem, table, _rules_but_memory(problem))


def _rules_but_memory(problem: Problem) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules_for(problem) if rule.scope != "memory")


class _Nearest:
    """The legal choices around one start as a CP-SAT model, to which a sample is added as the values of its targets."""

    def __init__(
        self, built: RuleModel, problem: Problem, start: Start, place: int, recomputes: Sequence[Recompute], cutting: Cutting
    ) -> None:
        self._model, self._columns = built.model, built.columns
        self._start, self._place, self._recomputes = start, place, recomputes
        self._targets: list[cp_model.IntVar] = []
        self._far: list[cp_model.LinearExprT] = []
        self._size, self._offload = self._columns["micro_batch"], self._columns["optimizer_offload_per_mille"]
        self._activations = self._columns["activation_offload_per_mille"]
        sizes = divisors(problem.workload.global_batch)
        doublings = self._tied("doublings", [self._size], [(size, _doublings(size)) for size in sizes])
        kinds = [(r.mode, r.modules, r.layers, kind, depth) for r, kind, depth in _recomputes_of(start, recomputes)]
        self._recompute = [self._columns[f"recompute_{part}"] for part in ("mode", "modules", "layers")]
        kind, depth = (self._model.new_int_var(0, max(row[part] for row in kinds), "") for part in (3, 4))
        self._model.add_allowed_assignments([*self._recompute, kind, depth], kinds)
        self._aim(doublings, 1)
        self._aim_at_kind(kind, len(recomputes))
        self._aim(depth, PER_LAYER)
        self._aim(self._offload, 1)
        self._aim(self._activations, 1)
        self._cuts = self._cut_variables(cutting)
        for cut in self._cuts:
            self._aim(cut, PER_LAYER)
        if start.layout.schedule == "interleaved":
            self._model.add(self._columns["num_microbatches"] >= start.layout.pp)
        self._model.minimize(sum(self._far))

    def to(self, choice: Choice) -> Choice:
        """The legal choice nearest to a sample. ValueError: there is none, though the start itself is one."""
        model = self._model.clone()
        kind, depth = self._recomputes.index(plain(choice.recompute)), _depth(choice.recompute, self._start)
        offloads = (choice.offload_per_mille, choice.activations_per_mille)
        aims = [_doublings(choice.micro_batch), kind, depth, *offloads, *choice.cuts[1:-1]]
        for target, aim in zip(self._targets, aims, strict=True):
            model.add(model.get_int_var_from_proto_index(target.index) == aim)
        solver = deterministic_solver(DETERMINISTIC_LIMIT)
        if solver.solve(model) != cp_model.OPTIMAL:
            raise ValueError(f"no legal choice was found near {choice}: {model.validate() or 'the rules refuse the start itself'}")

        def value(variable: cp_model.IntVar) -> int:
            return int(solver.value(model.get_int_var_from_proto_index(variable.index)))

        mode, modules, layers = (value(each) for each in self._recompute)
        first, *_, end = self._start.cuts
        cuts = (first, *(value(cut) for cut in self._cuts), end) if self._cuts else ()
        recompute, offload, activations = Recompute(mode, modules, layers), value(self._offload), value(self._activations)
        return Choice(self._place, value(self._size), recompute, offload, cuts, activations)

    def _tied(self, name: str, columns: list[cp_model.IntVar], rows: list[tuple[int, ...]]) -> cp_model.IntVar:
        """A variable that follows from columns by a table."""
        found = self._model.new_int_var_from_domain(cp_model.Domain.from_values([row[-1] for row in rows]), name)
        self._model.add_allowed_assignments([*columns, found], rows)
        return found

    def _aim(self, value: cp_model.IntVar, weight: int) -> None:
        """Counts how far a value lies from a target that a sample sets."""
        target, away = self._target(), self._model.new_int_var(0, 2 * ALL_LAYERS, "")
        self._model.add_abs_equality(away, value - target)
        self._far.append(weight * away)

    def _aim_at_kind(self, kind: cp_model.IntVar, kinds: int) -> None:
        target, same = self._target(), self._model.new_bool_var("")
        self._model.add(kind == target).only_enforce_if(same)
        self._far.append(PER_KIND * ~same)

    def _target(self) -> cp_model.IntVar:
        self._targets.append(self._model.new_int_var(-ALL_LAYERS, ALL_LAYERS, ""))
        return self._targets[-1]

    def _cut_variables(self, cutting: Cutting) -> list[cp_model.IntVar]:
        """Legal cuts between the two ends, within reach of the start's; none where they are not told."""
        if not self._start.tells_cuts:
            return []
        base = self._start.cuts
        inner = [self._model.new_int_var(cut - REACH, cut + REACH, "") for cut in base[1:-1]]
        keep_legal(self._model, [base[0], *inner, base[-1]], cutting)
        return inner


def _rules_around(problem: Problem, start: Start, recomputes: Sequence[Recompute]) -> RuleModel:
    """The rules over every column of a layout, of which those that choices do not set may only be the start's."""
    batch, row = divisors(problem.workload.global_batch), start.row
    domains: dict[str, Sequence[int]] = {
        name: (int(getattr(row, name)[0]),) for name in COLUMNS if name != "split" and not name.endswith("_offload")
    }
    domains |= {"split_form": (EVEN,), "placed_blocks": (constants(problem)["blocks"],)}  # these cuts can be said
    domains |= {"depths_apart": (0,)}
    domains |= {"micro_batch": batch, "num_microbatches": batch}
    allowed = [each for each, _, _ in _recomputes_of(start, recomputes)]
    domains |= {f"recompute_{part}": [getattr(each, part) for each in allowed] for part in ("mode", "modules", "layers")}
    domains |= {f"{states}_offload_per_mille": range(PER_MILLE + 1) for states in ("optimizer", "activation")}
    known = {*constants(problem), *domains, *DERIVED}
    return build_model(problem, rules_over(_rules_but_memory(problem), known), domains)


def _recomputes_of(start: Start, recomputes: Sequence[Recompute]) -> Iterator[tuple[Recompute, int, int]]:
    """What a start can recompute at every depth, with its place among the kinds and its depth in layers."""
    for kind, each in enumerate(recomputes):
        depths = range(1, start.deepest + 1) if each.layers == 1 else (each.layers,)
        for recompute in (replace(each, layers=depth) for depth in depths):
            yield recompute, kind, _depth(recompute, start)


def _depth(recompute: Recompute, start: Start) -> int:
    """Layers of a chunk that are redone as a whole."""
    return start.deepest if recompute.layers == ALL_LAYERS else recompute.layers


def _doublings(micro_batch: int) -> int:
    return round(PER_DOUBLING * math.log2(micro_batch))

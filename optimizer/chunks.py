"""Layers to chunks, and recompute to layers: the partition with the shortest true step, proved by cutting planes over CP-SAT.

The step of a schedule is the longest path through its passes, and a path takes its seconds whatever the chunks hold: linear in
what they hold. CP-SAT finds the partition that is best under the paths known so far, the schedule is replayed for it, and its own
longest paths join them. Each round raises the bound or finds a better partition; they meet at the optimum (Benders, Numer. Math. 4,
1962, with the replay as subproblem).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..cost_models.schedules import PAIRED, WHOLE, stage_chunks, stage_share
from ..cost_models.timeline import Floats, Ints
from ..search_spaces.cutting import Cutting
from .critical_paths import Path, Pipeline, Weights, longest_paths
from .solving import deterministic_solver, keep_legal

RESOLUTION = 1 << 36
"""Units of time of a step; coefficients are rounded down to them, so that the bound stays below what is true. Finer ones than
these, a ten-millionth in all, now and then keep CP-SAT busy for seconds before its first node.
"""
BYTES = 1 << 16
"""Unit of memory; what stages hold is rounded up to it."""
PASSES = ("forward_s", "backward_s", "weight_s", "sent_s", "returned_s", "early_s")
STATES = ("reduced_s", "gradients_s", "stepped_s", "parameters_s")
"""What chunks take: per pass, and per step for their states."""
TOLD = 3
"""Stages of a partition whose longest paths are told to CP-SAT."""
LEANING = 1.2
"""How much slower a stage is made to see the paths through it."""
LEANT_PASSES = 1 << 16
"""Passes that are replayed for it at once; more of them only where two rounds have left bound and step apart."""
PRICED_AT_ONCE = 256
"""Moves of a walk that are priced together, the most promising first, of which the best is taken: a replay of many takes little
longer than of a few.
"""
ROUNDS = 12
"""Times that CP-SAT is asked for one partition; what it has proved by then stands."""
EQUAL = 1e-6  # relative difference below which bound and step have met


@dataclass(frozen=True, eq=False)
class Blocks:
    """What blocks of each kind cost on a stage; the last axis are the choices of recompute and of offload, where it matters.

    `forward_s` (kinds,) or (kinds, choices) and `backward_s` (kinds, choices) seconds per micro-batch, `state_bytes` (kinds,) and
    `saved_bytes` (kinds, choices) per micro-batch in flight. Per step, (kinds,): gradients are exchanged for `reduced_s`, and for
    `gradients_s` as far as passes do not hide it; then states are stepped for `stepped_s` and weights gathered for `parameters_s`
    likewise. Where a schedule is replayed: of a backward `weight_s` are weight gradients, `returned_s` (kinds, choices) messages
    that a pair can hide, as `sent_s` of a forward, and `early_s` (kinds, choices) recompute that waits for no gradient;
    `kept_bytes` are kept for weight gradients that follow apart.
    """

    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    state_bytes: Floats
    reduced_s: Floats
    gradients_s: Floats
    stepped_s: Floats
    parameters_s: Floats
    weight_s: Floats | None = None
    sent_s: Floats | None = None
    returned_s: Floats | None = None
    early_s: Floats | None = None
    kept_bytes: Floats | None = None

    def of(self, name: str) -> Floats | None:
        """Seconds or bytes by their name, (kinds, choices) or (kinds, 1)."""
        found = getattr(self, name)
        return None if found is None else np.reshape(found, (len(self.state_bytes), -1))


@dataclass(frozen=True, eq=False)
class Chunking:
    """One pipeline whose `order` of blocks, a kind each, is to be cut; `ends` are what the first and the last chunk hold besides.

    `held_at` are of every stage the micro-batches that it keeps of each of its chunks at the moments when it may be at its fullest,
    (moments, chunks of a stage), or as many columns more of what it keeps of each for weight gradients; `fixed_bytes` (pp,) what
    stages hold whatever their blocks, `limit_bytes` what they may; `cutting` says where cuts are legal.
    Messages can hide behind the `free` shares of forward and backward passes. Which layers are under which choice is open; with a
    `depth` the first `depth` blocks of every chunk are under the second choice, the others under the first; where they are redone
    from the first on (`leading`), each chunk has a depth of its own.
    """

    pipeline: Pipeline
    cutting: Cutting
    p2p_s: float
    order: tuple[int, ...]
    blocks: Blocks
    ends: Blocks
    held_at: tuple[Ints, ...]
    fixed_bytes: Floats
    limit_bytes: float
    depth: int | None = None
    leading: bool = False
    free: tuple[float, float] = (1.0, 1.0)
    apart: bool = True  # whether what hides traffic is told by chunk, not by stage

    @property
    def pp(self) -> int:
        return self.cutting.pp

    @property
    def vpp(self) -> int:
        return self.cutting.vpp

    @property
    def chunks(self) -> int:
        return self.cutting.chunks

    @cached_property
    def place(self) -> Ints:
        """Chunks that every stage holds, (chunks of a stage, pp)."""
        return stage_chunks(self.pipeline.schedule, self.pp, self.vpp)

    def shared(self, count: Ints) -> Floats:
        """Passes of a mean micro-batch, of which each goes through a share of the chunks that are counted, (chunks,)."""
        return np.asarray(stage_share(self.pipeline.schedule) * count, dtype=np.float64)

    def own(self, stage: int) -> Ints:
        """Which chunks a stage holds, (chunks,)."""
        return np.bincount(self.place[:, stage], minlength=self.chunks)

    @cached_property
    def running(self) -> Ints:
        """How many blocks of each kind lie before every block and before the end, (kinds, blocks+1)."""
        kinds = np.arange(len(self.blocks.forward_s))[:, None] == np.array(self.order)[None, :]
        return np.concatenate([np.zeros((len(kinds), 1), dtype=np.int64), np.cumsum(kinds, axis=1)], axis=1)

    def held(self, cuts: Sequence[int]) -> Ints:
        """Blocks of each kind in every chunk, (kinds, chunks), nothing chosen of recompute."""
        return np.diff(self.running[:, np.array(cuts)], axis=1)


@dataclass(frozen=True)
class Chunks:
    """A partition: `cuts` (chunks+1), blocks of each kind under each choice of recompute in every chunk (kinds, choices, chunks).

    `step_s` is the replayed step with what stages do after it, `bound_s` what no partition can beat; `rounds` were solved, in
    `seconds` of CP-SAT's deterministic time.
    """

    cuts: tuple[int, ...]
    counts: Ints
    step_s: float
    bound_s: float
    rounds: int
    seconds: float

    @property
    def optimal(self) -> bool:
        return self.bound_s >= self.step_s * (1.0 - 2.0 * EQUAL)


@dataclass(frozen=True, eq=False)
class Below:
    """Seconds that a step takes at least, as weights (chunks,) of what chunks take, and edges crossed: of its first part, up to the
    last gradients' exchange, or of what follows (`after`).
    """

    weights: Weights
    edges: int = 0
    after: bool = False

    def seconds(self, taken: dict[str, Floats], p2p_s: float) -> float:
        """The same for chunks that take so long."""
        return float(sum(weight @ taken[name] for name, weight in self.weights.items()) + self.edges * p2p_s)


@dataclass
class _Best:
    counts: Ints | None = None
    step_s: float = np.inf


def best_chunks(chunking: Chunking, starts: Sequence[Ints] = (), below_s: float = np.inf, seconds: float = 1.0) -> Chunks | None:
    """The partition with the shortest step, or the best that `seconds` of CP-SAT's time find; None if none is below `below_s`.

    `starts` (kinds, choices, chunks) are partitions to begin from: what comes back is slower than none of them that fits.
    """
    master = _Master(chunking)
    best, bound_s, rounds = _Best(step_s=below_s), 0.0, 0
    for start in starts:
        master.learn(_consider(chunking, start, best))
    passes = 2 * chunking.chunks * chunking.pipeline.num_microbatches * chunking.pp
    lean_after = 0 if passes <= LEANT_PASSES else 2
    while bound_s < best.step_s * (1.0 - EQUAL) and master.seconds < seconds and rounds < ROUNDS:
        if starts and rounds == lean_after:
            master.learn(list(_leaning(chunking, chunk_seconds(chunking, starts[-1]))))
        found, proved_s = master.solve(best, seconds - master.seconds)
        bound_s, rounds = max(bound_s, proved_s), rounds + 1
        if found is None:
            break
        master.learn(_consider(chunking, found, best))
    if best.counts is None:
        return None
    cuts = np.concatenate([[0], np.cumsum(best.counts.sum(axis=(0, 1)))])
    return Chunks(tuple(cuts.tolist()), best.counts, best.step_s, min(bound_s, best.step_s), rounds, master.seconds)


def walked(
    cutting: Cutting,
    cuts: Sequence[int],
    step_s: float,
    price: Callable[[Ints], Floats],
    below: Callable[[Ints], Floats],
    most: int = 20,
) -> list[tuple[tuple[int, ...], float]]:
    """Partitions with their steps on the way downhill from `cuts`, whose step is given, best last: a good move of one block from
    one chunk to another, over and over.

    `price` gives the steps of cuts (n, chunks+1), infinite for those that do not fit; `below` what they take at least, quicker.
    From cuts that do not fit no way leads on.
    """
    way = [(tuple(cuts), step_s)]
    for _ in range(most if np.isfinite(step_s) else 0):
        limit_s, best = way[-1][1] * (1.0 - EQUAL), None
        near = _moved(cutting, np.array(way[-1][0]))
        least_s = below(near) if len(near) else np.zeros(0)
        hopeful = np.argsort(least_s, kind="stable")
        hopeful = hopeful[least_s[hopeful] < limit_s]
        while best is None and len(hopeful):
            now, hopeful = hopeful[:PRICED_AT_ONCE], hopeful[PRICED_AT_ONCE:]
            steps = price(near[now])
            if steps.min() < limit_s:
                best = int(steps.argmin())
                way.append((tuple(near[now[best]].tolist()), float(steps[best])))
        if best is None:
            break
    return way


def _moved(cutting: Cutting, cuts: Ints) -> Ints:
    """All partitions that differ by one block in one chunk more and one chunk less, (n, chunks+1)."""
    give, take = (each.ravel() for each in np.meshgrid(np.arange(cutting.chunks), np.arange(cutting.chunks)))
    inner = np.arange(cutting.chunks + 1)[None, :]
    between = (inner > np.minimum(give, take)[:, None]) & (inner <= np.maximum(give, take)[:, None])
    moved = cuts + np.where(between, np.where(give < take, -1, 1)[:, None], 0)
    return np.asarray(moved[(give != take) & cutting.legal(moved)])


def chunk_seconds(chunking: Chunking, counts: Ints) -> dict[str, Floats]:
    """What every chunk takes, (chunks,) for each of PASSES and STATES that there is."""
    found = {name: _chunk_sums(chunking, name, counts) for name in (*PASSES, *STATES)}
    return {name: each for name, each in found.items() if each is not None}


def _chunk_sums(chunking: Chunking, name: str, counts: Ints) -> Floats | None:
    """Seconds or bytes of every chunk, (chunks,), with what the ends hold besides."""
    each, ends = chunking.blocks.of(name), chunking.ends.of(name)
    if each is None or ends is None:
        return None
    found = np.asarray((each[:, :, None] * counts).sum(axis=(0, 1)))
    found[[0, -1]] += ends[:, 0]
    return found


def stage_bytes(chunking: Chunking, counts: Ints) -> Floats:
    """Bytes that every stage holds at its peak, (pp,)."""
    columns = [_chunk_sums(chunking, name, counts) for name in ("state_bytes", "saved_bytes", "kept_bytes")]
    states, *working = (np.zeros((0, chunking.pp)) if each is None else each[chunking.place] for each in columns)
    active = np.concatenate(working).T
    most = [(held @ mine[: held.shape[1]]).max() for held, mine in zip(chunking.held_at, active, strict=True)]
    return np.asarray(chunking.fixed_bytes + states.sum(axis=0) + most)


def step_seconds(chunking: Chunking, counts: Ints) -> float:
    """The replayed step of a partition with what its stages do for their states."""
    done, after = _timed(chunking, counts)
    return done[0][0] + after[0][0]


def _timed(chunking: Chunking, counts: Ints) -> tuple[list[tuple[float, Below]], list[tuple[float, Below]]]:
    """When each stage's gradients are exchanged and how long each then takes, the latest and the longest first.

    A chunk's gradients hide behind its own last backward pass and the pp passes of each chunk that follow, its weights behind the
    forward passes before it likewise; what waits in line for the same links is late together.
    """
    taken, pp = chunk_seconds(chunking, counts), chunking.pp
    paths = longest_paths(chunking.pipeline, taken, chunking.p2p_s)
    done = [max(_reduced(chunking, path, taken), key=lambda each: each[0]) for path in paths]
    after = [max(_gathered(chunking, stage, taken), key=lambda each: each[0]) for stage in range(pp)]
    return sorted(done, key=lambda each: -each[0]), sorted(after, key=lambda each: -each[0])


def _leaning(chunking: Chunking, taken: dict[str, Floats]) -> Iterator[Below]:
    """The longest path if one stage were slower than it is, for every stage: what would be wrong with giving it more."""
    for stage in range(chunking.pp):
        slower = np.where(chunking.own(stage) > 0, LEANING, 1.0)
        leant = {name: each * slower if name in PASSES else each for name, each in taken.items()}
        path = longest_paths(chunking.pipeline, leant, chunking.p2p_s, stages=(0,))[0]
        yield Below(path.weights, path.edges)


def _reduced(chunking: Chunking, path: Path, taken: dict[str, Floats]) -> Iterator[tuple[float, Below]]:
    """A stage's end with its gradients, by the chunk whose exchange is the first not to be hidden (none of them first)."""
    passes: Weights = {**path.weights, "reduced_s": chunking.own(path.stage)}
    yield _told(Below(passes, path.edges), taken, chunking.p2p_s)
    for waiting, hiding in _windows(chunking, path.stage):
        hidden = np.asarray(chunking.free[1] * hiding, dtype=np.float64)
        late: Weights = {**passes, "gradients_s": waiting, "backward_s": np.asarray(passes["backward_s"] - hidden)}
        yield _told(Below(late, path.edges), taken, chunking.p2p_s)


def _gathered(chunking: Chunking, stage: int, taken: dict[str, Floats]) -> Iterator[tuple[float, Below]]:
    """What follows on a stage, by the chunk whose weights are the last to be late (none of them first)."""
    stepped: Weights = {"stepped_s": chunking.own(stage)}
    yield _told(Below(stepped, after=True), taken, chunking.p2p_s)
    for waiting, hiding in _windows(chunking, stage):
        hidden = np.asarray(chunking.free[0] * (hiding + _lead(chunking, stage)), dtype=np.float64)
        late: Weights = {**stepped, "parameters_s": waiting, "forward_s": -hidden}
        yield _told(Below(late, after=True), taken, chunking.p2p_s)


def _lead(chunking: Chunking, stage: int) -> Floats | Ints:
    """Forward passes of each chunk before a stage's first, (chunks,)."""
    if chunking.apart:
        return np.asarray(np.arange(chunking.chunks) < stage, dtype=np.int64)
    before = np.bincount(chunking.place[:, :stage].ravel(), minlength=chunking.chunks)
    return chunking.shared(before)


def _windows(chunking: Chunking, stage: int) -> Iterator[tuple[Floats | Ints, Floats | Ints]]:
    """For every chunk of a stage: the chunks whose traffic waits in line with it, and passes of each that hide it.

    Of chunks that are not told apart all passes of a mean micro-batch hide all traffic.
    """
    own = chunking.own(stage)
    if not chunking.apart:
        yield own, chunking.shared(own)
        return
    row = np.arange(chunking.chunks) // chunking.pp
    for last in range(chunking.vpp):
        hiding = chunking.pp * (row < last) + (row == last)
        yield own * (row <= last), np.asarray(own * hiding, dtype=np.int64)


def _told(below: Below, taken: dict[str, Floats], p2p_s: float) -> tuple[float, Below]:
    return below.seconds(taken, p2p_s), below


def _consider(chunking: Chunking, counts: Ints, best: _Best) -> list[Below]:
    """Replays a partition, keeps it if it is the best so far, and tells what it took longest for."""
    done, after = _timed(chunking, counts)
    step_s = done[0][0] + after[0][0]
    if step_s < best.step_s and (stage_bytes(chunking, counts) <= chunking.limit_bytes).all():
        best.step_s, best.counts = step_s, counts
    return [below for _, below in (*done[:TOLD], *after[:TOLD])]


class _Master:
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
        self._unit_s = self._whole_s() / RESOLUTION
        self._done, self._after = (model.new_int_var(0, RESOLUTION, name) for name in ("done", "after"))
        model.minimize(self._done + self._after)
        self._limit_memory()
        self.learn([self._alone(stage) for stage in range(chunking.pp)])

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

    def solve(self, best: _Best, seconds: float) -> tuple[Ints | None, float]:
        """The best partition under what is known, None if no better one is left, and the step that none can beat."""
        from ortools.sat.python import cp_model

        solver = deterministic_solver(seconds)
        if np.isfinite(best.step_s):
            self._model.add(self._done + self._after <= int(np.ceil(best.step_s / self._unit_s)))
        self._hint(best)
        status = solver.solve(self._model)
        self.seconds += solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None, best.step_s
        proved_s = max(solver.best_objective_bound, 0.0) * self._unit_s
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, proved_s
        counts = [[[solver.value(variable) for variable in by_chunk] for by_chunk in by_choice] for by_choice in self._counts]
        return np.array(counts, dtype=np.int64), proved_s

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
            states, own = of.own(stage), of.place[:, stage]
            for held in of.held_at[stage]:
                counted = np.concatenate([held, np.zeros(2 * len(own) - len(held))]).reshape(2, -1)
                saved, kept = (np.bincount(own, weights=each, minlength=of.chunks) for each in counted)
                each, fixed = np.zeros((*of.blocks.backward_s.shape, of.chunks)), float(of.fixed_bytes[stage])
                for name, weight in (("state_bytes", states), ("saved_bytes", saved), ("kept_bytes", kept)):
                    blocks, ends = of.blocks.of(name), of.ends.of(name)
                    if blocks is not None and ends is not None:
                        each += blocks[:, :, None] * weight
                        fixed += float(ends[:, 0] @ weight[[0, -1]])
                units = np.ceil(each / BYTES).astype(np.int64)
                terms = [int(units[k, r, c]) * self._counts[k][r][c] for k, r, c in np.argwhere(units).tolist()]
                model.add(sum(terms) <= int(np.floor((of.limit_bytes - fixed) / BYTES)))

    def _alone(self, stage: int) -> Below:
        """Through the stages before, all of the stage's own passes, and back; of replayed ones its own, whose pairs hide what they
        can.
        """
        of = self._of
        own = of.shared(of.pipeline.num_microbatches * of.own(stage))
        if of.pipeline.schedule not in WHOLE or not of.apart:
            weights: Weights = {"forward_s": own, "backward_s": own}
            hides = (1.0 - of.pipeline.slowed) * own
            hidden: Weights = {"sent_s": -hides, "returned_s": -hides} if of.pipeline.schedule in PAIRED else {}
            return Below(weights | hidden)
        before = np.asarray(np.arange(of.chunks) < stage, dtype=np.int64)
        return Below({"forward_s": before + own, "backward_s": before + own}, 2 * stage)

    def _linear(self, below: Below) -> tuple[float, Floats]:
        """A bound as a constant and seconds per block (kinds, choices, chunks)."""
        of = self._of
        fixed, coefficients = below.edges * of.p2p_s, np.zeros((*of.blocks.backward_s.shape, of.chunks))
        for name, weight in below.weights.items():
            each, ends = of.blocks.of(name), of.ends.of(name)
            if each is not None and ends is not None:
                coefficients += each[:, :, None] * weight
                fixed += float(ends[:, 0] @ weight[[0, -1]])
        return fixed, coefficients

    def _hint(self, best: _Best) -> None:
        self._model.clear_hints()  # type: ignore[no-untyped-call]
        if best.counts is None:
            return
        for (k, r, c), value in np.ndenumerate(best.counts):
            self._model.add_hint(self._counts[k][r][c], int(value))

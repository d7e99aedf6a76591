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

from ..cost_models.timeline import Floats, Ints
from ..search_spaces.cutting import Cutting
from ..search_spaces.layout import Bools
from .critical_paths import Path, longest_paths
from .solving import deterministic_solver, keep_legal

RESOLUTION = 1 << 40
"""Units of time of a step; coefficients are rounded down to them, so that the bound stays below what is true."""
BYTES = 1 << 16
"""Unit of memory; what stages hold is rounded up to it."""
SECONDS = ("forward_s", "backward_s", "reduced_s", "gradients_s", "stepped_s", "parameters_s")
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
    likewise.
    """

    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    state_bytes: Floats
    reduced_s: Floats
    gradients_s: Floats
    stepped_s: Floats
    parameters_s: Floats


@dataclass(frozen=True, eq=False)
class Chunking:
    """One pipeline whose `order` of blocks, a kind each, is to be cut; `ends` are what the first and the last chunk hold besides.

    `in_flight` (pp,) micro-batches that stages keep at their peak, `fixed_bytes` (pp,) what they hold whatever their blocks,
    `limit_bytes` what they may; `cutting` says where cuts are legal.
    Messages can hide behind the `free` shares of forward and backward passes. Which layers are under which choice is open; with a
    `depth` the first `depth` blocks of every chunk are under the second choice, the others under the first; where they are redone
    from the first on (`leading`), each chunk has a depth of its own.
    """

    schedule: str
    cutting: Cutting
    num_microbatches: int
    p2p_s: float
    order: tuple[int, ...]
    blocks: Blocks
    ends: Blocks
    in_flight: Floats
    fixed_bytes: Floats
    limit_bytes: float
    depth: int | None = None
    leading: bool = False
    free: tuple[float, float] = (1.0, 1.0)

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


Weights = dict[str, Floats | Ints]


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
    passes = 2 * chunking.chunks * chunking.num_microbatches * chunking.pp
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
    """What every chunk takes, (chunks,) for each of SECONDS."""
    found = {}
    for name in SECONDS:
        each, ends = getattr(chunking.blocks, name), getattr(chunking.ends, name)
        found[name] = np.einsum("kr,krc->c", each, counts) if each.ndim == 2 else np.einsum("k,krc->c", each, counts)
        found[name][[0, -1]] += ends[:, 0] if ends.ndim == 2 else ends
    return found


def stage_bytes(chunking: Chunking, counts: Ints) -> Floats:
    """Bytes that every stage holds at its peak, (pp,)."""
    blocks, ends, pp = chunking.blocks, chunking.ends, chunking.pp
    states = np.einsum("k,krc->c", blocks.state_bytes, counts).reshape(-1, pp).sum(axis=0)
    saved = np.einsum("kr,krc->c", blocks.saved_bytes, counts).reshape(-1, pp).sum(axis=0)
    states[[0, -1]] += ends.state_bytes
    saved[[0, -1]] += ends.saved_bytes[:, 0]
    return np.asarray(chunking.fixed_bytes + states + saved * chunking.in_flight)


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
    paths = longest_paths(
        chunking.schedule, pp, chunking.vpp, chunking.num_microbatches, taken["forward_s"], taken["backward_s"], chunking.p2p_s
    )
    done = [max(_reduced(chunking, path, taken), key=lambda each: each[0]) for path in paths]
    after = [max(_gathered(chunking, stage, taken), key=lambda each: each[0]) for stage in range(pp)]
    return sorted(done, key=lambda each: -each[0]), sorted(after, key=lambda each: -each[0])


def _leaning(chunking: Chunking, taken: dict[str, Floats]) -> Iterator[Below]:
    """The longest path if one stage were slower than it is, for every stage: what would be wrong with giving it more."""
    for stage in range(chunking.pp):
        forward, backward = taken["forward_s"].copy(), taken["backward_s"].copy()
        forward[stage :: chunking.pp] *= LEANING
        backward[stage :: chunking.pp] *= LEANING
        path = longest_paths(
            chunking.schedule, chunking.pp, chunking.vpp, chunking.num_microbatches, forward, backward, chunking.p2p_s, stages=(0,)
        )[0]
        yield Below({"forward_s": path.forwards, "backward_s": path.backwards}, path.edges)


def _reduced(chunking: Chunking, path: Path, taken: dict[str, Floats]) -> Iterator[tuple[float, Below]]:
    """A stage's end with its gradients, by the chunk whose exchange is the first not to be hidden (none of them first)."""
    own = _only(chunking, np.arange(chunking.chunks) % chunking.pp == path.stage)
    passes: Weights = {"forward_s": path.forwards, "backward_s": path.backwards, "reduced_s": own}
    yield _told(Below(passes, path.edges), taken, chunking.p2p_s)
    for waiting, hiding in _windows(chunking, path.stage):
        late: Weights = {**passes, "gradients_s": waiting, "backward_s": path.backwards - chunking.free[1] * hiding}
        yield _told(Below(late, path.edges), taken, chunking.p2p_s)


def _gathered(chunking: Chunking, stage: int, taken: dict[str, Floats]) -> Iterator[tuple[float, Below]]:
    """What follows on a stage, by the chunk whose weights are the last to be late (none of them first)."""
    chunk = np.arange(chunking.chunks)
    stepped: Weights = {"stepped_s": _only(chunking, chunk % chunking.pp == stage)}
    yield _told(Below(stepped, after=True), taken, chunking.p2p_s)
    for waiting, hiding in _windows(chunking, stage):
        hidden = np.asarray(chunking.free[0] * (hiding + _only(chunking, chunk < stage)), dtype=np.float64)
        late: Weights = {**stepped, "parameters_s": waiting, "forward_s": -hidden}
        yield _told(Below(late, after=True), taken, chunking.p2p_s)


def _windows(chunking: Chunking, stage: int) -> Iterator[tuple[Ints, Ints]]:
    """For every chunk of a stage: the chunks whose traffic waits in line with it, and passes of each that hide it."""
    row, here = np.divmod(np.arange(chunking.chunks), chunking.pp)
    for last in range(chunking.vpp):
        own = here == stage
        hiding = chunking.pp * _only(chunking, own & (row < last)) + _only(chunking, own & (row == last))
        yield _only(chunking, own & (row <= last)), hiding


def _only(chunking: Chunking, which: Bools) -> Ints:
    return np.asarray(which, dtype=np.int64).reshape(chunking.chunks)


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
        work = counts @ of.blocks.forward_s.reshape(len(counts), -1).max(axis=1) + counts @ of.blocks.backward_s.max(axis=1)
        states = sum(float(counts @ getattr(of.blocks, name) + getattr(of.ends, name).sum()) for name in SECONDS[2:])
        return float(of.num_microbatches * (work + of.ends.forward_s.sum() + of.ends.backward_s.sum())) + states

    def _limit_memory(self) -> None:
        of, model = self._of, self._model
        for stage in range(of.pp):
            held = float(of.in_flight[stage])
            fixed = float(of.fixed_bytes[stage])
            for end, here in ((0, stage == 0), (1, stage == of.pp - 1)):
                fixed += here * (of.ends.state_bytes[end] + of.ends.saved_bytes[end, 0] * held)
            each = np.ceil((of.blocks.state_bytes[:, None] + of.blocks.saved_bytes * held) / BYTES).astype(np.int64)
            terms = [
                int(each[k, r]) * variable
                for k, by_choice in enumerate(self._counts)
                for r, by_chunk in enumerate(by_choice)
                for variable in by_chunk[stage :: of.pp]
            ]
            model.add(sum(terms) <= int(np.floor((of.limit_bytes - fixed) / BYTES)))

    def _alone(self, stage: int) -> Below:
        """Through the stages before, all of the stage's own passes, and back."""
        of = self._of
        passes = np.zeros(of.chunks, dtype=np.int64)
        passes[:stage] = 1
        passes[stage :: of.pp] = of.num_microbatches
        return Below({"forward_s": passes, "backward_s": np.where(np.arange(of.chunks) < stage, 0, passes)}, stage)

    def _linear(self, below: Below) -> tuple[float, Floats]:
        """A bound as a constant and seconds per block (kinds, choices, chunks)."""
        of = self._of
        fixed, coefficients = below.edges * of.p2p_s, np.zeros((*of.blocks.backward_s.shape, of.chunks))
        for name, weight in below.weights.items():
            each, ends = getattr(of.blocks, name), getattr(of.ends, name)
            coefficients += (each if each.ndim == 2 else each[:, None])[:, :, None] * weight
            fixed += float((ends[:, 0] if ends.ndim == 2 else ends) @ weight[[0, -1]])
        return fixed, coefficients

    def _hint(self, best: _Best) -> None:
        self._model.clear_hints()  # type: ignore[no-untyped-call]
        if best.counts is None:
            return
        for (k, r, c), value in np.ndenumerate(best.counts):
            self._model.add_hint(self._counts[k][r][c], int(value))

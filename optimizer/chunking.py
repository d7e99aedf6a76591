"""A pipeline whose chunks are to be cut: what its blocks cost, how long a partition's step takes, and on which paths.

What a step takes is the longest path through its passes, then what stages do for their states: each linear in what chunks hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cost_models.schedules import INTERLEAVED, PAIRED, WHOLE, stage_chunks, stage_share
from ..cost_models.timeline import Floats, Ints
from ..search_spaces.cutting import Cutting
from .critical_paths import Path, Pipeline, Weights, longest_paths

PASSES = ("forward_s", "backward_s", "weight_s", "sent_s", "returned_s", "early_s")
STATES = ("reduced_s", "gradients_s", "stepped_s", "parameters_s")
"""What chunks take: per pass, and per step for their states."""


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

    def linear(self, weights: Weights, fixed: float = 0.0) -> tuple[float, Floats]:
        """What is weighed of all chunks as a constant, with what the ends add, and per block, (kinds, choices, chunks)."""
        each_block = np.zeros((*self.blocks.backward_s.shape, self.chunks))
        for name, weight in weights.items():
            each, ends = self.blocks.of(name), self.ends.of(name)
            if each is not None and ends is not None:
                each_block += each[:, :, None] * weight
                fixed += float(ends[:, 0] @ weight[[0, -1]])
        return fixed, each_block


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
    done, after = timed(chunking, counts)
    return done[0][0] + after[0][0]


def timed(chunking: Chunking, counts: Ints) -> tuple[list[tuple[float, Below]], list[tuple[float, Below]]]:
    """When each stage's gradients are exchanged and how long each then takes, the latest and the longest first.

    A chunk's gradients hide behind its own last backward pass and the pp passes of each chunk that follow, its weights behind the
    forward passes before it likewise; what waits in line for the same links is late together.
    """
    taken, pp = chunk_seconds(chunking, counts), chunking.pp
    paths = longest_paths(chunking.pipeline, taken, chunking.p2p_s)
    done = [max(_reduced(chunking, path, taken), key=lambda each: each[0]) for path in paths]
    after = [max(_gathered(chunking, stage, taken), key=lambda each: each[0]) for stage in range(pp)]
    return sorted(done, key=lambda each: -each[0]), sorted(after, key=lambda each: -each[0])


def at_least(chunking: Chunking, taken: dict[str, Floats]) -> Iterator[Below]:
    """What every partition takes at least, known before any is replayed: paths that turn at one stage (`turning`), by the chunk
    whose gradients are the first not to be hidden, and what follows on it, by the chunk whose weights are the last to be late.

    `taken` (chunks,) is of any partition.
    """
    for stage in range(chunking.pp):
        yield from asked_by(chunking, stage, taken)


def asked_by(chunking: Chunking, stage: int, taken: dict[str, Floats]) -> Iterator[Below]:
    """The same of one stage."""
    for path, way_back in turning(chunking, stage):
        yield way_back
        yield from (below for _, below in _reduced(chunking, path, taken))
    yield from (below for _, below in _gathered(chunking, stage, taken))


def held_by(chunking: Chunking, stage: int) -> Iterator[Weights]:
    """How often a stage holds what each chunk keeps, (chunks,) by name, at every moment when it may be at its fullest."""
    own = chunking.place[:, stage]
    for held in chunking.held_at[stage]:
        counted = np.concatenate([held, np.zeros(2 * len(own) - len(held))]).reshape(2, -1)
        saved, kept = (np.bincount(own, weights=each, minlength=chunking.chunks) for each in counted)
        yield {"state_bytes": chunking.own(stage), "saved_bytes": saved, "kept_bytes": kept}


def turning(chunking: Chunking, stage: int) -> Iterator[tuple[Path, Below]]:
    """Paths through all of a stage's own passes to the end of its last, and on to the step's end.

    Through the stages before; of interleaved chunks, also the first micro-batch forwards through all chunks up to the first
    backward, the last one backwards through all after the last forward, and both, as in `pipeline.admissible_s`. Of replayed
    schedules its own passes alone, whose pairs hide what they can.
    """
    of, pipeline = chunking, chunking.pipeline
    pp, vpp, m, chunk = of.pp, of.vpp, pipeline.num_microbatches, np.arange(of.chunks)
    own = of.shared(m * of.own(stage))
    if pipeline.schedule not in WHOLE or not of.apart:
        weights: Weights = {"forward_s": own, "backward_s": own}
        hides = (1.0 - pipeline.slowed) * own
        hidden: Weights = {"sent_s": -hides, "returned_s": -hides} if pipeline.schedule in PAIRED else {}
        yield Path(stage, weights | hidden, 0), Below(weights | hidden)
        return
    before, none = (chunk < stage).astype(np.float64), np.zeros(of.chunks)
    forms: list[tuple[Floats, Floats, int]] = [(before, none, stage)]
    if pipeline.schedule == INTERLEAVED:
        after = (chunk > of.chunks - pp + stage).astype(np.float64)
        begun, ended = 1.0 - of.own(stage) * np.repeat(pipeline.ends_passes(stage), pp, axis=1)
        across = of.chunks - 1 + pp - 1
        forms += [(begun, after, across - stage), (after + before, ended - before, across - stage)]
        if m * vpp > pipeline.warm_up(stage):
            forms.append((begun + after, ended + after - before, 2 * (across - stage) - stage))
    for forward, backward, edges in forms:
        path = Path(stage, {"forward_s": own + forward, "backward_s": own + backward}, edges)
        yield path, Below({"forward_s": own + forward, "backward_s": own + backward + before}, edges + stage)


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

"""The partition of chunks: cutting planes against listing, paths against replays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.cost_models.schedules import PAIRED, SPLIT, WHOLE, usual_schedule
from paraplan.cost_models.timeline import Floats, Ints, Work, replayed
from paraplan.optimizer import two_chunks
from paraplan.optimizer.chunk_master import Master
from paraplan.optimizer.chunking import Blocks, Chunking, asked_by, at_least, chunk_seconds, stage_bytes, step_seconds, timed
from paraplan.optimizer.chunks import best_chunks, walked
from paraplan.optimizer.critical_paths import Path, Pipeline, Taken, first_stage_paths, longest_paths
from paraplan.optimizer.two_chunks import PRECISE, least_of_two
from paraplan.search_spaces.cutting import Cutting

GB = 1e9


def random_chunking(
    rng: np.random.Generator,
    choices: int,
    bare: tuple[bool, bool] = (False, False),
    schedules: Sequence[str] = ("1f1b", "interleaved", "gpipe"),
    most_stages: int = 3,
) -> Chunking:
    """A pipeline of a few blocks of up to two kinds, whose stages cannot hold everything."""
    schedule = str(rng.choice(schedules))
    pp, vpp = int(rng.integers(2, most_stages + 1)), 2 if schedule == "interleaved" else 1
    m = int(rng.integers(1, 4)) * pp if vpp > 1 else int(rng.integers(1, 8))
    blocks, kinds = int(rng.integers(pp * vpp, pp * vpp + (5 if choices == 1 else 3))), int(rng.integers(1, 3))
    costs = Blocks(
        forward_s=rng.uniform(1, 2, kinds),
        backward_s=rng.uniform(2, 4, (kinds, 1)) * np.linspace(1.0, 1.4, choices),
        saved_bytes=rng.uniform(1, 2, (kinds, 1)) * np.linspace(1.0, 0.2, choices) * GB,
        state_bytes=rng.uniform(1, 2, kinds) * GB,
        reduced_s=rng.uniform(0, 0.3, kinds),
        gradients_s=rng.uniform(0, 6, kinds),
        stepped_s=rng.uniform(0, 0.3, kinds),
        parameters_s=rng.uniform(0, 3, kinds),
    )
    zeros = np.zeros(2)
    ends = Blocks(np.array([0.1, 0.8]), np.array([[0.1], [1.6]]), np.zeros((2, 1)), np.full(2, GB), *[zeros] * 4)
    order = tuple(rng.integers(0, kinds, blocks).tolist())
    held, limit = tuple(np.full((1, vpp), pp - stage) for stage in range(pp)), (blocks / pp * 3.0 + 2 * pp) * GB
    p2p_s = float(rng.choice([0.0, 0.2]))
    cutting = Cutting(pp, vpp, blocks, blocks, bare=bare)
    return Chunking(Pipeline(schedule, pp, vpp, m), cutting, p2p_s, order, costs, ends, held, np.full(pp, GB), limit)


def partitions(chunking: Chunking) -> Iterator[Ints]:
    """Every way to cut the blocks and to choose what is redone."""
    blocks = len(chunking.order)
    kinds, choices = chunking.blocks.backward_s.shape
    for inner in itertools.combinations_with_replacement(range(blocks + 1), chunking.chunks - 1):
        cuts = (0, *inner, blocks)
        least = [not chunking.cutting.bare[0], *[1] * (chunking.chunks - 2), not chunking.cutting.bare[1]]
        if (np.diff(cuts) < least).any():
            continue
        held = chunking.held(cuts)
        if chunking.leading:
            yield from (depths_of(chunking, cuts, depths) for depths in itertools.product(*map(range, np.diff(cuts) + 1)))
            continue
        for redone in itertools.product(*(range(int(n) + 1) if choices == 2 else (0,) for n in held.ravel())):
            counts = np.zeros((kinds, choices, chunking.chunks), dtype=np.int64)
            counts[:, -1] = np.reshape(redone, held.shape) if choices == 2 else held
            counts[:, 0] = held - counts[:, 1] if choices == 2 else held
            yield counts


def depths_of(chunking: Chunking, cuts: tuple[int, ...], depths: tuple[int, ...]) -> Ints:
    """The partition of which every chunk redoes so many of its first blocks."""
    begin, held = np.array(cuts[:-1]), chunking.held(cuts)
    redone = chunking.running[:, begin + depths] - chunking.running[:, begin]
    return np.stack([held - redone, redone], axis=1)


def listed_s(chunking: Chunking) -> float:
    """The shortest step of all partitions that fit."""
    fitting = (c for c in partitions(chunking) if (stage_bytes(chunking, c) <= chunking.limit_bytes).all())
    return min((step_seconds(chunking, counts) for counts in fitting), default=np.inf)


@pytest.mark.parametrize("seed", range(24))
def test_cutting_planes_find_what_listing_finds(seed: int) -> None:
    chunking = random_chunking(np.random.default_rng(seed), choices=1 + seed % 2, bare=(seed % 3 == 0, seed % 4 == 0))
    listed, found = listed_s(chunking), best_chunks(chunking, seconds=5.0)
    if found is None:
        assert listed == np.inf
        return
    assert found.optimal
    assert found.step_s == pytest.approx(listed, rel=1e-5)
    assert found.step_s == pytest.approx(step_seconds(chunking, found.counts), rel=1e-12)
    assert (np.diff(found.cuts) == found.counts.sum(axis=(0, 1))).all()


@pytest.mark.parametrize("seed", range(1, 25, 2))
def test_cutting_planes_find_every_chunk_s_own_depth(seed: int) -> None:
    chunking = replace(random_chunking(np.random.default_rng(seed), choices=2), leading=True)
    listed, found = listed_s(chunking), best_chunks(chunking, seconds=5.0)
    if found is None:
        assert listed == np.inf
        return
    assert found.optimal and found.step_s == pytest.approx(listed, rel=1e-5)
    depths = tuple(found.counts[:, 1].sum(axis=0).tolist())
    assert (found.counts == depths_of(chunking, found.cuts, depths)).all()


def test_a_depth_redoes_the_first_blocks_of_every_chunk() -> None:
    chunking = replace(random_chunking(np.random.default_rng(5), choices=2), depth=1, limit_bytes=1e15)
    found = best_chunks(chunking)
    assert found is not None
    for first, end, redone in zip(found.cuts, found.cuts[1:], found.counts[:, 1].T, strict=False):
        expected = np.bincount(np.array(chunking.order[first : min(first + 1, end)], dtype=np.int64), minlength=len(redone))
        assert (redone == expected).all()


def test_nothing_is_found_below_what_no_partition_beats() -> None:
    chunking = random_chunking(np.random.default_rng(2), choices=1)
    best = best_chunks(replace(chunking, limit_bytes=1e15))
    assert best is not None
    assert best_chunks(replace(chunking, limit_bytes=1e15), below_s=0.99 * best.step_s) is None


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_takes_less_than_what_is_told_of_all(seed: int) -> None:
    """Closed-form paths, gradients and weights that are late, and the linear relaxation, against every partition that is listed."""
    rng = np.random.default_rng(seed)
    chunking = random_chunking(rng, choices=1, bare=(seed % 3 == 0, False))
    pp, pipeline = chunking.pp, chunking.pipeline
    if pipeline.schedule == "interleaved" and seed % 2:  # groups of more than pp, or a last one that is not full
        group = int(rng.integers(pp, 2 * pp + 1))
        m = int(rng.integers(1, 4)) * group + (pp if group > pp else 0)
        pipeline = replace(pipeline, num_microbatches=m, group=group)
    chunking = replace(chunking, pipeline=pipeline, limit_bytes=1e15)
    every = list(partitions(chunking))
    told = list(at_least(chunking, chunk_seconds(chunking, every[0])))
    steps = []
    for counts in every[:: 1 + len(every) // 60]:
        taken, (done, after) = chunk_seconds(chunking, counts), timed(chunking, counts)
        steps.append(done[0][0] + after[0][0])
        for below in told:
            assert below.seconds(taken, chunking.p2p_s) <= (after if below.after else done)[0][0] * (1 + 1e-9)
    master = Master(chunking)
    master.learn(told)
    assert 0.3 * min(steps) < master.relaxed_s() <= listed_s(chunking)


@pytest.mark.parametrize("seed", range(24))
def test_stages_of_two_chunks_are_bounded_as_tightly_as_their_own_paths_and_never_above_the_best(seed: int) -> None:
    """Between the least of what the stage asks that asks most, and the best step, of all partitions that are listed and fit; what
    other stages redo is not known where each chunk redoes its first block.
    """
    rng, bare = np.random.default_rng(seed), (seed % 3 == 0, seed % 4 == 0)
    chunking = random_chunking(rng, 1 + seed % 2, bare, schedules=("interleaved",), most_stages=3 + seed % 2)
    chunking = replace(chunking, depth=1 if seed % 2 else None, limit_bytes=chunking.limit_bytes * (1.0 + seed % 5))
    every = [cut for cut in cuttings(chunking) if (stage_bytes(chunking, cut) <= chunking.limit_bytes).all()]
    if not every:
        return
    steps = [step_seconds(chunking, counts) for counts in every]
    asked = [asked_s(chunking, counts) for counts in every]
    any_of_them = int(rng.integers(len(every)))
    bound_s = least_of_two(chunking, every[any_of_them], 0.1 * min(steps), steps[any_of_them])
    assert bound_s <= min(steps)
    assert bound_s >= (1.0 - 2 * PRECISE) * min(asked) or chunking.depth


def test_paths_between_stages_side_by_side_bound_chunks_that_only_each_stage_would_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """36 layers on eight stages: one that has much in its first chunk waits for one that has much in its second."""
    one, none = np.ones(1), np.zeros(1)
    layer = Blocks(one, 2.0 * one[:, None], none[:, None], none, none, none, none, none)
    ends = Blocks(np.array([0.1, 0.5]), np.array([[0.1], [0.8]]), np.zeros((2, 1)), *[np.zeros(2)] * 5)
    cutting, held = Cutting(8, 2, 36, 36), (np.ones((1, 2)),) * 8
    chunking = Chunking(Pipeline("interleaved", 8, 2, 32), cutting, 0.01, (0,) * 36, layer, ends, held, np.zeros(8), 1.0)
    counts = chunking.held((0, 1, *range(3, 17, 2), 18, 21, 24, 27, 30, 32, 34, 36))[:, None]
    step_s = step_seconds(chunking, counts)
    bound_s = least_of_two(chunking, counts, 0.5 * step_s, step_s)
    monkeypatch.setattr(two_chunks, "MOST_STATES", 0)
    assert 0.94 * step_s < least_of_two(chunking, counts, 0.5 * step_s, step_s) < 0.99 * bound_s < 0.99 * step_s


def cuttings(chunking: Chunking) -> Iterator[Ints]:
    """Every legal way to cut the blocks, the first `depth` of each chunk under the second choice."""
    blocks, cutting = len(chunking.order), chunking.cutting
    for inner in itertools.combinations_with_replacement(range(blocks + 1), chunking.chunks - 1):
        cuts = (0, *inner, blocks)
        if cutting.legal(np.array([cuts]))[0]:
            held = np.diff(cuts)
            yield chunking.held(cuts)[:, None] if chunking.depth is None else depths_of(chunking, cuts, tuple(np.minimum(held, 1)))


def asked_s(chunking: Chunking, counts: Ints) -> float:
    """What the stage asks for that asks most."""
    taken, most = chunk_seconds(chunking, counts), 0.0
    for stage in range(chunking.pp):
        parts = [(below.after, below.seconds(taken, chunking.p2p_s)) for below in asked_by(chunking, stage, taken)]
        most = max(most, sum(max(s for after, s in parts if after is part) for part in (False, True)))
    return most


def random_taken(rng: np.random.Generator, chunks: int, messages: float) -> dict[str, Floats]:
    """What passes take, a share of them weight gradients, messages and recompute that waits for nothing."""
    forward, backward = rng.uniform(0.6, 1.4, chunks), rng.uniform(1.2, 2.4, chunks)
    shares = rng.uniform(0.0, messages, (2, chunks))
    early, weight = rng.uniform(0.0, 0.3, chunks) * backward, rng.uniform(0.2, 0.6, chunks) * backward
    sent = {"sent_s": shares[0] * forward, "returned_s": shares[1] * backward}
    return {"forward_s": forward, "backward_s": backward, "weight_s": weight, "early_s": early, **sent}


def work_of(taken: dict[str, Floats], slowed: float = 0.0) -> Work:
    exchange = taken["sent_s"], taken["returned_s"]
    return Work(taken["forward_s"], taken["backward_s"], taken["weight_s"], exchange, taken["early_s"], slowed)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from([*WHOLE, *SPLIT]),
    pp=st.integers(2, 6),
    vpp=st.integers(2, 3),
    m=st.integers(4, 24),
    group=st.integers(0, 12),
    seed=st.integers(0, 10**6),
    p2p_s=st.sampled_from([0.0, 0.1]),
    splits=st.booleans(),
    slowed=st.sampled_from([0.0, 0.15]),
)
def test_the_longest_paths_are_the_replay_and_bound_every_other_partition(
    name: str, pp: int, vpp: int, m: int, group: int, seed: int, p2p_s: float, splits: bool, slowed: float
) -> None:
    vpp = {"interleaved": vpp, "zb-v": 2, "dualpipev": 2}.get(name, 1)
    pp, m = (pp + pp % 2, m + m % 2) if name == "dualpipe" else (pp, m)
    m = max(2 * pp, m) if name in PAIRED else max(1, m // pp) * pp
    rng, pipeline = np.random.default_rng(seed), Pipeline(name, pp, vpp, m, splits, group, slowed)
    order = usual_schedule(name, pp, vpp, m, splits, group)
    taken, other = (random_taken(rng, pp * vpp, most) for most in (float(rng.choice([0.3, 1.0])), 1.0))
    paths = longest_paths(pipeline, taken, p2p_s)
    ends, others = (replayed(order, work_of(each, slowed), p2p_s).stage_end_s for each in (taken, other))
    for path in paths:
        assert path.seconds(taken, p2p_s) == pytest.approx(ends[path.stage], rel=1e-12)
        assert path.seconds(other, p2p_s) <= others[path.stage] * (1 + 1e-12)

    def told(path: Path, each: Taken) -> tuple[float, int, dict[str, list[float]]]:
        return path.seconds(each, p2p_s), path.edges, {name: weight.tolist() for name, weight in path.weights.items()}

    alone = [longest_paths(pipeline, each, p2p_s, stages=(0,))[0] for each in (taken, other)]
    together = first_stage_paths(pipeline, [taken, other], p2p_s)
    assert list(map(told, together, (taken, other))) == list(map(told, alone, (taken, other)))


LONG = (("1f1b", 3, 1, 100), ("interleaved", 3, 2, 120), ("zb-h1", 3, 1, 100), ("zb-v", 3, 2, 100), ("dualpipe", 4, 1, 130))


@pytest.mark.parametrize(("name", "pp", "vpp", "m"), [*LONG, ("dualpipev", 3, 2, 101)])
def test_more_micro_batches_lengthen_a_path_that_exists(name: str, pp: int, vpp: int, m: int) -> None:
    rng, pipeline, order = np.random.default_rng(3), Pipeline(name, pp, vpp, m), usual_schedule(name, pp, vpp, m, True)
    taken, other = random_taken(rng, pp * vpp, 0.3), random_taken(rng, pp * vpp, 0.3)
    path = longest_paths(pipeline, taken, 0.1)[0]
    step_s, other_s = (replayed(order, work_of(each), 0.1).stage_end_s[0] for each in (taken, other))
    assert pipeline.spare and 0.985 * step_s <= path.seconds(taken, 0.1) <= step_s * (1 + 1e-12)
    assert path.seconds(other, 0.1) <= other_s * (1 + 1e-12)


def test_a_walk_only_goes_downhill_and_stays_legal() -> None:
    chunking = replace(random_chunking(np.random.default_rng(11), choices=1), limit_bytes=1e15)
    blocks, chunks = len(chunking.order), chunking.chunks

    def price(cuts: Ints) -> np.ndarray:
        return np.array([step_seconds(chunking, chunking.held(each)[:, None, :]) for each in cuts.tolist()])

    start = (*range(chunks), blocks)
    found = walked(chunking.cutting, start, float(price(np.array([start]))[0]), price, lambda cuts, _: 0.9 * price(cuts))
    way, steps = [cuts for cuts, _ in found], price(np.array([cuts for cuts, _ in found]))
    assert way[0] == start
    np.testing.assert_array_equal([step_s for _, step_s in found], steps)
    assert (np.diff(steps) < 0).all()
    assert all((np.diff(cuts) >= chunking.cutting.least).all() and cuts[0] == 0 and cuts[-1] == blocks for cuts in way)
    best = best_chunks(chunking)
    assert best is not None
    assert best.step_s <= steps[-1] * (1 + 1e-9)

    def to(goal_s: float) -> list[tuple[tuple[int, ...], float]]:
        return walked(chunking.cutting, start, found[0][1], price, lambda cuts, _: 0.9 * price(cuts), goal_s=goal_s)

    assert to(steps[-1]) == found
    assert to(steps[0] / 100) == found[:2]

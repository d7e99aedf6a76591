"""Prices and bounds of pipeline schedules, held to the event simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.cost_models.pipeline import admissible_s, bound_s, price, recurrence_s, stage_ends_s, stage_paths_s
from paraplan.cost_models.timeline import simulate

SHAPES = [("1f1b", pp, 1) for pp in (2, 3, 4, 8, 16)]
SHAPES += [("interleaved", pp, vpp) for pp in (2, 4, 8) for vpp in (2, 4)] + [("gpipe", 4, 1)]


def micro_batches(name, pp, groups=(1, 2, 3, 12, 13, 14, 20)):
    if name == "interleaved":
        return [pp * group for group in groups]
    return sorted({1, 2, max(1, pp - 1), pp, pp + 1, 2 * pp, 3 * pp + 1, 4 * pp - 1, 4 * pp, 5 * pp + 1, 8 * pp})


def loads(rng, rows, chunks, vpp=1):
    """Chunks unequal by up to ±40 %, half of the rows with f/b that differs from chunk to chunk; p2p up to 10 % of a stage."""
    whole = rng.uniform(0.6, 1.4, (rows, chunks))
    whole = np.where(rng.random((rows, 1)) < 0.3, rng.uniform(0.97, 1.03, (rows, chunks)), whole)
    share = np.where(rng.random((rows, 1)) < 0.5, rng.uniform(0.2, 0.6, (rows, chunks)), 1 / 3)
    return whole * share, whole * (1 - share), np.where(rng.random(rows) < 0.3, 0.0, rng.uniform(0, 0.1 * vpp, rows))


def simulated_ends(name, pp, vpp, m, forward, backward, p2p):
    """End of every stage's last pass, a backward, in the event simulation, (n, pp)."""
    ends = np.zeros((len(forward), pp))
    for row, (f, b, c) in enumerate(zip(forward, backward, p2p, strict=True)):
        timeline = simulate(name, pp, vpp, m, f, b, c)
        np.maximum.at(ends[row], timeline.stage, timeline.end_s)
    return ends


def simulated(name, pp, vpp, m, forward, backward, p2p):
    return simulated_ends(name, pp, vpp, m, forward, backward, p2p)[:, 0]


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_ends_of_all_stages_agree_with_the_simulation_and_bounds_stay_below(name, pp, vpp):
    rng = np.random.default_rng(pp * 10 + vpp)
    for m in micro_batches(name, pp):
        forward, backward, p2p = loads(rng, 6, pp * vpp, vpp)
        ends = simulated_ends(name, pp, vpp, m, forward, backward, p2p)
        found = stage_ends_s(name, pp, vpp, forward, backward, p2p, m)
        np.testing.assert_allclose(found, ends, rtol=0.01)
        if name != "interleaved":
            assert (found <= ends * (1 + 1e-12)).all()
            np.testing.assert_allclose(found[p2p == 0], ends[p2p == 0], rtol=1e-12)
        below = stage_ends_s(name, pp, vpp, forward, backward, p2p, m, closed_form=True)
        assert (below <= ends * (1 + 1e-12)).all()
        np.testing.assert_array_equal(below.max(axis=1), admissible_s(name, pp, vpp, forward, backward, p2p, m))


def test_ends_of_1f1b_are_the_simulation_s_on_a_wide_grid():
    """A thousand cases; f/b alike or differing from stage to stage, m from 1 to 8·pp, p2p up to 10 % of the mean stage."""
    rng = np.random.default_rng(11)
    for case in range(1000):
        pp = int(rng.integers(1, 9))
        m = int(rng.integers(1, 2 * pp + 2)) if case % 2 else int(rng.integers(1, 8 * pp + 1))
        forward, backward, p2p = loads(rng, 1, pp)
        if case % 4 == 0:  # runs of equal stages
            place = np.minimum(np.arange(pp) * 3 // pp, pp - 1)
            forward, backward = forward[:, place], backward[:, place]
        ends = simulated_ends("1f1b", pp, 1, m, forward, backward, p2p)
        found = stage_ends_s("1f1b", pp, 1, forward, backward, p2p, m)
        assert (found <= ends * (1 + 1e-12)).all()
        assert (found >= ends * (0.99 if p2p[0] else 1 - 1e-12)).all()


@given(st.integers(1, 16), st.integers(1, 100), st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 0.5))
@settings(deadline=None, max_examples=60)
def test_equal_stages_are_exact_whatever_an_edge_takes(pp, m, forward, backward, p2p):
    f, b, c = np.full((1, pp), forward), np.full((1, pp), backward), np.array([p2p])
    np.testing.assert_allclose(stage_ends_s("1f1b", pp, 1, f, b, c, m), simulated_ends("1f1b", pp, 1, m, f, b, c), rtol=1e-12)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_price_and_bounds_of_any_1f1b(data):
    pp = data.draw(st.integers(1, 12))
    m = data.draw(st.integers(1, 8 * pp))
    time_s = st.lists(st.floats(0.2, 1.0), min_size=pp, max_size=pp)
    forward, backward = np.array([data.draw(time_s)]), np.array([data.draw(time_s)])
    p2p = np.array([data.draw(st.sampled_from([0.0, 0.01, 0.1]))])
    step = simulated("1f1b", pp, 1, m, forward, backward, p2p)[0]
    found = recurrence_s("1f1b", pp, 1, forward, backward, p2p, m)[0]
    assert step * 0.99 <= found <= step * (1 + 1e-12)
    assert admissible_s("1f1b", pp, 1, forward, backward, p2p, m)[0] <= step * (1 + 1e-12)
    work = (forward + backward)[0]
    block = work.max() * data.draw(st.floats(0, 1))
    assert bound_s("1f1b", pp, 1, work.sum(), block, p2p[0], m) <= step * (1 + 1e-12)


@given(st.integers(1, 16), st.integers(1, 80), st.integers(1, 4), st.floats(0.1, 5), st.floats(0.1, 5))
@settings(deadline=None, max_examples=60)
def test_equal_stages_without_p2p_are_exact(pp, m, vpp, forward, backward):
    interleaved = vpp > 1 and pp > 1
    name, vpp = ("interleaved", vpp) if interleaved else ("1f1b", 1)
    m = pp * (1 + m % 20) if interleaved else m
    f, b = np.full((1, pp * vpp), forward / vpp), np.full((1, pp * vpp), backward / vpp)
    textbook = (forward + backward) * (m + (pp - 1) / vpp)
    assert recurrence_s(name, pp, vpp, f, b, 0.0, m)[0] == pytest.approx(textbook, rel=1e-12)
    assert admissible_s(name, pp, vpp, f, b, 0.0, m)[0] == pytest.approx(textbook, rel=1e-12)
    if not interleaved and m > pp:
        assert bound_s(name, pp, 1, pp * (forward + backward), 0.0, 0.0, m) == pytest.approx(textbook, rel=1e-12)


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_no_partition_is_faster_than_the_bound(name, pp, vpp):
    rng = np.random.default_rng(7)
    for m in micro_batches(name, pp, groups=(1, 2, 4)):
        shares = rng.dirichlet(np.full(pp * vpp, 20.0), 6)
        ratio = rng.uniform(0.2, 0.6, shares.shape)
        p2p = rng.choice([0.0, 0.1 / pp], 6)
        block = shares.max(axis=1)
        step = simulated(name, pp, vpp, m, shares * ratio, shares * (1 - ratio), p2p)
        assert (bound_s(name, pp, vpp, np.ones(6), block, p2p, np.full(6, m)) <= step * (1 + 1e-12)).all()


def test_rows_of_different_micro_batches_are_priced_as_one_by_one():
    rng = np.random.default_rng(3)
    m = np.array([3, 40, 8, 17, 64, 8, 33])
    forward, backward, p2p = loads(rng, len(m), 4)
    together = recurrence_s("1f1b", 4, 1, forward, backward, p2p, m)
    alone = [recurrence_s("1f1b", 4, 1, forward[i : i + 1], backward[i : i + 1], p2p[i], m[i])[0] for i in range(len(m))]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    assert recurrence_s("1f1b", 4, 1, forward[:0], backward[:0], p2p[:0], m[:0]).shape == (0,)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum), st.integers(1, 40), st.integers(0, 9))
@settings(deadline=None)
def test_runs_are_their_stages(lengths, m, seed):
    """To rounding, and where neighbouring runs are equal too: a price does not hang on how stages are listed."""
    rng = np.random.default_rng(seed)
    pp, runs = sum(lengths), np.array(lengths)
    forward, backward, p2p = loads(rng, 5, len(lengths))
    forward[:, 1:2], backward[:, 1:2] = (
        each[:, :1] if seed % 3 == 0 and 0 not in lengths else each[:, 1:2] for each in (forward, backward)
    )
    f, b = np.repeat(forward, runs, axis=1), np.repeat(backward, runs, axis=1)
    there, first = runs > 0, np.cumsum(runs) - runs
    for name in ("1f1b", "gpipe"):
        for shared in (runs, np.tile(runs, (5, 1))):
            found = stage_ends_s(name, pp, 1, forward, backward, p2p, m, shared)
            np.testing.assert_allclose(found[:, there], stage_ends_s(name, pp, 1, f, b, p2p, m)[:, first[there]], rtol=1e-12)
            assert (found[:, ~there] == -np.inf).all()
            np.testing.assert_allclose(recurrence_s(name, pp, 1, forward, backward, p2p, m, shared), found.max(axis=1))


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_split_adds_up(name, pp, vpp):
    rng = np.random.default_rng(5)
    m = micro_batches(name, pp)[-1]
    forward, backward, p2p = loads(rng, 20, pp * vpp, vpp)
    found = price(name, pp, vpp, forward, backward, p2p, m)
    np.testing.assert_allclose(found.busy_s + found.p2p_s + found.bubble_s, found.total_s, rtol=1e-12)
    work = (forward + backward).reshape(20, vpp, pp).sum(axis=1)
    np.testing.assert_allclose(found.busy_s, m * work.max(axis=1))
    assert (work.argmax(axis=1) == found.critical_stage).all()
    assert (found.p2p_s[p2p == 0] == 0).all() and (found.p2p_s >= -1e-9).all()
    assert (found.bubble_s >= -1e-9 * found.total_s).all()


def test_split_of_runs_is_that_of_their_stages():
    rng = np.random.default_rng(6)
    runs = np.array([1, 4, 2])
    forward, backward, p2p = loads(rng, 9, 3)
    found = price("1f1b", 7, 1, forward, backward, p2p, 30, runs)
    alone = price("1f1b", 7, 1, np.repeat(forward, runs, axis=1), np.repeat(backward, runs, axis=1), p2p, 30)
    for name in ("total_s", "critical_stage", "busy_s", "p2p_s", "bubble_s"):
        np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=1e-9)


def test_a_stage_s_own_paths_lead_through_its_last_backward():
    """So that it ends that pass no earlier than the path's end less the backwards of the stages before it."""
    rng = np.random.default_rng(8)
    for pp in (2, 5, 8):
        for m in micro_batches("1f1b", pp):
            forward, backward, p2p = loads(rng, 4, pp)
            work, stage = forward + backward, np.arange(pp)
            prefix, total = np.cumsum(work, axis=1) - work, work.sum(axis=1, keepdims=True)
            path = stage_paths_s(prefix, forward, backward, total, stage, pp, m, p2p[:, None])
            before = np.cumsum(backward, axis=1) - backward + stage * p2p[:, None]
            assert (path - before <= stage_ends_s("1f1b", pp, 1, forward, backward, p2p, m) * (1 + 1e-12)).all()


def test_stage_paths_broadcast_and_grow_with_every_load():
    rng = np.random.default_rng(9)
    stage, pp, m = np.arange(6)[:, None], 6, np.array([1, 4, 6, 7, 30])
    prefix, f, b, rest = rng.uniform(0.1, 3, (4, 200, 1, 1))
    path = stage_paths_s(prefix, f, b, prefix + f + b + rest, stage, pp, m, 0.05)
    assert path.shape == (200, 6, 5)
    for grown in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        p, x, y, z = (value + 0.2 * more for value, more in zip((prefix, f, b, rest), grown, strict=True))
        assert (stage_paths_s(p, x, y, p + x + y + z, stage, pp, m, 0.05) >= path - 1e-12).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda one: recurrence_s("1f1b", 4, 1, one[:, :3], one[:, :3], 0.0, 8), "must both be"),
        (lambda one: recurrence_s("1f1b", 4, 1, one, one, 0.0, 8, np.array([1, 1, 1, 2])), "add up to pp"),
        (lambda one: recurrence_s("interleaved", 2, 2, one, one, 0.0, 7), "multiple of pp"),
        (lambda one: bound_s("dualpipe", 4, 1, 1.0, 0.0, 0.0, 8), "dualpipe"),
    ],
)
def test_wrong_shapes_say_why(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.ones((1, 4)))

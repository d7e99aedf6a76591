"""The order of passes and their replay, against hand-written orders and published formulas."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.cost_models.pipeline import in_flight
from paraplan.cost_models.timeline import BACKWARD, FORWARD, build_schedule, simulate


@st.composite
def shapes(draw, names=("gpipe", "1f1b", "interleaved")):
    name = draw(st.sampled_from(names))
    if name == "interleaved":
        pp, vpp = draw(st.integers(2, 6)), draw(st.integers(2, 4))
        return name, pp, vpp, pp * draw(st.integers(1, 4))
    return name, draw(st.integers(1, 8)), 1, draw(st.integers(1, 24))


def order(name, pp, vpp, m, stage):
    schedule = build_schedule(name, pp, vpp, m)
    rows = zip(schedule.kind[stage], schedule.chunk[stage], schedule.microbatch[stage], strict=True)
    return " ".join(f"{'FB'[kind]}{microbatch}" + (f"/{chunk // pp}" if vpp > 1 else "") for kind, chunk, microbatch in rows)


def test_orders_written_by_hand():
    assert order("gpipe", 2, 1, 3, 0) == "F0 F1 F2 B0 B1 B2"
    assert order("1f1b", 3, 1, 4, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order("1f1b", 3, 1, 4, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    # Megatron-Core, pp 2, vpp 2, 4 micro-batches: 4 warm-up forwards on the first stage, 2 on the last.
    first = order("interleaved", 2, 2, 4, 0)
    assert first == "F0/0 F1/0 F0/1 F1/1 F2/0 B0/1 F3/0 B1/1 F2/1 B0/0 F3/1 B1/0 B2/1 B3/1 B2/0 B3/0"
    assert order("interleaved", 2, 2, 4, 1).startswith("F0/0 F1/0 F0/1 B0/1 F1/1 B1/1 F2/0 B0/0")


@given(shapes())
def test_every_pass_runs_once_and_after_what_it_waits_for(shape):
    _, pp, vpp, m = shape
    rng = np.random.default_rng(pp * 100 + m)
    forward, backward = rng.uniform(0.5, 2, (2, pp * vpp))
    line = simulate(*shape, forward, backward, 0.1)
    start, end = {}, {}
    for kind, chunk, microbatch, a, b in zip(line.kind, line.chunk, line.microbatch, line.start_s, line.end_s, strict=True):
        assert (kind, chunk, microbatch) not in start
        start[kind, chunk, microbatch], end[kind, chunk, microbatch] = a, b
        assert b - a == pytest.approx((forward, backward)[kind][chunk])
    assert len(start) == 2 * pp * vpp * m and line.step_s == max(end.values())
    for kind, chunk, microbatch in start:
        if kind == FORWARD and chunk > 0:
            assert start[kind, chunk, microbatch] >= end[FORWARD, chunk - 1, microbatch] + 0.1 - 1e-9
        if kind == BACKWARD and chunk + 1 < pp * vpp:
            assert start[kind, chunk, microbatch] >= end[BACKWARD, chunk + 1, microbatch] + 0.1 - 1e-9
        if kind == BACKWARD:
            assert start[kind, chunk, microbatch] >= end[FORWARD, chunk, microbatch]
    for stage in range(pp):
        mine = np.flatnonzero(line.stage == stage)
        assert (line.start_s[mine][1:] >= line.end_s[mine][:-1] - 1e-9).all()
    np.testing.assert_allclose(line.busy_s, m * (forward + backward).reshape(vpp, pp).sum(axis=0))


@given(shapes())
def test_closed_form_of_in_flight_is_counted_off_the_order(shape):
    name, pp, vpp, m = shape
    schedule = build_schedule(*shape)
    assert [schedule.in_flight(stage) for stage in range(pp)] == in_flight(name, pp, vpp, m, np.arange(pp)).tolist()


def test_published_in_flight_figures():
    # Korthikanti et al. (arXiv 2205.05198): interleaving holds 1 + (pp−1)/(pp·vpp) times 1F1B's activations on the first stage.
    for pp, vpp in ((4, 2), (8, 3), (16, 4)):
        chunks = int(in_flight("interleaved", pp, vpp, 8 * pp, 0))
        assert chunks / vpp / int(in_flight("1f1b", pp, 1, 8 * pp, 0)) == pytest.approx(1 + (pp - 1) / (pp * vpp))
    assert int(in_flight("gpipe", 8, 1, 32, 0)) == 32


@given(shapes(), st.floats(0.2, 3), st.floats(0.2, 3))
def test_published_bubbles(shape, forward, backward):
    # arXiv 2104.04473, section 2.2: the bubble is (pp−1)/m of the work, (pp−1)/(vpp·m) when interleaved.
    _, pp, vpp, m = shape
    chunks = np.ones(pp * vpp) / vpp
    ideal = m * (forward + backward)
    step = simulate(*shape, forward * chunks, backward * chunks).step_s
    assert step / ideal - 1 == pytest.approx((pp - 1) / (vpp * m), rel=1e-9, abs=1e-12)


@given(st.integers(2, 12), st.data())
@settings(max_examples=50)
def test_few_micro_batches_leave_stages_idle(pp, data):
    m = data.draw(st.integers(1, pp - 1))
    line = simulate("1f1b", pp, 1, m, np.ones(pp), 2 * np.ones(pp), data.draw(st.floats(0, 0.3)))
    assert line.busy_s.mean() / line.step_s <= m / (m + pp - 1) + 1e-12


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (("1f1b", 4, 2, 8), "vpp"),
        (("interleaved", 4, 1, 8), "vpp"),
        (("interleaved", 4, 2, 6), "multiple of pp"),
        (("1f1b", 0, 1, 4), "at least 1"),
    ],
)
def test_impossible_schedules_say_why(shape, words):
    with pytest.raises(ValueError, match=words):
        build_schedule(*shape)


def test_a_large_schedule_is_replayed_within_a_second():
    begin = time.process_time()
    assert simulate("interleaved", 16, 4, 256, np.full(64, 0.25), np.full(64, 0.5)).step_s == pytest.approx(3 * (256 + 15 / 4))
    assert time.process_time() - begin < 1.0

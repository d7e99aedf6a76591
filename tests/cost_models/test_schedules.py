"""Orders of passes and their replay: hand-written orders, published bubbles and memories, and what must hold of any of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paraplan.cost_models.pipeline import recurrence_s
from paraplan.cost_models.replay import ends_s, least_s, reduced, stage_ends_s
from paraplan.cost_models.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    NONE,
    SPLIT,
    WEIGHT,
    Schedule,
    build_schedule,
    check_schedule,
    group_size,
    loss_stages,
    stage_chunks,
    usual_schedule,
)
from paraplan.cost_models.split_passes import slowed_in_pairs
from paraplan.cost_models.timeline import Work, replayed
from paraplan.search_spaces.inputs import build_problem

SLOWED = 20 / 132
"""Of the compute beside an exchange of tokens on an H800 (arXiv 2412.19437, section 3.5.1)."""


def order(schedule: Schedule, stage: int) -> str:
    """F forward, B backward, I input's and W weights' gradient, each with its micro-batch and, of several, /chunk; + for pairs."""
    several = len(stage_chunks(schedule.name, schedule.pp, schedule.vpp)) > 1
    text = ""
    columns = (each[stage] for each in (schedule.kind, schedule.chunk, schedule.microbatch, schedule.paired))
    for kind, chunk, i, paired in zip(*columns, strict=True):
        if kind != NONE:
            text += ("+" if paired else " ") + "FBIW"[kind] + str(i) + (f"/{chunk}" if several else "")
    return text.strip()


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", *SPLIT)) -> Schedule:
    name = draw(st.sampled_from(names))
    if name == "interleaved":
        pp, vpp = draw(st.integers(2, 6)), draw(st.integers(2, 4))
        group = draw(st.integers(pp, 2 * pp))
        m = group * draw(st.integers(1, 3)) + draw(st.sampled_from([0, *range(pp, group)]))
        return build_schedule(name, pp, vpp, m, group, draw(st.booleans()))
    if name in ("dualpipe", "dualpipev"):
        pp = 2 * draw(st.integers(1, 4)) if name == "dualpipe" else draw(st.integers(2, 6))
        return build_schedule(name, pp, 1 if name == "dualpipe" else 2, 2 * pp + 2 * draw(st.integers(0, 9)))
    least = 2 if name in SPLIT else 1
    paired = name == "1f1b" and draw(st.booleans())
    return build_schedule(
        name, draw(st.integers(least, 8)), 2 if name == "zb-v" else 1, draw(st.integers(1, 24)), overlapped=paired
    )


def some_work(schedule: Schedule, rows: int = 1) -> tuple[Work, np.ndarray]:
    """Unequal chunks, weight gradients of 20–60 % of a backward, messages of up to a half of a pass; and edges."""
    rng = np.random.default_rng(schedule.chunks * 100 + schedule.num_microbatches)
    forward, backward = rng.uniform(0.5, 1.5, (2, schedule.chunks, rows))
    exchange = forward * rng.uniform(0, 0.5, forward.shape), backward * rng.uniform(0, 0.5, forward.shape)
    weight = backward * rng.uniform(0.2, 0.6, forward.shape)
    return Work(forward, backward, weight, exchange, slowed=SLOWED), rng.uniform(0, 0.2, rows)


def equal_work(schedule: Schedule, forward: float, backward: float, weight: float, pair: float | None = None) -> Work:
    """Equal chunks; a pair of passes takes `pair` seconds."""
    one = np.ones(schedule.chunks)
    beside = None if pair is None else ((forward + backward - pair) / 2 * one,) * 2
    return Work(forward * one, backward * one, weight * one, beside)


@given(schedules())
@settings(deadline=None, max_examples=80)
def test_nobody_waits_in_a_ring_and_every_pass_is_run_once_and_in_turn(schedule: Schedule) -> None:
    runs = list(schedule.passes())
    assert len(runs) == len(set(runs)) == (schedule.kind != NONE).sum()
    work, edges = some_work(schedule)
    line = replayed(schedule, work.row(0), float(edges[0]))
    begun, ended = {}, {}
    for stage, kind, chunk, i, start, end in zip(
        line.stage, line.kind, line.chunk, line.microbatch, line.start_s, line.end_s, strict=True
    ):
        assert (kind, chunk, i) not in begun and stage in np.nonzero(
            stage_chunks(schedule.name, schedule.pp, schedule.vpp) == chunk
        )[1]
        begun[kind, chunk, i], ended[kind, chunk, i] = (start, stage), (end, stage)
    last = schedule.chunks - 1
    for chunk in range(schedule.chunks):
        for i in range(schedule.num_microbatches):
            whole = (BACKWARD, chunk, i) in begun
            assert whole != ((INPUT, chunk, i) in begun) and whole != ((WEIGHT, chunk, i) in begun)
            back = BACKWARD if whole else INPUT
            if not whole:
                assert begun[WEIGHT, chunk, i][0] >= ended[INPUT, chunk, i][0] - 1e-9
            awaited = [((back, chunk, i), (FORWARD, chunk, i))]
            if chunk > 0:
                awaited.append(((FORWARD, chunk, i), (FORWARD, chunk - 1, i)))
            if chunk < last:
                later = BACKWARD if (BACKWARD, chunk + 1, i) in begun else INPUT
                awaited.append(((back, chunk, i), (later, chunk + 1, i)))
            for mine, other in awaited:
                edge = edges[0] if begun[mine][1] != ended[other][1] else 0.0
                assert begun[mine][0] >= ended[other][0] + edge - 1e-9
    assert (line.busy_s <= line.stage_end_s + 1e-9).all()


@given(schedules())
@settings(deadline=None, max_examples=60)
def test_what_stages_hold_is_counted_off_the_replay(schedule: Schedule) -> None:
    """Bytes held over the time of a replay, activations from the start of a forward to the end of a backward, and what is kept for
    weight gradients until these end, reach what the order says and no more.
    """
    work, edges = some_work(schedule)
    line = replayed(schedule, work.row(0), float(edges[0]))
    rng = np.random.default_rng(3)
    saved, kept = rng.uniform(1, 2, (2, schedule.chunks))
    for stage in range(schedule.pp):
        mine = line.stage == stage
        events = []
        for kind, chunk, start, end in zip(line.kind[mine], line.chunk[mine], line.start_s[mine], line.end_s[mine], strict=True):
            if kind == FORWARD:
                events.append((start, 1, saved[chunk]))
            else:
                events.append((end, 0, {BACKWARD: -saved[chunk], INPUT: kept[chunk] - saved[chunk], WEIGHT: -kept[chunk]}[kind]))
        peak = np.cumsum([change for *_, change in sorted(events)]).max()
        chunks = stage_chunks(schedule.name, schedule.pp, schedule.vpp)[:, stage]
        said = (schedule.held(stage) @ np.concatenate([saved[chunks], kept[chunks]])).max()
        assert said == pytest.approx(peak)


@given(schedules(), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_many_rows_replayed_at_once_are_the_simulation(schedule: Schedule, rows: int) -> None:
    work, edges = some_work(schedule, rows)
    found = ends_s(schedule, work, edges)
    for row in range(rows):
        np.testing.assert_array_equal(found[:, row], replayed(schedule, work.row(row), float(edges[row])).stage_end_s)


@given(schedules(), st.floats(0.1, 0.4))
@settings(deadline=None, max_examples=30)
def test_recompute_ahead_of_the_gradient_is_replayed_as_simulated(schedule: Schedule, share: float) -> None:
    work, edges = some_work(schedule, 2)
    ahead = replace(work, early_s=share * work.backward_s)
    found, waiting = ends_s(schedule, ahead, edges), ends_s(schedule, work, edges)
    for row in range(2):
        np.testing.assert_allclose(found[:, row], replayed(schedule, ahead.row(row), float(edges[row])).stage_end_s, rtol=1e-12)
    assert (found <= waiting * (1 + 1e-12)).all()


@pytest.mark.parametrize(("pp", "m", "group"), [(4, 10, 5), (4, 3, 3), (3, 8, 4), (8, 20, 10), (4, 12, None), (4, 8, None)])
def test_rounds_of_pytorch_where_micro_batches_are_no_multiple_of_stages(pp: int, m: int, group: int | None) -> None:
    assert group_size("interleaved", pp, m) == group and group_size("1f1b", pp, m) is None
    schedule = build_schedule("interleaved", pp, 2, m, group)
    line = replayed(schedule, equal_work(schedule, 1.0, 2.0, 0.0))
    assert line.busy_s.tolist() == pytest.approx([6.0 * m] * pp)


@given(schedules(SPLIT), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_no_cut_is_faster_than_the_bound(schedule: Schedule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    work, edges = some_work(schedule, 3)
    share = rng.dirichlet(np.full(schedule.chunks, 5.0), 3).T
    cut = Work(*(share * each.sum(axis=0) for each in (work.forward_s, work.backward_s, work.weight_s)))  # type: ignore[arg-type]
    whole = Work(*(each.sum(axis=0, keepdims=True) for each in (cut.forward_s, cut.backward_s, cut.weight_s)))  # type: ignore[union-attr]
    exchange = 0.3 * cut.forward_s, 0.2 * cut.backward_s
    cut = Work(cut.forward_s, cut.backward_s, cut.weight_s, exchange, slowed=SLOWED)
    whole_exchange = 0.3 * whole.forward_s, 0.2 * whole.backward_s
    whole = Work(whole.forward_s, whole.backward_s, whole.weight_s, whole_exchange, slowed=SLOWED)
    m = np.full(3, schedule.num_microbatches)
    bound = least_s(schedule.name, schedule.pp, m, whole, edges)
    assert (bound <= ends_s(schedule, cut, edges).max(axis=0) * (1 + 1e-12)).all()
    assert (bound > 0.25 * ends_s(schedule, cut, edges).max(axis=0)).any() or schedule.num_microbatches < schedule.pp


def test_the_price_of_whole_backwards_is_the_same_replay() -> None:
    rng = np.random.default_rng(5)
    for name, pp, vpp, m in (("1f1b", 5, 1, 9), ("interleaved", 4, 3, 16), ("gpipe", 3, 1, 7)):
        forward, backward = rng.uniform(0.5, 1.5, (2, pp * vpp, 4))
        edges = rng.uniform(0, 0.1, 4)
        found = ends_s(build_schedule(name, pp, vpp, m), Work(forward, backward), edges)[0]
        np.testing.assert_allclose(found, recurrence_s(name, pp, vpp, forward.T, backward.T, edges, m), rtol=1e-12)


@pytest.mark.parametrize(("name", "pp", "vpp"), [("zb-h1", 4, 1), ("zb-v", 3, 2), ("dualpipe", 4, 1), ("dualpipev", 3, 2)])
def test_many_micro_batches_are_told_from_fewer(name: str, pp: int, vpp: int) -> None:
    m = np.array([16 * pp, 16 * pp + 2, 24 * pp, 40 * pp + 2])
    work, edges = some_work(build_schedule(name, pp, vpp, 4 * pp), len(m))
    found = stage_ends_s(name, pp, vpp, work, edges, m).max(axis=0)
    for row, count in enumerate(m.tolist()):
        step = replayed(build_schedule(name, pp, vpp, count), work.row(row), float(edges[row])).step_s
        assert found[row] == pytest.approx(step, rel=1e-12 if count <= 16 * pp else 0.01)


@pytest.mark.parametrize(("pp", "vpp", "group"), [(2, 2, 3), (3, 3, 4), (4, 2, 6), (4, 2, 20), (2, 3, 11)])
def test_groups_that_are_asked_for_are_told_from_fewer_of_them(pp: int, vpp: int, group: int) -> None:
    m = np.array([group, 2 * group + pp, 12 * group, 40 * pp // group * group + group + pp])
    work, edges = some_work(build_schedule("interleaved", pp, vpp, m[0], group), len(m))
    found = stage_ends_s("interleaved", pp, vpp, work, edges, m, group=group).max(axis=0)
    for row, count in enumerate(m.tolist()):
        step = replayed(build_schedule("interleaved", pp, vpp, count, group), work.row(row), float(edges[row])).step_s
        whole = reduced("interleaved", pp, count, group)[0] == count
        assert found[row] == pytest.approx(step, rel=1e-12 if whole else 0.01)
    fewer, size = reduced("interleaved", pp, 999 * group + pp, group)
    assert (fewer % group, size) == (pp, group)


def test_groups_where_stages_do_not_divide_micro_batches_are_the_fewest_that_megatron_takes() -> None:
    """Megatron-Core's schedules.py: pp ≤ group ≤ m, and none or at least pp left over. Where the ⌊m/pp⌋ rounds that PyTorch's
    torch/distributed/pipelining/schedules.py makes are equal, they are these; with fewer micro-batches than stages it makes one.
    """
    for pp, m in product(range(2, 14), range(1, 120)):
        taken = [size for size in range(pp, m + 1) if m % size == 0 or m % size >= pp]
        rounds = max(1, m // pp)
        assert (group_size("interleaved", pp, m) or pp) == (taken[0] if taken else m)
        assert m % rounds or (group_size("interleaved", pp, m) or pp) == m // rounds


@pytest.mark.parametrize(("m", "asked", "group"), [(10, 5, 5), (8, 4, None), (8, 6, None), (9, 6, 5), (12, 0, None), (9, 0, 5)])
def test_groups_are_those_asked_for_where_micro_batches_go_into_them(m: int, asked: int, group: int | None) -> None:
    assert group_size("interleaved", 4, m, asked) == group


@pytest.mark.parametrize(
    ("kernels_s", "messages_s", "pair_s"),
    [
        (132.0, 132.0, 132 + 20.0),  # 112 of 132 seconds of kernels are done beside the messages, the others after them
        (132.0, 33.0, 132 + 5.0),
        (112.0, 132.0, 132.0),
        (50.0, 132.0, 132.0),  # hidden whole in the messages, however slow
    ],
)
def test_a_pair_computes_on_what_its_exchange_leaves(kernels_s: float, messages_s: float, pair_s: float) -> None:
    sent, kernels = np.array([messages_s / 2]), np.array([kernels_s / 2])
    assert Work(kernels + sent, kernels + sent, exchange_s=(sent, sent), slowed=SLOWED).of_pair(0, 0) == pytest.approx(pair_s)


@pytest.mark.parametrize(
    ("cluster", "slowed"),
    [("hgx-h800", SLOWED), ("cloudmatrix-384", 0.25 / 1.25), ("atlas-950-superpod", 0.0)],  # SMs, a slow-down, engines
)
def test_what_an_exchange_takes_from_kernels_beside_it(cluster: str, slowed: float) -> None:
    assert slowed_in_pairs(build_problem("deepseek-v3", cluster, 256, 1024, 4096)) == pytest.approx(slowed)


def test_orders_written_by_hand() -> None:
    zb = build_schedule("zb-h1", 3, 1, 4)
    assert order(zb, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert order(zb, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    # Two stages of a V: chunks 0 and 3, 1 and 2.
    v = build_schedule("zb-v", 2, 2, 4)
    assert order(v, 0).startswith("F0/0 F1/0 F2/0 F0/3 I0/3 W0/3 F1/3 I1/3 W1/3 F3/0 I0/0 W0/0 F2/3 I2/3 W2/3")
    assert order(v, 1).startswith("F0/1 F0/2 F1/1 F1/2 I0/2 W0/2 F2/1 I0/1 W0/1")
    # The smallest DualPipe: two stages, each with both ends; micro-batches 2 and 3 come from the other one.
    pipe = build_schedule("dualpipe", 2, 1, 4)
    assert order(pipe, 0) == "F0/0 F2/1 F1/0 B2/1 F3/1+B0/0 B3/1 I1/0 W1/0"
    assert order(pipe, 1) == "F2/0 F0/1 F3/0 B0/1 F1/1+B2/0 B1/1 I3/0 W3/0"
    assert order(build_schedule("dualpipev", 2, 2, 4), 1).startswith("F0/1 F0/2 F1/1 F1/2 F2/1 B0/2 F2/2+B0/1")


# Orders that the papers describe, each worked out by hand from the rule beside it. Schedule, pp, vpp, micro-batches, stage;
# F, B, I, W: forward, backward, input gradient, weight gradient; a and b the first and the second chunk of a stage; & joins a pair.
PUBLISHED_ORDERS = [
    # arXiv 2104.04473, figure 4: p − 1 − s forwards of warm-up, then one forward and one backward.
    ("1f1b", 4, 1, 8, 0, "F1a F2a F3a F4a B1a F5a B2a F6a B3a F7a B4a F8a B5a B6a B7a B8a"),
    ("1f1b", 4, 1, 8, 3, "F1a B1a F2a B2a F3a B3a F4a B4a F5a B5a F6a B6a F7a B7a F8a B8a"),
    # The same figure, interleaved: groups of p micro-batches, 2(p − 1 − s) + (v − 1)p forwards of warm-up.
    (
        *("interleaved", 4, 2, 8, 0),
        "F1a F2a F3a F4a F1b F2b F3b F4b F5a F6a F7a B1b F8a B2b F5b B3b F6b B4b F7b B1a F8b B2a B3a B4a "
        "B5b B6b B7b B8b B5a B6a B7a B8a",
    ),
    (
        *("interleaved", 4, 2, 8, 3),
        "F1a F2a F3a F4a F1b B1b F2b B2b F3b B3b F4b B4b F5a B1a F6a B2a F7a B3a F8a B4a F5b B5b F6b B6b F7b B7b "
        "F8b B8b B5a B6a B7a B8a",
    ),
    # arXiv 2401.10241, section 3.1: 1F1B whose weight gradients follow s micro-batches behind.
    ("zb-h1", 4, 1, 8, 0, "F1a F2a F3a F4a I1a W1a F5a I2a W2a F6a I3a W3a F7a I4a W4a F8a I5a W5a I6a W6a I7a W7a I8a W8a"),
    ("zb-h1", 4, 1, 8, 3, "F1a I1a F2a I2a F3a I3a F4a I4a W1a F5a I5a W2a F6a I6a W3a F7a I7a W4a F8a I8a W5a W6a W7a W8a"),
    # arXiv 2412.19437, figure 5 (8 stages, 20 micro-batches), the eight steps of its published code on the first stage: 6 forwards;
    # 1 of either direction; 3 · (I W F) of the other; 3 · two pairs; 3 · (B, pair); B and I; 3 · (W I); W.
    (
        *("dualpipe", 8, 1, 20, 0),
        "F1a F2a F3a F4a F5a F6a F7a F11b I11b W11b F12b I12b W12b F13b I13b W13b F14b F8a&B14b F15b&B1a F9a&B15b F16b&B2a "
        "F10a&B16b F17b&B3a B17b F18b&B4a B18b F19b&B5a B19b F20b&B6a B20b I7a W7a I8a W8a I9a W9a I10a W10a",
    ),
]


@pytest.mark.parametrize(("name", "pp", "vpp", "m", "stage", "told"), PUBLISHED_ORDERS)
def test_orders_of_the_papers(name: str, pp: int, vpp: int, m: int, stage: int, told: str) -> None:
    schedule, letters = build_schedule(name, pp, vpp, m), dict(enumerate("FBIW"))
    held = stage_chunks(name, pp, vpp)[:, stage].tolist()
    words: list[str] = []
    for position in np.flatnonzero(schedule.kind[stage] >= 0).tolist():
        kind, chunk, i = (int(each[stage, position]) for each in (schedule.kind, schedule.chunk, schedule.microbatch))
        word = f"{letters[kind]}{i + 1}{'ab'[held.index(chunk)]}"
        words = [*words[:-1], f"{words[-1]}&{word}"] if schedule.paired[stage, position] else [*words, word]
    assert " ".join(words) == told


@pytest.mark.parametrize(("pp", "vpp"), [(4, 2), (8, 4), (35, 3)])
def test_published_memory_of_interleaving(pp: int, vpp: int) -> None:
    """The first stage holds 1 + (p − 1)/(p·v) times as much as 1F1B's, p activations of a stage (arXiv 2205.05198, 4.2.3)."""
    assert build_schedule("interleaved", pp, vpp, 4 * pp).in_flight(0) / vpp == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))
    assert [build_schedule("1f1b", pp, 1, 4 * pp).in_flight(stage) for stage in (0, pp - 1)] == [pp, 1]


def test_backwards_that_a_stack_leaves_whole() -> None:
    schedule = usual_schedule("dualpipev", 2, 2, 4, split_backward=False)
    assert order(schedule, 0) == "F0/0 F1/0 F2/0 F0/3 B0/3 F1/3 F3/0+B1/3 F2/3+B0/0 B2/3 F3/3+B1/0 B3/3 B2/0 B3/0"
    assert all(schedule.held(stage)[:, 2:].max() == 0 for stage in (0, 1))
    split = usual_schedule("dualpipev", 2, 2, 4, split_backward=True)
    assert replayed(schedule, equal_work(schedule, 1, 2, 1)).step_s > replayed(split, equal_work(split, 1, 2, 1)).step_s
    assert usual_schedule("zb-v", 2, 2, 4, split_backward=False) is usual_schedule("zb-v", 2, 2, 4, split_backward=True)


def test_megatrons_groups_of_micro_batches() -> None:
    # The table in Megatron-Core's schedules.py: pp 2, three micro-batches a group, five in all, two chunks.
    grouped = build_schedule("interleaved", 2, 2, 5, 3)
    forwards = [word for word in order(grouped, 0).split() if word[0] == "F"]
    assert forwards == ["F0/0", "F1/0", "F2/0", "F0/2", "F1/2", "F2/2", "F3/0", "F4/0", "F3/2", "F4/2"]
    assert [order(grouped, stage).index("B") // 5 for stage in (0, 1)] == [6, 4]  # 2·(pp−1−s) + (vpp−1)·group forwards, and one
    # With the exchange of tokens overlapped one more forward, then forwards and backwards in pairs that do not need each other.
    paired = order(build_schedule("interleaved", 2, 2, 4, overlapped=True), 1)
    assert paired.startswith("F0/1 F1/1 F0/3 F1/3+B0/3 F2/1+B1/3")


@given(st.integers(2, 12), st.integers(1, 30), st.floats(0.2, 3), st.floats(0.2, 3), st.floats(0.1, 0.5))
@settings(deadline=None, max_examples=40)
def test_published_bubble_of_zb_h1(pp: int, more: int, forward: float, backward: float, share: float) -> None:
    # arXiv 2401.10241, table 2 (ZB1P in arXiv 2412.19437, table 2): (p−1)(F + B − 2W) where W is at most the rest of B and F.
    schedule = build_schedule("zb-h1", pp, 1, pp + more)
    weight = share * min(backward, forward)
    line = replayed(schedule, equal_work(schedule, forward, backward, weight))
    bubble = (pp - 1) * (forward + backward - 2 * weight)
    np.testing.assert_allclose(line.step_s - line.busy_s, bubble, rtol=1e-9)
    assert line.in_flight.tolist() == [pp] * pp  # as 1F1B's first stage


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 12), (8, 20), (16, 64)])
@pytest.mark.parametrize("pair", [2.0, 2.5, 3.0])
def test_published_bubble_of_dualpipe(pp: int, m: int, pair: float) -> None:
    # arXiv 2412.19437, table 2: (p/2 − 1)(F&B + B − 3W) in the proportions of its figure, F = W and B = 2W; p+1 activations.
    for name, shape in (("dualpipe", (pp, 1, m)), ("dualpipev", (pp // 2, 2, m // 2))):
        if shape[0] == 1:
            continue
        schedule = build_schedule(name, *shape)
        line = replayed(schedule, equal_work(schedule, 1.0, 2.0, 1.0, pair))
        assert (line.step_s - line.busy_s).max() == pytest.approx((pp / 2 - 1) * (pair + 2.0 - 3.0))
        assert line.in_flight.tolist() == [pp + 1] * len(line.in_flight)
    if pair == 3.0:
        assert (line.step_s - line.busy_s) == pytest.approx([pp / 2 - 1 + (pp / 2 - 1)] * len(line.busy_s))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zb_v_has_no_bubble_and_holds_what_1f1b_does(pp: int) -> None:
    # arXiv 2405.15362, section 4: none where F, B and W are equal, with p activations of a whole stage.
    schedule = build_schedule("zb-v", pp, 2, 3 * pp)
    line = replayed(schedule, equal_work(schedule, 1.0, 2.0, 1.0))
    begun = np.array([line.start_s[line.stage == stage].min() for stage in range(pp)])
    np.testing.assert_allclose(line.stage_end_s - begun, line.busy_s)
    assert line.in_flight.max() == 2 * pp


def test_interleaving_divides_the_bubble_and_zero_bubble_schedules_beat_it() -> None:
    pp, m = 8, 32
    steps = {}
    for name, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipev", 2)):
        schedule = build_schedule(name, pp, vpp, m)
        steps[name] = replayed(schedule, equal_work(schedule, 1.0 / vpp, 2.0 / vpp, 1.0 / vpp)).step_s - 3.0 * m
    assert steps["gpipe"] == steps["1f1b"] == pytest.approx((pp - 1) * 3.0)
    assert steps["interleaved"] == pytest.approx((pp - 1) * 3.0 / 2)
    assert steps["zb-h1"] == pytest.approx(pp - 1) and steps["zb-v"] == pytest.approx((pp - 1) / 2)


def test_recompute_runs_in_the_bubble_before_its_gradient() -> None:
    schedule = build_schedule("1f1b", 4, 1, 4)
    one = np.ones(4)
    plain = replayed(schedule, Work(one, 3 * one)).step_s
    early = replayed(schedule, Work(one, 3 * one, early_s=one)).step_s
    assert plain == 4.0 * (4 + 3) and early == plain - 3.0  # the gradient passes three stages without waiting for their recompute


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (("zb-h2", 4, 1, 8), "zb-h2"),
        (("zb-h1", 1, 1, 8), "pp > 1"),
        (("zb-v", 4, 1, 8), "two chunks"),
        (("dualpipe", 3, 1, 8), "even"),
        (("dualpipe", 4, 1, 6), "at least 2·pp = 8"),
        (("dualpipev", 4, 2, 7), "at least 2·pp = 8"),
        (("interleaved", 4, 2, 10, 4), "leave none or at least pp over"),
        (("interleaved", 4, 2, 8, 3), "between pp"),
        (("1f1b", 4, 1, 8, 4), "no groups"),
    ],
)
def test_impossible_schedules_say_why(shape: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schedule(*shape)
    with pytest.raises(ValueError, match=words):
        build_schedule(*shape)


def test_where_chunks_and_losses_are() -> None:
    assert stage_chunks("zb-v", 3, 2).tolist() == [[0, 1, 2], [5, 4, 3]]
    assert stage_chunks("dualpipe", 4, 1).tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert loss_stages("1f1b", 3, 1).tolist() == [False, False, True]
    assert loss_stages("dualpipev", 3, 2).tolist() == [True, False, False]
    assert loss_stages("dualpipe", 4, 1).tolist() == [True, False, False, True]
